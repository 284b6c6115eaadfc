/*
 * test_lifetimes.c: handles destroyed in every order. Each small graph of objects is made afresh for each order; what is
 * left is used after every destroy, and at the end the allocator has everything back.
 */
#include "fake_device.h"
#include "support.h"

#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>
#include <pthread.h>
#include <stdlib.h>

enum { MAX_PARTS = 6, BLOCK = 4, HEAD = 8, ROWS = 6, MAX_FREED = 1024, POISON = 0xa5 };

/* ---------------------------------------------------------------------------------------- memory */

/* The counting allocator, behind one that keeps what was freed until the end, poisoned: who still reads it follows wild
 * pointers, and who writes to it is found. */
typedef struct {
    support_counter counter;
    folio_allocator real;
    pthread_mutex_t lock;
    struct {
        unsigned char *data;
        size_t size;
    } freed[MAX_FREED];
    int num_freed;
} quarantine;

static void *quarantine_alloc(void *user, size_t size, size_t align)
{
    quarantine *q = user;
    return q->real.alloc(q->real.user, size, align);
}

static void quarantine_free(void *user, void *ptr, size_t size)
{
    quarantine *q = user;
#if defined(__SANITIZE_ADDRESS__) /* which finds both by itself */
    q->real.free(q->real.user, ptr, size);
    return;
#endif
    pthread_mutex_lock(&q->lock);
    memset(ptr, POISON, size);
    if (q->num_freed == MAX_FREED) abort();
    q->freed[q->num_freed].data = ptr;
    q->freed[q->num_freed++].size = size;
    pthread_mutex_unlock(&q->lock);
}

static folio_allocator quarantine_open(quarantine *q)
{
    memset(q, 0, sizeof *q);
    pthread_mutex_init(&q->lock, NULL);
    q->real = support_allocator(&q->counter);
    return (folio_allocator){quarantine_alloc, quarantine_free, q};
}

/* Everything is back, and was left alone since. */
static void quarantine_close(quarantine *q)
{
    for (int i = 0; i < q->num_freed; i++) {
        unsigned char *data = q->freed[i].data;
        size_t n = 0;
        while (n < q->freed[i].size && data[n] == POISON) n++;
        CHECK_MSG(n == q->freed[i].size, "byte %zu of %zu was written after it was freed", n,
                  q->freed[i].size);
        q->real.free(q->real.user, data, q->freed[i].size);
    }
    CHECK_INT(q->counter.live, 0);
    CHECK_INT(q->counter.live_bytes, 0);
    CHECK_INT(q->counter.faults, 0);
    pthread_mutex_destroy(&q->lock);
}

/* ----------------------------------------------------------------------------------------- handles */

/* One handle: how it is destroyed, and a call that works as long as it is not. */
typedef struct {
    void *object;
    void (*destroy)(void *object);
    void (*use)(void *object);
} part;

#define WRAP(noun)                                                                                 \
    static void destroy_##noun(void *object) { folio_##noun##_destroy(object); }
WRAP(context)
WRAP(attention)
WRAP(kv_cache)
WRAP(batch)
WRAP(plan)
WRAP(pool)
WRAP(sequence)
WRAP(transfer)
WRAP(vllm06_state)
WRAP(vllm06_impl)
WRAP(vllm06_metadata)
WRAP(vllm06_builder)

static void use_nothing(void *object) { (void)object; } /* only others use it */

static void use_context(void *object)
{
    void *memory;
    CHECK_OK(folio_memory_create(object, FOLIO_MEMORY_DEVICE, 64, &memory));
    folio_memory_destroy(object, FOLIO_MEMORY_DEVICE, memory, 64);
}

/* The last two blocks: a transfer may be reading the first ones. */
static void use_kv_cache(void *object)
{
    folio_kv_cache_view view = FOLIO_INIT(folio_kv_cache_view);
    CHECK_OK(folio_kv_cache_get_view(object, 0, &view));
    const int64_t last = view.desc->num_blocks - 1;
    const folio_block_pair pair[1] = {{last - 1, last}};
    CHECK_OK(folio_kv_cache_copy_blocks(object, object, pair, 1, NULL));
}

