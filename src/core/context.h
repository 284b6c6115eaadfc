/* context.h: a backend on a device with its threads and allocator. */
#ifndef FOLIOI_CONTEXT_H
#define FOLIOI_CONTEXT_H

#include "core/device.h"
#include "core/executor.h"
#include "core/refs.h"

struct folio_context {
    folioi_refs refs;
    const struct folioi_backend *backend;
    const folioi_device *memory; /* the backend's own; NULL: the allocator's */
    folioi_kv_write_fn *write;   /* the backend's */
    const void *kernels;         /* the backend's function table at the chosen level */
    folio_allocator allocator;
    folio_executor executor;
    folioi_threads *threads; /* NULL: the executor's parallel_for, or one thread */
    int32_t num_threads;
    const char *level, *device;
    void *device_state; /* of a backend with memory of its own */
};

static inline void context_parallel(const folio_context *ctx, int64_t count, folio_task_fn fn,
                                    void *task)
{
    folioi_parallel(&ctx->executor, ctx->threads, count, fn, task);
}

#endif
