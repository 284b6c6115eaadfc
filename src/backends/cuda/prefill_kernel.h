/*
 * prefill_kernel.h: attention of many query rows. A block of threads computes one tile: some queries of one sequence times the
 * query heads of one kv head, as rows side by side, so that each tile of K and V is read once for all of them.
 *
 *   Q [rows][DK] | K, V of key tile t | K, V of key tile t + 1 | keys each row sees      (shared memory)
 *
 * Key tiles lie at multiples of KEYS: a row's bits depend on neither the tile it is in nor the batch. Rows of 16-byte chunks
 * are swizzled, chunk c of row r lying at c ^ (r % 8), so that ldmatrix meets no bank twice.
 */
#ifndef FOLIOI_CUDA_PREFILL_KERNEL_H
#define FOLIOI_CUDA_PREFILL_KERNEL_H

#include "backends/cuda/prefill_fetch.h"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

/* ---- one key tile ---- */

/* What M row tiles of a warp have come to. */
template <int DV, int M> struct prefill_state {
    float out[M][DV / 8][4];
    float largest[M][2], sum[M][2]; /* of rows l / 4 and l / 4 + 8; sums of this lane's keys */
};

template <class I, int M> using prefill_scores = float[M][I::KEYS / 8][4];

/* scores = Q K^T */
template <class I, int M>
static __device__ __forceinline__ void multiply_keys(prefill_scores<I, M> &s, uint32_t q,
                                                     uint32_t k, int row0)
{
    using T = typename I::T;
    int lane = fresh_lane();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < I::DK / 16; d++) {
        uint32_t qf[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix(qf[m], q + chunk_at<I::DK>(row0 + m * 16 + lane % 16, d * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < I::KEYS / 16; n++) {
            uint32_t kf[4];
            ldmatrix(kf,
                     k + chunk_at<I::DK>(n * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<T>(s[m][2 * n], qf[m], kf[0], kf[1]);
                mma<T>(s[m][2 * n + 1], qf[m], kf[2], kf[3]);
            }
        }
    }
}

/* f(score, row, key): each of the lane's scores with its row and the key's number in the tile. */
template <class I, int M, typename F>
static __device__ __forceinline__ void each_score(prefill_scores<I, M> &s, typename I::shared &sh,
                                                  int row0, F f)
{
    int lane = fresh_lane();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const auto &row = sh.rows[row0 + m * 16 + r * 8 + lane / 4];
#pragma unroll
            for (int i = 0; i < I::KEYS / 4; i++)
                f(s[m][i / 2][r * 2 + i % 2], row, i / 2 * 8 + lane % 4 * 2 + i % 2);
        }
}

/* Keys that a row does not see get -inf. */
template <class I, int M>
static __device__ __forceinline__ void mask(prefill_scores<I, M> &s, typename I::shared &sh,
                                            int32_t tile, int row0)
{
    if constexpr (I::DK == 64) { /* slower, but spills nothing */
        each_score<I, M>(s, sh, row0, [=](float &x, const auto &row, int32_t key) {
            int32_t j = tile * I::KEYS + key;
            if (j < row.seen.begin || j >= row.seen.end) x = -CUDART_INF_F;
        });
    } else {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int lane = fresh_lane();
                const folioi_range &seen = sh.rows[row0 + m * 16 + r * 8 + lane / 4].seen;
                int32_t first = tile * I::KEYS + lane % 4 * 2;
                int32_t begin = seen.begin - first, end = seen.end - first;
#pragma unroll
                for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + e < begin || n * 8 + e >= end)
                            s[m][n][r * 2 + e] = -CUDART_INF_F;
            }
    }
}

static __device__ __forceinline__ float load_bias(const folio_bias &b, int64_t at)
{
    if (b.dtype == FOLIO_F32) return __ldg((const float *)b.data + at);
    if (b.dtype == FOLIO_F16) return __half2float(((const __half *)b.data)[at]);
    return __bfloat162float(((const __nv_bfloat16 *)b.data)[at]);
}

