/*
 * demo.c: `folio demo`: one step of a small model through the paged cache: prompts, a chunked
 * prompt, decodes and a sequence with cross attention in one batch, judged row by row, shown as a
 * table and as the map of the cache's blocks.
 */
#include "base/args.h"
#include "base/commands.h"
#include "base/levels.h"
#include "base/term.h"
#include "kit/kit.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "usage: folio demo [OPTION]...\n\n"
    "Runs one attention layer for one step of a small model: seven sequences in different phases, in\n"
    "one batch and one KV cache. Compares every number with the double-precision reference. Shows what\n"
    "each sequence did, its error, and which sequence owns which block.\n\n"
    "options\n"
    "      --backend NAME  auto (default), or a name 'folio info' lists\n"
    "      --threads N     default: one per processor\n"
    "      --seed N        seed of the random numbers; default 1\n"
    "  -h, --help          this text\n\n"
    "examples\n"
    "  folio demo\n"
    "  folio demo --backend reference\n"
    "  folio demo --backend cuda       # on a GPU, with a build of 'make cuda'\n\n"
    "Colours are used on a terminal unless NO_COLOR is set and not empty.\n\n"
    "exit status\n"
    "  0  all numbers are within their budget    1  some are not, or a call failed\n"
    "  2  invalid command line\n";

enum { NUM_BLOCKS = 64, BLOCK_SIZE = 16, TIMED_CALLS = 5 };

typedef struct actor {
    char letter; /* its blocks on the map */
    const char *story;
    kit_seq seq;
} actor;

static const actor actors[] = {
    {'A', "prompt", {.query_len = 70, .seq_len = 70}},
    {'B', "prompt", {.query_len = 17, .seq_len = 17}},
    {'C', "prompt, third chunk", {.query_len = 48, .seq_len = 144}},
    {'D', "decode", {.query_len = 1, .seq_len = 130}},
    {'E', "decode", {.query_len = 1, .seq_len = 33}},
    {'F', "decode, 3 tokens at once", {.query_len = 3, .seq_len = 64}},
    {'G', "decode, with an encoder", {.query_len = 1, .seq_len = 9, .encoder_len = 50}},
};
enum { NUM_ACTORS = sizeof actors / sizeof actors[0] };

static const kit_spec layer = {
    .num_heads = 8,
    .num_kv_heads = 2,
    .k_head_size = 64,
    .dtype = FOLIO_F32,
    .kv_dtype = FOLIO_BF16,
    .block_size = BLOCK_SIZE,
    .num_blocks = NUM_BLOCKS,
};

/* One attention type of the step, run and judged. */
typedef struct judged {
    kit_result got, ref, formula;
    double seconds; /* of the fastest forward that was timed */
} judged;

/* The first call starts threads and touches memory for the first time: it warms up, and is not timed. */
static bool run_warm(kit_case *h, folio_attention_type type, const kit_seq *seqs, judged *p)
{
    bool ok = kit_forward(h, NULL, type, seqs, NUM_ACTORS, &p->got);
    for (int i = 0; i < TIMED_CALLS && ok; i++) {
        kit_result_free(&p->got);
        ok = kit_forward(h, NULL, type, seqs, NUM_ACTORS, &p->got);
        if (ok && (i == 0 || p->got.seconds < p->seconds)) p->seconds = p->got.seconds;
    }
    return ok;
}

static bool run_type(kit_case *h, folio_context *reference, folio_attention_type type,
                     const kit_seq *seqs, judged *p)
{
    return run_warm(h, type, seqs, p) && kit_judge(h, reference, type, seqs, NUM_ACTORS, &p->ref) &&
           kit_formula(h, type, seqs, NUM_ACTORS, false, &p->formula);
}

static void free_judged(judged *p)
{
    kit_result_free(&p->got);
    kit_result_free(&p->ref);
    kit_result_free(&p->formula);
}

static term_colour colour_of(int64_t i)
{
    static const term_colour colours[] = {TERM_CYAN, TERM_GREEN, TERM_YELLOW, TERM_MAGENTA,
                                          TERM_BLUE, TERM_RED,   TERM_BOLD};
    return colours[i % (int64_t)(sizeof colours / sizeof colours[0])];
}

static void print_intro(const folio_context_info *info)
{
    printf("%sfolio %s%s: paged attention for C\n\n", term_start(TERM_BOLD), folio_version(),
           term_end());
    printf(
        "One step of one layer: %d query heads share %d kv heads of size %d; queries are f32, the KV\n"
        "cache holds bf16 in %d blocks of %d tokens. Seven sequences in different phases make one\n"
        "batch, each over blocks scattered through the cache. Unwritten slots hold NaN.\n\n",
        (int)layer.num_heads, (int)layer.num_kv_heads, (int)layer.k_head_size, NUM_BLOCKS,
        BLOCK_SIZE);
    printf("backend %s, level %s, threads %d (%s)\n\n", info->backend, info->level,
           (int)info->num_threads, info->device);
}

/* One line of the table; true when the sequence is within its budget. */
static bool print_line(const actor *a, int64_t i, const judged *p, const char *story,
                       int64_t context, int64_t blocks)
{
    kit_verdict v;
    kit_compare_seq(&p->got, &p->ref, &p->formula, i, &v);
    printf("  %s%c%s    %-26s %6lld %8lld %7lld   %9.1e   %9.1e   %s%s%s\n",
           term_start(colour_of(i)), a->letter, term_end(), story, (long long)a->seq.query_len,
           (long long)context, (long long)blocks, v.max_error, v.budget,
           term_start(v.ok ? TERM_GREEN : TERM_RED), v.ok ? "ok" : "WRONG", term_end());
    if (!v.ok) printf("       %s\n", v.message);
    return v.ok;
}

