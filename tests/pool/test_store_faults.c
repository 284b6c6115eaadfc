/*
 * test_store_faults.c: the disk tier on a disk that is full, short, slow or broken; with files
 * whose bits were flipped, whose end was cut off, or to which something was added; with memory that
 * runs out. What is found is right, what was put is there, and what is no store is not written to.
 */
#include "pool/store_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define FRAME 4096
#define HEAD SRIG_HEAD /* header and ids */

/* Opened with these faults from the first call on. */
static folio_status open_faulty(store_rig *rig, srig_faults *faults)
{
    folioi_file_ops ops = srig_faulty_ops(faults);
    rig->desc.ops = &ops; /* the store keeps a copy */
    folio_status status = srig_open(rig);
    rig->desc.ops = NULL;
    return status;
}

static void drop(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind)
{
    srig_block b;
    srig_block_make(&b, n, group, kind, 0);
    folioi_store_drop(store, &b.id);
}

/* Frames 1 .. count of a closed file hold CACHED blocks 0 .. count - 1 of group 0. */
static void make_file(store_rig *rig, uint64_t count)
{
    unlink(rig->path);
    CHECK_OK(srig_open(rig));
    for (uint64_t n = 0; n < count; n++) CHECK_OK(srig_put(rig->store, n, 0, CACHED, 0));
    srig_close(rig);
}

/* --------------------------------------------------------------------------- short, interrupted */

NEW_STORE_TEST(store_faults, short_and_interrupted_calls_change_nothing, 3)
{
    for (int mode = 0; mode < 6; mode++) {
        unlink(rig->path);
        srig_faults faults = {.chunks = (srig_chunks)(mode % 3), .interrupted = mode >= 3};
        for (int open = 0; open < 2; open++) {
            REQUIRE_TEST(open_faulty(rig, &faults) == FOLIO_OK);
            for (uint64_t n = 0; n < 3; n++)
                CHECK_INT(srig_get(rig->store, n + 2, (int32_t)n, CACHED, 0), open);
            for (uint64_t n = 0; n < 5; n++) {
                CHECK_OK(srig_put(rig->store, n, (int32_t)(n + 1) % 3, CACHED, 0));
                CHECK_INT(srig_get(rig->store, n, (int32_t)(n + 1) % 3, CACHED, 0), 1);
            }
            CHECK_OK(folioi_store_forget(rig->store));
            for (uint64_t n = 0; n < 3; n++)
                CHECK_OK(srig_put(rig->store, n + 2, (int32_t)n, CACHED, 0));
            drop(rig->store, 0, 0, CACHED);
            CHECK_INT(srig_stats(rig).warnings + srig_stats(rig).errors, 0);
            srig_close(rig);
        }
        CHECK(faults.reads > (mode % 3 == 1 ? 10000 : 20));
    }
}

/* ------------------------------------------------------------------------------- failing writes */

#define NAMES 10

typedef struct {
    store_rig rig;
    bool alive[NAMES];
    uint64_t sequence; /* version of the SEQUENCE block there; 0: none */
} writes_walk;

static void not_alive(void *user, const folioi_frame_id *id)
{
    writes_walk *w = user;
    srig_block b;
    for (uint64_t n = 0; n < NAMES; n++) {
        srig_block_make(&b, n, (int32_t)(n % 3), CACHED, 0);
        if (key_equal(id->key, b.id.key)) w->alive[n] = false;
    }
}

static void check_alive(writes_walk *w, bool at_least)
{
    for (uint64_t n = 0; n < NAMES; n++) {
        int got = srig_get(w->rig.store, n, (int32_t)(n % 3), CACHED, 0);
        CHECK_MSG(at_least ? got >= w->alive[n] : got == w->alive[n], "block %d: %d, expected %d",
                  (int)n, got, w->alive[n]);
    }
}

/* Did the call fail exactly when one of its writes did? */
static bool check_put(writes_walk *w, const srig_faults *f, int64_t writes_before,
                      folio_status status)
{
    bool failed = f->fail_write > 0 && f->writes >= f->fail_write &&
                  (f->from_then_on ? f->writes > writes_before : writes_before < f->fail_write);
    CHECK_MSG(status == (failed ? FOLIO_ERR_IO : FOLIO_OK), "write %lld: %s",
              (long long)f->fail_write, folio_status_name(status));
    if (failed) {
        CHECK(strstr(folio_last_error(), strerror(f->write_errno ? f->write_errno : EIO)) != NULL);
        CHECK(strstr(folio_last_error(), "at byte ") != NULL);
        if (w->rig.store != NULL) CHECK(srig_stats(&w->rig).errors > 0);
    }
    return !failed;
}

