/*
 * prefill_fetch.h: what a block of the prefill kernel is given, and how rows of q, K and V come to its shared memory: read where
 * they lie, page by page, a lane knowing the address of one row.
 */
#ifndef FOLIOI_CUDA_PREFILL_FETCH_H
#define FOLIOI_CUDA_PREFILL_FETCH_H

#include "backends/cuda/mma.h"
#include "backends/cuda/prefill_list.h"

#include <cuda_fp8.h>
#include <math_constants.h>
#include <string.h>
#include <type_traits>

struct prefill_args {
    folioi_cuda_layer layer;
    folioi_cuda_step step;
    const folioi_prefill_tile *tiles;
    int32_t group;        /* query heads of one kv head           */
    int32_t heads;        /* of them, those of one tile           */
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

/* One instance: T of q and out, head sizes up to DK and DV; PLAIN: 16-bit keys of just that size, no option on scores. */
template <typename T_, int DK_, int DV_, int WARPS_, int M_TILES_, int KEYS_, int BLOCKS_,
          bool PLAIN_>
struct prefill_instance {
    using T = T_;
    static constexpr int DK = DK_, DV = DV_, WARPS = WARPS_, M_TILES = M_TILES_, KEYS = KEYS_;
    static constexpr int BLOCKS = BLOCKS_; /* of one multiprocessor */
    static constexpr bool PLAIN = PLAIN_;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int WARP_ROWS = M_TILES * 16, ROWS = WARPS * WARP_ROWS;
    static constexpr int SHARE =
        KEYS / WARPS; /* keys a warp fetches: K by its first lanes, V by the next */
    static constexpr int K_BYTES = KEYS * DK * 2, STAGE_BYTES = KEYS * (DK + DV) * 2;
    static constexpr int Q_BYTES = ROWS * DK * 2;
    /* one stage, V coming while K is used and K while V is: two blocks of large heads leave no room for two */
    static constexpr bool SPLIT = PLAIN && DK > 128 && BLOCKS > 1;
    struct shared {
        char q[Q_BYTES];
        char kv[SPLIT ? 1 : 2][STAGE_BYTES];
        typename std::conditional<PLAIN, plain_row, general_row>::type rows[ROWS];
        float k_scales[PLAIN ? 1 : KEYS];
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

template <int D> static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk)
{
    return (uint32_t)(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

/* Rows of `dims` numbers to shared memory: lane first + i holds the address of row i, odd where the row is zeros. */
template <int ROWS, int D>
static __device__ __forceinline__ void copy_rows(uint32_t to, int row0, uint64_t address, int first,
                                                 int32_t dims)
{
    constexpr int CHUNKS = D / 8;
    int lane = fresh_lane();
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        uint64_t from = __shfl_sync(~0u, address, first + row);
        bool is_zero = from & 1 || chunk * 8 >= dims;
        cp_async(to + chunk_at<D>(row0 + row, chunk), (const char *)(from & ~1ull) + chunk * 16,
                 is_zero ? 0 : 16);
    }
}

/* The first half of a key tile, for edges. */
template <class I> struct half_tile : I {
    static constexpr int KEYS = I::KEYS / 2;
};

/* ---- rows of q and out ---- */

struct row_place {
    int32_t query, head; /* query < 0: no row */
};

static __device__ __forceinline__ row_place place_of(const prefill_args &a, const prefill_work &w,
                                                     int row)
{
    int32_t query = w.first_query + row / a.heads, head = row % a.heads;
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

static __device__ __forceinline__ uint2 load_shared(uint32_t from)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

/* Rows of q that are not aligned; lane i holds the address of row i. */
template <class I>
static __device__ __forceinline__ void fill_q(uint64_t mine, bool is_none, uint32_t to, int row0,
                                              int32_t dims)
{
    constexpr int CHUNKS = I::DK / 8;
    for (int i = fresh_lane(); i < I::WARP_ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(~0u, mine, row);
        bool is_zero = __shfl_sync(~0u, (int)is_none, row) || chunk * 8 >= dims;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (!is_zero) x = load_numbers((const uint16_t *)from + chunk * 8);
        store_shared(to + chunk_at<I::DK>(row0 + row, chunk), x);
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
    if constexpr (!I::PLAIN) {
        if (!a.aligned) {
            fill_q<I>(from, p.query < 0, to, row0, l.k_dims);
            return;
        }
    }
    copy_rows<I::WARP_ROWS, I::DK>(to, row0, from | (p.query < 0), 0, I::PLAIN ? I::DK : l.k_dims);
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
    return __ldg(a.step.blocks + s.table + key / a.layer.block_size);
}

static __device__ __forceinline__ int64_t stored_index(const prefill_args &a, const prefill_work &w,
                                                       const folioi_address &at, int32_t key,
                                                       int32_t block)
{
    return block * at.block + w.kv_head * at.head + key % a.layer.block_size * at.token_tile_stride;
}

/* Where the lane's row of 16-bit numbers is; odd: nowhere. */
template <class I>
static __device__ __forceinline__ uint64_t wide_address(const prefill_args &a,
                                                        const prefill_work &w,
                                                        const folioi_cuda_seq &s, int32_t tile,
                                                        int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = threadIdx.x % 32 >= I::SHARE;
    const uint16_t *from = (const uint16_t *)l.q.data; /* aligned, and not read */
    bool is_zero = true;
    if (block >= 0) {
        const folioi_cuda_side &side = is_v ? l.v : l.k;
        from = (const uint16_t *)side.base + stored_index(a, w, side.at, key, block);
        is_zero = false;
    } else if (key >= w.begin && key < w.end && !is_stored(l, s, key)) {
        const folioi_cuda_rows &rows = is_v ? l.new_v : l.new_k;
        from = (const uint16_t *)rows.data +
               row_index(rows, s.new_row + key - s.context_len, w.kv_head);
        is_zero = false;
    }
    if (!I::PLAIN && is_v) from += w.first_value;
    return (uint64_t)from | is_zero;
}

/* The warp's K, and its V, of 16 bits on their way to a stage. */
template <class I>
static __device__ __forceinline__ void fetch_keys(const prefill_args &a, char *stage,
                                                  uint64_t address)
{
    copy_rows<I::SHARE, I::DK>(shared_address(stage), (int)threadIdx.x / 32 * I::SHARE, address, 0,
                               I::PLAIN ? I::DK : a.layer.k_dims);
}

template <class I>
static __device__ __forceinline__ void fetch_values(const prefill_args &a, const prefill_work &w,
                                                    char *stage, uint64_t address)
{
    copy_rows<I::SHARE, I::DV>(shared_address(stage) + I::K_BYTES, (int)threadIdx.x / 32 * I::SHARE,
                               address, I::SHARE,
                               I::PLAIN ? I::DV : a.layer.v_dims - w.first_value);
}

template <class I>
static __device__ __forceinline__ void fetch_wide(const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, int stage, int32_t tile,
                                                  int32_t block)
{
    uint64_t address = wide_address<I>(a, w, sh.seq, tile, block);
    fetch_keys<I>(a, sh.kv[stage], address);
    fetch_values<I>(a, w, sh.kv[stage], address);
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
        uint64_t from = __shfl_sync(~0u, mine.from, first + row);
        int32_t kind = __shfl_sync(~0u, mine.kind, first + row);
        if (kind == 2 && chunk * 8 < dims)
            cp_async_8(raw + i * 8, (const uint8_t *)from + chunk * 8);
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
        uint64_t from = __shfl_sync(~0u, mine.from, first + row);
        float scale = __shfl_sync(~0u, mine.scale, first + row);
        int32_t kind = __shfl_sync(~0u, mine.kind, first + row);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (kind == 1 && chunk * 8 < dims) x = load_numbers((const uint16_t *)from + chunk * 8);
        if (kind == 2 && chunk * 8 < dims) {
            uint2 bytes = a.aligned ? load_shared(raw + i * 8)
                                    : load_bytes((const uint8_t *)from + chunk * 8);
            x = widen<T>(bytes, a.layer.kv_dtype, scale);
        }
        store_shared(to + chunk_at<D>(row0 + row, chunk), x);
    }
}

/* V of fp8 takes its scale at the end where no new row is among the keys. */
static __device__ __forceinline__ float value_scale_at_end(const folioi_cuda_layer &l)
{
    bool is_fp8 = l.kv_dtype == FOLIO_FP8_E4M3 || l.kv_dtype == FOLIO_FP8_E5M2;
    return is_fp8 && l.cached && !l.append ? l.v.scale : 1.0f;
}

template <class I>
static __device__ __forceinline__ any_row find_row(const prefill_args &a, const prefill_work &w,
                                                   const folioi_cuda_seq &s, int32_t tile,
                                                   int32_t block)
{
    const folioi_cuda_layer &l = a.layer;
    int32_t key = lane_key<I>(tile);
    bool is_v = threadIdx.x % 32 >= I::SHARE,
         is_byte = l.kv_dtype != FOLIO_F16 && l.kv_dtype != FOLIO_BF16;
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
