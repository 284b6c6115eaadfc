/* context.c: opening a backend with its threads and allocator. */
#include "backends/cuda_library.h"
#include "backends/registry.h"
#include "core/env.h"
#include "plan/judge.h"

#include <string.h>

/* A level must be one of these backends': one that is misspelt would go unnoticed. */
static folio_status check_level(const char *where, const char *level,
                                const folioi_backend *const *backends)
{
    char names[256];
    bool known = folioi_level_names(backends, level, names, sizeof names);
    REQUIRE(known, "%s: level \"%.64s\" is unknown; there are %s", where, level, names);
    return FOLIO_OK;
}

static folio_status check_levels(const folioi_backend *const *backends, const char *level)
{
    if (level != NULL) return check_level("context", level, backends);
    for (; *backends != NULL; backends++) {
        const folioi_backend *const one[] = {*backends, NULL};
        const char *cap = folioi_level_cap(one[0]);
        if (cap != NULL) TRY(check_level(one[0]->level_env, cap, one));
    }
    return FOLIO_OK;
}

/* The named backend at the wished level, or the best that is available; refusals are collected. */
static folio_status choose(const folio_context_desc *d, folio_context *ctx)
{
    if (d->cuda_library != NULL && d->backend != NULL && strcmp(d->backend, "cuda") == 0)
        TRY(folioi_cuda_library_load(d->cuda_library));
    folioi_candidates candidates = folioi_backend_candidates(d->backend);
    REQUIRE(candidates.list[0] != NULL,
            "backend \"%s\" is unknown; there are auto, cuda, cpu and reference", d->backend);
    TRY(check_levels(candidates.list, d->level));
    char text[512] = "";
    folioi_reasons reasons = {.text = text, .size = sizeof text};
    for (int32_t i = 0; candidates.list[i] != NULL; i++) {
        const folioi_backend *b = candidates.list[i];
        const char *reason = b->unavailable();
        reasons.prefix = b->name;
        if (reason != NULL) {
            folioi_reasons_add(&reasons, "%s", reason);
            continue;
        }
        const char *cap = d->level != NULL ? d->level : folioi_level_cap(b);
        ctx->kernels = b->kernels(cap, &ctx->level);
        if (ctx->kernels == NULL) {
            folioi_reasons_add(&reasons, "level \"%s\" is not available here", cap);
            continue;
        }
        REQUIRE(d->device == 0 || b->on_device,
                "context: device %d does not exist; host backends have only device 0", d->device);
        ctx->backend = b;
        ctx->device = b->device();
        return FOLIO_OK;
    }
    FAIL(FOLIO_ERR_UNSUPPORTED, "%s", text);
}

static folio_status check_desc(const folio_context_desc *d)
{
    REQUIRE(d->device >= 0, "context: device is %d; it must be at least 0", d->device);
    REQUIRE((d->allocator.alloc == NULL) == (d->allocator.free == NULL),
            "context: allocator.alloc and allocator.free must both be set or both be NULL");
    if (d->executor.parallel_for != NULL)
        REQUIRE(d->executor.num_threads >= 1 && d->executor.num_threads <= 256,
                "context: executor.num_threads is %d, outside [1, 256]", d->executor.num_threads);
    else
        REQUIRE(d->num_threads >= 0 && d->num_threads <= 256,
                "context: num_threads is %d, outside [0, 256]", d->num_threads);
    REQUIRE(d->pin_threads == 0 || d->pin_threads == 1,
            "context: pin_threads is %d, neither 0 nor 1", d->pin_threads);
    REQUIRE(d->pin_threads == 0 || d->executor.parallel_for == NULL,
            "context: pin_threads is set, but the executor's threads are the caller's to place");
    REQUIRE(d->cuda_library == NULL || d->cuda_library[0] == '/',
            "context: cuda_library is \"%s\", not an absolute path", d->cuda_library);
    return FOLIO_OK;
}