/* Puts, replacements, a drop and a sequence put twice while the writes fail; false: none failed. */
static bool walk_writes(srig_faults faults)
{
    writes_walk w = {.sequence = 0};
    store_rig *rig = &w.rig;
    srig_init(rig, 4);
    bool opened = check_put(&w, &faults, 0, open_faulty(rig, &faults));
    CHECK_INT(rig->store != NULL, opened);
    if (opened) folioi_store_on_replaced(rig->store, not_alive, &w);
    for (uint64_t step = 0; opened && step < NAMES + 3; step++) {
        int64_t before = faults.writes;
        if (step == 5) {
            drop(rig->store, 4, 1, CACHED);
            w.alive[4] = false;
        } else if (step == 7 || step == 8) {
            if (check_put(&w, &faults, before, srig_put(rig->store, 50, 1, SEQUENCE, step)))
                w.sequence = step;
        } else {
            uint64_t n = step < 5 ? step : step == 6 ? 5 : step - 3;
            folio_status status = srig_put(rig->store, n, (int32_t)(n % 3), CACHED, 0);
            w.alive[n] = check_put(&w, &faults, before, status);
        }
        check_alive(&w, false);
        CHECK_INT(srig_get(rig->store, 50, 1, SEQUENCE, w.sequence), w.sequence != 0);
        CHECK_INT(folioi_store_available(rig->store), 4 - (w.sequence != 0));
    }
    bool reached = faults.fail_write <= faults.writes;
    srig_reopen(rig); /* on a disk that is well again */
    check_alive(&w, true);
    CHECK(srig_stats(rig).warnings <= (faults.in_part && faults.from_then_on));
    CHECK_INT(srig_stats(rig).errors, 0);
    for (uint64_t n = 0; n < 4; n++) CHECK_OK(srig_put(rig->store, 60 + n, 0, SEQUENCE, n));
    for (uint64_t n = 0; n < 4; n++) CHECK_INT(srig_get(rig->store, 60 + n, 0, SEQUENCE, n), 1);
    srig_end(rig);
    return reached;
}

TEST(store_faults, a_disk_that_is_full_at_any_write)
{
    for (int mode = 0; mode < 6; mode++) {
        int64_t n = 1;
        do {
            srig_faults faults = {.fail_write = n,
                                  .write_errno = mode >= 4 ? 0 : ENOSPC, /* a write of nothing */
                                  .in_part = mode == 2 || mode == 3,
                                  .from_then_on = mode % 2 == 1};
            if (!walk_writes(faults)) break;
        } while (++n < 1000 && test_failures() == 0);
        CHECK_MSG(n > 30 && n < 100, "mode %d ended at write %lld", mode, (long long)n);
    }
}

/* The old version of a sequence stays until the new one is whole. */
NEW_STORE_TEST(store_faults, a_failed_put_leaves_the_old_sequence, 2)
{
    for (int64_t n = 1; n <= 3; n++) {
        unlink(rig->path);
        srig_faults faults = {.write_errno = ENOSPC};
        REQUIRE_TEST(open_faulty(rig, &faults) == FOLIO_OK);
        CHECK_OK(srig_put(rig->store, 1, 0, SEQUENCE, 1));
        faults.fail_write = faults.writes + n;
        REFUSED(srig_put(rig->store, 1, 0, SEQUENCE, 2), FOLIO_ERR_IO, "No space left");
        CHECK_INT(srig_get(rig->store, 1, 0, SEQUENCE, 1), 1);
        CHECK_INT(srig_stats(rig).errors, 1);
        CHECK_INT(folioi_store_available(rig->store), 1);
        CHECK_OK(srig_put(rig->store, 1, 0, SEQUENCE, 3));
        CHECK_INT(srig_get(rig->store, 1, 0, SEQUENCE, 3), 1);
        srig_close(rig);
    }
}

