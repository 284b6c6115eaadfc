/*
 * test_pool.c: the pool itself: blocks by hand, counts, the map of states, the watermark, every
 * argument that is refused, struct sizes, memory that runs out, the lock. Sequences and the prefix
 * cache have suites of their own; random calls and threads are judged in test_pool_fuzz.c.
 */
#include "pool/pool_rig.h"

#include <pthread.h>
#include <time.h>

/* ------------------------------------------------------------------------------- blocks by hand */

POOL_TEST(pool, a_new_pool_is_free, .num_blocks = 7, .block_size = 16)
{
    folio_pool_stats s = pool_stats(pool);
    folio_pool_stats expected = {.struct_size = sizeof s, .num_blocks = 7, .num_free = 7};
    CHECK(memcmp(&s, &expected, sizeof s) == 0);
    for (int b = 0; b < 7; b++) CHECK_INT(pool_state_of(pool, b), FOLIO_BLOCK_FREE);
    CHECK_INT(r->num_events, 0);
    folio_pool_destroy(NULL);
    folio_sequence_destroy(NULL);
    folio_transfer_destroy(NULL);
}

POOL_TEST(pool, every_block_is_handed_out_once, .num_blocks = 5000, .block_size = 1)
{
    enum { N = 5000 };
    static int32_t blocks[N + 1];
    static uint8_t seen[N];
    for (int round = 0; round < 3; round++) {
        memset(seen, 0, sizeof seen);
        int64_t got = 0;
        for (int64_t n = 0; got + n <= N; got += n, n = (n + 7) % 100)
            CHECK_OK(folio_pool_alloc(pool, n, blocks + got));
        CHECK_OK(folio_pool_alloc(pool, N - got, blocks + got));
        for (int i = 0; i < N; i++) {
            CHECK(blocks[i] >= 0 && blocks[i] < N);
            if (blocks[i] >= 0 && blocks[i] < N) CHECK_INT(seen[blocks[i]]++, 0);
        }
        CHECK_INT(pool_stats(pool).num_free, 0);
        REFUSED_BY(pool, NULL, folio_pool_alloc(pool, 1, &blocks[N]), FOLIO_ERR_FULL, "1");
        CHECK_OK(folio_pool_alloc(pool, 0, &blocks[N]));
        CHECK_OK(folio_pool_release(pool, N, blocks));
        CHECK_INT(pool_stats(pool).num_free, N);
        CHECK_INT(pool_stats(pool).allocations, (int64_t)N * (round + 1));
    }
}

POOL_TEST(pool, references_are_counted, .num_blocks = 8, .block_size = 16)
{
    int32_t b[3];
    CHECK_OK(folio_pool_alloc(pool, 3, b));
    CHECK_OK(folio_pool_retain(pool, 2, b));
    const int32_t twice[3] = {b[0], b[1], b[0]};
    CHECK_OK(folio_pool_retain(pool, 3, twice)); /* b0: 4, b1: 3, b2: 1 */
    folio_pool_stats s = pool_stats(pool);
    CHECK_INT(s.num_used, 3);
    CHECK_INT(s.num_shared, 2);
    CHECK_INT(s.num_free, 5);
    CHECK_INT(s.num_cached, 0);
    CHECK_INT(s.allocations, 3);
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_SHARED);
    CHECK_INT(pool_state_of(pool, b[2]), FOLIO_BLOCK_USED);
    CHECK_OK(folio_pool_release(pool, 3, twice)); /* 2, 2, 1 */
    CHECK_INT(pool_stats(pool).num_shared, 2);
    CHECK_OK(folio_pool_release(pool, 3, b)); /* 1, 1, 0 */
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_USED);
    CHECK_INT(pool_state_of(pool, b[1]), FOLIO_BLOCK_USED);
    CHECK_INT(pool_state_of(pool, b[2]), FOLIO_BLOCK_FREE);
    CHECK_OK(folio_pool_release(pool, 2, b));
    s = pool_stats(pool);
    CHECK_INT(s.num_free, 8);
    CHECK_INT(s.peak_used, 3);
}

POOL_TEST(pool, the_last_one_freed_comes_first, .num_blocks = 9, .block_size = 4)
{
    int32_t b[6], again[3];
    CHECK_OK(folio_pool_alloc(pool, 6, b));
    const int order[3] = {4, 0, 2};
    for (int i = 0; i < 3; i++) CHECK_OK(folio_pool_release(pool, 1, &b[order[i]]));
    for (int i = 0; i < 3; i++) CHECK_OK(folio_pool_alloc(pool, 1, &again[i]));
    for (int i = 0; i < 3; i++) CHECK_INT(again[i], b[order[2 - i]]);
    CHECK_OK(folio_pool_release(pool, 6, b));
}

