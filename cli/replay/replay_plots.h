/*
 * replay_plots.h: the plots of a replay's page. Each is a heading, a sentence that says what came out,
 * a drawing at any size, and columns of numbers for those who want figures.
 */
#ifndef FOLIO_REPLAY_PLOTS_H
#define FOLIO_REPLAY_PLOTS_H

#include "base/table.h"
#include "plot/svg.h"
#include "replay/replay.h"
#include "replay/replay_series.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"

/* What a page shows. */
typedef struct replay_page {
    const replay_options *o;
    const char *command; /* that repeats it */
    const replay_trace *trace;
    const replay_stats *stats;
    const replay_series *series;
    bool stopped; /* it was interrupted */
} replay_page;

/* A number of a bin, so_far: of all bins up to it. NAN: there is none. */
typedef struct replay_column {
    const char *name;
    int digits; /* behind the point */
    double (*value)(const replay_page *page, const replay_bin *bin, const replay_bin *so_far);
} replay_column;

enum { REPLAY_MAX_COLUMNS = 4 };

typedef struct replay_plot {
    const char *id, *title, *y_label;
    void (*tell)(FILE *out, const replay_page *page); /* sentences, plain text */
    void (*draw)(svg_plot *p, const replay_page *page);
    replay_column columns[REPLAY_MAX_COLUMNS]; /* over time; none: no plot over time */
} replay_plot;

enum { REPLAY_NUM_PLOTS = 5 };
extern const replay_plot replay_plots[REPLAY_NUM_PLOTS];

/* The unit of the page's clock. */
typedef struct replay_unit {
    double seconds, up_to;
    const char *name, *names; /* "s", "seconds" */
} replay_unit;
const replay_unit *replay_unit_of(const replay_page *page);

/* ---- replay_latency.c */

void replay_latency_tell(FILE *out, const replay_page *page);
void replay_latency_draw(svg_plot *p, const replay_page *page);
/* Percentiles of both latencies. */
void replay_latency_table(table *t, const replay_page *page);

#endif
