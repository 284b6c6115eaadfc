/*
 * bench_roofline.h: a run of `folio bench` as a roofline, an SVG: GFLOP/s over FLOP per byte of K and V, both
 * logarithmic. What the machine can do is a roof: memory that slopes up to where arithmetic is the limit.
 */
#ifndef FOLIO_BENCH_ROOFLINE_H
#define FOLIO_BENCH_ROOFLINE_H

#include "bench/bench_compare.h"

#include <stdio.h>

/* with: where each case was in an earlier run; NULL: none. False: the run has no case to plot. */
bool roofline_write(FILE *out, const saved_run *run, const comparison *with);

#endif
