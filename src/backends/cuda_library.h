/*
 * cuda_library.h: the CUDA backend is a separate library, libfolio_cuda, loaded on first use. It gets the core's
 * functions as a table and links only to the CUDA runtime, statically.
 */
#ifndef FOLIOI_CUDA_LIBRARY_H
#define FOLIOI_CUDA_LIBRARY_H

#include "plan/call.h"

/** What the library calls in the core. */
typedef struct folioi_cuda_core {
    folio_status (*fail)(folio_status status, const char *format, ...)
        __attribute__((format(printf, 2, 3)));
    folio_status (*alloc)(const folio_allocator *a, int64_t size, const char *what, void **out);
    void (*free)(const folio_allocator *a, void *ptr, int64_t size);
    folioi_rows (*rows)(const folio_batch *batch, int64_t seq, folio_attention_type type);
} folioi_cuda_core;

/**
 * The library's one symbol. build_id: FOLIO_BUILD_ID, a hash of all headers that the two share, which the build defines.
 * NULL: the library was built from others.
 */
typedef const folioi_backend *(*folioi_cuda_entry)(uint64_t build_id, const folioi_cuda_core *core);
#define FOLIOI_CUDA_ENTRY "folioi_cuda_backend"
const folioi_backend *folioi_cuda_backend(uint64_t build_id, const folioi_cuda_core *core);

/** The backend of the library; where there is none, one that says why it cannot be opened. The first call loads
 * it. */
const folioi_backend *folioi_cuda_library(void);

/** The same from this absolute path, instead of where it would be looked for; refused where another is loaded. */
folio_status folioi_cuda_library_load(const char *path);

#endif
