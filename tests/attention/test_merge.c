/*
 * test_merge.c: attention over parts of the keys merged into attention over all of them, and the
 * matrix folio_bias_write makes against the options it stands for. Parts of any weights against the formula are
 * check.lse_merge.
 */
#include "attention/numerics_rig.h"
#include "support.h"

#include <stdlib.h>

enum { TOKENS = 7, HEADS = 3, SIZE = 8, MAX_PARTS = 7, KEYS = 40 };

/* ---- Parts by the formula ------------------------------------------------------------------- */

/* Attention of random scores over random V, over keys [from, to) of all rows. */
typedef struct {
    float out[TOKENS][HEADS][SIZE];
    float lse[TOKENS][HEADS];
} part;

/* Scores reach over `spread`, so that parts differ in weight. */
static void make_part(part *p, int from, int to, double spread)
{
    for (int i = 0; i < TOKENS; i++) {
        for (int h = 0; h < HEADS; h++) {
            double top = -(double)INFINITY, sum = 0, out[SIZE] = {0};
            double scores[KEYS];
            for (int j = from; j < to; j++) {
                scores[j] =
                    spread * (double)support_random(1, (uint64_t)((i * HEADS + h) * KEYS + j));
                if (scores[j] > top) top = scores[j];
            }
            for (int j = from; j < to; j++) {
                sum += exp(scores[j] - top);
                for (int d = 0; d < SIZE; d++)
                    out[d] += exp(scores[j] - top) *
                              (double)support_random(2, (uint64_t)((j * HEADS + h) * SIZE + d));
            }
            for (int d = 0; d < SIZE; d++) p->out[i][h][d] = sum == 0 ? 0 : (float)(out[d] / sum);
            p->lse[i][h] = sum == 0 ? -INFINITY : (float)(top + log(sum));
        }
    }
}

static folio_state state_of(part *p)
{
    return (folio_state){.out = {.data = p->out, .dtype = FOLIO_F32, .tokens = TOKENS},
                         .lse = &p->lse[0][0]};
}

static folio_status merge(folio_context *ctx, const folio_state *states, int64_t n, part *result)
{
    memset(result, 0xFF, sizeof *result);
    folio_merge m = FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = SIZE, .num_parts = n,
                               .parts = states,
                               .out = {.data = result->out, .dtype = FOLIO_F32, .tokens = TOKENS},
                               .lse = &result->lse[0][0]);
    return folio_state_merge(ctx, &m, NULL);
}

static void check_close(const part *got, const part *expected, double tolerance)
{
    for (int i = 0; i < TOKENS; i++) {
        for (int h = 0; h < HEADS; h++) {
            double slack = 1 + fabs((double)expected->lse[i][h]);
            CHECK_NEAR(got->lse[i][h], expected->lse[i][h], tolerance * slack);
            for (int d = 0; d < SIZE; d++)
                CHECK_NEAR(got->out[i][h][d], expected->out[i][h][d], tolerance);
        }
    }
}

/* KEYS keys in n parts of unequal length. */
static void cut(part *parts, folio_state *states, int n, double spread)
{
    for (int p = 0; p < n; p++) {
        int from = p * p * KEYS / (n * n), to = (p + 1) * (p + 1) * KEYS / (n * n);
        make_part(&parts[p], from, to, spread);
        states[p] = state_of(&parts[p]);
    }
}

BACKEND_TEST(merge, one_part_is_itself)
{
    part whole, got;
    make_part(&whole, 0, KEYS, 3);
    folio_state state = state_of(&whole);
    CHECK_OK(merge(ctx, &state, 1, &got));
    check_close(&got, &whole, 1.2e-7);
}

/* The fold goes from the first part to the last whoever runs it, and a row does not see others. */
TEST(merge, order_is_fixed)
{
    static part parts[MAX_PARTS], first, got;
    folio_state states[MAX_PARTS];
    cut(parts, states, 6, 10);
    for (int32_t threads = 1; threads <= 8; threads++) {
        folio_context *ctx = support_context("cpu", threads, NULL);
        REQUIRE_TEST(ctx);
        for (int n = 0; n < 5; n++) {
            CHECK_OK(merge(ctx, states, 6, &got));
            if (threads == 1 && n == 0) first = got;
            CHECK(memcmp(&got, &first, sizeof got) == 0);
        }
        /* Each row alone. */
        for (int i = 0; i < TOKENS; i++) {
            folio_state one[MAX_PARTS];
            for (int p = 0; p < 6; p++) {
                one[p] = states[p];
                one[p].out.data = parts[p].out[i];
                one[p].out.tokens = 1;
                one[p].lse = parts[p].lse[i];
            }
            folio_merge m = FOLIO_WITH(
                folio_merge, .num_heads = HEADS, .head_size = SIZE, .num_parts = 6, .parts = one,
                .out = {.data = got.out, .dtype = FOLIO_F32, .tokens = 1}, .lse = &got.lse[0][0]);
            CHECK_OK(folio_state_merge(ctx, &m, NULL));
            CHECK(memcmp(got.out[0], first.out[i], sizeof got.out[0]) == 0);
            CHECK(memcmp(got.lse[0], first.lse[i], sizeof got.lse[0]) == 0);
        }
        folio_context_destroy(ctx);
    }
}

