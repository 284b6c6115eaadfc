/*
 * tile_load.h: the keys of a tile in the form that attend_body.h reads: sub-tiles of 16 keys with K [steps][16] and
 * V [16][v_stride]. They are read in place if the cache has this form; otherwise they are converted to scratch
 * (key_rows.h). With v_in_k, V is K's sub-tile transposed.
 */
#ifndef FOLIOI_TILE_LOAD_H
#define FOLIOI_TILE_LOAD_H

#include "backends/cpu/key_rows.h"

enum { SLICE = DOT ? 128 : 32 }; /* numbers of a key's K that few rows convert at a time */

INLINE key_side plan_side(const folioi_keys *keys, const folioi_kv_side *stored,
                          const folio_tensor *given, const folio_dtype kv, int32_t dims)
{
    key_side s = {.stored = stored, .given = given, .dims = dims, .unit = 16};
    if (keys->stored_len == 0) return s;
    const folioi_address *at = stored->at;
    const int64_t elem = (int64_t)folio_dtype_size(kv);
    s.block = at->block * elem;
    s.head = at->head * elem;
    s.token = at->token_tile_stride / at->token_tile * elem;
    if (at->dim_tile > 1 || !has_rows(at)) s.unit = at->dim_tile_stride * elem;
    return s;
}

INLINE tile_plan plan_tiles(const folioi_attend_args *a, const folio_dtype kv)
{
    const folioi_keys *keys = &a->keys;
    const int32_t elem = (int32_t)folio_dtype_size(kv), size = keys->block_size;
    tile_plan p = {.k = plan_side(keys, &keys->k, &keys->new_k, kv, a->k_dims),
                   .v = plan_side(keys, &keys->v, &keys->new_v, kv, a->v_dims),
                   .v_stride = (int32_t)folioi_out_stride(a->v_dims)};
    p.k.rotates = keys->rotate != NULL;
    if (keys->stored_len == 0) return p;
    bool same = DOT ? kv == FOLIO_BF16 : kv == FOLIO_F32;
    p.shift = (size & (size - 1)) == 0 ? __builtin_ctz((unsigned)size) : -1;
    p.chunk = size % SUB == 0 ? SUB : size % (SUB / 2) == 0 ? SUB / 2 : 0;
    p.k.form = form_of_k(keys->k.at, elem, size);
    p.v.form = form_of_v(keys->v.at, elem, size, a->v_dims);
    p.k.in_place = same && (p.k.form == AS_WORDS ||
                            (!DOT && p.k.form == AS_COLUMNS && keys->k.at->dim_tile_stride == SUB));
    p.v.in_place = same && (DOT ? p.v.form == AS_PAIRS
                                : p.v.form == AS_ROWS && p.chunk == SUB && a->v_dims % SUB == 0);
    p.k.in_slices = !p.k.in_place && p.k.form != AS_NUMBERS && p.chunk > 0;
    p.bytes = DOT && elem == 1 && p.chunk == SUB && !keys->v_in_k && a->v_dims % SUB == 0 &&
              (p.k.form == AS_WORDS || p.k.form == AS_COLUMNS ||
               (p.k.form == AS_UNITS && a->k_dims % SUB == 0)) &&
              (p.v.form == AS_ROWS || p.v.form == AS_COLUMNS);
    p.words = !DOT && elem == 2 && p.chunk == SUB && !keys->v_in_k && a->v_dims % SUB == 0 &&
              p.k.form != AS_NUMBERS && p.v.form != AS_NUMBERS;
    return p;
}

/* ------------------------------------------------------------------------------------------ scales */

/* Of sixteen keys from `key` on, of which n are there; 1 for those that are not, or are given. What scales a layout has, it
 * has token by token. */
static void load_scales(const folioi_attend_args *a, const tile_plan *plan,
                        const folioi_kv_side *side, float fp8_scale, int32_t key, int32_t n,
                        float *to)
{
    const folioi_keys *keys = &a->keys;
    const folioi_address *at = side->scales_at;
    bool whole = n >= SUB && key >= a->begin && key <= keys->stored_len - SUB;
    for (int i = 0; i < SUB; i++) to[i] = whole ? fp8_scale : 1.0f;
    if (whole && side->scales == NULL) return;
    bool together = whole && plan->chunk == SUB && at->token_tile_stride == 1;
    for (int i = 0; i < SUB; i++) {
        int64_t token = key + (int64_t)i;
        if (i >= n || token < a->begin || token >= keys->stored_len) continue;
        to[i] = fp8_scale;
        if (side->scales == NULL) continue;
        uint32_t in_blocks = (uint32_t)token, size = (uint32_t)keys->block_size;
        uint32_t index = block_index(plan, in_blocks, size);
        const float *from = side->scales + keys->blocks[index] * at->block +
                            keys->kv_head * at->head +
                            (in_blocks - index * size) * at->token_tile_stride;
        if (together) {
            memcpy(to, from, SUB * sizeof *to);
            return;
        }
        to[i] = *from;
    }
}

