/*
 * test_generation.c: generation from end to end. Requests are run alone first; then the same ones
 * together in a small pool under many regimes: chunked, forked, preempted, swapped, taken from the
 * prefix cache in every tier, with drafts that are rejected. Every row that is computed must have
 * the bits it has alone. A regime's decisions come from its seed; with transfers in the background
 * their order also depends on time, what is compared never does.
 */
#include "pool/generation_rig.h"

#include <unistd.h>

enum { MAX_RUNS = 16 };
enum {
    CALM = 300
}; /* steps after which nobody is disturbed any more, so that all come to an end */

/* Numbers in percent are chances, a step and sequence each unless told otherwise. */
typedef struct {
    uint64_t seed;
    int64_t spare_blocks; /* the pool has so many more than its largest request needs */
    int64_t host_blocks, store_frames;
    int64_t watermark;
    int32_t max_running; /* 0: all at once */
    int32_t max_chunk;   /* tokens of a prompt in one step, at random from 1; 0: all of it */
    int32_t max_drafts;
    int32_t skip;      /* sits a step out */
    int32_t fork;      /* a waiting request starts from one that shares its tokens */
    int32_t recompute; /* is preempted, to compute all again */
    int32_t to_host, to_disk;
    int32_t lower; /* a step: cached blocks go one tier down */
    bool match;    /* use the prefix cache */
    bool async;    /* transfers go on in the background */
} regime;

/* What happened in a drive: a regime that never did what it is for proves nothing. */
typedef struct {
    int64_t steps, rows, forks, recomputed, preempted, to_host, to_disk, lowered, rejected, full;
    folio_pool_stats stats;
} tally;

typedef struct {
    const gen_request *request;
    folio_sequence *sequence; /* NULL: waiting, or done */
    folio_transfer *transfer;
    int64_t known; /* tokens that are known: the prompt's, then those generated */
    int64_t kept;  /* tokens a swapped sequence must come back with */
    int64_t real;  /* of this step's rows, those of known tokens */
    bool done, in_step;
    int32_t ids[GEN_TOKENS]; /* with this step's drafts */
    gen_item item;
} run;

typedef struct {
    regime how;
    gen_pool p;
    run runs[MAX_RUNS];
    int32_t num_runs;
    uint64_t seed, draws;
    int64_t rows; /* of the step being made */
    int32_t idle; /* steps without any, in a row */
    tally t;
} drive;

static int64_t below(drive *d, int64_t n)
{
    return (int64_t)(support_bits(d->seed, d->draws++) % (uint64_t)n);
}
static bool chance(drive *d, int32_t percent) { return below(d, 100) < percent; }

/* ------------------------------------------------------------------------------------ transfers */

static bool can_swap(const drive *d) { return d->how.host_blocks > 0 || d->how.store_frames > 0; }

/* Where the call is to leave its transfer: NULL for calls that wait. */
static folio_transfer **handle(drive *d, run *r) { return d->how.async ? &r->transfer : NULL; }

/* Wait for a sequence's transfer, if it has one. */
static void settle(run *r)
{
    if (r->transfer != NULL) {
        CHECK_OK(folio_transfer_wait(r->transfer));
        CHECK(folio_transfer_is_done(r->transfer) == 1);
        folio_transfer_destroy(r->transfer);
        r->transfer = NULL;
    }
    folio_sequence_info info = gen_info(r->sequence);
    if (info.state == FOLIO_SEQUENCE_RESIDENT && r->kept > 0) {
        CHECK_INT(info.len, r->kept);
        CHECK_INT(info.committed_len, r->kept);
        r->kept = 0;
    }
}

static bool is_resident(const run *r)
{
    return r->sequence != NULL && r->transfer == NULL &&
           gen_info(r->sequence).state == FOLIO_SEQUENCE_RESIDENT;
}

