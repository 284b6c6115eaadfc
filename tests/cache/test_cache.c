/*
 * test_cache.c: how K and V lie in memory: shapes of every layout and dtype, the very bytes after
 * a write, what write and gather do to slots, the caller's memory wrapped in these layouts, caches
 * past 2^31 elements. Addresses are computed here once more, from the drawings in the header.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "kit/layer.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HEADS = 3, LAYERS = 2, BLOCKS = 4 };

static const int block_sizes[] = {1, 3, 8, 16, 32, 48};

static bool is_interleaved(folio_layout layout)
{
    return layout == FOLIO_LAYOUT_INTERLEAVED_NHD || layout == FOLIO_LAYOUT_INTERLEAVED_HND;
}

/* Head sizes differ where they may; K's is a multiple of every x. */
static folio_kv_cache_desc describe(folio_layout layout, folio_dtype dtype, int block_size)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS,
                      .block_size = block_size, .num_kv_heads = HEADS, .k_head_size = 32,
                      .v_head_size = is_interleaved(layout) ? 32 : 24, .dtype = dtype,
                      .layout = layout);
}

static int64_t head_size(const folio_kv_cache_desc *c, int part)
{
    return part == 1 && c->v_head_size != 0 ? c->v_head_size : c->k_head_size;
}

static int64_t pack_of(folio_dtype dtype) { return 4 / (int64_t)folio_dtype_size(dtype); }

/* --------------------------------------------------------------------------------- the drawings */

/* Dims and element strides of K (part 0) or V (part 1), slowest first; returns how many. */
static int drawing(const folio_kv_cache_desc *c, int part, int64_t dims[6], int64_t strides[6])
{
    int64_t N = c->block_size, H = c->num_kv_heads, D = head_size(c, part), B = c->num_blocks;
    int64_t both = head_size(c, 0) + head_size(c, 1);
    int64_t x = c->layout == FOLIO_LAYOUT_XPACKED ? 16 / (int64_t)folio_dtype_size(c->dtype) : 1;
    int64_t p = pack_of(c->dtype);
    int n = 0;
    dims[n++] = B;
    switch (c->layout) {
    case FOLIO_LAYOUT_NHD:
    case FOLIO_LAYOUT_INTERLEAVED_NHD: dims[n++] = N, dims[n++] = H, dims[n++] = D; break;
    case FOLIO_LAYOUT_HND:
    case FOLIO_LAYOUT_INTERLEAVED_HND: dims[n++] = H, dims[n++] = N, dims[n++] = D; break;
    case FOLIO_LAYOUT_XPACKED:
    case FOLIO_LAYOUT_XPACKED_1:
        dims[n++] = H;
        if (part == 0) dims[n++] = D / x, dims[n++] = N, dims[n++] = x;
        else dims[n++] = D, dims[n++] = N;
        break;
    default: /* NATIVE */
        dims[n++] = H;
        if (N % 16 != 0) dims[n++] = N, dims[n++] = D;
        else if (part == 0) dims[n++] = N / 16, dims[n++] = D / p, dims[n++] = 16, dims[n++] = p;
        else if (p == 2) dims[n++] = N / 2, dims[n++] = D, dims[n++] = 2;
        else dims[n++] = N, dims[n++] = D;
    }
    int64_t stride = 1;
    for (int i = n - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= dims[i];
    }
    if (is_interleaved(c->layout)) strides[0] = 2 * N * H * D;
    if (c->layout == FOLIO_LAYOUT_NATIVE) strides[1] = N * both, strides[0] = H * N * both;
    return n;
}

/* Elements from the array's first number to number d of token n, head h, block b. */
static int64_t place(const folio_kv_cache_desc *c, int part, int64_t b, int64_t n, int64_t h,
                     int64_t d)
{
    int64_t N = c->block_size, H = c->num_kv_heads, D = head_size(c, part);
    int64_t both = head_size(c, 0) + head_size(c, 1);
    int64_t x = c->layout == FOLIO_LAYOUT_XPACKED ? 16 / (int64_t)folio_dtype_size(c->dtype) : 1;
    int64_t p = pack_of(c->dtype), in_head;
    switch (c->layout) {
    case FOLIO_LAYOUT_NHD: return ((b * N + n) * H + h) * D + d;
    case FOLIO_LAYOUT_HND: return ((b * H + h) * N + n) * D + d;
    case FOLIO_LAYOUT_INTERLEAVED_NHD: return ((2 * b * N + n) * H + h) * D + d;
    case FOLIO_LAYOUT_INTERLEAVED_HND: return ((2 * b * H + h) * N + n) * D + d;
    case FOLIO_LAYOUT_XPACKED:
    case FOLIO_LAYOUT_XPACKED_1:
        if (part == 1) return ((b * H + h) * D + d) * N + n;
        return (((b * H + h) * (D / x) + d / x) * N + n) * x + d % x;
    default:
        if (N % 16 != 0) in_head = n * D + d;
        else if (part == 0) in_head = ((n / 16 * (D / p) + d / p) * 16 + n % 16) * p + d % p;
        else if (p == 2) in_head = (n / 2 * D + d) * 2 + n % 2;
        else in_head = n * D + d;
        return (b * H + h) * N * both + in_head;
    }
}

