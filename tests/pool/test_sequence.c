/*
 * test_sequence.c: one sequence's life around block boundaries: fork and the copies it leads to, windows, encoder
 * tokens, and what is refused. Where K and V matter they lie in real caches, one number per token. Slots and what
 * truncates leave: test_pool_fuzz.c.
 */
#include "pool/pool_rig.h"

static const int64_t lengths[] = {0, 1, 15, 16, 17, 31, 32, 33};
static const int32_t block_sizes[] = {1, 3, 16};
enum { LENGTHS = COUNT_OF(lengths) };

static int64_t blocks_for(int64_t tokens, int64_t block_size)
{
    return (tokens + block_size - 1) / block_size;
}

POOL_TEST(sequence, all_or_nothing_in_every_group, .num_blocks = 8, .block_size = 4,
          .num_layer_groups = 3, .flags = FOLIO_POOL_CHECK)
{
    folio_sequence *a = pool_sequence(pool, 0);
    int64_t slots[3 * 16];
    CHECK_OK(folio_sequence_reserve(a, 7, 0, NULL)); /* 6 blocks */
    int32_t table[2];
    memcpy(table, pool_table(a, 2, NULL), sizeof table);
    memset(slots, 0xFF, sizeof slots);
    REFUSED_BY(pool, a, folio_sequence_reserve(a, 2, 0, slots), FOLIO_ERR_TOO_LARGE, "9|8");
    REFUSED_BY(pool, a, folio_sequence_reserve(a, 16, 0, slots), FOLIO_ERR_TOO_LARGE, "18|8");
    REFUSED_BY(pool, a, folio_sequence_reserve(a, INT64_MAX - 4, 0, NULL), FOLIO_ERR_TOO_LARGE, "");
    REFUSED_BY(pool, a, folio_sequence_reserve(a, INT64_MAX, 0, NULL), FOLIO_ERR_TOO_LARGE, "");
    CHECK(support_is_poison(slots, sizeof slots));
    CHECK(memcmp(table, pool_table(a, 2, NULL), sizeof table) == 0);
    CHECK_OK(folio_sequence_reserve(a, 1, 0, slots)); /* fits in what it has */
    CHECK_INT(pool_stats(pool).num_free, 2);
    folio_sequence_destroy(a);
    /* A copy in each of three groups needs three blocks; there are two. */
    a = pool_sequence(pool, 0);
    folio_sequence *b = NULL;
    CHECK_OK(folio_sequence_reserve(a, 6, 0, NULL));
    CHECK_OK(folio_sequence_commit(a, NULL));
    CHECK_OK(folio_sequence_fork(a, &b));
    REFUSED_BY(pool, b, folio_sequence_reserve(b, 1, 0, slots), FOLIO_ERR_FULL, "");
    CHECK_INT(pool_stats(pool).num_copies, 0);
    CHECK(memcmp(pool_table(a, 2, NULL), pool_table(b, 2, NULL), sizeof table) == 0);
    folio_sequence_destroy(a);
    CHECK_OK(folio_sequence_reserve(b, 1, 0, slots));
    folio_sequence_destroy(b);
}

/* --------------------------------------------------------------------------------------- copies */

enum { WORLD_BLOCKS = 40, WORLD_BS = 4 };

/* A pool with two groups (the second with this window) and a cache for each. */
static bool world_open(pool_rig *w, int64_t window)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    const folio_kv_cache_desc kv =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = WORLD_BLOCKS, .num_layers = 2,
                   .block_size = WORLD_BS, .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_kv_cache *caches[2] = {NULL, NULL};
    for (int g = 0; g < 2; g++) {
        CHECK_OK(folio_kv_cache_create(ctx, &kv, &caches[g]));
        kit_poison_cache(caches[g]);
    }
    const folio_layer_group groups[2] = {{.cache = caches[0]},
                                         {.window = window, .cache = caches[1]}};
    bool ok = pool_rig_open_on(w, ctx,
                               FOLIO_WITH(folio_pool_desc, .num_blocks = WORLD_BLOCKS,
                                          .block_size = WORLD_BS, .num_layer_groups = 2,
                                          .layer_groups = groups, .flags = FOLIO_POOL_CHECK));
    memcpy(w->caches, caches, sizeof caches);
    return ok;
}