static void swap_out(drive *d, run *r, folio_tier tier)
{
    int64_t len = gen_info(r->sequence).len;
    folio_status status = folio_sequence_swap_out(r->sequence, tier, NULL, handle(d, r));
    if (status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE) {
        CHECK_INT(gen_info(r->sequence).len, len);
        d->t.full++;
        return;
    }
    CHECK_OK(status);
    r->kept = len;
    if (tier == FOLIO_TIER_HOST) d->t.to_host++;
    else d->t.to_disk++;
}

static void swap_in(drive *d, run *r)
{
    folio_status status = folio_sequence_swap_in(r->sequence, NULL, handle(d, r));
    if (status == FOLIO_ERR_FULL) {
        CHECK_INT(gen_info(r->sequence).state, FOLIO_SEQUENCE_SWAPPED);
        d->t.full++;
        return;
    }
    CHECK_OK(status);
    if (!d->how.async) settle(r);
}

/* Blocks are needed at once: the call waits. What was reserved in this step goes too. */
static void preempt(drive *d, run *r, bool may_swap)
{
    folio_status status = FOLIO_ERR_FULL;
    int64_t committed = gen_info(r->sequence).committed_len;
    if (may_swap && committed > 0 && can_swap(d) && chance(d, 60)) {
        status = folio_sequence_preempt(r->sequence, FOLIO_PREEMPT_SWAP, NULL, NULL);
        if (status == FOLIO_OK) {
            folio_sequence_info info = gen_info(r->sequence);
            CHECK_INT(info.state, FOLIO_SEQUENCE_SWAPPED);
            r->kept = committed;
            d->t.to_host += info.tier == FOLIO_TIER_HOST;
            d->t.to_disk += info.tier == FOLIO_TIER_DISK;
        }
    }
    if (status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE) {
        status = folio_sequence_preempt(r->sequence, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL);
        CHECK_INT(gen_info(r->sequence).len, 0);
        d->t.recomputed++;
    }
    CHECK_OK(status);
    if (r->in_step) d->rows -= r->item.n;
    r->in_step = false;
    d->t.preempted++;
}

/* Between steps: what a scheduler might do to sequences and to the prefix cache, at random. */
static void disturb(drive *d)
{
    for (int32_t i = 0; i < d->num_runs; i++) {
        run *r = &d->runs[i];
        if (r->sequence == NULL || (r->transfer != NULL && chance(d, 50))) continue;
        settle(r);
        folio_sequence_info info = gen_info(r->sequence);
        if (info.state == FOLIO_SEQUENCE_SWAPPED) {
            if (chance(d, 60)) swap_in(d, r);
            continue;
        }
        if (info.len == 0 || info.len > info.committed_len) continue;
        if (info.encoder_len > info.encoder_committed_len) continue;
        if (chance(d, 10)) CHECK_OK(folio_sequence_release_window(r->sequence));
        if (d->t.steps > CALM) continue;
        if (chance(d, d->how.recompute)) preempt(d, r, false);
        else if (chance(d, d->how.to_host)) swap_out(d, r, FOLIO_TIER_HOST);
        else if (chance(d, d->how.to_disk)) swap_out(d, r, FOLIO_TIER_DISK);
    }
    if (!chance(d, d->how.lower)) return;
    bool to_host = d->how.host_blocks > 0 && (d->how.store_frames == 0 || chance(d, 50));
    int64_t n = 0;
    CHECK_OK(folio_pool_swap_out(d->p.pool, to_host ? FOLIO_TIER_HOST : FOLIO_TIER_DISK,
                                 1 + below(d, 8), NULL, &n, NULL));
    d->t.lowered += n;
}

/* ---------------------------------------------------------------------------------------- steps */

