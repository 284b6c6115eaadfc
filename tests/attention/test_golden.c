/*
 * test_golden.c: the reference backend judged by PyTorch in float64.
 *
 * tests/data/golden/attention.golden holds random configurations over every option, with PyTorch's lse
 * and one sum for each row and head of its out. Each is rebuilt here through the public API: inputs
 * from the generator's numbers, the context written to a cache whose every other slot is NaN, one
 * forward, every row compared.
 * FOLIO_GOLDEN names another file, FOLIO_GOLDEN_CASE one case of it.
 */
#include "data/golden/golden_inputs.h"
#include "support.h"

#define MIN_CASES 176
#define ANY_BLOCK 2147483647 /* what rows of a block table are padded with */

/* ---------------------------------------------------------------------------------------------- */
/* The cache                                                                                      */
/* ---------------------------------------------------------------------------------------------- */

/* Leaves the running function, with the case's number and the library's sentence. */
#define STEP(call)                                                                                 \
    do {                                                                                           \
        folio_status s_ = (call);                                                                  \
        if (s_ != FOLIO_OK) {                                                                      \
            test_fail(__FILE__, __LINE__, "case %lld: %s: %s: %s\n    %.400s", (long long)c->id,   \
                      #call, folio_status_name(s_), folio_last_error(), c->line);                  \
            return s_;                                                                             \
        }                                                                                          \
    } while (0)

/* Bytes that num_blocks x block_size x heads rows of `size` numbers span at these strides. */
static size_t span_bytes(const golden_case *c, const int64_t *strides, int64_t size, size_t each)
{
    int64_t last = (c->cache.num_blocks - 1) * strides[0] + (c->cache.block_size - 1) * strides[1] +
                   (c->cache.num_kv_heads - 1) * strides[2];
    return (size_t)(last + size) * each;
}

/* One poisoned buffer per layer; or, with a base, the same place inside each buffer of `base`. */
static void **layer_buffers(golden_case *c, size_t bytes, void **base, int64_t offset)
{
    size_t n = (size_t)c->cache.num_layers;
    void **p = take(&c->mem, n * sizeof *p, 0);
    for (size_t i = 0; i < n; i++)
        p[i] = base ? (void *)((char *)base[i] + offset) : take(&c->mem, bytes, 0xFF);
    return p;
}

/* Memory of STRIDED: four arrays at the case's own strides. */
static void strided_memory(golden_case *c, folio_kv_memory *m)
{
    const int64_t *s = c->kv_strides;
    size_t each = folio_dtype_size(c->cache.dtype);
    m->k_bytes = span_bytes(c, s, c->cache.k_head_size, each);
    m->v_bytes = span_bytes(c, s + 3, c->cache.v_head_size, each);
    m->k = layer_buffers(c, m->k_bytes, NULL, 0);
    m->v = layer_buffers(c, m->v_bytes, NULL, 0);
    m->k_strides = (folio_kv_strides){s[0], s[1], s[2]};
    m->v_strides = (folio_kv_strides){s[3], s[4], s[5]};
    if (c->cache.dtype != FOLIO_INT8) return;
    m->k_scales_bytes = span_bytes(c, s + 6, 1, sizeof(float));
    m->v_scales_bytes = span_bytes(c, s + 9, 1, sizeof(float));
    m->k_scales = (float *const *)(void *)layer_buffers(c, m->k_scales_bytes, NULL, 0);
    m->v_scales = (float *const *)(void *)layer_buffers(c, m->v_scales_bytes, NULL, 0);
    m->k_scales_strides = (folio_kv_strides){s[6], s[7], s[8]};
    m->v_scales_strides = (folio_kv_strides){s[9], s[10], s[11]};
}

/* Memory in a layout's own shape: one buffer for all of a layer, or K and V apart with a gap. */
static folio_status shaped_memory(golden_case *c, const char *backend, folio_kv_memory *m)
{
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    STEP(folio_kv_cache_get_shape(backend, &c->cache, &shape));
    bool one = is(c->memory, "one");
    size_t gap =
        (size_t)((c->cache.num_blocks - 1) * c->block_pad) * folio_dtype_size(c->cache.dtype);
    m->k_bytes = one ? (size_t)shape.layer_bytes : (size_t)shape.k.bytes + gap;
    m->k = layer_buffers(c, m->k_bytes, NULL, 0);
    if (!one) {
        m->v_bytes = (size_t)shape.v.bytes + gap;
        m->v = layer_buffers(c, m->v_bytes, NULL, 0);
    }
    if (c->block_pad) {
        m->k_strides.block = shape.k.strides[0] + c->block_pad;
        m->v_strides.block = shape.v.strides[0] + c->block_pad;
    }
    if (c->cache.dtype != FOLIO_INT8) return FOLIO_OK;
    void **base = one ? (void **)(uintptr_t)m->k : NULL;
    m->k_scales_bytes = (size_t)shape.k_scales.bytes;
    m->v_scales_bytes = (size_t)shape.v_scales.bytes;
    m->k_scales = (float *const *)(void *)layer_buffers(c, m->k_scales_bytes, base,
                                                        shape.k_scales.offset_bytes);
    m->v_scales = (float *const *)(void *)layer_buffers(c, m->v_scales_bytes, base,
                                                        shape.v_scales.offset_bytes);
    return FOLIO_OK;
}

static folio_status view_of(const golden_case *c, const folio_kv_cache *cache, int32_t layer,
                            folio_kv_cache_view *view)
{
    *view = (folio_kv_cache_view){.struct_size = sizeof *view};
    STEP(folio_kv_cache_get_view(cache, layer, view));
    return FOLIO_OK;
}

/* A cache in which every slot of every layer is NaN. */
static folio_status make_cache(golden_case *c, folio_context *ctx, const char *backend,
                               folio_kv_cache **out)
{
    if (!is(c->memory, "create")) {
        folio_kv_memory m = {.struct_size = sizeof m};
        if (is(c->memory, "strided")) strided_memory(c, &m);
        else if (shaped_memory(c, backend, &m) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
        STEP(folio_kv_cache_wrap(ctx, &c->cache, &m, out));
        return FOLIO_OK;
    }
    STEP(folio_kv_cache_create(ctx, &c->cache, out));
    for (int32_t layer = 0; layer < c->cache.num_layers; layer++) {
        folio_kv_cache_view view;
        if (view_of(c, *out, layer, &view) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
        memset(view.k, 0xFF, (size_t)view.k_array.bytes);
        memset(view.v, 0xFF, (size_t)view.v_array.bytes);
        if (view.k_scales) memset(view.k_scales, 0xFF, (size_t)view.k_scales_array.bytes);
        if (view.v_scales) memset(view.v_scales, 0xFF, (size_t)view.v_scales_array.bytes);
    }
    return FOLIO_OK;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001B3);
    return hash;
}

static uint64_t hash_cache(const golden_case *c, const folio_kv_cache *cache)
{
    uint64_t hash = 1;
    for (int32_t layer = 0; cache != NULL && layer < c->cache.num_layers; layer++) {
        folio_kv_cache_view view;
        if (view_of(c, cache, layer, &view) != FOLIO_OK) return 0;
        hash = hash_bytes(hash, view.k, view.k_array.bytes);
        hash = hash_bytes(hash, view.v, view.v_array.bytes);
        if (view.k_scales) hash = hash_bytes(hash, view.k_scales, view.k_scales_array.bytes);
        if (view.v_scales) hash = hash_bytes(hash, view.v_scales, view.v_scales_array.bytes);
    }
    return hash;
}

/* Mark the slots a sequence's rows read that this step does not write. */
static void mark_needed(const golden_case *c, int64_t number, unsigned char *needed)
{
    const golden_seq *s = &c->seqs[number];
    bool cross = c->type == FOLIO_ATTENTION_ENCODER_DECODER;
    int64_t keys = cross && s->s > 0 ? s->enc : s->s, size = c->cache.block_size;
    int64_t context = keys - (cross ? s->enc_new : s->q);
    const int64_t *slots = cross ? s->cross_slots : s->slots;
    for (int64_t j = 0; j < keys; j++) {
        int32_t block = (cross ? s->cross_table : s->table)[j / size];
        if (block == FOLIO_NO_BLOCK) continue;
        int64_t slot = (int64_t)block * size + j % size;
        bool written = j >= context && c->kv_given &&
                       (c->append || slots == NULL || slots[j - context] == slot);
        bool seen = cross ? s->q > 0 : j >= s->seen[0] && j < s->seen[1];
        if (!written && seen && !bias_hides(c, number, s->q, j)) needed[slot] = 1;
    }
}

static folio_status write_context(golden_case *c, folio_kv_cache *cache)
{
    int64_t total = c->cache.num_blocks * c->cache.block_size, n = 0;
    unsigned char *needed = take(&c->mem, (size_t)total, 0);
    int64_t *slots = take(&c->mem, (size_t)total * sizeof *slots, 0);
    for (int64_t i = 0; i < c->num_seqs; i++) mark_needed(c, i, needed);
    for (int64_t slot = 0; slot < total; slot++)
        if (needed[slot]) slots[n++] = slot;
    if (n == 0) return FOLIO_OK;
    const folio_kv_cache_desc *d = &c->cache;
    const int64_t dense[2] = {0, 0};
    strided k = make_tensor(&c->mem, c->ctx_dtype, n, d->num_kv_heads, d->k_head_size, dense);
    strided v = make_tensor(&c->mem, c->ctx_dtype, n, d->num_kv_heads, d->v_head_size, dense);
    for (int64_t i = 0; i < n; i++) {
        fill_row(c, &k, i, T_CACHED_K, slots[i]);
        fill_row(c, &v, i, T_CACHED_V, slots[i]);
    }
    folio_kv_write w = {.struct_size = sizeof w, .k = k.t, .v = v.t, .slots = slots};
    w.k_scale = c->scales[0];
    w.v_scale = c->scales[1];
    w.k_head_scales = c->head_scales[0];
    w.v_head_scales = c->head_scales[1];
    STEP(folio_kv_cache_write(cache, (int32_t)c->layer, &w, NULL));
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* The batch, in each of its forms                                                                */
/* ---------------------------------------------------------------------------------------------- */

static folio_status add_sequences(golden_case *c, folio_batch *batch)
{
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        folio_batch_seq q = {.struct_size = sizeof q, .query_len = s->q, .seq_len = s->s};
        q.padding = s->s == 0;
        q.phase = (folio_phase)s->phase;
        q.causality = (folio_causality)s->causal;
        q.block_table = s->table;
        q.num_blocks = s->num_blocks;
        if (s->table != NULL && i % 2 == 1) { /* more blocks than needed are ignored */
            int32_t *longer = take(&c->mem, (size_t)(s->num_blocks + 1) * sizeof *longer, 0);
            memcpy(longer, s->table, (size_t)s->num_blocks * sizeof *longer);
            longer[q.num_blocks++] = ANY_BLOCK;
            q.block_table = longer;
        }
        q.slots = s->slots;
        q.positions_given = s->pos_given;
        q.first_query_pos = s->pos[0];
        q.first_key_pos = s->pos[1];
        q.encoder_len = s->enc;
        q.encoder_new_len = s->enc_new;
        q.cross_block_table = s->cross_table;
        q.num_cross_blocks = s->num_cross_blocks;
        q.cross_slots = s->cross_slots;
        STEP(folio_batch_add(batch, &q));
    }
    return FOLIO_OK;
}

/* Block tables [num_seqs][stride], `stride` above what the longest needs, padded with anything. */
static int32_t *padded_tables(golden_case *c, bool cross, int64_t *stride)
{
    int64_t widest = 0;
    bool any = false;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        int64_t n = cross ? s->num_cross_blocks : s->num_blocks;
        any = any || (cross ? s->cross_table : s->table) != NULL;
        if (n > widest) widest = n;
    }
    if (!any) return NULL;
    *stride = widest + c->id % 3;
    int32_t *p = take(&c->mem, (size_t)(c->num_seqs * *stride) * sizeof *p, 0);
    for (int64_t i = 0; i < c->num_seqs * *stride; i++) p[i] = ANY_BLOCK;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        const int32_t *table = cross ? s->cross_table : s->table;
        int64_t n = cross ? s->num_cross_blocks : s->num_blocks;
        if (n > 0) memcpy(p + i * *stride, table, (size_t)n * sizeof *p);
    }
    return p;
}