/* Writes K and V of tokens from .. len - 1: in both groups and layers numbers made of `mark`. */
static void put(pool_rig *w, const folio_sequence *s, int64_t from, float mark)
{
    int64_t len = pool_info(s).len;
    for (int g = 0; g < 2; g++)
        for (int layer = 0; layer < 2; layer++)
            for (int64_t p = from; p < len; p++) {
                float row[8];
                for (int d = 0; d < 8; d++) row[d] = mark + (float)(p + 100 * g + 1000 * layer);
                const int64_t slot = pool_table(s, g, NULL)[p / WORLD_BS] * WORLD_BS + p % WORLD_BS;
                folio_kv_write write =
                    FOLIO_WITH(folio_kv_write, .k = {.data = row, .dtype = FOLIO_F32, .tokens = 1},
                               .v = {.data = row, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot);
                CHECK_OK(folio_kv_cache_write(w->caches[g], layer, &write, NULL));
            }
}

/* Tokens from .. to - 1 read back with this mark. */
static void check_holds(int line, pool_rig *w, const folio_sequence *s, int64_t from, int64_t to,
                        float mark)
{
    for (int g = 0; g < 2; g++)
        for (int layer = 0; layer < 2; layer++)
            for (int64_t p = from; p < to; p++) {
                float k[8], v[8], expected = mark + (float)(p + 100 * g + 1000 * layer);
                const int64_t slot = pool_table(s, g, NULL)[p / WORLD_BS] * WORLD_BS + p % WORLD_BS;
                folio_kv_gather gather =
                    FOLIO_WITH(folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 1},
                               .v = {.data = v, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot,
                               .num_slots = 1);
                CHECK_OK(folio_kv_cache_gather(w->caches[g], layer, &gather, NULL));
                if (!(k[0] == expected && v[7] == expected))
                    test_fail(__FILE__, line, "group %d layer %d token %lld is %g, expected %g", g,
                              layer, (long long)p, (double)k[0], (double)expected);
            }
}
#define HOLDS(s, from, to, mark) check_holds(__LINE__, &w, s, from, to, mark)

static int64_t take(folio_pool *pool, int32_t group, folio_block_pair *pairs, int64_t capacity)
{
    int64_t n = -1;
    CHECK_OK(folio_pool_take_copies(pool, group, capacity, pairs, &n));
    CHECK(n >= 0 && n <= capacity);
    CHECK(pool_pairs_fit(pairs, n));
    return n;
}

static int32_t block_at(const folio_sequence *s, int32_t group, int64_t i)
{
    return pool_table(s, group, NULL)[i];
}

/* A fork shares all, and a token more costs a copy where the last block has room. */
static void fork_with(int32_t bs)
{
    pool_rig r;
    REQUIRE_TEST(pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 200, .block_size = bs,
                                              .num_layer_groups = 2, .flags = FOLIO_POOL_CHECK)));
    for (int i = 0; i < LENGTHS; i++) {
        int64_t len = lengths[i], blocks = blocks_for(len, bs), slots[2];
        folio_block_pair pairs[8];
        folio_sequence *a = pool_plain(r.pool, len), *b = pool_fork(a);
        folio_sequence_info info = pool_info(b);
        CHECK_INT(info.len, len);
        CHECK_INT(info.committed_len, len);
        CHECK_INT(info.num_blocks, 2 * blocks);
        CHECK_INT(pool_stats(r.pool).num_used, 2 * blocks);
        CHECK_INT(pool_stats(r.pool).num_shared, 2 * blocks);
        for (int g = 0; g < 2 && len > 0; g++)
            CHECK(memcmp(pool_table(a, g, NULL), pool_table(b, g, NULL), 4 * (size_t)blocks) == 0);
        bool copies = len % bs != 0;
        CHECK_OK(folio_sequence_reserve(b, 1, 0, slots));
        CHECK_INT(pool_stats(r.pool).num_copies, copies ? 2 : 0);
        for (int g = 0; g < 2; g++) {
            int32_t mine = block_at(b, g, len / bs);
            CHECK_INT(slots[g], mine * bs + len % bs);
            CHECK_INT(pool_state_of(r.pool, mine), FOLIO_BLOCK_USED);
            for (int64_t k = 0; k < len / bs; k++) CHECK_INT(block_at(b, g, k), block_at(a, g, k));
            CHECK_INT(take(r.pool, g, pairs, 8), copies ? 1 : 0);
            if (!copies) continue;
            CHECK_INT(pairs[0].from, block_at(a, g, len / bs));
            CHECK_INT(pairs[0].to, mine);
            CHECK_INT(pool_state_of(r.pool, (int32_t)pairs[0].from), FOLIO_BLOCK_USED);
        }
        CHECK_INT(pool_stats(r.pool).num_copies, 0);
        /* Now each owns its last block alone. */
        CHECK_OK(folio_sequence_reserve(a, 1, 0, NULL));
        CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
        CHECK_INT(pool_stats(r.pool).num_copies, 0);
        folio_sequence_destroy(a);
        folio_sequence_destroy(b);
        CHECK_INT(pool_stats(r.pool).num_free, 200);
    }
    pool_rig_close(&r);
}

