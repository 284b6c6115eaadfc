/* bench_attention_report.c: what `folio bench` measured, as Markdown, CSV or JSON. */
#include "base/json.h"
#include "base/table.h"
#include "base/term.h"
#include "bench/bench_attention.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- Labels of a setting: those from lists of one entry stand over the table, the others in its rows */

enum { MAX_TEXT = 256 };

typedef struct labels {
    char text[MAX_TEXT];
    bool varied; /* which of the two this is */
} labels;

/* Adds the label of a list with so many entries, if it is one of these. */
static void add_label(labels *to, int count, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add_label(labels *to, int count, const char *format, ...)
{
    if ((count > 1) != to->varied) return;
    size_t used = strlen(to->text);
    va_list args;
    va_start(args, format);
    if (used > 0) used += (size_t)snprintf(to->text + used, MAX_TEXT - used, ", ");
    vsnprintf(to->text + used, MAX_TEXT - used, format, args);
    va_end(args);
}

static labels labels_of(const result *r, bool varied)
{
    labels to = {.varied = varied};
    const lists *of = r->in;
    const setting *s = &r->of;
    bool cpu = r->threads > 0; /* a device has neither */
    if (cpu) add_label(&to, of->num_levels, "%s%s", varied ? "" : "level ", r->level);
    if (cpu)
        add_label(&to, of->num_threads, "%d thread%s", (int)r->threads, r->threads > 1 ? "s" : "");
    add_label(&to, of->num_caches, "%s", bench_cache_names[s->cache]);
    add_label(&to, of->num_options, "%s", s->with->name);
    add_label(&to, of->num_heads * of->num_head_sizes, "heads %d:%d of %d", (int)s->heads.heads,
              (int)s->heads.kv_heads, (int)s->head_size);
    add_label(&to, of->num_block_sizes, "block %d", (int)s->block_size);
    add_label(&to, of->num_layouts, "%s", folio_layout_name(s->layout));
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

/* Its own times, or those of its ceiling. */
static bool is_noisy(const result *r)
{
    return bench_is_noisy(r->seconds.spread) || bench_is_noisy(r->bound.spread);
}

static bool on_cpu(const bench *b) { return strcmp(b->backend, "cpu") == 0; }

/* A GPU's figures are in T where a CPU's are in G. */
static double scaled(const bench *b, double giga) { return on_cpu(b) ? giga : 1e-3 * giga; }

/* The results of one section: they stand side by side. */
typedef struct rows {
    const result *first;
    int64_t count;
} rows;

static rows rows_of(const bench *b, const lists *section)
{
    rows to = {.count = 0};
    for (int64_t i = 0; i < b->num_results; i++) {
        if (b->results[i].in != section) continue;
        if (to.count++ == 0) to.first = &b->results[i];
    }
    return to;
}

/* The columns that both tables begin with. */
static void start_heads(table *t, rows of)
{
    table_head(t, 'l', "case");
    table_head(t, 'l', "type");
    if (labels_of(of.first, true).text[0]) table_head(t, 'l', "with");
}

static void start_row(table *t, const result *r)
{
    char text[160];
    table_cell(t, "%s", r->of.what->name);
    table_cell(t, "%s", type_text(text, sizeof text, &r->of));
    labels with = labels_of(r, true);
    if (with.text[0]) table_cell(t, "%s", with.text);
}

/* Are there decodes on a device? Their rows also have a read of their own bytes. */
static bool has_reads(rows of)
{
    bool any = false;
    for (int64_t i = 0; i < of.count; i++) any |= isfinite(of.first[i].read_s) != 0;
    return any;
}

/* Are there decodes on the CPU? Their rows also have what they reached of reading the same pieces. */
static bool has_pieces(rows of)
{
    bool any = false;
    for (int64_t i = 0; i < of.count; i++) any |= isfinite(of.first[i].pieces.share) != 0;
    return any;
}

static void add_row(const bench *b, table *t, const result *r, bool reads, bool pieces)
{
    char text[32];
    start_row(t, r);
    table_cell(t, "%s", time_text(text, sizeof text, r->seconds.median));
    table_cell(t, "%s", time_text(text, sizeof text, r->seconds.min));
    table_cell(t, "%.*f %%", r->seconds.spread < 0.9995, 100 * r->seconds.spread);
    table_cell(t, "%.1f", scaled(b, r->gflops));
    table_cell(t, "%.2f", scaled(b, r->gbps));
    if (r->ceiling >= 0 && isfinite(r->bound.value)) {
        double value = scaled(b, r->bound.value);
        table_cell(t, "%s %s%.*f", bench_ceiling_name(b->backend, (bench_ceiling)r->ceiling),
                   r->bound.by_case ? ">= " : "", (value < 100) + (value < 10), value);
        table_cell(t, "%.0f %%", 100 * r->bound.share);
    } else {
        table_cell(t, "-");
        table_cell(t, "-");
    }
    if (pieces && isfinite(r->pieces.share)) table_cell(t, "%.0f %%", 100 * r->pieces.share);
    else if (pieces) table_cell(t, "-");
    if (!reads) return;
    if (isfinite(r->read_s)) {
        table_cell(t, "%s", time_text(text, sizeof text, r->read_s));
        table_cell(t, "%.0f %%", 100 * r->read_s / r->seconds.median);
    } else {
        table_cell(t, "-");
        table_cell(t, "-");
    }
}

static void print_table(const bench *b, rows of)
{
    const char *const heads[] = {
        "median",  "min",  "spread", on_cpu(b) ? "GFLOP/s" : "TFLOP/s", on_cpu(b) ? "GB/s" : "TB/s",
        "ceiling", "share"};
    table t = {.columns = 0};
    start_heads(&t, of);
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) table_head(&t, 'r', heads[i]);
    if (has_pieces(of)) table_head(&t, 'r', "of pieces");
    if (has_reads(of)) {
        table_head(&t, 'r', "its read");
        table_head(&t, 'r', "of it");
    }
    for (int64_t i = 0; i < of.count; i++)
        add_row(b, &t, &of.first[i], has_reads(of), has_pieces(of));
    table_print(&t);
    printf("\n");
}

/* On a GPU as a rate, by what bounds the case; a mix has none. */
static const char *peer_text(const bench *b, const result *r, double median, char *text,
                             size_t size)
{
    double times = r->seconds.median / median;
    if (on_cpu(b) || r->ceiling < 0) return time_text(text, size, median);
    if (r->ceiling == BENCH_READ) snprintf(text, size, "%.2f TB/s", scaled(b, times * r->gbps));
    else snprintf(text, size, "%.1f TFLOP/s", scaled(b, times * r->gflops));
    return text;
}

/* The medians of the peers that ran, and how many times Folio's each of them is. */
static void print_peers(const bench *b, rows of)
{
    char text[160];
    table t = {.columns = 0};
    int peers[BENCH_MAX_PEERS], count = 0;
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++) {
        bool ran = false;
        for (int64_t i = 0; i < of.count; i++) ran |= isfinite(of.first[i].peers[k].median) != 0;
        if (ran) peers[count++] = k;
    }
    if (count == 0) return;
    printf("%s of the peers, and in brackets how many times Folio's %s:\n\n",
           on_cpu(b) ? "Medians" : "Rates", on_cpu(b) ? "they are" : "time they take");
    start_heads(&t, of);
    for (int i = 0; i < count; i++) {
        snprintf(text, sizeof text, "%s %s", bench_peers_name(b->peers, peers[i]),
                 bench_peers_version(b->peers, peers[i]));
        table_head(&t, 'r', text);
    }
    for (int64_t i = 0; i < of.count; i++) {
        const result *r = &of.first[i];
        start_row(&t, r);
        for (int k = 0; k < count; k++) {
            double median = r->peers[peers[k]].median;
            if (isfinite(median))
                table_cell(&t, "%s (%.2f)", peer_text(b, r, median, text, sizeof text),
                           median / r->seconds.median);
            else table_cell(&t, "-");
        }
    }
    table_print(&t);
    printf("\n");
}

