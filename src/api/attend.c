/*
 * attend.c: attention in one call. Makes an attention and a plan that grows, updates it with one step, runs one layer and
 * frees them. All their checks apply.
 */
#include "batch/batch.h"
#include "cache/kv_cache.h"
#include "core/tensor.h"

typedef struct {
    folio_attention_desc attention;
    folio_attention_type type;
    folio_step step;
    folio_kv_cache *cache;
    int32_t layer;
    folio_tensors tensors;
    folio_run run;
} one_step;

/* What the cache and q say. */
static folio_status complete_attention(one_step *o)
{
    folio_attention_desc *a = &o->attention;
    if (a->dtype == 0) a->dtype = o->tensors.q.dtype;
    REQUIRE(a->dtype != 0, "attend: q.dtype is 0; it must be given: f32, f16 or bf16");
    if (o->cache == NULL) return FOLIO_OK;
    const folio_kv_cache_desc *c = &o->cache->format.desc;
    if (a->num_kv_heads == 0) a->num_kv_heads = c->num_kv_heads;
    if (a->k_head_size == 0) a->k_head_size = c->k_head_size;
    if (a->v_head_size == 0) a->v_head_size = c->v_head_size;
    if (a->kv_dtype == 0) a->kv_dtype = c->dtype;
    if (a->v_in_k == 0) a->v_in_k = c->v_in_k;
    return FOLIO_OK;
}

/* The rows of the step are those of q: checked before any memory is made for them. */
static folio_status complete_step(one_step *o)
{
    folio_step *s = &o->step;
    int64_t rows = o->tensors.q.tokens;
    REQUIRE(s->on_device == 0, "attend: step.on_device is %d; its arrays must lie in host memory",
            s->on_device);
    REQUIRE(o->cache != NULL ||
                (s->table.kind == FOLIO_TABLE_NONE && s->cross_table.kind == FOLIO_TABLE_NONE),
            "attend: a table is given without a cache");
    if (o->type != FOLIO_ATTENTION_ENCODER) {
        REQUIRE(rows >= 0, "attend: q.tokens is %lld; it must be at least 0", (long long)rows);
        REQUIRE(s->num_query_tokens == 0 || s->num_query_tokens == rows,
                "attend: step.num_query_tokens is %lld, q has %lld rows",
                (long long)s->num_query_tokens, (long long)rows);
        s->num_query_tokens = rows;
    }
    TRY(folioi_step_check_rows(s));
    bool is_given = s->query_start != NULL && s->num_seqs > 0 && o->type != FOLIO_ATTENTION_ENCODER;
    REQUIRE(!is_given || s->query_start[s->num_seqs] == rows,
            "attend: step.query_start[%lld] is %d, q has %lld rows", (long long)s->num_seqs,
            s->query_start[s->num_seqs], (long long)rows);
    return FOLIO_OK;
}

static folio_status run_layer(folio_plan *plan, const one_step *o)
{
    TRY(folio_plan_update_step(plan, &o->step, &o->run));
    return folio_attention_forward(plan, 0, o->type, o->cache, o->layer, &o->tensors, &o->run);
}

static folio_status run_step(folio_context *ctx, folio_attention *attention, const one_step *o)
{
    folio_plan *plan;
    folio_attention *list[] = {attention};
    const uint32_t types = FOLIO_ATTENTION_BIT(o->type);
    folio_plan_desc d = FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 1,
                                   .types = &types, .cache = o->cache, .cross_cache = o->cache);
    TRY(folio_plan_create(ctx, &d, &plan));
    folio_status status = run_layer(plan, o);
    /* a device must be done with the plan when that goes */
    folio_status waited = folio_run_wait(ctx, &o->run);
    folio_plan_destroy(plan);
    return status != FOLIO_OK ? status : waited;
}

folio_status folio_attend(folio_context *ctx, const folio_attention_desc *attention,
                          folio_attention_type type, const folio_step *step, folio_kv_cache *cache,
                          int32_t layer, const folio_tensors *tensors, const folio_run *run)
{
    one_step o = {.type = type, .cache = cache, .layer = layer};
    REQUIRE(ctx != NULL, "folio_attend: ctx is NULL");
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    STRUCT_IN(o.attention, attention, "folio_attention_desc");
    STRUCT_IN(o.step, step, "folio_step");
    STRUCT_IN(o.tensors, tensors, "folio_tensors");
    TRY(folioi_run_in(ctx, run, &o.run));
    o.run.workspace = NULL; /* nobody outside knows its size */
    o.run.workspace_size = 0;
    TRY(complete_attention(&o));
    TRY(complete_step(&o));
    o.attention.struct_size = sizeof o.attention;
    o.step.struct_size = sizeof o.step;
    folio_attention *made;
    TRY(folio_attention_create(ctx, &o.attention, &made));
    folio_status status = run_step(ctx, made, &o);
    folio_attention_destroy(made);
    return status;
}
