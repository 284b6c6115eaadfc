/*
 * pool.h: the structs and functions that the files of KV memory share. Functions expect the pool's lock
 * to be held, unless they say otherwise.
 *
 *   pool.c           create and destroy, alloc and release, queued copies, statistics, block states
 *   pool_check.c     the invariants of a pool
 *   sequence.c       create, reserve, truncate, fork, release_window (sequences become batches in
 *                    api/sequence_batch.c)
 *   prefix.c         match and commit: sequences and the prefix index (prefix_index.c)
 *   swap.c           sequences and cached blocks moved between tiers
 *   transfer.c       the thread that moves bytes, and transfer handles
 *   blocks.c         the free and cached lists of a tier's blocks
 *   frames.c         the host tier's memory
 *   store.c          the disk tier's index; store_file.c its file
 */
#ifndef FOLIOI_KV_POOL_H
#define FOLIOI_KV_POOL_H

#include "cache/blocks.h"
#include "cache/frames.h"
#include "cache/prefix_index.h"
#include "cache/store.h"
#include "cache/transfer.h"
#include "core/checked.h"
#include "core/context.h"
#include "core/stamp.h"

#include <folio/folio_pool.h>
#include <pthread.h>

/* Groups are numbered 0 .. num_layer_groups - 1; encoder tokens have tables of their own after them. */
#define MAX_TABLES (FOLIO_MAX_LAYER_GROUPS + 1)

typedef struct folioi_copies {
    folioi_array pairs; /* folio_block_pair [num] */
    int64_t num;
} folioi_copies;

struct folio_pool {
    folioi_refs refs;
    folio_context *ctx;
    void *stream; /* of a device: every copy of the pool is queued there */
    folio_allocator allocator;
    pthread_mutex_t lock;
    int32_t block_size, num_layer_groups,
        cross;                  /* cross == num_layer_groups: the encoder's table */
    int64_t window[MAX_TABLES]; /* 0: all keys */
    folio_kv_cache *cache[MAX_TABLES];
    bool windowed;
    bool tiers;
    int64_t watermark;
    uint32_t flags;
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
    uint64_t next_swap; /* numbers swapped sequences in the store */
};

typedef struct folioi_table {
    folioi_array blocks; /* int32_t [num] */
    int64_t num;
    int64_t released; /* entries before it hold FOLIO_NO_BLOCK */
} folioi_table;

struct folio_sequence {
    folioi_stamp stamp; /* changes with all that a batch copies */
    folio_pool *pool;
    folio_sequence *prev, *next;
    uint64_t salt;
    int64_t len, committed, matched, encoder_len, encoder_committed;
    int64_t indexed; /* blocks that the index knows, from the first on */
    int32_t tip;     /* the node of the last of them, pinned; NONE */
    bool stale;      /* the cache was told to forget what it holds */
    folio_sequence_state state;
    folio_tier tier;
    folioi_key swap_key;      /* names its frames in the store */
    folio_transfer *transfer; /* under way */
    folioi_table table[MAX_TABLES];
};

static inline int32_t *table_blocks(const folioi_table *t) { return t->blocks.data; }

static inline void pool_lock(folio_pool *pool) { pthread_mutex_lock(&pool->lock); }

/** Unlocks, after a check of the invariants where the pool was made with FOLIO_POOL_CHECK. */
folio_status folioi_pool_unlock(folio_pool *pool, folio_status status);

folio_status folioi_pool_check(folio_pool *pool);

/** A block with one reference; blocks_available must not be 0. Evicts the oldest cached one if need be. */
int32_t folioi_pool_take(folio_pool *pool, int32_t group);

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

/** The node of block i of a sequence, i < indexed. */
static inline int32_t sequence_node(const folio_sequence *s, int64_t i)
{
    int32_t node = s->tip;
    for (int64_t k = s->indexed - 1; k > i; k--) node = index_node(&s->pool->index, node)->parent;
    return node;
}

/** Refuses sequences that are not on the device. */
folio_status folioi_sequence_resident(const folio_sequence *s, const char *call);

/** Room in all block tables for the blocks of so many tokens. */
folio_status folioi_sequence_grow(folio_sequence *s, int64_t len);

/** Give back a table's blocks from number `first` on, last one first. */
void folioi_sequence_drop(folio_sequence *s, int32_t table, int64_t first);

/** Truncate, for a length known to be right. */
void folioi_sequence_cut(folio_sequence *s, int64_t len);

/** Blocks out of a windowed group's window: how many would become available; release them. */
int64_t folioi_sequence_releasable(const folio_sequence *s);
void folioi_sequence_release(folio_sequence *s, const char *call);

/** folio_sequence_match; *transfer is what brings blocks back, or NULL. */
folio_status folioi_prefix_match(folio_sequence *s, const folio_tokens *tokens,
                                 folio_transfer **transfer);

/** Block i of a group enters its node, or gives way to the one the node has. */
void folioi_prefix_enter(folio_sequence *s, int32_t group, int64_t i, int32_t node);

/** A device block for block i of a group, to be brought back by the transfer from where the node's is. */
int32_t folioi_swap_load(folio_transfer *t, int32_t group, int64_t i, int32_t node);
/** What a transfer did takes effect. */
void folioi_swap_finish(folio_transfer *t);
/** Give back what a swapped sequence has in its tier. */
void folioi_swap_discard(folio_sequence *s);

/** The ids of block i. */
static inline folioi_block_ids tokens_block(const folio_tokens *t, int64_t i, int32_t block_size)
{
    if (t->hash_ids != NULL) return (folioi_block_ids){t->hash_ids + i, 8, true};
    return (folioi_block_ids){t->ids + i * block_size, block_size * 4, false};
}

/** For tests of collisions: only so many bits of a key are used. On a pool without entries. */
void folioi_pool_set_hash_bits(folio_pool *pool, int bits);

#endif
