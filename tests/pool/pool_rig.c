/* pool_model.c: short forms of the pool's calls, and a naive model of it; see pool_model.h. */
#include "pool/pool_model.h"

#include "cache/pool.h" /* folioi_pool_set_hash_bits */

#include <stdarg.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------------------ rig */

static void log_event(void *user, const folio_cache_event *event)
{
    pool_rig *rig = user;
    if (rig->num_events == rig->capacity) {
        rig->capacity = 2 * rig->capacity + 64;
        rig->events = realloc(rig->events, (size_t)rig->capacity * sizeof *rig->events);
        if (rig->events == NULL) abort();
    }
    pool_event *e = &rig->events[rig->num_events++];
    *e = (pool_event){.e = *event, .has_ids = event->token_ids != NULL};
    for (int i = 0; e->has_ids && i < event->num_tokens && i < POOL_EVENT_TOKENS; i++)
        e->tokens[i] = event->token_ids[i];
    e->e.token_ids = NULL;
}

bool pool_rig_open(pool_rig *rig, folio_pool_desc desc)
{
    return pool_rig_open_on(rig, support_context("reference", 1, NULL), desc);
}

bool pool_rig_open_on(pool_rig *rig, folio_context *ctx, folio_pool_desc desc)
{
    *rig = (pool_rig){.ctx = ctx};
    if (rig->ctx == NULL) return false;
    desc.struct_size = sizeof desc;
    if (desc.on_event == NULL) {
        desc.on_event = log_event;
        desc.event_user = rig;
    }
    CHECK_OK(folio_pool_create(rig->ctx, &desc, &rig->pool));
    if (rig->pool != NULL) return true;
    folio_context_destroy(rig->ctx);
    return false;
}

void pool_rig_close(pool_rig *rig)
{
    CHECK_OK(folio_pool_check(rig->pool));
    folio_pool_destroy(rig->pool);
    for (int i = 0; i < POOL_RIG_CACHES; i++) folio_kv_cache_destroy(rig->caches[i]);
    folio_context_destroy(rig->ctx);
    free(rig->events);
    *rig = (pool_rig){0};
}

folio_pool_stats pool_stats(folio_pool *pool)
{
    folio_pool_stats stats = {.struct_size = sizeof stats};
    CHECK_OK(folio_pool_get_stats(pool, &stats));
    return stats;
}

folio_sequence *pool_sequence(folio_pool *pool, uint64_t salt)
{
    folio_sequence_desc desc = {.struct_size = sizeof desc, .salt = salt};
    folio_sequence *sequence = NULL;
    CHECK_OK(folio_sequence_create(pool, &desc, &sequence));
    if (sequence == NULL) abort();
    return sequence;
}

folio_sequence_info pool_info(const folio_sequence *sequence)
{
    folio_sequence_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_sequence_get_info(sequence, &info));
    return info;
}

folio_tokens pool_tokens(const int32_t *ids, int64_t num_tokens)
{
    return FOLIO_WITH(folio_tokens, .num_tokens = num_tokens, .ids = ids);
}

const int32_t *pool_table(const folio_sequence *sequence, int32_t group, int64_t *num_blocks)
{
    const int32_t *blocks = NULL;
    int64_t n = 0;
    CHECK_OK(folio_sequence_get_table(sequence, group, &blocks, &n));
    if (num_blocks != NULL) *num_blocks = n;
    return blocks;
}

void pool_grow(folio_sequence *sequence, const int32_t *ids, int64_t num_tokens)
{
    int64_t more = num_tokens - pool_info(sequence).len;
    if (more > 0) CHECK_OK(folio_sequence_reserve(sequence, more, 0, NULL));
    folio_tokens tokens = pool_tokens(ids, num_tokens);
    CHECK_OK(folio_sequence_commit(sequence, &tokens));
}

int64_t pool_matches(folio_pool *pool, uint64_t salt, const int32_t *ids, int64_t num_tokens)
{
    folio_sequence *sequence = pool_sequence(pool, salt);
    folio_tokens tokens = pool_tokens(ids, num_tokens);
    int64_t matched = -1;
    CHECK_OK(folio_sequence_match(sequence, &tokens, &matched, NULL));
    folio_sequence_destroy(sequence);
    return matched;
}

folio_block_state pool_state_of(folio_pool *pool, int32_t block)
{
    uint8_t state = 0xFF;
    CHECK_OK(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, block, 1, &state));
    return (folio_block_state)state;
}

folio_sequence *pool_plain(folio_pool *pool, int64_t num_tokens)
{
    folio_sequence *sequence = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(sequence, num_tokens, 0, NULL));
    CHECK_OK(folio_sequence_commit(sequence, NULL));
    return sequence;
}

