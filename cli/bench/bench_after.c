/* bench_after.c: see bench_after.h. */
#include "bench/bench_after.h"

#include "bench/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool parse_limit(bench_after *a, const char *command)
{
    char *end = NULL;
    a->limit = (double)NAN;
    if (a->fail_if_slower == NULL) return true;
    double percent = strtod(a->fail_if_slower, &end);
    if (end != a->fail_if_slower && *end == '\0' && percent >= 0 && percent <= 1e6)
        return a->limit = percent / 100, true;
    args_complain(command, "--fail-if-slower takes percent, 0 or more, not '%s'",
                  a->fail_if_slower);
    return false;
}

int bench_after_check(const bench_after *a, int argc, char **argv, const arg_option *options)
{
    if (a->from == NULL) return EXIT_OK;
    const char *other =
        args_first_besides(argc, argv, options, "from|compare|fail-if-slower|output");
    if (other == NULL) return EXIT_OK;
    return args_complain(argv[0], "--from measures nothing, so --%s has no effect: leave it out",
                         other);
}

int bench_after_open(bench_after *a, const char *command, const char *topic, const char *output)
{
    if (!parse_limit(a, command)) return EXIT_USAGE;
    if (a->fail_if_slower && !a->compare)
        return args_complain(command, "--fail-if-slower needs --compare");
    if (a->from && !a->compare)
        return args_complain(command, "--from needs something to do with that run: --compare");
    if (a->compare && strcmp(output, "csv") == 0)
        return args_complain(command, "a comparison has no CSV; -o md or -o json");
    bool ok = (!a->compare || saved_read(&a->before, a->compare, topic)) &&
              (!a->from || saved_read(&a->now, a->from, topic));
    if (!ok) bench_after_close(a);
    return ok ? EXIT_OK : EXIT_FAILED;
}

void bench_after_close(bench_after *a)
{
    saved_free(&a->before);
    saved_free(&a->now);
}

/* The run as its own JSON tells it. */
static void read_back(bench_after *a, bench_write *write, const void *run)
{
    char *text = NULL;
    size_t size = 0;
    json_error error = {.text = ""};
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) abort();
    write(run, out, "json", NULL);
    if (fclose(out) != 0) abort();
    json_value *tree = json_read(text, &error);
    free(text);
    if (tree == NULL || !saved_from_tree(&a->now, tree, &error)) {
        fprintf(stderr, "folio bench: its own JSON cannot be read: %s\n", error.text);
        exit(EXIT_FAILED);
    }
}

/* How many cases are slower than noise and the limit allow; each is named. */
static int count_too_slow(const bench_after *a, const comparison *c)
{
    int count = 0;
    for (int i = 0; i < c->num_pairs; i++) {
        const compared *p = &c->pairs[i];
        if (p->is != SLOWER || !(p->time.by > a->limit)) continue;
        fprintf(stderr, "folio bench: --fail-if-slower %s: %s is %.1f %% slower\n",
                a->fail_if_slower, json_text(p->now->of, "case"), 100 * p->time.by);
        count++;
    }
    return count;
}

static void write_from(const void *run, FILE *out, const char *format, const comparison *with)
{
    const bench_after *a = run;
    json j = {.out = out};
    if (strcmp(format, "json") != 0) return;
    json_object(&j, NULL);
    json_string(&j, "version", a->now.version);
    json_string(&j, "topic", a->now.topic);
    if (with) comparison_write(&j, with);
    json_close(&j);
}

int bench_after_run(bench_after *a, bench_write *write, const void *run, const char *output)
{
    comparison c = {.path = NULL};
    int status = EXIT_OK;
    bool is_json = strcmp(output, "json") == 0;
    if (a->now.tree == NULL && a->compare) read_back(a, write, run);
    if (a->compare) compare_runs(&c, a->compare, &a->before, &a->now);
    write(run, stdout, output, a->compare ? &c : NULL);
    if (a->compare && !is_json) {
        if (!a->from) printf("\n");
        comparison_print(&c);
    }
    if (a->compare && count_too_slow(a, &c) > 0) status = EXIT_FAILED;
    comparison_free(&c);
    bench_after_close(a);
    return status;
}

int bench_after_from(bench_after *a, const char *output)
{
    return bench_after_run(a, write_from, a, output);
}
