/*
 * attend_bytes.h: up to four rows against a whole tile of 8-bit keys: K as words of four dims, [k/4][16 tokens], V as rows
 * of tokens. What lies otherwise is transposed so first, as bytes. Bytes become pairs of bf16 in registers, just before the
 * dot products, in the same order as when a tile is converted to memory first: the same bits without the memory traffic.
 */
#ifndef FOLIOI_ATTEND_BYTES_H
#define FOLIOI_ATTEND_BYTES_H

#include "backends/cpu/tile_load.h"

/* K of sub-tile i as words, where it lies or in scratch. Pairs of bytes are transposed as numbers of bf16 are. */
static const float *words_of_k(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i)
{
    ahead none = {.width = 0};
    key_rows r;
    find_k(a, plan, t, i, &r);
    if (plan->k.form == AS_WORDS) return r.words;
    float *to = a->k_tile + (int64_t)(i % SUBS_AT_ONCE) * SUB * (a->k_dims / 4);
    if (plan->k.form == AS_UNITS) {
        r.type = FOLIO_BF16;
        transpose_keys(&r, a->k_dims / 2, to, &none);
        return to;
    }
    for (int32_t d = 0; d < a->k_dims; d += 4)
        vec_store(to + (int64_t)d / 4 * SUB, vec_fours_of_dims(r.four[0] + d * r.stride, r.stride));
    return to;
}

/* V of sub-tile i as rows of bytes. */
static void rows_of_v(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i)
{
    const key_side *v = &plan->v;
    const char *from = stored_token(&a->keys, plan, v, t->t0 + i * SUB);
    t->ptrs.v[i] = (const void *)from;
    t->ptrs.v_stride[i] = v->token;
    if (v->form == AS_ROWS) return;
    float *to = a->v_tile + (int64_t)(i % SUBS_AT_ONCE) * SUB * (a->v_dims / 4);
    int32_t d = 0;
    for (; d + 64 <= a->v_dims; d += 64)
        vec_rows_of_dims(64, from + d * v->unit, v->unit, (char *)to + d, a->v_dims);
    for (; d < a->v_dims; d += SUB)
        vec_rows_of_dims(SUB, from + d * v->unit, v->unit, (char *)to + d, a->v_dims);
    t->ptrs.v[i] = to;
    t->ptrs.v_stride[i] = a->v_dims;
}

/* Scores of R rows with the keys of SUBS_AT_ONCE sub-tiles from `first` on. */
INLINE void score_bytes(const folioi_attend_args *a, const int R, const int kv, tile *t, int first,
                        const float *q, float *s)
{
    const byte_table table = byte_table_of(kv);
    vec acc[4][SUBS_AT_ONCE];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < SUBS_AT_ONCE; i++) acc[r][i] = vec_set1(0.0f);
    for (int32_t d = 0; d < a->k_dims / 4; d++) {
        fetch_ahead(t->products, false);
        UNROLL_FOR (int i = 0; i < SUBS_AT_ONCE; i++) {
            vec pair[2];
            vec_pairs_of_fours(&table, kv, vec_load(t->ptrs.k[first + i] + d * SUB), pair);
            UNROLL_FOR (int half = 0; half < 2; half++)
                UNROLL_FOR (int r = 0; r < R; r++)
                    acc[r][i] = vec_dot(acc[r][i], vec_set1(q[(2 * d + half) * R + r]), pair[half]);
        }
    }
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < SUBS_AT_ONCE; i++)
            vec_store(s + r * TILE + (first + i) * SUB, acc[r][i]);
}

