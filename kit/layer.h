/*
 * layer.h: one layer made runnable by a short description: attention, cache, batch and plan, for
 * programs and tests that bring their own numbers.
 */
#ifndef FOLIO_KIT_LAYER_H
#define FOLIO_KIT_LAYER_H

#include <folio/folio.h>
#include <stdbool.h>

/* Fields as in the public structs; what is left 0 has their default, or the one named here. */
typedef struct kit_layer_desc {
    int32_t num_heads, num_kv_heads, k_head_size, v_head_size;
    folio_dtype dtype; /* 0: F32 */
    folio_dtype kv_dtype;
    int64_t window; /* tokens a row sees, its own included; 0: all */
    float soft_cap;
    int64_t num_blocks;             /* 0: no cache, unless *layer has one already */
    int32_t block_size, num_layers; /* num_layers 0: 1 */
    folio_layout layout;
    bool v_in_k;
    uint32_t types;           /* of the plan; 0: DECODER */
    int64_t max_seqs;         /* 0: 1 */
    int64_t max_query_tokens; /* 0: max_seq_len */
    int64_t max_seq_len, max_encoder_tokens, max_query_len;
    uint32_t flags;       /* of the plan */
    int64_t batch_blocks; /* > 0: the batch has room for its limits and so many blocks, no more */
} kit_layer_desc;

typedef struct kit_layer {
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
} kit_layer;

/*
 * Begins with a layer of zeros; an attention or a cache that it has already is taken instead of made.
 * Returns the first failure; kit_layer_close is due all the same. The fields come last:
 * KIT_LAYER_OPEN(ctx, &layer, .num_heads = 4, ...)
 */
folio_status kit_layer_open(folio_context *ctx, kit_layer *layer, const kit_layer_desc *desc);
#define KIT_LAYER_OPEN(ctx, layer, ...) kit_layer_open(ctx, layer, &(kit_layer_desc){__VA_ARGS__})
/* Destroys all but the context. */
void kit_layer_close(kit_layer *layer);

#endif
