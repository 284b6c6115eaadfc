/*
 * test_bad_write.c: FOLIO_PLAN_NOTE_BAD. A bad number in k, v or q of one step: found, with its place. Of several the first
 * one by the order of folio.h, for any number of threads. Not found: what nobody writes. Steps, layers, conversions.
 */
#include "fake_device.h"
#include "kit/layer.h"
#include "support.h"

#include <math.h>

enum { HEADS = 4, KV = 2, SIZE = 16, BLOCK = 16, LAYERS = 3, MAX_ROWS = 24 };
enum { HEAD_STRIDE = SIZE + 8, TOKEN_STRIDE = HEADS * HEAD_STRIDE }; /* NaN lies between rows */
enum { K = FOLIO_WRITTEN_K, V = FOLIO_WRITTEN_V, OUT = FOLIO_WRITTEN_OUT };
enum { DECODER = FOLIO_ATTENTION_DECODER, CROSS = FOLIO_ATTENTION_ENCODER_DECODER };
enum { ENCODER = FOLIO_ATTENTION_ENCODER, ENCODER_ONLY = FOLIO_ATTENTION_ENCODER_ONLY };

/* A chunk of a prompt, padding, a decode, a prompt. */
typedef struct {
    int32_t query, len, encoder;
} step_seq;
static const step_seq step_seqs[] = {{9, 20, 6}, {3, 0, 0}, {1, 33, 0}, {7, 7, 3}};
enum { SEQS = COUNT_OF(step_seqs), STEP_ROWS = 9 + 3 + 1 + 7, ENCODER_ROWS = 6 + 3 };
enum { SELF_BLOCKS = 3, SEQ_BLOCKS = SELF_BLOCKS + 1, BLOCKS = SEQS * SEQ_BLOCKS };

typedef struct {
    folio_dtype dtype, kv_dtype, new_dtype, out_dtype; /* 0: F32; dtype; dtype; dtype */
    folio_layout layout;
    bool v_in_k, no_cache;
    uint32_t flags;
} variant;

typedef struct {
    kit_layer l;
    variant v;
    folio_tensors t;
    double memory[4][MAX_ROWS * TOKEN_STRIDE]; /* k, v, q, out; room for the widest dtype */
} world;

static void set(world *w, int what, int64_t row, int32_t head, int32_t d, double x)
{
    kit_store(what == OUT ? w->v.dtype : w->v.new_dtype, w->memory[what],
              row * TOKEN_STRIDE + head * HEAD_STRIDE + d, x);
}

/* Finite numbers; in padding rows NaN. */
static void fill(world *w)
{
    memset(w->memory, 0xff, sizeof w->memory);
    for (int what = K; what <= OUT; what++)
        for (int64_t n = 0; n < STEP_ROWS * HEADS * SIZE; n++) {
            int64_t row = n / SIZE / HEADS;
            bool padding = row >= 9 && row < 12;
            set(w, what, row, (int32_t)(n / SIZE % HEADS), (int32_t)(n % SIZE),
                padding ? NAN : (double)support_random(3 + (uint64_t)what, (uint64_t)n));
        }
}

static int64_t slot_of(int64_t seq, int64_t token) { return seq * SEQ_BLOCKS * BLOCK + token; }

static void update(world *w)
{
    folio_batch_clear(w->l.batch);
    for (int64_t i = 0; i < SEQS; i++) {
        const step_seq *s = &step_seqs[i];
        int32_t table[SEQ_BLOCKS];
        for (int32_t k = 0; k < SEQ_BLOCKS; k++) table[k] = (int32_t)i * SEQ_BLOCKS + k;
        folio_batch_seq seq = {.struct_size = sizeof seq, .query_len = s->query};
        if (s->len == 0) seq.padding = 1;
        else {
            seq.seq_len = w->v.no_cache ? s->query : s->len;
            seq.encoder_len = seq.encoder_new_len = s->encoder;
            if (!w->v.no_cache) {
                seq.block_table = table, seq.num_blocks = SELF_BLOCKS;
                seq.cross_block_table = table + SELF_BLOCKS, seq.num_cross_blocks = 1;
            }
        }
        CHECK_OK(folio_batch_add(w->l.batch, &seq));
    }
    CHECK_OK(folio_plan_update(w->l.plan, w->l.batch, NULL));
}

