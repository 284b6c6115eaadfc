/*
 * test_numerics.c: scores, softmax, sinks, lse, NaN and the error budget, statement by statement as
 * docs/numerics.md has them. Expected values are written out here, in double.
 */
#include "attention/numerics_rig.h"

#include <stdlib.h>

static rig r;

/* A prompt that sees all its keys, without a cache: the plainest call there is. */
static void open_prompt(folio_context *ctx, int64_t len)
{
    rig_init(&r, ctx);
    r.kv.num_blocks = 0;
    rig_add(&r, len, len)->causality = FOLIO_CAUSAL_NO;
}

ENGINE_TEST(numerics, score_is_scale_times_dot)
{
    open_prompt(e.ctx, 6);
    r.desc.scale = 0.37f;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 6; i++) {
        for (int h = 0; h < 2; h++) {
            double denominator = 0, sum = 0;
            for (int j = 0; j < 6; j++)
                denominator += exp((double)0.37f * rig_dot(r.q[0][i][h], r.key[0][j][h], 8));
            for (int j = 0; j < 6; j++) {
                double s = (double)0.37f * rig_dot(r.q[0][i][h], r.key[0][j][h], 8);
                CHECK_NEAR(rig_score(&r, 0, i, h, j), s, 4e-6);
                CHECK_NEAR(r.out[0][i][h][j], exp(s) / denominator, 1e-6);
                sum += r.out[0][i][h][j];
            }
            CHECK_NEAR(sum, 1, 1e-6);
            for (int d = 6; d < RIG_DIM; d++) CHECK(r.out[0][i][h][d] == 0);
        }
    }
}

ENGINE_TEST(numerics, default_scale_is_of_the_k_head_size)
{
    open_prompt(e.ctx, 3);
    r.desc.k_head_size = 24;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int j = 0; j < 3; j++)
        CHECK_NEAR(rig_score(&r, 0, 1, 0, j),
                   rig_dot(r.q[0][1][0], r.key[0][j][0], 24) / sqrt(24.0), 4e-6);
}

ENGINE_TEST(numerics, soft_cap_bounds_the_score)
{
    const float caps[] = {0.25f, 3.0f, 1e6f};
    for (int c = 0; c < 3; c++) {
        open_prompt(e.ctx, 5);
        r.desc.soft_cap = caps[c];
        r.desc.scale = 2.0f;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int j = 0; j < 5; j++) {
            double s = 2 * rig_dot(r.q[0][0][0], r.key[0][j][0], 8);
            double capped = (double)caps[c] * tanh(s / (double)caps[c]);
            if (c < 2) CHECK_NEAR(rig_score(&r, 0, 0, 0, j), capped, 4e-6);
            /* Far below the cap the formula itself costs an ulp of s / cap, times cap. */
            else CHECK_NEAR(rig_score(&r, 0, 0, 0, j), s, 2e-5);
            CHECK(fabs(rig_score(&r, 0, 0, 0, j)) <= (double)caps[c] + 4e-6);
        }
    }
}

ENGINE_TEST(numerics, alibi_is_slope_times_distance)
{
    const float slopes[] = {0.5f, 0.03125f};
    for (int cached = 0; cached < 2; cached++) {
        rig_init(&r, e.ctx);
        if (!cached) r.kv.num_blocks = 0;
        /* Keys on both sides of every row, with a context where there is a cache. */
        rig_add(&r, 5, cached ? 9 : 5)->causality = FOLIO_CAUSAL_NO;
        r.desc.scale = 0.5f;
        r.t.slopes = slopes;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        int context = cached ? 4 : 0;
        for (int i = 0; i < 5; i++)
            for (int h = 0; h < 2; h++)
                for (int j = 0; j < context + 5; j++)
                    CHECK_NEAR(rig_score(&r, 0, i, h, j),
                               0.5 * rig_dot(r.q[0][i][h], r.key[0][j][h], 8) -
                                   (double)slopes[h] * abs(context + i - j),
                               4e-6);
    }
}

