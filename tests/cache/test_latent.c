/*
 * test_latent.c: caches without V (v_in_k), where V is the first numbers of K. Their shapes and views; rows written,
 * gathered, copied, packed and wrapped; what is refused; NaN; the same bits in any pieces. That attention over them is
 * right is for `folio check --filter latent`.
 */
#include "kit/layer.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

#define ARG FOLIO_ERR_ARGUMENT

enum { HEADS = 2, DK = 24, DV = 16, BLOCK = 16, BLOCKS = 5, TOKENS = BLOCKS * BLOCK };

static const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND};

static folio_kv_cache_desc describe(folio_layout layout, folio_dtype dtype, int32_t block_size)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 2,
                      .block_size = block_size, .num_kv_heads = HEADS, .k_head_size = DK,
                      .v_head_size = DV, .dtype = dtype, .layout = layout, .v_in_k = 1);
}

/* K's bytes and no others, once for each row. */
BACKEND_TEST(latent, shape_has_no_v)
{
    for (int l = 0; l < COUNT_OF(layouts); l++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++)
            for (int32_t block_size = 5; block_size <= 16; block_size += 11) {
                folio_dtype dtype = support_kv_dtypes[t];
                folio_kv_cache_desc c = describe(layouts[l], dtype, block_size);
                folio_kv_cache_shape s = {.struct_size = sizeof s};
                CHECK_OK(folio_kv_cache_get_shape(backend, &c, &s));
                int64_t rows = BLOCKS * block_size * HEADS, bytes = 0;
                int64_t k = rows * DK * (int64_t)folio_dtype_size(dtype);
                CHECK_INT(s.k.bytes, k);
                CHECK(s.v.num_dims == 0 && s.v.bytes == 0 && s.v_scales.num_dims == 0);
                CHECK_INT(s.k_scales.num_dims, dtype == FOLIO_INT8 ? 3 : 0);
                bytes = (k + 63) / 64 * 64 + (dtype == FOLIO_INT8 ? (rows * 4 + 63) / 64 * 64 : 0);
                CHECK_INT(s.layer_bytes, bytes);
                folio_kv_cache *cache = NULL;
                CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
                REQUIRE_TEST(cache != NULL);
                folio_kv_cache_view v = support_view(cache, 1);
                CHECK(v.k != NULL && v.v == NULL && v.v_scales == NULL);
                CHECK((v.k_scales != NULL) == (dtype == FOLIO_INT8));
                CHECK(v.v_array.num_dims == 0 && v.desc->v_in_k == 1);
                folio_kv_cache_destroy(cache);
            }
}

/* A block's rows in the native layout are those of K in a cache that has V. */
BACKEND_TEST(latent, native_rows_are_those_of_k)
{
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
        folio_kv_cache *cache[2] = {NULL};
        folio_dtype dtype = support_kv_dtypes[t];
        float *k = support_known_rows(dtype, 0, 0, TOKENS, HEADS, DK);
        int64_t slots[TOKENS];
        support_shuffle(slots, TOKENS, 5);
        for (int i = 0; i < 2; i++) {
            folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, dtype, BLOCK);
            c.v_in_k = i;
            CHECK_OK(folio_kv_cache_create(ctx, &c, &cache[i]));
            REQUIRE_TEST(cache[i] != NULL);
            folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, TOKENS, 0, 0},
                                          .v = {k, FOLIO_F32, TOKENS, 0, 0}, .slots = slots);
            if (i == 1) w.v = (folio_tensor){0};
            CHECK_OK(folio_kv_cache_write(cache[i], 0, &w, NULL));
        }
        folio_kv_cache_view a = support_view(cache[0], 0), b = support_view(cache[1], 0);
        size_t head = (size_t)(BLOCK * DK) * folio_dtype_size(dtype);
        for (int64_t i = 0; i < BLOCKS * HEADS; i++) {
            int64_t at = i / HEADS * a.k_array.strides[0] + i % HEADS * a.k_array.strides[1];
            CHECK(memcmp((char *)a.k + (size_t)at * folio_dtype_size(dtype),
                         (char *)b.k + (size_t)i * head, head) == 0);
        }
        free(k);
        for (int i = 0; i < 2; i++) folio_kv_cache_destroy(cache[i]);
    }
}