TEST(sequence, forks_copy_what_they_write)
{
    for (int i = 0; i < COUNT_OF(block_sizes); i++) fork_with(block_sizes[i]);
}

POOL_TEST(sequence, copies_are_handed_out_once, .num_blocks = 40, .block_size = 4)
{
    folio_sequence *a = pool_plain(pool, 6), *forks[5];
    for (int i = 0; i < 4; i++) forks[i] = pool_fork(a);
    for (int i = 0; i < 4; i++) CHECK_OK(folio_sequence_reserve(forks[i], 1, 0, NULL));
    CHECK_OK(folio_sequence_truncate(forks[3], 6));
    forks[4] = pool_fork(forks[3]); /* of one that waits for its copy: both read a's block */
    CHECK_OK(folio_sequence_reserve(forks[4], 1, 0, NULL));
    CHECK_INT(pool_stats(pool).num_copies, 5);
    folio_block_pair pairs[8];
    int seen[5] = {0};
    CHECK_INT(take(pool, 0, pairs, 0), 0);
    for (int round = 0; round < 3; round++) {
        int64_t n = take(pool, 0, pairs, 2);
        CHECK_INT(n, round == 2 ? 1 : 2);
        for (int k = 0; k < n; k++) {
            CHECK_INT(pairs[k].from, block_at(a, 0, 1));
            for (int i = 0; i < 5; i++) seen[i] += pairs[k].to == block_at(forks[i], 0, 1);
        }
        CHECK_INT(pool_stats(pool).num_copies, round == 2 ? 0 : 3 - 2 * round);
    }
    for (int i = 0; i < 5; i++) CHECK_INT(seen[i], 1);
    CHECK_INT(take(pool, 0, pairs, 8), 0);
    for (int i = 0; i < 5; i++) folio_sequence_destroy(forks[i]);
    folio_sequence_destroy(a);
}

/* A block held by hand too is not written either. */
POOL_TEST(sequence, a_block_retained_by_hand_is_copied, .num_blocks = 10, .block_size = 4)
{
    folio_sequence *a = pool_plain(pool, 6);
    int32_t last = block_at(a, 0, 1);
    folio_block_pair pairs[2];
    CHECK_OK(folio_pool_retain(pool, 1, &last));
    CHECK_OK(folio_sequence_reserve(a, 1, 0, NULL));
    CHECK(block_at(a, 0, 1) != last);
    CHECK_INT(take(pool, 0, pairs, 2), 1);
    CHECK_INT(pairs[0].from, last);
    CHECK_INT(pairs[0].to, block_at(a, 0, 1));
    CHECK_INT(pool_state_of(pool, last), FOLIO_BLOCK_USED);
    CHECK_OK(folio_pool_release(pool, 1, &last));
    CHECK_INT(pool_state_of(pool, last), FOLIO_BLOCK_FREE);
    folio_sequence_destroy(a);
}

/* The holder may go; what waits to be copied stays until it is taken. */
TEST(sequence, a_source_stays_until_it_is_copied)
{
    pool_rig w;
    REQUIRE_TEST(world_open(&w, 0));
    folio_sequence *a = pool_plain(w.pool, 6);
    put(&w, a, 0, 10);
    folio_sequence *b = pool_fork(a);
    int32_t source = block_at(a, 1, 1);
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
    folio_sequence_destroy(a);
    CHECK(pool_state_of(w.pool, source) != FOLIO_BLOCK_FREE);
    CHECK_INT(pool_stats(w.pool).num_used, 6);
    int32_t all[WORLD_BLOCKS]; /* nobody else gets it */
    CHECK_OK(folio_pool_alloc(w.pool, WORLD_BLOCKS - 6, all));
    for (int i = 0; i < WORLD_BLOCKS - 6; i++) CHECK(all[i] != source);
    CHECK_OK(folio_pool_run_copies(w.pool, NULL));
    CHECK_INT(pool_state_of(w.pool, source), FOLIO_BLOCK_FREE);
    CHECK_INT(pool_stats(w.pool).num_copies, 0);
    HOLDS(b, 0, 6, 10);
    CHECK_OK(folio_pool_release(w.pool, WORLD_BLOCKS - 6, all));
    folio_sequence_destroy(b);
    CHECK_INT(pool_stats(w.pool).num_free, WORLD_BLOCKS);
    pool_rig_close(&w);
}

