/* support.c: what the API tests share; see support.h. Written from the header and IEEE 754. */
#include "support.h"

#include <math.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------------- contexts */

#ifdef FOLIO_TESTS_DEVICE
const char *const support_backends[SUPPORT_NUM_BACKENDS] = {"cuda"};
#else
const char *const support_backends[SUPPORT_NUM_BACKENDS] = {"reference", "cpu"};
#endif
char support_nowhere;

folio_context *support_context(const char *backend, int32_t num_threads,
                               const folio_allocator *allocator)
{
    folio_context_desc desc =
        FOLIO_WITH(folio_context_desc, .backend = backend, .num_threads = num_threads);
    if (allocator != NULL) desc.allocator = *allocator;
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&desc, &ctx));
    return ctx;
}

void support_each_backend(support_body body)
{
    for (int i = 0; i < SUPPORT_NUM_BACKENDS; i++) {
        int before = test_failures();
        folio_context *ctx = support_context(support_backends[i], 2, NULL);
        if (ctx != NULL) body(ctx, support_backends[i]);
        folio_context_destroy(ctx);
        if (test_failures() != before) printf("  ... on backend %s\n", support_backends[i]);
    }
}

folio_batch *support_batch(folio_context *ctx, int32_t block_size)
{
    folio_batch *batch = NULL;
    CHECK_OK(
        folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .block_size = block_size), &batch));
    return batch;
}

/* ------------------------------------------------------------------------------------- refusals */

static char marked[512];

void support_mark_error(void)
{
    static int count;
    char name[32];
    snprintf(name, sizeof name, "marker %d", ++count);
    folio_backend_info info = {.struct_size = sizeof info};
    (void)folio_backend_get_info(name, &info);
    snprintf(marked, sizeof marked, "%s", folio_last_error());
}

void support_refused(const char *file, int line, const char *call, folio_status got,
                     folio_status expected, const char *words)
{
    const char *text = folio_last_error();
    if (expected == ANY_REFUSAL ? got == FOLIO_OK : got != expected) {
        test_fail(file, line, "%s: %s (\"%s\"), expected %s", call, folio_status_name(got),
                  got == FOLIO_OK ? "" : text,
                  expected == ANY_REFUSAL ? "a refusal" : folio_status_name(expected));
        return;
    }
    if (strcmp(text, marked) == 0 || strlen(text) < 10) {
        test_fail(file, line, "%s: no sentence of its own: \"%s\"", call, text);
        return;
    }
    if (got == FOLIO_ERR_ARGUMENT && strchr(text, '\n') != NULL)
        test_fail(file, line, "%s: more than a sentence: \"%s\"", call, text);
    char copy[256];
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "|"); word != NULL; word = strtok(NULL, "|"))
        if (strstr(text, word) == NULL)
            test_fail(file, line, "%s: \"%s\" lacks \"%s\"", call, text, word);
}

static void check_sizes(void *world, const support_sized *s)
{
    enum { TAIL = 24 };
    const size_t older = (s->older + 7) / 8 * 8; /* structs have whole pointers */
    _Alignas(16) unsigned char arg[1024];
    const size_t sizes[] = {0, s->size, s->size + TAIL, s->size + TAIL, older, 4097, older + 4};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        memset(arg, 0, sizeof arg);
        if (s->good) memcpy(arg, s->good, s->size);
        memcpy(arg, &sizes[i], sizeof sizes[i]);
        if (i == 3) arg[s->size + TAIL - 1] = 1; /* a field this library does not know */
        if (i == 4) memset(arg + older, 0xFF, sizeof arg - older); /* not the client's */
        support_mark_error();
        folio_status status = s->call(world, arg);
        if (i == 0 || i == 3 || i >= 5)
            support_refused(__FILE__, __LINE__, s->name, status, FOLIO_ERR_ARGUMENT, "struct_size");
        else
            CHECK_MSG(status == FOLIO_OK, "%s, struct_size %zu: %s", s->name, sizes[i],
                      folio_last_error());
        CHECK(memcmp(arg, &sizes[i], sizeof sizes[i]) == 0);
        if (i == 4)
            CHECK_MSG(support_is_poison(arg + older, sizeof arg - older),
                      "%s: written past the client's struct", s->name);
    }
}

