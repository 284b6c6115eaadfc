/*
 * test_store_kill.c: a process that writes to a store is killed, again and again. What is found
 * afterwards is whole and right, and what was acknowledged is there unless it was replaced since.
 * The writer is forked before any thread exists.
 */
#include "pool/store_rig.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KILL_FRAMES 16
#define KILL_PAYLOAD (96 * 1024) /* more than one page: most kills come while one is written */

static void kill_payload(unsigned char *payload, uint64_t n)
{
    for (uint64_t i = 0; i < KILL_PAYLOAD / 8; i++) {
        uint64_t bits = (n + 1) * 0x9E3779B97F4A7C15u ^ i * 0xD6E8FEB86659FD93u;
        memcpy(payload + 8 * i, &bits, 8);
    }
}

/* Number n is in its key, its ids and every word of its payload. */
static folioi_frame_id kill_id(uint64_t *n, folioi_frame_kind kind)
{
    return (folioi_frame_id){
        .key = {{*n, ~*n}}, .salt = *n / 2, .kind = kind, .ids = n, .ids_bytes = 8, .hashed = true};
}

/* Puts CACHED blocks from `n` on for ever, each said through the pipe when its put has returned;
 * among them a sequence's block, again and again. Never returns. */
static void kill_child(const store_rig *rig, uint64_t n, int pipe_fd)
{
    folioi_store *store;
    folio_allocator a = folioi_allocator_default();
    unsigned char *payload = malloc(KILL_PAYLOAD);
    if (payload == NULL || folioi_store_open(&a, &rig->desc, &store) != FOLIO_OK) _exit(2);
    for (;; n++) {
        uint64_t sequence = 7;
        folioi_frame_id id = kill_id(&n, CACHED), swapped = kill_id(&sequence, SEQUENCE);
        kill_payload(payload, n);
        if (folioi_store_put(store, &id, payload, KILL_PAYLOAD) != FOLIO_OK) _exit(3);
        if (write(pipe_fd, &n, sizeof n) != sizeof n) _exit(4);
        if (n % 5 == 0 && folioi_store_put(store, &swapped, payload, KILL_PAYLOAD) != FOLIO_OK)
            _exit(5);
    }
}

/* Forks, kills after so many words of it and so long; the last number that was said, or `n` - 1. */
static uint64_t kill_once(const store_rig *rig, uint64_t n, uint64_t words, int64_t microseconds)
{
    int fds[2];
    CHECK(pipe(fds) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        kill_child(rig, n, fds[1]);
    }
    CHECK(pid > 0);
    close(fds[1]);
    uint64_t last = n - 1, said;
    for (; words > 0 && read(fds[0], &said, sizeof said) == sizeof said; words--) {
        CHECK(said == last + 1);
        last = said;
    }
    struct timespec wait = {0, microseconds * 1000};
    nanosleep(&wait, NULL);
    if (pid > 0) CHECK(kill(pid, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_MSG(WIFSIGNALED(status), "the writer ended by itself: %d", WEXITSTATUS(status));
    while (read(fds[0], &said, sizeof said) == sizeof said) {
        CHECK(said == last + 1);
        last = said;
    }
    close(fds[0]);
    return last;
}

/*
 * Numbers grow, so that the order of the puts is theirs. At most three frames hold something else
 * than the latest acknowledged blocks: the put under way, and two of the sequence's.
 */
static void kill_loop(uint64_t seed, int rounds)
{
    store_rig rig;
    srig_init(&rig, KILL_FRAMES);
    rig.geometry[0].payload_bytes = KILL_PAYLOAD;
    rig.desc.max_bytes = (KILL_FRAMES + 1) * (int64_t)(KILL_PAYLOAD + 4096);
    unsigned char *expected = malloc(KILL_PAYLOAD), *got = malloc(KILL_PAYLOAD);
    uint64_t known[KILL_FRAMES], next = 1, total = 0; /* what the last round left, oldest first */
    int num_known = 0;
    for (int round = 0; round < rounds && test_failures() == 0; round++) {
        uint64_t first = next, r = support_bits(seed, (uint64_t)round);
        /* Every other round by time only: in the open, too. */
        uint64_t words = round % 2 == 0 ? 0 : (r >> 32) % 40;
        uint64_t last = kill_once(&rig, first, words, (int64_t)(r % 20000));
        next = last + 2; /* last + 1 may be there, or not */
        total += last + 1 - first;
        CHECK_OK(srig_open(&rig));
        if (rig.store == NULL) break;
        CHECK_INT(srig_stats(&rig).num_frames, KILL_FRAMES);
        CHECK_INT(srig_stats(&rig).warnings, 0);
        uint64_t candidates[KILL_FRAMES * 3 + 1];
        int count = 0, num_found = 0;
        for (int i = 0; i < num_known; i++) candidates[count++] = known[i];
        uint64_t from = last + 1 - first > 2 * KILL_FRAMES ? last + 1 - 2 * KILL_FRAMES : first;
        if (from > first) count = 0;
        for (uint64_t n = from; n <= last; n++) candidates[count++] = n;
        int must = count - (KILL_FRAMES - 3); /* from this one on */
        candidates[count++] = last + 1;
        for (int i = 0; i < count; i++) {
            uint64_t n = candidates[i];
            bool found;
            folioi_frame_id id = kill_id(&n, CACHED);
            CHECK_OK(folioi_store_get(rig.store, &id, got, KILL_PAYLOAD, &found));
            CHECK_MSG(found || i < must || n == last + 1, "round %d: %llu was said and is lost",
                      round, (unsigned long long)n);
            kill_payload(expected, n);
            CHECK(!found || memcmp(got, expected, KILL_PAYLOAD) == 0);
            if (found) {
                CHECK(num_found < KILL_FRAMES);
                known[num_found++ % KILL_FRAMES] = n;
            }
        }
        num_known = num_found;
        CHECK_INT(srig_stats(&rig).used, num_found); /* and nothing that nobody put */
        CHECK_INT(srig_stats(&rig).warnings + srig_stats(&rig).errors, 0);
        srig_close(&rig);
    }
    CHECK(total > (uint64_t)rounds); /* by the words that were waited for */
    free(expected);
    free(got);
    srig_end(&rig);
}

TEST(store_kill, a_writer_killed_at_any_time) { kill_loop(1, 20); }

LONG_TEST(store_kill, a_writer_killed_again_and_again) { kill_loop(2, 1000); }