/* Where V begins when one buffer holds the layer, in elements. */
static int64_t v_begins(const folio_kv_cache_desc *c)
{
    int64_t N = c->block_size, H = c->num_kv_heads;
    if (c->layout == FOLIO_LAYOUT_NATIVE) return N * c->k_head_size;
    if (is_interleaved(c->layout)) return N * H * c->k_head_size;
    return c->num_blocks * N * H * c->k_head_size;
}

static int64_t past_last(int n, const int64_t *dims, const int64_t *strides)
{
    int64_t last = 0;
    for (int i = 0; i < n; i++) last += (dims[i] - 1) * strides[i];
    return last + 1;
}

/* Same dims and strides once dims of 1 are left out: [..][p] with p = 1 may be listed or not. */
static void check_array(const folio_kv_array *got, int n, const int64_t *dims,
                        const int64_t *strides, int64_t elem, const char *what)
{
    CHECK_MSG(got->num_dims >= 1 && got->num_dims <= 6, "%s: num_dims %d", what, got->num_dims);
    int g = 0;
    for (int i = 0; i < n; i++) {
        if (dims[i] == 1) continue;
        while (g < 6 && got->dims[g] == 1) g++;
        CHECK_MSG(g < got->num_dims, "%s: dim %d missing", what, i);
        if (g >= got->num_dims) return;
        CHECK_MSG(got->dims[g] == dims[i] && got->strides[g] == strides[i],
                  "%s: dim %d is %lld by %lld, expected %lld by %lld", what, i,
                  (long long)got->dims[g], (long long)got->strides[g], (long long)dims[i],
                  (long long)strides[i]);
        g++;
    }
    for (; g < 6; g++) CHECK_MSG(got->dims[g] == 1, "%s: dim %d is not 1", what, g);
    CHECK_INT(got->bytes, past_last(n, dims, strides) * elem);
}

static void check_shape(const char *backend, const folio_kv_cache_desc *c)
{
    folio_kv_cache_shape s = {.struct_size = sizeof s};
    CHECK_OK(folio_kv_cache_get_shape(backend, c, &s));
    int64_t dims[6], strides[6], elem = (int64_t)folio_dtype_size(c->dtype);
    char what[64];
    snprintf(what, sizeof what, "%s %s %d", folio_layout_name(c->layout),
             folio_dtype_name(c->dtype), c->block_size);
    int n = drawing(c, 0, dims, strides);
    check_array(&s.k, n, dims, strides, elem, what);
    n = drawing(c, 1, dims, strides);
    check_array(&s.v, n, dims, strides, elem, what);
    CHECK_INT(s.k.offset_bytes, 0);
    CHECK_INT(s.v.offset_bytes, v_begins(c) * elem);

    int64_t N = c->block_size, H = c->num_kv_heads, B = c->num_blocks;
    int64_t both = N * H * (head_size(c, 0) + head_size(c, 1)) * B * elem;
    int64_t end = both;
    if (c->dtype == FOLIO_INT8) {
        int64_t sd[3] = {B, H, N}, ss[3] = {H * N, N, 1};
        check_array(&s.k_scales, 3, sd, ss, 4, what);
        check_array(&s.v_scales, 3, sd, ss, 4, what);
        CHECK(s.k_scales.offset_bytes >= both && s.k_scales.offset_bytes % 4 == 0);
        CHECK(s.v_scales.offset_bytes >= s.k_scales.offset_bytes + s.k_scales.bytes);
        CHECK(s.v_scales.offset_bytes % 4 == 0);
        end = s.v_scales.offset_bytes + s.v_scales.bytes;
    } else {
        CHECK_INT(s.k_scales.num_dims, 0);
        CHECK_INT(s.v_scales.num_dims, 0);
    }
    CHECK(s.layer_bytes >= end && s.layer_bytes < end + 64); /* the next layer is aligned too */
    CHECK_INT(s.total_bytes, s.layer_bytes * c->num_layers);
    if (c->layout == FOLIO_LAYOUT_NATIVE) CHECK_INT(s.alignment, 64);
    CHECK(s.alignment >= elem && (s.alignment & (s.alignment - 1)) == 0);
    CHECK(s.layout_id != NULL && s.layout_id[0] != '\0' && s.layout_version >= 1);
}

