/* test_workspace.c: attentions of one plan take turns in its workspace, whatever their shapes. */
#include "cuda/device_rig.h"

#include <string.h>

enum { HEADS = 8, SIZE = 64, BLOCK = 16, LENGTH = 160, SEQS = 32, SHAPES = 3 };
enum { BLOCKS = SEQS * LENGTH / BLOCK, ROW = HEADS * SIZE };

typedef struct {
    folio_context *ctx;
    folio_attention *attention[SHAPES];
    folio_kv_cache *cache[SHAPES];
    folio_batch *batch;
    void *q, *out;
} world;

/* All K and V are one number, and so is every mean of V. */
static void open_world(world *w)
{
    static const int32_t kv_heads[SHAPES] = {2, 8, 4};
    w->ctx = device_context();
    for (int i = 0; i < SHAPES; i++) {
        folio_attention_desc a =
            FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = kv_heads[i],
                       .k_head_size = SIZE, .dtype = FOLIO_BF16);
        folio_kv_cache_desc c = FOLIO_WITH(
            folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
            .num_kv_heads = kv_heads[i], .k_head_size = SIZE, .dtype = FOLIO_BF16);
        folio_kv_cache_shape shape = {.struct_size = sizeof shape};
        folio_kv_cache_view view = {.struct_size = sizeof view};
        CHECK_OK(folio_attention_create(w->ctx, &a, &w->attention[i]));
        CHECK_OK(folio_kv_cache_get_shape("cuda", &c, &shape));
        CHECK_OK(folio_kv_cache_create(w->ctx, &c, &w->cache[i]));
        CHECK_OK(folio_kv_cache_get_view(w->cache[i], 0, &view));
        CHECK_OK(folio_memory_fill(w->ctx, view.k, 0x3c, (size_t)shape.layer_bytes, NULL));
    }
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = BLOCK};
    CHECK_OK(folio_batch_create(w->ctx, &b, &w->batch));
    for (int32_t i = 0; i < SEQS; i++) {
        int32_t table[LENGTH / BLOCK];
        for (int32_t k = 0; k < LENGTH / BLOCK; k++) table[k] = i * (LENGTH / BLOCK) + k;
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = 1,
                       .seq_len = LENGTH - i % 5 * 20, /* no stretch fits them all */
                       .block_table = table, .num_blocks = LENGTH / BLOCK);
        CHECK_OK(folio_batch_add(w->batch, &seq));
    }
    w->q = device_make(w->ctx, SEQS * ROW * 2);
    w->out = device_make(w->ctx, SEQS * ROW * 2);
    CHECK_OK(folio_memory_fill(w->ctx, w->q, 0x3c, SEQS * ROW * 2, NULL));
}

static void close_world(world *w)
{
    folio_batch_destroy(w->batch);
    for (int i = 0; i < SHAPES; i++) {
        folio_kv_cache_destroy(w->cache[i]);
        folio_attention_destroy(w->attention[i]);
    }
    device_close(w->ctx);
}

/* Of the first num_attentions shapes. */
static folio_plan *make_plan(world *w, int32_t num_attentions, uint32_t flags)
{
    folio_plan *plan = NULL;
    folio_plan_desc p =
        FOLIO_WITH(folio_plan_desc, .attentions = w->attention, .num_attentions = num_attentions,
                   .cache = w->cache[0], .max_seqs = SEQS, .max_query_tokens = SEQS,
                   .max_seq_len = LENGTH, .flags = flags);
    CHECK_OK(folio_plan_create(w->ctx, &p, &plan));
    return plan;
}

static void check_out(world *w, const void *on_device, const folio_run *run, int turn)
{
    static uint16_t out[SEQS * ROW];
    CHECK_OK(folio_memory_copy(w->ctx, out, on_device, sizeof out, run));
    CHECK_OK(folio_run_wait(w->ctx, run));
    for (int64_t k = 0; k < SEQS * ROW; k++)
        CHECK_MSG(out[k] >= 0x3c3b && out[k] <= 0x3c3d, "turn %d: out[%lld] is %x", turn,
                  (long long)k, out[k]);
}

/* Sums of one shape's parts must not be left where another's counters are. */
TEST(workspace, attentions_of_other_shapes_take_turns)
{
    world w;
    open_world(&w);
    folio_plan *plan = make_plan(&w, SHAPES, 0);
    CHECK_OK(folio_plan_update(plan, w.batch, NULL));
    for (int turn = 0; turn < 3 * SHAPES; turn++) {
        int i = turn % SHAPES;
        folio_tensors t = FOLIO_WITH(folio_tensors, .q = {w.q, FOLIO_BF16, SEQS, 0, 0},
                                     .out = {w.out, FOLIO_BF16, SEQS, 0, 0});
        CHECK_OK(folio_memory_fill(w.ctx, w.out, 0x7f, SEQS * ROW * 2, NULL));
        CHECK_OK(
            folio_attention_forward(plan, i, FOLIO_ATTENTION_DECODER, w.cache[i], 0, &t, NULL));
        check_out(&w, w.out, NULL, turn);
    }
    folio_plan_destroy(plan);
    close_world(&w);
}

