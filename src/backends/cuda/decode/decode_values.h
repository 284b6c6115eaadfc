/*
 * decode_values.h: O^T += V^T P^T of one tile: o[i][n] is the fragment of 16 dims and rows 8 * n .. 8 * n + 7. The order of
 * dims depends on the form of the tile.
 */
#ifndef FOLIOI_DECODE_VALUES_H
#define FOLIOI_DECODE_VALUES_H

#include "backends/cuda/decode/decode_block.h"
#include "backends/cuda/decode/decode_softmax.h"
#include "backends/cuda/decode/decode_tile.h"
#include "backends/cuda/decode/decode_widen.h"
#include "backends/cuda/instructions.h"

/* ---- fragments of V^T ---- */

/* Which dims a row of a fragment of V^T is. */
enum dim_order { LINEAR_DIMS, EVEN_ODD_DIMS, PACKED_DIMS };

/* Fragments of V^T: dims 16 * i .. + 15 of a 16-bit tile. DIMS: of a fixed tile; 0: rows are `stride` apart. */
template <int DIMS, folioi_cuda_form FORM = FOLIOI_FORM_ROWS> struct values_16 {
    uint32_t from;
    __device__ __forceinline__ values_16(uint32_t v_tile, int stride)
    {
        int lane = threadIdx.x & 31;
        int token = (lane & 7) + (lane >> 4) * 8, chunk = (lane >> 3) & 1;
        from = v_tile +
               (DIMS ? fixed_place<DIMS, 2, FORM>(token, chunk) : token * stride + chunk * 16);
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t *) const
    {
        ldmatrix_trans(v, fixed_step<DIMS, 2, FORM>(from, 2 * i));
    }
};

/* The same of a packed 16-bit tile, transposed by movmatrix: rows g and g + 8 are dims that packed_dim tells. */
template <int DIMS> struct values_packed {
    uint32_t from;
    __device__ __forceinline__ values_packed(uint32_t v_tile)
    {
        int lane = threadIdx.x & 31;
        from = v_tile + fixed_place<DIMS, 2, FOLIOI_FORM_ROWS>(lane / 4, lane & 3);
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t raw[8]) const
    {
        if (i % 2 == 0) {
            load_shared(raw, from + i * 32);
            load_shared(raw + 4, from + i * 32 + 8 * DIMS * 2);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = movmatrix(raw[e / 2 * 4 + i % 2 * 2 + e % 2]);
    }
};

/* Dim in row g, or g + 8 where `upper`, of fragment i. */
static __device__ __forceinline__ int packed_dim(int i, int g, bool upper)
{
    return (i / 2 * 4 + g / 2) * 8 + (i % 2 * 2 + upper) * 2 + (g & 1);
}

/* The same of an 8-bit tile: rows g and g + 8 of a fragment are dims 2g and 2g + 1. */
template <int KIND, int DIMS> struct values_8 {
    uint32_t from;
    __device__ __forceinline__ values_8(uint32_t v_tile, int stride)
    {
        int lane = threadIdx.x & 31;
        int token = lane & 15, chunk = lane >> 4;
        from = v_tile + (DIMS ? fixed_place<DIMS, 1, FOLIOI_FORM_ROWS>(token, chunk)
                              : token * stride + chunk * 16);
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t raw[4]) const
    {
        if (i % 2 == 0) ldmatrix_trans(raw, fixed_step<DIMS, 1, FOLIOI_FORM_ROWS>(from, i));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x = raw[2 * (i % 2) + half]; /* two dims of a token, then of the next */
            if (KIND == FOLIO_FP8_E4M3) {
                x = __byte_perm(x, 0, 0x3120);
                v[2 * half] = widen<KIND, 0, 1>(x);
                v[2 * half + 1] = widen<KIND, 2, 3>(x);
            } else {
                v[2 * half] = widen<KIND, 0, 2>(x);
                v[2 * half + 1] = widen<KIND, 1, 3>(x);
            }
        }
    }
};

