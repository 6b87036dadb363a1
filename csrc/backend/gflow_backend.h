// GflowBackend: what torch.distributed calls. It translates c10d's calls for the engine, and tells
// the engine which of them are gradients and when a backward pass has ended.
//
// A collective on CPU tensors is described, queued in the engine (rust/engine), agreed on by all
// ranks, and carried out: by the engine itself, or by the inner Gloo backend where the engine has
// no implementation (rust/collective/plan.rs says which). A caller that waits anyway runs it on its
// own thread if nothing else is running. Sends and receives bypass that queue.
//
// Tensors on a device have their own inner backend (NCCL), and calls on them go straight there,
// with one exception: in a group that compresses, an all-reduce of one dense tensor goes through
// the engine like one on the CPU, because the ranks must agree on whether it is a gradient. The
// engine considers it complete once all of its work is queued on the engine's stream.
//
// Thread safety: every method may be called from any thread. The order of calls is the order of the
// collectives.
//
// Implemented by topic: lifecycle.cpp, submit.cpp, allreduce.cpp, collectives.cpp, send_recv.cpp,
// gradient_state.cpp.
#pragma once

#include <atomic>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/coalescing.h"
#include "backend/device_queues.h"
#include "backend/point_to_point.h"
#include "gradients/broadcast_replacements.h"
#include "gradients/bucket_registry.h"
#include "rust/bridge/entries.rs.h"
#include "work/gflow_work.h"
#include "work/torch_operation.h"

namespace gflow {

using c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

class GflowBackend : public Backend {
 public:
  struct Options : Backend::Options {
    explicit Options(Milliseconds timeout) : Backend::Options("gflow", timeout) {}
#ifdef C10D_BACKEND_HAS_HOOKS
    // Declared together with the hooks; older torch has neither.
    c10::intrusive_ptr<Backend::Options> clone() const override {
      return c10::make_intrusive<Options>(*this);
    }
#endif
  };

  // The devices that a group serves besides the CPU.
  struct Accelerator {
    c10::DeviceType type;
    // Carries out what the engine does not. May be null.
    c10::intrusive_ptr<Backend> inner;
    // Whether the engine understands the streams and the memory of these devices.
    bool known_to_engine;
  };

  // `gloo` serves CPU tensors.
  GflowBackend(int rank, int size, Milliseconds timeout, rust::Box<Group> group,
               c10::intrusive_ptr<Backend> gloo, std::optional<Accelerator> accelerator);
  ~GflowBackend() override;

  const std::string getBackendName() const override { return "gflow"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }

  // Collectives.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Point to point.
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Coalesced calls: messages in both directions, or the calls inside a `_coalescing_manager`.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override { return coalescing_.end(); }

