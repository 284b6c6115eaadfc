/*
 * test_errors_rest.c: sentences that no other suite gets (make coverage lists those): handles that are NULL, arrays that
 * are not aligned, sizes that overflow, objects of two contexts in one call.
 */
#include "support.h"

#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>
#include <stdlib.h>
#include <unistd.h>

#define ARG FOLIO_ERR_ARGUMENT

enum { SIZE = 8, BLOCK = 4 };

typedef struct {
    folio_context *ctx, *other;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_rotary *rotary;
    folio_batch *batch;
    _Alignas(64) char bytes[4096];
    float numbers[512];
} world;

static const folio_attention_desc attention_desc = {
    .struct_size = sizeof attention_desc, .num_heads = 1, .k_head_size = SIZE, .dtype = FOLIO_F32};
static const folio_kv_cache_desc cache_desc = {.struct_size = sizeof cache_desc,
                                               .num_blocks = 8,
                                               .num_layers = 1,
                                               .block_size = BLOCK,
                                               .num_kv_heads = 1,
                                               .k_head_size = SIZE,
                                               .dtype = FOLIO_F32};
static const folio_rotary_desc rotary_desc = {
    .struct_size = sizeof rotary_desc, .num_dims = SIZE, .num_positions = 8};

static void with_world(void (*body)(world *w))
{
    static world w;
    memset(&w, 0, sizeof w);
    w.ctx = support_context("cpu", 1, NULL);
    w.other = support_context("reference", 1, NULL);
    CHECK_OK(folio_attention_create(w.ctx, &attention_desc, &w.attention));
    CHECK_OK(folio_kv_cache_create(w.ctx, &cache_desc, &w.cache));
    CHECK_OK(folio_rotary_create(w.ctx, &rotary_desc, &w.rotary));
    w.batch = support_batch(w.ctx, BLOCK);
    body(&w);
    folio_batch_destroy(w.batch);
    folio_rotary_destroy(w.rotary);
    folio_kv_cache_destroy(w.cache);
    folio_attention_destroy(w.attention);
    folio_context_destroy(w.other);
    folio_context_destroy(w.ctx);
}
#define REST_TEST(name)                                                                            \
    static void on_##name(world *w);                                                               \
    TEST(errors_rest, name) { with_world(on_##name); }                                             \
    static void on_##name(__attribute__((unused)) world *w)

/* A pointer into w->bytes that no number may lie at. */
#define ODD(type) ((type *)(void *)(w->bytes + 1))

REST_TEST(handles_that_are_null)
{
    folio_batch_info info = {.struct_size = sizeof info};
    folio_batch_view view = {.struct_size = sizeof view};
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 1);
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = 0);
    folio_plan_findings findings = {.struct_size = sizeof findings};
    folio_backend_info about = {.struct_size = sizeof about};
    REFUSED(folio_memory_fill(NULL, w->bytes, 0, 1, NULL), ARG, "ctx is NULL");
    REFUSED(folio_run_wait(NULL, NULL), ARG, "ctx is NULL");
    REFUSED(folio_rotary_create(w->ctx, &rotary_desc, NULL), ARG, "out is NULL");
    REFUSED(folio_backend_get_info(NULL, &about), ARG, "name is NULL");
    REFUSED(folio_backend_supports("cpu", &attention_desc, 1u, NULL, NULL, 9), ARG, "reasons|9");
    REFUSED(folio_batch_add(NULL, &seq), ARG, "batch is NULL");
    REFUSED(folio_batch_set(NULL, &step), ARG, "batch is NULL");
    REFUSED(folio_batch_get_info(NULL, &info), ARG, "batch is NULL");
    REFUSED(folio_batch_get_view(NULL, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view), ARG,
            "batch is NULL");
    REFUSED(folio_plan_get_findings(NULL, &findings), ARG, "plan is NULL");
    REFUSED(folio_sequence_swap_out(NULL, FOLIO_TIER_HOST, NULL, NULL), ARG, "sequence is NULL");
    REFUSED(folio_sequence_swap_in(NULL, NULL, NULL), ARG, "sequence is NULL");
    REFUSED(folio_pool_swap_out(NULL, FOLIO_TIER_HOST, 1, NULL, NULL, NULL), ARG, "pool is NULL");
}

