/*
 * attend_words.h: up to four rows against a whole tile of f16 or bf16 keys, where products are f32. Two numbers become f32
 * in registers, just before they are multiplied: of a word of both, or of two vectors that lie side by side. What lies
 * otherwise is transposed to words first, K to [k/2][16 tokens] and V to [8][v]. The order of sums, and so the bits, are those
 * of a tile that is converted to f32 in memory.
 *
 *            words where they lie   transposed to words   vectors where they lie
 *   K        native                 rows, x-packed    x = 1
 *   V        native                 dim by dim        rows
 */
#ifndef FOLIOI_ATTEND_WORDS_H
#define FOLIOI_ATTEND_WORDS_H

#include "backends/cpu/tile_load.h"

/* Words of two numbers, or vectors `apart` bytes from one to the other. */
INLINE void load_two(const int type, const bool words, const char *from, int64_t apart, vec *two)
{
    if (words) {
        vec both = vec_load((const float *)(const void *)from);
        two[0] = vec_unpack(type, 0, both);
        two[1] = vec_unpack(type, 1, both);
    } else {
        two[0] = vec_load_as(type, from);
        two[1] = vec_load_as(type, from + apart);
    }
}

/* Scores of R rows with the keys of SUBS_AT_ONCE sub-tiles from `first` on; steps of two dims, `unit` bytes apart. */
INLINE void score_words(const folioi_attend_args *a, const int R, const int type, const bool words,
                        tile *t, int first, step_range steps, int64_t unit, float *s)
{
    const int64_t step = words ? SUB * 4 : 2 * unit;
    const float *q = a->q + (int64_t)steps.begin * 2 * R;
    vec acc[4][4];
    const char *k[4];
    s += first * SUB;
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int v = 0; v < 4; v++)
            acc[r][v] = steps.begin == 0 ? vec_set1(0.0f) : vec_load(s + r * TILE + v * LANES);
    UNROLL_FOR (int v = 0; v < 4; v++)
        k[v] = (const char *)t->ptrs.k[first + v * LANES / SUB] + v * LANES % SUB * (words ? 4 : 2);
    for (int32_t d = 0; d < steps.num; d++) {
        vec x[4][2];
        fetch_ahead(t->products, true);
        UNROLL_FOR (int v = 0; v < 4; v++) load_two(type, words, k[v] + d * step, unit, x[v]);
        UNROLL_FOR (int half = 0; half < 2; half++)
            UNROLL_FOR (int r = 0; r < R; r++) {
                vec w = vec_set1(q[(2 * d + half) * R + r]);
                UNROLL_FOR (int v = 0; v < 4; v++) acc[r][v] = vec_fma(w, x[v][half], acc[r][v]);
            }
    }
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int v = 0; v < 4; v++) vec_store(s + r * TILE + v * LANES, acc[r][v]);
}

/* out += p x V for R rows, sixteen keys and N vectors of dims from v on; a token's numbers are `token` bytes. */
INLINE void value_words_at(const folioi_attend_args *a, const int R, const int N, const int type,
                           const bool words, tile *t, const float *p, const char *v, int64_t token,
                           float *out)
{
    vec acc[4][4];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_load(out + r * a->v_dims + i * LANES);
    for (int32_t j = 0; j < SUB; j += 2) {
        vec x[4][2];
        if (N == 4) fetch_ahead(t->products, true);
        UNROLL_FOR (int i = 0; i < N; i++)
            load_two(type, words, v + j * token + i * LANES * (words ? 4 : 2), token, x[i]);
        UNROLL_FOR (int half = 0; half < 2; half++)
            UNROLL_FOR (int r = 0; r < R; r++) {
                vec w = vec_set1(p[r * TILE + j + half]);
                UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_fma(w, x[i][half], acc[r][i]);
            }
    }
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) vec_store(out + r * a->v_dims + i * LANES, acc[r][i]);
}

