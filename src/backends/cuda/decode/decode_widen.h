/* decode_widen.h: 8-bit numbers of K and V as f16. */
#ifndef FOLIOI_DECODE_WIDEN_H
#define FOLIOI_DECODE_WIDEN_H

#include "backends/cuda/instructions.h"

#include <folio/folio.h>

/* Bytes A and B of x as f16 numbers; e4m3 takes neighbours. */
template <int KIND, int A, int B> static __device__ __forceinline__ uint32_t widen(uint32_t x)
{
    if (KIND == FOLIO_FP8_E5M2) return e5m2_to_f16<A, B>(x);
    if (KIND == FOLIO_INT8) return offset_int8_to_f16<A, B>(x ^ 0x80808080u);
#if __CUDA_ARCH__ >= 890
    return cvt_e4m3<A == 2>(x);
#else
    if (A == 2) x >>= 16;
    uint32_t wide = e5m2_to_f16<0, 1>(x), r = lift_e4m3(wide); /* wide: bytes in place */
    if ((wide & 0x7f00u) == 0x7f00u) r |= 0x7fffu;
    if ((wide & 0x7f000000u) == 0x7f000000u) r |= 0x7fff0000u;
    return r;
#endif
}

#endif
