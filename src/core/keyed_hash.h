/* keyed_hash.h: BLAKE2b with a key: whoever does not know the key cannot make the hash of anything. */
#ifndef FOLIOI_KEYED_HASH_H
#define FOLIOI_KEYED_HASH_H

#include <stddef.h>

enum { FOLIOI_KEYED_HASH_BYTES = 32, FOLIOI_KEYED_HASH_MOST_KEY = 64 };

typedef struct folioi_bytes {
    const void *data;
    size_t size;
} folioi_bytes;

/** out[32] is the hash of n pieces, one after another: give lengths that vary, or put them into a piece. key: up to 64 bytes; none: plain BLAKE2b, which anybody can make. */
void folioi_keyed_hash(folioi_bytes key, const folioi_bytes *pieces, int n, unsigned char *out);

#endif
