/*
 * sequence.c: the tokens of one request: reserves and truncates slots, forks, copies shared blocks before they
 * are written, releases blocks behind a window.
 */
#include "cache/sequence.h"

#include <string.h>

/* ------------------------------------------------------------------------------- create, destroy */

static int64_t blocks_of(const folio_sequence *s, int64_t tokens)
{
    return ceil_div(tokens, s->pool->block_size);
}

static void link_sequence(folio_sequence *s)
{
    folio_pool *pool = s->pool;
    s->next = pool->sequences;
    if (s->next != NULL) s->next->prev = s;
    pool->sequences = s;
    pool->num_sequences++;
}

static void free_sequence(folio_sequence *s)
{
    folio_allocator a = s->pool->allocator;
    folio_pool *pool = s->pool;
    for (int32_t t = 0; t <= pool->cross; t++) folioi_array_free(&a, &s->table[t].blocks);
    stamp_release(&s->stamp); /* batches may still look at it */
    folio_pool_destroy(pool);
}

static folio_status grow_table(folio_sequence *s, int32_t table, int64_t blocks)
{
    return folioi_array_reserve(&s->pool->allocator, &s->table[table].blocks,
                                max_i64(blocks, 4) * (int64_t)sizeof(int32_t), "a block table");
}

folio_status folioi_sequence_grow(folio_sequence *s, int64_t len)
{
    for (int32_t g = 0; g < s->pool->num_layer_groups; g++)
        TRY(grow_table(s, g, blocks_of(s, len)));
    return FOLIO_OK;
}

static folio_status new_sequence(folio_pool *pool, uint64_t salt, int64_t max_tokens,
                                 folio_sequence **out)
{
    void *memory;
    TRY(folioi_alloc(&pool->allocator, sizeof(folio_sequence), "a sequence", &memory));
    folio_sequence *s = memory;
    stamp_init(&s->stamp, &pool->allocator, sizeof *s);
    refs_retain(&pool->refs);
    s->pool = pool;
    s->salt = salt;
    s->tip = NONE;
    folio_status status = folioi_sequence_grow(s, max_tokens);
    if (status == FOLIO_OK) *out = s;
    else free_sequence(s);
    return status;
}

folio_status folio_sequence_create(folio_pool *pool, const folio_sequence_desc *desc,
                                   folio_sequence **out)
{
    REQUIRE(out != NULL, "folio_sequence_create: out is NULL");
    *out = NULL;
    REQUIRE(pool != NULL, "folio_sequence_create: pool is NULL");
    folio_sequence_desc d = {.struct_size = sizeof d};
    if (desc != NULL) STRUCT_IN(d, desc, "folio_sequence_desc");
    REQUIRE(d.max_tokens >= 0 && d.max_tokens <= INT32_MAX,
            "sequence: max_tokens is %lld, outside [0, 2147483647]", (long long)d.max_tokens);
    /* more than the pool could ever hold is not made room for at once */
    int64_t most = pool->device.num * pool->block_size;
    TRY(new_sequence(pool, d.salt, min_i64(d.max_tokens, most), out));
    pool_lock(pool);
    link_sequence(*out);
    return folioi_pool_unlock(pool, FOLIO_OK);
}

static bool is_in_use(const folio_pool *pool, uint64_t salt)
{
    const folio_sequence *s = pool->sequences;
    while (s != NULL && s->salt != salt) s = s->next;
    return s != NULL;
}

/* Unless another sequence has it, or gets it while transfers are under way. */
static void forget_salt(folio_pool *pool, uint64_t salt)
{
    while (!is_in_use(pool, salt) && pool->mover.first != NULL) pool_await(pool);
    if (!is_in_use(pool, salt)) (void)folioi_pool_forget(pool, &salt);
}

