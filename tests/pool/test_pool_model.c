/*
 * test_pool_model.c: random calls on a pool, each judged by the naive model of pool_model.h: what
 * it must return, which blocks it may take, what each sequence reads through its tables afterwards.
 * Small pools and few different tokens, so that FULL, eviction, copies and equal prefixes come all
 * the time. FOLIO_MODEL_SEED=<seed> runs that seed only. At the end four threads on one pool.
 */
#include "pool/pool_model.h"

#include <pthread.h>
#include <stdlib.h>

/* ----------------------------------------------------------------------------------- operations */

static model_seq *any_sequence(model *m)
{
    int64_t first = model_draw(m, MODEL_SEQS);
    for (int64_t i = 0; i < MODEL_SEQS; i++) {
        model_seq *s = &m->seqs[(first + i) % MODEL_SEQS];
        if (s->seq != NULL) return s;
    }
    return NULL;
}

static model_seq *empty_place(model *m)
{
    for (int i = 0; i < MODEL_SEQS; i++)
        if (m->seqs[i].seq == NULL) return &m->seqs[i];
    return NULL;
}

static void op_create(model *m)
{
    model_seq *s = empty_place(m);
    if (s == NULL) return;
    *s = (model_seq){.salt = (uint64_t)model_draw(m, m->config.num_salts),
                     .doc = (int)model_draw(m, MODEL_DOCS)};
    folio_sequence_desc desc =
        FOLIO_WITH(folio_sequence_desc, .salt = s->salt,
                   .max_tokens = model_draw(m, 2) * model_draw(m, MODEL_LEN));
    EXPECT_STATUS(folio_sequence_create(m->pool, &desc, &s->seq), FOLIO_OK);
}

/* The longest prefix every group has, by its definition: blocks, and in found where they are. */
static int64_t longest_match(const model *m, const uint64_t *chain, int64_t num_tokens,
                             int32_t (*found)[MODEL_LEN])
{
    int64_t bs = m->config.block_size, top = num_tokens / bs;
    for (int g = 0; g < m->config.num_layer_groups; g++)
        for (int64_t i = 0; i < top; i++)
            found[g][i] = model_find_block(m, g, chain[i * bs + bs - 1]);
    for (int64_t len = top; len > 0; len--) {
        bool all = true;
        for (int g = 0; g < m->config.num_layer_groups; g++)
            for (int64_t i = pool_first_seen(len * bs, m->config.window[g]) / bs; i < len; i++)
                all = all && found[g][i] >= 0;
        if (all) return len;
    }
    return 0;
}

static void op_match(model *m)
{
    model_seq *s = any_sequence(m);
    for (int i = 0; i < MODEL_SEQS && (s == NULL || s->len != 0); i++)
        s = m->seqs[i].seq != NULL ? &m->seqs[i] : s;
    if (s == NULL || s->len != 0) return;
    int64_t bs = m->config.block_size, n = model_draw(m, m->config.max_len + 1), matched = -1;
    uint64_t chain[MODEL_LEN], ids[MODEL_LEN];
    int32_t found[MODEL_GROUPS][MODEL_LEN];
    const int32_t *doc = m->docs[s->doc];
    for (int64_t p = 0; p < n; p++)
        chain[p] = model_chain(p > 0 ? chain[p - 1] : model_start(s->salt), doc[p], m->epoch);
    int64_t longest = longest_match(m, chain, n, found) * bs;
    for (int64_t i = 0; i < n / bs; i++) ids[i] = model_hash_id_of(m, doc + i * bs);
    folio_tokens tokens = pool_tokens(m->config.hash_ids ? NULL : doc, n);
    if (m->config.hash_ids) tokens.hash_ids = ids;
    EXPECT_STATUS(folio_sequence_match(s->seq, &tokens, &matched, NULL), FOLIO_OK);
    if (m->config.hash_bits == 0) EXPECT_SAME("matched", matched, longest);
    EXPECT(matched >= 0 && matched <= longest && matched % bs == 0, "matched %lld tokens of %lld",
           (long long)matched, (long long)longest);
    m->lookups += n;
    m->hits += matched;
    m->num_matched += matched > 0;
    s->len = s->committed = s->written = matched;
    memcpy(s->tokens, doc, (size_t)matched * sizeof *doc);
    memcpy(s->chain, chain, (size_t)matched * sizeof *chain);
    for (int g = 0; g < m->config.num_layer_groups; g++) {
        int64_t first = pool_first_seen(matched, m->config.window[g]) / bs;
        s->gone[g] = first * bs;
        for (int64_t i = 0; i < matched / bs; i++)
            s->table[g][i] = i < first ? FOLIO_NO_BLOCK : found[g][i];
    }
    EXPECT_SAME("matched_len", pool_info(s->seq).matched_len, matched);
}

