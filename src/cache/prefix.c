/*
 * prefix.c: sequences and the prefix index: match walks the tree from the root along a prompt's blocks,
 * commit adds a sequence's full blocks to it.
 *
 * In a group without window a sequence that holds a node's block holds those of all its ancestors too
 * (commit trades a block of equal tokens for the one the index has). Blocks are given back last one
 * first, so the list of cached blocks always has leaves before their parents.
 */
#include "cache/prefix.h"

#include <string.h>

static folio_status check_tokens(const folio_pool *pool, const folio_tokens *tokens,
                                 folio_tokens *t)
{
    STRUCT_IN(*t, tokens, "folio_tokens");
    REQUIRE(t->num_tokens >= 0 && t->num_tokens <= INT32_MAX,
            "tokens: num_tokens is %lld, outside [0, 2147483647]", (long long)t->num_tokens);
    REQUIRE(t->ids == NULL || t->hash_ids == NULL, "tokens: both ids and hash_ids are given");
    REQUIRE(t->ids != NULL || t->hash_ids != NULL || t->num_tokens < pool->block_size,
            "tokens: neither ids nor hash_ids are given");
    REQUIRE_ALIGNED(t->ids, "tokens: ids");
    REQUIRE_ALIGNED(t->hash_ids, "tokens: hash_ids");
    return FOLIO_OK;
}

/* The ids of block i. */
static inline folioi_block_ids tokens_block(const folio_tokens *t, int64_t i, int32_t block_size)
{
    if (t->hash_ids != NULL) return (folioi_block_ids){t->hash_ids + i, 8, true};
    return (folioi_block_ids){t->ids + i * block_size, block_size * 4, false};
}

/* --------------------------------------------------------------------- blocks that come or enter */

/* Block i of a group enters its node, or gives way to the one the node has. */
static void enter_block(folio_sequence *s, int32_t group, int64_t i, int32_t node)
{
    folio_pool *pool = s->pool;
    folioi_table *t = &s->table[group];
    if (i < t->released) return;
    int32_t own = table_blocks(t)[i];
    int32_t known = index_block(&pool->index, node, TIER_DEVICE, group);
    if (known == own) return;
    /* Without a window, only after a block that is itself the index's: see the top of this file. */
    int32_t parent = index_node(&pool->index, node)->parent;
    if (pool->window[group] == 0 && parent != NONE &&
        index_block(&pool->index, parent, TIER_DEVICE, group) != table_blocks(t)[i - 1])
        return;
    if (known != NONE) {
        blocks_retain(&pool->device, known);
        folioi_pool_release(pool, own);
        table_blocks(t)[i] = known;
    } else if (pool->device.block[own].node == NONE) { /* else a fork gave it other ids */
        folioi_pool_link(pool, TIER_DEVICE, node, group, own);
    }
}

/* Give back blocks from number `first` on; those of the index whose parents did not come back leave it, where
 * nobody else holds them. */
static void drop_unreachable(folio_sequence *s, int64_t first)
{
    folio_pool *pool = s->pool;
    for (int32_t g = 0; g < pool->num_layer_groups; g++) {
        folioi_table *t = &s->table[g];
        for (int64_t i = t->num - 1; i >= max_i64(first, t->released); i--) {
            int32_t block = table_blocks(t)[i];
            blocks_release_before(&pool->device, block, folioi_pool_prepare_rest(pool, block));
        }
        t->num = min_i64(t->num, first);
        t->released = min_i64(t->released, t->num);
    }
}

void folioi_prefix_arrive(folio_transfer *t)
{
    folio_pool *pool = t->pool;
    folio_sequence *s = t->sequence;
    int64_t good = s->table[0].num;
    bool encoder_lost = false;
    for (int64_t i = 0; i < t->num_moves; i++) {
        const folioi_move *move = &t->moves[i];
        if (move->ok) continue;
        if (move->table == pool->cross) encoder_lost = true;
        else good = min_i64(good, pool->windowed ? 0 : move->index);
    }
    /* In the order of blocks: a block enters only after the one before it. */
    for (int64_t i = 0; i < t->num_moves; i++) {
        const folioi_move *move = &t->moves[i];
        if (move->node != NONE && move->index < good)
            enter_block(s, move->table, move->index, move->node);
    }
    if (encoder_lost) folioi_sequence_drop(s, pool->cross, 0);
    if (good == s->table[0].num) return;
    drop_unreachable(s, good);
    folioi_sequence_cut(s, good * pool->block_size);
}

