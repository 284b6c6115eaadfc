/*
 * case.c: makes the inputs, caches, batches and plans of a case and runs it. The formula and the
 * comparison are in formula.c, numbers in numbers.c.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 256, POISON = 0xff };

static _Thread_local char error_text[512];

const char *kit_error(void) { return error_text; }

void kit_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
}

/* Records what the library said. */
bool kit_refused(const char *what, folio_status status)
{
    kit_fail("%s: %s: %s", what, folio_status_name(status), folio_last_error());
    return false;
}

folio_context *kit_context(const char *backend, const char *level, int32_t threads)
{
    folio_context_desc desc =
        FOLIO_WITH(folio_context_desc, .backend = backend, .level = level, .num_threads = threads);
    folio_context *ctx = NULL;
    folio_status status = folio_context_create(&desc, &ctx);
    if (status != FOLIO_OK) kit_refused("context", status);
    else kit_reach(ctx);
    return status == FOLIO_OK ? ctx : NULL;
}

/* ---- Sequences and their blocks */

int64_t kit_seq_id(const kit_seq *seqs, int64_t i) { return seqs[i].id ? seqs[i].id : i + 1; }

seq_state *kit_state(kit_case *h, int64_t id)
{
    for (int64_t i = 0; i < h->num_states; i++)
        if (h->states[i].id == id) return &h->states[i];
    seq_state *grown = realloc(h->states, (size_t)(h->num_states + 1) * sizeof *grown);
    if (grown == NULL) abort();
    h->states = grown;
    h->states[h->num_states] = (seq_state){.id = id};
    return &h->states[h->num_states++];
}

int64_t kit_seq_rows(const kit_seq *s, folio_attention_type type)
{
    return type == FOLIO_ATTENTION_ENCODER ? s->encoder_new_len : s->query_len;
}

int64_t kit_seq_keys(const kit_seq *s, folio_attention_type type)
{
    if (s->seq_len == 0) return 0;
    switch (type) {
    case FOLIO_ATTENTION_DECODER: return s->seq_len;
    case FOLIO_ATTENTION_ENCODER: return s->encoder_new_len;
    case FOLIO_ATTENTION_ENCODER_ONLY: return s->query_len;
    case FOLIO_ATTENTION_ENCODER_DECODER: return s->encoder_len;
    }
    return 0;
}

bool kit_only_reads(const kit_seq *s)
{
    return s->only_reads || (s->seq_len > 0 && s->query_len > s->seq_len);
}

int64_t kit_seq_context(const kit_seq *s)
{
    return kit_only_reads(s) ? s->seq_len : s->seq_len - s->query_len;
}

int64_t kit_first_token(const kit_seq *s)
{
    enum { FAR = 1 << 20 }; /* so that none is negative */
    return kit_only_reads(s) ? FAR + s->first_query_pos : s->seq_len - s->query_len;
}

int64_t kit_blocks_for(const kit_case *h, int64_t tokens)
{
    return (tokens + h->spec.block_size - 1) / h->spec.block_size;
}

/* Takes blocks from the shuffled list until the sequence's tokens fit. */
static bool reserve(kit_case *h, seq_state *s, int cross, int64_t tokens)
{
    int64_t need = kit_blocks_for(h, tokens);
    if (need <= s->num_blocks[cross]) return true;
    if (need - s->num_blocks[cross] > h->num_free) {
        kit_fail("the case has no block left for sequence %lld", (long long)s->id);
        return false;
    }
    int32_t *grown = realloc(s->blocks[cross], (size_t)need * sizeof *grown);
    if (grown == NULL) abort();
    s->blocks[cross] = grown;
    while (s->num_blocks[cross] < need)
        grown[s->num_blocks[cross]++] = h->free_blocks[--h->num_free];
    return true;
}

int64_t kit_slot(const kit_case *h, const seq_state *s, int cross, int64_t token)
{
    int64_t bs = h->spec.block_size;
    return s->blocks[cross][token / bs] * bs + token % bs;
}