/* Killed, or refused by the disk, between the new block of a name and the wiping of the old one. */
NEW_STORE_TEST(store_faults, of_two_frames_of_one_name_the_later_is_found, 3)
{
    for (int order = 0; order < 2; order++) {
        unlink(rig->path);
        srig_faults faults = {.write_errno = EIO};
        REQUIRE_TEST(open_faulty(rig, &faults) == FOLIO_OK);
        srig_block first, second;
        unsigned char got[SRIG_MAX_PAYLOAD];
        bool found;
        srig_block_make(&first, 1, 0, CACHED, 0);
        srig_block_make(&second, 1, 0, CACHED, 1);
        second.id.salt++;
        /* The later one in the later frame, or in the earlier. */
        if (order == 1) CHECK_OK(srig_put(rig->store, 2, 0, CACHED, 0));
        CHECK_OK(folioi_store_put(rig->store, &first.id, first.payload, first.bytes));
        if (order == 1) drop(rig->store, 2, 0, CACHED);
        faults.fail_write = faults.writes + 4;
        CHECK_OK(folioi_store_put(rig->store, &second.id, second.payload, second.bytes));
        CHECK_INT(srig_stats(rig).errors, 1);
        CHECK_INT(folioi_store_available(rig->store), 3);
        srig_reopen(rig);
        CHECK_INT(srig_stats(rig).used, 1);
        CHECK_INT(folioi_store_available(rig->store), 3);
        CHECK_OK(folioi_store_get(rig->store, &second.id, got, second.bytes, &found));
        CHECK(found && memcmp(got, second.payload, (size_t)second.bytes) == 0);
        folioi_store_drop(rig->store, &second.id);
        srig_reopen(rig);
        CHECK_INT(srig_stats(rig).used, 0); /* the first one does not rise again */
        srig_close(rig);
    }
}

NEW_STORE_TEST(store_faults, a_drop_that_cannot_be_written_is_counted, 3)
{
    srig_faults faults = {.write_errno = EIO};
    REQUIRE_TEST(open_faulty(rig, &faults) == FOLIO_OK);
    CHECK_OK(PUT(1));
    CHECK_OK(srig_put(rig->store, 1, 0, SEQUENCE, 0));
    faults.fail_write = faults.writes + 1;
    drop(rig->store, 1, 0, SEQUENCE); /* writes nothing */
    CHECK_INT(srig_stats(rig).errors, 0);
    drop(rig->store, 1, 0, CACHED);
    CHECK_INT(srig_stats(rig).errors, 1);
    CHECK_INT(GET(1), 0);
    CHECK_INT(folioi_store_available(rig->store), 3);
}

/* What cannot be forgotten on disk is forgotten in memory; the close tries the disk again. */
NEW_STORE_TEST(store_faults, a_forget_that_cannot_be_written, 6)
{
    for (int mode = 0; mode < 4; mode++) {
        bool in_part = mode / 2 == 1, for_good = mode % 2 == 1;
        unlink(rig->path);
        srig_faults faults = {.write_errno = EIO, .in_part = in_part, .from_then_on = for_good};
        REQUIRE_TEST(open_faulty(rig, &faults) == FOLIO_OK);
        for (uint64_t n = 0; n < 3; n++) CHECK_OK(PUT(n));
        faults.fail_write = faults.writes + 1;
        REFUSED(folioi_store_forget(rig->store), FOLIO_ERR_IO, "at byte 4056|Input/output");
        CHECK_INT(srig_stats(rig).used, 0);
        for (uint64_t n = 0; n < 3; n++) CHECK_INT(GET(n), 0);
        if (!for_good) CHECK_OK(PUT(9));
        srig_reopen(rig);
        /* Written in part, the epoch is no epoch: all is forgotten then, too. */
        CHECK_INT(srig_stats(rig).warnings, in_part && for_good);
        CHECK_INT(GET(0), !in_part && for_good);
        CHECK_INT(GET(9), !for_good);
        CHECK_OK(PUT(5));
        srig_reopen(rig);
        CHECK_INT(srig_stats(rig).warnings, 0);
        CHECK_INT(GET(5), 1);
        srig_close(rig);
    }
}

/* -------------------------------------------------------------------------------- failing reads */

