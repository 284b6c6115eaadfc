/*
 * test_cache_move.c: moving K and V: swap_blocks between every pair of layouts bit for bit, pack and
 * unpack of some blocks, writes from and gathers into strided tensors of every dtype, and what is
 * refused. Whole caches are read as plain rows before and after, so what must not change is checked
 * as well. Copies within a cache, and every dtype, are check.block_moves.
 */
#include "support.h"

#include <math.h>
#include <stdlib.h>

enum { HEADS = 3, LAYERS = 3, BLOCKS = 6 };

static folio_kv_cache_desc describe(folio_layout layout, folio_dtype dtype, int block_size,
                                    int v_size)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS,
                      .block_size = block_size, .num_kv_heads = HEADS, .k_head_size = 16,
                      .v_head_size = v_size, .dtype = dtype, .layout = layout);
}

static bool is_interleaved(folio_layout layout)
{
    return layout == FOLIO_LAYOUT_INTERLEAVED_NHD || layout == FOLIO_LAYOUT_INTERLEAVED_HND;
}

/* A cache of any layout; a strided one lies in `memory`. */
typedef struct {
    folio_kv_cache *cache;
    folio_kv_cache_desc desc;
    support_buffer memory;
} moved;

/* Per layer: K rows [block][N][H][Dk + 3], then V rows, then scales [block][N][H + 1]. */
static void wrap_strided(folio_context *ctx, moved *m)
{
    const folio_kv_cache_desc *c = &m->desc;
    int64_t elem = (int64_t)folio_dtype_size(c->dtype), N = c->block_size;
    int64_t k_row = c->k_head_size + 3, v_row = c->v_head_size + 5;
    int64_t k_bytes = (c->num_blocks * N * HEADS * k_row * elem + 63) / 64 * 64;
    int64_t v_bytes = (c->num_blocks * N * HEADS * v_row * elem + 63) / 64 * 64;
    int64_t s_bytes = c->num_blocks * N * (HEADS + 1) * 4;
    m->memory = support_buffer_make((size_t)((k_bytes + v_bytes + 2 * s_bytes) * c->num_layers));
    void *k[LAYERS], *v[LAYERS];
    float *ks[LAYERS], *vs[LAYERS];
    char *at = m->memory.data;
    for (int l = 0; l < c->num_layers; l++) {
        k[l] = at, at += k_bytes;
        v[l] = at, at += v_bytes;
        ks[l] = (float *)(void *)at, at += s_bytes;
        vs[l] = (float *)(void *)at, at += s_bytes;
    }
    folio_kv_strides scales = {N * (HEADS + 1), HEADS + 1, 1};
    folio_kv_memory memory = FOLIO_WITH(folio_kv_memory, .k = k, .v = v, .k_bytes = (size_t)k_bytes,
                                        .v_bytes = (size_t)v_bytes,
                                        .k_strides = {N * HEADS * k_row, HEADS * k_row, k_row},
                                        .v_strides = {N * HEADS * v_row, HEADS * v_row, v_row});
    if (c->dtype == FOLIO_INT8) {
        memory.k_scales = ks, memory.v_scales = vs;
        memory.k_scales_bytes = memory.v_scales_bytes = (size_t)s_bytes;
        memory.k_scales_strides = memory.v_scales_strides = scales;
    }
    CHECK_OK(folio_kv_cache_wrap(ctx, c, &memory, &m->cache));
}

static bool moved_make(folio_context *ctx, const folio_kv_cache_desc *desc, moved *m)
{
    *m = (moved){.desc = *desc};
    if (desc->layout == FOLIO_LAYOUT_STRIDED) wrap_strided(ctx, m);
    else CHECK_OK(folio_kv_cache_create(ctx, desc, &m->cache));
    return m->cache != NULL;
}

static void moved_free(moved *m)
{
    folio_kv_cache_destroy(m->cache);
    support_buffer_free(&m->memory);
}

/* ------------------------------------------------------------------------ a cache as plain rows */

/* [layer][block * N][H][D] as stored */
typedef struct {
    int64_t k_block, v_block, s_block; /* bytes of one block */
    unsigned char *k, *v, *ks, *vs;
} image;

static image image_make(const folio_kv_cache_desc *c)
{
    int64_t elem = (int64_t)folio_dtype_size(c->dtype);
    image m = {.k_block = c->block_size * HEADS * c->k_head_size * elem,
               .v_block = c->block_size * HEADS * c->v_head_size * elem,
               .s_block = c->block_size * HEADS * 4};
    size_t n = (size_t)(c->num_layers * c->num_blocks);
    m.k = calloc(n, (size_t)m.k_block), m.v = calloc(n, (size_t)m.v_block);
    m.ks = calloc(n, (size_t)m.s_block), m.vs = calloc(n, (size_t)m.s_block);
    if (!m.k || !m.v || !m.ks || !m.vs) abort();
    return m;
}

