/* cuda_runtime.h: of CUDA's header, what launch.h names: a launch is one of the machine. */
#ifndef FOLIO_TESTS_EMULATED_CUDA_RUNTIME_H
#define FOLIO_TESTS_EMULATED_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"

typedef enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
} cudaLaunchAttributeID;

typedef struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
        dim3 clusterDim;
    } val;
} cudaLaunchAttribute;

typedef struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;

/* A thread has as many registers as there are for each of the block's, in steps of 8. */
template <typename A>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(A), const A &args)
{
    machine_launch([&] { kernel(args); }, (int)c->gridDim.x, (int)c->blockDim.x,
                   c->dynamicSmemBytes, 65536 / (int)c->blockDim.x / 8 * 8);
    return cudaSuccess;
}

#endif
