/*
 * test_stale.c: a batch holds copies of its sequences' block tables. When a sequence changes, plans
 * and forwards refuse the batch, and nothing is written; what changes nothing is allowed. And a batch
 * never goes out over a shared block that still waits for its copy, nor over another cache than its
 * group's.
 */
#include "pool/pool_rig.h"

#include <string.h>

enum { BS = 4, BLOCKS = 48, HOST = 24, WINDOW = 6, D = 8, ROWS = 8, GROUPS = 2 };

typedef struct {
    pool_rig r;
    folio_attention *attention[GROUPS]; /* group 1 has a window */
    folio_plan *plan[GROUPS];
    folio_batch *batch;
    folio_sequence *first, *second; /* of the batch: the first stays as it is */
    float q[ROWS][D], out[ROWS][D];
} world;

static folio_kv_cache *make_cache(folio_context *ctx)
{
    const folio_kv_cache_desc kv =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BS,
                   .num_kv_heads = 1, .k_head_size = D, .dtype = FOLIO_F32);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &kv, &cache));
    kit_poison_cache(cache);
    return cache;
}

static bool open_plans(world *w)
{
    for (int g = 0; g < GROUPS; g++) {
        const folio_attention_desc a =
            FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = D, .dtype = FOLIO_F32,
                       .windowed = g == 1, .window_left = g == 1 ? WINDOW - 1 : 0);
        const uint32_t types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                               (g == 0 ? FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER) : 0);
        CHECK_OK(folio_attention_create(w->r.ctx, &a, &w->attention[g]));
        const folio_plan_desc p = FOLIO_WITH(
            folio_plan_desc, .attentions = &w->attention[g], .types = &types, .num_attentions = 1,
            .block_size = BS, .num_blocks = BLOCKS, .max_seqs = 4, .max_query_tokens = ROWS,
            .max_encoder_tokens = ROWS, .max_seq_len = BS * BLOCKS);
        CHECK_OK(folio_plan_create(w->r.ctx, &p, &w->plan[g]));
    }
    w->batch = support_batch(w->r.ctx, BS);
    return w->plan[0] != NULL && w->plan[1] != NULL && w->batch != NULL;
}

/* The cache that each group names, and the encoder's; -1: none. */
typedef struct {
    int group[GROUPS], cross;
} cache_names;

static bool world_open_named(world *w, const char *backend, cache_names names)
{
    *w = (world){0};
    folio_context *ctx = support_context(backend, 2, NULL);
    folio_kv_cache *caches[GROUPS] = {make_cache(ctx), make_cache(ctx)};
    bool named = names.group[0] >= 0;
    const folio_layer_group groups[GROUPS] = {
        {.cache = named ? caches[names.group[0]] : NULL},
        {.window = WINDOW, .cache = named ? caches[names.group[1]] : NULL}};
    bool ok =
        pool_rig_open_on(&w->r, ctx,
                         FOLIO_WITH(folio_pool_desc, .num_blocks = BLOCKS, .block_size = BS,
                                    .num_layer_groups = GROUPS, .layer_groups = groups,
                                    .cross_cache = named ? caches[names.cross] : NULL,
                                    .host_blocks = named ? HOST : 0, .flags = FOLIO_POOL_CHECK));
    memcpy(w->r.caches, caches, sizeof caches);
    support_fill(&w->q[0][0], ROWS * D, 5, 1);
    return ok && open_plans(w);
}

static bool world_open(world *w, const char *backend)
{
    return world_open_named(w, backend, (cache_names){{0, 1}, 1});
}

static void world_close(world *w)
{
    folio_batch_destroy(w->batch);
    for (int g = 0; g < GROUPS; g++) {
        folio_plan_destroy(w->plan[g]);
        folio_attention_destroy(w->attention[g]);
    }
    folio_sequence_destroy(w->first);
    folio_sequence_destroy(w->second);
    pool_rig_close(&w->r);
}

