// The kernels that can be launched: those of rust/cuda/kernels/kernels.cu, built for the host, with
// what each of them reads and writes.
//
// The accesses are written here by hand, from the promises of the kernels, not taken from what they
// do: what a kernel does beyond its promise is not seen.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "access.h"

namespace standin {

class Kernel {
 public:
  // A copy of the arguments of a launch, and nothing if they cannot be those of this kernel.
  struct Arguments {
    std::vector<uint64_t> values;

    uint64_t number(size_t index) const { return values[index]; }
  };

  // Nothing if the host has no such kernel.
  static std::optional<Kernel> find(const std::string& name);

  // One letter for each argument; see host_kernels.h.
  const std::string& kinds() const { return kinds_; }
  std::vector<unsigned> argument_bytes() const;

  Arguments copy(void** arguments) const;
  std::vector<Access> accesses(const Arguments& arguments) const;
  // Runs it on this thread. What it gives is that of gflow_host_launch.
  int run(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
          Arguments arguments) const;

 private:
  Kernel(std::string name, std::string kinds) : name_(std::move(name)), kinds_(std::move(kinds)) {}

  std::string name_;
  std::string kinds_;
};

}  // namespace standin
