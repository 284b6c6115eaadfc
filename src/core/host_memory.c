/* host_memory.c: the memory entries of host backends. */
#include "core/host_memory.h"

#include "core/alloc.h"
#include "core/context.h"

#include <string.h>

folio_status folioi_host_alloc(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                               const char *what, void **out)
{
    (void)kind;
    return folioi_alloc_untouched(&ctx->allocator, (int64_t)bytes, what, out);
}

void folioi_host_free(const folio_context *ctx, folio_memory_kind kind, void *memory, size_t bytes)
{
    (void)kind;
    folioi_free(&ctx->allocator, memory, (int64_t)bytes);
}

folio_status folioi_host_copy(const folio_context *ctx, void *to, const void *from, size_t bytes,
                              void *stream)
{
    (void)ctx, (void)stream;
    memmove(to, from, bytes);
    return FOLIO_OK;
}

folio_status folioi_host_fill(const folio_context *ctx, void *to, int value, size_t bytes,
                              void *stream)
{
    (void)ctx, (void)stream;
    memset(to, value, bytes);
    return FOLIO_OK;
}

folio_status folioi_host_wait(const folio_context *ctx, void *stream)
{
    (void)ctx, (void)stream;
    return FOLIO_OK;
}
