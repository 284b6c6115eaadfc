/*
 * fuzz_calls.c: see fuzz_calls.h. Every row of K and V stands for all it depends on (weights, salt, tokens up to it,
 * group, layer) and is compared whenever a sequence is looked at. Events are replayed and must name what each tier has.
 */
#include "pool/fuzz_calls.h"

#include "cache/pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------ one caller */

typedef enum journey { STILL, LEAVING, COMING, MATCHING } journey;

/* What a sequence must be like. */
typedef struct shadow {
    folio_sequence *seq;
    folio_transfer *transfer;
    journey journey;
    uint64_t salt, encoder_seed;
    bool hashed; /* its tokens are told by hash_ids */
    int doc;     /* whose tokens it follows, mostly */
    int64_t len, committed, encoder_len;
    int32_t ids[MAX_LEN];
    uint64_t chain[MAX_LEN]; /* of all tokens up to this one */
} shadow;

typedef struct fuzz {
    fuzz_world *w;
    const fuzz_source *source;
    uint64_t seed, draws;
    int64_t op, num_ops;
    const char *op_name;
    bool failed;
    shadow s[MAX_SEQS];
    int num;
    int32_t hand[MAX_HAND];
    int num_hand;
    folio_transfer *loose[MAX_LOOSE]; /* of cached blocks */
    int num_loose;
    bool unseen; /* a handle was dropped whose transfer may be under way */
    int64_t num_full, num_async, num_matched, num_shorter, num_forked;
    pthread_t thread;
} fuzz;

static int64_t draw(fuzz *f, int64_t n)
{
    if (f->source != NULL) return f->source->draw(f->source->user, n);
    return (int64_t)(support_bits(f->seed, f->draws++) % (uint64_t)n);
}

static bool alone(const fuzz *f) { return f->w->c.num_threads == 1; }

__attribute__((format(printf, 3, 4))) static void fuzz_fail(fuzz *f, int line, const char *format,
                                                            ...)
{
    char text[300];
    const fuzz_config *c = &f->w->c;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    f->failed = true;
    test_fail(__FILE__, line,
              "FOLIO_FUZZ_SEED=%llu, call %lld (%s), %lld blocks of %d, %d groups, host %lld, "
              "frames %lld: %s [%s]",
              (unsigned long long)f->w->seed, (long long)f->op, f->op_name,
              (long long)c->num_blocks, c->block_size, c->num_layer_groups,
              (long long)c->host_blocks, (long long)c->frames, text, folio_last_error());
}
#define FUZZ(cond, ...)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fuzz_fail(f, __LINE__, __VA_ARGS__);                                                   \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define FUZZ_OK(call)                                                                              \
    do {                                                                                           \
        folio_status got_ = (call);                                                                \
        FUZZ(got_ == FOLIO_OK, "%s: %s", #call, folio_status_name(got_));                          \
    } while (0)

/* No transfer of anybody is under way. */
static bool quiet(const fuzz *f)
{
    if (!alone(f) || f->num_loose > 0 || f->unseen) return false;
    for (int i = 0; i < f->num; i++)
        if (f->s[i].journey != STILL) return false;
    return true;
}

/* Transfers end in the order they began: after an empty sequence's, all before it have. */
static void drain(fuzz *f)
{
    const fuzz_config *c = &f->w->c;
    if (c->host_blocks == 0 && c->frames == 0) return;
    folio_sequence *empty = pool_sequence(f->w->pool, 0);
    FUZZ_OK(folio_sequence_swap_out(empty, c->host_blocks > 0 ? FOLIO_TIER_HOST : FOLIO_TIER_DISK,
                                    NULL, NULL));
    folio_sequence_destroy(empty);
    f->unseen = false;
}

/* ------------------------------------------------------------------------------------- contents */

static void rows_of(float (*rows)[WIDTH], const uint64_t *chain, int64_t n, int part, int group,
                    int layer)
{
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < WIDTH; d++)
            rows[i][d] =
                (float)(support_bits(chain[i],
                                     (uint64_t)(((group * 4 + layer) * 2 + part) * WIDTH + d)) &
                        0xFFFFF);
}

