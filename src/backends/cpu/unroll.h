/*
 * unroll.h: loops over registers. Their bounds are constants once they are inlined, and only unrolled do arrays of vectors
 * become registers: each compiler is told in its own words.
 */
#ifndef FOLIOI_UNROLL_H
#define FOLIOI_UNROLL_H

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_IF_CONSTANT
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_IF_CONSTANT UNROLL
#endif

#endif
