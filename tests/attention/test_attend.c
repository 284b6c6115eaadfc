/*
 * test_attend.c: attention in one call. The same out, lse and cache, bit for bit, as attention, batch and
 * plan made by hand, whatever the types and options; what is bad is refused and writes nothing; nothing
 * stays allocated.
 */
#include "kit/layer.h"
#include "support.h"

#define ARG FOLIO_ERR_ARGUMENT

enum { HEADS = 4, KV_HEADS = 2, DK = 16, DV = 8, BLOCK = 16, BLOCKS = 12, LAYERS = 2, ROWS = 11 };
enum { SEQS = 4, STRIDE = 3 };

/* A prompt, a decode, padding, a chunk after 37 tokens. */
static const int32_t starts[SEQS + 1] = {0, 5, 6, 8, ROWS}, lens[SEQS] = {5, 21, 0, 40};
static const int32_t tables[SEQS][STRIDE] = {{3, 99, 99}, {1, 4, 99}, {99, 99, 99}, {7, 11, 0}};
static const float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f}, sinks[HEADS] = {1, -1, 0, 2},
                   head_scales[KV_HEADS] = {0.5f, 3.0f};

/* Numbers of a call, and the cache it works on. */
typedef struct {
    folio_dtype dtype;
    uint16_t halves[3][ROWS * HEADS * DK];
    float floats[3][ROWS * HEADS * DK];
    float out[ROWS * HEADS * DV], lse[ROWS * HEADS];
    folio_kv_cache *cache;
} world;

static folio_status make_cache(folio_context *ctx, folio_dtype dtype, folio_kv_cache **cache)
{
    const folio_kv_cache_desc d = FOLIO_WITH(
        folio_kv_cache_desc, .num_layers = LAYERS, .num_blocks = BLOCKS, .block_size = BLOCK,
        .num_kv_heads = KV_HEADS, .k_head_size = DK, .v_head_size = DV, .dtype = dtype);
    return folio_kv_cache_create(ctx, &d, cache);
}

/* The same numbers each time, so that two worlds begin alike. */
static void open_world(world *w, folio_context *ctx, folio_dtype dtype, folio_dtype kv_dtype)
{
    enum { TOKENS = BLOCKS * BLOCK };
    static float k[TOKENS * KV_HEADS * DK], v[TOKENS * KV_HEADS * DV];
    int64_t slots[TOKENS];
    memset(w, 0, sizeof *w);
    w->dtype = dtype;
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < ROWS * HEADS * DK; i++) {
            float x = support_random(70 + (uint64_t)t, (uint64_t)i);
            w->floats[t][i] = x;
            if (dtype != FOLIO_F32) w->halves[t][i] = (uint16_t)kit_encode(dtype, (double)x);
        }
    memset(w->out, 0x55, sizeof w->out);
    memset(w->lse, 0x55, sizeof w->lse);
    CHECK_OK(make_cache(ctx, kv_dtype, &w->cache));
    if (w->cache == NULL) return;
    kit_poison_cache(w->cache);
    for (int i = 0; i < TOKENS; i++) slots[i] = i;
    support_fill(k, COUNT_OF(k), 80, 1.0f);
    support_fill(v, COUNT_OF(v), 81, 1.0f);
    const folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, TOKENS, 0, 0},
                                            .v = {v, FOLIO_F32, TOKENS, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(w->cache, 1, &write, NULL));
}

static folio_tensor input(world *w, int t)
{
    void *data = w->dtype == FOLIO_F32 ? (void *)w->floats[t] : (void *)w->halves[t];
    return (folio_tensor){data, w->dtype, ROWS, 0, 0};
}

/* All arguments of a call. */
typedef struct {
    folio_attention_desc attention;
    folio_attention_type type;
    folio_step step;
    folio_kv_cache *cache;
    int32_t layer;
    folio_tensors t;
} args;

static args good_args(world *w)
{
    return (args){.attention = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS),
                  .step = FOLIO_WITH(
                      folio_step, .num_seqs = SEQS, .query_start = starts, .seq_lens = lens,
                      .table = {.kind = FOLIO_TABLE_ROWS, .indices = tables, .row_stride = STRIDE}),
                  .cache = w->cache,
                  .layer = 1,
                  .t = FOLIO_WITH(folio_tensors, .q = input(w, 0), .k = input(w, 1),
                                  .v = input(w, 2), .out = {w->out, w->dtype, ROWS, 0, 0},
                                  .lse = w->lse)};
}

static folio_status attend(folio_context *ctx, const args *a, const folio_run *run)
{
    return folio_attend(ctx, &a->attention, a->type, &a->step, a->cache, a->layer, &a->t, run);
}