/* A device block for block i of a group, to be brought back from where the node has one. */
static int32_t load_block(folio_transfer *t, int32_t group, int64_t i, int32_t node)
{
    folio_pool *pool = t->pool;
    int32_t host = index_block(&pool->index, node, TIER_HOST, group);
    folioi_move move = {.kind = host != NONE ? MOVE_IN : MOVE_LOAD,
                        .table = group,
                        .index = i,
                        .device = folioi_pool_take(pool, TIER_DEVICE, group),
                        .host = host,
                        .node = node,
                        .holds_host = host != NONE,
                        .ok = host != NONE};
    if (host != NONE) blocks_retain(&pool->host, host);
    else move.id = node_id(&pool->index, node, group);
    folioi_transfer_add(t, move);
    return move.device;
}

static void finish_match(folio_transfer *t)
{
    folio_pool *pool = t->pool;
    folio_sequence *s = t->sequence;
    for (int64_t i = t->num_moves - 1; i >= 0; i--) {
        const folioi_move *move = &t->moves[i];
        if (move->holds_host) blocks_release(&pool->host, move->host);
        pool->blocks_in += t->status == FOLIO_OK && move->ok;
        if (move->kind == MOVE_LOAD) folioi_store_touch(pool->store, &move->id);
    }
    int64_t wished = s->indexed * pool->block_size;
    s->len = s->committed = wished;
    s->state = FOLIO_SEQUENCE_RESIDENT;
    if (t->status == FOLIO_OK) {
        folioi_prefix_arrive(t);
    } else {
        drop_unreachable(s, 0);
        folioi_sequence_cut(s, 0);
    }
    pool->hit_tokens -= wished - s->len;
}

/* ------------------------------------------------------------------------------------------ match */

/* A walk along a prompt. Keys are made some blocks ahead of the search, so that what it will read is
 * on its way from memory. */
enum { AHEAD = 16 };
typedef struct {
    folio_pool *pool;
    const folio_tokens *tokens;
    uint64_t salt;
    int64_t num;      /* blocks of the prompt */
    int64_t num_keys; /* made so far */
    folioi_key key[AHEAD];
    folioi_key last_key;
    int32_t node;                        /* of the last block found, pinned; NONE */
    int64_t run[FOLIO_MAX_LAYER_GROUPS]; /* blocks that a group has in any tier, up to here */
    int64_t device_run[FOLIO_MAX_LAYER_GROUPS];
    int64_t best, device_best; /* longest match so far: all tiers, device only */
} walk;

static void make_keys(walk *w, int64_t i)
{
    folioi_index *x = &w->pool->index;
    int64_t end = min_i64(w->num, i + AHEAD);
    for (int64_t k = w->num_keys; k < end; k++) {
        w->last_key = folioi_index_key(x, w->last_key, w->salt,
                                       tokens_block(w->tokens, k, w->pool->block_size));
        w->key[k % AHEAD] = w->last_key;
        index_prefetch_bucket(x, w->last_key);
    }
    for (int64_t k = w->num_keys; k < end; k++) index_prefetch_node(x, w->key[k % AHEAD]);
    w->num_keys = end;
}

static bool on_disk(folio_pool *pool, const walk *w, int64_t i, int32_t group)
{
    if (pool->store == NULL) return false;
    folioi_block_ids ids = tokens_block(w->tokens, i, pool->block_size);
    folioi_frame_id id = {.digest = folioi_index_digest(&pool->index, w->node, w->salt, ids),
                          .key = w->key[i % AHEAD],
                          .parent = w->node == NONE ? (folioi_key){{0, 0}}
                                                    : index_node(&pool->index, w->node)->key,
                          .salt = w->salt,
                          .group = group,
                          .kind = FOLIOI_FRAME_CACHED};
    return folioi_store_has(pool->store, &id);
}

/* Does every group have all that token i * block_size sees? */
static bool runs_suffice(const folio_pool *pool, const int64_t *run, int64_t i)
{
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        if (i - run[g] > window_begin(pool, g, i * pool->block_size) / pool->block_size)
            return false;
    return true;
}

