/* prefill_values.h: out += weights V; and int8: the scales of K go to the scores, those of V to the weights. */
#ifndef FOLIOI_CUDA_PREFILL_VALUES_H
#define FOLIOI_CUDA_PREFILL_VALUES_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_bytes.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/warp.h"

#include <math_constants.h>

/* Numbers of keys times factor times the keys' scales; with only_finite, those of other scales become 0. */
template <class I, int M>
static __device__ __forceinline__ void scale_keys(prefill_scores<I, M> &s, const float *scales,
                                                  float factor, bool only_finite)
{
    scales += fresh_lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < I::KEYS / 8; n++) {
        float2 two = *(const float2 *)(scales + n * 8);
        float f[2] = {two.x * factor, two.y * factor};
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (only_finite && !(fabsf(f[i]) < CUDART_INF_F)) f[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] *= f[i % 2];
    }
}

/* The exponent of a scale, rounded up; -126 where it is 0 or not finite. */
static __device__ __forceinline__ int32_t exponent_of(float scale)
{
    int32_t exponent = (int32_t)(__float_as_uint(scale) >> 23 & 255);
    return exponent == 255 ? -126 : min(exponent, 252) - 126;
}

/* Weights times the scales of V, in units that keep them in the range of f16: out follows where a larger one is met. */
template <class I, int M>
static __device__ __forceinline__ void scale_weights(prefill_scores<I, M> &s,
                                                     prefill_state<I::DV, M> &st,
                                                     const float *scales, bool only_finite)
{
    int lane = fresh_lane();
    int32_t log2 = exponent_of(scales[lane % I::KEYS]);
    if (I::KEYS > 32) log2 = max(log2, exponent_of(scales[(lane + 32) % I::KEYS]));
    log2 = __reduce_max_sync(ALL_LANES, max(log2, st.value_log2));
    if (log2 != st.value_log2) {
        float factor = exp2_approx((float)(st.value_log2 - log2));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) st.out[m][n][i] *= factor;
        st.value_log2 = log2;
    }
    scale_keys<I, M>(s, scales, exp2_approx((float)-log2), only_finite);
}

/* The weights of 16 keys as an operand. */
template <class I>
static __device__ __forceinline__ void pack_weights(uint32_t p[4], const float (&s)[I::KEYS / 8][4],
                                                    int k)
{
    using T = typename I::T;
    p[0] = pack<T>(s[2 * k][0], s[2 * k][1]);
    p[1] = pack<T>(s[2 * k][2], s[2 * k][3]);
    p[2] = pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]);
    p[3] = pack<T>(s[2 * k + 1][2], s[2 * k + 1][3]);
}

/* Where a lane's ldmatrix reads V. */
template <class I> static __device__ __forceinline__ uint32_t values_at(uint32_t v)
{
    int lane = fresh_lane();
    return v + chunk_at<I::V_ROW>(lane % 16, lane / 16);
}

/* One ldmatrix of V: for 16 keys 2 tiles of out, or 4 with 8 bits; vf[t]: those of one tile. */
template <class I, int TILES>
static __device__ __forceinline__ void load_values(uint32_t (&vf)[TILES][2], uint32_t v_at, int k,
                                                   int n)
{
    uint32_t from = swizzled(v_at, n * 2) + k * 16 * I::V_ROW;
    if constexpr (I::KV != KV_WIDE) {
        load_byte_values<I::KV>(vf, from);
    } else {
        uint32_t r[4];
        ldmatrix_trans(r, from);
#pragma unroll
        for (int i = 0; i < 4; i++) vf[i / 2][i % 2] = r[i];
    }
}

/* out += weights V */
template <class I, int M>
static __device__ __forceinline__ void multiply_values(prefill_state<I::DV, M> &st,
                                                       const prefill_scores<I, M> &s, uint32_t v)
{
    using T = typename I::T;
    constexpr int TILES = 4 / I::KV_SIZE;
    uint32_t v_at = values_at<I>(v);
#pragma unroll
    for (int k = 0; k < I::KEYS / 16; k++) {
        uint32_t p[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) pack_weights<I>(p[m], s[m], k);
#pragma unroll
        for (int n = 0; n < I::DV / 8 / TILES; n++) {
            uint32_t vf[TILES][2];
            load_values<I>(vf, v_at, k, n);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int m = 0; m < M; m++)
                    mma<T>(st.out[m][TILES * n + t], p[m], vf[t][0], vf[t][1]);
        }
    }
}

#endif
