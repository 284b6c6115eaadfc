/*
 * decode_fetch.h: copies of tiles to shared memory. A warp has a cursor that goes through the tiles of its block's items. It
 * starts the copies of a tile into the next free stage. Block numbers are loaded ahead of their tiles.
 */
#ifndef FOLIOI_DECODE_FETCH_H
#define FOLIOI_DECODE_FETCH_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/stored_rows.h"
#include "backends/cuda/transpose.h"
#include "backends/cuda/warp.h"

/* One lane's view of the next tile its warp will fetch. */
struct cursor {
    int item, item_end;     /* equal: no tile is left */
    int tile;               /* its first key */
    int low, high;          /* keys of the item */
    int fresh_at;           /* keys from here on are new rows */
    bool fresh;             /* this visit reads those */
    int block, in_block;    /* of this lane's token */
    int64_t table, new_row; /* its sequence's table; the new row of key 0, were it one */
    bool wrote;             /* threads wrote to the stages since the last bulk copy */
    /* where no tile lies in two blocks, instead of block: a lane for each of the warp's tiles */
    int num_used;          /* of the first 32 */
    int blocks, blocks_32; /* of the first 32, and of those after them */
};

/* Of kernels that note: INT32_MAX less the first new row that is bad in this lane's unit; 0: none. */
struct noted_cursor : cursor {
    int bad;
};

/* ---- the cursor ---- */

/* Not inlined, like all that is rare here: short loops stay in the instruction cache. */
static __device__ __noinline__ int divide(int x, int by) { return x / by; }

static __device__ __forceinline__ int block_index(const decode_args &a, int token)
{
    return a.block_shift >= 0 ? token >> a.block_shift : divide(token, a.layer.block_size);
}

/* Load the block number of a tile. Those of a share's first tiles came with the share. */
static __device__ __noinline__ int ask_ahead(const decode_args &a, const folioi_decode_share *share,
                                             int item, int64_t table, int tile, int low, int high)
{
    if ((unsigned)tile >= (unsigned)high) return 0;
    int kept = (tile >> 4) - (low >> 4), nth = item - share->begin;
    if (nth < FOLIOI_DECODE_KEPT) kept += share->kept[nth].first_tile;
    if (nth < FOLIOI_DECODE_KEPT && kept < FOLIOI_DECODE_TILES) return share->blocks[kept];
    return __ldg(a.blocks + table + block_index(a, tile));
}

/* Is a token within [low, high)? by_dims: or one of the unit of 8 that it is in. */
static __device__ __forceinline__ bool is_read(bool by_dims, int token, int low, int high)
{
    int unit = by_dims ? 7 : 0;
    return (token | unit) >= low && (token & ~unit) < high;
}

/* Load block numbers: of this lane's token of the next tile, or, if no tile lies in two blocks, of 32 tiles at once. */
template <int KV>
static __device__ __forceinline__ void ask_block(const decode_args &a, const block_shared &sh,
                                                 cursor &c, int lane)
{
    if (c.item >= c.item_end) return;
    if (KV && a.one_block_tiles) {
        if (c.num_used % 32 != 0) return;
        int tile = c.tile + 16 * lane * a.num_warps;
        if (c.num_used == 0) {
            c.blocks_32 = ask_ahead(a, sh.share, c.item, c.table, tile, c.low, c.high);
            c.num_used = 32;
        }
        if (c.num_used == 32) {
            c.num_used = 0;
            c.blocks = c.blocks_32;
            tile += 16 * 32 * a.num_warps;
            c.blocks_32 = ask_ahead(a, sh.share, c.item, c.table, tile, c.low, c.high);
        }
        return;
    }
    int token = c.tile + (lane & 15);
    if (!KV && c.fresh) return;
    if (!is_read(a.xpacked, token, c.low, KV ? c.high : min(c.high, c.fresh_at))) return;
    int index = block_index(a, token);
    c.in_block = token - index * a.layer.block_size;
    c.block = __ldg(a.blocks + c.table + index);
}

