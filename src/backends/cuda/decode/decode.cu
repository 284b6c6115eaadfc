/*
 * decode.cu: the host's side of the decode family: the sizes of a plan, how an instance fits a multiprocessor, the choice of
 * an instance, and its launch. The kernel is put together in decode_kernel.h; who reads what is in decode_schedule.h.
 */
#include "backends/cuda/decode/decode_kernel.h"
#include "backends/cuda/host/launch.h"
#include "core/dtype.h"

/* ---- how an instance fits a multiprocessor ---- */

/* How an instance lies in shared memory. */
typedef struct block_fit {
    int num_warps, num_stages, blocks_per_sm, row_blocks, rows, q_forms;
    int k_stride, v_stride, stage_bytes, q_stride, out_stride, out_copies;
    bool scales;
    size_t shared_bytes;
} block_fit;

/* An odd number of 16-byte chunks per row keeps ldmatrix free of bank conflicts. */
static int row_stride(int dims, int bytes) { return ((dims * bytes + 15) / 16 | 1) * 16; }

static size_t fit_bytes(const block_fit *f)
{
    size_t bytes = (size_t)f->out_copies * f->rows * f->out_stride * sizeof(float) +
                   sizeof(folioi_cuda_counts) + sizeof(folioi_decode_share) +
                   ROW_FLOATS * sizeof(float) +
                   (size_t)f->q_forms * 16 * f->q_stride * sizeof(uint16_t) +
                   (f->q_forms == 3 ? 16 * sizeof(row_option) : 0) + STAGE_ALIGN;
    size_t stage = f->stage_bytes + sizeof(tile_note) + sizeof(uint64_t) +
                   (f->scales ? 32 * sizeof(float) : 0);
    return bytes + stage * f->num_warps * f->num_stages;
}

static bool fits(block_fit *f, const folioi_cuda_sm *sm, int blocks, int warps, int stages)
{
    f->blocks_per_sm = blocks;
    f->num_warps = warps;
    f->num_stages = stages;
    f->shared_bytes = fit_bytes(f);
    /* the device keeps 1 KB of every block for itself */
    size_t room = (size_t)sm->shared_bytes / (size_t)blocks - 1024;
    return f->shared_bytes <= room && f->shared_bytes <= (size_t)sm->shared_of_block;
}

/* Warps of a block: one warp waits for its own results most of the time, so as many as registers allow. */
static int most_warps(bool fixed, int rows, int dims, int kv_bytes)
{
    if (rows > 8) return 4;
    if (!fixed) return 6;
    return dims == 64 || kv_bytes == 1 ? 8 : 6;
}

/* Do the flexible instances have one for few rows? */
static bool few_rows(int v_dims, int rows) { return v_dims <= 128 && rows <= 8; }

/* stage_elem: bytes of the widest number a stage may hold. */
static block_fit fit_block(const folioi_cuda_sm *sm, bool fixed, int k_dims, int v_dims,
                           int kv_bytes, int stage_elem, int rows, bool scales)
{
    block_fit f = {};
    f.scales = scales;
    f.row_blocks = v_dims > 256 ? 2 : 1;
    f.rows = (fixed ? rows <= 8 : few_rows(v_dims, rows)) || f.row_blocks == 2 ? 8 : 16;
    f.out_copies = !fixed || f.rows > 8 ? 1 : k_dims * kv_bytes == 256 ? 3 : 2;
    f.q_forms = !fixed ? 3 : k_dims <= 128 ? 0 : 1;
    /* fragments have 16 dims: what is read past the head size must be the row's own zeros */
    f.k_stride = row_stride((int)round_up(k_dims, 16), stage_elem);
    f.v_stride = row_stride((int)round_up(v_dims, 16), stage_elem);
    if (fixed) f.k_stride = f.v_stride = fixed_stride(k_dims, kv_bytes);
    f.stage_bytes = 16 * (f.k_stride + f.v_stride);
    f.q_stride = (int)round_up(k_dims, 16) + 8;
    f.out_stride = (int)round_up(v_dims, 32) + 4;
    int most = most_warps(fixed, fixed || few_rows(v_dims, rows) ? rows : 16, k_dims, kv_bytes);
    for (int warps = most; warps >= 4; warps--)
        for (int stages = 6; stages >= (warps > 4 ? 2 : 3); stages--)
            if (fits(&f, sm, 2, warps, stages)) return f;
    for (int stages = 6; stages >= 2; stages--)
        if (fits(&f, sm, 1, most, stages)) return f;
    for (int warps = most; warps >= 1; warps--)
        for (int stages = 2; stages >= 1; stages--)
            if (fits(&f, sm, 1, warps, stages)) return f;
    f.num_warps = 0;
    return f;
}

