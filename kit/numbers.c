/*
 * numbers.c: the numbers of the cases: the counter-based generator, and conversions written
 * apart from the library's, so that neither can hide the other's mistake.
 */
#include "kit/kit.h"

#include <math.h>
#include <string.h>

/* The finaliser of SplitMix64. */
uint64_t kit_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t kit_random_bits(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                         int64_t dim)
{
    uint64_t key = kit_mix(seed ^ ((uint64_t)(uint32_t)tensor << 48));
    key = kit_mix(key ^ (uint64_t)id);
    key = kit_mix(key ^ (uint64_t)token);
    return kit_mix(key ^ ((uint64_t)head << 32) ^ (uint64_t)dim);
}

double kit_random(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                  int64_t dim)
{
    uint64_t bits = kit_random_bits(seed, tensor, id, token, head, dim);
    return (double)(bits >> 11) * 0x1p-51 - 2.0;
}

int64_t kit_random_int(uint64_t seed, int32_t tensor, int64_t index, int64_t low, int64_t high)
{
    uint64_t span = (uint64_t)(high - low) + 1;
    return low + (int64_t)(kit_random_bits(seed, tensor, index, 0, 0, 0) % span);
}

/* sign, exponent, fraction */
typedef struct number_format {
    int exponent_bits, fraction_bits, bias;
    bool saturates, no_infinity;
    double largest;
} number_format;

static number_format format_of(folio_dtype dtype)
{
    switch (dtype) {
    case FOLIO_F16: return (number_format){5, 10, 15, false, false, 65504.0};
    case FOLIO_BF16: return (number_format){8, 7, 127, false, false, 0x1.FEp127};
    case FOLIO_FP8_E4M3: return (number_format){4, 3, 7, true, true, 448.0};
    case FOLIO_FP8_E5M2: return (number_format){5, 2, 15, true, false, 57344.0};
    case FOLIO_F64: return (number_format){11, 52, 1023, false, false, 0x1.FFFFFFFFFFFFFp1023};
    default: return (number_format){8, 23, 127, false, false, 0x1.FFFFFEp127};
    }
}

/* 2^e, and the e of a number's own 2^e (of zero less than any type's): faster than libm's. */
static double power_of_2(int e)
{
    uint64_t bits = (uint64_t)(e + 1023) << 52;
    double x;
    return memcpy(&x, &bits, 8), x;
}

static int exponent_of(double x)
{
    uint64_t bits;
    return memcpy(&bits, &x, 8), (int)(bits >> 52 & 0x7ffu) - 1023;
}

double kit_decode(folio_dtype dtype, uint32_t bits)
{
    if (dtype == FOLIO_INT8) return (double)(int8_t)(uint8_t)bits;
    number_format f = format_of(dtype);
    uint32_t ones = (1u << f.exponent_bits) - 1u, all = (1u << f.fraction_bits) - 1u;
    uint32_t m = bits & all, e = (bits >> f.fraction_bits) & ones;
    double sign = (bits >> (f.exponent_bits + f.fraction_bits)) & 1u ? -1.0 : 1.0;
    if (f.no_infinity) {
        if (e == ones && m == all) return (double)NAN;
    } else if (e == ones) {
        return m ? (double)NAN : sign * (double)INFINITY;
    }
    if (e == 0) return sign * (double)m * power_of_2(1 - f.bias - f.fraction_bits);
    return sign * (double)(m | (all + 1u)) * power_of_2((int)e - f.bias - f.fraction_bits);
}

uint32_t kit_encode(folio_dtype dtype, double x)
{
    number_format f = format_of(dtype);
    uint32_t ones = (1u << f.exponent_bits) - 1u, all = (1u << f.fraction_bits) - 1u;
    uint32_t sign = signbit(x) ? 1u << (f.exponent_bits + f.fraction_bits) : 0;
    if (isnan(x)) return sign | (ones << f.fraction_bits) | all;
    double a = fabs(x);
    uint32_t infinity = ones << f.fraction_bits;
    uint32_t largest = f.no_infinity ? (infinity | (all - 1u)) : infinity - 1u;
    if (a > 2 * f.largest) return sign | (f.saturates ? largest : infinity);
    int least = 1 - f.bias, exponent = exponent_of(a) < least ? least : exponent_of(a);
    double steps = rint(a * power_of_2(f.fraction_bits - exponent)); /* ties to even */
    if (steps * power_of_2(exponent - f.fraction_bits) > f.largest)
        return sign | (f.saturates ? largest : infinity);
    return sign | (((uint32_t)(exponent - least) << f.fraction_bits) + (uint32_t)steps);
}

uint32_t kit_get(folio_dtype dtype, const void *array, int64_t i)
{
    size_t size = folio_dtype_size(dtype);
    const char *at = (const char *)array + i * (int64_t)size;
    uint32_t word;
    uint16_t half;
    if (size == 4) return memcpy(&word, at, 4), word;
    if (size == 2) return memcpy(&half, at, 2), half;
    return *(const uint8_t *)at;
}

void kit_set(folio_dtype dtype, void *array, int64_t i, uint32_t bits)
{
    size_t size = folio_dtype_size(dtype);
    char *at = (char *)array + i * (int64_t)size;
    uint16_t half = (uint16_t)bits;
    if (size == 4) memcpy(at, &bits, 4);
    else if (size == 2) memcpy(at, &half, 2);
    else *(uint8_t *)at = (uint8_t)bits;
}

void kit_store(folio_dtype dtype, void *array, int64_t i, double value)
{
    if (dtype == FOLIO_F64) ((double *)array)[i] = value;
    else if (dtype == FOLIO_F32) ((float *)array)[i] = (float)value;
    else kit_set(dtype, array, i, kit_encode(dtype, (double)(float)value));
}

double kit_load(folio_dtype dtype, const void *array, int64_t i)
{
    if (dtype == FOLIO_F64) return ((const double *)array)[i];
    if (dtype == FOLIO_F32) return (double)((const float *)array)[i];
    return kit_decode(dtype, kit_get(dtype, array, i));
}

double kit_ulp(folio_dtype dtype, double x)
{
    number_format f = format_of(dtype);
    if (!isfinite(x) || x == 0.0) return 0.0;
    int exponent = ilogb(x), least = 1 - f.bias;
    return ldexp(1.0, (exponent < least ? least : exponent) - f.fraction_bits);
}
