/*
 * check_bits.c: cases of `folio check` that compare bits: whole against pieces, threads and crowds;
 * graphs against plain plans; page-table forms; appended keys. Also merged parts.
 */
#include "check/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- The same bits */

static void plain_base(const check_env *env, check_draw *d, check_attention *c)
{
    check_base(env, d, c);
    c->spec.no_lse = false;
}

/* Options one by one; a long sequence reaches past a split. */
static void invariant_case(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    plain_base(env, d, c);
    kit_spec *s = &c->spec;
    switch (index % 13) {
    case 0: break;
    case 1: s->alibi = true; break;
    case 2: s->windowed = 1, s->window_left = 20; break;
    case 3: s->soft_cap = 5.0f; break;
    case 4: s->sinks = true; break;
    case 5: s->bias = KIT_BIAS_ALL, s->bias_hidden = 0.2; break;
    case 6: s->kv_dtype = FOLIO_INT8; break;
    case 7: s->kv_dtype = FOLIO_FP8_E4M3, s->k_scale = 0.3f; break;
    case 8: s->windowed = 1, s->window_left = 40, s->alibi = true; break;
    case 9: s->kv_dtype = FOLIO_BF16, s->amplitude = 8.0; break;
    case 10: s->num_heads = 16, s->num_kv_heads = 1, check_latent(s, 72, 40); break;
    case 11: check_rotary(d, s); break;
    }
    check_settle(c);
    int64_t split = check_split_len(env);
    kit_seq *q = check_add(c, check_int(d, 20, 45),
                           index % 3 == 2 ? split - 10
                           : index % 3    ? 33
                                          : 0);
    if (index % 13 != 12) return;
    q->seq_len = check_int(d, 1, q->query_len - 1); /* more queries than keys */
    q->positions_given = 1;
    q->first_query_pos = check_int(d, -9, 40);
}

/* Query tokens of the pieces, at most 64: one by one, at random, or by the block. */
static int64_t cut(check_draw *d, int64_t total, int64_t way, int64_t *chunks)
{
    int64_t n = 0;
    for (int64_t done = 0; done < total; done += chunks[n++]) {
        chunks[n] = way == 0 ? 1 : way == 1 ? check_int(d, 1, 13) : 16;
        if (chunks[n] > total - done) chunks[n] = total - done;
    }
    return n;
}

void run_row_invariant(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    static const kit_seq crowd[] = {{.id = 90, .query_len = 9, .seq_len = 9},
                                    {.id = 91, .query_len = 1, .seq_len = 70},
                                    {.id = 92, .query_len = 2, .seq_len = 0},
                                    {.id = 93, .query_len = 5, .seq_len = 22}};
    check_attention c = {0};
    int64_t chunks[64];
    kit_result whole = {0}, pieces = {0};
    invariant_case(env, d, index, &c);
    c.spec.table = KIT_TABLE_SEQS;
    kit_seq *seq = &c.seqs[0];
    int64_t total = seq->query_len, n = cut(d, total, index % 3, chunks);
    int64_t num_crowd = check_int(d, 0, 4);
    int32_t threads = (int32_t)check_int(d, 1, 8);
    folio_context *other = kit_context(env->info.name, env->level, threads);
    bool ok = other != NULL &&
              kit_run_pieces(env->ctx, &c.spec, FOLIO_ATTENTION_DECODER, seq, &total, 1, NULL, 0,
                             false, &whole) &&
              kit_run_pieces(other, &c.spec, FOLIO_ATTENTION_DECODER, seq, chunks, n, crowd,
                             num_crowd, check_chance(d, 2), &pieces);
    if (!ok) check_fail(out, "%s", kit_error());
    for (int64_t row = 0; ok && row < total; row++)
        if (!kit_rows_equal(&whole, row, &pieces, row, 1))
            ok = check_fail(
                out, "row %lld of %lld differs in %lld pieces, %d threads, a crowd of %lld",
                (long long)row, (long long)total, (long long)n, (int)threads, (long long)num_crowd);
    kit_result_free(&whole);
    kit_result_free(&pieces);
    folio_context_destroy(other);
}

