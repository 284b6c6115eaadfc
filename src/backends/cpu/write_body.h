/*
 * write_body.h: k and v into the cache, on vectors, with the bits of folioi_kv_write_rows. A level's file includes
 * its write_<isa>.h, tile_load.h, then this. A head's row is converted to the cache's type first; then it goes
 *
 *   straight to its place            where the layout keeps rows whole
 *   16 rows at a time                to a native sub-tile: K's is the rows with 32-bit words transposed, whatever
 *                                    the type, 16-bit V's has two rows interleaved
 *   in pieces, as the layout has it  else: a single token, or a layout by tokens
 */
#ifndef FOLIOI_WRITE_BODY_H
#define FOLIOI_WRITE_BODY_H

#include "backends/cpu/rotate_body.h"
#include "backends/cpu/tile_load.h"
#include "core/rotary.h"

typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef int16_t signed_halves __attribute__((vector_size(LANES * 2)));
typedef __typeof__(vec_to_f16(vec_set1(0))) packed_halves;
typedef __typeof__(vec_widen(vec_to_f16(vec_set1(0)))) packed_words;

enum { CHUNK = 256 }; /* bytes of a converted row, on the stack */

/* ---------------------------------------------------------------------------------------- numbers */

INLINE halves load_halves(const char *p)
{
    halves h;
    memcpy(&h, p, sizeof h);
    return h;
}
INLINE words widen(halves h) { return (words)vec_widen((packed_halves)h); }
INLINE halves narrow(words u) { return (halves)vec_narrow_halves((packed_words)u); }
/* x where a is above the limit, else y */
INLINE words where_above(words a, const int limit, words x, words y)
{
    return (words)vec_where_above((packed_words)a, limit, (packed_words)x, (packed_words)y);
}
INLINE words all_words(const int x) { return (words){0} + (uint32_t)x; }

/* One NaN of each sign. */
INLINE halves plain_f16(halves h)
{
    halves nan = (halves)((signed_halves)(h & 0x7fff) > 0x7c00);
    return (h & ~(nan & 0x7fff)) | (nan & 0x7e00);
}
INLINE halves quiet_bf16(halves h)
{
    return h | ((halves)((signed_halves)(h & 0x7fff) > 0x7f80) & 0x40);
}
/* The instruction makes NaN quiet; the formula keeps its bits. */
INLINE words f32_of_f16(const char *p)
{
    words h = widen(load_halves(p)), x = (words)vec_load_as(FOLIO_F16, p);
    return where_above(h & 0x7fff, 0x7c00, x ^ (~h & 0x200) << 13, x);
}

INLINE words bf16_of(vec x)
{
    words u = (words)x, nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return where_above(u & 0x7fffffff, 0x7f800000, u >> 16 | 0x40, nearest);
}

/* Codes of 8 bits with `man` bits of mantissa: as f32_to_small, without a branch. */
INLINE words fp8_of(vec x, const int man, const int bias, const int largest, const int nan)
{
    const int shift = 23 - man;
    const uint32_t round = (1u << (shift - 1)) - 1 - ((uint32_t)(127 - bias) << 23);
    words u = (words)x, size = u & 0x7fffffff;
    words normal = (size + (size >> shift & 1) + round) >> shift;
    /* below the smallest normal number, an addition rounds at the last place */
    vec place = vec_set1((float)(1u << (24 - bias - man)));
    words small = (words)vec_add((vec)size, place) - (words)place;
    words code = where_above(size, ((128 - bias) << 23) - 1, normal, small);
    code = where_above(code, largest, all_words(largest), code);
    code = where_above(size, 0x7f800000, all_words(nan), code);
    return code | (u >> 24 & 0x80);
}

/* 1.5 * 2^23 has whole numbers in its last places. */
INLINE words int8_of(vec x)
{
    vec near = vec_min(vec_max(x, vec_set1(-127.0f)), vec_set1(127.0f));
    return (words)vec_add(near, vec_set1(12582912.0f));
}