/* One score after another, in local memory: unrolled, their addresses would take all registers. */
template <class I, int M>
static __device__ __forceinline__ void add_bias(prefill_scores<I, M> &s, const folio_bias &bias,
                                                typename I::shared &sh, int32_t tile, int row0)
{
    int lane = fresh_lane();
    prefill_scores<I, M> copy;
    memcpy(copy, s, sizeof s);
#pragma unroll 1
    for (int i = 0; i < M * I::KEYS / 2; i++) {
        int n = i / 4 % (I::KEYS / 8), m = i / (I::KEYS / 2);
        const auto &row = sh.rows[row0 + m * 16 + i % 4 / 2 * 8 + lane / 4];
        int32_t j = tile * I::KEYS + n * 8 + lane % 4 * 2 + i % 2;
        if (j < row.seen.begin || j >= row.seen.end) continue;
        float x = load_bias(bias, row.bias + j * bias.strides[3]);
        copy[m][n][i % 4] = x == -CUDART_INF_F ? x : copy[m][n][i % 4] + x; /* hides NaN as well */
    }
    memcpy(s, copy, sizeof s);
}

/* Within 4 ulp: a polynomial near 0, where 1 - 2 / (1 + e^2x) would cancel. */
static __device__ __forceinline__ float tanh_fast(float x)
{
    float y = x * x;
    float p = fmaf(y, 62.0f / 2835, -17.0f / 315);
    p = fmaf(y, fmaf(y, p, 2.0f / 15), -1.0f / 3);
    float near = fmaf(x * y, p, x),
          far = 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2 * LOG2_E)));
    return y < 0.09f ? near : far;
}

/* What the layer's options make of the scores. */
template <class I, int M>
static __device__ __forceinline__ void apply_options(prefill_scores<I, M> &s, const prefill_args &a,
                                                     typename I::shared &sh, int32_t tile, int row0)
{
    const folioi_cuda_layer &l = a.layer;
    if (a.is_direct)
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t) { x *= l.scale; });
    else
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t key) {
            x = x * sh.k_scales[key] * l.scale;
        });
    float inverse = 1.0f / l.soft_cap;
    if (l.soft_cap > 0.0f)
        each_score<I, M>(s, sh, row0, [&](float &x, const auto &, int32_t) {
            x = l.soft_cap * tanh_fast(x * inverse);
        });
    if (l.slopes != NULL)
        each_score<I, M>(s, sh, row0, [=](float &x, const auto &row, int32_t key) {
            x -= row.slope * fabsf((float)(row.own - (tile * I::KEYS + key)));
        });
    if (l.bias.data != NULL) add_bias<I, M>(s, l.bias, sh, tile, row0);
}

/* Scores become weights relative to the largest so far, what was summed before is brought to it. */
template <class I, int M>
static __device__ __forceinline__ void soften(prefill_scores<I, M> &s, prefill_state<I::DV, M> &st,
                                              float log2_scale)
{
    float rescale[M][2];
    bool is_same = true;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float before = st.largest[m][r], x = before;
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
                x = fmaxf(x, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            st.largest[m][r] = x;
            float base = x == -CUDART_INF_F ? 0.0f : x;
            if (I::PLAIN) base *= log2_scale;
            rescale[m][r] =
                exp2_approx(I::PLAIN ? before * log2_scale - base : (before - base) * LOG2_E);
            is_same &= rescale[m][r] == 1.0f;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &y = s[m][n][r * 2 + e];
                    y = exp2_approx(I::PLAIN ? fmaf(y, log2_scale, -base) : (y - base) * LOG2_E);
                    sum += y;
                }
            st.sum[m][r] = st.sum[m][r] * rescale[m][r] + sum;
        }
    if (__all_sync(~0u, is_same)) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) st.out[m][n][i] *= rescale[m][i / 2];
}

/* The weights of 16 keys as an operand. */
template <class I>
static __device__ __forceinline__ void pack_weights(uint32_t p[4], const float (&s)[I::KEYS / 8][4],
                                                    int k)
{
    using T = typename I::T;
    p[0] = pack<T>(s[2 * k][0], s[2 * k][1]);
    p[1] = pack<T>(s[2 * k][2], s[2 * k][3]);
    p[2] = pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]);
    p[3] = pack<T>(s[2 * k + 1][2], s[2 * k + 1][3]);
}

