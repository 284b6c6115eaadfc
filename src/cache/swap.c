/*
 * swap.c: sequences and cached blocks between tiers: which moves a transfer makes, and what is in force
 * when it has ended. While it runs, nothing it moves can be given to anybody else.
 *
 *   sequence out   device blocks are the sequence's until the end; then its tables name host blocks
 *                  (host tier) or hold a mark where a frame is (disk)
 *   sequence down  from host memory to disk
 *   sequence in    the reverse; blocks that the index still has on the device are taken from there
 *   match          as in, for blocks of the index that are in host memory or on disk (prefix.c)
 *   cached out     unheld blocks of the index
 */
#include "cache/prefix.h"

/* ---------------------------------------------------------------------------------------- helpers */

/* The nodes of a sequence's blocks, first to last, in pool->walk. */
static folio_status list_nodes(folio_sequence *s)
{
    folio_pool *pool = s->pool;
    TRY(folioi_array_reserve(&pool->allocator, &pool->walk,
                             max_i64(s->indexed, 1) * (int64_t)sizeof(int32_t), "a swap"));
    int32_t node = s->tip;
    for (int64_t i = s->indexed - 1; i >= 0; i--) {
        ((int32_t *)pool->walk.data)[i] = node;
        node = index_node(&pool->index, node)->parent;
    }
    return FOLIO_OK;
}

static int32_t listed_node(const folio_sequence *s, int32_t table, int64_t i)
{
    bool known = table < s->pool->cross && i < s->indexed && !s->stale;
    return known ? ((const int32_t *)s->pool->walk.data)[i] : NONE;
}

/* Slots behind the last token in entry i of a sequence's table. */
static int32_t unused_slots(const folio_sequence *s, int32_t table, int64_t i)
{
    int64_t len = table == s->pool->cross ? s->encoder_len : s->len;
    return (int32_t)max_i64(0, (i + 1) * s->pool->block_size - len);
}

/* A host block; the oldest cached one makes room, on its way to the store if there is one. */
static int32_t take_host(folio_transfer *t, int32_t table)
{
    folio_pool *pool = t->pool;
    const folioi_blocks *h = &pool->host;
    if (h->num_free == 0 && pool->store != NULL) {
        int32_t group = h->block[h->oldest].group;
        folioi_frame_id id = node_id(&pool->index, h->block[h->oldest].node, group);
        if (!folioi_store_has(pool->store, &id))
            folioi_transfer_add(t, (folioi_move){.kind = MOVE_SPILL,
                                                 .table = group,
                                                 .index = -1,
                                                 .device = NONE,
                                                 .host = h->oldest,
                                                 .node = NONE,
                                                 .id = id});
    }
    return folioi_pool_take(pool, TIER_HOST, table);
}

/* ----------------------------------------------------------------------------------- sequence out */

static folio_status check_tier(const folio_pool *pool, folio_tier tier)
{
    REQUIRE(tier == FOLIO_TIER_HOST || tier == FOLIO_TIER_DISK,
            "swap_out: tier %d is neither host nor disk", (int)tier);
    REQUIRE(tier != FOLIO_TIER_HOST || pool->host.num > 0,
            "swap_out: the pool has no host tier (host_blocks is 0)");
    REQUIRE(tier != FOLIO_TIER_DISK || pool->store != NULL,
            "swap_out: the pool has no disk tier (store_path is NULL)");
    return FOLIO_OK;
}

/* From the device, or from host memory on to disk. */
static folio_status check_out(const folio_sequence *s, folio_tier tier)
{
    bool down = s->state == FOLIO_SEQUENCE_SWAPPED && s->held == FOLIO_TIER_HOST;
    if (!down || tier != FOLIO_TIER_DISK) TRY(folioi_sequence_resident(s, "swap_out"));
    TRY(check_tier(s->pool, tier));
    REQUIRE(s->committed == s->len && s->encoder_committed == s->encoder_len,
            "swap_out: %lld tokens are reserved and not committed",
            (long long)(s->len - s->committed + s->encoder_len - s->encoder_committed));
    return FOLIO_OK;
}