TEST(cache, shapes_of_every_layout_and_dtype)
{
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++)
        for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++)
            for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++)
                for (int n = 0; n < COUNT_OF(block_sizes); n++) {
                    folio_kv_cache_desc c =
                        describe(support_layouts[l], support_kv_dtypes[t], block_sizes[n]);
                    check_shape(support_backends[b], &c);
                }
}

TEST(cache, shape_defaults_and_ids)
{
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NHD, FOLIO_F16, 16);
    folio_kv_cache_shape a = {.struct_size = sizeof a}, b = {.struct_size = sizeof b};
    c.v_head_size = 0; /* k_head_size */
    CHECK_OK(folio_kv_cache_get_shape(NULL, &c, &a));
    CHECK_OK(folio_kv_cache_get_shape("auto", &c, &b));
    CHECK_INT(a.v.dims[3], 32);
    CHECK_INT(a.layer_bytes, b.layer_bytes);
    CHECK_INT(a.v.offset_bytes, a.k.bytes);

    /* One id and version: equal bytes. Both host backends say the same, and no two layouts do. */
    const char *ids[SUPPORT_NUM_LAYOUTS] = {0};
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++) {
        c = describe(support_layouts[l], FOLIO_F32, 16);
        CHECK_OK(folio_kv_cache_get_shape("reference", &c, &a));
        CHECK_OK(folio_kv_cache_get_shape("cpu", &c, &b));
        CHECK(strcmp(a.layout_id, b.layout_id) == 0 && a.layout_version == b.layout_version);
        ids[l] = a.layout_id;
        for (int i = 0; i < l; i++) CHECK(strcmp(ids[i], ids[l]) != 0);
    }
}

/* The backend promises block_size * D * elem bytes for each of K and V per block and kv head. */
TEST(cache, native_has_no_padding)
{
    const int sizes[] = {1, 7, 16, 17, 64, 100, 4096};
    for (int n = 0; n < COUNT_OF(sizes); n++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, support_kv_dtypes[t], sizes[n]);
            int64_t elem = (int64_t)folio_dtype_size(c.dtype);
            folio_kv_cache_shape s = {.struct_size = sizeof s};
            CHECK_OK(folio_kv_cache_get_shape("cpu", &c, &s));
            CHECK_INT(s.k.strides[0] * elem, (int64_t)sizes[n] * HEADS * (32 + 24) * elem);
            CHECK_INT(s.v.offset_bytes, (int64_t)sizes[n] * 32 * elem);
            CHECK_INT(s.v.strides[0], s.k.strides[0]);
        }
}

/* ----------------------------------------------------------------------------- write and gather */

/* A write of known rows: row i goes to slots[i]. */
static void write_known(folio_kv_cache *cache, const folio_kv_cache_desc *c, int32_t layer,
                        const int64_t *slots, int64_t count)
{
    float *k = support_known_rows(c->dtype, 0, 0, count, c->num_kv_heads, head_size(c, 0));
    float *v = support_known_rows(c->dtype, 1, 0, count, c->num_kv_heads, head_size(c, 1));
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = count},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = count}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, layer, &w, NULL));
    free(k);
    free(v);
}

/* row_of[slot]: the known row that lies there, or -1: still poison. */
static int64_t wrong_numbers(const folio_kv_cache_view *view, int part, const int64_t *row_of)
{
    const folio_kv_cache_desc *c = view->desc;
    const void *array = part ? view->v : view->k;
    uint32_t poison = folio_dtype_size(c->dtype) == 4   ? UINT32_MAX
                      : folio_dtype_size(c->dtype) == 2 ? 0xFFFFu
                                                        : 0xFFu;
    int64_t wrong = 0;
    for (int64_t b = 0; b < c->num_blocks; b++)
        for (int64_t n = 0; n < c->block_size; n++)
            for (int64_t h = 0; h < c->num_kv_heads; h++) {
                int64_t row = row_of ? row_of[b * c->block_size + n] : -1;
                support_number known = {.bits = poison};
                for (int64_t d = 0; d < head_size(c, part); d++) {
                    if (row >= 0) known = support_known(c->dtype, part, row, h, d);
                    wrong += kit_get(c->dtype, array, place(c, part, b, n, h, d)) != known.bits;
                }
                if (c->dtype != FOLIO_INT8) continue;
                const float *scales = part ? view->v_scales : view->k_scales;
                float scale = scales[(b * c->num_kv_heads + h) * c->block_size + n];
                wrong += row >= 0 ? scale != known.scale : !isnan(scale);
            }
    return wrong;
}

