/*
 * prefill_fetch.h: what a block of the prefill kernel is given, and how rows of q, K and V come to its shared memory: read where
 * they lie, page by page, a lane knowing the address of one row.
 */
#ifndef FOLIOI_CUDA_PREFILL_FETCH_H
#define FOLIOI_CUDA_PREFILL_FETCH_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill_list.h"
#include "backends/cuda/warp.h"
#include "core/dtype.h"

#include <cuda_fp8.h>
#include <math_constants.h>
#include <string.h>
#include <type_traits>

struct prefill_args {
    folioi_cuda_layer layer;
    folioi_cuda_step step;
    const folioi_prefill_tile *tiles; /* [capacity] */
    int32_t capacity;
    int32_t enough; /* tiles that keep all multiprocessors busy while the longest are computed */
    int32_t group;  /* query heads of one kv head           */
    int32_t heads;  /* of them, those of one tile           */
    int32_t tile_queries; /* of a tile of the list                */
    int32_t pieces;       /* that a tile of the list is computed in */
    int32_t queries;      /* of one piece                         */
    int32_t head_parts;   /* tiles a group needs                  */
    int32_t value_parts;  /* tiles the numbers of a V row need    */
    int32_t aligned;      /* rows may be copied in 16-byte chunks, 8-bit ones in chunks of 8 */
    int32_t is_direct;    /* and K and V are of 16 bits: they need no widening */
};

/* What a row of the tile sees. */
struct plain_row {
    folioi_range seen;
};

struct byte_row {
    folioi_range seen;
    float unit; /* a power of two: q is that many times what shared memory holds */
};

struct general_row {
    folioi_range seen;
    int64_t own;  /* the key at the row's own position */
    int64_t bias; /* bias of key 0                     */
    float slope;
};

/* The tile a block computes. */
struct prefill_work {
    int32_t seq, first_query, past_query;
    int32_t kv_head, first_head; /* first_head: of the tile's query heads */
    int32_t num_heads;
    int32_t first_value;
    int32_t begin, end;         /* keys that any row sees            */
    int32_t all_begin, all_end; /* keys that all rows see            */
};

/* K and V of an instance: 16-bit numbers like q's, or known 8-bit ones, which become f16 on their way to the tensor cores. */
enum prefill_kv { KV_WIDE, KV_E4M3, KV_E5M2, KV_INT8 };

/*
 * One instance: T of the products, head sizes up to DK and DV; PLAIN: keys of just that size, no option on scores. q and out
 * are of type T too, but with 8-bit keys T is f16 and they may be of either type.
 */
template <typename T_, int DK_, int DV_, int WARPS_, int M_TILES_, int KEYS_, int BLOCKS_,
          bool PLAIN_, prefill_kv KV_ = KV_WIDE>
struct prefill_instance {
    using T = T_;
    static constexpr int DK = DK_, DV = DV_, WARPS = WARPS_, M_TILES = M_TILES_, KEYS = KEYS_;
    static constexpr int TILE_KEYS = KEYS; /* of all the tile, in a part of it too */
    static constexpr int BLOCKS = BLOCKS_; /* of one multiprocessor */
    static constexpr bool PLAIN = PLAIN_;
    static constexpr prefill_kv KV = KV_;
    static constexpr int KV_SIZE = KV == KV_WIDE ? 2 : 1;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int WARP_ROWS = M_TILES * 16, ROWS = WARPS * WARP_ROWS;
    static constexpr int SHARE =
        KEYS / WARPS; /* keys a warp fetches: K by its first lanes, V by the next */
    static constexpr int K_ROW = DK * KV_SIZE, V_ROW = DV * KV_SIZE; /* bytes */
    static constexpr int K_BYTES = KEYS * K_ROW, STAGE_BYTES = KEYS * (K_ROW + V_ROW);
    static constexpr int Q_BYTES = ROWS * DK * 2;
    /* one stage, V coming while K is used and K while V is: two blocks of large heads leave no room for two */
    static constexpr bool SPLIT = PLAIN && KV == KV_WIDE && DK > 128 && BLOCKS > 1 && KEYS > 32;
    /* between scores, sums wait in shared memory: widening takes the registers */
    static constexpr bool PARKS = KV != KV_WIDE && M_TILES > 1;
    using row = typename std::conditional<
        !PLAIN, general_row,
        typename std::conditional<KV == KV_WIDE, plain_row, byte_row>::type>::type;
    struct shared {
        char q[Q_BYTES];
        char kv[SPLIT ? 1 : 2][STAGE_BYTES];
        row rows[ROWS];
        float k_scales[PLAIN ? 1 : KEYS];
        alignas(16) float scales[2][KV == KV_INT8 ? 2 * KEYS : 4]; /* of a stage: K's, then V's */
        float parked[PARKS ? 4 * M_TILES : 1][PARKS ? THREADS : 1];
        folioi_cuda_seq seq;
        prefill_work work; /* here, registers being few */
    };
    static_assert(SHARE * 2 <= 32 && KEYS <= 64 && DV <= DK && WARP_ROWS <= 32,
                  "one lane, one row");
};

