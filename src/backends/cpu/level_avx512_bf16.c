/* level_avx512_bf16.c: AVX-512 with vdpbf16ps: bf16 queries on bf16 keys, two numbers a lane. */
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

#include "backends/cpu/tile_load.h"

static void attend_bf16q_d0_avx512_bf16(const folioi_attend_args *a)
{
    attend_split(a, FOLIO_BF16, true);
}

bool folioi_cpu_has_avx512_bf16(void)
{
    return folioi_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16");
}

/* On Intel's cores vdpbf16ps does half the work of the f32 multiply-adds it replaces (measured: 85 and 173
 * GFLOP/s a core); on AMD's twice as much. */
bool folioi_cpu_wants_avx512_bf16(void) { return __builtin_cpu_is("amd"); }

void folioi_cpu_fill_avx512_bf16(folioi_cpu_kernels *table)
{
    table->level = "avx512_bf16";
    table->exp2 = exp2_of;
    table->tanh = tanh_of;
    table->attend[ATTEND_bf16q_d0].run = attend_bf16q_d0_avx512_bf16;
    table->attend[ATTEND_bf16q_d0].name = "attend_bf16q_d0_avx512_bf16";
    table->attend[ATTEND_bf16q_d0].pack = pack_queries;
    table->attend[ATTEND_bf16q_d0].pairs = true;
}
#endif
