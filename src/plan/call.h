/*
 * call.h: what a backend gets: the shape a plan was created for, and one layer's forward, resolved and checked.
 */
#ifndef FOLIOI_CALL_H
#define FOLIOI_CALL_H

#include "batch/batch.h"
#include "cache/kv_rows.h"
#include "core/context.h"
#include "plan/attention.h"

/** What a plan was created for. */
typedef struct folioi_plan_shape {
    folio_context *ctx;
    folio_plan_desc desc; /* pointers replaced by the two arrays below */
    folio_attention **attentions;
    uint32_t *types;
    folio_layout layout, cross_layout; /* of the caches it was given; NATIVE: of none */
} folioi_plan_shape;

/** One layer's forward, resolved: defaults filled in, strides set. */
typedef struct folioi_call {
    const folioi_plan_shape *shape;
    const void *plan_state;
    const folio_batch *batch; /* NULL: the plan was updated from arrays of the device */
    int32_t attention_index;
    const folio_attention_desc *attention;
    folio_attention_type type;
    int32_t layer_index; /* as given; without a cache any number                            */
    bool cached;         /* `layer` holds a cache's layer, and keys are read from it             */
    bool append;         /* the cache holds the context only                                     */
    folioi_kv_layer layer;
    folio_tensors tensors;
    folioi_rotation rotation; /* of q and of new rows of k */
    bool stores; /* k and v go to the cache first                                           */
    const int64_t *slots; /* where, [num_slots]; NULL: none do, or only the device knows          */
    int64_t num_slots;
    int64_t num_rows; /* rows of the batch; out may have more (padding of a graph plan)       */
    char *workspace;
    bool foreign_workspace; /* the caller's: whatever it holds */
    void *stream; /* of the device; NULL: its default, and on host backends              */
} folioi_call;

/** k and v of the call, to be stored. */
static inline folioi_kv_tensors call_new_rows(const folioi_call *call)
{
    const folio_tensors *t = &call->tensors;
    folioi_kv_tensors rows = {.k = t->k,
                              .v = t->v,
                              .k_scale = t->k_scale,
                              .v_scale = t->v_scale,
                              .k_head_scales = t->k_head_scales,
                              .v_head_scales = t->v_head_scales,
                              .rotation = call->rotation,
                              .positions = t->positions};
    if (rows.positions == NULL && call->batch != NULL) rows.positions = call->batch->positions.data;
    return rows;
}

/** The position by which row i of a sequence rotates, in q and in k. */
static inline int64_t call_position(const folioi_call *call, const folioi_rows *rows, int64_t i)
{
    const int64_t *given = call->tensors.positions;
    return given != NULL ? given[rows->query_row + i] : rows->first_query_pos + i;
}

#endif
