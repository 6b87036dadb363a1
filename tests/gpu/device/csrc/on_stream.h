// Runs an operator of torch as a kernel: on the thread of a stream of the stand-in, in its order,
// with torch's own CPU operator on the memory behind the device's. The caller's thread only works
// out how large the results are.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace standin_device {

// Puts the operator on the current stream and replaces the arguments on the stack by the results.
// `on_cpu` does the work, and has the same arguments. Throws if sizes cannot be told beforehand.
void run_on_stream(const c10::OperatorHandle& on_cpu, torch::jit::Stack* stack);

// Throws what has gone wrong on a stream since the last call.
void check_streams();

// From now on kernels do nothing; returns when none is running. For the end of the process, which
// takes torch's operators away from under them.
void stop_kernels();

}  // namespace standin_device
