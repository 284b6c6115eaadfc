/* prefill.h: attention of sequences with many query rows: query_len * heads_per_kv > 16. The others are the decode family's. */
#ifndef FOLIOI_CUDA_PREFILL_H
#define FOLIOI_CUDA_PREFILL_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/prefill_list.h"

#ifdef __cplusplus
extern "C" {
#endif

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
void folioi_cuda_prefill_init(folioi_cuda_prefill_plan *plan, const folioi_cuda_limits *limits);

/** Where its list lies, for the job that makes it. */
folioi_prefill_head *folioi_cuda_prefill_head(const folioi_cuda_prefill_plan *plan);
folioi_prefill_item *folioi_cuda_prefill_items(const folioi_cuda_prefill_plan *plan);

/** A line of prefill_instances.def or of hopper_instances.def. */
typedef struct folioi_prefill_line {
    folioi_cuda_line line;
    int32_t rows, values; /* of a tile: rows, and numbers of V       */
    int32_t blocks;       /* that a multiprocessor computes at once  */
    int32_t decode_rows;  /* up to so many rows of a kv head decode is faster, and with one token */
    /**
     * One layer: writes out and lse of every sequence that is not decode. One launch. whole: num_items is 0, and the grid
     * depends on the plan alone; or the list's head where the host knows it and prefill_are_whole says that none is cut.
     * cudaErrorNotSupported: q's strides are none that it reads, and nothing was launched.
     */
    cudaError_t (*launch)(const struct folioi_prefill_line *line, const folioi_cuda_run *run,
                          const folioi_cuda_prefill_plan *plan, const folioi_prefill_head *whole);
    int32_t xpacked; /* of fixed lines: for x-packed caches, and no others */
} folioi_prefill_line;

/** Line n of hopper_instances.def and prefill_instances.def, in this order; NULL past the last. */
const folioi_cuda_line *folioi_cuda_prefill_line(int32_t n);

/** The lists of lines, each compiled in its file; the last line of a list has no name. */
extern const folioi_prefill_line folioi_prefill_hopper[], folioi_prefill_latent[],
    folioi_prefill_fixed[], folioi_prefill_bytes[], folioi_prefill_f32[], folioi_prefill_flexible[];

/** Can flexible lines of some head size compute this layer? No other line takes more. */
bool folioi_prefill_can(const folioi_cuda_layer *layer);
/** May all rows be copied in chunks of 8 numbers? */
bool folioi_prefill_aligned(const folioi_cuda_layer *layer);

#ifdef __cplusplus
}
#endif

#endif
