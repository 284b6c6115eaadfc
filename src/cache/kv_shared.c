/*
 * kv_shared.c: caches over memory in frames. A frame has room for one block of any of them:
 *
 *   frame of a cache:  [layer 0: K | V | K scales | V scales][layer 1 ...]     with v_in_k K's alone
 *
 * The host tier's frames are such memory, and so are caches that share one, both in the native layout; and what
 * exports pass through, in any.
 */
#include "cache/kv_cache.h"
#include "core/touch.h"

#include <folio/folio_pool.h>
#include <string.h>

folio_status folioi_kv_block_format(const folio_kv_cache_desc *desc, folio_layout layout,
                                    bool on_device, folioi_kv_format *one)
{
    folio_kv_cache_desc d = *desc;
    d.num_blocks = 1;
    d.layout = layout;
    return folioi_kv_format_init(&d, on_device, one);
}

folio_status folioi_kv_wrap_frames(folio_context *ctx, const folioi_kv_format *one,
                                   const folioi_kv_frame_memory *frames, folio_kv_cache **out)
{
    int32_t layers = one->desc.num_layers;
    folioi_array pointers = {NULL, 0};
    TRY(folioi_array_reserve(&ctx->allocator, &pointers, 4 * layers * (int64_t)sizeof(void *),
                             "a cache's layers"));
    void **k = pointers.data, **v = k + layers;
    float **k_scales = (float **)v + layers, **v_scales = k_scales + layers;
    for (int32_t l = 0; l < layers; l++) {
        char *base = frames->memory + l * one->layer_bytes;
        k[l] = base;
        v[l] = base + one->v.offset_bytes;
        k_scales[l] = (float *)(void *)(base + one->k_scales.offset_bytes);
        v_scales[l] = (float *)(void *)(base + one->v_scales.offset_bytes);
    }
    folio_kv_cache_desc d = one->desc;
    d.struct_size = sizeof d;
    d.num_blocks = frames->num;
    /* from the last layer's base to the end */
    size_t bytes = (size_t)(frames->num * frames->frame_bytes - (layers - 1) * one->layer_bytes);
    folio_kv_memory m = {.struct_size = sizeof m, .k = k, .k_bytes = bytes};
    m.k_strides.block = frames->frame_bytes / (int64_t)folio_dtype_size(d.dtype);
    if (d.layout != FOLIO_LAYOUT_NATIVE && !d.v_in_k) {
        m.v = v;
        m.v_bytes = bytes - (size_t)one->v.offset_bytes;
        m.v_strides = m.k_strides;
    }
    if (d.dtype == FOLIO_INT8) {
        folio_kv_strides s = {frames->frame_bytes / 4, 1, d.block_size};
        m.k_scales = k_scales;
        m.v_scales = d.v_in_k ? NULL : v_scales;
        m.k_scales_strides = m.v_scales_strides = s;
        m.k_scales_bytes = bytes - (size_t)one->k_scales.offset_bytes;
        m.v_scales_bytes = bytes - (size_t)one->v_scales.offset_bytes;
    }
    folio_status status = folio_kv_cache_wrap(ctx, &d, &m, out);
    folioi_array_free(&ctx->allocator, &pointers);
    return status;
}

static void clear_tokens(const folioi_kv_side *side, int32_t heads, int32_t first, int32_t end)
{
    size_t elem = folio_dtype_size(side->dtype);
    for (int32_t h = 0; h < heads; h++)
        for (int32_t t = first; t < end; t++) {
            int64_t at = address_token(side->at, 0, h, t);
            for (int32_t d = 0; d < side->dims; d++)
                memset(side->base + (at + address_dim(side->at, t, d)) * (int64_t)elem, 0, elem);
            if (side->scales != NULL) side->scales[address_token(side->scales_at, 0, h, t)] = 0;
        }
}

/* What lies between and behind the arrays of a layer. */
static void clear_gaps(const folioi_kv_format *one, char *base)
{
    const folio_kv_array *const scales[] = {&one->k_scales, &one->v_scales};
    int64_t end = max_i64(one->k.bytes, one->v.offset_bytes + one->v.bytes);
    for (int i = 0; i < 2; i++) {
        if (scales[i]->num_dims == 0) continue;
        memset(base + end, 0, (size_t)(scales[i]->offset_bytes - end));
        end = scales[i]->offset_bytes + scales[i]->bytes;
    }
    memset(base + end, 0, (size_t)(one->layer_bytes - end));
}

