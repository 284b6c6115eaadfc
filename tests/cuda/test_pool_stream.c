/*
 * test_pool_stream.c: a pool on a stream of the device that stands still. Copies and swaps are queued and nobody
 * waits for them; when the stream goes on, every byte comes out where it belongs. That contents are right in all
 * other ways is what folio_tests says with FOLIO_TESTS_BACKEND=cuda. Not for compute-sanitizer, which waits for
 * every launch itself.
 */
#include "cuda/device_rig.h"

#include <folio/folio_pool.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 3, KV_HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 96, TOKENS = 600 };
enum { ROW = KV_HEADS * SIZE, KV_BYTES = TOKENS * ROW * 2 };

/* Keeps a stream from going on: until it is opened, or half a minute where somebody waits for it. */
typedef struct {
    atomic_bool open;
    atomic_bool late;
} gate;

static void CUDART_CB stand(void *user)
{
    gate *g = user;
    time_t begin = time(NULL);
    while (!atomic_load(&g->open)) {
        usleep(200);
        if (time(NULL) - begin < 30) continue;
        atomic_store(&g->late, true);
        return;
    }
}

typedef struct {
    folio_context *ctx;
    folio_kv_cache *cache;
    folio_pool *pool;
    folio_run run;
    uint16_t *rows;  /* pinned: what is written, [K, V][TOKENS][ROW] */
    uint16_t *seen;  /* pinned: what is read                          */
    uint16_t *noise; /* pinned: 0xFF for all blocks                   */
    gate gate;
} world;

static void open_world(world *w, const char *store)
{
    memset(w, 0, sizeof *w);
    w->ctx = device_context();
    w->run = (folio_run){.struct_size = sizeof w->run, .stream = device_stream(w->ctx)};
    folio_kv_cache_desc c = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS, .block_size = BLOCK,
        .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_BF16);
    CHECK_OK(folio_kv_cache_create(w->ctx, &c, &w->cache));
    folio_layer_group group = {.cache = w->cache};
    folio_pool_desc p =
        FOLIO_WITH(folio_pool_desc, .num_blocks = BLOCKS, .block_size = BLOCK,
                   .layer_groups = &group, .flags = FOLIO_POOL_CHECK, .host_blocks = 128,
                   .store_path = store, .store_bytes = 64 << 20, .stream = w->run.stream);
    CHECK_OK(folio_pool_create(w->ctx, &p, &w->pool));
    size_t noise = (size_t)BLOCKS * BLOCK * ROW * 2;
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_HOST, 2 * KV_BYTES, (void **)&w->rows));
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_HOST, 2 * KV_BYTES, (void **)&w->seen));
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_HOST, noise, (void **)&w->noise));
    for (uint32_t i = 0, x = 1; i < 2 * TOKENS * ROW; i++) {
        x = x * 1664525u + 1013904223u;
        w->rows[i] = (uint16_t)(0x3e00u | (x >> 16 & 0x81ffu));
    }
    memset(w->noise, 0xFF, noise);
}

static void close_world(world *w)
{
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_HOST, w->rows, 2 * KV_BYTES);
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_HOST, w->seen, 2 * KV_BYTES);
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_HOST, w->noise, (size_t)BLOCKS * BLOCK * ROW * 2);
    CHECK_OK(folio_pool_check(w->pool));
    folio_pool_destroy(w->pool);
    folio_kv_cache_destroy(w->cache);
    device_close(w->ctx);
}

/* Layer l has the tokens' rows from token l on, so that layers differ. */
static void write_tokens(world *w, folio_sequence *s, int64_t n)
{
    int64_t slots[TOKENS];
    CHECK_OK(folio_sequence_reserve(s, n, 0, slots));
    for (int32_t l = 0; l < LAYERS; l++) {
        folio_kv_write write = FOLIO_WITH(
            folio_kv_write, .k = {w->rows + l * ROW, FOLIO_BF16, n, 0, 0},
            .v = {w->rows + TOKENS * ROW + l * ROW, FOLIO_BF16, n, 0, 0}, .slots = slots);
        CHECK_OK(folio_kv_cache_write(w->cache, l, &write, &w->run));
    }
    CHECK_OK(folio_sequence_commit(s, NULL));
}

/* 0xFF into every free block, in the stream's order. */
static void spoil_free(world *w)
{
    uint8_t states[BLOCKS];
    int64_t blocks[BLOCKS], n = 0;
    CHECK_OK(folio_pool_get_block_states(w->pool, FOLIO_TIER_DEVICE, 0, BLOCKS, states));
    for (int64_t b = 0; b < BLOCKS; b++)
        if (states[b] == FOLIO_BLOCK_FREE) blocks[n++] = b;
    folio_kv_rows rows =
        FOLIO_WITH(folio_kv_rows, .k = w->noise, .v = w->noise, .blocks = blocks, .num_blocks = n);
    for (int32_t l = 0; l < LAYERS; l++) CHECK_OK(folio_kv_cache_pack(w->cache, l, &rows, &w->run));
}

