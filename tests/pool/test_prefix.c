/*
 * test_prefix.c: the prefix cache: what match finds, by its definition and in every group; what
 * commit enters and takes over; who is evicted first; events, replayed, against match; hashes that
 * collide.
 */
#include "pool/pool_rig.h"

#include "cache/pool.h" /* folioi_pool_set_hash_bits */

/* A sequence that commits these tokens and goes: its full blocks stay cached. */
static void leave(folio_pool *pool, uint64_t salt, const int32_t *ids, int64_t num_tokens)
{
    folio_sequence *s = pool_sequence(pool, salt);
    pool_grow(s, ids, num_tokens);
    folio_sequence_destroy(s);
}

/* ---------------------------------------------------------------------------------------- match */

/* Whole blocks of what both have, for every length of both. */
TEST(prefix, match_takes_whole_blocks)
{
    const int32_t sizes[3] = {1, 3, 16};
    const int64_t lengths[] = {0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < COUNT_OF(lengths); i++) {
            int64_t bs = sizes[k], have = lengths[i];
            pool_rig r;
            REQUIRE_TEST(
                pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 60,
                                             .block_size = sizes[k], .num_layer_groups = 1)));
            leave(r.pool, 0, pool_counting_ids(), have);
            CHECK_INT(pool_stats(r.pool).num_cached, have / bs);
            CHECK_INT(pool_stats(r.pool).num_entries, have / bs);
            CHECK_INT(r.num_events, have / bs);
            for (int64_t want = 0; want < 60; want++)
                CHECK_INT(pool_matches(r.pool, 0, pool_counting_ids(), want),
                          (want < have ? want : have) / bs * bs);
            pool_rig_close(&r);
        }
}

/* The first token that differs ends the match, wherever it is. */
POOL_TEST(prefix, match_ends_where_tokens_differ, .num_blocks = 60, .block_size = 4)
{
    leave(pool, 0, pool_counting_ids(), 24);
    for (int at = 0; at < 24; at++) {
        int32_t ids[24];
        memcpy(ids, pool_counting_ids(), sizeof ids);
        ids[at] ^= 1 << (at % 31);
        CHECK_INT(pool_matches(pool, 0, ids, 24), at / 4 * 4);
    }
    int32_t ids[24]; /* the same blocks in another order are others */
    for (int i = 0; i < 24; i++) ids[i] = (i + 4) % 24;
    CHECK_INT(pool_matches(pool, 0, ids, 24), 0);
}

POOL_TEST(prefix, match_takes_the_blocks_themselves, .num_blocks = 60, .block_size = 4,
          .num_layer_groups = 2)
{
    folio_sequence *a = pool_sequence(pool, 0), *b = pool_sequence(pool, 0);
    pool_grow(a, pool_counting_ids(), 22);
    folio_tokens tokens = pool_tokens(pool_counting_ids(), 30);
    CHECK_OK(folio_sequence_match(b, &tokens, NULL, NULL)); /* matched may be NULL */
    folio_sequence_info info = pool_info(b);
    CHECK_INT(info.len, 20);
    CHECK_INT(info.committed_len, 20);
    CHECK_INT(info.matched_len, 20);
    CHECK_INT(info.num_blocks, 10);
    for (int g = 0; g < 2; g++) {
        int64_t n;
        const int32_t *table = pool_table(b, g, &n);
        CHECK_INT(n, 5);
        CHECK(memcmp(table, pool_table(a, g, NULL), 5 * sizeof *table) == 0);
        for (int i = 0; i < 5; i++) CHECK_INT(pool_state_of(pool, table[i]), FOLIO_BLOCK_SHARED);
    }
    CHECK_INT(pool_stats(pool).num_used, 12);
    /* At a block's boundary both go on without a copy. */
    pool_grow(b, pool_counting_ids(), 23);
    CHECK_INT(pool_stats(pool).num_copies, 0);
    folio_sequence_destroy(a);
    folio_sequence_destroy(b);
    CHECK_INT(pool_stats(pool).num_cached, 10);
    CHECK_INT(pool_stats(pool).num_free, 50);
}

