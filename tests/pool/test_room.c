/*
 * test_room.c: "not now" and "never". FOLIO_ERR_FULL ends when others give their blocks back,
 * FOLIO_ERR_TOO_LARGE does not. And the size of a pool, which its caches know.
 */
#include "pool/generation_rig.h"
#include "pool/pool_rig.h"

#include <stdlib.h>
#include <string.h>

/* What others hold makes it full; what the sequence itself would hold makes it too large. */
POOL_TEST(room, full_ends_when_others_go, .num_blocks = 8, .block_size = 4)
{
    folio_sequence *a = pool_plain(pool, 17), *b = pool_sequence(pool, 0);
    int32_t by_hand[3];
    REFUSED(folio_sequence_reserve(b, 13, 0, NULL), FOLIO_ERR_FULL, "4 blocks|3 of 8");
    REFUSED(folio_sequence_reserve(b, 32, 0, NULL), FOLIO_ERR_FULL, "8 blocks|3 of 8");
    REFUSED(folio_sequence_reserve(b, 33, 0, NULL), FOLIO_ERR_TOO_LARGE, "9 blocks|has 8");
    CHECK_OK(folio_pool_alloc(pool, 3, by_hand));
    REFUSED(folio_sequence_reserve(a, 15, 0, NULL), FOLIO_ERR_FULL, "3 blocks|0 of 8");
    REFUSED(folio_sequence_reserve(a, 16, 0, NULL), FOLIO_ERR_TOO_LARGE, "9 blocks|has 8");
    CHECK_OK(folio_pool_release(pool, 3, by_hand));
    folio_sequence_destroy(a);
    CHECK_OK(folio_sequence_reserve(b, 32, 0, NULL));
    folio_sequence_destroy(b);
}

/* More tokens than a sequence can have: never, as with more blocks than the pool has. */
POOL_TEST(room, more_tokens_than_a_sequence_can_have, .num_blocks = 8, .block_size = 4)
{
    folio_sequence *s = pool_plain(pool, 4);
    static const int64_t n[] = {INT32_MAX - 3, INT64_MAX - 4, INT64_MAX};
    for (int i = 0; i < 3; i++)
        REFUSED(folio_sequence_reserve(s, n[i], 0, NULL), FOLIO_ERR_TOO_LARGE,
                "4 tokens|2147483647");
    REFUSED(folio_sequence_reserve(s, INT32_MAX - 4, 0, NULL), FOLIO_ERR_TOO_LARGE, "has 8");
    REFUSED(folio_sequence_reserve_encoder(s, INT64_MAX, 0, NULL), FOLIO_ERR_TOO_LARGE,
            "0 tokens|2147483647");
    REFUSED(folio_sequence_reserve_encoder(s, INT32_MAX, 0, NULL), FOLIO_ERR_TOO_LARGE, "has 8");
    REFUSED(folio_sequence_reserve(s, -1, 0, NULL), FOLIO_ERR_ARGUMENT, "n is -1");
    REFUSED(folio_sequence_reserve_encoder(s, 0, 0, NULL), FOLIO_ERR_ARGUMENT, "n is 0");
    folio_sequence_destroy(s);
}

/* A shared block must be copied as long as it is shared; one of the prefix cache as long as the sequence holds it. */
POOL_TEST(room, blocks_to_copy, .num_blocks = 2, .block_size = 4)
{
    folio_sequence *a = pool_plain(pool, 6), *b = pool_fork(a);
    REFUSED(folio_sequence_reserve(b, 1, 0, NULL), FOLIO_ERR_FULL, "1 blocks|0 of 2");
    folio_sequence_destroy(a);
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
    CHECK_INT(pool_stats(pool).num_copies, 0);
    folio_sequence_destroy(b);
    b = pool_sequence(pool, 0);
    pool_grow(b, pool_counting_ids(), 8);
    CHECK_OK(folio_sequence_truncate(b, 7));
    REFUSED(folio_sequence_reserve(b, 1, 0, NULL), FOLIO_ERR_FULL, "1 blocks|0 of 2");
    CHECK_OK(folio_sequence_truncate(b, 0));
    CHECK_OK(folio_sequence_reserve(b, 8, 0, NULL));
    folio_sequence_destroy(b);
}

