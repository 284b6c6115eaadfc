/*
 * prefill_kernel.h: attention of many query rows. A block of threads computes one tile: some queries of one sequence times
 * the query heads of one kv head, as rows side by side, so that each tile of K and V is read once for all of them, the next
 * one being on its way while one is computed. Key tiles lie at multiples of KEYS: a row's bits depend on neither the tile it
 * is in nor the batch.
 */
#ifndef FOLIOI_CUDA_PREFILL_KERNEL_H
#define FOLIOI_CUDA_PREFILL_KERNEL_H

#include "backends/cuda/prefill/prefill_f32.h"
#include "backends/cuda/prefill/prefill_fetch.h"
#include "backends/cuda/prefill/prefill_finish.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/prefill/prefill_query.h"
#include "backends/cuda/prefill/prefill_scores.h"
#include "backends/cuda/prefill/prefill_softmax.h"
#include "backends/cuda/prefill/prefill_specials.h"
#include "backends/cuda/prefill/prefill_values.h"
#include "backends/cuda/prefill/prefill_widen.h"
#include "backends/cuda/warp.h"

/* ---- one key tile ---- */

/* The first key of a tile that the warp computes: TEAM warps share rows, each having keys of its own. */
template <class I, int TEAM> static __device__ __forceinline__ int team_key(void)
{
    return TEAM == 1 ? 0 : fresh_warp() % TEAM * I::KEYS;
}

/* The stage that holds the key tile at hand. */
template <class I>
static __device__ __forceinline__ int stage_of(const prefill_args &a, typename I::shared &sh,
                                               const at_hand &h)
{
    return I::SPLIT || !(I::FIXED || a.is_direct) ? 0 : tile_of<I>(h, sh) & 1;
}

/*
 * Weights of I::KEYS keys of a tile, the first, or with TEAM > 1 those of the warp's number in its team. Returned, if
 * any_values: which scores are of keys seen.
 */
template <class I, int M, int TEAM = 1>
static __device__ __forceinline__ uint32_t weigh_keys(prefill_scores<I, M> &s,
                                                      prefill_state<I::DV, M> &st,
                                                      const prefill_args &a, typename I::shared &sh,
                                                      const at_hand &h, bool is_edge,
                                                      bool any_values)
{
    uint32_t q = shared_address(sh.q),
             k = shared_address(sh.kv[stage_of<I>(a, sh, h)]) + team_key<I, TEAM>() * I::K_ROW;
    if constexpr (!I::F32) multiply_keys<I, M>(s, q, k, row_of<I>(h, sh));
    else if (M == 1 && any_values) multiply_any_keys_f32<I>(s[0], q, k, row_of<I>(h, sh));
    else multiply_keys_f32<I, M>(s, q, k, row_of<I>(h, sh));
    /* again and again from shared memory, registers being few */
    int32_t first_key = tile_of<I>(h, sh) * I::TILE_KEYS + team_key<I, TEAM>();
    int row0 = row_of<I>(h, sh);
    if constexpr (I::KV == KV_INT8)
        scale_keys<I, M>(s, sh.scales[stage_of<I>(a, sh, h)], 1.0f, false);
    if constexpr (!I::FIXED) apply_options<I, M>(s, a, sh, first_key, row0);
    if (is_edge) mask<I, M>(s, sh, first_key, row0);
    uint32_t seen = 0;
    if (M == 1 && any_values) seen = seen_bits<I>(s[0]);
    unpark<I, M>(st, sh);
    soften<I, M>(s, st, a, sh, row0);
    park<I, M>(st, sh);
    return seen;
}

/* Their values times the weights, added to out. */
template <class I, int M, int TEAM = 1>
static __device__ __forceinline__ void add_values(prefill_scores<I, M> &s,
                                                  prefill_state<I::DV, M> &st,
                                                  const prefill_args &a, typename I::shared &sh,
                                                  const at_hand &h, bool any_values, uint32_t seen)
{
    int stage = stage_of<I>(a, sh, h);
    const float *v_scales = sh.scales[stage] + (I::KV == KV_INT8 ? I::TILE_KEYS : 0);
    uint32_t v = shared_address(sh.kv[stage]) + I::K_BYTES + team_key<I, TEAM>() * I::V_ROW;
    if constexpr (I::KV == KV_INT8) scale_weights<I, M>(s, st, v_scales, any_values);
    if constexpr (M == 1) {
        if (any_values) {
            if constexpr (I::F32) multiply_any_values_f32<I>(st, s[0], seen, v);
            else multiply_any_values<I>(st, s, seen, v, v_scales);
            return;
        }
    }
    if constexpr (I::F32)
#pragma unroll
        for (int n = 0; n < I::KEYS / 8; n += 2) multiply_values_f32<I, M>(st, s, v, n);
    else multiply_values<I, M>(st, s, v);
}

