/*
 * device.h: the functions through which a context handles memory that holds K and V: a device's own memory, or on
 * host backends the allocator's. Layers and rows are only declared here; cache/ defines them.
 */
#ifndef FOLIOI_DEVICE_H
#define FOLIOI_DEVICE_H

#include "core/status.h"

struct folioi_kv_layer;
struct folioi_kv_tensors;

/** Stores rows of k and v in slots of a layer; of every backend. */
typedef folio_status folioi_kv_write_fn(const folio_context *ctx,
                                        const struct folioi_kv_layer *layer,
                                        const struct folioi_kv_tensors *t, const int64_t *slots,
                                        int64_t num_slots, void *stream);

/** A device with memory of its own. What moves bytes there is asynchronous on `stream`, unless it says otherwise. */
typedef struct folioi_device {
    folio_status (*open)(folio_context *ctx,
                         int32_t number); /* sets ctx->device and device_state */
    void (*close)(folio_context *ctx);
    folio_status (*alloc)(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                          const char *what, void **out);
    void (*free)(const folio_context *ctx, folio_memory_kind kind, void *memory);
    folio_status (*copy)(const folio_context *ctx, void *to, const void *from, size_t bytes,
                         void *stream);
    folio_status (*fill)(const folio_context *ctx, void *to, int value, size_t bytes, void *stream);
    folio_status (*wait)(const folio_context *ctx, void *stream);
    folio_status (*gather)(const folio_context *ctx, const struct folioi_kv_layer *layer,
                           const struct folioi_kv_tensors *t, const int64_t *slots,
                           int64_t num_slots, void *stream);
    /* blocks as stored, pairs[i] = { from, to }; one of the two may be host memory of kind HOST */
    folio_status (*move_blocks)(const folio_context *ctx, const struct folioi_kv_layer *from,
                                const struct folioi_kv_layer *to, int32_t num_layers,
                                const folio_block_pair *pairs, int64_t num_pairs, void *stream);
    folio_status (*merge)(const folio_context *ctx, const folio_merge *merge, void *stream);
} folioi_device;

#endif
