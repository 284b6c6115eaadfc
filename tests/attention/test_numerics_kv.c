/*
 * test_numerics_kv.c: what a forward writes and what it leaves alone, and where NaN in a cache may go, statement by
 * statement as docs/numerics.md has them.
 */
#include "attention/numerics_rig.h"
#include "support.h"

static rig r, other;

/* Reads key j of sequence s back in f32, into the rig's own key and val. */
static void read_back(int64_t s, int64_t j, bool cross)
{
    int64_t slot = rig_slot(&r, s, j, cross);
    folio_kv_gather gather = {.struct_size = sizeof gather, .slots = &slot, .num_slots = 1};
    gather.k = (folio_tensor){.data = r.key[s][j], .dtype = FOLIO_F32, .tokens = 1};
    gather.k.head_stride = RIG_DIM;
    gather.k.token_stride = RIG_HEADS * RIG_DIM;
    gather.v = gather.k;
    gather.v.data = r.val[s][j];
    gather.k_scale = r.t.k_scale;
    gather.v_scale = r.t.v_scale;
    CHECK_OK(folio_kv_cache_gather(r.l.cache, 0, &gather, NULL));
}

/* Row (s, i, h) is the softmax of scale q.k times v over keys [0, n), as key and val stand. */
static void check_row(int64_t s, int64_t i, int64_t h, int64_t n, double tolerance)
{
    double weights[RIG_TOKENS], denominator = 0, scale = (double)r.desc.scale;
    int64_t g = h / (r.desc.num_heads / r.desc.num_kv_heads);
    for (int64_t j = 0; j < n; j++) {
        weights[j] = exp(scale * rig_dot(r.q[s][i][h], r.key[s][j][g], r.desc.k_head_size));
        denominator += weights[j];
    }
    CHECK_NEAR(r.lse[s][i][h], log(denominator), tolerance);
    for (int64_t d = 0; d < r.desc.v_head_size; d++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) sum += weights[j] / denominator * (double)r.val[s][j][g][d];
        CHECK_NEAR(r.out[s][i][h][d], sum, tolerance);
    }
}

static void open_kv(folio_context *ctx, folio_dtype kv_dtype)
{
    rig_init(&r, ctx);
    rig_random_v(&r);
    r.desc.kv_dtype = kv_dtype;
    r.desc.scale = 0.25f;
    if (kv_dtype == FOLIO_FP8_E4M3 || kv_dtype == FOLIO_FP8_E5M2) {
        r.t.k_scale = 0.75f;
        r.t.v_scale = 1.5f;
    }
}

ENGINE_TEST(numerics_kv, null_k_v_write_nothing)
{
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES; n++) {
        open_kv(e.ctx, support_kv_dtypes[n]);
        rig_add(&r, 3, 9);
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        memcpy(&other, &r, sizeof r);
        /* The step again with k = v = NULL: nothing changes, neither cache nor bits. */
        uint64_t bytes = kit_hash_cache(r.l.cache);
        r.no_kv = true;
        memset(r.out, 0, sizeof r.out);
        CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
        CHECK(kit_hash_cache(r.l.cache) == bytes);
        CHECK(memcmp(r.out, other.out, sizeof r.out) == 0);
        CHECK(memcmp(r.lse, other.lse, sizeof r.lse) == 0);
    }
}

ENGINE_TEST(numerics_kv, slot_minus_one_only_skips_the_write)
{
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES; n++) {
        /* The cache holds all 9 keys; the step brings three of them anew and stores only one. */
        open_kv(e.ctx, support_kv_dtypes[n]);
        int64_t slots[3] = {-1, 0, -1};
        rig_add(&r, 3, 9)->slots = slots;
        slots[1] = rig_slot(&r, 0, 7, false);
        r.no_kv = true;
        CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
        for (int j = 0; j < 9; j++) read_back(0, j, false);
        memcpy(&other, &r, sizeof r);
        r.no_kv = false;
        for (int g = 0; g < 2; g++) {
            r.key[0][6][g][0] = r.val[0][6][g][0] = r.key[0][8][g][1] = r.val[0][8][g][1] = NAN;
            for (int d = 0; d < 8; d++) r.key[0][7][g][d] *= 1.5f;
        }
        CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
        for (int j = 0; j < 9; j++) read_back(0, j, false);
        CHECK(memcmp(r.key[0][6], other.key[0][6], sizeof r.key[0][6]) == 0);
        CHECK(memcmp(r.key[0][7], other.key[0][7], sizeof r.key[0][7]) != 0);
        CHECK(memcmp(r.key[0][8], other.key[0][8], sizeof r.key[0][8]) == 0);
        for (int i = 0; i < 3; i++)
            for (int h = 0; h < 2; h++) check_row(0, i, h, 7 + i, 4e-6);
    }
}

