/*
 * vllm06_forward.c: one layer by the rules of vLLM 0.6. New keys are stored in the type's slots. Then prompts attend
 * to their cached context and to this step's k and v directly; decodes attend to the cache only. Prompts with biases
 * set by the caller run one by one, as in vLLM 0.6.
 */
#include "cache/kv_cache.h"
#include "core/tensor.h"
#include "vllm06/vllm06.h"

/* Everything one forward works with. */
typedef struct layer {
    folio_context *ctx;
    folio_vllm06_impl *impl;
    const folio_vllm06_metadata *m;
    folio_vllm06_forward_args args;
    folio_kv_cache *cache;       /* NULL: none, as in attention without a cache */
    folioi_vllm06_memory memory; /* of the cache */
    int32_t block_size;          /* of the cache; 0: none */
    folioi_array table;          /* int32_t, room for one sequence's blocks */
    folioi_array nowhere;        /* int64_t, slot -1 for each row: store has written them by then */
    bool checking;               /* run nothing */
    folio_run run;
} layer;

/* Sequences [first, end) of the metadata that attend together; add puts one of them into a batch. */
typedef struct {
    const folio_attention_desc *desc;
    folio_attention_type type;
    folio_kv_cache *cache; /* NULL: none */
    folioi_vllm06_which which;
    int64_t first, end;
    folio_status (*add)(layer *l, folio_batch *batch, int64_t i);
} seq_range;

/* The metadata if it is a graph's, which has plans of its own. */
static folio_vllm06_metadata *graph_of(const layer *l)
{
    return l->m->graph_len > 0 ? (folio_vllm06_metadata *)l->m : NULL;
}

/* Do decodes store by the slots of their plan, which then needs no store before it? A graph's must. Others do where
 * the step has nothing else and no slot twice. */
static bool stores_by_plan(const layer *l)
{
    bool decodes = l->m->f.num_prefills == 0 && l->m->f.slot_mapping != NULL && l->m->distinct;
    return graph_of(l) != NULL || decodes;
}

/* A graph's decodes store by the slots of their plan, all at once: each has one of its own. */
static folio_status check_own_slots(layer *l)
{
    folio_vllm06_metadata *m = graph_of(l);
    const int64_t *slots = m->f.slot_mapping;
    int64_t first = 0;
    TRY(folioi_slotset_reserve(&l->ctx->allocator, &m->slots, m->num_seqs));
    folioi_slotset_clear(&m->slots);
    for (int64_t i = 0; i < m->num_seqs; i++) {
        if (slots[i] < 0 || folioi_vllm06_seq_len(m, i) == 0) continue; /* padding */
        if (folioi_slotset_insert(&m->slots, slots[i])) continue;
        while (slots[first] != slots[i] || folioi_vllm06_seq_len(m, first) == 0) first++;
        FAIL(FOLIO_ERR_ARGUMENT,
             "slot_mapping[%lld] and slot_mapping[%lld] are both %lld; decodes of a graph store to "
             "different slots",
             (long long)first, (long long)i, (long long)slots[i]);
    }
    return FOLIO_OK;
}

/* A batch of the range's sequences, and the plan updated with it. */
static folio_status plan_range(layer *l, const seq_range *g, folioi_vllm06_update update,
                               folioi_vllm06_plan *p)
{
    p->update.metadata = 0;
    folio_batch_clear(p->batch);
    for (int64_t i = g->first; i < g->end; i++) TRY(g->add(l, p->batch, i));
    if (graph_of(l) != NULL && g->which == FOLIOI_VLLM06_DECODES) TRY(check_own_slots(l));
    TRY(folio_plan_update(p->plan, p->batch, &l->run));
    p->update = update;
    return FOLIO_OK;
}