/*
 * The lane's number, anew: what follows from it is then computed where it is used and takes no registers across key tiles.
 */
static __device__ __forceinline__ int fresh_lane(void)
{
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    return lane;
}

/* Where a 16-byte chunk of a row is; 8 rows' chunks are in 8 different places of 128 bytes. */
template <int ROW_BYTES> static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk)
{
    int turn = ROW_BYTES == 64 ? row >> 1 & 3 : row & 7;
    return (uint32_t)(row * ROW_BYTES + ((chunk ^ turn) << 4));
}

/* Rows of `bytes` to shared memory: lane first + i holds the address of row i, odd where the row is zeros. */
template <int ROWS, int ROW_BYTES>
static __device__ __forceinline__ void copy_rows(uint32_t to, int row0, uint64_t address, int first,
                                                 int32_t bytes)
{
    constexpr int CHUNKS = ROW_BYTES / 16;
    int lane = fresh_lane();
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, address, first + row);
        bool is_zero = from & 1 || chunk * 16 >= bytes;
        cp_async<16>(to + chunk_at<ROW_BYTES>(row0 + row, chunk),
                     (const char *)(from & ~1ull) + chunk * 16, is_zero ? 0 : 16);
    }
}

/* The same where 8 rows at a time lie `stride` bytes apart, none of them zeros: row i of them is at lane first + i / 8 * 8. */
template <int ROWS, int ROW_BYTES>
static __device__ __forceinline__ void copy_pages(uint32_t to, int row0, uint64_t address,
                                                  int first, int64_t stride)
{
    constexpr int CHUNKS = ROW_BYTES / 16, LANE_ROWS = 32 / CHUNKS;
    int lane = fresh_lane(), row = lane / CHUNKS, chunk = lane % CHUNKS;
    uint32_t at = to + chunk_at<ROW_BYTES>(row0 + row, chunk);
    uint64_t skip = row * stride + chunk * 16;
#pragma unroll
    for (int page = 0; page < ROWS; page += 8) {
        uint64_t from = __shfl_sync(ALL_LANES, address, first + page) + skip;
#pragma unroll
        for (int i = 0; i < 8; i += LANE_ROWS) {
            cp_async<16>((at ^ (uint32_t)(i << 4)) + (page + i) * ROW_BYTES, (const void *)from);
            from += LANE_ROWS * stride;
        }
    }
}

/* The first keys of a key tile, for edges. */
template <class I, int KEYS_> struct part_tile : I {
    static constexpr int KEYS = KEYS_;
};

/* ---- rows of q and out ---- */

/* Sizes are mostly powers of two, and a division is slow. */
static __device__ __forceinline__ int32_t divide(int32_t x, int32_t size)
{
    return (size & (size - 1)) == 0 ? x >> (__ffs(size) - 1) : x / size;
}

struct row_place {
    int32_t query, head; /* query < 0: no row */
};

static __device__ __forceinline__ row_place place_of(const prefill_args &a, const prefill_work &w,
                                                     int row)
{
    int32_t in_tile = divide(row, a.heads), head = row - in_tile * a.heads;
    int32_t query = w.first_query + in_tile;
    bool is_row = query < w.past_query && head < w.num_heads;
    return {is_row ? query : -1, w.first_head + head};
}

static __device__ __forceinline__ int64_t row_index(const folioi_cuda_rows &r, int64_t row,
                                                    int32_t head)
{
    return row * r.token + (int64_t)head * r.head;
}

