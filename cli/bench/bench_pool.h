/*
 * bench_pool.h: the case sets of `folio bench pool`. A set makes pools of its own, times its cases
 * alternately and leaves nothing behind; false: a call failed, and stderr says which.
 */
#ifndef FOLIO_BENCH_POOL_H
#define FOLIO_BENCH_POOL_H

#include "bench/bench.h"

#include <folio/folio_pool.h>

typedef struct bench_pool {
    bench_report report;
    folio_context *ctx;
    int32_t block_size;
    int64_t blocks[BENCH_MAX_LIST], threads[BENCH_MAX_LIST];
    int num_blocks, num_threads;
    int64_t drawn; /* random numbers so far */
} bench_pool;

/* bench_pool.c */
bool bench_alloc_free(bench_pool *b);
bool bench_fragmented(bench_pool *b);
bool bench_threads(bench_pool *b);

/* bench_pool_prefix.c */
bool bench_match(bench_pool *b);
bool bench_evict_commit(bench_pool *b);

/* bench_pool_sequence.c */
bool bench_step(bench_pool *b);
bool bench_fork(bench_pool *b);
bool bench_batch(bench_pool *b);

/* bench_pool_tiers.c */
bool bench_swap(bench_pool *b);
bool bench_store(bench_pool *b);

/* ---- Shared by them */

/* A pool without caches; NULL: it failed, and said why. */
folio_pool *bench_make_pool(bench_pool *b, int64_t blocks);

/* The next random number below `below`, and n token ids that no block has had before. */
int64_t bench_draw(bench_pool *b, int64_t below);
void bench_draw_ids(bench_pool *b, int32_t *ids, int64_t n);
/* Puts `of` in random order, as far as its first n. */
void bench_shuffle(bench_pool *b, int32_t *of, int64_t n, int64_t count);

/* The calls under the clock: a failure ends the batch. */
#define BENCH_TRY(call)                                                                            \
    do {                                                                                           \
        folio_status status_ = (call);                                                             \
        if (status_ != FOLIO_OK) return bench_ok(status_, #call);                                  \
    } while (0)

#endif
