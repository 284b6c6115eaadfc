/*
 * attend_body.h: attention of rows against the keys of one split, on vectors. A level's file includes its
 * vec_<isa>.h, then this, and makes kernels of attend_split by its constants.
 *
 * Keys come in tiles of FOLIOI_TILE_KEYS = 128: 8 sub-tiles of 16 keys, each with K as [k][16] and V as
 * [16 or 8][v_stride]. They are read in place if the cache has this layout, otherwise converted to scratch. Rows
 * go in blocks of up to MAX_ROWS:
 *
 *   scores [rows][128]  =  q [rows][k] x K [k][128]          lanes are keys, two vectors at a time
 *   p      [rows][128]  =  e^(score - max)                   row by row
 *   out    [rows][v]   +=  p [rows][128] x V [128][v]        lanes are dims, two vectors at a time
 *
 * With DOT an element is a pair of bf16 numbers in 32 bits and a multiply-add is vdpbf16ps: the same loops with
 * half as many steps. Each sum adds its terms in the order of k and of keys, for any block of rows: a row's bits
 * depend on its own data only.
 */
#ifndef FOLIOI_ATTEND_BODY_H
#define FOLIOI_ATTEND_BODY_H

#include "backends/cpu/cpu_kernels.h"
#include "backends/cpu/tile_fetch.h"
#include "backends/cpu/vec_math.h"
#include "backends/exp.h"
#include "core/dtype.h"

#include <math.h>
#include <string.h>

/* Keys of a tile, a bit each. */
typedef struct {
    uint64_t word[TILE / 64];
} key_bits;

/* Rescale only when the maximum grows by more than this: e^5.5, near 2^8, is far from overflow. */
#define LAZY 5.5f

typedef struct {
    const float *k[SUBS]; /* [steps][16]             */
    const float *v[SUBS]; /* [16 / pair][v_stride]   */
    int64_t v_stride[SUBS];
} tile_ptrs;

enum {
    FEW = 4
}; /* rows that read K and V as they lie, four vectors at a time: memory limits them */

/* At a step of a block of R rows with N vectors. A step of 6 rows, at AVX2, is too short to hide it (prompts 1.25 times). */
INLINE void fetch_at_step(const int R, const int N, ahead *next)
{
    if (R <= FEW && N == 4) fetch_ahead(next, true);
    if (R > FEW && MAX_ROWS == 12) fetch_ahead(next, false);
}

/* A level's kernels are all of one kind. */
#if defined(DOT_BF16)
#define DOT true
#else
#define DOT false
INLINE vec vec_dot(vec acc, vec a, vec b) { return vec_fma(a, b, acc); }
INLINE void vec_store_bf16(float *p, int i, vec x) { vec_store(p + i * LANES, x); }
#endif

#define MAC(acc, a, b) (DOT ? vec_dot(acc, a, b) : vec_fma(a, b, acc))

/* Some steps of the products of q with K, in order: the first ones begin the sums, later ones go on with them. */
typedef struct {
    int32_t begin, num;
} step_range;

/* Scores of R rows with n vectors of keys from vector `first` on. */
INLINE void score_block(const int R, const int N, const float *q, step_range steps,
                        const tile_ptrs *t, int first, ahead *next, float *s)
{
    vec acc[MAX_ROWS][4];
    const float *k[4];
    q += (int64_t)steps.begin * R;
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int v = 0; v < N; v++)
            acc[r][v] =
                steps.begin == 0 ? vec_set1(0.0f) : vec_load(s + r * TILE + (first + v) * LANES);
    UNROLL_FOR (int v = 0; v < N; v++)
        k[v] = t->k[(first + v) * LANES / SUB] + (first + v) * LANES % SUB;
    for (int32_t d = 0; d < steps.num; d++) {
        vec b[4];
        fetch_at_step(R, N, next);
        UNROLL_FOR (int v = 0; v < N; v++) b[v] = vec_load(k[v] + d * SUB);
        UNROLL_FOR (int r = 0; r < R; r++) {
            vec a = vec_set1(q[d * R + r]);
            UNROLL_FOR (int v = 0; v < N; v++) acc[r][v] = MAC(acc[r][v], a, b[v]);
        }
    }
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int v = 0; v < N; v++) vec_store(s + r * TILE + (first + v) * LANES, acc[r][v]);
}

