/*
 * latent_step.h: what a warpgroup does with the keys of a tile. Warpgroup w computes scores and weights of every second
 * buffer of keys, and half w of out for all of them:
 *
 *   own buffer:    Q K^T, first with the half of K that is its half of V | weights of the other's buffer times V meanwhile
 *                  softmax, weights to the buffer's rope panel, where the other finds them | own weights times V
 *
 * Weights are relative to a reference of each row that only grows, from buffer to buffer, and goes with them: sums are
 * rescaled when it has grown by much (hopper_scores.h).
 */
#ifndef FOLIOI_CUDA_LATENT_STEP_H
#define FOLIOI_CUDA_LATENT_STEP_H

#include "backends/cuda/prefill/hopper/hopper_scores.h"
#include "backends/cuda/prefill/hopper/latent_tile.h"

/* Numbers of named barriers: weights of warpgroup w are there; all of warpgroup w; both. */
enum { BARRIER_WEIGHTS = 1, BARRIER_WARPGROUP = 3, BARRIER_BOTH = 5 };

/* A thread's two rows. */
struct latent_rows {
    float base[2];     /* the reference less the lift, in log2 */
    float sum[2];      /* of this thread's weights */
    float sum_base[2]; /* which are relative to this */
};

static __device__ __forceinline__ void latent_rescale(float (&o)[128], float by0, float by1)
{
#pragma unroll
    for (int j = 0; j < 32; j++) {
        o[4 * j] *= by0;
        o[4 * j + 1] *= by0;
        o[4 * j + 2] *= by1;
        o[4 * j + 3] *= by1;
    }
}

static __device__ __forceinline__ void latent_release(const uint64_t &barrier)
{
    if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&barrier));
}

/* The first of a thread's two rows. */
static __device__ __forceinline__ int latent_row(int lane)
{
    return (int)threadIdx.x / WARP % 4 * 16 + lane / 4;
}

/* The other's weights have come: sums become relative to their reference. */
template <int W>
static __device__ __forceinline__ void take_weights(const latent_shared &sh, float (&o)[128],
                                                    latent_rows &r)
{
    named_sync(BARRIER_WEIGHTS + (1 - W), 2 * 128);
    int row = latent_row(fresh_lane());
    float x0 = sh.base[1 - W][row], x1 = sh.base[1 - W][row + 8];
    bool has_moved = __any_sync(ALL_LANES, x0 != r.base[0] || x1 != r.base[1]);
    __syncwarp(); /* read by all: a lane gives the buffer back */
    if (has_moved) latent_rescale(o, exp2_approx(r.base[0] - x0), exp2_approx(r.base[1] - x1));
    r.base[0] = x0;
    r.base[1] = x1;
}

/* The other's weights times this warpgroup's half of V of the other's buffer. */
template <typename T, int W>
static __device__ __forceinline__ void add_other_values(const latent_memory &m, float (&o)[128])
{
    uint32_t from = m.buffer(1 - W);
    uint64_t p = matrix_at(from + LATENT_ROPE * LATENT_PANEL_BYTES, 16, LATENT_BAND_BYTES);
    uint64_t v = matrix_at(from + W * LATENT_HALF_PANELS * LATENT_PANEL_BYTES, LATENT_PANEL_BYTES,
                           LATENT_BAND_BYTES);
#pragma unroll
    for (int k = 0; k < LATENT_KEYS / 16; k++)
        multiply_columns<T>(o, p + 2 * k, v + k * (2 * LATENT_BAND_BYTES / 16));
}

template <typename T, int W>
static __device__ __forceinline__ void add_own_values(const latent_memory &m, float (&o)[128],
                                                      const uint32_t (&p)[16])
{
    uint64_t v = matrix_at(m.buffer(W) + W * LATENT_HALF_PANELS * LATENT_PANEL_BYTES,
                           LATENT_PANEL_BYTES, LATENT_BAND_BYTES);
#pragma unroll
    for (int k = 0; k < LATENT_KEYS / 16; k++)
        multiply_columns<T>(o, p + 4 * k, v + k * (2 * LATENT_BAND_BYTES / 16));
}

