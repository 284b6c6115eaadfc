/* commands.h: the subcommands, and the topics some of them have. */
#ifndef FOLIO_COMMANDS_H
#define FOLIO_COMMANDS_H

/* Takes argv from its own name on and returns the exit status. */
typedef int command_main(int argc, char **argv);

typedef struct subcommand {
    const char *name; /* NULL ends a table */
    command_main *run;
    const char *summary;
    const struct subcommand *topics; /* commands of its own; NULL: none */
} subcommand;

extern const subcommand commands[];     /* main.c */
extern const subcommand bench_topics[]; /* bench.c */

command_main info_main, check_main, demo_main, bench_main, replay_main, completion_main,
    manual_main;

/* What `folio --help` says, to stdout (main.c). */
void print_help(void);

#endif