/* out += p x V for R rows, n vectors of dims: rows (or pairs) [begin, end) of v, `stride` apart. */
INLINE void value_block(const int R, const int N, const float *p, const float *v, int64_t stride,
                        int32_t begin, int32_t end, ahead *next, float *out, int64_t out_stride)
{
    vec acc[MAX_ROWS][4];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_load(out + r * out_stride + i * LANES);
    for (int32_t j = begin; j < end; j++) {
        vec b[4];
        fetch_at_step(R, N, next);
        UNROLL_FOR (int i = 0; i < N; i++) b[i] = vec_load(v + j * stride + i * LANES);
        UNROLL_FOR (int r = 0; r < R; r++) {
            vec a = vec_set1(p[r * TILE + j]);
            UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = MAC(acc[r][i], a, b[i]);
        }
    }
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) vec_store(out + r * out_stride + i * LANES, acc[r][i]);
}

typedef struct {
    tile_ptrs ptrs;
    int32_t t0, n; /* key 0 of the tile, number of keys */
    int32_t first; /* keys before it are seen by nobody */
    enum { UNKNOWN, FINITE, NOT_FINITE } values;
    folio_dtype kv;
    bool bytes;                 /* few rows read a whole tile of 8-bit numbers: attend_bytes.h */
    bool words;                 /* few rows read a whole tile of 16-bit numbers: attend_words.h */
    bool panels;                /* V is in panels already, and its rows are not there */
    bool scaled;                /* K and V are still to be multiplied with the scales below */
    ahead *converts, *products; /* what is fetched in conversions, and in products */
    float k_scale[TILE], v_scale[TILE]; /* of 8-bit numbers */
} tile;

/* ---------------------------------------------------------------------------------------- softmax */

/* Soft cap, ALiBi and bias of one vector of scores. */
INLINE vec add_options(const folioi_attend_args *a, int32_t r, int64_t key, vec x)
{
    if (a->soft_cap.cap > 0) x = vec_soft_cap(x, &a->soft_cap);
    if (a->slopes != NULL) {
        vec distance = vec_add(vec_set1((float)(key - a->own[r])), vec_iota());
        x = vec_sub(x, vec_mul(vec_set1(a->slopes[r]), vec_abs(distance)));
    }
    if (a->bias != NULL) {
        float bias[LANES];
        for (int i = 0; i < LANES; i++)
            bias[i] = key + i < a->end ? load_f32(a->bias, a->bias_dtype,
                                                  a->bias_at[r] + (key + i) * a->bias_key_stride)
                                       : 0.0f;
        x = vec_add_unless_hidden(x, vec_load(bias));
    }
    return x;
}

/* Row r's state makes room for a tile whose largest score is `largest`: the max its weights are relative to. */
INLINE float raise_max(const folioi_attend_args *a, int32_t r, float largest)
{
    float before = a->state.max[r];
    if (largest <= before + LAZY) return before;
    a->state.max[r] = largest;
    if (before == -INFINITY) return largest;
    float shrink = exp_f32(before - largest);
    a->state.sum[r] *= shrink;
    int64_t stride = folioi_out_stride(a->v_dims);
    float *out = a->state.out + r * stride;
    for (int64_t d = 0; d < stride; d += LANES)
        vec_store(out + d, vec_mul(vec_load(out + d), vec_set1(shrink)));
    return largest;
}

/*
 * Scores to probabilities, in place (with DOT as pairs of bf16), for vectors [first, last) of the tile, of which
 * the row sees keys [lo, hi). Bits of keys hidden from it, by that or by a score of -inf, are set in the result.
 */
INLINE bool softmax_row(const folioi_attend_args *a, const bool options, const bool whole,
                        const bool scaled, int32_t r, const tile *t, int32_t lo, int32_t hi,
                        int32_t first, int32_t last, float *s, key_bits *hidden)
{
    vec x[VECS];
    vec top = vec_set1(-INFINITY), bottom = vec_set1(INFINITY), scale = vec_set1(a->scale);
    if (whole) first = 0, last = VECS;
    UNROLL_FOR_IF_CONSTANT (int32_t i = first; i < last; i++) {
        x[i] = vec_mul(vec_load(s + i * LANES), scale);
        if (scaled) x[i] = vec_mul(x[i], vec_load(t->k_scale + i * LANES));
        if (options) x[i] = add_options(a, r, t->t0 + (int64_t)i * LANES, x[i]);
        if (!whole && (lo > i * LANES || hi < (i + 1) * LANES))
            x[i] = vec_outside(x[i], lo - i * LANES, hi - i * LANES, vec_set1(-INFINITY));
        top = vec_max(x[i], top);
        bottom = vec_min(x[i], bottom);
    }
    bool some = vec_any_equal(bottom, -INFINITY);
    *hidden = (key_bits){{0}};
    if (__builtin_expect(some, 0))
        for (int32_t i = first; i < last; i++)
            hidden->word[i * LANES / 64] |= (uint64_t)vec_equal(x[i], -INFINITY)
                                            << (i * LANES % 64);
    float largest = vec_largest(top);
    if (__builtin_expect(largest == -INFINITY,
                         0)) { /* no key is seen; or all seen are NaN, and so will the row be */
        bool nan = false;
        for (int32_t i = first; i < last; i++) nan |= vec_any_nan(x[i]);
        if (nan) largest = 0.0f;
    }
    float max = largest > -INFINITY ? raise_max(a, r, largest) : 0.0f;
    /* the difference first: it is exact near the maximum, however large the two are */
    vec sum = vec_set1(0.0f), base = vec_set1(max), log2e = vec_set1(LOG2E);
    UNROLL_FOR_IF_CONSTANT (int32_t i = first; i < last; i++) {
        x[i] = vec_exp2(vec_mul(vec_sub(x[i], base), log2e));
        sum = vec_add(sum, x[i]);
    }
    a->state.sum[r] += vec_sum(sum);
    UNROLL_FOR_IF_CONSTANT (int32_t i = first; i < last; i++) {
        if (scaled) { /* the scale of a hidden key may be NaN */
            x[i] = vec_mul(x[i], vec_load(t->v_scale + i * LANES));
            if (some) x[i] = vec_without(x[i], hidden->word[i * LANES / 64] >> (i * LANES % 64));
        }
        if (DOT) vec_store_bf16(s, i, x[i]);
        else vec_store(s + i * LANES, x[i]);
    }
    return some;
}

