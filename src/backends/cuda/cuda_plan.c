/*
 * cuda_plan.c: a plan on the device: the step's sequences, block tables and slots, copied there once per update and
 * read by every layer, at places that never move: a captured graph finds the next step's there.
 */
#include "backends/cuda/cuda_backend.h"

#include <string.h>

enum { NUM_STAGES = 2 }; /* the host fills one while the other is on its way */

/* One array of a plan: where it lies in the arena, and how many bytes it can have. */
typedef struct {
    size_t at, bytes;
} place;

typedef struct {
    folioi_plan_shape shape;
    place counts[FOLIO_NUM_ATTENTION_TYPES], seqs[FOLIO_NUM_ATTENTION_TYPES];
    place blocks, cross_blocks, slots, cross_slots;
    size_t bytes;
    char *device, *stage[NUM_STAGES];
    cudaEvent_t copied[NUM_STAGES]; /* the copy out of a stage is done */
    int turn;
} cuda_plan;

static place take(cuda_plan *p, int64_t count, size_t size)
{
    place at = {p->bytes, (size_t)count * size};
    p->bytes += (at.bytes + FOLIOI_ALIGN - 1) / FOLIOI_ALIGN * FOLIOI_ALIGN;
    return at;
}

static void lay_out(cuda_plan *p)
{
    const folio_plan_desc *d = &p->shape.desc;
    uint32_t types = 0;
    for (int32_t i = 0; i < d->num_attentions; i++) types |= p->shape.types[i];
    int64_t tables = d->block_size > 0 ? d->max_seqs * ceil_div(d->max_seq_len, d->block_size) : 0;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++) {
        if (!(types & FOLIO_TYPE_BIT(t))) continue;
        p->counts[t] = take(p, 1, sizeof(folioi_cuda_counts));
        p->seqs[t] = take(p, d->max_seqs, sizeof(folioi_cuda_seq));
    }
    if (types & FOLIO_TYPE_BIT(FOLIO_DECODER)) {
        p->blocks = take(p, tables, sizeof(int32_t));
        p->slots = take(p, d->max_query_tokens, sizeof(int64_t));
    }
    if (types & FOLIO_TYPE_BIT(FOLIO_ENCODER_DECODER)) {
        p->cross_blocks = take(p, tables, sizeof(int32_t));
        p->cross_slots = take(p, d->max_encoder_tokens, sizeof(int64_t));
    }
}

static folio_status reserve(cuda_plan *p)
{
    const folio_context *ctx = p->shape.ctx;
    const folioi_device *memory = ctx->backend->memory;
    TRY(memory->alloc(ctx, FOLIO_MEMORY_DEVICE, p->bytes, "a plan", (void **)&p->device));
    for (int i = 0; i < NUM_STAGES; i++) {
        TRY(memory->alloc(ctx, FOLIO_MEMORY_HOST, p->bytes, "a plan", (void **)&p->stage[i]));
        TRY_CUDA(cudaEventCreateWithFlags(&p->copied[i], cudaEventDisableTiming), "a plan's event");
    }
    return FOLIO_OK;
}

folio_status folioi_cuda_plan_create(const folioi_plan_shape *shape, void **state,
                                     size_t *workspace_size)
{
    void *memory;
    int before;
    TRY(folioi_core->alloc(&shape->ctx->allocator, sizeof(cuda_plan), "a plan", &memory));
    cuda_plan *p = memory;
    p->shape = *shape;
    lay_out(p);
    folio_status status = folioi_cuda_enter(shape->ctx, &before);
    if (status == FOLIO_OK) {
        status = reserve(p);
        folioi_cuda_leave(shape->ctx, before);
    }
    if (status != FOLIO_OK) {
        folioi_cuda_plan_destroy(shape, p);
        return status;
    }
    *state = p;
    *workspace_size = 0;
    return FOLIO_OK;
}

