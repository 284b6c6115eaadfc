/*
 * decode_end.h: what happens when an item's keys are through: warps add up in their order, a whole
 * sequence is stored, a part goes to the workspace, and the last block of a sequence merges its parts.
 */
#ifndef FOLIOI_DECODE_END_H
#define FOLIOI_DECODE_END_H

#include "backends/cuda/decode_block.h"
#include "backends/cuda/decode_softmax.h"
#include "backends/cuda/decode_values.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/* Warps' sums into sh.out in the order of warps; m and l of the rows into warp_m[0] and warp_l[0]. */
template <int VMAX, int NT>
static __device__ __forceinline__ void add_warps(const decode_args &a, const block_shared &sh,
                                                 const row_state<NT> &rows,
                                                 float o[VMAX / 16][NT][4], int steps,
                                                 dim_order order, int warp, bool wide)
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        float l = row_sum(rows.l[row]);
        int r = row_of(t, row);
        if (g == 0) {
            sh.warp_m[warp * 16 + r] = rows.m[row];
            sh.warp_l[warp * 16 + r] = l;
        }
    }
    __syncthreads();
    float by[2 * NT];
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = row_of(t, row);
        float m = -INFINITY;
        for (int w = 0; w < a.num_warps; w++) m = fmaxf(m, sh.warp_m[w * 16 + r]);
        by[row] = exp_to(rows.m[row], softmax_base(m));
    }
    rescale<VMAX, NT>(o, by, wide);
    float *out = sh.out + warp % a.out_copies * a.out_size;
    for (int w = 0; w < a.num_warps; w += a.out_copies) {
        if (warp >= w && warp < w + a.out_copies) {
#pragma unroll
            for (int i = 0; i < VMAX / 16; i++) {
                if (i >= steps) break;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    if (n > 0 && !wide) break;
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int d =
                            16 * i + (order == TURNED_DIMS ? 2 * g + (e & 2) / 2 : g + (e & 2) * 4);
                        if (order == PACKED_DIMS) d = packed_dim(i, g, e & 2);
                        float *to = out + (8 * n + 2 * t + (e & 1)) * a.out_stride + d;
                        *to = w == 0 ? o[i][n][e] : *to + o[i][n][e];
                    }
                }
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 8 * NT) {
        int r = threadIdx.x;
        float m = -INFINITY, l = 0.0f;
        for (int w = 0; w < a.num_warps; w++) m = fmaxf(m, sh.warp_m[w * 16 + r]);
        for (int w = 0; w < a.num_warps; w++)
            l += sh.warp_l[w * 16 + r] * exp_to(sh.warp_m[w * 16 + r], softmax_base(m));
        sh.warp_m[r] = m;
        sh.warp_l[r] = l;
    }
    __syncthreads();
}

struct row_end {
    float by, lse; /* what the sum is multiplied with; lse of the row */
};

