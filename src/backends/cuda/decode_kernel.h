/*
 * decode_kernel.h: attention of few rows. A block is one slot of the schedule and one kv head; each of
 * its warps streams tiles of 16 tokens of its own through a ring of stages in shared memory, with no
 * barrier until an item ends:
 *
 *   S^T[16 tokens][8 or 16 rows] = K Q^T        K by ldmatrix
 *   O^T[dims][rows] += V^T P^T                  V by ldmatrix.trans, P turned by movmatrix
 *
 * Then the warps add up in their order, and the last block of a split sequence adds up its parts in
 * theirs. PLAIN instances know type and head size; the other ones take every option at run time.
 */
#ifndef FOLIOI_DECODE_KERNEL_H
#define FOLIOI_DECODE_KERNEL_H

#include "backends/cuda/decode.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

#define MAX_WARPS 8
#define STAGE_ALIGN 128 /* bulk copies are slower to other places */

typedef struct decode_args {
    folioi_cuda_layer layer;
    const int32_t *blocks;
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs;
    const int32_t *slot_begin;
    const folioi_decode_item *items;
    int32_t *counters; /* [seq][kv head][row block] */
    float *partials;   /* [store][kv head][max_rows][v_dims], then m and l, each [max_rows] */
    int64_t out_rows;
    int32_t max_rows, row_blocks, group, num_warps, num_stages;
    int32_t k_stride, v_stride, stage_bytes; /* in shared memory, bytes */
    int32_t copy_bytes, kv_bytes;
    int32_t k_copies, v_copies; /* copies per row */
    uint32_t k_inverse, v_inverse;
    int32_t q_stride, out_stride; /* in shared memory: halves, floats */
    int32_t out_copies, out_size; /* warps add up in so many copies of out; floats of one */
    int32_t block_shift;          /* block_size is 1 << block_shift; -1: it is no power of two */
    int32_t one_block_tiles;      /* no tile lies in two blocks */
    int32_t bulk;      /* rows of a block lie one after another: bulk copies can take them */
    int32_t out_quads; /* four numbers of out can be stored at once */
} decode_args;

/* One lane's view of the next tile its warp will fetch. */
struct cursor {
    int item, item_end;  /* equal: no tile is left */
    int tile;            /* its first key            */
    int low, high;       /* keys of the item        */
    int fresh_at;        /* keys from here on are new rows */
    bool fresh;          /* this visit reads those   */
    int block, in_block; /* of this lane's token */
    int64_t table, new_row;
    bool wrote; /* threads wrote to the stages since the last bulk copy */
};

/* Rows of an item as one thread of the S^T fragment sees them: row 8 * n + 2 * (lane % 4) + e at [2 * n + e]. */
template <int NT> struct row_state {
    float m[2 * NT], l[2 * NT];
    int begin[2 * NT], end[2 * NT];
};

/* What a tile in shared memory is; written with its copies, read when they have landed. */
struct tile_note {
    int item2; /* 2 * item + fresh */
    int tile, low, high;
};

/* The first items of a block are kept in shared memory. */
#define MAX_ENTRIES 8
static_assert(sizeof(folioi_decode_item) % 16 == 0, "items are copied in 16 bytes");

struct block_shared {
    folioi_decode_item *entries;
    int item_begin;
    float *out;             /* [rows][out_stride]                      */
    float *warp_m, *warp_l; /* [MAX_WARPS][16]                        */
    uint16_t *q;            /* [3][16][q_stride]: as given; in the cache's type; what that lost */
    float *q_factor;        /* [16] */
    int *flag;
    char *stages;       /* this warp's */
    tile_note *notes;   /* this warp's */
    uint64_t *barriers; /* this warp's, one per stage: ends of bulk copies */
    float *scales;      /* this warp's: [stage][32], K then V */
};

static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}

/* What scores are compared with: their maximum, or 0 where there is none yet. */
static __device__ __forceinline__ float exp_base(float m) { return m == -INFINITY ? 0.0f : m; }