/* What was stored as K comes back as K, and its first numbers as V; together or alone. */
static void check_gather(folio_kv_cache *cache, folio_dtype dtype, const int64_t *slots)
{
    float *k = malloc(TOKENS * HEADS * DK * sizeof *k),
          *v = malloc(TOKENS * HEADS * DV * sizeof *v);
    float *want = support_known_rows(dtype, 0, 0, TOKENS, HEADS, DK);
    if (k == NULL || v == NULL) abort();
    for (int way = 0; way < 3; way++) {
        folio_kv_gather g = {.struct_size = sizeof g, .slots = slots, .num_slots = TOKENS};
        if (way != 1) g.k = (folio_tensor){k, FOLIO_F32, TOKENS, 0, 0};
        if (way != 2) g.v = (folio_tensor){v, FOLIO_F32, TOKENS, 0, 0};
        memset(k, 0xFF, TOKENS * HEADS * DK * sizeof *k);
        memset(v, 0xFF, TOKENS * HEADS * DV * sizeof *v);
        CHECK_OK(folio_kv_cache_gather(cache, 1, &g, NULL));
        int64_t wrong = 0;
        for (int64_t i = 0; i < TOKENS * HEADS * DK; i++) {
            wrong += way != 1 && k[i] != want[i];
            if (i % DK < DV) wrong += way != 2 && v[i / DK * DV + i % DK] != want[i];
        }
        CHECK_MSG(wrong == 0, "%s: %lld wrong numbers", folio_dtype_name(dtype), (long long)wrong);
    }
    free(k);
    free(v);
    free(want);
}

BACKEND_TEST(latent, rows_go_in_and_out)
{
    for (int l = 0; l < COUNT_OF(layouts); l++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_dtype dtype = support_kv_dtypes[t];
            folio_kv_cache_desc c = describe(layouts[l], dtype, BLOCK);
            folio_kv_cache *cache = NULL, *other = NULL;
            CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
            c.layout = layouts[(l + 1) % COUNT_OF(layouts)];
            CHECK_OK(folio_kv_cache_create(ctx, &c, &other));
            REQUIRE_TEST(cache != NULL && other != NULL);
            int64_t slots[TOKENS];
            support_shuffle(slots, TOKENS, 6);
            float *k = support_known_rows(dtype, 0, 0, TOKENS, HEADS, DK);
            folio_kv_write w =
                FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, TOKENS, 0, 0}, .slots = slots);
            CHECK_OK(folio_kv_cache_write(cache, 1, &w, NULL));
            check_gather(cache, dtype, slots);
            /* block b to block 4 - b of a cache in another layout, then back as rows */
            folio_block_pair pairs[BLOCKS];
            int64_t blocks[BLOCKS], there[BLOCKS];
            for (int64_t b = 0; b < BLOCKS; b++) {
                pairs[b] = (folio_block_pair){b, BLOCKS - 1 - b};
                blocks[b] = b, there[b] = BLOCKS - 1 - b;
            }
            CHECK_OK(folio_kv_cache_copy_blocks(cache, other, pairs, BLOCKS, NULL));
            size_t bytes = TOKENS * HEADS * DK * 4;
            char *rows = malloc(bytes + TOKENS * HEADS * 4);
            if (rows == NULL) abort();
            folio_kv_rows r =
                FOLIO_WITH(folio_kv_rows, .k = rows, .num_blocks = BLOCKS,
                           .k_scales = (float *)(void *)(rows + bytes), .blocks = there);
            CHECK_OK(folio_kv_cache_unpack(other, 1, &r, NULL));
            kit_poison_cache(cache);
            r.blocks = blocks;
            CHECK_OK(folio_kv_cache_pack(cache, 1, &r, NULL));
            check_gather(cache, dtype, slots);
            free(rows);
            free(k);
            folio_kv_cache_destroy(cache);
            folio_kv_cache_destroy(other);
        }
}