/* Scores of the k-th panel in the order of use: the half that is this warpgroup's V, the other half, the rope panel. */
template <typename T, int W, int FIRST, int PAST>
static __device__ __forceinline__ void score_panels(const latent_memory &m, float (&s)[32],
                                                    uint32_t phase)
{
    uint64_t q = matrix_at(m.q(), 16, 1024);
    uint64_t keys = matrix_at(m.buffer(W), 16, LATENT_BAND_BYTES);
#pragma unroll
    for (int k = FIRST; k < PAST; k++) {
        const int panel = k < LATENT_ROPE ? k ^ (W * LATENT_HALF_PANELS) : LATENT_ROPE;
        if (k % LATENT_HALF_PANELS == 0 && k < LATENT_ROPE)
            bulk_wait(shared_address(&m.sh().filled[W][k / LATENT_HALF_PANELS]), phase);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint64_t a = q + panel * (LATENT_Q_PANEL_BYTES / 16) + 2 * i;
            uint64_t b = keys + panel * (LATENT_PANEL_BYTES / 16) + 2 * i;
            if (k > 0 || i > 0) multiply_rows<T, LATENT_KEYS, 1>(s, a, b);
            else multiply_rows<T, LATENT_KEYS, 0>(s, a, b);
        }
    }
}

/* -inf where a row does not see a key of those from `first` on. */
static __device__ __forceinline__ void latent_mask(float (&s)[32], const hopper_args &a,
                                                   const latent_tile &t, int32_t first)
{
    int lane = fresh_lane(), row = latent_row(lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t query = place_of(a, row + 8 * i).query;
        int32_t begin = begin_of(t.begins, query) - first - lane % 4 * 2;
        int32_t end = end_of(t.ends, query) - first - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            int column = j / 2 * 8 + j % 2;
            if (column < begin || column >= end) s[4 * (j / 2) + 2 * i + j % 2] = -CUDART_INF_F;
        }
    }
}

/* References follow the scores; true: by1 and by2 are what sums of values are to be multiplied with. */
template <typename T>
static __device__ __forceinline__ bool latent_raise(const float (&s)[32], latent_rows &r,
                                                    float scale, float &by0, float &by1)
{
    using W = weight_range<T>;
    float x0 = s[0], x1 = s[2];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1]));
        x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    x0 *= scale;
    x1 *= scale;
    constexpr float MOST = W::LIFT + W::SLACK;
    if (!__any_sync(ALL_LANES, x0 > r.base[0] + MOST || x1 > r.base[1] + MOST)) return false;
#pragma unroll
    for (int i = 1; i < 4; i *= 2) {
        x0 = fmaxf(x0, __shfl_xor_sync(ALL_LANES, x0, i));
        x1 = fmaxf(x1, __shfl_xor_sync(ALL_LANES, x1, i));
    }
    x0 = fmaxf(x0 - W::LIFT, r.base[0]);
    x1 = fmaxf(x1 - W::LIFT, r.base[1]);
    by0 = exp2_approx(r.base[0] - x0);
    by1 = exp2_approx(r.base[1] - x1);
    r.base[0] = x0;
    r.base[1] = x1;
    return true;
}

/* Scores become weights. */
template <typename T>
static __device__ __forceinline__ void latent_weigh(float (&s)[32], uint32_t (&p)[16],
                                                    latent_rows &r, float scale)
{
    float even[2] = {0.0f, 0.0f}, odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        s[4 * j] = exp2_approx(fmaf(s[4 * j], scale, -r.base[0]));
        s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale, -r.base[0]));
        s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale, -r.base[1]));
        s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale, -r.base[1]));
        even[0] += s[4 * j];
        odd[0] += s[4 * j + 1];
        even[1] += s[4 * j + 2];
        odd[1] += s[4 * j + 3];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        r.sum[i] = fmaf(r.sum[i], exp2_approx(r.sum_base[i] - r.base[i]), even[i] + odd[i]);
        r.sum_base[i] = r.base[i];
    }
#pragma unroll
    for (int j = 0; j < 16; j++) p[j] = pack<T>(s[2 * j], s[2 * j + 1]);
}

/* Keys that no row sees may hold anything, and 0 times NaN is NaN: their V becomes zeros. */
static __device__ __forceinline__ void clear_unseen(uint32_t buffer, const latent_tile &t,
                                                    int32_t first)
{
    for (int i = (int)threadIdx.x % 128; i < LATENT_KEYS * 64; i += 128) {
        int key = i / 64, panel = i / 8 % 8;
        if (first + key >= t.seen_begin && first + key < t.seen_end) continue;
        store_shared(buffer + key / 8 * LATENT_BAND_BYTES + panel * LATENT_PANEL_BYTES +
                         key % 8 * 128 + i % 8 * 16,
                     make_uint4(0, 0, 0, 0));
    }
}

