/*
 * test_numerics.c: what random cases do not reach, statement by statement as docs/numerics.md has them: rows without
 * keys, infinities and NaN, scores far apart, rounding. The formula itself is judged by test_golden.c and `folio
 * check`.
 */
#include "attention/numerics_rig.h"

static rig r;

/* A prompt that sees all its keys, without a cache: the plainest call there is. */
static void open_prompt(folio_context *ctx, int64_t len)
{
    rig_init(&r, ctx);
    r.kv.num_blocks = 0;
    rig_add(&r, len, len)->causality = FOLIO_CAUSAL_NO;
}

ENGINE_TEST(numerics, sinks_far_above_and_far_below_every_score)
{
    const float far[][2] = {{90, -200}, {1e4f, -1e4f}};
    open_prompt(e.ctx, 5);
    for (int n = 0; n < 2; n++) {
        r.t.sinks = far[n];
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int j = 0; j < 5; j++) CHECK(r.out[0][1][0][j] >= 0 && r.out[0][1][0][j] < 1e-30);
        CHECK_NEAR(r.lse[0][1][0], far[n][0], 1e-5);
        double sum = 0;
        for (int j = 0; j < 5; j++) sum += r.out[0][1][1][j];
        CHECK_NEAR(sum, 1, 1e-6);
    }
}

ENGINE_TEST(numerics, lse_strides)
{
    open_prompt(e.ctx, 3);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    float q[3 * 2 * 8], k[3 * 2 * 8], v[3 * 2 * RIG_DIM], out[3 * 2 * RIG_DIM], lse[64];
    rig_fill(&r, FOLIO_ATTENTION_DECODER, q, k, v);
    folio_tensors t = r.t;
    t.q = (folio_tensor){.data = q, .dtype = FOLIO_F32, .tokens = 3};
    t.k = (folio_tensor){.data = k, .dtype = FOLIO_F32, .tokens = 3};
    t.v = (folio_tensor){.data = v, .dtype = FOLIO_F32, .tokens = 3};
    t.out = (folio_tensor){.data = out, .dtype = FOLIO_F32, .tokens = 3};
    t.lse = lse;
    const int64_t strides[][2] = {{0, 0}, {9, 4}, {1, 5}, {20, 3}};
    for (int n = 0; n < 4; n++) {
        for (int i = 0; i < 64; i++) lse[i] = 12345;
        t.lse_token_stride = strides[n][0];
        t.lse_head_stride = strides[n][1];
        CHECK_OK(folio_attention_forward(r.l.plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL));
        int64_t token = strides[n][0] ? strides[n][0] : 2, head = strides[n][1] ? strides[n][1] : 1;
        int touched = 0;
        for (int i = 0; i < 64; i++) touched += lse[i] != 12345;
        CHECK_INT(touched, 6);
        for (int i = 0; i < 3; i++)
            for (int h = 0; h < 2; h++) CHECK(lse[i * token + h * head] == r.lse[0][i][h]);
    }
}

/* All numbers of a row are +-0 and its lse is as given. */
static void check_empty_row(int64_t s, int64_t i, const float *sinks)
{
    for (int h = 0; h < 2; h++) {
        for (int d = 0; d < RIG_DIM; d++) CHECK(r.out[s][i][h][d] == 0);
        float lse = r.lse[s][i][h], expected = sinks ? sinks[h] : -INFINITY;
        CHECK_MSG(lse == expected, "row %d: lse %g, expected %g", (int)i, (double)lse,
                  (double)expected);
    }
}

ENGINE_TEST(numerics, rows_without_keys)
{
    const float sinks[] = {-0.75f, -INFINITY};
    for (int n = 0; n < 2; n++) {
        /* By bias: row 1 of every sequence and head. */
        rig_init(&r, e.ctx);
        rig_add(&r, 3, 9);
        float bias[3] = {0, -INFINITY, 1};
        r.t.bias = (folio_bias){bias, FOLIO_F32, {1, 1, 3, 1}, {0, 0, 1, 0}};
        r.t.sinks = n ? sinks : NULL;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_SEEN(&r, 0, 0, 0, rig_range(0, 7));
        check_empty_row(0, 1, r.t.sinks);
        CHECK_SEEN(&r, 0, 2, 0, rig_range(0, 9));
        /* By position and window: rows at 30 and 31 look back three keys, keys end at 28. */
        rig_init(&r, e.ctx);
        folio_batch_seq *seq = rig_add(&r, 2, 9);
        seq->positions_given = 1;
        seq->first_query_pos = 31;
        seq->first_key_pos = 20;
        r.desc.windowed = 1;
        r.desc.window_left = 3;
        r.t.sinks = n ? sinks : NULL;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_SEEN(&r, 0, 0, 0, rig_range(8, 9));
        check_empty_row(0, 1, r.t.sinks);
    }
}

