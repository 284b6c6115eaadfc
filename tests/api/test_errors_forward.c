/*
 * test_errors_forward.c: bad input to plan and forward. One good step over all four attention types
 * is the ground; each case changes one thing, is refused with its status and sentence, and changes
 * no byte of out, lse, K, V or the cache; then the plan still runs the good step to the same bits.
 */
#include "kit/layer.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

#define ARG FOLIO_ERR_ARGUMENT
#define UNSUPPORTED FOLIO_ERR_UNSUPPORTED

enum { HEADS = 4, KV_HEADS = 2, DK = 16, DV = 8, BLOCK = 16, BLOCKS = 12, LAYERS = 2 };
enum { TOKENS = 8, ENCODER_TOKENS = 6, MAX_SEQ_LEN = 64 };
enum { PLAIN = 0, FP8 = 1, NUM_ATTENTIONS = 2 };

/* A prompt with new encoder tokens, a decode that reads its cross blocks, padding. */
static const int32_t table0[] = {3}, table1[] = {1, 4}, cross0[] = {7}, cross1[] = {8};

static folio_batch_seq good_seq(int i)
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

static folio_attention_desc attention_desc(folio_dtype kv_dtype)
{
    return FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                      .k_head_size = DK, .v_head_size = DV, .dtype = FOLIO_F32,
                      .kv_dtype = kv_dtype);
}

static folio_kv_cache_desc cache_desc(folio_dtype dtype)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS,
                      .block_size = BLOCK, .num_kv_heads = KV_HEADS, .k_head_size = DK,
                      .v_head_size = DV, .dtype = dtype);
}

static const uint32_t plan_types[NUM_ATTENTIONS] = {15u,
                                                    FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)};

static folio_plan_desc plan_desc(const fixture *f)
{
    return FOLIO_WITH(folio_plan_desc, .attentions = f->attention, .types = plan_types,
                      .num_attentions = NUM_ATTENTIONS, .block_size = BLOCK, .num_blocks = BLOCKS,
                      .max_seqs = 4, .max_query_tokens = 32, .max_seq_len = MAX_SEQ_LEN,
                      .max_encoder_tokens = 16);
}

static folio_batch *empty_batch(folio_context *ctx, int block_size)
{
    folio_batch_desc d = {.struct_size = sizeof d, .block_size = block_size};
    folio_batch *batch = NULL;
    CHECK_OK(folio_batch_create(ctx, &d, &batch));
    return batch;
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

static call good_call(fixture *f, int attention, folio_attention_type type)
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
                        .q = {.data = f->q, .tokens = rows},
                        .k = {.data = f->k, .tokens = fresh},
                        .v = {.data = f->v, .tokens = fresh},
                        .out = {.data = f->out.data, .tokens = rows},
                        .lse = f->lse.data},
                  .r = {.struct_size = sizeof(folio_run)}};
}

static folio_status run_call(call *c)
{
    return folio_attention_forward(c->plan, c->attention, c->type, c->cache, c->layer,
                                   c->no_tensors ? NULL : &c->t, &c->r);
}

/* out, lse, q, k, v, and all of both caches, one after another. */
static size_t collect(fixture *f, unsigned char *to)
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

static void check_untouched(fixture *f, int line)
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
static void check_still_serves(fixture *f, int line)
{
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    folio_status status = run_call(&c);
    if (status != FOLIO_OK || memcmp(f->out.data, f->good_out, sizeof f->good_out) != 0)
        test_fail(__FILE__, line, "the plan no longer serves its batch: %s",
                  status ? folio_last_error() : "other bits");
    support_buffer_poison(&f->out);
    support_buffer_poison(&f->lse);
}

static bool setup(fixture *f, folio_context *ctx)
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
    f->batch = empty_batch(ctx, BLOCK);
    if (f->plan == NULL || f->batch == NULL) return false;
    for (int i = 0; i < 3; i++) {
        folio_batch_seq s = good_seq(i);
        CHECK_OK(folio_batch_add(f->batch, &s));
    }
    size_t bytes = 0;
    CHECK_OK(folio_plan_get_workspace_size(f->plan, &bytes));
    f->workspace = support_buffer_make(bytes + 64);
    return true;
}

/* Every good call runs once, so the cache holds what they write; then out and lse are poisoned. */
static bool setup_run(fixture *f, folio_context *ctx)
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

static void teardown(fixture *f)
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

/* -------------------------------------------------------------------------------------- forward */

#define BAD(a, type_, status, words, ...)                                                          \
    do {                                                                                           \
        call c = good_call(&f, a, type_);                                                          \
        __VA_ARGS__;                                                                               \
        support_mark_error();                                                                      \
        folio_status got = run_call(&c);                                                           \
        support_refused(__FILE__, __LINE__, #__VA_ARGS__, got, status, words);                     \
        check_untouched(&f, __LINE__);                                                             \
    } while (0)
#define BAD_DECODER(words, ...) BAD(PLAIN, FOLIO_ATTENTION_DECODER, ARG, words, __VA_ARGS__)

BACKEND_TEST(errors_forward, handles_and_indices)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    BAD_DECODER("plan", c.plan = NULL);
    BAD_DECODER("tensors", c.no_tensors = true);
    BAD_DECODER("-1", c.attention = -1);
    BAD_DECODER("2", c.attention = 2);
    BAD_DECODER("4", c.type = (folio_attention_type)4);
    BAD_DECODER("-1", c.type = (folio_attention_type)-1);
    BAD_DECODER("2", c.layer = 2);
    BAD_DECODER("-1", c.layer = -1);
    BAD_DECODER("2147483647", c.layer = INT32_MAX);
    BAD_DECODER("context|1", c.cache = NULL); /* sequence 1 has one */
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "encoder_only", c.type = FOLIO_ATTENTION_ENCODER_ONLY);
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "encoder_decoder",
        c.type = FOLIO_ATTENTION_ENCODER_DECODER);
    check_still_serves(&f, __LINE__);
    teardown(&f);
}

