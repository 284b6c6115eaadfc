/*
 * test_pool_rules.c: rules of the KV memory, each in the smallest case that would break it: who may
 * let go of a block, leaves before parents in every tier and under way, room that is promised once,
 * collisions of keys on disk, disk events in order. Transfers are held under way by a gate: an
 * allocator at which the pool's own thread waits.
 */
#include "pool/generation_rig.h"
#include "pool/pool_rig.h"

#include "cache/pool.h" /* folioi_pool_set_hash_bits */

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------------ gate */

typedef struct gate {
    pthread_t home; /* the test's thread passes always */
    pthread_mutex_t lock;
    pthread_cond_t moved;
    bool shut, broken; /* broken: there is no memory for others */
    int64_t passes;    /* so many may pass a shut gate */
    int waiting;
} gate;

static void *gate_alloc(void *user, size_t size, size_t align)
{
    gate *g = user;
    bool broken = false;
    if (!pthread_equal(pthread_self(), g->home)) {
        pthread_mutex_lock(&g->lock);
        g->waiting++;
        while (g->shut && g->passes == 0) pthread_cond_wait(&g->moved, &g->lock);
        g->waiting--;
        if (g->passes > 0) g->passes--;
        broken = g->broken;
        pthread_mutex_unlock(&g->lock);
    }
    return broken ? NULL : aligned_alloc(align, (size + align - 1) / align * align);
}

static void gate_free(void *user, void *ptr, size_t size)
{
    (void)user;
    (void)size;
    free(ptr);
}

static void gate_set(gate *g, bool shut, bool broken, int64_t passes)
{
    pthread_mutex_lock(&g->lock);
    g->shut = shut;
    g->broken = broken;
    g->passes = passes;
    pthread_cond_broadcast(&g->moved);
    pthread_mutex_unlock(&g->lock);
}

/* Waits until the transfer stands at the gate; false: it has ended without. */
static bool gate_stands(gate *g, const folio_transfer *t)
{
    for (;;) {
        pthread_mutex_lock(&g->lock);
        bool there = g->waiting > 0 && g->passes == 0;
        pthread_mutex_unlock(&g->lock);
        if (there || folio_transfer_is_done(t)) return there;
        sched_yield();
    }
}

/* ------------------------------------------------------------------------------------------ rig */

enum { BS = 4, WIDTH = 8, FRAME_BYTES = 4096 };

/* A pool of one group with a cache of f32 rows, host blocks and a store behind it. */
typedef struct rules {
    pool_rig r;
    folio_pool *pool;
    gate gate;
    char store[256];
} rules;

static bool rules_pool(rules *w, folio_context *ctx, int64_t blocks, int64_t host, int64_t frames)
{
    folio_kv_cache_desc cache = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = blocks, .num_layers = 1, .block_size = BS,
        .num_kv_heads = 1, .k_head_size = WIDTH, .dtype = FOLIO_F32, .layout = FOLIO_LAYOUT_NHD);
    folio_layer_group group = {0};
    CHECK_OK(folio_kv_cache_create(ctx, &cache, &group.cache));
    kit_poison_cache(group.cache); /* nothing here writes K and V, and blocks go to the file */
    if (!pool_rig_open_on(&w->r, ctx,
                          FOLIO_WITH(folio_pool_desc, .num_blocks = blocks, .block_size = BS,
                                     .layer_groups = &group, .flags = FOLIO_POOL_CHECK,
                                     .hash_key = 42, .host_blocks = host,
                                     .store_path = frames > 0 ? w->store : NULL,
                                     .store_bytes = (frames + 1) * FRAME_BYTES)))
        return false;
    w->r.caches[0] = group.cache;
    w->pool = w->r.pool;
    CHECK_INT(pool_stats(w->pool).store_frames, frames);
    return true;
}

static bool rules_open(rules *w, int64_t blocks, int64_t host, int64_t frames)
{
    *w = (rules){.gate = {.home = pthread_self()}};
    pthread_mutex_init(&w->gate.lock, NULL);
    pthread_cond_init(&w->gate.moved, NULL);
    gen_store_path(w->store, sizeof w->store);
    folio_allocator memory = {gate_alloc, gate_free, &w->gate};
    folio_context *ctx = support_context("reference", 1, &memory);
    return ctx != NULL && rules_pool(w, ctx, blocks, host, frames);
}

static void rules_close(rules *w)
{
    gate_set(&w->gate, false, false, 0);
    pool_rig_close(&w->r);
    unlink(w->store);
    pthread_cond_destroy(&w->gate.moved);
    pthread_mutex_destroy(&w->gate.lock);
}

