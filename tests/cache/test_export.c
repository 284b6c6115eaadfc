/*
 * test_export.c: blocks as bytes and back: between all layouts bit for bit, on the fake device too; what a passport or
 * header with one changed field, a cut, a flipped byte and random damage come to; data made by hand, from
 * docs/kv-format.md. A cache's contents are compared as its export in the layout NHD, which is compared with unpack.
 */
#include "fake_device.h"
#include "support.h"

#define XXH_INLINE_ALL
#include <stdlib.h>
#include <xxhash.h>

enum { LAYERS = 2, HEADS = 3, BLOCKS = 5, DK = 16, HEADER = 576, SEAL = 32, MODEL_AT = 104 };

static const int64_t all_blocks[BLOCKS] = {0, 1, 2, 3, 4};
static const unsigned char key_bytes[64] =
    "a key of up to sixty-four bytes, of which calls take 16 or more";

static folio_kv_cache_desc describe(folio_layout layout, folio_dtype dtype, int32_t block_size)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS,
                      .block_size = block_size, .num_kv_heads = HEADS, .k_head_size = DK,
                      .dtype = dtype, .layout = layout);
}

static bool takes_v_in_k(folio_layout layout)
{
    return layout == FOLIO_LAYOUT_NATIVE || layout == FOLIO_LAYOUT_NHD ||
           layout == FOLIO_LAYOUT_HND || layout == FOLIO_LAYOUT_STRIDED;
}

/* A cache, and its memory if it is strided: rows with a gap between them. */
typedef struct {
    folio_kv_cache *cache;
    folio_kv_cache_desc desc;
    char *memory;
} holder;

static holder hold(folio_context *ctx, const folio_kv_cache_desc *desc)
{
    holder h = {.desc = *desc};
    if (desc->layout != FOLIO_LAYOUT_STRIDED) {
        CHECK_OK(folio_kv_cache_create(ctx, desc, &h.cache));
        return h;
    }
    int64_t row = DK + 1, block = desc->block_size * HEADS;
    size_t array = (size_t)(BLOCKS * block * row * 4);
    void *k[LAYERS], *v[LAYERS];
    float *ks[LAYERS], *vs[LAYERS];
    h.memory = calloc(LAYERS * 4, array);
    if (h.memory == NULL) abort();
    for (int l = 0; l < LAYERS; l++) {
        char *at = h.memory + (size_t)l * 4 * array;
        k[l] = at, v[l] = at + array;
        ks[l] = (float *)(void *)(at + 2 * array), vs[l] = (float *)(void *)(at + 3 * array);
    }
    folio_kv_strides s = {block * row, HEADS * row, row};
    folio_kv_memory m =
        FOLIO_WITH(folio_kv_memory, .k = k, .v = v, .k_bytes = array, .v_bytes = array,
                   .k_strides = s, .v_strides = s, .k_scales = ks, .v_scales = vs,
                   .k_scales_bytes = array, .v_scales_bytes = array);
    if (desc->v_in_k) m.v = NULL, m.v_scales = NULL, m.v_strides = (folio_kv_strides){0, 0, 0};
    CHECK_OK(folio_kv_cache_wrap(ctx, desc, &m, &h.cache));
    return h;
}

static void let_go(holder *h)
{
    folio_kv_cache_destroy(h->cache);
    free(h->memory);
}

static void random_bytes(void *to, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)to)[i] = (unsigned char)support_bits(seed, i);
}

/* Rows of all blocks of a layer, for pack and unpack. */
typedef struct {
    folio_kv_rows rows;
    size_t k_bytes, v_bytes, s_bytes;
} layer_rows;

static layer_rows rows_make(const folio_kv_cache_desc *d)
{
    size_t tokens = (size_t)(d->num_blocks * d->block_size), elem = folio_dtype_size(d->dtype);
    size_t heads = (size_t)d->num_kv_heads;
    int32_t dv = d->v_head_size != 0 ? d->v_head_size : d->k_head_size;
    layer_rows r = {.k_bytes = tokens * heads * (size_t)d->k_head_size * elem,
                    .v_bytes = tokens * heads * (size_t)dv * elem,
                    .s_bytes = tokens * heads * sizeof(float)};
    r.rows = FOLIO_WITH(folio_kv_rows, .k = malloc(r.k_bytes), .v = malloc(r.v_bytes),
                        .k_scales = malloc(r.s_bytes), .v_scales = malloc(r.s_bytes),
                        .num_blocks = d->num_blocks, .blocks = all_blocks);
    return r;
}

static void rows_free(layer_rows *r)
{
    free(r->rows.k);
    free(r->rows.v);
    free(r->rows.k_scales);
    free(r->rows.v_scales);
}

static folio_kv_rows rows_for(const folio_kv_cache_desc *d, const layer_rows *r)
{
    folio_kv_rows rows = r->rows;
    if (d->v_in_k) rows.v = rows.v_scales = NULL;
    return rows;
}

/* Any bits at all, in a cache of a host backend: NaN payloads, infinities, -128. */
static void fill(const holder *h, uint64_t seed)
{
    layer_rows r = rows_make(&h->desc);
    for (int32_t l = 0; l < h->desc.num_layers; l++) {
        random_bytes(r.rows.k, r.k_bytes, seed + 10 * (uint64_t)l);
        random_bytes(r.rows.v, r.v_bytes, seed + 10 * (uint64_t)l + 1);
        random_bytes(r.rows.k_scales, r.s_bytes, seed + 10 * (uint64_t)l + 2);
        random_bytes(r.rows.v_scales, r.s_bytes, seed + 10 * (uint64_t)l + 3);
        folio_kv_rows rows = rows_for(&h->desc, &r);
        CHECK_OK(folio_kv_cache_pack(h->cache, l, &rows, NULL));
    }
    rows_free(&r);
}

/* ---------------------------------------------------------------------------------------- blobs */

typedef struct {
    unsigned char *data;
    size_t bytes;
} blob;

static folio_kv_blocks all_of(const folio_kv_cache_desc *d, folio_layout layout)
{
    return FOLIO_WITH(folio_kv_blocks, .blocks = all_blocks, .num_blocks = BLOCKS,
                      .num_tokens = (int64_t)BLOCKS * d->block_size, .layout = layout);
}