/* Slots of tokens first .. first + n - 1 by a group's table. */
static void slots_of(fuzz *f, const shadow *s, int group, int64_t first, int64_t n, int64_t *slots)
{
    const int32_t *table = NULL;
    int64_t num = 0;
    int32_t bs = f->w->c.block_size;
    FUZZ_OK(folio_sequence_get_table(s->seq, group == ENCODER ? FOLIO_LAYER_GROUP_CROSS : group,
                                     &table, &num));
    int64_t len = group == ENCODER ? s->encoder_len : s->len;
    FUZZ(num == (len + bs - 1) / bs, "a table of %lld blocks for %lld tokens", (long long)num,
         (long long)len);
    for (int64_t i = 0; i < n; i++) {
        int32_t block = table[(first + i) / bs];
        FUZZ(block >= 0 && block < f->w->c.num_blocks, "token %lld of %lld: block %d",
             (long long)(first + i), (long long)len, block);
        slots[i] = (int64_t)block * bs + (first + i) % bs;
    }
}

static void write_rows(fuzz *f, const shadow *s, int group, const uint64_t *chain, int64_t first,
                       int64_t n)
{
    static _Thread_local float k[MAX_LEN][WIDTH], v[MAX_LEN][WIDTH];
    int64_t slots[MAX_LEN];
    if (n == 0) return;
    slots_of(f, s, group, first, n, slots);
    for (int l = 0; l < f->w->c.layers[group] && !f->failed; l++) {
        rows_of(k, chain + first, n, 0, group, l);
        rows_of(v, chain + first, n, 1, group, l);
        folio_kv_write write =
            FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = n},
                       .v = {.data = v, .dtype = FOLIO_F32, .tokens = n}, .slots = slots);
        FUZZ_OK(folio_kv_cache_write(f->w->caches[group], l, &write, NULL));
    }
}

static void compare_rows(fuzz *f, const shadow *s, int group, const uint64_t *chain, int64_t first,
                         int64_t n)
{
    static _Thread_local float got[2][MAX_LEN][WIDTH], want[MAX_LEN][WIDTH];
    int64_t slots[MAX_LEN];
    if (n == 0) return;
    slots_of(f, s, group, first, n, slots);
    for (int l = 0; l < f->w->c.layers[group] && !f->failed; l++) {
        folio_kv_gather gather = FOLIO_WITH(
            folio_kv_gather, .k = {.data = got[0], .dtype = FOLIO_F32, .tokens = n},
            .v = {.data = got[1], .dtype = FOLIO_F32, .tokens = n}, .slots = slots, .num_slots = n);
        FUZZ_OK(folio_kv_cache_gather(f->w->caches[group], l, &gather, NULL));
        for (int part = 0; part < 2; part++) {
            rows_of(want, chain + first, n, part, group, l);
            for (int64_t i = 0; i < n; i++)
                FUZZ(memcmp(got[part][i], want[i], sizeof want[i]) == 0,
                     "wrong rows: group %d, layer %d, token %lld of %lld", group, l,
                     (long long)(first + i), (long long)s->len);
        }
    }
}

static void encoder_chain(const shadow *s, uint64_t *chain)
{
    for (int64_t i = 0; i < s->encoder_len; i++) chain[i] = support_bits(s->encoder_seed, i);
}

/* The tokens from `from` on get their chain, under the weights of today. */
static void rechain(fuzz *f, shadow *s, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++)
        s->chain[i] = support_bits(i > 0 ? s->chain[i - 1] : s->salt * 2 + s->hashed,
                                   f->w->weights * 64 + (uint64_t)s->ids[i]);
}

/* All that its next token may see is right. */
static void look(fuzz *f, const shadow *s)
{
    if (f->failed || s->journey != STILL) return;
    folio_sequence_info info = pool_info(s->seq);
    if (info.state == FOLIO_SEQUENCE_SWAPPED) return;
    FUZZ(info.state == FOLIO_SEQUENCE_RESIDENT, "state %d", info.state);
    FUZZ(info.len == s->len && info.committed_len == s->committed,
         "%lld tokens, %lld committed; expected %lld, %lld", (long long)info.len,
         (long long)info.committed_len, (long long)s->len, (long long)s->committed);
    FUZZ(info.encoder_len == s->encoder_len, "%lld encoder tokens, expected %lld",
         (long long)info.encoder_len, (long long)s->encoder_len);
    FUZZ_OK(folio_pool_run_copies(f->w->pool, NULL));
    for (int g = 0; g < f->w->c.num_layer_groups && !f->failed; g++) {
        int64_t first = pool_first_seen(s->committed, f->w->c.window[g]);
        compare_rows(f, s, g, s->chain, first, s->committed - first);
    }
    if (info.encoder_committed_len == 0 || f->failed) return;
    uint64_t chain[MAX_LEN];
    encoder_chain(s, chain);
    compare_rows(f, s, ENCODER, chain, 0, s->encoder_len);
}