/* The arrays every form shares. */
static folio_step make_arrays(golden_case *c)
{
    size_t n = (size_t)c->num_seqs, wide = sizeof(int64_t), narrow = sizeof(int32_t);
    folio_step a = {.struct_size = sizeof a, .num_seqs = c->num_seqs};
    int32_t *starts = take(&c->mem, (n + 1) * narrow, 0), *lens = take(&c->mem, n * narrow, 0);
    int32_t *phases = take(&c->mem, n * narrow, 0), *causal = take(&c->mem, n * narrow, 0);
    int32_t *enc = take(&c->mem, n * narrow, 0), *enc_new = take(&c->mem, n * narrow, 0);
    int64_t *pos_q = take(&c->mem, n * wide, 0), *pos_k = take(&c->mem, n * wide, 0);
    int64_t *slots = take(&c->mem, (size_t)c->query_rows * wide, 0xFF);
    int64_t *cross = take(&c->mem, (size_t)c->encoder_rows * wide, 0xFF);
    int64_t new_row = 0;
    for (size_t i = 0; i < n; i++) {
        const golden_seq *s = &c->seqs[i];
        starts[i + 1] = starts[i] + (int32_t)s->q;
        lens[i] = (int32_t)s->s;
        if ((phases[i] = (int32_t)s->phase) != 0) a.phases = phases;
        if ((causal[i] = (int32_t)s->causal) != 0) a.causality = causal;
        if ((enc[i] = (int32_t)s->enc) != 0) a.encoder_lens = enc;
        if ((enc_new[i] = (int32_t)s->enc_new) != 0) a.encoder_new_lens = enc_new;
        if (s->slots) memcpy(slots + starts[i], s->slots, (size_t)s->q * wide);
        if (s->cross_slots) memcpy(cross + new_row, s->cross_slots, (size_t)s->enc_new * wide);
        if (s->slots && s->q) a.slots = slots;
        if (s->cross_slots && s->enc_new) a.cross_slots = cross;
        if (s->pos_given) a.first_query_pos = pos_q;
        if (s->pos_given) a.first_key_pos = pos_k;
        pos_q[i] = s->pos[0];
        pos_k[i] = s->pos[1];
        new_row += s->enc_new;
    }
    a.query_start = c->no_starts ? NULL : starts;
    a.seq_lens = c->no_lens ? NULL : lens;
    a.cross_table.indices = padded_tables(c, true, &a.cross_table.row_stride);
    if (a.cross_table.indices != NULL) a.cross_table.kind = FOLIO_TABLE_ROWS;
    return a;
}

