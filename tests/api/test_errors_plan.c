/* test_errors_plan.c: bad input to a plan: updates with bad sequences, and plans that cannot be made. */
#include "api/errors_rig.h"
#include "kit/layer.h"

#include <math.h>

/* A batch of these sequences is refused, when added or at the update; the plan keeps serving. */
static void bad_update(fixture *f, int line, const folio_batch_seq *seqs, int count,
                       const char *words)
{
    folio_batch *batch = support_batch(f->ctx, BLOCK);
    folio_status status = FOLIO_OK;
    support_mark_error();
    for (int i = 0; i < count && status == FOLIO_OK; i++) status = folio_batch_add(batch, &seqs[i]);
    if (status == FOLIO_OK) status = folio_plan_update(f->plan, batch, NULL);
    support_refused(__FILE__, line, "update", status, ARG, words);
    check_untouched(f, line);
    check_still_serves(f, line);
    folio_batch_destroy(batch);
}

/* A batch with two new tokens in one slot: refused by a forward that writes, and by no other. */
static void bad_write(fixture *f, int line, const folio_batch_seq *seqs, folio_attention_type type,
                      const char *words)
{
    static float q[32 * HEADS * DK], k[32 * HEADS * DK], out[32 * HEADS * DV];
    folio_batch *batch = support_batch(f->ctx, BLOCK);
    folio_batch_info info = {.struct_size = sizeof info};
    for (int i = 0; i < 3; i++) CHECK_OK(folio_batch_add(batch, &seqs[i]));
    CHECK_OK(folio_plan_update(f->plan, batch, NULL));
    CHECK_OK(folio_batch_get_info(batch, &info));
    int64_t rows = info.num_query_tokens;
    int64_t fresh = type == FOLIO_ATTENTION_DECODER ? rows : info.num_encoder_tokens;
    call c = good_call(f, PLAIN, type);
    c.t.q = (folio_tensor){q, FOLIO_F32, rows, 0, 0};
    c.t.k = c.t.v = (folio_tensor){k, FOLIO_F32, fresh, 0, 0};
    c.t.out = (folio_tensor){out, FOLIO_F32, rows, 0, 0};
    c.t.lse = NULL;
    memset(out, 0x55, sizeof out);
    support_mark_error();
    folio_status status = run_call(&c);
    support_refused(__FILE__, line, "write", status, ARG, words);
    for (size_t i = 0; i < sizeof out; i++) CHECK_INT(((const unsigned char *)out)[i], 0x55);
    c.t.flags = FOLIO_KV_APPEND;
    CHECK_OK(run_call(&c));
    c.t.flags = 0, c.t.k = c.t.v = (folio_tensor){0};
    CHECK_OK(run_call(&c));
    check_untouched(f, line);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    check_still_serves(f, line);
    folio_batch_destroy(batch);
}

#define GOOD_BUT(...)                                                                              \
    int32_t t0[2] = {3, 5}, t1[5] = {1, 4, 0, 2, 6}, x0[1] = {7}, x1[1] = {8};                     \
    int64_t slots[5] = {48, 49, 50, 51, 52}, cross_slots[6] = {112, 113, 114, 115, 116, 117};      \
    folio_batch_seq s[3] = {good_seq(0), good_seq(1), good_seq(2)};                                \
    s[0].block_table = t0, s[1].block_table = t1;                                                  \
    s[0].cross_block_table = x0, s[1].cross_block_table = x1;                                      \
    s[0].slots = slots, s[0].cross_slots = cross_slots;                                            \
    __VA_ARGS__

#define BAD_UPDATE(words, ...)                                                                     \
    do {                                                                                           \
        GOOD_BUT(__VA_ARGS__);                                                                     \
        bad_update(f, __LINE__, s, 3, words);                                                      \
    } while (0)
#define BAD_WRITE(type, words, ...)                                                                \
    do {                                                                                           \
        GOOD_BUT(__VA_ARGS__);                                                                     \
        bad_write(f, __LINE__, s, type, words);                                                    \
    } while (0)

