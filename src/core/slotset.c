/* slotset.c: finds the first number that occurs twice. */
#include "core/slotset.h"

typedef struct {
    int64_t value;
    uint64_t generation;
} entry;

folio_status folioi_slotset_reserve(const folio_allocator *a, folioi_slotset *set, int64_t capacity)
{
    int64_t size = 16;
    while (size < 2 * capacity) size *= 2;
    if (size - 1 <= set->mask) return FOLIO_OK;
    TRY(folioi_array_reserve(a, &set->entries, size * (int64_t)sizeof(entry), "the slot check"));
    set->mask = size - 1;
    set->generation = 1;
    entry *entries = set->entries.data;
    for (int64_t i = 0; i < size; i++) entries[i].generation = 0;
    return FOLIO_OK;
}

void folioi_slotset_free(const folio_allocator *a, folioi_slotset *set)
{
    folioi_array_free(a, &set->entries);
    set->mask = 0;
}

void folioi_slotset_clear(folioi_slotset *set) { set->generation++; }

bool folioi_slotset_insert(folioi_slotset *set, int64_t value)
{
    entry *entries = set->entries.data;
    uint64_t hash = (uint64_t)value * 0x9e3779b97f4a7c15u;
    for (int64_t i = (int64_t)(hash >> 32) & set->mask;; i = (i + 1) & set->mask) {
        if (entries[i].generation != set->generation) {
            entries[i] = (entry){value, set->generation};
            return true;
        }
        if (entries[i].value == value) return false;
    }
}

folio_status folioi_slots_keep_last(const folio_allocator *a, int64_t *slots, int64_t n,
                                    bool *repeats)
{
    folioi_slotset set = {{0}, 0, 0};
    *repeats = false;
    if (n < 2) return FOLIO_OK;
    TRY(folioi_slotset_reserve(a, &set, n));
    for (int64_t k = 0; k < n; k++) {
        int64_t i = n - 1 - k;
        if (slots[i] < 0 || folioi_slotset_insert(&set, slots[i])) continue;
        slots[i] = -1;
        *repeats = true;
    }
    folioi_slotset_free(a, &set);
    return FOLIO_OK;
}
