// The streams that a program has made.

#pragma once

#include "handles.h"
#include "stream.h"

namespace standin {

Handles<Stream>& stream_handles();

}  // namespace standin
