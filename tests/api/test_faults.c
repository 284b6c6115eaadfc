/*
 * test_faults.c: every call of the headers where the n-th allocation fails, for every n: it is refused with a sentence,
 * nothing has changed, so the same call then succeeds, and nothing is lost in the end. And threads that cannot be
 * started. More of this, call by call: test_errors_memory.c, test_swap_faults.c, test_store_faults.c.
 */
#include "support.h"

#include <errno.h>
#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* ------------------------------------------------------------------------- memory that runs out */

enum { MAX_CALLS = 256, HEADS = 2, SIZE = 16, BLOCK = 4, ROW = HEADS * SIZE, ROWS = 8 };

static support_counter counter;
static const char *called[MAX_CALLS];
static int num_called;
static int64_t num_failed;

/* The call with its n-th allocation failing, for n from 1 on, until it succeeds: until it has fewer. */
#define STEP(call)                                                                                 \
    do {                                                                                           \
        bool failed_;                                                                              \
        int64_t n_ = 0;                                                                            \
        do {                                                                                       \
            support_mark_error();                                                                  \
            counter.fail_at = counter.calls + ++n_;                                                \
            folio_status status_ = (call);                                                         \
            bool reached_ = counter.calls >= counter.fail_at;                                      \
            counter.fail_at = 0;                                                                   \
            failed_ = status_ != FOLIO_OK;                                                         \
            num_failed += failed_;                                                                 \
            if (failed_ && reached_)                                                               \
                support_refused(__FILE__, __LINE__, #call, status_, FOLIO_ERR_MEMORY, "");         \
            else CHECK_MSG(!failed_, #call ": %s", folio_last_error());                            \
            if (failed_ && !reached_) break;                                                       \
        } while (failed_);                                                                         \
        if (num_called < MAX_CALLS) called[num_called++] = #call;                                  \
    } while (0)

/* All indices, the last one first, on the calling thread. */
static void backwards(void *user, int64_t count, folio_task_fn fn, void *task)
{
    (void)user;
    for (int64_t i = count - 1; i >= 0; i--) fn(task, i);
}

static float q[ROWS * ROW], k[ROWS * ROW], v[ROWS * ROW], out[ROWS * ROW];
static float part[2 * 64 * ROW]; /* K, then V, of a cache of the originals */

static folio_tensor rows_of(float *x, int64_t n)
{
    return (folio_tensor){.data = n > 0 ? x : NULL, .dtype = FOLIO_F32, .tokens = n};
}

static folio_tensors tensors_of(int64_t n)
{
    return FOLIO_WITH(folio_tensors, .q = rows_of(q, n), .k = rows_of(k, n), .v = rows_of(v, n),
                      .out = rows_of(out, n));
}

/* --------------------------------------------------------------------------- folio.h, call by call */

static void blocks_move(folio_context *ctx, folio_kv_cache *cache)
{
    const int64_t slots[2] = {5, 9}, blocks[2] = {1, 2};
    const folio_block_pair pair = {1, 3};
    unsigned char key[32] = {7};
    folio_rotary_desc angles = FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE, .num_positions = 64);
    folio_kv_passport passport =
        FOLIO_WITH(folio_kv_passport, .model = "a model", .rotary = &angles);
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = rows_of(k, 2), .v = rows_of(v, 2), .slots = slots);
    folio_kv_gather gather =
        FOLIO_WITH(folio_kv_gather, .k = rows_of(out, 2), .slots = slots, .num_slots = 2);
    folio_kv_rows rows =
        FOLIO_WITH(folio_kv_rows, .k = q, .v = out, .num_blocks = 2, .blocks = blocks);
    folio_kv_blocks some =
        FOLIO_WITH(folio_kv_blocks, .blocks = blocks, .num_blocks = 2, .num_tokens = 7,
                   .passport = &passport, .key = key, .key_bytes = 32, .layout = FOLIO_LAYOUT_HND);
    size_t bytes = 0;
    STEP(folio_kv_cache_write(cache, 0, &write, NULL));
    STEP(folio_kv_cache_gather(cache, 0, &gather, NULL));
    STEP(folio_kv_cache_copy_blocks(cache, cache, &pair, 1, NULL));
    STEP(folio_kv_cache_unpack(cache, 0, &rows, NULL));
    STEP(folio_kv_cache_pack(cache, 0, &rows, NULL));
    STEP(folio_kv_cache_export(cache, &some, NULL, 0, &bytes, NULL));
    void *data = malloc(bytes);
    STEP(folio_kv_cache_export(cache, &some, data, bytes, &bytes, NULL));
    STEP(folio_kv_cache_import(cache, &some, data, bytes, NULL));
    free(data);
    void *memory = NULL;
    STEP(folio_memory_create(ctx, FOLIO_MEMORY_HOST, 4096, &memory));
    STEP(folio_memory_fill(ctx, memory, 1, 4096, NULL));
    STEP(folio_memory_copy(ctx, memory, q, sizeof q, NULL));
    STEP(folio_run_wait(ctx, NULL));
    folio_memory_destroy(ctx, FOLIO_MEMORY_HOST, memory, 4096);
}

