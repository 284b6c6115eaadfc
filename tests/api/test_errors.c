/*
 * test_errors.c: bad input to everything but plan and forward: context, attention, cache, merge,
 * bias, backends. Each refusal has its status and a sentence with the number or the name at fault,
 * hands nothing out and writes nothing.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "support.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>

#define ARG FOLIO_ERR_ARGUMENT
#define UNSUPPORTED FOLIO_ERR_UNSUPPORTED

/* ----------------------------------------------------------------------------- status and names */

TEST(errors, names_and_texts)
{
    CHECK(strcmp(folio_status_name(FOLIO_OK), "FOLIO_OK") == 0);
    CHECK(strcmp(folio_status_name(FOLIO_ERR_ARGUMENT), "FOLIO_ERR_ARGUMENT") == 0);
    CHECK(strcmp(folio_status_name(FOLIO_ERR_UNSUPPORTED), "FOLIO_ERR_UNSUPPORTED") == 0);
    CHECK(strcmp(folio_status_name(FOLIO_ERR_MEMORY), "FOLIO_ERR_MEMORY") == 0);
    CHECK(strcmp(folio_status_name(FOLIO_ERR_DEVICE), "FOLIO_ERR_DEVICE") == 0);
    CHECK(strcmp(folio_status_name((folio_status)99), "FOLIO_UNKNOWN") == 0);
    CHECK(strcmp(folio_status_text(FOLIO_OK), "no error") == 0);
    for (int i = -1; i < 9; i++) CHECK(folio_status_text((folio_status)i) != NULL);
    CHECK(folio_last_error() != NULL);
    const char *dtypes[] = {"unknown", "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "f64"};
    const size_t sizes[] = {0, 4, 2, 2, 1, 1, 1, 8};
    for (int i = 0; i < COUNT_OF(dtypes); i++) {
        CHECK(strcmp(folio_dtype_name((folio_dtype)i), dtypes[i]) == 0);
        CHECK_INT(folio_dtype_size((folio_dtype)i), sizes[i]);
        CHECK_INT(folio_dtype_numbers((folio_dtype)i), i > 0);
    }
    CHECK_INT(folio_dtype_size((folio_dtype)8), 0);
    CHECK_INT(folio_dtype_numbers((folio_dtype)8), 0);
    CHECK_INT(folio_dtype_size((folio_dtype)-1), 0);
    CHECK(strcmp(folio_dtype_name((folio_dtype)-1), "unknown") == 0);
    CHECK(strcmp(folio_attention_type_name((folio_attention_type)4), "unknown") == 0);
    CHECK(strcmp(folio_attention_type_name(FOLIO_ATTENTION_ENCODER_DECODER), "encoder_decoder") ==
          0);
    CHECK(strcmp(folio_layout_name(FOLIO_LAYOUT_NATIVE), "native") == 0);
    CHECK(strcmp(folio_layout_name(FOLIO_LAYOUT_STRIDED), "strided") == 0);
    CHECK(strcmp(folio_layout_name((folio_layout)8), "unknown") == 0);
    CHECK(strcmp(folio_version(), FOLIO_VERSION_STRING) == 0);
}

/* A call that succeeds leaves the last sentence as it was. */
TEST(errors, success_keeps_the_last_sentence)
{
    support_mark_error();
    char before[512];
    snprintf(before, sizeof before, "%s", folio_last_error());
    folio_context *ctx = support_context("reference", 1, NULL);
    folio_context_destroy(ctx);
    CHECK(before[0] != '\0' && strcmp(before, folio_last_error()) == 0);
}

TEST(errors, every_destroy_takes_null)
{
    folio_context_destroy(NULL);
    folio_attention_destroy(NULL);
    folio_kv_cache_destroy(NULL);
    folio_batch_destroy(NULL);
    folio_plan_destroy(NULL);
}

/* -------------------------------------------------------------------------------------- context */

static void never_called(void *user, int64_t count, folio_task_fn fn, void *task)
{
    (void)user;
    for (int64_t i = 0; i < count; i++) fn(task, i);
}

#define BAD_CONTEXT(status, words, change)                                                         \
    do {                                                                                           \
        folio_context_desc d = {.struct_size = sizeof d, .backend = name, .num_threads = 1};       \
        folio_context *made = NOWHERE;                                                             \
        change;                                                                                    \
        REFUSED(folio_context_create(&d, &made), status, words);                                   \
        CHECK(made == NULL);                                                                       \
    } while (0)

TEST(errors, context)
{
    support_counter counter = {0};
    folio_allocator allocator = support_allocator(&counter);
    for (int i = 0; i < SUPPORT_NUM_BACKENDS; i++) {
        const char *name = support_backends[i];
        BAD_CONTEXT(ARG, "warp", d.backend = "warp");
        BAD_CONTEXT(ARG, "backend", d.backend = "");
        BAD_CONTEXT(ARG, "3", d.device = 3);
        BAD_CONTEXT(ARG, "-1", d.device = -1);
        BAD_CONTEXT(ARG, "-1", d.num_threads = -1);
        BAD_CONTEXT(ARG, "257|256", d.num_threads = 257);
        BAD_CONTEXT(ARG, "avx9000", d.level = "avx9000");
        BAD_CONTEXT(ARG, "num_threads|0", d.executor.parallel_for = never_called);
        BAD_CONTEXT(ARG, "257", d.executor.parallel_for = never_called;
                    d.executor.num_threads = 257);
        BAD_CONTEXT(ARG, "free", d.allocator = allocator; d.allocator.free = NULL);
        BAD_CONTEXT(ARG, "alloc", d.allocator = allocator; d.allocator.alloc = NULL);
        CHECK_INT(counter.calls, 0);
        /* with an executor num_threads is ignored */
        folio_context_desc d = {.struct_size = sizeof d, .backend = name, .num_threads = -7};
        d.executor = (folio_executor){never_called, NULL, 3};
        folio_context *ctx = NULL;
        CHECK_OK(folio_context_create(&d, &ctx));
        folio_context_info info = {.struct_size = sizeof info};
        CHECK_OK(folio_context_get_info(ctx, &info));
        CHECK(info.backend != NULL && strcmp(info.backend, name) == 0);
        CHECK_INT(info.num_threads, strcmp(name, "cpu") == 0 ? 3 : info.num_threads);
        REFUSED(folio_context_get_info(NULL, &info), ARG, "ctx");
        REFUSED(folio_context_get_info(ctx, NULL), ARG, "info");
        REFUSED(folio_context_create(&d, NULL), ARG, "out");
        folio_context_destroy(ctx);
    }
}

/* num_threads 0: one per processor the process may use. desc NULL: all defaults. */
TEST(errors, context_defaults)
{
    cpu_set_t set;
    REQUIRE_TEST(sched_getaffinity(0, sizeof set, &set) == 0);
    int processors = CPU_COUNT(&set) > 256 ? 256 : CPU_COUNT(&set);
    folio_context *ctx = support_context("cpu", 0, NULL), *plain = NULL;
    folio_context_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_context_get_info(ctx, &info));
    CHECK_INT(info.num_threads, processors);
    CHECK(info.level != NULL && info.device != NULL && info.device[0] != '\0');
    folio_context_desc again = {.struct_size = sizeof again, .backend = "cpu", .level = info.level};
    folio_context *same = NULL;
    CHECK_OK(folio_context_create(&again, &same)); /* the level it reports is one it takes */
    CHECK_OK(folio_context_create(NULL, &plain));
    folio_context_destroy(ctx);
    folio_context_destroy(same);
    folio_context_destroy(plain);
}

