/*
 * check.c: `folio check`: walks the list of cases on every backend and level, counts, prints. A
 * failure is one sentence and the command that repeats it.
 */
#include "check/check.h"

#include "base/args.h"
#include "base/commands.h"
#include "base/json.h"
#include "base/levels.h"
#include "base/term.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: folio check [OPTION]...\n\n"
    "Tests every kernel and every row of the feature table on every available backend, at every\n"
    "instruction-set level of this machine. Backends are compared with the reference in double\n"
    "precision, within 2 max|formula - ref| + 1 ulp (formula: a two-pass softmax in f32). The\n"
    "reference is compared with the same formula in double precision, within 1e-9. Blocks are shuffled,\n"
    "unwritten slots hold NaN, and guards around outputs are checked. A failure prints the command that\n"
    "repeats that case.\n\n"
    "options\n"
    "      --full           more cases of everything (several minutes)\n"
    "      --backend NAME   only this backend\n"
    "      --level NAME     only this instruction-set level; overrides FOLIO_CPU\n"
    "      --threads N      threads of the backend; default: one per processor\n"
    "      --seed N         seed of the random cases; default 1\n"
    "      --filter TEXT    only features whose name contains TEXT\n"
    "      --one-in N       one case in N, drawn by the seed, at least one of each series: for emulated\n"
    "                       machines and builds with sanitizers\n"
    "      --share K/N      the K-th of N equal shares of the cases; N processes together run all\n"
    "      --case NAME      only this case, FEATURE.SERIES/NUMBER, as printed by a failure\n"
    "      --lineage        instead: random call sequences through vLLM 0.6's backends (folio_vllm06.h),\n"
    "                       with and without compat, compared with the same calls on the reference,\n"
    "                       within 2^-18 max|ref| + 1 ulp\n"
    "      --list           list the features with their numbers of cases; run nothing\n"
    "  -o, --output FORMAT  text (default) or json\n"
    "  -h, --help           this text\n\n"
    "examples\n"
    "  folio check\n"
    "  folio check --full --seed 7\n"
    "  folio check --backend cpu --filter window\n"
    "  folio check --lineage\n"
    "  folio check -o json > check.json\n\n"
    "The JSON is one object: {\"version\", \"seed\", \"passed\", \"failed\", \"skipped\", \"cases\": [{\"backend\",\n"
    "\"level\", \"feature\", \"passed\", \"failed\", \"skipped\", \"reason\", \"max_error\", \"budget\"}]}, one entry\n"
    "per feature; max_error and budget belong to the case that came closest to its budget. \"full\",\n"
    "\"one_in\" and \"seconds\" say how it was run.\n\n"
    "environment\n"
    "  FOLIO_CPU  the highest level of the cpu backend that is run; default: all this machine has\n\n"
    "exit status\n"
    "  0  all passed    1  a case failed, or nothing ran    2  invalid command line\n";

typedef struct options {
    bool full, list, lineage;
    const char *backend, *level, *filter, *one_case, *share, *output;
    int64_t threads, seed, one_in;
} options;

/* One line of the report. */
typedef struct row {
    const char *backend, *level, *feature;
    int64_t passed, failed, skipped;
    char reason[400];
    double max_error, budget;
} row;

typedef struct report {
    options opt;
    const check_series *series; /* what is run: check_all_series, or those of --lineage */
    int num_series;
    char case_feature[128]; /* --case, taken apart */
    const char *case_series;
    int64_t case_index;
    int share, num_shares; /* --share, taken apart; 1 of 1 */
    int64_t num_drawn;     /* cases so far, of all shares */
    row *rows;
    int64_t num_rows;
    int64_t passed, failed, skipped;
    int64_t done, total; /* for progress */
    double started;
    bool json;
} report;

static row *add_row(report *r, const char *backend, const char *level, const char *feature)
{
    row *grown = realloc(r->rows, (size_t)(r->num_rows + 1) * sizeof *grown);
    if (grown == NULL) abort();
    r->rows = grown;
    r->rows[r->num_rows] = (row){.backend = backend, .level = level, .feature = feature};
    return &r->rows[r->num_rows++];
}

