/*
 * bench_after.h: what `folio bench` does with results, for all topics: it writes each when it is there, so that a run
 * that is stopped leaves what it measured, and compares the run with a saved one (--compare), or two saved ones (--from).
 */
#ifndef FOLIO_BENCH_AFTER_H
#define FOLIO_BENCH_AFTER_H

#include "base/args.h"
#include "base/json.h"
#include "bench/bench_compare.h"

#include <stdbool.h>
#include <stdint.h>

/* How a topic writes its run. */
typedef struct bench_format {
    void (*head)(const void *run, json *j); /* members that are known before the first result */
    void (*result)(const void *run, json *j, int64_t i);
    void (*tail)(const void *run, json *j);  /* members that are known at the end */
    void (*csv)(const void *run, int64_t i); /* a row to stdout; -1: the heads */
    void (*markdown)(const void *run);       /* all of it, to stdout */
} bench_format;

typedef struct bench_after {
    const char *compare, *from, *fail_if_slower, *output; /* output: "md", "csv" or "json" */
    double limit; /* of fail_if_slower, a share; NAN: none */
    saved_run before, now;
    const bench_format *format;
    const void *run; /* what the format's functions are given */
    json j;
    bool begun;
    int64_t written; /* results */
} bench_after;

/* Rows of a topic's table of options. */
#define BENCH_AFTER_OPTIONS(after)                                                                 \
    {.name = "compare", .kind = ARG_TEXT, .value = &(after)->compare},                             \
        {.name = "from", .kind = ARG_TEXT, .value = &(after)->from},                               \
        {.name = "fail-if-slower", .kind = ARG_TEXT, .value = &(after)->fail_if_slower},           \
        ARG_OUTPUT(&(after)->output, "md|csv|json")

/* Their lines of help, where a topic needs no more words. */
#define BENCH_AFTER_HELP                                                                                \
    "      --compare FILE.json  compare with a run saved by -o json: faster, slower, or within noise\n" \
    "                         (half the sum of the two spreads, at least 2 %)\n"                        \
    "      --from FILE.json   compare that saved run; measure nothing\n"                                \
    "      --fail-if-slower PERCENT  exit with 1 if --compare finds a case that much slower\n"

/*
 * With --from nothing is measured: an option that says how to is refused. argv[0] is the command. Returns an exit
 * status.
 */
int bench_after_check(const bench_after *a, int argc, char **argv, const arg_option *options);

/* Before the run: files are read, so that one that is wrong costs no run. Returns an exit status. */
int bench_after_open(bench_after *a, const char *command, const char *topic);

/* Writes as JSON or CSV what is new of so many results. Markdown waits for the end: its columns are aligned. */
void bench_after_results(bench_after *a, int64_t count);

/* The rest of a run of so many results, and what was asked for after it. Returns an exit status; frees what open read. */
int bench_after_end(bench_after *a, int64_t count);
/* Where --from says that nothing runs. */
int bench_after_from(bench_after *a);
void bench_after_close(bench_after *a);

#endif
