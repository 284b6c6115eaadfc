/* prefill_softmax.h: scores become weights relative to each row's largest so far; what was summed before is brought to it. */
#ifndef FOLIOI_CUDA_PREFILL_SOFTMAX_H
#define FOLIOI_CUDA_PREFILL_SOFTMAX_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/warp.h"

#include <math_constants.h>

/* The rows' largest scores and sums go to shared memory, or come back. */
template <class I, int M>
static __device__ __forceinline__ void park(const prefill_state<I::DV, M> &st,
                                            typename I::shared &sh)
{
    if constexpr (I::PARKS) {
        int thread = fresh_thread();
#pragma unroll
        for (int i = 0; i < M * 2; i++) {
            sh.parked[i * 2][thread] = st.largest[i / 2][i % 2];
            sh.parked[i * 2 + 1][thread] = st.sum[i / 2][i % 2];
        }
    }
}

template <class I, int M>
static __device__ __forceinline__ void unpark(prefill_state<I::DV, M> &st, typename I::shared &sh)
{
    if constexpr (I::PARKS) {
        int thread = fresh_thread();
#pragma unroll
        for (int i = 0; i < M * 2; i++) {
            st.largest[i / 2][i % 2] = sh.parked[i * 2][thread];
            st.sum[i / 2][i % 2] = sh.parked[i * 2 + 1][thread];
        }
    }
}

/* Weights of f16 are kept 2^12 times larger: small ones then keep their digits. The sum is as much larger. */
template <typename T> struct weight_shift {
    static constexpr float LOG2 = 0.0f, INVERSE = 1.0f;
};
template <> struct weight_shift<__half> {
    static constexpr float LOG2 = 12.0f, INVERSE = 0x1p-12f;
};

/* What one unit of the scores is in row + lane / 4. */
template <class I>
static __device__ __forceinline__ float score_unit(const prefill_args &a, typename I::shared &sh,
                                                   int row)
{
    if constexpr (!I::FIXED) return 1.0f;
    else if constexpr (I::KV == KV_WIDE) return a.layer.scale;
    else
        return a.layer.scale * (I::KV == KV_INT8 ? 1.0f : a.layer.k.scale) *
               sh.rows[row + fresh_lane() / 4].unit;
}

/* Scores beyond this give their differences first: the rounding of a product could be a weight's overflow. All of f32 do. */
#define LARGE_SCORE 1e6f

/* The largest score so far of each row, and what was summed before times rescale; are any of them large? */
template <class I, int M>
static __device__ __forceinline__ bool find_largest(const prefill_scores<I, M> &s,
                                                    prefill_state<I::DV, M> &st,
                                                    float (&rescale)[M][2], const prefill_args &a,
                                                    typename I::shared &sh, int row0)
{
    bool is_large = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float before = st.largest[m][r], x = before;
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
                x = fmaxf(x, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
            st.largest[m][r] = x;
            float unit = LOG2E * score_unit<I>(a, sh, row0 + m * 16 + r * 8);
            rescale[m][r] = exp2_approx((before - softmax_base(x)) * unit);
            is_large |= fabsf(softmax_base(x) * unit) > LARGE_SCORE;
        }
    return is_large;
}

/* Scores become weights relative to the largest so far, what was summed before is brought to it. */
template <class I, int M>
static __device__ __forceinline__ void soften(prefill_scores<I, M> &s, prefill_state<I::DV, M> &st,
                                              const prefill_args &a, typename I::shared &sh,
                                              int row0)
{
    constexpr float SHIFT = weight_shift<typename I::T>::LOG2;
    float rescale[M][2];
    bool is_same = true, is_large = find_largest<I, M>(s, st, rescale, a, sh, row0);
    is_large = !I::FIXED || I::F32 || __any_sync(ALL_LANES, is_large);
    if (is_large) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] -= softmax_base(st.largest[m][i / 2]);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float unit = LOG2E * score_unit<I>(a, sh, row0 + m * 16 + r * 8), sum = 0.0f;
            float base = is_large ? -SHIFT : fmaf(softmax_base(st.largest[m][r]), unit, -SHIFT);
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &y = s[m][n][r * 2 + e];
                    y = exp2_approx(fmaf(y, unit, -base));
                    sum += y;
                }
            st.sum[m][r] = st.sum[m][r] * rescale[m][r] + sum;
            is_same &= rescale[m][r] == 1.0f;
        }
    if (__all_sync(ALL_LANES, is_same)) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) st.out[m][n][i] *= rescale[m][i / 2];
}

#endif