/* Through a plan as the check or another layer of the step left it, or one made now. */
static folio_status attend(layer *l, const seq_range *g, const folio_tensors *tensors)
{
    folio_vllm06_state *state = l->impl->state;
    bool shared = g->which != FOLIOI_VLLM06_ALONE && (l->m->state == state || graph_of(l) != NULL);
    folioi_vllm06_update update = {shared ? l->m->id : 0, g->first, l->args.key.data != NULL,
                                   l->run.stream};
    folioi_vllm06_plan *p;
    TRY(folioi_vllm06_find_plan(state, graph_of(l), g->desc, g->type, g->cache, g->which, &p));
    if (update.metadata == 0 || update.metadata != p->update.metadata ||
        update.first != p->update.first || update.fresh != p->update.fresh ||
        update.stream != p->update.stream)
        TRY(plan_range(l, g, update, p));
    if (l->checking)
        return folio_attention_check(p->plan, 0, g->type, g->cache, 0, tensors, &l->run, NULL);
    return folio_attention_forward(p->plan, 0, g->type, g->cache, 0, tensors, &l->run);
}

static folio_tensor rows_of(const folio_tensor *t, int64_t first, int64_t n)
{
    folio_tensor r = *t;
    if (n > 0)
        r.data = (char *)r.data + first * r.token_stride * (int64_t)folio_dtype_size(t->dtype);
    r.tokens = n;
    return r;
}

/* Rows [first, first + n) of query and output; key and value rows [kv_first, kv_first + kv_n). */
static folio_tensors tensors_of(const layer *l, int64_t first, int64_t n, int64_t kv_first,
                                int64_t kv_n)
{
    const folio_vllm06_forward_args *a = &l->args;
    folio_tensors t = {.struct_size = sizeof t, .k_scale = a->k_scale, .v_scale = a->v_scale};
    t.q = rows_of(&a->query, first, n);
    t.out = rows_of(&a->output, first, n);
    if (kv_n > 0) {
        t.k = rows_of(&a->key, kv_first, kv_n);
        t.v = rows_of(&a->value, kv_first, kv_n);
    }
    if (l->cache != NULL) t.flags = FOLIO_KV_APPEND;
    return t;
}

/* The blocks of sequence i for `len` tokens. Those past the row's end hold keys of this step, which are
 * not read from the cache: any block will do. */
static folio_status table_of(layer *l, folioi_vllm06_rows blocks, int64_t i, int64_t len,
                             int64_t cached, folio_batch_seq *s)
{
    int64_t n = ceil_div(len, l->block_size), given = min_i64(blocks.stride, n);
    REQUIRE(cached <= 0 || given >= ceil_div(cached, l->block_size),
            "sequence %lld: its block table has %lld blocks of %d, its %lld "
            "cached tokens need %lld",
            (long long)i, (long long)given, l->block_size, (long long)cached,
            (long long)ceil_div(cached, l->block_size));
    TRY(folioi_array_reserve(&l->ctx->allocator, &l->table, max_i64(n, 1) * 4, "a block table"));
    int32_t *table = l->table.data;
    for (int64_t k = 0; k < n; k++) table[k] = k * l->block_size < cached ? blocks.row[k] : 0;
    s->block_table = table;
    s->num_blocks = n;
    return FOLIO_OK;
}

/* n slots of -1. */
static folio_status no_slots(layer *l, int64_t n, const int64_t **out)
{
    TRY(folioi_array_reserve(&l->ctx->allocator, &l->nowhere, max_i64(n, 1) * (int64_t)sizeof **out,
                             "slots"));
    int64_t *slots = l->nowhere.data;
    for (int64_t k = 0; k < n; k++) slots[k] = -1;
    *out = slots;
    return FOLIO_OK;
}

static folio_status add_decoder(layer *l, folio_batch *batch, int64_t i, bool causal)
{
    const folio_vllm06_metadata_fields *f = &l->m->f;
    bool prompt = i < f->num_prefills;
    folio_batch_seq s = {.struct_size = sizeof s};
    s.seq_len = folioi_vllm06_seq_len(l->m, i);
    s.padding = s.seq_len == 0;
    s.query_len = folioi_vllm06_query_len(l->m, i);
    s.phase = prompt ? FOLIO_PHASE_PREFILL : FOLIO_PHASE_DECODE;
    s.causality = causal ? FOLIO_CAUSAL_YES : FOLIO_CAUSAL_NO;
    int64_t cached = prompt ? s.seq_len - s.query_len : s.seq_len;
    if (l->block_size > 0 && s.seq_len > 0)
        TRY(table_of(l, folioi_vllm06_table(l->m, i), i, s.seq_len, cached, &s));
    if (stores_by_plan(l)) s.slots = &f->slot_mapping[i];
    else TRY(no_slots(l, s.query_len, &s.slots));
    return folio_batch_add(batch, &s);
}

