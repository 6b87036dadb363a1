#include "gflow_backend.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "arguments.h"
#include "caller.h"
#include "describe.h"
#include "exchanged_tensors.h"
#include "gil.h"
#include "tell_user.h"

namespace gflow {

using c10d::OpType;

namespace {

at::Device device_of(const Tensors& tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
}

// What the engine refuses is an error of the backend, like what it fails later.
template <typename Call>
auto as_backend_error(Call call) {
  try {
    return call();
  } catch (const rust::Error& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

// The tensor of a message, as an alias that Python does not know: a message that has no peer may
// outlive the interpreter, and the thread that lets go of it then must not need Python for that.
at::Tensor only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "gflow: a message is one tensor, got ", tensors.size());
  return tensors.front().detach();
}

Tensors flattened(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

GflowBackend::GflowBackend(int rank, int size, Milliseconds timeout, rust::Box<Group> group,
                           c10::intrusive_ptr<Backend> gloo, std::optional<Accelerator> accelerator)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>(timeout)),
      timeout_(timeout),
      gloo_(std::move(gloo)),
      accelerator_(std::move(accelerator)),
      messages_(gloo_),
      group_(std::move(group)),
      lanes_(*group_) {}

GflowBackend::~GflowBackend() {
  WithoutGil without_gil;
  try {
    group_->close();
  } catch (const std::exception& error) {
    TORCH_WARN("gflow: closing a process group failed: ", error.what());
  }
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

bool GflowBackend::compresses_on_devices() const {
  return accelerator_ && accelerator_->known_to_engine && group_->compresses();
}

bool GflowBackend::compresses_on(at::Device device) const {
  return compresses_on_devices() && device.type() == accelerator_->type;
}

c10::intrusive_ptr<Backend> GflowBackend::inner_to_call(at::Device device) {
  auto inner = inner_for(device);
  // What the engine has yet to begin there must not become a part of it.
  if (coalescing_.is_active()) let_engine_begin();
  coalescing_.enter(inner);
  return inner;
}

void GflowBackend::let_engine_begin() {
  // A group that has failed does not let anybody wait for its lost ranks in the inner backend.
  check_usable();
  if (!engine_has_device_calls_.exchange(false)) return;
  WithoutGil without_gil;
  try {
    as_backend_error([&] {
      group_->flush();
      group_->fence(timeout_ms());
    });
  } catch (...) {
    // They are still to be begun before anything that comes later.
    engine_has_device_calls_ = true;
    throw;
  }
}

std::function<void()> GflowBackend::if_alive(void (GflowBackend::*method)()) {
  auto self = c10::intrusive_ptr<GflowBackend>::reclaim_copy(this);
  return [weak = c10::weak_intrusive_ptr<GflowBackend>(self), method] {
    if (auto backend = weak.lock()) (backend.get()->*method)();
  };
}

void GflowBackend::check_usable() {
  as_backend_error([&] { group_->check_usable(); });
}

template <typename CallOptions>
WorkPtr GflowBackend::submit(CallDescription call, const CallOptions& opts,
                             c10::intrusive_ptr<GflowWork> work, TorchOperation::Steps steps) {
  call.timeout_ms = static_cast<uint64_t>(limit_of(opts).count());
  // It may be held back to be exchanged with others.
  if (call.bucket != BucketMemory::kUnnumbered) work->before_wait(if_alive(&GflowBackend::flush));
  auto operation = std::make_shared<TorchOperation>(work, std::move(steps));
  work->set_seq(as_backend_error([&] {
    if (opts.asyncOp) return group_->submit(std::move(call), operation);
    WithoutGil without_gil;
    return group_->submit_and_wait(std::move(call), operation);
  }));
  return coalescing_.note(std::move(work));
}

template <typename CallOptions, typename Start>
WorkPtr GflowBackend::collective(const char* title, CallDescription call, at::Device device,
                                 const CallOptions& opts, TensorLists outputs, TensorLists inputs,
                                 Start start) {
  const auto inner = inner_for(device);
  buckets_.end_layout();
  if (!device.is_cpu()) {
    let_engine_begin();
    return start(*inner_to_call(device), outputs, inputs);
  }
  auto work =
      c10::make_intrusive<GflowWork>(rank_, static_cast<OpType>(call.kind), title, outputs,
                                     limit_of(opts), flattened(inputs.empty() ? outputs : inputs));
  auto tensors = std::make_shared<ExchangedTensors>(std::move(outputs), std::move(inputs));
  TorchOperation::Steps steps{
      .prepare = [tensors] { tensors->make_contiguous(); },
      .open = [tensors] { return tensors->spans(); },
      .begin =
          [tensors, start, inner] {
            auto [outputs, inputs] = tensors->for_inner();
            return start(*inner, outputs, inputs);
          },
      .end = [tensors] { tensors->write_back(); },
  };
  return submit(std::move(call), opts, std::move(work), std::move(steps));
}

WorkPtr GflowBackend::device_allreduce(CallDescription call, const at::Tensor& tensor,
                                       const c10d::AllreduceOptions& opts) {
  const auto device = tensor.device();
  const auto callers = current_stream(device);
  TORCH_CHECK(!is_capturing(callers),
              "gflow: an all_reduce in a process group that compresses gradients cannot be "
              "captured into a graph: the ranks agree on each one anew when it is called. Capture "
              "without it, or use a group with compress=\"off\"");
  buckets_.end_layout();
  const auto lane = as_backend_error([&] { return lanes_.open(device); });
  call.device = device.index();
  call.stream = raw_handle(callers);
  // The engine still works on the memory when everybody has let go of the tensor.
  c10::impl::VirtualGuardImpl(device.type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), lane);
  const TensorLists reduced{{tensor}};
  auto work = c10::make_intrusive<GflowWork>(rank_, OpType::ALLREDUCE, "gflow:all_reduce", reduced,
                                             limit_of(opts), Tensors{tensor}, lane);
  work->check_with(if_alive(&GflowBackend::check_usable));
  auto tensors = std::make_shared<ExchangedTensors>(reduced, TensorLists());
  TorchOperation::Steps steps{
      .prepare = [tensors] { tensors->check_dense(); },
      .open = [tensors] { return tensors->spans(); },
      .begin =
          [tensors, opts, device, inner = accelerator_->inner] {
            TORCH_CHECK(inner, "gflow: this process group has no backend for tensors on ", device,
                        " that are no gradients");
            auto outputs = tensors->for_inner().first;
            return inner->allreduce(outputs[0], opts);
          },
      // By then the engine's stream is behind all of it, also behind what the inner backend began.
      .end = [work] { work->mark_end_on_device(); },
      .lane = lane,
  };
  engine_has_device_calls_ = true;
  return submit(std::move(call), opts, std::move(work), std::move(steps));
}

// Collectives, each described by the tensors that must be alike on all ranks.

WorkPtr GflowBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (opts.rootRank == rank_ && tensors.size() == 1) {
    std::lock_guard<std::mutex> lock(replacements_mutex_);
    if (!replacements_.empty() && tensors[0].sizes() == replacements_.front().sizes() &&
        tensors[0].scalar_type() == replacements_.front().scalar_type()) {
      tensors[0].copy_(replacements_.front());
      replacements_.pop_front();
    }
  }
  auto call = describe(OpType::BROADCAST, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective("gflow:broadcast", std::move(call), device_of(tensors), opts, {tensors}, {},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists&) {
                      return inner.broadcast(outputs[0], opts);
                    });
}

// A tensor is a gradient bucket if the Reducer got its memory here, brings it itself, and this is a
// backward pass. Everything else a user may reduce, also inside a backward pass, stays exact.
std::optional<uint32_t> GflowBackend::gradient_bucket(const Tensors& tensors,
                                                      const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1 || opts.reduceOp != c10d::ReduceOp::SUM ||
      torch::autograd::get_current_graph_task_id() < 0) {
    return std::nullopt;
  }
  return buckets_.find(tensors.front());
}

