/*
 * hopper_slow.h: rows computed again, one after another, each by the keys it sees alone: where V of another key is NaN or
 * infinite, or scores are so large that their rounding counts. A lane has 4 dims of each 128. Rare, and slow.
 */
#ifndef FOLIOI_CUDA_HOPPER_SLOW_H
#define FOLIOI_CUDA_HOPPER_SLOW_H

#include "backends/cuda/decode/decode_widen.h"
#include "backends/cuda/prefill/hopper/hopper_options.h"
#include "backends/cuda/prefill/hopper/hopper_parts.h"

/* Four numbers. */
template <typename T> static __device__ __forceinline__ float4 widen_four(uint2 x)
{
    constexpr bool BF16 = IS_BF16<T>;
    return make_float4(
        half_bits_to_float((uint16_t)x.x, BF16), half_bits_to_float((uint16_t)(x.x >> 16), BF16),
        half_bits_to_float((uint16_t)x.y, BF16), half_bits_to_float((uint16_t)(x.y >> 16), BF16));
}

/* Four numbers of K or V; of 8 bits, in the first word. */
template <class I> static __device__ __forceinline__ float4 widen_stored(uint2 x)
{
    if constexpr (I::BYTES)
        return widen_four<__half>(make_uint2(widen<I::KV, 0, 1>(x.x), widen<I::KV, 2, 3>(x.x)));
    else return widen_four<typename I::T>(x);
}

/* What K and V of a key are multiplied with: 8-bit ones alone. */
template <class I> struct stored_scales {
    float k, v;
    __device__ __forceinline__ void load(const hopper_args &a, const tile_of<I> &t, int64_t block,
                                         int32_t token)
    {
        const hopper_bytes &b = a.bytes;
        if (I::INT8) {
            k = __ldg(b.k_scales + stored_row(b.k_scales_at, block, t.kv_head, token));
            v = __ldg(b.v_scales + stored_row(b.v_scales_at, block, t.kv_head, token));
        } else {
            k = head_scale(b.k_head_scales, b.k_scale, t.kv_head);
            v = head_scale(b.v_head_scales, b.v_scale, t.kv_head);
        }
    }
};

/* What one row has come to. */
template <class I> struct slow_row {
    float largest, sum; /* scores in natural units */
    float4 out[QUADS<I, WARP>];
};

/* A lane's numbers of a row of q or K, 4 of each 128. */
template <class I> struct slow_query {
    static constexpr int QUADS = (I::DK / 4 + WARP - 1) / WARP;
    float4 q[QUADS];
    static __device__ __forceinline__ bool has(int lane, int j)
    {
        return I::DK % 128 == 0 || lane + j * WARP < I::DK / 4;
    }
};

/* Keys [key, end), at most AT_ONCE. */
template <class I, int AT_ONCE>
static __device__ __forceinline__ void add_keys(const hopper_args &a, const tile_of<I> &t,
                                                slow_row<I> &r, const slow_query<I> &q, row_place p,
                                                float slope, int32_t key, int32_t end)
{
    constexpr int STEP = I::FROM_ROWS ? 256 : 2 * PANEL_BYTES; /* 128 numbers */
    int lane = threadIdx.x % WARP;
    uint2 k[AT_ONCE][q.QUADS], v[AT_ONCE][QUADS<I, WARP>];
    stored_scales<I> by[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int32_t j = min(key + i, end - 1), index = j / a.layer.block_size;
        int32_t token = j - index * a.layer.block_size;
        int64_t block = __ldg(a.blocks + t.table + index);
        if constexpr (I::BYTES) {
            const char *of_k = a.layer.k + stored_row(a.layer.at, block, t.kv_head, token);
            const char *of_v = a.layer.v + stored_row(a.boxes.v_at, block, t.kv_head, token);
#pragma unroll
            for (int n = 0; n < q.QUADS; n++)
                if (q.has(lane, n)) k[i][n].x = *(const uint32_t *)(of_k + lane * 4 + n * 128);
#pragma unroll
            for (int n = 0; n < QUADS<I, WARP>; n++)
                if (has_quad<I, WARP>(lane, n))
                    v[i][n].x = *(const uint32_t *)(of_v + lane * 4 + n * 128);
            by[i].load(a, t, block, token);
            continue;
        }
        int64_t at = 2 * stored_row(a.layer.at, block, t.kv_head, token), v_at = at;
        if (I::FROM_ROWS) v_at = 2 * stored_row(a.boxes.v_at, block, t.kv_head, token);
        int32_t of_lane = row_byte(!I::FROM_ROWS, token, lane * 8);
#pragma unroll
        for (int n = 0; n < q.QUADS; n++)
            if (q.has(lane, n)) k[i][n] = *(const uint2 *)(a.layer.k + at + of_lane + n * STEP);
#pragma unroll
        for (int n = 0; n < QUADS<I, WARP>; n++)
            if (has_quad<I, WARP>(lane, n))
                v[i][n] = *(const uint2 *)(a.layer.v + v_at + of_lane + n * STEP);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        float4 x[q.QUADS], y[QUADS<I, WARP>];
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < q.QUADS; n++)
            if (q.has(lane, n)) x[n] = widen_stored<I>(k[i][n]);
#pragma unroll
        for (int n = 0; n < QUADS<I, WARP>; n++)
            if (has_quad<I, WARP>(lane, n)) y[n] = widen_stored<I>(v[i][n]);
#pragma unroll
        for (int n = 0; n < q.QUADS; n++) {
            if (!q.has(lane, n)) continue;
            float4 z = q.q[n];
            float four = fmaf(z.x, x[n].x, fmaf(z.y, x[n].y, fmaf(z.z, x[n].z, z.w * x[n].w)));
            dot = n == 0 ? four : dot + four;
        }
        float score = warp_sum(dot) * a.layer.scale;
        if constexpr (I::BYTES) score *= by[i].k;
        if (I::OPTIONS) score = option_score(a, score, slope, t.own + p.query - (key + i));
        if (key + i >= end || score == -CUDART_INF_F) continue;
        float largest = fmaxf(r.largest, score), base = softmax_base(largest);
        float shrink = exp2f((r.largest - base) * LOG2E), weight = exp2f((score - base) * LOG2E);
        if (r.largest == -CUDART_INF_F) shrink = 0.0f;
        r.largest = largest;
        r.sum = r.sum * shrink + weight;
        if constexpr (I::BYTES) weight *= by[i].v;
#pragma unroll
        for (int n = 0; n < QUADS<I, WARP>; n++) {
            if (!has_quad<I, WARP>(lane, n)) continue;
            float4 &o = r.out[n];
            o = make_float4(fmaf(weight, y[n].x, o.x * shrink), fmaf(weight, y[n].y, o.y * shrink),
                            fmaf(weight, y[n].z, o.z * shrink), fmaf(weight, y[n].w, o.w * shrink));
        }
    }
}