/* The n-th read fails, or ends early: while the file is opened, or while frames are read. */
NEW_STORE_TEST(store_faults, a_disk_that_cannot_be_read_at_any_read, 6)
{
    enum { COUNT = 4 };
    for (int mode = 0; mode < 2; mode++) {
        for (int64_t n = 1; n <= 1 + COUNT + 2 * COUNT; n++) {
            make_file(rig, COUNT);
            srig_faults faults = {.fail_read = n, .read_errno = mode == 0 ? EIO : 0};
            folio_status status = open_faulty(rig, &faults);
            int lost = 0, expected = n == 1 ? COUNT : 1;
            if (n == 1) {
                CHECK_INT(status, FOLIO_ERR_IO);
                CHECK(strstr(folio_last_error(), mode == 0 ? "Input/output" : "ended at byte 0"));
            } else {
                REQUIRE_TEST(status == FOLIO_OK);
                CHECK_INT(srig_stats(rig).used, n <= 1 + COUNT ? COUNT - 1 : COUNT);
                for (uint64_t i = 0; i < COUNT; i++) {
                    int got = GET(i);
                    CHECK(got >= 0);
                    lost += got == 0;
                }
                CHECK_INT(lost, expected);
                CHECK_INT(srig_stats(rig).used, COUNT - 1);
                CHECK_INT(srig_stats(rig).errors, mode == 0);
                /* A frame whose head is not there at all is as one that was never written. */
                CHECK_INT(srig_stats(rig).warnings, mode == 1 && n > 1 + COUNT);
                CHECK_INT(folioi_store_available(rig->store), 6);
            }
            srig_close(rig);
            CHECK_OK(srig_open(rig)); /* on a disk that is well again */
            CHECK_INT(srig_stats(rig).used,
                      n <= 1 + COUNT ? COUNT : COUNT - 1); /* dropped: wiped */
            srig_close(rig);
        }
    }
}

NEW_STORE_TEST(store_faults, an_open_the_system_refuses, 4)
{
    make_file(rig, 2);
    int64_t size, after_size;
    unsigned char *before = srig_read_file(rig->path, &size);
    for (int part = 0; part < 5; part++) {
        srig_faults faults = {.open_errno = part == 0 ? EACCES : 0,
                              .lock_errno = part == 1   ? ENOLCK
                                            : part == 2 ? EWOULDBLOCK
                                                        : 0,
                              .stat_errno = part == 3 ? EIO : 0,
                              .fail_read = part == 4,
                              .read_errno = EIO};
        static const char *const words[] = {
            "could not be opened: Permission denied", "could not be locked: No locks available",
            "is in use", "could not be examined: Input/output", "could not be read: Input/output"};
        rig->store = NOWHERE;
        REFUSED(open_faulty(rig, &faults), part == 2 ? FOLIO_ERR_ARGUMENT : FOLIO_ERR_IO,
                words[part]);
        CHECK(rig->store == NULL);
        CHECK_INT(faults.writes, 0);
        CHECK_INT(rig->counter.live, 0);
    }
    unsigned char *after = srig_read_file(rig->path, &after_size);
    CHECK(size == after_size && memcmp(before, after, (size_t)size) == 0);
    free(before);
    free(after);
    CHECK_OK(srig_open(rig)); /* no lock was left */
    CHECK_INT(srig_stats(rig).used, 2);
}

