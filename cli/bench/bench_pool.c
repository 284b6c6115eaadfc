/*
 * bench_pool.c: `folio bench pool`: its command line and summary, and blocks by hand: pairs of
 * folio_pool_alloc and folio_pool_release on pools of several sizes, and by several threads.
 */
#include "bench/bench_pool.h"

#include "base/args.h"
#include "base/interrupt.h"
#include "base/term.h"
#include "bench/bench_ceilings.h"
#include "kit/kit.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: folio bench pool [OPTION]...\n\n"
    "Measures KV memory: nanoseconds per operation on a pool, its prefix cache, its sequences and its\n"
    "tiers. Operations are timed in batches of at least 0.01 ms. Cases that are compared alternate,\n"
    "batch by batch, so that noise affects them equally. spread is the interquartile range divided by\n"
    "the median. If the median of memcpy is far from its minimum, the machine was busy: measure again.\n\n"
    "cases\n"
    "  lock_pair              two uncontended lock and unlock pairs of a mutex: the least time that\n"
    "                         alloc_free can take\n"
    "  alloc_free             allocate and release one block, on an empty pool\n"
    "  alloc_free_fragmented  allocate one, release another, at random, on a half-full pool\n"
    "  alloc_free_threads     alloc_free by several threads on one pool; counts all pairs\n"
    "  match                  find a prompt of 'length' blocks in a prefix cache of 100,000\n"
    "  evict                  allocate a block from a pool whose blocks are all cached\n"
    "  commit                 add a full block to the prefix cache\n"
    "  step                   reserve and commit one token, for 'sequences' sequences\n"
    "  fork                   fork, reserve one token (copies a block), destroy\n"
    "  batch                  make a batch from 'sequences' sequences of 'length' blocks\n"
    "  memcpy                 copy 64 MiB with memcpy on one thread: the highest rate of a swap\n"
    "  swap_out, swap_in      move a 64 MiB sequence to host memory and back\n"
    "  store_out, store_in    move a 32 MiB sequence to a file in TMPDIR and back; the file may stay in\n"
    "                         the page cache. It is removed, also if the program is interrupted\n\n"
    "options\n"
    "      --blocks LIST      sizes of the pools of alloc_free; default 1k,10k,100k,1M\n"
    "      --block-size N     tokens per block, 1 to 256; default 16\n"
    "      --threads LIST     threads of alloc_free_threads; default 1,2,4\n"
    "      --seconds S        time for each case; default 0.4\n"
    "      --seed N           seed of the random tokens and orders; default 1\n"
    "      --filter TEXT      only sets with a case whose name contains TEXT\n" BENCH_AFTER_HELP
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text\n\n"
    "examples\n"
    "  folio bench pool\n"
    "  folio bench pool --filter alloc_free --blocks 1k,1M --seconds 5\n"
    "  folio bench pool --filter swap --block-size 32\n"
    "  folio bench pool -o json > pool.json\n\n"
    "The JSON is one object: {\"version\", \"cpu\", \"topic\", \"ceilings\": {\"lock_pair_ns\", \"memcpy_gbps\"},\n"
    "\"results\": [{\"case\", \"blocks\", \"threads\", \"length\", \"sequences\", \"ns_median\", \"ns_min\", \"spread\",\n"
    "\"per\", \"gbps\", \"batches\", \"noisy\": spread above 0.2}], \"summary\"}; null if a number does not\n"
    "apply or was not measured.\n"
    "--compare adds \"compare\", which 'folio bench --help' describes; there are no shares here. Keys are\n"
    "added in later versions, never renamed or removed.\n\n"
    "exit status\n"
    "  0  success    1  a call failed, a file is invalid, nothing ran, or --fail-if-slower found a case\n"
    "  2  invalid command line\n";

/* ---- Shared by the sets */

folio_pool *bench_make_pool(bench_pool *b, int64_t blocks)
{
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = blocks, .block_size = b->block_size);
    folio_pool *pool = NULL;
    return bench_ok(folio_pool_create(b->ctx, &desc, &pool), "folio_pool_create") ? pool : NULL;
}

static uint64_t draw_bits(bench_pool *b)
{
    return kit_random_bits((uint64_t)b->report.seed, 0, b->drawn++, 0, 0, 0);
}

int64_t bench_draw(bench_pool *b, int64_t below)
{
    return (int64_t)(draw_bits(b) % (uint64_t)below);
}

void bench_draw_ids(bench_pool *b, int32_t *ids, int64_t n)
{
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(draw_bits(b) >> 33);
}

