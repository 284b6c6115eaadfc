/*
 * prefill_f32.h: f32 on the tensor cores. A number is split into its first 11 bits and the rest, both tf32, and a product is
 * the sum of three; that of both rests is lost, which is 2^-22 of it at most. Tensor cores cut their sums, so these begin at
 * zero again after 32 dims, and for each key tile. How numbers lie in a lane:
 *
 *   scores   of 8 keys the pair 2 * (lane % 4), as with 16 bits
 *   weights  the same pair is columns lane % 4 and lane % 4 + 4 of a product: V's rows are taken in that order
 *   out      of tiles 2 * j and 2 * j + 1 the same pairs are dims 16 * j + lane % 4 * 4 and on: even ones in the first tile
 */
#ifndef FOLIOI_CUDA_PREFILL_F32_H
#define FOLIOI_CUDA_PREFILL_F32_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/warp.h"

#include <string.h>

/* ---- splits ---- */

/* Operands of both parts. The rest of a number that is not finite is NaN. */
template <int N> struct split_numbers {
    uint32_t high[N], low[N];
};

template <int N>
static __device__ __forceinline__ void split(split_numbers<N> &to, int i, uint32_t x)
{
    to.high[i] = (x + 0x1000u) & 0xffffe000u;
    to.low[i] = __float_as_uint(__uint_as_float(x) - __uint_as_float(to.high[i]));
}

/* sums[m][first + t] += a[m] b[t], two tiles of 8 columns; the smallest products first. */
template <int M, int TILES>
static __device__ __forceinline__ void multiply_split(float (&sums)[M][TILES][4], int first,
                                                      const split_numbers<4> (&a)[M],
                                                      const split_numbers<2> (&b)[2])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int t = 0; t < 2; t++)
            mma_tf32(sums[m][first + t], a[m].low, b[t].high[0], b[t].high[1]);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int t = 0; t < 2; t++)
            mma_tf32(sums[m][first + t], a[m].high, b[t].low[0], b[t].low[1]);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int t = 0; t < 2; t++)
            mma_tf32(sums[m][first + t], a[m].high, b[t].high[0], b[t].high[1]);
}

/* ---- products ---- */

/* Steps of 8 dims whose code stands side by side: as many as spill nothing. */
template <int M> constexpr int F32_STEPS = M > 1 ? 4 : 2;

/* sums = Q K^T of 32 dims, from unit `first` of 8 dims on. */
template <class I, int M>
static __device__ __forceinline__ void multiply_dims_f32(float (&sums)[M][I::KEYS / 8][4],
                                                         uint32_t q_at, uint32_t k_at, int first)
{
    constexpr int TILES = I::KEYS / 8;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
#pragma unroll F32_STEPS < M>
    for (int d = first; d < first + 4; d++) {
        split_numbers<4> qf[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint32_t x[4];
            ldmatrix(x, swizzled(q_at, d * 2) + m * 16 * I::DK * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) split(qf[m], i, x[i]);
        }
#pragma unroll
        for (int n = 0; n < TILES / 2; n++) {
            split_numbers<2> kf[2];
            uint32_t x[4];
            ldmatrix(x, swizzled(k_at, d * 2) + n * 16 * I::K_ROW);
#pragma unroll
            for (int i = 0; i < 4; i++) split(kf[i / 2], i % 2, x[i]);
            multiply_split<M, TILES>(sums, 2 * n, qf, kf);
        }
    }
}

/* scores = Q K^T */
template <class I, int M>
static __device__ __forceinline__ void multiply_keys_f32(prefill_scores<I, M> &s, uint32_t q,
                                                         uint32_t k, int row0)
{
    int lane = fresh_lane();
    uint32_t q_at = q + chunk_at<I::DK * 4>(row0 + lane % 16, lane / 16);
    uint32_t k_at = k + chunk_at<I::K_ROW>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < I::DK / 8; d += 4) {
        prefill_scores<I, M> part;
        multiply_dims_f32<I, M>(part, q_at, k_at, d);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] += part[m][n][i];
    }
}

/* The weights of 8 keys, tile n, as operands. */
template <class I, int M>
static __device__ __forceinline__ void split_weights(split_numbers<4> (&p)[M],
                                                     const prefill_scores<I, M> &s, int n)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) split(p[m], i, __float_as_uint(s[m][n][i % 2 * 2 + i / 2]));
}