template <class I>
static __device__ __forceinline__ void load_values(uint32_t vf[4], uint32_t v, int lane, int k,
                                                   int n)
{
    ldmatrix_trans(vf, v + chunk_at<I::DV>(k * 16 + lane % 16, n * 2 + lane / 16));
}

/* out += weights V */
template <class I, int M>
static __device__ __forceinline__ void multiply_values(prefill_state<I::DV, M> &st,
                                                       const prefill_scores<I, M> &s, uint32_t v)
{
    using T = typename I::T;
#pragma unroll
    for (int k = 0; k < I::KEYS / 16; k++) {
        int lane = fresh_lane();
        uint32_t p[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) pack_weights<I>(p[m], s[m], k);
#pragma unroll
        for (int n = 0; n < I::DV / 16; n++) {
            uint32_t vf[4];
            load_values<I>(vf, v, lane, k, n);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<T>(st.out[m][2 * n], p[m], vf[0], vf[1]);
                mma<T>(st.out[m][2 * n + 1], p[m], vf[2], vf[3]);
            }
        }
    }
}

/* ---- NaN and infinity in V: 0 times them is NaN, which must not reach rows that do not see the key ---- */

/* A number's exponent of ones says: not finite. Each kind counts in digits of its own, 64 keys at most. */
template <typename T> struct special;
template <> struct special<__half> {
    static constexpr uint32_t EXPONENT = 0x7c00, ONE = 0x3c00, INF = 0x3c00, NEG_INF = 0x5800,
                              NOT_A_NUMBER = 0x7400;
};
template <> struct special<__nv_bfloat16> {
    static constexpr uint32_t EXPONENT = 0x7f80, ONE = 0x3f80, INF = 0x3f80, NEG_INF = 0x4300,
                              NOT_A_NUMBER = 0x4680;
};

/* *x keeps its finite numbers; returned: 1 for inf, 128 for -inf, 16384 for NaN, else 0. */
template <typename T> static __device__ uint32_t take_specials(uint32_t *x)
{
    using S = special<T>;
    uint32_t codes = 0, finite = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
        uint32_t y = *x >> shift & 0xffff, magnitude = y & 0x7fff;
        if (magnitude < S::EXPONENT) finite |= y << shift;
        else if (magnitude > S::EXPONENT) codes |= S::NOT_A_NUMBER << shift;
        else codes |= (y >> 15 ? S::NEG_INF : S::INF) << shift;
    }
    *x = finite;
    return codes;
}

static __device__ __forceinline__ void add_specials(float &x, float codes)
{
    int32_t n = (int32_t)codes;
    if (n & 127) x += CUDART_INF_F;
    if (n >> 7 & 127) x -= CUDART_INF_F;
    if (n >> 14) x = CUDART_NAN_F;
}

/* Which of the lane's scores are of keys seen: bit n * 4 + i. */
template <class I>
static __device__ __forceinline__ uint32_t seen_bits(const float (&s)[I::KEYS / 8][4])
{
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) seen |= (uint32_t)(s[n][i] != -CUDART_INF_F) << (n * 4 + i);
    return seen;
}

/*
 * multiply_values for any V: finite numbers by weight, of the others which kinds each row sees. Rare, so out waits in local
 * memory and leaves the registers to other loops.
 */