static void check_gather(const folio_kv_cache *cache, const folio_kv_cache_desc *c, int32_t layer,
                         const int64_t *slots, int64_t count)
{
    int64_t H = c->num_kv_heads, Dk = head_size(c, 0), Dv = head_size(c, 1);
    support_buffer k = support_buffer_make((size_t)(count * H * Dk) * sizeof(float));
    support_buffer v = support_buffer_make((size_t)(count * H * Dv) * sizeof(float));
    folio_kv_gather g =
        FOLIO_WITH(folio_kv_gather, .k = {.data = k.data, .dtype = FOLIO_F32, .tokens = count},
                   .v = {.data = v.data, .dtype = FOLIO_F32, .tokens = count}, .slots = slots,
                   .num_slots = count);
    CHECK_OK(folio_kv_cache_gather(cache, layer, &g, NULL));
    int64_t wrong = 0;
    for (int part = 0; part < 2; part++) {
        const float *got = part ? v.data : k.data;
        for (int64_t i = 0, at = 0; i < count; i++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t d = 0; d < (part ? Dv : Dk); d++, at++) {
                    float known =
                        slots[i] < 0 ? 0.0f : support_known(c->dtype, part, i, h, d).value;
                    wrong += memcmp(&got[at], &known, 4) != 0 && !(got[at] == 0 && known == 0);
                }
    }
    CHECK_MSG(wrong == 0, "%s %s %d: gather: %lld wrong numbers", folio_layout_name(c->layout),
              folio_dtype_name(c->dtype), c->block_size, (long long)wrong);
    support_buffer_free(&k);
    support_buffer_free(&v);
}

/* Most slots of a layer in a shuffled order, every seventh row nowhere: memory holds just that. */
static void roundtrip(folio_context *ctx, const folio_kv_cache_desc *c)
{
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, c, &cache));
    if (cache == NULL) return;
    kit_poison_cache(cache);
    int64_t num_slots = c->num_blocks * c->block_size, count = num_slots - num_slots / 5;
    int64_t *slots = malloc((size_t)num_slots * sizeof *slots);
    int64_t *row_of = malloc((size_t)num_slots * sizeof *row_of);
    if (slots == NULL || row_of == NULL) abort();
    support_shuffle(slots, num_slots, (uint64_t)c->block_size);
    for (int64_t i = 0; i < num_slots; i++) row_of[i] = -1;
    for (int64_t i = 0; i < count; i++) {
        if (i % 7 == 3) slots[i] = -1;
        else row_of[slots[i]] = i;
    }
    write_known(cache, c, 1, slots, count);
    for (int part = 0; part < 2; part++) {
        folio_kv_cache_view other = support_view(cache, 0), view = support_view(cache, 1);
        int64_t wrong = wrong_numbers(&view, part, row_of);
        CHECK_MSG(wrong == 0, "%s %s %d: %c: %lld wrong numbers in memory",
                  folio_layout_name(c->layout), folio_dtype_name(c->dtype), c->block_size,
                  "KV"[part], (long long)wrong);
        CHECK_INT(wrong_numbers(&other, part, NULL), 0);
    }
    check_gather(cache, c, 1, slots, count);
    folio_kv_cache_destroy(cache);
    free(slots);
    free(row_of);
}

static void roundtrip_all(folio_context *ctx, folio_dtype dtype)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++)
        for (int n = 0; n < COUNT_OF(block_sizes); n++) {
            folio_kv_cache_desc c = describe(support_layouts[l], dtype, block_sizes[n]);
            roundtrip(ctx, &c);
        }
}

BACKEND_TEST(cache, bytes_in_place_f32) { roundtrip_all(ctx, FOLIO_F32); }
BACKEND_TEST(cache, bytes_in_place_f16) { roundtrip_all(ctx, FOLIO_F16); }
BACKEND_TEST(cache, bytes_in_place_bf16) { roundtrip_all(ctx, FOLIO_BF16); }
BACKEND_TEST(cache, bytes_in_place_fp8_e4m3) { roundtrip_all(ctx, FOLIO_FP8_E4M3); }
BACKEND_TEST(cache, bytes_in_place_fp8_e5m2) { roundtrip_all(ctx, FOLIO_FP8_E5M2); }
BACKEND_TEST(cache, bytes_in_place_int8) { roundtrip_all(ctx, FOLIO_INT8); }

