/*
 * measure.cu: see bench_device.h. Times are those of events in the stream. Two loops are the ceilings: one only reads
 * memory, 16 bytes a load; one only multiplies on the tensor cores, numbers and sums in registers.
 */
#include "bench/bench_device.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 256, MMA_BLOCKS_PER_SM = 2, MMA_ROUNDS = 32768 };
/* As fast as any of 18 forms tried on an H200, within 0.5 %; of half as many bytes the launch is 1 %. */
enum { READ_THREADS = 1024, READ_BLOCKS_PER_SM = 2 };
static const size_t read_bytes = (size_t)8 << 30, least_read_bytes = (size_t)64 << 20;
static const size_t least_empty_bytes = (size_t)256 << 20;

struct bench_device {
    cudaStream_t stream;
    cudaEvent_t start, stop;
    char *buffer; /* read by the ceiling, read or written to empty the L2 cache */
    size_t buffer_bytes, empty_bytes;
    uint64_t *results; /* of the mma loop: clocks, nanoseconds */
    int processors;
    double clock_mhz;
};

struct bench_graph {
    cudaGraphExec_t exec;
};

static bool good(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return true;
    fprintf(stderr, "folio bench: %s: %s\n", what, cudaGetErrorString(error));
    return false;
}

static bool launched(const char *what) { return good(cudaGetLastError(), what); }

/* ---- Kernels */

/* A number of 64 bits for each counter. */
__device__ uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

__device__ void store(void *to, int64_t i, int dtype, float x)
{
    switch (dtype) {
    case FOLIO_F32: ((float *)to)[i] = x; break;
    case FOLIO_F16: ((__half *)to)[i] = __float2half(x); break;
    case FOLIO_BF16: ((__nv_bfloat16 *)to)[i] = __float2bfloat16(x); break;
    case FOLIO_FP8_E4M3: ((__nv_fp8_e4m3 *)to)[i] = __nv_fp8_e4m3(x); break;
    case FOLIO_FP8_E5M2: ((__nv_fp8_e5m2 *)to)[i] = __nv_fp8_e5m2(x); break;
    case FOLIO_INT8: ((int8_t *)to)[i] = (int8_t)lrintf(x * 127); break;
    default: break;
    }
}

__global__ void fill_kernel(void *to, int dtype, int64_t count, uint64_t seed)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        store(to, i, dtype, (float)(mix(seed + (uint64_t)i) >> 40) * 0x1p-23F - 1);
}

__device__ uint64_t nanoseconds()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__global__ void idle_kernel(uint64_t for_ns)
{
    uint64_t end = nanoseconds() + for_ns;
    while (nanoseconds() < end) {
    }
}

/* count: of 16 bytes. Nothing is written: no sum of zeros is 1. */
__global__ void __launch_bounds__(READ_THREADS)
    read_kernel(const uint4 *from, int64_t count, uint64_t *to)
{
    int64_t step = (int64_t)gridDim.x * READ_THREADS;
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * READ_THREADS + threadIdx.x; i < count; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            x[k] = i + k * step < count ? __ldcs(from + i + k * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 8; k++) sum |= x[k].x | x[k].y | x[k].z | x[k].w;
    }
    if (sum == 1) *to = sum;
}

/* Read to stay in the L2 cache, where what was there makes room. */
__global__ void __launch_bounds__(READ_THREADS)
    touch_kernel(const uint4 *from, int64_t count, uint64_t *to)
{
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * READ_THREADS + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * READ_THREADS)
        sum |= from[i].x;
    if (sum == 1) *to = sum;
}

__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two random bf16 of magnitude 0.5 to 1: of data that never changes, a card makes more than it can of others. */
__device__ uint32_t two_numbers(uint64_t seed)
{
    return ((uint32_t)mix(seed) & 0x807f807fu) | 0x3f003f00u;
}

