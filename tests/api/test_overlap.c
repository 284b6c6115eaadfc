/*
 * test_overlap.c: what a call writes shares no byte with anything else. Spans against every byte marked; out in
 * place of q, and q, k, v, out row by row in one buffer, have the bits of tensors of their own; all else is refused.
 */
#include "core/span.h"
#include "kit/kit.h"
#include "kit/layer.h"
#include "support.h"

#include <stdlib.h>

/* ---- Spans against their bytes ---------------------------------------------------------------- */

enum { ROOM = 4096 };

/* [rows][heads] of `dense` bytes. */
typedef struct {
    int64_t first, rows, row_stride, heads, head_stride, dense;
} layout;

static folioi_span span_of(const layout *l, char *room)
{
    return folioi_span_rows(room + l->first, 1, l->rows, l->row_stride, l->heads, l->head_stride,
                            l->dense);
}

static bool bytes_meet(const layout *a, const layout *b)
{
    static bool taken[ROOM];
    memset(taken, 0, sizeof taken);
    const layout *both[2] = {a, b};
    for (int i = 0; i < 2; i++)
        for (int64_t n = 0; n < both[i]->rows * both[i]->heads; n++)
            for (int64_t d = 0; d < both[i]->dense; d++) {
                int64_t at = both[i]->first + n / both[i]->heads * both[i]->row_stride +
                             n % both[i]->heads * both[i]->head_stride + d;
                if (i == 1 && taken[at]) return true;
                taken[at] = true;
            }
    return false;
}

static int64_t draw(uint64_t *at, int64_t low, int64_t high)
{
    return low + (int64_t)(support_bits(77, (*at)++) % (uint64_t)(high - low + 1));
}

/* No two heads overlap; heads may be outermost. */
static layout draw_layout(uint64_t *at)
{
    layout l = {.rows = draw(at, 1, 5), .heads = draw(at, 1, 4), .dense = draw(at, 1, 6)};
    bool heads_outer = draw(at, 0, 2) == 0;
    int64_t inner = l.dense + (draw(at, 0, 1) ? draw(at, 0, 20) : 0);
    int64_t count = heads_outer ? l.rows : l.heads;
    int64_t outer = count * inner + (draw(at, 0, 1) ? draw(at, 0, 60) : 0);
    l.row_stride = heads_outer ? inner : outer;
    l.head_stride = heads_outer ? outer : inner;
    l.first = draw(at, 0, 300);
    return l;
}

/* Strides that are equal, or one side without gaps: exact. Other strides: no byte is missed. */
TEST(overlap, spans_against_every_byte)
{
    static char room[ROOM];
    uint64_t at = 0;
    int64_t shared = 0, apart = 0, between = 0, not_told = 0;
    for (int n = 0; n < 200000; n++) {
        layout a = draw_layout(&at), b = draw_layout(&at);
        int kind = (int)draw(&at, 0, 3);
        if (kind <= 1) { /* the same strides, as in a fused projection */
            b = a;
            b.rows = draw(&at, 1, 5);
            b.heads = draw(&at, 1, a.heads);
            b.dense = draw(&at, 1, a.dense);
            if (a.row_stride <= a.head_stride) b.rows = draw(&at, 1, a.rows);
            b.first = a.first + draw(&at, -40, 90);
            if (b.first < 0) continue;
        }
        if (kind == 2) {
            b.dense = draw(&at, 1, 90);
            b.rows = b.heads = 1;
        }
        folioi_span x = span_of(&a, room), y = span_of(&b, room);
        bool meet = bytes_meet(&a, &b), told = folioi_spans_share(&x, &y);
        CHECK(told == folioi_spans_share(&y, &x));
        CHECK_MSG(told || !meet, "case %d: a shared byte is not seen", n);
        if (kind <= 2) CHECK_MSG(told == meet, "case %d: %d instead of %d", n, told, meet);
        bool extents_meet =
            x.first < y.first + (uintptr_t)y.extent && y.first < x.first + (uintptr_t)x.extent;
        shared += meet;
        apart += !extents_meet;
        between += extents_meet && !meet && !told;
        not_told += !meet && told;
    }
    CHECK(shared > 1000 && apart > 1000 && between > 1000 && not_told > 100);
}

