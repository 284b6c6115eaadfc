/* replay_report.h: the summary of a replay, on stdout; its page is replay_html.h. */
#ifndef FOLIO_REPLAY_REPORT_H
#define FOLIO_REPLAY_REPORT_H

#include "base/table.h"
#include "replay/replay.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"

#include <stdio.h>

/* What is replayed, before it begins; only Markdown has such lines. */
void replay_report_head(const replay_options *o, const replay_trace *t);

/* Pool, model and engine in two lines. */
void replay_report_settings(FILE *out, const replay_options *o);
/* The summary's rows: measure and value. */
void replay_report_table(table *t, const replay_options *o, const replay_stats *s);

/* format: "md", "csv" or "json". stopped: it was interrupted. */
void replay_report(const char *format, const replay_options *o, const replay_stats *s,
                   bool stopped);

#endif
