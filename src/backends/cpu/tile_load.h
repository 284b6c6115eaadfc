/*
 * tile_load.h: the keys of a tile as attend_body.h wants them: sub-tiles of 16 keys with K [steps][16] and V
 * [16][v_stride], in place where the cache's native layout has them so, else converted to scratch. Loops a
 * compiler can vectorise; a level's file may put a faster one in their place.
 */
#ifndef FOLIOI_TILE_LOAD_H
#define FOLIOI_TILE_LOAD_H

#include "backends/cpu/attend_body.h"

/* How the cache's K and V are read. */
typedef struct {
    bool in_place;    /* as they lie                                               */
    bool packed;      /* native sub-tiles of 16 tokens, another type               */
    int32_t v_stride; /* of scratch and of V in place                              */
} tile_plan;

INLINE bool k_is_native(const folioi_address *at, int pack)
{
    return at->token_tile == SUB && at->dim_tile == pack && at->dim_tile_stride == SUB * pack &&
           at->token_stride == pack && (pack == 1 || at->dim_stride == 1);
}

INLINE tile_plan plan_tiles(const folioi_attend_args *a, const folio_dtype kv, const bool dot)
{
    const folioi_keys *keys = &a->keys;
    tile_plan p = {false, false, (int32_t)folioi_out_stride(a->v_dims)};
    if (keys->stored_len == 0) return p;
    const folioi_address *k = keys->k.at, *v = keys->v.at;
    int pack = 4 / (int)folio_dtype_size(kv);
    bool tiles = k_is_native(k, pack);
    if (kv == FOLIO_F32)
        tiles &= v->token_tile == 1 && v->token_tile_stride == a->v_dims && v->dim_tile == 1 &&
                 v->dim_tile_stride == 1;
    else if (pack == 2)
        tiles &= v->token_tile == 2 && v->token_tile_stride == 2 * a->v_dims &&
                 v->token_stride == 1 && v->dim_tile == 1 && v->dim_tile_stride == 2;
    else
        tiles &= v->token_tile == 1 && v->token_tile_stride == a->v_dims && v->dim_tile == 1 &&
                 v->dim_tile_stride == 1;
    p.packed = tiles;
    p.in_place = tiles && a->v_dims % 16 == 0 && (dot ? kv == FOLIO_BF16 : kv == FOLIO_F32);
    return p;
}

/* One stored row of one head as f32, number d to dst[d * stride]. */
INLINE void load_stored(float *dst, int64_t stride, const folioi_kv_side *side,
                        const folio_dtype kv, int64_t block, int64_t head, int64_t token,
                        float fp8_scale)
{
    const folioi_address *at = side->at;
    float scale = kv_scale(side, block, head, token, fp8_scale);
    int64_t from = address_token(at, block, head, token);
    for (int32_t d = 0; d < side->dims; d += at->dim_tile, from += at->dim_tile_stride)
        for (int32_t i = 0; i < at->dim_tile; i++)
            dst[(d + i) * stride] = load_f32(side->base, kv, from + i * at->dim_stride) * scale;
}

INLINE void load_new(float *dst, int64_t stride, const folio_tensor *t, int64_t row, int64_t head,
                     int32_t dims)
{
    int64_t from = row * t->token_stride + head * t->head_stride;
    for (int32_t d = 0; d < dims; d++) dst[d * stride] = load_f32(t->data, t->dtype, from + d);
}

/* Key by key, from any layout: K [k_dims][16], V [16][v_stride], f32. */
static void load_keys(const folioi_attend_args *a, const folio_dtype kv, int32_t key, int32_t n,
                      float *k, float *v, int64_t v_stride)
{
    const folioi_keys *keys = &a->keys;
    for (int32_t j = 0; j < n; j++) {
        int32_t at = key + j;
        float *row = v + j * v_stride;
        if (at < a->begin) { /* its block may be gone */
            memset(row, 0, (size_t)v_stride * sizeof *row);
            continue;
        }
        if (at < keys->stored_len) {
            int64_t block = keys->blocks[at / keys->block_size], token = at % keys->block_size;
            load_stored(k + j, SUB, &keys->k, kv, block, keys->kv_head, token, keys->k_scale);
            load_stored(row, 1, &keys->v, kv, block, keys->kv_head, token, keys->v_scale);
        } else {
            int64_t from = keys->new_row + at - keys->stored_len;
            load_new(k + j, SUB, &keys->new_k, from, keys->kv_head, a->k_dims);
            load_new(row, 1, &keys->new_v, from, keys->kv_head, a->v_dims);
        }
        for (int64_t d = a->v_dims; d < v_stride; d++) row[d] = 0.0f;
    }
}