POOL_TEST(pool, full_is_all_or_nothing, .num_blocks = 8, .block_size = 16)
{
    int32_t b[8], out[4];
    CHECK_OK(folio_pool_alloc(pool, 5, b));
    memset(out, 0xFF, sizeof out);
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, 4, out), FOLIO_ERR_FULL, "4|3");
    CHECK(support_is_poison(out, sizeof out));
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, 8, out), FOLIO_ERR_FULL, "8|3");
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, 9, out), FOLIO_ERR_TOO_LARGE, "9|has 8 blocks");
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, INT64_MAX, out), FOLIO_ERR_TOO_LARGE, "");
    CHECK_OK(folio_pool_alloc(pool, 3, b + 5));
    CHECK_INT(pool_stats(pool).peak_used, 8);
    CHECK_OK(folio_pool_release(pool, 8, b));
    CHECK_OK(folio_pool_alloc(pool, 2, b));
    folio_pool_stats s = pool_stats(pool);
    CHECK_INT(s.peak_used, 8); /* stays */
    CHECK_INT(s.num_used, 2);
    CHECK_INT(s.allocations, 10);
    CHECK_INT(s.evictions, 0);
    CHECK_OK(folio_pool_release(pool, 2, b));
}

POOL_TEST(pool, a_block_is_not_released_twice, .num_blocks = 6, .block_size = 16)
{
    int32_t b[3];
    CHECK_OK(folio_pool_alloc(pool, 3, b));
    CHECK_OK(folio_pool_retain(pool, 1, &b[2])); /* 1, 1, 2 */
    const int32_t once[4] = {b[2], b[0], b[1], b[0]};
    REFUSED_BY(pool, NULL, folio_pool_release(pool, 4, once), FOLIO_ERR_ARGUMENT, "");
    const int32_t thrice[3] = {b[2], b[2], b[2]};
    REFUSED_BY(pool, NULL, folio_pool_release(pool, 3, thrice), FOLIO_ERR_ARGUMENT, "");
    CHECK_OK(folio_pool_release(pool, 2, thrice)); /* two of them are there */
    CHECK_INT(pool_state_of(pool, b[2]), FOLIO_BLOCK_FREE);
    char number[16];
    snprintf(number, sizeof number, "%d", b[2]);
    REFUSED_BY(pool, NULL, folio_pool_release(pool, 1, &b[2]), FOLIO_ERR_ARGUMENT, number);
    REFUSED_BY(pool, NULL, folio_pool_retain(pool, 1, &b[2]), FOLIO_ERR_ARGUMENT, number);
    const int32_t good_and_free[3] = {b[0], b[1], b[2]};
    REFUSED_BY(pool, NULL, folio_pool_release(pool, 3, good_and_free), FOLIO_ERR_ARGUMENT, number);
    REFUSED_BY(pool, NULL, folio_pool_retain(pool, 3, good_and_free), FOLIO_ERR_ARGUMENT, number);
    for (int i = 0; i < 2; i++) CHECK_INT(pool_state_of(pool, b[i]), FOLIO_BLOCK_USED);
    CHECK_OK(folio_pool_release(pool, 2, b));
}

/* What only the prefix cache knows is not held: it cannot be retained or released. */
POOL_TEST(pool, a_cached_block_has_no_holder, .num_blocks = 6, .block_size = 2)
{
    const int32_t ids[4] = {1, 2, 3, 4};
    folio_sequence *s = pool_sequence(pool, 0);
    pool_grow(s, ids, 4);
    int32_t b[2];
    memcpy(b, pool_table(s, 0, NULL), sizeof b);
    CHECK_OK(folio_pool_retain(pool, 1, b));
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_SHARED);
    folio_sequence_destroy(s);
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_USED);
    CHECK_INT(pool_state_of(pool, b[1]), FOLIO_BLOCK_CACHED);
    REFUSED_BY(pool, NULL, folio_pool_retain(pool, 1, &b[1]), FOLIO_ERR_ARGUMENT, "");
    REFUSED_BY(pool, NULL, folio_pool_release(pool, 1, &b[1]), FOLIO_ERR_ARGUMENT, "");
    CHECK_OK(folio_pool_release(pool, 1, b)); /* its last reference; it stays known */
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_CACHED);
    CHECK_INT(pool_stats(pool).num_cached, 2);
    CHECK_INT(pool_stats(pool).num_free, 4);
}

/* A caller may hold any block of a sequence, also when the ones before it are only cached. */
POOL_TEST(pool, a_later_block_held_by_hand, .num_blocks = 6, .block_size = 2,
          .flags = FOLIO_POOL_CHECK)
{
    const int32_t ids[6] = {1, 2, 3, 4, 5, 6};
    folio_sequence *s = pool_sequence(pool, 0);
    pool_grow(s, ids, 6);
    int32_t b[3], rest[5];
    memcpy(b, pool_table(s, 0, NULL), sizeof b);
    CHECK_OK(folio_pool_retain(pool, 1, &b[1]));
    folio_sequence_destroy(s);
    CHECK_INT(pool_state_of(pool, b[0]), FOLIO_BLOCK_CACHED);
    CHECK_INT(pool_state_of(pool, b[1]), FOLIO_BLOCK_USED);
    CHECK_INT(pool_state_of(pool, b[2]), FOLIO_BLOCK_CACHED);
    CHECK_OK(folio_pool_check(pool));
    CHECK_OK(folio_pool_alloc(pool, 5, rest)); /* all that are available */
    CHECK_OK(folio_pool_check(pool));
    CHECK_OK(folio_pool_release(pool, 5, rest));
    CHECK_OK(folio_pool_release(pool, 1, &b[1]));
    CHECK_OK(folio_pool_check(pool));
    CHECK_INT(pool_matches(pool, 0, ids, 6), 0); /* its first block is gone */
    CHECK_OK(folio_pool_alloc(pool, 5, rest));
    CHECK_OK(folio_pool_alloc(pool, 1, b));
    CHECK_INT(pool_stats(pool).num_used, 6);
    CHECK_INT(pool_stats(pool).num_entries, 0);
    CHECK_OK(folio_pool_release(pool, 5, rest));
    CHECK_OK(folio_pool_release(pool, 1, b));
}

