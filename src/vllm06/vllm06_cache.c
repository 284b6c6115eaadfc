/* vllm06_cache.c: an engine's caches: their checks, their description for Folio, and blocks moved within and between
 * them. A state keeps the description of each cache that its layers use, because every step uses the same ones. */
#include "cache/kv_cache.h"
#include "core/tensor.h"
#include "vllm06/vllm06.h"

/* More caches than layers have; past it the descriptions are made anew, one after another. */
enum { MAX_KEPT = 512 };

folio_status folioi_vllm06_check_sizes(int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                                       int64_t head_size, const char *name, int64_t *block_elements)
{
    int64_t all;
    REQUIRE(num_blocks >= 1 && block_size >= 1 && num_kv_heads >= 1 && head_size >= 1 &&
                checked_mul(block_size, num_kv_heads, block_elements) &&
                checked_mul(*block_elements, head_size, block_elements) &&
                checked_mul(*block_elements, num_blocks, &all) && all <= INT64_MAX / 16,
            "%s: %lld blocks x %lld tokens x %lld kv heads x %lld is not a valid cache size", name,
            (long long)num_blocks, (long long)block_size, (long long)num_kv_heads,
            (long long)head_size);
    return FOLIO_OK;
}

folio_status folioi_vllm06_check_cache(const folio_vllm06_kv_cache *c, const char *name,
                                       folioi_vllm06_memory *out)
{
    REQUIRE(c != NULL, "%s is NULL", name);
    REQUIRE(c->key_cache != NULL, "%s: key_cache is NULL", name);
    int64_t elem = (int64_t)folio_dtype_size(c->dtype), elements = 0;
    REQUIRE(c->dtype != 0, "%s: dtype is 0; it must be given", name);
    REQUIRE(elem > 0, "%s: dtype %d is unknown", name, (int)c->dtype);
    TRY(folioi_vllm06_check_sizes(c->num_blocks, c->block_size, c->num_kv_heads, c->head_size, name,
                                  &elements));
    int64_t bytes = c->num_blocks * elements * elem;
    bool one = c->value_cache == NULL;
    REQUIRE((uint64_t)bytes * (one ? 2 : 1) <= c->bytes,
            "%s: %lld blocks x %d tokens x %d kv heads x %d of %s have %lld bytes%s; bytes is %llu",
            name, (long long)c->num_blocks, c->block_size, c->num_kv_heads, c->head_size,
            folio_dtype_name(c->dtype), (long long)(one ? 2 * bytes : bytes),
            one ? ", K and V in one allocation" : " each", (unsigned long long)c->bytes);
    uintptr_t k = (uintptr_t)c->key_cache, v = (uintptr_t)c->value_cache;
    REQUIRE(one || (v - k >= (uintptr_t)bytes && k - v >= (uintptr_t)bytes),
            "%s: key_cache and value_cache share memory", name);
    *out = (folioi_vllm06_memory){c->key_cache, one ? (char *)c->key_cache + bytes : c->value_cache,
                                  bytes, elements};
    return FOLIO_OK;
}

/* n caches as layers of one of Folio's; k and v: their memory, of `bytes` each. */
static folio_status wrap(folio_context *ctx, folio_kv_cache_desc d, void *const *k, void *const *v,
                         int64_t bytes, folio_kv_cache **out)
{
    folio_kv_memory m = FOLIO_WITH(folio_kv_memory, .k = k, .v = v, .k_bytes = (size_t)bytes,
                                   .v_bytes = (size_t)bytes);
    return folio_kv_cache_wrap(ctx, &d, &m, out);
}

static bool is_kept(const folioi_vllm06_kept *kept, const folio_vllm06_kv_cache *c,
                    folio_layout layout)
{
    const folio_vllm06_kv_cache *k = &kept->of;
    return k->key_cache == c->key_cache && k->value_cache == c->value_cache &&
           k->bytes == c->bytes && k->dtype == c->dtype && k->block_size == c->block_size &&
           k->num_kv_heads == c->num_kv_heads && k->head_size == c->head_size &&
           k->num_blocks == c->num_blocks && kept->layout == layout;
}