bool kit_reserve_all(kit_case *h, const kit_seq *seqs, int64_t num_seqs)
{
    for (int64_t i = 0; h->cache && i < num_seqs; i++) {
        seq_state *s = kit_state(h, kit_seq_id(seqs, i));
        if (!reserve(h, s, 0, seqs[i].seq_len) || !reserve(h, s, 1, seqs[i].encoder_len))
            return false;
    }
    return true;
}

const int32_t *kit_blocks(kit_case *h, int64_t id, bool cross, int64_t *n)
{
    seq_state *s = kit_state(h, id);
    *n = s->num_blocks[cross];
    return s->blocks[cross];
}

/* ---- Opening */

static void fill_defaults(kit_spec *s)
{
    if (s->num_heads == 0) s->num_heads = 4;
    if (s->num_kv_heads == 0) s->num_kv_heads = s->num_heads;
    if (s->k_head_size == 0) s->k_head_size = 32;
    if (s->v_head_size == 0) s->v_head_size = s->k_head_size;
    if (s->dtype == 0) s->dtype = FOLIO_F32;
    if (s->kv_dtype == 0) s->kv_dtype = s->dtype;
    if (s->k_dtype == 0) s->k_dtype = s->dtype;
    if (s->v_dtype == 0) s->v_dtype = s->k_dtype;
    if (s->block_size == 0) s->block_size = 16;
    if (s->num_layers == 0) s->num_layers = 1;
    if (s->bias_dtype == 0) s->bias_dtype = FOLIO_F32;
    if (s->amplitude == 0) s->amplitude = 1;
    if (s->v_in_k) s->v_scale = 0;
    if (s->head_scales) s->k_scale = s->v_scale = 0;
}

folio_attention_desc kit_attention_desc(const kit_spec *s)
{
    return FOLIO_WITH(folio_attention_desc, .num_heads = s->num_heads,
                      .num_kv_heads = s->num_kv_heads, .k_head_size = s->k_head_size,
                      .v_head_size = s->v_head_size, .dtype = s->dtype, .kv_dtype = s->kv_dtype,
                      .scale = s->scale, .soft_cap = s->soft_cap, .windowed = s->windowed,
                      .window_left = s->window_left, .window_right = s->window_right,
                      .v_in_k = s->v_in_k);
}

static folio_kv_cache_desc cache_desc(const kit_case *h)
{
    const kit_spec *s = &h->spec;
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = h->num_blocks, .num_layers = s->num_layers,
                      .block_size = s->block_size, .num_kv_heads = s->num_kv_heads,
                      .k_head_size = s->k_head_size, .v_head_size = s->v_head_size,
                      .dtype = s->kv_dtype, .layout = s->layout, .v_in_k = s->v_in_k);
}

