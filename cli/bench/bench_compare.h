/*
 * bench_compare.h: two runs of `folio bench` compared, case by case: faster, slower, or within noise.
 *
 * Two medians are told apart where the middle halves of their repetitions are: by more than half the sum of both spreads, and
 * by more than 2 %, by which runs of one program differ though each is quiet in itself. A machine that others use gets
 * slower and faster as a whole: a case that was measured with a ceiling is faster only if it also reached more of
 * that ceiling. On different machines only the share decides; at another level or with other threads, the time.
 */
#ifndef FOLIO_BENCH_COMPARE_H
#define FOLIO_BENCH_COMPARE_H

#include "base/json.h"
#include "bench/bench_saved.h"

typedef enum finding {
    WITHIN_NOISE,
    FASTER,
    SLOWER,
    WITH_CEILING, /* the time has changed, the share of the ceiling does not say so */
    FEW_REPS,     /* fewer than 5 in one of the runs */
    NUM_FINDINGS
} finding;

/* now / before - 1, and up to where it is noise; NAN: not in both runs. */
typedef struct change {
    double by, noise;
} change;

/* A case of both runs. */
typedef struct compared {
    const saved_case *before, *now;
    change time, share;
    finding is;
} compared;

typedef struct comparison {
    const char *path;
    const saved_run *before, *now;
    compared *pairs; /* by their order now */
    int num_pairs;
    int count[NUM_FINDINGS];
    bool same_machine, same_place; /* of all pairs */
    /* Cases that only one run has. */
    const saved_case **only_before, **only_now;
    int num_only_before, num_only_now;
} comparison;

/* Frees nothing of the runs; comparison_free frees the rest. */
void compare_runs(comparison *c, const char *path, const saved_run *before, const saved_run *now);
void comparison_free(comparison *c);

/* To stdout as Markdown; as the member "compare" of an object. */
void comparison_print(const comparison *c);
void comparison_write(json *j, const comparison *c);

#endif