/* The context's keys are finite, every other slot is NaN. */
static void fill_cache(world *w)
{
    float rows[33 * KV * SIZE];
    int64_t slots[33];
    support_fill(rows, COUNT_OF(rows), 7, 1.0f);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        folio_kv_cache_view view = support_view(w->l.cache, layer);
        memset(view.k, 0xff, (size_t)view.k_array.bytes);
        if (view.v != NULL) memset(view.v, 0xff, (size_t)view.v_array.bytes);
        if (view.k_scales != NULL) memset(view.k_scales, 0xff, (size_t)view.k_scales_array.bytes);
        if (view.v_scales != NULL) memset(view.v_scales, 0xff, (size_t)view.v_scales_array.bytes);
        for (int64_t i = 0; i < SEQS; i++) {
            int32_t new_len = step_seqs[i].query, len = step_seqs[i].len;
            int64_t context = len > new_len ? len - new_len : 0;
            for (int64_t n = 0; n < context; n++) slots[n] = slot_of(i, n);
            folio_kv_write write =
                FOLIO_WITH(folio_kv_write, .k = {rows, FOLIO_F32, context, 0, 0},
                           .v = {rows, FOLIO_F32, context, 0, 0}, .slots = slots);
            if (w->v.v_in_k) write.v = (folio_tensor){0};
            CHECK_OK(folio_kv_cache_write(w->l.cache, layer, &write, NULL));
        }
    }
}

static bool open_world(world *w, folio_context *ctx, const variant *v)
{
    uint32_t types = FOLIO_ATTENTION_BIT(DECODER) | FOLIO_ATTENTION_BIT(ENCODER) |
                     FOLIO_ATTENTION_BIT(ENCODER_ONLY);
    memset(w, 0, sizeof *w);
    w->v = *v;
    if (!w->v.dtype) w->v.dtype = FOLIO_F32;
    if (!w->v.kv_dtype) w->v.kv_dtype = w->v.dtype;
    if (!w->v.new_dtype) w->v.new_dtype = w->v.dtype;
    if (!w->v.out_dtype) w->v.out_dtype = w->v.dtype;
    CHECK_OK(KIT_LAYER_OPEN(
        ctx, &w->l, .num_heads = HEADS, .num_kv_heads = KV, .k_head_size = SIZE,
        .dtype = w->v.dtype, .kv_dtype = w->v.kv_dtype, .num_blocks = v->no_cache ? 0 : BLOCKS,
        .num_layers = LAYERS, .block_size = v->no_cache ? 0 : BLOCK, .layout = v->layout,
        .v_in_k = v->v_in_k, .types = v->v_in_k ? types : types | FOLIO_ATTENTION_BIT(CROSS),
        .max_seqs = SEQS, .max_query_tokens = STEP_ROWS, .max_seq_len = 40,
        .max_encoder_tokens = ENCODER_ROWS, .flags = FOLIO_PLAN_NOTE_BAD | v->flags));
    if (w->l.plan == NULL) return false;
    fill(w);
    if (w->l.cache != NULL) fill_cache(w);
    update(w);
    return true;
}

static folio_tensor tensor_of(world *w, int what, folio_dtype dtype, int64_t rows)
{
    return (folio_tensor){w->memory[what], dtype, rows, TOKEN_STRIDE, HEAD_STRIDE};
}

static void forward(world *w, int type, int32_t layer)
{
    int64_t new_rows = type == ENCODER || type == CROSS ? ENCODER_ROWS : STEP_ROWS;
    int64_t rows = type == ENCODER ? ENCODER_ROWS : STEP_ROWS;
    w->t.struct_size = sizeof w->t;
    w->t.q = tensor_of(w, OUT, w->v.dtype, rows);
    w->t.k = tensor_of(w, K, w->v.new_dtype, new_rows);
    if (!w->v.v_in_k) w->t.v = tensor_of(w, V, w->v.new_dtype, new_rows);
    w->t.out = tensor_of(w, 3, w->v.out_dtype, rows);
    CHECK_OK(folio_attention_forward(w->l.plan, 0, (folio_attention_type)type, w->l.cache, layer,
                                     &w->t, NULL));
}

