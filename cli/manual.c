/*
 * manual.c: `folio manual`: folio.1, a man page made from what --help prints: its headings become headings, its
 * columns of terms and words become lists, and examples stay as they are.
 */
#include "base/args.h"
#include "base/commands.h"
#include "base/help_text.h"

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: folio manual\n\n"
    "Prints folio.1, a man page with the help of all commands. 'make install' installs it; the example\n"
    "shows how to read it without installing.\n\n"
    "options\n"
    "  -h, --help  this text\n\n"
    "examples\n"
    "  folio manual | man -l -\n\n"
    "exit status\n"
    "  0  success    2  invalid command line\n";

/* ---- Text for roff: a hyphen stays one, a dot begins no request */

static void put_text(const char *text, size_t length)
{
    if (length > 0 && (text[0] == '.' || text[0] == '\'')) printf("\\&");
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\\') printf("\\e");
        else if (text[i] == '-') printf("\\-");
        else putchar(text[i]);
    }
}

static void put_line(const char *text, size_t length)
{
    put_text(text, length);
    putchar('\n');
}

/* ---- Lines of help */

typedef struct line {
    const char *text; /* behind its indentation */
    size_t length;
    size_t indent;
    size_t term; /* of a line of two columns: the first's length; else 0 */
    size_t next; /* the second's place in the text */
} line;

static line line_at(const char *at)
{
    line l = {.indent = strspn(at, " ")};
    l.text = at + l.indent;
    l.length = strcspn(l.text, "\n");
    for (size_t i = 0; i + 2 < l.length && l.term == 0; i++)
        if (l.text[i] == ' ' && l.text[i + 1] == ' ') l.term = i;
    l.next = l.term + strspn(l.text + l.term, " ");
    return l;
}

/* A heading stands at the left, ends without a stop, and what is below it is indented. */
static bool is_heading(const char *at, const line *l)
{
    const char *below = at + l->length + 1;
    return l->indent == 0 && l->length > 0 && at[l->length] && below[0] == ' ' &&
           l->text[l->length - 1] != '.' && l->text[l->length - 1] != ':' && l->length < 40;
}

static bool is_verbatim(const char *heading, size_t length)
{
    static const char *const names[] = {"examples", "exit status"};
    for (int i = 0; i < 2; i++)
        if (strlen(names[i]) == length && strncmp(heading, names[i], length) == 0) return true;
    return false;
}

typedef struct page {
    bool verbatim, open; /* of the section; is a verbatim block open? */
    size_t list;         /* indentation of the terms of the list we are in; 0: none */
} page;

static void set_verbatim(page *p, bool open)
{
    if (p->open != open) puts(open ? ".EX" : ".EE");
    p->open = open;
}

static void put_heading(page *p, const line *l)
{
    set_verbatim(p, false);
    p->verbatim = is_verbatim(l->text, l->length);
    p->list = 0;
    printf(".SS ");
    put_line(l->text, l->length);
}

/* A term with its words; the words' next lines are indented more. */
static void put_entry(page *p, const line *l)
{
    p->list = l->indent;
    printf(".TP\n.B ");
    put_line(l->text, l->term);
    put_line(l->text + l->next, l->length - l->next);
}

static void put_body(page *p, const line *l)
{
    bool option = l->indent > 0 && l->text[0] == '-';
    bool words = l->term > 0 && l->indent > 0 && (l->indent <= 2 || option);
    if (p->verbatim || (l->indent == 4 && !option && p->list == 0)) {
        set_verbatim(p, true);
        for (size_t i = 0; i < l->indent; i++) putchar(' ');
        put_line(l->text, l->length);
        return;
    }
    set_verbatim(p, false);
    if (words) {
        put_entry(p, l);
    } else {
        if (p->list && l->indent <= 2 && !option) puts(".PP"), p->list = 0;
        put_line(l->text, l->length);
    }
}

/* Of "usage: ..." each form on a line of its own. Returns what follows. */
static const char *put_usage(const char *at)
{
    while (strncmp(at, "usage: ", 7) == 0 || strncmp(at, "       folio", 12) == 0) {
        size_t length = strcspn(at, "\n");
        printf(".B ");
        put_line(at + 7, length - 7);
        puts(".br");
        at += length + (at[length] == '\n');
    }
    return at;
}

static void put_help(const char *at)
{
    page p = {.verbatim = false};
    at = put_usage(at);
    while (*at) {
        line l = line_at(at);
        if (l.length == 0 && p.verbatim && at[1] == ' ') puts("");
        else if (l.length == 0)
            set_verbatim(&p, false), p.list = 0, p.verbatim = false, puts(".PP");
        else if (is_heading(at, &l)) put_heading(&p, &l);
        else put_body(&p, &l);
        at += l.indent + l.length;
        at += *at == '\n';
    }
    set_verbatim(&p, false);
}

static void put_command(const subcommand *of, const subcommand *topic)
{
    help_text *h = help_text_of(of, topic);
    printf(".SH folio %s\n", h->name);
    put_help(h->text);
    help_text_free(h);
}

int manual_main(int argc, char **argv)
{
    const arg_option table[] = {{.name = NULL}};
    int status;
    if (!args_run(argc, argv, table, help, &status)) return status;
    char *text = help_text_main();
    printf(".TH FOLIO 1 \"\" \"folio %s\" \"User Commands\"\n.nh\n.ad l\n", folio_version());
    printf(
        ".SH NAME\nfolio \\- paged attention: see it work, check it, measure it, serve traces\n");
    printf(".SH SYNOPSIS\n");
    const char *rest = put_usage(strstr(text, "usage: "));
    printf(".SH DESCRIPTION\n");
    put_help(rest);
    free(text);
    for (const subcommand *c = commands; c->name; c++) {
        put_command(c, NULL);
        for (const subcommand *t = c->topics; t && t->name; t++) put_command(c, t);
    }
    return EXIT_OK;
}
