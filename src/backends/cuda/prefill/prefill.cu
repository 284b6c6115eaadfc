/*
 * prefill.cu: attention of sequences with many query rows: one launch per layer computes the step's list of tiles. The grid is
 * fixed by the device and the list's room, so a graph may hold it.
 */
#include "backends/cuda/prefill/prefill_launch.h"
#include "core/dtype.h"

/* ---- the list ---- */

const folioi_cuda_line *folioi_cuda_prefill_line(int32_t n)
{
    static const folioi_prefill_line *const lists[] = {
#ifdef FOLIO_CUDA_HOPPER
        folioi_prefill_hopper, folioi_prefill_latent,
#endif
        folioi_prefill_fixed,  folioi_prefill_bytes,  folioi_prefill_f32, folioi_prefill_flexible};
    for (const folioi_prefill_line *line : lists)
        for (; line->line.name != NULL; line++)
            if (n-- == 0) return &line->line;
    return NULL;
}

bool folioi_prefill_can(const folioi_cuda_layer *l)
{
    if (!dtype_is_16_bit(l->dtype) || l->k_dims % 8 != 0 || l->v_dims % 8 != 0) return false;
    if (!folioi_cuda_new_rows_fit(l)) return false;
    if (!l->cached) return true;
    if (dtype_is_16_bit(l->kv_dtype) ? l->kv_dtype != l->dtype : l->kv_dtype == FOLIO_F32)
        return false;
    folioi_cuda_form form = folioi_cuda_form_of(l);
    return form != FOLIOI_FORM_OTHER && (form < FOLIOI_FORM_XPACKED || folioi_prefill_aligned(l));
}

static int64_t size_of(folio_dtype dtype)
{
    return dtype == FOLIO_F32 ? 4 : dtype_is_16_bit(dtype) ? 2 : 1;
}

bool folioi_prefill_aligned(const folioi_cuda_layer *l)
{
    int64_t size = size_of(l->kv_dtype), of_q = size_of(l->dtype);
    int64_t bytes = size == 1 ? 8 : 16; /* that are copied at once */
    bool ok =
        folioi_cuda_rows_aligned(&l->q, of_q, 16) && folioi_cuda_rows_aligned(&l->out, of_q, 16);
    if (l->cached && !folioi_cuda_is_xpacked(l))
        ok = ok && folioi_cuda_side_aligned(&l->k, size, bytes) &&
             folioi_cuda_side_aligned(&l->v, size, bytes);
    if (!l->cached || l->append)
        ok = ok && folioi_cuda_rows_aligned(&l->new_k, of_q, 16) &&
             folioi_cuda_rows_aligned(&l->new_v, of_q, 16);
    return ok;
}

/* ---- a plan's numbers ---- */

/* How many tiles of `rows` rows compute one of the list for a kv head. */
typedef struct tile_pieces {
    int32_t heads, head_slices; /* query heads of one, and tiles a head group needs */
    int32_t pieces;             /* of the queries                              */
} tile_pieces;

static tile_pieces pieces_of(int32_t rows, int32_t heads_per_kv, int32_t queries)
{
    int32_t heads = heads_per_kv < rows ? heads_per_kv : rows;
    return {heads, (int32_t)ceil_div(heads_per_kv, heads),
            (int32_t)ceil_div(queries, rows / heads)};
}

/* Lengths at which a batch-invariant plan cuts the keys of up to 32 rows: no more than 16 parts. */
static int32_t fixed_split_len(int64_t max_seq_len)
{
    return (int32_t)max_i64(2048, round_up(ceil_div(max_seq_len, 16), FOLIOI_PREFILL_CUT));
}

/* Units of a line that compute one item of the list. */
static int64_t units_of(const folioi_cuda_line *line, const folioi_cuda_layer *prototype,
                        const folioi_prefill_shape *shape)
{
    const folioi_prefill_line *l = (const folioi_prefill_line *)line;
    tile_pieces p = pieces_of(l->rows, shape->heads_per_kv, shape->queries);
    return prototype->num_kv_heads * ceil_div(prototype->v_dims, l->values) * p.head_slices *
           p.pieces;
}

