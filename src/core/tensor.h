/* tensor.h: arguments that many calls share: tensors, fp8 scales and where a call runs. */
#ifndef FOLIOI_TENSOR_H
#define FOLIOI_TENSOR_H

#include "core/span.h"
#include "core/status.h"

/**
 * Fill in strides, and in a tensor that is absent the dtype; check dtype, tokens, alignment and that
 * all offsets fit. dtype F64: the tensor may have it. `name` begins the sentence.
 */
folio_status folioi_tensor_resolve(folio_tensor *t, const char *name, folio_dtype dtype,
                                   int64_t heads, int64_t head_size, int64_t tokens);

/** Strides of a [token][head] array of f32. */
folio_status folioi_lse_resolve(const float *lse, int64_t *token_stride, int64_t *head_stride,
                                int64_t heads, int64_t tokens);

/** Where a resolved tensor's numbers and a resolved lse lie; data NULL: nowhere. */
folioi_span folioi_tensor_span(const folio_tensor *t, int64_t heads, int64_t head_size);
folioi_span folioi_lse_span(const float *lse, int64_t token_stride, int64_t head_stride,
                            int64_t heads, int64_t tokens);

/** One of the arrays that a call writes or reads. */
typedef struct folioi_place {
    const char *name;
    folioi_span span;
} folioi_place;

/** The first `written` of n places share no byte with each other or with the rest. */
folio_status folioi_check_apart(const folioi_place *places, int written, int n);

/** The same numbers in the same places? */
bool folioi_tensors_same(const folio_tensor *a, const folio_tensor *b);

/** Scales of an fp8 cache: of K and V one for all kv heads, or one for each ([heads]). 1 and NULL where the dtype uses
 * none. v_in_k: K's become V's too. The numbers of a device's arrays are not looked at. */
folio_status folioi_scales_resolve(const folio_context *ctx, folio_dtype dtype, int32_t heads,
                                   bool v_in_k, float *k_scale, const float **k_head_scales,
                                   float *v_scale, const float **v_head_scales);

/** With v_in_k calls take no v. */
folio_status folioi_check_no_v(const folio_tensor *v);

/** run may be NULL. */
folio_status folioi_run_in(const folio_context *ctx, const folio_run *run, folio_run *out);

#endif
