/* write_avx512.h: what write_body.h needs of vectors besides vec_avx512.h: 16-bit and 8-bit numbers in and out. */
#ifndef FOLIOI_WRITE_AVX512_H
#define FOLIOI_WRITE_AVX512_H

#include "backends/cpu/vec_avx512.h"

/* Numbers as f16, rounded to nearest even. */
INLINE __m256i vec_to_f16(vec x)
{
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Words from halves, and the low halves or bytes of words. */
INLINE __m512i vec_widen(__m256i h) { return _mm512_cvtepu16_epi32(h); }
INLINE __m256i vec_narrow_halves(__m512i u) { return _mm512_cvtepi32_epi16(u); }
INLINE void vec_store_bytes(void *p, __m512i u)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(u));
}

INLINE __m512i vec_max_words(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
INLINE __m256i vec_max_halves(__m256i a, __m256i b) { return _mm256_max_epi16(a, b); }

/* The low half of each word to memory; between them nothing is written. */
INLINE void vec_store_low_halves(char *p, __m512i u) { _mm512_mask_storeu_epi16(p, 0x55555555, u); }

/* Words: x where a, taken as a signed number, is above the limit, else y. */
INLINE __m512i vec_where_above(__m512i a, int limit, __m512i x, __m512i y)
{
    return _mm512_mask_mov_epi32(y, _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(limit)), x);
}

#endif