/* The CSR and slot forms: all tables one after another. */
static folio_status set_flat(golden_case *c, folio_batch *batch, const folio_step *step)
{
    int64_t total = 0;
    for (int64_t i = 0; i < c->num_seqs; i++) total += c->seqs[i].num_blocks;
    int32_t *indptr = take(&c->mem, (size_t)(c->num_seqs + 1) * sizeof *indptr, 0);
    int32_t *indices = take(&c->mem, (size_t)total * sizeof *indices, 0);
    int64_t *wide = take(&c->mem, (size_t)total * sizeof *wide, 0);
    int32_t *last = take(&c->mem, (size_t)c->num_seqs * sizeof *last, 0);
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        for (int64_t j = 0; j < s->num_blocks; j++)
            wide[indptr[i] + j] = indices[indptr[i] + j] = s->table[j];
        indptr[i + 1] = indptr[i] + (int32_t)s->num_blocks;
        if (s->s > 0) last[i] = (int32_t)((s->s - 1) % c->cache.block_size + 1);
    }
    bool narrow = c->id % 2 == 0;
    if (is(c->form, "csr"))
        STEP(support_set_csr(batch, step, indptr, indices, c->no_lens ? last : NULL));
    else
        STEP(support_set_slots(batch, step, indptr, narrow ? (void *)indices : (void *)wide,
                               narrow ? 4 : 8));
    return FOLIO_OK;
}

