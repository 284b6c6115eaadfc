/*
 * latent_parts.h: parts of a tile whose keys are cut (prefill_list.h). Out and lse of each part, as if its keys were all, go
 * to the workspace. When all are there, blocks that have nothing else to do merge them, a quarter of a row at a time: where
 * parts are few, each warp on its own, else the eight warps of a block together, each every eighth part. Blocks that have
 * more to compute leave it to others, or to one warp that computes nothing, if theirs came last. Whoever merges, it comes to
 * the same bits: every eighth part is folded, in the order of parts, and then the eight states.
 *
 *   counters of a cut tile and unit: blocks that stored their rows (await_parts), quarters taken, blocks gone, 1 unused
 */
#ifndef FOLIOI_CUDA_LATENT_PARTS_H
#define FOLIOI_CUDA_LATENT_PARTS_H

#include "backends/cuda/prefill/hopper/hopper_parts.h"
#include "backends/cuda/prefill/hopper/latent_store.h"

enum { MERGE_SETS = 8, MERGE_DIMS = 4 * WARP, MERGE_OF_ROW = LATENT_VALUES / MERGE_DIMS };

/* A quarter of a row: a lane has 4 of its dims. */
struct merge_unit {
    row_place place;
    int32_t dim;
    int64_t first, step; /* of its parts, in rows of one kv head */
};

static __device__ __forceinline__ merge_unit find_merge_unit(const hopper_args &a,
                                                             const latent_tile &t, int32_t n)
{
    int32_t row = n / MERGE_OF_ROW, heads = t.out.num_heads;
    merge_unit u = {{row / heads, row % heads}, n % MERGE_OF_ROW * MERGE_DIMS, 0, 0};
    u.dim += (int)threadIdx.x % WARP * 4;
    u.first = latent_part_row(a, t, 0, u.place);
    u.step = latent_part_row(a, t, 1, u.place) - u.first;
    return u;
}

/* What parts have come to: out and sum are relative to e^largest. */
struct merge_state {
    float4 out;
    float largest, sum;
};

static __device__ __forceinline__ float4 add_four(float4 x, float by, float4 y)
{
    return make_float4(fmaf(x.x, by, y.x), fmaf(x.y, by, y.y), fmaf(x.z, by, y.z),
                       fmaf(x.w, by, y.w));
}

/*
 * Parts set, set + MERGE_SETS and so on, AT_ONCE of them on their way at once. A lane looks up the weight of one part of
 * every 32.
 */
template <int AT_ONCE>
static __device__ __forceinline__ merge_state fold_set(const hopper_args &a, const latent_tile &t,
                                                       const merge_unit &u, int32_t set)
{
    merge_state s = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -CUDART_INF_F, 0.0f};
    int32_t lane = threadIdx.x % WARP, num = (t.num_parts - set + MERGE_SETS - 1) / MERGE_SETS;
    const float *lse = a.part_lse + (u.first + set * u.step) * 2;
    const float *from = a.part_out + (u.first + set * u.step) * LATENT_VALUES + u.dim;
    int64_t step = MERGE_SETS * u.step;
#pragma unroll 1
    for (int32_t first = 0; first < num; first += WARP) {
        float own = first + lane < num ? __ldcg(lse + (first + lane) * step * 2) : -CUDART_INF_F;
        float4 x[AT_ONCE];
        float weight = 0.0f;
#pragma unroll 1
        for (int32_t part = first; part < min(first + WARP, num); part += AT_ONCE) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                x[i] =
                    __ldcg((const float4 *)(from + min(part + i, num - 1) * step * LATENT_VALUES));
            if (part == first) { /* while they come */
                float top = fmaxf(s.largest, warp_max(own)), base = softmax_base(top);
                float shrink = exp2_approx((s.largest - base) * LOG2E);
                weight = exp2_approx((own - base) * LOG2E);
                s.largest = top;
                s.sum = fmaf(s.sum, shrink, warp_sum(weight));
                s.out = add_four(s.out, shrink, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float by = __shfl_sync(ALL_LANES, weight, (part - first + i) % WARP);
                if (part + i < num) s.out = add_four(x[i], by, s.out);
            }
        }
    }
    return s;
}

/* States of all sets, from(set), become one. */
template <typename F> static __device__ __forceinline__ merge_state fold_sets(F from)
{
    merge_state s = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -CUDART_INF_F, 0.0f};
