/*
 * hopper_scores.h: what a warpgroup does with scores: -inf for keys that a row does not see, and weights relative to a
 * reference of each row, which follows the row's largest score only when that has grown by much (lazily): sums are rescaled
 * seldom then.
 */
#ifndef FOLIOI_CUDA_HOPPER_SCORES_H
#define FOLIOI_CUDA_HOPPER_SCORES_H

#include "backends/cuda/prefill/hopper/hopper_tile.h"

/* The lane's number, anew: what follows from it takes no registers across key tiles. */
static __device__ __forceinline__ int fresh_lane(void)
{
    int lane = threadIdx.x % WARP;
    asm volatile("" : "+r"(lane));
    return lane;
}

/*
 * By how much a score may pass its row's reference, and by how much weights are lifted, in log2. f16 ends at 2^16, and its
 * small numbers lose their digits.
 */
template <typename T> struct weight_range {
    static constexpr float SLACK = 8.0f, LIFT = 0.0f;
};
template <> struct weight_range<__half> {
    static constexpr float SLACK = 3.0f, LIFT = 12.0f;
};

/* Where references begin: below every score that is not rescued by the slow way, and finite. */
constexpr float LOWEST = -1e30f;

/* A thread's two rows. */
struct row_sums {
    float base[2];   /* the reference less the lift, in log2 */
    float sum[2];    /* of this thread's keys, lifted */
    float factor[2]; /* sums of values are to be multiplied with it, where rescaled */
    bool rescaled;
};

/* Those of a thread's columns, two of every 8, that lie before one: a bit each. */
template <int KEYS> static __device__ __forceinline__ uint32_t columns_before(int32_t column)
{
    int32_t n = max(0, min(column, KEYS));
    return low_bits(n / 8 * 2 + min(n % 8, 2));
}

/*
 * N columns of the scores of keys from `first` on: -inf where a row does not see the key. Steps of columns that all rows of
 * the warpgroup see stay as they are. WHOLE: all rows see keys from the first on.
 */
template <class I, int N, bool WHOLE, bool SKIPS = true>
static __device__ __forceinline__ void mask(typename I::scores &s, const hopper_args &a,
                                            const tile_of<I> &t, const common_keys &all,
                                            int32_t first)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    tile_edge begins = t.begins, ends = t.ends;
    int32_t lane_first = first + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t query = place_of(a, row + 8 * i).query;
        uint32_t bits = columns_before<I::KEYS>(end_of(ends, query) - lane_first);
        if (!WHOLE) bits &= ~columns_before<I::KEYS>(begin_of(begins, query) - lane_first);
#pragma unroll
        for (int step = 0; step < N; step += I::STEP_KEYS) {
            if (SKIPS && first + step + I::STEP_KEYS <= all.end &&
                (WHOLE || first + step >= all.begin))
                continue;
#pragma unroll
            for (int j = step / 4; j < (step + I::STEP_KEYS) / 4; j++)
                if (!(bits >> j & 1)) s[4 * (j / 2) + 2 * i + j % 2] = -CUDART_INF_F;
        }
    }
}

/* References follow what N columns of scores have grown to. */
template <class I, int N, bool FIRST>
static __device__ __forceinline__ void raise_base(const typename I::scores &s, row_sums &r,
                                                  float scale)
{
    using W = weight_range<typename I::W>;
    float x0 = s[0], x1 = s[2];
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1]));
        x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    x0 *= scale;
    x1 *= scale;
    r.rescaled = false;
    constexpr float MOST = W::LIFT + W::SLACK;
    bool has_grown = x0 > r.base[0] + MOST || x1 > r.base[1] + MOST;
    if (FIRST || __any_sync(ALL_LANES, has_grown)) {
#pragma unroll
        for (int i = 1; i < 4; i *= 2) {
            x0 = fmaxf(x0, __shfl_xor_sync(ALL_LANES, x0, i));
            x1 = fmaxf(x1, __shfl_xor_sync(ALL_LANES, x1, i));
        }
        if constexpr (FIRST) {
            r.base[0] = fmaxf(x0, LOWEST) - W::LIFT;
            r.base[1] = fmaxf(x1, LOWEST) - W::LIFT;
            r.sum[0] = r.sum[1] = 0.0f;
        } else {
            x0 = fmaxf(x0 - W::LIFT, r.base[0]);
            x1 = fmaxf(x1 - W::LIFT, r.base[1]);
            r.factor[0] = exp2_approx(r.base[0] - x0);
            r.factor[1] = exp2_approx(r.base[1] - x1);
            r.base[0] = x0;
            r.base[1] = x1;
            r.sum[0] *= r.factor[0];
            r.sum[1] *= r.factor[1];
            r.rescaled = true;
        }
    }
}

/* N columns of scores become weights. */
template <class I, int N>
static __device__ __forceinline__ void weigh(typename I::scores &s, row_sums &r, float scale)
{
    float even[2] = {0.0f, 0.0f}, odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        s[4 * j] = exp2_approx(fmaf(s[4 * j], scale, -r.base[0]));
        s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale, -r.base[0]));
        s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale, -r.base[1]));
        s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale, -r.base[1]));
        even[0] += s[4 * j];
        odd[0] += s[4 * j + 1];
        even[1] += s[4 * j + 2];
        odd[1] += s[4 * j + 3];
    }
    r.sum[0] += even[0] + odd[0];
    r.sum[1] += even[1] + odd[1];
}

/* Sums of a row's four threads. */
static __device__ __forceinline__ void add_up(row_sums &r)
{
#pragma unroll
    for (int i = 1; i < 4; i *= 2) {
        float x = __shfl_xor_sync(ALL_LANES, r.sum[0], i);
        float y = __shfl_xor_sync(ALL_LANES, r.sum[1], i);
        r.sum[0] += x;
        r.sum[1] += y;
    }
}

/* Rows that are none hold numbers of others, and must not rescale those of the tile: no score passes their reference. */
template <class I>
static __device__ __forceinline__ void quiet_rows(row_sums &r, const hopper_args &a,
                                                  const tile_of<I> &t)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (!is_row(t.out, place_of(a, row + 8 * i))) r.base[i] = CUDART_INF_F;
}

/* N columns of weights as factors of V: what a thread has of a product is what it gives to one. */
template <class I, int N>
static __device__ __forceinline__ void pack_weights(typename I::weights &p,
                                                    const typename I::scores &s)
{
#pragma unroll
    for (int j = 0; j < I::KEYS / 4; j++)
        p[j] = j < N / 4 ? pack<typename I::W>(s[2 * j], s[2 * j + 1]) : 0;
}

template <int N> static __device__ __forceinline__ void rescale(float (&o)[N], const row_sums &r)
{
    if (!r.rescaled) return;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        o[4 * j] *= r.factor[0];
        o[4 * j + 1] *= r.factor[0];
        o[4 * j + 2] *= r.factor[1];
        o[4 * j + 3] *= r.factor[1];
    }
}

#endif