/* The long way to the same: all parts by hand, with limits and every array. */
static folio_status by_plan(folio_context *ctx, const args *a, folio_dtype kv_dtype)
{
    static const int32_t two_each[SEQS + 1] = {0, 2, 4, 6, 8}, no_context[SEQS] = {5, 1, 2, 3};
    folio_step step = a->step;
    if (step.query_start == NULL) step.query_start = two_each;
    if (step.seq_lens == NULL) step.seq_lens = no_context;
    folio_attention_desc ad = a->attention;
    ad.num_kv_heads = KV_HEADS, ad.k_head_size = DK, ad.v_head_size = DV;
    ad.dtype = a->t.q.dtype, ad.kv_dtype = a->cache != NULL ? kv_dtype : ad.dtype;
    const uint32_t types = FOLIO_ATTENTION_BIT(a->type);
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    folio_batch *batch = support_batch(ctx, BLOCK);
    CHECK_OK(folio_attention_create(ctx, &ad, &attention));
    const folio_plan_desc pd =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .num_attentions = 1, .types = &types,
                   .block_size = BLOCK, .num_blocks = BLOCKS, .max_seqs = 9,
                   .max_query_tokens = 100, .max_seq_len = 1000, .max_encoder_tokens = 100);
    CHECK_OK(folio_plan_create(ctx, &pd, &plan));
    CHECK_OK(folio_batch_set(batch, &step));
    CHECK_OK(folio_plan_update(plan, batch, NULL));
    folio_status status =
        folio_attention_forward(plan, 0, a->type, a->cache, a->layer, &a->t, NULL);
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_attention_destroy(attention);
    return status;
}

static bool same_cache(const folio_kv_cache *a, const folio_kv_cache *b)
{
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        folio_kv_cache_view x = support_view(a, layer), y = support_view(b, layer);
        if (memcmp(x.k, y.k, (size_t)x.k_array.bytes) != 0) return false;
        if (memcmp(x.v, y.v, (size_t)x.v_array.bytes) != 0) return false;
    }
    return true;
}

static bool same_results(const world *a, const world *b)
{
    return memcmp(a->out, b->out, sizeof a->out) == 0 && memcmp(a->lse, b->lse, sizeof a->lse) == 0;
}

/* One change at a time of a good call: an option, a type, another form of the step. */
enum change {
    NOTHING,
    HEADS_GIVEN, /* as the cache has them */
    NOT_CAUSAL,
    WINDOW_LEFT,
    WINDOW_RIGHT,
    SCALE,
    SOFT_CAP,
    SLOPES,
    SINKS,
    BIAS,
    K_SCALE,
    V_SCALE,
    K_HEAD_SCALES,
    V_HEAD_SCALES,
    ALL_CACHED,
    POSITIONS,     /* and more queries than keys */
    ONE_LENGTH,    /* query_start NULL: as many rows for each */
    WITHOUT_CACHE, /* prompts of lengths that differ, read from k and v only */
    CROSS,
    ENCODER,
    ENCODER_ONLY,
    NUM_CHANGES
};