/* A backend this build knows but cannot open says why; others are not known at all. */
TEST(errors, backends)
{
    CHECK(folio_backend_count() >= 2);
    CHECK(folio_backend_name(-1) == NULL);
    CHECK(folio_backend_name(folio_backend_count()) == NULL);
    CHECK(strcmp(folio_backend_name(folio_backend_count() - 1), "reference") == 0);
    folio_backend_info info = {.struct_size = sizeof info};
    REFUSED(folio_backend_get_info("warp", &info), ARG, "warp");
    REFUSED(folio_backend_get_info("cpu", NULL), ARG, "info");
    for (int32_t i = 0; i < folio_backend_count(); i++) {
        const char *name = folio_backend_name(i);
        CHECK_OK(folio_backend_get_info(name, &info));
        CHECK(info.reason != NULL && (info.reason[0] == '\0') == (info.available != 0));
        if (info.available) continue;
        folio_context *ctx = NOWHERE;
        folio_context_desc d = {.struct_size = sizeof d, .backend = name};
        REFUSED(folio_context_create(&d, &ctx), UNSUPPORTED, name);
        CHECK(ctx == NULL);
    }
    CHECK_OK(folio_backend_get_info("cuda", &info)); /* known everywhere, available or not */
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = 4, .k_head_size = 64, .dtype = FOLIO_F32);
    char reasons[256];
    memset(reasons, 'x', sizeof reasons);
    CHECK_OK(folio_backend_supports("cpu", &a, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER), NULL,
                                    reasons, 256));
    CHECK(reasons[0] == '\0');
    memset(reasons, 'x', sizeof reasons); /* what is refused writes nothing */
    REFUSED(folio_backend_supports("cpu", &a, 0, NULL, reasons, 256), ARG, "types 0x0");
    REFUSED(folio_backend_supports("cpu", &a, 1u << 9, NULL, reasons, 256), ARG, "types 0x200");
    REFUSED(folio_backend_supports("warp", &a, 1u, NULL, reasons, 256), ARG, "warp");
    a.num_heads = 0;
    REFUSED(folio_backend_supports("cpu", &a, 1u, NULL, reasons, 256), ARG, "num_heads");
    a.num_heads = 4;
    CHECK(reasons[0] == 'x');
    a.k_head_size = 584;
    REFUSED(folio_backend_supports("cpu", &a, 1u, NULL, reasons, sizeof reasons), UNSUPPORTED,
            "584");
    CHECK(strstr(reasons, "584") != NULL);
    char tiny[5] = "....";
    REFUSED(folio_backend_supports("cpu", &a, 1u, NULL, tiny, 4), UNSUPPORTED, "584");
    CHECK(memchr(tiny, '\0', 4) != NULL && tiny[4] == '\0');
    REFUSED(folio_backend_supports("cpu", &a, 1u, NULL, NULL, 0), UNSUPPORTED, "584");
    REFUSED(folio_backend_supports("auto", &a, 1u, NULL, NULL, 0), UNSUPPORTED, "584");
    REFUSED(folio_backend_supports(NULL, &a, 1u, NULL, NULL, 0), UNSUPPORTED, "584");
    REFUSED(folio_backend_supports("cpu", NULL, 1u, NULL, NULL, 0), ARG, "attention");
    REFUSED(folio_backend_supports("warp", &a, 1u, NULL, NULL, 0), ARG, "warp");
}

/* ------------------------------------------------------------------------------------ attention */

#define BAD_ATTENTION(status, words, change)                                                       \
    do {                                                                                           \
        folio_attention_desc d =                                                                   \
            FOLIO_WITH(folio_attention_desc, .num_heads = 6, .num_kv_heads = 3, .k_head_size = 64, \
                       .dtype = FOLIO_F32);                                                        \
        folio_attention *made = NOWHERE;                                                           \
        change;                                                                                    \
        REFUSED(folio_attention_create(ctx, &d, &made), status, words);                            \
        CHECK(made == NULL);                                                                       \
    } while (0)

