/*
 * prefill.cu: attention of sequences with many query rows: one launch per layer computes the step's list of tiles. The grid is
 * fixed by the device and the list's room, so a graph may hold it.
 */
#include "backends/cuda/prefill/hopper/prefill.h"
#include "backends/cuda/prefill/prefill_launch.h"
#include "core/dtype.h"

bool folioi_cuda_prefill_takes(const folioi_cuda_layer *l)
{
    if (!dtype_is_16_bit(l->dtype) || l->k_dims % 8 != 0 || l->v_dims % 8 != 0) return false;
    if (l->k_dims > 512 || l->v_dims > 512 || !folioi_cuda_new_rows_fit(l)) return false;
    /* large V is computed in parts, each from all of q: out in place of q would end it with the first */
    if (l->v_dims > flexible_512<__half>::DV && l->out.data == l->q.data) return false;
    if (!l->cached) return true;
    if (dtype_is_16_bit(l->kv_dtype) ? l->kv_dtype != l->dtype : l->kv_dtype == FOLIO_F32)
        return false;
    return folioi_cuda_has_pages(&l->k) ||
           (folioi_cuda_has_rows(&l->k) && folioi_cuda_has_rows(&l->v));
}

/* May all rows be copied in chunks of 8 numbers? */
static bool is_aligned(const folioi_cuda_layer *l)
{
    int64_t size = dtype_is_16_bit(l->kv_dtype) ? 2 : 1;
    bool ok = folioi_cuda_rows_aligned(&l->q, 2, 16) && folioi_cuda_rows_aligned(&l->out, 2, 16);
    if (l->cached)
        ok = ok && folioi_cuda_side_aligned(&l->k, size, size * 8) &&
             folioi_cuda_side_aligned(&l->v, size, size * 8);
    if (!l->cached || l->append)
        ok = ok && folioi_cuda_rows_aligned(&l->new_k, 2, 16) &&
             folioi_cuda_rows_aligned(&l->new_v, 2, 16);
    return ok;
}

/* Is all of it fixed: equal head sizes with instances of their own, and no option on scores? */
static bool is_fixed(const folioi_cuda_layer *l)
{
    bool has_options =
        l->soft_cap > 0 || l->slopes != NULL || l->bias.data != NULL || !(l->scale > 0);
    bool has_size = l->k_dims == 64 || l->k_dims == 128 || l->k_dims == 256;
    return !has_options && has_size && l->k_dims == l->v_dims && is_aligned(l);
}

/* Head size of the fixed instance that serves the layer; 0: none does. */
static int fixed_dims(const folioi_cuda_layer *l)
{
    return is_fixed(l) && (!l->cached || dtype_is_16_bit(l->kv_dtype)) ? l->k_dims : 0;
}

/* Of the one for 8-bit K and V. */
static int bytes_dims(const folioi_cuda_layer *l)
{
    if (!l->cached || l->append || dtype_is_16_bit(l->kv_dtype) || !is_fixed(l)) return 0;
    if (l->kv_dtype != FOLIO_INT8 && !(l->k.scale > 0)) return 0;
    bool ok = folioi_cuda_side_aligned(&l->k, 1, 16) && folioi_cuda_side_aligned(&l->v, 1, 16);
    return ok ? l->k_dims : 0;
}

static int max_dims(const folioi_cuda_layer *l)
{
    return l->k_dims > l->v_dims ? l->k_dims : l->v_dims;
}

static int flexible_dims(const folioi_cuda_layer *l)
{
    int dims = max_dims(l);
    return dims <= 64 ? 64 : dims <= 128 ? 128 : dims <= 256 ? 256 : 512;
}

