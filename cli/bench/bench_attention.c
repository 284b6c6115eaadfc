/*
 * bench_attention.c: `folio bench`: the forward of one layer over a paged cache, for batches in
 * vLLM's grammar, compared with what the machine could do at that moment (bench_ceilings.h) and what other
 * programs need for it (bench_peers.h). Of each setting, after a warm-up:
 *
 *     R x (ceilings, forward, forwards of its phases or of its plain form, each ancestor, reads of its K and V, each peer)
 */
#include "bench/bench_attention.h"

#include "base/args.h"
#include "base/interrupt.h"
#include "base/term.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- One setting */

/* What alternates: the setting, the phases of a mixed batch, the form without options, rotary as a pass. */
enum { WHOLE, PREFILLS, DECODES, PLAIN, PASS, NUM_SUBJECTS };

/* Who reads the pieces of a decode. */
enum { ALL_THREADS, ONE_THREAD, NUM_CREWS };

typedef struct trial {
    rig rigs[NUM_SUBJECTS];
    bool used[NUM_SUBJECTS], peer_runs[BENCH_MAX_PEERS];
    double *seconds[NUM_SUBJECTS], *peer_seconds[BENCH_MAX_PEERS]; /* [reps] */
    double *read_seconds;                          /* [reps]; NULL: not a decode on a device */
    bench_pieces *pieces;                          /* NULL: not a decode on the CPU */
    double *piece_rates[NUM_CREWS];                /* [reps], GB/s */
    bench_ancestors *ancestors;                    /* NULL: not asked for */
    double *ancestor_seconds[BENCH_NUM_ANCESTORS]; /* [reps]; NULL: does not run */
    batch_case phases[2];
    extras plain, pass;
    int64_t reps;
    double warm_up; /* seconds of one forward of each subject */
} trial;

static bool open_subject(bench *b, trial *t, int which, const setting *s)
{
    double seconds = 0;
    t->used[which] = true;
    t->seconds[which] = bench_alloc(b->reps, sizeof *t->seconds[which]);
    bool ok = bench_rig_open(&t->rigs[which], b->ctx, b->device, s, b->seed) &&
              bench_rig_forward(&t->rigs[which], &seconds);
    t->warm_up += seconds;
    return ok;
}

/* One line of JSON that tells a peer the case. */
static void write_offer(char *line, size_t size, const bench *b, const setting *s)
{
    int used = snprintf(line, size, "{\"case\": \"%s\", \"kinds\": [", s->what->name);
    for (int g = 0; g < s->what->num_kinds; g++) {
        const seq_kind *of = &s->what->kinds[g];
        used += snprintf(line + used, size - (size_t)used, "%s[%lld, %lld, %lld]", g ? ", " : "",
                         (long long)of->count, (long long)of->query_len, (long long)of->seq_len);
    }
    snprintf(line + used, size - (size_t)used,
             "], \"dtype\": \"%s\", \"kv_dtype\": \"%s\", \"heads\": %d, \"kv_heads\": %d, "
             "\"head_size\": %d, \"block_size\": %d, \"alibi\": %s, \"sinks\": %s, "
             "\"window\": %lld, \"soft_cap\": %.9g, \"full\": %s, \"seed\": %lld}",
             folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype), (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
             s->with->alibi ? "true" : "false", s->with->sinks ? "true" : "false",
             (long long)s->with->window, s->with->soft_cap, s->with->full ? "true" : "false",
             (long long)b->seed);
}

/* They have no graphs, promise no bits, rotate and store nothing and have one head size; of ragged kinds each sequence
 * would be a call. */
static bool for_peers(const setting *s)
{
    for (int g = 0; g < s->what->num_kinds; g++)
        if (s->what->kinds[g].up_to) return false;
    return !s->with->graph && !s->with->invariant && !s->with->rotary && !s->with->stores &&
           !s->with->private_slots && s->with->v_size == 0;
}

static bool open_peers(bench *b, trial *t, const setting *s)
{
    char line[2048]; /* 16 kinds of up to 30 characters, and 400 */
    if (b->peers == NULL || !for_peers(s)) return true;
    write_offer(line, sizeof line, b, s);
    if (!bench_peers_offer(b->peers, line, t->peer_runs)) return false;
    for (int k = 0; k < BENCH_MAX_PEERS; k++)
        if (t->peer_runs[k]) t->peer_seconds[k] = bench_alloc(b->reps, sizeof(double));
    return true;
}

