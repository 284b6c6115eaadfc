/*
 * bench_pool_tiers.c: tiers of `folio bench pool`: a sequence moved out of the KV cache and back,
 * to host memory compared with a memcpy of as many bytes, and to a file.
 */
#include "bench/bench_pool.h"

#include "base/term.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A small model's cache: 512 KiB for a block of 16 tokens. */
enum { LAYERS = 8, KV_HEADS = 8, HEAD_SIZE = 128 };
enum { SWAP_BYTES = 64 << 20, STORE_BYTES = 32 << 20 };

typedef struct tiers {
    folio_tier tier;
    int64_t blocks, block_bytes; /* of the sequence, which fills the cache; K and V of a block */
    char *memory, *copy;         /* the cache's; where memcpy goes */
    folio_kv_cache *cache;
    folio_pool *pool;
    folio_sequence *sequence;
} tiers;

static bool memcpy_batch(void *state, double *seconds)
{
    tiers *s = state;
    double start = term_seconds();
    memcpy(s->copy, s->memory, (size_t)(s->blocks * s->block_bytes));
    __asm__ volatile("" : : "r"(s->copy) : "memory"); /* the copy is wanted */
    *seconds = term_seconds() - start;
    return true;
}

static bool out_batch(void *state, double *seconds)
{
    tiers *s = state;
    double start = term_seconds();
    BENCH_TRY(folio_sequence_swap_out(s->sequence, s->tier, NULL, NULL));
    *seconds = term_seconds() - start;
    return true;
}

static bool in_batch(void *state, double *seconds)
{
    tiers *s = state;
    folio_sequence_info info = {.struct_size = sizeof info};
    double start = term_seconds();
    BENCH_TRY(folio_sequence_swap_in(s->sequence, NULL, NULL));
    *seconds = term_seconds() - start;
    BENCH_TRY(folio_sequence_get_info(s->sequence, &info));
    if (info.num_blocks == s->blocks) return true;
    fprintf(stderr, "folio bench: %lld of %lld blocks came back\n", (long long)info.num_blocks,
            (long long)s->blocks);
    return false;
}

/* In memory of its own, all of it written: pages never written to would be copied too fast. */
static bool make_cache(bench_pool *b, tiers *s, int64_t bytes)
{
    folio_kv_cache_desc desc = FOLIO_WITH(
        folio_kv_cache_desc, .num_blocks = 1, .num_layers = LAYERS, .block_size = b->block_size,
        .num_kv_heads = KV_HEADS, .k_head_size = HEAD_SIZE, .dtype = FOLIO_F16);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    s->block_bytes = (int64_t)2 * LAYERS * KV_HEADS * HEAD_SIZE * b->block_size *
                     (int64_t)folio_dtype_size(desc.dtype);
    s->blocks = desc.num_blocks = bytes / s->block_bytes;
    BENCH_TRY(folio_kv_cache_get_shape("cpu", &desc, &shape));
    void *layers[LAYERS];
    s->memory = bench_alloc(shape.total_bytes, 1);
    s->copy = bench_alloc(shape.total_bytes, 1);
    for (int i = 0; i < LAYERS; i++) layers[i] = s->memory + i * shape.layer_bytes;
    folio_kv_memory memory =
        FOLIO_WITH(folio_kv_memory, .k = layers, .k_bytes = (size_t)shape.layer_bytes);
    BENCH_TRY(folio_kv_cache_wrap(b->ctx, &desc, &memory, &s->cache));
    return true;
}

/* A sequence that has all blocks, not known to the prefix cache: whatever moves is copied. */
static bool make_sequence(bench_pool *b, tiers *s)
{
    BENCH_TRY(folio_sequence_create(s->pool, NULL, &s->sequence));
    BENCH_TRY(folio_sequence_reserve(s->sequence, s->blocks * b->block_size, 0, NULL));
    BENCH_TRY(folio_sequence_commit(s->sequence, NULL));
    return true;
}

static bool make_tier_pool(bench_pool *b, tiers *s, const char *path)
{
    folio_layer_group group = {.cache = s->cache};
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = s->blocks, .block_size = b->block_size,
                   .layer_groups = &group, .store_path = path);
    if (path) desc.store_bytes = (s->blocks + 2) * (s->block_bytes + (64 << 10));
    else desc.host_blocks = s->blocks;
    BENCH_TRY(folio_pool_create(b->ctx, &desc, &s->pool));
    return make_sequence(b, s);
}

/*
 * The store's file loses its name as soon as the pool has it open: nothing is left behind, however
 * the program ends. Signals wait until then.
 */
static bool make_store_pool(bench_pool *b, tiers *s)
{
    const char *tmp = getenv("TMPDIR");
    char dir[4096], path[4096 + 16];
    sigset_t all, before;
    int n = snprintf(dir, sizeof dir, "%s/folio-bench-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (n >= (int)sizeof dir) {
        fprintf(stderr, "folio bench: TMPDIR is too long a name\n");
        return false;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool ok = mkdtemp(dir) != NULL;
    if (ok) {
        snprintf(path, sizeof path, "%s/store", dir);
        ok = make_tier_pool(b, s, path);
        unlink(path);
        rmdir(dir);
    } else {
        fprintf(stderr, "folio bench: %s cannot be made: %s\n", dir, strerror(errno));
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return ok;
}

static void destroy_tiers(tiers *s)
{
    folio_sequence_destroy(s->sequence);
    folio_pool_destroy(s->pool);
    folio_kv_cache_destroy(s->cache);
    free(s->memory);
    free(s->copy);
}

static bench_case tier_case(tiers *s, const char *name, bool (*batch)(void *, double *))
{
    return (bench_case){.name = name,
                        .blocks = s->blocks,
                        .per = "block",
                        .operations = s->blocks,
                        .bytes = s->block_bytes,
                        .batch = batch,
                        .state = s};
}

bool bench_swap(bench_pool *b)
{
    tiers s = {.tier = FOLIO_TIER_HOST};
    bool ok = make_cache(b, &s, SWAP_BYTES) && make_tier_pool(b, &s, NULL);
    bench_case cases[] = {
        tier_case(&s, "memcpy", memcpy_batch),
        tier_case(&s, "swap_out", out_batch),
        tier_case(&s, "swap_in", in_batch),
    };
    ok = ok && bench_measure(&b->report, cases, 3);
    destroy_tiers(&s);
    return ok;
}

bool bench_store(bench_pool *b)
{
    tiers s = {.tier = FOLIO_TIER_DISK};
    bool ok = make_cache(b, &s, STORE_BYTES) && make_store_pool(b, &s);
    bench_case cases[] = {
        tier_case(&s, "store_out", out_batch),
        tier_case(&s, "store_in", in_batch),
    };
    ok = ok && bench_measure(&b->report, cases, 2);
    destroy_tiers(&s);
    return ok;
}
