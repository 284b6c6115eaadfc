/*
 * formula.c: attention as the formula says, key by key, on the stored numbers; and the
 * comparison with the error budget. It shares no code with the library: K and V are decoded here
 * from the cache's raw rows.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One sequence's keys and values: [keys][kv_heads][size], as double, rounded to f32 if single. With v_in_k v is k. */
typedef struct key_rows {
    double *k, *v;
    int64_t v_size; /* of a row of v */
} key_rows;

/* One row's walk over its keys. */
typedef struct row_job {
    const kit_case *h;
    const step *st;
    int64_t seq, row, head, keys; /* row: number in its sequence */
    const key_rows *rows;
    double *q;      /* [k_head_size] */
    double *scores; /* [keys] */
    bool single;
    int64_t order; /* of KIT_ORDERS: where sums begin, and whether products are rounded */
} row_job;

/* In f32 every operation rounds; double holds each f32 result exactly before it does. */
static double rounded(double x, bool single) { return single ? (double)(float)x : x; }

/* ---- Keys */

/* Raw rows of a sequence's blocks, decoded; false when the library refuses. */
static bool unpack_keys(const kit_case *h, const seq_state *state, int cross, int64_t keys,
                        bool single, key_rows *out)
{
    const kit_spec *s = &h->spec;
    int64_t n = kit_blocks_for(h, keys), tokens = n * s->block_size, heads = s->num_kv_heads;
    int64_t sizes[2] = {s->k_head_size, s->v_head_size};
    int sides = s->v_in_k ? 1 : 2;
    double fixed[2] = {s->k_scale != 0 ? (double)s->k_scale : 1.0,
                       s->v_scale != 0 ? (double)s->v_scale : 1.0};
    bool fp8 = s->kv_dtype == FOLIO_FP8_E4M3 || s->kv_dtype == FOLIO_FP8_E5M2;
    int64_t *blocks = kit_alloc((size_t)n, sizeof *blocks);
    for (int64_t b = 0; b < n; b++) blocks[b] = state->blocks[cross][b];
    void *raw[2] = {NULL};
    float *scales[2] = {NULL};
    for (int i = 0; i < sides; i++) {
        raw[i] = kit_alloc((size_t)(tokens * heads * sizes[i]), folio_dtype_size(s->kv_dtype));
        scales[i] = kit_alloc((size_t)(tokens * heads), sizeof(float));
    }
    folio_kv_rows rows = FOLIO_WITH(folio_kv_rows, .k = raw[0], .v = raw[1], .k_scales = scales[0],
                                    .v_scales = scales[1], .num_blocks = n, .blocks = blocks);
    folio_status status = kit_wait(h, folio_kv_cache_unpack(h->cache, s->layer, &rows, NULL));
    for (int i = 0; i < sides; i++) {
        double *to = i == 0 ? out->k : out->v;
        for (int64_t e = 0; status == FOLIO_OK && e < keys * heads * sizes[i]; e++) {
            double scale = s->kv_dtype == FOLIO_INT8 ? (double)scales[i][e / sizes[i]]
                                                     : (fp8 ? fixed[i] : 1.0);
            if (fp8 && h->head_scales[i]) scale = (double)h->head_scales[i][e / sizes[i] % heads];
            to[e] = rounded(kit_load(s->kv_dtype, raw[i], e) * scale, single);
        }
        kit_free(raw[i]);
        kit_free(scales[i]);
    }
    kit_free(blocks);
    return status == FOLIO_OK || kit_refused("unpack", status);
}

static void direct_keys(const step_tensor *t, int64_t from_row, int64_t key, int64_t keys,
                        double *out)
{
    for (int64_t j = key; j < keys; j++)
        for (int64_t head = 0; head < t->heads; head++)
            for (int64_t d = 0; d < t->size; d++)
                out[(j * t->heads + head) * t->size + d] =
                    kit_load(t->dtype, t->data, step_at(t, from_row + j - key, head) + d);
}

