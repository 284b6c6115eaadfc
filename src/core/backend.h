/*
 * backend.h: the function table of a backend. Caches, pools and plans reach it by ctx->backend. Every
 * entry is set unless it says otherwise. All arguments were checked by the caller. On a device, what
 * moves bytes is asynchronous on `stream` unless it says otherwise; host backends have no streams.
 */
#ifndef FOLIOI_BACKEND_H
#define FOLIOI_BACKEND_H

#include "core/status.h"

#include <stdbool.h>

struct folioi_call;
struct folioi_kv_layer;
struct folioi_kv_tensors;
struct folioi_plan_shape;

typedef struct folioi_backend {
    /* What it is */
    const char *name;
    const char *(*unavailable)(void); /* NULL result: it can be opened here */
    const char *(*device)(void);
    const char *const *levels; /* lowest first, NULL at the end */
    const char *level_env;     /* environment variable that caps the level; NULL: none */
    /* The kernels of a level by name, of the best for NULL; *level is set. NULL: not on this machine. */
    const void *(*kernels)(const char *cap, const char **level);
    /* An attention kernel by number; false: past the last. */
    bool (*get_kernel)(const folio_context *ctx, int32_t index, folio_context_kernel *info);
    int32_t max_head_size;
    bool f64_out;                  /* out may be FOLIO_F64 */
    bool one_thread;               /* contexts start no others */
    bool on_device;                /* tensors and caches lie in the memory of a device */
    const folio_feature *features; /* the rows of features.def with its answers */

    /* Memory */
    folio_status (*open)(folio_context *ctx,
                         int32_t number); /* optional: sets ctx->device and device_state */
    void (*close)(folio_context *ctx);    /* optional */
    /* not zeroed, and on the host not touched; kind is of account on a device only */
    folio_status (*alloc)(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                          const char *what, void **out);
    void (*free)(const folio_context *ctx, folio_memory_kind kind, void *memory, size_t bytes);
    folio_status (*copy)(const folio_context *ctx, void *to, const void *from, size_t bytes,
                         void *stream);
    folio_status (*fill)(const folio_context *ctx, void *to, int value, size_t bytes, void *stream);
    folio_status (*wait)(const folio_context *ctx, void *stream);

    /* K and V in caches */
    folio_status (*write)(const folio_context *ctx, const struct folioi_kv_layer *layer,
                          const struct folioi_kv_tensors *t, const int64_t *slots,
                          int64_t num_slots, void *stream);
    folio_status (*gather)(const folio_context *ctx, const struct folioi_kv_layer *layer,
                           const struct folioi_kv_tensors *t, const int64_t *slots,
                           int64_t num_slots, void *stream);
    /* blocks as stored, pairs[i] = { from, to }; on a device one of the two may be host memory of kind HOST */
    folio_status (*move_blocks)(const folio_context *ctx, const struct folioi_kv_layer *from,
                                const struct folioi_kv_layer *to, int32_t num_layers,
                                const folio_block_pair *pairs, int64_t num_pairs, void *stream);

    /* Attention: a plan is created once and updated once per step, then forward runs each layer. */
    folio_status (*plan_create)(const struct folioi_plan_shape *shape, void **state,
                                size_t *workspace_size);
    void (*plan_destroy)(const struct folioi_plan_shape *shape, void *state);
    folio_status (*plan_update)(void *state, const folio_batch *batch, void *stream);
    /* devices only: from arrays there, struct checked as far as the host can */
    folio_status (*plan_update_device)(void *state, const folio_step *step, void *stream);
    folio_status (*plan_status)(const void *state, folio_plan_findings *out); /* devices only */
    /* devices only, optional: of a plan with FOLIO_PLAN_NOTE_BAD; a device without it refuses the flag */
    void (*plan_bad_write)(void *state, folio_plan_bad_write *out);
    /* call NULL: as far as the plan knows; else what this call runs */
    void (*plan_describe)(const void *state, int32_t attention, folio_attention_type type,
                          const struct folioi_call *call, folio_plan_info *info);
    folio_status (*forward)(const struct folioi_call *call);
    folio_status (*merge)(const folio_context *ctx, const folio_merge *merge, void *stream);
} folioi_backend;

#endif
