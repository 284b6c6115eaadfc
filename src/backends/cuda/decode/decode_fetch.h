/*
 * decode_fetch.h: tiles on their way to shared memory. A warp goes through the tiles of its block's items with a cursor and
 * starts the copies of each into the next free stage; the number of a tile's block is asked for one tile ahead.
 */
#ifndef FOLIOI_DECODE_FETCH_H
#define FOLIOI_DECODE_FETCH_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/stored_rows.h"
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
};

/* ---- the cursor ---- */

/* The number of entry `index` of the cursor's table, which has the tile; of the first tiles it came with the slot. */
static __device__ __forceinline__ int block_of(const decode_args &a, const block_shared &sh,
                                               const cursor &c, int tile, int index)
{
    if (a.one_block_tiles && c.item == sh.slot->begin) {
        int kept = (tile >> 4) - (c.low >> 4);
        if (kept < FOLIOI_DECODE_TILES) return sh.slot->blocks[kept];
    }
    return __ldg(a.blocks + c.table + index);
}

/* Ask for the block number of this lane's token of the cursor's tile; it is used one tile later. */
template <int PLAIN>
static __device__ __forceinline__ void ask_block(const decode_args &a, const block_shared &sh,
                                                 cursor &c, int lane)
{
    int token = c.tile + (lane & 15);
    if (c.item >= c.item_end || token < c.low || token >= c.high) return;
    if (!PLAIN && (c.fresh || token >= c.fresh_at)) return;
    int index = a.block_shift >= 0 ? token >> a.block_shift : token / a.layer.block_size;
    c.in_block = token - index * a.layer.block_size;
    c.block = block_of(a, sh, c, c.tile, index);
}

/* Go on from item c.item to the first one that has a tile for this warp. */
template <int PLAIN>
static __device__ __forceinline__ void seek_item(const decode_args &a, const block_shared &sh,
                                                 cursor &c, int warp, int first_row)
{
    for (; c.item < c.item_end; c.item++) {
        const folioi_decode_item *item = item_at(a, sh, c.item);
        c.low = item->begin;
        c.high = item->end;
        int first = c.low >> 4;
        int ahead = warp - (first - (int)__umulhi(first, a.warps_inverse) * a.num_warps);
        c.tile = (first + (ahead < 0 ? ahead + a.num_warps : ahead)) << 4;
        if (c.tile >= c.high) continue;
        const folioi_cuda_seq *s = &item->sequence;
        if (first_row >= s->query_len * a.group) continue;
        c.table = s->table;
        if (!PLAIN) {
            c.new_row = s->new_row - s->context_len;
            c.fresh_at = !a.layer.cached ? 0 : a.layer.append ? s->context_len : INT32_MAX;
            c.fresh = max(c.tile, c.low) >= c.fresh_at;
        }
        return;
    }
}

/* A tile with cached and new tokens is visited twice. */
template <int PLAIN>
static __device__ __forceinline__ void step_cursor(const decode_args &a, const block_shared &sh,
                                                   cursor &c, int warp, int first_row)
{
    if (!PLAIN && !c.fresh && c.fresh_at < c.tile + 16 && c.fresh_at < c.high) {
        c.fresh = true;
        return;
    }
    c.tile += 16 * a.num_warps;
    if (!PLAIN) c.fresh = c.tile >= c.fresh_at;
    if (c.tile < c.high) return;
    c.item++;
    seek_item<PLAIN>(a, sh, c, warp, first_row);
}

/* ---- tiles of the general instances ---- */

/* Address of this lane's row, K in lanes 0-15 and V in 16-31; 0: nobody sees the token. */
template <int PLAIN>
static __device__ __forceinline__ uint64_t row_address(const decode_args &a, const cursor &c,
                                                       int token, bool valid, int kv_head, int lane)
{
    if (!valid) return 0;
    bool is_v = lane >= 16;
    if (!PLAIN && c.fresh) {
        const folioi_cuda_rows &rows = is_v ? a.layer.new_v : a.layer.new_k;
        return (uint64_t)rows.data + 2 * ((c.new_row + token) * rows.token + kv_head * rows.head);
    }
    const folioi_cuda_side &side = is_v ? a.layer.v : a.layer.k;
    return (uint64_t)side.base + stored_row(side.at, c.block, kv_head, c.in_block) * a.kv_bytes;
}

/*
 * Rows whose alignment no cp_async takes, and new rows beside an 8-bit cache, whose V must come in the order of dims that
 * 8-bit fragments have: even dims of 16 first.
 */
