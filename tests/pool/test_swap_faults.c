/*
 * test_swap_faults.c: tiers when things break: no memory at the n-th call, for every n; a disk that
 * takes no more; files that get shorter while a sequence is away (bits that flip: test_pool_fuzz.c).
 * Nothing may be lost that the caller was not told of, and what comes back is right: every row
 * computed from it has the bits it has alone.
 */
#include "cache/pool.h"
#include "pool/generation_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ------------------------------------------------------------------------- memory that runs out */

enum { BLOCKS = 48, HOST = 20, FRAMES = 40 };

typedef enum {
    OUT_HOST,
    OUT_DISK,
    IN_HOST,
    IN_DISK,
    MATCH_HOST,
    MATCH_DISK,
    LOWER_HOST,
    LOWER_DISK,
    PREEMPT,
    NUM_OPERATIONS
} operation;

typedef struct {
    gen_world w;
    support_counter counter;
    folio_sequence *s; /* the one that travels */
} fragile;

/* Everything as it is just before the operation. */
static bool prepare(fragile *f, operation op)
{
    const gen_request *r = &f->w.r[0];
    if (!gen_world_pool(&f->w, BLOCKS, HOST, FRAMES)) return false;
    f->s = gen_filled(&f->w, r, 30);
    if (op == IN_HOST) CHECK_OK(folio_sequence_swap_out(f->s, FOLIO_TIER_HOST, NULL, NULL));
    if (op == IN_DISK) CHECK_OK(folio_sequence_swap_out(f->s, FOLIO_TIER_DISK, NULL, NULL));
    if (op == IN_HOST || op == IN_DISK) CHECK_OK(folio_pool_forget(f->w.p.pool));
    if (op < MATCH_HOST || op == PREEMPT) return true;
    folio_sequence_destroy(f->s);
    f->s = gen_sequence(&f->w, r);
    if (op != LOWER_HOST) gen_lower(&f->w, FOLIO_TIER_HOST, 100);
    if (op == MATCH_DISK) gen_lower(&f->w, FOLIO_TIER_DISK, 100);
    return true;
}

static folio_status operate(fragile *f, operation op, bool async)
{
    folio_transfer *t = NULL, **out = async ? &t : NULL;
    folio_tokens tokens = gen_tokens(&f->w.r[0], 30);
    folio_status status = FOLIO_ERR_INTERNAL;
    switch (op) {
    case OUT_HOST: status = folio_sequence_swap_out(f->s, FOLIO_TIER_HOST, NULL, out); break;
    case OUT_DISK: status = folio_sequence_swap_out(f->s, FOLIO_TIER_DISK, NULL, out); break;
    case IN_HOST:
    case IN_DISK: status = folio_sequence_swap_in(f->s, NULL, out); break;
    case MATCH_HOST:
    case MATCH_DISK: status = folio_sequence_match(f->s, &tokens, NULL, out); break;
    case LOWER_HOST:
        status = folio_pool_swap_out(f->w.p.pool, FOLIO_TIER_HOST, 100, NULL, NULL, out);
        break;
    case LOWER_DISK:
        status = folio_pool_swap_out(f->w.p.pool, FOLIO_TIER_DISK, 100, NULL, NULL, out);
        break;
    default: status = folio_sequence_preempt(f->s, FOLIO_PREEMPT_SWAP, NULL, out);
    }
    if (t == NULL) return status;
    status = folio_transfer_wait(t);
    CHECK_INT(folio_transfer_wait(t), status);
    folio_transfer_destroy(t);
    return status;
}

/* After an operation that failed: where it was, usable, right. */
static void check_unharmed(fragile *f, operation op)
{
    CHECK_OK(folio_pool_check(f->w.p.pool));
    CHECK_INT(gen_stats(&f->w.p).num_copies, 0);
    if (op == OUT_HOST || op == OUT_DISK || op == PREEMPT) {
        gen_check_at(f->s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 30);
        CHECK(gen_contents_right(&f->w.p, f->s, &f->w.r[0]));
    } else if (op == IN_HOST || op == IN_DISK) {
        gen_check_at(f->s, FOLIO_SEQUENCE_SWAPPED,
                     op == IN_HOST ? FOLIO_TIER_HOST : FOLIO_TIER_DISK, 30);
    } else {
        gen_check_at(f->s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 0);
    }
}