STEP_TEST(errors_plan, blocks_and_slots)
{
    BAD_UPDATE("12", t1[1] = 12);
    BAD_UPDATE("2147483647", t1[0] = INT32_MAX);
    BAD_UPDATE("-2", t1[0] = -2);
    BAD_UPDATE("-2147483648", t0[0] = INT32_MIN);
    BAD_UPDATE("block", t1[0] = FOLIO_NO_BLOCK); /* the row sees all 21 keys */
    BAD_UPDATE("block", t1[1] = FOLIO_NO_BLOCK);
    BAD_UPDATE("12", x1[0] = 12);
    BAD_UPDATE("-2", x0[0] = -2);
    BAD_UPDATE("cross", x1[0] = FOLIO_NO_BLOCK);
    BAD_UPDATE("192", slots[4] = BLOCKS * BLOCK);
    BAD_UPDATE("-2", slots[0] = -2);
    BAD_UPDATE("9223372036854775807", slots[1] = INT64_MAX);
    BAD_UPDATE("192", cross_slots[5] = BLOCKS * BLOCK);
    BAD_UPDATE("-3", cross_slots[0] = -3);
    /* -1 twice is nothing twice */
    folio_batch *batch = support_batch(ctx, BLOCK);
    const int64_t none[5] = {-1, -1, -1, -1, 48};
    folio_batch_seq s = good_seq(0);
    s.slots = none;
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(f->plan, batch, NULL));
    folio_batch_destroy(batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
}

STEP_TEST(errors_plan, two_tokens_in_one_slot)
{
    const folio_attention_type self = FOLIO_ATTENTION_DECODER;
    const folio_attention_type cross = FOLIO_ATTENTION_ENCODER_DECODER;
    BAD_WRITE(self, "new token 2 of seq 0 and new token 4 of seq 0|slot 50, in block 3",
              slots[4] = 50);
    BAD_WRITE(self, "new token 4 of seq 0 and new token 0 of seq 1|slot 68, in block 4",
              slots[4] = 4 * 16 + 4);
    BAD_WRITE(cross, "new token 0 of seq 0 and new token 3 of seq 0|slot 115, in block 7",
              cross_slots[0] = 115);
    BAD_WRITE(cross, "new token 0 of seq 0 and new token 0 of seq 1|slot 112, in block 7",
              s[1].encoder_new_len = 3;
              s[1].cross_block_table = x0); /* by table */
    BAD_WRITE(self, "new token 0 of seq 1 and new token 16 of seq 1|slot 19, in block 1",
              s[1].query_len = 18;
              t1[1] = 1); /* tokens 3.. and 16.. in one block */
    BAD_WRITE(self, "new token 4 of seq 0 and new token 0 of seq 1|slot 68, in block 4",
              s[0].slots = NULL;
              t0[0] = 4);
}

/* A prefix of full blocks may be shared, as long as nobody writes there. */
STEP_TEST(errors_plan, shared_prefix_is_fine)
{
    folio_batch *batch = support_batch(ctx, BLOCK);
    const int32_t a[2] = {2, 3}, b[2] = {2, 4};
    folio_batch_seq s = good_seq(1);
    s.block_table = a;
    CHECK_OK(folio_batch_add(batch, &s));
    s.block_table = b;
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(f->plan, batch, NULL));
    folio_batch_destroy(batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
}

STEP_TEST(errors_plan, limits_and_lengths)
{
    static int64_t many[64];
    for (int i = 0; i < 64; i++) many[i] = -1;
    BAD_UPDATE("65|64", s[1].seq_len = 65; s[1].num_blocks = 5);
    BAD_UPDATE("33|32", s[2].query_len = 27);
    BAD_UPDATE("65|64", s[1].encoder_len = 65; s[1].cross_block_table = NULL;
               s[1].num_cross_blocks = 0);
    BAD_UPDATE("17|16", s[0].encoder_len = s[0].encoder_new_len = 17; s[0].cross_slots = many;
               s[0].cross_block_table = t0; s[0].num_cross_blocks = 2);
    BAD_UPDATE("21", s[1].num_blocks = 1);
    BAD_UPDATE("22|21", s[1].query_len = 22);
    BAD_UPDATE("-1", s[1].query_len = -1);
    BAD_UPDATE("-21", s[1].seq_len = -21);
    BAD_UPDATE("2|3", s[1].encoder_new_len = 2);
    BAD_UPDATE("-3", s[1].encoder_len = -3);
    folio_batch_seq five[5];
    for (int i = 0; i < 5; i++) five[i] = good_seq(2);
    bad_update(f, __LINE__, five, 5, "5|4");
    /* a batch of another block size */
    folio_batch *batch = support_batch(ctx, 8);
    folio_batch_seq s = good_seq(2);
    CHECK_OK(folio_batch_add(batch, &s));
    REFUSED(folio_plan_update(f->plan, batch, NULL), ARG, "8|16");
    folio_batch_destroy(batch);
    REFUSED(folio_plan_update(f->plan, NULL, NULL), ARG, "batch");
    REFUSED(folio_plan_update(NULL, f->batch, NULL), ARG, "plan");
}