/* ---------------------------------------------------------------------- refused, nothing changed */

typedef struct snapshot {
    folio_sequence_info info;
    folio_pool_stats stats;
    int32_t table[GROUPS][MAX_LEN];
} snapshot;

static void photograph(fuzz *f, const shadow *s, snapshot *p)
{
    memset(p, 0, sizeof *p);
    p->info = pool_info(s->seq);
    p->stats = pool_stats(f->w->pool);
    for (int g = 0; g < f->w->c.num_layer_groups && p->info.state == FOLIO_SEQUENCE_RESIDENT; g++) {
        int64_t num = 0;
        const int32_t *table = pool_table(s->seq, g, &num);
        if (num > 0) memcpy(p->table[g], table, (size_t)num * sizeof *table);
    }
}

/* Only where nothing else moves. */
static void unchanged(fuzz *f, const shadow *s, const snapshot *before, bool was_quiet)
{
    static _Thread_local snapshot now;
    if (!was_quiet) return;
    photograph(f, s, &now);
    FUZZ(memcmp(before, &now, sizeof now) == 0, "refused, and something has changed");
}

/* ---------------------------------------------------------------------------------- transfers end */

static void arrived(fuzz *f, shadow *s, journey from)
{
    folio_sequence_info info = pool_info(s->seq);
    FUZZ(info.state == FOLIO_SEQUENCE_RESIDENT, "state %d after it came", info.state);
    bool shorter = from == COMING && (info.len < s->len || info.encoder_len < s->encoder_len);
    FUZZ(!shorter || f->w->c.damage, "came back with %lld of %lld tokens", (long long)info.len,
         (long long)s->len);
    FUZZ(info.len <= MAX_LEN && (from != COMING || info.len <= s->len), "came longer");
    f->num_shorter += shorter;
    f->num_matched += from == MATCHING && info.len > 0;
    if (from == MATCHING) rechain(f, s, 0, info.len);
    s->len = s->committed = info.len;
    s->encoder_len = info.encoder_len;
    look(f, s);
}

static void settle(fuzz *f, shadow *s)
{
    journey from = s->journey;
    if (from == STILL) return;
    FUZZ_OK(folio_transfer_wait(s->transfer));
    folio_transfer_destroy(s->transfer);
    s->transfer = NULL;
    s->journey = STILL;
    if (from != LEAVING) arrived(f, s, from);
    else FUZZ(pool_info(s->seq).state == FOLIO_SEQUENCE_SWAPPED, "it has left and is here");
}

/* A call has begun a journey, in the background where it gave a handle. */
static void depart(fuzz *f, shadow *s, journey to, bool async)
{
    s->journey = to;
    f->num_async += async;
    if (async) return;
    s->journey = STILL;
    if (to != LEAVING) arrived(f, s, to);
}

static void let_go(fuzz *f, int i)
{
    shadow *s = &f->s[i];
    folio_transfer *t = s->transfer;
    if (draw(f, 2)) folio_transfer_destroy(t), t = NULL;
    folio_sequence_destroy(s->seq);
    folio_transfer_destroy(t);
    f->s[i] = f->s[--f->num];
}

/* ------------------------------------------------------------------------------------ operations */

static void op_create(fuzz *f, shadow *unused)
{
    (void)unused;
    if (f->num == MAX_SEQS) return;
    shadow *s = &f->s[f->num++];
    *s = (shadow){.salt = draw(f, 4) ? 0 : 1 + (uint64_t)draw(f, 2), .hashed = draw(f, 5) == 0};
    s->seq = pool_sequence(f->w->pool, s->salt);
}

static void op_destroy(fuzz *f, shadow *s)
{
    let_go(f, (int)(s - f->s));
    if (draw(f, 10) == 0)
        while (f->num > 0) let_go(f, 0);
}

/* A tier below that there is. */
static bool lower_tier(fuzz *f, folio_tier *tier)
{
    const fuzz_config *c = &f->w->c;
    *tier =
        c->frames > 0 && (c->host_blocks == 0 || draw(f, 2)) ? FOLIO_TIER_DISK : FOLIO_TIER_HOST;
    return c->frames > 0 || c->host_blocks > 0;
}

static bool no_room(folio_status status)
{
    return status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE;
}