static folio_status make_batch(golden_case *c, folio_context *ctx, folio_batch **out)
{
    folio_batch_desc d = {.struct_size = sizeof d};
    d.block_size = c->cache.num_blocks ? c->cache.block_size : 16;
    d.max_seqs = c->num_seqs;
    STEP(folio_batch_create(ctx, &d, out));
    if (is(c->form, "builder")) return add_sequences(c, *out);
    folio_step step = make_arrays(c);
    if (!is(c->form, "table")) return set_flat(c, *out, &step);
    int64_t stride = 0;
    int32_t *tables = padded_tables(c, false, &stride);
    STEP(support_set_rows(*out, &step, tables, stride));
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Running and judging                                                                            */
/* ---------------------------------------------------------------------------------------------- */

/* A backend, and what its results may be off by: shares of max|out| and of max(1, |lse|). */
typedef struct {
    const char *backend;
    folio_context *ctx;
    bool in_double; /* out in FOLIO_F64 */
    double f32_bound, f16_bound, lse_bound;
    double worst; /* seen so far, as a share of the bound */
} judge;

typedef struct {
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
} rig;

static folio_status make_plan(golden_case *c, folio_context *ctx, rig *r)
{
    STEP(folio_attention_create(ctx, &c->attention, &r->attention));
    /* Limits above the need must not matter; in a graph they are the numbers of rows. */
    int64_t slack = c->graph ? c->graph : c->id % 3, longest = 1, rows = c->query_rows + slack;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        if (c->seqs[i].s > longest) longest = c->seqs[i].s;
        if (c->seqs[i].enc > longest) longest = c->seqs[i].enc;
    }
    folio_attention *list[1] = {r->attention};
    const uint32_t types[1] = {FOLIO_ATTENTION_BIT(c->type)};
    folio_plan_desc d = {.struct_size = sizeof d, .attentions = list, .num_attentions = 1};
    d.types = c->type == FOLIO_ATTENTION_DECODER && c->id % 2 == 1 ? NULL : types;
    d.block_size = c->cache.block_size;
    d.num_blocks = c->cache.num_blocks;
    d.max_seqs = c->num_seqs + slack;
    d.max_query_tokens = rows > 0 ? rows : 1;
    d.max_seq_len = longest + slack;
    d.max_encoder_tokens = c->encoder_rows + slack;
    d.flags = c->graph ? FOLIO_PLAN_GRAPH : 0;
    STEP(folio_plan_create(ctx, &d, &r->plan));
    STEP(folio_plan_update(r->plan, r->batch, NULL));
    return FOLIO_OK;
}