#pragma unroll 1
    for (int32_t set = 0; set < MERGE_SETS; set++) {
        merge_state x = from(set);
        float top = fmaxf(s.largest, x.largest), base = softmax_base(top);
        float by = exp2_approx((x.largest - base) * LOG2E);
        float shrink = exp2_approx((s.largest - base) * LOG2E);
        s.out = add_four(s.out, shrink, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        s.out = add_four(x.out, by, s.out);
        s.sum = fmaf(x.sum, by, s.sum * shrink);
        s.largest = top;
    }
    return s;
}

template <typename T>
static __device__ __forceinline__ void store_merged(const hopper_args &a, const latent_tile &t,
                                                    const merge_unit &u, const merge_state &s)
{
    latent_end end = end_latent_row(a, t, u.place, s.largest, s.sum);
    uint2 two = make_uint2(pack<T>(s.out.x * end.by, s.out.y * end.by),
                           pack<T>(s.out.z * end.by, s.out.w * end.by));
    *(uint2 *)(latent_out(a, t, u.place) + u.dim) = s.sum == 0.0f ? make_uint2(0, 0) : two;
    if (a.layer.lse != NULL && u.dim == 0) *latent_lse(a, t, u.place) = end.lse;
}

/*
 * QUARTERS quarters from unit n on, of one row, by one warp, where each set has one part at most: AT_ONCE parts on their way
 * at once.
 */
template <typename T, int QUARTERS, int AT_ONCE>
static __device__ __forceinline__ void merge_few(const hopper_args &a, const latent_tile &t,
                                                 int32_t n)
{
    int lane = threadIdx.x % WARP;
    merge_unit u = find_merge_unit(a, t, n);
    merge_state s[QUARTERS] = {};
    const float *from = a.part_out + u.first * LATENT_VALUES + u.dim;
    float own =
        lane < t.num_parts ? __ldcg(a.part_lse + (u.first + lane * u.step) * 2) : -CUDART_INF_F;
    float largest = warp_max(own), weight = exp2_approx((own - softmax_base(largest)) * LOG2E);
    float sum = warp_sum(weight);
#pragma unroll 1
    for (int32_t part = 0; part < t.num_parts; part += AT_ONCE) {
        float4 x[AT_ONCE][QUARTERS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int q = 0; q < QUARTERS; q++)
                if (part + i < t.num_parts)
                    x[i][q] = __ldcg((const float4 *)(from + (part + i) * u.step * LATENT_VALUES +
                                                      q * MERGE_DIMS));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float by = __shfl_sync(ALL_LANES, weight, part + i);
#pragma unroll
            for (int q = 0; q < QUARTERS; q++)
                if (part + i < t.num_parts) s[q].out = add_four(x[i][q], by, s[q].out);
        }
    }
#pragma unroll
    for (int q = 0; q < QUARTERS; q++, u.dim += MERGE_DIMS)
        store_merged<T>(a, t, u, {s[q].out, largest, sum});
}

/* A quarter by one warp. */
template <typename T>
static __device__ __forceinline__ void merge_alone(const hopper_args &a, const latent_tile &t,
                                                   int32_t n)
{
    if (t.num_parts <= MERGE_SETS) return merge_few<T, 1, 1>(a, t, n);
    merge_unit u = find_merge_unit(a, t, n);
    store_merged<T>(a, t, u, fold_sets([&](int32_t set) { return fold_set<1>(a, t, u, set); }));
}

/* What warps of a merge hand to the first, in the place of keys: none are to come. */
struct merge_memory {
    merge_state states[MERGE_SETS][WARP];
};

/* A quarter by all warps that compute. */
template <typename T>
static __device__ __forceinline__ void merge_together(const hopper_args &a, const latent_memory &m,
                                                      const latent_tile &t, int32_t n)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    merge_memory &to = *(merge_memory *)m.merge();
    merge_unit u = find_merge_unit(a, t, n);
    to.states[warp][lane] = fold_set<16>(a, t, u, warp);
    named_sync(BARRIER_BOTH, 2 * 128);
    if (warp == 0)
        store_merged<T>(a, t, u, fold_sets([&](int32_t set) { return to.states[set][lane]; }));
    named_sync(BARRIER_BOTH, 2 * 128);
}

static __device__ __forceinline__ int32_t *counters_of(const hopper_args &a, const latent_tile &t)
{
    return a.counters + 4 * (1 + (int64_t)t.counter * a.units + t.unit);
}

static __device__ __forceinline__ int32_t merge_units(const latent_tile &t)
{
    return t.out.num_queries * t.out.num_heads * MERGE_OF_ROW;
}

/* The block is through with the counters; the last leaves zeros. */
static __device__ __forceinline__ void leave_parts(int32_t *counter, int32_t num_parts)
{
    if (add_in_order(counter + 2, 1) == num_parts - 1) counter[0] = counter[1] = counter[2] = 0;
}