/* Two frames of one key cannot both be in a store that is full of sequences otherwise. */
static bool went_down(const fuzz *f, folio_status status)
{
    return status == FOLIO_OK || (f->w->c.hash_bits > 0 && status == FOLIO_ERR_FULL);
}

static void op_lower(fuzz *f, shadow *unused)
{
    (void)unused;
    folio_tier tier;
    int64_t most = draw(f, 12), n = -1;
    folio_transfer *t = NULL;
    bool async = draw(f, 2) && f->num_loose < MAX_LOOSE;
    if (!lower_tier(f, &tier)) return;
    folio_status status = folio_pool_swap_out(f->w->pool, tier, most, NULL, &n, async ? &t : NULL);
    FUZZ(went_down(f, status), "swap_out: %s", folio_status_name(status));
    FUZZ(n >= 0 && n <= most, "%lld of %lld blocks go", (long long)n, (long long)most);
    if (t != NULL) f->loose[f->num_loose++] = t;
}

static void op_handles(fuzz *f, shadow *unused)
{
    (void)unused;
    while (f->num_loose > 0 && draw(f, 3)) {
        folio_transfer *t = f->loose[--f->num_loose];
        if (draw(f, 2)) FUZZ(went_down(f, folio_transfer_wait(t)), "it did not go down");
        else f->unseen = true;
        folio_transfer_destroy(t);
    }
}

static void op_hand(fuzz *f, shadow *s)
{
    folio_pool *pool = f->w->pool;
    if (draw(f, 2) == 0 || f->num_hand == MAX_HAND) {
        while (f->num_hand > 0 && draw(f, 3)) {
            int i = (int)draw(f, f->num_hand);
            FUZZ_OK(folio_pool_release(pool, 1, &f->hand[i]));
            f->hand[i] = f->hand[--f->num_hand];
        }
        return;
    }
    int32_t block = -1;
    if (s->journey == STILL && pool_info(s->seq).state == FOLIO_SEQUENCE_RESIDENT && s->len > 0 &&
        draw(f, 2)) {
        int64_t num = 0;
        const int32_t *table = pool_table(s->seq, (int32_t)draw(f, f->w->c.num_layer_groups), &num);
        block = table[draw(f, num)];
        if (block < 0) return; /* behind the window */
        FUZZ_OK(folio_pool_retain(pool, 1, &block));
    } else {
        folio_status status = folio_pool_alloc(pool, 1, &block);
        if (status == FOLIO_ERR_FULL) return;
        FUZZ(status == FOLIO_OK, "alloc: %s", folio_status_name(status));
    }
    f->hand[f->num_hand++] = block;
}

static void op_forget(fuzz *f, shadow *unused)
{
    (void)unused;
    if (!alone(f) || draw(f, 4)) return;
    for (int i = 0; i < f->num && !f->failed; i++) settle(f, &f->s[i]);
    f->w->weights++;
    FUZZ_OK(folio_pool_forget(f->w->pool));
}

/* Some bits of the file flip, none of its superblock. */
static void damage(fuzz *f)
{
    int fd = open(f->w->store, O_RDWR);
    int64_t size = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    for (int i = 0; i < 3 && size > 4096; i++) {
        unsigned char byte;
        off_t at = 4096 + draw(f, size - 4096);
        if (pread(fd, &byte, 1, at) != 1) break;
        byte = (unsigned char)(byte ^ 1u << draw(f, 8));
        if (pwrite(fd, &byte, 1, at) != 1) break;
    }
    if (fd >= 0) close(fd);
}

static void op_damage(fuzz *f, shadow *unused)
{
    (void)unused;
    if (f->w->c.damage && f->w->c.frames > 0) damage(f);
}

static void op_reopen(fuzz *f, shadow *unused)
{
    (void)unused;
    if (!alone(f) || f->w->c.frames == 0 || draw(f, 3)) return;
    while (f->num > 0) let_go(f, 0);
    while (f->num_loose > 0) folio_transfer_destroy(f->loose[--f->num_loose]);
    f->num_hand = 0;
    f->unseen = false;
    folio_pool_destroy(f->w->pool);
    op_damage(f, NULL);
    if (!fuzz_pool_open(f->w)) f->failed = true;
}

