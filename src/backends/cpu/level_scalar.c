/*
 * level_scalar.c: the cpu kernels in portable C, which fill every slot of the table. Loops are written
 * so that a compiler can vectorise them without reordering any sum: scores run over the keys of a
 * tile, the product with V over the head's dims, and each number adds its terms in one fixed order.
 */
#include "backends/cpu/cpu_kernels.h"
#include "backends/exp.h"
#include "core/dtype.h"

#include <math.h>
#include <string.h>

#define TILE FOLIOI_TILE_KEYS
#define INLINE static inline __attribute__((always_inline))

/* One stored row of one head, number d to dst[d * stride]. */
INLINE void load_stored(float *dst, int64_t stride, const folioi_kv_side *side, folio_dtype kv,
                        int64_t block, int64_t head, int64_t token, float fp8_scale)
{
    const folioi_address *at = side->at;
    float scale = kv_scale(side, block, head, token, fp8_scale);
    int64_t from = address_token(at, block, head, token);
    for (int32_t d = 0; d < side->dims; d += at->dim_tile, from += at->dim_tile_stride)
        for (int32_t i = 0; i < at->dim_tile; i++)
            dst[(d + i) * stride] = load_f32(side->base, kv, from + i * at->dim_stride) * scale;
}

static void load_new(float *dst, int64_t stride, const folio_tensor *t, int64_t row, int64_t head,
                     int32_t dims)
{
    int64_t from = row * t->token_stride + head * t->head_stride;
    for (int32_t d = 0; d < dims; d++) dst[d * stride] = load_f32(t->data, t->dtype, from + d);
}

static void load_new_k(const folioi_attend_args *a, float *dst, int64_t row)
{
    const folioi_keys *keys = &a->keys;
    folio_tensor t = keys->new_k;
    if (keys->rotate != NULL) {
        rotate_new_row(keys, row, a->k_dims, a->wide);
        t.data = a->wide;
        t.token_stride = t.head_stride = 0;
    }
    load_new(dst, TILE, &t, row, keys->kv_head, a->k_dims);
}

/* Keys [begin, end) to k_tile [k_dims][TILE] and v_tile [TILE][v_dims], from column and row 0 on. */
INLINE void load_tile(const folioi_attend_args *a, folio_dtype kv, int32_t begin, int32_t end)
{
    const folioi_keys *keys = &a->keys;
    for (int32_t j = begin; j < end; j++) {
        float *k = a->k_tile + (j - begin), *v = a->v_tile + (j - begin) * (int64_t)a->v_dims;
        if (j < keys->stored_len) {
            int64_t block = keys->blocks[j / keys->block_size], token = j % keys->block_size;
            load_stored(k, TILE, &keys->k, kv, block, keys->kv_head, token, keys->k_scale);
            load_stored(v, 1, &keys->v, kv, block, keys->kv_head, token, keys->v_scale);
        } else {
            int64_t row = keys->new_row + j - keys->stored_len;
            load_new_k(a, k, row);
            load_new(v, 1, &keys->new_v, row, keys->kv_head, a->v_dims);
        }
    }
}

static void soft_cap_scalar(float *s, int64_t n, const folioi_soft_cap *c)
{
    for (int64_t j = 0; j < n; j++) s[j] = c->cap * tanhf(s[j] / c->cap);
}

/* s[0 .. n) = scores of row r with the tile's keys, key 0 of the tile being `begin`. */
static void score_row(const folioi_attend_args *a, int32_t r, int32_t begin, int32_t n, float *s)
{
    const float *q = a->q + (int64_t)r * a->k_dims;
    for (int32_t j = 0; j < n; j++) s[j] = 0.0f;
    for (int32_t d = 0; d < a->k_dims; d++) {
        const float *k = a->k_tile + (int64_t)d * TILE;
        for (int32_t j = 0; j < n; j++) s[j] += q[d] * k[j];
    }
    for (int32_t j = 0; j < n; j++) s[j] *= a->scale;
    if (a->soft_cap.cap > 0) soft_cap_scalar(s, n, &a->soft_cap);
    if (a->slopes != NULL)
        for (int32_t j = 0; j < n; j++)
            s[j] -= a->slopes[r] * fabsf((float)(a->own[r] - begin - j));
    for (int32_t j = 0; a->bias != NULL && j < n; j++) {
        int64_t at = a->bias_at[r] + (begin + j) * a->bias_key_stride;
        float bias = load_f32(a->bias, a->bias_dtype, at);
        s[j] = bias == -INFINITY ? -INFINITY : s[j] + bias;
    }
}

