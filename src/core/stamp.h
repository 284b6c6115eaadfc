/*
 * stamp.h: counts the changes of a thing for those who took a copy of it. A batch keeps a sequence's
 * stamp and the count it saw: so it knows that its copy of the block table is old, also when the
 * sequence is gone. Looking takes no lock.
 */
#ifndef FOLIOI_STAMP_H
#define FOLIOI_STAMP_H

#include "core/alloc.h"
#include "core/refs.h"

#include <stdatomic.h>

typedef struct folioi_stamp {
    folio_allocator allocator;
    folioi_refs refs; /* the thing, and everybody who has a copy */
    _Atomic uint64_t changes;
    _Atomic(const char *) last_call; /* what changed it last; a string for ever */
} folioi_stamp;

folio_status folioi_stamp_create(const folio_allocator *a, folioi_stamp **out);
/** One reference less; NULL is taken. */
void folioi_stamp_release(folioi_stamp *stamp);

static inline void stamp_retain(folioi_stamp *stamp) { refs_retain(&stamp->refs); }

static inline void stamp_change(folioi_stamp *stamp, const char *call)
{
    atomic_store_explicit(&stamp->last_call, call, memory_order_relaxed);
    atomic_fetch_add(&stamp->changes, 1);
}

static inline uint64_t stamp_changes(const folioi_stamp *stamp)
{
    return atomic_load_explicit(&stamp->changes, memory_order_acquire);
}

#endif
