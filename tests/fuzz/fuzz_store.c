/*
 * fuzz_store.c: the store over a file in memory: puts, gets, drops, opens; calls of the file that fail; bytes that
 * change, heads among them whose seal is made anew, as whoever can write to the file may do. A get returns what was put
 * under its name, or nothing.
 */
#include "fuzz/fuzz.h"
#include "pool/store_rig.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

const char fuzz_name[] = "store";
enum { FRAME = 4096, FRAMES = 7, FILE_BYTES = (FRAMES + 2) * FRAME, NAMES = 12 };

typedef struct world {
    unsigned char file[FILE_BYTES];
    int64_t size;
    int64_t fail_in; /* calls of the file before one that fails; below 0: none */
    bool was_wrong;  /* a call has failed, or bytes were changed */
    bool forged;     /* with a seal */
    store_rig rig;
    bool held[NAMES][SRIG_GROUPS]; /* SEQUENCE frames that must be there */
    char key[20];
} world;

static world w;

static bool fails(int error)
{
    if (w.fail_in < 0 || w.fail_in-- > 0) return false;
    w.was_wrong = true;
    errno = error;
    return true;
}

static int mem_open(void *user, const char *path, int flags, mode_t mode)
{
    (void)user, (void)path, (void)flags, (void)mode;
    return fails(EACCES) ? -1 : 1000000;
}
static int mem_close(void *user, int fd)
{
    (void)user, (void)fd;
    return 0;
}
static int mem_lock(void *user, int fd)
{
    (void)user, (void)fd;
    return fails(ENOLCK) ? -1 : 0;
}
static int mem_stat(void *user, int fd, struct stat *out)
{
    (void)user, (void)fd;
    if (fails(EIO)) return -1;
    memset(out, 0, sizeof *out);
    out->st_mode = S_IFREG | 0600;
    out->st_nlink = 1;
    out->st_uid = geteuid();
    out->st_size = (off_t)w.size;
    return 0;
}
static ssize_t mem_pread(void *user, int fd, void *data, size_t n, off_t at)
{
    (void)user, (void)fd;
    if (fails(EIO)) return -1;
    if (at >= w.size) return 0;
    if ((int64_t)n > w.size - at) n = (size_t)(w.size - at);
    memcpy(data, w.file + at, n);
    return (ssize_t)n;
}
static ssize_t mem_pwrite(void *user, int fd, const void *data, size_t n, off_t at)
{
    (void)user, (void)fd;
    if (fails(ENOSPC)) return -1;
    FUZZ_CHECK(at >= 0 && (int64_t)n <= FILE_BYTES - at, "%zu bytes are written at %lld", n,
               (long long)at);
    memcpy(w.file + at, data, n);
    if (at + (int64_t)n > w.size) w.size = at + (int64_t)n;
    return (ssize_t)n;
}

static const folioi_file_ops in_memory = {mem_open,  mem_close,  mem_lock, mem_stat,
                                          mem_pread, mem_pwrite, NULL};

static void open_store(fuzz_input *in)
{
    srig_frames(&w.rig,
                fuzz_any(in, FRAMES, FRAMES) > FRAMES ? FRAMES : FRAMES - fuzz_int(in, 0, 2));
    memset(w.held, 0, sizeof w.held);
    fuzz_took(srig_open(&w.rig));
}

/* Bytes of a place change; of a head, its seal is made again, where it needs no key. */
static void damage(fuzz_input *in)
{
    if (w.size == 0) return;
    int64_t frame = fuzz_int(in, 0, FRAMES),
            at = frame * FRAME + fuzz_int(in, 0, fuzz_chance(in, 3) ? FRAME - 1 : 400);
    if (at >= w.size) return;
    for (int64_t n = fuzz_int(in, 1, 8); n > 0 && at < w.size; n--)
        w.file[at++] = (unsigned char)fuzz_int(in, 0, 255);
    w.was_wrong = true;
    if (frame == 0 || fuzz_chance(in, 3) || (frame + 1) * FRAME > w.size) return;
    unsigned char *head = w.file + frame * FRAME;
    const folioi_superblock *super = (const folioi_superblock *)(const void *)w.file;
    uint64_t hash_key, sum;
    memcpy(&hash_key, &super->hash_key, sizeof hash_key);
    int32_t ids_bytes;
    memcpy(&ids_bytes, head + offsetof(folioi_frame_header, ids_bytes), sizeof ids_bytes);
    if (ids_bytes < 0 || ids_bytes > SRIG_IDS * 4) ids_bytes = 0;
    sum = XXH3_64bits_withSeed(head, offsetof(folioi_frame_header, seal), hash_key);
    sum = XXH3_64bits_withSeed(head + sizeof(folioi_frame_header), (size_t)ids_bytes, sum);
    memset(head + offsetof(folioi_frame_header, seal), 0, sizeof(folioi_seal));
    memcpy(head + offsetof(folioi_frame_header, seal), &sum, sizeof sum);
    w.forged = true;
}

