/*
 * check_cache.c: cases of `folio check` about what backends say of themselves and about K and V on
 * the move: shapes, copy, swap, gather, pack and unpack, through every layout.
 */
#include "check/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const folio_dtype kv_dtypes[] = {FOLIO_F32,      FOLIO_F16,      FOLIO_BF16,
                                        FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
enum { NUM_KV_DTYPES = sizeof kv_dtypes / sizeof kv_dtypes[0], NUM_LAYERS = 2 };

/* A small cache through the kit: layout and dtype by number, two layers, poisoned. */
static kit_case *open_small(const check_env *env, check_draw *d, folio_layout layout,
                            folio_dtype dtype, kit_spec *spec)
{
    static const int32_t blocks[] = {16, 16, 32, 8, 5};
    if (spec->seed == 0) { /* the first of a pair decides the geometry */
        *spec = (kit_spec){.seed = (uint64_t)check_int(d, 1, INT64_MAX - 1),
                           .num_heads = 3,
                           .k_head_size = 32,
                           .block_size = CHECK_PICK(d, blocks),
                           .num_layers = NUM_LAYERS,
                           .num_blocks = 9};
        spec->v_in_k = check_chance(d, 3);
    }
    spec->layout = layout;
    if (spec->v_in_k) check_latent(spec, spec->k_head_size, 24);
    spec->kv_dtype = dtype;
    return kit_open(env->ctx, spec, NULL, 0);
}

static folio_layout layout_of(const check_env *env, int64_t index)
{
    return env->info.layouts[index % env->info.num_layouts];
}

static folio_dtype dtype_of(const check_env *env, int64_t index)
{
    return kv_dtypes[index / env->info.num_layouts % NUM_KV_DTYPES];
}

/* Each layout with each dtype, one after another; NULL: the case has failed. */
static kit_case *open_nth(const check_env *env, check_draw *d, int64_t index, kit_spec *s,
                          check_outcome *out)
{
    kit_case *h = open_small(env, d, layout_of(env, index), dtype_of(env, index), s);
    if (h == NULL) check_fail(out, "%s", kit_error());
    return h;
}

/* Rows of whole blocks as stored, K, V and scales one after another. */
typedef struct raw_rows {
    size_t bytes, row_bytes[4];
    unsigned char *data;
    folio_kv_rows rows;
} raw_rows;

static raw_rows raw_make(const kit_spec *s, const int64_t *blocks, int64_t n)
{
    raw_rows r = {.rows = {.struct_size = sizeof r.rows, .num_blocks = n, .blocks = blocks}};
    size_t heads = (size_t)(n * s->block_size * s->num_heads);
    size_t numbers = heads * (size_t)s->k_head_size * folio_dtype_size(s->kv_dtype);
    size_t scales = heads * sizeof(float);
    r.bytes = (s->v_in_k ? 1 : 2) * (numbers + scales);
    r.data = kit_alloc(r.bytes, 1);
    r.rows.k = r.data;
    if (s->v_in_k) {
        r.rows.k_scales = (float *)(void *)(r.data + numbers);
        return r;
    }
    r.rows.v = r.data + numbers;
    r.rows.k_scales = (float *)(void *)(r.data + 2 * numbers);
    r.rows.v_scales = (float *)(void *)(r.data + 2 * numbers + scales);
    return r;
}

/* Random finite numbers of the cache's own dtype. */
static void raw_fill(const kit_spec *s, raw_rows *r, int64_t tag)
{
    for (size_t i = 0; i < r->bytes; i++)
        r->data[i] =
            (unsigned char)(kit_random_bits(s->seed, KIT_USER, tag, (int64_t)i, 0, 0) & 0x3f);
    if (s->kv_dtype != FOLIO_INT8)
        memset(r->rows.k_scales, 0,
               (size_t)(r->data + r->bytes - (unsigned char *)r->rows.k_scales));
}