BACKEND_TEST(merge, nan_stays_in_its_row)
{
    part parts[3], got, clean;
    folio_state states[3];
    cut(parts, states, 3, 3);
    CHECK_OK(merge(ctx, states, 3, &clean));
    parts[1].lse[2][1] = NAN;
    parts[2].out[4][0][3] = NAN;
    CHECK_OK(merge(ctx, states, 3, &got));
    for (int i = 0; i < TOKENS; i++) {
        for (int h = 0; h < HEADS; h++) {
            bool row = i == 2 && h == 1, number = i == 4 && h == 0;
            if (row) CHECK(isnan(got.lse[i][h]));
            else CHECK(got.lse[i][h] == clean.lse[i][h]);
            for (int d = 0; d < SIZE; d++) {
                if (row || (number && d == 3)) CHECK(isnan(got.out[i][h][d]));
                else CHECK(got.out[i][h][d] == clean.out[i][h][d]);
            }
        }
    }
}

BACKEND_TEST(merge, weights_far_apart)
{
    /* exp(lse) of one part is nothing next to the other's, in both orders, at both ends of f32. */
    const float far[][2] = {
        {1e4f, -1e4f}, {-1e4f, 1e4f}, {3e38f, -3e38f}, {-3e38f, 3e38f}, {0, 200}};
    for (int n = 0; n < 5; n++) {
        part parts[2], got;
        make_part(&parts[0], 0, 25, 3);
        make_part(&parts[1], 25, KEYS, 3);
        for (int i = 0; i < TOKENS * HEADS; i++)
            for (int p = 0; p < 2; p++) (&parts[p].lse[0][0])[i] = far[n][p];
        folio_state states[2] = {state_of(&parts[0]), state_of(&parts[1])};
        CHECK_OK(merge(ctx, states, 2, &got));
        check_close(&got, &parts[far[n][0] > far[n][1] ? 0 : 1], 1.2e-7);
    }
}

/* Parts and result with gaps, in every pair of types; guards around all of it. */
BACKEND_TEST(merge, strides_and_dtypes)
{
    const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    for (int n = 0; n < 9; n++) {
        folio_dtype in = dtypes[n / 3], to = dtypes[n % 3];
        part parts[2], rounded[2], expected;
        folio_state states[2], flat[2];
        support_buffer memory[2], out = support_buffer_make(TOKENS * 60 * 4);
        support_buffer lses = support_buffer_make(TOKENS * 11 * 4);
        cut(parts, flat, 2, 3);
        for (int p = 0; p < 2; p++) {
            int64_t head = SIZE + 3, token = HEADS * head + 5 + p;
            memory[p] = support_buffer_make((size_t)(TOKENS * token) * folio_dtype_size(in));
            rounded[p] = parts[p];
            for (int64_t i = 0; i < TOKENS * HEADS * SIZE; i++) {
                int64_t at = i / (HEADS * SIZE) * token + i / SIZE % HEADS * head + i % SIZE;
                kit_store(in, memory[p].data, at, (double)(&parts[p].out[0][0][0])[i]);
                (&rounded[p].out[0][0][0])[i] = (float)kit_load(in, memory[p].data, at);
            }
            flat[p] = state_of(&rounded[p]);
            states[p] = flat[p];
            states[p].out = (folio_tensor){memory[p].data, in, TOKENS, token, head};
        }
        CHECK_OK(merge(ctx, flat, 2, &expected));
        folio_merge m =
            FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = SIZE, .num_parts = 2,
                       .parts = states, .out = {out.data, to, TOKENS, 60, 13}, .lse = lses.data,
                       .lse_token_stride = 11, .lse_head_stride = 4);
        CHECK_OK(folio_state_merge(ctx, &m, NULL));
        for (int64_t i = 0; i < TOKENS * HEADS * SIZE; i++) {
            int64_t at = i / (HEADS * SIZE) * 60 + i / SIZE % HEADS * 13 + i % SIZE;
            double got = kit_load(to, out.data, at);
            double want = (double)(&expected.out[0][0][0])[i];
            CHECK_NEAR(got, want, 0.51 * kit_ulp(to, want) + (to == FOLIO_F32 ? 1e-7 : 0));
            kit_store(to, out.data, at, (double)NAN);
        }
        for (int i = 0; i < TOKENS * HEADS; i++)
            CHECK(((float *)lses.data)[i / HEADS * 11 + i % HEADS * 4] == (&expected.lse[0][0])[i]);
        support_buffer_free(&memory[0]);
        support_buffer_free(&memory[1]);
        support_buffer_free(&out);
        support_buffer_free(&lses);
    }
}

