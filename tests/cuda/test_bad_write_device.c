/*
 * test_bad_write_device.c: FOLIO_PLAN_NOTE_BAD on a device: kernels that note while they write, and the launch behind those that do
 * not; captured graphs; steps from arrays of the device.
 */
#include "cuda/device_rig.h"
#include "kit/layer.h"

#include <string.h>

enum {
    HEADS = 8,
    KV_HEADS = 2,
    BLOCK = 16,
    LENGTH = 700,
    MAX_SEQS = 3,
    LAYERS = 3,
    MAX_SIZE = 256
};
enum { SEQ_BLOCKS = (LENGTH + BLOCK - 1) / BLOCK, BLOCKS = MAX_SEQS * SEQ_BLOCKS, MAX_QUERY = 70 };
enum { MAX_ROWS = MAX_SEQS * MAX_QUERY };
enum { K = FOLIO_WRITTEN_K, V = FOLIO_WRITTEN_V, OUT = FOLIO_WRITTEN_OUT };
static const uint16_t bad_numbers[] = {0x7fc0, 0x7f80, 0xff80, 0xffff}; /* NaN, inf, -inf, NaN */

typedef struct {
    int32_t size, seqs, query_len;
    uint32_t flags; /* of the plan, besides */
    folio_layout layout;
    folio_dtype kv_dtype; /* 0: BF16 */
    bool append;
} variant;

typedef struct {
    variant v;
    kit_layer l;
    folio_run run;
    uint16_t *device[4], *host[3]; /* k, v, q, out */
} engine;

static int32_t heads_of(int what) { return what == OUT ? HEADS : KV_HEADS; }

static int64_t numbers_of(const engine *e, int what)
{
    return (int64_t)e->v.seqs * e->v.query_len * heads_of(what) * e->v.size;
}

static int32_t length_of(const engine *e, int32_t seq)
{
    return LENGTH - 13 * seq - (e->v.query_len > 1 ? 0 : 1);
}

static void add_seqs(engine *e)
{
    folio_batch_clear(e->l.batch);
    for (int32_t i = 0; i < e->v.seqs; i++) {
        int32_t table[SEQ_BLOCKS];
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) table[k] = k * e->v.seqs + i;
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = e->v.query_len, .seq_len = length_of(e, i),
                       .block_table = table, .num_blocks = SEQ_BLOCKS);
        CHECK_OK(folio_batch_add(e->l.batch, &seq));
    }
}

static void update(engine *e) { CHECK_OK(folio_plan_update(e->l.plan, e->l.batch, &e->run)); }

static void open_engine(engine *e, const variant *v)
{
    folio_context *ctx = device_context();
    memset(e, 0, sizeof *e);
    e->v = *v;
    e->run = (folio_run){.struct_size = sizeof e->run, .stream = device_stream(ctx)};
    CHECK_OK(KIT_LAYER_OPEN(
        ctx, &e->l, .num_heads = HEADS, .num_kv_heads = KV_HEADS, .k_head_size = v->size,
        .dtype = FOLIO_BF16, .kv_dtype = v->kv_dtype, .num_blocks = BLOCKS, .num_layers = LAYERS,
        .block_size = BLOCK, .layout = v->layout, .max_seqs = v->seqs,
        .max_query_tokens = v->seqs * v->query_len, .max_seq_len = LENGTH,
        .max_query_len = v->query_len, .flags = FOLIO_PLAN_NOTE_BAD | v->flags));
    for (int32_t layer = 0; layer < LAYERS; layer++)
        device_write_slots(ctx, e->l.cache, layer, 0, BLOCKS * BLOCK, KV_HEADS * v->size, 1);
    for (int what = K; what <= OUT; what++) {
        e->host[what] = device_numbers(numbers_of(e, what), 5 + (uint32_t)what);
        e->device[what] =
            device_upload(ctx, e->host[what], (size_t)numbers_of(e, what) * sizeof(uint16_t));
    }
    e->device[3] = device_make(ctx, (size_t)numbers_of(e, OUT) * sizeof(uint16_t));
    add_seqs(e);
    update(e);
}

static void close_engine(engine *e)
{
    for (int what = K; what <= OUT; what++) free(e->host[what]);
    kit_layer_close(&e->l);
    device_close(e->l.ctx);
}

static void forward(engine *e, int32_t layer)
{
    int64_t rows = (int64_t)e->v.seqs * e->v.query_len;
    folio_tensors t = FOLIO_WITH(
        folio_tensors, .q = {e->device[OUT], FOLIO_BF16, rows, 0, 0},
        .k = {e->device[K], FOLIO_BF16, rows, 0, 0}, .v = {e->device[V], FOLIO_BF16, rows, 0, 0},
        .out = {e->device[3], FOLIO_BF16, rows, 0, 0}, .flags = e->v.append ? FOLIO_KV_APPEND : 0);
    CHECK_OK(folio_attention_forward(e->l.plan, 0, FOLIO_ATTENTION_DECODER, e->l.cache, layer, &t,
                                     &e->run));
}

