/*
 * test_poison.c: FOLIO_DEBUG=poison: what nobody has written reads NaN, in every type and layout; what somebody holds
 * keeps its bits wherever it goes; without the variable nothing is filled.
 */
#include "cache/kv_cache.h"
#include "cache/pool.h"
#include "pool/generation_rig.h"
#include "pool/store_rig.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCKS = 6, SPARE = 2, TOKENS = 16, LAYERS = 2, HEADS = 2, SIZE = 16 };

/* NULL: FOLIO_DEBUG is unset. A test leaves it as it was. */
static char before[64];
static void set_debug(const char *value)
{
    if (value != NULL) CHECK(setenv("FOLIO_DEBUG", value, 1) == 0);
    else CHECK(unsetenv("FOLIO_DEBUG") == 0);
}
static void save_debug(void)
{
    const char *now = getenv("FOLIO_DEBUG");
    snprintf(before, sizeof before, "%s", now != NULL ? now : "");
}
static void restore_debug(void) { set_debug(before[0] != 0 ? before : NULL); }

static folio_kv_cache_desc cache_desc(folio_dtype dtype, folio_layout layout)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS + SPARE, .num_layers = LAYERS,
                      .block_size = TOKENS, .num_kv_heads = HEADS, .k_head_size = SIZE,
                      .v_head_size = SIZE, .dtype = dtype, .layout = layout);
}

/* Are all numbers of these tokens of a block NaN, or all of them numbers? */
static bool all_are(folio_kv_cache *cache, int32_t block, int32_t first, int32_t end, bool nan)
{
    static float k[TOKENS * HEADS * SIZE], v[TOKENS * HEADS * SIZE];
    int64_t slots[TOKENS], n = end - first;
    for (int64_t i = 0; i < n; i++) slots[i] = (int64_t)block * TOKENS + first + i;
    folio_kv_gather gather = FOLIO_WITH(
        folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = n},
        .v = {.data = v, .dtype = FOLIO_F32, .tokens = n}, .slots = slots, .num_slots = n);
    bool all = true;
    for (int32_t l = 0; l < LAYERS; l++) {
        CHECK_OK(folio_kv_cache_gather(cache, l, &gather, NULL));
        for (int64_t i = 0; i < n * HEADS * SIZE; i++)
            all &= isnan(k[i]) == nan && isnan(v[i]) == nan;
    }
    return all;
}

/* Ones to the first n tokens of a block. */
static void write_tokens(folio_kv_cache *cache, int32_t block, int32_t n)
{
    static float ones[TOKENS * HEADS * SIZE];
    int64_t slots[TOKENS];
    for (int i = 0; i < COUNT_OF(ones); i++) ones[i] = 1.0f;
    for (int32_t i = 0; i < n; i++) slots[i] = (int64_t)block * TOKENS + i;
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = {.data = ones, .dtype = FOLIO_F32, .tokens = n},
                   .v = {.data = ones, .dtype = FOLIO_F32, .tokens = n}, .slots = slots);
    for (int32_t l = 0; l < LAYERS; l++) CHECK_OK(folio_kv_cache_write(cache, l, &write, NULL));
}

/* A block that is taken, partly written, given back and taken again. Blocks past the pool's are the caller's. */
static void check_blocks(folio_context *ctx, const folio_kv_cache_desc *desc, folio_wipe wipe,
                         bool poison)
{
    folio_kv_cache *cache = NULL;
    folio_pool *pool = NULL;
    int32_t block = -1;
    CHECK_OK(folio_kv_cache_create(ctx, desc, &cache));
    REQUIRE_TEST(cache != NULL);
    memset(cache->memory, 0x11, (size_t)cache->memory_bytes);
    folio_layer_group group = {.cache = cache};
    folio_pool_desc p = FOLIO_WITH(folio_pool_desc, .num_blocks = BLOCKS, .layer_groups = &group,
                                   .wipe = wipe, .flags = FOLIO_POOL_CHECK);
    CHECK_OK(folio_pool_create(ctx, &p, &pool));
    CHECK_OK(folio_pool_alloc(pool, 1, &block));
    const char *type = folio_dtype_name(desc->dtype), *layout = folio_layout_name(desc->layout);
    CHECK_MSG(all_are(cache, block, 0, TOKENS, poison), "%s %s: a fresh block", type, layout);
    write_tokens(cache, block, 5);
    CHECK_MSG(all_are(cache, block, 0, 5, false), "%s %s: what was written", type, layout);
    CHECK_MSG(all_are(cache, block, 5, TOKENS, poison), "%s %s: the rest", type, layout);
    CHECK_OK(folio_pool_release(pool, 1, &block));
    CHECK_MSG(all_are(cache, block, 0, TOKENS, poison), "%s %s: a freed block", type, layout);
    int32_t again = -1;
    write_tokens(cache, block, 5); /* by somebody who does not hold it any more */
    CHECK_OK(folio_pool_alloc(pool, 1, &again));
    CHECK_INT(again, block);
    CHECK_MSG(all_are(cache, block, 0, 5, poison), "%s %s: a block again", type, layout);
    CHECK_OK(folio_pool_release(pool, 1, &again));
    folio_pool_destroy(pool);
    for (int32_t b = BLOCKS; b < BLOCKS + SPARE; b++) CHECK(all_are(cache, b, 0, TOKENS, false));
    folio_kv_cache_destroy(cache);
}

