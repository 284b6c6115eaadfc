/*
 * key_rows.h: sixteen keys as rows of numbers, for tile_load.h. Rows are read in place (a strided cache, this step's
 * k and v), or gathered from a layout without rows; then they are transposed to the columns that kernels read.
 */
#ifndef FOLIOI_KEY_ROWS_H
#define FOLIOI_KEY_ROWS_H

#include "backends/cpu/attend_body.h"

/* Every token a row, its numbers side by side. */
INLINE bool has_rows(const folioi_address *at)
{
    return at->token_tile == 1 && at->dim_tile == 1 && at->dim_tile_stride == 1;
}

/* Sixteen rows of numbers of one type, each to be multiplied with its scale. */
typedef struct {
    const char *row[SUB];
    float scale[SUB];
    folio_dtype type;
} key_rows;

/* K or V: where rows of it come from. */
typedef struct {
    const folioi_kv_side *stored;
    const folio_tensor *given;
    float fp8_scale;
    int32_t dims;
    bool rotates; /* rows that are given rotate as they are read */
} key_source;

INLINE void load_stored(float *dst, const folioi_kv_side *side, const folio_dtype kv, int64_t from)
{
    const folioi_address *at = side->at;
    const int64_t elem = (int64_t)folio_dtype_size(kv);
    int32_t d = 0;
    for (; has_rows(at) && d + LANES <= side->dims; d += LANES, from += LANES)
        vec_store(dst + d, vec_load_as((int)kv, side->base + from * elem));
    for (; d < side->dims; d += at->dim_tile, from += at->dim_tile_stride)
        for (int32_t i = 0; i < at->dim_tile; i++)
            dst[d + i] = load_f32(side->base, kv, from + i * at->dim_stride);
}

#define KV_TYPES(X)                                                                                \
    X(FOLIO_F32) X(FOLIO_F16) X(FOLIO_BF16) X(FOLIO_FP8_E4M3) X(FOLIO_FP8_E5M2) X(FOLIO_INT8)

/* Rows that are made are f32; but bf16 where kernels take pairs of it. */
INLINE folio_dtype made_type(folio_dtype kv)
{
    return DOT && kv == FOLIO_BF16 ? FOLIO_BF16 : FOLIO_F32;
}

/* The numbers of one stored row as they are. */
static void copy_bf16(uint16_t *dst, const folioi_kv_side *side, int64_t from)
{
    const folioi_address *at = side->at;
    const uint16_t *base = (const uint16_t *)side->base;
    for (int32_t d = 0; d < side->dims; d += at->dim_tile, from += at->dim_tile_stride) {
        if (at->dim_tile == 8 && at->dim_stride == 1) memcpy(dst + d, base + from, 16);
        else
            for (int32_t i = 0; i < at->dim_tile; i++) dst[d + i] = base[from + i * at->dim_stride];
    }
}

/* One stored row, from any layout. */
static void make_row(float *dst, const folioi_kv_side *side, folio_dtype kv, int64_t from)
{
    if (made_type(kv) == FOLIO_BF16) {
        copy_bf16((uint16_t *)(void *)dst, side, from);
        return;
    }
    switch (kv) {
#define CASE(type)                                                                                 \
    case type: load_stored(dst, side, type, from); return;
        KV_TYPES(CASE)
#undef CASE
    default: return;
    }
}

/* Sixteen tokens that lie side by side, dim by dim: rows. */
INLINE void columns_to_rows(const int type, const char *from, int64_t dim_bytes, int32_t dims,
                            float *rows)
{
    const int64_t elem = (int64_t)folio_dtype_size((folio_dtype)type);
    for (int g = 0; g < SUB; g += LANES)
        for (int32_t d = 0; d + LANES <= dims; d += LANES) {
            vec x[LANES];
            UNROLL_FOR (int i = 0; i < LANES; i++)
                x[i] = vec_load_as(type, from + (d + i) * dim_bytes + g * elem);
            vec_transpose(x);
            UNROLL_FOR (int i = 0; i < LANES; i++)
                vec_store(rows + (int64_t)(g + i) * dims + d, x[i]);
        }
    for (int32_t d = dims / LANES * LANES; d < dims; d++)
        for (int i = 0; i < SUB; i++)
            rows[(int64_t)i * dims + d] = load_f32(from + d * dim_bytes, (folio_dtype)type, i);
}

#if defined(DOT_BF16)
/* The same in bf16, rows `dims` floats apart: pairs of dims are turned as words. */
static void columns_to_bf16(const char *from, int64_t dim_bytes, int32_t dims, float *rows)
{
    int32_t d = 0;
    for (; d + 2 * LANES <= dims; d += 2 * LANES) {
        vec x[LANES];
        UNROLL_FOR (int i = 0; i < LANES; i++)
            x[i] = vec_interleave((const void *)(from + (d + 2 * i) * dim_bytes),
                                  (const void *)(from + (d + 2 * i + 1) * dim_bytes));
        vec_transpose(x);
        UNROLL_FOR (int i = 0; i < LANES; i++) vec_store(rows + (int64_t)i * dims + d / 2, x[i]);
    }
    for (; d < dims; d++)
        for (int i = 0; i < SUB; i++)
            memcpy((char *)(rows + (int64_t)i * dims) + d * 2, from + d * dim_bytes + i * 2, 2);
}
#endif

static void make_rows_of_columns(folio_dtype kv, const char *from, int64_t dim_bytes, int32_t dims,
                                 float *rows)
{
#if defined(DOT_BF16)
    if (made_type(kv) == FOLIO_BF16) {
        columns_to_bf16(from, dim_bytes, dims, rows);
        return;
    }
#endif
    switch (kv) {
#define CASE(type)                                                                                 \
    case type: columns_to_rows(type, from, dim_bytes, dims, rows); return;
        KV_TYPES(CASE)
#undef CASE
    default: return;
    }
}