/* Prompts that differ from their first token on. */
static const int32_t *prompt(int number) { return pool_counting_ids() + 100 * number; }

/* A sequence with so many blocks of a prompt; one that has left them in the cache. */
static folio_sequence *with(rules *w, int number, int64_t blocks)
{
    folio_sequence *s = pool_sequence(w->pool, 0);
    pool_grow(s, prompt(number), blocks * BS);
    return s;
}

static void leave(rules *w, int number, int64_t blocks)
{
    folio_sequence_destroy(with(w, number, blocks));
}

/* Blocks of a prompt that a match finds. */
static int64_t found(rules *w, int number, int64_t blocks)
{
    return pool_matches(w->pool, 0, prompt(number), blocks * BS) / BS;
}

static int64_t lower(rules *w, folio_tier tier, int64_t max_blocks)
{
    int64_t n = -1;
    CHECK_OK(folio_pool_swap_out(w->pool, tier, max_blocks, NULL, &n, NULL));
    return n;
}

/* The device's cached blocks are taken back; what is below stays there. */
static void empty_device(rules *w)
{
    int32_t blocks[64];
    int64_t n = pool_stats(w->pool).num_blocks - pool_stats(w->pool).num_used;
    CHECK_OK(folio_pool_alloc(w->pool, n, blocks));
    CHECK_OK(folio_pool_release(w->pool, n, blocks));
    CHECK_INT(pool_stats(w->pool).num_cached, 0);
}

static void end(folio_transfer *t, folio_status status)
{
    CHECK(t != NULL);
    CHECK_INT(folio_transfer_wait(t), status);
    folio_transfer_destroy(t);
}

/* The call's transfer t stands at the gate; fails: there is no memory behind it. */
#define HOLD(w, fails, call)                                                                       \
    do {                                                                                           \
        gate_set(&(w)->gate, true, fails, 0);                                                      \
        CHECK_OK(call);                                                                            \
        CHECK(gate_stands(&(w)->gate, t));                                                         \
    } while (0)

/* It goes on to its end, and so does what comes after it. */
static void let_go(rules *w, folio_transfer *t, bool fails)
{
    gate_set(&w->gate, false, fails, 0);
    end(t, fails ? FOLIO_ERR_MEMORY : FOLIO_OK);
    gate_set(&w->gate, false, false, 0);
}

/* ---------------------------------------------------------------------------------- references */

/* Callers let go of what they hold, never of what only a sequence holds. */
POOL_TEST(pool_rules, what_a_sequence_holds_is_not_released_by_hand, .num_blocks = 16,
          .block_size = 1)
{
    folio_sequence *s = pool_plain(pool, 15);
    int32_t mine[17];
    memcpy(mine, pool_table(s, 0, NULL), 15 * sizeof mine[0]);
    folio_pool_stats before = pool_stats(pool), after;
    REFUSED(folio_pool_release(pool, 15, mine), FOLIO_ERR_ARGUMENT, "blocks[0]|caller");
    after = pool_stats(pool);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(folio_pool_check(pool));

    /* One of its own before it, one that both hold: each as often as the caller holds it. */
    CHECK_OK(folio_pool_alloc(pool, 1, &mine[15]));
    CHECK_OK(folio_pool_retain(pool, 1, &mine[3]));
    const int32_t mixed[3] = {mine[15], mine[3], mine[4]}, twice[2] = {mine[3], mine[3]};
    before = pool_stats(pool);
    REFUSED(folio_pool_release(pool, 3, mixed), FOLIO_ERR_ARGUMENT, "blocks[2]|caller");
    REFUSED(folio_pool_release(pool, 2, twice), FOLIO_ERR_ARGUMENT, "blocks[1]|caller");
    after = pool_stats(pool);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(folio_pool_release(pool, 2, mixed));
    REFUSED(folio_pool_release(pool, 1, &mine[3]), FOLIO_ERR_ARGUMENT, "caller");
    CHECK_OK(folio_pool_check(pool));
    for (int i = 0; i < 15; i++) CHECK_INT(pool_state_of(pool, mine[i]), FOLIO_BLOCK_USED);
    folio_sequence_destroy(s);
    CHECK_INT(pool_stats(pool).num_free, 16);
}