/* Exactly as many bytes as are needed, so that a read or write past them is seen by ASan. */
static blob export_to_blob(const folio_kv_cache *cache, const folio_kv_blocks *what)
{
    blob b = {NULL, 0};
    size_t again = 0;
    CHECK_OK(folio_kv_cache_export(cache, what, NULL, 0, &b.bytes, NULL));
    b.data = malloc(b.bytes > 0 ? b.bytes : 1);
    if (b.data == NULL) abort();
    memset(b.data, 0xEE, b.bytes);
    CHECK_OK(folio_kv_cache_export(cache, what, b.data, b.bytes, &again, NULL));
    CHECK(again == b.bytes);
    return b;
}

/* What all blocks hold, whatever the cache's layout. */
static blob contents(const holder *h)
{
    folio_kv_blocks what = all_of(&h->desc, FOLIO_LAYOUT_NHD);
    return export_to_blob(h->cache, &what);
}

static bool same(const blob *a, const blob *b)
{
    return a->bytes == b->bytes && memcmp(a->data, b->data, a->bytes) == 0;
}

static int64_t head_bytes(int64_t num_blocks) { return HEADER + (num_blocks + 1) * SEAL; }

/* The right checksum of a head without a key. */
static void seal_head(const blob *b, int64_t num_blocks)
{
    uint64_t sum = XXH3_64bits(b->data, (size_t)head_bytes(num_blocks) - SEAL);
    for (int i = 0; i < 8; i++)
        b->data[head_bytes(num_blocks) - SEAL + i] = (unsigned char)(sum >> 8 * i);
}

/* The data is refused with these words, and the cache is as it was. */
static void check_refused(const holder *h, const folio_kv_blocks *want, const void *data,
                          size_t bytes, const char *words)
{
    blob before = contents(h);
    REFUSED(folio_kv_cache_import(h->cache, want, data, bytes, NULL), FOLIO_ERR_ARGUMENT, words);
    blob after = contents(h);
    CHECK(same(&before, &after));
    free(before.data);
    free(after.data);
}

/* ------------------------------------------------------------------------------------ the bytes */

/* Layout NHD is rows as unpack gives them, layer by layer; scales are [head][token]. */
static void check_rows(folio_context *ctx, folio_dtype dtype, bool v_in_k)
{
    folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, dtype, 5);
    d.v_in_k = v_in_k;
    d.v_head_size = 8;
    holder h = hold(ctx, &d);
    fill(&h, 3);
    blob b = contents(&h);
    layer_rows r = rows_make(&d);
    size_t wrong = 0, at = (size_t)head_bytes(BLOCKS), zeros = 0;
    size_t k = r.k_bytes / BLOCKS, v = v_in_k ? 0 : r.v_bytes / BLOCKS, s = r.s_bytes / BLOCKS;
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int32_t l = 0; l < LAYERS; l++) {
            folio_kv_rows rows = rows_for(&d, &r);
            size_t start = at;
            CHECK_OK(folio_kv_cache_unpack(h.cache, l, &rows, NULL));
            wrong += memcmp(b.data + at, (char *)r.rows.k + (size_t)block * k, k) != 0;
            if (v > 0)
                wrong += memcmp(b.data + at + k, (char *)r.rows.v + (size_t)block * v, v) != 0;
            at += k + v;
            for (int of_v = 0; of_v < (dtype != FOLIO_INT8 ? 0 : v_in_k ? 1 : 2); of_v++) {
                while ((at - start) % 64 != 0) zeros += b.data[at++] != 0;
                const float *scales = of_v == 0 ? r.rows.k_scales : r.rows.v_scales;
                for (int64_t i = 0; i < HEADS * 5; i++)
                    wrong += memcmp(b.data + at + 4 * i,
                                    scales + (block * 5 + i % 5) * HEADS + i / 5, 4) != 0;
                at += s;
            }
            while ((at - start) % 64 != 0) zeros += b.data[at++] != 0;
        }
    CHECK_MSG(wrong == 0 && zeros == 0 && at == b.bytes,
              "%s: %d wrong, %d not zero, %d of %d bytes", folio_dtype_name(dtype), (int)wrong,
              (int)zeros, (int)at, (int)b.bytes);
    rows_free(&r);
    free(b.data);
    let_go(&h);
}

BACKEND_TEST(export, rows_are_those_of_unpack)
{
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++)
        for (int v_in_k = 0; v_in_k < 2; v_in_k++) check_rows(ctx, support_kv_dtypes[t], v_in_k);
}

/* Blocks of `from` by an export in layout `by` into blocks of `to`; all others stay. */
static void check_trip(folio_context *ctx, folio_kv_cache_desc d, folio_layout to, folio_layout by)
{
    static const int64_t out[3] = {4, 0, 2}, in[3] = {1, 3, 0};
    folio_kv_cache_desc there = d;
    there.layout = to;
    holder a = hold(ctx, &d), b = hold(ctx, &there);
    fill(&a, 1);
    fill(&b, 2);
    folio_kv_blocks what = FOLIO_WITH(folio_kv_blocks, .blocks = out, .num_blocks = 3,
                                      .num_tokens = 3 * d.block_size, .layout = by);
    blob expected = contents(&b), from = contents(&a), sent = export_to_blob(a.cache, &what);
    what.blocks = in;
    CHECK_OK(folio_kv_cache_import(b.cache, &what, sent.data, sent.bytes, NULL));
    size_t head = (size_t)head_bytes(BLOCKS), block = (from.bytes - head) / BLOCKS;
    for (int i = 0; i < 3; i++)
        memcpy(expected.data + head + (size_t)in[i] * block,
               from.data + head + (size_t)out[i] * block, block);
    blob got = contents(&b);
    CHECK_MSG(memcmp(got.data + head, expected.data + head, got.bytes - head) == 0,
              "%s %s by %s to %s, block size %d, v_in_k %d", folio_dtype_name(d.dtype),
              folio_layout_name(d.layout), folio_layout_name(by), folio_layout_name(to),
              d.block_size, d.v_in_k);
    free(expected.data);
    free(from.data);
    free(sent.data);
    free(got.data);
    let_go(&a);
    let_go(&b);
}