/* e^(x - base). The difference comes first: log2(e) times a score of 3e38 would be infinite. */
static __device__ __forceinline__ float exp_to(float x, float base)
{
    return exp2_approx((x - base) * LOG2E);
}

static __device__ __forceinline__ const folioi_decode_item *item_at(const decode_args &a,
                                                                    const block_shared &sh, int n)
{
    int kept = n - sh.item_begin;
    return kept < MAX_ENTRIES ? &sh.entries[kept] : &a.items[n];
}

/* ------------------------------------------------------------------ fetching tiles */

/* Ask for the block number of this lane's token of the cursor's tile; it is used one tile later. */
template <int PLAIN>
static __device__ __forceinline__ void ask_block(const decode_args &a, cursor &c, int lane)
{
    int token = c.tile + (lane & 15);
    if (c.item >= c.item_end || token < c.low || token >= c.high) return;
    if (!PLAIN && (c.fresh || token >= c.fresh_at)) return;
    int index = a.block_shift >= 0 ? token >> a.block_shift : token / a.layer.block_size;
    c.in_block = token - index * a.layer.block_size;
    c.block = __ldg(a.blocks + c.table + index);
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
        int ahead = (warp - first) % a.num_warps;
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

/* Rows whose alignment no copy_async takes, and new rows beside an 8-bit cache, whose V must come in the
 * order of dims that 8-bit fragments have: even dims of 16 first. */
static __device__ __noinline__ void copy_rows_slowly(uint32_t dst, int stride, uint64_t row,
                                                     int dims, int bytes, bool turn, int first_lane)
{
    int lane = threadIdx.x & 31;
    for (int t = 0; t < 16; t++) {
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        for (int d = lane; d < dims; d += 32) {
            int at = turn ? (d & ~15) + (d & 1) * 8 + (d & 15) / 2 : d;
            uint32_t to = dst + t * stride + at * bytes;
            if (bytes == 2) {
                store_shared_u16(to, from ? ((const uint16_t *)from)[d] : (uint16_t)0);
            } else {
                store_shared_u8(to, from ? ((const uint8_t *)from)[d] : (uint8_t)0);
            }
        }
    }
}

template <int BYTES>
static __device__ __forceinline__ void copy_rows(uint32_t dst, int stride, uint64_t row, int copies,
                                                 uint32_t inverse, int first_lane,
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
            cp_async<BYTES, BYTES == 16 ? 128 : 0>(dst + t * stride + at,
                                                   from ? (const void *)(from + at) : anywhere,
                                                   from ? BYTES : 0);
    }
}

/* Bytes between rows of a plain tile: an odd number of 16-byte chunks, so that ldmatrix meets no bank twice. */
template <int DIMS, int BYTES> static __device__ constexpr int plain_stride()
{
    return DIMS * BYTES + 16;
}

/*
 * Do the rows of a plain tile lie side by side, as they do in a block of the cache? Then one bulk copy of 4 KB brings
 * K and one V. ldmatrix would meet a bank eight times there: fragments are made of 16-byte loads instead.
 */
static __device__ constexpr bool plain_packed(int dims, int bytes)
{
    return dims == 128 && bytes == 2;
}

/* Rows of 128 bytes lie side by side too, for ldmatrix: chunk c of row t is at place c ^ t % 8. */
static __device__ constexpr bool plain_swizzled(int dims, int bytes) { return dims * bytes == 128; }

/* Where 16-byte chunk c of token t of a plain tile lies. */
template <int DIMS, int BYTES> static __device__ __forceinline__ int plain_place(int t, int c)
{
    if (plain_packed(DIMS, BYTES)) return t * DIMS * BYTES + c * 16;
    if (plain_swizzled(DIMS, BYTES)) return t * 128 + (c ^ (t & 7)) * 16;
    return t * plain_stride<DIMS, BYTES>() + c * 16;
}

