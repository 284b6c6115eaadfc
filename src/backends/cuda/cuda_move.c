/* cuda_move.c: arguments of the moving calls brought to the device, and their kernels launched. */
#include "backends/cuda/cuda_backend.h"

#include <string.h>

folioi_cuda_side folioi_cuda_side_of(const folioi_kv_layer *layer, folioi_part part, float scale)
{
    folioi_kv_side s = kv_side(layer, part);
    return (folioi_cuda_side){s.base, s.scales, *s.at, *s.scales_at, scale};
}

static folioi_cuda_move move_of(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                                folioi_part part, const int64_t *slots, int64_t num_slots)
{
    const folio_kv_cache_desc *d = &layer->format->desc;
    bool v = part == FOLIOI_V;
    return (folioi_cuda_move){
        .rows = rows_of(v ? &t->v : &t->k),
        .rows_dtype = v ? t->v.dtype : t->k.dtype,
        .dtype = d->dtype,
        .side = folioi_cuda_side_of(layer, part, v ? t->v_scale : t->k_scale),
        .num_heads = d->num_kv_heads,
        .dims = v ? d->v_head_size : d->k_head_size,
        .block_size = d->block_size,
        .slots = slots,
        .num_slots = num_slots,
    };
}

folio_status folioi_cuda_store(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                               const int64_t *slots, int64_t num_slots, cudaStream_t stream)
{
    for (folioi_part part = FOLIOI_K; part <= FOLIOI_V; part++) {
        folioi_cuda_move m = move_of(layer, t, part, slots, num_slots);
        TRY_CUDA(folioi_cuda_store_rows(&m, stream), "kernel store_rows");
    }
    return FOLIO_OK;
}

static folio_status gather(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                           const int64_t *slots, int64_t num_slots, cudaStream_t stream)
{
    for (folioi_part part = FOLIOI_K; part <= FOLIOI_V; part++) {
        if ((part == FOLIOI_K ? t->k.data : t->v.data) == NULL) continue;
        folioi_cuda_move m = move_of(layer, t, part, slots, num_slots);
        TRY_CUDA(folioi_cuda_gather_rows(&m, stream), "kernel gather_rows");
    }
    return FOLIO_OK;
}

/* One of the two above with slots that are still on the host. */
typedef folio_status move_fn(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                             const int64_t *slots, int64_t num_slots, cudaStream_t stream);

static folio_status with_slots(move_fn *move, const folio_context *ctx,
                               const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                               const int64_t *slots, int64_t num_slots, cudaStream_t stream)
{
    int before;
    void *on_device;
    if (num_slots == 0) return FOLIO_OK;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status =
        folioi_cuda_upload(slots, (size_t)num_slots * sizeof *slots, stream, &on_device);
    if (status == FOLIO_OK) {
        status = move(layer, t, on_device, num_slots, stream);
        (void)cudaFreeAsync(on_device, stream);
    }
    folioi_cuda_leave(ctx, before);
    return status;
}

folio_status folioi_cuda_write(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               void *stream)
{
    return with_slots(folioi_cuda_store, ctx, layer, t, slots, num_slots, stream);
}

folio_status folioi_cuda_gather(const folio_context *ctx, const folioi_kv_layer *layer,
                                const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                                void *stream)
{
    return with_slots(gather, ctx, layer, t, slots, num_slots, stream);
}

/* On the device: the pairs, then for K and for V the bases of all layers from, to, and of their scales. */
static folio_status move_sides(const folioi_kv_layer *from, const folioi_kv_layer *to,
                               int32_t num_layers, const char *on_device, int64_t num_pairs,
                               cudaStream_t stream)
{
    const folio_kv_cache_desc *d = &from->format->desc;
    const char *bases = on_device + (size_t)num_pairs * 2 * sizeof(int64_t);
    for (folioi_part part = FOLIOI_K; part <= FOLIOI_V; part++) {
        const char *side = bases + (size_t)part * 4 * (size_t)num_layers * sizeof(void *);
        size_t row = (size_t)num_layers * sizeof(void *);
        folioi_cuda_pair p = {
            .from = folioi_cuda_side_of(from, part, 1.0f),
            .to = folioi_cuda_side_of(to, part, 1.0f),
            .dtype = d->dtype,
            .num_heads = d->num_kv_heads,
            .dims = part == FOLIOI_K ? d->k_head_size : d->v_head_size,
            .block_size = d->block_size,
            .num_layers = num_layers,
            .from_bases = (const char *const *)(const void *)side,
            .to_bases = (char *const *)(const void *)(side + row),
            .from_scales = (const float *const *)(const void *)(side + 2 * row),
            .to_scales = (float *const *)(const void *)(side + 3 * row),
            .pairs = (const int64_t *)(const void *)on_device,
            .num_pairs = num_pairs,
        };
        TRY_CUDA(folioi_cuda_move_blocks(&p, stream), "kernel move_blocks");
    }
    return FOLIO_OK;
}