void folioi_kv_clear_rest(const folioi_kv_format *one, char *frame, int32_t tokens)
{
    const folio_kv_cache_desc *d = &one->desc;
    for (int32_t l = 0; l < d->num_layers; l++) {
        char *base = frame + l * one->layer_bytes;
        folioi_kv_layer layer = kv_layer_at(one, base);
        clear_gaps(one, base);
        for (folioi_k_or_v which = FOLIOI_K; which <= kv_last(one); which++) {
            folioi_kv_side side = kv_side(&layer, which);
            clear_tokens(&side, d->num_kv_heads, tokens, d->block_size);
        }
    }
}

/* ------------------------------------------------------------------------------- one memory */

/* Room for a block of cache i. */
static folio_status add_format(folio_context *ctx, const folio_kv_cache_desc *const *descs,
                               int32_t i, folioi_kv_format *one, folioi_kv_frame_memory *frames)
{
    REQUIRE(descs[i] != NULL, "shared caches: descs[%d] is NULL", i);
    bool on_device = ctx->backend->on_device;
    folioi_kv_format whole;
    TRY(folioi_kv_format_init(descs[i], on_device, &whole));
    const folio_kv_cache_desc *d = &whole.desc;
    REQUIRE(d->layout == FOLIO_LAYOUT_NATIVE, "shared caches: layout %s of descs[%d] is not native",
            folio_layout_name(d->layout), i);
    TRY(folioi_kv_block_format(d, FOLIO_LAYOUT_NATIVE, on_device, one));
    if (i == 0) frames->num = d->num_blocks;
    REQUIRE(d->num_blocks == frames->num,
            "shared caches: descs[%d] has %lld blocks, descs[0] has %lld", i,
            (long long)d->num_blocks, (long long)frames->num);
    int64_t bytes = one->layer_bytes * d->num_layers, all;
    if (bytes > frames->frame_bytes) frames->frame_bytes = bytes;
    REQUIRE(
        checked_mul(frames->num, frames->frame_bytes, &all) && all <= INT64_MAX / 2,
        "shared caches: %lld blocks of %lld bytes exceed the largest size this library can address",
        (long long)frames->num, (long long)frames->frame_bytes);
    return FOLIO_OK;
}

/* The first cache has the memory; the others keep the first one alive. */
static folio_status make_caches(folio_context *ctx, const folioi_kv_format *one, int32_t num_caches,
                                folioi_kv_frame_memory *frames, folio_kv_cache **caches)
{
    int64_t bytes = frames->num * frames->frame_bytes;
    void *memory;
    TRY(folioi_kv_memory_alloc(ctx, bytes, &memory));
    frames->memory = memory;
    folio_status status = folioi_kv_wrap_frames(ctx, &one[0], frames, &caches[0]);
    if (status != FOLIO_OK) {
        folioi_kv_memory_free(ctx, memory, bytes);
        return status;
    }
    caches[0]->memory = memory;
    caches[0]->memory_bytes = bytes;
    for (int32_t i = 1; i < num_caches; i++) {
        TRY(folioi_kv_wrap_frames(ctx, &one[i], frames, &caches[i]));
        caches[i]->holder = caches[0];
        refs_retain(&caches[0]->refs);
    }
    return FOLIO_OK;
}

folio_status folio_kv_cache_create_shared(folio_context *ctx,
                                          const folio_kv_cache_desc *const *descs,
                                          int32_t num_caches, folio_kv_cache **caches)
{
    enum { MOST = FOLIO_MAX_LAYER_GROUPS + 1 }; /* and the encoder's */
    REQUIRE(caches != NULL, "folio_kv_cache_create_shared: caches is NULL");
    REQUIRE(num_caches >= 1 && num_caches <= MOST,
            "shared caches: num_caches is %d, outside [1, %d]", num_caches, MOST);
    for (int32_t i = 0; i < num_caches; i++) caches[i] = NULL;
    REQUIRE(ctx != NULL, "folio_kv_cache_create_shared: ctx is NULL");
    REQUIRE(descs != NULL, "shared caches: descs is NULL");
    folioi_kv_format one[MOST];
    folioi_kv_frame_memory frames = {NULL, 0, 0};
    for (int32_t i = 0; i < num_caches; i++) TRY(add_format(ctx, descs, i, &one[i], &frames));
    folio_status status = make_caches(ctx, one, num_caches, &frames, caches);
    for (int32_t i = num_caches - 1; i >= 0 && status != FOLIO_OK; i--) {
        folio_kv_cache_destroy(caches[i]);
        caches[i] = NULL;
    }
    return status;
}