/* Prompts follow one of three documents and leave it now and then. */
static void invent(fuzz *f, shadow *s, int64_t from, int64_t to)
{
    if (from == 0) s->doc = (int)draw(f, 3);
    for (int64_t i = from; i < to; i++) {
        if (draw(f, 150) == 0) s->doc = (int)draw(f, 3);
        s->ids[i] = (int32_t)(support_bits((uint64_t)s->doc, (uint64_t)i) % 5);
    }
}

static folio_tokens tokens_of(fuzz *f, const shadow *s, int64_t n, uint64_t *hash_ids)
{
    folio_tokens t = pool_tokens(s->hashed ? NULL : s->ids, n);
    int32_t bs = f->w->c.block_size;
    if (!s->hashed) return t;
    for (int64_t b = 0; b < n / bs; b++) {
        hash_ids[b] = 1;
        for (int i = 0; i < bs; i++)
            hash_ids[b] = support_bits(hash_ids[b], (uint64_t)s->ids[b * bs + i]);
    }
    t.hash_ids = hash_ids;
    return t;
}

static void match(fuzz *f, shadow *s)
{
    int64_t all = f->w->c.num_blocks * f->w->c.block_size, matched = -1;
    int64_t n = 1 + draw(f, all < MAX_LEN ? all : MAX_LEN);
    uint64_t hash_ids[MAX_LEN];
    bool async = draw(f, 2);
    invent(f, s, 0, n);
    folio_tokens tokens = tokens_of(f, s, n, hash_ids);
    FUZZ_OK(folio_sequence_match(s->seq, &tokens, &matched, async ? &s->transfer : NULL));
    FUZZ(matched >= 0 && matched <= n && matched % f->w->c.block_size == 0, "matched %lld of %lld",
         (long long)matched, (long long)n);
    FUZZ(s->transfer == NULL || matched == 0, "%lld tokens before they came", (long long)matched);
    FUZZ(s->transfer != NULL || pool_info(s->seq).len == matched, "len is not what was matched");
    depart(f, s, MATCHING, s->transfer != NULL);
}

/* The engine's part of a step: copies, drafts taken back, K and V, a commit of all or less. */
static void compute(fuzz *f, shadow *s)
{
    folio_pool *pool = f->w->pool;
    bool by_hand = alone(f) && !pool_fills_freed(pool);
    if (draw(f, 2) || !by_hand) FUZZ_OK(folio_pool_run_copies(pool, NULL));
    for (int g = 0; g < f->w->c.num_layer_groups && by_hand; g++) { /* a few at a time */
        int64_t n = 0;
        folio_block_pair pairs[4];
        do {
            FUZZ_OK(folio_pool_take_copies(pool, g, 1 + draw(f, 3), pairs, &n));
            FUZZ_OK(folio_kv_cache_copy_blocks(f->w->caches[g], f->w->caches[g], pairs, n, NULL));
        } while (n > 0);
    }
    if (draw(f, 4) == 0) {
        s->len = s->committed + draw(f, s->len - s->committed + 1);
        FUZZ_OK(folio_sequence_truncate(s->seq, s->len));
    }
    rechain(f, s, s->committed, s->len);
    for (int g = 0; g < f->w->c.num_layer_groups && !f->failed; g++)
        write_rows(f, s, g, s->chain, s->committed, s->len - s->committed);
    if (s->encoder_len > 0 && pool_info(s->seq).encoder_committed_len == 0) {
        uint64_t chain[MAX_LEN];
        encoder_chain(s, chain);
        write_rows(f, s, ENCODER, chain, 0, s->encoder_len);
    }
    int64_t done = draw(f, 5) ? s->len : s->committed + draw(f, s->len - s->committed + 1);
    uint64_t hash_ids[MAX_LEN];
    folio_tokens tokens = tokens_of(f, s, done, hash_ids);
    bool untold = draw(f, 8) == 0;
    if (f->failed) return;
    FUZZ_OK(folio_sequence_commit(s->seq, untold ? NULL : &tokens));
    s->committed = untold ? s->len : done;
    look(f, s);
}

