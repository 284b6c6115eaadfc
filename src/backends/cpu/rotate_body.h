/*
 * rotate_body.h: rows of q and k rotated on vectors, with the bits of folioi_rotate_row. Numbers are widened to f32 in
 * chunks, rotated pair by pair, and rounded to their type again. A level's file includes its vec_<isa>.h, then this.
 */
#ifndef FOLIOI_ROTATE_BODY_H
#define FOLIOI_ROTATE_BODY_H

#include "backends/cpu/cpu_kernels.h"
#include "core/dtype.h"

enum { CHUNK_PAIRS = 64 }; /* pairs of a chunk */

INLINE void widen_numbers(float *to, const char *from, const int type, int32_t n)
{
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(to + i, vec_load_as(type, from + (type == FOLIO_F32 ? 4 : 2) * (int64_t)i));
    for (; i < n; i++) to[i] = load_f32(from, (folio_dtype)type, i);
}

INLINE void round_numbers(char *to, const float *from, const int type, int32_t n)
{
    int32_t i = 0;
    if (type == FOLIO_F32) memcpy(to, from, (size_t)n * sizeof *from);
    else if (type == FOLIO_BF16)
        for (; i < n; i++) ((uint16_t *)(void *)to)[i] = f32_to_bf16(from[i]);
    else {
        for (; i + LANES <= n; i += LANES)
            vec_store_f16((uint16_t *)(void *)to + i, vec_load(from + i));
        for (; i < n; i++) store_f32(to, FOLIO_F16, i, from[i]);
    }
}

INLINE void rotate_chunk(float *restrict x, float *restrict y, const float *restrict c,
                         const float *restrict s, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        float a = x[i] * c[i] - y[i] * s[i];
        y[i] = y[i] * c[i] + x[i] * s[i];
        x[i] = a;
    }
}

/* n pairs from pair `first` on. */
INLINE void rotate_pairs(char *to, const char *from, const int type, const folioi_rotation *r,
                         const float *row, int32_t first, int32_t n)
{
    const int64_t elem = type == FOLIO_F32 ? 4 : 2;
    int32_t half = r->num_dims / 2;
    float x[CHUNK_PAIRS], y[CHUNK_PAIRS], both[2 * CHUNK_PAIRS];
    const float *c = row + first, *s = row + half + first;
    if (r->pairs) {
        widen_numbers(both, from + 2 * first * elem, type, 2 * n);
        for (int32_t i = 0; i < n; i++) x[i] = both[2 * i], y[i] = both[2 * i + 1];
        rotate_chunk(x, y, c, s, n);
        for (int32_t i = 0; i < n; i++) both[2 * i] = x[i], both[2 * i + 1] = y[i];
        round_numbers(to + 2 * first * elem, both, type, 2 * n);
    } else {
        widen_numbers(x, from + first * elem, type, n);
        widen_numbers(y, from + (half + first) * elem, type, n);
        rotate_chunk(x, y, c, s, n);
        round_numbers(to + first * elem, x, type, n);
        round_numbers(to + (half + first) * elem, y, type, n);
    }
}

INLINE void rotate_as(const int type, char *to, const char *from, const folioi_rotation *r,
                      const float *row)
{
    int32_t pair = 0, half = r->num_dims / 2;
    for (; pair + CHUNK_PAIRS <= half; pair += CHUNK_PAIRS)
        rotate_pairs(to, from, type, r, row, pair, CHUNK_PAIRS);
    if (pair < half) rotate_pairs(to, from, type, r, row, pair, half - pair);
}

static void rotate_row(void *to, const void *from, folio_dtype dtype, int32_t dims,
                       const folioi_rotation *r, int64_t position)
{
    if (position < 0 || position >= r->num_positions) { /* NaN */
        folioi_rotate_row(to, from, dtype, dims, r, position);
        return;
    }
    size_t elem = folio_dtype_size(dtype), begin = (size_t)r->first_dim * elem,
           end = begin + (size_t)r->num_dims * elem, all = (size_t)dims * elem;
    char *t = to;
    const char *f = from;
    if (begin > 0) memcpy(t, f, begin);
    if (end < all) memcpy(t + end, f + end, all - end);
    const float *row = r->table + position * r->num_dims;
    if (dtype == FOLIO_F32) rotate_as(FOLIO_F32, t + begin, f + begin, r, row);
    else if (dtype == FOLIO_BF16) rotate_as(FOLIO_BF16, t + begin, f + begin, r, row);
    else rotate_as(FOLIO_F16, t + begin, f + begin, r, row);
}

#endif
