/* kv_cache.h: K and V of all layers: the resolved format and a base pointer per layer. */
#ifndef FOLIOI_KV_CACHE_H
#define FOLIOI_KV_CACHE_H

#include "cache/kv_layout.h"
#include "core/context.h"

struct folio_kv_cache {
    folio_context *ctx;
    folioi_kv_format format;
    folioi_kv_layer *layers; /* [num_layers] */
    int64_t layers_bytes;
    void *memory; /* NULL: the caller's */
    int64_t memory_bytes;
};

folio_status folioi_kv_cache_check_layer(const folio_kv_cache *cache, int32_t layer);

#endif
