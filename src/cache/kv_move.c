/* kv_move.c: the calls that move K and V: write, gather, copy, pack, unpack, with their checks. */
#include "cache/kv_cache.h"
#include "cache/kv_rows.h"
#include "core/dtype.h"
#include "core/rotary.h"
#include "core/slotset.h"
#include "core/tensor.h"

#include <string.h>

/* Numbers in [low, limit), none twice (unless `repeats`). */
static folio_status check_numbers(const folio_kv_cache *cache, const int64_t *numbers, int64_t n,
                                  int64_t stride, int64_t low, int64_t limit, bool repeats,
                                  const char *name)
{
    REQUIRE(n >= 0, "%s: their number is %lld; it must be at least 0", name, (long long)n);
    REQUIRE(n == 0 || numbers != NULL, "%s is NULL", name);
    REQUIRE_ALIGNED(numbers, "%s", name);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(numbers[i * stride] >= low && numbers[i * stride] < limit,
                "%s[%lld] = %lld is outside [%lld, %lld)", name, (long long)i,
                (long long)numbers[i * stride], (long long)low, (long long)limit);
    if (repeats) return FOLIO_OK;
    folioi_slotset set = {{0}, 0, 0};
    TRY(folioi_slotset_reserve(&cache->ctx->allocator, &set, n));
    int64_t twice = -1;
    for (int64_t i = 0; i < n && twice < 0; i++)
        if (numbers[i * stride] >= 0 && !folioi_slotset_insert(&set, numbers[i * stride]))
            twice = i;
    folioi_slotset_free(&cache->ctx->allocator, &set);
    REQUIRE(twice < 0, "%s[%lld] = %lld is written twice", name, (long long)twice,
            (long long)numbers[twice < 0 ? 0 : twice * stride]);
    return FOLIO_OK;
}

folio_status folioi_kv_check_blocks(const folio_kv_cache *cache, const int64_t *blocks, int64_t n,
                                    bool repeats)
{
    return check_numbers(cache, blocks, n, 1, 0, cache->format.desc.num_blocks, repeats, "blocks");
}

static int64_t num_slots(const folio_kv_cache *cache)
{
    return cache->format.desc.num_blocks * cache->format.desc.block_size;
}

static folio_status resolve_scales(const folio_kv_cache *cache, folioi_kv_tensors *t)
{
    const folio_kv_cache_desc *d = &cache->format.desc;
    return folioi_scales_resolve(cache->ctx, d->dtype, d->num_kv_heads, d->v_in_k, &t->k_scale,
                                 &t->k_head_scales, &t->v_scale, &t->v_head_scales);
}

/* Rows and scales share no byte with the cache; nor with each other, where the call writes rows. */
static folio_status check_rows_apart(const folio_kv_cache *cache, const folioi_kv_tensors *t,
                                     bool written)
{
    const folio_kv_cache_desc *d = &cache->format.desc;
    int64_t heads = d->num_kv_heads, bytes = heads * (int64_t)sizeof(float);
    folioi_place places[] = {{"k", folioi_tensor_span(&t->k, heads, d->k_head_size)},
                             {"v", folioi_tensor_span(&t->v, heads, d->v_head_size)},
                             {"k_head_scales", folioi_span_of(t->k_head_scales, bytes)},
                             {"v_head_scales", folioi_span_of(t->v_head_scales, bytes)}};
    if (written) TRY(folioi_check_apart(places, 2, 4));
    return folioi_kv_cache_check_apart(cache, places, 4);
}

/* How k rotates on its way; positions lie beside the slots. */
static folio_status take_rotary(const folio_kv_cache *cache, const folio_kv_write *w,
                                folioi_kv_tensors *t)
{
    REQUIRE((w->rotary == NULL) == (w->positions == NULL) || w->k.tokens == 0,
            "write: %s given without %s", w->rotary == NULL ? "positions are" : "rotary is",
            w->rotary == NULL ? "rotary" : "positions");
    if (w->rotary == NULL) return FOLIO_OK;
    const folio_kv_cache_desc *d = &cache->format.desc;
    TRY(folioi_rotary_check(w->rotary, cache->ctx, d->k_head_size, d->v_in_k ? d->v_head_size : 0));
    REQUIRE_ALIGNED(w->positions, "positions");
    int64_t limit = w->rotary->rotation.num_positions;
    for (int64_t i = 0; i < w->k.tokens; i++)
        REQUIRE(w->slots[i] < 0 || (w->positions[i] >= 0 && w->positions[i] < limit),
                "positions[%lld] = %lld is outside [0, %lld), the positions of the rotary",
                (long long)i, (long long)w->positions[i], (long long)limit);
    t->rotation = w->rotary->rotation;
    t->positions = w->positions;
    return FOLIO_OK;
}

