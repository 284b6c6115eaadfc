/* hopper_store.h: a tile's end: sinks join, sums divide, out and lse are stored. */
#ifndef FOLIOI_CUDA_HOPPER_STORE_H
#define FOLIOI_CUDA_HOPPER_STORE_H

#include "backends/cuda/prefill/hopper/hopper_scores.h"

/* Scores beyond this, in log2, are rounded too much for their weights. */
constexpr float LARGE_SCORE = 1e6f;

/* What a thread's two rows come to beside their sums of values. */
struct row_ends {
    float by[2];          /* sums of values are multiplied with it */
    float top[2], all[2]; /* lse is top + log2(all), in log2 */
    bool is_lost[2];      /* it sees no key, or its weights mean nothing */
};

/* What sums of values are multiplied with beside that. */
template <class I> static __device__ __forceinline__ float value_scale(const tile_of<I> &t)
{
    if constexpr (I::FP8) return t.value_scale;
    else return 1.0f;
}

/* Sums are those of a row's four threads: add_up. */
template <class I>
static __device__ __forceinline__ row_ends end_rows(const tile_of<I> &t, const row_sums &r)
{
    row_ends e;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e.is_lost[i] = !(r.sum[i] > 0.0f) || !(fabsf(r.base[i]) < LARGE_SCORE);
        e.by[i] = reciprocal(r.sum[i]) * value_scale<I>(t);
        e.top[i] = r.base[i];
        e.all[i] = r.sum[i];
    }
    return e;
}

/* Sinks of the rows' heads join them. */
template <class I>
static __device__ __forceinline__ void add_sinks(const hopper_args &a, const tile_of<I> &t,
                                                 row_ends &e, int row)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, row + 8 * i);
        float sink = -CUDART_INF_F;
        if (p.head < t.out.num_heads) sink = __ldg(a.layer.sinks + t.first_head + p.head) * LOG2E;
        float top = fmaxf(e.top[i] + weight_range<typename I::W>::LIFT, sink);
        float shrink = exp2_approx(e.top[i] - top);
        e.all[i] = e.all[i] * shrink + exp2_approx(sink - top);
        e.by[i] = shrink * reciprocal(e.all[i]) * value_scale<I>(t);
        e.top[i] = top;
    }
}

/* Each lane of four has a word of each of four units of a row, and gets all of one: 16 bytes. */
static __device__ __forceinline__ uint4 transpose_words(const uint32_t *v)
{
    bool low = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t x = __shfl_xor_sync(ALL_LANES, low ? v[0] : v[1], 1);
    uint32_t y = __shfl_xor_sync(ALL_LANES, low ? v[2] : v[3], 1);
    uint4 w = make_uint4(low ? x : v[0], low ? v[1] : x, low ? y : v[2], low ? v[3] : y);
    x = __shfl_xor_sync(ALL_LANES, high ? w.x : w.z, 2);
    y = __shfl_xor_sync(ALL_LANES, high ? w.y : w.w, 2);
    return make_uint4(high ? x : w.x, high ? y : w.y, high ? w.z : x, high ? w.w : y);
}

/* Words [j, j + 4) of a row's PAIRS. Four units go as such, where there are fewer each lane stores its words. */
template <int PAIRS>
static __device__ __forceinline__ void store_words(uint4 *out, const uint32_t *v, int j,
                                                   bool is_there)
{
    if (j + 4 <= PAIRS) {
        uint4 transposed = transpose_words(v + j);
        if (is_there) __stcs(out + j, transposed);
        return;
    }
    uint32_t *words = (uint32_t *)out - 3 * (threadIdx.x % 4); /* out is the lane's unit */
#pragma unroll
    for (int k = j; k < PAIRS; k++)
        if (is_there) __stcs(words + 4 * k, v[k]);
}

/* Where lse of a row goes. */
template <int WARPGROUPS>
static __device__ __forceinline__ float *lse_of(const hopper_args &a,
                                                const hopper_tile<WARPGROUPS> &t, row_place p)
{
    const hopper_layer &l = a.layer;
    return l.lse + (t.query_row + p.query) * l.lse_token + (t.first_head + p.head) * l.lse_head;
}

