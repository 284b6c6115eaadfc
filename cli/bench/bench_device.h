/*
 * bench_device.h: measuring on a GPU: its clock, its ceilings, its graphs. Built by `make cuda`. The functions are weak:
 * a build without CUDA links without them, bench_device_open is NULL there, and nothing else is called.
 *
 * Work is given to one stream, in order. What returns false has said why on stderr.
 */
#ifndef FOLIO_BENCH_DEVICE_H
#define FOLIO_BENCH_DEVICE_H

#include "bench/bench_ceilings.h"

#include <folio/folio.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BENCH_DEVICE __attribute__((weak))

typedef struct bench_device bench_device;
typedef struct bench_graph bench_graph;

/* The first GPU; NULL: there is none. */
BENCH_DEVICE bench_device *bench_device_open(void);
BENCH_DEVICE void bench_device_close(bench_device *d);

BENCH_DEVICE void *bench_device_stream(const bench_device *d);

/* Numbers uniform in [-1, 1), made on the device; INT8: all but -128, as if their scale were 1 / 127. */
BENCH_DEVICE bool bench_device_fill(bench_device *d, void *to, folio_dtype dtype, int64_t count,
                                    uint64_t seed);

/* Nothing of what was read before stays in the L2 cache: 256 MB or four times its size are read, or written. */
BENCH_DEVICE bool bench_device_empty(bench_device *d, bool by_writing);

/*
 * The seconds that the device needs for what it is given between the two. It first idles long enough for the host
 * to give it so many launches: what is measured never waits for the host.
 */
BENCH_DEVICE bool bench_device_start(bench_device *d, int64_t launches);
BENCH_DEVICE bool bench_device_stop(bench_device *d, double *seconds);

/* What is given to the stream between the two is recorded, not run; replay runs it. */
BENCH_DEVICE bool bench_device_capture(bench_device *d);
BENCH_DEVICE bool bench_device_captured(bench_device *d, bench_graph **graph);
BENCH_DEVICE bool bench_device_replay(bench_device *d, const bench_graph *graph);
BENCH_DEVICE void bench_graph_free(bench_graph *graph);

/* BENCH_READ (GB/s) and BENCH_DOT_BF16 (GFLOP/s of mma.sync), a few milliseconds each; NAN for others. */
BENCH_DEVICE double bench_device_sample(bench_device *d, bench_ceiling which);

/*
 * The seconds of a plain read of so many bytes, or of as many as the buffer has; none of them are in the L2 cache of an
 * emptied one.
 */
BENCH_DEVICE bool bench_device_read(bench_device *d, double bytes, double *seconds);

/* The GPU's PCI bus id, such as 0000:01:00.0. */
BENCH_DEVICE bool bench_device_bus(const bench_device *d, char *text, int size);

/* MHz at which the processors ran during the last sample of BENCH_DOT_BF16; NAN before it. */
BENCH_DEVICE double bench_device_clock(const bench_device *d);

#ifdef __cplusplus
}
#endif

#endif
