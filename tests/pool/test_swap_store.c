/*
 * test_swap_store.c: the file of the disk tier as a pool sees it: what one pool sent down the next
 * one finds; files of another kind are refused with a sentence and left as they are; and the events
 * of all tiers tell, at every moment, what the prefix cache holds.
 */
#include "pool/generation_rig.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const gen_geometry *const geometries[] = {&gen_small, &gen_windowed, &gen_translating,
                                                 &gen_latent};

/* Everything cached goes to disk, through the host tier where there is one. */
static void lower_all(gen_world *w, int64_t host)
{
    while (host > 0 && gen_stats(&w->p).num_cached > 0)
        if (gen_lower(w, FOLIO_TIER_HOST, 1000) == 0) break;
    gen_lower(w, FOLIO_TIER_DISK, 1000);
    CHECK_INT(gen_stats(&w->p).num_cached + gen_stats(&w->p).host_cached, 0);
}

/* ------------------------------------------------------------------------------------- survival */

static void check_survival(const gen_geometry *g, int64_t host)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, g, 64, host, 80));
    for (int i = 0; i < GEN_REQUESTS; i++) folio_sequence_destroy(gen_filled(&w, &w.r[i], 39));
    lower_all(&w, host);
    int64_t frames = gen_stats(&w.p).store_used;
    CHECK(frames > 0);
    gen_pool_close(&w.p);
    for (int life = 0; life < 2; life++) {
        REQUIRE_TEST(gen_world_pool(&w, 64, host, 80));
        CHECK_INT(gen_stats(&w.p).store_used, frames);
        for (int i = 0; i < GEN_REQUESTS; i++) {
            folio_sequence *s = gen_sequence(&w, &w.r[i]);
            gen_poison_free(&w);
            CHECK_INT(gen_match(&w, s, &w.r[i], 38), 36);
            gen_end(&w.p, s, &w.r[i]);
        }
        folio_pool_stats t = gen_stats(&w.p);
        CHECK_INT(t.hit_tokens, GEN_REQUESTS * 36);
        CHECK_INT(t.store_warnings + t.store_errors, 0);
        gen_pool_close(&w.p);
    }
    gen_world_close(&w);
}

TEST(swap_store, prefixes_survive_their_pool)
{
    for (int g = 0; g < COUNT_OF(geometries); g++) {
        check_survival(geometries[g], 0);
        check_survival(geometries[g], 12);
    }
}

/* A swapped sequence is nobody's after its pool: its frames are free for the next one. */
TEST(swap_store, sequences_do_not_survive)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 32, 0, 12));
    folio_sequence *s = gen_filled(&w, &w.r[0], 37);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_INT(gen_stats(&w.p).store_used, 10);
    folio_sequence_destroy(s);
    CHECK_INT(gen_stats(&w.p).store_used, 0);
    gen_pool_close(&w.p);
    REQUIRE_TEST(gen_world_pool(&w, 32, 0, 12));
    CHECK_INT(gen_stats(&w.p).store_used, 0);
    s = gen_sequence(&w, &w.r[0]);
    CHECK_INT(gen_match(&w, s, &w.r[0], 38), 0);
    folio_sequence_destroy(s);
    gen_world_close(&w);
}

TEST(swap_store, hash_keys_and_sizes_of_the_next_pool)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_model(&w, &gen_small, NULL));
    folio_pool_desc desc = gen_world_desc(&w, 32, 0, 20);
    folio_status status;
    desc.hash_key = 77;
    REQUIRE_TEST(gen_pool_open(&w.p, &w.m, &desc, NULL));
    folio_sequence_destroy(gen_filled(&w, &w.r[0], 36));
    CHECK_INT(gen_lower(&w, FOLIO_TIER_DISK, 100), 9);
    gen_pool_close(&w.p);
    desc.hash_key = 78;
    support_mark_error();
    CHECK(!gen_pool_open(&w.p, &w.m, &desc, &status));
    support_refused(__FILE__, __LINE__, "another hash key", status, FOLIO_ERR_ARGUMENT, "hash");
    /* The file's key, given or not; a file that may be larger; one that may be smaller. */
    const int64_t frames[] = {20, 20, 40, 6};
    for (int i = 0; i < COUNT_OF(frames); i++) {
        desc = gen_world_desc(&w, 32, 0, frames[i]);
        desc.hash_key = i == 0 ? 77 : 0;
        REQUIRE_TEST(gen_pool_open(&w.p, &w.m, &desc, NULL));
        int64_t all = gen_stats(&w.p).store_frames;
        CHECK(all >= frames[i] - 1 && all < 3 * frames[i]);
        folio_sequence *s = gen_sequence(&w, &w.r[0]);
        int64_t matched = gen_match(&w, s, &w.r[0], 36);
        CHECK(matched == 36 || (i == 3 && matched < 36));
        gen_end(&w.p, s, &w.r[0]);
        gen_pool_close(&w.p);
    }
    gen_world_close(&w);
}

