/*
 * test_hold.c: how long one call may hold a pool's lock: the blocks that it visits are bounded, whatever the prompt, the
 * sequence's length and the keys are.
 */
#include "cache/pool.h"
#include "pool/pool_rig.h"
#include "pool/store_rig.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { LONG = 100000, BLOCKS = LONG + 16 };

static int32_t *counting(int64_t n)
{
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    if (ids == NULL) abort();
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)i;
    return ids;
}

static void ignore(void *user, const folio_cache_event *event) { (void)user, (void)event; }

/* A prefix that is longer than a match may be: its beginning. */
POOL_TEST(hold, a_match_ends, .num_blocks = BLOCKS, .block_size = 1, .on_event = ignore)
{
    int32_t *ids = counting(LONG);
    folio_sequence *s = pool_sequence(pool, 0), *again = pool_sequence(pool, 0);
    pool_grow(s, ids, LONG);
    CHECK_INT(pool_stats(pool).num_entries, LONG);
    folio_tokens tokens = pool_tokens(ids, LONG);
    int64_t matched = 0;
    CHECK_OK(folio_sequence_match(again, &tokens, &matched, NULL));
    CHECK_INT(matched, 65536);
    CHECK_OK(folio_pool_check(pool));
    folio_sequence_destroy(s);
    CHECK_INT(pool_stats(pool).num_used, 65536);
    folio_sequence_destroy(again);
    CHECK_INT(pool_stats(pool).num_cached, LONG);
    free(ids);
}

/* --------------------------------------------------------------------------- what others may see */

static struct {
    int64_t entries, used; /* times that some were there, not none and not all */
} seen;

/* In place of the pool's check: called before every opening of the lock. */
static folio_status look(folio_pool *pool)
{
    int64_t entries = pool->index.num_nodes, used = pool->device.num_used;
    seen.entries += entries > 0 && entries < LONG;
    seen.used += used > 0 && used < LONG;
    return FOLIO_OK;
}

