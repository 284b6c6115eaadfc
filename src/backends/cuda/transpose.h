/*
 * transpose.h: V of x-packed caches, and K of those with x = 1, lie by dims: 8 tokens of a dim are a unit of 8 or 16 bytes. Kernels
 * that compute with rows of tokens copy units to shared memory and transpose them there. The units of 8 tokens and of the dims in
 * 16 bytes lie where these tokens' numbers of these dims will lie, so each such matrix is transposed in place, in few registers.
 *
 * place(row, chunk): where 16 bytes of a token's row are in shared memory. A warp has BANDS of 8 tokens.
 */
#ifndef FOLIOI_CUDA_TRANSPOSE_H
#define FOLIOI_CUDA_TRANSPOSE_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/warp.h"

/* Units on their way: `dims` of them, `step` bytes apart, from `from` to band lane % BANDS; 0: zeros. */
template <int BYTES, int BANDS, typename PLACE>
static __device__ __forceinline__ void copy_units(PLACE place, uint64_t from, int dims,
                                                  int64_t step, const void *anywhere)
{
    constexpr int PACK = 16 / BYTES;
    int lane = threadIdx.x & 31, band = lane % BANDS;
#pragma unroll 1
    for (int d = lane / BANDS; d < dims; d += 32 / BANDS) {
        uint32_t to = place(8 * band + d % PACK * BYTES / 2, d / PACK);
        if (BYTES == 1) to += d % 2 * 8;
        cp_async<8 * BYTES>(to, from ? (const void *)(from + d * step) : anywhere,
                            from ? 8 * BYTES : 0);
    }
}

/*
 * Four matrices of bytes, transposed as if two tokens of a dim were a number: lanes with l / 4 < 4 have even dims of two tokens, the
 * others odd ones. The former get four dims of the first token, the latter of the second.
 */
static __device__ __forceinline__ uint32_t separate_bytes(uint32_t x)
{
    uint32_t other = __shfl_xor_sync(ALL_LANES, x, 16);
    return __byte_perm(x, other, threadIdx.x & 16 ? 0x3715 : 0x6240);
}

/*
 * Transpose a band's units, `chunks` of 16 bytes of each row. Numbers of tokens outside of [low, high), and from dim `dims` on,
 * become zeros. All lanes' copies have to be there; the caller sees to it, and to a barrier behind.
 */
template <int BYTES, typename PLACE>
static __device__ __forceinline__ void transpose_units(PLACE place, int band, int chunks, int dims,
                                                       int low, int high)
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int token = 8 * band + (BYTES == 2 ? g : g % 4 * 2 + g / 4);
    bool inside = token >= low && token < high;
#pragma unroll 1
    for (int first = 0; first < chunks; first += 4) {
        uint32_t x[4];
        ldmatrix_trans(x, place(8 * band + lane % 8, min(first + lane / 8, chunks - 1)));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (BYTES == 1) x[i] = separate_bytes(x[i]);
            int chunk = first + i;
            if (chunk >= chunks) break;
            bool real = inside && chunk * (16 / BYTES) + t * (4 / BYTES) < dims;
            store_shared_u32(place(token, chunk) + 4 * t, real ? x[i] : 0);
        }
    }
}

#endif