static folio_plan_bad_write ask(world *w)
{
    folio_plan_bad_write bad = {.struct_size = sizeof bad};
    CHECK_OK(folio_plan_get_bad_write(w->l.plan, &bad));
    return bad;
}

static void check_none(world *w, int line)
{
    folio_plan_bad_write bad = ask(w), none = {.struct_size = sizeof bad};
    CHECK_MSG(memcmp(&bad, &none, sizeof bad) == 0, "line %d: %d of row at %lld, seq %lld", line,
              (int)bad.what, (long long)bad.position, (long long)bad.seq);
}
#define NONE(w) check_none(w, __LINE__)

/* Row `row` of k, v or out: which token of which sequence. */
static folio_plan_bad_write place_of(const world *w, int type, int what, int64_t row)
{
    bool encoder = type == ENCODER || (type == CROSS && what != OUT);
    folio_plan_bad_write at = {.position = row};
    for (;; at.seq++) {
        const step_seq *s = &step_seqs[at.seq];
        int64_t rows = encoder ? s->encoder : s->query;
        if (at.position >= rows) {
            at.position -= rows;
            continue;
        }
        if (type == DECODER && !w->v.no_cache) at.position += s->len - s->query;
        return at;
    }
}

static void check_found(world *w, int line, int type, int32_t layer, int what, int64_t row,
                        int32_t head, int64_t step)
{
    folio_plan_bad_write bad = ask(w), at = place_of(w, type, what, row);
    CHECK_MSG(bad.found == 1 && (int)bad.what == what && bad.layer == layer && bad.attention == 0 &&
                  (int)bad.type == type && bad.head == head && bad.step == step &&
                  bad.seq == at.seq && bad.position == at.position,
              "line %d: found %d, step %lld, layer %d, %d of seq %lld at %lld, head %d; not step "
              "%lld, layer %d, %d of seq %lld at %lld, head %d",
              line, bad.found, (long long)bad.step, bad.layer, (int)bad.what, (long long)bad.seq,
              (long long)bad.position, bad.head, (long long)step, layer, what, (long long)at.seq,
              (long long)at.position, head);
}
#define FOUND(w, ...) check_found(w, __LINE__, __VA_ARGS__)

/* Forgets: the step is begun anew, twice if the first update finds a note that nobody has asked for. */
static void renew(world *w)
{
    fill(w);
    if (w->l.cache != NULL) fill_cache(w);
    (void)ask(w);
    update(w);
}

static const double bad_numbers[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
static const int64_t some_rows[] = {0, 8, 12, 13, 19};

/* Each of k, v and out, in rows and heads of every sequence. */
static void check_places(folio_context *ctx, const variant *v)
{
    world w;
    int64_t step = 1;
    if (!open_world(&w, ctx, v)) return;
    forward(&w, DECODER, 1);
    NONE(&w);
    for (int what = K; what <= OUT; what++)
        for (int i = 0; i < COUNT_OF(some_rows); i++) {
            int32_t head = i % (what == OUT ? HEADS : KV), d = i * 5 % SIZE;
            if (what == V && w.v.v_in_k) continue;
            set(&w, what, some_rows[i], head, d, bad_numbers[i % COUNT_OF(bad_numbers)]);
            forward(&w, DECODER, 1);
            FOUND(&w, DECODER, 1, what, some_rows[i], head, step++);
            renew(&w);
        }
    kit_layer_close(&w.l);
}

BACKEND_TEST(bad_write, is_found_in_every_dtype)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    for (int q = 0; q < COUNT_OF(dtypes); q++)
        for (int kv = 0; kv < SUPPORT_NUM_KV_DTYPES; kv++)
            check_places(ctx, &(variant){.dtype = dtypes[q],
                                         .kv_dtype = support_kv_dtypes[kv],
                                         .new_dtype = dtypes[(q + kv) % 3]});
    for (int layout = 0; layout < SUPPORT_NUM_LAYOUTS; layout++)
        check_places(ctx, &(variant){.layout = support_layouts[layout]});
    if (strcmp(backend, "reference") == 0) check_places(ctx, &(variant){.out_dtype = FOLIO_F64});
}