/* One number of k, v or q (for out); bad: which of the bad ones, -1: what it was. */
static void put(engine *e, int what, int64_t row, int32_t head, int32_t d, int bad)
{
    int64_t at = (row * heads_of(what) + head) * e->v.size + d;
    uint16_t x = bad < 0 ? e->host[what][at] : bad_numbers[bad];
    CHECK_OK(folio_memory_copy(e->l.ctx, e->device[what] + at, &x, sizeof x, &e->run));
    CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
}

static folio_plan_bad_write ask(engine *e)
{
    folio_plan_bad_write bad = {.struct_size = sizeof bad};
    CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
    CHECK_OK(folio_plan_get_bad_write(e->l.plan, &bad));
    return bad;
}

static void check_found(engine *e, int line, int32_t layer, int what, int64_t row, int32_t head,
                        int64_t step)
{
    folio_plan_bad_write bad = ask(e);
    int32_t seq = (int32_t)(row / e->v.query_len);
    int64_t position = length_of(e, seq) - e->v.query_len + row % e->v.query_len;
    CHECK_MSG(bad.found == 1 && bad.layer == layer && (int)bad.what == what && bad.seq == seq &&
                  bad.position == position && bad.head == head && bad.step == step &&
                  bad.attention == 0 && bad.type == FOLIO_ATTENTION_DECODER,
              "line %d, size %d, %d seqs of %d, flags %u: found %d, step %lld, layer %d, %d of seq "
              "%lld at %lld, head %d; not step %lld, layer %d, %d of seq %d at %lld, head %d",
              line, e->v.size, e->v.seqs, e->v.query_len, e->v.flags, bad.found,
              (long long)bad.step, bad.layer, (int)bad.what, (long long)bad.seq,
              (long long)bad.position, bad.head, (long long)step, layer, what, seq,
              (long long)position, head);
}
#define FOUND(e, ...) check_found(e, __LINE__, __VA_ARGS__)
#define NONE(e) CHECK_INT(ask(e).found, 0)

/* Each of k, v and out, in the first and the last row and head, and in the first and last dim. */
static void check_places(const variant *v)
{
    engine e;
    int64_t step = 1;
    open_engine(&e, v);
    forward(&e, 1);
    NONE(&e);
    for (int what = K; what <= OUT; what++)
        for (int i = 0; i < 4; i++) {
            int64_t rows = (int64_t)v->seqs * v->query_len, row = i % 2 ? rows - 1 : rows / 2;
            int32_t head = i / 2 ? heads_of(what) - 1 : 0, d = (v->size - 1) * (i & 1);
            put(&e, what, row, head, d, what == OUT ? i / 2 * 3 : i); /* NaN in q is NaN in out */
            forward(&e, 1);
            FOUND(&e, 1, what, row, head, step++);
            put(&e, what, row, head, d, -1);
            /* K and V of this step's rows are bad in the cache: stored again */
            update(&e);
            forward(&e, 1);
            NONE(&e);
        }
    close_engine(&e);
}

/* Decodes that note, with a launch that stores k and v, and with none; clusters; others. */
TEST(bad_write, decodes)
{
    static const int32_t sizes[] = {64, 128, 256, 96};
    for (int i = 0; i < 4; i++)
        for (int32_t seqs = 1; seqs <= MAX_SEQS; seqs += 2)
            for (int flags = 0; flags < 4; flags++)
                check_places(&(variant){
                    .size = sizes[i],
                    .seqs = seqs,
                    .query_len = 1,
                    .flags = (flags & 1 ? FOLIO_PLAN_PRIVATE_SLOTS : 0) |
                             (flags & 2 ? FOLIO_PLAN_GRAPH | FOLIO_PLAN_BATCH_INVARIANT : 0)});
}

TEST(bad_write, other_caches_and_keys_as_given)
{
    check_places(&(variant){.size = 128, .seqs = 3, .query_len = 1, .layout = FOLIO_LAYOUT_NHD});
    check_places(&(variant){.size = 128, .seqs = 2, .query_len = 1, .kv_dtype = FOLIO_FP8_E4M3});
    check_places(&(variant){.size = 128, .seqs = 2, .query_len = 1, .kv_dtype = FOLIO_INT8});
    check_places(&(variant){.size = 128, .seqs = 2, .query_len = 1, .kv_dtype = FOLIO_F32});
    check_places(&(variant){.size = 64, .seqs = 2, .query_len = 3, .append = true});
}

TEST(bad_write, prompts_and_several_rows)
{
    static const int32_t lens[] = {2, 4, 5, MAX_QUERY};
    for (int i = 0; i < 4; i++)
        for (int32_t size = 64; size <= 256; size *= 2)
            check_places(&(variant){.size = size, .seqs = 2, .query_len = lens[i]});
}