static folio_status add_causal(layer *l, folio_batch *batch, int64_t i)
{
    return add_decoder(l, batch, i, true);
}

static folio_status add_biased(layer *l, folio_batch *batch, int64_t i)
{
    return add_decoder(l, batch, i, false);
}

static int64_t encoder_rows(const layer *l, int64_t i)
{
    return l->args.attn_type == FOLIO_ATTENTION_ENCODER ? l->m->f.encoder_seq_lens[i]
                                                        : folioi_vllm06_seq_len(l->m, i);
}

static folio_status add_encoder(layer *l, folio_batch *batch, int64_t i)
{
    int64_t len = encoder_rows(l, i);
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = len, .seq_len = len};
    s.padding = len == 0;
    return folio_batch_add(batch, &s);
}

static folio_status add_padding(layer *l, folio_batch *batch, int64_t i)
{
    folio_batch_seq s =
        FOLIO_WITH(folio_batch_seq, .query_len = folioi_vllm06_query_len(l->m, i), .padding = 1);
    return folio_batch_add(batch, &s);
}

/* Rows of cross attention that see no key, which folio.h takes for a batch that lacks encoder_len:
 * zeros, by way of padding. Its keys are not read: query stands in for them. */
static folio_status attend_nobody(layer *l, int64_t first, int64_t end, int64_t row, int64_t rows)
{
    if (rows == 0) return FOLIO_OK;
    folio_tensors t = tensors_of(l, row, rows, 0, 0);
    t.k = t.v = t.q;
    t.flags = 0;
    const seq_range g = {.desc = &l->impl->desc,
                         .type = FOLIO_ATTENTION_ENCODER_ONLY,
                         .first = first,
                         .end = end,
                         .add = add_padding};
    return attend(l, &g, &t);
}

/* Keys of sequence i in cross attention. */
static int64_t cross_keys(const layer *l, int64_t i)
{
    return folioi_vllm06_seq_len(l->m, i) > 0 ? l->m->f.encoder_seq_lens[i] : 0;
}

/* Of them, those that come with this call: a prompt's, where key is given. */
static int64_t cross_new_keys(const layer *l, int64_t i)
{
    return l->args.key.data != NULL && i < l->m->f.num_prefills ? cross_keys(l, i) : 0;
}

/* A prompt brings its encoder's K and V where key is given, everybody else reads cross blocks. */
static folio_status add_cross(layer *l, folio_batch *batch, int64_t i)
{
    const folio_vllm06_metadata_fields *f = &l->m->f;
    folio_batch_seq s = {.struct_size = sizeof s};
    s.query_len = folioi_vllm06_query_len(l->m, i);
    s.seq_len = folioi_vllm06_seq_len(l->m, i);
    s.padding = s.seq_len == 0;
    s.encoder_len = cross_keys(l, i);
    s.encoder_new_len = cross_new_keys(l, i);
    if (l->block_size > 0 && s.encoder_len > 0) {
        folioi_vllm06_rows blocks = {f->cross_block_tables, f->cross_block_tables_stride};
        if (blocks.stride > 0) blocks.row += i * blocks.stride;
        TRY(table_of(l, blocks, i, s.encoder_len, s.encoder_len - s.encoder_new_len, &s));
        s.cross_block_table = s.block_table;
        s.num_cross_blocks = s.num_blocks;
        s.block_table = NULL;
        s.num_blocks = 0;
    }
    TRY(no_slots(l, s.encoder_new_len, &s.cross_slots));
    return folio_batch_add(batch, &s);
}

/* Prompts in decoder attention. With compat, xformers' prefix attention ran where the step has block
 * tables and a cache, and it was not told the scale. */
static folio_attention_desc prompts_desc(const layer *l)
{
    const folio_vllm06_impl *impl = l->impl;
    folio_attention_desc d = impl->prompts;
    bool prefix = l->cache != NULL && folioi_vllm06_table(l->m, 0).stride > 0;
    if (impl->compat && impl->backend->prefix_scale && prefix) d.scale = 0;
    return d;
}