// The Reducer waits for Futures, which cannot be seen from here, so the engine would not know when
// to stop waiting for more buckets. A callback that autograd runs at the end of the backward pass
// tells it; queued at the first bucket, it comes before the Reducer's own, which waits.
void GflowBackend::await_end_of_pass() {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (awaited_pass_.exchange(pass) == pass) return;
  auto self = c10::intrusive_ptr<GflowBackend>::reclaim_copy(this);
  torch::autograd::Engine::get_default_engine().queue_callback([self] { self->end_of_pass(); });
}

void GflowBackend::end_of_pass() {
  group_->end_of_pass();
  forget_what_is_gone();
  const std::string announcement(group_->announcement());
  if (!announcement.empty()) tell_user(announcement);
}

WorkPtr GflowBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  // Sparse tensors come this way too, and do not fit with dense ones.
  const bool sparse = !tensors.empty() && tensors.front().is_sparse();
  auto call = describe(sparse ? OpType::_ALLREDUCE_SPARSE : OpType::ALLREDUCE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  const auto bucket = gradient_bucket(tensors, opts);
  call.gradient = bucket.has_value();
  call.bucket = bucket.value_or(BucketMemory::kUnnumbered);
  // Calls that are coalesced are the inner backend's: only that can make one of them.
  const bool by_engine = tensors.size() == 1 && !sparse && compresses_on(device_of(tensors)) &&
                         !coalescing_.is_active();
  // In the first step of a static graph the Reducer brings all buckets when the pass is over.
  const bool is_over = bucket && backward_is_over();
  if (bucket && !is_over) await_end_of_pass();
  auto work = by_engine ? device_allreduce(std::move(call), tensors.front(), opts)
                        : collective("gflow:all_reduce", std::move(call), device_of(tensors), opts,
                                     {tensors}, {},
                                     [opts](Backend& inner, TensorLists& outputs, TensorLists&) {
                                       return inner.allreduce(outputs[0], opts);
                                     });
  // Nobody is told anything here: the Reducer holds its lock.
  if (is_over && buckets_.is_last_of_model(*bucket)) group_->end_of_pass();
  return work;
}