static folio_status no_frames(const folio_pool *pool, int64_t need)
{
    int64_t num_frames = folioi_store_get_stats(pool->store).num_frames;
    if (need > num_frames)
        FAIL(FOLIO_ERR_TOO_LARGE,
             "swap_out: the sequence has %lld blocks, the store has %lld frames", (long long)need,
             (long long)num_frames);
    FAIL(FOLIO_ERR_FULL,
         "swap_out: %lld frames of the store are needed, %lld of %lld are available",
         (long long)need, (long long)folioi_store_available(pool->store), (long long)num_frames);
}

/* Is there room in the tier? On disk it is promised then. */
static folio_status room_below(folio_sequence *s, folio_tier tier, int64_t *num_blocks)
{
    folio_pool *pool = s->pool;
    int64_t need = 0, woken = 0;
    *num_blocks = 0;
    for (int32_t t = 0; t <= pool->cross; t++)
        for (int64_t i = s->table[t].released; i < s->table[t].num; i++) {
            int32_t host = index_block(&pool->index, listed_node(s, t, i), TIER_HOST, t);
            ++*num_blocks;
            if (tier == FOLIO_TIER_DISK || host == NONE) need++;
            else woken += !block_is_held(&pool->host.block[host]);
        }
    int64_t have = blocks_available(&pool->host) - woken;
    if (tier == FOLIO_TIER_DISK ? folioi_store_promise(pool->store, need) : need <= have)
        return FOLIO_OK;
    if (tier == FOLIO_TIER_DISK) return no_frames(pool, need);
    if (*num_blocks > pool->host.num)
        FAIL(FOLIO_ERR_TOO_LARGE, "swap_out: the sequence has %lld blocks, the host tier has %lld",
             (long long)*num_blocks, (long long)pool->host.num);
    FAIL(FOLIO_ERR_FULL, "swap_out: %lld host blocks are needed, %lld of %lld are available",
         (long long)need, (long long)have, (long long)pool->host.num);
}

/* A block of a sequence goes to host memory, where it may be already. */
static void plan_host(folio_transfer *t, folioi_move move)
{
    folio_pool *pool = t->pool;
    move.holds_host = true;
    if (move.host != NONE) {
        move.kind = MOVE_KEEP;
        blocks_retain(&pool->host, move.host);
    } else {
        move.kind = MOVE_OUT;
        move.host = take_host(t, move.table);
    }
    folioi_transfer_add(t, move);
}

/* A block of a sequence goes to disk, from where it is. */
static void plan_disk(const folio_sequence *s, folio_transfer *t, folioi_move move)
{
    bool host = s->held == FOLIO_TIER_HOST;
    move.kind = host ? MOVE_SINK : MOVE_STORE;
    if (host) move.host = move.device, move.device = NONE;
    move.unused = unused_slots(s, move.table, move.index);
    move.id = folioi_sequence_frame(s, move.table, move.index);
    folioi_transfer_add(t, move);
}

static void plan_out(const folio_sequence *s, folio_tier tier, folio_transfer *t)
{
    const folio_pool *pool = s->pool;
    bool to_host = tier == FOLIO_TIER_HOST;
    /* First what is there already, so that making room for the rest cannot take it away. */
    for (int pass = 0; pass < 2; pass++)
        for (int32_t k = 0; k <= pool->cross; k++)
            for (int64_t i = s->table[k].released; i < s->table[k].num; i++) {
                int32_t node = listed_node(s, k, i);
                folioi_move move = {.table = k,
                                    .index = i,
                                    .device = table_blocks(&s->table[k])[i],
                                    .host = NONE,
                                    .node = node};
                if (to_host) move.host = index_block(&pool->index, node, TIER_HOST, k);
                if ((move.host != NONE) != (pass == 0)) continue;
                if (to_host) plan_host(t, move);
                else plan_disk(s, t, move);
            }
}