/* Numbers d .. d + 3 of row r of an item's sums. */
static __device__ __forceinline__ float4 sum_at(const decode_args &a, const block_shared &sh, int r,
                                                int d)
{
    float4 x = *(const float4 *)(sh.out + r * a.out_stride + d);
    for (int copy = 1; copy < a.out_copies; copy++) {
        float4 y = *(const float4 *)(sh.out + copy * a.out_size + r * a.out_stride + d);
        x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    return x;
}

/* A row's sink and normalisation, from its maximum and sum. */
static __device__ __noinline__ row_end end_row(const decode_args &a, float m, float l, int h)
{
    float sink = a.layer.sinks != NULL ? a.layer.sinks[h] : -INFINITY;
    if (l == 0.0f) return {0.0f, sink};
    float base = softmax_base(fmaxf(m, sink));
    float down = exp_to(softmax_base(m), base); /* l counts from 0 where there is no maximum */
    float sum = l * down + exp_to(sink, base);
    return {down / sum, base + log2f(sum) * LN2};
}

static __device__ __forceinline__ void store_half(const decode_args &a, int64_t index, float x)
{
    ((uint16_t *)a.layer.out.data)[index] = float_to_half_bits(x, a.layer.dtype == FOLIO_BF16);
}

/* Four numbers of a row of out, times `by`; a row that saw nothing (l == 0) is zeros whatever x is. */
static __device__ __forceinline__ void store_quad(const decode_args &a, int64_t index, float4 x,
                                                  float by, float l)
{
    if (l == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool bf16 = a.layer.dtype == FOLIO_BF16;
    uint2 bits = {bf16 ? pack<__nv_bfloat16>(x.x * by, x.y * by) : pack<__half>(x.x * by, x.y * by),
                  bf16 ? pack<__nv_bfloat16>(x.z * by, x.w * by)
                       : pack<__half>(x.z * by, x.w * by)};
    uint16_t *to = (uint16_t *)a.layer.out.data + index;
    if (a.out_quads) {
        *(uint2 *)to = bits;
        return;
    }
    to[0] = (uint16_t)bits.x;
    to[1] = (uint16_t)(bits.x >> 16);
    to[2] = (uint16_t)bits.y;
    to[3] = (uint16_t)(bits.y >> 16);
}

struct out_place {
    int64_t row;
    int h;
};

static __device__ __forceinline__ out_place place_of(const decode_args &a, const folioi_cuda_seq &s,
                                                     int kv_head, int row)
{
    return {s.query_row + row / a.group, kv_head * a.group + row % a.group};
}

static __device__ __forceinline__ int64_t out_index(const decode_args &a, out_place at)
{
    return at.row * a.layer.out.token + at.h * a.layer.out.head;
}

static __device__ __forceinline__ void store_lse(const decode_args &a, out_place at, float lse)
{
    if (a.layer.lse != NULL)
        a.layer.lse[at.row * a.layer.lse_token + at.h * a.layer.lse_head] = lse;
}

/* An item that is its whole sequence. */
static __device__ __forceinline__ void store_rows(const decode_args &a, const block_shared &sh,
                                                  const folioi_cuda_seq &s, int rows, int first_row,
                                                  int kv_head)
{
    int dims = a.layer.v_dims, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int r = warp; r < rows; r += a.num_warps) {
        out_place at = place_of(a, s, kv_head, first_row + r);
        float l = sh.warp_l[r];
        row_end end = end_row(a, sh.warp_m[r], l, at.h);
        int64_t out = out_index(a, at);
#pragma unroll 1
        for (int d = 4 * lane; d < dims; d += 128)
            store_quad(a, out + d, sum_at(a, sh, r, d), end.by, l);
        if (lane == 0) store_lse(a, at, end.lse);
    }
}

/* Place of a part's sums: [max_rows][v_dims], m[max_rows], l[max_rows]. */
static __device__ __forceinline__ float *part_at(const decode_args &a, int64_t store, int kv_head)
{
    int64_t size = (int64_t)a.max_rows * (a.layer.v_dims + 2);
    return a.partials + (store * a.layer.num_kv_heads + kv_head) * size;
}

static __device__ __forceinline__ void store_part(const decode_args &a, const block_shared &sh,
                                                  float *part, int rows, int first_row)
{
    int dims = a.layer.v_dims, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    float *m = part + a.max_rows * dims, *l = m + a.max_rows;
#pragma unroll 1
    for (int r = warp; r < rows; r += a.num_warps) {
        float *to = part + (first_row + r) * dims;
#pragma unroll 1
        for (int d = 4 * lane; d < dims; d += 128) __stcg((float4 *)(to + d), sum_at(a, sh, r, d));
    }
    if (threadIdx.x < rows) {
        __stcg(m + first_row + threadIdx.x, sh.warp_m[threadIdx.x]);
        __stcg(l + first_row + threadIdx.x, sh.warp_l[threadIdx.x]);
    }
}

/* Counts the parts of a sequence that are there. */
static __device__ __forceinline__ int32_t *counter_of(const decode_args &a, int seq, int kv_head,
                                                      int first_row)
{
    return a.counters + ((int64_t)seq * a.layer.num_kv_heads + kv_head) * 2 + (first_row > 0);
}

/* Is this block the last one to finish a part of its sequence? The counter is left as it was found. */
static __device__ __forceinline__ bool is_last(int32_t *counter, int num_parts, int *flag)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = add_in_order(counter, 1) == num_parts - 1;
        if (*flag) *counter = 0;
    }
    __syncthreads();
    return *flag;
}

/* Parts of a sequence as the block that merges them finds them. */
struct part_list {
    float *sums, *m, *l; /* of part 0 and the block's first row */
    int64_t step;        /* from part to part */
    int num, rows, kept;
};

/*
 * Maximum and sum of each row over its parts, into warp_m and warp_l. m of a part becomes its weight, in
 * memory and, for the first `kept` parts, in place of the sums in shared memory, which are stored by now.
 */
static __device__ __forceinline__ void weigh_parts(const decode_args &a, const block_shared &sh,
                                                   const part_list &parts)
{
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < parts.rows; r += a.num_warps) {
        float *m = parts.m + lane * parts.step + r, *l = m + (parts.l - parts.m);
        float m0 = lane < parts.num ? __ldcg(m) : -INFINITY, l0 = 0.0f;
        if (lane < parts.num) l0 = __ldcg(l);
        float largest = m0, sum = 0.0f;
#pragma unroll 2
        for (int p = lane + 32; p < parts.num; p += 32)
            largest = fmaxf(largest, __ldcg(parts.m + p * parts.step + r));
        largest = warp_max(largest);
        float base = softmax_base(largest);
#pragma unroll 1
        for (int p = lane; p < parts.num; p += 32) {
            if (p >= 32) {
                m0 = __ldcg(parts.m + p * parts.step + r);
                l0 = __ldcg(parts.l + p * parts.step + r);
            }
            float by = exp_to(m0, base);
            sum += by * l0;
            if (p < parts.kept) sh.out[p * parts.rows + r] = by;
            else __stcg(parts.m + p * parts.step + r, by);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sh.warp_m[r] = largest;
            sh.warp_l[r] = sum;
        }
    }
    __syncthreads();
}

