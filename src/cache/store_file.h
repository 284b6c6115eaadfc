/*
 * store_file.h: the store's file: its superblock, the heads of its frames, and whole reads and
 * writes. What is in memory, and who may touch which frame, is store.c's.
 *
 *   0                 superblock, 4096 bytes; the rest of frame 0 is never written
 *   i * frame_bytes   frame i, from 1:  header (256) | ids | payload, from a multiple of 64
 *
 * Integers are little-endian. A frame lives while its epoch is the superblock's: forget changes
 * that one number. Superblock, epoch, heads and payloads have a seal each: with a key BLAKE2b under it
 * and the file's secret, else a checksum, which anybody can make. No other file's frames verify.
 */
#ifndef FOLIOI_STORE_FILE_H
#define FOLIOI_STORE_FILE_H

#include "cache/passport.h"
#include "core/alloc.h"
#include "core/hash.h"

#include <stdbool.h>
#include <sys/stat.h>

#define STORE_FORMAT_VERSION 3
#define STORE_MAX_GROUPS 32

/** The calls a store makes on its file, replaceable by tests. Results and errno as the system's. */
typedef struct folioi_file_ops {
    int (*open)(void *user, const char *path, int flags, mode_t mode);
    int (*close)(void *user, int fd);
    int (*lock)(void *user, int fd); /* flock, exclusive, not waiting */
    int (*stat)(void *user, int fd, struct stat *out);
    ssize_t (*pread)(void *user, int fd, void *data, size_t n, off_t at);
    ssize_t (*pwrite)(void *user, int fd, const void *data, size_t n, off_t at);
    void *user;
} folioi_file_ops;

typedef struct folioi_store_desc {
    const char *path;
    int64_t max_bytes;                 /* of the file: bounds the number of frames */
    const folio_kv_passport *passport; /* compared with the file's; NULL: nothing is stated */
    int32_t ids_bytes;        /* room for a block's token ids: block_size * 4, at least 8 */
    int32_t num_layer_groups; /* entries of geometry, 1..32 */
    const folioi_frame_geometry *geometry;
    uint64_t hash_key;          /* 0: the file's, or a random one for a new file */
    folioi_bytes key;           /* of seals: 16..64 bytes; size 0: none */
    const folioi_file_ops *ops; /* NULL: the system's */
} folioi_store_desc;

typedef enum folioi_frame_kind {
    FOLIOI_FRAME_CACHED = 1,  /* of the prefix cache: found again after an open, may be replaced  */
    FOLIOI_FRAME_SEQUENCE = 2 /* of a swapped sequence: never replaced, dropped by the next open */
} folioi_frame_kind;

/** What names a frame. Frames differ in (key, group, kind); the rest is compared by get. */
typedef struct folioi_frame_id {
    folioi_key key, parent;
    folioi_key
        digest; /* of the whole prefix, under the file's secret: without it none can be made to collide */
    uint64_t salt;
    int32_t group;
    folioi_frame_kind kind;
    const void *ids; /* the block's token ids, or its hash id */
    int32_t ids_bytes;
    bool hashed; /* ids is one hash id */
} folioi_frame_id;

typedef struct folioi_superblock {
    char magic[8];
    uint32_t version;
    int32_t num_layer_groups;
    int64_t frame_bytes;
    int32_t ids_bytes;
    uint32_t zero;
    folioi_disk_passport passport;
    folioi_disk_geometry geometry[STORE_MAX_GROUPS];
    uint64_t hash_key;
    uint64_t secret[2];
    uint32_t keyed;
    uint32_t zero2;
    folioi_seal seal; /* of all before it */
    char unused[1440];
    folioi_seal epoch_seal; /* with the epoch, the one part that is written again */
    uint64_t epoch;
} folioi_superblock;

typedef struct folioi_frame_header {
    char magic[8];
    uint32_t version;
    uint32_t kind;
    int64_t frame; /* its own number */
    uint64_t epoch;
    uint64_t stamp;
    uint64_t key[2];
    uint64_t parent[2];
    uint64_t salt;
    int32_t group;
    int32_t ids_bytes;
    uint32_t hashed;
    uint32_t zero;
    int64_t payload_bytes; /* at most the geometry's */
    folioi_disk_geometry geometry;
    uint64_t digest[2];
    uint64_t zeros;
    folioi_seal payload_seal;
    folioi_seal seal; /* of all before it, and the ids */
} folioi_frame_header;

