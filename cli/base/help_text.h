/*
 * help_text.h: what the commands say of themselves: the text of their --help, and their tables of options. Completion
 * and the manual are made from the two, so that neither can say what the program does not.
 */
#ifndef FOLIO_HELP_TEXT_H
#define FOLIO_HELP_TEXT_H

#include "base/args.h"
#include "base/commands.h"

enum { HELP_WORD = 64, HELP_LINE = 84, HELP_MAX_OPTIONS = 64 };

typedef struct help_option {
    char name[HELP_WORD];
    char letter; /* 0: none */
    arg_kind kind;
    const char *choices;   /* "a|b"; NULL: none */
    char takes[HELP_WORD]; /* "FILE.json"; "": nothing */
    char what[HELP_LINE];  /* the beginning of its explanation */
} help_option;

typedef struct help_text {
    char name[HELP_WORD]; /* "bench pool" */
    char *text;           /* what --help prints */
    help_option options[HELP_MAX_OPTIONS];
    int num_options;
} help_text;

/* of: a command, or a topic of it (NULL: none). The caller frees it. */
help_text *help_text_of(const subcommand *of, const subcommand *topic);
void help_text_free(help_text *h);

/* What `folio --help` prints; the caller frees it. */
char *help_text_main(void);

/* Is what an option or operand takes a file? */
bool help_takes_file(const help_option *o);

#endif