static void plans(folio_context *ctx, const folio_attention_desc *desc, folio_attention *attention,
                  folio_kv_cache *cache)
{
    const int32_t table[2] = {1, 2}, start[2] = {0, 3}, lens[1] = {7};
    const float slopes[HEADS] = {0.5f, 0.25f};
    float bias[HEADS * 3 * 7];
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 3, .seq_len = 7,
                                     .block_table = table, .num_blocks = 2);
    folio_step step =
        FOLIO_WITH(folio_step, .num_seqs = 1, .query_start = start, .seq_lens = lens,
                   .table = {.kind = FOLIO_TABLE_ROWS, .indices = table, .row_stride = 2});
    folio_rotary_desc angles = FOLIO_WITH(folio_rotary_desc, .num_dims = SIZE, .num_positions = 64);
    folio_plan_desc pd = FOLIO_WITH(folio_plan_desc, .attentions = &attention, .num_attentions = 1,
                                    .cache = cache, .flags = FOLIO_PLAN_NOTE_BAD);
    folio_batch_desc bd = FOLIO_WITH(folio_batch_desc, .block_size = BLOCK);
    folio_batch_info info = {.struct_size = sizeof info};
    folio_batch_view view = {.struct_size = sizeof view};
    folio_plan_info of_plan = {.struct_size = sizeof of_plan};
    folio_plan_findings findings = {.struct_size = sizeof findings};
    folio_plan_bad_write bad = {.struct_size = sizeof bad};
    folio_tensors t = tensors_of(3);
    folio_rotary *rotary = NULL;
    folio_batch *batch = NULL;
    folio_plan *plan = NULL;
    size_t bytes = 0;
    STEP(folio_rotary_create(ctx, &angles, &rotary));
    STEP(folio_batch_create(ctx, &bd, &batch));
    for (int i = 0; i < 20; i++) STEP(folio_batch_add(batch, &seq)); /* it grows */
    STEP(folio_batch_set(batch, &step));
    STEP(folio_batch_get_info(batch, &info));
    STEP(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
    STEP(folio_bias_write(attention, batch, FOLIO_ATTENTION_DECODER, 0, slopes, bias,
                          HEADS * 3 * 7));
    STEP(folio_plan_create(ctx, &pd, &plan));
    STEP(folio_plan_update(plan, batch, NULL));
    t.rotary = rotary;
    STEP(folio_attention_check(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &t, NULL, &of_plan));
    STEP(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &t, NULL));
    STEP(folio_plan_update_step(plan, &step, NULL));
    STEP(folio_plan_get_findings(plan, &findings));
    STEP(folio_plan_get_bad_write(plan, &bad));
    STEP(folio_plan_get_workspace_size(plan, &bytes));
    STEP(folio_plan_get_info(plan, 0, FOLIO_ATTENTION_DECODER, &of_plan));
    STEP(folio_attend(ctx, desc, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL));
    float lse[2][2 * HEADS] = {{0}};
    const folio_state parts[2] = {{.out = rows_of(q, 2), .lse = lse[0]},
                                  {.out = rows_of(k, 2), .lse = lse[1]}};
    folio_merge merge = FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = SIZE,
                                   .num_parts = 2, .parts = parts, .out = rows_of(out, 2));
    STEP(folio_state_merge(ctx, &merge, NULL));
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_rotary_destroy(rotary);
}

