/* cuda_forward.c: one layer's forward: launches the write of k and v, then prefill and decode. */
#include "backends/cuda/host/cuda_plan.h"

static folioi_cuda_layer layer_of(const folioi_call *call)
{
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    folioi_cuda_layer l = {
        .dtype = a->dtype,
        .kv_dtype = a->kv_dtype,
        .new_k_dtype = t->k.dtype,
        .new_v_dtype = t->v.dtype,
        .num_heads = a->num_heads,
        .num_kv_heads = a->num_kv_heads,
        .k_dims = a->k_head_size,
        .v_dims = a->v_head_size,
        .scale = a->scale,
        .soft_cap = folioi_cuda_soft_cap(a),
        .window_left = a->window_left,
        .window_right = a->window_right,
        .q = rows_of(&t->q),
        .q_rows = t->q.tokens,
        .out = rows_of(&t->out),
        .new_k = rows_of(&t->k),
        .new_v = rows_of(&t->v),
        .lse = t->lse,
        .lse_token = t->lse_token_stride,
        .lse_head = t->lse_head_stride,
        .slopes = t->slopes,
        .sinks = t->sinks,
        .bias = t->bias,
        .v_in_k = a->v_in_k,
        .cached = call->cached,
        .append = call->append,
    };
    if (call->cached) {
        l.block_size = call->layer.format->desc.block_size;
        l.num_blocks = call->layer.format->desc.num_blocks;
        l.k = folioi_cuda_side_of(&call->layer, FOLIOI_K, t->k_scale, t->k_head_scales);
        l.v = folioi_cuda_side_of(&call->layer, FOLIOI_V, t->v_scale, t->v_head_scales);
    }
    return l;
}

static folio_status store(const folioi_call *call, const int64_t *slots,
                          const folioi_cuda_rotations *rotations, const folioi_cuda_noting *noting)
{
    folioi_kv_tensors kv = call_new_rows(call);
    return folioi_cuda_store(call->shape->ctx, &call->layer, &kv, slots, kv.k.tokens, rotations,
                             noting->notes != NULL ? noting : NULL, call->stream);
}

/* ---- bad writes: kernels that store k and v and most decodes note them, one launch behind them does the rest ---- */

static folioi_cuda_noting noting_of(const folioi_cuda_plan *p, const folioi_call *call,
                                    const folioi_cuda_step *step)
{
    if (!notes_bad(p)) return (folioi_cuda_noting){.notes = NULL};
    return (folioi_cuda_noting){.notes = folioi_cuda_at(p, p->notes),
                                .bad = p->bad,
                                .counts = step->counts,
                                .seqs = step->seqs,
                                .layer = call->layer_index,
                                .attention = call->attention_index,
                                .num_attentions = p->shape.desc.num_attentions,
                                .type = (int32_t)call->type};
}

/* decode: the line that computes all of the step, or NULL. */
static bool decode_notes(const folioi_cuda_line *decode, const folioi_cuda_layer *layer)
{
    return decode != NULL && folioi_cuda_decode_notes(decode, layer);
}

/* Rows that no kernel has looked at: of k and v those that are read as given, or that another decode has stored. */
static folio_status note_rest(const folioi_cuda_plan *p, const folioi_call *call,
                              const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                              const folioi_cuda_noting *noting, const folioi_cuda_line *decode)
{
    const folio_tensors *t = &call->tensors;
    bool is_noted = decode_notes(decode, layer);
    bool keys = t->k.data != NULL && (call->stores ? step->decode_stores && !is_noted : true);
    folioi_cuda_noted_rows n = {
        .rows = {keys ? rows_of(&t->k) : (folioi_cuda_rows){NULL, 0, 0},
                 keys && !layer->v_in_k ? rows_of(&t->v) : (folioi_cuda_rows){NULL, 0, 0},
                 is_noted ? (folioi_cuda_rows){NULL, 0, 0} : rows_of(&t->out)},
        .dtypes = {t->k.dtype, t->v.dtype, t->out.dtype},
        .num_rows = {t->k.tokens, t->v.tokens, t->out.tokens},
        .num_heads = {layer->num_kv_heads, layer->num_kv_heads, layer->num_heads},
        .dims = {layer->k_dims, layer->v_dims, layer->v_dims},
        .limit = call->stores ? folioi_cuda_limit(layer->kv_dtype) : INFINITY,
        .slots = call->stores ? folioi_cuda_at(p, p->slots) : NULL, /* decode stores no others */
        .rotations = {call->rotation, t->positions, step->counts, step->seqs},
        .noting = *noting};
    return folioi_cuda_status(folioi_cuda_note_rows(&n, call->stream), "kernel note_rows");
}

