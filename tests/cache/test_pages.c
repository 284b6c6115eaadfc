/*
 * test_pages.c: a device's native pages, on the host: where each number lies, and that reading, writing, moving, the tiers
 * and the store all agree on it.
 */
#include "cache/kv_layout.h"
#include "cache/kv_rows.h"
#include "core/dtype.h"
#include "fake_device.h"

enum { BLOCKS = 3, HEADS = 2 };

static folio_kv_cache_desc describe(folio_dtype dtype, int32_t block_size, int32_t k, int32_t v)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1,
                      .block_size = block_size, .num_kv_heads = HEADS, .k_head_size = k,
                      .v_head_size = v, .dtype = dtype);
}

/* The drawing: of every 8 tokens K, then V; panels of 64 dims; rows of 128 bytes, their 16-byte units XOR the row. */
static int64_t drawn(const folio_kv_cache_desc *c, bool v, int64_t block, int64_t head, int64_t t,
                     int64_t d)
{
    int64_t k_bytes = 16 * c->k_head_size, eight = k_bytes + 16 * c->v_head_size;
    int64_t chunk = (block * HEADS + head) * (c->block_size / 8) + t / 8;
    return chunk * eight + v * k_bytes + d / 64 * 1024 + t % 8 * 128 + ((d % 64 / 8 ^ t % 8) * 16) +
           d % 8 * 2;
}

TEST(pages, every_number_has_the_place_drawn)
{
    static const int32_t sizes[][3] = {{16, 128, 128}, {32, 64, 128}, {48, 192, 64}, {16, 64, 64}};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        folio_kv_cache_desc c = describe(FOLIO_BF16, sizes[i][0], sizes[i][1], sizes[i][2]);
        folioi_kv_format f;
        CHECK_OK(folioi_kv_format_init(&c, true, &f));
        CHECK(strcmp(folioi_layout_id(&f), "device-pages") == 0);
        CHECK_INT(f.layer_bytes,
                  (int64_t)BLOCKS * HEADS * c.block_size * (c.k_head_size + c.v_head_size) * 2);
        CHECK_INT(f.v.offset_bytes, 16 * c.k_head_size);
        int64_t wrong = 0;
        for (int64_t n = 0; n < (int64_t)BLOCKS * HEADS * c.block_size; n++)
            for (int part = 0; part < 2; part++) {
                int64_t t = n % c.block_size, head = n / c.block_size % HEADS;
                int64_t block = n / c.block_size / HEADS;
                const folioi_address *at = part ? &f.v_at : &f.k_at;
                for (int64_t d = 0; d < (part ? c.v_head_size : c.k_head_size); d++) {
                    int64_t here = address_token(at, block, head, t) + address_dim(at, t, d);
                    wrong +=
                        here * 2 + part * f.v.offset_bytes != drawn(&c, part, block, head, t, d);
                }
            }
        CHECK_INT(wrong, 0);
        CHECK(!address_has_rows(&f.k_at) &&
              !address_is_dense(&f.k_at, c.block_size, c.k_head_size));
        CHECK_INT(address_run(&f.k_at, c.block_size, c.k_head_size), 8);
        CHECK_INT(address_run(&f.v_at, c.block_size, c.v_head_size), 8);
    }
}