INLINE void value_words(const folioi_attend_args *a, const int R, const int type, const bool words,
                        tile *t, const float *p, const char *v, int64_t token)
{
    const int size = words ? 4 : 2;
    float *out = a->state.out;
    int32_t d = 0;
    for (; d + 4 * LANES <= a->v_dims; d += 4 * LANES)
        value_words_at(a, R, 4, type, words, t, p, v + d * size, token, out + d);
    for (; d < a->v_dims; d += LANES)
        value_words_at(a, R, 1, type, words, t, p, v + d * size, token, out + d);
}

/* Each type, form and number of rows a function of its own. */
#define WORD_SIZES(X, type) X(4, type) X(3, type) X(2, type) X(1, type)
#define WORD_CASES(X) WORD_SIZES(X, FOLIO_F16) WORD_SIZES(X, FOLIO_BF16)
#define WORD_FN(R, type)                                                                           \
    static void score_words_##R##_##type(const folioi_attend_args *a, bool words, tile *t,         \
                                         int first, step_range steps, int64_t unit, float *s)      \
    {                                                                                              \
        if (words) score_words(a, R, type, true, t, first, steps, unit, s);                        \
        else score_words(a, R, type, false, t, first, steps, unit, s);                             \
    }                                                                                              \
    static void value_words_##R##_##type(const folioi_attend_args *a, bool words, tile *t,         \
                                         const float *p, const char *v, int64_t token)             \
    {                                                                                              \
        if (words) value_words(a, R, type, true, t, p, v, token);                                  \
        else value_words(a, R, type, false, t, p, v, token);                                       \
    }
WORD_CASES(WORD_FN)
#undef WORD_FN

/* Scores of all rows with the keys of SUBS_AT_ONCE sub-tiles from `first` on. */
static void score_subs_words(const folioi_attend_args *a, const tile_plan *plan, tile *t, int first,
                             float *s)
{
    const key_side *side = &plan->k;
    const bool transposes = side->form == AS_UNITS, words = side->form != AS_COLUMNS;
    const int32_t slice = transposes ? slice_of(plan, 2, true) : a->k_dims;
    key_rows r[SUBS_AT_ONCE];
    for (int i = 0; i < SUBS_AT_ONCE; i++) {
        find_k(a, plan, t, first + i, &r[i]);
        t->ptrs.k[first + i] = (const float *)(const void *)r[i].four[0];
        r[i].type = FOLIO_F32; /* a word of two is transposed as one number */
    }
    for (int32_t d = 0; d < a->k_dims; d += slice) {
        int32_t n = a->k_dims - d < slice ? a->k_dims - d : slice;
        step_range steps = {d / 2, n / 2};
        for (int i = 0; transposes && i < SUBS_AT_ONCE; i++)
            convert_k(plan, t, first + i, &r[i], n / 2, k_scratch(a, i));
#define CASE(R, type)                                                                              \
    if (a->rows == R && t->kv == type)                                                             \
        score_words_##R##_##type(a, words, t, first, steps, side->unit, s);
        WORD_CASES(CASE)
#undef CASE
    }
}

/* Products of all rows with V of sub-tile i. */
static void value_sub_words(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i,
                            const float *p)
{
    const key_side *side = &plan->v;
    const char *v = stored_token(&a->keys, plan, side, t->t0 + i * SUB);
    const bool words = side->form != AS_ROWS;
    int64_t token = side->token;
    if (side->form == AS_COLUMNS) {
        key_rows r = {.type = FOLIO_F32, .unit = 16, .stride = side->unit};
        for (int j = 0; j < 4; j++) r.four[j] = v + 4 * j * r.stride;
        transpose_dims(&r, a->v_dims, SUB / 2, v_scratch(a, 0), a->v_dims, t->converts);
        v = (const char *)v_scratch(a, 0);
        token = 2 * (int64_t)a->v_dims;
    }
    p += i * SUB;
#define CASE(R, type)                                                                              \
    if (a->rows == R && t->kv == type) value_words_##R##_##type(a, words, t, p, v, token);
    WORD_CASES(CASE)
#undef CASE
}

#endif
