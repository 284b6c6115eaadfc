/*
 * kv_layout.c: the layouts as a table of dimension orders, and the arithmetic that makes dims,
 * strides, bytes and addresses of a row of it.
 */
#include "cache/kv_layout.h"

#include "core/alloc.h"

#include <string.h>

enum role { END, BLOCK, HEAD, TOKEN_TILE, TOKEN, DIM_TILE, DIM };
enum sharing { APART, PER_BLOCK, PER_HEAD, PER_TILE }; /* how K and V share a layer's buffer */

typedef struct {
    uint8_t k[7], v[7]; /* roles, outermost first */
    enum sharing sharing;
} order;

/* clang-format off */
static const order orders[] = {
    [FOLIO_LAYOUT_NATIVE] = {{BLOCK, HEAD, TOKEN_TILE, DIM_TILE, TOKEN, DIM},
                             {BLOCK, HEAD, TOKEN_TILE, DIM, TOKEN}, PER_HEAD},
    [FOLIO_LAYOUT_NHD] = {{BLOCK, TOKEN, HEAD, DIM}, {BLOCK, TOKEN, HEAD, DIM}, APART},
    [FOLIO_LAYOUT_HND] = {{BLOCK, HEAD, TOKEN, DIM}, {BLOCK, HEAD, TOKEN, DIM}, APART},
    [FOLIO_LAYOUT_INTERLEAVED_NHD] = {{BLOCK, TOKEN, HEAD, DIM}, {BLOCK, TOKEN, HEAD, DIM}, PER_BLOCK},
    [FOLIO_LAYOUT_INTERLEAVED_HND] = {{BLOCK, HEAD, TOKEN, DIM}, {BLOCK, HEAD, TOKEN, DIM}, PER_BLOCK},
    [FOLIO_LAYOUT_XPACKED] = {{BLOCK, HEAD, DIM_TILE, TOKEN, DIM}, {BLOCK, HEAD, DIM, TOKEN}, APART},
    [FOLIO_LAYOUT_XPACKED_1] = {{BLOCK, HEAD, DIM_TILE, TOKEN, DIM}, {BLOCK, HEAD, DIM, TOKEN}, APART},
    [FOLIO_LAYOUT_STRIDED] = {{BLOCK, TOKEN, HEAD, DIM}, {BLOCK, TOKEN, HEAD, DIM}, APART},
};
/* clang-format on */
static const uint8_t native_rows[7] = {BLOCK, HEAD, TOKEN, DIM};
static const uint8_t scale_order[7] = {BLOCK, HEAD, TOKEN};

static bool has_role(const uint8_t *roles, enum role role)
{
    return strchr((const char *)roles, role) != NULL;
}

/* Dense dims and strides of one array; false past int64_t. */
static bool lay_out(const folio_kv_cache_desc *desc, const uint8_t *roles, int64_t head_size,
                    int32_t token_tile, int32_t dim_tile, folio_kv_array *array, folioi_address *at)
{
    if (!has_role(roles, TOKEN_TILE)) token_tile = 1;
    if (!has_role(roles, DIM_TILE)) dim_tile = 1;
    *array = (folio_kv_array){.num_dims = (int32_t)strlen((const char *)roles)};
    *at = (folioi_address){.token_tile = token_tile, .dim_tile = dim_tile};
    for (int i = 0; i < 6; i++) array->dims[i] = array->strides[i] = 1;
    int64_t stride = 1;
    for (int i = array->num_dims - 1; i >= 0; i--) {
        int64_t dim = 1;
        switch ((enum role)roles[i]) {
        case BLOCK:
            dim = desc->num_blocks;
            at->block = stride;
            break;
        case HEAD:
            dim = desc->num_kv_heads;
            at->head = stride;
            break;
        case TOKEN_TILE:
            dim = desc->block_size / token_tile;
            at->token_tile_stride = stride;
            break;
        case TOKEN:
            dim = token_tile > 1 ? token_tile : desc->block_size;
            *(token_tile > 1 ? &at->token_stride : &at->token_tile_stride) = stride;
            break;
        case DIM_TILE:
            dim = head_size / dim_tile;
            at->dim_tile_stride = stride;
            break;
        case DIM:
            dim = has_role(roles, DIM_TILE) ? dim_tile : head_size;
            *(has_role(roles, DIM_TILE) ? &at->dim_stride : &at->dim_tile_stride) = stride;
            break;
        case END: break;
        }
        array->dims[i] = dim;
        array->strides[i] = stride;
        if (!checked_mul(stride, dim, &stride)) return false;
    }
    return true;
}

