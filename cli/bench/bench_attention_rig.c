/*
 * bench_attention_rig.c: one setting of `folio bench` made runnable: a cache full of random numbers
 * whose blocks lie in random order, the batch, the plan, and the forward that is timed. On a device
 * all tensors lie in its memory, and its own kernels draw the numbers.
 */
#include "base/term.h"
#include "bench/bench_attention.h"
#include "kit/kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILL_ROWS = 256 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t layers_of(const setting *s) { return s->with->graph ? s->with->graph : 1; }

/* Of sequence i of a kind. */
static int64_t blocks_of(const setting *s, const seq_kind *g, int64_t i)
{
    return (bench_seq_len(g, i) + s->block_size - 1) / s->block_size;
}

static folio_run run_of(const rig *r)
{
    return FOLIO_WITH(folio_run, .stream = r->device ? bench_device_stream(r->device) : NULL);
}

/* Memory that forwards reach. */
static bool make_memory(const rig *r, size_t bytes, void **to)
{
    return bench_ok(folio_memory_create(r->ctx, FOLIO_MEMORY_DEVICE, bytes, to),
                    "folio_memory_create");
}

/* ---- Numbers */

/* Uniform in [-1, 1), by a xorshift: a cache takes a hundred million of them. */
static void draw(uint64_t *state, folio_dtype dtype, void *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        double x = (double)(*state >> 40) * 0x1p-23 - 1;
        if (dtype == FOLIO_F32) ((float *)to)[i] = (float)x;
        else kit_store(dtype, to, i, x);
    }
}

static bool fill_cache(const rig *r, folio_kv_cache *cache, uint64_t *state)
{
    int64_t width = (int64_t)r->of.heads.kv_heads * r->of.head_size;
    int64_t v_width = (int64_t)r->of.heads.kv_heads * bench_v_size(&r->of);
    int64_t slots[FILL_ROWS], count = r->num_blocks * r->of.block_size;
    float *k = bench_alloc(FILL_ROWS * width, sizeof *k);
    float *v = bench_alloc(FILL_ROWS * v_width, sizeof *v);
    bool ok = true;
    for (int64_t first = 0; first < count && ok; first += FILL_ROWS) {
        int64_t rows = smaller(count - first, FILL_ROWS);
        for (int64_t i = 0; i < rows; i++) slots[i] = first + i;
        draw(state, FOLIO_F32, k, rows * width);
        draw(state, FOLIO_F32, v, rows * v_width);
        folio_kv_write write =
            FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                       .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows}, .slots = slots);
        if (r->of.with->latent) write.v = (folio_tensor){0};
        ok = bench_ok(folio_kv_cache_write(cache, 0, &write, NULL), "folio_kv_cache_write");
    }
    free(k);
    free(v);
    return ok;
}

/* Of a layer's numbers, below 2^40 of them; q has those of the layer after the last. */
static uint64_t seed_of(uint64_t seed, int64_t layer) { return seed + ((uint64_t)layer << 40); }

/* Numbers, whatever the layout: each place holds one, and its neighbours do not matter. */
static bool fill_on_device(const rig *r, folio_kv_cache *cache, uint64_t seed)
{
    const folio_run run = run_of(r);
    int64_t size = (int64_t)folio_dtype_size(r->of.kv_dtype);
    bool ok = true;
    for (int64_t layer = 0; layer < r->layers && ok; layer++) {
        folio_kv_cache_view v = {.struct_size = sizeof v};
        ok = bench_ok(folio_kv_cache_get_view(cache, (int32_t)layer, &v),
                      "folio_kv_cache_get_view") &&
             bench_device_fill(r->device, v.k, r->of.kv_dtype, v.k_array.bytes / size,
                               seed_of(seed, layer)) &&
             (v.v == NULL || bench_device_fill(r->device, v.v, r->of.kv_dtype,
                                               v.v_array.bytes / size, seed_of(~seed, layer)));
        /* Four bytes 0x3c are 0.0115 as a scale: int8 numbers up to 1.46. */
        if (ok && v.k_scales)
            ok = bench_ok(folio_memory_fill(r->ctx, v.k_scales, 0x3c,
                                            (size_t)v.k_scales_array.bytes, &run),
                          "folio_memory_fill") &&
                 (v.v_scales == NULL ||
                  bench_ok(folio_memory_fill(r->ctx, v.v_scales, 0x3c,
                                             (size_t)v.v_scales_array.bytes, &run),
                           "folio_memory_fill"));
    }
    return ok;
}