folio_sequence *pool_fork(folio_sequence *sequence)
{
    folio_sequence *out = NULL;
    CHECK_OK(folio_sequence_fork(sequence, &out));
    if (out == NULL) abort();
    return out;
}

const int32_t *pool_counting_ids(void)
{
    static int32_t ids[POOL_COUNTING_IDS];
    for (int i = 0; i < POOL_COUNTING_IDS; i++) ids[i] = i;
    return ids;
}

bool pool_pairs_fit(const folio_block_pair *pairs, int64_t num_pairs)
{
    for (int64_t i = 0; i < num_pairs; i++)
        for (int64_t j = 0; j < num_pairs; j++) {
            if (i != j && pairs[i].to == pairs[j].to) return false;
            if (pairs[i].from == pairs[j].to) return false;
        }
    return true;
}

int64_t pool_first_seen(int64_t token, int64_t window)
{
    return window == 0 || token < window ? 0 : token - window + 1;
}

/* -------------------------------------------------------------------------------- model: basics */

uint64_t model_start(uint64_t salt) { return support_bits(salt, 0x5A17); }

uint64_t model_chain(uint64_t before, int32_t token, uint64_t epoch)
{
    return support_bits(before, (uint64_t)(uint32_t)token + (epoch << 32));
}

uint64_t model_key(uint64_t chain, int32_t group)
{
    return support_bits(chain, 0x6000u + (uint64_t)group);
}

int64_t model_draw(model *m, int64_t n)
{
    return (int64_t)(support_bits(m->seed, m->draws++) % (uint64_t)n);
}

void model_fail(model *m, const char *file, int line, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!m->failed)
        test_fail(file, line,
                  "seed %llu, operation %lld (%s): %s. Again: FOLIO_MODEL_SEED=%llu and this test",
                  (unsigned long long)m->seed, (long long)m->op, m->op_name, text,
                  (unsigned long long)m->seed);
    m->failed = true;
}

int64_t model_blocks_for(const model *m, int64_t tokens)
{
    return (tokens + m->config.block_size - 1) / m->config.block_size;
}

_Atomic uint64_t *model_shadow_of(model *m, int32_t block)
{
    return m->shadow + (int64_t)block * m->config.block_size;
}

uint64_t model_chain_before(const model_seq *s, int64_t at)
{
    return at == 0 ? model_start(s->salt) : s->chain[at - 1];
}

int32_t model_source_of(const model *m, int32_t block)
{
    for (int64_t i = 0; i < m->num_pairs; i++)
        if (m->pairs[i].to == block) return m->pairs[i].from;
    return block;
}

void model_recount(model *m)
{
    memset(m->by_table, 0, sizeof m->by_table);
    memset(m->by_hand, 0, sizeof m->by_hand);
    for (model_seq *s = m->seqs; s < m->seqs + MODEL_SEQS; s++)
        for (int g = 0; s->seq != NULL && g < m->config.num_layer_groups; g++)
            for (int64_t i = 0; i < model_blocks_for(m, s->len); i++)
                if (s->table[g][i] >= 0) m->by_table[s->table[g][i]]++;
    for (int64_t i = 0; i < m->num_held; i++) m->by_hand[m->held[i]]++;
    for (int b = 0; b < MODEL_BLOCKS; b++) m->refs[b] = m->by_table[b] + m->by_hand[b];
    int64_t kept = 0;
    for (int64_t i = 0; i < m->num_pairs; i++)
        if (m->by_table[m->pairs[i].to] > 0) m->pairs[kept++] = m->pairs[i];
    m->num_pairs = kept;
    for (int64_t i = 0; i < kept; i++) m->refs[m->pairs[i].from]++;
    memcpy(m->floor, m->refs, sizeof m->floor);
}

int64_t model_count_free(const model *m, const int32_t *refs)
{
    int64_t n = 0;
    for (int64_t b = 0; b < m->config.num_blocks; b++) n += refs[b] == 0 && m->indexed[b] == 0;
    return n;
}

int64_t model_count_available(const model *m, const int32_t *refs)
{
    int64_t n = 0;
    for (int64_t b = 0; b < m->config.num_blocks; b++) n += refs[b] == 0;
    return n;
}

int32_t model_find_block(const model *m, int group, uint64_t chain)
{
    for (int32_t b = 0; b < m->config.num_blocks; b++)
        if (m->indexed[b] == group + 1 && m->last[b] == chain) return b;
    return -1;
}