BACKEND_TEST(errors_forward, tensors)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    BAD_DECODER("q|NULL", c.t.q.data = NULL);
    BAD_DECODER("out|NULL", c.t.out.data = NULL);
    BAD_DECODER("without v", c.t.v.data = NULL); /* K without V */
    BAD_DECODER("without k", c.t.k.data = NULL);
    BAD_DECODER("q|align", c.t.q.data = (char *)f.q + 1);
    BAD_DECODER("k|align", c.t.k.data = (char *)f.k + 2);
    BAD_DECODER("v|align", c.t.v.data = (char *)f.v + 3);
    BAD_DECODER("out|align", c.t.out.data = (char *)f.out.data + 1);
    BAD_DECODER("lse|align", c.t.lse = (float *)(void *)((char *)f.lse.data + 2));
    BAD_DECODER("q|7|8", c.t.q.tokens = 7);
    BAD_DECODER("q|9|8", c.t.q.tokens = 9);
    BAD_DECODER("k|7|8", c.t.k.tokens = 7);
    BAD_DECODER("v|9|8", c.t.v.tokens = 9);
    BAD_DECODER("out|0|8", c.t.out.tokens = 0);
    BAD_DECODER("-8", c.t.q.tokens = -8);
    BAD_DECODER("f16", c.t.q.dtype = FOLIO_F16);
    BAD_DECODER("bf16", c.t.out.dtype = FOLIO_BF16);
    BAD_DECODER("fp8_e4m3", c.t.k.dtype = FOLIO_FP8_E4M3);
    BAD_DECODER("int8", c.t.v.dtype = FOLIO_INT8);
    BAD_DECODER("99", c.t.q.dtype = (folio_dtype)99);
    BAD_DECODER("-1", c.t.k.dtype = (folio_dtype)-1);
    BAD_DECODER("q|-64", c.t.q.token_stride = -64);
    BAD_DECODER("k|-16", c.t.k.head_stride = -16);
    BAD_DECODER("v|-1", c.t.v.token_stride = -1);
    BAD_DECODER("out|-8", c.t.out.head_stride = -8);
    BAD_DECODER("out|stride", c.t.out.token_stride = 8); /* rows would overlap */
    BAD_DECODER("q|token_stride", c.t.q.token_stride = INT64_MAX / 2);
    BAD_DECODER("k|head_stride", c.t.k.head_stride = INT64_MAX);
    BAD_DECODER("v|token_stride", c.t.v.token_stride = INT64_MAX / 7);
    BAD_DECODER("out|stride", c.t.out.token_stride = INT64_MAX);
    BAD_DECODER("lse|-4", c.t.lse_token_stride = -4);
    BAD_DECODER("lse|stride", c.t.lse_head_stride = INT64_MAX / 2);
    BAD_DECODER("lse|-1", c.t.lse_token_stride = 1; c.t.lse_head_stride = -1);
    BAD_DECODER("flags|8", c.t.flags = 8u);
    BAD_DECODER("flags", c.t.flags = 0x80000001u);
    BAD_DECODER("k and v|FOLIO_KV_APPEND", c.t.flags = FOLIO_KV_APPEND;
                c.t.k = c.t.v = (folio_tensor){0});
    if (strcmp(backend, "cpu") == 0) /* the reference alone has it */
        BAD(PLAIN, FOLIO_ATTENTION_DECODER, ANY_REFUSAL, "f64", c.t.out.dtype = FOLIO_F64);
    check_still_serves(&f, __LINE__);
    /* [head][token] is as good as any */
    call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
    CHECK_OK(run_call(&c));
    float lse[TOKENS * HEADS];
    memcpy(lse, f.lse.data, sizeof lse);
    c.t.lse_token_stride = 1, c.t.lse_head_stride = TOKENS;
    CHECK_OK(run_call(&c));
    for (int i = 0; i < TOKENS * HEADS; i++)
        CHECK(((float *)f.lse.data)[i % HEADS * TOKENS + i / HEADS] == lse[i]);
    teardown(&f);
}

BACKEND_TEST(errors_forward, tensors_of_the_encoder_types)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "8|6", c.t.q.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "5|6", c.t.out.tokens = 5);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "8|6", c.t.k.tokens = c.t.v.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "k and v", c.t.k = c.t.v = (folio_tensor){0});
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_ONLY, ARG, "k and v", c.t.k = c.t.v = (folio_tensor){0});
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_ONLY, ARG, "6|8", c.t.k.tokens = c.t.v.tokens = 6);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "8|6", c.t.k.tokens = c.t.v.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "6|8", c.t.q.tokens = 6);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "1|cache",
        c.cache = NULL); /* sequence 1 reads its blocks */
    const float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, UNSUPPORTED, "ALiBi", c.t.slopes = slopes);
    check_still_serves(&f, __LINE__);
    teardown(&f);
}