/* ------------------------------------------------------------------------------- map, watermark */

POOL_TEST(pool, the_map_shows_every_state, .num_blocks = 40, .block_size = 2)
{
    enum { N = 40 };
    const int32_t ids[6] = {1, 2, 3, 4, 5, 6};
    folio_sequence *s = pool_sequence(pool, 0), *fork = NULL;
    pool_grow(s, ids, 6);
    uint8_t expected[N] = {0}, map[N + 2];
    for (int i = 0; i < 3; i++) expected[pool_table(s, 0, NULL)[i]] = FOLIO_BLOCK_CACHED;
    folio_sequence_destroy(s);
    s = pool_sequence(pool, 1);
    pool_grow(s, ids, 5);
    CHECK_OK(folio_sequence_fork(s, &fork));
    for (int i = 0; i < 3; i++) expected[pool_table(s, 0, NULL)[i]] = FOLIO_BLOCK_SHARED;
    int32_t by_hand[4];
    CHECK_OK(folio_pool_alloc(pool, 4, by_hand));
    for (int i = 0; i < 4; i++) expected[by_hand[i]] = FOLIO_BLOCK_USED;
    /* every range */
    for (int first = 0; first <= N; first++)
        for (int n = 0; first + n <= N; n++) {
            memset(map, 0xEE, sizeof map);
            CHECK_OK(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, first, n, map + 1));
            CHECK(map[0] == 0xEE && map[n + 1] == 0xEE);
            CHECK(memcmp(map + 1, expected + first, (size_t)n) == 0);
        }
    folio_pool_stats st = pool_stats(pool);
    CHECK_INT(st.num_cached, 3);
    CHECK_INT(st.num_shared, 3);
    CHECK_INT(st.num_used, 7);
    CHECK_INT(st.num_free, N - 10);
    CHECK_INT(st.num_sequences, 2);
    CHECK_OK(folio_pool_release(pool, 4, by_hand));
    folio_sequence_destroy(fork);
    folio_sequence_destroy(s);
}

POOL_TEST(pool, the_map_has_bounds, .num_blocks = 10, .block_size = 2)
{
    uint8_t map[16];
    memset(map, 0xFF, sizeof map);
    const int64_t bad[][2] = {{0, 11}, {10, 1},        {11, 0},        {-1, 1},       {0, -1},
                              {5, 6},  {3, INT64_MAX}, {INT64_MAX, 2}, {INT64_MIN, 1}};
    for (int i = 0; i < COUNT_OF(bad); i++)
        REFUSED(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, bad[i][0], bad[i][1], map),
                FOLIO_ERR_ARGUMENT, "");
    REFUSED(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, 5, 6, map), FOLIO_ERR_ARGUMENT,
            "10");
    REFUSED(folio_pool_get_block_states(pool, FOLIO_TIER_HOST, 0, 1, map), FOLIO_ERR_ARGUMENT, "");
    REFUSED(folio_pool_get_block_states(pool, FOLIO_TIER_DISK, 0, 1, map), FOLIO_ERR_ARGUMENT, "");
    REFUSED(folio_pool_get_block_states(pool, (folio_tier)3, 0, 1, map), FOLIO_ERR_ARGUMENT, "");
    REFUSED(folio_pool_get_block_states(pool, (folio_tier)-1, 0, 1, map), FOLIO_ERR_ARGUMENT, "");
    REFUSED(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, 0, 1, NULL), FOLIO_ERR_ARGUMENT,
            "states");
    REFUSED(folio_pool_get_block_states(NULL, FOLIO_TIER_DEVICE, 0, 1, map), FOLIO_ERR_ARGUMENT,
            "pool");
    CHECK(support_is_poison(map, sizeof map));
}