/* Head sizes at both ends, K narrower than V, one head. */
BACKEND_TEST(cache, head_sizes_that_differ)
{
    const int sizes[][2] = {{8, 8}, {8, 512}, {512, 8}, {80, 256}, {576, 512}, {576, 576}};
    for (int i = 0; i < COUNT_OF(sizes); i++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, support_kv_dtypes[t], 16);
            c.num_blocks = 2, c.num_kv_heads = 1 + i % 2;
            c.k_head_size = sizes[i][0], c.v_head_size = sizes[i][1];
            roundtrip(ctx, &c);
            c.layout = FOLIO_LAYOUT_HND;
            roundtrip(ctx, &c);
        }
}

BACKEND_TEST(cache, slot_minus_one_writes_nothing)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++) {
        folio_kv_cache_desc c = describe(support_layouts[l], FOLIO_INT8, 16);
        folio_kv_cache *cache = NULL;
        CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
        REQUIRE_TEST(cache != NULL);
        kit_poison_cache(cache);
        int64_t slots[5] = {-1, -1, -1, -1, -1};
        write_known(cache, &c, 0, slots, 5);
        write_known(cache, &c, 0, slots, 0);
        folio_kv_write none = {.struct_size = sizeof none};
        none.k.dtype = none.v.dtype = FOLIO_F32; /* no rows need no memory */
        CHECK_OK(folio_kv_cache_write(cache, 0, &none, NULL));
        folio_kv_cache_view view = support_view(cache, 0);
        CHECK_INT(wrong_numbers(&view, 0, NULL), 0);
        CHECK_INT(wrong_numbers(&view, 1, NULL), 0);
        check_gather(cache, &c, 0, slots, 5); /* zeros */
        folio_kv_cache_destroy(cache);
    }
}

/* ---------------------------------------------------------------------------------------- views */

BACKEND_TEST(cache, view_says_what_the_shape_says)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc c = describe(support_layouts[l], support_kv_dtypes[t], 16);
            folio_kv_cache *cache = NULL;
            folio_kv_cache_shape s = {.struct_size = sizeof s};
            CHECK_OK(folio_kv_cache_get_shape(backend, &c, &s));
            CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
            REQUIRE_TEST(cache != NULL);
            for (int32_t layer = 0; layer < LAYERS; layer++) {
                folio_kv_cache_view view = support_view(cache, layer);
                CHECK(view.k != NULL && view.v != NULL);
                CHECK((uintptr_t)view.k % (uintptr_t)s.alignment == 0);
                CHECK(memcmp(view.k_array.dims, s.k.dims, sizeof s.k.dims) == 0);
                CHECK(memcmp(view.v_array.dims, s.v.dims, sizeof s.v.dims) == 0);
                CHECK(memcmp(view.k_array.strides, s.k.strides, sizeof s.k.strides) == 0);
                CHECK(memcmp(view.v_array.strides, s.v.strides, sizeof s.v.strides) == 0);
                CHECK_INT(view.k_array.bytes, s.k.bytes);
                CHECK_INT(view.v_array.bytes, s.v.bytes);
                CHECK((view.k_scales != NULL) == (c.dtype == FOLIO_INT8));
                CHECK((view.v_scales != NULL) == (c.dtype == FOLIO_INT8));
                if (c.layout == FOLIO_LAYOUT_NATIVE || is_interleaved(c.layout))
                    CHECK_INT((char *)view.v - (char *)view.k, s.v.offset_bytes);
                CHECK_INT(view.desc->num_blocks, c.num_blocks);
                CHECK_INT(view.desc->num_layers, c.num_layers);
                CHECK_INT(view.desc->block_size, c.block_size);
                CHECK_INT(view.desc->num_kv_heads, c.num_kv_heads);
                CHECK_INT(view.desc->k_head_size, c.k_head_size);
                CHECK_INT(view.desc->v_head_size, c.v_head_size);
                CHECK_INT(view.desc->dtype, c.dtype);
                CHECK_INT(view.desc->layout, c.layout);
            }
            CHECK(support_view(cache, 0).k != support_view(cache, 1).k);
            folio_kv_cache_destroy(cache);
        }
}

/* ------------------------------------------------------------------------------- wrapped memory */

