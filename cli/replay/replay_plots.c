/* replay_plots.c: plots over the replay's clock; see replay_plots.h. */
#include "replay/replay_plots.h"

#include "base/figures.h"

#include <math.h>
#include <string.h>

enum { WINDOWS = 64 }; /* of the hit rate: a bin often has no more than one request */

const replay_unit *replay_unit_of(const replay_page *page)
{
    static const replay_unit units[] = {{1e-3, 0.5, "ms", "milliseconds"},
                                        {1, 180, "s", "seconds"},
                                        {60, 10800, "min", "minutes"},
                                        {3600, INFINITY, "h", "hours"}};
    int i = 0;
    while (i < 3 && page->series->clock >= units[i].up_to) i++;
    return &units[i];
}

/* ---- Columns */

static double per_step(const replay_bin *b, replay_count count)
{
    return b->counts[REPLAY_STEPS] > 0 ? b->counts[count] / b->counts[REPLAY_STEPS] : 0;
}

static double hit_percent(const replay_bin *b)
{
    return b->counts[REPLAY_ADMITTED_TOKENS] > 0
               ? 100 * b->counts[REPLAY_HIT_TOKENS] / b->counts[REPLAY_ADMITTED_TOKENS]
               : NAN;
}

#define COLUMN(name, formula)                                                                      \
    static double name(const replay_page *page, const replay_bin *b, const replay_bin *so_far)     \
    {                                                                                              \
        (void)page, (void)b, (void)so_far;                                                         \
        return formula;                                                                            \
    }
COLUMN(used, replay_bin_level(b, REPLAY_USED_BLOCKS))
COLUMN(cached, replay_bin_level(b, REPLAY_CACHED_BLOCKS))
COLUMN(unused,
       fmax(0, (double)page->o->num_blocks - used(page, b, so_far) - cached(page, b, so_far)))
COLUMN(preemptions, b->counts[REPLAY_PREEMPTIONS])
COLUMN(decode, per_step(b, REPLAY_DECODE))
COLUMN(prefill, per_step(b, REPLAY_PREFILL))
COLUMN(steps, b->counts[REPLAY_STEPS])
COLUMN(running, replay_bin_level(b, REPLAY_RUNNING))
COLUMN(decoding, replay_bin_level(b, REPLAY_DECODING))
COLUMN(paused, replay_bin_level(b, REPLAY_PAUSED))
COLUMN(waiting, replay_bin_level(b, REPLAY_WAITING))
COLUMN(hit_rate, hit_percent(b))
COLUMN(hit_rate_so_far, hit_percent(so_far))
COLUMN(admitted, b->counts[REPLAY_ADMITTED_TOKENS])
COLUMN(found, b->counts[REPLAY_HIT_TOKENS])
#undef COLUMN

/* ---- Drawing */

/* Bins of `group` each, as edges by the page's unit and values. */
typedef struct curve {
    int n;
    double x[REPLAY_BINS + 1], y[REPLAY_BINS];
} curve;

static void take(curve *c, const replay_page *page, int group,
                 double (*value)(const replay_page *, const replay_bin *, const replay_bin *))
{
    const replay_series *s = page->series;
    double unit = replay_unit_of(page)->seconds;
    replay_bin so_far = {0};
    if (group < 1) group = 1;
    for (c->n = 0; c->n * group < s->num_bins; c->n++) {
        int first = c->n * group;
        replay_bin bin = replay_series_sum(s, first, first + group);
        so_far.counts[REPLAY_ADMITTED_TOKENS] += bin.counts[REPLAY_ADMITTED_TOKENS];
        so_far.counts[REPLAY_HIT_TOKENS] += bin.counts[REPLAY_HIT_TOKENS];
        c->x[c->n] = first * s->width / unit;
        c->y[c->n] = value(page, &bin, &so_far);
    }
    c->x[c->n] = s->clock / unit;
}

/* Bins that are drawn as one, so that each is 2 px wide. */
static int detail(const svg_plot *p, const replay_page *page)
{
    return (int)ceil(page->series->num_bins / fmax(p->width - 80, 1) * 2);
}

static void pile(curve *top, const curve *below)
{
    for (int i = 0; i < top->n; i++) top->y[i] += below->y[i];
}

static double highest(const curve *c)
{
    double most = 0;
    for (int i = 0; i < c->n; i++) most = fmax(most, c->y[i]);
    return most;
}

static void begin_over_time(svg_plot *p, const replay_page *page, double max)
{
    char label[64];
    snprintf(label, sizeof label, "%s by the replay's clock", replay_unit_of(page)->names);
    p->x.label = label;
    p->x.max = page->series->clock > 0 ? page->series->clock / replay_unit_of(page)->seconds : 1;
    p->y.max = max;
    svg_begin(p);
    p->x.label = NULL;
}

