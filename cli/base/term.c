/* term.c: see term.h. */
#define _GNU_SOURCE /* winsize */
#include "base/term.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static bool is_dumb(void)
{
    const char *term = getenv("TERM");
    return term == NULL || *term == '\0' || strcmp(term, "dumb") == 0;
}

static const char *code(int fd, term_colour colour)
{
    static const char *const codes[] = {
        [TERM_PLAIN] = "\033[0m", [TERM_BOLD] = "\033[1m",     [TERM_DIM] = "\033[2m",
        [TERM_RED] = "\033[31m",  [TERM_GREEN] = "\033[32m",   [TERM_YELLOW] = "\033[33m",
        [TERM_BLUE] = "\033[34m", [TERM_MAGENTA] = "\033[35m", [TERM_CYAN] = "\033[36m"};
    static int known[STDERR_FILENO + 1]; /* 0: not yet, 1: no colours, 2: colours */
    if (known[fd] == 0) {
        const char *no = getenv("NO_COLOR");
        known[fd] = isatty(fd) && (no == NULL || *no == '\0') && !is_dumb() ? 2 : 1;
    }
    return known[fd] == 2 ? codes[colour] : "";
}

const char *term_start(term_colour colour) { return code(STDOUT_FILENO, colour); }

const char *term_end(void) { return code(STDOUT_FILENO, TERM_PLAIN); }

double term_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- A live display */

enum { MAX_LINES = 32, LINE = 2048 }; /* bytes; terminals take as much at once */

static int widths[MAX_LINES]; /* of the lines drawn last */
static int num_lines;

bool term_is_live(void)
{
    static int known = -1;
    if (known < 0) known = isatty(STDERR_FILENO) && !is_dumb();
    return known != 0;
}

void term_size(int *columns, int *rows)
{
    struct winsize size = {0};
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0) size = (struct winsize){0};
    *columns = size.ws_col > 0 ? size.ws_col : 80;
    *rows = size.ws_row > 0 ? size.ws_row : 24;
}

const char *term_live_start(term_colour colour) { return code(STDERR_FILENO, colour); }

/* Past stdio: so a line is one write, which a kill does not cut in two. */
static void put(const char *text, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(STDERR_FILENO, text, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;
        text += n;
        bytes -= (size_t)n;
    }
}

/* Terminals fold lines that have become too wide for them. */
static int rows_drawn(int columns)
{
    int rows = 0;
    for (int i = 0; i < num_lines; i++) rows += widths[i] > 0 ? 1 + (widths[i] - 1) / columns : 1;
    return rows;
}

static void go_to_first_line(void)
{
    char text[32];
    int columns, rows;
    term_size(&columns, &rows);
    int up = rows_drawn(columns);
    if (up > 0) put(text, (size_t)snprintf(text, sizeof text, "\r\033[%dA", up));
    num_lines = 0;
}

/* Copies one line's bytes as far as `columns` goes; colours take no place. Returns where it ends. */
static const char *take_line(const char *s, int columns, char *to, size_t *bytes, int *width)
{
    *bytes = 0;
    *width = 0;
    for (bool colour = false; *s != '\0' && *s != '\n'; s++) {
        bool starts = !colour && *s != '\033' && ((unsigned char)*s & 0xc0) != 0x80;
        if (*s == '\033') colour = true;
        *width += starts;
        if (*width <= columns && *bytes < LINE - 16) to[(*bytes)++] = *s;
        if (colour && *s == 'm') colour = false;
    }
    if (*width > columns) *width = columns;
    return s;
}

/* A program in the background would draw over its shell's lines. */
static bool is_behind(void)
{
    pid_t front = tcgetpgrp(STDERR_FILENO);
    return front > 0 && front != getpgrp();
}

void term_draw(const char *text)
{
    int columns, rows;
    if (!term_is_live() || is_behind()) return;
    term_size(&columns, &rows);
    go_to_first_line();
    for (const char *s = text; num_lines < MAX_LINES && num_lines < rows - 1;) {
        char line[LINE];
        size_t bytes;
        /* The last column stays free: a terminal may go to the next row behind it, or may not. */
        s = take_line(s, columns - 1, line, &bytes, &widths[num_lines]);
        bytes +=
            (size_t)snprintf(line + bytes, LINE - bytes, "%s\033[K\n", term_live_start(TERM_PLAIN));
        put(line, bytes);
        num_lines++;
        if (*s++ == '\0') break;
    }
    put("\033[J", 3);
}

void term_bar(char *text, size_t size, int64_t done, int64_t total, const char *what)
{
    enum { WIDTH = 24 };
    int filled = total > 0 ? (int)(done * WIDTH / total) : 0;
    snprintf(text, size, "[%.*s%.*s] %lld of %lld  %s", filled, "########################",
             WIDTH - filled, "........................", (long long)done, (long long)total, what);
}

void term_progress(double since, int64_t done, int64_t total, const char *what)
{
    static double last_shown;
    double now = term_seconds();
    char text[160];
    if (now - since < 2.0 || now - last_shown < 0.1 || !term_is_live()) return;
    term_bar(text, sizeof text, done, total, what);
    term_draw(text);
    last_shown = now;
}

void term_step(const char *who, int64_t at, int64_t total, const char *what)
{
    if (!term_is_live())
        fprintf(stderr, "%s: %lld of %lld: %s\n", who, (long long)at, (long long)total, what);
}

void term_progress_end(void)
{
    if (num_lines == 0 || is_behind()) return;
    go_to_first_line();
    put("\033[J", 3);
}