/* V NULL: one buffer per layer, V where the shape has it; room for the last number is enough. */
BACKEND_TEST(cache, wrap_one_buffer_with_both)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES - 1; t++) {
            folio_kv_cache_desc c =
                describe(support_layouts[l], support_kv_dtypes[t], t % 2 ? 16 : 1);
            folio_kv_cache_shape s = {.struct_size = sizeof s};
            CHECK_OK(folio_kv_cache_get_shape(backend, &c, &s));
            size_t bytes = (size_t)(s.v.offset_bytes + s.v.bytes);
            support_buffer b[LAYERS];
            void *k[LAYERS];
            for (int i = 0; i < LAYERS; i++) {
                b[i] = support_buffer_make(bytes);
                k[i] = b[i].data;
            }
            folio_kv_memory m = {.struct_size = sizeof m, .k = k, .k_bytes = bytes};
            folio_kv_cache *cache = NULL;
            CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
            REQUIRE_TEST(cache != NULL);
            k[0] = k[1] = NULL; /* the pointer arrays were copied */
            int64_t slots[BLOCKS * 16], row_of[BLOCKS * 16], count = BLOCKS * c.block_size;
            support_shuffle(slots, count, 3);
            for (int64_t i = 0; i < count; i++) row_of[slots[i]] = i;
            write_known(cache, &c, 1, slots, count);
            folio_kv_cache_view view = support_view(cache, 1);
            CHECK(view.k == b[1].data);
            CHECK(view.v == (char *)b[1].data + v_begins(&c) * (int64_t)folio_dtype_size(c.dtype));
            CHECK_INT(wrong_numbers(&view, 0, row_of), 0);
            CHECK_INT(wrong_numbers(&view, 1, row_of), 0);
            CHECK(support_is_poison(b[0].data, b[0].bytes));
            check_gather(cache, &c, 1, slots, count);
            folio_kv_cache_destroy(cache);
            for (int i = 0; i < LAYERS; i++) support_buffer_free(&b[i]);
        }
}

/* An engine's own buffer: blocks further apart than they are long, the space between not ours. */
BACKEND_TEST(cache, wrap_with_a_larger_block_stride)
{
    const folio_layout some[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND,
                                 FOLIO_LAYOUT_XPACKED, FOLIO_LAYOUT_XPACKED_1};
    for (int l = 0; l < COUNT_OF(some); l++) {
        bool native = some[l] == FOLIO_LAYOUT_NATIVE;
        folio_kv_cache_desc c = describe(some[l], FOLIO_BF16, 16), one = c;
        c.num_layers = 1;
        one.num_blocks = 1;
        folio_kv_cache_shape s = {.struct_size = sizeof s};
        CHECK_OK(folio_kv_cache_get_shape(backend, &one, &s));
        int64_t k_len = (native ? s.layer_bytes : s.k.bytes) / 2, v_len = s.v.bytes / 2;
        int64_t k_step = k_len + 64, v_step = v_len + 96;
        support_buffer kb = support_buffer_make((size_t)((BLOCKS - 1) * k_step + k_len) * 2);
        support_buffer vb = support_buffer_make((size_t)((BLOCKS - 1) * v_step + v_len) * 2);
        void *k = kb.data, *v = vb.data;
        folio_kv_memory m = {.struct_size = sizeof m, .k = &k, .k_bytes = kb.bytes};
        m.k_strides.block = k_step;
        if (!native) m.v = &v, m.v_bytes = vb.bytes, m.v_strides.block = v_step;
        folio_kv_cache *cache = NULL;
        CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
        REQUIRE_TEST(cache != NULL);
        int64_t slots[BLOCKS * 16], wrong = 0;
        for (int64_t i = 0; i < BLOCKS * 16; i++) slots[i] = i;
        write_known(cache, &c, 0, slots, BLOCKS * 16);
        folio_kv_cache_view view = support_view(cache, 0);
        CHECK_INT(view.k_array.strides[0], k_step);
        CHECK_INT(view.v_array.strides[0], native ? k_step : v_step);
        for (int part = 0; part < 2; part++)
            for (int64_t i = 0; i < BLOCKS * 16; i++)
                for (int64_t h = 0; h < HEADS; h++)
                    for (int64_t d = 0; d < head_size(&c, part); d++) {
                        const uint16_t *array = part ? view.v : view.k;
                        int64_t at = i / 16 * (part && !native ? v_step : k_step) +
                                     place(&c, part, 0, i % 16, h, d);
                        wrong += array[at] != support_known(c.dtype, part, i, h, d).bits;
                    }
        CHECK_INT(wrong, 0);
        for (int64_t b = 0; b + 1 < BLOCKS; b++) {
            CHECK(support_is_poison((uint16_t *)kb.data + b * k_step + k_len, 128));
            if (!native) CHECK(support_is_poison((uint16_t *)vb.data + b * v_step + v_len, 192));
        }
        check_gather(cache, &c, 0, slots, BLOCKS * 16);
        folio_kv_cache_destroy(cache);
        support_buffer_free(&kb);
        support_buffer_free(&vb);
    }
}

