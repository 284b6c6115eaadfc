/*
 * test_rotary.c: rotary embedding. Rows of k against the formula in float64, for every scaling, pairing and choice of
 * dims; the same bits whole, in pieces, appended and stored by a call; NaN; positions; bad input. A forward against one
 * whose q and k were rotated before: `folio check --filter rotary`.
 */
#include "api/errors_rig.h"

#include <math.h>

enum { SIZE = 64 };

/* ---------------------------------------------------------------------------------- the formula */

/* A ramp from 0 at `low` to 1 at `high`. */
static double ramp(double x, double low, double high)
{
    return x <= low ? 0 : x >= high ? 1 : (x - low) / (high - low);
}

/* As the papers say it: a pair's wavelength decides how much of the scaling it gets. */
static double expected_frequency(const folio_rotary_desc *d, int pair)
{
    const double pi = 3.14159265358979323846;
    double theta = d->theta != 0 ? d->theta : 1e4, n = d->num_dims, s = d->factor;
    double f = pow(theta, -2.0 * pair / n), waves = (double)d->original_len * f / (2 * pi), kept;
    switch (d->scaling) {
    case FOLIO_ROTARY_SCALE_NONE: return f;
    case FOLIO_ROTARY_SCALE_LINEAR: return f / s;
    case FOLIO_ROTARY_SCALE_NTK: return pow(theta * pow(s, n / (n - 2)), -2.0 * pair / n);
    case FOLIO_ROTARY_SCALE_LLAMA3:
        kept = ramp(waves, d->low_freq_factor != 0 ? d->low_freq_factor : 1,
                    d->high_freq_factor != 0 ? d->high_freq_factor : 4);
        break;
    case FOLIO_ROTARY_SCALE_YARN: {
        double fast = d->beta_fast != 0 ? d->beta_fast : 32;
        double slow = d->beta_slow != 0 ? d->beta_slow : 1;
        double low = n / 2 * log((double)d->original_len / (2 * pi * fast)) / log(theta);
        double high = n / 2 * log((double)d->original_len / (2 * pi * slow)) / log(theta);
        if (!d->exact_bounds) low = floor(low), high = ceil(high);
        kept = 1 - ramp(pair, low < 0 ? 0 : low, high > n - 1 ? n - 1 : high);
        break;
    }
    default: return NAN;
    }
    return kept * f + (1 - kept) * f / s;
}

static double expected_magnitude(const folio_rotary_desc *d)
{
    if (d->magnitude != 0) return d->magnitude;
    return d->scaling == FOLIO_ROTARY_SCALE_YARN ? 1 + 0.1 * log(d->factor) : 1;
}

/* Rows of f32, one head each, as a cache has them after a write with the rotary. */
static void store_rotated(folio_context *ctx, const folio_rotary *rotary, const int64_t *positions,
                          float (*rows)[SIZE], int n)
{
    folio_kv_cache *cache = NULL;
    int64_t slots[32];
    for (int i = 0; i < n; i++) slots[i] = n - 1 - i;
    CHECK_OK(folio_kv_cache_create(ctx,
                                   &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 2,
                                               .num_layers = 1, .block_size = 16, .num_kv_heads = 1,
                                               .k_head_size = SIZE, .dtype = FOLIO_F32),
                                   &cache));
    CHECK_OK(folio_kv_cache_write(cache, 0,
                                  &FOLIO_WITH(folio_kv_write, .k = {rows, FOLIO_F32, n, 0, 0},
                                              .v = {rows, FOLIO_F32, n, 0, 0}, .slots = slots,
                                              .rotary = rotary, .positions = positions),
                                  NULL));
    CHECK_OK(folio_kv_cache_gather(cache, 0,
                                   &FOLIO_WITH(folio_kv_gather, .k = {rows, FOLIO_F32, n, 0, 0},
                                               .slots = slots, .num_slots = n),
                                   NULL));
    folio_kv_cache_destroy(cache);
}

