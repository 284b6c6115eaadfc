/* kv_rows.c: rows in and out of host memory, one number at a time: the portable form. */
#include "cache/kv_rows.h"

#include "core/rotary.h"

#include <math.h>
#include <string.h>

#define CHUNK 64 /* numbers converted at a time, on the stack */

void folioi_load_row(float *dst, const void *base, folio_dtype dtype, int64_t index, int64_t n)
{
    if (dtype == FOLIO_F32) memcpy(dst, (const float *)base + index, (size_t)n * sizeof *dst);
    else if (dtype == FOLIO_BF16)
        for (int64_t i = 0; i < n; i++) dst[i] = bf16_to_f32(((const uint16_t *)base)[index + i]);
    else
        for (int64_t i = 0; i < n; i++) dst[i] = load_f32(base, dtype, index + i);
}

void folioi_store_row(void *base, folio_dtype dtype, int64_t index, const float *src, int64_t n)
{
    if (dtype == FOLIO_F32) memcpy((float *)base + index, src, (size_t)n * sizeof *src);
    else if (dtype == FOLIO_BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)base)[index + i] = f32_to_bf16(src[i]);
    else
        for (int64_t i = 0; i < n; i++) store_f32(base, dtype, index + i, src[i]);
}

float folioi_int8_scale(const void *base, folio_dtype dtype, int64_t index, int64_t n)
{
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float x = fabsf(load_f32(base, dtype, index + i));
        if (!(x <= largest)) largest = x;
        if (largest != largest) break;
    }
    return largest / 127.0f;
}

/* One head's row of x / scale, rounded to the cache's type, to the token's places from `first` on. */
static void write_head(const folioi_kv_side *side, int64_t first, int64_t token,
                       const folio_tensor *t, int64_t index, float scale)
{
    float chunk[CHUNK];
    uint32_t codes[CHUNK]; /* room for the widest type */
    int64_t elem = (int64_t)folio_dtype_size(side->dtype);
    for (int32_t d0 = 0; d0 < side->dims; d0 += CHUNK) {
        int32_t n = side->dims - d0 < CHUNK ? side->dims - d0 : CHUNK;
        folioi_load_row(chunk, t->data, t->dtype, index + d0, n);
        if (scale != 1.0f)
            for (int32_t i = 0; i < n; i++) chunk[i] = scale == 0.0f ? 0.0f : chunk[i] / scale;
        folioi_store_row(codes, side->dtype, 0, chunk, n);
        for (int32_t i = 0; i < n; i++)
            memcpy(side->base + (first + address_dim(side->at, token, d0 + i)) * elem,
                   (const char *)codes + i * elem, (size_t)elem);
    }
}

static void write_token(const folioi_kv_side *side, const folioi_kv_share *share,
                        const folio_tensor *t, const float *each, float all, int64_t row,
                        int64_t block, int64_t token)
{
    for (int32_t h = share->head_begin; h < share->head_end; h++) {
        int64_t index = row * t->token_stride + h * t->head_stride;
        float scale = head_scale(each, all, h);
        if (side->scales != NULL) {
            scale = folioi_int8_scale(t->data, t->dtype, index, side->dims);
            side->scales[address_token(side->scales_at, block, h, token)] = scale;
        }
        write_head(side, address_token(side->at, block, h, token), token, t, index, scale);
    }
}

/* K of one token, rotated on its way. */
static void write_rotated(const folioi_kv_side *k, const folioi_kv_share *share,
                          const folioi_kv_tensors *t, int64_t row, int64_t block, int64_t token)
{
    float rotated[FOLIOI_ROTARY_MAX_DIMS]; /* of k's dtype */
    folio_tensor one = {rotated, t->k.dtype, 1, 0, 0};
    for (int32_t h = share->head_begin; h < share->head_end; h++) {
        int64_t index = row * t->k.token_stride + h * t->k.head_stride;
        const char *from = (const char *)t->k.data + index * (int64_t)folio_dtype_size(t->k.dtype);
        folioi_rotate_row(rotated, from, t->k.dtype, k->dims, &t->rotation, t->positions[row]);
        write_token(k, &(folioi_kv_share){0, 1, h, h + 1}, &one, t->k_head_scales, t->k_scale, 0,
                    block, token);
    }
}

void folioi_kv_write_rows(const folioi_kv_layer *layer, const folioi_kv_tensors *t,
                          const int64_t *slots, const folioi_kv_share *share)
{
    int32_t block_size = layer->format->desc.block_size;
    folioi_kv_side k = kv_side(layer, FOLIOI_K), v = kv_side(layer, FOLIOI_V);
    for (int64_t i = share->begin; i < share->end; i++) {
        if (slots[i] < 0) continue;
        int64_t block = slots[i] / block_size, token = slots[i] % block_size;
        if (t->rotation.table != NULL) write_rotated(&k, share, t, i, block, token);
        else write_token(&k, share, &t->k, t->k_head_scales, t->k_scale, i, block, token);
        if (kv_last(layer->format) == FOLIOI_V)
            write_token(&v, share, &t->v, t->v_head_scales, t->v_scale, i, block, token);
    }
}

void folioi_kv_read_row(float *dst, const folioi_kv_side *side, int64_t block, int64_t head,
                        int64_t token, float fp8_scale)
{
    float scale = kv_scale(side, block, head, token, fp8_scale);
    int64_t first = address_token(side->at, block, head, token);
    for (int32_t d = 0; d < side->dims; d++)
        dst[d] = load_f32(side->base, side->dtype, first + address_dim(side->at, token, d)) * scale;
}
