/*
 * test_plan.c: what a plan promises: refilled without allocation, a graph's plan too; a workspace of
 * the size it said, many threads at once, the caller's threads used as told.
 */
#include "kit/layer.h"
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 4,
    KV_HEADS = 2,
    SIZE = 16,
    BLOCK = 64,
    BLOCKS = 320,
    LAYERS = 3,
    MAX_SEQS = 6,
    MAX_TOKENS = 40,
    MAX_ENCODER = 24,
    MAX_LEN = 1536, /* three splits of the keys and more */
    TABLE = MAX_LEN / BLOCK
};
static const uint32_t all_types = (1u << FOLIO_NUM_ATTENTION_TYPES) - 1;

/* Everything a step needs, at the plan's limits. Attention 0 has a window, attention 1 has none. */
typedef struct {
    folio_context *ctx;
    folio_attention *attentions[2];
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
    int32_t tables[2][MAX_SEQS][TABLE]; /* self, cross */
    float q[MAX_TOKENS][HEADS][SIZE];
    float k[MAX_TOKENS][KV_HEADS][SIZE], v[MAX_TOKENS][KV_HEADS][SIZE];
    float out[MAX_TOKENS][HEADS][SIZE], lse[MAX_TOKENS][HEADS];
} world;

typedef struct {
    int64_t query_len, seq_len, encoder_len, encoder_new_len;
} seq_lens;

static folio_plan *make_plan(world *w, uint32_t flags)
{
    folio_attention *list[2] = {w->attentions[0], w->attentions[1]};
    /* No window where cross attention is asked for. */
    const uint32_t types[2] = {all_types & ~FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER),
                               all_types};
    folio_plan_desc desc =
        FOLIO_WITH(folio_plan_desc, .attentions = list, .types = types, .num_attentions = 2,
                   .block_size = BLOCK, .num_blocks = BLOCKS, .max_seqs = MAX_SEQS,
                   .max_query_tokens = MAX_TOKENS, .max_seq_len = MAX_LEN,
                   .max_encoder_tokens = MAX_ENCODER, .flags = flags);
    folio_plan *plan = NULL;
    CHECK_OK(folio_plan_create(w->ctx, &desc, &plan));
    return plan;
}

static folio_batch *make_batch(folio_context *ctx)
{
    folio_batch_desc desc =
        FOLIO_WITH(folio_batch_desc, .block_size = BLOCK, .max_seqs = MAX_SEQS,
                   .max_query_tokens = MAX_TOKENS, .max_blocks = MAX_SEQS * TABLE,
                   .max_encoder_tokens = MAX_ENCODER, .max_cross_blocks = MAX_SEQS * TABLE);
    folio_batch *batch = NULL;
    CHECK_OK(folio_batch_create(ctx, &desc, &batch));
    return batch;
}

/* Attentions, a cache full of small numbers, batch and plan. */
static void open_world(world *w, folio_context *ctx, uint32_t flags)
{
    memset(w, 0, sizeof *w);
    w->ctx = ctx;
    folio_attention_desc attention =
        FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                   .k_head_size = SIZE, .dtype = FOLIO_F32);
    CHECK_OK(folio_attention_create(ctx, &attention, &w->attentions[1]));
    attention.windowed = 1;
    attention.window_left = 20;
    attention.window_right = 4;
    CHECK_OK(folio_attention_create(ctx, &attention, &w->attentions[0]));
    folio_kv_cache_desc cache = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS, .block_size = BLOCK,
        .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
    CHECK_OK(folio_kv_cache_create(ctx, &cache, &w->cache));
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        folio_kv_cache_view view = support_view(w->cache, layer);
        support_fill(view.k, view.k_array.bytes / 4, 100 + (uint64_t)layer, 1);
        support_fill(view.v, view.v_array.bytes / 4, 200 + (uint64_t)layer, 1);
    }
    for (int32_t n = 0; n < 2 * MAX_SEQS * TABLE; n++)
        w->tables[n / (MAX_SEQS * TABLE)][n / TABLE % MAX_SEQS][n % TABLE] = n * 7 % BLOCKS;
    support_fill(&w->q[0][0][0], MAX_TOKENS * HEADS * SIZE, 1, 1);
    support_fill(&w->k[0][0][0], MAX_TOKENS * KV_HEADS * SIZE, 2, 1);
    support_fill(&w->v[0][0][0], MAX_TOKENS * KV_HEADS * SIZE, 3, 1);
    w->batch = make_batch(ctx);
    w->plan = make_plan(w, flags);
}

