/*
 * vllm06_ops.c: the plain operators over raw pointers in the x-packed layout. The state owns the plan, so that layers of
 * one step share it and nobody waits for a device.
 */
#include "cache/kv_cache.h"
#include "vllm06/vllm06.h"

#include <string.h>

/* The layout that x says; 0: 16 / bytes of one number. */
static folio_status layout_of(const folio_vllm06_kv_cache *c, int32_t x, folio_layout *out)
{
    REQUIRE(c != NULL, "cache is NULL");
    int32_t elem = (int32_t)folio_dtype_size(c->dtype);
    REQUIRE(x == 0 || x == 1 || (elem > 0 && x == 16 / elem), "x is %d, neither 1 nor 16 / %d", x,
            elem);
    *out = x == 1 ? FOLIO_LAYOUT_XPACKED_1 : FOLIO_LAYOUT_XPACKED;
    return FOLIO_OK;
}

/* Of several tokens with one slot, the last is stored. What is not an array of slots is refused later. */
static folio_status keep_last(folio_vllm06_state *state, folio_vllm06_reshape_and_cache_args *a)
{
    bool repeats;
    const folio_allocator *allocator = &state->ctx->allocator;
    if (a->num_tokens < 2 || a->slot_mapping == NULL) return FOLIO_OK;
    int64_t bytes;
    REQUIRE_ALIGNED(a->slot_mapping, "slots");
    REQUIRE(checked_mul(a->num_tokens, (int64_t)sizeof *a->slot_mapping, &bytes),
            "num_tokens %lld exceeds the largest size", (long long)a->num_tokens);
    TRY(folioi_array_reserve(allocator, &state->slots, bytes, "slots"));
    memcpy(state->slots.data, a->slot_mapping, (size_t)bytes);
    a->slot_mapping = state->slots.data;
    return folioi_slots_keep_last(allocator, state->slots.data, a->num_tokens, &repeats);
}

folio_status folio_vllm06_reshape_and_cache(folio_vllm06_state *state,
                                            const folio_vllm06_reshape_and_cache_args *args,
                                            const folio_vllm06_kv_cache *cache,
                                            const folio_run *run)
{
    REQUIRE(state != NULL, "reshape_and_cache: state is NULL");
    folio_vllm06_reshape_and_cache_args a;
    STRUCT_IN(a, args, "folio_vllm06_reshape_and_cache_args");
    folio_layout layout = FOLIO_LAYOUT_XPACKED;
    const folioi_vllm06_kept *kept;
    TRY(layout_of(cache, a.x, &layout));
    TRY(folioi_vllm06_find_cache(state, cache, layout, "cache", &kept));
    TRY(keep_last(state, &a));
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {(void *)a.key, a.dtype, a.num_tokens, a.key_stride, 0},
                   .v = {(void *)a.value, a.dtype, a.num_tokens, a.value_stride, 0},
                   .slots = a.slot_mapping, .k_scale = a.k_scale, .v_scale = a.v_scale);
    return folioi_kv_cache_write_distinct(kept->cache, 0, &w, run);
}

/* One paged_attention call under way. */
typedef struct {
    folio_vllm06_state *state;
    folio_vllm06_paged_attention_args a;
    const folio_vllm06_kv_cache *c;
    const folioi_vllm06_kept *kept;
    folioi_vllm06_plan *plan; /* the state's */
    folio_run run;
} paged;

static folio_status check_paged(const paged *p)
{
    const folio_vllm06_paged_attention_args *a = &p->a;
    REQUIRE(a->num_seqs >= 0 && a->max_num_blocks_per_seq >= 0,
            "num_seqs %lld or max_num_blocks_per_seq %lld is negative", (long long)a->num_seqs,
            (long long)a->max_num_blocks_per_seq);
    int64_t entries;
    REQUIRE(checked_mul(a->num_seqs, a->max_num_blocks_per_seq, &entries) &&
                entries <= INT64_MAX / 16,
            "%lld sequences x max_num_blocks_per_seq %lld exceed the largest size",
            (long long)a->num_seqs, (long long)a->max_num_blocks_per_seq);
    REQUIRE(a->num_seqs == 0 || a->seq_lens != NULL, "paged_attention: seq_lens is NULL");
    REQUIRE(a->num_seqs == 0 || a->block_tables != NULL, "paged_attention: block_tables is NULL");
    for (int64_t i = 0; i < a->num_seqs; i++)
        REQUIRE(a->seq_lens[i] >= 0 && a->seq_lens[i] <= a->max_seq_len,
                "seq_lens[%lld] = %d is outside [0, max_seq_len = %lld]", (long long)i,
                a->seq_lens[i], (long long)a->max_seq_len);
    return FOLIO_OK;
}

