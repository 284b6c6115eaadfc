/* bench_roofline.c: see bench_roofline.h. */
#include "bench/bench_roofline.h"

#include "bench/bench.h"
#include "bench/bench_ceilings.h"
#include "plot/svg.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDTH = 860,
    HEIGHT = 560,
    MAX_TEXT = 300,
    LETTER = 7,
    LABEL = 14
}; /* px; a label's height */

/* ---- Points */

typedef struct point {
    const saved_case *of;
    double x, y; /* FLOP per byte, GFLOP/s */
    char label[MAX_TEXT];
} point;

typedef struct roofline {
    svg_plot plot;
    const saved_run *run;
    const comparison *with;
    point *points;
    int num_points;
    double unit; /* of the y axis, in GFLOP/s */
    double read; /* GB/s */
    double compute
        [BENCH_NUM_CEILINGS]; /* GFLOP/s of those that are some case's ceiling; NAN: no one's */
    char legend[SVG_MAX_ENTRIES][MAX_TEXT];
    int num_legend;
} roofline;

static bool place(const saved_case *c, double *x, double *y)
{
    double gflops = json_real(c->of, "gflops"), gbps = json_real(c->of, "gbps");
    *x = gflops / gbps;
    *y = gflops;
    return gflops > 0 && gbps > 0 && isfinite(*x) && *x > 0;
}

static void find_points(roofline *r)
{
    char name[MAX_TEXT];
    r->points = bench_alloc(r->run->num_cases, sizeof *r->points);
    for (int i = 0; i < r->run->num_cases; i++) {
        point *p = &r->points[r->num_points];
        p->of = &r->run->cases[i];
        if (!place(p->of, &p->x, &p->y)) continue;
        saved_name(p->of, r->run, NULL, false, name, sizeof name);
        snprintf(p->label, sizeof p->label, "%.63s%s%.200s", json_text(p->of->of, "case"),
                 name[0] ? ", " : "", name);
        r->num_points++;
    }
}

/* ---- Ceilings */

static void find_ceilings(roofline *r)
{
    const json_value *all = json_member(r->run->tree, "ceilings");
    r->read = json_real(all, bench_ceiling_key(BENCH_READ));
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) {
        const char *key = bench_ceiling_key((bench_ceiling)k);
        r->compute[k] = (double)NAN;
        if (k == BENCH_READ) continue;
        for (int i = 0; i < r->num_points; i++)
            if (strcmp(r->points[i].of->ceiling, key) == 0) r->compute[k] = json_real(all, key);
    }
}

/* The highest arithmetic: NAN where no case has such a ceiling. */
static double roof(const roofline *r)
{
    double most = (double)NAN;
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) most = fmax(most, r->compute[k]);
    return most;
}

/* ---- Axes and legend */

static void widen(svg_axis *axis, double value)
{
    if (!(value > 0) || !isfinite(value)) return;
    axis->min = axis->min > 0 ? fmin(axis->min, value) : value;
    axis->max = fmax(axis->max, value);
}

static void set_axes(roofline *r)
{
    svg_plot *p = &r->plot;
    double top = roof(r);
    for (int i = 0; i < r->num_points; i++) {
        widen(&p->x, r->points[i].x);
        widen(&p->y, r->points[i].y);
        widen(&p->y, fmin(r->read * r->points[i].x, isnan(top) ? INFINITY : top));
    }
    for (int i = 0; r->with && i < r->with->num_pairs; i++) {
        double x, y;
        if (place(r->with->pairs[i].before, &x, &y)) widen(&p->x, x), widen(&p->y, y);
    }
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) {
        widen(&p->y, r->compute[k]);
        widen(&p->x, r->compute[k] / r->read); /* where the roof bends */
    }
    r->unit = p->y.max >= 1e4 ? 1e3 : 1;
    p->x = (svg_axis){.label = "FLOP per byte of K and V, each byte counted once",
                      .min = p->x.min / 2.5,
                      .max = p->x.max * 5, /* room for labels */
                      .scale = SVG_LOG};
    p->y = (svg_axis){.label = r->unit > 1 ? "TFLOP/s" : "GFLOP/s",
                      .min = p->y.min / 2 / r->unit,
                      .max = p->y.max * 1.6 / r->unit,
                      .scale = SVG_LOG};
}

