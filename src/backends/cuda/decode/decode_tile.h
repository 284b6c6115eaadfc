/*
 * decode_tile.h: a tile in shared memory: 16 tokens of K, or of V. Tiles of the general instances have rows `stride` bytes
 * apart; those of the plain ones lie as follows from head size and bytes of a number.
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
 * Do the rows of a plain tile lie as they do in a block of the cache? Then bulk copies of 4 KB, or one of 8, bring K and V.
 * ldmatrix would meet a bank eight times in plain rows: fragments are made of 16-byte loads instead.
 */
static __host__ __device__ constexpr bool plain_packed(int dims, int bytes)
{
    return dims == 128 && bytes == 2;
}

/* How a packed tile lies, in bytes: like plain rows, or like a native page. */
typedef struct packed_tile {
    int32_t row, eight_rows; /* from a row to the next, and to the eighth after it */
    int32_t panel;           /* from a row's first 64 dims to the next */
    int32_t value;           /* from K to V */
    int32_t turn;            /* bits of the row's number that turn its 16-byte units */
} packed_tile;

/* Where chunk c of token t of a packed tile lies. */
static __device__ __forceinline__ int packed_place(const packed_tile &p, int t, int c)
{
    return t / 8 * p.eight_rows + t % 8 * p.row + c / 8 * p.panel + ((c % 8) ^ (t & p.turn)) * 16;
}

/* From the place of one of a row's first 4 chunks to that of the chunk 4 * n after it. */
static __device__ __forceinline__ uint32_t packed_step(const packed_tile &p, uint32_t place, int n)
{
    return (place ^ (uint32_t)(n % 2 * 64)) + (uint32_t)(n / 2 * p.panel);
}

/* Bytes between rows of a plain tile: else an odd number of 16-byte chunks, so that ldmatrix meets no bank twice. */
template <int DIMS, int BYTES> static __device__ constexpr int plain_stride()
{
    return DIMS * BYTES + (plain_packed(DIMS, BYTES) ? 0 : 16);
}

/* Rows of 128 bytes lie side by side too, for ldmatrix: chunk c of row t is at place c ^ t % 8. */
static __device__ constexpr bool plain_swizzled(int dims, int bytes) { return dims * bytes == 128; }

/* Where 16-byte chunk c of token t of a plain tile lies. */
template <int DIMS, int BYTES> static __device__ __forceinline__ int plain_place(int t, int c)
{
    if (plain_swizzled(DIMS, BYTES)) return t * 128 + (c ^ (t & 7)) * 16;
    return t * plain_stride<DIMS, BYTES>() + c * 16;
}

/* From the place of chunk 0 or 1 of a row to that of chunk 0 or 1 + c, c being even; tiles are at multiples of 128. */
template <int DIMS, int BYTES>
static __device__ __forceinline__ uint32_t plain_step(uint32_t place, int c)
{
    return plain_swizzled(DIMS, BYTES) ? place ^ (uint32_t)(c * 16) : place + c * 16;
}

#endif
