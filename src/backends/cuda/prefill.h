/* prefill.h: attention of sequences with many query rows: query_len * group > 16. The others are the decode family's. */
#ifndef FOLIOI_CUDA_PREFILL_H
#define FOLIOI_CUDA_PREFILL_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/prefill_list.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Is the layer one for these kernels? 16-bit q, new k and v of its type, plain rows in the cache, of that type or 8 bits. */
bool folioi_cuda_prefill_takes(const folioi_cuda_layer *layer);

/** What a layer's list must be made with; dims: the larger of its head sizes. Equal shapes share a list. */
folioi_prefill_shape folioi_cuda_prefill_shape(int32_t dims, int32_t group, int64_t window_left,
                                               int64_t window_right);

/** One layer: writes out and lse of every sequence that is not decode. tiles: [capacity], as the list was made. */
cudaError_t folioi_cuda_prefill(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                                const folioi_prefill_tile *tiles, int32_t capacity,
                                const folioi_cuda_sm *sm, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