/* Rows of q, k and v; those of padding stay NaN, like those past the batch. */
static void fill_inputs(const golden_case *c, strided *q, strided *k, strided *v)
{
    int64_t row = 0, new_row = 0;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        int64_t rows = c->type == FOLIO_ATTENTION_ENCODER ? s->enc_new : s->q;
        int64_t new_rows = c->type == FOLIO_ATTENTION_ENCODER_DECODER ? s->enc_new : rows;
        bool padding = s->s == 0 && c->type != FOLIO_ATTENTION_ENCODER;
        for (int64_t j = 0; j < rows && !padding; j++) fill_row(c, q, row + j, T_Q, row + j);
        for (int64_t j = 0; j < new_rows && !padding; j++) {
            fill_row(c, k, new_row + j, T_K, new_row + j);
            fill_row(c, v, new_row + j, T_V, new_row + j);
        }
        row += rows;
        new_row += new_rows;
    }
}

/* Every byte of a buffer is as make_tensor left it. */
static bool untouched(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i] != 0xFF) return false;
    return true;
}

/* One row and head of out; rows past the batch are a graph's padding: zeros. */
static bool out_is_right(const golden_case *c, judge *by, const strided *out, int64_t row,
                         int64_t h)
{
    if (row < c->rows) {
        bool in_f32 = c->attention.dtype == FOLIO_F32 || by->in_double;
        double share =
            share_of_bound(c, out, row, h, c->largest * (in_f32 ? by->f32_bound : by->f16_bound));
        if (share > by->worst) by->worst = share;
        return share <= 1;
    }
    for (int64_t d = 0; d < out->size; d++)
        if (kit_load(out->t.dtype, out->t.data,
                     row * out->t.token_stride + h * out->t.head_stride + d) != 0)
            return false;
    return true;
}

static bool lse_is_right(const golden_case *c, const judge *by, const strided *lse, int64_t row,
                         int64_t h)
{
    double got = (double)((float *)lse->t.data)[row * lse->t.token_stride + h * lse->t.head_stride];
    double none = c->sinks ? (double)c->sinks[h] : -INFINITY;
    double want = row < c->rows ? (double)c->lse[row * lse->heads + h] : none;
    return (isinf(want) && got == want) || fabs(got - want) <= by->lse_bound * fmax(1, fabs(want));
}

/* Sets a row and head back to 0xFF, so that stray writes show at the end. */
static void erase(strided *x, int64_t row, int64_t h)
{
    size_t each = folio_dtype_size(x->t.dtype);
    size_t at = (size_t)(row * x->t.token_stride + h * x->t.head_stride);
    memset((char *)x->t.data + at * each, 0xFF, (size_t)x->size * each);
}