/* Slots for this step's tokens; others are preempted where blocks run out, unless it is new. */
static folio_status reserve(drive *d, run *r, int64_t n, bool is_new)
{
    uint32_t flags = is_new ? FOLIO_RESERVE_ADMIT : 0;
    folio_status status = FOLIO_OK;
    if (d->p.m->g.encoder && gen_info(r->sequence).encoder_len == 0)
        status = folio_sequence_reserve_encoder(r->sequence, r->request->encoder_len, flags, NULL);
    if (status == FOLIO_OK) status = folio_sequence_reserve(r->sequence, n, flags, NULL);
    if (status != FOLIO_ERR_FULL || is_new) return status;
    d->t.full++;
    for (int32_t i = d->num_runs - 1; i >= 0; i--) {
        if (&d->runs[i] == r || !is_resident(&d->runs[i])) continue;
        if (gen_info(d->runs[i].sequence).num_blocks == 0) continue;
        preempt(d, &d->runs[i], true);
        return reserve(d, r, n, false);
    }
    return FOLIO_ERR_FULL;
}

/* What the prefix cache has; false where it is still on its way. */
static bool match(drive *d, run *r)
{
    folio_tokens tokens = gen_tokens(r->request, r->known - 1);
    int64_t matched = -1;
    CHECK_OK(folio_sequence_match(r->sequence, &tokens, &matched, handle(d, r)));
    folio_sequence_info info = gen_info(r->sequence);
    if (r->transfer == NULL) CHECK_INT(info.len, matched);
    CHECK(matched % d->p.m->g.block_size == 0 && matched <= r->known - 1);
    return r->transfer == NULL;
}

/* Put a sequence into the step. False: a new one that finds no room. */
static bool join(drive *d, run *r, bool is_new)
{
    folio_sequence_info info = gen_info(r->sequence);
    if (info.len == 0 && d->how.match) {
        if (!match(d, r)) return true;
        info = gen_info(r->sequence);
    }
    int64_t n = r->known - info.len, at_once = GEN_ROWS / 2, drafts = 0;
    if (d->how.max_chunk > 0) at_once = 1 + below(d, d->how.max_chunk);
    if (n > at_once) n = at_once;
    /* Stop where siblings can fork. */
    if (d->how.fork && info.len < r->request->shared_len && n > r->request->shared_len - info.len)
        n = r->request->shared_len - info.len;
    if (d->how.max_drafts > 0 && info.len + n == r->known) {
        drafts = below(d, d->how.max_drafts + 1);
        int64_t most = r->request->len - 1 - r->known;
        if (drafts > most) drafts = most;
    }
    if (d->rows + n + drafts > GEN_ROWS) return true;
    folio_status status = reserve(d, r, n + drafts, is_new);
    if (status == FOLIO_ERR_FULL) return !is_new;
    CHECK_OK(status);
    memcpy(r->ids, r->request->tokens, (size_t)r->known * sizeof r->ids[0]);
    for (int64_t i = r->known; i < r->known + drafts; i++)
        r->ids[i] = chance(d, 60) ? r->request->tokens[i] : (int32_t)below(d, GEN_VOCABULARY);
    r->real = n;
    r->item.sequence = r->sequence;
    r->item.request = r->request;
    r->item.tokens = r->ids;
    r->item.n = n + drafts;
    r->in_step = true;
    d->rows += n + drafts;
    return true;
}

/* A running sequence whose tokens are all this request's too, and more are to come. */
static bool try_fork(drive *d, run *r)
{
    for (int32_t i = 0; i < d->num_runs; i++) {
        const run *from = &d->runs[i];
        if (from == r || from->in_step || !is_resident(from)) continue;
        folio_sequence_info info = gen_info(from->sequence);
        if (info.len == 0 || info.len != info.committed_len || info.len >= r->known) continue;
        if (info.encoder_len != info.encoder_committed_len) continue;
        size_t bytes = (size_t)info.len * sizeof r->ids[0];
        if (memcmp(from->request->tokens, r->request->tokens, bytes) != 0) continue;
        if (from->request->encoder_seed != r->request->encoder_seed) continue;
        CHECK_OK(folio_sequence_fork(from->sequence, &r->sequence));
        d->t.forks++;
        return true;
    }
    return false;
}

