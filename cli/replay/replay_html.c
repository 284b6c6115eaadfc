/* replay_html.c: see replay_html.h. The page is made in memory, then saved whole. */
#define _POSIX_C_SOURCE 200809L
#include "replay/replay_html.h"

#include "base/figures.h"
#include "base/save.h"
#include "replay/replay_report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Watching */

void replay_html_watch(replay_series *series, const replay_options *o, const replay_view *view)
{
    const replay_stats *s = view->stats;
    folio_pool_stats pool = {.struct_size = sizeof pool};
    bool idle = (double)s->steps == series->totals[REPLAY_STEPS]; /* the clock jumped */
    folio_pool_get_stats(view->pool, &pool);
    double levels[REPLAY_LEVELS] = {
        [REPLAY_USED_BLOCKS] = (double)(idle ? pool.num_used : s->last.used_blocks),
        [REPLAY_CACHED_BLOCKS] = (double)(idle ? pool.num_cached : s->last.cached_blocks),
        [REPLAY_RUNNING] = (double)(idle ? 0 : s->last.sequences),
        [REPLAY_DECODING] = (double)(idle ? 0 : s->last.decode_tokens),
        [REPLAY_PAUSED] = (double)view->paused};
    /* Without --speed a request comes when it is admitted. */
    if (!idle && o->speed > 0) levels[REPLAY_WAITING] = (double)view->waiting;
    double totals[REPLAY_COUNTS] = {[REPLAY_STEPS] = (double)s->steps,
                                    [REPLAY_PREFILL] = (double)s->prefill_tokens,
                                    [REPLAY_DECODE] = (double)s->decode_tokens,
                                    [REPLAY_PREEMPTIONS] = (double)s->preemptions,
                                    [REPLAY_ADMITTED_TOKENS] = (double)s->admitted_tokens,
                                    [REPLAY_HIT_TOKENS] = (double)s->hit_tokens};
    replay_series_add(series, view->clock, levels, totals);
}

/* ---- Figures at the top */

static void tile(FILE *out, const char *name, const char *value, const char *more)
{
    fprintf(out, "<div><dt>%s</dt><dd><b>%s</b><span>%s</span></dd></div>\n", name, value, more);
}

static void time_tile(FILE *out, const char *name, const replay_times *t)
{
    char p50[32], p90[32], p99[32], more[96];
    figure_time(p50, sizeof p50, replay_times_at(t, 0.5));
    snprintf(more, sizeof more, "median; <i>p90 %s</i>, <i>p99 %s</i>",
             figure_time(p90, sizeof p90, replay_times_at(t, 0.9)),
             figure_time(p99, sizeof p99, replay_times_at(t, 0.99)));
    tile(out, name, t->count > 0 ? p50 : "\xe2\x80\x93", t->count > 0 ? more : "none came");
}

static void rate_tile(FILE *out, const char *name, int64_t tokens, double seconds)
{
    char value[48], more[64];
    double rate = seconds > 0 ? (double)tokens / seconds : 0;
    figure_grouped(value, sizeof value - 2, rate, 0);
    snprintf(more, sizeof more, "tokens a second; ");
    figure_grouped(more + strlen(more), sizeof more - strlen(more) - 8, (double)tokens, 0);
    strcat(more, " in all");
    tile(out, name, value, more);
}

static void write_tiles(FILE *out, const replay_page *page)
{
    const replay_stats *s = page->stats;
    char value[64], more[128], a[32], b[32], c[32];
    fputs("<dl>\n", out);
    snprintf(more, sizeof more, "of %s, in %s; %s by the replay\xe2\x80\x99s clock",
             figure_grouped(a, sizeof a, (double)s->total_requests, 0),
             figure_time(b, sizeof b, 1e3 * s->seconds), figure_time(c, sizeof c, 1e3 * s->clock));
    tile(out, "Requests served", figure_grouped(value, sizeof value, (double)s->requests, 0), more);
    rate_tile(out, "Prefill", s->prefill_tokens, s->prefill_seconds);
    rate_tile(out, "Decode", s->decode_tokens, s->decode_seconds);
    snprintf(value, sizeof value, "%.1f %%", 100 * replay_stats_hit_rate(s));
    tile(out, "Prefix hits", value, "of prompt tokens were in the cache");
    time_tile(out, "Time to first token", &s->ttft);
    time_tile(out, "Time between tokens", &s->itl);
    snprintf(value, sizeof value, "%.2f %%", 100 * replay_stats_waste(s));
    snprintf(more, sizeof more, "of held blocks; a contiguous cache: %.1f %%",
             100 * replay_stats_contiguous_waste(s));
    tile(out, "KV memory wasted", value, more);
    snprintf(more, sizeof more, "%s by swap", figure_grouped(a, sizeof a, (double)s->swaps, 0));
    tile(out, "Preemptions", figure_grouped(value, sizeof value, (double)s->preemptions, 0),
         s->preemptions == 0 ? "no sequence was preempted"
         : s->swaps > 0      ? more
                             : "all by recompute");
    fputs("</dl>\n", out);
}

