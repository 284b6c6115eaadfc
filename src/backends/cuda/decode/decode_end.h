/*
 * decode_end.h: what happens when an item's keys are through: warps add up in their order, a whole
 * sequence is stored, a part goes to the workspace, and the last block of a sequence merges its parts.
 */
#ifndef FOLIOI_DECODE_END_H
#define FOLIOI_DECODE_END_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_softmax.h"
#include "backends/cuda/decode/decode_values.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/*
 * The sums of an item in sh.out: copies of [rows][out_stride], each of one warp or more; rows are those that there are, four
 * leaving room for twice the copies. Where tiles are packed, bits 1 and 2 of a dim's number are flipped as the row says, lest
 * threads of a warp meet in a bank.
 */
struct item_sums {
    int copies, size;
};

static __device__ __forceinline__ item_sums sums_of(const decode_args &a, int num_rows)
{
    bool half = num_rows <= 4;
    return {half ? 2 * a.out_copies : a.out_copies, half ? a.out_size / 2 : a.out_size};
}

static __device__ __forceinline__ int exchanged(bool packed, int row, int d)
{
    return packed ? d ^ (row & 6) : d;
}

/* Warps' sums into sh.out in the order of warps. warp_l becomes what each adds to the row's sum; row_m is set. */
template <int VMAX, int NT, int WARPS>
static __device__ __forceinline__ void add_warps(const decode_args &a, const block_shared &sh,
                                                 const row_state<NT> &rows,
                                                 float o[VMAX / 16][NT][4], int steps,
                                                 dim_order order, int warp, int num_rows)
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    bool wide = num_rows > 8;
    if (g == 0) {
#pragma unroll
        for (int row = 0; row < 2 * NT; row++) sh.warp_m[warp * 16 + row_of(t, row)] = rows.m[row];
    }
    __syncthreads();
    float by[2 * NT];
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = row_of(t, row);
        float m = -INFINITY, l = row_sum(rows.l[row]);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < a.num_warps) m = fmaxf(m, sh.warp_m[w * 16 + r]);
        by[row] = exp_to(rows.m[row], softmax_base(m));
        if (g == 0) sh.warp_l[warp * 16 + r] = l * by[row];
        if (g == 0 && warp == 0) sh.row_m[r] = m;
    }
    rescale<VMAX, NT>(o, by, wide);
    item_sums sums = sums_of(a, num_rows);
    int stride = order == PACKED_DIMS ? VMAX + 4 : a.out_stride;
#pragma unroll 1
    for (int w = 0; w < a.num_warps; w += sums.copies) {
        float *out = sh.out + (warp - w) * sums.size;
        if (warp >= w && warp < w + sums.copies) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (8 * n + 2 * t >= num_rows) break;
#pragma unroll
                for (int i = 0; i < VMAX / 16; i++) {
                    if (i >= steps) break;
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int r = 8 * n + 2 * t + (e & 1);
                        int d =
                            16 * i + (order == TURNED_DIMS ? 2 * g + (e & 2) / 2 : g + (e & 2) * 4);
                        if (order == PACKED_DIMS)
                            d = packed_dim(i & ~1, g, false) +
                                exchanged(true, r, packed_dim(i % 2, 0, e & 2));
                        float *to = out + r * stride + d;
                        if (w > 0) o[i][n][e] += *to;
                        *to = o[i][n][e];
                    }
                }
            }
        }
        __syncthreads();
    }
}

/* What the warps' weights of a row come to. */
template <int WARPS>
static __device__ __forceinline__ float add_weights(const decode_args &a, const block_shared &sh,
                                                    int r)
{
    float l = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < a.num_warps) l += sh.warp_l[w * 16 + r];
    return l;
}

struct row_end {
    float by, lse; /* what the sum is multiplied with; lse of the row */
};

