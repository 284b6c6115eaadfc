/*
 * test_device.c: what only a device has: memory of its own, streams, captured graphs, failures that come late. What
 * attention computes is `folio check --backend cuda`'s to judge.
 */
#include "cuda/device_rig.h"
#include "kit/layer.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 64, MAX_SEQS = 6, MAX_ROWS = 48 };
enum { ROW = HEADS * SIZE, KV_ROW = KV_HEADS * SIZE };

static folio_kv_cache *open_cache(folio_context *ctx, folio_layout layout)
{
    folio_kv_cache_desc desc = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 2, .block_size = BLOCK,
        .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_BF16, .layout = layout);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &desc, &cache));
    return cache;
}

/* Blocks of a layer as rows, on the host. */
static void read_blocks(folio_context *ctx, folio_kv_cache *cache, int32_t layer,
                        const int64_t *blocks, int64_t n, uint16_t *k, uint16_t *v)
{
    size_t bytes = (size_t)n * BLOCK * KV_ROW * sizeof *k;
    void *on_device[2] = {device_make(ctx, bytes), device_make(ctx, bytes)};
    folio_kv_rows rows = FOLIO_WITH(folio_kv_rows, .k = on_device[0], .v = on_device[1],
                                    .blocks = blocks, .num_blocks = n);
    CHECK_OK(folio_kv_cache_unpack(cache, layer, &rows, NULL));
    CHECK_OK(folio_memory_copy(ctx, k, on_device[0], bytes, NULL));
    CHECK_OK(folio_memory_copy(ctx, v, on_device[1], bytes, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
}

static void write_blocks(folio_context *ctx, folio_kv_cache *cache, int32_t layer, int64_t first,
                         int64_t n, uint32_t seed)
{
    device_write_slots(ctx, cache, layer, first * BLOCK, n * BLOCK, KV_ROW, seed);
}

TEST(device, memory_of_both_kinds)
{
    folio_context *ctx = device_context();
    for (int kind = FOLIO_MEMORY_DEVICE; kind <= FOLIO_MEMORY_HOST; kind++) {
        void *p = NULL;
        unsigned char seen[300];
        CHECK_OK(folio_memory_create(ctx, (folio_memory_kind)kind, sizeof seen, &p));
        CHECK_OK(folio_memory_fill(ctx, p, 0x5a, sizeof seen, NULL));
        CHECK_OK(folio_memory_copy(ctx, seen, p, sizeof seen, NULL));
        CHECK_OK(folio_run_wait(ctx, NULL));
        for (size_t i = 0; i < sizeof seen; i++) CHECK(seen[i] == 0x5a);
        folio_memory_destroy(ctx, (folio_memory_kind)kind, p, sizeof seen);
    }
    folio_context_destroy(ctx);
}

TEST(device, no_memory_leaves_everything_usable)
{
    folio_context *ctx = device_context();
    void *p = NULL;
    CHECK_REFUSED(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, (size_t)1 << 50, &p),
                  FOLIO_ERR_MEMORY, "cannot allocate");
    CHECK(p == NULL);
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cuda", .device = 999};
    folio_context *none = NULL;
    CHECK_REFUSED(folio_context_create(&desc, &none), FOLIO_ERR_ARGUMENT,
                  "device 999 does not exist");
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, 64, &p));
    CHECK_OK(folio_memory_fill(ctx, p, 1, 64, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, p, 64);
    folio_context_destroy(ctx);
}