/* A native sub-tile of another type: K [k_dims][16], V [16][v_stride], f32. */
INLINE void load_packed(const folioi_attend_args *a, const folio_dtype kv, int32_t key, float *k,
                        float *v, int64_t v_stride)
{
    const folioi_keys *keys = &a->keys;
    const int pack = kv == FOLIO_F16 || kv == FOLIO_BF16 ? 2 : 4;
    int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
    int32_t head = keys->kv_head;
    const char *from = keys->k.base + address_token(keys->k.at, block, head, token) * (4 / pack);
    float k_scale[SUB], v_scale[SUB];
    for (int i = 0; i < SUB; i++) {
        k_scale[i] = kv_scale(&keys->k, block, head, token + i, keys->k_scale);
        v_scale[i] = kv_scale(&keys->v, block, head, token + i, keys->v_scale);
    }
    for (int32_t d = 0; d < a->k_dims / pack; d++)
        for (int i = 0; i < SUB; i += LANES)
            _Pragma("GCC unroll 4") for (int part = 0; part < pack; part++)
            {
                vec x = vec_load_packed((int)kv, part, (const uint32_t *)from + d * SUB + i);
                if (pack == 4) x = vec_mul(x, vec_load(k_scale + i));
                vec_store(k + (d * pack + part) * SUB + i, x);
            }
    from = keys->v.base + address_token(keys->v.at, block, head, token) * (4 / pack);
    for (int32_t j = 0; pack == 2 && j < SUB / 2; j++)
        for (int32_t d = 0; d < a->v_dims; d += LANES)
            _Pragma("GCC unroll 2") for (int part = 0; part < 2; part++) vec_store(
                v + (2 * j + part) * v_stride + d,
                vec_load_packed((int)kv, part, (const uint32_t *)from + j * a->v_dims + d));
    for (int32_t j = 0; pack == 4 && j < SUB; j++)
        for (int32_t d = 0; d < a->v_dims; d += LANES)
            vec_store(v + j * v_stride + d,
                      vec_mul(vec_load_bytes((int)kv, (const uint8_t *)from + j * a->v_dims + d),
                              vec_set1(v_scale[j])));
}

/* f32 sub-tiles to pairs of bf16: K [k_dims / 2][16], V [8][v_stride]. Keys past n: zeros in V. */
static void pack_pairs(const folioi_attend_args *a, const float *k, const float *v,
                       int64_t v_stride, int32_t n, uint32_t *k_out, uint32_t *v_out)
{
    for (int32_t d = 0; d < a->k_dims / 2; d++)
        for (int i = 0; i < SUB; i++)
            k_out[d * SUB + i] = (uint32_t)f32_to_bf16(k[2 * d * SUB + i]) |
                                 (uint32_t)f32_to_bf16(k[(2 * d + 1) * SUB + i]) << 16;
    for (int32_t j = 0; j < SUB; j += 2)
        for (int64_t d = 0; d < v_stride; d++) {
            uint32_t low = j < n ? f32_to_bf16(v[j * v_stride + d]) : 0;
            uint32_t high = j + 1 < n ? f32_to_bf16(v[(j + 1) * v_stride + d]) : 0;
            v_out[j / 2 * v_stride + d] = low | high << 16;
        }
}

/* The tile's keys [t->t0, t->t0 + t->n). */
INLINE void load_tile(const folioi_attend_args *a, const folio_dtype kv, const bool dot,
                      const tile_plan *plan, tile *t)
{
    const folioi_keys *keys = &a->keys;
    int32_t pair = dot ? 2 : 1;
    int seen = t->first / SUB; /* sub-tiles before it may have no block */
    for (int i = seen; i * SUB < t->n; i++) {
        int32_t key = t->t0 + i * SUB, n = t->n - i * SUB < SUB ? t->n - i * SUB : SUB;
        bool stored = key + n <= keys->stored_len;
        float *k = a->k_tile + (int64_t)i * SUB * a->k_dims / pair;
        float *v = a->v_tile + (int64_t)i * SUB * plan->v_stride / pair;
        t->ptrs.v_stride[i] = plan->v_stride;
        /* with pairs an odd number of keys leaves a neighbour that nobody may see */
        if (plan->in_place && stored && (!dot || n % 2 == 0)) {
            int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
            int64_t elem = dot ? 2 : 4;
            t->ptrs.k[i] =
                (const float *)(keys->k.base +
                                address_token(keys->k.at, block, keys->kv_head, token) * elem);
            t->ptrs.v[i] =
                (const float *)(keys->v.base +
                                address_token(keys->v.at, block, keys->kv_head, token) * elem);
            continue;
        }
        if (dot) {
            float *k32 = a->wide, *v32 = a->wide + SUB * (int64_t)a->k_dims;
            load_keys(a, kv, key, n, k32, v32, plan->v_stride);
            pack_pairs(a, k32, v32, plan->v_stride, n, (uint32_t *)k, (uint32_t *)v);
        } else if (plan->packed && stored && a->v_dims % LANES == 0 && kv != FOLIO_F32) {
            load_packed(a, kv, key, k, v, plan->v_stride);
        } else {
            load_keys(a, kv, key, n, k, v, plan->v_stride);
        }
        t->ptrs.k[i] = k;
        t->ptrs.v[i] = v;
    }
    for (int i = 0; i < seen; i++) { /* scores of these are made and never used */
        t->ptrs.k[i] = t->ptrs.k[seen];
        t->ptrs.v[i] = t->ptrs.v[seen];
        t->ptrs.v_stride[i] = t->ptrs.v_stride[seen];
    }
}