BACKEND_TEST(bad_write, is_found_in_every_kind_of_plan)
{
    check_places(ctx, &(variant){.v_in_k = true});
    check_places(ctx, &(variant){.flags = FOLIO_PLAN_GRAPH});
    check_places(ctx, &(variant){.flags = FOLIO_PLAN_BATCH_INVARIANT | FOLIO_PLAN_PRIVATE_SLOTS});
    check_places(ctx, &(variant){.no_cache = true, .dtype = FOLIO_BF16});
}

TEST(bad_write, is_found_at_every_level)
{
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    for (int i = 0; i < info.num_levels; i++) {
        folio_context *ctx = NULL;
        CHECK_OK(folio_context_create(&FOLIO_WITH(folio_context_desc, .backend = "cpu",
                                                  .level = info.levels[i], .num_threads = 1),
                                      &ctx));
        check_places(ctx, &(variant){.dtype = FOLIO_BF16});
        folio_context_destroy(ctx);
    }
}

/* Keys that are read as given are looked at too; the cache's are not. */
BACKEND_TEST(bad_write, is_found_by_every_type)
{
    static const int types[] = {DECODER, ENCODER, ENCODER_ONLY, CROSS};
    world w;
    int64_t step = 1;
    if (!open_world(&w, ctx, &(variant){.dtype = FOLIO_F16})) return;
    for (int t = 0; t < COUNT_OF(types); t++)
        for (int what = K; what <= OUT; what++) {
            int64_t row = types[t] == ENCODER || types[t] == CROSS ? 7 : 13;
            forward(&w, types[t], 2);
            NONE(&w);
            set(&w, what, row, 1, SIZE - 1, (double)NAN);
            forward(&w, types[t], 2);
            FOUND(&w, types[t], 2, what, row, 1, step++);
            renew(&w);
        }
    w.t.flags = FOLIO_KV_APPEND;
    forward(&w, DECODER, 0);
    NONE(&w);
    set(&w, V, 19, 1, 0, -(double)INFINITY);
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 0, V, 19, 1, step);
    kit_layer_close(&w.l);
}

/* More queries than keys: the keys are cached, and rows are counted from 0. */
BACKEND_TEST(bad_write, more_queries_than_keys)
{
    world w;
    int32_t table[] = {0};
    if (!open_world(&w, ctx, &(variant){0})) return;
    folio_batch_clear(w.l.batch);
    folio_batch_seq s =
        FOLIO_WITH(folio_batch_seq, .query_len = STEP_ROWS, .seq_len = 9, .block_table = table,
                   .num_blocks = 1, .positions_given = 1, .first_query_pos = 9);
    CHECK_OK(folio_batch_add(w.l.batch, &s));
    CHECK_OK(folio_plan_update(w.l.plan, w.l.batch, NULL));
    fill(&w);
    for (int64_t row = 9; row < 12; row++) /* no padding here */
        for (int32_t n = 0; n < HEADS * SIZE; n++) set(&w, OUT, row, n / SIZE, n % SIZE, 0.5);
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = tensor_of(&w, OUT, FOLIO_F32, STEP_ROWS),
                                 .out = tensor_of(&w, 3, FOLIO_F32, STEP_ROWS));
    CHECK_OK(folio_attention_forward(w.l.plan, 0, FOLIO_ATTENTION_DECODER, w.l.cache, 0, &t, NULL));
    NONE(&w);
    set(&w, OUT, 15, 3, 2, (double)NAN);
    CHECK_OK(folio_attention_forward(w.l.plan, 0, FOLIO_ATTENTION_DECODER, w.l.cache, 0, &t, NULL));
    folio_plan_bad_write bad = ask(&w);
    CHECK(bad.found && bad.what == FOLIO_WRITTEN_OUT && bad.head == 3 && bad.seq == 0);
    CHECK_INT(bad.position, 15);
    kit_layer_close(&w.l);
}