/* Puts random rows into the blocks of every layer. */
static bool fill_layers(kit_case *h, const kit_spec *s, const int64_t *blocks, int64_t n,
                        check_outcome *out)
{
    bool ok = true;
    for (int32_t layer = 0; ok && layer < NUM_LAYERS; layer++) {
        raw_rows r = raw_make(s, blocks, n);
        raw_fill(s, &r, layer);
        if (kit_wait(h, folio_kv_cache_pack(kit_cache(h), layer, &r.rows, NULL)) != FOLIO_OK)
            ok = check_fail(out, "pack: %s", folio_last_error());
        kit_free(r.data);
    }
    return ok;
}

/* Do the blocks of every layer hold fill_layers' rows, bit for bit? */
static bool same_layers(kit_case *h, const kit_spec *s, const int64_t *blocks, int64_t n,
                        const char *what, check_outcome *out)
{
    bool ok = true;
    for (int32_t layer = 0; ok && layer < NUM_LAYERS; layer++) {
        raw_rows want = raw_make(s, blocks, n), got = raw_make(s, blocks, n);
        raw_fill(s, &want, layer);
        if (kit_wait(h, folio_kv_cache_unpack(kit_cache(h), layer, &got.rows, NULL)) != FOLIO_OK)
            ok = check_fail(out, "unpack: %s", folio_last_error());
        else if (memcmp(got.data, want.data, want.bytes) != 0)
            ok =
                check_fail(out, "%s: layer %d does not hold what was written (%s, %s)", what,
                           (int)layer, folio_layout_name(s->layout), folio_dtype_name(s->kv_dtype));
        kit_free(want.data);
        kit_free(got.data);
    }
    return ok;
}

void run_pack(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    const int64_t blocks[] = {7, 0, 3};
    kit_spec s = {0};
    kit_case *h = open_nth(env, d, index, &s, out);
    bool ok = h != NULL;
    ok = ok && fill_layers(h, &s, blocks, 3, out) && same_layers(h, &s, blocks, 3, "pack", out);
    kit_close(h);
}

void run_copy(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    const int64_t from[] = {8, 1, 5}, to[] = {0, 7, 2};
    const folio_block_pair pairs[] = {{8, 0}, {1, 7}, {5, 2}};
    kit_spec s = {0};
    kit_case *h = open_nth(env, d, index, &s, out);
    bool ok = h != NULL;
    ok = ok && fill_layers(h, &s, from, 3, out);
    if (ok && kit_wait(h, folio_kv_cache_copy_blocks(kit_cache(h), kit_cache(h), pairs, 3, NULL)) !=
                  FOLIO_OK)
        ok = check_fail(out, "%s", folio_last_error());
    ok = ok && same_layers(h, &s, to, 3, "copy", out) && same_layers(h, &s, from, 3, "source", out);
    kit_close(h);
}

/* Between two caches of different layouts. */
void run_swap(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    const int64_t from[] = {2, 6}, to[] = {3, 0};
    const folio_block_pair pairs[] = {{2, 3}, {6, 0}};
    folio_dtype dtype = kv_dtypes[index % NUM_KV_DTYPES];
    kit_spec s = {0}, t;
    kit_case *a = open_small(env, d, layout_of(env, index), dtype, &s);
    t = s;
    kit_case *b =
        open_small(env, d, layout_of(env, index / env->info.num_layouts + index + 1), dtype, &t);
    bool ok = (a && b) || check_fail(out, "%s", kit_error());
    ok = ok && fill_layers(a, &s, from, 2, out);
    if (ok && kit_wait(a, folio_kv_cache_copy_blocks(kit_cache(a), kit_cache(b), pairs, 2, NULL)) !=
                  FOLIO_OK)
        ok = check_fail(out, "%s", folio_last_error());
    ok = ok && same_layers(b, &t, to, 2, "swap", out);
    kit_close(a);
    kit_close(b);
}

