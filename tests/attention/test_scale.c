/*
 * test_scale.c: large things. A prompt of 128k tokens with no memory beyond the workspace the plan
 * asked for; caches and tensors past 2^31 elements, in memory mapped but mostly never touched.
 */
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif

#include "kit/layer.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { SIZE = 8, BLOCK = 16 };

/* ---- A long prompt -------------------------------------------------------------------------- */

/* Refuses what would take the live bytes past the cap. */
typedef struct {
    _Atomic size_t live;
    size_t cap;
    _Atomic int refused;
} capped;

static void *capped_alloc(void *user, size_t size, size_t align)
{
    capped *c = user;
    if (atomic_fetch_add(&c->live, size) + size > c->cap) {
        atomic_fetch_sub(&c->live, size);
        c->refused++;
        return NULL;
    }
    if (align < 64) align = 64;
    return aligned_alloc(align, (size + align) / align * align);
}

static void capped_free(void *user, void *ptr, size_t size)
{
    capped *c = user;
    if (ptr) atomic_fetch_sub(&c->live, size);
    free(ptr);
}

/* Numbers of q (0), k (1) and v (2) by token. */
static float number(int tensor, int64_t token, int64_t d)
{
    return support_random(40 + (uint64_t)tensor, (uint64_t)(token * SIZE + d));
}

/* A row of the prompt by the formula, in double. */
static void check_prompt_row(int64_t row, int64_t window, const float *out, float lse)
{
    int64_t first = window && row + 1 > window ? row + 1 - window : 0;
    double top = -(double)INFINITY, sum = 0, expected[SIZE] = {0};
    double *scores = malloc((size_t)(row + 1 - first) * sizeof *scores);
    for (int64_t j = first; j <= row; j++) {
        double s = 0;
        for (int64_t d = 0; d < SIZE; d++) s += (double)number(0, row, d) * (double)number(1, j, d);
        scores[j - first] = s / sqrt(SIZE);
        if (scores[j - first] > top) top = scores[j - first];
    }
    for (int64_t j = first; j <= row; j++) {
        double p = exp(scores[j - first] - top);
        sum += p;
        for (int64_t d = 0; d < SIZE; d++) expected[d] += p * (double)number(2, j, d);
    }
    free(scores);
    for (int64_t d = 0; d < SIZE; d++)
        CHECK_MSG(fabs((double)out[d] - expected[d] / sum) <= 2e-6,
                  "row %lld number %d is %.9g, expected %.9g", (long long)row, (int)d,
                  (double)out[d], expected[d] / sum);
    CHECK(fabs((double)lse - (top + log(sum))) <= 1e-5);
}

typedef struct {
    kit_layer l;
    float *q, *k, *v, *out, *lse;
} prompt;

static void open_prompt(prompt *p, int64_t tokens, int64_t window)
{
    int64_t blocks = tokens / BLOCK;
    CHECK_OK(KIT_LAYER_OPEN(p->l.ctx, &p->l, .num_heads = 1, .k_head_size = SIZE, .window = window,
                            .num_blocks = blocks, .block_size = BLOCK, .max_seq_len = tokens,
                            .flags = FOLIO_PLAN_NO_WORKSPACE));
    int32_t *table = malloc((size_t)blocks * sizeof *table);
    for (int64_t b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - 1 - b);
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = tokens, .seq_len = tokens,
                                     .block_table = table, .num_blocks = blocks);
    CHECK_OK(folio_batch_add(p->l.batch, &seq));
    free(table);
    float **tensors[3] = {&p->q, &p->k, &p->v};
    for (int t = 0; t < 3; t++) {
        *tensors[t] = malloc((size_t)(tokens * SIZE) * sizeof(float));
        for (int64_t i = 0; i < tokens * SIZE; i++)
            (*tensors[t])[i] = number(t, i / SIZE, i % SIZE);
    }
    p->out = malloc((size_t)(tokens * SIZE) * sizeof(float));
    p->lse = malloc((size_t)tokens * sizeof(float));
}

static void close_prompt(prompt *p)
{
    kit_layer_close(&p->l);
    folio_context_destroy(p->l.ctx);
    float *arrays[] = {p->q, p->k, p->v, p->out, p->lse};
    for (int n = 0; n < 5; n++) free(arrays[n]);
}