/* ADMIT leaves the watermark; without it a sequence may take the last block. */
POOL_TEST(pool, the_watermark, .num_blocks = 20, .block_size = 4, .num_layer_groups = 2,
          .layer_groups = (folio_layer_group[]){{.window = 0}, {.window = 0}}, .watermark = 6)
{
    folio_sequence *a = pool_sequence(pool, 0), *b = pool_sequence(pool, 0);
    REFUSED_BY(pool, NULL, folio_sequence_reserve(a, 29, FOLIO_RESERVE_ADMIT, NULL),
               FOLIO_ERR_TOO_LARGE, "16|6|20");
    CHECK_INT(pool_info(a).len, 0);
    CHECK_OK(folio_sequence_reserve(a, 28, FOLIO_RESERVE_ADMIT, NULL)); /* 14 blocks, 6 left */
    REFUSED_BY(pool, NULL, folio_sequence_reserve(b, 1, FOLIO_RESERVE_ADMIT, NULL), FOLIO_ERR_FULL,
               "");
    CHECK_OK(folio_sequence_reserve(b, 12, 0, NULL));
    CHECK_INT(pool_stats(pool).num_free, 0);
    REFUSED_BY(pool, NULL, folio_sequence_reserve(a, 1, 0, NULL), FOLIO_ERR_FULL, "");
    /* Cached blocks are available too. */
    int32_t ids[28];
    for (int i = 0; i < 28; i++) ids[i] = i;
    pool_grow(a, ids, 28);
    folio_sequence_destroy(a);
    CHECK_INT(pool_stats(pool).num_cached, 14);
    CHECK_OK(folio_sequence_reserve(b, 16, FOLIO_RESERVE_ADMIT, NULL)); /* 8 of 14 */
    REFUSED_BY(pool, NULL, folio_sequence_reserve(b, 1, FOLIO_RESERVE_ADMIT, NULL),
               FOLIO_ERR_TOO_LARGE, "16|6|20");
    CHECK_INT(pool_stats(pool).evictions, 8);
    int32_t by_hand[6];
    CHECK_OK(folio_pool_alloc(pool, 6, by_hand)); /* by hand there is no watermark */
    CHECK_OK(folio_pool_release(pool, 6, by_hand));
    CHECK_OK(folio_sequence_reserve(b, 12, 0, NULL));
    folio_sequence_destroy(b);
}

/* Encoder tokens are admitted by the same rule. */
POOL_TEST(pool, the_watermark_of_encoder_tokens, .num_blocks = 10, .block_size = 4, .watermark = 3)
{
    folio_sequence *a = pool_sequence(pool, 0);
    REFUSED_BY(pool, NULL, folio_sequence_reserve_encoder(a, 29, FOLIO_RESERVE_ADMIT, NULL),
               FOLIO_ERR_TOO_LARGE, "8|3|10");
    CHECK_OK(folio_sequence_reserve_encoder(a, 28, FOLIO_RESERVE_ADMIT, NULL));
    CHECK_INT(pool_stats(pool).num_free, 3);
    folio_sequence_destroy(a);
}

/* A block belongs to one group at a time: all tables of a sequence are disjoint. */
POOL_TEST(pool, groups_share_one_numbering, .num_blocks = FOLIO_MAX_LAYER_GROUPS * 3,
          .block_size = 4, .num_layer_groups = FOLIO_MAX_LAYER_GROUPS, .flags = FOLIO_POOL_CHECK,
          .layer_groups = (folio_layer_group[FOLIO_MAX_LAYER_GROUPS]){
              [1].window = 1, [8].window = 8})
{
    enum { G = FOLIO_MAX_LAYER_GROUPS };
    folio_sequence *s = pool_sequence(pool, 0);
    int64_t slots[G][9];
    CHECK_OK(folio_sequence_reserve(s, 9, 0, &slots[0][0]));
    uint8_t seen[G * 3] = {0};
    for (int g = 0; g < G; g++) {
        int64_t n;
        const int32_t *table = pool_table(s, g, &n);
        CHECK_INT(n, 3);
        for (int i = 0; i < 9; i++) CHECK_INT(slots[g][i], table[i / 4] * 4 + i % 4);
        for (int i = 0; i < 3; i++) CHECK_INT(seen[table[i]]++, 0);
    }
    CHECK_INT(pool_stats(pool).num_used, G * 3);
    CHECK_INT(pool_info(s).num_blocks, G * 3);
    folio_sequence_destroy(s);
    CHECK_INT(pool_stats(pool).num_free, G * 3);
}

/* ------------------------------------------------------------------------------------- refusals */

TEST(pool, descriptions_refused)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    const folio_layer_group below[1] = {{.window = -1}};
    char long_name[300];
    memset(long_name, 'x', sizeof long_name);
    long_name[299] = 0;
    const folio_pool_desc good = {.struct_size = sizeof good, .num_blocks = 4, .block_size = 16};
    const folio_kv_passport long_model = {.struct_size = sizeof long_model, .model = long_name};
    folio_pool_desc bad[16];
    const char *words[16];
    int n = 0;
#define BAD(text, ...)                                                                             \
    do {                                                                                           \
        bad[n] = good;                                                                             \
        bad[n].__VA_ARGS__;                                                                        \
        words[n++] = text;                                                                         \
    } while (0)
    BAD("num_blocks|0", num_blocks = 0);
    BAD("num_blocks|-3", num_blocks = -3);
    BAD("num_blocks|2147483648", num_blocks = INT64_C(1) << 31);
    BAD("block_size|0", block_size = 0);
    BAD("block_size|-1", block_size = -1);
    BAD("block_size|4097", block_size = 4097);
    BAD("num_layer_groups|-1", num_layer_groups = -1);
    BAD("num_layer_groups|17", num_layer_groups = FOLIO_MAX_LAYER_GROUPS + 1);
    BAD("window|-1", layer_groups = below);
    BAD("watermark|-1", watermark = -1);
    BAD("flags", flags = 0x80);
    BAD("host_blocks|-5", host_blocks = -5);
    BAD("", host_blocks = 2);                      /* without a cache    */
    BAD("", store_path = "/nowhere/of/that/name"); /* the same           */
    BAD("model", passport = &long_model);
