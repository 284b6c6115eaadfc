/*
 * replay_series.h: what a replay did over time. Time is cut into bins of one width; when they
 * are all in use, two become one and the width doubles, so that memory is constant and a page has at
 * least half of the bins, whatever the trace's length.
 */
#ifndef FOLIO_REPLAY_SERIES_H
#define FOLIO_REPLAY_SERIES_H

#include <stdint.h>

enum { REPLAY_BINS = 512 };

/* How much there was at a time; a bin has the mean. */
typedef enum replay_level {
    REPLAY_USED_BLOCKS,
    REPLAY_CACHED_BLOCKS,
    REPLAY_RUNNING,  /* sequences with a seat                     */
    REPLAY_DECODING, /* those of them that compute one token */
    REPLAY_PAUSED,   /* preempted, not yet back                   */
    REPLAY_WAITING,  /* requests that came and were never admitted */
    REPLAY_LEVELS
} replay_level;

/* What is counted since the beginning; a bin has what came in it. */
typedef enum replay_count {
    REPLAY_STEPS, /* these three go on all through a step ...  */
    REPLAY_PREFILL,
    REPLAY_DECODE,
    REPLAY_EVENTS, /* ... and these happen at its end           */
    REPLAY_PREEMPTIONS = REPLAY_EVENTS,
    REPLAY_ADMITTED_TOKENS,
    REPLAY_HIT_TOKENS,
    REPLAY_COUNTS
} replay_count;

typedef struct replay_bin {
    double seconds; /* of it that passed */
    double level_seconds[REPLAY_LEVELS];
    double counts[REPLAY_COUNTS];
} replay_bin;

/* All zeros: nothing yet. */
typedef struct replay_series {
    double width, clock; /* seconds; width 0: nothing yet */
    double totals[REPLAY_COUNTS];
    int num_bins; /* in use */
    replay_bin bins[REPLAY_BINS];
} replay_series;

/* From the last call to `clock` these were the levels; totals: the counts at its end. */
void replay_series_add(replay_series *s, double clock, const double *levels, const double *totals);

/* The mean; 0 where no time passed. */
double replay_bin_level(const replay_bin *b, replay_level level);

#endif
