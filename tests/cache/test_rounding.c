/*
 * test_rounding.c: how numbers become bits. A write from f32, f16 or bf16 into a cache of each
 * dtype, read back as stored by unpack, against the formats as support.c writes them: every code,
 * ties to even, saturation, NaN, subnormals, -0; and int8's scale and rounding.
 */
#include "support.h"

#include <math.h>
#include <stdlib.h>

/* One head of SIZE numbers per token. */
enum { SIZE = 512, BLOCK = 16 };

static const folio_dtype minifloats[] = {FOLIO_F16, FOLIO_BF16, FOLIO_FP8_E4M3, FOLIO_FP8_E5M2};

static folio_kv_cache *make_cache(folio_context *ctx, folio_dtype dtype, int64_t rows)
{
    folio_kv_cache_desc c =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = (rows + BLOCK - 1) / BLOCK, .num_layers = 1,
                   .block_size = BLOCK, .num_kv_heads = 1, .k_head_size = SIZE, .dtype = dtype);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
    return cache;
}

/* Numbers as a cache stores them: given as K, and negated as V. The caller frees. */
typedef struct {
    void *k, *v;
    float *k_scales, *v_scales;
} stored;

static stored store(folio_context *ctx, folio_dtype dtype, const void *from, folio_dtype from_dtype,
                    int64_t count, float scale)
{
    int64_t rows = (count + SIZE - 1) / SIZE, blocks = (rows + BLOCK - 1) / BLOCK;
    size_t elem = folio_dtype_size(from_dtype), n = (size_t)(blocks * BLOCK * SIZE);
    stored s = {calloc(n, 4), calloc(n, 4), calloc(n, 4), calloc(n, 4)};
    void *x = calloc(n, elem), *y = calloc(n, elem);
    int64_t *slots = calloc(n, sizeof *slots), *ids = calloc(n, sizeof *ids);
    folio_kv_cache *cache = make_cache(ctx, dtype, rows);
    if (!s.k || !s.v || !s.k_scales || !s.v_scales || !x || !y || !slots || !ids) abort();
    memcpy(x, from, (size_t)count * elem);
    uint32_t sign = elem == 4 ? 0x80000000u : 0x8000u;
    for (int64_t i = 0; i < count; i++) kit_set(from_dtype, y, i, kit_get(from_dtype, x, i) ^ sign);
    for (int64_t i = 0; i < rows; i++) slots[i] = i;
    for (int64_t i = 0; i < blocks; i++) ids[i] = i;
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {.data = x, .dtype = from_dtype, .tokens = rows},
                   .v = {.data = y, .dtype = from_dtype, .tokens = rows}, .slots = slots,
                   .k_scale = scale, .v_scale = scale);
    folio_kv_rows r = FOLIO_WITH(folio_kv_rows, .k = s.k, .v = s.v, .k_scales = s.k_scales,
                                 .v_scales = s.v_scales, .num_blocks = blocks, .blocks = ids);
    if (cache != NULL) {
        CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
        CHECK_OK(folio_kv_cache_unpack(cache, 0, &r, NULL));
    }
    folio_kv_cache_destroy(cache);
    free(x);
    free(y);
    free(slots);
    free(ids);
    return s;
}

static void stored_free(stored *s)
{
    free(s->k);
    free(s->v);
    free(s->k_scales);
    free(s->v_scales);
}

/* Equal bits, or both NaN. */
static bool same_number(folio_dtype dtype, uint32_t a, uint32_t b)
{
    return a == b || (isnan(kit_decode(dtype, a)) && isnan(kit_decode(dtype, b)));
}

/* x[count], given as from_dtype, is stored as the judge says, in K and negated in V. */
static void check_stored(folio_context *ctx, folio_dtype dtype, const void *x,
                         folio_dtype from_dtype, int64_t count, const char *what)
{
    stored s = store(ctx, dtype, x, from_dtype, count, 1.0f);
    int wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        double value = kit_decode(from_dtype, kit_get(from_dtype, x, i));
        uint32_t expected = kit_encode(dtype, value), got = kit_get(dtype, s.k, i);
        uint32_t mirrored = kit_encode(dtype, -value), v = kit_get(dtype, s.v, i);
        bool right = same_number(dtype, got, expected) && same_number(dtype, v, mirrored);
        if (!right && wrong++ < 3)
            test_fail(__FILE__, __LINE__, "%s: %s %a to %s: %x and %x, expected %x and %x", what,
                      folio_dtype_name(from_dtype), value, folio_dtype_name(dtype), got, v,
                      expected, mirrored);
    }
    CHECK_INT(wrong, 0);
    stored_free(&s);
}

