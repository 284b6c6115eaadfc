/*
 * vec_math.h: 2^x and tanh on vectors, of whatever level's vec_<isa>.h was included before.
 *
 * 2^x: x = n + f, |f| <= 1/2, a polynomial of degree 6 in f. Exactly 1 at 0, at most 2 ulp off down to -126,
 * exactly 0 below -150; NaN stays.
 * tanh: a polynomial near 0, where (1 - e) / (1 + e), e = e^-2|x|, would cancel; at most 4 ulp off.
 */
#ifndef FOLIOI_VEC_MATH_H
#define FOLIOI_VEC_MATH_H

INLINE vec vec_exp2(vec x)
{
    x = vec_max(vec_set1(-200.0f), x);
    vec n = vec_round(x), f = vec_sub(x, n);
    vec p = vec_set1(1.5403530e-4f);
    p = vec_fma(p, f, vec_set1(1.3398874e-3f));
    p = vec_fma(p, f, vec_set1(9.6180000e-3f));
    p = vec_fma(p, f, vec_set1(5.5503294e-2f));
    p = vec_fma(p, f, vec_set1(2.4022651e-1f));
    p = vec_fma(p, f, vec_set1(6.9314718e-1f));
    return vec_scale(vec_fma(p, f, vec_set1(1.0f)), n);
}

INLINE vec vec_tanh(vec x)
{
    vec z = vec_mul(x, x);
    vec p = vec_set1(-5.70498872745e-3f);
    p = vec_fma(p, z, vec_set1(2.06390887954e-2f));
    p = vec_fma(p, z, vec_set1(-5.37397155531e-2f));
    p = vec_fma(p, z, vec_set1(1.33314422036e-1f));
    p = vec_fma(p, z, vec_set1(-3.33332819422e-1f));
    vec small = vec_fma(vec_mul(p, z), x, x);
    vec e = vec_exp2(vec_mul(vec_abs(x), vec_set1(-2.88539008f))), one = vec_set1(1.0f);
    vec large = vec_quotient(vec_sub(one, e), vec_add(one, e));
    return vec_where_small(x, 0.625f, small, vec_copy_sign(large, x));
}

#endif