/* Rows with gaps after each head, token and block; layers one after another. */
static folio_status wrap_strided(kit_case *h, const folio_kv_cache_desc *desc)
{
    enum { MAX_LAYERS = 64 };
    const kit_spec *s = &h->spec;
    folio_kv_memory m = {.struct_size = sizeof m};
    folio_kv_strides *strides[4] = {&m.k_strides, &m.v_strides, &m.k_scales_strides,
                                    &m.v_scales_strides};
    size_t *sizes[4] = {&m.k_bytes, &m.v_bytes, &m.k_scales_bytes, &m.v_scales_bytes};
    void *bases[4][MAX_LAYERS];
    if (s->num_layers > MAX_LAYERS) return FOLIO_ERR_ARGUMENT;
    int64_t widths[4] = {s->k_head_size, s->v_head_size, 1, 1};
    for (int i = 0; i < (s->kv_dtype == FOLIO_INT8 ? 4 : 2); i++) {
        if (s->v_in_k && i % 2 == 1) continue;
        size_t element = i < 2 ? folio_dtype_size(s->kv_dtype) : sizeof(float);
        folio_kv_strides *st = strides[i];
        st->head = widths[i] + 3;
        st->token = st->head * s->num_kv_heads + 1 + i;
        st->block = st->token * s->block_size + 7;
        *sizes[i] = (size_t)(st->block * h->num_blocks) * element;
        h->memory[i] = kit_alloc((size_t)s->num_layers, *sizes[i]);
        memset(h->memory[i], POISON, (size_t)s->num_layers * *sizes[i]);
        for (int32_t l = 0; l < s->num_layers; l++)
            bases[i][l] = (char *)h->memory[i] + (size_t)l * *sizes[i];
    }
    m.k = bases[0];
    m.v = s->v_in_k ? NULL : bases[1];
    float *scales[2][MAX_LAYERS];
    if (s->kv_dtype == FOLIO_INT8) {
        for (int32_t l = 0; l < s->num_layers; l++) {
            scales[0][l] = bases[2][l];
            if (!s->v_in_k) scales[1][l] = bases[3][l];
        }
        m.k_scales = scales[0];
        m.v_scales = s->v_in_k ? NULL : scales[1];
    }
    return folio_kv_cache_wrap(h->ctx, desc, &m, &h->cache);
}

/* One buffer for each layer, where both the device and the kit can read it. */
static folio_status wrap_shared(kit_case *h, const folio_kv_cache_desc *desc)
{
    enum { MAX_LAYERS = 64 };
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    folio_status status = folio_kv_cache_get_shape("cuda", desc, &shape);
    if (status != FOLIO_OK || desc->num_layers > MAX_LAYERS) return status;
    size_t bytes = (size_t)shape.layer_bytes;
    void *k[MAX_LAYERS];
    float *scales[2][MAX_LAYERS];
    h->memory[0] = kit_alloc((size_t)desc->num_layers, bytes);
    memset(h->memory[0], POISON, (size_t)desc->num_layers * bytes);
    for (int32_t l = 0; l < desc->num_layers; l++) {
        char *base = (char *)h->memory[0] + (size_t)l * bytes;
        k[l] = base;
        scales[0][l] = (float *)(void *)(base + shape.k_scales.offset_bytes);
        scales[1][l] = (float *)(void *)(base + shape.v_scales.offset_bytes);
    }
    folio_kv_memory m = {.struct_size = sizeof m, .k = k, .k_bytes = bytes};
    if (desc->dtype == FOLIO_INT8) {
        m.k_scales = scales[0];
        m.v_scales = desc->v_in_k ? NULL : scales[1];
        m.k_scales_bytes = (size_t)shape.k_scales.bytes;
        m.v_scales_bytes = (size_t)shape.v_scales.bytes;
    }
    return folio_kv_cache_wrap(h->ctx, desc, &m, &h->cache);
}

/* K, V and their scales in a layer; of what there is not, no bytes. */
typedef struct layer_bytes {
    void *data[4];
    size_t bytes[4];
    int32_t num_layers;
} layer_bytes;

static layer_bytes bytes_of(const folio_kv_cache *cache, int32_t layer)
{
    folio_kv_cache_view v = {.struct_size = sizeof v};
    if (folio_kv_cache_get_view(cache, layer, &v) != FOLIO_OK)
        return (layer_bytes){.num_layers = 0};
    return (layer_bytes){{v.k, v.v, v.k_scales, v.v_scales},
                         {(size_t)v.k_array.bytes, (size_t)v.v_array.bytes,
                          v.k_scales ? (size_t)v.k_scales_array.bytes : 0,
                          v.v_scales ? (size_t)v.v_scales_array.bytes : 0},
                         v.desc->num_layers};
}

void kit_poison_cache(folio_kv_cache *cache)
{
    for (int32_t l = 0; l < bytes_of(cache, 0).num_layers; l++) {
        layer_bytes of = bytes_of(cache, l);
        for (int i = 0; i < 4; i++)
            if (of.bytes[i] > 0) memset(of.data[i], POISON, of.bytes[i]);
    }
}