/* Of sub-tile i, if the cache has any. */
INLINE void load_sub_scales(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i)
{
    const folioi_keys *keys = &a->keys;
    if (folio_dtype_size(t->kv) != 1) return;
    int32_t key = t->t0 + i * SUB, n = t->n - i * SUB;
    load_scales(a, plan, &keys->k, keys->k_scale, key, n, t->k_scale + i * SUB);
    load_scales(a, plan, &keys->v, keys->v_scale, key, n, t->v_scale + i * SUB);
}

/* --------------------------------------------------------------------------------------- sub-tiles */

/* Sub-tile i of K, where it lies; false: it does not lie in one way. */
static bool find_k(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i, key_rows *r)
{
    const folioi_keys *keys = &a->keys;
    int32_t key = t->t0 + i * SUB, n = t->n - i * SUB < SUB ? t->n - i * SUB : SUB;
    load_sub_scales(a, plan, t, i);
    *r = (key_rows){.type = t->kv, .scale = t->k_scale + i * SUB};
    if (key + n > keys->stored_len) return false;
    if (plan->k.form != AS_WORDS && plan->k.form != AS_COLUMNS)
        return find_rows(a, plan, &plan->k, key, n, r);
    const char *from = stored_token(keys, plan, &plan->k, key);
    if (plan->k.form == AS_WORDS) r->words = (const float *)(const void *)from;
    r->stride = plan->k.unit;
    for (int j = 0; j < 4; j++) r->four[j] = from + 4 * j * r->stride;
    return true;
}

/* The next n numbers of each of its keys, to `to`. */
static void convert_k(const tile_plan *plan, tile *t, int i, key_rows *r, int32_t n, float *to)
{
    const int64_t elem = (int64_t)folio_dtype_size(r->type);
    int64_t bytes = n * elem / 16 * r->unit;
    t->ptrs.k[i] = to;
    if (plan->k.form == AS_COLUMNS && r->unit == 0) {
        copy_dims(r, n, to, t->converts);
        bytes = n * r->stride;
    } else transpose_keys(r, n, to, t->converts);
    for (int j = 0; j < 4; j++) r->four[j] += bytes;
    if (r->words != NULL) r->words += n * elem / 4 * SUB;
}

/* Where sub-tile i of K is read: in place, or in `to`, converted. */
static void load_k(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i, float *to)
{
    key_rows r;
    bool lies = find_k(a, plan, t, i, &r);
    if (lies && plan->k.in_place) {
        t->ptrs.k[i] = (const float *)(const void *)r.four[0];
        return;
    }
    if (!lies) make_rows(a, plan, &plan->k, t->kv, t->t0 + i * SUB, t->n - i * SUB, a->wide, &r);
    convert_k(plan, t, i, &r, a->k_dims, to);
}

#if !defined(DOT_BF16)
/* V of native pairs, with tokens side by side two by two, as rows of f32. */
INLINE void split_pairs(const int type, const float *from, int32_t dims, float *to, int64_t stride,
                        ahead *next)
{
    for (int j = 0; j < SUB / 2; j++, to += 2 * stride)
        for (int32_t d = 0; d < dims; d += LANES) {
            vec words = vec_load(from + (int64_t)j * dims + d);
            if (d % (4 * LANES) == 0) fetch_ahead(next, true);
            vec_store(to + d, vec_unpack(type, 0, words));
            vec_store(to + stride + d, vec_unpack(type, 1, words));
        }
}
#endif

/* V of sixteen tokens that lie side by side, dim by dim, in one block or in two; zeros past its dims. */
static void transpose_v(const folioi_attend_args *a, const tile_plan *plan, tile *t, int32_t key,
                        int32_t n, key_rows *r, float *to)
{
    const float *scale = r->scale;
    const int32_t whole = a->v_dims / SUB * SUB, width = plan->chunk;
    r->unit = 16;
    for (int half = 0; half < SUB; half += width) {
        if (half + width <= a->begin - key || half >= n) continue; /* its block may be gone */
        const char *from = stored_token(&a->keys, plan, &plan->v, key + half);
        float *rows = to + columns_of(half) * plan->v_stride;
        r->scale = scale + half;
        r->stride = plan->v.unit;
        for (int i = 0; i < 4; i++) r->four[i] = from + 4 * i * r->stride;
        transpose_dims(r, whole, width, rows, plan->v_stride, t->converts);
        if (whole == a->v_dims) continue; /* else eight more */
        from += whole * r->stride;
        r->four[0] = from;
        r->four[1] = r->four[2] = r->four[3] = from + 4 * r->stride;
        transpose_dims(r, SUB, width, rows + whole, plan->v_stride, t->converts);
        for (int32_t j = 0; j < columns_of(width); j++)
            memset(rows + j * plan->v_stride + a->v_dims, 0, SUB / 2 * sizeof *rows);
    }
}

