// The kernels of rust/cuda/kernels/kernels.cu as functions of the host: a table of them by name,
// and a way to launch one.
//
// host_kernels.cpp is the one translation unit behind this header. It needs nothing but a compiler:
//
//   g++ -std=c++20 -O2 -fPIC -ffp-contract=off -c tests/gpu/host_kernels/host_kernels.cpp
//
// (-ffp-contract=off because the kernels must not be given fused multiply-adds, as on the device.)
// What a launch shows is arithmetic and indexing. It can never show a race between threads of one
// block, the memory model or speed: the threads of a block take turns, on the thread that launches.
#ifndef GFLOW_TESTS_HOST_KERNELS_H
#define GFLOW_TESTS_HOST_KERNELS_H

#ifdef __cplusplus
extern "C" {
#endif

// One kernel. `arguments` has a letter for each of its arguments, in their order:
//   p  a pointer (8 bytes)        f  a float (4 bytes)
//   u  an unsigned int (4 bytes)  l  an unsigned long long (8 bytes)
typedef struct GflowHostKernel {
  const char* name;
  const char* arguments;
} GflowHostKernel;

// All kernels; their number goes to `count`.
const GflowHostKernel* gflow_host_kernels(unsigned* count);

// Runs a kernel to its end, on the calling thread. `arguments` are as for cuLaunchKernel: for each
// argument the address of its value. Pointers among them must be readable by the host here. May be
// called from several threads at once.
//
// Returns 0; 1 if there is no kernel of this name; 2 if no GPU would take such a launch (a
// dimension of zero or beyond the limits, more than 1024 threads, or more than 48 KiB of shared
// memory).
int gflow_host_launch(const char* name, const unsigned grid[3], const unsigned block[3],
                      unsigned shared_bytes, void** arguments);

#ifdef __cplusplus
}
#endif

#endif
