/* replay.c: the command `folio replay`: options, progress, the interrupt. */
#define _POSIX_C_SOURCE 200809L
#include "replay.h"

#include "args.h"
#include "commands.h"
#include "replay_engine.h"
#include "replay_report.h"
#include "term.h"

#include <folio/folio.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "usage: folio replay [TRACE] [OPTION]...\n\n"
    "Serves a trace of requests as an inference engine would, on the library's own pool, prefix cache,\n"
    "sequences and attention: requests come in while there are seats and blocks, prompts are computed in\n"
    "chunks beside the answers of others, and where blocks run out the youngest sequence makes way. K, V\n"
    "and q are made up from what each token is, so that prompts which share a prefix share blocks.\n\n"
    "TRACE is a file of JSON lines, a request each:\n"
    "    {\"timestamp\": 27000, \"input_length\": 600, \"output_length\": 52, \"hash_ids\": [46, 47]}\n"
    "with the timestamp in ms and a hash id per 512 tokens of the prompt, or a CSV with the columns\n"
    "arrival (seconds, or a date and time), prompt and output (or TIMESTAMP, ContextTokens,\n"
    "GeneratedTokens). '-' is standard input. Without TRACE a built-in one of some seconds is served.\n\n"
    "the traffic\n"
    "      --limit N         the first N requests alone\n"
    "      --speed X         requests come at their timestamps, X times as fast as in the trace;\n"
    "                        default: as fast as possible, one comes whenever a seat is free\n"
    "      --hash-block N    tokens of the prompt that a hash id stands for; default 512\n\n"
    "the model\n"
    "      --layers N        default 1\n"
    "      --heads H[:KV]    query heads and kv heads; default 8:2\n"
    "      --head-size N     default 64\n"
    "      --dtype TYPE      of q and out: f32 (default), f16, bf16\n"
    "      --kv-dtype TYPE   of the KV cache: f32, f16, bf16 (default), fp8_e4m3, fp8_e5m2, int8\n"
    "      --window N        each token sees the last N; default 0: all\n\n"
    "the engine\n"
    "      --blocks N        of the pool; or\n"
    "      --kv-memory SIZE  such as 512M or 2G: as many blocks as fit; default 1G, but room for\n"
    "                        32768 tokens with the built-in trace, so that it is tight\n"
    "      --block-size N    tokens; default 16\n"
    "      --max-seqs N      sequences at once; default 32\n"
    "      --budget N        tokens computed in one step; default 512\n"
    "      --policy P        decode-first (default): answers go on, prompts get what is left of the\n"
    "                        budget; prefill-first: the other way round\n"
    "      --preempt HOW     recompute (default), or swap to host memory and back\n"
    "      --host-blocks N   of host memory for --preempt swap; default: as many as the pool has\n"
    "      --no-attention    pool, prefix cache and scheduler alone; a step then takes 10 ms and\n"
    "                        20 us a token by the replay's clock\n"
    "      --backend NAME    auto (default), or a name 'folio info' lists\n"
    "      --threads N       default: one per processor\n"
    "      --seed N          other numbers in K, V and q; default 1\n\n"
    "the result\n"
    "      --verify P        check P percent of all (token, head) rows against the double-precision\n"
    "                        reference, over K and V made anew\n"
    "      --rows FILE       a line per row: request, position, layer, a hash of its bits\n"
    "  -o, --output FORMAT   md (default), csv, json\n"
    "  -h, --help            this text\n\n"
    "what the figures mean\n"
    "  The clock of latencies and rates runs while the engine schedules and attends; making up numbers\n"
    "  and verifying do not count, and times with nothing to do are skipped, not waited for.\n"
    "  time to first token   from a request's arrival to the end of the step that ends its prompt\n"
    "  KV memory wasted      1 - stored tokens / slots of the blocks held; beside it, what a cache would\n"
    "                        waste that reserves the trace's longest request for each running one\n"
    "  prefix hits           prompt tokens found in the cache when a request is admitted\n"
    "  prefill               tokens computed in chunks, once more after a preemption\n\n"
    "examples\n"
    "  folio replay\n"
    "  folio replay trace.jsonl --limit 200 --heads 4:1 --verify 0.1\n"
    "  folio replay trace.jsonl --no-attention --blocks 100000 --speed 1 -o json\n"
    "  folio replay --blocks 600 --preempt swap        # what a small pool does\n\n"
    "An interrupt (Ctrl-C) ends it after the step under way, with the summary so far.\n\n"
    "exit status\n"
    "  0  served, no row mismatched    1  a row mismatched, or it could not run\n"
    "  2  the command line is wrong    130  interrupted\n";