/* Encoder tokens hold blocks too; those behind a window do not count. */
POOL_TEST(room, encoders_and_windows, .num_blocks = 8, .block_size = 4,
          .layer_groups = (folio_layer_group[]){{.window = 5}})
{
    folio_sequence *s = pool_sequence(pool, 0), *other = pool_plain(pool, 4);
    CHECK_OK(folio_sequence_reserve_encoder(s, 9, 0, NULL)); /* 3 */
    CHECK_OK(folio_sequence_reserve(s, 16, 0, NULL));        /* 4; the pool is full */
    CHECK_OK(folio_sequence_commit(s, NULL));                /* 1 is seen by the next token */
    REFUSED(folio_sequence_reserve(s, 17, 0, NULL), FOLIO_ERR_TOO_LARGE, "9 blocks|has 8");
    REFUSED(folio_sequence_reserve(s, 16, 0, NULL), FOLIO_ERR_FULL, "4 blocks|3 of 8");
    REFUSED(folio_sequence_reserve_encoder(other, 29, 0, NULL), FOLIO_ERR_TOO_LARGE, "9|has 8");
    REFUSED(folio_sequence_reserve_encoder(other, 28, 0, NULL), FOLIO_ERR_FULL, "7 blocks");
    folio_sequence_destroy(other);
    CHECK_OK(folio_sequence_reserve(s, 16, 0, NULL));
    folio_sequence_destroy(s);
}

/* A preemption is too large only where no tier could ever have the sequence. */
TEST(room, tiers_that_are_too_small)
{
    static const struct {
        int64_t host, frames;
        bool host_held;
        folio_status status;
        const char *words;
    } cases[] = {
        {3, 0, false, FOLIO_ERR_TOO_LARGE, "has 6 blocks|host tier has 3"},
        {3, 3, false, FOLIO_ERR_TOO_LARGE, "has 6 blocks|host tier has 3"},
        {0, 3, false, FOLIO_ERR_TOO_LARGE, "has 6 blocks|store has 3 frames"},
        {8, 3, true, FOLIO_ERR_FULL, "6 host blocks|of 8"},
        {8, 0, true, FOLIO_ERR_FULL, "6 host blocks|of 8"},
        {3, 20, false, FOLIO_OK, ""},
    };
    static gen_world w;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        REQUIRE_TEST(gen_world_open(&w, &gen_small, 32, cases[i].host, cases[i].frames));
        folio_sequence *holder = gen_filled(&w, &w.r[2], 20), *s = gen_filled(&w, &w.r[0], 21);
        if (cases[i].host_held)
            CHECK_OK(folio_sequence_swap_out(holder, FOLIO_TIER_HOST, NULL, NULL));
        if (cases[i].status == FOLIO_OK)
            CHECK_OK(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL));
        else
            REFUSED(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL), cases[i].status,
                    cases[i].words);
        folio_sequence_destroy(holder);
        folio_sequence_destroy(s);
        gen_world_close(&w);
    }
}

/* ------------------------------------------------------------------------------------ geometry */

static folio_kv_cache *cache_of(folio_context *ctx, int64_t num_blocks, int32_t block_size)
{
    const folio_kv_cache_desc desc = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = num_blocks, .num_layers = 1, .block_size = block_size,
        .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &desc, &cache));
    return cache;
}