/* The first tile of an item that a warp has: tiles go to warps by their number in the sequence. */
static __device__ __forceinline__ int first_tile(const decode_args &a, int low, int warp)
{
    int first = low >> 4;
    int ahead = warp - (first - (int)__umulhi(first, a.warps_inverse) * a.num_warps);
    return (first + (ahead < 0 ? ahead + a.num_warps : ahead)) << 4;
}

/* Move from item c.item to the first item with a tile for this warp. */
template <int KV>
static __device__ __forceinline__ void seek_item(const decode_args &a, const block_shared &sh,
                                                 cursor &c, int warp, int first_row)
{
    for (; c.item < c.item_end; c.item++) {
        const folioi_decode_item *item = item_at(a, sh, c.item);
        c.low = item->begin;
        c.high = item->end;
        c.tile = first_tile(a, c.low, warp);
        if (c.tile >= c.high) continue;
        const folioi_cuda_seq *s = &item->sequence;
        if (first_row >= s->query_len * a.heads_per_kv) continue;
        c.table = s->table;
        c.num_used = 0;
        if (!KV) {
            c.new_row = s->new_row - s->context_len;
            c.fresh_at = !a.layer.cached ? 0 : a.layer.append ? s->context_len : INT32_MAX;
            c.fresh = max(c.tile, c.low) >= c.fresh_at;
        }
        return;
    }
}

/* A tile with cached and new tokens is visited twice. */
template <int KV>
static __device__ __forceinline__ void step_cursor(const decode_args &a, const block_shared &sh,
                                                   cursor &c, int warp, int first_row)
{
    if (!KV && !c.fresh && c.fresh_at < c.tile + 16 && c.fresh_at < c.high) {
        c.fresh = true;
        return;
    }
    c.tile += 16 * a.num_warps;
    if (!KV) c.fresh = c.tile >= c.fresh_at;
    if (c.tile < c.high) return;
    c.item++;
    seek_item<KV>(a, sh, c, warp, first_row);
}

/* ---- tiles of the flexible instances ---- */

/* Address of this lane's row, K in lanes 0-15 and V in 16-31; 0: nobody sees the token. */
template <int KV>
static __device__ __forceinline__ uint64_t row_address(const decode_args &a, const cursor &c,
                                                       int block, bool valid, int kv_head, int lane)
{
    if (!valid) return 0;
    bool is_v = lane >= 16;
    if (!KV && c.fresh) {
        const folioi_cuda_rows &rows = is_v ? a.layer.new_v : a.layer.new_k;
        int64_t row = c.new_row + c.tile + (lane & 15);
        return (uint64_t)rows.data + 2 * (row * rows.token + kv_head * rows.head);
    }
    const folioi_cuda_side &side = is_v ? a.layer.v : a.layer.k;
    return (uint64_t)side.base + stored_row(side.at, block, kv_head, c.in_block) * a.kv_bytes;
}

/* From a row's first number to its byte `at`; unit: bytes between its 16-byte units, 0: as pages have them. */
static __device__ __forceinline__ int unit_byte(int unit, int token, int at)
{
    return unit == 0 ? row_byte(true, token, at) : pack_byte(unit, at);
}

/*
 * For rows that are not aligned for cp_async, and for new rows beside an 8-bit cache. V of the latter gets the order of dims
 * of 8-bit fragments: even dims of 16 first.
 */
static __device__ __noinline__ void copy_rows_slowly(uint32_t dst, int stride, uint64_t row,
                                                     int dims, int bytes, int unit, bool even_odd,
                                                     int first_lane)
{
    int lane = threadIdx.x & 31;
    for (int t = 0; t < 16; t++) {
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        for (int d = lane; d < dims; d += 32) {
            int at = even_odd ? (d & ~15) + (d & 1) * 8 + (d & 15) / 2 : d;
            uint32_t to = dst + t * stride + at * bytes;
            if (bytes == 2) {
                const uint16_t *x = (const uint16_t *)(from + unit_byte(unit, t, d * 2));
                store_shared_u16(to, from ? *x : (uint16_t)0);
            } else {
                const uint8_t *x = (const uint8_t *)(from + unit_byte(unit, t, d));
                store_shared_u8(to, from ? *x : (uint8_t)0);
            }
        }
    }
}