/* LANES numbers of one type to another, divided by the scale where there is one. */
INLINE void convert_step(char *to, const char *from, const int in, const int out, const bool scaled,
                         vec scale)
{
    if (in == FOLIO_F32 && out == FOLIO_F32) {
        memcpy(to, from, sizeof(words));
    } else if (out == FOLIO_F32) {
        words u = in == FOLIO_F16 ? f32_of_f16(from) : (words)vec_load_as(in, from);
        memcpy(to, &u, sizeof u);
    } else if (out == FOLIO_F16) {
        halves h = plain_f16(in == FOLIO_F16 ? load_halves(from)
                                             : (halves)vec_to_f16(vec_load_as(in, from)));
        memcpy(to, &h, sizeof h);
    } else if (out == FOLIO_BF16) {
        halves h = in == FOLIO_BF16 ? quiet_bf16(load_halves(from))
                                    : narrow(bf16_of(vec_load_as(in, from)));
        memcpy(to, &h, sizeof h);
    } else {
        vec x = vec_load_as(in, from);
        if (scaled) x = vec_div(x, scale);
        words code = out == FOLIO_INT8       ? int8_of(x)
                     : out == FOLIO_FP8_E4M3 ? fp8_of(x, 3, 7, 0x7e, 0x7f)
                                             : fp8_of(x, 2, 15, 0x7b, 0x7e);
        vec_store_bytes(to, (packed_words)code);
    }
}

/* Rows of n numbers, so many bytes apart, each with its scale. */
typedef struct {
    char *to;
    const char *from;
    int64_t to_row, from_row;
    int32_t rows, n;
    const float *scales;
} conversion;
typedef void convert_fn(const conversion *c);

INLINE void convert_row(char *to, const char *from, int32_t n, const int in, const int out,
                        const bool scaled, float scale)
{
    const int64_t in_size = in == FOLIO_F32 ? 4 : 2;
    const int64_t out_size = out == FOLIO_F32 ? 4 : out == FOLIO_F16 || out == FOLIO_BF16 ? 2 : 1;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        convert_step(to + i * out_size, from + i * in_size, in, out, scaled, vec_set1(scale));
    if (i < n) {
        char a[LANES * 4] = {0}, b[LANES * 4];
        memcpy(a, from + i * in_size, (size_t)((n - i) * in_size));
        convert_step(b, a, in, out, scaled, vec_set1(scale));
        memcpy(to + i * out_size, b, (size_t)((n - i) * out_size));
    }
}

INLINE void convert(const conversion *c, const int in, const int out)
{
    const bool fp8 = out == FOLIO_FP8_E4M3 || out == FOLIO_FP8_E5M2;
    for (int32_t r = 0; r < c->rows; r++) {
        char *to = c->to + r * c->to_row;
        const char *from = c->from + r * c->from_row;
        float scale = c->scales[r];
        if (out == FOLIO_INT8 && !(scale > 0.0f && scale < INFINITY)) memset(to, 0, (size_t)c->n);
        else if (out == FOLIO_INT8 || (fp8 && scale != 1.0f))
            convert_row(to, from, c->n, in, out, true, scale);
        else convert_row(to, from, c->n, in, out, false, 1.0f);
    }
}

#define CONVERT_FROM(in, IN)                                                                       \
    CONVERT(in, IN, f32, FOLIO_F32)                                                                \
    CONVERT(in, IN, f16, FOLIO_F16)                                                                \
    CONVERT(in, IN, bf16, FOLIO_BF16)                                                              \
    CONVERT(in, IN, e4m3, FOLIO_FP8_E4M3)                                                          \
    CONVERT(in, IN, e5m2, FOLIO_FP8_E5M2)                                                          \
    CONVERT(in, IN, int8, FOLIO_INT8)
#define CONVERT_ALL                                                                                \
    CONVERT_FROM(f32, FOLIO_F32)                                                                   \
    CONVERT_FROM(f16, FOLIO_F16)                                                                   \
    CONVERT_FROM(bf16, FOLIO_BF16)

#define CONVERT(in, IN, out, OUT)                                                                  \
    static void convert_##in##_##out(const conversion *c) { convert(c, IN, OUT); }
CONVERT_ALL
#undef CONVERT

static convert_fn *converter(folio_dtype from, folio_dtype to)
{
#define CONVERT(in, IN, out, OUT)                                                                  \
    if (from == IN && to == OUT) return convert_##in##_##out;
    CONVERT_ALL
#undef CONVERT
    return NULL;
}

