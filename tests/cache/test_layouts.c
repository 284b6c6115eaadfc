/*
 * test_layouts.c: where K and V lie changes no bit, on any level: every layout, block size and source of the keys
 * against the native layout in blocks of 16. One call holds decodes of lengths far and wide, and chunks. With a
 * window, the blocks before it are missing from the tables; to read where they would lie ends the program, and so
 * does reading past the last table.
 */
#include "attention/numerics_rig.h"
#include "attention/raw_rig.h"

#include <stdlib.h>
#include <sys/mman.h>

static const int32_t head_sizes[] = {8, 24, 40, 64, 80, 128, 256};
static const int32_t block_sizes[] = {8, 16, 48, 128};
enum { KV_HEADS = 2, STEP = 13, LONGEST = 300 };

/* What the tests of one set of keys share. */
typedef struct {
    folio_context *ctx;
    raw_keys keys;
    raw_call call; /* decodes and chunks, all sources */
    int8_t *q;
} scene;

static int8_t *random_queries(const raw_call *call)
{
    int64_t count = raw_rows(call) * call->desc.num_heads * call->desc.k_head_size;
    int8_t *q = malloc((size_t)count);
    if (q == NULL) abort();
    for (int64_t i = 0; i < count; i++) q[i] = (int8_t)support_bits(78, (uint64_t)i);
    return q;
}

static scene open_scene(folio_context *ctx, folio_dtype kv, folio_dtype dtype, int32_t size,
                        int32_t v_size, int32_t group)
{
    scene s = {.ctx = ctx, .keys = raw_keys_make(kv, KV_HEADS, size, v_size)};
    raw_keys_random(&s.keys, (uint64_t)size);
    s.call.desc = (folio_attention_desc){.struct_size = sizeof s.call.desc,
                                         .num_heads = KV_HEADS * group,
                                         .num_kv_heads = KV_HEADS,
                                         .k_head_size = size,
                                         .v_head_size = v_size,
                                         .dtype = dtype,
                                         .kv_dtype = kv};
    int64_t n = 0;
    for (int64_t len = 1; len <= LONGEST; len += STEP) s.call.seqs[n++] = (raw_seq){1, len, 0};
    for (int64_t few = 2; few <= 4; few++) s.call.seqs[n++] = (raw_seq){few, 254 + few, 0};
    s.call.seqs[n++] = (raw_seq){33, 161, 0};
    s.call.seqs[n++] = (raw_seq){20, 20, 0};
    s.call.num_seqs = n;
    s.q = random_queries(&s.call);
    s.call.q = s.q;
    return s;
}

static void close_scene(scene *s)
{
    raw_keys_free(&s->keys);
    free(s->q);
}

/* A window of 77 begins inside tiles and blocks. */
static raw_call windowed(const raw_call *call, bool window)
{
    raw_call c = *call;
    c.desc.windowed = c.release = window;
    c.desc.window_left = 76;
    return c;
}

static bool run_native(const scene *s, bool window, raw_result *result)
{
    raw_cache cache;
    raw_call call = windowed(&s->call, window);
    bool ok = raw_cache_make(s->ctx, &s->keys, FOLIO_LAYOUT_NATIVE, 16, &cache) &&
              raw_run(s->ctx, &call, &cache, result);
    raw_cache_free(&cache);
    return ok;
}