static void check_formula(folio_context *ctx, const folio_rotary_desc *d, const int64_t *positions,
                          int n)
{
    float rows[32][SIZE], turned[32][SIZE];
    folio_rotary *rotary = NULL;
    support_fill(rows[0], 32 * SIZE, 5, 1.0f);
    memcpy(turned, rows, sizeof rows);
    CHECK_OK(folio_rotary_create(ctx, d, &rotary));
    if (rotary == NULL) return;
    store_rotated(ctx, rotary, positions, turned, n);
    double magnitude = expected_magnitude(d);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < SIZE; i++) {
            int at = i - d->first_dim, half = d->num_dims / 2;
            double want = (double)rows[r][i], room = 0;
            if (at >= 0 && at < d->num_dims) {
                int pair = d->pairing ? at / 2 : at % half;
                int x = d->first_dim + (d->pairing ? 2 * pair : pair),
                    y = x + (d->pairing ? 1 : half);
                double a = (double)positions[r] * expected_frequency(d, pair);
                double u = (double)rows[r][x], v = (double)rows[r][y];
                want = magnitude * (i == x ? u * cos(a) - v * sin(a) : v * cos(a) + u * sin(a));
                room = 2e-7 * magnitude * (fabs(u) + fabs(v)) + 1e-9;
            }
            CHECK_MSG(
                fabs((double)turned[r][i] - want) <= room,
                "scaling %d, pairing %d, dims [%d, %d), position %lld, dim %d: %.9g, not %.9g",
                (int)d->scaling, (int)d->pairing, d->first_dim, d->first_dim + d->num_dims,
                (long long)positions[r], i, (double)turned[r][i], want);
        }
    folio_rotary_destroy(rotary);
}

BACKEND_TEST(rotary, every_scaling_pairing_and_choice_of_dims)
{
    static const int64_t positions[] = {0, 1, 2, 3, 17, 255, 1023, 2047, 1024, 100};
    static const int32_t dims[][2] = {{0, 64}, {0, 32}, {16, 48}, {3, 10}, {62, 2}};
    for (int s = 0; s <= 2 * FOLIO_ROTARY_SCALE_LLAMA3; s++)
        for (int pairing = 0; pairing < 2; pairing++)
            for (int i = 0; i < COUNT_OF(dims); i++) {
                folio_rotary_desc d =
                    FOLIO_WITH(folio_rotary_desc, .first_dim = dims[i][0], .num_dims = dims[i][1],
                               .pairing = (folio_rotary_pairing)pairing, .num_positions = 2048,
                               .scaling = (folio_rotary_scaling)((s + 1) / 2),
                               .factor = s % 2 ? 4 : 2.5, .original_len = 256);
                if (s % 2 == 0 && s > 0) { /* nothing by default */
                    d.theta = 500000, d.magnitude = 0.75, d.exact_bounds = 1;
                    d.low_freq_factor = 0.5, d.high_freq_factor = 8;
                    d.beta_fast = 20, d.beta_slow = 2;
                }
                if (d.scaling == FOLIO_ROTARY_SCALE_NTK && d.num_dims == 2) continue;
                check_formula(ctx, &d, positions, COUNT_OF(positions));
            }
}

/* Angles of f32 would be off by 2^-24 of some 10^5 turns. */
BACKEND_TEST(rotary, angles_are_made_in_float64)
{
    static const int64_t positions[] = {131071, 131070, 100003, 65536};
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = 8, .num_positions = 131072);
    check_formula(ctx, &d, positions, COUNT_OF(positions));
    d.pairing = FOLIO_ROTARY_PAIRS;
    check_formula(ctx, &d, positions, COUNT_OF(positions));
}

