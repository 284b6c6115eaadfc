/*
 * pool.h: a pool, and the blocks of its tiers: taken, given back, linked to the index, copied. Functions
 * expect the pool's lock to be held, unless they say otherwise.
 *
 * The files of the pool, each on those before it (scripts/checks/includes.list):
 *
 *   blocks.c         a tier's blocks: free, used and cached ones. Device, host and file each have theirs
 *   key_table.h      entries found by a hash
 *   prefix_index.c   the tree of the prefix cache
 *   store_file.c     the file of the disk tier; store.c which of its frames holds what
 *   frames.c         the host tier's memory
 *   pool.c           this file
 *   sequence.c       create, reserve, truncate, fork, release_window (sequences become batches in
 *                    api/sequence_batch.c)
 *   transfer.c       the thread that moves bytes, and transfer handles
 *   forget.c         empties the prefix cache; overwrites what free blocks hold
 *   prefix.c         match and commit: sequences and the prefix index
 *   swap.c           sequences and cached blocks moved between tiers
 *   pool_check.c     the invariants of a pool
 *   pool_calls.c     create and destroy, statistics, block states
 */
#ifndef FOLIOI_POOL_H
#define FOLIOI_POOL_H

#include "cache/blocks.h"
#include "cache/frames.h"
#include "cache/prefix_index.h"
#include "cache/store.h"
#include "core/cancel.h"
#include "core/checked.h"
#include "core/context.h"

#include <folio/folio_pool.h>
#include <pthread.h>

/* Groups are numbered 0 .. num_layer_groups - 1; encoder tokens have tables of their own after them. */
#define MAX_TABLES FOLIOI_MAX_FRAME_TABLES

typedef struct folioi_copies {
    folioi_array pairs; /* folio_block_pair [num] */
    int64_t num;
} folioi_copies;

/* The thread that runs transfers: transfer.h. */
typedef struct folioi_mover {
    pthread_cond_t wake, ended;
    pthread_t thread;
    bool started, quit;
    bool queued;                  /* copies of frames are in the pool's stream; the thread's own */
    bool staged;                  /* its frame holds something; the thread's own                 */
    folio_transfer *first, *last; /* the first one is being run */
} folioi_mover;

struct folio_pool {
    folioi_refs refs;
    folio_context *ctx;
    void *stream; /* of a device: every copy of the pool is queued there */
    folio_allocator allocator;
    pthread_mutex_t lock;
    pthread_mutex_t next; /* who waits for the lock holds it: see folioi_pool_give_way */
    int32_t block_size, num_layer_groups,
        cross;                  /* cross == num_layer_groups: the encoder's table */
    int64_t window[MAX_TABLES]; /* 0: all keys */
    folio_kv_cache *cache[MAX_TABLES];
    folio_kv_cache
        *blank[MAX_TABLES]; /* a block like those of the cache, all zero or NaN; made when needed */
    folio_wipe wipe;
    bool wiping; /* copies of blanks were put into the stream */
    bool windowed;
    bool tiers;
    int64_t watermark;
    folio_status (*check)(folio_pool *pool); /* after each call; NULL: none */
    folio_event_fn on_event;
    void *event_user;
    folioi_blocks device, host;
    folioi_index index;
    folioi_copies copies[FOLIO_MAX_LAYER_GROUPS];
    folioi_array walk; /* int32_t: nodes of a match */
    folio_sequence *sequences;
    int64_t num_sequences, lookup_tokens, hit_tokens, blocks_out, blocks_in;
    folioi_frames frames;
    folioi_store *store;
    folioi_mover mover;
    uint64_t next_swap; /* numbers swapped sequences in the store, from a random number on */
};

/* Blocks that one hold of the lock visits: of a match, which ends there; of a sequence that commits or goes. */
enum { FOLIOI_MATCH_BLOCKS = 65536, FOLIOI_HOLD_BLOCKS = 4096 };

/** Behind those that wait already. */
static inline void wait_for_lock(folio_pool *pool)
{
    pthread_mutex_lock(&pool->next);
    pthread_mutex_lock(&pool->lock);
    pthread_mutex_unlock(&pool->next);
}

static inline void pool_lock(folio_pool *pool)
{
    if (pthread_mutex_trylock(&pool->lock) != 0) wait_for_lock(pool);
}

/** Unlocks, and locks again after the thread that is next, if there is one, had the lock. Fails, without unlocking, where
 * a check finds a fault. */
folio_status folioi_pool_give_way(folio_pool *pool);

/** Unlocks, after a check of the invariants where the pool was made with FOLIO_POOL_CHECK, and overwrites what was freed
 * where its `wipe` says so, or in poison mode. */