/* 8 numbers of 16 bits from anywhere. */
static __device__ uint4 load_numbers(const uint16_t *from)
{
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = __ldg(from + 2 * i) | (uint32_t)__ldg(from + 2 * i + 1) << 16;
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* The bits of the largest magnitude among 8 bf16 numbers, of those that are finite. */
static __device__ __forceinline__ uint32_t largest_bits(uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bits = words[i / 2] >> i % 2 * 16 & 0x7fff;
        largest = max(largest, bits < 0x7f80 ? bits : 0);
    }
    return largest;
}

/* Two bf16 numbers times a power of two as f16. */
static __device__ __forceinline__ uint32_t halve(uint32_t two, float factor)
{
    return pack<__half>(__uint_as_float(two << 16) * factor,
                        __uint_as_float(two & 0xffff0000) * factor);
}

/*
 * Rows of q as f16 in the order 8-bit keys need: of 16 numbers, pairs 0 2 4 6, then 1 3 5 7. A bf16 row is multiplied with a
 * power of two that brings its largest number below 2^15, so that nothing is lost but what is 2^39 times smaller.
 */
template <class I>
static __device__ __forceinline__ void halve_q(uint64_t mine, bool is_none, bool is_bf16,
                                               typename I::shared &sh, int row0)
{
    constexpr int LANES = I::DK / 16; /* of a row */
    uint32_t to = shared_address(sh.q);
#pragma unroll 2
    for (int first = 0; first < I::WARP_ROWS; first += 32 / LANES) {
        int lane = fresh_lane(), row = first + lane / LANES, part = lane % LANES;
        const uint4 *from = (const uint4 *)__shfl_sync(ALL_LANES, mine, row) + part * 2;
        uint4 x = make_uint4(0, 0, 0, 0), y = x;
        if (!__shfl_sync(ALL_LANES, (int)is_none, row)) x = __ldg(from), y = __ldg(from + 1);
        float unit = 1.0f;
        if (is_bf16) {
            uint32_t largest = max(largest_bits(x), largest_bits(y));
#pragma unroll
            for (int i = 1; i < LANES; i *= 2)
                largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, i));
            int32_t exponent = max((int32_t)(largest >> 7), 27) - 14;
            unit = __int_as_float(exponent << 23);
            float factor = __int_as_float((254 - exponent) << 23);
            x = make_uint4(halve(x.x, factor), halve(x.y, factor), halve(x.z, factor),
                           halve(x.w, factor));
            y = make_uint4(halve(y.x, factor), halve(y.y, factor), halve(y.z, factor),
                           halve(y.w, factor));
        }
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, part * 2),
                     make_uint4(x.x, x.z, y.x, y.z));
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, part * 2 + 1),
                     make_uint4(x.y, x.w, y.y, y.w));
        if (part == 0) sh.rows[row0 + row].unit = unit;
    }
}

/* Rows of q that are not aligned; lane i holds the address of row i. */
template <class I>
static __device__ __forceinline__ void fill_q(uint64_t mine, bool is_none, uint32_t to, int row0,
                                              int32_t dims)
{
    constexpr int CHUNKS = I::DK / 8;
    for (int i = fresh_lane(); i < I::WARP_ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, mine, row);
        bool is_zero = __shfl_sync(ALL_LANES, (int)is_none, row) || chunk * 8 >= dims;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (!is_zero) x = load_numbers((const uint16_t *)from + chunk * 8);
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, chunk), x);
    }
}

/* The warp's rows of q. */
template <class I>
static __device__ void fetch_q(const prefill_args &a, const prefill_work &w, typename I::shared &sh)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane(), row0 = threadIdx.x / 32 * I::WARP_ROWS;
    row_place p = place_of(a, w, row0 + lane % I::WARP_ROWS);
    const uint16_t *q = (const uint16_t *)l.q.data;
    uint64_t from =
        (uint64_t)(q + (p.query < 0 ? 0 : row_index(l.q, sh.seq.query_row + p.query, p.head)));
    uint32_t to = shared_address(sh.q);
    if constexpr (I::KV != KV_WIDE) {
        halve_q<I>(from, p.query < 0, l.dtype == FOLIO_BF16, sh, row0);
        return;
    }
    if constexpr (!I::PLAIN) {
        if (!a.aligned) {
            fill_q<I>(from, p.query < 0, to, row0, l.k_dims);
            return;
        }
    }
    copy_rows<I::WARP_ROWS, I::DK * 2>(to, row0, from | (p.query < 0), 0,
                                       (I::PLAIN ? I::DK : l.k_dims) * 2);
}