BACKEND_TEST(rotary, frequencies_and_tables_are_as_good_as_theta)
{
    enum { N = 24, POSITIONS = 40 };
    double frequencies[N / 2];
    static float table[2][POSITIONS][N / 2], rows[3][32][SIZE];
    int64_t positions[32];
    folio_rotary *rotary[3] = {NULL};
    for (int i = 0; i < N / 2; i++) frequencies[i] = 1.0 / pow(1e4, 2.0 * i / N);
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < N / 2; i++) {
            table[0][p][i] = (float)cos(p * frequencies[i]);
            table[1][p][i] = (float)sin(p * frequencies[i]);
        }
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = N, .num_positions = POSITIONS);
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary[0]));
    d.frequencies = frequencies;
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary[1]));
    d.frequencies = NULL, d.cos = table[0][0], d.sin = table[1][0];
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary[2]));
    memset(table, 0, sizeof table); /* copied */
    for (int i = 0; i < 32; i++) positions[i] = i * 5 % POSITIONS;
    for (int k = 0; k < 3; k++) {
        support_fill(rows[k][0], 32 * SIZE, 6, 1.0f);
        store_rotated(ctx, rotary[k], positions, rows[k], 32);
        CHECK(memcmp(rows[k], rows[0], sizeof rows[0]) == 0);
        folio_rotary_destroy(rotary[k]);
    }
}

/* ------------------------------------------------------------------------------------- forwards */

/* Whole, in pieces, token by token; stored by the forward, or appended and stored by a call. */
BACKEND_TEST(rotary, rows_have_the_same_bits_in_any_pieces)
{
    static const int64_t whole[] = {45}, pieces[] = {13, 1, 16, 15},
                         ones[45] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                     1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                     1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const kit_seq crowd[] = {{.id = 7, .query_len = 9, .seq_len = 9}};
    for (int i = 0; i < 6; i++) {
        kit_spec s = {.seed = 90,
                      .num_heads = 4,
                      .num_kv_heads = 2,
                      .k_head_size = 64,
                      .dtype = i % 2 ? FOLIO_BF16 : FOLIO_F32,
                      .rotary = 48,
                      .rotary_first = i % 3 * 8,
                      .rotary_pairing = (folio_rotary_pairing)(i / 3),
                      .positions = i == 4};
        kit_seq seq = {.id = 1, .query_len = 45, .seq_len = 75};
        kit_result first = {0}, r = {0};
        const int64_t *const cuts[] = {whole, pieces, ones};
        const int64_t nums[] = {1, COUNT_OF(pieces), COUNT_OF(ones)};
        for (int k = 0; k < 6; k++) {
            s.append = k >= 3;
            bool ok = kit_run_pieces(ctx, &s, FOLIO_ATTENTION_DECODER, &seq, cuts[k % 3],
                                     nums[k % 3], crowd, k % 2, false, k == 0 ? &first : &r);
            CHECK_MSG(ok, "%s", kit_error());
            if (k > 0)
                CHECK_MSG(ok && kit_rows_equal(&first, 0, &r, 0, 45), "case %d, way %d", i, k);
            kit_result_free(&r);
        }
        kit_result_free(&first);
    }
}

BACKEND_TEST(rotary, nan_stays_in_its_pair)
{
    enum { ROWS = 20 };
    float rows[32][SIZE];
    int64_t positions[32];
    folio_rotary *rotary = NULL;
    for (int pairing = 0; pairing < 2; pairing++) {
        folio_rotary_desc d =
            FOLIO_WITH(folio_rotary_desc, .num_dims = 32, .first_dim = 8, .num_positions = 64,
                       .pairing = (folio_rotary_pairing)pairing);
        CHECK_OK(folio_rotary_create(ctx, &d, &rotary));
        support_fill(rows[0], 32 * SIZE, 9, 1.0f);
        for (int i = 0; i < ROWS; i++) positions[i] = 3 + i, rows[i][(i * 3) % SIZE] = NAN;
        store_rotated(ctx, rotary, positions, rows, ROWS);
        for (int i = 0; i < ROWS; i++)
            for (int k = 0; k < SIZE; k++) {
                int at = (i * 3) % SIZE, other = at;
                bool turns = at >= 8 && at < 40;
                if (turns) other = pairing ? 8 + ((at - 8) ^ 1) : 8 + (at - 8 + 16) % 32;
                CHECK_MSG(!isnan(rows[i][k]) == (k != at && k != other),
                          "pairing %d, NaN at %d, dim %d", pairing, at, k);
            }
        folio_rotary_destroy(rotary);
    }
}