/* Quarters to merge: by the warp, by all warps that compute. */
static __device__ __forceinline__ int32_t take_for_warp(int32_t *next, int32_t count)
{
    int32_t n = 0;
    if (threadIdx.x % WARP == 0) n = atomicAdd(next, count);
    return __shfl_sync(ALL_LANES, n, 0);
}

static __device__ __forceinline__ int32_t take_for_all(latent_shared &sh, int32_t *next)
{
    named_sync(BARRIER_BOTH, 2 * 128);
    if (threadIdx.x == 0) sh.unit = atomicAdd(next, 1);
    named_sync(BARRIER_BOTH, 2 * 128);
    return sh.unit;
}

/* All parts are there. alternate: the block of each, too, and they take quarters alternately. */
template <typename T>
static __device__ __forceinline__ void merge_parts(const hopper_args &a, const latent_memory &m,
                                                   const latent_tile &t, bool alternate)
{
    int32_t *next = counters_of(a, t) + 1, units = merge_units(t);
    if (t.num_parts <= MERGE_SETS) {
        constexpr int32_t ROW = MERGE_OF_ROW;
        int32_t unit = (t.part * 8 + (int)threadIdx.x / WARP) * ROW;
#pragma unroll 1
        for (;; unit += t.num_parts * 8 * ROW) {
            if (!alternate) unit = take_for_warp(next, ROW);
            if (unit >= units) return;
            merge_few<T, ROW, MERGE_SETS>(a, t, unit);
        }
    }
#pragma unroll 1
    for (int32_t unit = t.part;; unit += t.num_parts) {
        if (!alternate) unit = take_for_all(m.sh(), next);
        if (unit >= units) return;
        merge_together<T>(a, m, t, unit);
    }
}

/* The block's last tile, by all warps that compute. */
template <typename T>
static __device__ __forceinline__ void end_last_part(const hopper_args &a, const latent_memory &m,
                                                     const latent_tile &t)
{
    int32_t *counter = counters_of(a, t);
    named_sync(BARRIER_BOTH, 2 * 128); /* all rows are stored */
    if (threadIdx.x == 0) m.sh().unit = await_parts(counter, 1, t.num_parts, true);
    named_sync(BARRIER_BOTH, 2 * 128);
    int32_t count = m.sh().unit;
    if (count % LEFT == t.num_parts) merge_parts<T>(a, m, t, count == t.num_parts);
    named_sync(BARRIER_BOTH, 2 * 128); /* no warp takes numbers any more */
    if (threadIdx.x == 0) leave_parts(counter, t.num_parts);
}

/* A tile that others follow, by one warp: it merges if no part is missing. */
template <typename T>
static __device__ __forceinline__ void end_early_part(const hopper_args &a, const latent_tile &t)
{
    int32_t *counter = counters_of(a, t), count = 0;
    int32_t at_once = t.num_parts <= MERGE_SETS ? MERGE_OF_ROW : 1; /* as merge_parts takes them */
    int lane = threadIdx.x % WARP;
    if (lane == 0) count = await_parts(counter, 1, t.num_parts, false);
    count = __shfl_sync(ALL_LANES, count, 0);
#pragma unroll 1
    while (count % LEFT == t.num_parts) {
        int32_t unit = take_for_warp(counter + 1, at_once);
        if (unit >= merge_units(t)) break;
#pragma unroll 1
        for (int32_t i = 0; i < at_once; i++) merge_alone<T>(a, t, unit + i);
    }
    if (lane == 0) leave_parts(counter, t.num_parts);
}

/* The warp that ends parts for those that compute; but for a block's last tile, which they end themselves. */
template <typename T>
static __device__ __forceinline__ void latent_end_parts(const hopper_args &a,
                                                        const latent_memory &m)
{
    latent_shared &sh = m.sh();
    tile_at at = {0, 0, 0};
    barrier_wait_idly(shared_address(&sh.tile_filled[0]), 0);
    while (sh.tiles[at.place].num_keys > 0) {
        tile_at next = at;
        next.step();
        barrier_wait_idly(shared_address(&sh.tile_filled[next.place]), next.phase);
        if (sh.tiles[next.place].num_keys == 0) return;
        barrier_wait_idly(shared_address(&sh.tile_stored[at.place]), at.phase);
        const latent_tile &t = sh.tiles[at.place];
        if (t.num_parts > 1) end_early_part<T>(a, t);
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&sh.tile_emptied[at.place]));
        at = next;
    }
}

#endif
