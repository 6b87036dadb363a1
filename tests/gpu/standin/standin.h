// What the stand-in offers beside the interfaces of CUDA and NCCL: hooks for tests, in plain C so
// that Rust and Python can call them too. Nothing that ships may ever use them.

#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
struct ncclComm;

// --- libcuda.so.1 ---------------------------------------------------------------------------

// How many pieces of work touched what another stream touched, with no event between them, since
// the last clear; and the last of them in words ("" if none).
int standin_races(void);
const char* standin_last_race(void);

// How many accesses went outside of live device memory, or had other bad manners.
int standin_faults(void);
const char* standin_last_fault(void);

// Sets both counts to zero, and forgives devices their faults.
void standin_clear(void);

// The next call of this function ("cuEventRecord", "ncclAllReduce") does nothing and returns this.
void standin_fail_next(const char* function, int code);

// Before everything that a stream does it sleeps for a random time of up to so many microseconds.
void standin_delay_streams(int microseconds);

// A frozen stream does nothing more, as if what it is at would never end.
void standin_freeze_stream(struct CUstream_st* stream, int frozen);

// Whether this stream says that it is being captured into a graph, in global mode: then threads
// that are in that mode too may ask no event and take no memory.
void standin_capture_stream(struct CUstream_st* stream, int capturing);

// What is in device memory, for functions that run on a stream, and only there.
void* standin_alias(unsigned long long address);

// A piece of device memory that a function on a stream touches.
struct standin_range {
  unsigned long long address;
  size_t bytes;
  int writes;
};

// Queues function(argument), which is then as good as a kernel: it runs on the thread of the
// stream and may touch these ranges. Returns a CUresult.
int standin_run(struct CUstream_st* stream, const char* name, void (*function)(void*),
                void* argument, const struct standin_range* ranges, int count);

// How many things have been queued on streams since the process started.
unsigned long long standin_queued(void);

// How often a thread of the host has waited for a device (synchronise, or a blocking copy).
unsigned long long standin_host_waits(void);

// --- libnccl.so.2 ---------------------------------------------------------------------------

// What ncclCommGetAsyncError says from now on.
void standin_nccl_set_async_error(struct ncclComm* communicator, int code);

// How long calls of communicators that do not wait take at least; NCCL does them on another thread.
void standin_nccl_delay_calls(int microseconds);

// How many communicators were aborted so far.
int standin_nccl_aborted(void);

// Sums of up to so many bytes are made in the order of ranks, larger ones in that of the ring.
void standin_nccl_set_small(size_t bytes);

#ifdef __cplusplus
}
#endif
