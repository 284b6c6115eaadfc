/*
 * bench.h: what the topics of `folio bench` share. A case is timed in short batches; the cases of
 * one set alternate, so that noise of the machine hits all of them alike; a report has median,
 * minimum and spread of each, as Markdown, CSV or JSON.
 */
#ifndef FOLIO_BENCH_H
#define FOLIO_BENCH_H

#include "bench/bench_after.h"

#include <folio/folio.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bench_case {
    const char *name;
    int64_t blocks, threads, length, sequences;  /* 0: does not apply                         */
    const char *per;                             /* one operation: "pair", "block", "token"   */
    int64_t operations;                          /* of a batch                                */
    int64_t bytes;                               /* moved by an operation; 0: none            */
    bool (*batch)(void *state, double *seconds); /* runs one; false: failed, and said why    */
    void *state;
} bench_case;

typedef struct bench_result {
    bench_case what;
    double ns_median, ns_min; /* of an operation                       */
    double spread;            /* interquartile range / median          */
    int64_t batches;
} bench_result;

/** A ceiling or a line of the summary. NAN: it was not measured. */
typedef struct bench_number {
    const char *key;
    double value;
    char text[120]; /* for people */
} bench_number;

enum { BENCH_MAX_RESULTS = 64, BENCH_MAX_NUMBERS = 16, BENCH_MAX_LIST = 8 };

typedef struct bench_report {
    const char *topic, *filter;
    double seconds; /* of each case, with what is prepared between its batches */
    int64_t seed, block_size;
    int32_t processors;
    double started;
    int64_t done, total; /* sets, for progress */
    bench_result results[BENCH_MAX_RESULTS];
    int num_results;
    bench_number ceilings[BENCH_MAX_NUMBERS], summary[BENCH_MAX_NUMBERS];
    int num_ceilings, num_summary;
    bench_after after;
} bench_report;

/* ---- Measuring */

/* Time the cases of a set in rounds and add their results. False: a batch failed, or the run was interrupted. */
bool bench_measure(bench_report *r, const bench_case *cases, int count);

typedef struct bench_stats {
    double median, min, spread; /* spread: interquartile range / median */
} bench_stats;

/* Of count >= 1 samples, which are sorted by it. */
bench_stats bench_stats_of(double *samples, int64_t count);

/* The result of a case with the largest median (or the smallest); NULL: it was not measured. */
const bench_result *bench_slowest(const bench_report *r, const char *name);
const bench_result *bench_fastest(const bench_report *r, const char *name);

/* Medians of two results as a ratio; NAN where one is NULL. */
double bench_ratio(const bench_result *a, const bench_result *b);

void bench_add_ceiling(bench_report *r, const char *key, double value, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void bench_add_summary(bench_report *r, const char *key, double value, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

extern const bench_format bench_report_format; /* of a bench_report */

const char *bench_cpu_name(void);
/* "12.5 ns", "3.1 ms"; returns text. */
const char *bench_short_time(char *text, size_t size, double ns);

/* ---- Failing */

/* True for FOLIO_OK; else a sentence on stderr. Of `call`, what stands before a bracket is named. */
bool bench_ok(folio_status status, const char *call);

/* Memory that is there, or the program ends. Aligned to 64 bytes, all of it zero. */
void *bench_alloc(int64_t count, size_t size);

/* ---- Options */

/* "1k,10k,1M" to numbers in [min, max]; false: a sentence on stderr. */
bool bench_parse_list(const char *command, const char *option, const char *text, int64_t min,
                      int64_t max, int64_t *values, int *count);
bool bench_parse_seconds(const char *command, const char *option, const char *text, double *value);

/* ---- Topics. argv[0] is "bench pool", or of attention "bench". */

int bench_attention_main(int argc, char **argv);
int bench_overhead_main(int argc, char **argv);
int bench_pool_main(int argc, char **argv);

#endif