/* Out to host memory that the device reaches, and in again elsewhere. */
TEST(device, blocks_go_to_the_host_and_come_back)
{
    static uint16_t want[2][2 * BLOCK * KV_ROW], got[2][2 * BLOCK * KV_ROW];
    folio_context *ctx = device_context();
    folio_kv_cache *cache = open_cache(ctx, FOLIO_LAYOUT_NATIVE), *host = NULL;
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 8, .num_layers = 2, .block_size = BLOCK,
                   .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_BF16,
                   .layout = FOLIO_LAYOUT_HND);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    CHECK_OK(folio_kv_cache_get_shape("cuda", &desc, &shape));
    void *layers[2];
    size_t bytes = (size_t)shape.layer_bytes;
    for (int i = 0; i < 2; i++)
        CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_HOST, bytes, &layers[i]));
    folio_kv_memory memory = {.struct_size = sizeof memory, .k = layers, .k_bytes = bytes};
    CHECK_OK(folio_kv_cache_wrap(ctx, &desc, &memory, &host));
    const folio_block_pair out[] = {{11, 5}, {12, 2}}, in[] = {{5, 30}, {2, 31}};
    const int64_t from[] = {11, 12}, to[] = {30, 31};
    for (int32_t layer = 0; layer < 2; layer++)
        write_blocks(ctx, cache, layer, 11, 2, 7u + (uint32_t)layer);
    CHECK_OK(folio_kv_cache_copy_blocks(cache, host, out, 2, NULL));
    CHECK_OK(folio_kv_cache_copy_blocks(host, cache, in, 2, NULL));
    for (int32_t layer = 0; layer < 2; layer++) {
        read_blocks(ctx, cache, layer, from, 2, want[0], want[1]);
        read_blocks(ctx, cache, layer, to, 2, got[0], got[1]);
        CHECK(memcmp(want, got, sizeof want) == 0);
    }
    folio_kv_cache_destroy(host);
    folio_kv_cache_destroy(cache);
    for (int i = 0; i < 2; i++) folio_memory_destroy(ctx, FOLIO_MEMORY_HOST, layers[i], bytes);
    device_close(ctx);
}

/* A kernel that reads such memory fails, and all that comes after it. Devices that can access all memory copy it. */
TEST(device, host_memory_out_of_reach_is_rejected)
{
    folio_context *ctx = device_context(), *cpu = NULL;
    folio_context_desc on_cpu = FOLIO_WITH(folio_context_desc, .backend = "cpu");
    CHECK_OK(folio_context_create(&on_cpu, &cpu));
    folio_kv_cache *cache = open_cache(ctx, FOLIO_LAYOUT_NATIVE);
    folio_kv_cache *host = open_cache(cpu, FOLIO_LAYOUT_NHD);
    const folio_block_pair pair = {11, 5};
    int device = 0, reaches_all = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&reaches_all, cudaDevAttrPageableMemoryAccess, device);
    folio_status want = reaches_all ? FOLIO_OK : FOLIO_ERR_UNSUPPORTED;
    CHECK_INT(folio_kv_cache_copy_blocks(cache, host, &pair, 1, NULL), want);
    CHECK_INT(folio_kv_cache_copy_blocks(host, cache, &pair, 1, NULL), want);
    CHECK(reaches_all || strstr(folio_last_error(), "layer 0 of K and V lies in host memory"));
    CHECK_OK(folio_run_wait(ctx, NULL));
    folio_kv_cache_destroy(host);
    folio_kv_cache_destroy(cache);
    folio_context_destroy(cpu);
    folio_context_destroy(ctx);
}

/* ---- Steps: a batch drawn from a seed, run with or without a graph */

typedef struct {
    kit_layer l;
    void *q, *k, *v, *out;
    float *lse, *slopes, *sinks; /* slopes and sinks: NULL, or in device memory */
    folio_rotary *rotary;
    int64_t *positions; /* NULL, or in device memory */
    folio_run run;
} engine;

static int64_t longest_query; /* of the engines opened next; 0: any */
static bool rotates;          /* they rotate q and k */

static void open_engine(engine *e, uint32_t flags, bool has_stream)
{
    folio_context *ctx = device_context();
    memset(e, 0, sizeof *e);
    e->run =
        (folio_run){.struct_size = sizeof e->run, .stream = has_stream ? device_stream(ctx) : NULL};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &e->l, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                            .k_head_size = SIZE, .dtype = FOLIO_BF16, .num_blocks = BLOCKS,
                            .num_layers = 2, .block_size = BLOCK, .max_seqs = MAX_SEQS,
                            .max_query_tokens = MAX_ROWS, .max_seq_len = 10 * BLOCK, .flags = flags,
                            .max_query_len = longest_query));
    for (int32_t layer = 0; layer < 2; layer++) write_blocks(ctx, e->l.cache, layer, 0, BLOCKS, 5);
    e->q = device_upload_numbers(ctx, MAX_ROWS * ROW, 31);
    e->k = device_upload_numbers(ctx, MAX_ROWS * KV_ROW, 32);
    e->v = device_upload_numbers(ctx, MAX_ROWS * KV_ROW, 33);
    e->out = device_make(ctx, MAX_ROWS * ROW * 2);
    e->lse = device_make(ctx, MAX_ROWS * HEADS * 4);
    folio_rotary_desc rotations =
        FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE, .num_positions = 10 * BLOCK);
    if (rotates) CHECK_OK(folio_rotary_create(ctx, &rotations, &e->rotary));
}

