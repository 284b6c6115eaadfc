/* replay.c: the command `folio replay`: options, what is shown while it runs. */
#define _POSIX_C_SOURCE 200809L
#include "replay/replay.h"

#include "base/args.h"
#include "base/commands.h"
#include "base/interrupt.h"
#include "base/levels.h"
#include "base/term.h"
#include "replay/replay_engine.h"
#include "replay/replay_live.h"
#include "replay/replay_report.h"

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    int heads = 0, kv_heads = 0, used = 0;
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

int64_t replay_cache_bytes(const replay_options *o, int64_t blocks)
{
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = blocks, .num_layers = o->layers,
                   .block_size = o->block_size, .num_kv_heads = o->kv_heads,
                   .k_head_size = o->head_size, .dtype = o->kv_dtype);
    folio_kv_cache_shape shape = {.struct_size = sizeof shape};
    if (blocks == 0) return 0;
    return folio_kv_cache_get_shape(o->backend, &desc, &shape) == FOLIO_OK ? shape.total_bytes : -1;
}

/* As many blocks as fit. */
static bool blocks_in(const replay_options *o, int64_t bytes, int64_t *blocks)
{
    int64_t low = 0, high = INT32_MAX;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, needed = replay_cache_bytes(o, middle);
        if (needed < 0) {
            fprintf(stderr, "folio replay: %s\n", folio_last_error());
            return false;
        }
        if (needed <= bytes) low = middle;
        else high = middle - 1;
    }
    *blocks = low;
    return true;
}

/* ---- Watching */

typedef struct watcher {
    replay_live live;
    const replay_options *options;
    replay_series series;
} watcher;

/* What happened in a step, into the series. */
static void add_step(watcher *w, const replay_view *view)
{
    const replay_stats *s = view->stats;
    folio_pool_stats pool = {.struct_size = sizeof pool};
    bool idle = (double)s->steps == w->series.totals[REPLAY_STEPS]; /* the clock jumped */
    folio_pool_get_stats(view->pool, &pool);
    double levels[REPLAY_LEVELS] = {
        [REPLAY_USED_BLOCKS] = (double)(idle ? pool.num_used : s->last.used_blocks),
        [REPLAY_CACHED_BLOCKS] = (double)(idle ? pool.num_cached : s->last.cached_blocks),
        [REPLAY_RUNNING] = (double)(idle ? 0 : s->last.sequences),
        [REPLAY_DECODING] = (double)(idle ? 0 : s->last.decode_tokens),
        [REPLAY_PAUSED] = (double)view->paused};
    /* Without --speed a request comes when it is admitted. */
    if (!idle && w->options->speed > 0) levels[REPLAY_WAITING] = (double)view->waiting;
    double totals[REPLAY_COUNTS] = {[REPLAY_STEPS] = (double)s->steps,
                                    [REPLAY_PREFILL] = (double)s->prefill_tokens,
                                    [REPLAY_DECODE] = (double)s->decode_tokens,
                                    [REPLAY_PREEMPTIONS] = (double)s->preemptions,
                                    [REPLAY_ADMITTED_TOKENS] = (double)s->admitted_tokens,
                                    [REPLAY_HIT_TOKENS] = (double)s->hit_tokens};
    replay_series_add(&w->series, view->clock, levels, totals);
}

static bool watch(void *user, const replay_view *view)
{
    watcher *w = user;
    add_step(w, view);
    if (interrupt_signal()) return false;
    replay_live_show(&w->live, view);
    return true;
}

/* ---- Running */

/* The command line as a shell takes it. To be freed. */
static char *command_line(int argc, char **argv)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) abort();
    fputs("folio", out);
    for (int i = 0; i < argc; i++) {
        static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                    "0123456789_-+=:,./@%";
        fputc(' ', out);
        if (argv[i][0] && strspn(argv[i], plain) == strlen(argv[i])) {
            fputs(argv[i], out);
            continue;
        }
        fputc('\'', out);
        for (const char *c = argv[i]; *c; c++)
            if (*c == '\'') fputs("'\\''", out);
            else fputc(*c, out);
        fputc('\'', out);
    }
    if (fclose(out) != 0) abort();
    return text;
}

static int serve(const replay_options *o, const replay_trace *t, const char *command,
                 const char *output)
{
    int64_t needed = replay_blocks_needed(o, t);
    if (needed > o->num_blocks) {
        fprintf(
            stderr,
            "folio replay: the longest request (%lld tokens) needs %lld block%s of %d, the pool "
            "has %lld; --blocks or --kv-memory gives it more\n",
            (long long)t->longest, (long long)needed, needed == 1 ? "" : "s", (int)o->block_size,
            (long long)o->num_blocks);
        return EXIT_FAILED;
    }
    if (strcmp(output, "md") == 0) replay_report_head(o, t);
    replay_stats *stats = replay_alloc(1, sizeof *stats);
    watcher *w = replay_alloc(1, sizeof *w);
    w->options = o;
    replay_live_start(&w->live);
    interrupt_catch();
    bool ok = replay_run(o, t, stats, watch, w);
    term_progress_end();
    bool stopped = interrupt_signal() && stats->requests < stats->total_requests;
    int status = !ok || stats->mismatched_rows > 0 ? EXIT_FAILED : EXIT_OK;
    if (status == EXIT_OK && stopped) status = 128 + interrupt_signal();
    const replay_run_info run = {o, command, t, stats, &w->series, stopped};
    if (ok) replay_report(output, &run);
    free(w);
    free(stats);
    return status;
}

enum {
    BUILTIN_TOKENS = 32768
}; /* in the pool by default: two thirds of what the built-in trace wants */

