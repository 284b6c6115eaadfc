/*
 * bench_attention.c: `folio bench`: the forward of one layer over a paged cache, for batches in
 * vLLM's grammar, beside what the machine could do at that moment (bench_ceilings.h) and what other
 * programs need for it (bench_peers.h). Of each setting, after a warm-up:
 *
 *     R x (ceilings, forward, forwards of its parts or of its plain form, each peer)
 */
#include "bench_attention.h"

#include "args.h"
#include "term.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char help[] =
    "usage: folio bench [OPTION]...\n"
    "       folio bench TOPIC [OPTION]...\n\n"
    "How fast this build is on this machine. Without a topic: attention, the forward of one layer on a\n"
    "paged cache whose blocks lie in random order; K and V are in the cache already. Between the\n"
    "repetitions of a case the ceilings are sampled with as many threads: loops that only multiply and\n"
    "add, or only read memory. share is what a case reached of its ceiling: reading for decodes,\n"
    "arithmetic for prefills (bf16 dot products where the kernel uses them, else f32 multiply-adds).\n\n"
    "topics\n"
    "  overhead  what a call costs besides attention\n"
    "  pool      KV memory: blocks handed out and taken back, prefix cache, sequences, tiers\n\n"
    "options\n"
    "      --case LIST        batches, see below; default q512,q2k,16q1s4k,1q1s32k\n"
    "      --dtype LIST       of q and out: f32, f16, bf16; default f32,bf16\n"
    "      --kv-dtype LIST    of the cache: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8; default: as dtype\n"
    "      --heads LIST       query heads:kv heads; default 32:8\n"
    "      --head-size LIST   multiples of 8 up to 512; default 128\n"
    "      --block-size LIST  tokens of a block; default 16\n"
    "      --layout LIST      of the cache: native (default), nhd, hnd, interleaved_nhd,\n"
    "                         interleaved_hnd, xpacked, xpacked_1\n"
    "      --threads LIST     default: one per processor\n"
    "      --level LIST       highest instruction-set level, the best up to it runs; default: the best\n"
    "                         for this CPU, up to FOLIO_CPU\n"
    "      --options LIST     plain (default), or alibi, sinks, window:TOKENS, soft_cap:X joined by +;\n"
    "                         such a case and its plain form run in turns\n"
    "      --cache LIST       cold (default): 256 MiB were read before each repetition, so that K and V\n"
    "                         come from memory; warm: the same forward ran just before\n"
    "      --peers            also run other programs' attention, in turns, by bench/peers.py\n"
    "      --peers-script PATH  where that script is, if not in the tree of this program\n"
    "      --reps N           repetitions of each case; default 10\n"
    "      --seed N           other numbers and orders; default 1\n"
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text; 'folio bench TOPIC --help' tells more of a topic\n\n"
    "All lists are crossed: each case runs with each type, each shape, each layout. A number of a list\n"
    "may be a range: FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR; one range per word. k is 1024. What\n"
    "is refused of the crossed lists is named on stderr; the rest is still printed, the exit status 1.\n\n";