WorkPtr GflowBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto call = describe(OpType::_ALLREDUCE_SPARSE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  return collective("gflow:sparse_all_reduce", std::move(call), device_of(tensors), opts, {tensors},
                    {}, [opts](Backend& inner, TensorLists& outputs, TensorLists&) {
                      return inner.allreduce_sparse(outputs[0], opts);
                    });
}

WorkPtr GflowBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) {
  auto call = describe(OpType::ALLREDUCE_COALESCED, tensors);
  call.reduce_op = opts.reduceOp.op_;
  return collective("gflow:all_reduce", std::move(call), device_of(tensors), opts, {tensors}, {},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists&) {
                      return inner.allreduce_coalesced(outputs[0], opts);
                    });
}

WorkPtr GflowBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto call = describe(OpType::REDUCE, tensors);
  call.complaint = arguments::check_in_place(tensors);
  call.reduce_op = opts.reduceOp.op_;
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective("gflow:reduce", std::move(call), device_of(tensors), opts, {tensors}, {},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists&) {
                      return inner.reduce(outputs[0], opts);
                    });
}

WorkPtr GflowBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::ALLGATHER, inputs);
  call.complaint = arguments::check_one_per_rank("outputs", outputs, inputs, size_);
  return collective("gflow:all_gather", std::move(call), device_of(inputs), opts, outputs, {inputs},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.allgather(outputs, inputs[0], opts);
                    });
}

WorkPtr GflowBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::_ALLGATHER_BASE, {input});
  call.complaint = arguments::check_parts("output", {output}, {input}, size_);
  return collective("gflow:_all_gather_base", std::move(call), input.device(), opts, {{output}},
                    {{input}}, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner._allgather_base(outputs[0][0], inputs[0][0], opts);
                    });
}

WorkPtr GflowBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  auto call = describe(OpType::ALLGATHER_COALESCED, inputs);
  call.complaint = arguments::check_lists_per_rank(outputs, inputs, size_);
  return collective("gflow:all_gather", std::move(call), device_of(inputs), opts, outputs, {inputs},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.allgather_coalesced(outputs, inputs[0], opts);
                    });
}

WorkPtr GflowBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  auto call = describe(kAllGatherIntoTensorCoalesced, inputs);
  call.complaint = arguments::check_parts("output", outputs, inputs, size_);
  return collective("gflow:all_gather", std::move(call), device_of(inputs), opts, {outputs},
                    {inputs}, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.allgather_into_tensor_coalesced(outputs[0], inputs[0], opts);
                    });
}

WorkPtr GflowBackend::gather(TensorLists& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) {
  auto call = describe(OpType::GATHER, inputs);
  if (opts.rootRank == rank_) {
    call.complaint = arguments::check_one_per_rank("outputs", outputs, inputs, size_);
  }
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective("gflow:gather", std::move(call), device_of(inputs), opts, outputs, {inputs},
                    [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.gather(outputs, inputs[0], opts);
                    });
}

