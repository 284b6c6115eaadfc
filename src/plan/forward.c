/* forward.c: checks one layer's call against the plan, then calls the backend. Nothing is written before
 * every check has passed. */
#include "cache/kv_cache.h"
#include "core/dtype.h"
#include "core/rotary.h"
#include "core/tensor.h"
#include "plan/plan.h"

#include <math.h>

static bool is_paged(folio_attention_type type)
{
    return type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
}

/* Rows the tensors must have: the batch's, or the plan's limits under FOLIO_PLAN_GRAPH. */
static int64_t rows_expected(const folio_plan *plan, bool encoder_rows, int64_t batch_rows)
{
    const folio_plan_desc *d = &plan->shape.desc;
    if (!(d->flags & FOLIO_PLAN_GRAPH)) return batch_rows;
    return encoder_rows ? d->max_encoder_tokens : d->max_query_tokens;
}

static folio_status check_query(const folio_plan *plan, folioi_call *call)
{
    const folio_attention_desc *a = call->attention;
    folio_tensors *t = &call->tensors;
    bool encoder = call->type == FOLIO_ATTENTION_ENCODER;
    call->num_rows = plan->facts[call->type].query_rows;
    int64_t rows = rows_expected(plan, encoder, call->num_rows);
    TRY(folioi_tensor_resolve(&t->q, "q", a->dtype, a->num_heads, a->k_head_size, rows));
    REQUIRE(t->q.dtype == a->dtype, "q: dtype is %s, the attention's is %s",
            folio_dtype_name(t->q.dtype), folio_dtype_name(a->dtype));
    bool f64 = plan->shape.ctx->backend->f64_out && t->out.dtype == FOLIO_F64;
    TRY(folioi_tensor_resolve(&t->out, "out", f64 ? FOLIO_F64 : a->dtype, a->num_heads,
                              a->v_head_size, rows));
    REQUIRE(f64 || t->out.dtype == a->dtype, "out: dtype is %s, the attention's is %s",
            folio_dtype_name(t->out.dtype), folio_dtype_name(a->dtype));
    if (t->lse == NULL) return FOLIO_OK;
    return folioi_lse_resolve(t->lse, &t->lse_token_stride, &t->lse_head_stride, a->num_heads,
                              rows);
}

/* A sequence with more queries than keys brings none: k and v, which have a row for each row of q, are absent. */
static folio_status check_only_reads(const folio_plan *plan, const folioi_call *call)
{
    int64_t seq = plan->facts[call->type].only_reads;
    if (seq < 0) return FOLIO_OK;
    const folioi_seq *s = batch_seq(call->batch, seq);
    REQUIRE(call->tensors.k.data == NULL && call->tensors.v.data == NULL && !call->append,
            "seq %lld: query_len %d is more than seq_len %d; in a batch with such a sequence, k "
            "and v must be NULL and FOLIO_KV_APPEND must not be set",
            (long long)seq, s->query_len, s->seq_len);
    return FOLIO_OK;
}

