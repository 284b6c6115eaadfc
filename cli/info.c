/*
 * info.c: `folio info`: what folio_backend_get_info knows, for people, for scripts, for the
 * README; which levels this machine has, and the kernels they give, are found by asking for them.
 */
#include "abi.h"
#include "base/args.h"
#include "base/commands.h"
#include "base/json.h"
#include "base/levels.h"
#include "base/term.h"

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BACKENDS = 16 };

typedef struct backend_list {
    folio_backend_info info[MAX_BACKENDS];
    int32_t count;
    char best[32]; /* what a context gets by default */
} backend_list;

static const char help[] =
    "usage: folio info [OPTION]...\n\n"
    "Lists the backends, best first, with the reason if one is not available; the instruction-set\n"
    "levels of this build and of this machine, and the default level; the kernels with the types they\n"
    "support; the supported cache layouts; and the features that are not supported, with the reason.\n"
    "FOLIO_CPU=NAME in the environment is the highest level that the cpu backend uses. FOLIO_DEBUG is\n"
    "shown if it is set.\n\n"
    "options\n"
    "      --features       the feature table of all backends, as Markdown\n"
    "      --abi            for language bindings: sizes, offsets and types of the fields of every public\n"
    "                       struct, values of enums and constants, functions and parameters\n"
    "  -o, --output FORMAT  text (default) or json\n"
    "  -h, --help           this text\n\n"
    "examples\n"
    "  folio info\n"
    "  folio info --features > features.md\n"
    "  folio info -o json\n"
    "  folio info --abi -o json > folio-abi.json\n\n"
    "The JSON is one object: {\"version\", \"backends\": [{\"name\", \"available\", \"reason\", \"device\",\n"
    "\"levels\", \"level\", \"levels_here\", \"kernels\": [{\"dtype\", \"kv_dtype\", \"name\"}], ...}]}. That of\n"
    "--abi: {\"version\", \"pointer_size\", \"structs\": [{\"name\", \"header\", \"size\", \"align\", \"fields\":\n"
    "[{\"name\", \"type\", \"offset\", \"size\"}]}], \"enums\": [{\"name\", \"header\", \"size\", \"values\": [{\"name\",\n"
    "\"value\"}]}], \"constants\": [{\"name\", \"header\", \"value\"}], \"handles\": [{\"name\", \"header\"}],\n"
    "\"callbacks\" and \"functions\": [{\"name\", \"header\", \"returns\", \"parameters\": [{\"name\", \"type\"}]}]}.\n"
    "Keys are added in later versions, never renamed or removed.\n\n"
    "exit status\n"
    "  0  success    1  FOLIO_CPU or FOLIO_DEBUG has an unknown value    2  invalid command line\n";

static bool list_backends(backend_list *list)
{
    list->count = 0;
    for (int32_t i = 0; i < folio_backend_count() && i < MAX_BACKENDS; i++) {
        folio_backend_info *info = &list->info[list->count];
        *info = (folio_backend_info){.struct_size = sizeof *info};
        if (folio_backend_get_info(folio_backend_name(i), info) != FOLIO_OK) return false;
        list->count++;
    }
    return true;
}

/* A context of this backend at a level, NULL being its default; NULL where none opens. */
static folio_context *open_context(const char *backend, const char *level, folio_context_info *info)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = backend, .level = level};
    folio_context *ctx = NULL;
    *info = (folio_context_info){.struct_size = sizeof *info};
    if (folio_context_create(&desc, &ctx) == FOLIO_OK) folio_context_get_info(ctx, info);
    return ctx;
}

static bool find_default(backend_list *list)
{
    folio_context_info info;
    folio_context *ctx = open_context(NULL, NULL, &info);
    if (ctx == NULL) return false;
    snprintf(list->best, sizeof list->best, "%s", info.backend);
    folio_context_destroy(ctx);
    return true;
}

/* Threads a context of this backend gets by default; 0 where none opens. */
static int32_t default_threads(const char *backend)
{
    folio_context_info info;
    folio_context *ctx = open_context(backend, NULL, &info);
    int32_t threads = ctx != NULL ? info.num_threads : 0;
    folio_context_destroy(ctx);
    return threads;
}

/* Does a context that asks for the level by name get it? */
static bool level_is_here(const char *backend, const char *level)
{
    folio_context_info info;
    folio_context *ctx = open_context(backend, level, &info);
    bool here = ctx != NULL && strcmp(info.level, level) == 0;
    folio_context_destroy(ctx);
    return here;
}

/* Calls body for each kernel that the default level has. */
static void each_kernel(const char *backend, void *to,
                        void (*body)(void *to, const folio_context_kernel *kernel))
{
    folio_context_info info;
    folio_context *ctx = open_context(backend, NULL, &info);
    for (int32_t i = 0; ctx != NULL && i < info.num_kernels; i++) {
        folio_context_kernel kernel = {.struct_size = sizeof kernel};
        if (folio_context_get_kernel(ctx, i, &kernel) == FOLIO_OK) body(to, &kernel);
    }
    folio_context_destroy(ctx);
}

/* ---- Text */

/* Text wrapped at 100 columns under a label, which stands behind an indentation in a column so wide. */
static void print_wrapped(int indent, int width, const char *label, const char *text)
{
    int column = printf("%*s%-*s", indent, "", width, label);
    while (*text) {
        size_t length = strcspn(text, " \n");
        if (column + 1 + (int)length > 100) column = printf("\n%*s", indent + width, "") - 1;
        column += printf(" %.*s", (int)length, text);
        text += length;
        text += strspn(text, " \n");
    }
    printf("\n");
}

