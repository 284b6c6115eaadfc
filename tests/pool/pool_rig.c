/* pool_rig.c: short forms of the pool's calls. */
#include "pool/pool_rig.h"

#include <stdlib.h>

static void log_event(void *user, const folio_cache_event *event)
{
    pool_rig *rig = user;
    if (rig->num_events == rig->capacity) {
        rig->capacity = 2 * rig->capacity + 64;
        rig->events = realloc(rig->events, (size_t)rig->capacity * sizeof *rig->events);
        if (rig->events == NULL) abort();
    }
    pool_event *e = &rig->events[rig->num_events++];
    *e = (pool_event){.e = *event, .has_ids = event->token_ids != NULL};
    for (int i = 0; e->has_ids && i < event->num_tokens && i < POOL_EVENT_TOKENS; i++)
        e->tokens[i] = event->token_ids[i];
    e->e.token_ids = NULL;
}

bool pool_rig_open(pool_rig *rig, folio_pool_desc desc)
{
    return pool_rig_open_on(rig, support_context("reference", 1, NULL), desc);
}

bool pool_rig_open_on(pool_rig *rig, folio_context *ctx, folio_pool_desc desc)
{
    *rig = (pool_rig){.ctx = ctx};
    if (rig->ctx == NULL) return false;
    desc.struct_size = sizeof desc;
    if (desc.on_event == NULL) {
        desc.on_event = log_event;
        desc.event_user = rig;
    }
    CHECK_OK(folio_pool_create(rig->ctx, &desc, &rig->pool));
    if (rig->pool != NULL) return true;
    folio_context_destroy(rig->ctx);
    return false;
}

void pool_rig_close(pool_rig *rig)
{
    CHECK_OK(folio_pool_check(rig->pool));
    folio_pool_destroy(rig->pool);
    for (int i = 0; i < POOL_RIG_CACHES; i++) folio_kv_cache_destroy(rig->caches[i]);
    folio_context_destroy(rig->ctx);
    free(rig->events);
    *rig = (pool_rig){0};
}

void pool_rig_run(folio_pool_desc desc, pool_body body)
{
    pool_rig r;
    REQUIRE_TEST(pool_rig_open(&r, desc));
    body(&r, r.pool);
    pool_rig_close(&r);
}

folio_pool_stats pool_stats(folio_pool *pool)
{
    folio_pool_stats stats = {.struct_size = sizeof stats};
    CHECK_OK(folio_pool_get_stats(pool, &stats));
    return stats;
}

folio_sequence *pool_sequence(folio_pool *pool, uint64_t salt)
{
    folio_sequence_desc desc = {.struct_size = sizeof desc, .salt = salt};
    folio_sequence *sequence = NULL;
    CHECK_OK(folio_sequence_create(pool, &desc, &sequence));
    if (sequence == NULL) abort();
    return sequence;
}

folio_sequence_info pool_info(const folio_sequence *sequence)
{
    folio_sequence_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_sequence_get_info(sequence, &info));
    return info;
}

pool_counts pool_count(folio_pool *pool, const folio_sequence *sequence)
{
    pool_counts c;
    memset(&c, 0, sizeof c);
    c.stats = pool_stats(pool);
    if (sequence != NULL) c.info = pool_info(sequence);
    return c;
}

folio_tokens pool_tokens(const int32_t *ids, int64_t num_tokens)
{
    return FOLIO_WITH(folio_tokens, .num_tokens = num_tokens, .ids = ids);
}

const int32_t *pool_table(const folio_sequence *sequence, int32_t group, int64_t *num_blocks)
{
    const int32_t *blocks = NULL;
    int64_t n = 0;
    CHECK_OK(folio_sequence_get_table(sequence, group, &blocks, &n));
    if (num_blocks != NULL) *num_blocks = n;
    return blocks;
}

void pool_grow(folio_sequence *sequence, const int32_t *ids, int64_t num_tokens)
{
    int64_t more = num_tokens - pool_info(sequence).len;
    if (more > 0) CHECK_OK(folio_sequence_reserve(sequence, more, 0, NULL));
    folio_tokens tokens = pool_tokens(ids, num_tokens);
    CHECK_OK(folio_sequence_commit(sequence, &tokens));
}

int64_t pool_matches(folio_pool *pool, uint64_t salt, const int32_t *ids, int64_t num_tokens)
{
    folio_sequence *sequence = pool_sequence(pool, salt);
    folio_tokens tokens = pool_tokens(ids, num_tokens);
    int64_t matched = -1;
    CHECK_OK(folio_sequence_match(sequence, &tokens, &matched, NULL));
    folio_sequence_destroy(sequence);
    return matched;
}

folio_block_state pool_state_of(folio_pool *pool, int32_t block)
{
    uint8_t state = 0xFF;
    CHECK_OK(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, block, 1, &state));
    return (folio_block_state)state;
}

folio_sequence *pool_plain(folio_pool *pool, int64_t num_tokens)
{
    folio_sequence *sequence = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(sequence, num_tokens, 0, NULL));
    CHECK_OK(folio_sequence_commit(sequence, NULL));
    return sequence;
}

folio_sequence *pool_fork(folio_sequence *sequence)
{
    folio_sequence *out = NULL;
    CHECK_OK(folio_sequence_fork(sequence, &out));
    if (out == NULL) abort();
    return out;
}

const int32_t *pool_counting_ids(void)
{
    static int32_t ids[POOL_COUNTING_IDS];
    for (int i = 0; i < POOL_COUNTING_IDS; i++) ids[i] = i;
    return ids;
}

bool pool_pairs_fit(const folio_block_pair *pairs, int64_t num_pairs)
{
    for (int64_t i = 0; i < num_pairs; i++)
        for (int64_t j = 0; j < num_pairs; j++) {
            if (i != j && pairs[i].to == pairs[j].to) return false;
            if (pairs[i].from == pairs[j].to) return false;
        }
    return true;
}

int64_t pool_first_seen(int64_t token, int64_t window)
{
    return window == 0 || token < window ? 0 : token - window + 1;
}
