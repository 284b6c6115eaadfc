/* kv_cache.c: caches created, wrapped around the caller's memory, described and destroyed. */
#include "cache/kv_cache.h"

#include "core/dtype.h"
#include "core/touch.h"

#include <string.h>

folio_status folioi_kv_cache_check_layer(const folio_kv_cache *cache, int32_t layer)
{
    REQUIRE(cache != NULL, "KV cache is NULL");
    REQUIRE(layer >= 0 && layer < cache->format.desc.num_layers,
            "KV cache: layer %d is outside [0, %d)", layer, cache->format.desc.num_layers);
    return FOLIO_OK;
}

static folio_status new_cache(folio_context *ctx, const folioi_kv_format *format,
                              folio_kv_cache **out)
{
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_kv_cache), "a KV cache", &memory));
    folio_kv_cache *cache = memory;
    refs_init(&cache->refs);
    refs_retain(&ctx->refs);
    cache->ctx = ctx;
    cache->format = *format;
    cache->layers_bytes = format->desc.num_layers * (int64_t)sizeof(folioi_kv_layer);
    folio_status status =
        folioi_alloc(&ctx->allocator, cache->layers_bytes, "a KV cache's layers", &memory);
    if (status != FOLIO_OK) {
        folio_kv_cache_destroy(cache);
        return status;
    }
    cache->layers = memory;
    for (int32_t i = 0; i < format->desc.num_layers; i++) cache->layers[i].format = &cache->format;
    *out = cache;
    return FOLIO_OK;
}

folio_status folioi_kv_memory_alloc(folio_context *ctx, int64_t bytes, void **out)
{
    TRY(ctx->backend->alloc(ctx, FOLIO_MEMORY_DEVICE, (size_t)bytes, "a KV cache", out));
    if (!ctx->backend->on_device && folioi_has_memory_nodes()) folioi_touch(ctx, *out, bytes);
    return FOLIO_OK;
}

void folioi_kv_memory_free(folio_context *ctx, void *memory, int64_t bytes)
{
    ctx->backend->free(ctx, FOLIO_MEMORY_DEVICE, memory, (size_t)bytes);
}

/* The arrays of a layer that are not empty; returns how many. */
static int layer_arrays(const folioi_kv_layer *l, const void *arrays[4], int64_t bytes[4])
{
    const folioi_kv_format *f = l->format;
    const void *at[4] = {l->k, l->v, l->k_scales, l->v_scales};
    const int64_t sizes[4] = {f->k.bytes, f->v.bytes, f->k_scales.bytes, f->v_scales.bytes};
    int n = 0;
    for (int i = 0; i < 4; i++)
        if (at[i] != NULL && sizes[i] > 0) arrays[n] = at[i], bytes[n++] = sizes[i];
    return n;
}

static void find_extent(folio_kv_cache *cache)
{
    const void *arrays[4];
    int64_t bytes[4];
    cache->first = UINTPTR_MAX;
    cache->end = 0;
    for (int32_t i = 0; i < cache->format.desc.num_layers; i++)
        for (int k = layer_arrays(&cache->layers[i], arrays, bytes) - 1; k >= 0; k--) {
            uintptr_t first = (uintptr_t)arrays[k], end = first + (uintptr_t)bytes[k];
            cache->first = first < cache->first ? first : cache->first;
            cache->end = end > cache->end ? end : cache->end;
        }
}

/* The first layer that has a byte in [first, first + size); -1: none has. */
static int32_t layer_at(const folio_kv_cache *cache, uintptr_t first, int64_t size)
{
    const void *arrays[4];
    int64_t bytes[4];
    uintptr_t end = first + (uintptr_t)size;
    if (size == 0 || first >= cache->end || cache->first >= end) return -1;
    for (int32_t i = 0; i < cache->format.desc.num_layers; i++)
        for (int k = layer_arrays(&cache->layers[i], arrays, bytes) - 1; k >= 0; k--)
            if (first < (uintptr_t)arrays[k] + (uintptr_t)bytes[k] && (uintptr_t)arrays[k] < end)
                return i;
    return -1;
}

