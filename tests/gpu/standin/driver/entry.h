// What every driver function checks on entry.

#pragma once

#include <cuda.h>

#include <memory>
#include <string>

#include "device.h"
#include "exported.h"

namespace standin {

enum class Needs {
  Nothing,
  // cuInit was called in this process.
  Driver,
  // In addition, a context is current on the calling thread, and its device has had no fault.
  Context,
};

// The name of a function as programs write it: "cuMemAlloc" for cuMemAlloc_v2.
std::string without_version(std::string function);

// CUDA_SUCCESS if the function may proceed.
CUresult enter(const char* function, Needs needs);
CUresult init_driver();

// The stream of a handle; 0 is the default stream of the current device. Null if there is no such
// stream.
std::shared_ptr<Stream> stream_of(CUstream handle);

// Sets the calling thread's capture mode (initially CUDA's default) and returns the previous one.
CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode);
// Adjusts the number of streams being captured in this process, all of them in global mode.
void count_captures(int more);
// Whether an uncapturable call from this thread would invalidate a capture now.
bool would_invalidate_capture();

// How many times a host thread has waited for a device.
void count_host_wait();
uint64_t host_waits();

}  // namespace standin

// Returns from the enclosing function unless it may proceed.
#define ENTER(needs)                                                                               \
  if (CUresult refusal = standin::enter(__func__, standin::Needs::needs); refusal != CUDA_SUCCESS) \
  return refusal

#define CUDA_ENTRY extern "C" EXPORTED CUresult CUDAAPI