/* ---- what a layer allows ---- */

/* Bytes by which all rows of K and V can be copied; below 4 they are copied number by number. */
static int widest_copy(const folioi_cuda_layer *y, int elem)
{
    for (int bytes = 16; bytes >= 4; bytes /= 2) {
        bool fit = y->k_dims * elem % bytes == 0 && y->v_dims * elem % bytes == 0;
        if (y->cached)
            fit = fit && folioi_cuda_side_aligned(&y->k, elem, bytes) &&
                  folioi_cuda_side_aligned(&y->v, elem, bytes);
        /* beside an 8-bit cache new rows are copied slowly */
        if ((!y->cached || y->append) && elem == 2)
            fit = fit && folioi_cuda_rows_aligned(&y->new_k, 2, bytes) &&
                  folioi_cuda_rows_aligned(&y->new_v, 2, bytes);
        if (fit) return bytes;
    }
    return elem;
}

static bool fixed_dims(int k_dims, int v_dims, int kv_bytes)
{
    if (k_dims != v_dims) return false;
    return k_dims == 128 || (kv_bytes == 2 && (k_dims == 64 || k_dims == 256));
}

static bool scales_alike(const folioi_address *k, const folioi_address *v)
{
    return k->block == v->block && k->head == v->head &&
           k->token_tile_stride == v->token_tile_stride;
}

static bool is_fixed(const folioi_cuda_layer *y)
{
    bool bytes = dtype_is_fp8(y->kv_dtype) || y->kv_dtype == FOLIO_INT8;
    if (!y->cached || y->append || (y->kv_dtype != y->dtype && !bytes)) return false;
    if (!fixed_dims(y->k_dims, y->v_dims, bytes ? 1 : 2)) return false;
    if (y->kv_dtype == FOLIO_INT8 && !scales_alike(&y->k.scales_at, &y->v.scales_at)) return false;
    if (y->soft_cap > 0.0f || y->slopes != NULL || y->bias.data != NULL) return false;
    return widest_copy(y, bytes ? 1 : 2) == 16 && folioi_cuda_rows_aligned(&y->q, 2, 4);
}

/* How a layer's block lies in shared memory; 0 warps: the device has too little of it. */
static block_fit fit_layer(const folioi_cuda_layer *y, const folioi_cuda_sm *sm, int rows)
{
    bool wide = !y->cached || y->kv_dtype == FOLIO_F16 || y->kv_dtype == FOLIO_BF16;
    bool fixed = is_fixed(y);
    int kv_bytes = wide ? 2 : 1, stage_elem = !fixed && y->append ? 2 : kv_bytes;
    return fit_block(sm, fixed, y->k_dims, y->v_dims, kv_bytes, stage_elem, rows,
                     y->cached && y->kv_dtype == FOLIO_INT8);
}

extern "C" bool folioi_cuda_decode_takes(const folioi_cuda_layer *y,
                                         const folioi_cuda_decode_plan *plan)
{
    if (!dtype_is_16_bit(y->dtype) || !folioi_cuda_new_rows_fit(y)) return false;
    if (y->k_dims > 512 || y->v_dims > 512 || y->num_heads / y->num_kv_heads > 16) return false;
    if (y->cached && y->kv_dtype == FOLIO_F32) return false;
    if (y->cached && !folioi_cuda_has_pages(&y->k) &&
        !(folioi_cuda_has_rows(&y->k) && folioi_cuda_has_rows(&y->v)))
        return false;
    /* probabilities are of the cache's type, and bf16 ones too coarse for f16 results */
    if (y->cached && y->dtype == FOLIO_F16 && y->kv_dtype == FOLIO_BF16) return false;
    return fit_layer(y, &plan->sm, plan->max_rows).num_warps > 0;
}