/* What somebody else made, or may write to, could hold anything. */
NEW_STORE_TEST(store_faults, a_file_that_others_may_write_is_refused, 4)
{
    char other[400];
    int64_t size, after_size;
    snprintf(other, sizeof other, "%s/other", rig->dir);
    make_file(rig, 2);
    unsigned char *before = srig_read_file(rig->path, &size);
    static const struct {
        mode_t mode;
        const char *words;
    } cases[] = {{0620, "mode 620"},          {0602, "mode 602"}, {0666, "mode 666"},
                 {0600, "belongs to user 7"}, {0600, "2 names"},  {0600, "symbolic link"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        srig_faults faults = {.uid = i == 3 ? 7 : 0};
        CHECK(chmod(rig->path, cases[i].mode) == 0);
        if (i == 4) CHECK(link(rig->path, other) == 0);
        if (i == 5) CHECK(rename(rig->path, other) == 0 && symlink("other", rig->path) == 0);
        REFUSED(open_faulty(rig, &faults), FOLIO_ERR_ARGUMENT, cases[i].words);
        CHECK_INT(faults.reads + faults.writes, 0);
        if (i == 4) CHECK(unlink(other) == 0);
        if (i == 5) CHECK(rename(other, rig->path) == 0);
    }
    CHECK(symlink("nowhere", other) == 0); /* nothing is made through a link either */
    folioi_store_desc d = rig->desc;
    d.path = other;
    REFUSED(folioi_store_open(&rig->allocator, &d, &rig->store), FOLIO_ERR_ARGUMENT, "link");
    CHECK(unlink(other) == 0);
    unsigned char *after = srig_read_file(rig->path, &after_size);
    CHECK(size == after_size && memcmp(before, after, (size_t)size) == 0);
    free(before);
    free(after);
    REQUIRE_TEST(rig->store == NULL && srig_open(rig) == FOLIO_OK);
    CHECK_INT(srig_stats(rig).used, 2);
}

/* ------------------------------------------------------------------------- memory that runs out */

NEW_STORE_TEST(store_faults, memory_that_runs_out_at_any_call, 3)
{
    int64_t refusals = 0;
    for (int64_t n = 1; n < 20; n++) {
        unlink(rig->path);
        rig->counter.calls = 0;
        rig->counter.fail_at = n;
        folio_status status = srig_open(rig);
        if (status != FOLIO_OK) {
            refusals++;
            CHECK_INT(status, FOLIO_ERR_MEMORY);
            CHECK(rig->store == NULL && strstr(folio_last_error(), "no memory for") != NULL);
            CHECK_INT(rig->counter.live, 0);
            CHECK_OK(srig_open(rig)); /* no lock was left */
        }
        for (uint64_t i = 0; i < 4; i++) {
            status = PUT(i);
            if (status == FOLIO_OK) continue;
            refusals++;
            CHECK_INT(status, FOLIO_ERR_MEMORY);
            CHECK_INT(srig_stats(rig).used, i < 3 ? i : 3); /* nothing made room for it */
            CHECK_INT(srig_stats(rig).evictions, 0);
            CHECK_OK(PUT(i));
        }
        for (uint64_t i = 1; i < 4; i++) {
            srig_block b;
            unsigned char got[SRIG_MAX_PAYLOAD];
            bool found = true;
            srig_block_make(&b, i, 0, CACHED, 0);
            status = folioi_store_get(rig->store, &b.id, got, b.bytes, &found);
            if (status == FOLIO_OK) {
                CHECK(found);
                continue;
            }
            refusals++;
            CHECK_INT(status, FOLIO_ERR_MEMORY);
            CHECK(!found);
            CHECK_INT(GET(i), 1);
        }
        CHECK_INT(folioi_store_available(rig->store), 3);
        CHECK_INT(srig_stats(rig).warnings + srig_stats(rig).errors, 0);
        srig_close(rig);
    }
    CHECK_INT(refusals, 6 + 4 + 3); /* store, two each for frames and index, head; a head each */
}

/* --------------------------------------------------------------------------------- flipped bits */

static void write_at(const char *path, const void *data, size_t n, int64_t at)
{
    int fd = open(path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, data, n, (off_t)at) == (ssize_t)n);
    close(fd);
}

static void flip(const char *path, int64_t at, int bit)
{
    unsigned char byte = 0;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)at) == 1);
    close(fd);
    byte ^= (unsigned char)(1 << bit);
    write_at(path, &byte, 1, at);
}

/* Any bit of a head, flipped before the open: only that frame is no frame. */
NEW_STORE_TEST(store_faults, a_flipped_bit_in_a_head_is_found_by_the_open, 4)
{
    make_file(rig, 3);
    for (int64_t at = 2 * FRAME; at < 2 * FRAME + HEAD; at++)
        for (int bit = 0; bit < 8; bit++) {
            flip(rig->path, at, bit);
            CHECK_OK(srig_open(rig));
            bool missed = srig_stats(rig).used == 2 && srig_stats(rig).warnings == 1 &&
                          GET(0) == 1 && GET(1) == 0 && GET(2) == 1;
            CHECK_MSG(missed, "byte %d, bit %d", (int)at, bit);
            srig_close(rig);
            flip(rig->path, at, bit);
        }
    CHECK_OK(srig_open(rig));
    CHECK_INT(GET(1), 1);
}