/* Without its destination a copy is off, however the destination went. */
TEST(sequence, a_lost_destination_cancels_its_copy)
{
    for (int how = 0; how < 4; how++) {
        pool_rig w;
        REQUIRE_TEST(world_open(&w, how == 3 ? 3 : 0));
        folio_sequence *a = pool_plain(w.pool, 6), *b = pool_fork(a), *c = pool_fork(a);
        folio_block_pair pairs[4];
        CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
        CHECK_OK(folio_sequence_reserve(c, 1, 0, NULL));
        CHECK_INT(pool_stats(w.pool).num_copies, 4);
        if (how == 0) folio_sequence_destroy(b);
        else if (how == 1) CHECK_OK(folio_sequence_truncate(b, 4));
        else if (how == 2) CHECK_OK(folio_sequence_preempt(b, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
        else { /* out of the window, in the second group */
            CHECK_OK(folio_sequence_reserve(b, 8, 0, NULL));
            CHECK_OK(folio_sequence_commit(b, NULL));
            CHECK_OK(folio_sequence_release_window(b));
            CHECK_INT(block_at(b, 1, 1), FOLIO_NO_BLOCK);
        }
        CHECK_INT(pool_stats(w.pool).num_copies, how == 3 ? 3 : 2);
        for (int g = how == 3 ? 1 : 0; g < 2; g++) {
            CHECK_INT(take(w.pool, g, pairs, 4), 1);
            CHECK_INT(pairs[0].from, block_at(a, g, 1));
            CHECK_INT(pairs[0].to, block_at(c, g, 1));
            CHECK_INT(pool_state_of(w.pool, block_at(a, g, 1)), FOLIO_BLOCK_USED);
        }
        if (how != 0) folio_sequence_destroy(b);
        folio_sequence_destroy(a);
        folio_sequence_destroy(c);
        CHECK_INT(pool_stats(w.pool).num_free, WORLD_BLOCKS);
        pool_rig_close(&w);
    }
}

/* What the prefix cache knows is never written, even by the only one who holds it. */
TEST(sequence, an_indexed_block_is_not_written)
{
    for (int64_t to = 1; to < 12; to++) {
        pool_rig w;
        REQUIRE_TEST(world_open(&w, 0));
        int32_t ids[16];
        memcpy(ids, pool_counting_ids(), sizeof ids);
        folio_sequence *a = pool_sequence(w.pool, 0);
        CHECK_OK(folio_sequence_reserve(a, 12, 0, NULL));
        put(&w, a, 0, 10);
        pool_grow(a, ids, 12);
        int32_t was[3];
        memcpy(was, pool_table(a, 1, NULL), sizeof was);
        CHECK_OK(folio_sequence_truncate(a, to));
        CHECK_INT(pool_info(a).committed_len, to);
        CHECK_OK(folio_sequence_reserve(a, 3, 0, NULL));
        CHECK_INT(pool_stats(w.pool).num_copies, to % 4 ? 2 : 0);
        for (int64_t i = to / 4; i < blocks_for(to + 3, 4); i++)
            for (int k = 0; k < 3; k++) CHECK(block_at(a, 1, i) != was[k]);
        CHECK_OK(folio_pool_run_copies(w.pool, NULL));
        put(&w, a, to, 50);
        for (int i = 0; i < 3; i++) ids[to + i] = 900 + i;
        pool_grow(a, ids, to + 3);
        HOLDS(a, 0, to, 10);
        HOLDS(a, to, to + 3, 50);
        /* The old tokens are still there for others. */
        folio_sequence *b = pool_sequence(w.pool, 0);
        folio_tokens old = pool_tokens(pool_counting_ids(), 12);
        int64_t matched = -1;
        CHECK_OK(folio_sequence_match(b, &old, &matched, NULL));
        CHECK_INT(matched, 12);
        HOLDS(b, 0, 12, 10);
        CHECK(memcmp(pool_table(b, 1, NULL), was, sizeof was) == 0);
        folio_sequence_destroy(a);
        folio_sequence_destroy(b);
        pool_rig_close(&w);
    }
}

/* -------------------------------------------------------------------------------------- windows */

/* Does some token from `next` on see some key of the block? By the definition, one by one. */
static bool block_is_seen(int64_t block, int64_t bs, int64_t next, int64_t window)
{
    for (int64_t key = block * bs; key < (block + 1) * bs; key++)
        for (int64_t token = next; token < next + window; token++)
            if (token - key < window) return true;
    return false;
}

static void check_window(const folio_sequence *s, int64_t len, int64_t bs, int64_t window)
{
    int64_t n;
    const int32_t *table = pool_table(s, 1, &n);
    for (int64_t i = 0; i < n; i++)
        CHECK_MSG((table[i] != FOLIO_NO_BLOCK) == block_is_seen(i, bs, len, window),
                  "window %lld, block size %lld, %lld tokens: block %lld is %d", (long long)window,
                  (long long)bs, (long long)len, (long long)i, table[i]);
    table = pool_table(s, 0, &n);
    for (int64_t i = 0; i < n; i++) CHECK(table[i] >= 0); /* the group without a window */
}

/* Which lengths could it go back to? Those whose next token sees no key that is gone, not even the
 * place of its own. */
static bool may_go_back(const folio_sequence *s, int64_t len, int64_t bs, int64_t window)
{
    int64_t n;
    const int32_t *table = pool_table(s, 1, &n);
    for (int64_t key = 0; len > 0 && key <= len && key / bs < n; key++)
        if (len - key < window && table[key / bs] == FOLIO_NO_BLOCK) return false;
    return true;
}

/* Prompt, then token by token, sometimes several at once. */
static void generate_with(int32_t bs, int64_t window)
{
    pool_rig r;
    const folio_layer_group groups[2] = {{.window = 0}, {.window = window}};
    REQUIRE_TEST(pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 400, .block_size = bs,
                                              .num_layer_groups = 2, .layer_groups = groups,
                                              .flags = FOLIO_POOL_CHECK)));
    folio_sequence *s = pool_sequence(r.pool, 0);
    for (int64_t step = 0, len = 0; len < 110; step++) {
        int64_t n = step == 0 ? 7 : step % 9 == 8 ? 20 : 1;
        CHECK_OK(folio_sequence_reserve(s, n, 0, NULL));
        check_window(s, len, bs, window); /* the new tokens see all they need */
        CHECK(may_go_back(s, len, bs, window));
        for (int64_t to = 0; to < len; to++)
            if (!may_go_back(s, to, bs, window))
                REFUSED_BY(r.pool, s, folio_sequence_truncate(s, to), FOLIO_ERR_ARGUMENT, "");
        if (step % 4 == 3) { /* the last reserve can be taken back */
            CHECK_OK(folio_sequence_truncate(s, len));
            CHECK_OK(folio_sequence_reserve(s, n, 0, NULL));
        }
        CHECK_OK(folio_sequence_commit(s, NULL));
        len += n;
        if (step % 5 == 4) {
            CHECK_OK(folio_sequence_release_window(s));
            check_window(s, len, bs, window);
        }
    }
    CHECK_OK(folio_sequence_truncate(s, 0)); /* a restart is always allowed */
    CHECK_INT(pool_stats(r.pool).num_free, 400);
    folio_sequence_destroy(s);
    pool_rig_close(&r);
}

