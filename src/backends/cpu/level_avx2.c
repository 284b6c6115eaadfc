/* level_avx2.c: AVX2 with FMA and F16C: every KV type, multiply-adds in f32. */
#include "backends/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include "backends/cpu/vec_avx2.h"

#include "backends/cpu/attend_split.h"
#include "backends/cpu/rotate_body.h"
#include "backends/cpu/write_avx2.h"
#include "backends/cpu/write_body.h"

#include <cpuid.h>

/* Older compilers do not know it by name. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
}

#define LEVEL avx2
#define ATTEND attend_split
#define LOAD_QUERIES pack_queries
#include "backends/cpu/attend_table.h"

bool folioi_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool folioi_cpu_wants_avx2(void) { return true; }

void folioi_cpu_fill_avx2(folioi_cpu_kernels *table)
{
    fill_attend(table);
    table->exp2 = exp2_of;
    table->soft_cap = soft_cap_of;
    table->store_row = store_row;
    table->write = write_rows;
    table->rotate = rotate_row;
}
#endif
