/* keyed_hash.c: BLAKE2b of libb2, compiled into this file: decision 23. */
#include "core/keyed_hash.h"

#include "vendor/blake2/blake2.h"

#include <string.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
/* Declared first, so that none of the names is global in the static library. */
static int blake2b_init_folioi(blake2b_state *s, size_t outlen);
static int blake2b_init_param_folioi(blake2b_state *s, const blake2b_param *p);
static int blake2b_init_key_folioi(blake2b_state *s, size_t outlen, const void *key, size_t keylen);
static int blake2b_update_folioi(blake2b_state *s, const uint8_t *in, size_t inlen);
static int blake2b_final_folioi(blake2b_state *s, uint8_t *out, size_t outlen);
static int blake2b_folioi(uint8_t *out, const void *in, const void *key, size_t outlen,
                          size_t inlen, size_t keylen);
#include "vendor/blake2/blake2b-ref.c"
#pragma GCC diagnostic pop

static __attribute__((noinline)) void hash(folioi_bytes key, const folioi_bytes *pieces, int n,
                                           unsigned char *out)
{
    blake2b_state state;
    if (key.size == 0) (void)blake2b_init(&state, FOLIOI_KEYED_HASH_BYTES);
    else (void)blake2b_init_key(&state, FOLIOI_KEYED_HASH_BYTES, key.data, key.size);
    for (int i = 0; i < n; i++) (void)blake2b_update(&state, pieces[i].data, pieces[i].size);
    (void)blake2b_final(&state, out, FOLIOI_KEYED_HASH_BYTES);
    secure_zero_memory(&state, sizeof state);
}

/* blake2b_final leaves the hash on the stack, and some hashes are keys. Covers all that hash() had there. */
static __attribute__((noinline)) void clear_stack(void)
{
    unsigned char used[2048];
    explicit_bzero(used, sizeof used);
}

void folioi_keyed_hash(folioi_bytes key, const folioi_bytes *pieces, int n, unsigned char *out)
{
    hash(key, pieces, n, out);
    clear_stack();
}