folio_status folioi_kv_cache_check_apart(const folio_kv_cache *cache, const folioi_place *places,
                                         int n)
{
    for (int i = 0; i < n; i++) {
        int32_t at = layer_at(cache, places[i].span.first, places[i].span.extent);
        REQUIRE(at < 0, "%s and layer %d of the cache share memory", places[i].name, at);
    }
    return FOLIO_OK;
}

folio_status folio_kv_cache_create(folio_context *ctx, const folio_kv_cache_desc *desc,
                                   folio_kv_cache **out)
{
    REQUIRE(out != NULL, "folio_kv_cache_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_kv_cache_create: ctx is NULL");
    folioi_kv_format format;
    TRY(folioi_kv_format_init(desc, ctx->backend->on_device, &format));
    REQUIRE(format.desc.layout != FOLIO_LAYOUT_STRIDED,
            "KV cache: layout strided is for folio_kv_cache_wrap, which takes strides");
    folio_kv_cache *cache;
    TRY(new_cache(ctx, &format, &cache));
    cache->memory_bytes = format.layer_bytes * format.desc.num_layers;
    folio_status status = folioi_kv_memory_alloc(ctx, cache->memory_bytes, &cache->memory);
    if (status != FOLIO_OK) {
        folio_kv_cache_destroy(cache);
        return status;
    }
    for (int32_t i = 0; i < format.desc.num_layers; i++) {
        char *base = (char *)cache->memory + i * format.layer_bytes;
        cache->layers[i] = kv_layer_at(&cache->format, base);
    }
    find_extent(cache);
    *out = cache;
    return FOLIO_OK;
}

void folio_kv_cache_destroy(folio_kv_cache *cache)
{
    if (cache == NULL || !refs_release(&cache->refs)) return;
    folio_context *ctx = cache->ctx;
    const folio_allocator *a = &ctx->allocator;
    folio_kv_cache *holder = cache->holder;
    folioi_kv_memory_free(ctx, cache->memory, cache->memory_bytes);
    folioi_free(a, cache->layers, cache->layers_bytes);
    folioi_free(a, cache, sizeof *cache);
    folio_kv_cache_destroy(holder);
    folio_context_destroy(ctx);
}

static folio_status check_apart(const folio_kv_cache_desc *d, const folio_kv_strides *s,
                                int64_t inner, const char *name)
{
    const int64_t dims[] = {d->num_blocks, d->block_size, d->num_kv_heads};
    const int64_t strides[] = {s->block, s->token, s->head};
    REQUIRE(strides_are_apart(3, dims, strides, inner),
            "KV cache: %s strides %lld, %lld, %lld (block, token, head) make its rows overlap",
            name, (long long)s->block, (long long)s->token, (long long)s->head);
    return FOLIO_OK;
}

/* The caller's strides put in place of the layout's own; array->bytes follows. */
static folio_status apply_strides(folioi_kv_format *f, folio_kv_array *array, folioi_address *at,
                                  const folio_kv_strides *s, const char *name, int32_t head_size)
{
    const folio_kv_cache_desc *d = &f->desc;
    bool strided = d->layout == FOLIO_LAYOUT_STRIDED;
    REQUIRE(s->block >= 0 && s->token >= 0 && s->head >= 0,
            "KV cache: %s strides are %lld, %lld, %lld (block, token, head); none may be negative",
            name, (long long)s->block, (long long)s->token, (long long)s->head);
    if (strided) {
        REQUIRE(
            s->block >= head_size && s->token >= head_size && s->head >= head_size,
            "KV cache: %s strides are %lld, %lld, %lld (block, token, head); layout strided needs "
            "all three, each at least the head size %d",
            name, (long long)s->block, (long long)s->token, (long long)s->head, head_size);
        TRY(check_apart(d, s, head_size, name));
    } else {
        REQUIRE(s->token == 0 && s->head == 0,
                "KV cache: layout %s takes no token or head stride for %s, only a block stride",
                folio_layout_name(d->layout), name);
        REQUIRE(s->block == 0 || s->block >= at->block,
                "KV cache: %s block stride %lld is below the layout's own %lld", name,
                (long long)s->block, (long long)at->block);
    }
    folioi_array_restride(array, at, s, true);
    int64_t elements, elem = (int64_t)folio_dtype_size(d->dtype);
    REQUIRE(
        folioi_array_fits(array, elem) && folioi_array_extent(array, &elements) &&
            checked_mul(elements, elem, &array->bytes),
        "KV cache: %s strides times num_blocks exceed the largest size this library can address",
        name);
    return FOLIO_OK;
}

