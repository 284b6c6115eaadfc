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

#include "backends/cuda/prefill_bytes.h"

/* ---- one key tile ---- */

/* What M row tiles of a warp have come to. */
template <int DV, int M> struct prefill_state {
    float out[M][DV / 8][4];
    float largest[M][2], sum[M][2]; /* of rows l / 4 and l / 4 + 8; sums of this lane's keys */
    int32_t value_log2;             /* int8: out is in units of 2^value_log2 */
};

/* The rows' largest scores and sums go to shared memory, or come back. */
template <class I, int M>
static __device__ __forceinline__ void park(const prefill_state<I::DV, M> &st,
                                            typename I::shared &sh)
{
    if constexpr (I::PARKS)
#pragma unroll
        for (int i = 0; i < M * 2; i++) {
            sh.parked[i * 2][threadIdx.x] = st.largest[i / 2][i % 2];
            sh.parked[i * 2 + 1][threadIdx.x] = st.sum[i / 2][i % 2];
        }
}

template <class I, int M>
static __device__ __forceinline__ void unpark(prefill_state<I::DV, M> &st, typename I::shared &sh)
{
    if constexpr (I::PARKS)
#pragma unroll
        for (int i = 0; i < M * 2; i++) {
            st.largest[i / 2][i % 2] = sh.parked[i * 2][threadIdx.x];
            st.sum[i / 2][i % 2] = sh.parked[i * 2 + 1][threadIdx.x];
        }
}

template <class I, int M> using prefill_scores = float[M][I::KEYS / 8][4];

/* Another chunk of the row in which a lane's ldmatrix reads, `at` being that of chunk 0 in a row of whole 128 bytes, or 64. */
static __device__ __forceinline__ uint32_t swizzled(uint32_t at, int chunk)
{
    return (at ^ (uint32_t)(chunk % 8 << 4)) + (uint32_t)(chunk / 8 << 7);
}

/* Where a lane's ldmatrix reads K: rows of 16 keys in two chunks, or of 8 bits those of 32 keys in one. */
template <class I> static __device__ __forceinline__ uint32_t keys_at(uint32_t k)
{
    int lane = fresh_lane();
    if constexpr (I::KV != KV_WIDE) return k + chunk_at<I::K_ROW>(lane, 0);
    else return k + chunk_at<I::K_ROW>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/* One ldmatrix of K: 16 dims of 16 keys, or of 8 bits those of 32; kf[t]: of 8 keys. */
template <class I, int TILES>
static __device__ __forceinline__ void load_keys(uint32_t (&kf)[TILES][2], uint32_t k_at, int d,
                                                 int n)
{
    if constexpr (I::KV != KV_WIDE) {
        load_byte_keys<I::KV>(kf, swizzled(k_at, d) + n * 32 * I::K_ROW);
    } else {
        uint32_t r[4];
        ldmatrix(r, swizzled(k_at, d * 2) + n * 16 * I::K_ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) kf[i / 2][i % 2] = r[i];
    }
}

/* scores = Q K^T */
template <class I, int M>
static __device__ __forceinline__ void multiply_keys(prefill_scores<I, M> &s, uint32_t q,
                                                     uint32_t k, int row0)
{
    using T = typename I::T;
    constexpr int TILES = 4 / I::KV_SIZE;
    int lane = fresh_lane();
    uint32_t q_at = q + chunk_at<I::DK * 2>(row0 + lane % 16, lane / 16), k_at = keys_at<I>(k);
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
        for (int m = 0; m < M; m++) ldmatrix(qf[m], swizzled(q_at, d * 2) + m * 16 * I::DK * 2);
#pragma unroll
        for (int n = 0; n < I::KEYS / 8 / TILES; n++) {
            uint32_t kf[TILES][2];
            load_keys<I>(kf, k_at, d, n);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    mma<T>(s[m][TILES * n + t], qf[m], kf[t][0], kf[t][1]);
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
                                            int32_t first_key, int row0)
{
    if constexpr (I::DK == 64) { /* slower, but spills nothing */
        each_score<I, M>(s, sh, row0, [=](float &x, const auto &row, int32_t key) {
            int32_t j = first_key + key;
            if (j < row.seen.begin || j >= row.seen.end) x = -CUDART_INF_F;
        });
    } else {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int lane = fresh_lane();
                const folioi_range &seen = sh.rows[row0 + m * 16 + r * 8 + lane / 4].seen;
                int32_t first = first_key + lane % 4 * 2;
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
                                                typename I::shared &sh, int32_t first_key, int row0)
{
    int lane = fresh_lane();
    prefill_scores<I, M> copy;
    memcpy(copy, s, sizeof s);
#pragma unroll 1
    for (int i = 0; i < M * I::KEYS / 2; i++) {
        int n = i / 4 % (I::KEYS / 8), m = i / (I::KEYS / 2);
        const auto &row = sh.rows[row0 + m * 16 + i % 4 / 2 * 8 + lane / 4];
        int32_t j = first_key + n * 8 + lane % 4 * 2 + i % 2;
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
          far = 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2 * LOG2E)));
    return y < 0.09f ? near : far;
}

/* What the layer's options make of the scores. */
template <class I, int M>
static __device__ __forceinline__ void apply_options(prefill_scores<I, M> &s, const prefill_args &a,
                                                     typename I::shared &sh, int32_t first_key,
                                                     int row0)
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
            x -= row.slope * fabsf((float)(row.own - (first_key + key)));
        });
    if (l.bias.data != NULL) add_bias<I, M>(s, l.bias, sh, first_key, row0);
}

