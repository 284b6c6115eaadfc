/*
 * limits.c: the largest things that engines ask for, once each, with a report: a block table of a million entries, a
 * context of 2^20 tokens, a step of 100,000 sequences, and a scheduler that runs ten million steps in memory that does
 * not grow.
 *
 *     limits [steps]      the scheduler's steps; 10,000,000
 */
#include "kit/kit.h"

#include <folio/folio_pool.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int failures;

static void must(folio_status status)
{
    if (status == FOLIO_OK) return;
    fprintf(stderr, "%s\n", folio_last_error());
    exit(1);
}

static void *room(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count, size);
    if (memory == NULL) fprintf(stderr, "no memory for %lld numbers\n", (long long)count), exit(1);
    return memory;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Bytes that the process has in memory. */
static int64_t resident(void)
{
    long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f != NULL) {
        if (fscanf(f, "%*s %lld", &pages) != 1) pages = 0;
        fclose(f);
    }
    return pages * (int64_t)sysconf(_SC_PAGESIZE);
}

static void report(const char *what, double seconds, const char *result, bool good)
{
    printf("%-52s %8.2f s  %7.1f MiB  %s%s\n", what, seconds, (double)resident() / 1048576, result,
           good ? "" : "   FAILED");
    fflush(stdout);
    failures += !good;
}

/* ---------------------------------------------------------------------------------- large steps */

enum { HEADS = 4, KV_HEADS = 2, D = 16, BLOCK = 16, BLOCKS = 512 };

typedef struct {
    const char *what;
    int64_t num_seqs, query_len, seq_len; /* seq_len: of the longest; others are random */
} large;

static folio_kv_cache *make_cache(folio_context *ctx)
{
    folio_kv_cache *cache;
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = KV_HEADS, .k_head_size = D, .dtype = FOLIO_BF16);
    must(folio_kv_cache_create(ctx, &desc, &cache));
    int64_t tokens = BLOCKS * BLOCK, numbers = tokens * KV_HEADS * D;
    float *k = room(numbers, sizeof *k), *v = room(numbers, sizeof *v);
    int64_t *slots = room(tokens, sizeof *slots);
    for (int64_t i = 0; i < numbers; i++) {
        k[i] = (float)kit_random(1, KIT_K, 0, i, 0, 0);
        v[i] = (float)kit_random(1, KIT_V, 0, i, 0, 0);
    }
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_F32, tokens, 0, 0},
                                      .v = {v, FOLIO_F32, tokens, 0, 0}, .slots = slots);
    must(folio_kv_cache_write(cache, 0, &write, NULL));
    free(k), free(v), free(slots);
    return cache;
}

/* All tables name the same few blocks, over and over, so that tables are large and memory is not. */
static void run_large(const char *backend, const large *l, const int32_t *start,
                      const int32_t *indices, const int32_t *lens, const float *q, void *out,
                      folio_dtype dtype)
{
    folio_context *ctx = kit_context(backend, NULL, 0);
    if (ctx == NULL) fprintf(stderr, "%s\n", kit_error()), exit(1);
    folio_kv_cache *cache = make_cache(ctx);
    int64_t rows = l->num_seqs * l->query_len;
    folio_attention_desc attention = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS);
    folio_step step = FOLIO_WITH(folio_step, .num_seqs = l->num_seqs, .seq_lens = lens,
                                 .table = {.kind = FOLIO_TABLE_CSR,
                                           .indices = indices,
                                           .start = start,
                                           .num_indices = start[l->num_seqs]});
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {(void *)(uintptr_t)q, FOLIO_F32, rows, 0, 0},
                                 .out = {out, dtype, rows, 0, 0});
    must(folio_attend(ctx, &attention, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL));
    folio_kv_cache_destroy(cache);
    folio_context_destroy(ctx);
}