/* 2 x 4 tiles of 16 x 8 sums. */
__global__ void __launch_bounds__(THREADS, MMA_BLOCKS_PER_SM) mma_kernel(uint64_t *results)
{
    uint32_t a[2][4], b[4][2];
    float c[2][4][4] = {};
    for (int i = 0; i < 8; i++) {
        a[i / 4][i % 4] = two_numbers(threadIdx.x * 16 + i);
        b[i / 2][i % 2] = two_numbers(threadIdx.x * 16 + 8 + i);
    }
    uint64_t begun = nanoseconds(), clock = clock64();
    for (int round = 0; round < MMA_ROUNDS; round++)
#pragma unroll
        for (int i = 0; i < 8; i++) multiply(c[i / 4][i % 4], a[i / 4], b[i % 4]);
    clock = clock64() - clock;
    begun = nanoseconds() - begun;
    float sum = 0;
    for (int i = 0; i < 32; i++) sum += c[i / 16][i / 4 % 4][i % 4];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        results[0] = clock;
        results[1] = begun;
    }
    if (sum == 1e30F) results[2] = 1; /* never: it keeps the sums */
}

/* ---- The device */

/* As much as there is, up to read_bytes, and enough to empty the cache. */
static bool make_buffer(bench_device *d, size_t empty_bytes)
{
    size_t least = empty_bytes > least_read_bytes ? empty_bytes : least_read_bytes;
    cudaError_t error = cudaErrorMemoryAllocation;
    for (size_t bytes = read_bytes; bytes >= least && error == cudaErrorMemoryAllocation;
         bytes /= 2) {
        d->buffer_bytes = bytes;
        error = cudaMalloc((void **)&d->buffer, bytes);
        if (error == cudaErrorMemoryAllocation) (void)cudaGetLastError();
    }
    d->empty_bytes = empty_bytes;
    return good(error, "memory for the ceilings");
}

static bool open_all(bench_device *d)
{
    int l2_bytes = 0;
    if (!good(cudaSetDevice(0), "the first GPU") ||
        !good(cudaDeviceGetAttribute(&d->processors, cudaDevAttrMultiProcessorCount, 0),
              "the number of processors") ||
        !good(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0), "the L2 cache"))
        return false;
    size_t empty_bytes = 4 * (size_t)l2_bytes;
    if (empty_bytes < least_empty_bytes) empty_bytes = least_empty_bytes;
    return make_buffer(d, empty_bytes) &&
           good(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "a stream") &&
           good(cudaEventCreate(&d->start), "an event") &&
           good(cudaEventCreate(&d->stop), "an event") &&
           good(cudaMalloc((void **)&d->results, 4 * sizeof *d->results), "memory") &&
           good(cudaMemset(d->buffer, 0, d->buffer_bytes), "writing memory");
}

bench_device *bench_device_open(void)
{
    bench_device *d = (bench_device *)calloc(1, sizeof *d);
    if (d == NULL) return NULL;
    d->clock_mhz = NAN;
    if (open_all(d)) return d;
    bench_device_close(d);
    return NULL;
}

void bench_device_close(bench_device *d)
{
    if (d == NULL) return;
    if (d->start) (void)cudaEventDestroy(d->start);
    if (d->stop) (void)cudaEventDestroy(d->stop);
    if (d->stream) (void)cudaStreamDestroy(d->stream);
    (void)cudaFree(d->buffer);
    (void)cudaFree(d->results);
    free(d);
}

void *bench_device_stream(const bench_device *d) { return d->stream; }

bool bench_device_fill(bench_device *d, void *to, folio_dtype dtype, int64_t count, uint64_t seed)
{
    fill_kernel<<<d->processors * 8, THREADS, 0, d->stream>>>(to, dtype, count, seed);
    return launched("filling memory");
}

bool bench_device_empty(bench_device *d, bool by_writing)
{
    if (by_writing)
        return good(cudaMemsetAsync(d->buffer, 0, d->empty_bytes, d->stream), "writing memory");
    touch_kernel<<<d->processors * 8, READ_THREADS, 0, d->stream>>>(
        (const uint4 *)d->buffer, (int64_t)(d->empty_bytes / sizeof(uint4)), d->results + 2);
    return launched("emptying the L2 cache");
}

/* ---- Time */