static bool open_ancestors(bench *b, trial *t, const setting *s)
{
    double seconds = 0;
    if (!s->with->ancestors) return true;
    t->ancestors = bench_ancestors_open(&t->rigs[WHOLE], b->state, b->seed);
    for (int k = 0; k < BENCH_NUM_ANCESTORS && t->ancestors; k++) {
        if (!bench_ancestor_takes((bench_ancestor)k, s)) continue;
        t->ancestor_seconds[k] = bench_alloc(b->reps, sizeof *t->ancestor_seconds[k]);
        if (!bench_ancestors_run(t->ancestors, (bench_ancestor)k, &seconds)) return false;
        t->warm_up += seconds;
    }
    return t->ancestors != NULL;
}

static bool open_trial(bench *b, trial *t, const setting *s)
{
    setting other = *s;
    t->plain = (extras){.name = "plain",
                        .graph = s->with->graph,
                        .one_by_one = true,
                        .stores = s->with->rotary || s->with->private_slots};
    if (s->with->note) {
        t->plain = *s->with;
        t->plain.note = false;
        snprintf(t->plain.name, sizeof t->plain.name, "plain");
    }
    t->pass = *s->with;
    t->pass.rotary = false;
    t->pass.stores = t->pass.pass = true;
    if (!open_subject(b, t, WHOLE, s)) return false;
    for (int phase = PREFILLS; phase <= DECODES && strcmp(s->what->phase, "mixed") == 0; phase++) {
        t->phases[phase - PREFILLS] = bench_phase_of(s->what, phase == DECODES);
        other.what = &t->phases[phase - PREFILLS];
        if (!open_subject(b, t, phase, &other)) return false;
    }
    other = *s;
    other.with = &t->plain;
    if (strcmp(s->with->name, t->plain.name) != 0 && !open_subject(b, t, PLAIN, &other))
        return false;
    other.with = &t->pass;
    if (s->with->rotary && !b->device && !open_subject(b, t, PASS, &other)) return false;
    if (b->device && strcmp(s->what->phase, "decode") == 0)
        t->read_seconds = bench_alloc(b->reps, sizeof *t->read_seconds);
    t->pieces = bench_pieces_open(&t->rigs[WHOLE], b->info.num_threads);
    for (int i = 0; i < NUM_CREWS && t->pieces; i++)
        t->piece_rates[i] = bench_alloc(b->reps, sizeof *t->piece_rates[i]);
    return open_ancestors(b, t, s) && open_peers(b, t, s);
}

static void close_trial(trial *t)
{
    bench_pieces_close(t->pieces);
    bench_ancestors_close(t->ancestors);
    for (int k = 0; k < BENCH_NUM_ANCESTORS; k++) free(t->ancestor_seconds[k]);
    for (int i = 0; i < NUM_CREWS; i++) free(t->piece_rates[i]);
    for (int i = 0; i < NUM_SUBJECTS; i++) {
        if (t->used[i]) bench_rig_close(&t->rigs[i]);
        free(t->seconds[i]);
    }
    for (int k = 0; k < BENCH_MAX_PEERS; k++) free(t->peer_seconds[k]);
    free(t->read_seconds);
}

/* ---- Measuring */

/* Threads of OpenMP look for work 200 ms longer, and would disturb the next run. */
static void settle(const bench *b)
{
    struct timespec pause = {.tv_nsec = 250000000};
    if (!b->device) nanosleep(&pause, NULL);
}

/* A peer on the device empties the caches itself. */
static bool empty_caches(bench *b, bench_cache cache)
{
    if (b->device) return bench_device_empty(b->device, cache == BENCH_DIRTY);
    (void)bench_ceilings_sample(b->ceilings, BENCH_READ);
    return true;
}

/* A peer that fails is asked no more, and has no result. */
static void time_peers(bench *b, trial *t, bench_cache cache, int64_t rep)
{
    for (int k = 0; k < BENCH_MAX_PEERS; k++) {
        if (!t->peer_runs[k]) continue;
        settle(b);
        if (cache != BENCH_WARM && !b->device) empty_caches(b, cache);
        t->peer_runs[k] = bench_peers_time(b->peers, k, cache, &t->peer_seconds[k][rep]);
    }
    if (b->peers) settle(b);
}

