/*
 * Folio: KV memory. Manages the blocks of a KV cache.
 *
 *     folio_pool      hands out blocks: reference counts, prefix cache, tiers
 *     folio_sequence  one request's tokens: a block table per layer group
 *     folio_transfer  blocks on their way to or from host memory or disk
 *
 * A step of an engine, from the pool to the kernels and back:
 *
 *     match      a new sequence takes the cached blocks of its prompt's prefix
 *     reserve    each sequence gets slots for the tokens it computes in this step
 *     batch      folio_batch_add_sequences, a batch and a plan per layer group; then the forwards
 *     commit     the tokens' K and V are written; full blocks enter the prefix cache
 *
 * Words. A layer group is the layers of a model that see the same keys (all of them, or a window);
 * in this header, group for short. Each has a KV cache, and each sequence a block table per group.
 * Blocks have one numbering for all groups, and block b belongs to one group at a time. So groups can
 * share memory: groups of one shape name the same cache, others take theirs from
 * folio_kv_cache_create_shared. A block is free; or used, by one holder or shared by several; or
 * cached: not held, but in the prefix cache, and evicted when free ones run out. Available means free
 * or cached.
 *
 * Errors are those of folio.h. A call that fails has changed nothing, unless its comment says
 * otherwise. FOLIO_ERR_FULL means "not now": there are too few available blocks; preempt a sequence,
 * or try again when one has ended. A queued copy holds the block that it reads until it is run.
 * FOLIO_ERR_TOO_LARGE means "never": the request would not fit even if nobody else held a block.
 *
 * Threads. Several threads may call a pool at once. One thread at a time may use a sequence; several
 * threads may use different sequences of one pool at once. A pool holds its lock while it calls
 * on_event: the callback must not call the pool.
 *
 * Devices. A pool's blocks may lie on a device (backend "cuda"). The pool then queues all its copies
 * on one stream (folio_pool_desc.stream) and does not wait for them; it waits only for copies to and
 * from the store's file. Put all other work on the pool's blocks on the same stream: forwards,
 * folio_kv_cache_write, the copies of folio_pool_take_copies. Then a block may go to another sequence
 * as soon as the work that reads it is queued. A transfer has ended when its copies are in the
 * stream; folio_run_wait returns their errors. Do not capture a graph on the stream while a transfer
 * is under way: it may queue copies at any time. The folio_run of a call in this header must have
 * stream NULL or the pool's stream.
 *
 * Lifetimes. Objects may be destroyed in any order, as in folio.h: sequences and transfers keep their
 * pool alive, a pool its caches and its context. A pool that is destroyed while sequences or
 * transfers are left ends with the last of them; until then its store's file is in use. on_event and
 * event_user must outlive it.
 */
#ifndef FOLIO_FOLIO_POOL_H
#define FOLIO_FOLIO_POOL_H

#include <folio/folio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct folio_pool folio_pool;
typedef struct folio_sequence folio_sequence;
typedef struct folio_transfer folio_transfer;

/* ---------------------------------------------------------------------------------------------- */
/* Pool                                                                                            */
/* ---------------------------------------------------------------------------------------------- */

#define FOLIO_MAX_LAYER_GROUPS 16

/** In place of a group's number: the blocks of encoder tokens, which cross attention reads. */
#define FOLIO_LAYER_GROUP_CROSS (-1)

/** One layer group. Its layout never changes. */
typedef struct folio_layer_group {
    int64_t window;        /* tokens that a token sees, itself included: window_left + 1; 0: all   */
    folio_kv_cache *cache; /* at least num_blocks blocks of block_size; NULL: the caller runs the  */
                           /* copies, and there are no tiers                                       */
} folio_layer_group;

/**
 * Caches for the groups of one pool in one memory. descs: [num_caches], 1..17, all with the same
 * num_blocks and layout NATIVE. Layers, block size, heads, head sizes and dtype may differ (but a pool
 * needs one block size). caches: [num_caches]; all NULL if the call fails. Each block has
 * room for a block of any of the caches, so the memory is num_blocks times the largest: split the
 * layers into groups whose blocks take about the same bytes. The memory lives until the last of the
 * caches is destroyed. The pool never uses one block in two caches at once; a caller with block tables
 * of its own must not either.
 */