static void check_cache(const scene *s, const raw_call *call, const raw_cache *cache,
                        const raw_result *expected)
{
    const folio_kv_cache_desc *d = &cache->desc;
    raw_result r;
    if (raw_run(s->ctx, call, cache, &r))
        for (int64_t i = 0, row = 0; i < call->num_seqs; row += call->seqs[i++].query_len)
            CHECK_MSG(
                raw_rows_equal(&r, expected, row, call->seqs[i].query_len),
                "%s under q %s, sizes %d and %d, groups of %d, %s in blocks of %d%s%s%s: rows of "
                "%d of %d differ",
                folio_dtype_name(d->dtype), folio_dtype_name(call->desc.dtype), (int)d->k_head_size,
                (int)d->v_head_size, (int)call->desc.num_heads / KV_HEADS,
                folio_layout_name(d->layout), (int)d->block_size,
                cache->memory != NULL ? ", wrapped" : "", call->desc.windowed ? ", window" : "",
                call->t.flags & FOLIO_KV_APPEND ? ", appended" : "", (int)call->seqs[i].query_len,
                (int)call->seqs[i].seq_len);
    raw_result_free(&r);
}

static void check_same(const scene *s, const raw_call *call, folio_layout layout,
                       int32_t block_size, const raw_result *expected)
{
    raw_cache cache;
    if (!raw_cache_make(s->ctx, &s->keys, layout, block_size, &cache)) return;
    check_cache(s, call, &cache, expected);
    if (layout == FOLIO_LAYOUT_NATIVE && s->keys.dtype == FOLIO_INT8) {
        raw_cache_part_scales(s->ctx, &s->keys, &cache);
        if (cache.cache != NULL) check_cache(s, call, &cache, expected);
    }
    raw_cache_free(&cache);
}

static bool exists(folio_layout layout, const raw_keys *keys)
{
    if (layout == FOLIO_LAYOUT_INTERLEAVED_NHD || layout == FOLIO_LAYOUT_INTERLEAVED_HND)
        return keys->k_size == keys->v_size;
    return layout != FOLIO_LAYOUT_XPACKED ||
           keys->k_size % (16 / (int)folio_dtype_size(keys->dtype)) == 0;
}

/* turn: which block size, and whether with a window, comes to which layout. */
static void check_scene(const scene *s, int turn)
{
    raw_result plain = {0}, window = {0};
    bool ok = run_native(s, false, &plain) && run_native(s, true, &window);
    for (int n = 0; ok && n < FOLIO_NUM_LAYOUTS + 2; n++) {
        folio_layout layout = n < FOLIO_NUM_LAYOUTS ? (folio_layout)n : FOLIO_LAYOUT_NATIVE;
        if (!exists(layout, &s->keys)) continue;
        bool in_window = (n + turn) % 2;
        raw_call call = windowed(&s->call, in_window);
        check_same(s, &call, layout, block_sizes[(n + turn / 2) % 4], in_window ? &window : &plain);
    }
    for (int n = 0; ok && n < 2 && s->keys.dtype != FOLIO_INT8; n++) {
        raw_call call = windowed(&s->call, n);
        call.t.flags = FOLIO_KV_APPEND;
        call.keys = &s->keys;
        folio_layout layout = (n + turn) % 2 ? FOLIO_LAYOUT_NATIVE : FOLIO_LAYOUT_NHD;
        check_same(s, &call, layout, block_sizes[(n + turn) % 4], n ? &window : &plain);
    }
    raw_result_free(&plain);
    raw_result_free(&window);
}

static bool is_slow(rig_engine e) { return strcmp(e.name, "scalar") == 0; }

ENGINE_TEST(layouts, change_nothing)
{
    const folio_dtype q_types[] = {FOLIO_BF16, FOLIO_F32, FOLIO_F16};
    if (e.reference) return; /* which promises no bits */
    for (int type = 0; type < SUPPORT_NUM_KV_DTYPES; type++)
        for (int n = is_slow(e) ? 1 : 0; n < COUNT_OF(head_sizes); n += is_slow(e) ? 3 : 1) {
            /* bf16, which has kernels of its own, at every size; the others at some */
            folio_dtype dtype[2] = {FOLIO_BF16, q_types[1 + (n + type) % 2]};
            for (int q = 0; q < (test_is_long() || (n + type) % 3 == 0 ? 2 : 1); q++) {
                int32_t size = head_sizes[n], group = 1 + (n + type + q) % 4;
                int32_t v_size = (n + type) % 3 == 1 ? head_sizes[(n + 3) % 7] : size;
                scene s = open_scene(e.ctx, support_kv_dtypes[type], dtype[q], size, v_size, group);
                check_scene(&s, n + 3 * type + q);
                close_scene(&s);
            }
        }
}