/* gather gives stored * scale in f32, and zeros for slot -1. */
void run_gather(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    const int64_t block = 4;
    kit_spec s = {0};
    kit_case *h = open_nth(env, d, index, &s, out);
    bool ok = h != NULL;
    ok = ok && fill_layers(h, &s, &block, 1, out);
    int64_t last = s.block_size - 1, width = (int64_t)s.num_heads * s.k_head_size;
    int64_t slots[] = {4 * (int64_t)s.block_size + last, -1, 4 * (int64_t)s.block_size};
    int64_t tokens[] = {last, -1, 0};
    bool fp8 = s.kv_dtype == FOLIO_FP8_E4M3 || s.kv_dtype == FOLIO_FP8_E5M2;
    float *rows = kit_alloc((size_t)(6 * width), sizeof *rows);
    float *each = kit_alloc((size_t)s.num_heads, sizeof *each);
    for (int32_t i = 0; i < s.num_heads; i++) each[i] = 0.7f + (float)i;
    folio_kv_gather g =
        FOLIO_WITH(folio_kv_gather, .slots = slots, .num_slots = 3,
                   .k = {.data = rows, .dtype = FOLIO_F32, .tokens = 3},
                   .v = {.data = rows + 3 * width,
                         .dtype = FOLIO_F32,
                         .tokens = 3,
                         .head_stride = s.k_head_size},
                   .k_scale = s.v_in_k ? 0 : 0.7f, .k_head_scales = s.v_in_k ? each : NULL,
                   .v_head_scales = s.v_in_k ? NULL : each);
    if (ok && kit_wait(h, folio_kv_cache_gather(kit_cache(h), 1, &g, NULL)) != FOLIO_OK)
        ok = check_fail(out, "%s", folio_last_error());
    raw_rows r = raw_make(&s, &block, 1);
    raw_fill(&s, &r, 1);
    for (int64_t i = 0; ok && i < 6 * width; i++) {
        bool is_v = i >= 3 * width;
        int64_t token = tokens[i / width % 3], e = token * width + i % width;
        double want = 0;
        bool is_rest = s.v_in_k && is_v && i % s.k_head_size >= s.v_head_size; /* never written */
        if (token >= 0 && !is_rest) {
            bool from_v = is_v && !s.v_in_k, one = !is_v && !s.v_in_k;
            const float *scales = from_v ? r.rows.v_scales : r.rows.k_scales;
            want = kit_load(s.kv_dtype, from_v ? r.rows.v : r.rows.k, e);
            if (fp8) want *= (double)(one ? 0.7f : each[e / s.k_head_size % s.num_heads]);
            if (s.kv_dtype == FOLIO_INT8) want *= (double)scales[e / s.k_head_size];
        }
        if (rows[i] != (float)want)
            ok = check_fail(out, "%s row %lld, element %lld is %g, expected %g", is_v ? "v" : "k",
                            (long long)(i / width % 3), (long long)(i % width), (double)rows[i],
                            (double)(float)want);
    }
    kit_free(rows);
    kit_free(each);
    kit_free(r.data);
    kit_close(h);
}

/* ---- What a backend says */

static bool describes_itself(const check_env *env, check_outcome *out)
{
    const folio_backend_info *info = &env->info;
    folio_context_info opened = {.struct_size = sizeof opened};
    if (folio_context_get_info(env->ctx, &opened) != FOLIO_OK)
        return check_fail(out, "%s", folio_last_error());
    if (strcmp(opened.backend, info->name) != 0)
        return check_fail(out, "the context's backend is %s", opened.backend);
    if (!info->available || *info->reason)
        return check_fail(out, "it opened, yet it is not available: \"%s\"", info->reason);
    if (*info->device == '\0') return check_fail(out, "the device has no name");
    bool found = false;
    for (int32_t i = 0; i < info->num_levels; i++)
        found |= strcmp(info->levels[i], info->level) == 0;
    if (!found) return check_fail(out, "level \"%s\" is not one of its levels", info->level);
    if (info->num_layouts < 1) return check_fail(out, "it lists no layout");
    for (int32_t i = 0; i < info->num_features; i++) {
        const folio_feature *f = &info->features[i];
        if (*f->name == '\0' || *f->summary == '\0')
            return check_fail(out, "feature %d has no name or no summary", (int)i);
        if ((f->supported != 0) != (*f->reason == '\0'))
            return check_fail(out, "%s: supported is %d and the reason \"%s\"", f->name,
                              (int)f->supported, f->reason);
    }
    return true;
}

