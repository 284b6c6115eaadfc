/* figures.c: see figures.h. */
#include "base/figures.h"

#include <math.h>
#include <stdio.h>

const char *figure_grouped(char *text, size_t size, double value, int digits)
{
    char plain[64];
    int n = snprintf(plain, sizeof plain, "%.*f", digits, value), point = n - digits - (digits > 0);
    size_t used = 0;
    for (int i = 0; i < n && used + 2 < size; i++) {
        if (i > 0 && i < point && (point - i) % 3 == 0 && plain[i - 1] != '-') text[used++] = ',';
        text[used++] = plain[i];
    }
    text[used] = '\0';
    return text;
}

const char *figure_time(char *text, size_t size, double ms)
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