BACKEND_TEST(errors_forward, numbers)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    const float bad[][HEADS] = {{0, 0, NAN, 0}, {0, INFINITY, 0, 0}, {-INFINITY, 0, 0, 0}};
    BAD_DECODER("slopes|2", c.t.slopes = bad[0]);
    BAD_DECODER("slopes|1", c.t.slopes = bad[1]);
    BAD_DECODER("slopes|0", c.t.slopes = bad[2]);
    BAD_DECODER("sinks|2", c.t.sinks = bad[0]);
    BAD_DECODER("sinks|1", c.t.sinks = bad[1]);
    BAD_DECODER("slopes|align", c.t.slopes = (const float *)(const void *)((const char *)bad + 1));
    BAD_DECODER("sinks|align", c.t.sinks = (const float *)(const void *)((const char *)bad + 2));
    const float wrong[] = {NAN, INFINITY, -INFINITY, -1.0f, -0x1p-149f};
    for (int i = 0; i < COUNT_OF(wrong); i++) {
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_scale", c.t.k_scale = wrong[i]);
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "v_scale", c.t.v_scale = wrong[i]);
    }
    check_still_serves(&f, __LINE__);
    /* -inf is no sink, and fine */
    call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.t.sinks = bad[2];
    CHECK_OK(run_call(&c));
    teardown(&f);
}

#define BAD_BIAS(words, ...) BAD_DECODER(words, c.t.bias = good; __VA_ARGS__)

BACKEND_TEST(errors_forward, bias)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    static float bias[3 * HEADS * 5 * 21 + 1];
    /* [3 sequences][heads][5 queries][21 keys] */
    const folio_bias good = {.data = bias,
                             .dtype = FOLIO_F32,
                             .dims = {3, HEADS, 5, 21},
                             .strides = {HEADS * 5 * 21, 5 * 21, 21, 1}};
    BAD_BIAS("bias|dtype", c.t.bias.dtype = (folio_dtype)0);
    BAD_BIAS("fp8_e4m3", c.t.bias.dtype = FOLIO_FP8_E4M3);
    BAD_BIAS("bias|align", c.t.bias.data = (char *)bias + 2);
    BAD_BIAS("2|3", c.t.bias.dims[0] = 2);
    BAD_BIAS("3|4", c.t.bias.dims[1] = 3);
    BAD_BIAS("4|5", c.t.bias.dims[2] = 4);
    BAD_BIAS("20|21", c.t.bias.dims[3] = 20);
    BAD_BIAS("bias|0", c.t.bias.dims[3] = 0);
    BAD_BIAS("bias|-1", c.t.bias.dims[1] = -1);
    BAD_BIAS("bias|stride", c.t.bias.strides[0] = INT64_MAX / 2);
    BAD_BIAS("bias|stride", c.t.bias.strides[3] = INT64_MAX);
    BAD_BIAS("strides[0]|largest",
             c.t.bias.strides[0] = (int64_t)1 << 58); /* its bytes are too many */
    BAD_BIAS("bias|stride", c.t.bias.strides[1] = -1);
    for (int i = 0; i < 4; i++) /* left out among others: neither contiguous nor a broadcast */
        BAD_BIAS("strides[|is 0|dim to 1", c.t.bias.strides[i] = 0);
    BAD_BIAS("bias|largest", memset(c.t.bias.strides, 0, sizeof c.t.bias.strides);
             c.t.bias.dims[2] = (int64_t)1 << 40; c.t.bias.dims[3] = (int64_t)1 << 40);
    check_still_serves(&f, __LINE__);
    /* broadcast dims need no stride; more than needed is fine */
    for (int i = 0; i < 4; i++) {
        call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
        c.t.bias = good;
        c.t.bias.dims[i] = 1, c.t.bias.strides[i] = INT64_MAX;
        CHECK_OK(run_call(&c));
    }
    teardown(&f);
}

/* Strides that are all 0 mean what zero means everywhere: the default, no gaps. */
BACKEND_TEST(errors_forward, bias_without_strides)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    static float bias[4 * (HEADS + 1) * 5 * 21], with[TOKENS * HEADS * DV];
    static const int64_t dims[][4] = {
        {3, HEADS, 5, 21}, {4, HEADS + 1, 5, 21}, {1, HEADS, 1, 21}, {3, 1, 5, 1}, {1, 1, 1, 1}};
    support_fill(bias, COUNT_OF(bias), 9, 2.0f);
    for (int i = 0; i < COUNT_OF(dims); i++) {
        call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
        c.t.bias = (folio_bias){.data = bias, .dtype = FOLIO_F32};
        memcpy(c.t.bias.dims, dims[i], sizeof dims[i]);
        c.t.bias.strides[3] = 1;
        for (int d = 2; d >= 0; d--) c.t.bias.strides[d] = c.t.bias.strides[d + 1] * dims[i][d + 1];
        CHECK_OK(run_call(&c));
        memcpy(with, f.out.data, sizeof with);
        memset(c.t.bias.strides, 0, sizeof c.t.bias.strides);
        CHECK_OK(run_call(&c));
        CHECK(memcmp(with, f.out.data, sizeof with) == 0);
    }
    teardown(&f);
}

