/*
 * test_swap_store.c: the file of the disk tier as a pool sees it: what one pool sent down the next
 * one finds; files of another kind are refused with a sentence.
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
GEN_TEST(swap_store, sequences_do_not_survive, gen_small, 32, 0, 12)
{
    folio_sequence *s = gen_filled(w, &w->r[0], 37);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_INT(gen_stats(&w->p).store_used, 10);
    folio_sequence_destroy(s);
    CHECK_INT(gen_stats(&w->p).store_used, 0);
    gen_pool_close(&w->p);
    REQUIRE_TEST(gen_world_pool(w, 32, 0, 12));
    CHECK_INT(gen_stats(&w->p).store_used, 0);
    s = gen_sequence(w, &w->r[0]);
    CHECK_INT(gen_match(w, s, &w->r[0], 38), 0);
    folio_sequence_destroy(s);
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

GEN_TEST(swap_store, files_of_others_are_refused, gen_small, 32, 0, 20)
{
    folio_sequence_destroy(gen_filled(w, &w->r[0], 36));
    CHECK_INT(gen_lower(w, FOLIO_TIER_DISK, 100), 9);
    folio_pool_desc desc = gen_world_desc(w, 32, 0, 20);
    check_refused(&w->m, &desc, FOLIO_ERR_ARGUMENT, "use"); /* by the pool that is open */
    gen_pool_close(&w->p);
    folio_kv_passport other = FOLIO_WITH(folio_kv_passport, .model = "another");
    desc.passport = &other;
    check_refused(&w->m, &desc, FOLIO_ERR_ARGUMENT, "toy|another");
    desc.passport = NULL;
    check_refused(&w->m, &desc, FOLIO_ERR_ARGUMENT, "toy");
    desc = gen_world_desc(w, 32, 0, 20);
    gen_geometry others[] = {gen_small, gen_small, gen_small, gen_small, gen_small};
    others[0].block_size = 16;
    others[1].kv_dtype = FOLIO_BF16;
    others[2].num_layer_groups = 2, others[2].window = 5;
    others[3].encoder = true;
    others[4].v_in_k = true;
    for (int i = 0; i < COUNT_OF(others); i++) {
        gen_model stranger;
        REQUIRE_TEST(gen_model_open(&stranger, &others[i], 1, NULL));
        desc.store_bytes = gen_store_bytes(&stranger, 20);
        check_refused(&stranger, &desc, FOLIO_ERR_ARGUMENT, "");
        gen_model_close(&stranger);
    }
    /* After all that the file is as it was. */
    REQUIRE_TEST(gen_world_pool(w, 32, 0, 20));
    folio_sequence *s = gen_sequence(w, &w->r[0]);
    CHECK_INT(gen_match(w, s, &w->r[0], 36), 36);
    CHECK(gen_contents_right(&w->p, s, &w->r[0]));
    folio_sequence_destroy(s);
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
    folio_kv_passport long_name = FOLIO_WITH(folio_kv_passport, .model = name);
    desc.passport = &long_name;
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
