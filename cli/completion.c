/*
 * completion.c: `folio completion SHELL`: a script that lets a shell complete commands, topics, options, choices and
 * file names. The script asks the program, by `folio completion words WORD...`, what the last word may be: one offer a
 * line, behind a tab what it is; "files" alone stands for names of files. Offers are from the commands' own tables and
 * help (help_text.h).
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

/* ---- Offers */

static void offer_commands(const subcommand *of)
{
    for (; of && of->name; of++) printf("%s\t%s\n", of->name, of->summary);
}

static const subcommand *find_command(const subcommand *list, const char *name)
{
    for (; list && list->name; list++)
        if (strcmp(list->name, name) == 0) return list;
    return NULL;
}

/* "a|b" as two lines, or what stands for files. */
static void offer_values(const help_option *o)
{
    for (const char *c = o->choices; c && *c; c++) putchar(*c == '|' ? '\n' : *c);
    puts(o->choices == NULL && help_takes_file(o) ? "files" : "");
}

/* The option that a word names, if a value follows it. */
static const help_option *takes_next(const help_text *h, const char *word)
{
    for (int i = 0; i < h->num_options; i++) {
        const help_option *o = &h->options[i];
        if (o->kind == ARG_FLAG || o->kind == ARG_OPERAND || word[0] != '-') continue;
        if (word[1] == '-' ? strcmp(word + 2, o->name) == 0
                           : o->letter && word[1] == o->letter && word[2] == '\0')
            return o;
    }
    return NULL;
}

/* What may stand behind a command: its options after a dash, else its operand and its topics. */
static void offer_words(const help_text *h, const char *last, const subcommand *topics)
{
    if (last[0] == '-') puts("--help\tits help");
    else offer_commands(topics);
    for (int i = 0; i < h->num_options; i++) {
        const help_option *o = &h->options[i];
        if (o->kind == ARG_OPERAND && last[0] != '-') offer_values(o);
        if (o->kind != ARG_OPERAND && last[0] == '-') printf("--%s\t%s\n", o->name, o->what);
    }
}

/* words: those behind the program's name. */
static void offer(int count, char **words)
{
    const char *last = count > 0 ? words[count - 1] : "";
    const subcommand *c = count > 1 ? find_command(commands, words[0]) : NULL;
    if (c == NULL) {
        if (count < 2 || strcmp(words[0], "help") == 0) offer_commands(commands);
        if (count < 2)
            puts("help\tthe help of a command\n--help\tits help\n--version\tits version");
        return;
    }
    const subcommand *topic = count > 2 ? find_command(c->topics, words[1]) : NULL;
    help_text *h = help_text_of(c, topic);
    const help_option *before = takes_next(h, words[count - 2]);
    if (before) offer_values(before);
    else offer_words(h, last, count == 2 ? c->topics : NULL);
    help_text_free(h);
}

/* ---- Scripts */

static const char bash_script[] =
    "# bash completion for folio, by 'folio completion bash'\n"
    "_folio() {\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} offers\n"
    "    offers=$(\"${COMP_WORDS[0]}\" completion words \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2> /dev/null |\n"
    "        cut -f 1)\n"
    "    if [ \"$offers\" = files ]; then\n"
    "        compopt -o filenames 2> /dev/null\n"
    "        mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")\n"
    "    else\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$offers\" -- \"$cur\")\n"
    "    fi\n"
    "}\n"
    "complete -F _folio folio\n";

static const char zsh_script[] =
    "#compdef folio\n"
    "# zsh completion for folio, by 'folio completion zsh'\n"
    "_folio() {\n"
    "    local -a offers\n"
    "    offers=(\"${(@f)$(\"${words[1]}\" completion words \"${(@)words[2,CURRENT]}\" 2> /dev/null)}\")\n"
    "    if [[ $offers == files ]]; then\n"
    "        _files\n"
    "    else\n"
    "        offers=(\"${(@)${(@)offers//:/\\\\:}/$'\\t'/:}\")\n"
    "        _describe folio offers\n"
    "    fi\n"
    "}\n"
    "if [[ $funcstack[1] == _folio ]]; then _folio \"$@\"; else compdef _folio folio; fi\n";

static const char fish_script[] =
    "# fish completion for folio, by 'folio completion fish'\n"
    "function __folio_offers\n"
    "    set -l words (commandline -opc) (commandline -ct)\n"
    "    set -l offers ($words[1] completion words $words[2..] 2> /dev/null)\n"
    "    if test \"$offers\" = files\n"
    "        __fish_complete_path $words[-1]\n"
    "    else\n"
    "        string join \\n -- $offers\n"
    "    end\n"
    "end\n"
    "complete -c folio -f -a '(__folio_offers)'\n";

/* ---- The command */

int completion_main(int argc, char **argv)
{
    static const struct {
        const char *name, *script;
    } shells[] = {{"bash", bash_script}, {"zsh", zsh_script}, {"fish", fish_script}};
    const char *shell = NULL;
    const arg_option table[] = {
        {.name = "SHELL", .kind = ARG_OPERAND, .value = &shell, .choices = "bash|zsh|fish"},
        {.name = NULL},
    };
    int status;
    if (argc > 1 && strcmp(argv[1], "words") == 0) return offer(argc - 2, argv + 2), EXIT_OK;
    if (!args_run(argc, argv, table, help, &status)) return status;
    for (int i = 0; i < 3 && shell; i++)
        if (strcmp(shell, shells[i].name) == 0) return fputs(shells[i].script, stdout), EXIT_OK;
    return args_complain("completion", "which shell? bash, zsh or fish");
}
