#include "kernel.h"

#include <cstring>

#include "../../host_kernels/host_kernels.h"
#include "device.h"

namespace standin {

namespace {

using Arguments = Kernel::Arguments;

// The type in a kernel's name: at the end, as in "gflow_pack_bf16", or before that.
size_t element_bytes(const std::string& name, size_t from_end) {
  size_t end = name.size();
  for (size_t skipped = 0; skipped < from_end; ++skipped) {
    end = name.rfind('_', end - 1);
  }
  size_t start = name.rfind('_', end - 1) + 1;
  return name.substr(start, end - start) == "f32" ? 4 : 2;
}

class Accesses {
 public:
  explicit Accesses(const Arguments& arguments) : arguments_(arguments) {}

  void reads(size_t pointer, size_t bytes) { add(pointer, bytes, false); }
  void writes(size_t pointer, size_t bytes) { add(pointer, bytes, true); }

  void writes_if_given(size_t pointer, size_t bytes) {
    if (arguments_.number(pointer) != 0) {
      writes(pointer, bytes);
    }
  }

  void reads_if_given(size_t pointer, size_t bytes) {
    if (arguments_.number(pointer) != 0) {
      reads(pointer, bytes);
    }
  }

  // For a buffer whose length isn't an argument: reads all of it, up to `bytes`.
  void reads_at_most(size_t pointer, size_t bytes) {
    uint64_t address = arguments_.number(pointer);
    if (auto allocation = device_memory().find(address)) {
      bytes = std::min(bytes, allocation->address + allocation->bytes - address);
    }
    reads(pointer, bytes);
  }

  std::vector<Access> all;

 private:
  void add(size_t pointer, size_t bytes, bool writes) {
    all.push_back({arguments_.number(pointer), bytes, writes});
  }

