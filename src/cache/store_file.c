/* store_file.c: reads and writes the store's file; store_file.h describes the format. */
#include "cache/store_file.h"

#include "core/cancel.h"
#include "core/checked.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#define FRAME_ALIGN 4096 /* a head of up to 4096 bytes lies in one page */
#define PAYLOAD_ALIGN 64
#define MAX_PAYLOAD ((int64_t)1 << 40)
#define MAX_IDS (1 << 24)

static const char store_magic[8] = {'F', 'o', 'l', 'i', 'o', 'K', 'V', '\n'};
static const char frame_magic[8] = {'F', 'o', 'l', 'i', 'o', 'F', 'r', '\n'};
static const char zeros[1 << 16];
_Static_assert(sizeof zeros >= sizeof(folioi_superblock), "compared with it");

/* --------------------------------------------------------------------------------- system calls */

static int system_open(void *user, const char *path, int flags, mode_t mode)
{
    (void)user;
    int cancel = cancel_defer();
    int result = open(path, flags, mode);
    cancel_allow(cancel);
    return result;
}

static int system_close(void *user, int fd)
{
    (void)user;
    int cancel = cancel_defer();
    int result = close(fd);
    cancel_allow(cancel);
    return result;
}

static int system_lock(void *user, int fd)
{
    (void)user;
    return flock(fd, LOCK_EX | LOCK_NB);
}

static int system_stat(void *user, int fd, struct stat *out)
{
    (void)user;
    return fstat(fd, out);
}

static ssize_t system_pread(void *user, int fd, void *data, size_t n, off_t at)
{
    (void)user;
    int cancel = cancel_defer();
    ssize_t result = pread(fd, data, n, at);
    cancel_allow(cancel);
    return result;
}

static ssize_t system_pwrite(void *user, int fd, const void *data, size_t n, off_t at)
{
    (void)user;
    int cancel = cancel_defer();
    ssize_t result = pwrite(fd, data, n, at);
    cancel_allow(cancel);
    return result;
}

static const folioi_file_ops system_ops = {system_open,  system_close,  system_lock, system_stat,
                                           system_pread, system_pwrite, NULL};

/* ----------------------------------------------------------------------- whole reads and writes */

