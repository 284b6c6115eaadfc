/*
 * cuda_library.c: finds and loads libfolio_cuda, at most once. Whoever chooses the file chooses the code that runs. So
 * a file is opened by its absolute path only: given by the caller, by the environment, or in the folder of this library
 * or of the program. The current folder, argv[0] and the dynamic linker's search paths are not used.
 */
#include "backends/cuda_library.h"

#include "core/env.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#define LIBRARY "libfolio_cuda.so"
#define VARIABLE "FOLIO_CUDA_LIBRARY"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const folioi_backend *loaded; /* once set it stays */
static char loaded_from[PATH_MAX];   /* without links */
static bool searched;
static char reason[512]; /* why the search found none; written once */

/* The backend without its library: features of the version, not available, and why. */
static const folio_feature features[] = {
#define X(name, summary, refusal, device) {#name, summary, sizeof(device) == 1, device},
#include "backends/features.def"
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
    .features = features,
};

/* One file by its absolute path. False: `why` says it in a sentence. */
static bool open_file(const char *path, char *why, size_t size)
{
    static const folioi_cuda_core core = {folioi_fail, folioi_alloc, folioi_free,
                                          folioi_batch_rows};
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        snprintf(why, size, "the CUDA backend's library was not found (%s)",
                 error != NULL ? error : path);
        return false;
    }
    void *symbol = dlsym(library, FOLIOI_CUDA_ENTRY);
    folioi_cuda_entry entry;
    memcpy(&entry, &symbol, sizeof entry);
    if (symbol != NULL) loaded = entry(FOLIO_BUILD_ID, &core);
    if (loaded == NULL) {
        snprintf(why, size, "%s was built for another version of Folio", path);
        dlclose(library);
        return false;
    }
    if (realpath(path, loaded_from) == NULL) loaded_from[0] = '\0';
    return true;
}

/* The file that this code was loaded from; NULL where that is the program, or known by a relative path,
 * which the current folder of today says nothing about. */
static const char *library_file(Dl_info *here)
{
    Dl_info program;
    if (dladdr((void *)&absent, here) == 0 || here->dli_fname == NULL) return NULL;
    void *headers = (void *)(uintptr_t)getauxval(AT_PHDR);
    if (dladdr(headers, &program) != 0 && program.dli_fbase == here->dli_fbase) return NULL;
    return here->dli_fname[0] == '/' ? here->dli_fname : NULL;
}

/* The program's file; NULL where the process was given rights: anybody may put a hard link to such a program
 * into a folder of his own. */
static const char *program_file(void) { return folioi_env_is_foreign() ? NULL : "/proc/self/exe"; }

/* LIBRARY in the real folder of a file, if it is there. */
static bool find_beside(const char *file, char path[PATH_MAX])
{
    if (file == NULL || realpath(file, path) == NULL) return false;
    char *name = strrchr(path, '/') + 1;
    if (name - path + sizeof LIBRARY > PATH_MAX) return false;
    memcpy(name, LIBRARY, sizeof LIBRARY);
    return access(path, F_OK) == 0;
}

static void search(void)
{
    const char *named = folioi_env_get(VARIABLE);
    Dl_info here;
    char path[PATH_MAX];
    if (named != NULL && named[0] != '/')
        snprintf(reason, sizeof reason, VARIABLE " is \"%s\", not an absolute path", named);
    else if (named != NULL) open_file(named, reason, sizeof reason);
    else if (find_beside(library_file(&here), path) || find_beside(program_file(), path))
        open_file(path, reason, sizeof reason);
    else
        snprintf(reason, sizeof reason,
                 "the CUDA backend's library was not found (" LIBRARY ", built by make cuda)");
}

const folioi_backend *folioi_cuda_library(void)
{
    pthread_mutex_lock(&lock);
    if (loaded == NULL && !searched) {
        searched = true;
        search();
    }
    const folioi_backend *backend = loaded != NULL ? loaded : &absent;
    pthread_mutex_unlock(&lock);
    return backend;
}

folio_status folioi_cuda_library_load(const char *path)
{
    char why[512], real[PATH_MAX], from[256];
    pthread_mutex_lock(&lock);
    bool before = loaded != NULL;
    bool ok = before ? realpath(path, real) != NULL && strcmp(real, loaded_from) == 0
                     : open_file(path, why, sizeof why);
    snprintf(from, sizeof from, "%.255s", loaded_from);
    pthread_mutex_unlock(&lock);
    REQUIRE(ok || !before, "context: cuda_library is \"%s\", but \"%s\" is loaded already", path,
            from);
    if (!ok) FAIL(FOLIO_ERR_UNSUPPORTED, "cuda: %s", why);
    return FOLIO_OK;
}