/* More workspaces than a plan keeps counters for, each overwritten by the caller between forwards. */
TEST(workspace, many_workspaces_of_the_caller)
{
    enum { MANY = 20 };
    world w;
    size_t bytes = 0;
    folio_run runs[MANY];
    open_world(&w);
    folio_plan *plan = make_plan(&w, SHAPES, FOLIO_PLAN_NO_WORKSPACE);
    CHECK_OK(folio_plan_get_workspace_size(plan, &bytes));
    CHECK_OK(folio_plan_update(plan, w.batch, NULL));
    for (int i = 0; i < MANY; i++) {
        runs[i] = (folio_run){.struct_size = sizeof runs[i], .workspace_size = bytes};
        runs[i].workspace = device_make(w.ctx, bytes);
    }
    for (int turn = 0; turn < 3 * MANY; turn++) {
        const folio_run *run = &runs[turn * 7 % MANY];
        int i = turn % SHAPES;
        folio_tensors t = FOLIO_WITH(folio_tensors, .q = {w.q, FOLIO_BF16, SEQS, 0, 0},
                                     .out = {w.out, FOLIO_BF16, SEQS, 0, 0});
        CHECK_OK(folio_memory_fill(w.ctx, run->workspace, 0x11, bytes, NULL));
        CHECK_OK(folio_memory_fill(w.ctx, w.out, 0x7f, SEQS * ROW * 2, NULL));
        CHECK_OK(folio_attention_forward(plan, i, FOLIO_ATTENTION_DECODER, w.cache[i], 0, &t, run));
        check_out(&w, w.out, NULL, turn);
    }
    folio_plan_destroy(plan);
    close_world(&w);
}

/* Workspaces of the caller's may hold anything, and forwards with different ones run at once. */
TEST(workspace, two_streams_with_workspaces_of_their_own)
{
    world w;
    size_t bytes = 0;
    folio_run runs[2];
    void *out[2];
    open_world(&w);
    folio_plan *plan = make_plan(&w, 1, FOLIO_PLAN_NO_WORKSPACE);
    CHECK_OK(folio_plan_get_workspace_size(plan, &bytes));
    for (int i = 0; i < 2; i++) {
        runs[i] = FOLIO_WITH(folio_run, .stream = device_stream(w.ctx), .workspace_size = bytes,
                             .workspace = device_make(w.ctx, bytes));
        out[i] = device_make(w.ctx, SEQS * ROW * 2);
        CHECK_OK(folio_memory_fill(w.ctx, runs[i].workspace, 0xff, bytes, NULL));
        CHECK_OK(folio_memory_fill(w.ctx, out[i], 0x7f, SEQS * ROW * 2, NULL));
    }
    CHECK_OK(folio_plan_update(plan, w.batch, NULL));
    CHECK_OK(folio_run_wait(w.ctx, NULL));
    for (int turn = 0; turn < 40; turn++) {
        folio_tensors t = FOLIO_WITH(folio_tensors, .q = {w.q, FOLIO_BF16, SEQS, 0, 0},
                                     .out = {out[turn % 2], FOLIO_BF16, SEQS, 0, 0});
        CHECK_OK(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, w.cache[0], 0, &t,
                                         &runs[turn % 2]));
    }
    for (int i = 0; i < 2; i++) check_out(&w, out[i], &runs[i], i);
    folio_plan_destroy(plan);
    close_world(&w);
}

/* The plan's own workspace serves the stream of the first forward after an update. */
TEST(workspace, a_second_stream_in_the_plans_own_is_refused)
{
    world w;
    open_world(&w);
    folio_plan *plan = make_plan(&w, 1, 0);
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {w.q, FOLIO_BF16, SEQS, 0, 0},
                                 .out = {w.out, FOLIO_BF16, SEQS, 0, 0});
    folio_run run = {.struct_size = sizeof run, .stream = device_stream(w.ctx)};
    CHECK_OK(folio_plan_update(plan, w.batch, NULL));
    CHECK_OK(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, w.cache[0], 0, &t, NULL));
    CHECK_REFUSED(
        folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, w.cache[0], 0, &t, &run),
        FOLIO_ERR_ARGUMENT, "another stream");
    CHECK_OK(folio_run_wait(w.ctx, NULL));
    CHECK_OK(folio_plan_update(plan, w.batch, &run));
    CHECK_OK(folio_memory_fill(w.ctx, w.out, 0x7f, SEQS * ROW * 2, &run));
    CHECK_OK(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, w.cache[0], 0, &t, &run));
    check_out(&w, w.out, &run, 0);
    folio_plan_destroy(plan);
    close_world(&w);
}
