/*
 * test_write.c: k and v into the cache at every instruction-set level. Judge is folioi_kv_write_rows, number by
 * number: after the same write into the same memory, every byte of K, V, scales and what lies between must agree.
 * And that the cpu backend shares the rows out among its threads without losing or repeating one.
 */
#include "backends/cpu/cpu_kernels.h"
#include "core/dtype.h"
#include "support.h"

#include <stdlib.h>

enum { HEADS = 2, MAX_ROWS = 50, MAX_SLOTS = 160 };

static const folio_dtype sources[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};

/* ------------------------------------------------------------------------------------------ numbers */

static const float odd_numbers[] = {0.0f,      -0.0f,    1e-45f,  -1e-40f,  3e-8f,    6e-8f,
                                    1e-5f,     448.0f,   -464.0f, 57344.f,  -61440.f, 65504.0f,
                                    65519.99f, 65520.0f, 3e38f,   INFINITY, NAN,      0.0625f,
                                    0.0009f,   -1.0625f, 240.0f,  127.5f};

/* Number d of a row, in one of the ways rows are made. */
static uint32_t number(folio_dtype dtype, uint64_t seed, int64_t row, int64_t d, int64_t dims)
{
    uint64_t r = support_bits(seed, (uint64_t)(row * 1024 + d));
    double x = (double)(int64_t)r * 0x1p-63;
    switch (row % 10) {
    case 0: return (uint32_t)r >> (dtype == FOLIO_F32 ? 0 : 16); /* any bits */
    case 1: x = (double)odd_numbers[r % (uint64_t)COUNT_OF(odd_numbers)]; break;
    case 2: x = 0; break;
    case 3: x *= 1e-38; break;                               /* nothing but subnormals in f32 */
    case 4: x = d == dims - 1 ? (double)NAN : x; break;      /* NaN in the last place */
    case 5: x = d == dims / 2 ? (double)INFINITY : x; break; /* infinity in the middle */
    case 6: x = d == 0 ? 127 : (double)((int64_t)(r % 508) - 254) / 2; break; /* ties in int8 */
    case 7: x = (double)((int64_t)(r % 512) - 256) / 4096; break;             /* and in fp8 */
    case 8: x *= 70000; break;
    default: break;
    }
    return kit_encode(dtype, x);
}

typedef struct {
    folio_tensor t;
    char *memory;
} rows;

/* Rows with heads that do not touch each other, at the least alignment there is. */
static rows make_rows(folio_dtype dtype, int64_t count, int32_t dims, uint64_t seed)
{
    rows r = {.t = {.dtype = dtype, .tokens = count, .head_stride = dims + 1}};
    r.t.token_stride = HEADS * r.t.head_stride + 3;
    size_t elem = folio_dtype_size(dtype);
    r.memory = malloc((size_t)(count * r.t.token_stride + 1) * elem);
    if (r.memory == NULL) abort();
    memset(r.memory, 0xFF, (size_t)(count * r.t.token_stride + 1) * elem);
    r.t.data = r.memory + elem;
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t d = 0; d < dims; d++)
                kit_set(dtype, r.t.data, i * r.t.token_stride + h * r.t.head_stride + d,
                        number(dtype, seed + (uint64_t)h, i + h, d, dims));
    return r;
}

/* -------------------------------------------------------------------------------------------- caches */

/* A layer in memory of its own, with gaps between rows where the layout is strided. */
typedef struct {
    folioi_kv_format format;
    folioi_kv_layer layer;
    support_buffer memory;
} cache;