WorkPtr GflowBackend::scatter(Tensors& outputs, TensorLists& inputs,
                              const c10d::ScatterOptions& opts) {
  // Only the root has inputs, so the ranks compare what each gets.
  auto call = describe(OpType::SCATTER, outputs);
  if (opts.rootRank == rank_) {
    call.complaint = arguments::check_one_per_rank("inputs", inputs, outputs, size_);
  }
  call.root = static_cast<uint32_t>(opts.rootRank);
  return collective("gflow:scatter", std::move(call), device_of(outputs), opts, {outputs}, inputs,
                    [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.scatter(outputs[0], inputs, opts);
                    });
}

WorkPtr GflowBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::REDUCE_SCATTER, flattened(inputs));
  call.complaint = arguments::check_one_per_rank("inputs", inputs, outputs, size_);
  call.reduce_op = opts.reduceOp.op_;
  return collective("gflow:reduce_scatter", std::move(call), device_of(outputs), opts, {outputs},
                    inputs, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.reduce_scatter(outputs[0], inputs, opts);
                    });
}

WorkPtr GflowBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::_REDUCE_SCATTER_BASE, {input});
  call.complaint = arguments::check_parts("input", {input}, {output}, size_);
  call.reduce_op = opts.reduceOp.op_;
  return collective("gflow:_reduce_scatter_base", std::move(call), input.device(), opts, {{output}},
                    {{input}}, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner._reduce_scatter_base(outputs[0][0], inputs[0][0], opts);
                    });
}

WorkPtr GflowBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  auto call = describe(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs);
  call.complaint = arguments::check_parts("input", inputs, outputs, size_);
  call.reduce_op = opts.reduceOp.op_;
  return collective("gflow:reduce_scatter", std::move(call), device_of(inputs), opts, {outputs},
                    {inputs}, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.reduce_scatter_tensor_coalesced(outputs[0], inputs[0], opts);
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
  return collective("gflow:all_to_all", std::move(call), input.device(), opts, {{output}},
                    {{input}}, [=](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      auto outputs_by_rank = output_splits;
                      auto inputs_by_rank = input_splits;
                      return inner.alltoall_base(outputs[0][0], inputs[0][0], outputs_by_rank,
                                                 inputs_by_rank, opts);
                    });
}

WorkPtr GflowBackend::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) {
  auto call = describe_all_to_all(outputs, inputs);
  call.complaint = arguments::check_lists(outputs, inputs, size_);
  return collective("gflow:all_to_all", std::move(call), device_of(inputs), opts, {outputs},
                    {inputs}, [opts](Backend& inner, TensorLists& outputs, TensorLists& inputs) {
                      return inner.alltoall(outputs[0], inputs[0], opts);
                    });
}

WorkPtr GflowBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto served = accelerator_ ? accelerator_->type : at::kCUDA;
  const bool is_on_device =
      !opts.device_ids.empty() || (opts.device && opts.device->type() == served);
  const at::Device device(is_on_device ? served : at::kCPU);
  return collective(
      "gflow:barrier", describe(OpType::BARRIER, {}), device, opts, {}, {},
      [opts](Backend& inner, TensorLists&, TensorLists&) { return inner.barrier(opts); });
}

void GflowBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // It looks for ranks that are missing, so there is nothing to agree on; but the inner backend
  // pairs calls by their order, so what came before must be over.
  as_backend_error([&] { group_->fence(static_cast<uint64_t>(limit_of(opts).count())); });
  gloo_->monitoredBarrier(opts, wait_all_ranks);
}

// Point to point: between two ranks, aside from the queue of collectives.

WorkPtr GflowBackend::message(OpType kind, const char* title, const at::Tensor& tensor, int peer,
                              std::function<void(GflowWork&)> rest) {
  auto work = c10::make_intrusive<GflowWork>(rank_, kind, title, TensorLists{{tensor}},
                                             timeout_.load(), Tensors{tensor});
  // No collective bounds the time of a message, so whoever waits for it does.
  work->limit_waits();
  auto end = [=, rest = std::move(rest)] {
    try {
      rest(*work);
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception& error) {
      // The inner backend only knows an address.
      const auto who = peer == PointToPoint::kAnySource ? "any rank" : c10::str("rank ", peer);
      C10_THROW_ERROR(DistBackendError, c10::str(title, " with ", who, " failed: ", error.what()));
    }
  };
  auto operation =
      std::make_shared<TorchOperation>(work, TorchOperation::Steps{.end = std::move(end)});
  as_backend_error([&] { group_->submit_aside(operation); });
  return coalescing_.note(std::move(work));
}