REST_TEST(arrays_that_are_not_aligned)
{
    const int32_t start[2] = {0, 1}, lens[1] = {1};
    const int64_t slot = 0, pos[1] = {0};
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = 1, .query_start = start, .seq_lens = lens);
    step.first_query_pos = ODD(int64_t), step.first_key_pos = pos;
    REFUSED(folio_batch_set(w->batch, &step), ARG, "first_query_pos");
    step.first_query_pos = pos, step.first_key_pos = ODD(int64_t);
    REFUSED(folio_batch_set(w->batch, &step), ARG, "first_key_pos");
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = {.data = w->numbers, .dtype = FOLIO_F32, .tokens = 1},
                   .v = {.data = w->numbers, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot,
                   .rotary = w->rotary, .positions = ODD(int64_t));
    REFUSED(folio_kv_cache_write(w->cache, 0, &write, NULL), ARG, "positions");
    folio_rotary_desc rotary = rotary_desc;
    folio_rotary *made = NOWHERE;
    rotary.cos = w->numbers, rotary.sin = ODD(float);
    REFUSED(folio_rotary_create(w->ctx, &rotary, &made), ARG, "rotary: sin");
    folio_kv_passport passport =
        FOLIO_WITH(folio_kv_passport, .k_scales = ODD(float), .num_scales = 1);
    folio_kv_blocks none = FOLIO_WITH(folio_kv_blocks, .passport = &passport);
    size_t bytes;
    REFUSED(folio_kv_cache_export(w->cache, &none, NULL, 0, &bytes, NULL), ARG, "k_scales");
    folio_pool_desc pd = FOLIO_WITH(folio_pool_desc, .num_blocks = 4, .block_size = BLOCK);
    folio_pool *pool = NULL;
    folio_sequence *s = NULL;
    CHECK_OK(folio_pool_create(w->ctx, &pd, &pool));
    CHECK_OK(folio_sequence_create(pool, NULL, &s));
    folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = 4, .ids = ODD(int32_t));
    REFUSED(folio_sequence_match(s, &tokens, NULL, NULL), ARG, "tokens: ids");
    tokens.ids = NULL, tokens.hash_ids = ODD(uint64_t);
    REFUSED(folio_sequence_match(s, &tokens, NULL, NULL), ARG, "tokens: hash_ids");
    tokens.ids = start;
    REFUSED(folio_sequence_match(s, &tokens, NULL, NULL), ARG, "both ids and hash_ids");
    folio_sequence_destroy(s);
    folio_pool_destroy(pool);
}

REST_TEST(sizes_that_overflow)
{
    folio_kv_cache_desc huge = cache_desc; /* 16 bytes a block and layer, and 64 as a frame */
    huge.num_blocks = INT32_MAX, huge.num_layers = 1 << 26;
    huge.block_size = 1, huge.dtype = FOLIO_FP8_E4M3;
    const folio_kv_cache_desc *const descs[1] = {&huge};
    folio_kv_cache *made[1] = {NOWHERE};
    REFUSED(folio_kv_cache_create_shared(w->ctx, descs, 1, made), ARG, "shared caches");
    CHECK(made[0] == NULL);
    const folio_vllm06_backend *b = folio_vllm06_backend_find("xformers");
    folio_vllm06_kv_cache cache = {w->bytes, w->bytes + 64, 1024, FOLIO_F32, BLOCK, 1, SIZE, 8};
    folio_vllm06_cache_view k, v;
    REFUSED(folio_vllm06_split_kv_cache(b, &cache, &k, &v), ARG, "share memory");
    folio_context_desc cd = FOLIO_WITH(folio_context_desc, .num_threads = 1);
    folio_vllm06_state *state = NULL;
    folio_vllm06_metadata *m = NOWHERE;
    CHECK_OK(folio_vllm06_state_create("cpu", &cd, &state));
    const int32_t len[2] = {1, 1};
    const int64_t slot[2] = {-1, -1};
    folio_vllm06_metadata_fields f =
        FOLIO_WITH(folio_vllm06_metadata_fields, .num_decode_tokens = 2, .slot_mapping = slot,
                   .seq_lens = len, .block_tables = len, .block_tables_stride = INT64_MAX / 2);
    REFUSED(folio_vllm06_make_metadata(state, b, &f, &m), ARG,
            "block_tables has too many elements");
    folio_vllm06_state_destroy(state);
}

REST_TEST(caches)
{
    void *const rows[1] = {w->bytes};
    float *const scales[1] = {w->numbers};
    folio_kv_cache *made = NOWHERE;
    folio_kv_memory memory = FOLIO_WITH(folio_kv_memory, .k = rows, .v = rows,
                                        .k_bytes = sizeof w->bytes, .v_bytes = sizeof w->bytes);
    REFUSED(folio_kv_cache_wrap(w->ctx, &cache_desc, &memory, &made), ARG, "native|v must be NULL");
    folio_kv_cache_desc int8 = cache_desc;
    int8.dtype = FOLIO_INT8, int8.layout = FOLIO_LAYOUT_NHD;
    memory = FOLIO_WITH(folio_kv_memory, .k = rows, .k_bytes = sizeof w->bytes, .k_scales = scales,
                        .v_scales = scales, .k_scales_bytes = 2048, .v_scales_bytes = 2048,
                        .k_scales_strides = {4, -1, 4}, .v_scales_strides = {4, 1, 4});
    REFUSED(folio_kv_cache_wrap(w->ctx, &int8, &memory, &made), ARG, "strides|-1|negative");
    folio_kv_blocks none = FOLIO_WITH(folio_kv_blocks, .num_blocks = 0);
    size_t bytes = 0;
    CHECK_OK(folio_kv_cache_export(w->cache, &none, w->bytes, sizeof w->bytes, &bytes, NULL));
    const int64_t total = 580; /* less than its head: header, seals */
    memcpy(w->bytes + 32, &total, sizeof total);
    REFUSED(folio_kv_cache_import(w->cache, &none, w->bytes, (size_t)total, NULL), ARG, "580|608");
    folio_merge merge = FOLIO_WITH(folio_merge, .num_heads = 1, .head_size = SIZE, .num_parts = 1,
                                   .parts = (folio_state[]){{.lse = w->numbers}});
    REFUSED(folio_state_merge(w->ctx, &merge, NULL), ARG, "out has no dtype");
}