folio_status folioi_cuda_move_pairs(const folio_context *ctx, const folioi_kv_layer *from,
                                    const folioi_kv_layer *to, int32_t num_layers,
                                    const int64_t (*pairs)[2], int64_t num_pairs, void *stream)
{
    if (num_pairs == 0) return FOLIO_OK;
    int64_t pair_bytes = num_pairs * 2 * (int64_t)sizeof(int64_t);
    int64_t bytes = pair_bytes + 8 * num_layers * (int64_t)sizeof(void *);
    void *args, *on_device;
    int before;
    TRY(folioi_core->alloc(&ctx->allocator, bytes, "pairs of blocks", &args));
    memcpy(args, pairs, (size_t)pair_bytes);
    void **base = (void **)(void *)((char *)args + pair_bytes);
    for (folioi_part part = FOLIOI_K; part <= FOLIOI_V; part++)
        for (int32_t l = 0; l < num_layers; l++) {
            folioi_kv_side f = kv_side(&from[l], part), t = kv_side(&to[l], part);
            void *const four[4] = {f.base, t.base, f.scales, t.scales};
            for (int i = 0; i < 4; i++) base[(part * 4 + i) * num_layers + l] = four[i];
        }
    folio_status status = folioi_cuda_enter(ctx, &before);
    if (status == FOLIO_OK) {
        status = folioi_cuda_upload(args, (size_t)bytes, stream, &on_device);
        if (status == FOLIO_OK) {
            status = move_sides(from, to, num_layers, on_device, num_pairs, stream);
            (void)cudaFreeAsync(on_device, stream);
        }
        folioi_cuda_leave(ctx, before);
    }
    folioi_core->free(&ctx->allocator, args, bytes);
    return status;
}

static folioi_cuda_part part_of(const folio_merge *m, const folio_state *s)
{
    int64_t head = s->out.head_stride != 0 ? s->out.head_stride : m->head_size;
    int64_t token = s->out.token_stride != 0 ? s->out.token_stride : m->num_heads * head;
    return (folioi_cuda_part){
        .out = {s->out.data, token, head},
        .dtype = s->out.dtype,
        .lse = s->lse,
        .lse_token = s->lse_token_stride != 0 ? s->lse_token_stride : m->num_heads,
        .lse_head = s->lse_head_stride != 0 ? s->lse_head_stride : 1,
    };
}

folio_status folioi_cuda_merge_parts(const folio_context *ctx, const folio_merge *merge,
                                     void *stream)
{
    int64_t bytes = merge->num_parts * (int64_t)sizeof(folioi_cuda_part);
    void *args, *on_device;
    int before;
    if (merge->out.tokens == 0) return FOLIO_OK;
    TRY(folioi_core->alloc(&ctx->allocator, bytes, "parts of a merge", &args));
    for (int64_t i = 0; i < merge->num_parts; i++)
        ((folioi_cuda_part *)args)[i] = part_of(merge, &merge->parts[i]);
    folio_status status = folioi_cuda_enter(ctx, &before);
    if (status == FOLIO_OK) {
        status = folioi_cuda_upload(args, (size_t)bytes, stream, &on_device);
        if (status == FOLIO_OK) {
            folioi_cuda_merge m = {
                .parts = on_device,
                .num_parts = merge->num_parts,
                .num_rows = merge->out.tokens,
                .num_heads = merge->num_heads,
                .dims = merge->head_size,
                .out = {rows_of(&merge->out), merge->out.dtype, merge->lse, merge->lse_token_stride,
                        merge->lse_head_stride},
            };
            status =
                folioi_cuda_status(folioi_cuda_merge_states(&m, stream), "kernel merge_states");
            (void)cudaFreeAsync(on_device, stream);
        }
        folioi_cuda_leave(ctx, before);
    }
    folioi_core->free(&ctx->allocator, args, bytes);
    return status;
}
