/*
 * decode.h: the decode family: sequences of few rows per kv head (query_len * num_heads / num_kv_heads; docs/cuda.md). Keys
 * are split over the whole device, and parts are merged in the same launch. No call waits for the device.
 */
#ifndef FOLIOI_CUDA_DECODE_H
#define FOLIOI_CUDA_DECODE_H

#include "backends/cuda/note_bad.h"
#include "backends/cuda/step/decode_schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What decode may read before the kernels ahead of it have ended. */
typedef enum folioi_cuda_early {
    FOLIOI_EARLY_NOTHING,
    FOLIOI_EARLY_LISTS, /* the step: what made its lists has ended when this kernel begins   */
    FOLIOI_EARLY_KEYS, /* K and V too: the one kernel that may still run is a decode, which does not write them */
} folioi_cuda_early;

/** A plan's decode: its numbers, and where its schedule is in device memory. */
typedef struct folioi_cuda_decode_plan {
    int32_t num_shares, split_len;
    int32_t cluster, cluster_seqs; /* as folioi_decode_rule has them */
    int32_t
        max_rows; /* sequences with more rows (query_len * heads_per_kv) are left to other kernels */
    int64_t max_items, max_stores;
    size_t schedule_bytes, workspace_bytes;
    size_t counter_bytes; /* the workspace begins with room for them */
    char *schedule;       /* filled in by the caller, aligned to 256 bytes */
    folioi_cuda_sm sm;
} folioi_cuda_decode_plan;

/** Sets cluster and cluster_seqs: how many blocks, as one cluster, compute a kv head of a step of few sequences. */
void folioi_cuda_decode_clusters(folioi_cuda_limits *limits);

/** Sizes and numbers of a plan; schedule stays NULL. */
void folioi_cuda_decode_init(folioi_cuda_decode_plan *plan, const folioi_cuda_limits *limits);

/** Line n of decode_instances.def; NULL past the last. */
const folioi_cuda_line *folioi_cuda_decode_line(int32_t n);

/** Can a line that takes a layer store its new rows too, of sequences with one new token each? */
bool folioi_cuda_decode_stores(const folioi_cuda_line *line, const folioi_cuda_layer *layer);

/** Does its kernel note bad writes of out, and of the new rows that it stores? */
bool folioi_cuda_decode_notes(const folioi_cuda_line *line, const folioi_cuda_layer *layer);

/** Where its schedule lies, for the job that makes it. */
folioi_decode_table folioi_cuda_decode_table(const folioi_cuda_decode_plan *plan);

/**
 * Compute one layer's decode sequences with a line that takes it, and set padding rows to zero. It is one launch. The next
 * kernel in the stream may begin when all before this one have ended. rows: the most of a sequence in this step, or in all
 * steps of a graph; at most plan->max_rows. clustered: the list is one for clusters (decode_is_clustered).
 * noting: taken where folioi_cuda_decode_notes.
 */
cudaError_t folioi_cuda_decode(const folioi_cuda_line *line, const folioi_cuda_run *run,
                               const folioi_cuda_decode_plan *plan, int32_t rows, bool clustered,
                               folioi_cuda_early early, const folioi_cuda_noting *noting);

#ifdef __cplusplus
}
#endif
#endif
