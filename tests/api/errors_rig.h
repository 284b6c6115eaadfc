/*
 * errors_rig.h: bad input to plan and forward. One good step over all four attention types is the
 * ground; each case changes one thing, is refused with its status and sentence, and changes no byte
 * of out, lse, K, V or the cache. At the end of a STEP_TEST the plan still runs the good step to the
 * same bits.
 */
#ifndef FOLIO_ERRORS_RIG_H
#define FOLIO_ERRORS_RIG_H

#include "support.h"

#include <stdlib.h>

#define ARG FOLIO_ERR_ARGUMENT
#define UNSUPPORTED FOLIO_ERR_UNSUPPORTED

enum { HEADS = 4, KV_HEADS = 2, DK = 16, DV = 8, BLOCK = 16, BLOCKS = 12, LAYERS = 2 };
enum { TOKENS = 8, ENCODER_TOKENS = 6, MAX_SEQ_LEN = 64 };
enum { PLAIN = 0, FP8 = 1, NUM_ATTENTIONS = 2 };

/* A prompt with new encoder tokens, a decode that reads its cross blocks, padding. */
static const int32_t table0[] = {3}, table1[] = {1, 4}, cross0[] = {7}, cross1[] = {8};

static inline folio_batch_seq good_seq(int i)
{
    folio_batch_seq s = {.struct_size = sizeof s};
    if (i == 0) {
        s.query_len = s.seq_len = 5, s.block_table = table0, s.num_blocks = 1;
        s.encoder_len = s.encoder_new_len = ENCODER_TOKENS;
        s.cross_block_table = cross0, s.num_cross_blocks = 1;
    } else if (i == 1) {
        s.query_len = 1, s.seq_len = 21, s.block_table = table1, s.num_blocks = 2;
        s.encoder_len = 3, s.cross_block_table = cross1, s.num_cross_blocks = 1;
    } else {
        s.query_len = 2, s.padding = 1;
    }
    return s;
}

typedef struct {
    folio_context *ctx;
    folio_attention *attention[NUM_ATTENTIONS];
    folio_kv_cache *cache[NUM_ATTENTIONS];
    folio_batch *batch;
    folio_plan *plan;
    float q[TOKENS * HEADS * DK], k[TOKENS * KV_HEADS * DK], v[TOKENS * KV_HEADS * DV];
    support_buffer out, lse, workspace;
    unsigned char *before; /* every byte a forward could write */
    size_t before_bytes;
    float good_out[TOKENS * HEADS * DV];
} fixture;

static inline folio_attention_desc attention_desc(folio_dtype kv_dtype)
{
    return FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                      .k_head_size = DK, .v_head_size = DV, .dtype = FOLIO_F32,
                      .kv_dtype = kv_dtype);
}

static inline folio_kv_cache_desc cache_desc(folio_dtype dtype)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS,
                      .block_size = BLOCK, .num_kv_heads = KV_HEADS, .k_head_size = DK,
                      .v_head_size = DV, .dtype = dtype);
}

static const uint32_t plan_types[NUM_ATTENTIONS] = {15u,
                                                    FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)};

static inline folio_plan_desc plan_desc(const fixture *f)
{
    return FOLIO_WITH(folio_plan_desc, .attentions = f->attention, .types = plan_types,
                      .num_attentions = NUM_ATTENTIONS, .block_size = BLOCK, .num_blocks = BLOCKS,
                      .max_seqs = 4, .max_query_tokens = 32, .max_seq_len = MAX_SEQ_LEN,
                      .max_encoder_tokens = 16);
}

/* -------------------------------------------------------------------------------- the good call */

/* One forward and all it is given. */
typedef struct {
    const folio_plan *plan;
    int32_t attention;
    folio_attention_type type;
    folio_kv_cache *cache;
    int32_t layer;
    folio_tensors t;
    folio_run r;
    bool no_tensors;
} call;

