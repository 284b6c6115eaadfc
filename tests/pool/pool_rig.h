/* pool_rig.h: what the suites of KV memory share: a pool with a log of its events, and short forms of its calls. */
#ifndef FOLIO_TESTS_POOL_RIG_H
#define FOLIO_TESTS_POOL_RIG_H

#include "support.h"

#include <folio/folio_pool.h>

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

/* A test on a pool that is described by these fields: opened before the body, closed after it. */
typedef void (*pool_body)(pool_rig *r, folio_pool *pool);
void pool_rig_run(folio_pool_desc desc, pool_body body);
#define POOL_TEST(suite, name, ...)                                                                \
    static void on_pool_##suite##_##name(pool_rig *r, folio_pool *pool);                           \
    TEST(suite, name) { pool_rig_run((folio_pool_desc){__VA_ARGS__}, on_pool_##suite##_##name); }  \
    static void on_pool_##suite##_##name(__attribute__((unused)) pool_rig *r,                      \
                                         __attribute__((unused)) folio_pool *pool)

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
/* Of the pool, and of a sequence unless it is NULL: a refused call leaves them as they were. */
typedef struct pool_counts {
    folio_pool_stats stats;
    folio_sequence_info info;
} pool_counts;
pool_counts pool_count(folio_pool *pool, const folio_sequence *sequence);
#define REFUSED_BY(pool, sequence, call, status, words)                                            \
    do {                                                                                           \
        pool_counts before_ = pool_count(pool, sequence);                                          \
        REFUSED(call, status, words);                                                              \
        pool_counts after_ = pool_count(pool, sequence);                                           \
        CHECK_MSG(memcmp(&before_, &after_, sizeof before_) == 0, "%s changed a count", #call);    \
    } while (0)
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

#endif