uint64_t kit_hash_cache(const folio_kv_cache *cache)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int32_t l = 0; cache && l < bytes_of(cache, 0).num_layers; l++) {
        layer_bytes of = bytes_of(cache, l);
        for (int i = 0; i < 4; i++)
            for (size_t b = 0; b < of.bytes[i]; b++)
                hash = (hash ^ ((unsigned char *)of.data[i])[b]) * 0x100000001b3u;
    }
    return hash;
}

static bool open_cache(kit_case *h)
{
    folio_kv_cache_desc desc = cache_desc(h);
    folio_status status = h->spec.layout == FOLIO_LAYOUT_STRIDED ? wrap_strided(h, &desc)
                          : kit_is_device(h->ctx)                ? wrap_shared(h, &desc)
                                                  : folio_kv_cache_create(h->ctx, &desc, &h->cache);
    if (status != FOLIO_OK) return kit_refused("cache", status);
    if (h->memory[0] != NULL) return true; /* poisoned when allocated */
    kit_poison_cache(h->cache);
    return true;
}

static void shuffle_blocks(kit_case *h)
{
    h->free_blocks = kit_alloc((size_t)h->num_blocks, sizeof *h->free_blocks);
    for (int64_t i = 0; i < h->num_blocks; i++) {
        int64_t j = kit_random_int(h->spec.seed, KIT_SHUFFLE, i, 0, i);
        h->free_blocks[i] = h->free_blocks[j];
        h->free_blocks[j] = (int32_t)i;
    }
    h->num_free = h->num_blocks;
}

/* Far apart, so that another head's is noticed; large and small ones, and 1. */
static void make_head_scales(kit_case *h)
{
    static const float scales[] = {0.5f, 1.7f, 0.03f, 1.0f, 4.0f};
    for (int i = 0; h->spec.head_scales && i < (h->spec.v_in_k ? 1 : 2); i++) {
        h->head_scales[i] = kit_alloc((size_t)h->spec.num_kv_heads, sizeof(float));
        for (int32_t k = 0; k < h->spec.num_kv_heads; k++)
            h->head_scales[i][k] = scales[(k + 2 * i) % 5];
    }
}

kit_case *kit_open(folio_context *ctx, const kit_spec *spec, const kit_seq *seqs, int64_t num_seqs)
{
    kit_case *h = kit_alloc(1, sizeof *h);
    h->ctx = ctx;
    h->spec = *spec;
    fill_defaults(&h->spec);
    make_head_scales(h);
    int64_t need = 0;
    for (int64_t i = 0; i < num_seqs; i++)
        need += kit_blocks_for(h, seqs[i].seq_len) + kit_blocks_for(h, seqs[i].encoder_len);
    h->num_blocks = spec->num_blocks ? spec->num_blocks : need + need / 8 + 3;
    kit_rotary_open(h, seqs, num_seqs);
    folio_attention_desc desc = kit_attention_desc(&h->spec);
    folio_status status = folio_attention_create(ctx, &desc, &h->attention);
    if (status != FOLIO_OK) {
        kit_refused("attention", status);
        h->attention = NULL;
    } else {
        shuffle_blocks(h);
        if (h->spec.no_cache || open_cache(h)) return h;
        h->cache = NULL;
    }
    kit_close(h);
    return NULL;
}

void kit_close(kit_case *h)
{
    if (h == NULL) return;
    folio_kv_cache_destroy(h->cache);
    folio_attention_destroy(h->attention);
    for (int i = 0; i < 2; i++) folio_rotary_destroy(h->rotary[i]);
    for (int i = 0; i < 4; i++) kit_free(h->memory[i]);
    for (int i = 0; i < 2; i++) kit_free(h->head_scales[i]);
    for (int64_t i = 0; i < h->num_states; i++) {
        free(h->states[i].blocks[0]);
        free(h->states[i].blocks[1]);
    }
    free(h->states);
    kit_free(h->free_blocks);
    kit_free(h);
}

