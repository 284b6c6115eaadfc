/*
 * cuda_attend.h: what every attention kernel on the device is given: one layer by value, and the step's sequences,
 * block tables and schedule as arrays in device memory, made once per step and read by every layer.
 */
#ifndef FOLIOI_CUDA_ATTEND_H
#define FOLIOI_CUDA_ATTEND_H

#include "cache/kv_layout.h"

#include <cuda_runtime_api.h>

/** One sequence as one attention type sees it; rows count in q and out, new rows in k and v. */
typedef struct folioi_cuda_seq {
    int64_t query_row, new_row;
    int64_t first_query_pos, first_key_pos;
    int64_t table;       /* its block table begins at blocks[table]            */
    int32_t query_len;   /* 0: nothing to do                                   */
    int32_t key_len;     /* keys, cached ones first                            */
    int32_t context_len; /* of them, those cached before this step             */
    int32_t causal;
} folioi_cuda_seq;

/** Rows of numbers: element (row, head, d) at row * token + head * head_stride + d. */
typedef struct folioi_cuda_rows {
    void *data;
    int64_t token, head;
} folioi_cuda_rows;

/** K or V of a layer in the cache. */
typedef struct folioi_cuda_side {
    const char *base;
    const float *scales; /* int8 only */
    folioi_address at, scales_at;
    float scale; /* fp8: stored numbers are multiplied with it; else 1 */
} folioi_cuda_side;

/** One layer. */
typedef struct folioi_cuda_layer {
    folio_dtype dtype, kv_dtype; /* of q and out; of the cache  */
    int32_t num_heads, num_kv_heads, k_dims, v_dims;
    float scale, soft_cap;             /* soft_cap 0: none            */
    int64_t window_left, window_right; /* -1: none                    */
    folioi_cuda_rows q, out, new_k, new_v;
    float *lse; /* NULL: not asked */
    int64_t lse_token, lse_head;
    const float *slopes, *sinks; /* [num_heads] or NULL */
    folio_bias bias;             /* strides of broadcast dims are 0 */
    int32_t cached; /* keys come from the cache: all, or with append those of the context; the */
    int32_t append; /* others are rows of new_k and new_v */
    int32_t block_size;
    folioi_cuda_side k, v;
} folioi_cuda_layer;

/** Counts of a step: in device memory, since a captured graph meets other ones when it is replayed. */
typedef struct folioi_cuda_counts {
    int32_t num_seqs;
    int32_t reserved;
    int64_t num_rows; /* of the batch */
} folioi_cuda_counts;

/** One step: everything in device memory. */
typedef struct folioi_cuda_step {
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs; /* [num_seqs], their rows one after another */
    const int32_t *blocks;
    int64_t out_rows; /* of out, padding included: the launch covers them */
} folioi_cuda_step;

#if defined(__cplusplus)
extern "C" {
#endif

/** Any type, layout and option, a warp for each row and head: the device's own measure of right. */
cudaError_t folioi_cuda_plain(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                              cudaStream_t stream);

#if defined(__cplusplus)
}
#endif

#endif