static folio_status check_new_kv(const folio_plan *plan, folioi_call *call, bool has_cache)
{
    const folio_attention_desc *a = call->attention;
    folio_tensors *t = &call->tensors;
    bool encoder =
        call->type == FOLIO_ATTENTION_ENCODER || call->type == FOLIO_ATTENTION_ENCODER_DECODER;
    int64_t batch_rows = plan->facts[call->type].new_rows;
    TRY(check_only_reads(plan, call));
    if (a->v_in_k) {
        TRY(folioi_check_no_v(&t->v));
        t->v = t->k; /* V is the first numbers of its rows */
    }
    REQUIRE((t->k.data == NULL) == (t->v.data == NULL), "%s is given without %s",
            t->k.data != NULL ? "k" : "v", t->k.data != NULL ? "v" : "k");
    if (t->k.data == NULL) {
        REQUIRE(t->k.tokens == 0 && t->v.tokens == 0,
                "k and v: data is NULL, tokens are %lld and %lld", (long long)t->k.tokens,
                (long long)t->v.tokens);
        REQUIRE(batch_rows == 0 || has_cache,
                "k and v are NULL; without a cache to read them from, %lld rows are needed",
                (long long)batch_rows);
        REQUIRE(batch_rows == 0 || !call->append,
                "k and v are NULL; FOLIO_KV_APPEND needs them, %lld rows each",
                (long long)batch_rows);
        return FOLIO_OK;
    }
    int64_t rows = rows_expected(plan, encoder, batch_rows);
    TRY(folioi_tensor_resolve(&t->k, "k", a->dtype, a->num_kv_heads, a->k_head_size, rows));
    if (a->v_in_k) t->v = t->k;
    else TRY(folioi_tensor_resolve(&t->v, "v", a->dtype, a->num_kv_heads, a->v_head_size, rows));
    if (!call->cached || call->append) return FOLIO_OK;
    TRY(folioi_plan_check_writes(plan, call->type));
    call->stores = true;
    if (call->batch != NULL) call->slots = folioi_batch_slots(call->batch, call->type);
    call->num_slots = batch_rows;
    return FOLIO_OK;
}

/* Block tables of a pool's sequences are those of one cache, where the pool knows it. */
static folio_status check_origin(const folioi_call *call, const folio_kv_cache *cache)
{
    if (call->batch == NULL || call->batch->num_taken == 0) return FOLIO_OK;
    const folioi_origin *o = &call->batch->origin;
    bool cross = call->type == FOLIO_ATTENTION_ENCODER_DECODER;
    const folio_kv_cache *own = cross ? o->cross_cache : o->cache;
    REQUIRE(own == NULL || own == cache, "the batch is of layer group %d, but the cache is not %s",
            o->group, cross ? "its pool's cross_cache" : "that group's cache");
    return FOLIO_OK;
}

static folio_status check_cache(const folio_plan *plan, const folioi_call *call,
                                const folio_kv_cache *cache, int32_t layer)
{
    TRY(folioi_kv_cache_check_layer(cache, layer));
    bool on_device = plan->shape.ctx->backend->on_device;
    bool is_wrapped =
        cache->memory == NULL && cache->holder == NULL; /* only its owner knows where */
    REQUIRE(cache->format.on_device == on_device || (is_wrapped && !on_device),
            "the cache is of backend %s, the plan of backend %s: their memory is not the same",
            cache->ctx->backend->name, plan->shape.ctx->backend->name);
    TRY(check_origin(call, cache));
    const folio_attention_desc *a = call->attention;
    const folio_kv_cache_desc *c = &cache->format.desc;
    const folio_plan_desc *d = &plan->shape.desc;
    REQUIRE(c->num_kv_heads == a->num_kv_heads && c->k_head_size == a->k_head_size &&
                c->v_head_size == a->v_head_size,
            "the cache has %d kv heads of sizes %d and %d, the attention %d of %d and %d",
            c->num_kv_heads, c->k_head_size, c->v_head_size, a->num_kv_heads, a->k_head_size,
            a->v_head_size);
    REQUIRE(c->v_in_k == a->v_in_k, "v_in_k is %d in the cache and %d in the attention", c->v_in_k,
            a->v_in_k);
    REQUIRE(c->dtype == a->kv_dtype, "the cache holds %s, the attention's kv_dtype is %s",
            folio_dtype_name(c->dtype), folio_dtype_name(a->kv_dtype));
    REQUIRE(c->block_size == d->block_size, "the cache's block size is %d, the plan's %d",
            c->block_size, d->block_size);
    int64_t blocks = call->type == FOLIO_ATTENTION_DECODER ? d->num_blocks : d->cross_num_blocks;
    REQUIRE(c->num_blocks >= blocks, "the cache has %lld blocks, the plan was made for %lld",
            (long long)c->num_blocks, (long long)blocks);
    return FOLIO_OK;
}