void folio_sequence_destroy(folio_sequence *s)
{
    if (s == NULL) return;
    folio_pool *pool = s->pool;
    pool_lock(pool);
    while (s->transfer != NULL) pool_await(pool);
    stamp_change(&s->stamp, "folio_sequence_destroy");
    if (s->state == FOLIO_SEQUENCE_SWAPPED) {
        folioi_sequence_vacate(s);
        for (int32_t k = 0; k <= pool->cross; k++) s->table[k].num = s->table[k].released = 0;
        folioi_sequence_cut(s, 0);
    } else if (folioi_sequence_shorten(s, 0) != FOLIO_OK) {
        folioi_sequence_cut(s, 0);
    }
    folioi_sequence_drop(s, pool->cross, 0);
    if (s->prev != NULL) s->prev->next = s->next;
    else pool->sequences = s->next;
    if (s->next != NULL) s->next->prev = s->prev;
    pool->num_sequences--;
    if (pool->wipe == FOLIO_WIPE_ON_SALT) forget_salt(pool, s->salt);
    (void)folioi_pool_unlock(pool, FOLIO_OK);
    free_sequence(s);
}

folio_status folio_sequence_get_info(const folio_sequence *s, folio_sequence_info *info)
{
    REQUIRE(s != NULL, "folio_sequence_get_info: sequence is NULL");
    pool_lock(s->pool);
    folio_sequence_info i = {.state = s->state,
                             .tier = s->tier,
                             .len = s->len,
                             .committed_len = s->committed,
                             .matched_len = s->matched,
                             .encoder_len = s->encoder_len,
                             .encoder_committed_len = s->encoder_committed,
                             .salt = s->salt};
    for (int32_t t = 0; t <= s->pool->cross; t++)
        i.num_blocks += s->table[t].num - s->table[t].released;
    pthread_mutex_unlock(&s->pool->lock);
    return folioi_struct_out(info, &i, sizeof i, "folio_sequence_info");
}

folio_status folioi_sequence_resident(const folio_sequence *s, const char *call)
{
    static const char *const what[] = {"", "a transfer takes it out", "it is swapped out",
                                       "a transfer brings it back"};
    REQUIRE(s->state == FOLIO_SEQUENCE_RESIDENT, "%s: the sequence is not on the device: %s", call,
            what[s->state]);
    return FOLIO_OK;
}

/* ------------------------------------------------------------------------------ giving blocks back */

void folioi_sequence_drop(folio_sequence *s, int32_t table, int64_t first)
{
    folioi_table *t = &s->table[table];
    /* last one first, so that the cached list has leaves before their parents */
    for (int64_t i = t->num - 1; i >= max_i64(first, t->released); i--)
        folioi_pool_release(s->pool, table_blocks(t)[i]);
    t->num = min_i64(t->num, first);
    t->released = min_i64(t->released, t->num);
    if (table == s->pool->cross && first == 0) s->encoder_len = s->encoder_committed = 0;
}

folioi_frame_id folioi_sequence_frame(const folio_sequence *s, int32_t table, int64_t i)
{
    return (folioi_frame_id){.key = {{s->swap_key.word[0], (uint64_t)i}},
                             .parent = s->swap_key,
                             .salt = s->salt,
                             .group = table,
                             .kind = FOLIOI_FRAME_SEQUENCE};
}

void folioi_sequence_vacate(folio_sequence *s)
{
    folio_pool *pool = s->pool;
    for (int32_t k = 0; k <= pool->cross; k++)
        for (int64_t i = s->table[k].num - 1; i >= s->table[k].released; i--) {
            int32_t block = table_blocks(&s->table[k])[i];
            if (s->held == FOLIO_TIER_DEVICE) {
                folioi_pool_release(pool, block);
            } else if (s->held == FOLIO_TIER_HOST) {
                blocks_release(&pool->host, block);
            } else {
                folioi_frame_id id = folioi_sequence_frame(s, k, i);
                folioi_store_drop(pool->store, &id);
            }
        }
}

