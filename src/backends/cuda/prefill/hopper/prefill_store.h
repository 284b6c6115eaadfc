/* prefill_store.h: a tile's end: sinks join, sums divide, out and lse are stored. */
#ifndef FOLIOI_CUDA_HOPPER_STORE_H
#define FOLIOI_CUDA_HOPPER_STORE_H

#include "backends/cuda/prefill/hopper/prefill_scores.h"

/* Scores beyond this, in log2, are rounded too much for their weights. */
constexpr float LARGE_SCORE = 1e6f;

/* What a row comes to beside its sums of values: what those are multiplied with, and lse. */
struct row_result {
    float by, lse;
    bool is_lost; /* it sees no key, or its weights mean nothing */
};

/* Of a thread's row i. */
template <typename T>
static __device__ __forceinline__ row_result end_row(const row_sums &r, int i, bool has_sink,
                                                     float sink)
{
    float base = r.base[i], sum = r.sum[i];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    bool is_lost = !(sum > 0.0f) || !(fabsf(base) < LARGE_SCORE);
    if (!has_sink) return {reciprocal(sum), (base + log2_approx(sum)) * LN2, is_lost};
    float sink_log2 = sink * LOG2E, top = fmaxf(base + weight_range<T>::LIFT, sink_log2);
    float shrink = exp2_approx(base - top), all = sum * shrink + exp2_approx(sink_log2 - top);
    return {shrink * reciprocal(all), (top + log2_approx(all)) * LN2, is_lost};
}

static __device__ __forceinline__ float sink_of(const hopper_args &a, const hopper_tile &t, int row)
{
    if (a.layer.sinks == NULL) return -CUDART_INF_F;
    row_place p = place_of(a, t, row);
    return p.query >= 0 ? __ldg(a.layer.sinks + p.head) : -CUDART_INF_F;
}

/* Zeros, plus NaN where a number is not finite. */
template <typename T> static __device__ __forceinline__ uint32_t add_odd(uint32_t odd, uint32_t two)
{
    uint32_t r;
    if constexpr (IS_BF16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(two), "r"(0), "r"(odd));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(two), "r"(0), "r"(odd));
    return r;
}

/* Each lane of four has four words of four pieces of a row, and gets 16 bytes of each. */
static __device__ __forceinline__ void turn_words(uint32_t (&v)[16])
{
    bool low = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __shfl_xor_sync(ALL_LANES, low ? v[2 * i] : v[2 * i + 1], 1);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (low) v[2 * i] = x[i];
        else v[2 * i + 1] = x[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int j = i / 2 * 4 + i % 2;
        x[i] = __shfl_xor_sync(ALL_LANES, high ? v[j] : v[j + 2], 2);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int j = i / 2 * 4 + i % 2;
        if (high) v[j] = x[i];
        else v[j + 2] = x[i];
    }
}

/*
 * A thread's two rows. Returned, a bit for each: is something in it that only the slow way computes right? NaN may have
 * come from keys that a row does not see, and scores may be too large for weights.
 */
template <typename T>
static __device__ __forceinline__ uint32_t store_rows(const hopper_args &a, const hopper_tile &t,
                                                      const float (&o)[64], const row_sums &r)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    uint32_t is_odd = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_result end = end_row<T>(r, i, l.sinks != NULL, sink_of(a, t, row + 8 * i));
        uint32_t odd[2] = {0, 0}, v[16];
#pragma unroll
        for (int k = 0; k < 16; k++) {
            v[k] = pack<T>(o[4 * k + 2 * i] * end.by, o[4 * k + 2 * i + 1] * end.by);
            odd[k % 2] = add_odd<T>(odd[k % 2], v[k]);
        }
        turn_words(v);
        row_place p = place_of(a, t, row + 8 * i);
        if (p.query < 0) continue;
        int64_t at = t.sequence.query_row + p.query;
        uint16_t *out = (uint16_t *)l.out.data + at * l.out.token + p.head * l.out.head;
#pragma unroll
        for (int k = 0; k < 16; k += 4)
            __stcs((uint4 *)(out + k * 8 + lane % 4 * 8),
                   make_uint4(v[k], v[k + 1], v[k + 2], v[k + 3]));
        if (l.lse != NULL && lane % 4 == 0) l.lse[at * l.lse_token + p.head * l.lse_head] = end.lse;
        if (end.is_lost || ((odd[0] | odd[1]) & 0x7fff7fff) != 0) is_odd |= 1 << i;
    }
    return is_odd;
}

/*
 * One row stored by a warp, a lane having 4 dims: sums of values and of weights relative to the largest score, in natural
 * units, and a sink.
 */
template <typename T>
static __device__ __forceinline__ void put_row(const hopper_args &a, const hopper_tile &t,
                                               row_place p, float4 x, float largest, float sum,
                                               float sink)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = threadIdx.x % WARP;
    float by = 0.0f, lse = sink;
    if (sum != 0.0f) { /* or NaN */
        float base = softmax_base(largest), top = fmaxf(base, sink);
        float shrink = exp2f((base - top) * LOG2E);
        sum = sum * shrink + exp2f((sink - top) * LOG2E);
        by = shrink / sum;
        lse = top + log2f(sum) * LN2;
    } else x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int64_t at = t.sequence.query_row + p.query;
    uint16_t *out = (uint16_t *)l.out.data + at * l.out.token + p.head * l.out.head + lane * 4;
    *(uint2 *)out = make_uint2(pack<T>(x.x * by, x.y * by), pack<T>(x.z * by, x.w * by));
    if (l.lse != NULL && lane == 0) l.lse[at * l.lse_token + p.head * l.lse_head] = lse;
}

#endif
