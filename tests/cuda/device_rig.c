/* device_rig.c: see device_rig.h. */
#include "cuda/device_rig.h"

folio_context *device_context(void)
{
    folio_context *ctx = NULL;
    CHECK_OK(folio_context_create(&FOLIO_WITH(folio_context_desc, .backend = "cuda"), &ctx));
    return ctx;
}

uint16_t *device_numbers(int64_t count, uint32_t seed)
{
    uint16_t *x = calloc((size_t)count, sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)(0x3e00u | (seed >> 16 & 0x81ffu));
    }
    return x;
}

void *device_upload(folio_context *ctx, const void *from, size_t bytes)
{
    void *to = NULL;
    CHECK_OK(folio_memory_create(ctx, FOLIO_MEMORY_DEVICE, bytes, &to));
    CHECK_OK(folio_memory_copy(ctx, to, from, bytes, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    return to;
}

void *device_upload_numbers(folio_context *ctx, int64_t count, uint32_t seed)
{
    uint16_t *x = device_numbers(count, seed);
    void *to = device_upload(ctx, x, (size_t)count * sizeof *x);
    free(x);
    return to;
}

void device_write_slots(folio_context *ctx, folio_kv_cache *cache, int32_t layer, int64_t first,
                        int64_t tokens, int64_t row, uint32_t seed)
{
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    for (int64_t i = 0; i < tokens; i++) slots[i] = first + i;
    size_t bytes = (size_t)(tokens * row) * 2;
    void *k = device_upload_numbers(ctx, tokens * row, seed);
    void *v = device_upload_numbers(ctx, tokens * row, seed + 1);
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {k, FOLIO_BF16, tokens, 0, 0},
                                      .v = {v, FOLIO_BF16, tokens, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(cache, layer, &write, NULL));
    CHECK_OK(folio_run_wait(ctx, NULL));
    folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, k, bytes);
    folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, v, bytes);
    free(slots);
}
