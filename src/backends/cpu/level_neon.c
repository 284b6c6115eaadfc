/* level_neon.c: NEON, which every aarch64 processor has: every KV type, multiply-adds in f32. */
#include "backends/cpu/cpu_kernels.h"

#if defined(__aarch64__)
#include "backends/cpu/vec_neon.h"

#include "backends/cpu/attend_split.h"
#include "backends/cpu/rotate_body.h"

#define LEVEL neon
#define ATTEND attend_split
#define LOAD_QUERIES pack_queries
#include "backends/cpu/attend_table.h"

bool folioi_cpu_has_neon(void) { return true; }

bool folioi_cpu_wants_neon(void) { return true; }

void folioi_cpu_fill_neon(folioi_cpu_kernels *table)
{
    fill_attend(table);
    table->exp2 = exp2_of;
    table->soft_cap = soft_cap_of;
    table->store_row = store_row;
    table->rotate = rotate_row;
}
#endif