/* Alone, and the same pieces in a crowd that makes the batch long and ragged. */
void run_batch_invariant(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    static const kit_seq crowd[] = {{.id = 90, .query_len = 9, .seq_len = 9},
                                    {.id = 91, .query_len = 1, .seq_len = 1700},
                                    {.id = 92, .query_len = 2, .seq_len = 0},
                                    {.id = 93, .query_len = 1, .seq_len = 700},
                                    {.id = 94, .query_len = 40, .seq_len = 61}};
    check_attention c = {0};
    int64_t chunks[64];
    kit_result alone = {0}, crowded = {0};
    invariant_case(env, d, index, &c);
    c.spec.table = KIT_TABLE_SEQS;
    c.spec.batch_invariant = true;
    kit_seq *seq = &c.seqs[0];
    seq->seq_len += check_chance(d, 2) ? 1500 : 0;
    if (index % 4 == 3) { /* parts of many rows too */
        c.spec.num_heads = c.spec.num_kv_heads * 4;
        seq->seq_len += 5000;
    }
    int64_t total = seq->query_len, n = cut(d, total, 1 + index % 2, chunks);
    kit_spec other = c.spec;
    other.graph = check_chance(d, 3);
    bool ok = kit_run_pieces(env->ctx, &c.spec, FOLIO_ATTENTION_DECODER, seq, chunks, n, NULL, 0,
                             false, &alone) &&
              kit_run_pieces(env->ctx, &other, FOLIO_ATTENTION_DECODER, seq, chunks, n, crowd,
                             check_int(d, 1, 5), check_chance(d, 2), &crowded);
    if (!ok) check_fail(out, "%s", kit_error());
    else if (!kit_rows_equal(&alone, 0, &crowded, 0, total))
        check_fail(out, "%lld rows in %lld pieces change with the batch around them",
                   (long long)total, (long long)n);
    if (!out->ok)
        kit_describe(&other, FOLIO_ATTENTION_DECODER, c.seqs, c.num_seqs, out->what,
                     sizeof out->what);
    kit_result_free(&alone);
    kit_result_free(&crowded);
}

/* Runs the same step twice, the second time as `other` says; real rows must keep their bits. */
static bool same_bits(const check_env *env, const check_attention *c, const kit_spec *other,
                      const char *what, check_outcome *out)
{
    kit_result a = {0}, b = {0};
    kit_case *first = kit_open(env->ctx, &c->spec, c->seqs, c->num_seqs);
    kit_case *second = kit_open(env->ctx, other, c->seqs, c->num_seqs);
    bool ok = first && second && kit_forward(first, NULL, c->type, c->seqs, c->num_seqs, &a) &&
              kit_forward(second, NULL, c->type, c->seqs, c->num_seqs, &b);
    if (!ok) check_fail(out, "%s", kit_error());
    else if (!kit_rows_equal(&a, 0, &b, 0, a.row_start[a.num_seqs]))
        ok = check_fail(out, "%s changes bits", what);
    else if (c->spec.layout == other->layout && c->spec.block_size == other->block_size &&
             kit_hash_cache(kit_cache(first)) != kit_hash_cache(kit_cache(second)))
        ok = check_fail(out, "%s leaves another cache behind", what);
    kit_result_free(&a);
    kit_result_free(&b);
    kit_close(first);
    kit_close(second);
    return ok;
}

static bool supports(const check_env *env, const char *feature)
{
    for (int32_t i = 0; i < env->info.num_features; i++)
        if (strcmp(env->info.features[i].name, feature) == 0)
            return env->info.features[i].supported != 0;
    return false;
}

/*
 * A graph's padding stores nothing and leaves real rows alone: always where bits depend on the row alone, else in
 * batch-invariant plans.
 */
void run_graph_bits(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_graph(env, d, index, &c);
    check_settle(&c);
    c.spec.batch_invariant = !supports(env, "row_invariant");
    kit_spec plain = c.spec;
    plain.graph = false;
    same_bits(env, &c, &plain, "FOLIO_PLAN_GRAPH", out);
}

/* One of a step's decodes: its key may be none that its row sees, and its slot may be given. */
static void private_seq(check_draw *d, int64_t way, check_attention *c)
{
    static const int64_t lens[] = {1,   2,   15,  16,  17,  31,   32,   33,   63,   64,   65,  127,
                                   128, 129, 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 2049};
    kit_seq *s = check_add(c, 1, CHECK_PICK(d, lens) - 1);
    if (way == 1) s->slots_given = true;
    if (way == 2) s->slots_ignored = true;
    if (way != 3) return;
    s->positions_given = 1;
    s->first_query_pos = check_int(d, -2, s->seq_len + 2);
}

