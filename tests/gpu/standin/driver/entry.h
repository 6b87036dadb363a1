// The way into every function of the driver: what must be right before it does anything.

#pragma once

#include <cuda.h>

#include <memory>
#include <string>

#include "device.h"
#include "exported.h"

namespace standin {

enum class Needs {
  Nothing,
  // cuInit has been called, in this process.
  Driver,
  // And a context is current in the calling thread, on a device that has had no fault.
  Context,
};

// The name of a function as programs write it, "cuMemAlloc" for cuMemAlloc_v2.
std::string without_version(std::string function);

// CUDA_SUCCESS if the function may go on.
CUresult enter(const char* function, Needs needs);
CUresult begin_driver();

// The stream behind a handle, where 0 is the default stream of the current device. None if there
// is no such stream.
std::shared_ptr<Stream> stream_behind(CUstream handle);

// How the calling thread gets on with streams that are captured, which is CUDA's default at first;
// returns what it was.
CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode);
// Counts the streams of this process that are captured, all of them in global mode.
void count_captures(int more);
// Whether what cannot be captured would spoil a capture now, if the calling thread did it.
bool spoils_a_capture();

// The number of times that a thread of the host waited for a device.
void count_host_wait();
uint64_t host_waits();

}  // namespace standin

// Returns from the function it is used in, unless that may go on.
#define ENTER(needs)                                                                               \
  if (CUresult refusal = standin::enter(__func__, standin::Needs::needs); refusal != CUDA_SUCCESS) \
  return refusal

#define CUDA_ENTRY extern "C" EXPORTED CUresult CUDAAPI