/* A block that a queued copy reads comes to rest when the copy is taken: before its parent. */
TEST(pool_rules, a_copied_block_rests_before_its_parent)
{
    for (int parent_gone = 0; parent_gone < 2; parent_gone++) {
        pool_rig r;
        REQUIRE_TEST(pool_rig_open(&r, (folio_pool_desc){.num_blocks = 8, .block_size = BS}));
        const int32_t *ids = pool_counting_ids();
        folio_sequence *s = pool_sequence(r.pool, 0);
        pool_grow(s, ids, 2 * BS);
        CHECK_OK(folio_sequence_truncate(s, 2 * BS - 1));
        CHECK_OK(folio_sequence_reserve(s, 1, 0, NULL)); /* block 1 is indexed: it is copied */
        int32_t copy = pool_table(s, 0, NULL)[1], by_hand[6];
        CHECK_OK(folio_pool_retain(r.pool, 1, &copy));
        folio_sequence_destroy(s);
        CHECK_OK(folio_pool_check(r.pool));
        if (parent_gone) CHECK_OK(folio_pool_alloc(r.pool, 6, by_hand));
        int64_t n = 0;
        folio_block_pair pairs[4];
        CHECK_OK(folio_pool_take_copies(r.pool, 0, 4, pairs, &n));
        CHECK_INT(n, 1);
        CHECK_OK(folio_pool_check(r.pool));
        if (!parent_gone) CHECK_OK(folio_pool_alloc(r.pool, 6, by_hand)); /* evicts one of two */
        CHECK_INT(pool_stats(r.pool).evictions, 1);
        CHECK_INT(pool_stats(r.pool).num_cached, parent_gone ? 0 : 1);
        CHECK_INT(pool_matches(r.pool, 0, ids, 2 * BS), parent_gone ? 0 : BS);
        CHECK_OK(folio_pool_release(r.pool, 6, by_hand));
        CHECK_OK(folio_pool_release(r.pool, 1, &copy));
        pool_rig_close(&r);
    }
}

/* Forked before it had ids, a block could be indexed after a parent that its other holder lacks. */
POOL_TEST(pool_rules, forked_without_ids_nothing_is_indexed, .num_blocks = 12, .block_size = BS,
          .flags = FOLIO_POOL_CHECK)
{
    const int32_t *ids = pool_counting_ids();
    folio_sequence *s = pool_plain(pool, 2 * BS), *f = pool_fork(s);
    pool_grow(f, ids, 3 * BS);
    pool_grow(s, ids, 2 * BS);
    CHECK_INT(r->num_events, 0);
    CHECK_OK(folio_sequence_truncate(s, BS));
    pool_grow(s, ids, 2 * BS);
    CHECK_INT(r->num_events, 0);
    CHECK_OK(folio_sequence_truncate(s, 0));
    pool_grow(s, ids, 2 * BS);
    CHECK_INT(r->num_events, 2);
    folio_sequence_destroy(f);
    folio_sequence_destroy(s);
    CHECK_INT(pool_matches(pool, 0, ids, 3 * BS), 2 * BS);
}

/* ----------------------------------------------------------------------- leaves before parents */

/* A block that the host has already is not counted as safe and its host copy then given away. */
TEST(pool_rules, what_goes_down_is_found_there)
{
    for (int kept_first = 0; kept_first < 2; kept_first++) {
        static rules w;
        REQUIRE_TEST(rules_open(&w, 8, 1, 0));
        leave(&w, 0, 1);
        CHECK_INT(lower(&w, FOLIO_TIER_HOST, 1), 1);
        if (!kept_first) leave(&w, 1, 1);
        CHECK_INT(found(&w, 0, 1), 1); /* now on the device and on the host */
        if (kept_first) leave(&w, 1, 1);
        CHECK_INT(lower(&w, FOLIO_TIER_HOST, 2), 1); /* the host has one place */
        CHECK_INT(pool_stats(w.pool).num_cached, 1);
        CHECK_INT(pool_stats(w.pool).host_cached, 1);
        CHECK_INT(pool_stats(w.pool).host_evictions, kept_first ? 0 : 1);
        CHECK_INT(found(&w, 0, 1), 1);
        CHECK_INT(found(&w, 1, 1), 1);
        rules_close(&w);
    }
}

/* A lower tier of four places; how many of a chain are found when one of them was replaced. */
static bool open_four(rules *w, folio_tier tier)
{
    return rules_open(w, 12, tier == FOLIO_TIER_HOST ? 4 : 0, tier == FOLIO_TIER_DISK ? 4 : 0);
}

static int64_t replaced(rules *w)
{
    return pool_stats(w->pool).host_evictions + pool_stats(w->pool).store_evictions;
}

