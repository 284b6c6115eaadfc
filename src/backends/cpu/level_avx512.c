/* level_avx512.c: AVX-512 F, BW, DQ and VL: every KV type, multiply-adds in f32. */
#include "backends/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include "backends/cpu/vec_avx512.h"

#include "backends/cpu/attend_split.h"
#include "backends/cpu/write_avx512.h"
#include "backends/cpu/write_body.h"

#define X(kv, d, q)                                                                                \
    static void attend_##kv##_d##d##_avx512(const folioi_attend_args *a)                           \
    {                                                                                              \
        attend_split(a, (folio_dtype)KV_##kv);                                                     \
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
    table->store_row = store_row;
    table->write = write_rows;
#define X(kv, d, q)                                                                                \
    table->attend[ATTEND_##kv##_d##d].run = attend_##kv##_d##d##_avx512;                           \
    table->attend[ATTEND_##kv##_d##d].load_queries = pack_queries;                                 \
    table->attend[ATTEND_##kv##_d##d].name = "attend_" #kv "_d" #d "_avx512";
#include "backends/cpu/attend_instances.def"
#undef X
}
#endif
