/*
 * harness_numbers.c: the harness's numbers: the counter-based generator, and conversions written
 * apart from the library's, so that neither can hide the other's mistake.
 */
#include "kit/harness.h"

#include <math.h>
#include <string.h>

/* The finaliser of SplitMix64: every input bit reaches every output bit. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t harness_random_bits(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                             int64_t dim)
{
    uint64_t key = mix(seed ^ ((uint64_t)(uint32_t)tensor << 48));
    key = mix(key ^ (uint64_t)id);
    key = mix(key ^ (uint64_t)token);
    return mix(key ^ ((uint64_t)head << 32) ^ (uint64_t)dim);
}

double harness_random(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                      int64_t dim)
{
    uint64_t bits = harness_random_bits(seed, tensor, id, token, head, dim);
    return (double)(bits >> 11) * 0x1p-51 - 2.0;
}

int64_t harness_random_int(uint64_t seed, int32_t tensor, int64_t index, int64_t low, int64_t high)
{
    uint64_t span = (uint64_t)(high - low) + 1;
    return low + (int64_t)(harness_random_bits(seed, tensor, index, 0, 0, 0) % span);
}

/* Round the fraction off `drop` low bits of x, to nearest, ties to even. */
static uint32_t shift_even(uint32_t x, uint32_t drop)
{
    uint32_t half = 1u << (drop - 1), rest = x & ((1u << drop) - 1), kept = x >> drop;
    return kept + (rest > half || (rest == half && (kept & 1u)));
}

static uint16_t f32_to_f16(float value)
{
    uint32_t x;
    memcpy(&x, &value, 4);
    uint32_t sign = (x >> 16) & 0x8000u, mag = x & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (mag >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 2^16 and above: infinity */
    if (mag >= 0x38800000u)                                    /* normal: rebias by 112 */
        return (uint16_t)(sign | shift_even(mag - (112u << 23), 13));
    uint32_t exponent = mag >> 23;
    if (exponent < 102) return (uint16_t)sign; /* below half of the smallest subnormal */
    return (uint16_t)(sign | shift_even((mag & 0x7fffffu) | 0x800000u, 126u - exponent));
}

static uint16_t f32_to_bf16(float value)
{
    uint32_t x;
    memcpy(&x, &value, 4);
    if ((x & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x >> 16) | 0x40u);
    return (uint16_t)shift_even(x, 16);
}

void harness_store(folio_dtype dtype, void *array, int64_t i, double value)
{
    uint16_t half;
    switch (dtype) {
    case FOLIO_F64: ((double *)array)[i] = value; return;
    case FOLIO_F32: ((float *)array)[i] = (float)value; return;
    case FOLIO_F16: half = f32_to_f16((float)value); break;
    case FOLIO_BF16: half = f32_to_bf16((float)value); break;
    default: return;
    }
    ((uint16_t *)array)[i] = half;
}

/*
 * A number of `fraction` bits after `exponent` bits, subnormals included; the caller knows its
 * NaNs.
 */
static double small_float(uint32_t bits, int exponent, int fraction)
{
    int bias = (1 << (exponent - 1)) - 1;
    uint32_t e = (bits >> fraction) & ((1u << exponent) - 1), f = bits & ((1u << fraction) - 1);
    double sign = (bits >> (exponent + fraction)) & 1u ? -1.0 : 1.0;
    if (e == 0) return sign * ldexp((double)f, 1 - bias - fraction);
    return sign * ldexp((double)(f | (1u << fraction)), (int)e - bias - fraction);
}

static double ieee_small(uint32_t bits, int exponent, int fraction)
{
    uint32_t top = ((1u << exponent) - 1) << fraction;
    uint32_t mag = bits & ((1u << (exponent + fraction)) - 1);
    double sign = (bits >> (exponent + fraction)) & 1u ? -1.0 : 1.0;
    if (mag > top) return NAN;
    if (mag == top) return sign * INFINITY;
    return small_float(bits, exponent, fraction);
}

double harness_load(folio_dtype dtype, const void *array, int64_t i)
{
    float f;
    uint32_t x;
    switch (dtype) {
    case FOLIO_F64: return ((const double *)array)[i];
    case FOLIO_F32: return (double)((const float *)array)[i];
    case FOLIO_F16: return ieee_small(((const uint16_t *)array)[i], 5, 10);
    case FOLIO_BF16:
        x = (uint32_t)((const uint16_t *)array)[i] << 16;
        memcpy(&f, &x, 4);
        return (double)f;
    case FOLIO_FP8_E4M3: /* no infinity: only the top pattern is NaN */
        x = ((const uint8_t *)array)[i];
        return (x & 0x7fu) == 0x7fu ? (double)NAN : small_float(x, 4, 3);
    case FOLIO_FP8_E5M2: return ieee_small(((const uint8_t *)array)[i], 5, 2);
    case FOLIO_INT8: return (double)((const int8_t *)array)[i];
    }
    return (double)NAN;
}

double harness_ulp(folio_dtype dtype, double x)
{
    static const struct {
        int fraction, min_exponent;
    } of[] = {[FOLIO_F32] = {23, -126},
              [FOLIO_F16] = {10, -14},
              [FOLIO_BF16] = {7, -126},
              [FOLIO_F64] = {52, -1022}};
    if (!isfinite(x) || x == 0.0) return 0.0;
    int exponent = ilogb(x);
    if (exponent < of[dtype].min_exponent) exponent = of[dtype].min_exponent;
    return ldexp(1.0, exponent - of[dtype].fraction);
}
