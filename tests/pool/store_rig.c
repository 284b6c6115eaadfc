/* store_rig.c: see store_rig.h. */
#include "pool/store_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const int64_t payload_bytes[SRIG_GROUPS] = {700, SRIG_MAX_PAYLOAD, 1};

void srig_frames(store_rig *rig, int64_t num_frames)
{
    rig->desc.max_bytes = (num_frames + 1) * 4096 + 4095; /* a part of a frame is no frame */
}

void srig_init(store_rig *rig, int64_t num_frames)
{
    memset(rig, 0, sizeof *rig);
    const char *tmp = getenv("TMPDIR");
    snprintf(rig->dir, sizeof rig->dir, "%s/folio-store.XXXXXX",
             tmp != NULL && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(rig->dir) != NULL);
    snprintf(rig->path, sizeof rig->path, "%s/store", rig->dir);
    for (int32_t g = 0; g < SRIG_GROUPS; g++)
        rig->geometry[g] = (folioi_frame_geometry){.num_layers = 2 + g,
                                                   .block_size = SRIG_IDS,
                                                   .num_kv_heads = 4,
                                                   .k_head_size = 64,
                                                   .v_head_size = 32,
                                                   .dtype = 1,
                                                   .layout_version = 1,
                                                   .layout_id = "rows",
                                                   .payload_bytes = payload_bytes[g]};
    rig->passport = FOLIO_WITH(folio_kv_passport, .model = "a model");
    rig->desc = (folioi_store_desc){.path = rig->path,
                                    .passport = &rig->passport,
                                    .ids_bytes = SRIG_IDS * 4,
                                    .num_layer_groups = SRIG_GROUPS,
                                    .geometry = rig->geometry};
    srig_frames(rig, num_frames);
    rig->allocator = support_allocator(&rig->counter);
}

folio_status srig_open(store_rig *rig)
{
    return folioi_store_open(&rig->allocator, &rig->desc, &rig->store);
}

void srig_close(store_rig *rig)
{
    folioi_store_close(rig->store);
    rig->store = NULL;
    CHECK_INT(rig->counter.live, 0);
    CHECK_INT(rig->counter.faults, 0);
}

void srig_reopen(store_rig *rig)
{
    srig_close(rig);
    CHECK_OK(srig_open(rig));
}

folioi_store_stats srig_stats(const store_rig *rig) { return folioi_store_get_stats(rig->store); }

void srig_end(store_rig *rig)
{
    srig_close(rig);
    unlink(rig->path);
    CHECK(rmdir(rig->dir) == 0);
}

void srig_run(int64_t num_frames, bool open, srig_body body)
{
    store_rig rig;
    srig_init(&rig, num_frames);
    if (!open || srig_open(&rig) == FOLIO_OK) body(&rig);
    else test_fail(__FILE__, __LINE__, "open: %s", folio_last_error());
    srig_end(&rig);
}

/* --------------------------------------------------------------------------------------- blocks */

static folioi_key key_of(uint64_t n)
{
    return (folioi_key){{support_bits(1, n), support_bits(2, n)}};
}

void srig_block_make(srig_block *block, uint64_t n, int32_t group, folioi_frame_kind kind,
                     uint64_t version)
{
    block->bytes = payload_bytes[group];
    for (int i = 0; i < SRIG_IDS; i++) block->ids[i] = (int32_t)support_bits(3 + n, (uint64_t)i);
    uint64_t seed = support_bits(n * 8 + (uint64_t)group, version * 2 + (uint64_t)kind);
    for (int64_t i = 0; i < block->bytes; i += 8) {
        uint64_t bits = support_bits(seed, (uint64_t)i);
        memcpy(block->payload + i, &bits, (size_t)(block->bytes - i < 8 ? block->bytes - i : 8));
    }
    block->id = (folioi_frame_id){.key = key_of(n),
                                  .parent = key_of(n + 1000000),
                                  .salt = n % 3,
                                  .group = group,
                                  .kind = kind,
                                  .ids = block->ids,
                                  .ids_bytes = SRIG_IDS * 4};
    if (n % 4 == 3) { /* stands for its tokens by one number */
        block->id.ids_bytes = 8;
        block->id.hashed = true;
    }
}

folio_status srig_put(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind,
                      uint64_t version)
{
    srig_block block;
    srig_block_make(&block, n, group, kind, version);
    return folioi_store_put(store, &block.id, block.payload, block.bytes);
}

