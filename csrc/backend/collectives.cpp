// GflowBackend: all collectives but the all-reduces. Each is described by the tensors that must be
// alike on all ranks, and knows how to begin itself on an inner backend.
#include "backend/errors.h"
#include "backend/gflow_backend.h"
#include "tensors/arguments.h"
#include "tensors/describe.h"

namespace gflow {

using c10d::OpType;

WorkPtr GflowBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (opts.rootRank == rank_ && tensors.size() == 1) replacements_.apply(tensors[0]);
  auto call = describe(OpType::BROADCAST, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.root = static_cast<uint32_t>(opts.rootRank);
  return submit_collective({
      .title = "gflow:broadcast",
      .call = std::move(call),
      .device = device_of(tensors),
      .options = call_options(opts),
      .outputs = {tensors},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists&) { return inner.broadcast(outputs[0], opts); },
  });
}

WorkPtr GflowBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto call = describe(OpType::REDUCE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  call.root = static_cast<uint32_t>(opts.rootRank);
  return submit_collective({
      .title = "gflow:reduce",
      .call = std::move(call),
      .device = device_of(tensors),
      .options = call_options(opts),
      .outputs = {tensors},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists&) { return inner.reduce(outputs[0], opts); },
  });
}

WorkPtr GflowBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::ALLGATHER, inputs);
  call.complaint = arguments::check_one_per_rank("outputs", outputs, inputs, size_);
  return submit_collective({
      .title = "gflow:all_gather",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = outputs,
      .inputs = {inputs},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists& inputs) { return inner.allgather(outputs, inputs[0], opts); },
  });
}

WorkPtr GflowBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::_ALLGATHER_BASE, {input});
  call.complaint = arguments::check_parts("output", {output}, {input}, size_);
  return submit_collective({
      .title = "gflow:_all_gather_base",
      .call = std::move(call),
      .device = input.device(),
      .options = call_options(opts),
      .outputs = {{output}},
      .inputs = {{input}},
      .start =
          [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            return inner._allgather_base(outputs[0][0], inputs[0][0], opts);
          },
  });
}

WorkPtr GflowBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::ALLGATHER_COALESCED, inputs);
  call.complaint = arguments::check_lists_per_rank(outputs, inputs, size_);
  return submit_collective({
      .title = "gflow:all_gather",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = outputs,
      .inputs = {inputs},
      .start =
          [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            return inner.allgather_coalesced(outputs, inputs[0], opts);
          },
  });
}

WorkPtr GflowBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  auto call = describe(kAllGatherIntoTensorCoalesced, inputs);
  call.complaint = arguments::check_parts("output", outputs, inputs, size_);
  return submit_collective({
      .title = "gflow:all_gather",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = {outputs},
      .inputs = {inputs},
      .start =
          [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            return inner.allgather_into_tensor_coalesced(outputs[0], inputs[0], opts);
          },
  });
}

WorkPtr GflowBackend::gather(TensorLists& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) {
  auto call = describe(OpType::GATHER, inputs);
  if (opts.rootRank == rank_) {
    call.complaint = arguments::check_one_per_rank("outputs", outputs, inputs, size_);
  }
  call.root = static_cast<uint32_t>(opts.rootRank);
  return submit_collective({
      .title = "gflow:gather",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = outputs,
      .inputs = {inputs},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists& inputs) { return inner.gather(outputs, inputs[0], opts); },
  });
}

WorkPtr GflowBackend::scatter(Tensors& outputs, TensorLists& inputs,
                              const c10d::ScatterOptions& opts) {
  // Only the root has inputs, so the ranks compare their outputs.
  auto call = describe(OpType::SCATTER, outputs);
  if (opts.rootRank == rank_) {
    call.complaint = arguments::check_one_per_rank("inputs", inputs, outputs, size_);
  }
  call.root = static_cast<uint32_t>(opts.rootRank);
  return submit_collective({
      .title = "gflow:scatter",
      .call = std::move(call),
      .device = device_of(outputs),
      .options = call_options(opts),
      .outputs = {outputs},
      .inputs = inputs,
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists& inputs) { return inner.scatter(outputs[0], inputs, opts); },
  });
}