static void close_world(world *w)
{
    folio_plan_destroy(w->plan);
    folio_batch_destroy(w->batch);
    folio_kv_cache_destroy(w->cache);
    folio_attention_destroy(w->attentions[0]);
    folio_attention_destroy(w->attentions[1]);
}

static void fill_batch(world *w, folio_batch *batch, const seq_lens *lens, int64_t n)
{
    folio_batch_clear(batch);
    for (int64_t s = 0; s < n; s++) {
        folio_batch_seq seq = FOLIO_WITH(
            folio_batch_seq, .query_len = lens[s].query_len, .seq_len = lens[s].seq_len,
            .padding = lens[s].seq_len == 0, .block_table = w->tables[0][s], .num_blocks = TABLE,
            .encoder_len = lens[s].encoder_len, .encoder_new_len = lens[s].encoder_new_len,
            .cross_block_table = w->tables[1][s], .num_cross_blocks = TABLE);
        CHECK_OK(folio_batch_add(batch, &seq));
    }
}

/* Rows of q and of k, v in a type: the batch's own. */
static void count_rows(const seq_lens *lens, int64_t n, folio_attention_type type, int64_t *rows,
                       int64_t *new_rows)
{
    int64_t queries = 0, encoders = 0;
    for (int64_t s = 0; s < n; s++) {
        queries += lens[s].query_len;
        encoders += lens[s].encoder_new_len;
    }
    *rows = type == FOLIO_ATTENTION_ENCODER ? encoders : queries;
    *new_rows = type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_ONLY ? queries
                                                                                        : encoders;
}

typedef struct {
    int32_t attention, layer;
    folio_attention_type type;
    int64_t rows, new_rows;
    bool no_kv;
    const float *sinks;
} call;

static folio_status forward_to(const world *w, const folio_plan *plan, call c, float *out,
                               float *lse, const folio_run *run)
{
    folio_tensors t = {.struct_size = sizeof t, .lse = lse, .sinks = c.sinks};
    t.q = (folio_tensor){.data = (void *)(uintptr_t)w->q, .dtype = FOLIO_F32, .tokens = c.rows};
    t.out = (folio_tensor){.data = out, .dtype = FOLIO_F32, .tokens = c.rows};
    if (c.new_rows > 0 && !c.no_kv) {
        t.k = (folio_tensor){
            .data = (void *)(uintptr_t)w->k, .dtype = FOLIO_F32, .tokens = c.new_rows};
        t.v = (folio_tensor){
            .data = (void *)(uintptr_t)w->v, .dtype = FOLIO_F32, .tokens = c.new_rows};
    }
    return folio_attention_forward(plan, c.attention, c.type, w->cache, c.layer, &t, run);
}

static folio_status forward(world *w, const folio_plan *plan, call c)
{
    memset(w->out, 0xFF, sizeof w->out);
    memset(w->lse, 0xFF, sizeof w->lse);
    return forward_to(w, plan, c, &w->out[0][0][0], &w->lse[0][0], NULL);
}

/* Items of one attention whose keys are shared out, in the plan as it is now. */
static int64_t split_items(const folio_plan *plan)
{
    folio_plan_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_plan_get_info(plan, 1, FOLIO_ATTENTION_DECODER, &info));
    return info.num_split_items;
}