/* Are all keys there that this call needs? */
static folio_status check_keys(const folio_plan *plan, const folioi_call *call)
{
    const folioi_plan_facts *f = &plan->facts[call->type];
    const char *what = folio_attention_type_name(call->type);
    bool cross = call->type == FOLIO_ATTENTION_ENCODER_DECODER;
    if (!is_paged(call->type)) return FOLIO_OK;
    if (!call->cached) {
        REQUIRE(f->with_context < 0,
                "seq %lld: %s attention has a context of cached keys, but no "
                "cache is given",
                (long long)f->with_context, what);
        return FOLIO_OK;
    }
    int64_t lacking = call->append ? f->context_without_table : f->without_table;
    REQUIRE(lacking < 0, "seq %lld: %s attention through a cache needs %s", (long long)lacking,
            what, cross ? "cross_block_table" : "block_table");
    return FOLIO_OK;
}

/* Strides that were all left 0: [sequence][head][query][key] without gaps. */
static bool fill_bias_strides(folio_bias *b)
{
    int64_t stride = 1;
    for (int i = 0; i < 4; i++)
        if (b->strides[i] != 0) return true;
    for (int i = 3; i >= 0; i--) {
        b->strides[i] = stride;
        if (!checked_mul(stride, b->dims[i], &stride)) return false;
    }
    return true;
}

/* Bytes from the first number past the last, with the strides in force. */
static int64_t bias_bytes(const folio_bias *b)
{
    int64_t last = 0;
    if (b->data == NULL) return 0;
    for (int i = 0; i < 4; i++) last += (b->dims[i] - 1) * b->strides[i];
    return (last + 1) * (int64_t)folio_dtype_size(b->dtype);
}

static folio_status check_bias(const folio_plan *plan, folioi_call *call)
{
    static const char *const names[4] = {"sequence", "head", "query", "key"};
    folio_bias *b = &call->tensors.bias;
    if (b->data == NULL) return FOLIO_OK;
    REQUIRE(dtype_is_query(b->dtype), "bias: dtype %d (%s) is not one of f32, f16, bf16",
            (int)b->dtype, folio_dtype_name(b->dtype));
    int64_t elem = (int64_t)folio_dtype_size(b->dtype), extent = 0, span;
    REQUIRE((uintptr_t)b->data % (uintptr_t)elem == 0, "bias: data is not aligned to %lld bytes",
            (long long)elem);
    const folioi_plan_facts *f = &plan->facts[call->type];
    const int64_t need[4] = {plan->num_seqs, call->attention->num_heads, f->max_query_len,
                             f->max_key_len};
    for (int i = 0; i < 4; i++)
        REQUIRE(b->dims[i] == 1 || (b->dims[i] > 0 && b->dims[i] >= need[i]),
                "bias: dims[%d] (%s) is %lld; %s %lld or more, or 1, which is broadcast", i,
                names[i], (long long)b->dims[i],
                plan->on_device && i >= 2 ? "the plan's limits need" : "the batch needs",
                (long long)max_i64(need[i], 1));
    REQUIRE(fill_bias_strides(b), "bias: dims %lld x %lld x %lld x %lld exceed the largest size",
            (long long)b->dims[0], (long long)b->dims[1], (long long)b->dims[2],
            (long long)b->dims[3]);
    for (int i = 0; i < 4; i++) {
        if (b->dims[i] == 1) b->strides[i] = 0;
        REQUIRE(b->dims[i] == 1 || b->strides[i] != 0,
                "bias: strides[%d] (%s) is 0 and dims[%d] is %lld; set the dim to 1 to broadcast",
                i, names[i], i, (long long)b->dims[i]);
        REQUIRE(checked_mul(b->dims[i], b->strides[i], &span) &&
                    checked_add(extent, span, &extent) && extent < MAX_EXTENT / elem,
                "bias: strides[%d] (%s) = %lld is negative or exceeds the largest size", i,
                names[i], (long long)b->strides[i]);
    }
    return FOLIO_OK;
}

