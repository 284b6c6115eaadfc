/*
 * attend.c: attention in one call. Makes an attention, a batch and a plan for one step and one layer, runs
 * them and frees them. All their checks apply.
 */
#include "batch/batch.h"
#include "core/checked.h"
#include "core/dtype.h"
#include "core/tensor.h"

typedef struct {
    folio_context *ctx;
    folio_attend_args a;
    folio_run run;
    folio_kv_cache_desc cache; /* zeros: none */
    folio_attention *attention;
    folio_batch *batch;
    folio_plan *plan;
    int64_t longest; /* sequence */
} one_step;

/* The arguments as far as no part looks at them; head counts and sizes from the cache. */
static folio_status check_args(one_step *o)
{
    folio_attend_args *a = &o->a;
    REQUIRE(dtype_is_query(a->q.dtype), "attend: q.dtype %d (%s) is not one of f32, f16, bf16",
            (int)a->q.dtype, folio_dtype_name(a->q.dtype));
    REQUIRE(a->q.tokens >= 0, "attend: q.tokens is %lld; it must be at least 0",
            (long long)a->q.tokens);
    REQUIRE(a->num_seqs >= 0 && a->num_seqs <= INT32_MAX,
            "attend: num_seqs is %lld, outside [0, 2147483647]", (long long)a->num_seqs);
    REQUIRE(a->num_seqs > 0 || a->q.tokens == 0, "attend: num_seqs is 0, yet q has %lld rows",
            (long long)a->q.tokens);
    REQUIRE_ALIGNED(a->query_start, "attend: query_start");
    REQUIRE_ALIGNED(a->seq_lens, "attend: seq_lens");
    REQUIRE_ALIGNED(a->block_tables, "attend: block_tables");
    if (a->query_start == NULL)
        REQUIRE(a->num_seqs == 0 || a->q.tokens % a->num_seqs == 0,
                "attend: q has %lld rows for %lld sequences; lengths that differ need query_start",
                (long long)a->q.tokens, (long long)a->num_seqs);
    else
        REQUIRE(a->query_start[0] == 0 && a->query_start[a->num_seqs] == a->q.tokens,
                "attend: query_start goes from %d to %d, q has rows [0, %lld)", a->query_start[0],
                a->query_start[a->num_seqs], (long long)a->q.tokens);
    REQUIRE(a->block_tables == NULL || a->cache != NULL,
            "attend: block_tables are given without a cache");
    REQUIRE(a->block_tables == NULL || (a->row_stride >= 0 && a->row_stride <= INT32_MAX),
            "attend: row_stride is %lld, outside [0, 2147483647]", (long long)a->row_stride);
    if (a->cache == NULL) return FOLIO_OK;
    folio_kv_cache_view view = {.struct_size = sizeof view};
    TRY(folio_kv_cache_get_view(a->cache, a->layer, &view));
    o->cache = *view.desc;
    if (a->num_kv_heads == 0) a->num_kv_heads = o->cache.num_kv_heads;
    if (a->k_head_size == 0) a->k_head_size = o->cache.k_head_size;
    if (a->v_head_size == 0) a->v_head_size = o->cache.v_head_size;
    return FOLIO_OK;
}

static folio_status make_attention(one_step *o)
{
    const folio_attend_args *a = &o->a;
    folio_attention_desc d =
        FOLIO_WITH(folio_attention_desc, .num_heads = a->num_heads, .num_kv_heads = a->num_kv_heads,
                   .k_head_size = a->k_head_size, .v_head_size = a->v_head_size,
                   .dtype = a->q.dtype, .kv_dtype = o->cache.dtype, .scale = a->scale,
                   .soft_cap = a->soft_cap, .windowed = a->windowed, .window_left = a->window_left,
                   .window_right = a->window_right, .v_in_k = o->cache.v_in_k);
    return folio_attention_create(o->ctx, &d, &o->attention);
}

static folio_status make_batch(one_step *o)
{
    const folio_attend_args *a = &o->a;
    folio_batch_desc d = FOLIO_WITH(folio_batch_desc, .cache = a->cache, .max_seqs = a->num_seqs,
                                    .max_query_tokens = a->q.tokens);
    TRY(folio_batch_create(o->ctx, &d, &o->batch));
    for (int64_t i = 0; i < a->num_seqs; i++) {
        folio_batch_seq s = {.struct_size = sizeof s, .causality = a->causality};
        s.query_len = a->query_start == NULL ? a->q.tokens / a->num_seqs
                                             : (int64_t)a->query_start[i + 1] - a->query_start[i];
        s.seq_len = a->seq_lens != NULL ? a->seq_lens[i] : s.query_len;
        s.padding = s.seq_len == 0;
        REQUIRE(s.seq_len < 1 || s.query_len <= s.seq_len,
                "attend: seq %lld: %lld rows of q and seq_len %lld; more rows than keys need a "
                "batch",
                (long long)i, (long long)s.query_len, (long long)s.seq_len);
        if (a->block_tables != NULL) {
            s.block_table = a->block_tables + i * a->row_stride;
            s.num_blocks = a->row_stride;
        }
        TRY(folio_batch_add(o->batch, &s));
        o->longest = max_i64(o->longest, s.seq_len);
    }
    return FOLIO_OK;
}

static folio_status make_plan(one_step *o)
{
    folio_attention *list[] = {o->attention};
    folio_plan_desc d = FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 1,
                                   .cache = o->a.cache, .max_seqs = max_i64(o->a.num_seqs, 1),
                                   .max_query_tokens = max_i64(o->batch->num_query_tokens, 1),
                                   .max_seq_len = max_i64(o->longest, 1));
    TRY(folio_plan_create(o->ctx, &d, &o->plan));
    return folio_plan_update(o->plan, o->batch, &o->run);
}

static folio_status run_layer(one_step *o)
{
    const folio_attend_args *a = &o->a;
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = a->q, .k = a->k, .v = a->v, .out = a->out, .lse = a->lse,
                   .slopes = a->slopes, .sinks = a->sinks, .k_scale = a->k_scale,
                   .v_scale = a->v_scale, .rotary = a->rotary, .positions = a->positions,
                   .k_head_scales = a->k_head_scales, .v_head_scales = a->v_head_scales);
    return folio_attention_forward(o->plan, 0, FOLIO_ATTENTION_DECODER, a->cache, a->layer, &t,
                                   &o->run);
}

folio_status folio_attend(folio_context *ctx, const folio_attend_args *args, const folio_run *run)
{
    one_step o = {.ctx = ctx};
    REQUIRE(ctx != NULL, "folio_attend: ctx is NULL");
    STRUCT_IN(o.a, args, "folio_attend_args");
    TRY(folioi_run_in(ctx, run, &o.run));
    o.run.workspace = NULL; /* nobody outside knows its size */
    o.run.workspace_size = 0;
    TRY(check_args(&o));
    folio_status status = make_attention(&o);
    if (status == FOLIO_OK) status = make_batch(&o);
    if (status == FOLIO_OK) status = make_plan(&o);
    if (status == FOLIO_OK) status = run_layer(&o);
    if (o.plan != NULL) { /* the plan is this call's own: a device is done with it when it goes */
        folio_status waited = folio_run_wait(ctx, &o.run);
        if (status == FOLIO_OK) status = waited;
    }
    folio_plan_destroy(o.plan);
    folio_batch_destroy(o.batch);
    folio_attention_destroy(o.attention);
    return status;
}
