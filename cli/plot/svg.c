/* svg.c: see svg.h. Coordinates are written to a tenth of a px. */
#include "plot/svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 18, TICK_LINE = 20 }; /* px of a line of text */

static void number(FILE *out, double value)
{
    char text[32];
    if (!(fabs(value) < 1e6)) value = value > 0 ? 1e6 : -1e6;
    int n = snprintf(text, sizeof text, "%.1f", value);
    if (n > 2 && text[n - 1] == '0') text[n - 2] = '\0';
    fputs(strcmp(text, "-0") == 0 ? "0" : text, out);
}

static void attribute(FILE *out, const char *name, double value)
{
    fprintf(out, " %s=\"", name);
    number(out, value);
    fputc('"', out);
}

/* ---- Scales */

static double share_of(const svg_axis *axis, double value)
{
    if (axis->scale == SVG_LINEAR) return (value - axis->min) / (axis->max - axis->min);
    if (!(value > 0)) return value <= 0 ? -1 : value;
    return log(value / axis->min) / log(axis->max / axis->min);
}

double svg_x(const svg_plot *p, double value)
{
    return p->left + share_of(&p->x, value) * (p->right - p->left);
}

double svg_y(const svg_plot *p, double value)
{
    return p->bottom - share_of(&p->y, value) * (p->bottom - p->top);
}

/* ---- Texts */

double svg_text_width(const char *text)
{
    double width = 0;
    for (; *text; text++) {
        if ((*text & 0xc0) == 0x80) continue; /* the rest of a letter */
        width += strchr("ijlftr.,:;'|! ()", *text) ? 5 : strchr("mwMW%", *text) ? 12.5 : 8;
    }
    return width;
}

void svg_text(const svg_plot *p, const char *css, double x, double y, const char *anchor,
              const char *text)
{
    fprintf(p->out, "<text");
    if (*css) fprintf(p->out, " class=\"tint %s\"", css);
    attribute(p->out, "x", x);
    attribute(p->out, "y", y);
    if (strcmp(anchor, "start") != 0) fprintf(p->out, " text-anchor=\"%s\"", anchor);
    fputc('>', p->out);
    svg_escape(p->out, text);
    fputs("</text>\n", p->out);
}

static void draw_mark(const svg_plot *p, const svg_entry *e, double x, double y)
{
    static const char *const shapes[] = {
        [SVG_MARK_LINE] = "<path class=\"line %s\" d=\"M%.1f %.1fh18\"/>",
        [SVG_MARK_AREA] = "<path class=\"area %s\" d=\"M%.1f %.1fm2 -6h13v12h-13z\"/>",
        [SVG_MARK_POINT] =
            "<path class=\"point %s\" d=\"M%.1f %.1fm4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0\"/>"};
    fprintf(p->out, shapes[e->mark], e->css, x, y);
}

/* Row by row from the left; returns the number of rows. Draws only where told. */
static int legend(const svg_plot *p, double x0, double y0, bool draw)
{
    int rows = 0;
    double x = x0;
    for (int i = 0; i < SVG_MAX_ENTRIES && p->legend[i].text; i++) {
        const svg_entry *e = &p->legend[i];
        double width = 24 + svg_text_width(e->text) + 14;
        if (rows == 0 || x + width - 14 > p->width) {
            rows++;
            x = x0;
        }
        double y = y0 + LINE * (rows - 0.5);
        if (draw) {
            draw_mark(p, e, x, y);
            svg_text(p, "", x + 24, y + 4, "start", e->text);
        }
        x += width;
    }
    return rows;
}

/* ---- Axes */

enum { TICK_TEXT = 32, MOST_TICKS = 10 };

typedef struct tick_list {
    int count;
    double at[SVG_MAX_TICKS];
    char label[SVG_MAX_TICKS][TICK_TEXT];
} tick_list;

