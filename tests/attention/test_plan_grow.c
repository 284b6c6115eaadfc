/*
 * test_plan_grow.c: plans without limits. Growth step by step gives the bits of a plan with limits; nothing is allocated
 * where a step fits; a growing update that fails leaves the step before it.
 */
#include "core/status.h"
#include "fake_device.h"
#include "support.h"

enum {
    HEADS = 2,
    SIZE = 16,
    ROW = HEADS * SIZE,
    BLOCK = 16,
    BLOCKS = 40,
    MAX_ROWS = 96,
    MAX_SEQS = 8
};
enum { BLOCKS_OF_ONE = BLOCKS / MAX_SEQS };
#define ARG FOLIO_ERR_ARGUMENT

typedef struct {
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_plan *plan;
    float *memory; /* q, k, v, out */
    size_t bytes;
} world;

static const uint32_t types =
    FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) | FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER);

/* max_seqs 0: it grows. */
static folio_plan_desc plan_desc(const world *w, int64_t max_seqs)
{
    return FOLIO_WITH(folio_plan_desc, .attentions = &w->attention, .num_attentions = 1,
                      .types = &types, .cache = w->cache, .max_seqs = max_seqs,
                      .max_query_tokens = max_seqs ? MAX_ROWS : 0,
                      .max_seq_len = max_seqs ? BLOCKS_OF_ONE * BLOCK : 0,
                      .max_encoder_tokens = max_seqs ? MAX_ROWS : 0);
}

static bool open_world(world *w, folio_context *ctx, int64_t max_seqs)
{
    *w = (world){.ctx = ctx, .bytes = 4 * MAX_ROWS * ROW * sizeof(float)};
    folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                        .k_head_size = SIZE, .dtype = FOLIO_F32);
    folio_kv_cache_desc c =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
    CHECK_OK(folio_attention_create(ctx, &a, &w->attention));
    CHECK_OK(folio_kv_cache_create(ctx, &c, &w->cache));
    folio_plan_desc p = plan_desc(w, max_seqs);
    CHECK_OK(folio_plan_create(ctx, &p, &w->plan));
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, w->bytes, (void **)&w->memory));
    if (w->plan == NULL || w->memory == NULL) return false;
    float numbers[3 * MAX_ROWS * ROW];
    support_fill(numbers, COUNT_OF(numbers), 5, 1.0f);
    CHECK_OK(folio_memory_copy(ctx, w->memory, numbers, sizeof numbers, NULL));
    folio_kv_cache_view view = {.struct_size = sizeof view};
    CHECK_OK(folio_kv_cache_get_view(w->cache, 0, &view));
    CHECK_OK(folio_memory_fill(ctx, view.k, 0, (size_t)view.k_array.bytes, NULL));
    CHECK_OK(folio_memory_fill(ctx, view.v, 0, (size_t)view.v_array.bytes, NULL));
    return true;
}

static void close_world(world *w)
{
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_DEVICE, w->memory, w->bytes);
    folio_plan_destroy(w->plan);
    folio_kv_cache_destroy(w->cache);
    folio_attention_destroy(w->attention);
}

/* n sequences, the first with `query` new tokens and the others with one; `encoder` tokens of the first's encoder. */
typedef struct {
    int32_t n, query, seq, encoder;
} size;

static folio_status update(const world *w, size z)
{
    int32_t starts[MAX_SEQS + 1] = {0}, lens[MAX_SEQS], tables[MAX_SEQS][BLOCKS_OF_ONE];
    int32_t encoder[MAX_SEQS] = {z.encoder};
    for (int32_t i = 0; i < z.n; i++) {
        starts[i + 1] = starts[i] + (i == 0 ? z.query : 1);
        lens[i] = z.seq - i;
        for (int32_t b = 0; b < BLOCKS_OF_ONE; b++) tables[i][b] = i + b * MAX_SEQS;
    }
    folio_step s = FOLIO_WITH(
        folio_step, .num_seqs = z.n, .query_start = starts, .seq_lens = lens,
        .encoder_lens = encoder, .encoder_new_lens = encoder,
        .table = {.kind = FOLIO_TABLE_ROWS, .indices = tables, .row_stride = BLOCKS_OF_ONE});
    return folio_plan_update_step(w->plan, &s, NULL);
}

static folio_status forward(const world *w, size z)
{
    folio_tensor t[4];
    for (int i = 0; i < 4; i++)
        t[i] = (folio_tensor){w->memory + i * MAX_ROWS * ROW, FOLIO_F32, z.query + z.n - 1, 0, 0};
    folio_tensors all = FOLIO_WITH(folio_tensors, .q = t[0], .k = t[1], .v = t[2], .out = t[3]);
    TRY(folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, &all, NULL));
    if (z.encoder == 0) return FOLIO_OK;
    all.q.tokens = all.k.tokens = all.v.tokens = all.out.tokens = z.encoder;
    all.out.data = w->memory + (4 * MAX_ROWS - z.encoder) * ROW; /* out has room at its end */
    return folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_ENCODER, NULL, 0, &all, NULL);
}