/* A sequence is about to compute what this request could start from. */
static bool waits_for_sibling(const drive *d, const run *r)
{
    size_t bytes = (size_t)r->request->shared_len * sizeof r->ids[0];
    for (int32_t i = 0; i < d->num_runs && d->how.fork > 0 && bytes > 0; i++) {
        const run *other = &d->runs[i];
        if (other->sequence == NULL || other == r) continue;
        if (other->request->shared_len != r->request->shared_len) continue;
        if (memcmp(other->request->tokens, r->request->tokens, bytes) != 0) continue;
        if (gen_info(other->sequence).committed_len < r->request->shared_len) return true;
    }
    return false;
}

static void admit(drive *d)
{
    int32_t running = 0;
    for (int32_t i = 0; i < d->num_runs; i++) running += d->runs[i].sequence != NULL;
    for (int32_t i = 0; i < d->num_runs; i++) {
        run *r = &d->runs[i];
        if (r->sequence != NULL || r->done) continue;
        if (d->how.max_running > 0 && running >= d->how.max_running) return;
        if (waits_for_sibling(d, r) && chance(d, 80)) continue;
        if (chance(d, d->how.fork) && try_fork(d, r)) {
            running++;
            continue;
        }
        if (chance(d, d->how.skip)) continue;
        folio_sequence_desc desc = {.struct_size = sizeof desc, .salt = r->request->encoder_seed};
        CHECK_OK(folio_sequence_create(d->p.pool, &desc, &r->sequence));
        running++;
        if (join(d, r, true)) continue;
        folio_sequence_destroy(r->sequence);
        r->sequence = NULL;
        return;
    }
}

/* Compare, then keep what is right: known tokens, and drafts up to the first wrong one. */
static bool accept(drive *d, run *r)
{
    int64_t drafts = r->item.n - r->real, kept = r->item.first + r->real, right = 0;
    while (right < drafts && r->ids[kept] == r->request->tokens[kept]) right++, kept++;
    if (!gen_rows_right(&d->p, &r->item, r->real + right)) return false;
    d->t.rows += r->real + right;
    d->t.rejected += drafts - right;
    folio_tokens tokens = gen_tokens(r->request, kept);
    bool cut_first = !d->how.match || chance(d, 50);
    if (cut_first && right < drafts) CHECK_OK(folio_sequence_truncate(r->sequence, kept));
    CHECK_OK(folio_sequence_commit(r->sequence, d->how.match ? &tokens : NULL));
    if (!cut_first && right < drafts) CHECK_OK(folio_sequence_truncate(r->sequence, kept));
    folio_sequence_info info = gen_info(r->sequence);
    CHECK_INT(info.len, kept);
    CHECK_INT(info.committed_len, kept);
    if (kept + 1 > r->known) r->known = kept + 1;
    r->in_step = false;
    if (r->known < r->request->len) return true;
    folio_sequence_destroy(r->sequence);
    r->sequence = NULL;
    r->done = true;
    return true;
}

/* All other sequences make way for the first one that is not done. */
static void rescue(drive *d)
{
    run *first = NULL;
    for (int32_t i = 0; i < d->num_runs; i++) {
        run *r = &d->runs[i];
        if (r->sequence == NULL) continue;
        settle(r);
        if (first == NULL) first = r;
        else if (is_resident(r)) preempt(d, r, false);
    }
    if (first == NULL || is_resident(first)) return;
    CHECK_OK(folio_sequence_swap_in(first->sequence, NULL, NULL));
    settle(first);
}

static bool step(drive *d)
{
    d->rows = 0;
    d->t.steps++;
    disturb(d);
    admit(d);
    for (int32_t i = 0; i < d->num_runs; i++) {
        run *r = &d->runs[i];
        if (!r->in_step && is_resident(r) && !chance(d, d->how.skip)) join(d, r, false);
    }
    gen_item *items[MAX_RUNS];
    int64_t n = 0;
    for (int32_t i = 0; i < d->num_runs; i++)
        if (d->runs[i].in_step) items[n++] = &d->runs[i].item;
    d->idle = n == 0 ? d->idle + 1 : 0;
    if (d->idle > 2) rescue(d);
    if (n == 0) return true;
    if (!gen_step(&d->p, items, n)) return false;
    for (int32_t i = 0; i < d->num_runs; i++)
        if (d->runs[i].in_step && !accept(d, &d->runs[i])) return false;
    return true;
}