static void time_pieces(bench *b, trial *t, bench_cache cache, int64_t rep)
{
    double bytes = bench_kv_bytes(&t->rigs[WHOLE].of);
    for (int i = 0; i < NUM_CREWS && t->pieces; i++) {
        int32_t threads = i == ONE_THREAD ? 1 : b->info.num_threads;
        if (cache == BENCH_WARM) (void)bench_pieces_read(t->pieces, threads);
        else (void)empty_caches(b, cache);
        t->piece_rates[i][rep] = 1e-9 * bytes / bench_pieces_read(t->pieces, threads);
    }
}

static bool time_ancestors(bench *b, trial *t, bench_cache cache, int64_t rep)
{
    double unused;
    for (int k = 0; k < BENCH_NUM_ANCESTORS; k++) {
        bench_ancestor which = (bench_ancestor)k;
        if (!t->ancestor_seconds[k]) continue;
        if (!(cache == BENCH_WARM ? bench_ancestors_run(t->ancestors, which, &unused)
                                  : empty_caches(b, cache)) ||
            !bench_ancestors_run(t->ancestors, which, &t->ancestor_seconds[k][rep]))
            return false;
    }
    return true;
}

static bool run_round(bench *b, trial *t, bench_cache cache, int64_t rep)
{
    bool warm = cache == BENCH_WARM;
    double unused;
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) /* reading is last: it empties the caches */
        b->samples[k][b->done] = b->device ? bench_device_sample(b->device, (bench_ceiling)k)
                                           : bench_ceilings_sample(b->ceilings, (bench_ceiling)k);
    b->done++;
    for (int i = 0; i < NUM_SUBJECTS; i++) {
        if (!t->used[i]) continue;
        if (!warm && (i != WHOLE || b->device) && !empty_caches(b, cache)) return false;
        if (warm && !bench_rig_forward(&t->rigs[i], &unused)) return false;
        if (!bench_rig_forward(&t->rigs[i], &t->seconds[i][rep])) return false;
    }
    if (!time_ancestors(b, t, cache, rep)) return false;
    time_pieces(b, t, cache, rep);
    time_peers(b, t, cache, rep);
    if (!t->read_seconds) return true;
    return (warm || empty_caches(b, cache)) &&
           bench_device_read(b->device, bench_kv_bytes(&t->rigs[WHOLE].of), &t->read_seconds[rep]);
}

/* The best of this case's own samples. */
static double best_sample(const bench *b, const trial *t, int ceiling)
{
    double best = (double)NAN;
    for (int64_t i = b->done - t->reps; i < b->done; i++) best = fmax(best, b->samples[ceiling][i]);
    return best;
}

/* What bounds this case; -1 where one number cannot say. */
static int ceiling_of(const bench *b, const trial *t, const result *to)
{
    bool decode = strcmp(to->of.what->phase, "decode") == 0;
    if (decode && !to->of.with->latent) return BENCH_READ;
    if (strcmp(to->of.what->phase, "mixed") == 0) return -1;
    bool dot = strstr(to->kernel, "_avx512_bf16") || strstr(to->kernel, "_amx");
    if (b->device) dot = to->of.dtype != FOLIO_F32;
    int arithmetic = dot ? BENCH_DOT_BF16 : BENCH_FMA_F32;
    double compute = bench_flops(&to->of) / best_sample(b, t, arithmetic);
    return decode && !(compute > bench_kv_bytes(&to->of) / best_sample(b, t, BENCH_READ))
               ? BENCH_READ
               : arithmetic;
}

static bench_stats stats_of(const trial *t, bool used, double *seconds)
{
    const double none = (double)NAN;
    return used ? bench_stats_of(seconds, t->reps) : (bench_stats){none, none, none};
}

/* Its ceiling, and what it reached of it. */
static void set_bound(bench *b, const trial *t, result *to)
{
    const double none = (double)NAN;
    to->ceiling = ceiling_of(b, t, to);
    to->bound = bench_bound_of(none, none, none, none, none);
    if (to->ceiling < 0) return;
    /* The samples of this case are the last; sorting them among themselves harms none. */
    double *own = b->samples[to->ceiling] + b->done - t->reps;
    if (isnan(own[0])) return;
    bench_stats samples = bench_stats_of(own, t->reps);
    double rate = to->ceiling == BENCH_READ ? to->gbps : to->gflops;
    bench_bound bound = bench_bound_of(samples.median, samples.spread, own[t->reps - 1], rate,
                                       rate * to->seconds.median / to->seconds.min);
    to->cached = bound.by_case && to->ceiling == BENCH_READ && to->of.cache == BENCH_WARM;
    if (to->cached) to->ceiling = -1;
    else to->bound = bound;
}