static void image_free(image *m)
{
    free(m->k);
    free(m->v);
    free(m->ks);
    free(m->vs);
}

/* Any bits at all: NaN payloads, infinities, -128. */
static image image_random(const folio_kv_cache_desc *c, uint64_t seed)
{
    image m = image_make(c);
    int64_t n = (int64_t)c->num_layers * c->num_blocks;
    for (int64_t i = 0; i < n * m.k_block; i++)
        m.k[i] = (unsigned char)support_bits(seed, (uint64_t)i);
    for (int64_t i = 0; i < n * m.v_block; i++)
        m.v[i] = (unsigned char)support_bits(seed + 1, (uint64_t)i);
    for (int64_t i = 0; i < n * m.s_block && c->dtype == FOLIO_INT8; i++) {
        m.ks[i] = (unsigned char)support_bits(seed + 2, (uint64_t)i);
        m.vs[i] = (unsigned char)support_bits(seed + 3, (uint64_t)i);
    }
    return m;
}

static folio_kv_rows rows_of(const folio_kv_cache_desc *c, image *m, int64_t layer, int64_t first,
                             const int64_t *blocks, int64_t count)
{
    int64_t at = layer * c->num_blocks + first;
    return FOLIO_WITH(folio_kv_rows, .k = m->k + at * m->k_block, .v = m->v + at * m->v_block,
                      .k_scales = (float *)(void *)(m->ks + at * m->s_block),
                      .v_scales = (float *)(void *)(m->vs + at * m->s_block), .num_blocks = count,
                      .blocks = blocks);
}

static const int64_t in_order[BLOCKS] = {0, 1, 2, 3, 4, 5};

static void image_load(moved *to, image *m)
{
    for (int32_t l = 0; l < to->desc.num_layers; l++) {
        folio_kv_rows rows = rows_of(&to->desc, m, l, 0, in_order, to->desc.num_blocks);
        CHECK_OK(folio_kv_cache_pack(to->cache, l, &rows, NULL));
    }
}

static image image_read(const moved *from)
{
    image m = image_make(&from->desc);
    for (int32_t l = 0; l < from->desc.num_layers; l++) {
        folio_kv_rows rows = rows_of(&from->desc, &m, l, 0, in_order, from->desc.num_blocks);
        CHECK_OK(folio_kv_cache_unpack(from->cache, l, &rows, NULL));
    }
    return m;
}

static bool same_images(const folio_kv_cache_desc *c, const image *a, const image *b)
{
    size_t n = (size_t)(c->num_layers * c->num_blocks);
    return memcmp(a->k, b->k, n * (size_t)a->k_block) == 0 &&
           memcmp(a->v, b->v, n * (size_t)a->v_block) == 0 &&
           memcmp(a->ks, b->ks, n * (size_t)a->s_block) == 0 &&
           memcmp(a->vs, b->vs, n * (size_t)a->s_block) == 0;
}

/* What copying block `from` of src over block `to` of dst in every layer amounts to. */
static void image_copy_block(const folio_kv_cache_desc *c, const image *src, image *dst,
                             int64_t from, int64_t to)
{
    for (int64_t l = 0; l < c->num_layers; l++) {
        int64_t s = l * c->num_blocks + from, d = l * c->num_blocks + to;
        memcpy(dst->k + d * dst->k_block, src->k + s * src->k_block, (size_t)dst->k_block);
        memcpy(dst->v + d * dst->v_block, src->v + s * src->v_block, (size_t)dst->v_block);
        memcpy(dst->ks + d * dst->s_block, src->ks + s * src->s_block, (size_t)dst->s_block);
        memcpy(dst->vs + d * dst->s_block, src->vs + s * src->s_block, (size_t)dst->s_block);
    }
}

static void check_holds(const moved *m, const image *expected, const char *what)
{
    image got = image_read(m);
    CHECK_MSG(same_images(&m->desc, &got, expected), "%s: %s %s, block size %d", what,
              folio_layout_name(m->desc.layout), folio_dtype_name(m->desc.dtype),
              m->desc.block_size);
    image_free(&got);
    if (m->memory.data == NULL) return; /* strided: what lies between rows stays poison */
    size_t elem = folio_dtype_size(m->desc.dtype), row = (size_t)m->desc.k_head_size * elem;
    CHECK(support_is_poison((char *)m->memory.data + row, 3 * elem));
}

/* ------------------------------------------------------------------------------ pack and unpack */

