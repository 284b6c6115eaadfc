/*
 * bench_rotate.c: a pass of its own that rotates q and k of a rig on the CPU, as engines without folio_rotary run it.
 * Threads are started for each pass that is worth it. Types of 16 bits are taken for bf16.
 */
#include "bench/bench_attention.h"

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
static void rotate_f32(float *restrict to, const float *restrict from, const float *restrict row,
                       int32_t half)
{
    for (int32_t i = 0; i < half; i++) {
        to[i] = from[i] * row[i] - from[half + i] * row[half + i];
        to[half + i] = from[half + i] * row[i] + from[i] * row[half + i];
    }
}

static void rotate_bf16(uint16_t *restrict to, const uint16_t *restrict from,
                        const float *restrict row, int32_t half)
{
    for (int32_t i = 0; i < half; i++) {
        float x = of_bf16(from[i]), y = of_bf16(from[half + i]);
        to[i] = to_bf16(x * row[i] - y * row[half + i]);
        to[half + i] = to_bf16(y * row[i] + x * row[half + i]);
    }
}

/* Of q or of k. */
typedef struct rotation {
    const rig *r;
    const void *from;
    void *to; /* [rows][heads][head_size]; dims that do not rotate are not written */
    int32_t heads;
    const int64_t *positions; /* [rows] */
} rotation;

static double rotate_row(void *state, int64_t row, int64_t next)
{
    const rotation *t = state;
    const setting *s = &t->r->of;
    int32_t first = bench_first_rotated(s), dims = s->head_size - first;
    const float *angles = t->r->table + t->positions[row] * dims;
    (void)next;
    for (int32_t h = 0; h < t->heads; h++) {
        int64_t at = (row * t->heads + h) * s->head_size + first;
        if (s->dtype == FOLIO_F32)
            rotate_f32((float *)t->to + at, (const float *)t->from + at, angles, dims / 2);
        else rotate_bf16((uint16_t *)t->to + at, (const uint16_t *)t->from + at, angles, dims / 2);
    }
    return 0;
}

bool bench_rotate(const rig *r)
{
    double seconds;
    folio_batch_view view = {.struct_size = sizeof view};
    if (!bench_ok(
            folio_batch_get_view(r->l.batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view),
            "folio_batch_get_view"))
        return false;
    rotation both[] = {{r, r->q, r->q_rotated, r->of.heads.heads, view.positions},
                       {r, r->k, r->k_rotated, r->of.heads.kv_heads, view.positions}};
    for (int i = 0; i < 2; i++) {
        int64_t dims = r->of.head_size - bench_first_rotated(&r->of);
        bool few = r->of.what->rows * both[i].heads * dims < FEW;
        (void)bench_in_parallel(few ? 1 : r->num_threads, r->of.what->rows, rotate_row, &both[i],
                                &seconds);
    }
    return true;
}