static void put(fuzz_input *in)
{
    uint64_t n = (uint64_t)fuzz_int(in, 0, NAMES - 1);
    int32_t group = (int32_t)fuzz_int(in, 0, SRIG_GROUPS - 1);
    folioi_frame_kind kind = fuzz_chance(in, 3) ? SEQUENCE : CACHED;
    srig_block block;
    srig_block_make(&block, n, group, kind, 0);
    block.id.group = (int32_t)fuzz_any(in, group, group);
    block.id.ids_bytes = (int32_t)fuzz_any(in, block.id.ids_bytes, block.id.ids_bytes);
    if (block.id.ids_bytes > SRIG_IDS * 4) block.id.ids_bytes = -1;
    block.bytes = fuzz_any(in, block.bytes, block.bytes);
    if (block.bytes > SRIG_MAX_PAYLOAD) block.bytes = -1;
    bool as_named = fuzz_is_valid(in);
    if (!fuzz_took(folioi_store_put(w.rig.store, &block.id, block.payload, block.bytes))) return;
    if (as_named && kind == SEQUENCE) w.held[n][group] = true;
}

static void get(fuzz_input *in)
{
    uint64_t n = (uint64_t)fuzz_int(in, 0, NAMES - 1);
    int32_t group = (int32_t)fuzz_int(in, 0, SRIG_GROUPS - 1);
    folioi_frame_kind kind = fuzz_chance(in, 3) ? SEQUENCE : CACHED;
    int got = srig_get(w.rig.store, n, group, kind, 0);
    fuzz_took(FOLIO_OK);
    FUZZ_CHECK(got >= 0, "block %d of group %d came back with other bytes", (int)n, group);
    FUZZ_CHECK(got == 1 || kind == CACHED || !w.held[n][group] || w.was_wrong || !fuzz_is_valid(in),
               "the sequence's block %d of group %d is gone", (int)n, group);
}

static void drop(fuzz_input *in)
{
    uint64_t n = (uint64_t)fuzz_int(in, 0, NAMES - 1);
    int32_t group = (int32_t)fuzz_int(in, 0, SRIG_GROUPS - 1);
    folioi_frame_kind kind = fuzz_chance(in, 2) ? SEQUENCE : CACHED;
    srig_block block;
    srig_block_make(&block, n, group, kind, 0);
    folioi_store_drop(w.rig.store, &block.id);
    if (kind == SEQUENCE) w.held[n][group] = false;
    FUZZ_CHECK(!srig_has(w.rig.store, n, group, kind),
               "block %d of group %d is there after its drop", (int)n, group);
}

static void call(fuzz_input *in)
{
    folioi_store *s = w.rig.store;
    switch (fuzz_int(in, 0, 15)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4: put(in); break;
    case 5:
    case 6:
    case 7: get(in); break;
    case 8: drop(in); break;
    case 9: damage(in); break;
    case 10: w.fail_in = fuzz_int(in, 0, 3); break;
    case 11: fuzz_took(folioi_store_forget(s)); break;
    case 12: folioi_store_forget_salt(s, (uint64_t)fuzz_int(in, 0, 2)); break;
    case 13: fuzz_took(folioi_store_wipe(s)); break;
    case 14:
        if (folioi_store_promise(s, 1)) folioi_store_unpromise(s, 1);
        break;
    default:
        srig_close(&w.rig);
        if (fuzz_chance(in, 3)) w.size = fuzz_int(in, 0, w.size);
        open_store(in);
        break;
    }
    if (w.rig.store == NULL) return;
    folioi_store_stats t = srig_stats(&w.rig);
    FUZZ_CHECK(t.used >= 0 && t.used <= t.num_frames &&
                   folioi_store_available(w.rig.store) <= t.num_frames,
               "%lld of %lld frames are used", (long long)t.used, (long long)t.num_frames);
    FUZZ_CHECK(w.was_wrong || !fuzz_is_valid(in) || w.forged || t.errors == 0, "%lld errors",
               (long long)t.errors);
}

void fuzz_run(fuzz_input *in)
{
    static bool ready;
    if (!ready) srig_init(&w.rig, FRAMES); /* its folder stays empty */
    if (!ready) rmdir(w.rig.dir);
    ready = true;
    w.rig.desc.ops = &in_memory;
    w.size = 0;
    memset(w.file, 0, sizeof w.file);
    w.fail_in = -1;
    w.was_wrong = w.forged = false;
    memcpy(w.key, "a key of the store", 19);
    w.rig.desc.key = (folioi_bytes){w.key, fuzz_chance(in, 4) ? 18 : 0};
    w.rig.desc.hash_key = fuzz_chance(in, 2) ? 7 : 0;
    open_store(in);
    for (int64_t n = 60; n > 0 && in->left > 0 && w.rig.store != NULL; n--) call(in);
    srig_close(&w.rig);
}
