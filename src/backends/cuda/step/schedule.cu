/* schedule.cu: makes the work lists of a step on the device, with decode_schedule.h and prefill_list.h. */
#include "backends/cuda/step/cuda_schedule.h"

namespace {

constexpr int THREADS = 1024;

/* Sum of x over the threads before this one; *total over all. */
__device__ int64_t sum_before(int64_t x, int64_t *scratch, int64_t *total)
{
    int n = threadIdx.x;
    scratch[n] = x;
    __syncthreads();
    for (int d = 1; d < THREADS; d *= 2) {
        int64_t below = n >= d ? scratch[n - d] : 0;
        __syncthreads();
        scratch[n] += below;
        __syncthreads();
    }
    int64_t before = n > 0 ? scratch[n - 1] : 0;
    *total = scratch[THREADS - 1];
    __syncthreads();
    return before;
}

__device__ void list_decodes(const folioi_cuda_job &job, int64_t longest, int64_t *scratch)
{
    const folioi_cuda_seq *seqs = job.list.seqs;
    int num_seqs = job.list.counts->num_seqs;
    __shared__ folioi_decode_rule rule; /* registers are few */
    if (threadIdx.x == 0) rule = decode_rule_for(&job.rule, num_seqs, longest);
    __syncthreads();
    int each = (num_seqs + THREADS - 1) / THREADS;
    int first = min((int)threadIdx.x * each, num_seqs), last = min(first + each, num_seqs);
    int64_t total, x = sum_before(decode_cost_of(&rule, seqs, first, last), scratch, &total);
    folioi_decode_count start = {0, 0};
    int64_t stretch = 0, both = 0, before = 0;
    for (int c = 0; c < FOLIOI_DECODE_CHOICES && decode_choice(&rule, c) > 0; c++) {
        int64_t length = decode_stretch(decode_choice(&rule, c), total), sum;
        folioi_decode_count n = decode_items(&rule, seqs, first, last, x, length, start, nullptr);
        int64_t mine = sum_before((int64_t)n.items << 32 | n.stores, scratch, &sum);
        if (c > 0 &&
            !decode_better(&rule, (int32_t)(sum >> 32), length, (int32_t)(both >> 32), stretch))
            continue;
        stretch = length;
        both = sum;
        before = mine;
    }
    start.items = (int32_t)(before >> 32);
    start.stores = (int32_t)before;
    decode_items(&rule, seqs, first, last, x, stretch, start, job.table.items);
    __syncthreads();
    for (int b = threadIdx.x; b <= rule.num_shares; b += THREADS)
        decode_bound_share(&rule, &job.table, (int32_t)(both >> 32), b);
    for (int n = threadIdx.x; n < (int32_t)(both >> 32); n += THREADS)
        decode_keep_slot(&job.table, n);
    __syncthreads();
    for (int n = threadIdx.x; n < rule.num_shares * FOLIOI_DECODE_KEPT; n += THREADS)
        decode_keep_item(&job.table, n);
    __syncthreads();
    for (int n = threadIdx.x; n < rule.num_shares * FOLIOI_DECODE_TILES; n += THREADS)
        decode_keep_block(&rule, &job.table, n);
}

__device__ void list_prefills(const folioi_cuda_job &job, folioi_prefill_sort *sort)
{
    for (int pass = 0; pass < FOLIOI_PREFILL_PASSES; pass++) {
        prefill_pass(pass, &job.list, sort, (int32_t)threadIdx.x, THREADS);
        __syncthreads();
    }
}

/* How many sequences were emptied, the first of them to the host; rows past the step's have no slot. */
__device__ void report_step(const folioi_device_step &d, const folioi_cuda_report &report)
{
    __shared__ int32_t first, num_emptied;
    if (threadIdx.x == 0) first = INT32_MAX, num_emptied = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < d.num_seqs; i += THREADS) {
        if (d.problems[i] == FOLIOI_STEP_FINE) continue;
        atomicAdd(&num_emptied, 1);
        atomicMin(&first, i);
    }
    const folioi_cuda_counts *counts = d.counts[d.counts[0] == nullptr];
    for (int64_t r = counts->num_rows + threadIdx.x; d.slots_out != nullptr && r < d.slots_room;
         r += THREADS)
        d.slots_out[r] = -1;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int t = 0; t < 2; t++)
        if (d.counts[t] != nullptr) d.counts[t]->num_emptied = num_emptied;
    int32_t bad = num_emptied > 0 ? first : -1;
    *report.word =
        folioi_cuda_report_word(++*report.num_checked, bad, bad < 0 ? 0 : d.problems[bad]);
    __threadfence_system();
}

__global__ void __launch_bounds__(THREADS)
    schedule(const folioi_cuda_job *jobs, int32_t num_jobs, int64_t longest,
             const __grid_constant__ folioi_device_step step,
             const __grid_constant__ folioi_cuda_report report)
{
    if (blockIdx.x == (unsigned)num_jobs) {
        report_step(step, report);
        return;
    }
    __shared__ union {
        int64_t sums[THREADS];
        folioi_prefill_sort sort;
    } scratch;
    const folioi_cuda_job &job = jobs[blockIdx.x];
    if (job.is_decode) list_decodes(job, longest, scratch.sums);
    else list_prefills(job, &scratch.sort);
}

} // namespace

cudaError_t folioi_cuda_schedule(const folioi_cuda_job *jobs, int32_t num_jobs, int64_t longest,
                                 const folioi_device_step *step, const folioi_cuda_report *report,
                                 cudaStream_t stream)
{
    folioi_device_step no_step = {};
    folioi_cuda_report no_report = {};
    int32_t blocks = num_jobs + (step != nullptr);
    if (blocks == 0) return cudaSuccess;
    schedule<<<blocks, THREADS, 0, stream>>>(jobs, num_jobs, longest,
                                             step != nullptr ? *step : no_step,
                                             step != nullptr ? *report : no_report);
    return cudaGetLastError();
}