/* The number of the first block of a group that the next token to compute sees. */
static int64_t first_kept(const model *m, const model_seq *s, int g)
{
    return pool_first_seen(s->committed, m->config.window[g]) / m->config.block_size;
}

/* m->floor: the references that are left when the sequence has let its windows go. */
static void lower_floor(model *m, const model_seq *s)
{
    model_recount(m);
    int32_t tables[MODEL_BLOCKS];
    memcpy(tables, m->by_table, sizeof tables);
    for (int g = 0; g < m->config.num_layer_groups; g++)
        for (int64_t i = 0; i < first_kept(m, s, g); i++)
            if (s->table[g][i] >= 0) {
                m->floor[s->table[g][i]]--;
                tables[s->table[g][i]]--;
            }
    for (int64_t i = 0; i < m->num_pairs; i++)
        if (tables[m->pairs[i].to] == 0) m->floor[m->pairs[i].from]--;
}

static void let_windows_go(model *m, model_seq *s)
{
    int64_t bs = m->config.block_size;
    for (int g = 0; g < m->config.num_layer_groups; g++) {
        int64_t first = first_kept(m, s, g);
        for (int64_t i = 0; i < first; i++) {
            m->num_windowed += s->table[g][i] >= 0;
            s->table[g][i] = FOLIO_NO_BLOCK;
        }
        if (s->gone[g] < first * bs) s->gone[g] = first * bs;
    }
    model_recount(m);
}

/* Must a token that is written into the block get one of its own? */
static bool must_copy(const model *m, int32_t block)
{
    return m->by_table[block] + m->by_hand[block] > 1 || m->indexed[block] != 0;
}

/* The blocks that n more tokens take. */
static int64_t need_of(const model *m, const model_seq *s, int64_t n)
{
    int64_t bs = m->config.block_size;
    int64_t more = model_blocks_for(m, s->len + n) - model_blocks_for(m, s->len);
    int64_t need = more * m->config.num_layer_groups;
    for (int g = 0; g < m->config.num_layer_groups && s->len % bs != 0; g++)
        need += must_copy(m, s->table[g][s->len / bs]);
    return need;
}

/* A block that the call under way took: it was available. */
static void take_fresh(model *m, int32_t b, int64_t *taken)
{
    EXPECT(b >= 0 && b < m->config.num_blocks, "block %d was handed out", b);
    EXPECT(m->refs[b] == 0 && m->indexed[b] == 0, "block %d was not available", b);
    m->refs[b] = 1;
    m->allocations++;
    ++*taken;
}

/* The last block before a reserve, which was not full; it is `now` afterwards. */
static void take_last(model *m, int g, int32_t was, int32_t now, int64_t *taken)
{
    bool copy = must_copy(m, was);
    EXPECT(copy || now == was, "block %d was replaced for nothing", was);
    EXPECT(!copy || now != was, "block %d will be written, but is not the sequence's own", was);
    if (!copy) return;
    take_fresh(m, now, taken);
    model_pair pair = {g, model_source_of(m, was), now};
    m->pairs[m->num_pairs++] = pair;
    m->num_copies++;
}

/* Learns the blocks a reserve of n tokens took, and that it took no others. */
static void learn_reserved(model *m, model_seq *s, int64_t n, const int64_t *slots)
{
    int64_t bs = m->config.block_size, old = model_blocks_for(m, s->len), taken = 0;
    int64_t free_before = model_count_free(m, m->refs) - m->removed_now;
    for (int g = 0; g < m->config.num_layer_groups && !m->failed; g++) {
        const int32_t *table = NULL;
        int64_t count = -1;
        EXPECT_STATUS(folio_sequence_get_table(s->seq, g, &table, &count), FOLIO_OK);
        EXPECT_SAME("blocks after reserve", count, model_blocks_for(m, s->len + n));
        for (int64_t i = s->len / bs; i < count && !m->failed; i++) {
            if (i < old) take_last(m, g, s->table[g][i], table[i], &taken);
            else take_fresh(m, table[i], &taken);
            s->table[g][i] = table[i];
        }
        for (int64_t j = 0; j < n; j++)
            EXPECT_SAME("a slot", slots[g * n + j],
                        table[(s->len + j) / bs] * bs + (s->len + j) % bs);
    }
    EXPECT_SAME("blocks evicted", m->removed_now, taken > free_before ? taken - free_before : 0);
    m->evictions += m->removed_now;
}