static void finish_out(folio_transfer *t)
{
    folio_pool *pool = t->pool;
    folio_sequence *s = t->sequence;
    bool failed = t->status != FOLIO_OK;
    if (!failed) folioi_sequence_vacate(s);
    for (int64_t i = t->num_moves - 1; i >= 0; i--) {
        folioi_move *move = &t->moves[i];
        if (move->kind == MOVE_SPILL) continue;
        bool to_disk = move->kind == MOVE_STORE || move->kind == MOVE_SINK;
        if (to_disk && !move->tried) folioi_store_unpromise(pool->store, 1);
        if (failed) {
            if (move->holds_host) blocks_release(&pool->host, move->host);
            if (to_disk && move->ok) folioi_store_drop(pool->store, &move->id);
            continue;
        }
        /* the move's reference is the sequence's from here on */
        table_blocks(&s->table[move->table])[move->index] = to_disk ? ON_DISK : move->host;
        if (move->kind == MOVE_OUT && move->node != NONE &&
            index_block(&pool->index, move->node, TIER_HOST, move->table) == NONE)
            folioi_pool_link(pool, TIER_HOST, move->node, move->table, move->host);
        pool->blocks_out += move->kind == MOVE_OUT;
    }
    if (failed) s->tier = s->held;
    else s->held = s->tier;
    bool here = s->held == FOLIO_TIER_DEVICE;
    s->state = here ? FOLIO_SEQUENCE_RESIDENT : FOLIO_SEQUENCE_SWAPPED;
}

static folio_status swap_out(folio_sequence *s, folio_tier tier, const char *call,
                             folio_transfer **t)
{
    folio_pool *pool = s->pool;
    int64_t num_blocks;
    TRY(check_out(s, tier));
    bool down = s->state == FOLIO_SEQUENCE_SWAPPED;
    TRY(list_nodes(s));
    if (!down) {
        TRY(folioi_pool_run_copies(pool)); /* one may be about to fill a block of this sequence */
        folioi_sequence_release(s, call);
    }
    TRY(room_below(s, tier, &num_blocks));
    folio_status status = folioi_transfer_new(pool, num_blocks, t);
    if (status != FOLIO_OK) {
        if (tier == FOLIO_TIER_DISK) folioi_store_unpromise(pool->store, num_blocks);
        return status;
    }
    if (!down) stamp_change(&s->stamp, call);
    s->swap_key = (folioi_key){{++pool->next_swap, 0}};
    plan_out(s, tier, *t);
    s->tier = tier;
    s->state = FOLIO_SEQUENCE_LEAVING;
    folioi_transfer_begin(*t, s, finish_out);
    return FOLIO_OK;
}

folio_status folio_sequence_swap_out(folio_sequence *s, folio_tier tier, const folio_run *run,
                                     folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(s != NULL, "folio_sequence_swap_out: sequence is NULL");
    TRY(folioi_pool_run_in(s->pool, run));
    folio_transfer *t = NULL;
    pool_lock(s->pool);
    folio_status status = swap_out(s, tier, "folio_sequence_swap_out", &t);
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    return folioi_pool_unlock(s->pool, status);
}

/* ------------------------------------------------------------------------------------ sequence in */

static void plan_in(folio_sequence *s, folio_transfer *t)
{
    folio_pool *pool = s->pool;
    for (int pass = 0; pass < 2; pass++)
        for (int32_t k = 0; k <= pool->cross; k++)
            for (int64_t i = s->table[k].released; i < s->table[k].num; i++) {
                int32_t node = listed_node(s, k, i);
                int32_t device = index_block(&pool->index, node, TIER_DEVICE, k);
                bool disk = s->held == FOLIO_TIER_DISK;
                folioi_move move = {.table = k,
                                    .index = i,
                                    .node = node,
                                    .host = disk ? NONE : table_blocks(&s->table[k])[i],
                                    .device = device,
                                    .holds_device = true,
                                    .ok = true};
                if ((device != NONE) != (pass == 0)) continue;
                if (pass == 0) {
                    move.kind = MOVE_KEEP;
                    blocks_retain(&pool->device, device);
                } else {
                    move.kind = disk ? MOVE_LOAD : MOVE_IN;
                    move.device = folioi_pool_take(pool, TIER_DEVICE, k);
                    if (disk) move.id = folioi_sequence_frame(s, k, i);
                }
                folioi_transfer_add(t, move);
            }
}