static __device__ __noinline__ void copy_rows_slowly(uint32_t dst, int stride, uint64_t row,
                                                     int dims, int bytes, bool paged, bool turn,
                                                     int first_lane)
{
    int lane = threadIdx.x & 31;
    for (int t = 0; t < 16; t++) {
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        for (int d = lane; d < dims; d += 32) {
            int at = turn ? (d & ~15) + (d & 1) * 8 + (d & 15) / 2 : d;
            uint32_t to = dst + t * stride + at * bytes;
            if (bytes == 2) {
                const uint16_t *x = (const uint16_t *)(from + row_byte(paged, t, d * 2));
                store_shared_u16(to, from ? *x : (uint16_t)0);
            } else {
                store_shared_u8(to, from ? ((const uint8_t *)from)[d] : (uint8_t)0);
            }
        }
    }
}

/* 16 rows of `copies` copies each: lane first_lane + t holds the address of row t, 0 where it is zeros. */
template <int BYTES>
static __device__ __forceinline__ void copy_rows(uint32_t dst, int stride, uint64_t row, int copies,
                                                 uint32_t inverse, int first_lane, bool paged,
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
                from ? (const void *)(from + row_byte(paged, t, at)) : anywhere, from ? BYTES : 0);
    }
}

static __device__ __forceinline__ void copy_general(const decode_args &a, const cursor &c,
                                                    uint32_t dst, uint64_t row)
{
    const folioi_cuda_layer &y = a.layer;
    uint32_t v_dst = dst + 16 * a.k_stride;
    bool turned = c.fresh && a.kv_bytes == 1, paged = a.paged && !c.fresh;
    int lane = threadIdx.x & 31;
    /* new rows of 16 bits left numbers where the last fragment of a row of 8 bits reads zeros */
    if (a.kv_bytes == 1 && y.append && !c.fresh && y.k_dims % 16 != 0 && lane < 16)
        asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(dst + lane * a.k_stride + y.k_dims),
                     "r"(0)
                     : "memory");
    if (turned || a.copy_bytes < 4) {
        int bytes = c.fresh ? 2 : a.kv_bytes;
        copy_rows_slowly(dst, a.k_stride, row, y.k_dims, bytes, paged, false, 0);
        copy_rows_slowly(v_dst, a.v_stride, row, y.v_dims, bytes, paged, turned, 16);
    } else if (a.copy_bytes == 16) {
        copy_rows<16>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, paged, y.q.data);
        copy_rows<16>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, paged, y.q.data);
    } else if (a.copy_bytes == 8) {
        copy_rows<8>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, paged, y.q.data);
        copy_rows<8>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, paged, y.q.data);
    } else {
        copy_rows<4>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, paged, y.q.data);
        copy_rows<4>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, paged, y.q.data);
    }
}

/* ---- tiles of the plain instances ---- */

/* Where chunk c of token t lies in K or V of a plain tile. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ int place_in_tile(const decode_args &a, int t, int c)
{
    return plain_packed(DIMS, BYTES) ? packed_place(a.packed, t, c)
                                     : plain_place<DIMS, BYTES>(t, c);
}

/* The same to a plain tile. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_rows_plain(const decode_args &a, uint32_t dst,
                                                       uint64_t row, int first_lane)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int i = 0; i < 16 * COPIES; i += 32) {
        int n = i + lane, t = n / COPIES, at = n % COPIES;
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        const void *anywhere = a.layer.k.base;
        cp_async<16, 128>(dst + place_in_tile<DIMS, BYTES>(a, t, at),
                          from ? (const void *)(from + row_byte(a.paged, t, at * 16)) : anywhere,
                          from ? 16 : 0);
    }
}

/* 16 rows of one block, all of them seen; base: of the first. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_block_plain(const decode_args &a, uint32_t dst,
                                                        const char *base, const folioi_address &at)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    constexpr int ROWS = 32 / COPIES;
    int lane = threadIdx.x & 31, mine = lane / COPIES, chunk = lane % COPIES;
    bool paged = BYTES == 2 && a.paged;
    int64_t row = BYTES * (paged ? at.token_stride : at.token_tile_stride);
    int64_t eight = paged ? BYTES * at.token_tile_stride : 8 * row;
    uint32_t skip = (uint32_t)row_byte(paged, mine, chunk * 16), turn = paged ? 7 : 0;
    base += mine * row;
#pragma unroll
    for (int t = 0; t < 16; t += ROWS)
        cp_async<16, 128>(dst + place_in_tile<DIMS, BYTES>(a, t + mine, chunk),
                          base + t / 8 * eight + t % 8 * row + (skip ^ (t & turn) << 4));
}

/* Does this tile come by bulk copies? Its copies and its use both ask. */
template <int DIMS, int PLAIN>
static __device__ __forceinline__ bool comes_in_bulk(const decode_args &a, int tile, int low,
                                                     int high)
{
    if (!HAS_BULK_COPIES || (PLAIN != FOLIO_F16 && PLAIN != FOLIO_BF16)) return false;
    return plain_packed(DIMS, 2) && a.bulk && tile >= low && tile + 16 <= high;
}

