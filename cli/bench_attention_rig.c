/*
 * bench_attention_rig.c: one setting of `folio bench` made runnable: a cache full of random numbers
 * whose blocks lie in random order, the batch, the plan, and the forward that is timed.
 */
#include "bench_attention.h"
#include "harness.h"
#include "term.h"

#include <math.h>
#include <stdlib.h>

enum { FILL_ROWS = 256 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t blocks_of(const setting *s, const group *g)
{
    return (g->seq_len + s->block_size - 1) / s->block_size;
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
        else harness_store(dtype, to, i, x);
    }
}

static bool fill_cache(const rig *r, uint64_t *state)
{
    int64_t width = (int64_t)r->of.heads.kv_heads * r->of.head_size;
    int64_t slots[FILL_ROWS], count = r->num_blocks * r->of.block_size;
    float *k = bench_alloc(FILL_ROWS * width, sizeof *k);
    float *v = bench_alloc(FILL_ROWS * width, sizeof *v);
    bool ok = true;
    for (int64_t first = 0; first < count && ok; first += FILL_ROWS) {
        int64_t rows = smaller(count - first, FILL_ROWS);
        for (int64_t i = 0; i < rows; i++) slots[i] = first + i;
        draw(state, FOLIO_F32, k, rows * width);
        draw(state, FOLIO_F32, v, rows * width);
        folio_kv_write write = {.struct_size = sizeof write,
                                .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                                .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                                .slots = slots};
        ok = bench_ok(folio_kv_cache_write(r->cache, 0, &write, NULL), "folio_kv_cache_write");
    }
    free(k);
    free(v);
    return ok;
}

/* q, and by head the slopes 2^(-8 (h + 1) / heads) and sinks from -1 to 1, as the peers have. */
static void make_inputs(rig *r, uint64_t *state)
{
    const setting *s = &r->of;
    int32_t heads = s->heads.heads;
    int64_t numbers = s->what->rows * heads * s->head_size;
    r->q = bench_alloc(numbers, folio_dtype_size(s->dtype));
    r->out = bench_alloc(numbers, folio_dtype_size(s->dtype));
    draw(state, s->dtype, r->q, numbers);
    if (s->with->alibi) r->slopes = bench_alloc(heads, sizeof *r->slopes);
    if (s->with->sinks) r->sinks = bench_alloc(heads, sizeof *r->sinks);
    for (int32_t h = 0; h < heads; h++) {
        if (r->slopes) r->slopes[h] = (float)exp2(-8.0 * (h + 1) / heads);
        if (r->sinks) r->sinks[h] = heads > 1 ? 2.0F * (float)h / (float)(heads - 1) - 1 : 0;
    }
}

/* ---- The rig */

static bool make_cache(rig *r, folio_context *ctx)
{
    const setting *s = &r->of;
    folio_attention_desc attention = {.struct_size = sizeof attention,
                                      .num_heads = s->heads.heads,
                                      .num_kv_heads = s->heads.kv_heads,
                                      .k_head_size = s->head_size,
                                      .dtype = s->dtype,
                                      .kv_dtype = s->kv_dtype,
                                      .soft_cap = (float)s->with->soft_cap,
                                      .windowed = s->with->window > 0,
                                      .window_left = s->with->window - 1};
    folio_kv_cache_desc cache = {.struct_size = sizeof cache,
                                 .num_blocks = r->num_blocks,
                                 .num_layers = 1,
                                 .block_size = s->block_size,
                                 .num_kv_heads = s->heads.kv_heads,
                                 .k_head_size = s->head_size,
                                 .dtype = s->kv_dtype,
                                 .layout = s->layout};
    return bench_ok(folio_attention_create(ctx, &attention, &r->attention),
                    "folio_attention_create") &&
           bench_ok(folio_kv_cache_create(ctx, &cache, &r->cache), "folio_kv_cache_create");
}