TEST(sequence, windows_let_go_what_no_token_can_see)
{
    const int64_t windows[] = {1, 2, 3, 4, 5, 15, 16, 17, 33};
    for (int i = 0; i < COUNT_OF(block_sizes); i++)
        for (int k = 0; k < COUNT_OF(windows); k++) generate_with(block_sizes[i], windows[k]);
}

/* Tokens that are not committed have still to see their keys. */
POOL_TEST(sequence, windows_wait_for_the_commit, .num_blocks = 40, .block_size = 4,
          .num_layer_groups = 2,
          .layer_groups = (folio_layer_group[]){{.window = 0}, {.window = 3}})
{
    folio_sequence *s = pool_plain(pool, 8);
    for (int i = 0; i < 3; i++) CHECK_OK(folio_sequence_reserve(s, 7, 0, NULL));
    CHECK_OK(folio_sequence_release_window(s));
    check_window(s, 8, 4, 3);
    CHECK_INT(block_at(s, 1, 0), FOLIO_NO_BLOCK);
    folio_tokens some = pool_tokens(pool_counting_ids(), 17);
    CHECK_OK(folio_sequence_commit(s, &some));
    CHECK_OK(folio_sequence_release_window(s));
    check_window(s, 17, 4, 3);
    CHECK_OK(folio_sequence_truncate(s, 17)); /* what is not committed can be taken back */
    folio_sequence_destroy(s);
}

/* Back to every length that is allowed, and on from there with blocks and slots of its own. */
TEST(sequence, truncate_within_a_window)
{
    const int64_t bs = 4;
    for (int64_t window = 1; window < 14; window++)
        for (int64_t to = 0; to <= 30; to++) {
            pool_rig r;
            const folio_layer_group groups[2] = {{.window = 0}, {.window = window}};
            REQUIRE_TEST(
                pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 40, .block_size = 4,
                                             .num_layer_groups = 2, .layer_groups = groups,
                                             .flags = FOLIO_POOL_CHECK)));
            folio_sequence *s = pool_plain(r.pool, 30);
            CHECK_OK(folio_sequence_release_window(s));
            bool allowed = may_go_back(s, to, bs, window);
            if (allowed) {
                int64_t slots[2 * 6];
                CHECK_OK(folio_sequence_truncate(s, to));
                CHECK_OK(folio_sequence_reserve(s, 6, 0, slots));
                CHECK_INT(pool_stats(r.pool).num_copies, 0);
                for (int g = 0; g < 2; g++)
                    for (int64_t j = 0; j < 6; j++) {
                        int32_t b = block_at(s, g, (to + j) / bs);
                        CHECK(b >= 0);
                        CHECK_INT(slots[g * 6 + j], b * bs + (to + j) % bs);
                    }
            } else {
                REFUSED_BY(r.pool, s, folio_sequence_truncate(s, to), FOLIO_ERR_ARGUMENT, "");
            }
            folio_sequence_destroy(s);
            CHECK_INT(pool_stats(r.pool).num_free, 40);
            pool_rig_close(&r);
        }
}

