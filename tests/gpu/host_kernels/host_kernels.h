// The kernels of rust/cuda/kernels as host functions: a table by name, and a function to
// launch one.
//
// host_kernels.cpp is the only translation unit behind this header. It needs nothing but a
// compiler:
//
//   g++ -std=c++20 -O2 -fPIC -ffp-contract=off -c tests/gpu/host_kernels/host_kernels.cpp
//
// (-ffp-contract=off because the kernels must not get fused multiply-adds, as on the device.) A
// launch tests arithmetic and indexing. It can't reveal races between threads of a block, memory
// model issues or speed: the threads of a block take turns on the thread that launches.
#ifndef GFLOW_TESTS_HOST_KERNELS_H
#define GFLOW_TESTS_HOST_KERNELS_H

#ifdef __cplusplus
extern "C" {
#endif

// One kernel. `arguments` has one letter per argument, in order:
//   p  a pointer (8 bytes)        f  a float (4 bytes)
//   u  an unsigned int (4 bytes)  l  an unsigned long long (8 bytes)
typedef struct GflowHostKernel {
  const char* name;
  const char* arguments;
} GflowHostKernel;

// All kernels; stores their number in `count`.
const GflowHostKernel* gflow_host_kernels(unsigned* count);

// Runs a kernel to completion on the calling thread. `arguments` are as for cuLaunchKernel: the
// address of each argument's value. Pointers among them must be readable by the host. May be called
// from several threads at once.
//
// Returns 0 on success, 1 if there is no kernel of this name, or 2 if no GPU would accept the
// launch (a dimension of zero or beyond the limits, more than 1024 threads, or more than 48 KiB of
// shared memory).
int gflow_host_launch(const char* name, const unsigned grid[3], const unsigned block[3],
                      unsigned shared_bytes, void** arguments);

#ifdef __cplusplus
}
#endif

#endif
