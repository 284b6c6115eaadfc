/* write_avx2.h: what write_body.h needs of vectors besides vec_avx2.h: 16-bit and 8-bit numbers in and out. */
#ifndef FOLIOI_WRITE_AVX2_H
#define FOLIOI_WRITE_AVX2_H

#include "backends/cpu/vec_avx2.h"

/* Numbers as f16, rounded to nearest even. */
INLINE __m128i vec_to_f16(vec x)
{
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Words from halves, and the low halves or bytes of words. */
INLINE __m256i vec_widen(__m128i h) { return _mm256_cvtepu16_epi32(h); }
INLINE __m128i vec_narrow_halves(__m256i u)
{
    u = _mm256_and_si256(u, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
INLINE void vec_store_bytes(void *p, __m256i u)
{
    u = _mm256_shuffle_epi8(u, _mm256_set1_epi32(0x0c080400));
    __m128i low = _mm256_castsi256_si128(u), high = _mm256_extracti128_si256(u, 1);
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(low, high));
}

INLINE __m256i vec_max_words(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
INLINE __m128i vec_max_halves(__m128i a, __m128i b) { return _mm_max_epi16(a, b); }

/* The low half of each word to memory; between them nothing is written. */
INLINE void vec_store_low_halves(char *p, __m256i u)
{
    int32_t word[LANES];
    _mm256_storeu_si256((__m256i *)(void *)word, u);
    for (int i = 0; i < LANES; i++) __builtin_memcpy(p + i * 4, &word[i], 2);
}

/* Words: x where a, taken as a signed number, is above the limit, else y. */
INLINE __m256i vec_where_above(__m256i a, int limit, __m256i x, __m256i y)
{
    return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(a, _mm256_set1_epi32(limit)));
}

#endif