static void change(args *a, int c)
{
    static const float bias[SEQS * HEADS * 5] = {1, -1, 2};
    static const int32_t encoder_lens[SEQS] = {14, 17, 0, 9}, encoder_new[SEQS] = {0, 0, 0, 9};
    static const int32_t encoder_all[SEQS] = {3, 2, 0, 6}, short_lens[SEQS] = {4, 21, 0, 40};
    static const int32_t two_each[SEQS] = {2, 2, 2, 2}, own[SEQS][STRIDE] = {{3}, {1}, {2}, {7}};
    static const int64_t first_query[SEQS] = {2, 30, 0, 37}, first_key[SEQS] = {0, 8, 0, 0};
    folio_attention_desc *d = &a->attention;
    folio_step *step = &a->step;
    folio_tensors *t = &a->t;
    switch ((enum change)c) {
    case NOTHING:
    case NUM_CHANGES: break;
    case HEADS_GIVEN: d->num_kv_heads = KV_HEADS, d->k_head_size = DK, d->v_head_size = DV; break;
    case NOT_CAUSAL: step->causality_default = FOLIO_CAUSAL_NO; break;
    case WINDOW_LEFT: d->windowed = 1, d->window_left = 7; break;
    case WINDOW_RIGHT:
        d->windowed = 1, d->window_left = -1, d->window_right = 2;
        step->causality_default = FOLIO_CAUSAL_NO;
        break;
    case SCALE: d->scale = 0.7f; break;
    case SOFT_CAP: d->soft_cap = 1.5f; break;
    case SLOPES: t->slopes = slopes; break;
    case SINKS: t->sinks = sinks; break;
    case BIAS: t->bias = (folio_bias){bias, FOLIO_F32, .dims = {SEQS, HEADS, 5, 1}}; break;
    case K_SCALE: t->k_scale = 0.5f; break;
    case V_SCALE: t->v_scale = 2.0f; break;
    case K_HEAD_SCALES: t->k_head_scales = head_scales; break;
    case V_HEAD_SCALES: t->v_head_scales = head_scales; break;
    case ALL_CACHED: t->k = t->v = (folio_tensor){0}; break;
    case POSITIONS:
        step->seq_lens = short_lens;
        step->first_query_pos = first_query, step->first_key_pos = first_key;
        t->k = t->v = (folio_tensor){0};
        break;
    case ONE_LENGTH:
        step->query_start = NULL, step->seq_lens = two_each, step->table.indices = own[0];
        t->q.tokens = t->k.tokens = t->v.tokens = t->out.tokens = 2 * SEQS;
        break;
    case WITHOUT_CACHE:
        d->num_kv_heads = KV_HEADS, d->k_head_size = DK, d->v_head_size = DV;
        step->seq_lens = NULL, step->table = (folio_table){.kind = FOLIO_TABLE_NONE};
        a->cache = NULL, a->layer = 0;
        break;
    case CROSS:
        a->type = FOLIO_ATTENTION_ENCODER_DECODER;
        step->cross_table = step->table, step->table = (folio_table){.kind = FOLIO_TABLE_NONE};
        step->encoder_lens = encoder_lens, step->encoder_new_lens = encoder_new;
        t->k.tokens = t->v.tokens = 9;
        break;
    case ENCODER:
        a->type = FOLIO_ATTENTION_ENCODER;
        step->encoder_lens = step->encoder_new_lens = encoder_all;
        break;
    case ENCODER_ONLY: a->type = FOLIO_ATTENTION_ENCODER_ONLY; break;
    }
}

static void compare(folio_context *ctx, folio_dtype dtype, folio_dtype kv_dtype, int c)
{
    static world once, planned, plain;
    open_world(&once, ctx, dtype, kv_dtype);
    open_world(&planned, ctx, dtype, kv_dtype);
    open_world(&plain, ctx, dtype, kv_dtype);
    if (once.cache == NULL || planned.cache == NULL || plain.cache == NULL) return;
    args a = good_args(&once), b = good_args(&planned), p = good_args(&plain);
    change(&a, c);
    change(&b, c);
    CHECK_OK(attend(ctx, &a, NULL));
    CHECK_OK(by_plan(ctx, &b, kv_dtype));
    CHECK_OK(attend(ctx, &p, NULL));
    CHECK_MSG(same_results(&once, &planned), "%s over %s, change %d: other bits than a plan's",
              folio_dtype_name(dtype), folio_dtype_name(kv_dtype), c);
    CHECK_MSG(same_cache(once.cache, planned.cache), "%s over %s, change %d: another cache",
              folio_dtype_name(dtype), folio_dtype_name(kv_dtype), c);
    CHECK(!support_is_poison(once.out, sizeof once.out));
    /* every change counts: scales where the cache is fp8 */
    bool scale = c >= K_SCALE && c <= V_HEAD_SCALES;
    bool counts = c > HEADS_GIVEN && (kv_dtype == FOLIO_FP8_E4M3 || !scale);
    CHECK_MSG(same_results(&once, &plain) != counts, "%s over %s: change %d changes %s",
              folio_dtype_name(dtype), folio_dtype_name(kv_dtype), c,
              counts ? "nothing" : "something");
    folio_kv_cache_destroy(once.cache);
    folio_kv_cache_destroy(planned.cache);
    folio_kv_cache_destroy(plain.cache);
}

BACKEND_TEST(attend, same_bits_as_a_plan)
{
    static const folio_dtype types[][2] = {{FOLIO_F32, FOLIO_F32},
                                           {FOLIO_F16, FOLIO_F16},
                                           {FOLIO_BF16, FOLIO_F32},
                                           {FOLIO_F32, FOLIO_FP8_E4M3},
                                           {FOLIO_BF16, FOLIO_INT8}};
    for (int t = 0; t < COUNT_OF(types); t++)
        for (int c = 0; c < NUM_CHANGES; c++) compare(ctx, types[t][0], types[t][1], c);
}