static void list_ticks(const svg_axis *axis, double px, double px_each, tick_list *list)
{
    list->count = 0;
    for (int i = 0; i < axis->num_ticks && axis->ticks && i < SVG_MAX_TICKS; i++) {
        list->at[i] = axis->ticks[i].at;
        snprintf(list->label[i], TICK_TEXT, "%s", axis->ticks[i].label);
        list->count++;
    }
    if (axis->ticks) return;
    int wanted = (int)fmin(fmax(px / px_each, 2), MOST_TICKS);
    list->count = svg_ticks(axis->min, axis->max, axis->scale, wanted, list->at);
    for (int i = 0; i < list->count; i++) {
        char text[16];
        snprintf(list->label[i], TICK_TEXT, "%s%s", svg_number(text, sizeof text, list->at[i]),
                 axis->unit ? axis->unit : "");
    }
}

static double widest(const tick_list *list)
{
    double most = 0;
    for (int i = 0; i < list->count; i++) most = fmax(most, svg_text_width(list->label[i]));
    return most;
}

static void draw_axes(svg_plot *p, const tick_list *xs, const tick_list *ys)
{
    FILE *out = p->out;
    for (int i = 0; i < ys->count; i++) {
        double y = svg_y(p, ys->at[i]);
        fprintf(out, "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>", p->left, y, p->right);
        svg_text(p, "quiet", p->left - 8, y + 4, "end", ys->label[i]);
    }
    double free_from = -1e9; /* no two labels overlap, and none leaves the plot */
    for (int i = 0; i < xs->count; i++) {
        double x = svg_x(p, xs->at[i]), half = 0.5 * svg_text_width(xs->label[i]);
        fprintf(out, "<path class=\"axis\" d=\"M%.1f %.1fv5\"/>", x, p->bottom);
        double middle = x + half > p->width - 1 ? p->width - 1 - half : x;
        if (middle - half < free_from) continue;
        svg_text(p, "quiet", middle, p->bottom + TICK_LINE, "middle", xs->label[i]);
        free_from = middle + half + 6;
    }
    fprintf(out, "<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>\n", p->left, p->bottom, p->right);
    if (p->x.label)
        svg_text(p, "quiet", 0.5 * (p->left + p->right), p->bottom + 2 * TICK_LINE, "middle",
                 p->x.label);
}

static const char *id_of(const svg_plot *p) { return p->id ? p->id : "plot"; }

static void open_element(const svg_plot *p)
{
    const char *id = id_of(p);
    fprintf(p->out, "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot%s%s\" id=\"%s\"",
            p->css ? " " : "", p->css ? p->css : "", id);
    if (p->over_time) fprintf(p->out, " data-time=\"%s\"", p->over_time);
    attribute(p->out, "width", p->width);
    attribute(p->out, "height", p->height);
    fprintf(p->out, " viewBox=\"0 0 %g %g\" role=\"img\" aria-labelledby=\"%s-title %s-desc\">\n",
            p->width, p->height, id, id);
    fprintf(p->out, "<title id=\"%s-title\">", id);
    svg_escape(p->out, p->title);
    fprintf(p->out, "</title>\n<desc id=\"%s-desc\">", id);
    svg_escape(p->out, p->desc ? p->desc : "");
    fputs("</desc>\n", p->out);
    if (!p->alone) return;
    fputs("<style>\n", p->out);
    svg_style(p->out);
    fprintf(p->out, "</style>\n<rect width=\"%g\" height=\"%g\" fill=\"var(--ground)\"/>\n",
            p->width, p->height);
}

void svg_begin(svg_plot *p)
{
    tick_list xs, ys;
    double y = p->alone ? 8 : 0;
    open_element(p);
    if (p->alone) {
        fputs("<g class=\"strong\">", p->out);
        svg_text(p, "", 12, y + 14, "start", p->title);
        fputs("</g>", p->out);
        y += 26;
    }
    double margin = p->alone ? 12 : 0;
    y += LINE * legend(p, margin, y, true) + 4;
    if (p->y.label) {
        svg_text(p, "quiet", margin, y + 13, "start", p->y.label);
        y += LINE;
    }
    p->top = y + p->strip + 8;
    p->bottom = p->height - (p->x.label ? 2 * TICK_LINE + 8 : TICK_LINE + 8);
    p->right = p->width - (p->margin_right > 0 ? p->margin_right : 16);
    list_ticks(&p->y, p->bottom - p->top, 44, &ys);
    p->left = margin + widest(&ys) + 12;
    list_ticks(&p->x, p->right - p->left, 56, &xs);
    draw_axes(p, &xs, &ys);
    fprintf(p->out, "<clipPath id=\"%s-area\"><rect", id_of(p));
    attribute(p->out, "x", p->left - 1);
    attribute(p->out, "y", p->top - p->strip - 2);
    attribute(p->out, "width", p->right - p->left + 2);
    attribute(p->out, "height", p->bottom - p->top + p->strip + 3);
    fputs("/></clipPath>\n", p->out);
}

