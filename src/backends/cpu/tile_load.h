/*
 * tile_load.h: the keys of a tile in the form that attend_body.h reads: sub-tiles of 16 keys with K [steps][16] and
 * V [16][v_stride]. They are read in place if the cache has this form; otherwise they are converted to scratch, from
 * native sub-tiles of another type or from rows (key_rows.h). With v_in_k, V is K's sub-tile transposed.
 */
#ifndef FOLIOI_TILE_LOAD_H
#define FOLIOI_TILE_LOAD_H

#include "backends/cpu/key_rows.h"

/* How the cache's K and V are read. */
typedef struct {
    bool in_place;    /* as they lie                                               */
    bool packed;      /* native sub-tiles of 16 tokens                             */
    int32_t v_stride; /* of scratch and of V in place                              */
    bool panels;      /* every block of rows reads V in panels: pack_panels        */
} tile_plan;

INLINE bool k_is_native(const folioi_address *at, int pack)
{
    return at->token_tile == SUB && at->dim_tile == pack && at->dim_tile_stride == SUB * pack &&
           at->token_stride == pack && (pack == 1 || at->dim_stride == 1);
}

INLINE tile_plan plan_tiles(const folioi_attend_args *a, const folio_dtype kv)
{
    const folioi_keys *keys = &a->keys;
    tile_plan p = {.v_stride = (int32_t)folioi_out_stride(a->v_dims)};
    if (keys->stored_len == 0) return p;
    const folioi_address *v = keys->v.at;
    int pack = 4 / (int)folio_dtype_size(kv);
    bool tiles = k_is_native(keys->k.at, pack);
    if (keys->v_in_k) {
        p.packed = tiles;
        p.in_place = tiles && (DOT ? kv == FOLIO_BF16 : kv == FOLIO_F32);
        return p;
    }
    if (pack == 2)
        tiles &= v->token_tile == 2 && v->token_tile_stride == 2 * a->v_dims &&
                 v->token_stride == 1 && v->dim_tile == 1 && v->dim_tile_stride == 2;
    else tiles &= has_rows(v) && v->token_tile_stride == a->v_dims;
    p.packed = tiles && a->v_dims % SUB == 0;
    p.in_place = p.packed && (DOT ? kv == FOLIO_BF16 : kv == FOLIO_F32);
    return p;
}

/* Of sixteen tokens of a block; what scales a layout has, it has token by token. */
INLINE void load_scales(const folioi_kv_side *side, int64_t block, int64_t head, int64_t token,
                        float fp8_scale, float *to)
{
    if (side->scales == NULL) {
        for (int i = 0; i < SUB; i++) to[i] = fp8_scale;
        return;
    }
    const float *from = side->scales + address_token(side->scales_at, block, head, token);
    int64_t stride = side->scales_at->token_tile_stride;
    if (stride == 1) memcpy(to, from, SUB * sizeof *to);
    else
        for (int i = 0; i < SUB; i++) to[i] = from[i * stride];
}

#if !defined(DOT_BF16)
/* to [n][stride] of rows, zeros past their end. */
INLINE void rows_to_rows(const int type, const bool scaled, const key_rows *r, int32_t dims,
                         int32_t n, float *to, int64_t stride)
{
    const int64_t elem = (int64_t)folio_dtype_size((folio_dtype)type);
    for (int32_t j = 0; j < n; j++, to += stride) {
        int32_t d = 0;
        for (; d + LANES <= dims; d += LANES) {
            vec x = vec_load_as(type, r->row[j] + d * elem);
            vec_store(to + d, scaled ? vec_mul(x, vec_set1(r->scale[j])) : x);
        }
        for (; d < dims; d++) to[d] = load_f32(r->row[j], (folio_dtype)type, d) * r->scale[j];
        for (; d < stride; d++) to[d] = 0.0f;
    }
}

/* Rows of an 8-bit cache are the only ones with scales, also where they were made f32. */
#define ROW_TYPES(X)                                                                               \
    X(FOLIO_F32, true)                                                                             \
    X(FOLIO_F16, false)                                                                            \
    X(FOLIO_BF16, false) X(FOLIO_FP8_E4M3, true) X(FOLIO_FP8_E5M2, true) X(FOLIO_INT8, true)