#undef BAD
    for (int i = 0; i < n; i++) {
        folio_pool *pool = NOWHERE;
        REFUSED(folio_pool_create(ctx, &bad[i], &pool), FOLIO_ERR_ARGUMENT, words[i]);
        CHECK_MSG(pool == NULL, "case %d", i);
    }
    folio_pool *pool = NOWHERE;
    REFUSED(folio_pool_create(NULL, &good, &pool), FOLIO_ERR_ARGUMENT, "ctx");
    CHECK(pool == NULL);
    pool = NOWHERE;
    REFUSED(folio_pool_create(ctx, NULL, &pool), FOLIO_ERR_ARGUMENT, "desc");
    CHECK(pool == NULL);
    REFUSED(folio_pool_create(ctx, &good, NULL), FOLIO_ERR_ARGUMENT, "out");
    folio_context_destroy(ctx);
}

/* A group's cache has the pool's blocks. */
TEST(pool, caches_that_do_not_fit)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    const int64_t num_blocks[2] = {6, 5};
    for (int i = 0; i < 4; i++) {
        folio_kv_cache_desc kv = FOLIO_WITH(
            folio_kv_cache_desc, .num_blocks = num_blocks[i % 2], .num_layers = 1,
            .block_size = i < 2 ? 16 : 8, .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
        folio_kv_cache *cache = NULL;
        CHECK_OK(folio_kv_cache_create(ctx, &kv, &cache));
        const folio_layer_group groups[1] = {{.cache = cache}};
        folio_pool_desc desc =
            FOLIO_WITH(folio_pool_desc, .num_blocks = 6, .block_size = 16, .layer_groups = groups);
        for (int cross = 0; cross < 2; cross++) {
            folio_pool *pool = NOWHERE;
            if (cross) desc.cross_cache = cache, desc.layer_groups = NULL;
            if (i == 0) {
                CHECK_OK(folio_pool_create(ctx, &desc, &pool));
                folio_pool_destroy(pool);
            } else {
                REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "");
                CHECK(pool == NULL);
            }
        }
        folio_kv_cache_destroy(cache);
    }
    folio_context_destroy(ctx);
}

TEST(pool, defaults)
{
    pool_rig r;
    REQUIRE_TEST(pool_rig_open(&r, (folio_pool_desc){.num_blocks = 6, .block_size = 4096}));
    folio_sequence *s = NULL;
    CHECK_OK(folio_sequence_create(r.pool, NULL, &s));
    CHECK_OK(folio_sequence_reserve(s, 4097, 0, NULL));
    CHECK_INT(pool_info(s).salt, 0);
    CHECK_INT(pool_info(s).num_blocks, 2); /* one group */
    const int32_t *table;
    int64_t n;
    REFUSED(folio_sequence_get_table(s, 1, &table, &n), FOLIO_ERR_ARGUMENT, "group|1");
    folio_sequence_destroy(s);
    pool_rig_close(&r);
    REQUIRE_TEST(pool_rig_open(
        &r, (folio_pool_desc){.num_blocks = 6, .block_size = 1, .num_layer_groups = 3}));
    s = pool_sequence(r.pool, 0); /* groups NULL: no windows */
    for (int i = 0; i < 2; i++) {
        CHECK_OK(folio_sequence_reserve(s, 1, 0, NULL));
        CHECK_OK(folio_sequence_commit(s, NULL));
    }
    CHECK_INT(pool_info(s).num_blocks, 6);
    folio_sequence_destroy(s);
    pool_rig_close(&r);
}

POOL_TEST(pool, blocks_refused, .num_blocks = 10, .block_size = 16)
{
    int32_t b[4];
    CHECK_OK(folio_pool_alloc(pool, 2, b));
    REFUSED_BY(pool, NULL, folio_pool_alloc(NULL, 1, b + 2), FOLIO_ERR_ARGUMENT, "pool");
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, -1, b + 2), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED_BY(pool, NULL, folio_pool_alloc(pool, 1, NULL), FOLIO_ERR_ARGUMENT, "blocks");
    folio_status (*const calls[2])(folio_pool *, int64_t, const int32_t *) = {folio_pool_retain,
                                                                              folio_pool_release};
    for (int i = 0; i < 2; i++) {
        const int32_t above[2] = {b[0], 10}, below[2] = {b[0], -1};
        REFUSED_BY(pool, NULL, calls[i](NULL, 1, b), FOLIO_ERR_ARGUMENT, "pool");
        REFUSED_BY(pool, NULL, calls[i](pool, -2, b), FOLIO_ERR_ARGUMENT, "-2");
        REFUSED_BY(pool, NULL, calls[i](pool, 2, NULL), FOLIO_ERR_ARGUMENT, "blocks");
        REFUSED_BY(pool, NULL, calls[i](pool, 2, above), FOLIO_ERR_ARGUMENT, "1|10");
        REFUSED_BY(pool, NULL, calls[i](pool, 2, below), FOLIO_ERR_ARGUMENT, "1|-1|10");
        CHECK_OK(calls[i](pool, 0, b));
    }
    CHECK_INT(pool_stats(pool).num_shared, 0);
    CHECK_OK(folio_pool_release(pool, 2, b));
}