/* Only the least recently used frames make room; the most recent prefix is found again. */
TEST(swap_store, a_full_store_replaces_old_frames)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 64, 0, 12));
    for (int i = 0; i < GEN_REQUESTS; i++) {
        folio_sequence_destroy(gen_filled(&w, &w.r[i], 36));
        gen_lower(&w, FOLIO_TIER_DISK, 100);
        CHECK_INT(gen_stats(&w.p).num_free, 64);
    }
    folio_pool_stats t = gen_stats(&w.p);
    CHECK(t.store_evictions > 0 && t.store_used <= t.store_frames);
    for (int i = GEN_REQUESTS - 1; i >= 0; i--) {
        folio_sequence *s = gen_sequence(&w, &w.r[i]);
        int64_t matched = gen_match(&w, s, &w.r[i], 36);
        if (i == GEN_REQUESTS - 1) CHECK_INT(matched, 36);
        gen_end(&w.p, s, &w.r[i]);
    }
    gen_world_close(&w);
}

TEST(swap_store, a_full_store_takes_all_or_nothing)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_model(&w, &gen_small, NULL));
    for (int64_t frames = 2; frames <= 12; frames++) {
        unlink(w.store);
        REQUIRE_TEST(gen_world_pool(&w, 24, 0, frames));
        int64_t room = gen_stats(&w.p).store_frames;
        CHECK(room >= 1);
        folio_sequence *a = gen_filled(&w, &w.r[0], 17), *b = NULL;
        CHECK_OK(folio_sequence_fork(a, &b));
        folio_status status = folio_sequence_swap_out(a, FOLIO_TIER_DISK, NULL, NULL);
        CHECK_INT(status, room < 5 ? FOLIO_ERR_TOO_LARGE : FOLIO_OK);
        /* Frames of a swapped sequence make no room: not for another one, not for cached blocks. */
        status = folio_sequence_swap_out(b, FOLIO_TIER_DISK, NULL, NULL);
        CHECK_INT(status, room < 5 ? FOLIO_ERR_TOO_LARGE : room < 10 ? FOLIO_ERR_FULL : FOLIO_OK);
        folio_sequence_destroy(b);
        folio_sequence *c = gen_filled(&w, &w.r[2], 26);
        folio_sequence_destroy(c);
        (void)folio_pool_swap_out(w.p.pool, FOLIO_TIER_DISK, 20, NULL, NULL, NULL);
        CHECK_OK(folio_pool_check(w.p.pool));
        if (room >= 5) CHECK_OK(folio_sequence_swap_in(a, NULL, NULL));
        gen_check_at(a, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 17);
        gen_end(&w.p, a, &w.r[0]);
        gen_pool_close(&w.p);
    }
    gen_model_close(&w.m);
    unlink(w.store);
}

/* ------------------------------------------------------------------------------------- refusals */

static void check_refused(gen_model *m, const folio_pool_desc *desc, folio_status expected,
                          const char *words)
{
    gen_pool p;
    folio_status status;
    support_mark_error();
    if (gen_pool_open(&p, m, desc, &status)) gen_pool_close(&p);
    support_refused(__FILE__, __LINE__, "folio_pool_create", status, expected, words);
}

TEST(swap_store, files_of_others_are_refused)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 32, 0, 20));
    folio_sequence_destroy(gen_filled(&w, &w.r[0], 36));
    CHECK_INT(gen_lower(&w, FOLIO_TIER_DISK, 100), 9);
    folio_pool_desc desc = gen_world_desc(&w, 32, 0, 20);
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "use"); /* by the pool that is open */
    gen_pool_close(&w.p);
    desc.model = "another";
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "toy|another");
    desc.model = NULL;
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "toy");
    desc.model = "toy";
    gen_geometry others[] = {gen_small, gen_small, gen_small, gen_small, gen_small};
    others[0].block_size = 16;
    others[1].kv_dtype = FOLIO_BF16;
    others[2].num_layer_groups = 2, others[2].window = 5;
    others[3].encoder = true;
    others[4].v_in_k = true;
    for (int i = 0; i < COUNT_OF(others); i++) {
        gen_model other;
        REQUIRE_TEST(gen_model_open(&other, &others[i], 1, NULL));
        desc.store_bytes = gen_store_bytes(&other, 20);
        check_refused(&other, &desc, FOLIO_ERR_ARGUMENT, "");
        gen_model_close(&other);
    }
    /* After all that the file is as it was. */
    REQUIRE_TEST(gen_world_pool(&w, 32, 0, 20));
    folio_sequence *s = gen_sequence(&w, &w.r[0]);
    CHECK_INT(gen_match(&w, s, &w.r[0], 36), 36);
    CHECK(gen_contents_right(&w.p, s, &w.r[0]));
    folio_sequence_destroy(s);
    gen_world_close(&w);
}