static void compare(const golden_case *c, judge *by, strided *out, strided *lse)
{
    int64_t bad = 0;
    for (int64_t row = 0; row < out->t.tokens; row++)
        for (int64_t h = 0; h < out->heads; h++) {
            if (!out_is_right(c, by, out, row, h) && bad++ < 2)
                CHECK_MSG(false, "case %lld: out[%lld][%lld] is wrong\n    %.400s",
                          (long long)c->id, (long long)row, (long long)h, c->line);
            erase(out, row, h);
            if (lse == NULL) continue;
            if (!lse_is_right(c, by, lse, row, h) && bad++ < 2)
                CHECK_MSG(false, "case %lld: lse[%lld][%lld] is wrong\n    %.400s",
                          (long long)c->id, (long long)row, (long long)h, c->line);
            erase(lse, row, h);
        }
    CHECK_MSG(untouched(out->t.data, (size_t)out->extent * folio_dtype_size(out->t.dtype)),
              "case %lld: something was written between the rows of out", (long long)c->id);
    if (lse != NULL)
        CHECK_MSG(untouched(lse->t.data, (size_t)lse->extent * sizeof(float)),
                  "case %lld: something was written between the rows of lse", (long long)c->id);
}

static folio_status forward(golden_case *c, judge *by, rig *r)
{
    const folio_attention_desc *a = &c->attention;
    int64_t rows = c->rows + c->graph, new_rows = c->new_rows + c->graph;
    folio_dtype out_dtype = by->in_double ? FOLIO_F64 : a->dtype;
    strided q = make_tensor(&c->mem, a->dtype, rows, a->num_heads, a->k_head_size, c->q_strides);
    strided k =
        make_tensor(&c->mem, c->new_dtype, new_rows, a->num_kv_heads, a->k_head_size, c->k_strides);
    strided v =
        make_tensor(&c->mem, c->new_dtype, new_rows, a->num_kv_heads, a->v_head_size, c->v_strides);
    strided out =
        make_tensor(&c->mem, out_dtype, rows, a->num_heads, a->v_head_size, c->out_strides);
    strided lse = make_tensor(&c->mem, FOLIO_F32, rows, a->num_heads, 1, c->lse_strides);
    fill_inputs(c, &q, &k, &v);
    folio_tensors t = {.struct_size = sizeof t, .q = q.t, .out = out.t};
    if (c->kv_given && new_rows > 0) {
        t.k = k.t;
        t.v = v.t;
    }
    if (c->lse != NULL) {
        t.lse = lse.t.data;
        t.lse_token_stride = lse.t.token_stride;
        t.lse_head_stride = lse.t.head_stride;
    }
    t.slopes = c->slopes;
    t.sinks = c->sinks;
    make_bias(c, &t.bias);
    t.k_scale = c->scales[0];
    t.v_scale = c->scales[1];
    t.k_head_scales = c->head_scales[0];
    t.v_head_scales = c->head_scales[1];
    t.flags = c->append ? FOLIO_KV_APPEND : 0;
    bool writes =
        (c->type == FOLIO_ATTENTION_DECODER || c->type == FOLIO_ATTENTION_ENCODER_DECODER) &&
        c->kv_given && !c->append;
    uint64_t before = writes ? 0 : hash_cache(c, r->cache);
    STEP(folio_attention_forward(r->plan, 0, c->type, r->cache, (int32_t)c->layer, &t, NULL));
    compare(c, by, &out, c->lse ? &lse : NULL);
    CHECK_MSG(writes || hash_cache(c, r->cache) == before,
              "case %lld: the cache changed, and nothing was to be written", (long long)c->id);
    return FOLIO_OK;
}

static void run_case(golden_case *c, judge *by)
{
    rig r = {0};
    bool reads = c->type == FOLIO_ATTENTION_DECODER || c->type == FOLIO_ATTENTION_ENCODER_DECODER;
    folio_status ok = FOLIO_OK;
    if (c->cache.num_blocks > 0) ok = make_cache(c, by->ctx, by->backend, &r.cache);
    if (ok == FOLIO_OK && r.cache != NULL && reads) ok = write_context(c, r.cache);
    if (ok == FOLIO_OK) ok = make_batch(c, by->ctx, &r.batch);
    if (ok == FOLIO_OK) ok = make_plan(c, by->ctx, &r);
    if (ok == FOLIO_OK) forward(c, by, &r);
    folio_plan_destroy(r.plan);
    folio_batch_destroy(r.batch);
    folio_kv_cache_destroy(r.cache);
    folio_attention_destroy(r.attention);
}

