/* replay_engine.c: the scheduler and its sequences; see replay_engine.h. */
#include "replay/replay_engine.h"

#include "base/term.h"
#include "replay/replay_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A request that was admitted, from its first seat to its last token. */
typedef struct seat {
    const replay_request *request;
    folio_sequence *sequence;
    uint64_t *hash_ids; /* [full blocks of all its tokens] */
    int64_t done;       /* tokens whose K and V are stored            */
    int64_t known;      /* tokens that exist: prompt and answer so far */
    int64_t in_step;    /* tokens it computes in this step            */
    bool swapped;
    double arrival, last; /* by the clock: when it came, its last token */
} seat;

typedef struct engine {
    const replay_options *o;
    const replay_trace *trace;
    replay_stats *stats;
    replay_model model;
    folio_context *ctx; /* without a model */
    folio_pool *pool;
    seat **running, **paused; /* [max_seqs] each, oldest first; together at most max_seqs */
    int64_t num_running, num_paused;
    replay_item *items;
    int64_t next;    /* request that was not admitted yet */
    int64_t arrived; /* requests that have come, as far as they were counted */
    double clock;
    double came;     /* closed loop: when the next request found a seat; < 0: not yet */
    int64_t used;    /* tokens of this step */
    int64_t full_at; /* room_of when an admission failed last; -1: since then one did not */
    bool preempted;  /* in this step */
    int64_t done_tokens;
} engine;

static bool is_decoding(const seat *s)
{
    return s->done >= s->request->prompt_len && s->known - s->done == 1;
}

static int64_t blocks_of(const engine *e, int64_t tokens)
{
    return (tokens + e->o->block_size - 1) / e->o->block_size;
}

/* Tokens of a sequence that hold blocks at once. */
static int64_t held_tokens(const replay_options *o, int64_t tokens)
{
    int64_t most = o->window + o->budget + 2 * o->block_size;
    return o->window > 0 && most < tokens ? most : tokens;
}

int64_t replay_blocks_needed(const replay_options *o, const replay_trace *t)
{
    return (held_tokens(o, t->longest) + o->block_size - 1) / o->block_size;
}

static folio_pool_stats pool_stats(engine *e)
{
    folio_pool_stats s = {.struct_size = sizeof s};
    folio_pool_get_stats(e->pool, &s);
    return s;
}

/* ---- Sequences */

/* A block's last token stands for all of it: its identity holds what came before. */
static void make_hash_ids(const engine *e, seat *s)
{
    int64_t size = e->o->block_size;
    int64_t blocks = (s->request->prompt_len + s->request->output_len) / size;
    s->hash_ids = replay_alloc(blocks, sizeof *s->hash_ids);
    for (int64_t b = 0; b < blocks; b++)
        s->hash_ids[b] = replay_token(e->trace, s->request, (b + 1) * size - 1);
}

static folio_tokens tokens_of(const seat *s, int64_t num_tokens)
{
    return FOLIO_WITH(folio_tokens, .num_tokens = num_tokens, .hash_ids = s->hash_ids);
}

static void free_seat(seat *s)
{
    if (s == NULL) return;
    folio_sequence_destroy(s->sequence);
    free(s->hash_ids);
    free(s);
}

static void remove_at(seat **list, int64_t *count, int64_t i)
{
    memmove(&list[i], &list[i + 1], (size_t)(*count - i - 1) * sizeof *list);
    (*count)--;
}