/* Read back first to last, the chain's last block is still the first to be replaced. */
TEST(pool_rules, a_hit_below_leaves_the_leaf_oldest)
{
    static rules w;
    for (folio_tier tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        REQUIRE_TEST(open_four(&w, tier));
        leave(&w, 0, 4);
        CHECK_INT(lower(&w, tier, 4), 4);
        CHECK_INT(found(&w, 0, 4), 4);
        empty_device(&w);
        leave(&w, 1, 1);
        CHECK_INT(lower(&w, tier, 1), 1);
        empty_device(&w);
        CHECK_INT(replaced(&w), 1);
        CHECK_INT(found(&w, 0, 4), 3);
        CHECK_INT(found(&w, 1, 1), 1);
        rules_close(&w);
    }
}

/* What a match finds on the device is used below as well. */
TEST(pool_rules, a_hit_on_the_device_counts_below)
{
    static rules w;
    for (folio_tier tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        REQUIRE_TEST(open_four(&w, tier));
        leave(&w, 0, 2);
        CHECK_INT(lower(&w, tier, 2), 2);
        CHECK_INT(found(&w, 0, 2), 2); /* brought back: in both */
        folio_sequence *s = pool_sequence(w.pool, 0);
        folio_tokens tokens = pool_tokens(prompt(0), 2 * BS);
        CHECK_OK(folio_sequence_match(s, &tokens, NULL, NULL)); /* held: the others go down */
        leave(&w, 1, 2);
        CHECK_INT(lower(&w, tier, 2), 2);
        CHECK_INT(found(&w, 0, 2), 2); /* the hit: now prompt 1 is the older one */
        leave(&w, 2, 1);
        CHECK_INT(lower(&w, tier, 1), 1);
        folio_sequence_destroy(s);
        empty_device(&w);
        CHECK_INT(replaced(&w), 1);
        CHECK_INT(found(&w, 0, 2), 2);
        empty_device(&w);
        CHECK_INT(found(&w, 1, 2), 1);
        rules_close(&w);
    }
}

/* The chain's first block was below before the others came there. */
TEST(pool_rules, a_parent_that_was_below_first_is_not_older)
{
    static rules w;
    REQUIRE_TEST(open_four(&w, FOLIO_TIER_HOST));
    leave(&w, 0, 1);
    CHECK_INT(lower(&w, FOLIO_TIER_HOST, 1), 1);
    folio_sequence *s = pool_sequence(w.pool, 0);
    folio_tokens tokens = pool_tokens(prompt(0), 4 * BS);
    CHECK_OK(folio_sequence_match(s, &tokens, NULL, NULL));
    CHECK_INT(pool_info(s).len, BS);
    pool_grow(s, prompt(0), 4 * BS);
    folio_sequence_destroy(s);
    CHECK_INT(lower(&w, FOLIO_TIER_HOST, 4), 4);
    leave(&w, 1, 1);
    CHECK_INT(lower(&w, FOLIO_TIER_HOST, 1), 1);
    CHECK_INT(replaced(&w), 1);
    CHECK_INT(found(&w, 0, 4), 3);
    rules_close(&w);
}

/* ------------------------------------------------------------------------------------ under way */

/* A leaf goes down while its parent is evicted: nothing rests on a block under way. */
TEST(pool_rules, a_parent_goes_while_its_leaf_is_under_way)
{
    static rules w;
    for (folio_tier tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        REQUIRE_TEST(
            rules_open(&w, 2, tier == FOLIO_TIER_HOST ? 4 : 0, tier == FOLIO_TIER_DISK ? 4 : 0));
        leave(&w, 0, 2);
        folio_transfer *t = NULL;
        int64_t n = 0;
        int32_t block;
        HOLD(&w, false, folio_pool_swap_out(w.pool, tier, 1, NULL, &n, &t));
        CHECK_INT(n, 1);
        CHECK_INT(found(&w, 0, 2), 1); /* not what is on its way */
        CHECK_OK(folio_pool_check(w.pool));
        CHECK_OK(folio_pool_alloc(w.pool, 1, &block));
        CHECK_OK(folio_pool_check(w.pool));
        let_go(&w, t, false);
        CHECK_OK(folio_pool_check(w.pool));
        CHECK_INT(pool_stats(w.pool).num_free, 1);
        CHECK_OK(folio_pool_release(w.pool, 1, &block));
        /* With its first block computed again the whole is found. */
        leave(&w, 0, 1);
        CHECK_INT(found(&w, 0, 2), 2);
        rules_close(&w);
    }
}

