/* vec_neon.h: four f32 lanes, for attend_body.h. What every aarch64 processor has, no more. */
#ifndef FOLIOI_VEC_NEON_H
#define FOLIOI_VEC_NEON_H

#include "backends/cpu/unroll.h"
#include <arm_neon.h>

#include <folio/folio.h>
#include <stdbool.h>
#include <string.h>

#define LANES 4
#define MAX_ROWS 12 /* x 2 vectors: 24 accumulators of 32 registers */
typedef float32x4_t vec;

#define INLINE static inline __attribute__((always_inline))

INLINE vec vec_load(const float *p) { return vld1q_f32(p); }
INLINE void vec_store(float *p, vec x) { vst1q_f32(p, x); }
INLINE vec vec_set1(float x) { return vdupq_n_f32(x); }
INLINE vec vec_add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec vec_sub(vec a, vec b) { return vsubq_f32(a, b); }
INLINE vec vec_mul(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec vec_quotient(vec a, vec b) { return vdivq_f32(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
/* b where a or b is NaN; fmax would keep any NaN, fmaxnm none */
INLINE vec vec_max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vec vec_min(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vec vec_abs(vec a) { return vabsq_f32(a); }
INLINE uint32x4_t vec_lanes(void) { return (uint32x4_t){0, 1, 2, 3}; }
/* 0, 1, 2 ... */
INLINE vec vec_iota(void) { return vcvtq_f32_u32(vec_lanes()); }

/* Lanes outside [lo, hi) become y. */
INLINE vec vec_outside(vec x, int lo, int hi, vec y)
{
    int32x4_t i = vreinterpretq_s32_u32(vec_lanes());
    uint32x4_t in = vandq_u32(vcgeq_s32(i, vdupq_n_s32(lo)), vcltq_s32(i, vdupq_n_s32(hi)));
    return vbslq_f32(in, x, y);
}
/* Lanes equal to y, a bit each. */
INLINE unsigned vec_equal(vec x, float y)
{
    return vaddvq_u32(vandq_u32(vceqq_f32(x, vdupq_n_f32(y)), (uint32x4_t){1, 2, 4, 8}));
}
INLINE bool vec_any_equal(vec x, float y) { return vmaxvq_u32(vceqq_f32(x, vdupq_n_f32(y))) != 0; }
INLINE bool vec_any_nan(vec x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }

/* x + bias; -inf where the bias is, whatever x */
INLINE vec vec_add_unless_hidden(vec x, vec bias)
{
    vec hidden = vdupq_n_f32(-__builtin_inff());
    return vbslq_f32(vceqq_f32(bias, hidden), hidden, vaddq_f32(x, bias));
}
/* 0 in the lanes whose bits are set. */
INLINE vec vec_without(vec x, uint64_t lanes)
{
    uint32x4_t set = vtstq_u32(vdupq_n_u32((uint32_t)lanes), (uint32x4_t){1, 2, 4, 8});
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), set));
}
/* y where x > edge, else z */
INLINE vec vec_choose(vec x, vec edge, vec y, vec z) { return vbslq_f32(vcgtq_f32(x, edge), y, z); }

INLINE vec vec_copy_sign(vec magnitude, vec sign)
{
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
/* All numbers finite? pairs: of two bf16 numbers each. */
INLINE bool vec_is_finite(vec x, bool pairs)
{
    uint32x4_t u = vreinterpretq_u32_f32(x), inf = vdupq_n_u32(0x7f800000u);
    uint32x4_t bad = vceqq_u32(vandq_u32(u, inf), inf);
    if (pairs) bad = vorrq_u32(bad, vceqq_u32(vandq_u32(u << 16, inf), inf));
    return vmaxvq_u32(bad) == 0;
}

/* In one fixed order: neighbours, then their sums. */
INLINE float vec_sum(vec x) { return vaddvq_f32(x); }
INLINE float vec_largest(vec x) { return vmaxvq_f32(x); }

/* x * 2^n for a whole n from -254 on, in two steps so that it ends in 0. */
INLINE vec vec_scale(vec x, vec n)
{
    int32x4_t i = vcvtq_s32_f32(n), half = i >> 1, bias = vdupq_n_s32(127);
    vec a = vreinterpretq_f32_s32((half + bias) << 23);
    vec b = vreinterpretq_f32_s32((i - half + bias) << 23);
    return vmulq_f32(vmulq_f32(x, a), b);
}
INLINE vec vec_round(vec x) { return vrndnq_f32(x); }

/* The low halves of 32-bit lanes as f16. */
INLINE vec vec_from_halves(uint32x4_t u)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(u)));
}

/* Numbers of `kv` packed in 32-bit lanes, number `nth` of each as f32. */
INLINE vec vec_unpack(const int kv, const int nth, vec words)
{
    if (kv == FOLIO_F32) return words;
    uint32x4_t u = vreinterpretq_u32_f32(words);
    if (kv == FOLIO_BF16)
        return vreinterpretq_f32_u32(nth == 0 ? u << 16 : u & vdupq_n_u32(0xffff0000u));
    if (kv == FOLIO_F16) return vec_from_halves(nth == 0 ? u : u >> 16);
    if (kv == FOLIO_INT8) return vcvtq_f32_s32(vreinterpretq_s32_u32(u << (24 - 8 * nth)) >> 24);
    uint32x4_t b = u >> (8 * nth) & vdupq_n_u32(0xff);
    if (kv == FOLIO_FP8_E5M2) return vec_from_halves(b << 8);
    /* e4m3 as f16 is 2^8 too small; NaN is 0x7f */
    uint32x4_t magnitude = b & vdupq_n_u32(0x7f), sign = b & vdupq_n_u32(0x80);
    vec x = vec_from_halves(magnitude << 7 | sign << 8);
    uint32x4_t nan = vceqq_u32(magnitude, vdupq_n_u32(0x7f));
    return vreinterpretq_f32_u32(vreinterpretq_u32_f32(vmulq_f32(x, vdupq_n_f32(256.0f))) | nan);
}
/* LANES bytes. */
INLINE vec vec_load_bytes(const int kv, const uint8_t *p)
{
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    uint32x4_t words = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
    return vec_unpack(kv, 0, vreinterpretq_f32_u32(words));
}

/* LANES numbers of `type` that lie side by side, as f32. */
INLINE vec vec_load_as(const int type, const void *p)
{
    if (type == FOLIO_F32) return vld1q_f32(p);
    if (type == FOLIO_F16) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
    if (type == FOLIO_BF16) return vreinterpretq_f32_u32(vmovl_u16(vld1_u16(p)) << 16);
    return vec_load_bytes(type, p);
}
INLINE void vec_store_f16(uint16_t *p, vec x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

/* Rows to columns: 4 x 4 numbers. */
INLINE void vec_transpose(vec *x)
{
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1]));
    float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1]));
    float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3]));
    float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

/*
 * LANES rows, of which four[i] is row 4 i and the three after it are `stride` bytes apart: their 16 bytes from `offset` on
 * as four vectors of 32-bit words, a row in each lane.
 */
INLINE void vec_transpose_16(const char *const *four, int64_t stride, int64_t offset, vec *words)
{
    for (int i = 0; i < 4; i++) words[i] = vld1q_f32((const void *)(four[0] + i * stride + offset));
    vec_transpose(words);
}

#endif
