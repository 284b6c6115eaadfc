/* cuda_move.h: moves K and V on the device: store, gather, copy blocks; merges states. */
#ifndef FOLIOI_CUDA_MOVE_H
#define FOLIOI_CUDA_MOVE_H

#include "backends/cuda/note_bad.h"

/** Rows of k or v, and the cache's side they go to or come from. */
typedef struct folioi_cuda_move {
    folioi_cuda_rows rows;
    folio_dtype rows_dtype, dtype;
    folioi_cuda_side side; /* its base and scales are written to when storing */
    int32_t num_heads, dims, block_size;
    int32_t is_copy; /* rows are stored 16 bytes at a time: as they are, or rotated */
} folioi_cuda_move;

/** K and V of rows: one launch for both. */
typedef struct folioi_cuda_moves {
    folioi_cuda_move kv[2]; /* rows.data NULL: not this one; to store, K alone is enough */
    const int64_t *slots;   /* in device memory */
    int64_t num_slots;
    int32_t overlaps;                /* see folioi_cuda_sm */
    folioi_cuda_rotations rotations; /* of K that is stored */
} folioi_cuda_moves;

/** Rows of q, rotated into rows of out: the same number of heads and dims. */
typedef struct folioi_cuda_rotate_args {
    folioi_cuda_rows from, to; /* may be the same */
    folio_dtype dtype;
    int32_t num_heads, dims;
    int32_t in_pieces; /* rotate_pieces.h can rotate them                       */
    int32_t overlaps;  /* see folioi_cuda_sm                                    */
    int32_t units;     /* warps for each row: set by folioi_cuda_rotate_rows    */
    int64_t num_rows;
    folioi_cuda_rotations rotations;
} folioi_cuda_rotate_args;

/** Do pieces of 8 numbers rotate as a whole, alone or two with each other? */
static inline bool folioi_cuda_rotates_pieces(const folioi_rotation *r, folio_dtype dtype)
{
    return (dtype == FOLIO_F16 || dtype == FOLIO_BF16) && r->first_dim % 8 == 0 &&
           r->num_dims % (r->pairs ? 8 : 16) == 0;
}

/** K or V of blocks that go from one cache to another, or within one. */
typedef struct folioi_cuda_way {
    folioi_address from, to, from_scales, to_scales;
    int32_t dims;
    int32_t run;  /* tokens of a head that lie together on both sides; 0: not even one */
    int32_t unit; /* then: numbers of a token that do, 1 or 16 bytes of them            */
} folioi_cuda_way;

/**
 * Blocks of many layers of two caches with the same geometry, one of which may be pinned host memory: all that one
 * launch is given, as its parameter. Nothing has to be brought to the device first.
 */
enum { FOLIOI_CUDA_MOVE_LAYERS = 128, FOLIOI_CUDA_MOVE_PAIRS = 512 };
typedef struct folioi_cuda_blocks {
    folioi_cuda_way way[2]; /* K, V */
    int32_t num_sides;      /* 1: the caches have no V */
    int32_t elem;           /* bytes of a number */
    int32_t vector;         /* bytes that may be moved at once: 16, 4, 2 or 1 */
    int32_t num_heads, block_size, num_layers, num_pairs;
    int32_t max_grid;                           /* thread blocks at most; 0: any number */
    char *bases[2][4][FOLIOI_CUDA_MOVE_LAYERS]; /* K, V: from, to, their scales */
    int32_t pairs[FOLIOI_CUDA_MOVE_PAIRS][2];   /* from, to */
} folioi_cuda_blocks;

/** One part of a merge, all strides set. */
typedef struct folioi_cuda_part {
    folioi_cuda_rows out;
    folio_dtype dtype;
    const float *lse;
    int64_t lse_token, lse_head;
} folioi_cuda_part;

/** All that a merge is given, as its launch's parameter: a graph may hold it. Only many parts are brought over first. */
enum { FOLIOI_CUDA_FEW_PARTS = 48 };
typedef struct folioi_cuda_merge {
    const folioi_cuda_part *parts; /* in device memory; NULL: the few below */
    folioi_cuda_part few[FOLIOI_CUDA_FEW_PARTS];
    int64_t num_parts, num_rows;
    int32_t num_heads, dims;
    folioi_cuda_part out; /* its lse may be NULL */
} folioi_cuda_merge;

#if defined(__cplusplus)
extern "C" {
#endif

/** Do kernels that were built for this thread's device wait by themselves for those ahead of them? */
bool folioi_cuda_can_overlap(void);

/** noting NULL: no bad write is noted. */
cudaError_t folioi_cuda_store_rows(const folioi_cuda_moves *moves, const folioi_cuda_noting *noting,
                                   cudaStream_t stream);
cudaError_t folioi_cuda_rotate_rows(const folioi_cuda_rotate_args *args, cudaStream_t stream);
cudaError_t folioi_cuda_gather_rows(const folioi_cuda_moves *moves, cudaStream_t stream);
cudaError_t folioi_cuda_move_blocks(const folioi_cuda_blocks *blocks, cudaStream_t stream);
cudaError_t folioi_cuda_merge_states(const folioi_cuda_merge *merge, cudaStream_t stream);

#if defined(__cplusplus)
}
#endif

#endif