/* The keys of a sequence as the type reads them: cached ones first, then this step's own. */
static bool load_keys(kit_case *h, const step *st, int64_t seq, bool single, key_rows *out)
{
    const kit_seq *s = &st->seqs[seq];
    int64_t keys = kit_seq_keys(s, st->type), heads = h->spec.num_kv_heads, cached = 0;
    int cross = st->type == FOLIO_ATTENTION_ENCODER_DECODER;
    if (keys > 0 && h->cache && type_is_cached(st->type))
        cached = keys - (h->spec.append ? (cross ? s->encoder_new_len : s->query_len) : 0);
    out->k = kit_alloc((size_t)(keys * heads * h->spec.k_head_size), sizeof(double));
    out->v_size = h->spec.v_in_k ? h->spec.k_head_size : h->spec.v_head_size;
    out->v = h->spec.v_in_k
                 ? out->k
                 : kit_alloc((size_t)(keys * heads * h->spec.v_head_size), sizeof(double));
    seq_state *state = kit_state(h, kit_seq_id(st->seqs, seq));
    if (cached > 0 && !unpack_keys(h, state, cross, cached, single, out)) return false;
    direct_keys(&st->k, st->new_row_start[seq], cached, keys, out->k);
    if (!h->spec.v_in_k) direct_keys(&st->v, st->new_row_start[seq], cached, keys, out->v);
    for (int64_t j = cached; h->spec.rotary && !h->spec.rotary_before && j < keys; j++)
        for (int64_t head = 0; head < heads; head++)
            kit_rotate(h, st->k.dtype, kit_row_position(h, s, st->type, j - cached),
                       out->k + (j * heads + head) * h->spec.k_head_size);
    return true;
}

/* ---- The formula */

bool kit_sees(const kit_spec *spec, folio_attention_type type, const kit_seq *seq, int64_t i,
              int64_t j, int64_t *distance)
{
    int64_t d = j - i;
    if (type == FOLIO_ATTENTION_DECODER && seq->positions_given)
        d = seq->first_key_pos + j - (seq->first_query_pos + i);
    else if (type == FOLIO_ATTENTION_DECODER) d = j - (kit_seq_context(seq) + i);
    *distance = d;
    if (type == FOLIO_ATTENTION_ENCODER_DECODER) return true;
    bool causal = type == FOLIO_ATTENTION_DECODER && seq->causality != FOLIO_CAUSAL_NO;
    if (causal && d > 0) return false;
    if (!spec->windowed) return true;
    if (spec->window_left >= 0 && -d > spec->window_left) return false;
    return causal || spec->window_right < 0 || d <= spec->window_right;
}

static double bias_at(const row_job *job, int64_t j)
{
    const folio_bias *b = &job->st->bias;
    int64_t index[4] = {job->seq, job->head, job->row, j}, at = 0;
    if (b->data == NULL) return 0.0;
    for (int d = 0; d < 4; d++)
        if (b->dims[d] != 1) at += index[d] * b->strides[d];
    return kit_load(b->dtype, b->data, at);
}

/* Sums begin with their first term or in their middle, and go round. */
static int64_t first_term(const row_job *job, int64_t n)
{
    return n * (job->order / 2) / (KIT_ORDERS / 2);
}
static int64_t next_term(int64_t i, int64_t n) { return i + 1 < n ? i + 1 : 0; }

/* sum + a b in f32: both operations rounded, or in every other order only the sum. */
static float add_product(const row_job *job, float sum, double a, double b)
{
    return job->order % 2 ? (float)((double)sum + a * b) : sum + (float)a * (float)b;
}

/* Sequential sums in the precision asked for. */
static double dot(const row_job *job, const double *k, int64_t n)
{
    double wide = 0;
    float narrow = 0;
    for (int64_t i = 0, d = first_term(job, n); i < n; i++, d = next_term(d, n)) {
        if (job->single) narrow = add_product(job, narrow, job->q[d], k[d]);
        else wide += job->q[d] * k[d];
    }
    return job->single ? (double)narrow : wide;
}

