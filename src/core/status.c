/* status.c: status names, the calling thread's error text, and structs that cross the ABI. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_STRUCT 4096 /* no struct of any version comes near it */

static _Thread_local char last_error[1024];

const char *folio_version(void) { return FOLIO_VERSION_STRING; }

const char *folio_last_error(void) { return last_error; }

const char *folio_status_name(folio_status status)
{
    switch (status) {
#define X(name, value, text)                                                                       \
    case FOLIO_##name: return "FOLIO_" #name;
        FOLIO_STATUS_MAP(X)
#undef X
    }
    return "FOLIO_UNKNOWN";
}

const char *folio_status_text(folio_status status)
{
    switch (status) {
#define X(name, value, text)                                                                       \
    case FOLIO_##name: return text;
        FOLIO_STATUS_MAP(X)
#undef X
    }
    return "not a status of this library";
}

folio_status folioi_fail(folio_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

folio_status folioi_fail_aligned(size_t size, const char *what, ...)
{
    char name[128];
    va_list args;
    va_start(args, what);
    vsnprintf(name, sizeof name, what, args);
    va_end(args);
    FAIL(FOLIO_ERR_ARGUMENT, "%s is not aligned to %zu bytes", name, size);
}

/* struct_size of a caller's struct; refused where it is 0 or counts bytes that are set and unknown. */
static folio_status check_struct(const void *p, size_t known, const char *name, size_t *size)
{
    REQUIRE(p != NULL, "%s is NULL", name);
    memcpy(size, p, sizeof *size);
    REQUIRE(*size >= sizeof *size && *size <= MAX_STRUCT,
            "%s: struct_size is %zu, outside [%zu, %d]; FOLIO_INIT and FOLIO_WITH set it", name,
            *size, sizeof *size, MAX_STRUCT);
    REQUIRE(*size % sizeof *size == 0,
            "%s: struct_size is %zu, no multiple of %zu: no version of the struct has this size",
            name, *size, sizeof *size); /* it could end inside a pointer */
    const unsigned char *bytes = p;
    for (size_t i = known; i < *size; i++)
        REQUIRE(
            bytes[i] == 0,
            "%s: struct_size is %zu, this library knows %zu bytes, and byte %zu past them is set",
            name, *size, known, i - known);
    return FOLIO_OK;
}

folio_status folioi_struct_in(void *dst, size_t known, const void *src, const char *name)
{
    size_t size = 0;
    TRY(check_struct(src, known, name, &size));
    memset(dst, 0, known);
    memcpy(dst, src, size < known ? size : known);
    memcpy(dst, &known, sizeof known); /* the copy's own size: it may be handed on */
    return FOLIO_OK;
}

folio_status folioi_struct_out(void *dst, const void *src, size_t known, const char *name)
{
    size_t size = 0;
    TRY(check_struct(dst, known, name, &size));
    size_t n = size < known ? size : known;
    memcpy((char *)dst + sizeof size, (const char *)src + sizeof size, n - sizeof size);
    return FOLIO_OK;
}
