/* decode_widen.h: 8-bit numbers of K and V as f16. */
#ifndef FOLIOI_DECODE_WIDEN_H
#define FOLIOI_DECODE_WIDEN_H

#include "backends/cuda/instructions.h"

#include <folio/folio.h>

/* The low two bytes of x as f16 numbers. */
template <int KIND> static __device__ __forceinline__ uint32_t widen(uint32_t x)
{
    if (KIND == FOLIO_FP8_E5M2) return e5m2_to_f16<0, 1>(x);
    if (KIND == FOLIO_INT8) return offset_int8_to_f16<0, 1>(x ^ 0x8080u);
#if __CUDA_ARCH__ >= 890
    return cvt_e4m3(x);
#else
    uint32_t wide = e5m2_to_f16<0, 1>(x), r = lift_e4m3(wide); /* wide: bytes in place */
    if ((wide & 0x7f00u) == 0x7f00u) r |= 0x7fffu;
    if ((wide & 0x7f000000u) == 0x7f000000u) r |= 0x7fff0000u;
    return r;
#endif
}

#endif