POOL_TEST(prefix, salts_do_not_see_each_other, .num_blocks = 60, .block_size = 4)
{
    const uint64_t salts[5] = {0, 1, 2, UINT64_MAX, UINT64_C(1) << 63};
    for (int i = 0; i < 5; i++) leave(pool, salts[i], pool_counting_ids(), 4 * i + 1);
    for (int i = 0; i < 5; i++)
        CHECK_INT(pool_matches(pool, salts[i], pool_counting_ids(), 40), 4 * i);
    CHECK_INT(pool_matches(pool, 77, pool_counting_ids(), 40), 0);
    CHECK_INT(pool_stats(pool).num_cached, 10);
    for (int64_t i = 0; i < r->num_events; i++) /* equal tokens, different entries */
        for (int64_t k = 0; k < i; k++)
            CHECK(memcmp(r->events[i].e.hash, r->events[k].e.hash, 16) != 0);
}

POOL_TEST(prefix, one_number_may_stand_for_a_block, .num_blocks = 60, .block_size = 16)
{
    const uint64_t ids[4] = {7, UINT64_MAX, 7, 0}, other[4] = {7, UINT64_MAX, 8, 0};
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = 50, .hash_ids = ids};
    folio_sequence *s = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(s, 50, 0, NULL));
    CHECK_OK(folio_sequence_commit(s, &tokens));
    CHECK_INT(r->num_events, 3);
    for (int i = 0; i < 3 && i < r->num_events; i++) {
        CHECK(!r->events[i].has_ids);
        CHECK_INT(r->events[i].e.hash_id, ids[i]);
        CHECK_INT(r->events[i].e.block, pool_table(s, 0, NULL)[i]);
    }
    folio_sequence_destroy(s);
    for (int n = 0; n < 64; n++) {
        int64_t matched = -1;
        s = pool_sequence(pool, 0);
        tokens.num_tokens = n;
        CHECK_OK(folio_sequence_match(s, &tokens, &matched, NULL));
        CHECK_INT(matched, n < 48 ? n / 16 * 16 : 48);
        folio_sequence_destroy(s);
        s = pool_sequence(pool, 0);
        folio_tokens changed = {.struct_size = sizeof changed, .num_tokens = n, .hash_ids = other};
        CHECK_OK(folio_sequence_match(s, &changed, &matched, NULL));
        CHECK_INT(matched, n < 32 ? n / 16 * 16 : 32);
        folio_sequence_destroy(s);
    }
    /* Tokens whose bytes are those of the number are still other tokens. */
    int32_t seven[16] = {7};
    CHECK_INT(pool_matches(pool, 0, seven, 16), 0);
}

POOL_TEST(prefix, statistics, .num_blocks = 60, .block_size = 4)
{
    CHECK(pool_stats(pool).hit_rate == 0.0);
    leave(pool, 0, pool_counting_ids(), 20);
    CHECK_INT(pool_stats(pool).lookup_tokens, 0);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 30), 20);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 10), 8);
    CHECK_INT(pool_matches(pool, 1, pool_counting_ids(), 16), 0);
    folio_pool_stats s = pool_stats(pool);
    CHECK_INT(s.lookup_tokens, 56);
    CHECK_INT(s.hit_tokens, 28);
    CHECK(s.hit_rate == 0.5);
    CHECK_INT(s.allocations, 5); /* what was found was handed out before */
    CHECK_INT(s.num_entries, 5);
}

/* --------------------------------------------------------------------------------------- commit */

