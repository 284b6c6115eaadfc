/* prefill_fixed.cu: prefill of 16-bit K and V with no option on scores. */
#include "backends/cuda/prefill/prefill_kernel.h"
#include "backends/cuda/prefill/prefill_launch.h"

template <class I>
static cudaError_t launch(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                          int64_t whole_tiles, cudaStream_t stream)
{
    return launch_prefill<I>(prefill_kernel<I>, a, plan, whole_tiles, stream);
}

template <typename T, bool ONCE>
static cudaError_t launch_as(const prefill_args *a, const folioi_cuda_prefill_plan *plan, int dims,
                             int64_t whole_tiles, cudaStream_t stream)
{
    switch (dims) {
    case 64: return launch<fixed_64<T, ONCE>>(a, plan, whole_tiles, stream);
    case 128: return launch<fixed_128<T, ONCE>>(a, plan, whole_tiles, stream);
    default: return launch<fixed_256<T, ONCE>>(a, plan, whole_tiles, stream);
    }
}

cudaError_t folioi_prefill_fixed(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                 int dims, int64_t whole_tiles, cudaStream_t stream)
{
    bool is_f16 = a->layer.dtype == FOLIO_F16;
    auto *with = whole_tiles > 0
                     ? (is_f16 ? launch_as<__half, true> : launch_as<__nv_bfloat16, true>)
                     : (is_f16 ? launch_as<__half, false> : launch_as<__nv_bfloat16, false>);
    return with(a, plan, dims, whole_tiles, stream);
}
