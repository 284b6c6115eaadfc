/*
 * stored_rows.h: the address of a row of the cache: in contiguous rows, in native pages (kv_layout.c), or in packs of 16
 * bytes. A page holds 8 tokens; a row's pieces of 128 bytes (64 dims) are 1 KB apart, and their 16-byte units are XORed with
 * the token's number. Packs of a row are as far apart as its block is long.
 */
#ifndef FOLIOI_CUDA_STORED_ROWS_H
#define FOLIOI_CUDA_STORED_ROWS_H

#include "cache/kv_layout.h"

static __device__ __forceinline__ bool has_pages(const folioi_address &at)
{
    return at.swizzle != 0;
}

/* Index of a token's first number, had it no swizzle. */
static __device__ __forceinline__ int64_t stored_row(const folioi_address &at, int64_t block,
                                                     int32_t head, int32_t token)
{
    int32_t in_tile = token & (at.token_tile - 1); /* tiles of 1 or of 8 */
    int32_t tile = has_pages(at) ? token >> 3 : token;
    return block * at.block + head * at.head + tile * at.token_tile_stride +
           in_tile * at.token_stride;
}

/* From there to byte `at` of the row; at most 16 bytes, at a multiple of their size, lie together. */
static __device__ __forceinline__ int32_t row_byte(bool paged, int32_t token, int32_t at)
{
    return paged ? ((at & ~127) << 3) + ((at & 127) ^ ((token & 7) << 4)) : at;
}

/* The same in packs `step` bytes apart; 16: contiguous rows. */
static __device__ __forceinline__ int32_t pack_byte(int32_t step, int32_t at)
{
    return (at >> 4) * step + (at & 15);
}

#endif