bool folioi_array_extent(const folio_kv_array *array, int64_t *elements)
{
    *elements = 1;
    for (int i = 0; i < array->num_dims; i++) {
        int64_t span;
        if (!checked_mul(array->dims[i] - 1, array->strides[i], &span)) return false;
        if (!checked_add(*elements, span, elements)) return false;
    }
    return true;
}

bool folioi_array_fits(const folio_kv_array *array, int64_t elem)
{
    int64_t all = 0;
    for (int i = 0; i < array->num_dims; i++) {
        int64_t span;
        if (!checked_mul(array->dims[i], array->strides[i], &span)) return false;
        if (!checked_add(all, span, &all)) return false;
    }
    return checked_mul(all, elem, &all) && all <= MAX_EXTENT;
}

void folioi_array_restride(folio_kv_array *array, folioi_address *at,
                           const folio_kv_strides *strides, bool token_before_head)
{
    int token_dim = token_before_head ? 1 : 2, head_dim = token_before_head ? 2 : 1;
    if (strides->block) array->strides[0] = at->block = strides->block;
    if (strides->head) array->strides[head_dim] = at->head = strides->head;
    if (strides->token) array->strides[token_dim] = at->token_tile_stride = strides->token;
}

static folio_status check_desc(const folio_kv_cache_desc *d)
{
    REQUIRE(d->num_layers >= 1, "KV cache: num_layers is %d, at least 1 is needed", d->num_layers);
    REQUIRE(d->num_blocks >= 1 && d->num_blocks <= INT32_MAX,
            "KV cache: num_blocks is %lld, outside [1, 2147483647]", (long long)d->num_blocks);
    REQUIRE(d->block_size >= 1 && d->block_size <= 4096,
            "KV cache: block_size is %d, outside [1, 4096]", d->block_size);
    REQUIRE(d->num_kv_heads >= 1, "KV cache: num_kv_heads is %d, at least 1 is needed",
            d->num_kv_heads);
    REQUIRE(d->k_head_size >= 8 && d->k_head_size % 8 == 0,
            "KV cache: k_head_size is %d, not a positive multiple of 8", d->k_head_size);
    REQUIRE(d->v_head_size >= 8 && d->v_head_size % 8 == 0,
            "KV cache: v_head_size is %d, not a positive multiple of 8", d->v_head_size);
    REQUIRE(d->dtype != 0, "KV cache: dtype is 0; it must be given");
    REQUIRE(dtype_is_kv(d->dtype), "KV cache: dtype %d (%s) is not a type of caches", (int)d->dtype,
            folio_dtype_name(d->dtype));
    REQUIRE((unsigned)d->layout < FOLIO_NUM_LAYOUTS, "KV cache: layout %d is unknown",
            (int)d->layout);
    REQUIRE(!d->v_in_k || d->layout == FOLIO_LAYOUT_NATIVE || d->layout == FOLIO_LAYOUT_NHD ||
                d->layout == FOLIO_LAYOUT_HND || d->layout == FOLIO_LAYOUT_STRIDED,
            "KV cache: v_in_k: layout %s is not one of native, nhd, hnd and strided",
            folio_layout_name(d->layout));
    REQUIRE(orders[d->layout].sharing != PER_BLOCK || d->k_head_size == d->v_head_size,
            "KV cache: layout %s needs equal head sizes, k_head_size is %d and v_head_size %d",
            folio_layout_name(d->layout), d->k_head_size, d->v_head_size);
    int32_t x = 16 / (int32_t)folio_dtype_size(d->dtype);
    REQUIRE(d->layout != FOLIO_LAYOUT_XPACKED || d->k_head_size % x == 0,
            "KV cache: layout xpacked holds %s in packs of %d; k_head_size %d is not a multiple",
            folio_dtype_name(d->dtype), x, d->k_head_size);
    REQUIRE(d->v_in_k == 0 || d->v_in_k == 1, "KV cache: v_in_k is %d, not 0 or 1", d->v_in_k);
    if (!d->v_in_k) return FOLIO_OK;
    REQUIRE(d->v_head_size <= d->k_head_size,
            "KV cache: v_in_k: v_head_size %d is above k_head_size %d, of which V is a part",
            d->v_head_size, d->k_head_size);
    return FOLIO_OK;
}