/* Cross attention too: the encoder has as many new tokens as there are queries. */
static folio_status forward_over(world *w, int32_t group, folio_attention_type type, int cache)
{
    folio_batch_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_batch_get_info(w->batch, &info));
    int64_t rows = info.num_query_tokens;
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {.data = w->q, .dtype = FOLIO_F32, .tokens = rows},
                   .k = {.data = w->q, .dtype = FOLIO_F32, .tokens = rows},
                   .v = {.data = w->q, .dtype = FOLIO_F32, .tokens = rows},
                   .out = {.data = w->out, .dtype = FOLIO_F32, .tokens = rows});
    return folio_attention_forward(w->plan[group], 0, type, w->r.caches[cache], 0, &t, NULL);
}

static folio_status forward(world *w, int32_t group)
{
    return forward_over(w, group, FOLIO_ATTENTION_DECODER, group);
}

/* Both sequences, as they are now, in the batch and the plan. */
static void fill(world *w, int32_t group)
{
    folio_sequence *const both[2] = {w->first, w->second};
    folio_batch_clear(w->batch);
    CHECK_OK(folio_batch_add_sequences(w->batch, group, both, 2, NULL));
    CHECK_OK(folio_plan_update(w->plan[group], w->batch, NULL));
    CHECK_OK(forward(w, group));
}

/* ---------------------------------------------------------------------------- what makes it stale */

static folio_status by_reserve(folio_sequence **s)
{
    return folio_sequence_reserve(*s, 1, 0, NULL);
}

static folio_status by_reserve_encoder(folio_sequence **s)
{
    return folio_sequence_reserve_encoder(*s, 3, 0, NULL);
}

static folio_status by_commit(folio_sequence **s) { return folio_sequence_commit(*s, NULL); }

/* No token more, but the block enters the prefix cache, where others find it. */
static folio_status by_commit_with_ids(folio_sequence **s)
{
    folio_tokens t = pool_tokens(pool_counting_ids(), pool_info(*s).committed_len);
    return folio_sequence_commit(*s, &t);
}

static folio_status by_truncate(folio_sequence **s)
{
    return folio_sequence_truncate(*s, pool_info(*s).len - 1);
}

static folio_status by_window(folio_sequence **s) { return folio_sequence_release_window(*s); }

static folio_status by_swap(folio_sequence **s)
{
    return folio_sequence_swap_out(*s, FOLIO_TIER_HOST, NULL, NULL);
}

/* There and back: resident again, in other blocks. */
static folio_status by_swap_and_back(folio_sequence **s)
{
    folio_status status = by_swap(s);
    return status == FOLIO_OK ? folio_sequence_swap_in(*s, NULL, NULL) : status;
}

static folio_status by_preemption(folio_sequence **s)
{
    return folio_sequence_preempt(*s, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL);
}

static folio_status by_preemption_to_host(folio_sequence **s)
{
    return folio_sequence_preempt(*s, FOLIO_PREEMPT_SWAP, NULL, NULL);
}

static folio_status by_destroy(folio_sequence **s)
{
    folio_sequence_destroy(*s);
    *s = NULL;
    return FOLIO_OK;
}

typedef struct {
    const char *call; /* what the sentence names */
    folio_status (*change)(folio_sequence **s);
    int64_t committed, reserved; /* tokens before it */
    int32_t group;
} change;

static const change changes[] = {
    {"folio_sequence_reserve", by_reserve, 9, 2, 0},
    {"folio_sequence_reserve_encoder", by_reserve_encoder, 9, 2, 0},
    {"folio_sequence_commit", by_commit, 9, 2, 0},
    {"folio_sequence_commit", by_commit_with_ids, 9, 0, 0},
    {"folio_sequence_truncate", by_truncate, 9, 2, 0},
    {"folio_sequence_release_window", by_window, 21, 0, 1},
    {"folio_sequence_swap_out", by_swap, 5, 0, 0}, /* nothing is behind a window */
    {"folio_sequence_swap_out", by_swap_and_back, 5, 0, 0},
    {"folio_sequence_preempt", by_preemption, 9, 2, 0},
    {"folio_sequence_preempt", by_preemption_to_host, 9, 2, 0},
    {"folio_sequence_destroy", by_destroy, 9, 2, 0},
};

