// A device and its primary context: memory, streams, and the fault that broke it.

#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"
#include "stream.h"

namespace standin {

class Device {
 public:
  Device(int index, DeviceMemory& memory) : memory_(memory), index_(index) {}

  int index() const { return index_; }
  DeviceMemory& memory() { return memory_; }
  CUcontext context() { return reinterpret_cast<CUcontext>(this); }

  std::shared_ptr<Stream> new_stream(int priority);
  // An ordinary stream; CUDA's default stream would synchronize with the others.
  std::shared_ptr<Stream> default_stream();
  std::vector<std::shared_ptr<Stream>> streams();

  // After a fault, nothing works on the device.
  CUresult fault() const { return fault_; }
  void fail(CUresult fault) { fault_ = fault; }

 private:
  DeviceMemory& memory_;
  const int index_;
  std::atomic<CUresult> fault_{CUDA_SUCCESS};
  std::mutex mutex_;
  std::shared_ptr<Stream> default_stream_;
  std::vector<std::weak_ptr<Stream>> streams_;
};

// All devices of this process; STANDIN_DEVICES sets the number.
std::vector<std::unique_ptr<Device>>& devices();
DeviceMemory& device_memory();
// The device whose context is current on the calling thread, or null.
Device*& current_device();
// The device of this context, or null.
Device* device_of(CUcontext context);

}  // namespace standin