static bool is_selected(const report *r, const char *feature)
{
    if (r->opt.one_case) return strcmp(feature, r->case_feature) == 0;
    return r->opt.filter == NULL || strstr(feature, r->opt.filter) != NULL;
}

/* ---- Running */

static void print_failure(const report *r, const check_env *env, const check_series *series,
                          int64_t index, const check_outcome *out)
{
    FILE *to = r->json ? stderr : stdout;
    term_progress_end();
    fprintf(to, "FAILED %s %s %s.%s/%lld: %s\n", env->info.name, env->level, series->feature,
            series->name, (long long)index, out->message);
    if (out->what[0]) fprintf(to, "  case: %s\n", out->what);
    fprintf(
        to,
        "  again: folio check%s --backend %s --level %s --threads %d --seed %llu --case %s.%s/%lld\n",
        r->opt.lineage ? " --lineage" : "", env->info.name, env->level, (int)env->threads,
        (unsigned long long)env->seed, series->feature, series->name, (long long)index);
}

/* The tightest case is the one that used most of its budget. */
static void note_error(row *to, double error, double budget)
{
    if (budget <= 0) return;
    if (to->budget <= 0 || error / budget > to->max_error / to->budget) {
        to->max_error = error;
        to->budget = budget;
    }
}

/* Of each N cases in a row one, drawn anew: cases N apart may be alike. Of fewer than N one as well. */
static bool is_drawn(const report *r, int64_t index, int64_t count)
{
    int64_t n = r->opt.one_in < count ? r->opt.one_in : count;
    return index % n == kit_random_int((uint64_t)r->opt.seed, KIT_USER, index / n, 0, n - 1);
}

static int64_t count_drawn(const report *r, const check_series *series)
{
    int64_t drawn = 0, count = r->opt.full ? series->full : series->quick;
    for (int64_t i = 0; i < count; i++) drawn += is_drawn(r, i, count);
    return drawn;
}

static void run_series(report *r, const check_env *env, const check_series *series, row *to)
{
    int64_t count = r->opt.full ? series->full : series->quick, first = 0;
    if (r->opt.one_case) {
        if (strcmp(series->name, r->case_series) != 0) return;
        first = r->case_index;
        count = first + 1;
    }
    for (int64_t i = first; i < count; i++) {
        check_outcome out;
        if (!r->opt.one_case && !is_drawn(r, i, count)) continue;
        if (r->num_drawn++ % r->num_shares != r->share - 1) continue;
        term_progress(r->started, r->done, r->total, series->feature);
        check_run_case(env, series, i, &out);
        r->done++;
        to->passed += out.ok;
        to->failed += !out.ok;
        if (out.ok) {
            note_error(to, out.error, out.budget);
            continue;
        }
        if (to->failed == 1) snprintf(to->reason, sizeof to->reason, "%s", out.message);
        if (to->failed <= 3) print_failure(r, env, series, i, &out);
    }
}

static int64_t count_cases(const report *r, const char *feature)
{
    int64_t n = 0;
    for (int i = 0; i < r->num_series; i++)
        if (strcmp(r->series[i].feature, feature) == 0) n += count_drawn(r, &r->series[i]);
    return n;
}

/* A row of the table (f), or one of check's own (f NULL). */
static void run_feature(report *r, const check_env *env, const char *feature,
                        const folio_feature *f)
{
    if (!is_selected(r, feature)) return;
    row to = {.backend = env->info.name, .level = env->level, .feature = feature};
    bool supported = f == NULL || f->supported;
    for (int i = 0; supported && i < r->num_series; i++)
        if (strcmp(r->series[i].feature, feature) == 0) run_series(r, env, &r->series[i], &to);
    if (!supported) {
        to.skipped = 1;
        snprintf(to.reason, sizeof to.reason, "%s", f->reason);
    }
    if (to.passed + to.failed + to.skipped == 0 && r->num_shares > 1) return;
    if (to.passed + to.failed + to.skipped == 0) {
        to.failed = 1;
        snprintf(to.reason, sizeof to.reason, "no case");
    }
    *add_row(r, NULL, NULL, NULL) = to;
}

