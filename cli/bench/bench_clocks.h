/*
 * bench_clocks.h: the clock of a GPU's processors during a run, and what held it back: twenty samples a second, by a
 * thread of its own, from the driver's library NVML. Samples of an idle GPU are not counted.
 */
#ifndef FOLIO_BENCH_CLOCKS_H
#define FOLIO_BENCH_CLOCKS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
    BENCH_HELD_BY_POWER,       /* the card's power limit                         */
    BENCH_HELD_BY_TEMPERATURE, /* found too high by the driver or the card       */
    BENCH_HELD_BY_HARDWARE,    /* a slowdown or power brake that the card forced */
    BENCH_HELD_BY_SETTING,     /* application clocks, or those of other GPUs     */
    BENCH_NUM_HELD
} bench_held;

/* Of the samples in which the GPU was busy. */
typedef struct bench_clocks_stats {
    int64_t count; /* 0: the rest is NAN */
    double median_mhz, lowest_mhz;
    double held_share[BENCH_NUM_HELD]; /* of samples in which this held the clock back */
} bench_clocks_stats;

typedef struct bench_clocks bench_clocks;

/* library: NVML's file; bus: the GPU's PCI bus id, as CUDA gives it. NULL where either is not there. */
bench_clocks *bench_clocks_open(const char *library, const char *bus);
/* Samples from now on until it is closed. */
bool bench_clocks_start(bench_clocks *c);
/* One sample, by the caller, while no thread samples. */
void bench_clocks_sample(bench_clocks *c);
/* Ends sampling and frees all; stats may be NULL, and so may c. */
void bench_clocks_close(bench_clocks *c, bench_clocks_stats *stats);

/* "power_limit", and "the power limit". */
const char *bench_held_key(bench_held by);
const char *bench_held_name(bench_held by);

#endif