/* Every row's position in the rotary's table; a device's own array is not looked at. */
static folio_status check_positions(const folio_plan *plan, const folioi_call *call)
{
    const folioi_plan_facts *f = &plan->facts[call->type];
    const int64_t *given = call->tensors.positions;
    int64_t limit = call->rotation.num_positions;
    REQUIRE_ALIGNED(given, "positions");
    if (given == NULL) {
        REQUIRE(f->low_pos >= 0, "seq %lld: position %lld is negative; rotary needs at least 0",
                (long long)f->low_seq, (long long)f->low_pos);
        REQUIRE(f->high_pos < limit,
                "seq %lld: position %lld is outside [0, %lld), the positions of the rotary",
                (long long)f->high_seq, (long long)f->high_pos, (long long)limit);
        return FOLIO_OK;
    }
    if (plan->shape.ctx->backend->on_device) return FOLIO_OK;
    for (int64_t i = 0; i < call->batch->num_seqs; i++) {
        folioi_rows r = folioi_batch_rows(call->batch, i, call->type);
        for (int64_t row = r.query_row; r.key_len > 0 && row < r.query_row + r.query_len; row++)
            REQUIRE(given[row] >= 0 && given[row] < limit,
                    "positions[%lld] = %lld is outside [0, %lld), the positions of the rotary",
                    (long long)row, (long long)given[row], (long long)limit);
    }
    return FOLIO_OK;
}

static folio_status check_rotary(const folio_plan *plan, folioi_call *call)
{
    const folio_tensors *t = &call->tensors;
    REQUIRE(t->rotary != NULL || t->positions == NULL, "positions are given without rotary");
    if (t->rotary == NULL) return FOLIO_OK;
    if (call->type == FOLIO_ATTENTION_ENCODER_DECODER)
        FAIL(FOLIO_ERR_UNSUPPORTED,
             "cross attention has no rotary embedding: a key has no position there");
    const folio_attention_desc *a = call->attention;
    TRY(folioi_rotary_check(t->rotary, plan->shape.ctx, a->k_head_size,
                            a->v_in_k ? a->v_head_size : 0));
    call->rotation = t->rotary->rotation;
    return check_positions(plan, call);
}

static folio_status check_options(const folio_plan *plan, folioi_call *call)
{
    folio_tensors *t = &call->tensors;
    int32_t heads = call->attention->num_heads;
    if (t->slopes != NULL && call->type == FOLIO_ATTENTION_ENCODER_DECODER)
        FAIL(FOLIO_ERR_UNSUPPORTED, "cross attention has no ALiBi: a key has no position there");
    REQUIRE((uintptr_t)t->slopes % sizeof(float) == 0 && (uintptr_t)t->sinks % sizeof(float) == 0,
            "slopes or sinks is not aligned to %zu bytes", sizeof(float));
    /* a device's numbers are not looked at */
    bool host = !plan->shape.ctx->backend->on_device;
    for (int32_t h = 0; host && t->slopes != NULL && h < heads; h++)
        REQUIRE(isfinite(t->slopes[h]), "slopes[%d] is %g; it must be finite", h,
                (double)t->slopes[h]);
    for (int32_t h = 0; host && t->sinks != NULL && h < heads; h++)
        REQUIRE(t->sinks[h] < INFINITY, "sinks[%d] is %g; it must be finite or -inf", h,
                (double)t->sinks[h]);
    const folio_attention_desc *a = call->attention;
    TRY(folioi_scales_resolve(plan->shape.ctx, a->kv_dtype, a->num_kv_heads, a->v_in_k, &t->k_scale,
                              &t->k_head_scales, &t->v_scale, &t->v_head_scales));
    TRY(check_rotary(plan, call));
    return check_bias(plan, call);
}

/* What a call writes, then what it reads. */
enum { OUT, LSE, WORKSPACE, NUM_WRITTEN };
enum { Q = NUM_WRITTEN, K, V, SLOPES, SINKS, BIAS, POSITIONS, K_SCALES, V_SCALES, END_READ };
enum { CACHE = END_READ };
enum { NUM_PLACES = CACHE + 4 };