ENGINE_TEST(numerics, padding_rows)
{
    const float sinks[] = {0.5f, 2.0f};
    for (int n = 0; n < 2; n++) {
        rig_init(&r, e.ctx);
        rig_add(&r, 2, 5);
        rig_add(&r, 3, 0);
        rig_add(&r, 1, 8);
        r.t.sinks = n ? sinks : NULL;
        for (int i = 0; i < 3; i++)
            for (int h = 0; h < 2; h++)
                r.q[1][i][h][0] = r.key[1][i][h][1] = r.val[1][i][h][2] = NAN;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_SEEN(&r, 0, 1, 0, rig_range(0, 5));
        for (int i = 0; i < 3; i++) check_empty_row(1, i, r.t.sinks);
        CHECK_SEEN(&r, 2, 0, 1, rig_range(0, 8));
    }
}

ENGINE_TEST(numerics, given_positions_hide_all_or_nothing)
{
    rig_init(&r, e.ctx);
    folio_batch_seq *seq = rig_add(&r, 2, 10);
    seq->positions_given = 1;
    seq->first_query_pos = 50;
    seq->first_key_pos = 60;
    seq = rig_add(&r, 2, 10);
    seq->positions_given = 1;
    seq->first_query_pos = 60;
    seq->first_key_pos = 50;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 2; i++) {
        CHECK_SEEN(&r, 0, i, 0, 0u);
        CHECK(r.lse[0][i][0] == -INFINITY);
        CHECK_SEEN(&r, 1, i, 0, rig_range(0, 10));
    }
}

static void check_wide_window(const rig_engine *e, int64_t left, int64_t right,
                              folio_causality causality)
{
    rig_init(&r, e->ctx);
    rig_add(&r, 8, 21)->causality = causality;
    r.desc.windowed = 1;
    r.desc.window_left = left;
    r.desc.window_right = right;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int64_t i = 0; i < 8; i++)
        CHECK_SEEN(&r, 0, i, 1, rig_range(0, causality == FOLIO_CAUSAL_NO ? 21 : 14 + i));
}

ENGINE_TEST(numerics, windows_wider_than_any_sequence)
{
    const int64_t wide[] = {(int64_t)1 << 31, ((int64_t)1 << 32) + 1, (int64_t)1 << 39};
    for (int n = 0; n < 3; n++) {
        check_wide_window(&e, wide[n], wide[n], FOLIO_CAUSAL_NO);
        check_wide_window(&e, wide[n], 0, FOLIO_CAUSAL_AUTO);
        /* And positions as far: a row sees the keys within reach of it. */
        rig_init(&r, e.ctx);
        folio_batch_seq *seq = rig_add(&r, 3, 12);
        seq->positions_given = 1;
        seq->first_query_pos = wide[n] + 7;
        seq->first_key_pos = wide[n];
        r.desc.windowed = 1;
        r.desc.window_left = 4;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int i = 0; i < 3; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(3 + i, 8 + i));
    }
}

ENGINE_TEST(numerics, released_blocks_are_not_needed)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 2, 21);
    r.desc.windowed = 1;
    r.desc.window_left = 3;
    /* Rows at 19 and 20 see from key 16 on: block 4 of size 4. */
    for (int b = 0; b < 4; b++) r.table[0][b] = FOLIO_NO_BLOCK;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    CHECK_SEEN(&r, 0, 0, 0, rig_range(16, 20));
    CHECK_SEEN(&r, 0, 1, 0, rig_range(17, 21));
    /* One token more of window and block 3 is needed. */
    r.desc.window_left = 4;
    CHECK_REFUSED(rig_run(&r, FOLIO_ATTENTION_DECODER), FOLIO_ERR_ARGUMENT, "block");
}

ENGINE_TEST(numerics, score_of_minus_infinity_is_unseen)
{
    for (int cached = 0; cached < 2; cached++) {
        rig_init(&r, e.ctx);
        if (!cached) r.kv.num_blocks = 0;
        rig_add(&r, 6, 6);
        for (int i = 0; i < 6; i++) r.q[0][i][0][0] = 1.0f;
        /* Key 2 of head 0: q.k is -inf for every row, and V is NaN. */
        r.key[0][2][0][0] = -INFINITY;
        for (int d = 0; d < RIG_DIM; d++) r.val[0][2][0][d] = d % 2 ? NAN : INFINITY;
        /* The first row of head 1 scores -inf with its only key: a row without keys. */
        r.q[0][0][1][3] = -2.0f;
        for (int i = 1; i < 6; i++) r.q[0][i][1][3] = -1.0f;
        r.key[0][0][1][3] = INFINITY;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int i = 0; i < 6; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(0, i + 1) & ~(uint64_t)4);
        CHECK_SEEN(&r, 0, 0, 1, 0u);
        CHECK(r.lse[0][0][1] == -INFINITY);
        for (int i = 1; i < 6; i++) CHECK_SEEN(&r, 0, i, 1, rig_range(1, i + 1));
    }
}

