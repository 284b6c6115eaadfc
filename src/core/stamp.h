/*
 * stamp.h: counts the changes of an object for those who hold a copy of its data. A batch keeps a sequence's
 * stamp and the count at the time of the copy. So it knows when its copy of the block table is out of date, even
 * after the sequence was destroyed. Reading the count takes no lock.
 *
 * The stamp is the first member of the object. The object's memory is freed with the last reference.
 */
#ifndef FOLIOI_STAMP_H
#define FOLIOI_STAMP_H

#include "core/alloc.h"
#include "core/refs.h"

#include <stdatomic.h>

typedef struct folioi_stamp {
    folio_allocator allocator;
    int64_t bytes;    /* of the thing */
    folioi_refs refs; /* the thing itself, and everybody who has a copy */
    _Atomic uint64_t changes;
    _Atomic(const char *) last_call; /* what changed it last; a string for ever */
} folioi_stamp;

/** Of zeroed memory. */
static inline void stamp_init(folioi_stamp *stamp, const folio_allocator *a, int64_t bytes)
{
    stamp->allocator = *a;
    stamp->bytes = bytes;
    refs_init(&stamp->refs);
}

static inline void stamp_release(folioi_stamp *stamp)
{
    if (!refs_release(&stamp->refs)) return;
    folio_allocator a = stamp->allocator;
    folioi_free(&a, stamp, stamp->bytes);
}

/** By one thread at a time. */
static inline void stamp_change(folioi_stamp *stamp, const char *call)
{
    uint64_t changes = atomic_load_explicit(&stamp->changes, memory_order_relaxed);
    atomic_store_explicit(&stamp->last_call, call, memory_order_relaxed);
    atomic_store_explicit(&stamp->changes, changes + 1, memory_order_release);
}

static inline uint64_t stamp_changes(const folioi_stamp *stamp)
{
    return atomic_load_explicit(&stamp->changes, memory_order_acquire);
}

#endif
