/* pool.c: the blocks of a pool's tiers: links and events, taking and giving back, by hand too; queued copies. */
#include "cache/pool.h"

#include "core/tensor.h"

#include <stdio.h>
#include <string.h>

/* Before others can look at the pool. */
static folio_status check_if_asked(folio_pool *pool)
{
    folio_status found = pool->check != NULL ? pool->check(pool) : FOLIO_OK;
    return found == FOLIO_ERR_MEMORY ? FOLIO_OK : found; /* without memory there is no check */
}

folio_status folioi_pool_unlock(folio_pool *pool, folio_status status)
{
    if (status == FOLIO_OK) status = check_if_asked(pool);
    if (!pool_fills_freed(pool)) { /* nothing else can change the error's text */
        pthread_mutex_unlock(&pool->lock);
        return status;
    }
    char text[1024];
    snprintf(text, sizeof text, "%s", folio_last_error());
    (void)folioi_pool_wipe_freed(pool);
    pthread_mutex_unlock(&pool->lock);
    if (pool->store != NULL && pool_wipes_freed(pool)) (void)folioi_store_wipe(pool->store);
    return status == FOLIO_OK ? status : folioi_fail(status, "%s", text);
}

folio_status folioi_pool_give_way(folio_pool *pool)
{
    TRY(check_if_asked(pool));
    pthread_mutex_unlock(&pool->lock);
    wait_for_lock(pool);
    return FOLIO_OK;
}

void folioi_pool_set_hash_bits(folio_pool *pool, int bits)
{
    pool->index.key_mask = bits >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << bits) - 1;
}

/* ----------------------------------------------------------------------------- links and events */

void folioi_pool_emit(folio_pool *pool, folio_cache_event_kind kind, folio_tier tier,
                      const folioi_frame_id *id, int64_t block)
{
    if (pool->on_event == NULL) return;
    folio_cache_event e =
        FOLIO_WITH(folio_cache_event, .kind = kind, .tier = tier, .layer_group = id->group,
                   .block = block, .hash = {id->key.word[0], id->key.word[1]},
                   .parent = {id->parent.word[0], id->parent.word[1]}, .salt = id->salt);
    if (id->hashed && id->ids != NULL) {
        memcpy(&e.hash_id, id->ids, 8);
    } else if (id->ids != NULL) {
        e.token_ids = id->ids;
        e.num_tokens = pool->block_size;
    }
    pool->on_event(pool->event_user, &e);
}

static void emit_node(folio_pool *pool, folio_cache_event_kind kind, int tier, int32_t node,
                      int32_t group, int64_t block)
{
    if (pool->on_event == NULL) return;
    folioi_frame_id id = node_id(&pool->index, node, group);
    folioi_pool_emit(pool, kind, (folio_tier)tier, &id, block);
}

void folioi_pool_link(folio_pool *pool, int tier, int32_t node, int32_t group, int32_t block)
{
    folioi_block *k = &tier_blocks(pool, tier)->block[block];
    k->node = node;
    k->group = group;
    index_set_link(&pool->index, node, tier, group, block);
    emit_node(pool, FOLIO_EVENT_STORED, tier, node, group, block);
}

void folioi_pool_unlink(folio_pool *pool, int tier, int32_t block)
{
    folioi_blocks *blocks = tier_blocks(pool, tier);
    folioi_block *k = &blocks->block[block];
    int32_t node = k->node, group = k->group;
    emit_node(pool, FOLIO_EVENT_REMOVED, tier, node, group, block);
    index_clear_link(&pool->index, node, tier, group);
    blocks_forget(blocks, block);
}

/* ----------------------------------------------------------------------- taking and giving back */

int32_t folioi_pool_take(folio_pool *pool, int tier, int32_t group)
{
    folioi_blocks *b = tier_blocks(pool, tier);
    if (b->num_free == 0) {
        int32_t oldest = b->oldest, node = b->block[oldest].node;
        folioi_pool_unlink(pool, tier, oldest);
        folioi_index_prune(&pool->index, node);
        b->evictions++;
    }
    /* Evicted just now, or freed by this very call. A host block is written whole, after it may have gone to the store. */
    if (pool->ctx->poison && tier == TIER_DEVICE) blocks_soil(b);
    if (pool_fills_freed(pool) && tier == TIER_DEVICE)
        (void)folioi_pool_wipe(pool, tier, b->num_free);
    return blocks_take(b, group);
}

/* Where an unheld block of the index belongs in the list, so that leaves come before parents: before the
 * cached block *next, or at the end (NONE). False: a block before it is gone, so nobody can reach it. */
