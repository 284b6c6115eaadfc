/* bench_attention_report.c: what `folio bench` measured, as Markdown, CSV or JSON. */
#include "bench_attention.h"
#include "json.h"
#include "table.h"
#include "term.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- Parts of a setting: those from lists of one entry stand over the table, the others in its rows */

enum { MAX_TEXT = 256 };

typedef struct parts {
    char text[MAX_TEXT];
    bool varied; /* which of the two this is */
} parts;

/* Adds a part of a list with so many entries, if it is one of these. */
static void add_part(parts *to, int count, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add_part(parts *to, int count, const char *format, ...)
{
    if ((count > 1) != to->varied) return;
    size_t used = strlen(to->text);
    va_list args;
    va_start(args, format);
    if (used > 0) used += (size_t)snprintf(to->text + used, MAX_TEXT - used, ", ");
    vsnprintf(to->text + used, MAX_TEXT - used, format, args);
    va_end(args);
}

static parts parts_of(const bench *b, const result *r, bool varied)
{
    parts to = {.varied = varied};
    const lists *of = &b->of;
    const setting *s = &r->of;
    add_part(&to, of->num_levels, "%s%s", varied ? "" : "level ", r->level);
    add_part(&to, of->num_threads, "%d thread%s", (int)r->threads, r->threads > 1 ? "s" : "");
    add_part(&to, of->num_warm, "%s", s->warm ? "warm" : "cold");
    add_part(&to, of->num_options, "%s", s->with->name);
    add_part(&to, of->num_heads * of->num_head_sizes, "heads %d:%d of %d", (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size);
    add_part(&to, of->num_block_sizes, "block %d", (int)s->block_size);
    add_part(&to, of->num_layouts, "%s", folio_layout_name(s->layout));
    return to;
}

static const char *type_text(char *text, size_t size, const setting *s)
{
    if (s->dtype == s->kv_dtype) snprintf(text, size, "%s", folio_dtype_name(s->dtype));
    else
        snprintf(text, size, "%s on %s", folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype));
    return text;
}

static const char *time_text(char *text, size_t size, double seconds)
{
    return bench_short_time(text, size, seconds * 1e9);
}

/* ---- Markdown */

/* The columns that both tables begin with. */
static void start_heads(const bench *b, table *t)
{
    table_head(t, 'l', "case");
    table_head(t, 'l', "type");
    if (parts_of(b, &b->results[0], true).text[0]) table_head(t, 'l', "with");
}

static void start_row(const bench *b, table *t, const result *r)
{
    char text[160];
    table_cell(t, "%s", r->of.what->name);
    table_cell(t, "%s", type_text(text, sizeof text, &r->of));
    parts with = parts_of(b, r, true);
    if (with.text[0]) table_cell(t, "%s", with.text);
}

static void add_row(const bench *b, table *t, const result *r)
{
    char text[32];
    start_row(b, t, r);
    table_cell(t, "%s", time_text(text, sizeof text, r->seconds.median));
    table_cell(t, "%s", time_text(text, sizeof text, r->seconds.min));
    table_cell(t, "%.*f %%", r->seconds.spread < 0.9995, 100 * r->seconds.spread);
    table_cell(t, "%.1f", r->gflops);
    table_cell(t, "%.2f", r->gbps);
    if (r->ceiling >= 0 && isfinite(r->ceiling_value)) {
        const char *name = bench_ceiling_name((bench_ceiling)r->ceiling);
        table_cell(t, "%s %.*f", name, r->ceiling_value < 100, r->ceiling_value);
        table_cell(t, "%.0f %%", 100 * r->share);
    } else {
        table_cell(t, "-");
        table_cell(t, "-");
    }
}

static void print_table(const bench *b)
{
    static const char *const heads[] = {"median", "min",     "spread", "GFLOP/s",
                                        "GB/s",   "ceiling", "share"};
    table t = {.columns = 0};
    start_heads(b, &t);
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) table_head(&t, 'r', heads[i]);
    for (int64_t i = 0; i < b->num_results; i++) add_row(b, &t, &b->results[i]);
    table_print(&t);
    printf("\n");
}