/* A cache that is not the layer's. */
BACKEND_TEST(errors_forward, cache_geometry)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    for (int i = 0; i < 6; i++) {
        const char *words[] = {"1|2", "24|16", "16|8", "bf16|f32", "32|16", "11|12"};
        folio_kv_cache_desc d = cache_desc(FOLIO_F32);
        if (i == 0) d.num_kv_heads = 1;
        if (i == 1) d.k_head_size = 24;
        if (i == 2) d.v_head_size = 16;
        if (i == 3) d.dtype = FOLIO_BF16;
        if (i == 4) d.block_size = 32;
        if (i == 5) d.num_blocks = BLOCKS - 1;
        folio_kv_cache *other = NULL;
        CHECK_OK(folio_kv_cache_create(ctx, &d, &other));
        BAD_DECODER(words[i], c.cache = other);
        BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, words[i], c.cache = other);
        folio_kv_cache_destroy(other);
    }
    BAD_DECODER("fp8_e4m3|f32", c.cache = f.cache[FP8]);
    check_still_serves(&f, __LINE__);
    folio_kv_cache_desc d = cache_desc(FOLIO_F32);
    d.num_blocks = BLOCKS + 1; /* more is fine */
    folio_kv_cache *larger = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &d, &larger));
    support_poison_cache(larger);
    call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.cache = larger;
    CHECK_OK(run_call(&c));
    folio_kv_cache_destroy(larger);
    teardown(&f);
}

BACKEND_TEST(errors_forward, runs)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    size_t need = f.workspace.bytes - 64;
    char *w = f.workspace.data;
    BAD_DECODER("struct_size", c.r.struct_size = 0);
    BAD_DECODER("stream", c.r.stream = &f);
    BAD_DECODER("align|64", c.r.workspace = w + 32; c.r.workspace_size = need + 32);
    if (need > 0) BAD_DECODER("workspace", c.r.workspace = w; c.r.workspace_size = need - 1);
    check_still_serves(&f, __LINE__);
    call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.r.workspace = w, c.r.workspace_size = need;
    CHECK_OK(run_call(&c));
    CHECK(memcmp(f.out.data, f.good_out, sizeof f.good_out) == 0);
    CHECK(support_is_poison(w + need, 64)); /* no byte past what was asked for */
    teardown(&f);
}

/* A plan that brings no workspace of its own. */
BACKEND_TEST(errors_forward, no_workspace)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    folio_plan_desc d = plan_desc(&f);
    d.flags = FOLIO_PLAN_NO_WORKSPACE;
    folio_plan *plan = NULL;
    CHECK_OK(folio_plan_create(ctx, &d, &plan));
    CHECK_OK(folio_plan_update(plan, f.batch, NULL));
    size_t need = 0;
    CHECK_OK(folio_plan_get_workspace_size(plan, &need));
    CHECK(need <= f.workspace.bytes);
    if (need > 0) BAD_DECODER("workspace", c.plan = plan);
    call c = good_call(&f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.plan = plan;
    c.r.workspace = f.workspace.data, c.r.workspace_size = need;
    CHECK_OK(run_call(&c));
    CHECK(memcmp(f.out.data, f.good_out, sizeof f.good_out) == 0);
    folio_plan_destroy(plan);
    teardown(&f);
}

/* ----------------------------------------------------------------------- the plan and its batch */

BACKEND_TEST(errors_forward, batch_changes_and_lifetimes)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    folio_plan_desc d = plan_desc(&f);
    folio_plan *fresh = NULL;
    CHECK_OK(folio_plan_create(ctx, &d, &fresh));
    BAD_DECODER("update", c.plan = fresh); /* never updated */
    folio_plan_info info = {.struct_size = sizeof info};
    REFUSED(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, &info), ARG, "update");
    CHECK_OK(folio_plan_update(fresh, f.batch, NULL));
    CHECK_OK(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, &info));
    REFUSED(folio_plan_get_info(fresh, 2, FOLIO_ATTENTION_DECODER, &info), ARG, "2");
    REFUSED(folio_plan_get_info(fresh, FP8, FOLIO_ATTENTION_ENCODER, &info), ARG, "encoder");
    REFUSED(folio_plan_get_info(NULL, PLAIN, FOLIO_ATTENTION_DECODER, &info), ARG, "plan");
    REFUSED(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, NULL), ARG, "info");
    folio_plan_destroy(fresh);
    /* looking is no change */
    folio_batch_view v = {.struct_size = sizeof v};
    CHECK_OK(folio_batch_get_view(f.batch, FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_PHASE_DECODE, &v));
    check_still_serves(&f, __LINE__);
    /* a change is refused until the next update */
    folio_batch_seq s = good_seq(2);
    CHECK_OK(folio_batch_add(f.batch, &s));
    BAD_DECODER("changed", c.layer = 1);
    CHECK_OK(folio_plan_update(f.plan, f.batch, NULL));
    folio_batch_clear(f.batch);
    BAD_DECODER("changed", c.layer = 1);
    for (int i = 0; i < 3; i++) {
        s = good_seq(i);
        CHECK_OK(folio_batch_add(f.batch, &s));
    }
    BAD_DECODER("changed", c.layer = 1); /* the same sequences again, but filled anew */
    CHECK_OK(folio_plan_update(f.plan, f.batch, NULL));
    check_still_serves(&f, __LINE__);
    const int32_t len = 5;
    folio_batch_arrays a = {.struct_size = sizeof a, .num_seqs = 1, .seq_lens = &len};
    CHECK_OK(folio_batch_set_block_tables(f.batch, &a, table0, 1));
    BAD_DECODER("changed", c.layer = 1);
    folio_batch_clear(f.batch);
    for (int i = 0; i < 3; i++) {
        s = good_seq(i);
        CHECK_OK(folio_batch_add(f.batch, &s));
    }
    CHECK_OK(folio_plan_update(f.plan, f.batch, NULL));
    /* the plan keeps its batch alive */
    folio_batch_destroy(f.batch);
    f.batch = NULL;
    check_still_serves(&f, __LINE__);
    teardown(&f);
}