/* Tiles of the list are those of the choice's first line; lines with fewer rows take a tile in pieces. */
void folioi_cuda_prefill_init(folioi_cuda_prefill_plan *plan, const folioi_cuda_limits *l)
{
    const folioi_cuda_layer *prototype = &l->prototype;
    *plan = {};
    plan->sm = l->sm;
    folioi_cuda_choice choice = folioi_cuda_choose(folioi_cuda_prefill_line, prototype, &l->sm, 0);
    if (choice.lines[0] == NULL)
        choice.lines[0] = &folioi_prefill_flexible[0].line; /* not launched */
    const folioi_prefill_line *first = (const folioi_prefill_line *)choice.lines[0];
    folioi_prefill_shape *shape = &plan->shape;
    shape->heads_per_kv = prototype->num_heads / prototype->num_kv_heads;
    shape->queries = shape->heads_per_kv < first->rows ? first->rows / shape->heads_per_kv : 1;
    if (shape->heads_per_kv <= FOLIOI_DECODE_MAX_ROWS && !prototype->v_in_k)
        shape->decode_rows = (int32_t)max_i64(shape->heads_per_kv, first->decode_rows);
    shape->window_left = prototype->window_left;
    shape->window_right = prototype->window_right;
    int32_t units = prototype->num_kv_heads *
                    pieces_of(first->rows, shape->heads_per_kv, shape->queries).head_slices;
    shape->num_at_once = (int32_t)max_i64((int64_t)l->sm.count * first->blocks / units, 1);
    shape->num_alone = (int32_t)max_i64(l->sm.count / units, 1);
    if (l->batch_invariant) shape->split_len = fixed_split_len(l->max_seq_len);
    plan->room = prefill_room(shape, l->max_query_tokens, min_i64(l->max_seqs, l->max_query_tokens),
                              l->max_query_len, l->max_seq_len);
    plan->list_bytes =
        sizeof(folioi_prefill_head) + (size_t)plan->room.items * sizeof(folioi_prefill_item);
    int64_t all_units = 0;
    for (const folioi_cuda_line *line : choice.lines)
        if (line != NULL) all_units = max_i64(all_units, units_of(line, prototype, shape));
    plan->counter_bytes = (size_t)round_up(16 * (1 + plan->room.cut_tiles * all_units), 256);
    plan->workspace_bytes =
        plan->counter_bytes +
        (size_t)(plan->room.rows * prototype->num_kv_heads * (prototype->v_dims + 2) * 4);
}

folioi_prefill_head *folioi_cuda_prefill_head(const folioi_cuda_prefill_plan *plan)
{
    return (folioi_prefill_head *)plan->list;
}

folioi_prefill_item *folioi_cuda_prefill_items(const folioi_cuda_prefill_plan *plan)
{
    return (folioi_prefill_item *)(plan->list + sizeof(folioi_prefill_head));
}

/* ---- a launch ---- */

prefill_args folioi_prefill_args(const folioi_prefill_line *line, const folioi_cuda_run *run,
                                 const folioi_cuda_prefill_plan *plan)
{
    const folioi_cuda_layer *layer = run->layer;
    prefill_args a = {};
    a.layer = *layer;
    if (!layer->cached) a.layer.kv_dtype = layer->dtype;
    a.step = *run->step;
    a.head = folioi_cuda_prefill_head(plan);
    a.items = folioi_cuda_prefill_items(plan);
    a.heads_per_kv = plan->shape.heads_per_kv;
    tile_pieces pieces = pieces_of(line->rows, a.heads_per_kv, plan->shape.queries);
    a.heads = pieces.heads;
    a.head_slices = pieces.head_slices;
    a.value_slices = (int32_t)ceil_div(layer->v_dims, line->values);
    a.pieces = pieces.pieces;
    a.queries = (int32_t)ceil_div(plan->shape.queries, a.pieces);
    a.units = layer->num_kv_heads * a.head_slices * a.value_slices * a.pieces;
    a.room = (int32_t)plan->room.items;
    a.counters = run->counters;
    a.part_out = (float *)(run->workspace + plan->counter_bytes);
    a.part_lse = a.part_out + plan->room.rows * layer->num_kv_heads * layer->v_dims;
    a.aligned = folioi_prefill_aligned(layer);
    a.is_direct = a.aligned && dtype_is_16_bit(a.layer.kv_dtype);
    a.xpacked = folioi_cuda_is_xpacked(layer);
    a.k_by_dims = a.xpacked && folioi_cuda_by_dims(&layer->k);
    a.k_step = a.xpacked ? 16 * layer->block_size : 16;
    return a;
}