/* The medians of the peers that ran, and how many times Folio's each of them is. */
static void print_peers(const bench *b)
{
    char text[160];
    table t = {.columns = 0};
    int peers[BENCH_MAX_PEERS], count = 0;
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++)
        if (bench_peer_ran(b, k)) peers[count++] = k;
    if (count == 0) return;
    printf("Medians of the peers, and in brackets how many times Folio's they are:\n\n");
    start_heads(b, &t);
    for (int i = 0; i < count; i++) {
        snprintf(text, sizeof text, "%s %s", bench_peers_name(b->peers, peers[i]),
                 bench_peers_version(b->peers, peers[i]));
        table_head(&t, 'r', text);
    }
    for (int64_t i = 0; i < b->num_results; i++) {
        const result *r = &b->results[i];
        start_row(b, &t, r);
        for (int k = 0; k < count; k++) {
            double median = r->peers[peers[k]].median;
            if (isfinite(median))
                table_cell(&t, "%s (%.2f)", time_text(text, sizeof text, median),
                           median / r->seconds.median);
            else table_cell(&t, "-");
        }
    }
    table_print(&t);
    printf("\n");
}

/* What ran in turns with a case, a line each. */
static void print_beside(const bench *b, const result *r)
{
    char c[32], d[32];
    parts with = parts_of(b, r, true);
    type_text(c, sizeof c, &r->of);
    printf("- %s, %s%s%s", r->of.what->name, c, with.text[0] ? ", " : "", with.text);
    if (isfinite(r->prefill_s))
        printf(": %.2f times its prefills (%s) and its decodes (%s) alone",
               r->seconds.median / (r->prefill_s + r->decode_s),
               time_text(c, sizeof c, r->prefill_s), time_text(d, sizeof d, r->decode_s));
    if (isfinite(r->plain_s))
        printf("%s %.2f times the plain one (%s)", isfinite(r->prefill_s) ? ";" : ":",
               r->seconds.median / r->plain_s, time_text(c, sizeof c, r->plain_s));
    if (r->of.with->window > 0) printf(", with %.2f times its work", 1 / r->plain_work);
    printf("\n");
}

static void print_markdown(const bench *b)
{
    parts of_all = parts_of(b, &b->results[0], false);
    printf("%sfolio %s bench%s: %s\ncpu, %s%s", term_start(TERM_BOLD), folio_version(), term_end(),
           bench_cpu_name(), of_all.text, of_all.text[0] ? ", " : "");
    printf("%lld rep%s, seed %lld\n\n", (long long)b->reps, b->reps > 1 ? "s" : "",
           (long long)b->seed);
    print_table(b);
    print_peers(b);
    for (int64_t i = 0; i < b->num_results; i++)
        if (isfinite(b->results[i].prefill_s) || isfinite(b->results[i].plain_s))
            print_beside(b, &b->results[i]);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        if (isfinite(b->machine[k]))
            printf("- ceiling over the whole run: %s %.4g %s\n",
                   bench_ceiling_name((bench_ceiling)k), b->machine[k],
                   bench_ceiling_unit((bench_ceiling)k));
}

/* ---- CSV */

/* A number that does not apply is an empty cell. */
static void print_cell(double x)
{
    if (isfinite(x)) printf(",%.6g", x);
    else printf(",");
}

