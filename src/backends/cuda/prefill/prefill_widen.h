/*
 * prefill_widen.h: K and V of 8 bits, or not aligned, for the flexible instances: fetched as they are, and widened to 16 bits
 * when their tile is next. Instances of a known 8-bit type widen in registers: prefill_bytes.h.
 */
#ifndef FOLIOI_CUDA_PREFILL_WIDEN_H
#define FOLIOI_CUDA_PREFILL_WIDEN_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_copy.h"
#include "backends/cuda/prefill/prefill_fetch.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/transpose.h"
#include "backends/cuda/warp.h"
#include "core/dtype.h"

#include <cuda_fp8.h>

/* What a lane knows of its row. */
struct any_row {
    uint64_t from;
    float scale;
    int32_t
        kind; /* 0: zeros; 1: 16-bit numbers; 2: 8-bit ones, to be multiplied with scale; 3: 16-bit ones in a page */
};

template <class I>
static __device__ __forceinline__ any_row find_row(const prefill_args &a, const prefill_work &w,
                                                   const folioi_cuda_seq &s, int32_t tile,
                                                   int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = threadIdx.x % 32 >= I::SHARE, is_byte = !dtype_is_16_bit(l.kv_dtype);
    int32_t skip = is_v ? w.first_value : 0;
    any_row row = {0, 1.0f, 0};
    if (block >= 0 && reads_row(a, w, s, key)) { /* of a unit, other keys are read too */
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        int64_t at = stored_index(a, w, side.at, key, block);
        bool paged = has_pages(side.at);
        row.from =
            (uint64_t)(side.base + (is_byte ? at + skip : at * 2 + row_byte(paged, 0, skip * 2)));
        row.kind = is_byte ? 2 : paged ? 3 : 1;
        if (l.kv_dtype == FOLIO_INT8)
            row.scale = __ldg(side.scales + stored_index(a, w, side.scales_at, key, block));
        else if (is_byte && !(is_v && !l.append)) row.scale = folioi_cuda_scale(&side, w.kv_head);
    } else if (key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        int64_t at = row_index(rows, s.new_row + key - s.context_len, w.kv_head) + skip;
        row.from = (uint64_t)((const uint16_t *)rows.data + at);
        row.kind = 1;
    }
    return row;
}

/* ---- on their way ---- */

/* Where the warp's raw K lies: in the stage that widened tiles leave free. V follows it. */
template <class I> static __device__ __forceinline__ uint32_t raw_keys(typename I::shared &sh)
{
    return shared_address(sh.kv[1]) + threadIdx.x / 32 * I::SHARE * (I::DK + I::DV);
}

/* The 8-bit rows among a warp's on their way to `raw`: chunk i of 8 numbers at i * 8, for the same lane to widen. */
template <int ROWS, int D>
static __device__ __forceinline__ void fetch_bytes(uint32_t raw, const any_row &mine, int first,
                                                   int32_t dims, int32_t step)
{
    constexpr int CHUNKS = D / 8;
    for (int i = fresh_lane(); i < ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, mine.from, first + row);
        int32_t kind = __shfl_sync(ALL_LANES, mine.kind, first + row);
        if (kind == 2 && chunk * 8 < dims)
            cp_async<8>(raw + i * 8, (const uint8_t *)from + pack_byte(step, chunk * 8));
    }
}

/* The same by dims. */
template <class I, int D>
static __device__ __forceinline__ void fetch_byte_units(const prefill_args &a,
                                                        const prefill_work &w, uint32_t raw,
                                                        int32_t tile, int32_t block, bool is_v)
{
    constexpr int BANDS = I::SHARE < 8 ? 1 : I::SHARE / 8; /* of fewer keys there are no units */
    const folioi_cuda_side &side = is_v ? a.layer.v : a.layer.k;
    int32_t skip = is_v ? w.first_value : 0, dims = is_v ? a.layer.v_dims : a.layer.k_dims;
    uint64_t unit = 0;
    if (block >= 0)
        unit = (uint64_t)side.base + stored_index(a, w, side.at, lane_key<I>(tile) & ~7, block) +
               skip * side.at.dim_tile_stride;
    unit = __shfl_sync(ALL_LANES, unit, (is_v ? I::SHARE : 0) + fresh_lane() % BANDS * 8);
    auto place = [=](int row, int chunk) { return raw + row * D + chunk * 16; };
    if (unit != 0)
        copy_units<1, BANDS>(place, unit, min(D, dims - skip), side.at.dim_tile_stride, NULL);
}

