/*
 * replay_stats.h: what a replay counts. Memory is constant whatever the trace's length: latencies
 * go into buckets half a percent wide.
 */
#ifndef FOLIO_REPLAY_STATS_H
#define FOLIO_REPLAY_STATS_H

#include <stdint.h>

/* Times from 2^-10 ms (below: 0) to 2^30 ms, 128 buckets to a doubling. */
enum { REPLAY_BUCKETS = 40 * 128 };

typedef struct replay_times {
    int64_t count, buckets[REPLAY_BUCKETS + 1];
} replay_times;

void replay_times_add(replay_times *t, double seconds);
/* The middle of a bucket in ms, in proportion. */
double replay_times_of(int bucket);
/* In ms; share in [0, 1]. 0 where there are none. */
double replay_times_at(const replay_times *t, double share);

/* One step, as it was after its commit. */
typedef struct replay_step {
    int64_t prefill_tokens, decode_tokens; /* rows computed                          */
    int64_t sequences;                     /* running, in the step or not            */
    int64_t stored_tokens;                 /* of the running sequences               */
    int64_t empty_slots;                   /* of their last blocks                   */
    int64_t used_blocks, cached_blocks;
    double prefill_share; /* of the step's rows, for the share of its time           */
    double seconds;       /* by the replay's clock                                   */
} replay_step;

/* Where it ran. */
typedef struct replay_place {
    char device[128], backend[32], level[32];
    int32_t threads;
} replay_place;

typedef struct replay_stats {
    replay_place place;
    int64_t requests, total_requests; /* finished, and all of the trace                        */
    int64_t steps, prefill_tokens, decode_tokens;
    replay_step last;
    double prefill_seconds, decode_seconds; /* a step's time is shared out by its rows           */
    replay_times ttft, itl;
    int64_t num_blocks, block_size, peak_used;
    double block_steps, empty_steps;     /* sums over steps: slots held, and empty of them     */
    double reserved_steps, stored_steps; /* a contiguous cache's slots; tokens, shared ones twice */
    int64_t longest;                     /* that such a cache has to reserve for               */
    int64_t admitted_tokens, hit_tokens; /* of prompts at first admission                      */
    int64_t preemptions, swaps, evictions; /* swaps: those preemptions that kept their bytes     */
    int64_t verified_rows, mismatched_rows;
    double seconds; /* real, all in all                                   */
    double clock;   /* the replay's own at the end                        */
    double attention_seconds, engine_seconds; /* forwards; pool, scheduler, batches and plans    */
    double numbers_seconds, verify_seconds;   /* not the engine's: not in the clock              */
} replay_stats;

void replay_stats_step(replay_stats *s, const replay_step *step);

/* A second; 0 in no time. */
double replay_rate(int64_t count, double seconds);

/* 1 - stored tokens / slots of held blocks, over all steps. */
double replay_stats_waste(const replay_stats *s);
/* The same for a cache that reserves the trace's longest request for every running one. */
double replay_stats_contiguous_waste(const replay_stats *s);
double replay_stats_hit_rate(const replay_stats *s);

#endif
