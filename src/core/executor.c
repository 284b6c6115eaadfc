/*
 * executor.c: the built-in threads. One job at a time: the owner publishes it under the lock, workers wake,
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

struct folioi_threads {
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

static void work(folioi_threads *threads, folio_task_fn fn, void *task, int64_t count)
{
    for (;;) {
        int64_t i = atomic_fetch_add(&threads->next, 1);
        if (i >= count) return;
        fn(task, i);
    }
}

static void *worker_main(void *arg)
{
    folioi_threads *threads = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&threads->lock);
    for (;;) {
        while (!threads->quit && (threads->job == seen || threads->fn == NULL))
            pthread_cond_wait(&threads->wake, &threads->lock);
        if (threads->quit) break;
        seen = threads->job;
        folio_task_fn fn = threads->fn;
        void *task = threads->task;
        int64_t count = threads->count;
        threads->inside++;
        pthread_mutex_unlock(&threads->lock);
        work(threads, fn, task, count);
        pthread_mutex_lock(&threads->lock);
        if (--threads->inside == 0) pthread_cond_signal(&threads->done);
    }
    pthread_mutex_unlock(&threads->lock);
    return NULL;
}

folio_status folioi_threads_create(const folio_allocator *a, int32_t num_threads,
                                   folioi_threads **out)
{
    void *memory;
    *out = NULL;
    TRY(folioi_alloc(a, sizeof(folioi_threads), "the thread pool", &memory));
    folioi_threads *threads = memory;
    threads->allocator = *a;
    pthread_mutex_init(&threads->busy, NULL);
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->wake, NULL);
    pthread_cond_init(&threads->done, NULL);
    atomic_init(&threads->next, 0);
    /* Workers take no signals: the program's handlers run on the program's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads->num_workers + 1 < num_threads &&
           pthread_create(&threads->workers[threads->num_workers], NULL, worker_main, threads) == 0)
        threads->num_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (threads->num_workers + 1 < num_threads) {
        int32_t started = threads->num_workers;
        folioi_threads_destroy(threads);
        FAIL(FOLIO_ERR_MEMORY, "thread %d of %d could not be started", started + 1, num_threads);
    }
    *out = threads;
    return FOLIO_OK;
}

void folioi_threads_destroy(folioi_threads *threads)
{
    if (threads == NULL) return;
    pthread_mutex_lock(&threads->lock);
    threads->quit = true;
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
    for (int32_t i = 0; i < threads->num_workers; i++) pthread_join(threads->workers[i], NULL);
    pthread_cond_destroy(&threads->done);
    pthread_cond_destroy(&threads->wake);
    pthread_mutex_destroy(&threads->lock);
    pthread_mutex_destroy(&threads->busy);
    folio_allocator a = threads->allocator;
    folioi_free(&a, threads, sizeof *threads);
}

static void threads_run(folioi_threads *threads, int64_t count, folio_task_fn fn, void *task)
{
    pthread_mutex_lock(&threads->lock);
    threads->fn = fn;
    threads->task = task;
    threads->count = count;
    threads->job++;
    atomic_store(&threads->next, 0);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
    work(threads, fn, task, count);
    pthread_mutex_lock(&threads->lock);
    threads->fn = NULL; /* a worker that wakes late finds no job */
    while (threads->inside > 0) pthread_cond_wait(&threads->done, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
}

void folioi_parallel(const folio_executor *executor, folioi_threads *threads, int64_t count,
                     folio_task_fn fn, void *task)
{
    if (count > 1 && threads == NULL && executor->parallel_for != NULL) {
        executor->parallel_for(executor->user, count, fn, task);
    } else if (count > 1 && threads != NULL && pthread_mutex_trylock(&threads->busy) == 0) {
        threads_run(threads, count, fn, task);
        pthread_mutex_unlock(&threads->busy);
    } else {
        for (int64_t i = 0; i < count; i++) fn(task, i);
    }
}