/*
 * Weights of f16 are kept 2^12 times larger: small ones then keep their digits. The sum is as much larger.
 */
template <typename T> struct weight_shift {
    static constexpr float LOG2 = 0.0f, INVERSE = 1.0f;
};
template <> struct weight_shift<__half> {
    static constexpr float LOG2 = 12.0f, INVERSE = 0x1p-12f;
};

/* What one unit of the scores is in row + lane / 4. */
template <class I>
static __device__ __forceinline__ float score_unit(const prefill_args &a, typename I::shared &sh,
                                                   int row)
{
    if constexpr (!I::PLAIN) return 1.0f;
    else if constexpr (I::KV == KV_WIDE) return a.layer.scale;
    else
        return a.layer.scale * (I::KV == KV_INT8 ? 1.0f : a.layer.k.scale) *
               sh.rows[row + fresh_lane() / 4].unit;
}

/* Scores beyond this give their differences first: the rounding of a product could be a weight's overflow. */
#define LARGE_SCORE 1e6f

static __device__ __forceinline__ float finite_or_0(float x)
{
    return x == -CUDART_INF_F ? 0.0f : x;
}

/* The largest score so far of each row, and what was summed before times rescale; are any of them large? */
template <class I, int M>
static __device__ __forceinline__ bool find_largest(const prefill_scores<I, M> &s,
                                                    prefill_state<I::DV, M> &st,
                                                    float (&rescale)[M][2], const prefill_args &a,
                                                    typename I::shared &sh, int row0)
{
    bool is_large = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float before = st.largest[m][r], x = before;
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
                x = fmaxf(x, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
            st.largest[m][r] = x;
            float unit = LOG2E * score_unit<I>(a, sh, row0 + m * 16 + r * 8);
            rescale[m][r] = exp2_approx((before - finite_or_0(x)) * unit);
            is_large |= fabsf(finite_or_0(x) * unit) > LARGE_SCORE;
        }
    return is_large;
}

