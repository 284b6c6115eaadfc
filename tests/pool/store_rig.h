/*
 * store_rig.h: what the tests of the store share: a file in a directory of its own, numbered blocks
 * whose ids and payload follow from their number, and calls of the file that can be made to fail.
 */
#ifndef FOLIO_TESTS_STORE_RIG_H
#define FOLIO_TESTS_STORE_RIG_H

#include "cache/store.h"
#include "cache/store_file.h"
#include "support.h"

#define CACHED FOLIOI_FRAME_CACHED
#define SEQUENCE FOLIOI_FRAME_SEQUENCE

#define SRIG_GROUPS 3
#define SRIG_IDS 16   /* ids of a block */
#define SRIG_HEAD 320 /* bytes of a frame before its payload */
/* Places in the superblock. */
#define SRIG_HASH_KEY 2552
#define SRIG_KEYED 2576
#define SRIG_SEAL 2584
#define SRIG_UNUSED 2616 /* from here to the epoch's seal */
#define SRIG_EPOCH_SEAL 4056
#define SRIG_EPOCH 4088
#define SRIG_MAX_PAYLOAD (4096 - SRIG_HEAD)

/* A store to be: desc and what it points to. Frames have 4096 bytes. Never moved once made. */
typedef struct {
    char dir[256], path[300];
    folioi_frame_geometry geometry[SRIG_GROUPS];
    folio_kv_passport passport;
    folioi_store_desc desc;
    support_counter counter; /* of the allocator */
    folio_allocator allocator;
    folioi_store *store;
} store_rig;

/* A fresh directory; the store is not opened. Room for num_frames frames. */
void srig_init(store_rig *rig, int64_t num_frames);
/* Closes; checks that no memory is lost; removes file and directory. */
void srig_end(store_rig *rig);
void srig_frames(store_rig *rig, int64_t num_frames);
folio_status srig_open(store_rig *rig);
void srig_close(store_rig *rig);
/* Close, and an open that must succeed. */
void srig_reopen(store_rig *rig);
folioi_store_stats srig_stats(const store_rig *rig);

/* A test on a store of so many frames, which is open; and on one that has no file yet. */
typedef void (*srig_body)(store_rig *rig);
void srig_run(int64_t num_frames, bool open, srig_body body);
#define STORE_TEST_(suite, name, num_frames, open)                                                 \
    static void on_store_##suite##_##name(store_rig *rig);                                         \
    TEST(suite, name) { srig_run(num_frames, open, on_store_##suite##_##name); }                   \
    static void on_store_##suite##_##name(store_rig *rig)
#define STORE_TEST(suite, name, num_frames) STORE_TEST_(suite, name, num_frames, true)
#define NEW_STORE_TEST(suite, name, num_frames) STORE_TEST_(suite, name, num_frames, false)

/* Block number n: key, parent, salt, ids and payload follow from it. */
typedef struct {
    folioi_frame_id id;
    int32_t ids[SRIG_IDS];
    int64_t bytes;
    unsigned char payload[SRIG_MAX_PAYLOAD];
} srig_block;

/* version: of the payload and nothing else. */
void srig_block_make(srig_block *block, uint64_t n, int32_t group, folioi_frame_kind kind,
                     uint64_t version);
folio_status srig_put(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind,
                      uint64_t version);
/* 1: found as it was put; 0: not found; -1: anything else. */
int srig_get(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind,
             uint64_t version);
/* CACHED blocks of group 0, version 0. */
#define PUT(n) srig_put(rig->store, n, 0, CACHED, 0)
#define GET(n) srig_get(rig->store, n, 0, CACHED, 0)
bool srig_has(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind);

/* The whole file, for the caller to free; and written anew with these bytes. */
unsigned char *srig_read_file(const char *path, int64_t *size);
void srig_write_file(const char *path, const void *data, int64_t size);

/* --------------------------------------------------------------------------------------- faults */

typedef enum { SRIG_WHOLE, SRIG_ONE_BYTE, SRIG_RANDOM } srig_chunks;

/* Calls are numbered from 1; 0: none fails. A call that fails with errno 0 returns 0. */
typedef struct {
    srig_chunks chunks;            /* how much of a read or write is done */
    bool interrupted;              /* every other call is, first */
    int64_t fail_read, fail_write; /* the number of the read, of the write that fails */
    int read_errno, write_errno;
    bool from_then_on; /* and all later ones */
    bool in_part;      /* half of the write is done before */
    int open_errno, lock_errno, stat_errno;
    uid_t uid;                     /* the file's owner, if not 0 */
    int64_t hook_read, hook_write; /* the number of the read, of the write before which */
    void (*hook)(void *user);      /* this is called, once */
    void *hook_user;
    bool yields; /* before every read and write: other threads come in between */
    _Atomic int64_t reads, writes, calls; /* so far */
} srig_faults;

/* The system's calls with these faults. */
folioi_file_ops srig_faulty_ops(srig_faults *faults);

#endif
