/*
 * pool_model.h: what the suites of the KV memory share. First a pool with a log of its events and
 * short forms of its calls. Then a naive model: for every slot a shadow number that stands for all
 * its K and V depend on (salt, weights, the tokens up to it, the group), and who holds which block.
 * It makes random calls and says beforehand, from the header only, what each must do.
 */
#ifndef FOLIO_TESTS_POOL_MODEL_H
#define FOLIO_TESTS_POOL_MODEL_H

#include "support.h"

#include <folio/folio_pool.h>

/* ------------------------------------------------------------------------------------------ rig */

enum { POOL_EVENT_TOKENS = 32, POOL_RIG_CACHES = 2 };

typedef struct pool_event {
    folio_cache_event e; /* token_ids points nowhere after the callback; tokens holds them */
    bool has_ids;
    int32_t tokens[POOL_EVENT_TOKENS];
} pool_event;

typedef struct pool_rig {
    folio_context *ctx;
    folio_pool *pool;
    folio_kv_cache *caches[POOL_RIG_CACHES]; /* the test's; destroyed after the pool */
    pool_event *events;
    int64_t num_events, capacity;
} pool_rig;

/* A context and a pool; struct_size is filled in, and on_event where it is NULL. */
bool pool_rig_open(pool_rig *rig, folio_pool_desc desc);
/* The same on a context of the caller's, which the rig destroys. */
bool pool_rig_open_on(pool_rig *rig, folio_context *ctx, folio_pool_desc desc);
/* folio_pool_check finds nothing; then all is destroyed. */
void pool_rig_close(pool_rig *rig);

folio_pool_stats pool_stats(folio_pool *pool);
folio_sequence *pool_sequence(folio_pool *pool, uint64_t salt);
folio_sequence_info pool_info(const folio_sequence *sequence);
folio_tokens pool_tokens(const int32_t *ids, int64_t num_tokens);
/* The group's block table; *num_blocks may be NULL. */
const int32_t *pool_table(const folio_sequence *sequence, int32_t group, int64_t *num_blocks);
/* Reserve slots up to num_tokens and commit all of it under ids. */
void pool_grow(folio_sequence *sequence, const int32_t *ids, int64_t num_tokens);
/* Tokens in the prefix cache, by a sequence that matches and goes. */
int64_t pool_matches(folio_pool *pool, uint64_t salt, const int32_t *ids, int64_t num_tokens);
folio_block_state pool_state_of(folio_pool *pool, int32_t block);
/* A sequence of so many committed tokens, none of them indexed; a fork of one. Never NULL. */
folio_sequence *pool_plain(folio_pool *pool, int64_t num_tokens);
folio_sequence *pool_fork(folio_sequence *sequence);
/* 0, 1, 2 ... */
enum { POOL_COUNTING_IDS = 4096 };
const int32_t *pool_counting_ids(void);
/* May folio_kv_cache_copy_blocks be called with them? */
bool pool_pairs_fit(const folio_block_pair *pairs, int64_t num_pairs);
/* The first key that token number `token` sees; window 0: all. */
int64_t pool_first_seen(int64_t token, int64_t window);

/* ---------------------------------------------------------------------------------------- model */

enum {
    MODEL_GROUPS = 3,
    MODEL_SEQS = 12,
    MODEL_LEN = 256,
    MODEL_BLOCKS = 200,
    MODEL_DOCS = 6,
    MODEL_HELD = 48
};

typedef struct model_config {
    int64_t num_blocks;
    int32_t block_size, num_layer_groups;
    int64_t window[MODEL_GROUPS];
    int64_t watermark;
    int32_t vocabulary, num_salts;
    int64_t max_len; /* of a sequence                           */
    bool hash_ids;   /* folio_tokens.hash_ids in place of ids   */
    int hash_bits;   /* of the prefix cache's hashes; 0: all    */
    uint32_t flags;
} model_config;

/* May the blocks of a sequence be indexed? */
typedef enum model_taint {
    MODEL_CLEAN,
    MODEL_TAINTED, /* it has tokens since before folio_pool_forget: never           */
    MODEL_LOOSE    /* the header leaves it open: rightly indexed, or not at all     */
} model_taint;

typedef struct model_seq {
    folio_sequence *seq; /* NULL: this place is empty */
    uint64_t salt;
    int doc; /* whose tokens it follows, mostly */
    model_taint taint;
    int64_t len, committed, written;
    int64_t gone[MODEL_GROUPS]; /* so many of its first tokens have no key any more */
    int32_t tokens[MODEL_LEN];
    uint64_t chain[MODEL_LEN]; /* stands for all tokens up to this one, without the group */
    int32_t table[MODEL_GROUPS][MODEL_LEN];
} model_seq;

