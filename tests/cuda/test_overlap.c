/* test_overlap.c: kernels that begin before those ahead of them have ended: each layer reads what the one before it wrote. */
#include "test.h"

#include <cuda_runtime_api.h>
#include <folio/folio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 16, KV_HEADS = 4, SIZE = 128, BLOCK = 16, LENGTH = 2000, SEQS = 3, LAYERS = 6 };
enum {
    STEPS = 5,
    SEQ_BLOCKS = LENGTH / BLOCK,
    BLOCKS = SEQS * SEQ_BLOCKS,
    TOKENS = BLOCKS * BLOCK
};
enum { ROW = HEADS * SIZE, KV_NUMBERS = TOKENS * KV_HEADS * SIZE, OUT = SEQS * ROW };

#define CUDA_OK(call) CHECK_MSG((call) == cudaSuccess, "%s", #call)

typedef struct {
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
    void *k, *v; /* of the cache at the start */
    void *x
        [2]; /* a layer's q, and its out, which the next one has as q, and parts of it as k and v */
    uint16_t *q; /* of the first layer */
    folio_run run;
    bool writes; /* layers have new k and v */
} engine;

static uint16_t *numbers(int64_t count, uint32_t seed)
{
    uint16_t *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)(0x3e00u | (seed >> 16 & 0x81ffu)); /* bf16, 0.125 to 0.5, both signs */
    }
    return x;
}

static void *upload(folio_context *ctx, int64_t count, uint32_t seed)
{
    uint16_t *x = numbers(count, seed);
    void *to = NULL;
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, (size_t)count * 2, &to));
    CHECK_OK(folio_memory_copy(ctx, to, x, (size_t)count * 2, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    free(x);
    return to;
}

static void open_engine(engine *e, uint32_t flags, cudaStream_t stream)
{
    memset(e, 0, sizeof *e);
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cuda"};
    CHECK_OK(folio_context_create(&desc, &e->ctx));
    e->run = (folio_run){.struct_size = sizeof e->run, .stream = stream};
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                   .k_head_size = SIZE, .dtype = FOLIO_BF16);
    folio_kv_cache_desc c = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS, .block_size = BLOCK,
        .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_BF16);
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = BLOCK};
    CHECK_OK(folio_attention_create(e->ctx, &a, &e->attention));
    CHECK_OK(folio_kv_cache_create(e->ctx, &c, &e->cache));
    CHECK_OK(folio_batch_create(e->ctx, &b, &e->batch));
    folio_attention *list[] = {e->attention};
    folio_plan_desc p =
        FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 1, .block_size = BLOCK,
                   .num_blocks = BLOCKS, .max_seqs = SEQS, .max_query_tokens = SEQS,
                   .max_seq_len = LENGTH, .max_query_len = 1, .flags = FOLIO_PLAN_GRAPH | flags);
    CHECK_OK(folio_plan_create(e->ctx, &p, &e->plan));
    e->k = upload(e->ctx, KV_NUMBERS, 1);
    e->v = upload(e->ctx, KV_NUMBERS, 2);
    for (int i = 0; i < 2; i++) e->x[i] = upload(e->ctx, OUT, 3);
    e->q = numbers(OUT, 3);
}

static void close_engine(engine *e)
{
    folio_memory_destroy(e->ctx, FOLIO_MEMORY_DEVICE, e->k, (size_t)KV_NUMBERS * 2);
    folio_memory_destroy(e->ctx, FOLIO_MEMORY_DEVICE, e->v, (size_t)KV_NUMBERS * 2);
    for (int i = 0; i < 2; i++) folio_memory_destroy(e->ctx, FOLIO_MEMORY_DEVICE, e->x[i], OUT * 2);
    folio_plan_destroy(e->plan);
    folio_batch_destroy(e->batch);
    folio_kv_cache_destroy(e->cache);
    folio_attention_destroy(e->attention);
    folio_context_destroy(e->ctx);
    free(e->q);
}

static void fill_cache(engine *e)
{
    int64_t *slots = malloc(TOKENS * sizeof *slots);
    for (int64_t i = 0; i < TOKENS; i++) slots[i] = i;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {e->k, FOLIO_BF16, TOKENS, 0, 0},
                                      .v = {e->v, FOLIO_BF16, TOKENS, 0, 0}, .slots = slots);
    for (int32_t layer = 0; layer < LAYERS; layer++)
        CHECK_OK(folio_kv_cache_write(e->cache, layer, &write, &e->run));
    free(slots);
}