/* Blocks it would need if nobody else held any. */
static int64_t alone_of(const model *m, const model_seq *s, int64_t n)
{
    int64_t bs = m->config.block_size, old = model_blocks_for(m, s->len), sum = 0;
    for (int g = 0; g < m->config.num_layer_groups; g++) {
        int64_t first = pool_first_seen(s->committed, m->config.window[g]) / bs;
        if (first < s->gone[g] / bs) first = s->gone[g] / bs;
        sum += model_blocks_for(m, s->len + n) - (first < old ? first : old);
    }
    return sum;
}

static void op_reserve(model *m)
{
    model_seq *s = any_sequence(m);
    int64_t bs = m->config.block_size, kind = model_draw(m, 8);
    int64_t n = kind < 4 ? 1 : 1 + model_draw(m, kind < 7 ? bs + 1 : 4 * bs);
    if (s == NULL || s->len + n > m->config.max_len) return;
    uint32_t flags = model_draw(m, 5) == 0 ? FOLIO_RESERVE_ADMIT : 0;
    int64_t slots[MODEL_GROUPS * MODEL_LEN], keep = flags ? m->config.watermark : 0;
    lower_floor(m, s);
    int64_t available = model_count_available(m, m->floor);
    int64_t need = need_of(m, s, n);
    m->removed_now = 0;
    folio_status status = folio_sequence_reserve(s->seq, n, flags, slots);
    if (status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE) {
        EXPECT(need > 0 && available - need < keep, "full, with %lld of %lld blocks wanted",
               (long long)need, (long long)available);
        bool never = alone_of(m, s, n) > m->config.num_blocks - keep;
        EXPECT_STATUS(status, never ? FOLIO_ERR_TOO_LARGE : FOLIO_ERR_FULL);
        EXPECT_SAME("blocks evicted by a reserve that was refused", m->removed_now, 0);
        m->num_full++;
        return;
    }
    EXPECT_STATUS(status, FOLIO_OK);
    EXPECT(need == 0 || available - need >= keep, "%lld blocks taken of %lld, to be kept: %lld",
           (long long)need, (long long)available, (long long)keep);
    let_windows_go(m, s);
    learn_reserved(m, s, n, slots);
    for (int64_t j = 0; j < n; j++, s->len++)
        s->tokens[s->len] = model_draw(m, 16) ? m->docs[s->doc][s->len]
                                              : (int32_t)model_draw(m, m->config.vocabulary);
}

/* Takes and runs up to `capacity` copies of a group: those the model waits for. */
static void take_copies(model *m, int g, int64_t capacity)
{
    int64_t n = -1, waiting = 0;
    folio_block_pair pairs[MODEL_BLOCKS];
    for (int64_t i = 0; i < m->num_pairs; i++) waiting += m->pairs[i].group == g;
    EXPECT_STATUS(folio_pool_take_copies(m->pool, g, capacity, pairs, &n), FOLIO_OK);
    EXPECT_SAME("copies taken", n, capacity < waiting ? capacity : waiting);
    EXPECT(pool_pairs_fit(pairs, n), "copies that cannot run at once");
    for (int64_t k = 0; k < n; k++) {
        int64_t i = 0;
        while (i < m->num_pairs && (m->pairs[i].group != g || m->pairs[i].from != pairs[k].from ||
                                    m->pairs[i].to != pairs[k].to))
            i++;
        EXPECT(i < m->num_pairs, "nobody waits for a copy of %lld to %lld",
               (long long)pairs[k].from, (long long)pairs[k].to);
        for (int j = 0; j < m->config.block_size; j++)
            model_shadow_of(m, m->pairs[i].to)[j] = model_shadow_of(m, m->pairs[i].from)[j];
        m->pairs[i] = m->pairs[--m->num_pairs];
    }
    model_recount(m);
}

static void take_all_copies(model *m)
{
    for (int g = 0; g < m->config.num_layer_groups && !m->failed; g++)
        take_copies(m, g, MODEL_BLOCKS);
}

static void op_take_copies(model *m)
{
    take_copies(m, (int)model_draw(m, m->config.num_layer_groups), 1 + model_draw(m, 3));
}

/* What an engine's step does: copies, then K and V of all new tokens. */
static void forward(model *m, model_seq *s)
{
    take_all_copies(m);
    for (int64_t p = s->written; p < s->len && !m->failed; p++) {
        s->chain[p] = model_chain(model_chain_before(s, p), s->tokens[p], m->epoch);
        for (int g = 0; g < m->config.num_layer_groups; g++) {
            int64_t bs = m->config.block_size;
            int32_t b = s->table[g][p / bs];
            if (b == FOLIO_NO_BLOCK) continue; /* by a second reserve before the commit */
            EXPECT(m->by_table[b] == 1 && m->by_hand[b] == 0 && m->indexed[b] == 0,
                   "block %d will be written, but others can see it", b);
            model_shadow_of(m, b)[p % bs] = model_key(s->chain[p], g);
        }
    }
    s->written = s->len;
}

