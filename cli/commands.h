/* commands.h: the subcommands. Each takes argv from its own name on and returns the exit status. */
#ifndef FOLIO_COMMANDS_H
#define FOLIO_COMMANDS_H

int info_main(int argc, char **argv);
int check_main(int argc, char **argv);
int demo_main(int argc, char **argv);
int bench_main(int argc, char **argv);
int replay_main(int argc, char **argv);

#endif
