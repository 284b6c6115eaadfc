/*
 * dtype.h: the number types as scalars: bits to float and float to bits, round to nearest even.
 * e4m3 is e4m3fn (no infinity, NaN 0x7f); both fp8 types saturate to their largest finite number, and
 * NaN stays NaN. Everything is inline, so that each instruction-set level compiles its own copy.
 */
#ifndef FOLIOI_DTYPE_H
#define FOLIOI_DTYPE_H

#include "core/shared_inline.h"

#include <folio/folio.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

SHARED_INLINE uint32_t bits_of_f32(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

SHARED_INLINE float f32_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

SHARED_INLINE float bf16_to_f32(uint16_t h) { return f32_of_bits((uint32_t)h << 16); }

SHARED_INLINE uint16_t f32_to_bf16(float x)
{
    /* without a branch, so that loops over it become vectors */
    uint32_t u = bits_of_f32(x), nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : nearest);
}

/*
 * Small floats with `exp_bits` exponent and `man_bits` mantissa bits below a sign. No step makes an f32
 * subnormal: a host that flushes them to zero gets the same numbers.
 */
SHARED_INLINE float small_to_f32(uint32_t code, int exp_bits, int man_bits, bool has_inf)
{
    uint32_t sign = code >> (exp_bits + man_bits) << 31;
    uint32_t magnitude = code & ((1u << (exp_bits + man_bits)) - 1u);
    uint32_t exponent = magnitude >> man_bits;
    int bias = (1 << (exp_bits - 1)) - 1;
    uint32_t bits;
    if (has_inf && exponent == (1u << exp_bits) - 1u)
        bits = 0x7f800000u | (magnitude << (23 - man_bits) & 0x7fffffu);
    else if (!has_inf && magnitude == (1u << (exp_bits + man_bits)) - 1u) bits = 0x7fc00000u;
    else if (exponent == 0)
        bits = bits_of_f32((float)magnitude * f32_of_bits((uint32_t)(128 - bias - man_bits) << 23));
    else bits = (magnitude << (23 - man_bits)) + ((uint32_t)(127 - bias) << 23);
    return f32_of_bits(bits | sign);
}

/* Rounds to the nearest code, ties to even; `largest` is the code of the largest finite number and
 * `overflow` what is returned past it. */
SHARED_INLINE uint32_t f32_to_small(float x, int exp_bits, int man_bits, uint32_t largest,
                                    uint32_t overflow, uint32_t nan)
{
    uint32_t u = bits_of_f32(x);
    uint32_t sign = (u >> 31) << (exp_bits + man_bits);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | nan;
    int bias = (1 << (exp_bits - 1)) - 1;
    int exponent = (int)(u >> 23) - 127;
    int shift = 23 - man_bits; /* mantissa bits dropped from a normal number */
    if (exponent < 1 - bias) shift += 1 - bias - exponent; /* and more from a subnormal one */
    if (shift > 25) return sign;
    uint32_t mantissa = (u & 0x7fffffu) | (u >= 0x00800000u ? 0x800000u : 0u);
    uint32_t kept = mantissa >> shift;
    uint32_t rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (kept & 1u))) kept++;
    /* kept holds the implicit bit; adding it to the exponent field carries as it should */
    uint32_t code = kept;
    if (exponent >= 1 - bias) code += (uint32_t)(exponent + bias - 1) << man_bits;
    return sign | (code > largest ? overflow : code);
}

SHARED_INLINE float f16_to_f32(uint16_t h) { return small_to_f32(h, 5, 10, true); }
SHARED_INLINE float e4m3_to_f32(uint8_t h) { return small_to_f32(h, 4, 3, false); }
SHARED_INLINE float e5m2_to_f32(uint8_t h) { return small_to_f32(h, 5, 2, true); }
SHARED_INLINE uint16_t f32_to_f16(float x)
{
    return (uint16_t)f32_to_small(x, 5, 10, 0x7bff, 0x7c00, 0x7e00);
}
SHARED_INLINE uint8_t f32_to_e4m3(float x)
{
    return (uint8_t)f32_to_small(x, 4, 3, 0x7e, 0x7e, 0x7f);
}
SHARED_INLINE uint8_t f32_to_e5m2(float x)
{
    return (uint8_t)f32_to_small(x, 5, 2, 0x7b, 0x7b, 0x7e);
}

/* One number of any stored type, scales not applied. */
SHARED_INLINE float load_f32(const void *base, folio_dtype dtype, int64_t index)
{
    switch (dtype) {
    case FOLIO_F32: return ((const float *)base)[index];
    case FOLIO_F16: return f16_to_f32(((const uint16_t *)base)[index]);
    case FOLIO_BF16: return bf16_to_f32(((const uint16_t *)base)[index]);
    case FOLIO_FP8_E4M3: return e4m3_to_f32(((const uint8_t *)base)[index]);
    case FOLIO_FP8_E5M2: return e5m2_to_f32(((const uint8_t *)base)[index]);
    case FOLIO_INT8: return (float)((const int8_t *)base)[index];
    case FOLIO_F64: break;
    }
    return NAN;
}

/* x is already divided by its scale; int8 saturates at 127 and takes NaN as 0 (its scale is NaN). */
SHARED_INLINE void store_f32(void *base, folio_dtype dtype, int64_t index, float x)
{
    switch (dtype) {
    case FOLIO_F32: ((float *)base)[index] = x; break;
    case FOLIO_F16: ((uint16_t *)base)[index] = f32_to_f16(x); break;
    case FOLIO_BF16: ((uint16_t *)base)[index] = f32_to_bf16(x); break;
    case FOLIO_FP8_E4M3: ((uint8_t *)base)[index] = f32_to_e4m3(x); break;
    case FOLIO_FP8_E5M2: ((uint8_t *)base)[index] = f32_to_e5m2(x); break;
    case FOLIO_INT8:
        ((int8_t *)base)[index] = (int8_t)rintf(x != x     ? 0.0f
                                                : x > 127  ? 127
                                                : x < -127 ? -127
                                                           : x);
        break;
    case FOLIO_F64: ((double *)base)[index] = (double)x; break;
    }
}

SHARED_INLINE bool dtype_is_query(folio_dtype d)
{
    return d == FOLIO_F32 || d == FOLIO_F16 || d == FOLIO_BF16;
}

SHARED_INLINE bool dtype_is_kv(folio_dtype d) { return d >= FOLIO_F32 && d <= FOLIO_INT8; }

SHARED_INLINE bool dtype_is_16_bit(folio_dtype d) { return d == FOLIO_F16 || d == FOLIO_BF16; }

SHARED_INLINE bool dtype_is_fp8(folio_dtype d)
{
    return d == FOLIO_FP8_E4M3 || d == FOLIO_FP8_E5M2;
}

#endif