/* Both compute the same prompt; the second takes the first one's blocks and frees its own. */
POOL_TEST(prefix, equal_blocks_become_one, .num_blocks = 60, .block_size = 4, .num_layer_groups = 2,
          .flags = FOLIO_POOL_CHECK)
{
    folio_sequence *a = pool_sequence(pool, 0), *b = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(a, 11, 0, NULL));
    CHECK_OK(folio_sequence_reserve(b, 14, 0, NULL));
    int32_t own[2][4];
    for (int g = 0; g < 2; g++) memcpy(own[g], pool_table(b, g, NULL), sizeof own[g]);
    CHECK_INT(pool_stats(pool).num_used, 14);
    pool_grow(a, pool_counting_ids(), 11);
    CHECK_INT(r->num_events, 4);
    pool_grow(b, pool_counting_ids(), 14);
    CHECK_INT(r->num_events, 6); /* one more block, in two groups */
    for (int g = 0; g < 2; g++) {
        const int32_t *ta = pool_table(a, g, NULL), *tb = pool_table(b, g, NULL);
        CHECK(ta[0] == tb[0] && ta[1] == tb[1]);
        CHECK(tb[2] == own[g][2] && tb[3] == own[g][3]);
        CHECK_INT(pool_state_of(pool, own[g][0]), FOLIO_BLOCK_FREE);
        CHECK_INT(pool_state_of(pool, own[g][1]), FOLIO_BLOCK_FREE);
        CHECK_INT(pool_state_of(pool, ta[1]), FOLIO_BLOCK_SHARED);
    }
    CHECK_INT(pool_stats(pool).num_used, 10);
    CHECK_INT(pool_info(b).num_blocks, 8);
    pool_grow(a, pool_counting_ids(), 14); /* now the other way round */
    CHECK_INT(pool_table(a, 0, NULL)[2], own[0][2]);
    folio_sequence_destroy(a);
    folio_sequence_destroy(b);
    CHECK_INT(pool_stats(pool).num_cached, 6);
}

/* Ids count from the first token: if only those of new tokens are given, they are noticed where they differ. */
POOL_TEST(prefix, commit_wants_all_ids, .num_blocks = 8, .block_size = 2, .flags = FOLIO_POOL_CHECK)
{
    folio_sequence *s = pool_sequence(pool, 0);
    pool_grow(s, pool_counting_ids(), 4);
    CHECK_OK(folio_sequence_reserve(s, 2, 0, NULL));
    folio_tokens wrong = {.struct_size = sizeof wrong, .num_tokens = 6};
    wrong.ids = pool_counting_ids() + 4;
    REFUSED(folio_sequence_commit(s, &wrong), FOLIO_ERR_ARGUMENT, "ids|block 1");
    const uint64_t hash_ids[3] = {1, 2, 3};
    folio_tokens other = {.struct_size = sizeof other, .num_tokens = 6, .hash_ids = hash_ids};
    REFUSED(folio_sequence_commit(s, &other), FOLIO_ERR_ARGUMENT, "ids|block 1");
    CHECK_INT(pool_info(s).committed_len, 4);
    folio_sequence_destroy(s);
}

/* Only full blocks whose tokens are committed, and none without ids. */
POOL_TEST(prefix, commit_enters_full_blocks, .num_blocks = 60, .block_size = 4)
{
    folio_sequence *s = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(s, 20, 0, NULL));
    for (int64_t n = 0; n <= 20; n++) {
        folio_tokens tokens = pool_tokens(pool_counting_ids(), n);
        CHECK_OK(folio_sequence_commit(s, &tokens));
        CHECK_INT(r->num_events, n / 4);
        CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 40), n / 4 * 4);
    }
    folio_sequence_destroy(s);
    s = pool_sequence(pool, 5);
    CHECK_OK(folio_sequence_reserve(s, 20, 0, NULL));
    CHECK_OK(folio_sequence_commit(s, NULL));
    CHECK_INT(pool_info(s).committed_len, 20);
    CHECK_INT(r->num_events, 5);
    CHECK_INT(pool_matches(pool, 5, pool_counting_ids(), 40), 0);
    folio_sequence_destroy(s);
    CHECK_INT(pool_stats(pool).num_cached, 5);
}

/* ------------------------------------------------------------------------------------- eviction */