/* ---- Options that are no whole numbers or words */

static bool parse_real(const char *name, const char *text, double max, double *value)
{
    char *end;
    *value = strtod(text, &end);
    if (end != text && *end == '\0' && *value >= 0 && *value <= max) return true;
    args_complain("replay", "--%s takes a number from 0 to %g, not '%s'", name, max, text);
    return false;
}

static bool parse_size(const char *text, int64_t *bytes)
{
    static const char units[] = "KMGT";
    char *end;
    double value = strtod(text, &end);
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (unit) {
        value *= (double)(INT64_C(1) << (10 * (unit - units + 1)));
        end++;
    }
    if (end != text && *end == '\0' && value >= 1 && value < 0x1p62) {
        *bytes = (int64_t)value;
        return true;
    }
    args_complain("replay", "--kv-memory takes a size such as 512M or 2G, not '%s'", text);
    return false;
}

static bool parse_heads(const char *text, replay_options *o)
{
    int heads, kv_heads, used = 0;
    bool fine = sscanf(text, "%5d:%5d%n", &heads, &kv_heads, &used) == 2 && text[used] == '\0';
    if (!fine) {
        fine = sscanf(text, "%5d%n", &heads, &used) == 1 && text[used] == '\0';
        kv_heads = heads;
    }
    if (!fine || kv_heads < 1 || heads > 1024 || heads < 1 || heads % kv_heads != 0) {
        args_complain("replay",
                      "--heads takes HEADS:KV_HEADS, the second dividing the first, not '%s'",
                      text);
        return false;
    }
    o->heads = heads;
    o->kv_heads = kv_heads;
    return true;
}

static folio_dtype dtype_named(const char *name)
{
    for (int i = FOLIO_F32; i <= FOLIO_INT8; i++)
        if (strcmp(name, folio_dtype_name((folio_dtype)i)) == 0) return (folio_dtype)i;
    return FOLIO_F32;
}

/* As many blocks as fit. */
static bool blocks_in(const replay_options *o, int64_t bytes, int64_t *blocks)
{
    folio_kv_cache_desc desc = {.struct_size = sizeof desc,
                                .num_layers = o->layers,
                                .block_size = o->block_size,
                                .num_kv_heads = o->kv_heads,
                                .k_head_size = o->head_size,
                                .dtype = o->kv_dtype};
    int64_t low = 0, high = INT32_MAX;
    while (low < high) {
        folio_kv_shape shape = {.struct_size = sizeof shape};
        desc.num_blocks = low + (high - low + 1) / 2;
        if (folio_kv_cache_shape(o->backend, &desc, &shape) != FOLIO_OK) {
            fprintf(stderr, "folio replay: %s\n", folio_last_error());
            return false;
        }
        if (shape.total_bytes <= bytes) low = desc.num_blocks;
        else high = desc.num_blocks - 1;
    }
    *blocks = low;
    return true;
}

/* ---- Progress and the interrupt */

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

/* The second one ends the program as ever. */
static void catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

typedef struct watcher {
    double started, told;
    bool lines; /* stderr is no terminal */
} watcher;

static const char *short_left(char *text, size_t size, double seconds)
{
    if (seconds < 100) snprintf(text, size, "%.0f s", seconds);
    else if (seconds < 6000) snprintf(text, size, "%.0f min", seconds / 60);
    else snprintf(text, size, "%.1f h", seconds / 3600);
    return text;
}