/* What the tile after t will read, where it lies in whole sub-tiles. */
INLINE void look_ahead(const folioi_attend_args *a, const tile_plan *plan, const int elem, tile *t)
{
    const folioi_keys *keys = &a->keys;
    t->next.num = t->next.at = t->next.done = 0;
    if (!plan->packed) return;
    for (int64_t key = t->t0 + (int64_t)TILE; key < t->t0 + 2 * (int64_t)TILE; key += SUB) {
        if (key + SUB > a->more || key + SUB > keys->stored_len) return;
        int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
        int i = t->next.num;
        t->next.piece[i] =
            keys->k.base + address_token(keys->k.at, block, keys->kv_head, token) * elem;
        t->next.bytes[i] = SUB * a->k_dims * elem;
        t->next.piece[i + 1] =
            keys->v.base + address_token(keys->v.at, block, keys->kv_head, token) * elem;
        t->next.bytes[i + 1] = SUB * a->v_dims * elem;
        t->next.num = i + 2;
    }
}

/* ---------------------------------------------------------------------------------------- kernels */

/* The same loops for each number of rows a block can have: functions, shared by all KV types. */
#define BLOCK_FN(R, name, dot)                                                                     \
    static void scores_##R##_##name(const folioi_attend_args *a, tile *t, const row_block *b,      \
                                    int32_t first, float *s)                                       \
    {                                                                                              \
        scores(a, R, dot, t, b, first, s);                                                         \
    }                                                                                              \
    static void values_##R##_##name(const folioi_attend_args *a, const tile *t,                    \
                                    const row_block *b, int32_t d, const float *p)                 \
    {                                                                                              \
        values(a, R, dot, t, b, d, p);                                                             \
    }
#if MAX_ROWS == 12
#define BLOCK_SIZES(X, name, dot)                                                                  \
    X(12, name, dot) X(8, name, dot) X(4, name, dot) X(2, name, dot) X(1, name, dot)
#else
#define BLOCK_SIZES(X, name, dot) X(6, name, dot) X(4, name, dot) X(2, name, dot) X(1, name, dot)
#endif
#if defined(DOT_BF16)
BLOCK_SIZES(BLOCK_FN, dot, true)
#else
BLOCK_SIZES(BLOCK_FN, fma, false)
#endif

INLINE int32_t block_rows(int32_t rows)
{
#define SIZE(R, name, dot)                                                                         \
    if (rows >= R) return R;
    BLOCK_SIZES(SIZE, , )
#undef SIZE
    return 0;
}

INLINE void block_scores(const folioi_attend_args *a, tile *t, const row_block *b, int32_t first,
                         float *s)
{
    switch (b->rows) {
#define CASE(R, name, dot)                                                                         \
    case R:                                                                                        \
        scores_##R##_##name(a, t, b, first, s);                                                    \
        break;
#if defined(DOT_BF16)
        BLOCK_SIZES(CASE, dot, )
#else
        BLOCK_SIZES(CASE, fma, )
#endif
#undef CASE
    }
}

INLINE void block_values(const folioi_attend_args *a, const tile *t, const row_block *b, int32_t d,
                         const float *p)
{
    switch (b->rows) {
#define CASE(R, name, dot)                                                                         \
    case R:                                                                                        \
        values_##R##_##name(a, t, b, d, p);                                                        \
        break;
#if defined(DOT_BF16)
        BLOCK_SIZES(CASE, dot, )
#else
        BLOCK_SIZES(CASE, fma, )
#endif
#undef CASE
    }
}

/*
 * Up to STRIP rows against one tile: all scores, then the softmax, then all products. A panel of K, then of V,
 * is read by every block before the next one, from the nearest cache.
 */