/* Where there is no room: somebody goes, or gives way. */
static void relieve(fuzz *f, shadow *s)
{
    f->num_full++;
    if (draw(f, 3) == 0) {
        let_go(f, (int)draw(f, f->num));
    } else if (draw(f, 3) == 0) {
        folio_tier any;
        bool swap = lower_tier(f, &any) && draw(f, 2), async = draw(f, 2);
        folio_status status =
            folio_sequence_preempt(s->seq, swap ? FOLIO_PREEMPT_SWAP : FOLIO_PREEMPT_RECOMPUTE,
                                   NULL, async ? &s->transfer : NULL);
        FUZZ(status == FOLIO_OK || (swap && no_room(status)), "preempt: %s",
             folio_status_name(status));
        s->len = s->committed = swap ? s->committed : 0;
        s->encoder_len = pool_info(s->seq).encoder_len; /* gone if it was not committed */
        FUZZ(swap || s->encoder_len == 0, "an encoder's tokens stay after preempt");
        if (swap && status == FOLIO_OK) depart(f, s, LEAVING, async);
    }
}

static void op_grow(fuzz *f, shadow *s)
{
    static _Thread_local snapshot before;
    if (s->len == 0 && draw(f, 3)) {
        match(f, s);
        return;
    }
    int32_t bs = f->w->c.block_size;
    int64_t n = 1 + draw(f, draw(f, 3) ? 3 : 2 * bs + 3), slots[GROUPS * MAX_LEN], want[MAX_LEN];
    if (s->len + n > MAX_LEN) {
        let_go(f, (int)(s - f->s));
        return;
    }
    bool still = quiet(f);
    photograph(f, s, &before);
    folio_status status =
        folio_sequence_reserve(s->seq, n, draw(f, 2) ? FOLIO_RESERVE_ADMIT : 0, slots);
    if (no_room(status)) {
        unchanged(f, s, &before, still);
        relieve(f, s);
        return;
    }
    FUZZ(status == FOLIO_OK, "reserve: %s", folio_status_name(status));
    invent(f, s, s->len, s->len + n);
    s->len += n;
    for (int g = 0; g < f->w->c.num_layer_groups && !f->failed; g++) {
        slots_of(f, s, g, s->len - n, n, want);
        FUZZ(memcmp(want, slots + g * n, (size_t)n * sizeof *want) == 0, "slots of group %d", g);
    }
    if (alone(f) && draw(f, 12) == 0) return; /* copies and tokens wait */
    compute(f, s);
}

static bool unfinished(const shadow *s)
{
    return s->committed < s->len ||
           (s->encoder_len > 0 && pool_info(s->seq).encoder_committed_len == 0);
}

static void op_compute(fuzz *f, shadow *s)
{
    if (unfinished(s)) compute(f, s);
}

static void op_fork(fuzz *f, shadow *s)
{
    if (f->num == MAX_SEQS) return;
    shadow *copy = &f->s[f->num];
    *copy = *s;
    folio_status status = folio_sequence_fork(s->seq, &copy->seq);
    FUZZ(status == (unfinished(s) ? FOLIO_ERR_ARGUMENT : FOLIO_OK), "fork: %s",
         folio_status_name(status));
    if (status != FOLIO_OK) return;
    f->num++;
    f->num_forked++;
    look(f, copy);
}

static void op_truncate(fuzz *f, shadow *s)
{
    static _Thread_local snapshot before;
    int64_t len = draw(f, 3) ? s->len - draw(f, s->len < 3 ? s->len + 1 : 4) : draw(f, s->len + 1);
    bool still = quiet(f), windows = false;
    photograph(f, s, &before);
    folio_status status = folio_sequence_truncate(s->seq, len);
    for (int g = 0; g < f->w->c.num_layer_groups; g++) windows = windows || f->w->c.window[g] > 0;
    bool may_refuse = windows && len > 0 && len < s->committed;
    FUZZ(status == FOLIO_OK || (status == FOLIO_ERR_ARGUMENT && may_refuse), "truncate: %s",
         folio_status_name(status));
    if (status != FOLIO_OK) {
        unchanged(f, s, &before, still);
        return;
    }
    s->len = len;
    s->committed = s->committed < len ? s->committed : len;
    look(f, s);
}

static void op_window(fuzz *f, shadow *s)
{
    FUZZ_OK(folio_sequence_release_window(s->seq));
    look(f, s);
}

static void op_encoder(fuzz *f, shadow *s)
{
    if (!f->w->c.encoder || s->encoder_len > 0) return;
    int64_t n = 1 + draw(f, 2 * f->w->c.block_size + 1);
    folio_status status = folio_sequence_reserve_encoder(s->seq, n, 0, NULL);
    FUZZ(status == FOLIO_OK || no_room(status), "reserve_encoder: %s", folio_status_name(status));
    if (status != FOLIO_OK) return;
    s->encoder_len = n;
    s->encoder_seed = support_bits(f->seed, f->draws++);
}