folio_status folioi_pool_unlock(folio_pool *pool, folio_status status);

/** Wait until some transfer has ended. */
static inline void pool_await(folio_pool *pool)
{
    int cancel = cancel_defer();
    pthread_cond_wait(&pool->mover.ended, &pool->lock);
    cancel_allow(cancel);
}

static inline folioi_blocks *tier_blocks(folio_pool *pool, int tier)
{
    return tier == TIER_DEVICE ? &pool->device : &pool->host;
}

/** A block with one reference; blocks_available must not be 0. Evicts the oldest cached one if need be. */
int32_t folioi_pool_take(folio_pool *pool, int tier, int32_t group);

/** Does the pool's `wipe` say that blocks and frames are overwritten when they become free? */
static inline bool pool_wipes_freed(const folio_pool *pool)
{
    return pool->wipe == FOLIO_WIPE_ON_FREE || pool->wipe == FOLIO_WIPE_ON_SALT;
}

/** Are those in memory? In poison mode always; the store's file is left to `wipe`. */
static inline bool pool_fills_freed(const folio_pool *pool)
{
    return pool->ctx->poison || pool_wipes_freed(pool);
}

/** Make the blank blocks; nothing to do the second time. */
folio_status folioi_pool_make_blanks(folio_pool *pool);
/** Blanks over the free blocks of a tier that hold something, in that order, `limit` of them at most. */
folio_status folioi_pool_wipe(folio_pool *pool, int tier, int64_t limit);
/** All of them in both tiers; the lock is open in between. What fails is done by the next call. */
folio_status folioi_pool_wipe_freed(folio_pool *pool);
/** Empty the prefix cache in all tiers; of one salt, if that is not NULL. Without transfers under way. */
folio_status folioi_pool_forget(folio_pool *pool, const uint64_t *salt);
/** Zeros over the mover's frame, while it does not run. */
folio_status folioi_pool_wipe_staging(folio_pool *pool);
/** The end of a pool: no more copies of blanks are under way. Where freed blocks are overwritten, the last ones are. */
void folioi_pool_wipe_all(folio_pool *pool);

/** The holders' side of a block: its last holder also calls off the copy that would write it. */
void folioi_pool_release(folio_pool *pool, int32_t block);

/** Where all copies of a pool run. */
static inline folio_run pool_run(const folio_pool *pool)
{
    return (folio_run){.struct_size = sizeof(folio_run), .stream = pool->stream};
}

/** A call's run, which may be NULL, must not name another stream than the pool's. */
folio_status folioi_pool_run_in(const folio_pool *pool, const folio_run *run);

/** Run all queued copies of a group, which needs its cache; of all groups. */
folio_status folioi_pool_run_group_copies(folio_pool *pool, int32_t group);
folio_status folioi_pool_run_copies(folio_pool *pool);

/**
 * Before the last reference to a block goes that may be held without those before it: the cached block it must
 * rest before (NONE: the end of the list). One that nobody can reach any more leaves the index first.
 */
int32_t folioi_pool_prepare_rest(folio_pool *pool, int32_t block);

/** The index gets, or loses, a block in a tier; with its event. Losing does not settle the node. */
void folioi_pool_link(folio_pool *pool, int tier, int32_t node, int32_t group, int32_t block);
void folioi_pool_unlink(folio_pool *pool, int tier, int32_t block);

/** An event about a block; its token ids may be NULL. */
void folioi_pool_emit(folio_pool *pool, folio_cache_event_kind kind, folio_tier tier,
                      const folioi_frame_id *id, int64_t block);

/** A node's block of one group, named as the store and events name it; ids point into the index. */
static inline folioi_frame_id node_id(const folioi_index *x, int32_t node, int32_t group)
{
    folioi_block_ids ids = index_ids(x, node);
    return (folioi_frame_id){.key = index_node(x, node)->key,
                             .parent = index_parent_key(x, node),
                             .digest = index_node(x, node)->digest,
                             .salt = index_node(x, node)->salt,
                             .group = group,
                             .kind = FOLIOI_FRAME_CACHED,
                             .ids = ids.data,
                             .ids_bytes = ids.bytes,
                             .hashed = ids.hashed};
}

/** First key position that token `len` can see in a group. */
static inline int64_t window_begin(const folio_pool *pool, int32_t group, int64_t len)
{
    int64_t w = pool->window[group];
    return w == 0 ? 0 : max_i64(0, len - w + 1);
}

/** For tests of collisions: only so many bits of a key are used. On a pool without entries. */
void folioi_pool_set_hash_bits(folio_pool *pool, int bits);

#endif