/* Call `each` for every case of the file; cases are counted against its header. */
static void for_each_case(void (*each)(golden_case *, void *), void *user, int64_t *count)
{
    golden_file f;
    golden_case *c = calloc(1, sizeof *c);
    if (c == NULL || !open_golden(&f)) {
        CHECK_MSG(false, "no golden file was read");
        free(c);
        return;
    }
    const char *only = getenv("FOLIO_GOLDEN_CASE");
    int64_t ran = 0;
    int got;
    *count = 0;
    while ((got = next_case(&f, c)) == 1) {
        if (only == NULL || strtoll(only, NULL, 10) == c->id) {
            each(c, user);
            ran++;
        }
        ++*count;
        drop(&c->mem);
    }
    CHECK_MSG(got == 0, "malformed golden file at or after case %lld", (long long)c->id);
    drop(&c->mem);
    CHECK_INT(*count, f.promised);
    CHECK_MSG(ran > 0, "no case was run");
    CHECK_MSG(!f.committed || *count >= MIN_CASES, "%lld cases, fewer than %d", (long long)*count,
              MIN_CASES);
    free(f.text);
    free(c);
}

static void judge_case(golden_case *c, void *user) { run_case(c, user); }

static void judge_backend(judge *by)
{
    folio_context_desc d = {.struct_size = sizeof d, .backend = by->backend, .num_threads = 2};
    int64_t count = 0;
    REQUIRE_TEST(folio_context_create(&d, &by->ctx) == FOLIO_OK);
    for_each_case(judge_case, by, &count);
    folio_context_destroy(by->ctx);
    printf("  golden: %lld cases on %s, worst at %.3g of its bound\n", (long long)count,
           by->backend, by->worst);
}

TEST(golden, reference_agrees_with_pytorch)
{
    judge by = {.backend = "reference", .in_double = true, .f32_bound = 2e-7, .lse_bound = 1e-6};
    judge_backend(&by);
}

/* A second opinion without the reference, which judges the cpu backend, tightly, elsewhere. */
TEST(golden, cpu_is_near_pytorch)
{
    judge by = {.backend = "cpu", .f32_bound = 2e-5, .f16_bound = 2e-2, .lse_bound = 2e-5};
    judge_backend(&by);
}

/* ---------------------------------------------------------------------------------------------- */
/* The file itself                                                                                */
/* ---------------------------------------------------------------------------------------------- */

typedef struct {
    struct {
        char name[48];
        int count;
    } rows[96];
    int num_rows;
} tally;

static void saw(tally *t, const char *name, bool there)
{
    int i = 0;
    while (i < t->num_rows && strcmp(t->rows[i].name, name) != 0) i++;
    if (i == t->num_rows) snprintf(t->rows[t->num_rows++].name, sizeof t->rows[0].name, "%s", name);
    t->rows[i].count += there;
}

static void tally_sequences(const golden_case *c, tally *t)
{
    bool decode = false, several = false, chunk = false, prompt = false, padding = false;
    bool released = false, unstored = false, free_view = false, pos = false, fresh = false;
    bool cached = false, more = false, ignored = false, phase = false;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *s = &c->seqs[i];
        decode = decode || (s->q == 1 && s->s > 1);
        several = several || (s->q > 1 && s->q < 4 && s->s > s->q);
        chunk = chunk || (s->q > 3 && s->s > s->q);
        prompt = prompt || (s->q > 1 && s->s == s->q);
        padding = padding || (s->s == 0 && s->q > 0);
        free_view =
            free_view || (s->causal == FOLIO_CAUSAL_NO && c->type == FOLIO_ATTENTION_DECODER);
        pos = pos || (s->pos_given && c->type == FOLIO_ATTENTION_DECODER);
        ignored = ignored || (s->pos_given && c->type != FOLIO_ATTENTION_DECODER);
        phase = phase || s->phase != FOLIO_PHASE_AUTO;
        more = more || (s->s > 0 && s->q > s->s && c->type == FOLIO_ATTENTION_DECODER);
        fresh = fresh || s->enc_new > 0;
        cached = cached || s->enc > s->enc_new;
        for (int64_t j = 0; s->table && j < s->num_blocks; j++)
            released = released || s->table[j] == FOLIO_NO_BLOCK;
        for (int64_t j = 0; s->slots && s->s && j < s->q; j++)
            unstored = unstored || s->slots[j] == -1;
    }
    bool cross = c->type == FOLIO_ATTENTION_ENCODER_DECODER;
    saw(t, "a decode", decode);
    saw(t, "a decode of several tokens", several);
    saw(t, "a chunk", chunk);
    saw(t, "a prompt", prompt);
    saw(t, "padding", padding);
    saw(t, "a released block", released);
    saw(t, "slot -1", unstored);
    saw(t, "a decoder that is not causal", free_view);
    saw(t, "first positions", pos);
    saw(t, "first positions that count for nothing", ignored);
    saw(t, "a phase that is given", phase);
    saw(t, "more queries than keys", more);
    saw(t, "cross attention, some new, some cached", cross && fresh && cached && c->kv_given);
    saw(t, "cross attention without a cache", cross && c->cache.num_blocks == 0);
}

