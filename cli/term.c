/* term.c: see term.h. */
#include "term.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double last_shown;
static bool shown;

static bool has_colour(void)
{
    static int known = -1;
    if (known < 0) {
        const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
        bool dumb = term == NULL || strcmp(term, "dumb") == 0;
        known = isatty(STDOUT_FILENO) && (no == NULL || *no == '\0') && !dumb;
    }
    return known != 0;
}

const char *term_start(term_colour colour)
{
    static const char *const codes[] = {
        [TERM_PLAIN] = "\033[0m", [TERM_BOLD] = "\033[1m",     [TERM_DIM] = "\033[2m",
        [TERM_RED] = "\033[31m",  [TERM_GREEN] = "\033[32m",   [TERM_YELLOW] = "\033[33m",
        [TERM_BLUE] = "\033[34m", [TERM_MAGENTA] = "\033[35m", [TERM_CYAN] = "\033[36m"};
    return has_colour() ? codes[colour] : "";
}

const char *term_end(void) { return has_colour() ? "\033[0m" : ""; }

double term_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void term_progress(double since, int64_t done, int64_t total, const char *what)
{
    double now = term_seconds();
    if (now - since < 2.0 || now - last_shown < 0.1 || !isatty(STDERR_FILENO)) return;
    enum { WIDTH = 24 };
    int filled = total > 0 ? (int)(done * WIDTH / total) : 0;
    fprintf(stderr, "\r\033[K[%.*s%.*s] %lld of %lld  %.40s", filled, "########################",
            WIDTH - filled, "........................", (long long)done, (long long)total, what);
    fflush(stderr);
    last_shown = now;
    shown = true;
}

void term_progress_end(void)
{
    if (shown) fprintf(stderr, "\r\033[K");
    shown = false;
}