/* Compilers need not take more than 4095 characters at once. */
static const char more_help[] =
    "cases\n"
    "  A case is one batch: groups joined by _, each [COUNT]qQUERY_LEN[sSEQ_LEN]. COUNT sequences (1)\n"
    "  bring QUERY_LEN new tokens and have SEQ_LEN keys with them (QUERY_LEN). Up to 16 groups, each of\n"
    "  up to 65536 sequences of up to 16384k tokens.\n"
    "  q2k            one prompt of 2048 tokens\n"
    "  q16-8k*2       ten cases: one prompt of 16 tokens, of 32, and so on\n"
    "  q512s8k        512 more tokens of a prompt, 7680 before them\n"
    "  16q1s4k        16 sequences decode a token each at 4096 keys\n"
    "  2q2k_32q1s4k   two prompts and 32 decodes in one batch; such a mix has no share, and the\n"
    "                 prefills alone and the decodes alone run in turns with it\n\n"
    "examples\n"
    "  folio bench                  # the default: about 15 s\n"
    "  folio bench --case 32q1s2k --dtype bf16 --kv-dtype bf16,fp8_e4m3,int8\n"
    "  folio bench --case q1k --level scalar,avx2 --threads 1-4 --reps 30\n"
    "  folio bench --case 16q1s4k --layout native,nhd,xpacked --block-size 16-128*2\n"
    "  folio bench --case q8k --options alibi,sinks,window:1k,soft_cap:30\n"
    "  FOLIO_PYTHON=venv/bin/python folio bench --case q16-2k*2 --cache cold,warm --peers\n"
    "  folio bench -o json > attention.json\n"
    "  folio bench pool --filter match -o csv\n\n"
    "GFLOP/s counts 4 * heads * head size for each key that a query row sees; GB/s the bytes of K and V\n"
    "of all sequences, once. spread is the range of the middle half of the times over their median.\n\n"
    "The JSON is one object: {\"version\", \"cpu\", \"ceilings\": {\"fma_f32_gflops\", \"dot_bf16_gflops\",\n"
    "\"dot_int8_gops\", \"read_gbps\"}, \"peers_run\": [names of the peers that have a result],\n"
    "\"results\": [{\"case\", \"phase\", \"backend\", \"device\", \"level\",\n"
    "\"threads\", \"dtype\", \"kv_dtype\", \"heads\", \"kv_heads\", \"head_size\", \"block_size\", \"layout\",\n"
    "\"options\", \"cache\", \"kernel\", \"median_s\", \"min_s\", \"spread\", \"gflops\", \"gbps\",\n"
    "\"ceiling\": {\"name\", \"value\"}, \"share\", \"prefill_s\", \"decode_s\", \"plain_s\",\n"
    "\"peers\": {name: {\"median_s\", \"min_s\", \"version\"}}}]}; null where a number does not apply. Keys are\n"
    "added in later versions, never renamed or removed.\n\n"
    "environment\n"
    "  FOLIO_CPU     the highest level where --level names none\n"
    "  FOLIO_PYTHON  the Python that runs the peers; default python3\n\n"
    "exit status\n"
    "  0  done    1  a call failed, or nothing ran    2  the command line is wrong\n";

/* ---- One setting */

/* What takes turns: the setting, the parts of a mixed batch, the form without options. */
enum { WHOLE, PREFILLS, DECODES, PLAIN, NUM_SUBJECTS };

typedef struct trial {
    rig rigs[NUM_SUBJECTS];
    bool used[NUM_SUBJECTS], peer_runs[BENCH_MAX_PEERS];
    double *seconds[NUM_SUBJECTS], *peer_seconds[BENCH_MAX_PEERS]; /* [reps] */
    batch_case parts[2];
} trial;

static bool open_subject(bench *b, trial *t, int which, const setting *s)
{
    double seconds;
    t->used[which] = true;
    t->seconds[which] = bench_alloc(b->reps, sizeof *t->seconds[which]);
    return bench_rig_open(&t->rigs[which], b->ctx, s, b->seed) &&
           bench_rig_forward(&t->rigs[which], &seconds);
}

/* One line of JSON that tells a peer the case. */
static void write_offer(char *line, size_t size, const bench *b, const setting *s)
{
    int used = snprintf(line, size, "{\"case\": \"%s\", \"groups\": [", s->what->name);
    for (int g = 0; g < s->what->num_groups; g++) {
        const group *of = &s->what->groups[g];
        used += snprintf(line + used, size - (size_t)used, "%s[%lld, %lld, %lld]", g ? ", " : "",
                         (long long)of->count, (long long)of->query_len, (long long)of->seq_len);
    }
    snprintf(line + used, size - (size_t)used,
             "], \"dtype\": \"%s\", \"kv_dtype\": \"%s\", \"heads\": %d, \"kv_heads\": %d, "
             "\"head_size\": %d, \"block_size\": %d, \"alibi\": %s, \"sinks\": %s, "
             "\"window\": %lld, \"soft_cap\": %.9g, \"seed\": %lld}",
             folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype), (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
             s->with->alibi ? "true" : "false", s->with->sinks ? "true" : "false",
             (long long)s->with->window, s->with->soft_cap, (long long)b->seed);
}