_Static_assert(sizeof(folioi_superblock) == 4096, "on disk");
_Static_assert(sizeof(folioi_frame_header) == 256, "on disk");
_Static_assert(sizeof(off_t) == 8, "files may be larger than 2 GiB");

typedef struct folioi_store_file {
    folioi_file_ops ops;
    int fd;
    int64_t size; /* when it was opened */
    int64_t frame_bytes;
    int64_t head_bytes; /* of header and ids: where the payload begins */
    int32_t ids_bytes, num_layer_groups;
    uint64_t hash_key;
    folioi_key secret;
    bool keyed;
    folioi_seal key; /* of this file's seals: the caller's key and the secret */
    uint64_t epoch;  /* guarded by the store's lock */
    bool made;       /* by this open */
    bool epoch_saved;
    bool epoch_lost; /* it did not verify: everything is forgotten */
    int64_t payload_bytes[STORE_MAX_GROUPS];
    folioi_disk_geometry geometry[STORE_MAX_GROUPS];
    folioi_disk_passport passport;
} folioi_store_file;

/** What a head says, in the host's byte order; ids as their hash. */
typedef struct folioi_frame_info {
    folioi_key key, parent, digest;
    uint64_t salt, ids_hash, stamp, epoch;
    int64_t payload_bytes;
    int32_t group, ids_bytes;
    folioi_frame_kind kind;
    bool hashed;
} folioi_frame_info;

typedef enum folioi_head_state {
    FOLIOI_HEAD_EMPTY, /* all zero: never written, or wiped */
    FOLIOI_HEAD_TORN,  /* does not verify */
    FOLIOI_HEAD_WHOLE
} folioi_head_state;

/** The desc checked, the file opened, locked, and made or compared. Nothing is open on failure. */
folio_status folioi_store_file_open(folioi_store_file *file, const folioi_store_desc *desc);
void folioi_store_file_close(folioi_store_file *file);

/** As much of n bytes as there is; -1: the read failed. */
int64_t folioi_store_file_read(folioi_store_file *file, void *data, int64_t n, int64_t at);
/** All of it, or ERR_IO with the system's words and where it stopped. */
folio_status folioi_store_file_write(folioi_store_file *file, const void *data, int64_t n,
                                     int64_t at);

/** n zeros from byte `at` on. */
folio_status folioi_store_file_clear(folioi_store_file *file, int64_t n, int64_t at);

/** A frame's header written as zeros; false when that failed. Leaves folio_last_error alone. */
bool folioi_store_file_wipe(folioi_store_file *file, int64_t frame);

folio_status folioi_store_random(uint64_t *out); /* never 0 */
/** What digests are made under. With a key, who reads the file does not know it: the caller clears *out. */
void folioi_store_file_digest_key(const folioi_store_file *file, folioi_key *out);
/** The epoch put into the superblock; epoch_saved says whether it is there. */
folio_status folioi_store_file_save_epoch(folioi_store_file *file, uint64_t epoch);

folioi_frame_info folioi_frame_describe(const folioi_store_file *file, const folioi_frame_id *id,
                                        int64_t payload_bytes);
/** head[head_bytes]: header and ids as they go to disk. */
void folioi_head_encode(const folioi_store_file *file, int64_t frame, const folioi_frame_info *info,
                        const void *ids, const void *payload, char *head);
/** Of head[head_bytes] as it was read, missing bytes zero; only a WHOLE one sets the outputs. */
folioi_head_state folioi_head_decode(const folioi_store_file *file, int64_t frame, const char *head,
                                     folioi_frame_info *info, folioi_seal *payload_seal);
/** Is it the payload that its head was made for? */
bool folioi_payload_is(const folioi_store_file *file, const void *payload, int64_t bytes,
                       const folioi_seal *seal);

static inline int64_t frame_offset(const folioi_store_file *file, int64_t frame)
{
    return frame * file->frame_bytes;
}

#endif
