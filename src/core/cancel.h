/*
 * cancel.h: threads are not cancelled (pthread_cancel) where they hold a lock, or while others work for them: that waits
 * until the call has ended.
 */
#ifndef FOLIOI_CANCEL_H
#define FOLIOI_CANCEL_H

#include <pthread.h>

/** What cancel_allow is given to end it; calls nest. */
static inline int cancel_defer(void)
{
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void cancel_allow(int before) { pthread_setcancelstate(before, &before); }

#endif
