/* transfer.c: the mover thread, the moves it runs, and transfer handles. */
#include "cache/transfer.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------ moves */

/* Consecutive copies of one kind and table go in one call. */
enum { CHUNK = 256 };

static folio_status copy_frames(folio_pool *pool, const folio_kv_cache *from, folio_kv_cache *to,
                                const folio_block_pair *pairs, int64_t n)
{
    folio_run run = pool_run(pool);
    pool->mover.queued = true; /* also where it fails half way */
    return folio_kv_cache_copy_blocks(from, to, pairs, n, &run);
}

folio_status folioi_mover_wait(folio_pool *pool)
{
    folio_run run = pool_run(pool);
    if (!pool->mover.queued) return FOLIO_OK;
    TRY(folio_run_wait(pool->ctx, &run));
    pool->mover.queued = false;
    return FOLIO_OK;
}

static folio_status run_copies(folio_pool *pool, const folioi_move *move, int64_t n)
{
    folio_block_pair pairs[CHUNK];
    folio_kv_cache *device = pool->cache[move->table], *host = pool->frames.cache[move->table];
    bool out = move->kind == MOVE_OUT;
    for (int64_t i = 0; i < n; i++) {
        pairs[i].from = out ? move[i].device : move[i].host;
        pairs[i].to = out ? move[i].host : move[i].device;
    }
    return copy_frames(pool, out ? device : host, out ? host : device, pairs, n);
}

/* Told at once: a later frame may replace it before the transfer has ended. */
static void frame_stored(folio_pool *pool, const folioi_move *move)
{
    pool_lock(pool);
    pool->blocks_out++;
    if (move->id.kind == FOLIOI_FRAME_CACHED)
        folioi_pool_emit(pool, FOLIO_EVENT_STORED, FOLIO_TIER_DISK, &move->id, -1);
    pthread_mutex_unlock(&pool->lock);
}

static folio_status load_frame(folio_pool *pool, folioi_move *move)
{
    folioi_frames *f = &pool->frames;
    folio_block_pair up[1] = {{f->staging, move->device}};
    TRY(folioi_mover_wait(pool));
    pool->mover.staged = true;
    TRY(folioi_store_get(pool->store, &move->id, frames_at(f, f->staging),
                         f->geometry[move->table].payload_bytes, &move->ok));
    if (!move->ok) return FOLIO_OK;
    return copy_frames(pool, f->cache[move->table], pool->cache[move->table], up, 1);
}

static folio_status store_frame(folio_pool *pool, folioi_move *move)
{
    folioi_frames *f = &pool->frames;
    int64_t frame = move->kind == MOVE_STORE ? f->staging : move->host;
    /* only this thread puts: what is there now is still there when it does */
    bool there = folioi_store_has(pool->store, &move->id);
    folio_block_pair down[1] = {{move->device, frame}};
    if (move->kind == MOVE_STORE) pool->mover.staged = true;
    if (move->kind == MOVE_STORE)
        TRY(copy_frames(pool, pool->cache[move->table], f->cache[move->table], down, 1));
    TRY(folioi_mover_wait(pool));
    folioi_frames_clear_rest(f, move->table, frame, pool->block_size - move->unused);
    move->tried = true;
    folio_status status = folioi_store_put(pool->store, &move->id, frames_at(f, frame),
                                           f->geometry[move->table].payload_bytes);
    move->ok = status == FOLIO_OK;
    if (move->ok && !there) frame_stored(pool, move);
    /* of a cached block, what is not written is only a miss later */
    return move->kind == MOVE_SPILL ? FOLIO_OK : status;
}

static folio_status run_moves(folio_transfer *t)
{
    for (int64_t i = 0; i < t->num_moves;) {
        folioi_move *move = &t->moves[i];
        int64_t n = 1;
        if (move->kind == MOVE_OUT || move->kind == MOVE_IN) {
            while (n < CHUNK && i + n < t->num_moves && move[n].kind == move->kind &&
                   move[n].table == move->table)
                n++;
            TRY(run_copies(t->pool, move, n));
        } else if (move->kind == MOVE_LOAD) {
            TRY(load_frame(t->pool, move));
        } else if (move->kind != MOVE_KEEP) {
            TRY(store_frame(t->pool, move));
        }
        i += n;
    }
    return FOLIO_OK;
}

/* ------------------------------------------------------------------------------------------ mover */

/* Drop one owner. */
static void drop(folio_transfer *t)
{
    folio_allocator a = t->pool->allocator;
    if (--t->owners == 0) folioi_free(&a, t, t->bytes);
}

