/* help_text.c: see help_text.h. */
#include "base/help_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Tables */

static void copy_table(void *to, const arg_option *options)
{
    help_text *h = to;
    for (const arg_option *o = options; o->name && h->num_options < HELP_MAX_OPTIONS; o++) {
        help_option *at = &h->options[h->num_options++];
        *at = (help_option){.letter = o->letter, .kind = o->kind, .choices = o->choices};
        snprintf(at->name, sizeof at->name, "%s", o->name);
    }
}

/* ---- Texts */

/* Commands print their help to stdout: for that time stdout is a file. of NULL: the program's own. */
static char *capture(const subcommand *of, int argc, char **argv)
{
    FILE *file = tmpfile();
    fflush(stdout);
    int kept = dup(STDOUT_FILENO);
    if (file == NULL || kept < 0 || dup2(fileno(file), STDOUT_FILENO) < 0) {
        perror("folio: a temporary file");
        exit(EXIT_FAILED);
    }
    if (of) of->run(argc, argv);
    else print_help();
    fflush(stdout);
    dup2(kept, STDOUT_FILENO);
    close(kept);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = calloc((size_t)size + 1, 1);
    if (text == NULL || fread(text, 1, (size_t)size, file) != (size_t)size) abort();
    fclose(file);
    return text;
}

/* Where the line that explains an option has its name; NULL: there is none. */
static const char *line_of(const char *text, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        const char *at = line + strspn(line, " ");
        if (at == line) continue;
        if (at[0] == '-' && at[1] != '-' && strncmp(at + 2, ", ", 2) == 0) at += 4;
        if (strncmp(at, "--", 2) == 0 && strncmp(at + 2, name, length) == 0 &&
            (at[2 + length] == ' ' || at[2 + length] == '\n'))
            return at + 2 + length;
    }
    return NULL;
}

/* Lines joined, cut where the first thing said ends; dots where that is too long. */
static void copy_what(char *to, const char *at)
{
    size_t used = 0;
    for (; *at && used + 5 < HELP_LINE; at++) {
        if (*at == ';' || (*at == '.' && at[1] == ' ') ||
            (*at == ',' && strncmp(at, ", see below", 11) == 0))
            break;
        if (*at != '\n') {
            to[used++] = *at;
            continue;
        }
        size_t indent = strspn(at + 1, " ");
        if (indent < 16) break; /* no more of this option */
        at += indent;
        to[used++] = ' ';
    }
    if (used + 5 >= HELP_LINE) {
        while (used > 0 && to[used - 1] != ' ') used--;
        used += (size_t)snprintf(to + used, 4, "...");
    }
    to[used] = '\0';
}

static void explain(help_option *o, const char *text)
{
    const char *at = o->kind == ARG_OPERAND ? NULL : line_of(text, o->name);
    if (o->kind == ARG_OPERAND) memcpy(o->takes, o->name, sizeof o->takes);
    if (at == NULL) return;
    if (*at == ' ' && at[1] != ' ') { /* one space, then what it takes */
        size_t length = strcspn(at + 1, " \n");
        snprintf(o->takes, sizeof o->takes, "%.*s", (int)length, at + 1);
        at += 1 + length;
    }
    copy_what(o->what, at + strspn(at, " "));
}

help_text *help_text_of(const subcommand *of, const subcommand *topic)
{
    char words[2][HELP_WORD]; /* commands may change them */
    char *argv[] = {words[0], topic ? words[1] : NULL, NULL};
    help_text *h = calloc(1, sizeof *h);
    if (h == NULL) abort();
    snprintf(words[0], HELP_WORD, "%s", of->name);
    snprintf(words[1], HELP_WORD, "%s", topic ? topic->name : "");
    snprintf(h->name, sizeof h->name, "%.30s%s%.30s", words[0], topic ? " " : "", words[1]);
    args_list(copy_table, h);
    h->text = capture(of, topic ? 2 : 1, argv);
    args_list(NULL, NULL);
    for (int i = 0; i < h->num_options; i++) explain(&h->options[i], h->text);
    return h;
}

char *help_text_main(void) { return capture(NULL, 0, NULL); }

void help_text_free(help_text *h)
{
    free(h->text);
    free(h);
}

bool help_takes_file(const help_option *o)
{
    static const char *const words[] = {"FILE", "PATH", "TRACE"};
    for (int i = 0; i < 3; i++)
        if (strncmp(o->takes, words[i], strlen(words[i])) == 0) return true;
    return false;
}
