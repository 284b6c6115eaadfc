/*
 * test_shared.c: caches of several layer groups in one memory. What a block of one cache holds, a
 * block of another number never touches; the memory lives as long as one of the caches. That a whole
 * model computes the same over such caches is the matter of test_generation.c (one_memory).
 */
#include "support.h"

#include <folio/folio_pool.h>
#include <stdlib.h>

enum { BLOCKS = 6, N = 3 };

/* Different layers, heads and types, block sizes packed and not. */
static folio_kv_cache_desc describe(int i, int32_t block_size)
{
    static const int32_t layers[N] = {1, 3, 2}, heads[N] = {1, 3, 2}, sizes[N] = {16, 24, 8};
    static const folio_dtype dtypes[N] = {FOLIO_F32, FOLIO_INT8, FOLIO_BF16};
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = layers[i],
                      .block_size = block_size, .num_kv_heads = heads[i], .k_head_size = sizes[i],
                      .dtype = dtypes[i]);
}

static int64_t block_bytes(const char *backend, folio_kv_cache_desc desc)
{
    folio_kv_cache_shape s = {.struct_size = sizeof s};
    desc.num_blocks = 1;
    CHECK_OK(folio_kv_cache_get_shape(backend, &desc, &s));
    return s.total_bytes;
}

/* All rows of a block, in every layer: 1 + block, up to rounding. */
static void write_block(folio_kv_cache *cache, const folio_kv_cache_desc *d, int64_t block)
{
    int64_t slots[16];
    float rows[16 * 3 * 24];
    for (int i = 0; i < COUNT_OF(rows); i++) rows[i] = (float)(1 + block);
    for (int64_t i = 0; i < d->block_size; i++) slots[i] = block * d->block_size + i;
    folio_kv_write w = FOLIO_WITH(
        folio_kv_write, .k = {.data = rows, .dtype = FOLIO_F32, .tokens = d->block_size},
        .v = {.data = rows, .dtype = FOLIO_F32, .tokens = d->block_size}, .slots = slots);
    for (int32_t l = 0; l < d->num_layers; l++) CHECK_OK(folio_kv_cache_write(cache, l, &w, NULL));
}

static bool block_holds(folio_kv_cache *cache, const folio_kv_cache_desc *d, int64_t block)
{
    bool right = true;
    int64_t slots[16], n = d->block_size * (int64_t)d->num_kv_heads * d->k_head_size;
    float k[16 * 3 * 24], v[16 * 3 * 24];
    for (int64_t i = 0; i < d->block_size; i++) slots[i] = block * d->block_size + i;
    folio_kv_gather g =
        FOLIO_WITH(folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = d->block_size},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = d->block_size}, .slots = slots,
                   .num_slots = d->block_size);
    for (int32_t l = 0; l < d->num_layers; l++) {
        CHECK_OK(folio_kv_cache_gather(cache, l, &g, NULL));
        for (int64_t i = 0; i < n; i++)
            right =
                right && k[i] > (float)block + 0.99f && k[i] < (float)block + 1.01f && v[i] == k[i];
    }
    return right;
}

static void check_blocks(folio_context *ctx, int32_t block_size)
{
    folio_kv_cache_desc d[N];
    const folio_kv_cache_desc *const descs[N] = {&d[0], &d[1], &d[2]};
    folio_kv_cache *caches[N] = {NULL};
    for (int i = 0; i < N; i++) d[i] = describe(i, block_size);
    CHECK_OK(folio_kv_cache_create_shared(ctx, descs, N, caches));
    REQUIRE_TEST(caches[0] != NULL && caches[1] != NULL && caches[2] != NULL);
    /* Block b is cache b % 3's, then another's. */
    for (int turn = 0; turn < N; turn++) {
        for (int64_t b = 0; b < BLOCKS; b++)
            write_block(caches[(b + turn) % N], &d[(b + turn) % N], b);
        for (int64_t b = 0; b < BLOCKS; b++)
            CHECK(block_holds(caches[(b + turn) % N], &d[(b + turn) % N], b));
    }
    folio_kv_cache_destroy(caches[0]); /* the others live in the same memory */
    for (int64_t b = 0; b < BLOCKS; b++) write_block(caches[1 + b % 2], &d[1 + b % 2], b);
    for (int64_t b = 0; b < BLOCKS; b++) CHECK(block_holds(caches[1 + b % 2], &d[1 + b % 2], b));
    folio_kv_cache_destroy(caches[2]);
    folio_kv_cache_destroy(caches[1]);
}

BACKEND_TEST(shared, blocks_do_not_touch_each_other)
{
    check_blocks(ctx, 16);
    check_blocks(ctx, 5);
}