REST_TEST(pools)
{
    folio_layer_group group = {.cache = w->cache};
    folio_pool_desc d = FOLIO_WITH(folio_pool_desc, .num_layer_groups = 1, .layer_groups = &group);
    folio_pool *pool = NOWHERE;
    REFUSED(folio_pool_create(w->other, &d, &pool), ARG, "another context");
    d.store_path = "", d.store_bytes = 1 << 20;
    REFUSED(folio_pool_create(w->ctx, &d, &pool), ARG, "store_path is empty");
    d.store_path = NULL, d.host_blocks = 2;
    folio_sequence *s = NULL;
    CHECK_OK(folio_pool_create(w->ctx, &d, &pool));
    CHECK_OK(folio_sequence_create(pool, NULL, &s));
    REFUSED(folio_sequence_reserve_encoder(s, 3, 0, NULL), ARG, "tiers|cross_cache");
    REFUSED(folio_pool_swap_out(pool, FOLIO_TIER_HOST, -1, NULL, NULL, NULL), ARG,
            "max_blocks is -1");
    folio_sequence_destroy(s);
    folio_pool_destroy(pool);
}

REST_TEST(plans)
{
    folio_attention *foreign = NULL;
    folio_plan *plan = NOWHERE;
    CHECK_OK(folio_attention_create(w->other, &attention_desc, &foreign));
    folio_plan_desc d = FOLIO_WITH(folio_plan_desc, .attentions = &foreign, .num_attentions = 1,
                                   .max_seqs = 1, .max_query_tokens = 4, .max_seq_len = 8);
    REFUSED(folio_plan_create(w->ctx, &d, &plan), ARG, "attentions[0]|another context");
    folio_attention_destroy(foreign);
    d.attentions = &w->attention;
    CHECK_OK(folio_plan_create(w->ctx, &d, &plan)); /* without a cache */
    const int32_t lens[2] = {1, 1}, table[2] = {1, 2};
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = 2, .seq_lens = lens);
    REFUSED(folio_plan_update_step(plan, &step, NULL), ARG, "num_seqs is 2|max_seqs is 1");
    step.num_seqs = 1, step.num_query_tokens = 5;
    REFUSED(folio_plan_update_step(plan, &step, NULL), ARG, "5 query tokens|is 4");
    step.num_query_tokens = 1;
    step.table = (folio_table){.kind = FOLIO_TABLE_ROWS, .indices = table, .row_stride = 2};
    REFUSED(folio_plan_update_step(plan, &step, NULL), ARG, "without a cache");
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 1,
                                     .block_table = table, .num_blocks = 1);
    CHECK_OK(folio_batch_add(w->batch, &seq));
    REFUSED(folio_plan_update(plan, w->batch, NULL), ARG, "seq 0|without a cache");
    folio_plan_destroy(plan);
    seq.block_table = NULL, seq.num_blocks = 2;
    REFUSED(folio_batch_add(w->batch, &seq), ARG, "block_table is NULL|2");
    d = FOLIO_WITH(folio_plan_desc, .attentions = &w->attention, .num_attentions = 1,
                   .cache = w->cache, .flags = FOLIO_PLAN_PRIVATE_SLOTS);
    CHECK_OK(folio_plan_create(w->ctx, &d, &plan));
    const int32_t no_block[2] = {1, FOLIO_NO_BLOCK};
    const int64_t slot = 3;
    seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 5, .block_table = no_block,
                     .num_blocks = 2, .slots = &slot, .positions_given = 1);
    folio_batch_clear(w->batch);
    CHECK_OK(folio_batch_add(w->batch, &seq));
    REFUSED(folio_plan_update(plan, w->batch, NULL), ARG, "has no block there");
    folio_batch_clear(w->batch);
    seq.seq_len = 1;
    CHECK_OK(folio_batch_add(w->batch, &seq));
    folio_plan_destroy(plan);
    d.flags = 0;
    CHECK_OK(folio_plan_create(w->ctx, &d, &plan));
    CHECK_OK(folio_plan_update(plan, w->batch, NULL));
    const folio_tensor row = {.data = w->numbers, .dtype = FOLIO_F32, .tokens = 1};
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = row, .k = {.tokens = 1}, .v = {.tokens = 1}, .out = row);
    t.out.data = w->bytes;
    REFUSED(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, &t, NULL), ARG,
            "data is NULL|tokens are 1 and 1");
    float bias[8];
    const float slope = 1;
    REFUSED(folio_bias_write(w->attention, w->batch, FOLIO_ATTENTION_ENCODER_DECODER, 0, &slope,
                             bias, 8),
            FOLIO_ERR_UNSUPPORTED, "cross attention");
    folio_plan_destroy(plan);
}