/* By head: 2^(-8 (h + 1) / heads) for slopes, from -1 to 1 for sinks, as the peers have them. */
static bool make_by_head(const rig *r, bool slopes, float **to)
{
    int32_t heads = r->of.heads.heads;
    size_t bytes = (size_t)heads * sizeof **to;
    float *numbers = bench_alloc(heads, sizeof *numbers);
    void *memory = NULL;
    const folio_run run = run_of(r);
    for (int32_t h = 0; h < heads; h++)
        numbers[h] = slopes      ? (float)exp2(-8.0 * (h + 1) / heads)
                     : heads > 1 ? 2.0F * (float)h / (float)(heads - 1) - 1
                                 : 0;
    bool ok =
        make_memory(r, bytes, &memory) &&
        bench_ok(folio_memory_copy(r->ctx, memory, numbers, bytes, &run), "folio_memory_copy") &&
        bench_ok(folio_run_wait(r->ctx, &run), "folio_run_wait");
    free(numbers);
    *to = memory;
    return ok;
}

/* Numbers in memory of the context. which: of several arrays. */
static bool make_numbers(const rig *r, uint64_t *state, int64_t numbers, int which, void **to)
{
    folio_dtype dtype = r->of.dtype;
    if (!make_memory(r, (size_t)numbers * folio_dtype_size(dtype), to)) return false;
    if (!r->device) draw(state, dtype, *to, numbers);
    return !r->device ||
           bench_device_fill(r->device, *to, dtype, numbers, seed_of(*state, r->layers + which));
}

int32_t bench_first_rotated(const setting *s) { return s->with->latent ? bench_v_size(s) : 0; }

/* New keys and values; what rotates them, in the forward or in a pass of its own. */
static bool make_rotary(rig *r, uint64_t *state)
{
    const setting *s = &r->of;
    int64_t numbers = s->what->rows * s->heads.kv_heads * s->head_size;
    int32_t first = bench_first_rotated(s), dims = s->head_size - first;
    folio_rotary_desc desc = FOLIO_WITH(folio_rotary_desc, .first_dim = first, .num_dims = dims,
                                        .num_positions = s->what->longest);
    if (!s->with->rotary && !s->with->stores && !s->with->private_slots) return true;
    r->kv_bytes = (size_t)numbers * folio_dtype_size(s->dtype);
    if (!make_numbers(r, state, numbers, 1, &r->k) ||
        (!s->with->latent && !make_numbers(r, state, numbers, 2, &r->v)))
        return false;
    if (s->with->rotary)
        return bench_ok(folio_rotary_create(r->ctx, &desc, &r->rotary), "folio_rotary_create");
    if (!s->with->pass) return true;
    int32_t half = dims / 2;
    r->table = bench_alloc(s->what->longest * dims, sizeof *r->table);
    for (int64_t p = 0; p < s->what->longest; p++)
        for (int32_t i = 0; i < half; i++) {
            double angle = (double)p * pow(10000.0, -(double)i / half);
            r->table[p * dims + i] = (float)cos(angle);
            r->table[p * dims + half + i] = (float)sin(angle);
        }
    folio_context_info info = {.struct_size = sizeof info};
    r->num_threads = folio_context_get_info(r->ctx, &info) == FOLIO_OK ? info.num_threads : 1;
    if (!make_memory(r, r->q_bytes, &r->q_rotated) || !make_memory(r, r->kv_bytes, &r->k_rotated))
        return false;
    memcpy(r->q_rotated, r->q, r->q_bytes);
    memcpy(r->k_rotated, r->k, r->kv_bytes);
    return true;
}

static bool make_inputs(rig *r, uint64_t *state)
{
    const setting *s = &r->of;
    int64_t numbers = s->what->rows * s->heads.heads * s->head_size;
    r->q_bytes = (size_t)numbers * folio_dtype_size(s->dtype);
    if (!make_numbers(r, state, numbers, 0, &r->q) || !make_memory(r, r->q_bytes, &r->out) ||
        !make_rotary(r, state))
        return false;
    return (!s->with->alibi || make_by_head(r, true, &r->slopes)) &&
           (!s->with->sinks || make_by_head(r, false, &r->sinks));
}

/* ---- The rig */

static uint32_t plan_flags(const extras *with)
{
    return (with->graph && !with->one_by_one ? FOLIO_PLAN_GRAPH : 0) |
           (with->invariant ? FOLIO_PLAN_BATCH_INVARIANT : 0) |
           (with->private_slots ? FOLIO_PLAN_PRIVATE_SLOTS : 0) |
           (with->note ? FOLIO_PLAN_NOTE_BAD : 0);
}

