/* replay_report.c: a replay's summary as Markdown, CSV or JSON. docs/replay.md has the JSON's keys. */
#include "replay/replay_report.h"

#include "base/json.h"
#include "base/table.h"
#include "base/term.h"
#include "replay/replay_engine.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    double share;
} percentiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}};

/* ---- JSON and CSV */

/* Percentiles, and the buckets that are not empty: the mean time of each, and how many there were. */
static void json_times(json *j, const char *key, const replay_times *t)
{
    static double ms[REPLAY_BUCKETS + 1], counts[REPLAY_BUCKETS + 1];
    int64_t used = 0;
    json_object(j, key);
    for (int i = 0; i < 3; i++)
        json_number(j, percentiles[i].name, replay_times_at(t, percentiles[i].share));
    for (int i = 0; i <= REPLAY_BUCKETS; i++) {
        if (t->buckets[i] == 0) continue;
        ms[used] = replay_times_of(i);
        counts[used++] = (double)t->buckets[i];
    }
    json_numbers(j, "ms", ms, used);
    json_numbers(j, "counts", counts, used);
    json_close(j);
}

static void json_options(json *j, const replay_options *o)
{
    json_object(j, "options");
    json_bool(j, "no_attention", o->no_attention);
    json_integer(j, "layers", o->layers);
    json_integer(j, "heads", o->heads);
    json_integer(j, "kv_heads", o->kv_heads);
    json_integer(j, "head_size", o->head_size);
    json_string(j, "dtype", folio_dtype_name(o->dtype));
    json_string(j, "kv_dtype", folio_dtype_name(o->kv_dtype));
    json_integer(j, "window", o->window);
    json_integer(j, "block_size", o->block_size);
    json_integer(j, "max_seqs", o->max_seqs);
    json_integer(j, "budget", o->budget);
    json_string(j, "policy", o->prefill_first ? "prefill-first" : "decode-first");
    json_string(j, "admit", o->admit_chunk ? "chunk" : "prompt");
    json_string(j, "preempt", o->swap ? "swap" : "recompute");
    json_number(j, "speed", o->speed);
    json_number(j, "verify", o->verify);
    json_close(j);
}

/* What was served, and where. */
static void json_place(json *j, const replay_run_info *run)
{
    const replay_place *at = &run->stats->place;
    json_string(j, "version", folio_version());
    json_string(j, "command", run->command);
    json_bool(j, "interrupted", run->interrupted);
    json_object(j, "trace");
    json_string(j, "name", run->trace->name);
    json_integer(j, "total_requests", run->trace->num_requests);
    json_integer(j, "total_prompt_tokens", run->trace->prompt_tokens);
    json_integer(j, "total_output_tokens", run->trace->output_tokens);
    json_close(j);
    json_object(j, "machine");
    json_string(j, "device", at->device);
    json_string(j, "backend", at->backend);
    json_string(j, "level", at->level);
    json_integer(j, "threads", at->threads);
    json_close(j);
    json_options(j, run->options);
}

/* Means and counts of intervals of one width, from 0 to clock_seconds. */
static void json_series(json *j, const replay_series *s)
{
    static const char *const levels[REPLAY_LEVELS] = {"used_blocks", "cached_blocks", "running",
                                                      "decoding",    "preempted",     "waiting"};
    static const char *const counts[REPLAY_COUNTS] = {
        "steps", "prefill_tokens", "decode_tokens", "preemptions", "prompt_tokens", "hit_tokens"};
    double values[REPLAY_BINS];
    json_object(j, "series");
    json_number(j, "interval_seconds", s->width);
    for (int k = 0; k < REPLAY_LEVELS; k++) {
        for (int i = 0; i < s->num_bins; i++)
            values[i] = replay_bin_level(&s->bins[i], (replay_level)k);
        json_numbers(j, levels[k], values, s->num_bins);
    }
    for (int k = 0; k < REPLAY_COUNTS; k++) {
        for (int i = 0; i < s->num_bins; i++) values[i] = s->bins[i].counts[k];
        json_numbers(j, counts[k], values, s->num_bins);
    }
    json_close(j);
}