/* A prompt of any type whose bias the caller gave: alone, and nothing but the bias masks it. */
static folio_status attend_biased(layer *l, const folio_vllm06_bias *bias, int64_t i, int64_t row,
                                  int64_t rows, int64_t kv_row, int64_t kv_rows)
{
    folio_attention_type type = l->args.attn_type;
    folio_attention_desc d = type == FOLIO_ATTENTION_DECODER ? prompts_desc(l) : l->impl->desc;
    d.windowed = 0;
    d.window_left = 0;
    bool paged = type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
    int64_t keys = type == FOLIO_ATTENTION_DECODER           ? folioi_vllm06_seq_len(l->m, i)
                   : type == FOLIO_ATTENTION_ENCODER_DECODER ? cross_keys(l, i)
                                                             : kv_rows;
    REQUIRE(bias->query_len == rows && bias->key_len == keys,
            "attn_bias[%lld] is for %lld queries and %lld keys, the prompt has %lld and %lld",
            (long long)i, (long long)bias->query_len, (long long)bias->key_len, (long long)rows,
            (long long)keys);
    REQUIRE(bias->num_heads == 1 || bias->num_heads == d.num_heads,
            "attn_bias[%lld] has %lld heads, the layer %d", (long long)i,
            (long long)bias->num_heads, d.num_heads);
    if (type == FOLIO_ATTENTION_ENCODER_DECODER && keys == 0)
        return attend_nobody(l, i, i + 1, row, rows);
    folio_tensors t = tensors_of(l, row, rows, kv_row, kv_rows);
    t.bias = (folio_bias){.data = folioi_vllm06_bias_numbers(l->m, type, i),
                          .dtype = FOLIO_F32,
                          .dims = {1, bias->num_heads, rows, keys},
                          .strides = {0, rows * keys, keys, 1}};
    const seq_range g = {.desc = &d,
                         .type = paged ? type : FOLIO_ATTENTION_ENCODER_ONLY,
                         .cache = l->cache,
                         .first = i,
                         .end = i + 1,
                         .add = !paged                            ? add_encoder
                                : type == FOLIO_ATTENTION_DECODER ? add_biased
                                                                  : add_cross};
    return attend(l, &g, &t);
}

static folio_status forward_decoder(layer *l)
{
    const folio_vllm06_metadata_fields *f = &l->m->f;
    bool bare = l->impl->compat && l->impl->backend->bare_prompts;
    int64_t row = 0;
    folio_attention_desc prompts = prompts_desc(l);
    seq_range g = {&prompts, FOLIO_ATTENTION_DECODER, l->cache,  FOLIOI_VLLM06_PROMPTS,
                   0,        f->num_prefills,         add_causal};
    if (f->attn_bias != NULL && !bare) {
        for (int64_t i = 0; i < f->num_prefills; i++) {
            int64_t n = folioi_vllm06_query_len(l->m, i);
            TRY(attend_biased(l, &f->attn_bias[i], i, row, n, row, n));
            row += n;
        }
    } else if (f->num_prefills > 0) {
        folio_tensors t = tensors_of(l, 0, f->num_prefill_tokens, 0, f->num_prefill_tokens);
        t.slopes = bare ? NULL : l->impl->slopes;
        TRY(attend(l, &g, &t));
    }
    if (f->num_decode_tokens == 0) return FOLIO_OK;
    g.desc = &l->impl->decodes;
    g.which = FOLIOI_VLLM06_DECODES;
    g.first = f->num_prefills;
    g.end = l->m->num_seqs;
    int64_t new_keys = stores_by_plan(l) ? f->num_decode_tokens : 0;
    folio_tensors t = tensors_of(l, f->num_prefill_tokens, f->num_decode_tokens, 0, new_keys);
    t.slopes = l->impl->slopes;
    t.flags = 0; /* the new key of a decode is read as stored, like those before it */
    return attend(l, &g, &t);
}

/* Bidirectional over the encoder's tokens, or over all tokens of an encoder-only model; ALiBi and window
 * belong to decoders. */