void folioi_sequence_cut(folio_sequence *s, int64_t len)
{
    folio_pool *pool = s->pool;
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        folioi_sequence_drop(s, g, blocks_of(s, len));
    s->len = len;
    s->committed = min_i64(s->committed, len);
    s->matched = min_i64(s->matched, len);
    s->stale &= len > 0;
    int64_t indexed = min_i64(s->indexed, len / pool->block_size);
    if (indexed == s->indexed) return;
    int32_t tip = indexed > 0 ? sequence_node(s, indexed - 1) : NONE;
    index_pin(&pool->index, tip);
    index_unpin(&pool->index, s->tip);
    s->tip = tip;
    s->indexed = indexed;
}

folio_status folioi_sequence_shorten(folio_sequence *s, int64_t len)
{
    int64_t step = (int64_t)FOLIOI_HOLD_BLOCKS * s->pool->block_size;
    while (s->len - len > step) {
        folioi_sequence_cut(s, s->len - step);
        TRY(folioi_pool_give_way(s->pool));
    }
    folioi_sequence_cut(s, len);
    return FOLIO_OK;
}

static folio_status truncate(folio_sequence *s, int64_t len)
{
    folio_pool *pool = s->pool;
    TRY(folioi_sequence_resident(s, "truncate"));
    REQUIRE(len >= 0 && len <= s->len, "truncate: len %lld is outside [0, %lld]", (long long)len,
            (long long)s->len);
    int64_t next = min_i64(len, s->committed); /* the first token to be computed */
    for (int32_t g = 0; g < pool->num_layer_groups && next > 0; g++) {
        int64_t begin = window_begin(pool, g, next);
        REQUIRE(begin >= s->table[g].released * pool->block_size,
                "truncate: token %lld sees keys from %lld on, group %d has released those before "
                "%lld",
                (long long)next, (long long)begin, g,
                (long long)(s->table[g].released * pool->block_size));
    }
    if (len < s->len) stamp_change(&s->stamp, "folio_sequence_truncate");
    return folioi_sequence_shorten(s, len);
}

folio_status folio_sequence_truncate(folio_sequence *s, int64_t len)
{
    REQUIRE(s != NULL, "folio_sequence_truncate: sequence is NULL");
    pool_lock(s->pool);
    return folioi_pool_unlock(s->pool, truncate(s, len));
}

/* ---------------------------------------------------------------------------------------- windows */

/* Entries before it lie behind the group's window. */
static int64_t first_visible(const folio_sequence *s, int32_t group)
{
    int64_t i = window_begin(s->pool, group, s->committed) / s->pool->block_size;
    return max_i64(s->table[group].released, min_i64(i, s->table[group].num));
}

int64_t folioi_sequence_releasable(const folio_sequence *s)
{
    int64_t n = 0;
    for (int32_t g = 0; g < s->pool->num_layer_groups; g++)
        for (int64_t i = s->table[g].released; i < first_visible(s, g); i++) {
            const folioi_block *k = &s->pool->device.block[table_blocks(&s->table[g])[i]];
            n += k->refs == 1 && k->reads == 0;
        }
    return n;
}

void folioi_sequence_release(folio_sequence *s, const char *call)
{
    for (int32_t g = 0; g < s->pool->num_layer_groups; g++) {
        folioi_table *t = &s->table[g];
        int64_t end = first_visible(s, g);
        if (end > t->released) stamp_change(&s->stamp, call);
        for (int64_t i = end - 1; i >= t->released; i--) {
            folioi_pool_release(s->pool, table_blocks(t)[i]);
            table_blocks(t)[i] = FOLIO_NO_BLOCK;
        }
        t->released = end;
    }
}

