/* cuda_backend.c: the CUDA backend's entry point: its devices, their memory, and its function table. */
#include "backends/cuda/host/cuda_backend.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

const folioi_cuda_core *folioi_core;

/* The calling thread's last launches, the latest first: a kernel that fails is heard of later, by another call. */
#define MAX_LAUNCHES 4
static _Thread_local const char *launches[MAX_LAUNCHES];

static bool is_kernel(const char *what) { return strncmp(what, "kernel ", 7) == 0; }

static void remember(const char *kernel)
{
    memmove(launches + 1, launches, sizeof launches - sizeof launches[0]);
    launches[0] = kernel;
}

/* Is it a failure of a kernel that ran, and not of the call that tells it? */
static bool is_late(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout: return true;
    default: return false;
    }
}

folio_status folioi_cuda_status(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        if (is_kernel(what)) remember(what);
        return FOLIO_OK;
    }
    (void)cudaGetLastError(); /* an error that does not stick is told once */
    folio_status status = error == cudaErrorMemoryAllocation ? FOLIO_ERR_MEMORY : FOLIO_ERR_DEVICE;
    if (!is_late(error) || launches[0] == NULL)
        return folioi_core->fail(status, "%s: %s", what, cudaGetErrorString(error));
    char list[128] = "";
    for (int i = 0; i < MAX_LAUNCHES && launches[i] != NULL; i++) {
        size_t at = strlen(list);
        snprintf(list + at, sizeof list - at, "%s%s", i > 0 ? ", " : "", launches[i]);
    }
    return folioi_core->fail(status,
                             "found at %s: %s; this thread's last launches, latest first: %s", what,
                             cudaGetErrorString(error), list);
}

folio_status folioi_cuda_enter(const folio_context *ctx, int *before)
{
    int number = device_of(ctx)->number;
    TRY_CUDA(cudaGetDevice(before), "the current device");
    if (*before != number) TRY_CUDA(cudaSetDevice(number), "choosing the context's device");
    return FOLIO_OK;
}

void folioi_cuda_leave(const folio_context *ctx, int before)
{
    if (before != device_of(ctx)->number) (void)cudaSetDevice(before);
}

#if CUDART_VERSION >= 13000
#define EDGES , &edges
#else
#define EDGES
#endif

bool folioi_cuda_capture_of(cudaStream_t stream, folioi_cuda_capture *capture)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
    const cudaGraphNode_t *nodes = NULL;
    size_t count = 0;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData *edges = NULL; /* not asked for, they may fail the call */
#endif
    *capture = (folioi_cuda_capture){0, NULL};
    if (cudaStreamGetCaptureInfo(stream, &status, &number, NULL, &nodes EDGES, &count) !=
        cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    if (status != cudaStreamCaptureStatusActive) return status == cudaStreamCaptureStatusNone;
    *capture = (folioi_cuda_capture){number, count == 1 ? nodes[0] : NULL};
    return true;
}

folio_status folioi_cuda_refuse_capture(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) (void)cudaGetLastError();
    if (capture == cudaStreamCaptureStatusNone) return FOLIO_OK;
    return folioi_core->fail(FOLIO_ERR_UNSUPPORTED,
                             "the stream is being captured: a graph can hold "
                             "neither a wait nor a call with arguments in "
                             "host memory");
}

/* When this returns, `from` has been read. Pinned memory would be read when the stream comes there, so it goes by way of
 * memory that is not pinned. */
