/*
 * test_codes.c: 8-bit caches by their bits. Every code that is a number is read as that number, as K and as V, by few
 * rows and by many, which agree to the bit; and NaN, as a code or as a scale, reaches the rows that see its key and no others, wherever the
 * key lies in a tile. Judged by the formats only: the keys of a sequence are all equal, or the same without the NaN.
 */
#include "attention/numerics_rig.h"
#include "attention/raw_rig.h"

#include <stdlib.h>

static const folio_dtype byte_types[] = {FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
static const folio_dtype q_types[] = {FOLIO_BF16, FOLIO_F32, FOLIO_F16};

/* --------------------------------------------------------------------------------- every code once */

enum { EQUAL_KEYS = 128 }; /* a whole tile; a power of two, so that means are exact */
static const float K_SCALE = 2.0f, V_SCALE = 0.5f;

/* Number d of kv head h is code h * size + d, in all keys. K has no Inf: times 0 it would be NaN. */
static raw_keys every_code(folio_dtype dtype, int32_t heads, int32_t size)
{
    raw_keys keys = raw_keys_make(dtype, heads, size, size);
    for (int64_t i = 0; i < (int64_t)RAW_KEYS * heads * size; i++) {
        uint32_t code = (uint32_t)(i % 256);
        double value = kit_decode(dtype, code);
        keys.k[i] = (unsigned char)(isfinite(value) ? code : 1u);
        keys.v[i] = (unsigned char)(isnan(value) ? 1u : code);
    }
    for (int64_t i = 0; i < (int64_t)RAW_KEYS * heads && dtype == FOLIO_INT8; i++) {
        keys.k_scales[i] = K_SCALE;
        keys.v_scales[i] = V_SCALE;
    }
    return keys;
}

/* Row i has a 1 at number i + (head in its group), and so reads one code of K; row `size` reads none. */
static int8_t *one_hot_rows(int64_t heads, int64_t group, int64_t size)
{
    int8_t *q = calloc((size_t)((size + 1) * heads * size), 1);
    if (q == NULL) abort();
    for (int64_t i = 0; i < size; i++)
        for (int64_t h = 0; h < heads; h++) q[(i * heads + h) * size + (i + h % group) % size] = 64;
    return q;
}

static void check_codes(const raw_keys *keys, const raw_call *call, const raw_result *r)
{
    int64_t heads = call->desc.num_heads, size = keys->k_size, group = heads / keys->heads;
    const float *lse = r->lse.data;
    for (int64_t i = 0; i < size; i++)
        for (int64_t h = 0; h < heads; h++) {
            unsigned char code = keys->k[h / group * size + (i + h % group) % size];
            double score = kit_decode(keys->dtype, code) * (double)K_SCALE;
            double got = (double)lse[i * heads + h] - log(EQUAL_KEYS);
            CHECK_MSG(fabs(got - score) <= 1e-6 * fabs(score) + 2e-6,
                      "k: code %02x of %s gives %.9g, expected %.9g", code,
                      folio_dtype_name(keys->dtype), got, score);
        }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < size; d++) {
            unsigned char code = keys->v[h / group * size + d];
            double value = kit_decode(keys->dtype, code) * (double)V_SCALE;
            uint32_t bits = kit_get(call->desc.dtype, r->out.data, (size * heads + h) * size + d);
            double got = kit_decode(call->desc.dtype, bits);
            CHECK_MSG(got == value, "v: code %02x of %s gives %.9g, expected %.9g", code,
                      folio_dtype_name(keys->dtype), got, value);
        }
}

/* few: a decode per row, so that only a group's rows meet; else all rows are one sequence's. */
static void run_codes(folio_context *ctx, const raw_keys *keys, const raw_cache *cache,
                      folio_dtype dtype, int32_t group, bool few)
{
    int32_t size = keys->k_size;
    raw_call call = {.desc = {.struct_size = sizeof call.desc,
                              .num_heads = keys->heads * group,
                              .num_kv_heads = keys->heads,
                              .k_head_size = size,
                              .v_head_size = size,
                              .dtype = dtype,
                              .kv_dtype = keys->dtype,
                              .scale = 1.0f},
                     .t = {.k_scale = K_SCALE, .v_scale = V_SCALE}};
    call.num_seqs = few ? size + 1 : 1;
    for (int64_t s = 0; s < call.num_seqs; s++)
        call.seqs[s] = (raw_seq){few ? 1 : size + 1, EQUAL_KEYS, FOLIO_CAUSAL_NO};
    int8_t *q = one_hot_rows(call.desc.num_heads, group, size);
    call.q = q;
    raw_result r;
    int before = test_failures();
    if (raw_run(ctx, &call, cache, &r)) check_codes(keys, &call, &r);
    if (test_failures() > before)
        printf("  q %s, groups of %d, %s, %s rows\n", folio_dtype_name(dtype), (int)group,
               folio_layout_name(cache->desc.layout), few ? "few" : "many");
    raw_result_free(&r);
    free(q);
}