static inline call good_call(fixture *f, int attention, folio_attention_type type)
{
    int64_t rows = type == FOLIO_ATTENTION_ENCODER ? ENCODER_TOKENS : TOKENS;
    int64_t fresh = type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_DECODER
                        ? ENCODER_TOKENS
                        : TOKENS;
    return (call){.plan = f->plan,
                  .attention = attention,
                  .type = type,
                  .cache = f->cache[attention],
                  .layer = 1,
                  .t = {.struct_size = sizeof(folio_tensors),
                        .q = {.data = f->q, .dtype = FOLIO_F32, .tokens = rows},
                        .k = {.data = f->k, .dtype = FOLIO_F32, .tokens = fresh},
                        .v = {.data = f->v, .dtype = FOLIO_F32, .tokens = fresh},
                        .out = {.data = f->out.data, .dtype = FOLIO_F32, .tokens = rows},
                        .lse = f->lse.data},
                  .r = {.struct_size = sizeof(folio_run)}};
}

static inline folio_status check_call(const call *c)
{
    return folio_attention_check(c->plan, c->attention, c->type, c->cache, c->layer,
                                 c->no_tensors ? NULL : &c->t, &c->r, NULL);
}

/* A check before it says the same. */
static inline folio_status run_call(const call *c)
{
    folio_status checked = check_call(c);
    folio_status status = folio_attention_forward(c->plan, c->attention, c->type, c->cache,
                                                  c->layer, c->no_tensors ? NULL : &c->t, &c->r);
    CHECK_INT(checked, status);
    return status;
}

/* out, lse, q, k, v, and all of both caches, one after another. */
static inline size_t collect(fixture *f, unsigned char *to)
{
    size_t n = 0;
#define COLLECT(data, bytes) (to ? memcpy(to + n, (data), (bytes)) : NULL, n += (bytes))
    COLLECT(f->out.data, f->out.bytes);
    COLLECT(f->lse.data, f->lse.bytes);
    COLLECT(f->q, sizeof f->q);
    COLLECT(f->k, sizeof f->k);
    COLLECT(f->v, sizeof f->v);
    for (int i = 0; i < NUM_ATTENTIONS; i++)
        for (int32_t l = 0; l < LAYERS; l++) {
            folio_kv_cache_view view = support_view(f->cache[i], l);
            COLLECT(view.k, (size_t)view.k_array.bytes);
            COLLECT(view.v, (size_t)view.v_array.bytes);
        }
#undef COLLECT
    return n;
}

static inline void check_untouched(fixture *f, int line)
{
    unsigned char *now = malloc(f->before_bytes);
    if (now == NULL) abort();
    collect(f, now);
    if (memcmp(now, f->before, f->before_bytes) != 0)
        test_fail(__FILE__, line, "a refused call wrote something");
    CHECK(support_buffer_guards_hold(&f->out) && support_buffer_guards_hold(&f->lse));
    free(now);
}

/* The plan still serves the good step. Leaves out and lse poisoned again. */
static inline void check_still_serves(fixture *f, int line)
{
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    folio_status status = run_call(&c);
    if (status != FOLIO_OK || memcmp(f->out.data, f->good_out, sizeof f->good_out) != 0)
        test_fail(__FILE__, line, "the plan no longer serves its batch: %s",
                  status ? folio_last_error() : "other bits");
    support_buffer_poison(&f->out);
    support_buffer_poison(&f->lse);
}

/* The good sequences, and no others. */
static inline void fill_batch(folio_batch *batch)
{
    folio_batch_clear(batch);
    for (int i = 0; i < 3; i++) {
        folio_batch_seq s = good_seq(i);
        CHECK_OK(folio_batch_add(batch, &s));
    }
}

