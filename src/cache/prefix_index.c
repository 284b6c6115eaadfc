/* prefix_index.c: nodes, their hash table and their keys. */
#include "cache/prefix_index.h"

#include "core/checked.h"

#include <string.h>

/* Who knows hash_key can make any number of keys that collide: they must not slow down the search for others. */
enum { MOST_IN_CHAIN = 32 };

/* What comes before the ids in a key's input. */
typedef struct {
    folioi_key parent;
    uint64_t salt;
    uint64_t hashed;
} key_head;

folio_status folioi_index_init(const folio_allocator *a, folioi_index *x, int32_t num_layer_groups,
                               int32_t block_size, uint64_t hash_key)
{
    *x = (folioi_index){.num_layer_groups = num_layer_groups,
                        .token_bytes = block_size * (int32_t)sizeof(int32_t),
                        .ids_bytes = (int32_t)max_i64(block_size * (int64_t)sizeof(int32_t), 8),
                        .hash_key = hash_key,
                        .key_mask = ~(uint64_t)0,
                        .unused = NONE};
    XXH3_generateSecret_fromSeed(x->secret, hash_key);
    TRY(folioi_array_reserve(a, &x->scratch, (int64_t)sizeof(key_head) + x->ids_bytes,
                             "the prefix index"));
    return folioi_index_reserve(a, x, 1);
}

void folioi_index_free(const folio_allocator *a, folioi_index *x)
{
    folioi_array_free(a, &x->nodes);
    folioi_array_free(a, &x->links);
    folioi_array_free(a, &x->ids);
    folioi_array_free(a, &x->buckets);
    folioi_array_free(a, &x->scratch);
    explicit_bzero(x, sizeof *x); /* hash key and secrets */
}

/* The input of a key or digest: what came before, salt, ids. */
static size_t fill_input(folioi_index *x, folioi_key before, uint64_t salt, folioi_block_ids ids)
{
    key_head head = {before, salt, ids.hashed};
    memcpy(x->scratch.data, &head, sizeof head);
    memcpy((char *)x->scratch.data + sizeof head, ids.data, (size_t)ids.bytes);
    return sizeof head + (size_t)ids.bytes;
}

folioi_key folioi_index_key(folioi_index *x, folioi_key parent, uint64_t salt, folioi_block_ids ids)
{
    size_t n = fill_input(x, parent, salt, ids);
    XXH128_hash_t h = XXH3_128bits_withSecretandSeed(x->scratch.data, n, x->secret,
                                                     sizeof x->secret, x->hash_key);
    return (folioi_key){{h.low64 & x->key_mask, h.high64 & x->key_mask}};
}

void folioi_index_use_digests(folioi_index *x, const folioi_key *secret)
{
    x->digests = true;
    XXH3_generateSecret(x->digest_secret, sizeof x->digest_secret, secret, sizeof *secret);
}

folioi_key folioi_index_digest(folioi_index *x, int32_t parent, uint64_t salt, folioi_block_ids ids)
{
    folioi_key before = {{0, 0}};
    if (!x->digests) return before;
    if (parent != NONE) before = index_node(x, parent)->digest;
    size_t n = fill_input(x, before, salt, ids);
    XXH128_hash_t h =
        XXH3_128bits_withSecret(x->scratch.data, n, x->digest_secret, sizeof x->digest_secret);
    return (folioi_key){{h.low64, h.high64}};
}

int32_t folioi_index_find(const folioi_index *x, folioi_key key, int32_t parent, uint64_t salt,
                          folioi_block_ids ids)
{
    int32_t node = *table_bucket(&x->table, key.word[0]);
    while (node != NONE) {
        const folioi_node *n = index_node(x, node);
        if (key_equal(n->key, key) && n->parent == parent && n->salt == salt &&
            n->hashed == ids.hashed &&
            memcmp(index_ids(x, node).data, ids.data, (size_t)ids.bytes) == 0)
            return node;
        node = n->next;
    }
    return NONE;
}

folio_status folioi_index_reserve(const folio_allocator *a, folioi_index *x, int64_t n)
{
    if (x->num_nodes + n <= x->capacity) return FOLIO_OK;
    int64_t capacity = max_i64(64, x->capacity);
    while (capacity < x->num_nodes + n) capacity *= 2;
    REQUIRE(capacity <= INT32_MAX / 2, "the prefix index would exceed 2^30 entries");
    static const char what[] = "the prefix index";
    int64_t links = (int64_t)sizeof(int32_t) * NUM_LINKED_TIERS * x->num_layer_groups;
    TRY(folioi_array_reserve(a, &x->nodes, capacity * (int64_t)sizeof(folioi_node), what));
    x->table.chain = (char *)&index_node(x, 0)->next;
    x->table.stride = sizeof(folioi_node);
    TRY(folioi_array_reserve(a, &x->links, capacity * links, what));
    TRY(folioi_array_reserve(a, &x->ids, capacity * x->ids_bytes, what));
    TRY(folioi_array_reserve(a, &x->buckets, capacity * (int64_t)sizeof(int32_t), what));
    for (int64_t i = capacity - 1; i >= x->capacity; i--) {
        index_node(x, (int32_t)i)->next = x->unused;
        x->unused = (int32_t)i;
    }
    x->capacity = capacity;
    table_init(&x->table, x->buckets.data, capacity);
    for (int32_t i = 0; i < capacity; i++)
        if (index_node(x, i)->used) table_add(&x->table, index_node(x, i)->key.word[0], i);
    return FOLIO_OK;
}

/* Has a key's chain room? Keys that do not collide on purpose never fill it: half of all chains are empty. */
static bool has_room(const folioi_index *x, folioi_key key)
{
    int32_t length = 0, node = *table_bucket(&x->table, key.word[0]);
    for (; node != NONE && length < MOST_IN_CHAIN; length++) node = index_node(x, node)->next;
    return length < MOST_IN_CHAIN;
}

int32_t folioi_index_add(folioi_index *x, folioi_key key, int32_t parent, uint64_t salt,
                         folioi_block_ids ids)
{
    if (!has_room(x, key)) return NONE;
    int32_t node = x->unused;
    folioi_node *n = index_node(x, node);
    x->unused = n->next;
    *n = (folioi_node){.key = key,
                       .digest = folioi_index_digest(x, parent, salt, ids),
                       .salt = salt,
                       .parent = parent,
                       .used = true,
                       .hashed = ids.hashed};
    table_add(&x->table, key.word[0], node);
    memcpy((char *)x->ids.data + (int64_t)node * x->ids_bytes, ids.data, (size_t)ids.bytes);
    for (int tier = 0; tier < NUM_LINKED_TIERS; tier++)
        for (int32_t g = 0; g < x->num_layer_groups; g++) *index_link(x, node, tier, g) = NONE;
    if (parent != NONE) index_node(x, parent)->num_children++;
    x->num_nodes++;
    return node;
}

void folioi_index_prune(folioi_index *x, int32_t node)
{
    while (node != NONE) {
        folioi_node *n = index_node(x, node);
        if (n->num_links > 0 || n->num_children > 0 || n->pins > 0) return;
        table_remove(&x->table, n->key.word[0], node);
        memset((char *)x->ids.data + (int64_t)node * x->ids_bytes, 0, (size_t)x->ids_bytes);
        int32_t parent = n->parent;
        n->used = false;
        n->next = x->unused;
        x->unused = node;
        x->num_nodes--;
        if (parent != NONE) index_node(x, parent)->num_children--;
        node = parent;
    }
}
