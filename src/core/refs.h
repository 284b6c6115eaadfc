/*
 * refs.h: how long an object lives. It begins with one reference, its handle; everything that points to it
 * has one more. Its public destroy drops a reference and takes it apart with the last one, so that handles
 * may be destroyed in any order.
 */
#ifndef FOLIOI_REFS_H
#define FOLIOI_REFS_H

#include <stdatomic.h>
#include <stdbool.h>

typedef struct folioi_refs {
    atomic_int count;
} folioi_refs;

static inline void refs_init(folioi_refs *refs) { atomic_init(&refs->count, 1); }

static inline void refs_retain(folioi_refs *refs)
{
    atomic_fetch_add_explicit(&refs->count, 1, memory_order_relaxed);
}

/** True for the last one: what the others did to the object is then seen. */
static inline bool refs_release(folioi_refs *refs)
{
    return atomic_fetch_sub_explicit(&refs->count, 1, memory_order_acq_rel) == 1;
}

#endif
