// The streams that the program has created.

#pragma once

#include "handles.h"
#include "stream.h"

namespace standin {

Handles<Stream>& stream_handles();

}  // namespace standin