/* The youngest running sequence makes way; it is the first to come back of those paused after it. */
static bool preempt_youngest(engine *e)
{
    seat *s = e->running[--e->num_running];
    folio_status status = FOLIO_ERR_FULL;
    if (e->o->swap && s->done > 0)
        status = folio_sequence_preempt(s->sequence, FOLIO_PREEMPT_SWAP, NULL, NULL);
    if (status != FOLIO_OK && status != FOLIO_ERR_FULL && status != FOLIO_ERR_TOO_LARGE)
        return replay_ok(status, "folio_sequence_preempt");
    s->swapped = status == FOLIO_OK;
    if (!s->swapped) {
        REPLAY_TRY(folio_sequence_preempt(s->sequence, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
        e->done_tokens -= s->done;
        s->done = 0;
    }
    e->used -= s->in_step;
    s->in_step = 0;
    e->stats->preemptions++;
    e->stats->swaps += s->swapped;
    e->preempted = true;
    memmove(&e->paused[1], e->paused, (size_t)e->num_paused * sizeof *e->paused);
    e->paused[0] = s;
    e->num_paused++;
    return true;
}

/* Slots for n tokens of running[i] in this step. *got: it has them; it may be paused instead. */
static bool join(engine *e, int64_t i, int64_t n, bool may_preempt, bool *got)
{
    seat *s = e->running[i];
    for (*got = false;;) {
        folio_status status = folio_sequence_reserve(s->sequence, n, 0, NULL);
        if (status == FOLIO_OK) break;
        if (status != FOLIO_ERR_FULL || (i == 0 && e->num_running == 1))
            return replay_ok(status, "folio_sequence_reserve");
        if (!may_preempt) return true;
        if (!preempt_youngest(e)) return false;
        if (i == e->num_running) return true; /* it was the youngest itself */
    }
    s->in_step = n;
    e->used += n;
    *got = true;
    return true;
}

static bool join_decodes(engine *e)
{
    bool got;
    for (int64_t i = 0; i < e->num_running && e->used < e->o->budget; i++)
        if (e->running[i]->in_step == 0 && is_decoding(e->running[i]) && !join(e, i, 1, true, &got))
            return false;
    return true;
}

/* A chunk of running[i]. Prompts wait for blocks, but for the oldest's, so that all go on. */
static bool join_chunk(engine *e, int64_t i)
{
    bool got;
    int64_t left = e->running[i]->known - e->running[i]->done, room = e->o->budget - e->used;
    return join(e, i, left < room ? left : room, i == 0, &got);
}

static bool join_prefills(engine *e)
{
    for (int64_t i = 0; i < e->num_running && e->used < e->o->budget; i++)
        if (e->running[i]->in_step == 0 && !is_decoding(e->running[i]) && !join_chunk(e, i))
            return false;
    return true;
}

/* ---- Admission */

/* Blocks that the running sequences' prompts still lack. */
static int64_t claimed_blocks(const engine *e)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < e->num_running; i++) {
        const seat *s = e->running[i];
        sum += blocks_of(e, held_tokens(e->o, s->known)) -
               blocks_of(e, held_tokens(e->o, s->done + s->in_step));
    }
    return sum;
}

/* Blocks for something new: those available and, by --admit prompt, needed by no running prompt. */
static int64_t room_of(engine *e)
{
    folio_pool_stats s = pool_stats(e);
    return s.num_free + s.num_cached - (e->o->admit_chunk ? 0 : claimed_blocks(e));
}

/* Left free for answers to grow into. */
static int64_t watermark(const engine *e) { return e->o->num_blocks / 100; }

/* Take what the cache has of it; is there room for the rest of what it knows, or its first chunk? */
static bool find_room(engine *e, seat *s, bool *room)
{
    folio_tokens tokens = tokens_of(s, s->known - 1);
    REPLAY_TRY(folio_sequence_match(s->sequence, &tokens, &s->done, NULL));
    int64_t end = s->known;
    if (e->o->admit_chunk && s->done + e->o->budget < end) end = s->done + e->o->budget;
    int64_t missing =
        blocks_of(e, held_tokens(e->o, end)) - blocks_of(e, held_tokens(e->o, s->done));
    *room = e->num_running == 0 || room_of(e) - missing >= watermark(e);
    if (*room) {
        e->done_tokens += s->done;
        e->full_at = -1;
    } else {
        REPLAY_TRY(folio_sequence_truncate(s->sequence, 0));
        s->done = 0;
        e->full_at = room_of(e);
    }
    return true;
}

/* The one that was paused last comes back. */
static bool resume(engine *e, bool *room)
{
    seat *s = e->paused[0];
    *room = false;
    if (s->swapped) {
        int64_t missing = blocks_of(e, held_tokens(e->o, s->known));
        e->full_at = room_of(e);
        if (e->num_running > 0 && e->full_at - missing < watermark(e)) return true;
        REPLAY_TRY(folio_sequence_swap_in(s->sequence, NULL, NULL));
        *room = true;
        s->swapped = false;
        e->full_at = -1;
    } else if (!find_room(e, s, room)) {
        return false;
    }
    if (!*room) return true;
    remove_at(e->paused, &e->num_paused, 0);
    e->running[e->num_running++] = s;
    return true;
}

/* Has the next request come? Without --speed it does when a seat is free. */
static bool has_come(engine *e)
{
    if (e->next == e->trace->num_requests) return false;
    if (e->o->speed > 0) return e->trace->requests[e->next].arrival / e->o->speed <= e->clock;
    if (e->came < 0) e->came = e->clock;
    return true;
}

