/* vllm06_backends.c: the three backends as descriptions, found by name, and the originals' static methods. They differ
 * in names, listed sizes, cache layout and habits; all code is shared. */
#include "vllm06/vllm06.h"

#include <math.h>
#include <string.h>

static const int32_t head_sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
static const int32_t torch_sdpa_ipex_head_sizes[] = {32, 64, 80, 96, 112, 128, 256};
static const int32_t block_sizes[] = {8, 16, 32};

#define SIZES(heads)                                                                               \
    .supported_head_sizes = (heads),                                                               \
    .num_supported_head_sizes = (int32_t)(sizeof(heads) / sizeof *(heads)),                        \
    .supported_block_sizes = block_sizes,                                                          \
    .num_supported_block_sizes = (int32_t)(sizeof block_sizes / sizeof *block_sizes)

enum { XFORMERS, TORCH_SDPA, TORCH_SDPA_IPEX, IPEX, NUM_BACKENDS };

static const folio_vllm06_backend backends[NUM_BACKENDS] = {
    [XFORMERS] = {.struct_size = sizeof(folio_vllm06_backend),
                  .name = "xformers",
                  .backend_cls = "XFormersBackend",
                  .impl_cls = "XFormersImpl",
                  .metadata_cls = "XFormersMetadata",
                  .builder_cls = "XFormersMetadataBuilder",
                  SIZES(head_sizes),
                  .layout = FOLIO_LAYOUT_XPACKED,
                  .mixes = 1,
                  .prefix_scale = 1},
    [TORCH_SDPA] = {.struct_size = sizeof(folio_vllm06_backend),
                    .name = "torch-sdpa",
                    .backend_cls = "TorchSDPABackend",
                    .impl_cls = "TorchSDPABackendImpl",
                    .metadata_cls = "TorchSDPAMetadata",
                    .builder_cls = "TorchSDPAMetadataBuilder",
                    SIZES(head_sizes),
                    .layout = FOLIO_LAYOUT_XPACKED},
    /* torch-sdpa where IPEX was installed: IPEX's own operators had another layout. */
    [TORCH_SDPA_IPEX] = {.struct_size = sizeof(folio_vllm06_backend),
                         .name = "torch-sdpa-ipex",
                         .backend_cls = "TorchSDPABackend",
                         .impl_cls = "TorchSDPABackendImpl",
                         .metadata_cls = "TorchSDPAMetadata",
                         .builder_cls = "TorchSDPAMetadataBuilder",
                         SIZES(torch_sdpa_ipex_head_sizes),
                         .layout = FOLIO_LAYOUT_HND},
    [IPEX] = {.struct_size = sizeof(folio_vllm06_backend),
              .name = "ipex",
              .backend_cls = "IpexAttnBackend",
              .impl_cls = "IpexAttnBackendImpl",
              .metadata_cls = "IpexAttnMetadata",
              .builder_cls = "CommonMetadataBuilder",
              SIZES(head_sizes),
              .layout = FOLIO_LAYOUT_XPACKED_1,
              .bare_prompts = 1},
};

static const struct {
    const char *name;
    int backend;
} names[] = {
    {"xformers", XFORMERS},
    {"XFORMERS", XFORMERS},
    {"XFormersBackend", XFORMERS},
    {"torch-sdpa", TORCH_SDPA},
    {"TORCH_SDPA", TORCH_SDPA},
    {"TorchSDPABackend", TORCH_SDPA},
    {"ipex", IPEX},
    {"ipex-attn", IPEX},
    {"IPEX", IPEX},
    {"IpexAttnBackend", IPEX},
    {"torch-sdpa-ipex", TORCH_SDPA_IPEX},
};
enum { NUM_NAMES = sizeof names / sizeof names[0] };

const folio_vllm06_backend *folio_vllm06_backend_find(const char *name)
{
    for (int i = 0; name != NULL && i < NUM_NAMES; i++)
        if (strcmp(names[i].name, name) == 0) return &backends[names[i].backend];
    return NULL;
}