static void close_engine(engine *e)
{
    folio_rotary_destroy(e->rotary);
    kit_layer_close(&e->l);
    device_close(e->l.ctx);
}

/* Sequences, lengths and tables of step `number`; no two share a block that is written. */
static int64_t make_step(engine *e, int number)
{
    folio_batch_clear(e->l.batch);
    int32_t next = (number * 7) % BLOCKS;
    int64_t rows = 0;
    for (int i = 0; i < MAX_SEQS - number % 3; i++) {
        int32_t table[10];
        int32_t query = 1 + (i + number) % 3 * 2, len = query + (number * 13 + i * 29) % 90;
        int32_t blocks = (len + BLOCK - 1) / BLOCK;
        for (int32_t b = 0; b < blocks; b++) table[b] = (next++ * 5) % BLOCKS;
        folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = query, .seq_len = len,
                                         .block_table = table, .num_blocks = blocks);
        CHECK_OK(folio_batch_add(e->l.batch, &seq));
        rows += query;
    }
    CHECK_OK(folio_plan_update(e->l.plan, e->l.batch, &e->run));
    return rows;
}

static void forward(engine *e, int64_t rows)
{
    folio_tensors t = FOLIO_WITH(
        folio_tensors, .q = {e->q, FOLIO_BF16, rows, 0, 0}, .k = {e->k, FOLIO_BF16, rows, 0, 0},
        .v = {e->v, FOLIO_BF16, rows, 0, 0}, .out = {e->out, FOLIO_BF16, rows, 0, 0}, .lse = e->lse,
        .slopes = e->slopes, .sinks = e->sinks, .rotary = e->rotary, .positions = e->positions);
    for (int32_t layer = 0; layer < 2; layer++)
        CHECK_OK(folio_attention_forward(e->l.plan, 0, FOLIO_ATTENTION_DECODER, e->l.cache, layer,
                                         &t, &e->run));
}

static void read_out(engine *e, uint16_t *out, float *lse)
{
    CHECK_OK(folio_memory_copy(e->l.ctx, out, e->out, MAX_ROWS * ROW * 2, &e->run));
    CHECK_OK(folio_memory_copy(e->l.ctx, lse, e->lse, MAX_ROWS * HEADS * 4, &e->run));
    CHECK_OK(folio_run_wait(e->l.ctx, &e->run));
}

/* ---- Steps in graphs, and steps whose arrays lie on the device */

typedef struct {
    int32_t starts[MAX_SEQS + 1], lens[MAX_SEQS], tables[MAX_SEQS][10];
} arrays;

/* The step of make_step as arrays; sequences it does not have are padding of no rows. */
static int64_t make_arrays(int number, arrays *a)
{
    memset(a, 0, sizeof *a);
    int32_t next = (number * 7) % BLOCKS, row = 0;
    for (int i = 0; i < MAX_SEQS; i++) {
        bool is_there = i < MAX_SEQS - number % 3;
        int32_t query = is_there ? 1 + (i + number) % 3 * 2 : 0;
        a->lens[i] = is_there ? query + (number * 13 + i * 29) % 90 : 0;
        for (int32_t b = 0; b < (a->lens[i] + BLOCK - 1) / BLOCK; b++)
            a->tables[i][b] = (next++ * 5) % BLOCKS;
        a->starts[i + 1] = row += query;
    }
    return row;
}

static folio_step step_of(const arrays *on_device, int64_t rows)
{
    return FOLIO_WITH(
        folio_step, .num_seqs = MAX_SEQS, .num_query_tokens = rows, .on_device = 1,
        .query_start = on_device->starts, .seq_lens = on_device->lens,
        .table = {.kind = FOLIO_TABLE_ROWS, .indices = on_device->tables[0], .row_stride = 10});
}

/*
 * One graph, replayed with other lengths, tables and fewer sequences, gives what calls one by one give. It has the
 * forwards of a step, which follow the plan; or their update too, where only the arrays change between replays.
 */
