/*
 * decode_cluster.h: the end of a sequence whose parts are computed by the blocks of one cluster. Out has VMAX / 8 slices of
 * 8 dims. Block b owns slice b, and b + cluster if there is one. Every warp sends its sums of a slice to the owner's shared
 * memory, and its maxima and weights to all blocks. Warp w of an owner waits for what the warps w of all blocks send, and
 * adds it in the order of blocks. Then the sums of the owner's warps are added. No part goes through memory, and no block
 * counts parts. Warps with fewer tiles come here first and bring the code to the cache. What sh.out holds:
 *
 *   sums[slice][part][8 dims][rows] | maximum and weight [part][rows]        part: warp * cluster + block
 */
#ifndef FOLIOI_DECODE_CLUSTER_H
#define FOLIOI_DECODE_CLUSTER_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_end.h"
#include "backends/cuda/decode/decode_softmax.h"
#include "backends/cuda/instructions.h"

struct decode_inbox {
    int log_rows; /* of 4, 8 or 16 rows; some may not be there */
    int parts;
    int weights; /* where they begin, bytes */
};

template <int VMAX>
static __device__ __forceinline__ decode_inbox inbox_of(const decode_args &a, int num_rows)
{
    int log_rows = num_rows <= 4 ? 2 : num_rows <= 8 ? 3 : 4, parts = a.cluster * a.num_warps;
    return {log_rows, parts, a.owned_slices * parts * (32 << log_rows)};
}

/* Ready for what other blocks send. They wait for this with cluster_wait, which is a barrier of the block too. */
static __device__ __forceinline__ void open_inbox(const decode_args &a, const block_shared &sh)
{
    if (threadIdx.x < a.num_warps) {
        bulk_init(shared_address(sh.arrived + threadIdx.x));
        cluster_fence_barriers();
    }
    __syncwarp();
    cluster_arrive();
}

/* A warp's sums, maxima and weights to those who add them. */
template <int VMAX, int NT>
static __device__ __forceinline__ void send_sums(const decode_args &a, const block_shared &sh,
                                                 const row_state<NT> &rows,
                                                 const float o[VMAX / 16][NT][4], int warp,
                                                 int num_rows)
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    decode_inbox in = inbox_of<VMAX>(a, num_rows);
    int part = warp * a.cluster + (int)cluster_rank();
    uint32_t inbox = shared_address(sh.out), barrier = shared_address(sh.arrived + warp) - inbox;
    float l[2 * NT];
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) l[row] = row_sum(rows.l[row]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int row = 8 * n + 2 * t; /* and the next */
        if (row >> in.log_rows != 0) break;
        uint32_t at = in.weights + ((part << in.log_rows) + row) * 8;
#pragma unroll 1
        for (int to = g; to < a.cluster; to += 8) {
            uint32_t there = cluster_address(inbox, to);
            cluster_send(there + at,
                         make_float4(rows.m[2 * n], l[2 * n], rows.m[2 * n + 1], l[2 * n + 1]),
                         there + barrier);
        }
        at = part * (32 << in.log_rows) + ((g << in.log_rows) + row) * 4;
#pragma unroll
        for (int i = 0; i < VMAX / 8; i++) {
            bool second = i >= a.cluster;
            uint32_t there = cluster_address(inbox, second ? i - a.cluster : i);
            uint32_t to = there + at + (second ? in.parts * (32 << in.log_rows) : 0);
            cluster_send(to, o[i / 2][n][i % 2 * 2], o[i / 2][n][i % 2 * 2 + 1], there + barrier);
        }
    }
}

/* A row's maximum and weight, and a number of its sums in each of two slices. */
struct part_sum {
    float m, l, x, y;
};

/*
 * Add `count` parts; their weights and their sums are so many numbers apart, and y lies so far behind x. Eight at a time,
 * so that their loads overlap. Called, so that its second use finds the code in the cache.
 */
