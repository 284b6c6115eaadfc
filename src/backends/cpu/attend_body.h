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
#include "backends/cpu/exp.h"
#include "backends/cpu/vec_math.h"
#include "core/dtype.h"

#include <math.h>
#include <string.h>

enum { TILE = FOLIOI_TILE_KEYS, SUB = 16, SUBS = TILE / SUB, VECS = TILE / LANES };

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

/*
 * The next tile's K and V, on their way from memory while this one is computed: pieces of a sub-tile each,
 * a few cache lines at a time.
 */
typedef struct {
    const char *piece[2 * SUBS];
    int32_t num, at;         /* pieces, the one under way */
    int32_t bytes[2 * SUBS]; /* of each                   */
    int32_t done;            /* of that one               */
    int32_t pace;            /* lines at each step of a block of more than 4 rows */
} ahead;

INLINE void fetch_ahead(ahead *f, int32_t lines)
{
    while (lines > 0 && f->at < f->num) {
        const char *p = f->piece[f->at] + f->done;
        int32_t n = (f->bytes[f->at] - f->done) / 64;
        n = n < lines ? n : lines;
        for (int32_t i = 0; i < n; i++) __builtin_prefetch(p + (int64_t)i * 64, 0, 2);
        f->done += n * 64;
        lines -= n;
        if (f->bytes[f->at] - f->done < 64) f->at++, f->done = 0;
    }
}

/*
 * Lines to fetch at a step of a block of R rows with N vectors: evenly, because a burst keeps arithmetic waiting. Few rows
 * wait for memory anyway: a line for each one read. A step of 6 rows, at AVX2, is too short to hide it (prompts 1.25 times).
 */
INLINE int32_t lines_of_step(const int R, const int N, const ahead *next)
{
    if (R <= 4) return N * LANES / SUB;
    return MAX_ROWS == 12 ? next->pace : 0;
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

/* Scores of R rows with n vectors of keys from vector `first` on. */
INLINE void score_block(const int R, const int N, const float *q, int32_t steps, const tile_ptrs *t,
                        int first, ahead *next, float *s)
{
    vec acc[MAX_ROWS][4];
    const float *k[4];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int v = 0; v < N; v++) acc[r][v] = vec_set1(0.0f);
    UNROLL_FOR (int v = 0; v < N; v++)
        k[v] = t->k[(first + v) * LANES / SUB] + (first + v) * LANES % SUB;
    for (int32_t d = 0; d < steps; d++) {
        vec b[4];
        fetch_ahead(next, lines_of_step(R, N, next));
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
        fetch_ahead(next, lines_of_step(R, N, next));
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
    ahead next;
    folio_dtype kv;
    bool bytes;  /* K and V are native sub-tiles of 8-bit numbers, as they lie */
    bool panels; /* V is in panels already, and its rows are not there */
    bool scaled; /* K and V are still to be multiplied with */
    float k_scale[TILE], v_scale[TILE];
} tile;

/* ---------------------------------------------------------------------------------------- softmax */

/* Soft cap, ALiBi and bias of one vector of scores. */
INLINE vec add_options(const folioi_attend_args *a, int32_t r, int64_t key, vec x)
{
    if (a->soft_cap > 0) {
        vec cap = vec_set1(a->soft_cap);
        x = vec_mul(cap, vec_tanh(vec_mul(x, vec_set1(a->one_over_cap))));
    }
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

/* Scores of a block with vectors [first, first + 2) of keys, or all it needs where rows are few. */
INLINE void scores(const folioi_attend_args *a, const int R, tile *t, const row_block *b,
                   int32_t first, float *s)
{
    int32_t steps = DOT ? a->k_dims / 2 : a->k_dims;
    const float *q = a->q + (int64_t)b->row * steps;
    int32_t last = (b->to + LANES - 1) / LANES;
    if (R > 4) {
        if (first + 2 <= last) score_block(R, 2, q, steps, &t->ptrs, first, &t->next, s);
        else score_block(R, 1, q, steps, &t->ptrs, first, &t->next, s);
        return;
    }
    if (first > 0) return;
    int32_t i = b->from / LANES / 4 * 4;
    for (; i + 4 <= last; i += 4) score_block(R, 4, q, steps, &t->ptrs, i, &t->next, s);
    for (; i < last; i++) score_block(R, 1, q, steps, &t->ptrs, i, &t->next, s);
}

/*
 * Products of a block with V. Many rows: with the panel of dims [d, d + 2 vectors) that pack_panels made. Few:
 * with all dims, sub-tile by sub-tile as they lie.
 */
INLINE void values(const folioi_attend_args *a, const int R, tile *t, const row_block *b, int32_t d,
                   const float *p)
{
    const int pair = DOT ? 2 : 1, per_sub = SUB / pair;
    int32_t width = (int32_t)folioi_out_stride(a->v_dims);
    float *out = a->state.out + (int64_t)b->row * width;
    int32_t begin = b->from / pair, end = (b->to + pair - 1) / pair;
    if (R > 4) {
        const float *v = a->v_panels + (int64_t)d * (TILE / pair);
        if (d + 2 * LANES <= width)
            value_block(R, 2, p, v, 2 * LANES, begin, end, &t->next, out + d, width);
        else value_block(R, 1, p, v, LANES, begin, end, &t->next, out + d, width);
        return;
    }
    if (d > 0) return;
    for (int32_t j = begin / per_sub; j * per_sub < end; j++) {
        int32_t from = begin > j * per_sub ? begin - j * per_sub : 0;
        int32_t to = end < (j + 1) * per_sub ? end - j * per_sub : per_sub;
        for (d = 0; d + 4 * LANES <= width; d += 4 * LANES)
            value_block(R, 4, p + j * per_sub, t->ptrs.v[j] + d, t->ptrs.v_stride[j], from, to,
                        &t->next, out + d, width);
        for (; d < width; d += LANES)
            value_block(R, 1, p + j * per_sub, t->ptrs.v[j] + d, t->ptrs.v_stride[j], from, to,
                        &t->next, out + d, width);
    }
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
    bool options = a->soft_cap > 0 || a->slopes != NULL || a->bias != NULL;
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