/* However long it gets, it holds as many blocks as its window needs. */
POOL_TEST(sequence, a_long_generation_needs_few_blocks, .num_blocks = 5, .block_size = 16,
          .layer_groups = (folio_layer_group[]){{.window = 50}})
{
    folio_sequence *s = pool_sequence(pool, 0);
    for (int64_t len = 0; len < 20000; len++) {
        CHECK_OK(folio_sequence_reserve(s, 1, 0, NULL));
        CHECK_OK(folio_sequence_commit(s, NULL));
        int64_t first = pool_first_seen(len, 50) / 16;
        if (len % 97 == 0) CHECK_INT(pool_info(s).num_blocks, len / 16 + 1 - first);
    }
    CHECK(pool_stats(pool).peak_used <= 5);
    CHECK_INT(pool_info(s).len, 20000);
    folio_sequence_destroy(s);
}

/* A reserve that fails has not let its window go either; one that needs those blocks gets them. */
POOL_TEST(sequence, windows_and_full, .num_blocks = 4, .block_size = 4,
          .layer_groups = (folio_layer_group[]){{.window = 5}})
{
    folio_sequence *s = pool_plain(pool, 16); /* only block 3 is seen by the next token */
    CHECK_INT(pool_stats(pool).num_free, 0);
    REFUSED_BY(pool, s, folio_sequence_reserve(s, 13, 0, NULL), FOLIO_ERR_TOO_LARGE, "5|4");
    for (int i = 0; i < 4; i++) CHECK(block_at(s, 0, i) >= 0);
    CHECK_OK(folio_sequence_truncate(s, 1)); /* so it can still go back */
    CHECK_OK(folio_sequence_reserve(s, 15, 0, NULL));
    CHECK_OK(folio_sequence_commit(s, NULL));
    CHECK_OK(folio_sequence_reserve(s, 12, 0, NULL));
    CHECK_INT(pool_stats(pool).num_used, 4);
    folio_sequence_destroy(s);
}

/* What falls out of a window is no gain while others hold it, or a copy still reads it. */
POOL_TEST(sequence, windows_of_shared_blocks_and_full, .num_blocks = 4, .block_size = 4,
          .layer_groups = (folio_layer_group[]){{.window = 5}})
{
    folio_sequence *a = pool_plain(pool, 6), *b = pool_fork(a);
    folio_block_pair pairs[2];
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL)); /* a's second block is to be copied */
    CHECK_OK(folio_sequence_reserve(a, 6, 0, NULL));
    CHECK_OK(folio_sequence_commit(a, NULL)); /* token 12 sees keys from 8 on */
    CHECK_INT(pool_stats(pool).num_free, 0);
    REFUSED_BY(pool, a, folio_sequence_reserve(a, 1, 0, NULL), FOLIO_ERR_FULL, "");
    CHECK_INT(take(pool, 0, pairs, 2), 1);
    CHECK_OK(folio_sequence_reserve(a, 1, 0, NULL));
    folio_sequence_destroy(a);
    folio_sequence_destroy(b);
    CHECK_INT(pool_stats(pool).num_free, 4);
}

/* -------------------------------------------------------------------------------------- encoder */