/* distinct: no slot stands twice, and nobody has to look. */
static folio_status write_rows(folio_kv_cache *cache, int32_t layer, const folio_kv_write *write,
                               const folio_run *run, bool distinct)
{
    folio_kv_write w;
    folio_run r;
    TRY(folioi_kv_cache_check_layer(cache, layer));
    STRUCT_IN(w, write, "folio_kv_write");
    TRY(folioi_run_in(cache->ctx, run, &r));
    const folio_kv_cache_desc *d = &cache->format.desc;
    folioi_kv_tensors t = {.k = w.k,
                           .v = w.v,
                           .k_scale = w.k_scale,
                           .v_scale = w.v_scale,
                           .k_head_scales = w.k_head_scales,
                           .v_head_scales = w.v_head_scales};
    TRY(resolve_scales(cache, &t));
    REQUIRE(t.k.data != NULL || t.k.tokens == 0, "k: data is NULL");
    REQUIRE(t.v.data != NULL || t.v.tokens == 0, "v: data is NULL");
    TRY(folioi_tensor_resolve(&t.k, "k", 0, d->num_kv_heads, d->k_head_size, t.k.tokens));
    if (d->v_in_k) TRY(folioi_check_no_v(&t.v));
    else TRY(folioi_tensor_resolve(&t.v, "v", 0, d->num_kv_heads, d->v_head_size, t.k.tokens));
    TRY(check_numbers(cache, w.slots, t.k.tokens, 1, -1, num_slots(cache), distinct, "slots"));
    TRY(check_rows_apart(cache, &t, false));
    TRY(take_rotary(cache, &w, &t));
    return cache->ctx->backend->write(cache->ctx, &cache->layers[layer], &t, w.slots, t.k.tokens,
                                      r.stream);
}

folio_status folio_kv_cache_write(folio_kv_cache *cache, int32_t layer, const folio_kv_write *write,
                                  const folio_run *run)
{
    return write_rows(cache, layer, write, run, false);
}

folio_status folioi_kv_cache_write_distinct(folio_kv_cache *cache, int32_t layer,
                                            const folio_kv_write *write, const folio_run *run)
{
    return write_rows(cache, layer, write, run, true);
}

folio_status folio_kv_cache_gather(const folio_kv_cache *cache, int32_t layer,
                                   const folio_kv_gather *gather, const folio_run *run)
{
    folio_kv_gather g;
    folio_run r;
    TRY(folioi_kv_cache_check_layer(cache, layer));
    STRUCT_IN(g, gather, "folio_kv_gather");
    TRY(folioi_run_in(cache->ctx, run, &r));
    const folio_kv_cache_desc *d = &cache->format.desc;
    folioi_kv_tensors t = {.k = g.k,
                           .v = g.v,
                           .k_scale = g.k_scale,
                           .v_scale = g.v_scale,
                           .k_head_scales = g.k_head_scales,
                           .v_head_scales = g.v_head_scales};
    TRY(resolve_scales(cache, &t));
    TRY(check_numbers(cache, g.slots, g.num_slots, 1, -1, num_slots(cache), true, "slots"));
    REQUIRE(t.k.data != NULL || t.v.data != NULL || g.num_slots == 0,
            "k and v: data of both is NULL");
    if (t.k.data != NULL)
        TRY(folioi_tensor_resolve(&t.k, "k", 0, d->num_kv_heads, d->k_head_size, g.num_slots));
    if (t.v.data != NULL)
        TRY(folioi_tensor_resolve(&t.v, "v", 0, d->num_kv_heads, d->v_head_size, g.num_slots));
    TRY(check_rows_apart(cache, &t, true));
    return cache->ctx->backend->gather(cache->ctx, &cache->layers[layer], &t, g.slots, g.num_slots,
                                       r.stream);
}

static folio_status check_pairs(const folio_kv_cache *src, const folio_kv_cache *dst,
                                const folio_block_pair *pairs, int64_t n)
{
    REQUIRE(n >= 0, "num_pairs is %lld; it must be at least 0", (long long)n);
    REQUIRE(n == 0 || pairs != NULL, "pairs is NULL");
    const int64_t *flat = (const int64_t *)pairs;
    TRY(check_numbers(src, flat, n, 2, 0, src->format.desc.num_blocks, true, "pairs (from)"));
    return check_numbers(dst, flat ? flat + 1 : NULL, n, 2, 0, dst->format.desc.num_blocks, false,
                         "pairs (to)");
}