/* What has no pages keeps its rows, and the id says so: a store made with the one is refused by the other. */
TEST(pages, other_caches_keep_rows)
{
    static const struct {
        folio_dtype dtype;
        int32_t block_size, k, v;
        const char *id;
    } cases[] = {
        {FOLIO_F16, 16, 128, 128, "device-pages"},  {FOLIO_F16, 24, 128, 128, "device-rows"},
        {FOLIO_F16, 16, 96, 128, "device-rows"},    {FOLIO_F16, 16, 128, 80, "device-rows"},
        {FOLIO_F32, 16, 128, 128, "device-rows"},   {FOLIO_INT8, 16, 64, 64, "device-rows"},
        {FOLIO_FP8_E4M3, 32, 64, 64, "device-rows"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_kv_cache_desc c =
            describe(cases[i].dtype, cases[i].block_size, cases[i].k, cases[i].v);
        folioi_kv_format f;
        CHECK_OK(folioi_kv_format_init(&c, true, &f));
        CHECK_MSG(strcmp(folioi_layout_id(&f), cases[i].id) == 0, "case %d: %s", i,
                  folioi_layout_id(&f));
        bool paged = strcmp(cases[i].id, "device-pages") == 0;
        CHECK_INT(f.k_at.swizzle, paged ? 8 : 0);
        CHECK(address_has_rows(&f.k_at) == !paged);
        CHECK_OK(folioi_kv_format_init(&c, false, &f));
        CHECK_INT(f.k_at.swizzle, 0);
        CHECK(strncmp(folioi_layout_id(&f), "host-", 5) == 0);
    }
}

/* Rows of K and V, each number its own. */
static folio_tensor numbered(uint16_t *memory, int64_t tokens, int32_t dims, int first)
{
    for (int64_t i = 0; i < tokens * HEADS * dims; i++) memory[i] = (uint16_t)(first + i);
    return (folio_tensor){.data = memory,
                          .dtype = FOLIO_F16,
                          .tokens = tokens,
                          .token_stride = (int64_t)HEADS * dims,
                          .head_stride = dims};
}

TEST(pages, rows_come_back_as_they_were_written)
{
    enum { TOKENS = 33, K = 128, V = 64 };
    static uint16_t k[TOKENS * HEADS * K], v[TOKENS * HEADS * V];
    folio_kv_cache_desc c = describe(FOLIO_F16, 32, K, V);
    folioi_kv_format f;
    CHECK_OK(folioi_kv_format_init(&c, true, &f));
    support_buffer memory = support_buffer_make((size_t)f.layer_bytes);
    folioi_kv_layer layer = {memory.data, (char *)memory.data + f.v.offset_bytes, NULL, NULL, &f};
    folioi_kv_tensors t = {.k = numbered(k, TOKENS, K, 1),
                           .v = numbered(v, TOKENS, V, 7000),
                           .k_scale = 1.0f,
                           .v_scale = 1.0f};
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++) slots[i] = (i * 35 + 2) % (BLOCKS * 32);
    folioi_kv_write_rows(&layer, &t, slots, &(folioi_kv_share){0, TOKENS, 0, HEADS});
    const char *bytes = memory.data;
    for (int i = 0; i < TOKENS; i++)
        for (int h = 0; h < HEADS; h++) {
            float row[K];
            int wrong = 0;
            int64_t block = slots[i] / 32, token = slots[i] % 32;
            folioi_kv_side side = kv_side(&layer, FOLIOI_K);
            folioi_kv_read_row(row, &side, block, h, token, 1.0f);
            for (int d = 0; d < K; d++) {
                uint16_t here;
                memcpy(&here, bytes + drawn(&c, false, block, h, token, d), 2);
                wrong += here != k[(i * HEADS + h) * K + d];
                wrong += row[d] != load_f32(k, FOLIO_F16, (i * HEADS + h) * K + d);
            }
            for (int d = 0; d < V; d++) {
                uint16_t here;
                memcpy(&here, bytes + drawn(&c, true, block, h, token, d), 2);
                wrong += here != v[(i * HEADS + h) * V + d];
            }
            CHECK_INT(wrong, 0);
        }
    support_buffer_free(&memory);
}

/* Packed from rows, copied block to block, unpacked: on a device, whose cache has pages. */
TEST(pages, pack_copy_and_unpack)
{
    enum { K = 64, V = 128, N = 16, COUNT = BLOCKS * N * HEADS };
    folio_context *ctx = fake_device_context(NULL);
    REQUIRE_TEST(ctx != NULL);
    folio_kv_cache_desc c = describe(FOLIO_BF16, N, K, V);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &c, &cache));
    uint16_t *rows[4];
    size_t bytes[4];
    for (int i = 0; i < 4; i++) {
        void *memory = NULL;
        bytes[i] = COUNT * (i % 2 ? V : K) * sizeof(uint16_t);
        CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_HOST, bytes[i], &memory));
        REQUIRE_TEST(memory != NULL);
        rows[i] = memory;
        for (size_t n = 0; n < bytes[i] / 2; n++)
            rows[i][n] = i < 2 ? (uint16_t)(n + (size_t)i * 31) : 0xFFFF;
    }
    const int64_t in[BLOCKS] = {2, 0, 1}, out[BLOCKS] = {0, 2, 1};
    const folio_block_pair pair[1] = {{2, 0}};
    folio_kv_rows r = {.struct_size = sizeof r, .k = rows[0], .v = rows[1], .blocks = in};
    r.num_blocks = BLOCKS;
    CHECK_OK(folio_kv_cache_pack(cache, 0, &r, NULL));
    CHECK_OK(folio_kv_cache_copy_blocks(cache, cache, pair, 1,
                                        NULL)); /* block 0 becomes rows of in[0] */
    r.k = rows[2], r.v = rows[3], r.blocks = out;
    CHECK_OK(folio_kv_cache_unpack(cache, 0, &r, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    static const int from[BLOCKS] = {0, 0, 2}; /* blocks 0 and 2 hold the first rows, 1 the last */
    for (int i = 0; i < BLOCKS; i++)
        for (int part = 0; part < 2; part++) {
            size_t n = (size_t)N * HEADS * (part ? V : K);
            CHECK(memcmp(rows[2 + part] + i * n, rows[part] + from[i] * n, n * 2) == 0);
        }
    for (int i = 0; i < 4; i++) folio_memory_destroy(ctx, FOLIO_MEMORY_HOST, rows[i], bytes[i]);
    folio_kv_cache_destroy(cache);
    folio_context_destroy(ctx);
}
