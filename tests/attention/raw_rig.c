/* raw_rig.c: see raw_rig.h. */
#include "attention/raw_rig.h"
#include "kit/layer.h"

#include <stdlib.h>
#include <sys/mman.h>

static void *zeros(size_t count, size_t size)
{
    void *p = calloc(count + 1, size);
    if (p == NULL) abort();
    return p;
}

/* ----------------------------------------------------------------------------------------- keys */

raw_keys raw_keys_make(folio_dtype dtype, int32_t heads, int32_t k_size, int32_t v_size)
{
    raw_keys keys = {.dtype = dtype, .heads = heads, .k_size = k_size, .v_size = v_size};
    size_t rows = (size_t)RAW_KEYS * (size_t)heads, elem = folio_dtype_size(dtype);
    keys.k = zeros(rows * (size_t)k_size, elem);
    keys.v = zeros(rows * (size_t)v_size, elem);
    keys.k_scales = zeros(rows, sizeof(float));
    keys.v_scales = zeros(rows, sizeof(float));
    for (size_t i = 0; i < rows; i++) keys.k_scales[i] = keys.v_scales[i] = 1.0f;
    return keys;
}

void raw_keys_free(raw_keys *keys)
{
    free(keys->k);
    free(keys->v);
    free(keys->k_scales);
    free(keys->v_scales);
}

static uint32_t random_bits(folio_dtype dtype, uint64_t random)
{
    if (dtype == FOLIO_INT8) return (uint32_t)(random & 255u);
    /* 16ths up to 2, with few bits, so that they are exact in every type */
    double x = (double)(random % 16u) * ((random & 16u) ? 0.125 : 0.0625);
    return kit_encode(dtype, (random & 32u) ? -x : x);
}

void raw_keys_random(raw_keys *keys, uint64_t seed)
{
    uint32_t bits[64];
    for (uint32_t i = 0; i < 64; i++) bits[i] = random_bits(keys->dtype, i);
    int64_t rows = (int64_t)RAW_KEYS * keys->heads;
    for (int part = 0; part < 2; part++) {
        int64_t count = rows * (part ? keys->v_size : keys->k_size);
        for (int64_t i = 0; i < count; i++) {
            uint64_t random = support_bits(seed + (uint64_t)part, (uint64_t)i);
            kit_set(keys->dtype, part ? keys->v : keys->k, i,
                    keys->dtype == FOLIO_INT8 ? (uint32_t)(random & 255u) : bits[random % 64u]);
        }
    }
    for (int64_t i = 0; i < rows && keys->dtype == FOLIO_INT8; i++) {
        keys->k_scales[i] = 0.01f + 0.004f * support_random(seed + 2, (uint64_t)i);
        keys->v_scales[i] = 0.01f + 0.004f * support_random(seed + 3, (uint64_t)i);
    }
}

/* ---------------------------------------------------------------------------------------- cache */

/* Memory of the cache's own, before which nothing may be read: there FOLIO_NO_BLOCK would lie. */
static void *take_memory(raw_cache *c, int64_t bytes)
{
    const size_t before = (size_t)4 << 20, page = 4096;
    c->bytes = before + ((size_t)bytes + page - 1) / page * page;
    c->memory = mmap(NULL, c->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->memory == MAP_FAILED) abort();
    char *at = (char *)c->memory + before;
    if (mprotect(at, c->bytes - before, PROT_READ | PROT_WRITE) != 0) abort();
    return at;
}