/* Loads at a time: as many as spill nothing. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MERGE_LOADS 11
#else
#define MERGE_LOADS 10
#endif

/* Four numbers of a row over all parts in their order. */
static __device__ __forceinline__ float4 add_parts(const block_shared &sh, const part_list &parts,
                                                   int r, const float *from)
{
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < parts.num; first += MERGE_LOADS) {
        float4 x[MERGE_LOADS];
#pragma unroll
        for (int i = 0; i < MERGE_LOADS; i++) {
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i < parts.num) x[i] = __ldcg((const float4 *)from);
            from += parts.step;
        }
#pragma unroll
        for (int i = 0; i < MERGE_LOADS; i++) {
            int p = min(first + i, parts.num - 1);
            float by =
                p < parts.kept ? sh.out[p * parts.rows + r] : __ldcg(parts.m + p * parts.step + r);
            sum.x += x[i].x * by;
            sum.y += x[i].y * by;
            sum.z += x[i].z * by;
            sum.w += x[i].w * by;
        }
    }
    return sum;
}

static __device__ __forceinline__ void merge_parts(const decode_args &a, const block_shared &sh,
                                                   const folioi_cuda_seq &s,
                                                   const folioi_decode_item &item, int rows,
                                                   int first_row, int kv_head)
{
    int dims = a.layer.v_dims, quads = dims / 4;
    float *part = part_at(a, item.store, kv_head), *m = part + a.max_rows * dims + first_row;
    part_list parts = {part + first_row * dims,
                       m,
                       m + a.max_rows,
                       (int64_t)a.layer.num_kv_heads * a.max_rows * (dims + 2),
                       item.num_parts,
                       rows,
                       a.out_copies * a.out_size / rows};
    weigh_parts(a, sh, parts);
#pragma unroll 1
    for (int n = threadIdx.x; n < rows * quads; n += blockDim.x) {
        int r = n / quads, d = n % quads * 4;
        float4 sum = add_parts(sh, parts, r, parts.sums + r * dims + d);
        out_place at = place_of(a, s, kv_head, first_row + r);
        float l = sh.warp_l[r];
        row_end end = end_row(a, sh.warp_m[r], l, at.h);
        store_quad(a, out_index(a, at) + d, sum, end.by, l);
        if (d == 0) store_lse(a, at, end.lse);
    }
}

static __device__ __forceinline__ void end_item(const decode_args &a, const block_shared &sh,
                                                const folioi_cuda_seq &s,
                                                const folioi_decode_item &item, int rows,
                                                int first_row, int kv_head)
{
    if (item.num_parts == 1) {
        store_rows(a, sh, s, rows, first_row, kv_head);
        return;
    }
    store_part(a, sh, part_at(a, item.store + item.part, kv_head), rows, first_row);
    if (is_last(counter_of(a, item.seq, kv_head, first_row), item.num_parts, sh.flag))
        merge_parts(a, sh, s, item, rows, first_row, kv_head);
}

/* Rows [first, past) of out become zeros. */
static __device__ __forceinline__ void store_no_keys(const decode_args &a, int64_t first,
                                                     int64_t past)
{
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    int64_t heads = a.layer.num_heads, dims = a.layer.v_dims;
    for (int64_t n = thread; n < (past - first) * heads * dims; n += threads) {
        int64_t d = n % dims;
        out_place at = {first + n / dims / heads, (int)(n / dims % heads)};
        store_half(a, at.row * a.layer.out.token + at.h * a.layer.out.head + d, 0.0f);
        if (d == 0) store_lse(a, at, a.layer.sinks != NULL ? a.layer.sinks[at.h] : -INFINITY);
    }
}

/* Rows past the batch's, and those of sequences that were refused. */
static __device__ __noinline__ void store_padding(const decode_args &a,
                                                  const folioi_cuda_counts &counts)
{
    store_no_keys(a, counts.num_rows, a.out_rows);
    for (int i = 0; counts.num_emptied > 0 && i < counts.num_seqs; i++) {
        int64_t past = i + 1 < counts.num_seqs ? a.seqs[i + 1].query_row : counts.num_rows;
        if (a.seqs[i].query_len == 0) store_no_keys(a, a.seqs[i].query_row, past);
    }
}

#endif
