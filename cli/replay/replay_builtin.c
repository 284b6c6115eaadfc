/*
 * replay_builtin.c: the trace for those who have none: conversations of a few turns, each opening
 * with one of a few system prompts; every turn's prompt is the whole talk so far. Lengths are spread
 * as real ones are, most short and some long.
 */
#include "replay/replay_trace.h"

#include <stdlib.h>
#include <string.h>

enum {
    HASH_BLOCK = 16,
    TALKS = 32,
    TURNS = 4,
    SYSTEMS = 3,
    MAX_IDS = 1024,
    DEFAULT_REQUESTS = TALKS * TURNS
};

typedef struct talk {
    uint64_t ids[MAX_IDS];
    int64_t num_ids, turns;
    double ready; /* seconds */
} talk;

typedef struct dice {
    uint64_t seed, thrown;
} dice;

/* In [low, high], small ones more often. */
static int64_t skewed(dice *d, int64_t low, int64_t high)
{
    double x = (double)(kit_mix(d->seed ^ kit_mix(d->thrown++)) >> 11) * 0x1p-53;
    return low + (int64_t)(x * x * (double)(high - low + 1));
}

static void grow(talk *t, int64_t num_ids, uint64_t from)
{
    for (int64_t i = 0; i < num_ids && t->num_ids < MAX_IDS; i++)
        t->ids[t->num_ids++] = kit_mix(from + (uint64_t)i);
}

static void begin(talk *t, dice *d, int64_t number)
{
    int64_t system = skewed(d, 0, SYSTEMS - 1);
    *t = (talk){.ready = 0.02 * (double)number};
    grow(t, 8 + 6 * system, 1000 + (uint64_t)system * 100);
}

void replay_trace_make(replay_trace *t, int64_t limit, uint64_t seed)
{
    dice d = {.seed = kit_mix(seed)};
    talk *talks = replay_alloc(TALKS, sizeof *talks);
    int64_t count = limit < DEFAULT_REQUESTS ? limit : DEFAULT_REQUESTS;
    *t = (replay_trace){.hash_block = HASH_BLOCK, .name = replay_alloc(16, 1)};
    memcpy(t->name, "built-in", sizeof "built-in");
    for (int64_t i = 0; i < TALKS; i++) begin(&talks[i], &d, i);
    for (int64_t i = 0; i < count; i++) {
        talk *a = &talks[(i % TALKS + i / TALKS * 7) % TALKS];
        uint64_t own = kit_mix(seed + 7) + (uint64_t)i * 4096;
        grow(a, skewed(&d, 2, 80), own);
        int64_t prompt = a->num_ids * HASH_BLOCK - skewed(&d, 0, HASH_BLOCK - 1);
        int64_t output = skewed(&d, 12, 240);
        replay_trace_add(t, a->ready, prompt, output, a->ids, a->num_ids);
        grow(a, output / HASH_BLOCK + 1, own + 2048); /* the answer, as the next turn quotes it */
        a->ready += 0.05 * (double)skewed(&d, 2, 20);
    }
    free(talks);
    replay_trace_finish(t);
}