BACKEND_TEST(latent, moves_are_refused)
{
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, FOLIO_INT8, BLOCK);
    folio_kv_cache *cache = NULL, *with_v = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
    c.v_in_k = 0;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &with_v));
    REQUIRE_TEST(cache != NULL && with_v != NULL);
    kit_poison_cache(cache);
    uint64_t before = kit_hash_cache(cache);
    static float rows[BLOCK * HEADS * DK];
    const int64_t slot = 3, block = 0;
    folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = {rows, FOLIO_F32, 1, 0, 0}, .slots = &slot);
    w.v = (folio_tensor){rows, FOLIO_F32, 1, 0, 0};
    REFUSED(folio_kv_cache_write(cache, 0, &w, NULL), ARG, "v is given|1|v_in_k");
    w.v = (folio_tensor){0}, w.v_scale = 0.5f;
    REFUSED(folio_kv_cache_write(cache, 0, &w, NULL), ARG, "v_scale|0.5|v_in_k");
    folio_kv_gather g = FOLIO_WITH(folio_kv_gather, .v = {rows, FOLIO_F32, 1, 0, 0}, .slots = &slot,
                                   .num_slots = 1, .v_scale = 2.0f);
    REFUSED(folio_kv_cache_gather(cache, 0, &g, NULL), ARG, "v_scale|2|v_in_k");
    folio_kv_rows r = FOLIO_WITH(folio_kv_rows, .k = rows, .v = rows, .k_scales = rows,
                                 .num_blocks = 1, .blocks = &block);
    REFUSED(folio_kv_cache_pack(cache, 0, &r, NULL), ARG, "v and v_scales must be NULL");
    r.v = NULL, r.v_scales = rows;
    REFUSED(folio_kv_cache_unpack(cache, 0, &r, NULL), ARG, "v and v_scales must be NULL");
    const folio_block_pair pair = {0, 1};
    REFUSED(folio_kv_cache_copy_blocks(cache, with_v, &pair, 1, NULL), ARG, "v_in_k|1 in src|0");
    REFUSED(folio_kv_cache_copy_blocks(with_v, cache, &pair, 1, NULL), ARG, "v_in_k|0 in src|1");
    CHECK(kit_hash_cache(cache) == before);
    folio_kv_cache_destroy(cache);
    folio_kv_cache_destroy(with_v);
}

/* By strides, or one buffer by the block; V of any kind is refused. */
BACKEND_TEST(latent, wrapped)
{
    static const folio_kv_strides strides[] = {
        {1000, 61, 30}, {0}, {BLOCK * HEADS * DK + 8, 0, 0}, {BLOCK * HEADS * DK + 64, 0, 0}};
    static const folio_layout kinds[] = {FOLIO_LAYOUT_STRIDED, FOLIO_LAYOUT_HND, FOLIO_LAYOUT_NHD,
                                         FOLIO_LAYOUT_NATIVE};
    float *k = support_known_rows(FOLIO_INT8, 0, 0, TOKENS, HEADS, DK);
    for (int i = 0; i < COUNT_OF(kinds); i++) {
        folio_kv_cache_desc c = describe(kinds[i], FOLIO_INT8, BLOCK);
        c.num_layers = 1;
        size_t bytes =
            (size_t)(BLOCKS * (strides[i].block ? strides[i].block : BLOCK * HEADS * DK));
        support_buffer data = support_buffer_make(bytes);
        support_buffer scales = support_buffer_make(TOKENS * HEADS * sizeof(float));
        void *base = data.data, *other = k;
        float *scale = scales.data;
        folio_kv_memory m =
            FOLIO_WITH(folio_kv_memory, .k = &base, .k_bytes = bytes, .k_strides = strides[i],
                       .k_scales = &scale, .k_scales_bytes = scales.bytes);
        folio_kv_cache *cache = NOWHERE;
        m.v = &other, m.v_bytes = bytes;
        REFUSED(folio_kv_cache_wrap(ctx, &c, &m, &cache), ARG,
                "v_in_k|v and v_scales must be NULL");
        m.v = NULL, m.v_scales = &scale;
        REFUSED(folio_kv_cache_wrap(ctx, &c, &m, &cache), ARG,
                "v_in_k|v and v_scales must be NULL");
        m.v_scales = NULL, m.v_strides.token = 61;
        REFUSED(folio_kv_cache_wrap(ctx, &c, &m, &cache), ARG, "v_in_k|v_strides 0");
        CHECK(cache == NULL);
        m.v_strides.token = 0;
        CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
        REQUIRE_TEST(cache != NULL);
        int64_t slots[TOKENS];
        for (int64_t s = 0; s < TOKENS; s++) slots[s] = TOKENS - 1 - s;
        folio_kv_write w =
            FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, TOKENS, 0, 0}, .slots = slots);
        CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
        for (int64_t s = 0; s < TOKENS; s += 7) {
            float v[HEADS][DV];
            folio_kv_gather g = FOLIO_WITH(folio_kv_gather, .v = {v, FOLIO_F32, 1, 0, 0},
                                           .slots = &slots[s], .num_slots = 1);
            CHECK_OK(folio_kv_cache_gather(cache, 0, &g, NULL));
            CHECK(v[0][0] == k[s * HEADS * DK] && v[1][DV - 1] == k[(s * HEADS + 1) * DK + DV - 1]);
        }
        folio_kv_cache_destroy(cache);
        support_buffer_free(&data);
        support_buffer_free(&scales);
    }
    free(k);
}