/* Decodes that store k and v themselves leave the same out and the same cache as those behind a write. */
void run_private_slots(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    static const int32_t sizes[] = {128, 64, 128, 256, 128, 128, 40};
    static const int32_t heads_per_kv[] = {4, 1, 8, 16, 3, 2}, blocks[] = {16, 32, 16, 48, 8};
    check_attention c = {0};
    plain_base(env, d, &c);
    kit_spec *s = &c.spec;
    s->dtype = check_chance(d, 3) ? FOLIO_F16 : FOLIO_BF16;
    s->k_head_size = sizes[index % 7];
    s->num_heads = s->num_kv_heads * CHECK_PICK(d, heads_per_kv);
    s->block_size = CHECK_PICK(d, blocks);
    if (!check_chance(d, 8)) s->layout = FOLIO_LAYOUT_NATIVE;
    s->strided = check_chance(d, 3);
    s->wide_gaps = s->strided && !check_chance(d, 3);
    s->only_decodes = check_chance(d, 2);
    s->graph = check_chance(d, 3);
    s->batch_invariant = check_chance(d, 3);
    s->sinks = check_chance(d, 4);
    s->in_place = check_chance(d, 4);
    if (check_chance(d, 4)) s->windowed = 1, s->window_left = check_int(d, 0, 600);
    int64_t seqs = index % 3 == 0 ? 1 : check_int(d, 2, 5);
    for (int64_t i = 0; i < seqs; i++) private_seq(d, check_int(d, 0, 7), &c);
    if (check_chance(d, 3)) check_add(&c, 0, 40); /* it waits */
    check_settle(&c);
    kit_spec other = *s;
    other.private_slots = true;
    same_bits(env, &c, &other, "FOLIO_PLAN_PRIVATE_SLOTS", out);
    if (!out->ok) kit_describe(&other, c.type, c.seqs, c.num_seqs, out->what, sizeof out->what);
}

/* Where tensors lie changes nothing: on a device as long as their rows begin at multiples of 16 bytes. */
void run_address_bits(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    plain_base(env, d, &c);
    check_mixed(d, &c);
    c.spec.strided = false;
    c.spec.append = index % 2 != 0;
    check_settle(&c);
    bool device = !supports(env, "row_invariant");
    kit_spec other = c.spec;
    other.offset = device ? 16 / (int64_t)folio_dtype_size(c.spec.dtype) : 1;
    same_bits(env, &c, &other, "another address", out);
}

/* Every form of page table leads to the same blocks. */
void run_table_bits(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    plain_base(env, d, &c);
    check_mixed(d, &c);
    c.spec.table = (kit_table)(KIT_TABLE_2D + index % 4);
    check_settle(&c);
    kit_spec seqs = c.spec;
    seqs.table = KIT_TABLE_SEQS;
    same_bits(env, &c, &seqs, "the form of the page table", out);
}

/* A pass over q and k before the call gives the same bits, in out and in the cache. On a device another kernel may
 * compute what rotates as it is read: cases whose keys are stored, with equal head sizes, have the same. */
void run_rotary_pass(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_rotary(env, d, index, &c);
    if (!supports(env, "row_invariant")) {
        c.spec.append = c.spec.no_cache = false;
        if (!c.spec.v_in_k) c.spec.v_head_size = 0;
        c.type = FOLIO_ATTENTION_DECODER;
    }
    check_settle(&c);
    kit_spec pass = c.spec;
    pass.rotary_before = true;
    if (!same_bits(env, &c, &pass, "a separate pass", out))
        kit_describe(&c.spec, c.type, c.seqs, c.num_seqs, out->what, sizeof out->what);
}

/* Appending stores nothing: the second run finds the cache of the first. */
void run_append_bits(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    kit_result a = {0}, b = {0};
    make_kv_append(env, d, index, &c);
    check_settle(&c);
    kit_case *h = kit_open(env->ctx, &c.spec, c.seqs, c.num_seqs);
    bool ok = h && kit_forward(h, NULL, c.type, c.seqs, c.num_seqs, &a);
    uint64_t before = ok ? kit_hash_cache(kit_cache(h)) : 0;
    ok = ok && kit_forward(h, NULL, c.type, c.seqs, c.num_seqs, &b);
    if (!ok) check_fail(out, "%s", kit_error());
    else if (kit_hash_cache(kit_cache(h)) != before)
        check_fail(out, "FOLIO_KV_APPEND wrote to the cache");
    else if (!kit_rows_equal(&a, 0, &b, 0, a.rows)) check_fail(out, "a second run differs");
    kit_result_free(&a);
    kit_result_free(&b);
    kit_close(h);
}

