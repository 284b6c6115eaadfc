/* fake_device.c: a device for machines without one; see fake_device.h. One lock: everything is done one by one. */
#include "fake_device.h"

#include "backends/registry.h"
#include "cache/kv_cache.h"
#include "plan/call.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct region {
    struct region *next;
    void *base;
    size_t bytes;
    bool hidden; /* the device's own */
} region;

/* Blocks to be moved, or bytes to be filled. */
typedef struct work {
    struct work *next;
    void *stream;
    folioi_kv_format format[2];
    folioi_kv_layer *layers[2]; /* from, to: copies */
    folio_block_pair *pairs;
    int64_t num_pairs;
    void *to;
    int value;
    size_t bytes;
} work;

enum { LARGEST = 1 << 30 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static region *regions;
static work *queue;
static fake_device_counts counts;
static folio_context host;         /* what computes in place of the device */
static folio_status update_status; /* of the next updates of plans */

/* ------------------------------------------------------------------------------------------ pages */

static void show(int protection)
{
    for (region *r = regions; r != NULL; r = r->next)
        if (r->hidden && mprotect(r->base, r->bytes, protection) != 0) abort();
}

static void enter(void)
{
    pthread_mutex_lock(&lock);
    show(PROT_READ | PROT_WRITE);
}

static folio_status leave(folio_status status)
{
    show(PROT_NONE);
    pthread_mutex_unlock(&lock);
    return status;
}

/* What calls are given must lie where a device reaches it. */
static void check_reach(const void *p)
{
    if (p == NULL) return;
    for (const region *r = regions; r != NULL; r = r->next)
        if ((const char *)p >= (const char *)r->base &&
            (const char *)p < (const char *)r->base + r->bytes)
            return;
    CHECK_MSG(false, "a call was given memory that the device does not reach");
}

static void check_layers(const folioi_kv_layer *layers, int32_t n)
{
    for (int32_t l = 0; l < n; l++) {
        check_reach(layers[l].k);
        check_reach(layers[l].v);
        check_reach(layers[l].k_scales);
        check_reach(layers[l].v_scales);
    }
}

/* ----------------------------------------------------------------------------------------- queues */

static void run_one(const work *w)
{
    if (w->pairs == NULL) {
        memset(w->to, w->value, w->bytes);
        return;
    }
    folio_kv_cache from = {.ctx = &host, .format = w->format[0], .layers = w->layers[0]};
    folio_kv_cache to = {.ctx = &host, .format = w->format[1], .layers = w->layers[1]};
    if (folio_kv_cache_copy_blocks(&from, &to, w->pairs, w->num_pairs, NULL) != FOLIO_OK) abort();
}

/* All of a stream, or of all of them, in the order it was given. */
static void run_queue(const void *stream, bool all)
{
    for (work **at = &queue; *at != NULL;) {
        work *w = *at;
        if (!all && w->stream != stream) {
            at = &w->next;
            continue;
        }
        run_one(w);
        *at = w->next;
        free(w->layers[0]);
        free(w->layers[1]);
        free(w->pairs);
        free(w);
    }
}

static work *add_work(void *stream)
{
    work *w = calloc(1, sizeof *w), **at = &queue;
    if (w == NULL) abort();
    w->stream = stream;
    while (*at != NULL) at = &(*at)->next;
    *at = w;
    return w;
}

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes);
    if (to == NULL) abort();
    return memcpy(to, from, bytes);
}

/* ------------------------------------------------------------------------------------------ table */

static folio_status alloc_memory(const folio_context *ctx, folio_memory_kind kind, size_t bytes,
                                 const char *what, void **out)
{
    (void)ctx;
    if (bytes > LARGEST)
        return folioi_fail(FOLIO_ERR_MEMORY, "%s: cannot allocate %zu bytes", what, bytes);
    enter();
    region *r = calloc(1, sizeof *r);
    if (r == NULL) abort();
    r->bytes = (bytes + 4095) / 4096 * 4096;
    r->hidden = kind == FOLIO_MEMORY_DEVICE;
    r->base = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->base == MAP_FAILED) abort();
    memset(r->base, 0xFF, r->bytes);
    r->next = regions;
    regions = r;
    counts.live++;
    *out = r->base;
    return leave(FOLIO_OK);
}

/* As CUDA: a device's memory is given back when its work is done, the host's without waiting. */
static void free_memory(const folio_context *ctx, folio_memory_kind kind, void *memory,
                        size_t bytes)
{
    (void)ctx, (void)bytes;
    if (memory == NULL) return;
    enter();
    if (kind == FOLIO_MEMORY_DEVICE) run_queue(NULL, true);
    for (region **at = &regions; *at != NULL; at = &(*at)->next) {
        region *r = *at;
        if (r->base != memory) continue;
        CHECK(r->hidden == (kind == FOLIO_MEMORY_DEVICE));
        *at = r->next;
        munmap(r->base, r->bytes);
        free(r);
        counts.live--;
        break;
    }
    leave(FOLIO_OK);
}

static folio_status copy_memory(const folio_context *ctx, void *to, const void *from, size_t bytes,
                                void *stream)
{
    (void)ctx;
    enter();
    run_queue(stream, false);
    memmove(to, from, bytes);
    return leave(FOLIO_OK);
}

static folio_status fill_memory(const folio_context *ctx, void *to, int value, size_t bytes,
                                void *stream)
{
    (void)ctx;
    enter();
    work *w = add_work(stream);
    w->to = to;
    w->value = value;
    w->bytes = bytes;
    return leave(FOLIO_OK);
}

