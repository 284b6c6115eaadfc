/*
 * attend_split.h: rows against the keys of one split: tiles one after another, rows in strips, strips in blocks.
 * A level's file includes its vec_<isa>.h, then this, and makes kernels of attend_split by their KV type.
 */
#ifndef FOLIOI_ATTEND_SPLIT_H
#define FOLIOI_ATTEND_SPLIT_H

#if defined(DOT_BF16) && !defined(OWN_STRIP)
#include "backends/cpu/attend_bytes.h"
#elif !defined(DOT_BF16)
#include "backends/cpu/attend_words.h"
#else
#include "backends/cpu/tile_load.h"
#endif

#if defined(OWN_STRIP) /* the level's file defines it, for all rows at once */
enum { STRIP = 1 << 30 };
static bool reads_panels(int32_t rows) { return (void)rows, false; }
static bool has_few(const folioi_attend_args *a) { return (void)a, false; }
static void attend_few(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    (void)a, (void)plan, (void)t;
}
static void attend_strip(const folioi_attend_args *a, const tile_plan *plan, tile *t, int32_t row,
                         int32_t rows);
#else

/* The numbers of rows a block can have; a level whose MAX_ROWS is another says its own. */
#define FEW_SIZES(X) X(4) X(3) X(2) X(1)
#if MAX_ROWS == 12
#define MANY_SIZES(X) X(12) X(8)
#elif MAX_ROWS == 6
#define MANY_SIZES(X) X(6)
#endif

/* The same loops for each of them. */
#define SCORES_FN(R)                                                                               \
    static void scores_##R(const folioi_attend_args *a, tile *t, const row_block *b,               \
                           int32_t first, step_range steps, float *s)                              \
    {                                                                                              \
        scores(a, R, t, b, first, steps, s);                                                       \
    }
#define VALUES_FN(R)                                                                               \
    static void values_##R(const folioi_attend_args *a, tile *t, const row_block *b, int32_t at,   \
                           const float *p)                                                         \
    {                                                                                              \
        if (R > FEW) panel_values(a, R, t, b, at, p);                                              \
        else sub_values(a, R, t, b, at, p);                                                        \
    }
FEW_SIZES(SCORES_FN)
MANY_SIZES(SCORES_FN)
FEW_SIZES(VALUES_FN)
MANY_SIZES(VALUES_FN)
#undef SCORES_FN
#undef VALUES_FN

/* The largest that the rows fill; but of 16 two times 8, for blocks of 4 read V as it lies, which takes longer. */
INLINE int32_t block_rows(int32_t rows)
{
    if (MAX_ROWS == 12 && rows == 16) return 8;
#define SIZE(R)                                                                                    \
    if (rows >= R) return R;
    MANY_SIZES(SIZE)
    FEW_SIZES(SIZE)
#undef SIZE
    return 0;
}

/* Scores of a block from vector `first` of keys on: two vectors, or four where rows are few. */
INLINE void block_scores(const folioi_attend_args *a, tile *t, const row_block *b, int32_t first,
                         step_range steps, float *s)
{
    switch (b->rows) {
#define CASE(R)                                                                                    \
    case R:                                                                                        \
        scores_##R(a, t, b, first, steps, s);                                                      \
        break;
        FEW_SIZES(CASE)
        MANY_SIZES(CASE)
#undef CASE
    }
}