/* K and V of one layer in one buffer: where V starts (elements), with the strides that follow. */
static bool share_buffer(folioi_kv_format *f, enum sharing sharing, int64_t *v_offset)
{
    const folio_kv_cache_desc *d = &f->desc;
    if (sharing == APART) return folioi_array_extent(&f->k, v_offset);
    if (sharing == PER_BLOCK) {
        *v_offset = f->k_at.block;
        int64_t both;
        if (!checked_add(f->k_at.block, f->v_at.block, &both)) return false;
        f->k.strides[0] = f->v.strides[0] = f->k_at.block = f->v_at.block = both;
        return true;
    }
    int64_t both = (int64_t)d->k_head_size + d->v_head_size;
    int64_t head = d->block_size * both, block;
    *v_offset = (int64_t)d->block_size * d->k_head_size;
    if (sharing == PER_TILE) {
        *v_offset = (int64_t)FOLIOI_PAGE_TOKENS * d->k_head_size;
        f->k.strides[2] = f->k_at.token_tile_stride = FOLIOI_PAGE_TOKENS * both;
        f->v.strides[2] = f->v_at.token_tile_stride = FOLIOI_PAGE_TOKENS * both;
    }
    if (!checked_mul(head, d->num_kv_heads, &block)) return false;
    f->k.strides[0] = f->v.strides[0] = f->k_at.block = f->v_at.block = block;
    f->k.strides[1] = f->v.strides[1] = f->k_at.head = f->v_at.head = head;
    return true;
}

static bool has_pages(const folioi_kv_format *f)
{
    const folio_kv_cache_desc *d = &f->desc;
    return f->on_device && d->layout == FOLIO_LAYOUT_NATIVE &&
           kv_has_pages(d->dtype, d->k_head_size, d->v_head_size, d->block_size);
}

/* Where the numbers of K and V are within a layer, and where V starts (elements). */
static bool place_kv(folioi_kv_format *f, int64_t *v_offset)
{
    const folio_kv_cache_desc *d = &f->desc;
    int64_t elem = (int64_t)folio_dtype_size(d->dtype);
    const order *o = &orders[d->layout];
    if (has_pages(f)) {
        if (!lay_out(d, o->k, d->k_head_size, FOLIOI_PAGE_TOKENS, FOLIOI_PAGE_DIMS, &f->k,
                     &f->k_at))
            return false;
        f->k_at.swizzle = FOLIOI_PAGE_SWIZZLE;
        *v_offset = 0;
        if (d->v_in_k) return true;
        if (!lay_out(d, o->k, d->v_head_size, FOLIOI_PAGE_TOKENS, FOLIOI_PAGE_DIMS, &f->v,
                     &f->v_at))
            return false;
        f->v_at.swizzle = FOLIOI_PAGE_SWIZZLE;
        return share_buffer(f, PER_TILE, v_offset);
    }
    bool native = d->layout == FOLIO_LAYOUT_NATIVE;
    bool rows = native && (f->on_device || d->block_size % 16 != 0);
    const uint8_t *k_order = rows ? native_rows : o->k;
    const uint8_t *v_order = rows || (native && elem != 2) ? native_rows : o->v;
    int32_t dim_tile = native                              ? (int32_t)(4 / elem)
                       : d->layout == FOLIO_LAYOUT_XPACKED ? (int32_t)(16 / elem)
                                                           : 1;
    if (!lay_out(d, k_order, d->k_head_size, 16, dim_tile, &f->k, &f->k_at)) return false;
    *v_offset = 0;
    if (d->v_in_k) return true;
    if (!lay_out(d, v_order, d->v_head_size, native ? 2 : 1, 1, &f->v, &f->v_at)) return false;
    return share_buffer(f, o->sharing, v_offset);
}