static folio_status wait(const folio_context *ctx, void *stream)
{
    (void)ctx;
    enter();
    counts.waits++;
    run_queue(stream, false);
    return leave(FOLIO_OK);
}

static folio_status gather(const folio_context *ctx, const folioi_kv_layer *layer,
                           const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                           void *stream)
{
    (void)ctx;
    enter();
    run_queue(stream, false);
    check_reach(t->k.data);
    check_reach(t->v.data);
    folioi_kv_layer one = *layer;
    folio_kv_cache cache = {.ctx = &host, .format = *layer->format, .layers = &one};
    folio_kv_gather g = FOLIO_WITH(
        folio_kv_gather, .k = t->k, .v = t->v, .slots = slots, .num_slots = num_slots,
        .k_scale = t->k_head_scales == NULL ? t->k_scale : 0.0f, .k_head_scales = t->k_head_scales);
    if (!layer->format->desc.v_in_k) {
        g.v_scale = t->v_head_scales == NULL ? t->v_scale : 0.0f;
        g.v_head_scales = t->v_head_scales;
    }
    return leave(folio_kv_cache_gather(&cache, 0, &g, NULL));
}

static folio_status move_blocks(const folio_context *ctx, const folioi_kv_layer *from,
                                const folioi_kv_layer *to, int32_t num_layers,
                                const folio_block_pair *pairs, int64_t num_pairs, void *stream)
{
    (void)ctx;
    if (num_pairs == 0) return FOLIO_OK;
    enter();
    work *w = add_work(stream);
    const folioi_kv_layer *layers[2] = {from, to};
    for (int i = 0; i < 2; i++) {
        check_layers(layers[i], num_layers);
        w->format[i] = *layers[i]->format;
        w->format[i].desc.num_layers = num_layers;
        w->layers[i] = copy_of(layers[i], (size_t)num_layers * sizeof *from);
        for (int32_t l = 0; l < num_layers; l++) w->layers[i][l].format = &w->format[i];
    }
    w->pairs = copy_of(pairs, (size_t)num_pairs * sizeof *pairs);
    w->num_pairs = num_pairs;
    counts.moves++;
    counts.moved_blocks += num_pairs;
    return leave(FOLIO_OK);
}

static folio_status merge(const folio_context *ctx, const folio_merge *m, void *stream)
{
    (void)ctx;
    enter();
    run_queue(stream, false);
    return leave(folio_state_merge(&host, m, NULL));
}

static folio_status write_rows(const folio_context *ctx, const folioi_kv_layer *layer,
                               const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                               void *stream)
{
    enter();
    run_queue(stream, false);
    check_reach(t->k.data);
    check_reach(t->v.data);
    return leave(folioi_reference_backend.write(ctx, layer, t, slots, num_slots, NULL));
}

static folio_status forward(const folioi_call *call)
{
    enter();
    run_queue(call->stream, false);
    const void *const given[] = {call->tensors.q.data,   call->tensors.k.data, call->tensors.v.data,
                                 call->tensors.out.data, call->tensors.lse,    call->workspace};
    for (int i = 0; i < COUNT_OF(given); i++) check_reach(given[i]);
    if (call->cached) check_layers(&call->layer, 1);
    return leave(folioi_reference_backend.forward(call));
}

static folio_status end_update(void)
{
    return update_status == FOLIO_OK ? FOLIO_OK
                                     : folioi_fail(update_status, "as the test wants it");
}

static folio_status plan_update(void *state, const folio_batch *batch, void *stream)
{
    (void)state;
    (void)batch;
    (void)stream;
    return end_update();
}

/* Checks nothing on its device, and no forward follows: the reference has no batch to run. */
static folio_status plan_update_device(void *state, const folio_step *step, void *stream)
{
    (void)state;
    (void)step;
    (void)stream;
    return end_update();
}

static folio_status open_device(folio_context *ctx, int32_t number)
{
    (void)ctx;
    (void)number;
    return FOLIO_OK;
}

static void close_device(folio_context *ctx) { (void)ctx; }

static folioi_backend backend;

static void make_backend(void)
{
    backend = folioi_reference_backend;
    backend.name = "fake";
    backend.f64_out = false;
    backend.on_device = true;
    backend.open = open_device;
    backend.close = close_device;
    backend.alloc = alloc_memory;
    backend.free = free_memory;
    backend.copy = copy_memory;
    backend.fill = fill_memory;
    backend.wait = wait;
    backend.gather = gather;
    backend.move_blocks = move_blocks;
    backend.merge = merge;
    backend.write = write_rows;
    backend.forward = forward;
    backend.plan_update = plan_update;
    backend.plan_update_device = plan_update_device;
    host = (folio_context){.backend = &folioi_reference_backend,
                           .allocator = folioi_allocator_default(),
                           .num_threads = 1};
}

folio_context *fake_device_context(const folio_allocator *allocator)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_backend);
    folio_context *ctx = support_context("reference", 1, allocator);
    if (ctx != NULL) ctx->backend = &backend;
    return ctx;
}

void fake_device_set_update(folio_status status) { update_status = status; }

fake_device_counts fake_device_count(void)
{
    pthread_mutex_lock(&lock);
    fake_device_counts c = counts;
    counts = (fake_device_counts){.live = c.live};
    pthread_mutex_unlock(&lock);
    return c;
}

int64_t fake_device_queued(const void *stream)
{
    int64_t n = 0;
    pthread_mutex_lock(&lock);
    for (const work *w = queue; w != NULL; w = w->next) n += w->stream == stream;
    pthread_mutex_unlock(&lock);
    return n;
}
