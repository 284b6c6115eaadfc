/*
 * on_pty.c: runs a program on a terminal of its own, does things to it, and tells what the terminal
 * shows at the end: its rows, those scrolled out included, and a line about its state.
 *
 * usage: on_pty [-s COLUMNSxROWS] [-a WHEN:ACTION]... PROGRAM [ARGUMENT]...
 *   WHEN    3: live displays drawn since the last action; 120ms: since then; 2rows: that are not empty
 *   ACTION  INT, TERM, KILL: a signal; ^C: the key; 60x20: a new size; FILE=name: the screen goes there
 * Lines that become too wide for the terminal are folded, as most terminals do.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ROWS = 4096, MAX_COLUMNS = 400, MAX_ACTIONS = 8 };

typedef struct cell {
    char bytes[5]; /* one character of UTF-8 */
} cell;

typedef struct row {
    cell cells[MAX_COLUMNS];
    int length;
    bool folded; /* the next row goes on with it */
} row;

typedef struct screen {
    row *rows; /* [MAX_ROWS], scrolled out ones first */
    int columns, height, x, y, top;
    int num_rows; /* ever reached */
    char sequence[32];
    int in_sequence; /* bytes of it so far; 0: none */
    int draws, folds, colours, unknown;
    bool colour, hidden, alternate;
} screen;

static void die(const char *what)
{
    fprintf(stderr, "on_pty: %s: %s\n", what, strerror(errno));
    exit(2);
}

/* ---- The screen */

static void go_down(screen *s)
{
    if (++s->y >= MAX_ROWS) die("too many rows");
    if (s->y >= s->num_rows) {
        s->rows[s->y] = (row){.length = 0};
        s->num_rows = s->y + 1;
    }
    if (s->y - s->height + 1 > s->top) s->top = s->y - s->height + 1;
}

static void put_cell(screen *s, const cell *c)
{
    if (s->x >= s->columns) {
        s->rows[s->y].folded = true;
        s->folds++;
        s->x = 0;
        go_down(s);
    }
    row *r = &s->rows[s->y];
    while (r->length <= s->x) r->cells[r->length++] = (cell){" "};
    r->cells[s->x++] = *c;
}

static void put_byte(screen *s, char byte)
{
    if (((unsigned char)byte & 0xc0) == 0x80) { /* goes on with the last character */
        cell *c = s->x > 0 ? &s->rows[s->y].cells[s->x - 1] : NULL;
        if (c && strlen(c->bytes) < 4) c->bytes[strlen(c->bytes)] = byte;
        return;
    }
    put_cell(s, &(cell){{byte}});
}

static void clear_behind(screen *s, bool rows_too)
{
    row *r = &s->rows[s->y];
    if (r->length > s->x) r->length = s->x;
    r->folded = false;
    if (rows_too) s->num_rows = s->y + 1;
    s->draws += rows_too;
}

static void end_sequence(screen *s)
{
    const char *text = s->sequence + 2;
    int n = atoi(text) > 0 ? atoi(text) : 1;
    char last = s->sequence[s->in_sequence - 1];
    s->sequence[s->in_sequence] = '\0';
    s->in_sequence = 0;
    if (strcmp(text, "?25l") == 0 || strcmp(text, "?25h") == 0) s->hidden = last == 'l';
    else if (strcmp(text, "?1049h") == 0 || strcmp(text, "?1049l") == 0) s->alternate = last == 'h';
    else if (last == 'm') s->colours++, s->colour = atoi(text) != 0;
    else if (last == 'A') s->y = s->y - n > s->top ? s->y - n : s->top;
    else if (strcmp(text, "K") == 0) clear_behind(s, false);
    else if (strcmp(text, "J") == 0) clear_behind(s, true);
    else s->unknown++;
}

static void feed(screen *s, char c)
{
    if (s->in_sequence > 0) {
        if (s->in_sequence + 1 >= (int)sizeof s->sequence) die("a sequence without end");
        s->sequence[s->in_sequence++] = c;
        if (s->in_sequence > 2 && c >= 0x40 && c <= 0x7e) end_sequence(s);
    } else if (c == '\033') s->sequence[s->in_sequence++] = c;
    else if (c == '\r') s->x = 0;
    else if (c == '\n') go_down(s);
    else put_byte(s, c);
}

/* Folded rows become lines again, lines are folded anew. */
static void resize(screen *s, int columns, int height)
{
    screen to = *s;
    row *old = s->rows;
    to.rows = calloc(MAX_ROWS, sizeof *to.rows);
    if (to.rows == NULL) die("memory");
    to.columns = columns;
    to.height = height;
    to.x = to.y = to.top = 0;
    to.num_rows = 1;
    int y = 0, x = s->x;
    for (int i = 0; i < s->num_rows; i++) {
        for (int k = 0; k < old[i].length; k++) put_cell(&to, &old[i].cells[k]);
        if (i == s->y) y = to.y;
        if (old[i].folded || i + 1 == s->num_rows) continue;
        to.x = 0;
        go_down(&to);
    }
    to.y = y;
    to.x = x < columns ? x : columns - 1;
    to.folds = s->folds;
    *s = to;
    free(old);
}

static void print_screen(const screen *s, FILE *out)
{
    for (int i = 0; i < s->num_rows; i++) {
        for (int k = 0; k < s->rows[i].length; k++) fputs(s->rows[i].cells[k].bytes, out);
        fputc('\n', out);
    }
}

/* ---- The program */