static bool cache_make(cache *c, const folio_kv_cache_desc *desc)
{
    folioi_kv_format *f = &c->format;
    if (folioi_kv_format_init(desc, false, f) != FOLIO_OK) return false;
    const folio_kv_cache_desc *d = &f->desc;
    int64_t bytes = f->layer_bytes;
    if (d->layout == FOLIO_LAYOUT_STRIDED) { /* K | V of a head, a gap, the next head */
        int64_t head = d->k_head_size + d->v_head_size + 5, token = d->num_kv_heads * head + 7;
        folio_kv_strides s = {d->block_size * token + 1, token, head};
        folioi_array_restride(&f->k, &f->k_at, &s, true);
        folioi_array_restride(&f->v, &f->v_at, &s, true);
        int64_t elem = (int64_t)folio_dtype_size(d->dtype), end = d->num_blocks * s.block * elem;
        f->v.offset_bytes = d->k_head_size * elem;
        f->k_scales.offset_bytes = (end + 63) / 64 * 64;
        f->v_scales.offset_bytes = f->k_scales.offset_bytes + f->k_scales.bytes;
        bytes = f->v_scales.offset_bytes + f->v_scales.bytes;
    }
    c->memory = support_buffer_make((size_t)bytes);
    char *base = c->memory.data;
    bool scales = d->dtype == FOLIO_INT8;
    c->layer = (folioi_kv_layer){base, base + f->v.offset_bytes,
                                 scales ? (void *)(base + f->k_scales.offset_bytes) : NULL,
                                 scales ? (void *)(base + f->v_scales.offset_bytes) : NULL, f};
    return true;
}

static void cache_fill(cache *c)
{
    unsigned char *p = c->memory.data;
    for (size_t i = 0; i < c->memory.bytes; i++) p[i] = (unsigned char)(i * 37 + i / 256);
}

/* --------------------------------------------------------------------------------------------- slots */

enum pattern { RUN, SHUFFLED, HOLES, BROKEN, NUM_PATTERNS };

/* Different slots below `limit`; as many as were made. */
static int64_t make_slots(int64_t *slots, enum pattern pattern, int64_t limit, uint64_t seed)
{
    int64_t order[MAX_SLOTS], n = limit < MAX_ROWS ? limit : MAX_ROWS;
    int64_t first = limit == n ? 0 : (int64_t)(support_bits(seed, 1) % (uint64_t)(limit - n));
    support_shuffle(order, limit, seed);
    for (int64_t i = 0; i < n; i++) {
        slots[i] = pattern == SHUFFLED ? order[i] : first + i;
        if (pattern == HOLES && support_bits(seed, (uint64_t)i + 2) % 9 == 0) slots[i] = -1;
    }
    if (pattern == BROKEN && n > 40) { /* runs that change places, and one backwards */
        for (int64_t i = 0; i < 20; i++) slots[i] = first + 20 + i, slots[20 + i] = first + i;
        int64_t last = slots[n - 1];
        slots[n - 1] = slots[n - 3], slots[n - 3] = last;
    }
    return n;
}

/* --------------------------------------------------------------------------------------------- tests */

static int64_t num_cases;

static void compare(cache *expected, cache *got, const char *level, const folioi_kv_tensors *t)
{
    const folio_kv_cache_desc *d = &expected->format.desc;
    const unsigned char *e = expected->memory.data, *g = got->memory.data;
    if (memcmp(e, g, expected->memory.bytes) != 0) {
        size_t i = 0;
        while (e[i] == g[i]) i++;
        test_fail(__FILE__, __LINE__,
                  "%s, %s to %s, %s, blocks of %d, heads of %d and %d: byte %zu is %02x, not %02x",
                  level, folio_dtype_name(t->k.dtype), folio_dtype_name(d->dtype),
                  folio_layout_name(d->layout), d->block_size, d->k_head_size, d->v_head_size, i,
                  g[i], e[i]);
    }
    CHECK(support_buffer_guards_hold(&got->memory));
    num_cases++;
}

/* The same write at every level above the first; the judge's memory is left in `expected`. */
static void write_at_every_level(cache *expected, cache *got, const folioi_kv_tensors *t,
                                 const int64_t *slots, const folioi_kv_share *share)
{
    cache_fill(expected);
    folioi_kv_write_rows(&expected->layer, t, slots, share);
    for (int i = 1; folioi_cpu_level_names[i] != NULL; i++) {
        const folioi_cpu_kernels *table = folioi_cpu_table(folioi_cpu_level_names[i]);
        if (strcmp(table->level, folioi_cpu_level_names[i]) != 0) continue; /* not here */
        if (table->write == folioi_cpu_table(folioi_cpu_level_names[i - 1])->write) continue;
        cache_fill(got);
        table->write(&got->layer, t, slots, share);
        compare(expected, got, table->level, t);
    }
}