/* What the caches hold; the test's own sum. */
static uint64_t sum_caches(const world *w)
{
    uint64_t sum = 1;
    for (int g = 0; g < GROUPS; g++) {
        folio_kv_cache_view v = {.struct_size = sizeof v};
        CHECK_OK(folio_kv_cache_get_view(w->r.caches[g], 0, &v));
        const unsigned char *k = v.k, *values = v.v;
        for (int64_t i = 0; i < v.k_array.bytes; i++) sum = sum * 31 + k[i];
        for (int64_t i = 0; i < v.v_array.bytes; i++) sum = sum * 31 + values[i];
    }
    return sum;
}

static void check_change(const char *backend, const change *c)
{
    static world w;
    char words[128];
    REQUIRE_TEST(world_open(&w, backend));
    w.first = pool_plain(w.r.pool, 5);
    CHECK_OK(folio_sequence_reserve(w.first, 1, 0, NULL));
    w.second = pool_plain(w.r.pool, c->committed);
    if (c->reserved > 0) CHECK_OK(folio_sequence_reserve(w.second, c->reserved, 0, NULL));
    fill(&w, c->group);
    CHECK_OK(forward(&w, c->group)); /* as often as there are layers */

    CHECK_OK(c->change(&w.second));
    folio_sequence *thief = pool_plain(w.r.pool, 20); /* has blocks that were given back */
    uint64_t before = sum_caches(&w);
    memset(w.out, 0xFF, sizeof w.out);
    snprintf(words, sizeof words, "seq 1|%s|clear the batch", c->call);
    REFUSED(forward(&w, c->group), FOLIO_ERR_ARGUMENT, words);
    REFUSED(folio_plan_update(w.plan[c->group], w.batch, NULL), FOLIO_ERR_ARGUMENT, words);
    CHECK(support_is_poison(w.out, sizeof w.out));
    CHECK(sum_caches(&w) == before);

    folio_batch_clear(w.batch);
    CHECK_OK(folio_batch_add_sequences(w.batch, c->group, &w.first, 1, NULL));
    CHECK_OK(folio_plan_update(w.plan[c->group], w.batch, NULL));
    CHECK_OK(forward(&w, c->group));
    folio_sequence_destroy(thief);
    world_close(&w);
}

BACKEND_TEST(stale, every_change_is_refused)
{
    for (int i = 0; i < COUNT_OF(changes); i++) check_change(backend, &changes[i]);
}

/* A commit that takes the cache's blocks in place of its own. */
TEST(stale, a_commit_that_exchanges_blocks)
{
    static world w;
    REQUIRE_TEST(world_open(&w, "cpu"));
    folio_sequence *cached = pool_sequence(w.r.pool, 0);
    pool_grow(cached, pool_counting_ids(), 8);
    w.first = pool_plain(w.r.pool, 5);
    w.second = pool_sequence(w.r.pool, 0);
    CHECK_OK(folio_sequence_reserve(w.second, 8, 0, NULL));
    int32_t own = pool_table(w.second, 0, NULL)[0];
    fill(&w, 0);
    folio_tokens t = pool_tokens(pool_counting_ids(), 8);
    CHECK_OK(folio_sequence_commit(w.second, &t));
    CHECK(pool_table(w.second, 0, NULL)[0] != own);
    REFUSED(forward(&w, 0), FOLIO_ERR_ARGUMENT, "seq 1|folio_sequence_commit");
    folio_sequence_destroy(cached);
    world_close(&w);
}

/* ------------------------------------------------------------------------------- what does not */