enum { STRIP = FOLIOI_STRIP_ROWS, MAX_BLOCKS = STRIP / MAX_ROWS + 4 };
static void attend_strip(const folioi_attend_args *a, tile *t, const bool dot, int32_t row,
                         int32_t rows)
{
    float *s = a->scores;
    row_block b[MAX_BLOCKS];
    int n = 0;
    for (int32_t r = row; r < row + rows; r += b[n++].rows)
        b[n] = make_block(a, t, r, block_rows(row + rows - r));
    int32_t lines = TILE * 8 * (a->k_dims + a->v_dims) / 64 * MAX_ROWS / a->rows + 1;
    for (int32_t first = 0; first < VECS; first += 2)
        for (int i = 0; i < n; i++) {
            if (b[i].from >= (first + 2) * LANES || b[i].to <= first * LANES) {
                if (b[i].rows > 4 || b[i].from >= b[i].to) continue;
            }
            if (first == 0 && b[i].rows > 4) fetch_ahead(&t->next, lines);
            block_scores(a, t, &b[i], first, s + (b[i].row - row) * TILE);
        }
    bool careful[MAX_BLOCKS] = {false};
    for (int i = 0; i < n; i++) {
        key_bits hidden[MAX_ROWS];
        float *p = s + (b[i].row - row) * TILE;
        if (b[i].from >= b[i].to || !softmax_block(a, dot, t, &b[i], p, hidden)) continue;
        /* a probability of 0 hides what is finite */
        if (t->values == UNKNOWN)
            t->values = values_are_finite(t, dot, a->v_dims) ? FINITE : NOT_FINITE;
        if (t->values == FINITE) continue;
        careful[i] = true;
        int32_t begin = dot ? b[i].from / 2 : b[i].from, end = dot ? (b[i].to + 1) / 2 : b[i].to;
        for (int32_t r = 0; r < b[i].rows; r++)
            value_row_careful(a, dot, &t->ptrs, p + r * TILE, &hidden[r], begin, end, b[i].row + r);
    }
    if (b[0].rows > 4 && row == 0) pack_panels(a, dot, t);
    for (int32_t d = 0; d < folioi_out_stride(a->v_dims); d += 2 * LANES)
        for (int i = 0; i < n; i++)
            if (b[i].from < b[i].to && !careful[i])
                block_values(a, t, &b[i], d, s + (b[i].row - row) * TILE);
}

INLINE void pack_block(float *to, const float *q, const int32_t n, int32_t steps)
{
    for (int32_t d = 0; d < steps; d++)
        _Pragma("GCC unroll 16") for (int32_t i = 0; i < n; i++) to[d * n + i] =
            q[(int64_t)i * steps + d];
}

/* q as [steps][rows] of each block, in place of [rows][steps]. */
static void pack_queries(float *to, const float *q, int32_t rows, int32_t steps)
{
    for (int32_t r = 0, n; r < rows; r += n, q += (int64_t)n * steps, to += (int64_t)n * steps) {
        int32_t strip = rows - r / STRIP * STRIP < STRIP ? rows : r / STRIP * STRIP + STRIP;
        n = block_rows(strip - r);
        if (n == MAX_ROWS) pack_block(to, q, MAX_ROWS, steps);
        else pack_block(to, q, n, steps);
    }
}

INLINE void attend_split(const folioi_attend_args *a, const folio_dtype kv, const bool dot)
{
    int64_t stride = folioi_out_stride(a->v_dims);
    for (int32_t r = 0; r < a->rows; r++) {
        a->state.max[r] = -INFINITY;
        a->state.sum[r] = 0.0f;
    }
    memset(a->state.out, 0, (size_t)a->rows * (size_t)stride * sizeof(float));
    tile_plan plan = plan_tiles(a, kv, dot);
    for (int64_t next, from = a->begin / TILE * (int64_t)TILE; from < a->end; from = next) {
        next = from + TILE; /* may pass INT32_MAX */
        tile t = {.t0 = (int32_t)from, .n = next < a->end ? TILE : a->end - (int32_t)from};
        t.first = a->begin > t.t0 ? a->begin - t.t0 : 0;
        load_tile(a, kv, dot, &plan, &t);
        look_ahead(a, &plan, (int)folio_dtype_size(kv), &t);
        for (int32_t r = 0; r < a->rows; r += STRIP)
            attend_strip(a, &t, dot, r, a->rows - r < STRIP ? a->rows - r : STRIP);
    }
}

/* For tests; n a multiple of LANES. */
static void exp2_of(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) vec_store(x + i, vec_exp2(vec_load(x + i)));
}

static void tanh_of(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) vec_store(x + i, vec_tanh(vec_load(x + i)));
}

#endif
