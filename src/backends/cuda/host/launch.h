/*
 * launch.h: launches that overlap (programmatic dependent launch). A kernel may start while the one before it in the
 * stream ends. It calls await_kernels_ahead (instructions.h) before it touches memory that earlier kernels use. Kernels
 * with ordinary launches wait for it to end, as usual.
 */
#ifndef FOLIOI_CUDA_LAUNCH_H
#define FOLIOI_CUDA_LAUNCH_H

#include <cuda_runtime.h>

typedef struct launch_shape {
    dim3 grid;
    unsigned threads;
    size_t shared_bytes;
    int cluster;   /* so many blocks along y are one cluster; 0: none                             */
    bool overlaps; /* it may begin early; false: it begins when all ahead of it have ended */
} launch_shape;

/* What the runtime is told of a launch; it points into itself. */
struct launch_config {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    launch_config(const launch_shape &shape, cudaStream_t stream)
    {
        config.gridDim = shape.grid;
        config.blockDim = dim3(shape.threads);
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = stream;
        config.attrs = attributes;
        if (shape.overlaps) {
            cudaLaunchAttribute &early = attributes[config.numAttrs++];
            early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            early.val.programmaticStreamSerializationAllowed = 1;
        }
        if (shape.cluster > 0) {
            cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
            cluster.val.clusterDim.y = shape.cluster;
        }
    }
    launch_config(const launch_config &) = delete;
};

template <typename A>
static cudaError_t launch_kernel(void (*kernel)(A), const launch_shape &shape, const A &args,
                                 cudaStream_t stream)
{
    launch_config c(shape, stream);
    return cudaLaunchKernelEx(&c.config, kernel, args);
}

#endif