/* One cache shape with every pattern of slots, and with a share of rows and heads. */
static void check_shape(const folio_kv_cache_desc *desc, const rows *k, const rows *v)
{
    static const float scales[] = {1.0f, 0.37f, 1e-4f, 3e4f};
    cache expected, got;
    if (!cache_make(&expected, desc)) return; /* no such layout for these sizes */
    REQUIRE_TEST(cache_make(&got, desc));
    /* the native layout has most ways to go */
    bool native = desc->layout == FOLIO_LAYOUT_NATIVE;
    int one = (desc->block_size + (int)desc->layout + desc->k_head_size / 8) % NUM_PATTERNS;
    for (int p = native ? 0 : one; p < (native ? NUM_PATTERNS : one + 1); p++) {
        int64_t slots[MAX_ROWS];
        int64_t seed = desc->block_size + desc->k_head_size;
        int64_t n = make_slots(slots, (enum pattern)p, desc->num_blocks * desc->block_size,
                               (uint64_t)seed + (uint64_t)p);
        bool fp8 = dtype_is_fp8(desc->dtype);
        folioi_kv_tensors t = {.k = k->t,
                               .v = v->t,
                               .k_scale = fp8 ? scales[(p + seed / 8) % 4] : 1.0f,
                               .v_scale = fp8 ? scales[p] : 1.0f};
        if (fp8 && p != SHUFFLED) t.k_head_scales = scales + 1, t.v_head_scales = scales + 2;
        folioi_kv_share share = {0, n, 0, HEADS};
        if (p == BROKEN) share = (folioi_kv_share){n / 7, n - n / 5, 1, HEADS};
        write_at_every_level(&expected, &got, &t, slots, &share);
    }
    support_buffer_free(&expected.memory);
    support_buffer_free(&got.memory);
}

static void check_layouts(folio_dtype dtype, const rows *k, const rows *v, int32_t k_dims,
                          int32_t v_dims)
{
    static const int32_t block_sizes[] = {1, 8, 16, 48, 64};
    for (int layout = 0; layout < FOLIO_NUM_LAYOUTS; layout++)
        for (int b = 0; b < COUNT_OF(block_sizes); b++) {
            folio_kv_cache_desc desc = FOLIO_WITH(
                folio_kv_cache_desc, .num_layers = 1, .num_blocks = 96 / block_sizes[b] + 1,
                .block_size = block_sizes[b], .num_kv_heads = HEADS, .k_head_size = k_dims,
                .v_head_size = v_dims, .dtype = dtype, .layout = (folio_layout)layout);
            check_shape(&desc, k, v);
        }
}

static void check_types(int32_t k_dims, int32_t v_dims)
{
    for (int s = 0; s < COUNT_OF(sources); s++) {
        rows k = make_rows(sources[s], MAX_ROWS, k_dims, 1),
             v = make_rows(sources[s], MAX_ROWS, v_dims, 9);
        for (int i = 0; i < SUPPORT_NUM_KV_DTYPES; i++)
            check_layouts(support_kv_dtypes[i], &k, &v, k_dims, v_dims);
        free(k.memory);
        free(v.memory);
    }
}

TEST(write, every_level_has_the_plain_bits)
{
    static const int32_t sizes[] = {8, 24, 64, 80, 128, 192, 256};
    num_cases = 0;
    for (int i = 0; i < COUNT_OF(sizes); i++) check_types(sizes[i], sizes[i]);
    check_types(192, 128);
    check_types(72, 520);
    CHECK(num_cases > 10000 || strcmp(folioi_cpu_table(NULL)->level, "scalar") == 0);
}

