/*
 * forget.c: empties the prefix cache, of all salts or of one, and overwrites what free blocks hold with zeros, or NaN in
 * poison mode: with a blank block of each cache's own kind. move_blocks knows every layout, and where a device has its
 * streams.
 */
#include "cache/kv_cache.h"
#include "cache/sequence.h"
#include "cache/transfer.h"

#include <string.h>

/* ----------------------------------------------------------------------------------------- forget */

typedef struct {
    folio_pool *pool;
    const uint64_t *salt;
} forgotten;

static void frame_gone(void *user, const folioi_frame_id *id)
{
    const forgotten *f = user;
    if (f->salt == NULL || *f->salt == id->salt)
        folioi_pool_emit(f->pool, FOLIO_EVENT_REMOVED, FOLIO_TIER_DISK, id, -1);
}

folio_status folioi_pool_forget(folio_pool *pool, const uint64_t *salt)
{
    for (int tier = 0; tier < NUM_LINKED_TIERS; tier++) {
        folioi_blocks *b = tier_blocks(pool, tier);
        for (int32_t i = 0; i < b->num; i++) {
            int32_t node = b->block[i].node;
            if (node == NONE) continue;
            if (salt != NULL && index_node(&pool->index, node)->salt != *salt) continue;
            folioi_pool_unlink(pool, tier, i);
            folioi_index_prune(&pool->index, node);
        }
    }
    for (folio_sequence *s = pool->sequences; s != NULL; s = s->next)
        if (salt == NULL || s->salt == *salt) s->stale = s->len > 0;
    if (pool->store == NULL) return FOLIO_OK;
    forgotten f = {pool, salt};
    folioi_store_each(pool->store, frame_gone, &f);
    if (salt == NULL) return folioi_store_forget(pool->store);
    folioi_store_forget_salt(pool->store, *salt);
    return FOLIO_OK;
}

/* ------------------------------------------------------------------------------------------- wipe */

/* A NaN in every type, by the scales in INT8; so also where caches of several types share memory. */
enum { POISON_BYTE = 0xFF };

folio_status folioi_pool_make_blanks(folio_pool *pool)
{
    int byte = pool->ctx->poison ? POISON_BYTE : 0;
    for (int32_t t = 0; t <= pool->cross; t++) {
        if (pool->cache[t] == NULL || pool->blank[t] != NULL) continue;
        folio_kv_cache_desc desc = pool->cache[t]->format.desc;
        desc.num_blocks = 1;
        if (desc.layout == FOLIO_LAYOUT_STRIDED) desc.layout = FOLIO_LAYOUT_NHD;
        folio_kv_cache *blank;
        TRY(folio_kv_cache_create(pool->ctx, &desc, &blank));
        folio_status status = pool->ctx->backend->fill(pool->ctx, blank->memory, byte,
                                                       (size_t)blank->memory_bytes, pool->stream);
        pool->wiping = true;
        if (status == FOLIO_OK) pool->blank[t] = blank;
        else folio_kv_cache_destroy(blank);
        TRY(status);
    }
    return FOLIO_OK;
}

/* The caches that free blocks of a tier hold K and V in. */
static folio_kv_cache *tier_cache(const folio_pool *pool, int tier, int32_t table)
{
    return tier == TIER_DEVICE ? pool->cache[table] : pool->frames.cache[table];
}

enum { CHUNK = 64 };

folio_status folioi_pool_wipe(folio_pool *pool, int tier, int64_t limit)
{
    folioi_blocks *b = tier_blocks(pool, tier);
    while (limit > 0 && b->num_clean < b->num_free) {
        const int32_t *blocks = b->free_stack + b->num_clean;
        int64_t n = min_i64(min_i64(CHUNK, limit), b->num_free - b->num_clean);
        for (int32_t t = 0; t <= pool->cross; t++) {
            folio_block_pair pairs[CHUNK];
            int64_t num = 0;
            for (int64_t i = 0; i < n; i++)
                if (b->block[blocks[i]].dirty >> t & 1)
                    pairs[num++] = (folio_block_pair){0, blocks[i]};
            if (num == 0 || pool->blank[t] == NULL) continue;
            pool->wiping = true;
            TRY(pool->ctx->backend->move_blocks(
                pool->ctx, pool->blank[t]->layers, tier_cache(pool, tier, t)->layers,
                pool->blank[t]->format.desc.num_layers, pairs, num, pool->stream));
        }
        for (int64_t i = 0; i < n; i++) b->block[blocks[i]].dirty = 0;
        b->num_clean += n;
        limit -= n;
    }
    return FOLIO_OK;
}

folio_status folioi_pool_wipe_freed(folio_pool *pool)
{
    for (int tier = 0; tier < NUM_LINKED_TIERS; tier++) {
        const folioi_blocks *b = tier_blocks(pool, tier);
        while (b->num_clean < b->num_free) {
            TRY(folioi_pool_wipe(pool, tier, CHUNK));
            if (b->num_clean == b->num_free) break;
            TRY(folioi_pool_give_way(pool));
        }
    }
    return FOLIO_OK;
}

folio_status folioi_pool_wipe_staging(folio_pool *pool)
{
    const folioi_frames *f = &pool->frames;
    if (!pool->mover.staged) return FOLIO_OK;
    TRY(folioi_mover_wait(pool)); /* its copy may be under way */
    memset(frames_at(f, f->staging), 0, (size_t)f->frame_bytes);
    pool->mover.staged = false;
    return FOLIO_OK;
}

void folioi_pool_wipe_all(folio_pool *pool)
{
    if (pool_fills_freed(pool)) {
        for (int tier = 0; tier < NUM_LINKED_TIERS; tier++)
            for (int32_t i = 0; i < tier_blocks(pool, tier)->num; i++)
                if (tier_blocks(pool, tier)->block[i].node != NONE)
                    blocks_forget(tier_blocks(pool, tier), i);
        pool_lock(pool);
        (void)folioi_pool_wipe_freed(pool);
        pthread_mutex_unlock(&pool->lock);
    }
    folio_run run = pool_run(pool);
    if (pool->wiping) (void)folio_run_wait(pool->ctx, &run);
}