static bool admit(engine *e, bool *room)
{
    const replay_request *r = &e->trace->requests[e->next];
    seat *s = replay_alloc(1, sizeof *s);
    *s = (seat){.request = r, .known = r->prompt_len};
    folio_sequence_desc desc =
        FOLIO_WITH(folio_sequence_desc, .max_tokens = r->prompt_len + r->output_len);
    *room = false;
    make_hash_ids(e, s);
    bool ok =
        replay_ok(folio_sequence_create(e->pool, &desc, &s->sequence), "folio_sequence_create") &&
        find_room(e, s, room);
    if (!ok || !*room) {
        free_seat(s);
        return ok;
    }
    s->arrival = s->last = e->o->speed > 0 ? r->arrival / e->o->speed : e->came;
    e->came = -1;
    e->stats->admitted_tokens += r->prompt_len;
    e->stats->hit_tokens += s->done;
    e->running[e->num_running++] = s;
    e->next++;
    return true;
}

static bool join_new(engine *e)
{
    while (e->used < e->o->budget && e->num_running < e->o->max_seqs && !e->preempted) {
        bool room = false;
        if (e->num_paused == 0 && !has_come(e)) break;
        /* What found no room finds none until there are more blocks. */
        if (e->full_at >= 0 && e->num_running > 0 && room_of(e) <= e->full_at) break;
        if (!(e->num_paused > 0 ? resume(e, &room) : admit(e, &room))) return false;
        if (!room) break;
        int64_t last = e->num_running - 1;
        bool got;
        if (is_decoding(e->running[last]) ? !join(e, last, 1, false, &got) : !join_chunk(e, last))
            return false;
    }
    return true;
}

/* ---- Steps */

static bool schedule(engine *e)
{
    e->used = 0;
    e->preempted = false;
    if (e->o->prefill_first) return join_prefills(e) && join_new(e) && join_decodes(e);
    return join_decodes(e) && join_prefills(e) && join_new(e);
}

/* A token of the answer is there. */
static void emit(engine *e, seat *s)
{
    if (s->known == s->request->prompt_len)
        replay_times_add(&e->stats->ttft, e->clock - s->arrival);
    else replay_times_add(&e->stats->itl, e->clock - s->last);
    s->last = e->clock;
    s->known++;
}

static bool is_finished(const seat *s)
{
    return s->known == s->request->prompt_len + s->request->output_len;
}

/* K and V are stored. */
static bool commit(engine *e)
{
    for (int64_t i = 0; i < e->num_running; i++) {
        seat *s = e->running[i];
        if (s->in_step == 0) continue;
        folio_tokens tokens = tokens_of(s, s->done + s->in_step);
        REPLAY_TRY(folio_sequence_commit(s->sequence, &tokens));
        s->done += s->in_step;
        e->done_tokens += s->in_step;
        s->in_step = 0;
    }
    return true;
}

/* Answer, count what the pool holds, and let those go that have ended. */
static void settle(engine *e, replay_step *step)
{
    for (int64_t i = 0; i < e->num_running; i++) {
        seat *s = e->running[i];
        if (s->done == s->known) emit(e, s);
        step->sequences++;
        step->stored_tokens += s->done;
        step->empty_slots += blocks_of(e, s->done) * e->o->block_size - s->done;
    }
    folio_pool_stats pool = pool_stats(e);
    step->used_blocks = pool.num_used;
    step->cached_blocks = pool.num_cached;
    e->stats->peak_used = pool.peak_used;
    e->stats->evictions = pool.evictions;
    replay_stats_step(e->stats, step);
    for (int64_t i = e->num_running - 1; i >= 0; i--) {
        if (!is_finished(e->running[i])) continue;
        free_seat(e->running[i]);
        remove_at(e->running, &e->num_running, i);
        e->stats->requests++;
        e->done_tokens++; /* its last token, which nothing computes */
    }
}

static void list_items(engine *e, int64_t *num_items, replay_step *step)
{
    *num_items = 0;
    for (int64_t i = 0; i < e->num_running; i++) {
        const seat *s = e->running[i];
        if (s->in_step == 0) continue;
        e->items[(*num_items)++] = (replay_item){
            .sequence = s->sequence, .request = s->request, .first = s->done, .count = s->in_step};
        if (is_decoding(s)) step->decode_tokens++;
        else step->prefill_tokens += s->in_step;
    }
}