BACKEND_TEST(export, every_type_by_every_layout)
{
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++)
        for (int from = 0; from < FOLIO_NUM_LAYOUTS; from++)
            for (int by = 0; by < FOLIO_LAYOUT_STRIDED; by++)
                for (int v_in_k = 0; v_in_k < 2; v_in_k++) {
                    folio_layout to = (folio_layout)((from + by + t) % FOLIO_NUM_LAYOUTS);
                    folio_kv_cache_desc d = describe((folio_layout)from, support_kv_dtypes[t],
                                                     (from + by) % 2 ? 5 : 16);
                    d.v_in_k = v_in_k;
                    if (v_in_k && !takes_v_in_k((folio_layout)from)) continue;
                    if (v_in_k && !takes_v_in_k((folio_layout)by)) continue;
                    if (v_in_k && !takes_v_in_k(to)) to = FOLIO_LAYOUT_HND;
                    check_trip(ctx, d, to, (folio_layout)by);
                }
}

/* Slots that nobody wrote, or that hold another sequence's tokens, do not leave; nor does the heap. */
BACKEND_TEST(export, only_its_tokens_leave)
{
    support_counter counter = {0};
    folio_allocator dirty = support_allocator(&counter);
    folio_context *other = support_context(backend, 2, &dirty);
    REQUIRE_TEST(other != NULL);
    static const int64_t blocks[2] = {3, 1};
    for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++)
        for (int by = 0; by < FOLIO_LAYOUT_STRIDED; by++)
            for (int64_t tokens = 17; tokens <= 32; tokens += tokens == 17 ? 6 : 9) {
                folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, support_kv_dtypes[t], 16);
                holder a = hold(ctx, &d), b = hold(other, &d);
                fill(&a, 1);
                fill(&b, 1);
                folio_kv_blocks what =
                    FOLIO_WITH(folio_kv_blocks, .blocks = blocks, .num_blocks = 2,
                               .num_tokens = tokens, .layout = (folio_layout)by);
                blob x = export_to_blob(a.cache, &what), y = export_to_blob(b.cache, &what);
                CHECK(same(&x, &y));
                layer_rows whole = rows_make(&d), cut = rows_make(&d);
                CHECK_OK(folio_kv_cache_unpack(a.cache, 1, &whole.rows, NULL));
                CHECK_OK(folio_kv_cache_import(a.cache, &what, x.data, x.bytes, NULL));
                CHECK_OK(folio_kv_cache_unpack(a.cache, 1, &cut.rows, NULL));
                size_t row = whole.k_bytes / (BLOCKS * 16), at = row * (size_t)tokens;
                const char *k = cut.rows.k, *was = whole.rows.k; /* block 1 holds tokens 16.. */
                CHECK(memcmp(k, was, at) == 0);
                for (; at < 32 * row; at++) CHECK(k[at] == 0);
                CHECK(memcmp(k + at, was + at, whole.k_bytes - at) == 0);
                for (size_t i = (size_t)tokens * HEADS; d.dtype == FOLIO_INT8 && i < 32 * HEADS;
                     i++)
                    CHECK(cut.rows.v_scales[i] == 0);
                rows_free(&whole);
                rows_free(&cut);
                free(x.data);
                free(y.data);
                let_go(&a);
                let_go(&b);
            }
    folio_context_destroy(other);
    CHECK_INT(counter.live, 0);
}

/* More blocks than go at once, and none. */
BACKEND_TEST(export, many_blocks_and_none)
{
    enum { MANY = 600 };
    int64_t blocks[MANY];
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = MANY, .num_layers = 1, .block_size = 1,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &d, &cache));
    float *k = support_known_rows(FOLIO_F32, 0, 0, MANY, 1, 8);
    for (int64_t i = 0; i < MANY; i++) blocks[i] = i;
    folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, MANY, 0, 0},
                                  .v = {k, FOLIO_F32, MANY, 0, 0}, .slots = blocks);
    CHECK_OK(folio_kv_cache_write(cache, 0, &w, NULL));
    support_shuffle(blocks, MANY, 7);
    folio_kv_blocks what =
        FOLIO_WITH(folio_kv_blocks, .blocks = blocks, .num_blocks = MANY, .num_tokens = MANY);
    blob b = export_to_blob(cache, &what);
    for (int64_t i = 0; i < MANY; i++) blocks[i] = i;
    CHECK_OK(folio_kv_cache_import(cache, &what, b.data, b.bytes, NULL));
    free(b.data);
    support_shuffle(blocks, MANY, 7);
    float *got = malloc(MANY * 8 * sizeof *got);
    if (got == NULL) abort();
    for (int64_t i = 0; i < MANY; i++) blocks[i] = i;
    folio_kv_gather g = FOLIO_WITH(folio_kv_gather, .k = {got, FOLIO_F32, MANY, 0, 0},
                                   .slots = blocks, .num_slots = MANY);
    CHECK_OK(folio_kv_cache_gather(cache, 0, &g, NULL));
    support_shuffle(blocks, MANY, 7);
    for (int64_t i = 0; i < MANY; i++)
        CHECK(memcmp(got + i * 8, k + blocks[i] * 8, 8 * sizeof *k) == 0);
    what = FOLIO_WITH(folio_kv_blocks, .num_blocks = 0);
    b = export_to_blob(cache, &what);
    CHECK_INT(b.bytes, head_bytes(0));
    CHECK_OK(folio_kv_cache_import(cache, &what, b.data, b.bytes, NULL));
    b.data[HEADER] ^= 1;
    REFUSED(folio_kv_cache_import(cache, &what, b.data, b.bytes, NULL), FOLIO_ERR_ARGUMENT,
            "head is damaged");
    free(b.data);
    free(got);
    free(k);
    folio_kv_cache_destroy(cache);
}

/* ------------------------------------------------------------------------------------ a device */

