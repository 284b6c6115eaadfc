/*
 * slotset.h: a set of slot or block numbers in memory that was reserved before, to find the first one
 * that comes twice. Open addressing over at least twice the capacity; emptied by a generation number.
 */
#ifndef FOLIOI_SLOTSET_H
#define FOLIOI_SLOTSET_H

#include "core/alloc.h"

#include <stdbool.h>

typedef struct folioi_slotset {
    folioi_array entries;
    int64_t mask;
    uint64_t generation;
} folioi_slotset;

folio_status folioi_slotset_reserve(const folio_allocator *a, folioi_slotset *set,
                                    int64_t capacity);
void folioi_slotset_free(const folio_allocator *a, folioi_slotset *set);
void folioi_slotset_clear(folioi_slotset *set);
/** False when the value was there. At most `capacity` values between clears. */
bool folioi_slotset_insert(folioi_slotset *set, int64_t value);

/** Slots become -1 where a later token has the same: what is left is distinct. *repeats: were there any? */
folio_status folioi_slots_keep_last(const folio_allocator *a, int64_t *slots, int64_t n,
                                    bool *repeats);

#endif
