// An image of kernels, as NVRTC makes it: a CUBIN, or PTX. Its code cannot run here, but what it
// says about its kernels must fit what is launched.

#pragma once

#include <cuda.h>

#include <map>
#include <string>
#include <vector>

namespace standin {

// What an image says about a kernel; of PTX only the name is read.
struct KernelImage {
  // The size of every argument. Empty if the image does not say.
  std::vector<unsigned> argument_bytes;
  // 0 if the image does not say.
  unsigned most_threads = 0;
  unsigned shared_bytes = 0;
};

struct Image {
  // By name.
  std::map<std::string, KernelImage> kernels;
};

// CUDA_SUCCESS, and the image is read; or why a device with this compute capability refuses it.
CUresult read_image(const void* data, unsigned capability, Image& image);

}  // namespace standin