/* Blocks as stored, by the device that has one of the two caches, else by the host. */
static folio_status move_pairs(const folio_context *from_ctx, const folioi_kv_layer *from,
                               const folio_context *to_ctx, const folioi_kv_layer *to,
                               int32_t num_layers, const folio_block_pair *pairs, int64_t n,
                               void *stream)
{
    const folio_context *ctx = from_ctx->backend->on_device ? from_ctx : to_ctx;
    return ctx->backend->move_blocks(ctx, from, to, num_layers, pairs, n, stream);
}

/* Inside one cache the order of the copies must not matter. */
static folio_status check_read_or_written(const folio_kv_cache *cache,
                                          const folio_block_pair *pairs, int64_t n)
{
    folioi_slotset read = {{0}, 0, 0};
    TRY(folioi_slotset_reserve(&cache->ctx->allocator, &read, 2 * n));
    int64_t both = -1;
    for (int64_t i = 0; i < n; i++) folioi_slotset_insert(&read, pairs[i].from);
    for (int64_t i = 0; i < n && both < 0; i++)
        if (!folioi_slotset_insert(&read, pairs[i].to)) both = i;
    folioi_slotset_free(&cache->ctx->allocator, &read);
    REQUIRE(both < 0, "pairs[%lld]: block %lld is both read and written", (long long)both,
            (long long)pairs[both < 0 ? 0 : both].to);
    return FOLIO_OK;
}

folio_status folio_kv_cache_copy_blocks(const folio_kv_cache *src, folio_kv_cache *dst,
                                        const folio_block_pair *pairs, int64_t num_pairs,
                                        const folio_run *run)
{
    folio_run r;
    REQUIRE(src != NULL, "copy_blocks: src is NULL");
    REQUIRE(dst != NULL, "copy_blocks: dst is NULL");
    TRY(folioi_run_in(src->ctx->backend->on_device ? src->ctx : dst->ctx, run, &r));
    const folio_kv_cache_desc *a = &src->format.desc, *b = &dst->format.desc;
    REQUIRE(a->dtype == b->dtype, "copy_blocks: dtypes differ, %s and %s",
            folio_dtype_name(a->dtype), folio_dtype_name(b->dtype));
    REQUIRE(a->v_in_k == b->v_in_k, "copy_blocks: v_in_k is %d in src and %d in dst", a->v_in_k,
            b->v_in_k);
    REQUIRE(
        a->num_layers == b->num_layers && a->block_size == b->block_size &&
            a->num_kv_heads == b->num_kv_heads && a->k_head_size == b->k_head_size &&
            a->v_head_size == b->v_head_size,
        "copy_blocks: geometries differ: %d layers, block size %d, %d kv heads, head sizes %d, %d "
        "and %d layers, block size %d, %d kv heads, head sizes %d, %d",
        a->num_layers, a->block_size, a->num_kv_heads, a->k_head_size, a->v_head_size,
        b->num_layers, b->block_size, b->num_kv_heads, b->k_head_size, b->v_head_size);
    TRY(check_pairs(src, dst, pairs, num_pairs));
    if (src == dst) TRY(check_read_or_written(src, pairs, num_pairs));
    return move_pairs(src->ctx, src->layers, dst->ctx, dst->layers, a->num_layers, pairs, num_pairs,
                      r.stream);
}

