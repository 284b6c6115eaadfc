/*
 * svg.h: plots as SVG: axes with sensible ticks, linear or logarithmic; lines, steps, areas, points and
 * labels; a legend. A plot stands alone in a file, or in a page that has the style of its classes.
 *
 *     svg_plot p = {.out = file, .alone = true, .width = 720, .height = 420,
 *                   .title = "Roofline", .desc = "Measured points under measured ceilings.",
 *                   .x = {.label = "FLOP a byte", .min = 0.1, .max = 1000, .scale = SVG_LOG},
 *                   .y = {.label = "GFLOP/s", .min = 1, .max = 500, .scale = SVG_LOG}};
 *     svg_begin(&p);
 *     svg_line(&p, "c1", x, y, n);
 *     svg_end(&p);
 *
 * Classes: "c1" to "c6" are colours that people with any kind of colour vision tell apart, in light and in
 * dark; "quiet" is for what stands back. With it, of a line, "dash", "dots" or "thin"; of an area "half" or
 * "full": it hides what is behind it.
 */
#ifndef FOLIO_SVG_H
#define FOLIO_SVG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef enum svg_scale { SVG_LINEAR, SVG_LOG } svg_scale;

typedef struct svg_tick {
    double at;
    const char *label;
} svg_tick;

typedef struct svg_axis {
    const char *label; /* with its unit; NULL: none                            */
    double min, max;   /* min < max; both > 0 where the scale is SVG_LOG       */
    svg_scale scale;
    const svg_tick *ticks; /* [num_ticks]; NULL: chosen here                       */
    int num_ticks;
    const char *unit; /* behind the number of every tick; NULL: none          */
} svg_axis;

/* What a legend's mark looks like. */
typedef enum svg_mark { SVG_MARK_LINE, SVG_MARK_AREA, SVG_MARK_POINT } svg_mark;

typedef struct svg_entry {
    const char *css; /* the classes of what it explains */
    svg_mark mark;
    const char *text;
} svg_entry;

enum { SVG_MAX_ENTRIES = 8 };

typedef struct svg_plot {
    FILE *out;
    bool alone;            /* a file of its own: brings its style along             */
    const char *id;        /* of its element; unique in a page; NULL: "plot"        */
    const char *css;       /* more classes of its element; NULL: none               */
    const char *over_time; /* data-time of its element, for scripts; NULL: none */
    const char *title;     /* for those who cannot see it; alone, also at the top   */
    const char *desc;      /* a sentence or two                                     */
    double width, height;  /* all in all, in px                                     */
    double strip;          /* px kept free above the plot's area, below the legend  */
    double margin_right;   /* px right of the plot's area; 0: 16                    */
    svg_axis x, y;
    svg_entry legend[SVG_MAX_ENTRIES]; /* up to the first without text */
    /* Set by svg_begin: the area of the data. */
    double left, top, right, bottom;
} svg_plot;

/* Everything behind the data: style, texts, legend, axes. */
void svg_begin(svg_plot *p);
void svg_end(svg_plot *p);

/* Where a value lies, in px. Values outside the axis lie outside the area, which cuts them off. */
double svg_x(const svg_plot *p, double value);
double svg_y(const svg_plot *p, double value);

/* x, y: [n]. A NAN interrupts the line. */
void svg_line(const svg_plot *p, const char *css, const double *x, const double *y, int n);
/* y[i] holds from x[i] to x[i + 1]; x: [n + 1]; y: [n]. A NAN interrupts. */
void svg_steps(const svg_plot *p, const char *css, const double *x, const double *y, int n);
/* The same, filled between low and high. low NULL: from the axis. */
void svg_step_area(const svg_plot *p, const char *css, const double *x, const double *low,
                   const double *high, int n);
void svg_points(const svg_plot *p, const char *css, const double *x, const double *y, int n,
                double radius);
/* A line across the area at y = value. */
void svg_rule(const svg_plot *p, const char *css, double value);
/* At a place in px. anchor: "start", "middle" or "end". css: "" or a colour's. */
void svg_text(const svg_plot *p, const char *css, double x, double y, const char *anchor,
              const char *text);

/* About, in px; fonts differ. */
double svg_text_width(const char *text);
/* The rules of the classes, for a page's <style>. */
void svg_style(FILE *out);
/* Text for XML or HTML; bytes that are not UTF-8, and control characters, become U+FFFD. */
void svg_escape(FILE *out, const char *text);

/* ---- Numbers and ticks, for tables and tests too */

enum { SVG_MAX_TICKS = 24 };

/* Round values in [min, max], about `wanted` of them; returns how many (at most SVG_MAX_TICKS). */
int svg_ticks(double min, double max, svg_scale scale, int wanted, double *at);
/* "0", "0.25", "1500", "20k", "1.5M"; returns text. */
const char *svg_number(char *text, size_t size, double value);

#endif