typedef struct texts {
    const char *trace, *heads, *dtype, *kv_dtype, *memory, *speed, *verify, *policy, *admit,
        *preempt, *output;
    int64_t limit, hash_block, layers, head_size, block_size, threads, seed;
} texts;

static bool resolve(const texts *x, replay_options *o)
{
    int64_t bytes;
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
    o->admit_chunk = strcmp(x->admit, "chunk") == 0;
    o->swap = strcmp(x->preempt, "swap") == 0;
    if (strcmp(o->backend, "auto") != 0 && !backend_is_known("replay", o->backend)) return false;
    if (o->head_size % 8 != 0)
        return args_complain("replay", "--head-size takes a multiple of 8, not %d",
                             (int)o->head_size),
               false;
    if (o->no_attention && (o->swap || o->verify > 0 || o->rows))
        return args_complain("replay",
                             "--no-attention has no K, V and rows: --preempt swap, --verify and "
                             "--rows need them"),
               false;
    if (o->num_blocks > 0 && x->memory)
        return args_complain("replay", "--blocks and --kv-memory both size the pool: give one"),
               false;
    if (o->num_blocks == 0 && x->memory == NULL && x->trace == NULL)
        o->num_blocks = (BUILTIN_TOKENS + o->block_size - 1) / o->block_size;
    if (o->num_blocks == 0 && !blocks_in(o, bytes, &o->num_blocks)) return false;
    if (o->host_blocks == 0) o->host_blocks = o->num_blocks;
    return true;
}

static args_result parse(int argc, char **argv, texts *x, replay_options *o)
{
    const arg_option options[] = {
        {.name = "TRACE", .kind = ARG_OPERAND, .value = &x->trace},
        {.name = "limit", .kind = ARG_NUMBER, .value = &x->limit, .min = 1, .max = INT64_MAX},
        {.name = "speed", .kind = ARG_TEXT, .value = &x->speed},
        {.name = "hash-block", .kind = ARG_NUMBER, .value = &x->hash_block, .min = 1, .max = 65536},
        {.name = "layers", .kind = ARG_NUMBER, .value = &x->layers, .min = 1, .max = 1024},
        {.name = "heads", .kind = ARG_TEXT, .value = &x->heads},
        {.name = "head-size", .kind = ARG_NUMBER, .value = &x->head_size, .min = 8, .max = 512},
        {.name = "dtype", .kind = ARG_CHOICE, .value = &x->dtype, .choices = "f32|f16|bf16"},
        {.name = "kv-dtype",
         .kind = ARG_CHOICE,
         .value = &x->kv_dtype,
         .choices = "f32|f16|bf16|fp8_e4m3|fp8_e5m2|int8"},
        {.name = "window", .kind = ARG_NUMBER, .value = &o->window, .min = 0, .max = INT32_MAX},
        {.name = "blocks", .kind = ARG_NUMBER, .value = &o->num_blocks, .min = 1, .max = INT32_MAX},
        {.name = "kv-memory", .kind = ARG_TEXT, .value = &x->memory},
        {.name = "block-size", .kind = ARG_NUMBER, .value = &x->block_size, .min = 1, .max = 4096},
        {.name = "max-seqs", .kind = ARG_NUMBER, .value = &o->max_seqs, .min = 1, .max = 65536},
        {.name = "budget", .kind = ARG_NUMBER, .value = &o->budget, .min = 1, .max = 1 << 20},
        {.name = "policy",
         .kind = ARG_CHOICE,
         .value = &x->policy,
         .choices = "decode-first|prefill-first"},
        {.name = "admit", .kind = ARG_CHOICE, .value = &x->admit, .choices = "prompt|chunk"},
        {.name = "preempt", .kind = ARG_CHOICE, .value = &x->preempt, .choices = "recompute|swap"},
        {.name = "host-blocks",
         .kind = ARG_NUMBER,
         .value = &o->host_blocks,
         .min = 1,
         .max = INT32_MAX},
        {.name = "no-attention", .kind = ARG_FLAG, .value = &o->no_attention},
        {.name = "backend", .kind = ARG_TEXT, .value = &o->backend},
        {.name = "threads", .kind = ARG_NUMBER, .value = &x->threads, .min = 1, .max = 256},
        {.name = "seed", .kind = ARG_NUMBER, .value = &x->seed, .min = 0, .max = INT64_MAX},
        {.name = "verify", .kind = ARG_TEXT, .value = &x->verify},
        {.name = "rows", .kind = ARG_TEXT, .value = &o->rows},
        ARG_OUTPUT(&x->output, "md|csv|json"),
        {.name = NULL},
    };
    return args_parse(argc, argv, options);
}

int replay_main(int argc, char **argv)
{
    texts x = {.heads = "8:2",
               .dtype = "f32",
               .kv_dtype = "bf16",
               .speed = "0",
               .verify = "0",
               .policy = "decode-first",
               .admit = "prompt",
               .preempt = "recompute",
               .output = "md",
               .limit = INT64_MAX,
               .hash_block = 512,
               .layers = 1,
               .head_size = 64,
               .block_size = 16,
               .seed = 1};
    replay_options o = {.backend = "auto", .max_seqs = 32, .budget = 512};
    switch (parse(argc, argv, &x, &o)) {
    case ARGS_HELP: replay_help(); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    if (!resolve(&x, &o)) return EXIT_USAGE;
    replay_trace trace;
    json_error error;
    if (x.trace == NULL) replay_trace_make(&trace, x.limit, o.seed);
    else if (!replay_trace_read(&trace, x.trace, x.limit, x.hash_block, &error)) {
        fprintf(stderr, "folio replay: %s: %s\n", x.trace, error.text);
        return EXIT_FAILED;
    }
    char *command = command_line(argc, argv);
    int status = serve(&o, &trace, command, x.output);
    free(command);
    replay_trace_free(&trace);
    return status;
}