/* check's own rows follow the feature table. */
static bool is_feature(const folio_backend_info *info, const char *name)
{
    for (int32_t i = 0; i < info->num_features; i++)
        if (strcmp(info->features[i].name, name) == 0) return true;
    return false;
}

static void walk(report *r, const check_env *env)
{
    const char *last = "";
    for (int32_t i = 0; i < env->info.num_features && !r->opt.lineage; i++)
        run_feature(r, env, env->info.features[i].name, &env->info.features[i]);
    for (int i = 0; i < r->num_series; i++) {
        const char *feature = r->series[i].feature;
        if (is_feature(&env->info, feature) || strcmp(feature, last) == 0) continue;
        run_feature(r, env, feature, NULL);
        last = feature;
    }
}

/* One level of one backend. False: this machine has it not. */
static bool run_level(report *r, const folio_backend_info *info, const char *level)
{
    check_env env = {.info = *info, .level = level, .seed = (uint64_t)r->opt.seed};
    env.ctx = kit_context(info->name, level, (int32_t)r->opt.threads);
    folio_context_info opened = {.struct_size = sizeof opened};
    bool ok = env.ctx && folio_context_get_info(env.ctx, &opened) == FOLIO_OK &&
              strcmp(opened.level, level) == 0;
    if (ok) {
        env.threads = opened.num_threads;
        env.reference = kit_context("reference", NULL, 1);
        if (env.reference) walk(r, &env);
        else snprintf(add_row(r, info->name, level, "all")->reason, 400, "%s", kit_error());
    }
    folio_context_destroy(env.reference);
    folio_context_destroy(env.ctx);
    return ok;
}

/* The reason is both together. */
static void skip_level(report *r, const char *backend, const char *level, const char *reason,
                       const char *word)
{
    row *to = add_row(r, backend, level, "all");
    to->skipped = 1;
    snprintf(to->reason, sizeof to->reason, "%s%s", reason, word);
}

static void run_backend(report *r, const folio_backend_info *info)
{
    const char *cap = r->opt.level ? NULL : levels_cap(info->name);
    bool above = false;
    if (!info->available) skip_level(r, info->name, "", info->reason, "");
    for (int32_t i = 0; info->available && i < info->num_levels; i++) {
        const char *level = info->levels[i];
        if (r->opt.level && strcmp(r->opt.level, level) != 0) continue;
        if (above) skip_level(r, info->name, level, "above FOLIO_CPU=", cap);
        else if (!run_level(r, info, level))
            skip_level(r, info->name, level, "this machine has no ", level);
        above = above || (cap != NULL && strcmp(cap, level) == 0);
    }
    if (r->opt.level && !levels_has(info->name, r->opt.level))
        skip_level(r, info->name, r->opt.level, "it has no level of this name", "");
}

/* ---- Reports */

static void print_json(const report *r)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_string(&j, "version", folio_version());
    json_integer(&j, "seed", r->opt.seed);
    json_integer(&j, "passed", r->passed);
    json_integer(&j, "failed", r->failed);
    json_integer(&j, "skipped", r->skipped);
    json_bool(&j, "full", r->opt.full);
    json_integer(&j, "one_in", r->opt.one_in);
    json_number(&j, "seconds", term_seconds() - r->started);
    json_array(&j, "cases");
    for (int64_t i = 0; i < r->num_rows; i++) {
        const row *c = &r->rows[i];
        json_object(&j, NULL);
        json_string(&j, "backend", c->backend);
        json_string(&j, "level", c->level);
        json_string(&j, "feature", c->feature);
        json_integer(&j, "passed", c->passed);
        json_integer(&j, "failed", c->failed);
        json_integer(&j, "skipped", c->skipped);
        json_string(&j, "reason", c->reason);
        json_number(&j, "max_error", c->max_error);
        json_number(&j, "budget", c->budget);
        json_close(&j);
    }
    json_close(&j);
    json_close(&j);
}

static void print_row(const row *c)
{
    term_colour colour = c->failed ? TERM_RED : c->passed ? TERM_GREEN : TERM_YELLOW;
    printf("  %s%-18s%s %7lld %7lld %8lld", term_start(colour), c->feature, term_end(),
           (long long)c->passed, (long long)c->failed, (long long)c->skipped);
    if (c->failed || c->skipped) printf("   %.60s\n", c->reason);
    else if (c->budget > 0) printf("   %.1e of %.1e\n", c->max_error, c->budget);
    else printf("   %s\n", "exact");
}