BACKEND_TEST(errors, attention)
{
    BAD_ATTENTION(ARG, "num_heads|0", d.num_heads = 0);
    BAD_ATTENTION(ARG, "-6", d.num_heads = -6);
    BAD_ATTENTION(ARG, "num_heads|65538|65536", d.num_heads = 65538);
    BAD_ATTENTION(ARG, "6|4", d.num_kv_heads = 4);
    BAD_ATTENTION(ARG, "6|12", d.num_kv_heads = 12);
    BAD_ATTENTION(ARG, "-3", d.num_kv_heads = -3);
    BAD_ATTENTION(ARG, "k_head_size|0", d.k_head_size = 0);
    BAD_ATTENTION(ARG, "4|8", d.k_head_size = 4);
    BAD_ATTENTION(ARG, "12|8", d.k_head_size = 12);
    BAD_ATTENTION(ARG, "-8", d.k_head_size = -8);
    BAD_ATTENTION(UNSUPPORTED, "584|576", d.k_head_size = 584);
    BAD_ATTENTION(UNSUPPORTED, "2147483640", d.k_head_size = 2147483640);
    BAD_ATTENTION(ARG, "v_head_size|4", d.v_head_size = 4);
    BAD_ATTENTION(ARG, "-8", d.v_head_size = -8);
    BAD_ATTENTION(UNSUPPORTED, "584|576", d.v_head_size = 584);
    BAD_ATTENTION(ARG, "v_in_k|2", d.v_in_k = 2);
    BAD_ATTENTION(ARG, "v_in_k|-1", d.v_in_k = -1);
    BAD_ATTENTION(ARG, "v_in_k|72|64", d.v_in_k = 1; d.v_head_size = 72);
    BAD_ATTENTION(ARG, "dtype", d.dtype = (folio_dtype)0);
    BAD_ATTENTION(ARG, "fp8_e4m3", d.dtype = FOLIO_FP8_E4M3);
    BAD_ATTENTION(ARG, "int8", d.dtype = FOLIO_INT8);
    BAD_ATTENTION(ARG, "f64", d.dtype = FOLIO_F64);
    BAD_ATTENTION(ARG, "99", d.dtype = (folio_dtype)99);
    BAD_ATTENTION(ARG, "f64", d.kv_dtype = FOLIO_F64);
    BAD_ATTENTION(ARG, "99", d.kv_dtype = (folio_dtype)99);
    BAD_ATTENTION(ARG, "scale", d.scale = NAN);
    BAD_ATTENTION(ARG, "scale", d.scale = INFINITY);
    BAD_ATTENTION(ARG, "scale", d.scale = -INFINITY);
    BAD_ATTENTION(ARG, "soft_cap", d.soft_cap = NAN);
    BAD_ATTENTION(ARG, "soft_cap", d.soft_cap = INFINITY);
    BAD_ATTENTION(ARG, "soft_cap|-1", d.soft_cap = -1.0f);
    BAD_ATTENTION(ARG, "window_left|-2", d.windowed = 1; d.window_left = -2);
    BAD_ATTENTION(ARG, "window_right|-7", d.windowed = 1; d.window_right = -7);
    folio_attention_desc good =
        FOLIO_WITH(folio_attention_desc, .num_heads = 6, .k_head_size = 64, .dtype = FOLIO_F32);
    folio_attention *made = NULL;
    REFUSED(folio_attention_create(NULL, &good, &made), ARG, "ctx");
    REFUSED(folio_attention_create(ctx, NULL, &made), ARG, "desc");
    REFUSED(folio_attention_create(ctx, &good, NULL), ARG, "out");
}

/* The limits themselves are fine; a window that is off may hold anything. */
BACKEND_TEST(errors, attention_limits_are_taken)
{
    const int sizes[][2] = {{8, 8}, {576, 576}, {8, 576}, {80, 0}, {24, 504}};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        folio_attention_desc d =
            FOLIO_WITH(folio_attention_desc, .num_heads = 6, .num_kv_heads = i % 2 ? 0 : 1,
                       .k_head_size = sizes[i][0], .v_head_size = sizes[i][1], .dtype = FOLIO_BF16,
                       .kv_dtype = FOLIO_INT8, .window_left = -70, .window_right = -71);
        folio_attention *made = NULL;
        CHECK_OK(folio_attention_create(ctx, &d, &made));
        folio_attention_destroy(made);
        d.windowed = 1, d.window_left = d.window_right = -1;
        CHECK_OK(folio_attention_create(ctx, &d, &made));
        folio_attention_destroy(made);
    }
}

/* ------------------------------------------------------------------------------------ the cache */

static folio_kv_cache_desc small_cache(void)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 5, .num_layers = 2, .block_size = 16,
                      .num_kv_heads = 2, .k_head_size = 32, .v_head_size = 16, .dtype = FOLIO_F32);
}

/* Refused by shape and by create alike, unless only shape may know it. */
#define BAD_CACHE(status, words, change)                                                           \
    do {                                                                                           \
        folio_kv_cache_desc c = small_cache();                                                     \
        folio_kv_cache_shape shape = {.struct_size = sizeof shape}, before = shape;                \
        folio_kv_cache *made = NOWHERE;                                                            \
        change;                                                                                    \
        REFUSED(folio_kv_cache_get_shape(backend, &c, &shape), status, words);                     \
        CHECK(memcmp(&shape, &before, sizeof shape) == 0);                                         \
        REFUSED(folio_kv_cache_create(ctx, &c, &made), status, words);                             \
        CHECK(made == NULL);                                                                       \
    } while (0)

