// Memory: allocation, copies and fills.

#include <cstdlib>
#include <cstring>

#include "access.h"
#include "entry.h"

using standin::Access;
using standin::current_device;
using standin::Device;
using standin::reading;
using standin::Stream;
using standin::stream_of;
using standin::Work;
using standin::writing;

namespace {

bool is_on_device(uint64_t address) { return standin::device_memory().is_device_address(address); }

void* alias(CUdeviceptr address) { return standin::device_memory().alias(address); }

CUresult queue(CUstream handle, Work work) {
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  stream->submit(std::move(work));
  return CUDA_SUCCESS;
}

// Treats pageable host memory like pinned memory: the copy happens when the stream reaches it, so
// the memory must live until then. CUDA is more lenient with pageable memory.
CUresult copy_to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (is_on_device(reinterpret_cast<uint64_t>(from))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return queue(stream, {.name = "copy to the device",
                        .accesses = {writing(to, bytes)},
                        .run = [=] { std::memcpy(alias(to), from, bytes); },
                        .reaches_all_devices = true});
}

CUresult copy_to_host(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (is_on_device(reinterpret_cast<uint64_t>(to))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return queue(stream, {.name = "copy to the host",
                        .accesses = {reading(from, bytes)},
                        .run = [=] { std::memcpy(to, alias(from), bytes); },
                        .reaches_all_devices = true});
}

CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return queue(stream, {.name = "copy on the device",
                        .accesses = {reading(from, bytes), writing(to, bytes)},
                        .run = [=] { std::memmove(alias(to), alias(from), bytes); },
                        .reaches_all_devices = true});
}

CUresult fill(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  return queue(stream, {.name = "fill", .accesses = {writing(at, bytes)}, .run = [=] {
                          std::memset(alias(at), value, bytes);
                        }});
}

CUresult wait_for_default_stream(CUresult queued) {
  if (queued != CUDA_SUCCESS) {
    return queued;
  }
  standin::count_host_wait();
  current_device()->default_stream()->wait();
  return current_device()->fault();
}

}  // namespace

CUDA_ENTRY cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  ENTER(Context);
  if (standin::would_invalidate_capture()) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (bytes == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto given = standin::device_memory().allocate(current_device()->index(), bytes);
  if (!given) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = *given;
  return CUDA_SUCCESS;
}

// Waits for everything queued on the device, as the real driver does.
CUDA_ENTRY cuMemFree(CUdeviceptr address) {
  ENTER(Context);
  if (address == 0) {
    return CUDA_SUCCESS;
  }
  auto allocation = standin::device_memory().find(address);
  if (!allocation) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  standin::count_host_wait();
  for (auto& stream : standin::devices()[allocation->device]->streams()) {
    stream->drain();
  }
  return standin::device_memory().free(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_ENTRY cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream handle) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (bytes == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto given = standin::device_memory().allocate(stream->device().index(), bytes);
  if (!given) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = *given;
  // The memory is usable at once, but its users must be ordered after this.
  return queue(handle, {.name = "allocation", .accesses = {writing(*given, bytes)}, .run = [] {}});
}

CUDA_ENTRY cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  ENTER(Context);
  if (address == 0) {
    return CUDA_SUCCESS;
  }
  auto allocation = standin::device_memory().find(address);
  if (!allocation || allocation->address != address || !allocation->is_live) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return queue(handle, {.name = "free",
                        .accesses = {writing(address, allocation->bytes)},
                        .run = [=] { standin::device_memory().free(address); },
                        .reaches_all_devices = true});
}

CUDA_ENTRY cuMemGetInfo(size_t* available, size_t* total) {
  ENTER(Context);
  *available = standin::device_memory().available(current_device()->index());
  *total = standin::device_memory().total();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuMemHostAlloc(void** address, size_t bytes, unsigned int) {
  ENTER(Context);
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUDA_ENTRY cuMemAllocHost(void** address, size_t bytes) {
  return cuMemHostAlloc(address, bytes, 0);
}

CUDA_ENTRY cuMemFreeHost(void* address) {
  ENTER(Context);
  std::free(address);
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ENTER(Context);
  return copy_to_device(to, from, bytes, stream);
}

CUDA_ENTRY cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER(Context);
  return copy_to_host(to, from, bytes, stream);
}

CUDA_ENTRY cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER(Context);
  return copy_on_device(to, from, bytes, stream);
}

CUDA_ENTRY cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  ENTER(Context);
  return fill(at, value, bytes, stream);
}

CUDA_ENTRY cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  ENTER(Context);
  return wait_for_default_stream(copy_to_device(to, from, bytes, nullptr));
}

CUDA_ENTRY cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  ENTER(Context);
  return wait_for_default_stream(copy_to_host(to, from, bytes, nullptr));
}

CUDA_ENTRY cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  ENTER(Context);
  return wait_for_default_stream(copy_on_device(to, from, bytes, nullptr));
}

CUDA_ENTRY cuMemsetD8(CUdeviceptr at, unsigned char value, size_t bytes) {
  ENTER(Context);
  return wait_for_default_stream(fill(at, value, bytes, nullptr));
}

CUDA_ENTRY cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER(Driver);
  auto allocation = standin::device_memory().find(address);
  if (!is_on_device(address) || !allocation || !allocation->is_live) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned int*>(value) = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = allocation->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = standin::devices()[allocation->device]->context();
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