/* A committed block is the sequence's own as before, or one that was indexed under its tokens. */
static void learn_committed(model *m, model_seq *s, int64_t k)
{
    int64_t bs = m->config.block_size;
    bool strict = s->taint == MODEL_CLEAN && m->config.hash_bits == 0;
    for (int g = 0; g < m->config.num_layer_groups; g++) {
        const int32_t *table = NULL;
        int64_t count = -1;
        EXPECT_STATUS(folio_sequence_get_table(s->seq, g, &table, &count), FOLIO_OK);
        EXPECT_SAME("blocks after commit", count, model_blocks_for(m, s->len));
        for (int64_t i = 0; i < k / bs; i++) {
            int32_t was = s->table[g][i], same = model_find_block(m, g, s->chain[i * bs + bs - 1]);
            if (was == FOLIO_NO_BLOCK || (table[i] == was && same == was)) continue;
            bool whole = s->gone[g] <= i * bs;
            if (strict && whole)
                EXPECT(same >= 0 && table[i] == same, "group %d block %lld is %d, the cache has %d",
                       g, (long long)i, table[i], same);
            EXPECT(table[i] == was || (s->taint != MODEL_TAINTED && table[i] == same),
                   "group %d block %lld became %d", g, (long long)i, table[i]);
            m->num_same += table[i] != was;
            s->table[g][i] = table[i];
        }
    }
}

static void commit(model *m, model_seq *s, int64_t k, bool ids_given)
{
    uint64_t ids[MODEL_LEN];
    int64_t bs = m->config.block_size;
    for (int64_t i = 0; i < k / bs; i++) ids[i] = model_hash_id_of(m, s->tokens + i * bs);
    folio_tokens tokens = pool_tokens(m->config.hash_ids ? NULL : s->tokens, k);
    if (m->config.hash_ids) tokens.hash_ids = ids;
    if (!ids_given && s->taint == MODEL_CLEAN) s->taint = MODEL_LOOSE;
    m->committing = ids_given ? s : NULL;
    m->commit_len = k;
    m->removed_now = 0;
    folio_status status = folio_sequence_commit(s->seq, ids_given ? &tokens : NULL);
    m->committing = NULL;
    EXPECT_STATUS(status, FOLIO_OK);
    EXPECT_SAME("blocks evicted by a commit", m->removed_now, 0);
    s->committed = k;
    if (ids_given) learn_committed(m, s, k);
}

static void truncate_to(model *m, model_seq *s, int64_t len)
{
    bool allowed = true; /* the next token to compute sees no key that is gone */
    int64_t next = len < s->committed ? len : s->committed;
    for (int g = 0; g < m->config.num_layer_groups; g++)
        if (next > 0 && s->gone[g] > pool_first_seen(next, m->config.window[g])) allowed = false;
    folio_status status = folio_sequence_truncate(s->seq, len);
    EXPECT_STATUS(status, allowed ? FOLIO_OK : FOLIO_ERR_ARGUMENT);
    m->num_refused += !allowed;
    if (!allowed) return;
    s->len = len;
    if (s->committed > len) s->committed = len;
    if (s->written > len) s->written = len;
    for (int g = 0; g < m->config.num_layer_groups; g++)
        if (s->gone[g] > len) s->gone[g] = len;
    if (len == 0) s->taint = MODEL_CLEAN;
}

static void op_commit(model *m)
{
    model_seq *s = any_sequence(m);
    if (s == NULL) return;
    forward(m, s);
    int64_t k = s->len, kind = model_draw(m, 32);
    if (kind < 8) k = s->committed + model_draw(m, s->len - s->committed + 1);
    if (!m->failed) commit(m, s, k, kind != 31);
    if (!m->failed && kind < 6) truncate_to(m, s, k); /* rejected drafts */
}

static void op_truncate(model *m)
{
    model_seq *s = any_sequence(m);
    if (s == NULL) return;
    int64_t from = model_draw(m, 2) ? s->committed : 0;
    truncate_to(m, s, from + model_draw(m, s->len - from + 1));
}

static void op_fork(model *m)
{
    model_seq *s = any_sequence(m), *t = empty_place(m);
    if (s == NULL || t == NULL) return;
    folio_sequence *out = NOWHERE;
    folio_status status = folio_sequence_fork(s->seq, &out);
    if (s->committed < s->len) {
        EXPECT_STATUS(status, FOLIO_ERR_ARGUMENT);
        EXPECT(out == NULL, "a refused fork handed something out");
        return;
    }
    EXPECT_STATUS(status, FOLIO_OK);
    *t = *s;
    t->seq = out;
    if (model_draw(m, 2)) t->doc = (int)model_draw(m, MODEL_DOCS);
}