template <class I>
static __device__ __forceinline__ void multiply_any_values(prefill_state<I::DV, 1> &st,
                                                           const prefill_scores<I, 1> &s,
                                                           uint32_t seen, uint32_t v)
{
    using T = typename I::T;
    float out[I::DV / 8][4];
    memcpy(out, st.out[0], sizeof out);
    int lane = fresh_lane();
#pragma unroll 1
    for (int n = 0; n < I::DV / 16; n++) {
        float codes[2][4] = {};
#pragma unroll
        for (int k = 0; k < I::KEYS / 16; k++) {
            uint32_t vf[4], cf[4], p[4], ones[4];
            load_values<I>(vf, v, lane, k, n);
            pack_weights<I>(p, s[0], k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t two = seen >> (k * 8 + i / 2 * 4 + i % 2 * 2);
                cf[i] = take_specials<T>(&vf[i]);
                ones[i] = (two & 1) * special<T>::ONE | (two >> 1 & 1) * (special<T>::ONE << 16);
            }
            mma<T>(out[2 * n], p, vf[0], vf[1]);
            mma<T>(out[2 * n + 1], p, vf[2], vf[3]);
            mma<T>(codes[0], ones, cf[0], cf[1]);
            mma<T>(codes[1], ones, cf[2], cf[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) add_specials(out[2 * n + i / 4][i % 4], codes[i / 4][i % 4]);
    }
    memcpy(st.out[0], out, sizeof out);
}

/* ---- one tile ---- */

/* V may be on its way: await_values() returns when it is there. */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_keys(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int stage, int32_t tile,
                                                   int row0, bool any_values, F await_values)
{
    uint32_t k = shared_address(sh.kv[stage]);
    prefill_scores<I, M> s;
    multiply_keys<I, M>(s, shared_address(sh.q), k, row0);
    bool is_edge = tile * I::KEYS < w.all_begin || tile * I::KEYS + I::KEYS > w.all_end;
    if constexpr (!I::PLAIN) apply_options<I, M>(s, a, sh, tile, row0);
    if (is_edge) mask<I, M>(s, sh, tile, row0);
    uint32_t seen = 0;
    if (M == 1 && any_values) seen = seen_bits<I>(s[0]);
    soften<I, M>(s, st, a.layer.scale * LOG2_E);
    await_values();
    if constexpr (M == 1) {
        if (any_values) {
            multiply_any_values<I>(st, s, seen, k + I::K_BYTES);
            return;
        }
    }
    multiply_values<I, M>(st, s, k + I::K_BYTES);
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
        if constexpr (!I::PLAIN)
            sh.rows[row].slope = 0.0f, sh.rows[row].own = sh.rows[row].bias = 0;
        if (p.query < 0) continue;
        sh.rows[row].seen = seq_keys(&s, l.window_left, l.window_right, p.query);
        if constexpr (!I::PLAIN) {
            sh.rows[row].own = s.first_query_pos + p.query - s.first_key_pos;
            sh.rows[row].slope = l.slopes != NULL ? l.slopes[p.head] : 0.0f;
            sh.rows[row].bias = w.seq * l.bias.strides[0] + p.head * l.bias.strides[1] +
                                (int64_t)p.query * l.bias.strides[2];
        }
    }
}

/* All key tiles, the next one on its way while this one is computed. */
template <class I, int M>
static __device__ __forceinline__ void attend_staged(prefill_state<I::DV, M> &st,
                                                     const prefill_args &a, const prefill_work &w,
                                                     typename I::shared &sh, int row0,
                                                     bool any_values)
{
    int32_t tile = w.begin / I::KEYS, past = (w.end + I::KEYS - 1) / I::KEYS, stage = 0;
    bool is_direct = I::PLAIN || a.is_direct;
    int32_t block = find_block<I>(a, w, sh.seq, tile);
    any_row mine;
    if (!any_values) { /* while the block's number is on its way */
        fetch_q<I>(a, w, sh);
        describe_rows<I>(a, w, sh);
    }
    if (is_direct) fetch_wide<I>(a, w, sh, 0, tile, block);
    else mine = fetch_raw<I>(a, w, sh, tile, block);
    block = find_block<I>(a, w, sh.seq, tile + 1);
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (!is_direct) widen_tile<I>(a, w, sh, mine);
        if (tile + 1 < past) {
            if (is_direct) fetch_wide<I>(a, w, sh, stage ^ 1, tile + 1, block);
            else mine = fetch_raw<I>(a, w, sh, tile + 1, block);
            block = find_block<I>(a, w, sh.seq, tile + 2);
        }
        if (!is_direct) __syncthreads();
        if (I::PLAIN && M > 1 && w.end - tile * I::KEYS <= I::KEYS / 2)
            attend_keys<half_tile<I>, M>(st, a, w, sh, stage, tile * 2, row0, false, [] {});
        else attend_keys<I, M>(st, a, w, sh, stage, tile, row0, any_values, [] {});
        if (is_direct) stage ^= 1;
    }
}