/* K rows [block][N][H][Dk + 3], V rows [block][N][H][Dv + 5], scales [block][N][H + 1]. */
static void wrap_strided(folio_context *ctx, raw_cache *c)
{
    const folio_kv_cache_desc *d = &c->desc;
    int64_t tokens = d->num_blocks * d->block_size, N = d->block_size, H = d->num_kv_heads;
    int64_t elem = (int64_t)folio_dtype_size(d->dtype);
    int64_t k_row = d->k_head_size + 3, v_row = d->v_head_size + 5;
    int64_t k_bytes = (tokens * H * k_row * elem + 63) / 64 * 64;
    int64_t v_bytes = (tokens * H * v_row * elem + 63) / 64 * 64;
    int64_t s_bytes = tokens * (H + 1) * 4;
    char *at = take_memory(c, k_bytes + v_bytes + 2 * s_bytes);
    void *k = at, *v = at + k_bytes;
    float *ks = (float *)(void *)(at + k_bytes + v_bytes);
    float *vs = (float *)(void *)(at + k_bytes + v_bytes + s_bytes);
    folio_kv_memory memory =
        FOLIO_WITH(folio_kv_memory, .k = &k, .v = &v, .k_bytes = (size_t)k_bytes,
                   .v_bytes = (size_t)v_bytes, .k_strides = {N * H * k_row, H * k_row, k_row},
                   .v_strides = {N * H * v_row, H * v_row, v_row});
    if (d->dtype == FOLIO_INT8) {
        memory.k_scales = &ks, memory.v_scales = &vs;
        memory.k_scales_bytes = memory.v_scales_bytes = (size_t)s_bytes;
        memory.k_scales_strides = memory.v_scales_strides =
            (folio_kv_strides){N * (H + 1), H + 1, 1};
    }
    CHECK_OK(folio_kv_cache_wrap(ctx, d, &memory, &c->cache));
}

/* Blocks [first, first + count) of the table. */
static void pack(raw_cache *c, const raw_keys *keys, int64_t first, int64_t count)
{
    int64_t blocks[RAW_KEYS], row = first * c->desc.block_size * keys->heads;
    int64_t elem = (int64_t)folio_dtype_size(keys->dtype);
    for (int64_t i = 0; i < count; i++) blocks[i] = c->table[first + i];
    folio_kv_rows rows =
        FOLIO_WITH(folio_kv_rows, .k = keys->k + row * keys->k_size * elem,
                   .v = keys->v + row * keys->v_size * elem, .k_scales = keys->k_scales + row,
                   .v_scales = keys->v_scales + row, .num_blocks = count, .blocks = blocks);
    CHECK_OK(folio_kv_cache_pack(c->cache, 0, &rows, NULL));
}

bool raw_cache_make(folio_context *ctx, const raw_keys *keys, folio_layout layout,
                    int32_t block_size, raw_cache *c)
{
    int32_t blocks = RAW_KEYS / block_size;
    *c = (raw_cache){.desc = {.struct_size = sizeof c->desc,
                              .num_blocks = blocks + 2,
                              .num_layers = 1,
                              .block_size = block_size,
                              .num_kv_heads = keys->heads,
                              .k_head_size = keys->k_size,
                              .v_head_size = keys->v_size,
                              .dtype = keys->dtype,
                              .layout = layout}};
    if (layout == FOLIO_LAYOUT_STRIDED) wrap_strided(ctx, c);
    else CHECK_OK(folio_kv_cache_create(ctx, &c->desc, &c->cache));
    if (c->cache == NULL) return false;
    /* the first and the last block are nobody's, and NaN; the others come in no order */
    kit_poison_cache(c->cache);
    int64_t order[RAW_KEYS];
    support_shuffle(order, blocks, 11);
    for (int32_t i = 0; i < blocks; i++) c->table[i] = 1 + (int32_t)order[i];
    pack(c, keys, 0, blocks);
    return true;
}

