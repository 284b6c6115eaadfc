/*
 * executor.c: the built-in threads. One job at a time, all of it in one atomic word: the owner opens the
 * job, workers enter while it is open, each claims indices until none is left, the owner claims too, closes
 * the job and waits for those still inside. Between jobs workers look for the next one for some 50 us, then
 * sleep on a condition variable: the layers of a step find them awake, an idle program pays nothing.
 */
#include "core/executor.h"

#include "core/cancel.h"
#include "core/context.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

/* How long a thread that waits looks before it sleeps: first alone, then letting others run. To wake a
 * sleeping one takes 5 to 50 us. */
#define SPIN_NS 20000
#define YIELD_NS 50000

/* The state word: how many workers are inside, whether more may enter, whether all shall end; above
 * them the number of the job. */
#define INSIDE UINT64_C(0xffff)
#define OPEN (UINT64_C(1) << 16)
#define QUIT (UINT64_C(1) << 17)
#define JOB_SHIFT 18

typedef struct worker {
    folioi_threads *threads;
    int32_t number; /* from 1 */
    pthread_t id;
} worker;

struct folioi_threads {
    folio_allocator allocator;
    pid_t process;    /* that has the threads */
    bool spin;        /* every thread can have a processor */
    atomic_bool busy; /* a job is under way; only its owner writes fn, task, count */
    folio_task_fn fn;
    void *task;
    int64_t count;
    _Alignas(FOLIOI_ALIGN) _Atomic uint64_t state;
    _Alignas(FOLIOI_ALIGN) _Atomic uint64_t claimed[FOLIOI_MAX_THREADS]; /* job of each index */
    _Alignas(FOLIOI_ALIGN) atomic_int sleeping; /* workers that sleep, or are about to */
    atomic_bool owner_sleeps;
    pthread_mutex_t lock; /* of the two conditions below */
    pthread_cond_t wake, done;
    int32_t num_workers;
    worker workers[FOLIOI_MAX_THREADS];
};

static long processors(cpu_set_t *set)
{
    CPU_ZERO(set);
    /* fails on machines with more processors than a cpu_set_t counts */
    return sched_getaffinity(0, sizeof *set, set) == 0 ? CPU_COUNT(set) : -1;
}

int32_t folioi_processor_count(void)
{
    cpu_set_t set;
    long n = processors(&set);
    if (n < 0) n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > FOLIOI_MAX_THREADS ? FOLIOI_MAX_THREADS : (int32_t)n;
}

/* ---- Waiting */

typedef bool condition_fn(folioi_threads *threads, uint64_t job);

/* A job that this worker has not seen, or the end. */
static bool has_news(folioi_threads *threads, uint64_t seen)
{
    uint64_t s = atomic_load(&threads->state);
    return (s & QUIT) || ((s & OPEN) && s >> JOB_SHIFT != seen);
}

static bool is_empty(folioi_threads *threads, uint64_t job)
{
    (void)job;
    return (atomic_load(&threads->state) & INSIDE) == 0;
}

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Looks for a while; false: it has not come. */
static bool look(folioi_threads *threads, condition_fn *has_come, uint64_t job)
{
    if (has_come(threads, job)) return true;
    if (!threads->spin) return false;
    for (int64_t begin = clock_ns(), spent = 0; spent < YIELD_NS; spent = clock_ns() - begin) {
        if (spent >= SPIN_NS) sched_yield();
        for (int i = 0; i < 16; i++) {
            if (has_come(threads, job)) return true;
            relax();
        }
    }
    return false;
}

/* A sleeper counts itself, then looks once more; who changes the state does so first, then looks for
 * sleepers. So one of the two always sees the other. */
static void await_job(folioi_threads *threads, uint64_t seen)
{
    if (look(threads, has_news, seen)) return;
    pthread_mutex_lock(&threads->lock);
    atomic_fetch_add(&threads->sleeping, 1);
    while (!has_news(threads, seen)) pthread_cond_wait(&threads->wake, &threads->lock);
    atomic_fetch_sub(&threads->sleeping, 1);
    pthread_mutex_unlock(&threads->lock);
}

static void await_empty(folioi_threads *threads)
{
    if (look(threads, is_empty, 0)) return;
    pthread_mutex_lock(&threads->lock);
    atomic_store(&threads->owner_sleeps, true);
    while (!is_empty(threads, 0)) pthread_cond_wait(&threads->done, &threads->lock);
    atomic_store(&threads->owner_sleeps, false);
    pthread_mutex_unlock(&threads->lock);
}