/* First row of a tile that lies in one block. */
template <int BYTES>
static __device__ __forceinline__ const char *block_row(const folioi_cuda_side &side, int block,
                                                        int in_block, int kv_head)
{
    return side.base + BYTES * stored_row(side.at, block, kv_head, in_block);
}

/* Bulk copies of a tile that lies in one block: lane 0 takes K and lane 1 V of plain rows, or each half of a page. */
template <int DIMS>
static __device__ __forceinline__ void copy_block_bulk(const decode_args &a, cursor &c,
                                                       uint32_t dst, uint32_t barrier, int kv_head)
{
    if constexpr (HAS_BULK_COPIES) {
        constexpr int HALF = 16 * DIMS * 2;
        int lane = threadIdx.x & 31;
        if (c.wrote) bulk_fence();
        c.wrote = false;
        if (lane == 0) bulk_expect(barrier, 2 * HALF);
        __syncwarp();
        if (lane < 2) {
            const folioi_cuda_side &side = lane == 1 && !a.paged ? a.layer.v : a.layer.k;
            const char *from = block_row<2>(side, c.block, c.in_block - lane, kv_head);
            if (a.paged) from += lane * HALF;
            bulk_copy(dst + lane * HALF, from, HALF, barrier);
        }
    }
}

/* ---- a stage ---- */

/* Scales of a tile's K, then of its V: 0 where nobody sees the token. */
static __device__ __forceinline__ void copy_scales(const decode_args &a, const cursor &c,
                                                   const block_shared &sh, int stage, bool valid,
                                                   int kv_head)
{
    int lane = threadIdx.x & 31;
    const folioi_cuda_side &side = lane >= 16 ? a.layer.v : a.layer.k;
    const float *from = side.scales;
    if (valid)
        from += c.block * side.scales_at.block + kv_head * side.scales_at.head +
                (int64_t)c.in_block * side.scales_at.token_tile_stride;
    cp_async<4>(shared_address(sh.scales + stage * 32 + lane), from, valid ? 4 : 0);
}

/* Start the copies of the cursor's tile into a stage, as one group, and move on. */
template <int DIMS, int PLAIN>
static __device__ __forceinline__ void fetch(const decode_args &a, cursor &c,
                                             const block_shared &sh, int stage, int kv_head,
                                             int warp, int first_row)
{
    int lane = threadIdx.x & 31;
    int token = c.tile + (lane & 15);
    int low = c.low, high = c.high;
    if (!PLAIN) {
        if (c.fresh) low = max(low, c.fresh_at);
        else high = min(high, c.fresh_at);
    }
    bool valid = token >= low && token < high;
    uint32_t dst = shared_address(sh.stages) + stage * a.stage_bytes;
    if constexpr (PLAIN != 0) {
        constexpr int BYTES = PLAIN == FOLIO_F16 || PLAIN == FOLIO_BF16 ? 2 : 1;
        uint32_t v_dst =
            dst + (plain_packed(DIMS, BYTES) ? a.packed.value : 16 * plain_stride<DIMS, BYTES>());
        if constexpr (PLAIN == FOLIO_INT8) copy_scales(a, c, sh, stage, valid, kv_head);
        if (comes_in_bulk<DIMS, PLAIN>(a, c.tile, low, high)) {
            copy_block_bulk<DIMS>(a, c, dst, shared_address(sh.barriers + stage), kv_head);
        } else if (a.one_block_tiles && c.tile >= low && c.tile + 16 <= high) {
            int in_block = c.in_block - (lane & 15);
            const char *k = block_row<BYTES>(a.layer.k, c.block, in_block, kv_head);
            const char *v = block_row<BYTES>(a.layer.v, c.block, in_block, kv_head);
            copy_block_plain<DIMS, BYTES>(a, dst, k, a.layer.k.at);
            copy_block_plain<DIMS, BYTES>(a, v_dst, v, a.layer.v.at);
        } else {
            uint64_t row = row_address<PLAIN>(a, c, token, valid, kv_head, lane);
            copy_rows_plain<DIMS, BYTES>(a, dst, row, 0);
            copy_rows_plain<DIMS, BYTES>(a, v_dst, row, 16);
            c.wrote = true;
        }
    } else {
        copy_general(a, c, dst, row_address<PLAIN>(a, c, token, valid, kv_head, lane));
        if (a.layer.k.scales != NULL && !c.fresh) copy_scales(a, c, sh, stage, valid, kv_head);
    }
    cp_async_commit();
    if (lane == 0) {
        tile_note note = {2 * c.item + (!PLAIN && c.fresh), c.tile, low, high};
        *(int4 *)&sh.notes[stage] = *(int4 *)&note;
    }
    step_cursor<PLAIN>(a, sh, c, warp, first_row);
    ask_block<PLAIN>(a, sh, c, lane);
}

/* Wait for the oldest of `filled` stages. */
static __device__ __forceinline__ void wait_stage(int filled)
{
    switch (filled) {
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
