/* bench_saved.c: see bench_saved.h. */
#include "bench/bench_saved.h"

#include "bench/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const saved_field saved_fields[SAVED_NUM_FIELDS] = {
    {"case", "", "", false},
    {"dtype", "", "", false},
    {"kv_dtype", "kv ", "", false},
    {"heads", "heads ", "", false},
    {"kv_heads", "kv heads ", "", false},
    {"head_size", "head size ", "", false},
    {"block_size", "block ", "", false},
    {"layout", "", "native", false},
    {"options", "", "plain", false},
    {"cache", "", "cold", false},
    {"blocks", "blocks ", "", false},
    {"length", "length ", "", false},
    {"sequences", "sequences ", "", false},
    {"backend", "", "", true},
    {"level", "", "", true},
    {"threads", "threads ", "", true},
    {"section", "section ", "", true},
};

bool saved_is_place(const saved_run *r, const saved_field *f)
{
    return f->is_place && strcmp(r->topic, "attention") == 0;
}

const char *saved_value(const saved_case *c, const saved_field *f, char *text, size_t size)
{
    const json_value *v = json_member(c->of, f->key);
    text[0] = '\0';
    if (v && v->kind == JSON_STRING) snprintf(text, size, "%s", v->text);
    if (v && v->kind == JSON_NUMBER) snprintf(text, size, "%.10g", v->number);
    return text;
}

void saved_add_label(char *text, size_t size, const char *label, const char *value)
{
    size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s%s", used ? ", " : "", label, value);
}

/* Is a field of some case of the run another than this? */
static bool differs(const saved_run *r, int field, const char *value)
{
    char first[64];
    return r->varies[field] ||
           strcmp(saved_value(&r->cases[0], &saved_fields[field], first, sizeof first), value) != 0;
}

const char *saved_name(const saved_case *of, const saved_run *own, const saved_run *other,
                       bool other_places, char *text, size_t size)
{
    char value[64];
    text[0] = '\0';
    for (int i = 1; i < SAVED_NUM_FIELDS; i++) { /* 0 is its name */
        const saved_field *f = &saved_fields[i];
        bool both = other && (other_places || !saved_is_place(own, f));
        saved_value(of, f, value, sizeof value);
        if (!differs(own, i, value) && !(both && differs(other, i, value))) continue;
        bool as_dtype = strcmp(f->key, "kv_dtype") == 0 &&
                        strcmp(json_text(of->of, "dtype"), json_text(of->of, f->key)) == 0;
        if (strcmp(value, f->usual) != 0 && !as_dtype && strcmp(f->key, "section") != 0)
            saved_add_label(text, size, f->label, value);
    }
    return text;
}

/* Attention is timed in seconds, the other topics in nanoseconds. */
static bool read_case(const json_value *v, saved_case *c, json_error *error)
{
    const json_value *ceiling = json_member(v, "ceiling");
    if (v->kind != JSON_OBJECT) return json_wrong(v, error, "a result is an object");
    *c = (saved_case){.of = v,
                      .seconds = json_real(v, "median_s"),
                      .spread = json_real(v, "spread"),
                      .ceiling = json_text(ceiling, "name"),
                      .ceiling_value = json_real(ceiling, "value"),
                      .ceiling_spread = json_real(ceiling, "spread"),
                      .share = json_real(v, "share")};
    double reps = json_real(v, "reps"), median = json_real(ceiling, "median");
    c->steady = median > 0 ? c->share * c->ceiling_value / median : c->share;
    if (isnan(c->seconds)) c->seconds = 1e-9 * json_real(v, "ns_median");
    if (isnan(reps)) reps = json_real(v, "batches");
    c->reps = reps > 0 && reps < 1e15 ? (int64_t)reps : 0;
    if (json_text(v, "case")[0] == '\0') return json_wrong(v, error, "the result has no case");
    if (!(c->seconds > 0) || !isfinite(c->seconds))
        return json_wrong(v, error, "the result has no median_s and no ns_median above 0");
    if (!(c->spread >= 0) || !isfinite(c->spread))
        return json_wrong(v, error, "the result has no spread");
    return true;
}