static void run_every_code(rig_engine e, bool few)
{
    const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_XPACKED};
    /* 256 numbers: in vectors of 64 and of 16 */
    const int32_t sizes[] = {64, 16}, groups[] = {4, 2, 1, 3};
    bool slow = e.reference || strcmp(e.name, "scalar") == 0;
    for (int type = 0; type < COUNT_OF(byte_types); type++)
        for (int n = slow ? 1 : 0; n < 2; n++) {
            raw_keys keys = every_code(byte_types[type], 256 / sizes[n], sizes[n]);
            for (int layout = 0; layout < COUNT_OF(layouts); layout++) {
                raw_cache cache;
                if (!raw_cache_make(e.ctx, &keys, layouts[layout], 16, &cache)) continue;
                for (int q = 0; q < (layout == 0 ? 3 : 1); q++)
                    for (int g = 0; g < (few && layout == 0 ? 4 : 1); g++)
                        run_codes(e.ctx, &keys, &cache, q_types[q], groups[g], few);
                raw_cache_free(&cache);
            }
            raw_keys_free(&keys);
        }
}

ENGINE_TEST(codes, every_code_by_few_rows) { run_every_code(e, true); }

ENGINE_TEST(codes, every_code_by_many_rows) { run_every_code(e, false); }

/* ---------------------------------------------------------------------------- few rows as many rows */

static int8_t *random_rows(int64_t count)
{
    int8_t *q = malloc((size_t)count);
    if (q == NULL) abort();
    for (int64_t i = 0; i < count; i++) q[i] = (int8_t)support_bits(77, (uint64_t)i);
    return q;
}

/* The last rows of a prompt, and each as a decode: the same bits. */
static void run_decodes(folio_context *ctx, const raw_cache *cache, const raw_keys *keys,
                        int32_t group, int64_t len, int64_t window)
{
    enum { ROWS = 24 };
    raw_call call = {.desc = {.struct_size = sizeof call.desc,
                              .num_heads = keys->heads * group,
                              .num_kv_heads = keys->heads,
                              .k_head_size = keys->k_size,
                              .v_head_size = keys->v_size,
                              .dtype = FOLIO_BF16,
                              .kv_dtype = keys->dtype,
                              .windowed = window > 0,
                              .window_left = window - 1},
                     .seqs = {{ROWS, len, 0}},
                     .num_seqs = 1 + ROWS};
    for (int64_t i = 0; i < ROWS; i++) call.seqs[1 + i] = (raw_seq){1, len - ROWS + 1 + i, 0};
    int64_t half = ROWS * call.desc.num_heads * keys->k_size;
    int8_t *q = random_rows(2 * half);
    memcpy(q + half, q, (size_t)half);
    call.q = q;
    raw_result r, moved;
    if (raw_run(ctx, &call, cache, &r)) {
        moved = r; /* decode i stands where row i does */
        moved.out.data = (char *)r.out.data + ROWS * r.row_bytes;
        moved.lse.data = (char *)r.lse.data + ROWS * r.lse_bytes;
        for (int64_t i = 0; i < ROWS; i++)
            CHECK_MSG(raw_rows_equal(&r, &moved, i, 1),
                      "%s, groups of %d, window %d, position %d: bits differ",
                      folio_dtype_name(keys->dtype), (int)group, (int)window,
                      (int)(len - ROWS + i));
    }
    raw_result_free(&r);
    free(q);
}

ENGINE_TEST(codes, decoded_rows_have_the_bits_of_a_prompt)
{
    const int32_t groups[] = {4, 1, 3};
    if (e.reference) return; /* which promises no bits */
    for (int type = 0; type < COUNT_OF(byte_types); type++)
        for (int n = 0; n < 3; n++) {
            raw_keys keys = raw_keys_make(byte_types[type], 2, n == 1 ? 80 : 64, n == 2 ? 80 : 64);
            raw_keys_random(&keys, 6);
            raw_cache cache;
            if (raw_cache_make(e.ctx, &keys, FOLIO_LAYOUT_NATIVE, 16, &cache)) {
                /* to the end of a tile and past it; past a split; windows of a tile and more */
                run_decodes(e.ctx, &cache, &keys, groups[n], 256, 0);
                run_decodes(e.ctx, &cache, &keys, groups[n], 270, 129);
                run_decodes(e.ctx, &cache, &keys, groups[n], 660, 0);
            }
            raw_cache_free(&cache);
            raw_keys_free(&keys);
        }
}

