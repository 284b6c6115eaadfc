/*
 * prefill_bytes.h: 8-bit K and V as operands of f16 products: read from shared memory as they are, two numbers to a matrix
 * element, and widened in registers. A lane then holds pairs of numbers that lie side by side, where mma.m16n8k16 wants them
 * 8 apart: q has the order of prefill_query.h, and of 16 numbers of V the even ones come first.
 */
#ifndef FOLIOI_CUDA_PREFILL_BYTES_H
#define FOLIOI_CUDA_PREFILL_BYTES_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_instance.h"

/* Bytes A and B of four, as two f16 numbers. */
template <prefill_kv KV, int A, int B>
static __device__ __forceinline__ uint32_t widen_two(uint32_t x)
{
    if constexpr (KV == KV_E5M2) return e5m2_to_f16<A, B>(x);
    if constexpr (KV == KV_INT8) return offset_int8_to_f16<A, B>(x ^ 0x80808080u);
#if __CUDA_ARCH__ >= 890
    return cvt_e4m3(A == 0 && B == 1 ? x : __byte_perm(x, 0, B << 4 | A));
#else
    uint32_t wide = e5m2_to_f16<A, B>(x), finite = lift_e4m3(wide); /* wide: bytes in place */
    uint32_t nan = (wide & 0x7f007f00u) + 0x01000100u; /* bit 15 of a half where it was NaN */
    return finite | (nan >> 15 & 0x00010001u) * 0x7fffu;
#endif
}

/* Operands of one ldmatrix of K: 16 dims of 32 keys; kf[t]: of 8 keys. */
template <prefill_kv KV>
static __device__ __forceinline__ void load_byte_keys(uint32_t (&kf)[4][2], uint32_t from)
{
    uint32_t r[4];
    ldmatrix(r, from);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        kf[t][0] = widen_two<KV, 0, 1>(r[t]);
        kf[t][1] = widen_two<KV, 2, 3>(r[t]);
    }
}

/* The same of V: 16 keys of 32 dims; vf[t]: the even dims of 16, then the odd ones. */
template <prefill_kv KV>
static __device__ __forceinline__ void load_byte_values(uint32_t (&vf)[4][2], uint32_t from)
{
    uint32_t r[4];
    ldmatrix_trans(r, from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        vf[i / 2 * 2][i % 2] = widen_two<KV, 0, 2>(r[i]);
        vf[i / 2 * 2 + 1][i % 2] = widen_two<KV, 1, 3>(r[i]);
    }
}

#endif