static bool open_peers(bench *b, trial *t, const setting *s)
{
    char line[2048]; /* 16 groups of up to 30 characters, and 400 */
    if (b->peers == NULL) return true;
    write_offer(line, sizeof line, b, s);
    if (!bench_peers_offer(b->peers, line, t->peer_runs)) return false;
    for (int k = 0; k < BENCH_MAX_PEERS; k++)
        if (t->peer_runs[k]) t->peer_seconds[k] = bench_alloc(b->reps, sizeof(double));
    return true;
}

static bool open_trial(bench *b, trial *t, const setting *s)
{
    static const extras plain = {.name = "plain"};
    setting other = *s;
    if (!open_subject(b, t, WHOLE, s)) return false;
    for (int part = PREFILLS; part <= DECODES && strcmp(s->what->phase, "mixed") == 0; part++) {
        t->parts[part - PREFILLS] = bench_part_of(s->what, part == DECODES);
        other.what = &t->parts[part - PREFILLS];
        if (!open_subject(b, t, part, &other)) return false;
    }
    other = *s;
    other.with = &plain;
    if (strcmp(s->with->name, plain.name) != 0 && !open_subject(b, t, PLAIN, &other)) return false;
    return open_peers(b, t, s);
}

static void close_trial(trial *t)
{
    for (int i = 0; i < NUM_SUBJECTS; i++) {
        if (t->used[i]) bench_rig_close(&t->rigs[i]);
        free(t->seconds[i]);
    }
    for (int k = 0; k < BENCH_MAX_PEERS; k++) free(t->peer_seconds[k]);
}

/* ---- Measuring */

/* Threads of OpenMP look for work 200 ms longer, and would disturb the next run. */
static void settle(void)
{
    struct timespec pause = {.tv_nsec = 250000000};
    nanosleep(&pause, NULL);
}

static void empty_caches(bench *b) { (void)bench_ceilings_sample(b->ceilings, BENCH_READ); }

/* A peer that fails is asked no more, and has no result. */
static void time_peers(bench *b, trial *t, bool warm, int64_t rep)
{
    for (int k = 0; k < BENCH_MAX_PEERS; k++) {
        if (!t->peer_runs[k]) continue;
        settle();
        if (!warm) empty_caches(b);
        t->peer_runs[k] = bench_peers_time(b->peers, k, warm, &t->peer_seconds[k][rep]);
    }
    if (b->peers) settle();
}

static bool run_round(bench *b, trial *t, bool warm, int64_t rep)
{
    double unused;
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) /* reading is last: it empties the caches */
        b->samples[k][b->done] = bench_ceilings_sample(b->ceilings, (bench_ceiling)k);
    b->done++;
    for (int i = 0; i < NUM_SUBJECTS; i++) {
        if (!t->used[i]) continue;
        if (!warm && i != WHOLE) empty_caches(b);
        if (warm && !bench_rig_forward(&t->rigs[i], &unused)) return false;
        if (!bench_rig_forward(&t->rigs[i], &t->seconds[i][rep])) return false;
    }
    time_peers(b, t, warm, rep);
    return true;
}

/* What bounds this case; -1 where one number cannot say. */
static int ceiling_of(const result *to)
{
    if (strcmp(to->of.what->phase, "decode") == 0) return BENCH_READ;
    if (strcmp(to->of.what->phase, "mixed") == 0) return -1;
    bool dot = strstr(to->kernel, "_avx512_bf16") || strstr(to->kernel, "_amx");
    return dot ? BENCH_DOT_BF16 : BENCH_FMA_F32;
}

static bench_stats stats_of(const bench *b, bool used, double *seconds)
{
    const double none = (double)NAN;
    return used ? bench_stats_of(seconds, b->reps) : (bench_stats){none, none, none};
}