TEST(swap_store, files_that_are_no_store_are_left_alone)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_model(&w, &gen_small, NULL));
    folio_pool_desc desc = gen_world_desc(&w, 32, 0, 20);
    char text[9000];
    memset(text, 'x', sizeof text);
    for (int size = 1; size <= 9000; size += 1777) {
        FILE *file = fopen(w.store, "wb");
        REQUIRE_TEST(file != NULL && fwrite(text, 1, (size_t)size, file) == (size_t)size);
        fclose(file);
        check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "store");
        char back[9001];
        file = fopen(w.store, "rb");
        REQUIRE_TEST(file != NULL);
        CHECK(fread(back, 1, sizeof back, file) == (size_t)size);
        CHECK(memcmp(text, back, (size_t)size) == 0);
        fclose(file);
    }
    /* An empty file is what a process killed while making it leaves. */
    FILE *file = fopen(w.store, "wb");
    REQUIRE_TEST(file != NULL);
    fclose(file);
    REQUIRE_TEST(gen_world_pool(&w, 32, 0, 20));
    gen_pool_close(&w.p);
    unlink(w.store);
    desc.store_path = "/nowhere/at/all/folio.store";
    check_refused(&w.m, &desc, FOLIO_ERR_IO, "/nowhere/at/all/folio.store");
    desc.store_path = "/";
    check_refused(&w.m, &desc, ANY_REFUSAL, "/");
    gen_world_close(&w);
}