void folioi_cuda_plan_destroy(const folioi_plan_shape *shape, void *state)
{
    cuda_plan *p = state;
    const folioi_device *memory = shape->ctx->backend->memory;
    memory->free(shape->ctx, FOLIO_MEMORY_DEVICE, p->device);
    for (int i = 0; i < NUM_STAGES; i++) {
        if (p->copied[i] != NULL) (void)cudaEventDestroy(p->copied[i]);
        memory->free(shape->ctx, FOLIO_MEMORY_HOST, p->stage[i]);
    }
    folioi_core->free(&shape->ctx->allocator, p, sizeof *p);
}

/* ------------------------------------------------------------------------------------------- update */

typedef struct {
    cuda_plan *plan;
    char *stage;
    cudaStream_t stream;
} update;

/* `bytes` of an array to its place on the device; those past `used` of them are -1. */
static folio_status send(const update *u, place to, const void *from, size_t used, size_t bytes)
{
    if (bytes == 0) return FOLIO_OK;
    char *stage = u->stage + to.at;
    if (from != NULL) memcpy(stage, from, used);
    memset(stage + used, 0xff, bytes - used);
    return folioi_cuda_status(
        cudaMemcpyAsync(u->plan->device + to.at, stage, bytes, cudaMemcpyHostToDevice, u->stream),
        "copying a plan");
}

static folio_status send_seqs(const update *u, const folio_batch *batch, folio_attention_type type)
{
    cuda_plan *p = u->plan;
    bool cross = type == FOLIO_ENCODER_DECODER;
    const int32_t *tables = cross ? batch->cross_blocks.data : batch->blocks.data;
    folioi_cuda_seq *seqs = (void *)(u->stage + p->seqs[type].at);
    folioi_cuda_counts counts = {.num_seqs = (int32_t)batch->num_seqs};
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows r = folioi_core->rows(batch, i, type);
        seqs[i] = (folioi_cuda_seq){
            .query_row = r.query_row,
            .new_row = r.new_row,
            .first_query_pos = r.first_query_pos,
            .first_key_pos = r.first_key_pos,
            .table = r.blocks != NULL ? r.blocks - tables : 0,
            .query_len = r.query_len,
            .key_len = r.key_len,
            .context_len = r.context_len,
            .causal = r.causal,
        };
        counts.num_rows = r.query_row + r.query_len;
    }
    size_t bytes = (size_t)batch->num_seqs * sizeof *seqs;
    TRY(send(u, p->counts[type], &counts, sizeof counts, sizeof counts));
    if (bytes == 0) return FOLIO_OK;
    return folioi_cuda_status(cudaMemcpyAsync(p->device + p->seqs[type].at, seqs, bytes,
                                              cudaMemcpyHostToDevice, u->stream),
                              "copying a plan");
}

/* All slots of a graph plan are sent: rows past the batch's are stored nowhere. */
static folio_status send_all(const update *u, const folio_batch *batch)
{
    cuda_plan *p = u->plan;
    bool graph = (p->shape.desc.flags & FOLIO_PLAN_GRAPH) != 0;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        if (p->seqs[t].bytes > 0) TRY(send_seqs(u, batch, (folio_attention_type)t));
    size_t blocks = (size_t)batch->num_blocks * sizeof(int32_t);
    size_t cross = (size_t)batch->num_cross_blocks * sizeof(int32_t);
    size_t slots = (size_t)batch->num_query_tokens * sizeof(int64_t);
    size_t cross_slots = (size_t)batch->num_encoder_tokens * sizeof(int64_t);
    if (p->blocks.bytes > 0) TRY(send(u, p->blocks, batch->blocks.data, blocks, blocks));
    if (p->slots.bytes > 0)
        TRY(send(u, p->slots, batch->slots.data, slots, graph ? p->slots.bytes : slots));
    if (p->cross_blocks.bytes > 0)
        TRY(send(u, p->cross_blocks, batch->cross_blocks.data, cross, cross));
    if (p->cross_slots.bytes > 0)
        TRY(send(u, p->cross_slots, batch->cross_slots.data, cross_slots,
                 graph ? p->cross_slots.bytes : cross_slots));
    return FOLIO_OK;
}