static bool print_table(kit_case *h, const judged *self, const judged *cross)
{
    bool ok = true;
    printf("  %s%-4s %-26s %6s %8s %7s   %9s   %9s%s\n", term_start(TERM_DIM), "seq",
           "what it does", "query", "context", "blocks", "max error", "budget", term_end());
    for (int64_t i = 0; i < NUM_ACTORS; i++) {
        const kit_seq *s = &actors[i].seq;
        int64_t blocks;
        kit_blocks(h, i + 1, false, &blocks);
        ok = print_line(&actors[i], i, self, actors[i].story, s->seq_len - s->query_len, blocks) &&
             ok;
        if (s->encoder_len == 0) continue;
        kit_blocks(h, i + 1, true, &blocks);
        ok =
            print_line(&actors[i], i, cross, "  its cross attention", s->encoder_len, blocks) && ok;
    }
    return ok;
}

static void print_map(kit_case *h)
{
    enum { WIDTH = 32 };
    char owner[NUM_BLOCKS];
    int64_t actor_of[NUM_BLOCKS] = {0}, used = 0;
    memset(owner, '.', sizeof owner);
    for (int64_t i = 0; i < NUM_ACTORS; i++)
        for (int cross = 0; cross < 2; cross++) {
            int64_t n;
            const int32_t *blocks = kit_blocks(h, i + 1, cross, &n);
            for (int64_t b = 0; b < n; b++, used++) {
                owner[blocks[b]] = (char)(actors[i].letter + (cross ? 'a' - 'A' : 0));
                actor_of[blocks[b]] = i;
            }
        }
    printf("\nthe cache's blocks: a letter is a block of that sequence, lower case its encoder's,\n"
           "'.' is free (%lld of %d in use)\n",
           (long long)used, NUM_BLOCKS);
    for (int b = 0; b < NUM_BLOCKS; b++) {
        if (b % WIDTH == 0) printf("  ");
        bool free_block = owner[b] == '.';
        printf("%s%c%s", term_start(free_block ? TERM_DIM : colour_of(actor_of[b])), owner[b],
               term_end());
        printf("%s", b % WIDTH == WIDTH - 1 ? "\n" : " ");
    }
}

static void print_outcome(bool ok, const judged *self, const judged *cross)
{
    int64_t rows = self->got.rows;
    printf(
        "\n%lld query rows x %d heads, self-attention in %.2f ms, cross attention in %.2f ms: the\n"
        "call of folio_attention_forward only, the fastest of %d calls after a warm-up. How fast it is\n"
        "on larger batches: folio bench.\n",
        (long long)rows, (int)layer.num_heads, 1e3 * self->seconds, 1e3 * cross->seconds,
        TIMED_CALLS);
    if (ok)
        printf("%sEvery number is within its budget%s of the double-precision reference: twice the "
               "error\n"
               "of a two-pass softmax in f32, plus one rounding step.\n",
               term_start(TERM_GREEN), term_end());
    else
        printf("%sSome numbers are outside their budget.%s Please run 'folio check'.\n",
               term_start(TERM_RED), term_end());
    printf("\nnext\n"
           "  folio check   every kernel and every feature against the reference\n"
           "  folio info    backends, levels and features of this build on this machine\n"
           "  folio --help  all commands; examples/first.c does such a step in C\n");
}

/* Runs the step and prints all of it. */
static int show(folio_context *ctx, folio_context *reference, uint64_t seed)
{
    kit_seq seqs[NUM_ACTORS];
    kit_spec spec = layer;
    judged self = {0}, cross = {0};
    folio_context_info info = {.struct_size = sizeof info};
    spec.seed = seed;
    for (int i = 0; i < NUM_ACTORS; i++) seqs[i] = actors[i].seq;
    folio_context_get_info(ctx, &info);
    print_intro(&info);
    kit_case *h = kit_open(ctx, &spec, seqs, NUM_ACTORS);
    bool ok = h != NULL && run_type(h, reference, FOLIO_ATTENTION_DECODER, seqs, &self) &&
              run_type(h, reference, FOLIO_ATTENTION_ENCODER_DECODER, seqs, &cross);
    if (ok) {
        ok = print_table(h, &self, &cross);
        print_map(h);
        print_outcome(ok, &self, &cross);
    } else {
        fprintf(stderr, "folio demo: %s\n", kit_error());
    }
    free_judged(&self);
    free_judged(&cross);
    kit_close(h);
    return ok ? EXIT_OK : EXIT_FAILED;
}

int demo_main(int argc, char **argv)
{
    const char *backend = "auto";
    int64_t threads = 0, seed = 1;
    const arg_option options[] = {
        {.name = "backend", .kind = ARG_TEXT, .value = &backend},
        {.name = "threads", .kind = ARG_NUMBER, .value = &threads, .min = 1, .max = 256},
        {.name = "seed", .kind = ARG_NUMBER, .value = &seed, .min = 0, .max = INT64_MAX},
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, options, help, &status)) return status;
    if (strcmp(backend, "auto") != 0 && !backend_is_known("demo", backend)) return EXIT_USAGE;
    folio_context *ctx = kit_context(backend, NULL, (int32_t)threads);
    folio_context *reference = ctx ? kit_context("reference", NULL, 1) : NULL;
    status = EXIT_FAILED;
    if (reference) status = show(ctx, reference, (uint64_t)seed);
    else fprintf(stderr, "folio demo: %s\n", kit_error());
    folio_context_destroy(reference);
    folio_context_destroy(ctx);
    return status;
}