/* Scores become weights relative to the largest so far, what was summed before is brought to it. */
template <class I, int M>
static __device__ __forceinline__ void soften(prefill_scores<I, M> &s, prefill_state<I::DV, M> &st,
                                              const prefill_args &a, typename I::shared &sh,
                                              int row0)
{
    constexpr float SHIFT = weight_shift<typename I::T>::LOG2;
    float rescale[M][2];
    bool is_same = true, is_large = find_largest<I, M>(s, st, rescale, a, sh, row0);
    is_large = !I::PLAIN || __any_sync(ALL_LANES, is_large);
    if (is_large) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] -= finite_or_0(st.largest[m][i / 2]);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float unit = LOG2E * score_unit<I>(a, sh, row0 + m * 16 + r * 8), sum = 0.0f;
            float base = is_large ? -SHIFT : fmaf(finite_or_0(st.largest[m][r]), unit, -SHIFT);
#pragma unroll
            for (int n = 0; n < I::KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &y = s[m][n][r * 2 + e];
                    y = exp2_approx(fmaf(y, unit, -base));
                    sum += y;
                }
            st.sum[m][r] = st.sum[m][r] * rescale[m][r] + sum;
            is_same &= rescale[m][r] == 1.0f;
        }
    if (__all_sync(ALL_LANES, is_same)) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) st.out[m][n][i] *= rescale[m][i / 2];
}

/* ---- scales of int8: those of K go to the scores, those of V to the weights ---- */

/* Numbers of keys times factor times the keys' scales; with only_finite, those of other scales become 0. */
template <class I, int M>
static __device__ __forceinline__ void scale_keys(prefill_scores<I, M> &s, const float *scales,
                                                  float factor, bool only_finite)
{
    scales += fresh_lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < I::KEYS / 8; n++) {
        float2 two = *(const float2 *)(scales + n * 8);
        float f[2] = {two.x * factor, two.y * factor};
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (only_finite && !(fabsf(f[i]) < CUDART_INF_F)) f[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] *= f[i % 2];
    }
}

/* The exponent of a scale, rounded up; -126 where it is 0 or not finite. */
static __device__ __forceinline__ int32_t exponent_of(float scale)
{
    int32_t exponent = (int32_t)(__float_as_uint(scale) >> 23 & 255);
    return exponent == 255 ? -126 : min(exponent, 252) - 126;
}

/* Weights times the scales of V, in units that keep them in the range of f16: out follows where a larger one is met. */
template <class I, int M>
static __device__ __forceinline__ void scale_weights(prefill_scores<I, M> &s,
                                                     prefill_state<I::DV, M> &st,
                                                     const float *scales, bool only_finite)
{
    int lane = fresh_lane();
    int32_t log2 = exponent_of(scales[lane % I::KEYS]);
    if (I::KEYS > 32) log2 = max(log2, exponent_of(scales[(lane + 32) % I::KEYS]));
    log2 = __reduce_max_sync(ALL_LANES, max(log2, st.value_log2));
    if (log2 != st.value_log2) {
        float factor = exp2_approx((float)(st.value_log2 - log2));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < I::DV / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) st.out[m][n][i] *= factor;
        st.value_log2 = log2;
    }
    scale_keys<I, M>(s, scales, exp2_approx((float)-log2), only_finite);
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

/* Where a lane's ldmatrix reads V. */
template <class I> static __device__ __forceinline__ uint32_t values_at(uint32_t v)
{
    int lane = fresh_lane();
    return v + chunk_at<I::V_ROW>(lane % 16, lane / 16);
}

/* One ldmatrix of V: for 16 keys 2 tiles of out, or 4 with 8 bits; vf[t]: those of one tile. */
template <class I, int TILES>
static __device__ __forceinline__ void load_values(uint32_t (&vf)[TILES][2], uint32_t v_at, int k,
                                                   int n)
{
    uint32_t from = swizzled(v_at, n * 2) + k * 16 * I::V_ROW;
    if constexpr (I::KV != KV_WIDE) {
        load_byte_values<I::KV>(vf, from);
    } else {
        uint32_t r[4];
        ldmatrix_trans(r, from);
#pragma unroll
        for (int i = 0; i < 4; i++) vf[i / 2][i % 2] = r[i];
    }
}