void bench_shuffle(bench_pool *b, int32_t *of, int64_t n, int64_t count)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t j = i + bench_draw(b, count - i);
        int32_t kept = of[i];
        of[i] = of[j];
        of[j] = kept;
    }
}

/* ---- alloc_free: the block released last is allocated next */

/*
 * About one pool in a thousand takes twice the time as long as it lives, whatever its size; where
 * it lies in memory, presumably. Batches of a size go over several pools, one after another, so that the
 * median is not that one's.
 */
enum { PAIRS = 2048, PLACES = 3 };

typedef struct places {
    folio_pool *pools[PLACES];
    int at;
} places;

static bool lock_batch(void *state, double *seconds)
{
    pthread_mutex_t *lock = state;
    double start = term_seconds();
    for (int i = 0; i < 2 * PAIRS; i++) { /* a pair of calls takes the lock twice */
        pthread_mutex_lock(lock);
        pthread_mutex_unlock(lock);
    }
    *seconds = term_seconds() - start;
    return true;
}

static bool alloc_free_batch(void *state, double *seconds)
{
    places *s = state;
    folio_pool *pool = s->pools[s->at];
    int32_t block;
    s->at = (s->at + 1) % PLACES;
    double start = term_seconds();
    for (int i = 0; i < PAIRS; i++) {
        BENCH_TRY(folio_pool_alloc(pool, 1, &block));
        BENCH_TRY(folio_pool_release(pool, 1, &block));
    }
    *seconds = term_seconds() - start;
    return true;
}

bool bench_alloc_free(bench_pool *b)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    places states[BENCH_MAX_LIST] = {{{NULL}, 0}};
    bench_case cases[BENCH_MAX_LIST + 1];
    bool ok = true;
    cases[0] = (bench_case){.name = "lock_pair",
                            .per = "pair",
                            .operations = PAIRS,
                            .batch = lock_batch,
                            .state = &lock};
    for (int i = 0; i < b->num_blocks && ok; i++) {
        for (int k = 0; k < PLACES && ok; k++) {
            states[i].pools[k] = bench_make_pool(b, b->blocks[i]);
            ok = states[i].pools[k] != NULL;
        }
        cases[i + 1] = (bench_case){.name = "alloc_free",
                                    .blocks = b->blocks[i],
                                    .per = "pair",
                                    .operations = PAIRS,
                                    .batch = alloc_free_batch,
                                    .state = &states[i]};
    }
    ok = ok && bench_measure(&b->report, cases, b->num_blocks + 1);
    for (int i = 0; i < b->num_blocks; i++)
        for (int k = 0; k < PLACES; k++) folio_pool_destroy(states[i].pools[k]);
    return ok;
}

/* ---- alloc_free_fragmented: what is released is not what was just allocated */

typedef struct fragmented {
    bench_pool *b;
    folio_pool *pool;
    int32_t *held; /* [num_held], half of the pool's blocks, in random order */
    int64_t num_held, pairs;
    int32_t taken[PAIRS];
} fragmented;

static bool fragmented_batch(void *state, double *seconds)
{
    fragmented *s = state;
    bench_shuffle(s->b, s->held, s->pairs, s->num_held); /* those to be released come first */
    double start = term_seconds();
    for (int64_t i = 0; i < s->pairs; i++) {
        BENCH_TRY(folio_pool_alloc(s->pool, 1, &s->taken[i]));
        BENCH_TRY(folio_pool_release(s->pool, 1, &s->held[i]));
    }
    *seconds = term_seconds() - start;
    memcpy(s->held, s->taken, (size_t)s->pairs * sizeof *s->held);
    return true;
}

/* All blocks taken, half of them given back one by one in random order. */
static bool fragment(bench_pool *b, fragmented *s, int64_t blocks)
{
    s->b = b;
    s->num_held = blocks / 2;
    s->pairs = s->num_held < PAIRS ? s->num_held : PAIRS;
    s->held = bench_alloc(blocks, sizeof *s->held);
    s->pool = bench_make_pool(b, blocks);
    if (s->pool == NULL) return false;
    BENCH_TRY(folio_pool_alloc(s->pool, blocks, s->held));
    bench_shuffle(b, s->held, blocks, blocks);
    for (int64_t i = s->num_held; i < blocks; i++)
        BENCH_TRY(folio_pool_release(s->pool, 1, &s->held[i]));
    return true;
}

