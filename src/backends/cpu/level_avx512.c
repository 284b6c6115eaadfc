/* level_avx512.c: AVX-512 F, BW, DQ and VL: every KV type, multiply-adds in f32. */
#include "backends/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include "backends/cpu/vec_avx512.h"

#include "backends/cpu/attend_split.h"
#include "backends/cpu/rotate_body.h"
#include "backends/cpu/write_avx512.h"
#include "backends/cpu/write_body.h"

#define LEVEL avx512
#define ATTEND attend_split
#define LOAD_QUERIES pack_queries
#include "backends/cpu/attend_table.h"

bool folioi_cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool folioi_cpu_wants_avx512(void) { return true; }

void folioi_cpu_fill_avx512(folioi_cpu_kernels *table)
{
    fill_attend(table);
    table->exp2 = exp2_of;
    table->soft_cap = soft_cap_of;
    table->store_row = store_row;
    table->write = write_rows;
    table->rotate = rotate_row;
}
#endif
