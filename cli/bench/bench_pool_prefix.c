/*
 * bench_pool_prefix.c: the prefix cache of `folio bench pool`: prompts found in it, blocks that
 * enter it, blocks taken back from it. What must happen between batches is done outside the clock.
 */
#include "bench/bench_pool.h"

#include "base/term.h"

#include <stdio.h>
#include <stdlib.h>

enum { CACHED_BLOCKS = 100000 };

/* A sequence of these tokens came and went: its blocks are cached. */
static bool cache_prompt(folio_pool *pool, const int32_t *ids, int64_t num_tokens)
{
    folio_sequence *sequence = NULL;
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = num_tokens, .ids = ids};
    bool ok =
        bench_ok(folio_sequence_create(pool, NULL, &sequence), "folio_sequence_create") &&
        bench_ok(folio_sequence_reserve(sequence, num_tokens, 0, NULL), "folio_sequence_reserve") &&
        bench_ok(folio_sequence_commit(sequence, &tokens), "folio_sequence_commit");
    folio_sequence_destroy(sequence);
    return ok;
}

/* `count` empty sequences whose tables have room for num_tokens: none grows under the clock. */
static bool make_sequences(folio_pool *pool, folio_sequence **out, int64_t count,
                           int64_t num_tokens)
{
    folio_sequence_desc desc = {.struct_size = sizeof desc, .max_tokens = num_tokens};
    for (int64_t i = 0; i < count; i++) BENCH_TRY(folio_sequence_create(pool, &desc, &out[i]));
    return true;
}

static bool truncate_all(folio_sequence **sequences, int64_t count)
{
    for (int64_t i = 0; i < count; i++) BENCH_TRY(folio_sequence_truncate(sequences[i], 0));
    return true;
}

static void destroy_sequences(folio_sequence **sequences, int64_t count)
{
    for (int64_t i = 0; i < count; i++) folio_sequence_destroy(sequences[i]);
}

/* ---- match: one cache holds prompts of four lengths, a quarter of its blocks each */

/* Blocks of a batch; prompts that are shorter come several at a time. */
enum { MATCH_BLOCKS = 2048, MAX_MATCHES = 256, LENGTHS = 4 };
static const int64_t match_lengths[LENGTHS] = {4096, 512, 64, 8};

typedef struct match {
    int64_t tokens; /* of a prompt, all in full blocks */
    int64_t prompts, count, at;
    int32_t *ids;   /* [prompts][tokens] */
    int32_t *order; /* [prompts], random: the next prompt is none of the last ones */
    folio_sequence *sequences[MAX_MATCHES];
} match;

static bool match_batch(void *state, double *seconds)
{
    match *s = state;
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = s->tokens};
    int64_t matched, total = 0;
    double start = term_seconds();
    for (int64_t i = 0; i < s->count; i++) {
        tokens.ids = s->ids + s->order[s->at] * s->tokens;
        s->at = s->at + 1 < s->prompts ? s->at + 1 : 0;
        BENCH_TRY(folio_sequence_match(s->sequences[i], &tokens, &matched, NULL));
        total += matched;
    }
    *seconds = term_seconds() - start;
    if (total != s->count * s->tokens) {
        fprintf(stderr, "folio bench: match found %lld of %lld tokens\n", (long long)total,
                (long long)(s->count * s->tokens));
        return false;
    }
    return truncate_all(s->sequences, s->count);
}

/* As many prompts of this length as fill so many blocks. */
static bool fill_match(bench_pool *b, match *s, folio_pool *pool, int64_t length, int64_t blocks)
{
    s->tokens = length * b->block_size;
    s->prompts = blocks / length;
    s->count = length < MATCH_BLOCKS ? MATCH_BLOCKS / length : 1;
    s->ids = bench_alloc(s->prompts * s->tokens, sizeof *s->ids);
    s->order = bench_alloc(s->prompts, sizeof *s->order);
    bench_draw_ids(b, s->ids, s->prompts * s->tokens);
    for (int64_t i = 0; i < s->prompts; i++) s->order[i] = (int32_t)i;
    bench_shuffle(b, s->order, s->prompts, s->prompts);
    for (int64_t i = 0; i < s->prompts; i++)
        if (!cache_prompt(pool, s->ids + i * s->tokens, s->tokens)) return false;
    return make_sequences(pool, s->sequences, s->count, s->tokens);
}