static folio_status forward_encoder(layer *l)
{
    const folio_vllm06_metadata_fields *f = &l->m->f;
    bool encoder = l->args.attn_type == FOLIO_ATTENTION_ENCODER;
    const folio_vllm06_bias *biases = encoder ? f->encoder_attn_bias : f->attn_bias;
    int64_t rows = 0, row = 0;
    folio_attention_desc d = l->impl->desc;
    d.windowed = 0;
    d.window_left = 0;
    for (int64_t i = 0; i < f->num_prefills; i++) rows += encoder_rows(l, i);
    REQUIRE(rows == l->args.query.tokens,
            "the prompts have %lld tokens of %s attention, query has %lld rows", (long long)rows,
            folio_attention_type_name(l->args.attn_type), (long long)l->args.query.tokens);
    for (int64_t i = 0; biases != NULL && i < f->num_prefills; i++) {
        int64_t len = encoder_rows(l, i);
        TRY(attend_biased(l, &biases[i], i, row, len, row, len));
        row += len;
    }
    if (biases != NULL) return FOLIO_OK;
    folio_tensors t = tensors_of(l, 0, rows, 0, rows);
    const seq_range g = {.desc = &d,
                         .type = FOLIO_ATTENTION_ENCODER_ONLY,
                         .which = encoder ? FOLIOI_VLLM06_ENCODER : FOLIOI_VLLM06_ENCODER_ONLY,
                         .end = f->num_prefills,
                         .add = add_encoder};
    return attend(l, &g, &t);
}

static folio_status forward_cross(layer *l)
{
    const folio_vllm06_metadata_fields *f = &l->m->f;
    bool fresh = l->args.key.data != NULL;
    int64_t row = 0, kv_row = 0, n = f->cross_attn_bias != NULL ? f->num_prefills : 0;
    int64_t keys = 0;
    folio_attention_desc d = l->impl->desc;
    d.windowed = 0;
    d.window_left = 0;
    for (int64_t i = 0; i < f->num_prefills; i++) keys += f->encoder_seq_lens[i];
    REQUIRE(!fresh || keys == l->args.key.tokens,
            "the prompts' encoders have %lld tokens, key has %lld rows", (long long)keys,
            (long long)l->args.key.tokens);
    for (int64_t i = 0; i < n; i++) {
        int64_t rows = folioi_vllm06_query_len(l->m, i);
        int64_t fresh_rows = fresh ? f->encoder_seq_lens[i] : 0;
        TRY(attend_biased(l, &f->cross_attn_bias[i], i, row, rows, kv_row, fresh_rows));
        row += rows;
        kv_row += fresh_rows;
    }
    int64_t first = row, first_kv = kv_row, seen = 0;
    for (int64_t i = n; i < l->m->num_seqs; i++) {
        row += folioi_vllm06_query_len(l->m, i);
        kv_row += cross_new_keys(l, i);
        seen += cross_keys(l, i);
    }
    if (seen == 0) return attend_nobody(l, n, l->m->num_seqs, first, row - first);
    folio_tensors t = tensors_of(l, first, row - first, first_kv, kv_row - first_kv);
    const seq_range g = {
        &d,       FOLIO_ATTENTION_ENCODER_DECODER, l->cache, FOLIOI_VLLM06_CROSS, n, l->m->num_seqs,
        add_cross};
    return attend(l, &g, &t);
}