/* The n-th step of a run: prompts, chunks, decodes, padding, new and cached encoders. */
static int64_t step_lens(int n, seq_lens *lens)
{
    int64_t count = 1 + (int64_t)(support_bits(5, (uint64_t)n) % MAX_SEQS), encoders = 0;
    for (int64_t s = 0; s < count; s++) {
        uint64_t bits = support_bits(6, (uint64_t)(n * MAX_SEQS + s));
        int64_t query_len = 1 + (int64_t)(bits % 6), context = (int64_t)(bits >> 8 & 63);
        if (bits >> 20 & 1) context = bits >> 21 & 1 ? 0 : 23 * context;
        int64_t encoder_len = (int64_t)(bits >> 24 & 15);
        bool fresh = (bits >> 32 & 1) && encoders + encoder_len <= MAX_ENCODER;
        lens[s] = (seq_lens){query_len, context + query_len, encoder_len, fresh ? encoder_len : 0};
        if ((bits >> 36 & 7) == 0) lens[s] = (seq_lens){query_len, 0, 0, 0};
        encoders += lens[s].encoder_new_len;
    }
    /* ENCODER attention needs an encoder in some sequence. */
    if (encoders == 0) lens[0] = (seq_lens){2, 2, 3, 3};
    return count;
}

/* ---- Refilling ------------------------------------------------------------------------------ */

static bool caches_equal(const world *a, const world *b)
{
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        folio_kv_cache_view x = support_view(a->cache, layer), y = support_view(b->cache, layer);
        if (memcmp(x.k, y.k, (size_t)x.k_array.bytes) != 0) return false;
        if (memcmp(x.v, y.v, (size_t)x.v_array.bytes) != 0) return false;
    }
    return true;
}

/* In a graph's plan the limits are the numbers of rows. What it does with those past the batch: folio check. */
static void graph_rows(call *c)
{
    bool encoder = c->type == FOLIO_ATTENTION_ENCODER;
    c->rows = encoder ? MAX_ENCODER : MAX_TOKENS;
    c->new_rows = encoder || c->type == FOLIO_ATTENTION_ENCODER_DECODER ? MAX_ENCODER : MAX_TOKENS;
}

/* 3 layers, 4 types, 20 steps. Fresh plans of another context say what each result should be. */
static void refill(const char *backend, uint32_t flags)
{
    support_counter counter = {0};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *counted = support_context(backend, 2, &allocator);
    folio_context *plain = support_context(backend, 2, NULL);
    REQUIRE_TEST(counted && plain);
    static world w, fresh;
    open_world(&w, counted, flags);
    open_world(&fresh, plain, flags);
    int64_t made = counter.calls;
    CHECK(made > 0);
    for (int n = 0; n < 20; n++) {
        seq_lens lens[MAX_SEQS];
        int64_t count = step_lens(n, lens);
        fill_batch(&w, w.batch, lens, count);
        CHECK_OK(folio_plan_update(w.plan, w.batch, NULL));
        folio_batch *batch = make_batch(plain);
        fill_batch(&fresh, batch, lens, count);
        folio_plan *plan = make_plan(&fresh, flags);
        CHECK_OK(folio_plan_update(plan, batch, NULL));
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++) {
                call c = {.attention = type != FOLIO_ATTENTION_ENCODER_DECODER ? layer % 2 : 1,
                          .layer = layer,
                          .type = (folio_attention_type)type};
                count_rows(lens, count, c.type, &c.rows, &c.new_rows);
                if (flags == FOLIO_PLAN_GRAPH) graph_rows(&c);
                CHECK_OK(forward(&w, w.plan, c));
                CHECK_OK(forward(&fresh, plan, c));
                CHECK_MSG(memcmp(w.out, fresh.out, sizeof w.out) == 0 &&
                              memcmp(w.lse, fresh.lse, sizeof w.lse) == 0,
                          "%s: step %d layer %d %s differs from a fresh plan", backend, n, layer,
                          folio_attention_type_name(c.type));
            }
        }
        CHECK_MSG(caches_equal(&w, &fresh), "%s: step %d leaves another cache", backend, n);
        folio_plan_destroy(plan);
        folio_batch_destroy(batch);
        CHECK_MSG(counter.calls == made, "%s: step %d allocated %d times", backend, n,
                  (int)(counter.calls - made));
    }
    close_world(&w);
    close_world(&fresh);
    folio_context_destroy(counted);
    folio_context_destroy(plain);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}

BACKEND_TEST(plan, refilled_without_allocation)
{
    refill(backend, 0);
    refill(backend, FOLIO_PLAN_GRAPH);
}

