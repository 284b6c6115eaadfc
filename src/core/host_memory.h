/* host_memory.h: the memory entries of host backends: the allocator's memory, moved at once. */
#ifndef FOLIOI_HOST_MEMORY_H
#define FOLIOI_HOST_MEMORY_H

#include "core/status.h"

folio_status folioi_host_alloc(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                               const char *what, void **out);
void folioi_host_free(const folio_context *ctx, folio_memory_kind kind, void *memory, size_t bytes);
folio_status folioi_host_copy(const folio_context *ctx, void *to, const void *from, size_t bytes,
                              void *stream);
folio_status folioi_host_fill(const folio_context *ctx, void *to, int value, size_t bytes,
                              void *stream);
folio_status folioi_host_wait(const folio_context *ctx, void *stream);

#endif