static void add_result(bench *b, trial *t, const setting *s)
{
    result *to = &b->results[b->num_results++];
    folio_plan_info info = {.struct_size = sizeof info};
    bool named = folio_plan_describe(t->rigs[WHOLE].plan, 0, FOLIO_DECODER, &info) == FOLIO_OK;
    *to = (result){.of = *s,
                   .threads = b->info.num_threads,
                   .seconds = bench_stats_of(t->seconds[WHOLE], b->reps),
                   .prefill_s = stats_of(b, t->used[PREFILLS], t->seconds[PREFILLS]).median,
                   .decode_s = stats_of(b, t->used[DECODES], t->seconds[DECODES]).median,
                   .plain_s = stats_of(b, t->used[PLAIN], t->seconds[PLAIN]).median};
    snprintf(to->kernel, sizeof to->kernel, "%s", named ? info.kernel : "");
    snprintf(to->level, sizeof to->level, "%s", b->info.level);
    if (t->used[PLAIN]) to->plain_work = bench_flops(&t->rigs[PLAIN].of) / bench_flops(s);
    for (int k = 0; k < BENCH_MAX_PEERS; k++)
        to->peers[k] = stats_of(b, t->peer_runs[k], t->peer_seconds[k]);
    to->gflops = bench_flops(s) / to->seconds.median * 1e-9;
    to->gbps = bench_kv_bytes(s) / to->seconds.median * 1e-9;
    to->ceiling = ceiling_of(to);
    to->ceiling_value = to->share = (double)NAN;
    if (to->ceiling < 0) return;
    /* The samples of this case are the last; sorting them among themselves harms none. */
    double *own = b->samples[to->ceiling] + b->done - b->reps;
    if (isnan(own[0])) return;
    to->ceiling_value = bench_stats_of(own, b->reps).median;
    to->share = (to->ceiling == BENCH_READ ? to->gbps : to->gflops) / to->ceiling_value;
}

static void leave_out(bench *b, const setting *s)
{
    b->total -= b->reps;
    term_progress_end();
    fprintf(stderr, "folio bench: left out: %s, %s on %s, heads %d:%d of %d, block size %d, %s\n",
            s->what->name, folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype),
            (int)s->heads.heads, (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
            folio_layout_name(s->layout));
}

static bool run_setting(bench *b, const setting *s)
{
    trial t;
    int64_t first = b->done;
    memset(&t, 0, sizeof t);
    term_progress(b->started, b->done, b->total, s->what->name);
    bool ok = open_trial(b, &t, s);
    for (int64_t i = 0; i < b->reps && ok; i++) {
        term_progress(b->started, b->done, b->total, s->what->name);
        ok = run_round(b, &t, s->warm, i);
    }
    if (ok) {
        add_result(b, &t, s);
    } else {
        b->done = first;
        leave_out(b, s);
    }
    close_trial(&t);
    return ok;
}

bool bench_peer_ran(const bench *b, int k)
{
    for (int64_t i = 0; i < b->num_results; i++)
        if (isfinite(b->results[i].peers[k].median)) return true;
    return false;
}

/* ---- Contexts: one for each number of threads and each level */

/* A level that is not here is a cap. Said once, not for each number of threads. */
static void note_level(bench *b, const setting *s)
{
    if (s->level == NULL || s->level == b->noted || strcmp(s->level, b->info.level) == 0) return;
    b->noted = s->level;
    fprintf(stderr, "folio bench: --level %s: not on this machine; %s runs instead\n", s->level,
            b->info.level);
}

static bool open_context(bench *b, const setting *s)
{
    folio_context_desc desc = {
        .struct_size = sizeof desc, .backend = "cpu", .num_threads = s->threads, .level = s->level};
    b->info.struct_size = sizeof b->info;
    if (!bench_ok(folio_context_create(&desc, &b->ctx), "folio_context_create")) return false;
    folio_context_describe(b->ctx, &b->info);
    note_level(b, s);
    b->ceilings = bench_ceilings_open(b->info.num_threads, b->info.level);
    return b->peers == NULL || bench_peers_start(b->peers, b->info.num_threads);
}

/* Its samples begin at `first`. */
static void close_context(bench *b, int64_t first)
{
    for (int k = 0; k < BENCH_NUM_CEILINGS && b->done > first; k++) {
        double *own = b->samples[k] + first;
        if (isnan(own[0])) continue;
        b->machine[k] = fmax(b->machine[k], bench_stats_of(own, b->done - first).median);
    }
    bench_ceilings_close(b->ceilings);
    folio_context_destroy(b->ctx);
    b->ceilings = NULL;
    b->ctx = NULL;
}

