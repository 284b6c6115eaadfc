/* main.c: the program folio: one table of subcommands, one help, one version. */
#include "base/args.h"
#include "base/commands.h"

#include <folio/folio.h>
#include <stdio.h>
#include <string.h>

const subcommand commands[] = {
    {"demo", demo_main, "run a mixed batch through the paged cache and show what happened", NULL},
    {"info", info_main, "show backends, instruction-set levels, kernels and features", NULL},
    {"check", check_main, "test every kernel and every feature against the reference", NULL},
    {"bench", bench_main,
     "measure attention or the block pool against ceilings measured in the same run", bench_topics},
    {"replay", replay_main, "serve a trace of requests; report latencies and memory", NULL},
    {"completion", completion_main, "print a completion script for bash, zsh or fish", NULL},
    {"manual", manual_main, "print all help texts as a man page", NULL},
    {NULL, NULL, NULL, NULL},
};

static const char more_help[] =
    "\noptions\n"
    "  -h, --help     this text; 'folio COMMAND --help' explains a command\n"
    "      --version  the version\n\n"
    "examples\n"
    "  folio demo                  run a small example\n"
    "  folio info                  which backend is used here, and why others are not\n"
    "  folio check                 test this build on this machine (a minute or two)\n"
    "  folio check --full -o json  more cases, output for scripts\n"
    "  folio bench                 attention speed against this machine's ceilings\n"
    "  folio bench --compare FILE  compare with a saved run\n"
    "  folio bench --backend cuda  the same on a GPU; demo and check have the option too\n"
    "  folio bench pool            speed of the block pool\n"
    "  folio bench overhead        overhead of a call\n"
    "  folio replay                serve the built-in trace: latencies, memory, prefix hits\n"
    "  folio manual | man -l -     read all help texts as a man page\n\n"
    "environment\n"
    "  NO_COLOR            if set and not empty: no colours\n"
    "  FOLIO_CPU           the highest instruction-set level of the cpu backend\n"
    "  FOLIO_DEBUG         poison: pools of host backends fill fresh and freed blocks with NaN\n"
    "  FOLIO_CUDA_LIBRARY  absolute path of libfolio_cuda.so, if not in the program's folder\n"
    "  FOLIO_PYTHON        the Python that runs the peers of 'folio bench --peers'\n\n"
    "exit status\n"
    "  0    success\n"
    "  1    a check or a call failed, a file is invalid, nothing ran, a replayed row mismatched, or\n"
    "       --fail-if-slower found a case\n"
    "  2    invalid command line\n"
    "  130  interrupted (Ctrl-C); 'folio bench' and 'folio replay' print what they have so far\n"
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
    for (int i = 1; i < argc; i++) /* errors show arguments on the terminal */
        for (const char *c = argv[i]; *c; c++)
            if ((unsigned char)*c < 0x20 || *c == 0x7f)
                return args_complain("", "argument %d has a control character", i);
    int status = run(argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "folio: standard output cannot be written\n");
        return EXIT_FAILED;
    }
    return status;
}