static void op_destroy(model *m)
{
    model_seq *s = any_sequence(m);
    if (s == NULL) return;
    folio_sequence_destroy(s->seq);
    s->seq = NULL;
}

static void op_preempt(model *m)
{
    model_seq *s = any_sequence(m);
    if (s == NULL) return;
    EXPECT_STATUS(folio_sequence_preempt(s->seq, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL), FOLIO_OK);
    s->len = s->committed = s->written = 0;
    memset(s->gone, 0, sizeof s->gone);
    s->taint = MODEL_CLEAN;
}

static void op_release_window(model *m)
{
    model_seq *s = any_sequence(m);
    if (s == NULL) return;
    EXPECT_STATUS(folio_sequence_release_window(s->seq), FOLIO_OK);
    let_windows_go(m, s);
}

static void op_alloc(model *m)
{
    int32_t blocks[8];
    int64_t n = model_draw(m, 8), taken = 0;
    if (m->num_held + n > MODEL_HELD / 2) return;
    int64_t available = model_count_available(m, m->refs),
            free_before = model_count_free(m, m->refs);
    m->removed_now = 0;
    folio_status status = folio_pool_alloc(m->pool, n, blocks);
    EXPECT_STATUS(status, n > m->config.num_blocks ? FOLIO_ERR_TOO_LARGE
                          : n > available          ? FOLIO_ERR_FULL
                                                   : FOLIO_OK);
    m->num_full += n > available;
    EXPECT_SAME("blocks evicted", m->removed_now,
                n > available || n < free_before ? 0 : n - free_before);
    for (int64_t i = 0; status == FOLIO_OK && i < n && !m->failed; i++) {
        take_fresh(m, blocks[i], &taken);
        for (int j = 0; j < m->config.block_size; j++)
            model_shadow_of(m, blocks[i])[j] =
                support_bits(m->seed, (uint64_t)m->op * 4096u + (uint64_t)j);
        m->guard[blocks[i]] = model_guard_of(m, blocks[i]);
        m->held[m->num_held++] = blocks[i];
    }
    m->evictions += m->removed_now;
}

/* One more reference to a block of a sequence, or to one held by hand. */
static void op_retain(model *m)
{
    model_seq *s = any_sequence(m);
    if (m->num_held == MODEL_HELD) return;
    int32_t b = FOLIO_NO_BLOCK;
    if (m->num_held > 0 && model_draw(m, 3) == 0) b = m->held[model_draw(m, m->num_held)];
    else if (s != NULL && s->len > 0 && s->written == s->len)
        b = s->table[model_draw(m, m->config.num_layer_groups)]
                    [model_draw(m, model_blocks_for(m, s->len))];
    if (b == FOLIO_NO_BLOCK || model_source_of(m, b) != b) return;
    EXPECT_STATUS(folio_pool_retain(m->pool, 1, &b), FOLIO_OK);
    if (m->by_hand[b] == 0) m->guard[b] = model_guard_of(m, b);
    m->held[m->num_held++] = b;
}

static void op_release(model *m)
{
    int32_t blocks[MODEL_HELD];
    int64_t n = 0, most = model_draw(m, 8);
    while (n < most && m->num_held > 0) {
        int64_t i = model_draw(m, m->num_held);
        blocks[n++] = m->held[i];
        m->held[i] = m->held[--m->num_held];
    }
    m->releasing = true; /* a block whose predecessors are gone is of no use to the cache */
    folio_status status = folio_pool_release(m->pool, n, blocks);
    m->releasing = false;
    EXPECT_STATUS(status, FOLIO_OK);
}

static void op_forget(model *m)
{
    m->forgetting = true;
    folio_status status = folio_pool_forget(m->pool);
    m->forgetting = false;
    EXPECT_STATUS(status, FOLIO_OK);
    EXPECT_SAME("blocks left in the prefix cache", m->num_indexed, 0);
    m->epoch++;
    for (int i = 0; i < MODEL_SEQS; i++)
        m->seqs[i].taint = m->seqs[i].len > 0 ? MODEL_TAINTED : MODEL_LOOSE;
}

typedef struct {
    const char *name;
    void (*run)(model *m);
    int weight;
} model_op;

static const model_op ops[] = {
    {"create", op_create, 60},
    {"match", op_match, 60},
    {"reserve", op_reserve, 250},
    {"commit", op_commit, 250},
    {"truncate", op_truncate, 40},
    {"fork", op_fork, 80},
    {"destroy", op_destroy, 90},
    {"preempt", op_preempt, 20},
    {"release_window", op_release_window, 20},
    {"alloc", op_alloc, 25},
    {"retain", op_retain, 25},
    {"release", op_release, 30},
    {"take_copies", op_take_copies, 40},
    {"forget", op_forget, 1},
};