/* ---- keys ---- */

static __device__ __forceinline__ bool is_stored(const folioi_cuda_layer &l,
                                                 const folioi_cuda_seq &s, int32_t key)
{
    return l.cached && (!l.append || key < s.context_len);
}

/* The key whose K or V this lane fetches for a key tile. */
template <class I> static __device__ __forceinline__ int32_t lane_key(int32_t tile)
{
    return tile * I::KEYS + (int)threadIdx.x / 32 * I::SHARE + (int)threadIdx.x % I::SHARE;
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

static __device__ __forceinline__ int64_t stored_index(const prefill_args &a, const prefill_work &w,
                                                       const folioi_address &at, int32_t key,
                                                       int32_t block)
{
    int32_t size = a.layer.block_size, in_block = key - divide(key, size) * size;
    return block * at.block + w.kv_head * at.head + in_block * at.token_tile_stride;
}

/* Where the lane's row is, in numbers as the instance has them; odd: nowhere. Rows that are new are of 16 bits. */
template <class I>
static __device__ __forceinline__ uint64_t row_address(const prefill_args &a, const prefill_work &w,
                                                       const folioi_cuda_seq &s, int32_t tile,
                                                       int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = threadIdx.x % 32 >= I::SHARE;
    const char *from = (const char *)l.q.data; /* aligned, and not read */
    bool is_zero = true;
    if (block >= 0) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        from = side.base + stored_index(a, w, side.at, key, block) * I::KV_SIZE;
        is_zero = false;
    } else if (I::KV == KV_WIDE && key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        from = (const char *)rows.data +
               row_index(rows, s.new_row + key - s.context_len, w.kv_head) * 2;
        is_zero = false;
    }
    if (!I::PLAIN && is_v) from += w.first_value * 2;
    return (uint64_t)from | is_zero;
}

/* Are the warp's keys of a tile all read from the cache, and 8 at a time from one block? */
template <class I>
static __device__ __forceinline__ bool in_pages(const prefill_args &a, const prefill_work &w,
                                                const folioi_cuda_seq &s, int32_t tile)
{
    int32_t first = tile * I::KEYS + (int)threadIdx.x / 32 * I::SHARE, past = first + I::SHARE;
    return I::PLAIN && a.layer.block_size % 8 == 0 && first >= w.begin && past <= w.end &&
           is_stored(a.layer, s, past - 1);
}

/* The warp's K, and its V, on their way to a stage. */
template <class I>
static __device__ __forceinline__ void fetch_keys(const prefill_args &a, char *stage,
                                                  uint64_t address, bool is_paged)
{
    uint32_t to = shared_address(stage);
    int row0 = (int)threadIdx.x / 32 * I::SHARE;
    if (is_paged)
        copy_pages<I::SHARE, I::K_ROW>(to, row0, address, 0,
                                       a.layer.k.at.token_tile_stride * I::KV_SIZE);
    else
        copy_rows<I::SHARE, I::K_ROW>(to, row0, address, 0,
                                      I::PLAIN ? I::K_ROW : a.layer.k_dims * 2);
}

