// GflowBackend: how a collective gets to the engine, or to the inner backend of its device.
#include "backend/errors.h"
#include "backend/gflow_backend.h"
#include "python/gil.h"
#include "tensors/exchanged_tensors.h"

namespace gflow {

using c10d::OpType;

WorkPtr GflowBackend::submit_collective(Collective collective) {
  auto& [title, call, device, options, outputs, inputs, start] = collective;
  const auto inner = inner_for(device);
  buckets_.end_layout();
  if (!device.is_cpu()) {
    fence_device_calls();
    return start(*inner_for_direct_call(device), outputs, inputs);
  }
  auto work =
      c10::make_intrusive<GflowWork>(rank_, static_cast<OpType>(call.kind), title, outputs,
                                     options.timeout, flatten(inputs.empty() ? outputs : inputs));
  auto tensors = std::make_shared<ExchangedTensors>(std::move(outputs), std::move(inputs));
  TorchOperation::Steps steps{
      .prepare = [tensors] { tensors->make_contiguous(); },
      .spans = [tensors] { return tensors->spans(); },
      .begin =
          [tensors, start = std::move(start), inner] {
            auto [outputs, inputs] = tensors->for_inner();
            return start(*inner, outputs, inputs);
          },
      .end = [tensors] { tensors->write_back(); },
  };
  return enqueue(std::move(call), options, std::move(work), std::move(steps));
}

WorkPtr GflowBackend::submit_device_allreduce(CallDescription call, const at::Tensor& tensor,
                                              const c10d::AllreduceOptions& opts) {
  const auto device = tensor.device();
  const auto caller_stream = current_stream(device);
  TORCH_CHECK(!is_capturing(caller_stream),
              "gflow: an all_reduce in a process group that compresses gradients cannot be "
              "captured into a graph: the ranks agree on each one anew when it is called. Capture "
              "without it, or use a group with compress=\"off\"");
  buckets_.end_layout();
  const auto engine_stream = as_backend_error([&] { return device_queues_.open(device); });
  call.device = device.index();
  call.stream = raw_handle(caller_stream);
  // The engine still uses the memory after everybody else has dropped the tensor.
  c10::impl::VirtualGuardImpl(device.type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), engine_stream);
  const auto options = call_options(opts);
  const TensorLists reduced{{tensor}};
  auto work = c10::make_intrusive<GflowWork>(rank_, OpType::ALLREDUCE, "gflow:all_reduce", reduced,
                                             options.timeout, Tensors{tensor}, engine_stream);
  work->check_with(if_alive(&GflowBackend::check_usable));
  auto tensors = std::make_shared<ExchangedTensors>(reduced, TensorLists());
  TorchOperation::Steps steps{
      .prepare = [tensors] { tensors->check_dense(); },
      .spans = [tensors] { return tensors->spans(); },
      .begin =
          [tensors, opts, device, inner = accelerator_->inner] {
            TORCH_CHECK(inner, "gflow: this process group has no backend for tensors on ", device,
                        " that are no gradients");
            auto outputs = tensors->for_inner().first;
            return inner->allreduce(outputs[0], opts);
          },
      // By then the engine's stream is ordered after all of it, including work of the inner
      // backend.
      .end = [work] { work->record_end_on_device(); },
      .stream = engine_stream,
  };
  engine_has_device_calls_ = true;
  return enqueue(std::move(call), options, std::move(work), std::move(steps));
}

WorkPtr GflowBackend::enqueue(CallDescription call, CallOptions options,
                              c10::intrusive_ptr<GflowWork> work, TorchOperation::Steps steps) {
  call.timeout_ms = static_cast<uint64_t>(options.timeout.count());
  // The engine may hold a bucket back to exchange it with others.
  if (call.bucket != BucketRegistry::kUnnumbered) {
    work->before_wait(if_alive(&GflowBackend::flush));
  }
  auto operation = std::make_shared<TorchOperation>(work, std::move(steps));
  work->set_seq(as_backend_error([&] {
    if (options.async) return group_->submit(std::move(call), operation);
    WithoutGil without_gil;
    return group_->submit_and_wait(std::move(call), operation);
  }));
  return coalescing_.note(std::move(work));
}

c10::intrusive_ptr<Backend> GflowBackend::inner_for(at::Device device) const {
  if (device.is_cpu()) return gloo_;
  const bool is_served = has_device_backend() && device.type() == accelerator_->type;
  TORCH_CHECK(is_served, "gflow: this process group serves tensors on ",
              has_device_backend() ? c10::str("cpu and ", accelerator_->type) : "cpu",
              ", but got a tensor on ", device,
              ". Move the tensor first, or name a backend for that device, as in "
              "init_process_group(\"cpu:gflow,cuda:nccl\")");
  return accelerator_->inner;
}

c10::intrusive_ptr<Backend> GflowBackend::inner_for_direct_call(at::Device device) {
  auto inner = inner_for(device);
  // Collectives that the engine has yet to begin there must not become part of the coalesced call.
  if (coalescing_.is_active()) fence_device_calls();
  coalescing_.enter(inner);
  return inner;
}

void GflowBackend::fence_device_calls() {
  // In a group that has failed, don't wait for lost ranks in the inner backend.
  check_usable();
  if (!engine_has_device_calls_.exchange(false)) return;
  WithoutGil without_gil;
  try {
    as_backend_error([&] {
      group_->flush();
      group_->fence(timeout_ms());
    });
  } catch (...) {
    // They still have to begin before any later call.
    engine_has_device_calls_ = true;
    throw;
  }
}

bool GflowBackend::compresses_on_devices() const {
  return accelerator_ && accelerator_->known_to_engine && group_->compresses();
}

bool GflowBackend::compresses_on(at::Device device) const {
  return compresses_on_devices() && device.type() == accelerator_->type;
}

}  // namespace gflow
