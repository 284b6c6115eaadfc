/* bench_compare_report.c: two runs compared, as Markdown or JSON. */
#include "base/table.h"
#include "base/term.h"
#include "bench/bench.h"
#include "bench/bench_compare.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *words, *key;
} findings[NUM_FINDINGS] = {
    [WITHIN_NOISE] = {"within noise", "noise"},
    [FASTER] = {"faster", "faster"},
    [SLOWER] = {"slower", "slower"},
    [WITH_CEILING] = {"as its ceiling", "ceiling"},
    [FEW_REPS] = {"few reps", "few_reps"},
};

/* ---- Names */

typedef struct name {
    char text[256];
} name;

/* What tells a case of this run or that from its neighbours; places only of both runs, if so. */
static name name_with(const comparison *c, const saved_case *of, bool places_of_both)
{
    name to;
    saved_name(of, c->now, c->before, places_of_both, to.text, sizeof to.text);
    return to;
}

static name place_of(const saved_run *r, const saved_case *of)
{
    name to = {.text = ""};
    char value[64];
    for (int i = 0; i < SAVED_NUM_FIELDS; i++) {
        const saved_field *f = &saved_fields[i];
        if (!saved_is_place(r, f) || strcmp(f->key, "section") == 0) continue;
        if (saved_value(of, f, value, sizeof value)[0] && strcmp(value, "0") != 0)
            saved_add_label(to.text, sizeof to.text, f->label, value);
    }
    return to;
}

static const char *machine(const saved_run *r) { return r->device[0] ? r->device : r->cpu; }

/* ---- Markdown */

static void print_row(table *t, const comparison *c, const compared *p, bool with, bool shares)
{
    char text[32];
    table_cell(t, "%s", json_text(p->now->of, "case"));
    if (with) table_cell(t, "%s", name_with(c, p->now, false).text);
    table_cell(t, "%s", bench_short_time(text, sizeof text, 1e9 * p->before->seconds));
    table_cell(t, "%s", bench_short_time(text, sizeof text, 1e9 * p->now->seconds));
    table_cell(t, "%+.1f %%", 100 * p->time.by);
    table_cell(t, "%.1f %%", 100 * p->time.noise);
    if (shares && isnan(p->share.by)) {
        table_cell(t, "-");
        table_cell(t, "-");
    } else if (shares) {
        table_cell(t, "%.0f -> %.0f %%", 100 * p->before->steady, 100 * p->now->steady);
        table_cell(t, "%.1f %%", 100 * p->share.noise);
    }
    table_cell(t, "%s", findings[p->is].words);
}

static void print_table(const comparison *c)
{
    static const char *const heads[] = {"before", "now", "change", "noise", "of median", "noise"};
    table t = {.columns = 0};
    bool shares = false, with = false;
    for (int i = 0; i < c->num_pairs; i++) {
        shares = shares || !isnan(c->pairs[i].share.by);
        with = with || name_with(c, c->pairs[i].now, false).text[0];
    }
    table_head(&t, 'l', "case");
    if (with) table_head(&t, 'l', "with");
    for (int i = 0; i < (shares ? 6 : 4); i++) table_head(&t, 'r', heads[i]);
    table_head(&t, 'l', "verdict");
    for (int i = 0; i < c->num_pairs; i++) print_row(&t, c, &c->pairs[i], with, shares);
    table_print(&t);
    printf("\n");
}

/* Machines, versions, places: what makes times incomparable is said before anyone reads them. */
static void print_machines(const comparison *c)
{
    if (strcmp(c->before->version, c->now->version) != 0)
        printf("- versions: before %s, now %s\n", c->before->version, c->now->version);
    if (!c->same_machine)
        printf(
            "- different machines: before %s, now %s. Times compare the machines, not the programs.\n"
            "  Cases with a share of the ceiling are compared by that share\n",
            machine(c->before), machine(c->now));
    for (int i = 0; i < c->num_pairs; i++) {
        name before = place_of(c->before, c->pairs[i].before),
             now = place_of(c->now, c->pairs[i].now);
        int same = 0, earlier = 0;
        if (strcmp(before.text, now.text) == 0) continue;
        for (int k = 0; k < c->num_pairs; k++) {
            if (strcmp(place_of(c->before, c->pairs[k].before).text, before.text) != 0 ||
                strcmp(place_of(c->now, c->pairs[k].now).text, now.text) != 0)
                continue;
            same++;
            earlier += k < i;
        }
        if (earlier == 0)
            printf("- different backend, level or threads: before %s; now %s (%d case%s)\n",
                   before.text, now.text, same, same > 1 ? "s" : "");
    }
}

/* Medians, which tell a busy machine; before 0.3 there were no others. */
static const json_value *ceilings_of(const saved_run *r)
{
    const json_value *medians = json_member(r->tree, "ceilings_median");
    return medians ? medians : json_member(r->tree, "ceilings");
}