TEST(stale, what_changes_nothing_is_allowed)
{
    static world w;
    REQUIRE_TEST(world_open(&w, "cpu"));
    w.first = pool_plain(w.r.pool, 5);
    w.second = pool_plain(w.r.pool, 21);
    CHECK_OK(folio_sequence_release_window(w.second));
    CHECK_OK(folio_sequence_reserve(w.first, 2, 0, NULL));
    fill(&w, 1);
    folio_sequence *other = pool_plain(w.r.pool, 9); /* one that is not in the batch */
    CHECK_OK(folio_sequence_truncate(other, 3));
    folio_sequence_destroy(other);
    CHECK_OK(folio_sequence_reserve(w.second, 0, 0, NULL));
    CHECK_OK(folio_sequence_truncate(w.second, 21));
    CHECK_OK(folio_sequence_release_window(w.second));
    CHECK_OK(folio_sequence_commit(w.second, NULL));
    REFUSED(folio_sequence_truncate(w.second, 22), FOLIO_ERR_ARGUMENT, "22");
    REFUSED(folio_sequence_reserve(w.second, 4096, 0, NULL), ANY_REFUSAL, "blocks");
    REFUSED(folio_sequence_preempt(w.second, (folio_preemption)7, NULL, NULL), FOLIO_ERR_ARGUMENT,
            "policy");
    folio_sequence *fork = pool_fork(w.second);
    CHECK_OK(folio_pool_forget(w.r.pool));
    CHECK_OK(folio_plan_update(w.plan[1], w.batch, NULL));
    CHECK_OK(forward(&w, 1));
    folio_sequence_destroy(fork);
    world_close(&w);
}

/* The batch may outlive its sequences and their pool. */
TEST(stale, batches_outlive_their_sequences)
{
    static world w;
    REQUIRE_TEST(world_open(&w, "cpu"));
    w.first = pool_plain(w.r.pool, 5);
    w.second = pool_plain(w.r.pool, 7);
    fill(&w, 0);
    folio_sequence_destroy(w.first);
    folio_sequence_destroy(w.second);
    w.first = w.second = NULL;
    folio_pool_destroy(w.r.pool);
    w.r.pool = NULL;
    REFUSED(forward(&w, 0), FOLIO_ERR_ARGUMENT, "seq 0|folio_sequence_destroy");
    REFUSED(folio_plan_update(w.plan[0], w.batch, NULL), FOLIO_ERR_ARGUMENT, "seq 0");
    folio_batch_clear(w.batch);
    CHECK_OK(folio_plan_update(w.plan[0], w.batch, NULL));
    CHECK_OK(folio_pool_create(
        w.r.ctx, &FOLIO_WITH(folio_pool_desc, .num_blocks = 1, .block_size = 1), &w.r.pool));
    world_close(&w);
}

/* ------------------------------------------------------------------------------------- copies */

static float key_at(world *w, int32_t group, const folio_sequence *s, int64_t token)
{
    float k[D] = {0}, v[D];
    const int64_t slot = pool_table(s, group, NULL)[token / BS] * BS + token % BS;
    folio_kv_gather gather = FOLIO_WITH(
        folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 1},
        .v = {.data = v, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot, .num_slots = 1);
    CHECK_OK(folio_kv_cache_gather(w->r.caches[group], 0, &gather, NULL));
    return k[0];
}

