// A torch.distributed backend for the device, on top of the stand-in for NCCL; the counterpart of
// torch's NCCL backend on a GPU. Like that one, it waits for nothing but its own events.
#pragma once

#include <nccl.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace standin_device {

class Collectives : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `library` is the path of the stand-in: another NCCL may already be loaded under that name.
  Collectives(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
              const std::string& library);
  ~Collectives() override;

  const std::string getBackendName() const override { return "standin"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override;
  void shutdown() override;

 private:
  struct Table;

  ncclComm_t communicator(at::Device device);

  // Runs `call` on the backend's own stream, or on the caller's stream if the call is synchronous.
  template <typename Call>
  WorkPtr run(c10d::OpType kind, const Tensors& touched, TensorLists results, bool is_async,
              Call call);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Table> nccl_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, ncclComm_t> communicators_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  // The stream of the calls since startCoalescing; empty until there is one.
  bool is_coalescing_ = false;
  std::optional<c10::Stream> coalesced_on_;
};

}  // namespace standin_device
