/* attention.c: layer geometries: their description checked and completed, created and destroyed. */
#include "plan/attention.h"

#include "core/context.h"
#include "core/dtype.h"
#include "plan/judge.h"

#include <math.h>

#define MAX_HEADS 65536               /* plans multiply it with rows and keys */
#define MAX_WINDOW ((int64_t)1 << 42) /* wider than any two positions are apart */

static folio_status check_desc(const folio_attention_desc *d)
{
    REQUIRE(d->num_heads >= 1 && d->num_heads <= MAX_HEADS,
            "attention: num_heads is %d, outside [1, %d]", d->num_heads, MAX_HEADS);
    REQUIRE(d->num_kv_heads >= 1 && d->num_heads % d->num_kv_heads == 0,
            "attention: num_heads %d is not a multiple of num_kv_heads %d", d->num_heads,
            d->num_kv_heads);
    REQUIRE(d->k_head_size >= 8 && d->k_head_size % 8 == 0,
            "attention: k_head_size is %d, not a positive multiple of 8", d->k_head_size);
    REQUIRE(d->v_head_size >= 8 && d->v_head_size % 8 == 0,
            "attention: v_head_size is %d, not a positive multiple of 8", d->v_head_size);
    REQUIRE(d->v_in_k == 0 || d->v_in_k == 1, "attention: v_in_k is %d, not 0 or 1", d->v_in_k);
    REQUIRE(!d->v_in_k || d->v_head_size <= d->k_head_size,
            "attention: v_in_k: v_head_size %d is above k_head_size %d, of which V is a part",
            d->v_head_size, d->k_head_size);
    REQUIRE(d->dtype != 0, "attention: dtype is 0; it must be given: f32, f16 or bf16");
    REQUIRE(dtype_is_query(d->dtype), "attention: dtype %d (%s) is not one of f32, f16, bf16",
            (int)d->dtype, folio_dtype_name(d->dtype));
    REQUIRE(dtype_is_kv(d->kv_dtype), "attention: kv_dtype %d (%s) is not a type of caches",
            (int)d->kv_dtype, folio_dtype_name(d->kv_dtype));
    REQUIRE(isfinite(d->scale), "attention: scale is %g; it must be finite", (double)d->scale);
    REQUIRE(isfinite(d->soft_cap) && d->soft_cap >= 0,
            "attention: soft_cap is %g; it must be finite and positive", (double)d->soft_cap);
    REQUIRE(d->window_left >= -1, "attention: window_left is %lld, below -1",
            (long long)d->window_left);
    REQUIRE(d->window_right >= -1, "attention: window_right is %lld, below -1",
            (long long)d->window_right);
    return FOLIO_OK;
}

folio_status folioi_attention_resolve(const folio_attention_desc *desc, folio_attention_desc *out)
{
    STRUCT_IN(*out, desc, "folio_attention_desc");
    out->struct_size = sizeof *out;
    if (out->num_kv_heads == 0) out->num_kv_heads = out->num_heads;
    if (out->v_head_size == 0) out->v_head_size = out->k_head_size;
    if (out->kv_dtype == 0) out->kv_dtype = out->dtype;
    if (!out->windowed) out->window_left = out->window_right = -1;
    TRY(check_desc(out));
    if (out->window_left > MAX_WINDOW) out->window_left = MAX_WINDOW;
    if (out->window_right > MAX_WINDOW) out->window_right = MAX_WINDOW;
    if (out->scale == 0.0f) out->scale = (float)(1.0 / sqrt((double)out->k_head_size));
    return FOLIO_OK;
}

folio_status folio_attention_create(folio_context *ctx, const folio_attention_desc *desc,
                                    folio_attention **out)
{
    REQUIRE(out != NULL, "folio_attention_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_attention_create: ctx is NULL");
    folio_attention_desc d;
    TRY(folioi_attention_resolve(desc, &d));
    char text[512] = "";
    folioi_reasons reasons = {.text = text, .size = sizeof text};
    folioi_backend_judge(ctx->backend, &(folioi_request){&d, 0, NULL}, &reasons);
    if (reasons.count > 0) FAIL(FOLIO_ERR_UNSUPPORTED, "%s", text);
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_attention), "an attention", &memory));
    folio_attention *attention = memory;
    refs_init(&attention->refs);
    refs_retain(&ctx->refs);
    attention->ctx = ctx;
    attention->desc = d;
    *out = attention;
    return FOLIO_OK;
}

void folio_attention_destroy(folio_attention *attention)
{
    if (attention == NULL || !refs_release(&attention->refs)) return;
    folio_context *ctx = attention->ctx;
    folioi_free(&ctx->allocator, attention, sizeof *attention);
    folio_context_destroy(ctx);
}
