/* context.h: a backend on a device with its threads and allocator. */
#ifndef FOLIOI_CONTEXT_H
#define FOLIOI_CONTEXT_H

#include "core/backend.h"
#include "core/executor.h"
#include "core/refs.h"

struct folio_context {
    folioi_refs refs;
    const folioi_backend *backend;
    const void *kernels; /* the backend's, at the chosen level */
    folio_allocator allocator;
    folio_executor executor;
    folioi_threads *threads; /* NULL: the executor's parallel_for, or one thread */
    int32_t num_threads;
    const char *level, *device;
    void *device_state; /* of a backend on a device */
    bool poison;        /* FOLIO_DEBUG=poison: pools fill fresh and freed blocks with NaN */
};

#endif