TEST(overlap, nothing_shares_nothing)
{
    static char room[64];
    folioi_span all = folioi_span_of(room, 64), none = folioi_span_of(NULL, 64);
    folioi_span no_rows = folioi_span_rows(room, 4, 0, 4, 2, 2, 2);
    CHECK(folioi_spans_share(&all, &all));
    CHECK(!folioi_spans_share(&all, &none) && !folioi_spans_share(&none, &none));
    CHECK(!folioi_spans_share(&all, &no_rows) && !folioi_spans_share(&no_rows, &all));
}

/* ---- In place --------------------------------------------------------------------------------- */

/* Prompts, chunks, decodes and a context long enough to be shared out. */
static const kit_seq mixed[] = {{.query_len = 37, .seq_len = 37},
                                {.query_len = 1, .seq_len = 3000},
                                {.query_len = 5, .seq_len = 90},
                                {.query_len = 2, .seq_len = 0},
                                {.query_len = 3, .seq_len = 1700}};
static const kit_seq encoders[] = {
    {.query_len = 3, .seq_len = 3, .encoder_len = 40, .encoder_new_len = 40},
    {.query_len = 1, .seq_len = 20, .encoder_len = 33}};

static void check_in_place(folio_context *ctx, const kit_spec *spec, folio_attention_type type)
{
    bool is_mixed = type == FOLIO_ATTENTION_DECODER;
    const kit_seq *seqs = is_mixed ? mixed : encoders;
    int64_t n = is_mixed ? COUNT_OF(mixed) : COUNT_OF(encoders);
    kit_result result[2] = {0};
    for (int i = 0; i < 2; i++) {
        kit_spec s = *spec;
        s.in_place = i == 1;
        kit_case *h = kit_open(ctx, &s, seqs, n);
        CHECK_MSG(h != NULL && kit_forward(h, NULL, type, seqs, n, &result[i]), "%s", kit_error());
        kit_close(h);
    }
    CHECK(result[0].rows > 0 && result[0].rows == result[1].rows &&
          kit_rows_equal(&result[0], 0, &result[1], 0, result[0].rows));
    kit_result_free(&result[0]);
    kit_result_free(&result[1]);
}

static void check_all_in_place(folio_context *ctx)
{
    static const kit_spec specs[] = {
        {.num_heads = 8, .num_kv_heads = 2},
        {.num_heads = 3, .k_head_size = 64, .dtype = FOLIO_BF16, .strided = true},
        {.num_heads = 4, .num_kv_heads = 1, .dtype = FOLIO_F16, .kv_dtype = FOLIO_INT8},
        {.num_heads = 2, .k_head_size = 24, .sinks = true, .graph = true},
        {.num_heads = 4, .num_kv_heads = 2, .append = true}};
    for (int i = 0; i < COUNT_OF(specs); i++)
        for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++)
            if (!specs[i].append || type == FOLIO_ATTENTION_DECODER)
                check_in_place(ctx, &specs[i], (folio_attention_type)type);
}

TEST(overlap, out_may_be_q_on_the_reference)
{
    folio_context *ctx = kit_context("reference", NULL, 1);
    REQUIRE_TEST(ctx != NULL);
    check_all_in_place(ctx);
    folio_context_destroy(ctx);
}

TEST(overlap, out_may_be_q_on_every_level)
{
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    for (int32_t l = 0; l < info.num_levels; l++) {
        folio_context *ctx = kit_context("cpu", info.levels[l], 4);
        int before = test_failures();
        if (ctx != NULL) check_all_in_place(ctx);
        folio_context_destroy(ctx);
        if (test_failures() > before) printf("  that was on %s\n", info.levels[l]);
    }
}

/* ---- One buffer for all ----------------------------------------------------------------------- */

enum { HEADS = 4, KV_HEADS = 2, SIZE = 16, ROWS = 6, BLOCK = 16, BLOCKS = 4 };
enum { ROW = (2 * HEADS + 2 * KV_HEADS) * SIZE + HEADS }; /* q, k, v, out, lse */

typedef struct {
    kit_layer l;
    support_buffer memory; /* of the cache's one layer */
    folio_kv_cache_shape shape;
    size_t workspace_size;
} world;

