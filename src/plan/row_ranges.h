/*
 * row_ranges.h: masks as key ranges. Causality, window and length leave each query row one range of keys
 * [begin, end); no mask is ever a matrix.
 */
#ifndef FOLIOI_ROW_RANGES_H
#define FOLIOI_ROW_RANGES_H

#include "batch/batch.h"
#include "plan/key_range.h"

/** Keys that query i of a sequence sees. Never falls with i, at either end. */
static inline folioi_range key_range(const folioi_rows *rows, const folio_attention_desc *a,
                                     int64_t i)
{
    int64_t own = rows->first_query_pos + i - rows->first_key_pos;
    return range_around(own, rows->key_len, rows->causal, a->window_left, a->window_right);
}

/** Keys that any of the queries [first, first + n) sees; n >= 1. */
static inline folioi_range key_range_of(const folioi_rows *rows, const folio_attention_desc *a,
                                        int64_t first, int64_t n)
{
    return (folioi_range){key_range(rows, a, first).begin, key_range(rows, a, first + n - 1).end};
}

#endif