/* Which tiers have block i of each group; false: a group without window has it nowhere. */
static bool count_runs(walk *w, int64_t i, int32_t node)
{
    folio_pool *pool = w->pool;
    bool all = true;
    for (int32_t g = 0; g < pool->num_layer_groups; g++) {
        bool device = index_block(&pool->index, node, TIER_DEVICE, g) != NONE;
        bool lower =
            !device && pool->tiers &&
            (index_block(&pool->index, node, TIER_HOST, g) != NONE || on_disk(pool, w, i, g));
        w->device_run[g] = device ? w->device_run[g] + 1 : 0;
        w->run[g] = device || lower ? w->run[g] + 1 : 0;
        if (pool->window[g] == 0 && w->run[g] == 0) all = false;
    }
    return all;
}

static folio_status walk_prompt(walk *w)
{
    folio_pool *pool = w->pool;
    folioi_index *x = &pool->index;
    for (int64_t i = 0; i < w->num; i++) {
        if (i == w->num_keys || i % (AHEAD / 2) == 0) make_keys(w, i);
        folioi_block_ids ids = tokens_block(w->tokens, i, pool->block_size);
        int32_t node = folioi_index_find(x, w->key[i % AHEAD], w->node, w->salt, ids);
        if (node == NONE && pool->store == NULL) break;
        if (!count_runs(w, i, node)) break;
        if (node == NONE) { /* on disk only: a node for what may come back */
            TRY(folioi_index_reserve(&pool->allocator, x, 1));
            node = folioi_index_add(x, w->key[i % AHEAD], w->node, w->salt, ids);
            if (node == NONE) break;
        }
        index_pin(x, node);
        index_unpin(x, w->node);
        w->node = node;
        ((int32_t *)pool->walk.data)[i] = node;
        if (runs_suffice(pool, w->run, i + 1)) w->best = i + 1;
        if (runs_suffice(pool, w->device_run, i + 1)) w->device_best = i + 1;
    }
    return FOLIO_OK;
}

/* Block i of the walk: must it be brought back, or woken from the cached ones, in how many groups? */
static void count_block(const folio_pool *pool, int64_t i, int32_t group, int64_t *loads,
                        int64_t *woken)
{
    int32_t node = ((const int32_t *)pool->walk.data)[i];
    int32_t block = index_block(&pool->index, node, TIER_DEVICE, group);
    if (block == NONE) ++*loads;
    else *woken += !block_is_held(&pool->device.block[block]);
}

/* The longest match whose lower-tier blocks have room on the device, and how many those are. */
static int64_t longest_with_room(const folio_pool *pool, const walk *w, int64_t *num_loads)
{
    int64_t loads = 0, woken = 0, have = blocks_available(&pool->device), best = 0;
    *num_loads = 0;
    if (pool->windowed) { /* a shorter one would need other blocks: all or what is there */
        for (int32_t g = 0; g < pool->num_layer_groups; g++)
            for (int64_t i = window_begin(pool, g, w->best * pool->block_size) / pool->block_size;
                 i < w->best; i++)
                count_block(pool, i, g, &loads, &woken);
        if (loads > 0 && loads > have - woken) return w->device_best;
        *num_loads = loads;
        return w->best;
    }
    for (int64_t i = 0; i < w->best; i++) {
        for (int32_t g = 0; g < pool->num_layer_groups; g++)
            count_block(pool, i, g, &loads, &woken);
        if (loads > 0 && loads > have - woken) break;
        best = i + 1;
        *num_loads = loads;
    }
    return best;
}

/* What a match found is used in lower tiers too, last block first: there as well leaves go before parents. */
static void touch_below(folio_sequence *s)
{
    folio_pool *pool = s->pool;
    for (int64_t i = s->indexed - 1; i >= 0; i--) {
        int32_t node = ((const int32_t *)pool->walk.data)[i];
        for (int32_t g = 0; g < pool->num_layer_groups; g++) {
            int32_t host = index_block(&pool->index, node, TIER_HOST, g);
            folioi_frame_id id = node_id(&pool->index, node, g);
            if (host != NONE) {
                blocks_retain(&pool->host, host);
                blocks_release(&pool->host, host);
            }
            if (pool->store != NULL) folioi_store_touch(pool->store, &id);
        }
    }
}