/* ENCODER without encoder lengths, cross attention without tables, cross blocks without lengths. */
BACKEND_TEST(errors_forward, incomplete_batches)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    const struct {
        folio_attention_type type;
        bool encoder, table;
        const char *words;
    } cases[] = {{FOLIO_ATTENTION_ENCODER, false, false, "encoder_len"},
                 {FOLIO_ATTENTION_ENCODER_DECODER, false, false, "encoder_len"},
                 {FOLIO_ATTENTION_ENCODER_DECODER, true, false, "cross_block_table"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_batch *batch = empty_batch(ctx, BLOCK);
        folio_batch_seq s = good_seq(0);
        if (!cases[i].encoder) s.encoder_len = s.encoder_new_len = 0;
        if (!cases[i].table) s.cross_block_table = NULL, s.num_cross_blocks = 0;
        CHECK_OK(folio_batch_add(batch, &s));
        folio_status status = folio_plan_update(f.plan, batch, NULL); /* there or in the forward */
        int64_t fresh = cases[i].encoder ? ENCODER_TOKENS : 0;
        int64_t rows = cases[i].type == FOLIO_ATTENTION_ENCODER ? fresh : 5;
        if (status == FOLIO_OK)
            BAD(PLAIN, cases[i].type, ARG, cases[i].words, c.t.q.tokens = c.t.out.tokens = rows;
                c.t.k.tokens = c.t.v.tokens = fresh);
        else CHECK(strstr(folio_last_error(), cases[i].words) != NULL);
        folio_batch_destroy(batch);
        CHECK_OK(folio_plan_update(f.plan, f.batch, NULL));
    }
    /* a context, a cache, but no block table */
    folio_batch *batch = empty_batch(ctx, BLOCK);
    folio_batch_seq s = good_seq(1);
    s.block_table = NULL, s.num_blocks = 0;
    CHECK_OK(folio_batch_add(batch, &s));
    if (folio_plan_update(f.plan, batch, NULL) == FOLIO_OK)
        BAD_DECODER("block_table", c.t.q.tokens = c.t.k.tokens = c.t.v.tokens = c.t.out.tokens = 1);
    else CHECK(strstr(folio_last_error(), "block_table") != NULL);
    folio_batch_destroy(batch);
    CHECK_OK(folio_plan_update(f.plan, f.batch, NULL));
    check_still_serves(&f, __LINE__);
    teardown(&f);
}

/* -------------------------------------------------------------------------------------- updates */

/* A batch of these sequences is refused, when added or at the update; the plan keeps serving. */
static void bad_update(fixture *f, int line, const folio_batch_seq *seqs, int count,
                       const char *words)
{
    folio_batch *batch = empty_batch(f->ctx, BLOCK);
    folio_status status = FOLIO_OK;
    support_mark_error();
    for (int i = 0; i < count && status == FOLIO_OK; i++) status = folio_batch_add(batch, &seqs[i]);
    if (status == FOLIO_OK) status = folio_plan_update(f->plan, batch, NULL);
    support_refused(__FILE__, line, "update", status, ARG, words);
    check_untouched(f, line);
    check_still_serves(f, line);
    folio_batch_destroy(batch);
}

/* A batch with two new tokens in one slot: refused by a forward that writes, and by no other. */
static void bad_write(fixture *f, int line, const folio_batch_seq *seqs, folio_attention_type type,
                      const char *words)
{
    static float q[32 * HEADS * DK], k[32 * HEADS * DK], out[32 * HEADS * DV];
    folio_batch *batch = empty_batch(f->ctx, BLOCK);
    folio_batch_info info = {.struct_size = sizeof info};
    for (int i = 0; i < 3; i++) CHECK_OK(folio_batch_add(batch, &seqs[i]));
    CHECK_OK(folio_plan_update(f->plan, batch, NULL));
    CHECK_OK(folio_batch_get_info(batch, &info));
    int64_t rows = info.num_query_tokens;
    int64_t fresh = type == FOLIO_ATTENTION_DECODER ? rows : info.num_encoder_tokens;
    call c = good_call(f, PLAIN, type);
    c.t.q = (folio_tensor){q, 0, rows, 0, 0};
    c.t.k = c.t.v = (folio_tensor){k, 0, fresh, 0, 0};
    c.t.out = (folio_tensor){out, 0, rows, 0, 0};
    c.t.lse = NULL;
    memset(out, 0x55, sizeof out);
    support_mark_error();
    folio_status status = run_call(&c);
    support_refused(__FILE__, line, "write", status, ARG, words);
    for (size_t i = 0; i < sizeof out; i++) CHECK_INT(((const unsigned char *)out)[i], 0x55);
    c.t.flags = FOLIO_KV_APPEND;
    CHECK_OK(run_call(&c));
    c.t.flags = 0, c.t.k = c.t.v = (folio_tensor){0};
    CHECK_OK(run_call(&c));
    check_untouched(f, line);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    check_still_serves(f, line);
    folio_batch_destroy(batch);
}