/* 16 rows of `copies` copies each. Lane first_lane + t holds the address of row t; 0: the row is zeros. */
template <int BYTES>
static __device__ __forceinline__ void copy_rows(uint32_t dst, int stride, uint64_t row, int copies,
                                                 uint32_t inverse, int first_lane, int unit,
                                                 const void *anywhere)
{
    int lane = threadIdx.x & 31;
#pragma unroll 3
    for (int i = 0; i < 16 * copies; i += 32) {
        int n = i + lane;
        int t = min((int)(((uint64_t)n * inverse) >> 22), 15);
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        int at = (n - t * copies) * BYTES;
        if (n < 16 * copies)
            cp_async<BYTES, BYTES == 16 ? 128 : 0>(
                dst + t * stride + at,
                from ? (const void *)(from + unit_byte(unit, t, at)) : anywhere, from ? BYTES : 0);
    }
}

/* 16 rows of K, or of V, lane first_lane + t having the address of row t. */
static __device__ __forceinline__ void copy_side(const decode_args &a, uint32_t dst, int stride,
                                                 uint64_t row, int first_lane, int unit)
{
    bool is_v = first_lane > 0;
    int copies = is_v ? a.v_copies : a.k_copies;
    uint32_t inverse = is_v ? a.v_inverse : a.k_inverse;
    const void *anywhere = a.layer.q.data;
    if (a.copy_bytes == 16)
        copy_rows<16>(dst, stride, row, copies, inverse, first_lane, unit, anywhere);
    else if (a.copy_bytes == 8)
        copy_rows<8>(dst, stride, row, copies, inverse, first_lane, unit, anywhere);
    else copy_rows<4>(dst, stride, row, copies, inverse, first_lane, unit, anywhere);
}

/* The same by dims, to be transposed by transpose_side. */
static __device__ __forceinline__ void copy_side_by_dims(const decode_args &a, uint32_t dst,
                                                         int stride, uint64_t row, int first_lane,
                                                         const folioi_cuda_side &side, int dims)
{
    uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + (threadIdx.x & 1) * 8);
    auto place = [=](int t, int chunk) { return dst + t * stride + chunk * 16; };
    int64_t step = side.at.dim_tile_stride * a.kv_bytes;
    if (a.kv_bytes == 2) copy_units<2, 2>(place, from, dims, step, side.base);
    else copy_units<1, 2>(place, from, dims, step, side.base);
}

/* A tile by dims that has arrived becomes rows; those outside of [low, high) zeros. */
static __device__ __noinline__ void transpose_side(uint32_t at, int stride, int dims, int kv_bytes,
                                                   int low, int high)
{
    auto place = [=](int t, int chunk) { return at + t * stride + chunk * 16; };
    for (int band = 0; band < 2; band++)
        if (kv_bytes == 2) transpose_units<2>(place, band, dims / 8, dims, low, high);
        else transpose_units<1>(place, band, (dims + 15) / 16, dims, low, high);
}

static __device__ __forceinline__ void transpose_flexible(const decode_args &a,
                                                          const tile_view &tile)
{
    const folioi_cuda_layer &y = a.layer;
    int low = tile.low - tile.tile, high = tile.high - tile.tile;
    transpose_side(tile.v, a.v_stride, y.v_dims, a.kv_bytes, low, high);
    if (a.k_by_dims) transpose_side(tile.k, a.k_stride, y.k_dims, a.kv_bytes, low, high);
    __syncwarp();
}

