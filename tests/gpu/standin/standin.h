// The stand-in's additions to the CUDA and NCCL interfaces: hooks for tests, in plain C so that
// Rust and Python can call them too. Nothing that ships may use them.

#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
struct ncclComm;

// --- libcuda.so.1 ---------------------------------------------------------------------------

// The number of accesses since the last clear that conflict with another stream's, with no event
// between them; and a description of the last one ("" if none).
int standin_races(void);
const char* standin_last_race(void);

// The number of accesses outside live device memory, and of other invalid uses.
int standin_faults(void);
const char* standin_last_fault(void);

// Resets both counts, and clears the devices' faults.
void standin_clear(void);

// The next call of this function ("cuEventRecord", "ncclAllReduce") does nothing and returns
// `code`.
void standin_fail_next(const char* function, int code);

// Makes streams sleep for a random time of up to this long before each piece of work.
void standin_delay_streams(int microseconds);

// A frozen stream makes no progress, as if its current work never ended.
void standin_freeze_stream(struct CUstream_st* stream, int frozen);

// Makes this stream report that it is being captured into a graph, in global mode. Threads in that
// mode may then neither query events nor allocate memory.
void standin_capture_stream(struct CUstream_st* stream, int capturing);

// The memory behind a device address. Only for functions that run on a stream.
void* standin_alias(unsigned long long address);

// A range of device memory that a function on a stream touches.
struct standin_range {
  unsigned long long address;
  size_t bytes;
  int writes;
};

// Queues function(argument) like a kernel: it runs on the stream's thread and may touch these
// ranges. Returns a CUresult.
int standin_run(struct CUstream_st* stream, const char* name, void (*function)(void*),
                void* argument, const struct standin_range* ranges, int count);

// The number of items queued on streams since the process started.
unsigned long long standin_queued(void);

// How often a host thread has waited for a device (a synchronize call or a blocking copy).
unsigned long long standin_host_waits(void);

// --- libnccl.so.2 ---------------------------------------------------------------------------

// Sets the result of ncclCommGetAsyncError.
void standin_nccl_set_async_error(struct ncclComm* communicator, int code);

// The minimum delay of calls on non-blocking communicators; NCCL runs them on another thread.
void standin_nccl_delay_calls(int microseconds);

// The number of communicators aborted so far.
int standin_nccl_aborted(void);

// Sums of up to this many bytes are made in rank order, larger ones in ring order.
void standin_nccl_set_small(size_t bytes);

#ifdef __cplusplus
}
#endif