static folioi_place place_of(const char *name, const void *p, int64_t bytes)
{
    return (folioi_place){name, folioi_span_of(p, bytes)};
}

static void find_places(const folioi_call *call, size_t workspace_size,
                        folioi_place places[NUM_PLACES])
{
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    const folioi_kv_layer *l = &call->layer;
    static const folioi_kv_format no_cache;
    const folioi_kv_format *f = l->format != NULL ? l->format : &no_cache;
    int64_t heads = a->num_heads, heads_bytes = heads * (int64_t)sizeof(float);
    folioi_span lse =
        folioi_lse_span(t->lse, t->lse_token_stride, t->lse_head_stride, heads, t->out.tokens);
    places[OUT] = (folioi_place){"out", folioi_tensor_span(&t->out, heads, a->v_head_size)};
    places[LSE] = (folioi_place){"lse", lse};
    places[WORKSPACE] = place_of("run.workspace", call->workspace,
                                 call->foreign_workspace ? (int64_t)workspace_size : 0);
    places[Q] = (folioi_place){"q", folioi_tensor_span(&t->q, heads, a->k_head_size)};
    places[K] = (folioi_place){"k", folioi_tensor_span(&t->k, a->num_kv_heads, a->k_head_size)};
    places[V] = (folioi_place){"v", folioi_tensor_span(&t->v, a->num_kv_heads, a->v_head_size)};
    places[SLOPES] = place_of("slopes", t->slopes, heads_bytes);
    places[SINKS] = place_of("sinks", t->sinks, heads_bytes);
    places[BIAS] = place_of("bias", t->bias.data, bias_bytes(&t->bias));
    places[POSITIONS] =
        place_of("positions", t->positions, call->num_rows * (int64_t)sizeof *t->positions);
    int64_t scales_bytes = a->num_kv_heads * (int64_t)sizeof(float);
    places[K_SCALES] = place_of("k_head_scales", t->k_head_scales, scales_bytes);
    places[V_SCALES] = place_of("v_head_scales", t->v_head_scales, scales_bytes);
    places[CACHE] = place_of("the cache's K", l->k, f->k.bytes);
    places[CACHE + 1] = place_of("the cache's V", l->v, f->v.bytes);
    places[CACHE + 2] = place_of("the cache's k_scales", l->k_scales, f->k_scales.bytes);
    places[CACHE + 3] = place_of("the cache's v_scales", l->v_scales, f->v_scales.bytes);
}

/*
 * What is written shares no byte with anything else. out may be q: every row of a head is read before it is written, and
 * by nobody else. A call that stores k and v reads nothing else out of the cache: it would read what it has just stored.
 */
static folio_status check_apart(const folioi_call *call, const folio_kv_cache *cache,
                                size_t workspace_size)
{
    folioi_place places[NUM_PLACES];
    const folio_tensors *t = &call->tensors;
    find_places(call, workspace_size, places);
    if (call->attention->k_head_size == call->attention->v_head_size &&
        folioi_tensors_same(&t->q, &t->out))
        places[Q].span.extent = 0; /* out stands for both */
    REQUIRE(!folioi_spans_share(&places[OUT].span, &places[Q].span),
            "out and q share memory, or their rows interleave with different strides; out may be q "
            "itself, with its dtype, strides and head size");
    TRY(folioi_check_apart(places, NUM_WRITTEN, NUM_PLACES));
    if (!call->cached) return FOLIO_OK;
    return folioi_kv_cache_check_apart(cache, places, call->stores ? END_READ : NUM_WRITTEN);
}

