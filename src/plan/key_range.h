/* key_range.h: the keys that one query row sees, [begin, end): causality, window and length as numbers. */
#ifndef FOLIOI_KEY_RANGE_H
#define FOLIOI_KEY_RANGE_H

#include "core/checked.h"

typedef struct folioi_range {
    int32_t begin, end; /* begin == end: no key */
} folioi_range;

/** own: the key whose position is the query's. left, right: keys seen before and after it; -1: all. */
SHARED_INLINE folioi_range range_around(int64_t own, int64_t key_len, bool causal, int64_t left,
                                        int64_t right)
{
    int64_t begin = left < 0 ? 0 : own - left;
    int64_t end = causal ? own + 1 : right < 0 ? key_len : own + right + 1;
    end = max_i64(0, min_i64(end, key_len));
    begin = max_i64(0, min_i64(begin, end));
    folioi_range range = {(int32_t)begin, (int32_t)end};
    return range;
}

#endif