/* Flipped while the store is open, or in the payload: found by get, dropped, and gone for good. */
NEW_STORE_TEST(store_faults, a_flipped_bit_is_found_by_the_get, 4)
{
    make_file(rig, 3);
    for (int64_t at = 0; at < HEAD + 700; at += at < HEAD ? 1 : 13)
        for (int closed = at >= HEAD ? 0 : 1; closed < 2; closed++) {
            int64_t place = 2 * FRAME + at;
            int bit = (int)(at % 8);
            if (closed == 0) flip(rig->path, place, bit);
            CHECK_OK(srig_open(rig));
            if (closed == 1) flip(rig->path, place, bit);
            CHECK_INT(srig_stats(rig).used, 3);
            CHECK_INT(GET(1), 0);
            folioi_store_stats stats = srig_stats(rig);
            CHECK_MSG(stats.warnings == 1 && stats.errors == 0 && stats.used == 2, "byte %d",
                      (int)at);
            CHECK_INT(folioi_store_available(rig->store), 4);
            CHECK_INT(GET(1), 0);
            CHECK_INT(srig_stats(rig).warnings, 1);
            srig_reopen(rig);
            CHECK_INT(srig_stats(rig).warnings, 0);
            CHECK_INT(GET(1), 0);
            CHECK(GET(0) == 1 && GET(2) == 1);
            CHECK_OK(PUT(1)); /* in its place again */
            CHECK_INT(GET(1), 1);
            srig_close(rig);
        }
}

/* Any bit of the superblock: refused and not written to, or of no meaning, or all is forgotten. */
NEW_STORE_TEST(store_faults, a_flipped_bit_in_the_superblock, 4)
{
    make_file(rig, 2);
    int64_t size, after_size;
    unsigned char *whole = srig_read_file(rig->path, &size);
    for (int64_t at = 0; at < 4096; at += at < SRIG_UNUSED || at >= SRIG_EPOCH_SEAL ? 1 : 8) {
        srig_write_file(rig->path, whole, size);
        flip(rig->path, at, (int)(at % 8));
        unsigned char *before = srig_read_file(rig->path, &after_size);
        folio_status status = srig_open(rig);
        if (at < SRIG_UNUSED) {
            CHECK_MSG(status == FOLIO_ERR_ARGUMENT && rig->store == NULL, "byte %d", (int)at);
            CHECK(strstr(folio_last_error(), at < 8                     ? "not a store"
                                             : at < 12                  ? "format version"
                                             : at / 4 == SRIG_KEYED / 4 ? "with a store key"
                                                                        : "is damaged") != NULL);
            unsigned char *after = srig_read_file(rig->path, &after_size);
            CHECK(after_size == size && memcmp(before, after, (size_t)size) == 0);
            free(after);
        } else {
            bool epoch = at >= SRIG_EPOCH_SEAL;
            REQUIRE_TEST(status == FOLIO_OK);
            CHECK_INT(srig_stats(rig).warnings, epoch);
            CHECK_INT(srig_stats(rig).used, epoch ? 0 : 2);
            CHECK_OK(PUT(3));
            unsigned char *killed = srig_read_file(rig->path, &after_size);
            srig_close(rig);
            srig_write_file(rig->path, killed, after_size); /* as without the close */
            free(killed);
            CHECK_OK(srig_open(rig));
            CHECK_INT(srig_stats(rig).warnings, 0);
            CHECK_INT(srig_stats(rig).used, epoch ? 1 : 3);
            CHECK_INT(GET(3), 1);
        }
        free(before);
        srig_close(rig);
    }
    free(whole);
}

/* A frame written to another one's place, or taken from another file, does not verify. */
NEW_STORE_TEST(store_faults, a_frame_in_a_wrong_place_is_no_frame, 4)
{
    make_file(rig, 3);
    int64_t size, other_size;
    unsigned char *other = srig_read_file(rig->path, &other_size);
    write_at(rig->path, other + FRAME, FRAME, 3 * FRAME);
    CHECK_OK(srig_open(rig));
    CHECK_INT(srig_stats(rig).warnings, 1);
    CHECK(GET(0) == 1 && GET(1) == 1 && GET(2) == 0);
    srig_close(rig);
    make_file(rig, 3); /* with a hash key and an epoch of its own */
    write_at(rig->path, other + 2 * FRAME, FRAME, 2 * FRAME);
    CHECK_OK(srig_open(rig));
    CHECK_INT(srig_stats(rig).warnings, 1);
    CHECK(GET(0) == 1 && GET(1) == 0 && GET(2) == 1);
    free(other);
    unsigned char *mine = srig_read_file(rig->path, &size);
    write_at(rig->path, mine + FRAME, FRAME, 3 * FRAME); /* while it is open */
    CHECK_INT(GET(2), 0);
    CHECK_INT(srig_stats(rig).warnings, 2);
    free(mine);
}