BACKEND_TEST(errors, cache)
{
    BAD_CACHE(ARG, "num_blocks|0", c.num_blocks = 0);
    BAD_CACHE(ARG, "-1", c.num_blocks = -1);
    BAD_CACHE(ARG, "2147483648", c.num_blocks = (int64_t)1 << 31);
    BAD_CACHE(ARG, "9223372036854775807", c.num_blocks = INT64_MAX);
    BAD_CACHE(ARG, "num_layers|0", c.num_layers = 0);
    BAD_CACHE(ARG, "-2", c.num_layers = -2);
    BAD_CACHE(ARG, "block_size|0", c.block_size = 0);
    BAD_CACHE(ARG, "-16", c.block_size = -16);
    BAD_CACHE(ARG, "4097|4096", c.block_size = 4097);
    BAD_CACHE(ARG, "num_kv_heads|0", c.num_kv_heads = 0);
    BAD_CACHE(ARG, "-2", c.num_kv_heads = -2);
    BAD_CACHE(ARG, "k_head_size|0", c.k_head_size = 0);
    BAD_CACHE(ARG, "12|8", c.k_head_size = 12);
    BAD_CACHE(ARG, "12|8", c.v_head_size = 12);
    BAD_CACHE(ARG, "-8", c.v_head_size = -8);
    BAD_CACHE(ARG, "v_in_k|3", c.v_in_k = 3);
    BAD_CACHE(ARG, "v_in_k|40|32", c.v_in_k = 1; c.v_head_size = 40);
    BAD_CACHE(ARG, "v_in_k|xpacked", c.v_in_k = 1; c.layout = FOLIO_LAYOUT_XPACKED);
    BAD_CACHE(ARG, "v_in_k|xpacked_1", c.v_in_k = 1; c.layout = FOLIO_LAYOUT_XPACKED_1);
    BAD_CACHE(ARG, "v_in_k|interleaved_nhd", c.v_in_k = 1; c.layout = FOLIO_LAYOUT_INTERLEAVED_NHD;
              c.k_head_size = 64; c.v_head_size = 32);
    BAD_CACHE(ARG, "v_in_k|interleaved_nhd", c.v_in_k = 1; c.layout = FOLIO_LAYOUT_INTERLEAVED_NHD;
              c.v_head_size = 32);
    BAD_CACHE(ARG, "v_in_k|interleaved_hnd", c.v_in_k = 1; c.layout = FOLIO_LAYOUT_INTERLEAVED_HND;
              c.v_head_size = 32);
    BAD_CACHE(ARG, "dtype", c.dtype = (folio_dtype)0);
    BAD_CACHE(ARG, "f64", c.dtype = FOLIO_F64);
    BAD_CACHE(ARG, "99", c.dtype = (folio_dtype)99);
    BAD_CACHE(ARG, "8", c.layout = (folio_layout)8);
    BAD_CACHE(ARG, "-1", c.layout = (folio_layout)-1);
    BAD_CACHE(ARG, "32|16", c.layout = FOLIO_LAYOUT_INTERLEAVED_NHD);
    BAD_CACHE(ARG, "32|16", c.layout = FOLIO_LAYOUT_INTERLEAVED_HND);
    /* x = 16: a head of 24 has no whole number of them */
    BAD_CACHE(ANY_REFUSAL, "24|16", c.layout = FOLIO_LAYOUT_XPACKED; c.dtype = FOLIO_FP8_E4M3;
              c.k_head_size = 24);
    folio_kv_cache_desc c = small_cache();
    folio_kv_cache *made = NOWHERE;
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    c.layout = FOLIO_LAYOUT_STRIDED;
    REFUSED(folio_kv_cache_create(ctx, &c, &made), ARG, "strided");
    CHECK(made == NULL);
    c = small_cache();
    REFUSED(folio_kv_cache_create(NULL, &c, &made), ARG, "ctx");
    REFUSED(folio_kv_cache_create(ctx, NULL, &made), ARG, "desc");
    REFUSED(folio_kv_cache_create(ctx, &c, NULL), ARG, "out");
    REFUSED(folio_kv_cache_get_shape(backend, NULL, &shape), ARG, "desc");
    REFUSED(folio_kv_cache_get_shape(backend, &c, NULL), ARG, "shape");
    REFUSED(folio_kv_cache_get_shape("warp", &c, &shape), ARG, "warp");
}

/* Each factor is fine by itself. */
BACKEND_TEST(errors, cache_sizes_that_near_2_63)
{
    for (int l = 0; l < FOLIO_LAYOUT_STRIDED; l++) {
        folio_layout layout = (folio_layout)l;
        BAD_CACHE(ARG, "", c.layout = layout; c.v_head_size = 32; c.num_blocks = INT32_MAX;
                  c.num_kv_heads = INT32_MAX);
        BAD_CACHE(ARG, "", c.layout = layout; c.v_head_size = 32; c.num_blocks = INT32_MAX;
                  c.num_layers = INT32_MAX);
        BAD_CACHE(ARG, "", c.layout = layout; c.v_head_size = 32; c.num_layers = INT32_MAX;
                  c.num_kv_heads = INT32_MAX; c.block_size = 4096);
        BAD_CACHE(ARG, "", c.layout = layout; c.v_head_size = 32; c.num_blocks = INT32_MAX;
                  c.block_size = 4096; c.num_kv_heads = 1 << 16);
        BAD_CACHE(ARG, "", c.layout = layout; c.v_head_size = 32; c.num_blocks = INT32_MAX;
                  c.block_size = 4096; c.num_kv_heads = INT32_MAX; c.num_layers = INT32_MAX;
                  c.dtype = FOLIO_INT8);
    }
    /* 2^61 bytes have a shape, computed without overflow, but no memory. */
    support_counter counter = {.limit = (size_t)1 << 40};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *limited = support_context(backend, 1, &allocator);
    REQUIRE_TEST(limited != NULL);
    folio_kv_cache_desc c = small_cache();
    c.num_blocks = INT32_MAX, c.num_layers = 1, c.block_size = 4096, c.num_kv_heads = 64;
    c.k_head_size = c.v_head_size = 512;
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    CHECK_OK(folio_kv_cache_get_shape(backend, &c, &shape));
    CHECK_INT(shape.layer_bytes, (int64_t)INT32_MAX * 4096 * 64 * 512 * 4 * 2);
    folio_kv_cache *made = NOWHERE;
    REFUSED(folio_kv_cache_create(limited, &c, &made), FOLIO_ERR_MEMORY, "");
    CHECK(made == NULL);
    folio_context_destroy(limited);
    CHECK_INT(counter.live, 0);
}

