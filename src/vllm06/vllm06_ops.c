/*
 * vllm06_ops.c: the plain operators over raw pointers in the x-packed layout. v1 is one forward; v2 runs
 * each partition of the keys on its own, with its lse, and merges them.
 */
#include "cache/kv_cache.h"
#include "core/tensor.h"
#include "vllm06/vllm06.h"

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
    folio_kv_write w =
        FOLIO_WITH(folio_kv_write, .k = {(void *)a.key, a.dtype, a.num_tokens, a.key_stride, 0},
                   .v = {(void *)a.value, a.dtype, a.num_tokens, a.value_stride, 0},
                   .slots = a.slot_mapping, .k_scale = a.k_scale, .v_scale = a.v_scale);
    return folioi_kv_cache_write_last(kept->cache, 0, &w, run);
}

/* One paged_attention call under way. */
typedef struct {
    folio_context *ctx;
    folio_vllm06_paged_attention_args a;
    const folio_vllm06_kv_cache *c;
    folio_kv_cache *cache; /* the state's */
    folioi_vllm06_memory kv;
    folio_attention *attention;
    folio_batch *batch;
    folio_plan *plan;
    folio_run run;
    void *memory; /* of v2's partitions */
    int64_t memory_bytes;
} paged;

static folio_status open_paged(paged *p, folio_vllm06_state *state, const folio_run *run)
{
    const folio_vllm06_kv_cache *c = p->c;
    folio_layout layout = FOLIO_LAYOUT_XPACKED;
    const folioi_vllm06_kept *kept;
    TRY(layout_of(c, p->a.x, &layout));
    TRY(folioi_vllm06_find_cache(state, c, layout, "cache", &kept));
    p->cache = kept->cache;
    p->kv = kept->memory;
    TRY(folioi_run_in(p->ctx, run, &p->run));
    p->run.workspace = NULL; /* nobody outside knows its size */
    REQUIRE(p->a.num_seqs >= 0 && p->a.max_num_blocks_per_seq >= 0,
            "num_seqs %lld or max_num_blocks_per_seq %lld is negative", (long long)p->a.num_seqs,
            (long long)p->a.max_num_blocks_per_seq);
    int64_t entries;
    REQUIRE(checked_mul(p->a.num_seqs, p->a.max_num_blocks_per_seq, &entries) &&
                entries <= INT64_MAX / 8,
            "%lld sequences x max_num_blocks_per_seq %lld exceed the largest size",
            (long long)p->a.num_seqs, (long long)p->a.max_num_blocks_per_seq);
    REQUIRE(p->a.num_seqs == 0 || (p->a.seq_lens != NULL && p->a.block_tables != NULL),
            "seq_lens or block_tables is NULL");
    for (int64_t i = 0; i < p->a.num_seqs; i++)
        REQUIRE(p->a.seq_lens[i] >= 0 && p->a.seq_lens[i] <= p->a.max_seq_len,
                "seq_lens[%lld] = %d is outside [0, max_seq_len = %lld]", (long long)i,
                p->a.seq_lens[i], (long long)p->a.max_seq_len);
    folio_attention_desc d =
        FOLIO_WITH(folio_attention_desc, .num_heads = p->a.num_heads,
                   .num_kv_heads = c->num_kv_heads, .k_head_size = c->head_size,
                   .dtype = p->a.dtype, .kv_dtype = c->dtype, .scale = p->a.scale);
    TRY(folio_attention_create(p->ctx, &d, &p->attention));
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = c->block_size};
    TRY(folio_batch_create(p->ctx, &b, &p->batch));
    folio_attention *list[] = {p->attention};
    folio_plan_desc l = FOLIO_WITH(
        folio_plan_desc, .attentions = list, .num_attentions = 1, .block_size = c->block_size,
        .num_blocks = c->num_blocks, .max_seqs = max_i64(p->a.num_seqs, 1),
        .max_query_tokens = max_i64(p->a.num_seqs, 1), .max_seq_len = max_i64(p->a.max_seq_len, 1));
    return folio_plan_create(p->ctx, &l, &p->plan);
}

/* The plan is this call's own: a device is done with it when it goes. */
static folio_status close_paged(paged *p, folio_status status)
{
    if (p->plan != NULL) {
        folio_status waited = folio_run_wait(p->ctx, &p->run);
        if (status == FOLIO_OK) status = waited;
    }
    if (p->memory != NULL) folioi_free(&p->ctx->allocator, p->memory, p->memory_bytes);
    folio_plan_destroy(p->plan);
    folio_batch_destroy(p->batch);
    folio_attention_destroy(p->attention);
    return status;
}

/* The plan for keys [first, first + len) of every sequence, first a multiple of the block size. */
static folio_status plan_keys(paged *p, int64_t first, int64_t len)
{
    static const int64_t nowhere = -1; /* nothing is stored: sequences may share their blocks */
    folio_batch_clear(p->batch);
    for (int64_t i = 0; i < p->a.num_seqs; i++) {
        int64_t keys = max_i64(0, min_i64(p->a.seq_lens[i] - first, len));
        int64_t skipped = first / p->c->block_size;
        folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = keys};
        s.padding = keys == 0;
        s.causality = FOLIO_CAUSAL_NO; /* all keys come before the query, or are its own */
        s.slots = &nowhere;
        s.positions_given = 1;
        s.first_query_pos = (int64_t)p->a.seq_lens[i] - 1;
        s.first_key_pos = first;
        if (keys > 0) {
            s.block_table = p->a.block_tables + i * p->a.max_num_blocks_per_seq + skipped;
            s.num_blocks = p->a.max_num_blocks_per_seq - skipped;
        }
        TRY(folio_batch_add(p->batch, &s));
    }
    return folio_plan_update(p->plan, p->batch, &p->run);
}