/* A fork that writes gets its copy when it is batched, group by group. */
BACKEND_TEST(stale, batching_runs_the_copies)
{
    static world w;
    REQUIRE_TEST(world_open(&w, backend));
    w.first = pool_sequence(w.r.pool, 0);
    CHECK_OK(folio_sequence_reserve(w.first, 6, 0, NULL));
    for (int32_t g = 0; g < GROUPS; g++) {
        folio_batch_clear(w.batch);
        CHECK_OK(folio_batch_add_sequences(w.batch, g, &w.first, 1, NULL));
        CHECK_OK(folio_plan_update(w.plan[g], w.batch, NULL));
        CHECK_OK(forward(&w, g));
    }
    CHECK_OK(folio_sequence_commit(w.first, NULL));
    w.second = pool_fork(w.first);
    CHECK_OK(folio_sequence_reserve(w.second, 1, 0, NULL));
    CHECK_INT(pool_stats(w.r.pool).num_copies, GROUPS);
    for (int32_t g = 0; g < GROUPS; g++) {
        folio_batch_clear(w.batch);
        CHECK_OK(folio_batch_add_sequences(w.batch, g, &w.second, 1, NULL));
        CHECK_INT(pool_stats(w.r.pool).num_copies, GROUPS - 1 - g);
        CHECK(pool_table(w.first, g, NULL)[1] != pool_table(w.second, g, NULL)[1]);
        for (int64_t p = 4; p < 6; p++)
            CHECK(key_at(&w, g, w.first, p) == w.q[p][0] &&
                  key_at(&w, g, w.second, p) == w.q[p][0]);
    }
    world_close(&w);
}