  // The memory of gradient buckets.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // The life of the group.
  void setTimeout(Milliseconds timeout) override;
  void setGroupUid(const std::string& uid) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->seq(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // For gflow's own Python functions.
  MetricsSnapshot metrics();
  Position position() const { return group_->position(); }
  std::vector<BucketRegistry::LiveBucket> buckets() { return buckets_.live(); }
  ByteRange shard_of(size_t bytes) const { return group_->shard_of(bytes); }
  // The next broadcasts from this rank send these instead.
  void replace_broadcasts(Tensors tensors) { replacements_.set(std::move(tensors)); }

  // State that gradients carry between steps. Each call waits for all collectives called before it.
  // In a group that has failed: the newest state after at most `step` exchanges.
  BucketState bucket_state(uint32_t number, uint64_t step) const;
  void load_bucket(uint32_t number, BucketState state, bool owes);
  void set_momentum(float factor, bool nesterov);
  // Without `buckets`, for all of them.
  void set_stepping(const std::string& stepping, const std::vector<uint32_t>& buckets);
  std::string chosen_method() const;
  void set_chosen_method(const std::string& method);
  void keep_for_undo(bool enabled);
  void keep_last_step();
  // Where the parameters of a model are in its buckets; its steps may leave some unused.
  void add_layout(const ModelLayout& layout);
  void record_step(bool skipped, float factor);

 private:
  // Common to all of torch's option types.
  struct CallOptions {
    Milliseconds timeout;
    bool async;
  };

  // A collective as one of the methods above describes it.
  struct Collective {
    // As a profiler shows it.
    const char* title;
    CallDescription call;
    at::Device device;
    CallOptions options;
    // Filled, or reduced in place.
    TensorLists outputs;
    TensorLists inputs;
    // Begins it on the given inner backend, with the given outputs and inputs.
    std::function<WorkPtr(Backend&, TensorLists&, TensorLists&)> start;
  };

  template <typename Opts>
  CallOptions call_options(const Opts& opts) const {
    return {opts.timeout > Milliseconds::zero() ? opts.timeout : timeout_.load(), opts.asyncOp};
  }

  // submit.cpp: on the way to the engine, or around it.
  //
  // Queues a collective in the engine, or begins it on the inner backend of its device.
  WorkPtr submit_collective(Collective collective);
  // Queues an all-reduce of a tensor on a device in the engine.
  WorkPtr submit_device_allreduce(CallDescription call, const at::Tensor& tensor,
                                  const c10d::AllreduceOptions& opts);
  WorkPtr enqueue(CallDescription call, CallOptions options, c10::intrusive_ptr<GflowWork> work,
                  TorchOperation::Steps steps);
  // The inner backend for tensors on `device`, or an error that says what this group serves.
  c10::intrusive_ptr<Backend> inner_for(at::Device device) const;
  // The same, for a call on the device's inner backend that follows at once.
  c10::intrusive_ptr<Backend> inner_for_direct_call(at::Device device);
  // Runs before a collective goes straight to a device's inner backend: waits until the engine has
  // begun the collectives it was given for devices, because on all ranks those come first.
  void fence_device_calls();
  // Whether this group's devices have an inner backend.
  bool has_device_backend() const { return accelerator_ && accelerator_->inner; }
  // Whether gradients are compressed on devices, or on this one.
  bool compresses_on_devices() const;
  bool compresses_on(at::Device device) const;

  // allreduce.cpp: which all-reduces are gradients.
  //
  // The number of the gradient bucket that this call reduces, if it reduces one.
  std::optional<uint32_t> gradient_bucket(const Tensors& tensors,
                                          const c10d::AllreduceOptions& opts);
  // If this call counts how many ranks used each parameter of a model: a bucket of that model. Else
  // no bucket.
  uint32_t counts_uses_of(const Tensors& tensors, const c10d::AllreduceOptions& opts);
  // Has autograd call end_of_pass() when the running backward pass ends.
  void await_end_of_pass();
  void end_of_pass();

  // send_recv.cpp: runs a send or receive that has begun; `complete` does the rest of it.
  WorkPtr submit_message(c10d::OpType kind, const char* title, const at::Tensor& tensor, int peer,
                         std::function<void(GflowWork&)> complete);

  // gradient_state.cpp: tells the engine which buckets are gone, so that it keeps nothing of them.
  void forget_dead_buckets();

  // lifecycle.cpp.
  void check_usable();
  void flush() { group_->flush(); }
  // Calls the method later, if the group still exists then.
  std::function<void()> if_alive(void (GflowBackend::*method)());
  uint64_t timeout_ms() const { return static_cast<uint64_t>(timeout_.load().count()); }

  const c10::intrusive_ptr<Options> options_;
  std::atomic<Milliseconds> timeout_;
  const c10::intrusive_ptr<Backend> gloo_;
  const std::optional<Accelerator> accelerator_;
  Coalescing coalescing_;
  BucketRegistry buckets_;
  BroadcastReplacements replacements_;
  PointToPoint messages_;
  // The backward pass whose end is awaited, as autograd numbers them.
  std::atomic<int> awaited_pass_{-1};
  // Whether the engine was given collectives on devices since the last fence_device_calls().
  std::atomic<bool> engine_has_device_calls_{false};
  const rust::Box<Group> group_;
  DeviceQueues device_queues_;
};

}  // namespace gflow
