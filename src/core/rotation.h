/*
 * rotation.h: one number of a row after a rotary embedding. All backends rotate by rotated_number or get its bits,
 * except that a NaN may be another NaN.
 * Results are rounded to the row's dtype: as if a pass had rotated the row before.
 */
#ifndef FOLIOI_ROTATION_H
#define FOLIOI_ROTATION_H

#include "core/dtype.h"

/** How rows rotate: what kernels see. */
typedef struct folioi_rotation {
    const float
        *table; /* [num_positions][num_dims]: n/2 cosines, then n/2 sines; NULL: nothing rotates */
    int64_t num_positions;
    int32_t first_dim, num_dims;
    int32_t pairs; /* 0: i and i + n/2, 1: 2i and 2i + 1 */
} folioi_rotation;

/** A row of `dims` numbers, rotated for its position. `to` is not `from`. */
typedef void folioi_rotate_fn(void *to, const void *from, folio_dtype dtype, int32_t dims,
                              const folioi_rotation *r, int64_t position);

/** The portable form. */
void folioi_rotate_row(void *to, const void *from, folio_dtype dtype, int32_t dims,
                       const folioi_rotation *r, int64_t position);

/* No product is fused with a sum: every backend has the same bits. */
SHARED_INLINE float rotary_product(float a, float b)
{
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

SHARED_INLINE float rounded_to(folio_dtype dtype, float x)
{
    if (dtype == FOLIO_F16) return f16_to_f32(f32_to_f16(x));
    return dtype == FOLIO_BF16 ? bf16_to_f32(f32_to_bf16(x)) : x;
}

/** Number d of the row at base[index], rotated for its position. NaN where the table has no such position. */
SHARED_INLINE float rotated_number(const folioi_rotation *r, const void *base, folio_dtype dtype,
                                   int64_t index, int32_t d, int64_t position)
{
    int32_t i = d - r->first_dim, half = r->num_dims / 2;
    float own = load_f32(base, dtype, index + d);
    if (r->table == NULL || i < 0 || i >= r->num_dims) return own;
    bool second = r->pairs ? i % 2 == 1 : i >= half;
    int32_t step = r->pairs ? 1 : half, angle = r->pairs ? i / 2 : i % half;
    if (position < 0 || position >= r->num_positions) return NAN;
    const float *row = r->table + position * r->num_dims;
    float other = load_f32(base, dtype, index + (second ? d - step : d + step));
    float a = rotary_product(own, row[angle]), b = rotary_product(other, row[half + angle]);
    return rounded_to(dtype, second ? a + b : a - b);
}

#endif
