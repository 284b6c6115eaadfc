/* bench_pool_sequence.c: sequences of `folio bench pool`: a step of many, forks, batches. */
#include "bench/bench_pool.h"

#include "base/term.h"

#include <stdlib.h>

enum { RUNNING = 256 };

typedef struct running {
    bench_pool *b;
    folio_pool *pool;
    folio_sequence *sequences[RUNNING];
    int32_t *ids;        /* [RUNNING][full] */
    int64_t steps, done; /* step: until the sequences start over */
    int64_t half, full;
    folio_batch *batch;
} running;

static bool make_running(bench_pool *b, running *s, int64_t length, int64_t spare_blocks)
{
    folio_sequence_desc desc = {.struct_size = sizeof desc};
    s->b = b;
    s->full = desc.max_tokens = length * b->block_size;
    s->half = length / 2 * b->block_size;
    s->pool = bench_make_pool(b, RUNNING * length + spare_blocks);
    if (s->pool == NULL) return false;
    for (int i = 0; i < RUNNING; i++)
        BENCH_TRY(folio_sequence_create(s->pool, &desc, &s->sequences[i]));
    return true;
}

static void destroy_running(running *s)
{
    folio_batch_destroy(s->batch);
    for (int i = 0; i < RUNNING; i++) folio_sequence_destroy(s->sequences[i]);
    folio_pool_destroy(s->pool);
    free(s->ids);
    free(s);
}

/*
 * ---- step: sequences grow from half of their length to all of it, again and again. They are a
 * token apart from each other, so that in every step one in block_size of them fills a block.
 */

enum { STEP_LENGTH = 64 };

/* What sequence i has before its first step. */
static int64_t step_start(const running *s, int i) { return s->half + i % s->b->block_size; }

/* Back to half, and other tokens from there, so that nothing of the last time is found again. */
static bool restart(running *s)
{
    folio_tokens tokens = {.struct_size = sizeof tokens};
    for (int i = 0; i < RUNNING; i++) {
        BENCH_TRY(folio_sequence_truncate(s->sequences[i], s->half));
        bench_draw_ids(s->b, s->ids + i * s->full + s->half, s->full - s->half);
        tokens.ids = s->ids + i * s->full;
        tokens.num_tokens = step_start(s, i);
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], tokens.num_tokens - s->half, 0, NULL));
        BENCH_TRY(folio_sequence_commit(s->sequences[i], &tokens));
    }
    s->done = 0;
    s->steps = s->full - s->half - s->b->block_size;
    return true;
}

static bool step_batch(void *state, double *seconds)
{
    running *s = state;
    int64_t slot;
    if (s->done == s->steps && !restart(s)) return false;
    s->done++;
    folio_tokens tokens = {.struct_size = sizeof tokens};
    double start = term_seconds();
    for (int i = 0; i < RUNNING; i++) {
        tokens.ids = s->ids + i * s->full;
        tokens.num_tokens = step_start(s, i) + s->done;
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], 1, 0, &slot));
        BENCH_TRY(folio_sequence_commit(s->sequences[i], &tokens));
    }
    *seconds = term_seconds() - start;
    return true;
}

/* Full once before the clock starts: from then on a new block takes a cached one's place. */
static bool fill_step(bench_pool *b, running *s)
{
    if (!make_running(b, s, STEP_LENGTH, 0)) return false;
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = s->full};
    s->ids = bench_alloc(RUNNING * s->full, sizeof *s->ids);
    bench_draw_ids(b, s->ids, RUNNING * s->full);
    for (int i = 0; i < RUNNING; i++) {
        tokens.ids = s->ids + i * s->full;
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], s->full, 0, NULL));
        BENCH_TRY(folio_sequence_commit(s->sequences[i], &tokens));
    }
    return restart(s);
}

bool bench_step(bench_pool *b)
{
    running *s = bench_alloc(1, sizeof *s);
    bench_case step = {.name = "step",
                       .blocks = RUNNING * STEP_LENGTH,
                       .length = STEP_LENGTH,
                       .sequences = RUNNING,
                       .per = "token",
                       .operations = RUNNING,
                       .batch = step_batch,
                       .state = s};
    bool ok = fill_step(b, s) && bench_measure(&b->report, &step, 1);
    destroy_running(s);
    return ok;
}

