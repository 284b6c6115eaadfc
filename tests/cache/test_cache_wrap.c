/*
 * test_cache_wrap.c: a cache in the caller's memory by strides: odd ones, heads outermost, blocks
 * innermost, V inside K's storage, K and V of a token side by side. Every number lies where the
 * strides say, and no byte between is written.
 */
#include "support.h"

#include <math.h>
#include <stdlib.h>

enum { HEADS = 3, BLOCKS = 4 };

/* Rows at the caller's strides, in elements. */
typedef struct {
    const char *name;
    folio_dtype dtype;
    int block_size, k_size, v_size;
    folio_kv_strides k, v;
    int64_t v_offset; /* of V from K's base in one buffer; -1: a buffer of its own         */
    bool v_is_k;      /* V's numbers are K's first ones                                    */
} strided_case;

static const strided_case strided_cases[] = {
    {"odd strides", FOLIO_F32, 3, 8, 16, {131, 41, 13}, {151, 50, 17}, -1, false},
    {"odd strides", FOLIO_BF16, 16, 8, 8, {467, 29, 9}, {501, 31, 10}, -1, false},
    {"odd strides", FOLIO_FP8_E4M3, 5, 8, 24, {177, 35, 11}, {399, 79, 25}, -1, false},
    {"odd strides", FOLIO_INT8, 16, 16, 8, {811, 50, 16}, {497, 31, 10}, -1, false},
    {"heads outermost in a block", FOLIO_F16, 16, 8, 8, {999, 9, 333}, {999, 20, 321}, -1, false},
    {"blocks innermost", FOLIO_F32, 4, 8, 8, {8, 32 * 3, 32}, {9, 40 * 3, 40}, -1, false},
    {"V inside K", FOLIO_BF16, 16, 32, 24, {16 * 96, 96, 32}, {16 * 96, 96, 32}, 0, true},
    {"K and V of a token side by side",
     FOLIO_F32,
     8,
     16,
     8,
     {8 * 72, 72, 24},
     {8 * 72, 72, 24},
     16,
     false},
    {"K and V of a token side by side",
     FOLIO_INT8,
     1,
     16,
     16,
     {96, 96, 32},
     {96, 96, 32},
     16,
     false},
};

static int64_t at_strides(const folio_kv_strides *s, int64_t b, int64_t n, int64_t h, int64_t d)
{
    return b * s->block + n * s->token + h * s->head + d;
}

static int64_t extent(const folio_kv_strides *s, const folio_kv_cache_desc *c, int64_t size)
{
    return at_strides(s, c->num_blocks - 1, c->block_size - 1, c->num_kv_heads - 1, size);
}

/* Every number of the layer where the strides say, and no other byte of the buffer written. */
static void check_strided_memory(const strided_case *s, const folio_kv_cache_desc *c, int part,
                                 const void *array, unsigned char *seen, const int64_t *row_of)
{
    int64_t elem = (int64_t)folio_dtype_size(c->dtype), wrong = 0;
    for (int64_t b = 0; b < c->num_blocks; b++)
        for (int64_t n = 0; n < c->block_size; n++)
            for (int64_t h = 0; h < c->num_kv_heads; h++)
                for (int64_t d = 0; d < (part ? c->v_head_size : c->k_head_size); d++) {
                    int64_t at = at_strides(part ? &s->v : &s->k, b, n, h, d);
                    int64_t row = row_of[b * c->block_size + n];
                    support_number known = support_known(c->dtype, s->v_is_k ? 0 : part, row, h, d);
                    wrong += kit_get(c->dtype, array, at) != known.bits;
                    memset(seen + at * elem, 1, (size_t)elem);
                }
    CHECK_MSG(wrong == 0, "%s %s: %c: %lld wrong numbers", s->name, folio_dtype_name(s->dtype),
              "KV"[part], (long long)wrong);
}

static void check_gaps(const support_buffer *buffer, const unsigned char *seen)
{
    int64_t touched = 0;
    for (size_t i = 0; i < buffer->bytes; i++)
        touched += !seen[i] && ((unsigned char *)buffer->data)[i] != 0xFF;
    CHECK_INT(touched, 0);
}