/* out += weights V, of 16 keys from tile `first` of 8 on. */
template <class I, int M>
static __device__ __forceinline__ void multiply_values_f32(prefill_state<I::DV, M> &st,
                                                           const prefill_scores<I, M> &s,
                                                           uint32_t v, int first)
{
    int lane = fresh_lane();
    uint32_t even = v + chunk_at<I::V_ROW>(lane % 4 * 2, lane / 8) + lane / 4 % 2 * 8;
    uint32_t odd = v + chunk_at<I::V_ROW>(lane % 4 * 2 + 1, lane / 8) + lane / 4 % 2 * 8;
    split_numbers<4> p[2][M];
#pragma unroll
    for (int n = 0; n < 2; n++) split_weights<I, M>(p[n], s, first + n);
#pragma unroll
    for (int j = 0; j < I::DV / 16; j++) {
        float sums[M][2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            split_numbers<2> vf[2];
            uint2 x = load_shared(swizzled(even, j * 4) + (first + n) * 8 * I::V_ROW);
            uint2 y = load_shared(swizzled(odd, j * 4) + (first + n) * 8 * I::V_ROW);
            split(vf[0], 0, x.x), split(vf[0], 1, y.x);
            split(vf[1], 0, x.y), split(vf[1], 1, y.y);
            multiply_split<M, 2>(sums, 0, p[n], vf);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 8; i++) st.out[m][2 * j + i / 4][i % 4] += sums[m][i / 4][i % 4];
    }
}

/* ---- the same by multiply-adds, for numbers that are not finite; rare, and slow ---- */

static __device__ __forceinline__ float4 load_quad(uint32_t from)
{
    uint32_t x[4];
    load_shared(x, from);
    return make_float4(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                       __uint_as_float(x[3]));
}

template <class I>
static __device__ __forceinline__ void multiply_any_keys_f32(float (&s)[I::KEYS / 8][4], uint32_t q,
                                                             uint32_t k, int row0)
{
    int lane = fresh_lane();
    float copy[I::KEYS / 2];
#pragma unroll 1
    for (int i = 0; i < I::KEYS / 2; i++) {
        int row = row0 + lane / 4 + i % 4 / 2 * 8, key = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0.0f;
#pragma unroll 1
        for (int chunk = 0; chunk < I::DK / 4; chunk++) {
            float4 x = load_quad(q + chunk_at<I::DK * 4>(row, chunk));
            float4 y = load_quad(k + chunk_at<I::K_ROW>(key, chunk));
            sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
        }
        copy[i] = sum;
    }
    memcpy(s, copy, sizeof copy);
}

/* seen: as seen_bits has it. */
template <class I>
static __device__ __forceinline__ void multiply_any_values_f32(prefill_state<I::DV, 1> &st,
                                                               const float (&s)[I::KEYS / 8][4],
                                                               uint32_t seen, uint32_t v)
{
    int lane = fresh_lane();
    float out[I::DV / 8][4], weights[I::KEYS / 8][4];
    memcpy(out, st.out[0], sizeof out);
    memcpy(weights, s, sizeof weights);
#pragma unroll 1
    for (int key = 0; key < I::KEYS; key++) {
        int from = lane / 4 * 4 + key % 8 / 2, n = key / 8;
#pragma unroll 1
        for (int row = 0; row < 2; row++) {
            int i = row * 2 + key % 2;
            float weight = __shfl_sync(ALL_LANES, weights[n][i], from);
            uint32_t is_seen = __shfl_sync(ALL_LANES, seen >> (n * 4 + i) & 1, from);
            if (!is_seen) continue;
#pragma unroll 1
            for (int j = 0; j < I::DV / 16; j++) {
                float4 x = load_quad(v + chunk_at<I::V_ROW>(key, j * 4 + lane % 4));
                float *to = &out[j * 2][row * 2];
                to[0] = fmaf(weight, x.x, to[0]);
                to[4] = fmaf(weight, x.y, to[4]);
                to[1] = fmaf(weight, x.z, to[1]);
                to[5] = fmaf(weight, x.w, to[5]);
            }
        }
    }
    memcpy(st.out[0], out, sizeof out);
}

/* ---- rows of out ---- */

/* A lane's numbers of row lane / 4 + 8 * r of row tile m, times f, to the row at `to`. */
template <class I, int M>
static __device__ __forceinline__ void put_row_f32(const prefill_state<I::DV, M> &st, float *to,
                                                   int m, int r, float f)
{
    to += fresh_lane() % 4 * 4;
#pragma unroll
    for (int j = 0; j < I::DV / 16; j++) {
        const float *even = &st.out[m][2 * j][2 * r], *odd = &st.out[m][2 * j + 1][2 * r];
        __stcg((float4 *)(to + j * 16),
               make_float4(even[0] * f, odd[0] * f, even[1] * f, odd[1] * f));
    }
}

/* The warp's rows, times what finish_rows left in st.sum. */
template <class I, int M>
static __device__ __forceinline__ void store_rows_f32(const prefill_state<I::DV, M> &st,
                                                      const prefill_args &a, const prefill_work &w,
                                                      int64_t query_row, int row0)
{
#pragma unroll
    for (int i = 0; i < M * 2; i++) {
        row_place p = place_of(a, w, row0 + i * 8 + fresh_lane() / 4);
        if (p.query < 0) continue;
        float *to = (float *)a.layer.out.data + row_index(a.layer.out, query_row + p.query, p.head);
        put_row_f32<I, M>(st, to, i / 2, i % 2, st.sum[i / 2][i % 2]);
    }
}

#endif