ENGINE_TEST(numerics, bias_of_minus_infinity_hides_nan)
{
    const float poisons[] = {NAN, INFINITY, -INFINITY};
    for (int n = 0; n < 3; n++) {
        rig_init(&r, e.ctx);
        rig_add(&r, 3, 10);
        /* Keys 4 and 8 are poison in K and V; the bias hides them from all rows but the last. */
        float bias[3][10] = {{0}};
        const int hidden[] = {4, 8};
        for (int x = 0; x < 2; x++) {
            for (int d = 0; d < RIG_DIM; d++)
                r.key[0][hidden[x]][0][d] = r.val[0][hidden[x]][0][d] = poisons[n];
            bias[0][hidden[x]] = bias[1][hidden[x]] = -INFINITY;
        }
        r.t.bias = (folio_bias){bias, FOLIO_F32, {1, 1, 3, 10}, {0, 0, 10, 1}};
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_SEEN(&r, 0, 0, 0, rig_range(0, 8) & ~(uint64_t)16);
        CHECK_SEEN(&r, 0, 1, 0, rig_range(0, 9) & ~(uint64_t)(16 + 256));
        for (int i = 0; i < 2; i++)
            for (int d = 0; d < RIG_DIM; d++) CHECK(isfinite(r.out[0][i][0][d]));
        if (n == 0)
            for (int d = 0; d < RIG_DIM; d++) CHECK(isnan(r.out[0][2][0][d]));
    }
}

ENGINE_TEST(numerics, nan_query_stays_in_its_row)
{
    for (int cached = 0; cached < 2; cached++) {
        rig_init(&r, e.ctx);
        if (!cached) r.kv.num_blocks = 0;
        r.desc.num_heads = 4;
        rig_add(&r, 7, cached ? 12 : 7);
        rig_add(&r, 2, 2);
        r.q[0][3][2][5] = NAN;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int s = 0; s < 2; s++) {
            for (int i = 0; i < (s ? 2 : 7); i++) {
                for (int h = 0; h < 4; h++) {
                    bool poisoned = s == 0 && i == 3 && h == 2;
                    CHECK_INT(isnan(r.lse[s][i][h]) != 0, poisoned);
                    for (int d = 0; d < RIG_DIM; d++)
                        CHECK_INT(isnan(r.out[s][i][h][d]) != 0, poisoned);
                }
            }
        }
    }
}

ENGINE_TEST(numerics, out_is_rounded_once)
{
    /* One key has weight 1, so out is V of the F32 cache rounded to q's type. */
    const struct {
        folio_dtype dtype;
        double in, out;
    } cases[] = {
        {FOLIO_BF16, 1 + 0x1p-8, 1},
        {FOLIO_BF16, 1 + 3 * 0x1p-8, 1 + 0x1p-6},
        {FOLIO_BF16, 1 + 0x1.0002p-8, 1 + 0x1p-7},
        {FOLIO_BF16, -1 - 0x1p-8, -1},
        {FOLIO_F16, 1 + 0x1p-11, 1},
        {FOLIO_F16, 1 + 3 * 0x1p-11, 1 + 0x1p-9},
        {FOLIO_F16, 0x1p-25, 0},
        {FOLIO_F16, 3 * 0x1p-25, 0x1p-23},
        {FOLIO_F16, 65519, 65504},
        {FOLIO_F16, 65520, INFINITY},
        {FOLIO_F32, 1 + 0x1p-23, 1 + 0x1p-23},
    };
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        rig_init(&r, e.ctx);
        rig_add(&r, 1, 1);
        r.desc.dtype = cases[n].dtype;
        r.desc.kv_dtype = FOLIO_F32;
        r.no_kv = true;
        r.val[0][0][0][9] = (float)cases[n].in;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_MSG(r.out[0][0][0][9] == cases[n].out, "%s: %.9g became %.9g, expected %.9g",
                  folio_dtype_name(cases[n].dtype), cases[n].in, r.out[0][0][0][9], cases[n].out);
    }
}

