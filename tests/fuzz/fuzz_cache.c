/*
 * fuzz_cache.c: caches of all layouts and types, made here or wrapped over memory of exactly the bytes that they need,
 * with strides of the caller's; written, gathered, copied, packed and unpacked. A shadow holds what each slot must give.
 */
#include "fuzz/fuzz.h"

#include <math.h>
#include <stdlib.h>

const char fuzz_name[] = "cache";
enum { MAX_SLOTS = 160, MAX_WIDTH = 3 * 32, LAYERS = 2 };

typedef struct world {
    folio_context *ctx;
    folio_kv_cache_desc desc;
    folio_kv_cache *cache[2]; /* the second one has another layout */
    int64_t k_size, v_size, num_slots;
    bool known[2][LAYERS][MAX_SLOTS];
    float shadow[2][LAYERS][2][MAX_SLOTS][MAX_WIDTH]; /* K, V */
} world;

static world w;
static const folio_dtype types[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};

static int32_t wrong_or(fuzz_input *in, int32_t right)
{
    return (int32_t)fuzz_any(in, right, right);
}

static folio_kv_cache_desc draw_desc(fuzz_input *in)
{
    static const int32_t blocks[] = {16, 1, 5, 8, 32};
    static const int32_t heads[] = {1, 2, 3};
    folio_kv_cache_desc d = FOLIO_WITH(folio_kv_cache_desc, .num_blocks = fuzz_any(in, 1, 5),
                                       .num_layers = (int32_t)fuzz_any(in, 1, LAYERS));
    d.block_size = wrong_or(in, FUZZ_PICK(in, blocks));
    d.num_kv_heads = wrong_or(in, FUZZ_PICK(in, heads));
    d.k_head_size = wrong_or(in, 8 * (int32_t)fuzz_int(in, 1, 4));
    d.v_head_size = fuzz_chance(in, 3) ? wrong_or(in, 8 * (int32_t)fuzz_int(in, 1, 4)) : 0;
    d.dtype = (folio_dtype)fuzz_any(in, 1, 6);
    d.layout = (folio_layout)fuzz_any(in, 0, FOLIO_NUM_LAYOUTS - 1);
    d.v_in_k = fuzz_chance(in, 6);
    if (d.v_in_k && d.v_head_size > d.k_head_size) d.v_head_size = 8;
    if (d.v_in_k && d.layout > FOLIO_LAYOUT_HND && d.layout != FOLIO_LAYOUT_STRIDED)
        d.layout = FOLIO_LAYOUT_HND;
    bool interleaved =
        d.layout == FOLIO_LAYOUT_INTERLEAVED_HND || d.layout == FOLIO_LAYOUT_INTERLEAVED_NHD;
    if (interleaved) d.v_head_size = 0;
    if (d.layout == FOLIO_LAYOUT_XPACKED && folio_dtype_size(d.dtype) == 1 &&
        d.k_head_size % 16 != 0)
        d.layout = FOLIO_LAYOUT_XPACKED_1;
    return d;
}

static int64_t elements(const folio_kv_strides *s, int64_t size)
{
    const folio_kv_cache_desc *d = &w.desc;
    return (d->num_blocks - 1) * s->block + (d->block_size - 1) * s->token +
           (d->num_kv_heads - 1) * s->head + size;
}

/* Strides of a STRIDED array: tokens outside heads or the reverse, with gaps. */
static folio_kv_strides draw_strides(fuzz_input *in, int64_t size)
{
    const folio_kv_cache_desc *d = &w.desc;
    folio_kv_strides s;
    int64_t step = size + fuzz_int(in, 0, 5);
    if (fuzz_chance(in, 2)) {
        s.token = step;
        s.head = d->block_size * s.token + fuzz_int(in, 0, 3);
        s.block = d->num_kv_heads * s.head;
    } else {
        s.head = step;
        s.token = d->num_kv_heads * s.head + fuzz_int(in, 0, 3);
        s.block = d->block_size * s.token;
    }
    s.block = fuzz_any(in, s.block, s.block + 9);
    s.token = fuzz_any(in, s.token, s.token);
    s.head = fuzz_any(in, s.head, s.head);
    return s;
}

static bool is_small(const folio_kv_strides *s)
{
    const int64_t most = 1 << 16;
    return s->block >= 0 && s->token >= 0 && s->head >= 0 && s->block < most && s->token < most &&
           s->head < most;
}