static void wrapped_and_shared(folio_context *ctx, const folio_kv_cache_desc *desc)
{
    static float k_memory[16 * BLOCK * ROW], v_memory[16 * BLOCK * ROW];
    void *const k_rows[1] = {k_memory}, *const v_rows[1] = {v_memory};
    folio_kv_cache_desc nhd = *desc;
    nhd.layout = FOLIO_LAYOUT_NHD;
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    folio_kv_memory memory = FOLIO_WITH(folio_kv_memory, .k = k_rows, .v = v_rows,
                                        .k_bytes = sizeof k_memory, .v_bytes = sizeof v_memory);
    folio_kv_cache *cache = NULL, *both[2] = {NULL, NULL};
    folio_kv_cache_view view = {.struct_size = sizeof view};
    const folio_kv_cache_desc *const descs[2] = {desc, desc};
    STEP(folio_kv_cache_get_shape("cpu", &nhd, &shape));
    STEP(folio_kv_cache_wrap(ctx, &nhd, &memory, &cache));
    STEP(folio_kv_cache_get_view(cache, 0, &view));
    STEP(folio_kv_cache_create_shared(ctx, descs, 2, both));
    folio_kv_cache_destroy(cache);
    for (int i = 0; i < 2; i++) folio_kv_cache_destroy(both[i]);
}

/* ----------------------------------------------------------------------- folio_pool.h, call by call */

static void fed(folio_sequence *s, const folio_tokens *tokens)
{
    STEP(folio_sequence_reserve(s, tokens->num_tokens, 0, NULL));
    STEP(folio_sequence_commit(s, tokens));
}

static void blocks_by_hand(folio_pool *pool)
{
    folio_pool_stats stats = {.struct_size = sizeof stats};
    folio_block_pair pair;
    int32_t blocks[2] = {0};
    uint8_t states[4];
    int64_t n = 0;
    STEP(folio_pool_alloc(pool, 2, blocks));
    STEP(folio_pool_retain(pool, 2, blocks));
    STEP(folio_pool_release(pool, 2, blocks));
    STEP(folio_pool_release(pool, 2, blocks));
    STEP(folio_pool_take_copies(pool, 0, 1, &pair, &n));
    STEP(folio_pool_run_copies(pool, NULL));
    STEP(folio_pool_get_stats(pool, &stats));
    STEP(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, 0, 4, states));
    STEP(folio_pool_check(pool));
}

static void sequences(folio_context *ctx, folio_pool *pool)
{
    static const int32_t ids[14] = {5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const folio_sequence_desc none = FOLIO_WITH(folio_sequence_desc, .salt = 0);
    folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = 14, .ids = ids);
    folio_sequence_info info = {.struct_size = sizeof info};
    folio_batch_desc bd = FOLIO_WITH(folio_batch_desc, .block_size = BLOCK);
    folio_batch *batch = NULL;
    folio_sequence *s = NULL, *fork = NULL, *again = NULL;
    const int32_t *table;
    int64_t n = 0;
    STEP(folio_sequence_create(pool, &none, &s));
    fed(s, &tokens);
    STEP(folio_sequence_reserve_encoder(s, 6, 0, NULL));
    STEP(folio_sequence_commit(s, &tokens));
    STEP(folio_sequence_fork(s, &fork));
    STEP(folio_sequence_reserve(fork, 3, 0, NULL)); /* a copy is queued */
    STEP(folio_sequence_get_info(s, &info));
    STEP(folio_sequence_get_table(s, 0, &table, &n));
    STEP(folio_sequence_release_window(s));
    STEP(folio_batch_create(ctx, &bd, &batch));
    STEP(folio_batch_add_sequences(batch, 0, &fork, 1, NULL));
    folio_batch_destroy(batch);
    STEP(folio_sequence_truncate(fork, 9));
    for (int tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        STEP(folio_sequence_swap_out(s, (folio_tier)tier, NULL, NULL));
        STEP(folio_sequence_swap_in(s, NULL, NULL));
    }
    STEP(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL));
    STEP(folio_transfer_wait(NULL));
    STEP(folio_sequence_resume(s, &tokens, NULL, NULL, NULL));
    folio_sequence_destroy(s);
    folio_sequence_destroy(fork);
    STEP(folio_pool_swap_out(pool, FOLIO_TIER_HOST, 2, NULL, &n, NULL));
    STEP(folio_pool_swap_out(pool, FOLIO_TIER_DISK, 2, NULL, &n, NULL));
    STEP(folio_sequence_create(pool, NULL, &again));
    STEP(folio_sequence_match(again, &tokens, &n, NULL));
    CHECK_INT(n, 12);
    folio_sequence_destroy(again);
    STEP(folio_pool_forget(pool));
}