#define BAD(words, ...)                                                                            \
    do {                                                                                           \
        args a = good_args(&w);                                                                    \
        __VA_ARGS__;                                                                               \
        REFUSED(attend(ctx, &a, NULL), ARG, words);                                                \
        CHECK(same_results(&w, &untouched) && same_cache(w.cache, untouched.cache));               \
    } while (0)

BACKEND_TEST(attend, bad_arguments_write_nothing)
{
    static world w, untouched;
    static const int32_t falling[SEQS + 1] = {0, 5, 4, 8, ROWS}, late[SEQS + 1] = {1, 5, 6, 8, 11};
    static const int32_t shorter[SEQS + 1] = {0, 5, 6, 8, 10};
    static const int32_t outside[SEQS][STRIDE] = {{3}, {1, BLOCKS}, {0}, {7, 11, 0}};
    static const int32_t shared[SEQS][STRIDE] = {{4}, {1, 4}, {0}, {7, 11, 0}};
    open_world(&w, ctx, FOLIO_F32, FOLIO_F32);
    open_world(&untouched, ctx, FOLIO_F32, FOLIO_F32);
    BAD("q.dtype|must be given", a.t.q.dtype = 0);
    BAD("dtype|fp8", a.t.q.dtype = FOLIO_FP8_E4M3);
    BAD("q: dtype is f32|f16", a.attention.dtype = FOLIO_F16);
    BAD("type 4", a.type = (folio_attention_type)4);
    BAD("on_device is 1|host memory", a.step.on_device = 1);
    BAD("num_query_tokens is 10|11 rows", a.step.num_query_tokens = 10);
    BAD("q.tokens|-1", a.t.q.tokens = -1);
    BAD("num_seqs|-1", a.step.num_seqs = -1);
    BAD("num_seqs is 0|11", a.step.num_seqs = 0);
    BAD("11 for 4 sequences|query_start", a.step.query_start = NULL);
    BAD("query_start[0] is 1", a.step.query_start = late);
    BAD("11|query_start[4] is 10", a.step.query_start = shorter);
    BAD("query_start[2] = 4|query_start[1] = 5", a.step.query_start = falling);
    BAD("query_start|align", a.step.query_start = (const void *)((const char *)starts + 1));
    BAD("block_table", a.step.table = (folio_table){.kind = FOLIO_TABLE_NONE});
    BAD("seq 1|12", a.step.table.indices = outside[0]);
    BAD("seq 0|seq 1|slot 68, in block 4", a.step.table.indices = shared[0]);
    BAD("layer|2", a.layer = 2);
    BAD("num_heads|3", a.attention.num_heads = 3);
    BAD("k|without v", a.t.v.data = NULL);
    BAD("out|10|11", a.t.out.tokens = 10);
    BAD("folio_attention_desc", a.attention.struct_size = 0);
    BAD("folio_step", a.step.struct_size = 0);
    BAD("folio_tensors", a.t.struct_size = 0);
    args a = good_args(&w);
    a.cache = NULL;
    REFUSED(attend(ctx, &a, NULL), ARG, "table|without a cache");
    change(&a, WITHOUT_CACHE);
    a.step.seq_lens = lens;
    REFUSED(attend(ctx, &a, NULL), ARG, "seq 1|context|cache");
    a = good_args(&w);
    REFUSED(attend(NULL, &a, NULL), ARG, "ctx");
    REFUSED(folio_attend(ctx, NULL, a.type, &a.step, a.cache, 1, &a.t, NULL), ARG, "attention");
    REFUSED(folio_attend(ctx, &a.attention, a.type, NULL, a.cache, 1, &a.t, NULL), ARG, "step");
    REFUSED(folio_attend(ctx, &a.attention, a.type, &a.step, a.cache, 1, NULL, NULL), ARG,
            "tensors");
    const folio_run stream = {.struct_size = sizeof stream, .stream = &w};
    REFUSED(attend(ctx, &a, &stream), ARG, "stream");
    CHECK(same_results(&w, &untouched) && same_cache(w.cache, untouched.cache));
    /* nothing to do is done */
    a.step.num_seqs = 0, a.step.query_start = NULL;
    a.t.q.tokens = a.t.k.tokens = a.t.v.tokens = a.t.out.tokens = 0;
    CHECK_OK(attend(ctx, &a, NULL));
    CHECK(same_results(&w, &untouched) && same_cache(w.cache, untouched.cache));
    /* a workspace is not looked at */
    a = good_args(&w);
    const folio_run small = {.struct_size = sizeof small, .workspace = &w, .workspace_size = 1};
    CHECK_OK(attend(ctx, &a, &small));
    folio_kv_cache_destroy(w.cache);
    folio_kv_cache_destroy(untouched.cache);
}

