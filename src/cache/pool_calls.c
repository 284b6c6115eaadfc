/* pool_calls.c: create and destroy pools, statistics, block states. */
#include "cache/kv_cache.h"
#include "cache/pool_check.h"
#include "core/tensor.h"

#include <string.h>
#include <sys/random.h>

/* ------------------------------------------------------------------------------- create, destroy */

static folio_status check_cache(const folio_pool_desc *d, const folio_context *ctx,
                                const folio_kv_cache *cache, const char *name, int32_t i)
{
    if (cache == NULL) return FOLIO_OK;
    const folio_kv_cache_desc *c = &cache->format.desc;
    REQUIRE(c->block_size == d->block_size, "pool: %s %d has blocks of %d tokens, the pool %d",
            name, i, c->block_size, d->block_size);
    REQUIRE(c->num_blocks >= d->num_blocks, "pool: %s %d has %lld blocks, the pool %lld", name, i,
            (long long)c->num_blocks, (long long)d->num_blocks);
    REQUIRE(cache->ctx == ctx, "pool: %s %d was made by another context", name, i);
    return FOLIO_OK;
}

/* What the desc leaves out is what the caches have: their block size, the blocks of the smallest. */
static void take_geometry(folio_pool_desc *d)
{
    bool any_number = d->num_blocks == 0;
    for (int32_t g = -1; g < d->num_layer_groups; g++) {
        const folio_kv_cache *cache = d->cross_cache;
        if (g >= 0) cache = d->layer_groups != NULL ? d->layer_groups[g].cache : NULL;
        if (cache == NULL) continue;
        const folio_kv_cache_desc *c = &cache->format.desc;
        if (d->block_size == 0) d->block_size = c->block_size;
        if (any_number && (d->num_blocks == 0 || c->num_blocks < d->num_blocks))
            d->num_blocks = c->num_blocks;
    }
}

static folio_status check_desc(const folio_context *ctx, folio_pool_desc *d)
{
    if (d->num_layer_groups == 0) d->num_layer_groups = 1;
    REQUIRE(d->num_layer_groups >= 1 && d->num_layer_groups <= FOLIO_MAX_LAYER_GROUPS,
            "pool: num_layer_groups is %d, outside [1, %d]", d->num_layer_groups,
            FOLIO_MAX_LAYER_GROUPS);
    take_geometry(d);
    REQUIRE(
        d->num_blocks != 0 && d->block_size != 0,
        "pool: num_blocks is %lld and block_size %d; without a cache that has them, both must be "
        "given",
        (long long)d->num_blocks, d->block_size);
    REQUIRE(d->num_blocks >= 1 && d->num_blocks <= INT32_MAX,
            "pool: num_blocks is %lld, outside [1, 2147483647]", (long long)d->num_blocks);
    REQUIRE(d->block_size >= 1 && d->block_size <= 4096,
            "pool: block_size is %d, outside [1, 4096]", d->block_size);
    REQUIRE(d->watermark >= 0 && d->watermark <= d->num_blocks,
            "pool: watermark is %lld, outside [0, num_blocks = %lld]", (long long)d->watermark,
            (long long)d->num_blocks);
    REQUIRE((d->flags & ~FOLIO_POOL_CHECK) == 0, "pool: flags %#x are unknown",
            d->flags & ~FOLIO_POOL_CHECK);
    REQUIRE(d->wipe >= FOLIO_WIPE_ON_FORGET && d->wipe <= FOLIO_WIPE_NEVER,
            "pool: wipe %d is unknown", (int)d->wipe);
    REQUIRE(d->host_blocks >= 0 && d->host_blocks < INT32_MAX,
            "pool: host_blocks is %lld, outside [0, 2147483646]", (long long)d->host_blocks);
    bool tiers = d->host_blocks > 0 || d->store_path != NULL;
    for (int32_t g = 0; g < d->num_layer_groups; g++) {
        folio_kv_cache *cache = d->layer_groups != NULL ? d->layer_groups[g].cache : NULL;
        int64_t window = d->layer_groups != NULL ? d->layer_groups[g].window : 0;
        REQUIRE(window >= 0, "pool: group %d: window is %lld; it must be at least 0", g,
                (long long)window);
        TRY(check_cache(d, ctx, cache, "the cache of group", g));
        REQUIRE(!tiers || cache != NULL,
                "pool: tiers need a cache in every group, group %d has none", g);
    }
    TRY(check_cache(d, ctx, d->cross_cache, "cross_cache", 0));
    REQUIRE(d->store_path == NULL || d->store_path[0] != 0, "pool: store_path is empty");
    folioi_bytes key;
    TRY(folioi_key_read("pool: store_key", d->store_key, d->store_key_bytes, &key));
    folioi_disk_passport stated;
    TRY(folioi_passport_encode(d->passport, &stated)); /* wrong is wrong without a store, too */
    REQUIRE(d->stream == NULL || ctx->backend->on_device,
            "pool: stream is set; host backends have no streams");
    return FOLIO_OK;
}

static void frame_found(void *user, const folioi_frame_id *id)
{
    folioi_pool_emit(user, FOLIO_EVENT_STORED, FOLIO_TIER_DISK, id, -1);
}