static folio_status check_args(layer *l)
{
    const folio_attention_desc *d = &l->impl->desc;
    folio_vllm06_forward_args *a = &l->args;
    folio_attention_type type = a->attn_type;
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    REQUIRE(a->attn_metadata != NULL, "attn_metadata is NULL");
    REQUIRE(graph_of(l) == NULL || l->m->state->ctx == l->ctx,
            "attn_metadata is of a graph of another context");
    REQUIRE(type != FOLIO_ATTENTION_ENCODER || folio_vllm06_is_all_encoder_attn_metadata_set(l->m),
            "encoder attention requires setting encoder metadata attributes");
    REQUIRE(type != FOLIO_ATTENTION_ENCODER_DECODER ||
                folio_vllm06_is_all_cross_attn_metadata_set(l->m),
            "encoder/decoder cross-attention requires setting cross-attention metadata attributes");
    REQUIRE((a->key.data == NULL) == (a->value.data == NULL),
            "key and value must both be set or both be NULL");
    REQUIRE(type == FOLIO_ATTENTION_ENCODER_DECODER || a->key.data != NULL,
            "key and value are NULL");
    REQUIRE(a->kv_cache != NULL || l->m->f.num_decode_tokens == 0 ||
                type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_ONLY,
            "kv_cache is NULL, but %lld decodes need one", (long long)l->m->f.num_decode_tokens);
    const folio_vllm06_metadata_fields *f = &l->m->f;
    REQUIRE(type != FOLIO_ATTENTION_ENCODER_ONLY || f->num_decode_tokens == 0,
            "encoder_only attention in a step with %lld decodes", (long long)f->num_decode_tokens);
    for (int64_t i = 0; type == FOLIO_ATTENTION_ENCODER_DECODER && i < f->num_prefills; i++)
        REQUIRE(folioi_vllm06_seq_len(l->m, i) > 0 || f->encoder_seq_lens[i] == 0,
                "prompt %lld has no token, but its encoder has %lld", (long long)i,
                (long long)f->encoder_seq_lens[i]);
    int64_t tokens = type == FOLIO_ATTENTION_ENCODER ? f->num_encoder_tokens
                                                     : f->num_prefill_tokens + f->num_decode_tokens;
    int64_t keys = type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_DECODER
                       ? f->num_encoder_tokens
                       : tokens;
    TRY(folioi_tensor_resolve(&a->query, "query", d->dtype, d->num_heads, d->k_head_size, tokens));
    TRY(folioi_tensor_resolve(&a->output, "output", d->dtype, d->num_heads, d->k_head_size,
                              tokens));
    REQUIRE(a->query.dtype == d->dtype && a->output.dtype == d->dtype,
            "query is %s and output %s, the layer's dtype is %s", folio_dtype_name(a->query.dtype),
            folio_dtype_name(a->output.dtype), folio_dtype_name(d->dtype));
    if (a->key.data == NULL) return FOLIO_OK;
    TRY(folioi_tensor_resolve(&a->key, "key", d->dtype, d->num_kv_heads, d->k_head_size, keys));
    return folioi_tensor_resolve(&a->value, "value", d->dtype, d->num_kv_heads, d->k_head_size,
                                 keys);
}

/* All rows of the step at once. store writes before any row is computed, and the call for some rows may
 * write what the call for others reads. output may be query itself, but not in cross attention, where
 * query may stand in for keys. */
static folio_status check_apart(const layer *l)
{
    const folio_attention_desc *d = &l->impl->desc;
    const folio_vllm06_forward_args *a = &l->args;
    bool in_place = a->attn_type != FOLIO_ATTENTION_ENCODER_DECODER &&
                    folioi_tensors_same(&a->query, &a->output);
    folioi_span none = folioi_span_of(NULL, 0);
    folioi_span query = folioi_tensor_span(&a->query, d->num_heads, d->k_head_size);
    const folioi_place places[] = {
        {"output", folioi_tensor_span(&a->output, d->num_heads, d->k_head_size)},
        {"kv_cache", folioi_span_of(l->memory.k, l->memory.bytes)},
        {"kv_cache", folioi_span_of(l->memory.v, l->memory.bytes)},
        {"query", in_place ? none : query},
        {"key", folioi_tensor_span(&a->key, d->num_kv_heads, d->k_head_size)},
        {"value", folioi_tensor_span(&a->value, d->num_kv_heads, d->k_head_size)}};
    return folioi_check_apart(places, 3, sizeof places / sizeof *places);
}

/* Is this step's key and value stored before anything is computed? */
static bool stores_first(const layer *l)
{
    bool cross = l->args.attn_type == FOLIO_ATTENTION_ENCODER_DECODER;
    return l->cache != NULL && l->args.key.data != NULL && l->args.key.tokens > 0 &&
           (cross || !stores_by_plan(l));
}