static bool watch(void *user, const replay_view *view)
{
    enum { EVERY = 10 }; /* seconds between lines */
    watcher *w = user;
    double now = term_seconds(), passed = now - w->started;
    char text[64], left[16];
    if (interrupted) return false;
    if (passed < 1 || (w->lines && now - w->told < EVERY)) return true;
    double done = (double)view->done_tokens, total = (double)view->total_tokens;
    snprintf(text, sizeof text, "%.0f tokens/s, %s left", done / passed,
             short_left(left, sizeof left, done > 0 ? passed * (total - done) / done : 0));
    if (!w->lines) {
        term_progress(w->started, view->stats->requests, view->stats->total_requests, text);
        return true;
    }
    if (w->told > 0)
        fprintf(stderr, "%lld of %lld requests, %s\n", (long long)view->stats->requests,
                (long long)view->stats->total_requests, text);
    w->told = now;
    return true;
}

/* ---- Running */

static int serve(const replay_options *o, const replay_trace *t, const char *output)
{
    int64_t needed = replay_blocks_needed(o, t);
    if (needed > o->num_blocks) {
        fprintf(
            stderr,
            "folio replay: the longest request (%lld tokens) needs %lld blocks of %d, the pool has "
            "%lld; --blocks or --kv-memory gives it more\n",
            (long long)t->longest, (long long)needed, (int)o->block_size, (long long)o->num_blocks);
        return EXIT_FAILED;
    }
    if (strcmp(output, "md") == 0) replay_report_head(o, t);
    replay_stats *stats = replay_alloc(1, sizeof *stats);
    watcher w = {.started = term_seconds(), .lines = !isatty(STDERR_FILENO)};
    catch_interrupt();
    bool ok = replay_run(o, t, stats, watch, &w);
    term_progress_end();
    bool stopped = interrupted != 0;
    int status = !ok || stats->mismatched_rows > 0 ? EXIT_FAILED : stopped ? 130 : EXIT_OK;
    if (ok) replay_report(output, o, stats, stopped);
    free(stats);
    return status;
}

enum {
    BUILTIN_TOKENS = 32768
}; /* in the pool by default: two thirds of what the built-in trace wants */

typedef struct texts {
    const char *trace, *heads, *dtype, *kv_dtype, *memory, *speed, *verify, *policy, *preempt,
        *output;
    int64_t limit, hash_block, layers, head_size, block_size, threads, seed;
} texts;

static bool resolve(const texts *x, replay_options *o)
{
    int64_t bytes;
    folio_backend_info known = {.struct_size = sizeof known};
    const char *memory = x->memory ? x->memory : "1G";
    if (!parse_heads(x->heads, o) || !parse_real("speed", x->speed, 1e9, &o->speed) ||
        !parse_real("verify", x->verify, 100, &o->verify) || !parse_size(memory, &bytes))
        return false;
    o->layers = (int32_t)x->layers;
    o->head_size = (int32_t)x->head_size;
    o->block_size = (int32_t)x->block_size;
    o->threads = (int32_t)x->threads;
    o->seed = (uint64_t)x->seed;
    o->dtype = dtype_named(x->dtype);
    o->kv_dtype = dtype_named(x->kv_dtype);
    o->prefill_first = strcmp(x->policy, "prefill-first") == 0;
    o->swap = strcmp(x->preempt, "swap") == 0;
    if (strcmp(o->backend, "auto") != 0 && folio_backend_describe(o->backend, &known) != FOLIO_OK)
        return args_complain("replay", "unknown backend '%s'; 'folio info' lists them", o->backend),
               false;
    if (o->head_size % 8 != 0)
        return args_complain("replay", "--head-size takes a multiple of 8, not %d",
                             (int)o->head_size),
               false;
    if (o->no_attention && (o->swap || o->verify > 0 || o->rows))
        return args_complain("replay",
                             "--no-attention has no K, V and rows: --preempt swap, --verify and "
                             "--rows need them"),
               false;
    if (o->num_blocks == 0 && x->memory == NULL && x->trace == NULL)
        o->num_blocks = (BUILTIN_TOKENS + o->block_size - 1) / o->block_size;
    if (o->num_blocks == 0 && !blocks_in(o, bytes, &o->num_blocks)) return false;
    if (o->host_blocks == 0) o->host_blocks = o->num_blocks;
    return true;
}

