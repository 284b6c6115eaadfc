/*
 * cuda_library.h: the CUDA backend is a separate library, libfolio_cuda, loaded on first use. It gets the core's
 * functions as a table and links only to the CUDA runtime, statically.
 */
#ifndef FOLIOI_CUDA_LIBRARY_H
#define FOLIOI_CUDA_LIBRARY_H

#include "backends/backend.h"

/** What the library calls in the core. */
typedef struct folioi_cuda_core {
    folio_status (*fail)(folio_status status, const char *format, ...)
        __attribute__((format(printf, 2, 3)));
    folio_status (*alloc)(const folio_allocator *a, int64_t size, const char *what, void **out);
    void (*free)(const folio_allocator *a, void *ptr, int64_t size);
    folioi_rows (*rows)(const folio_batch *batch, int64_t seq, folio_attention_type type);
} folioi_cuda_core;

/** A hash of the version and of the layout of every struct that the two exchange: both must have been built with
 * the same. */
static inline uint64_t folioi_cuda_interface(void)
{
    static const uint64_t facts[] = {
        FOLIO_VERSION_MAJOR,
        FOLIO_VERSION_MINOR,
        FOLIO_VERSION_PATCH,
#define STRUCT(type) sizeof(type),
#define FIELD(type, field) ((uint64_t)offsetof(type, field) << 32) + sizeof(((type *)0)->field),
#include "backends/cuda_interface.def"
#undef STRUCT
#undef FIELD
    };
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a, by words */
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++)
        hash = (hash ^ facts[i]) * 0x100000001b3u;
    return hash;
}

/** The library's one symbol. NULL: built for another interface. */
typedef const folioi_backend *(*folioi_cuda_entry)(uint64_t interface,
                                                   const folioi_cuda_core *core);
#define FOLIOI_CUDA_ENTRY "folioi_cuda_backend"
const folioi_backend *folioi_cuda_backend(uint64_t interface, const folioi_cuda_core *core);

/** The backend of the library; where there is none, one that says why it cannot be opened. The first call loads
 * it. */
const folioi_backend *folioi_cuda_library(void);

/** The same from this absolute path, instead of where it would be looked for; refused where another is loaded. */
folio_status folioi_cuda_library_load(const char *path);

#endif