template <class I, int M, int TEAM = 1>
static __device__ __forceinline__ void attend_some(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, typename I::shared &sh,
                                                   const at_hand &h, bool is_edge, bool any_values)
{
    prefill_scores<I, M> s;
    uint32_t seen = weigh_keys<I, M, TEAM>(s, st, a, sh, h, is_edge, any_values);
    add_values<I, M, TEAM>(s, st, a, sh, h, any_values, seen);
}

/* Past the last key that a row of the warp sees. */
template <class I, int M>
static __device__ __forceinline__ int32_t warp_end(typename I::shared &sh, int row0)
{
    return __reduce_max_sync(ALL_LANES, sh.rows[row0 + fresh_lane() % (M * 16)].seen.end);
}

/* Steps of keys in which a warp leaves out the end of an edge tile: the smallest that spills nothing. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define EDGE_STEP 64
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EDGE_STEP 16
#else
#define EDGE_STEP 32
#endif

/* Do some rows of the block not see all of a key tile? */
template <class I>
static __device__ __forceinline__ bool is_edge_tile(const prefill_work &w, int32_t tile)
{
    return tile * I::KEYS < w.all_begin || (tile + 1) * I::KEYS > w.all_end;
}

/* f of an instance that computes so many keys of a tile: the warp leaves out the others. */
template <class I, typename F> static __device__ __forceinline__ void with_keys(int32_t keys, F f)
{
    constexpr int STEP = I::KV != KV_WIDE ? 32 : EDGE_STEP;
    if (keys <= 0) return;
    if (keys <= 16 && STEP <= 16) f(short_tile<I, 16>());
    else if (keys <= 32 && I::KEYS > 32 && STEP <= 32) f(short_tile<I, 32>());
    else if (keys <= 48 && I::KEYS > 48 && STEP <= 16) f(short_tile<I, 48>());
    else f(I());
}

/* One key tile, K and V of which are there. Not by with_keys: that spills at head size 128. */
template <class I, int M, int TEAM>
static __device__ __forceinline__ void attend_keys(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, const at_hand &h,
                                                   bool any_values)
{
    int32_t first = tile_of<I>(h, sh) * I::KEYS, keys = I::KEYS;
    bool is_edge = first < w.all_begin || first + I::KEYS > w.all_end;
    if constexpr (TEAM > 1) {
        attend_some<short_tile<I, I::KEYS / TEAM>, M, TEAM>(st, a, sh, h, is_edge, false);
    } else if constexpr (I::F32) {
        if (any_values || warp_end<I, M>(sh, row_of<I>(h, sh)) > first)
            attend_some<I, M>(st, a, sh, h, is_edge, any_values);
    } else if constexpr (I::FIXED) {
        if (is_edge && !any_values) keys = warp_end<I, M>(sh, row_of<I>(h, sh)) - first;
        constexpr int STEP = I::KV != KV_WIDE ? 32 : EDGE_STEP;
        if (keys <= 0) return;
        else if (keys <= 16 && STEP <= 16)
            attend_some<short_tile<I, 16>, M>(st, a, sh, h, true, false);
        else if (keys <= 32 && I::KEYS > 32 && STEP <= 32)
            attend_some<short_tile<I, 32>, M>(st, a, sh, h, true, false);
        else if (keys <= 48 && I::KEYS > 48 && STEP <= 16)
            attend_some<short_tile<I, 48>, M>(st, a, sh, h, true, false);
        else attend_some<I, M>(st, a, sh, h, is_edge, any_values);
    } else attend_some<I, M>(st, a, sh, h, is_edge, any_values);
}

/* ---- all key tiles ---- */