/* Out of a device's memory into a host's and back; nothing stays in the stream. */
TEST(export, between_a_device_and_the_host)
{
    folio_context *host = support_context("cpu", 1, NULL), *device = fake_device_context(NULL);
    REQUIRE_TEST(host != NULL && device != NULL);
    static const folio_layout by[] = {FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND, FOLIO_LAYOUT_XPACKED};
    char stream;
    folio_run run = FOLIO_WITH(folio_run, .stream = &stream);
    int64_t live = fake_device_count().live;
    for (int i = 0; i < COUNT_OF(by); i++)
        for (int t = 0; t < SUPPORT_NUM_KV_DTYPES; t++) {
            folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, support_kv_dtypes[t], 16);
            d.k_head_size = 64;
            holder a = hold(host, &d), b = hold(device, &d), c = hold(host, &d);
            fill(&a, 1);
            fill(&c, 2);
            folio_kv_blocks what = all_of(&d, by[i]);
            blob out = export_to_blob(a.cache, &what), back = {malloc(out.bytes), out.bytes};
            CHECK_OK(folio_kv_cache_import(b.cache, &what, out.data, out.bytes, &run));
            CHECK_INT(fake_device_queued(&stream), 0);
            memset(back.data, 0xEE, back.bytes);
            CHECK_OK(
                folio_kv_cache_export(b.cache, &what, back.data, back.bytes, &back.bytes, &run));
            CHECK(same(&out, &back));
            CHECK_OK(folio_kv_cache_import(c.cache, &what, back.data, back.bytes, NULL));
            blob x = contents(&a), y = contents(&c);
            CHECK(same(&x, &y));
            free(x.data);
            free(y.data);
            /* A device's own layout stays among devices. */
            what.layout = FOLIO_LAYOUT_NATIVE;
            blob own = export_to_blob(b.cache, &what);
            check_refused(&c, &what, own.data, own.bytes,
                          folio_dtype_size(d.dtype) == 2
                              ? "layout_id is \"device-pages\" there and \"host-packed16\" here"
                              : "layout_id is \"device-rows\" there and \"host-packed16\" here");
            CHECK_OK(folio_kv_cache_import(b.cache, &what, own.data, own.bytes, &run));
            what.layout = by[i];
            CHECK_OK(
                folio_kv_cache_export(b.cache, &what, back.data, back.bytes, &back.bytes, &run));
            CHECK(same(&out, &back));
            free(own.data);
            free(out.data);
            free(back.data);
            let_go(&a);
            let_go(&b);
            let_go(&c);
        }
    CHECK_INT(fake_device_count().live, live);
    folio_context_destroy(host);
    folio_context_destroy(device);
}

/* ----------------------------------------------------------------------------------- passports */

static const float scales[3] = {0.5f, 0.25f, 2.0f}, other_scales[3] = {0.5f, 0.25f, 1.0f};
static const float smaller[3] = {0.125f, 0.25f, 2.0f};
static const double frequencies[4] = {1, 0.5, 0.25, 0.125},
                    other_frequencies[4] = {1, 0.5, 0.25, 0};
static const float cosines[8] = {1, 1, 1, 1, 0, 0, 0, 0}, sines[8] = {0, 0, 0, 0, 1, 1, 1, 1};
static const float other_sines[8] = {0, 0, 0, 0, 1, 1, 1, 0.5f};

static const folio_rotary_desc yarn = {.struct_size = sizeof yarn,
                                       .num_dims = 8,
                                       .first_dim = 8,
                                       .pairing = FOLIO_ROTARY_PAIRS,
                                       .scaling = FOLIO_ROTARY_SCALE_YARN,
                                       .num_positions = 2,
                                       .theta = 5e5,
                                       .factor = 8,
                                       .original_len = 8192,
                                       .magnitude = 1.25};
static const folio_rotary_desc llama3 = {.struct_size = sizeof llama3,
                                         .num_dims = 8,
                                         .scaling = FOLIO_ROTARY_SCALE_LLAMA3,
                                         .num_positions = 2,
                                         .factor = 8,
                                         .original_len = 8192};
static const folio_rotary_desc by_frequencies = {.struct_size = sizeof by_frequencies,
                                                 .num_dims = 8,
                                                 .num_positions = 2,
                                                 .frequencies = frequencies};
static const folio_rotary_desc by_table = {.struct_size = sizeof by_table,
                                           .num_dims = 8,
                                           .num_positions = 2,
                                           .cos = cosines,
                                           .sin = sines};

/* A pair of passports that differ in one field: refused both ways, with these words one way. */
static void check_pair(const holder *from, const holder *to, const folio_kv_passport *there,
                       const folio_kv_passport *here, const char *words)
{
    folio_kv_blocks what = all_of(&from->desc, FOLIO_LAYOUT_NATIVE);
    what.passport = there;
    blob b = export_to_blob(from->cache, &what);
    what.passport = here;
    check_refused(to, &what, b.data, b.bytes, words);
    free(b.data);
    b = export_to_blob(from->cache, &what);
    what.passport = there;
    check_refused(to, &what, b.data, b.bytes, "");
    what.passport = here;
    CHECK_OK(folio_kv_cache_import(to->cache, &what, b.data, b.bytes, NULL));
    fill(to, 2);
    free(b.data);
}

#define PASSPORT(...) (&FOLIO_WITH(folio_kv_passport, __VA_ARGS__))
#define ROTARY(words, desc, change)                                                                \
    do {                                                                                           \
        folio_rotary_desc d_ = desc;                                                               \
        d_.change;                                                                                 \
        check_pair(&a, &b, PASSPORT(.rotary = &desc), PASSPORT(.rotary = &d_), words);             \
    } while (0)

