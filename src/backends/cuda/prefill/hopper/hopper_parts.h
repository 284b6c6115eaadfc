/*
 * hopper_parts.h: parts of a tile whose keys are cut (prefill_list.h). Out and lse of each part, as if its keys were all, go
 * to the workspace, as prefill/prefill_parts.h has them. When all are there, warps that have nothing else to do take
 * rows and add up their parts, each in the order of parts: whoever takes a row, it comes to the same bits.
 *
 * Warps that have more to compute leave that to one of their block that computes nothing. With it in their loop the compiler
 * keeps the places of matrices in registers of each lane: 130 moves more, and windows and fixed cuts take 8 to 9 % longer.
 *
 *   counters of a cut tile and unit: warps that stored their rows (await_parts), rows taken, warps gone, 1 unused
 */
#ifndef FOLIOI_CUDA_HOPPER_PARTS_H
#define FOLIOI_CUDA_HOPPER_PARTS_H

#include "backends/cuda/prefill/hopper/hopper_store.h"

/* Where a row of a part lies, in rows of one kv head. */
template <int WARPGROUPS>
static __device__ __forceinline__ int64_t part_row(const hopper_args &a,
                                                   const hopper_tile<WARPGROUPS> &t, int32_t part,
                                                   row_place p)
{
    int32_t head = t.first_head + p.head - t.kv_head * a.heads_per_kv;
    int64_t row = t.store + (int64_t)part * t.out.num_queries * a.heads_per_kv +
                  p.query * a.heads_per_kv + head;
    return row * a.layer.num_kv_heads + t.kv_head;
}

/* store_rows of a part. */
template <class I>
static __device__ __forceinline__ uint32_t store_part(const hopper_args &a, const tile_of<I> &t,
                                                      const typename I::sums &o, const row_sums &r)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    row_ends e = end_rows<I>(t, r);
    uint32_t is_odd = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, row + 8 * i);
        bool is_there = is_row(t.out, p);
        int64_t at = part_row(a, t, t.part, p);
        float *out = a.part_out + at * I::DV + lane % 4 * 2, odd = 0.0f;
#pragma unroll
        for (int j = 0; j < I::DV / 8; j++) {
            float2 two = make_float2(o[4 * j + 2 * i] * e.by[i], o[4 * j + 2 * i + 1] * e.by[i]);
            odd = fmaf(two.x, 0.0f, fmaf(two.y, 0.0f, odd));
            if (is_there) __stcg((float2 *)(out + j * 8), two);
        }
        if (is_there && lane % 4 == 0)
            __stcg(a.part_lse + at * 2, (e.top[i] + log2_approx(e.all[i])) * LN2);
        if (is_there && (odd != 0.0f || e.is_lost[i])) is_odd |= 1 << i;
    }
    return is_odd;
}

/* How often a warp with nothing else to do looks whether all parts are there: about 50 us. */
#define HOPPER_LOOKS 64

/*
 * The first counter: warps that stored their rows and, in its upper half, those of them that left before all had. It changes
 * no more when all have.
 */
enum { LEFT = 1 << 16 };

/*
 * `warps` have stored their rows: what the counter is when all parts are there, or when they leave. Who does not wait leaves
 * the merge to others.
 */
static __device__ __forceinline__ int32_t await_parts(int32_t *counter, int32_t warps, int32_t all,
                                                      bool waits)
{
    int32_t mine = waits ? warps : warps + warps * LEFT, now = add_in_order(counter, mine) + mine;
#pragma unroll 1
    for (int i = 0; now % LEFT < all && waits; i++) {
        if (i >= HOPPER_LOOKS && atomicCAS(counter, now, now + warps * LEFT) == now) break;
        __nanosleep(100);
        now = load_in_order(counter);
    }
    return now;
}

/* A lane's dims of some parts of a row, and their lse: all on their way from memory at once. */
template <class I, int PARTS, int LANES> struct parts_of_row {
    float4 out[PARTS][QUADS<I, LANES>];
    float lse[PARTS];

    __device__ __forceinline__ void load(const float *out_at, const float *lse_at, int64_t step,
                                         int32_t first, int32_t num_parts, int lane)
    {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int64_t row = min(first + i, num_parts - 1) * step;
#pragma unroll
            for (int j = 0; j < QUADS<I, LANES>; j++)
                if (has_quad<I, LANES>(lane, j))
                    out[i][j] = __ldcg((const float4 *)(out_at + row * I::DV + j * (4 * LANES)));
            lse[i] = __ldcg(lse_at + row * 2);
        }
    }
};

/*
 * A row's parts added up by LANES lanes, PARTS of them at once: with fewer lanes a warp merges several rows, which wait for
 * memory together.
 */
