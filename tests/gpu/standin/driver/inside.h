// Functions of the stand-in driver for the stand-in NCCL. Programs must not call them.

#pragma once

#include <cuda.h>

#include "exported.h"
#include "stream.h"

namespace standin {

// The device whose context is current on the calling thread, or -1.
EXPORTED int index_of_current_device();
// The device of this stream, or -1 if there is no such stream.
EXPORTED int index_of_device_of(CUstream stream);
EXPORTED CUresult queue_on(CUstream stream, Work work);
EXPORTED void* alias_of(uint64_t address);

// What the calling thread knows to be complete, to hand to a thread that acts on its behalf.
EXPORTED VectorClock knowledge_of_this_thread();
EXPORTED void take_over(const VectorClock& knowledge);

}  // namespace standin
