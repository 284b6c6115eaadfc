/*
 * test_plan_update.c: an update that fails leaves the plan as it was; who may be in a plan's own workspace; block
 * size and counts taken from caches. A device that refuses and streams come from fake_device.h.
 */
#include "fake_device.h"
#include "plan/plan.h"
#include "support.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 2, SIZE = 64, BLOCK = 16, MAX_ROWS = 128, ROW = HEADS * SIZE };
enum { BLOCKS = MAX_ROWS / BLOCK };

typedef struct {
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_plan *plan;
    folio_batch *batches[3]; /* of 3, 5 and MAX_ROWS rows */
    void *memory;            /* q, k, v, out, workspace */
    size_t bytes, workspace_size;
} world;

static folio_plan_desc plan_desc(const world *w)
{
    return FOLIO_WITH(folio_plan_desc, .attentions = &w->attention, .num_attentions = 1,
                      .cache = w->cache, .max_seqs = 2, .max_query_tokens = MAX_ROWS,
                      .max_seq_len = MAX_ROWS);
}

static folio_batch *make_batch(folio_context *ctx, int32_t rows)
{
    int32_t table[BLOCKS];
    for (int32_t i = 0; i < BLOCKS; i++) table[i] = BLOCKS - 1 - i;
    folio_batch *batch = support_batch(ctx, BLOCK);
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = rows, .seq_len = rows,
                                     .block_table = table, .num_blocks = BLOCKS);
    CHECK_OK(folio_batch_add(batch, &seq));
    return batch;
}

static bool open_world(world *w, folio_context *ctx)
{
    memset(w, 0, sizeof *w);
    w->ctx = ctx;
    if (ctx == NULL) return false;
    folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                        .k_head_size = SIZE, .dtype = FOLIO_F32);
    folio_kv_cache_desc c =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
    CHECK_OK(folio_attention_create(ctx, &a, &w->attention));
    CHECK_OK(folio_kv_cache_create(ctx, &c, &w->cache));
    folio_plan_desc p = plan_desc(w);
    CHECK_OK(folio_plan_create(ctx, &p, &w->plan));
    if (w->plan == NULL) return false;
    w->batches[0] = make_batch(ctx, 3);
    w->batches[1] = make_batch(ctx, 5);
    w->batches[2] = make_batch(ctx, MAX_ROWS);
    CHECK_OK(folio_plan_get_workspace_size(w->plan, &w->workspace_size));
    w->bytes = 4 * MAX_ROWS * ROW * sizeof(float) + w->workspace_size;
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, w->bytes, &w->memory));
    CHECK_OK(folio_memory_fill(ctx, w->memory, 0x3c, w->bytes, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    return w->memory != NULL;
}

static void close_world(world *w)
{
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_DEVICE, w->memory, w->bytes);
    for (int i = 0; i < COUNT_OF(w->batches); i++) folio_batch_destroy(w->batches[i]);
    folio_plan_destroy(w->plan);
    folio_kv_cache_destroy(w->cache);
    folio_attention_destroy(w->attention);
}

static folio_tensors tensors(const world *w, int64_t rows)
{
    float *x = w->memory;
    folio_tensor t[4];
    for (int i = 0; i < 4; i++)
        t[i] = (folio_tensor){.data = x + i * MAX_ROWS * ROW, .dtype = FOLIO_F32, .tokens = rows};
    return FOLIO_WITH(folio_tensors, .q = t[0], .k = t[1], .v = t[2], .out = t[3]);
}

static folio_status forward(const world *w, int64_t rows, const folio_run *run)
{
    folio_tensors t = tensors(w, rows);
    return folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, &t, run);
}

/* ---- Updates that fail ------------------------------------------------------------------------ */

static const int32_t device_lens[1] = {4};

static folio_step device_step(void)
{
    return FOLIO_WITH(folio_step, .num_seqs = 1, .on_device = 1, .seq_lens = device_lens);
}

