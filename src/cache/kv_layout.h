/*
 * kv_layout.h: where one number of K or V lies. Every layout, native and x-packed included, is one
 * address formula with different strides (all in elements):
 *
 *   block * B + head * H + (t / tt) * T1 + (t % tt) * T0 + (d / dt) * D1 + (d % dt ^ (t % tt) * X) * D0
 *
 * so code that moves, reads or writes does not branch on a layout's name. X is not 0 only in a device's pages: there
 * 16-byte units are XORed, so that eight rows can be read at once without bank conflicts.
 */
#ifndef FOLIOI_KV_LAYOUT_H
#define FOLIOI_KV_LAYOUT_H

#include "core/checked.h"
#include "core/dtype.h"
#include "core/status.h"

/** What every backend takes. */
#define FOLIOI_MAX_HEAD_SIZE 576

typedef struct folioi_address {
    int64_t block, head;
    int64_t token_tile_stride, token_stride;
    int64_t dim_tile_stride, dim_stride;
    int32_t token_tile, dim_tile; /* 1: plain rows */
    int32_t swizzle;              /* X above       */
} folioi_address;

/** A cache description resolved: arrays as the public header shows them, and their addresses. With v_in_k the arrays of V
 * are empty, and its addresses are K's: whoever reads by the formula finds V there. */
typedef struct folioi_kv_format {
    folio_kv_cache_desc desc; /* defaults filled in */
    folio_kv_array k, v, k_scales, v_scales;
    folioi_address k_at, v_at, k_scales_at, v_scales_at;
    int64_t layer_bytes;
    bool on_device; /* NATIVE is a device's: pages, or plain rows */
} folioi_kv_format;

/*
 * A device's native pages, stored as tensor cores read them: of every 8 tokens K, then V, each in panels of 64 dims whose
 * rows of 128 bytes have their 16-byte units XORed with the row's number.
 */
enum { FOLIOI_PAGE_TOKENS = 8, FOLIOI_PAGE_DIMS = 64, FOLIOI_PAGE_SWIZZLE = 8 };

/** Are native caches of such K and V stored in pages on a device? */
static inline bool kv_has_pages(folio_dtype dtype, int32_t k_head_size, int32_t v_head_size,
                                int32_t block_size)
{
    return dtype_is_16_bit(dtype) && k_head_size % FOLIOI_PAGE_DIMS == 0 &&
           v_head_size % FOLIOI_PAGE_DIMS == 0 && block_size % (2 * FOLIOI_PAGE_TOKENS) == 0;
}

/** One layer of a cache: what kernels see. */
typedef struct folioi_kv_layer {
    void *k, *v;
    float *k_scales, *v_scales;
    const folioi_kv_format *format;
} folioi_kv_layer;

/** Which of K and V. */
typedef enum folioi_k_or_v { FOLIOI_K, FOLIOI_V } folioi_k_or_v;

/** The last of them that is stored: what moves goes from FOLIOI_K to it. */
static inline folioi_k_or_v kv_last(const folioi_kv_format *format)
{
    return format->desc.v_in_k ? FOLIOI_K : FOLIOI_V;
}

/** K or V of one layer. */
typedef struct folioi_kv_side {
    char *base;
    float *scales; /* INT8 only */
    const folioi_address *at, *scales_at;
    int32_t dims;
    folio_dtype dtype;
} folioi_kv_side;

#if !defined(__cplusplus)
/** A layer in one buffer, as the format places it. */
static inline folioi_kv_layer kv_layer_at(const folioi_kv_format *f, char *base)
{
    folioi_kv_layer layer = {.k = base, .v = base + f->v.offset_bytes, .format = f};
    if (f->desc.dtype != FOLIO_INT8) return layer;
    layer.k_scales = (float *)(void *)(base + f->k_scales.offset_bytes);
    layer.v_scales =
        f->desc.v_in_k ? layer.k_scales : (float *)(void *)(base + f->v_scales.offset_bytes);
    return layer;
}