int replay_main(int argc, char **argv)
{
    texts x = {.heads = "8:2",
               .dtype = "f32",
               .kv_dtype = "bf16",
               .speed = "0",
               .verify = "0",
               .policy = "decode-first",
               .preempt = "recompute",
               .output = "md",
               .limit = INT64_MAX,
               .hash_block = 512,
               .layers = 1,
               .head_size = 64,
               .block_size = 16,
               .seed = 1};
    replay_options o = {.backend = "auto", .max_seqs = 32, .budget = 512};
    const arg_option table[] = {
        {.name = "TRACE", .kind = ARG_OPERAND, .value = &x.trace},
        {.name = "limit", .kind = ARG_NUMBER, .value = &x.limit, .min = 1, .max = INT64_MAX},
        {.name = "speed", .kind = ARG_TEXT, .value = &x.speed},
        {.name = "hash-block", .kind = ARG_NUMBER, .value = &x.hash_block, .min = 1, .max = 65536},
        {.name = "layers", .kind = ARG_NUMBER, .value = &x.layers, .min = 1, .max = 1024},
        {.name = "heads", .kind = ARG_TEXT, .value = &x.heads},
        {.name = "head-size", .kind = ARG_NUMBER, .value = &x.head_size, .min = 8, .max = 512},
        {.name = "dtype", .kind = ARG_CHOICE, .value = &x.dtype, .choices = "f32|f16|bf16"},
        {.name = "kv-dtype",
         .kind = ARG_CHOICE,
         .value = &x.kv_dtype,
         .choices = "f32|f16|bf16|fp8_e4m3|fp8_e5m2|int8"},
        {.name = "window", .kind = ARG_NUMBER, .value = &o.window, .min = 0, .max = INT32_MAX},
        {.name = "blocks", .kind = ARG_NUMBER, .value = &o.num_blocks, .min = 1, .max = INT32_MAX},
        {.name = "kv-memory", .kind = ARG_TEXT, .value = &x.memory},
        {.name = "block-size", .kind = ARG_NUMBER, .value = &x.block_size, .min = 1, .max = 4096},
        {.name = "max-seqs", .kind = ARG_NUMBER, .value = &o.max_seqs, .min = 1, .max = 65536},
        {.name = "budget", .kind = ARG_NUMBER, .value = &o.budget, .min = 1, .max = 1 << 20},
        {.name = "policy",
         .kind = ARG_CHOICE,
         .value = &x.policy,
         .choices = "decode-first|prefill-first"},
        {.name = "preempt", .kind = ARG_CHOICE, .value = &x.preempt, .choices = "recompute|swap"},
        {.name = "host-blocks",
         .kind = ARG_NUMBER,
         .value = &o.host_blocks,
         .min = 1,
         .max = INT32_MAX},
        {.name = "no-attention", .kind = ARG_FLAG, .value = &o.no_attention},
        {.name = "backend", .kind = ARG_TEXT, .value = &o.backend},
        {.name = "threads", .kind = ARG_NUMBER, .value = &x.threads, .min = 1, .max = 256},
        {.name = "seed", .kind = ARG_NUMBER, .value = &x.seed, .min = 0, .max = INT64_MAX},
        {.name = "verify", .kind = ARG_TEXT, .value = &x.verify},
        {.name = "rows", .kind = ARG_TEXT, .value = &o.rows},
        {.name = "output",
         .letter = 'o',
         .kind = ARG_CHOICE,
         .value = &x.output,
         .choices = "md|csv|json"},
        {.name = NULL},
    };
    switch (args_parse(argc, argv, table)) {
    case ARGS_HELP: fputs(help, stdout); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    if (!resolve(&x, &o)) return EXIT_USAGE;
    replay_trace trace;
    replay_error error;
    if (x.trace == NULL) replay_trace_make(&trace, x.limit, o.seed);
    else if (!replay_trace_read(&trace, x.trace, x.limit, x.hash_block, &error)) {
        fprintf(stderr, "folio replay: %s: %s\n", x.trace, error.text);
        return EXIT_FAILED;
    }
    int status = serve(&o, &trace, x.output);
    replay_trace_free(&trace);
    return status;
}