ENGINE_TEST(numerics_kv, given_slots_are_where_writes_go)
{
    open_kv(e.ctx, FOLIO_F32);
    /* The last two keys of sequence 0 go to a block of its cross table, which is nobody's here. */
    int64_t slots[2];
    rig_add(&r, 2, 9)->slots = slots;
    slots[0] = rig_slot(&r, 0, 2, true);
    slots[1] = rig_slot(&r, 0, 0, true);
    r.no_kv = true;
    CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
    r.no_kv = false;
    memcpy(&other, &r, sizeof r);
    for (int j = 7; j < 9; j++)
        for (int g = 0; g < 2; g++)
            for (int d = 0; d < 8; d++) r.key[0][j][g][d] = (float)(100 * j + d);
    CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
    read_back(0, 0, true);
    CHECK(r.key[0][0][1][5] == 805);
    read_back(0, 2, true);
    CHECK(r.key[0][2][1][5] == 705);
    for (int j = 0; j < 9; j++) read_back(0, j, false);
    CHECK(memcmp(r.key[0][8][0], other.key[0][8][0], 8 * sizeof(float)) == 0);
    for (int i = 0; i < 2; i++)
        for (int h = 0; h < 2; h++) check_row(0, i, h, 8 + i, 4e-6);
}

/* Fills key j of sequence s in the cache with x, K and V, whatever the rig holds there. */
static void store_poison(int64_t s, int64_t j, bool cross, float x)
{
    float k[RIG_HEADS][RIG_DIM], v[RIG_HEADS][RIG_DIM];
    memcpy(k, r.key[s][j], sizeof k);
    memcpy(v, r.val[s][j], sizeof v);
    for (int g = 0; g < RIG_HEADS; g++)
        for (int d = 0; d < RIG_DIM; d++) r.key[s][j][g][d] = r.val[s][j][g][d] = x;
    CHECK_OK(rig_store(&r, s, j, cross));
    memcpy(r.key[s][j], k, sizeof k);
    memcpy(r.val[s][j], v, sizeof v);
}

ENGINE_TEST(numerics_kv, poison_past_the_end_stays_there)
{
    const float poisons[] = {0, NAN, INFINITY, -INFINITY, 3e38f};
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES * SUPPORT_NUM_LAYOUTS; n++) {
        for (int x = 0; x < 5; x++) {
            open_kv(e.ctx, support_kv_dtypes[n % SUPPORT_NUM_KV_DTYPES]);
            r.kv.layout = support_layouts[n / SUPPORT_NUM_KV_DTYPES];
            /* Equal head sizes for the interleaved layouts; blocks of 16 for the packed kind. */
            r.desc.k_head_size = r.desc.v_head_size = 16;
            r.kv.block_size = 16;
            rig_add(&r, 2, 9);
            rig_add(&r, 1, 17);
            r.no_kv = true;
            CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
            for (int j = 9; j < 16; j++) store_poison(0, j, false, poisons[x]);
            for (int j = 17; j < 32; j++) store_poison(1, j, false, poisons[x]);
            CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
            if (x == 0) memcpy(&other, &r, sizeof r);
            CHECK(memcmp(r.out, other.out, sizeof r.out) == 0);
            CHECK(memcmp(r.lse, other.lse, sizeof r.lse) == 0);
            CHECK(isfinite(r.out[1][0][1][15]));
        }
    }
}

ENGINE_TEST(numerics_kv, poison_in_other_blocks_stays_there)
{
    const float poisons[] = {0, NAN, INFINITY, -INFINITY};
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES; n++) {
        for (int x = 0; x < 4; x++) {
            open_kv(e.ctx, support_kv_dtypes[n]);
            rig_add(&r, 3, 9);
            rig_add(&r, 2, 12);
            rig_add(&r, 1, 6);
            r.no_kv = true;
            CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
            /* All of the middle sequence, and all cross blocks, which are nobody's. */
            for (int j = 0; j < 12; j++) store_poison(1, j, false, poisons[x]);
            for (int s = 0; s < 3; s++)
                for (int j = 0; j < 16; j++) store_poison(s, j, true, poisons[x]);
            CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_DECODER));
            if (x == 0) memcpy(&other, &r, sizeof r);
            CHECK(memcmp(r.out[0], other.out[0], sizeof r.out[0]) == 0);
            CHECK(memcmp(r.out[2], other.out[2], sizeof r.out[2]) == 0);
            CHECK(memcmp(r.lse[0], other.lse[0], sizeof r.lse[0]) == 0);
            CHECK(memcmp(r.lse[2], other.lse[2], sizeof r.lse[2]) == 0);
            CHECK(isfinite(r.out[0][0][0][0]));
            if (x == 1) CHECK(isnan(r.out[1][0][0][0]));
        }
    }
}

