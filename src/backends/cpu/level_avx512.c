/* level_avx512.c: AVX-512 F, BW, DQ and VL: every KV type, multiply-adds in f32. */
#if defined(__x86_64__)
#include "backends/cpu/vec_avx512.h"

#include "backends/cpu/tile_load.h"

enum { KV_f32 = FOLIO_F32, KV_f16 = FOLIO_F16, KV_bf16 = FOLIO_BF16, KV_bf16q = FOLIO_BF16 };
enum { KV_e4m3 = FOLIO_FP8_E4M3, KV_e5m2 = FOLIO_FP8_E5M2, KV_int8 = FOLIO_INT8 };

#define X(kv, d)                                                                                   \
    static void attend_##kv##_d##d##_avx512(const folioi_attend_args *a)                           \
    {                                                                                              \
        attend_split(a, (folio_dtype)KV_##kv, false);                                              \
    }
#include "backends/cpu/attend_instances.def"
#undef X

bool folioi_cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool folioi_cpu_wants_avx512(void) { return true; }

void folioi_cpu_fill_avx512(folioi_cpu_kernels *table)
{
    table->level = "avx512";
    table->exp2 = exp2_of;
    table->tanh = tanh_of;
#define X(kv, d)                                                                                   \
    table->attend[ATTEND_##kv##_d##d].run = attend_##kv##_d##d##_avx512;                           \
    table->attend[ATTEND_##kv##_d##d].pack = pack_queries;                                         \
    table->attend[ATTEND_##kv##_d##d].name = "attend_" #kv "_d" #d "_avx512";
#include "backends/cpu/attend_instances.def"
#undef X
}
#endif
