/* bench_compare.c: see bench_compare.h. */
#include "bench/bench_compare.h"

#include "bench/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_REPS = 5 }; /* a spread of fewer says nothing */
static const double min_noise = 0.02;

/* ---- Which case is which */

/* Do two cases agree in all fields of a kind: the work, or the place? */
static bool agree(const saved_run *r, const saved_case *a, const saved_case *b, bool places)
{
    char x[64], y[64];
    if (places ? a->place != b->place : a->work != b->work) return false;
    for (int i = 0; i < SAVED_NUM_FIELDS; i++) {
        const saved_field *f = &saved_fields[i];
        if (saved_is_place(r, f) != places) continue;
        if (strcmp(saved_value(a, f, x, sizeof x), saved_value(b, f, y, sizeof y)) != 0)
            return false;
    }
    return true;
}

typedef struct match {
    const saved_run *before, *now;
    int *of_now;    /* [now->num_cases]: the case before, -1: none */
    int *of_before; /* the other way */
} match;

static void join(match *m, int before, int now)
{
    m->of_now[now] = before;
    m->of_before[before] = now;
}

static void match_same_place(match *m)
{
    for (int n = 0; n < m->now->num_cases; n++)
        for (int b = 0; b < m->before->num_cases && m->of_now[n] < 0; b++) {
            const saved_case *x = &m->before->cases[b], *y = &m->now->cases[n];
            if (m->of_before[b] < 0 && agree(m->now, x, y, false) && agree(m->now, x, y, true))
                join(m, b, n);
        }
}

/* The only case of a run that is free and has this work; -1: there is none, or more than one. */
static int only_free(const saved_run *r, const int *taken, const saved_case *like)
{
    int found = -1;
    for (int i = 0; i < r->num_cases; i++) {
        if (taken[i] >= 0 || !agree(r, &r->cases[i], like, false)) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return found;
}

/* Another backend, level or number of threads: the same work, where no other case has a claim to it. */
static void match_other_place(match *m)
{
    for (int n = 0; n < m->now->num_cases; n++) {
        if (m->of_now[n] >= 0) continue;
        int b = only_free(m->before, m->of_before, &m->now->cases[n]);
        if (b >= 0 && only_free(m->now, m->of_now, &m->before->cases[b]) == n) join(m, b, n);
    }
}

/* ---- Which is faster */

static double known(double spread) { return isnan(spread) ? 0 : spread; }

static change change_of(double before, double now, double noise)
{
    return (change){.by = now / before - 1, .noise = fmax(noise, min_noise)};
}

/* 1: more, -1: less, 0: within noise. A half and a double are the same way from 1. */
static int sign_of(const change *c)
{
    double ratio = 1 + c->by;
    return ratio > 1 + c->noise ? 1 : 1 / ratio > 1 + c->noise ? -1 : 0;
}

static finding find(const comparison *c, const compared *p)
{
    int time = sign_of(&p->time), rate = isnan(p->share.by) ? -time : sign_of(&p->share);
    if (p->before->reps < MIN_REPS || p->now->reps < MIN_REPS) return FEW_REPS;
    if (!c->same_machine) time = -rate;
    else if (!agree(c->now, p->before, p->now, true)) rate = -time; /* other ceilings, on purpose */
    if (time == 0) return WITHIN_NOISE;
    if (rate != -time) return WITH_CEILING;
    return time < 0 ? FASTER : SLOWER;
}

static compared compare_cases(const comparison *c, const saved_case *before, const saved_case *now)
{
    double noise = (before->spread + now->spread) / 2;
    double ceilings = (known(before->ceiling_spread) + known(now->ceiling_spread)) / 2;
    compared p = {.before = before, .now = now, .share = {(double)NAN, (double)NAN}};
    p.time = change_of(before->seconds, now->seconds, noise);
    if (before->steady > 0 && now->steady > 0)
        p.share = change_of(before->steady, now->steady, noise + ceilings);
    p.is = find(c, &p);
    return p;
}

/* ---- Runs */

static bool same_machine(const saved_run *a, const saved_run *b)
{
    double x = json_real(a->tree, "processors"), y = json_real(b->tree, "processors");
    return strcmp(a->cpu, b->cpu) == 0 && strcmp(a->device, b->device) == 0 &&
           (isnan(x) || isnan(y) || x == y);
}

static int *none_taken(int count)
{
    int *taken = bench_alloc(count, sizeof *taken);
    for (int i = 0; i < count; i++) taken[i] = -1;
    return taken;
}

void compare_runs(comparison *c, const char *path, const saved_run *before, const saved_run *now)
{
    match m = {before, now, none_taken(now->num_cases), none_taken(before->num_cases)};
    *c = (comparison){.path = path, .before = before, .now = now};
    c->same_machine = same_machine(before, now);
    c->same_place = true;
    c->pairs = bench_alloc(now->num_cases, sizeof *c->pairs);
    c->only_before = bench_alloc(before->num_cases, sizeof *c->only_before);
    c->only_now = bench_alloc(now->num_cases, sizeof *c->only_now);
    match_same_place(&m);
    match_other_place(&m);
    for (int n = 0; n < now->num_cases; n++) {
        if (m.of_now[n] < 0) {
            c->only_now[c->num_only_now++] = &now->cases[n];
            continue;
        }
        compared *p = &c->pairs[c->num_pairs++];
        *p = compare_cases(c, &before->cases[m.of_now[n]], &now->cases[n]);
        c->count[p->is]++;
        c->same_place = c->same_place && agree(now, p->before, p->now, true);
    }
    for (int b = 0; b < before->num_cases; b++)
        if (m.of_before[b] < 0) c->only_before[c->num_only_before++] = &before->cases[b];
    free(m.of_now);
    free(m.of_before);
}

void comparison_free(comparison *c)
{
    free(c->pairs);
    free(c->only_before);
    free(c->only_now);
    *c = (comparison){.path = NULL};
}