void support_check_sizes(void *world, const support_sized *cases, int num_cases)
{
    for (int i = 0; i < num_cases; i++) check_sizes(world, &cases[i]);
}

/* -------------------------------------------------------------------------------------- numbers */

uint64_t support_bits(uint64_t seed, uint64_t index)
{
    uint64_t x = seed * 0xD1342543DE82EF95u + index * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

float support_random(uint64_t seed, uint64_t index)
{
    return (float)(support_bits(seed, index) >> 40) / 8388608.0f - 1.0f;
}

void support_fill(float *x, int64_t count, uint64_t seed, float amplitude)
{
    for (int64_t i = 0; i < count; i++) x[i] = amplitude * support_random(seed, (uint64_t)i);
}

void support_shuffle(int64_t *order, int64_t count, uint64_t seed)
{
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = (int64_t)(support_bits(seed, (uint64_t)i) % (uint64_t)(i + 1));
        int64_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

const folio_dtype support_kv_dtypes[SUPPORT_NUM_KV_DTYPES] = {
    FOLIO_F32, FOLIO_F16, FOLIO_BF16, FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
const folio_layout support_layouts[SUPPORT_NUM_LAYOUTS] = {FOLIO_LAYOUT_NATIVE,
                                                           FOLIO_LAYOUT_NHD,
                                                           FOLIO_LAYOUT_HND,
                                                           FOLIO_LAYOUT_INTERLEAVED_NHD,
                                                           FOLIO_LAYOUT_INTERLEAVED_HND,
                                                           FOLIO_LAYOUT_XPACKED,
                                                           FOLIO_LAYOUT_XPACKED_1};

support_number support_known(folio_dtype dtype, int part, int64_t row, int64_t head, int64_t d)
{
    uint64_t seed = (uint64_t)(part * 97 + 5) * 1000003u + (uint64_t)head;
    uint64_t random = support_bits(seed, (uint64_t)row * 1024u + (uint64_t)d);
    support_number n = {.scale = 1.0f};
    if (dtype == FOLIO_INT8) {
        int code = (int)(random % 255u) - 127;
        if (d == 0) code = random & 256u ? 127 : -127;
        n.bits = (uint8_t)code;
        n.scale = ldexpf(1.0f, -3 - (int)(support_bits(seed, (uint64_t)row + 7777u) % 4u));
        n.value = (float)code * n.scale;
        return n;
    }
    /* All finite codes of the 8-bit types; of the others a range without overflow in any sum. */
    if (folio_dtype_size(dtype) == 1) {
        n.bits = (uint32_t)(random & 255u);
        while (!isfinite(kit_decode(dtype, n.bits))) n.bits -= 4u;
    } else {
        n.bits = kit_encode(dtype, ((double)(random % 4001u) - 2000.0) / 128.0);
    }
    n.value = (float)kit_decode(dtype, n.bits);
    return n;
}

float *support_known_rows(folio_dtype dtype, int part, int64_t first, int64_t count, int64_t heads,
                          int64_t size)
{
    float *rows = malloc((size_t)(count * heads * size + 1) * sizeof *rows);
    if (rows == NULL) abort();
    for (int64_t t = 0, i = 0; t < count; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < size; d++)
                rows[i++] = support_known(dtype, part, first + t, h, d).value;
    return rows;
}

/* --------------------------------------------------------------------------------------- memory */

enum { GUARD = 256, GUARD_BYTE = 0xA5 };

support_buffer support_buffer_make(size_t bytes)
{
    support_buffer b = {.bytes = bytes};
    b.base = aligned_alloc(64, 2 * GUARD + (bytes + 63) / 64 * 64);
    if (b.base == NULL) abort();
    memset(b.base, GUARD_BYTE, 2 * GUARD + (bytes + 63) / 64 * 64);
    b.data = b.base + GUARD;
    support_buffer_poison(&b);
    return b;
}

void support_buffer_poison(support_buffer *buffer) { memset(buffer->data, 0xFF, buffer->bytes); }

bool support_buffer_guards_hold(const support_buffer *buffer)
{
    size_t all = 2 * GUARD + (buffer->bytes + 63) / 64 * 64;
    for (size_t i = 0; i < GUARD; i++)
        if (buffer->base[i] != GUARD_BYTE) return false;
    for (size_t i = GUARD + buffer->bytes; i < all; i++)
        if (buffer->base[i] != GUARD_BYTE) return false;
    return true;
}

bool support_is_poison(const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != 0xFF) return false;
    return true;
}

void support_buffer_free(support_buffer *buffer)
{
    if (buffer->base == NULL) return;
    CHECK_MSG(support_buffer_guards_hold(buffer), "bytes outside a buffer were written");
    free(buffer->base);
    *buffer = (support_buffer){0};
}

folio_kv_cache_view support_view(const folio_kv_cache *cache, int32_t layer)
{
    folio_kv_cache_view view = {.struct_size = sizeof view};
    CHECK_OK(folio_kv_cache_get_view(cache, layer, &view));
    return view;
}

/* Before each allocation lies how it was asked for. */
typedef struct {
    uint64_t magic;
    size_t size;
    void *base;
} allocation;

#define MAGIC 0x464F4C494F4D454Du

static void *counting_alloc(void *user, size_t size, size_t align)
{
    support_counter *c = user;
    int64_t call = ++c->calls;
    if (align == 0 || (align & (align - 1)) != 0) c->faults++;
    if (call == c->fail_at || (c->limit != 0 && size > c->limit)) return NULL;
    size_t lead = align > 64 ? align : 64;
    void *memory = NULL; /* its exact size: a sanitizer sees the first byte past it */
    if (posix_memalign(&memory, lead, lead + size) != 0) return NULL;
    unsigned char *base = memory;
    allocation head = {MAGIC, size, base};
    memcpy(base + lead - sizeof head, &head, sizeof head);
    /* Not zeros: code that counts on zeroed memory is to be seen. */
    memset(base + lead, 0xFF, size);
    c->live++;
    c->live_bytes += (int64_t)size;
    return base + lead;
}

static void counting_free(void *user, void *ptr, size_t size)
{
    support_counter *c = user;
    if (ptr == NULL) return;
    allocation head;
    memcpy(&head, (unsigned char *)ptr - sizeof head, sizeof head);
    if (head.magic != MAGIC || head.size != size) {
        c->faults++;
        return;
    }
    c->live--;
    c->live_bytes -= (int64_t)size;
    memset(ptr, 0xFF, size); /* what is used after it was freed is to be seen */
    free(head.base);
}

folio_allocator support_allocator(support_counter *counter)
{
    return (folio_allocator){counting_alloc, counting_free, counter};
}

static folio_status set_table(folio_batch *batch, const folio_step *step, folio_table table)
{
    if (step == NULL) return folio_batch_set(batch, NULL);
    folio_step s = *step;
    s.table = table;
    return folio_batch_set(batch, &s);
}

folio_status support_set_rows(folio_batch *batch, const folio_step *step, const int32_t *tables,
                              int64_t row_stride)
{
    return set_table(batch, step,
                     (folio_table){.kind = tables ? FOLIO_TABLE_ROWS : FOLIO_TABLE_NONE,
                                   .indices = tables,
                                   .row_stride = row_stride});
}

folio_status support_set_csr(folio_batch *batch, const folio_step *step, const int32_t *start,
                             const int32_t *indices, const int32_t *last_block_len)
{
    return set_table(batch, step,
                     (folio_table){.kind = FOLIO_TABLE_CSR,
                                   .indices = indices,
                                   .start = start,
                                   .last_block_len = last_block_len});
}

folio_status support_set_slots(folio_batch *batch, const folio_step *step, const int32_t *start,
                               const void *slots, int32_t index_bytes)
{
    return set_table(batch, step,
                     (folio_table){.kind = FOLIO_TABLE_SLOTS,
                                   .index_bytes = index_bytes,
                                   .indices = slots,
                                   .start = start});
}
