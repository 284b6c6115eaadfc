/*
 * loader_rig.h: a folder with a stranger's libfolio_cuda.so in it, and programs run there: what the tests share
 * that see which file is loaded. The stranger's library leaves a mark.
 */
#ifndef FOLIO_TESTS_LOADER_RIG_H
#define FOLIO_TESTS_LOADER_RIG_H

#include "support.h"

/* dir/home/client, dir/stranger/libfolio_cuda.so, dir/mark/ */
typedef struct {
    char dir[256];
    char output[4096]; /* of the last run, "" where it could not be run */
} loader_rig;

void lrig_init(loader_rig *rig);
void lrig_end(loader_rig *rig);

/* Copies a file to dir/name; its folder is made. */
void lrig_copy(loader_rig *rig, const char *file, const char *name);

/* How a program is run. Strings with %s: dir takes its place. */
typedef struct {
    const char *program;  /* below dir */
    const char *argv0;    /* NULL: the program's path */
    const char *folder;   /* the current one, below dir */
    const char *variable; /* one variable of the environment, or NULL */
    int user;             /* 0: who runs the tests */
    const char *asks;     /* arguments, a blank between them */
} lrig_run;
/* Was the stranger's library loaded? The output is kept. */
bool lrig_loads(loader_rig *rig, const lrig_run *run);

/* The last output has these words. */
void lrig_says(const loader_rig *rig, const char *file, int line, const char *words);
#define SAYS(rig, words) lrig_says(rig, __FILE__, __LINE__, words)

#endif