/* Attention and cache must agree; k alone is given; k_scale is V's too. Nothing is written. */
BACKEND_TEST(latent, forwards_are_refused)
{
    kit_layer l = {0}, plain = {0};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = 4, .num_kv_heads = HEADS, .k_head_size = DK,
                            .v_head_size = DV, .v_in_k = true, .num_blocks = BLOCKS,
                            .block_size = BLOCK, .max_seq_len = TOKENS));
    CHECK_OK(KIT_LAYER_OPEN(ctx, &plain, .num_heads = 4, .num_kv_heads = HEADS, .k_head_size = DK,
                            .v_head_size = DV, .num_blocks = BLOCKS, .block_size = BLOCK,
                            .max_seq_len = TOKENS));
    REQUIRE_TEST(l.plan != NULL && plain.plan != NULL);
    static float q[3 * 4 * DK], k[3 * HEADS * DK], out[3 * 4 * DV];
    memset(out, 0x55, sizeof out);
    const int32_t table[] = {2};
    folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = 3, .seq_len = 3,
                                   .block_table = table, .num_blocks = 1);
    CHECK_OK(folio_batch_add(l.batch, &s));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    CHECK_OK(folio_plan_update(plain.plan, l.batch, NULL));
    kit_poison_cache(l.cache);
    uint64_t before = kit_hash_cache(l.cache);
    const folio_tensors good =
        FOLIO_WITH(folio_tensors, .q = {q, FOLIO_F32, 3, 0, 0}, .k = {k, FOLIO_F32, 3, 0, 0},
                   .out = {out, FOLIO_F32, 3, 0, 0});
#define FORWARD(plan, cache)                                                                       \
    folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &t, NULL)
    folio_tensors t = good;
    REFUSED(FORWARD(l.plan, plain.cache), ARG, "v_in_k is 0 in the cache and 1 in the attention");
    REFUSED(FORWARD(plain.plan, l.cache), ARG, "v_in_k is 1 in the cache and 0 in the attention");
    t.v = (folio_tensor){k, FOLIO_F32, 3, 0, 0};
    REFUSED(FORWARD(l.plan, l.cache), ARG, "v is given|3|v_in_k");
    REFUSED(FORWARD(l.plan, NULL), ARG, "v is given|3|v_in_k");
    t = good, t.v.tokens = 3;
    REFUSED(FORWARD(l.plan, l.cache), ARG, "v is given|3");
    t = good, t.v_scale = 1.0f;
    REFUSED(FORWARD(l.plan, l.cache), ARG, "v_scale|1|v_in_k");
    const float ones[HEADS] = {1.0f};
    t = good, t.v_head_scales = ones;
    REFUSED(FORWARD(l.plan, l.cache), ARG, "v_head_scales|v_in_k");
    t = good, t.k.tokens = 2;
    REFUSED(FORWARD(l.plan, l.cache), ARG, "k|2|3");
    t = good, t.k.data = (char *)k + 1;
    REFUSED(FORWARD(l.plan, l.cache), ARG, "k|align");
    CHECK(kit_hash_cache(l.cache) == before);
    for (int i = 0; i < COUNT_OF(out); i++) CHECK(kit_get(FOLIO_F32, out, i) == 0x55555555u);
    char reasons[256];
    folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = 4, .num_kv_heads = HEADS,
                                        .k_head_size = DK, .v_head_size = DV, .dtype = FOLIO_F32);
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, FOLIO_F32, BLOCK);
    REFUSED(folio_backend_supports(backend, &a, 1u, &c, reasons, sizeof reasons),
            FOLIO_ERR_UNSUPPORTED, "v_in_k is 1 in the cache and 0 in the attention");
    a.v_in_k = 1;
    CHECK_OK(folio_backend_supports(backend, &a, 1u, &c, reasons, sizeof reasons));
    t = good;
    CHECK_OK(FORWARD(l.plan, l.cache));
    CHECK_OK(FORWARD(l.plan, NULL));
#undef FORWARD
    kit_layer_close(&plain);
    kit_layer_close(&l);
}