FOLIO_API folio_status folio_kv_cache_create_shared(folio_context *ctx,
                                                    const folio_kv_cache_desc *const *descs,
                                                    int32_t num_caches, folio_kv_cache **caches);

/** Where K and V can be. */
typedef enum folio_tier {
    FOLIO_TIER_DEVICE = 0, /* the groups' caches                     */
    FOLIO_TIER_HOST = 1,   /* host_blocks blocks of host memory      */
    FOLIO_TIER_DISK = 2    /* frames of the store's file             */
} folio_tier;

typedef enum folio_cache_event_kind {
    FOLIO_EVENT_STORED = 1,
    FOLIO_EVENT_REMOVED = 2
} folio_cache_event_kind;

/**
 * A block that entered or left a tier of the prefix cache. The library fills it; its pointers are
 * valid during the callback only. token_ids is NULL, and num_tokens 0, in two cases: the block was
 * committed under a hash_id; or it is a frame of the store that was found at the start, replaced,
 * damaged or forgotten.
 */
typedef struct folio_cache_event {
    size_t struct_size;
    folio_cache_event_kind kind;
    folio_tier tier;
    int32_t layer_group;
    int64_t block; /* number in its tier; -1 on disk                                       */
    uint64_t hash[2];
    uint64_t parent[2]; /* hash of the block before it; 0, 0 for a sequence's first        */
    uint64_t salt;
    const int32_t *token_ids; /* [num_tokens], the block's own, or NULL                    */
    int32_t num_tokens;
    uint64_t hash_id; /* folio_tokens.hash_ids of the block, where token_ids is NULL       */
} folio_cache_event;

typedef void (*folio_event_fn)(void *user, const folio_cache_event *event);

/** When K, V and token ids that nothing needs any more are overwritten with zeros. */
typedef enum folio_wipe {
    FOLIO_WIPE_ON_FORGET = 0, /* by folio_pool_forget: in all blocks and frames that are free then    */
    FOLIO_WIPE_ON_FREE = 1,   /* and each block and frame when it becomes free, before the call that  */
                              /* freed it returns; folio_pool_destroy frees cached blocks             */
    FOLIO_WIPE_ON_SALT = 2,   /* as ON_FREE; and when the last sequence of a salt is destroyed, the   */
                              /* prefix cache forgets that salt in all tiers                          */
    FOLIO_WIPE_NEVER = 3
} folio_wipe;

/** Check all invariants at the end of every call that changes something; slow, for debugging. */
#define FOLIO_POOL_CHECK 1u

typedef struct folio_pool_desc {
    size_t struct_size;
    int64_t num_blocks;             /* 1..2^31 - 1; 0: as many as the smallest of its caches has   */
    int32_t block_size;             /* tokens, 1..4096; 0: that of its caches                      */
    int32_t num_layer_groups;       /* 1..FOLIO_MAX_LAYER_GROUPS; 0: 1                             */
    const folio_layer_group *layer_groups; /* [num_layer_groups], copied; NULL: no windows, no caches */
    folio_kv_cache *cross_cache;    /* for encoder tokens; NULL: the caller runs the copies, and   */
                                    /* there are no tiers, as in folio_layer_group                 */
    int64_t watermark; /* blocks that FOLIO_RESERVE_ADMIT leaves available                         */
    uint32_t flags;    /* 0 or FOLIO_POOL_CHECK                                                    */
    uint64_t hash_key;     /* key of the prefix cache's hashes: pools with the same key have the   */
                           /* same hashes; 0: the store's key, or a random one. A secret: who      */
                           /* knows it can make blocks that collide, and blocks that collide with  */
                           /* too many others do not enter the prefix cache                        */
    folio_event_fn on_event; /* NULL: no events                                                    */
    void *event_user;
    int64_t host_blocks; /* host tier: blocks in memory of the context's allocator, or of kind     */
                         /* FOLIO_MEMORY_HOST where the context has a device; 0: none              */
    const char *store_path; /* disk tier: its file, made if it does not exist; NULL: none          */
    int64_t store_bytes;    /* largest size of the file: room for three frames or more, of which   */
                            /* the superblock takes one. A frame has the bytes of one block of the */
                            /* largest group in all its layers, 4 * block_size bytes and up to     */
                            /* 4.5 KiB. A larger file is not cut; frames past this size are not    */
                            /* used. Ignored without store_path                                    */
    const folio_kv_passport *passport; /* what K and V are: a store with another passport is       */
                                       /* rejected. NULL: nothing is stated                        */
    void *stream;      /* of the context's device: where all copies of the pool are queued. NULL: */
                       /* the default stream. Host backends: NULL                                  */
    folio_wipe wipe;   /* groups without a cache are the caller's to wipe                          */
    int32_t store_key_bytes;     /* 16..64; 0: no key                                              */
    const void *store_key;       /* [store_key_bytes], copied: authenticates the store's file.     */
                                 /* With it, only who knows the key can make frames that are read; */
                                 /* an older frame of the same file, put back, is still read.      */
                                 /* Without it, whoever can write to the file can forge K and V.   */
                                 /* A file has the key that it was made with, or none              */
} folio_pool_desc;