WorkPtr GflowBackend::send(Tensors& tensors, int to, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_to_call(tensor.device())->send(tensors, to, tag);
  auto rest = messages_.begin_send(tensor, to, tag);
  return message(OpType::SEND, "gflow:send", tensor, to, [rest](GflowWork&) { rest(); });
}

WorkPtr GflowBackend::recv(Tensors& tensors, int from, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_to_call(tensor.device())->recv(tensors, from, tag);
  auto rest = messages_.begin_receive(tensor, from, tag);
  return message(OpType::RECV, "gflow:recv", tensor, from,
                 [rest](GflowWork& work) { work.set_source(rest()); });
}

WorkPtr GflowBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_to_call(tensor.device())->recvAnysource(tensors, tag);
  auto rest = messages_.begin_receive(tensor, PointToPoint::kAnySource, tag);
  return message(OpType::RECVANYSOURCE, "gflow:recvAnySource", tensor, PointToPoint::kAnySource,
                 [rest](GflowWork& work) { work.set_source(rest()); });
}

bool GflowBackend::supportsCoalescing() const {
  return has_device_backend() && accelerator_->inner->supportsCoalescing();
}

void GflowBackend::startCoalescing() { coalescing_.start(getError() == c10d::ErrorType::SUCCESS); }

// The memory of gradient buckets.

bool GflowBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  // The Reducer asks for CPU with the index -1. Where nothing is compressed it shall take memory as
  // if it had not asked: whether NCCL's own is better is not for gflow to decide.
  return device < 0 || compresses_on_devices();
}

at::Tensor GflowBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().is_cpu()) {
    const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
    auto shared = as_backend_error([&] { return group_->allocate(bytes); });
    forget_what_is_gone();
    return buckets_.allocate(size, options, std::move(shared));
  }
  if (!compresses_on(options.device())) {
    return inner_for(options.device())->allocateTensor(size, options);
  }
  forget_what_is_gone();
  return buckets_.allocate_on_device(size, options);
}

// What is kept of gradients.

void GflowBackend::forget_what_is_gone() {
  const auto gone = buckets_.take_gone();
  group_->forget({gone.data(), gone.size()});
}

MetricsSnapshot GflowBackend::metrics() {
  forget_what_is_gone();
  return as_backend_error([&] { return group_->metrics(); });
}

BucketState GflowBackend::bucket_state(uint32_t number) const {
  return as_backend_error([&] { return group_->bucket_state(number, timeout_ms()); });
}

void GflowBackend::load_bucket(uint32_t number, BucketState state) {
  as_backend_error([&] { group_->load_bucket(number, std::move(state), timeout_ms()); });
}

void GflowBackend::set_momentum(float factor, bool nesterov) {
  as_backend_error([&] { group_->set_momentum(factor, nesterov, timeout_ms()); });
}

void GflowBackend::keep_for_undo(bool is_wanted) {
  as_backend_error([&] { group_->keep_for_undo(is_wanted, timeout_ms()); });
}

void GflowBackend::take_note_of_step(bool skipped, float factor) {
  as_backend_error([&] { group_->record_step(skipped, factor, timeout_ms()); });
}

void GflowBackend::replace_broadcasts(Tensors replacements) {
  std::lock_guard<std::mutex> lock(replacements_mutex_);
  replacements_.assign(replacements.begin(), replacements.end());
}

// The life of the group.

void GflowBackend::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
  if (has_device_backend()) accelerator_->inner->setTimeout(timeout);
}

void GflowBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  gloo_->setGroupUid(uid);
  if (has_device_backend()) accelerator_->inner->setGroupUid(uid);
}

c10d::ErrorType GflowBackend::getError() {
  try {
    group_->check_usable();
    return c10d::ErrorType::SUCCESS;
  } catch (const rust::Error&) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void GflowBackend::abort() {
  WithoutGil without_gil;
  group_->abort("the process group was aborted");
  gloo_->abort();
  if (has_device_backend()) accelerator_->inner->abort();
}

void GflowBackend::shutdown() {
  WithoutGil without_gil;
  group_->close();
  gloo_->shutdown();
  if (has_device_backend()) accelerator_->inner->shutdown();
}

}  // namespace gflow
