// GflowBackend: what torch.distributed calls. It translates c10d's calls for the engine, and says
// which of them are for gradients and when a backward pass is over.
//
// A collective on CPU tensors is described, queued in the engine (rust/engine), agreed on by all
// ranks, and carried out: by the engine itself, or by the inner Gloo backend where the engine does
// not (rust/collective/plan.rs says which). A caller that waits anyway runs it on its own thread if
// nothing else is under way. A send or a receive runs aside from that queue.
//
// Tensors on a device have an inner backend of their own (NCCL), and what concerns them goes
// straight there, with one exception: in a group that compresses, an all-reduce of one dense tensor
// takes the way of the CPU ones, because the ranks must agree on whether it is a gradient. It is
// over for the engine when it is on the engine's stream.
//
// Every method may be called from any thread; the order of calls is the order of the collectives.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bucket_memory.h"
#include "coalescing.h"
#include "device_lanes.h"
#include "gflow_work.h"
#include "point_to_point.h"
#include "rust/bridge/entries.rs.h"
#include "torch_operation.h"

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

  // The devices that a group serves beside the CPU.
  struct Accelerator {
    c10::DeviceType type;
    // Exchanges there what the engine does not. May be null.
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

  // Calls that are one: messages in both directions, or what `_coalescing_manager` collects.
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

  MetricsSnapshot metrics();

  // What is kept of gradients from step to step. Each waits until all that was called is over.
  std::vector<BucketMemory::Listed> buckets() { return buckets_.list(); }
  Position position() const { return group_->position(); }
  ByteRange shard_of(size_t bytes) const { return group_->shard_of(bytes); }
  BucketState bucket_state(uint32_t number) const;
  void load_bucket(uint32_t number, BucketState state);
  void set_momentum(float factor, bool nesterov);
  void keep_for_undo(bool is_wanted);
  void take_note_of_step(bool skipped, float factor);

  // The next broadcasts from this rank send these instead, one after the other, where type and size
  // are the same. So DDP, which broadcasts how it lays out its buckets, gets the layout that it had
  // when a state was saved.
  void replace_broadcasts(Tensors replacements);

 private:
  // The inner backend for tensors on `device`, or an error that says what this group serves.
  c10::intrusive_ptr<Backend> inner_for(at::Device device) const;

  // Whether the devices of this kind have an inner backend.
  bool has_device_backend() const { return accelerator_ && accelerator_->inner; }

  // The same for tensors on a device, to be called at once.
  c10::intrusive_ptr<Backend> inner_to_call(at::Device device);

  // Whether gradients on devices, or on this one, are compressed.
  bool compresses_on_devices() const;
  bool compresses_on(at::Device device) const;

  // Is called before a collective goes straight to the inner backend of a device: what the engine
  // has yet to begin there must come first, as on all ranks.
  void let_engine_begin();

  // The same as collective(), of an all-reduce of a tensor on a device that the engine agrees on.
  WorkPtr device_allreduce(CallDescription call, const at::Tensor& tensor,
                           const c10d::AllreduceOptions& opts);

  // Puts a collective into the queue of the engine.
  template <typename CallOptions>
  WorkPtr submit(CallDescription call, const CallOptions& opts, c10::intrusive_ptr<GflowWork> work,
                 TorchOperation::Steps steps);

  // How long a call may take.
  template <typename CallOptions>
  Milliseconds limit_of(const CallOptions& opts) const {
    return opts.timeout > Milliseconds::zero() ? opts.timeout : timeout_.load();
  }

  // Something to call later, if the group is still there then.
  std::function<void()> if_alive(void (GflowBackend::*method)());
  void flush() { group_->flush(); }
  void check_usable();

  // Queues a collective. `start` begins it on the inner backend that it is given, with the tensors
  // that it is given: `outputs`, which it fills (or reduces in place), and `inputs`. Of `opts` only
  // what all of torch's option types have is read: the timeout, and whether the caller waits.
  template <typename CallOptions, typename Start>
  WorkPtr collective(const char* title, CallDescription call, at::Device device,
                     const CallOptions& opts, TensorLists outputs, TensorLists inputs, Start start);

  // Runs a send or a receive that has begun.
  WorkPtr message(c10d::OpType kind, const char* title, const at::Tensor& tensor, int peer,
                  std::function<void(GflowWork&)> rest);

  // The number of the gradient bucket that this call is for, if it is for one.
  std::optional<uint32_t> gradient_bucket(const Tensors& tensors,
                                          const c10d::AllreduceOptions& opts);

  // Tells the engine which buckets have gone, so that nothing is kept of them.
  void forget_what_is_gone();

  // Has the engine told when the backward pass that is running is over.
  void await_end_of_pass();
  void end_of_pass();

  uint64_t timeout_ms() const { return static_cast<uint64_t>(timeout_.load().count()); }

  const c10::intrusive_ptr<Options> options_;
  std::atomic<Milliseconds> timeout_;
  const c10::intrusive_ptr<Backend> gloo_;
  const std::optional<Accelerator> accelerator_;
  Coalescing coalescing_;
  BucketMemory buckets_;
  PointToPoint messages_;
  // The backward pass whose end is awaited; autograd numbers them.
  std::atomic<int> awaited_pass_{-1};
  std::mutex replacements_mutex_;
  std::deque<at::Tensor> replacements_;
  // Whether the engine was given collectives on devices since they were last waited for.
  std::atomic<bool> engine_has_device_calls_{false};
  const rust::Box<Group> group_;
  DeviceLanes lanes_;
};

}  // namespace gflow