enum { AHEAD = 2 * SUB }; /* keys: what is fetched ahead arrives while as many are converted */

static const float no_row[FOLIOI_MAX_HEAD_SIZE];

/* Rows of sixteen keys that will be read soon: no hardware sees a pattern in blocks at random places. Inline: gcc drops
 * a call that does nothing but fetch. */
INLINE void fetch_rows(const folioi_keys *keys, const key_source *s, int64_t elem, int64_t key)
{
    int64_t end = key + SUB < keys->stored_len ? key + SUB : keys->stored_len;
    for (int64_t i = key; i < end; i++) {
        uint32_t at = (uint32_t)i, size = (uint32_t)keys->block_size;
        const char *row =
            s->stored->base +
            address_token(s->stored->at, keys->blocks[at / size], keys->kv_head, at % size) * elem;
        for (int64_t byte = 0; byte < s->dims * elem; byte += 64)
            __builtin_prefetch(row + byte, 0, 2);
    }
}

/* A row of k as given, rotated in its own type, then as the other rows. */
static void turn_given(const folioi_keys *keys, const key_source *s, int64_t row, folio_dtype type,
                       float *made)
{
    uint16_t turned[sizeof no_row / sizeof *no_row];
    if (type == s->given->dtype) turn_row(keys, row, s->dims, made);
    else {
        turn_row(keys, row, s->dims, turned);
        folioi_load_row(made, turned, s->given->dtype, 0, s->dims);
    }
}

/*
 * Rows of keys [key, key + n), zeros where nobody sees one: past n, or before a->begin, where blocks may be gone.
 * They are found where they lie if all have one type and `as_they_are`, else made in `wide`, `dims` floats apart.
 */
static key_rows find_rows(const folioi_attend_args *a, const key_source *s, folio_dtype kv,
                          bool as_they_are, int32_t key, int32_t n, float *wide)
{
    const folioi_keys *keys = &a->keys;
    const folioi_address *at = s->stored->at;
    bool stored = key + n <= keys->stored_len, given = key >= keys->stored_len;
    bool direct = as_they_are && (given || (stored && has_rows(at)));
    int64_t elem = (int64_t)folio_dtype_size(kv);
    key_rows r = {.type = !direct ? made_type(kv) : given ? s->given->dtype : kv};
    if (stored && has_rows(at)) fetch_rows(keys, s, elem, key + (int64_t)AHEAD);
    bool columns = stored && !direct && n == SUB && key >= a->begin && at->token_tile == 1 &&
                   at->dim_tile == 1 && at->token_tile_stride == 1 && keys->block_size % SUB == 0;
    for (int j = 0; j < SUB; j++) {
        int64_t i = key + (int64_t)j;
        float *made = wide + (int64_t)j * s->dims;
        r.scale[j] = 1.0f;
        r.row[j] = (const char *)no_row;
        if (j >= n || i < a->begin) continue;
        if (!direct) r.row[j] = (const char *)made;
        if (i >= keys->stored_len && s->rotates) {
            turn_given(keys, s, keys->new_row + i - keys->stored_len, r.type, made);
            r.row[j] = (const char *)made;
            continue;
        }
        if (i >= keys->stored_len) {
            const folio_tensor *t = s->given;
            int64_t from = (keys->new_row + i - keys->stored_len) * t->token_stride +
                           keys->kv_head * t->head_stride;
            if (direct)
                r.row[j] = (const char *)t->data + from * (int64_t)folio_dtype_size(t->dtype);
            else if (r.type == FOLIO_BF16)
                memcpy(made, (const uint16_t *)t->data + from, (size_t)s->dims * 2);
            else folioi_load_row(made, t->data, t->dtype, from, s->dims);
            continue;
        }
        int64_t block = keys->blocks[i / keys->block_size], token = i % keys->block_size;
        int64_t from = address_token(at, block, keys->kv_head, token);
        r.scale[j] = kv_scale(s->stored, block, keys->kv_head, token, s->fp8_scale);
        if (direct) r.row[j] = s->stored->base + from * elem;
        else if (!columns) make_row(made, s->stored, kv, from);
        else if (j == 0)
            make_rows_of_columns(kv, s->stored->base + from * elem, at->dim_tile_stride * elem,
                                 s->dims, wide);
    }
    return r;
}

/* to [dims][16] of rows. 32-bit words of any kind pass as f32. */
INLINE void rows_to_columns(const int type, const bool scaled, const key_rows *r, int32_t dims,
                            float *to)
{
    const int64_t elem = (int64_t)folio_dtype_size((folio_dtype)type);
    for (int g = 0; g < SUB; g += LANES)
        for (int32_t d = 0; d + LANES <= dims; d += LANES) {
            vec x[LANES];
            UNROLL_FOR (int i = 0; i < LANES; i++) {
                x[i] = vec_load_as(type, r->row[g + i] + d * elem);
                if (scaled) x[i] = vec_mul(x[i], vec_set1(r->scale[g + i]));
            }
            vec_transpose(x);
            UNROLL_FOR (int i = 0; i < LANES; i++) vec_store(to + (d + i) * SUB + g, x[i]);
        }
    for (int32_t d = dims / LANES * LANES; d < dims; d++)
        for (int i = 0; i < SUB; i++) {
            uint32_t word; /* moved as bits: a signalling NaN may be half of a pair */
            if (type == FOLIO_F32 && !scaled) {
                memcpy(&word, r->row[i] + d * elem, sizeof word);
                memcpy(&to[d * SUB + i], &word, sizeof word);
            } else to[d * SUB + i] = load_f32(r->row[i], (folio_dtype)type, d) * r->scale[i];
        }
}

#endif
