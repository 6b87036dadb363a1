#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace standin {

namespace {

constexpr uint64_t kPage = 4096;
// Addresses are never reused, so the range must be large.
constexpr uint64_t kAddressesPerDevice = uint64_t{1} << 40;
constexpr size_t kBytesPerDevice = size_t{8} << 30;
// Satisfies every alignment that CUDA guarantees.
constexpr uint64_t kAlignment = 512;
// Fills memory with NaN in every float type.
constexpr int kPoison = 0xff;
// How many freed allocations are remembered for reports.
constexpr size_t kRememberedFrees = 100'000;

uint64_t reserve(size_t bytes) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    std::perror("standin: no room for the addresses of device memory");
    std::abort();
  }
  return reinterpret_cast<uint64_t>(range);
}

uint64_t pages_down(uint64_t address) { return address & ~(kPage - 1); }
uint64_t pages_up(uint64_t address) { return pages_down(address + kPage - 1); }

std::string hex(uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

DeviceMemory::DeviceMemory(int devices)
    : bytes_per_device_(kBytesPerDevice), devices_(devices), used_(devices) {
  base_ = reserve(devices * kAddressesPerDevice);
  alias_base_ = reserve(devices * kAddressesPerDevice);
  for (int device = 0; device < devices; ++device) {
    next_.push_back(base_ + device * kAddressesPerDevice + kPage);
  }
}

std::optional<uint64_t> DeviceMemory::allocate(int device, size_t bytes) {
  std::lock_guard lock(mutex_);
  uint64_t limit = base_ + (device + 1) * kAddressesPerDevice;
  uint64_t first_page = next_[device];
  if (bytes > bytes_per_device_ - used_[device] ||
      limit - first_page < pages_up(bytes) + 2 * kPage) {
    return std::nullopt;
  }
  // Placed as close to the end of its last page as alignment allows, with an unmapped page behind
  // it: a kernel that runs past the end faults.
  uint64_t end_page = pages_up(first_page + bytes);
  uint64_t address = (end_page - bytes) & ~(kAlignment - 1);
  uint64_t shift = alias_base_ - base_;
  auto* pages = reinterpret_cast<void*>(first_page + shift);
  if (mprotect(pages, end_page - first_page, PROT_READ | PROT_WRITE) != 0) {
    return std::nullopt;
  }
  std::memset(pages, kPoison, end_page - first_page);
  next_[device] = end_page + kPage;
  used_[device] += bytes;
  auto allocation = std::make_shared<Allocation>();
  allocation->address = address;
  allocation->bytes = bytes;
  allocation->device = device;
  allocations_.emplace(address, std::move(allocation));
  return address;
}

bool DeviceMemory::free(uint64_t address) {
  std::lock_guard lock(mutex_);
  auto found = allocations_.find(address);
  if (found == allocations_.end() || !found->second->is_live) {
    return false;
  }
  Allocation& allocation = *found->second;
  allocation.is_live = false;
  used_[allocation.device] -= allocation.bytes;
  uint64_t shift = alias_base_ - base_;
  uint64_t start = pages_down(address) + shift;
  size_t length = pages_up(address + allocation.bytes) - pages_down(address);
  madvise(reinterpret_cast<void*>(start), length, MADV_DONTNEED);
  mprotect(reinterpret_cast<void*>(start), length, PROT_NONE);
  freed_.push_back(address);
  if (freed_.size() > kRememberedFrees) {
    allocations_.erase(freed_.front());
    freed_.pop_front();
  }
  return true;
}

size_t DeviceMemory::available(int device) {
  std::lock_guard lock(mutex_);
  return bytes_per_device_ - used_[device];
}

bool DeviceMemory::is_device_address(uint64_t address) const {
  return address >= base_ && address < base_ + devices_ * kAddressesPerDevice;
}

void* DeviceMemory::alias(uint64_t address) const {
  return reinterpret_cast<void*>(address - base_ + alias_base_);
}

std::shared_ptr<Allocation> DeviceMemory::find(uint64_t address) {
  std::lock_guard lock(mutex_);
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) {
    return nullptr;
  }
  auto found = std::prev(after)->second;
  // The end address counts too, so that an overrun is attributed to this allocation.
  return address <= found->address + found->bytes ? found : nullptr;
}

std::string DeviceMemory::problem_with(const Access& access, int device) {
  if (access.bytes == 0) {
    return "";
  }
  std::string where = std::to_string(access.bytes) + " bytes at " + hex(access.address);
  if (!is_device_address(access.address)) {
    return where + ", which is not device memory";
  }
  auto allocation = find(access.address);
  if (!allocation) {
    return where + ", which were never allocated";
  }
  std::string of =
      " (of " + std::to_string(allocation->bytes) + " bytes at " + hex(allocation->address) + ")";
  if (!allocation->is_live) {
    return where + ", which have been freed" + of;
  }
  if (access.address + access.bytes > allocation->address + allocation->bytes) {
    return where + ", which runs past the end" + of;
  }
  if (device >= 0 && allocation->device != device) {
    return where + ", which is memory of device " + std::to_string(allocation->device);
  }
  return "";
}

}  // namespace standin