static bool open_world(world *w, folio_context *ctx, int32_t v_size)
{
    memset(w, 0, sizeof *w);
    folio_kv_cache_desc c =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .v_head_size = v_size,
                   .dtype = FOLIO_INT8, .layout = FOLIO_LAYOUT_NHD);
    w->shape.struct_size = sizeof w->shape;
    CHECK_OK(folio_kv_cache_get_shape(NULL, &c, &w->shape));
    w->memory = support_buffer_make((size_t)w->shape.layer_bytes);
    char *base = w->memory.data;
    void *k = base, *v = base + w->shape.v.offset_bytes;
    float *k_scales = (float *)(void *)(base + w->shape.k_scales.offset_bytes);
    float *v_scales = (float *)(void *)(base + w->shape.v_scales.offset_bytes);
    folio_kv_memory m =
        FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_scales = &k_scales, .v_scales = &v_scales,
                   .k_bytes = (size_t)w->shape.k.bytes, .v_bytes = (size_t)w->shape.v.bytes,
                   .k_scales_bytes = (size_t)w->shape.k_scales.bytes,
                   .v_scales_bytes = (size_t)w->shape.v_scales.bytes);
    CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &w->l.cache));
    CHECK_OK(KIT_LAYER_OPEN(ctx, &w->l, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                            .k_head_size = SIZE, .v_head_size = v_size, .kv_dtype = FOLIO_INT8,
                            .max_seqs = 2, .max_query_tokens = ROWS,
                            .max_seq_len = BLOCKS * BLOCK));
    if (w->l.plan == NULL || w->l.batch == NULL) return false;
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = ROWS, .seq_len = ROWS,
                                     .block_table = (const int32_t[]){2}, .num_blocks = 1);
    CHECK_OK(folio_batch_add(w->l.batch, &seq));
    CHECK_OK(folio_plan_update(w->l.plan, w->l.batch, NULL));
    CHECK_OK(folio_plan_get_workspace_size(w->l.plan, &w->workspace_size));
    return true;
}

static folio_status forward(const world *w, const folio_tensors *t, const folio_run *run)
{
    return folio_attention_forward(w->l.plan, 0, FOLIO_ATTENTION_DECODER, w->l.cache, 0, t, run);
}

/* Tensors of their own, after one another in `x`. */
static folio_tensors apart(float *x)
{
    int64_t q = ROWS * HEADS * SIZE, kv = ROWS * KV_HEADS * SIZE;
    return FOLIO_WITH(folio_tensors, .q = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS},
                      .k = {.data = x + q, .dtype = FOLIO_F32, .tokens = ROWS},
                      .v = {.data = x + q + kv, .dtype = FOLIO_F32, .tokens = ROWS},
                      .out = {.data = x + q + 2 * kv, .dtype = FOLIO_F32, .tokens = ROWS},
                      .lse = x + 2 * q + 2 * kv);
}

/* The same in rows of ROW floats: q, k, v, out, lse. */
static folio_tensors fused(float *x)
{
    folio_tensors t = apart(x);
    int64_t q = HEADS * SIZE, kv = KV_HEADS * SIZE;
    t.k.data = x + q;
    t.v.data = x + q + kv;
    t.out.data = x + q + 2 * kv;
    t.lse = x + 2 * q + 2 * kv;
    t.q.token_stride = t.k.token_stride = t.v.token_stride = t.out.token_stride = ROW;
    t.lse_token_stride = ROW;
    return t;
}

static float x[2 * ROWS * ROW + 8], before[COUNT_OF(x)];

typedef void (*world_body)(folio_context *ctx, world *w);
static void in_world(folio_context *ctx, int32_t v_size, world_body body)
{
    world w;
    REQUIRE_TEST(ctx != NULL && open_world(&w, ctx, v_size));
    support_fill(x, COUNT_OF(x), 6, 1);
    body(ctx, &w);
    kit_layer_close(&w.l);
    support_buffer_free(&w.memory);
}

