/* warp.h: maxima and sums over the lanes of a warp. */
#ifndef FOLIOI_CUDA_WARP_H
#define FOLIOI_CUDA_WARP_H

#include "core/checked.h"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

static __device__ __forceinline__ float warp_max(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

static __device__ __forceinline__ int64_t warp_max(int64_t x)
{
    for (int i = WARP / 2; i > 0; i /= 2) x = max_i64(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

template <typename T> static __device__ __forceinline__ T warp_sum(T x)
{
    for (int i = WARP / 2; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

#endif