/* The larger of `largest` and the scores that are numbers; 0 where every seen score is NaN. */
static float largest_score(const float *s, int32_t n, float largest)
{
    bool nan = false;
    for (int32_t j = 0; j < n; j++) {
        largest = s[j] > largest ? s[j] : largest;
        nan |= s[j] != s[j];
    }
    return nan && largest == -INFINITY ? 0.0f : largest;
}

/* Adds keys [lo, hi) of the tile, whose scores are s, to row r's state. */
static void add_row(const folioi_attend_args *a, int32_t r, int32_t lo, int32_t hi, const float *s)
{
    float *out = a->state.out + r * folioi_out_stride(a->v_dims);
    float p[TILE];
    float largest = largest_score(s + lo, hi - lo, -INFINITY);
    if (largest == -INFINITY) return; /* no key of the tile is seen */
    if (largest > a->state.max[r]) {
        float shrink = exp_f32(a->state.max[r] - largest);
        a->state.sum[r] *= shrink;
        for (int32_t d = 0; d < a->v_dims; d++) out[d] *= shrink;
        a->state.max[r] = largest;
    }
    for (int32_t j = lo; j < hi; j++) p[j] = exp_f32(s[j] - a->state.max[r]);
    for (int32_t j = lo; j < hi; j++) {
        if (s[j] == -INFINITY) continue; /* not seen: V may hold anything */
        const float *v = a->v_tile + (int64_t)j * a->v_dims;
        a->state.sum[r] += p[j];
        for (int32_t d = 0; d < a->v_dims; d++) out[d] += p[j] * v[d];
    }
}

INLINE void attend_body(const folioi_attend_args *a, folio_dtype kv)
{
    float s[TILE];
    for (int32_t r = 0; r < a->rows; r++) {
        a->state.max[r] = -INFINITY;
        a->state.sum[r] = 0.0f;
    }
    memset(a->state.out, 0, (size_t)a->rows * (size_t)folioi_out_stride(a->v_dims) * sizeof(float));
    for (int64_t next, from = a->begin; from < a->end; from = next) {
        next = from / TILE * TILE + TILE; /* may pass INT32_MAX */
        int32_t t0 = (int32_t)from, t1 = next < a->end ? (int32_t)next : a->end;
        load_tile(a, kv, t0, t1);
        for (int32_t r = 0; r < a->rows; r++) {
            int32_t lo = a->seen[r].begin > t0 ? a->seen[r].begin : t0;
            int32_t hi = a->seen[r].end < t1 ? a->seen[r].end : t1;
            if (lo >= hi) continue;
            score_row(a, r, t0, hi - t0, s);
            add_row(a, r, lo - t0, hi - t0, s);
        }
    }
}

static void load_queries_scalar(float *to, const void *q, folio_dtype type, const int64_t *from,
                                int32_t rows, int32_t dims)
{
    for (int32_t r = 0; r < rows; r++)
        folioi_load_row(to + (int64_t)r * dims, q, type, from[r], dims);
}

static void store_row_scalar(void *out, folio_dtype type, int64_t index, const float *x,
                             float factor, int32_t dims)
{
    for (int32_t d = 0; d < dims; d++) store_f32(out, type, index + d, x[d] * factor);
}

static void exp2_scalar(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = exp2_f32(x[i]);
}

#define LEVEL scalar
#define ATTEND attend_body
#define LOAD_QUERIES load_queries_scalar
#define DOT false
#include "backends/cpu/attend_table.h"

bool folioi_cpu_has_scalar(void) { return true; }

bool folioi_cpu_wants_scalar(void) { return true; }

void folioi_cpu_fill_scalar(folioi_cpu_kernels *table)
{
    fill_attend(table);
    table->exp2 = exp2_scalar;
    table->soft_cap = soft_cap_scalar;
    table->store_row = store_row_scalar;
    table->write = folioi_kv_write_rows;
    table->rotate = folioi_rotate_row;
}