folio_status folioi_cuda_plan_update(void *state, const folio_batch *batch, void *stream)
{
    cuda_plan *p = state;
    int before;
    TRY(folioi_cuda_enter(p->shape.ctx, &before));
    int turn = p->turn = (p->turn + 1) % NUM_STAGES;
    update u = {p, p->stage[turn], stream};
    /* what was sent from this stage two updates ago has long arrived */
    folio_status status =
        folioi_cuda_status(cudaEventSynchronize(p->copied[turn]), "waiting for a plan's copy");
    if (status == FOLIO_OK) status = send_all(&u, batch);
    if (status == FOLIO_OK)
        status = folioi_cuda_status(cudaEventRecord(p->copied[turn], stream), "a plan's event");
    folioi_cuda_leave(p->shape.ctx, before);
    return status;
}

void folioi_cuda_plan_describe(const void *state, int32_t attention, folio_attention_type type,
                               folio_plan_info *info)
{
    (void)state;
    (void)attention;
    (void)type;
    info->kernel = "plain_cuda";
    info->num_items = 1;
}

/* ------------------------------------------------------------------------------------------ forward */

static folioi_cuda_layer layer_of(const folioi_call *call)
{
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    folioi_cuda_layer l = {
        .dtype = a->dtype,
        .kv_dtype = a->kv_dtype,
        .num_heads = a->num_heads,
        .num_kv_heads = a->num_kv_heads,
        .k_dims = a->k_head_size,
        .v_dims = a->v_head_size,
        .scale = a->scale,
        .soft_cap = a->soft_cap,
        .window_left = a->window_left,
        .window_right = a->window_right,
        .q = rows_of(&t->q),
        .out = rows_of(&t->out),
        .new_k = rows_of(&t->k),
        .new_v = rows_of(&t->v),
        .lse = t->lse,
        .lse_token = t->lse_token_stride,
        .lse_head = t->lse_head_stride,
        .slopes = t->slopes,
        .sinks = t->sinks,
        .bias = t->bias,
        .cached = call->cached,
        .append = call->append,
    };
    if (call->cached) {
        l.block_size = call->layer.format->desc.block_size;
        l.k = folioi_cuda_side_of(&call->layer, FOLIOI_K, t->k_scale);
        l.v = folioi_cuda_side_of(&call->layer, FOLIOI_V, t->v_scale);
    }
    return l;
}

static folio_status run(const folioi_call *call)
{
    const cuda_plan *p = call->plan_state;
    const folio_tensors *t = &call->tensors;
    bool cross = call->type == FOLIO_ENCODER_DECODER;
    if (call->slots != NULL) {
        folioi_kv_tensors kv = {t->k, t->v, t->k_scale, t->v_scale};
        const char *slots = p->device + (cross ? p->cross_slots.at : p->slots.at);
        TRY(folioi_cuda_store(&call->layer, &kv, (const int64_t *)(const void *)slots, t->k.tokens,
                              call->stream));
    }
    folioi_cuda_layer layer = layer_of(call);
    folioi_cuda_step step = {
        .counts = (const void *)(p->device + p->counts[call->type].at),
        .seqs = (const void *)(p->device + p->seqs[call->type].at),
        .blocks = (const void *)(p->device + (cross ? p->cross_blocks.at : p->blocks.at)),
        .out_rows = t->out.tokens,
    };
    return folioi_cuda_status(folioi_cuda_plain(&layer, &step, call->stream), "kernel plain");
}

folio_status folioi_cuda_forward(const folioi_call *call)
{
    int before;
    TRY(folioi_cuda_enter(call->shape->ctx, &before));
    folio_status status = run(call);
    folioi_cuda_leave(call->shape->ctx, before);
    return status;
}