/* One array of each layer: what bytes says, and now and then one byte less. */
static size_t make_memory(fuzz_input *in, void **layers, int64_t bytes)
{
    for (int32_t l = 0; l < w.desc.num_layers; l++) layers[l] = fuzz_poison(in, bytes, 1);
    return (size_t)bytes;
}

static folio_status wrap(fuzz_input *in, const folio_kv_cache_shape *shape)
{
    void *k[LAYERS], *v[LAYERS];
    float *scales[2][LAYERS];
    const folio_kv_cache_desc *d = &w.desc;
    int64_t size = (int64_t)folio_dtype_size(d->dtype), less = fuzz_chance(in, 8) ? 1 : 0;
    folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = k);
    if (d->layout == FOLIO_LAYOUT_STRIDED) {
        m.k_strides = draw_strides(in, d->k_head_size);
        m.v_strides = draw_strides(in, w.v_size);
        if (!is_small(&m.k_strides) || !is_small(&m.v_strides)) return FOLIO_ERR_ARGUMENT;
        m.k_bytes = make_memory(in, k, elements(&m.k_strides, d->k_head_size) * size - less);
        m.v_bytes = make_memory(in, v, elements(&m.v_strides, w.v_size) * size);
        m.v = v;
    } else if (d->layout == FOLIO_LAYOUT_NATIVE || fuzz_chance(in, 2)) {
        m.k_bytes =
            make_memory(in, k, shape->layer_bytes - (shape->layer_bytes % 64 == 0 ? less : 0));
    } else {
        int64_t gap = fuzz_any(in, 0, 4);
        if (gap < 0 || gap > 1000) return FOLIO_ERR_ARGUMENT;
        if (gap > 0) {
            m.k_strides.block = shape->k.strides[0] + gap;
            m.v_strides.block = d->v_in_k ? 0 : shape->v.strides[0] + gap;
        }
        m.k_bytes = make_memory(in, k, shape->k.bytes + (d->num_blocks - 1) * gap * size - less);
        m.v_bytes = make_memory(in, v, shape->v.bytes + (d->num_blocks - 1) * gap * size);
        m.v = v;
    }
    if (d->v_in_k) m.v = NULL, m.v_bytes = 0, m.v_strides = (folio_kv_strides){0, 0, 0};
    for (int part = 0; part < 2 && d->dtype == FOLIO_INT8; part++) {
        int64_t bytes = (part ? shape->v_scales.bytes : shape->k_scales.bytes);
        for (int32_t l = 0; l < d->num_layers; l++) scales[part][l] = fuzz_poison(in, bytes, 1);
        if (part) m.v_scales = d->v_in_k ? NULL : scales[1], m.v_scales_bytes = (size_t)bytes;
        else m.k_scales = scales[0], m.k_scales_bytes = (size_t)bytes;
    }
    return folio_kv_cache_wrap(w.ctx, d, &m, &w.cache[0]);
}

/* A second cache of the same geometry that makes its own memory. */
static void make_other(fuzz_input *in)
{
    folio_kv_cache_desc d = w.desc;
    d.layout = w.desc.v_in_k ? (folio_layout)fuzz_int(in, 0, 2) : (folio_layout)fuzz_int(in, 0, 6);
    bool interleaved =
        d.layout == FOLIO_LAYOUT_INTERLEAVED_HND || d.layout == FOLIO_LAYOUT_INTERLEAVED_NHD;
    if (interleaved && w.v_size != w.k_size) d.layout = FOLIO_LAYOUT_NHD;
    if (d.layout == FOLIO_LAYOUT_XPACKED && folio_dtype_size(d.dtype) == 1)
        d.layout = FOLIO_LAYOUT_XPACKED_1;
    FUZZ_CHECK(folio_kv_cache_create(w.ctx, &d, &w.cache[1]) == FOLIO_OK,
               "the second cache is refused");
    kit_poison_cache(w.cache[1]);
}

/* How far a number may be from what was stored, by its row's largest. */
static double tolerance(double x)
{
    switch (w.desc.dtype) {
    case FOLIO_FP8_E4M3: return fabs(x) / 16 + 0.001;
    case FOLIO_FP8_E5M2: return fabs(x) / 8 + 0.0001;
    case FOLIO_INT8: return 0.0041; /* rows reach 1 at most */
    default: return 0;
    }
}

/* Slots, each once where `once`. */
static int64_t *draw_slots(fuzz_input *in, int64_t n, bool once)
{
    int64_t *slots = fuzz_zeros(in, n, sizeof *slots);
    int64_t first = fuzz_int(in, 0, w.num_slots - 1), step = once ? 1 : fuzz_int(in, 0, 3);
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = (first + i * step) % w.num_slots;
        slots[i] = fuzz_any(in, slot, slot);
    }
    if (n > 0 && fuzz_chance(in, 4)) slots[fuzz_int(in, 0, n - 1)] = -1;
    return slots;
}