static void *mover_main(void *arg)
{
    folio_pool *pool = arg;
    folioi_mover *m = &pool->mover;
    pool_lock(pool);
    for (;;) {
        while (m->first == NULL && !m->quit) pthread_cond_wait(&m->wake, &pool->lock);
        folio_transfer *t = m->first;
        if (t == NULL) break; /* what was queued is finished before the end */
        pthread_mutex_unlock(&pool->lock);
        folio_status status = run_moves(t);
        if (pool_wipes_freed(pool)) (void)folioi_pool_wipe_staging(pool);
        pool_lock(pool);
        t->status = status;
        if (status != FOLIO_OK) snprintf(t->text, sizeof t->text, "%s", folio_last_error());
        m->first = t->next;
        if (m->first == NULL) m->last = NULL;
        if (t->sequence != NULL) t->sequence->transfer = NULL;
        t->finish(t);
        if (pool_fills_freed(pool)) {
            (void)folioi_pool_unlock(pool, FOLIO_OK);
            pool_lock(pool);
        }
        t->done = true;
        drop(t);
        pthread_cond_broadcast(&m->ended);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void folioi_mover_init(folioi_mover *m)
{
    pthread_cond_init(&m->wake, NULL);
    pthread_cond_init(&m->ended, NULL);
}

folio_status folioi_mover_start(folio_pool *pool)
{
    /* It takes no signals: the program's handlers run on the program's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&pool->mover.thread, NULL, mover_main, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        FAIL(FOLIO_ERR_MEMORY, "pool: the thread that moves blocks could not be started");
    pool->mover.started = true;
    return FOLIO_OK;
}

void folioi_mover_stop(folio_pool *pool)
{
    folioi_mover *m = &pool->mover;
    if (m->started) {
        pool_lock(pool);
        m->quit = true;
        pthread_cond_signal(&m->wake);
        pthread_mutex_unlock(&pool->lock);
        int cancel = cancel_defer();
        pthread_join(m->thread, NULL);
        cancel_allow(cancel);
    }
    pthread_cond_destroy(&m->wake);
    pthread_cond_destroy(&m->ended);
}

/* ---------------------------------------------------------------------------------------- handles */

folio_status folioi_transfer_new(folio_pool *pool, int64_t num_blocks, folio_transfer **out)
{
    int64_t max_moves = 2 * num_blocks;
    folioi_arena arena = {NULL, 0};
    arena_take(&arena, sizeof(folio_transfer));
    arena_take(&arena, max_moves * (int64_t)sizeof(folioi_move));
    if (pool->store != NULL) arena_take(&arena, max_moves * pool->index.ids_bytes);
    void *memory;
    TRY(folioi_alloc(&pool->allocator, arena.used, "a transfer", &memory));
    int64_t bytes = arena.used;
    arena = (folioi_arena){memory, 0};
    folio_transfer *t = arena_take(&arena, sizeof(folio_transfer));
    *t = (folio_transfer){.pool = pool, .owners = 2, .max_moves = max_moves, .bytes = bytes};
    t->moves = arena_take(&arena, max_moves * (int64_t)sizeof(folioi_move));
    if (pool->store != NULL) t->ids = arena_take(&arena, max_moves * pool->index.ids_bytes);
    *out = t;
    return FOLIO_OK;
}

folioi_move *folioi_transfer_add(folio_transfer *t, folioi_move move)
{
    folioi_move *s = &t->moves[t->num_moves];
    *s = move;
    if (move.id.ids != NULL) {
        char *ids = t->ids + t->num_moves * t->pool->index.ids_bytes;
        memcpy(ids, move.id.ids, (size_t)move.id.ids_bytes);
        s->id.ids = ids;
    }
    t->num_moves++;
    return s;
}

void folioi_transfer_begin(folio_transfer *t, folio_sequence *sequence,
                           void (*finish)(folio_transfer *t))
{
    folioi_mover *m = &t->pool->mover;
    t->sequence = sequence;
    t->finish = finish;
    if (sequence != NULL) sequence->transfer = t;
    if (m->last != NULL) m->last->next = t;
    else m->first = t;
    m->last = t;
    pthread_cond_signal(&m->wake);
}

/* Under the lock. */
static folio_status wait_for(folio_transfer *t)
{
    while (!t->done) pool_await(t->pool);
    if (t->status != FOLIO_OK) FAIL(t->status, "%s", t->text);
    return FOLIO_OK;
}

folio_status folioi_transfer_hand_out(folio_transfer *t, folio_transfer **out)
{
    if (out != NULL) *out = t;
    if (t != NULL && out != NULL) refs_retain(&t->pool->refs); /* by the handle */
    if (t == NULL || out != NULL) return FOLIO_OK;
    folio_status status = wait_for(t);
    drop(t);
    return status;
}

int folio_transfer_is_done(const folio_transfer *transfer)
{
    if (transfer == NULL) return 1;
    pool_lock(transfer->pool);
    int done = transfer->done;
    pthread_mutex_unlock(&transfer->pool->lock);
    return done;
}

folio_status folio_transfer_wait(folio_transfer *transfer)
{
    if (transfer == NULL) return FOLIO_OK;
    pool_lock(transfer->pool);
    folio_status status = wait_for(transfer);
    pthread_mutex_unlock(&transfer->pool->lock);
    return status;
}

void folio_transfer_destroy(folio_transfer *transfer)
{
    if (transfer == NULL) return;
    folio_pool *pool = transfer->pool;
    pool_lock(pool);
    drop(transfer);
    pthread_mutex_unlock(&pool->lock);
    folio_pool_destroy(pool);
}