/* ---- Merging */

enum { MERGE_MAX_PARTS = 6, MERGE_TOKENS = 5, MERGE_HEADS = 3, MERGE_SIZE = 24 };
enum { MERGE_ROWS = MERGE_TOKENS * MERGE_HEADS, MERGE_COUNT = MERGE_ROWS * MERGE_SIZE };

typedef struct merge_case {
    folio_dtype dtype;
    int64_t num_parts;
    double out[MERGE_MAX_PARTS][MERGE_COUNT]; /* backing of the parts, any dtype */
    float lse[MERGE_MAX_PARTS][MERGE_ROWS];
} merge_case;

/* Parts of random lse; some -inf, with NaN for an out that must not matter. */
static void merge_fill(const check_env *env, check_draw *d, int64_t index, merge_case *m)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    int64_t tag = check_int(d, 0, INT32_MAX);
    m->dtype = dtypes[index % 3];
    m->num_parts = 1 + index % MERGE_MAX_PARTS;
    for (int64_t p = 0; p < m->num_parts; p++)
        for (int64_t r = 0; r < MERGE_ROWS; r++) {
            double lse = 4 * kit_random(env->seed, KIT_USER, tag, p, r, -1);
            bool empty = lse < -5.0 || r == 0; /* row 0: no part saw a key */
            m->lse[p][r] = empty ? -INFINITY : (float)lse;
            for (int64_t i = 0; i < MERGE_SIZE; i++)
                kit_store(m->dtype, m->out[p], r * MERGE_SIZE + i,
                          empty ? (double)NAN : kit_random(env->seed, KIT_USER, tag, p, r, i));
        }
}

/* The weighted mean in double. Returns lse. */
static double merge_formula(const merge_case *m, int64_t r, double *mean)
{
    double max = -(double)INFINITY, sum = 0;
    for (int64_t i = 0; i < MERGE_SIZE; i++) mean[i] = 0;
    for (int64_t p = 0; p < m->num_parts; p++) max = fmax(max, (double)m->lse[p][r]);
    if (isinf(max)) return max;
    for (int64_t p = 0; p < m->num_parts; p++) {
        double weight = exp((double)m->lse[p][r] - max);
        sum += weight;
        for (int64_t i = 0; weight > 0 && i < MERGE_SIZE; i++)
            mean[i] += weight * kit_load(m->dtype, m->out[p], r * MERGE_SIZE + i);
    }
    for (int64_t i = 0; i < MERGE_SIZE; i++) mean[i] /= sum;
    return max + log(sum);
}

static void note_error(check_outcome *out, double got, double want, double budget)
{
    double error = got == want ? 0.0 : fabs(got - want);
    if (!(error <= budget)) check_fail(out, "%.9g, expected %.9g, budget %.3g", got, want, budget);
    if (error > out->error) {
        out->error = error;
        out->budget = budget;
    }
}