/* A leaf that could not go down is cached again, if its parent still is. */
TEST(pool_rules, what_does_not_go_down_is_found_or_free)
{
    static rules w;
    for (int round = 0; round < 4; round++) {
        bool parent_gone = round % 2, disk = round / 2;
        REQUIRE_TEST(rules_open(&w, 2, disk ? 0 : 4, disk ? 4 : 0));
        leave(&w, 0, 2);
        folio_transfer *t = NULL;
        int32_t block;
        HOLD(&w, true,
             folio_pool_swap_out(w.pool, disk ? FOLIO_TIER_DISK : FOLIO_TIER_HOST, 1, NULL, NULL,
                                 &t));
        if (parent_gone) CHECK_OK(folio_pool_alloc(w.pool, 1, &block));
        let_go(&w, t, true);
        CHECK_OK(folio_pool_check(w.pool));
        CHECK_INT(pool_stats(w.pool).num_free, parent_gone ? 1 : 0);
        CHECK_INT(pool_stats(w.pool).num_cached, parent_gone ? 0 : 2);
        if (parent_gone) CHECK_OK(folio_pool_release(w.pool, 1, &block));
        else CHECK_INT(found(&w, 0, 2), 2);
        rules_close(&w);
    }
}

/* A later block was kept by hand and comes to be the sequence's again, before those before it. */
TEST(pool_rules, a_block_let_go_by_hand_while_its_sequence_comes)
{
    static rules w;
    for (int round = 0; round < 4; round++) {
        bool fails = round % 2, disk = round / 2;
        REQUIRE_TEST(rules_open(&w, 4, disk ? 0 : 4, disk ? 4 : 0));
        folio_sequence *s = with(&w, 0, 2);
        int32_t kept = pool_table(s, 0, NULL)[1], others[3];
        CHECK_OK(folio_pool_retain(w.pool, 1, &kept));
        CHECK_OK(folio_sequence_swap_out(s, disk ? FOLIO_TIER_DISK : FOLIO_TIER_HOST, NULL, NULL));
        CHECK_OK(folio_pool_alloc(w.pool, 3, others)); /* the first block is gone from the device */
        CHECK_OK(folio_pool_release(w.pool, 3, others));
        folio_transfer *t = NULL;
        HOLD(&w, fails, folio_sequence_swap_in(s, NULL, &t));
        CHECK_OK(folio_pool_release(w.pool, 1, &kept));
        CHECK_OK(folio_pool_check(w.pool));
        let_go(&w, t, fails);
        CHECK_OK(folio_pool_check(w.pool));
        if (fails) CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
        gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 2 * BS);
        folio_sequence_destroy(s);
        CHECK_INT(found(&w, 0, 2), 2);
        rules_close(&w);
    }
}

/* A match has a later block from the device and waits for its first; somebody computes that again. */
TEST(pool_rules, a_parent_is_computed_again_while_it_comes)
{
    static rules w;
    for (int round = 0; round < 4; round++) {
        bool fails = round % 2, disk = round / 2;
        REQUIRE_TEST(rules_open(&w, 6, disk ? 0 : 4, disk ? 4 : 0));
        folio_sequence *s = with(&w, 0, 2), *m = pool_sequence(w.pool, 0);
        int32_t kept = pool_table(s, 0, NULL)[1];
        CHECK_OK(folio_pool_retain(w.pool, 1, &kept));
        folio_sequence_destroy(s);
        CHECK_INT(lower(&w, disk ? FOLIO_TIER_DISK : FOLIO_TIER_HOST, 9), 1);
        folio_transfer *t = NULL;
        folio_tokens tokens = pool_tokens(prompt(0), 2 * BS);
        HOLD(&w, fails, folio_sequence_match(m, &tokens, NULL, &t));
        CHECK_OK(folio_pool_release(w.pool, 1, &kept));
        leave(&w, 0, 1);
        CHECK_OK(folio_pool_check(w.pool));
        let_go(&w, t, fails);
        gen_check_at(m, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, fails ? 0 : 2 * BS);
        CHECK_OK(folio_pool_check(w.pool));
        folio_sequence_destroy(m);
        CHECK_OK(folio_pool_check(w.pool));
        CHECK_INT(pool_stats(w.pool).num_cached, found(&w, 0, 2)); /* what is cached is found */
        rules_close(&w);
    }
}

