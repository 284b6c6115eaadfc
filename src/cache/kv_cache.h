/* kv_cache.h: K and V of all layers: the resolved format and a base pointer per layer. */
#ifndef FOLIOI_KV_CACHE_H
#define FOLIOI_KV_CACHE_H

#include "cache/kv_layout.h"
#include "core/context.h"
#include "core/refs.h"
#include "core/tensor.h"

struct folio_kv_cache {
    folioi_refs refs;
    folio_context *ctx;
    folioi_kv_format format;
    folioi_kv_layer *layers; /* [num_layers] */
    int64_t layers_bytes;
    void *memory; /* NULL: the caller's, or its holder's */
    int64_t memory_bytes;
    folio_kv_cache *holder; /* of memory that it shares; NULL */
    uintptr_t first, end;   /* all bytes of all layers lie in [first, end) */
};

/** The n places, counted from first to last byte, share none with a layer of the cache. */
folio_status folioi_kv_cache_check_apart(const folio_kv_cache *cache, const folioi_place *places,
                                         int n);

folio_status folioi_kv_cache_check_layer(const folio_kv_cache *cache, int32_t layer);

/** As folio_kv_cache_write, by a caller who knows that no slot stands twice: that is not checked. */
folio_status folioi_kv_cache_write_distinct(folio_kv_cache *cache, int32_t layer,
                                            const folio_kv_write *write, const folio_run *run);

/** A cache's memory, the device's if there is one. Not zeroed: slots hold anything. */
folio_status folioi_kv_memory_alloc(folio_context *ctx, int64_t bytes, void **out);
void folioi_kv_memory_free(folio_context *ctx, void *memory, int64_t bytes);

/** Memory in frames, each with room for one block of a cache in all its layers: kv_shared.c. */
typedef struct folioi_kv_frame_memory {
    char *memory;
    int64_t num, frame_bytes;
} folioi_kv_frame_memory;

/** One block of such a cache in any layout but STRIDED; frames have NATIVE. */
folio_status folioi_kv_block_format(const folio_kv_cache_desc *desc, folio_layout layout,
                                    bool on_device, folioi_kv_format *one);
/** A cache around them, as many blocks as frames. */
folio_status folioi_kv_wrap_frames(folio_context *ctx, const folioi_kv_format *one,
                                   const folioi_kv_frame_memory *frames, folio_kv_cache **out);
/** Zeros to what the first `tokens` tokens of a frame do not fill: no other bytes leave the process. */
void folioi_kv_clear_rest(const folioi_kv_format *one, char *frame, int32_t tokens);

/** Blocks of a call: each in [0, num_blocks), none twice (unless `repeats`). */
folio_status folioi_kv_check_blocks(const folio_kv_cache *cache, const int64_t *blocks, int64_t n,
                                    bool repeats);

#endif
