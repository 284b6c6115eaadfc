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

#include "backends/cuda/decode_end.h"
#include "backends/cuda/decode_fetch.h"
#include "backends/cuda/decode_query.h"
#include "backends/cuda/decode_scores.h"
#include "backends/cuda/decode_softmax.h"
#include "backends/cuda/decode_values.h"

/* PLAIN: 0, or the dtype of q, K, V and out, VMAX then being their head size. */
template <int VMAX, int NT, int PLAIN, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, VMAX <= 128 ? 2 : 1)
    decode_kernel(const __grid_constant__ decode_args a)
{
    extern __shared__ __align__(128) char memory[];
    using T = typename std::conditional<PLAIN == FOLIO_BF16, __nv_bfloat16, __half>::type;
    constexpr bool Q_IN_REGISTERS = PLAIN != 0 && VMAX <= 128;
    constexpr bool EIGHT = PLAIN == FOLIO_FP8_E4M3 || PLAIN == FOLIO_FP8_E5M2;
    constexpr int Q_FORMS = PLAIN == 0 ? 3 : EIGHT ? 2 : Q_IN_REGISTERS ? 0 : 1;
    constexpr bool PACKED = PLAIN != 0 && !EIGHT && plain_packed(VMAX, 2);
    constexpr bool Q_EARLY = Q_IN_REGISTERS && !EIGHT;
    constexpr int Q_STEPS = Q_IN_REGISTERS ? VMAX / 16 : 1;
    int warp = threadIdx.x / 32;
    int kv_head = blockIdx.x / a.row_blocks % a.layer.num_kv_heads;
    int slot = blockIdx.x / (a.row_blocks * a.layer.num_kv_heads);
    int first_row = blockIdx.x % a.row_blocks * 8;
    block_shared sh = carve_shared(a, memory, Q_FORMS, warp);
    if (PLAIN == 0 && (a.layer.k_dims | a.layer.v_dims) % 16 != 0) {
        /* columns past the head size meet zeros of q; no copy ever writes there */
        for (int n = threadIdx.x & 31; n < a.num_stages * a.stage_bytes / 16; n += 32)
            ((uint4 *)sh.stages)[n] = make_uint4(0, 0, 0, 0);
        __syncwarp();
    }
    int item_begin = a.slot_begin[slot], item_end = a.slot_begin[slot + 1];
    sh.item_begin = item_begin;
    constexpr int CHUNKS = sizeof(folioi_decode_item) / 16;
    int kept = min(item_end - item_begin, MAX_ITEMS) * CHUNKS;
    for (int n = threadIdx.x; n < kept; n += blockDim.x)
        ((uint4 *)sh.entries)[n] = ((const uint4 *)&a.items[item_begin])[n];
    __syncthreads();
    cursor c = {};
    c.item = item_begin;
    c.item_end = item_end;
    seek_item<PLAIN>(a, sh, c, warp, first_row);
    ask_block<PLAIN>(a, c, threadIdx.x & 31);
    int stage = 0, filled = 0; /* the oldest stage, and how many hold tiles */
    uint32_t phases = 0;       /* of the stages' barriers, a bit each */
    if constexpr (HAS_BULK_COPIES) {
        if ((threadIdx.x & 31) < a.num_stages)
            bulk_init(shared_address(sh.barriers + (threadIdx.x & 31)));
        bulk_fence();
        __syncwarp();
    }
    uint32_t q[Q_STEPS][NT][2];
    if constexpr (Q_EARLY)
        if (item_begin < item_end)
            load_q<VMAX, NT>(a, item_at(a, sh, item_begin)->sequence, first_row, kv_head, q);
    for (int n = item_begin; n < item_end; n++) {
        const folioi_decode_item &item = *item_at(a, sh, n);
        const folioi_cuda_seq &s = item.sequence;
        int num_rows = min(s.query_len * a.group - first_row, 8 * NT);
        if (num_rows <= 0) continue;
        bool wide = num_rows > 8;
        row_state<NT> rows;
        row_options<NT> opt;
        float o[VMAX / 16][NT][4] = {};
        float largest_scale = 0.0f;
        int whole_begin, whole_end;
        start_rows<NT>(a, s, num_rows, first_row, &whole_begin, &whole_end, rows);
        if constexpr (!Q_EARLY) {
            stage_q(a, s, num_rows, first_row, kv_head, Q_FORMS, sh.q, sh.q_factor);
            __syncthreads();
        }
        if constexpr (EIGHT) {
            int form = a.layer.dtype == FOLIO_BF16 ? 16 * a.q_stride : 0;
            load_q_turned<VMAX, NT>(sh.q + form, a.q_stride, q);
        }
        if constexpr (PLAIN == 0 || EIGHT)
            start_options<NT>(a, s, item.seq, num_rows, first_row, kv_head, sh, opt);
        for (;;) {
            if (filled < a.num_stages && c.item < c.item_end) {
                int next = stage + filled;
                if (next >= a.num_stages) next -= a.num_stages;
                fetch<VMAX, PLAIN>(a, c, sh, next, kv_head, warp, first_row);
                filled++;
                continue;
            }
            if (filled == 0) break;
            __syncwarp();
            int4 note = *(const int4 *)&sh.notes[stage];
            if (note.x >> 1 != n) break;
            if (comes_in_bulk<VMAX, PLAIN>(a, note.y, note.z, note.w)) {
                if constexpr (HAS_BULK_COPIES)
                    bulk_wait(shared_address(sh.barriers + stage), phases >> stage & 1);
                phases ^= 1u << stage;
            } else {
                wait_stage(filled);
            }
            tile_view tile = {shared_address(sh.stages) + stage * a.stage_bytes,
                              0,
                              NULL,
                              note.y,
                              note.z,
                              note.w,
                              (note.x & 1) != 0};
            tile.v = tile.k + 16 * a.k_stride;
            bool whole =
                note.y >= max(whole_begin, note.z) && note.y + 16 <= min(whole_end, note.w);
            float sc[NT][4] = {}, alpha[2 * NT];
            uint32_t hidden[NT][4];
            if constexpr (EIGHT) {
                scores_plain_8<PLAIN, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (PACKED) {
                scores_packed<T, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (Q_IN_REGISTERS) {
                scores_plain<T, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (PLAIN != 0) {
                scores_16<T, NT>(sc, tile.k, a.k_stride, VMAX / 16, sh.q, a.q_stride, wide);
            } else {
                if (a.layer.k.scales != NULL && !tile.fresh) tile.scales = sh.scales + stage * 32;
                general_scores<NT>(a, tile, sh, wide, sc);
            }
            bool apart = finish_scores<PLAIN, NT>(a, tile, rows, opt, num_rows, whole, sc, hidden);
            bool grown = soften<NT>(rows, sc, alpha, wide);
            if constexpr (EIGHT) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<__half, VMAX, NT>(o, values_8<PLAIN, VMAX>(tile.v, 0), VMAX / 16, sc,
                                           num_rows, apart, hidden);
            } else if constexpr (PACKED) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<T, VMAX, NT>(o, values_packed<VMAX>(tile.v), VMAX / 16, sc, num_rows,
                                      apart, hidden);
            } else if constexpr (PLAIN != 0) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<T, VMAX, NT>(o, values_16<VMAX>(tile.v, 0), VMAX / 16, sc, num_rows, apart,
                                      hidden);
            } else {
                if (a.kv_bytes == 1) {
                    float ago = scale_values<NT>(a, tile, hidden, sc, &largest_scale);
                    grown |= ago != 1.0f;
#pragma unroll
                    for (int r = 0; r < 2 * NT; r++) alpha[r] *= ago;
                }
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                general_values<VMAX, NT>(a, tile, sc, num_rows, apart, hidden, o);
            }
            __syncwarp();
            filled--;
            if (++stage == a.num_stages) stage = 0;
        }
        if constexpr (Q_EARLY) /* the next item's, on its way while this one ends */
            if (n + 1 < item_end)
                load_q<VMAX, NT>(a, item_at(a, sh, n + 1)->sequence, first_row, kv_head, q);
        int steps = PLAIN != 0 ? VMAX / 16 : (a.layer.v_dims + 15) / 16;
        dim_order order = PACKED                                     ? PACKED_DIMS
                          : EIGHT || (PLAIN == 0 && a.kv_bytes == 1) ? TURNED_DIMS
                                                                     : PLAIN_DIMS;
        if constexpr (EIGHT) {
            float by[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++) by[r] = a.layer.v.scale;
            rescale<VMAX, NT>(o, by, wide);
        }
        if constexpr (PLAIN == 0) {
            float by[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++) by[r] = largest_scale * (1.0f / LIFT);
            if (a.kv_bytes == 1) rescale<VMAX, NT>(o, by, wide);
        }
        add_warps<VMAX, NT>(a, sh, rows, o, steps, order, warp, wide);
        end_item(a, sh, s, item, num_rows, first_row, kv_head);
        __syncthreads();
    }
    cp_async_wait<0>();
    store_padding(a);
}

#endif