static void pools(folio_context *ctx, const folio_kv_cache_desc *desc)
{
    char path[] = "/tmp/folio-faults.XXXXXX";
    close(mkstemp(path));
    folio_layer_group group = {.window = 0};
    folio_pool_desc d = FOLIO_WITH(folio_pool_desc, .num_layer_groups = 1, .layer_groups = &group,
                                   .host_blocks = 12, .store_path = path, .store_bytes = 1 << 20,
                                   .wipe = FOLIO_WIPE_ON_FORGET);
    folio_pool *pool = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, desc, &group.cache));
    CHECK_OK(folio_kv_cache_create(ctx, desc, &d.cross_cache));
    STEP(folio_pool_create(ctx, &d, &pool));
    blocks_by_hand(pool);
    sequences(ctx, pool);
    folio_pool_destroy(pool);
    folio_kv_cache_destroy(group.cache);
    folio_kv_cache_destroy(d.cross_cache);
    unlink(path);
}

/* --------------------------------------------------------------------- folio_vllm06.h, call by call */

static const folio_vllm06_kv_cache old_cache = {part,  NULL,  sizeof part, FOLIO_F32,
                                                BLOCK, HEADS, SIZE,        64 / BLOCK};

static void build_a_step(folio_vllm06_state *state, const folio_vllm06_backend *b,
                         folio_vllm06_metadata **built)
{
    const int32_t table[2] = {1, 2};
    folio_vllm06_builder_desc d =
        FOLIO_WITH(folio_vllm06_builder_desc, .block_size = BLOCK, .max_seq_len_to_capture = 8);
    folio_vllm06_seq seq = FOLIO_WITH(folio_vllm06_seq, .token_len = 1, .context_len = 5,
                                      .block_table = table, .num_blocks = 2);
    folio_vllm06_builder *builder = NULL;
    STEP(folio_vllm06_builder_create(state, b, &d, &builder));
    STEP(folio_vllm06_builder_add(builder, &seq));
    STEP(folio_vllm06_builder_pad(builder, 1));
    STEP(folio_vllm06_builder_build(builder, built));
    folio_vllm06_builder_destroy(builder);
}

static void graphs(folio_vllm06_state *state, const folio_vllm06_backend *b,
                   folio_vllm06_impl *impl, const folio_vllm06_metadata *built)
{
    folio_vllm06_graph_capture_desc d =
        FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = b, .max_batch_size = 2,
                   .max_seq_len_to_capture = 8, .block_size = BLOCK);
    folio_vllm06_graph_input_buffers buffers = {.struct_size = sizeof buffers};
    folio_vllm06_state *clone = NULL;
    folio_vllm06_metadata *graph = NULL;
    STEP(folio_vllm06_graph_capture_begin(state, &d));
    STEP(folio_vllm06_graph_clone(state, 2, &clone));
    STEP(folio_vllm06_graph_capture_get_metadata_for_batch(state, 2, 0, &graph));
    STEP(folio_vllm06_graph_capture_end(state));
    folio_vllm06_forward_args args =
        FOLIO_WITH(folio_vllm06_forward_args, .query = rows_of(q, 2), .key = rows_of(k, 2),
                   .value = rows_of(v, 2), .output = rows_of(out, 2), .kv_cache = &old_cache,
                   .attn_metadata = graph);
    STEP(folio_vllm06_forward(impl, &args, NULL));
    STEP(folio_vllm06_get_graph_input_buffers(state, graph, 0, &buffers));
    STEP(folio_vllm06_prepare_graph_input_buffers(state, &buffers, built, 0));
    STEP(folio_vllm06_begin_forward(state, graph, NULL));
    STEP(folio_vllm06_forward(impl, &args, NULL));
    folio_vllm06_metadata_destroy(graph);
    folio_vllm06_state_destroy(clone);
}