/* Whole prompts: from the cache, and as they are given without one. */
ENGINE_TEST(layouts, no_cache_changes_nothing)
{
    if (e.reference) return;
    for (int type = 0; type < SUPPORT_NUM_KV_DTYPES - 1; type++)
        for (int n = 1; n < COUNT_OF(head_sizes); n += is_slow(e) ? 3 : 2) {
            folio_dtype kv = support_kv_dtypes[type], given = type < 3 ? kv : FOLIO_BF16;
            scene s = open_scene(e.ctx, kv, given, head_sizes[n], head_sizes[n], 2);
            const int64_t lens[] = {1, 17, 129, 150};
            for (int i = 0; i < 4; i++) s.call.seqs[i] = (raw_seq){lens[i], lens[i], 0};
            s.call.num_seqs = 4;
            free(s.q);
            s.call.q = s.q = random_queries(&s.call);
            s.call.keys = &s.keys;
            raw_result direct;
            if (raw_run(e.ctx, &s.call, NULL, &direct))
                check_same(&s, &s.call, FOLIO_LAYOUT_NATIVE, block_sizes[(type + n) % 4], &direct);
            raw_result_free(&direct);
            close_scene(&s);
        }
}

/* Allocations that end where memory does, but for what alignment takes. */
enum { PAGE = 4096 };

static size_t up_to(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static void *alloc_at_end(void *user, size_t size, size_t align)
{
    (void)user;
    size_t bytes = up_to(size, PAGE);
    char *base =
        mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + bytes, PAGE, PROT_NONE) != 0) abort();
    return base + bytes - up_to(size, align);
}

static void free_at_end(void *user, void *ptr, size_t size)
{
    (void)user;
    if (ptr == NULL) return;
    munmap((char *)ptr - (uintptr_t)ptr % PAGE, up_to(size, PAGE) + PAGE);
}

/* Tables of whole cache lines in all: what is fetched ahead must stay within them. */
static void run_at_end(folio_context *ctx, folio_dtype kv, int32_t block_size)
{
    scene s = open_scene(ctx, kv, kv == FOLIO_INT8 ? FOLIO_BF16 : kv, 64, 64, 2);
    const raw_seq seqs[] = {{1, 250, 0}, {1, 384, 0}, {2, 640, 0}, {30, 256, 0}};
    s.call.num_seqs = 16;
    for (int i = 0; i < 16; i++) s.call.seqs[i] = seqs[i % 4];
    free(s.q);
    s.call.q = s.q = random_queries(&s.call);
    raw_cache cache;
    if (raw_cache_make(ctx, &s.keys, FOLIO_LAYOUT_NATIVE, block_size, &cache))
        for (int window = 0; window < 2; window++) {
            raw_call call = windowed(&s.call, window);
            raw_result r;
            raw_run(ctx, &call, &cache, &r);
            raw_result_free(&r);
        }
    raw_cache_free(&cache);
    close_scene(&s);
}

ENGINE_TEST(layouts, nothing_is_read_past_a_table)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu", .num_threads = 2};
    desc.level = e.reference ? NULL : e.name;
    if (e.reference) desc.backend = "reference";
    desc.allocator = (folio_allocator){alloc_at_end, free_at_end, NULL};
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&desc, &ctx));
    REQUIRE_TEST(ctx != NULL);
    run_at_end(ctx, FOLIO_BF16, 16);
    run_at_end(ctx, FOLIO_INT8, 48);
    run_at_end(ctx, FOLIO_F32, 128);
    folio_context_destroy(ctx);
}
