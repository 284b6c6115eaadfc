/*
 * vllm06_ops.c: the plain operators over raw pointers in the x-packed layout. v1 is one forward; v2 runs
 * each partition of the keys on its own, with its lse, and merges them where there are several. The state
 * owns the plan, so that layers of one step share it and nobody waits for a device.
 */
#include "cache/kv_cache.h"
#include "core/tensor.h"
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
    int32_t attention;        /* its number in the plan */
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
    REQUIRE(a->num_seqs == 0 || (a->seq_lens != NULL && a->block_tables != NULL),
            "seq_lens or block_tables is NULL");
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
                                   FOLIOI_VLLM06_PAGED, false, &p->plan, &p->attention);
}

/* The step of keys [first, first + len) of every sequence. It lies in the state's `asking`, and so does all that a plan
 * for it depends on: layers of one step ask for the same. */
static folio_status ask(paged *p, int64_t first, int64_t len, folio_step *step, int64_t *bytes)
{
    const folio_vllm06_paged_attention_args *a = &p->a;
    int64_t n = a->num_seqs, stride = a->max_num_blocks_per_seq, size = p->c->block_size;
    int64_t skipped = first / size;
    int64_t width = min_i64(ceil_div(len, size), max_i64(0, stride - skipped));
    const int64_t head[] = {n, first, len, (int64_t)(intptr_t)p->run.stream};
    TRY(folioi_array_reserve(&p->state->ctx->allocator, &p->state->asking,
                             (int64_t)sizeof head + n * (20 + 4 * width), "what a plan is for"));
    int64_t *query_pos = (int64_t *)p->state->asking.data + 4, *key_pos = query_pos + n;
    int32_t *keys = (int32_t *)(key_pos + n), *blocks = keys + n;
    const int32_t *table = n > 0 ? a->block_tables + skipped : NULL;
    memcpy(p->state->asking.data, head, sizeof head);
    for (int64_t i = 0; i < n; i++) {
        keys[i] = (int32_t)max_i64(0, min_i64(a->seq_lens[i] - first, len));
        query_pos[i] = (int64_t)a->seq_lens[i] - 1;
        key_pos[i] = first;
        int64_t used = min_i64(ceil_div(keys[i], size), width);
        for (int64_t k = 0; k < used; k++) *blocks++ = table[i * stride + k];
    }
    *bytes = (char *)blocks - (char *)p->state->asking.data;
    *step = FOLIO_WITH(folio_step, .num_seqs = n, .seq_lens = keys, .first_query_pos = query_pos,
                       .first_key_pos = key_pos, .causality_default = FOLIO_CAUSAL_NO,
                       .table = {.kind = FOLIO_TABLE_ROWS, .indices = table, .row_stride = stride});
    return FOLIO_OK;
}

/* The plan for keys [first, first + len) of every sequence, first a multiple of the block size. */
static folio_status plan_keys(paged *p, int64_t first, int64_t len)
{
    folioi_vllm06_plan *plan = p->plan;
    folio_step step;
    int64_t bytes;
    TRY(ask(p, first, min_i64(len, p->a.max_seq_len - first), &step, &bytes));
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

static folio_tensor query_of(const paged *p)
{
    return (folio_tensor){(void *)p->a.query, p->a.dtype, p->a.num_seqs, p->a.query_stride, 0};
}

static folio_tensor dense_out(const paged *p)
{
    return (folio_tensor){p->a.out, p->a.dtype, p->a.num_seqs, 0, 0};
}

/* Attention over the keys the plan is for: out and lse. */
static folio_status attend(paged *p, folio_tensor out, float *lse, int64_t lse_token_stride,
                           int64_t lse_head_stride)
{
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = query_of(p), .out = out, .lse = lse,
                   .lse_token_stride = lse_token_stride, .lse_head_stride = lse_head_stride,
                   .slopes = p->a.alibi_slopes, .k_scale = p->a.k_scale, .v_scale = p->a.v_scale);
    return folio_attention_forward(p->plan->plan, p->attention, FOLIO_ATTENTION_DECODER,
                                   p->kept->cache, 0, &t, &p->run);
}