/* folio_attend takes it from the cache. */
BACKEND_TEST(latent, in_one_call)
{
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, FOLIO_F32, BLOCK);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
    REQUIRE_TEST(cache != NULL);
    kit_poison_cache(cache);
    static float q[20 * HEADS * DK], k[20 * HEADS * DK], out[20 * HEADS * DV];
    for (int i = 0; i < 20 * HEADS * DK; i++) k[i] = (float)(i / (HEADS * DK) + i % DK);
    const int32_t table[] = {3, 1}, len = 20;
    const folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS);
    const folio_step step =
        FOLIO_WITH(folio_step, .num_seqs = 1, .seq_lens = &len,
                   .table = {.kind = FOLIO_TABLE_ROWS, .indices = table, .row_stride = 2});
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {q, FOLIO_F32, 20, 0, 0},
                                 .k = {k, FOLIO_F32, 20, 0, 0}, .out = {out, FOLIO_F32, 20, 0, 0});
    CHECK_OK(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL));
    for (int r = 0; r < 20; r++) /* q is 0: the mean of rows 0 to r */
        for (int d = 0; d < DV; d++)
            CHECK(fabsf(out[(r * HEADS + 1) * DV + d] - ((float)r / 2 + (float)d)) < 1e-4f);
    t.v = t.k;
    REFUSED(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL), ARG,
            "v is given|20|v_in_k");
    folio_kv_cache_destroy(cache);
}

/* A step over a cache with V, whose v is a view of k, and over one without. */
static void compare_with_v(folio_context *ctx, folio_layout layout, folio_dtype dtype,
                           folio_dtype kv_dtype, int32_t heads, const char *what)
{
    enum { ROWS = 21, MOST = 16 };
    static uint32_t q[ROWS * MOST * HEADS * DK], k[ROWS * HEADS * DK];
    static uint32_t out[2][ROWS * MOST * HEADS * DV];
    memset(out, 0xFF, sizeof out);
    for (int64_t i = 0; i < ROWS * heads * HEADS * DK; i++)
        kit_store(dtype, q, i, (double)support_random(1, (uint64_t)i));
    for (int64_t i = 0; i < ROWS * HEADS * DK; i++)
        kit_store(dtype, k, i, (double)support_random(2, (uint64_t)i));
    for (int i = 0; i < 2; i++) {
        folio_kv_cache_desc c = describe(layout, kv_dtype, BLOCK);
        folio_kv_cache *cache = NULL;
        c.v_in_k = i;
        CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
        if (cache == NULL) return;
        kit_poison_cache(cache);
        /* a prompt of 20 tokens, then a decode */
        const int32_t table[] = {3, 1};
        int64_t elem = (int64_t)folio_dtype_size(dtype);
        for (int step = 0; step < 2; step++) {
            int64_t first = step * 20, n = step == 0 ? 20 : 1;
            const int32_t len = (int32_t)(first + n);
            folio_tensor k_rows = {(char *)k + first * HEADS * DK * elem, dtype, n, 0, 0};
            folio_tensor v_rows = {k_rows.data, dtype, n, HEADS * DK, DK};
            const folio_attention_desc a =
                FOLIO_WITH(folio_attention_desc, .num_heads = heads * HEADS);
            const folio_step s =
                FOLIO_WITH(folio_step, .num_seqs = 1, .seq_lens = &len,
                           .table = {.kind = FOLIO_TABLE_ROWS, .indices = table, .row_stride = 2});
            folio_tensors t = FOLIO_WITH(
                folio_tensors, .k = k_rows,
                .q = {(char *)q + first * heads * HEADS * DK * elem, dtype, n, 0, 0},
                .out = {(char *)out[i] + first * heads * HEADS * DV * elem, dtype, n, 0, 0},
                .k_scale = 0.25f);
            if (i == 0) t.v = v_rows, t.v_scale = 0.25f;
            CHECK_OK(folio_attend(ctx, &a, FOLIO_ATTENTION_DECODER, &s, cache, 0, &t, NULL));
        }
        folio_kv_cache_destroy(cache);
    }
    CHECK(!support_is_poison(out[0], 64));
    CHECK_MSG(memcmp(out[0], out[1], sizeof out[0]) == 0, "%s %s over %s, %s: other bits", what,
              folio_dtype_name(dtype), folio_dtype_name(kv_dtype), folio_layout_name(layout));
}

