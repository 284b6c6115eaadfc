/* hash.h: xxHash, inlined from its system header: nothing is linked and no symbol is exported. */
#ifndef FOLIOI_HASH_H
#define FOLIOI_HASH_H

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdint.h>

/** A 128-bit key. All zero: none. */
typedef struct folioi_key {
    uint64_t word[2];
} folioi_key;

static inline int key_equal(folioi_key a, folioi_key b)
{
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

#endif
