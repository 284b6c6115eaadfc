/*
 * replay_engine.h: continuous batching over a pool. Every step: sequences that answer get one token,
 * prompts get chunks, as far as the step's budget goes; requests come in while there are seats and
 * blocks; where blocks run out the youngest sequence makes way and is taken up again later, before
 * anything new.
 *
 * The clock is the engine's own: it goes on by the time a step's scheduling and attention took (or,
 * without attention, by a fixed cost), and jumps over times in which there is nothing to do. Making
 * up K, V and q, and verifying, do not belong to it.
 */
#ifndef FOLIO_REPLAY_ENGINE_H
#define FOLIO_REPLAY_ENGINE_H

#include "replay/replay.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"

#include <folio/folio_pool.h>

/* Without attention a step takes so long by the clock: about what one GPU needs for a model of 8
 * billion parameters. */
#define REPLAY_STEP_SECONDS 0.010
#define REPLAY_TOKEN_SECONDS 20e-6

/* What can be shown of an engine between two steps. */
typedef struct replay_view {
    folio_pool *pool;
    const replay_stats *stats;
    double clock;
    int64_t running, paused; /* sequences; paused: preempted  */
    int64_t waiting;         /* requests; with --speed, those that have come */
    int64_t done_tokens;     /* of total: prompts and answers */
    int64_t total_tokens;
} replay_view;

/* Called after every step; false: stop here. */
typedef bool (*replay_watch)(void *user, const replay_view *view);

/* Blocks that any request of the trace needs at most when it is alone. */
int64_t replay_blocks_needed(const replay_options *o, const replay_trace *t);

/*
 * Serve the trace. False: a call failed, and stderr says which. stats are right as far as it came, also
 * where it failed or was stopped.
 */
bool replay_run(const replay_options *o, const replay_trace *t, replay_stats *stats,
                replay_watch watch, void *user);

#endif
