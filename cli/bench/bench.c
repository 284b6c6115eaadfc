/* bench.c: `folio bench`: the topics, of which attention has no name, and what they share. */
#include "bench/bench.h"

#include "base/args.h"
#include "base/commands.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/table.h"
#include "base/term.h"
#include "bench/bench_bound.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A median of fewer is no median; one batch before them warms caches and is not counted. */
enum { MIN_BATCHES = 5 };

const subcommand bench_topics[] = {
    {"overhead", bench_overhead_main, "overhead of a call", NULL},
    {"pool", bench_pool_main, "KV memory: block pool, prefix cache, sequences, tiers", NULL},
    {NULL, NULL, NULL, NULL},
};

/* ---- Measuring */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The sample at a fraction of the sorted ones, between two neighbours where it falls there. */
static double quantile(const double *sorted, int64_t count, double fraction)
{
    double at = fraction * (double)(count - 1);
    int64_t low = (int64_t)at, high = low + 1 < count ? low + 1 : low;
    return sorted[low] + (at - (double)low) * (sorted[high] - sorted[low]);
}

bench_stats bench_stats_of(double *samples, int64_t count)
{
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    double median = quantile(samples, count, 0.5);
    double range = quantile(samples, count, 0.75) - quantile(samples, count, 0.25);
    return (bench_stats){
        .median = median, .min = samples[0], .spread = median > 0 ? range / median : 0};
}

static void add_result(bench_report *r, const bench_case *c, double *samples, int64_t count)
{
    if (r->num_results == BENCH_MAX_RESULTS) return;
    bench_stats stats = bench_stats_of(samples, count);
    r->results[r->num_results++] = (bench_result){.what = *c,
                                                  .ns_median = stats.median,
                                                  .ns_min = stats.min,
                                                  .spread = stats.spread,
                                                  .batches = count};
}

/* Room for one more round: samples are [count cases][capacity]. */
static double *grow(double *samples, int count, int64_t used, int64_t *capacity)
{
    int64_t larger = *capacity ? 2 * *capacity : 256;
    double *to = bench_alloc(count * larger, sizeof *to);
    for (int i = 0; i < count && used > 0; i++)
        memcpy(to + i * larger, samples + i * *capacity, (size_t)used * sizeof *to);
    free(samples);
    *capacity = larger;
    return to;
}

bool bench_measure(bench_report *r, const bench_case *cases, int count)
{
    double *samples = NULL, start = term_seconds(), end = start + r->seconds * count;
    double seconds = 0;
    int64_t capacity = 0, rounds = 0;
    bool ok = true;
    term_step("folio bench", r->done + 1, r->total, cases[0].name);
    for (int i = 0; i < count && ok; i++) ok = cases[i].batch(cases[i].state, &seconds);
    while (ok && (rounds < MIN_BATCHES || term_seconds() < end)) {
        if (interrupt_signal()) ok = false;
        term_progress(r->started, r->done, r->total, cases[0].name);
        if (rounds == capacity) samples = grow(samples, count, rounds, &capacity);
        for (int i = 0; i < count && ok; i++) {
            ok = cases[i].batch(cases[i].state, &seconds);
            samples[i * capacity + rounds] = seconds * 1e9 / (double)cases[i].operations;
        }
        rounds++;
    }
    for (int i = 0; i < count && ok; i++) add_result(r, &cases[i], samples + i * capacity, rounds);
    free(samples);
    bench_after_results(&r->after, r->num_results);
    return ok;
}

static const bench_result *extreme(const bench_report *r, const char *name, double sign)
{
    const bench_result *best = NULL;
    for (int i = 0; i < r->num_results; i++) {
        const bench_result *c = &r->results[i];
        if (strcmp(c->what.name, name) != 0) continue;
        if (best == NULL || sign * c->ns_median > sign * best->ns_median) best = c;
    }
    return best;
}

const bench_result *bench_slowest(const bench_report *r, const char *name)
{
    return extreme(r, name, 1);
}

const bench_result *bench_fastest(const bench_report *r, const char *name)
{
    return extreme(r, name, -1);
}

double bench_ratio(const bench_result *a, const bench_result *b)
{
    return a && b ? a->ns_median / b->ns_median : (double)NAN;
}

static void add_number(bench_number *numbers, int *count, const char *key, double value,
                       const char *format, va_list args)
{
    if (*count == BENCH_MAX_NUMBERS) return;
    bench_number *to = &numbers[(*count)++];
    to->key = key;
    to->value = value;
    vsnprintf(to->text, sizeof to->text, format, args);
}

void bench_add_ceiling(bench_report *r, const char *key, double value, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add_number(r->ceilings, &r->num_ceilings, key, value, format, args);
    va_end(args);
}

void bench_add_summary(bench_report *r, const char *key, double value, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add_number(r->summary, &r->num_summary, key, value, format, args);
    va_end(args);
}

/* ---- Reports */

const char *bench_cpu_name(void)
{
    folio_backend_info info = {.struct_size = sizeof info};
    return folio_backend_get_info("cpu", &info) == FOLIO_OK ? info.device : "";
}

