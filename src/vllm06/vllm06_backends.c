/* vllm06_backends.c: the three backends as rows of one table, found by name. They differ in names, supported sizes,
 * cache layout and whether a step can be mixed; all other code is shared. */
#include "vllm06/vllm06.h"

#include <math.h>
#include <string.h>

static const folioi_vllm06_traits xformers = {
    .name = "xformers", .layout = FOLIO_LAYOUT_XPACKED, .mixes = true, .prefix_scale = true};
static const folioi_vllm06_traits torch_sdpa = {.name = "torch-sdpa",
                                                .layout = FOLIO_LAYOUT_XPACKED};
/* torch-sdpa where IPEX was installed: IPEX's own operators had another layout. */
static const folioi_vllm06_traits torch_sdpa_ipex = {.name = "torch-sdpa-ipex",
                                                     .layout = FOLIO_LAYOUT_HND};
static const folioi_vllm06_traits ipex = {
    .name = "ipex", .layout = FOLIO_LAYOUT_XPACKED_1, .bare_prompts = true};

static const int32_t head_sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
static const int32_t torch_sdpa_ipex_head_sizes[] = {32, 64, 80, 96, 112, 128, 256};
static const int32_t block_sizes[] = {8, 16, 32};

static const int32_t *count_of(const int32_t *list, int32_t n, int32_t *count)
{
    if (count != NULL) *count = n;
    return list;
}

static folio_status get_kv_cache_shape(int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                                       int64_t head_size, int64_t shape[3])
{
    REQUIRE(shape != NULL, "shape is NULL");
    int64_t elements, all;
    REQUIRE(num_blocks >= 1 && block_size >= 1 && num_kv_heads >= 1 && head_size >= 1 &&
                checked_mul(block_size, num_kv_heads, &elements) &&
                checked_mul(elements, head_size, &elements) &&
                checked_mul(elements, num_blocks, &all) && all <= INT64_MAX / 16,
            "%lld blocks x %lld tokens x %lld kv heads x %lld is not a valid cache size",
            (long long)num_blocks, (long long)block_size, (long long)num_kv_heads,
            (long long)head_size);
    shape[0] = 2;
    shape[1] = num_blocks;
    shape[2] = elements;
    return FOLIO_OK;
}

/* block_size = block_elements / (num_kv_heads * head_size), the originals' view(..., -1, ...). */
static folio_status block_size_of(const folio_vllm06_kv_cache *c, int64_t num_kv_heads,
                                  int64_t head_size, int64_t *block_size)
{
    int64_t row;
    REQUIRE(c != NULL, "kv_cache is NULL");
    REQUIRE(num_kv_heads >= 1 && head_size >= 1 && checked_mul(num_kv_heads, head_size, &row) &&
                c->block_elements >= row && c->block_elements % row == 0,
            "kv_cache: block_elements %lld is not a multiple of %lld kv heads x %lld",
            (long long)c->block_elements, (long long)num_kv_heads, (long long)head_size);
    *block_size = c->block_elements / row;
    return FOLIO_OK;
}

folio_status folioi_vllm06_wrap(folio_context *ctx, const folioi_vllm06_traits *traits,
                                const folio_vllm06_kv_cache *c, int32_t num_kv_heads,
                                int32_t head_size, folio_kv_cache **out)
{
    int64_t block_size = 0;
    *out = NULL;
    TRY(block_size_of(c, num_kv_heads, head_size, &block_size));
    REQUIRE(block_size <= 4096, "kv_cache: blocks of %lld tokens are larger than 4096",
            (long long)block_size);
    REQUIRE(c->data != NULL, "kv_cache: data is NULL");
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = c->num_blocks, .num_layers = 1,
                   .block_size = (int32_t)block_size, .num_kv_heads = num_kv_heads,
                   .k_head_size = head_size, .dtype = c->dtype, .layout = traits->layout);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    TRY(folio_kv_cache_get_shape(NULL, &d, &shape));
    void *k[] = {c->data};
    folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = k,
                                   .k_bytes = (size_t)(shape.v.offset_bytes + shape.v.bytes));
    return folio_kv_cache_wrap(ctx, &d, &m, out);
}

