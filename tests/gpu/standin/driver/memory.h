// Device memory: addresses that the host cannot touch, and what lies behind them.
//
// Every device has a range of addresses that are mapped without any access, so that a stray read
// or write of the host faults. Its contents live elsewhere, at the alias, which only streams use.
// New memory is full of NaN, not of zeros. Freed memory is taken away and its addresses are not
// given out again: touching it is seen.

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
  // Guarded by the lock of the order of work (see order.h).
  History history;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(int devices);

  // Nothing if the device has no more.
  std::optional<uint64_t> allocate(int device, size_t bytes);
  bool free(uint64_t address);

  size_t total() const { return bytes_per_device_; }
  size_t available(int device);

  bool is_device_address(uint64_t address) const;
  void* alias(uint64_t address) const;
  // The allocation that holds this address, or has held it.
  std::shared_ptr<Allocation> find(uint64_t address);
  // Why the access cannot be made by work on this device; "" if it can. A device of -1 stands for
  // copies, which reach all devices.
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