/* The score of one key the row sees. */
static double score(const row_job *job, int64_t j, int64_t d, double bias)
{
    const kit_spec *s = &job->h->spec;
    bool f = job->single;
    int64_t kv_head = job->head / (s->num_heads / s->num_kv_heads);
    double scale = s->scale != 0 ? (double)s->scale : (double)(float)(1.0 / sqrt(s->k_head_size));
    double x =
        dot(job, job->rows->k + (j * s->num_kv_heads + kv_head) * s->k_head_size, s->k_head_size);
    x = rounded(x * scale, f);
    if (s->soft_cap != 0) {
        double cap = (double)s->soft_cap;
        x = rounded(cap * rounded(tanh(rounded(x / cap, f)), f), f);
    }
    if (job->st->slopes) {
        double slope = (double)job->st->slopes[job->head];
        x = rounded(x - rounded(slope * fabs((double)d), f), f);
    }
    return rounded(x + bias, f);
}

/* First pass: scores, NaN-free -inf where unseen. Returns the number of keys seen. */
static int64_t score_row(const row_job *job, double *max)
{
    const kit_seq *seq = &job->st->seqs[job->seq];
    int64_t seen = 0;
    for (int64_t j = 0; j < job->keys; j++) {
        int64_t d;
        bool sees = kit_sees(&job->h->spec, job->st->type, seq, job->row, j, &d);
        double bias = sees ? bias_at(job, j) : -(double)INFINITY;
        job->scores[j] = -(double)INFINITY;
        if (isinf(bias) && bias < 0) continue;
        job->scores[j] = score(job, j, d, bias);
        if (job->scores[j] > *max) *max = job->scores[j];
        seen++;
    }
    return seen;
}

/* Second pass: out [v_head_size] and the row's lse. */
static void row_attend(const row_job *job, double *out, double *lse)
{
    const kit_spec *s = &job->h->spec;
    bool f = job->single;
    double sink = job->st->sinks ? (double)job->st->sinks[job->head] : -(double)INFINITY;
    double max = sink;
    *lse = sink;
    if (score_row(job, &max) == 0) return; /* out is zeros already */
    int64_t kv_head = job->head / (s->num_heads / s->num_kv_heads);
    double sum = isinf(sink) ? 0.0 : rounded(exp(rounded(sink - max, f)), f);
    int64_t n = job->keys;
    for (int64_t i = 0, j = first_term(job, n); i < n; i++, j = next_term(j, n)) {
        if (isinf(job->scores[j]) && job->scores[j] < 0) continue;
        double p = rounded(exp(rounded(job->scores[j] - max, f)), f);
        const double *v = job->rows->v + (j * s->num_kv_heads + kv_head) * job->rows->v_size;
        sum = rounded(sum + p, f);
        if (f)
            for (int64_t d = 0; d < s->v_head_size; d++)
                out[d] = (double)add_product(job, (float)out[d], p, v[d]);
        else
            for (int64_t d = 0; d < s->v_head_size; d++) out[d] += p * v[d];
    }
    for (int64_t d = 0; d < s->v_head_size; d++) out[d] = rounded(out[d] / sum, f);
    *lse = rounded(max + rounded(log(sum), f), f);
}

/* One sequence's rows into r, the job's precision and order given. */
static void attend_seq(row_job job, kit_result *r)
{
    const step *st = job.st;
    int64_t seq = job.seq, keys = job.keys, size = job.h->spec.k_head_size;
    job.q = kit_alloc((size_t)size, sizeof(double));
    job.scores = kit_alloc((size_t)keys, sizeof(double));
    for (int64_t row = st->row_start[seq]; row < st->row_start[seq + 1]; row++)
        for (int64_t head = 0; head < r->heads; head++) {
            job.row = row - st->row_start[seq];
            job.head = head;
            for (int64_t d = 0; d < size; d++)
                job.q[d] = kit_load(st->q.dtype, st->q.data, step_at(&st->q, row, head) + d);
            if (job.h->spec.rotary && !job.h->spec.rotary_before)
                kit_rotate(job.h, st->q.dtype,
                           kit_row_position(job.h, &st->seqs[seq], st->type, job.row), job.q);
            row_attend(&job, r->out + (row * r->heads + head) * r->head_size,
                       r->lse + row * r->heads + head);
        }
    kit_free(job.q);
    kit_free(job.scores);
}