/* The seconds of Folio's own interface doing the same: operators store nothing. */
static double native_s(const result *r, bench_ancestor which)
{
    return bench_ancestor_stores(which) ? r->seconds.median : r->plain_s;
}

static bool has_ancestors(const result *r) { return isfinite(r->ancestors[0].median) != 0; }

/* One way to compute the case: its times, its rate, and how many times Folio's own it takes. */
static void add_ancestor(const bench *b, table *t, const result *r, const char *name,
                         const bench_stats *of, double native)
{
    char text[32];
    double times = r->seconds.median / of->median; /* its rates over those of the case */
    bool decode = strcmp(r->of.what->phase, "decode") == 0;
    const char *unit = on_cpu(b) ? "G" : "T";
    start_row(t, r);
    table_cell(t, "%s", name);
    table_cell(t, "%s", time_text(text, sizeof text, of->median));
    table_cell(t, "%s", time_text(text, sizeof text, of->min));
    table_cell(t, "%.*f %%", of->spread < 0.9995, 100 * of->spread);
    if (decode) table_cell(t, "%.2f %sB/s", scaled(b, times * r->gbps), unit);
    else table_cell(t, "%.1f %sFLOP/s", scaled(b, times * r->gflops), unit);
    table_cell(t, "%.2f", of->median / native);
}