static bool place_arrays(folioi_kv_format *f)
{
    const folio_kv_cache_desc *d = &f->desc;
    int64_t elem = (int64_t)folio_dtype_size(d->dtype), v_offset, k_elems, v_elems, end;
    if (!place_kv(f, &v_offset)) return false;
    if (!folioi_array_extent(&f->k, &k_elems) || !folioi_array_extent(&f->v, &v_elems))
        return false;
    if (!checked_mul(k_elems, elem, &f->k.bytes) || !checked_mul(v_elems, elem, &f->v.bytes))
        return false;
    if (d->v_in_k) f->v.bytes = 0;
    f->v.offset_bytes = v_offset * elem;
    if (!checked_add(f->v.offset_bytes, f->v.bytes, &end)) return false;
    end = max_i64(end, f->k.bytes);
    if (d->dtype == FOLIO_INT8) {
        int64_t scales;
        if (!lay_out(d, scale_order, 1, 1, 1, &f->k_scales, &f->k_scales_at)) return false;
        if (!folioi_array_extent(&f->k_scales, &scales) || !checked_mul(scales, 4, &scales))
            return false;
        if (end > INT64_MAX / 4 || scales > INT64_MAX / 4) return false;
        f->k_scales.bytes = scales;
        f->k_scales.offset_bytes = round_up(end, FOLIOI_ALIGN);
        end = f->k_scales.offset_bytes + scales;
        if (!d->v_in_k) {
            f->v_scales = f->k_scales;
            f->v_scales_at = f->k_scales_at;
            f->v_scales.offset_bytes = round_up(end, FOLIOI_ALIGN);
            end = f->v_scales.offset_bytes + scales;
        }
    }
    if (end > INT64_MAX - FOLIOI_ALIGN) return false;
    f->layer_bytes = round_up(end, FOLIOI_ALIGN);
    int64_t total;
    return checked_mul(f->layer_bytes, d->num_layers, &total) && total <= INT64_MAX / 2;
}

folio_status folioi_kv_format_init(const folio_kv_cache_desc *desc, bool on_device,
                                   folioi_kv_format *format)
{
    memset(format, 0, sizeof *format);
    format->on_device = on_device;
    STRUCT_IN(format->desc, desc, "folio_kv_cache_desc");
    format->desc.struct_size = sizeof format->desc;
    if (format->desc.v_head_size == 0) format->desc.v_head_size = format->desc.k_head_size;
    TRY(check_desc(&format->desc));
    const folio_kv_cache_desc *d = &format->desc;
    REQUIRE(
        place_arrays(format),
        "KV cache: %d layers x %lld blocks x %d tokens x %d kv heads x head sizes %d and %d in %s "
        "exceed the largest size this library can address",
        d->num_layers, (long long)d->num_blocks, d->block_size, d->num_kv_heads, d->k_head_size,
        d->v_head_size, folio_dtype_name(d->dtype));
    folioi_kv_format_view_v(format);
    return FOLIO_OK;
}

void folioi_kv_format_view_v(folioi_kv_format *f)
{
    if (!f->desc.v_in_k) return;
    f->v_at = f->k_at;
    f->v_scales_at = f->k_scales_at;
}

const char *folioi_layout_id(const folioi_kv_format *format)
{
    if (format->desc.layout != FOLIO_LAYOUT_NATIVE) return folio_layout_name(format->desc.layout);
    bool no_v = format->desc.v_in_k;
    if (has_pages(format)) return no_v ? "device-pages-no-v" : "device-pages";
    if (format->on_device) return no_v ? "device-rows-no-v" : "device-rows";
    if (format->desc.block_size % 16 == 0) return no_v ? "host-packed16-no-v" : "host-packed16";
    return no_v ? "host-rows-no-v" : "host-rows";
}
