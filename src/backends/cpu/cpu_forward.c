/*
 * cpu_forward.c: one layer on the CPU. Workers take (item, kv head) pairs from an atomic counter, largest first.
 * For each they load q, run the kernel on each split, fold the results and store out. Items of a chain store the
 * states of their splits in the workspace; the item that ends last folds them. No worker waits for another.
 */
#include "backends/cpu/cpu_forward.h"

#include "backends/exp.h"
#include "backends/rows_out.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define WRITE_ROWS 16 /* rows of k and v a worker stores at a time: a native sub-tile */
#define WRITE_BYTES ((int64_t)32768) /* of k and v, at least: less is done before a worker wakes */

/* One worker's scratch. */
typedef struct {
    float *q;                         /* [rows][k_dims] */
    int64_t *q_at;                    /* [rows] */
    folioi_range *seen;               /* [rows] */
    int64_t *own, *bias_at;           /* [rows] */
    float *slopes;                    /* [rows] */
    folioi_state_rows total, partial; /* of the whole item, of one split */
    float *k_tile, *v_tile, *v_panels, *scores, *wide;
} scratch;

static folioi_state_rows take_state(folioi_arena *arena, int64_t rows, int64_t v_dims)
{
    folioi_state_rows s;
    s.max = arena_take(arena, rows * 4);
    s.sum = arena_take(arena, rows * 4);
    s.out = arena_take(arena, rows * folioi_out_stride((int32_t)v_dims) * 4);
    return s;
}

static scratch take_scratch(folioi_arena *arena, int64_t rows, int64_t k_dims, int64_t v_dims)
{
    scratch s;
    s.q = arena_take(arena, rows * k_dims * 4 + 64); /* a vector more: see pack_block */
    s.q_at = arena_take(arena, rows * 8);
    s.seen = arena_take(arena, rows * (int64_t)sizeof *s.seen);
    s.own = arena_take(arena, rows * 8);
    s.bias_at = arena_take(arena, rows * 8);
    s.slopes = arena_take(arena, rows * 4);
    s.total = take_state(arena, rows, v_dims);
    s.partial = take_state(arena, rows, v_dims);
    s.k_tile = arena_take(arena, k_dims * FOLIOI_TILE_KEYS * 4);
    s.v_tile = arena_take(arena, folioi_out_stride((int32_t)v_dims) * FOLIOI_TILE_KEYS * 4);
    s.v_panels = arena_take(arena, folioi_out_stride((int32_t)v_dims) * FOLIOI_TILE_KEYS * 4);
    s.scores = arena_take(arena, (int64_t)FOLIOI_STRIP_ROWS * FOLIOI_TILE_KEYS * 4);
    s.wide = arena_take(arena, 16 * (k_dims + folioi_out_stride((int32_t)v_dims)) * 4);
    return s;
}

folioi_cpu_memory folioi_cpu_memory_of(const folioi_schedule_limits *l,
                                       const folio_attention_desc *a, char *base)
{
    folioi_cpu_memory m = {
        .rows = l->tile_queries * l->heads_per_kv,
        .k_dims = a->k_head_size,
        .v_dims = a->v_head_size,
    };
    folioi_arena worker = {NULL, 0};
    take_scratch(&worker, m.rows, m.k_dims, m.v_dims);
    m.worker_bytes = worker.used;
    folioi_arena all = {base, 0};
    m.workers = arena_take(&all, m.worker_bytes * l->num_workers);
    m.arrived = arena_take(&all, l->max_chains * l->num_kv_heads * (int64_t)sizeof *m.arrived);
    m.partials =
        arena_take(&all, l->max_partials * l->num_kv_heads * (folioi_out_stride(m.v_dims) + 2) * 4);
    m.bytes = all.used;
    return m;
}

/* Everything the workers of one call share. */
typedef struct {
    const folioi_call *call;
    const folioi_schedule *schedule;
    const folioi_cpu_kernels *kernels;
    enum folioi_attend_instance kernel;
    folioi_cpu_memory memory;
    atomic_llong next;
} job;

