/* term.h: what depends on the terminal: colour, progress, time. */
#ifndef FOLIO_TERM_H
#define FOLIO_TERM_H

#include <stdbool.h>
#include <stdint.h>

typedef enum term_colour {
    TERM_PLAIN = 0,
    TERM_BOLD = 1,
    TERM_DIM = 2,
    TERM_RED = 31,
    TERM_GREEN = 32,
    TERM_YELLOW = 33,
    TERM_BLUE = 34,
    TERM_MAGENTA = 35,
    TERM_CYAN = 36
} term_colour;

/*
 * The sequence that starts a colour on stdout; "" where stdout is no terminal or NO_COLOR is
 * set.
 */
const char *term_start(term_colour colour);
/* The one that ends it. */
const char *term_end(void);

/* Seconds of a clock that never goes back. */
double term_seconds(void);

/*
 * A line on stderr that replaces itself, ten times a second at most, from two seconds after
 * `since`; nothing where stderr is no terminal. term_progress_end wipes it.
 */
void term_progress(double since, int64_t done, int64_t total, const char *what);
void term_progress_end(void);

#endif
