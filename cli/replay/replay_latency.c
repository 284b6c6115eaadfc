/*
 * replay_latency.c: the plot of latencies: percentiles from left to right, each nine of them (90, 99,
 * 99.9 %) as far from the next, so that the slow few are seen next to the many.
 */
#include "base/figures.h"
#include "replay/replay_plots.h"

#include <math.h>
#include <string.h>

enum { POINTS = 160 };

static const struct {
    double share;
    const char *name;
} percentiles[] = {{0.1, "p10"},  {0.25, "p25"}, {0.5, "p50"},     {0.75, "p75"}, {0.9, "p90"},
                   {0.95, "p95"}, {0.99, "p99"}, {0.999, "p99.9"}, {1, "slowest"}};

void replay_latency_table(table *t, const replay_page *page)
{
    const replay_times *times[] = {&page->stats->ttft, &page->stats->itl};
    char text[32];
    table_head(t, 'l', "share");
    table_head(t, 'r', "first token");
    table_head(t, 'r', "between tokens");
    for (size_t i = 0; i < sizeof percentiles / sizeof *percentiles; i++) {
        table_cell(t, "%s", percentiles[i].name);
        for (int k = 0; k < 2; k++) {
            double ms = replay_times_at(times[k], percentiles[i].share);
            if (times[k]->count == 0) table_cell(t, "-");
            else table_cell(t, "%s", figure_time(text, sizeof text, ms));
        }
    }
}

void replay_latency_tell(FILE *out, const replay_page *page)
{
    const replay_times *first = &page->stats->ttft, *next = &page->stats->itl;
    char a[32], b[32];
    if (first->count == 0) fprintf(out, "No request came to its first token. ");
    else
        fprintf(out, "Half of the requests had their first token within %s, 99 %% within %s. ",
                figure_time(a, sizeof a, replay_times_at(first, 0.5)),
                figure_time(b, sizeof b, replay_times_at(first, 0.99)));
    if (next->count > 0)
        fprintf(out, "Half of the next tokens came within %s, 99 %% within %s.",
                figure_time(a, sizeof a, replay_times_at(next, 0.5)),
                figure_time(b, sizeof b, replay_times_at(next, 0.99)));
}

/* x is 1 / (1 - share): 2 for half of them, 10 for 90 %, 100 for 99 %. */
static void draw_curve(const svg_plot *p, const char *css, const replay_times *times, bool above)
{
    static const double marks[] = {2, 10, 100};
    double free_from = p->left;
    double x[POINTS], y[POINTS], end = fmin((double)times->count, p->x.max);
    if (times->count == 0) return;
    for (int i = 0; i < POINTS; i++) {
        x[i] = pow(end, (double)i / (POINTS - 1));
        y[i] = fmax(replay_times_at(times, 1 - 1 / x[i]), p->y.min);
    }
    svg_line(p, css, x, y, POINTS);
    for (int i = 0; i < 3 && marks[i] <= end; i++) {
        double ms = fmax(replay_times_at(times, 1 - 1 / marks[i]), p->y.min);
        char text[32];
        double at = svg_x(p, marks[i]) + (above ? -2 : 2);
        svg_points(p, css, &marks[i], &ms, 1, 4);
        figure_time(text, sizeof text, ms);
        /* Curves rise: left above and right below a point there is room. */
        double begin = above ? at - svg_text_width(text) : at;
        if (begin < free_from) continue;
        svg_text(p, css, at, svg_y(p, ms) + (above ? -9 : 19), above ? "end" : "start", text);
        free_from = begin + svg_text_width(text);
    }
}

/* The y axis in times, whatever their size. */
static int time_ticks(const svg_axis *axis, svg_tick *ticks, char (*labels)[16])
{
    double at[SVG_MAX_TICKS];
    int n = svg_ticks(axis->min, axis->max, SVG_LOG, 5, at);
    for (int i = 0; i < n; i++) {
        char text[12];
        if (at[i] < 999) figure_time(labels[i], sizeof labels[i], at[i]);
        else
            snprintf(labels[i], sizeof labels[i], "%s s",
                     svg_number(text, sizeof text, at[i] / 1e3));
        ticks[i] = (svg_tick){at[i], labels[i]};
    }
    return n;
}

void replay_latency_draw(svg_plot *p, const replay_page *page)
{
    static const svg_tick nines[] = {{1, "0 %"},    {2, "50 %"},      {10, "90 %"},
                                     {100, "99 %"}, {1000, "99.9 %"}, {10000, "99.99 %"}};
    const svg_entry legend[] = {{"c1", SVG_MARK_LINE, "time to first token"},
                                {"c2", SVG_MARK_LINE, "time between tokens"}};
    const replay_times *times[] = {&page->stats->ttft, &page->stats->itl};
    double min = INFINITY, max = 0, most = 0;
    svg_tick ticks[SVG_MAX_TICKS];
    char labels[SVG_MAX_TICKS][16];
    for (int i = 0; i < 2; i++) {
        if (times[i]->count == 0) continue;
        min = fmin(min, fmax(replay_times_at(times[i], 0.01), 0x1p-10));
        max = fmax(max, fmax(replay_times_at(times[i], 1), 0x1p-9));
        most = fmax(most, (double)times[i]->count);
    }
    bool first_above = replay_times_at(times[0], 0.9) >= replay_times_at(times[1], 0.9);
    /* Room for labels: an eighth of the axis below the lowest, and above the highest. */
    double room = max > 0 ? pow(max / min, 1.0 / 6) * 1.2 : 1;
    int used = most > 3000 ? 6 : most > 300 ? 5 : 4;
    memcpy(p->legend, legend, sizeof legend);
    p->x = (svg_axis){.label = "share that came within the time",
                      .min = 1,
                      .max = nines[used - 1].at,
                      .scale = SVG_LOG,
                      .ticks = nines,
                      .num_ticks = used};
    p->y = (svg_axis){.label = p->y.label,
                      .min = max > 0 ? min / room : 1,
                      .max = max > 0 ? max * room : 1000,
                      .scale = SVG_LOG,
                      .ticks = ticks};
    p->y.num_ticks = time_ticks(&p->y, ticks, labels);
    svg_begin(p);
    draw_curve(p, "c1", times[0], first_above);
    draw_curve(p, "c2", times[1], !first_above);
    svg_end(p);
}
