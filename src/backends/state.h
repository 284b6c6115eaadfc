/*
 * state.h: the softmax state of rows over some of their keys, and how two become one. Host backends
 * keep one for each split of a row, and folio_state_merge makes one of each part.
 */
#ifndef FOLIOI_STATE_H
#define FOLIOI_STATE_H

#include <stdint.h>

/** Floats of one row of a state's out: whole vectors at every level. */
static inline int64_t folioi_out_stride(int32_t v_dims) { return (v_dims + 15) / 16 * 16; }

/**
 * The softmax state of `rows` rows: running maximum of scores, sum and weighted V.
 * max -inf: no key seen. What a row of out holds past v_dims is of no account.
 */
typedef struct folioi_state_rows {
    float *max; /* [rows]              */
    float *sum; /* [rows]              */
    float *out; /* [rows][out stride]  */
} folioi_state_rows;

/** No key seen. */
void folioi_state_clear(const folioi_state_rows *state, int32_t rows);

/** into = into, then part: one step of the fold from left to right. */
void folioi_state_fold(const folioi_state_rows *into, const folioi_state_rows *part, int32_t rows,
                       int32_t v_dims);

#endif
