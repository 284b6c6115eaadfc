/*
 * prefill_scores.h: scores of one key tile: S = Q K^T, the layer's options, and -inf for keys that a row does not see. A lane
 * has, of row tile m, rows lane / 4 and lane / 4 + 8, and of every 8 keys the pair 2 * (lane % 4).
 */
#ifndef FOLIOI_CUDA_PREFILL_SCORES_H
#define FOLIOI_CUDA_PREFILL_SCORES_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_bytes.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/tanh.h"

#include <math_constants.h>
#include <string.h>

/* ---- Q K^T ---- */

/* Where a lane's ldmatrix reads K: rows of 16 keys in two chunks, or of 8 bits those of 32 keys in one. */
template <class I> static __device__ __forceinline__ uint32_t keys_at(uint32_t k)
{
    int lane = fresh_lane();
    if constexpr (I::KV != KV_WIDE) return k + chunk_at<I::K_ROW>(lane, 0);
    else return k + chunk_at<I::K_ROW>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/* One ldmatrix of K: 16 dims of 16 keys, or of 8 bits those of 32; kf[t]: of 8 keys. */
template <class I, int TILES>
static __device__ __forceinline__ void load_keys(uint32_t (&kf)[TILES][2], uint32_t k_at, int d,
                                                 int n)
{
    if constexpr (I::KV != KV_WIDE) {
        load_byte_keys<I::KV>(kf, swizzled(k_at, d) + n * 32 * I::K_ROW);
    } else {
        uint32_t r[4];
        ldmatrix(r, swizzled(k_at, d * 2) + n * 16 * I::K_ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) kf[i / 2][i % 2] = r[i];
    }
}

/* scores = Q K^T */
template <class I, int M>
static __device__ __forceinline__ void multiply_keys(prefill_scores<I, M> &s, uint32_t q,
                                                     uint32_t k, int row0)
{
    using T = typename I::T;
    constexpr int TILES = 4 / I::KV_SIZE;
    int lane = fresh_lane();
    uint32_t q_at = q + chunk_at<I::DK * 2>(row0 + lane % 16, lane / 16), k_at = keys_at<I>(k);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < I::DK / 16; d++) {
        uint32_t qf[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix(qf[m], swizzled(q_at, d * 2) + m * 16 * I::DK * 2);
#pragma unroll
        for (int n = 0; n < I::KEYS / 8 / TILES; n++) {
            uint32_t kf[TILES][2];
            load_keys<I>(kf, k_at, d, n);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    mma<T>(s[m][TILES * n + t], qf[m], kf[t][0], kf[t][1]);
        }
    }
}

/* ---- options and mask ---- */

/* f(score, row, key): each of the lane's scores with its row and the key's number in the tile. */
template <class I, int M, typename F>
static __device__ __forceinline__ void each_score(prefill_scores<I, M> &s, typename I::shared &sh,
                                                  int row0, F f)
{
    int lane = fresh_lane();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const auto &row = sh.rows[row0 + m * 16 + r * 8 + lane / 4];
#pragma unroll
            for (int i = 0; i < I::KEYS / 4; i++)
                f(s[m][i / 2][r * 2 + i % 2], row, i / 2 * 8 + lane % 4 * 2 + i % 2);
        }
}

/* Keys that a row does not see get -inf. */
template <class I, int M>
static __device__ __forceinline__ void mask(prefill_scores<I, M> &s, typename I::shared &sh,
                                            int32_t first_key, int row0)
{
    if constexpr (I::DK == 64) { /* slower, but spills nothing */
        each_score<I, M>(s, sh, row0, [=](float &x, const auto &row, int32_t key) {
            int32_t j = first_key + key;
            if (j < row.seen.begin || j >= row.seen.end) x = -CUDART_INF_F;
        });
    } else {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int lane = fresh_lane();
                const folioi_range &seen = sh.rows[row0 + m * 16 + r * 8 + lane / 4].seen;
                int32_t first = first_key + lane % 4 * 2;
                int32_t begin = seen.begin - first, end = seen.end - first;
#pragma unroll
                for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + e < begin || n * 8 + e >= end)
                            s[m][n][r * 2 + e] = -CUDART_INF_F;
            }
    }
}

static __device__ __forceinline__ float load_bias(const folio_bias &b, int64_t at)
{
    if (b.dtype == FOLIO_F32) return __ldg((const float *)b.data + at);
    if (b.dtype == FOLIO_F16) return __half2float(((const __half *)b.data)[at]);
    return __bfloat162float(((const __nv_bfloat16 *)b.data)[at]);
}

/* One score after another, in local memory: unrolled, their addresses would take all registers. */
template <class I, int M>
static __device__ __forceinline__ void add_bias(prefill_scores<I, M> &s, const folio_bias &bias,
                                                typename I::shared &sh, int32_t first_key, int row0)
{
    int lane = fresh_lane();
    prefill_scores<I, M> copy;
    memcpy(copy, s, sizeof s);
#pragma unroll 1
    for (int i = 0; i < M * I::KEYS / 2; i++) {
        int n = i / 4 % (I::KEYS / 8), m = i / (I::KEYS / 2);
        const auto &row = sh.rows[row0 + m * 16 + i % 4 / 2 * 8 + lane / 4];
        int32_t j = first_key + n * 8 + lane % 4 * 2 + i % 2;
        if (j < row.seen.begin || j >= row.seen.end) continue;
        float x = load_bias(bias, row.bias + j * bias.strides[3]);
        copy[m][n][i % 4] = x == -CUDART_INF_F ? x : copy[m][n][i % 4] + x; /* hides NaN as well */
    }
    memcpy(s, copy, sizeof s);
}

/* What the layer's options make of the scores. */
template <class I, int M>
static __device__ __forceinline__ void apply_options(prefill_scores<I, M> &s, const prefill_args &a,
                                                     typename I::shared &sh, int32_t first_key,
                                                     int row0)
{
    const folioi_cuda_layer &l = a.layer;
    if (a.is_direct)
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t) { x *= l.scale; });
    else
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t key) {
            x = x * sh.k_scales[key] * l.scale;
        });
    float inverse = 1.0f / l.soft_cap;
    if (l.soft_cap > 0.0f)
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t) {
            x = l.soft_cap * tanh_fast(x * inverse);
        });
    if (l.slopes != NULL)
        each_score<I, M>(s, sh, row0, [=](float &x, const auto &row, int32_t key) {
            x -= row.slope * fabsf((float)(row.own - (first_key + key)));
        });
    if (l.bias.data != NULL) add_bias<I, M>(s, l.bias, sh, first_key, row0);
}

#endif