/* 4 heads over 2 kv heads, a window of 6, one causal sequence and one that is not. */
static void open_nan(folio_context *ctx, folio_dtype kv_dtype, folio_layout layout)
{
    open_kv(ctx, kv_dtype);
    r.desc.num_heads = 4;
    r.desc.k_head_size = r.desc.v_head_size = 16;
    r.desc.windowed = 1;
    r.desc.window_left = 5;
    r.desc.window_right = 2;
    r.kv.layout = layout;
    r.kv.block_size = 16;
    rig_add(&r, 14, 20);
    rig_add(&r, 14, 20)->causality = FOLIO_CAUSAL_NO;
}

/* Does the row at pos attend key 11 of kv head 1, which is the poisoned one? */
static bool attends(int64_t s, int64_t pos, int64_t h)
{
    if (h < 2 || pos - 11 > 5) return false;
    return s == 0 ? pos >= 11 : pos + 2 >= 11;
}

/* Poison in key 11, kv head 1, number 5 of K or of V, against a clean run. */
static void check_nan(folio_context *ctx, folio_dtype kv_dtype, folio_layout layout, bool in_k)
{
    open_nan(ctx, kv_dtype, layout);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    memcpy(&other, &r, sizeof r);
    for (int s = 0; s < 2; s++) {
        if (in_k) r.key[s][11][1][5] = NAN;
        else r.val[s][11][1][5] = NAN;
    }
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 14; i++) {
            for (int h = 0; h < 4; h++) {
                if (!attends(s, 6 + i, h)) {
                    CHECK_MSG(memcmp(r.out[s][i][h], other.out[s][i][h], 16 * sizeof(double)) == 0,
                              "%s %s: row %d head %d of sequence %d changed",
                              folio_dtype_name(kv_dtype), folio_layout_name(layout), i, h, s);
                    CHECK(r.lse[s][i][h] == other.lse[s][i][h]);
                    continue;
                }
                CHECK_MSG(isnan(r.out[s][i][h][5]),
                          "%s %s: row %d head %d of sequence %d is no NaN",
                          folio_dtype_name(kv_dtype), folio_layout_name(layout), i, h, s);
                if (in_k) CHECK(isnan(r.lse[s][i][h]));
                else CHECK(r.lse[s][i][h] == other.lse[s][i][h]);
                for (int d = 0; in_k && d < 16; d++) CHECK(isnan(r.out[s][i][h][d]));
            }
        }
    }
}

ENGINE_TEST(numerics_kv, nan_key_reaches_exactly_its_rows)
{
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES * SUPPORT_NUM_LAYOUTS; n++)
        check_nan(e.ctx, support_kv_dtypes[n % SUPPORT_NUM_KV_DTYPES],
                  support_layouts[n / SUPPORT_NUM_KV_DTYPES], true);
}

ENGINE_TEST(numerics_kv, nan_value_reaches_exactly_its_rows)
{
    for (int n = 0; n < SUPPORT_NUM_KV_DTYPES * SUPPORT_NUM_LAYOUTS; n++)
        check_nan(e.ctx, support_kv_dtypes[n % SUPPORT_NUM_KV_DTYPES],
                  support_layouts[n / SUPPORT_NUM_KV_DTYPES], false);
}

ENGINE_TEST(numerics_kv, nan_value_without_weight_still_reaches)
{
    /* Key 3 scores 10000 below the others, before and after them: attended all the same. */
    for (int n = 0; n < 2; n++) {
        rig_init(&r, e.ctx);
        rig_random_v(&r);
        rig_add(&r, 1, 8);
        r.desc.scale = 1;
        memset(r.q, 0, sizeof r.q);
        r.q[0][0][0][0] = r.q[0][0][1][0] = 1;
        for (int j = 0; j < 8; j++)
            r.key[0][j][0][0] = r.key[0][j][1][0] = (n ? j < 3 : j > 3) * 1e4f;
        r.key[0][3][0][0] = r.key[0][3][1][0] = 0;
        r.val[0][3][0][5] = NAN;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int d = 0; d < RIG_DIM; d++) CHECK_INT(isnan(r.out[0][0][0][d]) != 0, d == 5);
        CHECK(isfinite(r.lse[0][0][0]) && isfinite(r.out[0][0][1][5]));
    }
}