static void finish_in(folio_transfer *t)
{
    folio_pool *pool = t->pool;
    folio_sequence *s = t->sequence;
    if (t->status != FOLIO_OK) {
        for (int64_t i = t->num_moves - 1; i >= 0; i--) {
            int32_t block = t->moves[i].device;
            blocks_release_before(&pool->device, block, folioi_pool_prepare_rest(pool, block));
        }
        s->tier = s->held;
        s->state = FOLIO_SEQUENCE_SWAPPED;
        return;
    }
    folioi_sequence_vacate(s);
    for (int64_t i = 0; i < t->num_moves; i++) {
        const folioi_move *move = &t->moves[i];
        table_blocks(&s->table[move->table])[move->index] = move->device;
        pool->blocks_in += move->kind != MOVE_KEEP && move->ok;
    }
    s->state = FOLIO_SEQUENCE_RESIDENT;
    s->held = FOLIO_TIER_DEVICE;
    folioi_prefix_arrive(t);
}

static folio_status swap_in(folio_sequence *s, folio_transfer **t)
{
    folio_pool *pool = s->pool;
    REQUIRE(s->state == FOLIO_SEQUENCE_SWAPPED, "swap_in: the sequence is not swapped out%s",
            s->transfer != NULL ? ": a transfer is under way" : "");
    TRY(list_nodes(s));
    int64_t need = 0, woken = 0, kept = 0;
    for (int32_t k = 0; k <= pool->cross; k++)
        for (int64_t i = s->table[k].released; i < s->table[k].num; i++) {
            int32_t device = index_block(&pool->index, listed_node(s, k, i), TIER_DEVICE, k);
            if (device == NONE) need++;
            else kept++, woken += !block_is_held(&pool->device.block[device]);
        }
    int64_t have = blocks_available(&pool->device) - woken;
    if (need > have)
        FAIL(FOLIO_ERR_FULL, "swap_in: %lld blocks are needed, %lld of %lld are available",
             (long long)need, (long long)have, (long long)pool->device.num);
    TRY(folioi_transfer_new(pool, need + kept, t));
    plan_in(s, *t);
    s->tier = FOLIO_TIER_DEVICE;
    s->state = FOLIO_SEQUENCE_COMING;
    folioi_transfer_begin(*t, s, finish_in);
    return FOLIO_OK;
}

folio_status folio_sequence_swap_in(folio_sequence *s, const folio_run *run,
                                    folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(s != NULL, "folio_sequence_swap_in: sequence is NULL");
    TRY(folioi_pool_run_in(s->pool, run));
    folio_transfer *t = NULL;
    pool_lock(s->pool);
    folio_status status = swap_in(s, &t);
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    return folioi_pool_unlock(s->pool, status);
}

/* ------------------------------------------------------------------------------------ preemption */

static folio_status preempt(folio_sequence *s, folio_preemption policy, folio_transfer **t)
{
    folio_pool *pool = s->pool;
    TRY(folioi_sequence_resident(s, "preempt"));
    REQUIRE(policy == FOLIO_PREEMPT_RECOMPUTE || policy == FOLIO_PREEMPT_SWAP,
            "preempt: policy %d is unknown", (int)policy);
    REQUIRE(policy == FOLIO_PREEMPT_RECOMPUTE || pool->tiers,
            "preempt: the pool has no tier to swap to");
    static const char name[] = "folio_sequence_preempt";
    stamp_change(&s->stamp, name);
    if (policy == FOLIO_PREEMPT_RECOMPUTE) {
        TRY(folioi_sequence_shorten(s, 0));
        folioi_sequence_drop(s, pool->cross, 0);
        return FOLIO_OK;
    }
    folioi_sequence_cut(s, s->committed);
    if (s->encoder_committed < s->encoder_len) folioi_sequence_drop(s, pool->cross, 0);
    if (pool->host.num == 0) return swap_out(s, FOLIO_TIER_DISK, name, t);
    folio_status host = swap_out(s, FOLIO_TIER_HOST, name, t);
    if ((host != FOLIO_ERR_FULL && host != FOLIO_ERR_TOO_LARGE) || pool->store == NULL) return host;
    folio_status disk = swap_out(s, FOLIO_TIER_DISK, name, t);
    /* not even the disk could ever have it: what the host said, with its sentence */
    return disk == FOLIO_ERR_TOO_LARGE ? swap_out(s, FOLIO_TIER_HOST, name, t) : disk;
}

