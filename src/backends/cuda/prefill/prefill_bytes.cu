/* prefill_bytes.cu: prefill of 8-bit K and V with no option on scores. */
#include "backends/cuda/prefill/prefill_kernel.h"
#include "backends/cuda/prefill/prefill_launch.h"

template <class I>
static cudaError_t launch(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                          cudaStream_t stream)
{
    return launch_prefill<I>(prefill_kernel<I>, a, plan, 0, stream);
}

template <prefill_kv KV>
static cudaError_t launch_as(const prefill_args *a, const folioi_cuda_prefill_plan *plan, int dims,
                             cudaStream_t stream)
{
    switch (dims) {
    case 64: return launch<bytes_64<KV>>(a, plan, stream);
    case 128: return launch<bytes_128<KV>>(a, plan, stream);
    default: return launch<bytes_256<KV>>(a, plan, stream);
    }
}

cudaError_t folioi_prefill_bytes(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                 int dims, cudaStream_t stream)
{
    switch (a->layer.kv_dtype) {
    case FOLIO_FP8_E4M3: return launch_as<KV_E4M3>(a, plan, dims, stream);
    case FOLIO_FP8_E5M2: return launch_as<KV_E5M2>(a, plan, dims, stream);
    default: return launch_as<KV_INT8>(a, plan, dims, stream);
    }
}
