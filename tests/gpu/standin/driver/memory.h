// Device memory: addresses that the host can't touch, and their contents.
//
// Every device has an address range mapped without access rights, so a stray host read or write
// faults. The contents live elsewhere, at the alias, which only streams use. New memory is filled
// with NaN, not zeros. Freed memory is unmapped and its addresses are never reused, so a use after
// free is detected.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "access.h"
#include "history.h"

namespace standin {

struct Allocation {
  uint64_t address = 0;
  size_t bytes = 0;
  int device = 0;
  bool is_live = true;
  // Guarded by the order lock (see order.h).
  History history;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(int devices);

  // nullopt if the device is out of memory.
  std::optional<uint64_t> allocate(int device, size_t bytes);
  bool free(uint64_t address);

  size_t total() const { return bytes_per_device_; }
  size_t available(int device);

  bool is_device_address(uint64_t address) const;
  void* alias(uint64_t address) const;
  // The allocation that holds this address, or used to.
  std::shared_ptr<Allocation> find(uint64_t address);
  // Why work on this device can't make the access; "" if it can. Device -1 means a copy, which can
  // reach all devices.
  std::string problem_with(const Access& access, int device);

 private:
  std::mutex mutex_;
  size_t bytes_per_device_;
  int devices_;
  uint64_t base_ = 0;
  uint64_t alias_base_ = 0;
  std::vector<uint64_t> next_;
  std::vector<size_t> used_;
  std::map<uint64_t, std::shared_ptr<Allocation>> allocations_;
  std::deque<uint64_t> freed_;
};

}  // namespace standin
