/* device_rig.c: see device_rig.h. */
#include "cuda/device_rig.h"

folio_context *device_context(void)
{
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&FOLIO_WITH(folio_context_desc, .backend = "cuda"), &ctx));
    return ctx;
}

/* What goes with a context: memory, or a stream, or a graph. */
typedef struct made {
    struct made *next;
    folio_context *ctx;
    void *memory;
    size_t bytes;
    cudaStream_t stream;
    cudaGraphExec_t replay;
} made;

static _Thread_local made *all_made;

static made *remember(folio_context *ctx)
{
    made *m = calloc(1, sizeof *m);
    if (m == NULL) abort();
    m->ctx = ctx;
    m->next = all_made;
    return all_made = m;
}

/* The last one made goes first: a graph before its stream. */
void device_close(folio_context *ctx)
{
    for (made **at = &all_made; *at != NULL;) {
        made *m = *at;
        if (m->ctx != ctx) {
            at = &m->next;
            continue;
        }
        if (m->replay != NULL) CUDA_OK(cudaGraphExecDestroy(m->replay));
        if (m->stream != NULL) CUDA_OK(cudaStreamDestroy(m->stream));
        folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, m->memory, m->bytes);
        *at = m->next;
        free(m);
    }
    folio_context_destroy(ctx);
}

void *device_make(folio_context *ctx, size_t bytes)
{
    made *m = remember(ctx);
    m->bytes = bytes;
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, bytes, &m->memory));
    return m->memory;
}

cudaStream_t device_stream(folio_context *ctx)
{
    made *m = remember(ctx);
    CUDA_OK(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
    return m->stream;
}

void device_capture(cudaStream_t stream)
{
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

cudaGraphExec_t device_captured(folio_context *ctx, cudaStream_t stream)
{
    made *m = remember(ctx);
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&m->replay, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return m->replay;
}

uint16_t *device_numbers(int64_t count, uint32_t seed)
{
    uint16_t *x = calloc((size_t)count, sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)(0x3e00u | (seed >> 16 & 0x81ffu));
    }
    return x;
}

void *device_upload(folio_context *ctx, const void *from, size_t bytes)
{
    void *to = device_make(ctx, bytes);
    CHECK_OK(folio_memory_copy(ctx, to, from, bytes, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    return to;
}

void *device_upload_numbers(folio_context *ctx, int64_t count, uint32_t seed)
{
    uint16_t *x = device_numbers(count, seed);
    void *to = device_upload(ctx, x, (size_t)count * sizeof *x);
    free(x);
    return to;
}

void device_write_slots(folio_context *ctx, folio_kv_cache *cache, int32_t layer, int64_t first,
                        int64_t tokens, int64_t row, uint32_t seed)
{
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    for (int64_t i = 0; i < tokens; i++) slots[i] = first + i;
    void *k = device_upload_numbers(ctx, tokens * row, seed);
    void *v = device_upload_numbers(ctx, tokens * row, seed + 1);
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_BF16, tokens, 0, 0},
                                      .v = {v, FOLIO_BF16, tokens, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, layer, &write, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    free(slots);
}