static cudaError_t copy_now(char *to, const char *from, size_t bytes, cudaStream_t stream)
{
    char piece[16384];
    struct cudaPointerAttributes a = {.type = cudaMemoryTypeUnregistered};
    if (cudaPointerGetAttributes(&a, from) != cudaSuccess) (void)cudaGetLastError();
    if (a.type == cudaMemoryTypeUnregistered)
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
    for (size_t at = 0; at < bytes; at += sizeof piece) {
        size_t n = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        memcpy(piece, from + at, n);
        cudaError_t error = cudaMemcpyAsync(to + at, piece, n, cudaMemcpyHostToDevice, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

folio_status folioi_cuda_upload(const void *from, size_t bytes, cudaStream_t stream, void **out)
{
    TRY(folioi_cuda_refuse_capture(stream));
    TRY_CUDA(cudaMallocAsync(out, bytes, stream), "memory for a call's arguments");
    folio_status status =
        folioi_cuda_status(copy_now(*out, from, bytes, stream), "copying a call's arguments");
    if (status != FOLIO_OK) (void)cudaFreeAsync(*out, stream);
    return status;
}

/* ------------------------------------------------------------------------------------------ devices */

/* Asked once: why there is none, or the first one's name. */
static char why[256];
static struct cudaDeviceProp first;
static pthread_once_t asked = PTHREAD_ONCE_INIT;

static void ask(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) error = cudaGetDeviceProperties(&first, 0);
    if (error == cudaSuccess && count > 0) return;
    (void)cudaGetLastError();
    snprintf(why, sizeof why, "no CUDA device: %s",
             error != cudaSuccess ? cudaGetErrorString(error) : "none is there");
}

static const char *unavailable(void)
{
    pthread_once(&asked, ask);
    return why[0] != 0 ? why : NULL;
}

static const char *default_device(void)
{
    pthread_once(&asked, ask);
    return first.name;
}

/* A function of the driver by its name, as it was in CUDA 12.0; NULL: there is none. */
static void *driver_function(const char *name)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) return function;
    (void)cudaGetLastError();
    return NULL;
}

static folio_status open_device(folio_context *ctx, int32_t number)
{
    int count = 0, before;
    TRY_CUDA(cudaGetDeviceCount(&count), "counting CUDA devices");
    if (number >= count)
        return folioi_core->fail(FOLIO_ERR_ARGUMENT,
                                 "context: device %d does not exist; there are %d", number, count);
    void *memory;
    TRY(folioi_core->alloc(&ctx->allocator, sizeof(folioi_cuda_device), "a device", &memory));
    folioi_cuda_device *d = memory;
    struct cudaDeviceProp p;
    d->number = number;
    ctx->device_state = d;
    folio_status status = folioi_cuda_status(cudaGetDeviceProperties(&p, number),
                                             "asking for the device's properties");
    if (status == FOLIO_OK) status = folioi_cuda_enter(ctx, &before); /* the driver starts here */
    if (status != FOLIO_OK) {
        folioi_core->free(&ctx->allocator, d, sizeof *d);
        ctx->device_state = NULL;
        return status;
    }
    d->sm = (folioi_cuda_sm){.count = p.multiProcessorCount,
                             .shared_bytes = (int32_t)p.sharedMemPerMultiprocessor,
                             .shared_of_block = (int32_t)p.sharedMemPerBlockOptin,
                             .capability = (int16_t)(p.major * 10 + p.minor),
                             .overlaps = folioi_cuda_can_overlap(),
                             .ready = &d->ready,
                             .describe_tensor = driver_function("cuTensorMapEncodeTiled")};
    snprintf(d->name, sizeof d->name, "%s", p.name);
    ctx->device = d->name;
    folioi_cuda_leave(ctx, before);
    return FOLIO_OK;
}

static void close_device(folio_context *ctx)
{
    folioi_core->free(&ctx->allocator, ctx->device_state, sizeof(folioi_cuda_device));
}

/* Two threads may prepare one kernel at once, both with the same attributes. */
cudaError_t folioi_cuda_prepare(folioi_cuda_prepared *ready, const void *kernel, int shared_bytes,
                                bool prefer_shared)
{
    int at = 0;
    for (; at < FOLIOI_CUDA_MAX_READY; at++) {
        const void *there = atomic_load_explicit(&ready->kernels[at], memory_order_acquire);
        if (there == kernel) return cudaSuccess;
        if (there == NULL) break;
    }
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess && prefer_shared)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    for (; error == cudaSuccess && at < FOLIOI_CUDA_MAX_READY; at++) {
        const void *none = NULL;
        if (atomic_compare_exchange_strong(&ready->kernels[at], &none, kernel) || none == kernel)
            break;
    }
    return error;
}

/* ------------------------------------------------------------------------------------------- memory */