/* The same in one stage. */
template <class I, int M>
static __device__ __forceinline__ void attend_split(prefill_state<I::DV, M> &st,
                                                    const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int row0,
                                                    bool any_values)
{
    int32_t tile = w.begin / I::KEYS, past = (w.end + I::KEYS - 1) / I::KEYS;
    int32_t block = find_block<I>(a, w, sh.seq, tile);
    if (!any_values) {
        fetch_q<I>(a, w, sh);
        describe_rows<I>(a, w, sh);
    }
    uint64_t address = wide_address<I>(a, w, sh.seq, tile, block);
    fetch_keys<I>(a, sh.kv[0], address);
    cp_async_commit();
    block = find_block<I>(a, w, sh.seq, tile + 1);
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        fetch_values<I>(a, w, sh.kv[0], address);
        cp_async_commit();
        address = wide_address<I>(a, w, sh.seq, tile + 1, block);
        block = find_block<I>(a, w, sh.seq, tile + 2);
        attend_keys<I, M>(st, a, w, sh, 0, tile, row0, any_values, [&] {
            cp_async_wait<0>();
            __syncthreads();
            fetch_keys<I>(a, sh.kv[0], address); /* zeros after the last tile */
            cp_async_commit();
        });
    }
    cp_async_wait<0>();
}

/* All key tiles, from nothing summed yet. */
template <class I, int M>
static __device__ __forceinline__ void attend_range(prefill_state<I::DV, M> &st,
                                                    const prefill_args &a, const prefill_work &w,
                                                    typename I::shared &sh, int row0,
                                                    bool any_values)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) st.largest[m][r] = -CUDART_INF_F, st.sum[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) st.out[m][n][i] = 0.0f;
    }
    if (w.begin >= w.end) return;
    if constexpr (I::SPLIT) attend_split<I, M>(st, a, w, sh, row0, any_values);
    else attend_staged<I, M>(st, a, w, sh, row0, any_values);
}

/* Is a NaN in a row of the warp? */
template <int DV, int M>
static __device__ __forceinline__ bool has_nan(const prefill_state<DV, M> &st)
{
    bool is_nan = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) is_nan |= st.out[m][n][i] != st.out[m][n][i];
    }
    return is_nan;
}

/* Sinks join, sums become the factor of the row's out; lse is stored. */
template <class I, int M>
static __device__ __forceinline__ void finish_rows(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int row0)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    float log2_unit = I::PLAIN ? l.scale * LOG2_E : LOG2_E;
    float value_scale = I::PLAIN ? 1.0f : value_scale_at_end(l);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = st.sum[m][r], largest = st.largest[m][r] * log2_unit;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            row_place p = place_of(a, w, row0 + m * 16 + r * 8 + lane / 4);
            bool is_empty = sum == 0.0f && largest == -CUDART_INF_F;
            float sink = -CUDART_INF_F, lse, factor = 1.0f;
            if (l.sinks != NULL && p.query >= 0) sink = l.sinks[p.head];
            if (is_empty) {
                lse = sink;
                factor = 0.0f;
            } else {
                if (largest == -CUDART_INF_F) largest = 0.0f; /* all scores are NaN */
                float top = fmaxf(largest, sink * LOG2_E);
                factor = exp2_approx(largest - top);
                sum = sum * factor + exp2_approx(sink * LOG2_E - top);
                lse = (top + log2f(sum)) * LN_2;
                factor = factor * value_scale / sum;
            }
            if (l.lse != NULL && p.query >= 0 && lane % 4 == 0 && w.first_value == 0)
                l.lse[(sh.seq.query_row + p.query) * l.lse_token + p.head * l.lse_head] = lse;
            st.sum[m][r] = factor;
        }
}

/* Out by way of the same rows of Q, so that a row leaves in one piece. */
template <class I, int M>
static __device__ __forceinline__ void store_rows(const prefill_state<I::DV, M> &st,
                                                  const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, int row0)
{
    using T = typename I::T;
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    char *rows = sh.q + row0 * I::DK * 2;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float f = st.sum[m][r];
                uint32_t two = pack<T>(st.out[m][n][r * 2] * f, st.out[m][n][r * 2 + 1] * f);
                int row = m * 16 + r * 8 + lane / 4;
                *(uint32_t *)(rows + chunk_at<I::DV>(row, n) + lane % 4 * 4) = f == 0.0f ? 0 : two;
            }
    row_place p = place_of(a, w, row0 + lane % (M * 16));
    int64_t mine =
        p.query < 0 ? -1 : row_index(l.out, sh.seq.query_row + p.query, p.head) + w.first_value;
    __syncwarp();
    constexpr int CHUNKS = I::DV / 8;
