/* fuzz.c: see fuzz.h; the entry that libFuzzer calls, and what the tests' support asks of a test program. */
#include "fuzz/fuzz.h"

#include <stdarg.h>
#include <stdlib.h>

enum { MAX_CONTEXTS = 16 };
static const int64_t MOST_BYTES = (int64_t)64 << 20; /* of one allocation */

support_counter fuzz_memory;
static folio_context *contexts[MAX_CONTEXTS];
static char names[MAX_CONTEXTS][48];
static int64_t num_contexts;
static int64_t num_inputs, num_without_refusal, num_calls, num_accepted;
static bool refused;

/* ------------------------------------------------------------------------------------------ finds */

void fuzz_find(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: find of fuzz_%s: ", file, line, fuzz_name);
    vfprintf(stderr, format, args);
    fprintf(stderr, " [last error: %s]\n", folio_last_error());
    va_end(args);
    abort();
}

/* What tests/support.c and the rigs call. */
void test_fail(const char *file, int line, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fuzz_find(file, line, "%s", text);
}
int test_failures(void) { return 0; }

static void print_counts(void)
{
    if (num_calls == 0 || getenv("FOLIO_FUZZ_COUNTS") == NULL) return;
    fprintf(
        stderr,
        "fuzz_%s: %lld inputs, %.0f %% of them without a refused call; %lld calls, %.0f %% accepted\n",
        fuzz_name, (long long)num_inputs, 100.0 * (double)num_without_refusal / (double)num_inputs,
        (long long)num_calls, 100.0 * (double)num_accepted / (double)num_calls);
}

bool fuzz_took(folio_status status)
{
    num_calls++;
    num_accepted += status == FOLIO_OK;
    if (status == FOLIO_OK) return true;
    refused = true;
    if (getenv("FOLIO_FUZZ_ERRORS") != NULL) fprintf(stderr, "refused: %s\n", folio_last_error());
    FUZZ_CHECK(status != FOLIO_ERR_INTERNAL, "an invariant is broken");
    FUZZ_CHECK(strcmp(folio_status_name(status), "FOLIO_UNKNOWN") != 0, "status %d", status);
    FUZZ_CHECK(strlen(folio_last_error()) > 8, "refused without a sentence");
    return false;
}

/* ----------------------------------------------------------------------------------------- numbers */

static uint64_t bits(fuzz_input *in, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes && in->left > 0; i++, in->left--) x |= (uint64_t)*in->at++ << 8 * i;
    return x;
}

int64_t fuzz_int(fuzz_input *in, int64_t low, int64_t high)
{
    uint64_t span = (uint64_t)high - (uint64_t)low;
    if (span == 0) return low;
    uint64_t x = bits(in, span < 1 << 8              ? 1
                          : span < 1 << 16           ? 2
                          : span < (uint64_t)1 << 32 ? 4
                                                     : 8);
    return (int64_t)((uint64_t)low + (span == UINT64_MAX ? x : x % (span + 1)));
}

bool fuzz_chance(fuzz_input *in, int64_t one_in)
{
    return fuzz_int(in, 0, one_in - 1) == one_in - 1;
}

bool fuzz_is_valid(const fuzz_input *in) { return in->until_wrong < 0; }

static int64_t wrong(fuzz_input *in, int64_t low, int64_t high)
{
    switch (fuzz_int(in, 0, 7)) {
    case 0:
    case 1: return high < INT64_MAX ? high + 1 : high;
    case 2: return low > INT64_MIN ? low - 1 : low;
    case 3: return fuzz_int(in, 0, 1) - 1;
    case 4: return INT64_MAX - fuzz_int(in, 0, 3);
    case 5: return INT64_MIN + fuzz_int(in, 0, 3);
    case 6: return (int64_t)((uint64_t)1 << fuzz_int(in, 0, 63));
    default: return fuzz_int(in, INT64_MIN, INT64_MAX);
    }
}

/* Is this place the wrong one? One in an input is enough. */
static bool is_wrong(fuzz_input *in)
{
    if (in->until_wrong < 0 || in->until_wrong-- > 0) return false;
    in->until_wrong = INT64_MAX;
    return true;
}

int64_t fuzz_any(fuzz_input *in, int64_t low, int64_t high)
{
    int64_t x = fuzz_int(in, low, high);
    return is_wrong(in) ? wrong(in, low, high) : x;
}

void fuzz_spoil32(fuzz_input *in, int32_t *numbers, int64_t n, int64_t low, int64_t high)
{
    if (n <= 0 || !is_wrong(in)) return;
    int64_t at = fuzz_int(in, 0, n - 1);
    numbers[at] = (int32_t)wrong(in, low, high);
}

void fuzz_spoil64(fuzz_input *in, int64_t *numbers, int64_t n, int64_t low, int64_t high)
{
    if (n <= 0 || !is_wrong(in)) return;
    int64_t at = fuzz_int(in, 0, n - 1);
    numbers[at] = wrong(in, low, high);
}