/* What came by dims, in rows; those of no key that is read stay unused. */
template <class I, int D> static __device__ __forceinline__ void transpose_bytes(uint32_t raw)
{
    auto place = [=](int row, int chunk) { return raw + row * D + chunk * 16; };
#pragma unroll 1
    for (int band = 0; band < I::SHARE / 8; band++)
        transpose_units<1>(place, band, D / 16, D, 0, I::SHARE);
}

template <class I>
static __device__ __forceinline__ any_row fetch_raw(const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int32_t tile,
                                                    int32_t block)
{
    any_row mine = find_row<I>(a, w, sh.seq, tile, block);
    uint32_t raw = raw_keys<I>(sh);
    if (a.aligned) {
        uint32_t raw_v = raw + I::SHARE * I::DK;
        if (by_dims<I>(a, false)) fetch_byte_units<I, I::DK>(a, w, raw, tile, block, false);
        else fetch_bytes<I::SHARE, I::DK>(raw, mine, 0, a.layer.k_dims, a.k_step);
        if (by_dims<I>(a, true)) fetch_byte_units<I, I::DV>(a, w, raw_v, tile, block, true);
        else
            fetch_bytes<I::SHARE, I::DV>(raw_v, mine, I::SHARE, a.layer.v_dims - w.first_value, 16);
    }
    cp_async_commit();
    return mine;
}

/* ---- widened ---- */

template <typename T>
static __device__ __forceinline__ uint4 widen(uint2 bytes, folio_dtype dtype, float scale)
{
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint16_t two = (uint16_t)((i / 2 ? bytes.y : bytes.x) >> i % 2 * 16);
        float2 x;
        if (dtype == FOLIO_INT8) {
            x = make_float2((float)(int8_t)(two & 255), (float)(int8_t)(two >> 8));
        } else {
            __half2 h(
                __nv_cvt_fp8x2_to_halfraw2(two, dtype == FOLIO_FP8_E4M3 ? __NV_E4M3 : __NV_E5M2));
            x = __half22float2(h);
        }
        out[i] = pack<T>(x.x * scale, x.y * scale);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

/* The same rows in 16 bits, `dims` numbers each and zeros after them. */
template <typename T, int ROWS, int D>
static __device__ __forceinline__ void widen_rows(const prefill_args &a, uint32_t to, int row0,
                                                  uint32_t raw, const any_row &mine, int first,
                                                  int32_t dims)
{
    constexpr int CHUNKS = D / 8;
#pragma unroll 2
    for (int i = fresh_lane(); i < ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, mine.from, first + row);
        float scale = __shfl_sync(ALL_LANES, mine.scale, first + row);
        int32_t kind = __shfl_sync(ALL_LANES, mine.kind, first + row);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (kind % 2 == 1 && chunk * 8 < dims)
            x = load_numbers(
                (const uint16_t *)(from + row_byte(kind == 3, row0 + row, chunk * 16)));
        if (kind == 2 && chunk * 8 < dims) {
            uint2 bytes = a.aligned ? load_shared(raw + i * 8)
                                    : load_bytes((const uint8_t *)from + chunk * 8);
            x = widen<T>(bytes, a.layer.kv_dtype, scale);
        }
        store_shared(to + chunk_at<D * 2>(row0 + row, chunk), x);
    }
}

/* Raw K and V to stage 0; scores take the scale of K, which keeps K exact. */
template <class I>
static __device__ __forceinline__ void widen_tile(const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, any_row mine)
{
    int lane = fresh_lane(), row0 = (int)threadIdx.x / 32 * I::SHARE;
    if (lane < I::SHARE) {
        sh.k_scales[row0 + lane] = mine.scale;
        mine.scale = 1.0f;
    }
    uint32_t to = shared_address(sh.kv[0]), raw = raw_keys<I>(sh);
    if (by_dims<I>(a, false)) transpose_bytes<I, I::DK>(raw);
    if (by_dims<I>(a, true)) transpose_bytes<I, I::DV>(raw + I::SHARE * I::DK);
    __syncwarp();
    widen_rows<typename I::T, I::SHARE, I::DK>(a, to, row0, raw, mine, 0, a.layer.k_dims);
    widen_rows<typename I::T, I::SHARE, I::DV>(a, to + I::K_BYTES, row0, raw + I::SHARE * I::DK,
                                               mine, I::SHARE, a.layer.v_dims - w.first_value);
    __syncwarp(); /* lanes have read what others fetched */
}

/* V of fp8 takes its scale at the end where no new row is among the keys. */
static __device__ __forceinline__ float value_scale_at_end(const folioi_cuda_layer &l,
                                                           int32_t kv_head)
{
    return dtype_is_fp8(l.kv_dtype) && l.cached && !l.append ? folioi_cuda_scale(&l.v, kv_head)
                                                             : 1.0f;
}

#endif