/* ------------------------------------------------------------------------------------------ tiles */

/* One row where V has numbers that only some rows may see: key by key, the hidden ones left out. */
static inline void value_row_careful(const folioi_attend_args *a, const tile_ptrs *t,
                                     const float *p, const key_bits *hidden, int32_t begin,
                                     int32_t end, int32_t r)
{
    int64_t stride = folioi_out_stride(a->v_dims);
    float *out = a->state.out + r * stride;
    float *row = a->wide;
    const int per_sub = DOT ? SUB / 2 : SUB;
    for (int32_t j = begin; j < end; j++) {
        const float *v = t->v[j / per_sub] + j % per_sub * t->v_stride[j / per_sub];
        int32_t key = DOT ? 2 * j : j;
        unsigned both = (unsigned)(~hidden->word[key / 64] >> (key % 64)) & (DOT ? 3u : 1u);
        if (both == 0) continue;
        if (DOT && both != 3u) {
            uint32_t keep = both == 1u ? 0x0000ffffu : 0xffff0000u;
            for (int64_t d = 0; d < stride; d++) row[d] = f32_of_bits(bits_of_f32(v[d]) & keep);
            v = row;
        }
        for (int64_t d = 0; d < stride; d += LANES)
            vec_store(out + d, MAC(vec_load(out + d), vec_set1(p[j]), vec_load(v + d)));
    }
}

/* ----------------------------------------------------------------------------------- blocks of rows */

/* Is every number of the tile's V finite? Only then a probability of 0 hides it. */
INLINE bool values_are_finite(const tile *t, int32_t v_dims)
{
    const int pair = DOT ? 2 : 1, per_sub = SUB / pair;
    int32_t end = (t->n + pair - 1) / pair, width = (int32_t)folioi_out_stride(v_dims);
    bool finite = true;
    for (int32_t j = t->first / pair; j < end && finite; j++) {
        const float *v = t->ptrs.v[j / per_sub] + j % per_sub * t->ptrs.v_stride[j / per_sub];
        for (int32_t d = 0; d < width; d += LANES) finite &= vec_is_finite(vec_load(v + d), DOT);
    }
    return finite;
}

/* Up to MAX_ROWS neighbouring rows, and the keys of the tile that any of them sees. */
typedef struct {
    int32_t row, rows; /* rows from `row` on */
    int32_t from, to;
} row_block;

INLINE void range_of(const folioi_attend_args *a, const tile *t, int32_t r, int32_t *lo,
                     int32_t *hi)
{
    *lo = a->seen[r].begin - t->t0;
    *hi = a->seen[r].end - t->t0;
    *lo = *lo < 0 ? 0 : *lo;
    *hi = *hi > t->n ? t->n : *hi;
}

INLINE row_block make_block(const folioi_attend_args *a, const tile *t, int32_t row, int32_t rows)
{
    row_block b = {row, rows, TILE, 0};
    for (int32_t r = row; r < row + rows; r++) {
        int32_t lo, hi;
        range_of(a, t, r, &lo, &hi);
        if (lo >= hi) continue;
        b.from = lo < b.from ? lo : b.from;
        b.to = hi > b.to ? hi : b.to;
    }
    return b;
}