int64_t folioi_store_file_read(folioi_store_file *file, void *data, int64_t n, int64_t at)
{
    int64_t done = 0;
    while (done < n) {
        ssize_t got = file->ops.pread(file->ops.user, file->fd, (char *)data + done,
                                      (size_t)(n - done), (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += got;
    }
    return done;
}

/* Bytes written: n, or fewer and errno. */
static int64_t write_all(folioi_store_file *file, const void *data, int64_t n, int64_t at)
{
    int64_t done = 0;
    while (done < n) {
        ssize_t put = file->ops.pwrite(file->ops.user, file->fd, (const char *)data + done,
                                       (size_t)(n - done), (off_t)(at + done));
        if (put < 0 && errno == EINTR) continue;
        if (put == 0) errno = EIO; /* the call has no word for it */
        if (put <= 0) break;
        done += put;
    }
    return done;
}

folio_status folioi_store_file_write(folioi_store_file *file, const void *data, int64_t n,
                                     int64_t at)
{
    int64_t done = write_all(file, data, n, at);
    if (done < n)
        FAIL(FOLIO_ERR_IO, "the store's file could not be written at byte %lld: %s",
             (long long)(at + done), strerror(errno));
    return FOLIO_OK;
}

folio_status folioi_store_file_clear(folioi_store_file *file, int64_t n, int64_t at)
{
    for (int64_t done = 0; done < n; done += (int64_t)sizeof zeros)
        TRY(folioi_store_file_write(file, zeros, min_i64(n - done, sizeof zeros), at + done));
    return FOLIO_OK;
}

bool folioi_store_file_wipe(folioi_store_file *file, int64_t frame)
{
    int64_t n = sizeof(folioi_frame_header);
    return write_all(file, zeros, n, frame_offset(file, frame)) == n;
}

folio_status folioi_store_random(uint64_t *out)
{
    *out = 0;
    while (*out == 0) {
        int cancel = cancel_defer();
        ssize_t n = getrandom(out, sizeof *out, 0);
        cancel_allow(cancel);
        if (n == sizeof *out) continue;
        *out = 0;
        if (n < 0 && errno != EINTR)
            FAIL(FOLIO_ERR_IO, "the system gave no random number: %s", strerror(errno));
    }
    return FOLIO_OK;
}

/* ----------------------------------------------------------------------------------- superblock */

/* The seal of a, then b, under the file's key. */
static folioi_seal make_seal(const folioi_store_file *file, folioi_sealed what, folioi_bytes a,
                             folioi_bytes b, uint64_t seed)
{
    const folioi_bytes key = {file->key.byte, file->keyed ? sizeof file->key : 0};
    return folioi_seal_make(key, what, a, b, seed);
}

/* The key of this file's seals. */
static void derive_key(folioi_store_file *file, folioi_bytes key)
{
    file->keyed = key.size > 0;
    if (!file->keyed) return;
    const uint64_t secret[2] = {htole64(file->secret.word[0]), htole64(file->secret.word[1])};
    const folioi_bytes all[] = {{store_magic, sizeof store_magic}, {secret, sizeof secret}};
    folioi_keyed_hash(key, all, 2, file->key.byte);
}

static folioi_seal superblock_seal(const folioi_store_file *file, const folioi_superblock *super)
{
    const folioi_bytes all = {super, offsetof(folioi_superblock, seal)};
    return make_seal(file, FOLIOI_SEALED_SUPERBLOCK, all, (folioi_bytes){NULL, 0}, 0);
}

static folioi_seal epoch_seal(const folioi_store_file *file, uint64_t epoch)
{
    uint64_t disk = htole64(epoch);
    return make_seal(file, FOLIOI_SEALED_EPOCH, (folioi_bytes){&disk, sizeof disk},
                     (folioi_bytes){NULL, 0}, file->hash_key);
}

/* No seal by value, which would leave copies on the stack. */
void folioi_store_file_digest_key(const folioi_store_file *file, folioi_key *out)
{
    const unsigned char kind[1] = {FOLIOI_SEALED_SECRET};
    const folioi_bytes key = {file->key.byte, sizeof file->key};
    const folioi_bytes all[] = {{kind, sizeof kind}, {&file->secret, sizeof file->secret}};
    unsigned char hash[FOLIOI_KEYED_HASH_BYTES];
    *out = file->secret;
    if (!file->keyed) return;
    folioi_keyed_hash(key, all, 2, hash);
    memcpy(out, hash, sizeof *out);
    explicit_bzero(hash, sizeof hash);
}

folio_status folioi_store_file_save_epoch(folioi_store_file *file, uint64_t epoch)
{
    struct {
        folioi_seal seal;
        uint64_t epoch;
    } disk = {epoch_seal(file, epoch), htole64(epoch)};
    file->epoch_saved = false;
    TRY(folioi_store_file_write(file, &disk, sizeof disk, offsetof(folioi_superblock, epoch_seal)));
    file->epoch_saved = true;
    return FOLIO_OK;
}

/* All that the desc decides; hash key, epoch and checksums are missing. */
static void superblock_encode(const folioi_store_file *file, folioi_superblock *super)
{
    memset(super, 0, sizeof *super);
    memcpy(super->magic, store_magic, sizeof super->magic);
    super->version = htole32(STORE_FORMAT_VERSION);
    super->num_layer_groups = (int32_t)htole32((uint32_t)file->num_layer_groups);
    super->frame_bytes = (int64_t)htole64((uint64_t)file->frame_bytes);
    super->ids_bytes = (int32_t)htole32((uint32_t)file->ids_bytes);
    memcpy(super->geometry, file->geometry, sizeof super->geometry);
    super->passport = file->passport;
}

static folio_status check_desc(folioi_store_file *file, const folioi_store_desc *desc)
{
    REQUIRE(desc->path != NULL, "the store's path is NULL");
    TRY(folioi_passport_encode(desc->passport, &file->passport));
    REQUIRE(desc->key.size == 0 ||
                (desc->key.size >= 16 && desc->key.size <= FOLIOI_KEYED_HASH_MOST_KEY &&
                 desc->key.data != NULL),
            "the store's key has %zu bytes, outside [16, %d], or is NULL", desc->key.size,
            FOLIOI_KEYED_HASH_MOST_KEY);
    REQUIRE(desc->ids_bytes >= 8 && desc->ids_bytes <= MAX_IDS,
            "the store's ids_bytes is %d, outside [8, %d]", desc->ids_bytes, MAX_IDS);
    REQUIRE(desc->num_layer_groups >= 1 && desc->num_layer_groups <= STORE_MAX_GROUPS &&
                desc->geometry != NULL,
            "the store's num_layer_groups is %d, outside [1, %d], or it has no geometry",
            desc->num_layer_groups, STORE_MAX_GROUPS);
    int64_t payload = 0;
    for (int32_t g = 0; g < desc->num_layer_groups; g++) {
        int64_t bytes = desc->geometry[g].payload_bytes;
        REQUIRE(bytes >= 0 && bytes <= MAX_PAYLOAD,
                "the store's group %d: payload_bytes is %lld, outside [0, %lld]", g,
                (long long)bytes, (long long)MAX_PAYLOAD);
        payload = max_i64(payload, bytes);
        file->payload_bytes[g] = bytes;
        file->geometry[g] = folioi_geometry_encode(&desc->geometry[g]);
    }
    file->ids_bytes = desc->ids_bytes;
    file->num_layer_groups = desc->num_layer_groups;
    file->head_bytes =
        round_up((int64_t)sizeof(folioi_frame_header) + desc->ids_bytes, PAYLOAD_ALIGN);
    file->frame_bytes = round_up(file->head_bytes + payload, FRAME_ALIGN);
    REQUIRE(desc->max_bytes >= 3 * file->frame_bytes,
            "store_bytes is %lld; its superblock and two frames of %lld bytes need %lld",
            (long long)desc->max_bytes, (long long)file->frame_bytes,
            (long long)(3 * file->frame_bytes));
    return FOLIO_OK;
}

/* Is the file the one that the desc would make, apart from its random numbers? */
static folio_status check_superblock(folioi_store_file *file, const folioi_store_desc *desc,
                                     const folioi_superblock *there, const folioi_superblock *here)
{
    const char *path = desc->path;
    REQUIRE(memcmp(there->magic, store_magic, sizeof store_magic) == 0,
            "%s is not a store of KV blocks: it begins with other bytes", path);
    REQUIRE(there->version == here->version,
            "%s is a store of format version %u; this library reads version %u", path,
            le32toh(there->version), le32toh(here->version));
    bool keyed = there->keyed != 0;
    REQUIRE(keyed == (desc->key.size > 0), "%s was made %s a store key, here there is %s", path,
            keyed ? "with" : "without", keyed ? "none" : "one");
    file->secret = (folioi_key){{le64toh(there->secret[0]), le64toh(there->secret[1])}};
    derive_key(file, desc->key);
    folioi_seal seal = superblock_seal(file, there);
    REQUIRE(folioi_seal_equal(&there->seal, &seal),
            keyed ? "%s was made with another store key, or is damaged"
                  : "%s is damaged: the checksum of its superblock is wrong",
            path);
    TRY(folioi_passport_compare(path, &there->passport, &here->passport));
    REQUIRE(there->num_layer_groups == here->num_layer_groups,
            "%s was made for %d groups, here there are %d", path,
            (int32_t)le32toh((uint32_t)there->num_layer_groups), file->num_layer_groups);
    for (int32_t g = 0; g < file->num_layer_groups; g++) {
        char what[300];
        snprintf(what, sizeof what, "group %d of %s", g, path);
        TRY(folioi_geometry_compare(what, &there->geometry[g], &here->geometry[g]));
    }
    REQUIRE(there->ids_bytes == here->ids_bytes,
            "%s was made with %d bytes for a block's ids, here there are %d", path,
            (int32_t)le32toh((uint32_t)there->ids_bytes), file->ids_bytes);
    REQUIRE(there->frame_bytes == here->frame_bytes,
            "%s was made with frames of %lld bytes, here they have %lld", path,
            (long long)le64toh((uint64_t)there->frame_bytes), (long long)file->frame_bytes);
    file->hash_key = le64toh(there->hash_key);
    REQUIRE(desc->hash_key == 0 || desc->hash_key == file->hash_key,
            "%s was made with another hash key than the one given", path); /* a secret: not shown */
    return FOLIO_OK;
}

/* A process killed while it makes the file leaves nothing, zeros, or the beginning of ours. */
static bool is_unfinished(const folioi_superblock *there, int64_t size,
                          const folioi_superblock *here)
{
    if (size >= (int64_t)sizeof *there) return false;
    if (memcmp(there, zeros, (size_t)size) == 0) return true;
    int64_t known = offsetof(folioi_superblock, hash_key); /* random from there on */
    return memcmp(there, here, (size_t)min_i64(size, known)) == 0;
}

static folio_status make_file(folioi_store_file *file, const folioi_store_desc *desc,
                              folioi_superblock *super)
{
    file->hash_key = desc->hash_key;
    if (file->hash_key == 0) TRY(folioi_store_random(&file->hash_key));
    TRY(folioi_store_random(&file->epoch));
    super->hash_key = htole64(file->hash_key);
    for (int i = 0; i < 2; i++) {
        TRY(folioi_store_random(&file->secret.word[i]));
        super->secret[i] = htole64(file->secret.word[i]);
    }
    derive_key(file, desc->key);
    super->keyed = htole32(file->keyed ? 1 : 0);
    super->seal = superblock_seal(file, super);
    super->epoch = htole64(file->epoch);
    super->epoch_seal = epoch_seal(file, file->epoch);
    TRY(folioi_store_file_write(file, super, sizeof *super, 0));
    file->made = file->epoch_saved = true;
    return FOLIO_OK;
}

/* Killed in the middle of a forget, or damaged: what is there may be forgotten, so it is. */
static folio_status read_epoch(folioi_store_file *file, const folioi_superblock *there)
{
    file->epoch = le64toh(there->epoch);
    folioi_seal seal = epoch_seal(file, file->epoch);
    file->epoch_saved = folioi_seal_equal(&there->epoch_seal, &seal);
    if (file->epoch_saved) return FOLIO_OK;
    file->epoch_lost = true;
    TRY(folioi_store_random(&file->epoch));
    return folioi_store_file_save_epoch(file, file->epoch);
}

/*
 * What the file holds becomes K and V of anybody's request: nobody else may have made it or may write to it. Devices and
 * pipes have the size 0 of an empty file, and must not be taken for one.
 */
static folio_status check_owner(folioi_store_file *file, const char *path)
{
    struct stat st;
    if (file->ops.stat(file->ops.user, file->fd, &st) != 0)
        FAIL(FOLIO_ERR_IO, "%s could not be examined: %s", path, strerror(errno));
    REQUIRE(S_ISREG(st.st_mode), "%s is no regular file", path);
    REQUIRE(st.st_uid == geteuid(), "%s belongs to user %u; this process runs as user %u", path,
            (unsigned)st.st_uid, (unsigned)geteuid());
    REQUIRE((st.st_mode & (S_IWGRP | S_IWOTH)) == 0,
            "%s can be written by other users (mode %03o); make it 0600", path,
            (unsigned)st.st_mode & 0777);
    REQUIRE(st.st_nlink == 1, "%s has %llu names (hard links); a store has one", path,
            (unsigned long long)st.st_nlink);
    file->size = st.st_size;
    return FOLIO_OK;
}

static folio_status make_or_check(folioi_store_file *file, const folioi_store_desc *desc)
{
    folioi_superblock here, there = {.version = 0};
    superblock_encode(file, &here);
    TRY(check_owner(file, desc->path));
    int64_t want = min_i64(file->size, sizeof there);
    int64_t got = folioi_store_file_read(file, &there, want, 0);
    if (got < 0) FAIL(FOLIO_ERR_IO, "%s could not be read: %s", desc->path, strerror(errno));
    if (got < want)
        FAIL(FOLIO_ERR_IO, "%s could not be read: it ended at byte %lld of %lld", desc->path,
             (long long)got, (long long)file->size);
    if (is_unfinished(&there, file->size, &here)) return make_file(file, desc, &here);
    TRY(check_superblock(file, desc, &there, &here));
    return read_epoch(file, &there);
}

static folio_status lock_file(folioi_store_file *file, const char *path)
{
    while (file->ops.lock(file->ops.user, file->fd) != 0) {
        if (errno == EINTR) continue;
        REQUIRE(errno != EWOULDBLOCK, "%s is in use by another store", path);
        FAIL(FOLIO_ERR_IO, "%s could not be locked: %s", path, strerror(errno));
    }
    return FOLIO_OK;
}

folio_status folioi_store_file_open(folioi_store_file *file, const folioi_store_desc *desc)
{
    memset(file, 0, sizeof *file);
    file->fd = -1;
    TRY(check_desc(file, desc));
    file->ops = desc->ops == NULL ? system_ops : *desc->ops;
    const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    do file->fd = file->ops.open(file->ops.user, desc->path, flags, 0600);
    while (file->fd < 0 && errno == EINTR);
    REQUIRE(file->fd >= 0 || errno != ELOOP, "%s is a symbolic link; a store's path is its file",
            desc->path);
    if (file->fd < 0) FAIL(FOLIO_ERR_IO, "%s could not be opened: %s", desc->path, strerror(errno));
    folio_status status = lock_file(file, desc->path);
    if (status == FOLIO_OK) status = make_or_check(file, desc);
    if (status != FOLIO_OK) folioi_store_file_close(file);
    return status;
}

void folioi_store_file_close(folioi_store_file *file)
{
    if (file->fd >= 0) file->ops.close(file->ops.user, file->fd); /* unlocks */
    file->fd = -1;
    explicit_bzero(&file->key, sizeof file->key);
}

/* ---------------------------------------------------------------------------------- frame heads */

folioi_frame_info folioi_frame_describe(const folioi_store_file *file, const folioi_frame_id *id,
                                        int64_t payload_bytes)
{
    return (folioi_frame_info){
        .key = id->key,
        .parent = id->parent,
        .digest = id->digest,
        .salt = id->salt,
        .ids_hash = XXH3_64bits_withSeed(id->ids, (size_t)id->ids_bytes, file->hash_key),
        .payload_bytes = payload_bytes,
        .group = id->group,
        .ids_bytes = id->ids_bytes,
        .kind = id->kind,
        .hashed = id->hashed,
    };
}

static folioi_seal head_seal(const folioi_store_file *file, const folioi_frame_header *header,
                             const char *ids, int64_t ids_bytes)
{
    const folioi_bytes all = {header, offsetof(folioi_frame_header, seal)};
    return make_seal(file, FOLIOI_SEALED_HEAD, all, (folioi_bytes){ids, (size_t)ids_bytes},
                     file->hash_key);
}

static folioi_seal payload_seal(const folioi_store_file *file, const void *payload, int64_t bytes)
{
    const folioi_bytes all = {payload, (size_t)bytes};
    return make_seal(file, FOLIOI_SEALED_PAYLOAD, all, (folioi_bytes){NULL, 0}, 0);
}

bool folioi_payload_is(const folioi_store_file *file, const void *payload, int64_t bytes,
                       const folioi_seal *seal)
{
    folioi_seal found = payload_seal(file, payload, bytes);
    return folioi_seal_equal(&found, seal);
}

void folioi_head_encode(const folioi_store_file *file, int64_t frame, const folioi_frame_info *info,
                        const void *ids, const void *payload, char *head)
{
    folioi_frame_header h = {
        .version = htole32(STORE_FORMAT_VERSION),
        .kind = htole32((uint32_t)info->kind),
        .frame = (int64_t)htole64((uint64_t)frame),
        .epoch = htole64(info->epoch),
        .stamp = htole64(info->stamp),
        .key = {htole64(info->key.word[0]), htole64(info->key.word[1])},
        .parent = {htole64(info->parent.word[0]), htole64(info->parent.word[1])},
        .salt = htole64(info->salt),
        .group = (int32_t)htole32((uint32_t)info->group),
        .ids_bytes = (int32_t)htole32((uint32_t)info->ids_bytes),
        .hashed = htole32(info->hashed ? 1 : 0),
        .payload_bytes = (int64_t)htole64((uint64_t)info->payload_bytes),
        .geometry = file->geometry[info->group],
        .digest = {htole64(info->digest.word[0]), htole64(info->digest.word[1])},
        .payload_seal = payload_seal(file, payload, info->payload_bytes),
    };
    memcpy(h.magic, frame_magic, sizeof h.magic);
    memset(head, 0, (size_t)file->head_bytes);
    if (info->ids_bytes > 0) memcpy(head + sizeof h, ids, (size_t)info->ids_bytes);
    h.seal = head_seal(file, &h, head + sizeof h, info->ids_bytes);
    memcpy(head, &h, sizeof h);
}

folioi_head_state folioi_head_decode(const folioi_store_file *file, int64_t frame, const char *head,
                                     folioi_frame_info *info, folioi_seal *payload_seal)
{
    folioi_frame_header h;
    memcpy(&h, head, sizeof h);
    if (memcmp(&h, zeros, sizeof h) == 0) return FOLIOI_HEAD_EMPTY;
    const char *ids = head + sizeof h;
    int32_t ids_bytes = (int32_t)le32toh((uint32_t)h.ids_bytes);
    int32_t group = (int32_t)le32toh((uint32_t)h.group);
    int64_t payload_bytes = (int64_t)le64toh((uint64_t)h.payload_bytes);
    uint32_t kind = le32toh(h.kind);
    if (memcmp(h.magic, frame_magic, sizeof h.magic) != 0 ||
        le32toh(h.version) != STORE_FORMAT_VERSION || ids_bytes < 0 || ids_bytes > file->ids_bytes)
        return FOLIOI_HEAD_TORN;
    folioi_seal seal = head_seal(file, &h, ids, ids_bytes);
    if (!folioi_seal_equal(&h.seal, &seal)) return FOLIOI_HEAD_TORN;
    if ((int64_t)le64toh((uint64_t)h.frame) != frame || group < 0 ||
        group >= file->num_layer_groups ||
        memcmp(&h.geometry, &file->geometry[group], sizeof h.geometry) != 0 || payload_bytes < 0 ||
        payload_bytes > file->payload_bytes[group] ||
        (kind != FOLIOI_FRAME_CACHED && kind != FOLIOI_FRAME_SEQUENCE))
        return FOLIOI_HEAD_TORN;
    *payload_seal = h.payload_seal;
    *info = (folioi_frame_info){
        .key = {{le64toh(h.key[0]), le64toh(h.key[1])}},
        .parent = {{le64toh(h.parent[0]), le64toh(h.parent[1])}},
        .digest = {{le64toh(h.digest[0]), le64toh(h.digest[1])}},
        .salt = le64toh(h.salt),
        .ids_hash = XXH3_64bits_withSeed(ids, (size_t)ids_bytes, file->hash_key),
        .stamp = le64toh(h.stamp),
        .epoch = le64toh(h.epoch),
        .payload_bytes = payload_bytes,
        .group = group,
        .ids_bytes = ids_bytes,
        .kind = (folioi_frame_kind)kind,
        .hashed = h.hashed != 0,
    };
    return FOLIOI_HEAD_WHOLE;
}
