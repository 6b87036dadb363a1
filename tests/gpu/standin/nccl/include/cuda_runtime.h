// All that nccl.h wants of the CUDA runtime. The real header needs a compiler for CUDA.

#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
