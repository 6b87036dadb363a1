// Looking up functions by name, and error texts.

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "entry.h"

namespace {

struct Named {
  CUresult code;
  const char* name;
  const char* words;
};

#define NAMED(code, words) {code, #code, words}
constexpr Named kErrors[] = {
    NAMED(CUDA_SUCCESS, "no error"),
    NAMED(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    NAMED(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    NAMED(CUDA_ERROR_NOT_INITIALIZED, "the driver is not initialised in this process"),
    NAMED(CUDA_ERROR_NO_DEVICE, "there is no device"),
    NAMED(CUDA_ERROR_INVALID_DEVICE, "there is no such device"),
    NAMED(CUDA_ERROR_INVALID_IMAGE, "this is no kernel image"),
    NAMED(CUDA_ERROR_INVALID_CONTEXT, "no context, or an invalid one, is current"),
    NAMED(CUDA_ERROR_NO_BINARY_FOR_GPU, "the image is for another architecture"),
    NAMED(CUDA_ERROR_INVALID_HANDLE, "there is nothing behind this handle"),
    NAMED(CUDA_ERROR_NOT_FOUND, "this name was not found"),
    NAMED(CUDA_ERROR_NOT_READY, "not done yet"),
    NAMED(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal address was accessed on the device"),
    NAMED(CUDA_ERROR_LAUNCH_FAILED, "a kernel failed"),
    NAMED(CUDA_ERROR_NOT_PERMITTED, "not permitted here"),
    NAMED(CUDA_ERROR_NOT_SUPPORTED, "not supported"),
    NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted while a stream is captured"),
    NAMED(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef NAMED

const Named* find(CUresult code) {
  for (const Named& error : kErrors) {
    if (error.code == code) {
      return &error;
    }
  }
  return nullptr;
}

}  // namespace

CUDA_ENTRY cuGetErrorName(CUresult code, const char** name) {
  const Named* error = find(code);
  *name = error ? error->name : nullptr;
  return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_ENTRY cuGetErrorString(CUresult code, const char** words) {
  const Named* error = find(code);
  *words = error ? error->words : nullptr;
  return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_ENTRY cuGetProcAddress(const char* symbol, void** function, int, cuuint64_t,
                            CUdriverProcAddressQueryResult* status) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuDriverGetVersion), &self);
  void* library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = nullptr;
  // Only the newest version of each function exists here.
  for (const char* version : {"_v3", "_v2", ""}) {
    *function = dlsym(library, (std::string(symbol) + version).c_str());
    if (*function) {
      break;
    }
  }
  dlclose(library);
  if (status) {
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Function tables that NVIDIA's libraries use among themselves. NVRTC asks for one as soon as it
// can load a driver. It copes with a refusal, but not with the function missing.
CUDA_ENTRY cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_SUPPORTED;
}
