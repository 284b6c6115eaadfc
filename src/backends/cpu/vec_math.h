/*
 * vec_math.h: 2^x and tanh on vectors, of whatever level's vec_<isa>.h was included before.
 *
 * 2^x: x = n + f, |f| <= 1/2; 2^f is 1 + f p(f), a polynomial of degree 6. Exactly 1 at 0, at most 2 ulp off down to
 * -126, exactly 0 below -150; NaN stays.
 * tanh: -m / (2 + m), m = e^-2|x| - 1 made of the same parts, so that nothing cancels near 0; at most 4 ulp off.
 */
#ifndef FOLIOI_VEC_MATH_H
#define FOLIOI_VEC_MATH_H

/* p(f), f and n. Below -200 is as good as -200. */
INLINE vec vec_exp2_parts(vec x, vec *part, vec *n)
{
    x = vec_max(vec_set1(-200.0f), x);
    *n = vec_round(x);
    vec f = *part = vec_sub(x, *n), p = vec_set1(1.5403530e-4f);
    p = vec_fma(p, f, vec_set1(1.3398874e-3f));
    p = vec_fma(p, f, vec_set1(9.6180000e-3f));
    p = vec_fma(p, f, vec_set1(5.5503294e-2f));
    p = vec_fma(p, f, vec_set1(2.4022651e-1f));
    p = vec_fma(p, f, vec_set1(6.9314718e-1f));
    return p;
}

INLINE vec vec_exp2(vec x)
{
    vec f, n, p = vec_exp2_parts(x, &f, &n);
    return vec_scale(vec_fma(p, f, vec_set1(1.0f)), n);
}

INLINE vec vec_tanh(vec x)
{
    vec f, n, p = vec_exp2_parts(vec_mul(vec_abs(x), vec_set1(-2.88539008f)), &f, &n);
    vec one = vec_set1(1.0f), power = vec_scale(one, n);
    vec m = vec_fma(power, vec_mul(p, f), vec_sub(power, one));
    return vec_copy_sign(vec_quotient(m, vec_add(m, vec_set1(2.0f))), x);
}

#endif