/*
 * Prefill and decode kernels take q and keys as they lie. q goes to out, rotated, where out has the room: out may be q.
 * Keys in the cache are rotated by then; new rows that are read as given are left to the generic kernel.
 */
static bool can_rotate_queries(const folioi_call *call)
{
    return call->attention->k_head_size == call->attention->v_head_size && call->cached &&
           !call->append;
}

static folio_status rotate_queries(const folioi_call *call, folioi_cuda_layer *l)
{
    if (!can_rotate_queries(call)) return FOLIO_OK;
    folioi_cuda_rotate_args args = {.from = l->q,
                                    .to = l->out,
                                    .dtype = l->dtype,
                                    .num_heads = l->num_heads,
                                    .dims = l->k_dims,
                                    .overlaps = device_of(call->shape->ctx)->sm.overlaps,
                                    .num_rows =
                                        l->q_rows, /* of all batches that a graph may meet */
                                    .rotations = l->rotations};
    args.in_pieces = l->k_dims % 8 == 0 && folioi_cuda_rows_aligned(&l->q, 2, 16) &&
                     folioi_cuda_rows_aligned(&l->out, 2, 16) &&
                     folioi_cuda_rotates_pieces(&l->rotations.rotation, l->dtype);
    l->q = l->out;
    l->rotations = (folioi_cuda_rotations){.positions = NULL};
    return folioi_cuda_status(folioi_cuda_rotate_rows(&args, call->stream), "kernel rotate_rows");
}

/*
 * Zeros that parts are counted in and that every launch leaves as zeros. The plan's own workspace begins with them. A caller's holds whatever
 * it was used for, so the plan keeps counters for the first workspaces it meets, by address: forwards that run at once
 * have different ones. Past those, zeros are written into the workspace each time.
 */
static folio_status find_counters(const folioi_cuda_plan *p, const folioi_call *call, size_t bytes,
                                  int32_t **counters)
{
    *counters = (int32_t *)(void *)call->workspace;
    if (!call->foreign_workspace) return FOLIO_OK;
    for (int i = 0; i < FOLIOI_CUDA_WORKSPACES; i++) {
        char *owner = NULL;
        if (!atomic_compare_exchange_strong(&p->workspaces[i], &owner, call->workspace) &&
            owner != call->workspace)
            continue;
        *counters = (int32_t *)(void *)((char *)folioi_cuda_at(p, p->counters) + (size_t)i * bytes);
        return FOLIO_OK;
    }
    return folioi_cuda_status(cudaMemsetAsync(call->workspace, 0, bytes, call->stream),
                              "clearing a workspace");
}

/*
 * What a decode may read early. The first one since an update: nothing, for what makes the lists may be right ahead of
 * it. Those after it begin when it has waited for that, if they are in the same stream, hence not in a caller's
 * workspace, and in the same capture or in none. In a capture it is known too whether that decode is the one thing
 * ahead; in a stream anybody's kernel may be. New rows that are read as given may be that decode's out. keys: K of the
 * layer. That decode may have stored rows in it; other layers of its cache lie apart.
 */