static void replay_steps(bool holds_update)
{
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float want_lse[MAX_ROWS * HEADS], got_lse[MAX_ROWS * HEADS];
    engine plain, captured;
    arrays step;
    folio_plan_findings found = {.struct_size = sizeof found};
    open_engine(&plain, 0, false);
    open_engine(&captured, FOLIO_PLAN_GRAPH, true);
    make_arrays(0, &step);
    arrays *on_device = device_upload(captured.l.ctx, &step, sizeof step);
    folio_step given = step_of(on_device, 0);
    if (!holds_update) make_step(&captured, 0);
    device_capture(captured.run.stream);
    if (holds_update) CHECK_OK(folio_plan_update_step(captured.l.plan, &given, &captured.run));
    forward(&captured, MAX_ROWS);
    cudaGraphExec_t replay = device_captured(captured.l.ctx, captured.run.stream);
    for (int number = 0; number < 12; number++) {
        int64_t rows = make_step(&plain, number);
        CHECK(make_arrays(number, &step) == rows);
        if (holds_update)
            CHECK_OK(
                folio_memory_copy(captured.l.ctx, on_device, &step, sizeof step, &captured.run));
        else make_step(&captured, number);
        forward(&plain, rows);
        CUDA_OK(cudaGraphLaunch(replay, captured.run.stream));
        read_out(&plain, want, want_lse);
        read_out(&captured, got, got_lse);
        CHECK(memcmp(want, got, (size_t)rows * ROW * 2) == 0);
        CHECK(memcmp(want_lse, got_lse, (size_t)rows * HEADS * 4) == 0);
        for (int64_t i = rows * ROW; i < MAX_ROWS * ROW; i++) CHECK(got[i] == 0);
        if (!holds_update) continue;
        CHECK_OK(folio_plan_get_findings(captured.l.plan, &found));
        CHECK_INT(found.num_checked, number + 1);
        CHECK_INT(found.bad_seq, -1);
    }
    close_engine(&plain);
    close_engine(&captured);
}

TEST(device, a_captured_graph_follows_the_plan) { replay_steps(false); }

TEST(device, a_graph_holds_the_update_from_device_arrays) { replay_steps(true); }

TEST(device, captured_graphs_rotate_by_the_steps_positions)
{
    rotates = true;
    replay_steps(false);
    replay_steps(true);
    rotates = false;
}

static void spoil_block(arrays *a) { a->tables[2][0] = BLOCKS; }
static void spoil_seen_hole(arrays *a) { a->tables[2][1] = -1; }
static void spoil_length(arrays *a) { a->lens[2] = 10 * BLOCK + 1; }
static void spoil_short(arrays *a) { a->lens[2] = 1; }
static void spoil_negative(arrays *a) { a->lens[2] = -3; }

/* A bad sequence is emptied, named, and the others are computed. */
TEST(device, a_bad_sequence_is_emptied)
{
    static const struct {
        void (*spoil)(arrays *a);
        const char *word;
    } cases[] = {{spoil_block, "block table"},
                 {spoil_seen_hole, "block table"},
                 {spoil_length, "seq_lens"},
                 {spoil_short, "seq_lens"},
                 {spoil_negative, "seq_lens"}};
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float lse[MAX_ROWS * HEADS];
    engine e;
    open_engine(&e, FOLIO_PLAN_BATCH_INVARIANT, false); /* else the others round otherwise */
    int64_t rows = make_step(&e, 0);
    forward(&e, rows);
    read_out(&e, want, lse);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        arrays step;
        folio_plan_findings found = {.struct_size = sizeof found};
        CHECK(make_arrays(0, &step) == rows);
        cases[c].spoil(&step);
        arrays *on_device = device_upload(e.l.ctx, &step, sizeof step);
        folio_step given = step_of(on_device, rows);
        CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0x7f, MAX_ROWS * ROW * 2, NULL));
        CHECK_OK(folio_plan_update_step(e.l.plan, &given, &e.run));
        forward(&e, rows);
        read_out(&e, got, lse);
        CHECK_REFUSED(folio_plan_get_findings(e.l.plan, &found), FOLIO_ERR_ARGUMENT, cases[c].word);
        CHECK_INT(found.bad_seq, 2);
        size_t first = (size_t)step.starts[2] * ROW, past = (size_t)step.starts[3] * ROW;
        CHECK(memcmp(want, got, first * 2) == 0);
        for (size_t i = first; i < past; i++) CHECK(got[i] == 0);
        for (size_t i = (size_t)step.starts[2] * HEADS; i < (size_t)step.starts[3] * HEADS; i++)
            CHECK(isinf(lse[i]) && lse[i] < 0);
        CHECK(memcmp(want + past, got + past, ((size_t)rows * ROW - past) * 2) == 0);
    }
    close_engine(&e);
}

