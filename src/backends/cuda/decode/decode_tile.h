/*
 * decode_tile.h: a tile in shared memory: 16 tokens of K, or of V. In flexible instances rows are `stride` bytes apart. In
 * fixed ones the head size, the bytes of a number and the form of the cache decide.
 */
#ifndef FOLIOI_DECODE_TILE_H
#define FOLIOI_DECODE_TILE_H

#include "backends/cuda/cuda_attend.h"

#include <stdint.h>

/* A tile to compute with. */
struct tile_view {
    uint32_t k, v;       /* in shared memory */
    const float *scales; /* of int8: K of the 16 tokens, then V; else NULL */
    int tile, low, high; /* its first key; of its keys those of the item */
    bool fresh;          /* new rows, not the cache's */
};

/*
 * The forms of fixed tiles. Panels, whose 16-byte chunks are XORed with the token, keep ldmatrix free of bank conflicts. Rows
 * as close as they are in memory are read in 16-byte loads, or two of 8 lie in the same banks.
 */
enum tile_form {
    PANELED_TILE, /* panels of 128 bytes of 16 tokens: chunk c of row t at place c % 8 ^ t % 8 */
    CLOSE_TILE,   /* rows one behind another */
    PACKED_TILE,  /* the same, read in 16-byte loads; f32 too: decode_f32.h */
    PAGED_TILE,   /* a native page: K and V of 8 tokens, then of 8 more; see stored_rows.h */
    UNITS_TILE, /* x-packed K: chunk c of all tokens, then chunk c + 1. What lies by dims: [dim][token] */
};

/* Bytes of a number of K and V. */
static __host__ __device__ constexpr int kv_size(int kv)
{
    return kv == FOLIO_F32 ? 4 : kv == FOLIO_F16 || kv == FOLIO_BF16 ? 2 : 1;
}

/* X-packed? K in packs or by dims, V by dims. */
static __host__ __device__ constexpr bool is_xpacked(folioi_cuda_form form)
{
    return form == FOLIOI_FORM_XPACKED || form == FOLIOI_FORM_XPACKED_1;
}

static __host__ __device__ constexpr tile_form fixed_form(int dims, int bytes,
                                                          folioi_cuda_form form)
{
    if (form == FOLIOI_FORM_PAGES) return PAGED_TILE;
    if (is_xpacked(form)) return UNITS_TILE;
    if (bytes == 4 || (bytes == 2 && (dims == 96 || dims == 128))) return PACKED_TILE;
    return dims > 0 && dims * bytes % 128 == 0 ? PANELED_TILE : CLOSE_TILE; /* 0: flexible rows */
}

/* Bytes from K to V of a fixed tile. */
static __host__ __device__ constexpr int fixed_value(int dims, int bytes, folioi_cuda_form form)
{
    return (form == FOLIOI_FORM_PAGES ? 8 : 16) * dims * bytes;
}

/* Where 16-byte chunk c of token t of a fixed tile lies. */
template <int DIMS, int BYTES, folioi_cuda_form FORM>
static __device__ __forceinline__ int fixed_place(int t, int c)
{
    constexpr tile_form TILE = fixed_form(DIMS, BYTES, FORM);
    if (TILE == PAGED_TILE)
        return t / 8 * 2 * fixed_value(DIMS, BYTES, FORM) + t % 8 * 128 + c / 8 * 1024 +
               ((c ^ t) & 7) * 16;
    if (TILE == PANELED_TILE) return c / 8 * 2048 + t * 128 + ((c ^ t) & 7) * 16;
    if (TILE == UNITS_TILE) return c * 256 + t * 16;
    return t * DIMS * BYTES + c * 16;
}

/* From the place of chunk 0 or 1 of a row to that of chunk 0 or 1 + c, c being even; tiles are at multiples of 128. */
template <int DIMS, int BYTES, folioi_cuda_form FORM>
static __device__ __forceinline__ uint32_t fixed_step(uint32_t place, int c)
{
    constexpr tile_form TILE = fixed_form(DIMS, BYTES, FORM);
    if (TILE == PAGED_TILE) return (place ^ (uint32_t)(c % 8 * 16)) + c / 8 * 1024;
    if (TILE == UNITS_TILE) return place + c * 256;
    if (TILE == PANELED_TILE) return (place ^ (uint32_t)(c % 8 * 16)) + c / 8 * 2048;
    return place + c * 16;
}

/* Does a fixed tile have its tokens spread, as tile_token tells? */
static __host__ __device__ constexpr bool is_spread(int kv, folioi_cuda_form form)
{
    return is_xpacked(form) && kv_size(kv) == 1;
}

/*
 * The token in row g, or g + 8 where `upper`, of a fragment of scores. SPREAD: a lane reads four neighbours of 8-bit V by dims,
 * of which mma takes two as tokens 2t and two as tokens 2t + 8.
 */
template <bool SPREAD> static __device__ __forceinline__ int tile_token(int g, bool upper)
{
    return SPREAD ? g / 2 * 4 + g % 2 + upper * 2 : g + upper * 8;
}

#endif