/* max|x| / 127. Without their signs, numbers are in the order of their bits, and NaN is above them all. */
INLINE float scale_of(const char *from, int32_t n, const int in)
{
    const int64_t size = in == FOLIO_F32 ? 4 : 2;
    words largest = {0};
    halves largest_half = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        char last[LANES * 4];
        const char *p = from + i * size;
        if (i + LANES > n) {
            memset(last, 0, sizeof last);
            p = memcpy(last, p, (size_t)((n - i) * size));
        }
        if (in == FOLIO_F32)
            largest = (words)vec_max_words((packed_words)largest,
                                           (packed_words)((words)vec_load_as(in, p) & 0x7fffffff));
        else
            largest_half = (halves)vec_max_halves((packed_halves)largest_half,
                                                  (packed_halves)(load_halves(p) & 0x7fff));
    }
    vec x = in == FOLIO_F32 ? (vec)largest : vec_load_as(in, (const char *)&largest_half);
    if (vec_any_nan(x)) return folioi_int8_scale(from, (folio_dtype)in, 0, n); /* which NaN */
    return vec_largest(x) / 127.0f;
}

static float int8_scale(const char *from, folio_dtype in, int32_t n)
{
    if (in == FOLIO_F32) return scale_of(from, n, FOLIO_F32);
    if (in == FOLIO_BF16) return scale_of(from, n, FOLIO_BF16);
    return scale_of(from, n, FOLIO_F16);
}

/* ----------------------------------------------------------------------------------------- places */

/* K or V under way from a tensor to a layer. */
typedef struct {
    folioi_kv_side side;
    const folio_tensor *from;
    convert_fn *convert;
    const float *head_scales; /* fp8: [num_kv_heads], or NULL: `scale` for all */
    float scale;
    int64_t size, from_size; /* of a number */
    int32_t chunk;           /* numbers converted at a time */
    bool rows;               /* kept whole */
    bool words;              /* native K: words of 16 tokens together */
    bool pairs;              /* native V of 16 bits */
    bool copied;             /* to sub-tiles, from rows of whole vectors in the cache's type */
} writer;

static writer writer_of(const folioi_kv_layer *layer, folioi_k_or_v which, const folio_tensor *from,
                        const float *head_scales, float scale)
{
    writer w = {
        .side = kv_side(layer, which), .from = from, .head_scales = head_scales, .scale = scale};
    const folioi_address *at = w.side.at;
    w.convert = converter(from->dtype, w.side.dtype);
    w.size = (int64_t)folio_dtype_size(w.side.dtype);
    w.from_size = (int64_t)folio_dtype_size(from->dtype);
    w.chunk = (int32_t)(CHUNK / w.size);
    w.rows = at->dim_tile == 1 && at->dim_tile_stride == 1;
    w.words = k_is_native(at, (int)(4 / w.size));
    w.pairs = w.size == 2 && at->token_tile == 2 && at->token_stride == 1 && at->dim_tile == 1 &&
              at->dim_tile_stride == 2;
    w.copied = (w.words || w.pairs) && from->dtype == w.side.dtype &&
               w.side.dims * w.size % (LANES * 4) == 0;
    return w;
}

/* A head's row: where it comes from, where it goes, where its scale goes. */
typedef struct {
    const char *from;
    char *to;
    float *scale;     /* NULL: the cache has none */
    const float *fp8; /* then: what to divide by  */
} place;

INLINE place place_of(const writer *w, int64_t row, int64_t block, int64_t token, int64_t head)
{
    const folioi_kv_side *s = &w->side;
    int64_t index = row * w->from->token_stride + head * w->from->head_stride;
    place p = {.from = (const char *)w->from->data + index * w->from_size,
               .to = s->base + address_token(s->at, block, head, token) * w->size,
               .fp8 = w->head_scales != NULL ? w->head_scales + head : &w->scale};
    if (s->scales != NULL) p.scale = s->scales + address_token(s->scales_at, block, head, token);
    return p;
}

INLINE void next_head(const writer *w, place *p)
{
    p->from += w->from->head_stride * w->from_size;
    p->to += w->side.at->head * w->size;
    if (p->scale != NULL) p->scale += w->side.scales_at->head;
    if (w->head_scales != NULL) p->fp8++;
}

/* The scale of one row; stored where the cache keeps it. */
INLINE float scale_row(const writer *w, const char *from, float *to, const float *fp8)
{
    if (to == NULL) return *fp8;
    *to = int8_scale(from, w->from->dtype, w->side.dims);
    return *to;
}

INLINE void store_pieces(char *to, int64_t stride, const char *from, int64_t n, const int64_t piece)
{
    for (int64_t i = 0; i < n; i += piece, to += stride) memcpy(to, from + i, (size_t)piece);
}

/* A token of a pair. */
INLINE void store_half_pairs(char *to, const char *from, int32_t n)
{
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store_low_halves(to + i * 4, (packed_words)widen(load_halves(from + i * 2)));
    store_pieces(to + i * 4, 4, from + i * 2, (n - i) * 2, 2);
}