#define GOOD_BUT(...)                                                                              \
    int32_t t0[2] = {3, 5}, t1[5] = {1, 4, 0, 2, 6}, x0[1] = {7}, x1[1] = {8};                     \
    int64_t slots[5] = {48, 49, 50, 51, 52}, cross_slots[6] = {112, 113, 114, 115, 116, 117};      \
    folio_batch_seq s[3] = {good_seq(0), good_seq(1), good_seq(2)};                                \
    s[0].block_table = t0, s[1].block_table = t1;                                                  \
    s[0].cross_block_table = x0, s[1].cross_block_table = x1;                                      \
    s[0].slots = slots, s[0].cross_slots = cross_slots;                                            \
    __VA_ARGS__

#define BAD_UPDATE(words, ...)                                                                     \
    do {                                                                                           \
        GOOD_BUT(__VA_ARGS__);                                                                     \
        bad_update(&f, __LINE__, s, 3, words);                                                     \
    } while (0)
#define BAD_WRITE(type, words, ...)                                                                \
    do {                                                                                           \
        GOOD_BUT(__VA_ARGS__);                                                                     \
        bad_write(&f, __LINE__, s, type, words);                                                   \
    } while (0)

BACKEND_TEST(errors_forward, blocks_and_slots)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    BAD_UPDATE("12", t1[1] = 12);
    BAD_UPDATE("2147483647", t1[0] = INT32_MAX);
    BAD_UPDATE("-2", t1[0] = -2);
    BAD_UPDATE("-2147483648", t0[0] = INT32_MIN);
    BAD_UPDATE("block", t1[0] = FOLIO_NO_BLOCK); /* the row sees all 21 keys */
    BAD_UPDATE("block", t1[1] = FOLIO_NO_BLOCK);
    BAD_UPDATE("12", x1[0] = 12);
    BAD_UPDATE("-2", x0[0] = -2);
    BAD_UPDATE("cross", x1[0] = FOLIO_NO_BLOCK);
    BAD_UPDATE("192", slots[4] = BLOCKS * BLOCK);
    BAD_UPDATE("-2", slots[0] = -2);
    BAD_UPDATE("9223372036854775807", slots[1] = INT64_MAX);
    BAD_UPDATE("192", cross_slots[5] = BLOCKS * BLOCK);
    BAD_UPDATE("-3", cross_slots[0] = -3);
    /* -1 twice is nothing twice */
    folio_batch *batch = empty_batch(ctx, BLOCK);
    const int64_t none[5] = {-1, -1, -1, -1, 48};
    folio_batch_seq s = good_seq(0);
    s.slots = none;
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(f.plan, batch, NULL));
    folio_batch_destroy(batch);
    teardown(&f);
}

BACKEND_TEST(errors_forward, two_tokens_in_one_slot)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    const folio_attention_type self = FOLIO_ATTENTION_DECODER;
    const folio_attention_type cross = FOLIO_ATTENTION_ENCODER_DECODER;
    BAD_WRITE(self, "new token 2 of seq 0 and new token 4 of seq 0|slot 50, in block 3",
              slots[4] = 50);
    BAD_WRITE(self, "new token 4 of seq 0 and new token 0 of seq 1|slot 68, in block 4",
              slots[4] = 4 * 16 + 4);
    BAD_WRITE(cross, "new token 0 of seq 0 and new token 3 of seq 0|slot 115, in block 7",
              cross_slots[0] = 115);
    BAD_WRITE(cross, "new token 0 of seq 0 and new token 0 of seq 1|slot 112, in block 7",
              s[1].encoder_new_len = 3;
              s[1].cross_block_table = x0); /* by table */
    BAD_WRITE(self, "new token 0 of seq 1 and new token 16 of seq 1|slot 19, in block 1",
              s[1].query_len = 18;
              t1[1] = 1); /* tokens 3.. and 16.. in one block */
    BAD_WRITE(self, "new token 4 of seq 0 and new token 0 of seq 1|slot 68, in block 4",
              s[0].slots = NULL;
              t0[0] = 4);
    teardown(&f);
}

/* A prefix of full blocks may be shared, as long as nobody writes there. */
BACKEND_TEST(errors_forward, shared_prefix_is_fine)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    folio_batch *batch = empty_batch(ctx, BLOCK);
    const int32_t a[2] = {2, 3}, b[2] = {2, 4};
    folio_batch_seq s = good_seq(1);
    s.block_table = a;
    CHECK_OK(folio_batch_add(batch, &s));
    s.block_table = b;
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(f.plan, batch, NULL));
    folio_batch_destroy(batch);
    teardown(&f);
}