static void op_swap_out(fuzz *f, shadow *s)
{
    folio_tier tier;
    if (!lower_tier(f, &tier)) return;
    bool async = draw(f, 2), early = unfinished(s);
    folio_status status = folio_sequence_swap_out(s->seq, tier, NULL, async ? &s->transfer : NULL);
    FUZZ(early == (status == FOLIO_ERR_ARGUMENT) &&
             (early || status == FOLIO_OK || no_room(status)),
         "swap_out: %s", folio_status_name(status));
    if (status == FOLIO_OK) depart(f, s, LEAVING, async);
    else look(f, s);
}

/* It is below: back to the device, or from host memory on to disk. */
static void move_on(fuzz *f, shadow *s)
{
    static _Thread_local snapshot before;
    bool async = draw(f, 2), still = quiet(f);
    photograph(f, s, &before);
    if (before.info.tier == FOLIO_TIER_HOST && f->w->c.frames > 0 && draw(f, 3) == 0) {
        folio_status status =
            folio_sequence_swap_out(s->seq, FOLIO_TIER_DISK, NULL, async ? &s->transfer : NULL);
        FUZZ(status == FOLIO_OK || no_room(status), "swap_out from host: %s",
             folio_status_name(status));
        if (status == FOLIO_OK) depart(f, s, LEAVING, async);
        else unchanged(f, s, &before, still);
        return;
    }
    folio_transfer **handle = async ? &s->transfer : NULL;
    folio_status status = draw(f, 2) ? folio_sequence_swap_in(s->seq, NULL, handle)
                                     : folio_sequence_resume(s->seq, NULL, NULL, NULL, handle);
    FUZZ(status == FOLIO_OK || status == FOLIO_ERR_FULL, "swap_in: %s", folio_status_name(status));
    if (status == FOLIO_OK) {
        depart(f, s, COMING, async);
        return;
    }
    f->num_full++;
    unchanged(f, s, &before, still);
    if (draw(f, 2)) let_go(f, (int)draw(f, f->num));
}

