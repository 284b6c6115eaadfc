/*
 * level_avx512_bf16.c: AVX-512 with vdpbf16ps, two products a lane: bf16 queries on keys of bf16, or of 8 bits, which
 * bf16 holds exactly and which are multiplied with their scales as scores and probabilities.
 */
#include "backends/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include "backends/cpu/vec_avx512_bf16.h"

#include "backends/cpu/attend_split.h"

#define LEVEL avx512_bf16
#define ATTEND attend_split
#define LOAD_QUERIES pack_queries
#include "backends/cpu/attend_table.h"

/* Every processor with vdpbf16ps but Cooper Lake has the byte permutes too; that one runs level avx512. */
bool folioi_cpu_has_avx512_bf16(void)
{
    return folioi_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vbmi");
}

/* On Intel's cores vdpbf16ps does half the work of the f32 multiply-adds it replaces (measured: 85 and 173
 * GFLOP/s a core); on AMD's twice as much. */
bool folioi_cpu_wants_avx512_bf16(void) { return __builtin_cpu_is("amd"); }

void folioi_cpu_fill_avx512_bf16(folioi_cpu_kernels *table)
{
    fill_bytes();
    fill_attend(table);
    table->exp2 = exp2_of;
    table->soft_cap = soft_cap_of;
    table->store_row = store_row;
}
#endif
