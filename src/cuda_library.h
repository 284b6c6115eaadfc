/*
 * cuda_library.h: the CUDA backend is a library of its own, libfolio_cuda, loaded when it is first asked for. What
 * it needs of the core comes as a table of functions: it links to nothing but the CUDA runtime it holds.
 */
#ifndef FOLIOI_CUDA_LIBRARY_H
#define FOLIOI_CUDA_LIBRARY_H

#include "backend.h"

/** What the library calls in the core. */
typedef struct folioi_cuda_core {
    folio_status (*fail)(folio_status status, const char *format, ...)
        __attribute__((format(printf, 2, 3)));
    folio_status (*alloc)(const folio_allocator *a, int64_t size, const char *what, void **out);
    void (*free)(const folio_allocator *a, void *ptr, int64_t size);
    folioi_rows (*rows)(const folio_batch *batch, int64_t seq, folio_attention_type type);
} folioi_cuda_core;

/** Changes whenever a struct that the two exchange does; both must have been built with the same. */
#define FOLIOI_CUDA_INTERFACE 3

/** The library's one symbol. NULL: built for another interface. */
typedef const folioi_backend *(*folioi_cuda_entry)(int interface, const folioi_cuda_core *core);
#define FOLIOI_CUDA_ENTRY "folioi_cuda_backend"
const folioi_backend *folioi_cuda_backend(int interface, const folioi_cuda_core *core);

/** The backend of the library; where there is none, one that says why it cannot be opened. */
const folioi_backend *folioi_cuda_library(void);

#endif
