/* vec_avx512.h: sixteen f32 lanes, for attend_body.h. */
#ifndef FOLIOI_VEC_AVX512_H
#define FOLIOI_VEC_AVX512_H

#include "backends/cpu/unroll.h"

#include <folio/folio.h>
#include <immintrin.h>
#include <stdbool.h>

#define LANES 16
#define MAX_ROWS 12 /* x 2 vectors: 24 accumulators of 32 registers */
typedef __m512 vec;

#define INLINE static inline __attribute__((always_inline))

INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec vec_set1(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
/* b where a is NaN */
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
/* Lanes equal to y, a bit each. */
INLINE unsigned vec_equal(vec x, float y)
{
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(y), _CMP_EQ_OQ);
}
INLINE bool vec_any_equal(vec x, float y) { return vec_equal(x, y) != 0; }
INLINE vec vec_abs(vec a) { return _mm512_abs_ps(a); }
/* 0, 1, 2 ... */
INLINE vec vec_iota(void)
{
    return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
/* Lanes outside [lo, hi) become y. */
INLINE vec vec_outside(vec x, int lo, int hi, vec y)
{
    unsigned below = hi >= 16 ? 0xffffu : hi <= 0 ? 0 : (1u << hi) - 1;
    unsigned first = lo >= 16 ? 0xffffu : lo <= 0 ? 0 : (1u << lo) - 1;
    return _mm512_mask_mov_ps(y, (__mmask16)(below & ~first), x);
}
/* 0 in the lanes whose bits are set. */
INLINE vec vec_without(vec x, uint64_t lanes) { return _mm512_maskz_mov_ps((__mmask16)~lanes, x); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
/* a / b for a b that is neither tiny nor huge, at most an ulp off: half the time of a division. */
INLINE vec vec_quotient(vec a, vec b)
{
    vec y = _mm512_rcp14_ps(b);
    y = _mm512_fmadd_ps(_mm512_fnmadd_ps(b, y, _mm512_set1_ps(1.0f)), y, y);
    vec q = _mm512_mul_ps(a, y);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(b, q, a), y, q);
}
/* x + bias; -inf where the bias is, whatever x */
INLINE vec vec_add_unless_hidden(vec x, vec bias)
{
    vec hidden = _mm512_set1_ps(-__builtin_inff());
    __mmask16 m = _mm512_cmp_ps_mask(bias, hidden, _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(_mm512_add_ps(x, bias), m, hidden);
}
/* y where x > edge, else z */
INLINE vec vec_choose(vec x, vec edge, vec y, vec z)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, edge, _CMP_GT_OQ), z, y);
}

INLINE vec vec_copy_sign(vec magnitude, vec sign)
{
    __m512i bit = _mm512_set1_epi32((int)0x80000000u);
    __m512i s = _mm512_castps_si512(sign), m = _mm512_castps_si512(magnitude);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, s, m, 0xca)); /* bit ? s : m */
}
/* All numbers finite? pairs: of two bf16 numbers each. */
INLINE bool vec_is_finite(vec x, bool pairs)
{
    __m512i u = _mm512_castps_si512(x), inf = _mm512_set1_epi32(0x7f800000);
    bool high = _mm512_cmpeq_epi32_mask(_mm512_and_epi32(u, inf), inf) == 0;
    if (!pairs) return high;
    __m512i low = _mm512_slli_epi32(u, 16);
    return high && _mm512_cmpeq_epi32_mask(_mm512_and_epi32(low, inf), inf) == 0;
}

/* Numbers of `kv` packed in 32-bit lanes, number `nth` of each as f32. */
INLINE vec vec_unpack(const int kv, const int nth, vec words)
{
    if (kv == FOLIO_F32) return words;
    __m512i u = _mm512_castps_si512(words);
    if (kv == FOLIO_BF16)
        return _mm512_castsi512_ps(nth == 0
                                       ? _mm512_slli_epi32(u, 16)
                                       : _mm512_and_epi32(u, _mm512_set1_epi32((int)0xffff0000u)));
    if (kv == FOLIO_F16) {
        const __m512i halves =
            _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26,
                             24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        u = _mm512_permutexvar_epi16(halves, u);
        return _mm512_cvtph_ps(nth == 0 ? _mm512_castsi512_si256(u)
                                        : _mm512_extracti64x4_epi64(u, 1));
    }
    if (kv == FOLIO_INT8)
        return _mm512_cvtepi32_ps(
            _mm512_srai_epi32(_mm512_sllv_epi32(u, _mm512_set1_epi32(24 - 8 * nth)), 24));
    __m512i b =
        _mm512_and_epi32(_mm512_srlv_epi32(u, _mm512_set1_epi32(8 * nth)), _mm512_set1_epi32(0xff));
    if (kv == FOLIO_FP8_E5M2)
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_slli_epi32(b, 8)));
    /* e4m3 as f16 is 2^8 too small; NaN is 0x7f */
    __m512i mag = _mm512_and_epi32(b, _mm512_set1_epi32(0x7f));
    __m512i half =
        _mm512_or_epi32(_mm512_slli_epi32(mag, 7),
                        _mm512_slli_epi32(_mm512_and_epi32(b, _mm512_set1_epi32(0x80)), 8));
    vec x = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), _mm512_set1_ps(256.0f));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(mag, _mm512_set1_epi32(0x7f));
    return _mm512_mask_mov_ps(x, nan, _mm512_set1_ps(__builtin_nanf("")));
}
/* LANES bytes. */
INLINE vec vec_load_bytes(const int kv, const uint8_t *p)
{
    __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return vec_unpack(kv, 0, _mm512_castsi512_ps(words));
}