int srig_get(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind,
             uint64_t version)
{
    srig_block block;
    unsigned char got[SRIG_MAX_PAYLOAD + 1];
    bool found = true;
    srig_block_make(&block, n, group, kind, version);
    got[block.bytes] = 0xA5;
    folio_status status = folioi_store_get(store, &block.id, got, block.bytes, &found);
    if (status != FOLIO_OK || got[block.bytes] != 0xA5) return -1;
    if (!found) return 0;
    return memcmp(got, block.payload, (size_t)block.bytes) == 0 ? 1 : -1;
}

bool srig_has(folioi_store *store, uint64_t n, int32_t group, folioi_frame_kind kind)
{
    srig_block block;
    srig_block_make(&block, n, group, kind, 0);
    return folioi_store_has(store, &block.id);
}

/* ---------------------------------------------------------------------------------------- files */

unsigned char *srig_read_file(const char *path, int64_t *size)
{
    struct stat st = {.st_size = 0};
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    unsigned char *data = malloc((size_t)st.st_size + 1);
    *size = 0;
    for (ssize_t n; (n = read(fd, data + *size, (size_t)(st.st_size - *size))) > 0;) *size += n;
    CHECK_INT(*size, st.st_size);
    close(fd);
    return data;
}

/* Not through O_TRUNC, after which some file systems wait for the disk. */
void srig_write_file(const char *path, const void *data, int64_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    int64_t done = 0;
    for (ssize_t n; (n = write(fd, (const char *)data + done, (size_t)(size - done))) > 0;)
        done += n;
    CHECK_INT(done, size);
    CHECK(ftruncate(fd, (off_t)size) == 0);
    close(fd);
}

/* --------------------------------------------------------------------------------------- faults */

static int failing(int error)
{
    errno = error;
    return -1;
}

static int faulty_open(void *user, const char *path, int flags, mode_t mode)
{
    srig_faults *f = user;
    if (f->interrupted && ++f->calls % 2 == 1) return failing(EINTR);
    return f->open_errno ? failing(f->open_errno) : open(path, flags, mode);
}

static int faulty_close(void *user, int fd)
{
    (void)user;
    return close(fd);
}

static int faulty_lock(void *user, int fd)
{
    srig_faults *f = user;
    if (f->interrupted && ++f->calls % 2 == 1) return failing(EINTR);
    return f->lock_errno ? failing(f->lock_errno) : flock(fd, LOCK_EX | LOCK_NB);
}

static int faulty_stat(void *user, int fd, struct stat *out)
{
    srig_faults *f = user;
    if (f->stat_errno) return failing(f->stat_errno);
    if (fstat(fd, out) != 0) return -1;
    if (f->uid != 0) out->st_uid = f->uid;
    return 0;
}

static size_t chunk(srig_faults *f, size_t n)
{
    if (f->chunks == SRIG_WHOLE || n == 0) return n;
    return f->chunks == SRIG_ONE_BYTE ? 1 : 1 + support_bits(77, (uint64_t)f->calls) % n;
}

static bool fails(const srig_faults *f, int64_t call, int64_t fail_at)
{
    return fail_at > 0 && (call == fail_at || (f->from_then_on && call > fail_at));
}

static void call_hook(srig_faults *f, int64_t call, int64_t hook_at)
{
    if (hook_at == 0 || call != hook_at) return;
    void (*hook)(void *) = f->hook;
    f->hook_read = f->hook_write = 0;
    hook(f->hook_user);
}

static ssize_t faulty_pread(void *user, int fd, void *data, size_t n, off_t at)
{
    srig_faults *f = user;
    if (f->yields) sched_yield();
    if (++f->calls % 2 == 1 && f->interrupted) return failing(EINTR);
    int64_t call = ++f->reads;
    call_hook(f, call, f->hook_read);
    if (fails(f, call, f->fail_read)) return f->read_errno ? failing(f->read_errno) : 0;
    return pread(fd, data, chunk(f, n), at);
}

static ssize_t faulty_pwrite(void *user, int fd, const void *data, size_t n, off_t at)
{
    srig_faults *f = user;
    if (f->yields) sched_yield();
    if (++f->calls % 2 == 1 && f->interrupted) return failing(EINTR);
    int64_t call = ++f->writes;
    call_hook(f, call, f->hook_write);
    if (!fails(f, call, f->fail_write)) return pwrite(fd, data, chunk(f, n), at);
    if (f->in_part && pwrite(fd, data, n / 2, at) < 0) return -1;
    return f->write_errno ? failing(f->write_errno) : 0;
}

folioi_file_ops srig_faulty_ops(srig_faults *faults)
{
    return (folioi_file_ops){faulty_open,  faulty_close,  faulty_lock, faulty_stat,
                             faulty_pread, faulty_pwrite, faults};
}