static __device__ __forceinline__ void copy_flexible(const decode_args &a, const cursor &c,
                                                     uint32_t dst, uint64_t row)
{
    const folioi_cuda_layer &y = a.layer;
    uint32_t v_dst = dst + 16 * a.k_stride;
    bool xpacked = a.xpacked && !c.fresh, k_by_dims = xpacked && a.k_by_dims;
    bool even_odd = c.fresh && a.kv_bytes == 1, slowly = even_odd || a.copy_bytes < 4;
    int unit = c.fresh ? 16 : a.k_unit, bytes = c.fresh ? 2 : a.kv_bytes;
    int lane = threadIdx.x & 31;
    /* new rows of 16 bits left numbers where the last fragment of a row of 8 bits reads zeros */
    if (a.kv_bytes == 1 && y.append && !c.fresh && !k_by_dims && y.k_dims % 16 != 0 && lane < 16)
        asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(dst + lane * a.k_stride + y.k_dims),
                     "r"(0)
                     : "memory");
    if (k_by_dims) copy_side_by_dims(a, dst, a.k_stride, row, 0, y.k, y.k_dims);
    else if (slowly) copy_rows_slowly(dst, a.k_stride, row, y.k_dims, bytes, unit, false, 0);
    else copy_side(a, dst, a.k_stride, row, 0, unit);
    if (xpacked) copy_side_by_dims(a, v_dst, a.v_stride, row, 16, y.v, y.v_dims);
    else if (slowly) copy_rows_slowly(v_dst, a.v_stride, row, y.v_dims, bytes, unit, even_odd, 16);
    else copy_side(a, v_dst, a.v_stride, row, 16, unit);
}

/* ---- tiles of the fixed instances ---- */

/* Where a tile that lies in one block begins. */
template <int BYTES, folioi_cuda_form FORM>
static __device__ __forceinline__ const char *tile_start(const folioi_cuda_side &side, int block,
                                                         int in_block, int kv_head)
{
    int tile = FORM == FOLIOI_FORM_PAGES ? in_block / 8 : in_block;
    return side.base + BYTES * (kv_head * side.at.head + block * side.at.block +
                                tile * side.at.token_tile_stride);
}

/* 16 rows. Lane first_lane + t holds the address of row t; 0: the row is zeros. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_rows_fixed(const decode_args &a, uint32_t dst,
                                                       uint64_t row, int first_lane)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int i = 0; i < 16 * COPIES; i += 32) {
        int n = i + lane, t = n / COPIES, at = n % COPIES;
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        const void *anywhere = a.layer.k.base;
        cp_async<16, 128>(dst + fixed_place<DIMS, BYTES, FOLIOI_FORM_ROWS>(t, at),
                          from ? (const void *)(from + at * 16) : anywhere, from ? 16 : 0);
    }
}

/* 16 rows of one block, all of them seen; from: the first. ROW: bytes between rows; 0: as `row` says. */
template <int DIMS, int BYTES, int ROW>
static __device__ __forceinline__ void copy_block_fixed(uint32_t dst, const char *from, int64_t row)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    int lane = threadIdx.x & 31;
    if (ROW != 0) row = ROW;
    if constexpr (32 % COPIES == 0) {
        constexpr int ROWS = 32 / COPIES;
        int mine = lane / COPIES, chunk = lane % COPIES;
        from += mine * row + chunk * 16;
#pragma unroll
        for (int t = 0; t < 16; t += ROWS)
            cp_async<16, 128>(dst + fixed_place<DIMS, BYTES, FOLIOI_FORM_ROWS>(t + mine, chunk),
                              from + t * row);
    } else {
#pragma unroll
        for (int n = lane; n < 16 * COPIES; n += 32) {
            int t = n / COPIES, chunk = n % COPIES;
            cp_async<16, 128>(dst + fixed_place<DIMS, BYTES, FOLIOI_FORM_ROWS>(t, chunk),
                              from + t * row + chunk * 16);
        }
    }
}

/* K in packs: 16 rows; lane t holds the address of row t; 0: the row is zeros. step: from pack to pack. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_packs(uint32_t dst, uint64_t row, int64_t step,
                                                  const void *anywhere)
{
    int lane = threadIdx.x & 31;
    uint64_t from = __shfl_sync(ALL_LANES, row, lane & 15);
#pragma unroll BYTES
    for (int n = lane; n < DIMS * BYTES; n += 32)
        cp_async<16, 128>(dst + n * 16, from ? (const void *)(from + n / 16 * step) : anywhere,
                          from ? 16 : 0);
}

/*
 * 16 tokens by dims. Lanes first_lane and first_lane + 8 hold the addresses of the units of dim 0; 0: zeros. Of a unit `seen`
 * tokens are read, as counted from the first unit's first one; the others are zeros.
 */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_by_dims(uint32_t dst, uint64_t row, int first_lane,
                                                    int64_t step, int seen, const void *anywhere)
{
    constexpr int UNIT = 8 * BYTES;
    int lane = threadIdx.x & 31, half = lane & 1;
    uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + half * 8);
    int read = from ? min(max(seen - half * 8, 0), 8) * BYTES : 0;