static void use_batch(void *object)
{
    folio_batch_view view = FOLIO_INIT(folio_batch_view);
    CHECK_OK(folio_batch_get_view(object, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
}

/* A forward without a cache: rows of ones attend to values of ones. */
static void use_plan(void *object)
{
    float x[ROWS][HEAD], out[ROWS][HEAD] = {{0}};
    for (int i = 0; i < ROWS * HEAD; i++) x[i / HEAD][i % HEAD] = 1;
    folio_tensor t = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS};
    folio_tensors tensors =
        FOLIO_WITH(folio_tensors, .q = t, .k = t, .v = t, .out = {out, FOLIO_F32, ROWS, 0, 0});
    CHECK_OK(folio_attention_forward(object, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &tensors, NULL));
    CHECK(out[ROWS - 1][HEAD - 1] == 1);
}

static void use_plan_of_device(void *object)
{
    folio_plan_info info = FOLIO_INIT(folio_plan_info);
    CHECK_OK(folio_plan_get_info(object, 0, FOLIO_ATTENTION_DECODER, &info));
}

static void use_pool(void *object)
{
    int32_t block;
    CHECK_OK(folio_pool_alloc(object, 1, &block));
    CHECK_OK(folio_pool_release(object, 1, &block));
    CHECK_OK(folio_pool_check(object));
}

static void use_sequence(void *object)
{
    folio_sequence_info info = FOLIO_INIT(folio_sequence_info);
    CHECK_OK(folio_sequence_get_info(object, &info));
    CHECK_INT(info.committed_len, ROWS);
}

static void use_transfer(void *object) { CHECK_OK(folio_transfer_wait(object)); }

static void use_state(void *object) { use_context(folio_vllm06_state_context(object)); }

static void use_metadata(void *object)
{
    CHECK(folio_vllm06_metadata_get(object) != NULL);
    CHECK(folio_vllm06_prefill_metadata(object) != NULL);
}

static void use_builder(void *object)
{
    folio_vllm06_metadata *made;
    CHECK_OK(folio_vllm06_builder_add(
        object, &FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = ROWS)));
    CHECK_OK(folio_vllm06_builder_build(object, &made));
    folio_vllm06_metadata_destroy(made);
}

/* ----------------------------------------------------------------------------------------- graphs */

typedef int (*make_graph)(folio_context *ctx, part *parts);

/* Attention's five. */
static int make_step(folio_context *ctx, part *parts)
{
    folio_attention *attention = NULL;
    folio_kv_cache *cache = NULL;
    folio_batch *batch = NULL;
    folio_plan *plan = NULL;
    CHECK_OK(folio_attention_create(
        ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = HEAD, .dtype = FOLIO_F32),
        &attention));
    CHECK_OK(folio_kv_cache_create(
        ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 4, .block_size = BLOCK,
                    .num_kv_heads = 1, .k_head_size = HEAD, .dtype = FOLIO_F32),
        &cache));
    CHECK_OK(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .block_size = BLOCK), &batch));
    folio_attention *list[] = {attention, attention};
    CHECK_OK(
        folio_plan_create(ctx,
                          &FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 2,
                                      .max_seqs = 1, .max_query_tokens = ROWS, .max_seq_len = ROWS),
                          &plan));
    CHECK_OK(
        folio_batch_add(batch, &FOLIO_WITH(folio_batch_seq, .query_len = ROWS, .seq_len = ROWS)));
    CHECK_OK(folio_plan_update(plan, batch, NULL));
    folio_context_info info = FOLIO_INIT(folio_context_info);
    CHECK_OK(folio_context_get_info(ctx, &info));
    bool host = strcmp(info.backend, "cpu") == 0 || strcmp(info.backend, "reference") == 0;
    const part made[] = {{ctx, destroy_context, use_context},
                         {attention, destroy_attention, use_nothing},
                         {cache, destroy_kv_cache, use_kv_cache},
                         {batch, destroy_batch, use_batch},
                         {plan, destroy_plan, host ? use_plan : use_plan_of_device}};
    memcpy(parts, made, sizeof made);
    return COUNT_OF(made);
}