/* --------------------------------------------------------------------------------------- floats */

BACKEND_TEST(rounding, every_code_stays)
{
    for (int t = 0; t < COUNT_OF(minifloats); t++) {
        folio_dtype dtype = minifloats[t];
        int64_t codes = folio_dtype_size(dtype) == 1 ? 256 : 65536;
        float *x = malloc((size_t)codes * sizeof *x);
        if (x == NULL) abort();
        for (int64_t i = 0; i < codes; i++) x[i] = (float)kit_decode(dtype, (uint32_t)i);
        stored s = store(ctx, dtype, x, FOLIO_F32, codes, 1.0f);
        int64_t wrong = 0;
        for (int64_t i = 0; i < codes; i++) {
            uint32_t expected = (uint32_t)i;
            /* e5m2 has infinities, but a write saturates. */
            if (dtype == FOLIO_FP8_E5M2 && isinf(x[i])) expected--;
            wrong += !same_number(dtype, kit_get(dtype, s.k, i), expected);
        }
        CHECK_MSG(wrong == 0, "%s: %lld codes changed", folio_dtype_name(dtype), (long long)wrong);
        stored_free(&s);
        free(x);
    }
}

/* Halfway between each two neighbours, and one f32 step to either side of that. */
BACKEND_TEST(rounding, ties_go_to_even)
{
    for (int t = 0; t < COUNT_OF(minifloats); t++) {
        folio_dtype dtype = minifloats[t];
        int64_t codes = folio_dtype_size(dtype) == 1 ? 128 : 32768, count = 0;
        float *x = malloc((size_t)codes * 3 * sizeof *x);
        if (x == NULL) abort();
        for (int64_t i = 0; i + 1 < codes; i++) {
            double a = kit_decode(dtype, (uint32_t)i);
            double b = kit_decode(dtype, (uint32_t)i + 1);
            if (!isfinite(a) || !isfinite(b)) continue;
            float half = (float)((a + b) / 2.0);
            if (half == (float)a || half == (float)b) continue; /* bf16: below f32's own grid */
            x[count++] = half;
            x[count++] = nextafterf(half, INFINITY);
            x[count++] = nextafterf(half, 0.0f);
        }
        CHECK(count > 300);
        check_stored(ctx, dtype, x, FOLIO_F32, count, "halfway");
        free(x);
    }
}