/* From the place of chunk 0 or 1 of a row to that of chunk 0 or 1 + c, c being even; tiles are at multiples of 128. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ uint32_t plain_step(uint32_t place, int c)
{
    return plain_swizzled(DIMS, BYTES) ? place ^ (uint32_t)(c * 16) : place + c * 16;
}

template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_rows_plain(uint32_t dst, uint64_t row, int first_lane,
                                                       const void *anywhere)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int i = 0; i < 16 * COPIES; i += 32) {
        int n = i + lane, t = n / COPIES, at = n % COPIES;
        uint64_t from = __shfl_sync(ALL_LANES, row, first_lane + t);
        cp_async<16, 128>(dst + plain_place<DIMS, BYTES>(t, at),
                          from ? (const void *)(from + at * 16) : anywhere, from ? 16 : 0);
    }
}

/* 16 rows of one block, all of them seen: rows are `step` bytes apart and `row` is this lane's first. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ void copy_block_plain(uint32_t dst, const char *row, int64_t step)
{
    constexpr int COPIES = DIMS * BYTES / 16;
    constexpr int ROWS = 32 / COPIES;
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < 16; t += ROWS, row += ROWS * step)
        cp_async<16, 128>(dst + plain_place<DIMS, BYTES>(t + lane / COPIES, lane % COPIES), row);
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
    return side.base + BYTES * (block * side.at.block + kv_head * side.at.head +
                                in_block * side.at.token_tile_stride);
}

/* Bulk copies of a tile that lies in one block: lane 0 takes K, lane 1 V. */
template <int DIMS>
static __device__ __forceinline__ void copy_block_bulk(const decode_args &a, cursor &c,
                                                       uint32_t dst, uint32_t barrier, int kv_head)
{
    if constexpr (HAS_BULK_COPIES) {
        int lane = threadIdx.x & 31;
        if (c.wrote) bulk_fence();
        c.wrote = false;
        if (lane == 0) bulk_expect(barrier, 2 * 16 * DIMS * 2);
        __syncwarp();
        if (lane < 2) {
            const folioi_cuda_side &side = lane == 1 ? a.layer.v : a.layer.k;
            const char *from = block_row<2>(side, c.block, c.in_block - lane, kv_head);
            bulk_copy(dst + lane * 16 * plain_stride<DIMS, 2>(), from, 16 * DIMS * 2, barrier);
        }
    }
}

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
    int64_t at = c.block * side.at.block + kv_head * side.at.head +
                 (int64_t)c.in_block * side.at.token_tile_stride;
    return (uint64_t)side.base + at * a.kv_bytes;
}

static __device__ __forceinline__ void copy_general(const decode_args &a, const cursor &c,
                                                    uint32_t dst, uint64_t row)
{
    const folioi_cuda_layer &y = a.layer;
    uint32_t v_dst = dst + 16 * a.k_stride;
    bool turned = c.fresh && a.kv_bytes == 1;
    if (turned || a.copy_bytes < 4) {
        int bytes = c.fresh ? 2 : a.kv_bytes;
        copy_rows_slowly(dst, a.k_stride, row, y.k_dims, bytes, false, 0);
        copy_rows_slowly(v_dst, a.v_stride, row, y.v_dims, bytes, turned, 16);
    } else if (a.copy_bytes == 16) {
        copy_rows<16>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, y.q.data);
        copy_rows<16>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, y.q.data);
    } else if (a.copy_bytes == 8) {
        copy_rows<8>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, y.q.data);
        copy_rows<8>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, y.q.data);
    } else {
        copy_rows<4>(dst, a.k_stride, row, a.k_copies, a.k_inverse, 0, y.q.data);
        copy_rows<4>(v_dst, a.v_stride, row, a.v_copies, a.v_inverse, 16, y.q.data);
    }
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
        constexpr int COPIES = DIMS * BYTES / 16;
        uint32_t v_dst = dst + 16 * plain_stride<DIMS, BYTES>();
        if (comes_in_bulk<DIMS, PLAIN>(a, c.tile, low, high)) {
            copy_block_bulk<DIMS>(a, c, dst, shared_address(sh.barriers + stage), kv_head);
        } else if (a.one_block_tiles && c.tile >= low && c.tile + 16 <= high) {
            int in_block = c.in_block - (lane & 15) + lane / COPIES;
            const char *k = block_row<BYTES>(a.layer.k, c.block, in_block, kv_head);
            const char *v = block_row<BYTES>(a.layer.v, c.block, in_block, kv_head);
            int at = lane % COPIES * 16;
            copy_block_plain<DIMS, BYTES>(dst, k + at, BYTES * a.layer.k.at.token_tile_stride);
            copy_block_plain<DIMS, BYTES>(v_dst, v + at, BYTES * a.layer.v.at.token_tile_stride);
        } else {
            uint64_t row = row_address<PLAIN>(a, c, token, valid, kv_head, lane);
            copy_rows_plain<DIMS, BYTES>(dst, row, 0, a.layer.k.base);
            copy_rows_plain<DIMS, BYTES>(v_dst, row, 16, a.layer.k.base);
            c.wrote = true;
        }
    } else {
        copy_general(a, c, dst, row_address<PLAIN>(a, c, token, valid, kv_head, lane));
        if (a.layer.k.scales != NULL && !c.fresh) {
            const folioi_cuda_side &side = lane >= 16 ? a.layer.v : a.layer.k;
            const float *from = side.scales;
            if (valid)
                from += c.block * side.scales_at.block + kv_head * side.scales_at.head +
                        (int64_t)c.in_block * side.scales_at.token_tile_stride;
            cp_async<4>(shared_address(sh.scales + stage * 32 + lane), from, valid ? 4 : 0);
        }
    }
    cp_async_commit();
    if (lane == 0) {
        tile_note note = {2 * c.item + (!PLAIN && c.fresh), c.tile, low, high};
        *(int4 *)&sh.notes[stage] = *(int4 *)&note;
    }
    step_cursor<PLAIN>(a, sh, c, warp, first_row);
    ask_block<PLAIN>(a, c, lane);
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