/* Long calls let others in: every 4,096 blocks. */
POOL_TEST(hold, long_calls_let_others_in, .num_blocks = BLOCKS, .block_size = 1, .on_event = ignore)
{
    enum { OPENINGS = (LONG - 1) / 4096 };
    int32_t *ids = counting(LONG);
    folio_tokens tokens = pool_tokens(ids, LONG);
    pool->check = look;
    for (int how = 0; how < 3; how++) {
        folio_sequence *s = pool_sequence(pool, 0);
        CHECK_OK(folio_sequence_reserve(s, LONG, 0, NULL));
        seen.entries = seen.used = 0;
        CHECK_OK(folio_sequence_commit(s, &tokens));
        CHECK_INT(seen.entries, OPENINGS);
        CHECK_INT(pool_stats(pool).num_entries, LONG);
        if (how == 0) CHECK_OK(folio_sequence_truncate(s, 0));
        if (how == 1) CHECK_OK(folio_sequence_preempt(s, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
        folio_sequence_destroy(s);
        CHECK_INT(seen.used, OPENINGS);
        CHECK_INT(pool_stats(pool).num_cached, LONG);
        CHECK_OK(folio_pool_forget(pool));
    }
    free(ids);
}

/* The thread that waits for the lock has it next, whatever the scheduler does. */
static void *wait_in_line(void *arg)
{
    folio_pool *pool = arg;
    pool_lock(pool);
    pool->watermark = 1;
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

POOL_TEST(hold, who_waits_is_next, .num_blocks = 4, .block_size = 1)
{
    pthread_t thread;
    pool_lock(pool);
    REQUIRE_TEST(pthread_create(&thread, NULL, wait_in_line, pool) == 0);
    while (pthread_mutex_trylock(&pool->next) == 0) {
        pthread_mutex_unlock(&pool->next);
        sched_yield();
    }
    CHECK_OK(folioi_pool_give_way(pool));
    CHECK_INT(pool->watermark, 1);
    pthread_mutex_unlock(&pool->lock);
    pthread_join(thread, NULL);
}

/* ------------------------------------------------------------------------- a forget in between */

typedef struct {
    folio_pool *pool;
    atomic_bool begun, quit;
} watcher;

/* A forget that comes in the middle of a commit: nothing from before it is found after it. */
static void *forget_often(void *arg)
{
    watcher *w = arg;
    while (!atomic_load(&w->quit)) {
        CHECK_OK(folio_pool_forget(w->pool));
        atomic_store(&w->begun, true);
    }
    return NULL;
}

POOL_TEST(hold, a_forget_in_the_middle_of_a_commit, .num_blocks = BLOCKS, .block_size = 1,
          .on_event = ignore)
{
    int32_t *ids = counting(LONG);
    for (int round = 0; round < 10; round++) {
        watcher w = {.pool = pool};
        pthread_t thread;
        folio_sequence *s = pool_sequence(pool, 0);
        CHECK_OK(folio_sequence_reserve(s, LONG, 0, NULL));
        REQUIRE_TEST(pthread_create(&thread, NULL, forget_often, &w) == 0);
        while (!atomic_load(&w.begun)) sched_yield();
        folio_tokens tokens = pool_tokens(ids, LONG);
        CHECK_OK(folio_sequence_commit(s, &tokens));
        atomic_store(&w.quit, true);
        pthread_join(thread, NULL);
        CHECK_OK(folio_pool_check(pool));
        CHECK_OK(folio_pool_forget(pool));
        CHECK_INT(pool_matches(pool, 0, ids, LONG), 0);
        folio_sequence_destroy(s);
        CHECK_INT(pool_stats(pool).num_free, BLOCKS);
        CHECK_INT(pool_stats(pool).num_entries, 0);
    }
    free(ids);
}

/* ------------------------------------------------------------------------------- keys that collide */

/* With one bit a key there are two chains: they take 64 blocks, the others are not cached, and all goes on. */
POOL_TEST(hold, a_chain_is_bounded, .num_blocks = 512, .block_size = 2, .flags = FOLIO_POOL_CHECK,
          .on_event = ignore)
{
    folioi_pool_set_hash_bits(pool, 1);
    folio_sequence *s[100];
    int64_t found = 0;
    for (int i = 0; i < COUNT_OF(s); i++) {
        const int32_t ids[6] = {3 * i, 1, 3 * i + 1, 1, 3 * i + 2, 1};
        s[i] = pool_sequence(pool, 0);
        pool_grow(s[i], ids, 6);
        CHECK_INT(pool_info(s[i]).committed_len, 6);
    }
    int64_t entries = pool_stats(pool).num_entries;
    CHECK_MSG(entries >= 32 && entries <= 64, "%lld entries", (long long)entries);
    for (int i = 0; i < COUNT_OF(s); i++) {
        const int32_t ids[6] = {3 * i, 1, 3 * i + 1, 1, 3 * i + 2, 1};
        found += pool_matches(pool, 0, ids, 6) / 2;
    }
    CHECK_INT(found, entries);
    /* One that did not enter is extended, forked and goes. */
    folio_sequence *fork = pool_fork(s[99]);
    const int32_t ids[8] = {297, 1, 298, 1, 299, 1, 5, 5};
    pool_grow(s[99], ids, 8);
    pool_grow(fork, ids, 8);
    folio_sequence_destroy(fork);
    for (int i = 0; i < COUNT_OF(s); i++) folio_sequence_destroy(s[i]);
    CHECK_INT(pool_stats(pool).num_cached, entries);
    /* Where others left, there is room again. */
    CHECK_OK(folio_pool_forget(pool));
    folio_sequence *later = pool_sequence(pool, 0);
    pool_grow(later, ids, 8);
    CHECK_INT(pool_stats(pool).num_entries, 4);
    folio_sequence_destroy(later);
}

/* Keys of one chain in a store's table, which who knows hash_key could search for, lie apart in another file's. */
NEW_STORE_TEST(hold, a_chain_of_a_store_is_its_own, 4)
{
    enum { BITS = 10, KEYS = 24 };
    folioi_key chain[KEYS];
    int n = 0, still = 0;
    CHECK_OK(srig_open(rig));
    for (uint64_t i = 0; n < KEYS && i < (uint64_t)KEYS << (BITS + 3); i++) {
        folioi_key key = {{support_bits(1, i), support_bits(2, i)}};
        uint64_t bucket = folioi_store_hash(rig->store, key, 0, CACHED) & ((1 << BITS) - 1);
        if (bucket == 7) chain[n++] = key;
    }
    REQUIRE_TEST(n == KEYS);
    srig_close(rig);
    CHECK(remove(rig->path) == 0);
    CHECK_OK(srig_open(rig));
    uint64_t first = folioi_store_hash(rig->store, chain[0], 0, CACHED) & ((1 << BITS) - 1);
    for (int i = 1; i < KEYS; i++)
        still += (folioi_store_hash(rig->store, chain[i], 0, CACHED) & ((1 << BITS) - 1)) == first;
    CHECK_MSG(still < 4, "%d of %d still in one chain", still, KEYS - 1);
    srig_close(rig);
}