uint64_t model_guard_of(model *m, int32_t block)
{
    uint64_t h = 0;
    for (int i = 0; i < m->config.block_size; i++)
        h = support_bits(h, model_shadow_of(m, block)[i]);
    return h;
}

uint64_t model_hash_id_of(const model *m, const int32_t *tokens)
{
    uint64_t h = 1;
    for (int i = 0; i < m->config.block_size; i++) h = h * 31 + (uint64_t)tokens[i];
    return h;
}

/* -------------------------------------------------------------------------------- model: events */

static void on_removed(model *m, const folio_cache_event *e)
{
    int32_t b = (int32_t)e->block;
    EXPECT_SAME("the group of a removed block", e->layer_group + 1, m->indexed[b]);
    EXPECT_SAME("the salt of a removed block", e->salt, m->index_salt[b]);
    if (!m->forgetting && !m->releasing)
        EXPECT(m->floor[b] == 0, "block %d leaves the prefix cache, but is held %d times", b,
               m->floor[b]);
    /* With colliding hashes a block's predecessor may not be the one it came after. */
    bool ordered =
        m->config.window[e->layer_group] == 0 && m->config.hash_bits == 0 && !m->forgetting;
    for (int32_t c = 0; ordered && c < m->config.num_blocks; c++)
        EXPECT(m->indexed[c] != e->layer_group + 1 || m->before[c] != m->last[b] || m->floor[c] > 0,
               "block %d is removed before %d, which comes after it", b, c);
    m->indexed[b] = 0;
    m->num_indexed--;
    m->removed_now++;
}

static void on_stored(model *m, const folio_cache_event *e)
{
    const model_seq *s = m->committing;
    int32_t b = (int32_t)e->block, bs = m->config.block_size;
    EXPECT(s != NULL && s->taint != MODEL_TAINTED, "block %d is stored by nobody", b);
    EXPECT(m->indexed[b] == 0, "block %d is stored twice", b);
    int64_t i = 0;
    while (i < m->commit_len / bs && s->table[e->layer_group][i] != b) i++;
    EXPECT(i < m->commit_len / bs, "block %d is stored, but not full", b);
    EXPECT(m->by_table[b] > 0 && s->gone[e->layer_group] <= i * bs, "block %d is not all written",
           b);
    EXPECT_SAME("the salt of a stored block", e->salt, s->salt);
    if (!m->config.hash_ids) EXPECT_SAME("tokens of a stored block", e->num_tokens, bs);
    const int32_t *tokens = s->tokens + i * bs;
    if (m->config.hash_ids)
        EXPECT(e->token_ids == NULL && e->hash_id == model_hash_id_of(m, tokens), "id");
    else
        EXPECT(e->token_ids && memcmp(e->token_ids, tokens, (size_t)bs * sizeof *tokens) == 0,
               "block %d is stored under other tokens", b);
    EXPECT(model_find_block(m, e->layer_group, s->chain[i * bs + bs - 1]) < 0,
           "block %d was there before", b);
    m->indexed[b] = e->layer_group + 1;
    m->last[b] = s->chain[i * bs + bs - 1];
    m->before[b] = model_chain_before(s, i * bs);
    m->index_salt[b] = s->salt;
    m->num_indexed++;
    m->stored_now++;
}

static void on_event(void *user, const folio_cache_event *e)
{
    model *m = user;
    EXPECT_SAME("struct_size of an event", e->struct_size, sizeof *e);
    EXPECT_SAME("the tier of an event", e->tier, FOLIO_TIER_DEVICE);
    EXPECT(e->layer_group >= 0 && e->layer_group < m->config.num_layer_groups,
           "an event of group %d", e->layer_group);
    EXPECT(e->block >= 0 && e->block < m->config.num_blocks, "an event of block %lld",
           (long long)e->block);
    if (e->kind == FOLIO_EVENT_REMOVED) on_removed(m, e);
    else if (e->kind == FOLIO_EVENT_STORED) on_stored(m, e);
    else EXPECT(false, "an event of kind %d", (int)e->kind);
}

/* --------------------------------------------------------------------------------- model: check */