static void check_large(const large *l)
{
    int64_t numbers = l->num_seqs * l->query_len * HEADS * D;
    int32_t *lens = room(l->num_seqs, sizeof *lens), *start = room(l->num_seqs + 1, sizeof *start);
    for (int64_t i = 0; i < l->num_seqs; i++) {
        lens[i] = (int32_t)(i == 0 ? l->seq_len
                                   : kit_random_int(2, KIT_USER, i, l->query_len, 4 * BLOCK));
        start[i + 1] = start[i] + (lens[i] + BLOCK - 1) / BLOCK;
    }
    int32_t *indices = room(start[l->num_seqs], sizeof *indices);
    for (int64_t i = 0; i < start[l->num_seqs]; i++)
        indices[i] = (int32_t)kit_random_int(3, KIT_USER, i, 0, BLOCKS - 1);
    float *q = room(numbers, sizeof *q), *out = room(numbers, sizeof *out);
    double *ref = room(numbers, sizeof *ref), error = 0, most = 0;
    for (int64_t i = 0; i < numbers; i++) q[i] = (float)kit_random(4, KIT_Q, 0, i, 0, 0);
    double begin = now();
    run_large("cpu", l, start, indices, lens, q, out, FOLIO_F32);
    double seconds = now() - begin;
    run_large("reference", l, start, indices, lens, q, ref, FOLIO_F64);
    for (int64_t i = 0; i < numbers; i++) {
        error = fmax(error, isfinite(out[i]) ? fabs(out[i] - ref[i]) : INFINITY);
        most = fmax(most, fabs(ref[i]));
    }
    char text[80];
    snprintf(text, sizeof text, "largest error %.1e of %.1e", error, most);
    report(l->what, seconds, text, error <= 1e-5 * most);
    free(lens), free(start), free(indices), free(q), free(out), free(ref);
}

/* ------------------------------------------------------------------------- ten million steps */

enum { RUNNING = 4, PROMPTS = 7, MOST = 160 };

typedef struct {
    folio_sequence *sequence;
    int64_t len, end;
    int32_t ids[MOST];
} request;

static _Atomic int64_t live_bytes;

static void *count_alloc(void *user, size_t size, size_t alignment)
{
    (void)user;
    void *memory = NULL;
    if (posix_memalign(&memory, alignment < sizeof memory ? sizeof memory : alignment, size) != 0)
        return NULL;
    live_bytes += (int64_t)size;
    return memory;
}

static void count_free(void *user, void *memory, size_t size)
{
    (void)user;
    live_bytes -= (int64_t)size;
    free(memory);
}

/* A prompt of one of a few beginnings, so that some are found in the prefix cache. */
static void begin_request(folio_pool *pool, request *r, int64_t number)
{
    int64_t prompt = kit_random_int(5, KIT_USER, number, 1, MOST - 40);
    r->end = prompt + kit_random_int(6, KIT_USER, number, 1, 40);
    for (int64_t i = 0; i < r->end; i++)
        r->ids[i] = (int32_t)(i < 64 ? number % PROMPTS : number) + (int32_t)i;
    must(folio_sequence_create(pool, NULL, &r->sequence));
    folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = prompt - 1, .ids = r->ids);
    int64_t matched;
    must(folio_sequence_match(r->sequence, &tokens, &matched, NULL));
    must(folio_sequence_reserve(r->sequence, prompt - matched, 0, NULL));
    r->len = prompt;
}

/* One step: a batch and a plan of all requests; each then gets a token, or its place goes to another. */
static void run_step(folio_pool *pool, folio_batch *batch, folio_plan *plan, request *r,
                     int64_t *num_requests)
{
    folio_batch_clear(batch);
    for (int i = 0; i < RUNNING; i++) {
        if (r[i].sequence == NULL) begin_request(pool, &r[i], (*num_requests)++);
        must(folio_batch_add_sequences(batch, 0, &r[i].sequence, 1, NULL));
    }
    must(folio_plan_update(plan, batch, NULL));
    for (int i = 0; i < RUNNING; i++) {
        folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = r[i].len, .ids = r[i].ids);
        must(folio_sequence_commit(r[i].sequence, &tokens));
        if (r[i].len++ < r[i].end) {
            must(folio_sequence_reserve(r[i].sequence, 1, 0, NULL));
            continue;
        }
        folio_sequence_destroy(r[i].sequence);
        r[i].sequence = NULL;
    }
}