/* What it reached of reading the same pieces. */
static void set_pieces(trial *t, result *to)
{
    const double none = (double)NAN;
    to->pieces = bench_bound_of(none, none, none, none, none);
    to->pieces_one = none;
    if (!t->pieces) return;
    bench_stats samples = bench_stats_of(t->piece_rates[ALL_THREADS], t->reps);
    (void)bench_stats_of(t->piece_rates[ONE_THREAD], t->reps);
    to->pieces_one = t->piece_rates[ONE_THREAD][t->reps - 1]; /* sorted */
    /* Of a few keys one thread has read all before others are at work. */
    double best = fmax(t->piece_rates[ALL_THREADS][t->reps - 1], to->pieces_one);
    to->pieces = bench_bound_of(samples.median, samples.spread, best, to->gbps,
                                to->gbps * to->seconds.median / to->seconds.min);
}

/* What the bytes of a separate pass take, which reads and writes q and new keys: at the rate of reading. */
static double pass_bytes_s(bench *b, const trial *t)
{
    const rig *r = &t->rigs[PASS];
    if (!t->used[PASS]) return (double)NAN;
    double rate = bench_stats_of(b->samples[BENCH_READ] + b->done - t->reps, t->reps).median;
    const setting *s = &r->of;
    double rotated = s->with->latent ? 1.0 - (double)bench_v_size(s) / s->head_size : 1.0;
    return 2 * rotated * (double)(r->q_bytes + r->kv_bytes) / rate * 1e-9;
}

static void add_result(bench *b, trial *t, const lists *in, const setting *s)
{
    result *to = &b->results[b->num_results++];
    folio_plan_info info = {.struct_size = sizeof info};
    bool named = bench_rig_kernel(&t->rigs[WHOLE], &info);
    *to = (result){.of = *s,
                   .in = in,
                   .reps = t->reps,
                   .threads = b->device ? 0 : b->info.num_threads,
                   .seconds = bench_stats_of(t->seconds[WHOLE], t->reps),
                   .prefill_s = stats_of(t, t->used[PREFILLS], t->seconds[PREFILLS]).median,
                   .decode_s = stats_of(t, t->used[DECODES], t->seconds[DECODES]).median,
                   .plain_s = stats_of(t, t->used[PLAIN], t->seconds[PLAIN]).median,
                   .pass_s = stats_of(t, t->used[PASS], t->seconds[PASS]).median,
                   .pass_bytes_s = pass_bytes_s(b, t),
                   .read_s = stats_of(t, t->read_seconds != NULL, t->read_seconds).median};
    snprintf(to->kernel, sizeof to->kernel, "%s", named ? info.kernel : "");
    snprintf(to->level, sizeof to->level, "%s", b->info.level);
    if (t->used[PLAIN]) to->plain_work = bench_flops(&t->rigs[PLAIN].of) / bench_flops(s);
    for (int k = 0; k < BENCH_NUM_ANCESTORS; k++)
        to->ancestors[k] = stats_of(t, t->ancestor_seconds[k] != NULL, t->ancestor_seconds[k]);
    for (int k = 0; k < BENCH_MAX_PEERS; k++)
        to->peers[k] = stats_of(t, t->peer_runs[k], t->peer_seconds[k]);
    to->gflops = bench_flops(s) / to->seconds.median * 1e-9;
    to->gbps = bench_kv_bytes(s) / to->seconds.median * 1e-9;
    set_bound(b, t, to);
    set_pieces(t, to);
}

/* A setting in words; returns text. */
static const char *setting_text(char *text, size_t size, const setting *s)
{
    snprintf(text, size, "%s, %s on %s, heads %d:%d of %d, block size %d, %s", s->what->name,
             folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype), (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
             folio_layout_name(s->layout));
    return text;
}

static void leave_out(bench *b, const setting *s, int64_t reps)
{
    char text[256];
    b->total -= reps;
    term_progress_end();
    fprintf(stderr, "folio bench: left out: %s\n", setting_text(text, sizeof text, s));
}

