/*
 * prefill_fetch.h: K and V of a key tile on their way to a stage: read where they lie, page by page. A warp fetches SHARE
 * keys, a lane knowing the address of one row: its first lanes that of K, the next that of V. What lies by dims is transposed when
 * it has come, by the warp that fetched it (transpose.h).
 */
#ifndef FOLIOI_CUDA_PREFILL_FETCH_H
#define FOLIOI_CUDA_PREFILL_FETCH_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_copy.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/transpose.h"

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

/* May K, or V, of a stored key lie by dims? */
template <class I> static __device__ __forceinline__ bool by_dims(const prefill_args &a, bool is_v)
{
    if (I::FIXED && !I::XPACKED) return false;
    return is_v ? I::XPACKED || a.xpacked : a.k_by_dims;
}

/* Past the last key that is stored. */
static __device__ __forceinline__ int32_t stored_end(const folioi_cuda_layer &l,
                                                     const folioi_cuda_seq &s)
{
    return !l.cached ? 0 : l.append ? s.context_len : INT32_MAX;
}

/* Is a row read from the cache? */
static __device__ __forceinline__ bool reads_row(const prefill_args &a, const prefill_work &w,
                                                 const folioi_cuda_seq &s, int32_t key)
{
    return key >= w.begin && key < w.end && is_stored(a.layer, s, key);
}

/* The same of one of the 8 keys of a unit, which are all in one block. */
static __device__ __forceinline__ bool reads_unit(const prefill_args &a, const prefill_work &w,
                                                  const folioi_cuda_seq &s, int32_t key)
{
    int32_t first = key & ~7, past = min(stored_end(a.layer, s), w.end);
    return first < past && min(first + 8, past) > w.begin;
}

/* Does this lane read from the cache for its key? */
template <class I>
static __device__ __forceinline__ bool reads_block(const prefill_args &a, const prefill_work &w,
                                                   const folioi_cuda_seq &s, int32_t key)
{
    return by_dims<I>(a, fresh_lane() >= I::SHARE) ? reads_unit(a, w, s, key)
                                                   : reads_row(a, w, s, key);
}

/* Its block; -1: none is read. */
template <class I>
static __device__ __forceinline__ int32_t find_block(const prefill_args &a, const prefill_work &w,
                                                     const folioi_cuda_seq &s, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    if (!reads_block<I>(a, w, s, key)) return -1;
    return __ldg(a.step.blocks + s.table + divide(key, a.layer.block_size));
}

/* The same in two steps, by way of shared memory: asked for with other copies, and read when those have come. */
template <class I>
static __device__ __forceinline__ void ask_block(const prefill_args &a, const prefill_work &w,
                                                 typename I::shared &sh, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    if (reads_block<I>(a, w, sh.seq, key))
        cp_async<4>(shared_address(sh.blocks + fresh_thread()),
                    a.step.blocks + sh.seq.table + divide(key, a.layer.block_size));
}

template <class I>
static __device__ __forceinline__ int32_t asked_block(const prefill_args &a, const prefill_work &w,
                                                      typename I::shared &sh, int32_t tile)
{
    int32_t key = lane_key<I>(tile);
    return reads_block<I>(a, w, sh.seq, key) ? sh.blocks[fresh_thread()] : -1;
}

static __device__ __forceinline__ int64_t stored_index(const prefill_args &a, const prefill_work &w,
                                                       const folioi_address &at, int32_t key,
                                                       int32_t block)
{
    int32_t size = a.layer.block_size, in_block = key - divide(key, size) * size;
    return stored_row(at, block, w.kv_head, in_block);
}

