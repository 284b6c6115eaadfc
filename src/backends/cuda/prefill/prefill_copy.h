/* prefill_copy.h: rows brought to shared memory, each lane knowing the address of one; and numbers loaded from anywhere. */
#ifndef FOLIOI_CUDA_PREFILL_COPY_H
#define FOLIOI_CUDA_PREFILL_COPY_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/stored_rows.h"
#include "backends/cuda/warp.h"

/*
 * Low bits of a row's address: it is zeros; it lies in a native page; in packs; by dims, then the address is that of dim 0 of its
 * unit of 8 keys, a multiple of 8, and these keys have all the same.
 */
enum { ROW_ZERO = 1, ROW_PAGED = 2, ROW_BY_DIMS = 4, ROW_PACKED = 8 };

/*
 * Rows of `bytes` to shared memory: lane first + i holds the address of row i and its low bits. MIXED: some may lie in packs,
 * `step` bytes apart, or by dims, and these are left out.
 */
template <int ROWS, int ROW_BYTES, bool MIXED = false>
static __device__ __forceinline__ void copy_rows(uint32_t to, int row0, uint64_t address, int first,
                                                 int32_t bytes, int32_t step = 16)
{
    constexpr int CHUNKS = ROW_BYTES / 16;
    int lane = fresh_lane();
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, address, first + row);
        bool is_zero = from & ROW_ZERO || chunk * 16 >= bytes;
        if (MIXED && from & ROW_BY_DIMS) continue;
        int32_t skip = row_byte((from & ROW_PAGED) != 0, row0 + row, chunk * 16);
        if (MIXED && from & ROW_PACKED) skip = chunk * step;
        cp_async<16>(to + chunk_at<ROW_BYTES>(row0 + row, chunk),
                     (const char *)(from & ~15ull) + skip, is_zero ? 0 : 16);
    }
}

/*
 * The same where PAGE rows at a time lie `stride` bytes apart, none of them zeros: row i of them is at lane
 * first + i / PAGE * PAGE. PAGE is 8, or 4 where a warp's rows are no multiple of 8.
 */
template <int ROWS, int ROW_BYTES>
static __device__ __forceinline__ void copy_pages(uint32_t to, int row0, uint64_t address,
                                                  int first, int64_t stride)
{
    constexpr int CHUNKS = ROW_BYTES / 16, LANE_ROWS = 32 / CHUNKS, PAGE = ROWS % 8 == 0 ? 8 : 4;
    static_assert(ROWS % PAGE == 0 && LANE_ROWS <= PAGE, "whole pages");
    int lane = fresh_lane(), row = lane / CHUNKS, chunk = lane % CHUNKS;
    uint32_t at = to + chunk_at<ROW_BYTES>(row0 + row, chunk);
    uint64_t skip = row * stride + chunk * 16;
#pragma unroll
    for (int page = 0; page < ROWS; page += PAGE) {
        uint64_t from = __shfl_sync(ALL_LANES, address, first + page) + skip;
#pragma unroll
        for (int i = 0; i < PAGE; i += LANE_ROWS) {
            cp_async<16>((at ^ (uint32_t)((page + i) % 8 << 4)) + (page + i) * ROW_BYTES,
                         (const void *)from);
            from += LANE_ROWS * stride;
        }
    }
}

/* 8 numbers of 16 bits from anywhere. */
static __device__ uint4 load_numbers(const uint16_t *from)
{
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = __ldg(from + 2 * i) | (uint32_t)__ldg(from + 2 * i + 1) << 16;
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* 8 bytes from anywhere. */
static __device__ uint2 load_bytes(const uint8_t *from)
{
    uint32_t x[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        x[i] = __ldg(from + 4 * i) | __ldg(from + 4 * i + 1) << 8 | __ldg(from + 4 * i + 2) << 16 |
               (uint32_t)__ldg(from + 4 * i + 3) << 24;
    return make_uint2(x[0], x[1]);
}

#endif