/* The same of a 16-bit tile by dims, which is V^T itself. Rows of 32 bytes: two of 8 lie in the same banks. */
struct values_by_dims {
    uint32_t from;
    __device__ __forceinline__ values_by_dims(uint32_t v_tile)
    {
        int lane = threadIdx.x & 31;
        from = v_tile + (lane & 15) * 32 + (lane >> 4) * 16;
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t *) const
    {
        ldmatrix(v, from + i * 512);
    }
};

/* The same of an 8-bit tile by dims: tokens as tile_token<true> has them. */
template <int KIND> struct values_by_dims_8 {
    uint32_t from;
    __device__ __forceinline__ values_by_dims_8(uint32_t v_tile)
    {
        from = v_tile + (threadIdx.x & 31) * 16;
    }
    __device__ __forceinline__ void load(int i, uint32_t v[4], uint32_t raw[4]) const
    {
        if (i % 2 == 0) ldmatrix(raw, from + i * 256);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x = raw[2 * (i % 2) + half]; /* four tokens of dim g, or g + 8 */
            v[half] = widen<KIND, 0, 1>(x);
            v[half + 2] = widen<KIND, 2, 3>(x);
        }
    }
};

/* ---- sums ---- */

template <int VMAX, int NT>
static __device__ __forceinline__ void rescale(float o[VMAX / 16][NT][4], const float alpha[2 * NT],
                                               bool wide)
{
#pragma unroll
    for (int i = 0; i < VMAX / 16; i++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n > 0 && !wide) break;
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][n][e] *= alpha[2 * n + (e & 1)];
        }
    }
}

template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_values(float o[VMAX / 16][NT][4], const VALUES &values,
                                                  int steps, const uint32_t p[NT][2], bool wide)
{
    uint32_t raw[8];
#pragma unroll
    for (int i = 0; i < VMAX / 16; i++) {
        if (i >= steps) break;
        uint32_t v[4];
        values.load(i, v, raw);
        mma<T>(o[i][0], v, p[0][0], p[0][1]);
        if (NT > 1 && wide) mma<T>(o[i][NT - 1], v, p[NT - 1][0], p[NT - 1][1]);
    }
}

/*
 * For tiles with a token that one row sees and another does not, if V is not finite: 0 * NaN is NaN. Each row is multiplied
 * alone, with V cut to the tokens that it sees. This is slow. hidden[n][e]: lanes whose score is -inf.
 */
template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_values_apart(float o[VMAX / 16][NT][4],
                                                        const VALUES &values, int steps,
                                                        const uint32_t p[NT][2], int rows,
                                                        const uint32_t hidden[NT][4])
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll 1
        for (int r = 0; r < 8 && 8 * n + r < rows; r++) {
            uint32_t low = r & 1 ? hidden[n][1] : hidden[n][0];
            uint32_t high = r & 1 ? hidden[n][3] : hidden[n][2];
            uint32_t keep[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t bits =
                    (half ? high : low) >> (8 * t + r / 2); /* token 2t at bit 0, 2t + 1 at 4 */
                keep[half] = (bits & 1 ? 0 : 0xffffu) | (bits & 16 ? 0 : 0xffff0000u);
            }
            uint32_t b0 = g == r ? p[n][0] : 0, b1 = g == r ? p[n][1] : 0;
            uint32_t raw[8];
#pragma unroll
            for (int i = 0; i < VMAX / 16; i++) {
                if (i >= steps) break;
                uint32_t v[4];
                float c[4] = {0, 0, 0, 0};
                values.load(i, v, raw);
                v[0] &= keep[0];
                v[1] &= keep[0];
                v[2] &= keep[1];
                v[3] &= keep[1];
                mma<T>(c, v, b0, b1);
                bool mine = t == r / 2;
                if (mine && (r & 1)) {
                    o[i][n][1] += c[1];
                    o[i][n][3] += c[3];
                } else if (mine) {
                    o[i][n][0] += c[0];
                    o[i][n][2] += c[2];
                }
            }
        }
    }
}