/* --------------------------------------------------------------------------------- wrapped ones */

/* Memory of a good wrap: one layer's K and V apart, scales after them. */
typedef struct {
    folio_kv_cache_desc c;
    folio_kv_memory m;
    void *k[2], *v[2];
    float *ks[2], *vs[2];
} wrapping;

static wrapping wrap_of(support_buffer *b, folio_layout layout, folio_dtype dtype)
{
    wrapping w = {.c = small_cache()};
    w.c.layout = layout, w.c.dtype = dtype, w.c.v_head_size = 32;
    size_t elem = folio_dtype_size(dtype), part = 5 * 16 * 2 * 32 * elem, scales = 5 * 16 * 2 * 4;
    for (int l = 0; l < 2; l++) {
        char *at = (char *)b->data + (size_t)l * 49152;
        w.k[l] = at, w.v[l] = at + part;
        w.ks[l] = (float *)(void *)(at + 2 * part);
        w.vs[l] = (float *)(void *)(at + 2 * part + scales);
    }
    w.m = (folio_kv_memory){.struct_size = sizeof w.m, .k_bytes = part, .v_bytes = part};
    if (layout == FOLIO_LAYOUT_NATIVE) w.m.k_bytes = 2 * part;
    if (layout == FOLIO_LAYOUT_STRIDED) {
        w.m.k_strides = (folio_kv_strides){16 * 64, 64, 32};
        w.m.v_strides = w.m.k_strides;
    }
    if (dtype == FOLIO_INT8) w.m.k_scales_bytes = w.m.v_scales_bytes = scales;
    return w;
}

/* Pointers into the struct itself are set once it lies where it will be used. */
static void wrap_link(wrapping *w)
{
    w->m.k = w->k;
    w->m.v = w->c.layout == FOLIO_LAYOUT_NATIVE ? NULL : w->v;
    w->m.k_scales = w->c.dtype == FOLIO_INT8 ? w->ks : NULL;
    w->m.v_scales = w->c.dtype == FOLIO_INT8 ? w->vs : NULL;
}

#define BAD_WRAP(layout, dtype, words, ...)                                                        \
    do {                                                                                           \
        wrapping w = wrap_of(&b, layout, dtype);                                                   \
        wrap_link(&w);                                                                             \
        folio_kv_cache *made = NULL;                                                               \
        CHECK_OK(folio_kv_cache_wrap(ctx, &w.c, &w.m, &made)); /* before the change */             \
        folio_kv_cache_destroy(made);                                                              \
        made = NOWHERE;                                                                            \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_kv_cache_wrap(ctx, &w.c, &w.m, &made), ARG, words);                          \
        CHECK(made == NULL);                                                                       \
    } while (0)

#define NATIVE FOLIO_LAYOUT_NATIVE
#define NHD FOLIO_LAYOUT_NHD
#define XPACKED FOLIO_LAYOUT_XPACKED
#define STRIDED FOLIO_LAYOUT_STRIDED

BACKEND_TEST(errors, wrap_pointers_and_sizes)
{
    support_buffer b = support_buffer_make(2 * 49152 + 64);
    const folio_layout all[] = {NATIVE, NHD, XPACKED, STRIDED};
    for (int i = 0; i < COUNT_OF(all); i++) {
        BAD_WRAP(all[i], FOLIO_F32, "k", w.m.k = NULL);
        BAD_WRAP(all[i], FOLIO_F32, "1", w.k[1] = NULL);
        BAD_WRAP(all[i], FOLIO_F32, "align", w.k[1] = (char *)w.k[1] + 1);
        BAD_WRAP(all[i], FOLIO_F32, "k_bytes", w.m.k_bytes -= 1);
        BAD_WRAP(all[i], FOLIO_F32, "k_bytes|0", w.m.k_bytes = 0);
        if (all[i] == NATIVE) continue;
        BAD_WRAP(all[i], FOLIO_F32, "v", w.v[0] = NULL);
        BAD_WRAP(all[i], FOLIO_F16, "align", w.v[1] = (char *)w.v[1] + 1);
        BAD_WRAP(all[i], FOLIO_F32, "v_bytes", w.m.v_bytes -= 1);
        BAD_WRAP(all[i], FOLIO_INT8, "k_scales", w.m.k_scales = NULL);
        BAD_WRAP(all[i], FOLIO_INT8, "v_scales", w.m.v_scales = NULL);
        BAD_WRAP(all[i], FOLIO_INT8, "k_scales", w.ks[1] = NULL);
        BAD_WRAP(all[i], FOLIO_INT8, "align", w.vs[1] = (float *)(void *)((char *)w.vs[1] + 2));
        BAD_WRAP(all[i], FOLIO_INT8, "k_scales_bytes", w.m.k_scales_bytes -= 1);
        BAD_WRAP(all[i], FOLIO_INT8, "v_scales_bytes", w.m.v_scales_bytes -= 1);
    }
    BAD_WRAP(NATIVE, FOLIO_F32, "64", w.k[0] = (char *)w.k[0] + 32);
    BAD_WRAP(NHD, FOLIO_F32, "k_bytes", w.m.v = NULL); /* one buffer needs room for both */
    BAD_WRAP(STRIDED, FOLIO_F32, "v", w.m.v = NULL);
    wrapping w = wrap_of(&b, NHD, FOLIO_F32);
    wrap_link(&w);
    folio_kv_cache *made = NULL;
    REFUSED(folio_kv_cache_wrap(NULL, &w.c, &w.m, &made), ARG, "ctx");
    REFUSED(folio_kv_cache_wrap(ctx, NULL, &w.m, &made), ARG, "desc");
    REFUSED(folio_kv_cache_wrap(ctx, &w.c, NULL, &made), ARG, "memory");
    REFUSED(folio_kv_cache_wrap(ctx, &w.c, &w.m, NULL), ARG, "out");
    CHECK(support_is_poison(b.data, b.bytes));
    support_buffer_free(&b);
}

