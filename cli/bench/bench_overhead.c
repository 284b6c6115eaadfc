/*
 * bench_overhead.c: `folio bench overhead`: what a call costs besides attention. A forward of one token,
 * with 16 keys and with none, and the batch and plan of a large step of decodes.
 */
#include "bench/bench.h"

#include "base/args.h"
#include "base/interrupt.h"
#include "base/term.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: folio bench overhead [OPTION]...\n\n"
    "Measures the overhead of a call: 32 heads, 8 kv heads of 128, bf16, blocks of 16. The cases of a\n"
    "set alternate, batch by batch, so that noise affects them equally. spread is the interquartile\n"
    "range divided by the median.\n\n"
    "cases\n"
    "  forward         folio_attention_forward of one token over a sequence of 16, k and v not written\n"
    "  forward_no_key  the same for a row that sees no key: everything but the kernels\n"
    "  batch           folio_batch_set for 256 sequences of 4096 tokens, one new each: 65536 blocks\n"
    "  plan            folio_plan_update with that batch\n\n"
    "options\n"
    "      --threads LIST     threads of the contexts; default 1,2\n"
    "      --seconds S        time for each case; default 0.4\n" BENCH_AFTER_HELP
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text\n\n"
    "examples\n"
    "  folio bench overhead\n"
    "  folio bench overhead --threads 1 --seconds 2 -o json\n\n"
    "The JSON has the same keys as that of 'folio bench pool'.\n\n"
    "exit status\n"
    "  0  success    1  a call failed, a file is invalid, or --fail-if-slower found a case\n"
    "  2  invalid command line\n";

enum {
    HEADS = 32,
    KV_HEADS = 8,
    SIZE = 128,
    BLOCK = 16,
    SEQS = 256,
    BLOCKS = 256, /* of a sequence */
    FORWARDS = 256,
    UPDATES = 16
};

/* A batch with its plan. */
typedef struct step {
    folio_batch *batch;
    folio_plan *plan;
} step;

typedef struct world {
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    step keys, no_key, large;
    uint16_t q[HEADS * SIZE], out[HEADS * SIZE];
    int32_t lens[SEQS], tables[SEQS][BLOCKS];
} world;

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if (!bench_ok(call, #call)) return false;                                                  \
    } while (0)

static bool open_step(world *w, step *s, int64_t seqs, int64_t seq_len, int64_t num_blocks)
{
    folio_batch_desc b = {.struct_size = sizeof b, .block_size = BLOCK, .max_seqs = seqs};
    b.max_query_tokens = seqs;
    b.max_blocks = seqs * BLOCKS;
    folio_plan_desc p =
        FOLIO_WITH(folio_plan_desc, .attentions = &w->attention, .num_attentions = 1,
                   .block_size = BLOCK, .num_blocks = num_blocks, .max_seqs = seqs,
                   .max_query_tokens = seqs, .max_seq_len = BLOCKS * BLOCK);
    TRY(folio_batch_create(w->ctx, &b, &s->batch));
    TRY(folio_plan_create(w->ctx, &p, &s->plan));
    for (int64_t i = 0; i < seqs; i++) {
        folio_batch_seq q = {.struct_size = sizeof q, .query_len = 1, .seq_len = seq_len};
        q.padding = seq_len == 0;
        q.block_table = w->tables[i];
        q.num_blocks = BLOCKS;
        TRY(folio_batch_add(s->batch, &q));
    }
    TRY(folio_plan_update(s->plan, s->batch, NULL));
    return true;
}

static bool open_world(world *w, int32_t threads)
{
    folio_context_desc c = {.struct_size = sizeof c, .backend = "cpu", .num_threads = threads};
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .num_kv_heads = KV_HEADS);
    a.k_head_size = SIZE;
    a.dtype = FOLIO_BF16;
    folio_kv_cache_desc k = {.struct_size = sizeof k, .num_layers = 1};
    k.num_blocks = BLOCKS;
    k.block_size = BLOCK;
    k.num_kv_heads = KV_HEADS;
    k.k_head_size = SIZE;
    k.dtype = FOLIO_BF16;
    folio_kv_cache_view view = {.struct_size = sizeof view};
    /* every block once, in an order that is not that of memory */
    for (int32_t i = 0; i < SEQS * BLOCKS; i++)
        w->tables[i / BLOCKS][i % BLOCKS] = (int32_t)((uint32_t)i * 40503u % (SEQS * BLOCKS));
    w->tables[0][0] = 0;
    for (int i = 0; i < SEQS; i++) w->lens[i] = BLOCKS * BLOCK;
    TRY(folio_context_create(&c, &w->ctx));
    TRY(folio_attention_create(w->ctx, &a, &w->attention));
    TRY(folio_kv_cache_create(w->ctx, &k, &w->cache));
    TRY(folio_kv_cache_get_view(w->cache, 0, &view));
    memset(view.k, 0, BLOCK * KV_HEADS * SIZE * 2 * 2); /* K and V of block 0 */
    return open_step(w, &w->keys, 1, BLOCK, BLOCKS) && open_step(w, &w->no_key, 1, 0, BLOCKS) &&
           open_step(w, &w->large, SEQS, BLOCKS * BLOCK, SEQS * BLOCKS);
}

static void close_step(step *s)
{
    folio_plan_destroy(s->plan);
    folio_batch_destroy(s->batch);
}