static folio_tensor query_of(const paged *p)
{
    return (folio_tensor){(void *)p->a.query, p->a.dtype, p->a.num_seqs, p->a.query_stride, 0};
}

/* Attention over the keys the plan is for: out and lse. */
static folio_status attend(paged *p, folio_tensor out, float *lse, int64_t lse_token_stride,
                           int64_t lse_head_stride)
{
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = query_of(p), .out = out, .lse = lse,
                   .lse_token_stride = lse_token_stride, .lse_head_stride = lse_head_stride,
                   .slopes = p->a.alibi_slopes, .k_scale = p->a.k_scale, .v_scale = p->a.v_scale);
    return folio_attention_forward(p->plan, 0, FOLIO_ATTENTION_DECODER, p->cache, 0, &t, &p->run);
}

folio_status folio_vllm06_paged_attention_v1(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache,
                                             const folio_run *run)
{
    REQUIRE(state != NULL, "paged_attention: state is NULL");
    paged p = {.ctx = state->ctx, .c = cache};
    STRUCT_IN(p.a, args, "folio_vllm06_paged_attention_args");
    folio_status status = open_paged(&p, state, run);
    folio_tensor out = {p.a.out, p.a.dtype, p.a.num_seqs, 0, 0};
    if (status == FOLIO_OK) status = plan_keys(&p, 0, p.a.max_seq_len);
    if (status == FOLIO_OK) status = attend(&p, out, NULL, 0, 0);
    return close_paged(&p, status);
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
        {"key_cache", folioi_span_of(p->kv.k, p->kv.bytes)},
        {"value_cache", folioi_span_of(p->kv.v, p->kv.bytes)}};
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
    folio_tensor out = {p->a.out, p->a.dtype, p->a.num_seqs, 0, 0}; /* the merge's, checked now */
    TRY(folioi_tensor_resolve(&out, "out", p->a.dtype, p->a.num_heads, p->c->head_size,
                              p->a.num_seqs));
    TRY(check_apart(p, &out, parts, exp_sums, max_logits, tmp_out));
    return plan_keys(p, 0, p->a.max_seq_len); /* all tables, before anything is written */
}

/* exp_sums: max_logits has the whole logarithm, so a partition with keys counts 1, one without 0. */
static folio_status write_sums(const paged *p, int64_t parts, float *host, float *exp_sums)
{
    int64_t n = 0;
    for (int64_t row = 0; row < p->a.num_seqs * p->a.num_heads; row++)
        for (int64_t k = 0; k < parts; k++)
            host[n++] = p->a.seq_lens[row / p->a.num_heads] > k * FOLIO_VLLM06_PARTITION_SIZE;
    return folio_memory_copy(p->ctx, exp_sums, host, (size_t)n * sizeof *host, &p->run);
}

/* Every partition into its place of tmp_out, its lse into max_logits; then the merge. */
static folio_status by_partitions(paged *p, float *exp_sums, float *max_logits, void *tmp_out)
{
    int64_t parts = max_i64(ceil_div(p->a.max_seq_len, FOLIO_VLLM06_PARTITION_SIZE), 1);
    int64_t heads = p->a.num_heads, dims = p->c->head_size;
    int64_t elem = (int64_t)folio_dtype_size(p->a.dtype);
    TRY(check_partitions(p, parts, exp_sums, max_logits, tmp_out));
    int64_t sums_bytes = p->a.num_seqs * heads * parts * (int64_t)sizeof(float);
    int64_t state_bytes = parts * (int64_t)sizeof(folio_state);
    p->memory_bytes = state_bytes + sums_bytes;
    TRY(folioi_alloc(&p->ctx->allocator, p->memory_bytes, "partitions", &p->memory));
    folio_state *states = p->memory;
    for (int64_t k = 0; k < parts; k++) {
        folio_tensor out = {(char *)tmp_out + k * dims * elem, p->a.dtype, p->a.num_seqs,
                            heads * parts * dims, parts * dims};
        states[k] = (folio_state){out, max_logits + k, heads * parts, parts};
        TRY(plan_keys(p, k * FOLIO_VLLM06_PARTITION_SIZE, FOLIO_VLLM06_PARTITION_SIZE));
        TRY(attend(p, out, max_logits + k, heads * parts, parts));
    }
    TRY(write_sums(p, parts, (float *)(states + parts), exp_sums));
    folio_merge m = FOLIO_WITH(folio_merge, .num_heads = p->a.num_heads,
                               .head_size = p->c->head_size, .num_parts = parts, .parts = states,
                               .out = {p->a.out, p->a.dtype, p->a.num_seqs, 0, 0});
    return folio_merge_states(p->ctx, &m, &p->run);
}

folio_status folio_vllm06_paged_attention_v2(folio_vllm06_state *state,
                                             const folio_vllm06_paged_attention_args *args,
                                             const folio_vllm06_kv_cache *cache, float *exp_sums,
                                             float *max_logits, void *tmp_out, const folio_run *run)
{
    REQUIRE(state != NULL, "paged_attention: state is NULL");
    paged p = {.ctx = state->ctx, .c = cache};
    STRUCT_IN(p.a, args, "folio_vllm06_paged_attention_args");
    folio_status status = open_paged(&p, state, run);
    if (status == FOLIO_OK) status = by_partitions(&p, exp_sums, max_logits, tmp_out);
    return close_paged(&p, status);
}
