/*
 * prefill_kernel.h: attention of many query rows. A block of threads computes one tile: some queries of one sequence times
 * the query heads of one kv head, as rows side by side, so that each tile of K and V is read once for all of them, the next
 * one being on its way while one is computed. Key tiles lie at multiples of KEYS: a row's bits depend on neither the tile it
 * is in nor the batch.
 */
#ifndef FOLIOI_CUDA_PREFILL_KERNEL_H
#define FOLIOI_CUDA_PREFILL_KERNEL_H

#include "backends/cuda/prefill_fetch.h"
#include "backends/cuda/prefill_finish.h"
#include "backends/cuda/prefill_instance.h"
#include "backends/cuda/prefill_query.h"
#include "backends/cuda/prefill_scores.h"
#include "backends/cuda/prefill_softmax.h"
#include "backends/cuda/prefill_specials.h"
#include "backends/cuda/prefill_values.h"
#include "backends/cuda/prefill_widen.h"
#include "backends/cuda/warp.h"

/* ---- one key tile ---- */

/* The first I::KEYS keys of a tile; V may be on its way: await_values() returns when it is there. */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_part(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, typename I::shared &sh,
                                                   int stage, int32_t first_key, int row0,
                                                   bool is_edge, bool any_values, F await_values)
{
    uint32_t k = shared_address(sh.kv[stage]);
    const float *k_scales = sh.scales[stage], *v_scales = k_scales + I::TILE_KEYS;
    prefill_scores<I, M> s;
    multiply_keys<I, M>(s, shared_address(sh.q), k, row0);
    if constexpr (I::KV == KV_INT8) scale_keys<I, M>(s, k_scales, 1.0f, false);
    if constexpr (!I::PLAIN) apply_options<I, M>(s, a, sh, first_key, row0);
    if (is_edge) mask<I, M>(s, sh, first_key, row0);
    uint32_t seen = 0;
    if (M == 1 && any_values) seen = seen_bits<I>(s[0]);
    unpark<I, M>(st, sh);
    soften<I, M>(s, st, a, sh, row0);
    park<I, M>(st, sh);
    await_values();
    if constexpr (I::KV == KV_INT8) scale_weights<I, M>(s, st, v_scales, any_values);
    if constexpr (M == 1) {
        if (any_values) {
            multiply_any_values<I>(st, s, seen, k + I::K_BYTES, v_scales);
            return;
        }
    }
    multiply_values<I, M>(st, s, k + I::K_BYTES);
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

/* One key tile. A warp leaves out what none of its rows sees at the tile's end. */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_keys(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int stage, int32_t tile,
                                                   int row0, bool any_values, F await_values)
{
    int32_t first = tile * I::KEYS, keys = I::KEYS;
    bool is_edge = first < w.all_begin || first + I::KEYS > w.all_end;
    if constexpr (I::PLAIN) {
        if (is_edge && !any_values) keys = warp_end<I, M>(sh, row0) - first;
        constexpr int STEP = I::KV != KV_WIDE ? 32 : EDGE_STEP;
        if (keys <= 0) await_values();
        else if (keys <= 16 && STEP <= 16)
            attend_part<part_tile<I, 16>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else if (keys <= 32 && I::KEYS > 32 && STEP <= 32)
            attend_part<part_tile<I, 32>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else if (keys <= 48 && I::KEYS > 48 && STEP <= 16)
            attend_part<part_tile<I, 48>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else attend_part<I, M>(st, a, sh, stage, first, row0, is_edge, any_values, await_values);
    } else attend_part<I, M>(st, a, sh, stage, first, row0, is_edge, any_values, await_values);
}

/* ---- all key tiles ---- */

/* All key tiles, the next one on its way while this one is computed. */
template <class I, int M>
static __device__ __forceinline__ void attend_staged(prefill_state<I::DV, M> &st,
                                                     const prefill_args &a, const prefill_work &w,
                                                     typename I::shared &sh, int row0,
                                                     bool any_values)
{
    int32_t tile = w.begin / I::KEYS, past = (w.end + I::KEYS - 1) / I::KEYS, stage = 0;
    bool is_direct = I::PLAIN || a.is_direct;
    int32_t block = find_block<I>(a, w, sh.seq, tile);
    any_row mine;
    if (!any_values) { /* while the block's number is on its way */
        fetch_q<I>(a, w, sh);
        describe_rows<I>(a, w, sh);
    }
    if (is_direct) fetch_tile<I>(a, w, sh, 0, tile, block);
    else mine = fetch_raw<I>(a, w, sh, tile, block);
    block = find_block<I>(a, w, sh.seq, tile + 1);
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (!is_direct) widen_tile<I>(a, w, sh, mine);
        if (tile + 1 < past) {
            if (is_direct) fetch_tile<I>(a, w, sh, stage ^ 1, tile + 1, block);
            else mine = fetch_raw<I>(a, w, sh, tile + 1, block);
            block = find_block<I>(a, w, sh.seq, tile + 2);
        }
        if (!is_direct) __syncthreads();
        attend_keys<I, M>(st, a, w, sh, stage, tile, row0, any_values, [] {});
        if (is_direct) stage ^= 1;
    }
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
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        fetch_values<I>(a, w, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile));
        cp_async_commit();
        address = row_address<I>(a, w, sh.seq, tile + 1, block);
        block = find_block<I>(a, w, sh.seq, tile + 2);
        attend_keys<I, M>(st, a, w, sh, 0, tile, row0, any_values, [&] {
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
template <class I, int M>
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
    if (w.begin >= w.end) return;
    park<I, M>(st, sh);
    if constexpr (I::SPLIT) attend_split<I, M>(st, a, w, sh, row0, any_values);
    else attend_staged<I, M>(st, a, w, sh, row0, any_values);
    unpark<I, M>(st, sh);
}

/* M row tiles from row0 on; false: nothing is stored, NaN has been met. */
template <class I, int M>
static __device__ __forceinline__ bool attend_rows(const prefill_args &a, typename I::shared &sh,
                                                   int row0, bool any_values)
{
    prefill_state<I::DV, M> st;
    attend_range<I, M>(st, a, sh.work, sh, row0, any_values);
    if (__syncthreads_or(!any_values && has_nan(st))) return false;
    finish_rows<I, M>(st, a, sh.work, sh, row0);
    store_rows<I, M>(st, a, sh.work, sh, row0);
    return true;
}

/* ---- the kernel ---- */

/* What a unit of a tile of the list is: some of its queries and heads, and some of V's dims. */
template <class I>
static __device__ __forceinline__ prefill_work work_of(const prefill_args &a,
                                                       const folioi_prefill_tile &tile,
                                                       int32_t unit, const folioi_cuda_seq &s)
{
    const folioi_cuda_layer &l = a.layer;
    prefill_work w;
    int32_t part = divide(unit, l.num_kv_heads), whole_part = divide(part, a.head_parts);
    int32_t piece = divide(whole_part, a.value_parts),
            value_part = whole_part - piece * a.value_parts;
    int32_t head_part = part - whole_part * a.head_parts;
    w.seq = tile.seq;
    w.first_query = tile.first_query + piece * a.queries;
    w.past_query =
        min(min(w.first_query + a.queries, tile.first_query + a.tile_queries), s.query_len);
    w.kv_head = unit - part * l.num_kv_heads;
    w.first_head = w.kv_head * a.group + head_part * a.heads;
    w.num_heads = min(a.heads, a.group - head_part * a.heads);
    w.first_value = I::PLAIN ? 0 : value_part * I::DV;
    folioi_range of_first = seq_keys(&s, l.window_left, l.window_right, w.first_query);
    folioi_range of_last = seq_keys(&s, l.window_left, l.window_right, w.past_query - 1);
    w.begin = of_first.begin;
    w.end = of_last.end;
    w.all_begin = of_last.begin;
    w.all_end = of_first.end;
    return w;
}

/*
 * The block's place in the list, and its unit: kv head and parts. Large heads are taken a few at a time, so that K and V stay
 * in L2 for the tiles that share them, but enough of them that their longest tiles do not end last and alone.
 */
template <class I>
static __device__ __forceinline__ int32_t find_tile(const prefill_args &a, int32_t *unit)
{
    int32_t units = a.layer.num_kv_heads * a.head_parts * a.value_parts * a.pieces;
    int32_t at_once = units, first = 0;
    if constexpr (I::DK > 128) {
        bool is_enough[3]; /* asked together: memory answers late */
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int32_t last = (a.enough >> (2 - i)) - 1;
            is_enough[i] = last < a.capacity && __ldg(&a.tiles[last].seq) >= 0;
        }
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (4 >> i < at_once && is_enough[i]) at_once = 4 >> i;
        first = (int32_t)blockIdx.x / (a.capacity * at_once) * at_once;
    }
    int32_t in_round = (int32_t)blockIdx.x - a.capacity * first;
    at_once = min(at_once, units - first);
    int32_t at = divide(in_round, at_once);
    *unit = first + in_round - at * at_once;
    return at;
}