typedef struct model_pair {
    int32_t group;
    int32_t from, to;
} model_pair;

typedef struct model {
    model_config config;
    folio_context *ctx;
    folio_pool *pool;
    uint64_t seed, draws;
    int64_t op;
    const char *op_name;
    bool failed;
    uint64_t epoch;           /* of the weights: grows when the prefix cache is forgotten */
    _Atomic uint64_t *shadow; /* [num_blocks][block_size] */
    int32_t docs[MODEL_DOCS][MODEL_LEN];
    model_seq seqs[MODEL_SEQS];
    model_pair pairs[MODEL_BLOCKS]; /* waiting copies */
    int64_t num_pairs;
    int32_t held[MODEL_HELD]; /* references held by hand */
    int64_t num_held;
    int32_t by_table[MODEL_BLOCKS], by_hand[MODEL_BLOCKS]; /* holders */
    int32_t refs[MODEL_BLOCKS];    /* holders, and waiting copies that will read it */
    int32_t floor[MODEL_BLOCKS];   /* refs when a call has let go what it lets go first */
    uint64_t guard[MODEL_BLOCKS];  /* of blocks held by hand: what nobody may write over */
    int32_t indexed[MODEL_BLOCKS]; /* group + 1; 0: not in the prefix cache */
    uint64_t last[MODEL_BLOCKS], before[MODEL_BLOCKS]; /* chain at its end, and before it */
    uint64_t index_salt[MODEL_BLOCKS];
    int64_t num_indexed;
    model_seq *committing; /* by the call under way, up to: */
    int64_t commit_len;
    bool forgetting, releasing;      /* by the call under way */
    int64_t stored_now, removed_now; /* events of the call under way */
    int64_t allocations, evictions, lookups, hits, peak;
    /* how often the interesting things happened */
    int64_t num_full, num_copies, num_same, num_matched, num_refused, num_windowed;
} model;

/* A configuration of its own for every seed. */
model_config model_config_of(uint64_t seed);
/* Random numbers of a seed: [0, n). */
int64_t model_draw(model *m, int64_t n);
bool model_open(model *m, const model_config *config, uint64_t seed);
/* With another listener than the model itself. */
bool model_open_with(model *m, const model_config *config, uint64_t seed, folio_event_fn listener,
                     void *user);
void model_close(model *m);

/* Says what, where and how to see it again; the run ends. */
void model_fail(model *m, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define EXPECT(cond, ...)                                                                          \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            model_fail(m, __FILE__, __LINE__, __VA_ARGS__);                                        \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define EXPECT_STATUS(call, wanted)                                                                \
    do {                                                                                           \
        folio_status got_ = (call), wanted_ = (wanted);                                            \
        EXPECT(got_ == wanted_, "%s, expected %s: %s", folio_status_name(got_),                    \
               folio_status_name(wanted_), folio_last_error());                                    \
    } while (0)
#define EXPECT_SAME(what, got, wanted)                                                             \
    EXPECT((got) == (wanted), "%s is %lld, expected %lld", what, (long long)(got),                 \
           (long long)(wanted))

/* What a token's key is in the shadow memory, and how a chain goes on. */
uint64_t model_chain(uint64_t before, int32_t token, uint64_t epoch);
uint64_t model_start(uint64_t salt);
uint64_t model_key(uint64_t chain, int32_t group);
/* The chain before token number `at`. */
uint64_t model_chain_before(const model_seq *s, int64_t at);
_Atomic uint64_t *model_shadow_of(model *m, int32_t block);
int64_t model_blocks_for(const model *m, int64_t tokens);

/* Where the content of a block is, while copies wait. */
int32_t model_source_of(const model *m, int32_t block);
/* Counts the holders of every block. A copy into a block that nobody holds is off. */
void model_recount(model *m);
int64_t model_count_free(const model *m, const int32_t *refs);
int64_t model_count_available(const model *m, const int32_t *refs);
/* The block a group's prefix cache has under this chain; -1: none. */
int32_t model_find_block(const model *m, int group, uint64_t chain);
/* Of what a block holds in the shadow memory. */
uint64_t model_guard_of(model *m, int32_t block);
/* Stands for the tokens of a block where hash_ids are given. */
uint64_t model_hash_id_of(const model *m, const int32_t *tokens);
/* Is everything in the pool as the model has it? */
void model_check(model *m);

#endif