#pragma unroll BYTES
    for (int n = lane; n < 2 * DIMS; n += 32)
        cp_async<UNIT, UNIT == 16 ? 128 : 0>(
            dst + n * UNIT, from ? (const void *)(from + n / 2 * step) : anywhere, read);
}

/* A tile of an x-packed cache that does not come in bulk. */
template <int DIMS, int KV, folioi_cuda_form FORM>
static __device__ __forceinline__ void copy_xpacked(const decode_args &a, const cursor &c,
                                                    uint32_t dst, int block, bool valid,
                                                    int kv_head)
{
    constexpr int BYTES = kv_size(KV);
    int lane = threadIdx.x & 31, seen = c.high - c.tile;
    bool by_dims = FORM == FOLIOI_FORM_XPACKED_1 || lane >= 16;
    if (by_dims) valid = is_read(true, c.tile + (lane & 15), c.low, c.high);
    uint64_t row = row_address<KV>(a, c, block, valid, kv_head, lane);
    const folioi_cuda_side &k = a.layer.k, &v = a.layer.v;
    if (FORM == FOLIOI_FORM_XPACKED)
        copy_packs<DIMS, BYTES>(dst, row, k.at.dim_tile_stride * BYTES, k.base);
    else copy_by_dims<DIMS, BYTES>(dst, row, 0, k.at.dim_tile_stride * BYTES, seen, k.base);
    copy_by_dims<DIMS, BYTES>(dst + fixed_value(DIMS, BYTES, FORM), row, 16,
                              v.at.dim_tile_stride * BYTES, seen, v.base);
}

/* A native page: it lies in the tile as it lies in memory. Tokens outside of [low, high) are zeros; token `but` is not copied. */
template <int DIMS>
static __device__ __forceinline__ void copy_page(uint32_t dst, const char *from, int tile, int low,
                                                 int high, int but)
{
    constexpr int COPIES = 16 * DIMS * 2 * 2 / 512;
    int lane = threadIdx.x & 31;
#pragma unroll 4
    for (int i = 0; i < COPIES; i++) {
        int token = tile + i / (COPIES / 2) * 8 + (4 * i + lane / 8) % 8, at = 512 * i + 16 * lane;
        if (token != but)
            cp_async<16, 128>(dst + at, from + at, token >= low && token < high ? 16 : 0);
    }
}

/*
 * Is this tile copied in bulk? Both its copies and its wait depend on it. If new rows are to be stored, the last tile of an
 * item is not: it may have one (put_new_row).
 */
template <int KV, folioi_cuda_form FORM, bool STORES>
static __device__ __forceinline__ bool comes_in_bulk(const decode_args &a, int tile, int low,
                                                     int high)
{
    if (!HAS_BULK_COPIES || KV == 0) return false;
    if (FORM == FOLIOI_FORM_ROWS && !(KV == FOLIO_F32 ? a.bulk : a.has_boxes)) return false;
    if (is_xpacked(FORM) && !a.bulk) return false;
    return tile >= low && tile + 16 + (STORES && a.stores) <= high;
}

/* Scales of a tile in one block: 16 of K, then of V. */
static __device__ __forceinline__ void copy_scales_bulk(const decode_args &a, int block,
                                                        int in_block, uint32_t dst,
                                                        uint32_t barrier, int kv_head)
{
    int first = block * a.boxes.scale_block + kv_head * a.boxes.scale_head + in_block;
    bulk_copy(dst, a.layer.k.scales + first, 64, barrier);
    bulk_copy(dst + 64, a.layer.v.scales + first, 64, barrier);
}