BACKEND_TEST(errors_forward, limits_and_lengths)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    static int64_t many[64];
    for (int i = 0; i < 64; i++) many[i] = -1;
    BAD_UPDATE("65|64", s[1].seq_len = 65; s[1].num_blocks = 5);
    BAD_UPDATE("33|32", s[2].query_len = 27);
    BAD_UPDATE("65|64", s[1].encoder_len = 65; s[1].cross_block_table = NULL;
               s[1].num_cross_blocks = 0);
    BAD_UPDATE("17|16", s[0].encoder_len = s[0].encoder_new_len = 17; s[0].cross_slots = many;
               s[0].cross_block_table = t0; s[0].num_cross_blocks = 2);
    BAD_UPDATE("21", s[1].num_blocks = 1);
    BAD_UPDATE("22|21", s[1].query_len = 22);
    BAD_UPDATE("-1", s[1].query_len = -1);
    BAD_UPDATE("-21", s[1].seq_len = -21);
    BAD_UPDATE("2|3", s[1].encoder_new_len = 2);
    BAD_UPDATE("-3", s[1].encoder_len = -3);
    folio_batch_seq five[5];
    for (int i = 0; i < 5; i++) five[i] = good_seq(2);
    bad_update(&f, __LINE__, five, 5, "5|4");
    /* a batch of another block size */
    folio_batch *batch = empty_batch(ctx, 8);
    folio_batch_seq s = good_seq(2);
    CHECK_OK(folio_batch_add(batch, &s));
    REFUSED(folio_plan_update(f.plan, batch, NULL), ARG, "8|16");
    folio_batch_destroy(batch);
    REFUSED(folio_plan_update(f.plan, NULL, NULL), ARG, "batch");
    REFUSED(folio_plan_update(NULL, f.batch, NULL), ARG, "plan");
    check_still_serves(&f, __LINE__);
    teardown(&f);
}

/* Released blocks: allowed exactly where no row of any attention in the plan looks. */
BACKEND_TEST(errors_forward, released_window_blocks)
{
    const struct {
        int64_t window_left;
        int32_t table[3];
        bool fine;
    } cases[] = {{7, {-1, -1, 5}, true},  /* row 39 sees 32..39 */
                 {8, {-1, -1, 5}, false}, /* and 31 */
                 {8, {-1, 4, 5}, true},    {23, {-1, 4, 5}, true},  {24, {-1, 4, 5}, false},
                 {7, {-1, -1, -1}, false}, {7, {-1, 4, -1}, false}, {-1, {-1, 4, 5}, false},
                 {7, {-2, 4, 5}, false}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_attention_desc ad = attention_desc(FOLIO_F32);
        ad.windowed = 1, ad.window_left = cases[i].window_left;
        folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
        kit_layer l = {0};
        CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
        CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
        CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_query_tokens = 1, .max_seq_len = 64));
        folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 40,
                                       .block_table = cases[i].table, .num_blocks = 3);
        REQUIRE_TEST(l.plan);
        folio_status status = folio_batch_add(l.batch, &s);
        if (status == FOLIO_OK) status = folio_plan_update(l.plan, l.batch, NULL);
        CHECK_MSG((status == FOLIO_OK) == cases[i].fine, "case %d: %s %s", i,
                  folio_status_name(status), folio_last_error());
        kit_layer_close(&l);
    }
}

/* Rows past the keys by more than the window see none: no block is needed, not even the one behind which
 * they stop looking. */
BACKEND_TEST(errors_forward, released_blocks_where_no_row_sees_a_key)
{
    const struct {
        int64_t first_query_pos;
        int32_t table[2];
        const char *refused; /* NULL: taken */
    } cases[] = {{100, {3, -1}, NULL}, {100, {-1, -1}, NULL}, {22, {3, -1}, "keys [19, 20)"},
                 {23, {-1, -1}, NULL}, {-2, {-1, 5}, NULL},   {-1, {-1, 5}, "keys [0, 1)"}};
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    ad.windowed = 1, ad.window_left = 3;
    folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
    kit_layer l = {0};
    CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
    CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
    support_poison_cache(l.cache);
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_query_tokens = 2, .max_seq_len = 64));
    REQUIRE_TEST(l.plan != NULL);
    for (int i = 0; i < COUNT_OF(cases); i++) {
        float q[2 * HEADS * DK] = {1}, out[2 * HEADS * DV], lse[2 * HEADS];
        const int64_t nowhere[2] = {-1, -1};
        folio_batch_seq s =
            FOLIO_WITH(folio_batch_seq, .query_len = 2, .seq_len = 20,
                       .block_table = cases[i].table, .num_blocks = 2, .slots = nowhere,
                       .positions_given = 1, .first_query_pos = cases[i].first_query_pos);
        folio_batch_clear(l.batch);
        CHECK_OK(folio_batch_add(l.batch, &s));
        if (cases[i].refused != NULL) {
            CHECK_REFUSED(folio_plan_update(l.plan, l.batch, NULL), ARG, cases[i].refused);
            continue;
        }
        CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        memset(out, 0x55, sizeof out);
        folio_tensors t =
            FOLIO_WITH(folio_tensors, .q = {q, 0, 2, 0, 0}, .out = {out, 0, 2, 0, 0}, .lse = lse);
        CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
        for (int x = 0; x < 2 * HEADS * DV; x++) CHECK(out[x] == 0.0f);
        for (int x = 0; x < 2 * HEADS; x++) CHECK(lse[x] == -INFINITY);
    }
    kit_layer_close(&l);
}

