/*
 * decode_kernel.h: attention of few rows. A block computes one share of the schedule for one kv head. Each warp has its own
 * tiles of 16 tokens and its own ring of stages in shared memory. Warps do not wait for one another until an item ends:
 *
 *   S^T[16 tokens][8 or 16 rows] = K Q^T        decode_scores.h; weights: decode_softmax.h
 *   O^T[dims][rows] += V^T P^T                  decode_values.h
 *
 * f32 has both in decode_f32.h. At the end of an item the warps' sums are added in the order of warps. If a sequence has several parts, the last block
 * that ends one adds them in their order (decode_end.h), or the blocks of a cluster do (decode_cluster.h). Fixed instances
 * are compiled for a type and a head size of K and V, without options on scores or with a soft cap and ALiBi. Flexible ones
 * take everything at run time.
 */
#ifndef FOLIOI_DECODE_KERNEL_H
#define FOLIOI_DECODE_KERNEL_H

#include "backends/cuda/decode/decode_cluster.h"
#include "backends/cuda/decode/decode_end.h"
#include "backends/cuda/decode/decode_f32.h"
#include "backends/cuda/decode/decode_fetch.h"
#include "backends/cuda/decode/decode_query.h"
#include "backends/cuda/decode/decode_scores.h"
#include "backends/cuda/decode/decode_softmax.h"
#include "backends/cuda/decode/decode_values.h"

/*
 * An instance and what follows from it. Fixed: KV is the dtype of K and V, VMAX their head size. Flexible: KV is 0, VMAX the
 * largest head size of V. NT: fragments of 8 rows. OPTIONS: of fixed ones, scores have a soft cap or ALiBi, or neither.
 */
template <int VMAX_, int NT_, int KV_, folioi_cuda_form FORM_, bool STORES_, bool OPTIONS_ = false>
struct decode_instance {
    static constexpr int VMAX = VMAX_, NT = NT_, KV = KV_;
    static constexpr folioi_cuda_form FORM = FORM_; /* of K and V; flexible ones take them all */
    static constexpr bool PAGED = FORM == FOLIOI_FORM_PAGES;
    static constexpr bool STORES = STORES_; /* it can store new rows; in pages only */
    static constexpr bool OPTIONS = OPTIONS_;
    using T = typename std::conditional<KV == FOLIO_BF16, __nv_bfloat16, __half>::type;
    static constexpr bool INT8 = KV == FOLIO_INT8;
    static constexpr bool EIGHT = KV == FOLIO_FP8_E4M3 || KV == FOLIO_FP8_E5M2 || INT8;
    static constexpr bool F32 = KV == FOLIO_F32;
    static constexpr int BYTES = KV == 0 ? 2 : kv_size(KV);
    static constexpr bool PACKED = KV != 0 && !F32 && fixed_form(VMAX, BYTES, FORM) == PACKED_TILE;
    static constexpr bool SPREAD = KV != 0 && is_spread(KV, FORM);
    static constexpr bool Q_IN_REGISTERS = KV != 0 && !F32 && VMAX <= 128;
    /* loaded while the item before ends */
    static constexpr bool Q_EARLY = Q_IN_REGISTERS && !EIGHT;
    /* that shared memory holds of q: see block_shared */
    static constexpr int Q_FORMS = KV == 0 ? 3 : F32 ? 2 : Q_IN_REGISTERS ? 0 : 1;
    static constexpr int Q_STEPS = Q_IN_REGISTERS ? VMAX / 16 : 1;
    static_assert(VMAX % (PAGED ? 64 : 16) == 0, "pages have panels of 64 dims, fragments 16");
    static_assert(FORM != FOLIOI_FORM_XPACKED_1 || (!EIGHT && Q_IN_REGISTERS),
                  "other scores do not read K by dims");
};

/* Do int8's scales come by copies of their own, beside those of a tile in bulk? */
template <class I> static constexpr bool SCALES_APART = I::INT8 &&I::FORM != FOLIOI_FORM_ROWS;

/* Load the block's share to shared memory and make its barriers. The counts are needed at the end only, but come with it. */
static __device__ __forceinline__ void load_share(const decode_args &a, const block_shared &sh,
                                                  int share)
{
    constexpr int CHUNKS = 1 + sizeof(folioi_decode_share) / 16;
    const uint4 *from = (const uint4 *)&a.shares[share] - 1;
    int n = threadIdx.x, lane = n & 31;
    uint4 first = {};
    if (n < CHUNKS) first = n == 0 ? *(const uint4 *)a.counts : from[n];
    if constexpr (HAS_BULK_COPIES) {
        if (lane < a.num_stages) bulk_init(shared_address(sh.barriers + lane));
        bulk_fence();
    }
    if (n < CHUNKS) ((uint4 *)sh.counts)[n] = first;
    for (n += blockDim.x; n < CHUNKS; n += blockDim.x) ((uint4 *)sh.counts)[n] = from[n];
    __syncthreads();
}

