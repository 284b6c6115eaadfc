/*
 * key_rows.h: sixteen keys as rows of numbers, for tile_load.h: K or V of tokens, read where they lie or made, or dims of
 * sixteen tokens that lie side by side. Kernels read columns of such rows, which are transposed, or the rows themselves, copied:
 *
 *                       K [k][16]      V [16][v]
 *   tokens are rows     transposed     copied       NHD, HND, k and v as given; K of vLLM 0.6's x-packed caches
 *   dims are rows       copied         transposed   V of vLLM 0.6's caches, K with x = 1
 *
 * With DOT a column, or a row, has pairs of numbers.
 */
#ifndef FOLIOI_KEY_ROWS_H
#define FOLIOI_KEY_ROWS_H

#include "backends/cpu/attend_body.h"

/* How K or V of a block can be read more than a number at a time. */
typedef enum {
    AS_NUMBERS, /* it cannot: rows are made number by number                     */
    AS_ROWS,    /* a token's numbers side by side                                */
    AS_UNITS,   /* of K: 16 bytes of a token side by side, as in rows or x-packed */
    AS_COLUMNS, /* tokens side by side, dim by dim                               */
    AS_WORDS,   /* K in native sub-tiles: 16 tokens by 4 bytes of dims           */
    AS_PAIRS,   /* V in native sub-tiles of 16-bit numbers: dims by two tokens   */
} side_form;

/* Every token a row, its numbers side by side. */
INLINE bool has_rows(const folioi_address *at)
{
    return at->token_tile == 1 && at->dim_tile == 1 && at->dim_tile_stride == 1;
}

/* Every dim a row, its tokens side by side. */
INLINE bool has_columns(const folioi_address *at)
{
    return at->token_tile == 1 && at->dim_tile == 1 && at->token_tile_stride == 1;
}

/* pack: numbers in a word. */
INLINE bool k_is_native(const folioi_address *at, int pack)
{
    return at->token_tile == SUB && at->dim_tile == pack && at->dim_tile_stride == SUB * pack &&
           at->token_stride == pack && (pack == 1 || at->dim_stride == 1);
}

INLINE side_form form_of_k(const folioi_address *at, int32_t elem, int32_t block_size)
{
    if (k_is_native(at, 4 / elem)) return AS_WORDS;
    if (has_rows(at)) return AS_UNITS;
    if (at->token_tile == 1 && at->dim_tile * elem == 16 && at->dim_stride == 1) return AS_UNITS;
    return has_columns(at) && block_size % SUB == 0 ? AS_COLUMNS : AS_NUMBERS;
}

INLINE side_form form_of_v(const folioi_address *at, int32_t elem, int32_t block_size, int32_t dims)
{
    if (has_rows(at)) return AS_ROWS;
    if (elem == 2 && at->token_tile == 2 && at->token_tile_stride == 2 * dims &&
        at->token_stride == 1 && at->dim_tile == 1 && at->dim_tile_stride == 2 && dims % SUB == 0 &&
        block_size % SUB == 0)
        return AS_PAIRS;
    return has_columns(at) && block_size % (SUB / 2) == 0 ? AS_COLUMNS : AS_NUMBERS;
}

/* K or V of one kv head: where its keys are, and how they can be read. */
typedef struct {
    const folioi_kv_side *stored;
    const folio_tensor *given;
    int32_t dims;
    bool rotates; /* rows that are given rotate as they are read */
    side_form form;
    bool in_place;              /* kernels read it as it lies                                */
    bool in_slices;             /* few rows convert it slice by slice, some dims at a time     */
    int64_t block, head, token; /* bytes from one to the next; a token's in a sub-tile vary  */
    int64_t unit;               /* bytes from 16 bytes of a token, or one dim, to the next   */
} key_side;

/* How keys lie in blocks. */
typedef struct {
    key_side k, v;
    bool bytes;       /* few rows take whole tiles of 8-bit K and V: attend_bytes.h         */
    bool words;       /* few rows take whole tiles of 16-bit K and V: attend_words.h        */
    int32_t v_stride; /* of scratch                                                         */
    int32_t chunk;    /* tokens that lie in one block, from multiples of it on: 16, 8, or 0 */
    int32_t shift;    /* a block has 1 << shift tokens; -1: no power of two                 */
    bool panels;      /* every block of rows reads V in panels: pack_panels                 */
} tile_plan;

