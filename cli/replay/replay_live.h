/*
 * replay_live.h: what a replay shows on stderr while it runs: on a terminal a map of the pool's
 * blocks, counters and a progress bar, ten times a second; elsewhere a line now and then.
 */
#ifndef FOLIO_REPLAY_LIVE_H
#define FOLIO_REPLAY_LIVE_H

#include "replay/replay_engine.h"

typedef struct replay_live {
    double started, shown;
} replay_live;

void replay_live_start(replay_live *live);
/* After every step. */
void replay_live_show(replay_live *live, const replay_view *view);

#endif
