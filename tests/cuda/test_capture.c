/* test_capture.c: calls other than forwards on a stream that is being captured. */
#include "cuda/device_rig.h"

#include <string.h>

enum { ROWS = 5, HEADS = 2, SIZE = 16, NUMBERS = ROWS * HEADS * SIZE, MANY = 100 };

typedef struct {
    folio_context *ctx;
    folio_run run;
    float *parts, *lse, *out; /* on the device: [MANY][NUMBERS], [ROWS * HEADS], [NUMBERS] */
} world;

/* Part i is all i; of weights that are alike the merge is their mean. */
static void open_world(world *w, cudaStream_t stream)
{
    static float x[MANY * NUMBERS];
    w->ctx = device_context();
    w->run = (folio_run){.struct_size = sizeof w->run, .stream = stream};
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_DEVICE, sizeof x, (void **)&w->parts));
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_DEVICE, ROWS * HEADS * 4, (void **)&w->lse));
    CHECK_OK(folio_memory_create(w->ctx, FOLIO_MEMORY_DEVICE, NUMBERS * 4, (void **)&w->out));
    for (int i = 0; i < MANY * NUMBERS; i++) x[i] = (float)(i / NUMBERS);
    CHECK_OK(folio_memory_copy(w->ctx, w->parts, x, sizeof x, &w->run));
    CHECK_OK(folio_memory_fill(w->ctx, w->lse, 0, ROWS * HEADS * 4, &w->run));
    CHECK_OK(folio_run_wait(w->ctx, &w->run));
}

static void close_world(world *w)
{
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_DEVICE, w->parts, MANY * NUMBERS * 4);
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_DEVICE, w->lse, ROWS * HEADS * 4);
    folio_memory_destroy(w->ctx, FOLIO_MEMORY_DEVICE, w->out, NUMBERS * 4);
    folio_context_destroy(w->ctx);
}

static folio_status merge(world *w, int64_t num_parts)
{
    static folio_state states[MANY];
    for (int64_t i = 0; i < num_parts; i++)
        states[i] =
            (folio_state){.out = {w->parts + i * NUMBERS, FOLIO_F32, ROWS, 0, 0}, .lse = w->lse};
    folio_merge m =
        FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = SIZE, .num_parts = num_parts,
                   .parts = states, .out = {w->out, FOLIO_F32, ROWS, 0, 0});
    folio_status status = folio_state_merge(w->ctx, &m, &w->run);
    memset(states, 0x7f, sizeof states);
    return status;
}

static void check_out(world *w, float want)
{
    float out[NUMBERS];
    CHECK_OK(folio_memory_copy(w->ctx, out, w->out, sizeof out, &w->run));
    CHECK_OK(folio_run_wait(w->ctx, &w->run));
    for (int i = 0; i < NUMBERS; i++) CHECK(out[i] > want - 1e-3f && out[i] < want + 1e-3f);
}

/* A replay merges what the parts hold then. Many parts lie in host memory, and are refused rather than forgotten. */
TEST(capture, merges_of_few_parts)
{
    world w;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    open_world(&w, stream);
    CHECK_OK(merge(&w, MANY));
    check_out(&w, 49.5f);
    CHECK_OK(merge(&w, 48));
    check_out(&w, 23.5f);
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK_OK(merge(&w, 3));
    CHECK_REFUSED(merge(&w, MANY), FOLIO_ERR_UNSUPPORTED, "captured");
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    CUDA_OK(cudaGraphLaunch(replay, stream));
    check_out(&w, 1.0f);
    CHECK_OK(folio_memory_fill(w.ctx, w.parts, 0, 3 * NUMBERS * 4, &w.run));
    CUDA_OK(cudaGraphLaunch(replay, stream));
    check_out(&w, 0.0f);
    CUDA_OK(cudaGraphExecDestroy(replay));
    CUDA_OK(cudaGraphDestroy(graph));
    close_world(&w);
    CUDA_OK(cudaStreamDestroy(stream));
}
