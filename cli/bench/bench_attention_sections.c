/*
 * bench_attention_sections.c: which lists `folio bench` crosses. On the CPU there is one set of them, unless a section
 * is asked for. On a GPU a single one would not do: there are sections, each with lists of its own, and options replace
 * the lists of all.
 */
#include "base/args.h"
#include "bench/bench_attention.h"

#include <stdio.h>
#include <string.h>

static const list_texts cpu_lists = {.cases = "q512,q2k,16q1s4k,1q1s32k", .dtypes = "f32,bf16"};
static const list_texts cuda_lists = {.cases = "2q8k,64q1s8k", .dtypes = "bf16"};
static const list_texts both_lists = {.heads = "32:8",
                                      .head_sizes = "128",
                                      .block_sizes = "16",
                                      .layouts = "native",
                                      .options = "plain",
                                      .cache = "cold"};

#define ANCESTORS "ancestors"
#define PREFILLS "32q512,16q1k,8q2k,4q4k,2q8k,1q16k"

static const struct {
    const char *name, *what;
    list_texts of;
    const char *cpu_cases; /* on the CPU, instead of .of.cases; NULL: GPUs only */
    bool asked;            /* not in the default */
} sections[] = {
    {"decode", "one token each: few and many sequences, short, long and ragged lengths",
     .of = {.cases = "1q1s8k,1q1s128k,8q1s8k,16q1s32k,64q1s1k,64q1s8k,128q1s4k,256q1s2k,256q1s8k,"
                     "64q1s128:32k",
            .cache = "cold,dirty"}},
    {"kv", "8-bit caches", .of = {.cases = "64q1s8k", .kv_dtypes = "bf16,fp8_e4m3,int8"}},
    {"prefill", "prompts of 16k tokens in total, causal", .of = {.cases = PREFILLS}},
    {"drafts", "1 to 64 new tokens over 8k keys; head groups of 4, 8 and 32",
     .of = {.cases = "1q1-64*2s8k,16q1-64*2s8k", .heads = "32:8,32:4,32:1"}},
    {"full", "not causal", .of = {.cases = "2q8k", .options = "full"}},
    {"head64", "prompts with head size 64", .of = {.cases = PREFILLS, .head_sizes = "64"}},
    {"head256", "prompts with head size 256",
     .of = {.cases = PREFILLS, .heads = "8:2", .head_sizes = "256"}},
    {"pages", "other block sizes",
     .of = {.cases = "2q8k,64q1s8k", .block_sizes = "16,8,64,128,48,1"}},
    {"invariant", "batch-invariant plans", .of = {.cases = "64q1s8k", .options = "invariant"}},
    {"graph", "32 layers in one CUDA graph, and the same forwards without a graph",
     .of = {.cases = "8q1s1k", .options = "graph:32"}},
    {ANCESTORS, "vLLM 0.6's interface beside Folio's own; also on the CPU, not in the default",
     .of = {.cases = "2q8k,4q512s8k_32q1s8k,8q1s8k,64q1s8k",
            .dtypes = "f32,bf16",
            .options = "ancestors"},
     .cpu_cases = "q512,q2k,2q512s2k_16q1s2k,16q1s4k,64q1s2k", .asked = true},
    {ANCESTORS, "and one token over 16 keys from warm caches: what a call costs",
     .of = {.cases = "1q1s16", .dtypes = "f32,bf16", .options = "ancestors", .cache = "warm"},
     .cpu_cases = "1q1s16", .asked = true},
};
enum { NUM_SECTIONS = sizeof sections / sizeof sections[0] };
#define KERNELS "kernels" /* a section for each, also on the CPU */

void bench_print_sections(void)
{
    for (int i = 0; i < NUM_SECTIONS; i++)
        printf("  %-10s %s\n",
               i > 0 && strcmp(sections[i - 1].name, sections[i].name) == 0 ? "" : sections[i].name,
               sections[i].what);
    printf(
        "  %-10s every kernel that `folio info` lists, in a case of its own; not in the default\n",
        KERNELS);
}

/* ---- Choosing */

static const char *first_of(const char *a, const char *b, const char *c, const char *d)
{
    return a ? a : b ? b : c ? c : d;
}

/* Each list from the first that has it: the command line, the section, the backend, both backends. */
static list_texts joined(const list_texts *given, const list_texts *own, const list_texts *backend)
{
    list_texts to;
#define JOIN(list) to.list = first_of(given->list, own->list, backend->list, both_lists.list)
    JOIN(cases);
    JOIN(dtypes);
    JOIN(kv_dtypes);
    JOIN(heads);
    JOIN(head_sizes);
    JOIN(block_sizes);
    JOIN(layouts);
    JOIN(options);
    JOIN(cache);
    JOIN(threads);
    JOIN(levels);
#undef JOIN
    return to;
}

static bool any_list(const list_texts *t)
{
    return t->cases || t->dtypes || t->kv_dtypes || t->heads || t->head_sizes || t->block_sizes ||
           t->layouts || t->options || t->cache;
}

