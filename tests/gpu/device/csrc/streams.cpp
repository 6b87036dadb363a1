#include "streams.h"

#include <array>
#include <map>
#include <mutex>

namespace standin_device {
namespace {

constexpr int kMostDevices = 16;
// Each stand-in stream is a thread, so the pools are smaller than the 32 streams of torch's CUDA.
constexpr c10::StreamId kInPool = 8;

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kMostDevices, "no such device: ", static_cast<int>(device));
  return device;
}

}  // namespace

c10::DeviceIndex current_device() { return current; }

void set_device(c10::DeviceIndex device) {
  enter_context(device);
  current = device;
}

c10::Stream default_stream(c10::DeviceIndex device) { return stream_of(device, 0); }

c10::Stream stream_from_pool(c10::DeviceIndex device, bool high_priority) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceIndex, bool>, c10::StreamId> next;
  std::lock_guard<std::mutex> lock(mutex);
  const auto number = next[{device, high_priority}]++ % kInPool;
  return stream_of(device, 1 + number + (high_priority ? kInPool : 0));
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_streams[checked(device)]);
}

c10::Stream set_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  current_streams[stream.device_index()] = stream.id();
  return before;
}

CUstream raw(const c10::Stream& stream) {
  if (stream.id() == 0) return nullptr;
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceIndex, c10::StreamId>, CUstream> made;
  std::lock_guard<std::mutex> lock(mutex);
  auto& handle = made[{stream.device_index(), stream.id()}];
  if (handle == nullptr) {
    ContextGuard context(stream.device_index());
    const int priority = stream.id() > kInPool ? -1 : 0;
    CHECK_DRIVER(cuStreamCreateWithPriority(&handle, CU_STREAM_NON_BLOCKING, priority));
  }
  return handle;
}

void synchronize(const c10::Stream& stream) {
  ContextGuard context(stream.device_index());
  CHECK_DRIVER(cuStreamSynchronize(raw(stream)));
}

}  // namespace standin_device