static void frame_replaced(void *user, const folioi_frame_id *id)
{
    folio_pool *pool = user;
    pool_lock(pool);
    folioi_pool_emit(pool, FOLIO_EVENT_REMOVED, FOLIO_TIER_DISK, id, -1);
    pthread_mutex_unlock(&pool->lock);
}

/* The host tier, the store and the thread that moves blocks. */
static folio_status make_tiers(folio_pool *pool, const folio_pool_desc *d, uint64_t *hash_key)
{
    if (!pool->tiers) return FOLIO_OK;
    TRY(folioi_frames_init(&pool->frames, pool->ctx, pool->cache, pool->cross + 1, d->host_blocks));
    TRY(folioi_blocks_init(&pool->allocator, &pool->host, d->host_blocks,
                           "the host tier's blocks"));
    if (d->store_path != NULL) {
        folioi_store_desc s = {.path = d->store_path,
                               .max_bytes = d->store_bytes,
                               .passport = d->passport,
                               .ids_bytes = (int32_t)max_i64(d->block_size * (int64_t)4, 8),
                               .num_layer_groups = pool->cross + (pool->cache[pool->cross] != NULL),
                               .geometry = pool->frames.geometry,
                               .hash_key = d->hash_key,
                               .key = {d->store_key, (size_t)d->store_key_bytes}};
        TRY(folioi_store_open(&pool->allocator, &s, &pool->store));
        TRY(folioi_store_random(&pool->next_swap));
        *hash_key = folioi_store_hash_key(pool->store);
        if (pool->on_event != NULL) {
            folioi_store_on_replaced(pool->store, frame_replaced, pool);
            folioi_store_each(pool->store, frame_found, pool);
        }
    }
    return folioi_mover_start(pool);
}

static folio_status fill_pool(folio_pool *pool, const folio_pool_desc *d)
{
    uint64_t hash_key = d->hash_key;
    while (hash_key == 0)
        if (getrandom(&hash_key, sizeof hash_key, 0) != sizeof hash_key)
            hash_key = (uint64_t)(uintptr_t)pool | 1;
    TRY(folioi_blocks_init(&pool->allocator, &pool->device, d->num_blocks, "a pool's blocks"));
    TRY(make_tiers(pool, d, &hash_key));
    TRY(folioi_index_init(&pool->allocator, &pool->index, pool->num_layer_groups, pool->block_size,
                          hash_key));
    if (pool->store != NULL) {
        folioi_key secret;
        folioi_store_secret(pool->store, &secret);
        folioi_index_use_digests(&pool->index, &secret);
        explicit_bzero(&secret, sizeof secret);
    }
    if (!pool_fills_freed(pool)) return FOLIO_OK;
    TRY(folioi_pool_make_blanks(pool));
    return pool->store != NULL && pool_wipes_freed(pool) ? folioi_store_wipe(pool->store)
                                                         : FOLIO_OK;
}

folio_status folio_pool_create(folio_context *ctx, const folio_pool_desc *desc, folio_pool **out)
{
    REQUIRE(out != NULL, "folio_pool_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_pool_create: ctx is NULL");
    folio_pool_desc d;
    STRUCT_IN(d, desc, "folio_pool_desc");
    TRY(check_desc(ctx, &d));
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_pool), "a pool", &memory));
    folio_pool *pool = memory;
    refs_init(&pool->refs);
    refs_retain(&ctx->refs);
    pool->ctx = ctx;
    pool->stream = d.stream;
    pool->wipe = d.wipe;
    pool->allocator = ctx->allocator;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->next, NULL);
    folioi_mover_init(&pool->mover);
    pool->host.oldest = pool->host.newest = NONE;
    pool->block_size = d.block_size;
    pool->num_layer_groups = pool->cross = d.num_layer_groups;
    for (int32_t g = 0; d.layer_groups != NULL && g < d.num_layer_groups; g++) {
        pool->window[g] = d.layer_groups[g].window;
        pool->cache[g] = d.layer_groups[g].cache;
        pool->windowed |= d.layer_groups[g].window > 0;
    }
    pool->cache[pool->cross] = d.cross_cache;
    for (int32_t t = 0; t <= pool->cross; t++)
        if (pool->cache[t] != NULL) refs_retain(&pool->cache[t]->refs);
    pool->tiers = d.host_blocks > 0 || d.store_path != NULL;
    pool->watermark = d.watermark;
    if ((d.flags & FOLIO_POOL_CHECK) != 0) pool->check = folioi_pool_check;
    pool->on_event = d.on_event;
    pool->event_user = d.event_user;
    folio_status status = fill_pool(pool, &d);
    if (status != FOLIO_OK) {
        folio_pool_destroy(pool);
        return status;
    }
    *out = pool;
    return FOLIO_OK;
}