/* Released blocks: allowed exactly where no row of any attention in the plan looks. */
BACKEND_TEST(errors_plan, released_window_blocks)
{
    const struct {
        int64_t window_left;
        int32_t table[3];
        bool fine;
    } cases[] = {{7, {-1, -1, 5}, true},  /* row 39 sees 32..39 */
                 {8, {-1, -1, 5}, false}, /* and 31 */
                 {8, {-1, 4, 5}, true},    {23, {-1, 4, 5}, true},  {24, {-1, 4, 5}, false},
                 {7, {-1, -1, -1}, false}, {7, {-1, 4, -1}, false}, {-1, {-1, 4, 5}, false},
                 {7, {-2, 4, 5}, false}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_attention_desc ad = attention_desc(FOLIO_F32);
        ad.windowed = 1, ad.window_left = cases[i].window_left;
        folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
        kit_layer l = {0};
        CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
        CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
        CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_query_tokens = 1, .max_seq_len = 64));
        folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 40,
                                       .block_table = cases[i].table, .num_blocks = 3);
        REQUIRE_TEST(l.plan);
        folio_status status = folio_batch_add(l.batch, &s);
        if (status == FOLIO_OK) status = folio_plan_update(l.plan, l.batch, NULL);
        CHECK_MSG((status == FOLIO_OK) == cases[i].fine, "case %d: %s %s", i,
                  folio_status_name(status), folio_last_error());
        kit_layer_close(&l);
    }
}

/* Rows past the keys by more than the window see none: no block is needed, not even the one behind which
 * they stop looking. */
BACKEND_TEST(errors_plan, released_blocks_where_no_row_sees_a_key)
{
    const struct {
        int64_t first_query_pos;
        int32_t table[2];
        const char *refused; /* NULL: taken */
    } cases[] = {{100, {3, -1}, NULL}, {100, {-1, -1}, NULL}, {22, {3, -1}, "keys [19, 20)"},
                 {23, {-1, -1}, NULL}, {-2, {-1, 5}, NULL},   {-1, {-1, 5}, "keys [0, 1)"}};
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    ad.windowed = 1, ad.window_left = 3;
    folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
    kit_layer l = {0};
    CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
    CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
    kit_poison_cache(l.cache);
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_query_tokens = 2, .max_seq_len = 64));
    REQUIRE_TEST(l.plan != NULL);
    for (int i = 0; i < COUNT_OF(cases); i++) {
        float q[2 * HEADS * DK] = {1}, out[2 * HEADS * DV], lse[2 * HEADS];
        const int64_t nowhere[2] = {-1, -1};
        folio_batch_seq s =
            FOLIO_WITH(folio_batch_seq, .query_len = 2, .seq_len = 20,
                       .block_table = cases[i].table, .num_blocks = 2, .slots = nowhere,
                       .positions_given = 1, .first_query_pos = cases[i].first_query_pos);
        folio_batch_clear(l.batch);
        CHECK_OK(folio_batch_add(l.batch, &s));
        if (cases[i].refused != NULL) {
            CHECK_REFUSED(folio_plan_update(l.plan, l.batch, NULL), ARG, cases[i].refused);
            continue;
        }
        CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        memset(out, 0x55, sizeof out);
        folio_tensors t = FOLIO_WITH(folio_tensors, .q = {q, FOLIO_F32, 2, 0, 0},
                                     .out = {out, FOLIO_F32, 2, 0, 0}, .lse = lse);
        CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
        for (int x = 0; x < 2 * HEADS * DV; x++) CHECK(out[x] == 0.0f);
        for (int x = 0; x < 2 * HEADS; x++) CHECK(lse[x] == -INFINITY);
    }
    kit_layer_close(&l);
}

