/*
 * blocks.h: the numbered blocks of one tier. Each is in one state:
 *
 *   free     no reference; on the stack of free ones
 *   used     `refs` holders, or `reads` queued copies that still read it
 *   cached   no reference, but known to the prefix index; in the list, oldest first
 *
 * The free ones that were never used, or were wiped since, lie at the bottom of the stack. Every operation is constant
 * time. Knows nothing of sequences; the pool's lock guards it.
 */
#ifndef FOLIOI_BLOCKS_H
#define FOLIOI_BLOCKS_H

#include "core/alloc.h"

#include <stdbool.h>

#define NONE (-1)

typedef struct folioi_block {
    int32_t refs;       /* holders: block tables, moves, callers                            */
    int32_t hand;       /* of them, callers                                                 */
    int32_t reads;      /* queued copies that read it                                       */
    int32_t node;       /* of the prefix index; NONE                                        */
    int32_t group;      /* whose K and V it holds                                           */
    int32_t copy;       /* queued copy that will write it, in its group's queue; NONE       */
    int32_t prev, next; /* in the list of cached ones                                       */
    uint32_t dirty;     /* a bit for each group whose K and V it has held since it was wiped */
} folioi_block;

typedef struct folioi_blocks {
    folioi_block *block; /* [num]                    */
    int32_t *free_stack; /* [num], num_free in use   */
    int64_t num, num_free, num_used, num_shared, num_cached;
    int64_t num_clean; /* of the free ones, from the bottom of the stack */
    int64_t peak_used, allocations, evictions;
    int32_t oldest, newest; /* cached */
} folioi_blocks;

folio_status folioi_blocks_init(const folio_allocator *a, folioi_blocks *b, int64_t num,
                                const char *what);
void folioi_blocks_free(const folio_allocator *a, folioi_blocks *b);

static inline int64_t blocks_available(const folioi_blocks *b)
{
    return b->num_free + b->num_cached;
}

static inline bool block_is_held(const folioi_block *k) { return k->refs > 0 || k->reads > 0; }

static inline void blocks_unlink(folioi_blocks *b, int32_t i)
{
    folioi_block *k = &b->block[i];
    if (k->prev != NONE) b->block[k->prev].next = k->next;
    else b->oldest = k->next;
    if (k->next != NONE) b->block[k->next].prev = k->prev;
    else b->newest = k->prev;
    k->prev = k->next = NONE;
    b->num_cached--;
}

/** The free block that is taken next counts as one that holds something. */
static inline void blocks_soil(folioi_blocks *b)
{
    b->block[b->free_stack[b->num_free - 1]].dirty = ~0u;
    if (b->num_clean == b->num_free) b->num_clean--;
}

/** A free block with one reference; there must be one. */
static inline int32_t blocks_take(folioi_blocks *b, int32_t group)
{
    int32_t i = b->free_stack[--b->num_free];
    if (b->num_clean > b->num_free) b->num_clean = b->num_free;
    b->block[i].refs = 1;
    b->block[i].group = group;
    b->block[i].dirty |= group == NONE ? ~0u : 1u << group; /* by hand: any cache */
    b->allocations++;
    if (++b->num_used > b->peak_used) b->peak_used = b->num_used;
    return i;
}

/* From cached to used, before the first reference comes. */
static inline void blocks_wake(folioi_blocks *b, int32_t i)
{
    if (block_is_held(&b->block[i])) return;
    blocks_unlink(b, i);
    if (++b->num_used > b->peak_used) b->peak_used = b->num_used;
}

/* After the last reference went: free; or to the list, before the cached block `next` (NONE: the end). */
static inline void blocks_rest(folioi_blocks *b, int32_t i, int32_t next)
{
    folioi_block *k = &b->block[i];
    if (block_is_held(k)) return;
    b->num_used--;
    if (k->node == NONE) {
        b->free_stack[b->num_free++] = i;
        return;
    }
    int32_t prev = next != NONE ? b->block[next].prev : b->newest;
    k->prev = prev;
    k->next = next;
    *(prev != NONE ? &b->block[prev].next : &b->oldest) = i;
    *(next != NONE ? &b->block[next].prev : &b->newest) = i;
    b->num_cached++;
}

/** The last reference to a wiped block, which nothing knows: it goes below the others. */
static inline void blocks_release_clean(folioi_blocks *b, int32_t i)
{
    b->block[i].refs = 0;
    b->block[i].dirty = 0;
    b->num_used--;
    b->free_stack[b->num_free++] = b->free_stack[b->num_clean];
    b->free_stack[b->num_clean++] = i;
}

/** One more holder of a used or cached block. */
static inline void blocks_retain(folioi_blocks *b, int32_t i)
{
    blocks_wake(b, i);
    if (++b->block[i].refs == 2) b->num_shared++;
}

/** One holder less; where it was the last of a block the index knows, the block lies before `next`. */
static inline void blocks_release_before(folioi_blocks *b, int32_t i, int32_t next)
{
    if (--b->block[i].refs == 1) b->num_shared--;
    blocks_rest(b, i, next);
}

static inline void blocks_release(folioi_blocks *b, int32_t i)
{
    blocks_release_before(b, i, NONE);
}

static inline void blocks_read_begin(folioi_blocks *b, int32_t i)
{
    blocks_wake(b, i);
    b->block[i].reads++;
}

static inline void blocks_read_end(folioi_blocks *b, int32_t i, int32_t next)
{
    b->block[i].reads--;
    blocks_rest(b, i, next);
}

/** The index forgets a block: a cached one becomes free, a used one stays with its holders. */
static inline void blocks_forget(folioi_blocks *b, int32_t i)
{
    b->block[i].node = NONE;
    if (block_is_held(&b->block[i])) return;
    blocks_unlink(b, i);
    b->free_stack[b->num_free++] = i;
}

#endif