static void print_csv(const bench *b)
{
    int peers = b->peers ? bench_peers_count(b->peers) : 0;
    printf("case,phase,backend,level,threads,dtype,kv_dtype,heads,kv_heads,head_size,block_size,"
           "layout,kernel,options,cache,median_s,min_s,spread,gflops,gbps,ceiling,ceiling_value,"
           "share,prefill_s,decode_s,plain_s");
    for (int k = 0; k < peers; k++) {
        const char *name = bench_peers_name(b->peers, k);
        printf(",%s_s,%s_ratio", name, name);
    }
    printf("\n");
    for (int64_t i = 0; i < b->num_results; i++) {
        const result *r = &b->results[i];
        const setting *s = &r->of;
        printf("%s,%s,cpu,%s,%d,%s,%s,%d,%d,%d,%d,%s,%s,%s,%s", s->what->name, s->what->phase,
               r->level, (int)r->threads, folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype),
               (int)s->heads.heads, (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
               folio_layout_name(s->layout), r->kernel, s->with->name, s->warm ? "warm" : "cold");
        printf(",%.6g,%.6g,%.4g,%.6g,%.6g,", r->seconds.median, r->seconds.min, r->seconds.spread,
               r->gflops, r->gbps);
        if (isfinite(r->share)) printf("%s", bench_ceiling_key((bench_ceiling)r->ceiling));
        print_cell(r->ceiling_value);
        print_cell(r->share);
        print_cell(r->prefill_s);
        print_cell(r->decode_s);
        print_cell(r->plain_s);
        for (int k = 0; k < peers; k++) {
            print_cell(r->peers[k].median);
            print_cell(r->peers[k].median / r->seconds.median);
        }
        printf("\n");
    }
}

/* ---- JSON */

static void write_setting(json *j, const result *r)
{
    const setting *s = &r->of;
    json_string(j, "case", s->what->name);
    json_string(j, "phase", s->what->phase);
    json_string(j, "backend", "cpu");
    json_string(j, "device", bench_cpu_name());
    json_string(j, "level", r->level);
    json_integer(j, "threads", r->threads);
    json_string(j, "dtype", folio_dtype_name(s->dtype));
    json_string(j, "kv_dtype", folio_dtype_name(s->kv_dtype));
    json_integer(j, "heads", s->heads.heads);
    json_integer(j, "kv_heads", s->heads.kv_heads);
    json_integer(j, "head_size", s->head_size);
    json_integer(j, "block_size", s->block_size);
    json_string(j, "layout", folio_layout_name(s->layout));
    json_string(j, "options", s->with->name);
    json_string(j, "cache", s->warm ? "warm" : "cold");
    json_string(j, "kernel", r->kernel);
}

static void write_result(json *j, const bench *b, const result *r)
{
    json_object(j, NULL);
    write_setting(j, r);
    json_number(j, "median_s", r->seconds.median);
    json_number(j, "min_s", r->seconds.min);
    json_number(j, "spread", r->seconds.spread);
    json_number(j, "gflops", r->gflops);
    json_number(j, "gbps", r->gbps);
    if (r->ceiling >= 0) {
        json_object(j, "ceiling");
        json_string(j, "name", bench_ceiling_key((bench_ceiling)r->ceiling));
        json_number(j, "value", r->ceiling_value);
        json_close(j);
    } else {
        json_number(j, "ceiling", (double)NAN);
    }
    json_number(j, "share", r->share);
    json_number(j, "prefill_s", r->prefill_s);
    json_number(j, "decode_s", r->decode_s);
    json_number(j, "plain_s", r->plain_s);
    json_object(j, "peers");
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++) {
        if (!isfinite(r->peers[k].median)) continue;
        json_object(j, bench_peers_name(b->peers, k));
        json_number(j, "median_s", r->peers[k].median);
        json_number(j, "min_s", r->peers[k].min);
        json_string(j, "version", bench_peers_version(b->peers, k));
        json_close(j);
    }
    json_close(j);
    json_close(j);
}

static void print_json(const bench *b)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_string(&j, "version", folio_version());
    json_string(&j, "cpu", bench_cpu_name());
    json_object(&j, "ceilings");
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        json_number(&j, bench_ceiling_key((bench_ceiling)k), b->machine[k]);
    json_close(&j);
    json_array(&j, "peers_run");
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++)
        if (bench_peer_ran(b, k)) json_string(&j, NULL, bench_peers_name(b->peers, k));
    json_close(&j);
    json_array(&j, "results");
    for (int64_t i = 0; i < b->num_results; i++) write_result(&j, b, &b->results[i]);
    json_close(&j);
    json_close(&j);
}

void bench_attention_print(const bench *b)
{
    if (strcmp(b->output, "json") == 0) print_json(b);
    else if (strcmp(b->output, "csv") == 0) print_csv(b);
    else print_markdown(b);
}
