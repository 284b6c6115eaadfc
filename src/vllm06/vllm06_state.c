/* vllm06_state.c: the state: a context, the plans that layers of one kind share, and layers. */
#include "cache/kv_cache.h"
#include "vllm06/vllm06.h"

#include <math.h>
#include <string.h>

folio_status folio_vllm06_state_create(const char *compute, const folio_context_desc *desc,
                                       folio_vllm06_state **out)
{
    REQUIRE(out != NULL, "folio_vllm06_state_create: out is NULL");
    *out = NULL;
    folio_context_desc d = {.struct_size = sizeof d};
    if (desc != NULL) STRUCT_IN(d, desc, "folio_context_desc");
    d.struct_size = sizeof d;
    d.backend = compute;
    folio_context *ctx;
    TRY(folio_context_create(&d, &ctx));
    return folioi_vllm06_state_over(ctx, out);
}

folio_status folioi_vllm06_state_over(folio_context *ctx, folio_vllm06_state **out)
{
    void *memory;
    folio_status status =
        folioi_alloc(&ctx->allocator, sizeof(folio_vllm06_state), "a state", &memory);
    if (status != FOLIO_OK) {
        folio_context_destroy(ctx);
        return status;
    }
    *out = memory;
    refs_init(&(*out)->refs);
    (*out)->ctx = ctx;
    return FOLIO_OK;
}

static void drop_plan(folio_context *ctx, folioi_vllm06_plan *p)
{
    folio_plan_destroy(p->plan);
    folio_batch_destroy(p->batch);
    folio_attention_destroy(p->attention);
    folioi_array_free(&ctx->allocator, &p->asked);
    folioi_free(&ctx->allocator, p, sizeof *p);
}

void folioi_vllm06_drop_plans(folio_context *ctx, folioi_vllm06_plan *plans)
{
    while (plans != NULL) {
        folioi_vllm06_plan *p = plans;
        plans = p->next;
        drop_plan(ctx, p);
    }
}

void folio_vllm06_state_destroy(folio_vllm06_state *state)
{
    if (state == NULL || !refs_release(&state->refs)) return;
    folio_context *ctx = state->ctx;
    folioi_vllm06_drop_plans(ctx, state->plans);
    folioi_vllm06_drop_caches(state);
    folioi_array_free(&ctx->allocator, &state->slots);
    folioi_array_free(&ctx->allocator, &state->asking);
    folioi_array_free(&ctx->allocator, &state->sums);
    folioi_free(&ctx->allocator, state, sizeof *state);
    folio_context_destroy(ctx);
}

folio_context *folio_vllm06_state_context(folio_vllm06_state *state)
{
    return state != NULL ? state->ctx : NULL;
}

static bool same_layer(const folio_attention_desc *a, const folio_attention_desc *b)
{
    return a->num_heads == b->num_heads && a->num_kv_heads == b->num_kv_heads &&
           a->k_head_size == b->k_head_size && a->dtype == b->dtype && a->kv_dtype == b->kv_dtype &&
           a->scale == b->scale && a->soft_cap == b->soft_cap && a->windowed == b->windowed &&
           a->window_left == b->window_left;
}

folio_status folioi_vllm06_find_plan(folio_vllm06_state *state, folio_vllm06_metadata *graph,
                                     const folio_attention_desc *desc, folio_attention_type type,
                                     const folio_kv_cache *cache, folioi_vllm06_which which,
                                     folioi_vllm06_plan **out)
{
    folioi_vllm06_plan **plans = graph != NULL ? &graph->plans : &state->plans;
    int32_t block_size = cache != NULL ? cache->format.desc.block_size : 0;
    int64_t num_blocks = cache != NULL ? cache->format.desc.num_blocks : 0;
    for (folioi_vllm06_plan *p = *plans; p != NULL; p = p->next) {
        *out = p;
        if (p->type == type && p->which == which && p->block_size == block_size &&
            p->num_blocks == num_blocks && same_layer(&p->desc, desc))
            return FOLIO_OK;
    }
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof **out, "a shared plan", &memory));
    folioi_vllm06_plan *p = memory;
    p->desc = *desc;
    p->type = type;
    p->which = which;
    p->block_size = block_size;
    p->num_blocks = num_blocks;
    if (graph != NULL) {
        p->graph_seqs = graph->num_seqs;
        p->graph_len = graph->graph_len;
    }
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = cache != NULL ? block_size : 1};
    folio_status status = folio_attention_create(state->ctx, desc, &p->attention);
    if (status == FOLIO_OK) status = folio_batch_create(state->ctx, &b, &p->batch);
    if (status != FOLIO_OK) {
        drop_plan(state->ctx, p);
        return status;
    }
    p->next = *plans;
    *plans = p;
    *out = p;
    return FOLIO_OK;
}