static folio_status check_workspace(const folio_plan *plan, const folio_run *run, folioi_call *call)
{
    if (run->workspace == NULL) {
        REQUIRE(plan->room.workspace != NULL,
                "the plan was created with FOLIO_PLAN_NO_WORKSPACE and run.workspace is NULL");
        call->workspace = plan->room.workspace;
        return FOLIO_OK;
    }
    REQUIRE((uintptr_t)run->workspace % FOLIOI_ALIGN == 0,
            "run: workspace is not aligned to %d bytes", FOLIOI_ALIGN);
    REQUIRE(run->workspace_size >= plan->room.workspace_size,
            "run: workspace has %zu bytes, the plan needs %zu", run->workspace_size,
            plan->room.workspace_size);
    call->workspace = run->workspace;
    call->foreign_workspace = true;
    return FOLIO_OK;
}

/* Every check of a call; nothing is run or written. */
static folio_status resolve(const folio_plan *plan, folio_kv_cache *cache, int32_t layer,
                            const folio_tensors *tensors, const folio_run *run, folioi_call *call)
{
    folio_run r;
    if (!plan->on_device) TRY(folioi_batch_check_stamps(plan->batch));
    STRUCT_IN(call->tensors, tensors, "folio_tensors");
    TRY(folioi_run_in(plan->shape.ctx, run, &r));
    REQUIRE((call->tensors.flags & ~FOLIO_KV_APPEND) == 0, "tensors: flags 0x%x has unknown bits",
            call->tensors.flags);
    call->append = (call->tensors.flags & FOLIO_KV_APPEND) != 0;
    call->cached = cache != NULL && is_paged(call->type);
    if (call->cached) TRY(check_cache(plan, call, cache, layer));
    TRY(check_keys(plan, call));
    TRY(check_query(plan, call));
    TRY(check_new_kv(plan, call, call->cached));
    TRY(check_options(plan, call));
    TRY(check_workspace(plan, &r, call));
    if (call->cached) call->layer = cache->layers[layer];
    call->stream = r.stream;
    return check_apart(call, cache, plan->room.workspace_size);
}

static folioi_call call_of(const folio_plan *plan, int32_t attention, folio_attention_type type,
                           int32_t layer)
{
    return (folioi_call){.shape = &plan->shape,
                         .plan_state = plan->room.state,
                         .batch = plan->batch,
                         .attention_index = attention,
                         .attention = &plan->shape.attentions[attention]->desc,
                         .type = type,
                         .layer_index = layer};
}

folio_status folio_attention_check(const folio_plan *plan, int32_t attention,
                                   folio_attention_type type, folio_kv_cache *cache, int32_t layer,
                                   const folio_tensors *tensors, const folio_run *run,
                                   folio_plan_info *info)
{
    TRY(folioi_plan_find(plan, attention, type));
    folioi_call call = call_of(plan, attention, type, layer);
    TRY(resolve(plan, cache, layer, tensors, run, &call));
    if (info == NULL) return FOLIO_OK;
    folio_plan_info i = {.kernel = "", .fallback = ""};
    plan->shape.ctx->backend->plan_describe(plan->room.state, attention, type, &call, &i);
    return folioi_struct_out(info, &i, sizeof i, "folio_plan_info");
}

folio_status folio_attention_forward(const folio_plan *plan, int32_t attention,
                                     folio_attention_type type, folio_kv_cache *cache,
                                     int32_t layer, const folio_tensors *tensors,
                                     const folio_run *run)
{
    TRY(folioi_plan_find(plan, attention, type));
    folioi_call call = call_of(plan, attention, type, layer);
    TRY(resolve(plan, cache, layer, tensors, run, &call));
    /* alone in the plan's own workspace if that is what it has */
    bool is_shared = !call.foreign_workspace && plan->room.workspace_size > 0;
    if (is_shared) TRY(folioi_plan_enter_workspace(plan, call.stream));
    folio_status status = plan->shape.ctx->backend->forward(&call);
    if (status == FOLIO_OK && (plan->shape.desc.flags & FOLIO_PLAN_NOTE_BAD))
        folioi_plan_note_bad(plan, &call);
    if (is_shared) folioi_plan_leave_workspace(plan);
    return status;
}
