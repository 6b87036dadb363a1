#include "gflow_backend.h"

#include <torch/csrc/autograd/graph_task.h>

#include "describe.h"
#include "gil.h"
#include "torch_operation.h"

namespace gflow {

using c10d::OpType;

namespace {

at::Device device_of(const Tensors& tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
}

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "gflow: a message is one tensor, got ", tensors.size());
  return tensors.front();
}

Tensors flattened(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

GflowBackend::GflowBackend(int rank, int size, Milliseconds timeout, rust::Box<Group> group,
                           c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<Backend> cuda)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>(timeout)),
      timeout_(timeout),
      gloo_(std::move(gloo)),
      cuda_(std::move(cuda)),
      messages_(gloo_),
      group_(std::move(group)) {}

GflowBackend::~GflowBackend() {
  WithoutGil without_gil;
  try {
    group_->close();
  } catch (const std::exception& error) {
    TORCH_WARN("gflow: closing a process group failed: ", error.what());
  }
}

Backend& GflowBackend::inner_for(at::Device device) const {
  if (device.is_cpu()) return *gloo_;
  TORCH_CHECK(device.is_cuda() && cuda_, "gflow: this process group serves tensors on ",
              cuda_ ? "cpu and cuda" : "cpu", ", but got a tensor on ", device,
              ". Move the tensor first, or name a backend for that device, as in "
              "init_process_group(\"cpu:gflow,cuda:nccl\")");
  return *cuda_;
}

template <typename Start>
WorkPtr GflowBackend::collective(OpType kind, const char* title, CallDescription call,
                                 at::Device device, Milliseconds timeout, const Tensors& inputs,
                                 TensorLists results, Start start) {
  Backend& inner = inner_for(device);
  if (!device.is_cpu()) return start(inner);

  const auto limit = timeout > Milliseconds::zero() ? timeout : timeout_.load();
  call.timeout_ms = static_cast<uint64_t>(limit.count());
  auto work = c10::make_intrusive<GflowWork>(rank_, kind, title, std::move(results), limit, inputs);
  auto body = [gloo = gloo_, start = std::move(start)]() mutable { start(*gloo)->wait(); };
  work->set_seq(
      group_->submit(std::move(call), std::make_shared<TorchOperation>(work, std::move(body))));
  return work;
}

// Collectives, each described by the tensors that must be alike on all ranks.

WorkPtr GflowBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  auto call = describe(OpType::BROADCAST, tensors);
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective(OpType::BROADCAST, "gflow:broadcast", std::move(call), device_of(tensors),
                    opts.timeout, tensors, {tensors}, [tensors, opts](Backend& inner) mutable {
                      return inner.broadcast(tensors, opts);
                    });
}

// A tensor is a gradient bucket if the Reducer got its memory here and this is a backward pass.
// Everything else a user may reduce, also inside a backward pass, stays exact.
bool GflowBackend::is_gradient_bucket(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return tensors.size() == 1 && opts.reduceOp == c10d::ReduceOp::SUM &&
         torch::autograd::get_current_graph_task_id() >= 0 && buckets_.holds(tensors.front());
}

WorkPtr GflowBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto call = describe(OpType::ALLREDUCE, tensors);
  call.reduce_op = opts.reduceOp.op_;
  call.gradient = is_gradient_bucket(tensors, opts);
  return collective(OpType::ALLREDUCE, "gflow:all_reduce", std::move(call), device_of(tensors),
                    opts.timeout, tensors, {tensors}, [tensors, opts](Backend& inner) mutable {
                      return inner.allreduce(tensors, opts);
                    });
}

