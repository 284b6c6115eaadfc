/* test_parts.c: sequences of many rows whose keys are cut over the device: counters, graphs and workspaces. */
#include "cuda/device_rig.h"
#include "kit/layer.h"

#include <string.h>

enum { HEADS = 16, KV_HEADS = 4, SIZE = 128, BLOCK = 16, LENGTH = 3000, SEQS = 3, QUERY = 12 };
enum { SEQ_BLOCKS = (LENGTH + BLOCK - 1) / BLOCK, BLOCKS = SEQS * SEQ_BLOCKS };
enum { ROW = HEADS * SIZE, ROWS = SEQS * QUERY };

typedef struct {
    kit_layer l;
    void *q, *out;
    folio_run run;
} engine;

static void open_engine(engine *e, uint32_t flags, bool has_stream)
{
    folio_context *ctx = device_context();
    memset(e, 0, sizeof *e);
    e->run =
        (folio_run){.struct_size = sizeof e->run, .stream = has_stream ? device_stream(ctx) : NULL};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &e->l, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                            .k_head_size = SIZE, .dtype = FOLIO_BF16, .num_blocks = BLOCKS,
                            .block_size = BLOCK, .max_seqs = SEQS, .max_query_tokens = ROWS,
                            .max_seq_len = LENGTH, .flags = flags));
    device_write_slots(ctx, e->l.cache, 0, 0, BLOCKS * BLOCK, KV_HEADS * SIZE, 1);
    e->q = device_upload_numbers(ctx, ROWS * ROW, 3);
    e->out = device_make(ctx, ROWS * ROW * 2);
}

static void close_engine(engine *e)
{
    kit_layer_close(&e->l);
    device_close(e->l.ctx);
}

/* Sequences of so many rows each, all of the same length. */
static void update(engine *e, int32_t num_seqs, int32_t query_len)
{
    folio_batch_clear(e->l.batch);
    for (int32_t i = 0; i < num_seqs; i++) {
        int32_t table[SEQ_BLOCKS];
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) table[k] = i * SEQ_BLOCKS + k;
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = query_len, .seq_len = LENGTH - 7 * i,
                       .block_table = table, .num_blocks = SEQ_BLOCKS);
        CHECK_OK(folio_batch_add(e->l.batch, &seq));
    }
    CHECK_OK(folio_plan_update(e->l.plan, e->l.batch, &e->run));
}

static void forward(engine *e, int64_t rows)
{
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {e->q, FOLIO_BF16, rows, 0, 0},
                                 .out = {e->out, FOLIO_BF16, rows, 0, 0});
    CHECK_OK(
        folio_attention_forward(e->l.plan, 0, FOLIO_ATTENTION_DECODER, e->l.cache, 0, &t, &e->run));
}

static void read_out(engine *e, uint16_t *out)
{
    CHECK_OK(folio_memory_copy(e->l.ctx, out, e->out, ROWS * ROW * 2, &e->run));
    CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
}

/* Layer after layer with nothing between them: each finds the counters as the first did. */
TEST(parts, layers_back_to_back_give_the_same_bits)
{
    static uint16_t want[ROWS * ROW], got[ROWS * ROW];
    engine e;
    open_engine(&e, 0, false);
    for (int32_t seqs = 1; seqs <= SEQS; seqs += 2) {
        update(&e, seqs, QUERY);
        CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0xff, ROWS * ROW * 2, &e.run));
        forward(&e, seqs * QUERY);
        read_out(&e, want);
        for (int i = 0; i < seqs * QUERY * ROW; i++) CHECK((want[i] & 0x7fff) < 0x3f80);
        for (int turn = 0; turn < 200; turn++) {
            CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0xff, ROWS * ROW * 2, &e.run));
            for (int layer = 0; layer < 8; layer++) forward(&e, seqs * QUERY);
            read_out(&e, got);
            CHECK(memcmp(got, want, sizeof got) == 0);
        }
    }
    close_engine(&e);
}

/* One graph serves steps with many rows, with few only and with many again, and steps of other sizes. */
TEST(parts, a_graph_meets_steps_without_prefills)
{
    static const int32_t steps[][2] = {{1, QUERY}, {3, 1}, {2, 4}, {3, QUERY}, {1, 1}, {2, 5}};
    static uint16_t want[ROWS * ROW], got[ROWS * ROW];
    engine plain, captured;
    open_engine(&plain, FOLIO_PLAN_GRAPH, false); /* the same kernels, called */
    open_engine(&captured, FOLIO_PLAN_GRAPH, true);
    update(&captured, 1, 1);
    device_capture(captured.run.stream);
    forward(&captured, ROWS);
    cudaGraphExec_t replay = device_captured(captured.l.ctx, captured.run.stream);
    for (int i = 0; i < 24; i++) {
        const int32_t *step = steps[i % 6];
        size_t bytes = (size_t)(step[0] * step[1]) * ROW * 2;
        update(&plain, step[0], step[1]);
        forward(&plain, ROWS);
        read_out(&plain, want);
        CHECK_OK(
            folio_memory_fill(captured.l.ctx, captured.out, 0xff, ROWS * ROW * 2, &captured.run));
        update(&captured, step[0], step[1]);
        CUDA_OK(cudaGraphLaunch(replay, captured.run.stream));
        read_out(&captured, got);
        CHECK_MSG(memcmp(got, want, bytes) == 0, "step %d", i);
        for (size_t k = bytes / 2; k < ROWS * ROW; k++) CHECK(got[k] == 0);
    }
    close_engine(&captured);
    close_engine(&plain);
}

/* A sequence's bits do not depend on the ones next to it, which change how many parts the device has room for. */
TEST(parts, batch_invariant_plans_cut_at_fixed_places)
{
    static uint16_t want[ROWS * ROW], got[ROWS * ROW];
    engine e;
    open_engine(&e, FOLIO_PLAN_BATCH_INVARIANT, false);
    for (int32_t query = 5; query <= QUERY; query += 7) {
        update(&e, 1, query);
        forward(&e, query);
        read_out(&e, want);
        for (int32_t seqs = 2; seqs <= SEQS; seqs++) {
            update(&e, seqs, query);
            forward(&e, seqs * query);
            read_out(&e, got);
            CHECK(memcmp(got, want, (size_t)query * ROW * 2) == 0);
        }
    }
    close_engine(&e);
}

/* Workspaces of the caller's may hold anything. */
TEST(parts, a_workspace_of_the_callers)
{
    static uint16_t want[ROWS * ROW], got[ROWS * ROW];
    engine own, other;
    size_t bytes = 0;
    open_engine(&own, 0, false);
    open_engine(&other, FOLIO_PLAN_NO_WORKSPACE, false);
    CHECK_OK(folio_plan_get_workspace_size(other.l.plan, &bytes));
    other.run.workspace_size = bytes;
    other.run.workspace = device_make(other.l.ctx, bytes);
    CHECK_OK(folio_memory_fill(other.l.ctx, other.run.workspace, 0xff, bytes, NULL));
    update(&own, 2, QUERY);
    forward(&own, 2 * QUERY);
    read_out(&own, want);
    update(&other, 2, QUERY);
    for (int turn = 0; turn < 3; turn++) {
        forward(&other, 2 * QUERY);
        read_out(&other, got);
        CHECK(memcmp(got, want, 2 * QUERY * ROW * 2) == 0);
    }
    close_engine(&own);
    close_engine(&other);
}