/* A row with slot -1 is neither stored nor read. */
BACKEND_TEST(bad_write, rows_without_a_slot_are_not_looked_at)
{
    world w;
    int32_t table[] = {0, 1};
    int64_t slots[9];
    if (!open_world(&w, ctx, &(variant){0})) return;
    for (int i = 0; i < 9; i++) slots[i] = i == 0 ? -1 : slot_of(0, 11 + i);
    for (int round = 0; round < 2; round++) {
        folio_batch_clear(w.l.batch);
        CHECK_OK(
            folio_batch_add(w.l.batch, &FOLIO_WITH(folio_batch_seq, .query_len = 9, .seq_len = 20,
                                                   .block_table = table, .num_blocks = 2,
                                                   .slots = round ? slots : NULL)));
        CHECK_OK(folio_plan_update(w.l.plan, w.l.batch, NULL));
        folio_tensors t =
            FOLIO_WITH(folio_tensors, .q = tensor_of(&w, OUT, FOLIO_F32, 9),
                       .k = tensor_of(&w, K, FOLIO_F32, 9), .v = tensor_of(&w, V, FOLIO_F32, 9),
                       .out = tensor_of(&w, 3, FOLIO_F32, 9));
        /* at first all keys are stored; then the first one is there already */
        if (round) set(&w, K, 0, 0, 0, (double)NAN);
        CHECK_OK(
            folio_attention_forward(w.l.plan, 0, FOLIO_ATTENTION_DECODER, w.l.cache, 0, &t, NULL));
        NONE(&w);
    }
    kit_layer_close(&w.l);
}

/* One number of k, and whether it is bad in a cache of this type. */
static void check_number(folio_context *ctx, folio_dtype given, folio_dtype kv, double x, bool bad)
{
    for (int what = K; what <= V; what++) {
        world w;
        if (!open_world(&w, ctx, &(variant){.kv_dtype = kv, .new_dtype = given})) return;
        set(&w, what, 19, 1, 3, x);
        forward(&w, DECODER, 0);
        folio_plan_bad_write found = ask(&w);
        CHECK_MSG((found.found && (int)found.what == what) == bad, "%g of %s in %s: found %d", x,
                  folio_dtype_name(given), folio_dtype_name(kv), found.found);
        kit_layer_close(&w.l);
    }
}

BACKEND_TEST(bad_write, what_a_cache_makes_infinite_is_bad)
{
    const folio_dtype f32 = FOLIO_F32, f16 = FOLIO_F16, bf16 = FOLIO_BF16;
    const double inf = (double)INFINITY, most_bf16 = 0x1.fefffep127, past_bf16 = 0x1.ffp127;
    check_number(ctx, f32, f16, 65519.0, false);
    check_number(ctx, f32, f16, -65520.0, true);
    check_number(ctx, bf16, f16, 65280.0, false);
    check_number(ctx, bf16, f16, 65536.0, true);
    check_number(ctx, f16, f16, 65504.0, false);
    check_number(ctx, f32, bf16, 70000.0, false);
    check_number(ctx, f32, bf16, most_bf16, false);
    check_number(ctx, f32, bf16, past_bf16, true);
    check_number(ctx, f32, f32, past_bf16, false);
    check_number(ctx, bf16, bf16, -3.3e38, false);
    for (folio_dtype kv = FOLIO_FP8_E4M3; kv <= FOLIO_INT8; kv = (folio_dtype)(kv + 1)) {
        check_number(ctx, f32, kv, 70000.0, false);
        check_number(ctx, f32, kv, -inf, true);
        check_number(ctx, f16, kv, (double)NAN, true);
    }
}