/* Rows no sequence owns: zeros, and the sink or -inf. */
static void empty_rows(const step *st, kit_result *r)
{
    for (int64_t i = 0; i < r->rows * r->heads; i++)
        r->lse[i] = st->sinks ? (double)st->sinks[i % r->heads] : -(double)INFINITY;
}

static void round_result(bool in_double, kit_result *r)
{
    int64_t count = r->rows * r->heads * r->head_size;
    for (int64_t i = 0; i < count; i++) {
        kit_store(r->dtype, r->bits, i, r->out[i]);
        if (!in_double) r->out[i] = kit_load(r->dtype, r->bits, i);
    }
    for (int64_t i = 0; i < r->rows * r->heads; i++) r->lse_bits[i] = (float)r->lse[i];
}

bool kit_formula(kit_case *h, folio_attention_type type, const kit_seq *seqs, int64_t num_seqs,
                 bool in_double, kit_result *result)
{
    step st;
    bool ok = true, no_lse = h->spec.no_lse;
    *result = (kit_result){0};
    if (!kit_reserve_all(h, seqs, num_seqs)) return false;
    kit_step_open(h, type, seqs, num_seqs, &st);
    h->spec.no_lse = false;
    kit_result_make(h, &st, in_double ? FOLIO_F64 : h->spec.dtype, result);
    empty_rows(&st, result);
    if (!in_double) result->others = kit_alloc(KIT_ORDERS - 1, sizeof *result->others);
    for (int i = 0; !in_double && i < KIT_ORDERS - 1; i++) {
        kit_result_make(h, &st, h->spec.dtype, &result->others[i]);
        empty_rows(&st, &result->others[i]);
    }
    h->spec.no_lse = no_lse;
    for (int64_t i = 0; ok && i < num_seqs; i++) {
        key_rows rows = {0};
        ok = load_keys(h, &st, i, !in_double, &rows);
        row_job job = {.h = h,
                       .st = &st,
                       .seq = i,
                       .keys = kit_seq_keys(&seqs[i], type),
                       .rows = &rows,
                       .single = !in_double};
        if (ok) attend_seq(job, result);
        for (job.order = 1; ok && !in_double && job.order < KIT_ORDERS; job.order++)
            attend_seq(job, &result->others[job.order - 1]);
        kit_free(rows.k);
        if (!h->spec.v_in_k) kit_free(rows.v);
    }
    round_result(in_double, result);
    for (int i = 0; !in_double && i < KIT_ORDERS - 1; i++)
        round_result(in_double, &result->others[i]);
    kit_step_close(&st);
    return ok;
}

/* ---- Comparison */

typedef struct distance_of {
    double error, budget, max_ref;
    int64_t worst; /* element of the largest error */
} distance_of;

/* |a - b|, where NaN answers only NaN and an infinity only itself. */
static double gap(double a, double b)
{
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b) ? 0.0 : (double)INFINITY;
    return a == b ? 0.0 : fabs(a - b);
}

/* The largest finite error of formula. */
static double noise_of(const double *formula, const double *ref, int64_t n)
{
    double noise = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = isfinite(ref[i]) ? gap(formula[i], ref[i]) : 0.0;
        if (isfinite(e) && e > noise) noise = e;
    }
    return noise;
}

/* The error over [begin, end) of `total` numbers; the budget is made over all of them. */
static distance_of measure(const double *got, const double *ref, double noise, int64_t total,
                           int64_t begin, int64_t end, folio_dtype dtype)
{
    distance_of m = {.worst = begin};
    for (int64_t i = 0; i < total; i++)
        if (isfinite(ref[i]) && fabs(ref[i]) > m.max_ref) m.max_ref = fabs(ref[i]);
    m.budget = 2 * noise + kit_ulp(dtype, m.max_ref);
    for (int64_t i = begin; i < end; i++) {
        double e = gap(got[i], ref[i]);
        if (e > m.error) {
            m.error = e;
            m.worst = i;
        }
    }
    return m;
}

