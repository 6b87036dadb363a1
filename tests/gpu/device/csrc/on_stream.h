// Runs a torch operator as a kernel: in order on the thread of a stand-in stream, using torch's CPU
// operator on the memory behind the device addresses. The calling thread only computes the sizes of
// the results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace standin_device {

// Enqueues the operator on the current stream and replaces the arguments on the stack with the
// results. `on_cpu` does the work and takes the same arguments. Throws if the result sizes can't be
// known in advance.
void run_on_stream(const c10::OperatorHandle& on_cpu, torch::jit::Stack* stack);

// Throws if a kernel has failed on a stream since the last call.
void check_streams();

// Turns all later kernels into no-ops; returns once none is running. Call it at process exit,
// before torch's operators are torn down.
void stop_kernels();

}  // namespace standin_device