static void write(fuzz_input *in, int which, int32_t layer)
{
    int64_t n = fuzz_int(in, 0, w.num_slots < 20 ? w.num_slots : 20), heads = w.desc.num_kv_heads;
    int64_t gap = fuzz_chance(in, 3) ? 8 : 0;
    folio_dtype type = FUZZ_PICK(in, types);
    const int64_t *slots = draw_slots(in, n, true);
    int64_t width[2] = {heads * w.k_size, heads * w.v_size};
    folio_tensor t[2];
    for (int part = 0; part < 2; part++)
        t[part] = (folio_tensor){
            .data = fuzz_numbers(in, type, n > 0 ? n * (width[part] + gap) - gap : 0),
            .dtype = type,
            .tokens = fuzz_any(in, n, n),
            .token_stride = gap ? width[part] + gap : 0};
    if (t[0].tokens > n || t[1].tokens > n) return;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = t[0], .slots = slots);
    if (!w.desc.v_in_k) write.v = t[1];
    if (!fuzz_took(folio_kv_cache_write(w.cache[which], (int32_t)fuzz_any(in, layer, layer), &write,
                                        NULL)))
        return;
    for (int64_t i = 0; i < t[0].tokens; i++) {
        if (slots[i] < 0) continue;
        w.known[which][layer][slots[i]] = fuzz_is_valid(in);
        for (int part = 0; part < 2; part++)
            for (int64_t d = 0; d < width[part]; d++)
                w.shadow[which][layer][part][slots[i]][d] =
                    (float)kit_load(type, t[part].data, i * (width[part] + gap) + d);
        if (!w.desc.v_in_k) continue;
        for (int64_t d = 0; d < width[1]; d++)
            w.shadow[which][layer][1][slots[i]][d] =
                w.shadow[which][layer][0][slots[i]][d / w.v_size * w.k_size + d % w.v_size];
    }
}

static void gather(fuzz_input *in, int which, int32_t layer)
{
    int64_t n = fuzz_int(in, 0, 20), heads = w.desc.num_kv_heads;
    const int64_t *slots = draw_slots(in, n, false);
    float *got[2] = {fuzz_poison(in, n * heads * w.k_size, 4),
                     fuzz_poison(in, n * heads * w.v_size, 4)};
    folio_kv_gather g = FOLIO_WITH(
        folio_kv_gather, .k = {.data = got[0], .dtype = FOLIO_F32, .tokens = n},
        .v = {.data = got[1], .dtype = FOLIO_F32, .tokens = n}, .slots = slots, .num_slots = n);
    if (!fuzz_took(folio_kv_cache_gather(w.cache[which], layer, &g, NULL)) || !fuzz_is_valid(in))
        return;
    for (int part = 0; part < 2; part++)
        for (int64_t i = 0; i < n * heads * (part ? w.v_size : w.k_size); i++) {
            int64_t width = heads * (part ? w.v_size : w.k_size), slot = slots[i / width];
            if (slot >= 0 && !w.known[which][layer][slot]) continue;
            double want = slot < 0 ? 0 : (double)w.shadow[which][layer][part][slot][i % width];
            FUZZ_CHECK(fabs((double)got[part][i] - want) <= tolerance(want),
                       "%s of slot %lld, layer %d, number %lld: %g, expected %g", part ? "V" : "K",
                       (long long)slot, layer, (long long)(i % width), (double)got[part][i], want);
        }
}

