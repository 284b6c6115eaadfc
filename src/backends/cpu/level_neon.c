/* level_neon.c: NEON, which every aarch64 processor has: every KV type, multiply-adds in f32. */
#include "backends/cpu/cpu_kernels.h"

#if defined(__aarch64__)
#include "backends/cpu/vec_neon.h"

#include "backends/cpu/attend_split.h"

#define X(kv, d, q)                                                                                \
    static void attend_##kv##_d##d##_neon(const folioi_attend_args *a)                             \
    {                                                                                              \
        attend_split(a, (folio_dtype)KV_##kv);                                                     \
    }
#include "backends/cpu/attend_instances.def"
#undef X

bool folioi_cpu_has_neon(void) { return true; }

bool folioi_cpu_wants_neon(void) { return true; }

void folioi_cpu_fill_neon(folioi_cpu_kernels *table)
{
    table->level = "neon";
    table->exp2 = exp2_of;
    table->tanh = tanh_of;
    table->store_row = store_row;
#define X(kv, d, q)                                                                                \
    table->attend[ATTEND_##kv##_d##d].run = attend_##kv##_d##d##_neon;                             \
    table->attend[ATTEND_##kv##_d##d].load_queries = pack_queries;                                 \
    table->attend[ATTEND_##kv##_d##d].name = "attend_" #kv "_d" #d "_neon";
#include "backends/cpu/attend_instances.def"
#undef X
}
#endif