folio_status folio_sequence_release_window(folio_sequence *s)
{
    REQUIRE(s != NULL, "folio_sequence_release_window: sequence is NULL");
    pool_lock(s->pool);
    folio_status status = folioi_sequence_resident(s, "release_window");
    if (status == FOLIO_OK) folioi_sequence_release(s, "folio_sequence_release_window");
    return folioi_pool_unlock(s->pool, status);
}

/* ---------------------------------------------------------------------------------------- reserve */

/* The last block, if the next token goes into it and others hold or know it; NONE. */
static int32_t block_to_copy(const folio_sequence *s, int32_t group)
{
    if (s->len % s->pool->block_size == 0) return NONE;
    int32_t last = table_blocks(&s->table[group])[s->table[group].num - 1];
    const folioi_block *k = &s->pool->device.block[last];
    return k->refs > 1 || k->node != NONE ? last : NONE;
}

/* Give the sequence a last block of its own, and queue the copy. The queue has room. */
static void copy_on_write(folio_sequence *s, int32_t group, int32_t from)
{
    folio_pool *pool = s->pool;
    folioi_table *t = &s->table[group];
    folioi_copies *queue = &pool->copies[group];
    folio_block_pair *pairs = queue->pairs.data;
    int32_t to = folioi_pool_take(pool, TIER_DEVICE, group);
    /* a block that itself waits for its copy has what that one's source has */
    int32_t source = from, pending = pool->device.block[from].copy;
    if (pending != NONE) source = (int32_t)pairs[pending].from;
    pairs[queue->num].from = source;
    pairs[queue->num].to = to;
    pool->device.block[to].copy = (int32_t)queue->num++;
    blocks_read_begin(&pool->device, source);
    folioi_pool_release(pool, from);
    table_blocks(t)[t->num - 1] = to;
}

static folio_status room_for_copies(folio_pool *pool)
{
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        TRY(folioi_array_reserve(&pool->allocator, &pool->copies[g].pairs,
                                 (pool->copies[g].num + 1) * (int64_t)sizeof(folio_block_pair),
                                 "queued copies"));
    return FOLIO_OK;
}

/* Blocks it holds that no other call of its own would give back: all but those behind windows. */
static int64_t blocks_kept(const folio_sequence *s)
{
    int64_t n = s->table[s->pool->cross].num;
    for (int32_t g = 0; g < s->pool->num_layer_groups; g++)
        n += s->table[g].num - first_visible(s, g);
    return n;
}

/* Are there `need` blocks more, with those that are `gained` first? alone: how many it would need without
 * a copy; one that it needs today is not needed once the sequence is computed again. */
static folio_status check_room(const folio_sequence *s, int64_t need, int64_t alone, int64_t gained,
                               uint32_t flags)
{
    const folio_pool *pool = s->pool;
    int64_t have = blocks_available(&pool->device) + gained;
    int64_t keep = flags & FOLIO_RESERVE_ADMIT ? pool->watermark : 0;
    if (need == 0 || need <= have - keep) return FOLIO_OK;
    int64_t all = blocks_kept(s) + alone;
    if (all > pool->device.num)
        FAIL(FOLIO_ERR_TOO_LARGE, "reserve: the sequence would need %lld blocks, the pool has %lld",
             (long long)all, (long long)pool->device.num);
    if (all > pool->device.num - keep)
        FAIL(FOLIO_ERR_TOO_LARGE,
             "reserve: the sequence would need %lld blocks and %lld must stay available; the pool "
             "has %lld",
             (long long)all, (long long)keep, (long long)pool->device.num);
    if (keep > 0)
        FAIL(FOLIO_ERR_FULL,
             "reserve: %lld blocks are needed and %lld must stay available; %lld of %lld are "
             "available",
             (long long)need, (long long)keep, (long long)have, (long long)pool->device.num);
    FAIL(FOLIO_ERR_FULL, "reserve: %lld blocks are needed, %lld of %lld are available",
         (long long)need, (long long)have, (long long)pool->device.num);
}

