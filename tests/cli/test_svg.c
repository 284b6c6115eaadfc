/* test_svg.c: the plots of the program: ticks, numbers, escaping, and what lands in the file. */
#include "base/figures.h"
#include "plot/svg.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Ticks and numbers */

TEST(svg, ticks_are_round_and_inside)
{
    const struct {
        double min, max;
        svg_scale scale;
        int wanted, count;
        double first, second, last;
    } cases[] = {
        {0, 1, SVG_LINEAR, 5, 6, 0, 0.2, 1},         {0, 2048, SVG_LINEAR, 5, 5, 0, 500, 2000},
        {3, 97, SVG_LINEAR, 5, 4, 20, 40, 80},       {0.1, 1000, SVG_LOG, 6, 5, 0.1, 1, 1000},
        {1, 500, SVG_LOG, 6, 6, 1, 3, 300},          {2, 50, SVG_LOG, 6, 5, 2, 5, 50},
        {1e-9, 1e9, SVG_LOG, 6, 7, 1e-9, 1e-6, 1e9}, {100, 104, SVG_LOG, 5, 5, 100, 101, 104},
    };
    for (int i = 0; i < COUNT_OF(cases); i++) {
        double at[SVG_MAX_TICKS];
        int n = svg_ticks(cases[i].min, cases[i].max, cases[i].scale, cases[i].wanted, at);
        CHECK_MSG(n == cases[i].count, "case %d: %d ticks, expected %d", i, n, cases[i].count);
        if (n != cases[i].count) continue;
        const double want[] = {cases[i].first, cases[i].second, cases[i].last};
        const double got[] = {at[0], at[1], at[n - 1]};
        for (int k = 0; k < 3; k++)
            CHECK_MSG(fabs(got[k] - want[k]) <= 1e-9 * fabs(want[k]),
                      "case %d: tick %g, expected %g", i, got[k], want[k]);
    }
}

TEST(svg, ticks_of_nothing)
{
    double at[SVG_MAX_TICKS];
    CHECK_INT(svg_ticks(1, 1, SVG_LINEAR, 5, at), 0);
    CHECK_INT(svg_ticks(2, 1, SVG_LOG, 5, at), 0);
    CHECK_INT(svg_ticks(0, NAN, SVG_LINEAR, 5, at), 0);
    CHECK(svg_ticks(0, 1, SVG_LINEAR, 1000, at) <= SVG_MAX_TICKS);
}