/* Saved texts go to a terminal: control characters, which a file may bring as \\u001b, become question marks. */
static void tame(json_value *v)
{
    for (char *c = v->kind == JSON_STRING ? v->text : NULL; c && *c; c++) {
        bool c1 = (unsigned char)c[0] == 0xc2 && (unsigned char)c[1] < 0xa0;
        if ((unsigned char)*c < 0x20 || *c == 0x7f || c1) *c = '?';
        if (c1) *++c = '?';
    }
    for (json_value *m = v->first; m; m = m->next) tame(m);
}

/* What would take all pairs of cases to find out again. */
static void survey(saved_run *r)
{
    char first[64], value[64];
    for (int f = 0; f < SAVED_NUM_FIELDS; f++) {
        const saved_field *field = &saved_fields[f];
        saved_value(&r->cases[0], field, first, sizeof first);
        for (int i = 0; i < r->num_cases; i++) {
            saved_case *c = &r->cases[i];
            uint64_t *hash = saved_is_place(r, field) ? &c->place : &c->work;
            saved_value(c, field, value, sizeof value);
            if (strcmp(first, value) != 0) r->varies[f] = true;
            for (const char *v = value; *v; v++)
                *hash = (*hash ^ (unsigned char)*v) * 0x100000001b3;
            *hash = (*hash ^ 0x100) * 0x100000001b3; /* the end of a value */
        }
    }
}

bool saved_from_tree(saved_run *r, json_value *tree, json_error *error)
{
    tame(tree);
    const json_value *results = json_member(tree, "results");
    *r = (saved_run){.tree = tree,
                     .version = json_text(tree, "version"),
                     .cpu = json_text(tree, "cpu"),
                     .device = json_text(tree, "device"),
                     .topic = json_text(tree, "topic")};
    if (r->topic[0] == '\0') r->topic = "attention"; /* which had no name before 0.2 */
    bool ok = results && results->kind == JSON_ARRAY && results->first;
    if (!ok) json_wrong(tree, error, "not a run saved by 'folio bench -o json': it has no results");
    int64_t count = 0;
    for (const json_value *v = ok ? results->first : NULL; v; v = v->next) count++;
    r->cases = bench_alloc(count, sizeof *r->cases);
    for (const json_value *v = ok ? results->first : NULL; v && ok; v = v->next)
        ok = read_case(v, &r->cases[r->num_cases++], error);
    if (ok) survey(r);
    else saved_free(r);
    return ok;
}

/* The text of a run that was killed, up to its last complete case, with the end that it lacks. False: it has none. */
static bool end_at_last_case(char **text)
{
    static const char end_of_case[] = "\n    }", end[] = "]}";
    char *last = NULL;
    for (char *at = *text; (at = strstr(at, end_of_case)); at++) last = at;
    if (last == NULL) return false;
    size_t length = (size_t)(last - *text) + strlen(end_of_case);
    char *whole = bench_alloc((int64_t)(length + sizeof end), 1);
    memcpy(whole, *text, length);
    memcpy(whole + length, end, sizeof end);
    free(*text);
    *text = whole;
    return true;
}

static json_value *read_tree(const char *path, json_error *error)
{
    json_error again;
    char *text = json_read_text(path, error);
    json_value *tree = text ? json_read(text, 1, error) : NULL;
    if (text && tree == NULL && end_at_last_case(&text)) {
        tree = json_read(text, 1, &again);
        if (tree)
            fprintf(stderr, "folio bench: %s: the run was killed; its cases are read\n", path);
    }
    free(text);
    return tree;
}

bool saved_read(saved_run *r, const char *path, const char *topic)
{
    json_error error;
    json_value *tree = read_tree(path, &error);
    if (tree == NULL || !saved_from_tree(r, tree, &error)) {
        fprintf(stderr, "folio bench: %s: %s\n", path, error.text);
        return false;
    }
    if (strcmp(r->topic, topic) == 0) return true;
    fprintf(stderr, "folio bench: %s is a run of the topic %s, not of %s; compare like with like\n",
            path, r->topic, topic);
    saved_free(r);
    return false;
}

void saved_free(saved_run *r)
{
    json_free(r->tree);
    free(r->cases);
    *r = (saved_run){.tree = NULL};
}