/* Of many bad ones the first, however blocks are scheduled. */
TEST(bad_write, the_first_of_many)
{
    for (int round = 0; round < 8; round++) {
        engine e;
        int what = round % 4 == 3 ? OUT : round % 4;
        open_engine(&e, &(variant){.size = 128,
                                   .seqs = MAX_SEQS,
                                   .query_len = round < 4 ? 1 : MAX_QUERY,
                                   .flags = round % 2 ? FOLIO_PLAN_PRIVATE_SLOTS : 0});
        int64_t rows = (int64_t)e.v.seqs * e.v.query_len;
        for (int w = what; w <= OUT; w++)
            for (int64_t row = 1; row < rows; row++)
                for (int32_t head = w == what && row == 1; head < heads_of(w); head++)
                    e.host[w][(row * heads_of(w) + head) * e.v.size + 3] = bad_numbers[row % 4];
        for (int w = K; w <= OUT; w++)
            CHECK_OK(folio_memory_copy(e.l.ctx, e.device[w], e.host[w],
                                       (size_t)numbers_of(&e, w) * 2, &e.run));
        for (int32_t layer = LAYERS; layer-- > 0;) forward(&e, layer);
        FOUND(&e, 0, what, 1, 1, 1);
        close_engine(&e);
    }
}

/* Forwards in a graph, updates between its replays: kept until it was asked for, found with its step. */
TEST(bad_write, in_a_graph)
{
    for (int private_slots = 0; private_slots < 2; private_slots++) {
        engine e;
        open_engine(&e, &(variant){.size = 128,
                                   .seqs = MAX_SEQS,
                                   .query_len = 1,
                                   .flags = FOLIO_PLAN_GRAPH |
                                            (private_slots ? FOLIO_PLAN_PRIVATE_SLOTS : 0)});
        device_capture(e.run.stream);
        for (int32_t layer = 0; layer < LAYERS; layer++) forward(&e, layer);
        cudaGraphExec_t replay = device_captured(e.l.ctx, e.run.stream);
        for (int step = 1; step <= 6; step++) {
            if (step > 1) update(&e);
            if (step == 3) put(&e, V, 2, 1, 7, 0);
            if (step == 4) put(&e, K, 0, 0, 0, 1); /* later: noted no more */
            CUDA_OK(cudaGraphLaunch(replay, e.run.stream));
        }
        FOUND(&e, 0, V, 2, 1, 3);
        put(&e, V, 2, 1, 7, -1);
        put(&e, K, 0, 0, 0, -1);
        update(&e);
        CUDA_OK(cudaGraphLaunch(replay, e.run.stream));
        NONE(&e);
        put(&e, OUT, 1, 7, 100, 3);
        update(&e);
        CUDA_OK(cudaGraphLaunch(replay, e.run.stream));
        FOUND(&e, 0, OUT, 1, 7, 8);
        close_engine(&e);
    }
}

/* The update is in the graph too: each replay is a step. */
TEST(bad_write, steps_from_arrays_of_the_device)
{
    engine e;
    int32_t lens[MAX_SEQS], tables[MAX_SEQS][SEQ_BLOCKS];
    open_engine(&e, &(variant){.size = 128,
                               .seqs = MAX_SEQS,
                               .query_len = 1,
                               .flags = FOLIO_PLAN_GRAPH | FOLIO_PLAN_PRIVATE_SLOTS});
    for (int32_t i = 0; i < MAX_SEQS; i++) {
        lens[i] = length_of(&e, i);
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) tables[i][k] = k * MAX_SEQS + i;
    }
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = MAX_SEQS, .on_device = 1,
                                 .seq_lens = device_upload(e.l.ctx, lens, sizeof lens));
    step.table = (folio_table){.kind = FOLIO_TABLE_ROWS,
                               .indices = device_upload(e.l.ctx, tables, sizeof tables),
                               .row_stride = SEQ_BLOCKS};
    device_capture(e.run.stream);
    CHECK_OK(folio_plan_update_step(e.l.plan, &step, &e.run));
    for (int32_t layer = 0; layer < LAYERS; layer++) forward(&e, layer);
    cudaGraphExec_t replay = device_captured(e.l.ctx, e.run.stream);
    CUDA_OK(cudaGraphLaunch(replay, e.run.stream)); /* step 2: open_engine made one */
    NONE(&e);
    put(&e, K, 1, 1, 127, 3);
    for (int i = 0; i < 3; i++) CUDA_OK(cudaGraphLaunch(replay, e.run.stream));
    FOUND(&e, 0, K, 1, 1, 3);
    put(&e, K, 1, 1, 127, -1);
    CUDA_OK(cudaGraphLaunch(replay, e.run.stream));
    NONE(&e);
    close_engine(&e);
}

TEST(bad_write, needs_limits)
{
    folio_context *ctx = device_context();
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    CHECK_OK(folio_attention_create(
        ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = 64, .dtype = FOLIO_BF16),
        &attention));
    CHECK_REFUSED(folio_plan_create(ctx,
                                    &FOLIO_WITH(folio_plan_desc, .attentions = &attention,
                                                .num_attentions = 1, .flags = FOLIO_PLAN_NOTE_BAD),
                                    &plan),
                  FOLIO_ERR_ARGUMENT, "needs max_seqs");
    folio_attention_destroy(attention);
    device_close(ctx);
}