TEST(sequence, encoder_blocks)
{
    for (int i = 0; i < COUNT_OF(block_sizes); i++) {
        int64_t bs = block_sizes[i], slots[33], n, blocks = blocks_for(33, bs);
        pool_rig r;
        REQUIRE_TEST(
            pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 60,
                                         .block_size = block_sizes[i], .flags = FOLIO_POOL_CHECK)));
        folio_sequence *a = pool_sequence(r.pool, 0);
        REFUSED_BY(r.pool, a, folio_sequence_reserve_encoder(a, 60 * bs + 1, 0, NULL),
                   FOLIO_ERR_TOO_LARGE, "61|60");
        CHECK_OK(folio_sequence_reserve_encoder(a, 33, 0, slots));
        const int32_t *table = pool_table(a, FOLIO_LAYER_GROUP_CROSS, &n);
        CHECK_INT(n, blocks);
        for (int64_t j = 0; j < 33; j++) CHECK_INT(slots[j], table[j / bs] * bs + j % bs);
        CHECK_INT(pool_info(a).encoder_len, 33);
        CHECK_INT(pool_info(a).encoder_committed_len, 0);
        CHECK_INT(pool_info(a).num_blocks, blocks);
        REFUSED_BY(r.pool, a, folio_sequence_reserve_encoder(a, 1, 0, NULL), FOLIO_ERR_ARGUMENT,
                   "encoder");
        CHECK_OK(folio_sequence_reserve(a, 2, 0, NULL));
        CHECK_OK(folio_sequence_commit(a, NULL));
        CHECK_INT(pool_info(a).encoder_committed_len, 33);
        CHECK_INT(pool_stats(r.pool).num_entries, 0); /* never in the prefix cache */
        folio_sequence *b = pool_fork(a);
        CHECK_INT(pool_info(b).encoder_len, 33);
        CHECK_INT(pool_info(b).encoder_committed_len, 33);
        CHECK_INT(pool_info(b).num_blocks, blocks + blocks_for(2, bs));
        table = pool_table(b, FOLIO_LAYER_GROUP_CROSS, NULL);
        CHECK(memcmp(table, pool_table(a, FOLIO_LAYER_GROUP_CROSS, NULL), 4 * (size_t)blocks) == 0);
        for (int64_t j = 0; j < blocks; j++)
            CHECK_INT(pool_state_of(r.pool, table[j]), FOLIO_BLOCK_SHARED);
        folio_sequence_destroy(a);
        CHECK_INT(pool_stats(r.pool).num_used, blocks + blocks_for(2, bs));
        CHECK_OK(folio_sequence_truncate(b, 0)); /* encoder tokens stay */
        CHECK_INT(pool_info(b).encoder_len, 33);
        CHECK_INT(pool_info(b).num_blocks, blocks);
        folio_sequence_destroy(b);
        CHECK_INT(pool_stats(r.pool).num_free, 60);
        pool_rig_close(&r);
    }
}

/* ------------------------------------------------------------------------------------- refusals */

POOL_TEST(sequence, commits_refused, .num_blocks = 20, .block_size = 4)
{
    int32_t ids[16];
    memcpy(ids, pool_counting_ids(), sizeof ids);
    folio_sequence *s = pool_sequence(pool, 0);
    pool_grow(s, ids, 6);
    CHECK_OK(folio_sequence_reserve(s, 4, 0, NULL));
    folio_tokens tokens = pool_tokens(ids, 11);
    REFUSED_BY(pool, s, folio_sequence_commit(s, &tokens), FOLIO_ERR_ARGUMENT, "11|10");
    tokens.num_tokens = 5;
    REFUSED_BY(pool, s, folio_sequence_commit(s, &tokens), FOLIO_ERR_ARGUMENT, "5|6");
    tokens.num_tokens = -1;
    REFUSED_BY(pool, s, folio_sequence_commit(s, &tokens), FOLIO_ERR_ARGUMENT, "-1");
    tokens = pool_tokens(NULL, 9); /* neither ids nor hash_ids */
    REFUSED_BY(pool, s, folio_sequence_commit(s, &tokens), FOLIO_ERR_ARGUMENT, "ids");
    tokens = pool_tokens(ids, 9);
    REFUSED_BY(pool, s, folio_sequence_commit(NULL, &tokens), FOLIO_ERR_ARGUMENT, "sequence");
    CHECK_OK(folio_sequence_commit(s, &tokens));
    CHECK_INT(pool_info(s).committed_len, 9);
    CHECK_INT(pool_info(s).len, 10);
    CHECK_INT(pool_stats(pool).num_entries, 2);
    CHECK_OK(folio_sequence_commit(s, &tokens)); /* again, with nothing new */
    CHECK_INT(pool_stats(pool).num_entries, 2);
    /* After a truncate other tokens may follow. */
    CHECK_OK(folio_sequence_truncate(s, 5));
    for (int i = 5; i < 16; i++) ids[i] += 50;
    pool_grow(s, ids, 12);
    CHECK_INT(pool_stats(pool).num_entries, 4);
    folio_sequence_destroy(s);
}