/* Folio's own interface and that of vLLM 0.6, a row each. */
static void print_ancestors(const bench *b, rows of)
{
    static const char *const heads[] = {"median", "min", "spread", "rate", "times native"};
    table t = {.columns = 0};
    if (!has_ancestors(of.first)) return;
    printf("Native, forward of vLLM 0.6's backends, and its operators, which store nothing (as "
           "'plain'):\n\n");
    start_heads(&t, of);
    table_head(&t, 'l', "interface");
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) table_head(&t, 'r', heads[i]);
    for (int64_t i = 0; i < of.count; i++) {
        const result *r = &of.first[i];
        if (!has_ancestors(r)) continue;
        add_ancestor(b, &t, r, "native", &r->seconds, r->seconds.median);
        for (int k = 0; k < BENCH_NUM_ANCESTORS; k++)
            if (isfinite(r->ancestors[k].median))
                add_ancestor(b, &t, r, bench_ancestor_name((bench_ancestor)k), &r->ancestors[k],
                             native_s(r, (bench_ancestor)k));
    }
    table_print(&t);
    printf("\n");
}

static void print_name(const result *r)
{
    char type[32];
    labels with = labels_of(r, true);
    printf("- %s, %s%s%s", r->of.what->name, type_text(type, sizeof type, &r->of),
           with.text[0] ? ", " : "", with.text);
}

/* What alternated with a case, a line each. */
static void print_beside(const result *r)
{
    char c[32], d[32];
    print_name(r);
    if (isfinite(r->prefill_s))
        printf(": %.2f times its prefills (%s) and its decodes (%s) alone",
               r->seconds.median / (r->prefill_s + r->decode_s),
               time_text(c, sizeof c, r->prefill_s), time_text(d, sizeof d, r->decode_s));
    if (isfinite(r->plain_s))
        printf("%s %.2f times %s (%s)", isfinite(r->prefill_s) ? ";" : ":",
               r->seconds.median / r->plain_s,
               r->of.with->graph ? "its forwards one after another" : "the plain one",
               time_text(c, sizeof c, r->plain_s));
    if (r->of.with->window > 0 || r->of.with->full)
        printf(", with %.2f times its work", 1 / r->plain_work);
    if (isfinite(r->pass_s))
        printf("; a separate pass instead: %.2f times (%s), its bytes alone %s",
               r->pass_s / r->plain_s, time_text(c, sizeof c, r->pass_s),
               time_text(d, sizeof d, r->pass_bytes_s));
    printf("\n");
}

/* What `of pieces` is a share of. */
static void print_pieces(const result *r)
{
    print_name(r);
    printf(": reading the same pieces: %s%.2f GB/s, by one thread %.2f\n",
           r->pieces.by_case ? ">= " : "", r->pieces.value, r->pieces_one);
}

