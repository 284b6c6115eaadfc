/*
 * vec_math.h: 2^x and tanh on vectors, of whatever level's vec_<isa>.h was included before.
 *
 * 2^x: x = n + f, |f| <= 1/2; 2^f is 1 + f p(f), a polynomial of degree 6. Exactly 1 at 0, at most 2 ulp off down to
 * -126, exactly 0 below -150; NaN stays.
 * tanh: -m / (2 + m), m = e^-2|x| - 1 made of the same parts, so that nothing cancels near 0; at most 4 ulp off. From
 * |x| = 0.75 on 1 - 2e / (1 + e), e = e^-2|x|: at most 2 ulp off. A cap multiplies that error, and softmax is made of it.
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
    vec f, n, size = vec_abs(x), p = vec_exp2_parts(vec_mul(size, vec_set1(-2.88539008f)), &f, &n);
    vec one = vec_set1(1.0f), power = vec_scale(one, n), pf = vec_mul(p, f), edge = vec_set1(0.75f);
    vec m = vec_fma(power, pf, vec_sub(power, one)), e = vec_fma(power, pf, power);
    vec q = vec_quotient(vec_choose(size, edge, vec_add(e, e), m), vec_add(m, vec_set1(2.0f)));
    return vec_copy_sign(vec_choose(size, edge, vec_sub(one, q), q), x);
}

#endif