/* One token each without query_start, in as many rows as the graph has: those past the sequences are padding. */
TEST(device, a_graph_of_decodes_has_its_limit_of_rows)
{
    static uint16_t got[MAX_ROWS * ROW];
    static float lse[MAX_ROWS * HEADS];
    engine e;
    arrays step;
    folio_plan_findings found = {.struct_size = sizeof found};
    open_engine(&e, FOLIO_PLAN_GRAPH, false);
    make_arrays(0, &step);
    arrays *on_device = device_upload(e.l.ctx, &step, sizeof step);
    folio_step given = step_of(on_device, MAX_ROWS);
    given.query_start = NULL;
    CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0x7f, MAX_ROWS * ROW * 2, NULL));
    CHECK_OK(folio_plan_update_step(e.l.plan, &given, &e.run));
    forward(&e, MAX_ROWS);
    read_out(&e, got, lse);
    CHECK_OK(folio_plan_get_findings(e.l.plan, &found));
    for (int64_t i = 0; i < MAX_SEQS * HEADS; i++) CHECK(isfinite(lse[i]));
    for (int64_t i = MAX_SEQS * HEADS; i < MAX_ROWS * HEADS; i++)
        CHECK(isinf(lse[i]) && lse[i] < 0);
    for (int64_t i = MAX_SEQS * ROW; i < MAX_ROWS * ROW; i++) CHECK(got[i] == 0);
    close_engine(&e);
}

static float of_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Its arrays lie in host memory, its tensors on the device, and it is done when it returns. */
TEST(device, one_call_is_what_a_plan_computes)
{
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float want_lse[MAX_ROWS * HEADS], got_lse[MAX_ROWS * HEADS];
    engine e;
    open_engine(&e, 0, true);
    for (int number = 0; number < 6; number++) {
        arrays step;
        int64_t rows = make_step(&e, number);
        CHECK(make_arrays(number, &step) == rows);
        forward(&e, rows);
        read_out(&e, want, want_lse);
        CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0x7f, MAX_ROWS * ROW * 2, &e.run));
        CHECK_OK(folio_memory_fill(e.l.ctx, e.lse, 0x7f, MAX_ROWS * HEADS * 4, &e.run));
        const folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS);
        folio_step s = step_of(&step, rows);
        s.on_device = 0;
        const folio_tensors t =
            FOLIO_WITH(folio_tensors, .q = {e.q, FOLIO_BF16, rows, 0, 0},
                       .k = {e.k, FOLIO_BF16, rows, 0, 0}, .v = {e.v, FOLIO_BF16, rows, 0, 0},
                       .out = {e.out, FOLIO_BF16, rows, 0, 0}, .lse = e.lse);
        CHECK_OK(folio_attend(e.l.ctx, &a, FOLIO_ATTENTION_DECODER, &s, e.l.cache, 1, &t, &e.run));
        CHECK(cudaStreamQuery(e.run.stream) == cudaSuccess);
        read_out(&e, got, got_lse);
        /* kernels are chosen by the plan's limits too: the last bit may differ */
        for (int64_t i = 0; i < rows * ROW; i++)
            CHECK(fabsf(of_bf16(got[i]) - of_bf16(want[i])) <= 0.004f);
        for (int64_t i = 0; i < rows * HEADS; i++) CHECK(fabsf(got_lse[i] - want_lse[i]) <= 1e-4f);
    }
    close_engine(&e);
}

