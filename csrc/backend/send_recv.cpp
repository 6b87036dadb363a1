// GflowBackend: messages between two ranks, which bypass the queue of collectives, and coalescing.
#include "backend/errors.h"
#include "backend/gflow_backend.h"

namespace gflow {

using c10d::OpType;

namespace {

// The tensor of a message, as an alias unknown to Python: a message without a peer may outlive the
// interpreter, and the thread that drops it then must not need Python.
at::Tensor only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "gflow: a message is one tensor, got ", tensors.size());
  return tensors.front().detach();
}

}  // namespace

WorkPtr GflowBackend::send(Tensors& tensors, int to, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_for_direct_call(tensor.device())->send(tensors, to, tag);
  auto complete = messages_.begin_send(tensor, to, tag);
  return submit_message(OpType::SEND, "gflow:send", tensor, to,
                        [complete](GflowWork&) { complete(); });
}

WorkPtr GflowBackend::recv(Tensors& tensors, int from, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_for_direct_call(tensor.device())->recv(tensors, from, tag);
  auto complete = messages_.begin_receive(tensor, from, tag);
  return submit_message(OpType::RECV, "gflow:recv", tensor, from,
                        [complete](GflowWork& work) { work.set_source(complete()); });
}

WorkPtr GflowBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto tensor = only(tensors);
  check_usable();
  if (!tensor.is_cpu()) return inner_for_direct_call(tensor.device())->recvAnysource(tensors, tag);
  auto complete = messages_.begin_receive(tensor, PointToPoint::kAnySource, tag);
  return submit_message(OpType::RECVANYSOURCE, "gflow:recvAnySource", tensor,
                        PointToPoint::kAnySource,
                        [complete](GflowWork& work) { work.set_source(complete()); });
}

WorkPtr GflowBackend::submit_message(OpType kind, const char* title, const at::Tensor& tensor,
                                     int peer, std::function<void(GflowWork&)> complete) {
  auto work = c10::make_intrusive<GflowWork>(rank_, kind, title, TensorLists{{tensor}},
                                             timeout_.load(), Tensors{tensor});
  // No collective bounds the time of a message, so waiting for it is bounded instead.
  work->limit_waits();
  auto end = [=, complete = std::move(complete)] {
    try {
      complete(*work);
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception& error) {
      // The inner backend names only an address.
      const auto who = peer == PointToPoint::kAnySource ? "any rank" : c10::str("rank ", peer);
      C10_THROW_ERROR(DistBackendError, c10::str(title, " with ", who, " failed: ", error.what()));
    }
  };
  auto operation =
      std::make_shared<TorchOperation>(work, TorchOperation::Steps{.end = std::move(end)});
  as_backend_error([&] { group_->submit_aside(operation); });
  return coalescing_.note(std::move(work));
}

bool GflowBackend::supportsCoalescing() const {
  return has_device_backend() && accelerator_->inner->supportsCoalescing();
}

void GflowBackend::startCoalescing() { coalescing_.start(getError() == c10d::ErrorType::SUCCESS); }

}  // namespace gflow
