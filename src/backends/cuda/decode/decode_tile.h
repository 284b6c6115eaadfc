/*
 * decode_tile.h: a tile in shared memory: 16 tokens of K, or of V. In flexible instances rows are `stride` bytes apart. In
 * fixed ones the head size and the bytes of a number decide.
 */
#ifndef FOLIOI_DECODE_TILE_H
#define FOLIOI_DECODE_TILE_H

#include <stdint.h>

/* A tile to compute with. */
struct tile_view {
    uint32_t k, v;       /* in shared memory */
    const float *scales; /* of int8: K of the 16 tokens, then V; else NULL */
    int tile, low, high; /* its first key; of its keys those of the item */
    bool fresh;          /* new rows, not the cache's */
};

/*
 * The forms of fixed tiles. Padding or an XOR of 16-byte chunks keeps ldmatrix free of bank conflicts. Bulk copies of
 * contiguous rows cannot do that: fragments are then made of 16-byte loads.
 */
enum tile_form {
    PADDED_TILE, /* rows an odd number of chunks apart */
    TURNED_TILE, /* rows of 128 bytes: chunk c of row t at place c ^ t % 8 */
    PACKED_TILE, /* rows as a block of the cache has them */
    PAGED_TILE,  /* a native page: K and V of 8 tokens, then of 8 more; see stored_rows.h */
};

static __host__ __device__ constexpr tile_form fixed_form(int dims, int bytes, bool paged)
{
    if (paged) return PAGED_TILE;
    return dims * bytes == 128         ? TURNED_TILE
           : dims == 128 && bytes == 2 ? PACKED_TILE
                                       : PADDED_TILE;
}

/* Bytes between rows of a fixed tile, if they are all as far apart. */
static __host__ __device__ constexpr int fixed_stride(int dims, int bytes)
{
    return dims * bytes + (fixed_form(dims, bytes, false) == PADDED_TILE ? 16 : 0);
}

/* From K to V. */
static __host__ __device__ constexpr int fixed_value(int dims, int bytes, bool paged)
{
    return paged ? 8 * dims * bytes : 16 * fixed_stride(dims, bytes);
}

/* Where 16-byte chunk c of token t of a fixed tile lies. */
template <int DIMS, int BYTES, bool PAGED>
static __device__ __forceinline__ int fixed_place(int t, int c)
{
    constexpr tile_form FORM = fixed_form(DIMS, BYTES, PAGED);
    if (FORM == PAGED_TILE)
        return t / 8 * 2 * fixed_value(DIMS, BYTES, true) + t % 8 * 128 + c / 8 * 1024 +
               ((c ^ t) & 7) * 16;
    if (FORM == TURNED_TILE) return t * 128 + ((c ^ t) & 7) * 16;
    return t * fixed_stride(DIMS, BYTES) + c * 16;
}

/* From the place of chunk 0 or 1 of a row to that of chunk 0 or 1 + c, c being even; tiles are at multiples of 128. */
template <int DIMS, int BYTES, bool PAGED>
static __device__ __forceinline__ uint32_t fixed_step(uint32_t place, int c)
{
    constexpr tile_form FORM = fixed_form(DIMS, BYTES, PAGED);
    if (FORM == PAGED_TILE) return (place ^ (uint32_t)(c % 8 * 16)) + c / 8 * 1024;
    return FORM == TURNED_TILE ? place ^ (uint32_t)(c * 16) : place + c * 16;
}

#endif