/* A pair x, -x of k at position 6, which is rotated to 1.24 x; bad: that is too much for k's type or for the cache's. */
static void check_pair(folio_context *ctx, folio_dtype dtype, folio_dtype kv, double x,
                       double magnitude, bool bad)
{
    world w;
    folio_rotary *rotary = NULL;
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE, .num_positions = 64,
                                     .magnitude = magnitude);
    if (!open_world(&w, ctx, &(variant){.kv_dtype = kv, .dtype = dtype})) return;
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary));
    w.t.rotary = rotary;
    for (int i = 0; i < 2; i++) { /* position 0 changes nothing */
        set(&w, K, i ? 13 : 19, 1, 0, x);
        set(&w, K, i ? 13 : 19, 1, SIZE / 2, -x);
    }
    forward(&w, DECODER, 0);
    folio_plan_bad_write found = ask(&w);
    CHECK_MSG((found.found && found.what == FOLIO_WRITTEN_K && found.position == 6) == bad,
              "%g of %s in %s: found %d", x, folio_dtype_name(dtype), folio_dtype_name(kv),
              found.found);
    kit_layer_close(&w.l);
    folio_rotary_destroy(rotary);
}

/* k is looked at as it is stored: a pair of large numbers grows when it is rotated. */
BACKEND_TEST(bad_write, what_a_rotary_makes_infinite_is_bad)
{
    const folio_dtype f32 = FOLIO_F32, f16 = FOLIO_F16, e4m3 = FOLIO_FP8_E4M3;
    check_pair(ctx, f16, f16, 60000.0, 1.0, true);
    check_pair(ctx, f16, f16, 50000.0, 1.0, false);
    check_pair(ctx, f16, f32, 60000.0, 1.0, true);
    check_pair(ctx, f16, e4m3, 60000.0, 1.0, true);
    check_pair(ctx, f32, f16, 60000.0, 1.0, true);
    check_pair(ctx, f32, f16, 50000.0, 1.0, false);
    check_pair(ctx, f32, f32, 60000.0, 1.0, false);
    check_pair(ctx, f32, f32, 3e38, 1.0, true);
    check_pair(ctx, f16, f16, 5000.0, 12.0, true); /* but not at position 0, where it is 60000 */
}

/* NaN and infinity are bad before and after they are rotated. */
BACKEND_TEST(bad_write, what_is_bad_before_it_is_rotated)
{
    for (int i = 0; i < COUNT_OF(bad_numbers); i++) {
        world w;
        folio_rotary *rotary = NULL;
        folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE / 2,
                                         .first_dim = SIZE / 2, .num_positions = 64);
        if (!open_world(&w, ctx, &(variant){.kv_dtype = FOLIO_FP8_E5M2})) return;
        CHECK_OK(folio_rotary_create(ctx, &d, &rotary));
        w.t.rotary = rotary;
        set(&w, K, 12, 1, i ? SIZE - 1 : 0, bad_numbers[i]);
        forward(&w, DECODER, 1);
        FOUND(&w, DECODER, 1, K, 12, 1, 1);
        kit_layer_close(&w.l);
        folio_rotary_destroy(rotary);
    }
}

/* Of several the first: K before V before out, then rows, then heads. */
BACKEND_TEST(bad_write, the_first_of_several)
{
    world w;
    if (!open_world(&w, ctx, &(variant){.dtype = FOLIO_BF16})) return;
    for (uint64_t round = 0; round < 60; round++) {
        int first_what = OUT + 1;
        int64_t first_row = 0;
        int32_t first_head = 0;
        for (uint64_t n = 0; n < 5; n++) {
            uint64_t bits = support_bits(round, n);
            int what = round % 3 == 0 ? OUT : (int)(bits % 3);
            int64_t row = (int64_t)((bits >> 8) % STEP_ROWS);
            int32_t head = (int32_t)((bits >> 32) % (what == OUT ? HEADS : KV));
            if (row >= 9 && row < 12) continue; /* padding */
            set(&w, what, row, head, (int32_t)((bits >> 48) % SIZE), bad_numbers[n % 3]);
            bool is_first = what < first_what || (what == first_what && row < first_row) ||
                            (what == first_what && row == first_row && head < first_head);
            if (is_first) first_what = what, first_row = row, first_head = head;
        }
        forward(&w, DECODER, (int32_t)(round % LAYERS));
        FOUND(&w, DECODER, (int32_t)(round % LAYERS), first_what, first_row, first_head,
              (int64_t)round + 1);
        renew(&w);
    }
    kit_layer_close(&w.l);
}

