/* test_block_moves.c: more layers and pairs than one launch of move_blocks takes, and rows that are not aligned. */
#include "cuda/device_rig.h"

enum { LAYERS = 131, BLOCKS = 1210, PAIRS = 601, SIZE = 24 };
enum { BLOCK_BYTES = 2 * SIZE }; /* one token, one head: K and V */

/* Fills a layer's host image with its own numbers. */
static void fill_layer(unsigned char *x, int32_t layer)
{
    uint32_t seed = (uint32_t)layer * 2654435761u + 1;
    for (int64_t i = 0; i < BLOCKS * BLOCK_BYTES; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (unsigned char)(seed >> 24);
    }
}

TEST(block_moves, many_layers_and_many_pairs)
{
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = LAYERS, .block_size = 1,
                   .num_kv_heads = 1, .k_head_size = SIZE, .dtype = FOLIO_FP8_E4M3);
    static unsigned char image[BLOCKS * BLOCK_BYTES], seen[BLOCKS * BLOCK_BYTES];
    static folio_block_pair pairs[PAIRS];
    folio_context *ctx = device_context();
    folio_kv_cache *cache = NULL;
    folio_kv_cache_view view = {.struct_size = sizeof view};
    CHECK_OK(folio_kv_cache_create(ctx, &d, &cache));
    for (int32_t l = 0; l < LAYERS; l++) {
        fill_layer(image, l);
        CHECK_OK(folio_kv_cache_get_view(cache, l, &view));
        CHECK_OK(folio_memory_copy(ctx, view.k, image, sizeof image, NULL));
        CHECK_OK(folio_run_wait(ctx, NULL));
    }
    for (int64_t i = 0; i < PAIRS; i++) {
        pairs[i].from = i * 7 % PAIRS;
        pairs[i].to = PAIRS + i;
    }
    CHECK_OK(folio_kv_cache_copy_blocks(cache, cache, pairs, PAIRS, NULL));
    for (int32_t l = 0; l < LAYERS; l++) {
        fill_layer(image, l);
        for (int64_t i = 0; i < PAIRS; i++)
            memcpy(image + pairs[i].to * BLOCK_BYTES, image + pairs[i].from * BLOCK_BYTES,
                   BLOCK_BYTES);
        CHECK_OK(folio_kv_cache_get_view(cache, l, &view));
        CHECK_OK(folio_memory_copy(ctx, seen, view.k, sizeof seen, NULL));
        CHECK_OK(folio_run_wait(ctx, NULL));
        CHECK_MSG(memcmp(image, seen, sizeof seen) == 0, "layer %d", (int)l);
    }
    folio_kv_cache_destroy(cache);
    folio_context_destroy(ctx);
}

/* Memory of the caller's that begins at an odd byte, between bytes that must stay. */
TEST(block_moves, rows_at_odd_bytes)
{
    enum { FEW = 8, LEAD = 3, BYTES = LEAD + FEW * 2 * SIZE + 5 };
    folio_kv_cache_desc d = FOLIO_WITH(folio_kv_cache_desc, .num_blocks = FEW, .num_layers = 1,
                                       .block_size = 2, .num_kv_heads = 1, .k_head_size = SIZE,
                                       .dtype = FOLIO_FP8_E4M3, .layout = FOLIO_LAYOUT_HND);
    unsigned char image[2][BYTES], seen[BYTES];
    void *memory[2], *rows[2];
    folio_context *ctx = device_context();
    folio_kv_cache *cache = NULL;
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < BYTES; i++) image[part][i] = (unsigned char)(i * 37 + part * 11);
        memory[part] = device_upload(ctx, image[part], BYTES);
        rows[part] = (char *)memory[part] + LEAD;
    }
    folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = &rows[0], .v = &rows[1],
                                   .k_bytes = FEW * 2 * SIZE, .v_bytes = FEW * 2 * SIZE);
    CHECK_OK(folio_kv_cache_wrap(ctx, &d, &m, &cache));
    const folio_block_pair pairs[] = {{1, 6}, {4, 0}};
    CHECK_OK(folio_kv_cache_copy_blocks(cache, cache, pairs, 2, NULL));
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < 2; i++)
            memcpy(image[part] + LEAD + pairs[i].to * 2 * SIZE,
                   image[part] + LEAD + pairs[i].from * 2 * SIZE, 2 * SIZE);
        CHECK_OK(folio_memory_copy(ctx, seen, memory[part], BYTES, NULL));
        CHECK_OK(folio_run_wait(ctx, NULL));
        CHECK(memcmp(image[part], seen, BYTES) == 0);
    }
    folio_kv_cache_destroy(cache);
    device_close(ctx);
}