/* Bytes per nanosecond are GB per second; 0 where nothing is moved. */
static double gbps(const bench_result *c) { return (double)c->what.bytes / c->ns_median; }

/* Thousands as k, millions as M, where nothing is lost by it. */
static const char *short_count(char *text, size_t size, int64_t n)
{
    if (n >= 1000000 && n % 100000 == 0) snprintf(text, size, "%.10gM", (double)n / 1e6);
    else if (n >= 10000 && n % 100 == 0) snprintf(text, size, "%.10gk", (double)n / 1e3);
    else snprintf(text, size, "%lld", (long long)n);
    return text;
}

const char *bench_short_time(char *text, size_t size, double ns)
{
    if (ns < 1e3) snprintf(text, size, "%.1f ns", ns);
    else if (ns < 1e6) snprintf(text, size, "%.1f us", ns / 1e3);
    else if (ns < 1e9) snprintf(text, size, "%.1f ms", ns / 1e6);
    else snprintf(text, size, "%.2f s", ns / 1e9);
    return text;
}

/* What else tells this case from its neighbours, in one column. */
static const char *variant(char *text, size_t size, const bench_case *c)
{
    if (c->threads)
        snprintf(text, size, "%lld thread%s", (long long)c->threads, c->threads > 1 ? "s" : "");
    else if (c->sequences)
        snprintf(text, size, "%lld x %lld", (long long)c->sequences, (long long)c->length);
    else if (c->length) snprintf(text, size, "%lld long", (long long)c->length);
    else snprintf(text, size, "-");
    return text;
}

static void add_rate(table *t, const bench_result *c)
{
    if (c->what.bytes) table_cell(t, "%.2f GB/s", gbps(c));
    else if (c->ns_median < 1e4) table_cell(t, "%.2f M/s", 1e3 / c->ns_median);
    else table_cell(t, "%.2f k/s", 1e6 / c->ns_median);
}

static void print_table(const bench_report *r)
{
    static const struct {
        char align;
        const char *name;
    } heads[] = {{'l', "case"}, {'r', "blocks"}, {'r', "with"}, {'r', "median"},
                 {'r', "min"},  {'r', "spread"}, {'l', "per"},  {'r', "rate"}};
    table t = {.columns = 0};
    char text[32];
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        table_head(&t, heads[i].align, heads[i].name);
    for (int i = 0; i < r->num_results; i++) {
        const bench_result *of = &r->results[i];
        table_cell(&t, "%s", of->what.name);
        table_cell(&t, "%s",
                   of->what.blocks ? short_count(text, sizeof text, of->what.blocks) : "-");
        table_cell(&t, "%s", variant(text, sizeof text, &of->what));
        table_cell(&t, "%s", bench_short_time(text, sizeof text, of->ns_median));
        table_cell(&t, "%s", bench_short_time(text, sizeof text, of->ns_min));
        table_cell(&t, "%.*f %%", of->spread < 0.9995, 100 * of->spread);
        table_cell(&t, "%s", of->what.per);
        add_rate(&t, of);
    }
    table_print(&t);
}

static void print_markdown(const void *run)
{
    const bench_report *r = run;
    char text[32];
    printf("%sfolio %s bench %s%s: %s\n"
           "%d processors, block size %lld, %g s a case, seed %lld\n\n",
           term_start(TERM_BOLD), folio_version(), r->topic, term_end(), bench_cpu_name(),
           (int)r->processors, (long long)r->block_size, r->seconds, (long long)r->seed);
    print_table(r);
    printf("\n");
    for (int i = 0; i < r->num_ceilings; i++)
        if (isfinite(r->ceilings[i].value)) printf("- ceiling: %s\n", r->ceilings[i].text);
    for (int i = 0; i < r->num_summary; i++)
        if (isfinite(r->summary[i].value)) printf("- %s\n", r->summary[i].text);
    for (int i = 0; i < r->num_results; i++) {
        const bench_result *of = &r->results[i];
        if (bench_is_noisy(of->spread))
            printf("- noisy: %s, %s: spread %.0f %%\n", of->what.name,
                   variant(text, sizeof text, &of->what), 100 * of->spread);
    }
}

/* A number that does not apply is an empty cell. */
static void print_cell(int64_t n)
{
    if (n) printf("%lld", (long long)n);
    putchar(',');
}

static void print_csv(const void *run, int64_t i)
{
    if (i < 0) {
        printf("case,blocks,threads,length,sequences,ns_median,ns_min,spread,per,gbps,batches,"
               "noisy\n");
        return;
    }
    const bench_result *c = &((const bench_report *)run)->results[i];
    printf("%s,", c->what.name);
    print_cell(c->what.blocks);
    print_cell(c->what.threads);
    print_cell(c->what.length);
    print_cell(c->what.sequences);
    printf("%.6g,%.6g,%.4g,%s,", c->ns_median, c->ns_min, c->spread, c->what.per);
    if (c->what.bytes) printf("%.6g", gbps(c));
    printf(",%lld,%d\n", (long long)c->batches, bench_is_noisy(c->spread));
}

