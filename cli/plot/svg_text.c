/* svg_text.c: the parts of svg.h that are text: numbers, ticks, escaping, style. */
#include "plot/svg.h"

#include <math.h>
#include <string.h>

/* ---- Ticks and numbers */

static int linear_ticks(double min, double max, int wanted, double *at)
{
    static const double steps[] = {1, 2, 5, 10};
    double rough = (max - min) / wanted, power = pow(10, floor(log10(rough))), step = 10 * power;
    for (int i = 3; i >= 0; i--)
        if (steps[i] * power >= rough * 0.999) step = steps[i] * power;
    int n = 0;
    for (double i = ceil(min / step - 1e-9); i * step <= max + 1e-9 * step; i++)
        if (n < SVG_MAX_TICKS) at[n++] = i * step;
    return n;
}

/* Of a decade: all of its 1, or 1 and 3, or 1, 2 and 5; every so many decades where there are a lot. */
static int log_ticks(double min, double max, int wanted, double *at)
{
    static const double parts[3][3] = {{1, 2, 5}, {1, 3, 0}, {1, 0, 0}};
    double low = floor(log10(min)), high = ceil(log10(max));
    int set = 0, n = 0;
    while (set < 2 && (3 - set) * log10(max / min) > wanted) set++;
    double every = set == 2 ? ceil(log10(max / min) / wanted) : 1;
    for (double decade = low; decade <= high; decade += every)
        for (int i = 0; i < 3 && parts[set][i] > 0; i++) {
            double value = parts[set][i] * pow(10, decade);
            if (value >= min * 0.9999 && value <= max * 1.0001 && n < SVG_MAX_TICKS)
                at[n++] = value;
        }
    return n;
}

int svg_ticks(double min, double max, svg_scale scale, int wanted, double *at)
{
    if (!(max > min) || wanted < 1) return 0;
    if (scale == SVG_LINEAR) return linear_ticks(min, max, wanted, at);
    int n = min > 0 ? log_ticks(min, max, wanted, at) : 0;
    /* Within a small part of a decade a logarithm is nearly straight. */
    return n >= 2 ? n : linear_ticks(min, max, wanted, at);
}

const char *svg_number(char *text, size_t size, double value)
{
    static const struct {
        double from;
        const char *letter;
    } units[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}};
    for (int i = 0; i < 4; i++)
        if (fabs(value) >= units[i].from * 0.9999995) {
            snprintf(text, size, "%.4g%s", value / (units[i].from == 1e4 ? 1e3 : units[i].from),
                     units[i].letter);
            return text;
        }
    snprintf(text, size, "%.4g", fabs(value) < 1e-12 ? 0 : value);
    return text;
}

/* ---- Escaping */

/* Bytes of the UTF-8 character at s; 0: it is none. */
static int utf8_bytes(const unsigned char *s)
{
    static const struct {
        unsigned char mask, is;
        uint32_t least;
    } kinds[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    for (int n = 0; n < 4; n++) {
        if ((s[0] & kinds[n].mask) != kinds[n].is) continue;
        uint32_t code = s[0] & (unsigned char)~kinds[n].mask;
        for (int i = 1; i <= n; i++) {
            if ((s[i] & 0xc0) != 0x80) return 0;
            code = code << 6 | (s[i] & 0x3f);
        }
        bool fine = code >= kinds[n].least && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
        return fine && code != 0xfffe && code != 0xffff ? n + 1 : 0;
    }
    return 0;
}

void svg_escape(FILE *out, const char *text)
{
    static const char *const named[128] = {
        ['&'] = "&amp;", ['<'] = "&lt;", ['>'] = "&gt;", ['"'] = "&quot;", ['\''] = "&#39;"};
    const unsigned char *s = (const unsigned char *)text;
    while (*s) {
        int n = utf8_bytes(s);
        bool control = n == 0 || s[0] == 0x7f || (s[0] < 0x20 && s[0] != '\n' && s[0] != '\t') ||
                       (s[0] == 0xc2 && s[1] < 0xa0);
        if (control) fputs("\xef\xbf\xbd", out);
        else if (n == 1 && named[s[0]]) fputs(named[s[0]], out);
        else fwrite(s, 1, (size_t)n, out);
        s += n > 0 ? n : 1;
    }
}

/* ---- Style */

/*
 * Blue, orange, green, purple, sky, red; 3:1 or more on their grounds, all but sky 4.5:1. To people with any
 * kind of colour vision (by the matrices of Machado and others, 2009) any two are 19 or more apart in CIELAB.
 */
static const char style[] =
    ":root{--ground:#fff;--ink:#1d2228;--soft:#59626c;--grid:#e4e8ec;"
    "--c1:#0056b3;--c2:#c44a00;--c3:#33805f;--c4:#6a1060;--c5:#4f99d0;--c6:#7a0010;--shade:.35}\n"
    "@media (prefers-color-scheme:dark){:root{--ground:#14181d;--ink:#e6eaee;--soft:#a3adb8;"
    "--grid:#2b323a;--c1:#3f96f5;--c2:#fbd067;--c3:#55d39a;--c4:#c77fb5;--c5:#c5eefc;"
    "--c6:#f0624d;--shade:.5}}\n"
    ".plot{color:var(--ink);background:var(--ground);"
    "font-family:system-ui,-apple-system,\"Segoe UI\",Roboto,\"Helvetica Neue\",Arial,sans-serif;"
    "font-size:13px;font-variant-numeric:tabular-nums}\n"
    ".plot text{fill:var(--ink)}"
    ".plot .strong{font-weight:600}\n"
    ".plot .axis{stroke:var(--soft);fill:none;shape-rendering:crispEdges}"
    ".plot .grid{stroke:var(--grid);fill:none;shape-rendering:crispEdges}\n"
    ".plot .line{fill:none;stroke-width:2;stroke-linejoin:round}.plot .thin{stroke-width:1}"
    ".plot .dash{stroke-dasharray:6 4}.plot .dots{stroke-dasharray:1.5 3.5}\n"
    ".plot .area{fill-opacity:var(--shade)}.plot .half{fill-opacity:.8}.plot .full{fill-opacity:1}\n"
    ".plot .c1{--c:var(--c1)}.plot .c2{--c:var(--c2)}.plot .c3{--c:var(--c3)}"
    ".plot .c4{--c:var(--c4)}.plot .c5{--c:var(--c5)}.plot .c6{--c:var(--c6)}"
    ".plot .quiet{--c:var(--soft)}\n"
    ".plot .line{stroke:var(--c)}.plot .area,.plot .point,.plot text.tint{fill:var(--c)}\n";

void svg_style(FILE *out) { fputs(style, out); }
