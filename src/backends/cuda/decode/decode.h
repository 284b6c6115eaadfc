/*
 * decode.h: the decode family: sequences of at most 16 rows (query_len * num_heads / num_kv_heads) per kv
 * head, keys split over the whole device, parts merged in the same launch. Nothing here synchronises.
 */
#ifndef FOLIOI_CUDA_DECODE_H
#define FOLIOI_CUDA_DECODE_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/decode_schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What decode may read before the kernels ahead of it have ended. */
typedef enum folioi_cuda_early {
    FOLIOI_EARLY_NOTHING,
    FOLIOI_EARLY_LISTS, /* the step: what made its lists has ended when this kernel begins   */
    FOLIOI_EARLY_KEYS, /* K and V too: the one kernel that may still run is a decode, which writes neither */
} folioi_cuda_early;

/** A plan's decode: its numbers, and where its schedule is in device memory. */
typedef struct folioi_cuda_decode_plan {
    int32_t num_shares, split_len;
    int32_t max_rows; /* sequences with more rows (query_len * group) are left to other kernels */
    int64_t max_items, max_stores;
    size_t schedule_bytes, workspace_bytes;
    size_t counter_bytes; /* the workspace begins with room for them */
    char *schedule;       /* filled in by the caller, aligned to 256 bytes */
    folioi_cuda_sm sm;
} folioi_cuda_decode_plan;

/** Sizes and numbers of a plan; schedule stays NULL. */
void folioi_cuda_decode_init(folioi_cuda_decode_plan *plan, const folioi_cuda_limits *limits);

/** Line n of decode_instances.def; NULL past the last. */
const folioi_cuda_line *folioi_cuda_decode_line(int32_t n);

/** Where its schedule lies, for the job that makes it. */
folioi_decode_table folioi_cuda_decode_table(const folioi_cuda_decode_plan *plan);

/**
 * Attend one layer's decode sequences by a line that takes it, and zero padding rows. One launch; the grid depends on the plan
 * alone. The next kernel in the stream may begin when all ahead of this one have ended.
 * rows: the most that a sequence of this step, or of those a graph will meet, has; at most plan->max_rows.
 */
cudaError_t folioi_cuda_decode(const folioi_cuda_line *line, const folioi_cuda_run *run,
                               const folioi_cuda_decode_plan *plan, int32_t rows,
                               folioi_cuda_early early);

#ifdef __cplusplus
}
#endif
#endif
