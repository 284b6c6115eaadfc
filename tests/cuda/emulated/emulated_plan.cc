/* emulated_plan.cc: a plan's numbers, by the backend's own file. Of kernels there are those of wgmma and of f32. */
#include "instructions_emulated.h"

#define FOLIOI_CUDA_PREFILL_LAUNCH_H /* it launches the others */
#include "backends/cuda/prefill/prefill.h"
#include "backends/cuda/prefill/prefill_instance.h"

#define FOLIO_CUDA_HOPPER 1
#include "backends/cuda/prefill/prefill.cu"

const folioi_prefill_line folioi_prefill_fixed[] = {{}}, folioi_prefill_bytes[] = {{}},
                          folioi_prefill_flexible[] = {{}};

cudaError_t folioi_cuda_prepare(folioi_cuda_prepared *, const void *, int, bool)
{
    return cudaSuccess;
}