/**
 * Make a pool with all its blocks free. All caches are of this context. Tiers need a cache in every
 * group, and a cross_cache if there are encoder tokens.
 * @return FOLIO_OK; ERR_ARGUMENT (also: the store's file has another passport, geometry or format
 * version, was made with another hash_key or store_key, is damaged or in use, belongs to another user,
 * can be written by others, or is a link); ERR_MEMORY; ERR_IO; ERR_DEVICE.
 */
FOLIO_API folio_status folio_pool_create(folio_context *ctx, const folio_pool_desc *desc,
                                         folio_pool **out);
/** The pool is freed when it and its last sequence and transfer handle are destroyed. That call waits
 * for the transfers in progress and their copies. What the store holds stays for the next pool. */
FOLIO_API void folio_pool_destroy(folio_pool *pool);

/**
 * Allocate n blocks with one reference each, all or none, for callers that keep their own block
 * tables. FOLIO_ERR_FULL: fewer than n are available. FOLIO_ERR_TOO_LARGE: the pool has fewer than n.
 * Free blocks are taken first, then cached ones: least recently used first, and among the blocks of
 * one sequence the last one first. Each block takes constant time. One exception: if all groups have
 * windows, taking the last cached block of a long chain also clears the chain's entries.
 */
FOLIO_API folio_status folio_pool_alloc(folio_pool *pool, int64_t n, int32_t *blocks);
/** One more reference to each of n used blocks. */
FOLIO_API folio_status folio_pool_retain(folio_pool *pool, int64_t n, const int32_t *blocks);
/** One reference less; the last one frees the block. Release only references from alloc or retain. A
 * block may be listed once per such reference. */
FOLIO_API folio_status folio_pool_release(folio_pool *pool, int64_t n, const int32_t *blocks);

/**
 * Take queued copies of blocks that were shared and are about to be written. If the group has a cache,
 * folio_batch_add_sequences runs them. If it has none, take them, run them, and then add the
 * sequences. folio_kv_cache_copy_blocks takes the pairs as they are. Up to `capacity` of them are
 * handed out and leave the queue; *num_pairs says how many. pairs may be NULL if capacity is 0. Run
 * them before anything else writes to the cache. If the pool wipes what it frees, or fills it
 * (FOLIO_DEBUG=poison), it would overwrite their sources: for a group with a cache the call is then
 * rejected.
 */
FOLIO_API folio_status folio_pool_take_copies(folio_pool *pool, int32_t layer_group, int64_t capacity,
                                              folio_block_pair *pairs, int64_t *num_pairs);
/** Run all copies of all groups now; the groups need their caches. If a copy fails, it and
 * the later ones stay queued. */
FOLIO_API folio_status folio_pool_run_copies(folio_pool *pool, const folio_run *run);