/* The sequence takes the first `blocks` nodes of the walk; those not on the device come later. */
static void attach(folio_sequence *s, int64_t blocks, folio_transfer *transfer)
{
    folio_pool *pool = s->pool;
    const int32_t *nodes = pool->walk.data;
    s->tip = blocks > 0 ? nodes[blocks - 1] : NONE;
    s->indexed = blocks;
    index_pin(&pool->index, s->tip);
    for (int32_t g = 0; g < pool->num_layer_groups; g++) {
        folioi_table *t = &s->table[g];
        t->num = blocks;
        t->released = window_begin(pool, g, blocks * pool->block_size) / pool->block_size;
        for (int64_t i = 0; i < t->released; i++) table_blocks(t)[i] = FOLIO_NO_BLOCK;
        for (int64_t i = t->released; i < blocks; i++) {
            int32_t block = index_block(&pool->index, nodes[i], TIER_DEVICE, g);
            if (block != NONE) blocks_retain(&pool->device, block);
            table_blocks(t)[i] = block;
        }
    }
    /* only now: new blocks may push cached ones out */
    for (int32_t g = 0; transfer != NULL && g < pool->num_layer_groups; g++) {
        int32_t *blocks_g = table_blocks(&s->table[g]);
        for (int64_t i = s->table[g].released; i < blocks; i++)
            if (blocks_g[i] == NONE) blocks_g[i] = load_block(transfer, g, i, nodes[i]);
    }
    s->len = s->committed = s->matched = blocks * pool->block_size;
    pool->hit_tokens += s->len;
    if (pool->tiers) touch_below(s);
}

/*
 * A match is no longer than what there is to find: no room is made for the rest of a prompt. In a store, a group without
 * window has all blocks of a prefix; with windows alone the last ones suffice, and say nothing of how many came before.
 */
static int64_t most_found(folio_pool *pool)
{
    int64_t nodes = pool->index.num_nodes;
    if (pool->store == NULL) return min_i64(nodes, FOLIOI_MATCH_BLOCKS);
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        if (pool->window[g] == 0)
            return min_i64(nodes + folioi_store_get_stats(pool->store).used, FOLIOI_MATCH_BLOCKS);
    return FOLIOI_MATCH_BLOCKS;
}

folio_status folioi_prefix_match(folio_sequence *s, const folio_tokens *tokens,
                                 folio_transfer **transfer)
{
    folio_pool *pool = s->pool;
    folio_tokens t;
    *transfer = NULL;
    TRY(check_tokens(pool, tokens, &t));
    TRY(folioi_sequence_resident(s, "match"));
    REQUIRE(s->len == 0, "match: the sequence has %lld tokens already", (long long)s->len);
    walk w = {.pool = pool, .tokens = &t, .salt = s->salt, .node = NONE};
    w.num = min_i64(t.num_tokens / pool->block_size, most_found(pool));
    TRY(folioi_sequence_grow(s, w.num * pool->block_size));
    TRY(folioi_array_reserve(&pool->allocator, &pool->walk,
                             max_i64(w.num, 1) * (int64_t)sizeof(int32_t), "a match"));
    folio_status status = walk_prompt(&w);
    int64_t loads = 0, best = w.device_best;
    if (pool->tiers) best = longest_with_room(pool, &w, &loads);
    if (status == FOLIO_OK && loads > 0) status = folioi_transfer_new(pool, loads, transfer);
    if (status == FOLIO_OK) {
        attach(s, best, *transfer);
        pool->lookup_tokens += t.num_tokens;
    }
    index_unpin(&pool->index, w.node);
    if (status == FOLIO_OK && loads > 0) {
        s->len = s->committed = 0; /* until they are there */
        s->state = FOLIO_SEQUENCE_COMING;
        folioi_transfer_begin(*transfer, s, finish_match);
    }
    return status;
}

folio_status folio_sequence_match(folio_sequence *s, const folio_tokens *tokens, int64_t *matched,
                                  folio_transfer **transfer)
{
    if (transfer != NULL) *transfer = NULL;
    REQUIRE(s != NULL, "folio_sequence_match: sequence is NULL");
    folio_transfer *t;
    pool_lock(s->pool);
    folio_status status = folioi_prefix_match(s, tokens, &t);
    if (status == FOLIO_OK) status = folioi_transfer_hand_out(t, transfer);
    if (status == FOLIO_OK && matched != NULL) *matched = s->len;
    return folioi_pool_unlock(s->pool, status);
}

