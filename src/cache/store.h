/*
 * store.h: the disk tier: one file of fixed-size frames, each one block of one group.
 *
 *   frame 0                       the superblock: what the file is for, and the key of its hashes
 *   frame i   [header | ids | payload | padding]    a frame is a multiple of 4096 bytes
 *
 * A frame's header names its block (key, parent, salt, group, kind), its geometry and its length,
 * with seals (store_file.h) of the header with the ids, and of the payload. A put wipes the old header,
 * writes the payload, then the header, so that a killed process leaves whole frames and free ones
 * (nothing is synced: after a power failure frames may be torn or missing, never wrong). The index
 * is in memory, rebuilt on open from the headers. What does not verify is a miss with a counted
 * warning. Thread-safe; frames are read and written without the store's lock.
 */
#ifndef FOLIOI_STORE_H
#define FOLIOI_STORE_H

#include "cache/store_file.h"

typedef struct folioi_store_stats {
    int64_t num_frames, used, evictions, writes, reads, warnings, errors;
} folioi_store_stats;

/**
 * A CACHED frame that left the table: replaced by a put, or dropped by a get. They call it without any lock
 * held, before they return; folioi_store_each calls it under the store's lock.
 */
typedef void (*folioi_replaced_fn)(void *user, const folioi_frame_id *id); /* ids NULL */

typedef struct folioi_store folioi_store;

/**
 * Open or make the file. ERR_ARGUMENT: in use, not a store, another version, model, geometry or
 * hash key (a sentence says which, and what the file has); ERR_IO: the system refused (with its
 * words). A file that is not a store of ours is never written to; one that is empty, or the
 * beginning of a store of this desc (its maker was killed), is made anew. A larger max_bytes than
 * the file was made with gives it more frames; with a smaller one, frames past it are not used.
 * CACHED frames are found in the order of their puts: use after the put is not remembered. Frames
 * that cannot be read are free, and counted as errors.
 */
folio_status folioi_store_open(const folio_allocator *a, const folioi_store_desc *desc,
                               folioi_store **out);
void folioi_store_close(folioi_store *store);

uint64_t folioi_store_hash_key(const folioi_store *store);
/** A number of the file's own, for digests: a secret, which the caller clears. */
void folioi_store_secret(const folioi_store *store, folioi_key *out);

/**
 * Write a frame. The same (key, group, kind) again goes to another frame, and the old one goes when it
 * is whole; an equal CACHED one is skipped. Takes a free frame, else the least recently used
 * CACHED one. ERR_FULL: every frame is a sequence's, or busy, or the old one of this name. ERR_IO:
 * the write failed (disk full, say): counted, the frame is free again, what it held before is gone.
 * ERR_ARGUMENT, ERR_MEMORY: nothing changed.
 */
folio_status folioi_store_put(folioi_store *store, const folioi_frame_id *id, const void *payload,
                              int64_t bytes);

/**
 * Read a frame into payload (exactly `bytes`). *found false: not there, or it does not verify
 * (counted as a warning, and dropped), or its parent, salt, digest, length or ids differ (not dropped), or
 * the read failed (counted as an error, and dropped). payload then holds anything. A hit becomes
 * the most recently used. ERR_MEMORY is the only failure.
 */
folio_status folioi_store_get(folioi_store *store, const folioi_frame_id *id, void *payload,
                              int64_t bytes, bool *found);

/** Is there a frame of this key, group, kind, parent, salt and digest? Its ids are compared by get. */
bool folioi_store_has(folioi_store *store, const folioi_frame_id *id);

/** Forget the frame of this key, group and kind, if it is there. On disk a SEQUENCE stays until its
 * place is used again; CACHED ones are wiped. */
void folioi_store_drop(folioi_store *store, const folioi_frame_id *id);

/**
 * Forget all CACHED frames, on disk too (also those past a smaller max_bytes, and puts under way),
 * with one small write, which only a power failure can undo. ERR_IO: it failed; they are forgotten
 * here, and close tries again to write it down.
 */
folio_status folioi_store_forget(folioi_store *store);
/** Forget the CACHED frames of a salt. On disk they stay until the next folioi_store_wipe or put. */
void folioi_store_forget_salt(folioi_store *store, uint64_t salt);

/**
 * Zeros over the heads of forgotten salts, then over all that free frames hold, and over what lies past a smaller
 * max_bytes. Where several threads wipe, each returns when all is wiped. A put that needs the frame under the zeros
 * waits for it. ERR_IO: some are not wiped; call it again.
 */
folio_status folioi_store_wipe(folioi_store *store);

/** Frames that can still be promised to SEQUENCE puts: free, being wiped, or CACHED and read by nobody, less those
 * promised. */
int64_t folioi_store_available(folioi_store *store);

/** Keep n frames for SEQUENCE puts to come; each put, also one that fails, uses up one. False: there are not so
 * many. */
bool folioi_store_promise(folioi_store *store, int64_t n);
/** n of them will not be needed. */
void folioi_store_unpromise(folioi_store *store, int64_t n);

/** A CACHED frame, if it is there, becomes the most recently used. */
void folioi_store_touch(folioi_store *store, const folioi_frame_id *id);

/** Called for each CACHED frame that put takes for another name. By then another thread may have
 * put its block again: has says so. */
void folioi_store_on_replaced(folioi_store *store, folioi_replaced_fn fn, void *user);

/** Calls fn for each CACHED frame (ids NULL), under the store's lock. */
void folioi_store_each(folioi_store *store, folioi_replaced_fn fn, void *user);

folioi_store_stats folioi_store_get_stats(folioi_store *store);

/** Where a name lies in the table: by a number of the file's own. */
uint64_t folioi_store_hash(const folioi_store *store, folioi_key key, int32_t group,
                           folioi_frame_kind kind);

#endif
