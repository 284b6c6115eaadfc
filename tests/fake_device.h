/*
 * fake_device.h: a device for machines without one. Its memory is pages that nobody may touch outside the device's
 * own functions: code that takes a pointer of it for the host's ends with a segmentation fault. Moves of blocks
 * and fills stay in their stream until something else on that stream needs them done: code that does not wait
 * where it must reads what was there before. Attention is the reference's.
 */
#ifndef FOLIO_TESTS_FAKE_DEVICE_H
#define FOLIO_TESTS_FAKE_DEVICE_H

#include "support.h"

/* A context of it, for all calls; folio_context_destroy. NULL, with a failed check, where there is none. */
folio_context *fake_device_context(const folio_allocator *allocator);

/* What all of its contexts were asked for since the last call of this. */
typedef struct {
    int64_t moves,
        moved_blocks; /* calls that moved blocks, and blocks they moved (in all layers) */
    int64_t waits;
    int64_t live; /* allocations, now */
} fake_device_counts;
fake_device_counts fake_device_count(void);

/* What updates of plans return from now on; FOLIO_OK: they work. */
void fake_device_set_update(folio_status status);

/* Moves and fills that were given to a stream and not run yet. */
int64_t fake_device_queued(const void *stream);

#endif
