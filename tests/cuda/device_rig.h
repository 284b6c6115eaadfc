/* device_rig.h: what the tests on a device share: a context and what lives as long as it, bf16 numbers in its memory. */
#ifndef FOLIO_DEVICE_RIG_H
#define FOLIO_DEVICE_RIG_H

#include "test.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#define CUDA_OK(call) CHECK_MSG((call) == cudaSuccess, "%s", #call)

folio_context *device_context(void);
/* Destroys the context, and before it what the calls below made with it in this thread. */
void device_close(folio_context *ctx);
void *device_make(folio_context *ctx, size_t bytes); /* memory of the device */
cudaStream_t device_stream(folio_context *ctx);      /* one that waits for no other */
/* What lies between them on the stream becomes a graph. */
void device_capture(cudaStream_t stream);
cudaGraphExec_t device_captured(folio_context *ctx, cudaStream_t stream);
/* bf16 from 0.125 to 0.5, of both signs, on the host; the caller frees. */
uint16_t *device_numbers(int64_t count, uint32_t seed);
/* Memory of the device that holds host bytes, or such numbers. */
void *device_upload(folio_context *ctx, const void *from, size_t bytes);
void *device_upload_numbers(folio_context *ctx, int64_t count, uint32_t seed);
/* Such numbers as K (seed) and V (seed + 1) of consecutive slots of a layer, of `row` numbers each. */
void device_write_slots(folio_context *ctx, folio_kv_cache *cache, int32_t layer, int64_t first,
                        int64_t tokens, int64_t row, uint32_t seed);

#endif