/* ------------------------------------------------------------------ rows of q */

/* Q fragments of the plain instances: q[dim step][n][2]. With packed tiles a thread has 8 dims side by side. */
template <int DIMS, int NT>
static __device__ __forceinline__ void load_q(const decode_args &a, const folioi_cuda_seq &s,
                                              int first_row, int kv_head,
                                              uint32_t q[DIMS / 16][NT][2])
{
    int lane = threadIdx.x & 31, t = lane & 3, rows = s.query_len * a.group - first_row;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int r = 8 * n + lane / 4;
        int i = (first_row + r) / a.group, h = kv_head * a.group + (first_row + r) % a.group;
        const uint16_t *from = (const uint16_t *)a.layer.q.data +
                               (s.query_row + i) * a.layer.q.token + h * a.layer.q.head;
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            int first = plain_packed(DIMS, 2) ? d / 2 * 32 + t * 8 + d % 2 * 4 : 16 * d + 2 * t;
            int second = first + (plain_packed(DIMS, 2) ? 2 : 8);
            q[d][n][0] = r < rows ? __ldg((const uint32_t *)(from + first)) : 0;
            q[d][n][1] = r < rows ? __ldg((const uint32_t *)(from + second)) : 0;
        }
    }
}

/* Does the cache compute in bf16? Every 8-bit type is exact in f16. */
static __device__ __forceinline__ bool cache_is_bf16(const decode_args &a)
{
    return a.layer.kv_dtype == FOLIO_BF16;
}

/*
 * q into shared memory: as given, and where the cache's type is another one in that type. bf16 fits f16
 * once a power of two brings the row's largest number near 1; f16 is the sum of two bf16.
 */
