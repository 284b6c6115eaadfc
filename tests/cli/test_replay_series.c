/*
 * test_replay_series.c: what a replay did over time, in bins: nothing is lost when bins become wider, means
 * are over time, and what happens at a step's end is in the bin of its end.
 */
#include "replay/replay_series.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

static double number(uint64_t i) { return (double)(support_bits(5, i) >> 11) * 0x1p-53; }

/* Bins [first, end) as one. */
static replay_bin sum_of(const replay_series *s, int first, int end)
{
    replay_bin sum = {0};
    for (int i = first; i < end && i < s->num_bins; i++) {
        const replay_bin *b = &s->bins[i];
        sum.seconds += b->seconds;
        for (int k = 0; k < REPLAY_LEVELS; k++) sum.level_seconds[k] += b->level_seconds[k];
        for (int k = 0; k < REPLAY_COUNTS; k++) sum.counts[k] += b->counts[k];
    }
    return sum;
}

TEST(replay_series, nothing_is_lost)
{
    replay_series *s = calloc(1, sizeof *s);
    double clock = 0, levels[REPLAY_LEVELS], totals[REPLAY_COUNTS] = {0}, area[REPLAY_LEVELS] = {0};
    REQUIRE_TEST(s != NULL);
    for (uint64_t i = 0; i < 20000; i++) { /* from nanoseconds to minutes; some take no time */
        double seconds = i % 11 == 0 ? 0 : exp(25 * number(3 * i) - 20);
        for (int k = 0; k < REPLAY_LEVELS; k++) {
            levels[k] = floor(1000 * number(7 * i + (uint64_t)k));
            area[k] += seconds * levels[k];
        }
        for (int k = 0; k < REPLAY_COUNTS; k++)
            totals[k] += floor(9 * number(i + 77 * (uint64_t)k));
        clock += seconds;
        replay_series_add(s, clock, levels, totals);
        REQUIRE_TEST(s->num_bins <= REPLAY_BINS && s->clock == clock);
    }
    CHECK_MSG(s->num_bins >= REPLAY_BINS / 2, "%d bins", s->num_bins);
    CHECK(s->width * s->num_bins >= clock && s->width * (s->num_bins - 1) <= clock);
    replay_bin sum = sum_of(s, 0, REPLAY_BINS);
    CHECK(fabs(sum.seconds - clock) <= 1e-9 * clock);
    for (int k = 0; k < REPLAY_LEVELS; k++)
        CHECK_MSG(fabs(sum.level_seconds[k] - area[k]) <= 1e-9 * area[k], "level %d", k);
    for (int k = 0; k < REPLAY_COUNTS; k++)
        CHECK_MSG(fabs(sum.counts[k] - totals[k]) <= 1e-9 * totals[k], "count %d", k);
    for (int i = 0; i < s->num_bins - 1; i++)
        CHECK_MSG(fabs(s->bins[i].seconds - s->width) <= 1e-9 * s->width, "bin %d has %g s", i,
                  s->bins[i].seconds);
    free(s);
}

TEST(replay_series, steps_longer_than_bins)
{
    replay_series *s = calloc(1, sizeof *s);
    const double first[REPLAY_LEVELS] = {[REPLAY_RUNNING] = 4},
                 second[REPLAY_LEVELS] = {[REPLAY_RUNNING] = 8};
    const double
        one[REPLAY_COUNTS] = {[REPLAY_STEPS] = 1, [REPLAY_PREFILL] = 100, [REPLAY_PREEMPTIONS] = 2},
        two[REPLAY_COUNTS] = {[REPLAY_STEPS] = 2, [REPLAY_PREFILL] = 100, [REPLAY_PREEMPTIONS] = 5};
    REQUIRE_TEST(s != NULL);
    replay_series_add(s, 1, first, one);
    replay_series_add(s, 3, second, two);
    int middle = (int)(1 / s->width), end = s->num_bins;
    REQUIRE_TEST(end > 100 && middle > 10);
    replay_bin a = sum_of(s, 0, middle), b = sum_of(s, middle + 1, end);
    CHECK(replay_bin_level(&a, REPLAY_RUNNING) == 4 && replay_bin_level(&b, REPLAY_RUNNING) == 8);
    CHECK(fabs(a.counts[REPLAY_PREFILL] - 100) < 1 && fabs(b.counts[REPLAY_PREFILL]) < 1);
    CHECK(fabs(a.counts[REPLAY_STEPS] - 1) < 0.02 && fabs(b.counts[REPLAY_STEPS] - 1) < 0.02);
    /* Events are whole, at the end of their step. */
    CHECK(s->bins[middle].counts[REPLAY_PREEMPTIONS] == 2);
    CHECK(s->bins[end - 1].counts[REPLAY_PREEMPTIONS] == 3);
    free(s);
}

TEST(replay_series, empty)
{
    replay_series *s = calloc(1, sizeof *s);
    REQUIRE_TEST(s != NULL);
    replay_bin none = sum_of(s, 0, REPLAY_BINS);
    CHECK(none.seconds == 0 && replay_bin_level(&none, REPLAY_USED_BLOCKS) == 0);
    free(s);
}
