/* cuda_move.h: what moves K and V on the device: stored, gathered, copied from block to block; and states merged. */
#ifndef FOLIOI_CUDA_MOVE_H
#define FOLIOI_CUDA_MOVE_H

#include "backends/cuda/cuda_attend.h"

/** Rows of k or v, and the cache's side they go to or come from. */
typedef struct folioi_cuda_move {
    folioi_cuda_rows rows;
    folio_dtype rows_dtype, dtype;
    folioi_cuda_side side; /* its base and scales are written to when storing */
    int32_t num_heads, dims, block_size;
    const int64_t *slots; /* in device memory */
    int64_t num_slots;
} folioi_cuda_move;

/** The sides of a block, in one layer, of two caches with the same geometry. */
typedef struct folioi_cuda_pair {
    folioi_cuda_side from, to; /* bases are those of layer 0 */
    folio_dtype dtype;
    int32_t num_heads, dims, block_size, num_layers;
    const char *const *from_bases; /* [num_layers], in device memory */
    char *const *to_bases;
    const float *const *from_scales; /* int8 */
    float *const *to_scales;
    const int64_t *pairs; /* [num_pairs][2], in device memory */
    int64_t num_pairs;
} folioi_cuda_pair;

/** One part of a merge, all strides set. */
typedef struct folioi_cuda_part {
    folioi_cuda_rows out;
    folio_dtype dtype;
    const float *lse;
    int64_t lse_token, lse_head;
} folioi_cuda_part;

typedef struct folioi_cuda_merge {
    const folioi_cuda_part *parts; /* in device memory */
    int64_t num_parts, num_rows;
    int32_t num_heads, dims;
    folioi_cuda_part out; /* its lse may be NULL */
} folioi_cuda_merge;

#if defined(__cplusplus)
extern "C" {
#endif

cudaError_t folioi_cuda_store_rows(const folioi_cuda_move *move, cudaStream_t stream);
cudaError_t folioi_cuda_gather_rows(const folioi_cuda_move *move, cudaStream_t stream);
cudaError_t folioi_cuda_move_blocks(const folioi_cuda_pair *pair, cudaStream_t stream);
cudaError_t folioi_cuda_merge_states(const folioi_cuda_merge *merge, cudaStream_t stream);

#if defined(__cplusplus)
}
#endif

#endif