static void a_prompt(folio_vllm06_state *state, const folio_vllm06_backend *b,
                     folio_vllm06_impl *impl)
{
    const int32_t lens[1] = {5}, *lens_q, *lens_kv;
    const int64_t slots[5] = {4, 5, 6, 7, 8};
    float mask[5 * 5];
    const float slopes[HEADS] = {0.5f, 0.25f};
    static float alibi[HEADS * 5 * 5];
    folio_vllm06_metadata_fields f = FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1,
                                                .slot_mapping = slots, .seq_lens = lens);
    folio_vllm06_metadata *m = NULL;
    const folio_vllm06_bias *bias = NULL;
    folio_vllm06_seq_len_block_table_args tables;
    STEP(folio_vllm06_make_metadata(state, b, &f, &m));
    STEP(folio_vllm06_get_seq_lens(m, FOLIO_ATTENTION_DECODER, &lens_q, &lens_kv));
    STEP(folio_vllm06_get_seq_len_block_table_args(m, 1, FOLIO_ATTENTION_DECODER, &tables));
    STEP(folio_vllm06_make_alibi_bias(slopes, HEADS, 5, alibi));
    STEP(folio_vllm06_make_sliding_window_bias(5, 2, mask));
    const folio_vllm06_bias given = {mask, 1, 5, 5};
    STEP(folio_vllm06_set_attn_bias(m, FOLIO_ATTENTION_DECODER, &given));
    STEP(folio_vllm06_get_attn_bias(m, FOLIO_ATTENTION_DECODER, &bias));
    folio_vllm06_forward_args args =
        FOLIO_WITH(folio_vllm06_forward_args, .query = rows_of(q, 5), .key = rows_of(k, 5),
                   .value = rows_of(v, 5), .output = rows_of(out, 5), .kv_cache = &old_cache,
                   .attn_metadata = m);
    STEP(folio_vllm06_forward(impl, &args, NULL));
    folio_vllm06_metadata_destroy(m);
}

static void operators(folio_vllm06_state *state)
{
    const int32_t table[2] = {1, 2}, len[1] = {6};
    const int64_t slots[2] = {4, 9};
    const folio_block_pair pair = {1, 3};
    folio_vllm06_reshape_and_cache_args rows =
        FOLIO_WITH(folio_vllm06_reshape_and_cache_args, .key = k, .value = v, .dtype = FOLIO_F32,
                   .num_tokens = 2, .slot_mapping = slots);
    folio_vllm06_paged_attention_args a =
        FOLIO_WITH(folio_vllm06_paged_attention_args, .out = out, .query = q, .dtype = FOLIO_F32,
                   .num_heads = HEADS, .num_seqs = 1, .block_tables = table,
                   .max_num_blocks_per_seq = 2, .seq_lens = len, .max_seq_len = 6);
    STEP(folio_vllm06_copy_blocks(state, &old_cache, 1, &pair, 1, NULL));
    STEP(folio_vllm06_swap_blocks(state, &old_cache, &old_cache, &pair, 1, NULL));
    STEP(folio_vllm06_reshape_and_cache(state, &rows, &old_cache, NULL));
    STEP(folio_vllm06_paged_attention_v1(state, &a, &old_cache, NULL));
    STEP(folio_vllm06_paged_attention_v2(state, &a, &old_cache, NULL, NULL, NULL, NULL));
}

static void vllm06(const folio_context_desc *context)
{
    const folio_vllm06_backend *b = folio_vllm06_backend_find("xformers");
    folio_vllm06_impl_desc d = FOLIO_WITH(folio_vllm06_impl_desc, .num_heads = HEADS,
                                          .head_size = SIZE, .dtype = FOLIO_F32);
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *impl = NULL;
    folio_vllm06_metadata *built = NULL;
    folio_vllm06_cache_view keys, values;
    int64_t shape[3];
    STEP(folio_vllm06_get_kv_cache_shape(4, BLOCK, HEADS, SIZE, shape));
    STEP(folio_vllm06_split_kv_cache(b, &old_cache, &keys, &values));
    STEP(folio_vllm06_state_create("cpu", context, &state));
    STEP(folio_vllm06_make_impl(state, b, &d, &impl));
    a_prompt(state, b, impl);
    build_a_step(state, b, &built);
    graphs(state, b, impl, built);
    operators(state);
    folio_vllm06_metadata_destroy(built);
    folio_vllm06_impl_destroy(impl);
    folio_vllm06_state_destroy(state);
}

