/* attention.c: creates and destroys layer geometries. */
#include "plan/call.h"
#include "plan/judge.h"

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