/* The longest query of one sequence is a limit of its own. */
BACKEND_TEST(errors_forward, longest_query)
{
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
    kit_layer l = {0};
    CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
    CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_seqs = 4, .max_query_tokens = 8, .max_seq_len = 64,
                            .max_query_len = 2, .flags = FOLIO_PLAN_BATCH_INVARIANT));
    REQUIRE_TEST(l.plan);
    const int32_t tables[2][1] = {{4}, {5}};
    for (int64_t i = 0; i < 2; i++) {
        folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 2 + i, .seq_len = 9,
                                       .block_table = tables[i], .num_blocks = 1);
        CHECK_OK(folio_batch_add(l.batch, &s));
        if (i == 0) CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        else
            REFUSED(folio_plan_update(l.plan, l.batch, NULL), ARG,
                    "seq 1|query_len 3|max_query_len 2");
    }
    kit_layer_close(&l);
}

/* -------------------------------------------------------------------------------- making a plan */

#define BAD_PLAN(status, words, ...)                                                               \
    do {                                                                                           \
        folio_attention *list[NUM_ATTENTIONS] = {f.attention[0], f.attention[1]};                  \
        uint32_t types[NUM_ATTENTIONS] = {15u, 1u};                                                \
        folio_plan_desc d = plan_desc(&f);                                                         \
        d.attentions = list, d.types = types;                                                      \
        folio_plan *made = NOWHERE;                                                                \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_plan_create(ctx, &d, &made), status, words);                                 \
        CHECK(made == NULL);                                                                       \
    } while (0)

BACKEND_TEST(errors_forward, plan_create)
{
    fixture f;
    REQUIRE_TEST(setup_run(&f, ctx));
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    ad.windowed = 1, ad.window_left = 4;
    folio_attention *windowed = NULL, *narrowest = NULL;
    CHECK_OK(folio_attention_create(ctx, &ad, &windowed));
    ad.window_left = 0, ad.window_right = -1; /* a token and what follows it: a window too */
    CHECK_OK(folio_attention_create(ctx, &ad, &narrowest));
    BAD_PLAN(ARG, "attentions", d.attentions = NULL);
    BAD_PLAN(ARG, "1", list[1] = NULL);
    BAD_PLAN(ARG, "0", d.num_attentions = 0);
    BAD_PLAN(ARG, "-1", d.num_attentions = -1);
    BAD_PLAN(ARG, "types|1", types[1] = 0);
    BAD_PLAN(ARG, "types", types[0] = 16u);
    BAD_PLAN(ARG, "types", types[1] = 0x80000001u);
    BAD_PLAN(ARG, "-16", d.block_size = -16);
    BAD_PLAN(ARG, "4097", d.block_size = 4097);
    BAD_PLAN(ARG, "num_blocks", d.num_blocks = 0);
    BAD_PLAN(ARG, "12", d.block_size = 0); /* blocks of no size */
    BAD_PLAN(ARG, "-12", d.num_blocks = -12);
    BAD_PLAN(ARG, "2147483648", d.num_blocks = (int64_t)1 << 31);
    BAD_PLAN(ARG, "-1", d.max_seqs = -1);
    BAD_PLAN(ARG, "-2", d.max_query_tokens = -2);
    BAD_PLAN(ARG, "-3", d.max_seq_len = -3);
    BAD_PLAN(ARG, "-4", d.max_encoder_tokens = -4);
    BAD_PLAN(ARG, "max_query_len|-5", d.max_query_len = -5);
    BAD_PLAN(ARG, "max_query_len", d.max_query_len = d.max_query_tokens + 1);
    BAD_PLAN(ARG, "flags", d.flags = 8u);
    BAD_PLAN(ARG, "flags", d.flags = 0x80000000u | FOLIO_PLAN_NO_WORKSPACE);
    BAD_PLAN(UNSUPPORTED, "window", list[0] = windowed);
    BAD_PLAN(UNSUPPORTED, "window", list[0] = narrowest);
    folio_plan_desc d = plan_desc(&f);
    folio_plan *made = NOWHERE;
    REFUSED(folio_plan_create(NULL, &d, &made), ARG, "ctx");
    REFUSED(folio_plan_create(ctx, NULL, &made), ARG, "desc");
    REFUSED(folio_plan_create(ctx, &d, NULL), ARG, "out");
    size_t bytes = 77;
    REFUSED(folio_plan_get_workspace_size(NULL, &bytes), ARG, "plan");
    REFUSED(folio_plan_get_workspace_size(f.plan, NULL), ARG, "bytes");
    CHECK_INT(bytes, 77);
    folio_attention_destroy(windowed);
    folio_attention_destroy(narrowest);
    teardown(&f);
}

/* Limits whose products pass 2^63: refused, or out of memory, never a small allocation. */
BACKEND_TEST(errors_forward, plan_sizes_that_near_2_63)
{
    support_counter counter = {.limit = (size_t)1 << 40};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *limited = support_context(backend, 1, &allocator);
    fixture f;
    REQUIRE_TEST(limited != NULL && setup(&f, limited));
    const int64_t sizes[] = {INT64_MAX, INT64_MAX / 2, ((int64_t)1 << 58) + 1};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        folio_plan_desc good = plan_desc(&f);
        int64_t *fields[] = {&good.max_seqs, &good.max_query_tokens, &good.max_seq_len,
                             &good.max_encoder_tokens};
        for (int j = 0; j < COUNT_OF(fields); j++) {
            int64_t before = *fields[j];
            *fields[j] = sizes[i];
            folio_plan *made = NOWHERE;
            REFUSED(folio_plan_create(limited, &good, &made), ANY_REFUSAL, "");
            CHECK(made == NULL);
            *fields[j] = before;
        }
    }
    teardown(&f);
    folio_context_destroy(limited);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}
