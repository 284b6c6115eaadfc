/* check_cases.c: the list of what `folio check` runs (check_cases.def), and how one case is run. */
#include "check/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const check_series check_all_series[] = {
#define MAKE(feature, series, quick, full, function)                                               \
    {#feature, #series, quick, full, function, NULL},
#define RUN(feature, series, quick, full, function)                                                \
    {#feature, #series, quick, full, NULL, function},
#include "check/check_cases.def"
#undef MAKE
#undef RUN
};
const int check_num_series = (int)(sizeof check_all_series / sizeof check_all_series[0]);

int64_t check_int(check_draw *d, int64_t low, int64_t high)
{
    return kit_random_int(d->key, KIT_USER, d->count++, low, high);
}

bool check_chance(check_draw *d, int64_t one_in) { return check_int(d, 1, one_in) == 1; }

bool check_fail(check_outcome *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(out->message, sizeof out->message, format, args);
    va_end(args);
    out->ok = false;
    return false;
}

/* A case's key: its seed and name. The number of the case is mixed in like a token. */
static uint64_t case_key(uint64_t seed, const check_series *series, int64_t index)
{
    uint64_t name = 0;
    for (const char *p = series->feature; *p; p++) name = name * 131 + (unsigned char)*p;
    for (const char *p = series->name; *p; p++) name = name * 131 + (unsigned char)*p;
    return kit_random_bits(seed, KIT_USER, (int64_t)name, index, 0, 0);
}

void check_run_attention(const check_env *env, const check_attention *c, check_outcome *out)
{
    kit_verdict v;
    kit_check(env->ctx, env->reference, &c->spec, c->type, c->seqs, c->num_seqs, &v);
    out->ok = v.ok;
    out->error = v.max_error;
    out->budget = v.budget;
    snprintf(out->message, sizeof out->message, "%s", v.message);
    if (!v.ok) kit_describe(&c->spec, c->type, c->seqs, c->num_seqs, out->what, sizeof out->what);
}

void check_run_case(const check_env *env, const check_series *series, int64_t index,
                    check_outcome *out)
{
    check_draw d = {.key = case_key(env->seed, series, index)};
    *out = (check_outcome){.ok = true};
    if (series->run) {
        series->run(env, &d, index, out);
        return;
    }
    check_attention c = {0};
    series->make(env, &d, index, &c);
    c.spec.in_place = index % 3 == 1; /* 3 divides no list of layouts */
    check_settle(&c);
    check_run_attention(env, &c, out);
}