/*
 * A thread's two rows. Returned, a bit for each: is something in it that only the slow way computes right? NaN may have
 * come from keys that a row does not see, and scores may be too large for weights. Both rows at once, and no branch but for
 * options: the next tile waits for this. HOLDS: such rows are not stored, because out may be q, which the slow way reads.
 */
template <class I, bool HOLDS>
static __device__ __forceinline__ uint32_t store_rows(const hopper_args &a, const tile_of<I> &t,
                                                      const typename I::sums &o, const row_sums &r)
{
    using T = typename I::T;
    constexpr int PAIRS = I::DV / 8; /* of numbers that a thread has of a row */
    const hopper_layer &l = a.layer;
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    row_ends e = end_rows<I>(t, r);
    if (l.sinks != NULL) add_sinks<I>(a, t, e, row);
    tile_out to = t.out;
    uint32_t is_odd = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, row + 8 * i);
        bool is_there = is_row(to, p);
        uint32_t unit = (uint32_t)p.query * a.out_token + (uint32_t)p.head * a.out_head + lane % 4;
        uint4 *out = (uint4 *)to.first + unit;
        uint32_t v[PAIRS], odd[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < PAIRS; j += 4) {
#pragma unroll
            for (int k = j; k < min(j + 4, PAIRS); k++) {
                int at = 4 * k + 2 * i;
                v[k] = pack<T>(o[at] * e.by[i], o[at + 1] * e.by[i]);
                odd[k % 2] = add_odd<T>(odd[k % 2], v[k]);
            }
            if (HOLDS) continue;
            store_words<PAIRS>(out, v, j, is_there);
        }
        bool is_bad = e.is_lost[i] || ((odd[0] | odd[1]) & 0x7fff7fff) != 0;
        is_odd |= (uint32_t)(is_there && is_bad) << i;
        if (!HOLDS) continue;
        uint32_t bad_lanes = __ballot_sync(ALL_LANES, is_bad) >> (lane & ~3) & 15;
#pragma unroll
        for (int j = 0; j < PAIRS; j += 4) {
            store_words<PAIRS>(out, v, j, is_there && bad_lanes == 0);
        }
    }
    if (l.lse != NULL && lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row_place p = place_of(a, row + 8 * i);
            if (is_row(to, p)) *lse_of(a, t, p) = (e.top[i] + log2_approx(e.all[i])) * LN2;
        }
    }
    return is_odd;
}

/*
 * A row's numbers of V among lanes, LANES for a row: a lane has 4 neighbours, and 4 of each 4 * LANES further on. So many
 * times; of the last time, lanes past the row's end have none.
 */
template <class I, int LANES> constexpr int QUADS = (I::DV / 4 + LANES - 1) / LANES;

template <class I, int LANES> static __device__ __forceinline__ bool has_quad(int lane, int j)
{
    return I::DV % (4 * LANES) == 0 || lane + j * LANES < I::DV / 4;
}

/* One row stored: sums of values and of weights relative to the largest score, in natural units; a sink joins them. */
template <class I, int LANES>
static __device__ __forceinline__ void put_row(const hopper_args &a, const tile_of<I> &t,
                                               row_place p, const float4 (&x)[QUADS<I, LANES>],
                                               float largest, float sum)
{
    using T = typename I::T;
    const hopper_layer &l = a.layer;
    int lane = threadIdx.x % LANES;
    float sink = l.sinks != NULL ? l.sinks[t.first_head + p.head] : -CUDART_INF_F;
    float by = 0.0f, lse = sink;
    bool any = sum != 0.0f; /* or NaN */
    if (any) {
        float base = softmax_base(largest), top = fmaxf(base, sink);
        float shrink = exp2f((base - top) * LOG2E);
        sum = sum * shrink + exp2f((sink - top) * LOG2E);
        by = shrink * reciprocal(sum);
        lse = top + log2f(sum) * LN2;
    }
    uint16_t *out = t.out.first + p.query * l.out.token + p.head * l.out.head + lane * 4;
#pragma unroll
    for (int j = 0; j < QUADS<I, LANES>; j++) {
        if (!has_quad<I, LANES>(lane, j)) continue;
        float4 y = any ? x[j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(uint2 *)(out + j * (4 * LANES)) =
            make_uint2(pack<T>(y.x * by, y.y * by), pack<T>(y.z * by, y.w * by));
    }
    if (l.lse != NULL && lane == 0) *lse_of(a, t, p) = lse;
}

#endif