/* What the block does after this, asked for while the first keys are on their way: its own number's work was the first. */
template <class I>
static __device__ __forceinline__ void ask_next(const prefill_args &a, typename I::shared &sh)
{
    int32_t blocks = (int32_t)gridDim.x;
    if (fresh_thread() == 0)
        sh.next = sh.total <= blocks ? sh.total : blocks + atomicAdd(a.counters, 1);
}

/* All key tiles, the next one on its way while this one is computed. */
template <class I, int M, int TEAM>
static __device__ __forceinline__ void attend_staged(prefill_state<I::DV, M> &st,
                                                     const prefill_args &a, const prefill_work &w,
                                                     typename I::shared &sh, int row0,
                                                     bool any_values)
{
    int32_t tile = w.begin / I::KEYS;
    bool is_direct = I::FIXED || a.is_direct;
    int32_t block = find_block<I>(a, w, sh.seq, tile);
    any_row mine;
    if (!any_values) { /* while the block's number is on its way */
        fetch_q<I>(a, w, sh);
        describe_rows<I>(a, w, sh);
    }
    if (!I::ONCE) ask_block<I>(a, w, sh, tile + 1);
    if (is_direct) fetch_tile<I>(a, w, sh, tile % 2, tile, block);
    else mine = fetch_raw<I>(a, w, sh, tile, block);
    if (I::ONCE) block = find_block<I>(a, w, sh.seq, tile + 1);
    else if (!any_values) ask_next<I>(a, sh);
    for (; tile * I::KEYS < w.end; tile = tile_of<I>({tile, row0}, sh) + 1) {
        if (!I::ONCE) sh.tile[fresh_thread()] = tile;
        cp_async_wait<0>();
        if (is_direct) transpose_tile<I>(a, sh, tile % 2, tile);
        __syncthreads();
        if (!is_direct) widen_tile<I>(a, w, sh, mine);
        if ((tile + 1) * I::KEYS < w.end) {
            if (!I::ONCE) {
                block = asked_block<I>(a, w, sh, tile + 1);
                ask_block<I>(a, w, sh, tile + 2);
            }
            if (is_direct) fetch_tile<I>(a, w, sh, (tile + 1) % 2, tile + 1, block);
            else mine = fetch_raw<I>(a, w, sh, tile + 1, block);
            if (I::ONCE) block = find_block<I>(a, w, sh.seq, tile + 2);
        }
        if (!is_direct) __syncthreads();
        attend_keys<I, M, TEAM>(st, a, w, sh, {tile, row0}, any_values);
    }
}

/*
 * One key tile whose V is on its way: await_values returns when it is there. All warps call it at the same place, whatever
 * they compute of a tile at the edge: a barrier in branches that warps take apart is none.
 */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_split_keys(prefill_state<I::DV, M> &st,
                                                         const prefill_args &a,
                                                         const prefill_work &w,
                                                         typename I::shared &sh, const at_hand &h,
                                                         bool any_values, F await_values)
{
    static_assert(M == 1, "scores of a tile's first keys come first");
    prefill_scores<I, M> s;
    bool is_edge = is_edge_tile<I>(w, tile_of<I>(h, sh));
    if (!is_edge || any_values) {
        uint32_t seen = weigh_keys<I, M>(s, st, a, sh, h, is_edge, any_values);
        await_values();
        add_values<I, M>(s, st, a, sh, h, any_values, seen);
        return;
    }
    int32_t keys = warp_end<I, M>(sh, row_of<I>(h, sh)) - tile_of<I>(h, sh) * I::KEYS;
    with_keys<I>(keys, [&](auto some) {
        using P = decltype(some);
        weigh_keys<P, M>(*(prefill_scores<P, M> *)s, st, a, sh, h, true, false);
    });
    await_values();
    with_keys<I>(keys, [&](auto some) {
        using P = decltype(some);
        add_values<P, M>(*(prefill_scores<P, M> *)s, st, a, sh, h, false, 0);
    });
}