/* An update that a capture refuses leaves the plan, and what kernels read of it, as they were. */
TEST(device, an_update_refused_in_a_capture_changes_nothing)
{
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float want_lse[MAX_ROWS * HEADS], got_lse[MAX_ROWS * HEADS];
    engine e;
    folio_batch *other = NULL;
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = BLOCK};
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 40,
                                     .block_table = (int32_t[]){1, 2, 3}, .num_blocks = 3);
    open_engine(&e, 0, true);
    CHECK_OK(folio_batch_create(e.l.ctx, &b, &other));
    CHECK_OK(folio_batch_add(other, &seq));
    int64_t rows = make_step(&e, 1);
    CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0x7f, MAX_ROWS * ROW * 2, &e.run));
    CHECK_OK(folio_memory_fill(e.l.ctx, e.lse, 0x7f, MAX_ROWS * HEADS * 4, &e.run));
    forward(&e, rows);
    read_out(&e, want, want_lse);
    device_capture(e.run.stream);
    CHECK_REFUSED(folio_plan_update(e.l.plan, other, &e.run), FOLIO_ERR_UNSUPPORTED, "captured");
    device_captured(e.l.ctx, e.run.stream);
    CHECK_OK(folio_memory_fill(e.l.ctx, e.out, 0x7f, MAX_ROWS * ROW * 2, &e.run));
    forward(&e, rows);
    read_out(&e, got, got_lse);
    CHECK(memcmp(want, got, sizeof want) == 0 && memcmp(want_lse, got_lse, sizeof want_lse) == 0);
    folio_batch_destroy(other);
    close_engine(&e);
}

/* ---- Launches and failures */

typedef struct {
    int64_t kernels, others; /* for each of two layers */
} launches;

/* What a graph of forwards holds, k and v given. has_workspace: the caller's, full of ones. */
static launches count_launches(int64_t max_query_len, int32_t query_len, bool has_workspace,
                               uint32_t flags)
{
    engine e;
    cudaGraph_t graph;
    cudaGraphNode_t nodes[32];
    size_t num_nodes = 32;
    launches n = {0, 0};
    longest_query = max_query_len;
    open_engine(&e, FOLIO_PLAN_GRAPH | flags, true);
    longest_query = 0;
    if (has_workspace) {
        CHECK_OK(folio_plan_get_workspace_size(e.l.plan, &e.run.workspace_size));
        e.run.workspace = device_upload_numbers(e.l.ctx, (int64_t)e.run.workspace_size / 2, 34);
    }
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = query_len, .seq_len = query_len,
                                     .block_table = (int32_t[]){1, 2, 3}, .num_blocks = 3);
    CHECK_OK(folio_batch_add(e.l.batch, &seq));
    CHECK_OK(folio_plan_update(e.l.plan, e.l.batch, &e.run));
    device_capture(e.run.stream);
    forward(&e, MAX_ROWS);
    CUDA_OK(cudaStreamEndCapture(e.run.stream, &graph));
    CUDA_OK(cudaGraphGetNodes(graph, nodes, &num_nodes));
    for (size_t i = 0; i < num_nodes; i++) {
        enum cudaGraphNodeType type;
        CUDA_OK(cudaGraphNodeGetType(nodes[i], &type));
        if (type == cudaGraphNodeTypeKernel) n.kernels++;
        else n.others++;
    }
    CUDA_OK(cudaGraphDestroy(graph));
    close_engine(&e);
    n.kernels /= 2;
    return n;
}

TEST(device, one_launch_for_each_family_and_the_write)
{
    for (int has_workspace = 0; has_workspace <= 1; has_workspace++) {
        launches decode = count_launches(1, 1, has_workspace, 0);
        launches both = count_launches(0, 30, has_workspace, FOLIO_PLAN_PRIVATE_SLOTS);
        launches alone = count_launches(1, 1, has_workspace, FOLIO_PLAN_PRIVATE_SLOTS);
        CHECK_INT(decode.kernels, 2);
        CHECK_INT(both.kernels, 3);
        CHECK_INT(alone.kernels, 1); /* decode stores k and v */
        CHECK_INT(decode.others + both.others + alone.others, 0);
    }
}