/* LANES numbers of `type` that lie side by side, as f32. */
INLINE vec vec_load_as(const int type, const void *p)
{
    if (type == FOLIO_F32) return _mm512_loadu_ps(p);
    if (type == FOLIO_F16) return _mm512_cvtph_ps(_mm256_loadu_si256(p));
    if (type == FOLIO_BF16)
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
    return vec_load_bytes(type, p);
}
INLINE void vec_store_f16(uint16_t *p, vec x)
{
    _mm256_storeu_si256((__m256i *)(void *)p,
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Rows to columns: 16 x 16 numbers. */
INLINE void vec_transpose(vec *x)
{
    __m512 t[16];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        const vec *r = x + 4 * i;
        __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
        __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
        __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
        __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
        t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        t[4 + i] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        t[8 + i] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        t[12 + i] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        const __m512 *c = t + 4 * i;
        __m512 a = _mm512_shuffle_f32x4(c[0], c[1], 0x88),
               b = _mm512_shuffle_f32x4(c[2], c[3], 0x88);
        __m512 d = _mm512_shuffle_f32x4(c[0], c[1], 0xdd),
               e = _mm512_shuffle_f32x4(c[2], c[3], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        x[8 + i] = _mm512_shuffle_f32x4(a, b, 0xdd);
        x[4 + i] = _mm512_shuffle_f32x4(d, e, 0x88);
        x[12 + i] = _mm512_shuffle_f32x4(d, e, 0xdd);
    }
}

/* Four vectors, of which lane l has words of row 4 l + i in vector i: the first words of all rows, the second ... */
INLINE void vec_transpose_lanes(vec *x)
{
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    x[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

/*
 * Sixteen rows, of which four[i] is row 4 i and the three after it are `stride` bytes apart: their 16 bytes from `offset` on
 * as four vectors of 32-bit words, a row in each lane.
 */
INLINE void vec_transpose_16(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    UNROLL_FOR (int i = 0; i < 4; i++) {
        int64_t at = i * stride + offset;
        vec x = _mm512_castps128_ps512(_mm_loadu_ps((const void *)(four[0] + at)));
        x = _mm512_insertf32x4(x, _mm_loadu_ps((const void *)(four[1] + at)), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps((const void *)(four[2] + at)), 2);
        words[i] = _mm512_insertf32x4(x, _mm_loadu_ps((const void *)(four[3] + at)), 3);
    }
    vec_transpose_lanes(words);
}

/* The same if these bytes of four rows lie side by side. */
INLINE void vec_transpose_fours(const char *const *four, int64_t offset, vec *words)
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    UNROLL_FOR (int i = 0; i < 4; i++) words[i] = vec_load((const void *)(four[i] + offset));
    vec_transpose_lanes(words);
    UNROLL_FOR (int i = 0; i < 4; i++) words[i] = _mm512_permutexvar_ps(order, words[i]);
}

/* 32 bytes of each row: eight vectors of words. */
INLINE void vec_transpose_32(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    const __m512i low = _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    vec x[8];
    UNROLL_FOR (int i = 0; i < 8; i++) {
        const char *row = four[i / 2] + i % 2 * 2 * stride + offset;
        x[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps((const void *)row)),
                                  _mm256_loadu_ps((const void *)(row + stride)), 1);
    }
    vec_transpose_lanes(x);
    vec_transpose_lanes(x + 4);
    UNROLL_FOR (int i = 0; i < 4; i++) {
        words[i] = _mm512_permutex2var_ps(x[i], low, x[4 + i]);
        words[4 + i] = _mm512_permutex2var_ps(x[i], high, x[4 + i]);
    }
}

/* 64 bytes of each row: sixteen vectors. */
INLINE void vec_transpose_64(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    UNROLL_FOR (int i = 0; i < 16; i++)
        words[i] = vec_load((const void *)(four[i / 4] + i % 4 * stride + offset));
    vec_transpose(words);
}

INLINE bool vec_any_nan(vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

/* In one fixed order: halves of halves. */
INLINE float vec_sum(vec x)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float vec_largest(vec x)
{
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

/* x * 2^n for a whole n; ends in 0. */
INLINE vec vec_scale(vec x, vec n) { return _mm512_scalef_ps(x, n); }
INLINE vec vec_round(vec x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#endif
