#include "collectives.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <dlfcn.h>

#include <future>

#include "memory.h"
#include "streams.h"

namespace standin_device {

struct Collectives::Table {
  explicit Table(const std::string& library)
      : handle(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    TORCH_CHECK(handle, "cannot load ", library, ": ", dlerror());
    load(get_unique_id, "ncclGetUniqueId");
    load(init_rank, "ncclCommInitRank");
    load(destroy, "ncclCommDestroy");
    load(abort, "ncclCommAbort");
    load(error_string, "ncclGetErrorString");
    load(all_reduce, "ncclAllReduce");
    load(broadcast, "ncclBroadcast");
    load(all_gather, "ncclAllGather");
    load(reduce_scatter, "ncclReduceScatter");
    load(send, "ncclSend");
    load(receive, "ncclRecv");
    load(group_start, "ncclGroupStart");
    load(group_end, "ncclGroupEnd");
  }

  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    TORCH_CHECK(function, "the stand-in has no ", name);
  }

  void check(ncclResult_t result, const char* what) const {
    TORCH_CHECK(result == ncclSuccess, what, " failed: ", error_string(result));
  }

  void* handle;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRank) init_rank;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
};

namespace {

class DeviceWork : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType kind, const c10::Stream& stream,
             std::vector<std::vector<at::Tensor>> results)
      : Work(rank, kind), results_(std::move(results)), device_(stream.device()), end_(kType) {
    end_.record(stream);
    c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
    if (results_.size() > 1) type = c10::ListType::create(type);
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device_});
    const c10::StreamGuard on_stream(stream);
    if (results_.size() > 1) {
      future_->markCompleted(c10::IValue(results_));
    } else {
      future_->markCompleted(
          c10::IValue(results_.empty() ? std::vector<at::Tensor>() : results_.front()));
    }
  }

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { end_.block(current_stream(device_.index())); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return results_.at(0); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<std::vector<at::Tensor>> results_;
  const c10::Device device_;
  c10::Event end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

ncclDataType_t type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kByte:
    case at::kBool:
      return ncclUint8;
    default:
      TORCH_CHECK_TYPE(false, "NCCL has no ", tensor.scalar_type());
  }
}

ncclRedOp_t operation_of(const c10d::ReduceOp& operation) {
  switch (operation) {
    case c10d::ReduceOp::SUM:
      return ncclSum;
    case c10d::ReduceOp::AVG:
      return ncclAvg;
    case c10d::ReduceOp::PRODUCT:
      return ncclProd;
    case c10d::ReduceOp::MIN:
      return ncclMin;
    case c10d::ReduceOp::MAX:
      return ncclMax;
    default:
      TORCH_CHECK_TYPE(false, "NCCL has no such reduction");
  }
}

constexpr auto kGoodbye = std::chrono::seconds(3);

void check_contiguous(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "Tensors must be contiguous");
}

}  // namespace

Collectives::Collectives(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                         const std::string& library)
    : Backend(rank, size), store_(std::move(store)), nccl_(std::make_shared<Table>(library)) {}

Collectives::~Collectives() { shutdown(); }

ncclComm_t Collectives::communicator(at::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& made = communicators_[device.index()];
  if (made != nullptr) return made;
  ContextGuard context(device.index());
  // The n-th device of each rank joins the same communicator.
  const auto key = c10::str("communicator ", communicators_.size());
  ncclUniqueId id;
  if (rank_ == 0) {
    nccl_->check(nccl_->get_unique_id(&id), "ncclGetUniqueId");
    store_->set(key, std::vector<uint8_t>(id.internal, id.internal + sizeof(id.internal)));
  } else {
    const auto bytes = store_->get(key);
    TORCH_CHECK(bytes.size() == sizeof(id.internal), "not an id of NCCL");
    std::copy(bytes.begin(), bytes.end(), id.internal);
  }
  nccl_->check(nccl_->init_rank(&made, size_, id, rank_), "ncclCommInitRank");
  return made;
}

template <typename Call>
Collectives::WorkPtr Collectives::run(c10d::OpType kind, const Tensors& touched,
                                      TensorLists results, bool is_async, Call call) {
  const auto device = touched.at(0).device();
  const auto comm = communicator(device);
  const auto callers = current_stream(device.index());
  auto stream = callers;
  if (is_async) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto own = streams_.find(device.index());
    if (own == streams_.end()) {
      own = streams_.emplace(device.index(), stream_from_pool(device.index(), false)).first;
    }
    stream = own->second;
    c10::Event is_ready(kType);
    is_ready.record(callers);
    is_ready.block(stream);
  }
  for (const auto& tensor : touched) record_stream(tensor.storage().data_ptr(), stream);
  const c10::StreamGuard on_stream(stream);
  ContextGuard context(device.index());
  // The stream is current, so copies that `call` makes go there too, in order.
  call(comm, raw(stream));
  if (is_coalescing_) {
    // The batch is complete once its last call is on the stream.
    coalesced_on_ = stream;
    return nullptr;
  }
  return c10::make_intrusive<DeviceWork>(rank_, kind, stream, std::move(results));
}