template <class I, int PARTS, int LANES>
static __device__ __forceinline__ void merge_row(const hopper_args &a, const tile_of<I> &t,
                                                 row_place p)
{
    int lane = threadIdx.x % LANES;
    int64_t at = part_row(a, t, 0, p), step = part_row(a, t, 1, p) - at;
    const float *lse = a.part_lse + at * 2, *out = a.part_out + at * I::DV + lane * 4;
    parts_of_row<I, PARTS, LANES> parts;
    parts.load(out, lse, step, 0, t.num_parts, lane);
    float largest = -CUDART_INF_F;
    if constexpr (LANES < WARP) { /* there are no more than PARTS */
#pragma unroll
        for (int i = 0; i < PARTS; i++) largest = fmaxf(largest, parts.lse[i]);
    } else {
        for (int32_t part = lane; part < t.num_parts; part += WARP)
            largest = fmaxf(largest, __ldcg(lse + part * step * 2));
        largest = warp_max(largest);
    }
    float base = softmax_base(largest), sum = 0.0f;
    float4 all[QUADS<I, LANES>] = {};
#pragma unroll 1
    for (int32_t first = 0; first < t.num_parts; first += PARTS) {
        if (first > 0) parts.load(out, lse, step, first, t.num_parts, lane);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            if (first + i >= t.num_parts) break;
            float by = exp2_approx((parts.lse[i] - base) * LOG2E);
            sum += by;
#pragma unroll
            for (int j = 0; j < QUADS<I, LANES>; j++) {
                float4 x = parts.out[i][j], y = all[j];
                all[j] = make_float4(fmaf(x.x, by, y.x), fmaf(x.y, by, y.y), fmaf(x.z, by, y.z),
                                     fmaf(x.w, by, y.w));
            }
        }
    }
    put_row<I, LANES>(a, t, p, all, largest, sum);
}

/*
 * A warp has stored its rows of a part, or one that does not wait says so for all of its block. When all parts are
 * there, rows are merged. If no warp left and each has a row to merge, each takes the row of its own number; else warps
 * that are there take some rows after others.
 */
template <class I, int PARTS, int LANES, bool WAITS>
static __device__ __forceinline__ void end_part(const hopper_args &a, const tile_of<I> &t)
{
    constexpr int32_t warps = WAITS ? 1 : I::WARPS; /* one warp counts for all */
    constexpr int32_t at_once = WARP / LANES;       /* rows that a warp merges */
    int32_t *counter = a.counters + 4 * (1 + (int64_t)t.counter * a.units + t.unit);
    int32_t all = I::WARPS * t.num_parts, rows = t.out.num_queries * a.heads;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t count = 0, row = 0, gone = 0;
    __syncwarp();
    if (lane == 0) count = await_parts(counter, warps, all, WAITS);
    count = __shfl_sync(ALL_LANES, count, 0);
    bool alternate = WAITS && count == all && rows >= all * at_once;
    if (alternate) {
        if (lane == 0) gone = atomicAdd(counter + 2, 1); /* nobody looks at the counters any more */
        row = (t.part * I::WARPS + warp) * at_once;
    } else if (count % LEFT < all) row = rows;
    else if (lane == 0) row = atomicAdd(counter + 1, at_once);
#pragma unroll 1
    for (;;) {
        int32_t now = __shfl_sync(ALL_LANES, row, 0);
        if (now >= rows) break;
        if (alternate) row += all * at_once;
        else if (lane == 0) row = atomicAdd(counter + 1, at_once); /* it comes meanwhile */
        row_place p = place_of(a, now + lane / LANES);
        if (is_row(t.out, p)) merge_row<I, PARTS, LANES>(a, t, p);
    }
    if (lane == 0 && !alternate) gone = add_in_order(counter + 2, warps);
    if (lane == 0 && gone == all - warps) counter[0] = counter[1] = counter[2] = 0;
}

/* The warp that ends parts for those that compute; but for a block's last tile, which they end themselves. */
template <class I>
static __device__ __forceinline__ void end_parts(const hopper_args &a, const hopper_memory<I> &m)
{
    hopper_shared<I> &sh = m.sh();
    tile_at at = {0, 0, 0};
    barrier_wait_idly(shared_address(&sh.tile_filled[0]), 0);
    while (!sh.tiles[at.place].keys.is_none) {
        tile_at next = at;
        next.step();
        barrier_wait_idly(shared_address(&sh.tile_filled[next.place]), next.phase);
        if (sh.tiles[next.place].keys.is_none) return;
        barrier_wait_idly(shared_address(&sh.tile_stored[at.place]), at.phase);
        const tile_of<I> &t = sh.tiles[at.place];
        if (t.num_parts > 1) end_part<I, (I::BYTES || I::DV != 128 ? 2 : 4), WARP, false>(a, t);
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&sh.tile_emptied[at.place]));
        at = next;
    }
}

#endif