/* On a device a case may be a thousand times as slow as the next: none takes longer than this. */
static void limit_reps(bench *b, trial *t, const setting *s)
{
    const double most_s = 30;
    if (!b->device || t->warm_up * (double)t->reps <= most_s) return;
    int64_t fewer = (int64_t)(most_s / t->warm_up);
    if (fewer < 1) fewer = 1;
    term_progress_end();
    fprintf(stderr, "folio bench: %s: one repetition takes %.2f s; %lld instead of %lld\n",
            s->what->name, t->warm_up, (long long)fewer, (long long)t->reps);
    b->total -= t->reps - fewer;
    t->reps = fewer;
}

static bool run_setting(bench *b, const lists *in, const setting *s)
{
    trial t;
    char text[256];
    int64_t first = b->done;
    memset(&t, 0, sizeof t);
    t.reps = b->reps;
    term_progress(b->started, b->done, b->total, s->what->name);
    term_step("folio bench", ++b->at, b->settings, setting_text(text, sizeof text, s));
    bool ok = open_trial(b, &t, s);
    if (ok) limit_reps(b, &t, s);
    for (int64_t i = 0; i < t.reps && ok; i++) {
        term_progress(b->started, b->done, b->total, s->what->name);
        ok = run_round(b, &t, s->cache, i) && !interrupt_signal();
    }
    if (ok) {
        add_result(b, &t, in, s);
        bench_after_results(&b->after, b->num_results);
    } else if (!interrupt_signal()) {
        b->done = first;
        leave_out(b, s, t.reps);
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

/* ---- Contexts: one for each number of threads and each level; on a device one for all sections */

/* A level that is not here is a cap. Said once, not for each number of threads. */
static void note_level(bench *b, const setting *s)
{
    if (s->level == NULL || s->level == b->noted || strcmp(s->level, b->info.level) == 0) return;
    b->noted = s->level;
    fprintf(stderr, "folio bench: --level %s: not on this machine; %s runs instead\n", s->level,
            b->info.level);
}

static void watch_clocks(bench *b)
{
    char bus[32];
    if (bench_device_bus(b->device, bus, sizeof bus))
        b->clocks = bench_clocks_open("libnvidia-ml.so.1", bus);
    if (b->clocks) (void)bench_clocks_start(b->clocks);
}

static bench_device *open_device(void)
{
    if (bench_device_open) return bench_device_open();
    fprintf(stderr, "folio bench: this program was built without CUDA; 'make cuda' builds "
                    "build-cuda/folio, which has it\n");
    return NULL;
}

static bool open_context(bench *b, const setting *s)
{
    folio_context_desc desc = FOLIO_WITH(folio_context_desc, .backend = b->backend,
                                         .num_threads = s->threads, .level = s->level);
    bool cuda = strcmp(b->backend, "cuda") == 0;
    b->info.struct_size = sizeof b->info;
    if (b->ctx) return true;
    if (cuda) desc.num_threads = 1;
    if (cuda && (b->device = open_device()) == NULL) return false;
    /* The state of vLLM 0.6's interface makes the context: both interfaces use the same threads. */
    if (!bench_ok(folio_vllm06_state_create(b->backend, &desc, &b->state), "folio_context_create"))
        return false;
    b->ctx = folio_vllm06_state_context(b->state);
    if (cuda) watch_clocks(b);
    folio_context_get_info(b->ctx, &b->info);
    snprintf(b->device_name, sizeof b->device_name, "%s", b->info.device);
    note_level(b, s);
    if (!cuda) b->ceilings = bench_ceilings_open(b->info.num_threads, b->info.level);
    return b->peers == NULL ||
           bench_peers_start(b->peers, b->info.num_threads, cuda ? b->backend : NULL);
}

/* What the machine can do, from a context's samples, which begin at `first`. */
static void add_samples(bench *b, int64_t first)
{
    for (int k = 0; k < BENCH_NUM_CEILINGS && b->done > first; k++) {
        double *own = b->samples[k] + first;
        if (isnan(own[0])) continue;
        b->medians[k] = fmax(b->medians[k], bench_stats_of(own, b->done - first).median);
        b->machine[k] = fmax(b->machine[k], own[b->done - first - 1]); /* sorted */
    }
}

/* And from its cases, where one was faster than every sample of the run. */
static void add_cases(bench *b)
{
    for (int64_t i = 0; i < b->num_results; i++) {
        const result *r = &b->results[i];
        if (r->ceiling < 0 || !(r->bound.value > b->machine[r->ceiling])) continue;
        b->machine[r->ceiling] = r->bound.value;
        b->by_case[r->ceiling] = true;
    }
}

/* Its samples begin at `first`. */
static void close_context(bench *b, int64_t first)
{
    add_samples(b, first);
    if (b->device) b->clock_mhz = bench_device_clock(b->device);
    bench_clocks_close(b->clocks, &b->clock_samples);
    b->clocks = NULL;
    bench_ceilings_close(b->ceilings);
    folio_vllm06_state_destroy(b->state);
    if (b->device) bench_device_close(b->device);
    b->ceilings = NULL;
    b->state = NULL;
    b->ctx = NULL;
    b->device = NULL;
}

static void note_peers(const bench *b)
{
    bool any = false;
    if (b->peers == NULL) return;
    for (int k = 0; k < bench_peers_count(b->peers); k++) any = any || bench_peer_ran(b, k);
    if (!any)
        fprintf(stderr, "folio bench: --peers: no peer ran, there is nothing to compare with\n");
}

static bool run_section(bench *b, const lists *of)
{
    int64_t count = bench_num_settings(of);
    int64_t each = count / of->num_threads / of->num_levels; /* settings of a context */
    bool ok = true;
    for (int64_t i = 0; i < count && !interrupt_signal(); i += each) {
        setting s = bench_nth_setting(of, i);
        int64_t first = b->done;
        bool open = open_context(b, &s);
        ok = open && ok;
        for (int64_t k = i; k < i + each && open && !interrupt_signal(); k++) {
            s = bench_nth_setting(of, k);
            ok = run_setting(b, of, &s) && ok;
        }
        if (!b->device || !open) close_context(b, first);
    }
    return ok;
}

static int run_bench(bench *b)
{
    int64_t count = 0;
    bool ok = true;
    int status = EXIT_OK;
    for (int i = 0; i < b->num_sections; i++) count += bench_num_settings(&b->sections[i]);
    b->settings = count;
    b->started = term_seconds();
    interrupt_catch();
    b->clock_mhz = (double)NAN;
    b->total = count * b->reps;
    b->results = bench_alloc(count, sizeof *b->results);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) {
        b->samples[k] = bench_alloc(b->total, sizeof *b->samples[k]);
        b->machine[k] = b->medians[k] = (double)NAN;
    }
    for (int i = 0; i < b->num_sections && !interrupt_signal(); i++) {
        ok = run_section(b, &b->sections[i]) && ok;
        if (!ok && b->num_results == 0 && b->ctx == NULL) break; /* nothing opens: said once */
    }
    if (b->device) close_context(b, 0);
    add_cases(b);
    term_progress_end();
    if (b->num_results > 0 || interrupt_signal())
        status = bench_after_end(&b->after, b->num_results);
    note_peers(b);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) free(b->samples[k]);
    free(b->results);
    return ok || interrupt_signal() ? status : EXIT_FAILED;
}