/* The same in one stage: V comes while K is used, and K while V is. */
template <class I, int M>
static __device__ __forceinline__ void attend_split(prefill_state<I::DV, M> &st,
                                                    const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int row0,
                                                    bool any_values)
{
    int32_t tile = w.begin / I::KEYS, past = (w.end + I::KEYS - 1) / I::KEYS;
    int32_t block = find_block<I>(a, w, sh.seq, tile);
    if (!any_values) {
        fetch_q<I>(a, w, sh);
        describe_rows<I>(a, w, sh);
    }
    uint64_t address = row_address<I>(a, w, sh.seq, tile, block);
    fetch_keys<I>(a, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile));
    cp_async_commit();
    block = find_block<I>(a, w, sh.seq, tile + 1);
    if (!I::ONCE && !any_values) ask_next<I>(a, sh);
    for (; tile < past; tile++) {
        if (!I::ONCE) sh.tile[fresh_thread()] = tile;
        cp_async_wait<0>();
        __syncthreads();
        fetch_values<I>(a, w, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile));
        cp_async_commit();
        address = row_address<I>(a, w, sh.seq, tile + 1, block);
        block = find_block<I>(a, w, sh.seq, tile + 2);
        attend_split_keys<I, M>(st, a, w, sh, {tile, row0}, any_values, [&] {
            cp_async_wait<0>();
            __syncthreads();
            /* zeros after the last tile */
            fetch_keys<I>(a, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile + 1));
            cp_async_commit();
        });
    }
    cp_async_wait<0>();
}

/* All key tiles, from nothing summed yet. */
template <class I, int M, int TEAM>
static __device__ __forceinline__ void attend_range(prefill_state<I::DV, M> &st,
                                                    const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int row0,
                                                    bool any_values)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) st.largest[m][r] = -CUDART_INF_F, st.sum[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) st.out[m][n][i] = 0.0f;
    }
    st.value_log2 = -126;
    park<I, M>(st, sh);
    if (w.begin >= w.end) {
        if (!I::ONCE && !any_values) ask_next<I>(a, sh);
        return;
    }
    if constexpr (I::SPLIT) attend_split<I, M>(st, a, w, sh, row0, any_values);
    else attend_staged<I, M, TEAM>(st, a, w, sh, row0, any_values);
    unpark<I, M>(st, sh);
}

/* What a team's warps have of their rows, by way of K and V, goes to its first: each lane has the same numbers of them. */
template <class I, int M, int TEAM>
static __device__ __forceinline__ void join_team(prefill_state<I::DV, M> &st, const prefill_args &a,
                                                 typename I::shared &sh)
{
    constexpr int QUADS = M * I::DV / 8; /* of a lane */
    static_assert(I::WARPS * QUADS * 32 * 16 <= sizeof sh.kv && I::PARKS, "room for all warps");
    float4 *out = (float4 *)sh.kv + fresh_warp() * QUADS * 32 + fresh_lane();
    if (fresh_warp() % TEAM != 0) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float *x = st.out[i / (I::DV / 8)][i % (I::DV / 8)];
            out[i * 32] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    __syncthreads();
    if (fresh_warp() % TEAM != 0) return;
#pragma unroll 1
    for (int mate = 1; mate < TEAM; mate++) {
        out += QUADS * 32;
        float before[M][2], by[M][2];
#pragma unroll
        for (int i = 0; i < M * 2; i++) {
            int m = i / 2, r = i % 2, thread = fresh_thread() + mate * 32;
            float largest = sh.parked[i * 2][thread], top = fmaxf(st.largest[m][r], largest);
            float unit = LOG2E * score_unit<I>(a, sh, 0), base = softmax_base(top);
            before[m][r] = exp2_approx((st.largest[m][r] - base) * unit);
            by[m][r] = exp2_approx((largest - base) * unit);
            st.sum[m][r] = st.sum[m][r] * before[m][r] + sh.parked[i * 2 + 1][thread] * by[m][r];
            st.largest[m][r] = top;
        }
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            int m = i / (I::DV / 8);
            float *x = st.out[m][i % (I::DV / 8)];
            float4 y = out[i * 32];
            x[0] = x[0] * before[m][0] + y.x * by[m][0];
            x[1] = x[1] * before[m][0] + y.y * by[m][0];
            x[2] = x[2] * before[m][1] + y.z * by[m][1];
            x[3] = x[3] * before[m][1] + y.w * by[m][1];
        }
    }
}