/* Blocks of one cache become those of the other. */
static void copy(fuzz_input *in, int from, bool by_rows, int32_t layer)
{
    int64_t n = fuzz_int(in, 0, w.desc.num_blocks), bs = w.desc.block_size,
            heads = w.desc.num_kv_heads;
    int64_t shift = fuzz_int(in, 0, w.desc.num_blocks - 1), to = 1 - from;
    size_t size = folio_dtype_size(w.desc.dtype);
    folio_block_pair *pairs = fuzz_zeros(in, n, sizeof *pairs);
    int64_t *blocks[2] = {fuzz_zeros(in, n, sizeof(int64_t)), fuzz_zeros(in, n, sizeof(int64_t))};
    for (int64_t i = 0; i < n; i++) {
        blocks[0][i] = pairs[i].from = fuzz_any(in, i, i);
        blocks[1][i] = pairs[i].to =
            fuzz_any(in, (i + shift) % w.desc.num_blocks, (i + shift) % w.desc.num_blocks);
    }
    int32_t first = by_rows ? layer : 0, last = by_rows ? layer : w.desc.num_layers - 1;
    if (by_rows) {
        folio_kv_rows rows =
            FOLIO_WITH(folio_kv_rows, .k = fuzz_poison(in, n * bs * heads * w.k_size, size),
                       .num_blocks = n, .blocks = blocks[0]);
        if (!w.desc.v_in_k) rows.v = fuzz_poison(in, n * bs * heads * w.v_size, size);
        if (w.desc.dtype == FOLIO_INT8) rows.k_scales = fuzz_poison(in, n * bs * heads, 4);
        if (w.desc.dtype == FOLIO_INT8 && !w.desc.v_in_k)
            rows.v_scales = fuzz_poison(in, n * bs * heads, 4);
        if (!fuzz_took(folio_kv_cache_unpack(w.cache[from], layer, &rows, NULL))) return;
        rows.blocks = blocks[1];
        if (!fuzz_took(folio_kv_cache_pack(w.cache[to], layer, &rows, NULL))) return;
    } else if (!fuzz_took(folio_kv_cache_copy_blocks(w.cache[from], w.cache[to], pairs, n, NULL)))
        return;
    for (int32_t l = first; l <= last; l++)
        for (int64_t i = 0; i < n * bs; i++) {
            int64_t a = pairs[i / bs].from * bs + i % bs, b = pairs[i / bs].to * bs + i % bs;
            w.known[to][l][b] = w.known[from][l][a];
            for (int part = 0; part < 2; part++)
                memcpy(w.shadow[to][l][part][b], w.shadow[from][l][part][a],
                       sizeof w.shadow[0][0][0][0]);
        }
}

void fuzz_run(fuzz_input *in)
{
    w.ctx = fuzz_context(fuzz_int(in, 0, fuzz_num_contexts() - 1));
    w.cache[0] = w.cache[1] = NULL;
    memset(w.known, 0, sizeof w.known);
    w.desc = draw_desc(in);
    folio_kv_cache_shape shape = FOLIO_INIT(folio_kv_cache_shape);
    bool has_shape = w.desc.layout != FOLIO_LAYOUT_STRIDED &&
                     fuzz_took(folio_kv_cache_get_shape("cpu", &w.desc, &shape));
    bool small = folio_dtype_size(w.desc.dtype) > 0 && w.desc.num_blocks > 0 &&
                 w.desc.num_blocks <= 5 && w.desc.num_layers >= 1 && w.desc.num_layers <= LAYERS &&
                 w.desc.block_size > 0 && w.desc.block_size <= 32 && w.desc.num_kv_heads > 0 &&
                 w.desc.num_kv_heads <= 3 && w.desc.k_head_size > 0 && w.desc.k_head_size <= 32 &&
                 w.desc.v_head_size >= 0 && w.desc.v_head_size <= 32;
    if (!small ||
        (!has_shape &&
         w.desc.layout != FOLIO_LAYOUT_STRIDED)) { /* mostly refused; never with a crash */
        if (fuzz_took(folio_kv_cache_create(w.ctx, &w.desc, &w.cache[0])))
            folio_kv_cache_destroy(w.cache[0]);
        return;
    }
    w.k_size = w.desc.k_head_size;
    w.v_size = w.desc.v_head_size ? w.desc.v_head_size : w.k_size;
    w.num_slots = w.desc.num_blocks * w.desc.block_size;
    bool wrapped = w.desc.layout == FOLIO_LAYOUT_STRIDED || !fuzz_chance(in, 4);
    folio_status status =
        wrapped ? wrap(in, &shape) : folio_kv_cache_create(w.ctx, &w.desc, &w.cache[0]);
    if (!fuzz_took(status)) return;
    if (!wrapped) kit_poison_cache(w.cache[0]);
    make_other(in);
    for (int64_t n = 12; n > 0 && in->left > 0; n--) {
        int64_t what = fuzz_int(in, 0, 7);
        int which = (int)fuzz_int(in, 0, 1);
        int32_t layer = (int32_t)fuzz_int(in, 0, w.desc.num_layers - 1);
        if (what < 3) write(in, which, layer);
        else if (what < 6) gather(in, which, layer);
        else copy(in, which, what == 7, layer);
    }
    folio_kv_cache_destroy(w.cache[0]);
    folio_kv_cache_destroy(w.cache[1]);
}
