/* tensor.c: checks of arguments that many calls share. */
#include "core/tensor.h"

#include "core/checked.h"
#include "core/context.h"
#include "core/dtype.h"

#include <math.h>

/* Do `tokens` rows of `heads` heads, all counted with their whole strides, fit? A stride that a single
 * row or head never uses is bounded too: kernels multiply it. */
static bool extent_fits(int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                        int64_t head_size, int64_t elem)
{
    int64_t a, b, sum;
    return checked_mul(max_i64(tokens, 1), token_stride, &a) &&
           checked_mul(heads, head_stride, &b) && checked_add(a, b, &sum) &&
           checked_add(sum, head_size, &sum) && checked_mul(sum, elem, &sum) && sum <= MAX_EXTENT;
}

folio_status folioi_tensor_resolve(folio_tensor *t, const char *name, folio_dtype dtype,
                                   int64_t heads, int64_t head_size, int64_t tokens)
{
    if (t->data == NULL && t->tokens == 0 && t->dtype == 0) t->dtype = dtype;
    REQUIRE(t->dtype != 0, "%s: dtype is 0; it must be given: f32, f16 or bf16", name);
    REQUIRE(dtype_is_query(t->dtype) || (t->dtype == FOLIO_F64 && dtype == FOLIO_F64),
            "%s: dtype %d (%s) is not one of f32, f16, bf16", name, (int)t->dtype,
            folio_dtype_name(t->dtype));
    REQUIRE(t->tokens == tokens, "%s: tokens is %lld, %lld rows are expected", name,
            (long long)t->tokens, (long long)tokens);
    REQUIRE(tokens >= 0, "%s: tokens is %lld; it must be at least 0", name, (long long)tokens);
    if (t->head_stride == 0) t->head_stride = head_size;
    REQUIRE(t->head_stride >= head_size, "%s: head_stride %lld is below the head size %lld", name,
            (long long)t->head_stride, (long long)head_size);
    if (t->token_stride == 0)
        REQUIRE(checked_mul(heads, t->head_stride, &t->token_stride),
                "%s: %lld heads at head_stride %lld exceed the largest size", name,
                (long long)heads, (long long)t->head_stride);
    REQUIRE(t->token_stride >= head_size, "%s: token_stride %lld is below the head size %lld", name,
            (long long)t->token_stride, (long long)head_size);
    const int64_t dims[] = {tokens, heads}, strides[] = {t->token_stride, t->head_stride};
    REQUIRE(strides_are_apart(2, dims, strides, head_size),
            "%s: token_stride %lld and head_stride %lld make rows of %lld heads x %lld overlap",
            name, (long long)t->token_stride, (long long)t->head_stride, (long long)heads,
            (long long)head_size);
    int64_t elem = (int64_t)folio_dtype_size(t->dtype);
    REQUIRE(extent_fits(tokens, t->token_stride, heads, t->head_stride, head_size, elem),
            "%s: token_stride %lld and head_stride %lld for %lld tokens exceed the largest size",
            name, (long long)t->token_stride, (long long)t->head_stride, (long long)tokens);
    if (tokens == 0) return FOLIO_OK;
    REQUIRE(t->data != NULL, "%s: data is NULL", name);
    REQUIRE((uintptr_t)t->data % (uintptr_t)elem == 0, "%s: data is not aligned to %lld bytes",
            name, (long long)elem);
    return FOLIO_OK;
}

folio_status folioi_lse_resolve(const float *lse, int64_t *token_stride, int64_t *head_stride,
                                int64_t heads, int64_t tokens)
{
    if (*token_stride == 0) *token_stride = heads;
    if (*head_stride == 0) *head_stride = 1;
    REQUIRE((uintptr_t)lse % sizeof *lse == 0, "lse is not aligned to %zu bytes", sizeof *lse);
    REQUIRE(*token_stride > 0 && *head_stride > 0,
            "lse: strides are %lld and %lld (token, head); both must be positive",
            (long long)*token_stride, (long long)*head_stride);
    const int64_t dims[] = {tokens, heads}, strides[] = {*token_stride, *head_stride};
    REQUIRE(strides_are_apart(2, dims, strides, 1),
            "lse: strides %lld and %lld (token, head) make rows of %lld heads overlap",
            (long long)*token_stride, (long long)*head_stride, (long long)heads);
    REQUIRE(extent_fits(tokens, *token_stride, heads, *head_stride, 1, sizeof *lse),
            "lse: strides %lld and %lld for %lld tokens exceed the largest size",
            (long long)*token_stride, (long long)*head_stride, (long long)tokens);
    return FOLIO_OK;
}