/* Lengths are int32_t in batches, however large the pool is. */
static folio_status check_length(const char *call, int64_t len, int64_t n)
{
    if (n <= INT32_MAX - len) return FOLIO_OK;
    FAIL(FOLIO_ERR_TOO_LARGE,
         "%s: n is %lld and the sequence has %lld tokens; the limit is 2147483647", call,
         (long long)n, (long long)len);
}

static void write_slots(const folio_sequence *s, int32_t table, int64_t first, int64_t n,
                        int64_t *slots)
{
    int32_t bs = s->pool->block_size;
    const int32_t *blocks = table_blocks(&s->table[table]);
    for (int64_t i = 0; i < n; i++)
        slots[i] = (int64_t)blocks[(first + i) / bs] * bs + (first + i) % bs;
}

static folio_status reserve(folio_sequence *s, int64_t n, uint32_t flags, int64_t *slots)
{
    folio_pool *pool = s->pool;
    TRY(folioi_sequence_resident(s, "reserve"));
    REQUIRE((flags & ~FOLIO_RESERVE_ADMIT) == 0, "reserve: flags %#x are unknown", flags);
    REQUIRE(n >= 0, "reserve: n is %lld; it must be at least 0", (long long)n);
    TRY(check_length("reserve", s->len, n));
    if (n == 0) return FOLIO_OK;
    int64_t blocks = blocks_of(s, s->len + n), need = 0, alone = 0;
    for (int32_t g = 0; g < pool->num_layer_groups; g++) {
        alone += blocks - s->table[g].num;
        need += blocks - s->table[g].num + (block_to_copy(s, g) != NONE);
    }
    TRY(check_room(s, need, alone, folioi_sequence_releasable(s), flags));
    TRY(folioi_sequence_grow(s, s->len + n));
    TRY(room_for_copies(pool));
    stamp_change(&s->stamp, "folio_sequence_reserve");
    folioi_sequence_release(s, "folio_sequence_reserve");
    for (int32_t g = 0; g < pool->num_layer_groups; g++) {
        folioi_table *t = &s->table[g];
        int32_t shared = block_to_copy(s, g);
        if (shared != NONE) copy_on_write(s, g, shared);
        while (t->num < blocks) table_blocks(t)[t->num++] = folioi_pool_take(pool, TIER_DEVICE, g);
        if (slots != NULL) write_slots(s, g, s->len, n, slots + g * n);
    }
    s->len += n;
    return FOLIO_OK;
}

folio_status folio_sequence_reserve(folio_sequence *s, int64_t n, uint32_t flags, int64_t *slots)
{
    REQUIRE(s != NULL, "folio_sequence_reserve: sequence is NULL");
    pool_lock(s->pool);
    return folioi_pool_unlock(s->pool, reserve(s, n, flags, slots));
}

static folio_status reserve_encoder(folio_sequence *s, int64_t n, uint32_t flags, int64_t *slots)
{
    folio_pool *pool = s->pool;
    int32_t cross = pool->cross;
    TRY(folioi_sequence_resident(s, "reserve_encoder"));
    REQUIRE((flags & ~FOLIO_RESERVE_ADMIT) == 0, "reserve_encoder: flags %#x are unknown", flags);
    REQUIRE(n >= 1, "reserve_encoder: n is %lld; it must be at least 1", (long long)n);
    TRY(check_length("reserve_encoder", 0, n));
    REQUIRE(s->encoder_len == 0, "reserve_encoder: the sequence has %lld encoder tokens already",
            (long long)s->encoder_len);
    REQUIRE(!pool->tiers || pool->cache[cross] != NULL,
            "reserve_encoder: a pool with tiers needs cross_cache for encoder tokens");
    int64_t need = blocks_of(s, n);
    TRY(check_room(s, need, need, 0, flags));
    TRY(grow_table(s, cross, need));
    stamp_change(&s->stamp, "folio_sequence_reserve_encoder");
    folioi_table *t = &s->table[cross];
    while (t->num < need) table_blocks(t)[t->num++] = folioi_pool_take(pool, TIER_DEVICE, cross);
    s->encoder_len = n;
    if (slots != NULL) write_slots(s, cross, 0, n, slots);
    return FOLIO_OK;
}

