/* cuda_move.c: copies the arguments of calls that move K and V to the device, and launches their kernels. */
#include "backends/cuda/host/cuda_backend.h"

#include <string.h>

folioi_cuda_side folioi_cuda_side_of(const folioi_kv_layer *layer, folioi_k_or_v which, float scale,
                                     const float *head_scales)
{
    folioi_kv_side s = kv_side(layer, which);
    return (folioi_cuda_side){s.base, s.scales, *s.at, *s.scales_at, scale, head_scales};
}

/* Are rows of both at multiples of 16 bytes, and the same numbers? */
static bool is_copy(const folioi_cuda_move *m)
{
    int64_t elem = m->dtype == FOLIO_F32 ? 4 : 2;
    const folioi_address *at = &m->side.at;
    int64_t all =
        (int64_t)(uintptr_t)m->rows.data | (int64_t)(uintptr_t)m->side.base |
        (m->rows.token | m->rows.head | at->block | at->head | at->token_tile_stride | m->dims) *
            elem;
    bool in_order = folioi_cuda_has_rows(&m->side) || folioi_cuda_has_pages(&m->side);
    return m->rows_dtype == m->dtype && in_order && all % 16 == 0;
}

static folioi_cuda_moves moves_of(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                                  const int64_t *slots, int64_t num_slots)
{
    const folio_kv_cache_desc *d = &layer->format->desc;
    folioi_cuda_moves moves = {.slots = slots, .num_slots = num_slots};
    for (folioi_k_or_v which = FOLIOI_K; which <= FOLIOI_V; which++) {
        bool v = which == FOLIOI_V;
        folioi_cuda_move *m = &moves.kv[which - FOLIOI_K];
        *m = (folioi_cuda_move){
            .rows = rows_of(v ? &t->v : &t->k),
            .rows_dtype = v ? t->v.dtype : t->k.dtype,
            .dtype = d->dtype,
            .side = folioi_cuda_side_of(layer, which, v ? t->v_scale : t->k_scale,
                                        v ? t->v_head_scales : t->k_head_scales),
            .num_heads = d->num_kv_heads,
            .dims = v ? d->v_head_size : d->k_head_size,
            .block_size = d->block_size,
        };
        bool rotates = !v && t->rotation.table != NULL;
        m->is_copy = is_copy(m) && (!rotates || folioi_cuda_rotates_pieces(&t->rotation, d->dtype));
    }
    return moves;
}

folio_status folioi_cuda_store(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               const folioi_cuda_rotations *rotations,
                               const folioi_cuda_noting *noting, cudaStream_t stream)
{
    folioi_cuda_moves moves = moves_of(layer, t, slots, num_slots);
    if (kv_last(layer->format) == FOLIOI_K) moves.kv[FOLIOI_V].rows.data = NULL;
    moves.rotations = *rotations;
    moves.overlaps = device_of(ctx)->sm.overlaps;
    return folioi_cuda_status(folioi_cuda_store_rows(&moves, noting, stream), "kernel store_rows");
}

static folio_status gather(const folio_context *ctx, const folioi_kv_layer *layer,
                           const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                           cudaStream_t stream)
{
    (void)ctx;
    folioi_cuda_moves moves = moves_of(layer, t, slots, num_slots);
    return folioi_cuda_status(folioi_cuda_gather_rows(&moves, stream), "kernel gather_rows");
}

/* Rows of a cache call: positions were brought over with the slots. */
static folio_status store(const folio_context *ctx, const folioi_kv_layer *layer,
                          const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                          cudaStream_t stream)
{
    folioi_cuda_rotations rotations = {t->rotation, t->positions, NULL, NULL};
    return folioi_cuda_store(ctx, layer, t, slots, num_slots, &rotations, NULL, stream);
}

/* One of the two above with slots, and positions, that are still on the host. */
typedef folio_status move_fn(const folio_context *ctx, const folioi_kv_layer *layer,
                             const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                             cudaStream_t stream);

static folio_status with_slots(move_fn *move, const folio_context *ctx,
                               const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                               const int64_t *slots, int64_t num_slots, cudaStream_t stream)
{
    int before;
    size_t bytes = (size_t)num_slots * sizeof *slots;
    void *on_device, *positions = NULL;
    folioi_kv_tensors there = *t;
    if (num_slots == 0) return FOLIO_OK;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status = folioi_cuda_upload(slots, bytes, stream, &on_device);
    if (status == FOLIO_OK) {
        if (t->positions != NULL)
            status = folioi_cuda_upload(t->positions, bytes, stream, &positions);
        there.positions = positions;
        if (status == FOLIO_OK) status = move(ctx, layer, &there, on_device, num_slots, stream);
        if (positions != NULL) (void)cudaFreeAsync(positions, stream);
        (void)cudaFreeAsync(on_device, stream);
    }
    folioi_cuda_leave(ctx, before);
    return status;
}