/* --------------------------------------------------------------------------------------------- NaN */

enum { POISON_HEAD = 1, POISON_DIM = 21, HIDDEN_KEY = 130, LONGEST = 301 };

/* Where a NaN, or an Inf, is put. */
typedef enum { K_CODE, V_CODE, K_SCALE_OF, V_SCALE_OF } poison_part;

typedef struct {
    poison_part part;
    uint32_t bits; /* of the code, or of the scale's f32 */
    bool nan;      /* else Inf: only hidden keys are judged */
} poison;

static const poison e4m3_poisons[] = {
    {K_CODE, 0x7F, true}, {V_CODE, 0x7F, true}, {V_CODE, 0xFF, true}};
static const poison e5m2_poisons[] = {
    {K_CODE, 0x7D, true}, {V_CODE, 0xFE, true}, {V_CODE, 0x7C, false}};
static const poison int8_poisons[] = {{K_SCALE_OF, 0x7FC00000, true},
                                      {V_SCALE_OF, 0xFFC00000, true},
                                      {V_SCALE_OF, 0x7F800000, false}};

/* Puts it in; gives back what was there. */
static uint32_t exchange(raw_keys *keys, poison_part part, int64_t key, uint32_t bits)
{
    int64_t row = key * keys->heads + POISON_HEAD, at = row * keys->k_size + POISON_DIM;
    uint32_t before = 0;
    float *scale = (part == K_SCALE_OF ? keys->k_scales : keys->v_scales) + row;
    unsigned char *code = (part == K_CODE ? keys->k : keys->v) + at;
    if (part == K_CODE || part == V_CODE) {
        before = *code;
        *code = (unsigned char)bits;
    } else {
        memcpy(&before, scale, sizeof before);
        memcpy(scale, &bits, sizeof bits);
    }
    return before;
}

/* Row of the call's sequence s, query i, sees the key. */
static bool sees(const raw_call *call, int64_t s, int64_t i, int64_t key)
{
    const raw_seq *seq = &call->seqs[s];
    int64_t pos = seq->seq_len - seq->query_len + i;
    if (call->t.bias.data != NULL && key == HIDDEN_KEY) return false;
    return key <= pos && (!call->desc.windowed || key >= pos - call->desc.window_left);
}

static void check_head(const raw_call *call, const poison *p, bool seen, const raw_result *clean,
                       const raw_result *r, int64_t row, int64_t head, int64_t key)
{
    int64_t heads = call->desc.num_heads, size = call->desc.v_head_size;
    int64_t elem = (int64_t)folio_dtype_size(call->desc.dtype), at = row * heads + head;
    const float *lse = r->lse.data, *clean_lse = clean->lse.data;
    bool same_lse = memcmp(&lse[at], &clean_lse[at], sizeof *lse) == 0;
    if (!seen) {
        bool same_out =
            memcmp((char *)r->out.data + at * size * elem,
                   (char *)clean->out.data + at * size * elem, (size_t)(size * elem)) == 0;
        CHECK_MSG(same_lse && same_out, "row %d head %d does not see key %d, but its bits changed",
                  (int)row, (int)head, (int)key);
        return;
    }
    if (!p->nan) return;
    bool all = p->part != V_CODE;
    for (int64_t d = all ? 0 : POISON_DIM; d < (all ? size : POISON_DIM + 1); d++) {
        uint32_t bits = kit_get(call->desc.dtype, r->out.data, at * size + d);
        CHECK_MSG(isnan(kit_decode(call->desc.dtype, bits)),
                  "row %d head %d sees key %d, but its number %d is not NaN", (int)row, (int)head,
                  (int)key, (int)d);
    }
    if (p->part == K_CODE || p->part == K_SCALE_OF)
        CHECK_MSG(isnan(lse[at]), "row %d head %d: lse is not NaN", (int)row, (int)head);
    else CHECK_MSG(same_lse, "row %d head %d: lse changed by V", (int)row, (int)head);
}