/* Once more, with memory; then to the end of the request. */
static void check_usable(fragile *f, operation op, bool failed)
{
    const gen_request *r = &f->w.r[0];
    if (failed) CHECK_OK(operate(f, op, false));
    gen_poison_free(&f->w);
    if (gen_info(f->s).state == FOLIO_SEQUENCE_SWAPPED)
        CHECK_OK(folio_sequence_swap_in(f->s, NULL, NULL));
    if (op == LOWER_HOST || op == LOWER_DISK) gen_match(&f->w, f->s, r, 30);
    /* Whole blocks; in every case all of them. */
    CHECK_INT(gen_info(f->s).len, op >= MATCH_HOST && op <= LOWER_DISK ? 28 : 30);
    gen_end(&f->w.p, f->s, r);
    gen_pool_close(&f->w.p);
    unlink(f->w.store);
}

static void check_allocations(const gen_geometry *g, operation op, bool async)
{
    static fragile f;
    f = (fragile){0};
    folio_allocator allocator = support_allocator(&f.counter);
    REQUIRE_TEST(gen_world_model(&f.w, g, &allocator));
    int64_t live = f.counter.live, n = 0;
    bool reached = true;
    while (reached && test_failures() == 0) {
        REQUIRE_TEST(prepare(&f, op));
        int64_t before = f.counter.calls;
        f.counter.fail_at = before + ++n;
        support_mark_error();
        folio_status status = operate(&f, op, async);
        reached = f.counter.calls >= before + n;
        f.counter.fail_at = 0;
        if (status != FOLIO_OK) {
            CHECK(reached);
            support_refused(__FILE__, __LINE__, "a call without memory", status, FOLIO_ERR_MEMORY,
                            "");
            check_unharmed(&f, op);
        }
        check_usable(&f, op, status != FOLIO_OK);
        CHECK_INT(f.counter.live, live);
    }
    if (test_failures() > 0)
        printf("  ... operation %d, allocation %lld%s\n", (int)op, (long long)n,
               async ? ", in the background" : "");
    if (test_failures() == 0) gen_world_close(&f.w);
    CHECK_INT(f.counter.faults, 0);
}

TEST(swap_faults, every_allocation_may_fail)
{
    for (int op = 0; op < NUM_OPERATIONS; op++) {
        check_allocations(&gen_small, (operation)op, false);
        check_allocations(&gen_windowed, (operation)op, true);
        check_allocations(&gen_translating, (operation)op, false);
    }
}

