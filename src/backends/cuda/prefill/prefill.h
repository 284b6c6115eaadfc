/* prefill.h: attention of sequences with many query rows: query_len * group > 16. The others are the decode family's. */
#ifndef FOLIOI_CUDA_PREFILL_H
#define FOLIOI_CUDA_PREFILL_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/prefill_list.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Is the layer one for these kernels? 16-bit q, new k and v of its type, contiguous rows in the cache, of that type or 8 bits. */
bool folioi_cuda_prefill_takes(const folioi_cuda_layer *layer);

/** Limits of a plan for one attention; what folioi_cuda_prefill_init needs. */
typedef struct folioi_cuda_prefill_limits {
    int64_t max_query_tokens, max_seqs, max_query_len, max_seq_len;
    int64_t window_left, window_right;
    int32_t num_heads, num_kv_heads, k_dims, v_dims;
    folioi_cuda_sm sm;
    int32_t batch_invariant; /* cut keys at fixed positions                   */
    int32_t same_types;      /* K and V are of q's type. Compared as bytes    */
} folioi_cuda_prefill_limits;

/** A plan's prefill: its numbers, and where its list is in device memory. */
typedef struct folioi_cuda_prefill_plan {
    folioi_prefill_shape shape;
    folioi_prefill_room room;
    size_t list_bytes, workspace_bytes;
    size_t counter_bytes; /* the workspace begins with room for them */
    char *list;           /* filled in by the caller, aligned to 256 bytes */
    folioi_cuda_sm sm;
} folioi_cuda_prefill_plan;

/** Sizes and numbers of a plan; list stays NULL. */
void folioi_cuda_prefill_init(folioi_cuda_prefill_plan *plan,
                              const folioi_cuda_prefill_limits *limits);

/** Where its list lies, for the job that makes it. */
folioi_prefill_head *folioi_cuda_prefill_head(const folioi_cuda_prefill_plan *plan);
folioi_prefill_item *folioi_cuda_prefill_items(const folioi_cuda_prefill_plan *plan);

/**
 * One layer: writes out and lse of every sequence that is not decode. One launch. whole_tiles: 0, and the grid depends on the
 * plan alone; or the step's tiles where the host knows them and prefill_are_whole says that none is cut.
 * counters: counter_bytes of zeros, in the workspace or elsewhere; the launch leaves zeros.
 */
cudaError_t folioi_cuda_prefill(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                                const folioi_cuda_prefill_plan *plan, int64_t whole_tiles,
                                char *workspace, int32_t *counters, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