static void add_legend(roofline *r, const char *css, svg_mark mark, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void add_legend(roofline *r, const char *css, svg_mark mark, const char *format, ...)
{
    va_list args;
    if (r->num_legend == SVG_MAX_ENTRIES) return;
    va_start(args, format);
    vsnprintf(r->legend[r->num_legend], MAX_TEXT, format, args);
    va_end(args);
    r->plot.legend[r->num_legend] = (svg_entry){css, mark, r->legend[r->num_legend]};
    r->num_legend++;
}

/* The types of q have a colour each; the line of a ceiling that of those it bounds, as far as there is one. */
static const struct {
    const char *dtype, *css;
} types[] = {{"f32", "c1"}, {"bf16", "c2"}, {"f16", "c3"}};
enum { NUM_TYPES = sizeof types / sizeof types[0] };

static const char *const compute_css[BENCH_NUM_CEILINGS] = {
    [BENCH_FMA_F32] = "c1", [BENCH_DOT_BF16] = "c2", [BENCH_DOT_INT8] = "c5", [BENCH_READ] = "c4"};

static const char *type_css(const saved_case *c)
{
    for (int i = 0; i < NUM_TYPES; i++)
        if (strcmp(json_text(c->of, "dtype"), types[i].dtype) == 0) return types[i].css;
    return "c6";
}

static void set_legend(roofline *r)
{
    if (r->read > 0)
        add_legend(r, compute_css[BENCH_READ], SVG_MARK_LINE, "memory read: %.4g GB/s", r->read);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        if (r->compute[k] > 0)
            add_legend(
                r, compute_css[k], SVG_MARK_LINE, "%s: %.4g %sFLOP/s",
                bench_ceiling_name(json_text(r->points[0].of->of, "backend"), (bench_ceiling)k),
                r->compute[k] / r->unit, r->unit > 1 ? "T" : "G");
    for (int t = 0; t < NUM_TYPES; t++)
        for (int i = 0; i < r->num_points; i++)
            if (strcmp(type_css(r->points[i].of), types[t].css) == 0) {
                add_legend(r, types[t].css, SVG_MARK_POINT, "%s queries", types[t].dtype);
                break;
            }
    if (r->with) add_legend(r, "quiet", SVG_MARK_POINT, "before");
}

/* ---- Drawing */

static void draw_roof(const roofline *r)
{
    const svg_plot *p = &r->plot;
    double top = roof(r);
    if (r->read > 0) { /* y = read * x, up to the highest arithmetic */
        double end = isnan(top) ? p->x.max : fmin(p->x.max, top / r->read);
        const double x[] = {p->x.min, end},
                     y[] = {r->read * p->x.min / r->unit, r->read * end / r->unit};
        svg_line(p, compute_css[BENCH_READ], x, y, 2);
    }
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) {
        if (!(r->compute[k] > 0)) continue;
        double from = r->read > 0 ? fmax(p->x.min, r->compute[k] / r->read) : p->x.min;
        const double x[] = {from, p->x.max},
                     y[] = {r->compute[k] / r->unit, r->compute[k] / r->unit};
        svg_line(p, compute_css[k], x, y, 2);
    }
}

static void draw_before(const roofline *r)
{
    const svg_plot *p = &r->plot;
    for (int i = 0; r->with && i < r->with->num_pairs; i++) {
        double x[2], y[2];
        if (!place(r->with->pairs[i].before, &x[0], &y[0]) ||
            !place(r->with->pairs[i].now, &x[1], &y[1]))
            continue;
        y[0] /= r->unit;
        y[1] /= r->unit;
        svg_line(p, "quiet thin", x, y, 2);
        svg_points(p, "quiet", x, y, 1, 4);
    }
}

/* What a pointer over it shows: more than a label has room for. */
static void draw_point(const roofline *r, const point *p)
{
    FILE *out = r->plot.out;
    char text[MAX_TEXT + 160];
    double y = p->y / r->unit;
    int used = snprintf(text, sizeof text, "%s: %.4g %s, %.4g GB/s", p->label, y, r->plot.y.label,
                        json_real(p->of->of, "gbps"));
    if (p->of->share > 0)
        snprintf(text + used, sizeof text - (size_t)used, ", %.0f %% of its ceiling",
                 100 * p->of->share);
    fputs("<g><title>", out);
    svg_escape(out, text);
    fputs("</title>", out);
    svg_points(&r->plot, type_css(p->of), &p->x, &y, 1, 5);
    fputs("</g>\n", out);
}