/* folio_sequence_info.tier says where the sequence will be after its transfer. */
TEST(pool_rules, the_tier_of_a_sequence_under_way)
{
    static rules w;
    for (folio_tier tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        REQUIRE_TEST(rules_open(&w, 16, 8, 8));
        folio_sequence *s = with(&w, 0, 5), *m = pool_sequence(w.pool, 0);
        folio_transfer *t = NULL;
        HOLD(&w, false, folio_sequence_swap_out(s, tier, NULL, &t));
        CHECK_INT(pool_info(s).state, FOLIO_SEQUENCE_LEAVING);
        CHECK_INT(pool_info(s).tier, tier);
        let_go(&w, t, false);
        gen_check_at(s, FOLIO_SEQUENCE_SWAPPED, tier, 5 * BS);
        empty_device(&w);
        HOLD(&w, false, folio_sequence_swap_in(s, NULL, &t));
        CHECK_INT(pool_info(s).state, FOLIO_SEQUENCE_COMING);
        CHECK_INT(pool_info(s).tier, FOLIO_TIER_DEVICE);
        let_go(&w, t, true); /* it stays where it is */
        gen_check_at(s, FOLIO_SEQUENCE_SWAPPED, tier, 5 * BS);
        CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
        gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 5 * BS);
        folio_sequence_destroy(s);
        CHECK_INT(lower(&w, FOLIO_TIER_HOST, 5), 5);
        if (tier == FOLIO_TIER_DISK) CHECK_INT(lower(&w, tier, 5), 5);
        gate_set(&w.gate, true, false, 0);
        folio_tokens tokens = pool_tokens(prompt(0), 5 * BS);
        CHECK_OK(folio_sequence_match(m, &tokens, NULL, &t));
        CHECK(gate_stands(&w.gate, t));
        CHECK_INT(pool_info(m).state, FOLIO_SEQUENCE_COMING);
        CHECK_INT(pool_info(m).tier, FOLIO_TIER_DEVICE);
        let_go(&w, t, false);
        gen_check_at(m, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 5 * BS);
        folio_sequence_destroy(m);
        rules_close(&w);
    }
}

/* -------------------------------------------------------------------------------- promised room */

/* Lets the transfer write until the store has so many frames, and stand there. */
static void write_until(rules *w, const folio_transfer *t, int64_t frames)
{
    while (gate_stands(&w->gate, t) && pool_stats(w->pool).store_used < frames)
        gate_set(&w->gate, true, false, 1);
    CHECK_INT(pool_stats(w->pool).store_used, frames);
    CHECK_INT(folio_transfer_is_done(t), 0);
}

/* Frames that were promised are not counted again when they are written, nor forgotten before. */
TEST(pool_rules, frames_are_promised_once)
{
    static rules w;
    for (int64_t written = 0; written <= 4; written++) {
        REQUIRE_TEST(rules_open(&w, 16, 0, 10));
        folio_sequence *a = with(&w, 0, 5), *b = with(&w, 1, 5), *c = with(&w, 2, 1),
                       *none = pool_sequence(w.pool, 0);
        folio_transfer *t[3] = {NULL, NULL, NULL}, *refused = NOWHERE;
        gate_set(&w.gate, true, false, 0);
        CHECK_OK(folio_sequence_swap_out(a, FOLIO_TIER_DISK, NULL, &t[0]));
        write_until(&w, t[0], written);
        CHECK_OK(folio_sequence_swap_out(b, FOLIO_TIER_DISK, NULL, &t[1]));
        REFUSED(folio_sequence_swap_out(c, FOLIO_TIER_DISK, NULL, &refused), FOLIO_ERR_FULL,
                "1 frames|0 of 10");
        CHECK(refused == NULL);
        CHECK_OK(folio_sequence_swap_out(none, FOLIO_TIER_DISK, NULL, &t[2])); /* needs no room */
        gate_set(&w.gate, false, false, 0);
        for (int i = 0; i < 3; i++) end(t[i], FOLIO_OK);
        CHECK_INT(pool_stats(w.pool).store_used, 10);
        REFUSED(folio_sequence_swap_out(c, FOLIO_TIER_DISK, NULL, NULL), FOLIO_ERR_FULL, "0 of 10");
        CHECK_OK(folio_sequence_swap_in(a, NULL, NULL)); /* its frames are free again */
        CHECK_OK(folio_sequence_swap_out(c, FOLIO_TIER_DISK, NULL, NULL));
        folio_sequence_destroy(a);
        folio_sequence_destroy(b);
        folio_sequence_destroy(c);
        folio_sequence_destroy(none);
        rules_close(&w);
    }
}

