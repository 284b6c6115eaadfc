/* prefill_flexible.cu: prefill with everything that a layer may have. */
#include "backends/cuda/prefill/prefill_kernel.h"
#include "backends/cuda/prefill/prefill_launch.h"

template <class I>
static cudaError_t launch(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                          cudaStream_t stream)
{
    return launch_prefill<I>(prefill_kernel<I>, a, plan, 0, stream);
}

template <typename T>
static cudaError_t launch_as(const prefill_args *a, const folioi_cuda_prefill_plan *plan, int dims,
                             cudaStream_t stream)
{
    switch (dims) {
    case 64: return launch<flexible_64<T>>(a, plan, stream);
    case 128: return launch<flexible_128<T>>(a, plan, stream);
    case 256: return launch<flexible_256<T>>(a, plan, stream);
    default: return launch<flexible_512<T>>(a, plan, stream);
    }
}

cudaError_t folioi_prefill_flexible(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                    int dims, cudaStream_t stream)
{
    if (a->layer.dtype == FOLIO_F16) return launch_as<__half>(a, plan, dims, stream);
    return launch_as<__nv_bfloat16>(a, plan, dims, stream);
}