TEST(export, a_passport_with_one_field_changed_is_refused)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, FOLIO_BF16, 16);
    holder a = hold(ctx, &d), b = hold(ctx, &d);
    fill(&a, 1);
    fill(&b, 2);
    check_pair(&a, &b, PASSPORT(.model = "one"), PASSPORT(.model = "two"),
               "model is \"one\" there and \"two\" here");
    check_pair(&a, &b, PASSPORT(.model = "one"), NULL, "model is \"one\" there and \"\" here");
    check_pair(&a, &b, PASSPORT(.model = "\x1b[1m\n\xff"), PASSPORT(.model = "m"),
               "model is \"?[1m??\" there and \"m\" here");
    check_pair(&a, &b, PASSPORT(.rotary = &yarn), NULL, "rotary is given there and none here");
    ROTARY("rotary.num_dims is 8 there and 6 here", yarn, num_dims = 6);
    ROTARY("rotary.first_dim is 8 there and 0 here", yarn, first_dim = 0);
    ROTARY("rotary.pairing is 1 there and 0 here", yarn, pairing = FOLIO_ROTARY_HALVES);
    ROTARY("rotary.scaling is 3 there and 4 here", yarn, scaling = FOLIO_ROTARY_SCALE_LLAMA3);
    ROTARY("rotary.exact_bounds is 0 there and 1 here", yarn, exact_bounds = 1);
    ROTARY("rotary.original_len is 8192 there and 4096 here", yarn, original_len = 4096);
    ROTARY("rotary.theta is 500000 there and 10000 here", yarn, theta = 0);
    ROTARY("rotary.factor is 8 there and 8.5 here", yarn, factor = 8.5);
    ROTARY("rotary.beta_fast is 32 there and 16 here", yarn, beta_fast = 16);
    ROTARY("rotary.beta_slow is 1 there and 2 here", yarn, beta_slow = 2);
    ROTARY("rotary.magnitude is 1.25 there and 1.5 here", yarn, magnitude = 1.5);
    ROTARY("rotary.low_freq_factor is 1 there and 2 here", llama3, low_freq_factor = 2);
    ROTARY("rotary.high_freq_factor is 4 there and 3 here", llama3, high_freq_factor = 3);
    ROTARY("rotary has frequencies there and theta here", by_frequencies, frequencies = NULL);
    ROTARY("hash of rotary's frequencies begins with|there and", by_frequencies,
           frequencies = other_frequencies);
    ROTARY("hash of rotary's cos and sin begins with|there and", by_table, sin = other_sines);
    check_pair(&a, &b, PASSPORT(.k_scales = scales, .num_scales = 3), NULL,
               "k_scales are 3 numbers there and 0 here");
    check_pair(&a, &b, PASSPORT(.k_scales = scales, .num_scales = 3),
               PASSPORT(.k_scales = scales, .num_scales = 2),
               "k_scales are 3 numbers there and 2 here");
    check_pair(&a, &b, PASSPORT(.k_scales = scales, .num_scales = 1),
               PASSPORT(.k_scales = smaller, .num_scales = 1),
               "k_scales[0] is 0.5 there and 0.125 here");
    check_pair(&a, &b, PASSPORT(.v_scales = scales, .num_scales = 3),
               PASSPORT(.v_scales = other_scales, .num_scales = 3),
               "the hash of v_scales begins with|there and");
    check_pair(&a, &b, PASSPORT(.k_scales = scales, .num_scales = 3),
               PASSPORT(.v_scales = scales, .num_scales = 3),
               "k_scales are 3 numbers there and 0 here");
    let_go(&a);
    let_go(&b);
    folio_context_destroy(ctx);
}

/* What does not change the angles is not compared, and what is not given is its default. */
TEST(export, equal_rotaries_are_equal)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, FOLIO_BF16, 16);
    holder a = hold(ctx, &d);
    fill(&a, 1);
    folio_rotary_desc pairs[6] = {yarn, yarn, llama3, llama3, by_frequencies, by_frequencies};
    pairs[1].num_positions = 100000;
    pairs[1].low_freq_factor = 3;
    pairs[1].beta_fast = 32;
    pairs[3].theta = 10000;
    pairs[3].exact_bounds = 1;
    pairs[5].theta = 77;
    pairs[5].factor = 8;
    pairs[5].magnitude = 1;
    for (int i = 0; i < 6; i += 2) {
        folio_kv_blocks what = all_of(&d, FOLIO_LAYOUT_NATIVE);
        what.passport = PASSPORT(.rotary = &pairs[i]);
        blob b = export_to_blob(a.cache, &what);
        what.passport = PASSPORT(.rotary = &pairs[i + 1]);
        CHECK_OK(folio_kv_cache_import(a.cache, &what, b.data, b.bytes, NULL));
        free(b.data);
    }
    let_go(&a);
    folio_context_destroy(ctx);
}

TEST(export, a_cache_of_another_geometry_refuses)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    const folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NHD, FOLIO_BF16, 16);
    folio_kv_cache_desc others[8] = {d, d, d, d, d, d, d, d};
    static const char *const words[8] = {
        "num_layers is 2 there and 1 here",         "block_size is 16 there and 17 here",
        "num_kv_heads is 3 there and 2 here",       "k_head_size is 16 there and 24 here",
        "v_head_size is 16 there and 8 here",       "v_in_k is 0 there and 1 here",
        "dtype is 3 (bf16) there and 2 (f16) here", "dtype is 3 (bf16) there and 6 (int8) here"};
    others[0].num_layers = 1;
    others[1].block_size = 17;
    others[2].num_kv_heads = 2;
    others[3].k_head_size = 24, others[3].v_head_size = 16;
    others[4].v_head_size = 8;
    others[5].v_in_k = 1;
    others[6].dtype = FOLIO_F16;
    others[7].dtype = FOLIO_INT8;
    holder a = hold(ctx, &d);
    fill(&a, 1);
    for (int i = 0; i < COUNT_OF(others); i++)
        for (int by = 0; by < 2; by++) {
            holder b = hold(ctx, &others[i]);
            fill(&b, 2);
            folio_kv_blocks what = all_of(&d, (folio_layout)by);
            blob sent = export_to_blob(a.cache, &what);
            what = all_of(&others[i], FOLIO_LAYOUT_NATIVE);
            check_refused(&b, &what, sent.data, sent.bytes, words[i]);
            free(sent.data);
            let_go(&b);
        }
    let_go(&a);
    folio_context_destroy(ctx);
}

/* ---------------------------------------------------------------------------------------- damage */

typedef struct {
    folio_context *ctx;
    holder a, b;
    folio_kv_blocks what;
    blob sent;
} small_export;

/* Two blocks of one token. */
static bool small_make(small_export *s, bool keyed)
{
    static const int64_t two[2] = {3, 1};
    memset(s, 0, sizeof *s);
    s->ctx = support_context("cpu", 1, NULL);
    if (s->ctx == NULL) return false;
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = 1,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_INT8);
    s->a = hold(s->ctx, &d);
    s->b = hold(s->ctx, &d);
    fill(&s->a, 1);
    fill(&s->b, 2);
    s->what = FOLIO_WITH(folio_kv_blocks, .blocks = two, .num_blocks = 2, .num_tokens = 2,
                         .key = keyed ? key_bytes : NULL, .key_bytes = keyed ? 32 : 0);
    s->sent = export_to_blob(s->a.cache, &s->what);
    return true;
}

