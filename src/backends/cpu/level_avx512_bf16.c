/*
 * level_avx512_bf16.c: AVX-512 with vdpbf16ps, two products a lane: bf16 queries on keys of bf16, or of 8 bits, which
 * bf16 holds exactly and which are multiplied with their scales as scores and probabilities.
 */
#if defined(__x86_64__)
#define DOT_BF16
#include "backends/cpu/vec_avx512.h"

INLINE vec vec_dot(vec acc, vec a, vec b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
/* Vector i of a row as bf16, from p on. */
INLINE void vec_store_bf16(float *p, int i, vec x)
{
    _mm256_storeu_si256((__m256i *)(void *)p + i, (__m256i)_mm512_cvtneps_pbh(x));
}
/* Numbers that bf16 holds, as pairs. */
INLINE __m512i vec_pairs(vec low, vec high)
{
    __m512i l = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, l, _mm512_castps_si512(high));
}
INLINE vec vec_interleave(const uint16_t *low, const uint16_t *high)
{
    __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)low));
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)high));
    return _mm512_castsi512_ps(_mm512_or_epi32(l, _mm512_slli_epi32(h, 16)));
}

/* fp8 to bf16 by a look at its low seven bits: the two bytes of each number. Filled once, before any kernel runs. */
static uint8_t fp8_bytes[2][2][128]; /* [e4m3, e5m2][low, high] */

typedef struct {
    __m512i low[2], high[2];
} byte_table;

INLINE byte_table byte_table_of(const int kv)
{
    byte_table t;
    const uint8_t *bytes = fp8_bytes[kv == FOLIO_FP8_E5M2][0]; /* int8 does without */
    for (int i = 0; i < 2; i++) {
        t.low[i] = _mm512_loadu_si512(bytes + 64 * i);
        t.high[i] = _mm512_loadu_si512(bytes + 128 + 64 * i);
    }
    return t;
}

/* `twice`: every byte of fp8 two times, side by side. */
INLINE __m512i vec_look_up(byte_table t, __m512i twice)
{
    __m512i low = _mm512_permutex2var_epi8(t.low[0], twice, t.low[1]);
    __m512i high = _mm512_permutex2var_epi8(t.high[0], twice, t.high[1]);
    __m512i both = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, low, high);
    return _mm512_ternarylogic_epi32(both, twice, _mm512_set1_epi16((short)0x8000), 0xf8);
}

/* Lanes of four bytes: pairs of the first two, and of the others. */
INLINE void vec_pairs_of_fours(byte_table t, const int kv, const char *from, float *first,
                               float *second)
{
    __m512i u = _mm512_loadu_si512(from);
    if (kv == FOLIO_INT8) {
        _mm512_storeu_si512(first, vec_pairs(vec_unpack(kv, 0, u), vec_unpack(kv, 1, u)));
        _mm512_storeu_si512(second, vec_pairs(vec_unpack(kv, 2, u), vec_unpack(kv, 3, u)));
        return;
    }
    const __m512i a = _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000);
    const __m512i b = _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202);
    _mm512_storeu_si512(first, vec_look_up(t, _mm512_shuffle_epi8(u, a)));
    _mm512_storeu_si512(second, vec_look_up(t, _mm512_shuffle_epi8(u, b)));
}

/* Two rows of bytes, up to 64 of each: pairs of one from each. */
INLINE void vec_pairs_of_rows(byte_table t, const int kv, const char *low, const char *high,
                              int32_t left, float *to)
{
    if (kv == FOLIO_INT8) {
        for (int i = 0; i < 64 && i < left; i += 16)
            _mm512_storeu_si512(to + i, vec_pairs(vec_load_bytes(kv, (const uint8_t *)low + i),
                                                  vec_load_bytes(kv, (const uint8_t *)high + i)));
        return;
    }
    __mmask64 there = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i l = _mm512_maskz_loadu_epi8(there, low), h = _mm512_maskz_loadu_epi8(there, high);
    /* byte 0 of l twice, byte 0 of h twice, byte 1 of l ... */
    __m512i pick = _mm512_add_epi8(
        _mm512_mullo_epi16(_mm512_set1_epi16(0x0101),
                           _mm512_cvtepu8_epi16(_mm256_set_epi8(
                               15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6,
                               6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0))),
        _mm512_set1_epi32(0x40400000));
    for (int i = 0; i < 64 && i < left; i += 16) {
        __m512i twice = _mm512_permutex2var_epi8(l, pick, h);
        _mm512_storeu_si512(to + i, vec_look_up(t, twice));
        pick = _mm512_add_epi8(pick, _mm512_set1_epi8(16));
    }
}

#include "backends/cpu/attend_split.h"

#define X(kv, d, q)                                                                                \
    __attribute__((unused)) static void attend_##kv##_d##d##_avx512_bf16(                          \
        const folioi_attend_args *a)                                                               \
    {                                                                                              \
        attend_split(a, (folio_dtype)KV_##kv);                                                     \
    }
#include "backends/cpu/attend_instances.def"
#undef X

/* Every processor with vdpbf16ps but Cooper Lake has the byte permutes too; that one runs level avx512. */
bool folioi_cpu_has_avx512_bf16(void)
{
    return folioi_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vbmi");
}

/* On Intel's cores vdpbf16ps does half the work of the f32 multiply-adds it replaces (measured: 85 and 173
 * GFLOP/s a core); on AMD's twice as much. */
bool folioi_cpu_wants_avx512_bf16(void) { return __builtin_cpu_is("amd"); }

static void fill_bytes(void)
{
    static const folio_dtype types[2] = {FOLIO_FP8_E4M3, FOLIO_FP8_E5M2};
    for (int type = 0; type < 2; type++)
        for (int i = 0; i < 128; i++) {
            uint32_t code = (uint32_t)i;
            uint16_t bits = f32_to_bf16(load_f32(&code, types[type], 0));
            fp8_bytes[type][0][i] = (uint8_t)bits;
            fp8_bytes[type][1][i] = (uint8_t)(bits >> 8);
        }
}

void folioi_cpu_fill_avx512_bf16(folioi_cpu_kernels *table)
{
    fill_bytes();
    table->level = "avx512_bf16";
    table->exp2 = exp2_of;
    table->tanh = tanh_of;
    table->store_row = store_row;
#define X(kv, d, q)                                                                                \
    if (q) {                                                                                       \
        table->attend[ATTEND_##kv##_d##d].run = attend_##kv##_d##d##_avx512_bf16;                  \
        table->attend[ATTEND_##kv##_d##d].load_queries = pack_queries;                             \
        table->attend[ATTEND_##kv##_d##d].name = "attend_" #kv "_d" #d "_avx512_bf16";             \
    }
#include "backends/cpu/attend_instances.def"
#undef X
}
#endif