/* Rows and V numbers of the tiles that serve the layer. */
static void tile_size(const folioi_cuda_layer *l, int32_t *rows, int32_t *values)
{
    using T = __half;
    switch (fixed_dims(l)) {
    case 64: *rows = fixed_64<T>::ROWS, *values = 64; return;
    case 128: *rows = fixed_128<T>::ROWS, *values = 128; return;
    case 256: *rows = fixed_256<T>::ROWS, *values = 256; return;
    }
    switch (bytes_dims(l)) {
    case 64: *rows = bytes_64<KV_INT8>::ROWS, *values = 64; return;
    case 128: *rows = bytes_128<KV_INT8>::ROWS, *values = 128; return;
    case 256: *rows = bytes_256<KV_INT8>::ROWS, *values = 256; return;
    }
    switch (flexible_dims(l)) {
    case 64: *rows = flexible_64<T>::ROWS, *values = 64; return;
    case 128: *rows = flexible_128<T>::ROWS, *values = 128; return;
    case 256: *rows = flexible_256<T>::ROWS, *values = 256; return;
    default: *rows = flexible_512<T>::ROWS, *values = flexible_512<T>::DV; return;
    }
}

/* Tiles of the list are those of the fixed instances; instances with fewer rows take a tile in pieces. */
typedef struct tile_kind {
    int32_t rows, blocks; /* of the fixed instance; of one multiprocessor */
    int32_t flexible_rows;
} tile_kind;

static tile_kind kind_of(int32_t dims)
{
    using T = __half;
    if (dims <= 64) return {fixed_64<T>::ROWS, fixed_64<T>::BLOCKS, flexible_64<T>::ROWS};
    if (dims <= 128) return {fixed_128<T>::ROWS, fixed_128<T>::BLOCKS, flexible_128<T>::ROWS};
    if (dims <= 256) return {fixed_256<T>::ROWS, fixed_256<T>::BLOCKS, flexible_256<T>::ROWS};
    return {flexible_512<T>::ROWS, flexible_512<T>::BLOCKS, flexible_512<T>::ROWS};
}

static int32_t tile_queries(int32_t dims, int32_t group)
{
    int32_t rows = kind_of(dims).rows;
    return group < rows ? rows / group : 1;
}

/* How many tiles of `rows` rows compute one of the list for a kv head. */
typedef struct tile_pieces {
    int32_t heads, head_parts; /* query heads of one, and tiles a group needs */
    int32_t pieces;            /* of the queries                              */
} tile_pieces;

static tile_pieces pieces_of(int32_t rows, int32_t group, int32_t queries)
{
    int32_t heads = group < rows ? group : rows;
    return {heads, (int32_t)ceil_div(group, heads), (int32_t)ceil_div(queries, rows / heads)};
}

/* Lengths at which a batch-invariant plan cuts the keys of up to 32 rows: no more than 16 parts. */
static int32_t fixed_split_len(int64_t max_seq_len)
{
    return (int32_t)max_i64(2048, round_up(ceil_div(max_seq_len, 16), FOLIOI_PREFILL_CUT));
}

/* Blocks of a multiprocessor: one where the layers may be Hopper's, which a plan does not know of their layout. */
static int32_t blocks_of(const folioi_cuda_prefill_limits *l, int32_t blocks)
{
    bool may_be_hopper = l->sm.capability == 90 && l->k_dims == 128 && l->v_dims == 128;
    return may_be_hopper && l->same_types ? 1 : blocks;
}

