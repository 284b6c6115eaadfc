/*
 * reference.c: attention in double precision as docs/numerics.md defines it, one row after another, no SIMD, no
 * threads, no plan. It judges every other backend, so it shares nothing with them but the batch and the
 * cache: masks are decided key by key from positions.
 */
#include "backends/host_merge.h"
#include "backends/registry.h"
#include "backends/rows_out.h"
#include "cache/kv_host.h"
#include "core/dtype.h"
#include "core/host_memory.h"

#include <math.h>

/* One sequence and kv head: where key j's K and V are. */
typedef struct {
    const folioi_call *call;
    folioi_rows rows;
    int32_t kv_head;
} keys;

/* K or V of key j: from the cache as stored, or from this step's k and v. */
static void load_key(const keys *s, folioi_k_or_v which, int64_t j, double *numbers)
{
    const folioi_call *call = s->call;
    const folio_attention_desc *a = call->attention;
    const int32_t dims = which == FOLIOI_K ? a->k_head_size : a->v_head_size;
    bool stored = call->cached && (!call->append || j < s->rows.context_len);
    if (!stored) {
        const folio_tensor *t = which == FOLIOI_K ? &call->tensors.k : &call->tensors.v;
        int64_t i = j - s->rows.context_len, at = tensor_index(t, s->rows.new_row + i, s->kv_head);
        int64_t position = call_position(call, &s->rows, i);
        for (int32_t d = 0; d < dims; d++)
            numbers[d] = which == FOLIOI_V
                             ? load_f32(t->data, t->dtype, at + d)
                             : rotated_number(&call->rotation, t->data, t->dtype, at, d, position);
        return;
    }
    folioi_kv_side side = kv_side(&call->layer, which);
    int64_t bs = call->layer.format->desc.block_size;
    int64_t block = s->rows.blocks[j / bs], token = j % bs;
    const folio_tensors *given = &call->tensors;
    float fp8 = which == FOLIOI_K ? head_scale(given->k_head_scales, given->k_scale, s->kv_head)
                                  : head_scale(given->v_head_scales, given->v_scale, s->kv_head);
    double scale = kv_scale(&side, block, s->kv_head, token, fp8);
    int64_t at = address_token(side.at, block, s->kv_head, token);
    for (int32_t d = 0; d < dims; d++)
        numbers[d] = load_f32(side.base, side.dtype, at + address_dim(side.at, token, d)) * scale;
}

static bool is_seen(const keys *s, int64_t i, int64_t j)
{
    const folio_attention_desc *a = s->call->attention;
    int64_t pos_q = s->rows.first_query_pos + i, pos_k = s->rows.first_key_pos + j;
    if (s->rows.causal && pos_k > pos_q) return false;
    if (a->window_left >= 0 && pos_k < pos_q - a->window_left) return false;
    return a->window_right < 0 || pos_k <= pos_q + a->window_right;
}

/* The score of query i, whose numbers are q, and key j under head h; -inf: not seen. */
static double score(const keys *s, const double *q, int64_t seq, int64_t i, int64_t j, int32_t h)
{
    const folioi_call *call = s->call;
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    if (!is_seen(s, i, j)) return -INFINITY;
    double bias = 0.0;
    if (t->bias.data != NULL)
        bias = load_f32(t->bias.data, t->bias.dtype,
                        bias_index(&t->bias, seq, h, i) + j * t->bias.strides[3]);
    if (bias == -INFINITY) return -INFINITY;
    double x = 0.0, k[FOLIOI_MAX_HEAD_SIZE];
    load_key(s, FOLIOI_K, j, k);
    for (int32_t d = 0; d < a->k_head_size; d++) x += q[d] * k[d];
    x *= a->scale;
    if (a->soft_cap > 0) x = a->soft_cap * tanh(x / a->soft_cap);
    if (t->slopes != NULL)
        x -= (double)t->slopes[h] *
             fabs((double)(s->rows.first_query_pos + i - s->rows.first_key_pos - j));
    return x + bias;
}

static void store_double(void *base, folio_dtype dtype, int64_t index, double x)
{
    if (dtype == FOLIO_F64) ((double *)base)[index] = x;
    else store_f32(base, dtype, index, (float)x);
}