static void op_recompute(fuzz *f, shadow *s)
{
    FUZZ_OK(folio_sequence_preempt(s->seq, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
    s->len = s->committed = s->encoder_len = 0;
    look(f, s);
}

static void op_check(fuzz *f, shadow *unused)
{
    (void)unused;
    FUZZ_OK(folio_pool_check(f->w->pool)); /* also in the middle of transfers */
    folio_pool_stats t = pool_stats(f->w->pool);
    FUZZ(t.num_free + t.num_used + t.num_cached == f->w->c.num_blocks, "blocks do not add up");
    uint8_t states[128];
    int64_t num_free = 0;
    FUZZ_OK(folio_pool_get_block_states(f->w->pool, FOLIO_TIER_DEVICE, 0, t.num_blocks, states));
    for (int64_t i = 0; i < t.num_blocks; i++) num_free += states[i] == FOLIO_BLOCK_FREE;
    FUZZ(!quiet(f) || num_free == t.num_free, "%lld blocks are free, %lld say so",
         (long long)t.num_free, (long long)num_free);
    FUZZ(f->w->c.damage || t.store_warnings + t.store_errors == 0, "%lld warnings, %lld errors",
         (long long)t.store_warnings, (long long)t.store_errors);
}

static void op_look(fuzz *f, shadow *unused)
{
    (void)unused;
    for (int i = 0; i < f->num; i++) look(f, &f->s[i]);
}

static const struct {
    int weight;
    bool resident; /* on a sequence that is on the device */
    const char *name;
    void (*run)(fuzz *f, shadow *s);
} ops[] = {
    {8, false, "create", op_create},    {5, false, "destroy", op_destroy},
    {7, false, "lower", op_lower},      {3, false, "handles", op_handles},
    {3, false, "hand", op_hand},        {1, false, "forget", op_forget},
    {1, false, "reopen", op_reopen},    {1, false, "damage", op_damage},
    {3, false, "check", op_check},      {2, false, "look", op_look},
    {32, true, "grow", op_grow},        {6, true, "compute", op_compute},
    {6, true, "fork", op_fork},         {8, true, "truncate", op_truncate},
    {3, true, "window", op_window},     {2, true, "encoder", op_encoder},
    {9, true, "swap_out", op_swap_out}, {2, true, "recompute", op_recompute},
};

/* ------------------------------------------------------------------------------------------ runs */

static void step(fuzz *f)
{
    int at = 0, total = 0;
    for (int i = 0; i < COUNT_OF(ops); i++) total += ops[i].weight;
    for (int64_t left = draw(f, total); left >= ops[at].weight; at++) left -= ops[at].weight;
    f->op++;
    f->op_name = f->num == 0 ? "create" : ops[at].name;
    if (f->num == 0) {
        op_create(f, NULL);
        return;
    }
    shadow *s = &f->s[draw(f, f->num)];
    if (s->journey != STILL && (folio_transfer_is_done(s->transfer) || draw(f, 3) == 0))
        settle(f, s);
    if (f->unseen && alone(f) && draw(f, 2)) drain(f);
    if (f->failed || (ops[at].resident && s->journey != STILL)) return;
    if (ops[at].resident && pool_info(s->seq).state == FOLIO_SEQUENCE_SWAPPED) move_on(f, s);
    else ops[at].run(f, s);
}

static void let_all_go(fuzz *f)
{
    f->op_name = "the end";
    for (int i = 0; i < f->num && !f->failed; i++) {
        settle(f, &f->s[i]);
        look(f, &f->s[i]);
    }
    while (f->num > 0) let_go(f, 0);
    while (f->num_loose > 0) {
        folio_transfer *t = f->loose[--f->num_loose];
        FUZZ(went_down(f, folio_transfer_wait(t)), "it did not go down");
        folio_transfer_destroy(t);
    }
    while (f->num_hand > 0) FUZZ_OK(folio_pool_release(f->w->pool, 1, &f->hand[--f->num_hand]));
}

static void *run_caller(void *arg)
{
    fuzz *f = arg;
    fuzz_is_caller = true;
    while (f->op < f->num_ops && !f->failed) step(f);
    if (!f->failed) let_all_go(f);
    return NULL;
}

/* Nothing is held: what the events left is what each tier has. */
static void check_end(fuzz *f)
{
    fuzz_world *w = f->w;
    drain(f);
    FUZZ_OK(folio_pool_check(w->pool));
    folio_pool_stats t = pool_stats(w->pool);
    FUZZ(t.num_used + t.host_used + t.num_sequences + t.num_copies == 0,
         "left: %lld blocks, %lld of the host, %lld sequences, %lld copies", (long long)t.num_used,
         (long long)t.host_used, (long long)t.num_sequences, (long long)t.num_copies);
    if (w->c.hash_bits > 0) return;
    FUZZ(w->event_faults == 0, "%lld events of what was known before", (long long)w->event_faults);
    FUZZ(w->num_known[0] == t.num_cached && w->num_known[1] == t.host_cached &&
             w->num_known[2] == t.store_used,
         "events leave %lld, %lld, %lld blocks; there are %lld, %lld, %lld",
         (long long)w->num_known[0], (long long)w->num_known[1], (long long)w->num_known[2],
         (long long)t.num_cached, (long long)t.host_cached, (long long)t.store_used);
}

void fuzz_calls_run(const fuzz_config *c, uint64_t seed, int64_t num_ops, const fuzz_source *source,
                    fuzz_totals *sum)
{
    static fuzz_world w;
    static fuzz f[MAX_THREADS];
    bool failed = !fuzz_world_open(&w, c, seed);
    if (failed) return;
    for (int i = 0; i < c->num_threads; i++) {
        f[i] = (fuzz){.w = &w,
                      .source = source,
                      .seed = seed * MAX_THREADS + (uint64_t)i,
                      .num_ops = num_ops};
        if (i > 0 && pthread_create(&f[i].thread, NULL, run_caller, &f[i]) != 0) abort();
    }
    run_caller(&f[0]);
    for (int i = 0; i < c->num_threads; i++) {
        if (i > 0) pthread_join(f[i].thread, NULL);
        failed = failed || f[i].failed;
        sum->full += f[i].num_full;
        sum->async += f[i].num_async;
        sum->matched += f[i].num_matched;
        sum->shorter += f[i].num_shorter;
        sum->forked += f[i].num_forked;
    }
    if (!failed) check_end(&f[0]);
    if (failed || f[0].failed) return; /* what is under way stays, and the pool with it */
    folio_pool_stats t = pool_stats(w.pool);
    sum->in += t.blocks_in;
    sum->out += t.blocks_out;
    sum->reads += t.store_reads;
    sum->evictions += t.evictions + t.host_evictions + t.store_evictions;
    fuzz_world_close(&w);
}