/* A row of a part. */
template <class I>
static __device__ __forceinline__ void put_part(const hopper_args &a, const tile_of<I> &t,
                                                row_place p, const slow_row<I> &r)
{
    int64_t at = part_row(a, t, t.part, p);
    int lane = threadIdx.x % WARP;
    bool any = r.sum != 0.0f; /* or NaN */
    float by = any ? 1.0f / r.sum : 0.0f;
#pragma unroll
    for (int n = 0; n < QUADS<I, WARP>; n++) {
        if (!has_quad<I, WARP>(lane, n)) continue;
        float4 x = r.out[n]; /* zeros where there is none */
        __stcg((float4 *)(a.part_out + at * I::DV + (lane + n * WARP) * 4),
               make_float4(x.x * by, x.y * by, x.z * by, x.w * by));
    }
    if (lane == 0)
        __stcg(a.part_lse + at * 2,
               any ? softmax_base(r.largest) + log2f(r.sum) * LN2 : -CUDART_INF_F);
}

/* Those of the warp's 16 rows that are odd: is_odd has a bit for each of a thread's two rows. */
template <class I>
static __device__ __forceinline__ void compute_slowly(const hopper_args &a, const tile_of<I> &t,
                                                      int first, uint32_t is_odd)
{
    constexpr int at_once = I::DK == 128 ? 4 : 1; /* for lack of registers */
    const hopper_layer &l = a.layer;
    int lane = threadIdx.x % WARP;
    uint32_t lanes[2] = {__ballot_sync(ALL_LANES, is_odd & 1),
                         __ballot_sync(ALL_LANES, is_odd & 2)};
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        if (!((i < 8 ? lanes[0] : lanes[1]) >> i % 8 * 4 & 15)) continue;
        row_place p = place_of(a, first + i);
        folioi_range seen = keys_of(t, p.query);
        int64_t at = (t.query_row + p.query) * l.q.token + (t.first_head + p.head) * l.q.head;
        const uint16_t *from = (const uint16_t *)l.q.data + at + lane * 4;
        slow_query<I> q;
#pragma unroll
        for (int n = 0; n < q.QUADS; n++)
            if (q.has(lane, n))
                q.q[n] = widen_four<typename I::T>(*(const uint2 *)(from + n * 4 * WARP));
        float slope = 0.0f;
        if (I::OPTIONS && a.options.slopes != NULL) slope = a.options.slopes[t.first_head + p.head];
        slow_row<I> r = {-CUDART_INF_F, 0.0f, {}};
#pragma unroll 1
        for (int32_t key = seen.begin; key < seen.end; key += at_once)
            add_keys<I, at_once>(a, t, r, q, p, slope, key, seen.end);
        if (t.num_parts == 1) put_row<I, WARP>(a, t, p, r.out, r.largest, r.sum);
        else put_part(a, t, p, r);
    }
}

#endif