static bool make_layer(rig *r)
{
    const setting *s = &r->of;
    const batch_case *c = s->what;
    return bench_ok(
        KIT_LAYER_OPEN(
            r->ctx, &r->l, .num_heads = s->heads.heads, .num_kv_heads = s->heads.kv_heads,
            .k_head_size = s->head_size, .v_head_size = bench_v_size(s), .v_in_k = s->with->latent,
            .dtype = s->dtype, .kv_dtype = s->kv_dtype, .soft_cap = (float)s->with->soft_cap,
            .window = s->with->window, .num_blocks = r->num_blocks,
            .num_layers = (int32_t)r->layers, .block_size = s->block_size, .layout = s->layout,
            .max_seqs = c->seqs, .max_query_tokens = c->rows, .max_seq_len = c->longest,
            .flags = plan_flags(s->with), .max_query_len = c->longest_query),
        "its layer");
}

/* The batch, its block tables cut from the shuffled blocks. */
static bool fill_batch(rig *r)
{
    const setting *s = &r->of;
    const batch_case *c = s->what;
    const folio_run run = run_of(r);
    const int32_t *table = r->blocks;
    for (int g = 0; g < c->num_kinds; g++)
        for (int64_t i = 0; i < c->kinds[g].count; i++) {
            int64_t blocks = blocks_of(s, &c->kinds[g], i);
            folio_batch_seq seq =
                FOLIO_WITH(folio_batch_seq, .query_len = c->kinds[g].query_len,
                           .seq_len = bench_seq_len(&c->kinds[g], i),
                           .causality = s->with->full ? FOLIO_CAUSAL_NO : FOLIO_CAUSAL_AUTO,
                           .block_table = table, .num_blocks = blocks);
            if (!bench_ok(folio_batch_add(r->l.batch, &seq), "folio_batch_add")) return false;
            table += blocks;
        }
    return bench_ok(folio_plan_update(r->l.plan, r->l.batch, &run), "folio_plan_update");
}

static bool forward_layers(const rig *r, const folio_run *run);

/* One forward outside of the graph comes first: what is done once does not belong into it. */
static bool make_graph(rig *r)
{
    const folio_run run = run_of(r);
    if (!forward_layers(r, &run) || !bench_device_capture(r->device)) return false;
    bool recorded = forward_layers(r, &run);
    return bench_device_captured(r->device, &r->graph) && recorded;
}

/* Where the random numbers begin; never 0. */
static uint64_t first_state(int64_t seed)
{
    return kit_random_bits((uint64_t)seed, KIT_USER, 0, 0, 0, 0) | 1;
}

static bool fill(const rig *r, folio_kv_cache *cache, uint64_t *state)
{
    return r->device ? fill_on_device(r, cache, *state) : fill_cache(r, cache, state);
}

bool bench_rig_fill(const rig *r, folio_kv_cache *cache, int64_t seed)
{
    uint64_t state = first_state(seed);
    return fill(r, cache, &state);
}

bool bench_rig_open(rig *r, folio_context *ctx, bench_device *device, const setting *s,
                    int64_t seed)
{
    const batch_case *c = s->what;
    uint64_t bits = (uint64_t)seed, state = first_state(seed);
    *r = (rig){.of = *s, .ctx = ctx, .device = device, .layers = layers_of(s)};
    for (int g = 0; g < c->num_kinds; g++)
        for (int64_t i = 0; i < c->kinds[g].count; i++)
            r->num_blocks += blocks_of(s, &c->kinds[g], i);
    if (!make_layer(r)) return false;
    r->blocks = bench_alloc(r->num_blocks, sizeof *r->blocks);
    for (int64_t i = 0; i < r->num_blocks; i++) { /* Fisher and Yates, from the inside out */
        int64_t j = kit_random_int(bits, KIT_SHUFFLE, i, 0, i);
        r->blocks[i] = r->blocks[j];
        r->blocks[j] = (int32_t)i;
    }
    if (!fill_batch(r) || !fill(r, r->l.cache, &state)) return false;
    return make_inputs(r, &state) && (!s->with->graph || s->with->one_by_one || make_graph(r));
}

void bench_rig_close(rig *r)
{
    size_t bytes = (size_t)r->of.heads.heads * sizeof(float);
    if (r->graph) bench_graph_free(r->graph);
    kit_layer_close(&r->l);
    free(r->blocks);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->q, r->q_bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->out, r->q_bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->slopes, bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->sinks, bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->k, r->kv_bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->v, r->kv_bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->q_rotated, r->q_bytes);
    folio_memory_destroy(r->ctx, FOLIO_MEMORY_DEVICE, r->k_rotated, r->kv_bytes);
    folio_rotary_destroy(r->rotary);
    free(r->table);
}