/* The batch, its block tables cut from the shuffled blocks, and the plan. */
static bool make_plan(rig *r, folio_context *ctx)
{
    const setting *s = &r->of;
    const batch_case *c = s->what;
    folio_batch_desc batch = {.struct_size = sizeof batch, .block_size = s->block_size};
    const folio_attention *attentions[] = {r->attention};
    folio_plan_desc plan = {.struct_size = sizeof plan,
                            .attentions = attentions,
                            .num_attentions = 1,
                            .block_size = s->block_size,
                            .num_blocks = r->num_blocks,
                            .max_seqs = c->seqs,
                            .max_query_tokens = c->rows,
                            .max_seq_len = c->longest};
    const int32_t *table = r->blocks;
    if (!bench_ok(folio_batch_create(ctx, &batch, &r->batch), "folio_batch_create")) return false;
    for (int g = 0; g < c->num_groups; g++) {
        int64_t blocks = blocks_of(s, &c->groups[g]);
        for (int64_t i = 0; i < c->groups[g].count; i++, table += blocks) {
            folio_batch_seq seq = {.struct_size = sizeof seq,
                                   .query_len = c->groups[g].query_len,
                                   .seq_len = c->groups[g].seq_len,
                                   .block_table = table,
                                   .num_blocks = blocks};
            if (!bench_ok(folio_batch_add(r->batch, &seq), "folio_batch_add")) return false;
        }
    }
    return bench_ok(folio_plan_create(ctx, &plan, &r->plan), "folio_plan_create") &&
           bench_ok(folio_plan_update(r->plan, r->batch), "folio_plan_update");
}

bool bench_rig_open(rig *r, folio_context *ctx, const setting *s, int64_t seed)
{
    const batch_case *c = s->what;
    uint64_t bits = (uint64_t)seed;
    uint64_t state = harness_random_bits(bits, HARNESS_USER, 0, 0, 0, 0) | 1; /* never 0 */
    *r = (rig){.of = *s};
    for (int g = 0; g < c->num_groups; g++)
        r->num_blocks += c->groups[g].count * blocks_of(s, &c->groups[g]);
    if (!make_cache(r, ctx)) return false;
    r->blocks = bench_alloc(r->num_blocks, sizeof *r->blocks);
    for (int64_t i = 0; i < r->num_blocks; i++) { /* Fisher and Yates, from the inside out */
        int64_t j = harness_random_int(bits, HARNESS_SHUFFLE, i, 0, i);
        r->blocks[i] = r->blocks[j];
        r->blocks[j] = (int32_t)i;
    }
    if (!make_plan(r, ctx) || !fill_cache(r, &state)) return false;
    make_inputs(r, &state);
    return true;
}

void bench_rig_close(rig *r)
{
    folio_plan_destroy(r->plan);
    folio_batch_destroy(r->batch);
    folio_kv_cache_destroy(r->cache);
    folio_attention_destroy(r->attention);
    free(r->blocks);
    free(r->q);
    free(r->out);
    free(r->slopes);
    free(r->sinks);
}

bool bench_rig_forward(const rig *r, double *seconds)
{
    folio_tensors tensors = {.struct_size = sizeof tensors,
                             .q = {.data = r->q, .tokens = r->of.what->rows},
                             .out = {.data = r->out, .tokens = r->of.what->rows},
                             .slopes = r->slopes,
                             .sinks = r->sinks};
    double start = term_seconds();
    folio_status status =
        folio_attention_forward(r->plan, 0, FOLIO_DECODER, r->cache, 0, &tensors, NULL);
    *seconds = term_seconds() - start;
    return bench_ok(status, "folio_attention_forward");
}

/* ---- Work */

/* Pairs of a query row and a key it sees: rows see first, first + 1, ... last keys, up to window. */
static double pairs_of(const group *g, int64_t window)
{
    int64_t last = g->seq_len, first = last - g->query_len + 1;
    int64_t most = window > 0 ? smaller(window, last) : last;
    int64_t growing = most >= first ? most - first + 1 : 0; /* rows that see all before them */
    double pairs = 0.5 * (double)growing * (double)(first + most);
    return (double)g->count * (pairs + (double)(g->query_len - growing) * (double)most);
}

double bench_flops(const setting *s)
{
    double pairs = 0;
    for (int g = 0; g < s->what->num_groups; g++)
        pairs += pairs_of(&s->what->groups[g], s->with->window);
    return 4.0 * s->heads.heads * s->head_size * pairs;
}

double bench_kv_bytes(const setting *s)
{
    double keys = 0, head = (double)s->head_size * (double)folio_dtype_size(s->kv_dtype);
    if (s->kv_dtype == FOLIO_INT8) head += sizeof(float);
    for (int i = 0; i < s->what->num_groups; i++) {
        const group *g = &s->what->groups[i];
        int64_t seen = g->seq_len;
        if (s->with->window > 0) seen = smaller(seen, g->query_len + s->with->window - 1);
        keys += (double)g->count * (double)seen;
    }
    return 2 * head * s->heads.kv_heads * keys;
}