/* Sixteen rows of numbers of one type: row 4 i + j is at four[i] + j * stride. */
typedef struct {
    const char *four[4];
    int64_t stride;
    int64_t unit;       /* bytes from 16 bytes of a row to its next 16             */
    const float *words; /* AS_WORDS, which has no rows: [steps][16]                */
    const float *scale; /* [16] of tokens, for 8-bit numbers                       */
    folio_dtype type;
} key_rows;

INLINE const char *row_of(const key_rows *r, int i) { return r->four[i / 4] + i % 4 * r->stride; }

INLINE uint32_t block_index(const tile_plan *plan, uint32_t token, uint32_t block_size)
{
    return plan->shift >= 0 ? token >> plan->shift : token / block_size;
}

/* Where token `key` of a sequence is, the first of a sub-tile or of its second half. */
INLINE const char *find_token(const tile_plan *plan, const key_side *side, int32_t block_size,
                              const int32_t *blocks, int32_t head, int64_t key)
{
    uint32_t at = (uint32_t)key, size = (uint32_t)block_size, index = block_index(plan, at, size);
    return side->stored->base + blocks[index] * side->block + head * side->head +
           (at - index * size) * side->token;
}

INLINE const char *stored_token(const folioi_keys *keys, const tile_plan *plan,
                                const key_side *side, int64_t key)
{
    return find_token(plan, side, keys->block_size, keys->blocks, keys->kv_head, key);
}

/* --------------------------------------------------------------------------------------- rows that are made */

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

/* Rows that are made are f32; but bf16 where kernels take pairs of it, which holds 8-bit numbers exactly. */
INLINE folio_dtype made_type(void) { return DOT ? FOLIO_BF16 : FOLIO_F32; }

/* The numbers of one stored row of bf16, as they are. */
static void copy_bf16(uint16_t *dst, const folioi_kv_side *side, int64_t from)
{
    const folioi_address *at = side->at;
    const uint16_t *base = (const uint16_t *)(const void *)side->base;
    for (int32_t d = 0; d < side->dims; d += at->dim_tile, from += at->dim_tile_stride) {
        if (at->dim_tile == 8 && at->dim_stride == 1) memcpy(dst + d, base + from, 16);
        else
            for (int32_t i = 0; i < at->dim_tile; i++) dst[d + i] = base[from + i * at->dim_stride];
    }
}