/* What a reader has to know of a case before he believes its row. Returns the number of lines. */
static int print_doubts(const bench *b, const result *r)
{
    int lines = 0;
    if (is_noisy(r)) {
        print_name(r);
        printf(": noisy: spread %.0f %%", 100 * r->seconds.spread);
        if (bench_is_noisy(r->bound.spread))
            printf(", its ceiling's samples %.0f %%", 100 * r->bound.spread);
        printf("\n");
        lines++;
    }
    if (r->bound.by_case) {
        print_name(r);
        printf(": its ceiling is its own fastest run; no sample passed %.4g %s%s\n",
               scaled(b, r->bound.sampled), on_cpu(b) ? "G" : "T",
               bench_ceiling_unit((bench_ceiling)r->ceiling) + 1);
        lines++;
    }
    if (r->cached) {
        print_name(r);
        printf(": faster than memory: K and V came from the processor's caches\n");
        lines++;
    }
    return lines;
}

static void print_section(const bench *b, const lists *section)
{
    rows of = rows_of(b, section);
    if (of.count == 0) return;
    labels of_all = labels_of(of.first, false);
    if (section->name[0]) printf("%s%s%s\n", term_start(TERM_BOLD), section->name, term_end());
    printf("%s, %s%s%lld rep%s, seed %lld\n\n", b->backend, of_all.text, of_all.text[0] ? ", " : "",
           (long long)b->reps, b->reps > 1 ? "s" : "", (long long)b->seed);
    print_table(b, of);
    print_ancestors(b, of);
    print_peers(b, of);
    int64_t lines = 0;
    for (int64_t i = 0; i < of.count; i++) {
        lines += print_doubts(b, &of.first[i]);
        if (isfinite(of.first[i].pieces.share)) {
            print_pieces(&of.first[i]);
            lines++;
        }
        if (!isfinite(of.first[i].prefill_s) && !isfinite(of.first[i].plain_s)) continue;
        print_beside(&of.first[i]);
        lines++;
    }
    if (section->name[0] && lines) printf("\n");
}

static void print_clocks(const bench_clocks_stats *s)
{
    const char *before = "; held back by ";
    if (s->count == 0) return;
    printf("- clock while busy: median %.0f MHz, lowest %.0f, of %lld samples", s->median_mhz,
           s->lowest_mhz, (long long)s->count);
    for (int k = 0; k < BENCH_NUM_HELD; k++) {
        if (s->held_share[k] == 0) continue;
        printf("%s%s in %.3g %%", before, bench_held_name((bench_held)k), 100 * s->held_share[k]);
        before = ", by ";
    }
    printf("%s\n", before[0] == ';' ? "; never held back" : " of them");
}

static void print_markdown(const void *run)
{
    const bench *b = run;
    int64_t noisy = 0;
    printf("%sfolio %s bench%s: %s\n", term_start(TERM_BOLD), folio_version(), term_end(),
           b->device_name);
    for (int i = 0; i < b->num_sections; i++) print_section(b, &b->sections[i]);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        if (isfinite(b->machine[k]))
            printf("- ceiling over the whole run: %s %.4g %s%s%s\n",
                   bench_ceiling_name(b->backend, (bench_ceiling)k), scaled(b, b->machine[k]),
                   on_cpu(b) ? "G" : "T", bench_ceiling_unit((bench_ceiling)k) + 1,
                   b->by_case[k] ? ", by a case" : "");
    for (int64_t i = 0; i < b->num_results; i++) noisy += is_noisy(&b->results[i]);
    if (noisy > 0)
        printf(
            "- noisy: %lld of %lld cases have a spread above 20 %%; other programs ran, or the clock\n"
            "  changed. Do not trust small differences: repeat the run\n",
            (long long)noisy, (long long)b->num_results);
    if (isfinite(b->clock_mhz)) printf("- clock under bf16 mma: %.0f MHz\n", b->clock_mhz);
    print_clocks(&b->clock_samples);
}

/* ---- CSV */

/* A number that does not apply is an empty cell. */
static void print_cell(double x)
{
    if (isfinite(x)) printf(",%.6g", x);
    else printf(",");
}