/* FOLIO_DEBUG, read with glibc only. Not on a device: a graph that is captured would record the fills. */
static folio_status take_debug(folio_context *ctx)
{
    const char *debug = NULL;
#if defined(__GLIBC__)
    debug = folioi_env_get("FOLIO_DEBUG");
#endif
    if (debug == NULL) return FOLIO_OK;
    REQUIRE(strcmp(debug, "poison") == 0, "FOLIO_DEBUG: \"%.64s\" is unknown; there is poison",
            debug);
    ctx->poison = !ctx->backend->on_device;
    return FOLIO_OK;
}

folio_status folio_context_create(const folio_context_desc *desc, folio_context **out)
{
    REQUIRE(out != NULL, "folio_context_create: out is NULL");
    *out = NULL;
    folio_context_desc d = {.struct_size = sizeof d};
    if (desc != NULL) STRUCT_IN(d, desc, "folio_context_desc");
    TRY(check_desc(&d));
    folio_context chosen = {.executor = d.executor};
    TRY(choose(&d, &chosen));
    TRY(take_debug(&chosen));
    chosen.allocator = d.allocator.alloc != NULL ? d.allocator : folioi_allocator_default();
    chosen.num_threads = chosen.backend->one_thread        ? 1
                         : d.executor.parallel_for != NULL ? d.executor.num_threads
                         : d.num_threads > 0               ? d.num_threads
                                                           : folioi_processor_count();
    void *memory;
    TRY(folioi_alloc(&chosen.allocator, sizeof(folio_context), "a context", &memory));
    folio_context *ctx = memory;
    *ctx = chosen;
    refs_init(&ctx->refs);
    if (ctx->backend->open != NULL) {
        folio_status status = ctx->backend->open(ctx, d.device);
        if (status != FOLIO_OK) {
            folioi_free(&chosen.allocator, ctx, sizeof *ctx);
            return status;
        }
    }
    if (d.executor.parallel_for == NULL && ctx->num_threads > 1) {
        folio_status status =
            folioi_threads_create(&ctx->allocator, ctx->num_threads, d.pin_threads, &ctx->threads);
        if (status != FOLIO_OK) {
            folio_context_destroy(ctx);
            return status;
        }
    }
    *out = ctx;
    return FOLIO_OK;
}

void folio_context_destroy(folio_context *ctx)
{
    if (ctx == NULL || !refs_release(&ctx->refs)) return;
    folioi_threads_destroy(ctx->threads);
    if (ctx->backend->close != NULL) ctx->backend->close(ctx);
    folio_allocator a = ctx->allocator;
    folioi_free(&a, ctx, sizeof *ctx);
}

static int32_t num_kernels_of(const folio_context *ctx)
{
    folio_context_kernel kernel;
    int32_t n = 0;
    while (ctx->backend->get_kernel(ctx, n, &kernel)) n++;
    return n;
}

folio_status folio_context_get_info(const folio_context *ctx, folio_context_info *info)
{
    REQUIRE(ctx != NULL, "folio_context_get_info: ctx is NULL");
    folio_context_info i = {
        .backend = ctx->backend->name,
        .level = ctx->level,
        .device = ctx->device,
        .num_threads = ctx->num_threads,
        .num_kernels = num_kernels_of(ctx),
    };
    return folioi_struct_out(info, &i, sizeof i, "folio_context_info");
}

folio_status folio_context_get_kernel(const folio_context *ctx, int32_t index,
                                      folio_context_kernel *info)
{
    REQUIRE(ctx != NULL, "folio_context_get_kernel: ctx is NULL");
    folio_context_kernel i = {0};
    REQUIRE(index >= 0 && ctx->backend->get_kernel(ctx, index, &i),
            "folio_context_get_kernel: index %d is outside [0, %d)", index, num_kernels_of(ctx));
    if (i.block_size == 0) i.block_size = 16; /* any */
    return folioi_struct_out(info, &i, sizeof i, "folio_context_kernel");
}
