/* decode_query.h: loads rows of q, to registers as fragments or to shared memory, in the type and order of dims of K. */
#ifndef FOLIOI_DECODE_QUERY_H
#define FOLIOI_DECODE_QUERY_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/* Row r of a sequence's rows of one kv head, of numbers of type T. */
template <typename T = uint16_t>
static __device__ __forceinline__ const T *q_row(const decode_args &a, const folioi_cuda_seq &s,
                                                 int r, int kv_head)
{
    int i = s.query_len > 1 ? r / a.heads_per_kv : 0;
    int h = kv_head * a.heads_per_kv + r - i * a.heads_per_kv;
    return (const T *)a.layer.q.data + (s.query_row + i) * a.layer.q.token + h * a.layer.q.head;
}

/*
 * Q fragments of the fixed instances: q[dim step][n][2]. With packed tiles a thread has 8 neighbouring dims. Not with __ldg:
 * the kernel before may write q after this one has begun.
 */
template <int DIMS, int NT, folioi_cuda_form FORM>
static __device__ __forceinline__ void load_q(const decode_args &a, const folioi_cuda_seq &s,
                                              int first_row, int kv_head,
                                              uint32_t q[DIMS / 16][NT][2])
{
    constexpr bool PACKED = fixed_form(DIMS, 2, FORM) == PACKED_TILE;
    int lane = threadIdx.x & 31, t = lane & 3, rows = s.query_len * a.heads_per_kv - first_row;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int r = 8 * n + lane / 4;
        const uint16_t *from = q_row(a, s, first_row + r, kv_head);
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            int first = PACKED ? d / 2 * 32 + t * 8 + d % 2 * 4 : 16 * d + 2 * t;
            int second = first + (PACKED ? 2 : 8);
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
 * q to shared memory: as given, and also in the cache's type if that differs. To become f16, a row of bf16 is divided by a
 * power of two that brings its largest number near 1. An f16 number becomes the sum of two bf16.
 */
static __device__ __noinline__ void stage_q(const decode_args &a, const folioi_cuda_seq &s,
                                            int rows, int first_row, int kv_head, int forms,
                                            uint16_t *q, float *q_factor)
{
    int lane = threadIdx.x & 31, size = FOLIOI_DECODE_MAX_ROWS * a.q_stride;
    bool bf16 = a.layer.dtype == FOLIO_BF16;
    for (int r = threadIdx.x / 32; r < FOLIOI_DECODE_MAX_ROWS; r += a.num_warps) {
        const uint16_t *from = q_row(a, s, first_row + r, kv_head);
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
            float rest = x - half_bits_to_float(high, true);
            to[d + 2 * size] =
                bf16 || !(fabsf(x) < INFINITY) ? (uint16_t)0 : float_to_half_bits(rest, true);
        }
        if (lane == 0) q_factor[r] = exp2f((float)e);
    }
}

/*
 * Q fragments as f16 in the order of dims of 8-bit K. factor[n]: what row 8 * n + lane / 4 was divided by, as above.
 */
template <int DIMS, int NT>
static __device__ __forceinline__ void load_q_8(const decode_args &a, const folioi_cuda_seq &s,
                                                int first_row, int kv_head,
                                                uint32_t q[DIMS / 16][NT][2], float factor[NT])
{
    int lane = threadIdx.x & 31, t = lane & 3, rows = s.query_len * a.heads_per_kv - first_row;
    bool bf16 = a.layer.dtype == FOLIO_BF16;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int r = 8 * n + lane / 4;
        const uint16_t *from = q_row(a, s, first_row + r, kv_head);
#pragma unroll
        for (int d = 0; d < DIMS / 8; d++)
            q[d / 2][n][d % 2] =
                r < rows ? *(const uint32_t *)(from + d / 2 * 16 + 4 * t + d % 2 * 2) : 0;
        factor[n] = 1.0f;
        if (!bf16) continue;
        float largest = 0.0f;
#pragma unroll
        for (int d = 0; d < DIMS / 8; d++) {
            uint32_t x = q[d / 2][n][d % 2];
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(x << 16)),
                                           fabsf(__uint_as_float(x & 0xffff0000u))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        int e = max(-100, min(100, (__float_as_int(largest) >> 23) - 127));
        if (!(largest > 0.0f && largest < INFINITY)) e = 0;
        float by = __int_as_float((127 - e) << 23);
        factor[n] = __int_as_float((127 + e) << 23);
#pragma unroll
        for (int d = 0; d < DIMS / 8; d++) {
            uint32_t x = q[d / 2][n][d % 2];
            q[d / 2][n][d % 2] =
                pack<__half>(__uint_as_float(x << 16) * by, __uint_as_float(x & 0xffff0000u) * by);
        }
    }
}

#endif