/* What becomes of each level, lowest first. */
static void print_levels(const folio_backend_info *info)
{
    bool cpu = strcmp(info->name, "cpu") == 0, above = false;
    bool capped = levels_cap(info->name) != NULL;
    for (int32_t i = 0; i < info->num_levels; i++) {
        const char *level = info->levels[i], *what = "available";
        if (strcmp(level, info->level) == 0) {
            what = capped ? "the default, limited by FOLIO_CPU"
                   : cpu  ? "the default here; FOLIO_CPU=NAME limits it"
                          : "the default";
            above = true;
        } else if (!level_is_here(info->name, level)) what = "not on this machine";
        else if (above && !capped) what = "available, but slower: used only if requested by name";
        printf("  %-10s %-13s %s\n", i == 0 ? "levels" : "", level, what);
    }
}

/* The types of a case for it, and its name. */
static void print_kernel(void *to, const folio_context_kernel *kernel)
{
    int *count = to;
    char types[32];
    snprintf(types, sizeof types, "%s%s%s", folio_dtype_name(kernel->kv_dtype),
             kernel->dtype != FOLIO_F32 ? ", q " : "",
             kernel->dtype != FOLIO_F32 ? folio_dtype_name(kernel->dtype) : "");
    printf("  %-10s %-16s %s\n", (*count)++ == 0 ? "kernels" : "", types, kernel->name);
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
    print_levels(info);
    int count = 0;
    each_kernel(info->name, &count, print_kernel);
    char layouts[512] = "";
    for (int32_t i = 0; i < info->num_layouts; i++) {
        size_t used = strlen(layouts);
        snprintf(layouts + used, sizeof layouts - used, "%s ", folio_layout_name(info->layouts[i]));
    }
    print_wrapped(2, 10, "layouts", layouts);
    printf("  %-10s multiples of 8 up to %d\n", "head sizes", (int)info->max_head_size);
    int32_t supported = 0;
    for (int32_t i = 0; i < info->num_features; i++) supported += info->features[i].supported != 0;
    printf("  %-10s %d of %d%s\n", "features", (int)supported, (int)info->num_features,
           supported < info->num_features ? ", without" : "");
    for (int32_t i = 0; i < info->num_features; i++)
        if (!info->features[i].supported)
            print_wrapped(4, 18, info->features[i].name, info->features[i].reason);
}

static void print_text(const backend_list *list)
{
    printf("folio %s, default backend: %s\n", folio_version(), list->best);
    const char *debug = getenv("FOLIO_DEBUG");
    if (debug != NULL && debug[0] != 0) printf("FOLIO_DEBUG is %s\n", debug);
    for (int32_t i = 0; i < list->count; i++) print_backend(&list->info[i]);
}

/* ---- Markdown */

static void print_cell(const char *text)
{
    for (; *text; text++) {
        if (*text == '|') putchar('\\');
        putchar(*text == '\n' ? ' ' : *text);
    }
}

static void print_markdown(const backend_list *list)
{
    printf("| feature | what it is |");
    for (int c = 0; c < list->count; c++) printf(" %s |", list->info[c].name);
    printf("\n|---|---|");
    for (int c = 0; c < list->count; c++) printf("---|");
    printf("\n");
    for (int32_t i = 0; i < list->info[0].num_features; i++) {
        const folio_feature *f = &list->info[0].features[i];
        const char *reason = "";
        printf("| `%s` | ", f->name);
        print_cell(f->summary);
        for (int c = 0; c < list->count && !*reason; c++) reason = list->info[c].features[i].reason;
        if (*reason) {
            printf(". ");
            print_cell(reason);
        }
        printf(" |");
        for (int c = 0; c < list->count; c++)
            printf(" %s |", list->info[c].features[i].supported ? "yes" : "no");
        printf("\n");
    }
}

/* ---- JSON */

static void write_kernel(void *to, const folio_context_kernel *kernel)
{
    json *j = to;
    json_object(j, NULL);
    json_string(j, "dtype", folio_dtype_name(kernel->dtype));
    json_string(j, "kv_dtype", folio_dtype_name(kernel->kv_dtype));
    json_string(j, "name", kernel->name);
    json_close(j);
}

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
    json_array(j, "levels_here");
    for (int32_t i = 0; info->available && i < info->num_levels; i++)
        if (level_is_here(info->name, info->levels[i])) json_string(j, NULL, info->levels[i]);
    json_close(j);
    json_array(j, "kernels");
    if (info->available) each_kernel(info->name, j, write_kernel);
    json_close(j);
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
    bool features = false, abi = false;
    const char *output = "text";
    const arg_option options[] = {
        {.name = "features", .kind = ARG_FLAG, .value = &features},
        {.name = "abi", .kind = ARG_FLAG, .value = &abi},
        ARG_OUTPUT(&output, "text|json"),
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, options, help, &status)) return status;
    bool as_json = strcmp(output, "json") == 0;
    if (abi && features) return args_complain("info", "--abi and --features cannot be combined");
    if (abi) {
        if (as_json) abi_print_json();
        else abi_print_text();
        return EXIT_OK;
    }
    backend_list list;
    if (!find_default(&list) || !list_backends(&list)) {
        fprintf(stderr, "folio info: %s\n", folio_last_error());
        return EXIT_FAILED;
    }
    if (as_json) print_json(&list);
    else if (features) print_markdown(&list);
    else print_text(&list);
    return EXIT_OK;
}
