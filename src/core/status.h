/*
 * status.h: how internal code fails. REQUIRE records one sentence and returns ERR_ARGUMENT; FAIL does so
 * with any status; TRY forwards. The text is kept per thread and read by folio_last_error.
 */
#ifndef FOLIOI_STATUS_H
#define FOLIOI_STATUS_H

#include <folio/folio.h>

folio_status folioi_fail(folio_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** "<what> is not aligned to <size> bytes", what being a format with its arguments. */
folio_status folioi_fail_aligned(size_t size, const char *what, ...)
    __attribute__((format(printf, 2, 3)));

#define FAIL(status, ...) return folioi_fail(status, __VA_ARGS__)
#define REQUIRE(cond, ...)                                                                         \
    do {                                                                                           \
        if (!(cond)) return folioi_fail(FOLIO_ERR_ARGUMENT, __VA_ARGS__);                          \
    } while (0)
/* An array of the caller's, NULL or aligned to its elements. */
#define REQUIRE_ALIGNED(array, ...)                                                                \
    do {                                                                                           \
        if ((uintptr_t)(array) % sizeof *(array) != 0)                                             \
            return folioi_fail_aligned(sizeof *(array), __VA_ARGS__);                              \
    } while (0)
#define TRY(call)                                                                                  \
    do {                                                                                           \
        folio_status try_status_ = (call);                                                         \
        if (try_status_ != FOLIO_OK) return try_status_;                                           \
    } while (0)

/**
 * Read a struct that crosses the ABI into `dst` of `known` bytes: a shorter one is completed with zeros,
 * a longer one must have a zero tail.
 */
folio_status folioi_struct_in(void *dst, size_t known, const void *src, const char *name);

/** Write `known` bytes of `src` to the caller's struct, as much as its struct_size takes; same rules. */
folio_status folioi_struct_out(void *dst, const void *src, size_t known, const char *name);

#define STRUCT_IN(dst, src, name) TRY(folioi_struct_in(&(dst), sizeof(dst), (src), (name)))

#endif
