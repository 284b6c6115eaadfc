/*
 * hopper_launch.h: what launches of hopper_prefill.cu and latent.cu share on the host: what they ask of a layer, maps for
 * tensor copies, the kernels' arguments.
 */
#ifndef FOLIOI_CUDA_HOPPER_LAUNCH_H
#define FOLIOI_CUDA_HOPPER_LAUNCH_H

#include "backends/cuda/host/launch.h"
#include "backends/cuda/prefill/hopper/hopper_tile.h"
#include "backends/cuda/prefill/prefill.h"

static bool matches_hopper(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                           const folioi_cuda_sm *sm)
{
    return sm->capability == 90 && sm->describe_tensor != NULL && l->cached && !l->append &&
           l->bias.data == NULL && l->scale > 0 && l->dtype == line->dtype &&
           l->kv_dtype == line->kv && l->k_dims == line->k_dims && l->v_dims == line->v_dims &&
           folioi_cuda_rows_aligned(&l->q, 2, 16) && folioi_cuda_rows_aligned(&l->out, 2, 16);
}

static CUtensorMapDataType type_of(folio_dtype dtype)
{
    return dtype == FOLIO_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/* A map of dims[] numbers, `strides` bytes apart from the second dim on. False: the driver does not take it. */
static bool describe(CUtensorMap *map, const folioi_cuda_layer *l, const folioi_cuda_sm *sm,
                     const void *data, int num_dims, const cuuint64_t *dims,
                     const cuuint64_t *strides, const cuuint32_t *box, CUtensorMapSwizzle swizzle)
{
    static const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    decltype(&cuTensorMapEncodeTiled) encode = (decltype(encode))sm->describe_tensor;
    return encode(map, type_of(l->dtype), (cuuint32_t)num_dims, (void *)data, dims, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Of panels of so many numbers: see matrix_at. */
static CUtensorMapSwizzle swizzle_of(int panel)
{
    if (panel == 64) return CU_TENSOR_MAP_SWIZZLE_128B;
    return panel == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
}

/* Boxes of a panel of a tile's rows of q. */
static bool describe_queries(hopper_args *a, const folioi_cuda_layer *l, const folioi_cuda_sm *sm,
                             int panel)
{
    cuuint64_t dims[3] = {(cuuint64_t)l->k_dims, (cuuint64_t)l->num_heads, (cuuint64_t)l->q_rows};
    cuuint64_t strides[2] = {(cuuint64_t)l->q.head * 2, (cuuint64_t)l->q.token * 2};
    cuuint32_t box[3] = {(cuuint32_t)panel, (cuuint32_t)a->heads,
                         (cuuint32_t)(a->queries / a->q_boxes)};
    return describe(&a->q, l, sm, l->q.data, 3, dims, strides, box, swizzle_of(panel));
}

/* log2 of the largest power of 2 that divides x. */
static int32_t shift_of(int32_t x)
{
    int32_t shift = 0;
    while (shift < 30 && (x >> shift & 1) == 0) shift++;
    return shift;
}

/* What the kernels are told of a layer and a step; tiles of `rows` rows, out of `values` numbers. */
static hopper_args hopper_args_of(const folioi_cuda_run *run, const folioi_cuda_prefill_plan *plan,
                                  const folioi_prefill_head *whole, int32_t rows, int32_t values)
{
    const folioi_cuda_layer *layer = run->layer;
    hopper_args a = {};
    a.layer = {layer->q,          layer->out,         layer->lse,          layer->lse_token,
               layer->lse_head,   layer->sinks,       layer->k.base,       layer->v.base,
               layer->k.at,       layer->window_left, layer->window_right, layer->num_kv_heads,
               layer->block_size, layer->scale};
    a.blocks = run->step->blocks;
    a.head = folioi_cuda_prefill_head(plan);
    a.items = folioi_cuda_prefill_items(plan);
    a.counters = run->counters;
    a.part_out = (float *)(run->workspace + plan->counter_bytes);
    a.part_lse = a.part_out + plan->room.rows * layer->num_kv_heads * values;
    a.heads_per_kv = layer->num_heads / layer->num_kv_heads;
    a.heads = a.heads_per_kv < rows ? a.heads_per_kv : rows;
    a.inverse = (65536u + (uint32_t)a.heads - 1) / (uint32_t)a.heads;
    a.head_slices = (int32_t)ceil_div(a.heads_per_kv, a.heads);
    a.queries = rows / a.heads;
    a.q_boxes = 1;
    a.units = layer->num_kv_heads * a.head_slices;
    a.block_pages = layer->block_size / PAGE_KEYS;
    a.page_shift = shift_of(a.block_pages);
    if (1 << a.page_shift != a.block_pages) a.page_shift = -1;
    a.table_len = whole->num_keys / layer->block_size;
    a.scale_log2 = layer->scale * LOG2E;
    return a;
}

#endif