static inline bool setup(fixture *f, folio_context *ctx)
{
    memset(f, 0, sizeof *f);
    f->ctx = ctx;
    support_fill(f->q, TOKENS * HEADS * DK, 1, 1.0f);
    support_fill(f->k, TOKENS * KV_HEADS * DK, 2, 1.0f);
    support_fill(f->v, TOKENS * KV_HEADS * DV, 3, 1.0f);
    f->out = support_buffer_make(sizeof f->good_out);
    f->lse = support_buffer_make(TOKENS * HEADS * sizeof(float));
    for (int i = 0; i < NUM_ATTENTIONS; i++) {
        folio_dtype dtype = i == FP8 ? FOLIO_FP8_E4M3 : FOLIO_F32;
        folio_attention_desc ad = attention_desc(dtype);
        folio_kv_cache_desc cd = cache_desc(dtype);
        CHECK_OK(folio_attention_create(ctx, &ad, &f->attention[i]));
        CHECK_OK(folio_kv_cache_create(ctx, &cd, &f->cache[i]));
        if (f->cache[i] == NULL) return false;
        for (int32_t l = 0; l < LAYERS; l++) { /* numbers everywhere, so that every step has keys */
            folio_kv_cache_view view = support_view(f->cache[i], l);
            memset(view.k, 0x33, (size_t)view.k_array.bytes);
            memset(view.v, 0x33, (size_t)view.v_array.bytes);
        }
    }
    folio_plan_desc pd = plan_desc(f);
    CHECK_OK(folio_plan_create(ctx, &pd, &f->plan));
    f->batch = support_batch(ctx, BLOCK);
    if (f->plan == NULL || f->batch == NULL) return false;
    fill_batch(f->batch);
    size_t bytes = 0;
    CHECK_OK(folio_plan_get_workspace_size(f->plan, &bytes));
    f->workspace = support_buffer_make(bytes + 64);
    return true;
}

/* Every good call runs once, so the cache holds what they write; then out and lse are poisoned. */
static inline bool setup_run(fixture *f, folio_context *ctx)
{
    if (!setup(f, ctx)) return false;
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    call c = good_call(f, FP8, FOLIO_ATTENTION_DECODER);
    CHECK_OK(run_call(&c));
    for (int type = FOLIO_NUM_ATTENTION_TYPES - 1; type >= 0; type--) {
        c = good_call(f, PLAIN, (folio_attention_type)type);
        CHECK_OK(run_call(&c));
    }
    memcpy(f->good_out, f->out.data, sizeof f->good_out);
    CHECK(!support_is_poison(f->good_out, 64));
    support_buffer_poison(&f->out);
    support_buffer_poison(&f->lse);
    f->before_bytes = collect(f, NULL);
    f->before = malloc(f->before_bytes);
    if (f->before == NULL) abort();
    collect(f, f->before);
    return true;
}

static inline void teardown(fixture *f)
{
    folio_plan_destroy(f->plan);
    folio_batch_destroy(f->batch);
    for (int i = 0; i < NUM_ATTENTIONS; i++) {
        folio_attention_destroy(f->attention[i]);
        folio_kv_cache_destroy(f->cache[i]);
    }
    support_buffer_free(&f->out);
    support_buffer_free(&f->lse);
    support_buffer_free(&f->workspace);
    free(f->before);
}

/* A test on the good step, on each backend. */
typedef void (*step_body)(fixture *f, folio_context *ctx, const char *backend);
static inline void run_step_test(folio_context *ctx, const char *backend, step_body body)
{
    fixture f;
    if (setup_run(&f, ctx)) {
        body(&f, ctx, backend);
        check_still_serves(&f, __LINE__);
    }
    teardown(&f);
}
#define STEP_TEST(suite, name)                                                                     \
    static void on_step_##suite##_##name(fixture *f, folio_context *ctx, const char *backend);     \
    BACKEND_TEST(suite, name) { run_step_test(ctx, backend, on_step_##suite##_##name); }           \
    static void on_step_##suite##_##name(fixture *f, __attribute__((unused)) folio_context *ctx,   \
                                         __attribute__((unused)) const char *backend)

#define BAD(a, type_, status, words, ...)                                                          \
    do {                                                                                           \
        call c = good_call(f, a, type_);                                                           \
        __VA_ARGS__;                                                                               \
        support_mark_error();                                                                      \
        folio_status got = run_call(&c);                                                           \
        support_refused(__FILE__, __LINE__, #__VA_ARGS__, got, status, words);                     \
        check_untouched(f, __LINE__);                                                              \
    } while (0)
#define BAD_DECODER(words, ...) BAD(PLAIN, FOLIO_ATTENTION_DECODER, ARG, words, __VA_ARGS__)

#endif