folio_status folio_sequence_preempt(folio_sequence *s, folio_preemption policy,
                                    const folio_run *run, folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(s != NULL, "folio_sequence_preempt: sequence is NULL");
    TRY(folioi_pool_run_in(s->pool, run));
    folio_transfer *t = NULL;
    pool_lock(s->pool);
    folio_status status = preempt(s, policy, &t);
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    return folioi_pool_unlock(s->pool, status);
}

static folio_status resume(folio_sequence *s, const folio_tokens *tokens, folio_transfer **t)
{
    while (s->state == FOLIO_SEQUENCE_LEAVING) pool_await(s->pool);
    if (s->state == FOLIO_SEQUENCE_SWAPPED) return swap_in(s, t);
    if (s->state == FOLIO_SEQUENCE_COMING) { /* one more owner of what is under way */
        *t = s->transfer;
        (*t)->owners++;
        return FOLIO_OK;
    }
    if (s->len > 0 || tokens == NULL) return FOLIO_OK;
    return folioi_prefix_match(s, tokens, t);
}

folio_status folio_sequence_resume(folio_sequence *s, const folio_tokens *tokens, int64_t *computed,
                                   const folio_run *run, folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(s != NULL, "folio_sequence_resume: sequence is NULL");
    TRY(folioi_pool_run_in(s->pool, run));
    folio_transfer *t = NULL;
    pool_lock(s->pool);
    folio_status status = resume(s, tokens, &t);
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    if (status == FOLIO_OK && computed != NULL)
        *computed = s->state == FOLIO_SEQUENCE_RESIDENT ? s->committed : 0;
    return folioi_pool_unlock(s->pool, status);
}

/* ---------------------------------------------------------------------------------- cached blocks */

/*
 * One cached block of the device goes to host memory, or straight to disk. It leaves the index at once, so that
 * nothing rests on a block under way; its node waits for it. False: no room.
 */
static bool plan_device_block(folio_transfer *t, folio_tier tier, int32_t block)
{
    folio_pool *pool = t->pool;
    int32_t node = pool->device.block[block].node, group = pool->device.block[block].group;
    folioi_move move = {.kind = MOVE_KEEP,
                        .table = group,
                        .index = -1,
                        .device = block,
                        .host = NONE,
                        .node = node,
                        .holds_device = true};
    if (pool->store != NULL) move.id = node_id(&pool->index, node, group);
    if (tier == FOLIO_TIER_DISK) {
        if (!folioi_store_has(pool->store, &move.id)) {
            if (t->num_moves >= folioi_store_available(pool->store)) return false;
            move.kind = MOVE_STORE;
        } else {
            folioi_store_touch(pool->store, &move.id); /* the next ones do not replace it */
        }
    } else {
        move.host = index_block(&pool->index, node, TIER_HOST, group);
        move.holds_host = true;
        if (move.host != NONE) {
            blocks_retain(&pool->host, move.host);
        } else {
            if (blocks_available(&pool->host) == 0) return false;
            move.kind = MOVE_OUT;
            move.host = take_host(t, group);
        }
    }
    index_pin(&pool->index, node);
    blocks_retain(&pool->device, block);
    folioi_pool_unlink(pool, TIER_DEVICE, block);
    folioi_transfer_add(t, move);
    return true;
}

static void plan_host_block(folio_transfer *t, int32_t block)
{
    folio_pool *pool = t->pool;
    int32_t node = pool->host.block[block].node, group = pool->host.block[block].group;
    folioi_move move = {.kind = MOVE_SPILL,
                        .table = group,
                        .index = -1,
                        .device = NONE,
                        .host = block,
                        .node = node,
                        .holds_host = true,
                        .id = node_id(&pool->index, node, group)};
    if (folioi_store_has(pool->store, &move.id)) move.kind = MOVE_KEEP, move.ok = true;
    index_pin(&pool->index, node);
    blocks_retain(&pool->host, block);
    folioi_transfer_add(t, move);
}

