/*
 * info.c: `folio info`: what folio_backend_describe knows, for people, for scripts, for the
 * README.
 */
#include "args.h"
#include "commands.h"
#include "json.h"
#include "term.h"

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BACKENDS = 16 };

typedef struct backend_list {
    folio_backend_info info[MAX_BACKENDS];
    int32_t count;
} backend_list;

static const char help[] =
    "usage: folio info [OPTION]...\n\n"
    "What this machine and this build offer: the backends, best first, why one is not available,\n"
    "the instruction-set levels built in and the one a context gets, the layouts of the KV cache\n"
    "that are attended to in place, and what is refused, with the reason.\n\n"
    "options\n"
    "      --features       the feature table of all backends, as Markdown\n"
    "  -o, --output FORMAT  text (default) or json\n"
    "  -h, --help           this text\n\n"
    "examples\n"
    "  folio info\n"
    "  folio info --features > features.md\n"
    "  folio info -o json\n\n"
    "The JSON is one object: {\"version\", \"backends\": [{\"name\", \"available\", \"reason\", \"device\",\n"
    "\"levels\", \"level\", ...}]}. Keys are added in later versions, never renamed or removed.\n\n"
    "exit status\n"
    "  0  done    2  the command line is wrong\n";

static bool list_backends(backend_list *list)
{
    list->count = 0;
    for (int32_t i = 0; i < folio_backend_count() && i < MAX_BACKENDS; i++) {
        folio_backend_info *info = &list->info[list->count];
        *info = (folio_backend_info){.struct_size = sizeof *info};
        if (folio_backend_describe(folio_backend_name(i), info) != FOLIO_OK) {
            fprintf(stderr, "folio info: %s\n", folio_last_error());
            return false;
        }
        list->count++;
    }
    return true;
}

/* Threads a context of this backend gets by default; 0 where none opens. */
static int32_t default_threads(const char *backend)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = backend};
    folio_context_info info = {.struct_size = sizeof info};
    folio_context *ctx = NULL;
    if (folio_context_create(&desc, &ctx) != FOLIO_OK) return 0;
    folio_context_describe(ctx, &info);
    int32_t threads = info.num_threads;
    folio_context_destroy(ctx);
    return threads;
}

/* ---- Text */

static void print_words(const char *label, int32_t count,
                        const char *(*word)(const void *, int32_t), const void *of,
                        const char *marked)
{
    int column = printf("  %-10s", label);
    for (int32_t i = 0; i < count; i++) {
        const char *w = word(of, i);
        if (column + (int)strlen(w) + 2 > 100) column = printf("\n  %-10s", "") - 1;
        column += printf(" %s%s", w, marked && strcmp(w, marked) == 0 && count > 1 ? "*" : "");
    }
    printf("\n");
}

static const char *level_word(const void *of, int32_t i)
{
    return ((const folio_backend_info *)of)->levels[i];
}

static const char *layout_word(const void *of, int32_t i)
{
    return folio_layout_name(((const folio_backend_info *)of)->layouts[i]);
}

/* Text wrapped at 100 columns under a label. */
static void print_wrapped(const char *label, const char *text)
{
    int column = printf("    %-18s", label);
    while (*text) {
        size_t length = strcspn(text, " \n");
        if (column + 1 + (int)length > 100) column = printf("\n    %-18s", "") - 1;
        column += printf(" %.*s", (int)length, text);
        text += length;
        text += strspn(text, " \n");
    }
    printf("\n");
}

static void print_backend(const folio_backend_info *info)
{
    printf("\n%s%s%s", term_start(TERM_BOLD), info->name, term_end());
    if (!info->available) {
        printf(": not available: %s\n", info->reason);
        return;
    }
    printf("\n  %-10s %s\n", "device", info->device);
    printf("  %-10s %d by default\n", "threads", (int)default_threads(info->name));
    print_words("levels", info->num_levels, level_word, info, info->level);
    print_words("layouts", info->num_layouts, layout_word, info, NULL);
    printf("  %-10s multiples of 8 up to %d\n", "head sizes", (int)info->max_head_size);
    int32_t supported = 0;
    for (int32_t i = 0; i < info->num_features; i++) supported += info->features[i].supported != 0;
    printf("  %-10s %d of %d%s\n", "features", (int)supported, (int)info->num_features,
           supported < info->num_features ? ", without" : "");
    for (int32_t i = 0; i < info->num_features; i++)
        if (!info->features[i].supported)
            print_wrapped(info->features[i].name, info->features[i].reason);
}