bool bench_fragmented(bench_pool *b)
{
    fragmented *states = bench_alloc(b->num_blocks, sizeof *states);
    bench_case cases[BENCH_MAX_LIST];
    bool ok = true;
    for (int i = 0; i < b->num_blocks && ok; i++) {
        ok = fragment(b, &states[i], b->blocks[i]);
        cases[i] = (bench_case){.name = "alloc_free_fragmented",
                                .blocks = b->blocks[i],
                                .per = "pair",
                                .operations = states[i].pairs,
                                .batch = fragmented_batch,
                                .state = &states[i]};
    }
    ok = ok && bench_measure(&b->report, cases, b->num_blocks);
    for (int i = 0; i < b->num_blocks; i++) {
        folio_pool_destroy(states[i].pool);
        free(states[i].held);
    }
    free(states);
    return ok;
}

/* ---- alloc_free_threads */

/* A race of milliseconds: a shorter one fits a time slice, and each thread would run alone. */
enum { MAX_THREADS = 64, RACE_PAIRS = 131072, RACE_BLOCKS = 100000 };

typedef struct race {
    folio_pool *pool;
    int64_t threads;
} race;

static bool run_pairs(folio_pool *pool)
{
    int32_t block;
    for (int i = 0; i < RACE_PAIRS; i++) {
        BENCH_TRY(folio_pool_alloc(pool, 1, &block));
        BENCH_TRY(folio_pool_release(pool, 1, &block));
    }
    return true;
}

static double run_piece(void *state, int64_t i, int64_t next)
{
    const race *s = state;
    (void)i;
    (void)next;
    return run_pairs(s->pool) ? 1 : 0;
}

static bool race_batch(void *state, double *seconds)
{
    race *s = state;
    return bench_in_parallel((int32_t)s->threads, s->threads, run_piece, s, seconds) ==
           (double)s->threads;
}

bool bench_threads(bench_pool *b)
{
    folio_pool *pool = bench_make_pool(b, RACE_BLOCKS);
    race races[BENCH_MAX_LIST];
    bench_case cases[BENCH_MAX_LIST];
    for (int i = 0; i < b->num_threads; i++) {
        races[i] = (race){pool, b->threads[i]};
        cases[i] = (bench_case){.name = "alloc_free_threads",
                                .blocks = RACE_BLOCKS,
                                .threads = b->threads[i],
                                .per = "pair",
                                .operations = b->threads[i] * RACE_PAIRS,
                                .batch = race_batch,
                                .state = &races[i]};
    }
    bool ok = pool && bench_measure(&b->report, cases, b->num_threads);
    folio_pool_destroy(pool);
    return ok;
}

/* ---- Summary */

static void summarize(bench_report *r)
{
    const bench_result *lock = bench_slowest(r, "lock_pair"), *copy = bench_slowest(r, "memcpy");
    const bench_result *slow = bench_slowest(r, "alloc_free");
    double lock_ns = lock ? lock->ns_median : (double)NAN, ratio;
    double copy_gbps = copy ? (double)copy->what.bytes / copy->ns_median : (double)NAN;
    double ns = slow ? slow->ns_median : (double)NAN;
    bench_add_ceiling(r, "lock_pair_ns", lock_ns, "two locks and unlocks: %.1f ns", lock_ns);
    bench_add_ceiling(r, "memcpy_gbps", copy_gbps, "memcpy on one thread: %.2f GB/s", copy_gbps);
    bench_add_summary(r, "alloc_free_ns", ns, "alloc_free: slowest size %.1f ns a pair", ns);
    ratio = bench_ratio(slow, bench_fastest(r, "alloc_free"));
    bench_add_summary(r, "alloc_free_ratio", ratio,
                      "alloc_free: slowest size %.2f times the fastest", ratio);
    ratio = bench_ratio(slow, lock);
    bench_add_summary(r, "alloc_free_per_lock", ratio, "alloc_free: %.2f times its two locks alone",
                      ratio);
    slow = bench_slowest(r, "alloc_free_fragmented");
    ratio = bench_ratio(slow, bench_fastest(r, "alloc_free_fragmented"));
    bench_add_summary(r, "alloc_free_fragmented_ratio", ratio,
                      "alloc_free_fragmented: slowest size %.2f times the fastest", ratio);
    slow = bench_slowest(r, "match");
    ns = slow ? slow->ns_median : (double)NAN;
    bench_add_summary(r, "match_ns", ns, "match: slowest length %.1f ns a block", ns);
    ratio = bench_ratio(slow, bench_fastest(r, "match"));
    bench_add_summary(r, "match_ratio", ratio, "match: slowest length %.2f times the fastest",
                      ratio);
    ratio = bench_ratio(copy, bench_slowest(r, "swap_out"));
    bench_add_summary(r, "swap_out_share", ratio, "swap_out: %.0f %% of memcpy", 100 * ratio);
    ratio = bench_ratio(copy, bench_slowest(r, "swap_in"));
    bench_add_summary(r, "swap_in_share", ratio, "swap_in: %.0f %% of memcpy", 100 * ratio);
}