/* The least recently used first, and of a sequence the last block first. */
TEST(prefix, least_recently_used_first)
{
    for (int again = 0; again < 2; again++) {
        pool_rig r;
        REQUIRE_TEST(pool_rig_open(&r, (folio_pool_desc){.num_blocks = 12, .block_size = 2}));
        int32_t blocks[3][4];
        for (int i = 0; i < 3; i++) { /* salts 0, 1, 2 in this order */
            folio_sequence *s = pool_sequence(r.pool, (uint64_t)i);
            pool_grow(s, pool_counting_ids(), 8);
            memcpy(blocks[i], pool_table(s, 0, NULL), sizeof blocks[i]);
            folio_sequence_destroy(s);
        }
        CHECK_INT(pool_stats(r.pool).num_cached, 12);
        CHECK_INT(pool_stats(r.pool).num_free, 0);
        if (again)
            CHECK_INT(pool_matches(r.pool, 0, pool_counting_ids(), 8), 8); /* used just now */
        const int order[2][3] = {{0, 1, 2}, {1, 2, 0}};
        int64_t before = r.num_events;
        for (int k = 0; k < 12; k++) {
            int32_t b = -1;
            int expected = blocks[order[again][k / 4]][3 - k % 4];
            CHECK_OK(folio_pool_alloc(r.pool, 1, &b));
            CHECK_INT(b, expected);
            REQUIRE_TEST(r.num_events == before + k + 1);
            const folio_cache_event *e = &r.events[before + k].e;
            CHECK_INT(e->kind, FOLIO_EVENT_REMOVED);
            CHECK_INT(e->block, expected);
            CHECK_INT(e->salt, (uint64_t)order[again][k / 4]);
            CHECK_INT(pool_stats(r.pool).evictions, k + 1);
        }
        for (int i = 0; i < 3; i++) CHECK_OK(folio_pool_release(r.pool, 4, blocks[i]));
        CHECK_INT(pool_stats(r.pool).num_free, 12);
        pool_rig_close(&r);
    }
}

/* Free blocks go first; what somebody holds never goes. */
POOL_TEST(prefix, only_what_is_needed_is_evicted, .num_blocks = 12, .block_size = 2)
{
    leave(pool, 0, pool_counting_ids(), 8);
    leave(pool, 1, pool_counting_ids(), 8);
    folio_sequence *holder = pool_sequence(pool, 0), *s = pool_sequence(pool, 2);
    folio_tokens tokens = pool_tokens(pool_counting_ids(), 8);
    CHECK_OK(folio_sequence_match(holder, &tokens, NULL, NULL));
    CHECK_OK(folio_sequence_reserve(s, 8, 0, NULL)); /* the 4 free ones */
    CHECK_INT(pool_stats(pool).evictions, 0);
    CHECK_OK(folio_sequence_reserve(s, 5, 0, NULL)); /* 3 of 4 cached ones */
    CHECK_INT(pool_stats(pool).evictions, 3);
    CHECK_INT(pool_matches(pool, 1, pool_counting_ids(), 8), 2);
    REFUSED(folio_sequence_reserve(s, 4, 0, NULL), FOLIO_ERR_FULL, "");
    CHECK_INT(pool_stats(pool).evictions, 3); /* and nothing is evicted in vain */
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 8), 8);
    folio_sequence_destroy(holder);
    CHECK_OK(folio_sequence_reserve(s, 4, 0, NULL));
    folio_sequence_destroy(s);
}

/* --------------------------------------------------------------------------------------- events */

/* Is a hash stored in a group, by the events so far? Also: no event twice in a row. */
static bool replayed(const pool_rig *r, int32_t group, const uint64_t *hash)
{
    bool stored = false;
    for (int64_t i = 0; i < r->num_events; i++) {
        const folio_cache_event *e = &r->events[i].e;
        if (e->layer_group != group || memcmp(e->hash, hash, 16) != 0) continue;
        CHECK(stored == (e->kind == FOLIO_EVENT_REMOVED));
        stored = e->kind == FOLIO_EVENT_STORED;
    }
    return stored;
}

/* The hash of a block of tokens after `parent`, from an event that stored it; false: none did. */
static bool hash_of(const pool_rig *r, const uint64_t *parent, uint64_t salt, const int32_t *ids,
                    int32_t bs, uint64_t *hash)
{
    for (int64_t i = 0; i < r->num_events; i++) {
        const pool_event *e = &r->events[i];
        if (e->e.salt == salt && memcmp(e->e.parent, parent, 16) == 0 && e->has_ids &&
            memcmp(e->tokens, ids, (size_t)bs * sizeof *ids) == 0) {
            memcpy(hash, e->e.hash, 16);
            return true;
        }
    }
    return false;
}