static void check_poison(folio_context *ctx, const raw_call *call, raw_keys *keys, raw_cache *cache,
                         const raw_result *clean, const poison *p, int64_t key)
{
    uint32_t before = exchange(keys, p->part, key, p->bits);
    raw_cache_renew(cache, keys, key);
    raw_result r;
    int64_t group = call->desc.num_heads / keys->heads;
    if (raw_run(ctx, call, cache, &r))
        for (int64_t s = 0, row = 0; s < call->num_seqs; s++)
            for (int64_t i = 0; i < call->seqs[s].query_len; i++, row++)
                for (int64_t h = 0; h < call->desc.num_heads; h++)
                    check_head(call, p, h / group == POISON_HEAD && sees(call, s, i, key), clean,
                               &r, row, h, key);
    raw_result_free(&r);
    exchange(keys, p->part, key, before);
    raw_cache_renew(cache, keys, key);
}

/* Windows begin inside a tile, at its edge, and not at all; or a bias hides one key. Of two rows side by side the
 * first does not see the last key, or the second not the first of a tile. */
static const struct {
    int64_t window; /* 0: none */
    bool bias;
    int32_t group;
    folio_layout layout;
} views[] = {{0, false, 4, FOLIO_LAYOUT_NATIVE},   {100, false, 3, FOLIO_LAYOUT_NATIVE},
             {172, false, 1, FOLIO_LAYOUT_NATIVE}, {0, true, 4, FOLIO_LAYOUT_NATIVE},
             {172, true, 2, FOLIO_LAYOUT_NATIVE},  {100, false, 2, FOLIO_LAYOUT_HND},
             {0, true, 2, FOLIO_LAYOUT_XPACKED}};

/* Around the ends of tiles of 128, of the windows, of the sequences; and past them all. */
static const int64_t places[] = {130, 199, 0,   255, 299, 300, 127, 128,
                                 156, 200, 155, 131, 256, 263, 301, 383};

static void run_view(rig_engine e, folio_dtype kv, folio_dtype dtype, int view, int step,
                     int32_t size)
{
    static float bias[LONGEST];
    for (int i = 0; i < LONGEST; i++) bias[i] = i == HIDDEN_KEY ? -INFINITY : 0.0f;
    raw_call call = {.desc = {.struct_size = sizeof call.desc,
                              .num_heads = 2 * views[view].group,
                              .num_kv_heads = 2,
                              .k_head_size = size,
                              .v_head_size = size,
                              .dtype = dtype,
                              .kv_dtype = kv,
                              .windowed = views[view].window > 0,
                              .window_left = views[view].window - 1},
                     .seqs = {{1, 300, 0}, {1, 256, 0}, {2, 256, 0}, {2, 301, 0}, {5, 300, 0}},
                     .num_seqs = 5};
    if (views[view].bias)
        call.t.bias = (folio_bias){bias, FOLIO_F32, {1, 1, 1, LONGEST}, {0, 0, 0, 1}};
    int64_t count = raw_rows(&call) * call.desc.num_heads * size;
    int8_t *q = random_rows(count);
    call.q = q;
    raw_keys keys = raw_keys_make(kv, 2, size, size);
    raw_keys_random(&keys, 5);
    raw_cache cache;
    raw_result clean = {0};
    const poison *poisons = kv == FOLIO_INT8       ? int8_poisons
                            : kv == FOLIO_FP8_E4M3 ? e4m3_poisons
                                                   : e5m2_poisons;
    if (raw_cache_make(e.ctx, &keys, views[view].layout, 16, &cache) &&
        raw_run(e.ctx, &call, &cache, &clean))
        for (int i = view % step; i < COUNT_OF(places); i += step)
            for (int p = 0; p < 3; p++) {
                int failed = test_failures();
                check_poison(e.ctx, &call, &keys, &cache, &clean, &poisons[p], places[i]);
                if (test_failures() > failed)
                    printf("  %s under q %s, view %d, poison %d in key %d\n", folio_dtype_name(kv),
                           folio_dtype_name(dtype), view, p, (int)places[i]);
            }
    raw_result_free(&clean);
    raw_cache_free(&cache);
    raw_keys_free(&keys);
    free(q);
}

ENGINE_TEST(codes, nan_reaches_exactly_its_rows)
{
    bool slow = e.reference || strcmp(e.name, "scalar") == 0;
    int fast_step = test_is_long() ? 1 : 3;
    for (int type = 0; type < COUNT_OF(byte_types); type++)
        for (int view = 0; view < COUNT_OF(views); view++) {
            run_view(e, byte_types[type], FOLIO_BF16, view, slow ? 5 : fast_step, slow ? 32 : 80);
            run_view(e, byte_types[type], FOLIO_F32, view, slow ? 6 : fast_step + 1, 32);
        }
}