/* ---- fork */

enum { FORKS = 64, FORK_LENGTH = 64 };

typedef struct forks {
    folio_pool *pool;
    folio_sequence *parent; /* its last block is half full: a child that writes copies it */
} forks;

static bool fork_batch(void *state, double *seconds)
{
    forks *s = state;
    int64_t slot, num_pairs;
    folio_block_pair pairs[FORKS];
    double start = term_seconds();
    for (int i = 0; i < FORKS; i++) {
        folio_sequence *child;
        BENCH_TRY(folio_sequence_fork(s->parent, &child));
        folio_status status = folio_sequence_reserve(child, 1, 0, &slot);
        folio_sequence_destroy(child);
        BENCH_TRY(status);
    }
    *seconds = term_seconds() - start;
    BENCH_TRY(folio_pool_take_copies(s->pool, 0, FORKS, pairs, &num_pairs));
    return true;
}

static bool fill_fork(bench_pool *b, forks *s)
{
    int64_t tokens = (int64_t)FORK_LENGTH * b->block_size - b->block_size / 2;
    s->pool = bench_make_pool(b, FORK_LENGTH + 2 * FORKS);
    if (s->pool == NULL) return false;
    BENCH_TRY(folio_sequence_create(s->pool, NULL, &s->parent));
    BENCH_TRY(folio_sequence_reserve(s->parent, tokens, 0, NULL));
    BENCH_TRY(folio_sequence_commit(s->parent, NULL));
    return true;
}

bool bench_fork(bench_pool *b)
{
    forks s = {NULL, NULL};
    bench_case of = {.name = "fork",
                     .blocks = FORK_LENGTH + 2 * FORKS,
                     .length = FORK_LENGTH,
                     .per = "fork",
                     .operations = FORKS,
                     .batch = fork_batch,
                     .state = &s};
    bool ok = fill_fork(b, &s) && bench_measure(&b->report, &of, 1);
    folio_sequence_destroy(s.parent);
    folio_pool_destroy(s.pool);
    return ok;
}

/* ---- batch */

enum { BATCH_TOKENS = 4096, BATCHES = 4 };

static bool batch_batch(void *state, double *seconds)
{
    running *s = state;
    double start = term_seconds();
    for (int i = 0; i < BATCHES; i++) {
        folio_batch_clear(s->batch);
        BENCH_TRY(folio_batch_add_sequences(s->batch, 0, s->sequences, RUNNING, NULL));
    }
    *seconds = term_seconds() - start;
    return true;
}

/* All decode: one token each is reserved and not committed. */
static bool fill_batch(bench_pool *b, running *s, int64_t length)
{
    if (!make_running(b, s, length, 0)) return false;
    folio_batch_desc desc =
        FOLIO_WITH(folio_batch_desc, .block_size = b->block_size, .max_seqs = RUNNING,
                   .max_query_tokens = RUNNING, .max_blocks = RUNNING * length);
    BENCH_TRY(folio_batch_create(b->ctx, &desc, &s->batch));
    for (int i = 0; i < RUNNING; i++) {
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], s->full - 1, 0, NULL));
        BENCH_TRY(folio_sequence_commit(s->sequences[i], NULL));
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], 1, 0, NULL));
    }
    return true;
}

bool bench_batch(bench_pool *b)
{
    int64_t length = (BATCH_TOKENS + b->block_size - 1) / b->block_size;
    running *s = bench_alloc(1, sizeof *s);
    bench_case of = {.name = "batch",
                     .blocks = RUNNING * length,
                     .length = length,
                     .sequences = RUNNING,
                     .per = "batch",
                     .operations = BATCHES,
                     .batch = batch_batch,
                     .state = s};
    bool ok = fill_batch(b, s, length) && bench_measure(&b->report, &of, 1);
    destroy_running(s);
    return ok;
}
