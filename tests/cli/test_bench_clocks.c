/* test_bench_clocks.c: what `folio bench` says about a GPU's clock, from a library that stands for NVML. */
#include "bench/bench_clocks.h"
#include "support.h"

#include <math.h>

static const char bus[] = "0000:01:00.0";

TEST(bench_clocks, samples_of_a_busy_gpu_are_counted)
{
    bench_clocks *c = bench_clocks_open(FAKE_NVML, bus);
    bench_clocks_stats s;
    CHECK(c != NULL);
    if (c == NULL) return;
    for (int i = 0; i < 12; i++) bench_clocks_sample(c);
    bench_clocks_close(c, &s);
    CHECK(s.count == 10); /* all but two of an idle one */
    CHECK(s.lowest_mhz == 1500 && s.median_mhz == 1700);
    CHECK(s.held_share[BENCH_HELD_BY_POWER] == 0.4);
    CHECK(s.held_share[BENCH_HELD_BY_TEMPERATURE] == 0.4);
    CHECK(s.held_share[BENCH_HELD_BY_HARDWARE] == 0.2);
    CHECK(s.held_share[BENCH_HELD_BY_SETTING] == 0);
}

TEST(bench_clocks, a_thread_samples_until_the_end)
{
    bench_clocks *c = bench_clocks_open(FAKE_NVML, bus);
    bench_clocks_stats s;
    CHECK(c != NULL);
    if (c == NULL) return;
    CHECK(bench_clocks_start(c));
    bench_clocks_close(c, &s);
    CHECK(s.count > 0 && s.lowest_mhz >= 1500);
}

TEST(bench_clocks, without_a_library_or_a_gpu_there_are_none)
{
    bench_clocks_stats s;
    CHECK(bench_clocks_open("libno-such-library.so.1", bus) == NULL);
    CHECK(bench_clocks_open(FAKE_NVML, "0000:02:00.0") == NULL);
    bench_clocks_close(NULL, &s);
    CHECK(s.count == 0 && isnan(s.median_mhz) && isnan(s.lowest_mhz));
    for (int k = 0; k < BENCH_NUM_HELD; k++) CHECK(isnan(s.held_share[k]));
    bench_clocks *c = bench_clocks_open(FAKE_NVML, bus); /* nothing was left open */
    CHECK(c != NULL);
    bench_clocks_close(c, &s);
    CHECK(s.count == 0 && isnan(s.median_mhz));
}
