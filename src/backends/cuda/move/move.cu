/* move.cu: kernels that store and gather rows of a cache, copy blocks and merge states. One warp per row of a head. */
#include "backends/cuda/host/launch.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/move/cuda_move.h"
#include "backends/cuda/move/rotate_pieces.h"
#include "backends/cuda/noted.h"
#include "backends/cuda/step/row_position.h"
#include "backends/cuda/stored_rows.h"
#include "backends/cuda/warp.h"
#include "core/dtype.h"

#include <math.h>

namespace {

constexpr int THREADS = 128;

__device__ int64_t unit_index() { return ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP; }

unsigned blocks_for(int64_t units) { return (unsigned)ceil_div(units * WARP, THREADS); }

/* max|x| / 127 over a row, NaN where one is NaN. */
__device__ float int8_scale(const folioi_cuda_move &m, const folioi_rotation &r, int64_t index,
                            int64_t position)
{
    float largest = 0.0f;
    bool nan = false;
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = fabsf(rotated_number(&r, m.rows.data, m.rows_dtype, index, d, position));
        nan |= x != x;
        largest = fmaxf(largest, x);
    }
    largest = warp_max(largest);
    return __any_sync(ALL_LANES, nan) ? NAN : largest / 127.0f;
}

/* A token's row as it is, 16 bytes a lane: from the caller's rows to the cache, or back. */
__device__ void copy_row(const folioi_cuda_move &m, int64_t row, int64_t stored, int32_t token,
                         bool is_store)
{
    int elem = m.dtype == FOLIO_F32 ? 4 : 2;
    char *theirs = (char *)m.rows.data + row * elem;
    char *ours = const_cast<char *>(m.side.base) + stored * elem;
    bool paged = has_pages(m.side.at);
    for (int32_t i = threadIdx.x % WARP * 16; i < m.dims * elem; i += WARP * 16) {
        uint4 *t = (uint4 *)(theirs + i), *o = (uint4 *)(ours + row_byte(paged, token, i));
        if (is_store) *o = *t;
        else *t = *o;
    }
}

/* A token's new row of K, rotated. */
__device__ void rotate_into_cache(const folioi_cuda_move &m, const folioi_rotation &r, int64_t row,
                                  int64_t position, int64_t stored, int32_t token)
{
    char *ours = const_cast<char *>(m.side.base) + stored * 2;
    bool paged = has_pages(m.side.at);
    const float *angles = angles_of(r, position);
    for (int32_t i = threadIdx.x % WARP; i < num_tasks(r, m.dims); i += WARP)
        rotate_pieces(
            r, angles, m.dtype == FOLIO_BF16, task_of(r, i), (const uint16_t *)m.rows.data + row,
            [=](int32_t piece) { return (uint4 *)(ours + row_byte(paged, token, piece * 16)); });
}

struct plain_moves : folioi_cuda_moves {
    static constexpr bool NOTES = false;
};

struct noted_moves : folioi_cuda_moves {
    static constexpr bool NOTES = true;
    folioi_cuda_noting noting;
    float limit; /* what is infinite in the cache */
};

/* A row as it is given, and K rotated, before it is stored. */
__device__ void note_row(const noted_moves &moves, const folioi_rotation &r, int64_t from,
                         int64_t position, int64_t row, int64_t head)
{
    const folioi_cuda_move &m = moves.kv[blockIdx.y];
    bool bad = false;
    int lane = (int)threadIdx.x % WARP;
    if (m.is_copy && r.table == nullptr && dtype_is_16_bit(m.dtype)) {
        const uint4 *units = (const uint4 *)((const uint16_t *)m.rows.data + from);
        for (int32_t i = lane; i < m.dims / 8; i += WARP)
            bad |= is_bad_unit(units[i], m.dtype == FOLIO_BF16);
    } else
        for (int32_t d = lane; d < m.dims; d += WARP) {
            float x = rotated_number(&r, m.rows.data, m.rows_dtype, from, d, position);
            bad |= !(fabsf(x) < moves.limit);
        }
    if (__any_sync(ALL_LANES, bad) && lane == 0)
        note_bad(moves.noting, (int)blockIdx.y, row, (int32_t)head);
}

