/* checked.h: products and sums of sizes that say when they leave int64_t, and small integer helpers. */
#ifndef FOLIOI_CHECKED_H
#define FOLIOI_CHECKED_H

#include <stdbool.h>
#include <stdint.h>

/* *product = a * b for a, b >= 0; false when it does not fit. */
static inline bool checked_mul(int64_t a, int64_t b, int64_t *product)
{
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product);
}

static inline bool checked_add(int64_t a, int64_t b, int64_t *sum)
{
    return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, sum);
}

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t round_up(int64_t a, int64_t multiple)
{
    return ceil_div(a, multiple) * multiple;
}

#endif