/* On host backends: the same bits as with a V of its own. An int8 row has one scale for K and V, which changes V. */
BACKEND_TEST(latent, same_bits_as_with_v)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const folio_dtype kv_dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16, FOLIO_FP8_E4M3,
                                            FOLIO_FP8_E5M2};
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info(backend, &info));
    for (int32_t l = 0; l < info.num_levels; l++) {
        folio_context *at = kit_context(backend, info.levels[l], 1);
        for (int i = 0; at != NULL && i < COUNT_OF(dtypes) * COUNT_OF(kv_dtypes); i++)
            for (int n = 0; n < COUNT_OF(layouts); n++)
                for (int32_t heads = 1; heads <= 16; heads += 15)
                    compare_with_v(at, layouts[n], dtypes[i % COUNT_OF(dtypes)],
                                   kv_dtypes[i / COUNT_OF(dtypes)], heads, info.levels[l]);
        folio_context_destroy(at);
    }
}

/* A NaN anywhere in a row of K is one of V too: the rows that see it are NaN, the others are not. */
BACKEND_TEST(latent, nan_reaches_exactly_its_rows)
{
    static const kit_seq seqs[] = {{.query_len = 20, .seq_len = 37},
                                   {.query_len = 1, .seq_len = 30},
                                   {.query_len = 2, .seq_len = 33}};
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    for (int i = 0; i < 2 * SUPPORT_NUM_KV_DTYPES; i++) {
        kit_spec s = {.seed = 17,
                      .num_heads = i % 2 ? 16 : 3,
                      .num_kv_heads = 1,
                      .k_head_size = 72,
                      .v_head_size = 40,
                      .v_in_k = true,
                      .dtype = dtypes[i % 3],
                      .kv_dtype = support_kv_dtypes[i / 2],
                      .layout = layouts[i % COUNT_OF(layouts)],
                      .nan_from = 30};
        kit_verdict verdict;
        kit_result r = {0};
        CHECK_MSG(kit_check(ctx, NULL, &s, FOLIO_ATTENTION_DECODER, seqs, 3, &verdict), "%s",
                  verdict.message);
        kit_case *h = kit_open(ctx, &s, seqs, 3);
        bool ok = h != NULL && kit_forward(h, NULL, FOLIO_ATTENTION_DECODER, seqs, 3, &r);
        CHECK_MSG(ok, "%s", kit_error());
        for (int64_t row = 0; ok && row < 23; row++) { /* positions 17 to 36, 29, 31 and 32 */
            bool sees = row != 20 && row >= 13;
            CHECK(isnan(r.out[row * r.heads * r.head_size]) == sees);
            CHECK(isnan(r.lse[row * r.heads]) == sees);
        }
        kit_result_free(&r);
        kit_close(h);
    }
}

/* DeepSeek's shape, past the end of a split: whole, in pieces, token by token, beside others, by other threads. */
TEST(latent, rows_have_the_same_bits_in_any_pieces)
{
    static const int64_t whole[] = {4}, pieces[] = {1, 3}, ones[] = {1, 1, 1, 1};
    static const int64_t *const cuts[] = {whole, pieces, ones};
    static const int64_t nums[] = {1, COUNT_OF(pieces), COUNT_OF(ones)};
    static const kit_seq crowd[] = {{.id = 7, .query_len = 2, .seq_len = 2},
                                    {.id = 8, .query_len = 1, .seq_len = 17}};
    static const kit_seq seq = {.id = 1, .query_len = 4, .seq_len = 514};
    for (int i = 0; i < 4; i++) {
        kit_spec s = {.seed = 23,
                      .num_heads = i == 1 ? 128 : 16,
                      .num_kv_heads = 1,
                      .k_head_size = 576,
                      .v_head_size = 512,
                      .v_in_k = true,
                      .dtype = i == 0 ? FOLIO_F32 : FOLIO_BF16,
                      .kv_dtype = i < 3 ? 0 : FOLIO_FP8_E4M3,
                      .rotary = i % 2 ? 64 : 0,
                      .rotary_first = 512,
                      .rotary_pairing = FOLIO_ROTARY_PAIRS};
        kit_result first = {0}, r = {0};
        for (int k = 0; k < 3; k++) {
            folio_context *ctx = kit_context("cpu", NULL, 1 + k);
            bool ok = ctx != NULL && kit_run_pieces(ctx, &s, FOLIO_ATTENTION_DECODER, &seq, cuts[k],
                                                    nums[k], crowd, k, false, k == 0 ? &first : &r);
            CHECK_MSG(ok, "%s", kit_error());
            if (k > 0) CHECK_MSG(ok && kit_rows_equal(&first, 0, &r, 0, 4), "case %d, %d", i, k);
            kit_result_free(&r);
            folio_context_destroy(ctx);
        }
        kit_result_free(&first);
    }
}
