/*
 * attend_split.h: rows against the keys of one split: tiles one after another, rows in strips, strips in blocks.
 * A level's file includes its vec_<isa>.h, then this, and makes kernels of attend_split by their KV type.
 */
#ifndef FOLIOI_ATTEND_SPLIT_H
#define FOLIOI_ATTEND_SPLIT_H

#if defined(DOT_BF16) && !defined(OWN_STRIP)
#include "backends/cpu/attend_bytes.h"
#else
#include "backends/cpu/tile_load.h"
#endif

#if defined(OWN_STRIP) /* the level's file defines it, for all rows at once */
enum { STRIP = 1 << 30 };
static bool reads_panels(int32_t rows) { return (void)rows, false; }
static void attend_strip(const folioi_attend_args *a, const tile_plan *plan, tile *t, int32_t row,
                         int32_t rows);
#else

/* The numbers of rows a block can have; a level whose MAX_ROWS is another says its own. */
#if MAX_ROWS == 12
#define BLOCK_SIZES(X) X(12) X(8) X(4) X(2) X(1)
#elif MAX_ROWS == 6
#define BLOCK_SIZES(X) X(6) X(4) X(2) X(1)
#endif

/* The same loops for each of them. */
#define BLOCK_FN(R)                                                                                \
    static void scores_##R(const folioi_attend_args *a, tile *t, const row_block *b,               \
                           int32_t first, float *s)                                                \
    {                                                                                              \
        scores(a, R, t, b, first, s);                                                              \
    }                                                                                              \
    static void values_##R(const folioi_attend_args *a, tile *t, const row_block *b, int32_t d,    \
                           const float *p)                                                         \
    {                                                                                              \
        values(a, R, t, b, d, p);                                                                  \
    }
BLOCK_SIZES(BLOCK_FN)
#undef BLOCK_FN

/* The largest that the rows fill; but of 16 two times 8, for blocks of 4 read V as it lies, which takes longer. */
INLINE int32_t block_rows(int32_t rows)
{
    if (MAX_ROWS == 12 && rows == 16) return 8;
#define SIZE(R)                                                                                    \
    if (rows >= R) return R;
    BLOCK_SIZES(SIZE)
#undef SIZE
    return 0;
}

INLINE void block_scores(const folioi_attend_args *a, tile *t, const row_block *b, int32_t first,
                         float *s)
{
#if defined(DOT_BF16)
    if (t->bytes) {
        if (first == 0) block_score_bytes(a, t, b, s);
        return;
    }
#endif
    switch (b->rows) {
#define CASE(R)                                                                                    \
    case R:                                                                                        \
        scores_##R(a, t, b, first, s);                                                             \
        break;
        BLOCK_SIZES(CASE)
#undef CASE
    }
}

INLINE void block_values(const folioi_attend_args *a, tile *t, const row_block *b, int32_t d,
                         const float *p)
{
#if defined(DOT_BF16)
    if (t->bytes) {
        if (d == 0) block_value_bytes(a, t, b, p);
        return;
    }
#endif
    switch (b->rows) {
#define CASE(R)                                                                                    \
    case R:                                                                                        \
        values_##R(a, t, b, d, p);                                                                 \
        break;
        BLOCK_SIZES(CASE)
#undef CASE
    }
}

enum { STRIP = FOLIOI_STRIP_ROWS, MAX_BLOCKS = STRIP / MAX_ROWS + 4 };

/* V in K as rows, where panels are not enough. */
static void transpose_rows(const folioi_attend_args *a, tile *t)
{
    t->panels = false;
    for (int i = t->first / SUB; i * SUB < t->n; i++) transpose_k(a, t, i);
}

/* Have all blocks of these rows more than 4? */
static bool reads_panels(int32_t rows)
{
    bool all = true;
    for (int32_t r = 0, n; r < rows; r += n) {
        n = block_rows(rows - r < STRIP - r % STRIP ? rows - r : STRIP - r % STRIP);
        all &= n > 4;
    }
    return all;
}

/*
 * Up to STRIP rows against one tile: all scores, then the softmax, then all products. A panel of K, then of V,
 * is read by every block before the next one, from the nearest cache.
 */
static void attend_strip(const folioi_attend_args *a, const tile_plan *plan, tile *t, int32_t row,
                         int32_t rows)
{
    float *s = a->scores;
    row_block b[MAX_BLOCKS];
    int n = 0;
    for (int32_t r = row; r < row + rows; r += b[n++].rows)
        b[n] = make_block(a, t, r, block_rows(row + rows - r));
    for (int32_t first = 0; first < VECS; first += 2)
        for (int i = 0; i < n; i++) {
            if (b[i].from >= (first + 2) * LANES || b[i].to <= first * LANES) {
                if (b[i].rows > 4 || b[i].from >= b[i].to) continue;
            }
            block_scores(a, t, &b[i], first, s + (b[i].row - row) * TILE);
        }
    bool careful[MAX_BLOCKS] = {false};
    for (int i = 0; i < n; i++) {
        key_bits hidden[MAX_ROWS];
        float *p = s + (b[i].row - row) * TILE;
        if (b[i].from >= b[i].to || !softmax_block(a, t, &b[i], p, hidden)) continue;
        if (t->bytes) { /* from here on as any other */
            load_tile(a, plan, t);
            t->bytes = false;
        }
        if (t->panels) transpose_rows(a, t);
        /* a probability of 0 hides what is finite */
        if (t->values == UNKNOWN) t->values = values_are_finite(t, a->v_dims) ? FINITE : NOT_FINITE;
        if (t->values == FINITE) continue;
        careful[i] = true;
        int32_t begin = DOT ? b[i].from / 2 : b[i].from, end = DOT ? (b[i].to + 1) / 2 : b[i].to;
        for (int32_t r = 0; r < b[i].rows; r++)
            value_row_careful(a, &t->ptrs, p + r * TILE, &hidden[r], begin, end, b[i].row + r);
    }
    if (b[0].rows > 4 && row == 0) pack_panels(a, t);
    for (int32_t d = 0; d < folioi_out_stride(a->v_dims); d += 2 * LANES)
        for (int i = 0; i < n; i++)
            if (b[i].from < b[i].to && !careful[i])
                block_values(a, t, &b[i], d, s + (b[i].row - row) * TILE);
}

