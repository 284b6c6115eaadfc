/*
 * kv_rows.h: rows of numbers in and out of host memory: dense rows of any dtype to f32 and back, and
 * rows of a KV cache in any layout, rounded and scaled on the way in, dequantised on the way out.
 */
#ifndef FOLIOI_KV_ROWS_H
#define FOLIOI_KV_ROWS_H

#include "cache/kv_layout.h"
#include "core/rotation.h"

/** Numbers of any dtype at base[index .. index + n), as f32; and back, rounded to nearest even. */
void folioi_load_row(float *dst, const void *base, folio_dtype dtype, int64_t index, int64_t n);
void folioi_store_row(void *base, folio_dtype dtype, int64_t index, const float *src, int64_t n);

/** k and v with all strides resolved. */
typedef struct folioi_kv_tensors {
    folio_tensor k, v;
    float k_scale, v_scale;                     /* fp8 only, else 1 */
    const float *k_head_scales, *v_head_scales; /* fp8: [num_kv_heads] in place of them, or NULL */
    folioi_rotation rotation;                   /* of k's rows, on their way into the cache */
    const int64_t *positions;                   /* [rows] of them; NULL on a device: the step's */
} folioi_kv_tensors;

/** Rows [begin, end) of kv heads [head_begin, head_end): what one worker stores at a time. */
typedef struct folioi_kv_share {
    int64_t begin, end;
    int32_t head_begin, head_end;
} folioi_kv_share;

/** Store a share of t in slots[begin .. end); slot -1 stores nothing. */
void folioi_kv_write_rows(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                          const int64_t *slots, const folioi_kv_share *share);

/** The int8 scale of numbers [index, index + n): max|x| / 127, NaN where one is NaN; 0 for zeros. */
float folioi_int8_scale(const void *base, folio_dtype dtype, int64_t index, int64_t n);

/** What one head of one stored token is multiplied by: the cache's own scale (int8), or `fp8`. */
static inline float kv_scale(const folioi_kv_side *side, int64_t block, int64_t head, int64_t token,
                             float fp8)
{
    return side->scales != NULL ? side->scales[address_token(side->scales_at, block, head, token)]
                                : fp8;
}

/** One head of one stored token as f32 numbers, dequantised. */
void folioi_kv_read_row(float *dst, const folioi_kv_side *side, int64_t block, int64_t head,
                        int64_t token, float fp8_scale);

#endif