static __device__ __noinline__ void stage_q(const decode_args &a, const folioi_cuda_seq &s,
                                            int rows, int first_row, int kv_head, int forms,
                                            uint16_t *q, float *q_factor)
{
    int lane = threadIdx.x & 31, size = FOLIOI_DECODE_MAX_ROWS * a.q_stride;
    bool bf16 = a.layer.dtype == FOLIO_BF16;
    for (int r = threadIdx.x / 32; r < FOLIOI_DECODE_MAX_ROWS; r += a.num_warps) {
        int i = (first_row + r) / a.group, h = kv_head * a.group + (first_row + r) % a.group;
        const uint16_t *from = (const uint16_t *)a.layer.q.data +
                               (s.query_row + i) * a.layer.q.token + h * a.layer.q.head;
        uint16_t *to = q + r * a.q_stride;
        float largest = 0.0f;
        for (int d = lane; d < a.layer.k_dims && r < rows; d += 32)
            largest = fmaxf(largest, fabsf(half_bits_to_float(from[d], bf16)));
        largest = warp_max(largest);
        int e = 0;
        if (bf16 && largest > 0.0f && largest < INFINITY) e = max(-100, min(100, ilogbf(largest)));
        float by = exp2f((float)-e);
        for (int d = lane; d < a.q_stride; d += 32) {
            bool inside = d < a.layer.k_dims && r < rows;
            uint16_t bits = inside ? from[d] : (uint16_t)0;
            float x = half_bits_to_float(bits, bf16);
            to[d] = bits;
            if (forms == 1) continue;
            uint16_t high = float_to_half_bits(bf16 ? x * by : x, !bf16);
            to[d + size] = high;
            if (forms == 2) continue;
            float rest = x - half_bits_to_float(high, true);
            to[d + 2 * size] =
                bf16 || !(fabsf(x) < INFINITY) ? (uint16_t)0 : float_to_half_bits(rest, true);
        }
        if (lane == 0) q_factor[r] = exp2f((float)e);
    }
}

/* The same from shared memory, in the order of dims that 8-bit K has. */
template <int DIMS, int NT>
static __device__ __forceinline__ void load_q_turned(const uint16_t *q, int q_stride,
                                                     uint32_t out[DIMS / 16][NT][2])
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            uint2 b = *(const uint2 *)(q + (8 * n + lane / 4) * q_stride + 16 * d + 4 * (lane & 3));
            out[d][n][0] = b.x;
            out[d][n][1] = b.y;
        }
    }
}

/* ------------------------------------------------------------------ S^T = K Q^T */