static void print_json(const replay_run_info *run)
{
    const replay_stats *s = run->stats;
    const replay_options *o = run->options;
    double busy = s->attention_seconds + s->engine_seconds;
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_place(&j, run);
    json_integer(&j, "requests", s->requests);
    json_integer(&j, "steps", s->steps);
    json_integer(&j, "prefill_tokens", s->prefill_tokens);
    json_integer(&j, "decode_tokens", s->decode_tokens);
    json_number(&j, "seconds", s->seconds);
    json_number(&j, "clock_seconds", s->clock);
    json_number(&j, "prefill_seconds", s->prefill_seconds);
    json_number(&j, "decode_seconds", s->decode_seconds);
    json_number(&j, "attention_share",
                o->no_attention || busy <= 0 ? (double)NAN : s->attention_seconds / busy);
    json_times(&j, "ttft_ms", &s->ttft);
    json_times(&j, "itl_ms", &s->itl);
    json_object(&j, "kv");
    json_integer(&j, "blocks", s->num_blocks);
    json_integer(&j, "peak_used", s->peak_used);
    json_number(&j, "bytes",
                o->no_attention ? (double)NAN : (double)replay_cache_bytes(o, s->num_blocks));
    json_number(&j, "waste_share", replay_stats_waste(s));
    json_number(&j, "contiguous_waste_share", replay_stats_contiguous_waste(s));
    json_close(&j);
    json_integer(&j, "prompt_tokens", s->admitted_tokens);
    json_integer(&j, "hit_tokens", s->hit_tokens);
    json_number(&j, "prefix_hit_rate", replay_stats_hit_rate(s));
    json_integer(&j, "preemptions", s->preemptions);
    json_integer(&j, "swaps", s->swaps);
    json_integer(&j, "evictions", s->evictions);
    json_integer(&j, "verified_rows", s->verified_rows);
    json_integer(&j, "mismatched_rows", s->mismatched_rows);
    json_series(&j, run->series);
    json_close(&j);
}

static void print_csv(const replay_stats *s)
{
    printf("requests,prefill_tokens,decode_tokens,seconds,ttft_ms_p50,ttft_ms_p90,ttft_ms_p99,"
           "itl_ms_p50,itl_ms_p90,itl_ms_p99,kv_blocks,kv_peak_used,kv_waste_share,"
           "prefix_hit_rate,preemptions,verified_rows,mismatched_rows\n");
    printf("%lld,%lld,%lld,%.6g", (long long)s->requests, (long long)s->prefill_tokens,
           (long long)s->decode_tokens, s->seconds);
    for (int i = 0; i < 3; i++) printf(",%.6g", replay_times_at(&s->ttft, percentiles[i].share));
    for (int i = 0; i < 3; i++) printf(",%.6g", replay_times_at(&s->itl, percentiles[i].share));
    printf(",%lld,%lld,%.6g,%.6g,%lld,%lld,%lld\n", (long long)s->num_blocks,
           (long long)s->peak_used, replay_stats_waste(s), replay_stats_hit_rate(s),
           (long long)s->preemptions, (long long)s->verified_rows, (long long)s->mismatched_rows);
}

/* ---- Markdown */

static const char *short_bytes(char *text, size_t size, double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++) bytes /= 1024;
    snprintf(text, size, "%.*f %s", unit > 0 ? 1 : 0, bytes, units[unit]);
    return text;
}

static void print_settings(const replay_options *o)
{
    char bytes[32];
    printf("%lld blocks of %d tokens", (long long)o->num_blocks, (int)o->block_size);
    if (o->no_attention) printf(", no attention");
    else
        printf(" (%s of %s), %d layer%s, heads %d:%d of %d, backend %s",
               short_bytes(bytes, sizeof bytes, (double)replay_cache_bytes(o, o->num_blocks)),
               folio_dtype_name(o->kv_dtype), (int)o->layers, o->layers == 1 ? "" : "s",
               (int)o->heads, (int)o->kv_heads, (int)o->head_size, o->backend);
    if (o->window > 0) printf(", window %lld", (long long)o->window);
    printf("\nup to %lld sequences, %lld tokens a step, %s first, preemption by %s, ",
           (long long)o->max_seqs, (long long)o->budget, o->prefill_first ? "prefill" : "decode",
           o->swap ? "swap" : "recompute");
    if (o->speed > 0) printf("arrivals at speed %g\n", o->speed);
    else printf("as fast as possible\n");
}

void replay_report_head(const replay_options *o, const replay_trace *t)
{
    printf("%sfolio replay%s: %s, %lld requests, %lld prompt tokens, %lld of answers\n",
           term_start(TERM_BOLD), term_end(), t->name, (long long)t->num_requests,
           (long long)t->prompt_tokens, (long long)t->output_tokens);
    print_settings(o);
    printf("\n");
    fflush(stdout);
}

