/*
 * prefill_fetch.h: K and V of a key tile on their way to a stage: read where they lie, page by page. A warp fetches SHARE
 * keys, a lane knowing the address of one row: its first lanes that of K, the next that of V.
 */
#ifndef FOLIOI_CUDA_PREFILL_FETCH_H
#define FOLIOI_CUDA_PREFILL_FETCH_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_copy.h"
#include "backends/cuda/prefill/prefill_instance.h"

static __device__ __forceinline__ bool is_stored(const folioi_cuda_layer &l,
                                                 const folioi_cuda_seq &s, int32_t key)
{
    return l.cached && (!l.append || key < s.context_len);
}

/* The key whose K or V this lane fetches for a key tile. */
template <class I> static __device__ __forceinline__ int32_t lane_key(int32_t tile)
{
    int thread = fresh_thread();
    return tile * I::KEYS + (thread >> 5) * I::SHARE + (thread & 31) % I::SHARE;
}

/* Its block; -1: none is read. */
template <class I>
static __device__ __forceinline__ int32_t find_block(const prefill_args &a, const prefill_work &w,
                                                     const folioi_cuda_seq &s, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    if (key < w.begin || key >= w.end || !is_stored(a.layer, s, key)) return -1;
    return __ldg(a.step.blocks + s.table + divide(key, a.layer.block_size));
}

/* The same in two steps, by way of shared memory: asked for with other copies, and read when those have come. */
template <class I>
static __device__ __forceinline__ void ask_block(const prefill_args &a, const prefill_work &w,
                                                 typename I::shared &sh, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    if (key >= w.begin && key < w.end && is_stored(a.layer, sh.seq, key))
        cp_async<4>(shared_address(sh.blocks + fresh_thread()),
                    a.step.blocks + sh.seq.table + divide(key, a.layer.block_size));
}

template <class I>
static __device__ __forceinline__ int32_t asked_block(const prefill_args &a, const prefill_work &w,
                                                      typename I::shared &sh, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    bool is_there = key >= w.begin && key < w.end && is_stored(a.layer, sh.seq, key);
    return is_there ? sh.blocks[fresh_thread()] : -1;
}

static __device__ __forceinline__ int64_t stored_index(const prefill_args &a, const prefill_work &w,
                                                       const folioi_address &at, int32_t key,
                                                       int32_t block)
{
    int32_t size = a.layer.block_size, in_block = key - divide(key, size) * size;
    return stored_row(at, block, w.kv_head, in_block);
}

/* Where the lane's row is, with its low bits, in numbers as the instance has them. Rows that are new are of 16 bits. */
template <class I>
static __device__ __forceinline__ uint64_t row_address(const prefill_args &a, const prefill_work &w,
                                                       const folioi_cuda_seq &s, int32_t tile,
                                                       int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = fresh_lane() >= I::SHARE;
    const char *from = (const char *)l.q.data; /* aligned, and not read */
    int bits = ROW_ZERO;
    if (block >= 0) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        from = side.base + stored_index(a, w, side.at, key, block) * I::KV_SIZE;
        bits = has_pages(side.at) ? ROW_PAGED : 0;
    } else if (I::KV == KV_WIDE && key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        from = (const char *)rows.data +
               row_index(rows, s.new_row + key - s.context_len, w.kv_head) * 2;
        bits = 0;
    }
    if (!I::FIXED && is_v) from += row_byte(bits == ROW_PAGED, 0, w.first_value * 2);
    return (uint64_t)from | bits;
}

/* Are the warp's keys of a tile all read from the cache, and 8 at a time from one block? */
template <class I>
static __device__ __forceinline__ bool in_pages(const prefill_args &a, const prefill_work &w,
                                                const folioi_cuda_seq &s, int32_t tile)
{
    int32_t first = tile * I::KEYS + fresh_warp() * I::SHARE, past = first + I::SHARE;
    return I::FIXED && a.layer.block_size % 8 == 0 && first >= w.begin && past <= w.end &&
           is_stored(a.layer, s, past - 1);
}

/* The warp's K, and its V, on their way to a stage. */
template <class I>
static __device__ __forceinline__ void fetch_keys(const prefill_args &a, char *stage,
                                                  uint64_t address, bool is_paged)
{
    uint32_t to = shared_address(stage);
    int row0 = fresh_warp() * I::SHARE;
    if (is_paged && !has_pages(a.layer.k.at))
        copy_pages<I::SHARE, I::K_ROW>(to, row0, address, 0,
                                       a.layer.k.at.token_tile_stride * I::KV_SIZE);
    else
        copy_rows<I::SHARE, I::K_ROW>(to, row0, address, 0,
                                      I::FIXED ? I::K_ROW : a.layer.k_dims * 2);
}

template <class I>
static __device__ __forceinline__ void fetch_values(const prefill_args &a, const prefill_work &w,
                                                    char *stage, uint64_t address, bool is_paged)
{
    uint32_t to = shared_address(stage) + I::K_BYTES;
    int row0 = fresh_warp() * I::SHARE;
    if (is_paged && !has_pages(a.layer.v.at))
        copy_pages<I::SHARE, I::V_ROW>(to, row0, address, I::SHARE,
                                       a.layer.v.at.token_tile_stride * I::KV_SIZE);
    else
        copy_rows<I::SHARE, I::V_ROW>(to, row0, address, I::SHARE,
                                      I::FIXED ? I::V_ROW : (a.layer.v_dims - w.first_value) * 2);
}

/* The lane's scale; 0 where there is no key. */
template <class I>
static __device__ __forceinline__ void fetch_scale(const prefill_args &a, const prefill_work &w,
                                                   float *scales, int32_t tile, int32_t block)
{
    int32_t key = lane_key<I>(tile);
    int lane = threadIdx.x % 32;
    if (lane >= 2 * I::SHARE) return;
    const folioi_cuda_side &side = lane >= I::SHARE ? a.layer.v : a.layer.k;
    const float *from = side.scales;
    if (block >= 0) from += stored_index(a, w, side.scales_at, key, block);
    cp_async<4>(shared_address(scales + (lane >= I::SHARE) * I::KEYS + key - tile * I::KEYS), from,
                block >= 0 ? 4 : 0);
}

template <class I>
static __device__ __forceinline__ void fetch_tile(const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, int stage, int32_t tile,
                                                  int32_t block)
{
    uint64_t address = row_address<I>(a, w, sh.seq, tile, block);
    bool is_paged = in_pages<I>(a, w, sh.seq, tile);
    if constexpr (I::KV == KV_INT8) fetch_scale<I>(a, w, sh.scales[stage], tile, block);
    fetch_keys<I>(a, sh.kv[stage], address, is_paged);
    fetch_values<I>(a, w, sh.kv[stage], address, is_paged);
    cp_async_commit();
}

#endif
