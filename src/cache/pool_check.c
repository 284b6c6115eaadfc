/*
 * pool_check.c: the invariants of a pool: every block in exactly one state, counts that add up, every
 * reference with a holder, an index that agrees with the blocks, leaves before parents.
 */
#include "cache/pool_check.h"

#define HOLDS(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) return folioi_fail(FOLIO_ERR_INTERNAL, "pool check: " __VA_ARGS__);           \
    } while (0)

/* What the check counts by itself, per block. */
typedef struct {
    int32_t holders; /* tables and moves           */
    int32_t moves;   /* of them, moves             */
    int32_t reads;   /* queued copies              */
    int32_t coming;  /* of the holders, sequences whose match is still under way */
    int32_t places;  /* free stack or cached list  */
    int64_t order;   /* in the cached list         */
} tally;

/* And per entry of the index. */
typedef struct {
    int32_t children, pins;
} counts;

/* ----------------------------------------------------------------------------------------- blocks */

static folio_status check_places(const folioi_blocks *b, tally *count, const char *tier)
{
    HOLDS(b->num_free >= 0 && b->num_free <= b->num, "%s: %lld blocks are free", tier,
          (long long)b->num_free);
    for (int64_t i = 0; i < b->num_free; i++) {
        int32_t k = b->free_stack[i];
        HOLDS(k >= 0 && k < b->num, "%s: free block %d is outside", tier, k);
        HOLDS(b->block[k].node == NONE, "%s: free block %d is in the index", tier, k);
        HOLDS(i >= b->num_clean || b->block[k].dirty == 0, "%s: free block %d is not clean", tier,
              k);
        count[k].places++;
    }
    int64_t cached = 0;
    int32_t prev = NONE;
    for (int32_t k = b->oldest; k != NONE; k = b->block[k].next) {
        HOLDS(cached++ < b->num, "%s: the list of cached blocks has a circle", tier);
        HOLDS(b->block[k].prev == prev, "%s: cached block %d has a wrong neighbour", tier, k);
        HOLDS(b->block[k].node != NONE, "%s: cached block %d is not in the index", tier, k);
        count[k].places++;
        count[k].order = cached;
        prev = k;
    }
    HOLDS(prev == b->newest, "%s: the newest cached block is not %d", tier, b->newest);
    HOLDS(cached == b->num_cached, "%s: %lld blocks are in the list, %lld counted", tier,
          (long long)cached, (long long)b->num_cached);
    return FOLIO_OK;
}

