/* term.h: what depends on the terminal: colour, progress, time. */
#ifndef FOLIO_TERM_H
#define FOLIO_TERM_H

#include <stdbool.h>
#include <stddef.h>
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

/* ---- A live display: lines on stderr that replace themselves */

/*
 * Nothing of it outlasts the program, however it ends: the cursor is never hidden and waits below the
 * lines, each line ends its own colours, no mode of the terminal is changed.
 */

/* Can lines be replaced? Not where stderr is no terminal, nor with TERM=dumb or none. */
bool term_is_live(void);
void term_size(int *columns, int *rows);
/* As term_start, for stderr; TERM_PLAIN ends a colour. */
const char *term_live_start(term_colour colour);

/* Replaces what was drawn before by these lines, '\n' between them, cut to the terminal's size. Nothing
 * happens in the background. */
void term_draw(const char *text);
/* "[####....] 3 of 9  what" */
void term_bar(char *text, size_t size, int64_t done, int64_t total, const char *what);

/* Draws a bar, ten times a second at most, from two seconds after `since`. */
void term_progress(double since, int64_t done, int64_t total, const char *what);

/* "who: 3 of 9: what", where no bar can be drawn. */
void term_step(const char *who, int64_t at, int64_t total, const char *what);

/* Wipes what was drawn: before anything else is written, and at the end. */
void term_progress_end(void);

#endif