/* The caller's rows as a cache of their own: layout NHD, as many blocks as are asked for. */
static folio_status rows_as_layer(const folio_kv_cache *cache, int32_t layer,
                                  const folio_kv_rows *rows, bool unique, folio_kv_rows *r,
                                  folioi_kv_format *format, folioi_kv_layer *as)
{
    TRY(folioi_kv_cache_check_layer(cache, layer));
    STRUCT_IN(*r, rows, "folio_kv_rows");
    TRY(folioi_kv_check_blocks(cache, r->blocks, r->num_blocks, !unique));
    size_t align = folio_dtype_size(cache->format.desc.dtype);
    bool int8 = cache->format.desc.dtype == FOLIO_INT8;
    if (cache->format.desc.v_in_k) {
        REQUIRE(r->v == NULL && r->v_scales == NULL,
                "rows: the cache has v_in_k and stores no V; v and v_scales must be NULL");
        r->v = r->k; /* as in the cache's layers */
        r->v_scales = r->k_scales;
    }
    if (r->num_blocks > 0) {
        REQUIRE(r->k != NULL && r->v != NULL, "rows: k or v is NULL");
        REQUIRE((uintptr_t)r->k % align == 0 && (uintptr_t)r->v % align == 0,
                "rows: k or v is not aligned to %zu bytes", align);
        REQUIRE(!int8 || (r->k_scales != NULL && r->v_scales != NULL),
                "rows: an int8 cache needs k_scales and v_scales");
        REQUIRE(!int8 || ((uintptr_t)r->k_scales % 4 == 0 && (uintptr_t)r->v_scales % 4 == 0),
                "rows: k_scales or v_scales is not aligned to 4 bytes");
    }
    folio_kv_cache_desc desc = cache->format.desc;
    desc.num_blocks = max_i64(r->num_blocks, 1);
    desc.num_layers = 1;
    desc.layout = FOLIO_LAYOUT_NHD;
    TRY(folioi_kv_format_init(&desc, false, format));
    folio_kv_strides scales = {(int64_t)desc.block_size * desc.num_kv_heads, desc.num_kv_heads, 1};
    if (int8) {
        folioi_array_restride(&format->k_scales, &format->k_scales_at, &scales, false);
        folioi_array_restride(&format->v_scales, &format->v_scales_at, &scales, false);
    }
    *as =
        (folioi_kv_layer){r->k, r->v, int8 ? r->k_scales : NULL, int8 ? r->v_scales : NULL, format};
    return FOLIO_OK;
}

/* As check_rows_apart, for rows of whole blocks. */
static folio_status check_blocks_apart(const folio_kv_cache *cache, const folioi_kv_layer *as,
                                       int64_t num_blocks, bool written)
{
    const folioi_kv_format *f = as->format;
    if (num_blocks == 0) return FOLIO_OK;
    folioi_place places[] = {{"k", folioi_span_of(as->k, f->k.bytes)},
                             {"v", folioi_span_of(as->v, f->v.bytes)},
                             {"k_scales", folioi_span_of(as->k_scales, f->k_scales.bytes)},
                             {"v_scales", folioi_span_of(as->v_scales, f->v_scales.bytes)}};
    if (written) TRY(folioi_check_apart(places, 4, 4));
    return folioi_kv_cache_check_apart(cache, places, 4);
}

/* Block i of the rows and block blocks[i] of the cache, in either direction. */
static folio_status move_listed(const folio_kv_cache *cache, const folioi_kv_layer *from,
                                const folioi_kv_layer *to, const folio_kv_rows *r, bool in,
                                void *stream)
{
    if (r->num_blocks == 0) return FOLIO_OK;
    void *memory;
    int64_t bytes = r->num_blocks * 2 * (int64_t)sizeof(int64_t);
    TRY(folioi_alloc(&cache->ctx->allocator, bytes, "pairs of blocks", &memory));
    folio_block_pair *pairs = memory;
    for (int64_t i = 0; i < r->num_blocks; i++) {
        pairs[i].from = in ? i : r->blocks[i];
        pairs[i].to = in ? r->blocks[i] : i;
    }
    folio_status status =
        move_pairs(cache->ctx, from, cache->ctx, to, 1, pairs, r->num_blocks, stream);
    folioi_free(&cache->ctx->allocator, memory, bytes);
    return status;
}

folio_status folio_kv_cache_pack(folio_kv_cache *cache, int32_t layer, const folio_kv_rows *rows,
                                 const folio_run *run)
{
    folio_kv_rows r;
    folio_run where;
    folioi_kv_format format;
    folioi_kv_layer as;
    TRY(rows_as_layer(cache, layer, rows, true, &r, &format, &as));
    TRY(folioi_run_in(cache->ctx, run, &where));
    TRY(check_blocks_apart(cache, &as, r.num_blocks, false));
    return move_listed(cache, &as, &cache->layers[layer], &r, true, where.stream);
}

folio_status folio_kv_cache_unpack(const folio_kv_cache *cache, int32_t layer,
                                   const folio_kv_rows *rows, const folio_run *run)
{
    folio_kv_rows r;
    folio_run where;
    folioi_kv_format format;
    folioi_kv_layer as;
    TRY(rows_as_layer(cache, layer, rows, false, &r, &format, &as));
    TRY(folioi_run_in(cache->ctx, run, &where));
    TRY(check_blocks_apart(cache, &as, r.num_blocks, true));
    return move_listed(cache, &cache->layers[layer], &as, &r, false, where.stream);
}