/* KV memory's six, with a sequence that is on its way to the host. */
static int make_memory(folio_context *ctx, part *parts)
{
    folio_kv_cache *cache = NULL;
    folio_pool *pool = NULL;
    folio_sequence *first = NULL, *second = NULL;
    folio_transfer *transfer = NULL;
    CHECK_OK(folio_kv_cache_create(
        ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 8, .block_size = BLOCK,
                    .num_kv_heads = 1, .k_head_size = HEAD, .dtype = FOLIO_F32),
        &cache));
    folio_layer_group group = {.cache = cache};
    CHECK_OK(folio_pool_create(ctx,
                               &FOLIO_WITH(folio_pool_desc, .num_blocks = 8, .block_size = BLOCK,
                                           .layer_groups = &group, .num_layer_groups = 1,
                                           .host_blocks = 8),
                               &pool));
    CHECK_OK(folio_sequence_create(pool, NULL, &first));
    CHECK_OK(folio_sequence_reserve(first, ROWS, 0, NULL));
    CHECK_OK(folio_sequence_commit(first, NULL));
    CHECK_OK(folio_sequence_fork(first, &second));
    CHECK_OK(folio_sequence_swap_out(second, FOLIO_TIER_HOST, NULL, &transfer));
    const part made[] = {
        {ctx, destroy_context, use_context},      {cache, destroy_kv_cache, use_kv_cache},
        {pool, destroy_pool, use_pool},           {first, destroy_sequence, use_sequence},
        {second, destroy_sequence, use_sequence}, {transfer, destroy_transfer, use_transfer}};
    memcpy(parts, made, sizeof made);
    return COUNT_OF(made);
}

/* Caches of two groups in one memory, which is the first one's. */
static int make_shared(folio_context *ctx, part *parts)
{
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 4, .block_size = BLOCK,
                   .num_kv_heads = 1, .k_head_size = HEAD, .dtype = FOLIO_F32);
    const folio_kv_cache_desc *descs[] = {&desc, &desc};
    folio_kv_cache *caches[2] = {NULL, NULL};
    CHECK_OK(folio_kv_cache_create_shared(ctx, descs, 2, caches));
    const part made[] = {{ctx, destroy_context, use_context},
                         {caches[0], destroy_kv_cache, use_kv_cache},
                         {caches[1], destroy_kv_cache, use_kv_cache}};
    memcpy(parts, made, sizeof made);
    return COUNT_OF(made);
}

/* Destroys in the order that number `order` names: the first is order % n, and so on. */
static void destroy_all(part *parts, int n, int order)
{
    for (int left = n; left > 0; left--) {
        int i = order % left;
        order /= left;
        parts[i].destroy(parts[i].object);
        memmove(&parts[i], &parts[i + 1], (size_t)(left - 1 - i) * sizeof *parts);
        for (int k = 0; k < left - 1; k++) parts[k].use(parts[k].object);
    }
}

static int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }

static folio_context *context_of(const char *backend, const folio_allocator *allocator)
{
    if (strcmp(backend, "device") == 0) return fake_device_context(allocator);
    return support_context(backend, 2, allocator);
}

static void every_order(const char *backend, make_graph make)
{
    int orders = 1;
    for (int order = 0; order < orders && test_failures() == 0; order++) {
        quarantine q;
        folio_allocator allocator = quarantine_open(&q);
        part parts[MAX_PARTS];
        folio_context *ctx = context_of(backend, &allocator);
        REQUIRE_TEST(ctx != NULL);
        int n = make(ctx, parts);
        orders = factorial(n);
        destroy_all(parts, n, order);
        quarantine_close(&q);
        CHECK_INT(fake_device_count().live, 0);
        CHECK_MSG(test_failures() == 0, "in order %d of %s", order, backend);
    }
}

TEST(lifetimes, attention_in_every_order)
{
    every_order("cpu", make_step);
    every_order("reference", make_step);
    every_order("device", make_step);
}

TEST(lifetimes, kv_memory_in_every_order)
{
    every_order("reference", make_memory);
    every_order("device", make_memory);
    every_order("reference", make_shared);
    every_order("device", make_shared);
}

