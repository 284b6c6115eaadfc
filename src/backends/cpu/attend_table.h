/*
 * attend_table.h: the list's kernels at one level. The level's file includes it last, and defines LEVEL, its name;
 * ATTEND(args, kv type), what a kernel does; LOAD_QUERIES. A level with DOT has kernels for bf16 queries only.
 */
#ifndef FOLIOI_ATTEND_TABLE_H
#define FOLIOI_ATTEND_TABLE_H

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#define X(name, kv, bf16_queries)                                                                  \
    static void JOIN(attend_##name##_, LEVEL)(const folioi_attend_args *a) { ATTEND(a, kv); }
#include "backends/cpu/attend_instances.def"
#undef X

static void fill_attend(folioi_cpu_kernels *table)
{
    table->level = TEXT(LEVEL);
#define X(name, kv, bf16_queries)                                                                  \
    if (bf16_queries || !DOT)                                                                      \
        table->attend[ATTEND_##name] = (folioi_attend_kernel){                                     \
            JOIN(attend_##name##_, LEVEL), "attend_" #name "_" TEXT(LEVEL), LOAD_QUERIES, DOT};
#include "backends/cpu/attend_instances.def"
#undef X
}

#endif
