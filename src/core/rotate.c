/* rotate.c: rows rotated one number at a time: the portable form; and whether rows fit a rotary. */
#include "core/rotary.h"

void folioi_rotate_row(void *to, const void *from, folio_dtype dtype, int32_t dims,
                       const folioi_rotation *r, int64_t position)
{
    size_t elem = folio_dtype_size(dtype), begin = (size_t)r->first_dim,
           end = begin + (size_t)r->num_dims;
    memcpy(to, from, begin * elem); /* as they are: a NaN keeps its bits */
    memcpy((char *)to + end * elem, (const char *)from + end * elem, ((size_t)dims - end) * elem);
    for (int32_t d = r->first_dim; d < r->first_dim + r->num_dims; d++)
        store_f32(to, dtype, d, rotated_number(r, from, dtype, 0, d, position));
}

folio_status folioi_rotary_check(const folio_rotary *rotary, const folio_context *ctx,
                                 int32_t k_head_size, int32_t v_in_k)
{
    const folioi_rotation *r = &rotary->rotation;
    REQUIRE((rotary->ctx->backend->on_device) == (ctx->backend->on_device),
            "rotary: its table lies %s, but the tensors lie %s",
            rotary->ctx->backend->on_device ? "on a device" : "in host memory",
            ctx->backend->on_device ? "on a device" : "in host memory");
    REQUIRE((int64_t)r->first_dim + r->num_dims <= k_head_size,
            "rotary: dims [%d, %lld) exceed k_head_size %d", r->first_dim,
            (long long)r->first_dim + r->num_dims, k_head_size);
    REQUIRE(
        r->first_dim >= v_in_k,
        "rotary: first_dim is %d; with v_in_k the first %d numbers of K are V and must not rotate",
        r->first_dim, v_in_k);
    REQUIRE(k_head_size <= FOLIOI_ROTARY_MAX_DIMS, "rotary: k_head_size is %d; the limit is %d",
            k_head_size, FOLIOI_ROTARY_MAX_DIMS);
    return FOLIO_OK;
}