/* The same for V. */
static void load_v(const folioi_attend_args *a, const tile_plan *plan, tile *t, int i, float *to)
{
    const folioi_keys *keys = &a->keys;
    int32_t key = t->t0 + i * SUB, n = t->n - i * SUB < SUB ? t->n - i * SUB : SUB;
    key_rows r = {.type = t->kv, .scale = t->v_scale + i * SUB};
    side_form form = key + n <= keys->stored_len ? plan->v.form : AS_NUMBERS;
    t->ptrs.v[i] = to;
    t->ptrs.v_stride[i] = plan->v_stride;
    /* with pairs an odd number of keys leaves a neighbour that nobody may see */
    if (form != AS_NUMBERS && plan->v.in_place && (!DOT || n % 2 == 0)) {
        t->ptrs.v[i] = (const float *)(const void *)stored_token(keys, plan, &plan->v, key);
        if (!DOT) t->ptrs.v_stride[i] = keys->v.at->token_tile_stride;
        return;
    }
    if (form == AS_COLUMNS) transpose_v(a, plan, t, key, n, &r, to);
#if !defined(DOT_BF16)
    else if (form == AS_PAIRS) {
        const float *from = (const float *)(const void *)stored_token(keys, plan, &plan->v, key);
        if (t->kv == FOLIO_F16)
            split_pairs(FOLIO_F16, from, a->v_dims, to, plan->v_stride, t->converts);
        else split_pairs(FOLIO_BF16, from, a->v_dims, to, plan->v_stride, t->converts);
    }
#endif
    else {
        if (!find_rows(a, plan, &plan->v, key, n, &r))
            make_rows(a, plan, &plan->v, t->kv, key, n, a->wide, &r);
        copy_keys(&r, a->v_dims, to, plan->v_stride, t->converts);
    }
}

/* ------------------------------------------------------------------------------------------ V in K */

/* One vector of dims of V from d on: of K [steps][16] to rows of V or of pairs. whole: all are V's, else zeros follow. */
INLINE void transpose_k_dims(const bool whole, const float *k, int32_t v_dims, int32_t d, float *to,
                             int64_t stride)
{
#if defined(DOT_BF16)
    vec x[SUB / 2];
    UNROLL_FOR (int i = 0; i < SUB / 2; i++)
        x[i] = whole || d + 2 * i < v_dims ? vec_load(k + (d / 2 + i) * SUB) : vec_set1(0.0f);
    vec_pairs_of_tokens(x);
    UNROLL_FOR (int i = 0; i < SUB / 2; i++) vec_store(to + i * stride, x[i]);
#else
    for (int g = 0; g < SUB; g += LANES) {
        vec x[LANES];
        UNROLL_FOR (int i = 0; i < LANES; i++)
            x[i] = whole || d + i < v_dims ? vec_load(k + (d + i) * SUB + g) : vec_set1(0.0f);
        vec_transpose(x);
        UNROLL_FOR (int i = 0; i < LANES; i++) vec_store(to + (g + i) * stride, x[i]);
    }
#endif
}

/* V of sub-tile i, whose K is there: as rows, or in the panels of pack_panels. */
static void transpose_k(const folioi_attend_args *a, const tile *t, int i)
{
    const int rows = DOT ? SUB / 2 : SUB, panel = 2 * LANES;
    const int32_t width = (int32_t)folioi_out_stride(a->v_dims);
    for (int32_t d = 0; d < width; d += LANES) {
        float *to = a->v_tile + (int64_t)i * rows * width + d;
        int64_t stride = width;
        if (t->panels) {
            int32_t first = d / panel * panel;
            stride = first + panel <= width ? panel : LANES;
            to = a->v_panels + (int64_t)first * rows * SUBS + i * rows * stride + d % panel;
        }
        if (d + LANES <= a->v_dims) transpose_k_dims(true, t->ptrs.k[i], a->v_dims, d, to, stride);
        else transpose_k_dims(false, t->ptrs.k[i], a->v_dims, d, to, stride);
    }
}