void folio_pool_destroy(folio_pool *pool)
{
    if (pool == NULL || !refs_release(&pool->refs)) return;
    folio_context *ctx = pool->ctx;
    folioi_mover_stop(pool);
    (void)folioi_mover_wait(pool); /* the frames are still read and written */
    folioi_pool_wipe_all(pool);
    folio_allocator a = pool->allocator;
    folioi_store_close(pool->store);
    folioi_frames_free(&pool->frames);
    folioi_blocks_free(&a, &pool->device);
    folioi_blocks_free(&a, &pool->host);
    folioi_index_free(&a, &pool->index);
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        folioi_array_free(&a, &pool->copies[g].pairs);
    folioi_array_free(&a, &pool->walk);
    for (int32_t t = 0; t <= pool->cross; t++) {
        folio_kv_cache_destroy(pool->blank[t]);
        folio_kv_cache_destroy(pool->cache[t]);
    }
    pthread_mutex_destroy(&pool->next);
    pthread_mutex_destroy(&pool->lock);
    folioi_free(&a, pool, sizeof *pool);
    folio_context_destroy(ctx);
}

/* ----------------------------------------------------------------------------- looking at a pool */

folio_status folio_pool_get_stats(folio_pool *pool, folio_pool_stats *stats)
{
    REQUIRE(pool != NULL, "folio_pool_get_stats: pool is NULL");
    folioi_store_stats store = {0};
    if (pool->store != NULL) store = folioi_store_get_stats(pool->store);
    pool_lock(pool);
    const folioi_blocks *d = &pool->device, *h = &pool->host;
    folio_pool_stats s = {
        .num_blocks = d->num,
        .num_free = d->num_free,
        .num_used = d->num_used,
        .num_shared = d->num_shared,
        .num_cached = d->num_cached,
        .peak_used = d->peak_used,
        .num_sequences = pool->num_sequences,
        .allocations = d->allocations,
        .evictions = d->evictions,
        .lookup_tokens = pool->lookup_tokens,
        .hit_tokens = pool->hit_tokens,
        .hit_rate =
            pool->lookup_tokens > 0 ? (double)pool->hit_tokens / (double)pool->lookup_tokens : 0,
        .num_entries = pool->index.num_nodes,
        .host_blocks = h->num,
        .host_used = h->num_used,
        .host_cached = h->num_cached,
        .host_evictions = h->evictions,
        .blocks_out = pool->blocks_out,
        .blocks_in = pool->blocks_in,
        .store_frames = store.num_frames,
        .store_used = store.used,
        .store_evictions = store.evictions,
        .store_writes = store.writes,
        .store_reads = store.reads,
        .store_warnings = store.warnings,
        .store_errors = store.errors,
    };
    for (int32_t g = 0; g < pool->num_layer_groups; g++) s.num_copies += pool->copies[g].num;
    pthread_mutex_unlock(&pool->lock);
    return folioi_struct_out(stats, &s, sizeof s, "folio_pool_stats");
}

folio_status folio_pool_get_block_states(folio_pool *pool, folio_tier tier, int64_t first,
                                         int64_t n, uint8_t *states)
{
    REQUIRE(pool != NULL, "folio_pool_get_block_states: pool is NULL");
    REQUIRE(tier == FOLIO_TIER_DEVICE || tier == FOLIO_TIER_HOST,
            "folio_pool_get_block_states: tier %d is neither device nor host", (int)tier);
    const folioi_blocks *b = tier_blocks(pool, (int)tier);
    REQUIRE(first >= 0 && n >= 0 && first <= b->num && n <= b->num - first,
            "folio_pool_get_block_states: first %lld and n %lld are outside [0, %lld)",
            (long long)first, (long long)n, (long long)b->num);
    REQUIRE(n == 0 || states != NULL, "folio_pool_get_block_states: states is NULL");
    pool_lock(pool);
    for (int64_t i = 0; i < n; i++) {
        const folioi_block *k = &b->block[first + i];
        states[i] = k->refs > 1        ? FOLIO_BLOCK_SHARED
                    : block_is_held(k) ? FOLIO_BLOCK_USED
                    : k->node != NONE  ? FOLIO_BLOCK_CACHED
                                       : FOLIO_BLOCK_FREE;
    }
    pthread_mutex_unlock(&pool->lock);
    return FOLIO_OK;
}

folio_status folio_pool_check(folio_pool *pool)
{
    REQUIRE(pool != NULL, "folio_pool_check: pool is NULL");
    pool_lock(pool);
    folio_status status = folioi_pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

folio_status folio_pool_forget(folio_pool *pool)
{
    REQUIRE(pool != NULL, "folio_pool_forget: pool is NULL");
    bool wipes = pool->wipe != FOLIO_WIPE_NEVER;
    pool_lock(pool);
    folio_status status = wipes ? folioi_pool_make_blanks(pool) : FOLIO_OK;
    if (status != FOLIO_OK) return folioi_pool_unlock(pool, status);
    while (pool->mover.first != NULL) pool_await(pool); /* what is on its way goes too */
    status = folioi_pool_forget(pool, NULL);
    if (wipes && status == FOLIO_OK) status = folioi_pool_wipe_staging(pool);
    if (wipes && status == FOLIO_OK) status = folioi_pool_wipe_freed(pool);
    status = folioi_pool_unlock(pool, status);
    if (wipes && status == FOLIO_OK && pool->store != NULL) status = folioi_store_wipe(pool->store);
    return status;
}