static bool find_place(folio_pool *pool, int32_t block, int32_t *next)
{
    const folioi_block *k = &pool->device.block[block];
    *next = NONE;
    if (k->node == NONE || pool->window[k->group] != 0) return true;
    int32_t node = index_node(&pool->index, k->node)->parent;
    for (; node != NONE; node = index_node(&pool->index, node)->parent) {
        int32_t b = index_block(&pool->index, node, TIER_DEVICE, k->group);
        if (b == NONE) return false;
        if (block_is_held(&pool->device.block[b])) continue;
        *next = b;
        return true;
    }
    return true;
}

int32_t folioi_pool_prepare_rest(folio_pool *pool, int32_t block)
{
    const folioi_block *k = &pool->device.block[block];
    int32_t next = NONE, node = k->node;
    if (k->refs + k->reads > 1 || node == NONE || find_place(pool, block, &next)) return next;
    folioi_pool_unlink(pool, TIER_DEVICE, block);
    folioi_index_prune(&pool->index, node);
    return NONE;
}

/* Take a queued copy away; the last one of its queue moves to its place. */
static void remove_copy(folio_pool *pool, folioi_copies *queue, int32_t i)
{
    folio_block_pair *pairs = queue->pairs.data;
    int32_t from = (int32_t)pairs[i].from;
    pool->device.block[pairs[i].to].copy = NONE;
    queue->num--;
    if (i != queue->num) {
        pairs[i] = pairs[queue->num];
        pool->device.block[pairs[i].to].copy = i;
    }
    blocks_read_end(&pool->device, from, folioi_pool_prepare_rest(pool, from));
}

void folioi_pool_release(folio_pool *pool, int32_t block)
{
    folioi_block *k = &pool->device.block[block];
    if (k->copy != NONE && k->refs == 1) remove_copy(pool, &pool->copies[k->group], k->copy);
    blocks_release(&pool->device, block);
}

/* ------------------------------------------------------------------------------- blocks by hand */

/* By a caller, who may hold a block and none of those before it, as no sequence does. */
static void release_by_hand(folio_pool *pool, int32_t block)
{
    if (pool->device.block[block].node == NONE) folioi_pool_release(pool, block);
    else blocks_release_before(&pool->device, block, folioi_pool_prepare_rest(pool, block));
}

folio_status folio_pool_alloc(folio_pool *pool, int64_t n, int32_t *blocks)
{
    REQUIRE(pool != NULL, "folio_pool_alloc: pool is NULL");
    REQUIRE(n >= 0, "folio_pool_alloc: n is %lld; it must be at least 0", (long long)n);
    REQUIRE(n == 0 || blocks != NULL, "folio_pool_alloc: blocks is NULL");
    pool_lock(pool);
    int64_t available = blocks_available(&pool->device);
    if (n > available) {
        pthread_mutex_unlock(&pool->lock);
        if (n > pool->device.num)
            FAIL(FOLIO_ERR_TOO_LARGE, "folio_pool_alloc: n is %lld, the pool has %lld blocks",
                 (long long)n, (long long)pool->device.num);
        FAIL(FOLIO_ERR_FULL, "folio_pool_alloc: %lld blocks are needed, %lld of %lld are available",
             (long long)n, (long long)available, (long long)pool->device.num);
    }
    for (int64_t i = 0; i < n; i++) {
        blocks[i] = folioi_pool_take(pool, TIER_DEVICE, NONE);
        pool->device.block[blocks[i]].hand = 1;
    }
    return folioi_pool_unlock(pool, FOLIO_OK);
}

/* Each block has a caller's reference for each time it comes; else the first that has not. */
static int64_t first_unheld(folio_pool *pool, int64_t n, const int32_t *blocks)
{
    int64_t bad = 0;
    for (; bad < n; bad++) {
        if (blocks[bad] < 0 || blocks[bad] >= pool->device.num) break;
        if (pool->device.block[blocks[bad]].hand == 0) break;
        pool->device.block[blocks[bad]].hand--;
    }
    for (int64_t i = 0; i < bad; i++) pool->device.block[blocks[i]].hand++;
    return bad;
}