/* ------------------------------------------------------------------------------------------- tiles */

/* Scratch of sub-tile i. */
INLINE float *k_scratch(const folioi_attend_args *a, int i)
{
    return a->k_tile + (int64_t)i * SUB * columns_of(a->k_dims);
}

INLINE float *v_scratch(const folioi_attend_args *a, int i)
{
    return a->v_tile + (int64_t)i * columns_of(SUB) * folioi_out_stride(a->v_dims);
}

/* V of the tile, all of it at a time. */
static void load_values(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    int seen = t->first / SUB; /* sub-tiles before it may have no block */
    for (int i = seen; i * SUB < t->n; i++) {
        if (!a->keys.v_in_k) {
            load_v(a, plan, t, i, v_scratch(a, i));
            continue;
        }
        t->ptrs.v[i] = v_scratch(a, i);
        t->ptrs.v_stride[i] = plan->v_stride;
        transpose_k(a, t, i);
    }
    for (int i = 0; i < seen; i++) { /* products with these are made with weights of 0 */
        t->ptrs.v[i] = t->ptrs.v[seen];
        t->ptrs.v_stride[i] = t->ptrs.v_stride[seen];
    }
}

/* The tile's keys [t->t0, t->t0 + t->n). */
static void load_tile(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    int seen = t->first / SUB;
    t->panels = a->keys.v_in_k && plan->panels;
    for (int i = seen; i * SUB < t->n; i++) load_k(a, plan, t, i, k_scratch(a, i));
    for (int i = 0; i < seen; i++) /* scores of these are made and never used */
        t->ptrs.k[i] = t->ptrs.k[seen];
    load_values(a, plan, t);
}

/* -------------------------------------------------------------------------------- what is read next */

/* Numbers of a key's K that few rows convert at a time. Rows of tokens, though, are not read in short pieces: each would be
 * a place of its own in memory. */
INLINE int32_t slice_of(const tile_plan *plan, int64_t elem, bool words)
{
    int32_t row = has_rows(plan->k.stored->at) ? (int32_t)(256 / elem) : 0;
    int32_t slice = words ? 128 : SLICE;
    return row > slice ? row : slice;
}

/* Bytes from row to row from which on rows share too few sets of L1 (4 KiB a way) to wait there. */
enum { FAR_ROWS = 1024 };

/* How pieces of one side lie, of which `slice` bytes of each token are read at a time; false: not so that whole lines would
 * be read. */
INLINE bool shape_pieces(const key_side *side, int64_t elem, int32_t block_size, int32_t chunk,
                         int32_t slice, fetch_side *s)
{
    int32_t all = (int32_t)(side->dims * elem);
    slice = slice < all ? slice : all;
    s->slices = (all + slice - 1) / slice;
    s->at_once = SUBS_AT_ONCE * SUB / chunk;
    s->rows = 1;
    s->row_stride = 0;
    s->bytes = chunk * slice;
    s->slice_stride = s->bytes;
    s->near = true;
    if (address_is_dense(side->stored->at, block_size, side->dims) &&
        (s->slices == 1 || !has_rows(side->stored->at)))
        return true;
    s->rows = chunk;
    s->row_stride = side->token;
    s->bytes = slice;
    s->slice_stride = slice;
    s->near = side->token < FAR_ROWS;
    return has_rows(side->stored->at);
}

/* The piece with token `key`. Where pieces are contiguous they need not be in the order of tokens. */
INLINE const char *find_piece(const folioi_attend_args *a, const tile_plan *plan, key_side side,
                              int64_t elem, const fetch_side *s, const folioi_prefetch *prefetch,
                              int64_t key)
{
    if (s->rows == 1) side.token = side.dims * elem;
    return find_token(plan, &side, a->keys.block_size, prefetch->blocks, prefetch->kv_head, key);
}

/* Pieces of stored keys [key, prefetch->end): of K until f has `most_k`, of V until it has `most_v`. */
INLINE void add_pieces(const folioi_attend_args *a, const tile_plan *plan,
                       const folioi_prefetch *prefetch, int64_t key, int32_t most_k, int32_t most_v,
                       ahead *f, int32_t *num_k)
{
    const folioi_keys *keys = &a->keys;
    const int64_t elem = (int64_t)folio_dtype_size(keys->k.dtype);
    for (; key + plan->chunk <= prefetch->end && *num_k < most_k; key += plan->chunk) {
        int32_t i = (*num_k)++;
        f->k.piece[i] = find_piece(a, plan, plan->k, elem, &f->k, prefetch, key);
        if (i < most_v) f->v.piece[i] = find_piece(a, plan, plan->v, elem, &f->v, prefetch, key);
        if (keys->k.scales == NULL) continue;
        uint32_t at = (uint32_t)key, size = (uint32_t)keys->block_size;
        int64_t block = prefetch->blocks[at / size], token = at % size;
        __builtin_prefetch(keys->k.scales +
                           address_token(keys->k.scales_at, block, prefetch->kv_head, token));
        __builtin_prefetch(keys->v.scales +
                           address_token(keys->v.scales_at, block, prefetch->kv_head, token));
    }
}