/* Nothing to compute now: on to the next arrival. *more: there is one. */
static bool idle(engine *e, bool *more)
{
    *more = e->next < e->trace->num_requests;
    if (e->num_running > 0 || e->num_paused > 0) {
        term_progress_end();
        fprintf(stderr, "folio replay: no sequence can go on: the pool is too small\n");
        return false;
    }
    if (*more && e->o->speed > 0) e->clock = e->trace->requests[e->next].arrival / e->o->speed;
    return true;
}

static bool run_step(engine *e, bool *more)
{
    replay_stats *stats = e->stats;
    replay_step step = {0};
    int64_t num_items;
    double started = term_seconds(), others = stats->numbers_seconds + stats->verify_seconds;
    double attention = stats->attention_seconds;
    if (!schedule(e)) return false;
    list_items(e, &num_items, &step);
    if (num_items == 0) return idle(e, more);
    if (!e->o->no_attention && !replay_model_step(&e->model, e->items, num_items)) return false;
    if (!commit(e)) return false;
    others = stats->numbers_seconds + stats->verify_seconds - others;
    double real = term_seconds() - started - others;
    stats->engine_seconds += real - (stats->attention_seconds - attention);
    step.seconds =
        e->o->no_attention ? REPLAY_STEP_SECONDS + REPLAY_TOKEN_SECONDS * (double)e->used : real;
    step.prefill_share = (double)step.prefill_tokens / (double)e->used;
    e->clock += step.seconds;
    *more = true;
    settle(e, &step);
    return true;
}

static replay_view view_of(engine *e)
{
    const replay_trace *t = e->trace;
    while (e->arrived < t->num_requests &&
           (e->o->speed == 0 || t->requests[e->arrived].arrival / e->o->speed <= e->clock))
        e->arrived++;
    return (replay_view){.pool = e->pool,
                         .stats = e->stats,
                         .clock = e->clock,
                         .running = e->num_running,
                         .paused = e->num_paused,
                         .waiting = e->arrived - e->next,
                         .done_tokens = e->done_tokens,
                         .total_tokens = t->prompt_tokens + t->output_tokens};
}

/* ---- Opening and closing */

static bool open_pool(engine *e)
{
    folio_context_desc context = FOLIO_WITH(folio_context_desc, .backend = "cpu", .num_threads = 1);
    if (e->o->no_attention) {
        REPLAY_TRY(folio_context_create(&context, &e->ctx));
        if (!replay_note_place(&e->stats->place, e->ctx)) return false;
    } else if (!replay_model_open(&e->model, e->o, e->trace, e->stats)) {
        return false;
    }
    folio_layer_group group = {.window = e->o->window, .cache = e->model.l.cache};
    folio_pool_desc desc = FOLIO_WITH(
        folio_pool_desc, .num_blocks = e->o->num_blocks, .block_size = e->o->block_size,
        .num_layer_groups = 1, .layer_groups = &group,
        .host_blocks = e->o->swap ? e->o->host_blocks : 0, .hash_key = kit_mix(e->o->seed) | 1);
    REPLAY_TRY(folio_pool_create(e->ctx ? e->ctx : e->model.l.ctx, &desc, &e->pool));
    return true;
}

static bool close_engine(engine *e)
{
    for (int64_t i = 0; i < e->num_running; i++) free_seat(e->running[i]);
    for (int64_t i = 0; i < e->num_paused; i++) free_seat(e->paused[i]);
    free(e->running);
    free(e->paused);
    free(e->items);
    folio_pool_destroy(e->pool);
    bool ok = replay_model_close(&e->model);
    folio_context_destroy(e->ctx);
    return ok;
}

bool replay_run(const replay_options *o, const replay_trace *t, replay_stats *stats,
                replay_watch watch, void *user)
{
    engine e = {.o = o, .trace = t, .stats = stats, .came = -1, .full_at = -1};
    e.running = replay_alloc(o->max_seqs, sizeof *e.running);
    e.paused = replay_alloc(o->max_seqs, sizeof *e.paused);
    e.items = replay_alloc(o->max_seqs, sizeof *e.items);
    stats->total_requests = t->num_requests;
    stats->num_blocks = o->num_blocks;
    stats->block_size = o->block_size;
    stats->longest = t->longest;
    bool more = true, ok = open_pool(&e);
    double started = term_seconds();
    while (ok && more) {
        ok = run_step(&e, &more);
        stats->seconds = term_seconds() - started;
        stats->clock = e.clock;
        replay_view view = view_of(&e);
        if (ok && watch && !watch(user, &view)) break;
    }
    if (ok) ok = replay_ok(folio_pool_check(e.pool), "folio_pool_check");
    return close_engine(&e) && ok;
}
