/* prefill.h: the prefill kernel of Hopper (sm_90a). Other cards, head sizes and layouts are backends/cuda/prefill.h's. */
#ifndef FOLIOI_CUDA_HOPPER_PREFILL_H
#define FOLIOI_CUDA_HOPPER_PREFILL_H

#include "backends/cuda/prefill/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Is the layer one for it? Compute capability 9.0; all keys in native pages; head size 128; no option on scores. */
bool folioi_cuda_hopper_takes(const folioi_cuda_layer *layer, const folioi_cuda_sm *sm);

/** One layer, as folioi_cuda_prefill. cudaErrorNotSupported: q's strides are none that it reads, and nothing was launched. */
cudaError_t folioi_cuda_hopper_prefill(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                                       const folioi_cuda_prefill_plan *plan, int64_t whole_tiles,
                                       char *workspace, int32_t *counters, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