/* Launched for K (y 0) and V (y 1). */
template <class M> __global__ void store_rows(const __grid_constant__ M moves)
{
    let_next_begin();
    const folioi_cuda_move &m = moves.kv[blockIdx.y];
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    await_kernels_ahead();
    if (row >= moves.num_slots || moves.slots[row] < 0) return;
    int64_t block = moves.slots[row] / m.block_size, token = moves.slots[row] % m.block_size;
    int64_t from = row * m.rows.token + head * m.rows.head;
    int64_t to = address_token(&m.side.at, block, head, token);
    char *base = const_cast<char *>(m.side.base);
    folioi_rotation r = moves.rotations.rotation;
    if (blockIdx.y != 0) r.table = nullptr; /* V stays as it is */
    int64_t position = r.table != nullptr ? row_position(moves.rotations, row) : 0;
    if constexpr (M::NOTES) note_row(moves, r, from, position, row, head);
    if (m.is_copy) {
        if (r.table == nullptr) copy_row(m, from, to, (int32_t)token, true);
        else rotate_into_cache(m, r, from, position, to, (int32_t)token);
        return;
    }
    float scale = folioi_cuda_scale(&m.side, (int32_t)head);
    if (m.side.scales != nullptr) {
        scale = int8_scale(m, r, from, position);
        if (threadIdx.x % WARP == 0)
            const_cast<float *>(
                m.side.scales)[address_token(&m.side.scales_at, block, head, token)] = scale;
    }
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = rotated_number(&r, m.rows.data, m.rows_dtype, from, d, position);
        if (scale != 1.0f) x = scale == 0.0f ? 0.0f : x / scale;
        store_f32(base, m.dtype, to + address_dim(&m.side.at, token, d), x);
    }
}

/* One number at a time. A lane takes both of a pair: the rows may be the same. */
__device__ void rotate_numbers(const folioi_cuda_rotate_args &t, int64_t from, int64_t to,
                               int64_t position)
{
    const folioi_rotation &r = t.rotations.rotation;
    int32_t end = r.first_dim + r.num_dims, half = r.num_dims / 2;
    for (int32_t i = threadIdx.x % WARP; i < half; i += WARP) {
        int32_t x = r.first_dim + (r.pairs ? 2 * i : i), y = r.pairs ? x + 1 : x + half;
        float a = rotated_number(&r, t.from.data, t.dtype, from, x, position);
        float b = rotated_number(&r, t.from.data, t.dtype, from, y, position);
        store_f32(t.to.data, t.dtype, to + x, a);
        store_f32(t.to.data, t.dtype, to + y, b);
    }
    for (int32_t d = threadIdx.x % WARP; d < t.dims; d += WARP)
        if (d < r.first_dim || d >= end)
            store_f32(t.to.data, t.dtype, to + d, load_f32(t.from.data, t.dtype, from + d));
}

/* Tasks of a row that one warp does: two for each lane. */
constexpr int TASKS = 2 * WARP;

/* Slice `slice` of the tasks of all heads of a row, TASKS of them. */
__device__ void rotate_in_pieces(const folioi_cuda_rotate_args &t, int64_t row, int32_t slice,
                                 int64_t position)
{
    const folioi_rotation &r = t.rotations.rotation;
    const float *angles = angles_of(r, position);
    int32_t per_head = num_tasks(r, t.dims), all = per_head * t.num_heads;
#pragma unroll
    for (int32_t n = 0; n < TASKS; n += WARP) {
        int32_t i = slice * TASKS + n + (int32_t)threadIdx.x % WARP, head = i / per_head;
        if (i >= all) return;
        uint16_t *to = (uint16_t *)t.to.data + row * t.to.token + head * t.to.head;
        const uint16_t *from = (const uint16_t *)t.from.data + row * t.from.token;
        rotate_pieces(r, angles, t.dtype == FOLIO_BF16, task_of(r, i - head * per_head),
                      from + head * t.from.head,
                      [=](int32_t piece) { return (uint4 *)to + piece; });
    }
}

/* A unit is a head of a row, or in pieces a slice of a row's tasks. */
__global__ void rotate_rows(const __grid_constant__ folioi_cuda_rotate_args t)
{
    let_next_begin();
    int64_t unit = unit_index(), row = unit / t.units, slice = unit % t.units;
    await_kernels_ahead();
    if (row >= t.num_rows) return;
    int32_t seq = find_seq(t.rotations.counts, t.rotations.seqs, row);
    if (seq < 0) return;
    int64_t position = position_in(t.rotations, seq, row);
    if (t.in_pieces) rotate_in_pieces(t, row, (int32_t)slice, position);
    else
        rotate_numbers(t, row * t.from.token + slice * t.from.head,
                       row * t.to.token + slice * t.to.head, position);
}

__global__ void gather_rows(const __grid_constant__ folioi_cuda_moves moves)
{
    const folioi_cuda_move &m = moves.kv[blockIdx.y];
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    if (m.rows.data == nullptr || row >= moves.num_slots) return;
    int64_t slot = moves.slots[row], to = row * m.rows.token + head * m.rows.head;
    int64_t block = slot < 0 ? 0 : slot / m.block_size, token = slot < 0 ? 0 : slot % m.block_size;
    int64_t from = address_token(&m.side.at, block, head, token);
    if (m.is_copy && slot >= 0) {
        copy_row(m, to, from, (int32_t)token, false);
        return;
    }
    float scale = slot < 0 ? 0.0f
                  : m.side.scales != nullptr
                      ? m.side.scales[address_token(&m.side.scales_at, block, head, token)]
                      : folioi_cuda_scale(&m.side, (int32_t)head);
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = 0.0f;
        if (slot >= 0)
            x = load_f32(m.side.base, m.dtype, from + address_dim(&m.side.at, token, d)) * scale;
        store_f32(m.rows.data, m.rows_dtype, to + d, x);
    }
}

