/* device_step.cu: checks the arrays of a step in device memory and copies them to the plan, one warp per sequence. */
#include "backends/cuda/step/cuda_schedule.h"
#include "backends/cuda/warp.h"

namespace {

constexpr int WARPS = 4;

__global__ void __launch_bounds__(WARP *WARPS)
    check_step(const __grid_constant__ folioi_device_step d)
{
    int32_t lane = threadIdx.x % WARP, i = (int32_t)(blockIdx.x * WARPS + threadIdx.x / WARP);
    if (i >= d.num_seqs) return;
    folioi_cuda_seq s;
    int64_t begin = warp_max(step_begin(&d, i, lane, WARP));
    int64_t end = max_i64(begin, step_row(&d, i + 1));
    int32_t problem = step_lengths(&d, i, begin, end, &s);
    if (problem == FOLIOI_STEP_FINE)
        problem = (int32_t)warp_max((int64_t)step_table(&d, i, &s, lane, WARP));
    __syncwarp(); /* slots are read from the table */
    if (problem == FOLIOI_STEP_FINE)
        problem = (int32_t)warp_max((int64_t)step_slots(&d, &s, lane, WARP));
    step_store(&d, i, &s, problem, lane, WARP);
    if (lane != 0 || i != d.num_seqs - 1) return;
    for (int t = 0; t < 2; t++) {
        if (d.counts[t] == nullptr) continue;
        d.counts[t]->num_rows = end;
        d.counts[t]->num_seqs = d.num_seqs;
    }
}

} // namespace

cudaError_t folioi_cuda_check_step(const folioi_device_step *step, cudaStream_t stream)
{
    unsigned blocks = (unsigned)ceil_div(step->num_seqs, WARPS);
    check_step<<<blocks, WARP * WARPS, 0, stream>>>(*step);
    return cudaGetLastError();
}