typedef struct folio_pool_stats {
    size_t struct_size;
    int64_t num_blocks;
    int64_t num_free;
    int64_t num_used;      /* held, shared ones included        */
    int64_t num_shared;    /* held more than once               */
    int64_t num_cached;    /* held by nobody, in the prefix cache */
    int64_t peak_used;
    int64_t num_sequences;
    int64_t num_copies;    /* waiting to be taken               */
    int64_t allocations;   /* blocks handed out since creation  */
    int64_t evictions;     /* cached blocks that were evicted   */
    int64_t lookup_tokens; /* given to folio_sequence_match     */
    int64_t hit_tokens;    /* found by it, in any tier          */
    double hit_rate;       /* hit_tokens / lookup_tokens, or 0  */
    int64_t num_entries;   /* entries of the prefix cache's index. After folio_pool_forget, an   */
                           /* entry whose block is still held may be counted until the block is  */
                           /* released                                                           */
    int64_t host_blocks;   /* blocks of the host tier           */
    int64_t host_used;     /* of them held                      */
    int64_t host_cached;   /* of them only in the prefix cache  */
    int64_t host_evictions; /* cached ones that were evicted    */
    int64_t blocks_out;    /* copied down to host memory or disk */
    int64_t blocks_in;     /* copied back up                     */
    int64_t store_frames;  /* frames of the disk tier            */
    int64_t store_used;    /* of them in use                     */
    int64_t store_evictions; /* cached ones replaced             */
    int64_t store_writes;  /* frames written                     */
    int64_t store_reads;   /* frames read                        */
    int64_t store_warnings; /* frames found torn or corrupted: each was a miss   */
    int64_t store_errors;   /* reads and writes that failed; each was a miss, or not stored */
} folio_pool_stats;

FOLIO_API folio_status folio_pool_get_stats(folio_pool *pool, folio_pool_stats *stats);

typedef enum folio_block_state {
    FOLIO_BLOCK_FREE = 0,
    FOLIO_BLOCK_USED = 1,
    FOLIO_BLOCK_SHARED = 2,
    FOLIO_BLOCK_CACHED = 3
} folio_block_state;
#define FOLIO_NUM_BLOCK_STATES 4

/** The states of blocks first .. first + n - 1 of tier DEVICE or HOST, for display. states: [n],
 * each a folio_block_state. */
FOLIO_API folio_status folio_pool_get_block_states(folio_pool *pool, folio_tier tier,
                                                   int64_t first, int64_t n, uint8_t *states);

/**
 * Is every block in exactly one state, do the counts add up, does every reference have a holder? The
 * time is linear in blocks, entries and sequences. FOLIO_ERR_INTERNAL: folio_last_error names the
 * first fault.
 */
FOLIO_API folio_status folio_pool_check(folio_pool *pool);

/**
 * Empty the prefix cache in all tiers (new weights, say). Sequences keep their blocks, which do not
 * enter the cache until the sequence is truncated to 0. Waits for transfers under way. Then, unless
 * the pool's wipe is FOLIO_WIPE_NEVER, overwrites with zeros what is free: blocks, host memory, and
 * all frames of the store's file; that takes as long as writing them. On a device the zeros are
 * queued on the pool's stream. FOLIO_ERR_IO, FOLIO_ERR_DEVICE: the cache is empty, but something was
 * not overwritten; call it again.
 */
FOLIO_API folio_status folio_pool_forget(folio_pool *pool);

/* ---------------------------------------------------------------------------------------------- */
/* Sequences                                                                                       */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_sequence_desc {
    size_t struct_size;
    uint64_t salt;      /* a sequence finds prefix-cache entries of its own salt only. Put    */
                        /* into it all that K and V depend on besides the token ids: tenant,  */
                        /* adapter, image, the encoder's input                                */
    int64_t max_tokens; /* block tables are allocated for this many tokens at creation; they  */
                        /* grow as needed                                                     */
} folio_sequence_desc;

/** Where a sequence's K and V are. */
typedef enum folio_sequence_state {
    FOLIO_SEQUENCE_RESIDENT = 0, /* on the device: it can be reserved, batched, forked ...        */
    FOLIO_SEQUENCE_LEAVING = 1,  /* a transfer takes it out                                       */
    FOLIO_SEQUENCE_SWAPPED = 2,  /* in host memory or on disk: swap it in, or destroy it          */
    FOLIO_SEQUENCE_COMING = 3    /* a transfer brings it back, or what it matched in lower tiers  */
} folio_sequence_state;