/* ----------------------------------------------------------------------------------------- commit */

/* Room for the nodes of the blocks that one hold of the lock enters. */
static folio_status room_for_nodes(folio_sequence *s, const folio_tokens *tokens)
{
    int64_t n = tokens->num_tokens / s->pool->block_size - s->indexed;
    return folioi_index_reserve(&s->pool->allocator, &s->pool->index,
                                min_i64(max_i64(n, 0), FOLIOI_HOLD_BLOCKS));
}

/* There is room for the first ones. What does not enter is not found later, no more. */
static folio_status index_blocks(folio_sequence *s, const folio_tokens *tokens)
{
    folio_pool *pool = s->pool;
    folioi_index *x = &pool->index;
    int64_t first = s->indexed;
    for (int64_t i = first; i < tokens->num_tokens / pool->block_size && !s->stale; i++) {
        if (i > first && (i - first) % FOLIOI_HOLD_BLOCKS == 0) {
            stamp_change(&s->stamp, "folio_sequence_commit"); /* others may read its blocks now */
            TRY(folioi_pool_give_way(pool));
            if (s->stale || room_for_nodes(s, tokens) != FOLIO_OK) return FOLIO_OK;
        }
        folioi_block_ids ids = tokens_block(tokens, i, pool->block_size);
        folioi_key parent = s->tip == NONE ? (folioi_key){{0, 0}} : index_node(x, s->tip)->key;
        folioi_key key = folioi_index_key(x, parent, s->salt, ids);
        int32_t node = folioi_index_find(x, key, s->tip, s->salt, ids);
        if (node == NONE) node = folioi_index_add(x, key, s->tip, s->salt, ids);
        if (node == NONE) return FOLIO_OK;
        for (int32_t g = 0; g < pool->num_layer_groups; g++) enter_block(s, g, i, node);
        index_pin(x, node);
        index_unpin(x, s->tip);
        s->tip = node;
        s->indexed = i + 1;
    }
    return FOLIO_OK;
}

static folio_status commit(folio_sequence *s, const folio_tokens *tokens)
{
    folio_pool *pool = s->pool;
    TRY(folioi_sequence_resident(s, "commit"));
    folio_tokens t = {.num_tokens = s->len};
    if (tokens != NULL) {
        TRY(check_tokens(pool, tokens, &t));
        REQUIRE(t.num_tokens >= s->committed && t.num_tokens <= s->len,
                "commit: num_tokens is %lld, outside [committed_len = %lld, len = %lld]",
                (long long)t.num_tokens, (long long)s->committed, (long long)s->len);
        if (s->indexed > 0 && (t.ids != NULL || t.hash_ids != NULL)) {
            folioi_block_ids ids = tokens_block(&t, s->indexed - 1, pool->block_size);
            folioi_block_ids was = index_ids(&pool->index, s->tip);
            REQUIRE(ids.hashed == was.hashed && memcmp(ids.data, was.data, (size_t)was.bytes) == 0,
                    "commit: the ids of block %lld are not those it was indexed under; give all "
                    "ids from the first token on",
                    (long long)(s->indexed - 1));
        }
        TRY(room_for_nodes(s, &t));
    }
    int64_t indexed = s->indexed;
    bool more = t.num_tokens > s->committed || s->encoder_len > s->encoder_committed;
    s->committed = t.num_tokens;
    s->encoder_committed = s->encoder_len;
    if (t.ids != NULL || t.hash_ids != NULL) TRY(index_blocks(s, &t));
    /* others may read its blocks from here on: a batch from before would write to them */
    if (more || s->indexed > indexed) stamp_change(&s->stamp, "folio_sequence_commit");
    return FOLIO_OK;
}

folio_status folio_sequence_commit(folio_sequence *s, const folio_tokens *tokens)
{
    REQUIRE(s != NULL, "folio_sequence_commit: sequence is NULL");
    pool_lock(s->pool);
    return folioi_pool_unlock(s->pool, commit(s, tokens));
}