/* Three digits and a unit: "456 us", "12.3 ms", "4.56 s", "17.2 min". */
static const char *time_text(char *text, size_t size, double ms)
{
    static const struct {
        double ms, up_to;
        const char *name;
    } units[] = {
        {1e-3, 0.9995, "us"}, {1, 999.5, "ms"}, {1e3, 599.5e3, "s"}, {60e3, INFINITY, "min"}};
    int i = 0;
    while (i < 3 && ms >= units[i].up_to) i++;
    double value = ms / units[i].ms;
    snprintf(text, size, value >= 99.95 ? "%.0f %s" : "%.3g %s", value, units[i].name);
    return text;
}

static void times_row(table *t, const char *name, const replay_times *times)
{
    char text[3][32];
    table_cell(t, "%s", name);
    if (times->count == 0) {
        table_cell(t, "-");
        return;
    }
    for (int i = 0; i < 3; i++)
        time_text(text[i], sizeof text[i], replay_times_at(times, percentiles[i].share));
    table_cell(t, "p50 %s, p90 %s, p99 %s", text[0], text[1], text[2]);
}

static void add_speed(table *t, const replay_stats *s)
{
    table_cell(t, "requests");
    table_cell(t, "%lld of %lld in %lld steps", (long long)s->requests,
               (long long)s->total_requests, (long long)s->steps);
    table_cell(t, "time");
    table_cell(t, "%.2f s (%.2f s by the replay's clock)", s->seconds, s->clock);
    table_cell(t, "prefill");
    table_cell(t, "%lld tokens, %.0f a second", (long long)s->prefill_tokens,
               replay_rate(s->prefill_tokens, s->prefill_seconds));
    table_cell(t, "decode");
    table_cell(t, "%lld tokens, %.0f a second", (long long)s->decode_tokens,
               replay_rate(s->decode_tokens, s->decode_seconds));
    times_row(t, "time to first token", &s->ttft);
    times_row(t, "time between tokens", &s->itl);
}

static void add_memory(table *t, const replay_options *o, const replay_stats *s)
{
    char bytes[32];
    table_cell(t, "KV blocks at most");
    if (o->no_attention)
        table_cell(t, "%lld of %lld", (long long)s->peak_used, (long long)s->num_blocks);
    else
        table_cell(t, "%lld of %lld (%s)", (long long)s->peak_used, (long long)s->num_blocks,
                   short_bytes(bytes, sizeof bytes, (double)replay_cache_bytes(o, s->peak_used)));
    table_cell(t, "KV memory wasted");
    table_cell(t, "%.2f %% (a contiguous cache: %.1f %%)", 100 * replay_stats_waste(s),
               100 * replay_stats_contiguous_waste(s));
    table_cell(t, "prefix hits");
    table_cell(t, "%.2f %% of prompt tokens", 100 * replay_stats_hit_rate(s));
    table_cell(t, "preemptions");
    table_cell(t, "%lld (%lld by swap)", (long long)s->preemptions, (long long)s->swaps);
    table_cell(t, "cached blocks evicted");
    table_cell(t, "%lld", (long long)s->evictions);
}

static void print_table(const replay_options *o, const replay_stats *s)
{
    double whole = s->attention_seconds + s->engine_seconds;
    table t = {0};
    table_head(&t, 'l', "measure");
    table_head(&t, 'l', "value");
    add_speed(&t, s);
    add_memory(&t, o, s);
    if (!o->no_attention) {
        table_cell(&t, "attention's share of time");
        table_cell(&t, "%.1f %%", whole > 0 ? 100 * s->attention_seconds / whole : 0);
    }
    if (o->verify > 0) {
        table_cell(&t, "rows verified");
        table_cell(&t, "%lld, %lld mismatched", (long long)s->verified_rows,
                   (long long)s->mismatched_rows);
    }
    table_print(&t);
}

static void print_md(const replay_run_info *run)
{
    const replay_stats *s = run->stats;
    if (run->interrupted) printf("interrupted: the summary so far\n\n");
    print_table(run->options, s);
    if (run->options->no_attention)
        printf(
            "\nWithout attention a step takes %.0f ms and %.0f us a token by the replay's clock;\n"
            "latencies and rates follow from that.\n",
            1e3 * REPLAY_STEP_SECONDS, 1e6 * REPLAY_TOKEN_SECONDS);
    else
        printf("\nTokens a second and latencies are of attention and its scheduler only, on\n"
               "%s, backend %s, level %s, %d thread%s.\n",
               s->place.device, s->place.backend, s->place.level, (int)s->place.threads,
               s->place.threads == 1 ? "" : "s");
}

void replay_report(const char *format, const replay_run_info *run)
{
    if (strcmp(format, "json") == 0) print_json(run);
    else if (strcmp(format, "csv") == 0) print_csv(run->stats);
    else print_md(run);
}
