// Identifies the caller of a collective during a backward pass, and its model: DDP's Reducer
// itself, or Python code such as a user's communication hook. Only what the Reducer submits itself
// may be compressed; a user's hook gets exactly what it asks for.
#pragma once

namespace gflow {

// Whether the innermost Python function of this thread is the one that runs the backward pass, so
// that the call comes from the C++ code below it. Takes the GIL briefly.
bool called_by_autograd_itself();

// Whether autograd has computed all gradients and is running the callbacks queued for the end.
bool backward_is_over();

// The address of the parameter whose gradient autograd has just completed; it belongs to the model
// whose Reducer calls. Null if unknown.
const void* current_parameter();

}  // namespace gflow