static folio_status open_paged(paged *p, const folio_vllm06_paged_attention_args *args,
                               const folio_run *run)
{
    const folio_vllm06_kv_cache *c = p->c;
    folio_layout layout = FOLIO_LAYOUT_XPACKED;
    REQUIRE(p->state != NULL, "paged_attention: state is NULL");
    STRUCT_IN(p->a, args, "folio_vllm06_paged_attention_args");
    TRY(layout_of(c, p->a.x, &layout));
    TRY(folioi_vllm06_find_cache(p->state, c, layout, "cache", &p->kept));
    TRY(folioi_run_in(p->state->ctx, run, &p->run));
    p->run.workspace = NULL; /* the plan is the state's, and has its own */
    TRY(check_paged(p));
    folio_attention_desc d =
        FOLIO_WITH(folio_attention_desc, .num_heads = p->a.num_heads,
                   .num_kv_heads = c->num_kv_heads, .k_head_size = c->head_size,
                   .dtype = p->a.dtype, .kv_dtype = c->dtype, .scale = p->a.scale);
    return folioi_vllm06_find_plan(p->state, NULL, &d, FOLIO_ATTENTION_DECODER, p->kept->cache,
                                   FOLIOI_VLLM06_PAGED, &p->plan);
}

/* The step. It lies in the state's `asking`, and so does all that a plan for it depends on: layers of one step ask for the
 * same. */
static folio_status ask(paged *p, folio_step *step, int64_t *bytes)
{
    const folio_vllm06_paged_attention_args *a = &p->a;
    int64_t n = a->num_seqs, stride = a->max_num_blocks_per_seq, size = p->c->block_size;
    const int64_t head[] = {n, (int64_t)(intptr_t)p->run.stream};
    TRY(folioi_array_reserve(&p->state->ctx->allocator, &p->state->asking,
                             (int64_t)sizeof head + n * (4 + 4 * stride), "what a plan is for"));
    int32_t *keys = (int32_t *)((int64_t *)p->state->asking.data + 2), *blocks = keys + n;
    memcpy(p->state->asking.data, head, sizeof head);
    for (int64_t i = 0; i < n; i++) {
        keys[i] = a->seq_lens[i];
        int64_t used = min_i64(ceil_div(keys[i], size), stride);
        memcpy(blocks, a->block_tables + i * stride, (size_t)used * sizeof *blocks);
        blocks += used;
    }
    *bytes = (char *)blocks - (char *)p->state->asking.data;
    *step = FOLIO_WITH(
        folio_step, .num_seqs = n, .seq_lens = keys, .causality_default = FOLIO_CAUSAL_NO,
        .table = {.kind = FOLIO_TABLE_ROWS, .indices = a->block_tables, .row_stride = stride});
    return FOLIO_OK;
}

static folio_status plan_keys(paged *p)
{
    folioi_vllm06_plan *plan = p->plan;
    folio_step step;
    int64_t bytes;
    TRY(ask(p, &step, &bytes));
    if (plan->asked_bytes == bytes &&
        memcmp(plan->asked.data, p->state->asking.data, (size_t)bytes) == 0)
        return FOLIO_OK;
    plan->asked_bytes = 0; /* a device that fails leaves a plan that serves no step */
    TRY(folio_plan_update_step(plan->plan, &step, &p->run));
    folioi_array asked = plan->asked;
    plan->asked = p->state->asking;
    plan->asked_bytes = bytes;
    p->state->asking = asked;
    return FOLIO_OK;
}

folio_status folio_vllm06_paged_attention_v1(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache,
                                             const folio_run *run)
{
    paged p = {.state = state, .c = cache};
    TRY(open_paged(&p, args, run));
    TRY(plan_keys(&p));
    const folio_vllm06_paged_attention_args *a = &p.a;
    folio_tensors t = FOLIO_WITH(
        folio_tensors, .q = {(void *)a->query, a->dtype, a->num_seqs, a->query_stride, 0},
        .out = {a->out, a->dtype, a->num_seqs, 0, 0}, .slopes = a->alibi_slopes,
        .k_scale = a->k_scale, .v_scale = a->v_scale);
    return folio_attention_forward(p.plan->plan, 0, FOLIO_ATTENTION_DECODER, p.kept->cache, 0, &t,
                                   &p.run);
}

folio_status folio_vllm06_paged_attention_v2(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache, float *exp_sums,
                                             float *max_logits, void *tmp_out, const folio_run *run)
{
    (void)exp_sums, (void)max_logits, (void)tmp_out;
    return folio_vllm06_paged_attention_v1(state, args, cache, run);
}