/* The definition: the longest prefix of which every group has what the next token sees. */
static int64_t longest_by_events(const pool_rig *r, const folio_layer_group *groups,
                                 int num_layer_groups, uint64_t salt, const int32_t *ids,
                                 int64_t num_tokens, int32_t bs)
{
    bool has[4][64] = {{false}};
    uint64_t hash[2] = {0, 0};
    int64_t top = 0;
    for (; top < num_tokens / bs; top++) {
        uint64_t next[2];
        if (!hash_of(r, hash, salt, ids + top * bs, bs, next)) break;
        memcpy(hash, next, sizeof hash);
        for (int g = 0; g < num_layer_groups; g++) has[g][top] = replayed(r, g, hash);
    }
    for (; top > 0; top--) {
        bool all = true;
        for (int g = 0; g < num_layer_groups; g++)
            for (int64_t key = 0; key < top * bs; key++) {
                bool seen = groups[g].window == 0 || top * bs - key < groups[g].window;
                all = all && (!seen || has[g][key / bs]);
            }
        if (all) return top * bs;
    }
    return 0;
}

/* In a group without window nothing goes before what comes after it. */
static void check_leaves_first(const pool_rig *r, const folio_layer_group *groups)
{
    for (int64_t i = 0; i < r->num_events; i++) {
        const folio_cache_event *gone = &r->events[i].e;
        if (gone->kind != FOLIO_EVENT_REMOVED || groups[gone->layer_group].window != 0) continue;
        for (int64_t k = 0; k < i; k++) {
            const folio_cache_event *e = &r->events[k].e;
            if (e->kind != FOLIO_EVENT_STORED || e->layer_group != gone->layer_group) continue;
            if (memcmp(e->parent, gone->hash, 16) != 0) continue;
            bool still = false;
            for (int64_t j = k; j < i; j++)
                if (r->events[j].e.layer_group == e->layer_group &&
                    memcmp(r->events[j].e.hash, e->hash, 16) == 0)
                    still = r->events[j].e.kind == FOLIO_EVENT_STORED;
            CHECK_MSG(!still, "block %lld goes before %lld", (long long)gone->block,
                      (long long)e->block);
        }
    }
}

enum { DOCS = 5, DOC_LEN = 40 };

/* Prompts that share prefixes come and go under pressure; match finds what the events say. */
static void match_by_events(const folio_layer_group *groups, int num_layer_groups, int32_t bs,
                            uint64_t seed)
{
    pool_rig r;
    REQUIRE_TEST(
        pool_rig_open(&r, FOLIO_WITH(folio_pool_desc, .num_blocks = 24 + 12 * num_layer_groups,
                                     .block_size = bs, .num_layer_groups = num_layer_groups,
                                     .layer_groups = groups, .flags = FOLIO_POOL_CHECK)));
    int32_t docs[DOCS][DOC_LEN];
    uint64_t draw = 0;
    for (int d = 0; d < DOCS; d++)
        for (int i = 0; i < DOC_LEN; i++)
            docs[d][i] = i < 6 * d ? docs[d - 1][i] : (int32_t)(support_bits(seed, draw++) % 3);
    int64_t hits = 0, partial = 0;
    for (int round = 0; round < 60; round++) {
        const int32_t *doc = docs[support_bits(seed, draw++) % DOCS];
        uint64_t salt = support_bits(seed, draw++) % 2;
        int64_t n = (int64_t)(support_bits(seed, draw++) % (DOC_LEN + 1)), matched = -1;
        folio_sequence *s = pool_sequence(r.pool, salt);
        int64_t expected = longest_by_events(&r, groups, num_layer_groups, salt, doc, n, bs);
        folio_tokens tokens = pool_tokens(doc, n);
        CHECK_OK(folio_sequence_match(s, &tokens, &matched, NULL));
        CHECK_INT(matched, expected);
        hits += matched > 0;
        partial += matched > 0 && matched < n / bs * bs;
        int32_t by_hand[16];
        bool pressed = support_bits(seed, draw++) % 3 == 0 &&
                       folio_pool_alloc(r.pool, 16, by_hand) == FOLIO_OK;
        for (int64_t len = matched; len < n; len += 3) { /* in pieces, so that windows move */
            int64_t to = len + 3 < n ? len + 3 : n;
            if (folio_sequence_reserve(s, to - len, 0, NULL) != FOLIO_OK) break;
            pool_grow(s, doc, to);
        }
        if (pressed) CHECK_OK(folio_pool_release(r.pool, 16, by_hand));
        folio_sequence_destroy(s);
    }
    CHECK(hits > 5 && partial > 0 && pool_stats(r.pool).evictions > 0);
    check_leaves_first(&r, groups);
    int64_t entries = 0;
    for (int64_t i = 0; i < r.num_events; i++)
        entries += r.events[i].e.kind == FOLIO_EVENT_STORED ? 1 : -1;
    CHECK_INT(pool_stats(r.pool).num_cached, entries);
    pool_rig_close(&r);
}

