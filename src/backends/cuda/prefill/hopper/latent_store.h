/*
 * latent_store.h: a tile's end: sums of both warpgroups meet, sinks join, out and lse are stored, or those of a part. Rows
 * that hold a number that is not finite, or scores too large for weights, are computed again, one by one: rare, and slow.
 */
#ifndef FOLIOI_CUDA_LATENT_STORE_H
#define FOLIOI_CUDA_LATENT_STORE_H

#include "backends/cuda/prefill/hopper/hopper_store.h"
#include "backends/cuda/prefill/hopper/latent_step.h"

static __device__ __forceinline__ float *latent_lse(const hopper_args &a, const latent_tile &t,
                                                    row_place p)
{
    const hopper_layer &l = a.layer;
    return l.lse + (t.query_row + p.query) * l.lse_token + (t.first_head + p.head) * l.lse_head;
}

static __device__ __forceinline__ uint16_t *latent_out(const hopper_args &a, const latent_tile &t,
                                                       row_place p)
{
    return t.out.first + p.query * a.layer.out.token + p.head * a.layer.out.head;
}

/* Where a row of a part lies, in rows of one kv head. */
static __device__ __forceinline__ int64_t latent_part_row(const hopper_args &a,
                                                          const latent_tile &t, int32_t part,
                                                          row_place p)
{
    int32_t head = t.first_head + p.head - t.kv_head * a.heads_per_kv;
    int64_t row = t.store + (int64_t)part * t.out.num_queries * a.heads_per_kv +
                  p.query * a.heads_per_kv + head;
    return row * a.layer.num_kv_heads + t.kv_head;
}

/* What a row's sum of weighted V is multiplied with, and its lse, with its head's sink; in natural units. */
struct latent_end {
    float by, lse;
};

static __device__ __forceinline__ latent_end end_latent_row(const hopper_args &a,
                                                            const latent_tile &t, row_place p,
                                                            float largest, float sum)
{
    float sink = a.layer.sinks != NULL ? a.layer.sinks[t.first_head + p.head] : -CUDART_INF_F;
    if (sum == 0.0f) return {0.0f, sink}; /* it sees no key; NaN goes on */
    float base = softmax_base(largest), top = fmaxf(base, sink);
    float shrink = exp2f((base - top) * LOG2E);
    sum = sum * shrink + exp2f((sink - top) * LOG2E);
    return {shrink / sum, top + log2f(sum) * LN2};
}

/* Sums of weights of both warpgroups. The other has given its own with its last weights, if it had any. */
template <int W>
static __device__ __forceinline__ void add_up_both(const latent_shared &sh, const latent_tile &t,
                                                   const latent_rows &r, int parity,
                                                   float (&all)[2])
{
    int row = latent_row(fresh_lane());
#pragma unroll
    for (int i = 0; i < 2; i++) {
        all[i] = sum_of_row(r.sum[i] * exp2_approx(r.sum_base[i] - r.base[i]));
        if (W == 0 && t.num_keys == 1) continue;
        float2 other = sh.sum[parity][1 - W][row + 8 * i];
        all[i] = fmaf(other.x, exp2_approx(other.y - r.base[i]), all[i]);
    }
}

/* A row's numbers that a lane has, to out: 16 bytes at a time. Is one not finite? */
template <typename T>
static __device__ __forceinline__ bool store_latent_row(uint4 *out, const float (&o)[128], int i,
                                                        float by, bool is_there)
{
    uint32_t odd[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int at = 4 * (j + k) + 2 * i;
            v[k] = pack<T>(o[at] * by, o[at + 1] * by);
            odd[k % 2] = add_odd<T>(odd[k % 2], v[k]);
        }
        uint4 transposed = transpose_words(v);
        if (is_there) __stcs(out + j, transposed);
    }
    return ((odd[0] | odd[1]) & 0x7fff7fff) != 0;
}

/* The same of a part. */
static __device__ __forceinline__ bool store_latent_part(float *out, const float (&o)[128], int i,
                                                         float by, bool is_there)
{
    float odd = 0.0f;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        float2 two = make_float2(o[4 * j + 2 * i] * by, o[4 * j + 2 * i + 1] * by);
        odd = fmaf(two.x, 0.0f, fmaf(two.y, 0.0f, odd));
        if (is_there) __stcg((float2 *)(out + j * 8), two);
    }
    return odd != 0.0f;
}

/* A thread's two rows. Returned, a bit for each: does the slow way have to compute it? */
template <typename T, int W>
static __device__ __forceinline__ uint32_t end_latent_tile(const hopper_args &a, latent_shared &sh,
                                                           const latent_tile &t,
                                                           const float (&o)[128], latent_rows &r,
                                                           int parity)
{
    int lane = fresh_lane(), row = latent_row(lane);
    float sum[2];
    uint32_t is_odd = 0;
    add_up_both<W>(sh, t, r, parity, sum);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, row + 8 * i);
        bool is_there = is_row(t.out, p), writes_lse = is_there && W == 0 && lane % 4 == 0;
        bool is_bad = !(sum[i] > 0.0f) || !(fabsf(r.base[i]) < LARGE_SCORE);
        if (t.num_parts == 1) {
            if (!is_there) p = {0, 0};
            latent_end end = end_latent_row(a, t, p, r.base[i] * LN2, sum[i]);
            uint4 *out = (uint4 *)(latent_out(a, t, p) + W * LATENT_HALF) + lane % 4;
            is_bad |= store_latent_row<T>(out, o, i, end.by, is_there);
            if (writes_lse && a.layer.lse != NULL) *latent_lse(a, t, p) = end.lse;
        } else {
            int64_t at = latent_part_row(a, t, t.part, p);
            float *out = a.part_out + at * LATENT_VALUES + W * LATENT_HALF + lane % 4 * 2;
            is_bad |= store_latent_part(out, o, i, reciprocal(sum[i]), is_there);
            if (writes_lse) __stcg(a.part_lse + at * 2, (r.base[i] + log2_approx(sum[i])) * LN2);
        }
        is_odd |= (uint32_t)(is_there && is_bad) << i;
    }
    return is_odd;
}