folio_status folio_vllm06_paged_attention_v1(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache,
                                             const folio_run *run)
{
    paged p = {.state = state, .c = cache};
    TRY(open_paged(&p, args, run));
    TRY(plan_keys(&p, 0, p.a.max_seq_len));
    return attend(&p, dense_out(&p), NULL, 0, 0);
}

/* out may be query itself: all partitions are done with query when out is written. */
static folio_status check_apart(const paged *p, const folio_tensor *out, int64_t parts,
                                const float *exp_sums, const float *max_logits, const void *tmp_out)
{
    const folio_vllm06_kv_cache *c = p->c;
    folio_tensor query = query_of(p);
    TRY(folioi_tensor_resolve(&query, "query", p->a.dtype, p->a.num_heads, c->head_size,
                              p->a.num_seqs));
    bool in_place = folioi_tensors_same(&query, out);
    int64_t rows = p->a.num_seqs * p->a.num_heads, elem = (int64_t)folio_dtype_size(p->a.dtype);
    int64_t out_bytes = rows * c->head_size * elem, tmp_bytes;
    REQUIRE(checked_mul(out_bytes, parts, &tmp_bytes) && tmp_bytes <= MAX_EXTENT,
            "%lld sequences x %lld partitions exceed the largest size", (long long)p->a.num_seqs,
            (long long)parts);
    int64_t sums_bytes = rows * parts * (int64_t)sizeof(float);
    const folioi_place places[] = {
        {"out", folioi_span_of(p->a.out, out_bytes)},
        {"exp_sums", folioi_span_of(exp_sums, sums_bytes)},
        {"max_logits", folioi_span_of(max_logits, sums_bytes)},
        {"tmp_out", folioi_span_of(tmp_out, tmp_bytes)},
        {"query", in_place ? folioi_span_of(NULL, 0)
                           : folioi_tensor_span(&query, p->a.num_heads, c->head_size)},
        {"alibi_slopes",
         folioi_span_of(p->a.alibi_slopes, p->a.num_heads * (int64_t)sizeof(float))},
        {"key_cache", folioi_span_of(p->kept->memory.k, p->kept->memory.bytes)},
        {"value_cache", folioi_span_of(p->kept->memory.v, p->kept->memory.bytes)}};
    return folioi_check_apart(places, 4, sizeof places / sizeof *places);
}

static folio_status check_partitions(paged *p, int64_t parts, const float *exp_sums,
                                     const float *max_logits, const void *tmp_out)
{
    REQUIRE(FOLIO_VLLM06_PARTITION_SIZE % p->c->block_size == 0,
            "block_size %d does not divide the partition size %d", p->c->block_size,
            FOLIO_VLLM06_PARTITION_SIZE);
    REQUIRE_ALIGNED(exp_sums, "exp_sums");
    REQUIRE_ALIGNED(max_logits, "max_logits");
    REQUIRE(p->a.num_seqs == 0 || (exp_sums != NULL && max_logits != NULL && tmp_out != NULL),
            "exp_sums, max_logits or tmp_out is NULL");
    folio_tensor out = dense_out(p);
    TRY(folioi_tensor_resolve(&out, "out", p->a.dtype, p->a.num_heads, p->c->head_size,
                              p->a.num_seqs));
    TRY(check_apart(p, &out, parts, exp_sums, max_logits, tmp_out));
    return plan_keys(p, 0, p->a.max_seq_len); /* all tables, before anything is written */
}

/* exp_sums: max_logits has the whole logarithm, so a partition with keys counts 1, one without 0. A copy may still
 * read the numbers of the call before, so they are changed only where they differ, after it. */