/* More kv heads than a grid has rows; a token that sees itself alone gets its own v. */
TEST(device, many_kv_heads)
{
    enum { MANY = 65536, FEW_DIMS = 8, NUMBERS = MANY * FEW_DIMS };
    kit_layer l = {0};
    CHECK_OK(KIT_LAYER_OPEN(device_context(), &l, .num_heads = MANY, .num_kv_heads = MANY,
                            .k_head_size = FEW_DIMS, .num_blocks = 1, .block_size = BLOCK,
                            .max_seq_len = 1));
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 1,
                                     .block_table = (int32_t[]){0}, .num_blocks = 1);
    CHECK_OK(folio_batch_add(l.batch, &seq));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    float *numbers = malloc(NUMBERS * sizeof *numbers), *got = malloc(NUMBERS * sizeof *got);
    for (int i = 0; i < NUMBERS; i++) numbers[i] = (float)(i % 1001 - 500) / 8;
    void *x = device_upload(l.ctx, numbers, NUMBERS * sizeof *numbers);
    void *out = device_make(l.ctx, NUMBERS * sizeof *got);
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {x, FOLIO_F32, 1, 0, 0}, .k = {x, FOLIO_F32, 1, 0, 0},
                   .v = {x, FOLIO_F32, 1, 0, 0}, .out = {out, FOLIO_F32, 1, 0, 0});
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
    CHECK_OK(folio_memory_copy(l.ctx, got, out, NUMBERS * sizeof *got, NULL));
    CHECK_OK(folio_run_wait(l.ctx, NULL));
    CHECK(memcmp(numbers, got, NUMBERS * sizeof *got) == 0);
    free(numbers);
    free(got);
    kit_layer_close(&l);
    device_close(l.ctx);
}

/* ---- Slopes and sinks that are not allowed */

/* Are the numbers of every other head what they were, and the bad head's NaN or zeros? */
static void check_heads(const uint16_t *want, const uint16_t *got, int64_t rows, int bad)
{
    for (int64_t i = 0; i < rows * ROW; i++) {
        bool is_bad = i % ROW / SIZE == bad;
        CHECK_MSG(is_bad ? got[i] == 0 || (got[i] & 0x7fff) > 0x7f80 : got[i] == want[i],
                  "row %lld, head %lld: %x, was %x", (long long)(i / ROW),
                  (long long)(i % ROW / SIZE), got[i], want[i]);
    }
}

TEST(device, a_bad_slope_or_sink_stays_in_its_head)
{
    static const float bad[] = {NAN, INFINITY};
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float lse[MAX_ROWS * HEADS];
    const float good[HEADS] = {0.5f, 0.25f, 0.125f, 1.0f};
    engine e;
    open_engine(&e, 0, false);
    e.slopes = device_upload(e.l.ctx, good, sizeof good);
    e.sinks = device_upload(e.l.ctx, good, sizeof good);
    for (int is_prompt = 0; is_prompt <= 1; is_prompt++) {
        int64_t rows = is_prompt ? 30 : make_step(&e, 1);
        folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = rows, .seq_len = rows,
                                         .block_table = (int32_t[]){1, 2}, .num_blocks = 2);
        if (is_prompt) {
            folio_batch_clear(e.l.batch);
            CHECK_OK(folio_batch_add(e.l.batch, &seq));
            CHECK_OK(folio_plan_update(e.l.plan, e.l.batch, &e.run));
        }
        forward(&e, rows);
        read_out(&e, want, lse);
        for (int i = 0; i < 4; i++) {
            float *array = i % 2 ? e.sinks : e.slopes, *at = array + 1;
            CHECK_OK(folio_memory_copy(e.l.ctx, at, &bad[i / 2], sizeof *at, &e.run));
            forward(&e, rows);
            read_out(&e, got, lse);
            check_heads(want, got, rows, 1);
            CHECK_OK(folio_memory_copy(e.l.ctx, at, &good[1], sizeof *at, &e.run));
            CHECK_OK(folio_run_wait(e.l.ctx, &e.run));
        }
    }
    close_engine(&e);
}