static void read_out(const world *w, float *out)
{
    const float *from = w->memory + 3 * MAX_ROWS * ROW;
    CHECK_OK(folio_memory_copy(w->ctx, out, from, w->bytes / 4, NULL));
    CHECK_OK(folio_run_wait(w->ctx, NULL));
}

static bool same_out(const world *a, const world *b)
{
    static float x[MAX_ROWS * ROW], y[MAX_ROWS * ROW];
    read_out(a, x);
    read_out(b, y);
    return memcmp(x, y, sizeof x) == 0;
}

static const size steps[] = {{1, 1, 1, 0},  {1, 5, 5, 0},   {2, 1, 17, 0}, {3, 4, 40, 7},
                             {8, 1, 80, 0}, {8, 40, 80, 9}, {1, 1, 2, 0},  {8, 60, 80, 20}};

static void grow(folio_context *growing, folio_context *limited)
{
    world w, l;
    REQUIRE_TEST(open_world(&w, growing, 0) && open_world(&l, limited, MAX_SEQS));
    size_t before = 0;
    for (int i = 0; i < COUNT_OF(steps); i++) {
        size_t bytes;
        CHECK_OK(update(&w, steps[i]));
        CHECK_OK(update(&l, steps[i]));
        CHECK_OK(folio_memory_fill(growing, w.memory + 3 * MAX_ROWS * ROW, 0, w.bytes / 4, NULL));
        CHECK_OK(folio_memory_fill(limited, l.memory + 3 * MAX_ROWS * ROW, 0, l.bytes / 4, NULL));
        CHECK_OK(forward(&w, steps[i]));
        CHECK_OK(forward(&l, steps[i]));
        CHECK_MSG(same_out(&w, &l), "step %d: other bits than with limits", i);
        CHECK_OK(folio_plan_get_workspace_size(w.plan, &bytes));
        CHECK(bytes >= before);
        before = bytes;
    }
    close_world(&w);
    close_world(&l);
}

BACKEND_TEST(plan_grow, same_bits_as_with_limits) { grow(ctx, ctx); }

TEST(plan_grow, on_a_device)
{
    folio_context *ctx = fake_device_context(NULL), *host = support_context("reference", 1, NULL);
    grow(ctx, host);
    folio_context_destroy(ctx);
    folio_context_destroy(host);
}

/* Where a step fits, nothing is allocated; where it does not, by half as much again at least. */
TEST(plan_grow, growth_is_rare)
{
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        folio_context *ctx = support_context(support_backends[b], 1, &allocator);
        world w;
        REQUIRE_TEST(open_world(&w, ctx, 0));
        for (int i = 0; i < 2; i++) /* both batches of the plan's own are large */
            CHECK_OK(update(&w, (size){8, 60, 80, 20}));
        int64_t calls = counter.calls;
        for (int i = 0; i < COUNT_OF(steps); i++) {
            CHECK_OK(update(&w, steps[i]));
            CHECK_OK(forward(&w, steps[i]));
        }
        CHECK_INT(counter.calls, calls);
        folio_plan_destroy(w.plan);
        folio_plan_desc p = plan_desc(&w, 0);
        CHECK_OK(folio_plan_create(ctx, &p, &w.plan));
        folio_batch *batch = support_batch(ctx, BLOCK);
        int grown = 0;
        for (int32_t len = 1; len <= 1000;
             len++) { /* the prompt of an ever longer sequence, not stored */
            folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = len};
            folio_batch_clear(batch);
            CHECK_OK(folio_batch_add(batch, &s));
            calls = counter.calls;
            CHECK_OK(folio_plan_update(w.plan, batch, NULL));
            grown += counter.calls != calls;
        }
        CHECK_MSG(grown >= 2 && grown <= 18, "grew %d times from 1 to 1000 keys", grown);
        folio_batch_destroy(batch);
        close_world(&w);
        folio_context_destroy(ctx);
        CHECK_INT(counter.live, 0);
        CHECK_INT(counter.faults, 0);
    }
}