/* ---- Command line */

typedef struct case_set {
    const char *cases;
    bool (*run)(bench_pool *b);
} case_set;

static const case_set case_sets[] = {
    {"lock_pair alloc_free", bench_alloc_free},
    {"alloc_free_fragmented", bench_fragmented},
    {"alloc_free_threads", bench_threads},
    {"match", bench_match},
    {"evict commit", bench_evict_commit},
    {"step", bench_step},
    {"fork", bench_fork},
    {"batch", bench_batch},
    {"memcpy swap_out swap_in", bench_swap},
    {"store_out store_in", bench_store},
};
enum { NUM_CASE_SETS = sizeof case_sets / sizeof case_sets[0] };

static bool is_selected(const bench_report *r, const case_set *g)
{
    return r->filter == NULL || strstr(g->cases, r->filter) != NULL;
}

static bool open_context(bench_pool *b)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu"};
    folio_context_info info = {.struct_size = sizeof info};
    if (!bench_ok(folio_context_create(&desc, &b->ctx), "folio_context_create")) return false;
    folio_context_get_info(b->ctx, &info);
    b->report.processors = info.num_threads;
    if (info.num_threads > 1) return true;
    /* Locks of a process with one thread are cheaper than any engine's: have a second one. */
    folio_context_destroy(b->ctx);
    b->ctx = NULL;
    desc.num_threads = 2;
    return bench_ok(folio_context_create(&desc, &b->ctx), "folio_context_create");
}

static int run_sets(bench_pool *b)
{
    bench_report *r = &b->report;
    bool ok = true;
    r->started = term_seconds();
    for (int i = 0; i < NUM_CASE_SETS; i++) r->total += is_selected(r, &case_sets[i]);
    if (r->total == 0) {
        fprintf(stderr, "folio bench pool: nothing ran: no case's name contains \"%s\"\n",
                r->filter);
        return EXIT_FAILED;
    }
    if (!open_context(b)) return EXIT_FAILED;
    interrupt_catch();
    for (int i = 0; i < NUM_CASE_SETS && !interrupt_signal(); i++) {
        if (!is_selected(r, &case_sets[i])) continue;
        ok = case_sets[i].run(b) && ok;
        r->done++;
    }
    folio_context_destroy(b->ctx);
    summarize(r);
    int status = bench_after_end(&r->after, r->num_results);
    return ok || interrupt_signal() ? status : EXIT_FAILED;
}

int bench_pool_main(int argc, char **argv)
{
    bench_pool b = {.report = {.topic = "pool", .seed = 1, .block_size = 16}};
    bench_report *r = &b.report;
    r->after = (bench_after){.output = "md", .format = &bench_report_format, .run = r};
    const char *blocks = "1k,10k,100k,1M", *threads = "1,2,4", *seconds = "0.4";
    const arg_option table[] = {
        {.name = "blocks", .kind = ARG_TEXT, .value = &blocks},
        {.name = "block-size", .kind = ARG_NUMBER, .value = &r->block_size, .min = 1, .max = 256},
        {.name = "threads", .kind = ARG_TEXT, .value = &threads},
        {.name = "seconds", .kind = ARG_TEXT, .value = &seconds},
        {.name = "seed", .kind = ARG_NUMBER, .value = &r->seed, .min = 0, .max = INT64_MAX},
        {.name = "filter", .kind = ARG_TEXT, .value = &r->filter},
        BENCH_AFTER_OPTIONS(&r->after),
        {.name = NULL},
    };
    int status;
    if (!args_run(argc, argv, table, help, &status)) return status;
    status = bench_after_check(&r->after, argc, argv, table);
    if (status != EXIT_OK) return status;
    if (!bench_parse_list(argv[0], "blocks", blocks, 256, 100000000, b.blocks, &b.num_blocks) ||
        !bench_parse_list(argv[0], "threads", threads, 1, MAX_THREADS, b.threads, &b.num_threads) ||
        !bench_parse_seconds(argv[0], "seconds", seconds, &r->seconds))
        return EXIT_USAGE;
    b.block_size = (int32_t)r->block_size;
    status = bench_after_open(&r->after, argv[0], r->topic);
    if (status != EXIT_OK) return status;
    return r->after.from ? bench_after_from(&r->after) : run_sets(&b);
}
