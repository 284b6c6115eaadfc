/* cuda_runtime_api.h: of CUDA's header, what the wgmma kernels' files and their callers name. */
#ifndef FOLIO_TESTS_EMULATED_CUDA_RUNTIME_API_H
#define FOLIO_TESTS_EMULATED_CUDA_RUNTIME_API_H

#include "machine.h"

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotSupported = 801,
} cudaError_t;

typedef struct CUstream_st *cudaStream_t;

static inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }

#endif