BACKEND_TEST(merge, result_in_the_place_of_a_part)
{
    for (int at = 0; at < 3; at++) {
        part parts[3], expected;
        folio_state states[3];
        cut(parts, states, 3, 3);
        CHECK_OK(merge(ctx, states, 3, &expected));
        folio_merge m = FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = SIZE,
                                   .num_parts = 3, .parts = states, .out = states[at].out);
        CHECK_OK(folio_state_merge(ctx, &m, NULL));
        CHECK(memcmp(parts[at].out, expected.out, sizeof expected.out) == 0);
    }
}

/* ---- Parts by the library ------------------------------------------------------------------- */

static rig r;

/* Rows and lse of sequence 0 as a part to merge. */
typedef struct {
    float out[5][2][RIG_DIM];
    float lse[5][2];
} rig_part;

static void take_part(rig_part *p)
{
    for (int i = 0; i < 5; i++) {
        for (int h = 0; h < 2; h++) {
            p->lse[i][h] = r.lse[0][i][h];
            for (int d = 0; d < RIG_DIM; d++) p->out[i][h][d] = (float)r.out[0][i][h][d];
        }
    }
}

/* Five rows at 43..47 over 48 keys in blocks of 4, against parts [0, a), [a, b), [b, 48). */
ENGINE_TEST(merge, cache_parts_equal_whole)
{
    const int64_t edges[][4] = {{0, 24, 40, 48}, {0, 8, 16, 48}, {0, 28, 36, 48}};
    const float slopes[] = {0.25f, 0.03125f}, sinks[] = {0.5f, -1};
    static rig_part parts[3], whole;
    for (int n = 0; n < 12; n++) {
        rig_init(&r, e.ctx);
        rig_random_v(&r);
        rig_add(&r, 5, 48);
        r.no_kv = true;
        r.desc.soft_cap = n / 3 == 1 ? 2.5f : 0;
        r.desc.windowed = n / 3 == 2;
        r.desc.window_left = 13; /* the first part is then empty for some rows, or for all */
        if (n / 3 == 3) r.t.slopes = slopes;
        r.t.sinks = sinks;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        take_part(&whole);
        int32_t table[16];
        memcpy(table, r.table[0], sizeof table);
        folio_state states[3];
        for (int p = 0; p < 3; p++) {
            const int64_t *edge = edges[n % 3];
            for (int64_t b = 0; b < (edge[p + 1] - edge[p]) / 4; b++)
                r.table[0][b] = table[edge[p] / 4 + b];
            r.seqs[0].seq_len = edge[p + 1] - edge[p];
            r.seqs[0].positions_given = 1;
            r.seqs[0].first_query_pos = 43;
            r.seqs[0].first_key_pos = edge[p];
            r.t.sinks = p == 1 ? sinks : NULL;
            CHECK_OK(rig_replan(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
            CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
            take_part(&parts[p]);
            states[p] = (folio_state){.out = {parts[p].out, FOLIO_F32, 5, 0, 0},
                                      .lse = &parts[p].lse[0][0]};
        }
        rig_part got;
        folio_merge m = FOLIO_WITH(folio_merge, .num_heads = 2, .head_size = RIG_DIM,
                                   .num_parts = 3, .parts = states,
                                   .out = {got.out, FOLIO_F32, 5, 0, 0}, .lse = &got.lse[0][0]);
        CHECK_OK(folio_state_merge(e.ctx, &m, NULL));
        for (int i = 0; i < 5; i++) {
            for (int h = 0; h < 2; h++) {
                CHECK_NEAR(got.lse[i][h], whole.lse[i][h], 2e-6);
                for (int d = 0; d < RIG_DIM; d++)
                    CHECK_NEAR(got.out[i][h][d], whole.out[i][h][d], 2e-6);
            }
        }
    }
}

/* ---- The bias matrix ------------------------------------------------------------------------ */

typedef struct {
    folio_attention_type type;
    folio_causality causality;
    int windowed;
    int64_t left, right;
    bool slopes, positions;
} bias_case;

static const bias_case bias_cases[] = {
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_AUTO, 0, 0, 0, false, false},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_AUTO, 0, 0, 0, true, false},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_AUTO, 1, 4, 3, true, false},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_NO, 1, 4, 3, true, false},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_NO, 1, -1, 2, false, false},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_YES, 1, 6, -1, true, true},
    {FOLIO_ATTENTION_DECODER, FOLIO_CAUSAL_NO, 1, 3, -1, false, true},
    {FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_CAUSAL_AUTO, 1, 2, 1, true, false},
    {FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_CAUSAL_AUTO, 0, 0, 0, true, false},
    {FOLIO_ATTENTION_ENCODER, FOLIO_CAUSAL_AUTO, 1, 3, 0, true, false},
    {FOLIO_ATTENTION_ENCODER_DECODER, FOLIO_CAUSAL_AUTO, 0, 0, 0, false, false},
};