/* Twice what is needed, so that a plan is seldom made again; the first at once what is needed. */
static int64_t grown(int64_t had, int64_t need)
{
    return need > had ? max_i64(need, 2 * had) : had;
}

/* What a plan needs for the batch it has, and what it had before. */
static folio_status limits_of(const folioi_vllm06_plan *p, folio_plan_desc *out)
{
    folio_batch_info s = {.struct_size = sizeof s};
    TRY(folio_batch_get_info(p->batch, &s));
    folio_plan_desc d = p->limits;
    d.struct_size = sizeof d;
    d.max_seqs = grown(d.max_seqs, max_i64(s.num_seqs, 1));
    d.max_query_tokens = grown(d.max_query_tokens, max_i64(s.num_query_tokens, 1));
    d.max_seq_len = grown(d.max_seq_len, max_i64(max_i64(s.max_seq_len, s.max_encoder_len), 1));
    d.max_encoder_tokens = grown(d.max_encoder_tokens, s.num_encoder_tokens);
    if (p->graph_len > 0) {
        d.max_seqs = d.max_query_tokens = p->graph_seqs;
        d.max_seq_len = p->graph_len;
        d.max_query_len = 1;
        d.flags = FOLIO_PLAN_GRAPH;
    }
    *out = d;
    return FOLIO_OK;
}

static folio_status fit_plan(folio_vllm06_state *state, folioi_vllm06_plan *p, const folio_run *run)
{
    folio_plan_desc d;
    TRY(limits_of(p, &d));
    if (p->plan != NULL && d.max_seqs == p->limits.max_seqs &&
        d.max_query_tokens == p->limits.max_query_tokens &&
        d.max_seq_len == p->limits.max_seq_len &&
        d.max_encoder_tokens == p->limits.max_encoder_tokens)
        return FOLIO_OK;
    folio_attention *list[] = {p->attention};
    const uint32_t types[] = {FOLIO_ATTENTION_BIT(p->type)};
    d.block_size = p->block_size;
    d.num_blocks = p->num_blocks;
    folio_plan_desc with_lists = d;
    with_lists.attentions = list;
    with_lists.types = types;
    with_lists.num_attentions = 1;
    folio_plan *plan;
    TRY(folio_plan_create(state->ctx, &with_lists, &plan));
    if (p->plan != NULL) (void)folio_run_wait(state->ctx, run); /* a device may still read it */
    folio_plan_destroy(p->plan);
    p->plan = plan;
    p->limits = d;
    return FOLIO_OK;
}

folio_status folioi_vllm06_update(folio_vllm06_state *state, folioi_vllm06_plan *p,
                                  const folio_run *run)
{
    TRY(fit_plan(state, p, run));
    return folio_plan_update(p->plan, p->batch, run);
}

folio_status folioi_vllm06_place(folio_context *ctx, const void *from, int64_t bytes, void **out)
{
    TRY(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, (size_t)bytes, out));
    folio_status status = folio_memory_copy(ctx, *out, from, (size_t)bytes, NULL);
    if (status == FOLIO_OK) status = folio_run_wait(ctx, NULL);
    if (status != FOLIO_OK) {
        folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, *out, (size_t)bytes);
        *out = NULL;
    }
    return status;
}

/* "auto", "fp8", ... to a dtype; 0: unknown. */
static folio_dtype cache_dtype(const char *name, folio_dtype dtype)
{
    if (name == NULL || strcmp(name, "auto") == 0) return dtype;
    if (strcmp(name, "fp8") == 0 || strcmp(name, "fp8_e4m3") == 0) return FOLIO_FP8_E4M3;
    if (strcmp(name, "fp8_e5m2") == 0) return FOLIO_FP8_E5M2;
    return (folio_dtype)0;
}