/* Refused by the backend, as a copy into a captured graph is: the plan serves the batch it had. */
TEST(plan_update, refused_by_the_backend_changes_nothing)
{
    world w;
    folio_context *ctx = fake_device_context(NULL);
    REQUIRE_TEST(open_world(&w, ctx));
    folio_step on_device = device_step();
    for (int had = 0; had < 2; had++) {
        int64_t rows = had ? 3 : 0;
        if (had) CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
        fake_device_set_update(FOLIO_ERR_UNSUPPORTED);
        CHECK(folio_plan_update(w.plan, w.batches[1], NULL) == FOLIO_ERR_UNSUPPORTED);
        if (had) CHECK_OK(forward(&w, rows, NULL));
        else REFUSED(forward(&w, 5, NULL), FOLIO_ERR_ARGUMENT, "no batch");
        CHECK(folio_plan_update_step(w.plan, &on_device, NULL) == FOLIO_ERR_UNSUPPORTED);
        if (had) CHECK_OK(forward(&w, rows, NULL));
        else REFUSED(forward(&w, 1, NULL), FOLIO_ERR_ARGUMENT, "no batch");
        fake_device_set_update(FOLIO_OK);
    }
    /* the batch it serves is the only one it keeps alive */
    folio_batch_destroy(w.batches[1]);
    w.batches[1] = NULL;
    CHECK_OK(forward(&w, 3, NULL));
    close_world(&w);
    folio_context_destroy(ctx);
}

/* What a device's failure has left there is no batch's. */
TEST(plan_update, after_a_failure_of_the_device_there_is_no_batch)
{
    world w;
    folio_context *ctx = fake_device_context(NULL);
    REQUIRE_TEST(open_world(&w, ctx));
    folio_step on_device = device_step();
    for (int way = 0; way < 2; way++) {
        CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
        fake_device_set_update(FOLIO_ERR_DEVICE);
        folio_status status = way ? folio_plan_update_step(w.plan, &on_device, NULL)
                                  : folio_plan_update(w.plan, w.batches[1], NULL);
        CHECK(status == FOLIO_ERR_DEVICE);
        REFUSED(forward(&w, 3, NULL), FOLIO_ERR_ARGUMENT, "no batch");
        REFUSED(forward(&w, 5, NULL), FOLIO_ERR_ARGUMENT, "no batch");
        fake_device_set_update(FOLIO_OK);
        CHECK_OK(folio_plan_update(w.plan, w.batches[1], NULL));
        CHECK_OK(forward(&w, 5, NULL));
    }
    close_world(&w);
    folio_context_destroy(ctx);
}

/* What arrays of a device cannot say is refused with a sentence, and so are they where there is no device. */
TEST(plan_update, what_device_arrays_cannot_say)
{
    static const int32_t ints[8];
    static const int64_t longs[8];
    const folio_table rows = {.kind = FOLIO_TABLE_ROWS, .indices = ints, .row_stride = 8};
    world w;
    folio_context *ctx = fake_device_context(NULL), *cpu = support_context("cpu", 1, NULL);
    REQUIRE_TEST(open_world(&w, ctx));
#define BAD(status, words, ...)                                                                    \
    do {                                                                                           \
        folio_step s = device_step();                                                              \
        s.table = rows;                                                                            \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_plan_update_step(w.plan, &s, NULL), status, words);                          \
    } while (0)
    const folio_status unsupported = FOLIO_ERR_UNSUPPORTED, bad = FOLIO_ERR_ARGUMENT;
    BAD(unsupported, "slots", s.table.kind = FOLIO_TABLE_SLOTS);
    BAD(unsupported, "index_bytes is 8", s.table.index_bytes = 8);
    BAD(unsupported, "phases", s.phases = ints);
    BAD(unsupported, "causality_default is 2", s.causality_default = FOLIO_CAUSAL_NO);
    BAD(unsupported, "encoder", s.encoder_lens = ints);
    BAD(unsupported, "encoder", s.encoder_new_lens = ints);
    BAD(unsupported, "encoder", s.cross_slots = longs);
    BAD(unsupported, "encoder", s.cross_table = rows);
    BAD(bad, "table.kind 4", s.table.kind = (folio_table_kind)4);
    BAD(bad, "table.kind is FOLIO_TABLE_NONE", s.table.kind = FOLIO_TABLE_NONE);
    BAD(bad, "table.indices is NULL", s.table.indices = NULL);
    BAD(bad, "row_stride is 7|128|at least 8", s.table.row_stride = 7);
    BAD(bad, "table.start is NULL", s.table.kind = FOLIO_TABLE_CSR);
    BAD(bad, "num_indices is 0", s.table.kind = FOLIO_TABLE_CSR; s.table.start = ints);
    BAD(bad, "seq_lens is NULL", s.seq_lens = NULL);
    BAD(bad, "num_seqs is 0", s.num_seqs = 0);
    BAD(bad, "2 tokens|1 sequences", s.num_query_tokens = 2);
    BAD(bad, "first_query_pos", s.first_key_pos = longs);
    BAD(bad, "on_device is 2", s.on_device = 2);
