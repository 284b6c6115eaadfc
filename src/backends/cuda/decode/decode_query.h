/* decode_query.h: rows of q, as fragments in registers or in shared memory, in the type and order of dims that K has. */
#ifndef FOLIOI_DECODE_QUERY_H
#define FOLIOI_DECODE_QUERY_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/*
 * Q fragments of the plain instances: q[dim step][n][2]. With packed tiles a thread has 8 dims side by side. Not by
 * __ldg: a kernel ahead may have written them since this one began.
 */
template <int DIMS, int NT>
static __device__ __forceinline__ void load_q(const decode_args &a, const folioi_cuda_seq &s,
                                              int first_row, int kv_head,
                                              uint32_t q[DIMS / 16][NT][2])
{
    int lane = threadIdx.x & 31, t = lane & 3, rows = s.query_len * a.group - first_row;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int r = 8 * n + lane / 4;
        int i = s.query_len > 1 ? (first_row + r) / a.group : 0;
        int h = kv_head * a.group + first_row + r - i * a.group;
        const uint16_t *from = (const uint16_t *)a.layer.q.data +
                               (s.query_row + i) * a.layer.q.token + h * a.layer.q.head;
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            int first = plain_packed(DIMS, 2) ? d / 2 * 32 + t * 8 + d % 2 * 4 : 16 * d + 2 * t;
            int second = first + (plain_packed(DIMS, 2) ? 2 : 8);
            q[d][n][0] = r < rows ? *(const uint32_t *)(from + first) : 0;
            q[d][n][1] = r < rows ? *(const uint32_t *)(from + second) : 0;
        }
    }
}

/* Does the cache compute in bf16? Every 8-bit type is exact in f16. */
static __device__ __forceinline__ bool cache_is_bf16(const decode_args &a)
{
    return a.layer.kv_dtype == FOLIO_BF16;
}

/*
 * q into shared memory: as given, and where the cache's type is another one in that type. bf16 fits f16
 * once a power of two brings the row's largest number near 1; f16 is the sum of two bf16.
 */
static __device__ __noinline__ void stage_q(const decode_args &a, const folioi_cuda_seq &s,
                                            int rows, int first_row, int kv_head, int forms,
                                            uint16_t *q, float *q_factor)
{
    int lane = threadIdx.x & 31, size = FOLIOI_DECODE_MAX_ROWS * a.q_stride;
    bool bf16 = a.layer.dtype == FOLIO_BF16;
    for (int r = threadIdx.x / 32; r < FOLIOI_DECODE_MAX_ROWS; r += a.num_warps) {
        int i = (first_row + r) / a.group, h = kv_head * a.group + (first_row + r) % a.group;
        const uint16_t *from = (const uint16_t *)a.layer.q.data +
                               (s.query_row + i) * a.layer.q.token + h * a.layer.q.head;
        uint16_t *to = q + r * a.q_stride;
        float largest = 0.0f;
        for (int d = lane; d < a.layer.k_dims && r < rows; d += 32)
            largest = fmaxf(largest, fabsf(half_bits_to_float(from[d], bf16)));
        largest = warp_max(largest);
        int e = 0;
        if (bf16 && largest > 0.0f && largest < INFINITY) e = max(-100, min(100, ilogbf(largest)));
        float by = exp2f((float)-e);
        for (int d = lane; d < a.q_stride; d += 32) {
            bool inside = d < a.layer.k_dims && r < rows;
            uint16_t bits = inside ? from[d] : (uint16_t)0;
            float x = half_bits_to_float(bits, bf16);
            to[d] = bits;
            if (forms == 1) continue;
            uint16_t high = float_to_half_bits(bf16 ? x * by : x, !bf16);
            to[d + size] = high;
            if (forms == 2) continue;
            float rest = x - half_bits_to_float(high, true);
            to[d + 2 * size] =
                bf16 || !(fabsf(x) < INFINITY) ? (uint16_t)0 : float_to_half_bits(rest, true);
        }
        if (lane == 0) q_factor[r] = exp2f((float)e);
    }
}

/* The same from shared memory, in the order of dims that 8-bit K has. */
template <int DIMS, int NT>
static __device__ __forceinline__ void load_q_turned(const uint16_t *q, int q_stride,
                                                     uint32_t out[DIMS / 16][NT][2])
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            uint2 b = *(const uint2 *)(q + (8 * n + lane / 4) * q_stride + 16 * d + 4 * (lane & 3));
            out[d][n][0] = b.x;
            out[d][n][1] = b.y;
        }
    }
}

#endif