static folio_status split_kv_cache(const folioi_vllm06_traits *traits,
                                   const folio_vllm06_kv_cache *c, int64_t num_kv_heads,
                                   int64_t head_size, folio_vllm06_cache_view *key_cache,
                                   folio_vllm06_cache_view *value_cache)
{
    int64_t block_size = 0, elem = c != NULL ? (int64_t)folio_dtype_size(c->dtype) : 0;
    TRY(block_size_of(c, num_kv_heads, head_size, &block_size));
    REQUIRE(key_cache != NULL && value_cache != NULL, "key_cache or value_cache is NULL");
    REQUIRE(elem > 0, "kv_cache: dtype %d is unknown", (int)c->dtype);
    REQUIRE(c->data != NULL, "kv_cache: data is NULL");
    int64_t shape[3];
    TRY(get_kv_cache_shape(c->num_blocks, block_size, num_kv_heads, head_size, shape));
    char *value = (char *)c->data + c->num_blocks * c->block_elements * elem;
    if (traits->layout == FOLIO_LAYOUT_HND) {
        folio_vllm06_cache_view v = {value, 4, {shape[1], num_kv_heads, block_size, head_size, 1}};
        *value_cache = *key_cache = v;
        key_cache->data = c->data;
        return FOLIO_OK;
    }
    int64_t x = traits->layout == FOLIO_LAYOUT_XPACKED_1 ? 1 : 16 / elem;
    REQUIRE(head_size % x == 0, "head_size %lld is not a multiple of x = %lld",
            (long long)head_size, (long long)x);
    *key_cache = (folio_vllm06_cache_view){
        c->data, 5, {c->num_blocks, num_kv_heads, head_size / x, block_size, x}};
    *value_cache = (folio_vllm06_cache_view){
        value, 4, {c->num_blocks, num_kv_heads, head_size, block_size, 1}};
    return FOLIO_OK;
}

/* Blocks move whole, so their interior does not matter: one token, of heads that a device copies well. */
static folio_status as_ops_cache(const folio_vllm06_kv_cache *c, folio_vllm06_ops_cache *out)
{
    int64_t shape[3], size = 8;
    REQUIRE(c != NULL, "kv_cache is NULL");
    while (size < 128 && c->block_elements % (2 * size) == 0) size *= 2;
    int64_t heads = c->block_elements / size;
    REQUIRE(c->block_elements >= 8 && c->block_elements % 8 == 0 && heads <= INT32_MAX,
            "kv_cache: block_elements is %lld, not a positive multiple of 8 below 2^34",
            (long long)c->block_elements);
    TRY(get_kv_cache_shape(c->num_blocks, 1, heads, size, shape));
    REQUIRE(c->data != NULL, "kv_cache: data is NULL");
    int64_t k_bytes = shape[1] * shape[2] * (int64_t)folio_dtype_size(c->dtype);
    *out = (folio_vllm06_ops_cache){.key_cache = c->data,
                                    .value_cache = (char *)c->data + k_bytes,
                                    .dtype = c->dtype,
                                    .x = 1,
                                    .num_kv_heads = (int32_t)heads,
                                    .head_size = (int32_t)size,
                                    .block_size = 1,
                                    .num_blocks = c->num_blocks};
    return FOLIO_OK;
}

static folio_status swap_blocks(folio_vllm06_state *state, const folio_vllm06_kv_cache *src,
                                const folio_vllm06_kv_cache *dst, const int64_t (*src_to_dst)[2],
                                int64_t num_pairs, const folio_run *run)
{
    folio_vllm06_ops_cache from, to;
    REQUIRE(state != NULL, "state is NULL");
    TRY(as_ops_cache(src, &from));
    TRY(as_ops_cache(dst, &to));
    return folio_vllm06_swap_blocks(state->ctx, &from, &to, src_to_dst, num_pairs, run);
}

static folio_status copy_blocks(folio_vllm06_state *state, const folio_vllm06_kv_cache *kv_caches,
                                int64_t num_caches, const int64_t (*src_to_dists)[2],
                                int64_t num_pairs, const folio_run *run)
{
    REQUIRE(state != NULL, "state is NULL");
    REQUIRE(num_caches >= 0 && num_caches <= INT32_MAX && (num_caches == 0 || kv_caches != NULL),
            "kv_caches is NULL or num_caches is outside [0, 2147483647]");
    void *memory;
    int64_t bytes = num_caches * (int64_t)sizeof(folio_vllm06_ops_cache);
    TRY(folioi_alloc(&state->ctx->allocator, bytes, "a list of caches", &memory));
    folio_vllm06_ops_cache *caches = memory;
    folio_status status = FOLIO_OK;
    for (int64_t i = 0; i < num_caches && status == FOLIO_OK; i++)
        status = as_ops_cache(&kv_caches[i], &caches[i]);
    if (status == FOLIO_OK)
        status =
            folio_vllm06_copy_blocks(state->ctx, caches, num_caches, src_to_dists, num_pairs, run);
    folioi_free(&state->ctx->allocator, caches, bytes);
    return status;
}

