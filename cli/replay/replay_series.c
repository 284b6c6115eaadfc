/* replay_series.c: see replay_series.h. */
#include "replay/replay_series.h"

#include <math.h>
#include <string.h>

static void add_bin(replay_bin *to, const replay_bin *from)
{
    to->seconds += from->seconds;
    for (int i = 0; i < REPLAY_LEVELS; i++) to->level_seconds[i] += from->level_seconds[i];
    for (int i = 0; i < REPLAY_COUNTS; i++) to->counts[i] += from->counts[i];
}

static void halve(replay_series *s)
{
    for (int i = 0; i < REPLAY_BINS / 2; i++) {
        replay_bin pair = s->bins[2 * i];
        add_bin(&pair, &s->bins[2 * i + 1]);
        s->bins[i] = pair;
    }
    memset(&s->bins[REPLAY_BINS / 2], 0, sizeof s->bins / 2);
    s->num_bins = (s->num_bins + 1) / 2;
    s->width *= 2;
}

static int bin_at(const replay_series *s, double clock)
{
    double place = clock / s->width;
    return place < REPLAY_BINS ? (int)place : REPLAY_BINS - 1;
}

/* A share of the time in one bin. */
static void add_share(replay_bin *b, double seconds, double share, const double *levels,
                      const double *delta)
{
    b->seconds += seconds;
    for (int i = 0; i < REPLAY_LEVELS; i++) b->level_seconds[i] += seconds * levels[i];
    for (int i = 0; i < REPLAY_EVENTS; i++) b->counts[i] += share * delta[i];
}

void replay_series_add(replay_series *s, double clock, const double *levels, const double *totals)
{
    double delta[REPLAY_COUNTS], begin = s->clock;
    if (s->width <= 0) s->width = 0x1p-20;
    if (clock < begin) clock = begin;
    while (clock >= s->width * REPLAY_BINS) halve(s);
    for (int i = 0; i < REPLAY_COUNTS; i++) delta[i] = totals[i] - s->totals[i];
    memcpy(s->totals, totals, sizeof s->totals);
    int last = bin_at(s, clock);
    for (int i = bin_at(s, begin); i <= last; i++) {
        double from = fmax(begin, i * s->width), to = fmin(clock, (i + 1) * s->width);
        double share = clock > begin ? (to - from) / (clock - begin) : 1;
        add_share(&s->bins[i], to - from, share, levels, delta);
    }
    for (int i = REPLAY_EVENTS; i < REPLAY_COUNTS; i++) s->bins[last].counts[i] += delta[i];
    if (last >= s->num_bins) s->num_bins = last + 1;
    s->clock = clock;
}

double replay_bin_level(const replay_bin *b, replay_level level)
{
    return b->seconds > 0 ? b->level_seconds[level] / b->seconds : 0;
}
