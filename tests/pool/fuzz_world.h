/*
 * fuzz_world.h: the pools of test_pool_fuzz.c: sizes drawn from a seed, memory that is slow to come,
 * and what the events say each tier has.
 */
#ifndef FOLIO_FUZZ_WORLD_H
#define FOLIO_FUZZ_WORLD_H

#include "pool/generation_rig.h"
#include "pool/pool_rig.h"

enum {
    MAX_LEN = 200,
    MAX_SEQS = 10,
    GROUPS = 3,
    ENCODER = GROUPS, /* its cache */
    MAX_HAND = 20,
    MAX_LOOSE = 8,
    MAX_THREADS = 4,
    WIDTH = 8,
    KNOWN = 1 << 16
};

typedef struct fuzz_config {
    int64_t num_blocks, host_blocks, frames, window[GROUPS];
    int32_t block_size, num_layer_groups, layers[GROUPS + 1];
    folio_layout layout[GROUPS + 1];
    bool encoder, check;
    bool damage;   /* of the store's file */
    int hash_bits; /* 0: all */
    int num_threads;
} fuzz_config;

typedef struct known_block {
    uint64_t hash[2];
    int32_t place; /* tier and group, from 1; 0: no entry */
    bool there;
} known_block;

typedef struct fuzz_world {
    fuzz_config c;
    uint64_t seed;
    folio_context *ctx;
    folio_pool *pool;
    folio_kv_cache *caches[GROUPS + 1];
    char store[256];
    uint64_t weights;   /* other ones each time the prefix cache is forgotten */
    known_block *known; /* [KNOWN], by events; guarded by the pool's lock */
    int64_t num_known[3], event_faults;
} fuzz_world;

/* The pool's own thread is slowed down, so that others see its transfers under way. */
extern _Thread_local bool fuzz_is_caller;

fuzz_config fuzz_config_of(uint64_t seed);
bool fuzz_world_open(fuzz_world *w, const fuzz_config *c, uint64_t seed);
void fuzz_world_close(fuzz_world *w);
/* A pool of the world; the one before it is destroyed. */
bool fuzz_pool_open(fuzz_world *w);

#endif