/* 200 us for the first launch and what it has to prepare, 20 for each: more than either was seen to take. */
bool bench_device_start(bench_device *d, int64_t launches)
{
    idle_kernel<<<1, 1, 0, d->stream>>>(200000 + 20000 * (uint64_t)launches);
    return launched("idling") && good(cudaEventRecord(d->start, d->stream), "an event");
}

bool bench_device_stop(bench_device *d, double *seconds)
{
    float ms = 0;
    if (!good(cudaEventRecord(d->stop, d->stream), "an event") ||
        !good(cudaEventSynchronize(d->stop), "waiting for the GPU") ||
        !good(cudaEventElapsedTime(&ms, d->start, d->stop), "the time between two events"))
        return false;
    *seconds = 1e-3 * ms;
    return true;
}

/* ---- Graphs */

bool bench_device_capture(bench_device *d)
{
    return good(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal),
                "beginning a capture");
}

bool bench_device_captured(bench_device *d, bench_graph **graph)
{
    cudaGraph_t recorded = NULL;
    *graph = (bench_graph *)calloc(1, sizeof **graph);
    if (!good(cudaStreamEndCapture(d->stream, &recorded), "ending a capture")) return false;
    bool made =
        *graph && good(cudaGraphInstantiate(&(*graph)->exec, recorded, 0), "making a graph");
    (void)cudaGraphDestroy(recorded);
    return made;
}

bool bench_device_replay(bench_device *d, const bench_graph *graph)
{
    return good(cudaGraphLaunch(graph->exec, d->stream), "replaying a graph");
}

void bench_graph_free(bench_graph *graph)
{
    if (graph == NULL) return;
    if (graph->exec) (void)cudaGraphExecDestroy(graph->exec);
    free(graph);
}

/* ---- Ceilings */

/* Its last bytes: the first ones empty the L2 cache, and stay there. */
static bool time_read(bench_device *d, size_t bytes, double *seconds)
{
    const char *from = d->buffer + (d->buffer_bytes - bytes);
    if (!bench_device_start(d, 1)) return false;
    read_kernel<<<d->processors * READ_BLOCKS_PER_SM, READ_THREADS, 0, d->stream>>>(
        (const uint4 *)from, (int64_t)(bytes / sizeof(uint4)), d->results + 2);
    return launched("reading memory") && bench_device_stop(d, seconds);
}

bool bench_device_read(bench_device *d, double bytes, double *seconds)
{
    double all = (double)d->buffer_bytes, most = bytes < all ? bytes : all;
    if (!time_read(d, (size_t)most / sizeof(uint4) * sizeof(uint4), seconds)) return false;
    *seconds *= bytes / most;
    return true;
}

static double sample_read(bench_device *d)
{
    double seconds;
    if (!time_read(d, d->buffer_bytes, &seconds)) return NAN;
    return (double)d->buffer_bytes / seconds * 1e-9;
}

static double sample_mma(bench_device *d)
{
    int blocks = d->processors * MMA_BLOCKS_PER_SM;
    double work = 2.0 * 16 * 8 * 16 * 8 * MMA_ROUNDS * (THREADS / 32) * blocks, seconds;
    uint64_t results[2];
    if (!bench_device_start(d, 1)) return NAN;
    mma_kernel<<<blocks, THREADS, 0, d->stream>>>(d->results);
    if (!launched("multiplying") || !bench_device_stop(d, &seconds) ||
        !good(cudaMemcpy(results, d->results, sizeof results, cudaMemcpyDeviceToHost), "a copy"))
        return NAN;
    d->clock_mhz = 1e3 * (double)results[0] / (double)results[1];
    return work / seconds * 1e-9;
}

double bench_device_sample(bench_device *d, bench_ceiling which)
{
    if (which == BENCH_READ) return sample_read(d);
    return which == BENCH_DOT_BF16 ? sample_mma(d) : NAN;
}

bool bench_device_bus(const bench_device *d, char *text, int size)
{
    (void)d;
    return good(cudaDeviceGetPCIBusId(text, size, 0), "the PCI bus id");
}

double bench_device_clock(const bench_device *d) { return d->clock_mhz; }