#pragma unroll 8
    for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        int64_t at = __shfl_sync(~0u, mine, row);
        if (at < 0 || (!I::PLAIN && chunk * 8 >= l.v_dims - w.first_value)) continue;
        uint4 x = *(const uint4 *)(rows + chunk_at<I::DV>(row, chunk));
        uint16_t *to = (uint16_t *)l.out.data + at + chunk * 8;
        if (I::PLAIN || a.aligned) {
            *(uint4 *)to = x;
            continue;
        }
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 8; e++) to[e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
    }
}

template <class I>
static __device__ __forceinline__ prefill_work work_of(const prefill_args &a,
                                                       const folioi_prefill_tile &tile,
                                                       int32_t unit, const folioi_cuda_seq &s)
{
    const folioi_cuda_layer &l = a.layer;
    prefill_work w;
    int32_t part = unit / l.num_kv_heads, head_part = part % a.head_parts;
    int32_t value_part = part / a.head_parts % a.value_parts;
    w.seq = tile.seq;
    w.first_query = tile.first_query + part / a.head_parts / a.value_parts * a.queries;
    w.past_query =
        min(min(w.first_query + a.queries, tile.first_query + a.tile_queries), s.query_len);
    w.kv_head = unit % l.num_kv_heads;
    w.first_head = w.kv_head * a.group + head_part * a.heads;
    w.num_heads = min(a.heads, a.group - head_part * a.heads);
    w.first_value = I::PLAIN ? 0 : value_part * I::DV;
    folioi_range of_first = seq_keys(&s, l.window_left, l.window_right, w.first_query);
    folioi_range of_last = seq_keys(&s, l.window_left, l.window_right, w.past_query - 1);
    w.begin = of_first.begin;
    w.end = of_last.end;
    w.all_begin = of_last.begin;
    w.all_end = of_first.end;
    return w;
}

/* M row tiles from row0 on; false: nothing is stored, NaN has been met. */
template <class I, int M>
static __device__ __forceinline__ bool attend_rows(const prefill_args &a, typename I::shared &sh,
                                                   int row0, bool any_values)
{
    prefill_state<I::DV, M> st;
    attend_range<I, M>(st, a, sh.work, sh, row0, any_values);
    if (__syncthreads_or(!any_values && has_nan(st))) return false;
    finish_rows<I, M>(st, a, sh.work, sh, row0);
    store_rows<I, M>(st, a, sh.work, sh, row0);
    return true;
}

/* Three blocks take no spills on sm_90; before it they do. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PREFILL_BLOCKS(I) (I::BLOCKS < 2 ? I::BLOCKS : 2)
#else
#define PREFILL_BLOCKS(I) I::BLOCKS
#endif

template <class I>
static __global__ void __launch_bounds__(I::THREADS, PREFILL_BLOCKS(I))
    prefill_kernel(const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(128) char memory[];
    typename I::shared &sh = *(typename I::shared *)memory;
    int32_t units = a.layer.num_kv_heads * a.head_parts * a.value_parts * a.pieces;
    folioi_prefill_tile tile = a.tiles[blockIdx.x / units];
    if (tile.seq < 0) return;
    if (threadIdx.x == 0) {
        folioi_cuda_seq seq = a.step.seqs[tile.seq];
        sh.seq = seq;
        sh.work = work_of<I>(a, tile, blockIdx.x % units, seq);
    }
    __syncthreads();
    if (sh.work.first_query >= sh.work.past_query) return; /* the sequence ends before this piece */
    int row0 = (int)threadIdx.x / 32 * I::WARP_ROWS;
    /* a NaN may have come from a key that its row does not see: then again, slowly */
    if constexpr (!I::PLAIN) {
        for (int any_values = 0; !attend_rows<I, 1>(a, sh, row0, any_values); any_values = 1)
            continue;
    } else {
        if (attend_rows<I, I::M_TILES>(a, sh, row0, false)) return;
        for (int m = 0; m < I::M_TILES; m++) attend_rows<I, 1>(a, sh, row0 + m * 16, true);
    }
}

#endif
