/*
 * test_vllm06_device.c: what vLLM 0.6's interface does on a device only: blocks swapped out to host memory and back,
 * all in one stream, states that work at once in streams of their own, and a decode in a captured graph.
 */
#include "support.h"

#include <cuda_runtime_api.h>
#include <folio/folio_vllm06.h>
#include <stdlib.h>

enum { BLOCKS = 24, HEADS = 4, KV_HEADS = 2, SIZE = 64, BLOCK = 16, TOKENS = 100 };
enum { BLOCK_ELEMENTS = BLOCK * KV_HEADS * SIZE, CACHE = 2 * BLOCKS * BLOCK_ELEMENTS };

#define CUDA_OK(call) CHECK_MSG((call) == cudaSuccess, "%s", #call)

static folio_vllm06_kv_cache make_cache(folio_context *ctx, folio_memory_kind kind)
{
    folio_vllm06_kv_cache c = {.bytes = CACHE * 2,
                               .dtype = FOLIO_BF16,
                               .block_size = BLOCK,
                               .num_kv_heads = KV_HEADS,
                               .head_size = SIZE,
                               .num_blocks = BLOCKS};
    CHECK_OK(folio_memory_create(ctx, kind, CACHE * 2, &c.key_cache));
    return c;
}

static void drop_cache(folio_context *ctx, folio_memory_kind kind, folio_vllm06_kv_cache *c)
{
    folio_memory_destroy(ctx, kind, c->key_cache, CACHE * 2);
}

/* Out, back to other blocks, and copied there: every step in the same stream, waited for once. */
TEST(vllm06_device, swap_to_the_host_and_back)
{
    static const folio_block_pair out[] = {{3, 0}, {7, 1}}, back[] = {{0, 9}, {1, 5}};
    static const folio_block_pair copy[] = {{9, 2}};
    uint16_t *image = malloc(CACHE * 2), *got = malloc(CACHE * 2);
    if (image == NULL || got == NULL) abort();
    for (int i = 0; i < CACHE; i++) image[i] = (uint16_t)support_bits(4, (uint64_t)i);
    folio_vllm06_state *state = NULL;
    cudaStream_t stream = NULL;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(folio_vllm06_state_create("cuda", NULL, &state));
    REQUIRE_TEST(state != NULL);
    folio_context *ctx = folio_vllm06_state_context(state);
    folio_run run = {.struct_size = sizeof run, .stream = stream};
    folio_vllm06_kv_cache here = make_cache(ctx, FOLIO_MEMORY_DEVICE);
    folio_vllm06_kv_cache there = make_cache(ctx, FOLIO_MEMORY_HOST);
    CHECK_OK(folio_memory_copy(ctx, here.key_cache, image, CACHE * 2, &run));
    CHECK_OK(folio_vllm06_swap_blocks(state, &here, &there, out, 2, &run));
    CHECK_OK(folio_vllm06_swap_blocks(state, &there, &here, back, 2, &run));
    CHECK_OK(folio_vllm06_copy_blocks(state, &here, 1, copy, 1, &run));
    CHECK_OK(folio_memory_copy(ctx, got, here.key_cache, CACHE * 2, &run));
    CHECK_OK(folio_run_wait(ctx, &run));
    for (int part = 0; part < 2; part++) {
        const uint16_t *was = image + part * BLOCKS * BLOCK_ELEMENTS;
        const uint16_t *is = got + part * BLOCKS * BLOCK_ELEMENTS;
        for (int block = 0; block < BLOCKS; block++) {
            int from = block == 9 || block == 2 ? 3 : block == 5 ? 7 : block;
            CHECK_MSG(memcmp(is + block * BLOCK_ELEMENTS, was + from * BLOCK_ELEMENTS,
                             BLOCK_ELEMENTS * 2) == 0,
                      "block %d of part %d is not what block %d was", block, part, from);
        }
    }
    drop_cache(ctx, FOLIO_MEMORY_DEVICE, &here);
    drop_cache(ctx, FOLIO_MEMORY_HOST, &there);
    folio_vllm06_state_destroy(state);
    CUDA_OK(cudaStreamDestroy(stream));
    free(image);
    free(got);
}

/* A prompt and its decodes: a state with a stream, a layer, a cache, tensors. */
typedef struct {
    folio_vllm06_state *state;
    folio_vllm06_impl *impl;
    folio_vllm06_metadata *metadata[2];
    folio_context *ctx;
    cudaStream_t stream;
    folio_vllm06_kv_cache cache;
    char *tensors; /* query, key, value, output: TOKENS rows of HEADS each */
} user;

enum { TENSOR = TOKENS * HEADS * SIZE };