BACKEND_TEST(rotary, nan_of_a_hidden_key_never_reaches_a_row)
{
    static const kit_seq seqs[] = {{.query_len = 40, .seq_len = 90},
                                   {.query_len = 1, .seq_len = 33}};
    for (int i = 0; i < 4; i++) {
        kit_spec s = {.seed = 3,
                      .bias = KIT_BIAS_SEQ | KIT_BIAS_KEY,
                      .bias_hidden = 0.2,
                      .hidden_nan = true,
                      .rotary = 16,
                      .append = i % 2,
                      .dtype = i < 2 ? FOLIO_F32 : FOLIO_BF16};
        kit_verdict verdict;
        CHECK_MSG(kit_check(ctx, NULL, &s, FOLIO_ATTENTION_DECODER, seqs, 2, &verdict), "%s",
                  verdict.message);
    }
}

/* Left out, positions are those of the batch's view, for every type that rotates. */
STEP_TEST(rotary, positions_are_the_views_by_default)
{
    folio_rotary *rotary = NULL;
    CHECK_OK(folio_rotary_create(
        ctx, &FOLIO_WITH(folio_rotary_desc, .num_dims = DK, .num_positions = 32), &rotary));
    for (int type = 0; type < FOLIO_ATTENTION_ENCODER_DECODER; type++) {
        folio_batch_view view = FOLIO_INIT(folio_batch_view);
        int64_t positions[TOKENS];
        float plain[TOKENS * HEADS * DV], out[TOKENS * HEADS * DV];
        CHECK_OK(
            folio_batch_get_view(f->batch, (folio_attention_type)type, FOLIO_PHASE_AUTO, &view));
        memcpy(positions, view.positions, (size_t)view.num_query_tokens * sizeof *positions);
        call c = good_call(f, PLAIN, (folio_attention_type)type);
        size_t bytes = (size_t)c.t.out.tokens * HEADS * DV * sizeof(float);
        CHECK_OK(run_call(&c));
        memcpy(plain, f->out.data, bytes);
        c.t.rotary = rotary;
        CHECK_OK(run_call(&c));
        memcpy(out, f->out.data, bytes);
        CHECK(memcmp(plain, out, bytes) != 0);
        c.t.positions = positions;
        CHECK_OK(run_call(&c));
        CHECK(memcmp(f->out.data, out, bytes) == 0);
        for (int i = 0; i < view.num_query_tokens; i++) positions[i] = 31 - positions[i];
        CHECK_OK(run_call(&c));
        CHECK(memcmp(f->out.data, out, bytes) != 0);
    }
    folio_rotary_destroy(rotary);
}

/* The one call hands both over: rows rotated before give the same. */
BACKEND_TEST(rotary, the_one_call_takes_it)
{
    enum { ROWS = 12 };
    float q[ROWS][SIZE], k[ROWS][SIZE], v[ROWS][SIZE], out[2][ROWS][SIZE];
    int64_t positions[ROWS];
    folio_rotary *rotary = NULL;
    support_fill(q[0], ROWS * SIZE, 1, 1.0f);
    support_fill(k[0], ROWS * SIZE, 2, 1.0f);
    support_fill(v[0], ROWS * SIZE, 3, 1.0f);
    for (int i = 0; i < ROWS; i++) positions[i] = 50 - 3 * i;
    CHECK_OK(folio_rotary_create(
        ctx, &FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE, .num_positions = 64), &rotary));
    const folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = SIZE);
    const folio_step step = FOLIO_WITH(folio_step, .num_seqs = 1);
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {q, FOLIO_F32, ROWS, 0, 0}, .k = {k, FOLIO_F32, ROWS, 0, 0},
                   .v = {v, FOLIO_F32, ROWS, 0, 0}, .out = {out[0], FOLIO_F32, ROWS, 0, 0},
                   .rotary = rotary, .positions = positions);
    CHECK_OK(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &step, NULL, 0, &t, NULL));
    store_rotated(ctx, rotary, positions, q, ROWS);
    store_rotated(ctx, rotary, positions, k, ROWS);
    t.rotary = NULL, t.positions = NULL, t.out.data = out[1];
    CHECK_OK(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &step, NULL, 0, &t, NULL));
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    folio_rotary_destroy(rotary);
}

