/* vec_avx512_bf16.h: vec_avx512.h with pairs of bf16 in a lane, for the levels that multiply them. */
#ifndef FOLIOI_VEC_AVX512_BF16_H
#define FOLIOI_VEC_AVX512_BF16_H

#define DOT_BF16
#include "backends/cpu/vec_avx512.h"

#include "core/dtype.h"

INLINE vec vec_dot(vec acc, vec a, vec b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
/* Vector i of a row as bf16, from p on. */
INLINE void vec_store_bf16(float *p, int i, vec x)
{
    _mm256_storeu_si256((__m256i *)(void *)p + i, (__m256i)_mm512_cvtneps_pbh(x));
}
/* Two rows of 16 numbers: pairs of one from each. */
INLINE vec vec_interleave(const uint16_t *low, const uint16_t *high)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)low));
    both = _mm512_inserti64x4(both, _mm256_loadu_si256((const void *)high), 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
}
/* Two rows of 32 numbers: pairs of one from each, two vectors. */
INLINE void vec_interleave_64(const void *low, const void *high, vec *pair)
{
    const __m512i first =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    __m512i l = _mm512_loadu_si512(low), h = _mm512_loadu_si512(high);
    pair[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(l, first, h));
    pair[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(l, second, h));
}

/*
 * Bytes to bf16 by a look at seven bits, of fp8 those below the sign, of int8 its magnitude: the low and the high byte
 * of each number. Filled once, before any kernel runs.
 */
static uint8_t byte_halves[3][2][128]; /* [e4m3, e5m2, int8][low, high] */

typedef struct {
    __m512i low[2], high[2];
} byte_table;

INLINE int byte_type(const int kv)
{
    return kv == FOLIO_FP8_E4M3 ? 0 : kv == FOLIO_FP8_E5M2 ? 1 : 2;
}

INLINE byte_table byte_table_of(const int kv)
{
    const uint8_t *bytes = byte_halves[byte_type(kv)][0];
    byte_table t;
    for (int i = 0; i < 2; i++) {
        t.low[i] = _mm512_loadu_si512(bytes + 64 * i);
        t.high[i] = _mm512_loadu_si512(bytes + 128 + 64 * i);
    }
    return t;
}

INLINE void look_up(const byte_table *t, const int kv, __m512i x, __m512i *low, __m512i *high)
{
    __m512i seven = kv == FOLIO_INT8 ? _mm512_abs_epi8(x) : x, sign = _mm512_set1_epi8((char)0x80);
    *low = _mm512_permutex2var_epi8(t->low[0], seven, t->low[1]);
    __m512i h = _mm512_permutex2var_epi8(t->high[0], seven, t->high[1]);
    h = _mm512_ternarylogic_epi32(h, x, sign, 0xf8); /* h | (x & sign) */
    if (kv == FOLIO_INT8)                            /* -128 has no magnitude in seven bits */
        h = _mm512_mask_mov_epi8(h, _mm512_cmpeq_epi8_mask(x, sign), _mm512_set1_epi8((char)0xc3));
    *high = h;
}

/* Lanes of four bytes: pairs of the first two, and of the others. */
INLINE void vec_pairs_of_fours(const byte_table *t, const int kv, vec words, vec *pair)
{
    const __m512i twos =
        _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
    __m512i low, high;
    look_up(t, kv, _mm512_shuffle_epi8(_mm512_castps_si512(words), twos), &low, &high);
    pair[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    pair[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
}

/* Four dims of sixteen tokens, bytes that lie side by side, `stride` from dim to dim: words of a token's four. */
INLINE vec vec_fours_of_dims(const char *dims, int64_t stride)
{
    const __m512i order =
        _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a,
                         0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                         0x33231303, 0x32221202, 0x31211101, 0x30201000);
    __m512i x = _mm512_loadu_si512(dims);
    if (stride != 16) {
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(dims + stride)), 1);
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(dims + 2 * stride)), 2);
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(dims + 3 * stride)), 3);
    }
    return _mm512_castsi512_ps(_mm512_permutexvar_epi8(order, x));
}