static void write_and_check_strided(folio_kv_cache *cache, const strided_case *s,
                                    const folio_kv_cache_desc *c, support_buffer *kb,
                                    support_buffer *vb)
{
    int64_t count = c->num_blocks * c->block_size, elem = (int64_t)folio_dtype_size(c->dtype);
    int64_t slots[128], row_of[128];
    support_shuffle(slots, count, 11);
    for (int64_t i = 0; i < count; i++) row_of[slots[i]] = i;
    int vp = s->v_is_k ? 0 : 1;
    float *k = support_known_rows(c->dtype, 0, 0, count, HEADS, s->k_size);
    float *v = support_known_rows(c->dtype, vp, 0, count, HEADS, s->v_size);
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = count},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = count}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
    unsigned char *seen_k = calloc(1, kb->bytes), *seen_v = vb ? calloc(1, vb->bytes) : seen_k;
    if (seen_k == NULL || seen_v == NULL) abort();
    int64_t shift = vb ? 0 : s->v_offset * elem;
    check_strided_memory(s, c, 0, kb->data, seen_k, row_of);
    check_strided_memory(s, c, 1, (char *)(vb ? vb->data : kb->data) + shift, seen_v + shift,
                         row_of);
    check_gaps(kb, seen_k);
    if (vb) check_gaps(vb, seen_v);
    float *got = malloc((size_t)(count * HEADS * s->v_size) * sizeof *got);
    if (got == NULL) abort();
    folio_kv_gather g =
        FOLIO_WITH(folio_kv_gather, .v = {.data = got, .dtype = FOLIO_F32, .tokens = count},
                   .slots = slots, .num_slots = count);
    CHECK_OK(folio_kv_cache_gather(cache, 0, &g, NULL)); /* V alone */
    for (int64_t i = 0; i < count * HEADS * s->v_size; i++) CHECK(got[i] == v[i]);
    free(got);
    free(seen_k);
    if (vb) free(seen_v);
    free(k);
    free(v);
}

static void wrap_strided(folio_context *ctx, const strided_case *s)
{
    folio_kv_cache_desc c =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1,
                   .block_size = s->block_size, .num_kv_heads = HEADS, .k_head_size = s->k_size,
                   .v_head_size = s->v_size, .dtype = s->dtype, .layout = FOLIO_LAYOUT_STRIDED);
    int64_t elem = (int64_t)folio_dtype_size(s->dtype);
    int64_t k_elems = extent(&s->k, &c, s->k_size), v_elems = extent(&s->v, &c, s->v_size);
    bool one = s->v_offset >= 0;
    if (one && s->v_offset + v_elems > k_elems) k_elems = s->v_offset + v_elems;
    support_buffer kb = support_buffer_make((size_t)(k_elems * elem)), vb = {0};
    if (!one) vb = support_buffer_make((size_t)(v_elems * elem));
    /* Scales [block][N][H] with a gap: another order than the default. */
    folio_kv_strides ss = {c.block_size * 4, 4, 1};
    support_buffer scales = support_buffer_make((size_t)(2 * BLOCKS * c.block_size * 4) * 4);
    float *ks = scales.data, *vs = ks + BLOCKS * c.block_size * 4;
    void *k = kb.data, *v = one ? (char *)kb.data + s->v_offset * elem : vb.data;
    folio_kv_memory m =
        FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_bytes = kb.bytes,
                   .v_bytes = (size_t)(v_elems * elem), .k_strides = s->k, .v_strides = s->v);
    if (s->dtype == FOLIO_INT8) {
        m.k_scales = &ks, m.v_scales = &vs;
        m.k_scales_bytes = m.v_scales_bytes = scales.bytes / 2;
        m.k_scales_strides = m.v_scales_strides = ss;
    }
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_wrap(ctx, &c, &m, &cache));
    if (cache != NULL) {
        folio_kv_cache_view view = support_view(cache, 0);
        CHECK(view.k == k && view.v == v);
        write_and_check_strided(cache, s, &c, &kb, one ? NULL : &vb);
        if (s->dtype == FOLIO_INT8) {
            CHECK(view.k_scales == ks && view.v_scales == vs);
            CHECK(ks[0] > 0 && ks[HEADS - 1] > 0 && isnan(ks[HEADS])); /* the gap */
        }
    }
    folio_kv_cache_destroy(cache);
    support_buffer_free(&kb);
    support_buffer_free(&vb);
    support_buffer_free(&scales);
}

BACKEND_TEST(cache_wrap, by_strides)
{
    for (int i = 0; i < COUNT_OF(strided_cases); i++) wrap_strided(ctx, &strided_cases[i]);
}