/*
 * Ask for the warp's first tile before anything else: the code of the rest has to come from memory too. Only for one tile:
 * with two in flight the first arrives later. q is prefetched first. Returns how many stages are filled.
 */
template <class I>
static __device__ __forceinline__ int start_tile(const decode_args &a, const block_shared &sh,
                                                 int kv_head, int warp)
{
    if constexpr (!HAS_BULK_COPIES || I::KV == 0 || SCALES_APART<I>) return 0;
    const folioi_decode_item &item = sh.share->kept[0];
    int lane = threadIdx.x & 31, tile = first_tile(a, item.begin, warp);
    using Q = typename std::conditional<I::F32, float, uint16_t>::type;
    constexpr int LINE = 128 / sizeof(Q);
    if (warp == 0 && lane / 4 < item.sequence.query_len * a.heads_per_kv &&
        lane % 4 < (I::VMAX + LINE - 1) / LINE)
        prefetch(q_row<Q>(a, item.sequence, lane / 4, kv_head) + lane % 4 * LINE);
    if (I::STORES && a.stores && warp == 1 && lane < I::VMAX / 32) /* lines of a new row */
        prefetch(new_unit<I::VMAX>(a, item.sequence.new_row, kv_head, 8 * lane));
    if (!comes_in_bulk<I::KV, I::FORM, I::STORES>(a, tile, item.begin, item.end)) return 0;
    int block = sh.share->blocks[(tile >> 4) - (item.begin >> 4)];
    int in_block = tile - block_index(a, tile) * a.layer.block_size;
    copy_block_bulk<I::VMAX, I::KV, I::FORM>(a, block, in_block, shared_address(sh.stages),
                                             shared_address(sh.scales), shared_address(sh.barriers),
                                             kv_head);
    return 1;
}

/* Start the rows of an item, and load its q unless that came early. */
template <class I>
static __device__ __forceinline__ void start_item(const decode_args &a, const block_shared &sh,
                                                  const folioi_decode_item &item, int num_rows,
                                                  int first_row, int kv_head,
                                                  row_state<I::NT> &rows, row_options<I::NT> &opt,
                                                  uint32_t q[I::Q_STEPS][I::NT][2])
{
    const folioi_cuda_seq &s = item.sequence;
    start_rows<I::NT>(rows);
    if constexpr (I::EIGHT) {
        float factor[I::NT];
        load_q_8<I::VMAX, I::NT>(a, s, first_row, kv_head, q, factor);
#pragma unroll
        for (int row = 0; row < 2 * I::NT; row++)
            opt.factor[row] =
                a.layer.scale * a.layer.k.scale *
                __shfl_sync(ALL_LANES, factor[row / 2], 4 * (row_of(threadIdx.x & 3, row) % 8));
    } else if constexpr (I::F32) {
        stage_q_f32<I::VMAX, I::NT>(a, s, num_rows, first_row, kv_head, (float *)sh.q);
        __syncthreads();
    } else if constexpr (!I::Q_EARLY) {
        stage_q(a, s, num_rows, first_row, kv_head, I::Q_FORMS, sh.q, sh.q_factor);
        if (I::KV == 0) start_options(a, sh, s, item.seq, num_rows, first_row, kv_head);
        __syncthreads();
    }
    if constexpr (I::OPTIONS) load_options<I::NT>(a, s, num_rows, first_row, kv_head, opt);
    if constexpr (I::KV == 0) {
        bool converted = a.layer.dtype == FOLIO_BF16 && !cache_is_bf16(a);
#pragma unroll
        for (int row = 0; row < 2 * I::NT; row++)
            opt.factor[row] = a.layer.scale * folioi_cuda_scale(&a.layer.k, kv_head) *
                              (converted ? sh.q_factor[row_of(threadIdx.x & 3, row)] : 1.0f);
    }
}