static void print_text(const report *r)
{
    const char *backend = NULL, *level = NULL;
    for (int64_t i = 0; i < r->num_rows; i++) {
        const row *c = &r->rows[i];
        if (c->backend != backend || c->level != level) {
            if (strcmp(c->feature, "all") == 0 && c->passed == 0) {
                printf("%s%s%s%s: skipped: %s\n", backend ? "\n" : "", c->backend,
                       *c->level ? " " : "", c->level, c->reason);
                continue;
            }
            printf("%s%s%s %s%s\n", backend ? "\n" : "", term_start(TERM_BOLD), c->backend,
                   c->level, term_end());
            printf("  %-18s %7s %7s %8s   %s\n", "feature", "passed", "failed", "skipped",
                   "error of budget, tightest case");
            backend = c->backend;
            level = c->level;
        }
        print_row(c);
    }
    printf("\n%s%lld passed, %lld failed, %lld skipped%s in %.1f s, seed %lld\n",
           term_start(r->failed ? TERM_RED : TERM_GREEN), (long long)r->passed,
           (long long)r->failed, (long long)r->skipped, term_end(), term_seconds() - r->started,
           (long long)r->opt.seed);
    if (r->opt.one_in > 1)
        printf("one case in %lld was run; another seed draws others\n", (long long)r->opt.one_in);
    if (r->num_shares > 1) printf("share %d of %d was run\n", r->share, r->num_shares);
    if (r->passed + r->failed > 0) return;
    if (r->skipped > 0) {
        printf("nothing ran: every backend was skipped\n");
        return;
    }
    printf("nothing ran%s%s%s\n", r->opt.filter ? ": no feature's name contains \"" : "",
           r->opt.filter ? r->opt.filter : "", r->opt.filter ? "\"; see folio check --list" : "");
}

static void print_list(const report *r)
{
    folio_backend_info info = {.struct_size = sizeof info};
    folio_backend_get_info("reference", &info);
    printf("%-18s %-10s %6s %6s\n", "feature", "series", "quick", "full");
    for (int32_t f = 0; f < info.num_features && !r->opt.lineage; f++)
        if (is_selected(r, info.features[f].name) && count_cases(r, info.features[f].name) == 0)
            printf("%-18s %-10s %6s %6s\n", info.features[f].name, "-", "-", "-");
    for (int i = 0; i < r->num_series; i++)
        if (is_selected(r, r->series[i].feature))
            printf("%-18s %-10s %6lld %6lld\n", r->series[i].feature, r->series[i].name,
                   (long long)r->series[i].quick, (long long)r->series[i].full);
}

/* ---- Command line */

/* FEATURE.SERIES/NUMBER */
static bool parse_case(report *r)
{
    const char *text = r->opt.one_case;
    snprintf(r->case_feature, sizeof r->case_feature, "%s", text);
    char *dot = strchr(r->case_feature, '.'), *slash = strrchr(r->case_feature, '/'), *end;
    if (dot == NULL || slash == NULL || slash < dot) return false;
    *dot = *slash = '\0';
    r->case_series = dot + 1;
    r->case_index = strtoll(slash + 1, &end, 10);
    if (slash[1] == '\0' || *end != '\0' || r->case_index < 0) return false;
    for (int i = 0; i < r->num_series; i++)
        if (strcmp(r->series[i].feature, r->case_feature) == 0 &&
            strcmp(r->series[i].name, r->case_series) == 0)
            return true;
    return false;
}

/* K/N */
static bool parse_share(report *r)
{
    char more;
    return sscanf(r->opt.share, "%4d/%4d%c", &r->share, &r->num_shares, &more) == 2 &&
           r->share >= 1 && r->share <= r->num_shares;
}

