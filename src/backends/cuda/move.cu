/* move.cu: rows stored in and gathered from a cache, blocks copied, states merged. A warp for each row of a head. */
#include "backends/cuda/cuda_move.h"
#include "core/dtype.h"

#include <math.h>

namespace {

constexpr int WARP = 32, THREADS = 128;
constexpr unsigned ALL = 0xffffffffu;

__device__ int64_t unit_index() { return ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP; }

unsigned blocks_for(int64_t units) { return (unsigned)ceil_div(units * WARP, THREADS); }

/* max|x| / 127 over a row, NaN where one is NaN. */
__device__ float int8_scale(const folioi_cuda_move &m, int64_t index)
{
    float largest = 0.0f;
    bool nan = false;
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = fabsf(load_f32(m.rows.data, m.rows_dtype, index + d));
        nan |= x != x;
        largest = fmaxf(largest, x);
    }
    for (int i = WARP / 2; i > 0; i /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, i));
    return __any_sync(ALL, nan) ? NAN : largest / 127.0f;
}

__global__ void store_rows(const __grid_constant__ folioi_cuda_move m)
{
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    if (row >= m.num_slots || m.slots[row] < 0) return;
    int64_t block = m.slots[row] / m.block_size, token = m.slots[row] % m.block_size;
    int64_t from = row * m.rows.token + head * m.rows.head;
    float scale = m.side.scale;
    if (m.side.scales != nullptr) {
        scale = int8_scale(m, from);
        if (threadIdx.x % WARP == 0)
            const_cast<float *>(
                m.side.scales)[address_token(&m.side.scales_at, block, head, token)] = scale;
    }
    int64_t to = address_token(&m.side.at, block, head, token);
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = load_f32(m.rows.data, m.rows_dtype, from + d);
        if (scale != 1.0f) x = scale == 0.0f ? 0.0f : x / scale;
        store_f32(const_cast<char *>(m.side.base), m.dtype, to + address_dim(&m.side.at, d), x);
    }
}

__global__ void gather_rows(const __grid_constant__ folioi_cuda_move m)
{
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    if (row >= m.num_slots) return;
    int64_t slot = m.slots[row], to = row * m.rows.token + head * m.rows.head;
    int64_t block = slot < 0 ? 0 : slot / m.block_size, token = slot < 0 ? 0 : slot % m.block_size;
    float scale = slot < 0 ? 0.0f
                  : m.side.scales != nullptr
                      ? m.side.scales[address_token(&m.side.scales_at, block, head, token)]
                      : m.side.scale;
    int64_t from = address_token(&m.side.at, block, head, token);
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = 0.0f;
        if (slot >= 0)
            x = load_f32(m.side.base, m.dtype, from + address_dim(&m.side.at, d)) * scale;
        store_f32(m.rows.data, m.rows_dtype, to + d, x);
    }
}

__device__ void copy_number(char *to, const char *from, folio_dtype dtype)
{
    switch (dtype) {
    case FOLIO_F32: *(uint32_t *)to = *(const uint32_t *)from; break;
    case FOLIO_F16:
    case FOLIO_BF16: *(uint16_t *)to = *(const uint16_t *)from; break;
    default: *to = *from; break;
    }
}

/* One token of one head of a block in one layer, as stored. */
__global__ void move_blocks(const __grid_constant__ folioi_cuda_pair p, int elem)
{
    int64_t unit = unit_index();
    int64_t token = unit % p.block_size;
    unit /= p.block_size;
    int64_t head = unit % p.num_heads;
    unit /= p.num_heads;
    int64_t pair = unit % p.num_pairs, layer = unit / p.num_pairs;
    if (layer >= p.num_layers) return;
    int64_t from_block = p.pairs[2 * pair], to_block = p.pairs[2 * pair + 1];
    int64_t from = address_token(&p.from.at, from_block, head, token);
    int64_t to = address_token(&p.to.at, to_block, head, token);
    for (int32_t d = threadIdx.x % WARP; d < p.dims; d += WARP)
        copy_number(p.to_bases[layer] + (to + address_dim(&p.to.at, d)) * elem,
                    p.from_bases[layer] + (from + address_dim(&p.from.at, d)) * elem, p.dtype);
    if (p.dtype == FOLIO_INT8 && threadIdx.x % WARP == 0)
        p.to_scales[layer][address_token(&p.to.scales_at, to_block, head, token)] =
            p.from_scales[layer][address_token(&p.from.scales_at, from_block, head, token)];
}

__device__ float lse_of(const folioi_cuda_part &p, int64_t row, int64_t head)
{
    return p.lse[row * p.lse_token + head * p.lse_head];
}

/* The weight of part i is exp(lse_i - max) / sum; a part with lse -inf is not read. */
__global__ void merge_states(const __grid_constant__ folioi_cuda_merge m)
{
    int64_t unit = unit_index(), row = unit / m.num_heads, head = unit % m.num_heads;
    if (row >= m.num_rows) return;
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < m.num_parts; i++) {
        float lse = lse_of(m.parts[i], row, head);
        if (lse > largest || lse != lse) largest = lse;
        if (lse != lse) break;
    }
    for (int64_t i = 0; i < m.num_parts; i++) {
        float lse = lse_of(m.parts[i], row, head);
        if (lse != -INFINITY) sum += expf(lse - largest);
    }
    __syncwarp(); /* out's lse may be a part's own */
    for (int32_t d = threadIdx.x % WARP; d < m.dims; d += WARP) {
        float x = 0.0f;
        for (int64_t i = 0; i < m.num_parts; i++) {
            const folioi_cuda_part &p = m.parts[i];
            float lse = lse_of(p, row, head);
            if (lse == -INFINITY) continue;
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

cudaError_t folioi_cuda_store_rows(const folioi_cuda_move *move, cudaStream_t stream)
{
    int64_t units = move->num_slots * move->num_heads;
    if (units == 0) return cudaSuccess;
    store_rows<<<blocks_for(units), THREADS, 0, stream>>>(*move);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_gather_rows(const folioi_cuda_move *move, cudaStream_t stream)
{
    int64_t units = move->num_slots * move->num_heads;
    if (units == 0) return cudaSuccess;
    gather_rows<<<blocks_for(units), THREADS, 0, stream>>>(*move);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_move_blocks(const folioi_cuda_pair *pair, cudaStream_t stream)
{
    int64_t units = pair->num_pairs * pair->num_layers * pair->num_heads * pair->block_size;
    int elem = pair->dtype == FOLIO_F32                                ? 4
               : pair->dtype == FOLIO_F16 || pair->dtype == FOLIO_BF16 ? 2
                                                                       : 1;
    if (units == 0) return cudaSuccess;
    move_blocks<<<blocks_for(units), THREADS, 0, stream>>>(*pair, elem);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_merge_states(const folioi_cuda_merge *merge, cudaStream_t stream)
{
    int64_t units = merge->num_rows * merge->num_heads;
    if (units == 0) return cudaSuccess;
    merge_states<<<blocks_for(units), THREADS, 0, stream>>>(*merge);
    return cudaGetLastError();
}