static folio_status write_sums(const paged *p, int64_t parts, float *exp_sums)
{
    folio_vllm06_state *state = p->state;
    int64_t n = p->a.num_heads * parts; /* of a sequence */
    int64_t bytes = p->a.num_seqs * n * (int64_t)sizeof(float);
    bool waited = bytes > state->sums.bytes;
    if (waited) {
        TRY(folio_run_wait(state->ctx, &p->run));
        TRY(folioi_array_reserve(&state->ctx->allocator, &state->sums, bytes, "sums"));
    }
    float *sums = state->sums.data;
    for (int64_t seq = 0; seq < p->a.num_seqs; seq++)
        for (int64_t i = 0; i < n; i++, sums++) {
            float sum = p->a.seq_lens[seq] > i % parts * FOLIO_VLLM06_PARTITION_SIZE;
            if (*sums == sum) continue;
            if (!waited) TRY(folio_run_wait(state->ctx, &p->run));
            waited = true;
            *sums = sum;
        }
    return folio_memory_copy(state->ctx, exp_sums, state->sums.data, (size_t)bytes, &p->run);
}

/* Every partition into its place of tmp_out, its lse into max_logits; then the merge. */
static folio_status run_partitions(paged *p, folio_state *states, int64_t parts, float *exp_sums,
                                   float *max_logits, void *tmp_out)
{
    int64_t heads = p->a.num_heads, dims = p->c->head_size;
    int64_t elem = (int64_t)folio_dtype_size(p->a.dtype);
    for (int64_t k = 0; k < parts; k++) {
        folio_tensor out = {(char *)tmp_out + k * dims * elem, p->a.dtype, p->a.num_seqs,
                            heads * parts * dims, parts * dims};
        states[k] = (folio_state){out, max_logits + k, heads * parts, parts};
        TRY(plan_keys(p, k * FOLIO_VLLM06_PARTITION_SIZE, FOLIO_VLLM06_PARTITION_SIZE));
        TRY(attend(p, out, max_logits + k, heads * parts, parts));
    }
    TRY(write_sums(p, parts, exp_sums));
    folio_merge m =
        FOLIO_WITH(folio_merge, .num_heads = p->a.num_heads, .head_size = p->c->head_size,
                   .num_parts = parts, .parts = states, .out = dense_out(p));
    return folio_state_merge(p->state->ctx, &m, &p->run);
}

/* One partition is the whole: nothing to merge, and tmp_out is a copy. */
static folio_status run_whole(paged *p, float *exp_sums, float *max_logits, void *tmp_out)
{
    folio_tensor out = dense_out(p);
    int64_t bytes =
        out.tokens * p->a.num_heads * p->c->head_size * (int64_t)folio_dtype_size(out.dtype);
    TRY(attend(p, out, max_logits, 0, 0));
    TRY(write_sums(p, 1, exp_sums));
    return folio_memory_copy(p->state->ctx, tmp_out, out.data, (size_t)bytes, &p->run);
}

folio_status folio_vllm06_paged_attention_v2(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache, float *exp_sums,
                                             float *max_logits, void *tmp_out, const folio_run *run)
{
    paged p = {.state = state, .c = cache};
    TRY(open_paged(&p, args, run));
    int64_t parts = max_i64(ceil_div(p.a.max_seq_len, FOLIO_VLLM06_PARTITION_SIZE), 1);
    TRY(check_partitions(&p, parts, exp_sums, max_logits, tmp_out));
    if (parts == 1) return run_whole(&p, exp_sums, max_logits, tmp_out);
    void *memory;
    int64_t bytes = parts * (int64_t)sizeof(folio_state);
    TRY(folioi_alloc(&state->ctx->allocator, bytes, "partitions", &memory));
    folio_status status = run_partitions(&p, memory, parts, exp_sums, max_logits, tmp_out);
    folioi_free(&state->ctx->allocator, memory, bytes);
    return status;
}
