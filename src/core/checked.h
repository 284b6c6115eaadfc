/* checked.h: products and sums of sizes that report overflow of int64_t, and small integer helpers. */
#ifndef FOLIOI_CHECKED_H
#define FOLIOI_CHECKED_H

#include "core/shared_inline.h"

#include <stdbool.h>
#include <stdint.h>

/* *product = a * b for a, b >= 0; false when it does not fit. */
static inline bool checked_mul(int64_t a, int64_t b, int64_t *product)
{
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product);
}

/* Bytes that an array with strides may span: offsets, sums of two of them and ends all fit int64_t. */
#define MAX_EXTENT (INT64_MAX / 4)

static inline bool checked_add(int64_t a, int64_t b, int64_t *sum)
{
    return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, sum);
}

SHARED_INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
SHARED_INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
SHARED_INLINE int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
SHARED_INLINE int64_t round_up(int64_t a, int64_t multiple)
{
    return ceil_div(a, multiple) * multiple;
}

/*
 * Does no element of an array share its place with another? Up to three dims with their strides, in any
 * order, around `inner` neighbouring elements; sizes that pass int64_t count as apart.
 */
static inline bool strides_are_apart(int n, const int64_t *dims, const int64_t *strides,
                                     int64_t inner)
{
    bool taken[3] = {false, false, false};
    for (int step = 0; step < n; step++) {
        int least = -1;
        for (int i = 0; i < n; i++)
            if (!taken[i] && (least < 0 || strides[i] < strides[least])) least = i;
        taken[least] = true;
        if (dims[least] <= 1) continue;
        if (strides[least] < inner) return false;
        int64_t span;
        if (!checked_mul(dims[least] - 1, strides[least], &span)) return true;
        if (!checked_add(inner, span, &inner)) return true;
    }
    return true;
}

#endif
