/* prefill_query.h: rows of q on their way to shared memory, and what each of them sees. */
#ifndef FOLIOI_CUDA_PREFILL_QUERY_H
#define FOLIOI_CUDA_PREFILL_QUERY_H

#include "backends/cuda/prefill/prefill_copy.h"
#include "backends/cuda/prefill/prefill_instance.h"

/* The bits of the largest magnitude among 8 bf16 numbers, of those that are finite. */
static __device__ __forceinline__ uint32_t largest_bits(uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bits = words[i / 2] >> i % 2 * 16 & 0x7fff;
        largest = max(largest, bits < 0x7f80 ? bits : 0);
    }
    return largest;
}

/* Two bf16 numbers times a power of two as f16. */
static __device__ __forceinline__ uint32_t halve(uint32_t two, float factor)
{
    return pack<__half>(__uint_as_float(two << 16) * factor,
                        __uint_as_float(two & 0xffff0000) * factor);
}

/*
 * Rows of q as f16 in the order 8-bit keys need: of 16 numbers, pairs 0 2 4 6, then 1 3 5 7. A bf16 row is multiplied with a
 * power of two that brings its largest number below 2^15, so that nothing is lost but what is 2^39 times smaller. The unit
 * of a row's scores takes the kv head's own scale, where it has one.
 */
template <class I>
static __device__ __forceinline__ void halve_q(uint64_t mine, bool is_none, bool is_bf16,
                                               float k_scale, typename I::shared &sh, int row0)
{
    constexpr int LANES = I::DK / 16; /* of a row */
    uint32_t to = shared_address(sh.q);
#pragma unroll 2
    for (int first = 0; first < I::WARP_ROWS; first += 32 / LANES) {
        int lane = fresh_lane(), row = first + lane / LANES, slice = lane % LANES;
        const uint4 *from = (const uint4 *)__shfl_sync(ALL_LANES, mine, row) + slice * 2;
        uint4 x = make_uint4(0, 0, 0, 0), y = x;
        if (!__shfl_sync(ALL_LANES, (int)is_none, row)) x = __ldg(from), y = __ldg(from + 1);
        float unit = 1.0f;
        if (is_bf16) {
            uint32_t largest = max(largest_bits(x), largest_bits(y));
#pragma unroll
            for (int i = 1; i < LANES; i *= 2)
                largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, i));
            int32_t exponent = max((int32_t)(largest >> 7), 27) - 14;
            unit = __int_as_float(exponent << 23);
            float factor = __int_as_float((254 - exponent) << 23);
            x = make_uint4(halve(x.x, factor), halve(x.y, factor), halve(x.z, factor),
                           halve(x.w, factor));
            y = make_uint4(halve(y.x, factor), halve(y.y, factor), halve(y.z, factor),
                           halve(y.w, factor));
        }
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, slice * 2),
                     make_uint4(x.x, x.z, y.x, y.z));
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, slice * 2 + 1),
                     make_uint4(x.y, x.w, y.y, y.w));
        if (slice == 0) sh.rows[row0 + row].unit = unit * k_scale;
    }
}

/* Rows of q that are not aligned; lane i holds the address of row i. */
template <class I>
static __device__ __forceinline__ void fill_q(uint64_t mine, bool is_none, uint32_t to, int row0,
                                              int32_t dims)
{
    constexpr int CHUNKS = I::DK / 8;
    for (int i = fresh_lane(); i < I::WARP_ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint64_t from = __shfl_sync(ALL_LANES, mine, row);
        bool is_zero = __shfl_sync(ALL_LANES, (int)is_none, row) || chunk * 8 >= dims;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (!is_zero) x = load_numbers((const uint16_t *)from + chunk * 8);
        store_shared(to + chunk_at<I::DK * 2>(row0 + row, chunk), x);
    }
}

/* The warp's rows of q. */
template <class I>
static __device__ void fetch_q(const prefill_args &a, const prefill_work &w, typename I::shared &sh)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane(), row0 = fresh_warp() * I::WARP_ROWS;
    row_place p = place_of(a, w, row0 + lane % I::WARP_ROWS);
    int64_t at = p.query < 0 ? 0 : row_index(l.q, sh.seq.query_row + p.query, p.head);
    uint64_t from = (uint64_t)l.q.data + at * I::Q_SIZE;
    uint32_t to = shared_address(sh.q);
    if constexpr (I::KV != KV_WIDE) { /* 16-bit q, whatever T is */
        halve_q<I>(from, p.query < 0, l.dtype == FOLIO_BF16,
                   head_scale(l.k.head_scales, 1.0f, w.kv_head), sh, row0);
        return;
    }
    if constexpr (!I::FIXED) {
        if (!a.aligned) {
            fill_q<I>(from, p.query < 0, to, row0, l.k_dims);
            return;
        }
    }
    copy_rows<I::WARP_ROWS, I::DK * I::Q_SIZE>(to, row0, from | (p.query < 0 ? ROW_ZERO : 0), 0,
                                               (I::FIXED ? I::DK : l.k_dims) * I::Q_SIZE);
}

/* What each row sees, to shared memory. */
template <class I>
static __device__ __forceinline__ void describe_rows(const prefill_args &a, const prefill_work &w,
                                                     typename I::shared &sh)
{
    const folioi_cuda_layer &l = a.layer;
    const folioi_cuda_seq &s = sh.seq;
    for (int row = threadIdx.x; row < I::ROWS; row += I::THREADS) {
        row_place p = place_of(a, w, row);
        sh.rows[row].seen = {0, 0};
        if constexpr (!I::FIXED)
            sh.rows[row].slope = 0.0f, sh.rows[row].own = sh.rows[row].bias = 0;
        if (p.query < 0) continue;
        folioi_range seen = seq_keys(&s, l.window_left, l.window_right, p.query);
        sh.rows[row].seen = {max(seen.begin, w.begin), min(seen.end, w.end)};
        if constexpr (!I::FIXED) {
            sh.rows[row].own = s.first_query_pos + p.query - s.first_key_pos;
            sh.rows[row].slope = l.slopes != NULL ? l.slopes[p.head] : 0.0f;
            sh.rows[row].bias = w.seq * l.bias.strides[0] + p.head * l.bias.strides[1] +
                                (int64_t)p.query * l.bias.strides[2];
        }
    }
}

#endif
