/* vec_avx2.h: eight f32 lanes, for attend_body.h. AVX2, FMA and F16C. */
#ifndef FOLIOI_VEC_AVX2_H
#define FOLIOI_VEC_AVX2_H

#include "backends/cpu/unroll.h"

#include <folio/folio.h>
#include <immintrin.h>
#include <stdbool.h>

#define LANES 8
#define MAX_ROWS 6 /* x 2 vectors: 12 accumulators of 16 registers */
typedef __m256 vec;

#define INLINE static inline __attribute__((always_inline))

INLINE vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vec_store(float *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE vec vec_set1(float x) { return _mm256_set1_ps(x); }
INLINE vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec vec_quotient(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
/* b where a is NaN */
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec vec_abs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
/* 0, 1, 2 ... */
INLINE vec vec_iota(void) { return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0); }
INLINE vec vec_or(vec a, vec b) { return _mm256_or_ps(a, b); }

/* Lanes outside [lo, hi) become y. */
INLINE vec vec_outside(vec x, int lo, int hi, vec y)
{
    __m256i i = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(hi), i),
                                  _mm256_cmpgt_epi32(i, _mm256_set1_epi32(lo - 1)));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(in));
}
/* Lanes equal to y, a bit each. */
INLINE unsigned vec_equal(vec x, float y)
{
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(y), _CMP_EQ_OQ));
}
INLINE bool vec_any_equal(vec x, float y) { return vec_equal(x, y) != 0; }
INLINE bool vec_any_nan(vec x)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
}

/* x + bias; -inf where the bias is, whatever x */
INLINE vec vec_add_unless_hidden(vec x, vec bias)
{
    vec hidden = _mm256_set1_ps(-__builtin_inff());
    return _mm256_blendv_ps(_mm256_add_ps(x, bias), hidden,
                            _mm256_cmp_ps(bias, hidden, _CMP_EQ_OQ));
}
/* 0 in the lanes whose bits are set. */
INLINE vec vec_without(vec x, uint64_t lanes)
{
    __m256i bit = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)(lanes & 0xff)), bit);
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)), x);
}
/* y where x > edge, else z */
INLINE vec vec_choose(vec x, vec edge, vec y, vec z)
{
    return _mm256_blendv_ps(z, y, _mm256_cmp_ps(x, edge, _CMP_GT_OQ));
}

INLINE vec vec_copy_sign(vec magnitude, vec sign)
{
    return _mm256_or_ps(vec_abs(magnitude), _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
/* All numbers finite? pairs: of two bf16 numbers each. */
INLINE bool vec_is_finite(vec x, bool pairs)
{
    __m256i u = _mm256_castps_si256(x), inf = _mm256_set1_epi32(0x7f800000);
    __m256i bad = _mm256_cmpeq_epi32(_mm256_and_si256(u, inf), inf);
    if (pairs)
        bad = _mm256_or_si256(
            bad, _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_slli_epi32(u, 16), inf), inf));
    return _mm256_testz_si256(bad, bad) != 0;
}

/* In one fixed order: halves of halves. */
INLINE float vec_sum(vec x)
{
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float vec_largest(vec x)
{
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

/* x * 2^n for a whole n from -254 on, in two steps so that it ends in 0. */
INLINE vec vec_scale(vec x, vec n)
{
    __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
INLINE vec vec_round(vec x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* The low halves of 32-bit lanes as f16. */
INLINE vec vec_from_halves(__m256i u)
{
    __m256i low = _mm256_and_si256(u, _mm256_set1_epi32(0xffff));
    __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return _mm256_cvtph_ps(h);
}

/* Numbers of `kv` packed in 32-bit lanes, number `nth` of each as f32. */
INLINE vec vec_unpack(const int kv, const int nth, vec words)
{
    if (kv == FOLIO_F32) return words;
    __m256i u = _mm256_castps_si256(words);
    if (kv == FOLIO_BF16)
        return _mm256_castsi256_ps(nth == 0
                                       ? _mm256_slli_epi32(u, 16)
                                       : _mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)));
    if (kv == FOLIO_F16) return vec_from_halves(nth == 0 ? u : _mm256_srli_epi32(u, 16));
    if (kv == FOLIO_INT8)
        return _mm256_cvtepi32_ps(
            _mm256_srai_epi32(_mm256_sllv_epi32(u, _mm256_set1_epi32(24 - 8 * nth)), 24));
    __m256i b =
        _mm256_and_si256(_mm256_srlv_epi32(u, _mm256_set1_epi32(8 * nth)), _mm256_set1_epi32(0xff));
    if (kv == FOLIO_FP8_E5M2) return vec_from_halves(_mm256_slli_epi32(b, 8));
    /* e4m3 as f16 is 2^8 too small; NaN is 0x7f */
    __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi32(0x7f));
    __m256i sign = _mm256_and_si256(b, _mm256_set1_epi32(0x80));
    vec x = vec_from_halves(
        _mm256_or_si256(_mm256_slli_epi32(magnitude, 7), _mm256_slli_epi32(sign, 8)));
    vec nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f)));
    return _mm256_or_ps(_mm256_mul_ps(x, _mm256_set1_ps(256.0f)), nan);
}
/* LANES bytes. */
INLINE vec vec_load_bytes(const int kv, const uint8_t *p)
{
    __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    return vec_unpack(kv, 0, _mm256_castsi256_ps(words));
}

/* LANES numbers of `type` that lie side by side, as f32. */
INLINE vec vec_load_as(const int type, const void *p)
{
    if (type == FOLIO_F32) return _mm256_loadu_ps(p);
    if (type == FOLIO_F16) return _mm256_cvtph_ps(_mm_loadu_si128(p));
    if (type == FOLIO_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    return vec_load_bytes(type, p);
}
INLINE void vec_store_f16(uint16_t *p, vec x)
{
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Rows to columns: 8 x 8 numbers. */
INLINE void vec_transpose(vec *x)
{
    __m256 t[8];
    UNROLL_FOR (int i = 0; i < 2; i++) {
        const vec *r = x + 4 * i;
        __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
        __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
        __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
        __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
        t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
        t[2 + i] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
        t[4 + i] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
        t[6 + i] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(t[2 * i], t[2 * i + 1], 0x20);
        x[4 + i] = _mm256_permute2f128_ps(t[2 * i], t[2 * i + 1], 0x31);
    }
}

/*
 * LANES rows, of which four[i] is row 4 i and the three after it are `stride` bytes apart: their 16 bytes from `offset` on
 * as four vectors of 32-bit words, a row in each lane.
 */
INLINE void vec_transpose_16(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    vec x[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        int64_t at = i * stride + offset;
        x[i] = _mm256_castps128_ps256(_mm_loadu_ps((const void *)(four[0] + at)));
        x[i] = _mm256_insertf128_ps(x[i], _mm_loadu_ps((const void *)(four[1] + at)), 1);
    }
    __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1]));
    __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1]));
    __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3]));
    __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]));
    words[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    words[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    words[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    words[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}

#endif
