/*
 * test_threads.c: the built-in threads. Every index of a job runs once, whatever the number of threads,
 * callers and processors; a busy pool is not waited for; idle threads sleep; pinned ones stay where they
 * are put; pages are spread over them; and a child process made by fork() works without them, at whatever moment it was made.
 */
#include "core/touch.h"
#include "kit/layer.h"
#include "support.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 256 };

static folioi_threads *open_threads(int32_t num_threads)
{
    folio_allocator a = folioi_allocator_default();
    folioi_threads *threads = NULL;
    CHECK_OK(folioi_threads_create(&a, num_threads, false, &threads));
    return threads;
}

static void run(folioi_threads *threads, int64_t count, folio_task_fn fn, void *task)
{
    folio_context ctx = {.threads = threads};
    folioi_parallel(&ctx, count, fn, task);
}

typedef struct {
    folioi_threads *threads;
    atomic_int runs[MOST];
} tally;

static void count_run(void *task, int64_t i) { atomic_fetch_add(&((tally *)task)->runs[i], 1); }

/* Index i ran `expected` times for i below count, never above. */
static void check_tally(const tally *t, int64_t count, int expected)
{
    for (int64_t i = 0; i < MOST; i++)
        if (atomic_load(&t->runs[i]) != (i < count ? expected : 0))
            test_fail(__FILE__, __LINE__, "index %d of %d ran %d times, expected %d", (int)i,
                      (int)count, atomic_load(&t->runs[i]), expected);
}

static void nap(long microseconds)
{
    nanosleep(&(struct timespec){.tv_nsec = microseconds * 1000}, NULL);
}

TEST(threads, every_index_once)
{
    static const int32_t numbers[] = {1, 2, 3, 8, 61, 256};
    for (int n = 0; n < COUNT_OF(numbers); n++) {
        folioi_threads *threads = open_threads(numbers[n]);
        for (int64_t count = 0; count <= numbers[n]; count = count < 4 ? count + 1 : count * 2) {
            tally t = {0};
            int jobs = 20 + 2000 / numbers[n];
            for (int j = 0; j < jobs; j++) run(threads, count, count_run, &t);
            check_tally(&t, count, jobs);
        }
        folioi_threads_destroy(threads);
    }
}

/* Jobs at moments when workers look for one, fall asleep, and sleep. */
TEST(threads, jobs_after_pauses)
{
    folioi_threads *threads = open_threads(2), *crowd = open_threads(37);
    tally t = {0}, u = {0};
    int jobs = 400;
    for (int j = 0; j < jobs; j++) {
        nap(support_bits(1, (uint64_t)j) % 130);
        run(threads, 2, count_run, &t);
        run(crowd, 37, count_run, &u);
    }
    check_tally(&t, 2, jobs);
    check_tally(&u, 37, jobs);
    folioi_threads_destroy(threads);
    folioi_threads_destroy(crowd);
}

/* Ends at once after it began, and while a worker is on its way to sleep. */
TEST(threads, short_lives)
{
    for (int i = 0; i < 200; i++) {
        folioi_threads *threads = open_threads(1 + i % 5);
        tally t = {0};
        if (i % 3) run(threads, 1 + i % 5, count_run, &t);
        if (i % 3) check_tally(&t, 1 + i % 5, 1);
        if (i % 2) nap(i % 90);
        folioi_threads_destroy(threads);
    }
}

static void run_inner(void *task, int64_t i)
{
    tally *t = task, inner = {0};
    run(t->threads, 3, count_run, &inner);
    check_tally(&inner, 3, 1);
    count_run(task, i);
}

TEST(threads, job_inside_a_job)
{
    tally t = {.threads = open_threads(3)};
    for (int j = 0; j < 100; j++) run(t.threads, 3, run_inner, &t);
    check_tally(&t, 3, 100);
    folioi_threads_destroy(t.threads);
}

static void *call_often(void *arg)
{
    tally *t = arg;
    for (int j = 0; j < 300; j++) run(t->threads, 4, count_run, t);
    return NULL;
}

TEST(threads, several_callers)
{
    enum { CALLERS = 5 };
    static tally tallies[CALLERS];
    folioi_threads *threads = open_threads(4);
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        tallies[i] = (tally){.threads = threads};
        CHECK(pthread_create(&callers[i], NULL, call_often, &tallies[i]) == 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
        check_tally(&tallies[i], 4, 300);
    }
    folioi_threads_destroy(threads);
}

