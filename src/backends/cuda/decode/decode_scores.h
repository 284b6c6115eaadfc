/*
 * decode_scores.h: S^T = K Q^T of one tile: s[n] is the fragment of 16 tokens and rows 8 * n .. 8 * n + 7. Unless `wide`, only
 * the first fragment is computed.
 */
#ifndef FOLIOI_DECODE_SCORES_H
#define FOLIOI_DECODE_SCORES_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/decode/decode_widen.h"
#include "backends/cuda/instructions.h"

/* Fragments of K by dims: 16 tokens, dims 16 * d .. + 15. */
static __device__ __forceinline__ void load_keys_by_dims(uint32_t k[4], uint32_t k_tile, int d)
{
    int lane = threadIdx.x & 31;
    ldmatrix_trans(k, k_tile + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16 + d * 512);
}

template <typename T, int DIMS, int NT, folioi_cuda_form FORM>
static __device__ __forceinline__ void scores_fixed(float s[NT][4], uint32_t k_tile,
                                                    const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + fixed_place<DIMS, 2, FORM>(lane & 15, lane >> 4);
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d++) {
        uint32_t k[4];
        if (FORM == FOLIOI_FORM_XPACKED_1) load_keys_by_dims(k, k_tile, d);
        else ldmatrix(k, fixed_step<DIMS, 2, FORM>(from, 2 * d));
        mma<T>(d % 2 ? odd : s[0], k, q[d][0][0], q[d][0][1]);
        if (NT > 1 && wide) mma<T>(s[NT - 1], k, q[d][NT - 1][0], q[d][NT - 1][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

/* The same of a packed tile: q in load_q's order of dims. */
template <typename T, int DIMS, int NT>
static __device__ __forceinline__ void scores_packed(float s[NT][4], uint32_t k_tile,
                                                     const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + fixed_place<DIMS, 2, FOLIOI_FORM_ROWS>(lane / 4, lane & 3);
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d += 2) {
        uint32_t low[4], high[4];
        load_shared(low, from + d * 32);
        load_shared(high, from + d * 32 + 8 * DIMS * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t k[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
            mma<T>(half ? odd : s[0], k, q[d + half][0][0], q[d + half][0][1]);
            if (NT > 1 && wide)
                mma<T>(s[NT - 1], k, q[d + half][NT - 1][0], q[d + half][NT - 1][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

template <int KIND, int DIMS, int NT, folioi_cuda_form FORM>
static __device__ __forceinline__ void scores_fixed_8(float s[NT][4], uint32_t k_tile,
                                                      const uint32_t q[DIMS / 16][NT][2], bool wide)
{
    int lane = threadIdx.x & 31;
    int token = tile_token<is_xpacked(FORM)>(lane & 7, lane >> 3 & 1);
    uint32_t from = k_tile + fixed_place<DIMS, 1, FORM>(token, lane >> 4);
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DIMS / 16; d += 2) {
        uint32_t r[4];
        ldmatrix(r, fixed_step<DIMS, 1, FORM>(from, d));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t low = r[2 * half], high = r[2 * half + 1];
            uint32_t k[4] = {widen<KIND, 0, 1>(low), widen<KIND, 0, 1>(high),
                             widen<KIND, 2, 3>(low), widen<KIND, 2, 3>(high)};
            mma<__half>(half ? odd : s[0], k, q[d + half][0][0], q[d + half][0][1]);
            if (NT > 1 && wide)
                mma<__half>(s[NT - 1], k, q[d + half][NT - 1][0], q[d + half][NT - 1][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][e] += odd[e];
}

/* The same with q in shared memory. DIMS: of a fixed tile; 0: rows are `stride` apart. */
template <typename T, int NT, int DIMS = 0, folioi_cuda_form FORM = FOLIOI_FORM_ROWS>
static __device__ __forceinline__ void scores_16(float s[NT][4], uint32_t k_tile, int stride,
                                                 int steps, const uint16_t *q, int q_stride,
                                                 bool wide)
{
    int lane = threadIdx.x & 31;
    int row = lane & 15, chunk = lane >> 4;
    uint32_t from =
        k_tile + (DIMS ? fixed_place<DIMS, 2, FORM>(row, chunk) : row * stride + chunk * 16);
    const uint16_t *mine = q + (lane / 4) * q_stride + 2 * (lane & 3);
#pragma unroll 4
    for (int d = 0; d < steps; d++) {
        uint32_t k[4];
        ldmatrix(k, fixed_step<DIMS, 2, FORM>(from, 2 * d));
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint16_t *b = mine + n * 8 * q_stride + d * 16;
            if (n == 0 || wide) mma<T>(s[n], k, *(const uint32_t *)b, *(const uint32_t *)(b + 8));
        }
    }
}

/* 8-bit K: a fragment register holds dims 4t..4t+3, so q is read in that order too. */
template <int KIND, int NT>
static __device__ __forceinline__ void scores_8(float s[NT][4], uint32_t k_tile, int stride,
                                                int steps, const uint16_t *q, int q_stride,
                                                bool wide)
{
    int lane = threadIdx.x & 31;
    uint32_t from = k_tile + (lane & 15) * stride + (lane >> 4) * 16;
    const uint16_t *mine = q + (lane / 4) * q_stride + 4 * (lane & 3);
#pragma unroll 4
    for (int d = 0; d < steps; d += 2) {
        uint32_t r[4];
        ldmatrix(r, from + d * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (d + half >= steps) break;
            uint32_t low = r[2 * half], high = r[2 * half + 1];
            uint32_t k[4] = {widen<KIND, 0, 1>(low), widen<KIND, 0, 1>(high),
                             widen<KIND, 2, 3>(low), widen<KIND, 2, 3>(high)};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint2 b = *(const uint2 *)(mine + n * 8 * q_stride + (d + half) * 16);
                if (n == 0 || wide) mma<__half>(s[n], k, b.x, b.y);
            }
        }
    }
}

template <int NT>
static __device__ __forceinline__ void flexible_scores(const decode_args &a, const tile_view &tile,
                                                       const block_shared &sh, bool wide,
                                                       float s[NT][4])
{
    int steps = (a.layer.k_dims + 15) / 16, size = FOLIOI_DECODE_MAX_ROWS * a.q_stride;
    bool q_bf16 = a.layer.dtype == FOLIO_BF16;
    const uint16_t *q = sh.q;
    if (tile.fresh || a.layer.kv_dtype == a.layer.dtype) {
        if (q_bf16) scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        else scores_16<__half, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        return;
    }
    if (a.layer.kv_dtype == FOLIO_BF16) {
        scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q + size, a.q_stride, wide);
        scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q + 2 * size, a.q_stride, wide);
        return;
    }
    if (q_bf16) q += size;
    switch (a.layer.kv_dtype) {
    case FOLIO_FP8_E4M3:
        scores_8<FOLIO_FP8_E4M3, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    case FOLIO_FP8_E5M2:
        scores_8<FOLIO_FP8_E5M2, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    case FOLIO_INT8:
        scores_8<FOLIO_INT8, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    default: scores_16<__half, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
    }
}

#endif