/* A thread that is cancelled while it waits for a swap ends after that, and leaves the pool to the others. */
static void *swap_cancelled(void *arg)
{
    fragile *f = arg;
    pthread_cancel(pthread_self());
    CHECK_OK(folio_sequence_swap_out(f->s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_OK(folio_sequence_swap_in(f->s, NULL, NULL));
    CHECK_OK(folio_pool_forget(f->w.p.pool));
    pthread_testcancel();
    return NULL;
}

TEST(swap_faults, a_cancelled_thread_leaves_the_pool)
{
    fragile f = {.counter = {0}};
    folio_allocator allocator = support_allocator(&f.counter);
    REQUIRE_TEST(gen_world_model(&f.w, &gen_small, &allocator));
    REQUIRE_TEST(prepare(&f, OUT_DISK));
    pthread_t thread;
    void *result = NULL;
    REQUIRE_TEST(pthread_create(&thread, NULL, swap_cancelled, &f) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    REQUIRE_TEST(pthread_mutex_trylock(&f.w.p.pool->lock) == 0);
    pthread_mutex_unlock(&f.w.p.pool->lock);
    gen_end(&f.w.p, f.s, &f.w.r[0]); /* all its tokens are there */
    gen_pool_close(&f.w.p);
    unlink(f.w.store);
    gen_world_close(&f.w);
}

TEST(swap_faults, a_pool_with_tiers_needs_all_its_memory)
{
    static fragile f;
    f = (fragile){0};
    folio_allocator allocator = support_allocator(&f.counter);
    REQUIRE_TEST(gen_world_model(&f.w, &gen_small, &allocator));
    REQUIRE_TEST(gen_world_pool(&f.w, BLOCKS, HOST, FRAMES));
    folio_sequence_destroy(gen_filled(&f.w, &f.w.r[0], 36));
    gen_lower(&f.w, FOLIO_TIER_HOST, 100);
    gen_lower(&f.w, FOLIO_TIER_DISK, 100);
    /* The pool alone, over the same caches, so that only its own allocations are counted. */
    folio_layer_group group = {.cache = f.w.p.caches[0]};
    folio_pool_desc desc = gen_world_desc(&f.w, BLOCKS, HOST, FRAMES);
    desc.block_size = gen_small.block_size;
    desc.layer_groups = &group;
    folio_pool_destroy(f.w.p.pool);
    int64_t live = f.counter.live, n = 0, refused = 0;
    for (;;) {
        folio_pool *pool = NOWHERE;
        f.counter.fail_at = f.counter.calls + ++n;
        support_mark_error();
        folio_status status = folio_pool_create(f.w.m.ctx, &desc, &pool);
        f.counter.fail_at = 0;
        if (status == FOLIO_OK) {
            f.w.p.pool = pool;
            break;
        }
        support_refused(__FILE__, __LINE__, "folio_pool_create", status, FOLIO_ERR_MEMORY, "");
        CHECK(pool == NULL);
        CHECK_INT(f.counter.live, live);
        refused++;
    }
    CHECK(refused > 3);
    folio_sequence *s = gen_sequence(&f.w, &f.w.r[0]);
    CHECK_INT(gen_match(&f.w, s, &f.w.r[0], 36), 36);
    CHECK(gen_contents_right(&f.w.p, s, &f.w.r[0]));
    folio_sequence_destroy(s);
    gen_world_close(&f.w);
    CHECK_INT(f.counter.live, 0);
    CHECK_INT(f.counter.faults, 0);
}

/* ------------------------------------------------------------------------- a disk that fails once */

/* The linker gives the library these (tests/CMakeLists.txt). */
ssize_t __real_pread(int fd, void *data, size_t n, off_t at);
ssize_t __real_pwrite(int fd, const void *data, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *data, size_t n, off_t at);

static atomic_llong calls_left = LLONG_MAX; /* the call after them fails */

static bool call_fails(void)
{
    errno = EIO;
    return atomic_fetch_sub(&calls_left, 1) == 0;
}

ssize_t __wrap_pread(int fd, void *data, size_t n, off_t at)
{
    return call_fails() ? -1 : __real_pread(fd, data, n, at);
}

ssize_t __wrap_pwrite(int fd, const void *data, size_t n, off_t at)
{
    return call_fails() ? -1 : __real_pwrite(fd, data, n, at);
}

/* The n-th read or write fails, for every n: an error or a shorter prefix, and every row right after it. */
static void check_disk(const gen_geometry *g, operation op)
{
    static fragile f;
    f = (fragile){0};
    REQUIRE_TEST(gen_world_model(&f.w, g, NULL));
    bool reached = true;
    long long n = 0;
    for (; reached && test_failures() == 0; n++) {
        REQUIRE_TEST(prepare(&f, op));
        atomic_store(&calls_left, n);
        folio_status status = operate(&f, op, n % 2 == 1);
        reached = atomic_exchange(&calls_left, LLONG_MAX) < 0;
        CHECK(status == FOLIO_OK || (reached && status == FOLIO_ERR_IO));
        CHECK(reached || gen_stats(&f.w.p).store_errors == 0);
        CHECK_OK(folio_pool_check(f.w.p.pool));
        gen_poison_free(&f.w);
        if (gen_info(f.s).state == FOLIO_SEQUENCE_SWAPPED)
            CHECK_OK(folio_sequence_swap_in(f.s, NULL, NULL));
        bool goes_out = op == OUT_HOST || op == OUT_DISK || op == PREEMPT;
        CHECK(!goes_out || gen_info(f.s).len == 30); /* all of it, or it was told */
        if (gen_info(f.s).len == 0 && op >= MATCH_HOST) gen_match(&f.w, f.s, &f.w.r[0], 30);
        gen_end(&f.w.p, f.s, &f.w.r[0]);
        gen_pool_close(&f.w.p);
        unlink(f.w.store);
    }
    if (test_failures() > 0) printf("  ... operation %d, call %lld\n", (int)op, n - 1);
    else gen_world_close(&f.w);
    CHECK(n > 2 || (op != OUT_DISK && op != IN_DISK && op != LOWER_DISK));
}

TEST(swap_faults, every_read_and_write_may_fail)
{
    for (int op = 0; op < NUM_OPERATIONS; op++) {
        check_disk(&gen_small, (operation)op);
        check_disk(&gen_windowed, (operation)op);
        check_disk(&gen_translating, (operation)op);
    }
}

/* ---------------------------------------------------------------------------------- a full disk */

/* The body runs in a process of its own, whose failures become this test's. */
static void in_child(void (*body)(int64_t arg), int64_t arg)
{
    fflush(stdout);
    pid_t child = fork();
    REQUIRE_TEST(child >= 0);
    if (child == 0) {
        body(arg);
        fflush(stdout);
        _exit(test_failures() > 0);
    }
    int status = 0;
    REQUIRE_TEST(waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "limit %lld: status %d",
              (long long)arg, status);
}

static void with_limited_files(int64_t limit)
{
    static gen_world w;
    signal(SIGXFSZ, SIG_IGN); /* then a write past the limit fails with EFBIG */
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 48, 0, FRAMES));
    folio_sequence *s = gen_filled(&w, &w.r[0], 30), *other = gen_filled(&w, &w.r[2], 26);
    struct rlimit r = {.rlim_cur = (rlim_t)limit, .rlim_max = RLIM_INFINITY};
    REQUIRE_TEST(getrlimit(RLIMIT_FSIZE, &(struct rlimit){0}) == 0);
    REQUIRE_TEST(setrlimit(RLIMIT_FSIZE, &r) == 0);
    /* Eight frames do not fit: the sequence stays, whole. */
    folio_transfer *t = NULL;
    support_mark_error();
    folio_status status = folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL);
    support_refused(__FILE__, __LINE__, "swap_out", status, FOLIO_ERR_IO, "");
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 30);
    CHECK(gen_contents_right(&w.p, s, &w.r[0]));
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, &t));
    support_mark_error();
    status = folio_transfer_wait(t);
    support_refused(__FILE__, __LINE__, "transfer_wait", status, FOLIO_ERR_IO, "");
    folio_transfer_destroy(t);
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 30);
    CHECK(gen_stats(&w.p).store_errors >= 2);
    CHECK_OK(folio_pool_check(w.p.pool));
    CHECK_OK(gen_feed(&w.p, s, &w.r[0], 34));
    /* Cached blocks that cannot be written stay where they are, or are missed; never wrong. */
    folio_sequence_destroy(other);
    (void)folio_pool_swap_out(w.p.pool, FOLIO_TIER_DISK, 100, NULL, NULL, NULL);
    CHECK_OK(folio_pool_check(w.p.pool));
    other = gen_sequence(&w, &w.r[2]);
    CHECK_INT(gen_match(&w, other, &w.r[2], 25), 24); /* nothing was let go unwritten */
    CHECK(gen_contents_right(&w.p, other, &w.r[2]));
    CHECK_OK(gen_feed(&w.p, other, &w.r[2], 39));
    /* The disk has room again. */
    r.rlim_cur = RLIM_INFINITY;
    REQUIRE_TEST(setrlimit(RLIMIT_FSIZE, &r) == 0);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    folio_sequence_destroy(other);
    CHECK_OK(folio_pool_forget(w.p.pool));
    gen_poison_free(&w);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 34);
    CHECK_OK(gen_feed(&w.p, s, &w.r[0], 39));
    folio_sequence_destroy(s);
    gen_world_close(&w);
}

