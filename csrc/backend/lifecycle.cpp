// GflowBackend: making a group, its timeouts and errors, closing it.
#include "backend/errors.h"
#include "backend/gflow_backend.h"
#include "python/gil.h"

namespace gflow {

GflowBackend::GflowBackend(int rank, int size, Milliseconds timeout, rust::Box<Group> group,
                           c10::intrusive_ptr<Backend> gloo, std::optional<Accelerator> accelerator)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>(timeout)),
      timeout_(timeout),
      gloo_(std::move(gloo)),
      accelerator_(std::move(accelerator)),
      messages_(gloo_),
      group_(std::move(group)),
      device_queues_(*group_) {}

GflowBackend::~GflowBackend() {
  WithoutGil without_gil;
  try {
    group_->close();
  } catch (const std::exception& error) {
    TORCH_WARN("gflow: closing a process group failed: ", error.what());
  }
}

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

void GflowBackend::check_usable() {
  as_backend_error([&] { group_->check_usable(); });
}

std::function<void()> GflowBackend::if_alive(void (GflowBackend::*method)()) {
  auto self = c10::intrusive_ptr<GflowBackend>::reclaim_copy(this);
  return [weak = c10::weak_intrusive_ptr<GflowBackend>(self), method] {
    if (auto backend = weak.lock()) (backend.get()->*method)();
  };
}

}  // namespace gflow
