// Compares tensor counts, sizes, types and splits with the world size and with each other.
#include "tensors/arguments.h"

#include <c10/util/StringUtil.h>

#include <numeric>

namespace gflow::arguments {
namespace {

std::string in_words(const at::Tensor& tensor) {
  return c10::str(tensor.numel(), " elements of ", tensor.scalar_type());
}

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.numel() == other.numel() && one.scalar_type() == other.scalar_type();
}

}  // namespace

std::string check_in_place(const Tensors& tensors) {
  if (tensors.size() == 1) return "";
  return c10::str("expected one tensor, got ", tensors.size());
}

std::string check_one_per_rank(const char* what, const TensorLists& lists, const Tensors& own,
                               int world) {
  if (own.size() != 1) return c10::str("expected one tensor, got ", own.size());
  if (lists.size() != 1 || lists[0].size() != static_cast<size_t>(world)) {
    return c10::str("expected a list of ", world, " ", what, ", one for each rank, got ",
                    lists.empty() ? 0 : lists[0].size());
  }
  for (const auto& tensor : lists[0]) {
    if (!alike(tensor, own[0])) {
      return c10::str("the ", what, " must all be of ", in_words(own[0]), ", got ",
                      in_words(tensor));
    }
  }
  return "";
}

std::string check_parts(const char* whole_is, const Tensors& wholes, const Tensors& parts,
                        int world) {
  if (wholes.size() != parts.size()) {
    return c10::str("expected as many outputs as inputs, got ", wholes.size(), " and ",
                    parts.size());
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (wholes[i].scalar_type() != parts[i].scalar_type() ||
        wholes[i].numel() != parts[i].numel() * world) {
      return c10::str("the ", whole_is, " must be ", world, " times ", in_words(parts[i]), ", got ",
                      in_words(wholes[i]));
    }
  }
  return "";
}

std::string check_lists_per_rank(const TensorLists& lists, const Tensors& inputs, int world) {
  if (lists.size() != static_cast<size_t>(world)) {
    return c10::str("expected ", world, " output lists, one for each rank, got ", lists.size());
  }
  for (const auto& list : lists) {
    if (list.size() != inputs.size()) {
      return c10::str("expected ", inputs.size(), " outputs for each rank, got ", list.size());
    }
    for (size_t i = 0; i < list.size(); ++i) {
      if (!alike(list[i], inputs[i])) {
        return c10::str("output ", i, " must be of ", in_words(inputs[i]), ", got ",
                        in_words(list[i]));
      }
    }
  }
  return "";
}

std::string check_lists(const Tensors& outputs, const Tensors& inputs, int world) {
  const auto size = static_cast<size_t>(world);
  if (outputs.size() != size || inputs.size() != size) {
    return c10::str("expected ", world, " inputs and ", world, " outputs, one for each rank, got ",
                    inputs.size(), " and ", outputs.size());
  }
  return "";
}

std::string check_splits(const char* what, const at::Tensor& tensor,
                         const std::vector<int64_t>& splits, int world) {
  if (tensor.dim() == 0) return c10::str("the ", what, " is a scalar, which cannot be split");
  const auto rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % world == 0) return "";
    return c10::str("the ", what, " has ", rows, " rows, which ", world,
                    " ranks cannot share equally: give split sizes");
  }
  const auto sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  if (splits.size() != static_cast<size_t>(world) || sum != rows) {
    return c10::str("the split sizes of the ", what, " must be ", world,
                    " numbers that add up to its ", rows, " rows, got ", splits.size(),
                    " that add up to ", sum);
  }
  return "";
}

}  // namespace gflow::arguments
