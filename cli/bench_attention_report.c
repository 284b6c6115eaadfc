/* bench_attention_report.c: what `folio bench` measured, as Markdown, CSV or JSON. */
#include "bench_attention.h"
#include "json.h"
#include "term.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Lists with more than one entry: each row says its own. */
static bool has_shapes(const bench *b)
{
    const lists *of = &b->of;
    return of->num_heads * of->num_head_sizes * of->num_block_sizes * of->num_layouts > 1;
}

static bool has_ways(const bench *b)
{
    const lists *of = &b->of;
    return of->num_options * of->num_warm * of->num_threads * of->num_levels > 1;
}

static const char *shape_text(char *text, size_t size, const setting *s)
{
    snprintf(text, size, "heads %d:%d of %d, block %d, %s", (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
             folio_layout_name(s->layout));
    return text;
}

static const char *way_text(char *text, size_t size, const result *r)
{
    snprintf(text, size, "%s, %d thread%s, %s, %s", r->level, (int)r->threads,
             r->threads > 1 ? "s" : "", r->of.warm ? "warm" : "cold", r->of.with->name);
    return text;
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

static void print_start(const bench *b, const result *r)
{
    char a[160];
    printf("| %-13s | %-5s |", r ? r->of.what->name : "case",
           r ? type_text(a, sizeof a, &r->of) : "type");
    if (has_shapes(b)) printf(" %-38s |", r ? shape_text(a, sizeof a, &r->of) : "shape");
    if (has_ways(b)) printf(" %-39s |", r ? way_text(a, sizeof a, r) : "how");
}

static void print_rule(const bench *b)
{
    printf("|:--------------|:------|");
    if (has_shapes(b)) printf(":---------------------------------------|");
    if (has_ways(b)) printf(":----------------------------------------|");
}

static void print_row(const bench *b, const result *r)
{
    char c[32], d[32], ceiling[48] = "-", share[16] = "-";
    print_start(b, r);
    if (r->ceiling >= 0 && isfinite(r->ceiling_value)) {
        snprintf(ceiling, sizeof ceiling, "%s %.4g", bench_ceiling_name((bench_ceiling)r->ceiling),
                 r->ceiling_value);
        snprintf(share, sizeof share, "%.0f %%", 100 * r->share);
    }
    printf(" %8s | %8s | %4.*f %% | %7.1f | %6.2f | %14s | %5s |\n",
           time_text(c, sizeof c, r->seconds.median), time_text(d, sizeof d, r->seconds.min),
           r->seconds.spread < 0.9995, 100 * r->seconds.spread, r->gflops, r->gbps, ceiling, share);
}

static void print_table(const bench *b)
{
    print_start(b, NULL);
    printf(" %8s | %8s | %6s | %7s | %6s | %14s | %5s |\n", "median", "min", "spread", "GFLOP/s",
           "GB/s", "ceiling", "share");
    print_rule(b);
    printf("---------:|---------:|-------:|--------:|-------:|---------------:|------:|\n");
    for (int64_t i = 0; i < b->num_results; i++) print_row(b, &b->results[i]);
    printf("\n");
}

/* The peers' medians, and how many times Folio's each of them is. */
static void print_peers(const bench *b)
{
    char text[64], time[32];
    int count = b->peers ? bench_peers_count(b->peers) : 0;
    if (count == 0) return;
    printf("Medians of the peers, and in brackets how many times Folio's they are:\n\n");
    print_start(b, NULL);
    for (int k = 0; k < count; k++) {
        snprintf(text, sizeof text, "%s %s", bench_peers_name(b->peers, k),
                 bench_peers_version(b->peers, k));
        printf(" %-28s |", text);
    }
    printf("\n");
    print_rule(b);
    for (int k = 0; k < count; k++) printf("-----------------------------:|");
    printf("\n");
    for (int64_t i = 0; i < b->num_results; i++) {
        const result *r = &b->results[i];
        print_start(b, r);
        for (int k = 0; k < count; k++) {
            snprintf(text, sizeof text, "-");
            if (isfinite(r->peers[k].median))
                snprintf(text, sizeof text, "%s (%.2f)",
                         time_text(time, sizeof time, r->peers[k].median),
                         r->peers[k].median / r->seconds.median);
            printf(" %28s |", text);
        }
        printf("\n");
    }
    printf("\n");
}

/* What ran in turns with a case, a line each. */
static void print_beside(const bench *b, const result *r)
{
    char a[160], c[32], d[32];
    type_text(c, sizeof c, &r->of);
    printf("- %s, %s", r->of.what->name, c);
    if (has_shapes(b)) printf(", %s", shape_text(a, sizeof a, &r->of));
    if (has_ways(b)) printf(", %s", way_text(a, sizeof a, r));
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
    char text[160];
    const result *first = &b->results[0];
    printf("%sfolio %s bench%s: %s\n%s, ", term_start(TERM_BOLD), folio_version(), term_end(),
           bench_cpu_name(), "cpu");
    if (!has_ways(b)) printf("level %s, ", way_text(text, sizeof text, first));
    if (!has_shapes(b)) printf("%s, ", shape_text(text, sizeof text, &first->of));
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