static folio_status check_states(const folioi_blocks *b, const tally *count, const char *tier)
{
    int64_t used = 0, shared = 0;
    for (int32_t k = 0; k < b->num; k++) {
        const folioi_block *block = &b->block[k];
        HOLDS(block->refs == count[k].holders + block->hand,
              "%s: block %d has %d references, %d holders and %d callers", tier, k, block->refs,
              count[k].holders, block->hand);
        HOLDS(block->reads == count[k].reads, "%s: block %d has %d readers, counted %d", tier, k,
              block->reads, count[k].reads);
        HOLDS(count[k].places == !block_is_held(block), "%s: block %d is in %d lists and %s", tier,
              k, count[k].places, block_is_held(block) ? "held" : "not held");
        used += block_is_held(block);
        shared += block->refs > 1;
    }
    HOLDS(used == b->num_used && shared == b->num_shared,
          "%s: %lld used and %lld shared blocks, counted %lld and %lld", tier, (long long)used,
          (long long)shared, (long long)b->num_used, (long long)b->num_shared);
    HOLDS(b->num_free + b->num_used + b->num_cached == b->num,
          "%s: %lld free, %lld used and %lld cached are not %lld", tier, (long long)b->num_free,
          (long long)b->num_used, (long long)b->num_cached, (long long)b->num);
    HOLDS(b->peak_used >= b->num_used, "%s: the peak is below what is used", tier);
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------- holders */

static folio_status check_sequence(const folio_sequence *s, tally *device, tally *host, counts *c)
{
    const folio_pool *pool = s->pool;
    bool below = s->held != FOLIO_TIER_DEVICE;
    bool coming = s->state == FOLIO_SEQUENCE_COMING && !below; /* by a match */
    int64_t len = coming ? s->indexed * pool->block_size : s->len;
    for (int32_t k = 0; k <= pool->cross; k++) {
        const folioi_table *t = &s->table[k];
        int64_t tokens = k == pool->cross ? s->encoder_len : len;
        HOLDS(t->num == ceil_div(tokens, pool->block_size) && t->released <= t->num,
              "a table of %lld tokens has %lld blocks, %lld released", (long long)tokens,
              (long long)t->num, (long long)t->released);
        for (int64_t i = 0; i < t->num; i++) {
            int32_t b = table_blocks(t)[i];
            HOLDS(i >= t->released || b == FOLIO_NO_BLOCK, "a released block is in a table");
            if (i < t->released || s->held == FOLIO_TIER_DISK) continue;
            HOLDS(b >= 0 && b < (below ? pool->host.num : pool->device.num),
                  "block %d of a table is outside", b);
            (below ? host : device)[b].holders++;
            if (coming) device[b].coming++;
        }
    }
    HOLDS(s->committed <= s->len && s->indexed * pool->block_size <= max_i64(s->committed, len),
          "a sequence of %lld tokens has %lld committed, %lld blocks indexed", (long long)s->len,
          (long long)s->committed, (long long)s->indexed);
    HOLDS((s->tip == NONE) == (s->indexed == 0), "a sequence's tip and its %lld blocks disagree",
          (long long)s->indexed);
    if (s->tip != NONE) c[s->tip].pins++;
    return FOLIO_OK;
}

static folio_status check_holders(folio_pool *pool, tally *device, tally *host, counts *c)
{
    int64_t num = 0;
    for (const folio_sequence *s = pool->sequences; s != NULL; s = s->next, num++)
        TRY(check_sequence(s, device, host, c));
    HOLDS(num == pool->num_sequences, "%lld sequences, counted %lld", (long long)num,
          (long long)pool->num_sequences);
    for (const folio_transfer *t = pool->mover.first; t != NULL; t = t->next)
        for (int64_t i = 0; i < t->num_moves; i++) {
            const folioi_move *move = &t->moves[i];
            if (t->sequence == NULL && move->node != NONE) c[move->node].pins++;
            if (move->holds_device) device[move->device].holders++, device[move->device].moves++;
            if (move->holds_host) host[move->host].holders++, host[move->host].moves++;
        }
    for (int32_t g = 0; g < pool->num_layer_groups; g++)
        for (int64_t i = 0; i < pool->copies[g].num; i++) {
            const folio_block_pair *pair = (const folio_block_pair *)pool->copies[g].pairs.data + i;
            device[pair->from].reads++;
            const folioi_block *to = &pool->device.block[pair->to];
            HOLDS(to->copy == i && to->group == g && to->refs > 0, "the copy to block %lld is lost",
                  (long long)pair->to);
        }
    return FOLIO_OK;
}

/* ------------------------------------------------------------------------------------------ index */

/* Without a window a block is of use only after its parent's: no sequence has it alone, only callers may. */
static folio_status check_order(const folio_pool *pool, int32_t node, int32_t group,
                                const tally *count)
{
    int32_t parent = index_node(&pool->index, node)->parent;
    if (pool->window[group] != 0 || parent == NONE) return FOLIO_OK;
    int32_t b = index_block(&pool->index, node, TIER_DEVICE, group);
    int32_t p = index_block(&pool->index, parent, TIER_DEVICE, group);
    const folioi_block *block = &pool->device.block[b];
    bool alone = block->hand > 0 || block->reads > 0 || count[b].coming > 0 || count[b].moves > 0;
    HOLDS(p != NONE || alone, "block %d is cached and its parent is not", b);
    if (p == NONE) return FOLIO_OK;
    const folioi_block *before = &pool->device.block[p];
    HOLDS(count[b].holders == count[b].moves + count[b].coming || block_is_held(before),
          "block %d is held and its parent %d is not", b, p);
    HOLDS(block_is_held(block) || block_is_held(before) || count[b].order < count[p].order,
          "cached block %d is newer than its parent %d", b, p);
    return FOLIO_OK;
}

static folio_status check_node(const folio_pool *pool, int32_t node, counts *c, const tally *device)
{
    const folioi_index *x = &pool->index;
    const folioi_node *n = index_node(x, node);
    int32_t links = 0;
    for (int tier = 0; tier < NUM_LINKED_TIERS; tier++)
        for (int32_t g = 0; g < x->num_layer_groups; g++) {
            int32_t b = index_block(x, node, tier, g);
            const folioi_blocks *blocks = tier == TIER_DEVICE ? &pool->device : &pool->host;
            if (b == NONE) continue;
            links++;
            HOLDS(b >= 0 && b < blocks->num && blocks->block[b].node == node &&
                      blocks->block[b].group == g,
                  "entry %d and its block %d disagree", node, b);
            if (tier == TIER_HOST) continue;
            TRY(check_order(pool, node, g, device));
        }
    HOLDS(links == n->num_links, "entry %d has %d blocks, counted %d", node, links, n->num_links);
    HOLDS(links > 0 || n->num_children > 0 || n->pins > 0, "entry %d is of no use", node);
    if (n->parent != NONE) {
        HOLDS(index_node(x, n->parent)->used, "entry %d has lost its parent", node);
        c[n->parent].children++;
    }
    HOLDS(folioi_index_find(x, n->key, n->parent, n->salt, index_ids(x, node)) == node,
          "entry %d is not found", node);
    return FOLIO_OK;
}

static folio_status check_index(const folio_pool *pool, counts *c, const tally *device)
{
    const folioi_index *x = &pool->index;
    int64_t num = 0, links = 0;
    for (int32_t i = 0; i < x->capacity; i++) {
        if (!index_node(x, i)->used) continue;
        TRY(check_node(pool, i, c, device));
        num++;
        links += index_node(x, i)->num_links;
    }
    HOLDS(num == x->num_nodes, "%lld entries, counted %lld", (long long)num,
          (long long)x->num_nodes);
    for (int32_t i = 0; i < x->capacity; i++) {
        const folioi_node *n = index_node(x, i);
        HOLDS(!n->used || (n->num_children == c[i].children && n->pins == c[i].pins),
              "entry %d has %d children and %d pins, counted %d and %d", i, c[i].children,
              c[i].pins, n->num_children, n->pins);
    }
    const folioi_blocks *tiers[] = {&pool->device, &pool->host};
    for (int tier = 0; tier < NUM_LINKED_TIERS; tier++)
        for (int64_t i = 0; i < tiers[tier]->num; i++) links -= tiers[tier]->block[i].node != NONE;
    HOLDS(links == 0, "a block is in the index without an entry");
    return FOLIO_OK;
}

folio_status folioi_pool_check(folio_pool *pool)
{
    folioi_arena arena = {NULL, 0};
    void *memory = NULL;
    tally *device = NULL, *host = NULL;
    counts *c = NULL;
    for (int pass = 0; pass < 2; pass++) {
        device = arena_take(&arena, pool->device.num * (int64_t)sizeof(tally));
        host = arena_take(&arena, pool->host.num * (int64_t)sizeof(tally));
        c = arena_take(&arena, pool->index.capacity * (int64_t)sizeof(counts));
        if (pass == 1) break;
        TRY(folioi_alloc(&pool->allocator, arena.used, "a pool check", &memory));
        arena = (folioi_arena){memory, 0};
    }
    folio_status status = check_holders(pool, device, host, c);
    if (status == FOLIO_OK) status = check_places(&pool->device, device, "device");
    if (status == FOLIO_OK) status = check_places(&pool->host, host, "host");
    if (status == FOLIO_OK) status = check_states(&pool->device, device, "device");
    if (status == FOLIO_OK) status = check_states(&pool->host, host, "host");
    if (status == FOLIO_OK) status = check_index(pool, c, device);
    folioi_free(&pool->allocator, memory, arena.used);
    return status;
}
