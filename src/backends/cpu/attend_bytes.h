/*
 * attend_bytes.h: up to four rows against a whole tile of 8-bit keys in native sub-tiles. Bytes are converted to
 * pairs of bf16 in registers, just before the dot products, in the same order as when a tile is converted to
 * memory first: the same bits without the memory traffic.
 */
#ifndef FOLIOI_ATTEND_BYTES_H
#define FOLIOI_ATTEND_BYTES_H

#include "backends/cpu/tile_load.h"

/* Scores of R rows with all keys of the tile, 64 at a time. */
INLINE void score_bytes(const folioi_attend_args *a, const int R, const int kv, tile *t,
                        const float *q, float *s)
{
    const byte_table table = byte_table_of(kv);
    for (int first = 0; first < SUBS; first += 4) {
        vec acc[4][4];
        UNROLL_FOR (int r = 0; r < R; r++)
            UNROLL_FOR (int i = 0; i < 4; i++) acc[r][i] = vec_set1(0.0f);
        for (int32_t d = 0; d < a->k_dims / 4; d++) {
            fetch_ahead(t->products, false);
            UNROLL_FOR (int i = 0; i < 4; i++) {
                vec pair[2];
                vec_pairs_of_fours(&table, kv, vec_load(t->ptrs.k[first + i] + d * SUB), pair);
                UNROLL_FOR (int half = 0; half < 2; half++)
                    UNROLL_FOR (int r = 0; r < R; r++)
                        acc[r][i] =
                            vec_dot(acc[r][i], vec_set1(q[(2 * d + half) * R + r]), pair[half]);
            }
        }
        UNROLL_FOR (int r = 0; r < R; r++)
            UNROLL_FOR (int i = 0; i < 4; i++)
                vec_store(s + r * TILE + (first + i) * SUB, acc[r][i]);
    }
}

/* out += p x V for R rows, all keys of the tile and N vectors of dims from d on. */
INLINE void value_bytes_at(const folioi_attend_args *a, const int R, const int N, const int kv,
                           const byte_table *table, tile *t, int32_t d, const float *p, float *out)
{
    int32_t width = a->v_dims;
    vec acc[4][4];
    UNROLL_FOR (int r = 0; r < R; r++)
        UNROLL_FOR (int i = 0; i < N; i++) acc[r][i] = vec_load(out + r * width + d + i * LANES);
    if (N == 4)
        UNROLL_FOR (int r = 0; r < R; r++) vec_quarters(acc[r]);
    for (int32_t j = 0; j < TILE / 2; j++) {
        const char *row = (const char *)t->ptrs.v[j / 8] + (int64_t)(j % 8) * 2 * width + d;
        vec pair[4];
        vec_pairs_of_rows(table, kv, N, N == 1, row, row + width, pair);
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

INLINE void value_bytes(const folioi_attend_args *a, const int R, const int kv, tile *t,
                        const float *p, float *out)
{
    const byte_table table = byte_table_of(kv);
    int32_t d = 0;
    for (; d + 4 * LANES <= a->v_dims; d += 4 * LANES)
        value_bytes_at(a, R, 4, kv, &table, t, d, p, out);
    for (; d < a->v_dims; d += LANES) value_bytes_at(a, R, 1, kv, &table, t, d, p, out);
}

#define BYTE_FN(R, type)                                                                           \
    static void score_bytes_##R##_##type(const folioi_attend_args *a, tile *t, const float *q,     \
                                         float *s)                                                 \
    {                                                                                              \
        score_bytes(a, R, FOLIO_##type, t, q, s);                                                  \
    }                                                                                              \
    static void value_bytes_##R##_##type(const folioi_attend_args *a, tile *t, const float *p,     \
                                         float *out)                                               \
    {                                                                                              \
        value_bytes(a, R, FOLIO_##type, t, p, out);                                                \
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

static void block_score_bytes(const folioi_attend_args *a, tile *t, const row_block *b, float *s)
{
    const float *q = a->q + (int64_t)b->row * (a->k_dims / 2);
#define BYTE_CALL(R, type) score_bytes_##R##_##type(a, t, q, s)
    BYTE_CASES
#undef BYTE_CALL
}

static void block_value_bytes(const folioi_attend_args *a, tile *t, const row_block *b,
                              const float *p)
{
    float *out = a->state.out + (int64_t)b->row * a->v_dims;
#define BYTE_CALL(R, type) value_bytes_##R##_##type(a, t, p, out)
    BYTE_CASES
#undef BYTE_CALL
}

#endif
