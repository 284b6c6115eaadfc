/*
 * executor.h: threads. folioi_parallel runs a task on up to num_threads workers: the caller's
 * parallel_for, or a few built-in threads. Those that are busy (another thread's call, or a nested
 * one) are not waited for: the calling thread then does all the work itself. So it does in a child
 * process made by fork(), which has no threads but the one that called it.
 */
#ifndef FOLIOI_EXECUTOR_H
#define FOLIOI_EXECUTOR_H

#include "core/alloc.h"

#include <stdbool.h>

#define FOLIOI_MAX_THREADS 256

typedef struct folioi_threads folioi_threads;

/** Processors the calling thread may use, 1..256. */
int32_t folioi_processor_count(void);

/** num_threads workers, the calling thread being number 0. pin: number i on the i-th processor that the
 * calling thread may use, number 0 left alone. */
folio_status folioi_threads_create(const folio_allocator *a, int32_t num_threads, bool pin,
                                   folioi_threads **out);
void folioi_threads_destroy(folioi_threads *threads);

/**
 * Calls fn(task, i) for i in [0, count), each once, on the context's threads or by its executor's
 * parallel_for. count is at most num_threads. Of the built-in threads, number i takes index i, unless
 * it is late: then whoever has nothing to do takes it.
 */
void folioi_parallel(const folio_context *ctx, int64_t count, folio_task_fn fn, void *task);

#endif
