/*
 * prefix_index.h: the prefix cache's index: a tree whose nodes are full blocks of tokens.
 *
 *   root of a salt ── node ── node ── node            key = hash(parent's key, salt, token ids)
 *                       └── node                      links: its block in each tier and group
 *
 * A node is found by its key through a hash table, and is the one only if its parent is the very node
 * the search came from and its salt and ids are equal: so a collision of keys cannot be acted on. A node
 * lives while it has a link, a child or a pin. Not locked itself.
 */
#ifndef FOLIOI_PREFIX_INDEX_H
#define FOLIOI_PREFIX_INDEX_H

#include "cache/key_table.h"
#include "core/hash.h"

enum { TIER_DEVICE = 0, TIER_HOST = 1, NUM_LINKED_TIERS = 2 }; /* disk is found by key */

typedef struct folioi_node {
    folioi_key key;
    folioi_key
        digest; /* of the whole prefix, under the store's secret; only where there is a store */
    uint64_t salt;
    int32_t parent; /* NONE: a sequence's first block */
    int32_t next;   /* in its bucket, or among unused nodes */
    int32_t num_children;
    int32_t num_links;
    int32_t pins; /* sequences that end here, walks and transfers */
    bool used;
    bool hashed; /* its id is one hash id, not token ids */
} folioi_node;

/** What a block of tokens is. */
typedef struct folioi_block_ids {
    const void *data;
    int32_t bytes;
    bool hashed;
} folioi_block_ids;

typedef struct folioi_index {
    int32_t num_layer_groups;
    int32_t token_bytes, ids_bytes; /* of a block's token ids; room for them or a hash id */
    uint64_t hash_key;
    uint64_t key_mask; /* all ones, but in tests of collisions */
    unsigned char secret[XXH3_SECRET_DEFAULT_SIZE];
    bool digests; /* nodes have them */
    unsigned char digest_secret[XXH3_SECRET_DEFAULT_SIZE];
    folioi_array nodes;   /* folioi_node [capacity] */
    folioi_array links;   /* int32_t [capacity][NUM_LINKED_TIERS][num_layer_groups] */
    folioi_array ids;     /* [capacity][ids_bytes] */
    folioi_array buckets; /* of the table: int32_t [capacity] */
    folioi_array scratch; /* a key's input */
    folioi_key_table table;
    int64_t capacity, num_nodes;
    int32_t unused;
} folioi_index;

folio_status folioi_index_init(const folio_allocator *a, folioi_index *x, int32_t num_layer_groups,
                               int32_t block_size, uint64_t hash_key);
void folioi_index_free(const folio_allocator *a, folioi_index *x);

static inline folioi_node *index_node(const folioi_index *x, int32_t node)
{
    return (folioi_node *)x->nodes.data + node;
}

static inline int32_t *index_link(const folioi_index *x, int32_t node, int tier, int32_t group)
{
    return (int32_t *)x->links.data +
           ((int64_t)node * NUM_LINKED_TIERS + tier) * x->num_layer_groups + group;
}

/** The number of a node's block in a tier and group; NONE, also of node NONE. */
static inline int32_t index_block(const folioi_index *x, int32_t node, int tier, int32_t group)
{
    return node == NONE ? NONE : *index_link(x, node, tier, group);
}

static inline folioi_block_ids index_ids(const folioi_index *x, int32_t node)
{
    bool hashed = index_node(x, node)->hashed;
    return (folioi_block_ids){(char *)x->ids.data + (int64_t)node * x->ids_bytes,
                              hashed ? 8 : x->token_bytes, hashed};
}

static inline folioi_key index_parent_key(const folioi_index *x, int32_t node)
{
    int32_t parent = index_node(x, node)->parent;
    return parent == NONE ? (folioi_key){{0, 0}} : index_node(x, parent)->key;
}

/** The key of a block after the one of `parent` (zero: the first). */
folioi_key folioi_index_key(folioi_index *x, folioi_key parent, uint64_t salt,
                            folioi_block_ids ids);

/** Nodes get digests under this secret; before the first one is added. */
void folioi_index_use_digests(folioi_index *x, const folioi_key *secret);
/** The digest of a block after node `parent` (NONE: the first); zero without digests. */
folioi_key folioi_index_digest(folioi_index *x, int32_t parent, uint64_t salt,
                               folioi_block_ids ids);

static inline void index_prefetch_bucket(const folioi_index *x, folioi_key key)
{
    __builtin_prefetch(table_bucket(&x->table, key.word[0]));
}

static inline void index_prefetch_node(const folioi_index *x, folioi_key key)
{
    int32_t node = *table_bucket(&x->table, key.word[0]);
    if (node == NONE) return;
    __builtin_prefetch(index_node(x, node));
    __builtin_prefetch((char *)x->ids.data + (int64_t)node * x->ids_bytes);
    __builtin_prefetch(index_link(x, node, 0, 0));
}

/** The child of `parent` with this key, salt and ids; NONE. */
int32_t folioi_index_find(const folioi_index *x, folioi_key key, int32_t parent, uint64_t salt,
                          folioi_block_ids ids);

/** Room for n more nodes, so that as many adds cannot fail. */
folio_status folioi_index_reserve(const folio_allocator *a, folioi_index *x, int64_t n);

/** A new node without links; it goes with the next settle unless it gets a link, a child or a pin. NONE: too many keys
 * have its place in the table. */
int32_t folioi_index_add(folioi_index *x, folioi_key key, int32_t parent, uint64_t salt,
                         folioi_block_ids ids);

/** Take a node away if nothing needs it any more, then its parent ... */
void folioi_index_prune(folioi_index *x, int32_t node);

static inline void index_pin(folioi_index *x, int32_t node)
{
    if (node != NONE) index_node(x, node)->pins++;
}

static inline void index_unpin(folioi_index *x, int32_t node)
{
    if (node == NONE) return;
    index_node(x, node)->pins--;
    folioi_index_prune(x, node);
}

static inline void index_set_link(folioi_index *x, int32_t node, int tier, int32_t group,
                                  int32_t block)
{
    *index_link(x, node, tier, group) = block;
    index_node(x, node)->num_links++;
}

/** The caller settles the node when it is done with it. */
static inline void index_clear_link(folioi_index *x, int32_t node, int tier, int32_t group)
{
    *index_link(x, node, tier, group) = NONE;
    index_node(x, node)->num_links--;
}

#endif
