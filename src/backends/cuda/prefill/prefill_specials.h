/*
 * prefill_specials.h: NaN and infinity in V: 0 times them is NaN, which must not reach rows that do not see the key. A block
 * that meets NaN computes its rows again by these functions: finite numbers by weight, and of the others which kinds each
 * row sees.
 */
#ifndef FOLIOI_CUDA_PREFILL_SPECIALS_H
#define FOLIOI_CUDA_PREFILL_SPECIALS_H

#include "backends/cuda/instructions.h"
#include "backends/cuda/prefill/prefill_instance.h"
#include "backends/cuda/prefill/prefill_values.h"

#include <math_constants.h>
#include <string.h>

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

/* multiply_values for any V. Rare, so out waits in local memory and leaves the registers to other loops. */
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

#endif