static folio_status make_alibi_bias(const float *alibi_slopes, int64_t num_heads, int64_t seq_len,
                                    float *out)
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

static folio_status make_sliding_window_bias(int64_t seq_len, int64_t window_size, float *out)
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

/* One original's functions and its table. */
#define BACKEND(id, impl, metadata, builder, sizes)                                                \
    static const char *id##_name(void) { return id.name; }                                         \
    static const char *id##_impl(void) { return impl; }                                            \
    static const char *id##_metadata(void) { return metadata; }                                    \
    static const char *id##_state(void) { return "CommonAttentionState"; }                         \
    static const char *id##_builder(void) { return builder; }                                      \
    static const int32_t *id##_heads(int32_t *count)                                               \
    {                                                                                              \
        return count_of(sizes, (int32_t)(sizeof sizes / sizeof sizes[0]), count);                  \
    }                                                                                              \
    static const int32_t *id##_blocks(int32_t *count) { return count_of(block_sizes, 3, count); }  \
    static folio_status id##_split(const folio_vllm06_kv_cache *c, int64_t heads, int64_t size,    \
                                   folio_vllm06_cache_view *k, folio_vllm06_cache_view *v)         \
    {                                                                                              \
        return split_kv_cache(&id, c, heads, size, k, v);                                          \
    }                                                                                              \
    static folio_status id##_make_metadata(                                                        \
        folio_vllm06_state *s, const folio_vllm06_metadata_fields *f, folio_vllm06_metadata **out) \
    {                                                                                              \
        return folioi_vllm06_make_metadata(s, &id, f, out);                                        \
    }                                                                                              \
    static folio_status id##_make_impl(folio_vllm06_state *s, const folio_vllm06_impl_desc *d,     \
                                       folio_vllm06_impl **out)                                    \
    {                                                                                              \
        return folioi_vllm06_make_impl(s, &id, d, out);                                            \
    }                                                                                              \
    static const folio_vllm06_backend id##_backend = {sizeof(folio_vllm06_backend),                \
                                                      id##_name,                                   \
                                                      id##_impl,                                   \
                                                      id##_metadata,                               \
                                                      id##_state,                                  \
                                                      id##_builder,                                \
                                                      id##_heads,                                  \
                                                      id##_blocks,                                 \
                                                      get_kv_cache_shape,                          \
                                                      id##_split,                                  \
                                                      swap_blocks,                                 \
                                                      copy_blocks,                                 \
                                                      id##_make_metadata,                          \
                                                      make_alibi_bias,                             \
                                                      make_sliding_window_bias,                    \
                                                      id##_make_impl,                              \
                                                      folioi_vllm06_forward};

BACKEND(xformers, "XFormersImpl", "XFormersMetadata", "XFormersMetadataBuilder", head_sizes)
BACKEND(torch_sdpa, "TorchSDPABackendImpl", "TorchSDPAMetadata", "TorchSDPAMetadataBuilder",
        head_sizes)
BACKEND(torch_sdpa_ipex, "TorchSDPABackendImpl", "TorchSDPAMetadata", "TorchSDPAMetadataBuilder",
        torch_sdpa_ipex_head_sizes)
BACKEND(ipex, "IpexAttnBackendImpl", "IpexAttnMetadata", "CommonMetadataBuilder", head_sizes)

static const struct {
    const char *name;
    const folio_vllm06_backend *backend;
} backends[] = {
    {"xformers", &xformers_backend}, {"torch-sdpa", &torch_sdpa_backend},
    {"ipex", &ipex_backend},         {"ipex-attn", &ipex_backend},
    {"XFORMERS", &xformers_backend}, {"TORCH_SDPA", &torch_sdpa_backend},
    {"IPEX", &ipex_backend},         {"torch-sdpa-ipex", &torch_sdpa_ipex_backend},
};
enum { NUM_BACKENDS = sizeof backends / sizeof backends[0] };

const folio_vllm06_backend *folio_vllm06_backend_find(const char *name)
{
    for (int i = 0; name != NULL && i < NUM_BACKENDS; i++)
        if (strcmp(backends[i].name, name) == 0) return backends[i].backend;
    return NULL;
}