/* Dot products of a tile's K with the rows. */
template <class I>
static __device__ __forceinline__ void score_tile(const decode_args &a, const block_shared &sh,
                                                  tile_view &tile, int stage,
                                                  const uint32_t q[I::Q_STEPS][I::NT][2],
                                                  int num_rows, float s[I::NT][4])
{
    bool wide = num_rows > 8;
    using T = typename I::T;
    if constexpr (I::INT8) tile.scales = sh.scales + stage * 32;
    if constexpr (I::F32) scores_f32<I::VMAX, I::NT>(s, tile.k, (const float *)sh.q, num_rows);
    else if constexpr (I::EIGHT) scores_fixed_8<I::KV, I::VMAX, I::NT, I::FORM>(s, tile.k, q, wide);
    else if constexpr (I::PACKED) scores_packed<T, I::VMAX, I::NT>(s, tile.k, q, wide);
    else if constexpr (I::Q_IN_REGISTERS)
        scores_fixed<T, I::VMAX, I::NT, I::FORM>(s, tile.k, q, wide);
    else if constexpr (I::KV != 0)
        scores_16<T, I::NT, I::VMAX, I::FORM>(s, tile.k, 0, I::VMAX / 16, sh.q, a.q_stride, wide);
    else {
        if (a.layer.k.scales != NULL && !tile.fresh) tile.scales = sh.scales + stage * 32;
        flexible_scores<I::NT>(a, tile, sh, wide, s);
    }
}

/* Add a tile's V times the weights s to the sums. If `grown`, the sums so far are multiplied with alpha. */
template <class I>
static __device__ __forceinline__ void add_tile_values(
    const decode_args &a, const block_shared &sh, const tile_view &tile,
    float o[I::VMAX / 16][I::NT][4], float s[I::NT][4], float alpha[2 * I::NT], bool grown,
    int num_rows, bool wide, bool whole, bool apart, const uint32_t hidden[I::NT][4], int kv_head,
    value_scale &v_scale)
{
    using T = typename I::T;
    constexpr int VMAX = I::VMAX, NT = I::NT, STEPS = VMAX / 16;
    if constexpr (I::F32) {
        if (grown) rescale_f32<VMAX, NT>(o, alpha, sh.weights);
        add_values_f32<VMAX, NT>(o, tile.v, s, sh.weights, num_rows, apart, hidden);
        return;
    }
    if constexpr (I::KV == 0 || I::INT8) {
        if (I::INT8 || a.kv_bytes == 1) {
            float ago =
                scale_values<NT, I::SPREAD>(a, tile, hidden, I::INT8 && whole, kv_head, s, v_scale);
            if (ago != 1.0f) {
#pragma unroll
                for (int r = 0; r < 2 * NT; r++) alpha[r] = grown ? alpha[r] * ago : ago;
                grown = true;
            }
        }
    }
    if (grown) rescale<VMAX, NT>(o, alpha, wide);
    if constexpr (I::SPREAD)
        add_tile<T, VMAX, NT>(o, values_by_dims_8<I::KV>(tile.v), STEPS, s, num_rows, apart,
                              hidden);
    else if constexpr (I::EIGHT)
        add_tile<T, VMAX, NT>(o, values_8<I::KV, VMAX>(tile.v, 0), STEPS, s, num_rows, apart,
                              hidden);
    else if constexpr (is_xpacked(I::FORM))
        add_tile<T, VMAX, NT>(o, values_by_dims(tile.v), STEPS, s, num_rows, apart, hidden);
    else if constexpr (I::PACKED)
        add_tile<T, VMAX, NT>(o, values_packed<VMAX>(tile.v), STEPS, s, num_rows, apart, hidden);
    else if constexpr (I::KV != 0)
        add_tile<T, VMAX, NT>(o, values_16<VMAX, I::FORM>(tile.v, 0), STEPS, s, num_rows, apart,
                              hidden);
    else flexible_values<VMAX, NT>(a, tile, s, num_rows, apart, hidden, o);
}

/* The next tile of item n in shared memory; false: there is none. */
template <class I>
static __device__ __forceinline__ bool next_tile(const decode_args &a, const block_shared &sh,
                                                 int n, int stage, int filled, tile_view &tile)
{
    if (I::KV != 0) return tile.tile < tile.high;
    if (filled == 0) return false;
    __syncwarp();
    tile_note note;
    *(int4 *)&note = *(const int4 *)&sh.notes[stage];
    tile.tile = note.tile;
    tile.low = note.low;
    tile.high = note.high;
    tile.fresh = (note.item2 & 1) != 0;
    tile.scales = NULL;
    return note.item2 >> 1 == n;
}

