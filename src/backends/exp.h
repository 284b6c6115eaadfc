/*
 * exp.h: 2^x and e^x for the softmax, results up to 2^12, or NaN. A few lines of arithmetic instead of libm's, so
 * that compilers vectorise the loops around it and every machine gets the same bits.
 *
 * x = n + f, |f| <= 1/2; 2^f by a polynomial of degree 6; 2^n by its bits. exp2_f32(0) is exactly 1. The
 * error is at most 2 ulp down to -126; below that the result is 0.
 */
#ifndef FOLIOI_EXP_H
#define FOLIOI_EXP_H

#include "core/dtype.h"

#define LOG2E 1.44269504f

static inline float exp2_f32(float x)
{
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x + to_integer;
    float f = x - (shifted - to_integer);
    float p = 1.5382232e-4f;
    p = p * f + 1.3387377e-3f;
    p = p * f + 9.6183109e-3f;
    p = p * f + 5.5503674e-2f;
    p = p * f + 2.4022649e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    /* the integer sits in the low bits of shifted; 127 is the exponent's bias */
    float power = f32_of_bits((bits_of_f32(shifted) + 127u) << 23);
    return x < -126.0f ? 0.0f : p * power;
}

/* Of the difference of two scores. */
static inline float exp_f32(float x) { return exp2_f32(x * LOG2E); }

#endif