/* The largest cache's blocks, once; all of it is given back, in any order. */
TEST(shared, the_memory_is_that_of_the_largest)
{
    static const int orders[][N] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
    for (int o = 0; o < COUNT_OF(orders); o++) {
        support_counter memory = {0};
        folio_allocator a = support_allocator(&memory);
        folio_context *ctx = support_context("cpu", 1, &a);
        folio_kv_cache_desc d[N];
        const folio_kv_cache_desc *const descs[N] = {&d[0], &d[1], &d[2]};
        folio_kv_cache *caches[N] = {NULL};
        int64_t largest = 0, all = 0;
        for (int i = 0; i < N; i++) {
            d[i] = describe(i, 16);
            int64_t bytes = block_bytes("cpu", d[i]);
            largest = bytes > largest ? bytes : largest;
            all += bytes;
        }
        int64_t before = memory.live_bytes;
        CHECK_OK(folio_kv_cache_create_shared(ctx, descs, N, caches));
        int64_t taken = memory.live_bytes - before;
        CHECK(taken >= BLOCKS * largest && taken < BLOCKS * all);
        for (int i = 0; i < N; i++) folio_kv_cache_destroy(caches[orders[o][i]]);
        CHECK_INT(memory.live_bytes, before);
        folio_context_destroy(ctx);
    }
}

BACKEND_TEST(shared, refused)
{
    folio_kv_cache_desc d[2] = {describe(0, 16), describe(1, 16)};
    const folio_kv_cache_desc *descs[2] = {&d[0], &d[1]};
    folio_kv_cache *caches[2] = {NOWHERE, NOWHERE};
    REFUSED(folio_kv_cache_create_shared(NULL, descs, 2, caches), FOLIO_ERR_ARGUMENT, "ctx");
    CHECK(caches[0] == NULL && caches[1] == NULL);
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, NULL), FOLIO_ERR_ARGUMENT, "caches");
    REFUSED(folio_kv_cache_create_shared(ctx, NULL, 2, caches), FOLIO_ERR_ARGUMENT, "descs");
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 0, caches), FOLIO_ERR_ARGUMENT, "0|17");
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 18, caches), FOLIO_ERR_ARGUMENT, "18|17");
    d[1].num_blocks = BLOCKS + 1;
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, caches), FOLIO_ERR_ARGUMENT,
            "descs[1]|7|6");
    d[1].num_blocks = BLOCKS;
    d[1].layout = FOLIO_LAYOUT_NHD;
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, caches), FOLIO_ERR_ARGUMENT,
            "nhd|descs[1]");
    d[1] = describe(1, 16);
    d[1].k_head_size = 3;
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, caches), FOLIO_ERR_ARGUMENT, "k_head_size");
    d[0].num_blocks = d[1].num_blocks = INT32_MAX;
    d[0].num_layers = d[1].num_layers = INT32_MAX;
    d[1].k_head_size = 24;
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, caches), FOLIO_ERR_ARGUMENT,
            "largest size");
    descs[1] = NULL;
    d[0] = describe(0, 16);
    REFUSED(folio_kv_cache_create_shared(ctx, descs, 2, caches), FOLIO_ERR_ARGUMENT, "descs[1]");
    CHECK(caches[0] == NULL && caches[1] == NULL);
}

/* Whatever allocation fails: refused, and nothing is kept. */
TEST(shared, memory_that_runs_out)
{
    folio_kv_cache_desc d[2] = {describe(0, 16), describe(1, 16)};
    const folio_kv_cache_desc *const descs[2] = {&d[0], &d[1]};
    bool done = false;
    for (int n = 0; n < 50 && !done; n++) {
        support_counter memory = {0};
        folio_allocator a = support_allocator(&memory);
        folio_context *ctx = support_context("cpu", 1, &a);
        folio_kv_cache *caches[2] = {NOWHERE, NOWHERE};
        int64_t before = memory.live_bytes;
        memory.fail_at = memory.calls + 1 + n;
        folio_status status = folio_kv_cache_create_shared(ctx, descs, 2, caches);
        memory.fail_at = 0;
        done = status == FOLIO_OK;
        CHECK_INT(status, done ? FOLIO_OK : FOLIO_ERR_MEMORY);
        CHECK((caches[0] != NULL) == done && (caches[1] != NULL) == done);
        for (int i = 0; i < 2; i++) folio_kv_cache_destroy(caches[i]);
        CHECK_INT(memory.live_bytes, before);
        folio_context_destroy(ctx);
    }
    CHECK(done);
}