void raw_cache_part_scales(folio_context *ctx, const raw_keys *keys, raw_cache *c)
{
    const folio_kv_cache_desc *d = &c->desc;
    int64_t N = d->block_size, H = d->num_kv_heads;
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    CHECK_OK(folio_kv_cache_get_shape("cpu", d, &shape));
    size_t bytes = (size_t)(d->num_blocks * N * (H + 1) * 4);
    folio_kv_cache_destroy(c->cache);
    c->cache = NULL;
    void *k = take_memory(c, shape.layer_bytes + 2 * (int64_t)bytes);
    float *ks = (float *)(void *)((char *)k + shape.layer_bytes);
    float *vs = (float *)(void *)((char *)k + shape.layer_bytes + bytes);
    folio_kv_strides strides = {N * (H + 1), H + 1, 1};
    folio_kv_memory memory =
        FOLIO_WITH(folio_kv_memory, .k = &k, .k_bytes = (size_t)shape.layer_bytes, .k_scales = &ks,
                   .v_scales = &vs, .k_scales_bytes = bytes, .v_scales_bytes = bytes,
                   .k_scales_strides = strides, .v_scales_strides = strides);
    CHECK_OK(folio_kv_cache_wrap(ctx, d, &memory, &c->cache));
    if (c->cache != NULL) pack(c, keys, 0, RAW_KEYS / N);
}

void raw_cache_renew(raw_cache *c, const raw_keys *keys, int64_t key)
{
    pack(c, keys, key / c->desc.block_size, 1);
}

void raw_cache_free(raw_cache *c)
{
    folio_kv_cache_destroy(c->cache);
    if (c->memory != NULL) munmap(c->memory, c->bytes);
}

/* ----------------------------------------------------------------------------------------- call */

int64_t raw_rows(const raw_call *call)
{
    int64_t rows = 0;
    for (int64_t s = 0; s < call->num_seqs; s++) rows += call->seqs[s].query_len;
    return rows;
}

/* The layer with the call's sequences in its batch, and its plan made for them. */
static bool open_layer(folio_context *ctx, const raw_call *call, const raw_cache *cache,
                       kit_layer *l)
{
    int32_t block_size = cache != NULL ? cache->desc.block_size : 16;
    int64_t blocks = 0;
    for (int64_t s = 0; s < call->num_seqs; s++)
        blocks += (call->seqs[s].seq_len + block_size - 1) / block_size;
    /* no room to spare: what is read past the last table is past the memory */
    CHECK_OK(folio_attention_create(ctx, &call->desc, &l->attention));
    if (l->attention == NULL) return false;
    CHECK_OK(KIT_LAYER_OPEN(ctx, l, .block_size = block_size, .max_seqs = call->num_seqs,
                            .max_query_tokens = raw_rows(call), .max_seq_len = RAW_KEYS,
                            .batch_blocks = cache != NULL ? blocks : 0));
    int64_t nowhere[RAW_KEYS]; /* the sequences share their blocks: nothing is stored */
    for (int i = 0; i < RAW_KEYS; i++) nowhere[i] = -1;
    for (int64_t s = 0; l->plan != NULL && s < call->num_seqs; s++) {
        const raw_seq *seq = &call->seqs[s];
        folio_batch_seq added =
            FOLIO_WITH(folio_batch_seq, .query_len = seq->query_len, .seq_len = seq->seq_len,
                       .padding = seq->seq_len == 0, .slots = cache != NULL ? nowhere : NULL,
                       .causality = seq->causality);
        int32_t table[RAW_KEYS];
        if (cache != NULL) {
            added.num_blocks = (seq->seq_len + block_size - 1) / block_size;
            memcpy(table, cache->table, sizeof table);
            int64_t begin = seq->seq_len - seq->query_len - call->desc.window_left;
            for (int64_t b = 0; call->release && (b + 1) * block_size <= begin; b++)
                table[b] = FOLIO_NO_BLOCK;
            added.block_table = table;
        }
        CHECK_OK(folio_batch_add(l->batch, &added));
    }
    if (l->plan != NULL) CHECK_OK(folio_plan_update(l->plan, l->batch, NULL));
    return l->plan != NULL;
}