static const char *bound_by(const bench_bound *of)
{
    return isnan(of->value) ? "" : of->by_case ? "case" : "sample";
}

/* Are there columns of them? */
static bool asks_ancestors(const bench *b)
{
    for (int i = 0; i < b->num_sections; i++)
        for (int k = 0; k < b->sections[i].num_options; k++)
            if (b->sections[i].options[k].ancestors) return true;
    return false;
}

static void print_csv_heads(const bench *b)
{
    printf("case,phase,backend,level,threads,dtype,kv_dtype,heads,kv_heads,head_size,block_size,"
           "layout,kernel,options,cache,median_s,min_s,spread,gflops,gbps,ceiling,ceiling_value,"
           "share,prefill_s,decode_s,plain_s,noisy,ceiling_by,read_s,pass_s,pass_bytes_s,"
           "pieces_gbps,pieces_one_gbps,pieces_share");
    for (int k = 0; k < BENCH_NUM_ANCESTORS && asks_ancestors(b); k++) {
        const char *name = bench_ancestor_name((bench_ancestor)k);
        printf(",%s_s,%s_ratio", name, name);
    }
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++) {
        const char *name = bench_peers_name(b->peers, k);
        printf(",%s_s,%s_ratio", name, name);
    }
    printf("\n");
}

static void print_csv(const void *run, int64_t i)
{
    const bench *b = run;
    int peers = b->peers ? bench_peers_count(b->peers) : 0;
    bool ancestors = asks_ancestors(b);
    if (i < 0) {
        print_csv_heads(b);
        return;
    }
    const result *r = &b->results[i];
    const setting *s = &r->of;
    printf("%s,%s,%s,%s,%d,%s,%s,%d,%d,%d,%d,%s,%s,%s,%s", s->what->name, s->what->phase,
           b->backend, r->level, (int)r->threads, folio_dtype_name(s->dtype),
           folio_dtype_name(s->kv_dtype), (int)s->heads.heads, (int)s->heads.kv_heads,
           (int)s->head_size, (int)s->block_size, folio_layout_name(s->layout), r->kernel,
           s->with->name, bench_cache_names[s->cache]);
    printf(",%.6g,%.6g,%.4g,%.6g,%.6g,", r->seconds.median, r->seconds.min, r->seconds.spread,
           r->gflops, r->gbps);
    if (isfinite(r->bound.share)) printf("%s", bench_ceiling_key((bench_ceiling)r->ceiling));
    print_cell(r->bound.value);
    print_cell(r->bound.share);
    print_cell(r->prefill_s);
    print_cell(r->decode_s);
    print_cell(r->plain_s);
    printf(",%d,%s", is_noisy(r), bound_by(&r->bound));
    print_cell(r->read_s);
    print_cell(r->pass_s);
    print_cell(r->pass_bytes_s);
    print_cell(r->pieces.value);
    print_cell(r->pieces_one);
    print_cell(r->pieces.share);
    for (int k = 0; k < BENCH_NUM_ANCESTORS && ancestors; k++) {
        print_cell(r->ancestors[k].median);
        print_cell(r->ancestors[k].median / native_s(r, (bench_ancestor)k));
    }
    for (int k = 0; k < peers; k++) {
        print_cell(r->peers[k].median);
        print_cell(r->peers[k].median / r->seconds.median);
    }
    printf("\n");
}

/* ---- JSON */

static void write_setting(json *j, const bench *b, const result *r)
{
    const setting *s = &r->of;
    json_string(j, "case", s->what->name);
    json_string(j, "phase", s->what->phase);
    json_string(j, "backend", b->backend);
    json_string(j, "device", b->device_name);
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
    json_string(j, "cache", bench_cache_names[s->cache]);
    json_string(j, "section", r->in->name);
    json_string(j, "kernel", r->kernel);
    json_integer(j, "reps", r->reps);
}

static void write_bound(json *j, const bench_bound *of)
{
    json_number(j, "value", of->value);
    json_string(j, "by", bound_by(of));
    json_number(j, "median", of->median);
    json_number(j, "spread", of->spread);
}

