/*
 * cuda_step.h: the sequences of a step as device kernels read them, and values derived from them. Plain C: host tests
 * compile it too.
 */
#ifndef FOLIOI_CUDA_STEP_H
#define FOLIOI_CUDA_STEP_H

#include "core/rotation.h"
#include "plan/key_range.h"

/** One sequence as one attention type sees it; rows count in q and out, new rows in k and v. */
typedef struct folioi_cuda_seq {
    int64_t query_row, new_row;
    int64_t first_query_pos, first_key_pos;
    int64_t table;       /* its block table begins at blocks[table]            */
    int32_t query_len;   /* 0: nothing to do                                   */
    int32_t key_len;     /* keys, cached ones first                            */
    int32_t context_len; /* of them, those cached before this step             */
    int32_t causal;
} folioi_cuda_seq;

/** Counts of a step: in device memory, since a captured graph meets other ones when it is replayed. */
typedef struct folioi_cuda_counts {
    int32_t num_seqs;
    int32_t num_emptied; /* refused on the device: query_len is 0, but their rows are there */
    int64_t num_rows;    /* of the batch */
} folioi_cuda_counts;

/** One step: everything in device memory. */
typedef struct folioi_cuda_step {
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs; /* [num_seqs], their rows one after another */
    const int32_t *blocks;
    int64_t out_rows;      /* of out, padding included: the launch covers them    */
    int32_t decode_stores; /* each sequence has one new row at most: decode stores it */
} folioi_cuda_step;

/** How rows of q and k rotate. */
typedef struct folioi_cuda_rotations {
    folioi_rotation rotation; /* its table is in device memory, or NULL: they stay */
    const int64_t *positions; /* [rows]; NULL: by the step                         */
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs;
} folioi_cuda_rotations;

/** Keys that query i of a sequence sees. */
SHARED_INLINE folioi_range seq_keys(const folioi_cuda_seq *s, int64_t left, int64_t right,
                                    int64_t i)
{
    return range_around(s->first_query_pos + i - s->first_key_pos, s->key_len, s->causal != 0, left,
                        right);
}

/** Rows of one kv head, query_len * heads_per_kv, that decode kernels can compute. */
#define FOLIOI_DECODE_MAX_ROWS 16

#endif