static inline folioi_kv_side kv_side(const folioi_kv_layer *layer, folioi_k_or_v which)
{
    const folioi_kv_format *f = layer->format;
    if (which == FOLIOI_K)
        return (folioi_kv_side){layer->k,        layer->k_scales,     &f->k_at,
                                &f->k_scales_at, f->desc.k_head_size, f->desc.dtype};
    return (folioi_kv_side){layer->v,        layer->v_scales,     &f->v_at,
                            &f->v_scales_at, f->desc.v_head_size, f->desc.dtype};
}
#endif

/** Element index of dim 0 of (block, head, token). */
SHARED_INLINE int64_t address_token(const folioi_address *at, int64_t block, int64_t head,
                                    int64_t token)
{
    return block * at->block + head * at->head + token / at->token_tile * at->token_tile_stride +
           token % at->token_tile * at->token_stride;
}

/** What dim d of the token adds to it. Divisions of 32 bits: those of 64 take four times as long on many CPUs. */
SHARED_INLINE int64_t address_dim(const folioi_address *at, int64_t token, int64_t d)
{
    int32_t t = (int32_t)token, dim = (int32_t)d;
    int64_t in_tile = dim % at->dim_tile ^ t % at->token_tile * at->swizzle;
    return dim / at->dim_tile * at->dim_tile_stride + in_tile * at->dim_stride;
}

/** Do the numbers of a head's first tokens lie without a gap? Then the last row ends where they do. */
SHARED_INLINE bool address_is_dense(const folioi_address *at, int64_t tokens, int64_t dims)
{
    return address_token(at, 0, 0, tokens - 1) + address_dim(at, 0, dims - 1) == tokens * dims - 1;
}

/** Tokens of a head that lie without a gap: all of a block, a tile of them, or 0: not even that. */
SHARED_INLINE int32_t address_run(const folioi_address *at, int32_t tokens, int32_t dims)
{
    if (address_is_dense(at, tokens, dims)) return tokens;
    return at->token_tile > 1 && address_is_dense(at, at->token_tile, dims) ? at->token_tile : 0;
}

/** Are a token's numbers neighbours, in order? */
SHARED_INLINE bool address_has_rows(const folioi_address *at)
{
    return at->dim_tile_stride == at->dim_tile && (at->dim_tile == 1 || at->dim_stride == 1) &&
           at->swizzle == 0;
}

/** Is the order within a head the same on both sides? */
SHARED_INLINE bool address_same_order(const folioi_address *a, const folioi_address *b)
{
    return a->token_tile == b->token_tile && a->token_tile_stride == b->token_tile_stride &&
           a->token_stride == b->token_stride && a->dim_tile == b->dim_tile &&
           a->dim_tile_stride == b->dim_tile_stride && a->dim_stride == b->dim_stride &&
           a->swizzle == b->swizzle;
}

/** The fp8 scale of a kv head: its own, where each has one, or the one of all. */
SHARED_INLINE float head_scale(const float *each, float all, int64_t head)
{
    return each != 0 ? each[head] : all;
}

/** Check a description and fill in defaults and the layout's own strides. on_device: NATIVE is a device's. */
folio_status folioi_kv_format_init(const folio_kv_cache_desc *desc, bool on_device,
                                   folioi_kv_format *format);

/** The native format's name and version: caches that agree in both hold the same bytes. */
const char *folioi_layout_id(const folioi_kv_format *format);
#define FOLIOI_LAYOUT_VERSION 1

/** Elements from an array's first past its last; false past int64_t. */
bool folioi_array_extent(const folio_kv_array *array, int64_t *elements);

/** Do an array's dims times its strides, of dims of 1 too, fit as bytes? */
bool folioi_array_fits(const folio_kv_array *array, int64_t elem);

/** With v_in_k, V is found where K is. */
void folioi_kv_format_view_v(folioi_kv_format *format);

/** Put other block, token and head strides (0: keep) into an array and its address. */
void folioi_array_restride(folio_kv_array *array, folioi_address *at,
                           const folio_kv_strides *strides, bool token_before_head);

#endif