/* ------------------------------------------------------------------------------------ bad input */

#define BAD_DESC(words, ...)                                                                       \
    do {                                                                                           \
        folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = 8, .num_positions = 4,     \
                                         .factor = 2, .original_len = 16);                         \
        __VA_ARGS__;                                                                               \
        folio_rotary *made = NOWHERE;                                                              \
        REFUSED(folio_rotary_create(ctx, &d, &made), ARG, words);                                  \
        CHECK(made == NULL);                                                                       \
    } while (0)

BACKEND_TEST(rotary, bad_descriptions)
{
    static float table[16];
    static double frequencies[4] = {1, 0.5, 0.25, 0.125};
    BAD_DESC("num_dims|0", d.num_dims = 0);
    BAD_DESC("num_dims|7|even", d.num_dims = 7);
    BAD_DESC("num_dims|65538", d.num_dims = 65538);
    BAD_DESC("first_dim|-2", d.first_dim = -2);
    BAD_DESC("pairing|2", d.pairing = (folio_rotary_pairing)2);
    BAD_DESC("scaling|5", d.scaling = (folio_rotary_scaling)5);
    BAD_DESC("num_positions|0", d.num_positions = 0);
    BAD_DESC("num_positions|2147483648", d.num_positions = (int64_t)1 << 31);
    BAD_DESC("theta|1", d.theta = 1);
    BAD_DESC("theta|nan", d.theta = (double)NAN);
    BAD_DESC("magnitude|-1", d.magnitude = -1);
    BAD_DESC("magnitude|inf", d.magnitude = (double)INFINITY);
    BAD_DESC("cos|without sin", d.cos = table);
    BAD_DESC("sin|without cos", d.sin = table);
    BAD_DESC("cos and sin|frequencies", d.cos = d.sin = table; d.frequencies = frequencies);
    BAD_DESC("cos and sin|scaling 1", d.cos = d.sin = table; d.scaling = FOLIO_ROTARY_SCALE_LINEAR);
    BAD_DESC("frequencies|scaling 3", d.frequencies = frequencies;
             d.scaling = FOLIO_ROTARY_SCALE_YARN);
    BAD_DESC("cos|align", d.cos = (void *)((char *)table + 1); d.sin = table);
    BAD_DESC("frequencies|align", d.frequencies = (void *)((char *)frequencies + 4));
    BAD_DESC("factor|0", d.scaling = FOLIO_ROTARY_SCALE_LINEAR; d.factor = 0);
    BAD_DESC("factor|inf", d.scaling = FOLIO_ROTARY_SCALE_NTK; d.factor = (double)INFINITY);
    BAD_DESC("NTK|num_dims", d.scaling = FOLIO_ROTARY_SCALE_NTK; d.num_dims = 2);
    BAD_DESC("original_len|0", d.scaling = FOLIO_ROTARY_SCALE_YARN; d.original_len = 0);
    BAD_DESC("original_len|-1", d.scaling = FOLIO_ROTARY_SCALE_LLAMA3; d.original_len = -1);
    BAD_DESC("low_freq_factor|4|4", d.scaling = FOLIO_ROTARY_SCALE_LLAMA3; d.low_freq_factor = 4);
    BAD_DESC("beta_slow|32|32", d.scaling = FOLIO_ROTARY_SCALE_YARN; d.beta_slow = 32);
    table[9] = NAN;
    BAD_DESC("position 2, pair 1", d.cos = table; d.sin = table);
    frequencies[3] = (double)INFINITY;
    BAD_DESC("frequencies[3]|inf", d.frequencies = frequencies);
    frequencies[3] = 1e308;
    BAD_DESC("pair 3 is 1e+308|position 3|not finite", d.frequencies = frequencies);
    frequencies[3] = 0.125;
    BAD_DESC("pair 0 is inf", d.scaling = FOLIO_ROTARY_SCALE_LINEAR; d.factor = 1e-320);
    BAD_DESC("magnitude|1e+39|exceed", d.magnitude = 1e39);
    table[9] = 2;
    BAD_DESC("position 2, pair 1|magnitude|3e+38", d.cos = d.sin = table; d.magnitude = 3e38);
    table[9] = 0;
    BAD_DESC("exact_bounds|2", d.exact_bounds = 2);
    folio_rotary *made = NULL; /* theta is not used */
    folio_rotary_desc by_frequencies =
        FOLIO_WITH(folio_rotary_desc, .num_dims = 8, .num_positions = 4, .frequencies = frequencies,
                   .theta = 0.5);
    CHECK_OK(folio_rotary_create(ctx, &by_frequencies, &made));
    folio_rotary_destroy(made);
}