static const struct {
    folio_dtype dtype;
    float x;
    uint32_t bits;
} named_cases[] = {
    {FOLIO_FP8_E4M3, 448.0f, 0x7E},     {FOLIO_FP8_E4M3, 449.0f, 0x7E},
    {FOLIO_FP8_E4M3, 464.0f, 0x7E},     {FOLIO_FP8_E4M3, 480.0f, 0x7E},
    {FOLIO_FP8_E4M3, 1e30f, 0x7E},      {FOLIO_FP8_E4M3, -1e30f, 0xFE},
    {FOLIO_FP8_E4M3, INFINITY, 0x7E},   {FOLIO_FP8_E4M3, -INFINITY, 0xFE},
    {FOLIO_FP8_E4M3, 0.0f, 0x00},       {FOLIO_FP8_E4M3, -0.0f, 0x80},
    {FOLIO_FP8_E4M3, 0x1p-9f, 0x01},    {FOLIO_FP8_E4M3, 0x1p-10f, 0x00},
    {FOLIO_FP8_E4M3, 0x1.8p-9f, 0x02},  {FOLIO_FP8_E4M3, 0x1.000002p-10f, 0x01},
    {FOLIO_FP8_E4M3, -0x1p-20f, 0x80},  {FOLIO_FP8_E4M3, 0x1.Cp-7f, 0x07},
    {FOLIO_FP8_E4M3, 0x1.Ep-7f, 0x08},  {FOLIO_FP8_E4M3, 1.0f, 0x38},
    {FOLIO_FP8_E4M3, 1.0625f, 0x38},    {FOLIO_FP8_E4M3, 1.1875f, 0x3A},
    {FOLIO_FP8_E5M2, 57344.0f, 0x7B},   {FOLIO_FP8_E5M2, 61440.0f, 0x7B},
    {FOLIO_FP8_E5M2, 65536.0f, 0x7B},   {FOLIO_FP8_E5M2, INFINITY, 0x7B},
    {FOLIO_FP8_E5M2, -INFINITY, 0xFB},  {FOLIO_FP8_E5M2, -0.0f, 0x80},
    {FOLIO_FP8_E5M2, 0x1p-16f, 0x01},   {FOLIO_FP8_E5M2, 0x1p-17f, 0x00},
    {FOLIO_FP8_E5M2, 0x1.8p-16f, 0x02}, {FOLIO_FP8_E5M2, 1.125f, 0x3C},
    {FOLIO_FP8_E5M2, 1.375f, 0x3E},     {FOLIO_FP8_E5M2, 1.0f, 0x3C},
    {FOLIO_F16, 65504.0f, 0x7BFF},      {FOLIO_F16, 65519.0f, 0x7BFF},
    {FOLIO_F16, 65520.0f, 0x7C00},      {FOLIO_F16, -INFINITY, 0xFC00},
    {FOLIO_F16, 0x1p-24f, 0x0001},      {FOLIO_F16, 0x1p-25f, 0x0000},
    {FOLIO_F16, 0x1.8p-24f, 0x0002},    {FOLIO_F16, -0x1p-30f, 0x8000},
    {FOLIO_F16, 0x1.FFEp-15f, 0x0400},  {FOLIO_F16, 0x1.FFCp-15f, 0x0400},
    {FOLIO_F16, 0x1.FF8p-15f, 0x03FF},  {FOLIO_F16, -0.0f, 0x8000},
    {FOLIO_BF16, 1.0f, 0x3F80},         {FOLIO_BF16, 0x1.01p0f, 0x3F80},
    {FOLIO_BF16, 0x1.03p0f, 0x3F82},    {FOLIO_BF16, 0x1.010002p0f, 0x3F81},
    {FOLIO_BF16, 0x1.FEp127f, 0x7F7F},  {FOLIO_BF16, 0x1.FFFFFEp127f, 0x7F80},
    {FOLIO_BF16, INFINITY, 0x7F80},     {FOLIO_BF16, 0x1p-133f, 0x0001},
    {FOLIO_BF16, 0x1p-134f, 0x0000},    {FOLIO_BF16, -0x1.8p-133f, 0x8002},
};

/* The cases people quote, in numbers that no code computed. */
BACKEND_TEST(rounding, named_cases)
{
    for (int i = 0; i < COUNT_OF(named_cases); i++) {
        folio_dtype dtype = named_cases[i].dtype;
        float x = named_cases[i].x;
        stored s = store(ctx, dtype, &x, FOLIO_F32, 1, 1.0f);
        uint32_t got = kit_get(dtype, s.k, 0);
        CHECK_MSG(got == named_cases[i].bits, "%s: %a is %x, expected %x", folio_dtype_name(dtype),
                  (double)x, got, named_cases[i].bits);
        CHECK_INT(kit_encode(dtype, (double)x), named_cases[i].bits); /* the judge agrees */
        stored_free(&s);
    }
}

BACKEND_TEST(rounding, nan_stays_nan)
{
    /* Of f32: payloads in the bits that rounding cuts off, quiet and signalling, either sign. */
    const uint32_t nans[] = {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u,
                             0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F807FFFu, 0x7F808000u};
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES - 1; t++)
        check_stored(ctx, support_kv_dtypes[t], nans, FOLIO_F32, COUNT_OF(nans), "NaN");
}

