/* bench_bound.c: see bench_bound.h. */
#include "bench/bench_bound.h"

#include <math.h>

bench_bound bench_bound_of(double median, double spread, double sampled, double rate,
                           double fastest)
{
    bench_bound b = {.value = sampled, .median = median, .spread = spread, .sampled = sampled};
    b.by_case = fastest > sampled;
    if (b.by_case) b.value = fastest;
    b.share = rate / b.value;
    return b;
}

bool bench_is_noisy(double spread) { return spread > 0.2; }