/* ---- Plots and their tables */

/* For each size of screen its own drawing, so that text keeps its size. */
static void write_drawings(FILE *out, const replay_plot *plot, const replay_page *page,
                           const char *told)
{
    static const struct {
        const char *css;
        double width, height;
    } sizes[] = {{"wide", 1040, 300}, {"middle", 700, 300}, {"narrow", 358, 300}};
    for (int i = 0; i < 3; i++) {
        char id[32];
        snprintf(id, sizeof id, "%s-%s", plot->id, sizes[i].css);
        svg_plot p = {.out = out,
                      .id = id,
                      .css = sizes[i].css,
                      .over_time = plot->columns[0].name ? plot->id : NULL,
                      .title = plot->title,
                      .desc = told,
                      .width = sizes[i].width,
                      .height = sizes[i].height,
                      .y.label = plot->y_label};
        plot->draw(&p, page);
    }
}

/* Few rows: bins are taken together. */
static void series_table(table *t, const replay_plot *plot, const replay_page *page)
{
    enum { ROWS = 24 };
    const replay_series *s = page->series;
    const replay_unit *unit = replay_unit_of(page);
    int group = (s->num_bins + ROWS - 1) / ROWS;
    char head[32], text[64];
    snprintf(head, sizeof head, "from, %s", unit->name);
    table_head(t, 'r', head);
    for (int c = 0; c < REPLAY_MAX_COLUMNS && plot->columns[c].name; c++)
        table_head(t, 'r', plot->columns[c].name);
    for (int i = 0; i < s->num_bins; i += group) {
        replay_bin bin = replay_series_sum(s, i, i + group);
        replay_bin so_far = replay_series_sum(s, 0, i + group);
        table_cell(t, "%.4g", i * s->width / unit->seconds);
        for (int c = 0; c < REPLAY_MAX_COLUMNS && plot->columns[c].name; c++) {
            double value = plot->columns[c].value(page, &bin, &so_far);
            if (isnan(value)) table_cell(t, "\xe2\x80\x93");
            else
                table_cell(t, "%s",
                           figure_grouped(text, sizeof text, value, plot->columns[c].digits));
        }
    }
}

static void write_plot(FILE *out, const replay_plot *plot, const replay_page *page)
{
    char *told = NULL;
    size_t size;
    table t = {0};
    FILE *words = open_memstream(&told, &size);
    if (words == NULL) abort();
    plot->tell(words, page);
    fclose(words);
    fprintf(out, "<section aria-labelledby=\"%s-h\">\n<h2 id=\"%s-h\">%s</h2>\n<p>", plot->id,
            plot->id, plot->title);
    svg_escape(out, told);
    fputs("</p>\n<figure>\n", out);
    write_drawings(out, plot, page, told);
    fputs("</figure>\n<details><summary>The same as a table</summary>\n"
          "<div class=\"scroll\" tabindex=\"0\">\n",
          out);
    if (plot->columns[0].name) series_table(&t, plot, page);
    else replay_latency_table(&t, page);
    table_print_html(&t, out);
    fputs("</div></details>\n</section>\n", out);
    free(told);
}

/* ---- Figures for the script */

static void write_values(FILE *out, const replay_page *page, const replay_column *column)
{
    const replay_series *s = page->series;
    replay_bin so_far = {0};
    for (int i = 0; i < s->num_bins; i++) {
        for (int k = 0; k < REPLAY_COUNTS; k++) so_far.counts[k] += s->bins[i].counts[k];
        double value = column->value(page, &s->bins[i], &so_far);
        if (i > 0) fputc(',', out);
        if (isnan(value)) fputs("null", out);
        else fprintf(out, "%.*f", column->digits, value);
    }
}

static void write_data(FILE *out, const replay_page *page)
{
    const replay_series *s = page->series;
    const replay_unit *unit = replay_unit_of(page);
    fprintf(out,
            "<script type=\"application/json\" id=\"data\">\n"
            "{\"unit\":\"%s\",\"width\":%.9g,\"end\":%.9g,\"count\":%d,\"plots\":{",
            unit->name, s->width / unit->seconds, s->clock / unit->seconds, s->num_bins);
    for (int i = 0; i < REPLAY_NUM_PLOTS; i++) {
        const replay_column *columns = replay_plots[i].columns;
        if (columns[0].name == NULL) continue;
        fprintf(out, "%s\n\"%s\":[", i > 0 ? "," : "", replay_plots[i].id);
        for (int c = 0; c < REPLAY_MAX_COLUMNS && columns[c].name; c++) {
            fprintf(out, "%s\n{\"name\":\"%s\",\"values\":[", c > 0 ? "," : "", columns[c].name);
            write_values(out, page, &columns[c]);
            fputs("]}", out);
        }
        fputc(']', out);
    }
    fputs("}}\n</script>\n", out);
}