/* Wait until a tile has arrived. phases: one bit for each stage's barrier. */
template <class I>
static __device__ __forceinline__ void await_tile(const decode_args &a, const block_shared &sh,
                                                  const tile_view &tile, int stage, int filled,
                                                  uint32_t &phases)
{
    bool in_bulk = comes_in_bulk<I::KV, I::FORM, I::STORES>(a, tile.tile, tile.low, tile.high);
    if (in_bulk) {
        if constexpr (HAS_BULK_COPIES)
            bulk_wait(shared_address(sh.barriers + stage), phases >> stage & 1);
        phases ^= 1u << stage;
    }
    if (!in_bulk || SCALES_APART<I>) wait_stage<I::EIGHT>(filled);
}

template <int VMAX, int NT, int KV, int WARPS, folioi_cuda_form FORM, bool CLUSTERED = false,
          bool STORES = FORM == FOLIOI_FORM_PAGES, bool OPTIONS = false, class A = decode_args>
__global__ void __launch_bounds__(32 * WARPS,
                                  VMAX <= (KV == FOLIO_F32 ? 64 : 128) && !CLUSTERED ? 2 : 1)
    decode_kernel(const __grid_constant__ A a)
{
    if constexpr (CLUSTERED && !HAS_BULK_COPIES) return;
    extern __shared__ __align__(128) char memory[];
    using I = decode_instance<VMAX, NT, KV, FORM, STORES, OPTIONS>;
    int warp = threadIdx.x / 32;
    int kv_head = blockIdx.x, share = blockIdx.y;
    int first_row = KV != 0 ? 0 : blockIdx.z * 8; /* heads above 256 have two blocks of rows */
    block_shared sh = carve_shared(a, memory, I::Q_FORMS, I::F32, warp);
    if (KV == 0 && (a.layer.k_dims | a.layer.v_dims) % 16 != 0) {
        /* columns past the head size are multiplied with zeros of q; no copy writes them */
        for (int n = threadIdx.x & 31; n < a.num_stages * a.stage_bytes / 16; n += 32)
            ((uint4 *)sh.stages)[n] = make_uint4(0, 0, 0, 0);
        __syncwarp();
    }
    if constexpr (HAS_BULK_COPIES && KV != 0 && FORM == FOLIOI_FORM_ROWS)
        if (a.has_boxes && threadIdx.x == 0) prefetch_box(a.boxes.k), prefetch_box(a.boxes.v);
    if constexpr (CLUSTERED) open_inbox(a, sh);
    if (a.early == FOLIOI_EARLY_NOTHING) await_kernels_ahead();
    load_share(a, sh, share);
    int item_begin = sh.share->begin, item_end = sh.share->end;
    bool awaits = a.early == FOLIOI_EARLY_KEYS && item_begin < item_end;
    if (!awaits) {
        await_kernels_ahead();
        let_next_begin();
    }
    int stage = 0; /* the oldest stage */
    int filled = start_tile<I>(a, sh, kv_head, warp);
    uint32_t phases = 0;
    typename std::conditional<A::NOTES, noted_cursor, cursor>::type c = {};
    c.item = item_begin;
    c.item_end = item_end;
    seek_item<KV>(a, sh, c, warp, first_row);
    ask_block<KV>(a, sh, c, threadIdx.x & 31);
    /* prefetch the counters that this block will use */
    if (!CLUSTERED && threadIdx.x < FOLIOI_DECODE_KEPT && sh.share->kept[threadIdx.x].num_parts > 1)
        prefetch(counter_of(a, sh.share->kept[threadIdx.x].seq, kv_head, first_row));
    if constexpr (!CLUSTERED && !I::EIGHT) /* there it would cost a register too many */
        if (a.layer.sinks != NULL && threadIdx.x == 0)
            prefetch(a.layer.sinks + kv_head * a.heads_per_kv);
    if (filled > 0) {
        c.num_used = 1;
        step_cursor<KV>(a, sh, c, warp, first_row);
        ask_block<KV>(a, sh, c, threadIdx.x & 31);
    }
    uint32_t q[I::Q_STEPS][NT][2];
    if constexpr (I::Q_EARLY) /* before K and V, or it would arrive after them */
        if (!awaits && item_begin < item_end)
            load_q<VMAX, NT, FORM>(a, item_at(a, sh, item_begin)->sequence, first_row, kv_head, q);
    for (int n = item_begin; n < item_end; n++) {
        tile_view tile = {};
        int num_rows;
        {
            const folioi_decode_item &item = *item_at(a, sh, n);
            num_rows = min(item.sequence.query_len * a.heads_per_kv - first_row, 8 * NT);
            tile.low = item.begin;
            tile.high = item.end;
            tile.tile = first_tile(a, tile.low, warp);
        }
        if (num_rows <= 0) continue;
        bool wide = num_rows > 8;
        row_state<NT> rows;
        row_options<NT> opt;
        float o[VMAX / 16][NT][4] = {};
        value_scale v_scale;
        int2 seen; /* keys that all rows see */
        bool started = false;
        for (;;) {
            if (filled < a.num_stages && c.item < c.item_end) {
                int next = stage + filled;
                if (next >= a.num_stages) next -= a.num_stages;
                fetch<VMAX, KV, FORM, STORES>(a, c, sh, next, kv_head, warp, first_row);
                filled++;
                continue;
            }
            if (!started) { /* tiles are on their way */
                started = true;
                if constexpr (CLUSTERED) cluster_wait(); /* one item, so once */
                if (awaits) {
                    awaits = false;
                    await_kernels_ahead();
                    let_next_begin();
                    if constexpr (I::Q_EARLY)
                        load_q<VMAX, NT, FORM>(a, item_at(a, sh, n)->sequence, first_row, kv_head,
                                               q);
                }
                seen = seen_by_all(a, item_at(a, sh, n)->sequence);
                if (STORES && a.stores && warp == 0) {
                    const folioi_decode_item &item = *item_at(a, sh, n);
                    int key = item.sequence.key_len - 1;
                    if (item.part == 0 && (key < seen.x || key >= seen.y))
                        store_unseen_row<VMAX>(a, item, kv_head);
                }
                start_item<I>(a, sh, *item_at(a, sh, n), num_rows, first_row, kv_head, rows, opt,
                              q);
            }
            if (!next_tile<I>(a, sh, n, stage, filled, tile)) break;
            await_tile<I>(a, sh, tile, stage, filled, phases);
            tile.k = shared_address(sh.stages) + stage * a.stage_bytes;
            tile.v = tile.k + (KV != 0 ? fixed_value(VMAX, I::BYTES, FORM) : 16 * a.k_stride);
            if (KV == 0 && a.xpacked && !tile.fresh) transpose_flexible(a, tile);
            bool whole =
                tile.tile >= max(seen.x, tile.low) && tile.tile + 16 <= min(seen.y, tile.high);
            float sc[NT][4] = {}, alpha[2 * NT];
            uint32_t hidden[NT][4];
            score_tile<I>(a, sh, tile, stage, q, num_rows, sc);
            bool apart =
                finish_scores<KV, NT, FORM, OPTIONS>(a, sh, tile, item_at(a, sh, n)->sequence, seen,
                                                     first_row, opt, num_rows, whole, sc, hidden);
            bool grown = soften<NT>(rows, sc, alpha, wide);
            add_tile_values<I>(a, sh, tile, o, sc, alpha, grown, num_rows, wide, whole, apart,
                               hidden, kv_head, v_scale);
            __syncwarp();
            filled--;
            if (++stage == a.num_stages) stage = 0;
            if (KV != 0) tile.tile += 16 * a.num_warps;
        }
        if constexpr (I::Q_EARLY) /* the next item's arrives while this one ends */
            if (n + 1 < item_end)
                load_q<VMAX, NT, FORM>(a, item_at(a, sh, n + 1)->sequence, first_row, kv_head, q);
        int steps = KV != 0 ? VMAX / 16 : (a.layer.v_dims + 15) / 16;
        dim_order order = I::PACKED                                                  ? PACKED_DIMS
                          : (I::EIGHT && !I::SPREAD) || (KV == 0 && a.kv_bytes == 1) ? EVEN_ODD_DIMS
                                                                                     : LINEAR_DIMS;
        if constexpr (KV == 0 || I::EIGHT) {
            float by[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++)
                by[r] = I::EIGHT && !I::INT8 ? a.layer.v.scale : 1.0f / v_scale.by;
            if (I::EIGHT || a.kv_bytes == 1) rescale<VMAX, NT>(o, by, wide);
        }
        if constexpr (CLUSTERED) {
            send_sums<VMAX, NT>(a, sh, rows, o, warp, num_rows);
            add_sums<VMAX>(a, sh, item_at(a, sh, n)->sequence, num_rows, kv_head);
        } else {
            add_warps<VMAX, NT, WARPS, I::F32>(a, sh, rows, o, steps, order, warp, num_rows);
            end_item<I::PACKED, I::F32, WARPS>(a, sh, *item_at(a, sh, n), num_rows, first_row,
                                               kv_head, n + 1 == item_end);
        }
    }
    if constexpr (A::NOTES && STORES) note_new_rows<VMAX>(a, c, kv_head);
    cp_async_wait<0>();
    if (awaits) await_kernels_ahead();
    if (sh.counts->num_rows < a.out_rows || sh.counts->num_emptied > 0)
        store_padding(a, *sh.counts);
}

#endif