static void every_call(const char *backend, bool executor)
{
    counter = (support_counter){0};
    folio_context_desc cd = FOLIO_WITH(folio_context_desc, .backend = backend, .num_threads = 2,
                                       .allocator = support_allocator(&counter));
    if (executor) cd.executor = (folio_executor){backwards, NULL, 5};
    folio_attention_desc ad = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                         .k_head_size = SIZE, .dtype = FOLIO_F32);
    folio_kv_cache_desc kd =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 16, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
    folio_context_info info = {.struct_size = sizeof info};
    folio_context_kernel kernel = {.struct_size = sizeof kernel};
    folio_backend_info about = {.struct_size = sizeof about};
    char reasons[256];
    folio_context *ctx = NULL;
    folio_attention *attention = NULL;
    folio_kv_cache *cache = NULL;
    STEP(folio_backend_get_info(backend, &about));
    STEP(folio_backend_supports(backend, &ad, 1u, &kd, reasons, sizeof reasons));
    STEP(folio_context_create(&cd, &ctx));
    STEP(folio_context_get_info(ctx, &info));
    STEP(folio_context_get_kernel(ctx, 0, &kernel));
    STEP(folio_attention_create(ctx, &ad, &attention));
    STEP(folio_kv_cache_create(ctx, &kd, &cache));
    blocks_move(ctx, cache);
    plans(ctx, &ad, attention, cache);
    wrapped_and_shared(ctx, &kd);
    pools(ctx, &kd);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
    vllm06(&cd);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.live_bytes, 0);
    CHECK_INT(counter.faults, 0);
}

static bool was_called(const char *name, size_t length)
{
    for (int i = 0; i < num_called; i++)
        if (strncmp(called[i], name, length) == 0 && called[i][length] == '(') return true;
    return false;
}

/* No call with a status was left out: this test makes them all. */
static void check_all_of(const char *header)
{
    static char text[1 << 20];
    static const char begin[] = "FOLIO_API folio_status ";
    char path[1024];
    int found = 0;
    snprintf(path, sizeof path, "%s/../include/folio/%s", FOLIO_TESTS_DIR, header);
    FILE *file = fopen(path, "r");
    REQUIRE_TEST(file != NULL);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    for (char *at = text; (at = strstr(at, begin)) != NULL; found++) {
        at += sizeof begin - 1;
        size_t length = strcspn(at, "(");
        CHECK_MSG(was_called(at, length), "%s: no test of %.*s", header, (int)length, at);
    }
    CHECK(found > 20);
}

TEST(faults, memory_at_every_call)
{
    num_called = 0;
    num_failed = 0;
    every_call("cpu", false);
    num_called = 0;
    every_call("cpu", true);
    check_all_of("folio.h");
    check_all_of("folio_pool.h");
    check_all_of("folio_vllm06.h");
    CHECK_MSG(num_failed > 200, "%lld calls failed", (long long)num_failed);
}

/* -------------------------------------------------------------------- threads that cannot be started */

/* The linker gives the library this one (tests/CMakeLists.txt). */
int __real_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*run)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*run)(void *),
                          void *arg);

static atomic_int threads_left = INT_MAX;

int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*run)(void *),
                          void *arg)
{
    if (atomic_load(&threads_left) == 0) return EAGAIN;
    atomic_fetch_sub(&threads_left, 1);
    return __real_pthread_create(id, attr, run, arg);
}

/* Those that run already are ended, and nothing is left of the context or pool. */
TEST(faults, threads_that_cannot_be_started)
{
    support_counter memory = {0};
    folio_context_desc cd = FOLIO_WITH(folio_context_desc, .backend = "cpu", .num_threads = 5,
                                       .allocator = support_allocator(&memory));
    folio_context *ctx = NOWHERE;
    for (int n = 0; n < 4; n++) {
        char words[64];
        snprintf(words, sizeof words, "thread %d of 5 could not be started", n + 1);
        atomic_store(&threads_left, n);
        REFUSED(folio_context_create(&cd, &ctx), FOLIO_ERR_MEMORY, words);
        CHECK(ctx == NULL);
        CHECK_INT(memory.live, 0);
    }
    atomic_store(&threads_left, 4);
    CHECK_OK(folio_context_create(&cd, &ctx));
    folio_kv_cache_desc kd =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 4, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_layer_group group = {.window = 0};
    folio_pool_desc pd = FOLIO_WITH(folio_pool_desc, .num_layer_groups = 1, .layer_groups = &group,
                                    .host_blocks = 4);
    folio_pool *pool = NOWHERE;
    CHECK_OK(folio_kv_cache_create(ctx, &kd, &group.cache));
    int64_t live = memory.live;
    REFUSED(folio_pool_create(ctx, &pd, &pool), FOLIO_ERR_MEMORY, "thread that moves blocks");
    CHECK(pool == NULL);
    CHECK_INT(memory.live, live);
    atomic_store(&threads_left, INT_MAX);
    CHECK_OK(folio_pool_create(ctx, &pd, &pool));
    folio_pool_destroy(pool);
    folio_kv_cache_destroy(group.cache);
    folio_context_destroy(ctx);
    CHECK_INT(memory.live, 0);
}