TEST(svg, numbers_are_short)
{
    const struct {
        double value;
        const char *text;
    } cases[] = {{0, "0"},       {1e-17, "0"},   {0.25, "0.25"},   {1500, "1500"},
                 {9999, "9999"}, {10000, "10k"}, {20500, "20.5k"}, {1.5e6, "1.5M"},
                 {-3e9, "-3G"},  {2e12, "2T"},   {0.1 * 3, "0.3"}, {999999.99, "1M"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        char text[16];
        svg_number(text, sizeof text, cases[i].value);
        CHECK_MSG(strcmp(text, cases[i].text) == 0, "%g is '%s', expected '%s'", cases[i].value,
                  text, cases[i].text);
    }
}

TEST(svg, figures_as_people_read_them)
{
    const struct {
        double value;
        int digits;
        const char *text;
    } grouped[] = {{0, 0, "0"},
                   {999, 0, "999"},
                   {12031, 0, "12,031"},
                   {-1234567, 0, "-1,234,567"},
                   {-123456, 0, "-123,456"},
                   {1234.56, 1, "1,234.6"}};
    const struct {
        double ms;
        const char *text;
    } times[] = {{0, "0 us"},     {0.4567, "457 us"}, {0.9996, "1 ms"}, {12.34, "12.3 ms"},
                 {999.6, "1 s"},  {1110, "1.11 s"},   {99960, "100 s"}, {599e3, "599 s"},
                 {6e5, "10 min"}, {36e5, "60 min"},   {36e6, "600 min"}};
    char text[32];
    for (int i = 0; i < COUNT_OF(grouped); i++) {
        figure_grouped(text, sizeof text, grouped[i].value, grouped[i].digits);
        CHECK_MSG(strcmp(text, grouped[i].text) == 0, "'%s', expected '%s'", text, grouped[i].text);
    }
    for (int i = 0; i < COUNT_OF(times); i++) {
        figure_time(text, sizeof text, times[i].ms);
        CHECK_MSG(strcmp(text, times[i].text) == 0, "'%s', expected '%s'", text, times[i].text);
    }
    figure_grouped(text, 8, 1e12, 0);
    CHECK(strlen(text) < 8);
}

/* ---- Text */

/* What a function wrote; to be freed. */
static char *written(void (*write)(FILE *, const void *), const void *what)
{
    FILE *file = tmpfile();
    if (file == NULL) return calloc(1, 1);
    write(file, what);
    long size = ftell(file);
    char *text = calloc((size_t)size + 1, 1);
    rewind(file);
    if (fread(text, 1, (size_t)size, file) != (size_t)size) text[0] = '\0';
    fclose(file);
    return text;
}

static void write_escaped(FILE *out, const void *text) { svg_escape(out, text); }

TEST(svg, text_is_escaped)
{
    const struct {
        const char *raw, *text;
    } cases[] = {
        {"plain", "plain"},
        {"<script>&\"'", "&lt;script&gt;&amp;&quot;&#39;"},
        {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8e\xb2", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8e\xb2"},
        {"a\x01z\x7f", "a\xef\xbf\xbdz\xef\xbf\xbd"},
        {"\xff<", "\xef\xbf\xbd&lt;"},            /* no UTF-8 */
        {"\xc0\xbc", "\xef\xbf\xbd\xef\xbf\xbd"}, /* '<' in two bytes is none either */
        {"\xe2\x82", "\xef\xbf\xbd\xef\xbf\xbd"}, /* cut off */
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* half a pair */
        {"\xc2\x85", "\xef\xbf\xbd"}}; /* a control character in two bytes */
    for (int i = 0; i < COUNT_OF(cases); i++) {
        char *text = written(write_escaped, cases[i].raw);
        CHECK_MSG(strcmp(text, cases[i].text) == 0, "case %d gives '%s'", i, text);
        free(text);
    }
}

/* ---- Plots */

static void write_plot(FILE *out, const void *nothing)
{
    (void)nothing;
    const double x[] = {1, 10, 100, 1000}, y[] = {0, 50, NAN, 100};
    svg_plot p = {.out = out,
                  .alone = true,
                  .width = 400,
                  .height = 300,
                  .title = "a <b>",
                  .x = {.min = 1, .max = 1000, .scale = SVG_LOG, .unit = " ms"},
                  .y = {.label = "share", .max = 100, .unit = " %"},
                  .legend = {{"c1", SVG_MARK_LINE, "this & that"}}};
    svg_begin(&p);
    CHECK(p.left > 0 && p.left < p.right && p.right < 400 && p.top > 0 && p.top < p.bottom);
    CHECK(svg_x(&p, 1) == p.left && svg_y(&p, 0) == p.bottom && svg_y(&p, 100) == p.top);
    CHECK(fabs(svg_x(&p, 1000) - p.right) < 1e-9);
    CHECK(fabs(svg_x(&p, 10) - (2 * p.left + p.right) / 3) < 1e-9);
    svg_line(&p, "c1", x, y, 4);
    svg_steps(&p, "c2", x, y, 3);
    svg_step_area(&p, "c3", x, NULL, y, 3);
    svg_points(&p, "c4", x, y, 4, 3);
    svg_rule(&p, "quiet", 50);
    svg_end(&p);
}

static int times(const char *text, const char *part)
{
    int n = 0;
    for (; (text = strstr(text, part)) != NULL; text++) n++;
    return n;
}

TEST(svg, a_plot_is_one_document)
{
    char *text = written(write_plot, NULL);
    CHECK_INT(times(text, "<svg "), 1);
    CHECK_INT(times(text, "</svg>\n"), 1);
    CHECK(strstr(text, "<title id=\"plot-title\">a &lt;b&gt;</title>") != NULL);
    CHECK(strstr(text, ">this &amp; that</text>") != NULL);
    CHECK(strstr(text, ">10 ms</text>") != NULL && strstr(text, ">100 %</text>") != NULL);
    CHECK_INT(times(text, "class=\"point c4\""), 3); /* not the one that is no number */
    CHECK(strstr(text, "nan") == NULL && strstr(text, "inf") == NULL);
    CHECK_INT(times(text, "http"), 1); /* the name of the format; nothing to fetch */
    /* The NAN cuts the line in two, and leaves the steps with what is before it. */
    const char *line = strstr(text, "<path class=\"line c1\" clip-path"),
               *steps = strstr(text, "<path class=\"line c2\"");
    CHECK(line && steps && line < steps);
    int starts = 0;
    for (const char *c = strstr(line, " d=\""); c < steps; c++) starts += *c == 'M';
    CHECK_INT(starts, 2);
    free(text);
}
