/*
 * bad_key.h: which bad write of a step is the first: an order in 64 bits, so that threads, on a device too, find it by an
 * atomic minimum. Plain C: kernels compile it.
 */
#ifndef FOLIOI_BAD_KEY_H
#define FOLIOI_BAD_KEY_H

#include "core/checked.h"

#include <folio/folio.h>

#define FOLIOI_BAD_NONE UINT64_MAX

/** 13 bits of layer and attention, which end where they are full; 2 of type, 2 of what, 31 of row, 16 of head. */
SHARED_INLINE uint64_t bad_key(int64_t layer, int64_t attention, int64_t num_attentions, int type,
                               int what, int64_t row, int64_t head)
{
    int64_t place = max_i64(layer, 0) * num_attentions + attention;
    return (uint64_t)min_i64(place, 8191) << 51 | (uint64_t)type << 49 | (uint64_t)what << 47 |
           (uint64_t)row << 16 | (uint64_t)head;
}

SHARED_INLINE int bad_key_type(uint64_t key) { return (int)(key >> 49 & 3); }
SHARED_INLINE int bad_key_what(uint64_t key) { return (int)(key >> 47 & 3); }
SHARED_INLINE int64_t bad_key_row(uint64_t key) { return (int64_t)(key >> 16 & 0x7fffffff); }
SHARED_INLINE int32_t bad_key_head(uint64_t key) { return (int32_t)(key & 0xffff); }

/** The place of row i of a sequence: cached tokens come first, where it is known how many of its own it has. */
SHARED_INLINE int64_t bad_position(bool is_decoder, int what, int64_t query_len, int64_t key_len,
                                   int64_t context_len, int64_t i)
{
    bool counts = what != FOLIO_WRITTEN_OUT || (is_decoder && query_len <= key_len);
    return counts ? context_len + i : i;
}

#endif
