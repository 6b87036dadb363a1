#include "image.h"

#include <elf.h>

#include <cstring>
#include <string_view>

namespace standin {

namespace {

constexpr uint16_t kMachineOfCuda = 190;
// From this ABI version on, a CUBIN has the architecture in the second byte of its flags.
constexpr uint8_t kAbiVersion = 8;

// Attributes of kernels in a CUBIN, and how their values are stored.
constexpr uint8_t kMostThreads = 0x05;
constexpr uint8_t kArgument = 0x17;
constexpr uint8_t kSized = 0x04;

template <typename Value>
Value at(const char* data, size_t offset) {
  Value value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

// An attribute is a format byte, a kind byte, and two bytes that hold the value, or the size of the
// value that follows.
void read_attributes(const char* data, size_t bytes, KernelImage& kernel) {
  std::map<unsigned, unsigned> arguments;
  for (size_t offset = 0; offset + 4 <= bytes;) {
    auto format = at<uint8_t>(data, offset);
    auto kind = at<uint8_t>(data, offset + 1);
    size_t size = format == kSized ? at<uint16_t>(data, offset + 2) : 0;
    const char* value = data + offset + 4;
    if (format == kSized && kind == kArgument && size >= 12) {
      arguments[at<uint16_t>(value, 4)] = at<uint32_t>(value, 8) >> 18;
    } else if (format == kSized && kind == kMostThreads && size >= 12) {
      kernel.max_threads = at<uint32_t>(value, 0) * at<uint32_t>(value, 4) * at<uint32_t>(value, 8);
    }
    offset += 4 + size;
  }
  for (auto& [index, size] : arguments) {
    kernel.argument_bytes.push_back(size);
  }
}

CUresult read_cubin(const char* data, unsigned capability, Image& image) {
  auto header = at<Elf64_Ehdr>(data, 0);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kMachineOfCuda) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  unsigned made_for = header.e_ident[EI_ABIVERSION] >= kAbiVersion ? (header.e_flags >> 8) & 0xff
                                                                   : header.e_flags & 0xff;
  // A CUBIN runs on its own architecture and on later ones of the same generation.
  if (made_for / 10 != capability / 10 || made_for > capability) {
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  auto section = [&](size_t index) {
    return at<Elf64_Shdr>(data, header.e_shoff + index * header.e_shentsize);
  };
  const char* names = data + section(header.e_shstrndx).sh_offset;
  for (size_t index = 0; index < header.e_shnum; ++index) {
    Elf64_Shdr symbols = section(index);
    if (symbols.sh_type != SHT_SYMTAB) {
      continue;
    }
    const char* symbol_names = data + section(symbols.sh_link).sh_offset;
    for (size_t offset = 0; offset < symbols.sh_size; offset += sizeof(Elf64_Sym)) {
      auto symbol = at<Elf64_Sym>(data, symbols.sh_offset + offset);
      bool is_function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
      if (is_function && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL && symbol.st_size > 0) {
        image.kernels[symbol_names + symbol.st_name];
      }
    }
  }
  for (auto& [name, kernel] : image.kernels) {
    for (size_t index = 0; index < header.e_shnum; ++index) {
      Elf64_Shdr one = section(index);
      std::string_view called = names + one.sh_name;
      if (called == ".nv.info." + name) {
        read_attributes(data + one.sh_offset, one.sh_size, kernel);
      } else if (called == ".nv.shared." + name) {
        kernel.shared_bytes = static_cast<unsigned>(one.sh_size);
      }
    }
  }
  return CUDA_SUCCESS;
}

CUresult read_ptx(std::string_view text, Image& image) {
  constexpr std::string_view kEntry = ".entry ";
  for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
    at += kEntry.size();
    size_t end = text.find_first_of("( \n\t", at);
    image.kernels[std::string(text.substr(at, end - at))];
  }
  return image.kernels.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

}  // namespace

CUresult read_image(const void* data, unsigned capability, Image& image) {
  const auto* bytes = static_cast<const char*>(data);
  if (std::memcmp(bytes, ELFMAG, SELFMAG) == 0) {
    return read_cubin(bytes, capability, image);
  }
  // PTX is text: comments, then the version.
  std::string_view text(bytes);
  bool is_ptx = text.find(".version") != text.npos && text.find(".target") != text.npos;
  return is_ptx ? read_ptx(text, image) : CUDA_ERROR_INVALID_IMAGE;
}

}  // namespace standin
