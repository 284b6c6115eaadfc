/* bench_after.c: see bench_after.h. */
#include "bench/bench_after.h"

#include "base/interrupt.h"
#include "base/term.h"
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

int bench_after_open(bench_after *a, const char *command, const char *topic)
{
    if (!parse_limit(a, command)) return EXIT_USAGE;
    if (a->fail_if_slower && !a->compare)
        return args_complain(command, "--fail-if-slower needs --compare");
    if (a->from && !a->compare)
        return args_complain(command, "--from needs something to do with that run: --compare");
    if (a->compare && strcmp(a->output, "csv") == 0)
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

/* ---- Writing */

static void write_head(const bench_after *a, json *j)
{
    json_object(j, NULL);
    a->format->head(a->run, j);
    json_array(j, "results");
}

static void write_tail(const bench_after *a, json *j, const comparison *with)
{
    json_close(j);
    a->format->tail(a->run, j);
    json_bool(j, "interrupted", interrupt_signal() != 0);
    if (with) comparison_write(j, with);
    json_close(j);
}

void bench_after_results(bench_after *a, int64_t count)
{
    bool is_csv = strcmp(a->output, "csv") == 0;
    if (strcmp(a->output, "md") == 0) return;
    term_progress_end();
    a->j.out = stdout;
    if (!a->begun && is_csv) a->format->csv(a->run, -1);
    else if (!a->begun) write_head(a, &a->j);
    a->begun = true;
    for (; a->written < count; a->written++)
        if (is_csv) a->format->csv(a->run, a->written);
        else a->format->result(a->run, &a->j, a->written);
    fflush(stdout);
}

static void write_end(bench_after *a, int64_t count, const comparison *with)
{
    bench_after_results(a, count);
    if (strcmp(a->output, "md") == 0) {
        if (interrupt_signal()) printf("interrupted: the cases so far\n\n");
        a->format->markdown(a->run);
    }
    if (strcmp(a->output, "json") == 0) write_tail(a, &a->j, with);
}

/* The run as its own JSON tells it. */
static void read_back(bench_after *a, int64_t count)
{
    char *text = NULL;
    size_t size = 0;
    json_error error = {.text = ""};
    json j = {.out = open_memstream(&text, &size)};
    if (j.out == NULL) abort();
    write_head(a, &j);
    for (int64_t i = 0; i < count; i++) a->format->result(a->run, &j, i);
    write_tail(a, &j, NULL);
    if (fclose(j.out) != 0) abort();
    json_value *tree = json_read(text, 1, &error);
    free(text);
    if (tree == NULL || !saved_from_tree(&a->now, tree, &error)) {
        fprintf(stderr, "folio bench: its own JSON cannot be read: %s\n", error.text);
        exit(EXIT_FAILED);
    }
}

/* ---- Comparing */

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

/* Compares a->before with a->now. */
static int report_comparison(bench_after *a, const comparison *c)
{
    if (strcmp(a->output, "json") != 0) {
        if (!a->from) printf("\n");
        comparison_print(c);
    }
    return count_too_slow(a, c) > 0 ? EXIT_FAILED : EXIT_OK;
}

int bench_after_end(bench_after *a, int64_t count)
{
    comparison c = {.path = NULL};
    int status = EXIT_OK;
    term_progress_end();
    if (a->compare) {
        read_back(a, count);
        compare_runs(&c, a->compare, &a->before, &a->now);
    }
    write_end(a, count, a->compare ? &c : NULL);
    if (a->compare) status = report_comparison(a, &c);
    comparison_free(&c);
    bench_after_close(a);
    return interrupt_signal() ? 128 + interrupt_signal() : status;
}

int bench_after_from(bench_after *a)
{
    comparison c = {.path = NULL};
    json j = {.out = stdout};
    compare_runs(&c, a->compare, &a->before, &a->now);
    if (strcmp(a->output, "json") == 0) {
        json_object(&j, NULL);
        json_string(&j, "version", a->now.version);
        json_string(&j, "topic", a->now.topic);
        comparison_write(&j, &c);
        json_close(&j);
    }
    int status = report_comparison(a, &c);
    comparison_free(&c);
    bench_after_close(a);
    return status;
}
