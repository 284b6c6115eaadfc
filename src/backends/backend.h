/*
 * backend.h: the function table of a backend. A plan is created and updated through it once per step,
 * then forward runs each layer. All arguments were checked by the caller: a backend only computes.
 */
#ifndef FOLIOI_BACKEND_H
#define FOLIOI_BACKEND_H

#include "batch/batch.h"
#include "cache/kv_rows.h"
#include "core/context.h"
#include "plan/attention.h"

/** What a plan was created for. */
typedef struct folioi_plan_shape {
    folio_context *ctx;
    folio_plan_desc desc; /* pointers replaced by the two arrays below */
    folio_attention **attentions;
    uint32_t *types;
    folio_layout layout, cross_layout; /* of the caches it was given; NATIVE: of none */
} folioi_plan_shape;

/** One layer's forward, resolved: defaults filled in, strides set. */
typedef struct folioi_call {
    const folioi_plan_shape *shape;
    const void *plan_state;
    const folio_batch *batch; /* NULL: the plan was updated from arrays of the device */
    int32_t attention_index;
    const folio_attention_desc *attention;
    folio_attention_type type;
    bool cached; /* `layer` holds a cache's layer, and keys are read from it             */
    bool append; /* the cache holds the context only                                     */
    folioi_kv_layer layer;
    folio_tensors tensors;
    folioi_rotation rotation; /* of q and of new rows of k */
    bool stores; /* k and v go to the cache first                                           */
    const int64_t *slots; /* where, [num_slots]; NULL: none do, or only the device knows          */
    int64_t num_slots;
    int64_t num_rows; /* rows of the batch; out may have more (padding of a graph plan)       */
    char *workspace;
    bool foreign_workspace; /* the caller's: whatever it holds */
    void *stream; /* of the device; NULL: its default, and on host backends              */
} folioi_call;

/** k and v of the call, to be stored. */
static inline folioi_kv_tensors call_new_rows(const folioi_call *call)
{
    const folio_tensors *t = &call->tensors;
    folioi_kv_tensors rows = {.k = t->k,
                              .v = t->v,
                              .k_scale = t->k_scale,
                              .v_scale = t->v_scale,
                              .k_head_scales = t->k_head_scales,
                              .v_head_scales = t->v_head_scales,
                              .rotation = call->rotation,
                              .positions = t->positions};
    if (rows.positions == NULL && call->batch != NULL) rows.positions = call->batch->positions.data;
    return rows;
}

/** The position by which row i of a sequence rotates, in q and in k. */
static inline int64_t call_position(const folioi_call *call, const folioi_rows *rows, int64_t i)
{
    const int64_t *given = call->tensors.positions;
    return given != NULL ? given[rows->query_row + i] : rows->first_query_pos + i;
}

/** One question to `supports`, with defaults filled in. */
typedef struct folioi_request {
    const folio_attention_desc *attention;
    uint32_t types;
    const folioi_kv_format *cache; /* NULL: without one */
} folioi_request;

/** Reasons, a line each, into a buffer that may be too small. */
typedef struct folioi_reasons {
    char *text;
    size_t size, length;
    int32_t count;
    const char *prefix; /* who refuses; NULL: nobody is named */
} folioi_reasons;

void folioi_reasons_add(folioi_reasons *reasons, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

typedef struct folioi_backend {
    const char *name;
    const char *(*unavailable)(void); /* NULL result: it can be opened here */
    const char *(*device)(void);
    const char *const *levels; /* lowest first, NULL at the end */
    const char *level_env;     /* environment variable that caps the level; NULL: none */
    /* The kernels of a level by name, of the best for NULL; *level is set. NULL: not on this machine. */
    const void *(*kernels)(const char *cap, const char **level);
    /* An attention kernel by number; false: past the last. */
    bool (*get_kernel)(const folio_context *ctx, int32_t index, folio_kernel_info *info);
    int32_t max_head_size;
    bool f64_out;                  /* out may be FOLIO_F64 */
    bool one_thread;               /* contexts start no others */
    const folioi_device *memory;   /* NULL: a host backend, whose memory is the allocator's */
    const folio_feature *features; /* the rows of features.def with its answers */
    folio_status (*plan_create)(const folioi_plan_shape *shape, void **state,
                                size_t *workspace_size);
    void (*plan_destroy)(const folioi_plan_shape *shape, void *state);
    folio_status (*plan_update)(void *state, const folio_batch *batch, void *stream);
    /* devices: from arrays there, struct checked as far as the host can */
    folio_status (*plan_update_device)(void *state, const folio_step *step, void *stream);
    folio_status (*plan_status)(const void *state, folio_plan_findings *out);
    /* call NULL: as far as the plan knows; else what this call runs */
    void (*plan_describe)(const void *state, int32_t attention, folio_attention_type type,
                          const folioi_call *call, folio_plan_info *info);
    folioi_kv_write_fn *write;
    folio_status (*forward)(const folioi_call *call);
} folioi_backend;

/** The context computes by this backend from here on. */
static inline void context_set_backend(folio_context *ctx, const folioi_backend *backend)
{
    ctx->backend = backend;
    ctx->memory = backend->memory;
    ctx->write = backend->write;
}

/** The backend of this name, also one that is not available; NULL: there is no such name. The CUDA
 * backend's library is loaded when its name is asked for, and only then. */
const folioi_backend *folioi_backend_find(const char *name);

/** Who may serve a name, best first, NULL at the end: the backend itself; for "auto" and NULL all in host
 * memory; nobody where the name is unknown. */
#define FOLIOI_NUM_BACKENDS 3
typedef struct folioi_candidates {
    const folioi_backend *list[FOLIOI_NUM_BACKENDS + 1];
    bool any; /* "auto" */
} folioi_candidates;
folioi_candidates folioi_backend_candidates(const char *name);

/** What the environment says of a backend's level; NULL: nothing. It may name none. */
const char *folioi_level_cap(const folioi_backend *backend);
/** Is this a level of one of these backends (NULL at the end)? `names` gets those there are. */
bool folioi_level_names(const folioi_backend *const *backends, const char *level, char *names,
                        size_t size);

/** Every reason why a backend cannot run this. */
void folioi_backend_judge(const folioi_backend *backend, const folioi_request *request,
                          folioi_reasons *reasons);

/** What every host backend answers: they differ in speed, not in what they can do. */
extern const folio_feature folioi_host_features[];

extern const folioi_backend folioi_reference_backend;
extern const folioi_backend folioi_cpu_backend;

#endif
