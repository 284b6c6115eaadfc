/* stamp.c: stamps made and given back. */
#include "core/stamp.h"

folio_status folioi_stamp_create(const folio_allocator *a, folioi_stamp **out)
{
    void *memory;
    TRY(folioi_alloc(a, sizeof(folioi_stamp), "a stamp", &memory));
    folioi_stamp *stamp = memory;
    stamp->allocator = *a;
    refs_init(&stamp->refs);
    *out = stamp;
    return FOLIO_OK;
}

void folioi_stamp_release(folioi_stamp *stamp)
{
    if (stamp == NULL || !refs_release(&stamp->refs)) return;
    folio_allocator a = stamp->allocator;
    folioi_free(&a, stamp, sizeof *stamp);
}