/* out += p x V for R rows, the keys of SUBS_AT_ONCE sub-tiles from `first` on and N vectors of dims from d on. */
INLINE void value_bytes_at(const folioi_attend_args *a, const int R, const int N, const int kv,
                           const byte_table *table, tile *t, int first, int32_t d, const float *p,
                           float *out)
{
    int32_t width = a->v_dims;
    vec acc[4][4];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_load(out + r * width + d + i * LANES);
    if (N == 4)
        UNROLL_FOR (int r = 0; r < R; r++) vec_quarters(acc[r]);
    for (int32_t j = first * 8; j < (first + SUBS_AT_ONCE) * 8; j++) {
        int64_t stride = t->ptrs.v_stride[j / 8];
        const char *row = (const char *)t->ptrs.v[j / 8] + j % 8 * 2 * stride + d;
        vec pair[4];
        vec_pairs_of_rows(table, kv, N, N == 1, row, row + stride, pair);
        if (N == 4 && j % 2 == 0) fetch_ahead(t->products, false);
        UNROLL_FOR (int r = 0; r < R; r++) {
            vec w = vec_set1(p[r * TILE + j]);
            UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_dot(acc[r][i], w, pair[i]);
        }
    }
    if (N == 4)
        UNROLL_FOR (int r = 0; r < R; r++) vec_quarters(acc[r]);
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) vec_store(out + r * width + d + i * LANES, acc[r][i]);
}

INLINE void value_bytes(const folioi_attend_args *a, const int R, const int kv, tile *t, int first,
                        const float *p, float *out)
{
    const byte_table table = byte_table_of(kv);
    int32_t d = 0;
    for (; d + 4 * LANES <= a->v_dims; d += 4 * LANES)
        value_bytes_at(a, R, 4, kv, &table, t, first, d, p, out);
    for (; d < a->v_dims; d += LANES) value_bytes_at(a, R, 1, kv, &table, t, first, d, p, out);
}

#define BYTE_FN(R, type)                                                                           \
    static void score_bytes_##R##_##type(const folioi_attend_args *a, tile *t, int first,          \
                                         const float *q, float *s)                                 \
    {                                                                                              \
        score_bytes(a, R, FOLIO_##type, t, first, q, s);                                           \
    }                                                                                              \
    static void value_bytes_##R##_##type(const folioi_attend_args *a, tile *t, int first,          \
                                         const float *p, float *out)                               \
    {                                                                                              \
        value_bytes(a, R, FOLIO_##type, t, first, p, out);                                         \
    }
#define BYTE_SIZES(X, type) X(4, type) X(3, type) X(2, type) X(1, type)
BYTE_SIZES(BYTE_FN, FP8_E4M3)
BYTE_SIZES(BYTE_FN, FP8_E5M2)
BYTE_SIZES(BYTE_FN, INT8)
#undef BYTE_FN

/* The block's scores, or its products: of one KV type, by the number of rows. */
#define BYTE_CASE(R, type)                                                                         \
    if (t->kv == FOLIO_##type && b->rows == R) BYTE_CALL(R, type);
#define BYTE_CASES                                                                                 \
    BYTE_SIZES(BYTE_CASE, FP8_E4M3) BYTE_SIZES(BYTE_CASE, FP8_E5M2) BYTE_SIZES(BYTE_CASE, INT8)

static void block_score_bytes(const folioi_attend_args *a, const tile_plan *plan, tile *t,
                              const row_block *b, float *s)
{
    const float *q = a->q + (int64_t)b->row * (a->k_dims / 2);
    for (int first = 0; first < SUBS; first += SUBS_AT_ONCE) {
        for (int i = first; i < first + SUBS_AT_ONCE; i++) t->ptrs.k[i] = words_of_k(a, plan, t, i);
#define BYTE_CALL(R, type) score_bytes_##R##_##type(a, t, first, q, s)
        BYTE_CASES
#undef BYTE_CALL
    }
}

static void block_value_bytes(const folioi_attend_args *a, const tile_plan *plan, tile *t,
                              const row_block *b, const float *p)
{
    float *out = a->state.out + (int64_t)b->row * a->v_dims;
    for (int first = 0; first < SUBS; first += SUBS_AT_ONCE) {
        for (int i = first; i < first + SUBS_AT_ONCE; i++) rows_of_v(a, plan, t, i);
#define BYTE_CALL(R, type) value_bytes_##R##_##type(a, t, first, p, out)
        BYTE_CASES
#undef BYTE_CALL
    }
}

#endif