folio_status kit_wait(const kit_case *h, folio_status status)
{
    return status == FOLIO_OK ? folio_run_wait(h->ctx, NULL) : status;
}

folio_kv_cache *kit_cache(kit_case *h) { return h->cache; }

folio_attention *kit_attention(kit_case *h) { return h->attention; }

/* ---- A step's inputs */

/* All bytes NaN, guards on both sides. */
step_tensor kit_tensor_make(const kit_case *h, folio_dtype dtype, int64_t tokens, int64_t heads,
                            int64_t size)
{
    step_tensor t = {.dtype = dtype, .tokens = tokens, .heads = heads, .size = size};
    bool strided = h->spec.strided, wide = h->spec.wide_gaps;
    t.head_stride = size + (!strided ? 0 : wide ? 8 : 3);
    t.token_stride = heads * t.head_stride + (!strided ? 0 : wide ? 24 : 5);
    size_t elem = folio_dtype_size(dtype), offset = (size_t)h->spec.offset * elem;
    t.bytes = (size_t)(tokens * t.token_stride) * elem + offset + 2 * GUARD_BYTES;
    t.allocation = kit_alloc(t.bytes, 1);
    memset(t.allocation, POISON, t.bytes);
    t.data = (char *)t.allocation + GUARD_BYTES + offset;
    return t;
}

folio_tensor kit_tensor_of(const step_tensor *t)
{
    return (folio_tensor){.data = t->data,
                          .dtype = t->dtype,
                          .tokens = t->tokens,
                          .token_stride = t->token_stride,
                          .head_stride = t->head_stride};
}

static double bias_entry(const kit_spec *s, int64_t id, int64_t row, int64_t head, int64_t key)
{
    /* kit_random is uniform in [-2, 2). A sixteenth of the share hides whole rows. */
    double hidden = s->bias_hidden * 4.0 - 2.0, hidden_rows = s->bias_hidden / 4.0 - 2.0;
    if (kit_random(s->seed, KIT_BIAS, id, row, head, -1) < hidden_rows) return -INFINITY;
    if (kit_random(s->seed, KIT_BIAS, ~id, row, head, key) < hidden) return -INFINITY;
    return kit_random(s->seed, KIT_BIAS, id, row, head, key);
}

bool kit_is_hidden(const kit_case *h, int64_t id, int64_t key)
{
    if (h->spec.nan_from > 0 && key >= h->spec.nan_from) return true;
    if (key < h->spec.nan_before) return true;
    return h->spec.hidden_nan && isinf(bias_entry(&h->spec, id, 0, 0, key));
}

/* Rows from..from + count of a sequence's tensor, from row `to` on. */
static void tensor_fill(const kit_case *h, const step_tensor *t, int32_t tensor, int64_t id,
                        int64_t from, int64_t to, int64_t count)
{
    bool is_query = tensor == KIT_Q || tensor == KIT_ENCODER_Q;
    double amplitude = is_query ? h->spec.amplitude : 1.0;
    for (int64_t i = 0; i < count; i++) {
        if (!is_query && kit_is_hidden(h, id, from + i)) continue; /* stays NaN */
        for (int64_t head = 0; head < t->heads; head++)
            for (int64_t d = 0; d < t->size; d++)
                kit_store(t->dtype, t->data, step_at(t, to + i, head) + d,
                          amplitude * kit_random(h->spec.seed, tensor, id, from + i, head, d));
    }
}