/* Scores of a block of many rows with vectors [first, first + 2) of keys, of few rows with [first, first + 4). */
INLINE void scores(const folioi_attend_args *a, const int R, tile *t, const row_block *b,
                   int32_t first, step_range steps, float *s)
{
    const float *q = a->q + (int64_t)b->row * (DOT ? a->k_dims / 2 : a->k_dims);
    int32_t last = (b->to + LANES - 1) / LANES;
    const int N = R > FEW ? 2 : 4;
    if (first + N <= last) score_block(R, N, q, steps, &t->ptrs, first, t->products, s);
    else
        for (; first < last; first++) score_block(R, 1, q, steps, &t->ptrs, first, t->products, s);
}

/* Products of a block of many rows with V: with the panel of dims [d, d + 2 vectors) that pack_panels made. */
INLINE void panel_values(const folioi_attend_args *a, const int R, tile *t, const row_block *b,
                         int32_t d, const float *p)
{
    const int pair = DOT ? 2 : 1;
    int32_t width = (int32_t)folioi_out_stride(a->v_dims);
    int32_t begin = b->from / pair, end = (b->to + pair - 1) / pair;
    float *out = a->state.out + (int64_t)b->row * width + d;
    const float *v = a->v_panels + (int64_t)d * (TILE / pair);
    if (d + 2 * LANES <= width)
        value_block(R, 2, p, v, 2 * LANES, begin, end, t->products, out, width);
    else value_block(R, 1, p, v, LANES, begin, end, t->products, out, width);
}

/* Products of a block of few rows with V of sub-tile i, as it lies. */
INLINE void sub_values(const folioi_attend_args *a, const int R, tile *t, const row_block *b,
                       int32_t i, const float *p)
{
    const int pair = DOT ? 2 : 1, per_sub = SUB / pair;
    int32_t width = (int32_t)folioi_out_stride(a->v_dims), d = 0;
    float *out = a->state.out + (int64_t)b->row * width;
    int32_t from = b->from / pair - i * per_sub, to = (b->to + pair - 1) / pair - i * per_sub;
    from = from > 0 ? from : 0;
    to = to < per_sub ? to : per_sub;
    p += i * per_sub;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        value_block(R, 4, p, t->ptrs.v[i] + d, t->ptrs.v_stride[i], from, to, t->products, out + d,
                    width);
    for (; d < width; d += LANES)
        value_block(R, 1, p, t->ptrs.v[i] + d, t->ptrs.v_stride[i], from, to, t->products, out + d,
                    width);
}

/* V in panels of two vectors of dims, [panel][keys][2 vectors]: what every block of rows reads is in one piece. */
INLINE void pack_panels(const folioi_attend_args *a, const tile *t)
{
    const int pair = DOT ? 2 : 1, per_sub = SUB / pair;
    if (t->panels) return;
    int32_t width = (int32_t)folioi_out_stride(a->v_dims), rows = (t->n + pair - 1) / pair;
    for (int32_t j = t->first / pair; j < rows; j++) {
        const float *v = t->ptrs.v[j / per_sub] + j % per_sub * t->ptrs.v_stride[j / per_sub];
        int32_t d = 0;
        for (; d + 2 * LANES <= width; d += 2 * LANES) {
            float *to = a->v_panels + (int64_t)d * (TILE / pair) + j * 2 * LANES;
            vec_store(to, vec_load(v + d));
            vec_store(to + LANES, vec_load(v + d + LANES));
        }
        for (; d < width; d += LANES)
            vec_store(a->v_panels + (int64_t)d * (TILE / pair) + j * LANES, vec_load(v + d));
    }
}

/* The softmax of a block's rows, in place; whether some key is hidden from some row, with its bits. */
INLINE bool softmax_block(const folioi_attend_args *a, const tile *t, const row_block *b, float *s,
                          key_bits *hidden)
{
    bool options = a->soft_cap.cap > 0 || a->slopes != NULL || a->bias != NULL;
    int32_t first = b->from / LANES, last = (b->to + LANES - 1) / LANES;
    bool any = false;
    for (int32_t i = 0; i < b->rows; i++) {
        int32_t lo, hi, r = b->row + i;
        range_of(a, t, r, &lo, &hi);
        float *row = s + i * TILE;
        bool whole = lo == 0 && hi == TILE;
#define ROW(options, whole, scaled)                                                                \
    softmax_row(a, options, whole, scaled, r, t, lo, hi, first, last, row, &hidden[i])
        if (DOT && t->scaled) any |= ROW(true, false, true);
        else if (whole && !options) any |= ROW(false, true, false);
        else if (whole) any |= ROW(true, true, false);
        else if (!options) any |= ROW(false, false, false);
        else any |= ROW(true, false, false);
#undef ROW
    }
    return any;
}

#endif