/* Numbers d .. d + 3 of row r of an item's sums. */
template <bool PACKED>
static __device__ __forceinline__ float4 sum_at(const decode_args &a, const block_shared &sh,
                                                item_sums sums, int r, int d)
{
    const float *from = sh.out + r * a.out_stride + exchanged(PACKED, r & 4, d);
    float4 x = *(const float4 *)from;
#pragma unroll 3
    for (int copy = 1; copy < min(sums.copies, a.num_warps); copy++) {
        float4 y = *(const float4 *)(from + copy * sums.size);
        x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    return PACKED && r & 2 ? make_float4(x.z, x.w, x.x, x.y) : x;
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
    int i = s.query_len > 1 ? row / a.group : 0;
    return {s.query_row + i, kv_head * a.group + row - i * a.group};
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
template <bool PACKED, int WARPS>
static __device__ __forceinline__ void store_rows(const decode_args &a, const block_shared &sh,
                                                  const folioi_cuda_seq &s, int rows, int first_row,
                                                  int kv_head)
{
    item_sums sums = sums_of(a, rows);
    int dims = a.layer.v_dims, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int r = warp; r < rows; r += a.num_warps) {
        out_place at = place_of(a, s, kv_head, first_row + r);
        float l = add_weights<WARPS>(a, sh, r);
        row_end end = end_row(a, sh.row_m[r], l, at.h);
        int64_t out = out_index(a, at);
#pragma unroll 1
        for (int d = 4 * lane; d < dims; d += 128)
            store_quad(a, out + d, sum_at<PACKED>(a, sh, sums, r, d), end.by, l);
        if (lane == 0) store_lse(a, at, end.lse);
    }
}

/* Place of a part's sums: [max_rows][v_dims], m[max_rows], l[max_rows]. */
static __device__ __forceinline__ float *part_at(const decode_args &a, int64_t store, int kv_head)
{
    int64_t size = (int64_t)a.max_rows * (a.layer.v_dims + 2);
    return a.partials + (store * a.layer.num_kv_heads + kv_head) * size;
}

template <bool PACKED, int WARPS>
static __device__ __forceinline__ void store_part(const decode_args &a, const block_shared &sh,
                                                  float *part, int rows, int first_row)
{
    item_sums sums = sums_of(a, rows);
    int dims = a.layer.v_dims, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    float *m = part + a.max_rows * dims, *l = m + a.max_rows;
#pragma unroll 1
    for (int r = warp; r < rows; r += a.num_warps) {
        float *to = part + (first_row + r) * dims;
#pragma unroll 1
        for (int d = 4 * lane; d < dims; d += 128)
            __stcg((float4 *)(to + d), sum_at<PACKED>(a, sh, sums, r, d));
    }
    if (warp == a.num_warps - 1 && lane < rows) { /* the warp that has the fewest rows */
        __stcg(m + first_row + lane, sh.row_m[lane]);
        __stcg(l + first_row + lane, add_weights<WARPS>(a, sh, lane));
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

/*
 * Maximum of a row over its parts, and its sum; lane by lane, then over the warp. m, l: of part 0; step: from part to
 * part.
 */
static __device__ __forceinline__ void weigh_parts(const float *m, const float *l, int64_t step,
                                                   int num_parts, float *row_m, float *row_l)
{
    float largest = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int p = threadIdx.x & 31; p < num_parts; p += 32) {
        float part_m = __ldcg(m + p * step), part_l = __ldcg(l + p * step);
        float base = softmax_base(fmaxf(largest, part_m));
        sum = sum * exp_to(largest, base) + part_l * exp_to(part_m, base);
        largest = fmaxf(largest, part_m);
    }
    *row_m = warp_max(largest);
    *row_l = warp_sum(sum * exp_to(largest, softmax_base(*row_m)));
}

/*
 * `count` parts from `sums` and `m` on, a lane's four sums of each, on their way to shared memory. A part has `size`
 * numbers there: up to 128 sums, and the four at m, at a multiple of 16 bytes. Not 4 bytes of them: such copies come by
 * way of L1, which may hold what was there before.
 */
static __device__ __forceinline__ void bring_parts(float *to, const float *sums, const float *m,
                                                   int64_t step, int count, int size, bool inside)
{
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int p = 0; p < count; p++) {
        if (inside) cp_async<16>(shared_address(to + 4 * lane), sums + 4 * lane);
        if (lane == 0) cp_async<16>(shared_address(to + size - 4), m);
        to += size;
        sums += step;
        m += step;
    }
    cp_async_commit();
}

/*
 * A warp for each row, with no barrier, and few instructions: no cache has them when the last block comes here. Parts
 * come by way of shared memory, all at once where there is room: the stages, or the sums where tiles of the next item
 * come into those.
 */
static __device__ __forceinline__ void merge_parts(const decode_args &a, const block_shared &sh,
                                                   const folioi_cuda_seq &s,
                                                   const folioi_decode_item &item, int rows,
                                                   int first_row, int kv_head, bool is_end)
{
    int dims = a.layer.v_dims, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int64_t step = (int64_t)a.layer.num_kv_heads * a.max_rows * (dims + 2);
    const float *part = part_at(a, item.store, kv_head);
    int bytes = is_end ? a.num_warps * a.num_stages * a.stage_bytes : a.out_copies * a.out_size * 4;
    char *room = is_end ? sh.stages - warp * a.num_stages * a.stage_bytes : (char *)sh.out;
    /* at least one: a row of the sums has as many numbers */
    int size = min(dims, 128) + 4;
    int most = (int)((float)bytes / (float)(min(rows, a.num_warps) * size * 4));
    float *brought = (float *)room + warp * most * size;
#pragma unroll 1
    for (int r = warp; r < rows; r += a.num_warps) {
        int row = first_row + r;
        const float *m = part + a.max_rows * dims, *sums = part + row * dims;
        float row_m = 0.0f, row_l = 0.0f;
#pragma unroll 1
        for (int d = 0; d < dims; d += 128) {
            float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
            bool inside = d + 4 * lane < dims;
            const float *own = brought + (inside ? 4 * lane : 0);
#pragma unroll 1
            for (int first = 0; first < item.num_parts; first += most) {
                int count = min(most, item.num_parts - first);
                bring_parts(brought, sums + first * step + d, m + (row & ~3) + first * step, step,
                            count, size, inside);
                if (d == 0 && first == 0)
                    weigh_parts(m + row, m + a.max_rows + row, step, item.num_parts, &row_m,
                                &row_l);
                cp_async_wait<0>();
                __syncwarp();
#pragma unroll 4
                for (int p = 0; p < count; p++) {
                    float4 x = *(const float4 *)(own + p * size);
                    float by = exp_to(brought[(p + 1) * size - 4 + (row & 3)], softmax_base(row_m));
                    sum.x += x.x * by;
                    sum.y += x.y * by;
                    sum.z += x.z * by;
                    sum.w += x.w * by;
                }
                __syncwarp();
            }
            out_place at = place_of(a, s, kv_head, row);
            row_end end = end_row(a, row_m, row_l, at.h);
            if (inside) store_quad(a, out_index(a, at) + d + 4 * lane, sum, end.by, row_l);
            if (d + lane == 0) store_lse(a, at, end.lse);
        }
    }
}

template <bool PACKED, int WARPS>
static __device__ __forceinline__ void end_item(const decode_args &a, const block_shared &sh,
                                                const folioi_cuda_seq &s,
                                                const folioi_decode_item &item, int rows,
                                                int first_row, int kv_head, bool is_end)
{
    if (item.num_parts == 1) {
        store_rows<PACKED, WARPS>(a, sh, s, rows, first_row, kv_head);
        return;
    }
    store_part<PACKED, WARPS>(a, sh, part_at(a, item.store + item.part, kv_head), rows, first_row);
    if (is_last(counter_of(a, item.seq, kv_head, first_row), item.num_parts, sh.flag))
        merge_parts(a, sh, s, item, rows, first_row, kv_head, is_end);
}

/* Rows [first, past) of out become zeros. */
static __device__ __forceinline__ void store_no_keys(const decode_args &a, int64_t first,
                                                     int64_t past)
{
    int64_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int64_t thread = block * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * gridDim.y * gridDim.z * blockDim.x;
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