folio_status folioi_vllm06_check_backend(const folio_vllm06_backend *backend, const char *what)
{
    for (int i = 0; i < NUM_BACKENDS; i++)
        if (backend == &backends[i]) return FOLIO_OK;
    FAIL(FOLIO_ERR_ARGUMENT, "%s: backend is %s", what,
         backend == NULL ? "NULL" : "not one that folio_vllm06_backend_find returned");
}

folio_status folio_vllm06_get_kv_cache_shape(int64_t num_blocks, int64_t block_size,
                                             int64_t num_kv_heads, int64_t head_size,
                                             int64_t shape[3])
{
    REQUIRE(shape != NULL, "shape is NULL");
    int64_t elements;
    TRY(folioi_vllm06_check_sizes(num_blocks, block_size, num_kv_heads, head_size, "kv_cache",
                                  &elements));
    shape[0] = 2;
    shape[1] = num_blocks;
    shape[2] = elements;
    return FOLIO_OK;
}

folio_status folio_vllm06_split_kv_cache(const folio_vllm06_backend *backend,
                                         const folio_vllm06_kv_cache *c,
                                         folio_vllm06_cache_view *key_cache,
                                         folio_vllm06_cache_view *value_cache)
{
    TRY(folioi_vllm06_check_backend(backend, "split_kv_cache"));
    folioi_vllm06_memory m;
    TRY(folioi_vllm06_check_cache(c, "kv_cache", &m));
    REQUIRE(key_cache != NULL && value_cache != NULL, "key_cache or value_cache is NULL");
    int64_t blocks = c->num_blocks, heads = c->num_kv_heads, size = c->head_size;
    if (backend->layout == FOLIO_LAYOUT_HND) {
        *key_cache = (folio_vllm06_cache_view){m.k, 4, {blocks, heads, c->block_size, size, 1}};
        *value_cache = (folio_vllm06_cache_view){m.v, 4, {blocks, heads, c->block_size, size, 1}};
        return FOLIO_OK;
    }
    int64_t x =
        backend->layout == FOLIO_LAYOUT_XPACKED_1 ? 1 : 16 / (int64_t)folio_dtype_size(c->dtype);
    REQUIRE(size % x == 0, "head_size %lld is not a multiple of x = %lld", (long long)size,
            (long long)x);
    *key_cache = (folio_vllm06_cache_view){m.k, 5, {blocks, heads, size / x, c->block_size, x}};
    *value_cache = (folio_vllm06_cache_view){m.v, 4, {blocks, heads, size, c->block_size, 1}};
    return FOLIO_OK;
}

folio_status folio_vllm06_make_alibi_bias(const float *alibi_slopes, int64_t num_heads,
                                          int64_t seq_len, float *out)
{
    REQUIRE(alibi_slopes != NULL && out != NULL, "alibi_slopes or out is NULL");
    REQUIRE(num_heads >= 0 && seq_len >= 0,
            "num_heads is %lld and seq_len %lld; both must be at least 0", (long long)num_heads,
            (long long)seq_len);
    for (int64_t h = 0; h < num_heads; h++)
        for (int64_t i = 0; i < seq_len; i++)
            for (int64_t j = 0; j < seq_len; j++)
                *out++ = j > i ? -INFINITY : (float)(j - i) * alibi_slopes[h] + 0.0f; /* no -0 */
    return FOLIO_OK;
}

folio_status folio_vllm06_make_sliding_window_bias(int64_t seq_len, int64_t window_size, float *out)
{
    REQUIRE(out != NULL, "out is NULL");
    REQUIRE(seq_len >= 0 && window_size >= 0,
            "seq_len is %lld and window_size %lld; both must be at least 0", (long long)seq_len,
            (long long)window_size);
    for (int64_t i = 0; i < seq_len; i++)
        for (int64_t j = 0; j < seq_len; j++)
            *out++ = j > i || (window_size > 0 && j <= i - window_size) ? -INFINITY : 0.0f;
    return FOLIO_OK;
}
