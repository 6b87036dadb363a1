// The device's operators. Those that manage memory are implemented here; all others are torch's CPU
// operators, run on a stream, or on the calling thread if the size of the result depends on the
// values.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <torch/library.h>

#include "memory.h"
#include "on_stream.h"
#include "streams.h"

namespace standin_device {
namespace {

using torch::jit::Stack;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kType; }

CUdeviceptr address_of(const at::Tensor& tensor) {
  return reinterpret_cast<CUdeviceptr>(tensor.const_data_ptr());
}

c10::OperatorHandle operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

c10::Device with_index(std::optional<c10::Device> device) {
  return {kType, device && device->has_index() ? device->index() : current_device()};
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on_device(with_index(device));
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on_device(with_index(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                           c10::dtype_or_default(type));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard on_device(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed =
      at::detail::computeStorageNbytesContiguous(size, impl->itemsize(), impl->storage_offset());
  const auto& storage = impl->unsafe_storage();
  if (needed > storage.nbytes()) {
    auto larger = allocator()->allocate(needed);
    if (storage.nbytes() > 0) {
      allocator()->copy_data(larger.get(), storage.data(), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

// Copies. Only a copy to the host blocks.

void copy_on_stream(const at::Tensor& to, const at::Tensor& from) {
  static const auto copy = operator_named("aten::copy_");
  Stack stack{to, from, false};
  run_on_stream(copy, &stack);
}

void copy_between_devices(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard on_device(from.device());
  const auto source = current_stream(from.device().index());
  const auto target = current_stream(to.device().index());
  c10::Event is_free(kType);
  is_free.record(target);
  is_free.block(source);
  // Runs on the stream of the operator's first tensor, so the source comes first.
  const auto there = from.to(to.scalar_type()).expand(to.sizes()).contiguous();
  ContextGuard context(from.device().index());
  TORCH_CHECK(to.is_contiguous(), "stand-in: copies between devices must be contiguous");
  CHECK_DRIVER(cuMemcpyDtoDAsync(address_of(to), address_of(there), to.nbytes(), raw(source)));
  c10::Event is_there(kType);
  is_there.record(source);
  is_there.block(target);
}

void copy_to_device(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard on_device(to.device());
  // A private copy: the caller may change the original right away.
  auto* staged = new at::Tensor(
      from.detach().to(to.scalar_type()).expand(to.sizes()).clone(at::MemoryFormat::Contiguous));
  const auto target = to.is_contiguous() ? to : at::empty(to.sizes(), to.options());
  const auto stream = raw(current_stream(to.device().index()));
  ContextGuard context(to.device().index());
  if (target.nbytes() > 0) {
    CHECK_DRIVER(
        cuMemcpyHtoDAsync(address_of(target), staged->const_data_ptr(), target.nbytes(), stream));
  }
  const auto delete_staged = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  CHECK_DRIVER(cuLaunchHostFunc(stream, delete_staged, staged));
  if (!to.is_contiguous()) copy_on_stream(to, target);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard on_device(from.device());
  const auto source = from.contiguous();
  const auto landed = at::empty(source.sizes(), source.options().device(at::kCPU));
  const auto stream = current_stream(from.device().index());
  ContextGuard context(from.device().index());
  if (source.nbytes() > 0) {
    CHECK_DRIVER(cuMemcpyDtoHAsync(landed.mutable_data_ptr(), address_of(source), source.nbytes(),
                                   raw(stream)));
  }
  synchronize(stream);
  check_streams();
  to.copy_(landed);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!is_ours(from)) {
    copy_to_device(to, from);
  } else if (!is_ours(to)) {
    copy_to_host(to, from);
  } else if (from.device() == to.device()) {
    const c10::DeviceGuard on_device(to.device());
    copy_on_stream(to, from);
  } else {
    copy_between_devices(to, from);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar value_of(const at::Tensor& self) { return self.cpu().item(); }

void record(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// Torch has separate convolution operators for devices that it doesn't know.

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  static const auto on_cpu = operator_named("aten::convolution");
  Stack stack{input, weight, bias, stride, padding, dilation, transposed, output_padding, groups};
  run_on_stream(on_cpu, &stack);
  return stack.at(0).toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  static const auto on_cpu = operator_named("aten::convolution_backward");
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  const c10::List<bool> mask{wanted[0], wanted[1], wanted[2]};
  Stack stack{gradient,       input,   weight,   at::IntArrayRef(bias_sizes),
              stride,         padding, dilation, transposed,
              output_padding, groups,  mask};
  run_on_stream(on_cpu, &stack);
  return {stack.at(0).toTensor(), stack.at(1).toTensor(), stack.at(2).toTensor()};
}

// Everything else falls back to this.

void any_other(const c10::OperatorHandle& op, Stack* stack) {
  const auto before = *stack;
  try {
    return run_on_stream(op, stack);
  } catch (const std::exception&) {
    *stack = before;
  }
  // Either the size depends on the values, or the call is invalid and the CPU operator will say so.
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_other>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &value_of);
  m.impl("record_stream", &record);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace
}  // namespace standin_device