/* With rotary_before, a sequence's rows of q or k: as a pass of its own would rotate them. */
static void rotate_rows(const kit_case *h, const step *st, const step_tensor *t, int64_t seq)
{
    if (!h->spec.rotary_before) return;
    for (int64_t row = st->row_start[seq]; row < st->row_start[seq + 1]; row++)
        for (int64_t head = 0; head < t->heads; head++)
            kit_rotate_stored(
                h, t->dtype,
                kit_row_position(h, &st->seqs[seq], st->type, row - st->row_start[seq]), t->data,
                step_at(t, row, head));
}

static void step_shape(const kit_case *h, step *st)
{
    int64_t encoder_tokens = 0, query_tokens = 0, longest = 1;
    st->row_start = kit_alloc((size_t)st->num_seqs + 1, sizeof(int64_t));
    st->new_row_start = kit_alloc((size_t)st->num_seqs + 1, sizeof(int64_t));
    st->max_rows = st->max_keys = 1;
    for (int64_t i = 0; i < st->num_seqs; i++) {
        const kit_seq *s = &st->seqs[i];
        int64_t rows = kit_seq_rows(s, st->type), keys = kit_seq_keys(s, st->type);
        int64_t new_rows = st->type == FOLIO_ATTENTION_ENCODER_DECODER ? s->encoder_new_len : rows;
        st->row_start[i + 1] = st->row_start[i] + rows;
        st->new_row_start[i + 1] = st->new_row_start[i] + new_rows;
        if (rows > st->max_rows) st->max_rows = rows;
        if (keys > st->max_keys) st->max_keys = keys;
        if (s->seq_len > longest) longest = s->seq_len;
        if (s->encoder_len > longest) longest = s->encoder_len;
        encoder_tokens += s->encoder_new_len;
        query_tokens += s->query_len;
    }
    bool graph = h->spec.graph;
    st->max_seqs = (st->num_seqs ? st->num_seqs : 1) + (graph ? 2 : 0);
    st->max_query_tokens = (query_tokens ? query_tokens : 1) + (graph ? 5 : 0);
    st->max_encoder_tokens = encoder_tokens ? encoder_tokens + (graph ? 3 : 0) : 0;
    st->max_seq_len = longest + (graph ? 9 : 0);
    /* bits may depend on the plan, so it is the same for every step */
    if (h->spec.batch_invariant) {
        st->max_seqs = 64;
        st->max_query_tokens = 512;
        st->max_seq_len = 8192;
    }
    st->rows = st->row_start[st->num_seqs];
    st->new_rows = st->new_row_start[st->num_seqs];
    if (graph) {
        st->rows =
            st->type == FOLIO_ATTENTION_ENCODER ? st->max_encoder_tokens : st->max_query_tokens;
        st->new_rows =
            st->type == FOLIO_ATTENTION_ENCODER_DECODER ? st->max_encoder_tokens : st->rows;
    }
}

/* Fills q, k and v. Rows of padding, of the graph and behind slot -1 stay NaN. */
static void step_fill(const kit_case *h, step *st)
{
    const kit_spec *s = &h->spec;
    st->q = kit_tensor_make(h, s->dtype, st->rows, s->num_heads, s->k_head_size);
    st->k = kit_tensor_make(h, s->k_dtype, st->new_rows, s->num_kv_heads, s->k_head_size);
    st->v = kit_tensor_make(h, s->v_dtype, st->new_rows, s->num_kv_heads, s->v_head_size);
    bool encoder_q = st->type == FOLIO_ATTENTION_ENCODER;
    bool encoder_kv = encoder_q || st->type == FOLIO_ATTENTION_ENCODER_DECODER;
    for (int64_t i = 0; i < st->num_seqs; i++) {
        const kit_seq *seq = &st->seqs[i];
        if (seq->seq_len == 0) continue;
        int64_t id = kit_seq_id(st->seqs, i), first = kit_first_token(seq);
        tensor_fill(h, &st->q, encoder_q ? KIT_ENCODER_Q : KIT_Q, id, encoder_q ? 0 : first,
                    st->row_start[i], st->row_start[i + 1] - st->row_start[i]);
        rotate_rows(h, st, &st->q, i);
        if (type_is_cached(st->type) && seq->slots_ignored) continue;
        int64_t from = encoder_kv ? 0 : first, to = st->new_row_start[i];
        int64_t count = st->new_row_start[i + 1] - to;
        tensor_fill(h, &st->k, encoder_kv ? KIT_ENCODER_K : KIT_K, id, from, to, count);
        tensor_fill(h, &st->v, encoder_kv ? KIT_ENCODER_V : KIT_V, id, from, to, count);
        rotate_rows(h, st, &st->k, i);
    }
}

