#include "memory.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "streams.h"

namespace standin_device {
namespace {

constexpr size_t kRounding = 512;

struct Block {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  c10::Stream home;
  // Other streams that have used the block.
  std::vector<c10::Stream> others;
  // One event per stream in `others`, recorded when the block was freed.
  std::vector<CUevent> ends;
};

class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(kType, device);
    if (bytes == 0) return {nullptr, where};
    bytes = (bytes + kRounding - 1) / kRounding * kRounding;
    Block* block = take(current_stream(device), bytes);
    return {reinterpret_cast<void*>(block->address), block, &free_block, where};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const auto device = current_device();
    ContextGuard context(device);
    CHECK_DRIVER(cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to),
                                   reinterpret_cast<CUdeviceptr>(from), bytes,
                                   raw(current_stream(device))));
  }

  void record(const c10::DataPtr& memory, const c10::Stream& stream) {
    // Ignores memory that another allocator made.
    if (memory.get_deleter() != &free_block || memory.get_context() == nullptr) return;
    auto* block = static_cast<Block*>(memory.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream != block->home && std::ranges::find(block->others, stream) == block->others.end()) {
      block->others.push_back(stream);
    }
  }

 private:
  static void free_block(void* block);

  Block* take(const c10::Stream& stream, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ContextGuard context(stream.device_index());
    reclaim();
    auto& fitting = free_[{stream.device_index(), stream.id(), bytes}];
    if (!fitting.empty()) {
      Block* block = fitting.back();
      fitting.pop_back();
      return block;
    }
    CUdeviceptr address = 0;
    CHECK_DRIVER(cuMemAlloc(&address, bytes));
    return new Block{address, bytes, stream, {}, {}};
  }

  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block->others.empty()) return add_to_free(block);
    ContextGuard context(block->home.device_index());
    for (const auto& stream : block->others) {
      CUevent end = nullptr;
      CHECK_DRIVER(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING));
      CHECK_DRIVER(cuEventRecord(end, raw(stream)));
      block->ends.push_back(end);
    }
    pending_.push_back(block);
  }

  // Moves blocks that all streams are done with to the free list. Call with the lock held.
  void reclaim() {
    std::erase_if(pending_, [&](Block* block) {
      ContextGuard context(block->home.device_index());
      const auto is_done = [](CUevent end) { return cuEventQuery(end) == CUDA_SUCCESS; };
      if (!std::ranges::all_of(block->ends, is_done)) return false;
      for (CUevent end : block->ends) {
        // There is nothing left to wait for; this only tells the race checker about the order.
        CHECK_DRIVER(cuStreamWaitEvent(raw(block->home), end, 0));
        CHECK_DRIVER(cuEventDestroy(end));
      }
      block->ends.clear();
      block->others.clear();
      add_to_free(block);
      return true;
    });
  }

  void add_to_free(Block* block) {
    free_[{block->home.device_index(), block->home.id(), block->bytes}].push_back(block);
  }

  std::mutex mutex_;
  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
};

Memory& memory() {
  // Never destroyed: tensors may outlive everything.
  static auto* memory = new Memory;
  return *memory;
}

void Memory::free_block(void* block) {
  try {
    memory().release(static_cast<Block*>(block));
  } catch (const std::exception& error) {
    TORCH_WARN("stand-in: memory was lost: ", error.what());
  }
}

}  // namespace

c10::Allocator* allocator() { return &memory(); }

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  memory().record(data, stream);
}

REGISTER_ALLOCATOR(kType, &memory());

}  // namespace standin_device