folio_status folioi_cuda_write(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               void *stream)
{
    return with_slots(store, ctx, layer, t, slots, num_slots, stream);
}

folio_status folioi_cuda_gather(const folio_context *ctx, const folioi_kv_layer *layer,
                                const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                                void *stream)
{
    return with_slots(gather, ctx, layer, t, slots, num_slots, stream);
}

static int32_t bytes_of(folio_dtype dtype)
{
    if (dtype == FOLIO_F32) return 4;
    return dtype == FOLIO_F16 || dtype == FOLIO_BF16 ? 2 : 1;
}

static int64_t base_bits(const folioi_kv_layer *from, const folioi_kv_layer *to, int32_t num_layers,
                         folioi_k_or_v which)
{
    int64_t bits = 0;
    for (int32_t l = 0; l < num_layers; l++)
        bits |= (int64_t)(uintptr_t)kv_side(&from[l], which).base |
                (int64_t)(uintptr_t)kv_side(&to[l], which).base;
    return bits;
}

static int64_t stride_bits(const folioi_address *at)
{
    return at->block | at->head | at->token_tile_stride | at->token_stride;
}

/* Pages and rows keep 16 bytes together, and may be aligned to them. */
static int32_t unit_of(const folioi_address *from, const folioi_address *to, int32_t dims,
                       int64_t bases, int32_t elem)
{
    bool in_order = (from->swizzle != 0 || address_has_rows(from)) &&
                    (to->swizzle != 0 || address_has_rows(to));
    int64_t bits = bases | (stride_bits(from) | stride_bits(to) | dims) * elem;
    return in_order && bits % 16 == 0 ? 16 / elem : 1;
}

/* How K or V goes; in *bits every bit that is set in an address or a length of its runs. */
static folioi_cuda_way way_of(const folioi_kv_layer *from, const folioi_kv_layer *to,
                              int32_t num_layers, folioi_k_or_v which, int64_t *bits)
{
    int32_t tokens = from->format->desc.block_size;
    folioi_kv_side f = kv_side(from, which), t = kv_side(to, which);
    folioi_cuda_way w = {*f.at, *t.at, *f.scales_at, *t.scales_at, f.dims, 0, 1};
    if (address_has_rows(f.at) && address_has_rows(t.at)) w.run = 1;
    int32_t dense = address_same_order(f.at, t.at) ? address_run(t.at, tokens, t.dims) : 0;
    if (dense > 0) w.run = dense;
    int64_t bases = base_bits(from, to, num_layers, which);
    if (w.run == 0) {
        w.unit = unit_of(f.at, t.at, f.dims, bases, bytes_of(f.dtype));
        return w;
    }
    int64_t steps = f.at->block | t.at->block | f.at->head | t.at->head | (w.run * (int64_t)w.dims);
    if (w.run == 1) steps |= stride_bits(f.at) | stride_bits(t.at);
    *bits |= steps * bytes_of(f.dtype) | bases;
    return w;
}

static enum cudaMemoryType type_of(const void *memory)
{
    struct cudaPointerAttributes a = {.type = cudaMemoryTypeUnregistered};
    if (cudaPointerGetAttributes(&a, memory) != cudaSuccess) (void)cudaGetLastError();
    return a.type;
}

/* The bus to the host's memory is full with 16 thread blocks; more would only stand in other kernels' way. */
static int32_t grid_for(const void *from, const void *to)
{
    bool host = type_of(from) == cudaMemoryTypeHost || type_of(to) == cudaMemoryTypeHost;
    return host ? 16 : 0;
}

/* Host memory that is not pinned: a kernel would fail there, and with it all later calls on the device. */
static folio_status check_access(const folioi_kv_layer *layers, int32_t num_layers)
{
    int device = 0, reaches_all = 0;
    if (type_of(layers[0].k) == cudaMemoryTypeDevice) return FOLIO_OK;
    TRY_CUDA(cudaGetDevice(&device), "the device");
    TRY_CUDA(cudaDeviceGetAttribute(&reaches_all, cudaDevAttrPageableMemoryAccess, device),
             "the device");
    for (int32_t l = 0; l < num_layers && !reaches_all; l++)
        if (type_of(layers[l].k) == cudaMemoryTypeUnregistered ||
            type_of(layers[l].v) == cudaMemoryTypeUnregistered)
            return folioi_core->fail(
                FOLIO_ERR_UNSUPPORTED,
                "layer %d of K and V lies in host memory that the device cannot access; create "
                "that with folio_memory_create in the device's context, as FOLIO_MEMORY_HOST",
                l);
    return FOLIO_OK;
}