/* ------------------------------------------------------------------------------------------ memory */

static void *more(fuzz_input *in, int64_t count, size_t size, int fill)
{
    void *p = NULL;
    size_t bytes = (size_t)count * size;
    if (count < 0 || in->num_memory == FUZZ_MAX_MEMORY || posix_memalign(&p, 64, bytes) != 0) {
        fprintf(stderr, "fuzz_%s asks for %lld times %zu bytes\n", fuzz_name, (long long)count,
                size);
        abort();
    }
    memset(p, fill, bytes);
    in->memory[in->num_memory++] = p;
    return p;
}

void *fuzz_zeros(fuzz_input *in, int64_t count, size_t size) { return more(in, count, size, 0); }
void *fuzz_poison(fuzz_input *in, int64_t count, size_t size)
{
    return more(in, count, size, 0xFF);
}

void *fuzz_numbers(fuzz_input *in, folio_dtype dtype, int64_t count)
{
    uint32_t x = 1 + (uint32_t)fuzz_int(in, 0, 255);
    static float table[256]; /* exact in 16 bits too */
    static uint16_t table16[2][256];
    void *numbers = fuzz_poison(in, count, folio_dtype_size(dtype));
    for (int i = 255; table[0] == 0 && i >= 0; i--) {
        table[i] = (float)i / 128.0f - 1.0f;
        table16[0][i] = (uint16_t)kit_encode(FOLIO_F16, (double)table[i]);
        table16[1][i] = (uint16_t)kit_encode(FOLIO_BF16, (double)table[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        x = x * 1664525u + 1013904223u;
        if (dtype == FOLIO_F32) ((float *)numbers)[i] = table[x >> 24];
        else ((uint16_t *)numbers)[i] = table16[dtype == FOLIO_BF16][x >> 24];
    }
    return numbers;
}

void fuzz_shuffle(fuzz_input *in, int32_t *order, int64_t n)
{
    uint32_t x = (uint32_t)fuzz_int(in, 0, 255);
    for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
    for (int64_t i = n - 1; i > 0 && x != 0; i--) {
        x = x * 1664525u + 1013904223u;
        int64_t j = (int64_t)(x >> 8) % (i + 1);
        int32_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

/* ---------------------------------------------------------------------------------------- contexts */

static void open_context(const char *backend, const char *level)
{
    folio_allocator a = support_allocator(&fuzz_memory);
    folio_context_desc desc = FOLIO_WITH(folio_context_desc, .backend = backend, .level = level,
                                         .num_threads = 1, .allocator = a);
    folio_context_info info = FOLIO_INIT(folio_context_info);
    folio_context *ctx = NULL;
    if (folio_context_create(&desc, &ctx) != FOLIO_OK ||
        folio_context_get_info(ctx, &info) != FOLIO_OK) {
        fprintf(stderr, "no context: %s\n", folio_last_error());
        abort();
    }
    if (level != NULL && strcmp(info.level, level) != 0) { /* not on this machine */
        folio_context_destroy(ctx);
        return;
    }
    snprintf(names[num_contexts], sizeof names[0], "%s%s%s", backend, level ? "/" : "",
             level ? level : "");
    contexts[num_contexts++] = ctx;
}

static void open_contexts(void)
{
    folio_backend_info info = FOLIO_INIT(folio_backend_info);
    fuzz_memory.limit = (size_t)MOST_BYTES;
    open_context("reference", NULL);
    if (folio_backend_get_info("cpu", &info) != FOLIO_OK) abort();
    for (int32_t i = 0; i < info.num_levels; i++) open_context("cpu", info.levels[i]);
    atexit(print_counts);
}

folio_context *fuzz_context(int64_t kind) { return contexts[kind]; }
int64_t fuzz_num_contexts(void) { return num_contexts; }
const char *fuzz_context_name(int64_t kind) { return names[kind]; }

/* ------------------------------------------------------------------------------------------ inputs */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (num_contexts == 0) open_contexts();
    fuzz_input in = {.at = data, .left = size, .until_wrong = -1};
    int64_t first = fuzz_int(&in, 0, 255), live = fuzz_memory.live;
    if (first >= 192) in.until_wrong = first - 192;
    refused = false;
    fuzz_run(&in);
    fuzz_memory.fail_at = 0;
    for (int i = 0; i < in.num_memory; i++) free(in.memory[i]);
    FUZZ_CHECK(fuzz_memory.live == live, "%lld allocations are left",
               (long long)(fuzz_memory.live - live));
    FUZZ_CHECK(fuzz_memory.faults == 0, "memory was freed with another size or pointer");
    num_inputs++;
    num_without_refusal += !refused;
    return 0;
}

/* A huge size is the contexts' allocator's to refuse; the library asks nobody else for one. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1:detect_stack_use_after_return=0";
}