/* Dims of sixteen tokens, 64 or 16 of them: rows of as many bytes, `row` from token to token. */
INLINE void vec_rows_of_dims(const int num, const char *dims, int64_t stride, char *to, int64_t row)
{
    vec x[16];
    UNROLL_FOR (int i = 0; i < num / 4; i++)
        x[i] = vec_fours_of_dims(dims + 4 * i * stride, stride);
    if (num == 64) {
        vec_transpose(x);
        UNROLL_FOR (int i = 0; i < 16; i++) vec_store((float *)(void *)(to + i * row), x[i]);
        return;
    }
    vec_transpose_lanes(x);
    UNROLL_FOR (int i = 0; i < 4; i++) {
        _mm_storeu_ps((float *)(void *)(to + i * row), _mm512_extractf32x4_ps(x[i], 0));
        _mm_storeu_ps((float *)(void *)(to + (i + 4) * row), _mm512_extractf32x4_ps(x[i], 1));
        _mm_storeu_ps((float *)(void *)(to + (i + 8) * row), _mm512_extractf32x4_ps(x[i], 2));
        _mm_storeu_ps((float *)(void *)(to + (i + 12) * row), _mm512_extractf32x4_ps(x[i], 3));
    }
}

/*
 * Two rows of 16 N bytes, N 1 or 4: pairs of one from each, N vectors. In order; else, for N = 4, as vec_quarters
 * leaves them, which takes two instructions less.
 */
INLINE void vec_pairs_of_rows(const byte_table *t, const int kv, const int N, const bool in_order,
                              const char *row, const char *other, vec *pair)
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __mmask16 there = N == 4 ? 0xffff : 0xf;
    __m512i x = _mm512_maskz_loadu_epi32(there, row), y = _mm512_maskz_loadu_epi32(there, other);
    if (in_order) x = _mm512_permutexvar_epi32(order, x), y = _mm512_permutexvar_epi32(order, y);
    UNROLL_FOR (int i = 0; i < N; i += 2) {
        __m512i both = i == 0 ? _mm512_unpacklo_epi8(x, y) : _mm512_unpackhi_epi8(x, y), low, high;
        look_up(t, kv, both, &low, &high);
        pair[i] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
        if (N > 1) pair[i + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
    }
}

/* Quarter i of vector j and quarter j of vector i change places. */
INLINE void vec_quarters(vec *x)
{
    vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    vec c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, c, 0x88), x[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[2] = _mm512_shuffle_f32x4(b, d, 0x88), x[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

/* Eight vectors, a pair of dims each, of sixteen tokens' words: eight pairs of tokens, sixteen dims each. */
INLINE void vec_pairs_of_tokens(vec *x)
{
    const __m512i neighbours =
        _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
    vec even[4], odd[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_epi8(_mm512_castps_si512(x[2 * i]), neighbours);
        __m512i b = _mm512_shuffle_epi8(_mm512_castps_si512(x[2 * i + 1]), neighbours);
        even[i] = _mm512_castsi512_ps(_mm512_unpacklo_epi64(a, b));
        odd[i] = _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, b));
    }
    vec_quarters(even);
    vec_quarters(odd);
    UNROLL_FOR (int i = 0; i < 4; i++) x[2 * i] = even[i], x[2 * i + 1] = odd[i];
}

static void fill_bytes(void)
{
    static const folio_dtype types[3] = {FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
    for (int type = 0; type < 3; type++)
        for (int i = 0; i < 128; i++) {
            uint32_t code = (uint32_t)i;
            uint16_t bits = f32_to_bf16(load_f32(&code, types[type], 0));
            byte_halves[type][0][i] = (uint8_t)bits;
            byte_halves[type][1][i] = (uint8_t)(bits >> 8);
        }
}

#endif