TEST(prefix, match_finds_what_the_events_say)
{
    const folio_layer_group groups[][3] = {{{.window = 0}},
                                           {{.window = 0}, {.window = 5}},
                                           {{.window = 9}, {.window = 0}, {.window = 2}},
                                           {{.window = 7}, {.window = 12}},
                                           {{.window = 4}}};
    const int num_layer_groups[] = {1, 2, 3, 2, 1};
    const int32_t sizes[] = {1, 2, 4};
    for (int i = 0; i < COUNT_OF(groups); i++)
        for (int k = 0; k < COUNT_OF(sizes); k++)
            match_by_events(groups[i], num_layer_groups[i], sizes[k], (uint64_t)(10 * i + k));
}

/* Of a windowed group only what the next token sees is needed, and taken. */
POOL_TEST(prefix, a_window_needs_its_last_blocks_only, .num_blocks = 24, .block_size = 4,
          .num_layer_groups = 2,
          .layer_groups = (folio_layer_group[]){{.window = 0}, {.window = 6}})
{
    folio_sequence *s = pool_sequence(pool, 0);
    for (int n = 4; n <= 32; n += 4) pool_grow(s, pool_counting_ids(), n); /* early blocks go */
    folio_sequence_destroy(s);
    folio_tokens tokens = pool_tokens(pool_counting_ids(), 32);
    s = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_match(s, &tokens, NULL, NULL));
    CHECK_INT(pool_info(s).len, 32);
    CHECK_INT(pool_info(s).num_blocks, 8 + 2); /* token 32 sees keys 27 .. 32: blocks 6 and 7 */
    for (int i = 0; i < 8; i++) CHECK_INT(pool_table(s, 1, NULL)[i] == FOLIO_NO_BLOCK, i < 6);
    /* With 8 free ones and the 6 that only the window had: those go, and nothing is lost by it. */
    int32_t by_hand[14];
    CHECK_OK(folio_pool_alloc(pool, 14, by_hand));
    CHECK_INT(pool_stats(pool).evictions, 6);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 32), 32);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 31),
              0); /* token 28 would see blocks 5, 6 */
    CHECK_OK(folio_pool_release(pool, 14, by_hand));
    folio_sequence_destroy(s);
}

/* Is it the event of the same block, whatever became of it? */
static bool same_block(const pool_event *a, const pool_event *b)
{
    return a->e.tier == b->e.tier && a->e.layer_group == b->e.layer_group &&
           a->e.block == b->e.block && a->e.salt == b->e.salt && a->e.hash_id == b->e.hash_id &&
           a->e.num_tokens == b->e.num_tokens && memcmp(a->e.hash, b->e.hash, 16) == 0 &&
           memcmp(a->e.parent, b->e.parent, 16) == 0 && memcmp(a->tokens, b->tokens, 16) == 0;
}