/* All numbers of f16 and bf16, NaN too, into every float type. */
BACKEND_TEST(rounding, from_every_f16_and_bf16)
{
    const folio_dtype from[] = {FOLIO_F16, FOLIO_BF16};
    uint16_t *x = malloc(65536 * sizeof *x);
    if (x == NULL) abort();
    for (int i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (int f = 0; f < COUNT_OF(from); f++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES - 1; t++)
            check_stored(ctx, support_kv_dtypes[t], x, from[f], 65536, "every code");
    free(x);
}

/* stored = x / k_scale rounded. */
BACKEND_TEST(rounding, fp8_divides_by_the_scale)
{
    enum { COUNT = 4096 };
    const float scales[] = {0.5f, 0x1p-6f, 8.0f, 0.037f, 3.0f};
    float *x = malloc(COUNT * sizeof *x);
    if (x == NULL) abort();
    for (int e = 0; e < 2; e++) {
        folio_dtype dtype = e ? FOLIO_FP8_E5M2 : FOLIO_FP8_E4M3;
        for (int i = 0; i < COUNT_OF(scales); i++) {
            int64_t wrong = 0;
            support_fill(x, COUNT, 91 + (uint64_t)i, 600.0f * scales[i]);
            stored s = store(ctx, dtype, x, FOLIO_F32, COUNT, scales[i]);
            for (int64_t j = 0; j < COUNT; j++) {
                uint32_t got = kit_get(dtype, s.k, j);
                wrong += got != kit_encode(dtype, (double)x[j] / (double)scales[i]) &&
                         got != kit_encode(dtype, (double)(x[j] / scales[i]));
            }
            CHECK_MSG(wrong == 0, "%s, scale %g: %lld wrong", folio_dtype_name(dtype),
                      (double)scales[i], (long long)wrong);
            stored_free(&s);
        }
    }
    free(x);
}

/* Stored numbers back to f16 and bf16: stored * scale, rounded once. */
BACKEND_TEST(rounding, gather_rounds_to_nearest_even)
{
    enum { ROWS = 16, COUNT = ROWS * SIZE };
    float *x = malloc(COUNT * sizeof *x);
    if (x == NULL) abort();
    for (uint64_t i = 0; i < COUNT; i++)
        x[i] = ldexpf(support_random(61, i), (int)(support_bits(62, i) % 44u) - 26);
    for (int i = 0; i + 1 < 2048; i++) /* ties of f16 and bf16 */
        x[i] = i % 2 ? 1.0f + (float)(2 * i + 1) * 0x1p-11f : 1.0f + (float)(2 * i + 1) * 0x1p-8f;
    folio_kv_cache *cache = make_cache(ctx, FOLIO_F32, ROWS);
    REQUIRE_TEST(cache != NULL);
    int64_t slots[ROWS];
    for (int i = 0; i < ROWS; i++) slots[i] = i;
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS},
                   .v = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
    support_buffer k = support_buffer_make(COUNT * 2), v = support_buffer_make(COUNT * 2);
    folio_kv_gather g =
        FOLIO_WITH(folio_kv_gather, .k = {.data = k.data, .dtype = FOLIO_F16, .tokens = ROWS},
                   .v = {.data = v.data, .dtype = FOLIO_BF16, .tokens = ROWS}, .slots = slots,
                   .num_slots = ROWS);
    CHECK_OK(folio_kv_cache_gather(cache, 0, &g, NULL));
    int64_t wrong = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        wrong += kit_get(FOLIO_F16, k.data, i) != kit_encode(FOLIO_F16, (double)x[i]);
        wrong += kit_get(FOLIO_BF16, v.data, i) != kit_encode(FOLIO_BF16, (double)x[i]);
    }
    CHECK_INT(wrong, 0);
    folio_kv_cache_destroy(cache);
    support_buffer_free(&k);
    support_buffer_free(&v);
    free(x);
}

/* ----------------------------------------------------------------------------------------- int8 */

BACKEND_TEST(rounding, int8_ties_go_to_even)
{
    /* The largest is 127 * 2^-4, so the scale is 2^-4 exactly and halves are exact too. */
    const float unit = 0x1p-4f;
    float x[SIZE] = {0};
    for (int i = 0; i < 254; i++) x[i] = ((float)(i - 127) + 0.5f) * unit; /* all halves */
    x[254] = 127.0f * unit;
    x[255] = -126.5f * unit;
    x[256] = nextafterf(2.5f * unit, 10.0f);
    x[257] = nextafterf(2.5f * unit, 0.0f);
    x[258] = -0.0f;
    stored s = store(ctx, FOLIO_INT8, x, FOLIO_F32, SIZE, 1.0f);
    CHECK(s.k_scales[0] == unit && s.v_scales[0] == unit);
    for (int i = 0; i < SIZE; i++) {
        int expected = (int)rint((double)x[i] / (double)unit);
        CHECK_MSG((int8_t)kit_get(FOLIO_INT8, s.k, i) == expected, "%a is %d, expected %d",
                  (double)x[i], (int8_t)kit_get(FOLIO_INT8, s.k, i), expected);
        CHECK_INT((int8_t)kit_get(FOLIO_INT8, s.v, i), -expected);
    }
    CHECK_INT((int8_t)kit_get(FOLIO_INT8, s.k, 256), 3);
    CHECK_INT((int8_t)kit_get(FOLIO_INT8, s.k, 257), 2);
    stored_free(&s);
}

