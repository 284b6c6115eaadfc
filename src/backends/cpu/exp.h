/*
 * exp.h: exp for the softmax, x <= 0 or NaN. A few lines of arithmetic instead of libm's expf, so that
 * compilers vectorise the loops around it and every machine gets the same bits.
 *
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial of degree 6; 2^n by its bits. exp_f32(0) is
 * exactly 1. The error is at most 2 ulp down to -87; below that the result is 0, off by less than 2e-38.
 */
#ifndef FOLIOI_CPU_EXP_H
#define FOLIOI_CPU_EXP_H

#include "core/dtype.h"

static inline float exp_f32(float x)
{
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504f + to_integer;
    float n = shifted - to_integer;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665795e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * (r * r) + r + 1.0f;
    /* the integer sits in the low bits of shifted; 127 is the exponent's bias */
    float power = f32_of_bits((bits_of_f32(shifted) + 127u) << 23);
    return x < -87.0f ? 0.0f : p * power;
}

#endif
