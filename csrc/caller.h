// Who calls a collective in the middle of a backward pass: DDP's Reducer itself, or Python code
// such as a communication hook that the user has registered; and for which model. Only what the
// Reducer exchanges by itself may be compressed: a user's own hook gets exactly what it asks for.
#pragma once

namespace gflow {

// Whether the innermost Python function of this thread is the one that runs the backward pass, so
// that the call comes from the C++ below it. Takes Python's lock for a moment.
bool called_by_autograd_itself();

// Whether autograd has computed all gradients and only runs what was to be done at the end.
bool backward_is_over();

// The address of the parameter whose gradient autograd has just completed; it belongs to the model
// whose Reducer calls. Null if that cannot be told.
const void* current_parameter();

}  // namespace gflow