/* ---- a plan's numbers ---- */

extern "C" void folioi_cuda_decode_init(folioi_cuda_decode_plan *plan,
                                        const folioi_cuda_decode_limits *l)
{
    int group = l->num_heads / l->num_kv_heads;
    *plan = {};
    int64_t rows = l->max_query_len > 0 ? (int64_t)l->max_query_len * group : 16;
    plan->max_rows = (int32_t)(rows > 16 ? 16 : round_up(rows, 2));
    plan->sm = l->sm;
    block_fit f = fit_block(&l->sm, fixed_dims(l->k_dims, l->v_dims, l->kv_bytes), l->k_dims,
                            l->v_dims, l->kv_bytes, l->kv_bytes, plan->max_rows, false);
    int64_t shares = (int64_t)l->sm.count * f.blocks_per_sm / l->num_kv_heads;
    plan->num_shares = (int32_t)(shares < 1 ? 1 : shares);
    plan->max_items = l->max_seqs + plan->num_shares;
    plan->max_stores = 2 * (int64_t)plan->num_shares;
    if (l->batch_invariant) {
        int64_t len = round_up(ceil_div(l->max_seq_len, 64), 64); /* at most 64 parts */
        plan->split_len = (int32_t)(len < 1024 ? 1024 : len);
        plan->max_items = l->max_seqs * (ceil_div(l->max_seq_len, plan->split_len) + 1);
        plan->max_stores = plan->max_items;
    }
    plan->schedule_bytes = (size_t)(plan->num_shares * (int64_t)sizeof(folioi_decode_share) +
                                    plan->max_items * (int64_t)sizeof(folioi_decode_item));
    plan->counter_bytes = (size_t)round_up(l->max_seqs * l->num_kv_heads * 2 * 4, 256);
    plan->workspace_bytes = plan->counter_bytes + (size_t)(plan->max_stores * l->num_kv_heads *
                                                           plan->max_rows * (l->v_dims + 2) * 4);
}

extern "C" folioi_decode_table folioi_cuda_decode_table(const folioi_cuda_decode_plan *plan)
{
    folioi_decode_share *shares = (folioi_decode_share *)plan->schedule;
    return {shares, (folioi_decode_item *)(shares + plan->num_shares), NULL};
}

/* ---- a launch ---- */

static void fill_args(decode_args *a, const folioi_cuda_layer *y, const folioi_cuda_step *step,
                      const folioi_cuda_decode_plan *plan, char *workspace, int32_t *counters)
{
    a->layer = *y;
    if (!y->cached) a->layer.kv_dtype = y->dtype;
    if (a->layer.kv_dtype != FOLIO_INT8) a->layer.k.scales = a->layer.v.scales = NULL;
    if (!dtype_is_fp8(a->layer.kv_dtype)) a->layer.k.scale = a->layer.v.scale = 1.0f;
    folioi_decode_table table = folioi_cuda_decode_table(plan);
    a->blocks = step->blocks;
    a->counts = step->counts;
    a->seqs = step->seqs;
    a->shares = table.shares;
    a->items = table.items;
    a->out_quads = y->v_dims % 4 == 0 && folioi_cuda_rows_aligned(&y->out, 2, 8);
    a->counters = counters;
    a->partials = (float *)(workspace + plan->counter_bytes);
    a->out_rows = step->out_rows;
    a->max_rows = plan->max_rows;
    a->group = y->num_heads / y->num_kv_heads;
    a->kv_bytes = dtype_is_16_bit(a->layer.kv_dtype) ? 2 : 1;
    a->copy_bytes = widest_copy(&a->layer, a->kv_bytes);
    a->k_copies = y->k_dims * a->kv_bytes / a->copy_bytes;
    a->v_copies = y->v_dims * a->kv_bytes / a->copy_bytes;
    a->block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (y->block_size == 1 << shift) a->block_shift = shift;
    a->one_block_tiles = y->block_size % 16 == 0;
    a->paged = y->cached && folioi_cuda_has_pages(&y->k);
    a->bulk = a->one_block_tiles && (a->paged || (y->k.at.token_tile_stride == y->k_dims &&
                                                  y->v.at.token_tile_stride == y->v_dims));
    a->k_inverse = ((1u << 22) + a->k_copies - 1) / a->k_copies;
    a->v_inverse = ((1u << 22) + a->v_copies - 1) / a->v_copies;
}

