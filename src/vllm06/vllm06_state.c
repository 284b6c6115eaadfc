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
    folioi_array_free(&ctx->allocator, &p->asked);
    folioi_free(&ctx->allocator, p, sizeof *p);
}

void folioi_vllm06_drop_plans(folio_context *ctx, folioi_vllm06_plan *plans)
{
    for (folioi_vllm06_plan *next; plans != NULL; plans = next) {
        next = plans->next;
        drop_plan(ctx, plans);
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

static bool is_alike(const folioi_vllm06_plan *a, const folioi_vllm06_plan *b)
{
    return a->which == b->which && a->type == b->type && a->block_size == b->block_size &&
           a->num_blocks == b->num_blocks && a->layout == b->layout &&
           same_layer(&a->attention, &b->attention);
}

/* The batch and the plan: one that grows, or a graph's of fixed size. The batch of a paged_attention is the plan's. */
static folio_status make_plan(folio_context *ctx, const folio_vllm06_metadata *graph,
                              const folio_kv_cache *cache, folioi_vllm06_plan *p)
{
    bool cross = p->type == FOLIO_ATTENTION_ENCODER_DECODER;
    uint32_t types = FOLIO_ATTENTION_BIT(p->type);
    folio_attention *attention;
    folio_batch_desc b = FOLIO_WITH(folio_batch_desc, .block_size = p->block_size);
    folio_plan_desc d =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .types = &types, .num_attentions = 1,
                   .cache = cross ? NULL : cache, .cross_cache = cross ? cache : NULL);
    if (graph != NULL) {
        d.max_seqs = d.max_query_tokens = graph->num_seqs;
        d.max_seq_len = graph->graph_len;
        d.max_query_len = 1;
        d.flags = FOLIO_PLAN_GRAPH;
    }
    if (p->which != FOLIOI_VLLM06_PAGED) TRY(folio_batch_create(ctx, &b, &p->batch));
    TRY(folio_attention_create(ctx, &p->attention, &attention));
    folio_status status = folio_plan_create(ctx, &d, &p->plan);
    folio_attention_destroy(attention);
    return status;
}

folio_status folioi_vllm06_find_plan(folio_vllm06_state *state, folio_vllm06_metadata *graph,
                                     const folio_attention_desc *desc, folio_attention_type type,
                                     const folio_kv_cache *cache, folioi_vllm06_which which,
                                     folioi_vllm06_plan **out)
{
    folioi_vllm06_plan **list = graph != NULL ? &graph->plans : &state->plans, **end = list;
    folioi_vllm06_plan like = {.attention = *desc, .type = type, .which = which};
    int count = 0;
    if (cache != NULL) {
        like.block_size = cache->format.desc.block_size;
        like.num_blocks = cache->format.desc.num_blocks;
        like.layout = cache->format.desc.layout;
    }
    for (; *end != NULL; end = &(*end)->next, count++) {
        if (!is_alike(*end, &like)) continue;
        *out = *end;
        return FOLIO_OK;
    }
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof like, "a shared plan", &memory));
    folioi_vllm06_plan *p = memory, *oldest = *list;
    *p = like;
    folio_status status = make_plan(state->ctx, graph, cache, p);
    if (status != FOLIO_OK) {
        drop_plan(state->ctx, p);
        return status;
    }
    *out = *end = p;
    if (graph != NULL || count < FOLIOI_VLLM06_MOST_PLANS) return FOLIO_OK;
    *list = oldest->next;
    drop_plan(state->ctx, oldest);
    return FOLIO_OK;
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
    REQUIRE(a.kv_dtype != 0 || d.dtype == 0,
            "kv_cache_dtype \"%s\" is unknown; there are auto, fp8, fp8_e4m3 and fp8_e5m2",
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