/* ---- Who runs what, and where */

typedef struct {
    int64_t count;
    atomic_int arrived;
    pthread_t who[MOST];
    cpu_set_t where[MOST];
} meeting;

/* Nobody leaves before all are there: then every index has a thread of its own. */
static void meet(void *task, int64_t i)
{
    meeting *m = task;
    m->who[i] = pthread_self();
    sched_getaffinity(0, sizeof m->where[i], &m->where[i]);
    atomic_fetch_add(&m->arrived, 1);
    while (atomic_load(&m->arrived) < m->count) sched_yield();
}

TEST(threads, same_thread_same_index)
{
    static const int32_t numbers[] = {2, 5, 64};
    static meeting first, again;
    for (int n = 0; n < COUNT_OF(numbers); n++) {
        folioi_threads *threads = open_threads(numbers[n]);
        first = (meeting){.count = numbers[n]};
        run(threads, numbers[n], meet, &first);
        CHECK(pthread_equal(first.who[0], pthread_self()));
        for (int j = 0; j < 20; j++) {
            again = (meeting){.count = numbers[n]};
            run(threads, numbers[n], meet, &again);
            for (int64_t i = 0; i < numbers[n]; i++)
                CHECK(pthread_equal(again.who[i], first.who[i]));
        }
        folioi_threads_destroy(threads);
    }
}

TEST(threads, pinned_where_they_are_put)
{
    cpu_set_t before, after;
    REQUIRE_TEST(sched_getaffinity(0, sizeof before, &before) == 0);
    int32_t n = CPU_COUNT(&before) < MOST ? CPU_COUNT(&before) : MOST;
    folio_context_desc d = {.struct_size = sizeof d, .backend = "cpu", .pin_threads = 1};
    d.num_threads = n;
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&d, &ctx));
    REQUIRE_TEST(ctx != NULL);
    static meeting m;
    m = (meeting){.count = n};
    folioi_parallel(ctx, n, meet, &m);
    int cpu = -1;
    for (int32_t i = 0; i < n; i++) {
        do cpu++;
        while (!CPU_ISSET(cpu, &before));
        if (i == 0) CHECK(CPU_EQUAL(&m.where[0], &before));
        else CHECK(CPU_COUNT(&m.where[i]) == 1 && CPU_ISSET(cpu, &m.where[i]));
    }
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
    folio_context_destroy(ctx);
    d.pin_threads = 2;
    REFUSED(folio_context_create(&d, &ctx), FOLIO_ERR_ARGUMENT, "pin_threads|2");
    d.pin_threads = -1;
    REFUSED(folio_context_create(&d, &ctx), FOLIO_ERR_ARGUMENT, "pin_threads|-1");
}

static void one_by_one(void *user, int64_t count, folio_task_fn fn, void *task)
{
    (void)user;
    for (int64_t i = 0; i < count; i++) fn(task, i);
}

TEST(threads, pins_that_cannot_be)
{
    cpu_set_t before, one;
    REQUIRE_TEST(sched_getaffinity(0, sizeof before, &before) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    folio_context_desc d = {.struct_size = sizeof d, .backend = "cpu", .pin_threads = 1};
    folio_context *ctx = NOWHERE;
    d.num_threads = 2;
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    REFUSED(folio_context_create(&d, &ctx), FOLIO_ERR_ARGUMENT, "pin_threads|2 threads|1 proc");
    CHECK(ctx == NULL);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    d.executor = (folio_executor){one_by_one, NULL, 2};
    REFUSED(folio_context_create(&d, &ctx), FOLIO_ERR_ARGUMENT, "pin_threads|executor");
}

/* Threads of this process that the system does not have asleep, this one aside. */
static int count_awake(void)
{
    int awake = 0;
    DIR *dir = opendir("/proc/self/task");
    if (dir == NULL) return 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        char path[300], line[512], state = 'S';
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", e->d_name);
        bool other = e->d_name[0] != '.' && atoi(e->d_name) != getpid();
        FILE *f = other ? fopen(path, "r") : NULL;
        if (f == NULL) continue;
        if (fgets(line, sizeof line, f) != NULL && strrchr(line, ')') != NULL)
            state = strrchr(line, ')')[2];
        fclose(f);
        awake += state != 'S';
    }
    closedir(dir);
    return awake;
}

/* A thread that is cancelled while workers compute for it ends when they have: they use its stack. */
static void run_slowly(void *task, int64_t i)
{
    if (i > 0) usleep(50000); /* longer than the caller looks before it sleeps */
    count_run(task, i);
}