static bool add_section(bench *b, const char *name, const list_texts *given, const list_texts *own)
{
    bool cuda = strcmp(b->backend, "cuda") == 0;
    list_texts texts = joined(given, own, cuda ? &cuda_lists : &cpu_lists);
    if (b->num_sections == MAX_SECTIONS) return true;
    lists *to = &b->sections[b->num_sections];
    snprintf(to->name, sizeof to->name, "%s", name);
    if (!bench_parse_lists(to, &texts)) return false;
    for (int i = 0; i < to->num_options; i++)
        if (!cuda && to->options[i].graph) {
            args_complain("bench", "--options %s: graphs need --backend cuda", to->options[i].name);
            return false;
        }
    b->num_sections++;
    return true;
}

/* Is the name one of the words of a list? NULL: the list is of all. */
static bool is_named(const char *names, const char *name)
{
    size_t length = strlen(name);
    if (names == NULL || strcmp(names, "all") == 0) return true;
    for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strcspn(at, ",") == length && strncmp(at, name, length) == 0) return true;
    return false;
}

/* The name stands there itself. */
static bool is_asked(const char *names, const char *name)
{
    return names != NULL && strcmp(names, "all") != 0 && is_named(names, name);
}

/* Is there a section that the CPU has not? */
static bool needs_gpu(const char *names)
{
    bool any = false;
    for (int i = 0; i < NUM_SECTIONS && names; i++)
        any |= !sections[i].cpu_cases && is_named(names, sections[i].name);
    return any;
}

/* A section of the table. With cases from the command line, one of several with the same name is enough. */
static bool add_nth(bench *b, int i, const char *names, const list_texts *given)
{
    const char *name = sections[i].name;
    bool again = i > 0 && strcmp(sections[i - 1].name, name) == 0;
    list_texts own = sections[i].of;
    if (!(sections[i].asked ? is_asked(names, name) : is_named(names, name)) ||
        (again && given->cases))
        return true;
    if (strcmp(b->backend, "cpu") == 0) own.cases = sections[i].cpu_cases;
    return add_section(b, name, given, &own);
}

/* Every word names a section. */
static bool all_known(const char *names)
{
    for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        size_t length = strcspn(at, ",");
        bool known = strcmp(names, "all") == 0 || strncmp(at, KERNELS ",", length + 1) == 0 ||
                     strcmp(at, KERNELS) == 0;
        for (int i = 0; i < NUM_SECTIONS && !known; i++)
            known =
                strlen(sections[i].name) == length && strncmp(at, sections[i].name, length) == 0;
        if (known) continue;
        args_complain("bench", "--section: there is no '%.*s'", (int)length, at);
        return false;
    }
    return true;
}

/* Decodes for kernels of few rows, else a prompt. */
static bool add_kernels(bench *b, const list_texts *given)
{
    bool one_level = given->levels != NULL && strchr(given->levels, ',') == NULL;
    folio_context_desc desc = {.struct_size = sizeof desc,
                               .backend = b->backend,
                               .level = one_level ? given->levels : NULL};
    folio_context_info info = {.struct_size = sizeof info};
    folio_context *ctx = NULL;
    bool ok = bench_ok(folio_context_create(&desc, &ctx), "folio_context_create") &&
              folio_context_get_info(ctx, &info) == FOLIO_OK;
    for (int32_t i = 0; i < info.num_kernels && ok; i++) {
        folio_context_kernel kernel = {.struct_size = sizeof kernel};
        char head_size[16], v_size[24];
        folio_context_get_kernel(ctx, i, &kernel);
        snprintf(head_size, sizeof head_size, "%d", (int)kernel.head_size);
        snprintf(v_size, sizeof v_size, "%s:%d", kernel.v_in_k ? "latent" : "v_size",
                 (int)kernel.v_head_size);
        list_texts own = {.cases = kernel.max_rows > 0 ? "16q1s4k" : "q512",
                          .dtypes = folio_dtype_name(kernel.dtype),
                          .kv_dtypes = folio_dtype_name(kernel.kv_dtype),
                          .heads = kernel.v_in_k ? "16:1" : "8:2",
                          .head_sizes = head_size,
                          .layouts = folio_layout_name(kernel.layout),
                          .options = kernel.v_head_size != kernel.head_size ? v_size : NULL};
        ok = add_section(b, kernel.name, given, &own);
    }
    folio_context_destroy(ctx);
    return ok;
}

bool bench_choose_sections(bench *b, const char *names, const list_texts *given)
{
    static const list_texts none = {.cases = NULL};
    bool cuda = strcmp(b->backend, "cuda") == 0;
    const char *wrong = NULL;
    if (cuda && (given->threads || given->levels))
        wrong = "--threads and --level are for the CPU only";
    if (!cuda && needs_gpu(names))
        wrong = "--section needs --backend cuda, but for " ANCESTORS " and " KERNELS;
    if (wrong) args_complain("bench", "%s", wrong);
    if (wrong || !all_known(names)) return false;
    if (names == NULL && (!cuda || any_list(given))) return add_section(b, "", given, &none);
    if (is_asked(names, KERNELS) && !add_kernels(b, given)) return false;
    for (int i = 0; i < NUM_SECTIONS; i++)
        if (!add_nth(b, i, names, given)) return false;
    return true;
}