static folioi_cuda_early early_of(const folioi_cuda_plan *p, const folioi_call *call,
                                  const char *keys)
{
    folioi_cuda_capture now;
    const folioi_cuda_ahead *ahead = p->ahead;
    if (call->foreign_workspace || !ahead->is_there ||
        !folioi_cuda_capture_of(call->stream, &now) || now.number != ahead->capture.number)
        return FOLIOI_EARLY_NOTHING;
    bool is_next = now.end != NULL && now.end == ahead->capture.end;
    bool is_apart = ahead->stored == NULL ||
                    (ahead->stored != keys && ahead->format == (const void *)call->layer.format);
    return is_next && is_apart && call->cached && !call->append ? FOLIOI_EARLY_KEYS
                                                                : FOLIOI_EARLY_LISTS;
}

/*
 * The lines that compute a layer of the step at hand. All are NULL where the plan lacks one that the layer needs: then the
 * generic kernel computes it.
 */
typedef struct layer_lines {
    const folioi_cuda_line *prefill, *decode; /* NULL: the step has nothing for it */
    bool is_listed;
} layer_lines;

/* By the plan alone where the batch must not matter. With rotary embedding q will be where out is. */
static layer_lines lines_of(const folioi_cuda_plan *p, const folioi_call *call,
                            const folioi_cuda_use *use, folioi_cuda_layer layer)
{
    layer_lines lines = {NULL, NULL, false};
    if (use->list < 0) return lines;
    if (call->rotation.table != NULL) {
        if (!can_rotate_queries(call)) return lines;
        layer.q = layer.out;
    }
    const folioi_cuda_list *list = &p->lists[use->list];
    const folioi_cuda_sm *sm = &list->limits.sm;
    const folioi_cuda_work *now = &list->now,
                           *work = list->limits.batch_invariant ? &list->limit : now;
    const folioi_cuda_line *prefill = NULL, *decode = NULL;
    if (work->prefills) prefill = folioi_cuda_pick(&use->prefill, &layer, sm, 0);
    if (work->decode_rows > 0)
        decode = folioi_cuda_pick(&use->decode, &layer, sm, list->decode.max_rows);
    if ((work->prefills && prefill == NULL) || (work->decode_rows > 0 && decode == NULL))
        return lines;
    return (layer_lines){now->prefills ? prefill : NULL, now->decode_rows > 0 ? decode : NULL,
                         true};
}

/*
 * Does decode store the new rows? Each of its sequences has one, and no other sequence may read it: a block stores the row
 * and reads it, and no block waits for another.
 */
static bool decode_stores(const folioi_cuda_plan *p, const folioi_call *call,
                          const folioi_cuda_use *use, const layer_lines *lines,
                          const folioi_cuda_layer *layer)
{
    if (!has_private_slots(p) || call->append) return false;
    if (call->type != FOLIO_ATTENTION_DECODER || call->rotation.table != NULL) return false;
    return lines->decode != NULL && lines->prefill == NULL &&
           p->lists[use->list].now.query_len <= 1 &&
           folioi_cuda_decode_stores(lines->decode, layer);
}

/* The number of the choice's line that takes a layer, from 1 on; 0: none. */
static int number_of(const folioi_cuda_choice *choice, const folioi_cuda_line *line)
{
    int i = 0;
    while (line != NULL && choice->lines[i++] != line)
        ;
    return i;
}

folioi_cuda_picks folioi_cuda_picks_of(const folioi_cuda_plan *p, const folioi_call *call)
{
    const folioi_cuda_use *use = folioi_cuda_use_of(p, call->attention_index, call->type);
    layer_lines lines = lines_of(p, call, use, layer_of(call));
    return (folioi_cuda_picks){number_of(&use->prefill, lines.prefill),
                               number_of(&use->decode, lines.decode)};
}