folio_status folio_sequence_reserve_encoder(folio_sequence *s, int64_t n, uint32_t flags,
                                            int64_t *slots)
{
    REQUIRE(s != NULL, "folio_sequence_reserve_encoder: sequence is NULL");
    pool_lock(s->pool);
    return folioi_pool_unlock(s->pool, reserve_encoder(s, n, flags, slots));
}

/* ------------------------------------------------------------------------------------------- fork */

static folio_status fork_into(folio_sequence *s, folio_sequence *child)
{
    folio_pool *pool = s->pool;
    TRY(folioi_sequence_resident(s, "fork"));
    REQUIRE(s->committed == s->len && s->encoder_committed == s->encoder_len,
            "fork: %lld tokens are reserved and not committed",
            (long long)(s->len - s->committed + s->encoder_len - s->encoder_committed));
    for (int32_t t = 0; t <= pool->cross; t++) TRY(grow_table(child, t, s->table[t].num));
    for (int32_t t = 0; t <= pool->cross; t++) {
        const folioi_table *from = &s->table[t];
        folioi_table *to = &child->table[t];
        for (int64_t i = 0; i < from->num; i++) {
            int32_t block = table_blocks(from)[i];
            if (block != FOLIO_NO_BLOCK) blocks_retain(&pool->device, block);
            table_blocks(to)[i] = block;
        }
        to->num = from->num;
        to->released = from->released;
    }
    child->len = s->len;
    child->committed = s->committed;
    child->matched = s->matched;
    child->encoder_len = s->encoder_len;
    child->encoder_committed = s->encoder_committed;
    /* Full blocks the index does not know, with two holders: one could enter them into a chain of which the
     * other holds other blocks. */
    s->stale |= s->committed / pool->block_size > s->indexed;
    child->stale = s->stale;
    child->indexed = s->indexed;
    child->tip = s->tip;
    index_pin(&pool->index, child->tip);
    link_sequence(child);
    return FOLIO_OK;
}

folio_status folio_sequence_fork(folio_sequence *s, folio_sequence **out)
{
    REQUIRE(out != NULL, "folio_sequence_fork: out is NULL");
    *out = NULL;
    REQUIRE(s != NULL, "folio_sequence_fork: sequence is NULL");
    folio_sequence *child;
    TRY(new_sequence(s->pool, s->salt, 0, &child));
    pool_lock(s->pool);
    folio_status status = fork_into(s, child);
    if (status != FOLIO_OK) free_sequence(child);
    else *out = child;
    return folioi_pool_unlock(s->pool, status);
}

/* ------------------------------------------------------------------------------ --------- tables */

folio_status folio_sequence_get_table(const folio_sequence *s, int32_t group,
                                      const int32_t **blocks, int64_t *num_blocks)
{
    REQUIRE(s != NULL, "folio_sequence_get_table: sequence is NULL");
    REQUIRE(group >= FOLIO_LAYER_GROUP_CROSS && group < s->pool->num_layer_groups,
            "folio_sequence_get_table: group %d is outside [-1, %d)", group,
            s->pool->num_layer_groups);
    REQUIRE(blocks != NULL && num_blocks != NULL,
            "folio_sequence_get_table: an out pointer is NULL");
    pool_lock(s->pool);
    folio_status status = folioi_sequence_resident(s, "table");
    const folioi_table *t = &s->table[group < 0 ? s->pool->cross : group];
    if (status == FOLIO_OK) {
        *blocks = table_blocks(t);
        *num_blocks = t->num;
    }
    pthread_mutex_unlock(&s->pool->lock);
    return status;
}