/* Limits inside the superblock's frame, between frames and in the middle of one. */
TEST(swap_faults, a_full_disk)
{
    static const int64_t limits[] = {1, 4096, 8192, 10000, 12288, 20480, 25000, 32768};
    for (int i = 0; i < COUNT_OF(limits); i++) in_child(with_limited_files, limits[i]);
}

/* ------------------------------------------------------------------------------- damaged files */

static int64_t file_bytes(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (int64_t)st.st_size : -1;
}

/* A sequence that comes back from a damaged file: right as far as it goes; the rest again. */
static int64_t come_back(gen_world *w, folio_sequence *s, const gen_request *r, int64_t len)
{
    gen_poison_free(w);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    CHECK_OK(folio_pool_check(w->p.pool));
    folio_sequence_info info = gen_info(s);
    CHECK_INT(info.state, FOLIO_SEQUENCE_RESIDENT);
    CHECK(info.len <= len && info.len == info.committed_len);
    CHECK(info.encoder_len == r->encoder_len || info.encoder_len == 0);
    CHECK_INT(info.encoder_committed_len, info.encoder_len);
    CHECK(gen_contents_right(&w->p, s, r));
    /* The same row again, where it was lost, and the rows after it. */
    if (info.len < len) CHECK_OK(gen_feed(&w->p, s, r, len));
    CHECK_OK(gen_feed(&w->p, s, r, len + 3));
    return len - info.len + (info.encoder_len < r->encoder_len);
}

TEST(swap_faults, files_get_shorter)
{
    static gen_world w;
    static const gen_geometry *const geometries[] = {&gen_small, &gen_windowed, &gen_translating};
    for (int g = 0; g < COUNT_OF(geometries); g++) {
        REQUIRE_TEST(gen_world_open(&w, geometries[g], 48, 0, FRAMES));
        int64_t lost = 0;
        for (int64_t part = 0; part <= 10 && test_failures() == 0; part++) {
            folio_sequence *s = gen_filled(&w, &w.r[0], 30);
            CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
            CHECK_OK(folio_pool_forget(w.p.pool));
            CHECK(truncate(w.store, file_bytes(w.store) * part / 10) == 0);
            int64_t missing = come_back(&w, s, &w.r[0], 30);
            if (part == 0) CHECK(missing >= 30);
            if (part == 10) CHECK_INT(missing, 0);
            lost += missing > 0;
            folio_sequence_destroy(s);
            CHECK_OK(folio_pool_forget(w.p.pool));
        }
        CHECK(lost >= 5);
        gen_pool_close(&w.p);
        gen_model_close(&w.m);
        unlink(w.store);
    }
}