/* The longest query of one sequence is a limit of its own. */
BACKEND_TEST(errors_plan, longest_query)
{
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
    kit_layer l = {0};
    CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
    CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_seqs = 4, .max_query_tokens = 8, .max_seq_len = 64,
                            .max_query_len = 2, .flags = FOLIO_PLAN_BATCH_INVARIANT));
    REQUIRE_TEST(l.plan);
    const int32_t tables[2][1] = {{4}, {5}};
    for (int64_t i = 0; i < 2; i++) {
        folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 2 + i, .seq_len = 9,
                                       .block_table = tables[i], .num_blocks = 1);
        CHECK_OK(folio_batch_add(l.batch, &s));
        if (i == 0) CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        else
            REFUSED(folio_plan_update(l.plan, l.batch, NULL), ARG,
                    "seq 1|query_len 3|max_query_len 2");
    }
    kit_layer_close(&l);
}

/* Slots of single new tokens are places in the block table, or -1. */
BACKEND_TEST(errors_plan, private_slots)
{
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    folio_kv_cache_desc cd = cache_desc(FOLIO_F32);
    const int32_t table[] = {4, 5};
    const int64_t place = 5 * (int64_t)cd.block_size + 1;
    for (int is_private = 0; is_private <= 1; is_private++) {
        kit_layer l = {0};
        CHECK_OK(folio_attention_create(ctx, &ad, &l.attention));
        CHECK_OK(folio_kv_cache_create(ctx, &cd, &l.cache));
        CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .max_query_tokens = 2, .max_seq_len = 64,
                                .flags = is_private ? FOLIO_PLAN_PRIVATE_SLOTS : 0));
        REQUIRE_TEST(l.plan);
        for (int64_t slot = place - 2; slot <= place + 1; slot++) {
            for (int64_t rows = 1; rows <= 2; rows++) {
                const int64_t slots[] = {slot == place - 2 ? -1 : slot, slot + 1};
                folio_batch_seq s =
                    FOLIO_WITH(folio_batch_seq, .query_len = rows, .seq_len = cd.block_size + 2,
                               .block_table = table, .num_blocks = 2, .slots = slots);
                folio_batch_clear(l.batch);
                CHECK_OK(folio_batch_add(l.batch, &s));
                bool is_elsewhere = slots[0] >= 0 && slot != place;
                if (is_private && rows == 1 && is_elsewhere)
                    REFUSED(folio_plan_update(l.plan, l.batch, NULL), ARG,
                            "seq 0|slot|FOLIO_PLAN_PRIVATE_SLOTS");
                else CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
            }
        }
        kit_layer_close(&l);
    }
}

/* -------------------------------------------------------------------------------- making a plan */

#define BAD_PLAN(status, words, ...)                                                               \
    do {                                                                                           \
        folio_attention *list[NUM_ATTENTIONS] = {f->attention[0], f->attention[1]};                \
        uint32_t types[NUM_ATTENTIONS] = {15u, 1u};                                                \
        folio_plan_desc d = plan_desc(f);                                                          \
        d.attentions = list, d.types = types;                                                      \
        folio_plan *made = NOWHERE;                                                                \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_plan_create(ctx, &d, &made), status, words);                                 \
        CHECK(made == NULL);                                                                       \
    } while (0)

