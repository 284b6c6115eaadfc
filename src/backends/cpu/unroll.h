/*
 * unroll.h: loops over registers. Their bounds are constants once they are inlined, and only unrolled do arrays of vectors
 * become registers: each compiler is told in its own words.
 * UNROLL_FOR_IF_CONSTANT: only some callers have constant bounds.
 */
#ifndef FOLIOI_UNROLL_H
#define FOLIOI_UNROLL_H

#if defined(__clang__)
#define UNROLL_FOR _Pragma("clang loop unroll(full)") for
#define UNROLL_FOR_IF_CONSTANT for
#else
#define UNROLL_FOR _Pragma("GCC unroll 16") for
#define UNROLL_FOR_IF_CONSTANT UNROLL_FOR
#endif

#endif