/* Rows of unpack are token by token: what write stored in slot s is row s. */
BACKEND_TEST(cache_move, unpack_shows_what_write_stored)
{
    for (int layout = 0; layout < FOLIO_NUM_LAYOUTS; layout++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc c =
                describe((folio_layout)layout, support_kv_dtypes[t], layout % 2 ? 16 : 5, 16);
            moved m;
            if (!moved_make(ctx, &c, &m)) continue;
            int64_t count = c.num_blocks * c.block_size, slots[BLOCKS * 16], wrong = 0;
            for (int64_t i = 0; i < count; i++) slots[i] = i;
            float *k = support_known_rows(c.dtype, 0, 0, count, HEADS, 16);
            float *v = support_known_rows(c.dtype, 1, 0, count, HEADS, 16);
            folio_kv_write w =
                FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = count},
                           .v = {.data = v, .dtype = FOLIO_F32, .tokens = count}, .slots = slots);
            for (int32_t l = 0; l < LAYERS; l++)
                CHECK_OK(folio_kv_cache_write(m.cache, l, &w, NULL));
            image got = image_read(&m);
            for (int64_t i = 0; i < count * HEADS; i++)
                for (int64_t d = 0; d < 16; d++) {
                    support_number kn = support_known(c.dtype, 0, i / HEADS, i % HEADS, d);
                    support_number vn = support_known(c.dtype, 1, i / HEADS, i % HEADS, d);
                    wrong += kit_get(c.dtype, got.k, i * 16 + d) != kn.bits;
                    wrong += kit_get(c.dtype, got.v, i * 16 + d) != vn.bits;
                    if (c.dtype != FOLIO_INT8) continue;
                    wrong += ((float *)(void *)got.ks)[i] != kn.scale;
                    wrong += ((float *)(void *)got.vs)[i] != vn.scale;
                }
            CHECK_MSG(wrong == 0, "%s %s: %lld wrong", folio_layout_name(c.layout),
                      folio_dtype_name(c.dtype), (long long)wrong);
            image_free(&got);
            free(k);
            free(v);
            moved_free(&m);
        }
}

/* Some blocks, in any order; all others and all other layers stay. Reading one twice is fine. */
BACKEND_TEST(cache_move, pack_touches_its_blocks_alone)
{
    for (int layout = 0; layout < FOLIO_NUM_LAYOUTS; layout++) {
        folio_kv_cache_desc c = describe((folio_layout)layout, FOLIO_INT8, 16, 16);
        moved m;
        if (!moved_make(ctx, &c, &m)) continue;
        image a = image_random(&c, 1), b = image_random(&c, 2), expected = image_make(&c);
        image_load(&m, &a);
        for (int64_t i = 0; i < BLOCKS; i++) image_copy_block(&c, &a, &expected, i, i);
        const int64_t blocks[3] = {4, 0, 3}, twice[4] = {3, 3, 0, 3};
        folio_kv_rows rows = rows_of(&c, &b, 1, 0, blocks, 3); /* the first three blocks of b */
        CHECK_OK(folio_kv_cache_pack(m.cache, 1, &rows, NULL));
        for (int i = 0; i < 3; i++) {
            int64_t to = BLOCKS + blocks[i], from = BLOCKS + i;
            memcpy(expected.k + to * a.k_block, b.k + from * a.k_block, (size_t)a.k_block);
            memcpy(expected.v + to * a.v_block, b.v + from * a.v_block, (size_t)a.v_block);
            memcpy(expected.ks + to * a.s_block, b.ks + from * a.s_block, (size_t)a.s_block);
            memcpy(expected.vs + to * a.s_block, b.vs + from * a.s_block, (size_t)a.s_block);
        }
        check_holds(&m, &expected, "pack of three blocks");
        image got = image_make(&c);
        rows = rows_of(&c, &got, 0, 0, twice, 4);
        CHECK_OK(folio_kv_cache_unpack(m.cache, 1, &rows, NULL));
        CHECK(memcmp(got.k, got.k + a.k_block, (size_t)a.k_block) == 0);
        CHECK(memcmp(got.k, expected.k + (BLOCKS + 3) * a.k_block, (size_t)a.k_block) == 0);
        CHECK(memcmp(got.vs + 2 * a.s_block, expected.vs + BLOCKS * a.s_block, (size_t)a.s_block) ==
              0);
        rows.num_blocks = 0; /* nothing to do is no error */
        CHECK_OK(folio_kv_cache_pack(m.cache, 1, &rows, NULL));
        CHECK_OK(folio_kv_cache_unpack(m.cache, 1, &rows, NULL));
        image_free(&a);
        image_free(&b);
        image_free(&expected);
        image_free(&got);
        moved_free(&m);
    }
}

/* Scales are ignored where the dtype has none. */
BACKEND_TEST(cache_move, rows_without_scales)
{
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, FOLIO_BF16, 16, 8);
    moved m;
    REQUIRE_TEST(moved_make(ctx, &c, &m));
    image a = image_random(&c, 9);
    folio_kv_rows rows = rows_of(&c, &a, 0, 0, in_order, BLOCKS);
    rows.k_scales = rows.v_scales = NULL;
    CHECK_OK(folio_kv_cache_pack(m.cache, 0, &rows, NULL));
    image b = image_make(&c);
    rows = rows_of(&c, &b, 0, 0, in_order, BLOCKS);
    rows.k_scales = rows.v_scales = NULL;
    CHECK_OK(folio_kv_cache_unpack(m.cache, 0, &rows, NULL));
    CHECK(memcmp(a.k, b.k, (size_t)(BLOCKS * a.k_block)) == 0);
    CHECK(memcmp(a.v, b.v, (size_t)(BLOCKS * a.v_block)) == 0);
    image_free(&a);
    image_free(&b);
    moved_free(&m);
}