/* The vLLM 0.6 layer: a state with plans of its own, and what was made from it. */
static int make_vllm06(const folio_vllm06_backend *b, const folio_allocator *a, part *parts)
{
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *impl = NULL;
    folio_vllm06_metadata *metadata = NULL;
    folio_vllm06_builder *builder = NULL;
    folio_batch *batch = NULL;
    const float slopes[] = {0.5f};
    CHECK_OK(folio_vllm06_state_create(
        "cpu", &FOLIO_WITH(folio_context_desc, .num_threads = 1, .allocator = *a), &state));
    CHECK_OK(folio_vllm06_make_impl(state, b,
                                    &FOLIO_WITH(folio_vllm06_impl_desc, .num_heads = 1,
                                                .head_size = HEAD, .alibi_slopes = slopes,
                                                .dtype = FOLIO_F32),
                                    &impl));
    const int32_t seq_lens[] = {ROWS};
    CHECK_OK(folio_vllm06_make_metadata(state, b,
                                        &FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1,
                                                    .seq_lens = seq_lens, .is_prompt = 1),
                                        &metadata));
    CHECK_OK(folio_vllm06_builder_create(
        state, b, &FOLIO_WITH(folio_vllm06_builder_desc, .block_size = BLOCK), &builder));
    CHECK_OK(folio_batch_create(folio_vllm06_state_context(state),
                                &FOLIO_WITH(folio_batch_desc, .block_size = BLOCK), &batch));
    float x[ROWS][HEAD], out[ROWS][HEAD];
    for (int i = 0; i < ROWS * HEAD; i++) x[i / HEAD][i % HEAD] = 1;
    folio_tensor t = {.data = x, .dtype = FOLIO_F32, .tokens = ROWS};
    folio_vllm06_forward_args args =
        FOLIO_WITH(folio_vllm06_forward_args, .query = t, .key = t, .value = t,
                   .attn_metadata = metadata, .output = {out, FOLIO_F32, ROWS, 0, 0});
    CHECK_OK(folio_vllm06_forward(impl, &args, NULL));
    use_metadata(metadata); /* its view lives with it */
    const part made[] = {{state, destroy_vllm06_state, use_state},
                         {impl, destroy_vllm06_impl, use_nothing},
                         {metadata, destroy_vllm06_metadata, use_metadata},
                         {builder, destroy_vllm06_builder, use_builder},
                         {batch, destroy_batch, use_batch}};
    memcpy(parts, made, sizeof made);
    return COUNT_OF(made);
}

TEST(lifetimes, vllm06_in_every_order)
{
    static const char *const names[] = {"xformers", "torch-sdpa", "ipex"};
    for (int i = 0; i < COUNT_OF(names); i++) {
        int orders = 1;
        for (int order = 0; order < orders && test_failures() == 0; order++) {
            quarantine q;
            folio_allocator allocator = quarantine_open(&q);
            part parts[MAX_PARTS];
            int n = make_vllm06(folio_vllm06_backend_find(names[i]), &allocator, parts);
            orders = factorial(n);
            destroy_all(parts, n, order);
            quarantine_close(&q);
            CHECK_MSG(test_failures() == 0, "in order %d of %s", order, names[i]);
        }
    }
}

/* A store is free for the next pool when the last sequence is gone, and not before. */
TEST(lifetimes, a_pool_that_sequences_hold_still_works)
{
    quarantine q;
    folio_allocator allocator = quarantine_open(&q);
    folio_context *ctx = support_context("reference", 1, &allocator);
    part parts[MAX_PARTS];
    int n = make_memory(ctx, parts);
    REQUIRE_TEST(n == 6);
    folio_sequence *first = parts[3].object;
    for (int i = 0; i < n; i++)
        if (parts[i].object != first) parts[i].destroy(parts[i].object);
    CHECK_OK(folio_sequence_reserve(first, 3, 0, NULL));
    CHECK_OK(folio_sequence_commit(first, NULL));
    CHECK_OK(folio_sequence_swap_out(first, FOLIO_TIER_HOST, NULL, NULL));
    CHECK_OK(folio_sequence_swap_in(first, NULL, NULL));
    CHECK(q.num_freed < q.counter.live);
    folio_sequence_destroy(first);
    quarantine_close(&q);
}

/* ---------------------------------------------------------------------------------------- threads */

static pthread_barrier_t start;

static void *destroy_one(void *arg)
{
    const part *p = arg;
    pthread_barrier_wait(&start);
    p->destroy(p->object);
    return NULL;
}

TEST(lifetimes, handles_may_be_destroyed_at_once)
{
    for (int round = 0; round < 50; round++) {
        quarantine q;
        folio_allocator allocator = quarantine_open(&q);
        part parts[MAX_PARTS];
        folio_context *ctx = support_context("reference", 1, &allocator);
        int n = round % 2 == 0 ? make_step(ctx, parts) : make_memory(ctx, parts);
        pthread_t threads[MAX_PARTS];
        pthread_barrier_init(&start, NULL, (unsigned)n);
        for (int i = 0; i < n; i++)
            CHECK(pthread_create(&threads[i], NULL, destroy_one, &parts[i]) == 0);
        for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&start);
        quarantine_close(&q);
    }
}
