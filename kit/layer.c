/* layer.c: see layer.h. */
#include "kit/layer.h"

static folio_status make_attention(kit_layer *l, const kit_layer_desc *d, folio_dtype dtype)
{
    return folio_attention_create(
        l->ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = d->num_heads,
                    .num_kv_heads = d->num_kv_heads, .k_head_size = d->k_head_size,
                    .v_head_size = d->v_head_size, .dtype = dtype, .kv_dtype = d->kv_dtype,
                    .soft_cap = d->soft_cap, .windowed = d->window > 0,
                    .window_left = d->window > 0 ? d->window - 1 : 0, .v_in_k = d->v_in_k),
        &l->attention);
}

static folio_status make_cache(kit_layer *l, const kit_layer_desc *d, folio_dtype dtype)
{
    return folio_kv_cache_create(
        l->ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = d->num_blocks,
                    .num_layers = d->num_layers ? d->num_layers : 1, .block_size = d->block_size,
                    .num_kv_heads = d->num_kv_heads ? d->num_kv_heads : d->num_heads,
                    .k_head_size = d->k_head_size, .v_head_size = d->v_head_size,
                    .dtype = d->kv_dtype ? d->kv_dtype : dtype, .layout = d->layout,
                    .v_in_k = d->v_in_k),
        &l->cache);
}

folio_status kit_layer_open(folio_context *ctx, kit_layer *l, const kit_layer_desc *d)
{
    folio_dtype dtype = d->dtype ? d->dtype : FOLIO_F32;
    int64_t rows = d->max_query_tokens ? d->max_query_tokens : d->max_seq_len;
    folio_status status = FOLIO_OK;
    l->ctx = ctx;
    if (l->attention == NULL) status = make_attention(l, d, dtype);
    if (status == FOLIO_OK && l->cache == NULL && d->num_blocks) status = make_cache(l, d, dtype);
    folio_batch_desc b =
        FOLIO_WITH(folio_batch_desc, .block_size = d->block_size, .cache = l->cache);
    if (d->batch_blocks > 0)
        b.max_seqs = d->max_seqs, b.max_query_tokens = rows, b.max_blocks = d->batch_blocks;
    if (status == FOLIO_OK) status = folio_batch_create(ctx, &b, &l->batch);
    folio_plan_desc p =
        FOLIO_WITH(folio_plan_desc, .attentions = &l->attention,
                   .types = d->types ? &d->types : NULL, .num_attentions = 1, .cache = l->cache,
                   .max_seqs = d->max_seqs ? d->max_seqs : 1, .max_query_tokens = rows,
                   .max_seq_len = d->max_seq_len, .max_encoder_tokens = d->max_encoder_tokens,
                   .flags = d->flags, .max_query_len = d->max_query_len);
    return status == FOLIO_OK ? folio_plan_create(ctx, &p, &l->plan) : status;
}

void kit_layer_close(kit_layer *l)
{
    folio_plan_destroy(l->plan);
    folio_batch_destroy(l->batch);
    folio_kv_cache_destroy(l->cache);
    folio_attention_destroy(l->attention);
    *l = (kit_layer){.ctx = l->ctx};
}
