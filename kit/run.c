/*
 * run.c: a step run: contexts stored, plan, forward, guards. Also whole checks, and
 * sequences run in pieces.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POISON = 0xff };

/* ---- Storing contexts */

/* `count` rows of one kv tensor from token `from` on, packed. */
static folio_tensor kv_rows(const kit_case *h, int32_t tensor, folio_dtype dtype, int64_t id,
                            int64_t from, int64_t count, int64_t size)
{
    const kit_spec *s = &h->spec;
    int64_t width = s->num_kv_heads * size;
    void *data = kit_alloc((size_t)(count * width), folio_dtype_size(dtype));
    for (int64_t i = 0; i < count * width; i++) {
        int64_t token = from + i / width;
        double x = kit_random(s->seed, tensor, id, token, i % width / size, i % size);
        kit_store(dtype, data, i, kit_is_hidden(h, id, token) ? (double)NAN : x);
    }
    return (folio_tensor){.data = data, .dtype = dtype, .tokens = count};
}

/* Stores a sequence's tokens up to `upto`, as an engine would have in earlier steps. shift: of their positions. */
static bool store_tokens(kit_case *h, seq_state *state, int cross, int64_t upto, int64_t shift)
{
    int64_t from = state->stored[cross], count = upto - from;
    if (count <= 0) return true;
    const kit_spec *s = &h->spec;
    int64_t *slots = kit_alloc((size_t)count, sizeof *slots);
    int64_t *positions = kit_alloc((size_t)count, sizeof *positions);
    for (int64_t i = 0; i < count; i++) {
        slots[i] = kit_slot(h, state, cross, from + i);
        positions[i] = kit_token_position(h, from + i) + shift;
    }
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .slots = slots, .k_scale = s->k_scale, .v_scale = s->v_scale,
                   .k_head_scales = h->head_scales[0], .v_head_scales = h->head_scales[1]);
    if (s->rotary && !s->rotary_before && !cross) {
        write.rotary = kit_rotary(h, h->ctx);
        write.positions = positions;
    }
    write.k = kv_rows(h, cross ? KIT_ENCODER_K : KIT_K, s->k_dtype, state->id, from, count,
                      s->k_head_size);
    if (!s->v_in_k)
        write.v = kv_rows(h, cross ? KIT_ENCODER_V : KIT_V, s->v_dtype, state->id, from, count,
                          s->v_head_size);
    for (int64_t i = 0; s->rotary_before && i < count * s->num_kv_heads; i++)
        kit_rotate_stored(h, s->k_dtype, positions[i / s->num_kv_heads], write.k.data,
                          i * s->k_head_size);
    folio_status status = kit_wait(h, folio_kv_cache_write(h->cache, s->layer, &write, NULL));
    kit_free(write.k.data);
    kit_free(write.v.data);
    kit_free(slots);
    kit_free(positions);
    if (status != FOLIO_OK) return kit_refused("cache write", status);
    state->stored[cross] = upto;
    return true;
}

/* Stores what the step's keys need and the forward will not write itself. given: it gets k and v. */
static bool store_contexts(kit_case *h, folio_attention_type type, const kit_seq *seqs,
                           int64_t num_seqs, bool given)
{
    if (h->cache == NULL || !type_is_cached(type)) return true;
    int cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    for (int64_t i = 0; i < num_seqs; i++) {
        const kit_seq *s = &seqs[i];
        int64_t all = kit_seq_keys(s, type);
        int64_t context = cross ? s->encoder_len - s->encoder_new_len : kit_seq_context(s);
        bool stored_here = !given || s->slots_ignored;
        if (all == 0) continue;
        seq_state *state = kit_state(h, kit_seq_id(seqs, i));
        bool shifted = s->positions_given && !h->spec.positions && !cross;
        int64_t first = kit_only_reads(s) ? s->first_key_pos : s->first_query_pos - context;
        int64_t shift = shifted ? first : 0;
        if (!store_tokens(h, state, cross, stored_here ? all : context, shift)) return false;
    }
    return true;
}