static void write_row(const writer *w, place p)
{
    const folioi_address *at = w->side.at;
    float scale = scale_row(w, p.from, p.scale, p.fp8);
    conversion c = {p.to, p.from, 0, 0, 1, w->side.dims, &scale};
    if (w->rows) {
        w->convert(&c);
        return;
    }
    int64_t piece = at->dim_tile * w->size, stride = at->dim_tile_stride * w->size;
    for (int32_t d = 0, n; d < w->side.dims; d += n) {
        char codes[CHUNK];
        n = w->side.dims - d < w->chunk ? w->side.dims - d : w->chunk;
        c = (conversion){codes, p.from + d * w->from_size, 0, 0, 1, n, &scale};
        w->convert(&c);
        int64_t bytes = n * w->size;
        if (w->pairs) store_half_pairs(p.to, codes, n);
        else if (piece == 1) store_pieces(p.to, stride, codes, bytes, 1);
        else if (piece == 2) store_pieces(p.to, stride, codes, bytes, 2);
        else if (piece == 4) store_pieces(p.to, stride, codes, bytes, 4);
        else store_pieces(p.to, stride, codes, bytes, 16);
        p.to += n / at->dim_tile * stride;
    }
}

/* A vector of a type's numbers with NaN as the cache has it. */
INLINE vec cache_nan(vec x, const int type)
{
    typedef uint16_t all_halves __attribute__((vector_size(LANES * 4)));
    typedef int16_t all_signed __attribute__((vector_size(LANES * 4)));
    all_halves h = (all_halves)x, size = h & 0x7fff;
    if (type == FOLIO_BF16) return (vec)(h | ((all_halves)((all_signed)size > 0x7f80) & 0x40));
    if (type != FOLIO_F16) return x;
    all_halves nan = (all_halves)((all_signed)size > 0x7c00);
    return (vec)((h & ~(nan & 0x7fff)) | (nan & 0x7e00));
}

/* 16 rows of n words, `row` bytes apart, to [n][16]. Whole vectors are read. */
INLINE void store_words(char *to, const char *from, int64_t row, int64_t n, const int type)
{
    for (int64_t i = 0; i < n; i += LANES)
        for (int64_t first = 0; first < SUB; first += LANES) {
            vec r[LANES];
            UNROLL_FOR (int j = 0; j < LANES; j++)
                r[j] = cache_nan(
                    vec_load((const float *)(const void *)(from + (first + j) * row + i * 4)),
                    type);
            vec_transpose(r);
            char *start = to + (i * SUB + first) * 4;
            int64_t left = n - i;
            UNROLL_FOR (int j = 0; j < LANES; j++)
                if (j < left) vec_store((float *)(void *)(start + j * SUB * 4), r[j]);
        }
}

/* 16 rows of n halves to 8 of pairs, `pair` bytes apart. Whole vectors are read. */
INLINE void store_pairs(char *to, int64_t pair, const char *from, int64_t row, int64_t n,
                        const int type)
{
    for (int j = 0; j < SUB; j += 2, from += 2 * row, to += pair)
        for (int64_t i = 0; i < n; i += LANES) {
            words low = widen(load_halves(from + i * 2));
            words high = widen(load_halves(from + row + i * 2));
            vec both = cache_nan((vec)(low | high << 16), type);
            int64_t left = n - i < LANES ? n - i : LANES;
            memcpy(to + i * 4, &both, left == LANES ? sizeof both : (size_t)left * 4);
        }
}

/* n numbers of 16 rows in the cache's type to their place in a sub-tile. */
INLINE void store_sub_tile(const writer *w, char *to, const char *from, int64_t row, int32_t n,
                           const int type)
{
    if (w->words) store_words(to, from, row, n * w->size / 4, type);
    else store_pairs(to, w->side.at->token_tile_stride * w->size, from, row, n, type);
}