/* A number that does not apply is null. */
static void write_count(json *j, const char *key, int64_t n)
{
    if (n) json_integer(j, key, n);
    else json_number(j, key, (double)NAN);
}

static void write_numbers(json *j, const char *key, const bench_number *numbers, int count)
{
    json_object(j, key);
    for (int i = 0; i < count; i++) json_number(j, numbers[i].key, numbers[i].value);
    json_close(j);
}

static void write_head(const void *run, json *j)
{
    const bench_report *r = run;
    json_string(j, "version", folio_version());
    json_string(j, "cpu", bench_cpu_name());
    json_integer(j, "processors", r->processors);
    json_string(j, "topic", r->topic);
    json_integer(j, "block_size", r->block_size);
    json_integer(j, "seed", r->seed);
    json_number(j, "seconds", r->seconds);
}

static void write_result(const void *run, json *j, int64_t i)
{
    const bench_result *c = &((const bench_report *)run)->results[i];
    json_object(j, NULL);
    json_string(j, "case", c->what.name);
    write_count(j, "blocks", c->what.blocks);
    write_count(j, "threads", c->what.threads);
    write_count(j, "length", c->what.length);
    write_count(j, "sequences", c->what.sequences);
    json_number(j, "ns_median", c->ns_median);
    json_number(j, "ns_min", c->ns_min);
    json_number(j, "spread", c->spread);
    json_string(j, "per", c->what.per);
    json_number(j, "gbps", c->what.bytes ? gbps(c) : (double)NAN);
    json_integer(j, "batches", c->batches);
    json_bool(j, "noisy", bench_is_noisy(c->spread));
    json_close(j);
}

static void write_tail(const void *run, json *j)
{
    const bench_report *r = run;
    write_numbers(j, "ceilings", r->ceilings, r->num_ceilings);
    write_numbers(j, "summary", r->summary, r->num_summary);
}

const bench_format bench_report_format = {write_head, write_result, write_tail, print_csv,
                                          print_markdown};

/* ---- Failing */

bool bench_ok(folio_status status, const char *call)
{
    if (status == FOLIO_OK) return true;
    term_progress_end();
    fprintf(stderr, "folio bench: %.*s: %s: %s\n", (int)strcspn(call, "("), call,
            folio_status_name(status), folio_last_error());
    return false;
}

void *bench_alloc(int64_t count, size_t size)
{
    size_t bytes = ((size_t)count * size + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes ? bytes : 64);
    if (memory == NULL) {
        term_progress_end();
        fprintf(stderr, "folio bench: cannot allocate %zu bytes\n", bytes);
        exit(EXIT_FAILED);
    }
    /* Written to, so that reads find pages of their own, not the system's one page of zeros. */
    return memset(memory, 0, bytes ? bytes : 64);
}

/* ---- Options */

/* One number, k and M allowed after it, up to a comma or the end; -1: it is none. */
static int64_t parse_count(const char **text)
{
    char *end;
    errno = 0;
    if (**text < '0' || **text > '9') return -1;
    long long n = strtoll(*text, &end, 10), unit = 1;
    if (*end == 'k' || *end == 'K') unit = 1000;
    else if (*end == 'm' || *end == 'M') unit = 1000000;
    end += unit > 1;
    if (errno != 0 || n > INT64_MAX / unit || (*end != ',' && *end != '\0')) return -1;
    *text = end;
    return n * unit;
}

bool bench_parse_list(const char *command, const char *option, const char *text, int64_t min,
                      int64_t max, int64_t *values, int *count)
{
    const char *at = text;
    *count = 0;
    for (;;) {
        int64_t n = *count < BENCH_MAX_LIST ? parse_count(&at) : -1;
        if (n < min || n > max) break;
        values[(*count)++] = n;
        if (*at == '\0') return true;
        at++;
    }
    args_complain(command,
                  "--%s takes up to %d numbers from %lld to %lld, such as 1k,10k, not '%s'", option,
                  BENCH_MAX_LIST, (long long)min, (long long)max, text);
    return false;
}

bool bench_parse_seconds(const char *command, const char *option, const char *text, double *value)
{
    char *end;
    double seconds = strtod(text, &end);
    if (end != text && *end == '\0' && seconds > 0 && seconds <= 3600) {
        *value = seconds;
        return true;
    }
    args_complain(command, "--%s takes seconds, more than 0 and up to 3600, not '%s'", option,
                  text);
    return false;
}

/* ---- Topics */

int bench_main(int argc, char **argv)
{
    if (argc < 2 || argv[1][0] == '-') return bench_attention_main(argc, argv);
    for (const subcommand *t = bench_topics; t->name; t++) {
        static char name[32];
        if (strcmp(argv[1], t->name) != 0) continue;
        snprintf(name, sizeof name, "bench %s", t->name);
        argv[1] = name; /* complaints name the topic too */
        return t->run(argc - 1, argv + 1);
    }
    return args_complain("bench", "unknown topic '%s'", argv[1]);
}