POOL_TEST(pool, other_calls_refused, .num_blocks = 10, .block_size = 16, .num_layer_groups = 2)
{
    int64_t n = 77;
    folio_block_pair pairs[4];
    REFUSED(folio_pool_take_copies(NULL, 0, 4, pairs, &n), FOLIO_ERR_ARGUMENT, "pool");
    REFUSED(folio_pool_take_copies(pool, 2, 4, pairs, &n), FOLIO_ERR_ARGUMENT, "group|2");
    REFUSED(folio_pool_take_copies(pool, -2, 4, pairs, &n), FOLIO_ERR_ARGUMENT, "group|-2");
    REFUSED(folio_pool_take_copies(pool, 0, -1, pairs, &n), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED(folio_pool_take_copies(pool, 0, 4, NULL, &n), FOLIO_ERR_ARGUMENT, "pairs");
    REFUSED(folio_pool_take_copies(pool, 0, 4, pairs, NULL), FOLIO_ERR_ARGUMENT, "num_pairs");
    CHECK_OK(folio_pool_take_copies(pool, 1, 4, pairs, &n));
    CHECK_INT(n, 0);
    REFUSED(folio_pool_run_copies(NULL, NULL), FOLIO_ERR_ARGUMENT, "pool");
    folio_pool_stats stats = {.struct_size = sizeof stats};
    REFUSED(folio_pool_get_stats(NULL, &stats), FOLIO_ERR_ARGUMENT, "pool");
    REFUSED(folio_pool_get_stats(pool, NULL), FOLIO_ERR_ARGUMENT, "stats");
    REFUSED(folio_pool_check(NULL), FOLIO_ERR_ARGUMENT, "pool");
    REFUSED(folio_pool_forget(NULL), FOLIO_ERR_ARGUMENT, "pool");
    folio_sequence *s = NOWHERE;
    REFUSED_BY(pool, NULL, folio_sequence_create(NULL, NULL, &s), FOLIO_ERR_ARGUMENT, "pool");
    CHECK(s == NULL);
    REFUSED_BY(pool, NULL, folio_sequence_create(pool, NULL, NULL), FOLIO_ERR_ARGUMENT, "out");
    folio_sequence_desc desc = {.struct_size = sizeof desc, .max_tokens = -1};
    s = NOWHERE;
    REFUSED_BY(pool, NULL, folio_sequence_create(pool, &desc, &s), FOLIO_ERR_ARGUMENT,
               "max_tokens|-1");
    CHECK(s == NULL);
}

/* --------------------------------------------------------------------------------- struct sizes */

typedef struct {
    folio_context *ctx;
    folio_pool *pool;
    folio_sequence *empty;
} sized_world;

SIZED_MAKE(sized_pool, sized_world, folio_pool, folio_pool_create(w->ctx, arg, &made))
SIZED_MAKE(sized_sequence, sized_world, folio_sequence, folio_sequence_create(w->pool, arg, &made))
SIZED_CALL(sized_match, sized_world, folio_sequence_match(w->empty, arg, NULL, NULL))
SIZED_CALL(sized_stats, sized_world, folio_pool_get_stats(w->pool, arg))
SIZED_CALL(sized_info, sized_world, folio_sequence_get_info(w->empty, arg))

static folio_status sized_commit(void *world, void *arg)
{
    sized_world *w = world;
    folio_sequence *s = pool_sequence(w->pool, 0);
    CHECK_OK(folio_sequence_reserve(s, 3, 0, NULL));
    folio_status status = folio_sequence_commit(s, arg);
    folio_sequence_destroy(s);
    return status;
}

static folio_status sized_run(void *world, void *arg)
{
    sized_world *w = world;
    folio_sequence *s = pool_sequence(w->pool, 0), *fork = NULL;
    CHECK_OK(folio_sequence_reserve(s, 3, 0, NULL));
    CHECK_OK(folio_sequence_commit(s, NULL));
    CHECK_OK(folio_sequence_fork(s, &fork));
    CHECK_OK(folio_sequence_reserve(fork, 1, 0, NULL));
    folio_status status = folio_pool_run_copies(w->pool, arg);
    CHECK_INT(pool_stats(w->pool).num_copies, status == FOLIO_OK ? 0 : 1);
    folio_sequence_destroy(s);
    folio_sequence_destroy(fork);
    return status;
}

static folio_status sized_batch(void *world, void *arg)
{
    sized_world *w = world;
    folio_sequence *s = pool_plain(w->pool, 3);
    folio_batch *batch = support_batch(w->ctx, 16);
    folio_status status = folio_batch_add_sequences(batch, 0, &s, 1, arg);
    folio_batch_destroy(batch);
    folio_sequence_destroy(s);
    return status;
}

static const int32_t three_ids[3] = {5, 6, 7};

static const support_sized sized_cases[] = {
    SIZED(folio_pool_desc, sized_pool, host_blocks, .num_blocks = 4, .block_size = 16),
    SIZED(folio_sequence_desc, sized_sequence, max_tokens, .salt = 3),
    SIZED(folio_tokens, sized_match, hash_ids, .num_tokens = 3, .ids = three_ids),
    SIZED(folio_tokens, sized_commit, hash_ids, .num_tokens = 3, .ids = three_ids),
    SIZED(folio_run, sized_run, stream, .stream = NULL),
    SIZED(folio_run, sized_batch, stream, .stream = NULL),
    FILLED(folio_pool_stats, sized_stats, num_copies),
    FILLED(folio_sequence_info, sized_info, matched_len),
};

TEST(pool, struct_sizes)
{
    pool_rig r;
    folio_context *ctx = support_context("reference", 1, NULL);
    const folio_kv_cache_desc kv =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 4, .num_layers = 1, .block_size = 16,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &kv, &cache));
    const folio_layer_group groups[1] = {{.cache = cache}};
    REQUIRE_TEST(pool_rig_open_on(
        &r, ctx, (folio_pool_desc){.num_blocks = 4, .block_size = 16, .layer_groups = groups}));
    r.caches[0] = cache;
    sized_world w = {r.ctx, r.pool, pool_sequence(r.pool, 0)};
    support_check_sizes(&w, sized_cases, COUNT_OF(sized_cases));
    folio_sequence_destroy(w.empty);
    pool_rig_close(&r);
}