/*
 * Lines at a time for few rows: as many as a step of products reads in place; half as many where a conversion and the
 * products of what it made both fetch. And how many lines they are ahead: what L1 holds beside what is computed, more
 * where conversions read in bursts.
 */
enum {
    HALF = SUBS_AT_ONCE > 1 ? SUBS_AT_ONCE / 2 : 1,
    LEAD = 32 * SUBS_AT_ONCE,
    FAR_LEAD = 52 * SUBS_AT_ONCE
};

/* Lines at a time, for many rows: at every step of a block of rows, with K two vectors of keys, with V two of dims. */
static int32_t many_lines(const folioi_attend_args *a, int64_t elem)
{
#if defined(OWN_STRIP)
    return (void)a, (void)elem, 4;
#endif
    int64_t steps = (VECS / 2) * a->k_dims + (a->v_dims / (2 * LANES) + 1) * (int64_t)TILE;
    int64_t lines = TILE * (a->k_dims + (a->keys.v_in_k ? 0 : a->v_dims)) * elem / 64;
    int64_t all = (a->rows + MAX_ROWS - 1) / MAX_ROWS * steps / (DOT ? 2 : 1);
    return lines > 2 * all ? 4 : lines > all ? 2 : 1;
}

/*
 * What is fetched while the tile is computed. Few rows: what they will read next, from a distance of LEAD on. Many rows:
 * all of the next tile.
 */
static void look_ahead(const folioi_attend_args *a, const tile_plan *plan, const tile *t, bool few,
                       ahead *f)
{
    const folioi_keys *keys = &a->keys;
    const int64_t elem = (int64_t)folio_dtype_size(t->kv);
    const int32_t chunk = plan->chunk, pieces = chunk > 0 ? TILE / chunk : 0;
    const bool in_place = t->words ? plan->k.form != AS_UNITS : plan->k.in_place || t->bytes;
    const bool v_in_place = t->words ? plan->v.form != AS_COLUMNS : plan->v.in_place;
    const bool in_slices = few && !in_place && plan->k.in_slices;
    f->width = 0;
    if (chunk == 0 ||
        !shape_pieces(&plan->k, elem, keys->block_size, chunk,
                      in_slices ? (int32_t)(slice_of(plan, elem, t->words) * elem) : INT32_MAX,
                      &f->k) ||
        (!keys->v_in_k && !shape_pieces(&plan->v, elem, keys->block_size, chunk, INT32_MAX, &f->v)))
        return;
    f->k.near &= a->deep_l1;
    if (!keys->v_in_k) f->v.near &= a->deep_l1;
    f->alternates = !few && !t->bytes;
    if (!few) f->k.at_once = f->v.at_once = 1;
    f->k.side_by_side = few && in_place;
    f->v.side_by_side = false;
    f->k.width = t->bytes ? 4 : !few ? many_lines(a, elem) : in_place ? SUBS_AT_ONCE : HALF;
    f->v.width = !few ? f->k.width : v_in_place ? SUBS_AT_ONCE : HALF;
    int32_t num = 0;
    int32_t of_v = keys->v_in_k ? 0 : pieces;
    add_pieces(a, plan, &a->prefetch[0], few ? t->t0 : t->t0 + (int64_t)TILE, pieces, of_v, f,
               &num);
    if (!few) add_pieces(a, plan, &a->prefetch[1], a->prefetch[1].key, pieces, of_v, f, &num);
    f->k.num = num;
    f->v.num = keys->v_in_k ? 0 : num;
    if (few && num == pieces) {
        int32_t more = pieces + SUBS_AT_ONCE * SUB / chunk;
        add_pieces(a, plan, &a->prefetch[0], t->t0 + (int64_t)TILE, more, 0, f, &num);
        add_pieces(a, plan, &a->prefetch[1], a->prefetch[1].key, more, 0, f, &num);
    }
    f->num_k = num;
    if (num == 0) return;
    start_piece(f, &f->k, 0);
    start_lines(f);
    if (few) skip_lines(f, in_place && v_in_place ? LEAD : FAR_LEAD);
}

#endif