#undef BAD
    folio_step good = device_step();
    good.table = rows;
    CHECK_OK(folio_plan_update_step(w.plan, &good, NULL));
    close_world(&w);
    REQUIRE_TEST(open_world(&w, cpu));
    REFUSED(folio_plan_update_step(w.plan, &good, NULL), unsupported, "cpu|on_device must be 0");
    REFUSED(folio_plan_update_step(w.plan, NULL, NULL), bad, "folio_step");
    REFUSED(folio_plan_update_step(NULL, &good, NULL), bad, "plan");
    close_world(&w);
    folio_context_destroy(ctx);
    folio_context_destroy(cpu);
}

/* Arrays in host memory: one that is refused leaves the step before it, and no batch of the caller's is touched. */
BACKEND_TEST(plan_update, steps_of_host_arrays)
{
    static const int32_t tables[2][2] = {{3, 1}, {5, 2}}, starts[3] = {0, 3, 4};
    static const int32_t lens[2] = {3, 17}, longer[2] = {3, 33};
    world w;
    REQUIRE_TEST(open_world(&w, ctx));
    kit_poison_cache(w.cache); /* the steps have a context that nothing writes */
    const folio_step good =
        FOLIO_WITH(folio_step, .num_seqs = 2, .query_start = starts, .seq_lens = lens,
                   .table = {.kind = FOLIO_TABLE_ROWS, .indices = tables, .row_stride = 2});
    folio_step bad = good;
    bad.seq_lens = longer;
    for (int round = 0; round < 3; round++) {
        CHECK_OK(folio_plan_update_step(w.plan, &good, NULL));
        CHECK_OK(forward(&w, 4, NULL));
        REFUSED(folio_plan_update_step(w.plan, &bad, NULL), FOLIO_ERR_ARGUMENT, "seq 1|33|need 3");
        CHECK_OK(forward(&w, 4, NULL));
        CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
        REFUSED(folio_plan_update_step(w.plan, &bad, NULL), FOLIO_ERR_ARGUMENT, "seq 1|33|need 3");
        CHECK_OK(forward(&w, 3, NULL));
    }
    close_world(&w);
}