/* Whichever allocation fails, the step before can still be run, and nothing is lost. */
static void fail_growth(folio_context *ctx, support_counter *counter, const size *from, size to)
{
    world w;
    REQUIRE_TEST(open_world(&w, ctx, 0));
    CHECK_OK(update(&w, *from));
    CHECK_OK(update(&w, *from));
    int64_t live = counter->live, failed = 0;
    for (;; failed++) {
        counter->calls = 0;
        counter->fail_at = failed + 1;
        support_mark_error();
        folio_status status = update(&w, to);
        counter->fail_at = 0;
        if (status == FOLIO_OK || failed > 100) break;
        CHECK_INT(status, FOLIO_ERR_MEMORY);
        CHECK_OK(forward(&w, *from));
    }
    CHECK(failed >= 3 && failed < 100);
    CHECK(counter->live >= live);
    CHECK_OK(forward(&w, to));
    close_world(&w);
}

TEST(plan_grow, out_of_memory_changes_nothing)
{
    for (int b = 0; b <= SUPPORT_NUM_BACKENDS; b++) {
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        folio_context *ctx = b < SUPPORT_NUM_BACKENDS
                                 ? support_context(support_backends[b], 1, &allocator)
                                 : fake_device_context(&allocator);
        REQUIRE_TEST(ctx != NULL);
        fail_growth(ctx, &counter, &steps[3], (size){8, 60, 80, 20});
        folio_context_destroy(ctx);
        CHECK_INT(counter.live, 0);
        CHECK_INT(counter.faults, 0);
    }
}

/* So does a batch that is bad, and a backend that refuses; after a failure of the device there is no step. */
TEST(plan_grow, a_refused_step_changes_nothing)
{
    world w;
    folio_context *ctx = fake_device_context(NULL);
    const size small = {2, 3, 9, 0}, large = {8, 60, 80, 20};
    REQUIRE_TEST(open_world(&w, ctx, 0));
    CHECK_OK(update(&w, small));
    folio_batch *batch = support_batch(ctx, BLOCK);
    const int32_t table[] = {0, BLOCKS, 1};
    folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 40, .seq_len = 40,
                                   .block_table = table, .num_blocks = 3);
    CHECK_OK(folio_batch_add(batch, &s));
    REFUSED(folio_plan_update(w.plan, batch, NULL), ARG, "block_table[1] = 40");
    CHECK_OK(forward(&w, small));
    fake_device_set_update(FOLIO_ERR_UNSUPPORTED);
    CHECK(update(&w, large) == FOLIO_ERR_UNSUPPORTED);
    CHECK_OK(forward(&w, small));
    fake_device_set_update(FOLIO_ERR_DEVICE);
    CHECK(update(&w, large) == FOLIO_ERR_DEVICE);
    REFUSED(forward(&w, small), ARG, "no batch");
    fake_device_set_update(FOLIO_OK);
    CHECK_OK(update(&w, large));
    CHECK_OK(forward(&w, large));
    folio_batch_destroy(batch);
    close_world(&w);
    folio_context_destroy(ctx);
}

#define BAD(words, ...)                                                                            \
    do {                                                                                           \
        folio_plan_desc d = plan_desc(&w, 0);                                                      \
        folio_plan *plan = NOWHERE;                                                                \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_plan_create(ctx, &d, &plan), ARG, words);                                    \
        CHECK(plan == NULL);                                                                       \
    } while (0)

/* Limits are all there or none is; what needs them says so. */
TEST(plan_grow, what_needs_limits)
{
    static const int32_t lens[1] = {4};
    world w;
    folio_context *ctx = fake_device_context(NULL);
    REQUIRE_TEST(open_world(&w, ctx, 0));
    BAD("max_seqs is 3|max_query_tokens 0|max_seq_len 0|all of them|grows", d.max_seqs = 3);
    BAD("max_query_tokens 3|grows", d.max_query_tokens = 3);
    BAD("max_seqs is 0|max_seq_len 3", d.max_query_tokens = 3; d.max_seq_len = 3);
    BAD("max_encoder_tokens is 3|max_seqs", d.max_encoder_tokens = 3);
    BAD("max_query_len 1|max_seqs", d.max_query_len = 1);
    BAD("FOLIO_PLAN_GRAPH|max_seqs", d.flags = FOLIO_PLAN_GRAPH);
    BAD("FOLIO_PLAN_NO_WORKSPACE|max_seqs", d.flags = FOLIO_PLAN_NO_WORKSPACE);
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = 1, .on_device = 1, .seq_lens = lens);
    REFUSED(folio_plan_update_step(w.plan, &step, NULL), ARG, "without limits|max_seqs");
    /* before the first update there is nothing yet */
    size_t bytes = 1;
    folio_plan_findings found = {.struct_size = sizeof found};
    CHECK_OK(folio_plan_get_workspace_size(w.plan, &bytes));
    CHECK_INT(bytes, 0);
    CHECK_OK(folio_plan_get_findings(w.plan, &found));
    REFUSED(forward(&w, steps[0]), ARG, "no batch");
    close_world(&w);
    folio_context_destroy(ctx);
}