template <typename T, int DIMS, int NT>
static __device__ __forceinline__ void scores_plain(float s[NT][4], uint32_t k_tile,
                                                    const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + plain_place<DIMS, 2>(lane & 15, lane >> 4);
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d++) {
        uint32_t k[4];
        ldmatrix(k, plain_step<DIMS, 2>(from, 2 * d));
        mma<T>(d % 2 ? odd : s[0], k, q[d][0][0], q[d][0][1]);
        if (NT > 1 && wide) mma<T>(s[NT - 1], k, q[d][NT - 1][0], q[d][NT - 1][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

/* The same of a packed tile: q in load_q's order of dims. */
template <typename T, int DIMS, int NT>
static __device__ __forceinline__ void scores_packed(float s[NT][4], uint32_t k_tile,
                                                     const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + lane / 4 * DIMS * 2 + (lane & 3) * 16;
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d += 2) {
        uint32_t low[4], high[4];
        load_shared(low, from + d * 32);
        load_shared(high, from + 8 * DIMS * 2 + d * 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t k[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
            mma<T>(half ? odd : s[0], k, q[d + half][0][0], q[d + half][0][1]);
            if (NT > 1 && wide)
                mma<T>(s[NT - 1], k, q[d + half][NT - 1][0], q[d + half][NT - 1][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

/* The same with q in shared memory. */
template <typename T, int NT>
static __device__ __forceinline__ void scores_16(float s[NT][4], uint32_t k_tile, int stride,
                                                 int steps, const uint16_t *q, int q_stride,
                                                 bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + (lane & 15) * stride + (lane >> 4) * 16;
    const uint16_t *mine = q + (lane / 4) * q_stride + 2 * (lane & 3);
#pragma unroll 4
    for (int d = 0; d < steps; d++) {
        uint32_t k[4];
        ldmatrix(k, from + d * 32);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint16_t *b = mine + n * 8 * q_stride + d * 16;
            if (n == 0 || wide) mma<T>(s[n], k, *(const uint32_t *)b, *(const uint32_t *)(b + 8));
        }
    }
}

/* The low two bytes of x as f16 numbers. */
template <int KIND> static __device__ __forceinline__ uint32_t widen(uint32_t x)
{
    if (KIND == FOLIO_FP8_E5M2) return e5m2_to_f16<0, 1>(x);
    if (KIND == FOLIO_INT8) return offset_int8_to_f16<0, 1>(x ^ 0x8080u);
#if __CUDA_ARCH__ >= 890
    return cvt_e4m3(x);
#else
    uint32_t wide = e5m2_to_f16<0, 1>(x), r = lift_e4m3(wide);
    if ((wide & 0x7f00u) == 0x7f00u) r |= 0x7fffu;
    if ((wide & 0x7f000000u) == 0x7f000000u) r |= 0x7fff0000u;
    return r;
#endif
}

template <int KIND, int DIMS, int NT>
static __device__ __forceinline__ void scores_plain_8(float s[NT][4], uint32_t k_tile,
                                                      const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + plain_place<DIMS, 1>(lane & 15, lane >> 4);
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d += 2) {
        uint32_t r[4];
        ldmatrix(r, plain_step<DIMS, 1>(from, d));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t k[4] = {widen<KIND>(r[2 * half]), widen<KIND>(r[2 * half + 1]),
                             widen<KIND>(r[2 * half] >> 16), widen<KIND>(r[2 * half + 1] >> 16)};
            mma<__half>(half ? odd : s[0], k, q[d + half][0][0], q[d + half][0][1]);
            if (NT > 1 && wide)
                mma<__half>(s[NT - 1], k, q[d + half][NT - 1][0], q[d + half][NT - 1][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

/* 8-bit K: a fragment register holds dims 4t..4t+3, so q is read in that order too. */
template <int KIND, int NT>
static __device__ __forceinline__ void scores_8(float s[NT][4], uint32_t k_tile, int stride,
                                                int steps, const uint16_t *q, int q_stride,
                                                bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + (lane & 15) * stride + (lane >> 4) * 16;
    const uint16_t *mine = q + (lane / 4) * q_stride + 4 * (lane & 3);
#pragma unroll 4
    for (int d = 0; d < steps; d += 2) {
        uint32_t r[4];
        ldmatrix(r, from + d * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (d + half >= steps) break;
            uint32_t k[4] = {widen<KIND>(r[2 * half]), widen<KIND>(r[2 * half + 1]),
                             widen<KIND>(r[2 * half] >> 16), widen<KIND>(r[2 * half + 1] >> 16)};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint2 b = *(const uint2 *)(mine + n * 8 * q_stride + (d + half) * 16);
                if (n == 0 || wide) mma<__half>(s[n], k, b.x, b.y);
            }
        }
    }
}

/* ------------------------------------------------------------------ O^T += V^T P^T */

template <int VMAX, int NT>
static __device__ __forceinline__ void rescale(float o[VMAX / 16][NT][4], const float alpha[2 * NT],
                                               bool wide)
{
#pragma unroll
    for (int i = 0; i < VMAX / 16; i++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n > 0 && !wide) break;
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][n][e] *= alpha[2 * n + (e & 1)];
        }
    }
}

/* Fragments of V^T: dims 16 * i .. + 15 of a 16-bit tile. DIMS: of a plain tile; 0: rows are `stride` apart. */
template <int DIMS> struct values_16 {
    uint32_t from;
    __device__ __forceinline__ values_16(uint32_t v_tile, int stride)
    {
        int lane = threadIdx.x & 31;
        int token = (lane & 7) + (lane >> 4) * 8, chunk = (lane >> 3) & 1;
        from = v_tile + (DIMS ? plain_place<DIMS, 2>(token, chunk) : token * stride + chunk * 16);
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t *) const
    {
        ldmatrix_trans(v, plain_step<DIMS, 2>(from, 2 * i));
    }
};

/* The same of a packed 16-bit tile, turned by movmatrix: rows g and g + 8 are dims that packed_dim tells. */
template <int DIMS> struct values_packed {
    uint32_t from;
    __device__ __forceinline__ values_packed(uint32_t v_tile)
    {
        int lane = threadIdx.x & 31;
        from = v_tile + lane / 4 * DIMS * 2 + (lane & 3) * 16;
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t raw[8]) const
    {
        if (i % 2 == 0) {
            load_shared(raw, from + i * 32);
            load_shared(raw + 4, from + 8 * DIMS * 2 + i * 32);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = movmatrix(raw[e / 2 * 4 + i % 2 * 2 + e % 2]);
    }
};

/* Dim in row g, or g + 8 where `upper`, of fragment i. */
static __device__ __forceinline__ int packed_dim(int i, int g, bool upper)
{
    return (i / 2 * 4 + g / 2) * 8 + (i % 2 * 2 + upper) * 2 + (g & 1);
}

/* Which dims a row of a fragment of V^T is. */
enum dim_order { PLAIN_DIMS, TURNED_DIMS, PACKED_DIMS };

/* The same of an 8-bit tile: rows g and g + 8 of a fragment are dims 2g and 2g + 1. */
template <int KIND, int DIMS> struct values_8 {
    uint32_t from;
    __device__ __forceinline__ values_8(uint32_t v_tile, int stride)
    {
        int lane = threadIdx.x & 31;
        int token = lane & 15, chunk = lane >> 4;
        from = v_tile + (DIMS ? plain_place<DIMS, 1>(token, chunk) : token * stride + chunk * 16);
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t raw[4]) const
    {
        if (i % 2 == 0) ldmatrix_trans(raw, plain_step<DIMS, 1>(from, i));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t pairs = __byte_perm(raw[2 * (i % 2) + half], 0, 0x3120);
            v[2 * half] = widen<KIND>(pairs);
            v[2 * half + 1] = widen<KIND>(pairs >> 16);
        }
    }
};

template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_values(float o[VMAX / 16][NT][4], const VALUES &values,
                                                  int steps, const uint32_t p[NT][2], bool wide)
{
    uint32_t raw[8];
#pragma unroll
    for (int i = 0; i < VMAX / 16; i++) {
        if (i >= steps) break;
        uint32_t v[4];
        values.load(i, v, raw);
        mma<T>(o[i][0], v, p[0][0], p[0][1]);
        if (NT > 1 && wide) mma<T>(o[i][NT - 1], v, p[NT - 1][0], p[NT - 1][1]);
    }
}

/*
 * Tiles with a token that one row sees and another does not: V may be NaN there and 0 * NaN is NaN, so
 * each row is multiplied alone, with V cut to the tokens it sees. hidden[n][e]: lanes whose score is -inf.
 */
template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_values_apart(float o[VMAX / 16][NT][4],
                                                        const VALUES &values, int steps,
                                                        const uint32_t p[NT][2], int rows,
                                                        const uint32_t hidden[NT][4])
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll 1
        for (int r = 0; r < 8 && 8 * n + r < rows; r++) {
            uint32_t low = r & 1 ? hidden[n][1] : hidden[n][0];
            uint32_t high = r & 1 ? hidden[n][3] : hidden[n][2];
            uint32_t keep[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t bits =
                    (half ? high : low) >> (8 * t + r / 2); /* token 2t at bit 0, 2t + 1 at 4 */
                keep[half] = (bits & 1 ? 0 : 0xffffu) | (bits & 16 ? 0 : 0xffff0000u);
            }
            uint32_t b0 = g == r ? p[n][0] : 0, b1 = g == r ? p[n][1] : 0;
            uint32_t raw[8];
#pragma unroll
            for (int i = 0; i < VMAX / 16; i++) {
                if (i >= steps) break;
                uint32_t v[4];
                float c[4] = {0, 0, 0, 0};
                values.load(i, v, raw);
                v[0] &= keep[0];
                v[1] &= keep[0];
                v[2] &= keep[1];
                v[3] &= keep[1];
                mma<T>(c, v, b0, b1);
                bool mine = t == r / 2;
                if (mine && (r & 1)) {
                    o[i][n][1] += c[1];
                    o[i][n][3] += c[3];
                } else if (mine) {
                    o[i][n][0] += c[0];
                    o[i][n][2] += c[2];
                }
            }
        }
    }
}

#endif