/* The caller's int8 scales in the default order; K and V apart, or one buffer in the native one. */
BACKEND_TEST(cache, wrap_int8_with_scales)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++) {
        bool native = support_layouts[l] == FOLIO_LAYOUT_NATIVE;
        if (is_interleaved(support_layouts[l])) continue;
        folio_kv_cache_desc c = describe(support_layouts[l], FOLIO_INT8, 16);
        c.num_layers = 1;
        folio_kv_cache_shape s = {.struct_size = sizeof s};
        CHECK_OK(folio_kv_cache_get_shape(backend, &c, &s));
        support_buffer kb = support_buffer_make((size_t)(s.k.bytes + (native ? 16 * 24 : 0)));
        support_buffer vb = support_buffer_make((size_t)s.v.bytes);
        support_buffer ksb = support_buffer_make((size_t)s.k_scales.bytes);
        support_buffer vsb = support_buffer_make((size_t)s.v_scales.bytes);
        void *k = kb.data, *v = vb.data;
        float *ks = ksb.data, *vs = vsb.data;
        folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_bytes = kb.bytes,
                                       .v_bytes = vb.bytes, .k_scales = &ks, .v_scales = &vs,
                                       .k_scales_bytes = ksb.bytes, .v_scales_bytes = vsb.bytes);
        if (native) m.v = NULL;
        folio_kv_cache *cache = NULL;
        CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
        REQUIRE_TEST(cache != NULL);
        int64_t slots[BLOCKS * 16], row_of[BLOCKS * 16];
        support_shuffle(slots, BLOCKS * 16, 5);
        for (int64_t i = 0; i < BLOCKS * 16; i++) row_of[slots[i]] = i;
        write_known(cache, &c, 0, slots, BLOCKS * 16);
        folio_kv_cache_view view = support_view(cache, 0);
        CHECK_INT(wrong_numbers(&view, 0, row_of), 0);
        CHECK_INT(wrong_numbers(&view, 1, row_of), 0);
        check_gather(cache, &c, 0, slots, BLOCKS * 16);
        folio_kv_cache_destroy(cache);
        support_buffer_free(&kb);
        support_buffer_free(&vb);
        support_buffer_free(&ksb);
        support_buffer_free(&vsb);
    }
}

/* --------------------------------------------------------------------------- past 2^31 elements */

static void *sparse_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* One decode over three blocks of the cache; out[k_head_size] */
static void attend(folio_context *ctx, folio_kv_cache *cache, const folio_kv_cache_desc *c,
                   const int32_t *blocks, float *out)
{
    kit_layer l = {.cache = cache};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = 1, .k_head_size = c->k_head_size,
                            .kv_dtype = c->dtype, .max_query_tokens = 1, .max_seq_len = 64));
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 37,
                                     .block_table = blocks, .num_blocks = 3);
    CHECK_OK(folio_batch_add(l.batch, &seq));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    float q[16];
    support_fill(q, c->k_head_size, 5, 0.01f);
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = 1},
                                 .out = {.data = out, .dtype = FOLIO_F32, .tokens = 1});
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &t, NULL));
    l.cache = NULL; /* the caller's */
    kit_layer_close(&l);
}