/* -------------------------------------------------------------------------------- copy and swap */

static void swap_pair(folio_context *ctx, folio_layout from, folio_layout to, folio_dtype dtype,
                      int block_size)
{
    const folio_block_pair pairs[4] = {{1, 4}, {0, 0}, {5, 2}, {1, 3}};
    int v_size = is_interleaved(from) || is_interleaved(to) ? 16 : 8;
    folio_kv_cache_desc cs = describe(from, dtype, block_size, v_size);
    folio_kv_cache_desc cd = describe(to, dtype, block_size, v_size);
    moved src, dst;
    if (!moved_make(ctx, &cs, &src)) return;
    if (!moved_make(ctx, &cd, &dst)) {
        moved_free(&src);
        return;
    }
    image a = image_random(&cs, 20), b = image_random(&cd, 30);
    image_load(&src, &a);
    image_load(&dst, &b);
    CHECK_OK(folio_kv_cache_copy_blocks(src.cache, dst.cache, pairs, 4, NULL));
    CHECK_OK(folio_kv_cache_copy_blocks(src.cache, dst.cache, NULL, 0, NULL));
    for (int i = 0; i < 4; i++) image_copy_block(&cs, &a, &b, pairs[i].from, pairs[i].to);
    check_holds(&dst, &b, folio_layout_name(from));
    check_holds(&src, &a, "the source of a swap");
    image_free(&a);
    image_free(&b);
    moved_free(&src);
    moved_free(&dst);
}

BACKEND_TEST(cache_move, swap_between_all_layouts)
{
    for (int from = 0; from < FOLIO_NUM_LAYOUTS; from++)
        for (int to = 0; to < FOLIO_NUM_LAYOUTS; to++) {
            swap_pair(ctx, (folio_layout)from, (folio_layout)to, FOLIO_INT8, 16);
            swap_pair(ctx, (folio_layout)from, (folio_layout)to, FOLIO_BF16, 32);
            swap_pair(ctx, (folio_layout)from, (folio_layout)to, FOLIO_F32, 3);
        }
}

/* The number of blocks is no part of the geometry. */
BACKEND_TEST(cache_move, swap_into_a_smaller_cache)
{
    folio_kv_cache_desc big = describe(FOLIO_LAYOUT_NATIVE, FOLIO_F16, 16, 8), small = big;
    small.num_blocks = 2;
    moved src, dst;
    REQUIRE_TEST(moved_make(ctx, &big, &src));
    REQUIRE_TEST(moved_make(ctx, &small, &dst));
    image a = image_random(&big, 6), b = image_random(&small, 7);
    image_load(&src, &a);
    image_load(&dst, &b);
    const folio_block_pair pairs[1] = {{5, 1}};
    CHECK_OK(folio_kv_cache_copy_blocks(src.cache, dst.cache, pairs, 1, NULL));
    image got = image_read(&dst);
    for (int l = 0; l < LAYERS; l++) {
        CHECK(memcmp(got.k + (l * 2 + 1) * a.k_block, a.k + (l * BLOCKS + 5) * a.k_block,
                     (size_t)a.k_block) == 0);
        CHECK(memcmp(got.k + l * 2 * a.k_block, b.k + l * 2 * a.k_block, (size_t)a.k_block) == 0);
    }
    image_free(&a);
    image_free(&b);
    image_free(&got);
    moved_free(&src);
    moved_free(&dst);
}

/* ------------------------------------------------------------- tensors of the caller's own form */

/* Rows of a [tokens][heads][size] tensor in one of the float types, at odd strides. */
static folio_tensor strided_tensor(support_buffer *b, folio_dtype dtype, int64_t tokens,
                                   int64_t size)
{
    folio_tensor t = {.dtype = dtype,
                      .tokens = tokens,
                      .token_stride = HEADS * (size + 1) + 5,
                      .head_stride = size + 1};
    *b = support_buffer_make((size_t)(tokens * t.token_stride) * folio_dtype_size(dtype));
    t.data = b->data;
    return t;
}

static const folio_dtype floats[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};

