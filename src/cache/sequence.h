/* sequence.h: the tokens of one request and their block tables. Under the pool's lock. */
#ifndef FOLIOI_SEQUENCE_H
#define FOLIOI_SEQUENCE_H

#include "cache/pool.h"
#include "core/stamp.h"

enum { ON_DISK = 0 }; /* in a swapped sequence's table: there is a frame */

typedef struct folioi_table {
    folioi_array blocks; /* int32_t [num] */
    int64_t num;
    int64_t released; /* entries before it hold FOLIO_NO_BLOCK */
} folioi_table;

struct folio_sequence {
    folioi_stamp stamp; /* changes with all that a batch copies */
    folio_pool *pool;
    folio_sequence *prev, *next;
    uint64_t salt;
    int64_t len, committed, matched, encoder_len, encoder_committed;
    int64_t indexed; /* blocks that the index knows, from the first on */
    int32_t tip;     /* the node of the last of them, pinned; NONE */
    bool stale;      /* the cache was told to forget what it holds */
    folio_sequence_state state;
    folio_tier held;          /* the tier whose blocks the tables name */
    folio_tier tier;          /* where it is, or will be after its transfer */
    folioi_key swap_key;      /* names its frames in the store */
    folio_transfer *transfer; /* under way */
    folioi_table table[MAX_TABLES];
};

static inline int32_t *table_blocks(const folioi_table *t) { return t->blocks.data; }

/** The node of block i of a sequence, i < indexed. */
static inline int32_t sequence_node(const folio_sequence *s, int64_t i)
{
    int32_t node = s->tip;
    for (int64_t k = s->indexed - 1; k > i; k--) node = index_node(&s->pool->index, node)->parent;
    return node;
}

/** Refuses sequences that are not on the device. */
folio_status folioi_sequence_resident(const folio_sequence *s, const char *call);

/** Room in all block tables for the blocks of so many tokens. */
folio_status folioi_sequence_grow(folio_sequence *s, int64_t len);

/** Give back a table's blocks from number `first` on, last one first. */
void folioi_sequence_drop(folio_sequence *s, int32_t table, int64_t first);

/** Truncate, for a length known to be right; shorten opens the lock now and then. */
void folioi_sequence_cut(folio_sequence *s, int64_t len);
folio_status folioi_sequence_shorten(folio_sequence *s, int64_t len);

/** Blocks out of a windowed group's window: how many would become available; release them. */
int64_t folioi_sequence_releasable(const folio_sequence *s);
void folioi_sequence_release(folio_sequence *s, const char *call);

/** The frame of a swapped sequence's block. */
folioi_frame_id folioi_sequence_frame(const folio_sequence *s, int32_t table, int64_t i);
/** Give back all that the tables name, last blocks first. They still name it. */
void folioi_sequence_vacate(folio_sequence *s);

#endif