/* Where the lane's row is, with its low bits, in numbers as the instance has them. Rows that are new are of q's type. */
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
    if (block >= 0 && by_dims<I>(a, is_v)) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        int64_t at = stored_index(a, w, side.at, key & ~7, block);
        if (!I::FIXED && is_v) at += w.first_value * side.at.dim_tile_stride;
        return (uint64_t)(side.base + at * I::KV_SIZE) | ROW_BY_DIMS;
    } else if (block >= 0) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        from = side.base + stored_index(a, w, side.at, key, block) * I::KV_SIZE;
        bits = has_pages(side.at) ? ROW_PAGED : 0;
        if ((!I::FIXED || I::XPACKED) && a.xpacked) bits = ROW_PACKED;
    } else if (I::KV == KV_WIDE && key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        from = (const char *)rows.data +
               row_index(rows, s.new_row + key - s.context_len, w.kv_head) * I::KV_SIZE;
        bits = 0;
    }
    if (!I::FIXED && is_v) from += row_byte(bits == ROW_PAGED, 0, w.first_value * 2);
    return (uint64_t)from | bits;
}

/* Has the warp so many keys of a tile that copy_pages takes them? */
template <class I> constexpr bool COPIES_PAGES = I::SHARE % 4 == 0 && I::K_ROW <= 512;

/* Are the warp's keys of a tile all read from the cache, and 8 at a time from one block? */
template <class I>
static __device__ __forceinline__ bool in_pages(const prefill_args &a, const prefill_work &w,
                                                const folioi_cuda_seq &s, int32_t tile)
{
    int32_t first = tile * I::KEYS + fresh_warp() * I::SHARE, past = first + I::SHARE;
    return I::FIXED && !I::XPACKED && COPIES_PAGES<I> && a.layer.block_size % 8 == 0 &&
           first >= w.begin && past <= w.end && is_stored(a.layer, s, past - 1);
}

/* Units of the warp's keys that lie by dims: lane first + 8 * i has the address of those of dim 0. */
template <class I, int ROW_BYTES>
static __device__ __forceinline__ void fetch_units(uint32_t to, uint64_t address, int first,
                                                   int32_t dims, int64_t step)
{
    constexpr int BANDS = I::SHARE < 8 ? 1 : I::SHARE / 8; /* of fewer keys there are no units */
    int row0 = fresh_warp() * I::SHARE;
    uint64_t from = __shfl_sync(ALL_LANES, address, first + fresh_lane() % BANDS * 8);
    auto place = [=](int row, int chunk) { return to + chunk_at<ROW_BYTES>(row0 + row, chunk); };
    if (from & ROW_BY_DIMS)
        copy_units<I::KV_SIZE, BANDS>(place, from & ~7ull, dims, step * I::KV_SIZE, NULL);
}

/* The warp's K, and its V, on their way to a stage. */
template <class I>
static __device__ __forceinline__ void fetch_keys(const prefill_args &a, char *stage,
                                                  uint64_t address, bool is_paged)
{
    constexpr bool MIXED = !I::FIXED || I::XPACKED;
    uint32_t to = shared_address(stage);
    int row0 = fresh_warp() * I::SHARE;
    if (by_dims<I>(a, false))
        fetch_units<I, I::K_ROW>(to, address, 0, I::FIXED ? I::DK : a.layer.k_dims,
                                 a.layer.k.at.dim_tile_stride);
    if constexpr (COPIES_PAGES<I>) {
        if (is_paged && !has_pages(a.layer.k.at)) {
            copy_pages<I::SHARE, I::K_ROW>(to, row0, address, 0,
                                           a.layer.k.at.token_tile_stride * I::KV_SIZE);
            return;
        }
    }
    copy_rows<I::SHARE, I::K_ROW, MIXED>(to, row0, address, 0,
                                         I::FIXED ? I::K_ROW : a.layer.k_dims * 2, a.k_step);
}

template <class I>
static __device__ __forceinline__ void fetch_values(const prefill_args &a, const prefill_work &w,
                                                    char *stage, uint64_t address, bool is_paged)
{
    constexpr bool MIXED = !I::FIXED || I::XPACKED;
    uint32_t to = shared_address(stage) + I::K_BYTES;
    int row0 = fresh_warp() * I::SHARE;
    if (by_dims<I>(a, true))
        fetch_units<I, I::V_ROW>(to, address, I::SHARE,
                                 I::FIXED ? I::DV : min(I::DV, a.layer.v_dims - w.first_value),
                                 a.layer.v.at.dim_tile_stride);
    if constexpr (COPIES_PAGES<I>) {
        if (is_paged && !has_pages(a.layer.v.at)) {
            copy_pages<I::SHARE, I::V_ROW>(to, row0, address, I::SHARE,
                                           a.layer.v.at.token_tile_stride * I::KV_SIZE);
            return;
        }
    }
    copy_rows<I::SHARE, I::V_ROW, MIXED>(
        to, row0, address, I::SHARE, I::FIXED ? I::V_ROW : (a.layer.v_dims - w.first_value) * 2);
}