void svg_end(svg_plot *p) { fputs("</svg>\n", p->out); }

/* ---- Data */

static void open_path(const svg_plot *p, const char *kind, const char *css)
{
    fprintf(p->out, "<path class=\"%s %s\" clip-path=\"url(#%s-area)\" d=\"", kind, css, id_of(p));
}

static void move(const svg_plot *p, char how, double x, double y)
{
    fputc(how, p->out);
    number(p->out, x);
    fputc(' ', p->out);
    number(p->out, y);
}

void svg_line(const svg_plot *p, const char *css, const double *x, const double *y, int n)
{
    bool down = false;
    open_path(p, "line", css);
    for (int i = 0; i < n; i++) {
        bool there = !isnan(x[i]) && !isnan(y[i]);
        if (there) move(p, down ? 'L' : 'M', svg_x(p, x[i]), svg_y(p, y[i]));
        down = there;
    }
    fputs("\"/>\n", p->out);
}

/* From (x, y) on: steps i to the end of those that are there. Equal heights are one. Returns the end. */
static int walk(const svg_plot *p, const double *x, const double *y, int i, int n)
{
    move(p, 'M', svg_x(p, x[i]), svg_y(p, y[i]));
    for (; i < n && !isnan(y[i]); i++) {
        if (i + 1 < n && y[i + 1] == y[i]) continue;
        fputc('H', p->out);
        number(p->out, svg_x(p, x[i + 1]));
        if (i + 1 == n || isnan(y[i + 1])) continue;
        fputc('V', p->out);
        number(p->out, svg_y(p, y[i + 1]));
    }
    return i;
}

/* The lower edge, backwards. */
static void walk_back(const svg_plot *p, const double *x, const double *low, int begin, int end)
{
    for (int i = end - 1; i >= begin; i--) {
        if (i > begin && low && low[i - 1] == low[i]) continue;
        if (i > begin && low == NULL) continue;
        fputc('V', p->out);
        number(p->out, low ? svg_y(p, low[i]) : p->bottom);
        fputc('H', p->out);
        number(p->out, svg_x(p, x[i]));
    }
    fputc('Z', p->out);
}

void svg_steps(const svg_plot *p, const char *css, const double *x, const double *y, int n)
{
    open_path(p, "line", css);
    for (int i = 0; i < n;) i = isnan(y[i]) ? i + 1 : walk(p, x, y, i, n);
    fputs("\"/>\n", p->out);
}

void svg_step_area(const svg_plot *p, const char *css, const double *x, const double *low,
                   const double *high, int n)
{
    open_path(p, "area", css);
    for (int i = 0; i < n;) {
        int begin = i;
        if (isnan(high[i])) {
            i++;
            continue;
        }
        i = walk(p, x, high, i, n);
        walk_back(p, x, low, begin, i);
    }
    fputs("\"/>\n", p->out);
}

void svg_points(const svg_plot *p, const char *css, const double *x, const double *y, int n,
                double radius)
{
    for (int i = 0; i < n; i++) {
        if (isnan(x[i]) || isnan(y[i])) continue;
        fprintf(p->out, "<circle class=\"point %s\"", css);
        attribute(p->out, "cx", svg_x(p, x[i]));
        attribute(p->out, "cy", svg_y(p, y[i]));
        attribute(p->out, "r", radius);
        fputs("/>\n", p->out);
    }
}

void svg_rule(const svg_plot *p, const char *css, double value)
{
    const double x[] = {p->x.min, p->x.max}, y[] = {value, value};
    svg_line(p, css, x, y, 2);
}