static void judge(const kit_result *got, const kit_result *ref, distance_of out, distance_of lse,
                  kit_verdict *v)
{
    *v = (kit_verdict){.max_error = out.error,
                       .budget = out.budget,
                       .lse_error = lse.error,
                       .lse_budget = lse.budget};
    bool out_ok = out.error <= out.budget, lse_ok = lse.error <= lse.budget;
    v->ok = out_ok && lse_ok;
    if (v->ok) return;
    int64_t width = out_ok ? 1 : got->head_size, at = out_ok ? lse.worst : out.worst;
    int64_t row = at / width / got->heads, seq = 0;
    while (seq < got->num_seqs && row >= got->row_start[seq + 1]) seq++;
    int64_t first = got->row_start[seq < got->num_seqs ? seq : got->num_seqs];
    snprintf(
        v->message, sizeof v->message,
        "%s of sequence %lld, row %lld, head %lld, dim %lld is %.9g, reference %.9g: error %.3g, budget %.3g",
        out_ok ? "lse" : "out", (long long)seq, (long long)(row - first),
        (long long)(at / width % got->heads), (long long)(at % width),
        out_ok ? got->lse[at] : got->out[at], out_ok ? ref->lse[at] : ref->out[at],
        out_ok ? lse.error : out.error, out_ok ? lse.budget : out.budget);
}

static bool same_shape(const kit_result *a, const kit_result *b)
{
    return a->rows == b->rows && a->heads == b->heads && a->head_size == b->head_size;
}

static void compare_rows(const kit_result *got, const kit_result *ref, const kit_result *formula,
                         int64_t begin, int64_t end, kit_verdict *verdict)
{
    *verdict = (kit_verdict){0};
    if (!same_shape(got, ref) || !same_shape(got, formula)) {
        snprintf(verdict->message, sizeof verdict->message, "the results differ in shape");
        return;
    }
    int64_t heads = got->heads, width = heads * got->head_size;
    bool with_lse = got->lse && ref->lse;
    double out_noise = 0, lse_noise = 0;
    for (int i = 0; i < KIT_ORDERS; i++) {
        const kit_result *p = i == 0 || !formula->others ? formula : &formula->others[i - 1];
        out_noise = fmax(out_noise, noise_of(p->out, ref->out, got->rows * width));
        if (with_lse) lse_noise = fmax(lse_noise, noise_of(p->lse, ref->lse, got->rows * heads));
    }
    distance_of lse = {0};
    distance_of out = measure(got->out, ref->out, out_noise, got->rows * width, begin * width,
                              end * width, got->dtype);
    if (with_lse)
        lse = measure(got->lse, ref->lse, lse_noise, got->rows * heads, begin * heads, end * heads,
                      FOLIO_F32);
    lse.budget += got->cut * lse.max_ref;
    judge(got, ref, out, lse, verdict);
}

void kit_compare(const kit_result *got, const kit_result *ref, const kit_result *formula,
                 kit_verdict *verdict)
{
    compare_rows(got, ref, formula, 0, got->rows, verdict);
}

void kit_compare_seq(const kit_result *got, const kit_result *ref, const kit_result *formula,
                     int64_t seq, kit_verdict *verdict)
{
    compare_rows(got, ref, formula, got->row_start[seq], got->row_start[seq + 1], verdict);
}

void kit_compare_exact(const kit_result *got, const kit_result *ref, kit_verdict *verdict)
{
    *verdict = (kit_verdict){0};
    int64_t n = got->rows * got->heads * got->head_size, heads = got->rows * got->heads;
    distance_of lse = {0}, out = measure(got->out, ref->out, 0, n, 0, n, FOLIO_F64);
    out.budget = 1e-9 * out.max_ref;
    if (got->lse) lse = measure(got->lse, ref->lse, 0, heads, 0, heads, FOLIO_F32);
    judge(got, ref, out, lse, verdict);
}