static folio_status by_hand(folio_pool *pool, int64_t n, const int32_t *blocks, bool retain)
{
    const char *call = retain ? "folio_pool_retain" : "folio_pool_release";
    REQUIRE(pool != NULL, "%s: pool is NULL", call);
    REQUIRE(n >= 0, "%s: n is %lld; it must be at least 0", call, (long long)n);
    REQUIRE(n == 0 || blocks != NULL, "%s: blocks is NULL", call);
    pool_lock(pool);
    int64_t bad = 0;
    if (retain)
        while (bad < n && blocks[bad] >= 0 && blocks[bad] < pool->device.num &&
               pool->device.block[blocks[bad]].refs > 0)
            bad++;
    else bad = first_unheld(pool, n, blocks);
    if (bad < n) {
        pthread_mutex_unlock(&pool->lock);
        REQUIRE(blocks[bad] >= 0 && blocks[bad] < pool->device.num,
                "%s: blocks[%lld] = %d is outside [0, %lld)", call, (long long)bad, blocks[bad],
                (long long)pool->device.num);
        FAIL(FOLIO_ERR_ARGUMENT, "%s: blocks[%lld] = %d is not held%s", call, (long long)bad,
             blocks[bad], retain ? "" : " by a caller, or is listed more often than it is held");
    }
    for (int64_t i = 0; i < n; i++) {
        pool->device.block[blocks[i]].hand += retain ? 1 : -1;
        if (retain) blocks_retain(&pool->device, blocks[i]);
        else release_by_hand(pool, blocks[i]);
    }
    return folioi_pool_unlock(pool, FOLIO_OK);
}

folio_status folio_pool_retain(folio_pool *pool, int64_t n, const int32_t *blocks)
{
    return by_hand(pool, n, blocks, true);
}

folio_status folio_pool_release(folio_pool *pool, int64_t n, const int32_t *blocks)
{
    return by_hand(pool, n, blocks, false);
}

/* ---------------------------------------------------------------------------------------- copies */

static int64_t take_copies(folio_pool *pool, int32_t group, int64_t capacity,
                           folio_block_pair *pairs)
{
    folioi_copies *queue = &pool->copies[group];
    int64_t n = 0;
    for (; n < capacity && queue->num > 0; n++) {
        pairs[n] = ((const folio_block_pair *)queue->pairs.data)[queue->num - 1];
        remove_copy(pool, queue, (int32_t)(queue->num - 1));
    }
    return n;
}

folio_status folio_pool_take_copies(folio_pool *pool, int32_t group, int64_t capacity,
                                    folio_block_pair *pairs, int64_t *num_pairs)
{
    REQUIRE(pool != NULL, "folio_pool_take_copies: pool is NULL");
    REQUIRE(group >= 0 && group < pool->num_layer_groups,
            "take_copies: group %d is outside [0, %d)", group, pool->num_layer_groups);
    REQUIRE(capacity >= 0, "take_copies: capacity is %lld; it must be at least 0",
            (long long)capacity);
    REQUIRE(capacity == 0 || pairs != NULL, "take_copies: pairs is NULL, and capacity is %lld",
            (long long)capacity);
    REQUIRE(num_pairs != NULL, "take_copies: num_pairs is NULL");
    REQUIRE(
        !pool_fills_freed(pool) || pool->cache[group] == NULL,
        "take_copies: group %d has a cache, and the pool overwrites what it frees: the source may "
        "be gone before its copy; use folio_pool_run_copies",
        group);
    pool_lock(pool);
    *num_pairs = take_copies(pool, group, capacity, pairs);
    return folioi_pool_unlock(pool, FOLIO_OK);
}

folio_status folioi_pool_run_in(const folio_pool *pool, const folio_run *run)
{
    folio_run r;
    TRY(folioi_run_in(pool->ctx, run, &r));
    REQUIRE(r.stream == NULL || r.stream == pool->stream,
            "run: stream is not the pool's own (folio_pool_desc.stream), where all its copies go");
    return FOLIO_OK;
}

folio_status folioi_pool_run_group_copies(folio_pool *pool, int32_t group)
{
    enum { CHUNK = 256 };
    folio_block_pair pairs[CHUNK];
    folio_run run = pool_run(pool);
    folio_kv_cache *cache = pool->cache[group];
    folioi_copies *queue = &pool->copies[group];
    REQUIRE(queue->num == 0 || cache != NULL, "run_copies: group %d has no cache; take its copies",
            group);
    while (queue->num > 0) {
        int64_t n = min_i64(CHUNK, queue->num);
        memcpy(pairs, (const folio_block_pair *)queue->pairs.data + (queue->num - n),
               (size_t)n * sizeof pairs[0]);
        TRY(folio_kv_cache_copy_blocks(cache, cache, pairs, n, &run));
        take_copies(pool, group, n, pairs);
    }
    return FOLIO_OK;
}

folio_status folioi_pool_run_copies(folio_pool *pool)
{
    for (int32_t g = 0; g < pool->num_layer_groups; g++) TRY(folioi_pool_run_group_copies(pool, g));
    return FOLIO_OK;
}

folio_status folio_pool_run_copies(folio_pool *pool, const folio_run *run)
{
    REQUIRE(pool != NULL, "folio_pool_run_copies: pool is NULL");
    TRY(folioi_pool_run_in(pool, run));
    pool_lock(pool);
    return folioi_pool_unlock(pool, folioi_pool_run_copies(pool));
}