BACKEND_TEST(plan, graph_rows_are_the_limits)
{
    static world w;
    const seq_lens lens[] = {{3, 9, 0, 0}, {1, 1400, 0, 0}};
    open_world(&w, ctx, FOLIO_PLAN_GRAPH);
    fill_batch(&w, w.batch, lens, 2);
    CHECK_OK(folio_plan_update(w.plan, w.batch, NULL));
    call c = {.type = FOLIO_ATTENTION_DECODER, .rows = 4, .new_rows = 4};
    REFUSED(forward(&w, w.plan, c), FOLIO_ERR_ARGUMENT, "40");
    c.rows = c.new_rows = MAX_TOKENS;
    CHECK_OK(forward(&w, w.plan, c));
    close_world(&w);
}

/* ---- Threads -------------------------------------------------------------------------------- */

typedef struct {
    const world *w;
    call c;
    float out[MAX_TOKENS][HEADS][SIZE], lse[MAX_TOKENS][HEADS];
    int mismatches;
    folio_status status;
} runner;

static void *run_often(void *arg)
{
    runner *r = arg;
    size_t bytes = 0;
    folio_plan_get_workspace_size(r->w->plan, &bytes);
    void *workspace = aligned_alloc(64, (bytes + 64) & ~(size_t)63);
    folio_run run = {.struct_size = sizeof run, .workspace = workspace, .workspace_size = bytes};
    for (int n = 0; n < 20; n++) {
        memset(r->out, 0xFF, sizeof r->out);
        memset(r->lse, 0xFF, sizeof r->lse);
        folio_status status =
            forward_to(r->w, r->w->plan, r->c, &r->out[0][0][0], &r->lse[0][0], &run);
        if (status != FOLIO_OK) r->status = status;
        r->mismatches += memcmp(r->out, r->w->out, sizeof r->out) != 0;
        r->mismatches += memcmp(r->lse, r->w->lse, sizeof r->lse) != 0;
    }
    free(workspace);
    return NULL;
}

BACKEND_TEST(plan, several_threads_run_one_plan)
{
    enum { RUNNERS = 5 };
    static world w;
    static runner runners[RUNNERS];
    open_world(&w, ctx, 0);
    seq_lens lens[] = {{6, 6, 0, 0}, {1, 77, 0, 0}, {4, 33, 0, 0}, {1, 1500, 0, 0}};
    fill_batch(&w, w.batch, lens, 4);
    CHECK_OK(folio_plan_update(w.plan, w.batch, NULL));
    if (strcmp(backend, "cpu") == 0) CHECK(split_items(w.plan) > 0);
    call c = {.attention = 1, .type = FOLIO_ATTENTION_DECODER, .rows = 12, .new_rows = 12};
    CHECK_OK(forward(&w, w.plan, c));
    pthread_t threads[RUNNERS];
    for (int n = 0; n < RUNNERS; n++) {
        /* Only reading: calls that write the same slots may not overlap. */
        runners[n] = (runner){.w = &w, .c = c};
        runners[n].c.no_kv = true;
        CHECK(pthread_create(&threads[n], NULL, run_often, &runners[n]) == 0);
    }
    for (int n = 0; n < RUNNERS; n++) {
        pthread_join(threads[n], NULL);
        CHECK_INT(runners[n].status, FOLIO_OK);
        CHECK_INT(runners[n].mismatches, 0);
    }
    close_world(&w);
}

typedef struct {
    const char *backend;
    world w;
} own_world;

/* Opens, runs and closes everything, three times over. */
static void *live_and_die(void *arg)
{
    own_world *o = arg;
    for (int n = 0; n < 3; n++) {
        folio_context_desc desc =
            FOLIO_WITH(folio_context_desc, .backend = o->backend, .num_threads = 3);
        folio_context *ctx = NULL;
        if (folio_context_create(&desc, &ctx) != FOLIO_OK) return arg;
        open_world(&o->w, ctx, 0);
        seq_lens lens[] = {{6, 6, 0, 0}, {1, 1500, 0, 0}};
        fill_batch(&o->w, o->w.batch, lens, 2);
        folio_status status = folio_plan_update(o->w.plan, o->w.batch, NULL);
        call c = {.attention = 1, .type = FOLIO_ATTENTION_DECODER, .rows = 7, .new_rows = 7};
        if (status == FOLIO_OK) status = forward(&o->w, o->w.plan, c);
        close_world(&o->w);
        folio_context_destroy(ctx);
        if (status != FOLIO_OK) return arg;
    }
    return NULL;
}