/* A device block that did not go down is cached again, if it can still be reached. */
static void take_back(folio_pool *pool, const folioi_move *move)
{
    int32_t parent = index_node(&pool->index, move->node)->parent;
    bool reachable = pool->window[move->table] != 0 || parent == NONE ||
                     index_block(&pool->index, parent, TIER_DEVICE, move->table) != NONE;
    if (reachable && index_block(&pool->index, move->node, TIER_DEVICE, move->table) == NONE)
        folioi_pool_link(pool, TIER_DEVICE, move->node, move->table, move->device);
    blocks_release_before(&pool->device, move->device,
                          folioi_pool_prepare_rest(pool, move->device));
}

/* Is a move's block where it was to go? A transfer that failed may have failed before or after it. */
static bool is_below(const folio_transfer *t, const folioi_move *move)
{
    return move->kind == MOVE_STORE || move->kind == MOVE_SPILL ? move->ok : t->status == FOLIO_OK;
}

static void finish_device_move(folio_transfer *t, const folioi_move *move)
{
    folio_pool *pool = t->pool;
    bool below = is_below(t, move);
    if (move->kind == MOVE_OUT && below &&
        index_block(&pool->index, move->node, TIER_HOST, move->table) == NONE) {
        folioi_pool_link(pool, TIER_HOST, move->node, move->table, move->host);
        pool->blocks_out++;
    }
    if (move->holds_host) blocks_release(&pool->host, move->host);
    if (below) blocks_release(&pool->device, move->device);
    else take_back(pool, move);
    index_unpin(&pool->index, move->node);
}

/* A cached host block leaves, unless it is not on disk or somebody has taken it meanwhile. */
static void finish_host_move(folio_transfer *t, const folioi_move *move)
{
    folio_pool *pool = t->pool;
    const folioi_block *k = &pool->host.block[move->host];
    if (move->ok && k->refs == 1 && k->node == move->node)
        folioi_pool_unlink(pool, TIER_HOST, move->host);
    blocks_release(&pool->host, move->host);
    index_unpin(&pool->index, move->node);
}

static void finish_cached(folio_transfer *t)
{
    /* What goes: leaves first, so that they stay older below. What comes back: parents first. */
    for (int64_t i = 0; i < t->num_moves; i++) {
        const folioi_move *move = &t->moves[i];
        if (move->holds_device && is_below(t, move)) finish_device_move(t, move);
        else if (!move->holds_device && move->node != NONE) finish_host_move(t, move);
    }
    for (int64_t i = t->num_moves - 1; i >= 0; i--)
        if (t->moves[i].holds_device && !is_below(t, &t->moves[i]))
            finish_device_move(t, &t->moves[i]);
}

static folio_status swap_out_cached(folio_pool *pool, folio_tier tier, int64_t max_blocks,
                                    int64_t *num_blocks, folio_transfer **t)
{
    TRY(check_tier(pool, tier));
    REQUIRE(max_blocks >= 0, "swap_out: max_blocks is %lld; it must be at least 0",
            (long long)max_blocks);
    bool from_host = tier == FOLIO_TIER_DISK && pool->host.num > 0;
    folioi_blocks *from = from_host ? &pool->host : &pool->device;
    int64_t limit = min_i64(max_blocks, from->num_cached);
    *num_blocks = 0;
    if (limit == 0) return FOLIO_OK;
    TRY(folioi_transfer_new(pool, limit, t));
    for (; *num_blocks < limit; ++*num_blocks) {
        int32_t block = from->oldest; /* a move's reference takes it out of the list */
        if (from_host) plan_host_block(*t, block);
        else if (!plan_device_block(*t, tier, block)) break;
    }
    folioi_transfer_begin(*t, NULL, finish_cached);
    return FOLIO_OK;
}

folio_status folio_pool_swap_out(folio_pool *pool, folio_tier tier, int64_t max_blocks,
                                 const folio_run *run, int64_t *num_blocks,
                                 folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(pool != NULL, "folio_pool_swap_out: pool is NULL");
    TRY(folioi_pool_run_in(pool, run));
    int64_t moved = 0;
    folio_transfer *t = NULL;
    pool_lock(pool);
    folio_status status = swap_out_cached(pool, tier, max_blocks, &moved, &t);
    if (status == FOLIO_OK && num_blocks != NULL) *num_blocks = moved;
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    return folioi_pool_unlock(pool, status);
}
