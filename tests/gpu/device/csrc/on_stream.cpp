#include "on_stream.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "standin.h"
#include "streams.h"

namespace standin_device {
namespace {

using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Replaces the tensors in a value, in a fixed order.
template <typename Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// A tensor as a kernel sees it: an address and a shape. Keeps nothing alive.
struct Operand {
  CUdeviceptr address = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType type = at::kFloat;

  explicit Operand(const at::Tensor& tensor)
      : address(reinterpret_cast<CUdeviceptr>(tensor.const_data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()) {}

  size_t bytes() const {
    return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));
  }

  // Call only on a stream's thread.
  at::Tensor on_cpu() const {
    const auto options = at::TensorOptions().dtype(type);
    if (bytes() == 0) return at::empty_strided(sizes, strides, options);
    return at::from_blob(standin_alias(address), sizes, strides, options);
  }
};

std::mutex failure_mutex;
std::string failure;
// Held shared by running kernels. Never destroyed: streams outlive static destructors.
std::shared_mutex& running() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}
bool is_stopped = false;

struct Kernel {
  c10::OperatorHandle on_cpu;
  // Operands are replaced by meta tensors.
  Stack arguments;
  std::unordered_map<const c10::TensorImpl*, Operand> operands;
  // One per result; nullopt if the result is also an argument.
  std::vector<std::optional<Operand>> results;

  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stack stack;
    for (const auto& argument : arguments) {
      stack.push_back(changed(argument, [&](const at::Tensor& tensor) {
        const auto found = operands.find(tensor.unsafeGetTensorImpl());
        return found == operands.end() ? tensor : found->second.on_cpu();
      }));
    }
    on_cpu.callBoxed(&stack);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i]) results[i]->on_cpu().copy_(stack[i].toTensor());
    }
  }

  static void run_and_delete(void* kernel) {
    const std::shared_lock<std::shared_mutex> running_lock(running());
    if (is_stopped) return;
    const std::unique_ptr<Kernel> self(static_cast<Kernel*>(kernel));
    try {
      self->run();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(failure_mutex);
      failure = c10::str(self->on_cpu.schema().operator_name(), ": ", error.what());
    }
  }
};

// Maps device tensors to meta tensors ("shadows") and back.
class Shadows {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    // A number that torch has wrapped isn't shared with anyone, and its value is known already.
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    auto& shadow = shadows_[tensor.unsafeGetTensorImpl()];
    if (!shadow.defined()) {
      shadow =
          at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        shadow.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      originals_.emplace(shadow.unsafeGetTensorImpl(), tensor);
    }
    return shadow;
  }

  // The tensor that a shadow stands for; undefined if there is none.
  at::Tensor original(const at::Tensor& shadow) const {
    const auto found = originals_.find(shadow.unsafeGetTensorImpl());
    return found == originals_.end() ? at::Tensor() : found->second;
  }

  bool is_view_of_one(const at::Tensor& result) const {
    for (const auto& [impl, shadow] : shadows_) {
      if (shadow.defined() && shadow.has_storage() && result.is_alias_of(shadow)) return true;
    }
    return false;
  }

  const auto& originals() const { return originals_; }

 private:
  std::unordered_map<const c10::TensorImpl*, at::Tensor> shadows_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals_;
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

void stop_kernels() {
  const std::lock_guard<std::shared_mutex> running_lock(running());
  is_stopped = true;
}

void check_streams() {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (failure.empty()) return;
  const auto text = std::exchange(failure, {});
  TORCH_CHECK(false, "stand-in: a kernel failed: ", text);
}

void run_on_stream(const c10::OperatorHandle& on_cpu, Stack* stack) {
  check_streams();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = on_cpu.schema();
  const size_t count = schema.arguments().size();
  Shadows shadows;
  std::optional<c10::Device> device;
  Stack asked;
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = torch::jit::peek(*stack, i, count);
    if (argument.isDevice() && argument.toDevice().type() == kType) {
      device = argument.toDevice();
      asked.emplace_back(c10::Device(at::kMeta));
      continue;
    }
    asked.push_back(changed(argument, [&](const at::Tensor& tensor) {
      if (is_ours(tensor) && !device) device = tensor.device();
      return shadows.of(tensor);
    }));
  }
  TORCH_CHECK(device, schema.operator_name(), " has no tensor on the device");
  const Stack shadowed = asked;
  on_cpu.callBoxed(&asked);

  // Resizes the results that are also arguments where needed, and allocates the new ones.
  for (const auto& [impl, tensor] : shadows.originals()) {
    const auto& shadow = shadows.of(tensor);
    if (is_ours(tensor) && shadow.sizes() != tensor.sizes()) tensor.resize_(shadow.sizes());
  }
  auto kernel = std::make_unique<Kernel>(Kernel{on_cpu, {}, {}, {}});
  std::vector<standin_range> ranges;
  const auto touch = [&](const Operand& operand, bool writes) {
    if (operand.bytes() > 0) ranges.push_back({operand.address, operand.bytes(), writes});
  };
  Stack results;
  for (const auto& result : asked) {
    kernel->results.emplace_back();
    if (!result.isTensor() || !result.toTensor().defined()) {
      TORCH_CHECK(result.isTensor() || result.isNone(), schema.operator_name(),
                  " gives something else than tensors");
      results.push_back(result);
      continue;
    }
    const auto& shadow = result.toTensor();
    if (const auto original = shadows.original(shadow); original.defined()) {
      results.emplace_back(original);
      continue;
    }
    TORCH_CHECK(!shadows.is_view_of_one(shadow), schema.operator_name(), " gives a view");
    const auto made =
        at::empty_strided(shadow.sizes(), shadow.strides(), shadow.options().device(*device));
    kernel->results.back().emplace(made);
    touch(*kernel->results.back(), true);
    results.emplace_back(made);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = shadowed[i];
    kernel->arguments.push_back(
        argument.isDevice() && argument.toDevice().is_meta()
            ? c10::IValue(c10::Device(at::kCPU))
            : changed(argument, [&](const at::Tensor& shadow) {
                const auto original = shadow.defined() ? shadows.original(shadow) : at::Tensor();
                // Host memory may change before the kernel runs, so copy it.
                if (original.defined() && !is_ours(original)) return original.clone();
                if (original.defined()) {
                  const auto& operand =
                      kernel->operands.try_emplace(shadow.unsafeGetTensorImpl(), original)
                          .first->second;
                  touch(operand, writes(schema.arguments()[i]));
                }
                return shadow;
              }));
  }
  ContextGuard context(device->index());
  const auto stream = raw(current_stream(device->index()));
  const auto name = c10::toString(schema.operator_name());
  const auto result = standin_run(stream, name.c_str(), &Kernel::run_and_delete, kernel.get(),
                                  ranges.data(), static_cast<int>(ranges.size()));
  CHECK_DRIVER(static_cast<CUresult>(result));
  static_cast<void>(kernel.release());
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace standin_device