/* Blocks of the pool, and slots of its third token's block of group 0: the two sizes it has. */
static void check_geometry(folio_context *ctx, const folio_pool_desc *desc, int64_t num_blocks,
                           int64_t block_size)
{
    folio_pool *pool = NULL;
    CHECK_OK(folio_pool_create(ctx, desc, &pool));
    REQUIRE_TEST(pool != NULL);
    CHECK_INT(pool_stats(pool).num_blocks, num_blocks);
    folio_sequence *s = pool_plain(pool, 2 * block_size);
    int64_t n = 0;
    (void)pool_table(s, 0, &n);
    CHECK_INT(n, 2);
    folio_sequence_destroy(s);
    folio_pool_destroy(pool);
}

BACKEND_TEST(room, a_pool_is_as_large_as_its_caches)
{
    folio_kv_cache *five = cache_of(ctx, 5, 8), *nine = cache_of(ctx, 9, 8);
    const folio_layer_group groups[3] = {{.cache = NULL}, {.cache = nine}, {.cache = five}};
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_layer_groups = 2, .layer_groups = groups);
    check_geometry(ctx, &desc, 9, 8);
    desc.num_layer_groups = 3;
    desc.num_blocks = 0;
    folio_pool *pool = NULL;
    CHECK_OK(folio_pool_create(ctx, &desc, &pool));
    CHECK_INT(pool_stats(pool).num_blocks, 5);
    folio_pool_destroy(pool);
    desc.num_layer_groups = 2;
    desc.num_blocks = 6;
    check_geometry(ctx, &desc, 6, 8);
    desc.num_blocks = 10;
    pool = NOWHERE;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "9|10");
    CHECK(pool == NULL);
    desc.num_blocks = 0;
    desc.block_size = 4;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "8|4");
    desc = (folio_pool_desc){.struct_size = sizeof desc, .cross_cache = five};
    check_geometry(ctx, &desc, 5, 8);
    desc.cross_cache = NULL;
    desc.num_blocks = 4;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "block_size 0|cache");
    desc.num_blocks = 0;
    desc.block_size = 4;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "num_blocks is 0|cache");
    folio_kv_cache_destroy(five);
    folio_kv_cache_destroy(nine);
}

/* Block tables are made for what a pool could hold, not for what is said to come. */
TEST(room, no_table_is_larger_than_its_pool)
{
    support_counter counter = {.limit = 1 << 20};
    folio_allocator memory = support_allocator(&counter);
    folio_context *ctx = support_context("reference", 1, &memory);
    REQUIRE_TEST(ctx != NULL);
    pool_rig r;
    REQUIRE_TEST(pool_rig_open_on(&r, ctx, (folio_pool_desc){.num_blocks = 16, .block_size = 1}));
    folio_sequence_destroy(pool_plain(r.pool, 16)); /* the pool has what it needs itself */
    int64_t before = counter.live_bytes;
    folio_sequence_desc desc = {.struct_size = sizeof desc, .max_tokens = INT32_MAX};
    folio_sequence *s = NULL;
    CHECK_OK(folio_sequence_create(r.pool, &desc, &s));
    REQUIRE_TEST(s != NULL);
    CHECK(counter.live_bytes - before < 1 << 16);
    int64_t calls = counter.calls;
    CHECK_OK(folio_sequence_reserve(s, 16, 0, NULL));
    CHECK_INT(counter.calls, calls); /* there was room for all that the pool has */
    folio_sequence_destroy(s);
    /* Nor for a prompt of which little can be in the cache: 2^24 tokens, of which 8 are. */
    const int64_t many = 1 << 24;
    int32_t *ids = calloc((size_t)many, sizeof *ids);
    REQUIRE_TEST(ids != NULL);
    CHECK_INT(pool_matches(r.pool, 0, ids, many), 0);
    s = pool_sequence(r.pool, 0);
    pool_grow(s, ids, 8);
    CHECK_INT(pool_matches(r.pool, 0, ids, many), 8);
    folio_sequence_destroy(s);
    CHECK(counter.live_bytes - before < 1 << 16);
    free(ids);
    pool_rig_close(&r);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}