/* A test on each backend's world, with numbers in x. */
#define WORLD_TEST(name, v_size)                                                                   \
    static void in_world_##name(folio_context *ctx, world *w);                                     \
    BACKEND_TEST(overlap, name) { in_world(ctx, v_size, in_world_##name); }                        \
    static void in_world_##name(__attribute__((unused)) folio_context *ctx, world *w)

WORLD_TEST(rows_of_one_buffer, SIZE)
{
    static float own[ROWS * ROW];
    folio_tensors f = fused(x), a = apart(own);
    const folio_tensor *from[] = {&f.q, &f.k, &f.v}, *to[] = {&a.q, &a.k, &a.v};
    for (int i = 0; i < 3; i++)
        for (int64_t row = 0; row < ROWS; row++) {
            size_t floats = (i == 0 ? HEADS : KV_HEADS) * SIZE;
            memcpy((float *)to[i]->data + (size_t)row * floats, (float *)from[i]->data + row * ROW,
                   floats * sizeof(float));
        }
    CHECK_OK(forward(w, &f, NULL));
    CHECK_OK(forward(w, &a, NULL));
    for (int64_t row = 0; row < ROWS; row++) {
        CHECK(memcmp((float *)f.out.data + row * ROW, (float *)a.out.data + row * HEADS * SIZE,
                     HEADS * SIZE * sizeof(float)) == 0);
        CHECK(memcmp(f.lse + row * ROW, a.lse + row * HEADS, HEADS * sizeof(float)) == 0);
    }
}

/* ---- Refused ---------------------------------------------------------------------------------- */

/* One thing changed: refused, with no byte written. */
#define BAD(words, ...)                                                                            \
    do {                                                                                           \
        folio_tensors t = (row_by_row ? fused : apart)(x);                                         \
        folio_run run = {.struct_size = sizeof run};                                               \
        memcpy(before, x, sizeof x);                                                               \
        kit_poison_cache(w->l.cache);                                                              \
        __VA_ARGS__;                                                                               \
        support_mark_error();                                                                      \
        folio_status got = forward(w, &t, &run);                                                   \
        support_refused(__FILE__, __LINE__, #__VA_ARGS__, got, FOLIO_ERR_ARGUMENT, words);         \
        CHECK(memcmp(before, x, sizeof x) == 0);                                                   \
        CHECK(support_is_poison(w->memory.data, w->memory.bytes));                                 \
    } while (0)

WORLD_TEST(what_is_written_is_nothing_elses, SIZE)
{
    support_buffer workspace = support_buffer_make(w->workspace_size + 64);
    for (int row_by_row = 0; row_by_row < 2; row_by_row++) {
        BAD("out and q|itself", t.out.data = (float *)t.q.data + 1);
        BAD("out and q", t.out.data = (float *)t.q.data + SIZE);
        BAD("out and q", t.out = t.q; t.out.token_stride = ROW + 4; t.lse = NULL);
        BAD("out and q", t.out = t.q; t.out.head_stride = SIZE + 2; t.out.token_stride = ROW);
        BAD("out and k", t.out.data = t.k.data);
        BAD("out and v", t.out.data = t.v.data);
        BAD("out and v", t.v.data = (float *)t.out.data + HEADS * SIZE - 1);
        BAD("out and lse", t.lse = (float *)t.out.data + HEADS * SIZE - 1);
        BAD("lse and q", t.lse = (float *)t.q.data + 7);
        BAD("lse and k", t.lse = (float *)t.k.data);
        BAD("lse and v", t.lse = (float *)t.v.data);
        BAD("out and slopes", t.slopes = (float *)t.out.data + 2);
        BAD("lse and sinks", t.sinks = t.lse);
        BAD("out and bias", t.bias = (folio_bias){t.out.data, FOLIO_F32, {1, 1, 1, 1}, {0}});
        BAD("lse and bias",
            t.bias = (folio_bias){t.lse, FOLIO_F32, {1, 1, 1, BLOCK}, {0, 0, 0, 1}});
    }
    int row_by_row = 0;
    char *c = w->memory.data, *space = workspace.data;
    /* the very last number read is the first one written */
    BAD("out and q", t.q.data = (float *)t.out.data - ROWS * HEADS * SIZE + 1);
    BAD("out and k", t.k.data = (float *)t.out.data - ROWS * KV_HEADS * SIZE + 1);
    BAD("out and v", t.v.data = (float *)t.out.data - ROWS * KV_HEADS * SIZE + 1);
    BAD("out and the cache's K", t.out.data = c + 64);
    BAD("out and the cache's V", t.out.data = c + w->shape.v.offset_bytes + w->shape.v.bytes - 4);
    BAD("lse and the cache's k_scales",
        t.lse = (float *)(void *)(c + w->shape.k_scales.offset_bytes));
    BAD("out and the cache's v_scales",
        t.out.data = c + w->shape.v_scales.offset_bytes + w->shape.v_scales.bytes - 8);
    if (w->workspace_size > 0) {
        BAD("workspace and q", run.workspace = space; run.workspace_size = w->workspace_size;
            memcpy(space, t.q.data, 64); t.q.data = space);
        BAD("lse and run.workspace", run.workspace = space; run.workspace_size = w->workspace_size;
            t.lse = (float *)(void *)(space + w->workspace_size - 4));
    }
    /* the smallest step away is fine */
    folio_tensors t = apart(x);
    t.lse = (float *)t.out.data + ROWS * HEADS * SIZE;
    CHECK_OK(forward(w, &t, NULL));
    t.out.data = t.q.data;
    CHECK_OK(forward(w, &t, NULL));
    support_buffer_free(&workspace);
}

/* Rows of out shorter than q's begin at the same place, and are not the same. */
WORLD_TEST(in_place_needs_equal_head_sizes, SIZE / 2)
{
    const int row_by_row = 0;
    BAD("out and q|head size", t.out.data = t.q.data; t.out.head_stride = SIZE;
        t.out.token_stride = HEADS * SIZE);
}

/* f64 out of the reference is not q, wherever it begins. */
static void check_types(folio_context *ctx, world *w)
{
    (void)ctx;
    const int row_by_row = 0;
    BAD("out and q|dtype", t.out.data = t.q.data; t.out.dtype = FOLIO_F64);
}

TEST(overlap, in_place_needs_equal_types)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    in_world(ctx, SIZE, check_types);
    folio_context_destroy(ctx);
}

/* Another layer of the cache is no place for results either: its keys would be gone. */
WORLD_TEST(other_layers_of_the_cache, SIZE)
{
    folio_kv_cache_view view = FOLIO_INIT(folio_kv_cache_view);
    CHECK_OK(folio_kv_cache_get_view(w->l.cache, 0, &view));
    folio_kv_cache_desc c = *view.desc;
    c.num_layers = 3;
    folio_kv_cache_destroy(w->l.cache);
    CHECK_OK(folio_kv_cache_create(ctx, &c, &w->l.cache));
    for (int32_t layer = 1; layer < 3; layer++) {
        const char *words[] = {NULL, "out and layer 1", "out and layer 2"};
        folio_tensors t = apart(x);
        CHECK_OK(forward(w, &t, NULL));
        CHECK_OK(folio_kv_cache_get_view(w->l.cache, layer, &view));
        t.out.data = view.v_scales; /* of f32, as out is */
        REFUSED(forward(w, &t, NULL), FOLIO_ERR_ARGUMENT, words[layer]);
    }
}

/* ---- Moving K and V --------------------------------------------------------------------------- */

/* Refused, with no byte of the cache or of x written. */
#define MOVE_REFUSED(call, words)                                                                  \
    do {                                                                                           \
        memcpy(before, x, sizeof x);                                                               \
        kit_poison_cache(w->l.cache);                                                              \
        REFUSED(call, FOLIO_ERR_ARGUMENT, words);                                                  \
        CHECK(memcmp(before, x, sizeof x) == 0);                                                   \
        CHECK(support_is_poison(w->memory.data, w->memory.bytes));                                 \
    } while (0)

enum { KV_ROWS = ROWS * KV_HEADS * SIZE }; /* numbers of k, and of v */
static const int64_t slots[ROWS] = {0, 1, 2, 3, 4, 5};

/* k and v may share bytes with each other: a call that stores them only reads them. */
WORLD_TEST(stored_rows_are_not_in_the_cache, SIZE)
{
    const int row_by_row = 0;
    char *c = w->memory.data, *end = c + w->shape.v_scales.offset_bytes + w->shape.v_scales.bytes;
    BAD("k and layer 0 of the cache", t.k.data = c + 64);
    BAD("v and layer 0 of the cache", t.v.data = end - 4);
    /* what else the call reads would change under its hands */
    BAD("q and layer 0 of the cache", t.q.data = c + 64);
    BAD("bias and layer 0 of the cache",
        t.bias = (folio_bias){end - 4, FOLIO_F32, {1, 1, 1, 1}, {0}});
    float *zeros = (float *)(void *)(end - HEADS * sizeof(float));
    memset(zeros, 0, HEADS * sizeof(float));
    folio_tensors sloped = apart(x), sunk = apart(x);
    sloped.slopes = sunk.sinks = zeros;
    REFUSED(forward(w, &sloped, NULL), FOLIO_ERR_ARGUMENT, "slopes and layer 0 of the cache");
    REFUSED(forward(w, &sunk, NULL), FOLIO_ERR_ARGUMENT, "sinks and layer 0 of the cache");
    folio_tensors reads = apart(x); /* a call that stores nothing may read them there */
    reads.k = reads.v = (folio_tensor){0};
    reads.bias = (folio_bias){end - 4, FOLIO_F32, {1, 1, 1, 1}, {0}};
    CHECK_OK(forward(w, &reads, NULL));
    folio_kv_write good =
        FOLIO_WITH(folio_kv_write, .k = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS},
                   .v = {.data = x + 1, .dtype = FOLIO_F32, .tokens = ROWS}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(w->l.cache, 0, &good, NULL));
    folio_kv_write bad = good;
    bad.k.data = c;
    MOVE_REFUSED(folio_kv_cache_write(w->l.cache, 0, &bad, NULL), "k and layer 0 of the cache");
    bad = good;
    bad.v.data = end - 4;
    MOVE_REFUSED(folio_kv_cache_write(w->l.cache, 0, &bad, NULL), "v and layer 0 of the cache");
}

WORLD_TEST(gathered_rows_are_apart, SIZE)
{
    folio_kv_gather good =
        FOLIO_WITH(folio_kv_gather, .k = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS},
                   .v = {.data = x + KV_ROWS, .dtype = FOLIO_F32, .tokens = ROWS}, .slots = slots,
                   .num_slots = ROWS);
    folio_kv_gather bad = good;
    bad.v.data = x;
    MOVE_REFUSED(folio_kv_cache_gather(w->l.cache, 0, &bad, NULL), "k and v share memory");
    bad.v.data = x + KV_ROWS - 1;
    MOVE_REFUSED(folio_kv_cache_gather(w->l.cache, 0, &bad, NULL), "k and v share memory");
    bad = good;
    bad.k.data = w->memory.data;
    MOVE_REFUSED(folio_kv_cache_gather(w->l.cache, 0, &bad, NULL), "k and layer 0 of the cache");
    CHECK_OK(folio_kv_cache_gather(w->l.cache, 0, &good, NULL));
    good.k.token_stride = good.v.token_stride = 2 * KV_HEADS * SIZE; /* row by row in one buffer */
    good.v.data = x + KV_HEADS * SIZE;
    CHECK_OK(folio_kv_cache_gather(w->l.cache, 0, &good, NULL));
}

