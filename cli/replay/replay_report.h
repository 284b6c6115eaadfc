/* replay_report.h: what a replay came to, on stdout. `python -m folio report` draws the JSON. */
#ifndef FOLIO_REPLAY_REPORT_H
#define FOLIO_REPLAY_REPORT_H

#include "replay/replay.h"
#include "replay/replay_series.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"

typedef struct replay_run_info {
    const replay_options *options;
    const char *command; /* that repeats it */
    const replay_trace *trace;
    const replay_stats *stats;
    const replay_series *series;
    bool interrupted;
} replay_run_info;

/* What is replayed, before it begins; only Markdown has such lines. */
void replay_report_head(const replay_options *o, const replay_trace *t);

/* format: "md", "csv" or "json". */
void replay_report(const char *format, const replay_run_info *run);

#endif