/* ---- The command */

int bench_attention_main(int argc, char **argv)
{
    static bench b; /* its lists are large */
    bool peers = false;
    const char *script = NULL, *names = NULL;
    list_texts t = {.cases = NULL};
    const arg_option table[] = {
        {.name = "backend", .kind = ARG_CHOICE, .value = &b.backend, .choices = "cpu|cuda"},
        {.name = "section", .kind = ARG_TEXT, .value = &names},
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
        BENCH_AFTER_OPTIONS(&b.after),
        {.name = NULL},
    };
    b = (bench){.backend = "cpu", .seed = 1};
    b.after = (bench_after){.output = "md", .format = &bench_attention_format, .run = &b};
    switch (args_parse(argc, argv, table)) {
    case ARGS_HELP: bench_attention_help(); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    int status = bench_after_check(&b.after, argc, argv, table);
    if (status != EXIT_OK) return status;
    bool cuda = strcmp(b.backend, "cuda") == 0;
    if (!cuda && t.cache != NULL && strstr(t.cache, "dirty") != NULL) {
        fprintf(stderr, "folio bench: --cache dirty is for GPUs: --backend cuda\n");
        return EXIT_USAGE;
    }
    if (b.reps == 0) b.reps = cuda ? 30 : 10;
    if (!bench_choose_sections(&b, names, &t)) return EXIT_USAGE;
    status = bench_after_open(&b.after, "bench", "attention");
    if (status != EXIT_OK) return status;
    if (b.after.from) return bench_after_from(&b.after);
    if (peers && (b.peers = bench_peers_open(script)) == NULL) return EXIT_FAILED;
    status = run_bench(&b);
    bench_peers_close(b.peers);
    return status;
}
