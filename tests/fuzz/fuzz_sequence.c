/*
 * fuzz_sequence.c: calls on a pool and its sequences with any arguments, and with an allocator that fails once. A call
 * that is refused has changed no count; the pool checks itself after every call.
 */
#include "fuzz/fuzz.h"

#include <folio/folio_pool.h>
#include <stdlib.h>

const char fuzz_name[] = "sequence";
enum { MAX_SEQS = 6, MAX_TOKENS = 64, MAX_HAND = 8, WIDTH = 8 };

typedef struct world {
    folio_context *ctx;
    folio_kv_cache *cache;
    folio_pool *pool;
    folio_batch *batch;
    folio_sequence *seq[MAX_SEQS];
    int num;
    int32_t hand[MAX_HAND];
    int num_hand;
    bool may_fail; /* of memory: once */
} world;

static world w;

static folio_pool_stats stats(void)
{
    folio_pool_stats s = FOLIO_INIT(folio_pool_stats);
    FUZZ_CHECK(folio_pool_get_stats(w.pool, &s) == FOLIO_OK, "no stats");
    return s;
}

static folio_sequence_info info(int i)
{
    folio_sequence_info s = FOLIO_INIT(folio_sequence_info);
    FUZZ_CHECK(folio_sequence_get_info(w.seq[i], &s) == FOLIO_OK, "no info");
    return s;
}

static bool open_pool(fuzz_input *in)
{
    static const int32_t sizes[] = {4, 1, 2, 16};
    int32_t block_size = FUZZ_PICK(in, sizes);
    folio_kv_cache_desc d = FOLIO_WITH(folio_kv_cache_desc, .num_blocks = fuzz_int(in, 2, 24),
                                       .num_layers = 1, .block_size = block_size, .num_kv_heads = 1,
                                       .k_head_size = WIDTH, .dtype = FOLIO_F32);
    if (!fuzz_took(folio_kv_cache_create(w.ctx, &d, &w.cache))) return false;
    kit_poison_cache(w.cache);
    folio_layer_group groups[2] = {{.cache = w.cache},
                                   {.window = fuzz_any(in, 1, 20), .cache = w.cache}};
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = fuzz_any(in, 0, d.num_blocks),
                   .block_size = (int32_t)fuzz_any(in, 0, 0),
                   .num_layer_groups = (int32_t)fuzz_int(in, 1, 2), .layer_groups = groups,
                   .watermark = fuzz_any(in, 0, 3), .flags = (uint32_t)fuzz_any(in, 1, 1),
                   .host_blocks = fuzz_chance(in, 2) ? fuzz_any(in, 1, 12) : 0,
                   .wipe = (folio_wipe)fuzz_any(in, 0, 3));
    if (fuzz_chance(in, 4)) desc.cross_cache = w.cache;
    if (!fuzz_took(folio_pool_create(w.ctx, &desc, &w.pool))) return false;
    folio_batch_desc b = FOLIO_INIT(folio_batch_desc);
    return fuzz_took(folio_batch_create(w.ctx, &b, &w.batch));
}

/* Ids of one of two documents; the array has room for n and no more. */
static folio_tokens draw_tokens(fuzz_input *in, int64_t n)
{
    int32_t *ids = fuzz_zeros(in, n, sizeof *ids), document = (int32_t)fuzz_int(in, 0, 1);
    for (int64_t i = 0; i < n; i++) ids[i] = document * 100 + (int32_t)i;
    folio_tokens t = FOLIO_WITH(folio_tokens, .num_tokens = fuzz_any(in, n, n), .ids = ids);
    if (t.num_tokens > n) t.num_tokens = n - 1;
    return t;
}

static folio_status match(fuzz_input *in, int i)
{
    int64_t matched = 0;
    folio_tokens t = draw_tokens(in, fuzz_int(in, 0, MAX_TOKENS));
    return folio_sequence_match(w.seq[i], &t, &matched, NULL);
}

static folio_status reserve(fuzz_input *in, int i)
{
    int64_t n = fuzz_any(in, 1, 9);
    int64_t *slots = n >= 0 && n <= MAX_TOKENS ? fuzz_poison(in, 2 * n, sizeof *slots) : NULL;
    uint32_t flags = (uint32_t)fuzz_any(in, 0, 1);
    return fuzz_chance(in, 8) ? folio_sequence_reserve_encoder(w.seq[i], n, flags, NULL)
                              : folio_sequence_reserve(w.seq[i], n, flags, slots);
}