/* Rows of the sequence from the bad one on see its key. Positions that are given in device memory equal the batch's. */
TEST(device, a_bad_position_stays_in_its_sequence)
{
    enum { BAD = 13 };
    static const int64_t bad[] = {-1, 10 * BLOCK, INT64_MAX};
    static uint16_t want[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    static float lse[MAX_ROWS * HEADS];
    engine e;
    rotates = true;
    open_engine(&e, 0, false);
    rotates = false;
    int64_t rows = make_step(&e, 1), end = 0;
    forward(&e, rows);
    read_out(&e, want, lse);
    folio_batch_view view = {.struct_size = sizeof view};
    CHECK_OK(folio_batch_get_view(e.l.batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
    for (int64_t i = 0; end <= BAD; i++) end = view.query_start[i + 1];
    size_t bytes = (size_t)rows * sizeof *e.positions;
    e.positions = device_upload(e.l.ctx, view.positions, bytes);
    forward(&e, rows);
    read_out(&e, got, lse);
    CHECK(memcmp(want, got, (size_t)rows * ROW * 2) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(folio_memory_copy(e.l.ctx, e.positions + BAD, &bad[i], sizeof bad[i], &e.run));
        forward(&e, rows);
        read_out(&e, got, lse);
        for (int64_t k = 0; k < rows * ROW; k++) {
            bool is_bad = k / ROW >= BAD && k / ROW < end;
            CHECK_MSG(is_bad ? (got[k] & 0x7fff) > 0x7f80 : got[k] == want[k],
                      "row %lld: %x, was %x", (long long)(k / ROW), got[k], want[k]);
        }
    }
    close_engine(&e);
}

TEST(device, a_plan_too_large_leaves_everything_usable)
{
    engine e;
    open_engine(&e, 0, false);
    folio_attention *list[] = {e.l.attention};
    folio_plan_desc p = FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 1,
                                   .block_size = BLOCK, .num_blocks = BLOCKS, .max_seqs = 1 << 28,
                                   .max_query_tokens = 1 << 30, .max_seq_len = 1 << 20);
    folio_plan *plan = NULL;
    CHECK(folio_plan_create(e.l.ctx, &p, &plan) == FOLIO_ERR_MEMORY);
    CHECK(plan == NULL);
    int64_t rows = make_step(&e, 1);
    forward(&e, rows);
    CHECK_OK(folio_run_wait(e.l.ctx, &e.run));
    close_engine(&e);
}

/* A device is lost with such a failure, so a process of its own has it. */
TEST(device_failure, a_kernel_that_fails_is_named)
{
    if (getenv("FOLIO_TESTS_LOSE_DEVICE") == NULL) {
        CHECK(setenv("FOLIO_TESTS_LOSE_DEVICE", "1", 1) == 0);
        CHECK(system("/proc/$PPID/exe device_failure") == 0);
        CHECK(unsetenv("FOLIO_TESTS_LOSE_DEVICE") == 0);
        return;
    }
    engine e;
    open_engine(&e, 0, false);
    int64_t rows = make_step(&e, 1);
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {(void *)(uintptr_t)4096, FOLIO_BF16, rows, 0, 0},
                   .out = {e.out, FOLIO_BF16, rows, 0, 0}, .slopes = e.slopes, .sinks = e.sinks);
    /* prefill fails, and decode's launch may find that before the wait does */
    (void)folio_attention_forward(e.l.plan, 0, FOLIO_ATTENTION_DECODER, e.l.cache, 0, &t, &e.run);
    CHECK_REFUSED(folio_run_wait(e.l.ctx, &e.run), FOLIO_ERR_DEVICE, "kernel prefill");
    close_engine(&e);
}

typedef struct {
    uint16_t out[4][MAX_ROWS * ROW];
    float lse[4][MAX_ROWS * HEADS];
} answers;

static void *run_steps(void *arg)
{
    answers *a = arg;
    engine e;
    open_engine(&e, 0, true);
    for (int number = 0; number < 4; number++) {
        int64_t rows = make_step(&e, number);
        forward(&e, rows);
        read_out(&e, a->out[number], a->lse[number]);
        memset(a->out[number] + rows * ROW, 0, (size_t)(MAX_ROWS - rows) * ROW * 2);
        memset(a->lse[number] + rows * HEADS, 0, (size_t)(MAX_ROWS - rows) * HEADS * 4);
    }
    close_engine(&e);
    return NULL;
}

TEST(device, several_threads_with_streams_of_their_own)
{
    enum { THREADS = 4 };
    answers *a = calloc(THREADS + 1, sizeof *a);
    pthread_t threads[THREADS];
    run_steps(&a[THREADS]);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, run_steps, &a[i]) == 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(memcmp(&a[i], &a[THREADS], sizeof *a) == 0);
    }
    free(a);
}