/* After a forward that wrote its tokens. */
static void note_stored(kit_case *h, const step *st)
{
    if (h->cache == NULL || !type_is_cached(st->type) || h->spec.append) return;
    int cross = st->type == FOLIO_ATTENTION_ENCODER_DECODER;
    for (int64_t i = 0; i < st->num_seqs; i++) {
        seq_state *state = kit_state(h, kit_seq_id(st->seqs, i));
        int64_t keys = kit_seq_keys(&st->seqs[i], st->type);
        if (keys > state->stored[cross]) state->stored[cross] = keys;
    }
}

/* ---- Forward */

void kit_result_make(const kit_case *h, const step *st, folio_dtype dtype, kit_result *r)
{
    *r = (kit_result){.num_seqs = st->num_seqs,
                      .rows = st->rows,
                      .heads = h->spec.num_heads,
                      .head_size = h->spec.v_head_size,
                      .dtype = dtype};
    size_t heads = (size_t)(r->rows * r->heads), count = heads * (size_t)r->head_size;
    r->row_start = kit_alloc((size_t)st->num_seqs + 1, sizeof(int64_t));
    memcpy(r->row_start, st->row_start, ((size_t)st->num_seqs + 1) * sizeof(int64_t));
    r->out = kit_alloc(count, sizeof(double));
    r->bits = kit_alloc(count, folio_dtype_size(dtype));
    if (h->spec.no_lse) return;
    r->lse = kit_alloc(heads, sizeof(double));
    r->lse_bits = kit_alloc(heads, sizeof(float));
}

void kit_result_free(kit_result *r)
{
    kit_free(r->row_start);
    kit_free(r->out);
    kit_free(r->lse);
    kit_free(r->bits);
    kit_free(r->lse_bits);
    for (int i = 0; r->others && i < KIT_ORDERS - 1; i++) kit_result_free(&r->others[i]);
    kit_free(r->others);
    *r = (kit_result){0};
}

/* Copies elements out and puts NaN in their place, so that what is left must be all poison. */
static bool drain(const step_tensor *t, const char *what, void *bits, double *values)
{
    size_t size = folio_dtype_size(t->dtype);
    for (int64_t i = 0; i < t->tokens * t->heads; i++) {
        int64_t from = step_at(t, i / t->heads, i % t->heads);
        memcpy((char *)bits + (size_t)(i * t->size) * size, (char *)t->data + (size_t)from * size,
               (size_t)t->size * size);
        memset((char *)t->data + (size_t)from * size, POISON, (size_t)t->size * size);
    }
    for (int64_t i = 0; i < t->tokens * t->heads * t->size; i++)
        values[i] = kit_load(t->dtype, bits, i);
    const unsigned char *p = t->allocation;
    for (size_t i = 0; i < t->bytes; i++)
        if (p[i] != POISON) {
            kit_fail("%s: byte %lld from its start, which is outside of it, was written", what,
                     (long long)i - (long long)((char *)t->data - (char *)t->allocation));
            return false;
        }
    return true;
}

/* The plan of one step; NULL on failure. */
static folio_plan *make_plan(kit_case *h, folio_context *ctx, folio_attention *attention,
                             const step *st, folio_batch *batch)
{
    uint32_t types = FOLIO_ATTENTION_BIT(st->type);
    folio_plan_desc desc =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .types = &types, .num_attentions = 1,
                   .max_seqs = st->max_seqs, .max_query_tokens = st->max_query_tokens,
                   .max_seq_len = st->max_seq_len, .max_encoder_tokens = st->max_encoder_tokens,
                   .flags = (h->spec.graph ? FOLIO_PLAN_GRAPH : 0) |
                            (h->spec.batch_invariant ? FOLIO_PLAN_BATCH_INVARIANT : 0) |
                            (h->spec.private_slots ? FOLIO_PLAN_PRIVATE_SLOTS : 0),
                   .max_query_len = h->spec.only_decodes ? 1 : 0);
    desc.cache = h->cache;
    folio_plan *plan = NULL;
    folio_status status = folio_plan_create(ctx, &desc, &plan);
    if (status != FOLIO_OK) {
        kit_refused("plan", status);
        return NULL;
    }
    status = folio_plan_update(plan, batch, NULL);
    if (status == FOLIO_OK) return plan;
    kit_refused("plan update", status);
    folio_plan_destroy(plan);
    return NULL;
}

