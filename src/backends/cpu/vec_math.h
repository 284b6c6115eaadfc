/*
 * vec_math.h: 2^x and the soft cap on vectors, of whatever level's vec_<isa>.h was included before.
 *
 * 2^x: x = n + f, |f| <= 1/2; 2^f is 1 + f p(f), a polynomial of degree 6. Exactly 1 at 0, at most 2 ulp off down to
 * -126, exactly 0 below -150; NaN stays.
 * cap tanh(x / cap): -cap m / (2 + m), m = e^(-2|x| / cap) - 1 made of the same terms, so that nothing cancels near 0; at
 * most 4.5 ulp off. From |x| = 0.55 cap on cap - cap 2e / (1 + e), e = m + 1, whose only rounding of weight is the last
 * one; at most 2 ulp off from 0.75 cap on. Weights are e to the power of that error.
 */
#ifndef FOLIOI_VEC_MATH_H
#define FOLIOI_VEC_MATH_H

/* p(f). */
INLINE vec vec_exp2_factor(vec f)
{
    vec p = vec_set1(1.5382232e-4f);
    p = vec_fma(p, f, vec_set1(1.3387377e-3f));
    p = vec_fma(p, f, vec_set1(9.6183109e-3f));
    p = vec_fma(p, f, vec_set1(5.5503674e-2f));
    p = vec_fma(p, f, vec_set1(2.4022649e-1f));
    return vec_fma(p, f, vec_set1(6.9314718e-1f));
}

/* Below -200 is as good as -200. */
INLINE vec vec_exp2(vec x)
{
    x = vec_max(vec_set1(-200.0f), x);
    vec n = vec_round(x), f = vec_sub(x, n);
    return vec_scale(vec_fma(vec_exp2_factor(f), f, vec_set1(1.0f)), n);
}

INLINE vec vec_soft_cap(vec x, const folioi_soft_cap *c)
{
    vec size = vec_min(vec_set1(c->limit), vec_abs(x)), rate = vec_set1(c->rate);
    vec zero = vec_set1(0.0f), one = vec_set1(1.0f), cap = vec_set1(c->cap);
    vec n = vec_round(vec_mul(size, rate)), f = vec_fma(size, rate, vec_sub(zero, n));
    f = vec_fma(size, vec_set1(c->rest), f); /* size * rate - n as if it were not rounded */
    vec power = vec_scale(one, n), pf = vec_mul(vec_exp2_factor(f), f), edge = vec_set1(c->edge);
    vec m = vec_fma(power, pf, vec_sub(power, one)), e = vec_fma(power, pf, power);
    vec q = vec_quotient(vec_choose(size, edge, vec_add(e, e), m), vec_add(m, vec_set1(2.0f)));
    vec y = vec_fma(q, vec_sub(zero, cap), vec_choose(size, edge, cap, zero));
    return vec_copy_sign(y, x);
}

#endif