static folio_status commit(fuzz_input *in, int i)
{
    int64_t len = info(i).len;
    folio_tokens t = draw_tokens(in, len);
    if (w.pool != NULL && fuzz_chance(in, 8)) return folio_sequence_commit(w.seq[i], NULL);
    return folio_sequence_commit(w.seq[i], &t);
}

static folio_status fork(fuzz_input *in, int i)
{
    (void)in;
    if (w.num == MAX_SEQS) return FOLIO_OK;
    folio_status status = folio_sequence_fork(w.seq[i], &w.seq[w.num]);
    w.num += status == FOLIO_OK;
    return status;
}

static folio_status truncate(fuzz_input *in, int i)
{
    return folio_sequence_truncate(w.seq[i], fuzz_any(in, 0, info(i).len));
}

static folio_status hold(fuzz_input *in, int i)
{
    (void)i;
    int32_t block = 0;
    if (w.num_hand > 0 && fuzz_chance(in, 2)) {
        int32_t mine = w.hand[w.num_hand - 1];
        block = (int32_t)fuzz_any(in, mine, mine);
        if (block != mine)
            return fuzz_chance(in, 2) ? folio_pool_retain(w.pool, -1, &block) : FOLIO_OK;
        w.num_hand--;
        return folio_pool_release(w.pool, 1, &block);
    }
    if (w.num_hand == MAX_HAND) return FOLIO_OK;
    folio_status status = folio_pool_alloc(w.pool, 1, &block);
    if (status == FOLIO_OK) w.hand[w.num_hand++] = block;
    return status;
}

static folio_status move(fuzz_input *in, int i)
{
    folio_tokens t = draw_tokens(in, info(i).len);
    int64_t computed = 0, gone = 0;
    switch (fuzz_int(in, 0, 4)) {
    case 0: return folio_sequence_swap_out(w.seq[i], (folio_tier)fuzz_any(in, 1, 1), NULL, NULL);
    case 1: return folio_sequence_swap_in(w.seq[i], NULL, NULL);
    case 2:
        return folio_sequence_preempt(w.seq[i], (folio_preemption)fuzz_any(in, 0, 1), NULL, NULL);
    case 3: return folio_sequence_resume(w.seq[i], &t, &computed, NULL, NULL);
    default:
        return folio_pool_swap_out(w.pool, (folio_tier)fuzz_any(in, 1, 1), fuzz_any(in, 0, 5), NULL,
                                   &gone, NULL);
    }
}