/* M row tiles from row0 on; false: nothing is stored, NaN has been met. */
template <class I, int M, int TEAM>
static __device__ __forceinline__ bool attend_rows(const prefill_args &a, typename I::shared &sh,
                                                   int row0, bool any_values)
{
    prefill_state<I::DV, M> st;
    if (!I::ONCE && fresh_lane() == 0) sh.first_row[fresh_warp()] = row0;
    if (!I::ONCE) __syncwarp();
    attend_range<I, M, TEAM>(st, a, sh.work, sh, row0, any_values);
    if (__syncthreads_or(!any_values && has_nan(st))) return false;
    if constexpr (TEAM > 1) {
        join_team<I, M, TEAM>(st, a, sh);
        if (fresh_warp() % TEAM != 0) return true;
    }
    row0 = row_of<I>({0, row0}, sh);
    finish_rows<I, M>(st, a, sh.work, sh, row0);
    if (!I::ONCE && sh.work.num_parts > 1) store_part<I, M>(st, a, sh.work, row0);
    else store_rows<I, M>(st, a, sh.work, sh, row0);
    return true;
}

/* ---- the kernel ---- */

/* What a unit of an item is: some of its queries and heads, and some of V's dims. */
template <class I>
static __device__ __forceinline__ prefill_work work_of(const prefill_args &a,
                                                       const folioi_prefill_item &item,
                                                       int32_t unit, const folioi_cuda_seq &s)
{
    const folioi_cuda_layer &l = a.layer;
    prefill_work w;
    int32_t slice = divide(unit, l.num_kv_heads), whole_slice = divide(slice, a.head_slices);
    int32_t piece = divide(whole_slice, a.value_slices),
            value_slice = whole_slice - piece * a.value_slices;
    int32_t head_slice = slice - whole_slice * a.head_slices;
    w.seq = item.seq;
    w.first_query = item.first_query + piece * a.queries;
    w.past_query = min(w.first_query + a.queries, item.first_query + item.num_queries);
    w.kv_head = unit - slice * l.num_kv_heads;
    w.first_head = w.kv_head * a.heads_per_kv + head_slice * a.heads;
    w.num_heads = min(a.heads, a.heads_per_kv - head_slice * a.heads);
    w.first_value = I::FIXED ? 0 : value_slice * I::DV;
    w.unit = unit;
    w.part = item.part;
    w.num_parts = item.num_parts;
    w.store = item.store;
    w.counter = item.counter;
    w.tile_query = item.first_query;
    w.tile_rows = item.num_queries * a.heads_per_kv;
    folioi_range of_first = seq_keys(&s, l.window_left, l.window_right, w.first_query);
    folioi_range of_last = seq_keys(&s, l.window_left, l.window_right, w.past_query - 1);
    w.begin = max(of_first.begin, item.begin);
    w.end = min(of_last.end, item.end);
    w.all_begin = max(of_last.begin, item.begin);
    w.all_end = min(of_first.end, item.end);
    return w;
}

/*
 * The item of unit of work n, and which of its units. Large heads are taken a few at a time, so that K and V stay in L2 for
 * the items that share them, but enough of them that their longest items do not end last and alone.
 */
template <class I>
static __device__ __forceinline__ int32_t find_item(const prefill_args &a, int32_t num_items,
                                                    int32_t n, int32_t *unit)
{
    int32_t at_once = a.units, first = 0;
    if constexpr (I::DK > 128) {
        for (int i = 0; i < 3; i++)
            if (4 >> i < at_once && a.enough >> (2 - i) <= num_items) at_once = 4 >> i;
        first = n / (num_items * at_once) * at_once;
    }
    int32_t in_round = n - num_items * first;
    at_once = min(at_once, a.units - first);
    int32_t at = divide(in_round, at_once);
    *unit = first + in_round - at * at_once;
    return at;
}

/* A block's only work, to shared memory. */
template <class I>
static __device__ __forceinline__ void load_work(const prefill_args &a, typename I::shared &sh,
                                                 int32_t n, int32_t num_items)
{
    if (threadIdx.x == 0) {
        int32_t unit;
        const folioi_prefill_item &item = a.items[find_item<I>(a, num_items, n, &unit)];
        sh.seq = item.sequence;
        sh.work = work_of<I>(a, item, unit, sh.seq);
    }
    __syncthreads();
}