/* By the type's slots. */
static folio_status store(layer *l)
{
    const folio_vllm06_forward_args *a = &l->args;
    bool cross = a->attn_type == FOLIO_ATTENTION_ENCODER_DECODER;
    const int64_t *slots = cross ? l->m->cross_store_slots : l->m->store_slots;
    REQUIRE(slots != NULL, "slot_mapping is NULL, but key and value must be stored");
    folio_kv_write w = FOLIO_WITH(folio_kv_write, .k = a->key, .v = a->value, .slots = slots,
                                  .k_scale = a->k_scale, .v_scale = a->v_scale);
    return folioi_kv_cache_write_distinct(l->cache, 0, &w, &l->run);
}

/* The cache, which must be of the layer's heads and dtype. */
static folio_status take_cache(layer *l)
{
    const folio_attention_desc *d = &l->impl->desc;
    const folio_vllm06_kv_cache *c = l->args.kv_cache;
    const folioi_vllm06_kept *kept;
    TRY(folioi_vllm06_find_cache(l->impl->state, c, l->impl->backend->layout, "kv_cache", &kept));
    REQUIRE(c->num_kv_heads == d->num_kv_heads && c->head_size == d->k_head_size,
            "kv_cache has %d kv heads x %d, the layer %d x %d", c->num_kv_heads, c->head_size,
            d->num_kv_heads, d->k_head_size);
    REQUIRE(c->dtype == d->kv_dtype, "kv_cache is %s, the layer's kv_cache_dtype is %s",
            folio_dtype_name(c->dtype), folio_dtype_name(d->kv_dtype));
    l->cache = kept->cache;
    l->memory = kept->memory;
    l->block_size = c->block_size;
    return FOLIO_OK;
}

static folio_status run(layer *l)
{
    folio_attention_type type = l->args.attn_type;
    TRY(check_args(l));
    bool paged = type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
    if (paged && l->args.kv_cache != NULL) TRY(take_cache(l));
    TRY(check_apart(l));
    folio_status (*by_type)(layer *) = type == FOLIO_ATTENTION_DECODER           ? forward_decoder
                                       : type == FOLIO_ATTENTION_ENCODER_DECODER ? forward_cross
                                                                                 : forward_encoder;
    /* All calls are checked before one of them or the store writes. Decodes may be one call, which checks itself. */
    l->checking = type != FOLIO_ATTENTION_DECODER || l->m->f.num_prefills > 0 || stores_first(l);
    if (l->checking) TRY(by_type(l));
    l->checking = false;
    if (stores_first(l)) TRY(store(l));
    return by_type(l);
}

folio_status folio_vllm06_forward(folio_vllm06_impl *impl, const folio_vllm06_forward_args *args,
                                  const folio_run *given)
{
    REQUIRE(impl != NULL, "forward: impl is NULL");
    layer l = {.ctx = impl->state->ctx, .impl = impl};
    STRUCT_IN(l.args, args, "folio_vllm06_forward_args");
    TRY(folioi_run_in(impl->state->ctx, given, &l.run));
    l.run.workspace = NULL; /* plans are the state's, and have their own */
    l.m = l.args.attn_metadata;
    folio_status status = run(&l);
    folioi_array_free(&l.ctx->allocator, &l.table);
    folioi_array_free(&l.ctx->allocator, &l.nowhere);
    return status;
}

folio_status folioi_vllm06_replan(const folio_vllm06_metadata *m, folioi_vllm06_plan *p,
                                  const folio_run *run)
{
    if (p->which == FOLIOI_VLLM06_ALONE) return FOLIO_OK; /* planned anew by each forward */
    layer l = {.ctx = m->state->ctx, .m = m, .block_size = p->block_size, .run = *run};
    bool cross = p->which == FOLIOI_VLLM06_CROSS;
    const seq_range g = {
        .which = p->which, .end = m->num_seqs, .add = cross ? add_cross : add_causal};
    folioi_vllm06_update update = {m->id, 0, !cross, run->stream};
    folio_status status = plan_range(&l, &g, update, p);
    folioi_array_free(&l.ctx->allocator, &l.table);
    folioi_array_free(&l.ctx->allocator, &l.nowhere);
    return status;
}