/* Every field of an event, and the chain of hashes along a sequence. */
POOL_TEST(prefix, events_tell_all, .num_blocks = 40, .block_size = 4, .num_layer_groups = 2)
{
    folio_sequence *s = pool_sequence(pool, 9);
    pool_grow(s, pool_counting_ids() + 50, 18);
    REQUIRE_TEST(r->num_events == 8);
    for (int i = 0; i < 4; i++)
        for (int g = 0; g < 2; g++) {
            int found = 0;
            for (int k = 0; k < 8; k++) {
                const folio_cache_event *e = &r->events[k].e;
                if (e->layer_group != g || e->block != pool_table(s, g, NULL)[i]) continue;
                found++;
                CHECK_INT(e->struct_size, sizeof *e);
                CHECK_INT(e->kind, FOLIO_EVENT_STORED);
                CHECK_INT(e->tier, FOLIO_TIER_DEVICE);
                CHECK_INT(e->salt, 9);
                CHECK_INT(e->num_tokens, 4);
                CHECK(memcmp(r->events[k].tokens, pool_counting_ids() + 50 + 4 * i, 16) == 0);
                CHECK(e->hash[0] != 0 || e->hash[1] != 0);
                uint64_t parent[2] = {0, 0};
                for (int j = 0; i > 0 && j < 8; j++)
                    if (r->events[j].e.block == pool_table(s, g, NULL)[i - 1])
                        memcpy(parent, r->events[j].e.hash, sizeof parent);
                CHECK(memcmp(e->parent, parent, sizeof parent) == 0);
            }
            CHECK_INT(found, 1);
        }
    folio_sequence_destroy(s);
    CHECK_INT(r->num_events, 8); /* still cached */
    int32_t all[40];
    CHECK_OK(folio_pool_alloc(pool, 40, all));
    REQUIRE_TEST(r->num_events == 16);
    for (int k = 8; k < 16; k++) { /* each goes as it came */
        const pool_event *gone = &r->events[k];
        int found = 0;
        for (int j = 0; j < 8; j++) found += same_block(&r->events[j], gone);
        CHECK_INT(found, 1);
        CHECK_INT(gone->e.kind, FOLIO_EVENT_REMOVED);
    }
    CHECK_OK(folio_pool_release(pool, 40, all));
}

/* --------------------------------------------------------------------------------------- forget */

POOL_TEST(prefix, forget, .num_blocks = 30, .block_size = 4, .num_layer_groups = 2,
          .flags = FOLIO_POOL_CHECK)
{
    leave(pool, 1, pool_counting_ids(), 12);
    folio_sequence *s = pool_sequence(pool, 0), *fork = NULL;
    pool_grow(s, pool_counting_ids(), 10);
    int32_t table[3];
    memcpy(table, pool_table(s, 1, NULL), sizeof table);
    CHECK_INT(r->num_events, 10);
    CHECK_OK(folio_pool_forget(pool));
    CHECK_INT(r->num_events, 20);
    for (int i = 10; i < 20; i++) CHECK_INT(r->events[i].e.kind, FOLIO_EVENT_REMOVED);
    folio_pool_stats st = pool_stats(pool);
    CHECK_INT(st.num_cached, 0);
    CHECK_INT(st.num_used, 6); /* the running one keeps its blocks */
    CHECK_INT(st.num_free, 24);
    CHECK_INT(st.evictions, 0); /* nobody needed them */
    CHECK(memcmp(pool_table(s, 1, NULL), table, sizeof table) == 0);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 12), 0);
    CHECK_INT(pool_matches(pool, 1, pool_counting_ids(), 12), 0);
    /* What it goes on with depends on what was forgotten, and so does a fork's. */
    CHECK_OK(folio_sequence_fork(s, &fork));
    pool_grow(s, pool_counting_ids(), 20);
    pool_grow(fork, pool_counting_ids(), 20);
    CHECK_INT(r->num_events, 20);
    CHECK_OK(folio_sequence_truncate(s, 4));
    pool_grow(s, pool_counting_ids(), 20);
    CHECK_INT(r->num_events, 20);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), 20), 0);
    /* It does not take blocks of the new weights either. */
    leave(pool, 0, pool_counting_ids(), 20);
    CHECK_INT(r->num_events, 30);
    memcpy(table, pool_table(s, 1, NULL), sizeof table);
    pool_grow(s, pool_counting_ids(), 21);
    CHECK(memcmp(pool_table(s, 1, NULL), table, sizeof table) == 0);
    /* From nothing it starts anew. */
    CHECK_OK(folio_sequence_truncate(s, 0));
    folio_tokens tokens = pool_tokens(pool_counting_ids(), 20);
    CHECK_OK(folio_sequence_match(s, &tokens, NULL, NULL));
    CHECK_INT(pool_info(s).len, 20);
    pool_grow(s, pool_counting_ids(), 24);
    CHECK_INT(r->num_events, 32);
    folio_sequence_destroy(s);
    folio_sequence_destroy(fork);
    CHECK_OK(folio_pool_forget(pool));
    CHECK_INT(pool_stats(pool).num_free, 30);
    CHECK_INT(pool_stats(pool).num_entries, 0);
}