static void tally_case(golden_case *c, void *user)
{
    tally *t = user;
    const folio_attention_desc *a = &c->attention;
    char name[48];
    for (int i = 0; i < FOLIO_NUM_ATTENTION_TYPES; i++)
        saw(t, folio_attention_type_name((folio_attention_type)i), (int)c->type == i);
    for (int i = FOLIO_F32; i <= FOLIO_INT8; i++) {
        snprintf(name, sizeof name, "KV of %s", folio_dtype_name((folio_dtype)i));
        saw(t, name, c->cache.num_blocks > 0 && (int)c->cache.dtype == i);
        snprintf(name, sizeof name, "q of %s", folio_dtype_name((folio_dtype)i));
        if (i <= FOLIO_BF16) saw(t, name, (int)a->dtype == i);
        snprintf(name, sizeof name, "bias of %s", folio_dtype_name((folio_dtype)i));
        if (i <= FOLIO_BF16) saw(t, name, (int)c->bias_dtype == i);
    }
    for (int i = 0; i < FOLIO_NUM_LAYOUTS; i++) {
        snprintf(name, sizeof name, "layout %s", folio_layout_name((folio_layout)i));
        saw(t, name, c->cache.num_blocks > 0 && (int)c->cache.layout == i);
    }
    saw(t, "the batch builder", is(c->form, "builder"));
    saw(t, "block tables", is(c->form, "table"));
    saw(t, "CSR", is(c->form, "csr"));
    saw(t, "slot lists", is(c->form, "slots"));
    saw(t, "a wrapped cache", c->cache.num_blocks > 0 && !is(c->memory, "create"));
    saw(t, "no cache", c->cache.num_blocks == 0);
    saw(t, "block size of no power of two", (c->cache.block_size & (c->cache.block_size - 1)) != 0);
    saw(t, "groups", a->num_heads > a->num_kv_heads && a->num_kv_heads > 1);
    saw(t, "one kv head", a->num_heads > 1 && a->num_kv_heads == 1);
    saw(t, "K and V sizes that differ", a->k_head_size != a->v_head_size);
    saw(t, "head size of 128 or more", a->k_head_size >= 128);
    saw(t, "window", a->windowed && !c->slopes);
    saw(t, "ALiBi", !a->windowed && c->slopes);
    saw(t, "ALiBi and window", a->windowed && c->slopes);
    saw(t, "soft cap", a->soft_cap > 0);
    saw(t, "k and v of another dtype than q", c->new_dtype != a->dtype);
    saw(t, "scales per kv head", c->head_scales[0] && c->head_scales[1] && c->cache.num_blocks > 0);
    saw(t, "explicit scale", a->scale != 0);
    saw(t, "sinks", c->sinks != NULL);
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "bias with dim %d broadcast", i);
        saw(t, name, c->bias_dtype != 0 && c->bias_dims[i] == 1);
    }
    saw(t, "bias that blinds rows", c->bias_dtype != 0 && c->bias_blind > 0);
    saw(t, "lse", c->lse != NULL);
    saw(t, "FOLIO_KV_APPEND", c->append);
    saw(t, "k and v NULL", !c->kv_given);
    saw(t, "FOLIO_PLAN_GRAPH", c->graph > 0);
    tally_sequences(c, t);
}

TEST(golden, covers_every_option)
{
    tally t = {.num_rows = 0};
    int64_t count = 0;
    if (getenv("FOLIO_GOLDEN_CASE") != NULL) return;
    for_each_case(tally_case, &t, &count);
    /* A short file for a quick look need not have everything. */
    for (int i = 0; count >= MIN_CASES && i < t.num_rows; i++)
        CHECK_MSG(t.rows[i].count > 0, "no case has: %s", t.rows[i].name);
    CHECK(count < MIN_CASES || t.num_rows > 50);
}