/* What supports says of a head size is what attention_create does. */
static bool supports_head_size(const check_env *env, int32_t size, bool expected,
                               check_outcome *out)
{
    folio_attention_desc desc =
        FOLIO_WITH(folio_attention_desc, .num_heads = 2, .k_head_size = size, .dtype = FOLIO_F32);
    char reasons[256] = "";
    folio_attention *attention = NULL;
    folio_status says =
        folio_backend_supports(env->info.name, &desc, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER),
                               NULL, reasons, sizeof reasons);
    folio_status does = folio_attention_create(env->ctx, &desc, &attention);
    if (does == FOLIO_OK) folio_attention_destroy(attention);
    if (says != does || (says == FOLIO_OK) != expected)
        return check_fail(out, "head size %d: supports says %s, create %s", (int)size,
                          folio_status_name(says), folio_status_name(does));
    if ((says == FOLIO_OK) != (*reasons == '\0'))
        return check_fail(out, "head size %d: %s with the reason \"%s\"", (int)size,
                          folio_status_name(says), reasons);
    return true;
}

void run_describe(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    (void)d;
    (void)index;
    int32_t most = env->info.max_head_size;
    (void)(describes_itself(env, out) && supports_head_size(env, 8, true, out) &&
           supports_head_size(env, most, true, out) &&
           supports_head_size(env, most + 8, false, out));
}

/* A shape's arrays hold exactly the numbers of the cache, and a layer holds its arrays. */
void run_shape(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    static const int32_t blocks[] = {16, 32, 5, 1};
    folio_layout layout = layout_of(env, index);
    folio_dtype dtype = dtype_of(env, index);
    if (layout == FOLIO_LAYOUT_STRIDED) layout = FOLIO_LAYOUT_NHD; /* has no shape of its own */
    folio_kv_cache_desc desc = FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 7, .num_layers = 3,
                                          .block_size = CHECK_PICK(d, blocks), .num_kv_heads = 2,
                                          .k_head_size = 48, .dtype = dtype, .layout = layout);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    if (folio_kv_cache_get_shape(env->info.name, &desc, &shape) != FOLIO_OK) {
        check_fail(out, "%s", folio_last_error());
        return;
    }
    const folio_kv_array *arrays[] = {&shape.k, &shape.v, &shape.k_scales, &shape.v_scales};
    int64_t heads = desc.num_blocks * desc.block_size * desc.num_kv_heads, least = 0;
    for (int a = 0; a < 4; a++) {
        int64_t count = arrays[a]->num_dims > 0, want = a < 2 ? heads * desc.k_head_size : heads;
        int64_t size = a < 2 ? (int64_t)folio_dtype_size(dtype) : 4;
        for (int i = 0; i < arrays[a]->num_dims; i++) count *= arrays[a]->dims[i];
        if (a >= 2 && dtype != FOLIO_INT8) want = 0;
        least += want * size;
        if (count != want) {
            check_fail(out, "array %d of %s has %lld numbers, expected %lld", a,
                       folio_layout_name(layout), (long long)count, (long long)want);
            return;
        }
    }
    if (shape.layer_bytes < least)
        check_fail(out, "layer_bytes is %lld, the arrays need %lld", (long long)shape.layer_bytes,
                   (long long)least);
    else if (shape.total_bytes < desc.num_layers * least)
        check_fail(out, "total_bytes is %lld, less than its layers", (long long)shape.total_bytes);
    else if (shape.layout_id == NULL || *shape.layout_id == '\0')
        check_fail(out, "the layout has no id");
}
