/*
 * bench_ceilings.h: what this machine can do at most, by loops that do nothing else: multiply-adds
 * of f32, dot products of bf16 and int8, reads of memory. Sampled between the repetitions of a case,
 * so that a case and its ceiling meet the same neighbours and the same clock.
 */
#ifndef FOLIO_BENCH_CEILINGS_H
#define FOLIO_BENCH_CEILINGS_H

#include <stdint.h>

typedef enum bench_ceiling {
    BENCH_FMA_F32,  /* GFLOP/s; a multiply-add is 2                                     */
    BENCH_DOT_BF16, /* GFLOP/s of vdpbf16ps                                             */
    BENCH_DOT_INT8, /* Gop/s of vpdpbusd; at AVX2 of the three instructions it stands for */
    BENCH_READ,     /* GB/s of a buffer larger than the caches                          */
    BENCH_NUM_CEILINGS
} bench_ceiling;

typedef struct bench_ceilings bench_ceilings;

/* For so many threads, with the instructions of a level. The program ends without memory. */
bench_ceilings *bench_ceilings_open(int32_t threads, const char *level);
void bench_ceilings_close(bench_ceilings *c);

/* One sample, some milliseconds long; NAN where the level or the CPU has no such instruction. */
double bench_ceilings_sample(bench_ceilings *c, bench_ceiling which);

/*
 * Piece i of some work; returns how much it was. next: the piece that this thread takes after it, -1: none.
 */
typedef double bench_piece_fn(void *state, int64_t i, int64_t next);

/* All pieces, in order, by threads that start together and take one after another. Returns the work, and the
 * seconds from the first start to the last end. */
double bench_in_parallel(int32_t threads, int64_t count, bench_piece_fn *piece, void *state,
                         double *seconds);

/* The key in JSON ("fma_f32_gflops"), the words for people ("f32 FMA") by backend, and its unit. */
const char *bench_ceiling_key(bench_ceiling which);
const char *bench_ceiling_name(const char *backend, bench_ceiling which);
const char *bench_ceiling_unit(bench_ceiling which);

#endif