/* ---- the slow way: of every panel a lane has two numbers ---- */

struct latent_slow_row {
    float largest, sum; /* in natural units */
    float out[8];       /* of half the values */
};

template <typename T> static __device__ __forceinline__ float2 widen_two(uint32_t x)
{
    constexpr bool BF16 = IS_BF16<T>;
    return make_float2(half_bits_to_float((uint16_t)x, BF16),
                       half_bits_to_float((uint16_t)(x >> 16), BF16));
}

template <typename T, int W>
static __device__ __forceinline__ void add_key_slowly(const hopper_args &a, const latent_tile &t,
                                                      latent_slow_row &r, const float2 (&q)[9],
                                                      int32_t key)
{
    int lane = threadIdx.x % WARP;
    int32_t index = key / a.layer.block_size, token = key - index * a.layer.block_size;
    int64_t block = __ldg(a.blocks + t.table + index);
    const char *from = a.layer.k + 2 * stored_row(a.layer.at, block, t.kv_head, token);
    float2 k[LATENT_PANELS];
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < LATENT_PANELS; i++) {
        k[i] = widen_two<T>(*(const uint32_t *)(from + row_byte(true, token, i * 128 + lane * 4)));
        score = fmaf(q[i].x, k[i].x, fmaf(q[i].y, k[i].y, score));
    }
    score = warp_sum(score) * a.layer.scale;
    if (score == -CUDART_INF_F) return;
    float largest = fmaxf(r.largest, score), base = softmax_base(largest);
    float shrink = exp2f((r.largest - base) * LOG2E), weight = exp2f((score - base) * LOG2E);
    if (r.largest == -CUDART_INF_F) shrink = 0.0f;
    r.largest = largest;
    r.sum = r.sum * shrink + weight;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        r.out[2 * i] = fmaf(weight, k[W * 4 + i].x, r.out[2 * i] * shrink);
        r.out[2 * i + 1] = fmaf(weight, k[W * 4 + i].y, r.out[2 * i + 1] * shrink);
    }
}

template <typename T, int W>
static __device__ __forceinline__ void store_slowly(const hopper_args &a, const latent_tile &t,
                                                    row_place p, const latent_slow_row &r)
{
    int lane = threadIdx.x % WARP;
    bool is_first = W == 0 && lane == 0, any = r.sum != 0.0f; /* or NaN */
    if (t.num_parts == 1) {
        latent_end end = end_latent_row(a, t, p, r.largest, r.sum);
        uint32_t *out = (uint32_t *)(latent_out(a, t, p) + W * LATENT_HALF) + lane;
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i * 32] = any ? pack<T>(r.out[2 * i] * end.by, r.out[2 * i + 1] * end.by) : 0;
        if (is_first && a.layer.lse != NULL) *latent_lse(a, t, p) = end.lse;
        return;
    }
    int64_t at = latent_part_row(a, t, t.part, p);
    float *out = a.part_out + at * LATENT_VALUES + W * LATENT_HALF + lane * 2;
    float by = any ? 1.0f / r.sum : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        __stcg((float2 *)(out + i * 64), any ? make_float2(r.out[2 * i] * by, r.out[2 * i + 1] * by)
                                             : make_float2(0.0f, 0.0f));
    if (is_first)
        __stcg(a.part_lse + at * 2,
               any ? softmax_base(r.largest) + log2f(r.sum) * LN2 : -CUDART_INF_F);
}

/* Half W of those of the warp's 16 rows that are odd: is_odd has a bit for each of a thread's two rows. */
template <typename T, int W>
static __device__ __forceinline__ void compute_latent_slowly(const hopper_args &a,
                                                             const latent_tile &t, uint32_t is_odd)
{
    const folioi_cuda_rows &rows = a.layer.q;
    int lane = threadIdx.x % WARP;
    uint32_t lanes[2] = {__ballot_sync(ALL_LANES, is_odd & 1),
                         __ballot_sync(ALL_LANES, is_odd & 2)};
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        if (!((i < 8 ? lanes[0] : lanes[1]) >> i % 8 * 4 & 15)) continue;
        row_place p = place_of(a, (int)threadIdx.x / WARP % 4 * 16 + i);
        int64_t at = (t.query_row + p.query) * rows.token + (t.first_head + p.head) * rows.head;
        const uint32_t *from = (const uint32_t *)((const uint16_t *)rows.data + at) + lane;
        float2 q[LATENT_PANELS];
#pragma unroll
        for (int k = 0; k < LATENT_PANELS; k++) q[k] = widen_two<T>(from[k * 32]);
        latent_slow_row r = {-CUDART_INF_F, 0.0f, {}};
        int32_t end = end_of(t.ends, p.query);
#pragma unroll 1
        for (int32_t key = begin_of(t.begins, p.query); key < end; key++)
            add_key_slowly<T, W>(a, t, r, q, key);
        store_slowly<T, W>(a, t, p, r);
    }
}

#endif
