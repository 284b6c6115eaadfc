/*
 * A folio_executor that runs on the OpenMP runtime a process already has, such as the one of PyTorch.
 * Two pools of threads on the same cores slow each other down, so no second one is started.
 *
 * Nothing here links OpenMP: the package finds the runtime that is loaded and passes its functions.
 */
#include <folio/folio.h>

/* GOMP_parallel of libgomp, which LLVM's and Intel's runtimes have too. */
typedef void parallel_fn(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
typedef int query_fn(void);

typedef struct folio_openmp {
    parallel_fn *parallel;
    query_fn *thread_num;  /* omp_get_thread_num  */
    query_fn *num_threads; /* omp_get_num_threads */
} folio_openmp;

typedef struct job {
    const folio_openmp *runtime;
    folio_task_fn fn;
    void *task;
    int64_t count;
} job;

/* The team has as many threads as every other one of the process, whatever count is: a runtime ends the threads that a
 * smaller team does not need, and a later team gets new ones, which are no longer bound to their cores. Inside another
 * parallel region there is one. */
static void run_share(void *data)
{
    const job *j = data;
    int64_t step = j->runtime->num_threads();
    for (int64_t i = j->runtime->thread_num(); i < j->count; i += step) {
        j->fn(j->task, i);
    }
}

/* folio_executor.parallel_for; user is a folio_openmp. */
FOLIO_API void folio_openmp_parallel_for(void *user, int64_t count, folio_task_fn fn, void *task)
{
    job j = {.runtime = user, .fn = fn, .task = task, .count = count};
    if (count > 0) {
        j.runtime->parallel(run_share, &j, 0, 0); /* 0: the process's number of threads */
    }
}
