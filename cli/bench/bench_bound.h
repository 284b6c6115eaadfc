/*
 * bench_bound.h: what a case reached of its ceiling, and whether its times can be trusted. A ceiling is what was seen
 * to be possible: the best of the samples that alternated with the case, or the case itself where it was faster. So no
 * case reaches more than all of it.
 */
#ifndef FOLIO_BENCH_BOUND_H
#define FOLIO_BENCH_BOUND_H

#include <stdbool.h>

typedef struct bench_bound {
    double value; /* the ceiling; NAN: none was sampled                                    */
    double median,
        spread;     /* of the samples: they follow a machine that others use                 */
    double sampled; /* the best of them                                                      */
    double share;   /* the case's median over the value: at most 1                           */
    bool by_case;   /* no sample was as fast as the case                                     */
} bench_bound;

/* Of samples with this median, spread and best; a case's rate in the same unit, and the rate of its fastest repetition. */
bench_bound bench_bound_of(double median, double spread, double sampled, double rate,
                           double fastest);

/* Is the middle half of some times more than a fifth of their median wide? */
bool bench_is_noisy(double spread);

#endif
