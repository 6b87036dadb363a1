// What the stand-in of NCCL needs of the stand-in of the driver. No program may call this.

#pragma once

#include <cuda.h>

#include "exported.h"
#include "stream.h"

namespace standin {

// The device whose context is current in the calling thread, -1 if there is none.
EXPORTED int index_of_current_device();
// The device of this stream, -1 if there is no such stream.
EXPORTED int index_of_device_of(CUstream stream);
EXPORTED CUresult queue_on(CUstream stream, Work work);
EXPORTED void* alias_of(uint64_t address);

// What the calling thread knows to be over, for one that goes on in its place.
EXPORTED VectorClock knowledge_of_this_thread();
EXPORTED void take_over(const VectorClock& knowledge);

}  // namespace standin