/* ---- The page */

/* Machine and command line: what it takes to repeat the run. */
static void write_place(FILE *out, const replay_page *page)
{
    const replay_place *at = &page->stats->place;
    fputs("<p class=\"lines\">", out);
    svg_escape(out, at->device);
    if (page->o->no_attention) fputs("; no attention ran, so no backend", out);
    else
        fprintf(out, "; backend %s, level %s, %d thread%s", at->backend, at->level,
                (int)at->threads, at->threads == 1 ? "" : "s");
    fputs("\n<code>", out);
    svg_escape(out, page->command);
    fputs("</code></p>\n", out);
    if (!page->o->no_attention)
        fputs("<p class=\"note\">Tokens a second and latencies are of attention and its scheduler "
              "only: a model\xe2\x80\x99s other layers would take time too.</p>\n",
              out);
}

static void write_head(FILE *out, const replay_page *page)
{
    char *settings = NULL, a[32], b[32], c[32];
    size_t size;
    FILE *words = open_memstream(&settings, &size);
    if (words == NULL) abort();
    replay_report_settings(words, page->o);
    fclose(words);
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
          "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
          "<meta name=\"color-scheme\" content=\"light dark\">\n<title>Replay: ",
          out);
    svg_escape(out, page->trace->name);
    fputs("</title>\n<style>\n", out);
    svg_style(out);
    fprintf(out, "%s</style>\n</head>\n<body>\n<header>\n<h1>Replay <span>", replay_html_style);
    svg_escape(out, page->trace->name);
    fprintf(
        out,
        "</span></h1>\n<p class=\"lines\">%s requests, %s prompt tokens, %s tokens of answers\n",
        figure_grouped(a, sizeof a, (double)page->trace->num_requests, 0),
        figure_grouped(b, sizeof b, (double)page->trace->prompt_tokens, 0),
        figure_grouped(c, sizeof c, (double)page->trace->output_tokens, 0));
    svg_escape(out, settings);
    fputs("</p>\n", out);
    write_place(out, page);
    if (page->stopped)
        fprintf(out, "<p class=\"note\">Interrupted: these are the figures so far.</p>\n");
    if (page->stats->mismatched_rows > 0)
        fprintf(out, "<p class=\"note\">%s verified rows were wrong.</p>\n",
                figure_grouped(a, sizeof a, (double)page->stats->mismatched_rows, 0));
    fputs("</header>\n<main>\n", out);
    free(settings);
}

static void write_foot(FILE *out, const replay_page *page)
{
    table t = {0};
    fputs("<section aria-labelledby=\"all-h\">\n<h2 id=\"all-h\">Summary</h2>\n"
          "<div class=\"scroll\" tabindex=\"0\">\n",
          out);
    replay_report_table(&t, page->o, page->stats);
    table_print_html(&t, out);
    fputs("</div>\n</section>\n</main>\n<footer>\n<p>", out);
    if (page->o->no_attention)
        fprintf(
            out,
            "Without attention a step takes %.0f ms and %.0f us a token by the replay\xe2\x80\x99s "
            "clock; latencies and rates follow from that. ",
            1e3 * REPLAY_STEP_SECONDS, 1e6 * REPLAY_TOKEN_SECONDS);
    else
        fputs(
            "The replay\xe2\x80\x99s clock runs while the engine schedules and attends; times with "
            "nothing to do are skipped. ",
            out);
    fprintf(out,
            "Plots over time show means of intervals.</p>\n<p>Written by folio %s, <code>folio "
            "replay --report</code>.</p>\n</footer>\n",
            folio_version());
    write_data(out, page);
    fprintf(out, "<script>\n%s</script>\n</body>\n</html>\n", replay_html_script);
}

bool replay_html_save(const char *path, const replay_page *page)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) abort();
    write_head(out, page);
    write_tiles(out, page);
    for (int i = 0; i < REPLAY_NUM_PLOTS; i++) write_plot(out, &replay_plots[i], page);
    write_foot(out, page);
    if (fclose(out) != 0) abort();
    bool saved = save_file("folio replay", path, text, size);
    free(text);
    return saved;
}
