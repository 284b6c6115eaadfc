/*
 * executor.h: threads. folioi_parallel runs a task on up to num_threads workers: the caller's
 * parallel_for, or a few built-in threads. Those that are busy (another thread's call, or a nested
 * one) are not waited for: the calling thread then does all the work itself.
 */
#ifndef FOLIOI_EXECUTOR_H
#define FOLIOI_EXECUTOR_H

#include "core/alloc.h"

typedef struct folioi_threads folioi_threads;

/** Threads the process may use, 1..256. */
int32_t folioi_processor_count(void);

/** num_threads workers, the calling thread being one of them. */
folio_status folioi_threads_create(const folio_allocator *a, int32_t num_threads,
                                   folioi_threads **out);
void folioi_threads_destroy(folioi_threads *threads);

/** Calls fn(task, i) for i in [0, count), each once; threads NULL: the executor's parallel_for. */
void folioi_parallel(const folio_executor *executor, folioi_threads *threads, int64_t count,
                     folio_task_fn fn, void *task);

#endif
