/*
 * decode_end.h: the end of an item. The warps' sums are added in the order of warps. A whole sequence is stored. A part goes
 * to the workspace, and the block that stores a sequence's last part merges all of them.
 */
#ifndef FOLIOI_DECODE_END_H
#define FOLIOI_DECODE_END_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_f32.h"
#include "backends/cuda/decode/decode_softmax.h"
#include "backends/cuda/decode/decode_values.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/*
 * The sums of an item in sh.out: copies of [rows][out_stride], each of one warp or more. With up to four rows there is room
 * for twice the copies. If tiles are packed, bits 1 and 2 of a dim's number are XORed with the row: no bank conflicts.
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

/* Add the warps' sums to sh.out in the order of warps. Sets row_m, and in warp_l what each warp adds to a row's weight. */
template <int VMAX, int NT, int WARPS, bool F32>
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
    if constexpr (F32) rescale_f32<VMAX, NT>(o, by, sh.weights);
    else rescale<VMAX, NT>(o, by, wide);
    item_sums sums = sums_of(a, num_rows);
    int stride = order == PACKED_DIMS ? VMAX + 4 : a.out_stride;
#pragma unroll 1
    for (int w = 0; w < a.num_warps; w += sums.copies) {
        float *out = sh.out + (warp - w) * sums.size;
        if constexpr (F32) {
            if (warp >= w && warp < w + sums.copies)
                put_sums_f32<VMAX, NT>(o, out, stride, num_rows, w > 0);
        } else if (warp >= w && warp < w + sums.copies) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (8 * n + 2 * t >= num_rows) break;
#pragma unroll
                for (int i = 0; i < VMAX / 16; i++) {
                    if (i >= steps) break;
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int r = 8 * n + 2 * t + (e & 1);
                        int d = 16 * i +
                                (order == EVEN_ODD_DIMS ? 2 * g + (e & 2) / 2 : g + (e & 2) * 4);
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

/* The weight of a row: the sum over the warps. */
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

struct out_place {
    int64_t row;
    int h;
};

/* Store four numbers of a row of out, times `by`. A row without keys (l == 0) is zeros, whatever x is. */
template <bool F32, class A>
static __device__ __forceinline__ void store_quad(const A &a, out_place at, int64_t index, float4 x,
                                                  float by, float l)
{
    if (l == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (F32) {
        *(float4 *)((float *)a.layer.out.data + index) =
            make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
        return;
    }
    bool bf16 = a.layer.dtype == FOLIO_BF16;
    uint2 bits = {bf16 ? pack<__nv_bfloat16>(x.x * by, x.y * by) : pack<__half>(x.x * by, x.y * by),
                  bf16 ? pack<__nv_bfloat16>(x.z * by, x.w * by)
                       : pack<__half>(x.z * by, x.w * by)};
    if constexpr (A::NOTES)
        if (is_bad_pair(bits.x, bf16) || is_bad_pair(bits.y, bf16))
            note_bad(a.noting, FOLIO_WRITTEN_OUT, at.row, at.h);
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

static __device__ __forceinline__ out_place place_of(const decode_args &a, const folioi_cuda_seq &s,
                                                     int kv_head, int row)
{
    int i = s.query_len > 1 ? row / a.heads_per_kv : 0;
    return {s.query_row + i, kv_head * a.heads_per_kv + row - i * a.heads_per_kv};
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
template <bool PACKED, bool F32, int WARPS, class A>
static __device__ __forceinline__ void store_rows(const A &a, const block_shared &sh,
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
            store_quad<F32>(a, at, out + d, sum_at<PACKED>(a, sh, sums, r, d), end.by, l);
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

/* The parts of one row. Lane l of the warp that merges them has m and l of parts l and l + 32; later ones are loaded again. */
struct row_parts {
    const float *sums, *m, *l; /* of part 0 */
    int64_t step;              /* from part to part */
    int num;
    float m_of[2], l_of[2];
};

static __device__ __forceinline__ void load_weights(row_parts &parts, int first)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int p = first + 32 * i + lane;
        parts.m_of[i] = p < parts.num ? __ldcg(parts.m + p * parts.step) : -INFINITY;
        parts.l_of[i] = p < parts.num ? __ldcg(parts.l + p * parts.step) : 0.0f;
    }
}

/* Maximum and weight of the row over all parts: in each lane, then over the warp. */
static __device__ __forceinline__ void weigh_parts(row_parts &parts, float *row_m, float *row_l)
{
    float largest = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int first = 0;; first += 64) {
        float m = fmaxf(largest, fmaxf(parts.m_of[0], parts.m_of[1])), base = softmax_base(m);
        sum = sum * exp_to(largest, base) + parts.l_of[0] * exp_to(parts.m_of[0], base) +
              parts.l_of[1] * exp_to(parts.m_of[1], base);
        largest = m;
        if (first + 64 >= parts.num) break;
        load_weights(parts, first + 64);
    }
    *row_m = warp_max(largest);
    *row_l = warp_sum(sum * exp_to(largest, softmax_base(*row_m)));
}

/* Start the copies of a lane's four sums of `count` parts to shared memory: 16 bytes per lane and part. */
static __device__ __forceinline__ void bring_parts(uint32_t to, const row_parts &parts, int first,
                                                   int count, bool inside)
{
    const float *from = parts.sums + first * parts.step;
#pragma unroll 4
    for (int p = 0; p < count; p++) {
        if (inside) cp_async<16>(to, from);
        to += 512;
        from += parts.step;
    }
    cp_async_commit();
}

/* Add them, each times its weight. The weights of parts first - first % 64 and the next 63 are loaded. */
static __device__ __forceinline__ float4 add_parts(uint32_t at, const row_parts &parts, int first,
                                                   int count, float row_m, float4 sum)
{
    float base = softmax_base(row_m);
    float by[2] = {exp_to(parts.m_of[0], base), exp_to(parts.m_of[1], base)};
#pragma unroll 4
    for (int p = first; p < first + count; p++) {
        uint32_t x[4];
        load_shared(x, at);
        float w = __shfl_sync(ALL_LANES, p & 32 ? by[1] : by[0], p & 31);
        sum.x += __uint_as_float(x[0]) * w;
        sum.y += __uint_as_float(x[1]) * w;
        sum.z += __uint_as_float(x[2]) * w;
        sum.w += __uint_as_float(x[3]) * w;
        at += 512;
    }
    return sum;
}

/* One row of a sequence whose parts are all there. room: in shared memory, for
 * 16 bytes a lane of each of `most` parts. */
template <bool F32, class A>
static __device__ __forceinline__ void merge_row(const A &a, row_parts &parts, const float *sums,
                                                 out_place at, uint32_t room, int most)
{
    int dims = a.layer.v_dims, lane = threadIdx.x & 31;
    float row_m = 0.0f, row_l = 0.0f;
    row_end end = {};
#pragma unroll 1
    for (int d = 0; d < dims; d += 128) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        bool inside = d + 4 * lane < dims;
        parts.sums = sums + d + 4 * lane;
#pragma unroll 1
        for (int first = 0; first < parts.num; first += most) {
            int count = min(most, parts.num - first);
            bring_parts(room, parts, first, count, inside);
            if (first % 64 == 0) load_weights(parts, first);
            if (d == 0 && first == 0) {
                weigh_parts(parts, &row_m, &row_l);
                if (parts.num > 64) load_weights(parts, 0);
                end = end_row(a, row_m, row_l, at.h);
            }
            cp_async_wait<0>(); /* each lane reads what it has brought */
            sum = add_parts(room, parts, first, count, row_m, sum);
        }
        if (inside) store_quad<F32>(a, at, out_index(a, at) + d + 4 * lane, sum, end.by, row_l);
        if (d + lane == 0) store_lse(a, at, end.lse);
    }
}

/*
 * Count a part that is stored. The block that counts the last one merges the sequence, a warp for each row. It does so in
 * few instructions, because no cache has them yet. is_end: the whole block merges and uses the stages. Else one warp does,
 * and uses the sums.
 */
template <bool F32, class A>
static __device__ __forceinline__ void merge_parts(const A &a, const block_shared &sh,
                                                   const folioi_decode_item &item, int rows,
                                                   int first_row, int kv_head, bool is_end)
{
    int dims = a.layer.v_dims, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int own = is_end ? warp : 0, num_warps = is_end ? a.num_warps : 1, was = -1;
    int32_t *counter = counter_of(a, item.seq, kv_head, first_row);
    if (own + lane == 0) was = add_in_order(counter, 1);
    /* prepared while that is on its way */
    row_parts parts = {};
    parts.step = (int64_t)a.layer.num_kv_heads * a.max_rows * (dims + 2);
    parts.num = item.num_parts;
    const float *sums = part_at(a, item.store, kv_head) + (first_row + own) * dims;
    parts.m = sums + a.max_rows * dims - (first_row + own) * (dims - 1);
    parts.l = parts.m + a.max_rows;
    int stages = a.num_stages * a.stage_bytes;
    int bytes = is_end ? a.num_warps * stages : a.out_copies * a.out_size * 4;
    /* at least one: a row of the sums has as many bytes */
    int most = (int)((float)bytes / (float)(min(rows, num_warps) * 512));
    uint32_t room = shared_address(is_end ? sh.stages - warp * stages : (char *)sh.out) +
                    own * most * 512 + 16 * lane;
    if (parts.num > 64) most = 1 << (31 - __clz(min(most, 64))); /* none has weights of two loads */
    bool last = was == parts.num - 1;
    if (last) *counter = 0; /* as it was found */
    if (is_end) {
        if (threadIdx.x == 0) *sh.flag = last;
        __syncthreads();
        last = *sh.flag;
    } else {
        last = __shfl_sync(ALL_LANES, last, 0);
        __syncwarp();
    }
    if (!last) return;
#pragma unroll 1
    for (int r = own; r < rows; r += num_warps) {
        merge_row<F32>(a, parts, sums, place_of(a, item.sequence, kv_head, first_row + r), room,
                       most);
        sums += num_warps * dims;
        parts.m += num_warps;
        parts.l += num_warps;
    }
}

/* is_end: this is the block's last item, so the stages are free. Else one warp counts the part and the others go on. */
template <bool PACKED, bool F32, int WARPS, class A>
static __device__ __forceinline__ void end_item(const A &a, const block_shared &sh,
                                                const folioi_decode_item &item, int rows,
                                                int first_row, int kv_head, bool is_end)
{
    if (item.num_parts == 1) {
        store_rows<PACKED, F32, WARPS>(a, sh, item.sequence, rows, first_row, kv_head);
        return;
    }
    store_part<PACKED, WARPS>(a, sh, part_at(a, item.store + item.part, kv_head), rows, first_row);
    __syncthreads();
    if (is_end || threadIdx.x / 32 == a.num_warps - 1)
        merge_parts<F32>(a, sh, item, rows, first_row, kv_head, is_end);
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
        int64_t index = at.row * a.layer.out.token + at.h * a.layer.out.head + d;
        if (a.layer.dtype == FOLIO_F32) ((float *)a.layer.out.data)[index] = 0.0f;
        else store_half(a, index, 0.0f);
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
