/*
 * rotate_pieces.h: rows of 16-bit numbers, rotated in pieces of 16 bytes. A lane takes both pieces of a pair, so a row
 * may become itself. The bits are those of rotated_number (rotation.h); only a NaN may be another NaN.
 */
#ifndef FOLIOI_CUDA_ROTATE_PIECES_H
#define FOLIOI_CUDA_ROTATE_PIECES_H

#include "backends/cuda/instructions.h"
#include "core/rotation.h"

/* What a lane does at once: one piece, or two that are rotated with each other. */
struct row_task {
    int piece, other; /* other: -1 where there is none */
    int angle;        /* of the first pair; -1: the piece stays as it is */
};

/* Tasks of a row: pieces with a partner are one task. */
static __host__ __device__ __forceinline__ int num_tasks(const folioi_rotation &r, int dims)
{
    return dims / 8 - (r.pairs ? 0 : r.num_dims / 16);
}

static __device__ __forceinline__ row_task task_of(const folioi_rotation &r, int task)
{
    int half = r.num_dims / 16, i = task - r.first_dim / 8;
    if (i < 0) return {task, -1, -1};
    if (r.pairs) return {task, -1, i < r.num_dims / 8 ? 4 * i : -1};
    return i < half ? row_task{task, task + half, 8 * i} : row_task{task + half, -1, -1};
}

/* Cosines and sines of a row's position; NULL: it has none, and its rotated numbers are NaN. */
static __device__ __forceinline__ const float *angles_of(const folioi_rotation &r, int64_t position)
{
    bool inside = position >= 0 && position < r.num_positions;
    return inside ? r.table + position * r.num_dims : nullptr;
}

static __device__ __forceinline__ uint32_t packed(float x, float y, bool bf16)
{
    return bf16 ? pack<__nv_bfloat16>(x, y) : pack<__half>(x, y);
}

static __device__ __forceinline__ float low_number(uint32_t x, bool bf16)
{
    return half_bits_to_float((uint16_t)x, bf16);
}

static __device__ __forceinline__ float high_number(uint32_t x, bool bf16)
{
    return half_bits_to_float((uint16_t)(x >> 16), bf16);
}

static __device__ __forceinline__ float2 rotated_pair(float x, float y, float cosine, float sine)
{
    return make_float2(rotary_product(x, cosine) - rotary_product(y, sine),
                       rotary_product(y, cosine) + rotary_product(x, sine));
}

/* Pairs of numbers that lie side by side. */
static __device__ __forceinline__ void rotate_neighbours(uint32_t x[4], const float *cosines,
                                                         const float *sines, bool bf16)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 p =
            rotated_pair(low_number(x[i], bf16), high_number(x[i], bf16), cosines[i], sines[i]);
        x[i] = packed(p.x, p.y, bf16);
    }
}

/* Pairs of a number in x and one in y. */
static __device__ __forceinline__ void rotate_halves(uint32_t x[4], uint32_t y[4],
                                                     const float *cosines, const float *sines,
                                                     bool bf16)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 p = rotated_pair(low_number(x[i], bf16), low_number(y[i], bf16), cosines[2 * i],
                                sines[2 * i]);
        float2 q = rotated_pair(high_number(x[i], bf16), high_number(y[i], bf16),
                                cosines[2 * i + 1], sines[2 * i + 1]);
        x[i] = packed(p.x, q.x, bf16);
        y[i] = packed(p.y, q.y, bf16);
    }
}

/* Four numbers of a table at a time; what it lacks is NaN. */
template <int N>
static __device__ __forceinline__ void load_angles(float to[N], const float *angles, int at)
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float4 x = make_float4(NAN, NAN, NAN, NAN);
        if (angles != nullptr) x = *(const float4 *)(angles + at + i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}

/* The task's pieces of a row; place(piece) is where a piece goes, a uint4 *. */
template <typename P>
static __device__ __forceinline__ void rotate_pieces(const folioi_rotation &r, const float *angles,
                                                     bool bf16, row_task task, const void *row,
                                                     P place)
{
    const uint4 *from = (const uint4 *)row;
    uint4 x = from[task.piece], y = task.other < 0 ? x : from[task.other];
    if (task.angle >= 0) {
        float cosines[8], sines[8];
        int half = r.num_dims / 2;
        if (r.pairs) {
            load_angles<4>(cosines, angles, task.angle);
            load_angles<4>(sines, angles, half + task.angle);
            rotate_neighbours(&x.x, cosines, sines, bf16);
        } else {
            load_angles<8>(cosines, angles, task.angle);
            load_angles<8>(sines, angles, half + task.angle);
            rotate_halves(&x.x, &y.x, cosines, sines, bf16);
        }
    }
    *place(task.piece) = x;
    if (task.other >= 0) *place(task.other) = y;
}

#endif