/* K and V in different types and strides, from and to memory with gaps, which stay as they were. */
BACKEND_TEST(cache_move, strided_tensors_of_any_type)
{
    enum { COUNT = 11 };
    const int64_t slots[COUNT] = {7, 0, 40, -1, 12, 13, 95, 50, 51, 3, 64};
    for (int i = 0; i < COUNT_OF(floats); i++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, support_kv_dtypes[t], 16, 24);
            moved m;
            if (!moved_make(ctx, &c, &m)) continue;
            support_buffer kb, vb, gkb, gvb;
            folio_dtype kt = floats[i], vt = floats[(i + 1) % 3];
            folio_kv_write w = {.struct_size = sizeof w, .slots = slots};
            w.k = strided_tensor(&kb, kt, COUNT, 16), w.v = strided_tensor(&vb, vt, COUNT, 24);
            /* small integers: exact in all types, ±127 making int8's scale 1 */
            for (int64_t r = 0; r < COUNT; r++)
                for (int64_t h = 0; h < HEADS; h++)
                    for (int64_t d = 0; d < 24; d++) {
                        double x = d == 0 && c.dtype == FOLIO_INT8 ? -127.0
                                                                   : (double)((r + h + d) % 9 - 4);
                        if (d < 16)
                            kit_set(kt, kb.data, r * w.k.token_stride + h * 17 + d,
                                    kit_encode(kt, x));
                        kit_set(vt, vb.data, r * w.v.token_stride + h * 25 + d, kit_encode(vt, -x));
                    }
            CHECK_OK(folio_kv_cache_write(m.cache, 2, &w, NULL));
            folio_kv_gather g = {.struct_size = sizeof g, .slots = slots, .num_slots = COUNT};
            g.k = strided_tensor(&gkb, kt, COUNT, 16), g.v = strided_tensor(&gvb, vt, COUNT, 24);
            CHECK_OK(folio_kv_cache_gather(m.cache, 2, &g, NULL));
            /* the row that went nowhere comes back as zeros; all else, gaps too, is the same */
            for (int64_t h = 0; h < HEADS; h++) {
                size_t ek = folio_dtype_size(kt), ev = folio_dtype_size(vt);
                memset((char *)kb.data + (size_t)(3 * w.k.token_stride + h * 17) * ek, 0, 16 * ek);
                memset((char *)vb.data + (size_t)(3 * w.v.token_stride + h * 25) * ev, 0, 24 * ev);
            }
            int64_t wrong = 0;
            for (int64_t e = 0; e < COUNT * w.k.token_stride; e++)
                wrong += (kit_get(kt, kb.data, e) != kit_get(kt, gkb.data, e)) &&
                         kit_decode(kt, kit_get(kt, kb.data, e)) != 0.0;
            for (int64_t e = 0; e < COUNT * w.v.token_stride; e++)
                wrong += (kit_get(vt, vb.data, e) != kit_get(vt, gvb.data, e)) &&
                         kit_decode(vt, kit_get(vt, vb.data, e)) != 0.0;
            CHECK_MSG(wrong == 0, "%s through %s: %lld wrong", folio_dtype_name(kt),
                      folio_dtype_name(c.dtype), (long long)wrong);
            support_buffer_free(&kb);
            support_buffer_free(&vb);
            support_buffer_free(&gkb);
            support_buffer_free(&gvb);
            moved_free(&m);
        }
}

/* fp8: K and V each have a scale, the call's or every kv head's own, in write and gather. */
BACKEND_TEST(cache_move, fp8_scales)
{
    static const float of_call[2][HEADS] = {{0.5f, 0.5f, 0.5f}, {4.0f, 4.0f, 4.0f}};
    static const float of_head[2][HEADS] = {{0.5f, 4.0f, 1.0f}, {2.0f, 0.25f, 8.0f}};
    for (int way = 0; way < 2 * FOLIO_NUM_LAYOUTS; way++) {
        folio_kv_cache_desc c = describe((folio_layout)(way / 2), FOLIO_FP8_E4M3, 16, 16);
        moved m;
        if (!moved_make(ctx, &c, &m)) continue;
        const float(*scales)[HEADS] = way % 2 ? of_head : of_call;
        float k[HEADS * 16], v[HEADS * 16], gk[HEADS * 16], gv[HEADS * 16];
        for (int i = 0; i < HEADS * 16; i++) k[i] = (float)(i - 8), v[i] = (float)(i % 15) / 4.0f;
        const int64_t slot = 37;
        folio_kv_write w =
            FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 1},
                       .v = {.data = v, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot);
        folio_kv_gather g = FOLIO_WITH(
            folio_kv_gather, .k = {.data = gk, .dtype = FOLIO_F32, .tokens = 1},
            .v = {.data = gv, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot, .num_slots = 1);
        if (way % 2) w.k_head_scales = scales[0], w.v_head_scales = scales[1];
        else w.k_scale = scales[0][0], w.v_scale = scales[1][0];
        CHECK_OK(folio_kv_cache_write(m.cache, 0, &w, NULL));
        for (int scaled = 0; scaled < 2; scaled++) {
            CHECK_OK(folio_kv_cache_gather(m.cache, 0, &g, NULL)); /* at first as stored */
            for (int i = 0; i < HEADS * 16; i++) {
                double ks = (double)scales[0][i / 16], vs = (double)scales[1][i / 16];
                double kc = kit_decode(c.dtype, kit_encode(c.dtype, (double)k[i] / ks));
                double vc = kit_decode(c.dtype, kit_encode(c.dtype, (double)v[i] / vs));
                CHECK((double)gk[i] == (scaled ? kc * ks : kc));
                CHECK((double)gv[i] == (scaled ? vc * vs : vc));
            }
            g.k_head_scales = w.k_head_scales, g.v_head_scales = w.v_head_scales;
            g.k_scale = w.k_scale, g.v_scale = w.v_scale;
        }
        moved_free(&m);
    }
}