BACKEND_TEST(errors, wrap_strides)
{
    support_buffer b = support_buffer_make(2 * 49152 + 64);
    const int64_t huge = INT64_MAX;
    BAD_WRAP(STRIDED, FOLIO_F32, "-1024", w.m.k_strides.block = -1024);
    BAD_WRAP(STRIDED, FOLIO_F32, "-64", w.m.v_strides.token = -64);
    BAD_WRAP(STRIDED, FOLIO_F32, "-32", w.m.k_strides.head = -32);
    BAD_WRAP(STRIDED, FOLIO_F32, "0", w.m.k_strides = (folio_kv_strides){0});
    BAD_WRAP(STRIDED, FOLIO_F32, "0", w.m.v_strides.token = 0);
    BAD_WRAP(STRIDED, FOLIO_F32, "k_bytes", w.m.k_strides.block += 1);
    BAD_WRAP(STRIDED, FOLIO_F32, "v_bytes", w.m.v_strides.block += 16);
    BAD_WRAP(STRIDED, FOLIO_F32, "", w.m.k_strides.block = huge; w.m.k_bytes = SIZE_MAX);
    BAD_WRAP(STRIDED, FOLIO_F32, "", w.m.k_strides.block = huge / 16 + 1; w.m.k_bytes = SIZE_MAX);
    BAD_WRAP(STRIDED, FOLIO_F32, "", w.m.v_strides.token = huge / 15; w.m.v_bytes = SIZE_MAX);
    BAD_WRAP(STRIDED, FOLIO_INT8, "", w.m.k_scales_strides = (folio_kv_strides){huge / 4, 1, 16};
             w.m.k_scales_bytes = SIZE_MAX);
    BAD_WRAP(STRIDED, FOLIO_INT8, "k_scales_bytes",
             w.m.k_scales_strides = (folio_kv_strides){33, 1, 16});
    /* strides that no second block uses are bounded too */
    BAD_WRAP(STRIDED, FOLIO_F32, "k strides|largest", w.c.num_blocks = 1;
             w.m.k_strides.block = huge / 2; w.m.k_bytes = SIZE_MAX);
    BAD_WRAP(NHD, FOLIO_F32, "v strides|largest", w.c.num_blocks = 1;
             w.m.v_strides.block = huge / 4; w.m.v_bytes = SIZE_MAX);
    BAD_WRAP(STRIDED, FOLIO_INT8, "v_scales strides|largest", w.c.num_blocks = 1;
             w.m.v_scales_strides = (folio_kv_strides){huge / 4, 1, 16};
             w.m.v_scales_bytes = SIZE_MAX);
    BAD_WRAP(NHD, FOLIO_F32, "token", w.m.k_strides = (folio_kv_strides){1024, 64, 0});
    BAD_WRAP(NHD, FOLIO_F32, "head", w.m.v_strides = (folio_kv_strides){1024, 0, 32});
    BAD_WRAP(NHD, FOLIO_F32, "1023", w.m.k_strides.block = 1023); /* blocks would overlap */
    BAD_WRAP(NHD, FOLIO_F32, "", w.m.k_strides.block = huge / 4; w.m.k_bytes = SIZE_MAX);
    BAD_WRAP(NHD, FOLIO_F32, "", w.m.k_strides.block = 2048; w.m.k_bytes *= 4; w.m.v = NULL);
    BAD_WRAP(XPACKED, FOLIO_F32, "-1024", w.m.v_strides.block = -1024);
    BAD_WRAP(NATIVE, FOLIO_F32, "token", w.m.k_strides = (folio_kv_strides){2048, 64, 0});
    BAD_WRAP(NATIVE, FOLIO_F32, "2032", w.m.k_strides.block = 2032);
    BAD_WRAP(NATIVE, FOLIO_F32, "k_bytes", w.m.k_strides.block = 2064);
    BAD_WRAP(NATIVE, FOLIO_F32, "64", w.m.k_strides.block = 2049; w.m.k_bytes *= 2);
    BAD_WRAP(NATIVE, FOLIO_F32, "64", w.m.k_strides.block = 2063; w.m.k_bytes *= 2);
    BAD_WRAP(STRIDED, FOLIO_F32, "k|overlap", w.m.k_strides = (folio_kv_strides){32, 32, 32});
    BAD_WRAP(STRIDED, FOLIO_F32, "v|overlap", w.m.v_strides = (folio_kv_strides){1023, 32, 512});
    BAD_WRAP(NHD, FOLIO_INT8, "k_scales|overlap",
             w.m.k_scales_strides = (folio_kv_strides){1, 1, 1});
    BAD_WRAP(NATIVE, FOLIO_F32, "", w.m.k_strides.block = huge - 63; w.m.k_bytes = SIZE_MAX);
    CHECK(support_is_poison(b.data, b.bytes));
    support_buffer_free(&b);
}

/* ----------------------------------------------------------------------------- strides of tensors */

