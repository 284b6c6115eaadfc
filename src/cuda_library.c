/* cuda_library.c: libfolio_cuda found and loaded, once. */
#include "cuda_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libfolio_cuda.so"

static char reason[512];
static const folioi_backend *loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* What is said of a backend that is not here: so that people learn why. */
static const folio_feature no_features[] = {
#define X(name, summary, refusal, device) {#name, summary, 0, "libfolio_cuda is not there"},
#include "features.def"
#undef X
};
static const char *unavailable(void) { return reason; }
static const char *no_device(void) { return ""; }
static const char *const no_levels[] = {NULL};
static const folioi_backend absent = {
    .name = "cuda",
    .unavailable = unavailable,
    .device = no_device,
    .levels = no_levels,
    .features = no_features,
};

/* Beside this library or the program that holds it. */
static void *open_beside(void)
{
    Dl_info here;
    char path[4096];
    if (dladdr((void *)&absent, &here) == 0 || here.dli_fname == NULL) return NULL;
    const char *slash = strrchr(here.dli_fname, '/');
    int dir = slash != NULL ? (int)(slash - here.dli_fname) + 1 : 0;
    int n = snprintf(path, sizeof path, "%.*s" LIBRARY, dir, here.dli_fname);
    return n > 0 && n < (int)sizeof path && dir > 0 ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

static void load(void)
{
    static const folioi_cuda_core core = {folioi_fail, folioi_alloc, folioi_free,
                                          folioi_batch_rows};
    const char *named = getenv("FOLIO_CUDA_LIBRARY");
    void *library = named != NULL && named[0] != 0 ? dlopen(named, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL && named == NULL) library = open_beside();
    if (library == NULL && named == NULL) library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        snprintf(reason, sizeof reason, "the CUDA backend's library is not there (%s)",
                 named != NULL && why != NULL ? why : LIBRARY ", built by make cuda");
        return;
    }
    void *symbol = dlsym(library, FOLIOI_CUDA_ENTRY);
    folioi_cuda_entry entry;
    memcpy(&entry, &symbol, sizeof entry);
    if (symbol != NULL) loaded = entry(FOLIOI_CUDA_INTERFACE, &core);
    if (loaded == NULL)
        snprintf(reason, sizeof reason, "%s was built for another version of Folio",
                 named != NULL ? named : LIBRARY);
}

const folioi_backend *folioi_cuda_library(void)
{
    pthread_once(&once, load);
    return loaded != NULL ? loaded : &absent;
}