BACKEND_TEST(plan, contexts_live_side_by_side)
{
    static own_world worlds[4];
    pthread_t threads[4];
    for (int n = 0; n < 4; n++) {
        worlds[n].backend = backend;
        CHECK(pthread_create(&threads[n], NULL, live_and_die, &worlds[n]) == 0);
    }
    for (int n = 0; n < 4; n++) {
        void *failed = NULL;
        pthread_join(threads[n], &failed);
        CHECK(failed == NULL);
        CHECK(memcmp(worlds[n].w.out, worlds[0].w.out, sizeof worlds[0].w.out) == 0);
    }
}

/* What the caller's parallel_for saw. */
typedef struct {
    int64_t calls, largest, tasks;
    int depth;
    world *inner; /* run from inside the outermost call */
    call inner_call;
    folio_run inner_run;
    folio_status inner_status;
} watcher;

static void watched_for(void *user, int64_t count, folio_task_fn fn, void *task)
{
    watcher *watch = user;
    watch->calls++;
    if (count > watch->largest) watch->largest = count;
    if (watch->inner && watch->depth == 0) {
        watch->depth++;
        world *w = watch->inner;
        watch->inner_status = forward_to(w, w->plan, watch->inner_call, &w->out[0][0][0],
                                         &w->lse[0][0], &watch->inner_run);
        watch->depth--;
    }
    for (int64_t i = 0; i < count; i++) fn(task, i);
    watch->tasks += count;
}

static folio_context *watched_context(watcher *watch, int32_t threads)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu", .num_threads = 200};
    desc.executor = (folio_executor){watched_for, watch, threads};
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&desc, &ctx));
    return ctx;
}

TEST(plan, callers_threads_are_used)
{
    folio_context *pool = support_context("cpu", 1, NULL);
    REQUIRE_TEST(pool);
    static world plain, w;
    open_world(&plain, pool, 0);
    seq_lens lens[] = {{6, 6, 0, 0}, {1, 77, 0, 0}, {4, 33, 0, 0}, {1, 1500, 0, 0}};
    call c = {.attention = 1, .type = FOLIO_ATTENTION_DECODER, .rows = 12, .new_rows = 12};
    fill_batch(&plain, plain.batch, lens, 4);
    CHECK_OK(folio_plan_update(plain.plan, plain.batch, NULL));
    CHECK_OK(forward(&plain, plain.plan, c));
    for (int32_t threads = 1; threads <= 7; threads++) {
        watcher watch = {0};
        folio_context *ctx = watched_context(&watch, threads);
        folio_context_info info = {.struct_size = sizeof info};
        CHECK_OK(folio_context_get_info(ctx, &info));
        CHECK_INT(info.num_threads, threads);
        open_world(&w, ctx, 0);
        fill_batch(&w, w.batch, lens, 4);
        CHECK_OK(folio_plan_update(w.plan, w.batch, NULL));
        watch.calls = 0;
        CHECK_OK(forward(&w, w.plan, c));
        if (threads > 1) CHECK(watch.calls > 0);
        CHECK(watch.largest <= threads);
        CHECK(memcmp(w.out, plain.out, sizeof w.out) == 0);
        CHECK(memcmp(w.lse, plain.lse, sizeof w.lse) == 0);
        close_world(&w);
        folio_context_destroy(ctx);
    }
    close_world(&plain);
    folio_context_destroy(pool);
}