/* Products of a block with V: with the panel from dim `at` on, or with sub-tile `at` where rows are few. */
INLINE void block_values(const folioi_attend_args *a, tile *t, const row_block *b, int32_t at,
                         const float *p)
{
    switch (b->rows) {
#define CASE(R)                                                                                    \
    case R:                                                                                        \
        values_##R(a, t, b, at, p);                                                                \
        break;
        FEW_SIZES(CASE)
        MANY_SIZES(CASE)
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

/* The softmax of a block. careful: V has numbers that only some of its rows may see, and its products are made here. */
static bool soften_block(const folioi_attend_args *a, const tile_plan *plan, tile *t,
                         const row_block *b, bool loaded, float *p)
{
    key_bits hidden[MAX_ROWS];
    if (!softmax_block(a, t, b, p, hidden)) return false;
    if (!loaded) load_values(a, plan, t);
    if (t->panels) transpose_rows(a, t);
    /* a probability of 0 hides what is finite */
    if (t->values == UNKNOWN) t->values = values_are_finite(t, a->v_dims) ? FINITE : NOT_FINITE;
    if (t->values == FINITE) return false;
    int32_t begin = DOT ? b->from / 2 : b->from, end = DOT ? (b->to + 1) / 2 : b->to;
    for (int32_t r = 0; r < b->rows; r++)
        value_row_careful(a, &t->ptrs, p + r * TILE, &hidden[r], begin, end, b->row + r);
    return true;
}

/* Are the rows a block of few, which reads a tile once? */
static bool has_few(const folioi_attend_args *a) { return a->rows <= FEW && !a->keys.v_in_k; }

/* Scores of few rows with SUBS_AT_ONCE sub-tiles of K from sub-tile i on. What is converted in slices is multiplied slice
 * by slice: it stays in the nearest cache, and conversions overlap with products. */
static void score_subs(const folioi_attend_args *a, const tile_plan *plan, tile *t,
                       const row_block *b, int i, float *s)
{
    int seen = t->first / SUB, first = i < seen ? seen : i, last = i;
    key_rows r[SUBS_AT_ONCE];
    bool in_slices = plan->k.in_slices;
    for (int j = first; j < i + SUBS_AT_ONCE && j * SUB < t->n; j++, last = j)
        if (in_slices) in_slices = find_k(a, plan, t, j, &r[j - i]);
    const int32_t slice =
        in_slices ? slice_of(plan, (int64_t)folio_dtype_size(t->kv), false) : a->k_dims;
    for (int32_t d = 0; d < a->k_dims; d += slice) {
        int32_t n = a->k_dims - d < slice ? a->k_dims - d : slice;
        for (int j = first; j < last; j++)
            if (in_slices) convert_k(plan, t, j, &r[j - i], n, k_scratch(a, j - i));
            else load_k(a, plan, t, j, k_scratch(a, j - i));
        for (int j = i; j < seen; j++) t->ptrs.k[j] = t->ptrs.k[seen]; /* made and never used */
        block_scores(a, t, b, i * SUB / LANES, (step_range){columns_of(d), columns_of(n)}, s);
    }
}

/*
 * Few rows against one tile, which is read once: K is found or converted just before its scores are made, V just before
 * its products, in scratch that stays in the nearest cache.
 */
static void attend_few(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    float *s = a->scores;
    row_block b = make_block(a, t, 0, a->rows);
    if (b.from >= b.to) return;
    t->words &= b.from == 0 && b.to == TILE;
#if defined(DOT_BF16)
    if (t->bytes) block_score_bytes(a, plan, t, &b, s);
#else
    for (int i = 0; t->words && i < SUBS; i += SUBS_AT_ONCE) score_subs_words(a, plan, t, i, s);
#endif
    for (int32_t i = b.from / SUB / SUBS_AT_ONCE * SUBS_AT_ONCE; i * SUB < b.to; i += SUBS_AT_ONCE)
        if (!t->bytes && !t->words) score_subs(a, plan, t, &b, i, s);
    if (soften_block(a, plan, t, &b, false, s)) return;
#if defined(DOT_BF16)
    if (t->bytes && t->values == UNKNOWN) {
        block_value_bytes(a, plan, t, &b, s);
        return;
    }
#else
    if (t->words && t->values == UNKNOWN) {
        for (int i = 0; i < SUBS; i++) value_sub_words(a, plan, t, i, s);
        return;
    }
#endif
    for (int32_t i = b.from / SUB; i * SUB < b.to; i++) {
        if (t->values == UNKNOWN) load_v(a, plan, t, i, v_scratch(a, 0));
        if (DOT && plan->v.in_place && t->n == TILE)
            await_lines((const char *)t->ptrs.v[i], SUB * 2 * (int64_t)a->v_dims);
        block_values(a, t, &b, i, s);
    }
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
            int32_t vecs = b[i].rows > FEW ? 2 : 4;
            if (first % vecs != 0 || b[i].from >= (first + vecs) * LANES ||
                b[i].to <= first * LANES)
                continue;
            block_scores(a, t, &b[i], first, (step_range){0, columns_of(a->k_dims)},
                         s + (b[i].row - row) * TILE);
        }
    bool careful[MAX_BLOCKS] = {false};
    for (int i = 0; i < n; i++)
        careful[i] = b[i].from >= b[i].to ||
                     soften_block(a, plan, t, &b[i], true, s + (b[i].row - row) * TILE);
    if (b[0].rows > FEW && row == 0) pack_panels(a, t);
    for (int32_t d = 0; d < folioi_out_stride(a->v_dims); d += 2 * LANES)
        for (int i = 0; i < n; i++)
            if (b[i].rows > FEW && !careful[i])
                block_values(a, t, &b[i], d, s + (b[i].row - row) * TILE);
    for (int i = 0; i < n; i++)
        for (int32_t sub = b[i].from / SUB; b[i].rows <= FEW && !careful[i] && sub * SUB < b[i].to;
             sub++)
            block_values(a, t, &b[i], sub, s + (b[i].row - row) * TILE);
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
    const bool few = has_few(a), bytes = folio_dtype_size(kv) == 1;
    ahead next, none = {.width = 0};
    tile t = {.kv = kv, .scaled = DOT && bytes};
    t.converts = few ? &next : &none;
    t.products = &next;
    for (int64_t after, from = a->begin / TILE * (int64_t)TILE; from < a->end; from = after) {
        after = from + TILE; /* may pass INT32_MAX */
        t.t0 = (int32_t)from;
        t.n = after < a->end ? TILE : a->end - (int32_t)from;
        t.first = a->begin > t.t0 ? a->begin - t.t0 : 0;
        t.values = UNKNOWN;
        const bool whole = t.first == 0 && t.n == TILE && after <= a->keys.stored_len;
        t.bytes = few && whole && plan.bytes;
        t.words = few && whole && plan.words;
        look_ahead(a, &plan, &t, few && !t.bytes, &next);
        if (few) {
            attend_few(a, &plan, &t);
            continue;
        }
        load_tile(a, &plan, &t);
        for (int32_t r = 0; r < a->rows; r += STRIP)
            attend_strip(a, &plan, &t, r, a->rows - r < STRIP ? a->rows - r : STRIP);
    }
}

/* For tests; n a multiple of LANES. */
static void exp2_of(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) vec_store(x + i, vec_exp2(vec_load(x + i)));
}

static void soft_cap_of(float *x, int64_t n, const folioi_soft_cap *cap)
{
    for (int64_t i = 0; i < n; i += LANES) vec_store(x + i, vec_soft_cap(vec_load(x + i), cap));
}

#endif
