// The hooks of standin.h.

#include "../standin.h"
#include "entry.h"
#include "failures.h"
#include "reports.h"
#include "stream_handles.h"

using standin::Wrong;

EXPORTED int standin_races() { return standin::reports(Wrong::Race); }
EXPORTED const char* standin_last_race() { return standin::last_report(Wrong::Race); }
EXPORTED int standin_faults() { return standin::reports(Wrong::Fault); }
EXPORTED const char* standin_last_fault() { return standin::last_report(Wrong::Fault); }

EXPORTED void standin_clear() {
  standin::clear_reports();
  for (auto& device : standin::devices()) {
    device->fail(CUDA_SUCCESS);
  }
}

EXPORTED void standin_fail_next(const char* function, int code) {
  standin::order_failure(standin::without_version(function), code);
}

EXPORTED void standin_delay_streams(int microseconds) { standin::delay_streams(microseconds); }

EXPORTED void standin_freeze_stream(CUstream_st* handle, int frozen) {
  if (auto stream = standin::stream_of(handle)) {
    stream->freeze(frozen != 0);
  }
}

EXPORTED void standin_capture_stream(CUstream_st* handle, int capturing) {
  if (auto stream = standin::stream_of(handle)) {
    const bool was_capturing = stream->is_capturing.exchange(capturing != 0);
    standin::count_captures((capturing != 0) - was_capturing);
  }
}

EXPORTED void* standin_alias(unsigned long long address) {
  return standin::device_memory().alias(address);
}

EXPORTED int standin_run(CUstream_st* handle, const char* name, void (*function)(void*),
                         void* argument, const standin_range* ranges, int count) {
  ENTER(Context);
  auto stream = standin::stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  standin::Work work{.name = name, .run = [=] { function(argument); }};
  for (int index = 0; index < count; ++index) {
    work.accesses.push_back(
        {ranges[index].address, ranges[index].bytes, ranges[index].writes != 0});
  }
  stream->submit(std::move(work));
  return CUDA_SUCCESS;
}

EXPORTED unsigned long long standin_queued() { return standin::queued_so_far(); }
EXPORTED unsigned long long standin_host_waits() { return standin::host_waits(); }