static void small_end(small_export *s)
{
    free(s->sent.data);
    let_go(&s->a);
    let_go(&s->b);
    folio_context_destroy(s->ctx);
}

/* Every length but the right one; the bytes are of a buffer that ends there. */
TEST(export, every_other_length_is_refused)
{
    for (int keyed = 0; keyed < 2; keyed++) {
        small_export s;
        REQUIRE_TEST(small_make(&s, keyed));
        for (size_t n = 0; n <= s.sent.bytes + 70; n++) {
            if (n == s.sent.bytes) continue;
            unsigned char *cut = calloc(1, n > 0 ? n : 1);
            if (cut == NULL) abort();
            memcpy(cut, s.sent.data, n < s.sent.bytes ? n : s.sent.bytes);
            check_refused(&s.b, &s.what, cut, n,
                          n < HEADER ? "a header has 576" : "but its header says");
            free(cut);
        }
        /* A header that says so, and a right checksum: then the blocks need other bytes. */
        for (int64_t n = head_bytes(2); n < (int64_t)s.sent.bytes && !keyed; n++) {
            blob cut = {malloc((size_t)n), (size_t)n};
            if (cut.data == NULL) abort();
            memcpy(cut.data, s.sent.data, cut.bytes);
            cut.data[32] = (unsigned char)n, cut.data[33] = (unsigned char)(n >> 8);
            seal_head(&cut, 2);
            check_refused(&s.b, &s.what, cut.data, cut.bytes, "its blocks need");
            free(cut.data);
        }
        small_end(&s);
    }
}

TEST(export, every_flipped_bit_is_refused)
{
    for (int keyed = 0; keyed < 2; keyed++) {
        small_export s;
        REQUIRE_TEST(small_make(&s, keyed));
        for (size_t bit = 0; bit < 8 * s.sent.bytes; bit++) {
            s.sent.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
            check_refused(&s.b, &s.what, s.sent.data, s.sent.bytes, "import: ");
            s.sent.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        CHECK_OK(folio_kv_cache_import(s.b.cache, &s.what, s.sent.data, s.sent.bytes, NULL));
        small_end(&s);
    }
}

/* Every byte of the header is compared with something, not only sealed: its version, its fields, the rest of texts. */
TEST(export, every_byte_of_the_header_is_compared)
{
    static const struct {
        int at;
        const char *words;
    } named[] = {
        {0, "begins with other bytes"},
        {8, "format version 254; this library reads version 1"},
        {12, "keyed is 255 there, not 0 or 1"},
        {16, "num_blocks is 253 there and 2 here"},
        {24, "num_tokens is 253 there and 2 here"},
        {32, "but its header says"},
        {40, "num_layers is 254 there and 1 here"},
        {44, "block_size is 254 there"},
        {48, "num_kv_heads is 254 there"},
        {52, "k_head_size is 247 there and 8 here"},
        {56, "v_head_size is 247 there and 8 here"},
        {60, "v_in_k is 255 there and 0 here"},
        {64, "dtype is 249 (unknown) there and 6 (int8) here"},
        {68, "layout_version is 254 there and 1 here"},
        {72, "layout_id is \"?ost-rows\" there and \"host-rows\" here"},
        {96, "a block has 63 bytes there and 192 here"},
        {MODEL_AT, "model is \"?\" there and \"\" here"},
        {MODEL_AT + 256, "rotary is given there and none here"},
        {480, "k_scales are 255 numbers there and 0 here"},
        {528, "v_scales are 255 numbers there and 0 here"},
    };
    small_export s;
    REQUIRE_TEST(small_make(&s, false));
    int next = 0;
    for (int at = 0; at < HEADER; at++) {
        bool has_name = next < COUNT_OF(named) && named[next].at == at;
        s.sent.data[at] ^= 0xFF;
        seal_head(&s.sent, 2);
        check_refused(&s.b, &s.what, s.sent.data, s.sent.bytes, has_name ? named[next].words : "");
        s.sent.data[at] ^= 0xFF;
        next += has_name;
    }
    CHECK_INT(next, COUNT_OF(named));
    seal_head(&s.sent, 2);
    CHECK_OK(folio_kv_cache_import(s.b.cache, &s.what, s.sent.data, s.sent.bytes, NULL));
    small_end(&s);
}

static void check_damage(uint64_t rounds)
{
    small_export s;
    REQUIRE_TEST(small_make(&s, false));
    size_t n = s.sent.bytes;
    unsigned char *data = malloc(n + 64);
    if (data == NULL) abort();
    blob before = contents(&s.b);
    for (uint64_t round = 0; round < rounds; round++) {
        uint64_t r = support_bits(5, round), changes = 1 + r % 4;
        size_t bytes = r >> 8 & 3 ? n : (size_t)(support_bits(6, round) % (n + 64));
        memcpy(data, s.sent.data, n);
        memset(data + n, 0, 64);
        for (uint64_t i = 0; i < changes; i++) {
            uint64_t x = support_bits(7 + i, round);
            size_t at = (size_t)(x % n), to = (size_t)((x >> 20) % n), len = 1 + (x >> 40) % 16;
            if (at + len > n || to + len > n) continue;
            if (x >> 60 & 1) memmove(data + to, data + at, len);
            else random_bytes(data + at, len, x);
        }
        blob damaged = {data, bytes};
        if ((r >> 12 & 1) && bytes >= (size_t)head_bytes(2)) seal_head(&damaged, 2);
        if (bytes == n && memcmp(data, s.sent.data, n) == 0) continue;
        CHECK_MSG(folio_kv_cache_import(s.b.cache, &s.what, data, bytes, NULL) ==
                      FOLIO_ERR_ARGUMENT,
                  "round %d", (int)round);
    }
    blob after = contents(&s.b);
    CHECK(same(&before, &after));
    free(before.data);
    free(after.data);
    free(data);
    small_end(&s);
}

TEST(export, random_damage_is_refused) { check_damage(20000); }
LONG_TEST(export, much_random_damage_is_refused) { check_damage(2000000); }

TEST(export, only_its_key_opens_it)
{
    small_export s;
    for (int keyed = 0; keyed < 2; keyed++) {
        REQUIRE_TEST(small_make(&s, keyed));
        folio_kv_blocks other = s.what;
        other.key = keyed ? NULL : key_bytes, other.key_bytes = keyed ? 0 : 16;
        check_refused(&s.b, &other, s.sent.data, s.sent.bytes,
                      keyed ? "sealed with a key, here there is none"
                            : "sealed without a key, here there is one");
        other.key = key_bytes, other.key_bytes = 31;
        if (keyed)
            check_refused(&s.b, &other, s.sent.data, s.sent.bytes,
                          "head was sealed with another key");
        other.key = key_bytes + 1, other.key_bytes = 32;
        if (keyed)
            check_refused(&s.b, &other, s.sent.data, s.sent.bytes,
                          "head was sealed with another key");
        /* A block's seal in the place of another's, and the blocks too: the head knows their order. */
        unsigned char seals[2 * SEAL];
        size_t head = (size_t)head_bytes(2), block = (s.sent.bytes - head) / 2;
        memcpy(seals, s.sent.data + HEADER, sizeof seals);
        memcpy(s.sent.data + HEADER, seals + SEAL, SEAL);
        memcpy(s.sent.data + HEADER + SEAL, seals, SEAL);
        for (size_t i = 0; i < block; i++) {
            unsigned char x = s.sent.data[head + i];
            s.sent.data[head + i] = s.sent.data[head + block + i];
            s.sent.data[head + block + i] = x;
        }
        check_refused(&s.b, &s.what, s.sent.data, s.sent.bytes, "head");
        small_end(&s);
    }
}

/* -------------------------------------------------------------------------------------- by hand */

static unsigned char *put(unsigned char *at, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++) *at++ = (unsigned char)(x >> 8 * i);
    return at;
}