/* An item of one kv head under way. */
typedef struct {
    const job *job;
    const folioi_item *item;
    int32_t kv_head, num_rows;
    folioi_rows rows;
    folioi_prefetch prefetch[2]; /* its keys, and the next item's */
    scratch s;
} work;

static folioi_keys keys_of(const folioi_call *call, const folioi_rows *rows, int32_t kv_head)
{
    const folio_tensors *t = &call->tensors;
    folioi_keys k = {
        .blocks = rows->blocks,
        .kv_head = kv_head,
        .k_scale = head_scale(t->k_head_scales, t->k_scale, kv_head),
        .v_scale = head_scale(t->v_head_scales, t->v_scale, kv_head),
        .new_k = t->k,
        .new_v = t->v,
        .new_row = rows->new_row,
        .v_in_k = call->attention->v_in_k != 0,
    };
    if (call->cached) {
        k.k = kv_side(&call->layer, FOLIOI_K);
        k.v = kv_side(&call->layer, FOLIOI_V);
        k.block_size = call->layer.format->desc.block_size;
        k.stored_len = call->append ? rows->context_len : rows->key_len;
    }
    if (call->rotation.table != NULL) {
        const folioi_cpu_kernels *kernels = call->shape->ctx->kernels;
        k.rotate = kernels->rotate;
        k.rotation = call->rotation;
        k.positions = call->tensors.positions;
        k.first_position = rows->first_query_pos;
    }
    return k;
}

/* Rows of q, rotated: a strip of them at a time in what will be the scratch of K. */
static void load_rotated(const work *w, const folioi_attend_kernel *kernel)
{
    const folioi_call *call = w->job->call;
    const folio_attention_desc *a = call->attention;
    const folio_tensor *q = &call->tensors.q;
    int32_t heads_per_kv = a->num_heads / a->num_kv_heads, dims = a->k_head_size;
    int64_t elem = (int64_t)folio_dtype_size(q->dtype), from[FOLIOI_STRIP_ROWS];
    char *rotated = (char *)w->s.k_tile;
    for (int32_t first = 0; first < w->num_rows; first += FOLIOI_STRIP_ROWS) {
        int32_t n = (int32_t)min_i64(w->num_rows - first, FOLIOI_STRIP_ROWS);
        for (int32_t r = 0; r < n; r++) {
            int64_t i = w->item->first_query + (first + r) / heads_per_kv;
            from[r] = (int64_t)r * dims;
            w->job->kernels->rotate(rotated + from[r] * elem,
                                    (const char *)q->data + w->s.q_at[first + r] * elem, q->dtype,
                                    dims, &call->rotation, call_position(call, &w->rows, i));
        }
        kernel->load_queries(w->s.q + (int64_t)first * dims / (kernel->pairs ? 2 : 1), rotated,
                             q->dtype, from, n, dims);
    }
}

/* Row r is query first_query + r / heads_per_kv under head kv_head * heads_per_kv + r % heads_per_kv. */
static void load_rows(const work *w)
{
    const folioi_call *call = w->job->call;
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    int32_t heads_per_kv = a->num_heads / a->num_kv_heads;
    for (int32_t r = 0; r < w->num_rows; r++) {
        int64_t i = w->item->first_query + r / heads_per_kv;
        int32_t head = w->kv_head * heads_per_kv + r % heads_per_kv;
        w->s.q_at[r] = tensor_index(&t->q, w->rows.query_row + i, head);
        w->s.seen[r] = key_range(&w->rows, a, i);
        w->s.own[r] = w->rows.first_query_pos + i - w->rows.first_key_pos;
        w->s.slopes[r] = t->slopes != NULL ? t->slopes[head] : 0.0f;
        w->s.bias_at[r] = t->bias.data != NULL ? bias_index(&t->bias, w->item->seq, head, i) : 0;
    }
    const folioi_attend_kernel *kernel = &w->job->kernels->attend[w->job->kernel];
    if (call->rotation.table != NULL) load_rotated(w, kernel);
    else
        kernel->load_queries(w->s.q, t->q.data, t->q.dtype, w->s.q_at, w->num_rows, a->k_head_size);
}

