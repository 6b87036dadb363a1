// Modules and kernel launches.

#include <array>
#include <cstring>

#include "entry.h"
#include "handles.h"
#include "image.h"
#include "kernel.h"
#include "reports.h"

using standin::current_device;
using standin::Device;
using standin::Image;
using standin::Kernel;
using standin::KernelImage;
using standin::Wrong;

namespace {

constexpr unsigned kCapability = 90;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kMostSharedBytes = 48 * 1024;
constexpr unsigned kLongestGrid = 65535;

struct Function {
  Kernel kernel;
  KernelImage image;
  std::string name;
  Device& device;
};

struct Module {
  Image image;
  Device& device;
  std::mutex mutex;
  std::vector<Function*> functions;
};

standin::Handles<Module>& modules() {
  static auto* handles = new standin::Handles<Module>;
  return *handles;
}

standin::Handles<Function>& functions() {
  static auto* handles = new standin::Handles<Function>;
  return *handles;
}

bool is_launchable(const Function& function, const std::array<unsigned, 3>& grid,
                   const std::array<unsigned, 3>& block, unsigned shared_bytes) {
  uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
  unsigned most = function.image.max_threads ? function.image.max_threads : kMostThreads;
  return threads > 0 && threads <= std::min(most, kMostThreads) && block[2] <= 64 && grid[0] > 0 &&
         grid[0] <= 0x7fffffff && grid[1] > 0 && grid[1] <= kLongestGrid && grid[2] > 0 &&
         grid[2] <= kLongestGrid && shared_bytes <= kMostSharedBytes - function.image.shared_bytes;
}

}  // namespace

CUDA_ENTRY cuModuleLoadData(CUmodule* module, const void* data) {
  ENTER(Context);
  auto made = std::make_shared<Module>(Image{}, *current_device());
  CUresult outcome = standin::read_image(data, kCapability, made->image);
  if (outcome == CUDA_SUCCESS) {
    *module = reinterpret_cast<CUmodule>(modules().add(std::move(made)));
  }
  return outcome;
}

CUDA_ENTRY cuModuleLoadDataEx(CUmodule* module, const void* data, unsigned int, CUjit_option*,
                              void**) {
  return cuModuleLoadData(module, data);
}

CUDA_ENTRY cuModuleUnload(CUmodule handle) {
  ENTER(Context);
  auto module = modules().take(handle);
  if (!module) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  for (Function* function : module->functions) {
    functions().take(function);
  }
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  ENTER(Context);
  auto module = modules().find(handle);
  if (!module) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  auto in_image = module->image.kernels.find(name);
  if (in_image == module->image.kernels.end()) {
    return CUDA_ERROR_NOT_FOUND;
  }
  auto kernel = Kernel::find(name);
  if (!kernel) {
    standin::report(Wrong::Fault, std::string(name) +
                                      " is in the image, but not among the kernels of the host "
                                      "with the arguments that the stand-in knows");
    return CUDA_ERROR_NOT_FOUND;
  }
  const KernelImage& image = in_image->second;
  if (!image.argument_bytes.empty() && image.argument_bytes != kernel->argument_bytes()) {
    standin::report(Wrong::Fault,
                    std::string(name) + " has other arguments in the image than on the host");
    return CUDA_ERROR_NOT_FOUND;
  }
  auto made = std::make_shared<Function>(Function{*kernel, image, name, module->device});
  std::lock_guard lock(module->mutex);
  module->functions.push_back(functions().add(made));
  *function = reinterpret_cast<CUfunction>(made.get());
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  ENTER(Context);
  auto function = functions().find(handle);
  if (!function) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = static_cast<int>(function->image.max_threads ? function->image.max_threads
                                                            : kMostThreads);
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(function->image.shared_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = kCapability;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y,
                          unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                          unsigned int block_z, unsigned int shared_bytes, CUstream stream_handle,
                          void** arguments, void** extra) {
  ENTER(Context);
  auto function = functions().find(handle);
  auto stream = standin::stream_of(stream_handle);
  if (!function || !stream || &stream->device() != &function->device) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  std::array grid{grid_x, grid_y, grid_z};
  std::array block{block_x, block_y, block_z};
  if (!is_launchable(*function, grid, block, shared_bytes) || !arguments || extra) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // CUDA accepts fewer threads than the bound, but no gflow kernel is written for that.
  if (unsigned bound = function->image.max_threads; bound && bound != block_x) {
    standin::report(Wrong::Fault, function->name + " was launched with " + std::to_string(block_x) +
                                      " threads, but is written for " + std::to_string(bound));
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto given = function->kernel.copy(arguments);
  auto* device = &stream->device();
  stream->submit({.name = function->name, .accesses = function->kernel.accesses(given), .run = [=] {
                    int code = function->kernel.run(grid.data(), block.data(), shared_bytes, given);
                    if (code != 0) {
                      standin::report(Wrong::Fault, function->name +
                                                        " could not be launched on "
                                                        "the host, code " +
                                                        std::to_string(code));
                      device->fail(CUDA_ERROR_LAUNCH_FAILED);
                    }
                  }});
  return CUDA_SUCCESS;
}
