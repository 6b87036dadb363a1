// Streams and events.

#include <algorithm>
#include <chrono>

#include "entry.h"
#include "event.h"
#include "order.h"
#include "stream_handles.h"

using standin::current_device;
using standin::Event;
using standin::Stream;
using standin::stream_of;

namespace {

standin::Handles<Event>& events() {
  static auto* handles = new standin::Handles<Event>;
  return *handles;
}

std::shared_ptr<Event> event_behind(CUevent handle) { return events().find(handle); }

}  // namespace

CUDA_ENTRY cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  ENTER(Context);
  if (flags > CU_STREAM_NON_BLOCKING) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto made = current_device()->new_stream(std::clamp(priority, -5, 0));
  *stream = reinterpret_cast<CUstream>(standin::stream_handles().add(made));
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuStreamCreate(CUstream* stream, unsigned int flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

// Work that is already queued still runs.
CUDA_ENTRY cuStreamDestroy(CUstream handle) {
  ENTER(Context);
  auto stream = standin::stream_handles().take(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  stream->end();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *priority = stream->priority();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuStreamGetCtx(CUstream handle, CUcontext* context) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *context = stream->device().context();
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuStreamSynchronize(CUstream handle) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  standin::count_host_wait();
  stream->wait();
  return stream->device().fault();
}

CUDA_ENTRY cuStreamQuery(CUstream handle) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  bool is_done = stream->is_done();
  CUresult fault = stream->device().fault();
  return fault != CUDA_SUCCESS ? fault : is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUDA_ENTRY cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *status = stream->is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER(Driver);
  *mode = standin::exchange_capture_mode(*mode);
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int) {
  ENTER(Context);
  auto stream = stream_of(handle);
  auto event = event_behind(event_handle);
  if (!stream || !event) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  event->make_wait(*stream);
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  ENTER(Context);
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  // The function may tell any thread, so all work before it counts as waited for.
  auto before = std::make_shared<standin::VectorClock>();
  stream->submit({.name = "function of the host",
                  .run =
                      [=] {
                        standin::host_has_waited_for(*before);
                        function(argument);
                      }},
                 [&](standin::VectorClock& clock) { *before = clock; });
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuEventCreate(CUevent* event, unsigned int flags) {
  ENTER(Context);
  bool has_time = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  auto made = std::make_shared<Event>(*current_device(), has_time);
  *event = reinterpret_cast<CUevent>(events().add(std::move(made)));
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuEventDestroy(CUevent handle) {
  ENTER(Driver);
  return events().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUDA_ENTRY cuEventRecord(CUevent handle, CUstream stream_handle) {
  ENTER(Context);
  auto event = event_behind(handle);
  auto stream = stream_of(stream_handle);
  if (!event || !stream || &event->device != &stream->device()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  event->record_on(*stream);
  return CUDA_SUCCESS;
}

CUDA_ENTRY cuEventQuery(CUevent handle) {
  ENTER(Driver);
  if (standin::would_invalidate_capture()) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  auto event = event_behind(handle);
  if (!event) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  auto record = event->last();
  bool is_set = !record || record->is_set();
  if (CUresult fault = event->device.fault(); fault != CUDA_SUCCESS) {
    return fault;
  }
  if (record && is_set) {
    standin::host_was_told_of(record->clock);
  }
  return is_set ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUDA_ENTRY cuEventSynchronize(CUevent handle) {
  ENTER(Driver);
  auto event = event_behind(handle);
  if (!event) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (auto record = event->last()) {
    standin::count_host_wait();
    record->wait();
    standin::host_has_waited_for(record->clock);
  }
  return event->device.fault();
}

CUDA_ENTRY cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  ENTER(Driver);
  auto start = event_behind(from);
  auto end = event_behind(to);
  if (!start || !end || !start->has_time || !end->has_time || !start->last() || !end->last()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!start->last()->is_set() || !end->last()->is_set()) {
    return CUDA_ERROR_NOT_READY;
  }
  std::chrono::duration<float, std::milli> between = end->last()->time() - start->last()->time();
  *milliseconds = between.count();
  return CUDA_SUCCESS;
}

// The function's name before CUDA 12.8; older programs look it up.
#undef cuEventElapsedTime
CUDA_ENTRY cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  return cuEventElapsedTime_v2(milliseconds, from, to);
}
