/*
 * alloc.h: memory through the context's allocator, 64-byte aligned; and `arena`, a counting allocator:
 * the same carving code first sizes a block of memory (base NULL), then fills it.
 */
#ifndef FOLIOI_ALLOC_H
#define FOLIOI_ALLOC_H

#include "core/status.h"

#define FOLIOI_ALIGN 64

folio_allocator folioi_allocator_default(void);

/** Zeroed memory of at least one byte; *out NULL and ERR_MEMORY when there is none. */
folio_status folioi_alloc(const folio_allocator *a, int64_t size, const char *what, void **out);
/** The same, but not zeroed: nobody has written to its pages yet. */
folio_status folioi_alloc_untouched(const folio_allocator *a, int64_t size, const char *what,
                                    void **out);
void folioi_free(const folio_allocator *a, void *ptr, int64_t size);

/** An array that grows by doubling and keeps its contents; zeroed past them. */
typedef struct folioi_array {
    void *data;
    int64_t bytes;
} folioi_array;

folio_status folioi_array_reserve(const folio_allocator *a, folioi_array *array, int64_t bytes,
                                  const char *what);
void folioi_array_free(const folio_allocator *a, folioi_array *array);

typedef struct folioi_arena {
    char *base; /* NULL: count only */
    int64_t used;
} folioi_arena;

static inline void *arena_take(folioi_arena *arena, int64_t bytes)
{
    void *p = arena->base ? arena->base + arena->used : (void *)0;
    arena->used += (bytes + FOLIOI_ALIGN - 1) / FOLIOI_ALIGN * FOLIOI_ALIGN;
    return p;
}

#endif
