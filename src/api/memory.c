/* memory.c: memory of a context: host memory or its device's. */
#include "core/context.h"
#include "core/tensor.h"

static folio_status check_kind(folio_memory_kind kind)
{
    REQUIRE(kind == FOLIO_MEMORY_DEVICE || kind == FOLIO_MEMORY_HOST, "memory: kind %d is unknown",
            (int)kind);
    return FOLIO_OK;
}

folio_status folio_memory_create(folio_context *ctx, folio_memory_kind kind, size_t bytes,
                                 void **out)
{
    REQUIRE(out != NULL, "folio_memory_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_memory_create: ctx is NULL");
    TRY(check_kind(kind));
    REQUIRE(bytes > 0 && bytes <= INT64_MAX, "memory: bytes is %zu, outside [1, %lld]", bytes,
            (long long)INT64_MAX);
    return ctx->backend->alloc(ctx, kind, bytes, "folio_memory_create", out);
}

void folio_memory_destroy(folio_context *ctx, folio_memory_kind kind, void *memory, size_t bytes)
{
    if (ctx == NULL || memory == NULL) return;
    ctx->backend->free(ctx, kind, memory, bytes);
}

folio_status folio_memory_copy(folio_context *ctx, void *to, const void *from, size_t bytes,
                               const folio_run *run)
{
    folio_run r;
    REQUIRE(ctx != NULL, "folio_memory_copy: ctx is NULL");
    TRY(folioi_run_in(ctx, run, &r));
    if (bytes == 0) return FOLIO_OK;
    REQUIRE(to != NULL && from != NULL, "folio_memory_copy: %s is NULL",
            to == NULL ? "to" : "from");
    return ctx->backend->copy(ctx, to, from, bytes, r.stream);
}

folio_status folio_memory_fill(folio_context *ctx, void *to, int value, size_t bytes,
                               const folio_run *run)
{
    folio_run r;
    REQUIRE(ctx != NULL, "folio_memory_fill: ctx is NULL");
    TRY(folioi_run_in(ctx, run, &r));
    REQUIRE(value >= 0 && value <= 255, "folio_memory_fill: value %d is outside [0, 255]", value);
    if (bytes == 0) return FOLIO_OK;
    REQUIRE(to != NULL, "folio_memory_fill: to is NULL");
    return ctx->backend->fill(ctx, to, value, bytes, r.stream);
}

folio_status folio_run_wait(folio_context *ctx, const folio_run *run)
{
    folio_run r;
    REQUIRE(ctx != NULL, "folio_run_wait: ctx is NULL");
    TRY(folioi_run_in(ctx, run, &r));
    return ctx->backend->wait(ctx, r.stream);
}