/* Layers come in the same order in every step: the one after the last is looked at first. */
folio_status folioi_vllm06_find_cache(folio_vllm06_state *state, const folio_vllm06_kv_cache *c,
                                      folio_layout layout, const char *name,
                                      const folioi_vllm06_kept **out)
{
    folioi_vllm06_kept *kept = state->kept.data;
    int64_t n = state->num_kept;
    for (int64_t i = 0; c != NULL && i < n; i++) {
        int64_t at = state->next_kept + i < n ? state->next_kept + i : state->next_kept + i - n;
        if (!is_kept(&kept[at], c, layout)) continue;
        state->next_kept = at + 1 < n ? at + 1 : 0;
        *out = &kept[at];
        return FOLIO_OK;
    }
    folioi_vllm06_memory m = {0};
    TRY(folioi_vllm06_check_cache(c, name, &m));
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = c->num_blocks, .num_layers = 1,
                   .block_size = c->block_size, .num_kv_heads = c->num_kv_heads,
                   .k_head_size = c->head_size, .dtype = c->dtype, .layout = layout);
    int64_t at = n < MAX_KEPT ? n : state->next_kept;
    TRY(folioi_array_reserve(&state->ctx->allocator, &state->kept, (at + 1) * (int64_t)sizeof *kept,
                             "a list of caches"));
    kept = (folioi_vllm06_kept *)state->kept.data + at;
    folio_kv_cache *cache;
    TRY(wrap(state->ctx, d, &m.k, &m.v, m.bytes, &cache));
    if (at == n) state->num_kept++;
    else folio_kv_cache_destroy(kept->cache);
    *kept = (folioi_vllm06_kept){*c, layout, m, cache};
    state->next_kept = at + 1 < state->num_kept ? at + 1 : 0;
    *out = kept;
    return FOLIO_OK;
}

void folioi_vllm06_drop_caches(folio_vllm06_state *state)
{
    folioi_vllm06_kept *kept = state->kept.data;
    for (int64_t i = 0; i < state->num_kept; i++) folio_kv_cache_destroy(kept[i].cache);
    folioi_array_free(&state->ctx->allocator, &state->kept);
}

/* Blocks move whole, so their interior does not matter: one token, of heads that a device copies well. */
static folio_status as_blocks(const folio_vllm06_kv_cache *c, const char *name,
                              const folioi_vllm06_memory *m, folio_kv_cache_desc *out)
{
    int64_t size = 8;
    while (size < 128 && m->block_elements % (2 * size) == 0) size *= 2;
    REQUIRE(m->block_elements % 8 == 0 && m->block_elements / size <= INT32_MAX,
            "%s: a block has %lld numbers, not a multiple of 8 below 2^34", name,
            (long long)m->block_elements);
    *out = FOLIO_WITH(folio_kv_cache_desc, .num_blocks = c->num_blocks, .num_layers = 1,
                      .block_size = 1, .num_kv_heads = (int32_t)(m->block_elements / size),
                      .k_head_size = (int32_t)size, .dtype = c->dtype,
                      .layout = FOLIO_LAYOUT_XPACKED_1);
    return FOLIO_OK;
}

/* Caches side by side whose blocks have the same size are layers of one: a device copies them by one launch. */
static folio_status copy_alike(folio_context *ctx, const folio_vllm06_kv_cache *caches, int64_t n,
                               void **memory, const folio_block_pair *pairs, int64_t num_pairs,
                               const folio_run *run)
{
    folio_kv_cache *kv;
    folio_kv_cache_desc d;
    folioi_vllm06_memory m = {0};
    for (int64_t i = 0; i < n; i++) {
        TRY(folioi_vllm06_check_cache(&caches[i], "kv_caches", &m));
        memory[i] = m.k;
        memory[n + i] = m.v;
    }
    TRY(as_blocks(caches, "kv_caches", &m, &d));
    d.num_layers = (int32_t)n;
    TRY(wrap(ctx, d, memory, memory + n, m.bytes, &kv));
    folio_status status = folio_kv_cache_copy_blocks(kv, kv, pairs, num_pairs, run);
    folio_kv_cache_destroy(kv);
    return status;
}

static bool same_blocks(const folio_vllm06_kv_cache *a, const folio_vllm06_kv_cache *b)
{
    return a->dtype == b->dtype && a->block_size == b->block_size &&
           a->num_kv_heads == b->num_kv_heads && a->head_size == b->head_size;
}

