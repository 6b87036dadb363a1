// GflowBackend: the all-reduces, and which of them are gradients.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "backend/gflow_backend.h"
#include "gradients/caller.h"
#include "python/log_warning.h"
#include "tensors/arguments.h"
#include "tensors/describe.h"

namespace gflow {

using c10d::OpType;

WorkPtr GflowBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  // Sparse tensors arrive here too, and cannot be reduced with dense ones.
  const bool sparse = !tensors.empty() && tensors.front().is_sparse();
  auto call = describe(sparse ? OpType::_ALLREDUCE_SPARSE : OpType::ALLREDUCE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  const auto bucket = gradient_bucket(tensors, opts);
  call.gradient = bucket.has_value();
  call.bucket = bucket ? *bucket : counts_uses_of(tensors, opts);
  // Coalesced calls belong to the inner backend: only it can merge them.
  const bool by_engine = tensors.size() == 1 && !sparse && compresses_on(device_of(tensors)) &&
                         !coalescing_.is_active();
  // In the first step of a static graph the Reducer submits all buckets after the pass.
  const bool after_pass = bucket && backward_is_over();
  if (bucket && !after_pass) await_end_of_pass();
  auto work = by_engine
                  ? submit_device_allreduce(std::move(call), tensors.front(), opts)
                  : submit_collective({
                        .title = "gflow:all_reduce",
                        .call = std::move(call),
                        .device = device_of(tensors),
                        .options = call_options(opts),
                        .outputs = {tensors},
                        .start = [opts](Backend& inner, TensorLists& outputs,
                                        TensorLists&) { return inner.allreduce(outputs[0], opts); },
                    });
  // Without an announcement to the user: the Reducer holds its lock here.
  if (after_pass && buckets_.is_last_of_model(*bucket)) group_->end_of_pass();
  return work;
}

WorkPtr GflowBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto call = describe(OpType::_ALLREDUCE_SPARSE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  return submit_collective({
      .title = "gflow:sparse_all_reduce",
      .call = std::move(call),
      .device = device_of(tensors),
      .options = call_options(opts),
      .outputs = {tensors},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists&) { return inner.allreduce_sparse(outputs[0], opts); },
  });
}

WorkPtr GflowBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) {
  auto call = describe(OpType::ALLREDUCE_COALESCED, tensors);
  call.reduce_op = opts.reduceOp.op_;
  return submit_collective({
      .title = "gflow:all_reduce",
      .call = std::move(call),
      .device = device_of(tensors),
      .options = call_options(opts),
      .outputs = {tensors},
      .start = [opts](Backend& inner, TensorLists& outputs,
                      TensorLists&) { return inner.allreduce_coalesced(outputs[0], opts); },
  });
}

// A tensor is a gradient bucket if the Reducer got its memory here and submits it itself, during a
// backward pass. Everything else a user may reduce, also during a backward pass, stays exact.
std::optional<uint32_t> GflowBackend::gradient_bucket(const Tensors& tensors,
                                                      const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1 || opts.reduceOp != c10d::ReduceOp::SUM ||
      torch::autograd::get_current_graph_task_id() < 0) {
    return std::nullopt;
  }
  return buckets_.find(tensors.front());
}

uint32_t GflowBackend::counts_uses_of(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (tensors.size() != 1 || opts.reduceOp != c10d::ReduceOp::SUM || pass < 0 ||
      !group_->compresses()) {
    return BucketRegistry::kUnnumbered;
  }
  return buckets_.model_whose_uses_are_counted(tensors.front(), pass);
}

// The Reducer waits on Futures, which we cannot observe, so the engine would not know when to stop
// waiting for more buckets. A callback that autograd runs at the end of the backward pass tells it.
// Queued at the first bucket, it runs before the Reducer's own callback, which waits.
void GflowBackend::await_end_of_pass() {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (awaited_pass_.exchange(pass) == pass) return;
  auto self = c10::intrusive_ptr<GflowBackend>::reclaim_copy(this);
  torch::autograd::Engine::get_default_engine().queue_callback([self] { self->end_of_pass(); });
}

void GflowBackend::end_of_pass() {
  group_->end_of_pass();
  forget_dead_buckets();
  const std::string announcement(group_->announcement());
  if (!announcement.empty()) log_warning(std::string(group_->name()), getRank(), announcement);
}

}  // namespace gflow
