/*
 * prefill_parts.h: parts of a tile that is cut, in the workspace: each part's out and lse as if its keys were all, without
 * sinks. The block that ends a tile's last part merges them, part after part. Blocks that have nothing left to do wait a
 * while for that, and then help: whoever takes some rows, they come to the same bits.
 *
 *   counters: the next item, blocks that are gone, 2 unused | of each cut tile and unit: parts done, rows taken, blocks gone, 1 unused
 *   out[row][kv head][v_dims], lse[row][kv head][2: first and second half of V's dims], both f32
 *
 * Row r of part p is store + p * rows of the tile + r, r being query * heads_per_kv + query head. Every launch leaves zeros in the
 * counters.
 */
#ifndef FOLIOI_CUDA_PREFILL_PARTS_H
#define FOLIOI_CUDA_PREFILL_PARTS_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_f32.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/warp.h"

#include <math_constants.h>

/* Where a row of the block's part lies, in rows of one kv head. */
static __device__ __forceinline__ int64_t part_row(const prefill_args &a, const prefill_work &w,
                                                   int32_t part, row_place p)
{
    int64_t row = w.store + (int64_t)part * w.tile_rows +
                  (p.query - w.tile_query) * a.heads_per_kv + p.head - w.kv_head * a.heads_per_kv;
    return row * a.layer.num_kv_heads + w.kv_head;
}

static __device__ __forceinline__ float *part_lse(const prefill_args &a, const prefill_work &w,
                                                  int64_t row)
{
    return a.part_lse + row * 2 + (w.first_value > 0);
}

static __device__ __forceinline__ float *part_out(const prefill_args &a, const prefill_work &w,
                                                  int64_t row)
{
    return a.part_out + row * a.layer.v_dims + w.first_value;
}

/* The warp's rows of out, times what finish_rows left in st.sum. */
template <class I, int M>
static __device__ __forceinline__ void store_part(const prefill_state<I::DV, M> &st,
                                                  const prefill_args &a, const prefill_work &w,
                                                  int row0)
{
    constexpr int STEP =
        I::KV == KV_WIDE ? 1 : 2; /* of 8-bit V a lane has every second of 16 dims */
#pragma unroll
    for (int i = 0; i < M * 2; i++) {
        int lane = fresh_lane(), m = i / 2, r = i % 2 * 2;
        row_place p = place_of(a, w, row0 + i * 8 + lane / 4);
        if (p.query < 0) continue;
        float *to = part_out(a, w, part_row(a, w, w.part, p));
        float f = st.sum[m][i % 2];
        if constexpr (I::F32) {
            put_row_f32<I, M>(st, to, m, i % 2, f);
            continue;
        }
        to += lane % 4 * 2 * STEP;
        int32_t dims = I::FIXED ? I::DV : a.layer.v_dims - w.first_value;
#pragma unroll
        for (int n = 0; n < I::DV / 8; n += STEP) {
            const float *x = &st.out[m][n][r];
            if (!I::FIXED && n * 8 >= dims) break;
            if constexpr (STEP == 1) {
                __stcg((float2 *)(to + n * 8), make_float2(x[0] * f, x[1] * f));
            } else {
                const float *odd = &st.out[m][n + 1][r];
                __stcg((float4 *)(to + n * 8),
                       make_float4(x[0] * f, odd[0] * f, x[1] * f, odd[1] * f));
            }
        }
    }
}

/* ---- the merge ---- */

/* A row while its parts are added: out in units of e^largest. */
struct merged_row {
    float4 out;
    float largest, sum;
};

static __device__ __forceinline__ void add_part(merged_row &row, float4 out, float lse)
{
    float top = fmaxf(row.largest, lse), base = softmax_base(top);
    float before = exp2_approx((row.largest - base) * LOG2E),
          by = exp2_approx((lse - base) * LOG2E);
    row.out = make_float4(row.out.x * before + out.x * by, row.out.y * before + out.y * by,
                          row.out.z * before + out.z * by, row.out.w * before + out.w * by);
    row.sum = row.sum * before + by;
    row.largest = top;
}

/* Four numbers of out in 16 bits. */
static __device__ __forceinline__ void store_halves(const prefill_args &a, uint16_t *to, float4 x)
{
    bool is_bf16 = a.layer.dtype == FOLIO_BF16;
    const float numbers[4] = {x.x, x.y, x.z, x.w};
    uint16_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = float_to_half_bits(numbers[i], is_bf16);
    if (a.aligned) {
        *(uint2 *)to =
            make_uint2(bits[0] | (uint32_t)bits[1] << 16, bits[2] | (uint32_t)bits[3] << 16);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = bits[i];
    }
}

/* Four numbers of a row that is merged, with its sink. */
template <class I>
static __device__ __forceinline__ void store_merged(const prefill_args &a, const prefill_work &w,
                                                    const merged_row &row, row_place p,
                                                    int64_t query_row, int32_t d)
{
    const folioi_cuda_layer &l = a.layer;
    float sink = l.sinks != NULL ? l.sinks[p.head] : -CUDART_INF_F, lse = sink, f = 0.0f;
    if (row.sum != 0.0f) {
        float base = softmax_base(fmaxf(row.largest, sink));
        float by = exp2_approx((softmax_base(row.largest) - base) * LOG2E);
        float sum = row.sum * by + exp2_approx((sink - base) * LOG2E);
        lse = base + log2f(sum) * LN2;
        f = by / sum;
    }
    float4 x = row.sum != 0.0f ? row.out : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int64_t at = row_index(l.out, query_row + p.query, p.head) + w.first_value + d;
    x = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    if constexpr (I::F32) *(float4 *)((float *)l.out.data + at) = x;
    else store_halves(a, (uint16_t *)l.out.data + at, x);
    if (l.lse != NULL && d == 0 && w.first_value == 0)
        l.lse[(query_row + p.query) * l.lse_token + p.head * l.lse_head] = lse;
}