folioi_span folioi_tensor_span(const folio_tensor *t, int64_t heads, int64_t head_size)
{
    return folioi_span_rows(t->data, (int64_t)folio_dtype_size(t->dtype), t->tokens,
                            t->token_stride, heads, t->head_stride, head_size);
}

folioi_span folioi_lse_span(const float *lse, int64_t token_stride, int64_t head_stride,
                            int64_t heads, int64_t tokens)
{
    return folioi_span_rows(lse, sizeof *lse, tokens, token_stride, heads, head_stride, 1);
}

folio_status folioi_check_apart(const folioi_place *places, int written, int n)
{
    for (int i = 0; i < written; i++)
        for (int k = i + 1; k < n; k++)
            REQUIRE(!folioi_spans_share(&places[i].span, &places[k].span),
                    "%s and %s share memory, or their rows interleave with different strides",
                    places[i].name, places[k].name);
    return FOLIO_OK;
}

bool folioi_tensors_same(const folio_tensor *a, const folio_tensor *b)
{
    return a->data == b->data && a->dtype == b->dtype && a->token_stride == b->token_stride &&
           a->head_stride == b->head_stride;
}

static folio_status scale_resolve(const folio_context *ctx, folio_dtype dtype, int32_t heads,
                                  const char *name, float *scale, const float **each)
{
    REQUIRE(isfinite(*scale) && *scale >= 0, "%s_scale is %g; it must be finite and positive", name,
            (double)*scale);
    REQUIRE(*each == NULL || *scale == 0, "%s_scale is %g and %s_head_scales is given: set one",
            name, (double)*scale, name);
    REQUIRE_ALIGNED(*each, "%s_head_scales", name);
    for (int32_t h = 0; *each != NULL && !ctx->backend->on_device && h < heads; h++)
        REQUIRE(isfinite((*each)[h]) && (*each)[h] > 0,
                "%s_head_scales[%d] is %g; it must be finite and positive", name, h,
                (double)(*each)[h]);
    if (!dtype_is_fp8(dtype)) *each = NULL;
    if (!dtype_is_fp8(dtype) || *scale == 0.0f) *scale = 1.0f;
    return FOLIO_OK;
}

folio_status folioi_scales_resolve(const folio_context *ctx, folio_dtype dtype, int32_t heads,
                                   bool v_in_k, float *k_scale, const float **k_head_scales,
                                   float *v_scale, const float **v_head_scales)
{
    TRY(scale_resolve(ctx, dtype, heads, "k", k_scale, k_head_scales));
    if (!v_in_k) return scale_resolve(ctx, dtype, heads, "v", v_scale, v_head_scales);
    REQUIRE(*v_scale == 0.0f, "v_scale is %g; with v_in_k it must be 0: k_scale holds for V too",
            (double)*v_scale);
    REQUIRE(*v_head_scales == NULL,
            "v_head_scales is given; with v_in_k k_head_scales holds for V too");
    *v_scale = *k_scale;
    *v_head_scales = *k_head_scales;
    return FOLIO_OK;
}

folio_status folioi_check_no_v(const folio_tensor *v)
{
    REQUIRE(v->data == NULL && v->tokens == 0,
            "v is given, %lld rows; with v_in_k V is a part of k, and v must be absent",
            (long long)v->tokens);
    return FOLIO_OK;
}

folio_status folioi_run_in(const folio_context *ctx, const folio_run *run, folio_run *out)
{
    folio_run none = {.struct_size = sizeof none};
    STRUCT_IN(*out, run != NULL ? run : &none, "folio_run");
    REQUIRE(out->stream == NULL || ctx->backend->on_device,
            "run: stream is set; host backends have no streams");
    return FOLIO_OK;
}