/* Bytes that lie together, by a warp. Eight loads at a time: one that crosses to the host's memory takes long. */
template <typename V> __device__ void copy_run(char *to, const char *from, int64_t bytes)
{
    constexpr int DEEP = 8;
    for (int64_t at = threadIdx.x % WARP; at * (int64_t)sizeof(V) < bytes; at += WARP * DEEP) {
        V x[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if ((at + i * WARP) * (int64_t)sizeof(V) < bytes)
                x[i] = ((const V *)from)[at + i * WARP];
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if ((at + i * WARP) * (int64_t)sizeof(V) < bytes) ((V *)to)[at + i * WARP] = x[i];
    }
}

/* A token whose numbers lie apart on one of the sides, `unit` of them together. */
__device__ void copy_apart(char *to, const char *from, int64_t token, const folioi_cuda_way &w,
                           int elem)
{
    for (int32_t d = threadIdx.x % WARP * w.unit; d < w.dims; d += WARP * w.unit) {
        char *t = to + address_dim(&w.to, token, d) * elem;
        const char *f = from + address_dim(&w.from, token, d) * elem;
        if (w.unit > 1) *(uint4 *)t = *(const uint4 *)f;
        else if (elem == 4) *(uint32_t *)t = *(const uint32_t *)f;
        else if (elem == 2) *(uint16_t *)t = *(const uint16_t *)f;
        else *t = *f;
    }
}

/* A run of one head of a block of K or V in one layer, as stored. */
template <typename V>
__device__ void move_run(const folioi_cuda_blocks &b, int which, int64_t layer, int64_t pair,
                         int64_t head, int64_t first, int32_t tokens)
{
    const folioi_cuda_way &w = b.way[which];
    int64_t from_block = b.pairs[pair][0], to_block = b.pairs[pair][1];
    const char *from =
        b.bases[which][0][layer] + address_token(&w.from, from_block, head, first) * b.elem;
    char *to = b.bases[which][1][layer] + address_token(&w.to, to_block, head, first) * b.elem;
    if (w.run > 0) copy_run<V>(to, from, (int64_t)tokens * w.dims * b.elem);
    else copy_apart(to, from, first, w, b.elem);
    const float *from_scales = (const float *)b.bases[which][2][layer];
    float *to_scales = (float *)b.bases[which][3][layer];
    if (from_scales == nullptr) return;
    for (int64_t t = first + threadIdx.x % WARP; t < first + tokens; t += WARP)
        to_scales[address_token(&w.to_scales, to_block, head, t)] =
            from_scales[address_token(&w.from_scales, from_block, head, t)];
}

/* A unit is a run: of all layers, pairs and heads, K's and V's of a head one after another. */
template <typename V> __global__ void move_blocks(const __grid_constant__ folioi_cuda_blocks b)
{
    int32_t k_tokens = b.way[0].run > 0 ? b.way[0].run : 1;
    int32_t v_tokens = b.way[1].run > 0 ? b.way[1].run : 1;
    int64_t k_runs = b.block_size / k_tokens, runs = k_runs;
    if (b.num_sides > 1) runs += b.block_size / v_tokens;
    int64_t units = runs * b.num_heads * b.num_layers * b.num_pairs;
    for (int64_t unit = unit_index(); unit < units; unit += (int64_t)gridDim.x * THREADS / WARP) {
        int64_t run = unit % runs, head = unit / runs % b.num_heads;
        int64_t rest = unit / runs / b.num_heads, layer = rest % b.num_layers;
        int64_t pair = rest / b.num_layers;
        if (run < k_runs) move_run<V>(b, 0, layer, pair, head, run * k_tokens, k_tokens);
        else move_run<V>(b, 1, layer, pair, head, (run - k_runs) * v_tokens, v_tokens);
    }
}

__device__ float lse_of(const folioi_cuda_part &p, int64_t row, int64_t head)
{
    return p.lse[row * p.lse_token + head * p.lse_head];
}

/* The weight of part i is exp(lse_i - max) / sum; an empty part, its lse infinite, is not read. */
__global__ void merge_states(const __grid_constant__ folioi_cuda_merge m)
{
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    if (row >= m.num_rows) return;
    const folioi_cuda_part *parts = m.parts != nullptr ? m.parts : m.few;
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < m.num_parts; i++) {
        float lse = lse_of(parts[i], row, head);
        if ((lse > largest && lse < INFINITY) || lse != lse) largest = lse;
        if (lse != lse) break;
    }
    for (int64_t i = 0; i < m.num_parts; i++) {
        float lse = lse_of(parts[i], row, head);
        if (!isinf(lse)) sum += expf(lse - largest);
    }
    __syncwarp(); /* out's lse may be a part's own */
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = 0.0f;
        for (int64_t i = 0; i < m.num_parts; i++) {
            const folioi_cuda_part &p = parts[i];
            float lse = lse_of(p, row, head);
            if (isinf(lse)) continue;
            x += expf(lse - largest) / sum *
                 load_f32(p.out.data, p.dtype, row * p.out.token + head * p.out.head + d);
        }
        store_f32(m.out.out.data, m.out.dtype, row * m.out.out.token + head * m.out.out.head + d,
                  x);
    }
    __syncwarp();
    if (m.out.lse != nullptr && threadIdx.x % WARP == 0)
        const_cast<float *>(m.out.lse)[row * m.out.lse_token + head * m.out.lse_head] =
            sum == 0.0f ? -INFINITY : largest + logf(sum);
}

} // namespace

