/* prefill_store.h: a tile's end: sinks join, sums divide, out and lse are stored. */
#ifndef FOLIOI_CUDA_HOPPER_STORE_H
#define FOLIOI_CUDA_HOPPER_STORE_H

#include "backends/cuda/hopper/prefill_scores.h"

/* Scores beyond this, in log2, are rounded too much for their weights. */
constexpr float LARGE_SCORE = 1e6f;

/* What a row comes to beside its sums of values: what those are multiplied with, and lse. */
struct row_result {
    float by, lse;
    bool is_empty; /* it sees no key */
    bool is_lost;  /* its weights mean nothing */
};

/* Of a thread's row i, which is `row` of the tile. */
template <typename T>
static __device__ __forceinline__ row_result end_row(const hopper_args &a, const hopper_tile &t,
                                                     const row_sums &r, int i, int row, float sink)
{
    float base = r.base[i], sum = r.sum[i];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    folioi_range seen = seen_by(a, t, row);
    if (seen.begin >= seen.end) return {0.0f, sink, true, false};
    float sink_log2 = sink * LOG2E, top = fmaxf(base + weight_range<T>::LIFT, sink_log2);
    float shrink = exp2_approx(base - top), all = sum * shrink + exp2_approx(sink_log2 - top);
    bool is_lost = !(sum > 0.0f) || !(fabsf(base) < LARGE_SCORE);
    return {shrink / all, (top + log2f(all)) * LN2, false, is_lost};
}

/* Four words of each lane of four, turned, so that a lane has 16 bytes of a row. */
static __device__ __forceinline__ uint4 turn_words(uint32_t (&v)[4])
{
    bool low = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t x = __shfl_xor_sync(ALL_LANES, low ? v[0] : v[1], 1);
    uint32_t y = __shfl_xor_sync(ALL_LANES, low ? v[2] : v[3], 1);
    if (low) v[0] = x, v[2] = y;
    else v[1] = x, v[3] = y;
    x = __shfl_xor_sync(ALL_LANES, high ? v[0] : v[2], 2);
    y = __shfl_xor_sync(ALL_LANES, high ? v[1] : v[3], 2);
    if (high) v[0] = x, v[1] = y;
    else v[2] = x, v[3] = y;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

/*
 * A thread's two rows. Returned: is something in them that only the slow way computes right? NaN may have come
 * from keys that a row does not see, and scores may be too large for weights.
 */
template <typename T>
static __device__ __forceinline__ bool store_rows(const hopper_args &a, const hopper_tile &t,
                                                  const float (&o)[64], const row_sums &r)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    bool is_odd = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, t, row + 8 * i);
        float sink = -CUDART_INF_F, zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (l.sinks != NULL && p.query >= 0) sink = __ldg(l.sinks + p.head);
        row_result end = end_row<T>(a, t, r, i, row + 8 * i, sink);
        int64_t at = t.sequence.query_row + p.query;
        uint16_t *out = (uint16_t *)l.out.data + at * l.out.token + p.head * l.out.head;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            uint32_t v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float x = o[16 * g + 4 * k + 2 * i], y = o[16 * g + 4 * k + 2 * i + 1];
                zeros[k] = fmaf(x, 0.0f, fmaf(y, 0.0f, zeros[k])); /* NaN where one is not finite */
                v[k] = end.is_empty ? 0 : pack<T>(x * end.by, y * end.by);
            }
            uint4 x = turn_words(v);
            if (p.query >= 0) __stcs((uint4 *)(out + g * 32 + lane % 4 * 8), x);
        }
        if (l.lse != NULL && p.query >= 0 && lane % 4 == 0)
            l.lse[at * l.lse_token + p.head * l.lse_head] = end.lse;
        float zero = zeros[0] + zeros[1] + zeros[2] + zeros[3];
        is_odd |= p.query >= 0 && !end.is_empty && (zero != 0.0f || end.is_lost);
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