/* A forward of the same context from inside the caller's parallel_for. */
TEST(plan, forward_inside_a_forward)
{
    watcher watch = {0};
    folio_context *ctx = watched_context(&watch, 4);
    static world w, inner;
    open_world(&w, ctx, 0);
    open_world(&inner, ctx, FOLIO_PLAN_NO_WORKSPACE);
    seq_lens lens[] = {{6, 6, 0, 0}, {1, 1500, 0, 0}};
    call c = {.attention = 1, .type = FOLIO_ATTENTION_DECODER, .rows = 7, .new_rows = 7};
    world *both[2] = {&w, &inner};
    for (int n = 0; n < 2; n++) {
        fill_batch(both[n], both[n]->batch, lens, 2);
        CHECK_OK(folio_plan_update(both[n]->plan, both[n]->batch, NULL));
    }
    CHECK_OK(forward(&w, w.plan, c));
    size_t bytes = 0;
    CHECK_OK(folio_plan_get_workspace_size(inner.plan, &bytes));
    support_buffer workspace = support_buffer_make(bytes);
    watch.inner = &inner;
    watch.inner_call = c;
    watch.inner_run = FOLIO_WITH(folio_run, .workspace = workspace.data, .workspace_size = bytes);
    memset(inner.out, 0xFF, sizeof inner.out);
    memset(inner.lse, 0xFF, sizeof inner.lse);
    CHECK_OK(forward(&w, w.plan, c));
    CHECK_INT(watch.inner_status, FOLIO_OK);
    CHECK(isfinite(w.out[6][0][0]));
    CHECK(memcmp(w.out, inner.out, sizeof w.out) == 0);
    support_buffer_free(&workspace);
    close_world(&w);
    close_world(&inner);
    folio_context_destroy(ctx);
}

/* ---- Updates and workspaces ----------------------------------------------------------------- */

BACKEND_TEST(plan, workspace_is_as_large_as_said)
{
    static world w, before;
    open_world(&w, ctx, FOLIO_PLAN_NO_WORKSPACE);
    size_t bytes = 0, later = 0;
    int64_t splits = 0;
    CHECK_OK(folio_plan_get_workspace_size(w.plan, &bytes));
    call c = {.attention = 1, .type = FOLIO_ATTENTION_DECODER};
    for (int n = 0; n < 20; n++) {
        seq_lens lens[MAX_SEQS];
        int64_t count = step_lens(n, lens);
        fill_batch(&w, w.batch, lens, count);
        CHECK_OK(folio_plan_update(w.plan, w.batch, NULL));
        CHECK_OK(folio_plan_get_workspace_size(w.plan, &later));
        CHECK(later == bytes);
        splits += split_items(w.plan);
        count_rows(lens, count, c.type, &c.rows, &c.new_rows);
        /* Guards on both sides, and the sanitizers behind them; the content is anything. */
        support_buffer workspace = support_buffer_make(bytes);
        folio_run run = {.struct_size = sizeof run, .workspace = workspace.data};
        run.workspace_size = bytes;
        CHECK_OK(forward_to(&w, w.plan, c, &w.out[0][0][0], &w.lse[0][0], &run));
        CHECK(isfinite(w.out[0][0][0]));
        memcpy(&before, &w, sizeof w);
        support_fill(workspace.data, (int64_t)(bytes / 4), 9, 1e30f);
        CHECK_OK(forward_to(&w, w.plan, c, &w.out[0][0][0], &w.lse[0][0], &run));
        CHECK(memcmp(w.out, before.out, sizeof w.out) == 0);
        support_buffer_free(&workspace);
    }
    if (strcmp(backend, "cpu") == 0) CHECK(splits > 0);
    close_world(&w);
}

