/*
 * fuzz_differential.c: the cases of `folio check`, drawn from the input's bytes instead of a seed: each runs on the
 * reference and on every level of the cpu over one cache, and is judged as there: the reference against the formula in
 * double, the others against the reference.
 */
#include "check/check.h"
#include "fuzz/fuzz.h"
#include "kit/kit_internal.h"

const char fuzz_name[] = "differential";
static const int64_t MOST_WORK = 300000; /* products of one case: a millisecond or so */

static const struct {
    const char *name;
    int64_t count;
    void (*make)(const check_env *env, check_draw *d, int64_t index, check_attention *c);
} parts[] = {
#define MAKE(feature, part, quick, full, function) {#feature, full, function},
#define RUN(feature, part, quick, full, function)
#include "check/check_cases.def"
#undef MAKE
#undef RUN
};

/* What the cases draw from, in place of check_cases.c. */
static fuzz_input *input;

int64_t check_int(check_draw *d, int64_t low, int64_t high)
{
    (void)d;
    if (high - low < 1 << 16) return fuzz_int(input, low, high);
    return low + fuzz_int(input, 0, UINT16_MAX); /* a seed */
}

bool check_chance(check_draw *d, int64_t one_in) { return check_int(d, 1, one_in) == 1; }

int64_t check_split_len(const check_env *env)
{
    (void)env;
    return 512;
}

static int64_t work(const check_attention *c)
{
    int64_t keys = 0;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const kit_seq *s = &c->seqs[i];
        keys += (s->query_len + 1) * (s->seq_len + 1) +
                (s->query_len + s->encoder_new_len + 1) * (s->encoder_len + 1);
    }
    const kit_spec *s = &c->spec;
    return keys * (s->num_heads ? s->num_heads : 4) *
           ((s->k_head_size ? s->k_head_size : 32) + s->v_head_size);
}

static void judge(const check_attention *c, int64_t kind, const kit_verdict *v)
{
    char what[600];
    if (v->ok) return;
    kit_describe(&c->spec, c->type, c->seqs, c->num_seqs, what, sizeof what);
    fuzz_find(__FILE__, __LINE__, "%s: %s: %s", fuzz_context_name(kind), v->message, what);
}

static void run_all(const check_attention *c)
{
    int64_t best = fuzz_num_contexts() - 1;
    kit_case *h = kit_open(fuzz_context(best), &c->spec, c->seqs, c->num_seqs);
    kit_result ref = {0}, exact = {0}, formula = {0}, got = {0};
    kit_verdict v;
    bool ok = h != NULL && kit_forward(h, NULL, c->type, c->seqs, c->num_seqs, &got) &&
              kit_judge(h, fuzz_context(0), c->type, c->seqs, c->num_seqs, &ref) &&
              kit_formula(h, c->type, c->seqs, c->num_seqs, true, &exact) &&
              kit_formula(h, c->type, c->seqs, c->num_seqs, false, &formula);
    FUZZ_CHECK(ok, "%s", kit_error());
    kit_compare_exact(&ref, &exact, &v);
    judge(c, 0, &v);
    for (int64_t kind = best;; kind--) { /* got is the best one's */
        kit_compare(&got, &ref, &formula, &v);
        judge(c, kind, &v);
        if (kind == 0) break;
        kit_result_free(&got);
        ok = kit_forward(h, fuzz_context(kind - 1), c->type, c->seqs, c->num_seqs, &got);
        FUZZ_CHECK(ok, "%s: %s", fuzz_context_name(kind - 1), kit_error());
    }
    kit_result_free(&got);
    kit_result_free(&ref);
    kit_result_free(&exact);
    kit_result_free(&formula);
    kit_close(h);
}

/* Of the cases that judge themselves, which are not drawn. */
bool check_fail(check_outcome *out, const char *format, ...)
{
    (void)out;
    fuzz_find(__FILE__, __LINE__, "%s", format);
}

void check_run_attention(const check_env *env, const check_attention *c, check_outcome *out)
{
    (void)env;
    *out = (check_outcome){.ok = true};
    run_all(c);
}

void fuzz_run(fuzz_input *in)
{
    static check_env env = {.info = {.struct_size = sizeof(folio_backend_info)}};
    if (env.ctx == NULL && folio_backend_get_info("cpu", &env.info) != FOLIO_OK) return;
    env.ctx = fuzz_context(fuzz_num_contexts() - 1);
    env.reference = fuzz_context(0);
    input = in;
    check_draw d = {0, 0};
    check_attention c = {.num_seqs = 0};
    int64_t part = fuzz_int(in, 0, FUZZ_COUNT(parts) - 1);
    parts[part].make(&env, &d, fuzz_int(in, 0, parts[part].count - 1), &c);
    c.spec.in_place = fuzz_chance(in, 3);
    check_settle(&c);
    if (work(&c) > MOST_WORK) return;
    run_all(&c);
    fuzz_took(FOLIO_OK);
}
