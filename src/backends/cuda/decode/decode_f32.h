/*
 * decode_f32.h: f32 q, K and V. Products are multiply-adds in f32: bringing the keys takes longer. A tile is packed, rows as
 * the cache has them. Each number of it is read once for four rows:
 *
 *   scores   8 lanes share a token's dims, then add up: a lane ends with the scores that a fragment of S^T has
 *   sums     o is [8 * NT rows][DIMS / 32]: a lane has the same dims of all rows, and weights come by way of shared memory
 */
#ifndef FOLIOI_DECODE_F32_H
#define FOLIOI_DECODE_F32_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_query.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/* Of q in shared memory, in floats: fit_block has it as 16-bit numbers. */
template <int DIMS> constexpr int Q_STRIDE_F32 = DIMS + 4;

/* q to shared memory: [8 * NT][Q_STRIDE_F32]; rows that are not there are zeros. A barrier follows. */
template <int DIMS, int NT>
static __device__ __forceinline__ void stage_q_f32(const decode_args &a, const folioi_cuda_seq &s,
                                                   int rows, int first_row, int kv_head, float *q)
{
    int lane = threadIdx.x & 31;
    for (int r = threadIdx.x / 32; r < 8 * NT; r += a.num_warps) {
        const float *from = q_row<float>(a, s, first_row + r, kv_head);
        for (int d = 4 * lane; d < DIMS; d += 128)
            *(float4 *)(q + r * Q_STRIDE_F32<DIMS> + d) =
                r < rows ? *(const float4 *)(from + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

static __device__ __forceinline__ float4 load_f32(uint32_t from)
{
    uint32_t x[4];
    load_shared(x, from);
    return make_float4(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                       __uint_as_float(x[3]));
}

static __device__ __forceinline__ float add_dot(float sum, float4 x, float4 y)
{
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

/* The half that this lane keeps, plus the same of lane ^ BIT, which keeps the other. */
template <int BIT> static __device__ __forceinline__ float keep_half(float first, float second)
{
    bool upper = threadIdx.x & BIT;
    float other = __shfl_xor_sync(ALL_LANES, upper ? first : second, BIT);
    return (upper ? second : first) + other;
}

/*
 * Dot products of four rows with tokens g % 4 + 4 j of the tile, over a lane's dims; g: lane / 4. These are every eighth
 * unit of 16 bytes. Odd g has the other half of each 128 bytes: so no bank is met twice.
 */
template <int DIMS>
static __device__ __forceinline__ void dots_f32(float sum[4][4], uint32_t k_tile, const float *q)
{
    int lane = threadIdx.x & 31, g = lane / 4;
    int unit = ((lane & 3) + (g & 4)) ^ (g & 1) << 2;
    uint32_t from = k_tile + (g & 3) * DIMS * 4 + unit * 16;
#pragma unroll 2
    for (int i = 0; i < DIMS / 32; i++) {
        float4 k[4];
#pragma unroll
        for (int j = 0; j < 4; j++) k[j] = load_f32(from + j * DIMS * 16 + i * 128);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float4 x = *(const float4 *)(q + r * Q_STRIDE_F32<DIMS> + unit * 4 + i * 32);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j][r] = add_dot(sum[j][r], x, k[j]);
        }
    }
}

/* S^T of a tile: entry [n][e] is of token g + 8 * (e / 2) and row 8 * n + 2 * (lane % 4) + e % 2. */
template <int DIMS, int NT>
static __device__ __forceinline__ void scores_f32(float s[NT][4], uint32_t k_tile, const float *q,
                                                  int num_rows)
{
#pragma unroll
    for (int four = 0; four < 2 * NT; four++) {
        if (4 * four >= num_rows) break;
        float sum[4][4] = {}, part[2][4];
        dots_f32<DIMS>(sum, k_tile, q + 4 * four * Q_STRIDE_F32<DIMS>);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                part[half][r] = keep_half<16>(sum[2 * half][r], sum[2 * half + 1][r]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float x = keep_half<1>(part[e / 2][e % 2], part[e / 2][e % 2 + 2]);
            x += __shfl_xor_sync(ALL_LANES, x, 2);
            if ((threadIdx.x >> 1 & 1) == four % 2) s[four / 2][e] = x;
        }
    }
}

/* A lane's sums of a row. */
template <int DIMS, int NT> using sums_f32 = float[8 * NT][DIMS / 32];

/* The first dim of its numbers 4 * i and on; of heads of 64 it has two. */
template <int DIMS> static __device__ __forceinline__ int lane_dim(int i)
{
    constexpr int COUNT = DIMS < 128 ? DIMS / 32 : 4;
    return 128 * i + COUNT * (int)(threadIdx.x & 31);
}

/* Multiply each row's sums with `by`, of which a lane has those that a fragment has. */
template <int DIMS, int NT>
static __device__ __forceinline__ void rescale_f32(float o[DIMS / 16][NT][4],
                                                   const float by[2 * NT], float *weights)
{
    sums_f32<DIMS, NT> &sums = *(sums_f32<DIMS, NT> *)o;
    float *factors = weights + 16 * 8 * NT;
    int lane = threadIdx.x & 31;
    if (lane < 4) {
#pragma unroll
        for (int n = 0; n < NT; n++)
            *(float2 *)(factors + 8 * n + 2 * lane) = make_float2(by[2 * n], by[2 * n + 1]);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8 * NT; r++) {
        float factor = factors[r];
#pragma unroll
        for (int d = 0; d < DIMS / 32; d++) sums[r][d] *= factor;
    }
    __syncwarp();
}

/* A token's V times the weights of ROWS rows; below 0: the row does not see the token, whose V may be NaN. */
template <int DIMS, int NT, int ROWS, bool APART>
static __device__ __forceinline__ void add_token_f32(sums_f32<DIMS, NT> &sums, uint32_t v,
                                                     const float *weights)
{
    constexpr int COUNT = DIMS / 32;
    float x[COUNT < 4 ? 4 : COUNT];
    if constexpr (COUNT < 4) {
        uint2 two = load_shared(v + lane_dim<DIMS>(0) * 4);
        x[0] = __uint_as_float(two.x), x[1] = __uint_as_float(two.y);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++)
            *(float4 *)(x + 4 * i) = load_f32(v + lane_dim<DIMS>(i) * 4);
    }
#pragma unroll
    for (int four = 0; four < ROWS / 4; four++) {
        float4 y = *(const float4 *)(weights + 4 * four);
        const float w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (APART && w[r] < 0.0f) continue;
#pragma unroll
            for (int d = 0; d < COUNT; d++)
                sums[4 * four + r][d] = fmaf(w[r], x[d], sums[4 * four + r][d]);
        }
    }
}