typedef void decode_fn(decode_args);

static cudaError_t launch(decode_fn *kernel, decode_args *a, const block_fit *f,
                          const folioi_cuda_decode_plan *plan, cudaStream_t stream)
{
    a->num_warps = f->num_warps;
    a->warps_inverse = f->num_warps > 1 ? UINT32_MAX / f->num_warps + 1 : UINT32_MAX;
    a->num_stages = f->num_stages;
    a->row_blocks = f->row_blocks;
    a->k_stride = f->k_stride;
    a->v_stride = f->v_stride;
    a->stage_bytes = f->stage_bytes;
    a->q_stride = f->q_stride;
    a->out_stride = f->out_stride;
    a->out_copies = f->out_copies;
    a->out_size = f->rows * f->out_stride;
    /* always the most: other layers launch the same kernel with more than this one */
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, plan->sm.shared_of_block, true);
    if (error != cudaSuccess) return error;
    dim3 grid(a->layer.num_kv_heads, plan->num_shares, f->row_blocks);
    return launch_kernel(kernel, grid, 32 * f->num_warps, f->shared_bytes, plan->sm.overlaps != 0,
                         *a, stream);
}

/* Instances: few rows (at most 8) or up to 16, and the warps that most_warps says; of 16-bit K and V pages or rows. */
#define INSTANCE_OF(dims, type, warps, paged)                                                      \
    (few ? decode_kernel<dims, 1, type, warps, paged> : decode_kernel<dims, 2, type, 4, paged>)
#define INSTANCE(dims, type, warps)                                                                \
    (paged ? INSTANCE_OF(dims, type, warps, true) : INSTANCE_OF(dims, type, warps, false))

static decode_fn *choose(const folioi_cuda_layer *y, bool fixed, bool few)
{
    if (!fixed && y->v_dims <= 128 && few) return decode_kernel<128, 1, 0, 6>;
    if (!fixed && y->v_dims <= 128) return decode_kernel<128, 2, 0, 4>;
    if (!fixed && y->v_dims <= 256) return decode_kernel<256, 2, 0, 4>;
    if (!fixed) return decode_kernel<512, 1, 0, 4>;
    if (y->kv_dtype == FOLIO_FP8_E4M3) return INSTANCE_OF(128, FOLIO_FP8_E4M3, 8, false);
    if (y->kv_dtype == FOLIO_FP8_E5M2) return INSTANCE_OF(128, FOLIO_FP8_E5M2, 8, false);
    if (y->kv_dtype == FOLIO_INT8) return INSTANCE_OF(128, FOLIO_INT8, 8, false);
    bool bf16 = y->dtype == FOLIO_BF16, paged = folioi_cuda_has_pages(&y->k);
    if (y->k_dims == 64) return bf16 ? INSTANCE(64, FOLIO_BF16, 8) : INSTANCE(64, FOLIO_F16, 8);
    if (y->k_dims == 128) return bf16 ? INSTANCE(128, FOLIO_BF16, 6) : INSTANCE(128, FOLIO_F16, 6);
    return bf16 ? INSTANCE(256, FOLIO_BF16, 6) : INSTANCE(256, FOLIO_F16, 6);
}

extern "C" cudaError_t folioi_cuda_decode(const folioi_cuda_layer *y, const folioi_cuda_step *step,
                                          const folioi_cuda_decode_plan *plan, int32_t rows,
                                          folioi_cuda_early early, char *workspace,
                                          int32_t *counters, cudaStream_t stream)
{
    decode_args a = {};
    a.early = early;
    fill_args(&a, y, step, plan, workspace, counters);
    bool fixed = is_fixed(y), few = rows <= 8;
    block_fit f = fit_layer(y, &plan->sm, rows);
    return launch(choose(&a.layer, fixed, few), &a, &f, plan, stream);
}