/* ------------------------------------------------------------------------------------- refusals */

/* A refused call leaves all of the cache, and what it was to fill, as they were. */
typedef struct {
    moved m;
    image before;
    float k[8 * HEADS * 16 + 1], v[8 * HEADS * 16 + 1];
} refusal;

static bool refusal_make(folio_context *ctx, refusal *r, folio_dtype dtype)
{
    folio_kv_cache_desc c = describe(FOLIO_LAYOUT_NATIVE, dtype, 16, 16);
    if (!moved_make(ctx, &c, &r->m)) return false;
    r->before = image_random(&c, 70);
    image_load(&r->m, &r->before);
    memset(r->k, 0xFF, sizeof r->k);
    memset(r->v, 0xFF, sizeof r->v);
    return true;
}

static void refusal_check_free(refusal *r)
{
    check_holds(&r->m, &r->before, "after refusals");
    CHECK(support_is_poison(r->k, sizeof r->k) && support_is_poison(r->v, sizeof r->v));
    image_free(&r->before);
    moved_free(&r->m);
}

#define BAD_WRITE(words, ...)                                                                      \
    do {                                                                                           \
        int64_t slots[4] = {3, 95, -1, 40};                                                        \
        int32_t layer = 1;                                                                         \
        folio_run run = {.struct_size = sizeof run};                                               \
        folio_kv_write w =                                                                         \
            FOLIO_WITH(folio_kv_write, .k = {.data = r.k, .dtype = FOLIO_F32, .tokens = 4},        \
                       .v = {.data = r.v, .dtype = FOLIO_F32, .tokens = 4}, .slots = slots);       \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_kv_cache_write(r.m.cache, layer, &w, &run), FOLIO_ERR_ARGUMENT, words);      \
    } while (0)

BACKEND_TEST(cache_move, bad_writes_are_refused)
{
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_FP8_E4M3));
    BAD_WRITE("3", layer = 3);
    BAD_WRITE("-1", layer = -1);
    BAD_WRITE("96", slots[3] = 96);
    BAD_WRITE("-2", slots[0] = -2);
    BAD_WRITE("9223372036854775807", slots[2] = INT64_MAX);
    BAD_WRITE("-9223372036854775808", slots[2] = INT64_MIN);
    BAD_WRITE("95", slots[3] = 95);
    BAD_WRITE("3", slots[3] = 3);
    BAD_WRITE("slots", w.slots = NULL);
    BAD_WRITE("k", w.k.data = NULL);
    BAD_WRITE("v", w.v.data = NULL);
    BAD_WRITE("3|4", w.v.tokens = 3);
    BAD_WRITE("-4", w.k.tokens = w.v.tokens = -4);
    BAD_WRITE("dtype", w.k.dtype = (folio_dtype)0);
    BAD_WRITE("fp8_e4m3", w.k.dtype = FOLIO_FP8_E4M3);
    BAD_WRITE("int8", w.v.dtype = FOLIO_INT8);
    BAD_WRITE("99", w.v.dtype = (folio_dtype)99);
    BAD_WRITE("align", w.k.data = (char *)r.k + 2);
    BAD_WRITE("align", w.v.data = (char *)r.v + 1);
    BAD_WRITE("-48", w.k.token_stride = -48);
    BAD_WRITE("-16", w.v.head_stride = -16);
    BAD_WRITE("", w.k.token_stride = INT64_MAX / 2);
    BAD_WRITE("", w.v.head_stride = INT64_MAX);
    BAD_WRITE("k_scale", w.k_scale = NAN);
    BAD_WRITE("k_scale", w.k_scale = INFINITY);
    BAD_WRITE("k_scale", w.k_scale = -1.0f);
    BAD_WRITE("v_scale", w.v_scale = -INFINITY);
    const float zero[HEADS] = {1.0f, 1.0f, 0.0f}, nan[HEADS] = {1.0f, NAN, 1.0f};
    BAD_WRITE("k_head_scales|2|0", w.k_head_scales = zero);
    BAD_WRITE("v_head_scales|1|nan", w.v_head_scales = nan);
    BAD_WRITE("k_scale is 1|k_head_scales", w.k_head_scales = nan; w.k_scale = 1.0f);
    BAD_WRITE("v_head_scales|align", w.v_head_scales = (const float *)((uintptr_t)nan + 2));
    BAD_WRITE("stream", run.stream = &r);
    REFUSED(folio_kv_cache_write(NULL, 0, &(folio_kv_write){0}, NULL), FOLIO_ERR_ARGUMENT, "cache");
    REFUSED(folio_kv_cache_write(r.m.cache, 0, NULL, NULL), FOLIO_ERR_ARGUMENT, "write");
    refusal_check_free(&r);
}

