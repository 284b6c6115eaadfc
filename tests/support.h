/*
 * support.h: what the tests of the API share: a context per backend, random numbers by
 * counter, guarded buffers, NaN poisoning of a cache, an allocator that counts and fails, and the
 * check that a call is refused with a sentence of its own. The number formats are kit's.
 */
#ifndef FOLIO_TESTS_SUPPORT_H
#define FOLIO_TESTS_SUPPORT_H

#include "kit/kit.h"
#include "test.h"

#include <stdatomic.h>
#include <stddef.h>

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* ------------------------------------------------------------------------------------- contexts */

/* "reference" and "cpu"; only "cuda" in suites that are built for a device. */
#ifdef FOLIO_TESTS_DEVICE
#define SUPPORT_NUM_BACKENDS 1
#else
#define SUPPORT_NUM_BACKENDS 2
#endif
extern const char *const support_backends[SUPPORT_NUM_BACKENDS];

typedef void (*support_body)(folio_context *ctx, const char *backend);
/* Runs the body once per backend, with an open context of two threads. */
void support_each_backend(support_body body);

#define BACKEND_TEST(suite, name)                                                                  \
    static void on_backend_##suite##_##name(folio_context *ctx, const char *backend);              \
    TEST(suite, name) { support_each_backend(on_backend_##suite##_##name); }                       \
    static void on_backend_##suite##_##name(__attribute__((unused)) folio_context *ctx,            \
                                            __attribute__((unused)) const char *backend)

/* A context of a backend with so many threads and, unless NULL, this allocator. NULL on failure. */
folio_context *support_context(const char *backend, int32_t num_threads,
                               const folio_allocator *allocator);

/* An empty batch of this block size. */
folio_batch *support_batch(folio_context *ctx, int32_t block_size);

/* ------------------------------------------------------------------------------------- refusals */

/* As expected status: refused, whichever of the error statuses it is. */
#define ANY_REFUSAL ((folio_status)-1)

/* Leaves a known sentence as the thread's last error, so that a stale one is noticed. */
void support_mark_error(void);
void support_refused(const char *file, int line, const char *call, folio_status got,
                     folio_status expected, const char *words);
/* The call is refused with this status and a new sentence with all these words ('|' between). */
#define REFUSED(call, status, words)                                                               \
    support_refused(__FILE__, __LINE__, #call, (support_mark_error(), (call)), status, words)

/* A struct of the header as a client of another version hands it over. */
typedef struct {
    const char *name;
    folio_status (*call)(void *world, void *arg);
    const void *good; /* NULL: the struct is filled by the call */
    size_t size;
    size_t older; /* what a client of an older header would say; fields past it get defaults */
} support_sized;
/* clang-format off */
#define SIZED(type, call, field, ...)                                                              \
    {#type, call, &(const type){__VA_ARGS__}, sizeof(type), offsetof(type, field)}
#define FILLED(type, call, field) {#type, call, NULL, sizeof(type), offsetof(type, field)}
/* clang-format on */
/* The calls of such a table: one that ends, and one that makes an object, which is destroyed. */
#define SIZED_CALL(name, type, call)                                                               \
    static folio_status name(void *world, __attribute__((unused)) void *arg)                       \
    {                                                                                              \
        __attribute__((unused)) type *w = world;                                                   \
        return call;                                                                               \
    }
#define SIZED_MAKE(name, type, made_type, call)                                                    \
    static folio_status name(void *world, void *arg)                                               \
    {                                                                                              \
        __attribute__((unused)) type *w = world;                                                   \
        made_type *made = NULL;                                                                    \
        folio_status status = call;                                                                \
        made_type##_destroy(made);                                                                 \
        return status;                                                                             \
    }
/* Sizes that are none, unknown or impossible are refused; older and newer clients are served. */
void support_check_sizes(void *world, const support_sized *cases, int num_cases);

/* A pointer no call may hand out: results start as this and are NULL after a refusal. */
extern char support_nowhere;
#define NOWHERE ((void *)&support_nowhere)

/* -------------------------------------------------------------------------------------- numbers */

/* 64 random bits of (seed, index). */
uint64_t support_bits(uint64_t seed, uint64_t index);
/* A random number in [-1, 1) with 24 significant bits. */
float support_random(uint64_t seed, uint64_t index);
void support_fill(float *x, int64_t count, uint64_t seed, float amplitude);
/* An order of 0 .. count - 1. */
void support_shuffle(int64_t *order, int64_t count, uint64_t seed);

#define SUPPORT_NUM_KV_DTYPES 6
extern const folio_dtype support_kv_dtypes[SUPPORT_NUM_KV_DTYPES];
/* Of those that can be created. */
#define SUPPORT_NUM_LAYOUTS 7
extern const folio_layout support_layouts[SUPPORT_NUM_LAYOUTS];

/* What a test stores in a cache as number (row, head, d) of K (part 0) or V (part 1): exact in its
 * dtype and in f32. In INT8 the number at d = 0 is the row's largest, so its scale is exact too. */
typedef struct {
    uint32_t bits;
    float scale; /* 1 unless INT8 */
    float value;
} support_number;
support_number support_known(folio_dtype dtype, int part, int64_t row, int64_t head, int64_t d);
/* Rows [count][heads][size] of such numbers, as f32; row i is first + i. The caller frees. */
float *support_known_rows(folio_dtype dtype, int part, int64_t first, int64_t count, int64_t heads,
                          int64_t size);

/* --------------------------------------------------------------------------------------- memory */

/* Memory aligned to 64 bytes between two guards. All bytes begin as 0xFF: a NaN in every format. */
typedef struct {
    unsigned char *base;
    void *data;
    size_t bytes;
} support_buffer;
support_buffer support_buffer_make(size_t bytes);
void support_buffer_poison(support_buffer *buffer);
/* No byte of the guards has changed. */
bool support_buffer_guards_hold(const support_buffer *buffer);
/* Every byte is still 0xFF. */
bool support_is_poison(const void *data, size_t bytes);
/* Checks the guards, then frees. */
void support_buffer_free(support_buffer *buffer);

/* Counts allocations; the call numbered fail_at (from 1), every one above `limit` bytes, fails. */
typedef struct {
    _Atomic int64_t calls;
    _Atomic int64_t live;
    _Atomic int64_t live_bytes;
    _Atomic int64_t faults; /* frees of a wrong size or pointer, alignments that are none */
    int64_t fail_at;        /* 0: never */
    size_t limit;           /* 0: none  */
} support_counter;
folio_allocator support_allocator(support_counter *counter);

/* folio_kv_cache_get_view, which must succeed. */
folio_kv_cache_view support_view(const folio_kv_cache *cache, int32_t layer);

/* folio_batch_set with the step's table replaced. step may be NULL, and so may tables: no table. */
folio_status support_set_rows(folio_batch *batch, const folio_step *step, const int32_t *tables,
                              int64_t row_stride);
folio_status support_set_csr(folio_batch *batch, const folio_step *step, const int32_t *start,
                             const int32_t *indices, const int32_t *last_block_len);
folio_status support_set_slots(folio_batch *batch, const folio_step *step, const int32_t *start,
                               const void *slots, int32_t index_bytes);

#endif