TEST(swap_store, impossible_tiers_are_refused)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_model(&w, &gen_small, NULL));
    folio_pool_desc desc = gen_world_desc(&w, 32, 0, 20);
    desc.store_bytes = 1;
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "1");
    desc.store_bytes = -5;
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "-5");
    desc.store_bytes = 0;
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "0");
    desc = gen_world_desc(&w, 32, 0, 20);
    char name[300];
    memset(name, 'n', sizeof name);
    name[256] = 0;
    desc.model = name;
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "255");
    desc = gen_world_desc(&w, 32, -1, 0);
    check_refused(&w.m, &desc, FOLIO_ERR_ARGUMENT, "-1");
    struct stat st;
    CHECK(stat(w.store, &st) != 0); /* none of these made a file */
    /* Tiers without caches to copy from. */
    folio_pool *pool = NOWHERE;
    desc = gen_world_desc(&w, 32, 8, 0);
    desc.block_size = 4;
    REFUSED(folio_pool_create(w.m.ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "cache");
    CHECK(pool == NULL);
    desc = gen_world_desc(&w, 32, 0, 20);
    desc.block_size = 4;
    pool = NOWHERE;
    REFUSED(folio_pool_create(w.m.ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "cache");
    CHECK(pool == NULL);
    CHECK(stat(w.store, &st) != 0);
    gen_world_close(&w);
}

/* --------------------------------------------------------------------------------------- events */

enum { MAX_KNOWN = 512 };

/* What the prefix cache holds, by its events only. */
typedef struct {
    folio_tier tier;
    int32_t group;
    uint64_t hash[2];
} entry;

typedef struct {
    const gen_request *requests;
    int32_t block_size;
    entry known[MAX_KNOWN];
    int64_t num_known, stored[3], removed[3];
    struct {
        uint64_t hash[2];
        int64_t number; /* of the block in its sequence */
    } chain[MAX_KNOWN];
    int64_t num_chain;
    int faults;
} witness;

static int64_t find_entry(const witness *w, const folio_cache_event *e)
{
    for (int64_t i = 0; i < w->num_known; i++) {
        const entry *k = &w->known[i];
        if (k->tier == e->tier && k->group == e->layer_group && memcmp(k->hash, e->hash, 16) == 0)
            return i;
    }
    return -1;
}

/* The block's number, by its parent's; -1: nothing is known of that. */
static int64_t number_of(witness *w, const folio_cache_event *e)
{
    int64_t number = e->parent[0] == 0 && e->parent[1] == 0 ? 0 : -1;
    for (int64_t i = 0; i < w->num_chain; i++) {
        if (memcmp(w->chain[i].hash, e->hash, 16) == 0) return w->chain[i].number;
        if (memcmp(w->chain[i].hash, e->parent, 16) == 0) number = w->chain[i].number + 1;
    }
    if (number < 0 || w->num_chain == MAX_KNOWN) return -1;
    memcpy(w->chain[w->num_chain].hash, e->hash, 16);
    w->chain[w->num_chain++].number = number;
    return number;
}

static void on_event(void *user, const folio_cache_event *e)
{
    witness *w = user;
    int64_t at = find_entry(w, e);
    if (e->struct_size != sizeof *e || e->tier < 0 || e->tier > FOLIO_TIER_DISK) w->faults++;
    if ((e->tier == FOLIO_TIER_DISK) != (e->block == -1)) w->faults++;
    if (e->kind == FOLIO_EVENT_STORED) {
        if (at >= 0 || w->num_known == MAX_KNOWN) {
            w->faults++;
            return;
        }
        entry *k = &w->known[w->num_known++];
        *k = (entry){.tier = e->tier, .group = e->layer_group};
        memcpy(k->hash, e->hash, 16);
        w->stored[e->tier]++;
    } else {
        if (at < 0) w->faults++;
        else w->known[at] = w->known[--w->num_known];
        w->removed[e->tier]++;
    }
    if (e->token_ids == NULL) return; /* on disk, where nobody looked yet */
    int64_t number = number_of(w, e);
    bool right = false;
    if (number >= 0 && e->num_tokens == w->block_size)
        for (int i = 0; i < GEN_REQUESTS; i++)
            right = right || memcmp(w->requests[i].tokens + number * w->block_size, e->token_ids,
                                    (size_t)w->block_size * 4) == 0;
    if (!right) w->faults++;
}

static int64_t count_known(const witness *w, folio_tier tier)
{
    int64_t n = 0;
    for (int64_t i = 0; i < w->num_known; i++) n += w->known[i].tier == tier;
    return n;
}

/* With nothing held and no sequence on disk, the counts are those of the tiers. */
static void check_witness(gen_world *w, const witness *seen)
{
    folio_pool_stats t = gen_stats(&w->p);
    CHECK_INT(seen->faults, 0);
    CHECK_INT(t.num_used, 0);
    CHECK_INT(count_known(seen, FOLIO_TIER_DEVICE), t.num_cached);
    CHECK_INT(count_known(seen, FOLIO_TIER_HOST), t.host_cached);
    CHECK_INT(count_known(seen, FOLIO_TIER_DISK), t.store_used);
    CHECK_OK(folio_pool_check(w->p.pool));
}

TEST(swap_store, events_tell_what_each_tier_holds)
{
    static gen_world w;
    static witness seen;
    for (int g = 0; g < COUNT_OF(geometries); g++) {
        REQUIRE_TEST(gen_world_model(&w, geometries[g], NULL));
        folio_pool_desc desc = gen_world_desc(&w, 40, 16, 20);
        desc.on_event = on_event;
        desc.event_user = &seen;
        for (int life = 0; life < 2; life++) {
            seen = (witness){.requests = w.r, .block_size = geometries[g]->block_size};
            REQUIRE_TEST(gen_pool_open(&w.p, &w.m, &desc, NULL));
            check_witness(&w, &seen);
            if (life == 1) CHECK(count_known(&seen, FOLIO_TIER_DISK) > 0);
            for (int i = 0; i < 3 * GEN_REQUESTS; i++) {
                const gen_request *r = &w.r[i % GEN_REQUESTS];
                folio_sequence *s = gen_sequence(&w, r);
                gen_match(&w, s, r, 38);
                CHECK_OK(gen_feed(&w.p, s, r, 39));
                if (i % 3 == 1) {
                    CHECK_OK(folio_sequence_swap_out(s, i % 2 ? FOLIO_TIER_HOST : FOLIO_TIER_DISK,
                                                     NULL, NULL));
                    if (i % 4 != 1) CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
                }
                folio_sequence_destroy(s);
                check_witness(&w, &seen);
                gen_lower(&w, FOLIO_TIER_HOST, 5);
                check_witness(&w, &seen);
                gen_lower(&w, FOLIO_TIER_DISK, 4);
                check_witness(&w, &seen);
            }
            for (int tier = 0; tier < 3; tier++)
                CHECK(seen.stored[tier] > 0 && seen.removed[tier] > 0);
            if (life == 1) {
                CHECK_OK(folio_pool_forget(w.p.pool));
                check_witness(&w, &seen);
                CHECK_INT(seen.num_known, 0);
            }
            gen_pool_close(&w.p);
        }
        gen_world_close(&w);
    }
}
