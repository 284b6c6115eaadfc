/*
 * replay_report.c: a replay's summary as Markdown, CSV or JSON.
 *
 * The JSON's schema, which scripts may rely on (times in ms but for "seconds"; shares in [0, 1]):
 *
 *     {"requests", "prefill_tokens", "decode_tokens", "seconds",
 *      "ttft_ms": {"p50", "p90", "p99"}, "itl_ms": {"p50", "p90", "p99"},
 *      "kv": {"blocks", "peak_used", "waste_share"},
 *      "prefix_hit_rate", "preemptions", "verified_rows", "mismatched_rows"}
 */
#include "replay/replay_report.h"

#include "base/figures.h"
#include "base/json.h"
#include "base/term.h"
#include "replay/replay_engine.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    double share;
} percentiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}};

static double rate(int64_t count, double seconds)
{
    return seconds > 0 ? (double)count / seconds : 0;
}

/* ---- JSON and CSV */

static void json_times(json *j, const char *key, const replay_times *t)
{
    json_object(j, key);
    for (int i = 0; i < 3; i++)
        json_number(j, percentiles[i].name, replay_times_at(t, percentiles[i].share));
    json_close(j);
}

static void print_json(const replay_stats *s)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_integer(&j, "requests", s->requests);
    json_integer(&j, "prefill_tokens", s->prefill_tokens);
    json_integer(&j, "decode_tokens", s->decode_tokens);
    json_number(&j, "seconds", s->seconds);
    json_times(&j, "ttft_ms", &s->ttft);
    json_times(&j, "itl_ms", &s->itl);
    json_object(&j, "kv");
    json_integer(&j, "blocks", s->num_blocks);
    json_integer(&j, "peak_used", s->peak_used);
    json_number(&j, "waste_share", replay_stats_waste(s));
    json_close(&j);
    json_number(&j, "prefix_hit_rate", replay_stats_hit_rate(s));
    json_integer(&j, "preemptions", s->preemptions);
    json_integer(&j, "verified_rows", s->verified_rows);
    json_integer(&j, "mismatched_rows", s->mismatched_rows);
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

static double cache_bytes(const replay_options *o, int64_t blocks)
{
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = blocks, .num_layers = o->layers,
                   .block_size = o->block_size, .num_kv_heads = o->kv_heads,
                   .k_head_size = o->head_size, .dtype = o->kv_dtype);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    if (blocks == 0 || folio_kv_cache_get_shape(o->backend, &desc, &shape) != FOLIO_OK) return 0;
    return (double)shape.total_bytes;
}

void replay_report_settings(FILE *out, const replay_options *o)
{
    char bytes[32];
    fprintf(out, "%lld blocks of %d tokens", (long long)o->num_blocks, (int)o->block_size);
    if (o->no_attention) fprintf(out, ", no attention");
    else
        fprintf(out, " (%s of %s), %d layer%s, heads %d:%d of %d, backend %s",
                short_bytes(bytes, sizeof bytes, cache_bytes(o, o->num_blocks)),
                folio_dtype_name(o->kv_dtype), (int)o->layers, o->layers == 1 ? "" : "s",
                (int)o->heads, (int)o->kv_heads, (int)o->head_size, o->backend);
    if (o->window > 0) fprintf(out, ", window %lld", (long long)o->window);
    fprintf(out, "\nup to %lld sequences, %lld tokens a step, %s first, preemption by %s, ",
            (long long)o->max_seqs, (long long)o->budget, o->prefill_first ? "prefill" : "decode",
            o->swap ? "swap" : "recompute");
    if (o->speed > 0) fprintf(out, "arrivals at speed %g\n", o->speed);
    else fprintf(out, "as fast as possible\n");
}

void replay_report_head(const replay_options *o, const replay_trace *t)
{
    printf("%sfolio replay%s: %s, %lld requests, %lld prompt tokens, %lld of answers\n",
           term_start(TERM_BOLD), term_end(), t->name, (long long)t->num_requests,
           (long long)t->prompt_tokens, (long long)t->output_tokens);
    replay_report_settings(stdout, o);
    printf("\n");
    fflush(stdout);
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
        figure_time(text[i], sizeof text[i], replay_times_at(times, percentiles[i].share));
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
               rate(s->prefill_tokens, s->prefill_seconds));
    table_cell(t, "decode");
    table_cell(t, "%lld tokens, %.0f a second", (long long)s->decode_tokens,
               rate(s->decode_tokens, s->decode_seconds));
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
                   short_bytes(bytes, sizeof bytes, cache_bytes(o, s->peak_used)));
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

void replay_report_table(table *t, const replay_options *o, const replay_stats *s)
{
    double whole = s->attention_seconds + s->engine_seconds;
    table_head(t, 'l', "measure");
    table_head(t, 'l', "value");
    add_speed(t, s);
    add_memory(t, o, s);
    if (!o->no_attention) {
        table_cell(t, "attention's share of time");
        table_cell(t, "%.1f %%", whole > 0 ? 100 * s->attention_seconds / whole : 0);
    }
    if (o->verify > 0) {
        table_cell(t, "rows verified");
        table_cell(t, "%lld, %lld mismatched", (long long)s->verified_rows,
                   (long long)s->mismatched_rows);
    }
}

static void print_md(const replay_options *o, const replay_stats *s, bool stopped)
{
    table t = {0};
    if (stopped) printf("interrupted: the summary so far\n\n");
    replay_report_table(&t, o, s);
    table_print(&t);
    if (o->no_attention)
        printf(
            "\nWithout attention a step takes %.0f ms and %.0f us a token by the replay's clock;\n"
            "latencies and rates follow from that.\n",
            1e3 * REPLAY_STEP_SECONDS, 1e6 * REPLAY_TOKEN_SECONDS);
    else
        printf("\nTokens a second and latencies are of attention and its scheduler only, on %s,\n"
               "backend %s, level %s, %d thread%s.\n",
               s->place.device, s->place.backend, s->place.level, (int)s->place.threads,
               s->place.threads == 1 ? "" : "s");
}

void replay_report(const char *format, const replay_options *o, const replay_stats *s, bool stopped)
{
    if (strcmp(format, "json") == 0) print_json(s);
    else if (strcmp(format, "csv") == 0) print_csv(s);
    else print_md(o, s, stopped);
}