template <class I>
static __device__ __forceinline__ void fetch_values(const prefill_args &a, const prefill_work &w,
                                                    char *stage, uint64_t address, bool is_paged)
{
    uint32_t to = shared_address(stage) + I::K_BYTES;
    int row0 = (int)threadIdx.x / 32 * I::SHARE;
    if (is_paged)
        copy_pages<I::SHARE, I::V_ROW>(to, row0, address, I::SHARE,
                                       a.layer.v.at.token_tile_stride * I::KV_SIZE);
    else
        copy_rows<I::SHARE, I::V_ROW>(to, row0, address, I::SHARE,
                                      I::PLAIN ? I::V_ROW : (a.layer.v_dims - w.first_value) * 2);
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

/* ---- keys of other types, or not aligned: fetched as they are, widened when their tile's turn has come ---- */

/* What a lane knows of its row. */
struct any_row {
    uint64_t from;
    float scale;
    int32_t kind; /* 0: zeros; 1: 16-bit numbers; 2: 8-bit numbers, to be multiplied with scale */
};

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

/* 8 bytes from anywhere. */
static __device__ uint2 load_bytes(const uint8_t *from)
{
    uint32_t x[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        x[i] = __ldg(from + 4 * i) | __ldg(from + 4 * i + 1) << 8 | __ldg(from + 4 * i + 2) << 16 |
               (uint32_t)__ldg(from + 4 * i + 3) << 24;
    return make_uint2(x[0], x[1]);
}

/* The 8-bit rows among a warp's on their way to `raw`: chunk i of 8 numbers at i * 8, for the same lane to widen. */
template <int ROWS, int D>
static __device__ __forceinline__ void fetch_bytes(uint32_t raw, const any_row &mine, int first,
                                                   int32_t dims)
{
    constexpr int CHUNKS = D / 8;
    for (int i = fresh_lane(); i < ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, mine.from, first + row);
        int32_t kind = __shfl_sync(ALL_LANES, mine.kind, first + row);
        if (kind == 2 && chunk * 8 < dims)
            cp_async<8>(raw + i * 8, (const uint8_t *)from + chunk * 8);
    }
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
        if (kind == 1 && chunk * 8 < dims) x = load_numbers((const uint16_t *)from + chunk * 8);
        if (kind == 2 && chunk * 8 < dims) {
            uint2 bytes = a.aligned ? load_shared(raw + i * 8)
                                    : load_bytes((const uint8_t *)from + chunk * 8);
            x = widen<T>(bytes, a.layer.kv_dtype, scale);
        }
        store_shared(to + chunk_at<D * 2>(row0 + row, chunk), x);
    }
}

/* V of fp8 takes its scale at the end where no new row is among the keys. */
static __device__ __forceinline__ float value_scale_at_end(const folioi_cuda_layer &l)
{
    return dtype_is_fp8(l.kv_dtype) && l.cached && !l.append ? l.v.scale : 1.0f;
}

template <class I>
static __device__ __forceinline__ any_row find_row(const prefill_args &a, const prefill_work &w,
                                                   const folioi_cuda_seq &s, int32_t tile,
                                                   int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = threadIdx.x % 32 >= I::SHARE, is_byte = !dtype_is_16_bit(l.kv_dtype);
    int64_t skip = is_v ? w.first_value : 0;
    any_row row = {0, 1.0f, 0};
    if (block >= 0) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        int64_t at = stored_index(a, w, side.at, key, block) + skip;
        row.from = (uint64_t)(side.base + at * (is_byte ? 1 : 2));
        row.kind = is_byte ? 2 : 1;
        if (l.kv_dtype == FOLIO_INT8)
            row.scale = __ldg(side.scales + stored_index(a, w, side.scales_at, key, block));
        else if (is_byte && !(is_v && !l.append)) row.scale = side.scale;
    } else if (key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        int64_t at = row_index(rows, s.new_row + key - s.context_len, w.kv_head) + skip;
        row.from = (uint64_t)((const uint16_t *)rows.data + at);
        row.kind = 1;
    }
    return row;
}

/* Where the warp's raw K lies: in the stage that widened tiles leave free. V follows it. */
template <class I> static __device__ __forceinline__ uint32_t raw_keys(typename I::shared &sh)
{
    return shared_address(sh.kv[I::SPLIT ? 0 : 1]) + threadIdx.x / 32 * I::SHARE * (I::DK + I::DV);
}

template <class I>
static __device__ __forceinline__ any_row fetch_raw(const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int32_t tile,
                                                    int32_t block)
{
    any_row mine = find_row<I>(a, w, sh.seq, tile, block);
    uint32_t raw = raw_keys<I>(sh);
    if (a.aligned) {
        fetch_bytes<I::SHARE, I::DK>(raw, mine, 0, a.layer.k_dims);
        fetch_bytes<I::SHARE, I::DV>(raw + I::SHARE * I::DK, mine, I::SHARE,
                                     a.layer.v_dims - w.first_value);
    }
    cp_async_commit();
    return mine;
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
    widen_rows<typename I::T, I::SHARE, I::DK>(a, to, row0, raw, mine, 0, a.layer.k_dims);
    widen_rows<typename I::T, I::SHARE, I::DV>(a, to + I::K_BYTES, row0, raw + I::SHARE * I::DK,
                                               mine, I::SHARE, a.layer.v_dims - w.first_value);
}

#endif