/* The sum of a row's weights, by the four lanes that have them. */
static __device__ __forceinline__ float sum_of_row(float sum)
{
#pragma unroll
    for (int i = 1; i < 4; i *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, i);
    return sum;
}

/*
 * Weights to the rope panel of the own buffer, for the other. With those of the tile's last buffer of this warpgroup go the
 * sums of all its weights, to `sums`; NULL: it is not the last.
 */
template <int W>
static __device__ __forceinline__ void give_weights(const latent_memory &m, const latent_tile &t,
                                                    const uint32_t (&p)[16], const latent_rows &r,
                                                    int32_t first, float2 *sums)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP % 4 * 16 + lane % 16;
    bool is_partial = first < t.seen_begin || first + LATENT_KEYS > t.seen_end;
    named_sync(BARRIER_WARPGROUP + W, 128); /* nobody's scores need the rope panel any more */
    if (is_partial) clear_unseen(m.buffer(W), t, first);
    uint32_t to = m.buffer(W) + LATENT_ROPE * LATENT_PANEL_BYTES + row / 8 * LATENT_BAND_BYTES +
                  row % 8 * 128;
#pragma unroll
    for (int k = 0; k < 4; k++) stmatrix(to + ((2 * k + lane / 16) ^ row % 8) * 16, p + 4 * k);
    if (lane % 4 == 0) {
        int own = latent_row(lane);
        m.sh().base[W][own] = r.base[0];
        m.sh().base[W][own + 8] = r.base[1];
    }
    if (sums != NULL) {
        float sum0 = sum_of_row(r.sum[0]), sum1 = sum_of_row(r.sum[1]);
        if (lane % 4 == 0) {
            int own = latent_row(lane);
            sums[own] = make_float2(sum0, r.base[0]);
            sums[own + 8] = make_float2(sum1, r.base[1]);
        }
    }
    bulk_fence();
    if (is_partial) named_sync(BARRIER_WARPGROUP + W, 128);
    named_arrive(BARRIER_WEIGHTS + W, 2 * 128);
}

/*
 * The other's weights times V, between panels of scores, so that products never pause; or before all of them, where memory is
 * the limit: the other's buffer is free before this one has come.
 */
template <typename T, int W, bool BETWEEN>
static __device__ __forceinline__ void latent_products(const latent_memory &m, float (&s)[32],
                                                       float (&o)[128], latent_rows &r,
                                                       uint32_t phase, bool has_other)
{
    constexpr int FIRST = BETWEEN ? LATENT_HALF_PANELS : 0;
    latent_shared &sh = m.sh();
    products_begin();
    score_panels<T, W, 0, FIRST>(m, s, phase);
    if (has_other) {
        take_weights<W>(sh, o, r);
        products_begin();
        add_other_values<T, W>(m, o);
    }
    products_commit();
    if (!BETWEEN && has_other) {
        products_wait<0>();
        products_ready(o);
        latent_release(sh.emptied[1 - W][1]);
        products_begin();
    }
    score_panels<T, W, FIRST, LATENT_PANELS>(m, s, phase);
    products_commit();
    products_wait<1>();
    if (BETWEEN && has_other) latent_release(sh.emptied[1 - W][1]);
    products_wait<0>();
    products_ready(s);
}

/*
 * A buffer of this warpgroup, keys from `first` on. has_other: the other's weights of the one before are added on the way.
 * sums: not NULL in the last.
 */
template <typename T, int W, bool BETWEEN>
static __device__ __forceinline__ void latent_step(const hopper_args &a, const latent_memory &m,
                                                   const latent_tile &t, float (&o)[128],
                                                   latent_rows &r, uint32_t phase, int32_t first,
                                                   bool has_other, float2 *sums)
{
    float s[32];
    uint32_t p[16];
    latent_shared &sh = m.sh();
    latent_products<T, W, BETWEEN>(m, s, o, r, phase, has_other);
    if (sums != NULL) latent_release(sh.q_emptied);
    if (first < t.common.begin || first + LATENT_KEYS > t.common.end) latent_mask(s, a, t, first);
    float by0 = 1.0f, by1 = 1.0f;
    bool has_grown = latent_raise<T>(s, r, a.scale_log2, by0, by1);
    latent_weigh<T>(s, p, r, a.scale_log2);
    give_weights<W>(m, t, p, r, first, sums);
    if (has_grown) latent_rescale(o, by0, by1);
    products_begin();
    add_own_values<T, W>(m, o, p);
    products_commit();
    products_wait<0>();
    products_ready(o);
    latent_release(sh.emptied[W][0]);
}

#endif