template <int DIMS, int NT, int ROWS>
static __device__ __forceinline__ void add_tokens_f32(sums_f32<DIMS, NT> &sums, uint32_t v,
                                                      const float *weights, bool apart)
{
    if (apart) {
#pragma unroll 1
        for (int token = 0; token < 16; token++)
            add_token_f32<DIMS, NT, ROWS, true>(sums, v + token * DIMS * 4,
                                                weights + token * 8 * NT);
        return;
    }
#pragma unroll 4
    for (int token = 0; token < 16; token++)
        add_token_f32<DIMS, NT, ROWS, false>(sums, v + token * DIMS * 4, weights + token * 8 * NT);
}

/* Add a tile's V times the weights s. apart: some row does not see a token: lanes of hidden[n][e]. */
template <int DIMS, int NT>
static __device__ __forceinline__ void add_values_f32(float o[DIMS / 16][NT][4], uint32_t v,
                                                      const float s[NT][4], float *weights,
                                                      int num_rows, bool apart,
                                                      const uint32_t hidden[NT][4])
{
    sums_f32<DIMS, NT> &sums = *(sums_f32<DIMS, NT> *)o;
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = apart && hidden[n][e] >> lane & 1 ? -1.0f : s[n][e];
        float *to = weights + g * 8 * NT + 8 * n + 2 * t;
        *(float2 *)to = make_float2(w[0], w[1]);
        *(float2 *)(to + 64 * NT) = make_float2(w[2], w[3]);
    }
    __syncwarp();
    if (num_rows <= 4) add_tokens_f32<DIMS, NT, 4>(sums, v, weights, apart);
    else if (num_rows <= 8) add_tokens_f32<DIMS, NT, 8>(sums, v, weights, apart);
    else if (NT > 1) add_tokens_f32<DIMS, NT, 8 * NT>(sums, v, weights, apart);
    __syncwarp();
}

/* Rows' sums to `out`, rows `stride` floats apart; add: to what is there. */
template <int DIMS, int NT>
static __device__ __forceinline__ void put_sums_f32(float o[DIMS / 16][NT][4], float *out,
                                                    int stride, int num_rows, bool add)
{
    constexpr int COUNT = DIMS < 128 ? DIMS / 32 : 4;
    sums_f32<DIMS, NT> &sums = *(sums_f32<DIMS, NT> *)o;
#pragma unroll
    for (int r = 0; r < 8 * NT; r++) {
        if (r >= num_rows) break;
#pragma unroll
        for (int d = 0; d < DIMS / 32; d++) {
            float *to = out + r * stride + lane_dim<DIMS>(d / COUNT) + d % COUNT;
            *to = add ? *to + sums[r][d] : sums[r][d];
        }
    }
}

#endif
