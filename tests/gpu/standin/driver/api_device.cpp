// Devices and contexts.

#include <algorithm>
#include <cstring>

#include "entry.h"

using standin::current_device;
using standin::Device;

namespace {

constexpr int kDriverVersion = 13020;
constexpr int kMultiprocessors = 4;

Device* device_at(CUdevice index) {
  auto& all = standin::devices();
  bool is_there = index >= 0 && static_cast<size_t>(index) < all.size();
  return is_there ? all[index].get() : nullptr;
}

}  // namespace

CUDA_ENTRY cuInit(unsigned int flags) {
  ENTER(Nothing);
  return flags == 0 ? standin::init_driver() : CUDA_ERROR_INVALID_VALUE;
}

CUDA_ENTRY cuDriverGetVersion(int* version) {
  ENTER(Nothing);
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceGetCount(int* count) {
  ENTER(Driver);
  *count = static_cast<int>(standin::devices().size());
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(Driver);
  if (!device_at(ordinal)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceGetName(char* name, int length, CUdevice device) {
  ENTER(Driver);
  if (!device_at(device) || length <= 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::strncpy(name, "gflow stand-in (no GPU)", length - 1);
  name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  ENTER(Driver);
  if (!device_at(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  std::memset(uuid->bytes, 0, sizeof uuid->bytes);
  std::memcpy(uuid->bytes, "stand-in", 8);
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER(Driver);
  if (!device_at(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = kMultiprocessors;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      *value = 64;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      *value = 0x7fffffff;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      *value = 65535;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      *value = 48 * 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  ENTER(Driver);
  if (!device_at(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *bytes = standin::device_memory().total();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice index) {
  ENTER(Driver);
  Device* device = device_at(index);
  if (!device) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *context = device->context();
  return CUDA_SUCCESS;
}

// The context stays alive: it costs nothing.
CUDA_ENTRY cuDevicePrimaryCtxRelease(CUdevice index) {
  ENTER(Driver);
  return device_at(index) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUDA_ENTRY cuDevicePrimaryCtxGetState(CUdevice index, unsigned int* flags, int* active) {
  ENTER(Driver);
  *flags = 0;
  *active = 1;
  return device_at(index) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUDA_ENTRY cuCtxSetCurrent(CUcontext context) {
  ENTER(Driver);
  Device* device = standin::device_of(context);
  if (context != nullptr && !device) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  current_device() = device;
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuCtxGetCurrent(CUcontext* context) {
  ENTER(Driver);
  *context = current_device() ? current_device()->context() : nullptr;
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuCtxGetDevice(CUdevice* device) {
  ENTER(Driver);
  if (!current_device()) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *device = current_device()->index();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuCtxSynchronize() {
  ENTER(Context);
  standin::count_host_wait();
  for (auto& stream : current_device()->streams()) {
    stream->wait();
  }
  return current_device()->fault();
}

CUDA_ENTRY cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(Context);
  if (least) {
    *least = 0;
  }
  if (greatest) {
    *greatest = -5;
  }
  return CUDA_SUCCESS;
}