static void close_world(world *w)
{
    close_step(&w->keys);
    close_step(&w->no_key);
    close_step(&w->large);
    folio_kv_cache_destroy(w->cache);
    folio_attention_destroy(w->attention);
    folio_context_destroy(w->ctx);
}

static bool forwards(world *w, const step *s, double *seconds)
{
    folio_tensors t = {.struct_size = sizeof t};
    t.q = (folio_tensor){.data = w->q, .dtype = FOLIO_BF16, .tokens = 1};
    t.out = (folio_tensor){.data = w->out, .dtype = FOLIO_BF16, .tokens = 1};
    double start = term_seconds();
    for (int i = 0; i < FORWARDS; i++)
        TRY(folio_attention_forward(s->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, &t, NULL));
    *seconds = term_seconds() - start;
    return true;
}

static bool forward_batch(void *state, double *seconds)
{
    world *w = state;
    return forwards(w, &w->keys, seconds);
}

static bool forward_no_key_batch(void *state, double *seconds)
{
    world *w = state;
    return forwards(w, &w->no_key, seconds);
}

static bool fill_batch(void *state, double *seconds)
{
    world *w = state;
    folio_step s =
        FOLIO_WITH(folio_step, .num_seqs = SEQS, .seq_lens = w->lens,
                   .table = {.kind = FOLIO_TABLE_ROWS, .indices = w->tables, .row_stride = BLOCKS});
    double start = term_seconds();
    for (int i = 0; i < UPDATES; i++) TRY(folio_batch_set(w->large.batch, &s));
    *seconds = term_seconds() - start;
    return true;
}

static bool update_batch(void *state, double *seconds)
{
    world *w = state;
    double start = term_seconds();
    for (int i = 0; i < UPDATES; i++) TRY(folio_plan_update(w->large.plan, w->large.batch, NULL));
    *seconds = term_seconds() - start;
    return true;
}

static bool run(bench_report *r, int32_t threads)
{
    world *w = bench_alloc(1, sizeof *w);
    bench_case cases[] = {
        {.name = "forward", .per = "call", .operations = FORWARDS, .batch = forward_batch},
        {.name = "forward_no_key",
         .per = "call",
         .operations = FORWARDS,
         .batch = forward_no_key_batch},
        {.name = "batch", .per = "step", .operations = UPDATES, .batch = fill_batch},
        {.name = "plan", .per = "step", .operations = UPDATES, .batch = update_batch},
    };
    enum { NUM_CASES = sizeof cases / sizeof cases[0] };
    for (int i = 0; i < NUM_CASES; i++) {
        cases[i].threads = threads;
        cases[i].state = w;
    }
    bool ok = open_world(w, threads) && bench_measure(r, cases, 2) &&
              bench_measure(r, cases + 2, NUM_CASES - 2);
    close_world(w);
    free(w);
    r->done++;
    return ok;
}

static void summarize(bench_report *r)
{
    const bench_result *no_key = bench_slowest(r, "forward_no_key"),
                       *batch = bench_slowest(r, "batch"), *plan = bench_slowest(r, "plan");
    double ns = no_key ? no_key->ns_median : (double)NAN;
    bench_add_summary(r, "forward_no_key_ns", ns, "a forward but its kernels: %.2f us", ns / 1e3);
    ns = batch && plan ? batch->ns_median + plan->ns_median : (double)NAN;
    bench_add_summary(r, "step_ns", ns, "batch and plan of 256 decodes of 4096 tokens: %.1f us",
                      ns / 1e3);
}

int bench_overhead_main(int argc, char **argv)
{
    bench_report r = {.topic = "overhead", .block_size = BLOCK};
    r.after = (bench_after){.output = "md", .format = &bench_report_format, .run = &r};
    const char *threads = "1,2", *seconds = "0.4";
    int64_t list[BENCH_MAX_LIST];
    int num_threads;
    const arg_option table[] = {
        {.name = "threads", .kind = ARG_TEXT, .value = &threads},
        {.name = "seconds", .kind = ARG_TEXT, .value = &seconds},
        BENCH_AFTER_OPTIONS(&r.after),
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, table, help, &status)) return status;
    status = bench_after_check(&r.after, argc, argv, table);
    if (status != EXIT_OK) return status;
    if (!bench_parse_list(argv[0], "threads", threads, 1, 256, list, &num_threads) ||
        !bench_parse_seconds(argv[0], "seconds", seconds, &r.seconds))
        return EXIT_USAGE;
    status = bench_after_open(&r.after, argv[0], r.topic);
    if (status != EXIT_OK) return status;
    if (r.after.from) return bench_after_from(&r.after);
    folio_context_info info = {.struct_size = sizeof info};
    folio_context *ctx = NULL;
    if (!bench_ok(folio_context_create(NULL, &ctx), "folio_context_create")) return EXIT_FAILED;
    folio_context_get_info(ctx, &info);
    folio_context_destroy(ctx);
    r.processors = info.num_threads;
    r.started = term_seconds();
    r.total = num_threads;
    bool ok = true;
    interrupt_catch();
    for (int i = 0; i < num_threads && ok; i++) ok = run(&r, (int32_t)list[i]);
    if (!ok && !interrupt_signal()) return EXIT_FAILED;
    summarize(&r);
    return bench_after_end(&r.after, r.num_results);
}