#define BAD_GATHER(words, ...)                                                                     \
    do {                                                                                           \
        int64_t slots[4] = {3, 95, -1, 3};                                                         \
        int32_t layer = 1;                                                                         \
        folio_kv_gather g = FOLIO_WITH(                                                            \
            folio_kv_gather, .k = {.data = r.k, .dtype = FOLIO_F32, .tokens = 4},                  \
            .v = {.data = r.v, .dtype = FOLIO_F32, .tokens = 4}, .slots = slots, .num_slots = 4);  \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_kv_cache_gather(r.m.cache, layer, &g, NULL), FOLIO_ERR_ARGUMENT, words);     \
    } while (0)

BACKEND_TEST(cache_move, bad_gathers_are_refused)
{
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_FP8_E5M2));
    BAD_GATHER("3", layer = 3);
    BAD_GATHER("-1", layer = -1);
    BAD_GATHER("96", slots[3] = 96);
    BAD_GATHER("-2", slots[1] = -2);
    BAD_GATHER("slots", g.slots = NULL);
    BAD_GATHER("-4", g.num_slots = -4);
    BAD_GATHER("3|4", g.k.tokens = 3);
    BAD_GATHER("3|4", g.v.tokens = 3);
    BAD_GATHER("k", g.k.data = g.v.data = NULL);
    BAD_GATHER("fp8_e5m2", g.k.dtype = FOLIO_FP8_E5M2);
    BAD_GATHER("dtype", g.v.dtype = (folio_dtype)0);
    BAD_GATHER("align", g.k.data = (char *)r.k + 1);
    BAD_GATHER("-1", g.k.token_stride = -1);
    BAD_GATHER("", g.v.token_stride = INT64_MAX / 2);
    BAD_GATHER("k_scale", g.k_scale = NAN);
    BAD_GATHER("v_scale", g.v_scale = -2.0f);
    const float zero[HEADS] = {1.0f, 1.0f, 0.0f}, minus[HEADS] = {-1.0f, 1.0f, 1.0f};
    BAD_GATHER("k_head_scales|2|0", g.k_head_scales = zero);
    BAD_GATHER("v_head_scales|0|-1", g.v_head_scales = minus);
    BAD_GATHER("v_scale is 0.5|v_head_scales", g.v_head_scales = zero; g.v_scale = 0.5f);
    float own[4 * HEADS * 16];
    for (int i = 0; i < COUNT_OF(own); i++) own[i] = 1.0f;
    BAD_GATHER("v and k_head_scales share", g.v.data = own;
               g.k_head_scales = own + COUNT_OF(own) - 1 - HEADS);
    REFUSED(folio_kv_cache_gather(NULL, 0, &(folio_kv_gather){0}, NULL), FOLIO_ERR_ARGUMENT,
            "cache");
    REFUSED(folio_kv_cache_gather(r.m.cache, 0, NULL, NULL), FOLIO_ERR_ARGUMENT, "gather");
    refusal_check_free(&r);
}