static void *run_cancelled(void *arg)
{
    tally *t = arg;
    pthread_cancel(pthread_self());
    run(t->threads, 2, run_slowly, t);
    atomic_fetch_add(&t->runs[2], 1);
    pthread_testcancel();
    return NULL;
}

TEST(threads, a_cancelled_caller_waits_for_its_workers)
{
    tally t = {.threads = open_threads(2)};
    for (int i = 1; i <= 3; i++) {
        pthread_t caller;
        void *result = NULL;
        REQUIRE_TEST(pthread_create(&caller, NULL, run_cancelled, &t) == 0);
        CHECK(pthread_join(caller, &result) == 0 && result == PTHREAD_CANCELED);
        for (int k = 0; k < 3; k++) CHECK_INT(atomic_load(&t.runs[k]), i);
    }
    folioi_threads_destroy(t.threads);
}

/* Not how soon, only that they do: a pool that looks for work for ever never gets there. */
TEST(threads, idle_threads_sleep)
{
    static const int32_t numbers[] = {2, 9};
    for (int n = 0; n < COUNT_OF(numbers); n++) {
        folioi_threads *threads = open_threads(numbers[n]);
        tally t = {0};
        for (int j = 0; j < 50; j++) run(threads, numbers[n], count_run, &t);
        int quiet = 0;
        for (int i = 0; i < 20000 && quiet < 20; i++) {
            quiet = count_awake() == 0 ? quiet + 1 : 0;
            nap(500);
        }
        CHECK_INT(quiet, 20);
        folioi_threads_destroy(threads);
    }
}

/* ---- Pages */

/* Every page of memory nobody has written to is there afterwards, whatever its size, and no byte past
 * it has changed. */
TEST(threads, touch_reaches_every_page)
{
    enum { PAGES = 2600 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    static const int64_t sizes[] = {
        1, 4096, 4097, (2 << 20) + 1, 4096 * 2000 + 17, 4096 * 2599 + 5};
    for (int32_t threads = 1; threads <= 5; threads += 2) {
        folio_context *ctx = support_context("cpu", threads, NULL);
        for (int n = 0; n < COUNT_OF(sizes); n++) {
            char *memory = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            REQUIRE_TEST(memory != MAP_FAILED);
            madvise(memory, PAGES * page, MADV_NOHUGEPAGE);
            unsigned char there[PAGES] = {0};
            folioi_touch(ctx, memory, sizes[n]);
            CHECK(mincore(memory, PAGES * page, there) == 0);
            for (size_t i = 0; i < PAGES; i++)
                if ((there[i] & 1) != (i * page < (size_t)sizes[n]))
                    test_fail(__FILE__, __LINE__, "%lld bytes: page %d is %sthere",
                              (long long)sizes[n], (int)i, there[i] & 1 ? "" : "not ");
            munmap(memory, PAGES * page);
        }
        folio_context_destroy(ctx);
    }
}

/* ---- fork */

/* What a child says of itself: its exit status, or that it hung until its alarm. */
static void check_child(pid_t child)
{
    int status = -1;
    REQUIRE_TEST(child > 0);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with status 0x%x",
              (unsigned)status);
}

/* A sequence of many keys, enough for several threads. */
typedef kit_layer step;

enum { HEADS = 8, SIZE = 64, LEN = 1500, BLOCKS = 100 };

static void open_step(step *s, folio_context *ctx)
{
    *s = (step){0};
    CHECK_OK(KIT_LAYER_OPEN(ctx, s, .num_heads = HEADS, .num_kv_heads = 4, .k_head_size = SIZE,
                            .num_blocks = BLOCKS, .block_size = 16, .max_seq_len = LEN));
    int32_t table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = BLOCKS - 1 - i;
    folio_batch_seq q = {.struct_size = sizeof q, .query_len = LEN, .seq_len = LEN};
    q.block_table = table;
    q.num_blocks = BLOCKS;
    CHECK_OK(folio_batch_add(s->batch, &q));
    CHECK_OK(folio_plan_update(s->plan, s->batch, NULL));
}

static void close_step(step *s)
{
    kit_layer_close(s);
    folio_context_destroy(s->ctx);
}

static float numbers[LEN][HEADS][SIZE], result[LEN][HEADS][SIZE], expected[LEN][HEADS][SIZE];