/* Once the plan exists the allocator gives its workspace and not a byte more. */
static void run_prompt(const char *backend, int64_t tokens, int64_t window)
{
    capped memory = {.cap = SIZE_MAX};
    folio_allocator allocator = {capped_alloc, capped_free, &memory};
    prompt p = {.l.ctx = support_context(backend, 2, &allocator)};
    REQUIRE_TEST(p.l.ctx);
    open_prompt(&p, tokens, window);
    size_t bytes = 0;
    CHECK_OK(folio_plan_get_workspace_size(p.l.plan, &bytes));
    /* Rows x head size x splits at the very most; query x keys would be 64 GiB at 128k. */
    CHECK_MSG(bytes <= (size_t)tokens * 1024, "%s: workspace of %zu bytes", backend, bytes);
    memory.cap = memory.live + bytes;
    void *workspace = capped_alloc(&memory, bytes, 64);
    REQUIRE_TEST(workspace);
    CHECK_OK(folio_plan_update(p.l.plan, p.l.batch, NULL));
    folio_tensors t = {.struct_size = sizeof t, .lse = p.lse};
    t.q = (folio_tensor){.data = p.q, .dtype = FOLIO_F32, .tokens = tokens};
    t.k = (folio_tensor){.data = p.k, .dtype = FOLIO_F32, .tokens = tokens};
    t.v = (folio_tensor){.data = p.v, .dtype = FOLIO_F32, .tokens = tokens};
    t.out = (folio_tensor){.data = p.out, .dtype = FOLIO_F32, .tokens = tokens};
    folio_run run = {.struct_size = sizeof run, .workspace = workspace, .workspace_size = bytes};
    CHECK_OK(folio_attention_forward(p.l.plan, 0, FOLIO_ATTENTION_DECODER, p.l.cache, 0, &t, &run));
    CHECK_INT(memory.refused, 0);
    const int64_t rows[] = {0, 1, 511, 512, 1023, tokens / 2, tokens - 513, tokens - 2, tokens - 1};
    for (int n = 0; n < COUNT_OF(rows); n++)
        if (rows[n] >= 0 && rows[n] < tokens)
            check_prompt_row(rows[n], window, p.out + rows[n] * SIZE, p.lse[rows[n]]);
    capped_free(&memory, workspace, bytes);
    memory.cap = SIZE_MAX;
    close_prompt(&p);
    CHECK(memory.live == 0);
}

TEST(scale, prompt_of_128k_tokens_in_a_window) { run_prompt("cpu", 131072, 300); }

TEST(scale, prompt_of_8k_tokens) { run_prompt("cpu", 8192, 0); }

LONG_TEST(scale, prompt_of_128k_tokens) { run_prompt("cpu", 131072, 0); }

TEST(scale, reference_needs_no_query_times_keys) { run_prompt("reference", 2048, 0); }

/* ---- Past 2^31 elements --------------------------------------------------------------------- */

/* Addresses without memory behind them until they are touched; NULL where there are not enough. */
static void *reserve(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) test_fail(__FILE__, __LINE__, "no address space for %zu bytes", bytes);
    return p == MAP_FAILED ? NULL : p;
}

enum { HEADS = 2, KEYS = 40, ROWS = 3, TABLE = 3 };

typedef struct {
    float out[ROWS][HEADS][SIZE], lse[ROWS][HEADS];
} answer;

/* A plan for one sequence of 40 keys in these blocks, the last three of them new. */
static void open_layer(kit_layer *l, folio_context *ctx, folio_dtype kv_dtype, const int32_t *table)
{
    CHECK_OK(KIT_LAYER_OPEN(ctx, l, .num_heads = HEADS, .num_kv_heads = 1, .k_head_size = SIZE,
                            .kv_dtype = kv_dtype, .max_query_tokens = ROWS, .max_seq_len = KEYS));
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = ROWS, .seq_len = KEYS,
                                     .block_table = table, .num_blocks = TABLE);
    CHECK_OK(folio_batch_add(l->batch, &seq));
    CHECK_OK(folio_plan_update(l->plan, l->batch, NULL));
}