/* ---- threads */

enum { LONG_ROWS = 700, LONG_HEADS = 8, LONG_SIZE = 64, LONG_ROW = LONG_HEADS * LONG_SIZE };

static void backwards(void *user, int64_t count, folio_task_fn fn, void *task)
{
    *(int64_t *)user += count > 1;
    while (count-- > 0) fn(task, count);
}

/* A prompt of rows enough for many workers, who look at it in any order. */
static void check_long(folio_context *ctx, const int64_t *bad_rows, int what, int32_t head)
{
    kit_layer l = {0};
    static float numbers[4][LONG_ROWS * LONG_ROW];
    int32_t table[LONG_ROWS / BLOCK + 1];
    for (int32_t i = 0; i < COUNT_OF(table); i++) table[i] = i;
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = LONG_HEADS, .k_head_size = LONG_SIZE,
                            .num_blocks = COUNT_OF(table), .block_size = BLOCK, .window = 4,
                            .max_seq_len = LONG_ROWS, .flags = FOLIO_PLAN_NOTE_BAD));
    for (int i = 0; i < 3; i++)
        support_fill(numbers[i], LONG_ROWS * LONG_ROW, 11 + (uint64_t)i, 1.0f);
    for (int i = 0; i < 3; i++)
        numbers[what][bad_rows[i] * LONG_ROW + head * LONG_SIZE + 17 * i] = (float)bad_numbers[i];
    CHECK_OK(folio_batch_add(l.batch, &FOLIO_WITH(folio_batch_seq, .query_len = LONG_ROWS,
                                                  .seq_len = LONG_ROWS, .block_table = table,
                                                  .num_blocks = COUNT_OF(table))));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    folio_tensors t = FOLIO_WITH(folio_tensors, .k = {numbers[K], FOLIO_F32, LONG_ROWS, 0, 0},
                                 .v = {numbers[V], FOLIO_F32, LONG_ROWS, 0, 0},
                                 .q = {numbers[OUT], FOLIO_F32, LONG_ROWS, 0, 0},
                                 .out = {numbers[3], FOLIO_F32, LONG_ROWS, 0, 0});
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
    folio_plan_bad_write bad = {.struct_size = sizeof bad};
    CHECK_OK(folio_plan_get_bad_write(l.plan, &bad));
    CHECK(bad.found && (int)bad.what == what && bad.seq == 0 && bad.head == head);
    CHECK_INT(bad.position, 203);
    kit_layer_close(&l);
}

TEST(bad_write, the_same_for_any_threads)
{
    static const int64_t orders[][3] = {{203, 204, 699}, {699, 203, 204}, {650, 351, 203}};
    static const int32_t threads[] = {1, 2, 5, 16};
    int64_t shared = 0;
    for (int i = 0; i < 2 * COUNT_OF(threads); i++) {
        folio_context *ctx = NULL;
        folio_context_desc d =
            FOLIO_WITH(folio_context_desc, .backend = "cpu", .num_threads = threads[i / 2]);
        if (i % 2) d.executor = (folio_executor){backwards, &shared, threads[i / 2]};
        CHECK_OK(folio_context_create(&d, &ctx));
        for (int what = K; what <= OUT; what++) check_long(ctx, orders[what], what, what * 2 + 1);
        folio_context_destroy(ctx);
    }
    CHECK(shared > 0);
}

/* ---- layers and steps */

