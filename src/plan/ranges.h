/*
 * ranges.h: masks as key ranges. Causality, window and length leave each query row one range of keys
 * [begin, end); no mask is ever a matrix.
 */
#ifndef FOLIOI_RANGES_H
#define FOLIOI_RANGES_H

#include "batch/batch.h"
#include "core/checked.h"

typedef struct folioi_range {
    int32_t begin, end; /* begin == end: no key */
} folioi_range;

/** Keys that query i of a sequence sees. Never falls with i, at either end. */
static inline folioi_range key_range(const folioi_rows *rows, const folio_attention_desc *a,
                                     int64_t i)
{
    /* the key whose position is the query's own */
    int64_t own = rows->first_query_pos + i - rows->first_key_pos;
    int64_t right = rows->causal ? 0 : a->window_right;
    int64_t begin = a->window_left < 0 ? 0 : own - a->window_left;
    int64_t end = right < 0 ? rows->key_len : own + right + 1;
    end = max_i64(0, min_i64(end, rows->key_len));
    begin = max_i64(0, min_i64(begin, end));
    return (folioi_range){(int32_t)begin, (int32_t)end};
}

/** Keys that any of the queries [first, first + n) sees; n >= 1. */
static inline folioi_range key_range_of(const folioi_rows *rows, const folio_attention_desc *a,
                                        int64_t first, int64_t n)
{
    return (folioi_range){key_range(rows, a, first).begin, key_range(rows, a, first + n - 1).end};
}

#endif
