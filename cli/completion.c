/*
 * completion.c: `folio completion SHELL`: a script that lets a shell complete commands, topics, options, choices and
 * file names. It is made from the commands' own tables and help (help_text.h).
 */
#include "base/args.h"
#include "base/commands.h"
#include "base/help_text.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "usage: folio completion SHELL\n\n"
    "Prints a script that completes folio's commands, topics, options and their values in a shell.\n"
    "SHELL is bash, zsh or fish. 'make install' installs all three; the examples show how to use them\n"
    "without installing.\n\n"
    "options\n"
    "  -h, --help  this text\n\n"
    "examples\n"
    "  . <(folio completion bash)                        # in ~/.bashrc\n"
    "  . <(folio completion zsh)                         # in ~/.zshrc, after compinit\n"
    "  folio completion fish > ~/.config/fish/completions/folio.fish\n\n"
    "exit status\n"
    "  0  success    2  invalid command line\n";

typedef void visit_command(const help_text *h, const subcommand *of, const subcommand *topic);

static void for_all(visit_command *visit)
{
    for (const subcommand *c = commands; c->name; c++) {
        help_text *h = help_text_of(c, NULL);
        visit(h, c, NULL);
        help_text_free(h);
        for (const subcommand *t = c->topics; t && t->name; t++) {
            h = help_text_of(c, t);
            visit(h, c, t);
            help_text_free(h);
        }
    }
}

/* ---- bash */

/* "a|b" as "a b". */
static void put_choices(const char *choices)
{
    for (; *choices; choices++) putchar(*choices == '|' ? ' ' : *choices);
}

/* The words before a value: "bench --output"|"bench -o". */
static void bash_pattern(const help_text *h, const help_option *o)
{
    printf("        \"%s --%s\"", h->name, o->name);
    if (o->letter) printf("|\"%s -%c\"", h->name, o->letter);
    printf(") ");
}

static void bash_values(const help_text *h, const subcommand *of, const subcommand *topic)
{
    (void)of;
    (void)topic;
    for (int i = 0; i < h->num_options; i++) {
        const help_option *o = &h->options[i];
        if (o->kind == ARG_FLAG || o->kind == ARG_OPERAND) continue;
        bash_pattern(h, o);
        if (o->choices) {
            printf("_folio_words \"");
            put_choices(o->choices);
            printf("\"; ");
        } else if (help_takes_file(o)) {
            printf("_folio_files; ");
        }
        printf("return ;;\n");
    }
}

static void bash_options(const help_text *h, const subcommand *of, const subcommand *topic)
{
    const help_option *operand = NULL;
    printf("        \"%s\") options=\"", h->name);
    for (int i = 0; i < h->num_options; i++) {
        if (h->options[i].kind != ARG_OPERAND) printf("--%s ", h->options[i].name);
        else operand = &h->options[i];
    }
    printf("--help\"");
    if (operand && operand->choices) {
        printf("; words=\"");
        put_choices(operand->choices);
        printf("\"");
    } else if (operand && help_takes_file(operand)) {
        printf("; files=yes");
    }
    if (!topic && of->topics) {
        printf("; [ \"$COMP_CWORD\" -ne 2 ] || words=\"");
        for (const subcommand *t = of->topics; t->name; t++) printf("%s ", t->name);
        printf("\"");
    }
    printf(" ;;\n");
}

static void print_bash(void)
{
    printf("# bash completion for folio, by 'folio completion bash'\n"
           "_folio_words() { mapfile -t COMPREPLY < <(compgen -W \"$1\" -- \"$cur\"); }\n"
           "_folio_files() {\n"
           "    compopt -o filenames 2> /dev/null\n"
           "    mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")\n"
           "}\n"
           "_folio() {\n"
           "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
           "    local command=${COMP_WORDS[1]} options= words= files=\n"
           "    COMPREPLY=()\n"
           "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
           "        _folio_words \"");
    for (const subcommand *c = commands; c->name; c++) printf("%s ", c->name);
    printf("help --help --version\"\n        return\n    fi\n"
           "    if [ \"$COMP_CWORD\" -gt 2 ]; then\n"
           "        case \"$command ${COMP_WORDS[2]}\" in\n");
    for (const subcommand *c = commands; c->name; c++)
        for (const subcommand *t = c->topics; t && t->name; t++)
            printf("        \"%s %s\") command=\"%s %s\" ;;\n", c->name, t->name, c->name, t->name);
    printf("        esac\n    fi\n    case \"$command $prev\" in\n");
    for_all(bash_values);
    printf("    esac\n    case \"$command\" in\n        help) words=\"");
    for (const subcommand *c = commands; c->name; c++) printf("%s ", c->name);
    printf("\" ;;\n");
    for_all(bash_options);
    printf(
        "    esac\n"
        "    case \"$cur\" in\n"
        "        -*) _folio_words \"$options\" ;;\n"
        "        *) if [ -n \"$files\" ]; then _folio_files; else _folio_words \"$words\"; fi ;;\n"
        "    esac\n"
        "}\n"
        "complete -F _folio folio\n");
}

/* ---- zsh */

/* Inside '...' and [...] of a specification. */
static void put_escaped(const char *text, const char *special)
{
    for (; *text; text++) {
        if (*text == '\'') {
            printf("'\\''");
            continue;
        }
        if (strchr(special, *text)) putchar('\\');
        putchar(*text);
    }
}

/* What stands for a value. */
static void zsh_value(const help_option *o)
{
    printf(":");
    put_escaped(o->takes, ":\\");
    printf(":");
    if (o->choices) printf("("), put_choices(o->choices), printf(")");
    else printf(help_takes_file(o) ? "_files" : " ");
}