TEST(poison, blocks_read_nan_with_the_variable_only)
{
    static const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND};
    save_debug();
    for (int poison = 0; poison < 2; poison++)
        for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
            set_debug(poison ? "poison" : NULL);
            folio_context *ctx = support_context(support_backends[b], 1, NULL);
            set_debug(poison ? NULL : "poison"); /* the context was made before */
            for (int t = 0; t < SUPPORT_NUM_KV_DTYPES * COUNT_OF(layouts) * 4; t++) {
                folio_kv_cache_desc desc = cache_desc(support_kv_dtypes[t % SUPPORT_NUM_KV_DTYPES],
                                                      layouts[t / 4 / SUPPORT_NUM_KV_DTYPES]);
                check_blocks(ctx, &desc, (folio_wipe)(t / SUPPORT_NUM_KV_DTYPES % 4), poison);
            }
            folio_context_destroy(ctx);
        }
    restore_debug();
}

/* What one type's NaN is in another's cache must be NaN too. */
TEST(poison, types_that_share_memory)
{
    save_debug();
    set_debug("poison");
    folio_context *ctx = support_context("cpu", 1, NULL);
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES * SUPPORT_NUM_KV_DTYPES; t++) {
        folio_kv_cache *caches[2] = {NULL, NULL};
        folio_pool *pool = NULL;
        int32_t block = -1;
        folio_kv_cache_desc first =
            cache_desc(support_kv_dtypes[t % SUPPORT_NUM_KV_DTYPES], FOLIO_LAYOUT_NATIVE);
        folio_kv_cache_desc second =
            cache_desc(support_kv_dtypes[t / SUPPORT_NUM_KV_DTYPES], FOLIO_LAYOUT_NATIVE);
        const folio_kv_cache_desc *const both[] = {&first, &second};
        CHECK_OK(folio_kv_cache_create_shared(ctx, both, 2, caches));
        folio_layer_group groups[] = {{.cache = caches[0]}, {.window = 9, .cache = caches[1]}};
        folio_pool_desc p = FOLIO_WITH(folio_pool_desc, .num_layer_groups = 2,
                                       .layer_groups = groups, .flags = FOLIO_POOL_CHECK);
        CHECK_OK(folio_pool_create(ctx, &p, &pool));
        CHECK_OK(folio_pool_alloc(pool, 1, &block));
        CHECK(all_are(caches[0], block, 0, TOKENS, true));
        CHECK(all_are(caches[1], block, 0, TOKENS, true));
        write_tokens(caches[1], block, TOKENS);
        CHECK_OK(folio_pool_release(pool, 1, &block));
        CHECK(all_are(caches[0], block, 0, TOKENS, true));
        folio_pool_destroy(pool);
        for (int i = 0; i < 2; i++) folio_kv_cache_destroy(caches[i]);
    }
    folio_context_destroy(ctx);
    restore_debug();
}

/* ------------------------------------------------------------------------------------ the same bits */

static const gen_geometry *const geometries[] = {
    &gen_small, &gen_windowed, &gen_translating, &gen_quantised, &gen_over_each_other, &gen_latent};