/* Bars in the strip above the area, wide enough to be seen. */
static void draw_preemptions(const svg_plot *p, const replay_page *page)
{
    static curve c;
    double low[REPLAY_BINS], px = (p->right - p->left) / (page->series->num_bins + 1);
    double a_px = p->y.max / (p->bottom - p->top);
    take(&c, page, (int)ceil(4 / px), preemptions);
    double most = highest(&c);
    for (int i = 0; i < c.n; i++) {
        double height = 4 + (p->strip - 6) * c.y[i] / fmax(most, 1);
        low[i] = p->y.max + 3 * a_px;
        c.y[i] = c.y[i] > 0 ? low[i] + height * a_px : NAN;
    }
    svg_step_area(p, "c6 full", c.x, low, c.y, c.n);
}

static void draw_kv(svg_plot *p, const replay_page *page)
{
    static curve held, all;
    const svg_entry legend[] = {{"c1 half", SVG_MARK_AREA, "held by sequences"},
                                {"c5", SVG_MARK_AREA, "cached, reusable"},
                                {"quiet dash", SVG_MARK_LINE, "capacity"},
                                {"c6 full", SVG_MARK_AREA, "preemptions"}};
    bool any = page->stats->preemptions > 0;
    memcpy(p->legend, legend, sizeof legend);
    if (any) p->strip = 22;
    else p->legend[3].text = NULL;
    take(&held, page, detail(p, page), used);
    take(&all, page, detail(p, page), cached);
    pile(&all, &held);
    /* A pool that is far too large would hide what is used of it. */
    double blocks = (double)page->o->num_blocks, most = highest(&all);
    if (most < 0.4 * blocks) p->legend[2].text = "capacity, far above";
    begin_over_time(p, page, most < 0.4 * blocks ? fmax(most, 1) * 1.2 : blocks * 1.02);
    svg_step_area(p, "c5", all.x, held.y, all.y, all.n);
    svg_step_area(p, "c1 half", held.x, NULL, held.y, held.n);
    svg_steps(p, "c1 thin", held.x, held.y, held.n);
    svg_rule(p, "quiet dash", blocks);
    if (any) draw_preemptions(p, page);
    svg_end(p);
}

static void draw_batch(svg_plot *p, const replay_page *page)
{
    static curve decodes, all;
    const svg_entry legend[] = {{"c3 half", SVG_MARK_AREA, "decode"},
                                {"c2", SVG_MARK_AREA, "prefill"},
                                {"quiet dash", SVG_MARK_LINE, "budget"}};
    memcpy(p->legend, legend, sizeof legend);
    take(&decodes, page, detail(p, page), decode);
    take(&all, page, detail(p, page), prefill);
    pile(&all, &decodes);
    begin_over_time(p, page, (double)page->o->budget * 1.02);
    svg_step_area(p, "c2", all.x, decodes.y, all.y, all.n);
    svg_step_area(p, "c3 half", decodes.x, NULL, decodes.y, decodes.n);
    svg_rule(p, "quiet dash", (double)page->o->budget);
    svg_end(p);
}

static void draw_sequences(svg_plot *p, const replay_page *page)
{
    static curve c[4]; /* what lies at the back first */
    const struct {
        svg_entry entry;
        double (*value)(const replay_page *, const replay_bin *, const replay_bin *);
        bool shown;
    } list[] = {{{"c3", SVG_MARK_AREA, "decoding"}, decoding, true},
                {{"c2", SVG_MARK_LINE, "waiting to be admitted"}, waiting, page->o->speed > 0},
                {{"c6 dash", SVG_MARK_LINE, "preempted"}, paused, page->stats->preemptions > 0},
                {{"c1", SVG_MARK_LINE, "running"}, running, true}};
    double most = 1;
    int entries = 0;
    for (int i = 3; i >= 0; i--) {
        take(&c[i], page, detail(p, page), list[i].value);
        if (list[i].shown) {
            most = fmax(most, highest(&c[i]));
            p->legend[entries++] = list[i].entry;
        }
    }
    begin_over_time(p, page, most * 1.05);
    for (int i = 0; i < 4; i++) {
        if (!list[i].shown) continue;
        if (list[i].entry.mark == SVG_MARK_AREA)
            svg_step_area(p, list[i].entry.css, c[i].x, NULL, c[i].y, c[i].n);
        else svg_steps(p, list[i].entry.css, c[i].x, c[i].y, c[i].n);
    }
    svg_end(p);
}