static void zsh_option(const help_option *o)
{
    printf(" \\\n            ");
    if (o->kind == ARG_OPERAND) {
        printf("'1:");
        zsh_value(o);
        printf("'");
        return;
    }
    if (o->letter) printf("'(-%c --%s)'{-%c,--%s}'[", o->letter, o->name, o->letter, o->name);
    else printf("'--%s[", o->name);
    put_escaped(o->what, "[]\\");
    printf("]");
    if (o->kind != ARG_FLAG) zsh_value(o);
    printf("'");
}

static void zsh_command(const help_text *h, const subcommand *of, const subcommand *topic)
{
    printf("        \"%s\") _arguments '(-h --help)'{-h,--help}'[its help]'", h->name);
    for (int i = 0; i < h->num_options; i++) zsh_option(&h->options[i]);
    if (!topic && of->topics) {
        printf(" \\\n            '1::topic:((");
        for (const subcommand *t = of->topics; t->name; t++) {
            printf("%s\\:\"", t->name);
            put_escaped(t->summary, ":\\");
            printf("\" ");
        }
        printf("))'");
    }
    printf(" ;;\n");
}

static void print_zsh(void)
{
    printf("#compdef folio\n"
           "# zsh completion for folio, by 'folio completion zsh'\n"
           "_folio() {\n"
           "    local -a commands\n"
           "    commands=(\n");
    for (const subcommand *c = commands; c->name; c++) {
        printf("        '%s:", c->name);
        put_escaped(c->summary, ":\\");
        printf("'\n");
    }
    printf("    )\n"
           "    if (( CURRENT == 2 )); then\n"
           "        _describe command commands\n"
           "        _arguments '--help[its help]' '--version[its version]'\n"
           "        return\n"
           "    fi\n"
           "    local command=$words[2]\n"
           "    shift words\n"
           "    (( CURRENT-- ))\n"
           "    if (( CURRENT > 2 )); then\n"
           "        case \"$command $words[2]\" in\n");
    for (const subcommand *c = commands; c->name; c++)
        for (const subcommand *t = c->topics; t && t->name; t++)
            printf("            \"%s %s\") command=\"%s %s\"; shift words; (( CURRENT-- )) ;;\n",
                   c->name, t->name, c->name, t->name);
    printf("        esac\n"
           "    fi\n"
           "    case $command in\n"
           "        help) _describe command commands ;;\n");
    for_all(zsh_command);
    printf("    esac\n"
           "}\n"
           "if [[ $funcstack[1] == _folio ]]; then _folio \"$@\"; else compdef _folio folio; fi\n");
}

/* ---- fish */

static void fish_condition(const help_text *h, const subcommand *of, const subcommand *topic)
{
    (void)h;
    printf("complete -c folio -n '__fish_seen_subcommand_from %s", of->name);
    if (topic) printf("; and __fish_seen_subcommand_from %s", topic->name);
    else if (of->topics) {
        printf("; and not __fish_seen_subcommand_from");
        for (const subcommand *t = of->topics; t->name; t++) printf(" %s", t->name);
    }
    printf("'");
}

static void fish_command(const help_text *h, const subcommand *of, const subcommand *topic)
{
    for (int i = 0; i < h->num_options; i++) {
        const help_option *o = &h->options[i];
        fish_condition(h, of, topic);
        if (o->kind != ARG_OPERAND) printf(" -l %s", o->name);
        if (o->letter) printf(" -s %c", o->letter);
        if (o->choices) {
            printf(o->kind == ARG_OPERAND ? " -a '" : " -x -a '");
            put_choices(o->choices);
            printf("'");
        } else if (help_takes_file(o)) printf(o->kind == ARG_OPERAND ? " -F" : " -r -F");
        else if (o->kind != ARG_FLAG) printf(" -x");
        printf(" -d '");
        put_escaped(o->what[0] ? o->what : o->takes, "\\");
        printf("'\n");
    }
    fish_condition(h, of, topic);
    printf(" -s h -l help -d 'its help'\n");
    for (const subcommand *t = topic ? NULL : of->topics; t && t->name; t++) {
        fish_condition(h, of, NULL);
        printf(" -a %s -d '", t->name);
        put_escaped(t->summary, "\\");
        printf("'\n");
    }
}

static void print_fish(void)
{
    printf("# fish completion for folio, by 'folio completion fish'\n"
           "complete -c folio -f\n"
           "complete -c folio -n __fish_use_subcommand -s h -l help -d 'its help'\n"
           "complete -c folio -n __fish_use_subcommand -l version -d 'its version'\n");
    for (const subcommand *c = commands; c->name; c++) {
        printf("complete -c folio -n __fish_use_subcommand -a %s -d '", c->name);
        put_escaped(c->summary, "\\");
        printf("'\n");
    }
    for_all(fish_command);
}

/* ---- The command */

int completion_main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*print)(void);
    } shells[] = {{"bash", print_bash}, {"zsh", print_zsh}, {"fish", print_fish}};
    const char *shell = NULL;
    const arg_option table[] = {
        {.name = "SHELL", .kind = ARG_OPERAND, .value = &shell, .choices = "bash|zsh|fish"},
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, table, help, &status)) return status;
    for (int i = 0; i < 3 && shell; i++)
        if (strcmp(shell, shells[i].name) == 0) return shells[i].print(), EXIT_OK;
    return args_complain("completion", "which shell? bash, zsh or fish");
}