STEP_TEST(rotary, bad_forwards)
{
    folio_rotary *rotary = NULL, *wide = NULL, *few = NULL;
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = DK, .num_positions = 32);
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary));
    d.first_dim = 2;
    CHECK_OK(folio_rotary_create(ctx, &d, &wide));
    d.first_dim = 0, d.num_positions = 20; /* sequence 1 stands at 20 */
    CHECK_OK(folio_rotary_create(ctx, &d, &few));
    int64_t positions[TOKENS] = {0, 1, 2, 3, 4, 20, -9, 99}; /* the last two are padding's */
    BAD_DECODER("positions|without rotary", c.t.positions = positions);
    BAD_DECODER("[2, 18)|16", c.t.rotary = wide);
    BAD_DECODER("seq 1|20|[0, 20)", c.t.rotary = few);
    BAD_DECODER("align", c.t.rotary = rotary;
                c.t.positions = (const int64_t *)(const void *)((const char *)positions + 4));
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, UNSUPPORTED, "rotary", c.t.rotary = rotary);
    positions[3] = 32;
    BAD_DECODER("positions[3]|32|[0, 32)", c.t.rotary = rotary; c.t.positions = positions);
    positions[3] = -1;
    BAD_DECODER("positions[3]|-1", c.t.rotary = rotary; c.t.positions = positions);
    BAD_DECODER("out|positions", c.t.rotary = rotary; c.t.positions = f->out.data);
    positions[3] = 3;
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.t.rotary = rotary, c.t.positions = positions;
    CHECK_OK(run_call(&c));
    folio_batch_seq s = good_seq(1);
    s.positions_given = 1, s.first_query_pos = -1;
    CHECK_OK(folio_batch_add(f->batch, &s));
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.t.rotary = rotary;
    c.t.flags = FOLIO_KV_APPEND; /* two tokens share a slot */
    float more[2][(TOKENS + 1) * HEADS * DK] = {{0}};
    c.t.q = c.t.k = c.t.v = (folio_tensor){more[0], FOLIO_F32, TOKENS + 1, 0, 0};
    c.t.out = (folio_tensor){more[1], FOLIO_F32, TOKENS + 1, 0, 0}, c.t.lse = NULL;
    REFUSED(run_call(&c), ARG, "seq 3|-1|negative");
    folio_rotary_destroy(rotary);
    folio_rotary_destroy(wide);
    folio_rotary_destroy(few);
    fill_batch(f->batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
}

