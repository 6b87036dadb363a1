// A kernel image as NVRTC produces it: CUBIN or PTX. Its code can't run here, but its metadata must
// match the launches.

#pragma once

#include <cuda.h>

#include <map>
#include <string>
#include <vector>

namespace standin {

// The metadata of a kernel; from PTX only the name is read.
struct KernelImage {
  // The size of each argument. Empty if the image doesn't say.
  std::vector<unsigned> argument_bytes;
  // 0 if the image doesn't say.
  unsigned max_threads = 0;
  unsigned shared_bytes = 0;
};

struct Image {
  // Keyed by name.
  std::map<std::string, KernelImage> kernels;
};

// Reads the image, or returns the error with which a device of this compute capability rejects it.
CUresult read_image(const void* data, unsigned capability, Image& image);

}  // namespace standin