static folio_vllm06_metadata *step_of(user *u, const folio_vllm06_backend *b, bool prompt)
{
    int32_t table[TOKENS / BLOCK + 1], len = prompt ? TOKENS - 1 : TOKENS;
    int64_t slots[TOKENS];
    for (int i = 0; i <= TOKENS / BLOCK; i++) table[i] = BLOCKS - 1 - i;
    for (int i = 0; i < TOKENS; i++) slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    folio_vllm06_metadata_fields f = FOLIO_WITH(
        folio_vllm06_metadata_fields, .num_prefills = prompt, .num_decode_tokens = !prompt,
        .slot_mapping = prompt ? slots : slots + TOKENS - 1, .seq_lens = &len,
        .block_tables = table, .block_tables_stride = TOKENS / BLOCK + 1);
    folio_vllm06_metadata *m = NULL;
    CHECK_OK(folio_vllm06_make_metadata(u->state, b, &f, &m));
    return m;
}

static void open_user(user *u, const folio_vllm06_backend *b, const uint16_t *numbers)
{
    static const float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
    folio_vllm06_impl_desc d =
        FOLIO_WITH(folio_vllm06_impl_desc, .num_heads = HEADS, .head_size = SIZE,
                   .num_kv_heads = KV_HEADS, .alibi_slopes = slopes, .dtype = FOLIO_BF16);
    void *memory = NULL;
    CHECK_OK(folio_vllm06_state_create("cuda", NULL, &u->state));
    CHECK_OK(folio_vllm06_make_impl(u->state, b, &d, &u->impl));
    u->ctx = folio_vllm06_state_context(u->state);
    u->cache = make_cache(u->ctx, FOLIO_MEMORY_DEVICE);
    CUDA_OK(cudaStreamCreateWithFlags(&u->stream, cudaStreamNonBlocking));
    CHECK_OK(folio_memory_create(u->ctx, FOLIO_MEMORY_DEVICE, 4 * TENSOR * 2, &memory));
    CHECK_OK(folio_memory_copy(u->ctx, memory, numbers, 4 * TENSOR * 2, NULL));
    CHECK_OK(folio_run_wait(u->ctx, NULL));
    u->tensors = memory;
    for (int i = 0; i < 2; i++) u->metadata[i] = step_of(u, b, i == 0);
}

static void close_user(user *u)
{
    for (int i = 0; i < 2; i++) folio_vllm06_metadata_destroy(u->metadata[i]);
    folio_memory_destroy(u->ctx, FOLIO_MEMORY_DEVICE, u->tensors, 4 * TENSOR * 2);
    drop_cache(u->ctx, FOLIO_MEMORY_DEVICE, &u->cache);
    folio_vllm06_impl_destroy(u->impl);
    folio_vllm06_state_destroy(u->state);
    CUDA_OK(cudaStreamDestroy(u->stream));
}

/* The prompt's rows, or the decode's one row behind them; nothing is waited for. */
static void attend(user *u, int step)
{
    int64_t first = step == 0 ? 0 : TOKENS - 1, rows = step == 0 ? TOKENS - 1 : 1;
    folio_tensor t[4];
    for (int i = 0; i < 4; i++) {
        int64_t row = (i == 1 || i == 2 ? KV_HEADS : HEADS) * SIZE * 2;
        t[i] = (folio_tensor){
            .data = u->tensors + i * TENSOR * 2 + first * row, .dtype = FOLIO_BF16, .tokens = rows};
    }
    folio_vllm06_forward_args a =
        FOLIO_WITH(folio_vllm06_forward_args, .query = t[0], .key = t[1], .value = t[2],
                   .kv_cache = &u->cache, .attn_metadata = u->metadata[step], .output = t[3]);
    const folio_run run = {.struct_size = sizeof run, .stream = u->stream};
    CHECK_OK(folio_vllm06_forward(u->impl, &a, &run));
}

/* Three states take turns without waiting; each has what it has alone. */
TEST(vllm06_device, states_at_once)
{
    const folio_vllm06_backend *b = folio_vllm06_backend_find("xformers");
    uint16_t *numbers = malloc(4 * TENSOR * 2), *got[2] = {malloc(TENSOR * 2), malloc(TENSOR * 2)};
    if (numbers == NULL || got[0] == NULL || got[1] == NULL) abort();
    for (int i = 0; i < 4 * TENSOR; i++)
        numbers[i] = (uint16_t)kit_encode(FOLIO_BF16, (double)support_random(3, (uint64_t)i));
    user users[3] = {{0}};
    for (int i = 0; i < 3; i++) open_user(&users[i], b, numbers);
    attend(&users[0], 0);
    attend(&users[0], 1);
    CUDA_OK(cudaStreamSynchronize(users[0].stream));
    for (int round = 0; round < 5; round++)
        for (int i = 1; i < 3; i++)
            for (int step = 0; step < 2; step++) attend(&users[i], step);
    for (int i = 0; i < 3; i++) {
        user *u = &users[i];
        folio_run run = {.struct_size = sizeof run, .stream = u->stream};
        CHECK_OK(
            folio_memory_copy(u->ctx, got[i > 0], u->tensors + 3 * TENSOR * 2, TENSOR * 2, &run));
        CHECK_OK(folio_run_wait(u->ctx, &run));
        if (i == 0) CHECK(memcmp(got[0], numbers + 3 * TENSOR, TENSOR * 2) != 0);
        else
            CHECK_MSG(memcmp(got[0], got[1], TENSOR * 2) == 0, "state %d differs from the first",
                      i);
    }
    for (int i = 0; i < 3; i++) close_user(&users[i]);
    free(numbers);
    free(got[0]);
    free(got[1]);
}

