/* frames.c: the host tier's memory, and the caches wrapped around it. */
#include "cache/frames.h"

#include "backend.h"
#include "cache/kv_cache.h"

#include <string.h>

/* One block of one layer in the native layout. */
static folio_status one_block(const folio_kv_cache *cache, folioi_kv_format *format)
{
    folio_kv_cache_desc d = cache->format.desc;
    d.num_blocks = 1;
    d.layout = FOLIO_LAYOUT_NATIVE;
    return folioi_kv_format_init(&d, cache->format.rows, format);
}

static folioi_frame_geometry describe(const folioi_kv_format *f)
{
    const folio_kv_cache_desc *d = &f->desc;
    folioi_frame_geometry g = {.num_layers = d->num_layers,
                               .block_size = d->block_size,
                               .num_kv_heads = d->num_kv_heads,
                               .k_head_size = d->k_head_size,
                               .v_head_size = d->v_head_size,
                               .dtype = (int32_t)d->dtype,
                               .layout_version = FOLIOI_LAYOUT_VERSION,
                               .payload_bytes = f->layer_bytes * d->num_layers};
    strncpy(g.layout_id, folioi_layout_id(f), sizeof g.layout_id - 1);
    return g;
}

static folio_status wrap(folioi_frames *f, int32_t table, const folioi_kv_format *one,
                         int64_t num_frames)
{
    int32_t layers = one->desc.num_layers;
    folioi_array pointers = {NULL, 0};
    TRY(folioi_array_reserve(&f->ctx->allocator, &pointers, 3 * layers * (int64_t)sizeof(void *),
                             "the host tier's layers"));
    void **k = pointers.data;
    float **k_scales = (float **)k + layers, **v_scales = k_scales + layers;
    for (int32_t l = 0; l < layers; l++) {
        char *base = f->memory + l * one->layer_bytes;
        k[l] = base;
        k_scales[l] = (float *)(void *)(base + one->k_scales.offset_bytes);
        v_scales[l] = (float *)(void *)(base + one->v_scales.offset_bytes);
    }
    folio_kv_cache_desc d = one->desc;
    d.struct_size = sizeof d;
    d.num_blocks = num_frames;
    /* from the last layer's base to the end */
    size_t bytes = (size_t)(f->bytes - (layers - 1) * one->layer_bytes);
    folio_kv_memory m = {.struct_size = sizeof m, .k = k, .k_bytes = bytes};
    m.k_strides.block = f->frame_bytes / (int64_t)folio_dtype_size(d.dtype);
    if (d.dtype == FOLIO_INT8) {
        folio_kv_strides s = {f->frame_bytes / 4, 1, d.block_size};
        m.k_scales = k_scales;
        m.v_scales = v_scales;
        m.k_scales_strides = m.v_scales_strides = s;
        m.k_scales_bytes = bytes - (size_t)one->k_scales.offset_bytes;
        m.v_scales_bytes = bytes - (size_t)one->v_scales.offset_bytes;
    }
    folio_status status = folio_kv_cache_wrap(f->ctx, &d, &m, &f->cache[table]);
    folioi_array_free(&f->ctx->allocator, &pointers);
    return status;
}

folio_status folioi_frames_init(folioi_frames *f, folio_context *ctx, folio_kv_cache *const *caches,
                                int32_t num_tables, int64_t num_blocks)
{
    folioi_kv_format one[FOLIOI_MAX_FRAME_TABLES];
    *f = (folioi_frames){.ctx = ctx, .num_tables = num_tables, .staging = num_blocks};
    for (int32_t t = 0; t < num_tables; t++) {
        if (caches[t] == NULL) continue;
        TRY(one_block(caches[t], &one[t]));
        f->geometry[t] = describe(&one[t]);
        f->frame_bytes = max_i64(f->frame_bytes, f->geometry[t].payload_bytes);
    }
    f->frame_bytes = round_up(f->frame_bytes, FOLIOI_ALIGN);
    REQUIRE(checked_mul(num_blocks + 1, f->frame_bytes, &f->bytes),
            "pool: %lld host blocks of %lld bytes pass the largest size", (long long)num_blocks,
            (long long)f->frame_bytes);
    /* Not zeroed: gigabytes need not be written first. */
    const folioi_device *device = ctx->backend->memory;
    void *memory;
    TRY(device != NULL
            ? device->alloc(ctx, FOLIO_MEMORY_HOST, (size_t)f->bytes, "the host tier", &memory)
            : folioi_alloc_untouched(&ctx->allocator, f->bytes, "the host tier", &memory));
    f->memory = memory;
    for (int32_t t = 0; t < num_tables; t++)
        if (caches[t] != NULL) TRY(wrap(f, t, &one[t], num_blocks + 1));
    return FOLIO_OK;
}

void folioi_frames_free(folioi_frames *f)
{
    if (f->ctx == NULL) return;
    for (int32_t t = 0; t < f->num_tables; t++) folio_kv_cache_destroy(f->cache[t]);
    const folioi_device *device = f->ctx->backend->memory;
    if (device != NULL) device->free(f->ctx, FOLIO_MEMORY_HOST, f->memory);
    else folioi_free(&f->ctx->allocator, f->memory, f->bytes);
}