  const Arguments& arguments_;
};

size_t chunks_of(uint64_t elements, uint64_t chunk) {
  return chunk == 0 ? 0 : (elements + chunk - 1) / chunk;
}

constexpr size_t kFloat = sizeof(float);
constexpr size_t kIndex = sizeof(unsigned);

std::vector<Access> of_accumulate(const std::string& name, const Arguments& given) {
  enum { kGradient, kResidual, kVelocity, kElements, kChunk, kNorms = 8, kGradientNorms };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  size_t chunks = chunks_of(elements, given.number(kChunk));
  accesses.writes(kGradient, elements * element_bytes(name, 0));
  accesses.writes(kResidual, elements * kFloat);
  accesses.writes_if_given(kVelocity, elements * kFloat);
  accesses.writes(kNorms, chunks * kFloat);
  accesses.writes(kGradientNorms, chunks * kFloat);
  return accesses.all;
}

std::vector<Access> of_select(const std::string&, const Arguments& given) {
  enum { kSums, kChunks, kCount, kSelected, kSlotOfChunk };
  Accesses accesses(given);
  accesses.reads(kSums, given.number(kChunks) * kFloat);
  accesses.writes(kSelected, given.number(kCount) * kIndex);
  accesses.writes(kSlotOfChunk, given.number(kChunks) * kIndex);
  return accesses.all;
}

std::vector<Access> of_pack(const std::string& name, const Arguments& given) {
  enum { kResidual, kVelocity, kElements, kChunk, kSums, kSelected, kCount, kWire = 9 };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  uint64_t chunk = given.number(kChunk);
  uint64_t count = given.number(kCount);
  accesses.writes(kResidual, elements * kFloat);
  accesses.writes_if_given(kVelocity, elements * kFloat);
  accesses.reads(kSums, chunks_of(elements, chunk) * kFloat);
  accesses.reads(kSelected, count * kIndex);
  accesses.writes(kWire, count * chunk * element_bytes(name, 0));
  return accesses.all;
}

std::vector<Access> of_unpack(const std::string& name, const Arguments& given) {
  enum { kWire, kResidual, kElements, kChunk, kSums, kSlotOfChunk, kGradient = 7 };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  uint64_t chunk = given.number(kChunk);
  size_t chunks = chunks_of(elements, chunk);
  accesses.reads_at_most(kWire, chunks * chunk * element_bytes(name, 1));
  accesses.writes_if_given(kResidual, elements * kFloat);
  accesses.reads(kSums, chunks * kFloat);
  accesses.reads(kSlotOfChunk, chunks * kIndex);
  accesses.writes(kGradient, elements * element_bytes(name, 0));
  return accesses.all;
}

std::vector<Access> of_add_velocity(const std::string& name, const Arguments& given) {
  enum { kGradient, kVelocity, kElements };
  Accesses accesses(given);
  accesses.writes(kGradient, given.number(kElements) * element_bytes(name, 0));
  accesses.writes(kVelocity, given.number(kElements) * kFloat);
  return accesses.all;
}

std::vector<Access> of_rescale(const std::string&, const Arguments& given) {
  enum { kValues, kElements };
  Accesses accesses(given);
  accesses.writes(kValues, given.number(kElements) * kFloat);
  return accesses.all;
}

// Of the quantiser: elements in a block, blocks in a run, the bytes of a block by levels, and how
// many blocks there are for each that norms are taken of.
constexpr size_t kBlock = 640;
constexpr size_t kRun = 16;
constexpr size_t kBlockBytes[] = {642, 322, 242, 194, 130};
constexpr size_t kSampled = 61;
constexpr size_t kSize = 2;

size_t bytes_of_blocks(uint64_t elements, uint64_t levels) {
  return chunks_of(chunks_of(elements, kBlock), kRun) * kRun * kBlockBytes[levels];
}

std::vector<Access> of_send(const std::string& name, const Arguments& given) {
  enum { kGradient, kResidual, kSizes, kElements, kLevels, kParts = 10, kNorms };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  accesses.reads(kGradient, elements * element_bytes(name, 0));
  accesses.writes(kResidual, elements * kFloat);
  accesses.reads_if_given(kSizes, elements * kSize);
  accesses.writes(kParts, bytes_of_blocks(elements, given.number(kLevels)));
  accesses.writes(kNorms, 2 * kFloat * chunks_of(chunks_of(elements, kBlock), kSampled));
  return accesses.all;
}

std::vector<Access> of_sum(const std::string& name, const Arguments& given) {
  enum { kGradient, kResidual, kSizes, kElements, kLevels, kHosts = 8, kReceived = 10, kSums };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  size_t bytes = bytes_of_blocks(elements, given.number(kLevels));
  accesses.reads(kGradient, elements * element_bytes(name, 0));
  accesses.writes(kResidual, elements * kFloat);
  accesses.reads_if_given(kSizes, elements * kSize);
  accesses.reads_at_most(kReceived, (given.number(kHosts) - 1) * bytes);
  accesses.writes(kSums, bytes);
  return accesses.all;
}

std::vector<Access> of_deliver(const std::string& name, const Arguments& given) {
  enum { kGradient, kResidual, kSizes, kElements, kLevels, kParts = 7, kSums };
  Accesses accesses(given);
  uint64_t elements = given.number(kElements);
  size_t bytes = bytes_of_blocks(elements, given.number(kLevels));
  accesses.writes(kGradient, elements * element_bytes(name, 0));
  accesses.writes(kResidual, elements * kFloat);
  accesses.reads_if_given(kSizes, elements * kSize);
  accesses.reads(kParts, bytes);
  accesses.reads(kSums, bytes);
  return accesses.all;
}

std::vector<Access> of_follow(const std::string& name, const Arguments& given) {
  enum { kDelivered, kSizes, kElements };
  Accesses accesses(given);
  accesses.reads(kDelivered, given.number(kElements) * element_bytes(name, 0));
  accesses.writes(kSizes, given.number(kElements) * kSize);
  return accesses.all;
}

std::vector<Access> of_scale_sizes(const std::string&, const Arguments& given) {
  enum { kSizes, kElements };
  Accesses accesses(given);
  accesses.writes(kSizes, given.number(kElements) * kSize);
  return accesses.all;
}

// Access tables by kernel name prefix, with the argument types they were written for.
struct Promise {
  const char* prefix;
  const char* kinds;
  std::vector<Access> (*accesses)(const std::string& name, const Arguments& given);
};

constexpr Promise kPromises[] = {
    {"gflow_accumulate_", "ppplufufpp", of_accumulate},
    {"gflow_select", "puupp", of_select},
    {"gflow_pack_", "ppluppuufp", of_pack},
    {"gflow_unpack_", "ppluppfp", of_unpack},
    {"gflow_add_velocity_", "pplfu", of_add_velocity},
    {"gflow_rescale", "plf", of_rescale},
    {"gflow_send_", "ppplufffuupp", of_send},
    {"gflow_sum_", "ppplufffuupp", of_sum},
    {"gflow_deliver_", "pppluuupp", of_deliver},
    {"gflow_follow_", "ppluf", of_follow},
    {"gflow_scale_sizes", "plf", of_scale_sizes},
};

const Promise* promise_of(const std::string& name) {
  for (const Promise& promise : kPromises) {
    if (name.starts_with(promise.prefix)) {
      return &promise;
    }
  }
  return nullptr;
}

unsigned bytes_of(char kind) { return kind == 'p' || kind == 'l' ? 8 : 4; }

}  // namespace

std::optional<Kernel> Kernel::find(const std::string& name) {
  const Promise* promise = promise_of(name);
  unsigned count = 0;
  const GflowHostKernel* kernels = gflow_host_kernels(&count);
  for (unsigned index = 0; index < count; ++index) {
    // If a kernel's arguments have changed, its table is stale: don't launch it.
    if (name == kernels[index].name && promise &&
        std::strcmp(promise->kinds, kernels[index].arguments) == 0) {
      return Kernel(name, kernels[index].arguments);
    }
  }
  return std::nullopt;
}

std::vector<unsigned> Kernel::argument_bytes() const {
  std::vector<unsigned> bytes;
  for (char kind : kinds_) {
    bytes.push_back(bytes_of(kind));
  }
  return bytes;
}

Kernel::Arguments Kernel::copy(void** arguments) const {
  Arguments copied;
  for (size_t index = 0; index < kinds_.size(); ++index) {
    uint64_t value = 0;
    std::memcpy(&value, arguments[index], bytes_of(kinds_[index]));
    copied.values.push_back(value);
  }
  return copied;
}

std::vector<Access> Kernel::accesses(const Arguments& arguments) const {
  return promise_of(name_)->accesses(name_, arguments);
}

int Kernel::run(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                Arguments arguments) const {
  std::vector<void*> addresses;
  for (size_t index = 0; index < kinds_.size(); ++index) {
    uint64_t& value = arguments.values[index];
    if (kinds_[index] == 'p' && device_memory().is_device_address(value)) {
      value = reinterpret_cast<uint64_t>(device_memory().alias(value));
    }
    addresses.push_back(&value);
  }
  return gflow_host_launch(name_.c_str(), grid, block, shared_bytes, addresses.data());
}

}  // namespace standin