/* docs/kv-format.md alone: two blocks of 4 tokens, of which 6 are there, bf16 in layout nhd, 2 layers, 1 head of 8. */
TEST(export, data_made_by_hand_is_imported)
{
    enum { N = 4, D = 8, BLOCK = 2 * 2 * N * D * 2, TOTAL = HEADER + 3 * SEAL + 2 * BLOCK };
    static unsigned char data[TOTAL];
    memset(data, 0, sizeof data);
    unsigned char *at = data;
    memcpy(at, "FolioEx\n", 8), at += 8;
    at = put(at, 1, 4);     /* version */
    at = put(at, 0, 4);     /* no key */
    at = put(at, 2, 8);     /* blocks */
    at = put(at, 6, 8);     /* tokens */
    at = put(at, TOTAL, 8); /* bytes */
    const uint32_t geometry[8] = {2, N, 1, D, D, 0, 3, 1};
    for (int i = 0; i < 8; i++) at = put(at, geometry[i], 4);
    memcpy(at, "nhd", 3), at += 24;
    at = put(at, BLOCK, 8);
    memcpy(at, "by hand", 7), at += 256;
    const uint32_t rotary[6] = {8, 0, 0, 0, 0, 0};
    for (int i = 0; i < 6; i++) at = put(at, rotary[i], 4);
    at = put(at, 0, 8);                  /* original_len */
    at = put(at, 0x411E848000000000, 8); /* theta: 500000 */
    at += 5 * 8;                         /* what NONE does not use */
    at = put(at, 0x3FF0000000000000, 8); /* magnitude: 1 */
    at += 32 + 2 * 48;                   /* no tables, no scales */
    CHECK_INT(at - data, HEADER);
    unsigned char *blocks = data + HEADER + 3 * SEAL;
    for (int i = 0; i < BLOCK;
         i++) /* numbers 0x3F00.. of bf16; the last two tokens of block 1 are not there */
        for (int b = 0; b < 2; b++)
            if (b == 0 || i / (2 * D) % N < 2)
                blocks[b * BLOCK + i] = i % 2 ? 0x3F : (unsigned char)(i / 2 + 100 * b);
    for (int b = 0; b < 2; b++)
        put(data + HEADER + b * SEAL, XXH3_64bits(blocks + b * BLOCK, BLOCK), 8);
    put(data + HEADER + 2 * SEAL, XXH3_64bits(data, HEADER + 2 * SEAL), 8);

    folio_context *ctx = support_context("cpu", 1, NULL);
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 2, .block_size = N,
                   .num_kv_heads = 1, .k_head_size = D, .dtype = FOLIO_BF16);
    holder h = hold(ctx, &d);
    fill(&h, 2);
    static const int64_t to[2] = {4, 2}, slots[6] = {16, 17, 18, 19, 8, 9};
    const folio_rotary_desc rotary_desc =
        FOLIO_WITH(folio_rotary_desc, .num_dims = 8, .num_positions = 1, .theta = 500000);
    folio_kv_blocks want =
        FOLIO_WITH(folio_kv_blocks, .blocks = to, .num_blocks = 2, .num_tokens = 6,
                   .passport = PASSPORT(.model = "by hand", .rotary = &rotary_desc));
    CHECK_OK(folio_kv_cache_import(h.cache, &want, data, sizeof data, NULL));
    for (int32_t l = 0; l < 2; l++) {
        uint16_t k[6 * D], v[6 * D];
        folio_kv_gather g =
            FOLIO_WITH(folio_kv_gather, .k = {k, FOLIO_BF16, 6, 0, 0},
                       .v = {v, FOLIO_BF16, 6, 0, 0}, .slots = slots, .num_slots = 6);
        CHECK_OK(folio_kv_cache_gather(h.cache, l, &g, NULL));
        for (int i = 0; i < 6 * D; i++) {
            int number = l * 2 * N * D + i % (N * D), b = i / (N * D);
            CHECK_INT(k[i], 0x3F00 + (number + 100 * b) % 256);
            CHECK_INT(v[i], 0x3F00 + (number + N * D + 100 * b) % 256);
        }
    }
    want.layout = FOLIO_LAYOUT_NHD; /* the library writes the same bytes */
    blob again = export_to_blob(h.cache, &want);
    CHECK(again.bytes == sizeof data && memcmp(again.data, data, sizeof data) == 0);
    free(again.data);
    let_go(&h);
    folio_context_destroy(ctx);
}

/* ------------------------------------------------------------------------------------- arguments */

