/* test_bench_bound.c: what `folio bench` says a case reached of its ceiling. */
#include "bench/bench_bound.h"
#include "support.h"

#include <math.h>

TEST(bench_bound, the_best_sample_is_the_ceiling)
{
    bench_bound b = bench_bound_of(100, 0.1, 120, 60, 90);
    CHECK(b.value == 120 && b.sampled == 120 && b.median == 100 && b.spread == 0.1);
    CHECK(b.share == 0.5);
    CHECK(!b.by_case);
}

/* As on a machine that others use: multiply-adds at 116, a case between them at 150 to 164. */
TEST(bench_bound, no_case_passes_its_ceiling)
{
    bench_bound b = bench_bound_of(110, 0.3, 116, 150, 164);
    CHECK(b.by_case);
    CHECK(b.value == 164 && b.sampled == 116);
    CHECK(b.share <= 1 && b.share == 150.0 / 164.0);
    b = bench_bound_of(110, 0.3, 116, 116, 116);
    CHECK(!b.by_case && b.share == 1);
}

TEST(bench_bound, without_a_sample_there_is_none)
{
    const double none = (double)NAN;
    bench_bound b = bench_bound_of(none, none, none, 10, 12);
    CHECK(isnan(b.value) && isnan(b.share) && !b.by_case);
}

TEST(bench_bound, a_spread_of_more_than_a_fifth_is_noisy)
{
    CHECK(bench_is_noisy(0.35) && bench_is_noisy(0.201));
    CHECK(!bench_is_noisy(0.2) && !bench_is_noisy(0) && !bench_is_noisy((double)NAN));
}
