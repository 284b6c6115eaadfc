/* frames.c: the host tier's memory, and the caches wrapped around it. */
#include "cache/frames.h"

#include "cache/kv_cache.h"

#include <string.h>

folio_status folioi_frames_init(folioi_frames *f, folio_context *ctx, folio_kv_cache *const *caches,
                                int32_t num_tables, int64_t num_blocks)
{
    folioi_kv_format one[FOLIOI_MAX_FRAME_TABLES];
    *f = (folioi_frames){.ctx = ctx, .num_tables = num_tables, .staging = num_blocks};
    for (int32_t t = 0; t < num_tables; t++) {
        if (caches[t] == NULL) continue;
        TRY(folioi_kv_frame_format(&caches[t]->format.desc, caches[t]->format.on_device, &one[t]));
        f->geometry[t] = folioi_geometry_of(&one[t]);
        f->frame_bytes = max_i64(f->frame_bytes, f->geometry[t].payload_bytes);
    }
    f->frame_bytes = round_up(f->frame_bytes, FOLIOI_ALIGN);
    REQUIRE(checked_mul(num_blocks + 1, f->frame_bytes, &f->bytes),
            "pool: %lld host blocks of %lld bytes exceed the largest size", (long long)num_blocks,
            (long long)f->frame_bytes);
    void *memory;
    TRY(ctx->backend->alloc(ctx, FOLIO_MEMORY_HOST, (size_t)f->bytes, "the host tier", &memory));
    f->memory = memory;
    const folioi_kv_frame_memory all = {f->memory, num_blocks + 1, f->frame_bytes};
    for (int32_t t = 0; t < num_tables; t++)
        if (caches[t] != NULL) TRY(folioi_kv_wrap_frames(ctx, &one[t], &all, &f->cache[t]));
    return FOLIO_OK;
}

void folioi_frames_free(folioi_frames *f)
{
    if (f->ctx == NULL) return;
    for (int32_t t = 0; t < f->num_tables; t++) folio_kv_cache_destroy(f->cache[t]);
    f->ctx->backend->free(f->ctx, FOLIO_MEMORY_HOST, f->memory, (size_t)f->bytes);
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

void folioi_frames_clear_rest(const folioi_frames *f, int32_t table, int64_t frame, int32_t tokens)
{
    const folioi_kv_format *all = &f->cache[table]->format;
    const folio_kv_cache_desc *d = &all->desc;
    folioi_kv_format one;
    if (folioi_kv_frame_format(d, all->on_device, &one) != FOLIO_OK)
        return; /* it went well before */
    for (int32_t l = 0; l < d->num_layers; l++) {
        char *base = frames_at(f, frame) + l * one.layer_bytes;
        folioi_kv_layer layer = kv_layer_at(&one, base);
        clear_gaps(&one, base);
        for (folioi_k_or_v which = FOLIOI_K; which <= kv_last(&one); which++) {
            folioi_kv_side side = kv_side(&layer, which);
            clear_tokens(&side, d->num_kv_heads, tokens, d->block_size);
        }
    }
}