ENGINE_TEST(numerics, alibi_slopes_are_per_query_head)
{
    const float slopes[] = {1.0f, 0.5f, 0.25f, 0.125f};
    open_prompt(e.ctx, 4);
    r.desc.num_heads = 4;
    r.desc.num_kv_heads = 2;
    r.t.slopes = slopes;
    memset(r.q, 0, sizeof r.q);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int h = 0; h < 4; h++)
        for (int j = 0; j < 4; j++)
            CHECK_NEAR(rig_score(&r, 0, 3, h, j), -(double)slopes[h] * (3 - j), 4e-6);
}

/* The bias at [sequence][head][query][key] of the next three tests. */
static double bias_value(int64_t s, int64_t h, int64_t i, int64_t j)
{
    return (double)(float)kit_random(3, KIT_USER + 5, s, h, i, j);
}

enum { BIAS_SEQS = 2, BIAS_ROWS = 3, BIAS_KEYS = 7 };

/* Two sequences with a context; the bias dims in `full` are full size, with gaps between rows. */
static void check_bias(const rig_engine *e, unsigned full, folio_dtype dtype)
{
    rig_init(&r, e->ctx);
    rig_add(&r, 3, 7);
    rig_add(&r, 2, 5);
    memset(r.q, 0, sizeof r.q);
    const int64_t sizes[4] = {BIAS_SEQS, 2, BIAS_ROWS, BIAS_KEYS};
    const int64_t strides[4] = {200, 77, 11, 1};
    static unsigned char data[400 * 4];
    memset(data, 0xFF, sizeof data);
    r.t.bias = (folio_bias){.data = data, .dtype = dtype};
    for (int a = 0; a < 4; a++) {
        r.t.bias.dims[a] = full >> a & 1 ? sizes[a] : 1;
        /* The stride of a broadcast dim must not be used at all. */
        r.t.bias.strides[a] = full >> a & 1 ? strides[a] : (int64_t)1 << 40;
    }
    for (int64_t s = 0; s < r.t.bias.dims[0]; s++)
        for (int64_t h = 0; h < r.t.bias.dims[1]; h++)
            for (int64_t i = 0; i < r.t.bias.dims[2]; i++)
                for (int64_t j = 0; j < r.t.bias.dims[3]; j++)
                    kit_store(dtype, data, s * 200 + h * 77 + i * 11 + j, bias_value(s, h, i, j));
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int64_t s = 0; s < 2; s++) {
        for (int64_t i = 0; i < r.seqs[s].query_len; i++) {
            for (int64_t h = 0; h < 2; h++) {
                for (int64_t j = 0; j <= r.seqs[s].seq_len - r.seqs[s].query_len + i; j++) {
                    double b = bias_value(full & 1 ? s : 0, full & 2 ? h : 0, full & 4 ? i : 0,
                                          full & 8 ? j : 0);
                    char stored[8];
                    kit_store(dtype, stored, 0, b);
                    CHECK_NEAR(rig_score(&r, s, i, h, j), kit_load(dtype, stored, 0), 4e-6);
                }
            }
        }
    }
}

ENGINE_TEST(numerics, bias_is_found_by_its_four_indices) { check_bias(&e, 15, FOLIO_F32); }

ENGINE_TEST(numerics, bias_broadcasts)
{
    for (unsigned full = 0; full < 15; full++) check_bias(&e, full, FOLIO_F32);
}

ENGINE_TEST(numerics, bias_dtypes)
{
    check_bias(&e, 15, FOLIO_F16);
    check_bias(&e, 15, FOLIO_BF16);
}

ENGINE_TEST(numerics, cap_comes_before_alibi_and_bias)
{
    const float slopes[] = {4.0f, 2.0f};
    open_prompt(e.ctx, 4);
    r.desc.scale = 1.0f;
    r.desc.soft_cap = 1.5f;
    r.t.slopes = slopes;
    float bias[4] = {-3.0f, 6.0f, 1.0f, -5.0f};
    r.t.bias = (folio_bias){bias, FOLIO_F32, {1, 1, 1, 4}, {0, 0, 0, 1}};
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 4; j++)
            CHECK_NEAR(rig_score(&r, 0, 2, h, j),
                       1.5 * tanh(rig_dot(r.q[0][2][h], r.key[0][j][h], 8) / 1.5) -
                           (double)slopes[h] * abs(2 - j) + (double)bias[j],
                       8e-6);
}