static void check_steps(int64_t steps)
{
    folio_context *ctx;
    folio_pool *pool;
    folio_batch *batch;
    folio_plan *plan;
    folio_attention *attention;
    must(folio_context_create(&FOLIO_WITH(folio_context_desc, .backend = "cpu", .num_threads = 1,
                                          .allocator = {count_alloc, count_free, NULL}),
                              &ctx));
    folio_kv_cache *cache = make_cache(ctx);
    folio_layer_group group = {.cache = cache};
    must(folio_pool_create(ctx, &FOLIO_WITH(folio_pool_desc, .layer_groups = &group), &pool));
    must(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .cache = cache), &batch));
    must(folio_attention_create(ctx,
                                &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                            .num_kv_heads = KV_HEADS, .k_head_size = D,
                                            .dtype = FOLIO_F32, .kv_dtype = FOLIO_BF16),
                                &attention));
    must(folio_plan_create(
        ctx,
        &FOLIO_WITH(folio_plan_desc, .attentions = &attention, .num_attentions = 1, .cache = cache),
        &plan));
    request running[RUNNING] = {{0}};
    int64_t num_requests = 0, most = 0, memory = 0; /* most: bytes held in the first tenth */
    double begin = now();
    for (int64_t step = 0; step < steps; step++) {
        run_step(pool, batch, plan, running, &num_requests);
        if (step <= steps / 10 && live_bytes > most) most = live_bytes;
        if (step == steps / 10) memory = resident();
        if (isatty(2) && step % 100000 == 0) fprintf(stderr, "\r%3d %%", (int)(100 * step / steps));
    }
    if (isatty(2)) fprintf(stderr, "\r");
    double seconds = now() - begin;
    must(folio_pool_check(pool));
    int64_t held = live_bytes, grown = resident() - memory;
    char what[80], text[120];
    snprintf(what, sizeof what, "%lld steps of a scheduler, %lld requests", (long long)steps,
             (long long)num_requests);
    snprintf(text, sizeof text,
             "holds %lld bytes, %lld at most in the first tenth; since then %+lld KiB",
             (long long)held, (long long)most, (long long)grown / 1024);
    report(what, seconds, text, held <= most && grown <= 1 << 20);
    for (int i = 0; i < RUNNING; i++) folio_sequence_destroy(running[i].sequence);
    folio_plan_destroy(plan);
    folio_attention_destroy(attention);
    folio_batch_destroy(batch);
    folio_pool_destroy(pool);
    folio_kv_cache_destroy(cache);
    folio_context_destroy(ctx);
    if (live_bytes != 0) report("all objects are gone", 0, "bytes are left", false);
}

int main(int argc, char **argv)
{
    static const large all[] = {
        {"one sequence, a table of 1,000,000 blocks", 1, 1, 16000000},
        {"16 rows over a context of 2^20 tokens", 1, 16, 1 << 20},
        {"a step of 100,000 sequences", 100000, 1, 4 * BLOCK},
        {"100,000 sequences, one of 2^20 tokens", 100000, 1, 1 << 20},
    };
    char *end = NULL;
    int64_t steps = argc > 1 ? strtoll(argv[1], &end, 10) : 10000000;
    if (argc > 2 || steps < 10 || (end != NULL && *end != 0)) {
        fprintf(stderr, "usage: limits [steps], 10 or more\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) check_large(&all[i]);
    check_steps(steps);
    printf("%d passed, %d failed\n", 5 - failures, failures);
    return failures > 0;
}