/* A transfer that fails on its way gives back what it was promised, and what it has written. */
TEST(pool_rules, a_failed_transfer_gives_its_frames_back)
{
    static rules w;
    for (int64_t written = 0; written <= 4; written++) {
        REQUIRE_TEST(rules_open(&w, 20, 0, 10));
        folio_sequence *a = with(&w, 0, 5), *b = with(&w, 1, 10);
        folio_transfer *t = NULL;
        gate_set(&w.gate, true, false, 0);
        CHECK_OK(folio_sequence_swap_out(a, FOLIO_TIER_DISK, NULL, &t));
        write_until(&w, t, written);
        let_go(&w, t, true);
        gen_check_at(a, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 5 * BS);
        CHECK_INT(pool_stats(w.pool).store_used, 0);
        CHECK_OK(folio_sequence_swap_out(b, FOLIO_TIER_DISK, NULL, NULL)); /* all ten */
        REFUSED(folio_sequence_swap_out(a, FOLIO_TIER_DISK, NULL, NULL), FOLIO_ERR_FULL, "0 of 10");
        folio_sequence_destroy(a);
        folio_sequence_destroy(b);
        rules_close(&w);
    }
}

/* Cached blocks go to disk as far as sequences leave room there; that is no error. */
TEST(pool_rules, a_store_full_of_sequences_takes_no_cached_blocks)
{
    static rules w;
    for (int64_t held = 2; held <= 4; held++) {
        REQUIRE_TEST(rules_open(&w, 16, 0, 4));
        folio_sequence *s = with(&w, 0, held);
        CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
        empty_device(&w);
        leave(&w, 1, 3);
        CHECK_INT(lower(&w, FOLIO_TIER_DISK, 9), 4 - held);
        CHECK_INT(pool_stats(w.pool).num_cached, 3 - (4 - held));
        CHECK_INT(found(&w, 1, 3), 3); /* here or there */
        CHECK_INT(pool_stats(w.pool).store_errors, 0);
        folio_sequence_destroy(s);
        rules_close(&w);
    }
}

/* --------------------------------------------------------------------------- collisions on disk */

/* Stands for all that a token's K and V depend on; exact in f32. */
static float row_of(const int32_t *ids, int64_t token)
{
    uint64_t chain = 1;
    for (int64_t i = 0; i <= token; i++) chain = support_bits(chain, (uint64_t)ids[i]);
    return (float)(chain % 1000003);
}

/* Match a prompt, compare what came, compute the rest. How many blocks came; -1: another's. */
static int64_t serve(rules *w, const int32_t *ids, int64_t blocks)
{
    folio_sequence *s = pool_sequence(w->pool, 0);
    folio_tokens tokens = pool_tokens(ids, blocks * BS);
    int64_t matched = -1, slots[64];
    float rows[64][WIDTH];
    CHECK_OK(folio_sequence_match(s, &tokens, &matched, NULL));
    const int32_t *table = pool_table(s, 0, NULL);
    for (int64_t i = 0; i < matched; i++) slots[i] = (int64_t)table[i / BS] * BS + i % BS;
    folio_kv_gather gather =
        FOLIO_WITH(folio_kv_gather, .k = {.data = rows, .dtype = FOLIO_F32, .tokens = matched},
                   .slots = slots, .num_slots = matched);
    if (matched > 0) CHECK_OK(folio_kv_cache_gather(w->r.caches[0], 0, &gather, NULL));
    bool right = true;
    for (int64_t i = 0; i < matched; i++) right = right && rows[i][WIDTH - 1] == row_of(ids, i);
    int64_t rest = blocks * BS - matched;
    CHECK_OK(folio_sequence_reserve(s, rest, 0, slots));
    for (int64_t i = 0; i < rest; i++)
        for (int d = 0; d < WIDTH; d++) rows[i][d] = row_of(ids, matched + i);
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = {.data = rows, .dtype = FOLIO_F32, .tokens = rest},
                   .v = {.data = rows, .dtype = FOLIO_F32, .tokens = rest}, .slots = slots);
    if (rest > 0) CHECK_OK(folio_kv_cache_write(w->r.caches[0], 0, &write, NULL));
    CHECK_OK(folio_sequence_commit(s, &tokens));
    folio_sequence_destroy(s);
    return right ? matched / BS : -1;
}