/* ---------------------------------------------------------------------------------------- drive */

static int64_t blocks_needed(const gen_geometry *g, const gen_request *r)
{
    int64_t each = (r->len + g->block_size - 1) / g->block_size + 1;
    int64_t encoder = (r->encoder_len + g->block_size - 1) / g->block_size;
    return each * g->num_layer_groups + encoder;
}

/* For a pool to come: all that is cached goes down as far as it can. */
static void lower_all(drive *d)
{
    int64_t n = d->how.host_blocks > 0;
    while (n > 0)
        CHECK_OK(folio_pool_swap_out(d->p.pool, FOLIO_TIER_HOST, INT64_MAX, NULL, &n, NULL));
    if (d->how.store_frames > 0)
        CHECK_OK(folio_pool_swap_out(d->p.pool, FOLIO_TIER_DISK, INT64_MAX, NULL, NULL, NULL));
}

/* Run all requests to their ends, `times` times each, in a pool of the regime's. */
static tally run_all(gen_model *m, const regime *how, const gen_request *requests,
                     int32_t num_requests, int32_t times, const char *store, uint64_t seed)
{
    static drive d;
    d = (drive){.how = *how, .num_runs = num_requests * times, .seed = seed};
    folio_pool_desc desc = FOLIO_WITH(folio_pool_desc, .watermark = how->watermark,
                                      .flags = FOLIO_POOL_CHECK, .host_blocks = how->host_blocks,
                                      .store_path = how->store_frames > 0 ? store : NULL,
                                      .store_bytes = gen_store_bytes(m, how->store_frames));
    for (int32_t i = 0; i < d.num_runs; i++) {
        const gen_request *r = &requests[i % num_requests];
        d.runs[i].request = r;
        d.runs[i].known = r->prompt_len;
        int64_t need = blocks_needed(&m->g, r) + how->watermark + how->spare_blocks;
        if (desc.num_blocks < need) desc.num_blocks = need;
    }
    if (!gen_pool_open(&d.p, m, &desc, NULL)) return d.t;
    int before = test_failures();
    bool more = true;
    while (more && test_failures() == before) {
        more = false;
        if (!step(&d)) break;
        for (int32_t i = 0; i < d.num_runs; i++) more = more || !d.runs[i].done;
        if (d.t.steps > 2000) test_fail(__FILE__, __LINE__, "2000 steps and no end");
    }
    for (int32_t i = 0; i < d.num_runs; i++) {
        folio_transfer_destroy(d.runs[i].transfer);
        folio_sequence_destroy(d.runs[i].sequence);
    }
    d.t.stats = gen_stats(&d.p);
    if (how->lower > 0) lower_all(&d);
    if (test_failures() == before) gen_pool_close(&d.p);
    else printf("  ... %s, seed %llu\n", gen_model_name(m), (unsigned long long)seed);
    return d.t;
}

/* Requests of which some share their first tokens; lengths lie around block boundaries. */
static bool make_requests(gen_model *m, gen_request *requests, int32_t n, uint64_t seed)
{
    int64_t size = m->g.block_size;
    const int64_t shared[] = {0, 1, size, 2 * size + 1, 3 * size, 5};
    for (int32_t i = 0; i < n; i++) {
        uint64_t family = (uint64_t)(i / 3), bits = support_bits(seed, (uint64_t)i);
        int64_t shared_len = shared[support_bits(seed, 1000 + family) % 6];
        int64_t prompt_len = shared_len + 1 + (int64_t)(bits % (uint64_t)(size + 9));
        int64_t len = prompt_len + 2 + (int64_t)(bits / 64 % 14);
        gen_request_make(&requests[i], seed * 100 + family, shared_len, seed * 100 + 50 + bits,
                         prompt_len, len);
        if (m->g.encoder) requests[i].encoder_len = 1 + (int64_t)(family * 5 + seed) % 9;
        if (m->g.encoder) requests[i].encoder_seed = 7 + family;
        if (!gen_request_alone(m, &requests[i])) return false;
    }
    return true;
}