/* Without a cache the caller runs them, and is told when he forgot: reader and writer both wait. */
POOL_TEST(stale, copies_that_nobody_ran_are_refused, .num_blocks = 20, .block_size = BS)
{
    folio_sequence *a = pool_plain(pool, 6), *b = pool_fork(a), *other = pool_plain(pool, 6);
    folio_batch_info info = {.struct_size = sizeof info};
    int64_t n = 0;
    folio_block_pair pairs[4];
    folio_batch *batch = support_batch(r->ctx, BS);
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
    folio_sequence *const some[3] = {other, a, b};
    REFUSED(folio_batch_add_sequences(batch, 0, some, 3, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[1]|folio_pool_take_copies|group 0");
    REFUSED(folio_batch_add_sequences(batch, 0, &b, 1, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[0]|folio_pool_take_copies|group 0");
    CHECK_OK(folio_batch_get_info(batch, &info));
    CHECK_INT(info.num_seqs, 0);
    CHECK_OK(folio_batch_add_sequences(batch, 0, &other, 1, NULL));
    CHECK_OK(folio_pool_take_copies(pool, 0, 4, pairs, &n));
    CHECK_INT(n, 1);
    CHECK_OK(folio_batch_add_sequences(batch, 0, some + 1, 2, NULL));
    folio_batch_destroy(batch);
    for (int i = 0; i < 3; i++) folio_sequence_destroy(some[i]);
}

/* ------------------------------------------------------------------------- whose blocks they are */

/* A new sequence of 3 tokens and 3 encoder tokens, alone in the batch. */
static void fill_new(world *w, int32_t group)
{
    folio_sequence_destroy(w->first);
    w->first = pool_sequence(w->r.pool, 0);
    CHECK_OK(folio_sequence_reserve_encoder(w->first, 3, 0, NULL));
    CHECK_OK(folio_sequence_reserve(w->first, 3, 0, NULL));
    folio_batch_clear(w->batch);
    CHECK_OK(folio_batch_add_sequences(w->batch, group, &w->first, 1, NULL));
    CHECK_OK(folio_plan_update(w->plan[group], w->batch, NULL));
}

typedef struct {
    cache_names names;
    int32_t group;
    folio_attention_type type;
    const char *refused[GROUPS]; /* by cache; NULL: it goes through */
} whose;
/* clang-format off */
static const whose caches_of[] = {
    {{{0, 1}, 1}, 0, FOLIO_ATTENTION_DECODER, {NULL, "layer group 0|group's cache"}},
    {{{0, 1}, 1}, 1, FOLIO_ATTENTION_DECODER, {"layer group 1|group's cache", NULL}},
    {{{0, 1}, 1}, 0, FOLIO_ATTENTION_ENCODER_DECODER, {"layer group 0|cross_cache", NULL}},
    /* groups that share a cache */
    {{{1, 1}, 0}, 0, FOLIO_ATTENTION_DECODER, {"layer group 0|group's cache", NULL}},
    {{{1, 1}, 0}, 1, FOLIO_ATTENTION_DECODER, {"layer group 1|group's cache", NULL}},
    {{{1, 1}, 0}, 0, FOLIO_ATTENTION_ENCODER_DECODER, {NULL, "layer group 0|cross_cache"}},
    /* a pool that knows no cache */
    {{{-1, -1}, -1}, 0, FOLIO_ATTENTION_DECODER, {NULL, NULL}},
    {{{-1, -1}, -1}, 0, FOLIO_ATTENTION_ENCODER_DECODER, {NULL, NULL}},
};
/* clang-format on */

BACKEND_TEST(stale, a_batch_goes_over_its_groups_cache_only)
{
    static world w;
    for (int i = 0; i < COUNT_OF(caches_of); i++) {
        const whose *c = &caches_of[i];
        REQUIRE_TEST(world_open_named(&w, backend, c->names));
        for (int cache = 0; cache < GROUPS; cache++) {
            fill_new(&w, c->group);
            uint64_t before = sum_caches(&w);
            memset(w.out, 0xFF, sizeof w.out);
            if (c->refused[cache] == NULL) {
                CHECK_OK(forward_over(&w, c->group, c->type, cache));
                CHECK(sum_caches(&w) != before);
                continue;
            }
            REFUSED(forward_over(&w, c->group, c->type, cache), FOLIO_ERR_ARGUMENT,
                    c->refused[cache]);
            CHECK(support_is_poison(w.out, sizeof w.out));
            CHECK(sum_caches(&w) == before);
        }
        world_close(&w);
    }
}

/* Blocks that the caller names himself may be of any cache, also after a pool's were in the batch. */
BACKEND_TEST(stale, blocks_by_hand_go_over_any_cache)
{
    static world w;
    const int32_t block = 3;
    const folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 2, .seq_len = 2,
                                           .block_table = &block, .num_blocks = 1);
    REQUIRE_TEST(world_open(&w, backend));
    fill_new(&w, 0);
    folio_batch_clear(w.batch);
    CHECK_OK(folio_batch_add(w.batch, &seq));
    CHECK_OK(folio_plan_update(w.plan[0], w.batch, NULL));
    for (int cache = 0; cache < GROUPS; cache++)
        CHECK_OK(forward_over(&w, 0, FOLIO_ATTENTION_DECODER, cache));
    world_close(&w);
}

static int64_t num_seqs(const folio_batch *batch)
{
    folio_batch_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_batch_get_info(batch, &info));
    return info.num_seqs;
}

/* A table by hand could name a block that a sequence of the pool holds. */
POOL_TEST(stale, sequences_by_hand_need_another_batch, .num_blocks = 20, .block_size = BS)
{
    folio_sequence *const s[2] = {pool_plain(pool, 6), pool_plain(pool, 3)};
    const folio_batch_seq padding = {.struct_size = sizeof padding, .query_len = 1, .padding = 1};
    const int32_t table[1] = {0};
    const folio_batch_seq by_hand = FOLIO_WITH(folio_batch_seq, .query_len = 2, .seq_len = 2,
                                               .block_table = table, .num_blocks = 1);
    folio_batch *batch = support_batch(r->ctx, BS);
    CHECK_OK(folio_batch_add(batch, &padding)); /* goes with both */
    CHECK_OK(folio_batch_add_sequences(batch, 0, s, 1, NULL));
    REFUSED(folio_batch_add(batch, &by_hand), FOLIO_ERR_ARGUMENT, "seq 2|pool|padding");
    CHECK_OK(folio_batch_add(batch, &padding));
    CHECK_OK(folio_batch_add_sequences(batch, 0, s + 1, 1, NULL));
    CHECK_INT(num_seqs(batch), 4);
    folio_batch_clear(batch);
    CHECK_OK(folio_batch_add(batch, &padding));
    CHECK_OK(folio_batch_add(batch, &by_hand));
    REFUSED(folio_batch_add_sequences(batch, 0, s, 2, NULL), FOLIO_ERR_ARGUMENT,
            "1 sequences of folio_batch_add");
    CHECK_OK(folio_batch_add_sequences(batch, 0, s, 0, NULL));
    CHECK_OK(folio_batch_add(batch, &by_hand));
    CHECK_INT(num_seqs(batch), 3);
    folio_batch_clear(batch);
    CHECK_OK(folio_batch_add_sequences(batch, 0, s, 2, NULL));
    folio_batch_destroy(batch);
    for (int i = 0; i < 2; i++) folio_sequence_destroy(s[i]);
}

TEST(stale, a_batch_is_of_one_pool_and_one_group)
{
    pool_rig r, other;
    const folio_pool_desc pool = {.num_blocks = 20, .block_size = BS, .num_layer_groups = GROUPS};
    REQUIRE_TEST(pool_rig_open(&r, pool));
    REQUIRE_TEST(pool_rig_open(&other, pool));
    folio_sequence *const s[2] = {pool_plain(r.pool, 6), pool_plain(other.pool, 6)};
    folio_batch *batch = support_batch(r.ctx, BS);
    REFUSED(folio_batch_add_sequences(batch, 0, s, 2, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[1]|another pool");
    CHECK_OK(folio_batch_add_sequences(batch, 0, s, 0, NULL));
    CHECK_INT(num_seqs(batch), 0);
    for (int i = 0; i < 2; i++) { /* neither the refused call nor the cleared batch counts */
        int32_t group = 1 - i;
        CHECK_OK(folio_batch_add_sequences(batch, group, s + i, 1, NULL));
        REFUSED(folio_batch_add_sequences(batch, group, s + 1 - i, 1, NULL), FOLIO_ERR_ARGUMENT,
                "sequences[0]|another pool");
        REFUSED(folio_batch_add_sequences(batch, i, s + i, 1, NULL), FOLIO_ERR_ARGUMENT,
                i == 0 ? "layer group 1, these of layer group 0"
                       : "layer group 0, these of layer group 1");
        CHECK_OK(folio_batch_add_sequences(batch, group, s + i, 1, NULL));
        CHECK_INT(num_seqs(batch), 2);
        folio_batch_clear(batch);
    }
    folio_batch_destroy(batch);
    for (int i = 0; i < 2; i++) folio_sequence_destroy(s[i]);
    pool_rig_close(&other);
    pool_rig_close(&r);
}

/* A call that finds no memory for its second sequence forgets the first: the batch is of no group yet. */
TEST(stale, an_add_without_memory_leaves_nothing)
{
    folio_status status = FOLIO_ERR_MEMORY;
    for (int64_t n = 1; n < 50 && status == FOLIO_ERR_MEMORY; n++) {
        pool_rig r;
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        REQUIRE_TEST(pool_rig_open_on(
            &r, support_context("reference", 1, &allocator),
            (folio_pool_desc){.num_blocks = 400, .block_size = BS, .num_layer_groups = GROUPS}));
        folio_sequence *const s[2] = {pool_plain(r.pool, 3), pool_plain(r.pool, 700)};
        folio_batch *batch = support_batch(r.ctx, BS);
        counter.calls = 0;
        counter.fail_at = n;
        status = folio_batch_add_sequences(batch, 0, s, 2, NULL);
        counter.fail_at = 0;
        if (status != FOLIO_OK) {
            CHECK_INT(status, FOLIO_ERR_MEMORY);
            CHECK_OK(folio_batch_add_sequences(batch, 1, s, 2, NULL));
        }
        CHECK_INT(num_seqs(batch), 2);
        folio_batch_destroy(batch);
        for (int i = 0; i < 2; i++) folio_sequence_destroy(s[i]);
        pool_rig_close(&r);
        CHECK_INT(counter.live, 0);
    }
    CHECK_INT(status, FOLIO_OK);
}
