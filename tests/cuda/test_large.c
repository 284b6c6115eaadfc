/* test_large.c: caches past 2^31 elements: what is stored, copied and read in their last blocks. */
#include "cuda/device_rig.h"
#include "kit/layer.h"

#include <string.h>

enum { HEADS = 32, KV_HEADS = 8, SIZE = 128, BLOCK = 16, LENGTH = 1000, MAX_QUERY = 300 };
enum { SEQ_BLOCKS = (LENGTH + BLOCK - 1) / BLOCK, RANGE = 500 };
enum { ROW = HEADS * SIZE, KV_ROW = KV_HEADS * SIZE };
enum { LOW_BYTES = 64 << 20 };

/* A block has 2^15 elements, K and V together. */
static const struct {
    folio_dtype kv_dtype;
    folio_layout layout;
    int64_t base; /* the first block in use */
} cases[] = {{FOLIO_BF16, FOLIO_LAYOUT_NATIVE, 1 << 17},
             {FOLIO_BF16, FOLIO_LAYOUT_NHD, 1 << 17},
             {FOLIO_FP8_E4M3, FOLIO_LAYOUT_NATIVE, 1 << 17},
             {FOLIO_F32, FOLIO_LAYOUT_HND, 1 << 16}};

/* One token, drafts, a part of a prompt. */
static const int32_t queries[] = {1, 12, MAX_QUERY};

static void fill(folio_context *ctx, folio_kv_cache *cache)
{
    folio_kv_cache_view view = {.struct_size = sizeof view};
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    CHECK_OK(folio_kv_cache_get_view(cache, 0, &view));
    CHECK_OK(folio_kv_cache_get_shape("cuda", view.desc, &shape));
    CHECK_OK(folio_memory_fill(ctx, view.k, 0xff, (size_t)shape.layer_bytes, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
}

/* An index cut to 32 bits would have written here. */
static void check_low(folio_context *ctx, const void *from)
{
    unsigned char *bytes = malloc(LOW_BYTES);
    CHECK_OK(folio_memory_copy(ctx, bytes, from, LOW_BYTES, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    CHECK(bytes[0] == 0xff && memcmp(bytes, bytes + 1, LOW_BYTES - 1) == 0);
    free(bytes);
}

/* Stores the context in blocks from base on, copies them to others, and attends there; the forward stores the rest. */
static void attend(kit_layer *l, int64_t base, int32_t query, const void *q, void *out,
                   uint16_t *got)
{
    int32_t table[SEQ_BLOCKS];
    int64_t slots[LENGTH], context = LENGTH - query;
    folio_block_pair pairs[SEQ_BLOCKS];
    for (int32_t i = 0; i < SEQ_BLOCKS; i++) {
        pairs[i].from = base + i * 37 % RANGE;
        pairs[i].to = base + RANGE + i * 41 % RANGE;
        table[i] = (int32_t)pairs[i].to;
    }
    for (int64_t i = 0; i < context; i++) slots[i] = pairs[i / BLOCK].from * BLOCK + i % BLOCK;
    void *k = device_upload_numbers(l->ctx, LENGTH * KV_ROW, 1);
    void *v = device_upload_numbers(l->ctx, LENGTH * KV_ROW, 2);
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_BF16, context, 0, 0},
                                      .v = {v, FOLIO_BF16, context, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(l->cache, 0, &write, NULL));
    CHECK_OK(folio_kv_cache_copy_blocks(l->cache, l->cache, pairs, SEQ_BLOCKS, NULL));
    folio_batch_clear(l->batch);
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = query, .seq_len = LENGTH,
                                     .block_table = table, .num_blocks = SEQ_BLOCKS);
    CHECK_OK(folio_batch_add(l->batch, &seq));
    CHECK_OK(folio_plan_update(l->plan, l->batch, NULL));
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {(void *)q, FOLIO_BF16, query, 0, 0},
                                 .k = {(uint16_t *)k + context * KV_ROW, FOLIO_BF16, query, 0, 0},
                                 .v = {(uint16_t *)v + context * KV_ROW, FOLIO_BF16, query, 0, 0},
                                 .out = {out, FOLIO_BF16, query, 0, 0});
    CHECK_OK(folio_attention_forward(l->plan, 0, FOLIO_ATTENTION_DECODER, l->cache, 0, &t, NULL));
    CHECK_OK(folio_memory_copy(l->ctx, got, out, (size_t)query * ROW * 2, NULL));
    CHECK_OK(folio_run_wait(l->ctx, NULL));
}

static void open_layer(folio_context *ctx, kit_layer *l, size_t i, int64_t base, uint32_t flags)
{
    *l = (kit_layer){0};
    CHECK_OK(KIT_LAYER_OPEN(ctx, l, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                            .k_head_size = SIZE, .dtype = FOLIO_BF16, .kv_dtype = cases[i].kv_dtype,
                            .layout = cases[i].layout, .num_blocks = base + 2 * RANGE,
                            .block_size = BLOCK, .max_query_tokens = MAX_QUERY,
                            .max_seq_len = LENGTH, .flags = flags));
    fill(ctx, l->cache);
}

/* The same keys in the first blocks of a small cache and in the last ones of a large one: the same bits. */
static void compare(uint32_t flags)
{
    static uint16_t want[MAX_QUERY * ROW], got[MAX_QUERY * ROW];
    folio_context *ctx = device_context();
    void *q = device_upload_numbers(ctx, MAX_QUERY * ROW, 3);
    void *out = device_make(ctx, MAX_QUERY * ROW * 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kit_layer small, large;
        folio_kv_cache_view view = {.struct_size = sizeof view};
        open_layer(ctx, &small, i, 0, flags);
        open_layer(ctx, &large, i, cases[i].base, flags);
        for (size_t k = 0; k < sizeof queries / sizeof *queries; k++) {
            size_t numbers = (size_t)queries[k] * ROW;
            attend(&small, 0, queries[k], q, out, want);
            attend(&large, cases[i].base, queries[k], q, out, got);
            CHECK_MSG(memcmp(got, want, numbers * 2) == 0, "case %zu, %d rows", i, queries[k]);
            for (size_t n = 0; n < numbers; n++) CHECK((want[n] & 0x7fff) < 0x3f80);
        }
        CHECK_OK(folio_kv_cache_get_view(large.cache, 0, &view));
        check_low(ctx, view.k);
        if (cases[i].layout != FOLIO_LAYOUT_NATIVE) check_low(ctx, view.v);
        kit_layer_close(&small);
        kit_layer_close(&large);
    }
    device_close(ctx);
}

TEST(large, blocks_past_2_31_elements) { compare(0); }

TEST(large, private_slots_past_2_31_elements) { compare(FOLIO_PLAN_PRIVATE_SLOTS); }