/* Sequence 1 of two is the one looked at: 6 rows, 15 keys; its encoder has 9 tokens. */
static void open_bias_case(folio_context *ctx, const bias_case *c)
{
    rig_init(&r, ctx);
    rig_add(&r, 3, 8);
    folio_batch_seq *seq = rig_add(&r, 6, 15);
    seq->causality = c->causality;
    seq->encoder_len = seq->encoder_new_len = 9;
    seq->positions_given = c->positions;
    seq->first_query_pos = 30;
    seq->first_key_pos = 24;
    r.desc.windowed = c->windowed;
    r.desc.window_left = c->left;
    r.desc.window_right = c->right;
}

static void bias_dims(const bias_case *c, int64_t *rows, int64_t *keys)
{
    *rows = c->type == FOLIO_ATTENTION_ENCODER ? 9 : 6;
    *keys = c->type == FOLIO_ATTENTION_DECODER        ? 15
            : c->type == FOLIO_ATTENTION_ENCODER_ONLY ? 6
                                                      : 9;
}

static const float bias_slopes[] = {0.5f, 0.3f};

BACKEND_TEST(merge, bias_matrix_needs_its_room)
{
    open_bias_case(ctx, &bias_cases[0]);
    CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
    float matrix[2 * 6 * 15];
    memset(matrix, 0xFF, sizeof matrix);
    REFUSED(folio_bias_write(r.l.attention, r.l.batch, FOLIO_ATTENTION_DECODER, 1, NULL, matrix,
                             2 * 6 * 15 - 1),
            FOLIO_ERR_ARGUMENT, "179");
    REFUSED(folio_bias_write(r.l.attention, r.l.batch, FOLIO_ATTENTION_DECODER, 2, NULL, matrix,
                             2 * 6 * 15),
            FOLIO_ERR_ARGUMENT, "2");
    CHECK(support_is_poison(matrix, sizeof matrix));
    rig_close(&r);
}

/* The matrix as explicit bias of an attention without mask gives what the options gave. */
ENGINE_TEST(merge, bias_matrix_replaces_options)
{
    static rig options;
    for (int n = 0; n < COUNT_OF(bias_cases); n++) {
        const bias_case *c = &bias_cases[n];
        open_bias_case(e.ctx, c);
        r.desc.soft_cap = n % 2 ? 3 : 0;
        r.t.slopes = c->slopes ? bias_slopes : NULL;
        CHECK_OK(rig_run(&r, c->type));
        int64_t rows, keys;
        bias_dims(c, &rows, &keys);
        static float matrix[2][2 * 9 * 15];
        CHECK_OK(folio_bias_write(r.l.attention, r.l.batch, c->type, 1, r.t.slopes, matrix[1],
                                  2 * rows * keys));
        memcpy(&options, &r, sizeof r);
        open_bias_case(e.ctx, c);
        r.desc.soft_cap = n % 2 ? 3 : 0;
        r.desc.windowed = 0;
        r.seqs[1].causality = FOLIO_CAUSAL_NO;
        r.t.bias =
            (folio_bias){matrix,
                         FOLIO_F32,
                         {2, 2, rows, keys},
                         {(int64_t)(sizeof matrix[0] / sizeof(float)), rows * keys, keys, 1}};
        CHECK_OK(rig_run(&r, c->type));
        for (int64_t i = 0; i < rows; i++) {
            for (int h = 0; h < 2; h++) {
                float got = r.lse[1][i][h], want = options.lse[1][i][h];
                CHECK(got == want || fabsf(got - want) <= 4e-6f);
                for (int d = 0; d < RIG_DIM; d++)
                    CHECK_NEAR(r.out[1][i][h][d], options.out[1][i][h][d], 1e-6);
            }
        }
    }
}