/* One random call, then all is compared. */
static void step(model *m)
{
    int total = 0;
    for (int i = 0; i < COUNT_OF(ops); i++) total += ops[i].weight;
    int64_t at = model_draw(m, total);
    int i = 0;
    while (at >= ops[i].weight) at -= ops[i++].weight;
    m->op_name = ops[i].name;
    ops[i].run(m);
    if (!m->failed) model_check(m);
    m->op++;
}

/* When all is let go, all blocks are free or cached; when that is forgotten, free. */
static void let_all_go(model *m)
{
    m->op_name = "close";
    for (int i = 0; i < MODEL_SEQS; i++) {
        folio_sequence_destroy(m->seqs[i].seq);
        m->seqs[i].seq = NULL;
    }
    while (m->num_held > 0 && !m->failed) op_release(m);
    model_check(m);
    if (!m->failed) op_forget(m);
    if (!m->failed) model_check(m);
    folio_pool_stats stats = pool_stats(m->pool);
    EXPECT_SAME("num_free at the end", stats.num_free, m->config.num_blocks);
    EXPECT_SAME("num_entries at the end", stats.num_entries, 0);
    EXPECT_STATUS(folio_pool_check(m->pool), FOLIO_OK);
}

/* ----------------------------------------------------------------------------------------- runs */

/* Over all seeds of a test, each of the interesting things happened. */
typedef struct {
    int64_t full, copies, same, matched, refused, windowed, evictions;
} totals;

static void run_seed(const model_config *config, uint64_t seed, int64_t num_ops, totals *t)
{
    model *m = malloc(sizeof *m);
    if (m == NULL) abort();
    if (model_open(m, config, seed)) {
        while (m->op < num_ops && !m->failed) step(m);
        if (!m->failed) let_all_go(m);
        t->full += m->num_full;
        t->copies += m->num_copies;
        t->same += m->num_same;
        t->matched += m->num_matched;
        t->refused += m->num_refused;
        t->windowed += m->num_windowed;
        t->evictions += m->evictions;
        model_close(m);
    }
    free(m);
}

/* Seeds first .. first + count - 1, or the one of the environment. */
static void run_seeds(uint64_t first, int count, int64_t num_ops, bool collide)
{
    totals t = {0};
    const char *only = getenv("FOLIO_MODEL_SEED");
    for (int i = 0; i < (only ? 1 : count) && test_failures() == 0; i++) {
        uint64_t seed = only ? strtoull(only, NULL, 10) : first + (uint64_t)i;
        model_config config = model_config_of(seed);
        if (collide) config.hash_bits = 1 + (int)(seed % 8);
        run_seed(&config, seed, num_ops, &t);
    }
    if (only != NULL || test_failures() > 0) return;
    CHECK(t.full > 0 && t.copies > 0 && t.same > 0 && t.matched > 0);
    CHECK(t.refused > 0 && t.windowed > 0 && t.evictions > 0);
}

TEST(pool_model, random_calls) { run_seeds(1, 48, 2000, false); }

TEST(pool_model, random_calls_with_colliding_hashes) { run_seeds(101, 16, 1500, true); }

LONG_TEST(pool_model, many_random_calls) { run_seeds(1001, 300, 8000, false); }

LONG_TEST(pool_model, many_random_calls_with_colliding_hashes) { run_seeds(2001, 80, 8000, true); }

/* -------------------------------------------------------------------------------------- threads */

enum { WORKERS = 4, WORKER_SEQS = 5 };

/* One thread: sequences of its own, on the pool and the shadow memory of all. */
typedef struct {
    model m;                 /* its seqs, docs, config and random numbers; it counts no blocks */
    pthread_mutex_t *copies; /* while copies run, nobody else takes some: they may be one's own */
    int64_t num_ops;
    char fault[200]; /* "": none */
} worker;

#define FAULT(w, ...) snprintf((w)->fault, sizeof(w)->fault, __VA_ARGS__)

static bool went_well(worker *w, const char *what, folio_status status)
{
    if (status != FOLIO_OK)
        FAULT(w, "%s: %s: %.120s", what, folio_status_name(status), folio_last_error());
    return status == FOLIO_OK;
}