/* Bulk copies of a tile that lies in one block: K and V, which are contiguous there, a page, or boxes of rows. */
template <int DIMS, int KV, folioi_cuda_form FORM>
static __device__ __forceinline__ void copy_block_bulk(const decode_args &a, int block,
                                                       int in_block, uint32_t dst, uint32_t scales,
                                                       uint32_t barrier, int kv_head)
{
    if constexpr (HAS_BULK_COPIES) {
        constexpr int BYTES = kv_size(KV);
        constexpr bool SCALED = KV == FOLIO_INT8 && FORM == FOLIOI_FORM_ROWS;
        constexpr int HALF = 16 * DIMS * BYTES;
        constexpr bool ONE = FORM == FOLIOI_FORM_PAGES;
        if ((threadIdx.x & 31) != 0) return;
        bulk_expect(barrier, 2 * HALF + (SCALED ? 128 : 0));
        if (SCALED) copy_scales_bulk(a, block, in_block, scales, barrier, kv_head);
        if (FORM == FOLIOI_FORM_ROWS && KV != FOLIO_F32) {
            copy_box(dst, a.boxes.k, block, in_block, kv_head, barrier);
            copy_box(dst + HALF, a.boxes.v, block, in_block, kv_head, barrier);
            return;
        }
        const char *k = tile_start<BYTES, FORM>(a.layer.k, block, in_block, kv_head);
        bulk_copy(dst, k, ONE ? 2 * HALF : HALF, barrier);
        if (ONE) return;
        const char *v = tile_start<BYTES, FORM>(a.layer.v, block, in_block, kv_head);
        bulk_copy(dst + HALF, v, HALF, barrier);
    }
}

/* ---- new rows, in pages: who has the tile of a sequence's new row takes it as it was given, and stores it ---- */

enum { NO_KEY = -1 };

/* The key that is a sequence's new row, if a tile of an item has it and it is to be stored. It is the sequence's last. */
static __device__ __forceinline__ int new_key_of(const folioi_decode_item &item, int tile)
{
    int key = item.sequence.key_len - 1;
    bool is_here = key >= max(tile, item.begin) && key < min(tile + 16, item.end);
    return is_here && item.slot >= 0 ? key : NO_KEY;
}

/* Unit n of 16 bytes of a page's token, K then V: where it lies in the page. */
template <int DIMS> static __device__ __forceinline__ int page_byte(int token, int n)
{
    constexpr int UNITS = DIMS / 8;
    int side = n >= UNITS, in_half = side * UNITS * 128 + (token & 7) * 128;
    return (token >> 3) * UNITS * 256 + in_half + row_byte(true, token, (n - side * UNITS) * 16);
}

/* Unit n of a new row in k, then in v. */
template <int DIMS>
static __device__ __forceinline__ const char *new_unit(const decode_args &a, int64_t row,
                                                       int kv_head, int n)
{
    const folioi_cuda_rows &rows = n < DIMS / 8 ? a.layer.new_k : a.layer.new_v;
    const char *from = (const char *)rows.data + 2 * (row * rows.token + kv_head * rows.head);
    return from + n % (DIMS / 8) * 16;
}

/*
 * A new row to its place in a page: in shared memory, and in the cache. Short and inlined: it runs once, and code that is far
 * away takes longer to come than the row.
 */
template <int DIMS, class A, class C>
static __device__ __forceinline__ void put_new_row(const A &a, C &c, int64_t row, int token,
                                                   int kv_head, uint32_t page, char *stored)
{
    await_kernels_ahead();
#pragma unroll
    for (int first = 0; first < DIMS / 4; first += 32) {
        int n = first + (threadIdx.x & 31);
        if (n >= DIMS / 4) break;
        uint4 x = *(const uint4 *)new_unit<DIMS>(a, row, kv_head, n);
        int at = page_byte<DIMS>(token, n);
        store_shared(page + at, x);
        *(uint4 *)(stored + at) = x;
        if constexpr (A::NOTES) /* a call would need registers here: see note_new_rows */
            if (is_bad_unit(x, a.layer.dtype == FOLIO_BF16))
                c.bad = max(c.bad, INT32_MAX - (int)row);
    }
}