/* One head of one row uses neither stride, and they are bounded all the same. 0 counts what was given of the other. */
BACKEND_TEST(errors, strides_that_no_number_needs)
{
    folio_kv_cache_desc c = small_cache();
    c.num_kv_heads = 1;
    folio_kv_cache *one = NULL, *two = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &one));
    c.num_kv_heads = 2;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &two));
    REQUIRE_TEST(one && two);
    static float x[4 * 2 * 64], y[4 * 2 * 64];
    const int64_t slots[2] = {3, 1}, large[] = {INT64_MAX / 2, INT64_MAX / 16, INT64_MAX / 4};
    for (int i = 0; i < COUNT_OF(large); i++) {
        folio_kv_write w = {.struct_size = sizeof w, .slots = slots};
        w.k = w.v = (folio_tensor){.data = x, .dtype = FOLIO_F32, .tokens = 1};
        w.k.head_stride = large[i];
        REFUSED(folio_kv_cache_write(one, 0, &w, NULL), ARG, "k: |stride|largest");
        w.k.head_stride = 0;
        w.v.token_stride = large[i];
        REFUSED(folio_kv_cache_write(one, 0, &w, NULL), ARG, "v: |stride|largest");
        folio_state part = {.out = {.data = x, .dtype = FOLIO_F32, .tokens = 1}, .lse = x + 64};
        folio_merge m =
            FOLIO_WITH(folio_merge, .num_heads = 1, .head_size = 8, .num_parts = 1, .parts = &part,
                       .out = {.data = y, .dtype = FOLIO_F32, .tokens = 1}, .lse = y + 64);
        m.lse_head_stride = large[i];
        REFUSED(folio_state_merge(ctx, &m, NULL), ARG, "lse|stride|largest");
        m.lse_head_stride = 0;
        part.lse_token_stride = large[i];
        REFUSED(folio_state_merge(ctx, &m, NULL), ARG, "lse|stride|largest");
    }
    /* token_stride 0: heads * head_stride, not heads * head_size */
    support_fill(x, COUNT_OF(x), 3, 1);
    folio_kv_write w = {.struct_size = sizeof w, .slots = slots};
    w.k = (folio_tensor){.data = x, .dtype = FOLIO_F32, .tokens = 2, .head_stride = 64};
    w.v = w.k;
    CHECK_OK(folio_kv_cache_write(two, 0, &w, NULL));
    folio_kv_gather g = {.struct_size = sizeof g, .slots = slots, .num_slots = 2};
    g.k = (folio_tensor){.data = y, .dtype = FOLIO_F32, .tokens = 2, .head_stride = 64};
    CHECK_OK(folio_kv_cache_gather(two, 0, &g, NULL));
    for (int64_t i = 0; i < 4; i++)
        CHECK(memcmp(x + 64 * i, y + 64 * i, (size_t)c.k_head_size * sizeof(float)) == 0);
    folio_kv_cache_destroy(one);
    folio_kv_cache_destroy(two);
}

/* ------------------------------------------------------------------------------- merge and bias */

enum { TOKENS = 3, HEADS = 2, SIZE = 8 };

#define BAD_MERGE(words, change)                                                                   \
    do {                                                                                           \
        folio_tensor in = {.data = x, .dtype = FOLIO_F32, .tokens = TOKENS};                       \
        folio_state parts[2] = {{.out = in, .lse = lse_in}, {.out = in, .lse = lse_in}};           \
        folio_merge m = FOLIO_WITH(                                                                \
            folio_merge, .num_heads = HEADS, .head_size = SIZE, .num_parts = 2, .parts = parts,    \
            .out = {.data = out.data, .dtype = FOLIO_F32, .tokens = TOKENS}, .lse = lse.data);     \
        change;                                                                                    \
        REFUSED(folio_state_merge(ctx, &m, NULL), ARG, words);                                     \
        CHECK(support_is_poison(out.data, out.bytes) && support_is_poison(lse.data, lse.bytes));   \
    } while (0)

BACKEND_TEST(errors, merge)
{
    float x[TOKENS * HEADS * SIZE + 1] = {0}, lse_in[TOKENS * HEADS + 1] = {0};
    support_buffer out = support_buffer_make(TOKENS * HEADS * SIZE * 4);
    support_buffer lse = support_buffer_make(TOKENS * HEADS * 4);
    BAD_MERGE("num_heads|0", m.num_heads = 0);
    BAD_MERGE("-2", m.num_heads = -2);
    BAD_MERGE("tokens|4294967296 rows", m.out.tokens = ((int64_t)1 << 32) / HEADS + 1);
    BAD_MERGE("head_size|0", m.head_size = 0);
    BAD_MERGE("-1", m.num_parts = -1);
    BAD_MERGE("parts", m.parts = NULL);
    BAD_MERGE("out", m.out.data = NULL);
    BAD_MERGE("1", parts[1].out.data = NULL);
    BAD_MERGE("lse", parts[1].lse = NULL);
    BAD_MERGE("4|3", parts[1].out.tokens = 4);
    BAD_MERGE("2", m.out.tokens = 2);
    BAD_MERGE("-3", m.out.tokens = -3);
    BAD_MERGE("int8", parts[0].out.dtype = FOLIO_INT8);
    BAD_MERGE("dtype", parts[0].out.dtype = (folio_dtype)0);
    BAD_MERGE("77", m.out.dtype = (folio_dtype)77);
    BAD_MERGE("align", m.out.data = (char *)out.data + 2);
    BAD_MERGE("align", parts[1].out.data = (char *)x + 1);
    BAD_MERGE("align", m.lse = (float *)(void *)((char *)lse.data + 2));
    BAD_MERGE("-16", m.out.token_stride = -16);
    BAD_MERGE("-8", parts[0].out.head_stride = -8);
    BAD_MERGE("", parts[0].out.token_stride = INT64_MAX / 2);
    BAD_MERGE("", m.out.head_stride = INT64_MAX);
    BAD_MERGE("", m.lse_token_stride = INT64_MAX);
    BAD_MERGE("out and parts[0].out", m.out.data = x; m.out.token_stride = HEADS * SIZE + 1);
    BAD_MERGE("out and parts[0].lse", parts[0].lse = (float *)out.data + 1);
    BAD_MERGE("lse and parts[1].out", parts[1].out.data = (float *)lse.data - 3);
    BAD_MERGE("lse and parts[0].lse", parts[0].lse = (float *)lse.data + 1);
    BAD_MERGE("out and lse", m.lse = out.data);
    folio_merge m = {.struct_size = sizeof m};
    REFUSED(folio_state_merge(NULL, &m, NULL), ARG, "ctx");
    REFUSED(folio_state_merge(ctx, NULL, NULL), ARG, "merge");
    support_buffer_free(&out);
    support_buffer_free(&lse);
}

