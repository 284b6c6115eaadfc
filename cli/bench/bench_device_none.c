/* bench_device_none.c: bench_device.h in a build without CUDA: no device opens, so the rest is never reached. */
#include "bench/bench_device.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

bench_device *bench_device_open(void)
{
    fprintf(stderr, "folio bench: this program was built without CUDA; 'make cuda' builds "
                    "build-cuda/folio, which has it\n");
    return NULL;
}

void bench_device_close(bench_device *d) { (void)d; }

void *bench_device_stream(const bench_device *d)
{
    (void)d;
    return NULL;
}

bool bench_device_fill(bench_device *d, void *to, folio_dtype dtype, int64_t count, uint64_t seed)
{
    return (void)d, (void)to, (void)dtype, (void)count, (void)seed, false;
}

bool bench_device_empty(bench_device *d, bool by_writing)
{
    return (void)d, (void)by_writing, false;
}

bool bench_device_start(bench_device *d, int64_t launches)
{
    return (void)d, (void)launches, false;
}

bool bench_device_stop(bench_device *d, double *seconds) { return (void)d, (void)seconds, false; }

bool bench_device_capture(bench_device *d) { return (void)d, false; }

bool bench_device_captured(bench_device *d, bench_graph **graph)
{
    return (void)d, (void)graph, false;
}

bool bench_device_replay(bench_device *d, const bench_graph *graph)
{
    return (void)d, (void)graph, false;
}

void bench_graph_free(bench_graph *graph) { (void)graph; }

double bench_device_sample(bench_device *d, bench_ceiling which)
{
    return (void)d, (void)which, (double)NAN;
}

bool bench_device_read(bench_device *d, double bytes, double *seconds)
{
    return (void)d, (void)bytes, (void)seconds, false;
}

bool bench_device_bus(const bench_device *d, char *text, int size)
{
    return (void)d, (void)text, (void)size, false;
}

double bench_device_clock(const bench_device *d) { return (void)d, (double)NAN; }