/* How prompts and decodes are attended to: as described, or with the originals' habits. */
static void set_phases(folio_vllm06_impl *impl, bool has_slopes)
{
    impl->prompts = impl->decodes = impl->desc;
    if (!impl->compat) return;
    bool bare = impl->backend->bare_prompts;
    impl->decodes.windowed = 0;
    impl->decodes.window_left = 0;
    if (bare) impl->decodes.soft_cap = 0;
    if (bare || has_slopes) {
        impl->prompts.windowed = 0;
        impl->prompts.window_left = 0;
    }
}

/* The checks of attentions and of caches are ours: fp8 in packs of 16 does not take every head size. */
static folio_status check_by_probes(folio_context *ctx, const folio_vllm06_backend *backend,
                                    const folio_attention_desc *a)
{
    folio_attention *probe;
    TRY(folio_attention_create(ctx, a, &probe));
    folio_attention_destroy(probe);
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 1, .num_layers = 1, .block_size = 1,
                   .num_kv_heads = a->num_kv_heads, .k_head_size = a->k_head_size,
                   .dtype = a->kv_dtype, .layout = backend->layout);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    return folio_kv_cache_get_shape(NULL, &d, &shape);
}

folio_status folio_vllm06_make_impl(folio_vllm06_state *state, const folio_vllm06_backend *backend,
                                    const folio_vllm06_impl_desc *desc, folio_vllm06_impl **out)
{
    REQUIRE(out != NULL, "make_impl: out is NULL");
    *out = NULL;
    REQUIRE(state != NULL, "make_impl: state is NULL");
    TRY(folioi_vllm06_check_backend(backend, "make_impl"));
    folio_vllm06_impl_desc d;
    STRUCT_IN(d, desc, "folio_vllm06_impl_desc");
    if (d.blocksparse_params != NULL)
        FAIL(FOLIO_ERR_UNSUPPORTED, "%s does not support block-sparse attention", backend->name);
    REQUIRE(d.sliding_window >= 0, "sliding_window is %lld; it must be at least 0",
            (long long)d.sliding_window);
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = d.num_heads,
                   .num_kv_heads = d.num_kv_heads > 0 ? d.num_kv_heads : d.num_heads,
                   .k_head_size = d.head_size, .dtype = d.dtype,
                   .kv_dtype = cache_dtype(d.kv_cache_dtype, d.dtype), .scale = d.scale,
                   .soft_cap = d.logits_soft_cap, .windowed = d.sliding_window > 0,
                   .window_left = d.sliding_window > 0 ? d.sliding_window - 1 : 0, );
    REQUIRE(d.num_kv_heads >= 0, "num_kv_heads is %d; it must be at least 0", d.num_kv_heads);
    REQUIRE(d.compat == 0 || d.compat == 1, "compat is %d, neither 0 nor 1", d.compat);
    REQUIRE(a.kv_dtype != 0 || d.dtype == 0, "kv_cache_dtype \"%s\" is unknown",
            d.kv_cache_dtype != NULL ? d.kv_cache_dtype : "auto");
    for (int32_t h = 0; d.alibi_slopes != NULL && h < d.num_heads; h++)
        REQUIRE(isfinite(d.alibi_slopes[h]), "alibi_slopes[%d] is %g; it must be finite", h,
                (double)d.alibi_slopes[h]);
    TRY(check_by_probes(state->ctx, backend, &a));
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof **out, "an impl", &memory));
    folio_vllm06_impl *impl = memory;
    refs_retain(&state->refs);
    *impl =
        (folio_vllm06_impl){.state = state, .backend = backend, .desc = a, .compat = d.compat != 0};
    set_phases(impl, d.alibi_slopes != NULL);
    if (d.alibi_slopes != NULL) {
        impl->slopes_bytes = d.num_heads * (int64_t)sizeof *impl->slopes;
        folio_status status = folioi_vllm06_place(state->ctx, d.alibi_slopes, impl->slopes_bytes,
                                                  (void **)&impl->slopes);
        if (status != FOLIO_OK) {
            folio_vllm06_impl_destroy(impl);
            return status;
        }
    }
    *out = impl;
    return FOLIO_OK;
}

void folio_vllm06_impl_destroy(folio_vllm06_impl *impl)
{
    if (impl == NULL) return;
    folio_vllm06_state *state = impl->state;
    folio_context *ctx = state->ctx;
    folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, impl->slopes, (size_t)impl->slopes_bytes);
    folioi_free(&ctx->allocator, impl, sizeof *impl);
    folio_vllm06_state_destroy(state);
}
