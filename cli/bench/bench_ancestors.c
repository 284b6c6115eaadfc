/*
 * bench_ancestors.c: the interface of vLLM 0.6 (folio_vllm06.h) over the batch, the block tables, q, k, v and out of a
 * rig: forward of each of its three backends, and its two operators for decodes, over caches in their own layouts.
 */
#include "bench/bench_attention.h"

#include <stdlib.h>

/* The three backends come first. Two share the layout of their cache; the operators use it too. */
enum { NUM_BACKENDS = BENCH_PAGED_V1 };
enum { XPACKED, XPACKED_1, NUM_CACHES };

static const struct {
    const char *name;
    int cache;
} table[BENCH_NUM_ANCESTORS] = {[BENCH_XFORMERS] = {"xformers", XPACKED},
                                [BENCH_TORCH_SDPA] = {"torch-sdpa", XPACKED},
                                [BENCH_IPEX] = {"ipex", XPACKED_1},
                                [BENCH_PAGED_V1] = {"paged_attention_v1", XPACKED},
                                [BENCH_PAGED_V2] = {"paged_attention_v2", XPACKED}};

/* A backend has a state of its own, which keeps the plans of its step: so they are made once, as for later layers. */
typedef struct layer {
    const folio_vllm06_backend *backend;
    folio_vllm06_state *state;
    folio_vllm06_metadata *metadata;
    folio_vllm06_impl *impl;
} layer;

struct bench_ancestors {
    const rig *r;
    layer layers[NUM_BACKENDS];
    folio_vllm06_kv_cache caches[NUM_CACHES];
    size_t cache_bytes;
    int32_t *lens, *tables; /* of the operators: [seqs], [seqs][stride] */
    int64_t stride;
};

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if (!bench_ok(call, #call)) return false;                                                  \
    } while (0)

const char *bench_ancestor_name(bench_ancestor which) { return table[which].name; }

bool bench_ancestor_stores(bench_ancestor which) { return (int)which < NUM_BACKENDS; }

bool bench_ancestor_takes(bench_ancestor which, const setting *s)
{
    return bench_ancestor_stores(which) || s->what->longest_query == 1;
}

/* ---- Caches */

/* Filled through the library, with the same numbers in the same slots as the rig's cache. */
static bool fill_cache(const bench_ancestors *a, int which, int64_t seed)
{
    const rig *r = a->r;
    const setting *s = &r->of;
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = r->num_blocks, .num_layers = 1,
                   .block_size = s->block_size, .num_kv_heads = s->heads.kv_heads,
                   .k_head_size = s->head_size, .dtype = s->kv_dtype,
                   .layout = which == XPACKED ? FOLIO_LAYOUT_XPACKED : FOLIO_LAYOUT_XPACKED_1);
    void *k = a->caches[which].key_cache, *v = (char *)k + a->cache_bytes / 2;
    folio_kv_memory memory =
        FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_bytes = a->cache_bytes / 2,
                   .v_bytes = a->cache_bytes / 2);
    folio_kv_cache *cache = NULL;
    bool ok = bench_ok(folio_kv_cache_wrap(r->ctx, &d, &memory, &cache), "folio_kv_cache_wrap") &&
              bench_rig_fill(r, cache, seed);
    folio_kv_cache_destroy(cache);
    return ok;
}

static bool make_caches(bench_ancestors *a, int64_t seed)
{
    const setting *s = &a->r->of;
    int64_t shape[3];
    TRY(folio_vllm06_get_kv_cache_shape(a->r->num_blocks, s->block_size, s->heads.kv_heads,
                                        s->head_size, shape));
    a->cache_bytes = (size_t)(shape[0] * shape[1] * shape[2]) * folio_dtype_size(s->kv_dtype);
    for (int i = 0; i < NUM_CACHES; i++) {
        a->caches[i] = (folio_vllm06_kv_cache){.bytes = a->cache_bytes,
                                               .dtype = s->kv_dtype,
                                               .block_size = s->block_size,
                                               .num_kv_heads = s->heads.kv_heads,
                                               .head_size = s->head_size,
                                               .num_blocks = shape[1]};
        TRY(folio_memory_create(a->r->ctx, FOLIO_MEMORY_DEVICE, a->cache_bytes,
                                &a->caches[i].key_cache));
        if (!fill_cache(a, i, seed)) return false;
    }
    return true;
}