static folio_status alloc_memory(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                                 const char *what, void **out)
{
    int before;
    *out = NULL;
    TRY(folioi_cuda_enter(ctx, &before));
    if (bytes == 0) bytes = 1;
    cudaError_t error = kind == FOLIO_MEMORY_HOST ? cudaHostAlloc(out, bytes, cudaHostAllocPortable)
                                                  : cudaMalloc(out, bytes);
    folioi_cuda_leave(ctx, before);
    if (error != cudaErrorMemoryAllocation) return folioi_cuda_status(error, what);
    (void)cudaGetLastError();
    return folioi_core->fail(FOLIO_ERR_MEMORY, "%s: cannot allocate %zu bytes on %s", what, bytes,
                             kind == FOLIO_MEMORY_HOST ? "the host" : ctx->device);
}

static void free_memory(const folio_context *ctx, folio_memory_kind kind, void *memory,
                        size_t bytes)
{
    int before;
    (void)bytes;
    if (memory == NULL || folioi_cuda_enter(ctx, &before) != FOLIO_OK) return;
    (void)(kind == FOLIO_MEMORY_HOST ? cudaFreeHost(memory) : cudaFree(memory));
    (void)cudaGetLastError();
    folioi_cuda_leave(ctx, before);
}

static folio_status copy_memory(const folio_context *ctx, void *to, const void *from, size_t bytes,
                                void *stream)
{
    int before;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status =
        folioi_cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying");
    folioi_cuda_leave(ctx, before);
    return status;
}

static folio_status fill_memory(const folio_context *ctx, void *to, int value, size_t bytes,
                                void *stream)
{
    int before;
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status =
        folioi_cuda_status(cudaMemsetAsync(to, value, bytes, stream), "filling memory");
    folioi_cuda_leave(ctx, before);
    return status;
}

static folio_status wait(const folio_context *ctx, void *stream)
{
    int before;
    TRY(folioi_cuda_refuse_capture(stream));
    TRY(folioi_cuda_enter(ctx, &before));
    folio_status status = folioi_cuda_status(cudaStreamSynchronize(stream), "waiting for a stream");
    folioi_cuda_leave(ctx, before);
    return status;
}

/* -------------------------------------------------------------------------------------------- table */

/* The kernels of a level are the place of its name here. */
static const char *const levels[] = {"generic", "mma", NULL};

static const void *kernels(const char *cap, const char **level)
{
    int at = cap != NULL && strcmp(cap, levels[0]) == 0 ? 0 : 1;
    if (cap != NULL && strcmp(cap, levels[at]) != 0) return NULL;
    *level = levels[at];
    return &levels[at];
}

bool folioi_cuda_only_generic(const folio_context *ctx) { return ctx->kernels == &levels[0]; }

static const folio_feature features[] = {
#define X(name, summary, refusal, device) {#name, summary, sizeof(device) == 1, device},
#include "backends/features.def"
#undef X
};

static const folioi_backend backend = {
    .name = "cuda",
    .unavailable = unavailable,
    .device = default_device,
    .levels = levels,
    .kernels = kernels,
    .get_kernel = folioi_cuda_get_kernel,
    .max_head_size = FOLIOI_MAX_HEAD_SIZE,
    .one_thread = true,
    .on_device = true,
    .features = features,
    .open = open_device,
    .close = close_device,
    .alloc = alloc_memory,
    .free = free_memory,
    .copy = copy_memory,
    .fill = fill_memory,
    .wait = wait,
    .write = folioi_cuda_write,
    .gather = folioi_cuda_gather,
    .move_blocks = folioi_cuda_move_pairs,
    .plan_create = folioi_cuda_plan_create,
    .plan_destroy = folioi_cuda_plan_destroy,
    .plan_update = folioi_cuda_plan_update,
    .plan_update_device = folioi_cuda_plan_update_device,
    .plan_status = folioi_cuda_plan_status,
    .plan_bad_write = folioi_cuda_plan_bad_write,
    .plan_describe = folioi_cuda_plan_describe,
    .forward = folioi_cuda_forward,
    .merge = folioi_cuda_merge_parts,
};

__attribute__((visibility("default"))) const folioi_backend *folioi_cuda_backend(
    uint64_t build_id, const folioi_cuda_core *core)
{
    if (build_id != FOLIO_BUILD_ID) return NULL;
    folioi_core = core;
    return &backend;
}