/* What the block does next, to shared memory; false: nothing. Items are loaded before their count is known: memory answers late. */
template <class I>
static __device__ __forceinline__ bool take_work(const prefill_args &a, typename I::shared &sh)
{
    __syncthreads();
    if (fresh_thread() == 0) {
        int32_t n = sh.number = sh.next, blocks = (int32_t)gridDim.x, unit;
        int32_t num_items = __ldg(&a.head->num_items), total = num_items * a.units;
        if (I::DK <= 128 || n < total) {
            int32_t at = find_item<I>(a, num_items, n, &unit);
            const folioi_prefill_item &item = a.items[I::DK <= 128 ? min(at, a.room - 1) : at];
            sh.seq = item.sequence;
            sh.work = work_of<I>(a, item, unit, sh.seq);
        }
        sh.total = total;
        if (n >= total && total > blocks && add_in_order(a.counters + 1, 1) == blocks - 1)
            a.counters[0] = a.counters[1] = 0; /* the last block to go */
    }
    __syncthreads();
    return sh.number < sh.total;
}

/*
 * The first row of the warp. Later rows of a causal tile see more keys, and a multiprocessor gives warp w to its quarter w % 4:
 * every quarter gets early rows and late ones.
 */
template <class I> static __device__ __forceinline__ int first_row(typename I::shared &sh)
{
    int warp = fresh_warp();
    int32_t number = I::ONCE ? (int32_t)blockIdx.x : sh.number;
    bool is_reversed = I::WARPS > 4 ? warp / 4 % 2 : __popc(number) % 2;
    return (is_reversed ? (I::WARPS > 4 ? warp / 4 * 4 + 3 - warp % 4 : I::WARPS - 1 - warp)
                        : warp) *
           I::WARP_ROWS;
}

/* All rows of the block; false: NaN has been met. Where they are few, warps share them, and keys are shared out. */
template <class I>
static __device__ __forceinline__ bool attend_all(const prefill_args &a, typename I::shared &sh)
{
    if constexpr (I::TEAMS) {
        int32_t rows = (sh.work.past_query - sh.work.first_query) * a.heads;
        if (rows <= I::ROWS / 4) return attend_rows<I, I::M_TILES, 4>(a, sh, 0, false);
        if (rows <= I::ROWS / 2)
            return attend_rows<I, I::M_TILES, 2>(a, sh, fresh_warp() / 2 * I::WARP_ROWS, false);
    }
    return attend_rows<I, I::M_TILES, 1>(a, sh, first_row<I>(sh), false);
}

/* A NaN may have come from a key that its row does not see: then again, slowly. */
template <class I>
static __device__ __forceinline__ void attend_work(const prefill_args &a, typename I::shared &sh)
{
    if constexpr (!I::FIXED) {
        for (int any_values = 0; !attend_rows<I, 1, 1>(a, sh, first_row<I>(sh), any_values);
             any_values = 1)
            continue;
    } else {
        if (attend_all<I>(a, sh)) return;
        for (int m = 0; m < I::M_TILES; m++)
            attend_rows<I, 1, 1>(a, sh, first_row<I>(sh) + m * 16, true);
    }
}

/* Three blocks take no spills on sm_90; on other ones they do. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 != 9
#define PREFILL_BLOCKS(I) (I::BLOCKS < 2 ? I::BLOCKS : 2)
#else
#define PREFILL_BLOCKS(I) I::BLOCKS
#endif

template <class I>
static __global__ void __launch_bounds__(I::THREADS, PREFILL_BLOCKS(I))
    prefill_kernel(const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(128) char memory[];
    typename I::shared &sh = *(typename I::shared *)memory;
    if constexpr (I::ONCE) {
#if !defined(__CUDA_ARCH__) || PREFILL_HAS_ONCE(__CUDA_ARCH__ / 10)
        load_work<I>(a, sh, (int32_t)blockIdx.x, __ldg(&a.head->num_items));
        if (sh.work.first_query < sh.work.past_query) attend_work<I>(a, sh);
#endif
    } else {
        if (fresh_thread() == 0) sh.next = (int32_t)blockIdx.x;
        while (take_work<I>(a, sh)) {
            if (sh.work.first_query >= sh.work.past_query) { /* the tile ends before this piece */
                ask_next<I>(a, sh);
                continue;
            }
            attend_work<I>(a, sh);
            if (sh.work.num_parts > 1) end_part<I>(a, sh);
        }
    }
}

#endif