/* Two prompts of one block each with the same key; their first tokens. */
static void find_collision(rules *w, int32_t *a, int32_t *b)
{
    static uint64_t hash[4096][2];
    for (*b = 0; *b < 4096; ++*b) {
        const int32_t ids[BS] = {*b, 0, 0, 0};
        CHECK_INT(serve(w, ids, 1), 0);
        const pool_event *last = &w->r.events[w->r.num_events - 1];
        CHECK_INT(last->e.kind, FOLIO_EVENT_STORED);
        memcpy(hash[*b], last->e.hash, sizeof hash[0]);
        for (*a = 0; *a < *b; ++*a)
            if (memcmp(hash[*a], hash[*b], sizeof hash[0]) == 0) return;
    }
}

/* The same tokens after two blocks of one key: a frame of the one prompt is none of the other. */
TEST(pool_rules, a_collision_is_no_hit_on_disk)
{
    static rules w;
    REQUIRE_TEST(rules_open(&w, 8, 0, 40));
    folioi_pool_set_hash_bits(w.pool, 6);
    int32_t a, b;
    find_collision(&w, &a, &b);
    REQUIRE_TEST(b < 4096);
    CHECK_OK(folio_pool_forget(w.pool));
    const int32_t one[2 * BS] = {a, 0, 0, 0, 7, 7, 7, 7}, other[2 * BS] = {b, 0, 0, 0, 7, 7, 7, 7};
    CHECK_INT(serve(&w, other, 2), 0);
    CHECK_INT(lower(&w, FOLIO_TIER_DISK, 8), 2);
    CHECK_INT(serve(&w, one, 1), 0);
    CHECK_INT(serve(&w, one, 2), 1); /* its first block, of the device, and none of the other's */
    CHECK_INT(lower(&w, FOLIO_TIER_DISK, 8), 2);
    CHECK_INT(serve(&w, one, 2), 2);
    CHECK(serve(&w, other, 2) >= 0);
    CHECK_INT(serve(&w, one, 2), 2);
    rules_close(&w);
}

/* ------------------------------------------------------------------------------------ disk events */

/* Disk events of a kind so far. */
static int64_t count_disk(const rules *w, folio_cache_event_kind kind)
{
    int64_t n = 0;
    for (int64_t i = 0; i < w->r.num_events; i++)
        n += w->r.events[i].e.tier == FOLIO_TIER_DISK && w->r.events[i].e.kind == kind;
    return n;
}

/* Replaced while the match that will miss it is under way, a frame is gone once. */
TEST(pool_rules, a_frame_missed_by_a_match_is_told_once)
{
    static rules w;
    REQUIRE_TEST(rules_open(&w, 8, 0, 2));
    leave(&w, 0, 1);
    CHECK_INT(lower(&w, FOLIO_TIER_DISK, 1), 1);
    leave(&w, 1, 2);
    folio_transfer *down = NULL, *up = NULL;
    folio_sequence *s = pool_sequence(w.pool, 0);
    folio_tokens tokens = pool_tokens(prompt(0), BS);
    gate_set(&w.gate, true, false, 0);
    CHECK_OK(folio_pool_swap_out(w.pool, FOLIO_TIER_DISK, 2, NULL, NULL, &down));
    CHECK(gate_stands(&w.gate, down));
    CHECK_OK(folio_sequence_match(s, &tokens, NULL, &up)); /* still there, and the next to go */
    gate_set(&w.gate, false, false, 0);
    end(down, FOLIO_OK);
    end(up, FOLIO_OK);
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 0);
    CHECK_INT(count_disk(&w, FOLIO_EVENT_REMOVED), 1);
    CHECK_INT(count_disk(&w, FOLIO_EVENT_STORED), 3);
    folio_sequence_destroy(s);
    rules_close(&w);
}

/* Computed again while it is written down, and sent down again: one frame, stored once. */
TEST(pool_rules, a_frame_sent_down_twice_is_told_once)
{
    static rules w;
    REQUIRE_TEST(rules_open(&w, 8, 0, 4));
    folio_transfer *t[2] = {NULL, NULL};
    gate_set(&w.gate, true, false, 0);
    for (int i = 0; i < 2; i++) {
        leave(&w, 0, 1);
        CHECK_OK(folio_pool_swap_out(w.pool, FOLIO_TIER_DISK, 1, NULL, NULL, &t[i]));
        CHECK(gate_stands(&w.gate, t[0]));
    }
    gate_set(&w.gate, false, false, 0);
    for (int i = 0; i < 2; i++) end(t[i], FOLIO_OK);
    CHECK_INT(count_disk(&w, FOLIO_EVENT_STORED), 1);
    CHECK_INT(pool_stats(w.pool).store_used, 1);
    CHECK_INT(pool_stats(w.pool).store_writes, 1);
    CHECK_INT(found(&w, 0, 1), 1);
    rules_close(&w);
}
