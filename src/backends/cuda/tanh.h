/* tanh.h: the function of soft caps, in f32: a polynomial near 0, an exponential further on. */
#ifndef FOLIOI_CUDA_TANH_H
#define FOLIOI_CUDA_TANH_H

#include "backends/cuda/instructions.h"

/* tanh(x) / x by x * x, within 6e-8 up to x = NEAR_TANH, times `by`; further on, one less a quotient does not cancel. */
constexpr float NEAR_TANH = 0.75f;
static __device__ __forceinline__ float tanh_ratio(float y, float by = 1.0f)
{
    float p = fmaf(y, -0.00471625045f * by, 0.0195828986f * by);
    p = fmaf(y, fmaf(y, p, -0.0533444254f * by), 0.133254059f * by);
    return fmaf(y, fmaf(y, p, -0.333329589f * by), by);
}

static __device__ __forceinline__ float tanh_far(float x)
{
    return 1.0f - 2.0f * reciprocal(1.0f + exp2_approx(x * (2 * LOG2E)));
}

static __device__ __forceinline__ float tanh_fast(float x)
{
    return fabsf(x) < NEAR_TANH ? x * tanh_ratio(x * x) : tanh_far(x);
}

#endif
