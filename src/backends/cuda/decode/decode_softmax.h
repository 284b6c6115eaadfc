/*
 * decode_softmax.h: from scores to weights: which keys a row sees, the layer's options, running maxima and sums. Entry [n] of
 * a thread's fragments belongs to row row_of(lane % 4, n).
 */
#ifndef FOLIOI_DECODE_SOFTMAX_H
#define FOLIOI_DECODE_SOFTMAX_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_query.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/tanh.h"
#include "backends/cuda/warp.h"

/* Rows of an item as one thread sees them. */
template <int NT> struct row_state {
    float m[2 * NT], l[2 * NT];
};

/*
 * Factors of the scores of cached keys: scale, k.scale and what q was divided by. Fixed 16-bit instances need none. Of fixed
 * instances with options: where a row stands among the keys, and its slope.
 */
template <int NT> struct row_options {
    float factor[2 * NT];
    float slope[2 * NT];
    int own[2 * NT];
};

/* The row of the item that a thread has at [n]; t: lane % 4. */
static __device__ __forceinline__ int row_of(int t, int n) { return 8 * (n / 2) + 2 * t + (n & 1); }

static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}

/* e^(x - base). The difference comes first: log2(e) times a score of 3e38 would be infinite. */
static __device__ __forceinline__ float exp_to(float x, float base)
{
    return exp2_approx((x - base) * LOG2E);
}

/* ---- an item's rows ---- */

/* Keys that query i sees. Not inlined: at a launch's start, code has to come from memory. */
static __device__ __noinline__ int2 seen_keys(const decode_args &a, const folioi_cuda_seq &s, int i)
{
    folioi_range seen = seq_keys(&s, a.layer.window_left, a.layer.window_right, i);
    return {seen.begin, seen.end};
}

/* Keys that all rows of an item see. */
static __device__ __forceinline__ int2 seen_by_all(const decode_args &a, const folioi_cuda_seq &s)
{
    int2 first = seen_keys(a, s, 0), last = first;
    if (s.query_len > 1) last = seen_keys(a, s, s.query_len - 1);
    return {last.x, first.y};
}

template <int NT> static __device__ __forceinline__ void start_rows(row_state<NT> &rows)
{
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        rows.m[row] = -INFINITY;
        rows.l[row] = 0.0f;
    }
}

/* Write the options of an item's rows to shared memory, for flexible instances. A barrier follows. */
static __device__ __forceinline__ void start_options(const decode_args &a, const block_shared &sh,
                                                     const folioi_cuda_seq &s, int seq,
                                                     int num_rows, int first_row, int kv_head)
{
    int r = threadIdx.x;
    if (r >= num_rows) return;
    int i = (first_row + r) / a.heads_per_kv,
        h = kv_head * a.heads_per_kv + (first_row + r) % a.heads_per_kv;
    const int64_t *strides = a.layer.bias.strides;
    sh.options[r].slope = a.layer.slopes != NULL ? a.layer.slopes[h] : 0.0f;
    sh.options[r].own = s.first_query_pos + i - s.first_key_pos;
    sh.options[r].bias = seq * strides[0] + h * strides[1] + i * strides[2];
}

/* The same to registers, for fixed instances. Distances beyond 2^30 are as good as that. */
template <int NT>
static __device__ __forceinline__ void load_options(const decode_args &a, const folioi_cuda_seq &s,
                                                    int num_rows, int first_row, int kv_head,
                                                    row_options<NT> &opt)
{
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = first_row + min(row_of(threadIdx.x & 3, row), num_rows - 1), i = r / a.heads_per_kv;
        int64_t own = s.first_query_pos + i - s.first_key_pos;
        opt.own[row] = (int)max(min(own, (int64_t)1 << 30), -((int64_t)1 << 30));
        opt.slope[row] = a.layer.slopes != NULL
                             ? a.layer.slopes[kv_head * a.heads_per_kv + r - i * a.heads_per_kv]
                             : 0.0f;
    }
}

/* ---- a tile's scores ---- */

static __device__ __forceinline__ float bias_at(const decode_args &a, int64_t index)
{
    const folio_bias &b = a.layer.bias;
    if (b.dtype == FOLIO_F32) return ((const float *)b.data)[index];
    return half_bits_to_float(((const uint16_t *)b.data)[index], b.dtype == FOLIO_BF16);
}

static __device__ __forceinline__ float cap_score(const decode_args &a, float x)
{
    return a.layer.soft_cap * tanh_fast(__fdividef(x, a.layer.soft_cap));
}

