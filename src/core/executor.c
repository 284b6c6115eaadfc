/*
 * executor.c: the built-in pool. One job at a time: the owner publishes it under the lock, workers wake,
 * each takes indices from an atomic counter until none is left, the owner takes part and then waits for
 * those still inside. Workers sleep on a condition variable between jobs.
 */
#include "core/executor.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#define MAX_THREADS 256

struct folioi_pool {
    folio_allocator allocator;
    pthread_mutex_t busy; /* held by the thread whose job runs */
    pthread_mutex_t lock; /* guards everything below but next */
    pthread_cond_t wake, done;
    uint64_t job; /* number of the current job */
    folio_task_fn fn;
    void *task;
    int64_t count;
    int32_t inside; /* workers in the current job */
    bool quit;
    atomic_llong next;
    int32_t num_workers;
    pthread_t workers[MAX_THREADS];
};

int32_t folioi_processor_count(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    /* fails on machines with more processors than a cpu_set_t counts */
    long n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                         : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int32_t)n;
}

static void work(folioi_pool *pool, folio_task_fn fn, void *task, int64_t count)
{
    for (;;) {
        int64_t i = atomic_fetch_add(&pool->next, 1);
        if (i >= count) return;
        fn(task, i);
    }
}

static void *worker_main(void *arg)
{
    folioi_pool *pool = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->quit && (pool->job == seen || pool->fn == NULL))
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->quit) break;
        seen = pool->job;
        folio_task_fn fn = pool->fn;
        void *task = pool->task;
        int64_t count = pool->count;
        pool->inside++;
        pthread_mutex_unlock(&pool->lock);
        work(pool, fn, task, count);
        pthread_mutex_lock(&pool->lock);
        if (--pool->inside == 0) pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

folio_status folioi_pool_create(const folio_allocator *a, int32_t num_threads, folioi_pool **out)
{
    void *memory;
    *out = NULL;
    TRY(folioi_alloc(a, sizeof(folioi_pool), "the thread pool", &memory));
    folioi_pool *pool = memory;
    pool->allocator = *a;
    pthread_mutex_init(&pool->busy, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    atomic_init(&pool->next, 0);
    /* Workers take no signals: the program's handlers run on the program's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->num_workers + 1 < num_threads &&
           pthread_create(&pool->workers[pool->num_workers], NULL, worker_main, pool) == 0)
        pool->num_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->num_workers + 1 < num_threads) {
        int32_t started = pool->num_workers;
        folioi_pool_destroy(pool);
        FAIL(FOLIO_ERR_MEMORY, "thread %d of %d could not be started", started + 1, num_threads);
    }
    *out = pool;
    return FOLIO_OK;
}

void folioi_pool_destroy(folioi_pool *pool)
{
    if (pool == NULL) return;
    pthread_mutex_lock(&pool->lock);
    pool->quit = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->busy);
    folio_allocator a = pool->allocator;
    folioi_free(&a, pool, sizeof *pool);
}

static void pool_run(folioi_pool *pool, int64_t count, folio_task_fn fn, void *task)
{
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->task = task;
    pool->count = count;
    pool->job++;
    atomic_store(&pool->next, 0);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    work(pool, fn, task, count);
    pthread_mutex_lock(&pool->lock);
    pool->fn = NULL; /* a worker that wakes late finds no job */
    while (pool->inside > 0) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

void folioi_parallel(const folio_executor *executor, folioi_pool *pool, int64_t count,
                     folio_task_fn fn, void *task)
{
    if (count > 1 && pool == NULL && executor->parallel_for != NULL) {
        executor->parallel_for(executor->user, count, fn, task);
    } else if (count > 1 && pool != NULL && pthread_mutex_trylock(&pool->busy) == 0) {
        pool_run(pool, count, fn, task);
        pthread_mutex_unlock(&pool->busy);
    } else {
        for (int64_t i = 0; i < count; i++) fn(task, i);
    }
}