/* One stored row, from any layout. */
static void make_row(float *dst, const folioi_kv_side *side, folio_dtype kv, int64_t from)
{
    if (kv == FOLIO_BF16 && made_type() == FOLIO_BF16) {
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

/* A row of f32 becomes what other rows that are made are, in its place. */
INLINE void round_row(float *row, int32_t dims)
{
    if (!DOT) return;
    uint16_t *to = (uint16_t *)(void *)row;
    int32_t d = 0;
    for (; d + LANES <= dims; d += LANES) vec_store_bf16(row, d / LANES, vec_load(row + d));
    for (; d < dims; d++) {
        float x;
        memcpy(&x, row + d, sizeof x);
        to[d] = f32_to_bf16(x);
    }
}

/* Row `row` of k or v as given, to `made`. */
static void make_given(const folioi_keys *keys, const key_side *s, int64_t row, float *made)
{
    float rotated[FOLIOI_MAX_HEAD_SIZE];
    const folio_tensor *t = s->given;
    const char *from = (const char *)t->data;
    int64_t at = row * t->token_stride + keys->kv_head * t->head_stride;
    if (s->rotates) {
        rotate_new_row(keys, row, s->dims, rotated);
        from = (const char *)rotated;
        at = 0;
    }
    if (t->dtype == made_type())
        memcpy(made, from + at * (int64_t)folio_dtype_size(t->dtype),
               (size_t)s->dims * folio_dtype_size(t->dtype));
    else {
        folioi_load_row(made, from, t->dtype, at, s->dims);
        round_row(made, s->dims);
    }
}

/* ------------------------------------------------------------------------------------ rows where they lie */

/* Rows of keys [key, key + n), where they lie: all in the cache, or all given. What nobody sees of them, past n or before
 * a->begin, is anything. false: they do not lie so. */
static bool find_rows(const folioi_attend_args *a, const tile_plan *plan, const key_side *s,
                      int32_t key, int32_t n, key_rows *r)
{
    const folioi_keys *keys = &a->keys;
    const folio_tensor *t = s->given;
    if (key + n <= keys->stored_len) {
        if (plan->chunk == 0 || (s->form != AS_ROWS && s->form != AS_UNITS)) return false;
        r->unit = s->unit;
        r->stride = s->token;
        /* a half that nobody sees may have no block */
        bool two = plan->chunk != SUB;
        bool low = a->begin < key + SUB / 2;
        bool high = n > SUB / 2;
        const char *first = stored_token(keys, plan, s, low || !two ? key : key + SUB / 2);
        const char *second = first + 8 * s->token;
        if (two) second = low && high ? stored_token(keys, plan, s, key + SUB / 2) : first;
        r->four[0] = first;
        r->four[1] = first + 4 * s->token;
        r->four[2] = second;
        r->four[3] = second + 4 * s->token;
        return true;
    }
    if (key < keys->stored_len || n < SUB || s->rotates || (DOT && t->dtype != FOLIO_BF16))
        return false;
    int64_t elem = (int64_t)folio_dtype_size(t->dtype);
    r->type = t->dtype;
    r->unit = 16;
    r->stride = t->token_stride * elem;
    for (int i = 0; i < 4; i++)
        r->four[i] = (const char *)t->data +
                     (keys->new_row + key - keys->stored_len + 4 * i) * r->stride +
                     keys->kv_head * t->head_stride * elem;
    return true;
}

enum { AHEAD = 2 * SUB }; /* keys: rows that are fetched arrive while as many are converted */

/* Rows that lie in blocks of fewer than 8 tokens, copied to `wide` as they are; zeros for those before a->begin, whose
 * blocks may be gone, and past n. No hardware sees a pattern in such rows: the next ones are fetched. */
static void gather_rows(const folioi_attend_args *a, const tile_plan *plan, const key_side *s,
                        int32_t key, int32_t n, float *wide, key_rows *r)
{
    const folioi_keys *keys = &a->keys;
    const int64_t bytes = s->dims * (int64_t)folio_dtype_size(r->type);
    char *to = (char *)wide;
    r->stride = bytes;
    for (int j = 0; j < SUB; j++, to += bytes) {
        int64_t i = key + (int64_t)j, later = i + AHEAD;
        if (later < keys->stored_len) {
            const char *row = stored_token(keys, plan, s, later);
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
        }
        if (j >= n || i < a->begin) memset(to, 0, (size_t)bytes);
        else memcpy(to, stored_token(keys, plan, s, i), (size_t)bytes);
    }
    for (int i = 0; i < 4; i++) r->four[i] = (const char *)wide + 4 * i * bytes;
}

/* Keys [key, key + n) as rows in `wide`, made one by one; zeros for those before a->begin, whose blocks may be gone, and
 * past n. */
static void make_rows(const folioi_attend_args *a, const tile_plan *plan, const key_side *s,
                      folio_dtype kv, int32_t key, int32_t n, float *wide, key_rows *r)
{
    const folioi_keys *keys = &a->keys;
    r->unit = 16;
    r->words = NULL;
    if (key + (n < SUB ? n : SUB) <= keys->stored_len && has_rows(s->stored->at)) {
        gather_rows(a, plan, s, key, n, wide, r);
        return;
    }
    r->type = made_type();
    r->stride = (int64_t)s->dims * 4;
    for (int i = 0; i < 4; i++) r->four[i] = (const char *)wide + 4 * i * r->stride;
    for (int j = 0; j < SUB; j++) {
        int64_t i = key + (int64_t)j;
        float *made = wide + (int64_t)j * s->dims;
        if (j >= n || i < a->begin) memset(made, 0, (size_t)s->dims * sizeof *made);
        else if (i >= keys->stored_len)
            make_given(keys, s, keys->new_row + i - keys->stored_len, made);
        else {
            uint32_t token = (uint32_t)i, size = (uint32_t)keys->block_size;
            make_row(made, s->stored, kv,
                     address_token(s->stored->at, keys->blocks[token / size], keys->kv_head,
                                   token % size));
            for (int32_t d = 0; !DOT && folio_dtype_size(kv) == 1 && d < s->dims; d++)
                made[d] *= r->scale[j];
            if (kv != made_type()) round_row(made, s->dims);
        }
    }
}

/* --------------------------------------------------------------------------------------------- rows to tiles */

/* Columns, or rows, that so many numbers are. */
INLINE int32_t columns_of(int32_t numbers) { return DOT ? numbers / 2 : numbers; }

INLINE int32_t size_of(const int type)
{
    return type == FOLIO_F32 ? 4 : type == FOLIO_F16 || type == FOLIO_BF16 ? 2 : 1;
}

#if defined(DOT_BF16)
/* Columns of a word of LANES rows, from `to` on. Scales are left to the softmax. */
INLINE void store_word(const int type, const bool keys_are_rows, const float *scale,
                       const byte_table *table, vec word, float *to, int64_t stride)
{
    (void)keys_are_rows, (void)scale;
    if (type == FOLIO_BF16) {
        vec_store(to, word);
        return;
    }
    vec pair[2];
    vec_pairs_of_fours(table, type, word, pair);
    vec_store(to, pair[0]);
    vec_store(to + stride, pair[1]);
}

/* Column c of one row, where less than 16 bytes are left. */
INLINE float column_of(const int type, const bool keys_are_rows, const key_rows *r, int i,
                       int32_t c)
{
    (void)keys_are_rows;
    uint32_t low = f32_to_bf16(load_f32(row_of(r, i), (folio_dtype)type, 2 * c));
    uint32_t high = f32_to_bf16(load_f32(row_of(r, i), (folio_dtype)type, 2 * c + 1));
    return f32_of_bits(low | high << 16);
}
#else
typedef struct {
    char none;
} byte_table;
INLINE byte_table byte_table_of(const int type) { return (void)type, (byte_table){0}; }

/* Columns of a word of LANES rows, from `to` on; scale: of these rows, or of these columns. */
INLINE void store_word(const int type, const bool keys_are_rows, const float *scale,
                       const byte_table *table, vec word, float *to, int64_t stride)
{
    (void)table;
    const int pack = 4 / size_of(type);
    UNROLL_FOR (int nth = 0; nth < pack; nth++) {
        vec x = vec_unpack(type, nth, word);
        if (pack == 4) x = vec_mul(x, keys_are_rows ? vec_load(scale) : vec_set1(scale[nth]));
        vec_store(to + nth * stride, x);
    }
}

INLINE float column_of(const int type, const bool keys_are_rows, const key_rows *r, int i,
                       int32_t c)
{
    return load_f32(row_of(r, i), (folio_dtype)type, c) * r->scale[keys_are_rows ? i : c];
}
#endif

#if LANES < 16
/* Rows that lie side by side, and more bytes of each row at a time: shorter vectors gain nothing. */
INLINE void vec_transpose_fours(const char *const *four, int64_t offset, vec *words)
{
    vec_transpose_16(four, 16, offset, words);
}
INLINE void vec_transpose_32(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    for (int i = 0; i < 2; i++) vec_transpose_16(four, stride, offset + 16 * i, words + 4 * i);
}
INLINE void vec_transpose_64(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    for (int i = 0; i < 4; i++) vec_transpose_16(four, stride, offset + 16 * i, words + 4 * i);
}
#endif

/* Units [u, u + N) of LANES rows from row g on to columns. */
INLINE void transpose_units(const int type, const int N, const bool native,
                            const bool keys_are_rows, const key_rows *r, int g, int32_t u,
                            const byte_table *table, float *to, int64_t stride, ahead *next)
{
    const int pack = 4 / size_of(type);
    const char *const *four = r->four + g / 4;
    vec words[16];
    UNROLL_FOR (int j = 0; j < N; j++) fetch_ahead(next, true);
    if (native)
        UNROLL_FOR (int j = 0; j < 4; j++) words[j] = vec_load(r->words + (u * 4 + j) * SUB + g);
    else if (N == 4) vec_transpose_64(four, r->stride, u * 16, words);
    else if (N == 2) vec_transpose_32(four, r->stride, u * 16, words);
    else if (r->stride == 16) vec_transpose_fours(four, u * r->unit, words);
    else vec_transpose_16(four, r->stride, u * r->unit, words);
    UNROLL_FOR (int j = 0; j < 4 * N; j++) {
        int32_t n = (4 * u + j) * pack;
        store_word(type, keys_are_rows, r->scale + (keys_are_rows ? g : n), table, words[j],
                   to + columns_of(n) * stride + g, stride);
    }
}

/* `numbers` of each of sixteen rows to columns: to[c * stride + row]. */
INLINE void transpose_as(const int type, const bool native, const bool keys_are_rows, key_rows r,
                         int32_t numbers, float *to, int64_t stride, ahead *next)
{
    const int32_t pack = 4 / size_of(type), units = numbers / (4 * pack);
    const byte_table table = byte_table_of(type);
    for (int g = 0; g < SUB; g += LANES) {
        int32_t u = 0;
#define TRANSPOSE(N)                                                                               \
    transpose_units(type, N, native, keys_are_rows, &r, g, u, &table, to, stride, next)
        for (; !native && r.unit == 16 && u + 4 <= units; u += 4) TRANSPOSE(4);
        for (; !native && r.unit == 16 && u + 2 <= units; u += 2) TRANSPOSE(2);
        for (; u < units; u++) TRANSPOSE(1);
#undef TRANSPOSE
        for (int32_t n = 4 * units * pack; native && n < numbers; n += pack)
            store_word(type, true, r.scale + g, &table, vec_load(r.words + n / pack * SUB + g),
                       to + columns_of(n) * stride + g, stride);
    }
    if (pack < 4 || native) return; /* a multiple of 8 numbers is one of 16 bytes */
    for (int32_t c = columns_of(units * 16); c < columns_of(numbers); c++)
        for (int i = 0; i < SUB; i++) to[c * stride + i] = column_of(type, keys_are_rows, &r, i, c);
}

#if defined(DOT_BF16)
/* Rows two by two as rows of pairs, zeros past `width` numbers. */
INLINE void copy_as(const int type, const bool keys_are_rows, const key_rows *r, int32_t n,
                    int32_t width, float *to, int64_t stride, ahead *next)
{
    (void)keys_are_rows;
    const byte_table table = byte_table_of(type);
    for (int j = 0; j < n; j += 2, to += stride) {
        const char *low = row_of(r, j), *high = row_of(r, j + 1);
        int32_t d = 0;
        vec pair[4];
        for (; d + 4 * LANES <= width; d += 4 * LANES) {
            fetch_ahead(next, true);
            if (type == FOLIO_BF16) {
                vec_interleave_64(low + 2 * d, high + 2 * d, pair);
                vec_interleave_64(low + 2 * d + 64, high + 2 * d + 64, pair + 2);
            } else vec_pairs_of_rows(&table, type, 4, true, low + d, high + d, pair);
            UNROLL_FOR (int i = 0; i < 4; i++) vec_store(to + d + i * LANES, pair[i]);
        }
        if (d == 0 && j % 8 == 0) fetch_ahead(next, true); /* short rows */
        for (; d + LANES <= width; d += LANES) {
            if (type == FOLIO_BF16)
                pair[0] = vec_interleave((const uint16_t *)(const void *)low + d,
                                         (const uint16_t *)(const void *)high + d);
            else vec_pairs_of_rows(&table, type, 1, true, low + d, high + d, pair);
            vec_store(to + d, pair[0]);
        }
        for (; d < stride; d++) {
            uint32_t both = 0;
            if (d < width)
                both = f32_to_bf16(load_f32(low, (folio_dtype)type, d)) |
                       (uint32_t)f32_to_bf16(load_f32(high, (folio_dtype)type, d)) << 16;
            to[d] = f32_of_bits(both);
        }
    }
}
#else
/* Rows as rows of f32, zeros past `width` numbers. */
INLINE void copy_as(const int type, const bool keys_are_rows, const key_rows *r, int32_t n,
                    int32_t width, float *to, int64_t stride, ahead *next)
{
    const int64_t elem = size_of(type);
    for (int32_t j = 0; j < n; j++, to += stride) {
        const char *row = row_of(r, j);
        int32_t d = 0;
        for (; d + LANES <= width; d += LANES) {
            vec x = vec_load_as(type, row + d * elem);
            if ((j * width + d) * elem % (SUBS_AT_ONCE * 64) == 0) fetch_ahead(next, true);
            if (elem == 1)
                x = vec_mul(x, keys_are_rows ? vec_set1(r->scale[j]) : vec_load(r->scale + d));
            vec_store(to + d, x);
        }
        for (; d < width; d++) {
            to[d] = load_f32(row, (folio_dtype)type, d);
            if (elem == 1) to[d] *= r->scale[keys_are_rows ? j : d];
        }
        for (; d < stride; d++) to[d] = 0.0f;
    }
}
#endif

/* What the kernels of this level take: each type a function of its own. */
#if defined(DOT_BF16)
#define ROW_TYPES(X) X(FOLIO_BF16) X(FOLIO_FP8_E4M3) X(FOLIO_FP8_E5M2) X(FOLIO_INT8)
#else
#define ROW_TYPES(X) KV_TYPES(X)
#endif

/* Sixteen keys as rows, or as words. */
static void transpose_keys(const key_rows *r, int32_t dims, float *to, ahead *next)
{
    switch (r->type) {
#define CASE(type)                                                                                 \
    case type:                                                                                     \
        if (r->words != NULL) transpose_as(type, true, true, *r, dims, to, SUB, next);             \
        else transpose_as(type, false, true, *r, dims, to, SUB, next);                             \
        return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

/* `dims` rows of `numbers` tokens each, r being the first sixteen: to V, sixteen dims at a time. */
INLINE void transpose_dims_as(const int type, key_rows r, int32_t dims, int32_t numbers, float *to,
                              int64_t stride, ahead *next)
{
    for (int32_t d = 0; d < dims; d += SUB) {
        transpose_as(type, false, false, r, numbers, to + d, stride, next);
        for (int i = 0; i < 4; i++) r.four[i] += SUB * r.stride;
    }
}

static void transpose_dims(const key_rows *r, int32_t dims, int32_t numbers, float *to,
                           int64_t stride, ahead *next)
{
    switch (r->type) {
#define CASE(type)                                                                                 \
    case type: transpose_dims_as(type, *r, dims, numbers, to, stride, next); return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

/* Sixteen keys as rows of V. */
static void copy_keys(const key_rows *r, int32_t dims, float *to, int64_t stride, ahead *next)
{
    switch (r->type) {
#define CASE(type)                                                                                 \
    case type: copy_as(type, true, r, SUB, dims, to, stride, next); return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

/* `dims` rows of sixteen tokens each, r being the first sixteen, as rows of K. */
INLINE void copy_dims_as(const int type, key_rows r, int32_t dims, float *to, ahead *next)
{
    for (int32_t d = 0; d < dims; d += SUB) {
        float *rows = to + columns_of(d) * SUB;
        if (dims - d >= SUB) copy_as(type, false, &r, SUB, SUB, rows, SUB, next);
        else copy_as(type, false, &r, dims - d, SUB, rows, SUB, next);
        for (int i = 0; i < 4; i++) r.four[i] += SUB * r.stride;
    }
}

static void copy_dims(const key_rows *r, int32_t dims, float *to, ahead *next)
{
    switch (r->type) {
#define CASE(type)                                                                                 \
    case type: copy_dims_as(type, *r, dims, to, next); return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

#endif