/* ---- Backends */

/* Another state over the same context, as graphs get them: contexts of their own would have threads of their own. */
static bool make_state(const bench_ancestors *a, folio_vllm06_state *first, layer *l)
{
    folio_vllm06_graph_capture_desc d =
        FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = l->backend, .max_batch_size = 1,
                   .max_seq_len_to_capture = 1, .block_size = a->r->of.block_size);
    TRY(folio_vllm06_graph_capture_begin(first, &d));
    folio_status status = folio_vllm06_graph_clone(first, 1, &l->state);
    TRY(folio_vllm06_graph_capture_end(first));
    return bench_ok(status, "folio_vllm06_graph_clone");
}

static bool add_seqs(const bench_ancestors *a, folio_vllm06_builder *builder)
{
    const batch_case *c = a->r->of.what;
    const int32_t *blocks = a->r->blocks;
    for (int g = 0; g < c->num_kinds; g++)
        for (int64_t i = 0; i < c->kinds[g].count; i++) {
            int64_t seq_len = bench_seq_len(&c->kinds[g], i), query_len = c->kinds[g].query_len;
            folio_vllm06_seq seq =
                FOLIO_WITH(folio_vllm06_seq, .is_prompt = query_len > 1, .token_len = query_len,
                           .context_len = seq_len - query_len, .block_table = blocks,
                           .num_blocks = (seq_len + a->r->of.block_size - 1) / a->r->of.block_size);
            TRY(folio_vllm06_builder_add(builder, &seq));
            blocks += seq.num_blocks;
        }
    return true;
}

static bool make_metadata(const bench_ancestors *a, layer *l)
{
    folio_vllm06_builder_desc d = FOLIO_WITH(
        folio_vllm06_builder_desc, .block_size = a->r->of.block_size, .chunked_prefill_enabled = 1);
    folio_vllm06_builder *builder = NULL;
    TRY(folio_vllm06_builder_create(l->state, l->backend, &d, &builder));
    bool ok = add_seqs(a, builder) && bench_ok(folio_vllm06_builder_build(builder, &l->metadata),
                                               "folio_vllm06_builder_build");
    folio_vllm06_builder_destroy(builder);
    return ok;
}

static bool make_layer(bench_ancestors *a, folio_vllm06_state *first, int which)
{
    const setting *s = &a->r->of;
    layer *l = &a->layers[which];
    folio_vllm06_impl_desc d = FOLIO_WITH(
        folio_vllm06_impl_desc, .num_heads = s->heads.heads, .num_kv_heads = s->heads.kv_heads,
        .head_size = s->head_size, .dtype = s->dtype,
        .kv_cache_dtype = s->kv_dtype == s->dtype ? "auto" : folio_dtype_name(s->kv_dtype));
    l->backend = folio_vllm06_backend_find(table[which].name);
    return make_state(a, first, l) &&
           bench_ok(folio_vllm06_make_impl(l->state, l->backend, &d, &l->impl), "make_impl") &&
           make_metadata(a, l);
}

static bool forward(const bench_ancestors *a, int which, const folio_run *run)
{
    const rig *r = a->r;
    const layer *l = &a->layers[which];
    int64_t rows = r->of.what->rows;
    folio_vllm06_forward_args args = FOLIO_WITH(
        folio_vllm06_forward_args, .query = {.data = r->q, .dtype = r->of.dtype, .tokens = rows},
        .key = {.data = r->k, .dtype = r->of.dtype, .tokens = rows},
        .value = {.data = r->v, .dtype = r->of.dtype, .tokens = rows},
        .kv_cache = &a->caches[table[which].cache], .attn_metadata = l->metadata,
        .attn_type = FOLIO_ATTENTION_DECODER,
        .output = {.data = r->out, .dtype = r->of.dtype, .tokens = rows});
    return bench_ok(folio_vllm06_forward(l->impl, &args, run), table[which].name);
}

