/*
 * decoy.c: stands in for libfolio_cuda.so. It leaves a mark as soon as it is loaded, in the file that
 * FOLIO_DECOY_MARK names, and can compute nothing.
 */
#include "backends/cuda_library.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((constructor)) static void leave_a_mark(void)
{
    const char *path = getenv("FOLIO_DECOY_MARK");
    int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (file < 0) return;
    if (write(file, "loaded\n", 7) != 7) abort();
    close(file);
}

static const folio_feature features[] = {
#define X(name, summary, refusal, device) {#name, summary, 0, "a decoy"},
#include "backends/features.def"
#undef X
};
static const char *unavailable(void) { return "this is a decoy"; }
static const char *device(void) { return ""; }
static const char *const levels[] = {NULL};
static const folioi_backend backend = {.name = "cuda",
                                       .unavailable = unavailable,
                                       .device = device,
                                       .levels = levels,
                                       .features = features};

__attribute__((visibility("default"))) const folioi_backend *folioi_cuda_backend(
    uint64_t build_id, const folioi_cuda_core *core)
{
    (void)core;
    return build_id == FOLIO_BUILD_ID ? &backend : NULL;
}