void run_merge(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    /* what the call reads and writes lies where it can be reached */
    merge_case *m = kit_alloc(1, sizeof *m);
    double *result = kit_alloc(MERGE_COUNT, sizeof *result);
    float *lse = kit_alloc(MERGE_ROWS, sizeof *lse);
    double mean[MERGE_SIZE], want[MERGE_COUNT], want_lse[MERGE_ROWS];
    folio_state states[MERGE_MAX_PARTS];
    merge_fill(env, d, index, m);
    for (int64_t r = 0; r < MERGE_ROWS; r++) {
        want_lse[r] = merge_formula(m, r, mean);
        memcpy(want + r * MERGE_SIZE, mean, sizeof mean);
    }
    for (int64_t i = 0; i < m->num_parts * MERGE_ROWS; i += 2) { /* +inf says empty as well */
        float *of = &m->lse[i / MERGE_ROWS][i % MERGE_ROWS];
        if (isinf(*of)) *of = INFINITY;
    }
    for (int64_t p = 0; p < m->num_parts; p++)
        states[p] =
            (folio_state){.out = {.data = m->out[p], .dtype = m->dtype, .tokens = MERGE_TOKENS},
                          .lse = m->lse[p]};
    void *to = index % 2 ? (void *)m->out[0] : (void *)result; /* into a part's own memory, too */
    folio_merge merge =
        FOLIO_WITH(folio_merge, .num_heads = MERGE_HEADS, .head_size = MERGE_SIZE,
                   .num_parts = m->num_parts, .parts = states,
                   .out = {.data = to, .dtype = m->dtype, .tokens = MERGE_TOKENS}, .lse = lse);
    if (folio_state_merge(env->ctx, &merge, NULL) != FOLIO_OK ||
        folio_run_wait(env->ctx, NULL) != FOLIO_OK)
        check_fail(out, "%s", folio_last_error());
    /* Folding n parts rounds each weight and sum a few times, in f32, then once to the out type. */
    double budget = 2.0 * (0x1p-20 + kit_ulp(m->dtype, 1.0));
    for (int64_t i = 0; out->ok && i < MERGE_COUNT; i++)
        note_error(out, kit_load(m->dtype, to, i), want[i], budget);
    for (int64_t r = 0; out->ok && r < MERGE_ROWS; r++)
        note_error(out, (double)lse[r], want_lse[r], 0x1p-19);
    kit_free(m);
    kit_free(result);
    kit_free(lse);
}

/* Keys within a window, and the keys before it, merge to all keys. */
void run_merge_parts(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    kit_result part[2] = {{0}, {0}}, ref = {0}, formula = {0};
    check_base(env, d, &c);
    c.spec.dtype = FOLIO_F32;
    c.spec.strided = c.spec.no_lse = false;
    int64_t left = check_int(d, 0, 40);
    (void)index;
    check_add(&c, check_int(d, 1, 20), check_int(d, 0, 80));
    kit_spec near = c.spec;
    near.windowed = 1;
    near.window_left = left;
    kit_seq far = c.seqs[0];
    far.positions_given = 1;
    far.first_query_pos = far.seq_len - far.query_len - left - 1;
    kit_case *all = kit_open(env->ctx, &c.spec, c.seqs, 1);
    kit_case *window = kit_open(env->ctx, &near, c.seqs, 1);
    bool ok = all && window && kit_forward(window, NULL, c.type, c.seqs, 1, &part[0]) &&
              kit_forward(all, NULL, c.type, &far, 1, &part[1]) &&
              kit_judge(all, env->reference, c.type, c.seqs, 1, &ref) &&
              kit_formula(all, c.type, c.seqs, 1, false, &formula);
    if (!ok) check_fail(out, "%s", kit_error());
    if (ok) {
        folio_state states[2];
        for (int p = 0; p < 2; p++)
            states[p] =
                (folio_state){.out = {.data = part[p].bits, .dtype = FOLIO_F32, .tokens = ref.rows},
                              .lse = part[p].lse_bits};
        folio_merge merge = FOLIO_WITH(
            folio_merge, .num_heads = c.spec.num_heads, .head_size = c.spec.k_head_size,
            .num_parts = 2, .parts = states, .out = states[0].out, .lse = part[0].lse_bits);
        ok = (folio_state_merge(env->ctx, &merge, NULL) == FOLIO_OK &&
              folio_run_wait(env->ctx, NULL) == FOLIO_OK) ||
             check_fail(out, "%s", folio_last_error());
    }
    if (ok) {
        for (int64_t i = 0; i < ref.rows * ref.heads * ref.head_size; i++)
            part[0].out[i] = kit_load(FOLIO_F32, part[0].bits, i);
        for (int64_t i = 0; i < ref.rows * ref.heads; i++)
            part[0].lse[i] = (double)part[0].lse_bits[i];
        kit_verdict v;
        kit_compare(&part[0], &ref, &formula, &v);
        /* Two parts and their merge: three times one kernel's budget. */
        out->error = v.max_error;
        out->budget = 3 * v.budget;
        if (!(v.max_error <= 3 * v.budget && v.lse_error <= 3 * v.lse_budget))
            check_fail(out, "merged parts: %s", v.message);
    }
    for (int p = 0; p < 2; p++) kit_result_free(&part[p]);
    kit_result_free(&ref);
    kit_result_free(&formula);
    kit_close(all);
    kit_close(window);
}