/* One block of q as [steps][n]: rows to columns. Vectors run over their end, where the next ones are written. */
INLINE void pack_block(const int type, const char *const *row, int32_t n, int32_t steps, float *to)
{
    const int64_t elem = (int64_t)folio_dtype_size((folio_dtype)type);
    int32_t d = 0;
    for (; d + LANES <= steps; d += LANES)
        for (int32_t g = 0; g < n; g += LANES) {
            vec x[LANES];
            UNROLL_FOR (int i = 0; i < LANES; i++)
                x[i] = g + i < n ? vec_load_as(type, row[g + i] + d * elem) : vec_set1(0.0f);
            vec_transpose(x);
            UNROLL_FOR (int i = 0; i < LANES; i++) vec_store(to + (int64_t)(d + i) * n + g, x[i]);
        }
    for (; d < steps; d++)
        for (int32_t i = 0; i < n; i++) {
            if (type == FOLIO_F32) memcpy(&to[(int64_t)d * n + i], row[i] + d * elem, 4);
            else to[(int64_t)d * n + i] = load_f32(row[i], (folio_dtype)type, d);
        }
}

/* Rows of q, row r from element from[r] on, as [steps][n] of each block of n. A pair of bf16 passes as f32. */
static void pack_queries(float *to, const void *q, folio_dtype type, const int64_t *from,
                         int32_t rows, int32_t dims)
{
    int32_t steps = DOT ? dims / 2 : dims;
    int64_t elem = (int64_t)folio_dtype_size(type);
    for (int32_t r = 0, n; r < rows; r += n, to += (int64_t)n * steps) {
        int32_t strip = rows - r / STRIP * STRIP < STRIP ? rows : r / STRIP * STRIP + STRIP;
        const char *row[MAX_ROWS];
        n = block_rows(strip - r);
        for (int32_t i = 0; i < n; i++) row[i] = (const char *)q + from[r + i] * elem;
        if (DOT || type == FOLIO_F32) pack_block(FOLIO_F32, row, n, steps, to);
        else if (type == FOLIO_F16) pack_block(FOLIO_F16, row, n, steps, to);
        else pack_block(FOLIO_BF16, row, n, steps, to);
    }
}
#endif

/* A row of out: x * factor, rounded to its type. */
static void store_row(void *out, folio_dtype type, int64_t index, const float *x, float factor,
                      int32_t dims)
{
    if (type == FOLIO_F32) {
        float *to = (float *)out + index;
        for (int32_t d = 0; d < dims; d++) to[d] = x[d] * factor;
    } else if (type == FOLIO_BF16) {
        uint16_t *to = (uint16_t *)out + index;
        for (int32_t d = 0; d < dims; d++) to[d] = f32_to_bf16(x[d] * factor);
    } else {
        uint16_t *to = (uint16_t *)out + index;
        int32_t d = 0;
        for (; d + LANES <= dims; d += LANES)
            vec_store_f16(to + d, vec_mul(vec_load(x + d), vec_set1(factor)));
        for (; d < dims; d++) store_f32(to, FOLIO_F16, d, x[d] * factor);
    }
}

static void attend_split(const folioi_attend_args *a, folio_dtype kv)
{
    int64_t stride = folioi_out_stride(a->v_dims);
    for (int32_t r = 0; r < a->rows; r++) {
        a->state.max[r] = -INFINITY;
        a->state.sum[r] = 0.0f;
    }
    memset(a->state.out, 0, (size_t)a->rows * (size_t)stride * sizeof(float));
    tile_plan plan = plan_tiles(a, kv);
    plan.panels = reads_panels(a->rows);
    for (int64_t next, from = a->begin / TILE * (int64_t)TILE; from < a->end; from = next) {
        next = from + TILE; /* may pass INT32_MAX */
        tile t = {
            .kv = kv, .t0 = (int32_t)from, .n = next < a->end ? TILE : a->end - (int32_t)from};
        t.first = a->begin > t.t0 ? a->begin - t.t0 : 0;
        t.bytes = find_bytes(a, &plan, &t);
        if (!t.bytes) load_tile(a, &plan, &t);
        look_ahead(a, &plan, &t);
        for (int32_t r = 0; r < a->rows; r += STRIP)
            attend_strip(a, &plan, &t, r, a->rows - r < STRIP ? a->rows - r : STRIP);
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