/* out += weights V */
template <class I, int M>
static __device__ __forceinline__ void multiply_values(prefill_state<I::DV, M> &st,
                                                       const prefill_scores<I, M> &s, uint32_t v)
{
    using T = typename I::T;
    constexpr int TILES = 4 / I::KV_SIZE;
    uint32_t v_at = values_at<I>(v);
#pragma unroll
    for (int k = 0; k < I::KEYS / 16; k++) {
        uint32_t p[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) pack_weights<I>(p[m], s[m], k);
#pragma unroll
        for (int n = 0; n < I::DV / 8 / TILES; n++) {
            uint32_t vf[TILES][2];
            load_values<I>(vf, v_at, k, n);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int m = 0; m < M; m++)
                    mma<T>(st.out[m][TILES * n + t], p[m], vf[t][0], vf[t][1]);
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

/* The same of two keys whose numbers are all NaN, their scales not being finite. */
static __device__ uint32_t scale_codes(const float *scales)
{
    float2 two = *(const float2 *)(scales + fresh_lane() % 4 * 2);
    uint32_t nan = special<__half>::NOT_A_NUMBER;
    return (fabsf(two.x) < CUDART_INF_F ? 0 : nan) | (fabsf(two.y) < CUDART_INF_F ? 0 : nan << 16);
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
                                                           uint32_t seen, uint32_t v,
                                                           const float *scales)
{
    using T = typename I::T;
    constexpr int TILES = 4 / I::KV_SIZE;
    float out[I::DV / 8][4];
    memcpy(out, st.out[0], sizeof out);
    uint32_t v_at = values_at<I>(v);
#pragma unroll 1
    for (int n = 0; n < I::DV / 8 / TILES; n++) {
        float codes[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < I::KEYS / 16; k++) {
            uint32_t vf[TILES][2], p[4], ones[4];
            load_values<I>(vf, v_at, k, n);
            pack_weights<I>(p, s[0], k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t two = seen >> (k * 8 + i / 2 * 4 + i % 2 * 2);
                ones[i] = (two & 1) * special<T>::ONE | (two >> 1 & 1) * (special<T>::ONE << 16);
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                uint32_t cf[2] = {take_specials<T>(&vf[t][0]), take_specials<T>(&vf[t][1])};
                if constexpr (I::KV == KV_INT8) {
                    cf[0] = scale_codes(scales + k * 16);
                    cf[1] = scale_codes(scales + k * 16 + 8);
                }
                mma<T>(out[TILES * n + t], p, vf[t][0], vf[t][1]);
                mma<T>(codes[t], ones, cf[0], cf[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
            add_specials(out[TILES * n + i / 4][i % 4], codes[i / 4][i % 4]);
    }
    memcpy(st.out[0], out, sizeof out);
}

/* ---- one tile ---- */

/* The first I::KEYS keys of a tile; V may be on its way: await_values() returns when it is there. */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_part(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, typename I::shared &sh,
                                                   int stage, int32_t first_key, int row0,
                                                   bool is_edge, bool any_values, F await_values)
{
    uint32_t k = shared_address(sh.kv[stage]);
    const float *k_scales = sh.scales[stage], *v_scales = k_scales + I::TILE_KEYS;
    prefill_scores<I, M> s;
    multiply_keys<I, M>(s, shared_address(sh.q), k, row0);
    if constexpr (I::KV == KV_INT8) scale_keys<I, M>(s, k_scales, 1.0f, false);
    if constexpr (!I::PLAIN) apply_options<I, M>(s, a, sh, first_key, row0);
    if (is_edge) mask<I, M>(s, sh, first_key, row0);
    uint32_t seen = 0;
    if (M == 1 && any_values) seen = seen_bits<I>(s[0]);
    unpark<I, M>(st, sh);
    soften<I, M>(s, st, a, sh, row0);
    park<I, M>(st, sh);
    await_values();
    if constexpr (I::KV == KV_INT8) scale_weights<I, M>(s, st, v_scales, any_values);
    if constexpr (M == 1) {
        if (any_values) {
            multiply_any_values<I>(st, s, seen, k + I::K_BYTES, v_scales);
            return;
        }
    }
    multiply_values<I, M>(st, s, k + I::K_BYTES);
}

/* Past the last key that a row of the warp sees. */
template <class I, int M>
static __device__ __forceinline__ int32_t warp_end(typename I::shared &sh, int row0)
{
    return __reduce_max_sync(ALL_LANES, sh.rows[row0 + fresh_lane() % (M * 16)].seen.end);
}

/* Steps of keys in which a warp leaves out the end of an edge tile: the smallest that spills nothing. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define EDGE_STEP 64
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EDGE_STEP 16
#else
#define EDGE_STEP 32
#endif

/* One key tile. A warp leaves out what none of its rows sees at the tile's end. */
template <class I, int M, typename F>
static __device__ __forceinline__ void attend_keys(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int stage, int32_t tile,
                                                   int row0, bool any_values, F await_values)
{
    int32_t first = tile * I::KEYS, keys = I::KEYS;
    bool is_edge = first < w.all_begin || first + I::KEYS > w.all_end;
    if constexpr (I::PLAIN) {
        if (is_edge && !any_values) keys = warp_end<I, M>(sh, row0) - first;
        constexpr int STEP = I::DK == 64 || I::KV != KV_WIDE ? 32 : EDGE_STEP;
        if (keys <= 0) await_values();
        else if (keys <= 16 && STEP <= 16)
            attend_part<part_tile<I, 16>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else if (keys <= 32 && I::KEYS > 32 && STEP <= 32)
            attend_part<part_tile<I, 32>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else if (keys <= 48 && I::KEYS > 48 && STEP <= 16)
            attend_part<part_tile<I, 48>, M>(st, a, sh, stage, first, row0, true, false,
                                             await_values);
        else attend_part<I, M>(st, a, sh, stage, first, row0, is_edge, any_values, await_values);
    } else attend_part<I, M>(st, a, sh, stage, first, row0, is_edge, any_values, await_values);
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
    if (is_direct) fetch_tile<I>(a, w, sh, 0, tile, block);
    else mine = fetch_raw<I>(a, w, sh, tile, block);
    block = find_block<I>(a, w, sh.seq, tile + 1);
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (!is_direct) widen_tile<I>(a, w, sh, mine);
        if (tile + 1 < past) {
            if (is_direct) fetch_tile<I>(a, w, sh, stage ^ 1, tile + 1, block);
            else mine = fetch_raw<I>(a, w, sh, tile + 1, block);
            block = find_block<I>(a, w, sh.seq, tile + 2);
        }
        if (!is_direct) __syncthreads();
        attend_keys<I, M>(st, a, w, sh, stage, tile, row0, any_values, [] {});
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
    uint64_t address = row_address<I>(a, w, sh.seq, tile, block);
    fetch_keys<I>(a, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile));
    cp_async_commit();
    block = find_block<I>(a, w, sh.seq, tile + 1);
    for (; tile < past; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        fetch_values<I>(a, w, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile));
        cp_async_commit();
        address = row_address<I>(a, w, sh.seq, tile + 1, block);
        block = find_block<I>(a, w, sh.seq, tile + 2);
        attend_keys<I, M>(st, a, w, sh, 0, tile, row0, any_values, [&] {
            cp_async_wait<0>();
            __syncthreads();
            /* zeros after the last tile */
            fetch_keys<I>(a, sh.kv[0], address, in_pages<I>(a, w, sh.seq, tile + 1));
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
    st.value_log2 = -126;
    if (w.begin >= w.end) return;
    park<I, M>(st, sh);
    if constexpr (I::SPLIT) attend_split<I, M>(st, a, w, sh, row0, any_values);
    else attend_staged<I, M>(st, a, w, sh, row0, any_values);
    unpark<I, M>(st, sh);
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

/* What out is multiplied with beside 1 / sum. */
template <class I, int M>
static __device__ __forceinline__ float value_unit(const prefill_state<I::DV, M> &st,
                                                   const folioi_cuda_layer &l)
{
    if constexpr (I::KV == KV_INT8) return exp2_approx((float)st.value_log2);
    else if constexpr (I::KV != KV_WIDE) return l.v.scale;
    else return I::PLAIN ? 1.0f : value_scale_at_end(l);
}

/* Sinks join, sums become the factor of the row's out; lse is stored. */
template <class I, int M>
static __device__ __forceinline__ void finish_rows(prefill_state<I::DV, M> &st,
                                                   const prefill_args &a, const prefill_work &w,
                                                   typename I::shared &sh, int row0)
{
    constexpr float INVERSE = weight_shift<typename I::T>::INVERSE;
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    float unit = value_unit<I, M>(st, l) * INVERSE;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = row0 + m * 16 + r * 8;
            float sum = st.sum[m][r] * INVERSE;
            float largest = st.largest[m][r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            row_place p = place_of(a, w, row + lane / 4);
            bool is_empty = sum == 0.0f && largest == -CUDART_INF_F;
            float sink = -CUDART_INF_F, lse, factor = 1.0f;
            if (l.sinks != NULL && p.query >= 0) sink = l.sinks[p.head];
            if (is_empty) {
                lse = sink;
                factor = 0.0f;
            } else {
                largest = finite_or_0(largest) * score_unit<I>(a, sh, row); /* 0: all are NaN */
                float top = fmaxf(largest, sink);
                factor = exp2_approx((largest - top) * LOG2E);
                sum = sum * factor + exp2_approx((sink - top) * LOG2E);
                lse = top + log2f(sum) * LN2;
                factor = factor / sum * unit;
            }
            if (l.lse != NULL && p.query >= 0 && lane % 4 == 0 && w.first_value == 0)
                l.lse[(sh.seq.query_row + p.query) * l.lse_token + p.head * l.lse_head] = lse;
            st.sum[m][r] = factor;
        }
}

/* A row's 8 numbers of out, four lanes having two of them each; of 8-bit V, every second of 16. */
template <class I, int M>
static __device__ __forceinline__ void put_row(const prefill_state<I::DV, M> &st, char *rows,
                                               int row, int m, int r, bool is_bf16)
{
    using T = typename I::T;
    int lane = fresh_lane();
    float f = st.sum[m][r];
#pragma unroll
    for (int n = 0; n < I::DV / 8; n += I::KV == KV_WIDE ? 1 : 2) {
        const float *x = &st.out[m][n][r * 2];
        if constexpr (I::KV == KV_WIDE) {
            uint32_t two = pack<T>(x[0] * f, x[1] * f);
            *(uint32_t *)(rows + chunk_at<I::DV * 2>(row, n) + lane % 4 * 4) = two;
        } else {
            const float *odd = &st.out[m][n + 1][r * 2];
            uint2 four;
            if (is_bf16)
                four = make_uint2(pack<__nv_bfloat16>(x[0] * f, odd[0] * f),
                                  pack<__nv_bfloat16>(x[1] * f, odd[1] * f));
            else four = make_uint2(pack<T>(x[0] * f, odd[0] * f), pack<T>(x[1] * f, odd[1] * f));
            *(uint2 *)(rows + chunk_at<I::DV * 2>(row, n + lane % 4 / 2) + lane % 2 * 8) = four;
        }
    }
}

/* Out by way of the same rows of Q, so that a row leaves in one piece. */
template <class I, int M>
static __device__ __forceinline__ void store_rows(const prefill_state<I::DV, M> &st,
                                                  const prefill_args &a, const prefill_work &w,
                                                  typename I::shared &sh, int row0)
{
    const folioi_cuda_layer &l = a.layer;
    int lane = fresh_lane();
    char *rows = sh.q + row0 * I::DK * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < M * 2; i++)
        put_row<I, M>(st, rows, i * 8 + lane / 4, i / 2, i % 2, l.dtype == FOLIO_BF16);
    row_place p = place_of(a, w, row0 + lane % (M * 16));
    int64_t mine =
        p.query < 0 ? -1 : row_index(l.out, sh.seq.query_row + p.query, p.head) + w.first_value;
    __syncwarp();
    constexpr int CHUNKS = I::DV / 8;
#pragma unroll 8
    for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        int64_t at = __shfl_sync(ALL_LANES, mine, row);
        if (at < 0 || (!I::PLAIN && chunk * 8 >= l.v_dims - w.first_value)) continue;
        uint4 x = *(const uint4 *)(rows + chunk_at<I::DV * 2>(row, chunk));
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
    int32_t part = divide(unit, l.num_kv_heads), whole_part = divide(part, a.head_parts);
    int32_t piece = divide(whole_part, a.value_parts),
            value_part = whole_part - piece * a.value_parts;
    int32_t head_part = part - whole_part * a.head_parts;
    w.seq = tile.seq;
    w.first_query = tile.first_query + piece * a.queries;
    w.past_query =
        min(min(w.first_query + a.queries, tile.first_query + a.tile_queries), s.query_len);
    w.kv_head = unit - part * l.num_kv_heads;
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

/*
 * The first row of the warp. Later rows of a causal tile see more keys, and a multiprocessor gives warp w to its quarter w % 4:
 * every quarter gets early rows and late ones.
 */
template <class I> static __device__ __forceinline__ int first_row(void)
{
    int warp = (int)threadIdx.x / 32;
    bool is_turned = I::WARPS > 4 ? warp / 4 % 2 : __popc(blockIdx.x) % 2;
    return (is_turned ? (I::WARPS > 4 ? warp / 4 * 4 + 3 - warp % 4 : I::WARPS - 1 - warp) : warp) *
           I::WARP_ROWS;
}

/* Three blocks take no spills on sm_90; before it they do. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PREFILL_BLOCKS(I) (I::BLOCKS < 2 ? I::BLOCKS : 2)
#else
#define PREFILL_BLOCKS(I) I::BLOCKS
#endif

/*
 * The block's place in the list, and its unit: kv head and parts. Large heads are taken a few at a time, so that K and V stay
 * in L2 for the tiles that share them, but enough of them that their longest tiles do not end last and alone.
 */
template <class I>
static __device__ __forceinline__ int32_t find_tile(const prefill_args &a, int32_t *unit)
{
    int32_t units = a.layer.num_kv_heads * a.head_parts * a.value_parts * a.pieces;
    int32_t at_once = units, first = 0;
    if constexpr (I::DK > 128) {
#pragma unroll
        for (int32_t few = 4; few >= 1; few /= 2) {
            int32_t last = a.enough / few - 1;
            if (few < at_once && last < a.capacity && __ldg(&a.tiles[last].seq) >= 0) at_once = few;
        }
        first = (int32_t)blockIdx.x / (a.capacity * at_once) * at_once;
    }
    int32_t in_round = (int32_t)blockIdx.x - a.capacity * first;
    at_once = min(at_once, units - first);
    int32_t at = divide(in_round, at_once);
    *unit = first + in_round - at * at_once;
    return at;
}

template <class I>
static __global__ void __launch_bounds__(I::THREADS, PREFILL_BLOCKS(I))
    prefill_kernel(const __grid_constant__ prefill_args a)
{
    extern __shared__ __align__(128) char memory[];
    typename I::shared &sh = *(typename I::shared *)memory;
    int32_t unit;
    folioi_prefill_tile tile = a.tiles[find_tile<I>(a, &unit)];
    if (tile.seq < 0) return;
    if (threadIdx.x == 0) {
        folioi_cuda_seq seq = a.step.seqs[tile.seq];
        sh.seq = seq;
        sh.work = work_of<I>(a, tile, unit, seq);
    }
    __syncthreads();
    if (sh.work.first_query >= sh.work.past_query) return; /* the sequence ends before this piece */
    int row0 = first_row<I>();
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
