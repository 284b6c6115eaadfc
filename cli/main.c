/* main.c: the program folio: one table of subcommands, one help, one version. */
#include "base/args.h"
#include "base/commands.h"

#include <folio/folio.h>
#include <stdio.h>
#include <string.h>

const subcommand commands[] = {
    {"demo", demo_main, "run a mixed batch through the paged cache and show what happened", NULL},
    {"info", info_main, "what this machine and this build offer: backends, levels, features", NULL},
    {"check", check_main, "every kernel and every feature against the reference", NULL},
    {"bench", bench_main,
     "how fast: attention or the pool, beside a ceiling measured in the same run", bench_topics},
    {"replay", replay_main, "serve a trace of requests: what would this traffic do", NULL},
    {"completion", completion_main, "let a shell complete commands and options: bash, zsh, fish",
     NULL},
    {"manual", manual_main, "all of this help as a man page", NULL},
    {NULL, NULL, NULL, NULL},
};

static const char more_help[] =
    "\n"
    "options\n"
    "  -h, --help     this text; 'folio COMMAND --help' tells more of a command\n"
    "      --version  the version\n\n"
    "examples\n"
    "  folio demo                  see it work\n"
    "  folio info                  which backend will be used here, and why not another\n"
    "  folio check                 is this build right on this machine? (seconds)\n"
    "  folio check --full -o json  the same at length, for scripts\n"
    "  folio bench                 how close attention comes to what this machine can do\n"
    "  folio bench --compare FILE  what became faster or slower since a saved run\n"
    "  folio bench --backend cuda  the same on a GPU; demo and check take it too\n"
    "  folio bench pool            what the block pool costs on this machine\n"
    "  folio bench overhead        what a call costs besides attention\n"
    "  folio replay                serve some conversations: latencies, memory, prefix hits\n"
    "  folio manual | man -l -     all of this, and all of the commands' help, to read\n\n"
    "environment\n"
    "  NO_COLOR            set and not empty: no colour, also on a terminal\n"
    "  FOLIO_CPU           the highest instruction-set level of the cpu backend\n"
    "  FOLIO_CUDA_LIBRARY  absolute path of the CUDA backend's library, if not beside the program\n"
    "  FOLIO_PYTHON        the Python that runs the peers of 'folio bench --peers'\n\n"
    "exit status\n"
    "  0    all is well\n"
    "  1    a check or a call failed, a file is wrong, or nothing ran\n"
    "  2    the command line is wrong\n"
    "  130  interrupted (Ctrl-C); 'folio replay' still prints what it has\n"
    "  143  terminated\n";

void print_help(void)
{
    printf("folio %s: paged attention for C\n\n"
           "usage: folio COMMAND [OPTION]...\n\n"
           "commands\n",
           folio_version());
    for (const subcommand *c = commands; c->name; c++) printf("  %-10s  %s\n", c->name, c->summary);
    fputs(more_help, stdout);
}

static int run_command(int argc, char **argv)
{
    for (const subcommand *c = commands; c->name; c++)
        if (strcmp(argv[0], c->name) == 0) return c->run(argc, argv);
    const char *what = argv[0][0] == '-' ? "option" : "command";
    return args_complain("", "unknown %s '%s'", what, argv[0]);
}

/* folio help, folio help COMMAND, folio help COMMAND TOPIC */
static int run_help(int argc, char **argv)
{
    char help[] = "--help";
    char *help_argv[] = {argv[1], argc > 2 ? argv[2] : help, help, NULL};
    if (argc > 1) return run_command(argc > 2 ? 3 : 2, help_argv);
    print_help();
    return EXIT_OK;
}

static int run(int argc, char **argv)
{
    if (strcmp(argv[0], "help") == 0) return run_help(argc, argv);
    if (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0) return run_help(1, argv);
    if (strcmp(argv[0], "--version") != 0) return run_command(argc, argv);
    printf("folio %s\n", folio_version());
    return EXIT_OK;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help();
        return EXIT_USAGE;
    }
    int status = run(argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "folio: standard output cannot be written\n");
        return EXIT_FAILED;
    }
    return status;
}