/* By the line, or by one after it where the driver cannot describe the layer to it. */
static cudaError_t attend_prefills(const folioi_cuda_choice *choice, const folioi_cuda_run *run,
                                   const folioi_cuda_list *list, const folioi_cuda_line *line)
{
    const folioi_prefill_line *first = (const void *)line;
    cudaError_t error = first->launch(first, run, &list->prefill, &list->now.whole);
    for (int i = number_of(choice, line);
         i < FOLIOI_CUDA_MOST_LINES && error == cudaErrorNotSupported; i++) {
        const folioi_prefill_line *next = (const void *)choice->lines[i];
        if (next != NULL && folioi_cuda_line_matches(&next->line, run->layer, &list->limits.sm, 0))
            error = next->launch(next, run, &list->prefill, &list->now.whole);
    }
    return error;
}

static folio_status attend(const folioi_cuda_plan *p, const folioi_call *call,
                           const folioi_cuda_use *use, const layer_lines *lines,
                           folioi_cuda_run *run, const folioi_cuda_noting *noting)
{
    const folioi_cuda_list *list = &p->lists[use->list];
    TRY(find_counters(p, call, list->decode.counter_bytes, &run->counters));
    if (lines->prefill != NULL)
        TRY_CUDA(attend_prefills(&use->prefill, run, list, lines->prefill), "kernel prefill");
    if (lines->decode == NULL) {
        if (!p->may_pad) return FOLIO_OK;
        return folioi_cuda_status(folioi_cuda_generic(run, true), "kernel generic");
    }
    TRY_CUDA(folioi_cuda_decode(lines->decode, run, &list->decode, list->now.decode_rows,
                                list->now.clustered, early_of(p, call, run->layer->k.base), noting),
             "kernel decode");
    if (call->foreign_workspace) return FOLIO_OK;
    p->ahead->is_there = folioi_cuda_capture_of(call->stream, &p->ahead->capture);
    p->ahead->stored = run->step->decode_stores ? run->layer->k.base : NULL;
    p->ahead->format = call->layer.format;
    return FOLIO_OK;
}

static folio_status run(const folioi_call *call)
{
    const folioi_cuda_plan *p = call->plan_state;
    bool cross = call->type == FOLIO_ATTENTION_ENCODER_DECODER;
    folioi_cuda_layer layer = layer_of(call);
    folioi_cuda_step step = {
        .counts = folioi_cuda_at(p, p->counts[call->type]),
        .seqs = folioi_cuda_at(p, p->seqs[call->type]),
        .blocks = folioi_cuda_at(p, cross ? p->cross_blocks : p->blocks),
        .out_rows = call->tensors.out.tokens,
    };
    layer.rotations =
        (folioi_cuda_rotations){call->rotation, call->tensors.positions, step.counts, step.seqs};
    const folioi_cuda_use *use = folioi_cuda_use_of(p, call->attention_index, call->type);
    layer_lines lines = lines_of(p, call, use, layer);
    step.decode_stores = call->stores && decode_stores(p, call, use, &lines, &layer);
    folioi_cuda_noting noting = noting_of(p, call, &step);
    if (call->stores && !step.decode_stores)
        TRY(store(call, folioi_cuda_at(p, cross ? p->cross_slots : p->slots), &layer.rotations,
                  &noting));
    if (call->rotation.table != NULL) TRY(rotate_queries(call, &layer));
    folioi_cuda_run now = {&layer, &step, call->workspace, NULL, call->stream};
    if (lines.is_listed) TRY(attend(p, call, use, &lines, &now, &noting));
    else TRY(folioi_cuda_status(folioi_cuda_generic(&now, false), "kernel generic"));
    if (noting.notes == NULL) return FOLIO_OK;
    return note_rest(p, call, &layer, &step, &noting, lines.prefill == NULL ? lines.decode : NULL);
}

folio_status folioi_cuda_forward(const folioi_call *call)
{
    int before;
    TRY(folioi_cuda_enter(call->shape->ctx, &before));
    folio_status status = run(call);
    folioi_cuda_leave(call->shape->ctx, before);
    return status;
}