static folio_status apply_scale_strides(const folio_kv_cache_desc *d, folio_kv_array *array,
                                        folioi_address *at, const folio_kv_strides *s, size_t bytes,
                                        const char *name)
{
    REQUIRE(s->block >= 0 && s->token >= 0 && s->head >= 0,
            "KV cache: %s strides are %lld, %lld, %lld (block, token, head); none may be negative",
            name, (long long)s->block, (long long)s->token, (long long)s->head);
    folioi_array_restride(array, at, s, false);
    const folio_kv_strides now = {at->block, at->token_tile_stride, at->head};
    TRY(check_apart(d, &now, 1, name));
    int64_t elements;
    REQUIRE(
        folioi_array_fits(array, 4) && folioi_array_extent(array, &elements) &&
            checked_mul(elements, 4, &array->bytes),
        "KV cache: %s strides times num_blocks exceed the largest size this library can address",
        name);
    REQUIRE((size_t)array->bytes <= bytes, "KV cache: %s_bytes is %zu, a layer needs %lld", name,
            bytes, (long long)array->bytes);
    return FOLIO_OK;
}

static folio_status check_pointers(void *const *pointers, int32_t n, size_t align, const char *name)
{
    REQUIRE(pointers != NULL, "KV cache: %s is NULL", name);
    for (int32_t i = 0; i < n; i++) {
        REQUIRE(pointers[i] != NULL, "KV cache: %s[%d] is NULL", name, i);
        REQUIRE((uintptr_t)pointers[i] % align == 0, "KV cache: %s[%d] is not aligned to %zu bytes",
                name, i, align);
    }
    return FOLIO_OK;
}