static folio_status add_to_batch(fuzz_input *in, int i)
{
    (void)i;
    folio_batch_view v = FOLIO_INIT(folio_batch_view);
    folio_batch_clear(w.batch);
    folio_sequence *seqs[MAX_SEQS];
    for (int s = 0; s < w.num; s++) seqs[s] = w.seq[s];
    int64_t n = fuzz_any(in, 1, 1);
    folio_status status = folio_batch_add_sequences(w.batch, (int32_t)fuzz_any(in, 0, 0), seqs,
                                                    n > w.num ? -1 : n, NULL);
    if (status == FOLIO_OK)
        fuzz_took(folio_batch_get_view(w.batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
    for (int64_t r = 0; r < v.num_query_tokens; r++)
        FUZZ_CHECK(v.slot_mapping[r] >= 0 && v.slot_mapping[r] < stats().num_blocks * 16,
                   "slot %lld", (long long)v.slot_mapping[r]);
    return status;
}

static folio_status ask(fuzz_input *in, int i)
{
    enum { ROOM = 32 };
    uint8_t states[ROOM];
    int64_t n = 0;
    folio_block_pair pairs[4];
    const int32_t *blocks = NULL;
    switch (fuzz_int(in, 0, 4)) {
    case 0:
        n = fuzz_any(in, 0, 3);
        return folio_pool_get_block_states(w.pool, (folio_tier)fuzz_any(in, 0, 0),
                                           fuzz_any(in, 0, 2), n > ROOM ? -1 : n, states);
    case 1: {
        folio_status status =
            folio_sequence_get_table(w.seq[i], (int32_t)fuzz_any(in, 0, 0), &blocks, &n);
        for (int64_t b = 0; status == FOLIO_OK && b < n; b++)
            FUZZ_CHECK(blocks[b] >= -1 && blocks[b] < stats().num_blocks, "block %d", blocks[b]);
        return status;
    }
    case 2: return folio_pool_run_copies(w.pool, NULL);
    case 3:
        return folio_pool_take_copies(w.pool, (int32_t)fuzz_any(in, 0, 0),
                                      fuzz_any(in, 4, 4) > 4 ? 0 : 4, pairs, &n);
    default:
        return fuzz_chance(in, 4) ? folio_pool_forget(w.pool)
                                  : folio_sequence_release_window(w.seq[i]);
    }
}

static folio_status create(fuzz_input *in)
{
    folio_sequence_desc d = FOLIO_WITH(folio_sequence_desc, .salt = (uint64_t)fuzz_int(in, 0, 1),
                                       .max_tokens = fuzz_any(in, 0, 40));
    if (d.max_tokens > 1 << 20) d.max_tokens = -1; /* memory is the caller's to spend */
    folio_status status = folio_sequence_create(w.pool, &d, &w.seq[w.num]);
    FUZZ_CHECK(status == FOLIO_OK || w.seq[w.num] == NULL,
               "a sequence that was refused is handed out");
    w.num += status == FOLIO_OK;
    return status;
}

static void call(fuzz_input *in)
{
    static folio_status (*const calls[])(fuzz_input *, int) = {
        reserve,  commit, reserve, commit, match, fork,
        truncate, hold,   move,    move,   ask,   add_to_batch};
    if (fuzz_chance(in, 12)) fuzz_memory.fail_at = fuzz_memory.calls + fuzz_int(in, 1, 6);
    int64_t what = fuzz_int(in, 0, FUZZ_COUNT(calls) + 1);
    int i = w.num > 0 ? (int)fuzz_int(in, 0, w.num - 1) : 0;
    folio_pool_stats before = stats();
    folio_status status = FOLIO_OK;
    if (w.num == 0 || (what == FUZZ_COUNT(calls) && w.num < MAX_SEQS)) status = create(in);
    else if (what < FUZZ_COUNT(calls)) status = calls[what](in, i);
    else if (fuzz_chance(in, 2)) {
        folio_sequence_destroy(w.seq[i]);
        w.seq[i] = w.seq[--w.num];
    }
    folio_pool_stats after = stats();
    bool moves =
        what < FUZZ_COUNT(calls) && calls[what] == move; /* releases blocks behind windows first */
    if (!fuzz_took(status) && status != FOLIO_ERR_MEMORY)
        FUZZ_CHECK(
            (before.num_used == after.num_used || (moves && after.num_used < before.num_used)) &&
                before.num_sequences == after.num_sequences && before.host_used == after.host_used,
            "call %d is refused, and %lld used blocks became %lld", (int)what,
            (long long)before.num_used, (long long)after.num_used);
    FUZZ_CHECK(after.num_free + after.num_used + after.num_cached == after.num_blocks,
               "blocks do not add up");
}

void fuzz_run(fuzz_input *in)
{
    w = (world){.ctx = fuzz_context(1)};
    if (fuzz_chance(in, 6)) fuzz_memory.fail_at = fuzz_memory.calls + fuzz_int(in, 1, 30);
    if (open_pool(in))
        for (int64_t n = 40; n > 0 && in->left > 0; n--) call(in);
    fuzz_memory.fail_at = 0;
    if (w.pool != NULL) FUZZ_CHECK(folio_pool_check(w.pool) == FOLIO_OK, "the pool is damaged");
    while (w.num > 0) folio_sequence_destroy(w.seq[--w.num]);
    while (w.num_hand > 0) folio_pool_release(w.pool, 1, &w.hand[--w.num_hand]);
    if (w.pool != NULL)
        FUZZ_CHECK(stats().num_used == 0, "%lld blocks are held by nobody",
                   (long long)stats().num_used);
    folio_pool_destroy(w.pool);
    folio_batch_destroy(w.batch);
    folio_kv_cache_destroy(w.cache);
}