/* Rows that are not q's are refused before memory is asked for. */
TEST(attend, rows_are_checked_before_memory_is_made_for_them)
{
    static world w;
    static const int32_t falls[3] = {0, INT32_MAX, 4}, long_one[2] = {0, INT32_MAX};
    support_counter counter = {0};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *ctx = support_context("cpu", 1, &allocator);
    REQUIRE_TEST(ctx != NULL);
    open_world(&w, ctx, FOLIO_F32, FOLIO_F32);
    args a = good_args(&w);
    a.t.q.tokens = a.t.k.tokens = a.t.v.tokens = a.t.out.tokens = 4;
    int64_t calls = counter.calls;
    a.step.num_seqs = 2, a.step.query_start = falls;
    REFUSED(attend(ctx, &a, NULL), ARG, "query_start[2] = 4|query_start[1] = 2147483647");
    a.step.num_seqs = 1, a.step.query_start = long_one;
    REFUSED(attend(ctx, &a, NULL), ARG, "4|query_start[1] is 2147483647");
    a.t.q.tokens = a.t.k.tokens = a.t.v.tokens = a.t.out.tokens = 0;
    REFUSED(attend(ctx, &a, NULL), ARG, "query_start[1] is 2147483647|0 rows");
    CHECK_INT(counter.calls, calls);
    folio_kv_cache_destroy(w.cache);
    folio_context_destroy(ctx);
}

/* A newer client's structs are longer; what the library does not know of them is zero. */
TEST(attend, structs_of_a_newer_client)
{
    struct {
        folio_step step;
        char tail[64];
    } s = {.step = {.struct_size = sizeof s, .num_seqs = 1, .num_query_tokens = 4}};
    struct {
        folio_tensors tensors;
        char tail[64];
    } t = {.tensors = {.struct_size = sizeof t}};
    struct {
        folio_run run;
        char tail[64];
    } r = {.run = {.struct_size = sizeof r}};
    float rows[4][4 * 16] = {{0}};
    folio_tensor *of[] = {&t.tensors.q, &t.tensors.k, &t.tensors.v, &t.tensors.out};
    for (int i = 0; i < 4; i++)
        *of[i] = (folio_tensor){.data = rows[i], .dtype = FOLIO_F32, .tokens = 4};
    folio_attention_desc d = FOLIO_WITH(folio_attention_desc, .num_heads = 1, .num_kv_heads = 1,
                                        .k_head_size = 16, .dtype = FOLIO_F32);
    folio_context *ctx = NULL;
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    CHECK_OK(folio_context_create(&FOLIO_WITH(folio_context_desc, .backend = "cpu"), &ctx));
    REQUIRE_TEST(ctx);
    CHECK_OK(folio_attend(ctx, &d, FOLIO_ATTENTION_DECODER, &s.step, NULL, 0, &t.tensors, &r.run));
    CHECK_OK(folio_attention_create(ctx, &d, &attention));
    CHECK_OK(folio_plan_create(
        ctx, &FOLIO_WITH(folio_plan_desc, .attentions = &attention, .num_attentions = 1), &plan));
    CHECK_OK(folio_plan_update_step(plan, &s.step, &r.run));
    CHECK_OK(
        folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t.tensors, &r.run));
    folio_plan_destroy(plan);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
}

/* Whichever allocation fails: refused, nothing written, nothing left. */
TEST(attend, out_of_memory)
{
    static world w, untouched;
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        folio_context *ctx = support_context(support_backends[b], 1, &allocator);
        REQUIRE_TEST(ctx != NULL);
        open_world(&w, ctx, FOLIO_F32, FOLIO_F32);
        open_world(&untouched, ctx, FOLIO_F32, FOLIO_F32);
        int64_t live = counter.live, failed = 0;
        args a = good_args(&w);
        for (;; failed++) {
            counter.calls = 0;
            counter.fail_at = failed + 1;
            support_mark_error();
            folio_status status = attend(ctx, &a, NULL);
            CHECK_INT(counter.live, live);
            if (status == FOLIO_OK || failed > 1000) break;
            CHECK_INT(status, FOLIO_ERR_MEMORY);
            CHECK(same_results(&w, &untouched) && same_cache(w.cache, untouched.cache));
        }
        CHECK(failed >= 4 && failed < 1000); /* an attention, a batch, a plan, its workspace */
        counter.fail_at = 0;
        folio_kv_cache_destroy(w.cache);
        folio_kv_cache_destroy(untouched.cache);
        folio_context_destroy(ctx);
        CHECK_INT(counter.live, 0);
        CHECK_INT(counter.faults, 0);
    }
}