typedef struct folio_sequence_info {
    size_t struct_size;
    folio_sequence_state state;
    folio_tier tier;       /* where it is, or will be, after its transfer   */
    int64_t len;           /* tokens with a slot                            */
    int64_t committed_len; /* of them, those whose K and V are written      */
    int64_t matched_len;   /* taken from the prefix cache by the last match */
    int64_t encoder_len;
    int64_t encoder_committed_len; /* 0 or encoder_len                      */
    int64_t num_blocks;    /* held, over all groups and the encoder         */
    uint64_t salt;
} folio_sequence_info;

/** The ids of a sequence's tokens, from its first token on. */
typedef struct folio_tokens {
    size_t struct_size;
    int64_t num_tokens;
    const int32_t *ids;       /* [num_tokens]; or NULL, if hash_ids are given                     */
    const uint64_t *hash_ids; /* [num_tokens / block_size]: a number for each full block, which   */
                              /* stands for the ids of its tokens, as in traces                   */
} folio_tokens;

/** desc NULL: no salt. */
FOLIO_API folio_status folio_sequence_create(folio_pool *pool, const folio_sequence_desc *desc,
                                             folio_sequence **out);
/** Give all blocks back; those in the prefix cache stay cached. Waits for its own transfer. */
FOLIO_API void folio_sequence_destroy(folio_sequence *sequence);
FOLIO_API folio_status folio_sequence_get_info(const folio_sequence *sequence,
                                               folio_sequence_info *info);

/**
 * Take the longest cached prefix of these tokens, in whole blocks, 65,536 at most. The sequence must be
 * empty. Every group must have the prefix; a windowed group needs only the blocks that the next token
 * can see.
 * *matched (may be NULL) is the prefix's length in tokens, which becomes the sequence's len and
 * committed_len. To get an output for a prompt's last token, leave that token out: it is then computed.
 * The sequence holds the matched blocks from then on, also if the next reserve is rejected:
 * folio_sequence_truncate to 0, or destroy, gives them back.
 *
 * Blocks found in host memory or on disk are brought back, as many as there are available blocks for.
 * In a pool with windows, either all of them are brought back or none; if none, only blocks on the
 * device are matched. transfer NULL: the call waits. Otherwise *transfer is the handle, or NULL where
 * nothing has to be brought back. Until the transfer has ended the sequence is COMING, and *matched
 * and len are 0; afterwards len is the prefix's length. A frame of the store that cannot be read is
 * not an error: the prefix ends before it; in a pool with windows there is no match.
 */
FOLIO_API folio_status folio_sequence_match(folio_sequence *sequence, const folio_tokens *tokens,
                                            int64_t *matched, folio_transfer **transfer);

/** For new sequences, so that running ones have room to grow. FOLIO_ERR_FULL: fewer blocks than the
 * pool's watermark would stay available. FOLIO_ERR_TOO_LARGE: that would be so even in a pool without
 * any other sequence. */
#define FOLIO_RESERVE_ADMIT 1u

/**
 * Slots for n more tokens, in every group, all or nothing. slots (may be NULL):
 * [num_layer_groups][n]. First, blocks behind the window of a windowed group are released, as
 * folio_sequence_release_window does. If the last block has room but is shared, or is in the prefix
 * cache, the sequence gets a block of its own in its place, and a copy is queued;
 * folio_batch_add_sequences runs it. flags: 0 or FOLIO_RESERVE_ADMIT.
 * @return FOLIO_OK; ERR_FULL; ERR_TOO_LARGE: the sequence would have more than 2^31 - 1 tokens, or
 * more blocks than the pool; ERR_ARGUMENT; ERR_MEMORY. ERR_FULL although there is no other sequence:
 * there is no free block for the copy; preempt this sequence with RECOMPUTE and resume it.
 */
FOLIO_API folio_status folio_sequence_reserve(folio_sequence *sequence, int64_t n, uint32_t flags,
                                              int64_t *slots);

/** Slots for the n encoder tokens that cross attention will read. Rejected if the sequence has
 * encoder tokens already. n is at least 1. slots (may be NULL): [n]. flags as in
 * folio_sequence_reserve. In a batch, the sequence's encoder_new_len is n until the next commit, 0
 * afterwards. Errors are those of folio_sequence_reserve. */
