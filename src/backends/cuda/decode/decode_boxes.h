/*
 * decode_boxes.h: rows of the cache by tensor copies, from sm_90 on. A box holds 16 tokens of K, or of V, of a kv head,
 * whatever is between their rows in memory. In shared memory rows of a multiple of 128 bytes become panels
 * (decode_tile.h); others lie one behind another.
 */
#ifndef FOLIOI_DECODE_BOXES_H
#define FOLIOI_DECODE_BOXES_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/instructions.h"

#include <cuda.h>

/*
 * The last of a map's dims counts what divides the strides of blocks and of kv heads. Where rows have no panels and a block's
 * lie together, the rows of the map are 128 numbers: with other sizes rows begin and end within lines of memory.
 */
struct decode_box {
    CUtensorMap map;     /* [count][panel][row of a block][numbers] */
    int32_t block, head; /* so many counts apart */
    int32_t rows;        /* of 16 tokens */
};

struct decode_boxes {
    decode_box k, v;
    int32_t scale_block, scale_head; /* of int8: from block to block, from kv head to kv head */
};

/* ---- host ---- */

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* False: its places need more than 32 bits, or the driver takes no such map. panel: bytes; 0: rows have none. */
static bool describe_box(decode_box *b, const folioi_cuda_layer *y, const folioi_cuda_sm *sm,
                         const folioi_cuda_side *side, int dims, int bytes, int panel)
{
    const folioi_address *at = &side->at;
    if (at->block <= 0 || at->head < 0 || at->token_tile_stride <= 0) return false;
    int64_t step = common_divisor(at->block, at->head);
    if (at->block / step > INT32_MAX / (y->num_blocks + 1) ||
        at->block / step * y->num_blocks + at->head / step * y->num_kv_heads > INT32_MAX)
        return false;
    b->block = (int32_t)(at->block / step);
    b->head = (int32_t)(at->head / step);
    bool together = panel == 0 && at->token_tile_stride == dims;
    int inner = together ? 128 : panel > 0 ? panel / bytes : dims;
    int panels = panel > 0 ? dims / inner : 1;
    b->rows = together ? 16 * dims / inner : 16;
    cuuint64_t extents[4] = {(cuuint64_t)inner, (cuuint64_t)y->block_size / 16 * b->rows,
                             (cuuint64_t)panels, INT32_MAX};
    cuuint64_t strides[3] = {(cuuint64_t)(together ? inner : at->token_tile_stride) * bytes, 128,
                             (cuuint64_t)(step * bytes)};
    cuuint32_t box[4] = {(cuuint32_t)inner, (cuuint32_t)b->rows, (cuuint32_t)panels, 1};
    cuuint32_t steps[4] = {1, 1, 1, 1};
    decltype(&cuTensorMapEncodeTiled) encode = (decltype(encode))sm->describe_tensor;
    return encode(
               &b->map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
               4, (void *)side->base, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               panel > 0 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* ---- device: call these where HAS_BULK_COPIES only ---- */

static __device__ __forceinline__ void prefetch_box(const decode_box &b)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b.map) : "memory");
}

/* 16 tokens from token in_block of a block on; `barrier` counts their bytes. */
static __device__ __forceinline__ void copy_box(uint32_t to, const decode_box &b, int block,
                                                int in_block, int kv_head, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %2, %4}], [%5];" ::"r"(to),
                 "l"(&b.map), "r"(0), "r"((in_block >> 4) * b.rows),
                 "r"(block * b.block + kv_head * b.head), "r"(barrier)
                 : "memory");
}

#endif