/*
 * The first row of the warp. Later rows of a causal tile see more keys, and a multiprocessor gives warp w to its quarter w % 4:
 * every quarter gets early rows and late ones.
 */
template <class I> static __device__ __forceinline__ int first_row(void)
{
    int warp = (int)threadIdx.x / 32;
    bool is_turned = I::WARPS > 4 ? warp / 4 % 2 : __popc(blockIdx.x) % 2;
    return (is_turned ? (I::WARPS > 4 ? warp / 4 * 4 + 3 - warp % 4 : I::WARPS - 1 - warp) : warp) *
           I::WARP_ROWS;
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
    int32_t unit;
    const folioi_prefill_tile &tile = a.tiles[find_tile<I>(a, &unit)];
    if (threadIdx.x == 0) sh.seq = tile.sequence;
    if (tile.seq < 0) return;
    if (threadIdx.x == 0) sh.work = work_of<I>(a, tile, unit, sh.seq);
    __syncthreads();
    if (sh.work.first_query >= sh.work.past_query) return; /* the sequence ends before this piece */
    int row0 = first_row<I>();
    /* a NaN may have come from a key that its row does not see: then again, slowly */
    if constexpr (!I::PLAIN) {
        for (int any_values = 0; !attend_rows<I, 1>(a, sh, row0, any_values); any_values = 1)
            continue;
    } else {
        if (attend_rows<I, I::M_TILES>(a, sh, row0, false)) return;
        for (int m = 0; m < I::M_TILES; m++) attend_rows<I, 1>(a, sh, row0 + m * 16, true);
    }
}

#endif