ENGINE_TEST(numerics, equal_scores_average_v)
{
    open_prompt(e.ctx, 7);
    rig_random_v(&r);
    memset(r.q, 0, sizeof r.q);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int d = 0; d < RIG_DIM; d++) {
        double mean = 0;
        for (int j = 0; j < 7; j++) mean += (double)r.val[0][j][1][d] / 7;
        CHECK_NEAR(r.out[0][4][1][d], mean, 1e-6);
    }
    CHECK_NEAR(r.lse[0][4][1], log(7.0), 1e-6);
}

ENGINE_TEST(numerics, heads_of_a_group_share_a_kv_head)
{
    for (int kv_heads = 1; kv_heads <= 6; kv_heads++) {
        if (6 % kv_heads) continue;
        open_prompt(e.ctx, 5);
        r.desc.num_heads = 6;
        r.desc.num_kv_heads = kv_heads;
        r.desc.scale = 0.5f;
        /* V of kv head g is the identity times g + 1: the sum of out names the kv head. */
        for (int j = 0; j < 5; j++)
            for (int g = 0; g < kv_heads; g++) r.val[0][j][g][j] = (float)(g + 1);
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int h = 0; h < 6; h++) {
            int g = h / (6 / kv_heads);
            double sum = 0;
            for (int j = 0; j < 5; j++) sum += r.out[0][0][h][j];
            CHECK_NEAR(sum, g + 1, 1e-5);
            for (int j = 0; j < 5; j++)
                CHECK_NEAR(rig_score(&r, 0, 0, h, j) - log(g + 1),
                           0.5 * rig_dot(r.q[0][0][h], r.key[0][j][g], 8), 4e-6);
        }
    }
}

ENGINE_TEST(numerics, k_and_v_head_sizes_differ)
{
    for (int cached = 0; cached < 2; cached++) {
        rig_init(&r, e.ctx);
        if (!cached) r.kv.num_blocks = 0;
        rig_add(&r, 3, cached ? 6 : 3);
        r.desc.k_head_size = 40;
        r.desc.v_head_size = 8;
        r.desc.scale = 0.25f;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        int last = cached ? 5 : 2;
        CHECK_INT(rig_seen(&r, 0, 2, 1) & 0xFF, rig_range(0, last + 1));
        for (int j = 0; j <= last; j++)
            CHECK_NEAR(rig_score(&r, 0, 2, 1, j), 0.25 * rig_dot(r.q[0][2][1], r.key[0][j][1], 40),
                       8e-6);
    }
}

ENGINE_TEST(numerics, sink_joins_the_denominator_only)
{
    const float sinks[] = {1.25f, -INFINITY};
    open_prompt(e.ctx, 5);
    r.desc.scale = 0.5f;
    r.t.sinks = sinks;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int h = 0; h < 2; h++) {
        double denominator = exp((double)sinks[h]);
        for (int j = 0; j < 5; j++)
            denominator += exp(0.5 * rig_dot(r.q[0][1][h], r.key[0][j][h], 8));
        for (int j = 0; j < 5; j++)
            CHECK_NEAR(r.out[0][1][h][j],
                       exp(0.5 * rig_dot(r.q[0][1][h], r.key[0][j][h], 8)) / denominator, 1e-6);
        CHECK_NEAR(r.lse[0][1][h], log(denominator), 2e-6);
    }
    /* Sinks far above and far below every score. */
    const float far[][2] = {{90, -200}, {1e4f, -1e4f}};
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

ENGINE_TEST(numerics, lse_is_the_log_of_the_denominator)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 4, 30);
    r.desc.scale = 0.75f;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 4; i++) {
        for (int h = 0; h < 2; h++) {
            double denominator = 0;
            for (int j = 0; j <= 26 + i; j++)
                denominator += exp(0.75 * rig_dot(r.q[0][i][h], r.key[0][j][h], 8));
            CHECK_NEAR(r.lse[0][i][h], log(denominator), 4e-6);
        }
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