/* Numbers of one type, all of them in rows of 256, to every cache type. */
static void check_numbers(folio_dtype from, const void *numbers, int64_t count)
{
    enum { SIZE = 256 };
    int64_t n = count / SIZE, *slots = malloc((size_t)n * sizeof *slots);
    if (slots == NULL) abort();
    for (int64_t i = 0; i < n; i++) slots[i] = i;
    for (int i = 0; i < SUPPORT_NUM_KV_DTYPES; i++) {
        folio_kv_cache_desc desc = FOLIO_WITH(
            folio_kv_cache_desc, .num_layers = 1, .num_blocks = (n + 15) / 16, .block_size = 16,
            .num_kv_heads = 1, .k_head_size = SIZE, .dtype = support_kv_dtypes[i]);
        folio_tensor t = {.data = (void *)(uintptr_t)numbers, .dtype = from, .tokens = n};
        t.token_stride = t.head_stride = SIZE;
        folioi_kv_tensors both = {
            .k = t, .v = t, .k_scale = 1.0f, .v_scale = dtype_is_fp8(desc.dtype) ? 0.75f : 1.0f};
        folioi_kv_share all = {0, n, 0, 1};
        cache expected, got;
        REQUIRE_TEST(cache_make(&expected, &desc) && cache_make(&got, &desc));
        write_at_every_level(&expected, &got, &both, slots, &all);
        support_buffer_free(&expected.memory);
        support_buffer_free(&got.memory);
    }
    free(slots);
}

TEST(write, every_number_of_16_bits)
{
    static uint16_t numbers[65536];
    for (int i = 0; i < 65536; i++) numbers[i] = (uint16_t)i;
    check_numbers(FOLIO_F16, numbers, 65536);
    check_numbers(FOLIO_BF16, numbers, 65536);
}

/* Every sign, exponent and first bits of an f32, with ends that make ties and what is next to them. */
TEST(write, f32_at_and_beside_every_tie)
{
    static const uint32_t ends[] = {0,      1,      0x0fff, 0x1000, 0x1001,
                                    0x3000, 0x7fff, 0x8000, 0x8001, 0xffff};
    static uint32_t numbers[65536];
    for (int e = 0; e < COUNT_OF(ends); e++) {
        for (uint32_t i = 0; i < 65536; i++) numbers[i] = i << 16 | ends[e];
        check_numbers(FOLIO_F32, numbers, 65536);
    }
}

/* Rows of any table, some of whose numbers are large; which NaN comes of a NaN is left open. */
static void check_rotated(const folio_kv_cache_desc *desc, folio_dtype from, folioi_rotation r)
{
    enum { ROWS = 50 };
    static float table[64 * 1024];
    if (table[0] == 0) support_fill(table, COUNT_OF(table), 8, 1.0f);
    r.table = table, r.num_positions = COUNT_OF(table) / r.num_dims;
    rows k = make_rows(from, ROWS, desc->k_head_size, 5);
    int64_t slots[ROWS], positions[ROWS], n = ROWS * k.t.token_stride;
    for (int64_t i = 0; i < n; i++)
        kit_store(from, k.t.data, i, (double)support_random(3, (uint64_t)i) * (i % 7 ? 1 : 900));
    for (int i = 0; i < ROWS; i++) {
        slots[i] = i < 36 ? 12 + i : i == 36 ? -1 : 2 * i;
        positions[i] = i == 36 ? -1 : i * 11 % r.num_positions;
    }
    folioi_kv_tensors t = {.k = k.t, .v = k.t, .k_scale = 1.0f, .v_scale = 1.0f, .rotation = r};
    t.positions = positions;
    if (dtype_is_fp8(desc->dtype)) t.k_scale = 0.37f;
    cache expected, got;
    REQUIRE_TEST(cache_make(&expected, desc) && cache_make(&got, desc));
    write_at_every_level(&expected, &got, &t, slots, &(folioi_kv_share){0, ROWS, 0, HEADS});
    write_at_every_level(&expected, &got, &t, slots, &(folioi_kv_share){5, 45, 1, HEADS});
    support_buffer_free(&expected.memory);
    support_buffer_free(&got.memory);
    free(k.memory);
}