static folio_tensors tensors_of(const rig *r)
{
    folio_tensors tensors = FOLIO_WITH(
        folio_tensors, .q = {.data = r->q, .dtype = r->of.dtype, .tokens = r->of.what->rows},
        .out = {.data = r->out, .dtype = r->of.dtype, .tokens = r->of.what->rows},
        .slopes = r->slopes, .sinks = r->sinks, .rotary = r->rotary);
    if (r->k) {
        tensors.k = (folio_tensor){.data = r->k, .dtype = r->of.dtype, .tokens = r->of.what->rows};
        if (r->v)
            tensors.v =
                (folio_tensor){.data = r->v, .dtype = r->of.dtype, .tokens = r->of.what->rows};
    }
    if (r->table) {
        tensors.q.data = r->q_rotated;
        tensors.k.data = r->k_rotated;
    }
    return tensors;
}

bool bench_rig_kernel(const rig *r, folio_plan_info *info)
{
    folio_tensors tensors = tensors_of(r);
    return bench_ok(folio_attention_check(r->l.plan, 0, FOLIO_ATTENTION_DECODER, r->l.cache, 0,
                                          &tensors, NULL, info),
                    "folio_attention_check");
}

static bool forward_layers(const rig *r, const folio_run *run)
{
    folio_tensors tensors = tensors_of(r);
    folio_status status = FOLIO_OK;
    if (r->table && !bench_rotate(r)) return false;
    for (int32_t layer = 0; layer < r->layers && status == FOLIO_OK; layer++)
        status = folio_attention_forward(r->l.plan, 0, FOLIO_ATTENTION_DECODER, r->l.cache, layer,
                                         &tensors, run);
    return bench_ok(status, "folio_attention_forward");
}

static bool time_on_device(const rig *r, int64_t launches,
                           bool (*call)(const void *, const folio_run *), const void *state,
                           double *seconds)
{
    const folio_run run = run_of(r);
    return bench_device_start(r->device, launches) && call(state, &run) &&
           bench_device_stop(r->device, seconds) &&
           bench_ok(folio_run_wait(r->ctx, &run), "folio_run_wait");
}

bool bench_rig_time(const rig *r, int64_t launches, bool (*call)(const void *, const folio_run *),
                    const void *state, double *seconds)
{
    const folio_run run = run_of(r);
    if (r->device && launches > 0) return time_on_device(r, launches, call, state, seconds);
    if (!bench_ok(folio_run_wait(r->ctx, &run), "folio_run_wait")) return false;
    double start = term_seconds();
    bool ok = call(state, &run);
    *seconds = term_seconds() - start;
    return ok;
}

static bool forward_or_replay(const void *state, const folio_run *run)
{
    const rig *r = state;
    return r->graph ? bench_device_replay(r->device, r->graph) : forward_layers(r, run);
}

bool bench_rig_forward(const rig *r, double *seconds)
{
    return bench_rig_time(r, r->graph ? 1 : r->layers, forward_or_replay, r, seconds);
}

/* ---- Work */

/* Pairs of a query row and a key it sees: rows see first, first + 1, ... last keys, up to window. */
static double pairs_of(int64_t query_len, int64_t last, int64_t window)
{
    int64_t first = last - query_len + 1;
    int64_t most = window > 0 ? smaller(window, last) : last;
    int64_t growing = most >= first ? most - first + 1 : 0; /* rows that see all before them */
    double pairs = 0.5 * (double)growing * (double)(first + most);
    return pairs + (double)(query_len - growing) * (double)most;
}

int32_t bench_v_size(const setting *s)
{
    return s->with->v_size > 0 ? (int32_t)s->with->v_size : s->head_size;
}

double bench_flops(const setting *s)
{
    double pairs = 0;
    for (int k = 0; k < s->what->num_kinds; k++) {
        const seq_kind *g = &s->what->kinds[k];
        for (int64_t i = 0; i < g->count; i++) {
            int64_t keys = bench_seq_len(g, i);
            pairs += s->with->full ? (double)g->query_len * (double)keys
                                   : pairs_of(g->query_len, keys, s->with->window);
        }
    }
    double numbers = (double)s->head_size + bench_v_size(s);
    return 2.0 * s->heads.heads * numbers * pairs * (double)layers_of(s);
}

double bench_kv_bytes(const setting *s)
{
    const extras *with = s->with;
    double keys = 0, numbers = (double)s->head_size + (with->latent ? 0 : bench_v_size(s));
    double head = numbers * (double)folio_dtype_size(s->kv_dtype);
    if (s->kv_dtype == FOLIO_INT8) head += (with->latent ? 1 : 2) * sizeof(float);
    for (int k = 0; k < s->what->num_kinds; k++) {
        const seq_kind *g = &s->what->kinds[k];
        for (int64_t i = 0; i < g->count; i++) {
            int64_t seen = bench_seq_len(g, i);
            if (with->window > 0) seen = smaller(seen, g->query_len + with->window - 1);
            keys += (double)seen;
        }
    }
    return head * s->heads.kv_heads * keys * (double)layers_of(s);
}