/* New rows of the unit whose first keys are stored, if the warp has it; at most 7. */
template <class I, int ROW_BYTES>
static __device__ __noinline__ void fill_unit(const prefill_args &a, typename I::shared &sh,
                                              uint32_t to, int32_t key0, bool is_v)
{
    const prefill_work &w = sh.work;
    const folioi_cuda_rows &rows = is_v ? a.layer.new_v : a.layer.new_k;
    int32_t skip = is_v ? w.first_value : 0, dims = (is_v ? a.layer.v_dims : a.layer.k_dims) - skip;
    int32_t key = sh.seq.context_len, past = min((key | 7) + 1, w.end);
    if ((key - key0) / I::SHARE != fresh_warp() || !reads_unit(a, w, sh.seq, key)) return;
    __syncwarp();
    for (key = max(key, w.begin); key < past; key++) {
        int64_t new_row = sh.seq.new_row + key - sh.seq.context_len;
        const uint4 *from = (const uint4 *)((const uint16_t *)rows.data +
                                            row_index(rows, new_row, w.kv_head) + skip);
        for (int chunk = fresh_lane(); chunk < ROW_BYTES / 16; chunk += 32)
            store_shared(to + chunk_at<ROW_BYTES>(key - key0, chunk),
                         chunk * 8 < dims ? from[chunk] : make_uint4(0, 0, 0, 0));
    }
}

/* The warp's units of K, or of V, become rows. key0: first of the tile. */
template <class I, int ROW_BYTES>
static __device__ __forceinline__ void transpose_side(const prefill_args &a, typename I::shared &sh,
                                                      uint32_t to, int32_t key0, bool is_v,
                                                      int32_t dims)
{
    const prefill_work &w = sh.work;
    int row0 = fresh_warp() * I::SHARE;
    auto place = [=](int row, int chunk) { return to + chunk_at<ROW_BYTES>(row0 + row, chunk); };
    int32_t first = key0 + row0, past = min(w.end, stored_end(a.layer, sh.seq));
#pragma unroll 1
    for (int band = 0; band < I::SHARE / 8; band++)
        if (reads_unit(a, w, sh.seq, first + band * 8))
            transpose_units<I::KV_SIZE>(place, band, ROW_BYTES / 16, dims, w.begin - first,
                                        past - first);
    if (I::KV == KV_WIDE && past % 8 != 0 && past < w.end && past >= key0)
        fill_unit<I, ROW_BYTES>(a, sh, to, key0, is_v);
}

/* The warp's share of a tile that has come, in rows. A barrier follows. */
template <class I>
static __device__ __forceinline__ void transpose_tile(const prefill_args &a, typename I::shared &sh,
                                                      int stage, int32_t tile)
{
    if (!by_dims<I>(a, true)) return;
    uint32_t to = shared_address(sh.kv[stage]);
    __syncwarp();
    transpose_side<I, I::V_ROW>(a, sh, to + I::K_BYTES, tile * I::KEYS, true,
                                I::FIXED ? I::DV : a.layer.v_dims - sh.work.first_value);
    if (by_dims<I>(a, false))
        transpose_side<I, I::K_ROW>(a, sh, to, tile * I::KEYS, false,
                                    I::FIXED ? I::DK : a.layer.k_dims);
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
    bool is_read = block >= 0 && (!I::XPACKED || (key >= w.begin && key < w.end));
    if (is_read) from += stored_index(a, w, side.scales_at, key, block);
    cp_async<4>(shared_address(scales + (lane >= I::SHARE) * I::KEYS + key - tile * I::KEYS), from,
                is_read ? 4 : 0);
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