STEP_TEST(errors_plan, plan_create)
{
    folio_attention_desc ad = attention_desc(FOLIO_F32);
    ad.windowed = 1, ad.window_left = 4;
    folio_attention *windowed = NULL, *narrowest = NULL;
    CHECK_OK(folio_attention_create(ctx, &ad, &windowed));
    ad.window_left = 0, ad.window_right = -1; /* a token and what follows it: a window too */
    CHECK_OK(folio_attention_create(ctx, &ad, &narrowest));
    BAD_PLAN(ARG, "attentions", d.attentions = NULL);
    BAD_PLAN(ARG, "1", list[1] = NULL);
    BAD_PLAN(ARG, "0", d.num_attentions = 0);
    BAD_PLAN(ARG, "-1", d.num_attentions = -1);
    BAD_PLAN(ARG, "types|1", types[1] = 0);
    BAD_PLAN(ARG, "types", types[0] = 16u);
    BAD_PLAN(ARG, "types", types[1] = 0x80000001u);
    BAD_PLAN(ARG, "-16", d.block_size = -16);
    BAD_PLAN(ARG, "4097", d.block_size = 4097);
    BAD_PLAN(ARG, "num_blocks", d.num_blocks = 0);
    BAD_PLAN(ARG, "12", d.block_size = 0); /* blocks of no size */
    BAD_PLAN(ARG, "-12", d.num_blocks = -12);
    BAD_PLAN(ARG, "2147483648", d.num_blocks = (int64_t)1 << 31);
    BAD_PLAN(ARG, "-1", d.max_seqs = -1);
    BAD_PLAN(ARG, "-2", d.max_query_tokens = -2);
    BAD_PLAN(ARG, "-3", d.max_seq_len = -3);
    BAD_PLAN(ARG, "-4", d.max_encoder_tokens = -4);
    BAD_PLAN(ARG, "max_query_len|-5", d.max_query_len = -5);
    BAD_PLAN(ARG, "max_query_len", d.max_query_len = d.max_query_tokens + 1);
    BAD_PLAN(ARG, "flags", d.flags = 32u);
    BAD_PLAN(ARG, "flags", d.flags = 0x80000000u | FOLIO_PLAN_NO_WORKSPACE);
    BAD_PLAN(UNSUPPORTED, "window", list[0] = windowed);
    BAD_PLAN(UNSUPPORTED, "window", list[0] = narrowest);
    folio_plan_desc d = plan_desc(f);
    folio_plan *made = NOWHERE;
    REFUSED(folio_plan_create(NULL, &d, &made), ARG, "ctx");
    REFUSED(folio_plan_create(ctx, NULL, &made), ARG, "desc");
    REFUSED(folio_plan_create(ctx, &d, NULL), ARG, "out");
    size_t bytes = 77;
    REFUSED(folio_plan_get_workspace_size(NULL, &bytes), ARG, "plan");
    REFUSED(folio_plan_get_workspace_size(f->plan, NULL), ARG, "bytes");
    CHECK_INT(bytes, 77);
    folio_plan_bad_write bad = FOLIO_INIT(folio_plan_bad_write);
    REFUSED(folio_plan_get_bad_write(NULL, &bad), ARG, "plan");
    REFUSED(folio_plan_get_bad_write(f->plan, &bad), ARG, "FOLIO_PLAN_NOTE_BAD");
    folio_attention_destroy(windowed);
    folio_attention_destroy(narrowest);
}

/* Limits whose products pass 2^63: refused, or out of memory, never a small allocation. */
BACKEND_TEST(errors_plan, plan_sizes_that_near_2_63)
{
    support_counter counter = {.limit = (size_t)1 << 40};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *limited = support_context(backend, 1, &allocator);
    fixture f;
    REQUIRE_TEST(limited != NULL && setup(&f, limited));
    const int64_t sizes[] = {INT64_MAX, INT64_MAX / 2, ((int64_t)1 << 58) + 1};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        folio_plan_desc good = plan_desc(&f);
        int64_t *fields[] = {&good.max_seqs, &good.max_query_tokens, &good.max_seq_len,
                             &good.max_encoder_tokens};
        for (int j = 0; j < COUNT_OF(fields); j++) {
            int64_t before = *fields[j];
            *fields[j] = sizes[i];
            folio_plan *made = NOWHERE;
            REFUSED(folio_plan_create(limited, &good, &made), ANY_REFUSAL, "");
            CHECK(made == NULL);
            *fields[j] = before;
        }
    }
    teardown(&f);
    folio_context_destroy(limited);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}
