/*
 * plan_room.c: what a plan's limits decide: the backend's state, the slot check and the workspace. A plan without limits
 * makes a larger room beside the one it has when a step needs it.
 */
#include "plan/plan.h"

/* Growth is rare: what is too small becomes at least half as large again. */
static bool grow(int64_t *limit, int64_t need)
{
    if (need <= *limit) return false;
    *limit = min_i64(max_i64(need, *limit + *limit / 2), INT32_MAX);
    return true;
}

uint32_t folioi_plan_types(const folioi_plan_shape *shape)
{
    uint32_t types = 0;
    for (int32_t i = 0; i < shape->desc.num_attentions; i++) types |= shape->types[i];
    return types;
}

int64_t folioi_plan_most_keys(uint32_t types, const folio_batch *batch, int64_t seq)
{
    const folioi_seq *s = batch_seq(batch, seq);
    int64_t keys = max_i64(s->seq_len, s->encoder_len);
    bool own = (types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_ONLY)) && s->seq_len > 0;
    return own ? max_i64(keys, s->query_len) : keys;
}

bool folioi_plan_grow(folioi_plan_shape *shape, const folio_batch *batch)
{
    folio_plan_desc *d = &shape->desc;
    uint32_t types = folioi_plan_types(shape);
    int64_t longest = 1, longest_query = 1;
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        longest = max_i64(longest, folioi_plan_most_keys(types, batch, i));
        longest_query = max_i64(longest_query, batch_seq(batch, i)->query_len);
    }
    bool grows = grow(&d->max_seqs, max_i64(batch->num_seqs, 1));
    grows |= grow(&d->max_query_tokens, max_i64(batch->num_query_tokens, 1));
    grows |= grow(&d->max_seq_len, longest);
    grows |= grow(&d->max_encoder_tokens, batch->num_encoder_tokens);
    grows |= grow(&d->max_query_len, longest_query);
    d->max_query_len = min_i64(d->max_query_len, d->max_query_tokens);
    return grows;
}

static folio_status make_workspace(const folioi_plan_shape *shape, folioi_plan_room *room)
{
    const folio_context *ctx = shape->ctx;
    const folioi_backend *b = ctx->backend;
    if (shape->desc.flags & FOLIO_PLAN_NO_WORKSPACE) return FOLIO_OK;
    TRY(b->alloc(ctx, FOLIO_MEMORY_DEVICE, room->workspace_size, "a plan's workspace",
                 &room->workspace));
    /* on the host a worker's scratch comes from the memory node of the thread that first works in it */
    if (!b->on_device) return FOLIO_OK;
    TRY(b->fill(ctx, room->workspace, 0, room->workspace_size, NULL)); /* as kernels leave it */
    return b->wait(ctx, NULL);
}

static folio_status fill_room(const folioi_plan_shape *shape, folioi_plan_room *room)
{
    const folio_plan_desc *d = &shape->desc;
    TRY(shape->ctx->backend->plan_create(shape, &room->state, &room->workspace_size));
    room->has_state = true;
    /* after the device had its say: a plan too large for it costs no host memory */
    TRY(folioi_slotset_reserve(&shape->ctx->allocator, &room->slots,
                               max_i64(d->max_query_tokens, d->max_encoder_tokens)));
    return make_workspace(shape, room);
}

folio_status folioi_plan_room_make(const folioi_plan_shape *shape, folioi_plan_room *room)
{
    *room = (folioi_plan_room){.state = NULL};
    folio_status status = fill_room(shape, room);
    if (status != FOLIO_OK) folioi_plan_room_free(shape, room);
    return status;
}

void folioi_plan_room_free(const folioi_plan_shape *shape, folioi_plan_room *room)
{
    const folio_context *ctx = shape->ctx;
    ctx->backend->free(ctx, FOLIO_MEMORY_DEVICE, room->workspace, room->workspace_size);
    if (room->has_state) ctx->backend->plan_destroy(shape, room->state);
    folioi_slotset_free(&ctx->allocator, &room->slots);
    *room = (folioi_plan_room){.state = NULL};
}