static void note_peers(const bench *b)
{
    bool any = false;
    if (b->peers == NULL) return;
    for (int k = 0; k < bench_peers_count(b->peers); k++) any = any || bench_peer_ran(b, k);
    if (!any)
        fprintf(stderr, "folio bench: --peers: no peer ran, there is nothing to compare with\n");
}

static int run_bench(bench *b)
{
    int64_t count = bench_num_settings(&b->of);
    int64_t each = count / b->of.num_threads / b->of.num_levels; /* settings of a context */
    bool ok = true;
    b->started = term_seconds();
    b->total = count * b->reps;
    b->results = bench_alloc(count, sizeof *b->results);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) {
        b->samples[k] = bench_alloc(b->total, sizeof *b->samples[k]);
        b->machine[k] = (double)NAN;
    }
    for (int64_t i = 0; i < count; i += each) {
        setting s = bench_nth_setting(&b->of, i);
        int64_t first = b->done;
        bool open = open_context(b, &s);
        ok = open && ok;
        for (int64_t k = i; k < i + each && open; k++) {
            s = bench_nth_setting(&b->of, k);
            ok = run_setting(b, &s) && ok;
        }
        close_context(b, first);
    }
    term_progress_end();
    if (b->num_results > 0) bench_attention_print(b);
    note_peers(b);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) free(b->samples[k]);
    free(b->results);
    return ok ? EXIT_OK : EXIT_FAILED;
}

/* ---- The command */

int bench_attention_main(int argc, char **argv)
{
    static bench b; /* its lists are large */
    bool peers = false;
    const char *script = NULL;
    list_texts t = {.cases = "q512,q2k,16q1s4k,1q1s32k",
                    .dtypes = "f32,bf16",
                    .heads = "32:8",
                    .head_sizes = "128",
                    .block_sizes = "16",
                    .layouts = "native",
                    .options = "plain",
                    .cache = "cold"};
    const arg_option table[] = {
        {.name = "case", .kind = ARG_TEXT, .value = &t.cases},
        {.name = "dtype", .kind = ARG_TEXT, .value = &t.dtypes},
        {.name = "kv-dtype", .kind = ARG_TEXT, .value = &t.kv_dtypes},
        {.name = "heads", .kind = ARG_TEXT, .value = &t.heads},
        {.name = "head-size", .kind = ARG_TEXT, .value = &t.head_sizes},
        {.name = "block-size", .kind = ARG_TEXT, .value = &t.block_sizes},
        {.name = "layout", .kind = ARG_TEXT, .value = &t.layouts},
        {.name = "threads", .kind = ARG_TEXT, .value = &t.threads},
        {.name = "level", .kind = ARG_TEXT, .value = &t.levels},
        {.name = "options", .kind = ARG_TEXT, .value = &t.options},
        {.name = "cache", .kind = ARG_TEXT, .value = &t.cache},
        {.name = "peers", .kind = ARG_FLAG, .value = &peers},
        {.name = "peers-script", .kind = ARG_TEXT, .value = &script},
        {.name = "reps", .kind = ARG_NUMBER, .value = &b.reps, .min = 1, .max = 10000},
        {.name = "seed", .kind = ARG_NUMBER, .value = &b.seed, .min = 0, .max = INT64_MAX},
        {.name = "output",
         .letter = 'o',
         .kind = ARG_CHOICE,
         .value = &b.output,
         .choices = "md|csv|json"},
        {.name = NULL},
    };
    b = (bench){.reps = 10, .seed = 1, .output = "md"};
    switch (args_parse(argc, argv, table)) {
    case ARGS_HELP: printf("%s%s", help, more_help); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    if (!bench_parse_lists(&b.of, &t)) return EXIT_USAGE;
    if (peers && (b.peers = bench_peers_open(script)) == NULL) return EXIT_FAILED;
    int status = run_bench(&b);
    bench_peers_close(b.peers);
    return status;
}