/* Wrong words of the command line; 0: none. */
static int check_words(report *r)
{
    char names[256];
    const options *o = &r->opt;
    if (o->backend && !backend_is_known("check", o->backend)) return EXIT_USAGE;
    if (o->level && !levels_has(o->backend, o->level))
        return args_complain("check", "--level takes one of %s, not '%s'",
                             levels_text(names, sizeof names, o->backend), o->level);
    if (o->one_case && !parse_case(r))
        return args_complain(
            "check",
            "'%s' names no case; 'folio check --list' shows features and series, a case is FEATURE.SERIES/NUMBER",
            o->one_case);
    if (o->share && !parse_share(r))
        return args_complain("check", "--share takes K/N with K from 1 to N, not '%s'", o->share);
    return EXIT_OK;
}

/* A backend's levels up to FOLIO_CPU, if that names one of them. */
static bool cap_is_known(const options *o)
{
    if (o->level || (o->backend && levels_cap(o->backend) == NULL)) return true;
    folio_context *ctx = kit_context(o->backend, NULL, 1);
    if (ctx == NULL) fprintf(stderr, "folio check: %s\n", kit_error());
    bool known = ctx != NULL;
    folio_context_destroy(ctx);
    return known;
}

static void run_all(report *r)
{
    int64_t cases = 0, walks = 0;
    for (int i = 0; i < r->num_series; i++)
        if (is_selected(r, r->series[i].feature)) cases += count_drawn(r, &r->series[i]);
    for (int pass = 0; pass < 2; pass++) /* count first, for the progress line */
        for (int32_t i = 0; i < folio_backend_count(); i++) {
            const char *name = folio_backend_name(i);
            folio_backend_info info = {.struct_size = sizeof info};
            if (r->opt.backend && strcmp(r->opt.backend, name) != 0) continue;
            if (folio_backend_get_info(name, &info) != FOLIO_OK) continue;
            if (pass == 0) walks += info.available ? (r->opt.level ? 1 : info.num_levels) : 0;
            else run_backend(r, &info);
            r->total = cases * walks / r->num_shares;
        }
    for (int64_t i = 0; i < r->num_rows; i++) {
        r->passed += r->rows[i].passed;
        r->failed += r->rows[i].failed;
        r->skipped += r->rows[i].skipped;
    }
    term_progress_end();
}

int check_main(int argc, char **argv)
{
    report r = {.opt = {.output = "text", .seed = 1, .one_in = 1}, .share = 1, .num_shares = 1};
    const arg_option table[] = {
        {.name = "full", .kind = ARG_FLAG, .value = &r.opt.full},
        {.name = "lineage", .kind = ARG_FLAG, .value = &r.opt.lineage},
        {.name = "list", .kind = ARG_FLAG, .value = &r.opt.list},
        {.name = "backend", .kind = ARG_TEXT, .value = &r.opt.backend},
        {.name = "level", .kind = ARG_TEXT, .value = &r.opt.level},
        {.name = "threads", .kind = ARG_NUMBER, .value = &r.opt.threads, .min = 1, .max = 256},
        {.name = "seed", .kind = ARG_NUMBER, .value = &r.opt.seed, .min = 0, .max = INT64_MAX},
        {.name = "one-in", .kind = ARG_NUMBER, .value = &r.opt.one_in, .min = 1, .max = 1000000},
        {.name = "share", .kind = ARG_TEXT, .value = &r.opt.share},
        {.name = "filter", .kind = ARG_TEXT, .value = &r.opt.filter},
        {.name = "case", .kind = ARG_TEXT, .value = &r.opt.one_case},
        ARG_OUTPUT(&r.opt.output, "text|json"),
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, table, help, &status)) return status;
    r.series = r.opt.lineage ? check_lineage_series : check_all_series;
    r.num_series = r.opt.lineage ? check_num_lineage_series : check_num_series;
    if (check_words(&r) != EXIT_OK) return EXIT_USAGE;
    r.json = strcmp(r.opt.output, "json") == 0;
    r.started = term_seconds();
    if (r.opt.list) {
        print_list(&r);
        return EXIT_OK;
    }
    if (!cap_is_known(&r.opt)) return EXIT_FAILED;
    run_all(&r);
    if (r.json) print_json(&r);
    else print_text(&r);
    free(r.rows);
    return r.failed > 0 || r.passed == 0 ? EXIT_FAILED : EXIT_OK;
}
