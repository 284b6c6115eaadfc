/* bench_rotate.h: a pass of its own that rotates rows on the CPU, as engines without folio_rotary run it. */
#ifndef FOLIO_BENCH_ROTATE_H
#define FOLIO_BENCH_ROTATE_H

#include <folio/folio.h>

typedef struct bench_pass {
    void *to;
    const void *from;  /* [rows][heads][head_size] */
    folio_dtype dtype; /* F32, or 16 bits that are taken for bf16 */
    int64_t rows;
    int32_t heads, head_size;
    int32_t first_dim, num_dims; /* those that rotate; the others are not written */
    const float *table;          /* [position][num_dims]: cosines, then sines     */
    const int64_t *positions;    /* [rows] */
} bench_pass;

void bench_rotate(bench_pass *pass, int32_t threads);

#endif
