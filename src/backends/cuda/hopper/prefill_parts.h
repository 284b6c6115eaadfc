/*
 * prefill_parts.h: parts of a tile whose keys are cut (prefill_list.h). Out and lse of each part, as if its keys were all, go
 * to the workspace, as backends/cuda/prefill_parts.h has them. A warp's rows are the same in every part: the warp that ends
 * the last of them merges the 16 rows, part after part. The four words of a cut tile and unit count parts of eight warps.
 */
#ifndef FOLIOI_CUDA_HOPPER_PARTS_H
#define FOLIOI_CUDA_HOPPER_PARTS_H

#include "backends/cuda/hopper/prefill_store.h"

/* Where a row of a part lies, in rows of one kv head. */
static __device__ __forceinline__ int64_t part_row(const hopper_args &a, const hopper_tile &t,
                                                   int32_t part, row_place p)
{
    int32_t rows = (t.past_query - t.first_query) * a.group;
    int64_t row = t.store + (int64_t)part * rows + (p.query - t.first_query) * a.group + p.head -
                  t.kv_head * a.group;
    return row * a.layer.num_kv_heads + t.kv_head;
}

/* store_rows of a part. */
template <typename T>
static __device__ __forceinline__ bool store_part(const hopper_args &a, const hopper_tile &t,
                                                  const float (&o)[64], const row_sums &r)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    bool is_odd = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, t, row + 8 * i);
        row_result x = end_row<T>(a, t, r, i, row + 8 * i, -CUDART_INF_F);
        int64_t at = part_row(a, t, t.part, p);
        float *out = a.part_out + at * DIMS + lane % 4 * 2, zero = 0.0f;
#pragma unroll
        for (int j = 0; j < DIMS / 8; j++) {
            float2 two = make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
            zero = fmaf(two.x, 0.0f, fmaf(two.y, 0.0f, zero));
            two = x.is_empty ? make_float2(0.0f, 0.0f) : make_float2(two.x * x.by, two.y * x.by);
            if (p.query >= 0) __stcg((float2 *)(out + j * 8), two);
        }
        if (p.query >= 0 && lane % 4 == 0) __stcg(a.part_lse + at * 2, x.lse);
        is_odd |= p.query >= 0 && !x.is_empty && (zero != 0.0f || x.is_lost);
    }
    return is_odd;
}

/* Has the warp stored the last part of its rows? */
static __device__ __forceinline__ bool ends_last_part(const hopper_args &a, const hopper_tile &t)
{
    int warp = threadIdx.x / WARP, shift = warp % 2 * 16;
    int32_t *counter = a.counters + 4 * (1 + (int64_t)t.counter * a.units + t.unit) + warp / 2;
    int32_t is_last = 0;
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        int32_t before = add_in_order(counter, 1 << shift) >> shift & 0xffff;
        is_last = before == t.num_parts - 1;
        if (is_last) atomicSub(counter, t.num_parts << shift);
        __threadfence();
    }
    return __shfl_sync(ALL_LANES, is_last, 0);
}

/* A row's parts added up; a lane has 4 dims. */
template <typename T>
static __device__ __forceinline__ void merge_row(const hopper_args &a, const hopper_tile &t,
                                                 row_place p)
{
    int lane = threadIdx.x % WARP;
    float largest = -CUDART_INF_F, sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int32_t part = 0; part < t.num_parts; part++) {
        int64_t at = part_row(a, t, part, p);
        float4 x = __ldcg((const float4 *)(a.part_out + at * DIMS + lane * 4));
        float lse = __ldcg(a.part_lse + at * 2), top = fmaxf(largest, lse);
        float base = softmax_base(top);
        float before = exp2_approx((largest - base) * LOG2E),
              by = exp2_approx((lse - base) * LOG2E);
        out = make_float4(fmaf(x.x, by, out.x * before), fmaf(x.y, by, out.y * before),
                          fmaf(x.z, by, out.z * before), fmaf(x.w, by, out.w * before));
        sum = sum * before + by;
        largest = top;
    }
    float sink = a.layer.sinks != NULL ? a.layer.sinks[p.head] : -CUDART_INF_F;
    put_row<T>(a, t, p, out, largest, sum, sink);
}

/* The warp's rows, where they are parts and these the last. */
template <typename T>
static __device__ __forceinline__ void merge_rows(const hopper_args &a, const hopper_tile &t,
                                                  int first)
{
    if (!ends_last_part(a, t)) return;
#pragma unroll 1
    for (int row = first; row < first + 16; row++) {
        row_place p = place_of(a, t, row);
        if (p.query >= 0) merge_row<T>(a, t, p);
    }
}

#endif
