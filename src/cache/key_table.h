/*
 * key_table.h: finds the entries of an array by a hash: buckets, each a chain through its entries. The
 * prefix index and the store have one each; what an entry is, and which one a key means, they know.
 */
#ifndef FOLIOI_KEY_TABLE_H
#define FOLIOI_KEY_TABLE_H

#include "cache/blocks.h"

typedef struct folioi_key_table {
    int32_t *buckets; /* [mask + 1]: the first entry of each; NONE */
    uint64_t mask;
    char *chain; /* entry 0's place for the number of the next one in its bucket */
    int64_t stride;
} folioi_key_table;

/** No entries; buckets has room for num, a power of two. */
static inline void table_init(folioi_key_table *t, int32_t *buckets, int64_t num)
{
    t->buckets = buckets;
    t->mask = (uint64_t)num - 1;
    for (int64_t i = 0; i < num; i++) buckets[i] = NONE;
}

static inline int32_t *table_bucket(const folioi_key_table *t, uint64_t hash)
{
    return &t->buckets[hash & t->mask];
}

static inline int32_t *table_next(const folioi_key_table *t, int32_t entry)
{
    return (int32_t *)(t->chain + entry * t->stride);
}

static inline void table_add(folioi_key_table *t, uint64_t hash, int32_t entry)
{
    int32_t *bucket = table_bucket(t, hash);
    *table_next(t, entry) = *bucket;
    *bucket = entry;
}

static inline void table_remove(folioi_key_table *t, uint64_t hash, int32_t entry)
{
    int32_t *at = table_bucket(t, hash);
    while (*at != entry) at = table_next(t, *at);
    *at = *table_next(t, entry);
}

#endif