/* The lengths of a device's arrays are not known here: a bias has to cover the plan's limits. */
TEST(plan_update, a_bias_of_device_arrays_covers_the_limits)
{
    world w;
    folio_context *ctx = fake_device_context(NULL);
    REQUIRE_TEST(open_world(&w, ctx));
    folio_step on_device = device_step();
    CHECK_OK(folio_plan_update_step(w.plan, &on_device, NULL));
    folio_tensors t = tensors(&w, 1);
    const int64_t dims[][4] = {{1, HEADS, 2, MAX_ROWS}, {1, HEADS, MAX_ROWS, 4}};
    const char *words[] = {"query|2|the plan's limits need 128",
                           "key|4|the plan's limits need 128"};
    for (int i = 0; i < 2; i++) {
        t.bias = (folio_bias){.data = w.memory, .dtype = FOLIO_F32};
        memcpy(t.bias.dims, dims[i], sizeof dims[i]);
        REFUSED(folio_attention_forward(w.plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL),
                FOLIO_ERR_ARGUMENT, words[i]);
    }
    CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
    t = tensors(&w, 3);
    t.bias = (folio_bias){.data = w.memory, .dtype = FOLIO_F32, .dims = {1, 1, 1, 2}};
    REFUSED(folio_attention_forward(w.plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL),
            FOLIO_ERR_ARGUMENT, "key|2|the batch needs 3");
    close_world(&w);
    folio_context_destroy(ctx);
}

/* A cache of another kind of memory than the plan's. */
TEST(plan_update, a_cache_lies_where_the_plan_runs)
{
    world device, host;
    folio_context *ctx = fake_device_context(NULL), *cpu = support_context("cpu", 1, NULL);
    REQUIRE_TEST(open_world(&device, ctx) && open_world(&host, cpu));
    CHECK_OK(folio_plan_update(device.plan, device.batches[0], NULL));
    CHECK_OK(
        folio_plan_update(host.plan, device.batches[0], NULL)); /* a batch may be any context's */
    folio_tensors t = tensors(&host, 3), on_device = tensors(&device, 3);
    REFUSED(
        folio_attention_forward(host.plan, 0, FOLIO_ATTENTION_DECODER, device.cache, 0, &t, NULL),
        FOLIO_ERR_ARGUMENT, "cache|backend cpu");
    REFUSED(folio_attention_forward(device.plan, 0, FOLIO_ATTENTION_DECODER, host.cache, 0,
                                    &on_device, NULL),
            FOLIO_ERR_ARGUMENT, "cache|backend cpu");
    CHECK_OK(forward(&host, 3, NULL));
    close_world(&device);
    close_world(&host);
    folio_context_destroy(ctx);
    folio_context_destroy(cpu);
}

/* ---- The plan's own workspace ----------------------------------------------------------------- */

/* Threads of the caller's: while a forward runs on them, another one begins. */
typedef struct {
    const world *w;
    folio_status own, given;
    char sentence[256];
    void *workspace;
    bool busy;
} intruder;

static void *intrude(void *arg)
{
    intruder *in = arg;
    folio_run run =
        FOLIO_WITH(folio_run, .workspace = in->workspace, .workspace_size = in->w->workspace_size);
    in->own = forward(in->w, MAX_ROWS, NULL);
    snprintf(in->sentence, sizeof in->sentence, "%s", folio_last_error());
    in->given = forward(in->w, MAX_ROWS, &run);
    return NULL;
}

static void parallel_for(void *user, int64_t count, folio_task_fn fn, void *task)
{
    intruder *in = user;
    if (in->w != NULL && !in->busy) {
        pthread_t thread;
        in->busy = true;
        CHECK(pthread_create(&thread, NULL, intrude, in) == 0);
        pthread_join(thread, NULL);
    }
    for (int64_t i = 0; i < count; i++) fn(task, i);
}

TEST(plan_update, a_second_thread_brings_a_workspace)
{
    intruder in = {.busy = false};
    folio_context_desc d =
        FOLIO_WITH(folio_context_desc, .backend = "cpu", .executor = {parallel_for, &in, 2});
    folio_context *ctx = NULL;
    world w;
    CHECK_OK(folio_context_create(&d, &ctx));
    REQUIRE_TEST(open_world(&w, ctx));
    support_buffer workspace = support_buffer_make(w.workspace_size);
    CHECK_OK(folio_plan_update(w.plan, w.batches[2], NULL));
    in.workspace = workspace.data;
    in.w = &w;
    CHECK_OK(forward(&w, MAX_ROWS, NULL));
    CHECK(in.busy);
    CHECK(in.own == FOLIO_ERR_ARGUMENT && strstr(in.sentence, "another thread") != NULL);
    CHECK_OK(in.given);
    CHECK_OK(forward(&w, MAX_ROWS, NULL)); /* one after another is fine, on any thread */
    in.busy = true;
    intrude(&in);
    CHECK_OK(in.own);
    support_buffer_free(&workspace);
    close_world(&w);
    folio_context_destroy(ctx);
}