static void print_ceilings(const comparison *c)
{
    const json_value *before = ceilings_of(c->before), *now = ceilings_of(c->now);
    bool busy = false;
    for (const json_value *v = now ? now->first : NULL; v; v = v->next) {
        double was = json_real(before, v->key), is = json_real(now, v->key);
        if (isnan(is) || !(was > 0)) continue;
        busy = busy || is / was > 1.1 || was / is > 1.1;
        printf("- ceiling %s: before %.4g, now %.4g (%+.1f %%)\n", v->key, was, is,
               100 * (is / was - 1));
    }
    if (busy && c->same_machine && c->same_place)
        printf(
            "- a ceiling has changed by more than 10 %%: in one of the runs the machine was busy; measure\n"
            "  again before you believe a verdict\n");
}

static void print_only(const comparison *c, const char *when, const saved_case *const *cases,
                       int count)
{
    for (int i = 0; i < count; i++) {
        name with = name_with(c, cases[i], true);
        printf("- only %s: %s%s%s\n", when, json_text(cases[i]->of, "case"),
               with.text[0] ? ", " : "", with.text);
    }
}

static void print_counts(const comparison *c)
{
    static const finding always[] = {FASTER, SLOWER, WITHIN_NOISE};
    for (int i = 0; i < 3; i++)
        printf("%s%d %s", i ? ", " : "- ", c->count[always[i]], findings[always[i]].words);
    printf("\n");
    if (c->count[WITH_CEILING])
        printf("- %d as %s ceiling: the time has changed, but the share of the ceiling does not\n"
               "  confirm it\n",
               c->count[WITH_CEILING], c->count[WITH_CEILING] > 1 ? "their" : "its");
    if (c->count[FEW_REPS])
        printf("- %d with few reps: fewer than 5 in one of the runs\n", c->count[FEW_REPS]);
}

void comparison_print(const comparison *c)
{
    printf("%scompared with %s%s: folio %s, %s\n\n", term_start(TERM_BOLD), c->path, term_end(),
           c->before->version, machine(c->before));
    if (c->num_pairs > 0) print_table(c);
    else printf("The two runs have no case in common.\n\n");
    if (c->num_pairs > 0) print_counts(c);
    print_only(c, "before", c->only_before, c->num_only_before);
    print_only(c, "now", c->only_now, c->num_only_now);
    print_machines(c);
    print_ceilings(c);
}

/* ---- JSON */

static void write_name(json *j, const saved_case *of)
{
    for (int i = 0; i < SAVED_NUM_FIELDS; i++) {
        const json_value *v = json_member(of->of, saved_fields[i].key);
        if (v && v->kind == JSON_STRING) json_string(j, saved_fields[i].key, v->text);
        if (v && v->kind == JSON_NUMBER) json_number(j, saved_fields[i].key, v->number);
    }
}

static void write_run(json *j, const char *key, const saved_run *r)
{
    json_object(j, key);
    json_string(j, "version", r->version);
    json_string(j, "cpu", r->cpu);
    json_string(j, "device", r->device);
    json_close(j);
}

static void write_change(json *j, const compared *p)
{
    json_number(j, "before_s", p->before->seconds);
    json_number(j, "now_s", p->now->seconds);
    json_number(j, "change", p->time.by);
    json_number(j, "noise", p->time.noise);
    json_number(j, "share_before", p->before->steady);
    json_number(j, "share_now", p->now->steady);
    json_number(j, "share_change", p->share.by);
    json_number(j, "share_noise", p->share.noise);
    json_string(j, "verdict", findings[p->is].key);
}

static void write_only(json *j, const char *key, const saved_case *const *cases, int count)
{
    json_array(j, key);
    for (int i = 0; i < count; i++) {
        json_object(j, NULL);
        write_name(j, cases[i]);
        json_close(j);
    }
    json_close(j);
}

static void write_ceilings(json *j, const comparison *c)
{
    const json_value *before = ceilings_of(c->before), *now = ceilings_of(c->now);
    json_object(j, "ceilings");
    for (const json_value *v = now ? now->first : NULL; v; v = v->next) {
        json_object(j, v->key);
        json_number(j, "before", json_real(before, v->key));
        json_number(j, "now", json_real(now, v->key));
        json_close(j);
    }
    json_close(j);
}

void comparison_write(json *j, const comparison *c)
{
    json_object(j, "compare");
    json_string(j, "file", c->path);
    write_run(j, "before", c->before);
    write_run(j, "now", c->now);
    json_bool(j, "same_machine", c->same_machine);
    json_bool(j, "same_place", c->same_place);
    for (int i = 0; i < NUM_FINDINGS; i++) json_integer(j, findings[i].key, c->count[i]);
    write_ceilings(j, c);
    json_array(j, "cases");
    for (int i = 0; i < c->num_pairs; i++) {
        json_object(j, NULL);
        write_name(j, c->pairs[i].now);
        write_change(j, &c->pairs[i]);
        json_close(j);
    }
    json_close(j);
    write_only(j, "only_before", c->only_before, c->num_only_before);
    write_only(j, "only_now", c->only_now, c->num_only_now);
    json_close(j);
}
