/* row_position.h: the sequence and the position of a row of q, on the device. */
#ifndef FOLIOI_CUDA_ROW_POSITION_H
#define FOLIOI_CUDA_ROW_POSITION_H

#include "backends/cuda/step/cuda_step.h"

/* The last sequence that begins at or before a row of q. */
static __device__ inline int32_t last_seq(const folioi_cuda_counts *counts,
                                          const folioi_cuda_seq *seqs, int64_t row)
{
    int32_t low = 0, high = counts->num_seqs;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (seqs[middle].query_row <= row) low = middle;
        else high = middle;
    }
    return low;
}

/* The sequence that a row of q belongs to; -1: none, or one that was refused. */
static __device__ inline int32_t find_seq(const folioi_cuda_counts *counts,
                                          const folioi_cuda_seq *seqs, int64_t row)
{
    if (row >= counts->num_rows) return -1;
    int32_t seq = last_seq(counts, seqs, row);
    return row - seqs[seq].query_row < seqs[seq].query_len ? seq : -1;
}

/* By which a row of a sequence rotates: as given, or by its sequence; -1: it has none. */
static __device__ inline int64_t position_in(const folioi_cuda_rotations &t, int32_t seq,
                                             int64_t row)
{
    if (t.positions != nullptr) return t.positions[row];
    return seq < 0 ? -1 : t.seqs[seq].first_query_pos + row - t.seqs[seq].query_row;
}

static __device__ inline int64_t row_position(const folioi_cuda_rotations &t, int64_t row)
{
    return position_in(t, t.positions != nullptr ? -1 : find_seq(t.counts, t.seqs, row), row);
}

#endif