/* scores: room for key_len doubles */
static void attend_row(const keys *s, int64_t seq, int64_t i, int32_t h, double *scores)
{
    const folioi_call *call = s->call;
    const folio_tensors *t = &call->tensors;
    int64_t row = s->rows.query_row + i, out = tensor_index(&t->out, row, h);
    double sink = t->sinks != NULL ? t->sinks[h] : -INFINITY;
    double largest = sink, sum = 0.0;
    bool any = false;
    double q[FOLIOI_MAX_HEAD_SIZE], v[FOLIOI_MAX_HEAD_SIZE], x[FOLIOI_MAX_HEAD_SIZE] = {0.0};
    for (int32_t d = 0; d < call->attention->k_head_size; d++)
        q[d] = rotated_number(&call->rotation, t->q.data, t->q.dtype, tensor_index(&t->q, row, h),
                              d, call_position(call, &s->rows, i));
    for (int64_t j = 0; j < s->rows.key_len; j++) {
        scores[j] = score(s, q, seq, i, j, h);
        if (scores[j] != -INFINITY) any = true;
        if (scores[j] > largest) largest = scores[j];
    }
    if (!any) {
        row_store_empty(call, row, h);
        return;
    }
    if (largest == -INFINITY) largest = 0.0; /* all seen scores are NaN */
    for (int64_t j = 0; j < s->rows.key_len; j++) {
        bool seen = scores[j] != -INFINITY;
        scores[j] = seen ? exp(scores[j] - largest) : -1.0; /* from here on weights; -1: not seen */
        if (seen) sum += scores[j];
    }
    sum += exp(sink - largest);
    for (int64_t j = 0; j < s->rows.key_len; j++) {
        if (scores[j] < 0) continue;
        double weight = scores[j] / sum;
        load_key(s, FOLIOI_V, j, v);
        for (int32_t d = 0; d < call->attention->v_head_size; d++) x[d] += weight * v[d];
    }
    for (int32_t d = 0; d < call->attention->v_head_size; d++)
        store_double(t->out.data, t->out.dtype, out + d, x[d]);
    lse_store(t, row, h, (float)(largest + log(sum)));
}

static folio_status write(const folio_context *ctx, const folioi_kv_layer *layer,
                          const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                          void *stream)
{
    (void)ctx;
    (void)stream;
    folioi_kv_share all = {0, num_slots, 0, layer->format->desc.num_kv_heads};
    folioi_kv_write_rows(layer, t, slots, &all);
    return FOLIO_OK;
}

static folio_status forward(const folioi_call *call)
{
    const folio_attention_desc *a = call->attention;
    folioi_kv_tensors rows = call_new_rows(call);
    if (call->slots != NULL)
        write(call->shape->ctx, &call->layer, &rows, call->slots, call->num_slots, NULL);
    for (int64_t seq = 0; seq < call->batch->num_seqs; seq++) {
        keys s = {call, folioi_batch_rows(call->batch, seq, call->type), 0};
        for (int64_t i = 0; i < s.rows.query_len; i++) {
            for (int32_t h = 0; h < a->num_heads; h++) {
                s.kv_head = h / (a->num_heads / a->num_kv_heads);
                attend_row(&s, seq, i, h, (double *)(void *)call->workspace);
            }
        }
    }
    rows_store_padding(call);
    return FOLIO_OK;
}

static folio_status plan_create(const folioi_plan_shape *shape, void **state,
                                size_t *workspace_size)
{
    *state = NULL;
    *workspace_size = (size_t)shape->desc.max_seq_len * sizeof(double);
    return FOLIO_OK;
}

static void plan_destroy(const folioi_plan_shape *shape, void *state)
{
    (void)shape;
    (void)state;
}

static folio_status plan_update(void *state, const folio_batch *batch, void *stream)
{
    (void)state;
    (void)batch;
    (void)stream;
    return FOLIO_OK;
}

static bool get_kernel(const folio_context *ctx, int32_t index, folio_context_kernel *info)
{
    (void)ctx;
    *info = (folio_context_kernel){.name = "reference_f64",
                                   .dtype = FOLIO_F32,
                                   .kv_dtype = FOLIO_F32,
                                   .head_size = 128,
                                   .v_head_size = 128,
                                   .min_rows = 1};
    return index == 0;
}

static void plan_describe(const void *state, int32_t attention, folio_attention_type type,
                          const folioi_call *call, folio_plan_info *info)
{
    (void)state, (void)attention, (void)type, (void)call;
    info->kernel = "reference_f64";
    info->num_items = 1;
}

static const char *unavailable(void) { return NULL; }
static const char *device(void) { return "double precision, one thread"; }
static const char *const levels[] = {"double", NULL};

static const void *kernels(const char *cap, const char **level)
{
    if (cap != NULL && strcmp(cap, levels[0]) != 0) return NULL;
    *level = levels[0];
    return levels;
}

const folioi_backend folioi_reference_backend = {
    .name = "reference",
    .unavailable = unavailable,
    .device = device,
    .levels = levels,
    .kernels = kernels,
    .get_kernel = get_kernel,
    .max_head_size = FOLIOI_MAX_HEAD_SIZE,
    .f64_out = true,
    .one_thread = true,
    .features = folioi_host_features,
    .alloc = folioi_host_alloc,
    .free = folioi_host_free,
    .copy = folioi_host_copy,
    .fill = folioi_host_fill,
    .wait = folioi_host_wait,
    .write = write,
    .gather = folioi_host_gather,
    .move_blocks = folioi_host_move_blocks,
    .plan_create = plan_create,
    .plan_destroy = plan_destroy,
    .plan_update = plan_update,
    .plan_describe = plan_describe,
    .forward = forward,
    .merge = folioi_host_merge,
};