/* --------------------------------------------------------------------------- hashes, collisions */

/* A number and tokens of the same bytes, under the same hash every second time: two blocks. */
TEST(prefix, colliding_kinds)
{
    for (uint64_t key = 1; key <= 20; key++) {
        pool_rig r;
        REQUIRE_TEST(pool_rig_open(
            &r, (folio_pool_desc){.num_blocks = 20, .block_size = 2, .hash_key = key}));
        folioi_pool_set_hash_bits(r.pool, 1);
        const int32_t ids[2] = {5, 0};
        uint64_t number;
        memcpy(&number, ids, sizeof number);
        folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = 2, .hash_ids = &number};
        leave(r.pool, 0, ids, 2);
        folio_sequence *s = pool_sequence(r.pool, 0);
        int64_t matched = -1;
        CHECK_OK(folio_sequence_match(s, &tokens, &matched, NULL));
        CHECK_INT(matched, 0);
        folio_sequence_destroy(s);
        pool_rig_close(&r);
    }
}

/* Makes the same calls on a pool with this key. */
static bool make_pool(pool_rig *r, uint64_t key)
{
    if (!pool_rig_open(r, FOLIO_WITH(folio_pool_desc, .num_blocks = 16, .block_size = 4,
                                     .num_layer_groups = 2, .hash_key = key)))
        return false;
    int32_t ids[40];
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 40; k++) ids[k] = (i + k) % 3;
        leave(r->pool, (uint64_t)(i % 2), ids, 8 + 2 * i);
        (void)pool_matches(r->pool, 0, ids, 20);
    }
    return true;
}

/* A pool's doings depend on the calls and the key only. */
TEST(prefix, keys_and_determinism)
{
    pool_rig a, b, c;
    REQUIRE_TEST(make_pool(&a, 42) && make_pool(&b, 42) && make_pool(&c, 43));
    CHECK(a.num_events > 20 && pool_stats(a.pool).evictions > 0);
    REQUIRE_TEST(a.num_events == b.num_events && a.num_events == c.num_events);
    for (int64_t i = 0; i < a.num_events; i++) {
        CHECK(same_block(&a.events[i], &b.events[i]) && a.events[i].e.kind == b.events[i].e.kind);
        CHECK_INT(a.events[i].e.block, c.events[i].e.block);
        CHECK_INT(a.events[i].e.kind, c.events[i].e.kind);
        CHECK(memcmp(a.events[i].e.hash, c.events[i].e.hash, 16) != 0);
    }
    pool_rig_close(&a);
    pool_rig_close(&b);
    pool_rig_close(&c);
    /* 0: a random key */
    REQUIRE_TEST(make_pool(&a, 0) && make_pool(&b, 0));
    CHECK(memcmp(a.events[0].e.hash, b.events[0].e.hash, 16) != 0);
    pool_rig_close(&a);
    pool_rig_close(&b);
}

POOL_TEST(prefix, a_long_prompt, .num_blocks = POOL_COUNTING_IDS, .block_size = 1)
{
    enum { LONG = POOL_COUNTING_IDS };
    leave(pool, 0, pool_counting_ids(), LONG);
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), LONG), LONG);
    int32_t one;
    CHECK_OK(folio_pool_alloc(pool, 1, &one));
    CHECK_INT(pool_matches(pool, 0, pool_counting_ids(), LONG), LONG - 1);
    CHECK_OK(folio_pool_release(pool, 1, &one));
}