/* 16 rows to a whole sub-tile, from its first token on. */
static void convert_sub_tile(const writer *w, place p)
{
    float scales[SUB];
    int64_t row = w->from->token_stride * w->from_size;
    for (int i = 0; i < SUB; i++) {
        int64_t scale = p.scale != NULL ? i * w->side.scales_at->token_tile_stride : 0;
        scales[i] = scale_row(w, p.from + i * row, p.scale != NULL ? p.scale + scale : NULL, p.fp8);
    }
    conversion c = {p.to,         p.from, w->side.at->token_tile_stride * w->size, row, SUB,
                    w->side.dims, scales};
    if (w->rows) {
        w->convert(&c);
        return;
    }
    for (int32_t d = 0, n; d < w->side.dims; d += n) {
        _Alignas(64) char codes[SUB * CHUNK];
        n = w->side.dims - d < w->chunk ? w->side.dims - d : w->chunk;
        c = (conversion){codes, p.from + d * w->from_size, CHUNK, row, SUB, n, scales};
        w->convert(&c);
        store_sub_tile(w, p.to + (w->words ? d * w->size * SUB : (int64_t)d * 4), codes, CHUNK, n,
                       FOLIO_F32);
    }
}

/* The same where the rows have the cache's type. */
static void copy_sub_tile(const writer *w, place p)
{
    int64_t row = w->from->token_stride * w->from_size;
    if (w->side.dtype == FOLIO_BF16) store_sub_tile(w, p.to, p.from, row, w->side.dims, FOLIO_BF16);
    else if (w->side.dtype == FOLIO_F16)
        store_sub_tile(w, p.to, p.from, row, w->side.dims, FOLIO_F16);
    else store_sub_tile(w, p.to, p.from, row, w->side.dims, FOLIO_F32);
}

/* n rows, one or a sub-tile of them, from a slot on: K or V of the share's heads. */
static void write_slots(const writer *w, const folioi_kv_share *share, int64_t row, int64_t n,
                        int64_t block, int64_t token)
{
    bool whole = n == SUB && (w->rows || w->words || w->pairs);
    for (int64_t i = 0; i < n; i += whole ? SUB : 1) {
        place p = place_of(w, row + i, block, token + i, share->head_begin);
        for (int32_t h = share->head_begin; h < share->head_end; h++, next_head(w, &p)) {
            if (!whole) write_row(w, p);
            else if (w->copied) copy_sub_tile(w, p);
            else convert_sub_tile(w, p);
        }
    }
}

/* The same of K, whose rows rotate first: head by head, as many of them as have room. */
static void write_rotated(const writer *w, const folioi_kv_tensors *t, const folioi_kv_share *share,
                          int64_t row, int64_t n, int64_t block, int64_t token)
{
    _Alignas(64) char rotated[sizeof(float) * FOLIOI_ROTARY_MAX_DIMS];
    int32_t dims = w->side.dims;
    int64_t bytes = dims * w->from_size, step = n * bytes <= (int64_t)sizeof rotated ? n : 1;
    folio_tensor rows = {rotated, t->k.dtype, step, dims, 0};
    writer one = *w;
    one.from = &rows;
    for (int32_t h = share->head_begin; h < share->head_end; h++) {
        folioi_kv_share head = {0, step, h, h + 1};
        for (int64_t i = 0; i < n; i += step) {
            for (int64_t k = 0; k < step; k++) {
                int64_t at = (row + i + k) * t->k.token_stride + h * t->k.head_stride;
                rotate_row(rotated + k * bytes, (const char *)t->k.data + at * w->from_size,
                           t->k.dtype, dims, &t->rotation, t->positions[row + i + k]);
            }
            write_slots(&one, &head, 0, step, block, token + i);
        }
    }
}

/* Do the next 16 of n rows fill a sub-tile? */
static bool fills_sub_tile(const int64_t *slots, int64_t n)
{
    if (n < SUB || slots[0] % SUB != 0) return false;
    for (int i = 1; i < SUB; i++)
        if (slots[i] != slots[0] + i) return false;
    return true;
}

static void write_rows(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                       const int64_t *slots, const folioi_kv_share *share)
{
    int32_t block_size = layer->format->desc.block_size;
    writer k = writer_of(layer, FOLIOI_K, &t->k, t->k_head_scales, t->k_scale);
    writer v = writer_of(layer, FOLIOI_V, &t->v, t->v_head_scales, t->v_scale);
    for (int64_t n, i = share->begin; i < share->end; i += n) {
        n = 1;
        if (slots[i] < 0) continue;
        if (block_size % SUB == 0 && fills_sub_tile(slots + i, share->end - i)) n = SUB;
        int64_t block = slots[i] / block_size, token = slots[i] % block_size;
        if (t->rotation.table != NULL) write_rotated(&k, t, share, i, n, block, token);
        else write_slots(&k, share, i, n, block, token);
        if (kv_last(layer->format) == FOLIOI_V) write_slots(&v, share, i, n, block, token);
    }
}

#endif