/* A scale per row and head, from the row only: max|x| / 127. */
BACKEND_TEST(rounding, int8_scale_is_largest_over_127)
{
    enum { ROWS = 20 };
    float *x = malloc(ROWS * SIZE * sizeof *x);
    if (x == NULL) abort();
    for (uint64_t i = 0; i < ROWS * SIZE; i++)
        x[i] = ldexpf(support_random(50, i), (int)(i / SIZE) * 5 - 40);
    for (int i = 0; i < SIZE; i++)
        x[3 * SIZE + i] = i == 9 ? -7.25f : 0.001f; /* negative largest */
    stored s = store(ctx, FOLIO_INT8, x, FOLIO_F32, ROWS * SIZE, 1.0f);
    for (int r = 0; r < ROWS; r++) {
        float largest = 0;
        for (int i = 0; i < SIZE; i++) largest = fmaxf(largest, fabsf(x[r * SIZE + i]));
        float scale = largest / 127.0f;
        CHECK_MSG(s.k_scales[r] == scale && s.v_scales[r] == scale,
                  "row %d: %a and %a, expected %a", r, (double)s.k_scales[r], (double)s.v_scales[r],
                  (double)scale);
        for (int i = 0; i < SIZE; i++) {
            int code = (int8_t)kit_get(FOLIO_INT8, s.k, r * SIZE + i);
            double exact = (double)x[r * SIZE + i] / (double)scale;
            CHECK(fabs(code - exact) <= 0.50001 && code >= -127 && code <= 127);
        }
    }
    stored_free(&s);
    free(x);
}

/* Dequantised as code * scale; a row of zeros is zeros; a NaN stays, and leaves the other rows. */
BACKEND_TEST(rounding, int8_zeros_nan_and_tiny_rows)
{
    enum { ROWS = 6 }; /* zeros, a NaN, the smallest f32, ordinary, -0 and subnormals, an inf */
    float *x = calloc(ROWS * SIZE, sizeof *x), *got = malloc(ROWS * SIZE * sizeof *got);
    if (x == NULL || got == NULL) abort();
    support_fill(x + SIZE, SIZE, 1, 3.0f);
    x[SIZE + 100] = NAN;
    for (int i = 0; i < SIZE; i++) x[2 * SIZE + i] = i % 3 ? 0x1p-149f : -0x1p-149f;
    support_fill(x + 3 * SIZE, SIZE, 2, 3.0f);
    for (int i = 0; i < SIZE; i++) x[4 * SIZE + i] = i % 2 ? -0.0f : (float)i * 0x1p-140f;
    support_fill(x + 5 * SIZE, SIZE, 3, 3.0f);
    x[5 * SIZE + 7] = -INFINITY;
    folio_kv_cache *cache = make_cache(ctx, FOLIO_INT8, ROWS);
    REQUIRE_TEST(cache != NULL);
    int64_t slots[ROWS] = {4, 3, 2, 1, 0, 5};
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS},
                   .v = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
    for (int part = 0; part < 2; part++) {
        folio_kv_gather g = {.struct_size = sizeof g, .slots = slots, .num_slots = ROWS};
        folio_tensor t = {.data = got, .dtype = FOLIO_F32, .tokens = ROWS};
        if (part) g.v = t;
        else g.k = t;
        CHECK_OK(folio_kv_cache_gather(cache, 0, &g, NULL));
        float largest = 0;
        for (int i = 0; i < SIZE; i++) {
            CHECK(got[i] == 0.0f);
            largest = fmaxf(largest, fabsf(x[3 * SIZE + i]));
        }
        CHECK(isnan(got[SIZE + 100]) && !isfinite(got[5 * SIZE + 7]));
        for (int i = 0; i < SIZE; i++) {
            CHECK(fabsf(got[2 * SIZE + i]) <= 0x1p-148f); /* finite, and no larger than it was */
            CHECK(fabsf(got[3 * SIZE + i] - x[3 * SIZE + i]) <= 0.5001f * largest / 127.0f);
            CHECK(fabsf(got[4 * SIZE + i]) <= SIZE * 0x1p-140f);
        }
    }
    folio_kv_cache_destroy(cache);
    free(x);
    free(got);
}