static void print_text(const backend_list *list)
{
    const char *best = "none";
    for (int32_t i = list->count - 1; i >= 0; i--)
        if (list->info[i].available) best = list->info[i].name;
    printf("folio %s, backend by default: %s\n", folio_version(), best);
    for (int32_t i = 0; i < list->count; i++) print_backend(&list->info[i]);
}

/* ---- Markdown */

/* A backend that supports nothing in this build would be a column of "no". */
static bool has_features(const folio_backend_info *info)
{
    for (int32_t i = 0; i < info->num_features; i++)
        if (info->features[i].supported) return true;
    return false;
}

static void print_cell(const char *text)
{
    for (; *text; text++) {
        if (*text == '|') putchar('\\');
        putchar(*text == '\n' ? ' ' : *text);
    }
}

static void print_markdown(const backend_list *list)
{
    const folio_backend_info *columns[MAX_BACKENDS];
    int count = 0;
    for (int32_t i = 0; i < list->count; i++)
        if (has_features(&list->info[i])) columns[count++] = &list->info[i];
    if (count == 0) return;
    printf("| feature | what it is |");
    for (int c = 0; c < count; c++) printf(" %s |", columns[c]->name);
    printf("\n|---|---|");
    for (int c = 0; c < count; c++) printf("---|");
    printf("\n");
    for (int32_t i = 0; i < columns[0]->num_features; i++) {
        const folio_feature *f = &columns[0]->features[i];
        const char *reason = "";
        printf("| `%s` | ", f->name);
        print_cell(f->summary);
        for (int c = 0; c < count && !*reason; c++) reason = columns[c]->features[i].reason;
        if (*reason) {
            printf(". ");
            print_cell(reason);
        }
        printf(" |");
        for (int c = 0; c < count; c++)
            printf(" %s |", columns[c]->features[i].supported ? "yes" : "no");
        printf("\n");
    }
}

/* ---- JSON */

static void write_backend(json *j, const folio_backend_info *info)
{
    json_object(j, NULL);
    json_string(j, "name", info->name);
    json_bool(j, "available", info->available != 0);
    json_string(j, "reason", info->reason);
    json_string(j, "device", info->device);
    json_array(j, "levels");
    for (int32_t i = 0; i < info->num_levels; i++) json_string(j, NULL, info->levels[i]);
    json_close(j);
    json_string(j, "level", info->level);
    json_integer(j, "threads", info->available ? default_threads(info->name) : 0);
    json_array(j, "layouts");
    for (int32_t i = 0; i < info->num_layouts; i++)
        json_string(j, NULL, folio_layout_name(info->layouts[i]));
    json_close(j);
    json_bool(j, "graph", info->graph != 0);
    json_integer(j, "max_head_size", info->max_head_size);
    json_array(j, "features");
    for (int32_t i = 0; i < info->num_features; i++) {
        json_object(j, NULL);
        json_string(j, "name", info->features[i].name);
        json_string(j, "summary", info->features[i].summary);
        json_bool(j, "supported", info->features[i].supported != 0);
        json_string(j, "reason", info->features[i].reason);
        json_close(j);
    }
    json_close(j);
    json_close(j);
}

static void print_json(const backend_list *list)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_string(&j, "version", folio_version());
    json_array(&j, "backends");
    for (int32_t i = 0; i < list->count; i++) write_backend(&j, &list->info[i]);
    json_close(&j);
    json_close(&j);
}

int info_main(int argc, char **argv)
{
    bool features = false;
    const char *output = "text";
    const arg_option options[] = {
        {.name = "features", .kind = ARG_FLAG, .value = &features},
        {.name = "output",
         .letter = 'o',
         .kind = ARG_CHOICE,
         .value = &output,
         .choices = "text|json"},
        {.name = NULL},
    };
    switch (args_parse(argc, argv, options)) {
    case ARGS_HELP: fputs(help, stdout); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    backend_list list;
    if (!list_backends(&list)) return EXIT_FAILED;
    if (strcmp(output, "json") == 0) print_json(&list);
    else if (features) print_markdown(&list);
    else print_text(&list);
    return EXIT_OK;
}