/* Sequences of lengths that a step changes much, so that its lists are others. */
static void update(engine *e, int step)
{
    folio_batch_clear(e->batch);
    for (int32_t i = 0; i < SEQS; i++) {
        int32_t table[SEQ_BLOCKS];
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) table[k] = k * SEQS + i;
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = 1,
                       .seq_len = 1 + (LENGTH - 1) * ((step * 5 + i * 3) % 7 + 1) / 7,
                       .block_table = table, .num_blocks = SEQ_BLOCKS);
        CHECK_OK(folio_batch_add(e->batch, &seq));
    }
    CHECK_OK(folio_plan_update(e->plan, e->batch, &e->run));
}

static void forward(engine *e, int32_t layer)
{
    uint16_t *from = e->x[layer % 2];
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {from, FOLIO_BF16, SEQS, 0, 0},
                                 .out = {e->x[1 - layer % 2], FOLIO_BF16, SEQS, 0, 0});
    if (e->writes) {
        t.k = (folio_tensor){from, FOLIO_BF16, SEQS, ROW, SIZE};
        t.v = (folio_tensor){from + KV_HEADS * SIZE, FOLIO_BF16, SEQS, ROW, SIZE};
    }
    CHECK_OK(
        folio_attention_forward(e->plan, 0, FOLIO_ATTENTION_DECODER, e->cache, layer, &t, &e->run));
}

typedef enum { WAITING, STREAMING, REPLAYED } way;

/* All steps; out: what the last layer of each gave. */
static void run_steps(engine *e, way how, uint16_t *out)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay = NULL;
    fill_cache(e);
    if (how == REPLAYED) {
        update(e, 0);
        CUDA_OK(cudaStreamBeginCapture(e->run.stream, cudaStreamCaptureModeThreadLocal));
        for (int32_t layer = 0; layer < LAYERS; layer++) forward(e, layer);
        CUDA_OK(cudaStreamEndCapture(e->run.stream, &graph));
        CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    }
    for (int step = 0; step < STEPS; step++) {
        CHECK_OK(folio_memory_copy(e->ctx, e->x[0], e->q, OUT * 2, &e->run));
        update(e, step);
        if (how == WAITING) CHECK_OK(folio_run_wait(e->ctx, &e->run));
        if (how == REPLAYED) CUDA_OK(cudaGraphLaunch(replay, e->run.stream));
        for (int32_t layer = 0; layer < LAYERS && how != REPLAYED; layer++) {
            forward(e, layer);
            if (how == WAITING) CHECK_OK(folio_run_wait(e->ctx, &e->run));
        }
        CHECK_OK(folio_memory_copy(e->ctx, out + step * OUT, e->x[LAYERS % 2], OUT * 2, &e->run));
    }
    CHECK_OK(folio_run_wait(e->ctx, &e->run));
    if (how != REPLAYED) return;
    CUDA_OK(cudaGraphExecDestroy(replay));
    CUDA_OK(cudaGraphDestroy(graph));
}

static void check_ways(uint32_t flags, bool writes)
{
    static uint16_t want[STEPS * OUT], got[STEPS * OUT];
    engine e;
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    open_engine(&e, flags, stream);
    e.writes = writes;
    run_steps(&e, WAITING, want);
    for (int turn = 0; turn < 20; turn++) {
        memset(got, 0x7f, sizeof got);
        run_steps(&e, turn % 2 ? REPLAYED : STREAMING, got);
        CHECK_MSG(memcmp(want, got, sizeof got) == 0, "turn %d", turn);
    }
    close_engine(&e);
    CUDA_OK(cudaStreamDestroy(stream));
}

/* Steps follow one another without a wait: updates, writes, decodes and copies see what those ahead of them wrote. */
TEST(overlap, layers_that_read_each_other) { check_ways(0, true); }

TEST(overlap, batch_invariant_layers) { check_ways(FOLIO_PLAN_BATCH_INVARIANT, true); }

/* Nothing is between the decodes of a captured step. */
TEST(overlap, decodes_right_after_decodes) { check_ways(0, false); }
