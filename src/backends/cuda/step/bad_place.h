/* bad_place.h: which token of a step brought a row of k and v, or of out. Plain C: host tests compile it too. */
#ifndef FOLIOI_CUDA_BAD_PLACE_H
#define FOLIOI_CUDA_BAD_PLACE_H

#include "backends/cuda/step/cuda_step.h"
#include "plan/bad_key.h"

/** The sequence that brings row `row` of k and v, or of out, and the token's position; false: padding, or none does. */
SHARED_INLINE bool bad_place(const folioi_cuda_counts *counts, const folioi_cuda_seq *seqs,
                             bool is_decoder, int what, int64_t row, int64_t *seq,
                             int64_t *position)
{
    bool is_out = what == FOLIO_WRITTEN_OUT;
    for (int64_t s = 0; s < counts->num_seqs; s++) {
        const folioi_cuda_seq *q = &seqs[s];
        int64_t i = row - (is_out ? q->query_row : q->new_row);
        int64_t len = is_out ? q->query_len : q->key_len - q->context_len;
        if (i < 0 || i >= len || q->key_len == 0) continue;
        *seq = s;
        *position = bad_position(is_decoder, what, q->query_len, q->key_len, q->context_len, i);
        return true;
    }
    return false;
}

#endif
