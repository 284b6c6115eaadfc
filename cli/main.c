/* main.c: the program folio: one table of subcommands, one help, one version. */
#include "args.h"
#include "commands.h"

#include <folio/folio.h>
#include <stdio.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} command;

static const command commands[] = {
    {"demo", demo_main, "run a mixed batch through the paged cache and show what happened"},
    {"info", info_main, "what this machine and this build offer: backends, levels, features"},
    {"check", check_main, "every kernel and every feature against the reference"},
    {"bench", bench_main,
     "how fast: attention or the pool, beside a ceiling measured in the same run"},
    {"replay", replay_main, "serve a trace of requests: what would this traffic do"},
};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(void)
{
    printf("folio %s: paged attention for C\n\n"
           "usage: folio COMMAND [OPTION]...\n\n"
           "commands\n",
           folio_version());
    for (int i = 0; i < NUM_COMMANDS; i++)
        printf("  %-8s %s\n", commands[i].name, commands[i].summary);
    printf(
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
        "  folio bench --backend cuda  the same on a GPU; demo and check take it too\n"
        "  folio bench pool            what the block pool costs on this machine\n"
        "  folio bench overhead        what a call costs besides attention\n"
        "  folio replay                serve some conversations: latencies, memory, prefix hits\n\n"
        "exit status\n"
        "  0  all is well\n"
        "  1  a check or a call failed, or nothing ran\n"
        "  2  the command line is wrong\n");
}

static int run_command(int argc, char **argv)
{
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (strcmp(argv[0], commands[i].name) == 0) return commands[i].run(argc, argv);
    const char *what = argv[0][0] == '-' ? "option" : "command";
    return args_complain("", "unknown %s '%s'", what, argv[0]);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help();
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        (strcmp(argv[1], "help") == 0 && argc == 2)) {
        print_help();
        return EXIT_OK;
    }
    if (strcmp(argv[1], "help") == 0) { /* folio help COMMAND */
        char help[] = "--help";
        char *help_argv[] = {argv[2], help, NULL};
        return run_command(2, help_argv);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("folio %s\n", folio_version());
        return EXIT_OK;
    }
    int status = run_command(argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "folio: standard output cannot be written\n");
        return EXIT_FAILED;
    }
    return status;
}