/* Through its tables, a sequence reads what it wrote or matched, and nothing else. */
static void worker_reads(worker *w, const model_seq *s)
{
    int32_t bs = w->m.config.block_size;
    for (int g = 0; g < w->m.config.num_layer_groups; g++) {
        const int32_t *table = NULL;
        int64_t n = -1;
        if (!went_well(w, "table", folio_sequence_get_table(s->seq, g, &table, &n))) return;
        if (n != model_blocks_for(&w->m, s->len)) FAULT(w, "%lld blocks", (long long)n);
        for (int64_t p = s->gone[g]; p < s->written && w->fault[0] == 0; p++) {
            int32_t b = table[p / bs];
            if (b < 0 || model_shadow_of(&w->m, b)[p % bs] != model_key(s->chain[p], g))
                FAULT(w, "group %d token %lld in block %d is another's", g, (long long)p, b);
        }
    }
}

static void worker_copies(worker *w)
{
    pthread_mutex_lock(w->copies);
    for (int g = 0; g < w->m.config.num_layer_groups; g++) {
        int64_t n = 0;
        folio_block_pair pairs[MODEL_BLOCKS];
        if (!went_well(w, "take_copies",
                       folio_pool_take_copies(w->m.pool, g, MODEL_BLOCKS, pairs, &n)))
            break;
        if (!pool_pairs_fit(pairs, n)) FAULT(w, "copies that cannot run");
        for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < w->m.config.block_size; j++)
                model_shadow_of(&w->m, (int32_t)pairs[i].to)[j] =
                    model_shadow_of(&w->m, (int32_t)pairs[i].from)[j];
    }
    pthread_mutex_unlock(w->copies);
}

static void worker_match(worker *w, model_seq *s)
{
    model *m = &w->m;
    *s = (model_seq){.salt = (uint64_t)model_draw(m, m->config.num_salts),
                     .doc = (int)model_draw(m, MODEL_DOCS)};
    folio_sequence_desc desc = {.struct_size = sizeof desc, .salt = s->salt};
    if (!went_well(w, "create", folio_sequence_create(m->pool, &desc, &s->seq))) return;
    int64_t n = model_draw(m, m->config.max_len + 1), matched = -1;
    folio_tokens tokens = pool_tokens(m->docs[s->doc], n);
    if (!went_well(w, "match", folio_sequence_match(s->seq, &tokens, &matched, NULL))) return;
    if (matched < 0 || matched > n || matched % m->config.block_size != 0) {
        FAULT(w, "matched %lld of %lld", (long long)matched, (long long)n);
        return;
    }
    for (; s->len < matched; s->len++) {
        s->tokens[s->len] = m->docs[s->doc][s->len];
        s->chain[s->len] = model_chain(model_chain_before(s, s->len), s->tokens[s->len], 0);
    }
    s->committed = s->written = matched;
    for (int g = 0; g < m->config.num_layer_groups; g++)
        s->gone[g] = first_kept(m, s, g) * m->config.block_size;
}

static void worker_windows(worker *w, model_seq *s)
{
    for (int g = 0; g < w->m.config.num_layer_groups; g++) {
        int64_t gone = first_kept(&w->m, s, g) * w->m.config.block_size;
        if (gone > s->gone[g]) s->gone[g] = gone;
    }
}

static void worker_write(worker *w, model_seq *s)
{
    model *m = &w->m;
    int32_t bs = m->config.block_size;
    for (; s->written < s->len; s->written++) {
        int64_t p = s->written;
        s->chain[p] = model_chain(model_chain_before(s, p), s->tokens[p], 0);
        for (int g = 0; g < m->config.num_layer_groups; g++) {
            const int32_t *table = pool_table(s->seq, g, NULL);
            if (table[p / bs] == FOLIO_NO_BLOCK) FAULT(w, "a new token has no block");
            else model_shadow_of(m, table[p / bs])[p % bs] = model_key(s->chain[p], g);
        }
    }
}

/* A step: slots, copies, K and V, commit; sometimes the last tokens were drafts. */
static void worker_step(worker *w, model_seq *s)
{
    model *m = &w->m;
    int64_t n = 1 + model_draw(m, model_draw(m, 4) ? 2 : 2 * m->config.block_size);
    if (s->len + n > m->config.max_len) return;
    folio_status status = folio_sequence_reserve(s->seq, n, 0, NULL);
    if (status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE) {
        m->num_full++;
        folio_sequence_destroy(s->seq);
        s->seq = NULL;
        return;
    }
    if (!went_well(w, "reserve", status)) return;
    worker_windows(w, s);
    for (int64_t j = 0; j < n; j++, s->len++) s->tokens[s->len] = m->docs[s->doc][s->len];
    worker_copies(w);
    if (w->fault[0] == 0) worker_write(w, s);
    int64_t keep = model_draw(m, 4) ? s->len : s->committed + model_draw(m, n + 1);
    folio_tokens tokens = pool_tokens(s->tokens, keep);
    if (!went_well(w, "commit", folio_sequence_commit(s->seq, &tokens))) return;
    if (!went_well(w, "truncate", folio_sequence_truncate(s->seq, keep))) return;
    s->len = s->committed = s->written = keep;
}

