/* save.c: see save.h. */
#define _GNU_SOURCE /* O_TMPFILE */
#include "base/save.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUFFIX = 7 }; /* letters of ".XXXXXX" */

static bool complain(const char *who, const char *path)
{
    fprintf(stderr, "%s: %s: %s\n", who, path, strerror(errno));
    return false;
}

/* The path and room for a suffix; links are followed, so that they stay links. */
static char *target_of(const char *path, size_t more)
{
    char *real = realpath(path, NULL);
    const char *from = real ? real : path;
    char *text = malloc(strlen(from) + more + 1);
    if (text) strcpy(text, from);
    free(real);
    return text;
}

static void cut_to_directory(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash == NULL) strcpy(path, ".");
    else slash[slash == path] = '\0';
}

bool save_possible(const char *who, const char *path)
{
    struct stat found;
    bool there = stat(path, &found) == 0;
    if (there && S_ISDIR(found.st_mode)) return errno = EISDIR, complain(who, path);
    if (there && !S_ISREG(found.st_mode)) return access(path, W_OK) == 0 || complain(who, path);
    size_t length = strlen(path);
    if (length == 0 || path[length - 1] == '/') return errno = ENOENT, complain(who, path);
    char *directory = target_of(path, 1);
    if (directory == NULL) return complain(who, path);
    cut_to_directory(directory);
    bool fine = access(directory, W_OK | X_OK) == 0 || complain(who, path);
    free(directory);
    return fine;
}

static bool write_all(int fd, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = write(fd, bytes, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

static bool write_over(const char *path, const char *bytes, size_t size)
{
    int fd = open(path, O_WRONLY);
    if (fd < 0) return false;
    bool fine = write_all(fd, bytes, size);
    return close(fd) == 0 && fine;
}

/* The old file's mode, or any new one's. */
static mode_t mode_for(const char *path)
{
    struct stat found;
    mode_t mask = umask(0);
    umask(mask);
    return stat(path, &found) == 0 ? found.st_mode & 0777 : 0666 & ~mask;
}

#ifdef O_TMPFILE
/* A file gets its name when it is whole: not even a program that is killed leaves a part. */
static bool write_nameless(const char *target, char *beside, const char *bytes, size_t size)
{
    char self[32];
    size_t length = strlen(target);
    cut_to_directory(beside);
    int fd = open(beside, O_TMPFILE | O_WRONLY, 0600);
    if (fd < 0) return false;
    bool fine = write_all(fd, bytes, size) && fchmod(fd, mode_for(target)) == 0;
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    if (fine && linkat(AT_FDCWD, self, AT_FDCWD, target, AT_SYMLINK_FOLLOW) != 0) {
        /* There is one already, which only a rename replaces. */
        snprintf(beside, length + SUFFIX + 1, "%s.%06ld", target, (long)getpid() % 1000000);
        fine = linkat(AT_FDCWD, self, AT_FDCWD, beside, AT_SYMLINK_FOLLOW) == 0;
        if (fine && rename(beside, target) != 0) {
            fine = false;
            unlink(beside);
        }
    }
    close(fd);
    return fine;
}
#else
static bool write_nameless(const char *target, char *beside, const char *bytes, size_t size)
{
    return (void)target, (void)beside, (void)bytes, (void)size, false;
}
#endif

/* The same where files without names cannot be had. */
static bool write_named(const char *target, char *beside, const char *bytes, size_t size)
{
    int fd = mkstemp(strcat(strcpy(beside, target), ".XXXXXX"));
    if (fd < 0) return false;
    bool fine = write_all(fd, bytes, size) && fchmod(fd, mode_for(target)) == 0;
    fine = close(fd) == 0 && fine;
    if (fine && rename(beside, target) == 0) return true;
    int error = errno;
    unlink(beside);
    errno = error;
    return false;
}

bool save_file(const char *who, const char *path, const char *bytes, size_t size)
{
    struct stat found;
    sigset_t all, before;
    if (stat(path, &found) == 0 && !S_ISREG(found.st_mode))
        return write_over(path, bytes, size) || complain(who, path);
    char *target = target_of(path, 0), *beside = target_of(path, SUFFIX);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error, not the end */
    sigfillset(&all);         /* what ends the program waits for the rename */
    sigprocmask(SIG_BLOCK, &all, &before);
    bool fine =
        target && beside &&
        (write_nameless(target, beside, bytes, size) || write_named(target, beside, bytes, size));
    fine = fine || complain(who, path);
    sigprocmask(SIG_SETMASK, &before, NULL);
    free(target);
    free(beside);
    return fine;
}
