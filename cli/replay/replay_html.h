/* replay_html.h: a replay as one page of HTML that needs nothing else: figures, plots, tables. */
#ifndef FOLIO_REPLAY_HTML_H
#define FOLIO_REPLAY_HTML_H

#include "replay/replay_engine.h"
#include "replay/replay_plots.h"

/* After every step: what happened, into the series. */
void replay_html_watch(replay_series *series, const replay_options *o, const replay_view *view);

/* Is there whole or not at all. False: a sentence on stderr. */
bool replay_html_save(const char *path, const replay_page *page);

/* ---- replay_html_assets.c */

extern const char replay_html_style[], replay_html_script[];

#endif
