/*
 * launch.h: launches that overlap. A kernel may begin while the one ahead of it in the stream ends: what it reads first is on
 * its way by then. It calls await_kernels_ahead (instructions.h) before it touches what kernels ahead write or read. A kernel that is
 * launched in the common way after it waits for all of it, as always.
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