/* A graph of one decode in the place of the user's own; what it captured is returned. */
static cudaGraphExec_t capture_decode(user *u, const folio_vllm06_backend *b,
                                      folio_vllm06_graph_input_buffers *buffers)
{
    folio_vllm06_graph_capture_desc d =
        FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = b, .max_batch_size = 1,
                   .max_seq_len_to_capture = 2 * TOKENS, .block_size = BLOCK);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay = NULL;
    CHECK_OK(folio_vllm06_graph_capture_begin(u->state, &d));
    CHECK_OK(folio_vllm06_graph_capture_get_metadata_for_batch(u->state, 1, 0, &u->metadata[1]));
    CHECK_OK(folio_vllm06_graph_capture_end(u->state));
    CHECK_OK(folio_vllm06_get_graph_input_buffers(u->state, u->metadata[1], 0, buffers));
    attend(u, 1); /* it makes the plan */
    CUDA_OK(cudaStreamSynchronize(u->stream));
    CUDA_OK(cudaStreamBeginCapture(u->stream, cudaStreamCaptureModeThreadLocal));
    attend(u, 1);
    CUDA_OK(cudaStreamEndCapture(u->stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return replay;
}

/* A decode captured before its length, its blocks and its slot are known: the row and the cache of a plain one. */
TEST(vllm06_device, graph_replay)
{
    const folio_vllm06_backend *b = folio_vllm06_backend_find("xformers");
    uint16_t *numbers = malloc(4 * TENSOR * 2), *cache[2] = {malloc(CACHE * 2), malloc(CACHE * 2)};
    uint16_t *rows[2] = {malloc(TENSOR * 2), malloc(TENSOR * 2)};
    if (!numbers || !cache[0] || !cache[1] || !rows[0] || !rows[1]) abort();
    for (int i = 0; i < 4 * TENSOR; i++)
        numbers[i] = (uint16_t)kit_encode(FOLIO_BF16, (double)support_random(3, (uint64_t)i));
    user users[2] = {{0}};
    for (int i = 0; i < 2; i++) {
        user *u = &users[i];
        open_user(u, b, numbers);
        folio_run run = {.struct_size = sizeof run, .stream = u->stream};
        CHECK_OK(folio_memory_fill(u->ctx, u->cache.key_cache, 0, CACHE * 2, &run));
        attend(u, 0);
        if (i == 0) attend(u, 1);
        else {
            folio_vllm06_graph_input_buffers buffers = {.struct_size = sizeof buffers};
            folio_vllm06_metadata *step = u->metadata[1];
            cudaGraphExec_t replay = capture_decode(u, b, &buffers);
            CHECK_OK(folio_vllm06_prepare_graph_input_buffers(u->state, &buffers, step, 0));
            CHECK_OK(folio_vllm06_begin_forward(u->state, u->metadata[1], &run));
            CUDA_OK(cudaGraphLaunch(replay, u->stream));
            CUDA_OK(cudaStreamSynchronize(u->stream));
            CUDA_OK(cudaGraphExecDestroy(replay));
            folio_vllm06_metadata_destroy(step);
        }
        CHECK_OK(folio_memory_copy(u->ctx, cache[i], u->cache.key_cache, CACHE * 2, &run));
        CHECK_OK(folio_memory_copy(u->ctx, rows[i], u->tensors + 3 * TENSOR * 2, TENSOR * 2, &run));
        CHECK_OK(folio_run_wait(u->ctx, &run));
    }
    CHECK(memcmp(cache[0], cache[1], CACHE * 2) == 0);
    for (int i = (TOKENS - 1) * HEADS * SIZE; i < TOKENS * HEADS * SIZE; i++) {
        double a = kit_decode(FOLIO_BF16, rows[0][i]), c = kit_decode(FOLIO_BF16, rows[1][i]);
        CHECK_MSG(a - c <= 0x1p-6 && c - a <= 0x1p-6, "column %d: %g, in the graph %g", i, a, c);
    }
    for (int i = 0; i < 2; i++) {
        close_user(&users[i]);
        free(cache[i]);
        free(rows[i]);
    }
    free(numbers);
}