TEST(export, bad_arguments_are_refused)
{
    small_export s;
    REQUIRE_TEST(small_make(&s, false));
    static const int64_t twice[2] = {1, 1}, outside[2] = {1, BLOCKS}, negative[2] = {-1, 1};
    static const float bad_scales[2] = {1, -1};
    char long_name[257];
    memset(long_name, 'n', 256);
    long_name[256] = 0;
    const folio_rotary_desc odd = FOLIO_WITH(folio_rotary_desc, .num_dims = 7, .num_positions = 1);
    unsigned char room[2000];
    size_t bytes = 77;
#define BOTH(change, words)                                                                        \
    do {                                                                                           \
        folio_kv_blocks w_ = s.what;                                                               \
        w_.change;                                                                                 \
        REFUSED(folio_kv_cache_export(s.a.cache, &w_, room, sizeof room, &bytes, NULL),            \
                FOLIO_ERR_ARGUMENT, words);                                                        \
        check_refused(&s.b, &w_, s.sent.data, s.sent.bytes, words);                                \
    } while (0)
    memset(room, 0xEE, sizeof room);
    BOTH(blocks = outside, "blocks[1] = 5 is outside [0, 5)");
    BOTH(blocks = negative, "blocks[0] = -1 is outside [0, 5)");
    BOTH(blocks = NULL, "blocks is NULL");
    BOTH(num_blocks = -1, "-1");
    BOTH(num_tokens = 1, "num_tokens is 1; 2 blocks of 1 tokens hold 2 to 2");
    BOTH(num_tokens = 3, "num_tokens is 3; 2 blocks of 1 tokens hold 2 to 2");
    BOTH(key_bytes = 15, "key_bytes is 15, outside [16, 64]");
    BOTH(key_bytes = -1, "key_bytes is -1");
    BOTH(key_bytes = 16, "key is NULL and key_bytes 16");
    BOTH(key = key_bytes, "key is given and key_bytes 0");
    BOTH(passport = PASSPORT(.model = long_name), "model|256 bytes|255");
    BOTH(passport = PASSPORT(.rotary = &odd), "num_dims is 7");
    BOTH(passport = PASSPORT(.num_scales = -1), "num_scales is -1");
    BOTH(passport = PASSPORT(.k_scales = bad_scales, .num_scales = 2), "k_scales[1] is -1");
    BOTH(passport = PASSPORT(.v_scales = bad_scales, .num_scales = 2), "v_scales[1] is -1");
#undef BOTH
    folio_kv_blocks w = s.what;
    w.layout = FOLIO_LAYOUT_STRIDED;
    REFUSED(folio_kv_cache_export(s.a.cache, &w, NULL, 0, &bytes, NULL), FOLIO_ERR_ARGUMENT,
            "layout strided");
    w.layout = (folio_layout)8;
    REFUSED(folio_kv_cache_export(s.a.cache, &w, NULL, 0, &bytes, NULL), FOLIO_ERR_ARGUMENT, "8");
    w.layout = FOLIO_LAYOUT_XPACKED; /* 8 numbers of int8 are no pack of 16 */
    REFUSED(folio_kv_cache_export(s.a.cache, &w, NULL, 0, &bytes, NULL), FOLIO_ERR_ARGUMENT,
            "xpacked");
    REFUSED(folio_kv_cache_export(s.a.cache, &s.what, room, s.sent.bytes - 1, &bytes, NULL),
            FOLIO_ERR_ARGUMENT, "capacity");
    REFUSED(folio_kv_cache_export(s.a.cache, &s.what, room, sizeof room, NULL, NULL),
            FOLIO_ERR_ARGUMENT, "bytes is NULL");
    REFUSED(folio_kv_cache_export(NULL, &s.what, room, sizeof room, &bytes, NULL),
            FOLIO_ERR_ARGUMENT, "NULL");
    folio_kv_cache_view view = support_view(s.a.cache, 0);
    REFUSED(folio_kv_cache_export(s.a.cache, &s.what, view.k, s.sent.bytes, &bytes, NULL),
            FOLIO_ERR_ARGUMENT, "share memory");
    CHECK_INT(bytes, 77);
    for (size_t i = 0; i < sizeof room; i++) CHECK(room[i] == 0xEE);
    w = s.what;
    w.blocks = twice;
    CHECK_OK(folio_kv_cache_export(s.a.cache, &w, room, sizeof room, &bytes, NULL));
    check_refused(&s.b, &w, room, bytes, "blocks[1] = 1 is written twice");
    check_refused(&s.b, &s.what, NULL, s.sent.bytes, "data is NULL");
    w = FOLIO_WITH(folio_kv_blocks, .blocks = all_blocks, .num_blocks = 1, .num_tokens = 1);
    check_refused(&s.b, &w, s.sent.data, s.sent.bytes, "num_blocks is 2 there and 1 here");
    small_end(&s);
}

/* Every allocation that fails: nothing is written, nothing is lost. */
TEST(export, memory_that_runs_out)
{
    support_counter counter = {0};
    folio_allocator a = support_allocator(&counter);
    folio_context *ctx = support_context("cpu", 1, &a);
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_desc d = describe(FOLIO_LAYOUT_NATIVE, FOLIO_INT8, 16);
    holder h = hold(ctx, &d);
    fill(&h, 1);
    folio_kv_blocks what = all_of(&d, FOLIO_LAYOUT_HND);
    blob sent = export_to_blob(h.cache, &what);
    fill(&h, 2);
    int64_t live = counter.live;
    for (int in = 0; in < 2; in++)
        for (int64_t n = 1, done = 0; !done; n++) {
            size_t bytes;
            blob before = contents(&h);
            counter.fail_at = counter.calls + n;
            folio_status status =
                in ? folio_kv_cache_import(h.cache, &what, sent.data, sent.bytes, NULL)
                   : folio_kv_cache_export(h.cache, &what, sent.data, sent.bytes, &bytes, NULL);
            counter.fail_at = 0;
            done = status == FOLIO_OK;
            blob after = contents(&h);
            CHECK(done || (status == FOLIO_ERR_MEMORY && same(&before, &after)));
            CHECK_INT(counter.live, live);
            CHECK(done ? n > 3 : n < 50);
            free(before.data);
            free(after.data);
        }
    free(sent.data);
    let_go(&h);
    folio_context_destroy(ctx);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}