static bool is_right(world *w, const folio_sequence *s, int64_t n)
{
    const int32_t *table = NULL;
    int64_t num_blocks = 0, slots[TOKENS];
    bool right = true;
    CHECK_OK(folio_sequence_get_table(s, 0, &table, &num_blocks));
    for (int64_t i = 0; i < n; i++) slots[i] = (int64_t)table[i / BLOCK] * BLOCK + i % BLOCK;
    for (int32_t l = 0; l < LAYERS; l++) {
        folio_kv_gather gather = FOLIO_WITH(folio_kv_gather, .k = {w->seen, FOLIO_BF16, n, 0, 0},
                                            .v = {w->seen + TOKENS * ROW, FOLIO_BF16, n, 0, 0},
                                            .slots = slots, .num_slots = n);
        CHECK_OK(folio_kv_cache_gather(w->cache, l, &gather, &w->run));
        CHECK_OK(folio_run_wait(w->ctx, &w->run));
        for (int part = 0; part < 2; part++)
            right &= memcmp(w->seen + part * TOKENS * ROW, w->rows + part * TOKENS * ROW + l * ROW,
                            (size_t)n * ROW * 2) == 0;
    }
    return right;
}

/* Two sequences that share all but their last blocks go out, over spoilt memory, and in again, while nothing runs. */
TEST(pool_stream, nothing_waits_for_a_stream_that_stands)
{
    static world w;
    open_world(&w, NULL);
    folio_sequence *a = NULL, *b = NULL;
    CHECK_OK(folio_sequence_create(w.pool, NULL, &a));
    write_tokens(&w, a, 57);
    CHECK_OK(folio_run_wait(w.ctx, &w.run));
    CUDA_OK(cudaLaunchHostFunc(w.run.stream, stand, &w.gate));
    CHECK_OK(folio_sequence_truncate(a, 0));
    spoil_free(&w);
    write_tokens(&w, a, 505);
    CHECK_OK(folio_sequence_fork(a, &b));
    CHECK_OK(folio_sequence_reserve(b, 1, 0, NULL));
    CHECK_OK(folio_pool_run_copies(w.pool, &w.run));
    CHECK_OK(folio_sequence_truncate(b, 505));
    CHECK_OK(folio_sequence_swap_out(a, FOLIO_TIER_HOST, NULL, NULL));
    CHECK_OK(folio_sequence_swap_out(b, FOLIO_TIER_HOST, &w.run, NULL));
    spoil_free(&w);
    CHECK_OK(folio_sequence_swap_in(b, NULL, NULL));
    CHECK_OK(folio_sequence_swap_in(a, &w.run, NULL));
    CHECK(cudaStreamQuery(w.run.stream) == cudaErrorNotReady);
    CHECK(!atomic_load(&w.gate.late));
    atomic_store(&w.gate.open, true);
    CHECK(is_right(&w, b, 505));
    CHECK(is_right(&w, a, 505));
    CHECK(!atomic_load(&w.gate.late));
    folio_sequence_destroy(a);
    folio_sequence_destroy(b);
    close_world(&w);
}

/* By way of the file the mover waits, and the caller with a handle does not. */
TEST(pool_stream, the_file_is_written_when_the_stream_has_come_there)
{
    static world w;
    char path[64];
    snprintf(path, sizeof path, "/tmp/folio-cuda-tests-%d.store", (int)getpid());
    unlink(path);
    open_world(&w, path);
    folio_sequence *a = NULL;
    folio_transfer *out = NULL;
    CHECK_OK(folio_sequence_create(w.pool, NULL, &a));
    CUDA_OK(cudaLaunchHostFunc(w.run.stream, stand, &w.gate));
    write_tokens(&w, a, 300);
    CHECK_OK(folio_sequence_swap_out(a, FOLIO_TIER_DISK, NULL, &out));
    CHECK(folio_transfer_is_done(out) == 0);
    atomic_store(&w.gate.open, true);
    CHECK_OK(folio_transfer_wait(out));
    folio_transfer_destroy(out);
    spoil_free(&w);
    CHECK_OK(folio_sequence_swap_in(a, NULL, NULL));
    CHECK(is_right(&w, a, 300));
    CHECK(!atomic_load(&w.gate.late));
    folio_sequence_destroy(a);
    close_world(&w);
    unlink(path);
}

/* What a call is given in host memory it has read when it returns, pinned or not. */
TEST(pool_stream, pinned_slots_may_change_behind_a_write)
{
    enum { N = 57 };
    static world w;
    int64_t *slots = NULL;
    open_world(&w, NULL);
    folio_sequence *a = NULL;
    CHECK_OK(folio_memory_create(w.ctx, FOLIO_MEMORY_HOST, N * sizeof *slots, (void **)&slots));
    CHECK_OK(folio_sequence_create(w.pool, NULL, &a));
    CHECK_OK(folio_sequence_reserve(a, N, 0, slots));
    CUDA_OK(cudaLaunchHostFunc(w.run.stream, stand, &w.gate));
    for (int32_t l = 0; l < LAYERS; l++) {
        folio_kv_write write =
            FOLIO_WITH(folio_kv_write, .k = {w.rows + l * ROW, FOLIO_BF16, N, 0, 0},
                       .v = {w.rows + TOKENS * ROW + l * ROW, FOLIO_BF16, N, 0, 0}, .slots = slots);
        CHECK_OK(folio_kv_cache_write(w.cache, l, &write, &w.run));
    }
    CHECK_OK(folio_sequence_commit(a, NULL));
    memset(slots, 0xff, N * sizeof *slots);
    atomic_store(&w.gate.open, true);
    CHECK(is_right(&w, a, N));
    CHECK(!atomic_load(&w.gate.late));
    folio_sequence_destroy(a);
    folio_memory_destroy(w.ctx, FOLIO_MEMORY_HOST, slots, N * sizeof *slots);
    close_world(&w);
}