/* Is some number of a tile NaN or infinite? Its exponent is all ones, and one more carries into the sign. */
template <typename T, int VMAX, class VALUES>
static __device__ __noinline__ bool has_infinite(const VALUES values, int steps)
{
    constexpr uint32_t EXPONENTS = IS_BF16<T> ? 0x7f807f80u : 0x7c007c00u;
    constexpr uint32_t ONE = IS_BF16<T> ? 0x00800080u : 0x04000400u;
    uint32_t raw[8], all = 0;
#pragma unroll
    for (int i = 0; i < VMAX / 16; i++) {
        if (i >= steps) break;
        uint32_t v[4];
        values.load(i, v, raw);
#pragma unroll
        for (int e = 0; e < 4; e++) all |= (v[e] & EXPONENTS) + ONE;
    }
    return __any_sync(ALL_LANES, (all & 0x80008000u) != 0);
}

template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_tile(float o[VMAX / 16][NT][4], const VALUES &values,
                                                int steps, float s[NT][4], int num_rows, bool apart,
                                                const uint32_t hidden[NT][4])
{
    uint32_t p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        p[n][0] = movmatrix(pack<T>(s[n][0], s[n][1]));
        p[n][1] = movmatrix(pack<T>(s[n][2], s[n][3]));
    }
    /* weights of tokens that a row does not see are 0: with finite numbers they add nothing */
    if (apart && has_infinite<T, VMAX>(values, steps))
        add_values_apart<T, VMAX, NT>(o, values, steps, p, num_rows, hidden);
    else add_values<T, VMAX, NT>(o, values, steps, p, num_rows > 8);
}

/* ---- the flexible instances ---- */

/*
 * V of an 8-bit cache: probabilities times V's scales could leave f16's range. So they are divided by the largest scale so
 * far and multiplied with LIFT, away from f16's smallest numbers. Returns the factor for the sums so far.
 */
#define LIFT 16384.0f
struct value_scale {
    float by = 1e38f; /* LIFT / largest */
};

template <int NT, bool SPREAD>
static __device__ __forceinline__ float scale_values(const decode_args &a, const tile_view &tile,
                                                     const uint32_t hidden[NT][4], bool whole,
                                                     int kv_head, float s[NT][4], value_scale &v)
{
    int lane = threadIdx.x & 31, g = lane / 4;
    float low = tile.fresh ? 1.0f : folioi_cuda_scale(&a.layer.v, kv_head), high = low, ago = 1.0f;
    if (tile.scales != NULL) {
        low = tile.scales[16 + tile_token<SPREAD>(g, false)];
        high = tile.scales[16 + tile_token<SPREAD>(g, true)];
    }
    if (__any_sync(ALL_LANES, fmaxf(low, high) * v.by > 1.0001f * LIFT)) {
        float m = row_max(fmaxf(low, high));
        if (m < INFINITY) { /* an infinite scale makes its products infinite by itself */
            ago = LIFT / m / v.by;
            v.by = LIFT / m;
        }
    }
    low *= v.by;
    high *= v.by;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] *= e & 2 ? high : low;
            if (!whole && hidden[n][e] >> lane & 1) s[n][e] = 0.0f;
        }
    }
    return ago;
}

template <int VMAX, int NT>
static __device__ __forceinline__ void flexible_values(const decode_args &a, const tile_view &tile,
                                                       float s[NT][4], int num_rows, bool apart,
                                                       const uint32_t hidden[NT][4],
                                                       float o[VMAX / 16][NT][4])
{
    int steps = (a.layer.v_dims + 15) / 16;
    folio_dtype type = tile.fresh ? a.layer.dtype : a.layer.kv_dtype;
    uint32_t v = tile.v;
    switch (type) {
    case FOLIO_FP8_E4M3:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_FP8_E4M3, 0>(v, a.v_stride), steps, s,
                                   num_rows, apart, hidden);
        break;
    case FOLIO_FP8_E5M2:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_FP8_E5M2, 0>(v, a.v_stride), steps, s,
                                   num_rows, apart, hidden);
        break;
    case FOLIO_INT8:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_INT8, 0>(v, a.v_stride), steps, s, num_rows,
                                   apart, hidden);
        break;
    case FOLIO_BF16:
        add_tile<__nv_bfloat16, VMAX, NT>(o, values_16<0>(v, a.v_stride), steps, s, num_rows, apart,
                                          hidden);
        break;
    default:
        add_tile<__half, VMAX, NT>(o, values_16<0>(v, a.v_stride), steps, s, num_rows, apart,
                                   hidden);
    }
}

#endif