/* One entry; ids and tokens where the dim is full, so that chunks see the whole's numbers. */
static double bias_value(const kit_case *h, const step *st, int64_t seq, int64_t head, int64_t i,
                         int64_t j)
{
    const kit_spec *s = &h->spec;
    const kit_seq *first = &st->seqs[s->bias & KIT_BIAS_SEQ ? seq : 0];
    int64_t token = type_is_cached(st->type) ? kit_first_token(first) : 0;
    int64_t id = s->bias & KIT_BIAS_SEQ ? kit_seq_id(st->seqs, seq) : 0;
    return bias_entry(s, id, s->bias & KIT_BIAS_QUERY ? token + i : 0, head, j);
}

static void step_bias(const kit_case *h, step *st)
{
    const kit_spec *s = &h->spec;
    folio_bias *b = &st->bias;
    int64_t full[4] = {st->num_seqs, s->num_heads, st->max_rows, st->max_keys};
    b->dtype = s->bias_dtype;
    for (int d = 0; d < 4; d++) b->dims[d] = (s->bias >> d) & 1u ? full[d] : 1;
    int64_t count = 1;
    for (int d = 3; d >= 0; d--) {
        b->strides[d] = count;
        count = count * b->dims[d] + (s->strided ? 1 : 0);
    }
    void *data = kit_alloc((size_t)count, folio_dtype_size(b->dtype));
    memset(data, POISON, (size_t)count * folio_dtype_size(b->dtype));
    for (int64_t n = 0; n < b->dims[0]; n++)
        for (int64_t head = 0; head < b->dims[1]; head++)
            for (int64_t i = 0; i < b->dims[2]; i++)
                for (int64_t j = 0; j < b->dims[3]; j++)
                    kit_store(b->dtype, data,
                              n * b->strides[0] + head * b->strides[1] + i * b->strides[2] +
                                  j * b->strides[3],
                              bias_value(h, st, n, head, i, j));
    b->data = data;
}

void kit_step_open(kit_case *h, folio_attention_type type, const kit_seq *seqs, int64_t num,
                   step *st)
{
    const kit_spec *s = &h->spec;
    *st = (step){.type = type, .seqs = seqs, .num_seqs = num};
    step_shape(h, st);
    step_fill(h, st);
    if (s->alibi) {
        st->slopes = kit_alloc((size_t)s->num_heads, sizeof(float));
        for (int32_t i = 0; i < s->num_heads; i++)
            st->slopes[i] = (float)exp2(-8.0 * (i + 1) / s->num_heads);
    }
    if (s->sinks) {
        st->sinks = kit_alloc((size_t)s->num_heads, sizeof(float));
        for (int32_t i = 0; i < s->num_heads; i++)
            st->sinks[i] = (float)kit_random(s->seed, KIT_SINK, 0, 0, i, 0);
        if (s->num_heads >= 4) st->sinks[s->num_heads - 1] = -INFINITY;
    }
    if ((s->bias || s->bias_shared) && num > 0) step_bias(h, st);
}

void kit_step_close(step *st)
{
    void *owned[] = {st->row_start,    st->new_row_start, st->q.allocation, st->k.allocation,
                     st->v.allocation, st->slopes,        st->sinks};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) kit_free(owned[i]);
    kit_free((void *)(uintptr_t)st->bias.data);
}
