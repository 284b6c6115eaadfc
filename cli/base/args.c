/* args.c: see args.h. */
#include "base/args.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int args_complain(const char *command, const char *format, ...)
{
    const char *space = *command ? " " : "";
    fprintf(stderr, "folio%s%s: ", space, command);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "; try 'folio%s%s --help'\n", space, command);
    return EXIT_USAGE;
}

/* The option an argument names; *value is what follows '=', or NULL. */
static const arg_option *find(const arg_option *options, const char *arg, const char **value)
{
    *value = NULL;
    if (arg[0] != '-' || arg[1] == '\0') return NULL;
    bool is_long = arg[1] == '-';
    const char *name = arg + (is_long ? 2 : 1), *equals = is_long ? strchr(name, '=') : NULL;
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    if (equals) *value = equals + 1;
    for (const arg_option *o = options; o->name; o++) {
        if (o->kind == ARG_OPERAND) continue;
        if (is_long && strlen(o->name) == length && strncmp(o->name, name, length) == 0) return o;
        if (!is_long && length == 1 && o->letter == name[0]) return o;
    }
    return NULL;
}

/* The place of an argument that is no option, while it is free; "-" is standard input. */
static const arg_option *find_operand(const arg_option *options, const char *arg)
{
    if (arg[0] == '-' && arg[1] != '\0') return NULL;
    for (const arg_option *o = options; o->name; o++)
        if (o->kind == ARG_OPERAND && *(const char **)o->value == NULL) return o;
    return NULL;
}

static bool is_choice(const char *choices, const char *value)
{
    size_t length = strlen(value);
    for (const char *c = choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL)
        if (strncmp(c, value, length) == 0 && (c[length] == '|' || c[length] == '\0'))
            return length > 0;
    return false;
}

static bool set_number(const arg_option *o, const char *value)
{
    char *end;
    errno = 0;
    long long n = strtoll(value, &end, 10);
    if (end == value || *end != '\0' || errno != 0 || n < o->min || n > o->max) return false;
    *(int64_t *)o->value = n;
    return true;
}

/* Stores an option's value; a sentence on stderr if it cannot be one. */
static bool set(const char *command, const arg_option *o, const char *value)
{
    switch (o->kind) {
    case ARG_FLAG: *(bool *)o->value = true; return true;
    case ARG_OPERAND:
        if (o->choices && !is_choice(o->choices, value)) {
            args_complain(command, "%s is one of %s, not '%s'", o->name, o->choices, value);
            return false;
        }
        *(const char **)o->value = value;
        return true;
    case ARG_TEXT: *(const char **)o->value = value; return true;
    case ARG_CHOICE:
        if (is_choice(o->choices, value)) {
            *(const char **)o->value = value;
            return true;
        }
        args_complain(command, "--%s takes one of %s, not '%s'", o->name, o->choices, value);
        return false;
    case ARG_NUMBER:
        if (set_number(o, value)) return true;
        args_complain(command, "--%s takes a whole number from %lld to %lld, not '%s'", o->name,
                      (long long)o->min, (long long)o->max, value);
        return false;
    }
    return false;
}

const char *args_first_besides(int argc, char **argv, const arg_option *options,
                               const char *allowed)
{
    for (int i = 1; i < argc; i++) {
        const char *value;
        const arg_option *o = find(options, argv[i], &value);
        if (o == NULL) continue;
        if (!is_choice(allowed, o->name)) return o->name;
        if (o->kind != ARG_FLAG && value == NULL) i++; /* its value */
    }
    return NULL;
}

static void (*listing)(void *to, const arg_option *options);
static void *listing_to;

void args_list(void (*visit)(void *to, const arg_option *options), void *to)
{
    listing = visit;
    listing_to = to;
}

/* What replaces options that version 0.3 had. */
static const char *instead_of(const char *arg)
{
    size_t length = strcspn(arg, "=");
    if (length == 6 && strncmp(arg, "--plot", length) == 0)
        return "; save the run with -o json and draw it with 'python -m folio plot run.json'";
    if (length == 8 && strncmp(arg, "--report", length) == 0)
        return "; save the run with -o json and make its page with 'python -m folio report run.json'";
    return "";
}

args_result args_parse(int argc, char **argv, const arg_option *options)
{
    if (listing) {
        listing(listing_to, options);
        return ARGS_HELP;
    }
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return ARGS_HELP;
        const arg_option *o = find_operand(options, argv[i]);
        if (o != NULL) {
            if (!set(argv[0], o, argv[i])) return ARGS_WRONG;
            continue;
        }
        o = find(options, argv[i], &value);
        if (o == NULL) {
            const char *what = argv[i][0] == '-' ? "unknown option" : "unexpected argument";
            args_complain(argv[0], "%s '%s'%s", what, argv[i], instead_of(argv[i]));
            return ARGS_WRONG;
        }
        if (o->kind == ARG_FLAG && value) {
            args_complain(argv[0], "--%s takes no value", o->name);
            return ARGS_WRONG;
        }
        if (o->kind != ARG_FLAG && value == NULL) {
            if (i + 1 == argc) {
                args_complain(argv[0], "--%s needs a value", o->name);
                return ARGS_WRONG;
            }
            value = argv[++i];
        }
        if (!set(argv[0], o, value)) return ARGS_WRONG;
    }
    return ARGS_RUN;
}

bool args_run(int argc, char **argv, const arg_option *options, const char *help, int *status)
{
    args_result result = args_parse(argc, argv, options);
    if (result == ARGS_HELP) fputs(help, stdout);
    *status = result == ARGS_WRONG ? EXIT_USAGE : EXIT_OK;
    return result == ARGS_RUN;
}