TEST(write, rotated_rows_at_every_level)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD,
                                           FOLIO_LAYOUT_XPACKED_1};
    static const int32_t sizes[][3] = {{8, 0, 8},      {40, 3, 34},   {128, 0, 128},
                                       {192, 128, 64}, {520, 8, 512}, {640, 0, 300}};
    for (int i = 0; i < 3 * SUPPORT_NUM_KV_DTYPES * COUNT_OF(sizes); i++) {
        const int32_t *s = sizes[i % COUNT_OF(sizes)];
        folio_kv_cache_desc desc =
            FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 8, .block_size = 16,
                       .num_kv_heads = HEADS, .k_head_size = s[0],
                       .dtype = support_kv_dtypes[i / COUNT_OF(sizes) % SUPPORT_NUM_KV_DTYPES]);
        for (int l = 0; l < COUNT_OF(layouts); l++) {
            desc.layout = layouts[l];
            check_rotated(&desc, dtypes[i / (COUNT_OF(sizes) * SUPPORT_NUM_KV_DTYPES)],
                          (folioi_rotation){.first_dim = s[1], .num_dims = s[2], .pairs = l % 2});
        }
    }
}

/* Marks the bytes of one token's head. */
static void mark_row(const folioi_kv_side *side, const char *base, unsigned char *marks,
                     int64_t block, int64_t head, int64_t token)
{
    int64_t elem = (int64_t)folio_dtype_size(side->dtype);
    for (int64_t d = 0; d < side->dims; d++) {
        int64_t at = address_token(side->at, block, head, token) + address_dim(side->at, token, d);
        memset(marks + (side->base - base) + at * elem, 1, (size_t)elem);
    }
    if (side->scales == NULL) return;
    const float *scale = side->scales + address_token(side->scales_at, block, head, token);
    memset(marks + ((const char *)scale - base), 1, sizeof *scale);
}

static void check_nothing_else(const folio_kv_cache_desc *desc)
{
    cache c;
    REQUIRE_TEST(cache_make(&c, desc));
    rows r = make_rows(FOLIO_F32, 20, desc->k_head_size, 4);
    int64_t slots[20];
    for (int i = 0; i < 20; i++) slots[i] = i < 17 ? 15 + i : i == 17 ? -1 : 2 * i;
    folioi_kv_tensors t = {.k = r.t, .v = r.t, .k_scale = 1.0f, .v_scale = 1.0f};
    folioi_kv_share share = {1, 19, 1, 2};
    unsigned char *marks = calloc(1, c.memory.bytes), *before = malloc(c.memory.bytes);
    if (marks == NULL || before == NULL) abort();
    for (int64_t i = share.begin; i < share.end; i++)
        for (int part = FOLIOI_K; slots[i] >= 0 && part <= FOLIOI_V; part++) {
            folioi_kv_side side = kv_side(&c.layer, (folioi_k_or_v)part);
            mark_row(&side, c.memory.data, marks, slots[i] / desc->block_size, 1,
                     slots[i] % desc->block_size);
        }
    for (int i = 0; folioi_cpu_level_names[i] != NULL; i++) {
        cache_fill(&c);
        memcpy(before, c.memory.data, c.memory.bytes);
        folioi_cpu_table(folioi_cpu_level_names[i])->write(&c.layer, &t, slots, &share);
        const unsigned char *now = c.memory.data;
        int64_t wrong = 0;
        for (size_t b = 0; b < c.memory.bytes; b++) wrong += !marks[b] && now[b] != before[b];
        CHECK_INT(wrong, 0);
        CHECK(support_buffer_guards_hold(&c.memory));
    }
    free(marks);
    free(before);
    free(r.memory);
    support_buffer_free(&c.memory);
}

TEST(write, no_byte_but_those_of_the_slots)
{
    for (int layout = 0; layout < FOLIO_NUM_LAYOUTS; layout++)
        for (int i = 0; i < SUPPORT_NUM_KV_DTYPES; i++)
            check_nothing_else(
                &FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 4, .block_size = 16,
                            .num_kv_heads = HEADS, .k_head_size = 48, .v_head_size = 48,
                            .dtype = support_kv_dtypes[i], .layout = (folio_layout)layout));
}

/* ------------------------------------------------------------------------------------------- threads */

