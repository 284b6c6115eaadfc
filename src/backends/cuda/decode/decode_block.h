/*
 * decode_block.h: the arguments of a decode kernel, and its shared memory:
 *
 *   sums of rows | counts | share and its first items | maxima and sums of warps | q | options of rows | weights | notes, scales and barriers of stages | stages
 *
 * A stage holds 16 tokens of K, then of V; each warp has num_stages of its own.
 */
#ifndef FOLIOI_DECODE_BLOCK_H
#define FOLIOI_DECODE_BLOCK_H

#include "backends/cuda/decode/decode.h"
#include "backends/cuda/decode/decode_boxes.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/noted.h"

#define MAX_WARPS 8
#define STAGE_ALIGN                                                                                \
    1024 /* swizzled boxes lie there; bulk copies are slower to places that are no multiple of 128 */
#define WEIGHT_FLOATS (17 * 16) /* of a warp */
#define ROW_FLOATS                                                                                 \
    ((2 * MAX_WARPS + 2) * 16 + 16) /* maxima and sums, factors of q, a flag or barriers */

typedef struct decode_args {
    static constexpr bool NOTES = false;
    folioi_cuda_layer layer;
    /* the step and its schedule */
    const int32_t *blocks;
    int32_t stores; /* the new row of each sequence, its last key, is to be stored */
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs;
    const folioi_decode_share *shares;
    const folioi_decode_item *items;
    /* the workspace */
    int32_t *counters; /* [seq][kv head][row block] */
    float *partials;   /* [store][kv head][max_rows][v_dims], then m and l, each [max_rows] */
    int64_t out_rows;  /* padding included */
    int32_t max_rows, row_blocks, heads_per_kv, num_warps, num_stages;
    int32_t k_stride, v_stride, stage_bytes; /* in shared memory, bytes */
    int32_t copy_bytes, kv_bytes;
    int32_t k_copies, v_copies;    /* copies per row */
    uint32_t k_inverse, v_inverse; /* n / copies is n * inverse >> 22 */
    uint32_t warps_inverse;        /* n / num_warps is n * inverse >> 32, n below 2^28 */
    int32_t q_stride, out_stride;  /* in shared memory: 16-bit numbers, also of f32; floats */
    int32_t out_copies, out_size;  /* warps add up in so many copies of out; floats of one */
    int32_t block_shift;           /* block_size is 1 << block_shift; -1: it is no power of two */
    int32_t one_block_tiles;       /* no tile lies in two blocks */
    int32_t bulk;      /* K of a block lies together, and V: bulk copies can take them */
    int32_t has_boxes; /* rows come by `boxes` */
    int32_t paged;     /* K and V lie in native pages */
    int32_t xpacked;   /* V lies by dims */
    int32_t k_by_dims; /* and K too */
    int32_t k_unit;    /* bytes between 16-byte units of a row of K; 0: a page has it */
    int32_t out_quads; /* four numbers of out can be stored at once */
    int32_t
        cluster; /* blocks of one, each with a part of the sequence; 0: parts meet in the workspace */
    int32_t owned_slices; /* most that a block of a cluster owns: decode_cluster.h */
    folioi_cuda_early early;
    decode_boxes boxes;
} decode_args;

/* Of kernels that note bad writes. Functions that write K, V or out are templates of the arguments. */
struct noted_args : decode_args {
    static constexpr bool NOTES = true;
    folioi_cuda_noting noting;
};

/* What a tile in shared memory is; written with its copies, read when they have landed. */
struct tile_note {
    int item2; /* 2 * item + fresh */
    int tile, low, high;
};

static_assert(sizeof(folioi_decode_share) % 16 == 0 && sizeof(folioi_cuda_counts) == 16,
              "they are copied in 16 bytes");

/* A row as options of the flexible instances need it. */
struct row_option {
    int64_t own;  /* key at the row's own position, for ALiBi */
    int64_t bias; /* index of key 0 */
    float slope;
};

struct block_shared {
    folioi_cuda_counts *counts;
    folioi_decode_share *share;
    float *out;             /* [rows][out_stride]; of a cluster: decode_cluster.h */
    float *warp_m, *warp_l; /* [MAX_WARPS][16]: of each warp; add_warps tells which           */
    float *row_m;           /* [16]: of all of them                    */
    uint16_t
        *q; /* [Q_FORMS][16][q_stride]: as given; in the cache's type; what that lost. Or f32 */
    row_option *options; /* [16]: of the flexible instances */
    float *q_factor;     /* [16]: what rows of the second form were divided by */
    float *weights;      /* this warp's, f32 only: [WEIGHT_FLOATS], see decode_f32.h */
    int *flag;
    uint64_t
        *arrived;     /* of a cluster, in the flag's place, [MAX_WARPS]: sums for a warp are here */
    char *stages;     /* this warp's */
    tile_note *notes; /* this warp's */
    uint64_t *barriers; /* this warp's, one per stage: ends of bulk copies */
    float *scales;      /* this warp's: [stage][32], K then V */
};

static __device__ __forceinline__ block_shared carve_shared(const decode_args &a, char *memory,
                                                            int q_forms, bool weights, int warp)
{
    block_shared sh;
    sh.out = (float *)memory;
    memory += a.out_copies * a.out_size * sizeof(float);
    sh.counts = (folioi_cuda_counts *)memory;
    sh.share = (folioi_decode_share *)(sh.counts + 1);
    memory += sizeof(folioi_cuda_counts) + sizeof(folioi_decode_share);
    sh.warp_m = (float *)memory;
    sh.warp_l = sh.warp_m + MAX_WARPS * 16;
    sh.q_factor = sh.warp_l + MAX_WARPS * 16;
    sh.row_m = sh.q_factor + 16;
    sh.flag = (int *)(sh.row_m + 16);
    sh.arrived = (uint64_t *)sh.flag;
    memory += ROW_FLOATS * sizeof(float);
    sh.q = (uint16_t *)memory;
    memory += q_forms * 16 * a.q_stride * sizeof(uint16_t);
    sh.options = (row_option *)memory;
    if (q_forms == 3) memory += 16 * sizeof(row_option);
    sh.weights = (float *)memory + warp * WEIGHT_FLOATS;
    if (weights) memory += a.num_warps * WEIGHT_FLOATS * sizeof(float);
    sh.notes = (tile_note *)memory + warp * a.num_stages;
    memory += a.num_warps * a.num_stages * sizeof(tile_note);
    sh.scales = (float *)memory + warp * a.num_stages * 32;
    if (a.layer.k.scales != NULL) memory += a.num_warps * a.num_stages * 32 * sizeof(float);
    sh.barriers = (uint64_t *)memory + warp * a.num_stages;
    memory += a.num_warps * a.num_stages * sizeof(uint64_t);
    memory += -(uintptr_t)memory % STAGE_ALIGN;
    sh.stages = memory + (int64_t)warp * a.num_stages * a.stage_bytes;
    return sh;
}

static __device__ __forceinline__ const folioi_decode_item *item_at(const decode_args &a,
                                                                    const block_shared &sh, int n)
{
    int kept = n - sh.share->begin;
    return kept < FOLIOI_DECODE_KEPT ? &sh.share->kept[kept] : &a.items[n];
}

#endif