/* The ceiling of decodes on the CPU that reads as they do. */
static void write_pieces(json *j, const result *r)
{
    if (isnan(r->pieces.share)) {
        json_number(j, "pieces", (double)NAN);
        return;
    }
    json_object(j, "pieces");
    write_bound(j, &r->pieces);
    json_number(j, "one_thread", r->pieces_one);
    json_number(j, "share", r->pieces.share);
    json_close(j);
}

static void write_ancestors(json *j, const result *r)
{
    json_object(j, "ancestors");
    for (int k = 0; k < BENCH_NUM_ANCESTORS; k++) {
        const bench_stats *of = &r->ancestors[k];
        if (!isfinite(of->median)) continue;
        json_object(j, bench_ancestor_name((bench_ancestor)k));
        json_number(j, "median_s", of->median);
        json_number(j, "min_s", of->min);
        json_number(j, "spread", of->spread);
        json_number(j, "gflops", r->gflops * r->seconds.median / of->median);
        json_number(j, "gbps", r->gbps * r->seconds.median / of->median);
        json_number(j, "times_native", of->median / native_s(r, (bench_ancestor)k));
        json_close(j);
    }
    json_close(j);
}

static void write_result(const void *run, json *j, int64_t i)
{
    const bench *b = run;
    const result *r = &b->results[i];
    json_object(j, NULL);
    write_setting(j, b, r);
    json_number(j, "median_s", r->seconds.median);
    json_number(j, "min_s", r->seconds.min);
    json_number(j, "spread", r->seconds.spread);
    json_bool(j, "noisy", is_noisy(r));
    json_number(j, "gflops", r->gflops);
    json_number(j, "gbps", r->gbps);
    if (r->ceiling >= 0) {
        json_object(j, "ceiling");
        json_string(j, "name", bench_ceiling_key((bench_ceiling)r->ceiling));
        write_bound(j, &r->bound);
        json_close(j);
    } else {
        json_number(j, "ceiling", (double)NAN);
    }
    json_number(j, "share", r->bound.share);
    json_number(j, "prefill_s", r->prefill_s);
    json_number(j, "decode_s", r->decode_s);
    json_number(j, "plain_s", r->plain_s);
    json_number(j, "pass_s", r->pass_s);
    json_number(j, "pass_bytes_s", r->pass_bytes_s);
    json_number(j, "read_s", r->read_s);
    write_pieces(j, r);
    write_ancestors(j, r);
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

static void write_ceilings(json *j, const char *key, const double *values)
{
    json_object(j, key);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        json_number(j, bench_ceiling_key((bench_ceiling)k), values[k]);
    json_close(j);
}

static void write_clocks(json *j, const bench_clocks_stats *s)
{
    json_object(j, "clock_samples");
    json_integer(j, "count", s->count);
    json_number(j, "median_mhz", s->median_mhz);
    json_number(j, "lowest_mhz", s->lowest_mhz);
    json_object(j, "held_share");
    for (int k = 0; k < BENCH_NUM_HELD; k++)
        json_number(j, bench_held_key((bench_held)k), s->held_share[k]);
    json_close(j);
    json_close(j);
}

static void write_head(const void *run, json *j)
{
    const bench *b = run;
    json_string(j, "version", folio_version());
    json_string(j, "cpu", bench_cpu_name());
    json_string(j, "device", b->device_name);
    json_string(j, "topic", "attention");
}

static void write_tail(const void *run, json *j)
{
    const bench *b = run;
    json_number(j, "clock_mhz", b->clock_mhz);
    write_clocks(j, &b->clock_samples);
    write_ceilings(j, "ceilings", b->machine);
    write_ceilings(j, "ceilings_median", b->medians);
    json_array(j, "peers_run");
    for (int k = 0; b->peers && k < bench_peers_count(b->peers); k++)
        if (bench_peer_ran(b, k)) json_string(j, NULL, bench_peers_name(b->peers, k));
    json_close(j);
}

const bench_format bench_attention_format = {write_head, write_result, write_tail, print_csv,
                                             print_markdown};