static void add(tally *sum, const tally *t)
{
    sum->steps += t->steps;
    sum->rows += t->rows;
    sum->forks += t->forks;
    sum->recomputed += t->recomputed;
    sum->preempted += t->preempted;
    sum->to_host += t->to_host;
    sum->to_disk += t->to_disk;
    sum->lowered += t->lowered;
    sum->rejected += t->rejected;
    sum->full += t->full;
    sum->stats.hit_tokens += t->stats.hit_tokens;
    sum->stats.blocks_in += t->stats.blocks_in;
    sum->stats.store_reads += t->stats.store_reads;
    sum->stats.store_warnings += t->stats.store_warnings;
    sum->stats.store_errors += t->stats.store_errors;
}

static const gen_geometry geometries[] = {
    {.backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_F32, .num_layer_groups = 2, .window = 9},
    {.backend = "cpu",
     .block_size = 16,
     .kv_dtype = FOLIO_BF16,
     .num_layer_groups = 2,
     .window = 16},
    {.backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_INT8, .num_layer_groups = 1},
    {.backend = "cpu",
     .block_size = 16,
     .kv_dtype = FOLIO_FP8_E4M3,
     .num_layer_groups = 2,
     .window = 5,
     .one_memory = true},
    {.backend = "reference",
     .block_size = 4,
     .kv_dtype = FOLIO_BF16,
     .num_layer_groups = 2,
     .window = 4},
    {.backend = "reference", .block_size = 16, .kv_dtype = FOLIO_INT8, .num_layer_groups = 1},
    {.backend = "cpu",
     .block_size = 16,
     .kv_dtype = FOLIO_BF16,
     .num_layer_groups = 2,
     .window = 9,
     .one_memory = true,
     .v_in_k = true},
    {.backend = "cpu",
     .block_size = 4,
     .kv_dtype = FOLIO_F32,
     .num_layer_groups = 2,
     .window = 7,
     .encoder = true},
    {.backend = "cpu",
     .block_size = 16,
     .kv_dtype = FOLIO_INT8,
     .num_layer_groups = 1,
     .encoder = true},
    {.backend = "cpu",
     .block_size = 16,
     .kv_dtype = FOLIO_INT8,
     .num_layer_groups = 2,
     .window = 9,
     .encoder = true,
     .one_memory = true},
};
enum { NUM_GEOMETRIES = COUNT_OF(geometries), NUM_REQUESTS = 6 };

/* The regime over all geometries, in two pools one after another over the same store. Hits are those of the last
 * pools. */
static tally each_geometry(const regime *how)
{
    tally sum = {0};
    static gen_request requests[NUM_REQUESTS];
    for (int32_t g = 0; g < NUM_GEOMETRIES; g++) {
        gen_model m;
        if (!gen_model_open(&m, &geometries[g], 2, NULL)) continue;
        uint64_t seed = how->seed * 1000 + (uint64_t)(g + 1);
        char store[256];
        gen_store_path(store, sizeof store);
        bool made = make_requests(&m, requests, NUM_REQUESTS, seed);
        for (int32_t i = 0; made && i < 2 && test_failures() == 0; i++) {
            tally t = run_all(&m, how, requests, NUM_REQUESTS, 2, store, seed);
            if (i == 0) t.stats.hit_tokens = 0;
            add(&sum, &t);
        }
        unlink(store);
        /* A drive that failed leaves its pool open, and the pool its context. */
        if (test_failures() == 0) gen_model_close(&m);
    }
    CHECK_INT(sum.stats.store_warnings, 0);
    CHECK_INT(sum.stats.store_errors, 0);
    return sum;
}