/* ------------------------------------------------------------------------- memory that runs out */

typedef struct {
    folio_context *ctx;
    folio_kv_cache *caches[2];
    folio_pool *pool;
    folio_sequence *a, *b, *c;
    folio_batch *batch;
    int refusals;
} life;

/* All that can be seen of it. */
typedef struct {
    folio_pool_stats stats;
    folio_sequence_info info[3];
    folio_batch_info batch;
    uint8_t map[64];
} life_view;

static life_view look(const life *l)
{
    life_view v;
    memset(&v, 0, sizeof v);
    folio_sequence *const all[3] = {l->a, l->b, l->c};
    if (l->pool == NULL) return v;
    v.stats = pool_stats(l->pool);
    CHECK_OK(folio_pool_get_block_states(l->pool, FOLIO_TIER_DEVICE, 0, 64, v.map));
    for (int i = 0; i < 3; i++)
        if (all[i] != NULL) v.info[i] = pool_info(all[i]);
    v.batch.struct_size = sizeof v.batch;
    if (l->batch != NULL) CHECK_OK(folio_batch_get_info(l->batch, &v.batch));
    return v;
}

/* A call that finds no memory changes nothing, and succeeds when made again. */
#define TWICE(l, call)                                                                             \
    do {                                                                                           \
        life_view before_ = look(l);                                                               \
        support_mark_error();                                                                      \
        folio_status status_ = (call);                                                             \
        if (status_ == FOLIO_ERR_MEMORY) {                                                         \
            support_refused(__FILE__, __LINE__, #call, status_, FOLIO_ERR_MEMORY, "");             \
            (l)->refusals++;                                                                       \
            life_view after_ = look(l);                                                            \
            CHECK_MSG(memcmp(&before_, &after_, sizeof after_) == 0, "%s: changed", #call);        \
            if ((l)->pool != NULL) CHECK_OK(folio_pool_check((l)->pool));                          \
            status_ = (call);                                                                      \
        }                                                                                          \
        CHECK_MSG(status_ == FOLIO_OK, "%s: %s", #call, folio_last_error());                       \
        if (status_ != FOLIO_OK) return;                                                           \
    } while (0)

/* Groups that found memory are done; the others' copies still wait. */
static void run_copies_twice(life *l)
{
    int64_t waiting = pool_stats(l->pool).num_copies;
    folio_status status = folio_pool_run_copies(l->pool, NULL);
    if (status == FOLIO_ERR_MEMORY) {
        l->refusals++;
        int64_t left = pool_stats(l->pool).num_copies;
        CHECK(left > 0 && left <= waiting);
        CHECK_OK(folio_pool_check(l->pool));
        status = folio_pool_run_copies(l->pool, NULL);
    }
    CHECK_INT(status, FOLIO_OK);
    CHECK_INT(pool_stats(l->pool).num_copies, 0);
}

static void live_sequences(life *l)
{
    enum { LONG = 120 };
    int32_t ids[LONG];
    for (int i = 0; i < LONG; i++) ids[i] = i % 5;
    const folio_sequence_desc short_one = {.struct_size = sizeof short_one, .max_tokens = 4};
    TWICE(l, folio_sequence_create(l->pool, &short_one, &l->a));
    TWICE(l, folio_sequence_reserve_encoder(l->a, 9, 0, NULL));
    for (int n = 1; n < 60; n = 2 * n + 3) {
        TWICE(l, folio_sequence_reserve(l->a, n - pool_info(l->a).len, 0, NULL));
        folio_tokens tokens = pool_tokens(ids, n);
        TWICE(l, folio_sequence_commit(l->a, &tokens));
    }
    TWICE(l, folio_sequence_create(l->pool, NULL, &l->b));
    folio_tokens all = pool_tokens(ids, LONG);
    TWICE(l, folio_sequence_match(l->b, &all, NULL, NULL));
    CHECK(pool_info(l->b).len > 0);
    TWICE(l, folio_sequence_fork(l->a, &l->c));
    TWICE(l, folio_sequence_reserve(l->c, 2, 0, NULL)); /* a copy */
    CHECK(pool_stats(l->pool).num_copies > 0);
    TWICE(l, folio_sequence_reserve(l->b, 40, 0, NULL));
    run_copies_twice(l);
    TWICE(l, folio_sequence_truncate(l->b, pool_info(l->b).len - 17));
    TWICE(l, folio_sequence_release_window(l->c));
    folio_sequence *const some[3] = {l->a, l->b, l->c};
    const folio_batch_desc bd = {.struct_size = sizeof bd, .block_size = 4};
    TWICE(l, folio_batch_create(l->ctx, &bd, &l->batch));
    TWICE(l, folio_batch_add_sequences(l->batch, 0, some, 3, NULL));
    int32_t by_hand[5];
    TWICE(l, folio_pool_alloc(l->pool, 5, by_hand));
    TWICE(l, folio_pool_retain(l->pool, 5, by_hand));
    TWICE(l, folio_pool_release(l->pool, 5, by_hand));
    TWICE(l, folio_pool_release(l->pool, 5, by_hand));
    TWICE(l, folio_sequence_preempt(l->c, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
    TWICE(l, folio_pool_forget(l->pool));
}

static void live(life *l)
{
    const folio_layer_group groups[2] = {{.cache = l->caches[0]},
                                         {.window = 7, .cache = l->caches[1]}};
    const folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = 64, .block_size = 4, .num_layer_groups = 2,
                   .layer_groups = groups, .cross_cache = l->caches[0]);
    TWICE(l, folio_pool_create(l->ctx, &desc, &l->pool));
    live_sequences(l);
}

TEST(pool, memory_that_runs_out)
{
    int64_t n = 1;
    for (; n < 2000; n++) {
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        life l = {.ctx = support_context("reference", 1, &allocator)};
        REQUIRE_TEST(l.ctx != NULL);
        folio_kv_cache_desc kv =
            FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 64, .num_layers = 1, .block_size = 4,
                       .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
        for (int i = 0; i < 2; i++) CHECK_OK(folio_kv_cache_create(l.ctx, &kv, &l.caches[i]));
        counter.calls = 0;
        counter.fail_at = n;
        live(&l);
        bool failed = counter.calls >= n;
        counter.fail_at = 0;
        CHECK_INT(l.refusals, failed ? 1 : 0);
        if (l.pool != NULL) CHECK_OK(folio_pool_check(l.pool));
        folio_batch_destroy(l.batch);
        folio_sequence_destroy(l.a);
        folio_sequence_destroy(l.b);
        folio_sequence_destroy(l.c);
        if (l.pool != NULL) CHECK_INT(pool_stats(l.pool).num_free, 64);
        folio_pool_destroy(l.pool);
        for (int i = 0; i < 2; i++) folio_kv_cache_destroy(l.caches[i]);
        folio_context_destroy(l.ctx);
        CHECK_MSG(counter.live == 0 && counter.live_bytes == 0,
                  "allocation %lld fails: %lld are never freed", (long long)n,
                  (long long)counter.live);
        CHECK_INT(counter.faults, 0);
        if (!failed || test_failures() > 0) break;
    }
    CHECK(n > 5 && n < 2000);
}

/* -------------------------------------------------------------------------------------- threads */

enum { NUM_READS = 6 };

typedef struct {
    pool_rig r;
    folio_sequence *s;
    int read; /* which call */
    _Atomic bool ended;
    pthread_t thread;
} reader;

static void *read_pool(void *arg)
{
    reader *w = arg;
    uint8_t states[8];
    int32_t none;
    switch (w->read) {
    case 0: (void)pool_stats(w->r.pool); break;
    case 1:
        CHECK_OK(folio_pool_get_block_states(w->r.pool, FOLIO_TIER_DEVICE, 0, 8, states));
        break;
    case 2: CHECK_OK(folio_pool_check(w->r.pool)); break;
    case 3: (void)pool_info(w->s); break;
    case 4: (void)pool_table(w->s, 0, NULL); break;
    default: CHECK_OK(folio_pool_alloc(w->r.pool, 0, &none));
    }
    w->ended = true;
    return NULL;
}

/* The callback has the pool's lock: who calls meanwhile waits for it. */
static void start_reader(void *user, const folio_cache_event *event)
{
    reader *w = user;
    if (event->kind != FOLIO_EVENT_STORED) return;
    REQUIRE_TEST(pthread_create(&w->thread, NULL, read_pool, w) == 0);
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    CHECK_MSG(!w->ended, "call %d does not wait", w->read);
}

TEST(pool, every_call_waits_for_the_others)
{
    for (int read = 0; read < NUM_READS; read++) {
        reader w = {.read = read};
        REQUIRE_TEST(
            pool_rig_open(&w.r, FOLIO_WITH(folio_pool_desc, .num_blocks = 8, .block_size = 2,
                                           .on_event = start_reader, .event_user = &w)));
        w.s = pool_sequence(w.r.pool, 0);
        pool_grow(w.s, pool_counting_ids(), 2);
        pthread_join(w.thread, NULL);
        CHECK(w.ended);
        folio_sequence_destroy(w.s);
        pool_rig_close(&w.r);
    }
}
