/* cuda_backend.h: declarations that the host files of the CUDA backend share. */
#ifndef FOLIOI_CUDA_BACKEND_H
#define FOLIOI_CUDA_BACKEND_H

#include "backends/cuda/decode/decode.h"
#include "backends/cuda/move/cuda_move.h"
#include "backends/cuda_library.h"

#include <stdatomic.h>

/** The core's functions, set when the library is loaded. */
extern const folioi_cuda_core *folioi_core;

/** More kernels than there are; those past them are prepared for every launch. */
#define FOLIOI_CUDA_MAX_READY 192

struct folioi_cuda_prepared {
    _Atomic(const void *) kernels[FOLIOI_CUDA_MAX_READY]; /* NULL past the last */
};

/** A context's device. */
typedef struct folioi_cuda_device {
    int number;
    folioi_cuda_sm sm;
    folioi_cuda_prepared ready;
    char name[256];
} folioi_cuda_device;

static inline const folioi_cuda_device *device_of(const folio_context *ctx)
{
    return ctx->device_state;
}

/** Is it of level "generic": does the generic kernel compute everything? */
bool folioi_cuda_only_generic(const folio_context *ctx);

/** FOLIO_OK, or ERR_DEVICE (ERR_MEMORY where there is none left) with what was done and CUDA's word. */
folio_status folioi_cuda_status(cudaError_t error, const char *what);

/** Fails on a stream that is being captured: a graph would read host memory again when it is replayed, and find something
 * else there. */
folio_status folioi_cuda_refuse_capture(cudaStream_t stream);

/** The capture that a stream is in, and the one node that what it is given next depends on. */
typedef struct folioi_cuda_capture {
    uint64_t number;     /* 0: none                             */
    cudaGraphNode_t end; /* NULL: no capture, no node or several */
} folioi_cuda_capture;

/** false: nobody knows. */
bool folioi_cuda_capture_of(cudaStream_t stream, folioi_cuda_capture *capture);

#define TRY_CUDA(call, what) TRY(folioi_cuda_status((call), (what)))

/** The context's device becomes the thread's; *before is what it was, for folioi_cuda_leave. */
folio_status folioi_cuda_enter(const folio_context *ctx, int *before);
void folioi_cuda_leave(const folio_context *ctx, int before);

/** Bytes of host memory, read before this returns, in memory of the device to be given back in the stream's order. */
folio_status folioi_cuda_upload(const void *from, size_t bytes, cudaStream_t stream, void **out);

folio_status folioi_cuda_plan_create(const folioi_plan_shape *shape, void **state,
                                     size_t *workspace_size);
void folioi_cuda_plan_destroy(const folioi_plan_shape *shape, void *state);
folio_status folioi_cuda_plan_update(void *state, const folio_batch *batch, void *stream);
folio_status folioi_cuda_plan_update_device(void *state, const folio_step *step, void *stream);
folio_status folioi_cuda_plan_status(const void *state, folio_plan_findings *out);
void folioi_cuda_plan_bad_write(void *state, folio_plan_bad_write *out);
void folioi_cuda_plan_describe(const void *state, int32_t attention, folio_attention_type type,
                               const folioi_call *call, folio_plan_info *info);
bool folioi_cuda_get_kernel(const folio_context *ctx, int32_t index, folio_context_kernel *info);
folio_status folioi_cuda_forward(const folioi_call *call);

folio_status folioi_cuda_write(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               void *stream);
/** The same with slots in device memory: what a forward does. rotations: of k, by the step. noting NULL: notes nothing. */
folio_status folioi_cuda_store(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               const folioi_cuda_rotations *rotations,
                               const folioi_cuda_noting *noting, cudaStream_t stream);
folio_status folioi_cuda_gather(const folio_context *ctx, const folioi_kv_layer *layer,
                                const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                                void *stream);
folio_status folioi_cuda_move_pairs(const folio_context *ctx, const folioi_kv_layer *from,
                                    const folioi_kv_layer *to, int32_t num_layers,
                                    const folio_block_pair *pairs, int64_t num_pairs, void *stream);
folio_status folioi_cuda_merge_parts(const folio_context *ctx, const folio_merge *merge,
                                     void *stream);

/** K or V of a layer as kernels take it. */
folioi_cuda_side folioi_cuda_side_of(const folioi_kv_layer *layer, folioi_k_or_v which, float scale,
                                     const float *head_scales);

static inline folioi_cuda_rows rows_of(const folio_tensor *t)
{
    return (folioi_cuda_rows){t->data, t->token_stride, t->head_stride};
}

#endif
