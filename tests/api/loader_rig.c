/* loader_rig.c: see loader_rig.h. The programs and the decoy are built next to the tests. */
#include "api/loader_rig.h"

#include <fcntl.h>
#include <grp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_WORDS = 16 };

void lrig_init(loader_rig *rig)
{
    const char *tmp = getenv("TMPDIR");
    memset(rig, 0, sizeof *rig);
    snprintf(rig->dir, sizeof rig->dir, "%s/folio-loader.XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(rig->dir) == NULL) abort();
    char mark[300];
    snprintf(mark, sizeof mark, "%s/mark", rig->dir);
    /* for other users too, who run set-uid programs here */
    CHECK(chmod(rig->dir, 0755) == 0 && mkdir(mark, 0700) == 0 && chmod(mark, 0777) == 0);
    lrig_copy(rig, LOADER_CLIENT, "home/client");
    lrig_copy(rig, LOADER_DECOY, "stranger/libfolio_cuda.so");
}

void lrig_end(loader_rig *rig)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", rig->dir);
    CHECK(system(command) == 0);
}

void lrig_copy(loader_rig *rig, const char *file, const char *name)
{
    char command[1024];
    snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s/%s')\" && cp '%s' '%s/%s'",
             rig->dir, name, file, rig->dir, name);
    CHECK_MSG(system(command) == 0, "%s", command);
}

/* dir in the place of every %s, for good. */
static char *expand(const loader_rig *rig, const char *text)
{
    char *out = calloc(1, 4096);
    if (out == NULL) abort();
    for (size_t n = 0; *text != '\0' && n < 3000; n = strlen(out)) {
        if (strncmp(text, "%s", 2) == 0) strcat(out, rig->dir), text += 2;
        else out[n] = *text++;
    }
    return out;
}

static void become(const loader_rig *rig, const lrig_run *run, int output)
{
    char path[512], folder[512], mark[512];
    char *words[MAX_WORDS] = {NULL}, *environment[] = {mark, NULL, NULL};
    int n = 1;
    snprintf(path, sizeof path, "%s/%s", rig->dir, run->program);
    snprintf(folder, sizeof folder, "%s/%s", rig->dir, run->folder);
    snprintf(mark, sizeof mark, "FOLIO_DECOY_MARK=%s/mark/it", rig->dir);
    words[0] = run->argv0 != NULL ? expand(rig, run->argv0) : path;
    for (char *w = strtok(expand(rig, run->asks), " "); w != NULL; w = strtok(NULL, " "))
        if (n < MAX_WORDS - 1) words[n++] = w;
    if (run->variable != NULL) environment[1] = expand(rig, run->variable);
    if (chdir(folder) != 0 || dup2(output, 1) < 0 || dup2(output, 2) < 0) _exit(120);
    gid_t group = (gid_t)run->user;
    if (run->user != 0 &&
        (setgroups(0, NULL) != 0 || setgid(group) != 0 || setuid((uid_t)run->user) != 0))
        _exit(121);
    execve(path, words, environment);
    _exit(122);
}

bool lrig_loads(loader_rig *rig, const lrig_run *run)
{
    int pipes[2], status = -1;
    size_t length = 0;
    ssize_t n;
    memset(rig->output, 0, sizeof rig->output);
    if (pipe(pipes) != 0) abort();
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) become(rig, run, pipes[1]);
    close(pipes[1]);
    while (length < sizeof rig->output - 1 &&
           (n = read(pipes[0], rig->output + length, sizeof rig->output - 1 - length)) > 0)
        length += (size_t)n;
    close(pipes[0]);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s %s: status %d: %s", run->program,
              run->asks, status, rig->output);
    char mark[300];
    snprintf(mark, sizeof mark, "%s/mark/it", rig->dir);
    return unlink(mark) == 0;
}

void lrig_says(const loader_rig *rig, const char *file, int line, const char *words)
{
    if (strstr(rig->output, words) == NULL)
        test_fail(file, line, "\"%s\" lacks \"%s\"", rig->output, words);
}
