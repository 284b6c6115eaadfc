/*
 * hopper_options.h: what a soft cap and ALiBi make of scores, before masks and weights. Scores are in log2 units then, as
 * weights take them.
 */
#ifndef FOLIOI_CUDA_HOPPER_OPTIONS_H
#define FOLIOI_CUDA_HOPPER_OPTIONS_H

#include "backends/cuda/prefill/hopper/hopper_scores.h"
#include "backends/cuda/tanh.h"

/* Of a thread's two rows. */
struct row_options {
    float slope[2]; /* with log2(e); 0: none */
    int32_t own[2]; /* where the row stands among the keys */
    bool is_causal; /* it sees none behind that */
};

template <class I>
static __device__ __forceinline__ void load_options(row_options &o, const hopper_args &a,
                                                    const tile_of<I> &t)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane / 4;
    o.is_causal = t.ends.step != 0 && t.ends.first == t.own + 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_place p = place_of(a, row + 8 * i);
        bool has_slope = a.options.slopes != NULL && is_row(t.out, p);
        o.slope[i] = has_slope ? __ldg(a.options.slopes + t.first_head + p.head) * LOG2E : 0.0f;
        o.own[i] = t.own + p.query;
    }
}

/*
 * Most scores are far below the cap: then a polynomial does, which leaves the unit of exponentials to the weights. A number
 * comes to the same bits in both branches, because what is beside it may be of others.
 */
template <int N, int COUNT>
static __device__ __forceinline__ void cap_scores(float (&s)[COUNT], const hopper_options &o)
{
    float most = 0.0f, scale = o.scale_of_cap;
#pragma unroll
    for (int j = 0; j < N / 2; j++) most = fmaxf(most, fabsf(s[j]));
    if (__any_sync(ALL_LANES, most * scale > NEAR_TANH)) {
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float x = s[j] * scale, near = x * tanh_ratio(x * x, o.cap_log2);
            s[j] = fabsf(x) > NEAR_TANH ? tanh_far(x) * o.cap_log2 : near;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        float x = s[j] * scale;
        s[j] = x * tanh_ratio(x * x, o.cap_log2);
    }
}

/* N columns of products, of keys from `first` on. Keys behind a causal row are masked later, whatever they come to here. */
template <class I, int N>
static __device__ __forceinline__ void apply_options(typename I::scores &s, const hopper_args &a,
                                                     const row_options &o, int32_t first)
{
    float scale = a.scale_log2;
    if (a.options.cap > 0.0f) {
        cap_scores<N>(s, a.options);
        scale = 1.0f;
        if (a.options.slopes == NULL) return;
    }
    int32_t lane_first = first + fresh_lane() % 4 * 2;
    float from[2] = {(float)(lane_first - o.own[0]), (float)(lane_first - o.own[1])};
    if (o.is_causal) {
#pragma unroll
        for (int i = 0; i < 2; i++) from[i] *= o.slope[i];
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float by = fmaf(o.slope[j / 2 % 2], (float)(j / 4 * 8 + j % 2), from[j / 2 % 2]);
            s[j] = fmaf(s[j], scale, by);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        float distance = fabsf(from[j / 2 % 2] + (float)(j / 4 * 8 + j % 2));
        s[j] = fmaf(-o.slope[j / 2 % 2], distance, s[j] * scale);
    }
}

/* The same of one score, in natural units. */
static __device__ __forceinline__ float option_score(const hopper_args &a, float score, float slope,
                                                     int32_t distance)
{
    const hopper_options &o = a.options;
    if (o.cap > 0.0f) score = o.cap * tanhf(score / o.cap);
    return fmaf(-slope, fabsf((float)distance), score);
}

#endif