FOLIO_API folio_status folio_sequence_reserve_encoder(folio_sequence *sequence, int64_t n,
                                                      uint32_t flags, int64_t *slots);

/**
 * Say that the K and V of the first num_tokens tokens are written, or will be by work that is queued
 * already. num_tokens lies between committed_len and len. Full blocks enter the prefix cache under
 * their ids. Ids of earlier tokens must stay the same; the call checks this for the last block that
 * entered. If the prefix cache has an equal block already, the sequence takes that one and releases
 * its own: block tables may change.
 *
 * tokens NULL: all of len is committed and nothing enters the prefix cache. After a fork of such a
 * sequence, neither of the two enters anything until it is truncated to 0.
 */
FOLIO_API folio_status folio_sequence_commit(folio_sequence *sequence, const folio_tokens *tokens);

/**
 * Keep the first len tokens, as after rejected drafts; 0: start again. Encoder tokens stay. Rejected
 * if a windowed group has released keys that the next token to compute would see. Truncating tokens
 * of the last reserve always works, committed or not, unless folio_sequence_release_window or a swap
 * came after it.
 */
FOLIO_API folio_status folio_sequence_truncate(folio_sequence *sequence, int64_t len);

/** A second sequence with the same tokens, sharing all blocks, encoder blocks too. All of the
 * first one's tokens must be committed. */
FOLIO_API folio_status folio_sequence_fork(folio_sequence *sequence, folio_sequence **out);

/** Release the blocks of windowed groups that no token from committed_len on can see; their places in
 * the block table hold FOLIO_NO_BLOCK. */
FOLIO_API folio_status folio_sequence_release_window(folio_sequence *sequence);

/** The block table of a group, or of the encoder (FOLIO_LAYER_GROUP_CROSS); valid until the next call
 * that changes the sequence, which must be resident. Without tokens it has 0 blocks. */
FOLIO_API folio_status folio_sequence_get_table(const folio_sequence *sequence, int32_t layer_group,
                                            const int32_t **blocks, int64_t *num_blocks);

/**
 * Append sequences to a batch of one group. query_len is the number of tokens that are reserved but
 * not committed; if it is 0, the sequence has no rows. seq_len is len, the block table is the
 * group's; encoder tokens and their blocks come along. Each sequence must be resident and have a
 * token. The batch has the pool's block size. No entry may be NULL (folio_batch_add adds
 * padding), and no sequence may stand in the batch twice. On error the batch keeps what it had before.
 *
 * All sequences of a batch are of one pool and one group, until folio_batch_clear. Sequences of
 * folio_batch_add, padding aside, need another batch; a mix is rejected. If the group has a
 * cache, folio_attention_forward rejects the batch with any other cache. Without a cache it is a
 * profiling run: K and V are not stored, so do not commit after it. Cross attention takes the pool's
 * cross_cache in the same way.
 *
 * First, the group's queued copies are run on the pool's stream. If the group has no cache and a copy
 * to or from a block of these sequences is queued, the call is rejected: see folio_pool_take_copies.
 *
 * The batch holds copies of the block tables. Every call that changes a sequence's tokens or blocks
 * makes the batch stale: reserve, reserve_encoder, commit, truncate, release_window, swap_out,
 * preempt, destroy. folio_plan_update and folio_attention_forward reject a stale batch; so commit
 * after the step's last forward. folio_batch_clear makes it ready for the next step.
 */