static folioi_cuda_blocks blocks_of(const folioi_kv_layer *from, const folioi_kv_layer *to,
                                    int32_t num_layers)
{
    const folio_kv_cache_desc *d = &from->format->desc;
    int64_t bits = 0;
    folioi_cuda_blocks b = {
        .way = {way_of(from, to, num_layers, FOLIOI_K, &bits),
                way_of(from, to, num_layers, FOLIOI_V, &bits)},
        .num_sides = kv_last(from->format) + 1,
        .elem = bytes_of(d->dtype),
        .num_heads = d->num_kv_heads,
        .block_size = d->block_size,
        .num_layers = num_layers,
        .max_grid = grid_for(from->k, to->k),
    };
    b.vector = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    for (folioi_k_or_v which = FOLIOI_K; which <= FOLIOI_V; which++)
        for (int32_t l = 0; l < num_layers; l++) {
            folioi_kv_side f = kv_side(&from[l], which), t = kv_side(&to[l], which);
            b.bases[which][0][l] = f.base;
            b.bases[which][1][l] = t.base;
            b.bases[which][2][l] = (char *)f.scales;
            b.bases[which][3][l] = (char *)t.scales;
        }
    return b;
}

/* One launch, unless there are very many layers or pairs. */
static folio_status move_pairs(const folioi_kv_layer *from, const folioi_kv_layer *to,
                               int32_t num_layers, const folio_block_pair *pairs, int64_t num_pairs,
                               cudaStream_t stream)
{
    for (int32_t l = 0; l < num_layers; l += FOLIOI_CUDA_MOVE_LAYERS) {
        int32_t layers = (int32_t)min_i64(num_layers - l, FOLIOI_CUDA_MOVE_LAYERS);
        folioi_cuda_blocks b = blocks_of(from + l, to + l, layers);
        for (int64_t first = 0; first < num_pairs; first += FOLIOI_CUDA_MOVE_PAIRS) {
            b.num_pairs = (int32_t)min_i64(num_pairs - first, FOLIOI_CUDA_MOVE_PAIRS);
            for (int32_t i = 0; i < b.num_pairs; i++) {
                b.pairs[i][0] = (int32_t)pairs[first + i].from;
                b.pairs[i][1] = (int32_t)pairs[first + i].to;
            }
            TRY_CUDA(folioi_cuda_move_blocks(&b, stream), "kernel move_blocks");
        }
    }
    return FOLIO_OK;
}

folio_status folioi_cuda_move_pairs(const folio_context *ctx, const folioi_kv_layer *from,
                                    const folioi_kv_layer *to, int32_t num_layers,
                                    const folio_block_pair *pairs, int64_t num_pairs, void *stream)
{
    int before;
    if (num_pairs == 0) return FOLIO_OK;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status = check_access(from, num_layers);
    if (status == FOLIO_OK) status = check_access(to, num_layers);
    if (status == FOLIO_OK) status = move_pairs(from, to, num_layers, pairs, num_pairs, stream);
    folioi_cuda_leave(ctx, before);
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

/* With its parts where kernels read them: few come with the launch, many are uploaded. */
static folio_status merge_parts(const folio_context *ctx, const folio_merge *merge,
                                folioi_cuda_merge *m, cudaStream_t stream)
{
    int64_t bytes = merge->num_parts * (int64_t)sizeof(folioi_cuda_part);
    bool many = merge->num_parts > FOLIOI_CUDA_FEW_PARTS;
    void *args = m->few, *on_device = NULL;
    if (many) TRY(folioi_core->alloc(&ctx->allocator, bytes, "parts of a merge", &args));
    for (int64_t i = 0; i < merge->num_parts; i++)
        ((folioi_cuda_part *)args)[i] = part_of(merge, &merge->parts[i]);
    folio_status status = FOLIO_OK;
    if (many) {
        status = folioi_cuda_upload(args, (size_t)bytes, stream, &on_device);
        folioi_core->free(&ctx->allocator, args, bytes);
        m->parts = on_device;
    }
    if (status != FOLIO_OK) return status;
    status = folioi_cuda_status(folioi_cuda_merge_states(m, stream), "kernel merge_states");
    if (many) (void)cudaFreeAsync(on_device, stream);
    return status;
}

folio_status folioi_cuda_merge_parts(const folio_context *ctx, const folio_merge *merge,
                                     void *stream)
{
    int before;
    folioi_cuda_merge m = {
        .num_parts = merge->num_parts,
        .num_rows = merge->out.tokens,
        .num_heads = merge->num_heads,
        .dims = merge->head_size,
        .out = {rows_of(&merge->out), merge->out.dtype, merge->lse, merge->lse_token_stride,
                merge->lse_head_stride},
    };
    if (merge->out.tokens == 0) return FOLIO_OK;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status = merge_parts(ctx, merge, &m, stream);
    folioi_cuda_leave(ctx, before);
    return status;
}