/* A sequence is truncated, forked, copied on write, swapped to both tiers; all rows are those of its request. */
static void check_sequences(gen_world *w)
{
    const gen_request *r = &w->r[0];
    folio_sequence *s = gen_filled(w, r, 30), *fork = NULL;
    CHECK_OK(gen_feed(&w->p, s, r, 34));
    CHECK_OK(folio_sequence_truncate(s, 31));
    CHECK_OK(gen_feed(&w->p, s, r, 35));
    CHECK_OK(folio_sequence_fork(s, &fork));
    CHECK_OK(gen_feed(&w->p, fork, r, 36));
    CHECK_OK(gen_feed(&w->p, s, r, 37));
    for (int tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        CHECK_OK(folio_sequence_swap_out(fork, (folio_tier)tier, NULL, NULL));
        CHECK_OK(folio_sequence_swap_in(fork, NULL, NULL));
        CHECK(gen_contents_right(&w->p, fork, r));
    }
    gen_end(&w->p, s, r);
    gen_end(&w->p, fork, r);
}

/* A prompt is found on the device, in host memory, where others make it go on to the file, and in the file. */
static void check_prefixes(gen_world *w)
{
    const gen_request *r = &w->r[0];
    for (int tier = 0; tier < 3; tier++) {
        folio_sequence_destroy(gen_filled(w, &w->r[2], 38));
        if (tier > 0) CHECK(gen_lower(w, FOLIO_TIER_HOST, 100) > 0);
        if (tier > 1) CHECK(gen_lower(w, FOLIO_TIER_DISK, 100) > 0);
        folio_sequence *s = gen_sequence(w, r);
        CHECK(gen_match(w, s, r, 34) >= 32);
        gen_end(&w->p, s, r);
    }
}

TEST(poison, the_same_bits_as_without)
{
    static gen_world plain, w;
    save_debug();
    for (int g = 0; g < COUNT_OF(geometries); g++) {
        set_debug(NULL);
        REQUIRE_TEST(gen_world_model(&plain, geometries[g], NULL));
        set_debug("poison");
        REQUIRE_TEST(gen_world_open(&w, geometries[g], 64, 16, 60));
        CHECK(memcmp(w.r, plain.r, sizeof w.r) == 0);
        memcpy(w.r, plain.r, sizeof w.r);
        check_sequences(&w);
        check_prefixes(&w);
        gen_world_close(&w);
        gen_model_close(&plain.m);
    }
    restore_debug();
}

/* ------------------------------------------------------------------------------------------ the rest */

/* Past the superblock. */
static int64_t bytes_in_file(const gen_world *w)
{
    int64_t size = 0, n = 0;
    unsigned char *data = srig_read_file(w->store, &size);
    for (int64_t i = 4096; i < size; i++) n += data[i] != 0;
    free(data);
    return n;
}

/* The file is left to the pool's `wipe`: what is free in it stays, in this pool and the next. */
TEST(poison, a_file_keeps_what_it_has)
{
    static gen_world w;
    save_debug();
    set_debug("poison");
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 64, 0, 60));
    folio_sequence *s = gen_filled(&w, &w.r[0], 30);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    folio_sequence_destroy(s);
    CHECK(bytes_in_file(&w) > 0);
    gen_pool_close(&w.p);
    REQUIRE_TEST(gen_world_pool(&w, 64, 0, 60));
    CHECK(bytes_in_file(&w) > 0);
    gen_world_close(&w);
    restore_debug();
}

/* Their sources would be filled before the caller has copied them. */
TEST(poison, copies_are_not_taken)
{
    static gen_world w;
    folio_block_pair pair;
    int64_t n = -1;
    save_debug();
    set_debug("poison");
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 64, 0, 0));
    REFUSED(folio_pool_take_copies(w.p.pool, 0, 1, &pair, &n), FOLIO_ERR_ARGUMENT,
            "group 0|folio_pool_run_copies");
    gen_world_close(&w);
    restore_debug();
}

/* A word that is misspelt is refused, an empty one is none. */
TEST(poison, decided_when_a_context_is_made)
{
    static const char *const wrong[] = {"poisn", "POISON", "poison ", "1", "poison,check"};
    folio_context *ctx = NOWHERE;
    save_debug();
    for (int i = 0; i < COUNT_OF(wrong); i++) {
        set_debug(wrong[i]);
        REFUSED(folio_context_create(NULL, &ctx), FOLIO_ERR_ARGUMENT, "FOLIO_DEBUG|poison");
        CHECK(ctx == NULL);
    }
    set_debug("");
    ctx = support_context("cpu", 1, NULL);
    CHECK(!ctx->poison);
    folio_context_destroy(ctx);
    restore_debug();
}