/* The block's end. A lane had units of K or of V: of heads of 64 and 128 it has one of each row. */
template <int DIMS>
static __device__ __forceinline__ void note_new_rows(const noted_args &a, const noted_cursor &c,
                                                     int kv_head)
{
    static_assert(DIMS <= 128, "a lane would have two units");
    int what = (int)(threadIdx.x & 31) < DIMS / 8 ? FOLIO_WRITTEN_K : FOLIO_WRITTEN_V;
    if (c.bad > 0) note_bad(a.noting, what, INT32_MAX - c.bad, kv_head);
}

/* The new row of a sequence that does not see it: its first part's block stores it. Rare. */
template <int DIMS, class A>
static __device__ __noinline__ void store_unseen_row(const A &a, const folioi_decode_item &item,
                                                     int kv_head)
{
    if (item.slot < 0) return;
    int block = (int)(item.slot / a.layer.block_size);
    int token = (int)(item.slot % a.layer.block_size);
    char *to = (char *)tile_start<2, FOLIOI_FORM_PAGES>(a.layer.k, block, token & ~15, kv_head);
    for (int n = threadIdx.x & 31; n < DIMS / 4; n += 32) {
        uint4 x = *(const uint4 *)new_unit<DIMS>(a, item.sequence.new_row, kv_head, n);
        *(uint4 *)(to + page_byte<DIMS>(token & 15, n)) = x;
        if constexpr (A::NOTES)
            if (is_bad_unit(x, a.layer.dtype == FOLIO_BF16))
                note_bad(a.noting, n < DIMS / 8 ? FOLIO_WRITTEN_K : FOLIO_WRITTEN_V,
                         item.sequence.new_row, kv_head);
    }
}

/* Scales of a tile's K, then of its V; 0 for tokens that nobody sees. In fixed instances K and V have the same strides. */
template <int KV>
static __device__ __forceinline__ void copy_scales(const decode_args &a, const cursor &c,
                                                   uint32_t dst, int block, bool valid, int kv_head)
{
    int lane = threadIdx.x & 31;
    const folioi_address &at = KV || lane < 16 ? a.layer.k.scales_at : a.layer.v.scales_at;
    const float *from = lane >= 16 ? a.layer.v.scales : a.layer.k.scales;
    if (valid)
        from += block * at.block + kv_head * at.head + (int64_t)c.in_block * at.token_tile_stride;
    cp_async<4>(dst + 4 * lane, from, valid ? 4 : 0);
}

/* The copies of a fixed tile. */
template <int DIMS, int KV, folioi_cuda_form FORM, bool STORES, class A, class C>
static __device__ __forceinline__ void copy_fixed(const A &a, C &c, const block_shared &sh,
                                                  uint32_t dst, uint32_t scales, uint32_t barrier,
                                                  int block, bool valid, int kv_head)
{
    constexpr int BYTES = kv_size(KV);
    const folioi_cuda_side &k = a.layer.k, &v = a.layer.v;
    uint32_t v_dst = dst + fixed_value(DIMS, BYTES, FORM);
    int in_block = c.in_block - (threadIdx.x & 15);
    if (comes_in_bulk<KV, FORM, STORES>(a, c.tile, c.low, c.high)) {
        if (HAS_BULK_COPIES && c.wrote) bulk_fence();
        c.wrote = false;
        copy_block_bulk<DIMS, KV, FORM>(a, block, in_block, dst, scales, barrier, kv_head);
        if (KV == FOLIO_INT8 && FORM != FOLIOI_FORM_ROWS)
            copy_scales<KV>(a, c, scales, block, valid, kv_head);
        return;
    }
    c.wrote = true;
    if constexpr (KV == FOLIO_INT8) copy_scales<KV>(a, c, scales, block, valid, kv_head);
    if constexpr (is_xpacked(FORM)) {
        copy_xpacked<DIMS, KV, FORM>(a, c, dst, block, valid, kv_head);
    } else if constexpr (FORM == FOLIOI_FORM_PAGES) {
        const char *from = tile_start<BYTES, FORM>(k, block, in_block, kv_head);
        int new_key = NO_KEY;
        if (STORES && a.stores) new_key = new_key_of(*item_at(a, sh, c.item), c.tile);
        copy_page<DIMS>(dst, from, c.tile, c.low, c.high, new_key);
        if (STORES && new_key != NO_KEY)
            put_new_row<DIMS>(a, c, item_at(a, sh, c.item)->sequence.new_row, new_key & 15, kv_head,
                              dst, (char *)from);
    } else if ((!HAS_BULK_COPIES || KV == FOLIO_F32) && a.one_block_tiles && c.tile >= c.low &&
               c.tile + 16 <= c.high) {
        const char *k_from = tile_start<BYTES, FORM>(k, block, in_block, kv_head);
        const char *v_from = tile_start<BYTES, FORM>(v, block, in_block, kv_head);
        if (a.bulk) {
            copy_block_fixed<DIMS, BYTES, DIMS * BYTES>(dst, k_from, 0);
            copy_block_fixed<DIMS, BYTES, DIMS * BYTES>(v_dst, v_from, 0);
        } else {
            copy_block_fixed<DIMS, BYTES, 0>(dst, k_from, BYTES * k.at.token_tile_stride);
            copy_block_fixed<DIMS, BYTES, 0>(v_dst, v_from, BYTES * v.at.token_tile_stride);
        }
    } else {
        uint64_t row = row_address<KV>(a, c, block, valid, kv_head, threadIdx.x & 31);
        copy_rows_fixed<DIMS, BYTES>(a, dst, row, 0);
        copy_rows_fixed<DIMS, BYTES>(a, v_dst, row, 16);
    }
}