folio_status folio_vllm06_copy_blocks(folio_vllm06_state *state,
                                      const folio_vllm06_kv_cache *caches, int64_t num_caches,
                                      const folio_block_pair *pairs, int64_t num_pairs,
                                      const folio_run *run)
{
    REQUIRE(state != NULL, "copy_blocks: state is NULL");
    REQUIRE(num_caches >= 0 && num_caches <= INT32_MAX && (num_caches == 0 || caches != NULL),
            "kv_caches is NULL or num_caches is outside [0, 2147483647]");
    for (int64_t i = 1; i < num_caches; i++)
        REQUIRE(caches[i].num_blocks == caches[0].num_blocks,
                "kv_caches[%lld] has %lld blocks, kv_caches[0] %lld", (long long)i,
                (long long)caches[i].num_blocks, (long long)caches[0].num_blocks);
    void *memory;
    int64_t bytes = 2 * num_caches * (int64_t)sizeof(void *);
    TRY(folioi_alloc(&state->ctx->allocator, bytes, "a list of caches", &memory));
    folio_status status = FOLIO_OK;
    /* Once without pairs: a bad cache is refused before a block of another is written. */
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0, n; i < num_caches && status == FOLIO_OK; i += n) {
            for (n = 1; i + n < num_caches && same_blocks(&caches[i], &caches[i + n]);) n++;
            status =
                copy_alike(state->ctx, caches + i, n, memory, pairs, pass ? num_pairs : 0, run);
        }
    folioi_free(&state->ctx->allocator, memory, bytes);
    return status;
}

/* Caches that are not the same: no block of one may be a part of the other's. */
static folio_status check_pair(const folio_vllm06_kv_cache *src, const folioi_vllm06_memory *from,
                               const folio_vllm06_kv_cache *dst, const folioi_vllm06_memory *to)
{
    const folioi_place places[] = {{"dst key_cache", folioi_span_of(to->k, to->bytes)},
                                   {"dst value_cache", folioi_span_of(to->v, to->bytes)},
                                   {"src key_cache", folioi_span_of(from->k, from->bytes)},
                                   {"src value_cache", folioi_span_of(from->v, from->bytes)}};
    TRY(folioi_check_apart(places, 2, sizeof places / sizeof *places));
    REQUIRE(src->dtype == dst->dtype, "swap_blocks: dtypes differ, %s and %s",
            folio_dtype_name(src->dtype), folio_dtype_name(dst->dtype));
    REQUIRE(same_blocks(src, dst),
            "swap_blocks: geometries differ: block size %d, %d kv heads, head size %d and block "
            "size %d, %d kv heads, head size %d",
            src->block_size, src->num_kv_heads, src->head_size, dst->block_size, dst->num_kv_heads,
            dst->head_size);
    return FOLIO_OK;
}

folio_status folio_vllm06_swap_blocks(folio_vllm06_state *state, const folio_vllm06_kv_cache *src,
                                      const folio_vllm06_kv_cache *dst,
                                      const folio_block_pair *pairs, int64_t num_pairs,
                                      const folio_run *run)
{
    REQUIRE(state != NULL, "swap_blocks: state is NULL");
    folioi_vllm06_memory from = {0}, to = {0};
    folio_kv_cache_desc d;
    folio_kv_cache *a, *b;
    TRY(folioi_vllm06_check_cache(src, "src", &from));
    TRY(folioi_vllm06_check_cache(dst, "dst", &to));
    bool one = from.k == to.k && from.v == to.v && from.bytes == to.bytes && same_blocks(src, dst);
    if (one) return folio_vllm06_copy_blocks(state, src, 1, pairs, num_pairs, run);
    TRY(check_pair(src, &from, dst, &to));
    TRY(as_blocks(src, "src", &from, &d));
    TRY(wrap(state->ctx, d, &from.k, &from.v, from.bytes, &a));
    d.num_blocks = dst->num_blocks;
    folio_status status = wrap(state->ctx, d, &to.k, &to.v, to.bytes, &b);
    if (status == FOLIO_OK) status = folio_kv_cache_copy_blocks(a, b, pairs, num_pairs, run);
    folio_kv_cache_destroy(a);
    folio_kv_cache_destroy(b);
    return status;
}