static support_buffer make_queries(const raw_call *call)
{
    folio_dtype dtype = call->desc.dtype;
    uint32_t bits[256];
    for (int i = 0; i < 256; i++) bits[i] = kit_encode(dtype, (i - 128) / 64.0);
    int64_t count = raw_rows(call) * call->desc.num_heads * call->desc.k_head_size;
    support_buffer q = support_buffer_make((size_t)count * folio_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) kit_set(dtype, q.data, i, bits[call->q[i] + 128]);
    return q;
}

/* This step's rows of K or V, in q's type. */
static support_buffer make_given(const raw_call *call, const unsigned char *from, int64_t size)
{
    folio_dtype dtype = call->desc.dtype, type = call->keys->dtype;
    int64_t row = call->keys->heads * size, to = 0;
    support_buffer given =
        support_buffer_make((size_t)(raw_rows(call) * row) * folio_dtype_size(dtype));
    for (int64_t s = 0; s < call->num_seqs; s++) {
        const raw_seq *seq = &call->seqs[s];
        int64_t first = (seq->seq_len - seq->query_len) * row;
        for (int64_t i = 0; i < seq->query_len * row; i++) {
            uint32_t bits = kit_get(type, from, first + i);
            if (type != dtype) bits = kit_encode(dtype, kit_decode(type, bits));
            kit_set(dtype, given.data, to++, bits);
        }
    }
    return given;
}

bool raw_run(folio_context *ctx, const raw_call *call, const raw_cache *cache, raw_result *r)
{
    kit_layer l = {.cache = cache ? cache->cache : NULL};
    int64_t rows = raw_rows(call), heads = call->desc.num_heads;
    size_t out_row = (size_t)(heads * call->desc.v_head_size) * folio_dtype_size(call->desc.dtype);
    *r = (raw_result){.rows = rows, .row_bytes = out_row, .lse_bytes = (size_t)heads * 4};
    r->out = support_buffer_make((size_t)rows * r->row_bytes);
    r->lse = support_buffer_make((size_t)rows * r->lse_bytes);
    folio_tensors t = call->t;
    support_buffer q = make_queries(call), k = {0}, v = {0};
    t.struct_size = sizeof t;
    t.q = (folio_tensor){.data = q.data, .dtype = call->desc.dtype, .tokens = rows};
    t.out = (folio_tensor){.data = r->out.data, .dtype = call->desc.dtype, .tokens = rows};
    t.lse = r->lse.data;
    if (cache == NULL || (t.flags & FOLIO_KV_APPEND)) {
        k = make_given(call, call->keys->k, call->keys->k_size);
        v = make_given(call, call->keys->v, call->keys->v_size);
        t.k = (folio_tensor){.data = k.data, .dtype = call->desc.dtype, .tokens = rows};
        t.v = (folio_tensor){.data = v.data, .dtype = call->desc.dtype, .tokens = rows};
    }
    folio_status status = FOLIO_ERR_ARGUMENT;
    if (open_layer(ctx, call, cache, &l)) {
        status = folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL);
        CHECK_MSG(status == FOLIO_OK, "%s", folio_last_error());
    }
    l.cache = NULL; /* the caller's */
    kit_layer_close(&l);
    support_buffer_free(&q);
    support_buffer_free(&k);
    support_buffer_free(&v);
    return status == FOLIO_OK;
}

bool raw_rows_equal(const raw_result *a, const raw_result *b, int64_t row, int64_t count)
{
    size_t from = (size_t)row, n = (size_t)count;
    return memcmp((char *)a->out.data + from * a->row_bytes,
                  (char *)b->out.data + from * b->row_bytes, n * a->row_bytes) == 0 &&
           memcmp((char *)a->lse.data + from * a->lse_bytes,
                  (char *)b->lse.data + from * b->lse_bytes, n * a->lse_bytes) == 0;
}

void raw_result_free(raw_result *result)
{
    support_buffer_free(&result->out);
    support_buffer_free(&result->lse);
}