BACKEND_TEST(bad_write, the_first_layer_of_the_first_step)
{
    world w;
    if (!open_world(&w, ctx, &(variant){0})) return;
    set(&w, V, 4, 1, 0, (double)NAN);
    forward(&w, DECODER, 2);
    FOUND(&w, DECODER, 2, V, 4, 1, 1);
    forward(&w, DECODER, 1); /* later, but a lower layer */
    FOUND(&w, DECODER, 1, V, 4, 1, 1);
    forward(&w, DECODER, 2);
    set(&w, K, 19, 0, 0, (double)NAN);
    forward(&w, DECODER, 2);
    FOUND(&w, DECODER, 1, V, 4, 1, 1);
    forward(&w, DECODER, 1); /* K before V */
    FOUND(&w, DECODER, 1, K, 19, 0, 1);
    forward(&w, ENCODER, 1); /* a later type; its tensors are other rows */
    FOUND(&w, DECODER, 1, K, 19, 0, 1);
    forward(&w, DECODER, 0); /* nobody has asked for this one */
    update(&w);
    FOUND(&w, DECODER, 0, K, 19, 0, 1);
    /* it was asked for: the next update forgets it */
    update(&w);
    NONE(&w);
    forward(&w, DECODER, 2);
    update(&w); /* nobody has asked: later steps note nothing */
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 2, K, 19, 0, 3);
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 2, K, 19, 0, 3);
    update(&w);
    NONE(&w);
    update(&w);
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 0, K, 19, 0, 6);
    kit_layer_close(&w.l);
}

/* An update that is refused is no step. */
BACKEND_TEST(bad_write, a_refused_update_is_no_step)
{
    world w;
    if (!open_world(&w, ctx, &(variant){0})) return;
    folio_batch *empty = support_batch(ctx, BLOCK);
    folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 1000);
    CHECK_OK(folio_batch_add(empty, &s));
    set(&w, K, 0, 0, 0, (double)NAN);
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 0, K, 0, 0, 1);
    CHECK_REFUSED(folio_plan_update(w.l.plan, empty, NULL), FOLIO_ERR_ARGUMENT, "1000");
    FOUND(&w, DECODER, 0, K, 0, 0, 1);
    update(&w);
    forward(&w, DECODER, 0);
    FOUND(&w, DECODER, 0, K, 0, 0, 2);
    folio_batch_destroy(empty);
    kit_layer_close(&w.l);
}

/* A plan that grows keeps its note in the update that makes it grow. */
BACKEND_TEST(bad_write, is_kept_while_the_plan_grows)
{
    kit_layer l = {0};
    folio_plan *plan = NULL;
    float rows[64 * 8];
    support_fill(rows, COUNT_OF(rows), 2, 1.0f);
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = 1, .k_head_size = 8, .max_seq_len = 64));
    CHECK_OK(folio_plan_create(ctx,
                               &FOLIO_WITH(folio_plan_desc, .attentions = &l.attention,
                                           .num_attentions = 1, .flags = FOLIO_PLAN_NOTE_BAD),
                               &plan));
    folio_plan_bad_write bad = {.struct_size = sizeof bad};
    for (int64_t step = 1; step <= 2; step++) {
        int64_t n = step * 20;
        folio_batch_clear(l.batch);
        CHECK_OK(
            folio_batch_add(l.batch, &FOLIO_WITH(folio_batch_seq, .query_len = n, .seq_len = n)));
        CHECK_OK(folio_plan_update(plan, l.batch, NULL));
        rows[5 * 8] = (float)NAN;
        static float out[64 * 8];
        folio_tensor t = {rows, FOLIO_F32, n, 0, 0};
        CHECK_OK(folio_attention_forward(
            plan, 0, FOLIO_ATTENTION_DECODER, NULL, (int32_t)(3 - step),
            &FOLIO_WITH(folio_tensors, .q = t, .k = t, .v = t, .out = {out, FOLIO_F32, n, 0, 0}),
            NULL));
    }
    CHECK_OK(folio_plan_get_bad_write(plan, &bad));
    CHECK_INT(bad.step, 1);
    CHECK_INT(bad.layer, 2); /* without a cache: any number */
    CHECK_INT(bad.position, 5);
    folio_plan_destroy(plan);
    kit_layer_close(&l);
}

TEST(bad_write, a_device_that_does_not_note_refuses_the_flag)
{
    folio_context *ctx = fake_device_context(NULL);
    kit_layer l = {0};
    CHECK_REFUSED(KIT_LAYER_OPEN(ctx, &l, .num_heads = 1, .k_head_size = 8, .max_seq_len = 16,
                                 .flags = FOLIO_PLAN_NOTE_BAD),
                  FOLIO_ERR_UNSUPPORTED, "does not note bad writes");
    kit_layer_close(&l);
    folio_context_destroy(ctx);
}
