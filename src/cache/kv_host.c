/* kv_host.c: rows out of caches in host memory, and blocks between them, in any layout. */
#include "cache/kv_host.h"

#include <string.h>

static void gather_side(const folioi_kv_side *side, const folio_kv_cache_desc *d,
                        const folio_tensor *t, const int64_t *slots, const float *each, float all)
{
    for (int64_t i = 0; i < t->tokens; i++) {
        bool empty = slots[i] < 0;
        int64_t block = empty ? 0 : slots[i] / d->block_size,
                token = empty ? 0 : slots[i] % d->block_size;
        for (int32_t h = 0; h < d->num_kv_heads; h++) {
            int64_t to = i * t->token_stride + h * t->head_stride;
            float fp8 = head_scale(each, all, h);
            float scale = empty ? 0.0f : kv_scale(side, block, h, token, fp8);
            int64_t first = address_token(side->at, block, h, token);
            for (int32_t k = 0; k < side->dims; k++) {
                int64_t from = first + address_dim(side->at, token, k);
                store_f32(t->data, t->dtype, to + k,
                          empty ? 0.0f : load_f32(side->base, side->dtype, from) * scale);
            }
        }
    }
}

folio_status folioi_host_gather(const folio_context *ctx, const folioi_kv_layer *layer,
                                const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                                void *stream)
{
    (void)ctx, (void)num_slots, (void)stream;
    const folio_kv_cache_desc *d = &layer->format->desc;
    folioi_kv_side k = kv_side(layer, FOLIOI_K), v = kv_side(layer, FOLIOI_V);
    if (t->k.data != NULL) gather_side(&k, d, &t->k, slots, t->k_head_scales, t->k_scale);
    if (t->v.data != NULL) gather_side(&v, d, &t->v, slots, t->v_head_scales, t->v_scale);
    return FOLIO_OK;
}

/* The numbers of one head of a block, to another place in any layout. */
static void move_head(const folioi_kv_side *to, int64_t to_block, const folioi_kv_side *from,
                      int64_t from_block, int32_t head, int32_t tokens)
{
    size_t elem = folio_dtype_size(to->dtype);
    int32_t run = address_same_order(to->at, from->at) ? address_run(to->at, tokens, to->dims) : 0;
    for (int32_t t = 0; run > 0 && t < tokens; t += run)
        memcpy(to->base + address_token(to->at, to_block, head, t) * (int64_t)elem,
               from->base + address_token(from->at, from_block, head, t) * (int64_t)elem,
               (size_t)run * (size_t)to->dims * elem);
    if (run > 0) return;
    bool rows = address_has_rows(to->at) && address_has_rows(from->at);
    for (int32_t t = 0; t < tokens; t++) {
        char *t0 = to->base + address_token(to->at, to_block, head, t) * (int64_t)elem;
        const char *f0 = from->base + address_token(from->at, from_block, head, t) * (int64_t)elem;
        if (rows) memcpy(t0, f0, (size_t)to->dims * elem);
        for (int32_t i = 0; !rows && i < to->dims; i++)
            memcpy(t0 + address_dim(to->at, t, i) * (int64_t)elem,
                   f0 + address_dim(from->at, t, i) * (int64_t)elem, elem);
    }
}

/* One block of K or V as stored. */
static void move_side(const folio_kv_cache_desc *d, const folioi_kv_side *to, int64_t to_block,
                      const folioi_kv_side *from, int64_t from_block)
{
    for (int32_t h = 0; h < d->num_kv_heads; h++) {
        move_head(to, to_block, from, from_block, h, d->block_size);
        for (int32_t t = 0; to->scales != NULL && t < d->block_size; t++)
            to->scales[address_token(to->scales_at, to_block, h, t)] =
                from->scales[address_token(from->scales_at, from_block, h, t)];
    }
}

static void move_block(const folioi_kv_layer *to, int64_t to_block, const folioi_kv_layer *from,
                       int64_t from_block)
{
    for (folioi_k_or_v which = FOLIOI_K; which <= kv_last(to->format); which++) {
        folioi_kv_side t = kv_side(to, which), f = kv_side(from, which);
        move_side(&to->format->desc, &t, to_block, &f, from_block);
    }
}

folio_status folioi_host_move_blocks(const folio_context *ctx, const folioi_kv_layer *from,
                                     const folioi_kv_layer *to, int32_t num_layers,
                                     const folio_block_pair *pairs, int64_t num_pairs, void *stream)
{
    (void)ctx, (void)stream;
    for (int32_t l = 0; l < num_layers; l++)
        for (int64_t i = 0; i < num_pairs; i++)
            move_block(&to[l], pairs[i].to, &from[l], pairs[i].from);
    return FOLIO_OK;
}
