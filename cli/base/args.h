/* args.h: options of a subcommand from a table. --name value, --name=value, -n value, -h. */
#ifndef FOLIO_ARGS_H
#define FOLIO_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

typedef enum arg_kind {
    ARG_FLAG,   /* bool * */
    ARG_TEXT,   /* const char ** */
    ARG_CHOICE, /* const char **, one of `choices`, "a|b" */
    ARG_NUMBER, /* int64_t *, in [min, max] */
    /* const char **: the argument that is no option, NULL before; name is what it is, choices may be NULL */
    ARG_OPERAND
} arg_kind;

typedef struct arg_option {
    const char *name; /* without the dashes */
    char letter;      /* 0: none */
    arg_kind kind;
    void *value;
    const char *choices;
    int64_t min, max;
} arg_option;

typedef enum args_result { ARGS_RUN, ARGS_HELP, ARGS_WRONG } args_result;

/*
 * argv[0] is the subcommand's name. A wrong option is named on stderr. Ends the table: name
 * NULL.
 */
args_result args_parse(int argc, char **argv, const arg_option *options);

/* args_parse, and what to do with its answer: false, *status is the command's exit status. */
bool args_run(int argc, char **argv, const arg_option *options, const char *help, int *status);

/* -o FORMAT, as all commands have it. */
#define ARG_OUTPUT(to, list)                                                                       \
    {                                                                                              \
        .name = "output", .letter = 'o', .kind = ARG_CHOICE, .value = to, .choices = list          \
    }

/* The first option of a command line that args_parse took and that is not one of `allowed`, "a|b"; NULL: none. */
const char *args_first_besides(int argc, char **argv, const arg_option *options,
                               const char *allowed);

/*
 * While set, args_parse parses nothing: it shows its table to `visit`, and has the command print its help. For those who
 * want to know a command's options. NULL ends it.
 */
void args_list(void (*visit)(void *to, const arg_option *options), void *to);

/* One sentence on stderr, and where help is. Returns EXIT_USAGE. */
int args_complain(const char *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
