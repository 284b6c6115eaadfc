/* frames.c: the host tier's memory, and the caches wrapped around it. */
#include "cache/frames.h"

#include "cache/kv_cache.h"

folio_status folioi_frames_init(folioi_frames *f, folio_context *ctx, folio_kv_cache *const *caches,
                                int32_t num_tables, int64_t num_blocks)
{
    folioi_kv_format one[FOLIOI_MAX_FRAME_TABLES];
    *f = (folioi_frames){.ctx = ctx, .num_tables = num_tables, .staging = num_blocks};
    for (int32_t t = 0; t < num_tables; t++) {
        if (caches[t] == NULL) continue;
        TRY(folioi_kv_block_format(&caches[t]->format.desc, FOLIO_LAYOUT_NATIVE,
                                   caches[t]->format.on_device, &one[t]));
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

void folioi_frames_clear_rest(const folioi_frames *f, int32_t table, int64_t frame, int32_t tokens)
{
    const folioi_kv_format *all = &f->cache[table]->format;
    folioi_kv_format one;
    if (folioi_kv_block_format(&all->desc, FOLIO_LAYOUT_NATIVE, all->on_device, &one) != FOLIO_OK)
        return; /* it went well before */
    folioi_kv_clear_rest(&one, frames_at(f, frame), tokens);
}