BACKEND_TEST(errors, bias_write)
{
    folio_attention_desc d = FOLIO_WITH(folio_attention_desc, .num_heads = 1 << 13,
                                        .k_head_size = 8, .dtype = FOLIO_F32);
    folio_attention *wide = NULL, *narrow = NULL;
    CHECK_OK(folio_attention_create(ctx, &d, &wide));
    d.num_heads = 2;
    CHECK_OK(folio_attention_create(ctx, &d, &narrow));
    folio_batch *batch = support_batch(ctx, 16);
    REQUIRE_TEST(wide && narrow && batch);
    folio_batch_seq seq = {.struct_size = sizeof seq, .query_len = 3, .seq_len = 5};
    CHECK_OK(folio_batch_add(batch, &seq));
    seq.query_len = 1 << 20, seq.seq_len = INT32_MAX; /* 2^13 * 2^20 * 2^31 floats */
    CHECK_OK(folio_batch_add(batch, &seq));
    support_buffer out = support_buffer_make(2 * 3 * 5 * sizeof(float));
    const float slopes[2] = {0.5f, NAN}, infinite[2] = {INFINITY, 0.0f};
    float *x = out.data;
    const folio_attention_type type = FOLIO_ATTENTION_DECODER;
    REFUSED(folio_bias_write(narrow, batch, type, 0, NULL, x, 29), ARG, "29|30");
    REFUSED(folio_bias_write(narrow, batch, type, 0, NULL, x, -1), ARG, "-1");
    REFUSED(folio_bias_write(narrow, batch, type, 0, NULL, x, 0), ARG, "30");
    REFUSED(folio_bias_write(wide, batch, type, 1, NULL, x, 30), ARG, "");
    REFUSED(folio_bias_write(wide, batch, type, 1, NULL, x, 0), ARG, "");
    REFUSED(folio_bias_write(narrow, batch, type, 2, NULL, x, 30), ARG, "2");
    REFUSED(folio_bias_write(narrow, batch, type, -1, NULL, x, 30), ARG, "-1");
    REFUSED(folio_bias_write(narrow, batch, (folio_attention_type)4, 0, NULL, x, 30), ARG, "4");
    REFUSED(folio_bias_write(narrow, batch, type, 0, slopes, x, 30), ARG, "slopes|1");
    REFUSED(folio_bias_write(narrow, batch, type, 0, infinite, x, 30), ARG, "slopes|0");
    REFUSED(folio_bias_write(NULL, batch, type, 0, NULL, x, 30), ARG, "attention");
    REFUSED(folio_bias_write(narrow, NULL, type, 0, NULL, x, 30), ARG, "batch");
    REFUSED(folio_bias_write(narrow, batch, type, 0, NULL, NULL, 30), ARG, "out");
    CHECK(support_is_poison(out.data, out.bytes));
    CHECK_OK(folio_bias_write(narrow, batch, type, 0, NULL, x, 30));
    support_buffer_free(&out);
    folio_batch_destroy(batch);
    folio_attention_destroy(wide);
    folio_attention_destroy(narrow);
}

BACKEND_TEST(errors, batch_create)
{
    folio_batch_desc good = {.struct_size = sizeof good, .block_size = 16};
    const struct {
        const char *words;
        folio_batch_desc d;
    } cases[] = {
        {"-1", {.block_size = -1}},
        {"4097|4096", {.block_size = 4097}},
        {"-1", {.block_size = 16, .decode_query_len = -1}},
        {"-1", {.block_size = 16, .max_seqs = -1}},
        {"-2", {.block_size = 16, .max_query_tokens = -2}},
        {"-3", {.block_size = 16, .max_blocks = -3}},
        {"-4", {.block_size = 16, .max_encoder_tokens = -4}},
        {"-5", {.block_size = 16, .max_cross_blocks = -5}},
    };
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_batch_desc d = cases[i].d;
        d.struct_size = sizeof d;
        folio_batch *made = NOWHERE;
        REFUSED(folio_batch_create(ctx, &d, &made), ARG, cases[i].words);
        CHECK(made == NULL);
    }
    /* capacities whose bytes pass 2^63: no overflow into a small allocation */
    support_counter counter = {.limit = (size_t)1 << 40};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *limited = support_context(backend, 1, &allocator);
    int64_t *fields[] = {&good.max_seqs, &good.max_query_tokens, &good.max_blocks,
                         &good.max_encoder_tokens, &good.max_cross_blocks};
    for (int i = 0; limited && i < COUNT_OF(fields); i++) {
        const int64_t sizes[] = {INT64_MAX, INT64_MAX / 2, ((int64_t)1 << 61) + 1};
        for (int j = 0; j < COUNT_OF(sizes); j++) {
            *fields[i] = sizes[j];
            folio_batch *made = NOWHERE;
            REFUSED(folio_batch_create(limited, &good, &made), ANY_REFUSAL, "");
            CHECK(made == NULL);
            *fields[i] = 0;
        }
    }
    folio_context_destroy(limited);
    CHECK_INT(counter.live, 0);
    folio_batch *made = NOWHERE;
    REFUSED(folio_batch_create(NULL, &good, &made), ARG, "ctx");
    REFUSED(folio_batch_create(ctx, NULL, &made), ARG, "desc");
    REFUSED(folio_batch_create(ctx, &good, NULL), ARG, "out");
}