static void k_of_rows(const key_rows *r, int32_t dims, float *k)
{
    switch (r->type) {
#define CASE(type, scaled)                                                                         \
    case type: rows_to_columns(type, scaled, r, dims, k); return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

static void v_of_rows(const key_rows *r, int32_t dims, int32_t n, float *v, int64_t stride)
{
    switch (r->type) {
#define CASE(type, scaled)                                                                         \
    case type: rows_to_rows(type, scaled, r, dims, n, v, stride); return;
        ROW_TYPES(CASE)
#undef CASE
    default: return;
    }
}

/* --------------------------------------------------------------------------------- native sub-tiles */

/* One of another type: K [k_dims][16], V [16][v_stride], f32. */
INLINE void load_packed(const folioi_attend_args *a, const folio_dtype kv, int32_t key, float *k,
                        float *v, int64_t v_stride)
{
    const folioi_keys *keys = &a->keys;
    const int pack = kv == FOLIO_F16 || kv == FOLIO_BF16 ? 2 : 4;
    int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
    int32_t head = keys->kv_head;
    const char *from = keys->k.base + address_token(keys->k.at, block, head, token) * (4 / pack);
    float k_scale[SUB], v_scale[SUB];
    load_scales(&keys->k, block, head, token, keys->k_scale, k_scale);
    load_scales(&keys->v, block, head, token, keys->v_scale, v_scale);
    for (int32_t d = 0; d < a->k_dims / pack; d++)
        for (int i = 0; i < SUB; i += LANES)
            UNROLL_FOR (int part = 0; part < pack; part++) {
                vec x = vec_load_packed((int)kv, part, (const uint32_t *)from + d * SUB + i);
                if (pack == 4) x = vec_mul(x, vec_load(k_scale + i));
                vec_store(k + (d * pack + part) * SUB + i, x);
            }
    if (keys->v_in_k) return;
    from = keys->v.base + address_token(keys->v.at, block, head, token) * (4 / pack);
    for (int32_t j = 0; pack == 2 && j < SUB / 2; j++)
        for (int32_t d = 0; d < a->v_dims; d += LANES)
            UNROLL_FOR (int part = 0; part < 2; part++)
                vec_store(
                    v + (2 * j + part) * v_stride + d,
                    vec_load_packed((int)kv, part, (const uint32_t *)from + j * a->v_dims + d));
    for (int32_t j = 0; pack == 4 && j < SUB; j++)
        for (int32_t d = 0; d < a->v_dims; d += LANES)
            vec_store(v + j * v_stride + d,
                      vec_mul(vec_load_bytes((int)kv, (const uint8_t *)from + j * a->v_dims + d),
                              vec_set1(v_scale[j])));
}

static void load_native(const folioi_attend_args *a, folio_dtype kv, int32_t key, float *k,
                        float *v, int64_t v_stride)
{
    switch (kv) {
#define CASE(type)                                                                                 \
    case type: load_packed(a, type, key, k, v, v_stride); return;
        CASE(FOLIO_F16)
        CASE(FOLIO_BF16)
        CASE(FOLIO_FP8_E4M3)
        CASE(FOLIO_FP8_E5M2)
        CASE(FOLIO_INT8)
#undef CASE
    default: return;
    }
}
#endif

/* ------------------------------------------------------------------------------------ pairs of bf16 */

#if defined(DOT_BF16)
/* Rows of 8-bit numbers that were made f32, as bf16 in their place, exactly. */
static void round_rows(key_rows *r, int32_t dims, float *wide)
{
    for (int j = 0; j < SUB; j++) {
        char *to = (char *)(wide + (int64_t)j * dims);
        if (r->row[j] != to) continue; /* no_row: zeros in any type */
        int32_t d = 0;
        for (; d + LANES <= dims; d += LANES)
            vec_store_bf16((float *)(void *)to, d / LANES, vec_load((const float *)(void *)to + d));
        for (; d < dims; d++) {
            float x;
            memcpy(&x, to + d * 4, sizeof x);
            uint16_t y = f32_to_bf16(x);
            memcpy(to + d * 2, &y, sizeof y);
        }
    }
    r->type = FOLIO_BF16;
}

/* K [k_dims / 2][16] and V [8][v_stride] of rows; scales are left to others. */
static void load_pairs(const folioi_attend_args *a, const key_source *k, const key_source *v,
                       folio_dtype kv, int32_t key, int32_t n, const tile_plan *plan, float *k_to,
                       float *v_to, float *k_scale, float *v_scale)
{
    float *k_wide = a->wide, *v_wide = a->wide + SUB * (int64_t)a->k_dims;
    bool direct = kv == FOLIO_BF16;
    key_rows kr = find_rows(a, k, kv, direct, key, n, k_wide);
    memcpy(k_scale, kr.scale, sizeof kr.scale);
    memcpy(v_scale, kr.scale, sizeof kr.scale);
    if (kr.type == FOLIO_F32) round_rows(&kr, a->k_dims, k_wide);
    rows_to_columns(FOLIO_F32, false, &kr, a->k_dims / 2, k_to);
    if (a->keys.v_in_k) return;
    key_rows vr = find_rows(a, v, kv, direct, key, n, v_wide);
    memcpy(v_scale, vr.scale, sizeof vr.scale);
    if (vr.type == FOLIO_F32) round_rows(&vr, a->v_dims, v_wide);
    for (int j = 0; j < SUB; j += 2, v_to += plan->v_stride) {
        const uint16_t *low = (const void *)vr.row[j], *high = (const void *)vr.row[j + 1];
        int32_t d = 0;
        for (; d + LANES <= a->v_dims; d += LANES)
            vec_store(v_to + d, vec_interleave(low + d, high + d));
        for (; d < plan->v_stride; d++)
            v_to[d] = d < a->v_dims ? f32_of_bits(low[d] | (uint32_t)high[d] << 16) : 0.0f;
    }
}

/* A native sub-tile of 8-bit numbers: the same. */
INLINE void load_packed_pairs(const folioi_attend_args *a, const folio_dtype kv, int32_t key,
                              float *k_to, float *v_to, int64_t v_stride, float *k_scale,
                              float *v_scale)
{
    const folioi_keys *keys = &a->keys;
    int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
    int32_t head = keys->kv_head;
    load_scales(&keys->k, block, head, token, keys->k_scale, k_scale);
    load_scales(&keys->v, block, head, token, keys->v_scale, v_scale);
    const char *from = keys->k.base + address_token(keys->k.at, block, head, token);
    const byte_table table = byte_table_of((int)kv);
    for (int32_t d = 0; d < a->k_dims / 4; d++) {
        vec pair[2];
        vec_pairs_of_fours(&table, (int)kv, from + (int64_t)d * 4 * SUB, pair);
        vec_store(k_to + 2 * d * SUB, pair[0]);
        vec_store(k_to + (2 * d + 1) * SUB, pair[1]);
    }
    if (keys->v_in_k) return;
    from = keys->v.base + address_token(keys->v.at, block, head, token);
    for (int j = 0; j < SUB; j += 2, v_to += v_stride, from += 2 * (int64_t)a->v_dims) {
        const char *other = from + a->v_dims;
        int32_t d = 0;
        vec pair[4];
        for (; d + 4 * LANES <= a->v_dims; d += 4 * LANES) {
            vec_pairs_of_rows(&table, (int)kv, 4, true, from + d, other + d, pair);
            for (int i = 0; i < 4; i++) vec_store(v_to + d + i * LANES, pair[i]);
        }
        for (; d < a->v_dims; d += LANES) {
            vec_pairs_of_rows(&table, (int)kv, 1, true, from + d, other + d, pair);
            vec_store(v_to + d, pair[0]);
        }
    }
}

static void load_native_pairs(const folioi_attend_args *a, folio_dtype kv, int32_t key, float *k,
                              float *v, int64_t v_stride, float *k_scale, float *v_scale)
{
    switch (kv) {
#define CASE(type)                                                                                 \
    case type: load_packed_pairs(a, type, key, k, v, v_stride, k_scale, v_scale); return;
        CASE(FOLIO_FP8_E4M3)
        CASE(FOLIO_FP8_E5M2)
        CASE(FOLIO_INT8)
#undef CASE
    default: return;
    }
}
#endif

/* ------------------------------------------------------------------------------------------ V in K */

/* One vector of dims of V from d on: of K [steps][16] to rows of V or of pairs. whole: all are V's, else zeros follow. */
INLINE void transpose_dims(const bool whole, const float *k, int32_t v_dims, int32_t d, float *to,
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
        if (d + LANES <= a->v_dims) transpose_dims(true, t->ptrs.k[i], a->v_dims, d, to, stride);
        else transpose_dims(false, t->ptrs.k[i], a->v_dims, d, to, stride);
    }
}

/* ------------------------------------------------------------------------------------------- tiles */

/* One sub-tile that does not lie as the kernels want it, to k and v. */
static void load_sub(const folioi_attend_args *a, folio_dtype kv, const tile_plan *plan,
                     int32_t key, int32_t n, float *k, float *v, tile *t)
{
    const folioi_keys *keys = &a->keys;
    key_source ks = {&keys->k, &keys->new_k, keys->k_scale, a->k_dims, keys->rotate != NULL};
    key_source vs = {&keys->v, &keys->new_v, keys->v_scale, a->v_dims, false};
    bool native = plan->packed && key + n <= keys->stored_len;
#if defined(DOT_BF16)
    float *k_scale = t->k_scale + (key - t->t0), *v_scale = t->v_scale + (key - t->t0);
    if (native && kv != FOLIO_BF16)
        load_native_pairs(a, kv, key, k, v, plan->v_stride, k_scale, v_scale);
    else load_pairs(a, &ks, &vs, kv, key, n, plan, k, v, k_scale, v_scale);
#else
    (void)t;
    if (native && kv != FOLIO_F32) {
        load_native(a, kv, key, k, v, plan->v_stride);
        return;
    }
    key_rows r = find_rows(a, &ks, kv, true, key, n, a->wide);
    k_of_rows(&r, a->k_dims, k);
    if (keys->v_in_k) return;
    r = find_rows(a, &vs, kv, true, key, n, a->wide);
    v_of_rows(&r, a->v_dims, n, v, plan->v_stride);
#endif
}

/* Few rows take a whole tile of bytes as it lies: attend_bytes.h. */
static bool find_bytes(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    const folioi_keys *keys = &a->keys;
    if (!DOT || folio_dtype_size(t->kv) != 1 || !plan->packed || keys->v_in_k || a->rows > 4 ||
        t->first > 0 || t->n < TILE || t->t0 > keys->stored_len - TILE)
        return false;
    t->scaled = true;
    for (int i = 0; i < SUBS; i++) {
        int32_t key = t->t0 + i * SUB, head = keys->kv_head;
        int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
        t->ptrs.k[i] = (const void *)(keys->k.base + address_token(keys->k.at, block, head, token));
        t->ptrs.v[i] = (const void *)(keys->v.base + address_token(keys->v.at, block, head, token));
        load_scales(&keys->k, block, head, token, keys->k_scale, t->k_scale + i * SUB);
        load_scales(&keys->v, block, head, token, keys->v_scale, t->v_scale + i * SUB);
    }
    return true;
}

/* The tile's keys [t->t0, t->t0 + t->n). */
static void load_tile(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    const folioi_keys *keys = &a->keys;
    folio_dtype kv = t->kv;
    int32_t pair = DOT ? 2 : 1;
    int seen = t->first / SUB; /* sub-tiles before it may have no block */
    t->scaled = DOT && kv != FOLIO_BF16;
    t->panels = keys->v_in_k && plan->panels;
    for (int i = seen; i * SUB < t->n; i++) {
        int32_t key = t->t0 + i * SUB, n = t->n - i * SUB < SUB ? t->n - i * SUB : SUB;
        bool stored = key + n <= keys->stored_len;
        float *k = a->k_tile + (int64_t)i * SUB * a->k_dims / pair;
        float *v = a->v_tile + (int64_t)i * SUB * plan->v_stride / pair;
        t->ptrs.v_stride[i] = plan->v_stride;
        /* with pairs an odd number of keys leaves a neighbour that nobody may see */
        if (plan->in_place && stored && (!DOT || n % 2 == 0)) {
            int64_t block = keys->blocks[key / keys->block_size], token = key % keys->block_size;
            int64_t elem = DOT ? 2 : 4;
            t->ptrs.k[i] =
                (const float *)(keys->k.base +
                                address_token(keys->k.at, block, keys->kv_head, token) * elem);
            t->ptrs.v[i] =
                (const float *)(keys->v.base +
                                address_token(keys->v.at, block, keys->kv_head, token) * elem);
        } else {
            load_sub(a, kv, plan, key, n, k, v, t);
            t->ptrs.k[i] = k;
            t->ptrs.v[i] = v;
        }
        if (!keys->v_in_k) continue;
        transpose_k(a, t, i);
        t->ptrs.v[i] = v;
    }
    for (int i = 0; i < seen; i++) { /* scores of these are made and never used */
        t->ptrs.k[i] = t->ptrs.k[seen];
        t->ptrs.v[i] = t->ptrs.v[seen];
        t->ptrs.v_stride[i] = t->ptrs.v_stride[seen];
    }
}

INLINE void fetch_scales(const folioi_kv_side *side, int64_t block, int64_t head, int64_t token)
{
    if (side->scales != NULL)
        __builtin_prefetch(side->scales + address_token(side->scales_at, block, head, token));
}

/* What will be read after t, as much as a tile has, where it lies in whole sub-tiles. */
INLINE void look_ahead(const folioi_attend_args *a, const tile_plan *plan, tile *t)
{
    const folioi_keys *keys = &a->keys;
    const int64_t elem = (int64_t)folio_dtype_size(t->kv);
    const int pieces = keys->v_in_k ? 1 : 2; /* of a sub-tile */
    t->next.num = t->next.at = t->next.done = 0;
    if (!plan->packed) return;
    /* of a block's steps, with K two vectors of keys at a time and with V two of dims */
    int64_t steps = (VECS / 2) * a->k_dims + (a->v_dims / (2 * LANES) + 1) * (int64_t)TILE;
    int64_t lines = TILE * (a->k_dims + (pieces - 1) * (int64_t)a->v_dims) * elem / 64;
    int64_t all = (a->rows + MAX_ROWS - 1) / MAX_ROWS * steps / (DOT ? 2 : 1);
    t->next.pace = (int32_t)((lines + all - 1) / all);
    for (int s = 0; s < 2; s++) {
        int64_t key = s == 0 ? t->t0 + (int64_t)TILE : a->soon[s].key;
        for (; key + SUB <= a->soon[s].end && t->next.num < pieces * SUBS; key += SUB) {
            uint32_t in_blocks = (uint32_t)key, size = (uint32_t)keys->block_size;
            int64_t block = a->soon[s].blocks[in_blocks / size], token = in_blocks % size;
            int i = t->next.num;
            fetch_scales(&keys->k, block, a->soon[s].kv_head, token);
            fetch_scales(&keys->v, block, a->soon[s].kv_head, token);
            t->next.piece[i] =
                keys->k.base + address_token(keys->k.at, block, a->soon[s].kv_head, token) * elem;
            t->next.bytes[i] = (int32_t)(SUB * a->k_dims * elem);
            t->next.num = i + pieces;
            if (pieces == 1) continue;
            t->next.piece[i + 1] =
                keys->v.base + address_token(keys->v.at, block, a->soon[s].kv_head, token) * elem;
            t->next.bytes[i + 1] = (int32_t)(SUB * a->v_dims * elem);
        }
    }
}

#endif