/* A write that never reached the disk: what was there before is whole, but is not it. */
NEW_STORE_TEST(store_faults, an_older_frame_in_the_place_of_a_newer_is_no_hit, 2)
{
    for (int kind = CACHED; kind <= SEQUENCE; kind++) {
        unlink(rig->path);
        CHECK_OK(srig_open(rig));
        for (uint64_t v = 1; v < 3; v++)
            CHECK_OK(srig_put(rig->store, kind == CACHED ? v : 1, 0, (folioi_frame_kind)kind, v));
        int64_t size;
        unsigned char *before = srig_read_file(rig->path, &size);
        uint64_t last = kind == CACHED ? 3 : 1;
        CHECK_OK(
            srig_put(rig->store, last, 0, (folioi_frame_kind)kind, 3)); /* where the first was */
        write_at(rig->path, before + FRAME, FRAME, FRAME);
        CHECK_INT(srig_get(rig->store, last, 0, (folioi_frame_kind)kind, 3), 0);
        CHECK_INT(srig_stats(rig).warnings, 1);
        CHECK(!srig_has(rig->store, last, 0, (folioi_frame_kind)kind));
        free(before);
        srig_close(rig);
    }
}

static void set32(unsigned char *at, uint32_t x)
{
    for (int i = 0; i < 4; i++) at[i] = (unsigned char)(x >> 8 * i);
}

/* Heads with a right checksum that no store of this geometry writes. */
NEW_STORE_TEST(store_faults, a_head_that_verifies_must_make_sense, 4)
{
    const uint64_t key = 99;
    rig->desc.hash_key = key;
    make_file(rig, 2);
    int64_t size;
    unsigned char *whole = srig_read_file(rig->path, &size), *f = whole + FRAME;
    static const struct {
        int64_t at;
        uint32_t value;
    } changes[] = {
        {8, 2},                                                      /* version */
        {12, 0},   {12, 3},                                          /* kind */
        {16, 0},   {16, 2},                                          /* frame */
        {80, 1},   {80, 3},          {80, 0x80000000u},              /* group */
        {84, 68},  {84, 0x7fffffff}, {84, 0x80000000u},              /* ids_bytes */
        {96, 701}, {100, 1},         {100, 0x80000000u},             /* payload_bytes */
        {104, 9},  {132, 9},         {136, 9},           {160, 701}, /* geometry */
    };
    for (int i = -1; i < COUNT_OF(changes); i++) {
        unsigned char was[256];
        memcpy(was, f, sizeof was);
        if (i >= 0) set32(f + changes[i].at, changes[i].value);
        uint32_t ids_bytes = i >= 0 && changes[i].at == 84 ? changes[i].value : 64;
        if (ids_bytes > 600) ids_bytes = 64; /* checked before it is read */
        uint64_t seed = XXH3_64bits_withSeed(f, 224, key);
        uint64_t sum = XXH3_64bits_withSeed(f + 256, ids_bytes, seed);
        set32(f + 224, (uint32_t)sum);
        set32(f + 228, (uint32_t)(sum >> 32));
        srig_write_file(rig->path, whole, size);
        CHECK_OK(srig_open(rig));
        CHECK_MSG(srig_stats(rig).warnings == (i >= 0) && GET(0) == (i < 0) && GET(1) == 1,
                  "change %d", i);
        srig_close(rig);
        memcpy(f, was, sizeof was);
    }
    free(whole);
}

/* --------------------------------------------------------------------------- shorter and longer */