static folio_status forward(const step *s, float *out)
{
    folio_tensors t = {.struct_size = sizeof t};
    t.q = (folio_tensor){.data = numbers, .dtype = FOLIO_F32, .tokens = LEN};
    t.k = (folio_tensor){.data = numbers, .dtype = FOLIO_F32, .tokens = LEN};
    t.v = (folio_tensor){.data = numbers, .dtype = FOLIO_F32, .tokens = LEN};
    t.out = (folio_tensor){.data = out, .dtype = FOLIO_F32, .tokens = LEN};
    return folio_attention_forward(s->plan, 0, FOLIO_ATTENTION_DECODER, s->cache, 0, &t, NULL);
}

static void fill_numbers(void) { support_fill(&numbers[0][0][0], LEN * HEADS * SIZE, 7, 1.0f); }

/* A child that uses the context of its parent, then takes it down: 0 if all went well. */
static int use_in_child(step *s)
{
    alarm(300);
    memset(result, 0xff, sizeof result);
    for (int i = 0; i < 2; i++)
        if (forward(s, &result[0][0][0]) != FOLIO_OK) return 1;
    if (memcmp(result, expected, sizeof result) != 0) return 2;
    close_step(s);
    return 0;
}

TEST(threads, child_uses_its_parents_context)
{
    fill_numbers();
    static const int32_t counts[] = {1, 2, 9};
    for (int n = 0; n < COUNT_OF(counts); n++) {
        step s;
        open_step(&s, support_context("cpu", counts[n], NULL));
        CHECK_OK(forward(&s, &expected[0][0][0]));
        pid_t child = fork();
        if (child == 0) _exit(use_in_child(&s));
        check_child(child);
        memset(result, 0xff, sizeof result);
        CHECK_OK(forward(&s, &result[0][0][0])); /* the parent's threads are as they were */
        CHECK(memcmp(result, expected, sizeof result) == 0);
        close_step(&s);
    }
}

typedef struct {
    folioi_threads *threads;
    atomic_int inside;
    atomic_bool go;
} gate;

static void stay(void *task, int64_t i)
{
    gate *g = task;
    (void)i;
    atomic_fetch_add(&g->inside, 1);
    while (!atomic_load(&g->go)) sched_yield();
}

static void *hold_threads(void *arg)
{
    gate *g = arg;
    run(g->threads, 3, stay, g);
    return NULL;
}

/* Another thread and the workers are inside a job when the process forks. */
TEST(threads, fork_while_a_job_runs)
{
    fill_numbers();
    step s;
    open_step(&s, support_context("cpu", 3, NULL));
    CHECK_OK(forward(&s, &expected[0][0][0]));
    gate g = {.threads = s.ctx->threads};
    pthread_t other;
    REQUIRE_TEST(pthread_create(&other, NULL, hold_threads, &g) == 0);
    while (atomic_load(&g.inside) < 3) sched_yield();
    pid_t child = fork();
    if (child == 0) _exit(use_in_child(&s));
    check_child(child);
    atomic_store(&g.go, true);
    pthread_join(other, NULL);
    close_step(&s);
}

typedef struct {
    meeting all; /* so that workers are inside when index 0 forks */
    pid_t child;
} forking;

static void fork_at_0(void *task, int64_t i)
{
    forking *f = task;
    meet(&f->all, i);
    if (i == 0) f->child = fork();
}

/* The child returns from the job without waiting for workers it does not have. */
TEST(threads, fork_by_a_task)
{
    static forking f;
    folioi_threads *threads = open_threads(3);
    f = (forking){.all = {.count = 3}};
    run(threads, 3, fork_at_0, &f);
    if (f.child == 0) {
        alarm(300);
        tally t = {0};
        run(threads, 3, count_run, &t);
        folioi_threads_destroy(threads);
        _exit(atomic_load(&t.runs[2]) == 1 ? 0 : 1);
    }
    check_child(f.child);
    folioi_threads_destroy(threads);
}

/* ThreadSanitizer allows no new threads in a child. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__
#endif
#endif
#if !defined(__SANITIZE_THREAD__)
TEST(threads, child_opens_its_own)
{
    fill_numbers();
    step s, own;
    open_step(&s, support_context("cpu", 2, NULL));
    CHECK_OK(forward(&s, &expected[0][0][0]));
    pid_t child = fork();
    if (child == 0) {
        open_step(&own, support_context("cpu", 2, NULL));
        _exit(use_in_child(&own));
    }
    check_child(child);
    close_step(&s);
}
#endif