static dim3 grid_of(const folioi_cuda_moves *m)
{
    return dim3(blocks_for(m->num_slots * m->kv[0].num_heads),
                m->kv[1].rows.data != nullptr ? 2 : 1);
}

/* Code that was made on the way from PTX of an earlier card does not wait. */
bool folioi_cuda_can_overlap(void)
{
    cudaFuncAttributes f = {};
    if (cudaFuncGetAttributes(&f, store_rows<plain_moves>) != cudaSuccess) (void)cudaGetLastError();
    return f.ptxVersion >= 90 && f.binaryVersion >= 90;
}

cudaError_t folioi_cuda_store_rows(const folioi_cuda_moves *moves, const folioi_cuda_noting *noting,
                                   cudaStream_t stream)
{
    if (moves->num_slots == 0) return cudaSuccess;
    launch_shape shape = {grid_of(moves), THREADS, 0, 0, moves->overlaps != 0};
    if (noting == nullptr) {
        plain_moves plain = {};
        static_cast<folioi_cuda_moves &>(plain) = *moves;
        return launch_kernel(store_rows<plain_moves>, shape, plain, stream);
    }
    noted_moves noted = {};
    static_cast<folioi_cuda_moves &>(noted) = *moves;
    noted.noting = *noting;
    noted.limit = folioi_cuda_limit(moves->kv[0].dtype);
    return launch_kernel(store_rows<noted_moves>, shape, noted, stream);
}

cudaError_t folioi_cuda_rotate_rows(const folioi_cuda_rotate_args *t, cudaStream_t stream)
{
    folioi_cuda_rotate_args args = *t;
    int32_t tasks = t->num_heads * num_tasks(t->rotations.rotation, t->dims);
    args.units = t->in_pieces ? (int32_t)ceil_div(tasks, TASKS) : t->num_heads;
    if (t->num_rows == 0) return cudaSuccess;
    launch_shape shape = {dim3(blocks_for(t->num_rows * args.units)), THREADS, 0, 0,
                          t->overlaps != 0};
    return launch_kernel(rotate_rows, shape, args, stream);
}

cudaError_t folioi_cuda_gather_rows(const folioi_cuda_moves *moves, cudaStream_t stream)
{
    if (moves->num_slots == 0) return cudaSuccess;
    gather_rows<<<grid_of(moves), THREADS, 0, stream>>>(*moves);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_move_blocks(const folioi_cuda_blocks *b, cudaStream_t stream)
{
    int64_t runs = 0;
    for (int which = 0; which < b->num_sides; which++)
        runs += b->way[which].run > 0 ? b->block_size / b->way[which].run : b->block_size;
    int64_t units = runs * b->num_heads * b->num_layers * b->num_pairs;
    if (units == 0) return cudaSuccess;
    unsigned grid = blocks_for(units);
    if (b->max_grid > 0 && grid > (unsigned)b->max_grid) grid = (unsigned)b->max_grid;
    if (b->vector == 16) move_blocks<uint4><<<grid, THREADS, 0, stream>>>(*b);
    else if (b->vector == 4) move_blocks<uint32_t><<<grid, THREADS, 0, stream>>>(*b);
    else if (b->vector == 2) move_blocks<uint16_t><<<grid, THREADS, 0, stream>>>(*b);
    else move_blocks<uint8_t><<<grid, THREADS, 0, stream>>>(*b);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_merge_states(const folioi_cuda_merge *merge, cudaStream_t stream)
{
    int64_t units = merge->num_rows * merge->num_heads;
    if (units == 0) return cudaSuccess;
    merge_states<<<blocks_for(units), THREADS, 0, stream>>>(*merge);
    return cudaGetLastError();
}