static void check_sequence(model *m, const model_seq *s)
{
    int32_t bs = m->config.block_size;
    int64_t held = 0, place = s - m->seqs;
    for (int g = 0; g < m->config.num_layer_groups; g++) {
        const int32_t *table = NULL;
        int64_t n = -1;
        EXPECT_STATUS(folio_sequence_get_table(s->seq, g, &table, &n), FOLIO_OK);
        EXPECT_SAME("blocks in a table", n, model_blocks_for(m, s->len));
        for (int64_t i = 0; i < n; i++) {
            EXPECT(table[i] == s->table[g][i], "sequence %lld group %d block %lld is %d, not %d",
                   (long long)place, g, (long long)i, table[i], s->table[g][i]);
            held += table[i] != FOLIO_NO_BLOCK;
        }
        for (int64_t p = s->gone[g]; p < s->written; p++) {
            int32_t b = s->table[g][p / bs];
            EXPECT(b >= 0, "sequence %lld group %d: token %lld is gone", (long long)place, g,
                   (long long)p);
            uint64_t key = model_shadow_of(m, model_source_of(m, b))[p % bs];
            EXPECT(key == model_key(s->chain[p], g),
                   "sequence %lld group %d: token %lld in block %d is another's", (long long)place,
                   g, (long long)p, b);
        }
    }
    folio_sequence_info info = {.struct_size = sizeof info};
    EXPECT_STATUS(folio_sequence_get_info(s->seq, &info), FOLIO_OK);
    EXPECT_SAME("len", info.len, s->len);
    EXPECT_SAME("committed_len", info.committed_len, s->committed);
    EXPECT_SAME("num_blocks of a sequence", info.num_blocks, held);
    EXPECT_SAME("salt", info.salt, s->salt);
    EXPECT_SAME("state", info.state, FOLIO_SEQUENCE_RESIDENT);
}

/* In a group without window a cached block can be reached: the one before it is there too. */
static bool is_of_use(const model *m, int32_t b)
{
    int g = m->indexed[b] - 1;
    return m->config.window[g] != 0 || m->before[b] == model_start(m->index_salt[b]) ||
           model_find_block(m, g, m->before[b]) >= 0;
}

/* An entry of the index stands for a block of tokens, whichever groups have it. */
static int64_t count_chains(const model *m)
{
    int64_t n = 0;
    for (int64_t b = 0; b < m->config.num_blocks; b++) {
        bool first = m->indexed[b] != 0;
        for (int64_t c = 0; first && c < b; c++) first = !m->indexed[c] || m->last[c] != m->last[b];
        n += first;
    }
    return n;
}

static void check_blocks(model *m)
{
    uint8_t map[MODEL_BLOCKS];
    EXPECT_STATUS(
        folio_pool_get_block_states(m->pool, FOLIO_TIER_DEVICE, 0, m->config.num_blocks, map),
        FOLIO_OK);
    int64_t counts[FOLIO_NUM_BLOCK_STATES] = {0};
    for (int b = 0; b < m->config.num_blocks; b++) {
        folio_block_state state = m->by_table[b] + m->by_hand[b] > 1 ? FOLIO_BLOCK_SHARED
                                  : m->refs[b] > 0                   ? FOLIO_BLOCK_USED
                                  : m->indexed[b] != 0               ? FOLIO_BLOCK_CACHED
                                                                     : FOLIO_BLOCK_FREE;
        EXPECT(map[b] == state, "block %d is in state %d, expected %d", b, map[b], (int)state);
        counts[state]++;
        if (state == FOLIO_BLOCK_CACHED && m->config.hash_bits == 0)
            EXPECT(is_of_use(m, b), "block %d is cached, and those before it are not", b);
        if (m->by_hand[b] > 0)
            EXPECT(model_guard_of(m, b) == m->guard[b], "block %d was written", b);
    }
    folio_pool_stats s = {.struct_size = sizeof s};
    EXPECT_STATUS(folio_pool_get_stats(m->pool, &s), FOLIO_OK);
    EXPECT_SAME("num_blocks", s.num_blocks, m->config.num_blocks);
    EXPECT_SAME("num_free", s.num_free, counts[FOLIO_BLOCK_FREE]);
    EXPECT_SAME("num_used", s.num_used, counts[FOLIO_BLOCK_USED] + counts[FOLIO_BLOCK_SHARED]);
    EXPECT_SAME("num_shared", s.num_shared, counts[FOLIO_BLOCK_SHARED]);
    EXPECT_SAME("num_cached", s.num_cached, counts[FOLIO_BLOCK_CACHED]);
    /* Entries before others stay, blocks or not; so does the last one a sequence has. */
    int64_t chains = count_chains(m);
    EXPECT(s.num_entries >= chains, "%lld entries for %lld", (long long)s.num_entries,
           (long long)chains);
    EXPECT_SAME("num_copies", s.num_copies, m->num_pairs);
    EXPECT_SAME("allocations", s.allocations, m->allocations);
    EXPECT_SAME("evictions", s.evictions, m->evictions);
    EXPECT_SAME("lookup_tokens", s.lookup_tokens, m->lookups);
    EXPECT_SAME("hit_tokens", s.hit_tokens, m->hits);
    /* Within a call there may have been more than at its end. */
    EXPECT(s.peak_used >= m->peak && s.peak_used >= s.num_used && s.peak_used <= s.num_blocks,
           "peak_used is %lld with %lld used, after %lld", (long long)s.peak_used,
           (long long)s.num_used, (long long)m->peak);
    m->peak = s.peak_used;
    int64_t sequences = 0;
    for (int i = 0; i < MODEL_SEQS; i++) sequences += m->seqs[i].seq != NULL;
    EXPECT_SAME("num_sequences", s.num_sequences, sequences);
}