WorkPtr GflowBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::REDUCE_SCATTER, flatten(inputs));
  call.complaint = arguments::check_one_per_rank("inputs", inputs, outputs, size_);
  call.reduce_op = opts.reduceOp.op_;
  return submit_collective({
      .title = "gflow:reduce_scatter",
      .call = std::move(call),
      .device = device_of(outputs),
      .options = call_options(opts),
      .outputs = {outputs},
      .inputs = inputs,
      .start = [opts](
                   Backend& inner, TensorLists& outputs,
                   TensorLists& inputs) { return inner.reduce_scatter(outputs[0], inputs, opts); },
  });
}

WorkPtr GflowBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::_REDUCE_SCATTER_BASE, {input});
  call.complaint = arguments::check_parts("input", {input}, {output}, size_);
  call.reduce_op = opts.reduceOp.op_;
  return submit_collective({
      .title = "gflow:_reduce_scatter_base",
      .call = std::move(call),
      .device = input.device(),
      .options = call_options(opts),
      .outputs = {{output}},
      .inputs = {{input}},
      .start =
          [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            return inner._reduce_scatter_base(outputs[0][0], inputs[0][0], opts);
          },
  });
}

WorkPtr GflowBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs);
  call.complaint = arguments::check_parts("input", inputs, outputs, size_);
  call.reduce_op = opts.reduceOp.op_;
  return submit_collective({
      .title = "gflow:reduce_scatter",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = {outputs},
      .inputs = {inputs},
      .start =
          [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            return inner.reduce_scatter_tensor_coalesced(outputs[0], inputs[0], opts);
          },
  });
}

WorkPtr GflowBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& opts) {
  auto call = describe_all_to_all_single(output, input, output_splits, input_splits, size_);
  call.complaint = arguments::check_splits("input", input, input_splits, size_);
  if (call.complaint.empty()) {
    call.complaint = arguments::check_splits("output", output, output_splits, size_);
  }
  return submit_collective({
      .title = "gflow:all_to_all",
      .call = std::move(call),
      .device = input.device(),
      .options = call_options(opts),
      .outputs = {{output}},
      .inputs = {{input}},
      .start =
          [=](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
            auto outputs_by_rank = output_splits;
            auto inputs_by_rank = input_splits;
            return inner.alltoall_base(outputs[0][0], inputs[0][0], outputs_by_rank, inputs_by_rank,
                                       opts);
          },
  });
}

WorkPtr GflowBackend::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) {
  auto call = describe_all_to_all(outputs, inputs);
  call.complaint = arguments::check_lists(outputs, inputs, size_);
  return submit_collective({
      .title = "gflow:all_to_all",
      .call = std::move(call),
      .device = device_of(inputs),
      .options = call_options(opts),
      .outputs = {outputs},
      .inputs = {inputs},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists& inputs) { return inner.alltoall(outputs[0], inputs[0], opts); },
  });
}

WorkPtr GflowBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto served = accelerator_ ? accelerator_->type : at::kCUDA;
  const bool is_on_device =
      !opts.device_ids.empty() || (opts.device && opts.device->type() == served);
  const at::Device device(is_on_device ? served : at::kCPU);
  return submit_collective({
      .title = "gflow:barrier",
      .call = describe(OpType::BARRIER, {}),
      .device = device,
      .options = call_options(opts),
      .start = [opts](Backend& inner, TensorLists&, TensorLists&) { return inner.barrier(opts); },
  });
}

void GflowBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // It looks for missing ranks, so there is nothing to agree on; but the inner backend pairs calls
  // by their order, so all earlier ones must have ended.
  const auto limit = static_cast<uint64_t>(call_options(opts).timeout.count());
  as_backend_error([&] { group_->fence(limit); });
  gloo_->monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace gflow
