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
static void open_world(world *w)
{
    static float x[MANY * NUMBERS];
    w->ctx = device_context();
    w->run = (folio_run){.struct_size = sizeof w->run, .stream = device_stream(w->ctx)};
    w->parts = device_make(w->ctx, sizeof x);
    w->lse = device_make(w->ctx, ROWS * HEADS * 4);
    w->out = device_make(w->ctx, NUMBERS * 4);
    for (int i = 0; i < MANY * NUMBERS; i++) x[i] = (float)(i / NUMBERS);
    CHECK_OK(folio_memory_copy(w->ctx, w->parts, x, sizeof x, &w->run));
    CHECK_OK(folio_memory_fill(w->ctx, w->lse, 0, ROWS * HEADS * 4, &w->run));
    CHECK_OK(folio_run_wait(w->ctx, &w->run));
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
    open_world(&w);
    cudaStream_t stream = w.run.stream;
    CHECK_OK(merge(&w, MANY));
    check_out(&w, 49.5f);
    CHECK_OK(merge(&w, 48));
    check_out(&w, 23.5f);
    device_capture(stream);
    CHECK_OK(merge(&w, 3));
    CHECK_REFUSED(merge(&w, MANY), FOLIO_ERR_UNSUPPORTED, "captured");
    cudaGraphExec_t replay = device_captured(w.ctx, stream);
    CUDA_OK(cudaGraphLaunch(replay, stream));
    check_out(&w, 1.0f);
    CHECK_OK(folio_memory_fill(w.ctx, w.parts, 0, 3 * NUMBERS * 4, &w.run));
    CUDA_OK(cudaGraphLaunch(replay, stream));
    check_out(&w, 0.0f);
    device_close(w.ctx);
}