/* State of one split of a chain in the workspace. */
static folioi_state_rows partial_of(const work *w, const folioi_chain *chain, int32_t split)
{
    const folioi_cpu_memory *m = &w->job->memory;
    int64_t splits = chain->split_end - chain->split_begin;
    int64_t row = chain->first_partial * w->job->call->attention->num_kv_heads +
                  (w->kv_head * splits + split - chain->split_begin) * w->num_rows;
    float *base = m->partials + row * (folioi_out_stride(m->v_dims) + 2);
    return (folioi_state_rows){base, base + w->num_rows, base + 2 * (int64_t)w->num_rows};
}

static void run_split(const work *w, const folioi_keys *keys, int32_t split,
                      const folioi_state_rows *state)
{
    const folioi_call *call = w->job->call;
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    folioi_range seen = {w->s.seen[0].begin, w->s.seen[w->num_rows - 1].end};
    int64_t begin = (int64_t)split * FOLIOI_SPLIT_LEN, end = begin + FOLIOI_SPLIT_LEN;
    folioi_attend_args args = {
        .rows = w->num_rows,
        .k_dims = a->k_head_size,
        .v_dims = a->v_head_size,
        .q = w->s.q,
        .seen = w->s.seen,
        .own = w->s.own,
        .slopes = t->slopes != NULL ? w->s.slopes : NULL,
        .bias = t->bias.data,
        .bias_dtype = t->bias.dtype,
        .bias_at = w->s.bias_at,
        .bias_key_stride = t->bias.strides[3],
        .scale = a->scale,
        .soft_cap = folioi_soft_cap_of(a->soft_cap),
        .keys = *keys,
        .begin = (int32_t)max_i64(begin, seen.begin),
        .end = (int32_t)min_i64(end, seen.end),
        .prefetch = {w->prefetch[0], w->prefetch[1]},
        .deep_l1 = w->job->kernels->deep_l1,
        .state = *state,
        .k_tile = w->s.k_tile,
        .v_tile = w->s.v_tile,
        .v_panels = w->s.v_panels,
        .scores = w->s.scores,
        .wide = w->s.wide,
    };
    w->job->kernels->attend[w->job->kernel].run(&args);
}

/* Sink, division, rounding to out's type, lse. */
static void finish(const work *w, const folioi_state_rows *state)
{
    const folioi_call *call = w->job->call;
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    int32_t heads_per_kv = a->num_heads / a->num_kv_heads;
    for (int32_t r = 0; r < w->num_rows; r++) {
        int64_t row = w->rows.query_row + w->item->first_query + r / heads_per_kv;
        int32_t head = w->kv_head * heads_per_kv + r % heads_per_kv;
        float largest = state->max[r], sum = state->sum[r], shrink = 1.0f;
        if (largest == -INFINITY) {
            row_store_empty(call, row, head);
            continue;
        }
        if (t->sinks != NULL) {
            float sink = t->sinks[head];
            float with = sink > largest ? sink : largest;
            shrink = exp_f32(largest - with);
            sum = sum * shrink + exp_f32(sink - with);
            largest = with;
        }
        w->job->kernels->store_row(t->out.data, t->out.dtype, tensor_index(&t->out, row, head),
                                   state->out + r * folioi_out_stride(a->v_head_size), shrink / sum,
                                   a->v_head_size);
        if (t->lse != NULL) /* in double: the two may be large and nearly cancel */
            lse_store(t, row, head, (float)((double)largest + log((double)sum)));
    }
}

