// The kernels that can be launched: those of rust/cuda/kernels, built for the host, with
// the ranges that each of them reads and writes.
//
// The accesses are written by hand from the kernels' documentation, not observed: anything else
// that a kernel touches goes unnoticed.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "access.h"

namespace standin {

class Kernel {
 public:
  // Copies the arguments of a launch; nullopt if they don't fit this kernel.
  struct Arguments {
    std::vector<uint64_t> values;

    uint64_t number(size_t index) const { return values[index]; }
  };

  // nullopt if there is no such kernel for the host.
  static std::optional<Kernel> find(const std::string& name);

  // One letter for each argument; see host_kernels.h.
  const std::string& kinds() const { return kinds_; }
  std::vector<unsigned> argument_bytes() const;

  Arguments copy(void** arguments) const;
  std::vector<Access> accesses(const Arguments& arguments) const;
  // Runs it on this thread. Returns the result of gflow_host_launch.
  int run(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
          Arguments arguments) const;

 private:
  Kernel(std::string name, std::string kinds) : name_(std::move(name)), kinds_(std::move(kinds)) {}

  std::string name_;
  std::string kinds_;
};

}  // namespace standin