static void wake_workers(folioi_threads *threads, int64_t wanted)
{
    int64_t sleeping = atomic_load(&threads->sleeping);
    if (sleeping == 0) return;
    pthread_mutex_lock(&threads->lock);
    if (wanted >= sleeping) pthread_cond_broadcast(&threads->wake);
    else
        for (int64_t i = 0; i < wanted; i++) pthread_cond_signal(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
}

/* ---- A job */

/* Its own index first, so that a thread meets the same scratch memory in every job. */
static void work(folioi_threads *threads, uint64_t job, int32_t number)
{
    int64_t count = threads->count;
    for (int64_t n = 0; n < count; n++) {
        int64_t i = (number + n) % count;
        if (atomic_load_explicit(&threads->claimed[i], memory_order_relaxed) != job &&
            atomic_exchange_explicit(&threads->claimed[i], job, memory_order_relaxed) != job)
            threads->fn(threads->task, i);
    }
}

/* Into the open job, which is then not closed over this worker; 0: there is none it has not seen. */
static uint64_t enter(folioi_threads *threads, uint64_t seen)
{
    uint64_t s = atomic_load(&threads->state);
    while ((s & OPEN) && s >> JOB_SHIFT != seen)
        if (atomic_compare_exchange_weak(&threads->state, &s, s + 1)) return s >> JOB_SHIFT;
    return 0;
}

static void leave(folioi_threads *threads)
{
    uint64_t s = atomic_fetch_sub(&threads->state, 1);
    if ((s & OPEN) || (s & INSIDE) != 1 || !atomic_load(&threads->owner_sleeps)) return;
    pthread_mutex_lock(&threads->lock);
    pthread_cond_signal(&threads->done);
    pthread_mutex_unlock(&threads->lock);
}

static void *worker_main(void *arg)
{
    const worker *w = arg;
    folioi_threads *threads = w->threads;
    uint64_t seen = 0;
    for (;;) {
        await_job(threads, seen);
        if (atomic_load(&threads->state) & QUIT) return NULL;
        uint64_t job = enter(threads, seen);
        if (job == 0) continue; /* it was closed before */
        work(threads, job, w->number);
        leave(threads);
        seen = job;
    }
}

static void run_job(folioi_threads *threads, int64_t count, folio_task_fn fn, void *task)
{
    int cancel = cancel_defer(); /* workers use the caller's stack */
    uint64_t job = (atomic_load(&threads->state) >> JOB_SHIFT) + 1;
    threads->fn = fn;
    threads->task = task;
    threads->count = count;
    atomic_store(&threads->state, job << JOB_SHIFT | OPEN);
    wake_workers(threads, count - 1);
    work(threads, job, 0);
    atomic_fetch_and(&threads->state, ~OPEN);
    /* in a child process that fn made, the workers inside are not there to leave */
    if (getpid() == threads->process) await_empty(threads);
    atomic_store(&threads->busy, false);
    cancel_allow(cancel);
}

void folioi_parallel(const folio_context *ctx, int64_t count, folio_task_fn fn, void *task)
{
    const folio_executor *executor = &ctx->executor;
    folioi_threads *threads = ctx->threads;
    if (count > 1 && threads == NULL && executor->parallel_for != NULL) {
        executor->parallel_for(executor->user, count, fn, task);
    } else if (count > 1 && threads != NULL && getpid() == threads->process &&
               !atomic_exchange(&threads->busy, true)) {
        run_job(threads, count, fn, task);
    } else {
        for (int64_t i = 0; i < count; i++) fn(task, i);
    }
}

/* ---- Threads begin and end */

/* The i-th processor of a set that holds it. */
static int nth_processor(const cpu_set_t *set, int32_t i)
{
    int cpu = 0;
    while (!CPU_ISSET(cpu, set) || i-- > 0) cpu++;
    return cpu;
}

static folio_status start_worker(folioi_threads *threads, int32_t num_threads,
                                 const cpu_set_t *pins)
{
    int32_t number = threads->num_workers + 1;
    worker *w = &threads->workers[threads->num_workers];
    *w = (worker){.threads = threads, .number = number};
    if (pthread_create(&w->id, NULL, worker_main, w) != 0)
        FAIL(FOLIO_ERR_MEMORY, "thread %d of %d could not be started", number, num_threads);
    threads->num_workers++;
    if (pins == NULL) return FOLIO_OK;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(nth_processor(pins, number), &one);
    REQUIRE(pthread_setaffinity_np(w->id, sizeof one, &one) == 0,
            "context: thread %d could not be pinned to processor %d", number,
            nth_processor(pins, number));
    return FOLIO_OK;
}

static folio_status start_workers(folioi_threads *threads, int32_t num_threads, bool pin)
{
    cpu_set_t pins;
    if (pin) {
        long n = processors(&pins);
        REQUIRE(n >= 0, "context: pin_threads is set, but the processors that this thread may use "
                        "are unknown");
        REQUIRE(num_threads <= n,
                "context: pin_threads is set, but %d threads are more than the %ld processors that "
                "this thread may use",
                num_threads, n);
    }
    /* Workers take no signals: the program's handlers run on the program's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    folio_status status = FOLIO_OK;
    while (status == FOLIO_OK && threads->num_workers + 1 < num_threads)
        status = start_worker(threads, num_threads, pin ? &pins : NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

folio_status folioi_threads_create(const folio_allocator *a, int32_t num_threads, bool pin,
                                   folioi_threads **out)
{
    void *memory;
    *out = NULL;
    TRY(folioi_alloc(a, sizeof(folioi_threads), "the thread pool", &memory));
    folioi_threads *threads = memory;
    threads->allocator = *a;
    threads->process = getpid();
    threads->spin = num_threads <= folioi_processor_count();
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->wake, NULL);
    pthread_cond_init(&threads->done, NULL);
    folio_status status = start_workers(threads, num_threads, pin);
    if (status != FOLIO_OK) {
        folioi_threads_destroy(threads);
        return status;
    }
    *out = threads;
    return FOLIO_OK;
}

static void end_workers(folioi_threads *threads)
{
    int cancel = cancel_defer();
    pthread_mutex_lock(&threads->lock);
    atomic_fetch_or(&threads->state, QUIT);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
    for (int32_t i = 0; i < threads->num_workers; i++) pthread_join(threads->workers[i].id, NULL);
    cancel_allow(cancel);
    pthread_cond_destroy(&threads->done);
    pthread_cond_destroy(&threads->wake);
    pthread_mutex_destroy(&threads->lock);
}

void folioi_threads_destroy(folioi_threads *threads)
{
    if (threads == NULL) return;
    /* A child process has only the memory: no thread to join, and locks in a state nobody knows. */
    if (getpid() == threads->process) end_workers(threads);
    folio_allocator a = threads->allocator;
    folioi_free(&a, threads, sizeof *threads);
}