void folioi_cuda_prefill_init(folioi_cuda_prefill_plan *plan, const folioi_cuda_prefill_limits *l)
{
    *plan = {};
    folioi_prefill_shape *shape = &plan->shape;
    int32_t dims = l->k_dims > l->v_dims ? l->k_dims : l->v_dims;
    tile_kind kind = kind_of(dims);
    shape->group = l->num_heads / l->num_kv_heads;
    shape->queries = tile_queries(dims, shape->group);
    shape->window_left = l->window_left;
    shape->window_right = l->window_right;
    tile_pieces fixed = pieces_of(kind.rows, shape->group, shape->queries);
    tile_pieces flexible = pieces_of(kind.flexible_rows, shape->group, shape->queries);
    int32_t units = l->num_kv_heads * fixed.head_parts, blocks = blocks_of(l, kind.blocks);
    shape->num_at_once = (int32_t)max_i64((int64_t)l->sm.count * blocks / units, 1);
    shape->num_alone = (int32_t)max_i64(l->sm.count / units, 1);
    if (l->batch_invariant) shape->split_len = fixed_split_len(l->max_seq_len);
    plan->sm = l->sm;
    plan->room =
        prefill_room(shape, l->max_query_tokens, l->max_seqs, l->max_query_len, l->max_seq_len);
    plan->list_bytes =
        sizeof(folioi_prefill_head) + (size_t)plan->room.items * sizeof(folioi_prefill_item);
    int64_t all_units =
        (int64_t)l->num_kv_heads * ceil_div(l->v_dims, 256) *
        max_i64(fixed.head_parts * fixed.pieces, flexible.head_parts * flexible.pieces);
    plan->counter_bytes = (size_t)round_up(16 * (1 + plan->room.cut_tiles * all_units), 256);
    plan->workspace_bytes =
        plan->counter_bytes + (size_t)(plan->room.rows * l->num_kv_heads * (l->v_dims + 2) * 4);
}

folioi_prefill_head *folioi_cuda_prefill_head(const folioi_cuda_prefill_plan *plan)
{
    return (folioi_prefill_head *)plan->list;
}

folioi_prefill_item *folioi_cuda_prefill_items(const folioi_cuda_prefill_plan *plan)
{
    return (folioi_prefill_item *)(plan->list + sizeof(folioi_prefill_head));
}

cudaError_t folioi_cuda_prefill(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                                const folioi_cuda_prefill_plan *plan, int64_t whole_tiles,
                                char *workspace, int32_t *counters, cudaStream_t stream)
{
    if (!folioi_cuda_prefill_takes(layer)) return cudaErrorNotSupported;
#ifdef FOLIO_CUDA_HOPPER
    if (folioi_cuda_hopper_takes(layer, &plan->sm)) {
        cudaError_t error =
            folioi_cuda_hopper_prefill(layer, step, plan, whole_tiles, workspace, counters, stream);
        if (error != cudaErrorNotSupported) return error;
    }
#endif
    int32_t rows, values;
    tile_size(layer, &rows, &values);
    prefill_args a = {};
    a.layer = *layer;
    if (!layer->cached) a.layer.kv_dtype = layer->dtype;
    a.step = *step;
    a.head = folioi_cuda_prefill_head(plan);
    a.items = folioi_cuda_prefill_items(plan);
    a.group = layer->num_heads / layer->num_kv_heads;
    int32_t queries = tile_queries(max_dims(layer), a.group);
    tile_pieces pieces = pieces_of(rows, a.group, queries);
    a.heads = pieces.heads;
    a.head_parts = pieces.head_parts;
    a.value_parts = (int32_t)ceil_div(layer->v_dims, values);
    a.pieces = pieces.pieces;
    a.queries = (int32_t)ceil_div(queries, a.pieces);
    a.units = layer->num_kv_heads * a.head_parts * a.value_parts * a.pieces;
    a.room = (int32_t)plan->room.items;
    a.counters = counters;
    a.part_out = (float *)(workspace + plan->counter_bytes);
    a.part_lse = a.part_out + plan->room.rows * layer->num_kv_heads * layer->v_dims;
    a.aligned = is_aligned(layer);
    a.is_direct = a.aligned && dtype_is_16_bit(a.layer.kv_dtype);
    if (bytes_dims(layer) != 0) return folioi_prefill_bytes(&a, plan, bytes_dims(layer), stream);
    if (fixed_dims(layer) != 0)
        return folioi_prefill_fixed(&a, plan, fixed_dims(layer), whole_tiles, stream);
    return folioi_prefill_flexible(&a, plan, flexible_dims(layer), stream);
}