/* A large and a small attention in one plan, in both orders: the workspace fits the large one. */
BACKEND_TEST(plan, workspace_fits_every_attention)
{
    enum { ROWS = 30 };
    const int32_t heads[] = {8, 1}, sizes[] = {64, 8};
    folio_attention *attentions[2];
    for (int n = 0; n < 2; n++) {
        folio_attention_desc desc = FOLIO_WITH(folio_attention_desc, .num_heads = heads[n],
                                               .k_head_size = sizes[n], .dtype = FOLIO_F32);
        CHECK_OK(folio_attention_create(ctx, &desc, &attentions[n]));
    }
    folio_batch *batch = make_batch(ctx);
    folio_batch_seq seq = {.struct_size = sizeof seq, .query_len = ROWS, .seq_len = ROWS};
    CHECK_OK(folio_batch_add(batch, &seq));
    static float q[ROWS * 8 * 64], out[ROWS * 8 * 64];
    support_fill(q, ROWS * 8 * 64, 7, 1);
    for (int order = 0; order < 2; order++) {
        folio_attention *list[2] = {attentions[order], attentions[1 - order]};
        folio_plan_desc desc = FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 2,
                                          .max_seqs = 1, .max_query_tokens = ROWS,
                                          .max_seq_len = ROWS, .flags = FOLIO_PLAN_NO_WORKSPACE);
        folio_plan *plan = NULL;
        size_t bytes = 0;
        CHECK_OK(folio_plan_create(ctx, &desc, &plan));
        CHECK_OK(folio_plan_update(plan, batch, NULL));
        CHECK_OK(folio_plan_get_workspace_size(plan, &bytes));
        support_buffer workspace = support_buffer_make(bytes);
        folio_run run = {.struct_size = sizeof run, .workspace = workspace.data};
        run.workspace_size = bytes;
        folio_tensors t = {.struct_size = sizeof t};
        t.q = t.k = t.v = (folio_tensor){.data = q, .dtype = FOLIO_F32, .tokens = ROWS};
        t.out = (folio_tensor){.data = out, .dtype = FOLIO_F32, .tokens = ROWS};
        for (int32_t n = 0; n < 2; n++)
            CHECK_OK(folio_attention_forward(plan, n, FOLIO_ATTENTION_DECODER, NULL, 0, &t, &run));
        support_buffer_free(&workspace);
        folio_plan_destroy(plan);
    }
    folio_batch_destroy(batch);
    for (int n = 0; n < 2; n++) folio_attention_destroy(attentions[n]);
}

/* ---- What was chosen ------------------------------------------------------------------------ */

TEST(plan, names_its_kernel_and_what_it_falls_to)
{
    static const struct {
        folio_dtype dtype;
        const char *kernel, *fallback;
    } cases[] = {{FOLIO_F32, "attend_f32_scalar", ""},
                 {FOLIO_BF16, "attend_bf16q_scalar", "attend_bf16_scalar"}};
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(
        &FOLIO_WITH(folio_context_desc, .backend = "cpu", .level = "scalar"), &ctx));
    REQUIRE_TEST(ctx);
    for (int i = 0; i < 2; i++) {
        kit_layer l = {0};
        folio_plan_info info = {.struct_size = sizeof info};
        CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = 1, .k_head_size = 16, .dtype = cases[i].dtype,
                                .num_blocks = 1, .block_size = 16, .max_seq_len = 16));
        CHECK_OK(
            folio_batch_add(l.batch, &FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 1,
                                                 .block_table = (int32_t[]){0}, .num_blocks = 1)));
        CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        CHECK_OK(folio_plan_get_info(l.plan, 0, FOLIO_ATTENTION_DECODER, &info));
        CHECK_MSG(strcmp(info.kernel, cases[i].kernel) == 0, "%s", info.kernel);
        CHECK_MSG(strcmp(info.fallback, cases[i].fallback) == 0, "%s", info.fallback);
        char rows[4][16 * 4] = {{0}};
        folio_tensor t[4]; /* q, k, v, out */
        for (int n = 0; n < 4; n++)
            t[n] = (folio_tensor){.data = rows[n], .dtype = cases[i].dtype, .tokens = 1};
        for (int given = 0; given < 2; given++) { /* k and v read as given are of another type */
            if (given) t[1].dtype = t[2].dtype = FOLIO_F32;
            folio_tensors tensors = FOLIO_WITH(folio_tensors, .q = t[0], .k = t[1], .v = t[2],
                                               .out = t[3], .flags = given ? FOLIO_KV_APPEND : 0);
            const char *kernel =
                given && cases[i].fallback[0] ? cases[i].fallback : cases[i].kernel;
            CHECK_OK(folio_attention_check(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &tensors,
                                           NULL, &info));
            CHECK_MSG(strcmp(info.kernel, kernel) == 0, "%s", info.kernel);
            CHECK(strcmp(info.fallback, "") == 0 && info.num_items == 1);
        }
        kit_layer_close(&l);
    }
    folio_context_destroy(ctx);
}