static void draw_hits(svg_plot *p, const replay_page *page)
{
    static curve window, so_far;
    const svg_entry legend[] = {{"c3", SVG_MARK_LINE, "so far"},
                                {"c5", SVG_MARK_AREA, "in the interval"}};
    int group = (page->series->num_bins + WINDOWS - 1) / WINDOWS;
    memcpy(p->legend, legend, sizeof legend);
    p->y.unit = " %";
    take(&window, page, group, hit_rate);
    take(&so_far, page, detail(p, page), hit_rate_so_far);
    begin_over_time(p, page, fmin(100, fmax(10, 1.15 * fmax(highest(&window), highest(&so_far)))));
    svg_step_area(p, "c5", window.x, NULL, window.y, window.n);
    svg_steps(p, "c3", so_far.x, so_far.y, so_far.n);
    svg_end(p);
}

/* ---- What came out, in words */

static void tell_kv(FILE *out, const replay_page *page)
{
    const replay_stats *s = page->stats;
    char a[32], b[32], c[32];
    fprintf(out, "At most %s of %s blocks were held at once (%.0f %%). ",
            figure_grouped(a, sizeof a, (double)s->peak_used, 0),
            figure_grouped(b, sizeof b, (double)s->num_blocks, 0),
            s->num_blocks > 0 ? 100.0 * (double)s->peak_used / (double)s->num_blocks : 0);
    if (s->preemptions == 0) fprintf(out, "No sequence was preempted.");
    else
        fprintf(out, "If blocks ran out, a sequence was preempted: %s time%s.",
                figure_grouped(c, sizeof c, (double)s->preemptions, 0),
                s->preemptions == 1 ? "" : "s");
}

static void tell_batch(FILE *out, const replay_page *page)
{
    const replay_stats *s = page->stats;
    double each = s->steps > 0 ? 1.0 / (double)s->steps : 0;
    char a[32];
    fprintf(out,
            "%s steps; the mean one had %.0f tokens of prompts and %.0f of answers, of a budget of "
            "%lld.",
            figure_grouped(a, sizeof a, (double)s->steps, 0), (double)s->prefill_tokens * each,
            (double)s->decode_tokens * each, (long long)page->o->budget);
}

static void tell_sequences(FILE *out, const replay_page *page)
{
    const replay_series *s = page->series;
    replay_bin all = replay_series_sum(s, 0, s->num_bins);
    fprintf(out, "%.1f sequences ran at a time, on average; the limit is %lld. ",
            replay_bin_level(&all, REPLAY_RUNNING), (long long)page->o->max_seqs);
    if (page->o->speed > 0)
        fprintf(out,
                "Requests arrived at their timestamps; %.1f waited to be admitted, on average.",
                replay_bin_level(&all, REPLAY_WAITING));
    else fprintf(out, "A request arrived whenever it could be admitted.");
}

static void tell_hits(FILE *out, const replay_page *page)
{
    const replay_stats *s = page->stats;
    char a[32], b[32];
    fprintf(
        out,
        "%s of %s prompt tokens (%.1f %%) were in the cache when their request was admitted, and "
        "were not computed.",
        figure_grouped(a, sizeof a, (double)s->hit_tokens, 0),
        figure_grouped(b, sizeof b, (double)s->admitted_tokens, 0), 100 * replay_stats_hit_rate(s));
}

/* ---- The list */

const replay_plot replay_plots[REPLAY_NUM_PLOTS] = {
    {"kv",
     "KV blocks",
     "blocks",
     tell_kv,
     draw_kv,
     {{"held", 0, used},
      {"cached", 0, cached},
      {"free", 0, unused},
      {"preemptions", 0, preemptions}}},
    {"batch",
     "What a step computes",
     "tokens a step",
     tell_batch,
     draw_batch,
     {{"prefill tokens a step", 1, prefill},
      {"decode tokens a step", 1, decode},
      {"steps", 0, steps}}},
    {"sequences",
     "Sequences",
     "sequences",
     tell_sequences,
     draw_sequences,
     {{"running", 1, running},
      {"decoding", 1, decoding},
      {"preempted", 1, paused},
      {"waiting", 1, waiting}}},
    {"hits",
     "Prefix hits",
     "share of prompt tokens found in the cache",
     tell_hits,
     draw_hits,
     {{"prompt tokens", 0, admitted},
      {"found", 0, found},
      {"rate, %", 1, hit_rate},
      {"so far, %", 1, hit_rate_so_far}}},
    {.id = "latency",
     .title = "Latencies",
     .y_label = "time, logarithmic",
     .tell = replay_latency_tell,
     .draw = replay_latency_draw},
};