/* Stores the context and attends. With a stride the rows of q and out lie that far apart. */
static void attend(folio_context *ctx, folio_kv_cache *cache, folio_dtype dtype,
                   const int32_t *table, int64_t stride, answer *got)
{
    kit_layer l = {.cache = cache};
    open_layer(&l, ctx, dtype, table);
    float k[KEYS][SIZE], v[KEYS][SIZE], q[ROWS][HEADS][SIZE];
    int64_t slots[KEYS];
    for (int64_t j = 0; j < KEYS; j++) slots[j] = (int64_t)table[j / BLOCK] * BLOCK + j % BLOCK;
    support_fill(&k[0][0], KEYS * SIZE, 50, 1);
    support_fill(&v[0][0], KEYS * SIZE, 51, 1);
    support_fill(&q[0][0][0], ROWS * HEADS * SIZE, 52, 1);
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, KEYS - ROWS, 0, 0},
                                      .v = {v, FOLIO_F32, KEYS - ROWS, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, 0, &write, NULL));
    size_t bytes = (size_t)(stride * ROWS) * sizeof(float);
    float *far_q = stride ? reserve(bytes) : NULL, *far_out = stride ? reserve(bytes) : NULL;
    folio_tensors t = {.struct_size = sizeof t, .lse = &got->lse[0][0]};
    t.q = (folio_tensor){far_q ? far_q : &q[0][0][0], FOLIO_F32, ROWS, far_q ? stride : 0, 0};
    t.k = (folio_tensor){k[KEYS - ROWS], FOLIO_F32, ROWS, 0, 0};
    t.v = (folio_tensor){v[KEYS - ROWS], FOLIO_F32, ROWS, 0, 0};
    t.out = (folio_tensor){far_out ? far_out : &got->out[0][0][0], FOLIO_F32, ROWS,
                           far_out ? stride : 0, 0};
    for (int i = 0; far_q && i < ROWS; i++) memcpy(far_q + i * stride, q[i], sizeof q[i]);
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &t, NULL));
    for (int i = 0; far_out && i < ROWS; i++)
        memcpy(got->out[i], far_out + i * stride, sizeof got->out[i]);
    if (far_q) munmap(far_q, bytes);
    if (far_out) munmap(far_out, bytes);
    l.cache = NULL; /* the caller's */
    kit_layer_close(&l);
}

static folio_kv_cache_desc cache_desc(int64_t num_blocks, folio_dtype dtype, folio_layout layout)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = num_blocks, .num_layers = 1,
                      .block_size = BLOCK, .num_kv_heads = 1, .k_head_size = SIZE, .dtype = dtype,
                      .layout = layout);
}

/* The same keys in a small cache of the library's own. */
static void small_answer(folio_context *ctx, folio_dtype dtype, answer *expected)
{
    const int32_t table[TABLE] = {2, 0, 1};
    folio_kv_cache_desc desc = cache_desc(4, dtype, FOLIO_LAYOUT_NATIVE);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &desc, &cache));
    attend(ctx, cache, dtype, table, 0, expected);
    CHECK(isfinite(expected->out[2][1][7]));
    folio_kv_cache_destroy(cache);
}

/* Are these bytes of the mapping still all zero, as never written? */
static bool is_zero(const char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (p[i]) return false;
    return true;
}

/* Few blocks, but strides that put each one, and each token of it, far from the last. */
BACKEND_TEST(scale, strides_past_2_31_elements)
{
    answer expected, got;
    small_answer(ctx, FOLIO_F32, &expected);
    /* 16 tokens of 2^27 + 24 elements make a block of more than 2^31; four blocks 32 GiB. */
    const folio_kv_strides strides = {((int64_t)1 << 31) + 4096, ((int64_t)1 << 27) + 24, SIZE};
    const size_t bytes = (size_t)strides.block * 4 * sizeof(float);
    char *k_base = reserve(bytes), *v_base = reserve(bytes);
    folio_kv_cache *cache = NULL;
    if (k_base && v_base) {
        void *k[1] = {k_base}, *v[1] = {v_base};
        folio_kv_cache_desc desc = cache_desc(4, FOLIO_F32, FOLIO_LAYOUT_STRIDED);
        folio_kv_memory memory =
            FOLIO_WITH(folio_kv_memory, .k = k, .v = v, .k_bytes = bytes, .v_bytes = bytes,
                       .k_strides = strides, .v_strides = strides);
        CHECK_OK(folio_kv_cache_wrap(ctx, &desc, &memory, &cache));
        const int32_t table[TABLE] = {3, 1, 2};
        if (cache) attend(ctx, cache, FOLIO_F32, table, 0, &got);
        CHECK(cache && memcmp(&got, &expected, sizeof got) == 0);
        CHECK(is_zero(k_base, 1 << 20) && is_zero(v_base, 1 << 20));
    }
    folio_kv_cache_destroy(cache);
    if (k_base) munmap(k_base, bytes);
    if (v_base) munmap(v_base, bytes);
}