BACKEND_TEST(cache_move, bad_copies_are_refused)
{
    const struct {
        const char *words;
        folio_block_pair pairs[2];
        int64_t count;
        bool bad_swap; /* reading what is written is bad within one cache only */
    } cases[] = {{"6", {{0, 1}, {6, 2}}, 2, true},
                 {"-1", {{-1, 1}, {2, 3}}, 2, true},
                 {"6", {{0, 1}, {2, 6}}, 2, true},
                 {"-7", {{0, -7}, {2, 3}}, 2, true},
                 {"9223372036854775807", {{INT64_MAX, 1}, {2, 3}}, 2, true},
                 {"4", {{0, 4}, {1, 4}}, 2, true},
                 {"1", {{0, 1}, {1, 2}}, 2, false},
                 {"1", {{1, 2}, {0, 1}}, 2, false},
                 {"5", {{5, 5}, {0, 1}}, 2, false},
                 {"-2", {{0, 1}, {2, 3}}, -2, true}};
    refusal r, s;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_INT8) && refusal_make(ctx, &s, FOLIO_INT8));
    folio_kv_cache *a = r.m.cache, *b = s.m.cache;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        REFUSED(folio_kv_cache_copy_blocks(a, a, cases[i].pairs, cases[i].count, NULL),
                FOLIO_ERR_ARGUMENT, cases[i].words);
        if (cases[i].bad_swap)
            REFUSED(folio_kv_cache_copy_blocks(b, a, cases[i].pairs, cases[i].count, NULL),
                    FOLIO_ERR_ARGUMENT, cases[i].words);
    }
    REFUSED(folio_kv_cache_copy_blocks(a, a, NULL, 1, NULL), FOLIO_ERR_ARGUMENT, "pairs");
    REFUSED(folio_kv_cache_copy_blocks(b, a, NULL, 1, NULL), FOLIO_ERR_ARGUMENT, "pairs");
    REFUSED(folio_kv_cache_copy_blocks(NULL, a, cases[0].pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
            "src");
    REFUSED(folio_kv_cache_copy_blocks(b, NULL, cases[0].pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
            "dst");
    refusal_check_free(&r);
    refusal_check_free(&s);
}

BACKEND_TEST(cache_move, swap_needs_one_geometry)
{
    const folio_kv_cache_desc base = describe(FOLIO_LAYOUT_HND, FOLIO_INT8, 16, 16);
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_INT8));
    const folio_block_pair pairs[1] = {{0, 1}};
    for (int i = 0; i < 6; i++) {
        const char *words[] = {"2|3", "32|16", "4|3", "24|16", "8|16", "bf16|int8"};
        folio_kv_cache_desc c = base;
        if (i == 0) c.num_layers = 2;
        if (i == 1) c.block_size = 32;
        if (i == 2) c.num_kv_heads = 4;
        if (i == 3) c.k_head_size = 24;
        if (i == 4) c.v_head_size = 8;
        if (i == 5) c.dtype = FOLIO_BF16;
        folio_kv_cache *other = NULL;
        CHECK_OK(folio_kv_cache_create(ctx, &c, &other));
        REFUSED(folio_kv_cache_copy_blocks(other, r.m.cache, pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
                words[i]);
        folio_kv_cache_destroy(other);
    }
    refusal_check_free(&r);
}

#define BAD_ROWS(words, ...)                                                                       \
    do {                                                                                           \
        int64_t blocks[2] = {4, 0};                                                                \
        int32_t layer = 1;                                                                         \
        bool unpack_too = true;                                                                    \
        folio_kv_rows x = rows_of(&r.m.desc, &scratch, 0, 0, blocks, 2);                           \
        __VA_ARGS__;                                                                               \
        REFUSED(folio_kv_cache_pack(r.m.cache, layer, &x, NULL), FOLIO_ERR_ARGUMENT, words);       \
        if (unpack_too)                                                                            \
            REFUSED(folio_kv_cache_unpack(r.m.cache, layer, &x, NULL), FOLIO_ERR_ARGUMENT, words); \
    } while (0)

BACKEND_TEST(cache_move, bad_rows_are_refused)
{
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_INT8));
    image scratch = image_make(&r.m.desc);
    BAD_ROWS("3", layer = 3);
    BAD_ROWS("-1", layer = -1);
    BAD_ROWS("6", blocks[1] = 6);
    BAD_ROWS("-1", blocks[0] = -1);
    BAD_ROWS("4", blocks[1] = 4; unpack_too = false);
    BAD_ROWS("-2", x.num_blocks = -2);
    BAD_ROWS("blocks", x.blocks = NULL);
    BAD_ROWS("k", x.k = NULL);
    BAD_ROWS("v", x.v = NULL);
    BAD_ROWS("k_scales", x.k_scales = NULL);
    BAD_ROWS("v_scales", x.v_scales = NULL);
    BAD_ROWS("align", x.k_scales = (float *)(void *)((char *)x.k_scales + 2));
    BAD_ROWS("align", x.v_scales = (float *)(void *)((char *)x.v_scales + 1));
    for (int64_t i = 0; i < BLOCKS * LAYERS * scratch.k_block; i++) CHECK(scratch.k[i] == 0);
    image_free(&scratch);
    refusal_check_free(&r);
}

BACKEND_TEST(cache_move, misaligned_rows_are_refused)
{
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_BF16));
    image scratch = image_make(&r.m.desc);
    BAD_ROWS("align", x.k = (char *)x.k + 1);
    BAD_ROWS("align", x.v = (char *)x.v + 1);
    image_free(&scratch);
    refusal_check_free(&r);
}

BACKEND_TEST(cache_move, bad_views_are_refused)
{
    refusal r;
    REQUIRE_TEST(refusal_make(ctx, &r, FOLIO_INT8));
    folio_kv_cache_view view = {.struct_size = sizeof view}, before = view;
    REFUSED(folio_kv_cache_get_view(r.m.cache, 3, &view), FOLIO_ERR_ARGUMENT, "3");
    REFUSED(folio_kv_cache_get_view(r.m.cache, -1, &view), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED(folio_kv_cache_get_view(NULL, 0, &view), FOLIO_ERR_ARGUMENT, "cache");
    REFUSED(folio_kv_cache_get_view(r.m.cache, 0, NULL), FOLIO_ERR_ARGUMENT, "view");
    CHECK(memcmp(&view, &before, sizeof view) == 0);
    refusal_check_free(&r);
}