/* A process forked while a thread was in a forward has the plan, and nobody in it after an update. */
BACKEND_TEST(plan_update, an_update_ends_a_forward_of_before_the_fork)
{
    world w;
    REQUIRE_TEST(open_world(&w, ctx));
    CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
    CHECK_OK(folioi_plan_enter_workspace(w.plan, NULL));
    REFUSED(forward(&w, 3, NULL), FOLIO_ERR_ARGUMENT, "another thread");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(folio_plan_update(w.plan, w.batches[0], NULL) == FOLIO_OK &&
                      forward(&w, 3, NULL) == FOLIO_OK && forward(&w, 3, NULL) == FOLIO_OK
                  ? 0
                  : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    folioi_plan_leave_workspace(w.plan);
    CHECK_OK(forward(&w, 3, NULL));
    close_world(&w);
}

TEST(plan_update, a_second_stream_brings_a_workspace)
{
    world w;
    folio_context *ctx = fake_device_context(NULL);
    char streams[2];
    REQUIRE_TEST(open_world(&w, ctx));
    folio_run first = {.struct_size = sizeof first, .stream = &streams[0]};
    folio_run second = {.struct_size = sizeof second, .stream = &streams[1]}, with = second;
    with.workspace = (char *)w.memory + 4 * MAX_ROWS * ROW * sizeof(float);
    with.workspace_size = w.workspace_size;
    CHECK_OK(folio_plan_update(w.plan, w.batches[0], NULL));
    CHECK_OK(forward(&w, 3, &first));
    CHECK_OK(forward(&w, 3, &first));
    REFUSED(forward(&w, 3, &second), FOLIO_ERR_ARGUMENT, "another stream");
    REFUSED(forward(&w, 3, NULL), FOLIO_ERR_ARGUMENT, "another stream");
    CHECK_OK(forward(&w, 3, &with));
    CHECK_OK(forward(&w, 3, &first)); /* a refusal leaves it free */
    /* the next update ends it; one that is refused does not */
    fake_device_set_update(FOLIO_ERR_UNSUPPORTED);
    CHECK(folio_plan_update(w.plan, w.batches[1], &second) == FOLIO_ERR_UNSUPPORTED);
    fake_device_set_update(FOLIO_OK);
    REFUSED(forward(&w, 3, &second), FOLIO_ERR_ARGUMENT, "another stream");
    CHECK_OK(folio_plan_update(w.plan, w.batches[1], &second));
    CHECK_OK(forward(&w, 5, &second));
    REFUSED(forward(&w, 5, &first), FOLIO_ERR_ARGUMENT, "another stream");
    close_world(&w);
    folio_context_destroy(ctx);
}

/* ---- Geometry given once ---------------------------------------------------------------------- */

static folio_kv_cache *cache_of(folio_context *ctx, int32_t block_size, int64_t num_blocks)
{
    folio_kv_cache_desc c = {.struct_size = sizeof c,
                             .num_blocks = num_blocks,
                             .num_layers = 1,
                             .block_size = block_size,
                             .num_kv_heads = HEADS,
                             .k_head_size = SIZE,
                             .dtype = FOLIO_F32};
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
    return cache;
}

/* Block b of a table is taken, self and cross. */
static folio_status update_with(folio_context *ctx, folio_plan *plan, int32_t block_size, int32_t b,
                                int32_t cross)
{
    folio_batch *batch = support_batch(ctx, block_size);
    folio_batch_seq seq = FOLIO_WITH(
        folio_batch_seq, .query_len = 1, .seq_len = 1, .encoder_len = 1,
        .block_table = b < 0 ? NULL : &b, .num_blocks = b < 0 ? 0 : 1,
        .cross_block_table = cross < 0 ? NULL : &cross, .num_cross_blocks = cross < 0 ? 0 : 1);
    CHECK_OK(folio_batch_add(batch, &seq));
    support_mark_error();
    folio_status status = folio_plan_update(plan, batch, NULL);
    folio_batch_destroy(batch);
    return status;
}

BACKEND_TEST(plan_update, geometry_comes_from_the_caches)
{
    world w;
    REQUIRE_TEST(open_world(&w, ctx));
    folio_kv_cache *cache = cache_of(ctx, BLOCK, 9), *cross = cache_of(ctx, BLOCK, 4);
    folio_kv_cache *other = cache_of(ctx, 2 * BLOCK, 9);
    uint32_t types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                     FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER);
    const struct {
        const folio_kv_cache *cache, *cross;
        int32_t block_size;
        int64_t num_blocks, cross_num_blocks;
        int64_t limit, cross_limit; /* -1: refused */
        const char *words;
    } cases[] = {{cache, NULL, 0, 0, 0, 9, 9, ""},
                 {cache, cross, 0, 0, 0, 9, 4, ""},
                 {cache, cross, BLOCK, 9, 4, 9, 4, ""},
                 {cache, NULL, 0, 0, 7, 9, 7, ""},
                 {NULL, cross, 0, 0, 0, 0, 4, ""},
                 {NULL, cross, BLOCK, 5, 0, 5, 4, ""},
                 {NULL, NULL, BLOCK, 5, 0, 5, 5, ""},
                 {cache, NULL, 8, 0, 0, -1, -1, "block_size|8|cache has 16"},
                 {cache, NULL, 0, 8, 0, -1, -1, "num_blocks|8|cache has 9"},
                 {cache, cross, 0, 0, 9, -1, -1, "cross_num_blocks|9|cross_cache has 4"},
                 {cache, other, 0, 0, 0, -1, -1, "block_size|16|cross_cache has 32"},
                 {NULL, NULL, BLOCK, 0, 0, -1, -1, "block_size is 16|num_blocks 0"},
                 {NULL, NULL, 0, 0, 3, -1, -1, "cross_num_blocks 3"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_plan_desc d = plan_desc(&w);
        folio_plan *plan = NULL;
        d.types = &types;
        d.cache = cases[i].cache;
        d.cross_cache = cases[i].cross;
        d.block_size = cases[i].block_size;
        d.num_blocks = cases[i].num_blocks;
        d.cross_num_blocks = cases[i].cross_num_blocks;
        if (cases[i].limit < 0) {
            REFUSED(folio_plan_create(ctx, &d, &plan), FOLIO_ERR_ARGUMENT, cases[i].words);
            CHECK(plan == NULL);
            continue;
        }
        CHECK_OK(folio_plan_create(ctx, &d, &plan));
        if (plan == NULL) continue;
        int32_t limit = (int32_t)cases[i].limit, past = (int32_t)cases[i].cross_limit;
        CHECK_OK(update_with(ctx, plan, BLOCK, limit - 1, past - 1));
        CHECK(update_with(ctx, plan, BLOCK, limit, past - 1) == FOLIO_ERR_ARGUMENT);
        CHECK(update_with(ctx, plan, BLOCK, limit - 1, past) == FOLIO_ERR_ARGUMENT);
        CHECK(update_with(ctx, plan, 2 * BLOCK, limit - 1, past - 1) == FOLIO_ERR_ARGUMENT);
        folio_plan_destroy(plan);
    }
    folio_kv_cache_destroy(cache);
    folio_kv_cache_destroy(cross);
    folio_kv_cache_destroy(other);
    close_world(&w);
}
