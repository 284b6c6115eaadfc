/* bench_rotate.c: see bench_rotate.h. Threads are started for each pass that is worth it. */
#include "bench/bench_rotate.h"

#include "bench/bench_ceilings.h"

#include <stdbool.h>
#include <string.h>

enum { FEW = 1 << 16 /* numbers: fewer are rotated by one thread */ };

static float of_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static uint16_t to_bf16(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* One row of one head: halves, as Llama has them. */
static void turn_f32(float *restrict to, const float *restrict from, const float *restrict row,
                     int32_t half)
{
    for (int32_t i = 0; i < half; i++) {
        to[i] = from[i] * row[i] - from[half + i] * row[half + i];
        to[half + i] = from[half + i] * row[i] + from[i] * row[half + i];
    }
}

static void turn_bf16(uint16_t *restrict to, const uint16_t *restrict from,
                      const float *restrict row, int32_t half)
{
    for (int32_t i = 0; i < half; i++) {
        float x = of_bf16(from[i]), y = of_bf16(from[half + i]);
        to[i] = to_bf16(x * row[i] - y * row[half + i]);
        to[half + i] = to_bf16(y * row[i] + x * row[half + i]);
    }
}

static double rotate_row(void *state, int64_t row, int64_t next)
{
    const bench_pass *p = state;
    (void)next;
    for (int32_t h = 0; h < p->heads; h++) {
        int64_t at = (row * p->heads + h) * p->head_size + p->first_dim;
        const float *angles = p->table + p->positions[row] * p->num_dims;
        if (p->dtype == FOLIO_F32)
            turn_f32((float *)p->to + at, (const float *)p->from + at, angles, p->num_dims / 2);
        else
            turn_bf16((uint16_t *)p->to + at, (const uint16_t *)p->from + at, angles,
                      p->num_dims / 2);
    }
    return 0;
}

void bench_rotate(bench_pass *p, int32_t threads)
{
    double seconds;
    bool few = p->rows * p->heads * p->num_dims < FEW;
    (void)bench_in_parallel(few ? 1 : threads, p->rows, rotate_row, p, &seconds);
}