POOL_TEST(sequence, calls_refused, .num_blocks = 20, .block_size = 4, .num_layer_groups = 2)
{
    folio_sequence *s = pool_plain(pool, 6), *out = NOWHERE;
    folio_sequence_info info = {.struct_size = sizeof info};
    const int32_t *table;
    int64_t n;
    REFUSED_BY(pool, s, folio_sequence_get_info(NULL, &info), FOLIO_ERR_ARGUMENT, "sequence");
    REFUSED_BY(pool, s, folio_sequence_get_info(s, NULL), FOLIO_ERR_ARGUMENT, "info");
    REFUSED_BY(pool, s, folio_sequence_reserve(NULL, 1, 0, NULL), FOLIO_ERR_ARGUMENT, "sequence");
    REFUSED_BY(pool, s, folio_sequence_reserve(s, -1, 0, NULL), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED_BY(pool, s, folio_sequence_reserve(s, 1, 2u, NULL), FOLIO_ERR_ARGUMENT, "flags");
    REFUSED_BY(pool, s, folio_sequence_reserve_encoder(NULL, 1, 0, NULL), FOLIO_ERR_ARGUMENT,
               "sequence");
    REFUSED_BY(pool, s, folio_sequence_reserve_encoder(s, -1, 0, NULL), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED_BY(pool, s, folio_sequence_reserve_encoder(s, 1, 2u, NULL), FOLIO_ERR_ARGUMENT,
               "flags");
    REFUSED_BY(pool, s, folio_sequence_truncate(NULL, 0), FOLIO_ERR_ARGUMENT, "sequence");
    REFUSED_BY(pool, s, folio_sequence_truncate(s, -1), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED_BY(pool, s, folio_sequence_truncate(s, 7), FOLIO_ERR_ARGUMENT, "7|6");
    REFUSED_BY(pool, s, folio_sequence_release_window(NULL), FOLIO_ERR_ARGUMENT, "sequence");
    REFUSED_BY(pool, s, folio_sequence_get_table(NULL, 0, &table, &n), FOLIO_ERR_ARGUMENT,
               "sequence");
    REFUSED_BY(pool, s, folio_sequence_get_table(s, 2, &table, &n), FOLIO_ERR_ARGUMENT, "group|2");
    REFUSED_BY(pool, s, folio_sequence_get_table(s, -2, &table, &n), FOLIO_ERR_ARGUMENT,
               "group|-2");
    REFUSED_BY(pool, s, folio_sequence_get_table(s, 0, NULL, &n), FOLIO_ERR_ARGUMENT, "NULL");
    REFUSED_BY(pool, s, folio_sequence_get_table(s, 0, &table, NULL), FOLIO_ERR_ARGUMENT, "NULL");
    REFUSED_BY(pool, s, folio_sequence_preempt(NULL, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL),
               FOLIO_ERR_ARGUMENT, "sequence");
    REFUSED_BY(pool, s, folio_sequence_preempt(s, (folio_preemption)7, NULL, NULL),
               FOLIO_ERR_ARGUMENT, "7");
    REFUSED_BY(pool, s, folio_sequence_fork(NULL, &out), FOLIO_ERR_ARGUMENT, "sequence");
    CHECK(out == NULL);
    REFUSED_BY(pool, s, folio_sequence_fork(s, NULL), FOLIO_ERR_ARGUMENT, "out");
    CHECK_OK(folio_sequence_reserve(s, 1, 0, NULL));
    out = NOWHERE; /* not all of it is committed */
    REFUSED_BY(pool, s, folio_sequence_fork(s, &out), FOLIO_ERR_ARGUMENT, "1|committed");
    CHECK(out == NULL);
    int64_t matched = -7;
    folio_tokens tokens = pool_tokens(pool_counting_ids(), 8);
    REFUSED_BY(pool, s, folio_sequence_match(s, &tokens, &matched, NULL), FOLIO_ERR_ARGUMENT, "7");
    CHECK_OK(folio_sequence_truncate(s, 0));
    REFUSED_BY(pool, s, folio_sequence_match(s, NULL, &matched, NULL), FOLIO_ERR_ARGUMENT,
               "tokens");
    REFUSED_BY(pool, s, folio_sequence_match(NULL, &tokens, &matched, NULL), FOLIO_ERR_ARGUMENT,
               "sequence");
    tokens.num_tokens = -1;
    REFUSED_BY(pool, s, folio_sequence_match(s, &tokens, &matched, NULL), FOLIO_ERR_ARGUMENT, "-1");
    tokens = pool_tokens(NULL, 8);
    REFUSED_BY(pool, s, folio_sequence_match(s, &tokens, &matched, NULL), FOLIO_ERR_ARGUMENT,
               "ids");
    folio_sequence_destroy(s);
}

/* Copies by the pool itself need a cache in their group; the refused call keeps them. */
POOL_TEST(sequence, copies_without_a_cache, .num_blocks = 20, .block_size = 4)
{
    folio_sequence *a = pool_plain(pool, 6), *b = pool_fork(a);
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
    REFUSED_BY(pool, b, folio_pool_run_copies(pool, NULL), ANY_REFUSAL, "cache");
    folio_block_pair pairs[2];
    CHECK_INT(take(pool, 0, pairs, 2), 1);
    folio_sequence_destroy(a);
    folio_sequence_destroy(b);
}
