/*
 * executor.h: threads. folioi_parallel runs a task on up to num_threads workers: the caller's
 * parallel_for, or a small built-in pool. A pool that is busy (another thread's call, or a nested one)
 * is not waited for: the calling thread then does all the work itself.
 */
#ifndef FOLIOI_EXECUTOR_H
#define FOLIOI_EXECUTOR_H

#include "core/alloc.h"

typedef struct folioi_pool folioi_pool;

/** Threads the process may use, 1..256. */
int32_t folioi_processor_count(void);

/** A pool of num_threads workers, the calling thread being one of them. */
folio_status folioi_pool_create(const folio_allocator *a, int32_t num_threads, folioi_pool **out);
void folioi_pool_destroy(folioi_pool *pool);

/** Calls fn(task, i) for i in [0, count), each once; pool NULL: the executor's parallel_for. */
void folioi_parallel(const folio_executor *executor, folioi_pool *pool, int64_t count,
                     folio_task_fn fn, void *task);

#endif