FOLIO_API folio_status folio_batch_add_sequences(folio_batch *batch, int32_t layer_group,
                                                 folio_sequence *const *sequences,
                                                 int64_t num_sequences, const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* Tiers                                                                                           */
/* ---------------------------------------------------------------------------------------------- */

/*
 * Calls that move blocks return a transfer through their last argument; the blocks are moved in the
 * background. With NULL there, they wait and return the transfer's status. A transfer may end with
 * ERR_MEMORY, ERR_IO or ERR_DEVICE; then the blocks are still where they were.
 */

/** 1 once the transfer has ended or failed; 0 before. NULL, a transfer that was not needed, has
 * ended. */
FOLIO_API int folio_transfer_is_done(const folio_transfer *transfer);
/** Waits for the transfer. May be called repeatedly and returns the same status; NULL: FOLIO_OK. */
FOLIO_API folio_status folio_transfer_wait(folio_transfer *transfer);
/** Drops the handle; the transfer itself goes on. */
FOLIO_API void folio_transfer_destroy(folio_transfer *transfer);

/**
 * Move a resident sequence to host memory or to the store. All its tokens must be committed. Its
 * blocks on the device are released when the transfer has ended, not before. Encoder blocks are moved
 * too. Blocks behind windows are released first, and queued copies are run. A sequence in host memory
 * may go on to DISK. FOLIO_ERR_FULL: the tier has too little room now. FOLIO_ERR_TOO_LARGE: the
 * sequence has more blocks than the tier.
 */
FOLIO_API folio_status folio_sequence_swap_out(folio_sequence *sequence, folio_tier tier,
                                               const folio_run *run, folio_transfer **transfer);

/**
 * Bring a swapped sequence back. FOLIO_ERR_FULL: too few available blocks; it stays where it is. If
 * a frame of the store cannot be read, the sequence comes back shorter: len says how long, 0 in a
 * pool with windows. Compute the rest again. If an encoder's frame is lost, encoder_len is 0.
 */
FOLIO_API folio_status folio_sequence_swap_in(folio_sequence *sequence, const folio_run *run,
                                              folio_transfer **transfer);

typedef enum folio_preemption {
    FOLIO_PREEMPT_RECOMPUTE = 0, /* give all blocks back; len and encoder_len are 0              */
    FOLIO_PREEMPT_SWAP = 1       /* swap out to the first lower tier with room                   */
} folio_preemption;

/**
 * Take a sequence's blocks away; folio_sequence_resume brings it back. The sequence must be RESIDENT:
 * in any other state the call returns FOLIO_ERR_ARGUMENT; wait for its transfer first. RECOMPUTE
 * frees the blocks at once, and *transfer is NULL. SWAP frees them when the transfer has ended, not
 * before. Tokens that are not committed are dropped first, even if the swap then fails.
 * FOLIO_ERR_FULL: the tiers have no room now. FOLIO_ERR_TOO_LARGE: no tier could ever hold it. A pool
 * without tiers rejects SWAP with FOLIO_ERR_ARGUMENT; nothing is dropped.
 */
FOLIO_API folio_status folio_sequence_preempt(folio_sequence *sequence, folio_preemption policy,
                                              const folio_run *run, folio_transfer **transfer);

/**
 * Bring a preempted sequence back, however it was preempted. A swapped one is swapped in, as
 * folio_sequence_swap_in does. An empty one takes what the prefix cache has of the tokens, as
 * folio_sequence_match does; tokens NULL: nothing is looked up. A resident sequence with tokens stays
 * as it is. *computed (may be NULL) is its committed_len: compute the tokens after it. While a
 * transfer brings the sequence back, *computed is 0; call folio_sequence_get_info when it has ended.
 * encoder_len 0 means that the encoder's tokens are gone too.
 *
 * It may be called again. A transfer that is bringing the sequence back is waited for, or handed out
 * once more; a transfer that is taking it out is waited for.
 * @return as folio_sequence_swap_in and folio_sequence_match; FOLIO_ERR_FULL: it stays where it is.
 */
FOLIO_API folio_status folio_sequence_resume(folio_sequence *sequence, const folio_tokens *tokens,
                                             int64_t *computed, const folio_run *run,
                                             folio_transfer **transfer);

/**
 * Move up to max_blocks cached blocks one tier down, least recently used first. HOST: from the
 * device. DISK: from host memory, or from the device if there is no host tier. *num_blocks (may be
 * NULL) is how many go. When the transfer has ended, their old places are free and
 * folio_sequence_match finds them in the new tier. While a transfer takes them from the device, it
 * does not find them. If cached host blocks must make room and there is a store, they go to the
 * store.
 */
FOLIO_API folio_status folio_pool_swap_out(folio_pool *pool, folio_tier tier, int64_t max_blocks,
                                           const folio_run *run, int64_t *num_blocks,
                                           folio_transfer **transfer);

#ifdef __cplusplus
}
#endif

#endif /* FOLIO_FOLIO_POOL_H */
