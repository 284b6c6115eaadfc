/*
 * test_resume.c: folio_sequence_resume brings a preempted sequence back, however it was preempted; an
 * engine that calls it need not know. What came back is judged by its contents and by the rows that
 * are computed from it.
 */
#include "pool/generation_rig.h"

static const gen_geometry windowed = {.backend = "reference",
                                      .block_size = 4,
                                      .kv_dtype = FOLIO_F32,
                                      .num_layer_groups = 2,
                                      .window = 9};
static const gen_geometry translating = {.backend = "cpu",
                                         .block_size = 4,
                                         .kv_dtype = FOLIO_F32,
                                         .num_layer_groups = 1,
                                         .encoder = true};

static void end(folio_transfer *t)
{
    if (t == NULL) return;
    CHECK_OK(folio_transfer_wait(t));
    folio_transfer_destroy(t);
}

/* Preempted again and again by either policy, with room and without: it never notices. */
static void check_either_policy(const gen_geometry *g, int64_t host)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, g, 48, host, host > 0 ? 0 : 30));
    folio_sequence *s = gen_filled(&w, &w.r[0], 6);
    for (int64_t len = 6; len < 39; len += 5) {
        folio_tokens tokens = gen_tokens(&w.r[0], len);
        folio_transfer *t = NULL;
        bool swap = len % 2 == 1, async = len % 3 == 0;
        CHECK_OK(folio_sequence_preempt(s, swap ? FOLIO_PREEMPT_SWAP : FOLIO_PREEMPT_RECOMPUTE,
                                        NULL, NULL));
        if (len % 4 == 0) CHECK_OK(folio_pool_forget(w.p.pool)); /* all must be computed again */
        gen_poison_free(&w);
        int64_t computed = -1;
        CHECK_OK(folio_sequence_resume(s, &tokens, &computed, NULL, async ? &t : NULL));
        bool coming = t != NULL;
        end(t);
        folio_sequence_info info = gen_info(s);
        CHECK(computed == info.committed_len || (coming && computed == 0));
        CHECK_INT(info.state, FOLIO_SEQUENCE_RESIDENT);
        CHECK_INT(info.len, swap ? len : len % 4 == 0 ? 0 : len / 4 * 4);
        CHECK(gen_contents_right(&w.p, s, &w.r[0]));
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], len + 5 < 39 ? len + 5 : 39));
    }
    folio_sequence_destroy(s);
    gen_world_close(&w);
}

TEST(resume, either_policy)
{
    check_either_policy(&gen_small, 30);
    check_either_policy(&gen_small, 0);
    check_either_policy(&windowed, 30);
}

/* A sequence that is there stays as it is; an empty one looks up what it is told to. */
TEST(resume, residents_stay)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 48, 30, 0));
    folio_sequence *s = gen_filled(&w, &w.r[0], 14), *other = gen_sequence(&w, &w.r[0]);
    folio_tokens tokens = gen_tokens(&w.r[0], 14);
    folio_transfer *t = NOWHERE;
    folio_pool_stats before = gen_stats(&w.p), after;
    CHECK_OK(folio_sequence_resume(s, &tokens, NULL, NULL, &t));
    CHECK(t == NULL);
    CHECK_OK(folio_sequence_resume(other, NULL, NULL, NULL, NULL));
    after = gen_stats(&w.p);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_INT(gen_info(s).len, 14);
    CHECK_INT(gen_info(other).len, 0);
    for (int again = 0; again < 2; again++) {
        CHECK_OK(folio_sequence_resume(other, &tokens, NULL, NULL, NULL));
        CHECK_INT(gen_info(other).len, 12);
    }
    tokens.struct_size = 0;
    CHECK_OK(folio_sequence_truncate(other, 0));
    REFUSED(folio_sequence_resume(other, &tokens, NULL, NULL, NULL), FOLIO_ERR_ARGUMENT,
            "struct_size");
    REFUSED(folio_sequence_resume(NULL, NULL, NULL, NULL, NULL), FOLIO_ERR_ARGUMENT,
            "sequence is NULL");
    folio_sequence_destroy(s);
    folio_sequence_destroy(other);
    gen_world_close(&w);
}

/* On its way out or in: the call waits for the one, and shares the other. */
TEST(resume, while_a_transfer_is_under_way)
{
    static gen_world w;
    for (int round = 0; round < 20; round++) {
        support_counter memory = {0}; /* spoils what is freed */
        folio_allocator a = support_allocator(&memory);
        REQUIRE_TEST(gen_world_model(&w, &gen_small, &a) && gen_world_pool(&w, 48, 0, 30));
        folio_sequence *s = gen_filled(&w, &w.r[0], 22);
        folio_transfer *out = NULL, *in = NULL, *again = NULL;
        CHECK_OK(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, &out));
        CHECK_OK(folio_sequence_resume(s, NULL, NULL, NULL, &in));
        CHECK(folio_transfer_is_done(out));
        CHECK_OK(folio_sequence_resume(s, NULL, NULL, NULL, round % 2 ? &again : NULL));
        if (round % 2 == 0) gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 22);
        end(again);
        end(in);
        end(out);
        gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 22);
        CHECK(gen_contents_right(&w.p, s, &w.r[0]));
        folio_sequence_destroy(s);
        gen_world_close(&w);
        CHECK_INT(memory.live, 0);
    }
}

/* Encoder tokens come back with a swap; recomputed, they are to be reserved again. */
TEST(resume, encoders)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &translating, 64, 40, 0));
    for (int swap = 0; swap < 2; swap++) {
        folio_sequence *s = gen_filled(&w, &w.r[0], 14);
        folio_tokens tokens = gen_tokens(&w.r[0], 14);
        int64_t encoder_len = gen_info(s).encoder_len;
        CHECK(encoder_len > 0);
        CHECK_OK(folio_sequence_preempt(s, swap ? FOLIO_PREEMPT_SWAP : FOLIO_PREEMPT_RECOMPUTE,
                                        NULL, NULL));
        CHECK_OK(folio_sequence_resume(s, &tokens, NULL, NULL, NULL));
        CHECK_INT(gen_info(s).encoder_len, swap ? encoder_len : 0);
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 39));
        folio_sequence_destroy(s);
    }
    gen_world_close(&w);
}
