/*
 * bench_after.h: what follows a run of `folio bench`, for all topics: its report, a comparison with a saved run
 * (--compare); or the same of a run that was saved too (--from).
 */
#ifndef FOLIO_BENCH_AFTER_H
#define FOLIO_BENCH_AFTER_H

#include "base/args.h"
#include "bench/bench_compare.h"

#include <stdio.h>

typedef struct bench_after {
    const char *compare, *from, *fail_if_slower;
    double limit; /* of fail_if_slower, a share; NAN: none */
    saved_run before, now;
} bench_after;

/* Rows of a topic's table of options. */
#define BENCH_AFTER_OPTIONS(after)                                                                 \
    {.name = "compare", .kind = ARG_TEXT, .value = &(after)->compare},                             \
        {.name = "from", .kind = ARG_TEXT, .value = &(after)->from},                               \
    {                                                                                              \
        .name = "fail-if-slower", .kind = ARG_TEXT, .value = &(after)->fail_if_slower              \
    }

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
int bench_after_open(bench_after *a, const char *command, const char *topic, const char *output);

/* A run to a stream: "md" or "csv" to stdout, "json" with a comparison (NULL: none). */
typedef void bench_write(const void *run, FILE *out, const char *format, const comparison *with);

/* The run in its format, and what was asked for after it. Returns an exit status; frees what open read. */
int bench_after_run(bench_after *a, bench_write *write, const void *run, const char *output);
/* Where --from says that nothing runs. */
int bench_after_from(bench_after *a, const char *output);
void bench_after_close(bench_after *a);

#endif
