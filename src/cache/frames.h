/*
 * frames.h: the host tier's memory: frames, each with room for one block of any group.
 *
 *   frame of group g:  [layer 0: K | V | K scales | V scales][layer 1 ...]     the payload of a frame of the store
 *
 * A KV cache per group, in the native layout, is wrapped around them with the frame as its block stride,
 * so that folio_kv_cache_copy_blocks moves blocks in and out. One frame more than asked for is the
 * mover's, for what goes straight to disk or comes from it. A device reaches them: they are pinned then.
 */
#ifndef FOLIOI_FRAMES_H
#define FOLIOI_FRAMES_H

#include "cache/store_file.h"
#include "core/context.h"

#include <folio/folio_pool.h>

#define FOLIOI_MAX_FRAME_TABLES (FOLIO_MAX_LAYER_GROUPS + 1) /* and the encoder's */

typedef struct folioi_frames {
    folio_context *ctx; /* NULL: none */
    char *memory;
    int64_t bytes, frame_bytes;
    int64_t staging; /* the number of the mover's frame */
    int32_t num_tables;
    folio_kv_cache *cache[FOLIOI_MAX_FRAME_TABLES]; /* NULL where the device has none */
    folioi_frame_geometry geometry[FOLIOI_MAX_FRAME_TABLES];
} folioi_frames;

/** Frames for blocks of these caches. On failure the caller frees. */
folio_status folioi_frames_init(folioi_frames *f, folio_context *ctx, folio_kv_cache *const *caches,
                                int32_t num_tables, int64_t num_blocks);
void folioi_frames_free(folioi_frames *f);

/** Zeros to what the first `tokens` tokens of a frame do not fill: no other bytes go to the store. */
void folioi_frames_clear_rest(const folioi_frames *f, int32_t table, int64_t frame, int32_t tokens);

static inline char *frames_at(const folioi_frames *f, int64_t i)
{
    return f->memory + i * f->frame_bytes;
}

#endif
