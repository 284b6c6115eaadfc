/*
 * span.h: the bytes of an array of rows, and whether two of them share one.
 *
 * Rows may lie between another array's rows, as q, k and v do in the result of a fused projection. With the
 * same stride in bytes on both sides the answer is exact, and so it is where one side has no gaps or lies
 * within one step of the other. With different strides two arrays whose extents overlap count as sharing.
 */
#ifndef FOLIOI_SPAN_H
#define FOLIOI_SPAN_H

#include "core/checked.h"

typedef struct folioi_span {
    uintptr_t first; /* address of the first byte                                            */
    int64_t extent;  /* bytes from the first past the last; 0: none                          */
    int64_t dense;   /* bytes side by side                                                   */
    struct {
        int64_t count, stride; /* bytes, at least what one step holds. count 1: not there       */
    } step[2];                 /* outer, inner                                               */
} folioi_span;

/** `bytes` side by side; p NULL: none. */
folioi_span folioi_span_of(const void *p, int64_t bytes);

/** [rows][heads] of `dense` elements, strides in elements; no two of them overlap. p NULL: none. */
folioi_span folioi_span_rows(const void *p, int64_t elem, int64_t rows, int64_t row_stride,
                             int64_t heads, int64_t head_stride, int64_t dense);

/** Do the two share a byte? Their extents meet. Some 20 steps at most, whatever the sizes. */
bool folioi_spans_share_inside(const folioi_span *a, const folioi_span *b);

/** Do the two share a byte? Most do not even meet: that is told here, 30 times in every forward. */
static inline bool folioi_spans_share(const folioi_span *a, const folioi_span *b)
{
    bool meet =
        b->first - a->first < (uintptr_t)a->extent || a->first - b->first < (uintptr_t)b->extent;
    return meet && a->extent > 0 && b->extent > 0 && folioi_spans_share_inside(a, b);
}

#endif