WorkPtr GflowBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto call = describe(OpType::_ALLREDUCE_SPARSE, tensors);
  call.reduce_op = opts.reduceOp.op_;
  return collective(
      OpType::_ALLREDUCE_SPARSE, "gflow:sparse_all_reduce", std::move(call), device_of(tensors),
      opts.timeout, tensors, {tensors},
      [tensors, opts](Backend& inner) mutable { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr GflowBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) {
  auto call = describe(OpType::ALLREDUCE_COALESCED, tensors);
  call.reduce_op = opts.reduceOp.op_;
  return collective(
      OpType::ALLREDUCE_COALESCED, "gflow:all_reduce", std::move(call), device_of(tensors),
      opts.timeout, tensors, {tensors},
      [tensors, opts](Backend& inner) mutable { return inner.allreduce_coalesced(tensors, opts); });
}

WorkPtr GflowBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto call = describe(OpType::REDUCE, tensors);
  call.reduce_op = opts.reduceOp.op_;
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective(
      OpType::REDUCE, "gflow:reduce", std::move(call), device_of(tensors), opts.timeout, tensors,
      {tensors}, [tensors, opts](Backend& inner) mutable { return inner.reduce(tensors, opts); });
}

WorkPtr GflowBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  return collective(OpType::ALLGATHER, "gflow:all_gather", describe(OpType::ALLGATHER, inputs),
                    device_of(inputs), opts.timeout, inputs, outputs,
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.allgather(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  return collective(OpType::_ALLGATHER_BASE, "gflow:_all_gather_base",
                    describe(OpType::_ALLGATHER_BASE, {input}), input.device(), opts.timeout,
                    {input}, {{output}}, [output, input, opts](Backend& inner) mutable {
                      return inner._allgather_base(output, input, opts);
                    });
}

WorkPtr GflowBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  return collective(OpType::ALLGATHER_COALESCED, "gflow:all_gather",
                    describe(OpType::ALLGATHER_COALESCED, inputs), device_of(inputs), opts.timeout,
                    inputs, outputs, [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.allgather_coalesced(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  return collective(kAllGatherIntoTensorCoalesced, "gflow:all_gather",
                    describe(kAllGatherIntoTensorCoalesced, inputs), device_of(inputs),
                    opts.timeout, inputs, {outputs},
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::gather(TensorLists& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) {
  auto call = describe(OpType::GATHER, inputs);
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective(OpType::GATHER, "gflow:gather", std::move(call), device_of(inputs),
                    opts.timeout, inputs, outputs, [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.gather(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::scatter(Tensors& outputs, TensorLists& inputs,
                              const c10d::ScatterOptions& opts) {
  // Only the root has inputs, so the ranks compare what each gets.
  auto call = describe(OpType::SCATTER, outputs);
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective(OpType::SCATTER, "gflow:scatter", std::move(call), device_of(outputs),
                    opts.timeout, flattened(inputs), {outputs},
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.scatter(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  const auto all = flattened(inputs);
  auto call = describe(OpType::REDUCE_SCATTER, all);
  call.reduce_op = opts.reduceOp.op_;
  return collective(OpType::REDUCE_SCATTER, "gflow:reduce_scatter", std::move(call),
                    device_of(outputs), opts.timeout, all, {outputs},
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.reduce_scatter(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::_REDUCE_SCATTER_BASE, {input});
  call.reduce_op = opts.reduceOp.op_;
  return collective(OpType::_REDUCE_SCATTER_BASE, "gflow:_reduce_scatter_base", std::move(call),
                    input.device(), opts.timeout, {input}, {{output}},
                    [output, input, opts](Backend& inner) mutable {
                      return inner._reduce_scatter_base(output, input, opts);
                    });
}

WorkPtr GflowBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs);
  call.reduce_op = opts.reduceOp.op_;
  return collective(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "gflow:reduce_scatter",
                    std::move(call), device_of(inputs), opts.timeout, inputs, {outputs},
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& opts) {
  return collective(OpType::ALLTOALL_BASE, "gflow:all_to_all",
                    describe_all_to_all_single(output, input, output_splits, input_splits, size_),
                    input.device(), opts.timeout, {input}, {{output}},
                    [output, input, output_splits, input_splits, opts](Backend& inner) mutable {
                      return inner.alltoall_base(output, input, output_splits, input_splits, opts);
                    });
}

WorkPtr GflowBackend::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) {
  return collective(OpType::ALLTOALL, "gflow:all_to_all",
                    describe_all_to_all(OpType::ALLTOALL, outputs, inputs), device_of(inputs),
                    opts.timeout, inputs, {outputs},
                    [outputs, inputs, opts](Backend& inner) mutable {
                      return inner.alltoall(outputs, inputs, opts);
                    });
}

WorkPtr GflowBackend::barrier(const c10d::BarrierOptions& opts) {
  const bool cuda = !opts.device_ids.empty() || (opts.device && opts.device->is_cuda());
  return collective(OpType::BARRIER, "gflow:barrier", describe(OpType::BARRIER, {}),
                    at::Device(cuda ? at::kCUDA : at::kCPU), opts.timeout, {}, {},
                    [opts](Backend& inner) mutable { return inner.barrier(opts); });
}

void GflowBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  gloo_->monitoredBarrier(opts, wait_all_ranks);
}

// Point to point: between two ranks, aside from the queue of collectives.

WorkPtr GflowBackend::message(OpType kind, const char* title, const Tensors& tensors,
                              std::function<void(GflowWork&)> rest) {
  auto work = c10::make_intrusive<GflowWork>(rank_, kind, title, TensorLists{tensors},
                                             timeout_.load(), tensors);
  auto body = [work, rest = std::move(rest)] { rest(*work); };
  group_->submit_aside(std::make_shared<TorchOperation>(work, std::move(body)));
  return work;
}

WorkPtr GflowBackend::send(Tensors& tensors, int to, int tag) {
  const auto& tensor = only(tensors);
  if (!tensor.is_cpu()) return inner_for(tensor.device()).send(tensors, to, tag);
  auto rest = messages_.begin_send(tensor, to, tag);
  return message(OpType::SEND, "gflow:send", tensors, [rest](GflowWork&) { rest(); });
}

WorkPtr GflowBackend::recv(Tensors& tensors, int from, int tag) {
  const auto& tensor = only(tensors);
  if (!tensor.is_cpu()) return inner_for(tensor.device()).recv(tensors, from, tag);
  auto rest = messages_.begin_receive(tensor, from, tag);
  return message(OpType::RECV, "gflow:recv", tensors,
                 [rest](GflowWork& work) { work.set_source(rest()); });
}

WorkPtr GflowBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto& tensor = only(tensors);
  if (!tensor.is_cpu()) return inner_for(tensor.device()).recvAnysource(tensors, tag);
  auto rest = messages_.begin_receive(tensor, PointToPoint::kAnySource, tag);
  return message(OpType::RECVANYSOURCE, "gflow:recvAnySource", tensors,
                 [rest](GflowWork& work) { work.set_source(rest()); });
}

// The memory of gradient buckets.

bool GflowBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  // The Reducer asks for CPU with the index -1.
  return device < 0 || (cuda_ && cuda_->supportsTensorAlloc(device));
}

at::Tensor GflowBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().is_cpu()) return buckets_.allocate(size, options);
  return inner_for(options.device()).allocateTensor(size, options);
}

// The life of the group.

void GflowBackend::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
  if (cuda_) cuda_->setTimeout(timeout);
}

void GflowBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  gloo_->setGroupUid(uid);
  if (cuda_) cuda_->setGroupUid(uid);
}

void GflowBackend::abort() {
  WithoutGil without_gil;
  group_->abort("the process group was aborted");
  gloo_->abort();
  if (cuda_) cuda_->abort();
}

void GflowBackend::shutdown() {
  WithoutGil without_gil;
  group_->close();
  gloo_->shutdown();
  if (cuda_) cuda_->shutdown();
}

}  // namespace gflow
