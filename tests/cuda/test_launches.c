/* test_launches.c: kernels that begin before those ahead of them have ended: each layer reads what the one before it wrote. */
#include "cuda/device_rig.h"
#include "kit/layer.h"

#include <string.h>

enum { HEADS = 16, KV_HEADS = 4, SIZE = 128, BLOCK = 16, LENGTH = 2000, SEQS = 3, LAYERS = 6 };
enum {
    STEPS = 5,
    SEQ_BLOCKS = LENGTH / BLOCK,
    BLOCKS = SEQS * SEQ_BLOCKS,
    TOKENS = BLOCKS * BLOCK
};
enum { ROW = HEADS * SIZE, KV_NUMBERS = TOKENS * KV_HEADS * SIZE, OUT = SEQS * ROW };

typedef struct {
    kit_layer l;
    void *k, *v; /* of the cache at the start */
    void *x
        [2]; /* a layer's q, and its out, which the next one has as q, and parts of it as k and v */
    uint16_t *q; /* of the first layer */
    folio_run run;
    bool writes;  /* layers have new k and v */
    int32_t seqs; /* at most SEQS */
} engine;

static void open_engine(engine *e, uint32_t flags, int32_t seqs)
{
    folio_context *ctx = device_context();
    memset(e, 0, sizeof *e);
    e->seqs = seqs;
    e->run = (folio_run){.struct_size = sizeof e->run, .stream = device_stream(ctx)};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &e->l, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                            .k_head_size = SIZE, .dtype = FOLIO_BF16, .num_blocks = BLOCKS,
                            .num_layers = LAYERS, .block_size = BLOCK, .max_seqs = seqs,
                            .max_query_tokens = seqs, .max_seq_len = LENGTH, .max_query_len = 1,
                            .flags = FOLIO_PLAN_GRAPH | flags));
    e->k = device_upload_numbers(ctx, KV_NUMBERS, 1);
    e->v = device_upload_numbers(ctx, KV_NUMBERS, 2);
    for (int i = 0; i < 2; i++) e->x[i] = device_upload_numbers(ctx, OUT, 3);
    e->q = device_numbers(OUT, 3);
}

static void close_engine(engine *e)
{
    kit_layer_close(&e->l);
    device_close(e->l.ctx);
    free(e->q);
}

static void fill_cache(engine *e)
{
    int64_t *slots = malloc(TOKENS * sizeof *slots);
    for (int64_t i = 0; i < TOKENS; i++) slots[i] = i;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {e->k, FOLIO_BF16, TOKENS, 0, 0},
                                      .v = {e->v, FOLIO_BF16, TOKENS, 0, 0}, .slots = slots);
    for (int32_t layer = 0; layer < LAYERS; layer++)
        CHECK_OK(folio_kv_cache_write(e->l.cache, layer, &write, &e->run));
    free(slots);
}

/* Sequences of lengths that a step changes much, so that its lists are others. */
static void update(engine *e, int step)
{
    folio_batch_clear(e->l.batch);
    for (int32_t i = 0; i < e->seqs; i++) {
        int32_t table[SEQ_BLOCKS];
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) table[k] = k * SEQS + i;
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = 1,
                       .seq_len = 1 + (LENGTH - 1) * ((step * 5 + i * 3) % 7 + 1) / 7,
                       .block_table = table, .num_blocks = SEQ_BLOCKS);
        CHECK_OK(folio_batch_add(e->l.batch, &seq));
    }
    CHECK_OK(folio_plan_update(e->l.plan, e->l.batch, &e->run));
}

static bool is_one_layer; /* all forwards are of layer 0, and every other one has new k and v */

static void forward(engine *e, int32_t layer)
{
    uint16_t *from = e->x[layer % 2];
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {from, FOLIO_BF16, e->seqs, 0, 0},
                                 .out = {e->x[1 - layer % 2], FOLIO_BF16, e->seqs, 0, 0});
    if (e->writes && !(is_one_layer && layer % 2)) {
        t.k = (folio_tensor){from, FOLIO_BF16, e->seqs, ROW, SIZE};
        t.v = (folio_tensor){from + KV_HEADS * SIZE, FOLIO_BF16, e->seqs, ROW, SIZE};
    }
    CHECK_OK(folio_attention_forward(e->l.plan, 0, FOLIO_ATTENTION_DECODER, e->l.cache,
                                     is_one_layer ? 0 : layer, &t, &e->run));
}

typedef enum { WAITING, STREAMING, REPLAYED } way;

/* All steps; out: what the last layer of each gave. */
static void run_steps(engine *e, way how, uint16_t *out)
{
    cudaGraphExec_t replay = NULL;
    fill_cache(e);
    if (how == REPLAYED) {
        update(e, 0);
        device_capture(e->run.stream);
        for (int32_t layer = 0; layer < LAYERS; layer++) forward(e, layer);
        replay = device_captured(e->l.ctx, e->run.stream);
    }
    for (int step = 0; step < STEPS; step++) {
        CHECK_OK(folio_memory_copy(e->l.ctx, e->x[0], e->q, OUT * 2, &e->run));
        update(e, step);
        if (how == WAITING) CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
        if (how == REPLAYED) CUDA_OK(cudaGraphLaunch(replay, e->run.stream));
        for (int32_t layer = 0; layer < LAYERS && how != REPLAYED; layer++) {
            forward(e, layer);
            if (how == WAITING) CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
        }
        CHECK_OK(folio_memory_copy(e->l.ctx, out + step * OUT, e->x[LAYERS % 2], OUT * 2, &e->run));
    }
    CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
}

static void check_ways(uint32_t flags, int32_t seqs, bool writes)
{
    static uint16_t want[STEPS * OUT], got[STEPS * OUT];
    engine e;
    open_engine(&e, flags, seqs);
    e.writes = writes;
    run_steps(&e, WAITING, want);
    for (int turn = 0; turn < 20; turn++) {
        memset(got, 0x7f, sizeof got);
        run_steps(&e, turn % 2 ? REPLAYED : STREAMING, got);
        CHECK_MSG(memcmp(want, got, sizeof got) == 0, "turn %d", turn);
    }
    close_engine(&e);
}

/* Steps follow one another without a wait: updates, writes, decodes and copies see what those ahead of them wrote. */
TEST(launches, layers_that_read_each_other) { check_ways(0, SEQS, true); }

TEST(launches, batch_invariant_layers) { check_ways(FOLIO_PLAN_BATCH_INVARIANT, SEQS, true); }

/* Decodes store k and v themselves: nothing is between them, but each has its own layer's keys. */
TEST(launches, layers_that_store_in_decode)
{
    check_ways(FOLIO_PLAN_PRIVATE_SLOTS, SEQS, true);
    check_ways(FOLIO_PLAN_PRIVATE_SLOTS | FOLIO_PLAN_BATCH_INVARIANT, SEQS, true);
    check_ways(FOLIO_PLAN_PRIVATE_SLOTS, 1, true);
}

/* The same keys again: every other decode reads what the one before it stored. */
TEST(launches, one_layer_again_and_again)
{
    is_one_layer = true;
    check_ways(FOLIO_PLAN_PRIVATE_SLOTS, SEQS, true);
    check_ways(FOLIO_PLAN_PRIVATE_SLOTS, 1, true);
    is_one_layer = false;
}

/* Nothing is between the decodes of a captured step. */
TEST(launches, decodes_right_after_decodes) { check_ways(0, SEQS, false); }

/* One sequence is computed by clusters of blocks, which share no counters and no workspace. */
TEST(launches, one_sequence)
{
    check_ways(0, 1, true);
    check_ways(0, 1, false);
}