/* ---- a stage ---- */

/* Start the copies of the cursor's tile into a stage, as one batch, and move on. */
template <int DIMS, int KV, folioi_cuda_form FORM, bool STORES, class A, class C>
static __device__ __forceinline__ void fetch(const A &a, C &c, const block_shared &sh, int stage,
                                             int kv_head, int warp, int first_row)
{
    int lane = threadIdx.x & 31;
    int token = c.tile + (lane & 15);
    int low = c.low, high = c.high;
    if (!KV) {
        if (c.fresh) low = max(low, c.fresh_at);
        else high = min(high, c.fresh_at);
    }
    bool valid = token >= low && token < high;
    uint32_t dst = shared_address(sh.stages) + stage * a.stage_bytes;
    uint32_t scales = shared_address(sh.scales + stage * 32);
    if constexpr (KV != 0) {
        int block = c.block;
        if (a.one_block_tiles) {
            block = __shfl_sync(ALL_LANES, c.blocks, c.num_used++);
            c.in_block = token - block_index(a, token) * a.layer.block_size;
        }
        copy_fixed<DIMS, KV, FORM, STORES>(
            a, c, sh, dst, scales, shared_address(sh.barriers + stage), block, valid, kv_head);
    } else {
        bool by_dims = a.xpacked && !c.fresh && (lane >= 16 || a.k_by_dims);
        bool read = is_read(by_dims, token, low, high);
        copy_flexible(a, c, dst, row_address<KV>(a, c, c.block, read, kv_head, lane));
        if (a.layer.k.scales != NULL && !c.fresh)
            copy_scales<KV>(a, c, scales, c.block, valid, kv_head);
        if (lane == 0) {
            tile_note note = {2 * c.item + c.fresh, c.tile, low, high};
            *(int4 *)&sh.notes[stage] = *(int4 *)&note;
        }
    }
    cp_async_commit();
    step_cursor<KV>(a, sh, c, warp, first_row);
    ask_block<KV>(a, sh, c, lane);
}

/* Wait for the oldest of `filled` stages. FEW: there are three stages, or it does not matter to wait for more. */
template <bool FEW> static __device__ __forceinline__ void wait_stage(int filled)
{
    if (FEW && filled > 2) cp_async_wait<2>();
    else if (FEW && filled == 2) cp_async_wait<1>();
    else if (FEW) cp_async_wait<0>();
    else switch (filled) {
        case 1: cp_async_wait<0>(); break;
        case 2: cp_async_wait<1>(); break;
        case 3: cp_async_wait<2>(); break;
        case 4: cp_async_wait<3>(); break;
        case 5: cp_async_wait<4>(); break;
        default: cp_async_wait<5>(); break;
        }
    __syncwarp();
}

#endif