void model_check(model *m)
{
    model_recount(m);
    check_blocks(m);
    for (int i = 0; i < MODEL_SEQS && !m->failed; i++)
        if (m->seqs[i].seq != NULL) check_sequence(m, &m->seqs[i]);
    if (!m->failed && m->op % 1000 == 999) EXPECT_STATUS(folio_pool_check(m->pool), FOLIO_OK);
}

/* ------------------------------------------------------------------------ model: open and close */

model_config model_config_of(uint64_t seed)
{
    static const int32_t block_sizes[4] = {1, 2, 4, 16};
    uint64_t at = 1000;
#define DRAW(n) ((int64_t)(support_bits(seed, at++) % (uint64_t)(n)))
    model_config c = {.block_size = block_sizes[seed % 4]};
    int64_t most = DRAW(2) ? 31 : MODEL_BLOCKS - 29;
    c.num_blocks = 30 + DRAW(most);
    c.num_layer_groups = 1 + (int32_t)DRAW(MODEL_GROUPS);
    c.vocabulary = 2 + (int32_t)DRAW(3);
    c.num_salts = 1 + (int32_t)DRAW(3);
    c.hash_ids = DRAW(5) == 0;
    c.flags = DRAW(8) == 0 ? FOLIO_POOL_CHECK : 0;
    int32_t bs = c.block_size;
    const int64_t windows[] = {0, 2, bs, bs + 1, 2 * bs + 1, 3 * bs - 1, 1};
    c.watermark = DRAW(c.num_blocks / 6);
    /* window 1 in every group would make a match of nothing. */
    for (int g = 0; g < c.num_layer_groups; g++) c.window[g] = windows[DRAW(g == 0 ? 5 : 7)];
    if (bs == 1 && c.window[0] == 1) c.window[0] = 3;
    c.max_len = bs == 1 ? 40 : bs == 2 ? 60 : bs == 4 ? 80 : 200;
#undef DRAW
    return c;
}

bool model_open(model *m, const model_config *config, uint64_t seed)
{
    return model_open_with(m, config, seed, on_event, m);
}

bool model_open_with(model *m, const model_config *config, uint64_t seed, folio_event_fn listener,
                     void *user)
{
    *m = (model){.config = *config, .seed = seed, .op_name = "open"};
    m->ctx = support_context("reference", 1, NULL);
    int64_t slots = config->num_blocks * config->block_size;
    m->shadow = calloc((size_t)slots, sizeof *m->shadow);
    if (m->ctx == NULL || m->shadow == NULL) abort();
    folio_layer_group groups[MODEL_GROUPS] = {{0}};
    for (int g = 0; g < config->num_layer_groups; g++) groups[g].window = config->window[g];
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = config->num_blocks,
                   .block_size = config->block_size, .num_layer_groups = config->num_layer_groups,
                   .layer_groups = groups, .watermark = config->watermark, .flags = config->flags,
                   .hash_key = seed + 1, .on_event = listener, .event_user = user);
    CHECK_OK(folio_pool_create(m->ctx, &desc, &m->pool));
    if (m->pool == NULL) return false;
    if (config->hash_bits > 0) folioi_pool_set_hash_bits(m->pool, config->hash_bits);
    /* Each document begins as an earlier one, up to some token. */
    for (int d = 0; d < MODEL_DOCS; d++) {
        int64_t same = d == 0 ? 0 : model_draw(m, config->max_len);
        const int32_t *other = m->docs[d == 0 ? 0 : model_draw(m, d)];
        for (int64_t p = 0; p < MODEL_LEN; p++)
            m->docs[d][p] = p < same ? other[p] : (int32_t)model_draw(m, config->vocabulary);
    }
    return true;
}

void model_close(model *m)
{
    for (int i = 0; i < MODEL_SEQS; i++) folio_sequence_destroy(m->seqs[i].seq);
    m->failed = true; /* an event from here on says nothing new */
    folio_pool_destroy(m->pool);
    folio_context_destroy(m->ctx);
    free((void *)m->shadow);
    m->shadow = NULL;
}
