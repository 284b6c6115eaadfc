/*
 * fuzz_calls.h: random calls on pools with all tiers while transfers are under way, against a model, with small and
 * awkward sizes; blocks held by hand, forgetting, a store that is opened again or damaged, keys that collide, several
 * threads. For test_pool_fuzz.c and the fuzz target pool.
 */
#ifndef FOLIO_FUZZ_CALLS_H
#define FOLIO_FUZZ_CALLS_H

#include "pool/fuzz_world.h"

/* How often the interesting things happened. */
typedef struct fuzz_totals {
    int64_t full, async, matched, shorter, forked, in, out, reads, evictions;
} fuzz_totals;

/* Where choices come from, in place of the seed: a number below n. For one thread. */
typedef struct fuzz_source {
    int64_t (*draw)(void *user, int64_t n);
    void *user;
} fuzz_source;

/* A world of these sizes, so many calls of each of its threads, and its end. source NULL: the seed draws. */
void fuzz_calls_run(const fuzz_config *c, uint64_t seed, int64_t num_ops, const fuzz_source *source,
                    fuzz_totals *sum);

#endif