BACKEND_TEST(scale, rows_past_2_31_elements)
{
    answer expected, got;
    small_answer(ctx, FOLIO_F32, &expected);
    const int32_t table[TABLE] = {2, 0, 1};
    folio_kv_cache_desc desc = cache_desc(4, FOLIO_F32, FOLIO_LAYOUT_NATIVE);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &desc, &cache));
    attend(ctx, cache, FOLIO_F32, table, ((int64_t)1 << 30) + 17, &got);
    CHECK(memcmp(&got, &expected, sizeof got) == 0);
    folio_kv_cache_destroy(cache);
}

/* The longest sequence there is: all of it released but what a window of 16 tokens sees. */
TEST(scale, sequence_of_2_31_tokens)
{
    enum { LONG_BLOCK = 4096, QUERIES = 16 };
    const int64_t seq_len = INT32_MAX, blocks = seq_len / LONG_BLOCK + 1;
    folio_context *ctx = support_context("cpu", 2, NULL);
    kit_layer l = {0};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = 1, .k_head_size = SIZE, .window = QUERIES,
                            .num_blocks = 4, .block_size = LONG_BLOCK, .max_query_tokens = QUERIES,
                            .max_seq_len = seq_len));
    int32_t *table = malloc((size_t)blocks * sizeof *table);
    REQUIRE_TEST(table != NULL && l.plan != NULL);
    for (int64_t i = 0; i < blocks; i++) table[i] = FOLIO_NO_BLOCK;
    table[blocks - 1] = 2;
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = QUERIES, .seq_len = seq_len};
    s.block_table = table;
    s.num_blocks = blocks;
    CHECK_OK(folio_batch_add(l.batch, &s));
    /* The 16 tokens before are cached with v = 1, the new ones bring v = 3; q = 0 averages them. */
    static float q[QUERIES][SIZE], k[QUERIES][SIZE], v[QUERIES][SIZE], out[QUERIES][SIZE];
    int64_t slots[QUERIES];
    for (int i = 0; i < QUERIES; i++) {
        slots[i] = 2 * LONG_BLOCK + (seq_len - 2 * QUERIES + i) % LONG_BLOCK;
        for (int d = 0; d < SIZE; d++) v[i][d] = 1;
    }
    folio_kv_write w = {.struct_size = sizeof w, .slots = slots};
    w.k = (folio_tensor){k, FOLIO_F32, QUERIES, 0, 0};
    w.v = (folio_tensor){v, FOLIO_F32, QUERIES, 0, 0};
    CHECK_OK(folio_kv_cache_write(l.cache, 0, &w, NULL));
    for (int i = 0; i < QUERIES; i++)
        for (int d = 0; d < SIZE; d++) v[i][d] = 3;
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    folio_tensors t = {.struct_size = sizeof t, .k = w.k, .v = w.v};
    t.q = (folio_tensor){q, FOLIO_F32, QUERIES, 0, 0};
    t.out = (folio_tensor){out, FOLIO_F32, QUERIES, 0, 0};
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
    for (int i = 0; i < QUERIES; i++)
        CHECK_MSG(fabs((double)out[i][0] - (1 + 2 * (i + 1) / 16.0)) < 1e-6, "row %d is %g", i,
                  (double)out[i][0]);
    free(table);
    kit_layer_close(&l);
    folio_context_destroy(ctx);
}