/* 2^24 + 2 blocks of 16 x 8 numbers: K alone has more than 2^31, in F32 of more than 2^33 bytes. */
static void check_high_blocks(folio_context *ctx, const char *backend, folio_layout layout,
                              folio_dtype dtype)
{
    folio_kv_cache_desc c = describe(layout, dtype, 16);
    c.num_blocks = (1 << 24) + 2, c.num_layers = 1, c.num_kv_heads = 1;
    c.k_head_size = c.v_head_size = c.layout == FOLIO_LAYOUT_XPACKED ? 16 : 8;
    int64_t elem = (int64_t)folio_dtype_size(dtype);
    folio_kv_cache_shape s = {.struct_size = sizeof s};
    CHECK_OK(folio_kv_cache_get_shape(backend, &c, &s));
    CHECK_INT(s.layer_bytes, c.num_blocks * 16 * 2 * c.k_head_size * elem);
    void *k = sparse_memory((size_t)s.layer_bytes);
    REQUIRE_TEST(k != NULL);
    folio_kv_memory m = {.struct_size = sizeof m, .k = &k, .k_bytes = (size_t)s.layer_bytes};
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
    REQUIRE_TEST(cache != NULL);
    /* The same 48 rows in the last blocks and in the first. */
    int32_t far[3] = {(1 << 24) + 1, (1 << 24) - 1, 1 << 24}, near[3] = {2, 0, 1};
    int64_t slots[48], near_slots[48], wrong = 0;
    for (int i = 0; i < 48; i++) {
        slots[i] = (int64_t)far[i / 16] * 16 + i % 16;
        near_slots[i] = (int64_t)near[i / 16] * 16 + i % 16;
    }
    write_known(cache, &c, 0, slots, 48);
    write_known(cache, &c, 0, near_slots, 48);
    for (int part = 0; part < 2; part++)
        for (int i = 0; i < 48; i++)
            for (int64_t d = 0; d < c.k_head_size; d++) {
                int64_t at = place(&c, part, far[i / 16], i % 16, 0, d) + part * v_begins(&c);
                wrong += kit_get(dtype, k, at) != support_known(dtype, part, i, 0, d).bits;
            }
    CHECK_INT(wrong, 0);
    check_gather(cache, &c, 0, slots, 48);
    float a[16], b[16];
    attend(ctx, cache, &c, far, a);
    attend(ctx, cache, &c, near, b);
    CHECK(memcmp(a, b, (size_t)c.k_head_size * sizeof *a) == 0 && isfinite(a[0]));
    const folio_block_pair pair[1] = {{far[0], 7}};
    CHECK_OK(folio_kv_cache_copy_blocks(cache, cache, pair, 1, NULL));
    int64_t copied[16];
    for (int i = 0; i < 16; i++) copied[i] = 7 * 16 + i;
    check_gather(cache, &c, 0, copied, 16);
    folio_kv_cache_destroy(cache);
    munmap(k, (size_t)s.layer_bytes);
}

BACKEND_TEST(cache, past_2_31_elements)
{
    for (int l = 0; l < SUPPORT_NUM_LAYOUTS; l++) {
        check_high_blocks(ctx, backend, support_layouts[l], FOLIO_FP8_E4M3);
        check_high_blocks(ctx, backend, support_layouts[l], FOLIO_F32);
    }
}

/* Few blocks, far apart; and many blocks, so that slots pass 2^32. */
BACKEND_TEST(cache, past_2_31_by_strides_and_slots)
{
    const struct {
        int64_t num_blocks, block_stride;
        int block_size;
    } cases[] = {{4, 3000000007, 16}, {(1 << 20) + 3, 8 * 4096, 4096}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_kv_cache_desc c = describe(FOLIO_LAYOUT_STRIDED, FOLIO_FP8_E5M2, cases[i].block_size);
        c.num_blocks = cases[i].num_blocks, c.num_layers = 1, c.num_kv_heads = 1;
        c.k_head_size = c.v_head_size = 8;
        size_t bytes = (size_t)(cases[i].num_blocks * cases[i].block_stride);
        char *base[2] = {sparse_memory(bytes), sparse_memory(bytes)};
        REQUIRE_TEST(base[0] != NULL && base[1] != NULL);
        void *k = base[0], *v = base[1];
        folio_kv_strides s = {cases[i].block_stride, 8, 8};
        folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_bytes = bytes,
                                       .v_bytes = bytes, .k_strides = s, .v_strides = s);
        folio_kv_cache *cache = NULL;
        CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
        REQUIRE_TEST(cache != NULL);
        int64_t last = c.num_blocks * c.block_size - 1, slots[3] = {last, 0, last - c.block_size};
        write_known(cache, &c, 0, slots, 3);
        for (int64_t r = 0; r < 3; r++)
            for (int part = 0; part < 2; part++)
                for (int64_t d = 0; d < 8; d++) {
                    int64_t at = slots[r] / c.block_size * s.block + slots[r] % c.block_size * 8;
                    uint32_t bits = support_known(c.dtype, part, r, 0, d).bits;
                    CHECK_INT((uint8_t)base[part][at + d], bits);
                }
        check_gather(cache, &c, 0, slots, 3);
        folio_kv_cache_destroy(cache);
        munmap(base[0], bytes);
        munmap(base[1], bytes);
    }
}