bool kit_plan_info(kit_case *h, const kit_seq *seqs, int64_t num_seqs, folio_plan_info *info)
{
    enum { MANY = 1 << 17 };
    step st = {.type = FOLIO_ATTENTION_DECODER,
               .max_seqs = num_seqs,
               .max_query_tokens = MANY,
               .max_seq_len = MANY};
    *info = (folio_plan_info){.struct_size = sizeof *info};
    folio_batch *batch = kit_batch(h, seqs, num_seqs);
    folio_plan *plan = batch ? make_plan(h, h->ctx, h->attention, &st, batch) : NULL;
    folio_status status = FOLIO_OK;
    if (plan) status = folio_plan_get_info(plan, 0, st.type, info);
    if (plan && status == FOLIO_OK) {
        snprintf(h->kernel, sizeof h->kernel, "%s", info->kernel);
        info->kernel = h->kernel;
    }
    info->fallback = NULL; /* it was the plan's */
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    return plan && (status == FOLIO_OK || kit_refused("plan info", status));
}

static double seconds_now(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* give_kv: hand k and v of this step over, to be stored or read. */
static bool run_plan(kit_case *h, folio_context *ctx, const folio_plan *plan, const step *st,
                     bool give_kv, folio_dtype out_dtype, kit_result *result)
{
    const kit_spec *s = &h->spec;
    step_tensor out = kit_tensor_make(h, out_dtype, st->rows, s->num_heads, s->v_head_size);
    step_tensor lse = kit_tensor_make(h, FOLIO_F32, st->rows, s->num_heads, 1);
    folio_tensors t = FOLIO_WITH(
        folio_tensors, .q = kit_tensor_of(&st->q), .out = kit_tensor_of(&out), .slopes = st->slopes,
        .sinks = st->sinks, .bias = st->bias, .k_scale = s->k_scale, .v_scale = s->v_scale,
        .k_head_scales = h->head_scales[0], .v_head_scales = h->head_scales[1]);
    int64_t *positions = kit_row_positions(h, st);
    t.rotary = kit_rotary(h, ctx);
    t.positions = positions;
    if (s->in_place && out_dtype == st->q.dtype && out.bytes == st->q.bytes) {
        memcpy(out.allocation, st->q.allocation, out.bytes);
        t.q = t.out;
    }
    if (give_kv && st->new_rows > 0) {
        t.k = kit_tensor_of(&st->k);
        if (!s->v_in_k) t.v = kit_tensor_of(&st->v);
    }
    if (!s->no_lse) {
        t.lse = lse.data;
        t.lse_token_stride = lse.token_stride;
        t.lse_head_stride = lse.head_stride;
    }
    if (s->append) t.flags = FOLIO_KV_APPEND;
    folio_kv_cache *cache = type_is_cached(st->type) ? h->cache : NULL;
    double started = seconds_now();
    folio_status status = folio_attention_forward(plan, 0, st->type, cache, s->layer, &t, NULL);
    if (status == FOLIO_OK) status = folio_run_wait(ctx, NULL);
    double seconds = seconds_now() - started;
    bool ok = status == FOLIO_OK || kit_refused("forward", status);
    if (ok) {
        kit_result_make(h, st, out_dtype, result);
        result->seconds = seconds;
        /* tensor cores add 16 products at a time and cut the sum */
        if (kit_is_device(ctx)) result->cut = ldexp((double)s->k_head_size / 16, -24);
        ok = drain(&out, "out", result->bits, result->out);
        if (!s->no_lse) ok = drain(&lse, "lse", result->lse_bits, result->lse) && ok;
    }
    kit_free(positions);
    kit_free(out.allocation);
    kit_free(lse.allocation);
    return ok;
}

static bool run_step(kit_case *h, folio_context *ctx, folio_attention_type type,
                     const kit_seq *seqs, int64_t num_seqs, bool give_kv, folio_dtype out_dtype,
                     kit_result *result)
{
    bool ok = false;
    step st;
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    folio_attention_desc desc = kit_attention_desc(&h->spec);
    kit_step_open(h, type, seqs, num_seqs, &st);
    folio_batch *batch = kit_batch_make(h, ctx, seqs, num_seqs);
    if (batch == NULL) goto done;
    folio_status status = folio_attention_create(ctx, &desc, &attention);
    if (status != FOLIO_OK) {
        attention = NULL;
        kit_refused("attention", status);
        goto done;
    }
    plan = make_plan(h, ctx, attention, &st, batch);
    ok = plan != NULL && run_plan(h, ctx, plan, &st, give_kv, out_dtype, result);
    if (ok && give_kv) note_stored(h, &st);
done:
    folio_plan_destroy(plan);
    folio_attention_destroy(attention);
    folio_batch_destroy(batch);
    kit_step_close(&st);
    return ok;
}

bool kit_forward(kit_case *h, folio_context *ctx, folio_attention_type type, const kit_seq *seqs,
                 int64_t num_seqs, kit_result *result)
{
    *result = (kit_result){0};
    if (!kit_reserve_all(h, seqs, num_seqs)) return false;
    bool given = !(h->spec.no_write && h->cache && type_is_cached(type));
    for (int64_t i = 0; i < num_seqs; i++)
        if (type == FOLIO_ATTENTION_DECODER && kit_only_reads(&seqs[i])) given = false;
    if (!store_contexts(h, type, seqs, num_seqs, given)) return false;
    return run_step(h, ctx ? ctx : h->ctx, type, seqs, num_seqs, given, h->spec.dtype, result);
}

bool kit_judge(kit_case *h, folio_context *reference, folio_attention_type type,
               const kit_seq *seqs, int64_t num_seqs, kit_result *result)
{
    *result = (kit_result){0};
    bool stored = h->cache && type_is_cached(type) && !h->spec.append;
    return run_step(h, reference, type, seqs, num_seqs, !stored, FOLIO_F64, result);
}

/* ---- Whole checks */

/* exact: the case is the reference's own, which answers to the formula in double precision. */
static bool check_case(kit_case *h, folio_context *reference, bool exact, folio_attention_type type,
                       const kit_seq *seqs, int64_t num_seqs, kit_verdict *verdict)
{
    kit_result got = {0}, ref = {0}, formula = {0};
    bool ok = kit_forward(h, NULL, type, seqs, num_seqs, &got) &&
              kit_judge(h, reference, type, seqs, num_seqs, &ref) &&
              kit_formula(h, type, seqs, num_seqs, exact, &formula);
    if (ok) kit_compare(&got, &ref, exact ? &ref : &formula, verdict);
    if (ok && exact && verdict->ok) kit_compare_exact(&ref, &formula, verdict);
    kit_result_free(&got);
    kit_result_free(&ref);
    kit_result_free(&formula);
    return ok;
}

bool kit_check(folio_context *ctx, folio_context *reference, const kit_spec *spec,
               folio_attention_type type, const kit_seq *seqs, int64_t num_seqs,
               kit_verdict *verdict)
{
    *verdict = (kit_verdict){0};
    folio_context_info info = {.struct_size = sizeof info};
    folio_context_get_info(ctx, &info);
    bool exact = strcmp(info.backend, "reference") == 0;
    folio_context *own = reference ? NULL : kit_context("reference", NULL, 1);
    folio_context *judge = exact ? ctx : reference ? reference : own;
    kit_case *h = kit_open(ctx, spec, seqs, num_seqs);
    if (h == NULL || judge == NULL || !check_case(h, judge, exact, type, seqs, num_seqs, verdict)) {
        verdict->ok = false;
        strncpy(verdict->message, kit_error(), sizeof verdict->message - 1);
    }
    kit_close(h);
    folio_context_destroy(own);
    return verdict->ok;
}

/* ---- Pieces */

/* The sequence after `done` of its query tokens, with `count` more in this step. */
static kit_seq piece_of(const kit_seq *whole, int64_t done, int64_t count)
{
    kit_seq s = *whole;
    s.query_len = count;
    s.only_reads = kit_only_reads(whole);
    if (!s.only_reads) s.seq_len = whole->seq_len - whole->query_len + done + count;
    s.first_query_pos += done;
    if (done > 0) s.encoder_new_len = 0; /* the first piece brought it */
    return s;
}

static void join_rows(kit_result *to, const kit_result *from, int64_t from_row, int64_t done,
                      int64_t n)
{
    int64_t width = to->heads * to->head_size;
    size_t size = folio_dtype_size(to->dtype);
    memcpy(to->out + done * width, from->out + from_row * width, (size_t)(n * width) * 8);
    memcpy((char *)to->bits + (size_t)(done * width) * size,
           (char *)from->bits + (size_t)(from_row * width) * size, (size_t)(n * width) * size);
    if (to->lse == NULL) return;
    memcpy(to->lse + done * to->heads, from->lse + from_row * to->heads,
           (size_t)(n * to->heads) * 8);
    memcpy(to->lse_bits + done * to->heads, from->lse_bits + from_row * to->heads,
           (size_t)(n * to->heads) * 4);
}

bool kit_run_pieces(folio_context *ctx, const kit_spec *spec, folio_attention_type type,
                    const kit_seq *whole, const int64_t *chunks, int64_t num_chunks,
                    const kit_seq *crowd, int64_t num_crowd, bool crowd_first, kit_result *result)
{
    *result = (kit_result){0};
    kit_seq *seqs = kit_alloc((size_t)num_crowd + 1, sizeof *seqs);
    int64_t at = crowd_first ? num_crowd : 0;
    for (int64_t i = 0; i < num_crowd; i++) {
        int64_t to = crowd_first ? i : i + 1;
        seqs[to] = crowd[i];
        if (seqs[to].id == 0) seqs[to].id = 1000 + i;
    }
    seqs[at] = *whole;
    if (seqs[at].id == 0) seqs[at].id = 1;
    kit_seq named = seqs[at];
    kit_case *h = kit_open(ctx, spec, seqs, num_crowd + 1);
    bool ok = h != NULL;
    if (ok) {
        step st;
        kit_step_open(h, type, &named, 1, &st);
        kit_result_make(h, &st, h->spec.dtype, result);
        kit_step_close(&st);
    }
    int64_t done = 0;
    for (int64_t i = 0; ok && i < num_chunks; i++) {
        kit_result chunk;
        seqs[at] = piece_of(&named, done, chunks[i]);
        ok = kit_forward(h, NULL, type, seqs, num_crowd + 1, &chunk);
        if (ok) join_rows(result, &chunk, chunk.row_start[at], done, chunks[i]);
        kit_result_free(&chunk);
        done += chunks[i];
        for (int64_t n = 0; n <= num_crowd; n++) /* the crowd's encoders are new once */
            if (n != at) seqs[n].encoder_new_len = 0;
    }
    if (ok && done != named.query_len) {
        kit_fail("pieces hold %lld tokens, the sequence %lld", (long long)done,
                 (long long)named.query_len);
        ok = false;
    }
    kit_close(h);
    kit_free(seqs);
    return ok;
}

bool kit_rows_equal(const kit_result *a, int64_t row_a, const kit_result *b, int64_t row_b,
                    int64_t n)
{
    size_t row = (size_t)(a->heads * a->head_size) * folio_dtype_size(a->dtype);
    size_t lse_row = (size_t)a->heads * sizeof(float);
    if (a->heads != b->heads || a->head_size != b->head_size || a->dtype != b->dtype) return false;
    if (row_a + n > a->rows || row_b + n > b->rows) return false;
    if (memcmp((char *)a->bits + (size_t)row_a * row, (char *)b->bits + (size_t)row_b * row,
               (size_t)n * row) != 0)
        return false;
    if (a->lse_bits == NULL || b->lse_bits == NULL) return a->lse_bits == b->lse_bits;
    return memcmp((char *)a->lse_bits + (size_t)row_a * lse_row,
                  (char *)b->lse_bits + (size_t)row_b * lse_row, (size_t)n * lse_row) == 0;
}
