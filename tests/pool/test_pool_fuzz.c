/*
 * test_pool_fuzz.c: random calls on pools (fuzz_calls.h), by seeds: plain ones, with keys that collide, with a store that
 * is damaged, and from several threads.
 */
#include "pool/fuzz_calls.h"

#include <stdlib.h>

typedef enum variant { PLAIN, COLLIDING, DAMAGED, THREADED } variant;

/* Over all seeds of a test, each of the interesting things happened. */
static bool all_happened(variant how, const fuzz_totals *t)
{
    return t->full > 0 && t->async > 0 && t->matched > 0 && t->forked > 0 && t->in > 0 &&
           t->out > 0 && t->reads > 0 && t->evictions > 0 && (how != DAMAGED || t->shorter > 0);
}

/* Seeds first .. first + count - 1, or the one of the environment. What happens depends also on when blocks
 * arrive: where something interesting has not happened by then, more seeds follow, up to ten times as many. */
static void run_seeds(variant how, uint64_t first, int count, int64_t num_ops)
{
    fuzz_totals t = {0};
    const char *only = getenv("FOLIO_FUZZ_SEED");
    int most = only ? 1 : 10 * count;
    for (int i = 0; i < most && test_failures() == 0 && (i < count || !all_happened(how, &t));
         i++) {
        uint64_t seed = only ? strtoull(only, NULL, 10) : first + (uint64_t)i;
        fuzz_config c = fuzz_config_of(seed);
        if (how == COLLIDING) c.hash_bits = 1 + (int)(seed % 4);
        if (how == THREADED) c.num_threads = 2 + (int)(seed % (MAX_THREADS - 1));
        c.damage = how == DAMAGED;
        fuzz_calls_run(&c, seed, num_ops, NULL, &t);
    }
    CHECK(only != NULL || test_failures() > 0 || all_happened(how, &t));
}

TEST(pool_fuzz, calls_while_blocks_move) { run_seeds(PLAIN, 1, 24, 1500); }
TEST(pool_fuzz, keys_collide) { run_seeds(COLLIDING, 101, 10, 1200); }
TEST(pool_fuzz, the_store_is_damaged) { run_seeds(DAMAGED, 201, 16, 1200); }
TEST(pool_fuzz, several_callers) { run_seeds(THREADED, 301, 8, 800); }

LONG_TEST(pool_fuzz, many_calls_while_blocks_move) { run_seeds(PLAIN, 10001, 400, 4000); }
LONG_TEST(pool_fuzz, many_keys_collide) { run_seeds(COLLIDING, 20001, 150, 3000); }
LONG_TEST(pool_fuzz, the_store_is_damaged_often) { run_seeds(DAMAGED, 30001, 150, 3000); }
LONG_TEST(pool_fuzz, several_callers_for_long) { run_seeds(THREADED, 40001, 100, 2500); }