STEP_TEST(rotary, bad_writes)
{
    folio_rotary *rotary = NULL, *wide = NULL;
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = DK, .num_positions = 32);
    CHECK_OK(folio_rotary_create(ctx, &d, &rotary));
    d.num_dims = DK + 2;
    CHECK_OK(folio_rotary_create(ctx, &d, &wide));
    int64_t slots[] = {1, -1, 3}, positions[] = {4, -5, 31};
    folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = {f->k, FOLIO_F32, 3, 0, 0},
                                  .v = {f->v, FOLIO_F32, 3, 0, 0}, .slots = slots);
    w.rotary = rotary;
    REFUSED(folio_kv_cache_write(f->cache[PLAIN], 1, &w, NULL), ARG, "rotary|without positions");
    w.rotary = NULL, w.positions = positions;
    REFUSED(folio_kv_cache_write(f->cache[PLAIN], 1, &w, NULL), ARG, "positions|without rotary");
    w.rotary = wide;
    REFUSED(folio_kv_cache_write(f->cache[PLAIN], 1, &w, NULL), ARG, "[0, 18)|16");
    w.rotary = rotary, positions[2] = 32;
    REFUSED(folio_kv_cache_write(f->cache[PLAIN], 1, &w, NULL), ARG, "positions[2]|32|[0, 32)");
    check_untouched(f, __LINE__);
    positions[2] = 31;
    CHECK_OK(folio_kv_cache_write(f->cache[PLAIN], 1, &w, NULL));
    folio_rotary_destroy(rotary);
    folio_rotary_destroy(wide);
}

/* In latent attention what rotates is no part of V. */
BACKEND_TEST(rotary, v_in_k_never_rotates)
{
    folio_rotary *rotary = NULL;
    folio_kv_cache *cache = NULL;
    float x[32] = {0};
    int64_t zero = 0;
    CHECK_OK(folio_rotary_create(
        ctx, &FOLIO_WITH(folio_rotary_desc, .num_dims = 10, .first_dim = 14, .num_positions = 4),
        &rotary));
    CHECK_OK(
        folio_kv_cache_create(ctx,
                              &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 1, .num_layers = 1,
                                          .block_size = 4, .num_kv_heads = 1, .k_head_size = 24,
                                          .v_head_size = 16, .dtype = FOLIO_F32, .v_in_k = 1),
                              &cache));
    folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = {x, FOLIO_F32, 1, 0, 0}, .slots = &zero,
                                  .rotary = rotary, .positions = &zero);
    REFUSED(folio_kv_cache_write(cache, 0, &w, NULL), ARG, "first_dim|14|16");
    float out[16];
    const int32_t block = 0, len = 1;
    const folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = 1);
    const folio_step step =
        FOLIO_WITH(folio_step, .num_seqs = 1, .seq_lens = &len,
                   .table = {.kind = FOLIO_TABLE_ROWS, .indices = &block, .row_stride = 1});
    const folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {x, FOLIO_F32, 1, 0, 0}, .k = {x, FOLIO_F32, 1, 0, 0},
                   .out = {out, FOLIO_F32, 1, 0, 0}, .rotary = rotary);
    REFUSED(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL), ARG,
            "first_dim|14|16");
    folio_kv_cache_destroy(cache);
    folio_rotary_destroy(rotary);
}

TEST(rotary, it_keeps_its_context_and_gives_all_memory_back)
{
    support_counter counter = {0};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *ctx = support_context("cpu", 2, &allocator);
    folio_rotary *rotary = NULL;
    folio_rotary_desc d = FOLIO_WITH(folio_rotary_desc, .num_dims = 64, .num_positions = 100);
    for (int64_t n = 1; n < 9 && rotary == NULL; n++) { /* each allocation of it fails once */
        counter.fail_at = counter.calls + n;
        folio_status status = folio_rotary_create(ctx, &d, &rotary);
        CHECK(status == (rotary == NULL ? FOLIO_ERR_MEMORY : FOLIO_OK));
    }
    counter.fail_at = 0;
    REQUIRE_TEST(rotary != NULL);
    folio_context_destroy(ctx);
    CHECK(counter.live > 0);
    folio_rotary_destroy(rotary);
    folio_rotary_destroy(NULL);
    CHECK_INT(counter.live, 0);
}