/* ---- Labels: each at the first place near its point that is free */

typedef struct box {
    double left, top, right, bottom;
} box;

typedef struct boxes {
    box *of;
    int count;
} boxes;

static bool overlap(const box *a, const box *b)
{
    return a->left < b->right && b->left < a->right && a->top < b->bottom && b->top < a->bottom;
}

static bool is_free(const roofline *r, const boxes *taken, const box *b)
{
    const svg_plot *p = &r->plot;
    if (b->left < p->left || b->right > p->width || b->top < p->top || b->bottom > p->bottom)
        return false;
    for (int i = 0; i < taken->count; i++)
        if (overlap(&taken->of[i], b)) return false;
    return true;
}

/* Right of its point, level with it or ever further below and above; else left of it: there is the roof. */
static void draw_label(const roofline *r, boxes *taken, const point *of)
{
    enum { TRIES = 26, BESIDE = 10 };
    const svg_plot *p = &r->plot;
    double x = svg_x(p, of->x), y = svg_y(p, of->y / r->unit);
    double width = svg_text_width(of->label);
    for (int i = 0; i < TRIES; i++) {
        bool left = i >= TRIES / 2;
        int turn = i % (TRIES / 2),
            step = turn % 2 ? -(turn / 2 + 1) : turn / 2; /* 0, -1, 1, ... */
        double beside = BESIDE + (step ? 6 : 0), middle = y - step * LABEL;
        box b = {left ? x - beside - width : x + beside, middle - LABEL / 2.0,
                 left ? x - beside : x + beside + width, middle + LABEL / 2.0};
        if (!is_free(r, taken, &b)) continue;
        taken->of[taken->count++] = b;
        if (step != 0)
            fprintf(p->out, "<path class=\"grid\" d=\"M%.1f %.1fL%.1f %.1f\"/>", x, y,
                    left ? b.right + 2 : b.left - 2, middle);
        svg_text(p, "", left ? b.right : b.left, middle + 4, left ? "end" : "start", of->label);
        return;
    }
}

/* Where a point is, no label is. */
static void keep_free(const svg_plot *p, boxes *taken, double x, double y)
{
    double left = svg_x(p, x), top = svg_y(p, y);
    taken->of[taken->count++] = (box){left - 6, top - 6, left + 6, top + 6};
}

static void draw_points(const roofline *r)
{
    const svg_plot *p = &r->plot;
    int before = r->with ? r->with->num_pairs : 0;
    boxes taken = {bench_alloc(2 * r->num_points + before, sizeof(box)), 0};
    for (int i = 0; i < r->num_points; i++)
        keep_free(p, &taken, r->points[i].x, r->points[i].y / r->unit);
    for (int i = 0; i < before; i++) {
        double x, y;
        if (place(r->with->pairs[i].before, &x, &y)) keep_free(p, &taken, x, y / r->unit);
    }
    for (int i = 0; i < r->num_points; i++) draw_label(r, &taken, &r->points[i]);
    for (int i = 0; i < r->num_points; i++) draw_point(r, &r->points[i]);
    free(taken.of);
}

bool roofline_write(FILE *out, const saved_run *run, const comparison *with)
{
    char title[MAX_TEXT];
    roofline r = {.run = run, .with = with};
    find_points(&r);
    find_ceilings(&r);
    snprintf(title, sizeof title, "folio %.30s bench: %.100s", run->version,
             run->device[0] ? run->device : run->cpu);
    r.plot.out = out;
    r.plot.alone = true;
    r.plot.width = WIDTH;
    r.plot.height = HEIGHT;
    r.plot.title = title;
    r.plot.desc =
        "A roofline: measured cases as points under the machine's measured ceilings, the best "
        "of the whole run.";
    set_axes(&r);
    if (r.num_points > 0) {
        set_legend(&r);
        svg_begin(&r.plot);
        draw_roof(&r);
        draw_before(&r);
        draw_points(&r);
        svg_end(&r.plot);
    }
    free(r.points);
    return r.num_points > 0;
}