/* The score of a scaled dot product x. real: row and token belong to the item. */
static __device__ __forceinline__ float option_score(const decode_args &a, const row_option &row,
                                                     float x, int token, bool real)
{
    if (a.layer.soft_cap > 0.0f) x = cap_score(a, x);
    if (a.layer.slopes != NULL && real) x -= row.slope * fabsf((float)(row.own - token));
    if (a.layer.bias.data != NULL && real) {
        float bias = bias_at(a, row.bias + token * a.layer.bias.strides[3]);
        x = bias == -INFINITY ? -INFINITY : x + bias;
    }
    return x;
}

/* Keys of a whole tile may have scores of -inf too, and their V may be anything. */
template <int NT>
static __device__ __forceinline__ bool find_hidden(const float s[NT][4], uint32_t hidden[NT][4])
{
    bool some = false;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) some |= s[n][e] == -INFINITY;
    if (!__any_sync(ALL_LANES, some)) return false;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) hidden[n][e] = __ballot_sync(ALL_LANES, s[n][e] == -INFINITY);
    return true;
}

/*
 * Scale a tile's scores and apply all options; -inf: not seen. Returns whether some row does not see a token of the tile.
 * hidden: lanes whose scores are -inf; fixed instances set it only if the tile is not whole. What a tile by dims holds before
 * the item's first token is not zeros.
 */
template <int KV, int NT, folioi_cuda_form FORM, bool OPTIONS>
static __device__ __forceinline__ bool finish_scores(const decode_args &a, const block_shared &sh,
                                                     const tile_view &tile,
                                                     const folioi_cuda_seq &seq, int2 seen,
                                                     int first_row, const row_options<NT> &opt,
                                                     int num_rows, bool whole, float s[NT][4],
                                                     uint32_t hidden[NT][4])
{
    constexpr bool SPREAD = is_spread(KV, FORM);
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    if constexpr (KV != 0) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float by = kv_size(KV) > 1 ? a.layer.scale : opt.factor[2 * n + (e & 1)];
                if (KV == FOLIO_INT8) by *= tile.scales[tile_token<SPREAD>(g, e / 2)];
                s[n][e] *= by;
                if (!OPTIONS) continue;
                if (a.layer.soft_cap > 0.0f) s[n][e] = cap_score(a, s[n][e]);
                int row = 2 * n + (e & 1), token = tile.tile + tile_token<SPREAD>(g, e / 2);
                s[n][e] = fmaf(-opt.slope[row], fabsf((float)(opt.own[row] - token)), s[n][e]);
            }
        }
        if (whole) return KV == FOLIO_F32 && find_hidden<NT>(s, hidden);
    }
    bool some = false;
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = row_of(t, row);
        bool real = r < num_rows;
        if (!whole && seq.query_len > 1) seen = seen_keys(a, seq, (first_row + r) / a.heads_per_kv);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int n = row / 2, e = row % 2 + 2 * half;
            int token = tile.tile + tile_token<SPREAD>(g, half);
            bool inside = token >= tile.low && token < tile.high;
            if constexpr (KV == 0) {
                float by = tile.fresh ? a.layer.scale : opt.factor[row];
                if (tile.scales != NULL) by *= tile.scales[g + (e & 2) * 4];
                s[n][e] = option_score(a, sh.options[r], s[n][e] * by, token, real && inside);
            }
            if (!whole && (!real || !inside || token < seen.x || token >= seen.y))
                s[n][e] = -INFINITY;
            bool off = s[n][e] == -INFINITY;
            hidden[n][e] = __ballot_sync(ALL_LANES, off);
            some |= off && real && (inside || (is_xpacked(FORM) && token < tile.low));
        }
    }
    return __any_sync(ALL_LANES, some);
}

/*
 * Make weights of scores, and update maxima and sums. Returns whether some maximum has grown; alpha is set only then. It
 * is 1 for a row whose maximum has not grown, so a row's bits do not depend on other rows.
 */
template <int NT>
static __device__ __forceinline__ bool soften(row_state<NT> &rows, float s[NT][4],
                                              float alpha[2 * NT], bool wide)
{
    bool grown = false;
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        if (row > 1 && !wide) break;
        grown |= fmaxf(s[row / 2][row % 2], s[row / 2][row % 2 + 2]) > rows.m[row];
    }
    grown = __any_sync(ALL_LANES, grown);
    if (grown) {
#pragma unroll
        for (int row = 0; row < 2 * NT; row++) {
            if (row > 1 && !wide) break;
            float m = row_max(fmaxf(s[row / 2][row % 2], s[row / 2][row % 2 + 2]));
            m = fmaxf(rows.m[row], m);
            alpha[row] = exp_to(rows.m[row], softmax_base(m));
            rows.m[row] = m;
            rows.l[row] *= alpha[row];
        }
    }
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        if (row > 1 && !wide) break;
        float base = softmax_base(rows.m[row]);
        float *p = &s[row / 2][row % 2];
        p[0] = exp_to(p[0], base);
        p[2] = exp_to(p[2], base);
        rows.l[row] += p[0] + p[2];
    }
    return grown;
}

#endif