bool bench_match(bench_pool *b)
{
    folio_pool *pool = bench_make_pool(b, CACHED_BLOCKS);
    match *states = bench_alloc(LENGTHS, sizeof *states);
    bench_case cases[LENGTHS];
    int64_t left = CACHED_BLOCKS;
    bool ok = pool != NULL;
    for (int i = 0; i < LENGTHS && ok; i++) { /* the shortest, last, take what others left */
        ok = fill_match(b, &states[i], pool, match_lengths[i], left / (LENGTHS - i));
        left -= states[i].prompts * match_lengths[i];
        cases[LENGTHS - 1 - i] = (bench_case){.name = "match",
                                              .blocks = CACHED_BLOCKS,
                                              .length = match_lengths[i],
                                              .per = "block",
                                              .operations = states[i].count * match_lengths[i],
                                              .batch = match_batch,
                                              .state = &states[i]};
    }
    ok = ok && bench_measure(&b->report, cases, LENGTHS);
    for (int i = 0; i < LENGTHS; i++) {
        destroy_sequences(states[i].sequences, states[i].count);
        free(states[i].ids);
        free(states[i].order);
    }
    folio_pool_destroy(pool);
    free(states);
    return ok;
}

/* ---- evict and commit alternate: each makes what the other needs */

/* A round takes back ROUND_BLOCKS cached blocks, then fills them with new tokens. */
enum { ROUND_LENGTH = 32, ROUND_SEQUENCES = 16, ROUND_BLOCKS = ROUND_LENGTH * ROUND_SEQUENCES };

typedef struct rounds {
    bench_pool *b;
    folio_pool *pool; /* all cached, but for ROUND_BLOCKS free ones between evict and commit */
    int64_t tokens;   /* of a sequence */
    int32_t *ids;     /* [tokens] [ROUND_SEQUENCES] */
    folio_sequence *sequences[ROUND_SEQUENCES];
    int32_t taken[ROUND_BLOCKS];
} rounds;

static bool evict_batch(void *state, double *seconds)
{
    rounds *s = state;
    double start = term_seconds();
    for (int i = 0; i < ROUND_BLOCKS; i++) BENCH_TRY(folio_pool_alloc(s->pool, 1, &s->taken[i]));
    *seconds = term_seconds() - start;
    BENCH_TRY(folio_pool_release(s->pool, ROUND_BLOCKS, s->taken));
    return true;
}

static bool commit_batch(void *state, double *seconds)
{
    rounds *s = state;
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = s->tokens};
    bench_draw_ids(s->b, s->ids, ROUND_SEQUENCES * s->tokens);
    for (int i = 0; i < ROUND_SEQUENCES; i++)
        BENCH_TRY(folio_sequence_reserve(s->sequences[i], s->tokens, 0, NULL));
    double start = term_seconds();
    for (int i = 0; i < ROUND_SEQUENCES; i++) {
        tokens.ids = s->ids + i * s->tokens;
        BENCH_TRY(folio_sequence_commit(s->sequences[i], &tokens));
    }
    *seconds = term_seconds() - start;
    return truncate_all(s->sequences, ROUND_SEQUENCES);
}

static bool fill_rounds(bench_pool *b, rounds *s)
{
    s->b = b;
    s->tokens = (int64_t)ROUND_LENGTH * b->block_size;
    s->ids = bench_alloc(ROUND_SEQUENCES * s->tokens, sizeof *s->ids);
    s->pool = bench_make_pool(b, CACHED_BLOCKS);
    if (s->pool == NULL) return false;
    for (int i = 0; i < CACHED_BLOCKS / ROUND_LENGTH; i++) {
        bench_draw_ids(b, s->ids, s->tokens);
        if (!cache_prompt(s->pool, s->ids, s->tokens)) return false;
    }
    return make_sequences(s->pool, s->sequences, ROUND_SEQUENCES, s->tokens);
}

bool bench_evict_commit(bench_pool *b)
{
    rounds *s = bench_alloc(1, sizeof *s);
    bench_case cases[] = {
        {.name = "evict",
         .blocks = CACHED_BLOCKS,
         .per = "block",
         .operations = ROUND_BLOCKS,
         .batch = evict_batch,
         .state = s},
        {.name = "commit",
         .blocks = CACHED_BLOCKS,
         .length = ROUND_LENGTH,
         .per = "block",
         .operations = ROUND_BLOCKS,
         .batch = commit_batch,
         .state = s},
    };
    bool ok = fill_rounds(b, s) && bench_measure(&b->report, cases, 2);
    destroy_sequences(s->sequences, ROUND_SEQUENCES);
    folio_pool_destroy(s->pool);
    free(s->ids);
    free(s);
    return ok;
}