/* The last item of a chain to end folds the states of all its splits. */
static void end_chain_item(const work *w, const folioi_chain *chain)
{
    const folioi_call *call = w->job->call;
    int64_t index = (int64_t)w->item->chain * call->attention->num_kv_heads + w->kv_head;
    int arrived = __atomic_add_fetch(&w->job->memory.arrived[index], 1, __ATOMIC_ACQ_REL);
    if (arrived < chain->num_items) return;
    folioi_state_clear(&w->s.total, w->num_rows);
    for (int32_t split = chain->split_begin; split < chain->split_end; split++) {
        folioi_state_rows partial = partial_of(w, chain, split);
        folioi_state_fold(&w->s.total, &partial, w->num_rows, w->job->memory.v_dims);
    }
    finish(w, &w->s.total);
}

/* Keys of a unit that are stored. */
static folioi_prefetch keys_to_prefetch(const job *j, int64_t unit)
{
    const folioi_call *call = j->call;
    int64_t heads = call->attention->num_kv_heads;
    if (!call->cached || unit >= j->schedule->num_items * heads) return (folioi_prefetch){0};
    const folioi_item *item = &j->schedule->items[unit / heads];
    folioi_rows rows = folioi_batch_rows(call->batch, item->seq, call->type);
    folioi_range seen = key_range_of(&rows, call->attention, item->first_query, item->num_queries);
    int64_t begin = max_i64((int64_t)item->split_begin * FOLIOI_SPLIT_LEN, seen.begin);
    int64_t end = min_i64((int64_t)item->split_end * FOLIOI_SPLIT_LEN, seen.end);
    int64_t stored = call->append ? rows.context_len : rows.key_len;
    return (folioi_prefetch){
        .blocks = rows.blocks,
        .kv_head = (int32_t)(unit % heads),
        .key = (int32_t)(begin / FOLIOI_TILE_KEYS * FOLIOI_TILE_KEYS),
        .end = (int32_t)min_i64(end, stored),
    };
}

static void run_item(const job *j, int64_t unit, int64_t next, scratch s)
{
    const folioi_call *call = j->call;
    int32_t heads = call->attention->num_kv_heads, kv_head = (int32_t)(unit % heads);
    const folioi_item *item = &j->schedule->items[unit / heads];
    work w = {
        .job = j,
        .item = item,
        .kv_head = kv_head,
        .num_rows =
            item->num_queries * (call->attention->num_heads / call->attention->num_kv_heads),
        .rows = folioi_batch_rows(call->batch, item->seq, call->type),
        .prefetch = {keys_to_prefetch(j, unit), keys_to_prefetch(j, next)},
        .s = s,
    };
    load_rows(&w);
    folioi_keys keys = keys_of(call, &w.rows, kv_head);
    const folioi_chain *chain = item->chain >= 0 ? &j->schedule->chains[item->chain] : NULL;
    folioi_state_clear(&w.s.total, w.num_rows);
    for (int32_t split = item->split_begin; split < item->split_end; split++) {
        /* to fold the first one into nothing would only copy it */
        bool first = split == item->split_begin;
        folioi_state_rows state = chain != NULL ? partial_of(&w, chain, split)
                                  : first       ? w.s.total
                                                : w.s.partial;
        run_split(&w, &keys, split, &state);
        if (chain == NULL && !first)
            folioi_state_fold(&w.s.total, &state, w.num_rows, j->memory.v_dims);
    }
    if (chain != NULL) end_chain_item(&w, chain);
    else finish(&w, &w.s.total);
}

static void attend_worker(void *arg, int64_t worker)
{
    job *j = arg;
    int64_t heads = j->call->attention->num_kv_heads, units = j->schedule->num_items * heads;
    folioi_arena arena = {j->memory.workers + worker * j->memory.worker_bytes, 0};
    scratch s = take_scratch(&arena, j->memory.rows, j->memory.k_dims, j->memory.v_dims);
    /* the next one is taken early, so that its first keys can be on their way */
    int64_t unit = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
    while (unit < units) {
        int64_t next = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        run_item(j, unit, next, s);
        unit = next;
    }
}