static folio_status resolve_memory(folioi_kv_format *f, folio_kv_memory *m)
{
    const folio_kv_cache_desc *d = &f->desc;
    bool native = d->layout == FOLIO_LAYOUT_NATIVE;
    int64_t elem = (int64_t)folio_dtype_size(d->dtype);
    size_t align = native ? FOLIOI_ALIGN : (size_t)elem;
    TRY(check_pointers(m->k, d->num_layers, align, "k"));
    if (d->v_in_k) {
        const folio_kv_strides *s = &m->v_strides;
        REQUIRE(m->v == NULL && m->v_scales == NULL && s->block == 0 && s->token == 0 &&
                    s->head == 0,
                "KV cache: v_in_k: there is no V; v and v_scales must be NULL, v_strides 0");
    } else if (m->v != NULL) {
        REQUIRE(!native, "KV cache: in the native layout V lies in K's buffer; v must be NULL");
        TRY(check_pointers(m->v, d->num_layers, align, "v"));
    } else {
        REQUIRE(d->layout != FOLIO_LAYOUT_STRIDED, "KV cache: v is NULL; layout strided needs it");
        REQUIRE(native || (m->k_strides.block == 0 && m->v_strides.block == 0),
                "KV cache: v is NULL; a block stride then has no meaning in layout %s",
                folio_layout_name(d->layout));
    }
    if (native) {
        REQUIRE(m->k_strides.block % FOLIOI_ALIGN * elem % FOLIOI_ALIGN == 0,
                "KV cache: the native block stride of %lld elements is not a multiple of %d bytes",
                (long long)m->k_strides.block, FOLIOI_ALIGN);
        if (!d->v_in_k) m->v_strides = m->k_strides;
    }
    TRY(apply_strides(f, &f->k, &f->k_at, &m->k_strides, "k", d->k_head_size));
    if (!d->v_in_k) TRY(apply_strides(f, &f->v, &f->v_at, &m->v_strides, "v", d->v_head_size));
    int64_t k_need = f->k.bytes, v_need = f->v.bytes;
    if (m->v == NULL) k_need = max_i64(k_need, f->v.offset_bytes + v_need);
    REQUIRE((size_t)k_need <= m->k_bytes, "KV cache: k_bytes is %zu, a layer needs %lld",
            m->k_bytes, (long long)k_need);
    REQUIRE(m->v == NULL || (size_t)v_need <= m->v_bytes,
            "KV cache: v_bytes is %zu, a layer needs %lld", m->v_bytes, (long long)v_need);
    if (d->dtype != FOLIO_INT8) return FOLIO_OK;
    TRY(check_pointers((void *const *)m->k_scales, d->num_layers, 4, "k_scales"));
    TRY(apply_scale_strides(d, &f->k_scales, &f->k_scales_at, &m->k_scales_strides,
                            m->k_scales_bytes, "k_scales"));
    if (d->v_in_k) return FOLIO_OK;
    TRY(check_pointers((void *const *)m->v_scales, d->num_layers, 4, "v_scales"));
    return apply_scale_strides(d, &f->v_scales, &f->v_scales_at, &m->v_scales_strides,
                               m->v_scales_bytes, "v_scales");
}

folio_status folio_kv_cache_wrap(folio_context *ctx, const folio_kv_cache_desc *desc,
                                 const folio_kv_memory *memory, folio_kv_cache **out)
{
    REQUIRE(out != NULL, "folio_kv_cache_wrap: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_kv_cache_wrap: ctx is NULL");
    folioi_kv_format format;
    folio_kv_memory m;
    TRY(folioi_kv_format_init(desc, ctx->backend->on_device, &format));
    STRUCT_IN(m, memory, "folio_kv_memory");
    TRY(resolve_memory(&format, &m));
    folioi_kv_format_view_v(&format);
    folio_kv_cache *cache;
    TRY(new_cache(ctx, &format, &cache));
    for (int32_t i = 0; i < format.desc.num_layers; i++) {
        folioi_kv_layer *layer = &cache->layers[i];
        layer->k = m.k[i];
        layer->v = m.v != NULL ? m.v[i] : (char *)m.k[i] + format.v.offset_bytes;
        if (format.desc.dtype != FOLIO_INT8) continue;
        layer->k_scales = m.k_scales[i];
        layer->v_scales = format.desc.v_in_k ? layer->k_scales : m.v_scales[i];
    }
    find_extent(cache);
    *out = cache;
    return FOLIO_OK;
}

folio_status folio_kv_cache_get_view(const folio_kv_cache *cache, int32_t layer,
                                     folio_kv_cache_view *view)
{
    TRY(folioi_kv_cache_check_layer(cache, layer));
    const folioi_kv_layer *l = &cache->layers[layer];
    const folioi_kv_format *f = &cache->format;
    bool has_v = kv_last(f) == FOLIOI_V;
    folio_kv_cache_view v = {
        .k = l->k,
        .v = has_v ? l->v : NULL,
        .k_scales = l->k_scales,
        .v_scales = has_v ? l->v_scales : NULL,
        .k_array = f->k,
        .v_array = f->v,
        .k_scales_array = f->k_scales,
        .v_scales_array = f->v_scales,
        .desc = &f->desc,
    };
    return folioi_struct_out(view, &v, sizeof v, "folio_kv_cache_view");
}