/* ---------------------------------------------------------------------------------------- tests */

/* One number of K changed in the cache: the rig sees another row and another token. */
TEST(generation, a_wrong_bit_changes_the_future)
{
    for (int32_t g = 0; g < NUM_GEOMETRIES; g++) {
        gen_model m;
        gen_pool p;
        gen_request r;
        static gen_item item;
        gen_request_make(&r, 1, 0, 2, 11, 13);
        r.encoder_len = 3;
        folio_pool_desc desc = {.struct_size = sizeof desc, .num_blocks = 16};
        REQUIRE_TEST(gen_model_open(&m, &geometries[g], 2, NULL));
        REQUIRE_TEST(gen_request_alone(&m, &r) && gen_pool_open(&p, &m, &desc, NULL));
        folio_sequence *s;
        CHECK_OK(folio_sequence_create(p.pool, NULL, &s));
        CHECK_OK(gen_feed(&p, s, &r, 11));
        CHECK(gen_contents_right(&p, s, &r));
        const int32_t *table;
        int64_t n;
        CHECK_OK(folio_sequence_get_table(s, 0, &table, &n));
        gen_nudge(&p, 1, (int64_t)table[0] * geometries[g].block_size);
        CHECK_OK(folio_sequence_reserve(s, 1, 0, NULL));
        item = (gen_item){.sequence = s, .request = &r, .tokens = r.tokens};
        CHECK(gen_step(&p, (gen_item *const[]){&item}, 1));
        CHECK(item.rows[0][0] == r.rows[11][0]);
        CHECK(item.rows[0][1] != r.rows[11][1]);
        CHECK(item.next[0] != r.tokens[12]);
        folio_sequence_destroy(s);
        gen_pool_close(&p);
        gen_model_close(&m);
    }
}

/* Everything at once, as tight or roomy as the seed wants it. */
static regime mixture_of(uint64_t seed, bool async)
{
    uint64_t b[16];
    for (int i = 0; i < 16; i++) b[i] = support_bits(seed, (uint64_t)i + 900);
    return (regime){.seed = seed,
                    .spare_blocks = (int64_t)(b[0] % 9),
                    .host_blocks = 3 + (int64_t)(b[1] % 20),
                    .store_frames = 8 + (int64_t)(b[2] % 60),
                    .watermark = (int64_t)(b[3] % 4),
                    .max_running = 3 + (int32_t)(b[4] % 5),
                    .max_chunk = 1 + (int32_t)(b[5] % 20),
                    .max_drafts = (int32_t)(b[6] % 5),
                    .skip = (int32_t)(b[7] % 25),
                    .fork = (int32_t)(b[8] % 90),
                    .recompute = (int32_t)(b[9] % 8),
                    .to_host = (int32_t)(b[10] % 16),
                    .to_disk = (int32_t)(b[11] % 16),
                    .lower = (int32_t)(b[12] % 50),
                    .match = b[13] % 5 > 0,
                    .async = async};
}

static void check_mixtures(uint64_t first_seed, uint64_t num_seeds)
{
    tally t = {0};
    for (uint64_t seed = first_seed; seed < first_seed + num_seeds; seed++) {
        regime how = mixture_of(seed, seed % 2 == 1);
        tally one = each_geometry(&how);
        add(&t, &one);
    }
    CHECK(t.forks > 0 && t.recomputed > 0 && t.to_host > 0 && t.to_disk > 0 && t.full > 0);
    CHECK(t.rejected > 0 && t.lowered > 0 && t.stats.blocks_in > 0 && t.stats.store_reads > 0);
}

TEST(generation, mixtures) { check_mixtures(1, 3); }

LONG_TEST(generation, many_mixtures) { check_mixtures(100, 60); }