/* ---- Operators */

static void make_operators(bench_ancestors *a)
{
    const setting *s = &a->r->of;
    const batch_case *c = s->what;
    const int32_t *blocks = a->r->blocks;
    int64_t seq = 0;
    if (!bench_ancestor_takes(BENCH_PAGED_V1, s)) return;
    a->stride = (c->longest + s->block_size - 1) / s->block_size;
    a->lens = bench_alloc(c->seqs, sizeof *a->lens);
    a->tables = bench_alloc(c->seqs * a->stride, sizeof *a->tables);
    for (int g = 0; g < c->num_kinds; g++)
        for (int64_t i = 0; i < c->kinds[g].count; i++, seq++) {
            a->lens[seq] = (int32_t)bench_seq_len(&c->kinds[g], i);
            for (int64_t k = 0; k * s->block_size < a->lens[seq]; k++)
                a->tables[seq * a->stride + k] = *blocks++;
        }
}

static bool operate(const bench_ancestors *a, bench_ancestor which, const folio_run *run)
{
    const rig *r = a->r;
    const setting *s = &r->of;
    const folio_vllm06_kv_cache *cache = &a->caches[table[which].cache];
    folio_vllm06_state *state = a->layers[which - BENCH_PAGED_V1].state; /* a plan for each */
    folio_vllm06_paged_attention_args args = FOLIO_WITH(
        folio_vllm06_paged_attention_args, .out = r->out, .query = r->q, .dtype = s->dtype,
        .num_heads = s->heads.heads, .num_seqs = s->what->seqs, .block_tables = a->tables,
        .max_num_blocks_per_seq = a->stride, .seq_lens = a->lens, .max_seq_len = s->what->longest);
    folio_status status =
        which == BENCH_PAGED_V1
            ? folio_vllm06_paged_attention_v1(state, &args, cache, run)
            : folio_vllm06_paged_attention_v2(state, &args, cache, NULL, NULL, NULL, run);
    return bench_ok(status, table[which].name);
}

/* ---- All of them */

bench_ancestors *bench_ancestors_open(const rig *r, folio_vllm06_state *state, int64_t seed)
{
    bench_ancestors *a = bench_alloc(1, sizeof *a);
    a->r = r;
    bool ok = true;
    for (int i = 0; i < NUM_BACKENDS && ok; i++) ok = make_layer(a, state, i);
    make_operators(a);
    if (ok && make_caches(a, seed)) return a;
    bench_ancestors_close(a);
    return NULL;
}

void bench_ancestors_close(bench_ancestors *a)
{
    if (a == NULL) return;
    folio_context *ctx = a->r->ctx;
    for (int i = 0; i < NUM_BACKENDS; i++) {
        folio_vllm06_metadata_destroy(a->layers[i].metadata);
        folio_vllm06_impl_destroy(a->layers[i].impl);
        folio_vllm06_state_destroy(a->layers[i].state);
    }
    for (int i = 0; i < NUM_CACHES; i++)
        folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, a->caches[i].key_cache, a->cache_bytes);
    free(a->lens);
    free(a->tables);
    free(a);
}

typedef struct call {
    const bench_ancestors *of;
    bench_ancestor which;
} call;

static bool run_call(const void *state, const folio_run *run)
{
    const call *c = state;
    return bench_ancestor_stores(c->which) ? forward(c->of, (int)c->which, run)
                                           : operate(c->of, c->which, run);
}

bool bench_ancestors_run(const bench_ancestors *a, bench_ancestor which, double *seconds)
{
    const call c = {a, which};
    return bench_rig_time(a->r, 1, run_call, &c, seconds);
}