WORLD_TEST(rows_of_blocks_are_apart, SIZE)
{
    enum { NUMBERS = 2 * BLOCK * KV_HEADS * SIZE, SCALES = 2 * BLOCK * KV_HEADS };
    int8_t *k = (int8_t *)(void *)x;
    float *scales = x + 2 * NUMBERS / 4;
    folio_kv_rows good =
        FOLIO_WITH(folio_kv_rows, .k = k, .v = k + NUMBERS, .k_scales = scales,
                   .v_scales = scales + SCALES, .num_blocks = 2, .blocks = (const int64_t[]){3, 1});
    folio_kv_rows bad = good;
    bad.v = k + NUMBERS - 1;
    MOVE_REFUSED(folio_kv_cache_unpack(w->l.cache, 0, &bad, NULL), "k and v share memory");
    bad = good;
    bad.v_scales = scales;
    MOVE_REFUSED(folio_kv_cache_unpack(w->l.cache, 0, &bad, NULL), "k_scales and v_scales share");
    bad = good;
    bad.k = w->memory.data;
    MOVE_REFUSED(folio_kv_cache_unpack(w->l.cache, 0, &bad, NULL), "k and layer 0 of the cache");
    MOVE_REFUSED(folio_kv_cache_pack(w->l.cache, 0, &bad, NULL), "k and layer 0 of the cache");
    CHECK_OK(folio_kv_cache_unpack(w->l.cache, 0, &good, NULL));
    CHECK_OK(folio_kv_cache_pack(w->l.cache, 0, &good, NULL));
    good.num_blocks = 0;
    good.k = w->memory.data; /* not looked at */
    CHECK_OK(folio_kv_cache_pack(w->l.cache, 0, &good, NULL));
}