bool folioi_cpu_takes_pairs(const folioi_call *call)
{
    const folio_tensors *t = &call->tensors;
    bool stored = call->cached && !call->append;
    return stored || (t->k.dtype == FOLIO_BF16 && t->v.dtype == FOLIO_BF16);
}

void folioi_cpu_attend(const folioi_call *call, const folioi_schedule *schedule)
{
    const folio_context *ctx = call->shape->ctx;
    const folio_attention_desc *a = call->attention;
    const folioi_cpu_kernels *kernels = ctx->kernels;
    job j = {
        .call = call,
        .schedule = schedule,
        .kernels = kernels,
        .kernel = folioi_attend_choose(a, folioi_cpu_takes_pairs(call)),
        .memory = folioi_cpu_memory_of(&schedule->limits, a, call->workspace),
    };
    atomic_init(&j.next, 0);
    if (schedule->num_chains > 0)
        memset(j.memory.arrived, 0,
               (size_t)(schedule->num_chains * a->num_kv_heads) * sizeof *j.memory.arrived);
    int64_t units = schedule->num_items * a->num_kv_heads;
    folioi_parallel(ctx, min_i64(units, schedule->num_workers), attend_worker, &j);
    rows_store_padding(call);
}

typedef struct {
    const folioi_cpu_kernels *kernels;
    const folioi_kv_layer *layer;
    const folioi_kv_tensors *tensors;
    const int64_t *slots;
    int64_t num_slots;
    int32_t heads_per_share, head_shares; /* kv heads of a share; shares for the same rows */
    atomic_llong next;
} write_job;

/* Where the rows of a share begin: near `row`, where a sub-tile of slots does, so that no two workers write one. */
static int64_t first_write_row(const write_job *j, int64_t row)
{
    if (row == 0 || row >= j->num_slots) return min_i64(row, j->num_slots);
    for (int64_t i = row; i < min_i64(row + WRITE_ROWS, j->num_slots); i++)
        if (j->slots[i] >= 0 && j->slots[i] % WRITE_ROWS == 0) return i;
    return row;
}

static void write_worker(void *arg, int64_t worker)
{
    write_job *j = arg;
    int32_t heads = j->layer->format->desc.num_kv_heads;
    (void)worker;
    for (;;) {
        int64_t unit = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        int64_t row = unit / j->head_shares * WRITE_ROWS,
                head = unit % j->head_shares * j->heads_per_share;
        if (row >= j->num_slots) return;
        folioi_kv_share share = {
            .begin = first_write_row(j, row),
            .end = first_write_row(j, row + WRITE_ROWS),
            .head_begin = (int32_t)head,
            .head_end = (int32_t)min_i64(head + j->heads_per_share, heads),
        };
        j->kernels->write(j->layer, j->tensors, j->slots, &share);
    }
}

folio_status folioi_cpu_write(const folio_context *ctx, const folioi_kv_layer *layer,
                              const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                              void *stream)
{
    (void)stream;
    const folio_kv_cache_desc *d = &layer->format->desc;
    int64_t rows = ceil_div(num_slots, WRITE_ROWS), heads = d->num_kv_heads;
    int64_t bytes = num_slots * heads * ((int64_t)d->k_head_size + d->v_head_size) *
                    (int64_t)folio_dtype_size(t->k.dtype);
    int64_t workers = max_i64(1, min_i64(bytes / WRITE_BYTES, ctx->num_threads));
    /* few rows are shared out by their heads too */
    int64_t slices = min_i64(ceil_div(workers, max_i64(rows, 1)), heads);
    int64_t step = ceil_div(heads, slices);
    write_job j = {.kernels = ctx->kernels,
                   .layer = layer,
                   .tensors = t,
                   .slots = slots,
                   .num_slots = num_slots,
                   .heads_per_share = (int32_t)step,
                   .head_shares = (int32_t)ceil_div(heads, step)};
    atomic_init(&j.next, 0);
    folioi_parallel(ctx, min_i64(rows * j.head_shares, workers), write_worker, &j);
    return FOLIO_OK;
}