typedef struct {
    int64_t calls, count;
} executor_log;

/* The last task first; the log has the largest count. */
static void run_backwards(void *user, int64_t count, folio_task_fn fn, void *task)
{
    executor_log *log = user;
    log->calls++;
    log->count = count > log->count ? count : log->count;
    for (int64_t i = count; i-- > 0;) fn(task, i);
}

static folio_kv_cache *written_cache(folio_context *ctx, int32_t heads, const int64_t *slots,
                                     int64_t n, const float *numbers)
{
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 16, .block_size = 16,
                   .num_kv_heads = heads, .k_head_size = 64, .dtype = FOLIO_BF16);
    folio_kv_cache *c = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &desc, &c));
    if (c == NULL) return NULL;
    kit_poison_cache(c);
    folio_tensor t = {.data = (void *)(uintptr_t)numbers, .dtype = FOLIO_F32, .tokens = n};
    folio_kv_write w = {.struct_size = sizeof w, .k = t, .v = t, .slots = slots};
    CHECK_OK(folio_kv_cache_write(c, 0, &w, NULL));
    return c;
}

/* Caches of all backends and thread counts are the same after a write of n rows from slot `first` on. */
static void check_threads(int32_t heads, int64_t first, int64_t n, const float *numbers)
{
    int64_t slots[200];
    for (int64_t i = 0; i < n; i++) slots[i] = i % 50 == 49 ? -1 : first + i;
    folio_context *judge = support_context("reference", 1, NULL);
    folio_kv_cache *expected = written_cache(judge, heads, slots, n, numbers);
    for (int32_t threads = 1; threads <= 16; threads += 5) {
        executor_log log = {0, 0};
        folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu"};
        if (threads % 2 == 0) desc.executor = (folio_executor){run_backwards, &log, threads};
        else desc.num_threads = threads;
        folio_context *ctx = NULL;
        CHECK_OK(folio_context_create(&desc, &ctx));
        folio_kv_cache *got = written_cache(ctx, heads, slots, n, numbers);
        REQUIRE_TEST(expected != NULL && got != NULL);
        folio_kv_cache_view e = support_view(expected, 0), g = support_view(got, 0);
        size_t bytes = (size_t)(e.k_array.dims[0] * e.k_array.strides[0]) * 2;
        CHECK_MSG(memcmp(e.k, g.k, bytes) == 0, "%d heads, %d threads, slots %d and %d more", heads,
                  threads, (int)first, (int)n);
        CHECK(log.count <= threads);
        folio_kv_cache_destroy(got);
        folio_context_destroy(ctx);
    }
    folio_kv_cache_destroy(expected);
    folio_context_destroy(judge);
}

TEST(write, threads_store_each_row_once)
{
    static const int64_t lengths[] = {0, 1, 15, 16, 17, 31, 33, 64, 200};
    static float numbers[200 * 9 * 64];
    support_fill(numbers, COUNT_OF(numbers), 3, 2.0f);
    for (int i = 0; i < COUNT_OF(lengths); i++)
        for (int64_t first = 0; first < 20; first += 5)
            for (int32_t heads = 1; heads <= 9; heads += 4)
                check_threads(heads, first, lengths[i], numbers);
}

/* Sixteen rows of one sub-tile go to two threads by their heads; a single token is not worth waking one. */
TEST(write, short_prompts_are_shared_and_tokens_are_not)
{
    static float numbers[16 * 8 * 64];
    executor_log log = {0, 0};
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu"};
    desc.executor = (folio_executor){run_backwards, &log, 2};
    folio_context *ctx = NULL;
    int64_t slots[16];
    for (int i = 0; i < 16; i++) slots[i] = i;
    CHECK_OK(folio_context_create(&desc, &ctx));
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_destroy(written_cache(ctx, 8, slots, 1, numbers));
    CHECK_INT(log.calls, 0);
    folio_kv_cache_destroy(written_cache(ctx, 8, slots, 16, numbers));
    CHECK_INT(log.calls, 1);
    CHECK_INT(log.count, 2);
    folio_context_destroy(ctx);
}