static void check_cut(store_rig *rig, int64_t cut, int64_t size)
{
    enum { COUNT = 4 };
    CHECK_OK(srig_open(rig));
    if (rig->store == NULL) return;
    folioi_store_stats stats = srig_stats(rig);
    int64_t whole = 0, torn = 0;
    for (int64_t i = 1; i <= COUNT && cut >= FRAME; i++) { /* a shorter file is made anew */
        int64_t end = i * FRAME + HEAD + 700;
        if (cut >= end) whole++;
        else if (cut > i * FRAME) torn++;
    }
    CHECK_MSG(stats.used == whole && stats.warnings == torn && stats.errors == 0,
              "cut at %lld of %lld: %lld used, %lld warnings", (long long)cut, (long long)size,
              (long long)stats.used, (long long)stats.warnings);
    for (int64_t i = 0; i < COUNT; i++)
        CHECK_INT(srig_get(rig->store, (uint64_t)i, 0, CACHED, 0), i < whole);
    for (uint64_t n = 0; n < COUNT; n++) CHECK_OK(srig_put(rig->store, n, 0, CACHED, 0));
    srig_reopen(rig);
    CHECK_INT(srig_stats(rig).warnings, 0);
    for (uint64_t n = 0; n < COUNT; n++) CHECK_INT(srig_get(rig->store, n, 0, CACHED, 0), 1);
    srig_close(rig);
}

NEW_STORE_TEST(store_faults, a_file_cut_off_anywhere, 6)
{
    make_file(rig, 4);
    int64_t size;
    unsigned char *bytes = srig_read_file(rig->path, &size);
    CHECK_INT(size, 4 * FRAME + HEAD + 700);
    for (int64_t cut = 0; cut < size; cut += 512) {
        srig_write_file(rig->path, bytes, cut);
        check_cut(rig, cut, size);
    }
    for (int64_t frame = 0; frame <= 4; frame++) {
        const int64_t odd[] = {1,        7,    8,        255,        256,        257,
                               HEAD - 1, HEAD, HEAD + 1, HEAD + 699, HEAD + 700, FRAME - 1};
        for (int i = 0; i < COUNT_OF(odd); i++) {
            int64_t cut = frame * FRAME + odd[i];
            if (cut > size) continue;
            srig_write_file(rig->path, bytes, cut);
            check_cut(rig, cut, size);
        }
    }
    free(bytes);
}

/* Cut off while it is open. */
NEW_STORE_TEST(store_faults, a_file_cut_off_under_an_open_store, 6)
{
    const int64_t cuts[] = {0, 2 * FRAME, 2 * FRAME + 100, 2 * FRAME + 220, 2 * FRAME + HEAD + 300};
    for (int i = 0; i < COUNT_OF(cuts); i++) {
        make_file(rig, 2);
        CHECK_OK(srig_open(rig));
        CHECK(truncate(rig->path, (off_t)cuts[i]) == 0);
        CHECK_INT(GET(0), cuts[i] > FRAME);
        srig_block b; /* with the right bytes in the buffer already */
        bool found = true;
        srig_block_make(&b, 1, 0, CACHED, 0);
        CHECK_OK(folioi_store_get(rig->store, &b.id, b.payload, b.bytes, &found));
        CHECK(!found);
        CHECK_INT(srig_stats(rig).warnings, cuts[i] > FRAME ? 1 : 2);
        CHECK_INT(srig_stats(rig).errors, 0);
        CHECK_OK(PUT(1));
        CHECK_INT(GET(1), 1);
        srig_close(rig);
    }
}

NEW_STORE_TEST(store_faults, a_file_with_something_added, 8)
{
    enum { MORE = 5 * FRAME };
    make_file(rig, 3);
    int64_t size;
    unsigned char *bytes = srig_read_file(rig->path, &size);
    bytes = realloc(bytes, (size_t)size + MORE);
    const int64_t more[] = {1, 3000, 3141, FRAME, 3 * FRAME, MORE};
    for (int zero = 0; zero < 2; zero++) {
        for (int64_t i = 0; i < MORE; i++)
            bytes[size + i] = zero ? 0 : (unsigned char)support_bits(6, (uint64_t)i);
        for (int i = 0; i < COUNT_OF(more); i++) {
            srig_write_file(rig->path, bytes, size + more[i]);
            CHECK_OK(srig_open(rig));
            int64_t frames = (size + more[i] + FRAME - 1) / FRAME - 1;
            CHECK_INT(srig_stats(rig).warnings, zero ? 0 : frames - 3);
            CHECK_INT(srig_stats(rig).used, 3);
            for (uint64_t n = 0; n < 8; n++) CHECK_OK(PUT(n));
            CHECK_INT(srig_stats(rig).evictions, 0);
            srig_reopen(rig);
            CHECK_INT(srig_stats(rig).warnings, 0);
            for (uint64_t n = 0; n < 8; n++) CHECK_INT(GET(n), 1);
            srig_close(rig);
        }
    }
    free(bytes);
}