static __device__ __noinline__ part_sum add_up(const float2 *weight, int weight_step,
                                               const float *x, int x_step, int to_y, int count)
{
    part_sum sum = {-INFINITY, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < count; first += 8) {
        float2 w[8];
        float m = sum.m;
#pragma unroll
        for (int p = 0; p < 8; p++) {
            w[p] = first + p < count ? weight[p * weight_step] : make_float2(-INFINITY, 0.0f);
            m = fmaxf(m, w[p].x);
        }
        float base = softmax_base(m), by = exp_to(sum.m, base);
        sum = {m, sum.l * by, sum.x * by, sum.y * by};
#pragma unroll
        for (int p = 0; p < 8; p++) {
            if (first + p >= count) continue;
            by = exp_to(w[p].x, base);
            sum.l += w[p].y * by;
            sum.x += x[p * x_step] * by;
            sum.y += x[p * x_step + to_y] * by;
        }
        weight += 8 * weight_step;
        x += 8 * x_step;
    }
    return sum;
}

/*
 * The owner's slices of out, one or two. Four rows of a slice are a quad: a number for each lane. The sums of a warp go to
 * the place of its tiles: maximum and weight of [quad][lane], then [slice][quad][lane].
 */
template <int VMAX, class A>
static __device__ __forceinline__ void add_sums(const A &a, const block_shared &sh,
                                                const folioi_cuda_seq &s, int num_rows, int kv_head)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    decode_inbox in = inbox_of<VMAX>(a, num_rows);
    uint32_t barrier = shared_address(sh.arrived + warp);
    if (lane == 0) bulk_expect(barrier, a.cluster * (4 * a.owned_slices + 1) * (8 << in.log_rows));
    /* what the end needs is prepared before the wait: this warp's quad, and the place of its number in out */
    int quads = 1 << (in.log_rows - 2), last = (warp & (quads - 1)) * 32 + lane;
    int last_row = (warp & (quads - 1)) * 4 + lane % 4;
    int dim = ((warp >> (in.log_rows - 2)) * a.cluster + (int)cluster_rank()) * 8 + lane / 4;
    out_place at = place_of(a, s, kv_head, last_row);
    int64_t index = out_index(a, at) + dim;
    int to_y = a.owned_slices > 1 ? in.parts * (8 << in.log_rows) : 0, first = warp * a.cluster;
    cluster_await(barrier, 0);
#pragma unroll 1
    for (int quad = 0; quad < quads; quad++) {
        int row = 4 * quad + lane % 4;
        part_sum sum = add_up(
            (const float2 *)((const char *)sh.out + in.weights) + (first << in.log_rows) + row,
            1 << in.log_rows, sh.out + ((first * 8 + lane / 4) << in.log_rows) + row,
            8 << in.log_rows, to_y, a.cluster);
        float *to = (float *)sh.stages + quad * 32 + lane;
        ((float2 *)sh.stages)[quad * 32 + lane] = make_float2(sum.m, sum.l);
        to[64 * quads] = sum.x;
        to[96 * quads] = sum.y;
    }
    __syncthreads();
    if (warp >= a.owned_slices * quads) return;
    int to_next = a.num_stages * a.stage_bytes; /* from warp to warp */
    const char *of_warps = sh.stages - warp * to_next;
    part_sum sum = add_up((const float2 *)of_warps + last, to_next / 8,
                          (const float *)of_warps + (2 * quads + warp) * 32 + lane, to_next / 4, 0,
                          a.num_warps);
    if (last_row >= num_rows) return;
    row_end end = {1.0f / sum.l, 0.0f};
    if (a.layer.sinks != NULL || a.layer.lse != NULL) {
        end = end_row(a, sum.m, sum.l, at.h);
        if (dim == 0) store_lse(a, at, end.lse);
    }
    float x = sum.l == 0.0f ? 0.0f : sum.x * end.by;
    if constexpr (A::NOTES) {
        bool bf16 = a.layer.dtype == FOLIO_BF16;
        if (is_bad_pair(float_to_half_bits(x, bf16), bf16))
            note_bad(a.noting, FOLIO_WRITTEN_OUT, at.row, at.h);
    }
    store_half(a, index, x);
}

#endif
