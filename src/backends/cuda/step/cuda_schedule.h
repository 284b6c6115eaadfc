/* cuda_schedule.h: the launch that makes the work lists of a step on the device, one block of threads per list. */
#ifndef FOLIOI_CUDA_SCHEDULE_H
#define FOLIOI_CUDA_SCHEDULE_H

#include "backends/cuda/step/decode_schedule.h"
#include "backends/cuda/step/device_step.h"
#include "backends/cuda/step/prefill_list.h"

#include <cuda_runtime_api.h>

/** One list to make: which keys each decode block reads, or which tiles there are to prefill. */
typedef struct folioi_cuda_job {
    int32_t is_decode;
    folioi_decode_rule rule; /* decode */
    folioi_decode_table table;
    folioi_prefill_list list; /* prefill; its seqs and counts are the step's for both */
} folioi_cuda_job;

/** What the host learns of a step that was checked on the device, in one number: see folioi_cuda_report_word. */
typedef struct folioi_cuda_report {
    uint32_t *num_checked;   /* in device memory */
    volatile uint64_t *word; /* in host memory   */
} folioi_cuda_report;

#if defined(__cplusplus)
extern "C" {
#endif

/** Check a step's arrays and bring them into the plan's; the report comes with the schedule. */
cudaError_t folioi_cuda_check_step(const folioi_device_step *step, cudaStream_t stream);

/** jobs: [num_jobs], in device memory. longest: as decode_is_clustered has it. step: the one just checked there, to be reported; NULL: none. */
cudaError_t folioi_cuda_schedule(const folioi_cuda_job *jobs, int32_t num_jobs, int64_t longest,
                                 const folioi_device_step *step, const folioi_cuda_report *report,
                                 cudaStream_t stream);

/** The number that report.word becomes; num_checked counts in 24 bits. */
SHARED_INLINE uint64_t folioi_cuda_report_word(uint32_t num_checked, int32_t bad_seq,
                                               int32_t problem)
{
    return (uint64_t)(num_checked & 0xffffff) << 40 | (uint64_t)(uint32_t)(bad_seq + 1) << 8 |
           (uint32_t)problem;
}

/** What it says; bad_seq -1: every sequence was fine. */
SHARED_INLINE void folioi_cuda_report_read(uint64_t word, uint32_t *num_checked, int32_t *bad_seq,
                                           int32_t *problem)
{
    *num_checked = (uint32_t)(word >> 40);
    *bad_seq = (int32_t)(uint32_t)(word >> 8) - 1;
    *problem = (int32_t)(word & 0xff);
}

#if defined(__cplusplus)
}
#endif

#endif