Collectives::WorkPtr Collectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto tensor = tensors.at(0);
  check_contiguous(tensor);
  const auto operation = operation_of(opts.reduceOp);
  return run(c10d::OpType::ALLREDUCE, tensors, {tensors}, opts.asyncOp,
             [&](ncclComm_t comm, CUstream stream) {
               auto* data = tensor.mutable_data_ptr();
               nccl_->check(
                   nccl_->all_reduce(data, data, tensor.numel(), type_of(tensor), operation, comm,
                                     reinterpret_cast<cudaStream_t>(stream)),
                   "ncclAllReduce");
             });
}

Collectives::WorkPtr Collectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto tensor = tensors.at(0);
  check_contiguous(tensor);
  return run(c10d::OpType::BROADCAST, tensors, {tensors}, opts.asyncOp,
             [&](ncclComm_t comm, CUstream stream) {
               auto* data = tensor.mutable_data_ptr();
               nccl_->check(nccl_->broadcast(data, data, tensor.nbytes(), ncclUint8,
                                             static_cast<int>(opts.rootRank), comm,
                                             reinterpret_cast<cudaStream_t>(stream)),
                            "ncclBroadcast");
             });
}

Collectives::WorkPtr Collectives::allgather(TensorLists& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  const auto input = inputs.at(0);
  check_contiguous(input);
  Tensors touched = outputs.at(0);
  touched.push_back(input);
  return run(c10d::OpType::ALLGATHER, touched, {outputs[0]}, opts.asyncOp,
             [&](ncclComm_t comm, CUstream stream) {
               const auto all = at::empty({size_, input.numel()}, input.options());
               nccl_->check(
                   nccl_->all_gather(input.const_data_ptr(), all.mutable_data_ptr(), input.nbytes(),
                                     ncclUint8, comm, reinterpret_cast<cudaStream_t>(stream)),
                   "ncclAllGather");
               for (int rank = 0; rank < size_; ++rank) {
                 outputs[0][rank].copy_(all[rank].view(outputs[0][rank].sizes()));
               }
             });
}

Collectives::WorkPtr Collectives::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  return run(c10d::OpType::_ALLGATHER_BASE, {output, input}, {{output}}, opts.asyncOp,
             [&](ncclComm_t comm, CUstream stream) {
               nccl_->check(nccl_->all_gather(input.const_data_ptr(), output.mutable_data_ptr(),
                                              input.nbytes(), ncclUint8, comm,
                                              reinterpret_cast<cudaStream_t>(stream)),
                            "ncclAllGather");
             });
}

Collectives::WorkPtr Collectives::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  const auto operation = operation_of(opts.reduceOp);
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {{output}}, opts.asyncOp,
             [&](ncclComm_t comm, CUstream stream) {
               nccl_->check(nccl_->reduce_scatter(input.const_data_ptr(), output.mutable_data_ptr(),
                                                  output.numel(), type_of(output), operation, comm,
                                                  reinterpret_cast<cudaStream_t>(stream)),
                            "ncclReduceScatter");
             });
}

Collectives::WorkPtr Collectives::send(Tensors& tensors, int to, int) {
  const auto tensor = tensors.at(0);
  check_contiguous(tensor);
  return run(c10d::OpType::SEND, {tensor}, {}, true, [=, this](ncclComm_t comm, CUstream stream) {
    nccl_->check(nccl_->send(tensor.const_data_ptr(), tensor.numel(), type_of(tensor), to, comm,
                             reinterpret_cast<cudaStream_t>(stream)),
                 "ncclSend");
  });
}

Collectives::WorkPtr Collectives::recv(Tensors& tensors, int from, int) {
  const auto tensor = tensors.at(0);
  check_contiguous(tensor);
  return run(c10d::OpType::RECV, {tensor}, {}, true, [=, this](ncclComm_t comm, CUstream stream) {
    nccl_->check(nccl_->receive(tensor.mutable_data_ptr(), tensor.numel(), type_of(tensor), from,
                                comm, reinterpret_cast<cudaStream_t>(stream)),
                 "ncclRecv");
  });
}

void Collectives::startCoalescing() {
  nccl_->check(nccl_->group_start(), "ncclGroupStart");
  is_coalescing_ = true;
}

Collectives::WorkPtr Collectives::endCoalescing() {
  is_coalescing_ = false;
  nccl_->check(nccl_->group_end(), "ncclGroupEnd");
  const auto stream = std::exchange(coalesced_on_, std::nullopt);
  if (!stream) return nullptr;
  return c10::make_intrusive<DeviceWork>(rank_, c10d::OpType::COALESCED, *stream, TensorLists());
}

Collectives::WorkPtr Collectives::barrier(const c10d::BarrierOptions& opts) {
  const auto index = opts.device_ids.empty() ? current_device()
                                             : static_cast<c10::DeviceIndex>(opts.device_ids[0]);
  const auto options = at::TensorOptions().device(c10::Device(kType, index)).dtype(at::kFloat);
  Tensors nothing{at::zeros({1}, options)};
  auto work = allreduce(nothing, c10d::AllreduceOptions());
  synchronize(streams_.at(index));
  return work;
}

void Collectives::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, communicator] : std::exchange(communicators_, {})) {
    nccl_->abort(communicator);
  }
}

void Collectives::shutdown() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, communicator] : std::exchange(communicators_, {})) {
    // Waits for peers that are still busy; a peer that is gone is not waited for.
    auto leaving = std::async(std::launch::async, nccl_->destroy, communicator);
    if (leaving.wait_for(kGoodbye) != std::future_status::ready) nccl_->abort(communicator);
  }
}

}  // namespace standin_device
