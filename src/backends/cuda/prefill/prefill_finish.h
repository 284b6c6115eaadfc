/* prefill_finish.h: a tile's end: sinks join, sums divide, out and lse are stored. */
#ifndef FOLIOI_CUDA_PREFILL_FINISH_H
#define FOLIOI_CUDA_PREFILL_FINISH_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_f32.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/prefill/prefill_parts.h"
#include "backends/cuda/prefill/prefill_softmax.h"
#include "backends/cuda/prefill/prefill_widen.h"
#include "backends/cuda/warp.h"

#include <math_constants.h>

/* Is a NaN in a row of the warp? */
template <int DV, int M>
static __device__ __forceinline__ bool has_nan(const prefill_state<DV, M> &st)
{
    bool is_nan = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) is_nan |= st.out[m][n][i] != st.out[m][n][i];
    }
    return is_nan;
}

/* What out is multiplied with beside 1 / sum. */
template <class I, int M>
static __device__ __forceinline__ float value_unit(const prefill_state<I::DV, M> &st,
                                                   const folioi_cuda_layer &l, int32_t kv_head)
{
    if constexpr (I::KV == KV_INT8) return exp2_approx((float)st.value_log2);
    else if constexpr (I::KV != KV_WIDE) return folioi_cuda_scale(&l.v, kv_head);
    else return I::FIXED ? 1.0f : value_scale_at_end(l, kv_head);
}

/* Sinks join where the tile is whole, sums become the factor of the row's out; lse is stored. */
template <class I, int M>
static __device__ __forceinline__ void finish_rows(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int row0)
{
    constexpr float INVERSE = weight_shift<typename I::T>::INVERSE;
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    float unit = value_unit<I, M>(st, l, w.kv_head) * INVERSE;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = row0 + m * 16 + r * 8;
            float sum = st.sum[m][r] * INVERSE;
            float largest = st.largest[m][r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            row_place p = place_of(a, w, row + lane / 4);
            bool is_empty = sum == 0.0f && largest == -CUDART_INF_F;
            float sink = -CUDART_INF_F, lse, factor = 1.0f;
            if (l.sinks != NULL && p.query >= 0 && (I::ONCE || w.num_parts == 1))
                sink = l.sinks[p.head];
            if (is_empty) {
                lse = sink;
                factor = 0.0f;
            } else {
                largest = softmax_base(largest) * score_unit<I>(a, sh, row); /* 0: all are NaN */
                float top = fmaxf(largest, sink);
                factor = exp2_approx((largest - top) * LOG2E);
                sum = sum * factor + exp2_approx((sink - top) * LOG2E);
                lse = top + log2f(sum) * LN2;
                factor = factor / sum * unit;
            }
            if (!I::ONCE && p.query >= 0 && lane % 4 == 0 && w.num_parts > 1)
                __stcg(part_lse(a, w, part_row(a, w, w.part, p)), lse);
            else if (l.lse != NULL && p.query >= 0 && lane % 4 == 0 && w.first_value == 0)
                l.lse[(sh.seq.query_row + p.query) * l.lse_token + p.head * l.lse_head] = lse;
            st.sum[m][r] = factor;
        }
}

/* A row's 8 numbers of out, four lanes having two of them each; of 8-bit V, every second of 16. */
template <class I, int M>
static __device__ __forceinline__ void put_row(const prefill_state<I::DV, M> &st, char *rows,
                                               int row, int m, int r, bool is_bf16)
{
    using T = typename I::T;
    int lane = fresh_lane();
    float f = st.sum[m][r];
#pragma unroll
    for (int n = 0; n < I::DV / 8; n += I::KV == KV_WIDE ? 1 : 2) {
        const float *x = &st.out[m][n][r * 2];
        if constexpr (I::KV == KV_WIDE) {
            uint32_t two = pack<T>(x[0] * f, x[1] * f);
            *(uint32_t *)(rows + chunk_at<I::DV * 2>(row, n) + lane % 4 * 4) = two;
        } else {
            const float *odd = &st.out[m][n + 1][r * 2];
            uint2 four;
            if (is_bf16)
                four = make_uint2(pack<__nv_bfloat16>(x[0] * f, odd[0] * f),
                                  pack<__nv_bfloat16>(x[1] * f, odd[1] * f));
            else four = make_uint2(pack<T>(x[0] * f, odd[0] * f), pack<T>(x[1] * f, odd[1] * f));
            *(uint2 *)(rows + chunk_at<I::DV * 2>(row, n + lane % 4 / 2) + lane % 2 * 8) = four;
        }
    }
}

/* Out by way of the same rows of Q, so that a row leaves in one piece. */
template <class I, int M>
static __device__ __forceinline__ void store_rows(const prefill_state<I::DV, M> &st,
                                                  const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, int row0)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    if constexpr (I::F32) {
        store_rows_f32<I, M>(st, a, w, sh.seq.query_row, row0);
        return;
    }
    char *rows = sh.q + row0 * I::DK * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < M * 2; i++)
        put_row<I, M>(st, rows, i * 8 + lane / 4, i / 2, i % 2, l.dtype == FOLIO_BF16);
    row_place p = place_of(a, w, row0 + lane % (M * 16));
    int64_t mine =
        p.query < 0 ? -1 : row_index(l.out, sh.seq.query_row + p.query, p.head) + w.first_value;
    __syncwarp();
    constexpr int CHUNKS = I::DV / 8;
#pragma unroll 8
    for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        int64_t at = __shfl_sync(ALL_LANES, mine, row);
        if (at < 0 || (!I::FIXED && chunk * 8 >= l.v_dims - w.first_value)) continue;
        uint4 x = *(const uint4 *)(rows + chunk_at<I::DV * 2>(row, chunk));
        uint16_t *to = (uint16_t *)l.out.data + at + chunk * 8;
        if (I::FIXED || a.aligned) {
            *(uint4 *)to = x;
            continue;
        }
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 8; e++) to[e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
    }
}

#endif