/*
 * A thread merges four dims of MERGE_ROWS rows. It brings as many parts as K and V leave room for to shared memory at once:
 * loads to registers would be waited for one by one.
 */
constexpr int MERGE_ROWS = 4;

template <class I> struct merge_shape {
    static constexpr int QUADS = I::DV / 4, TEAM = I::THREADS / QUADS; /* rows side by side */
    static constexpr int CHUNK = TEAM * MERGE_ROWS;                    /* rows taken at once */
    static constexpr int PLACES = (int)sizeof(I::shared::kv) / (I::THREADS * 20);
    static constexpr int PARTS = PLACES / MERGE_ROWS;
    static_assert(PARTS > 0, "room for a part");
};

/* Where the thread has four numbers of out, and an lse. */
template <class I> static __device__ __forceinline__ char *merge_out(typename I::shared &sh, int n)
{
    return &sh.kv[0][0] + (n * I::THREADS + (int)threadIdx.x) * 16;
}

template <class I> static __device__ __forceinline__ char *merge_lse(typename I::shared &sh, int n)
{
    return &sh.kv[0][0] + ((merge_shape<I>::PLACES * 4 + n) * I::THREADS + (int)threadIdx.x) * 4;
}

/* Some rows of the block's unit: a thread has four dims of every TEAM-th row. */
template <class I>
static __device__ __forceinline__ void merge_chunk(const prefill_args &a, typename I::shared &sh,
                                                   int32_t chunk)
{
    using S = merge_shape<I>;
    const prefill_work &w = sh.work;
    int32_t d = (int32_t)threadIdx.x % S::QUADS * 4;
    int32_t first = chunk * S::CHUNK + (int32_t)threadIdx.x / S::QUADS;
    if (!I::FIXED && d >= a.layer.v_dims - w.first_value) return;
    merged_row rows[MERGE_ROWS];
    int64_t at[MERGE_ROWS], step = (int64_t)w.tile_rows * a.layer.num_kv_heads;
#pragma unroll
    for (int j = 0; j < MERGE_ROWS; j++) {
        row_place p = place_of(a, w, first + j * S::TEAM);
        at[j] = p.query < 0 ? -1 : part_row(a, w, 0, p);
        rows[j] = {{0.0f, 0.0f, 0.0f, 0.0f}, -CUDART_INF_F, 0.0f};
    }
#pragma unroll 1
    for (int32_t part = 0; part < w.num_parts; part += S::PARTS) {
        int32_t num = min(S::PARTS, w.num_parts - part);
#pragma unroll 1
        for (int k = 0; k < num; k++)
#pragma unroll
            for (int j = 0; j < MERGE_ROWS; j++) {
                if (at[j] < 0) continue;
                int64_t row = at[j] + (part + k) * step;
                int n = k * MERGE_ROWS + j;
                cp_async<16>(shared_address(merge_out<I>(sh, n)), part_out(a, w, row) + d);
                cp_async<4>(shared_address(merge_lse<I>(sh, n)), part_lse(a, w, row));
            }
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 1
        for (int k = 0; k < num; k++)
#pragma unroll
            for (int j = 0; j < MERGE_ROWS; j++) {
                int n = k * MERGE_ROWS + j;
                if (at[j] >= 0)
                    add_part(rows[j], *(const float4 *)merge_out<I>(sh, n),
                             *(const float *)merge_lse<I>(sh, n));
            }
    }
#pragma unroll
    for (int j = 0; j < MERGE_ROWS; j++) {
        row_place p = place_of(a, w, first + j * S::TEAM);
        if (p.query >= 0) store_merged<I>(a, w, rows[j], p, sh.seq.query_row, d);
    }
}

/* How often a block with nothing else to do looks whether all parts are there: about 50 us. */
#define PREFILL_LOOKS 64

/* Are all parts there? The others have more to do, and leave it to the block that ends the last one. */
static __device__ __forceinline__ bool await_parts(int32_t *counter, int32_t num_parts,
                                                   bool has_more)
{
    int32_t done = add_in_order(counter, 1) + 1;
#pragma unroll 1 /* code that is cold costs time */
    for (int i = 0; done < num_parts && !has_more && i < PREFILL_LOOKS; i++) {
        __nanosleep(100);
        done = load_in_order(counter);
    }
    return done == num_parts;
}

/* The block has stored its part. */
template <class I>
static __device__ __noinline__ void end_part(const prefill_args &a, typename I::shared &sh)
{
    const prefill_work &w = sh.work;
    int32_t *counter = a.counters + 4 * (1 + (int64_t)w.counter * a.units + w.unit);
    __syncthreads();
    if (fresh_thread() == 0)
        sh.chunk = await_parts(counter, w.num_parts, sh.next < sh.total) ? 0 : -1;
    __syncthreads();
    if (sh.chunk == 0) {
        int32_t chunks = ((w.past_query - w.first_query) * a.heads + merge_shape<I>::CHUNK - 1) /
                         merge_shape<I>::CHUNK;
        for (;;) {
            __syncthreads();
            if (fresh_thread() == 0) sh.chunk = atomicAdd(counter + 1, 1);
            __syncthreads();
            if (sh.chunk >= chunks) break;
            merge_chunk<I>(a, sh, sh.chunk);
        }
    }
    if (fresh_thread() == 0 && add_in_order(counter + 2, 1) == w.num_parts - 1)
        counter[0] = counter[1] = counter[2] = 0; /* nobody else is here */
}

#endif