typedef struct terminal {
    int master, slave;
    pid_t child;
    screen s;
    int status;
    bool ended;
} terminal;

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void set_size(const terminal *t)
{
    struct winsize size = {.ws_col = (unsigned short)t->s.columns,
                           .ws_row = (unsigned short)t->s.height};
    if (ioctl(t->master, TIOCSWINSZ, &size) != 0) die("TIOCSWINSZ");
}

static void start(terminal *t, char **argv)
{
    t->master = posix_openpt(O_RDWR | O_NOCTTY);
    if (t->master < 0 || grantpt(t->master) != 0 || unlockpt(t->master) != 0) die("posix_openpt");
    const char *name = ptsname(t->master);
    t->slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (t->slave < 0) die(name);
    set_size(t);
    t->child = fork();
    if (t->child < 0) die("fork");
    if (t->child > 0) return;
    setsid();
    int fd = open(name, O_RDWR); /* the session's terminal */
    for (int i = 0; i < 3; i++) dup2(fd, i);
    if (fd > 2) close(fd);
    close(t->master);
    execvp(argv[0], argv);
    die(argv[0]);
}

/* Shows what was written within `ms`; true while the program lives or has something to say. */
static bool show(terminal *t, int ms)
{
    struct pollfd wait = {.fd = t->master, .events = POLLIN};
    char bytes[512];
    if (!t->ended) t->ended = waitpid(t->child, &t->status, WNOHANG) == t->child;
    if (poll(&wait, 1, t->ended ? 0 : ms) <= 0) return !t->ended;
    ssize_t n = read(t->master, bytes, sizeof bytes);
    for (ssize_t i = 0; i < n; i++) feed(&t->s, bytes[i]);
    return n > 0 || !t->ended;
}

/* Nothing is under way while the size changes. */
static void change_size(terminal *t, int columns, int height)
{
    int status;
    kill(t->child, SIGSTOP);
    if (waitpid(t->child, &status, WUNTRACED) != t->child || !WIFSTOPPED(status)) {
        t->status = status;
        t->ended = true;
        return;
    }
    struct pollfd wait = {.fd = t->master, .events = POLLIN};
    while (poll(&wait, 1, 50) > 0) show(t, 0);
    resize(&t->s, columns, height);
    set_size(t);
    kill(t->child, SIGCONT);
}

static void act(terminal *t, const char *what)
{
    int columns, height;
    FILE *file;
    if (strcmp(what, "INT") == 0) kill(t->child, SIGINT);
    else if (strcmp(what, "TERM") == 0) kill(t->child, SIGTERM);
    else if (strcmp(what, "KILL") == 0) kill(t->child, SIGKILL);
    else if (strcmp(what, "^C") == 0) {
        if (write(t->master, "\003", 1) != 1) die("write");
    } else if (sscanf(what, "%dx%d", &columns, &height) == 2) change_size(t, columns, height);
    else if (strncmp(what, "FILE=", 5) == 0) {
        if ((file = fopen(what + 5, "w")) == NULL) die(what);
        print_screen(&t->s, file);
        fclose(file);
    } else {
        fprintf(stderr, "on_pty: no such action: %s\n", what);
        exit(2);
    }
}

static int full_rows(const screen *s)
{
    int count = 0;
    for (int i = 0; i < s->num_rows; i++) count += s->rows[i].length > 0;
    return count;
}

static void run(terminal *t, char *const *actions, int num_actions)
{
    double since = now_ms();
    int draws = 0;
    for (int i = 0; show(t, 5);) {
        if (i == num_actions || t->ended) continue;
        char *unit;
        double when = (double)strtol(actions[i], &unit, 10);
        double is = *unit == 'm'   ? now_ms() - since
                    : *unit == 'r' ? full_rows(&t->s)
                                   : t->s.draws - draws;
        if (is < when) continue;
        act(t, strchr(actions[i], ':') + 1);
        since = now_ms();
        draws = t->s.draws;
        i++;
    }
}

int main(int argc, char **argv)
{
    terminal t = {.s = {.columns = 80, .height = 24, .num_rows = 1}};
    char *actions[MAX_ACTIONS];
    int num_actions = 0, option;
    struct termios before, after;
    while ((option = getopt(argc, argv, "+s:a:")) != -1) {
        if (option == 'a' && num_actions < MAX_ACTIONS && strchr(optarg, ':'))
            actions[num_actions++] = optarg;
        else if (option != 's' || sscanf(optarg, "%dx%d", &t.s.columns, &t.s.height) != 2) return 2;
    }
    if (optind == argc) return 2;
    t.s.rows = calloc(MAX_ROWS, sizeof *t.s.rows);
    if (t.s.rows == NULL) die("memory");
    start(&t, argv + optind);
    tcgetattr(t.slave, &before);
    run(&t, actions, num_actions);
    tcgetattr(t.slave, &after);
    print_screen(&t.s, stdout);
    int code = WIFEXITED(t.status) ? WEXITSTATUS(t.status) : 128 + WTERMSIG(t.status);
    printf("-- status %d, draws %d, folds %d, colours %d, unknown %d, colour %d, hidden %d, "
           "alternate %d, modes %s\n",
           code, t.s.draws, t.s.folds, t.s.colours, t.s.unknown, t.s.colour, t.s.hidden,
           t.s.alternate, memcmp(&before, &after, sizeof before) == 0 ? "kept" : "changed");
    free(t.s.rows);
    return 0;
}
