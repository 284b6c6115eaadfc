/* bench_peers.c: see bench_peers.h. What is said between the two is at the top of peers.py. */
#include "bench/bench_peers.h"

#include "base/term.h"
#include "bench/bench.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_PATH = 4096, MAX_LINE = 512, MAX_WORD = 64 };

extern char **environ;

typedef struct peer {
    char name[MAX_WORD], version[MAX_WORD];
} peer;

struct bench_peers {
    char script[MAX_PATH];
    pid_t child; /* 0: none */
    FILE *to, *from;
    char line[MAX_LINE]; /* the last answer, without its end */
    peer peers[BENCH_MAX_PEERS];
    int count;
};

/* ---- The script */

/*
 * Without --peers-script: peers/peers.py beside the folder of this program, as a build in the source tree has it. It is run, so
 * it must belong to whom the program belongs to: in a shared folder it could be anyone's.
 */
static bool find_script(char *path)
{
    static const char beside[] = "/../peers/peers.py";
    struct stat program, script;
    ssize_t n = readlink("/proc/self/exe", path, MAX_PATH - sizeof beside);
    if (n <= 0) return false;
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    if (slash == NULL) return false;
    strcpy(slash, beside);
    return stat("/proc/self/exe", &program) == 0 && stat(path, &script) == 0 &&
           script.st_uid == program.st_uid && (script.st_mode & S_IWOTH) == 0;
}

bench_peers *bench_peers_open(const char *script)
{
    bench_peers *p = bench_alloc(1, sizeof *p);
    bool found =
        script ? strlen(script) < MAX_PATH && access(script, R_OK) == 0 : find_script(p->script);
    if (found && script) strcpy(p->script, script);
    if (found) return p;
    fprintf(stderr, "folio bench: --peers: there is no %s; --peers-script says where it is\n",
            script ? script
                   : "peers/peers.py beside the program's folder, or it has another owner");
    free(p);
    return NULL;
}

static void stop(bench_peers *p)
{
    if (p->child == 0) return;
    fclose(p->to); /* the script ends where its input does */
    fclose(p->from);
    waitpid(p->child, NULL, 0);
    p->child = 0;
}

void bench_peers_close(bench_peers *p)
{
    if (p == NULL) return;
    stop(p);
    free(p);
}

static bool ended(bench_peers *p)
{
    term_progress_end();
    fprintf(stderr, "folio bench: --peers: %s ended early\n", p->script);
    stop(p);
    return false;
}

/* ---- Lines */

static bool ask(bench_peers *p, const char *line)
{
    if (p->child == 0) return false;
    return (fprintf(p->to, "%s\n", line) > 0 && fflush(p->to) == 0) || ended(p);
}

static bool hear(bench_peers *p)
{
    if (p->child == 0) return false;
    if (fgets(p->line, sizeof p->line, p->from) == NULL) return ended(p);
    p->line[strcspn(p->line, "\n")] = '\0';
    return true;
}

/* Its place; a new one is added. -1: there is no room. */
static int place_of(bench_peers *p, const char *name)
{
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->peers[i].name, name) == 0) return i;
    if (p->count == BENCH_MAX_PEERS) return -1;
    snprintf(p->peers[p->count].name, MAX_WORD, "%s", name);
    return p->count++;
}

/* ---- The process */

/* `end` is the script's stdin and stdout. OpenMP takes its number of threads from the environment. */
static int spawn(bench_peers *p, int32_t threads, const char *device, int end)
{
    const char *python = getenv("FOLIO_PYTHON");
    char count[16];
    char *program = (char *)(python && *python ? python : "python3");
    char *argv[] = {program,        p->script, (char *)"--threads", count, (char *)"--device",
                    (char *)device, NULL};
    if (device == NULL) argv[4] = NULL;
    snprintf(count, sizeof count, "%d", (int)threads);
    setenv("OMP_NUM_THREADS", count, 1);
    posix_spawn_file_actions_t actions;
    int error = posix_spawn_file_actions_init(&actions);
    if (error == 0) {
        posix_spawn_file_actions_adddup2(&actions, end, 0);
        posix_spawn_file_actions_adddup2(&actions, end, 1);
        error = posix_spawnp(&p->child, program, &actions, NULL, argv, environ);
        posix_spawn_file_actions_destroy(&actions);
    }
    if (error == 0) return 0;
    p->child = 0;
    fprintf(stderr, "folio bench: --peers: %s cannot be started: %s\n", program, strerror(error));
    return error;
}

static bool start_child(bench_peers *p, int32_t threads, const char *device)
{
    int ends[2]; /* ours, and the script's */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return false;
    int error = spawn(p, threads, device, ends[1]);
    close(ends[1]);
    p->to = error ? NULL : fdopen(ends[0], "w");
    p->from = p->to ? fdopen(dup(ends[0]), "r") : NULL;
    if (p->from) return true;
    if (p->to) fclose(p->to);
    else close(ends[0]);
    return false;
}

bool bench_peers_start(bench_peers *p, int32_t threads, const char *device)
{
    signal(SIGPIPE, SIG_IGN); /* a script that ended shows as a failed write */
    stop(p);
    if (!start_child(p, threads, device)) return false;
    for (;;) {
        char name[MAX_WORD], version[MAX_WORD];
        if (!hear(p)) return false;
        if (strcmp(p->line, "ready") == 0) return true;
        if (sscanf(p->line, "version %63s %63s", name, version) != 2) continue;
        int i = place_of(p, name);
        if (i >= 0) snprintf(p->peers[i].version, MAX_WORD, "%s", version);
    }
}

int bench_peers_count(const bench_peers *p) { return p->count; }

const char *bench_peers_name(const bench_peers *p, int i) { return p->peers[i].name; }

const char *bench_peers_version(const bench_peers *p, int i) { return p->peers[i].version; }

/* ---- Cases */

bool bench_peers_offer(bench_peers *p, const char *line, bool runs[BENCH_MAX_PEERS])
{
    memset(runs, 0, BENCH_MAX_PEERS * sizeof *runs);
    if (!ask(p, line)) return false;
    for (;;) {
        char name[MAX_WORD];
        if (!hear(p)) return false;
        if (strcmp(p->line, "ready") == 0) return true;
        int i = sscanf(p->line, "peer %63s", name) == 1 ? place_of(p, name) : -1;
        if (i >= 0) runs[i] = true;
    }
}

bool bench_peers_time(bench_peers *p, int i, bench_cache cache, double *seconds)
{
    char line[MAX_LINE];
    snprintf(line, sizeof line, "{\"run\": \"%s\", %s\"warm\": %s}", p->peers[i].name,
             cache == BENCH_DIRTY ? "\"dirty\": true, " : "",
             cache == BENCH_WARM ? "true" : "false");
    if (!ask(p, line) || !hear(p)) return false;
    if (sscanf(p->line, "time %lf", seconds) == 1 && *seconds > 0) return true;
    term_progress_end();
    fprintf(stderr, "folio bench: --peers: %s: %s\n", p->peers[i].name, p->line);
    return false;
}
