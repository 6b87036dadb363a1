// The part of the CUDA runtime that nccl.h needs. The real header needs a CUDA compiler.

#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