ENGINE_TEST(numerics, sums_are_f32_or_better)
{
    const folio_dtype dtypes[] = {FOLIO_F16, FOLIO_BF16};
    for (int n = 0; n < 2; n++) {
        /* 64 products of which each is lost next to the first in 16 bits; lse shows the sum. */
        rig_init(&r, e.ctx);
        rig_add(&r, 1, 1);
        r.desc.dtype = dtypes[n];
        r.desc.k_head_size = 64;
        r.desc.scale = 1.0f;
        for (int d = 0; d < 64; d++) r.q[0][0][0][d] = r.key[0][0][0][d] = d ? 0.125f : 32.0f;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        CHECK_NEAR(r.lse[0][0][0], 1024 + 63.0 / 64, 1e-3);
    }
    /* The sum over V, seen in F32: 64 equal weights on numbers of 8 significant bits. */
    rig_init(&r, e.ctx);
    rig_add(&r, 1, 64);
    r.desc.kv_dtype = FOLIO_BF16;
    memset(r.q, 0, sizeof r.q);
    for (int j = 0; j < 64; j++) r.val[0][j][0][0] = j ? 1.0f + 0x1p-7f : 128.0f;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    CHECK_NEAR(r.out[0][0][0][0], (128 + 63 * (1 + 0x1p-7)) / 64, 2e-6);
}

ENGINE_TEST(numerics, reference_is_double)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 1, 40);
    r.desc.scale = 0.3f;
    r.t.out.dtype = FOLIO_F64;
    if (!e.reference) {
        CHECK(rig_run(&r, FOLIO_ATTENTION_DECODER) != FOLIO_OK);
        return;
    }
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    double denominator = 0;
    for (int j = 0; j < 40; j++)
        denominator += exp((double)0.3f * rig_dot(r.q[0][0][0], r.key[0][j][0], 8));
    for (int j = 0; j < 40; j++)
        CHECK_NEAR(r.out[0][0][0][j],
                   exp((double)0.3f * rig_dot(r.q[0][0][0], r.key[0][j][0], 8)) / denominator,
                   1e-14);
}

/* Scores that f32 holds exactly (one number in q and in K): what is left is exp and the sums. */
static void check_exact_scores(const rig_engine *e, const float *scores, int n)
{
    rig_init(&r, e->ctx);
    rig_add(&r, 1, n);
    r.desc.scale = 1.0f;
    memset(r.q, 0, sizeof r.q);
    r.q[0][0][0][0] = 1.0f;
    double top = -INFINITY, denominator = 0;
    for (int j = 0; j < n; j++) {
        r.key[0][j][0][0] = scores[j];
        if ((double)scores[j] > top) top = (double)scores[j];
    }
    for (int j = 0; j < n; j++) denominator += exp((double)scores[j] - top);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int j = 0; j < n; j++)
        CHECK_NEAR(r.out[0][0][0][j], exp((double)scores[j] - top) / denominator, 3e-7);
    CHECK_NEAR(r.lse[0][0][0], top + log(denominator), 1e-6 + 1.2e-7 * fabs(top));
}

ENGINE_TEST(numerics, growing_maximum_stays_in_budget)
{
    const float steps[] = {0.01f, 0.7f, 1.0f, 5.0f, 11.0f, 160.0f, -0.7f, -160.0f, 1e6f, -1e6f};
    for (size_t n = 0; n < sizeof steps / sizeof steps[0]; n++) {
        float scores[64];
        for (int j = 0; j < 64; j++) scores[j] = (float)(j - 32) * steps[n];
        check_exact_scores(&e, scores, 64);
        /* Up and down again: the maximum in the middle. */
        for (int j = 0; j < 64; j++) scores[j] = (float)(j < 32 ? j : 64 - j) * steps[n];
        check_exact_scores(&e, scores, 64);
    }
}

ENGINE_TEST(numerics, extreme_scores_stay_in_budget)
{
    /* Differences from 0 down to where exp ends: every decade, at +-80 and +-10000. */
    const float bases[] = {0, 80, -80, 10000, -10000};
    for (int b = 0; b < 5; b++) {
        float scores[64];
        for (int j = 0; j < 64; j++)
            scores[j] = bases[b] - (float)(j * j) * 0.03125f; /* down to base - 124 */
        check_exact_scores(&e, scores, 64);
    }
    kit_seq seqs[] = {{.query_len = 13, .seq_len = 40}, {.query_len = 1, .seq_len = 70}};
    const double amplitudes[] = {1, 15, 2000};
    const float caps[] = {0, 0.01f, 30, 1e6f};
    for (int a = 0; a < 3; a++) {
        for (int c = 0; c < 4; c++) {
            kit_spec spec = {.seed = 11, .amplitude = amplitudes[a], .soft_cap = caps[c]};
            kit_verdict verdict;
            CHECK_MSG(kit_check(e.ctx, NULL, &spec, FOLIO_ATTENTION_DECODER, seqs, 2, &verdict),
                      "%s amplitude %g cap %g: %s", e.name, amplitudes[a], (double)caps[c],
                      verdict.message);
        }
    }
}