static void worker_by_hand(worker *w)
{
    int32_t blocks[4];
    int64_t n = 1 + model_draw(&w->m, 4), bs = w->m.config.block_size;
    folio_status status = folio_pool_alloc(w->m.pool, n, blocks);
    if (status == FOLIO_ERR_FULL || status == FOLIO_ERR_TOO_LARGE) return;
    if (!went_well(w, "alloc", status)) return;
    uint64_t mark = support_bits(w->m.seed, w->m.draws);
    worker_copies(w); /* one may read a block that is ours since */
    for (int64_t i = 0; i < n * bs; i++) model_shadow_of(&w->m, blocks[i / bs])[i % bs] = mark;
    went_well(w, "retain", folio_pool_retain(w->m.pool, n, blocks));
    went_well(w, "release", folio_pool_release(w->m.pool, n, blocks));
    for (int64_t i = 0; i < n * bs; i++)
        if (model_shadow_of(&w->m, blocks[i / bs])[i % bs] != mark) FAULT(w, "block was written");
    went_well(w, "release", folio_pool_release(w->m.pool, n, blocks));
}

static void worker_fork(worker *w, model_seq *s, model_seq *t)
{
    if (t->seq != NULL || t == s) return;
    *t = *s;
    t->seq = NULL;
    went_well(w, "fork", folio_sequence_fork(s->seq, &t->seq));
}

static void *work(void *arg)
{
    worker *w = arg;
    model *m = &w->m;
    for (m->op = 0; m->op < w->num_ops && w->fault[0] == 0; m->op++) {
        model_seq *s = &m->seqs[model_draw(m, WORKER_SEQS)];
        int64_t kind = model_draw(m, 32);
        if (s->seq == NULL) worker_match(w, s);
        else if (kind == 0) went_well(w, "check", folio_pool_check(m->pool));
        else if (kind < 3) worker_by_hand(w);
        else if (kind < 6) worker_fork(w, s, &m->seqs[model_draw(m, WORKER_SEQS)]);
        else if (kind < 8) {
            folio_sequence_destroy(s->seq);
            s->seq = NULL;
        } else worker_step(w, s);
        for (int i = 0; i < WORKER_SEQS && w->fault[0] == 0; i++)
            if (m->seqs[i].seq != NULL) worker_reads(w, &m->seqs[i]);
    }
    for (int i = 0; i < WORKER_SEQS; i++) folio_sequence_destroy(m->seqs[i].seq);
    return NULL;
}

/* Callbacks come under the pool's lock: no atomics here, ThreadSanitizer would see it. */
static void count_event(void *user, const folio_cache_event *event)
{
    int64_t *entries = user;
    *entries += event->kind == FOLIO_EVENT_STORED ? 1 : -1;
}

static void run_threads(uint64_t seed, int64_t num_ops)
{
    model_config config = model_config_of(seed);
    config.hash_ids = false;
    config.flags = 0;
    int64_t entries = 0;
    model *all = malloc(sizeof *all);
    worker *workers = calloc(WORKERS, sizeof *workers);
    if (all == NULL || workers == NULL) abort();
    REQUIRE_TEST(model_open_with(all, &config, seed, count_event, &entries));
    pthread_mutex_t copies = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.m = *all, .copies = &copies, .num_ops = num_ops};
        workers[i].m.draws = (uint64_t)(i + 1) << 40;
        REQUIRE_TEST(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_MSG(workers[i].fault[0] == 0, "seed %llu, thread %d, operation %lld: %s",
                  (unsigned long long)seed, i, (long long)workers[i].m.op, workers[i].fault);
    }
    folio_pool_stats stats = pool_stats(all->pool);
    CHECK_INT(stats.num_used, 0);
    CHECK_INT(stats.num_sequences, 0);
    CHECK_INT(stats.num_copies, 0);
    CHECK_INT(stats.num_cached, entries);
    CHECK_INT(stats.num_free + stats.num_cached, config.num_blocks);
    CHECK(stats.hit_tokens > 0);
    CHECK_OK(folio_pool_check(all->pool));
    CHECK_OK(folio_pool_forget(all->pool));
    CHECK_INT(entries, 0);
    CHECK_INT(pool_stats(all->pool).num_free, config.num_blocks);
    model_close(all);
    free(workers);
    free(all);
}

TEST(pool_model, four_threads)
{
    for (uint64_t seed = 1; seed <= 4; seed++) run_threads(seed, 5000);
}

LONG_TEST(pool_model, four_threads_for_long)
{
    for (uint64_t seed = 11; seed <= 26; seed++) run_threads(seed, 20000);
}
