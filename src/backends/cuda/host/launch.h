/*
 * launch.h: launches that overlap (programmatic dependent launch). A kernel may start while the one before it in the
 * stream ends. It calls await_kernels_ahead (instructions.h) before it touches memory that earlier kernels use. Kernels
 * with ordinary launches wait for it to end, as usual.
 */
#ifndef FOLIOI_CUDA_LAUNCH_H
#define FOLIOI_CUDA_LAUNCH_H

#include <cuda_runtime.h>

/* overlaps: it may begin early; false: it begins when all ahead of it have ended. */
template <typename A>
static cudaError_t launch_kernel(void (*kernel)(A), dim3 grid, unsigned threads,
                                 size_t shared_bytes, bool overlaps, const A &args,
                                 cudaStream_t stream)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = overlaps ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
}

#endif
