/*
 * test_swap.c: K and V in host memory and on disk: what is moved and in which order, what is forgotten, transfers
 * that end in any order, refusals and counts. That what comes back is right, of sequences, forks and cached blocks
 * through tiers with room and without, is what test_generation.c and test_pool_fuzz.c say. The store's file is the
 * matter of test_swap_store.c, what breaks of test_swap_faults.c.
 */
#include "pool/generation_rig.h"

#include <sched.h>
#include <unistd.h>

static const gen_geometry windowed = {
    .backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_BF16, .num_layer_groups = 2, .window = 9};
static const gen_geometry translating = {.backend = "reference",
                                         .block_size = 4,
                                         .kv_dtype = FOLIO_F32,
                                         .num_layer_groups = 2,
                                         .window = 6,
                                         .encoder = true};
static const gen_geometry packed_latent = {.backend = "cpu",
                                           .block_size = 16,
                                           .kv_dtype = FOLIO_BF16,
                                           .num_layer_groups = 1,
                                           .v_in_k = true};
static const gen_geometry *const geometries[] = {&gen_small,   &windowed,   &gen_quantised,
                                                 &translating, &gen_latent, &packed_latent};

static void wait_and_forget(folio_transfer *t)
{
    if (t == NULL) return;
    CHECK_OK(folio_transfer_wait(t));
    folio_transfer_destroy(t);
}

/* ----------------------------------------------------------------------------------- sequences */

/* Poison, 32 bytes of it side by side. */
static bool file_is_poisoned(const char *path)
{
    FILE *file = fopen(path, "rb");
    int byte, run = 0;
    if (file == NULL) return true;
    while (run < 32 && (byte = fgetc(file)) != EOF) run = byte == 0xFF ? run + 1 : 0;
    fclose(file);
    return run == 32;
}

/* What lay in the slots behind a sequence's last token is nobody's to read in the file. */
TEST(swap, unused_slots_do_not_reach_the_file)
{
    static gen_world w;
    for (int g = 0; g < COUNT_OF(geometries); g++)
        for (int by_host = 0; by_host < 2; by_host++) {
            REQUIRE_TEST(gen_world_open(&w, geometries[g], 48, 30, 40));
            folio_sequence *s = gen_filled(&w, &w.r[0], 17);
            if (by_host) CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
            CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
            CHECK_INT(gen_stats(&w.p).store_errors, 0);
            CHECK_MSG(!file_is_poisoned(w.store), "geometry %d, %s", g,
                      by_host ? "host" : "device");
            CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
            CHECK(gen_contents_right(&w.p, s, &w.r[0]));
            folio_sequence_destroy(s);
            gen_world_close(&w);
        }
}

/* Of a windowed group only what the next token sees is moved. */
GEN_TEST(swap, only_the_window_is_moved, windowed, 48, 40, 0)
{
    folio_sequence *s = gen_filled(w, &w->r[0], 36);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
    /* All 9 blocks of group 0; of group 1, keys 28 .. 35: two blocks. */
    CHECK_INT(gen_stats(&w->p).blocks_out, 11);
    CHECK_INT(gen_stats(&w->p).host_used, 11);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    CHECK(gen_contents_right(&w->p, s, &w->r[0]));
    folio_sequence_destroy(s);
}

/* ------------------------------------------------------------------------------- cached blocks */

/* The oldest go first, a sequence's last before its first: what stays is a prefix. */
GEN_TEST(swap, the_least_recently_used_go_first, gen_small, 32, 32, 0)
{
    folio_sequence_destroy(gen_filled(w, &w->r[2], 24));
    folio_sequence_destroy(gen_filled(w, &w->r[0], 24));
    CHECK_INT(gen_lower(w, FOLIO_TIER_HOST, 6), 6);
    CHECK_INT(gen_lower(w, FOLIO_TIER_HOST, 2), 2);
    folio_sequence *s = gen_sequence(w, &w->r[0]);
    int64_t matched = -1;
    folio_transfer *t = NULL;
    folio_tokens tokens = gen_tokens(&w->r[0], 24);
    CHECK_OK(folio_sequence_match(s, &tokens, &matched, &t));
    CHECK_INT(matched, 0);
    CHECK(t != NULL);
    wait_and_forget(t);
    CHECK_INT(gen_stats(&w->p).blocks_in, 2); /* four had stayed: its first ones */
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 24);
    CHECK_INT(gen_info(s).matched_len, 24);
    CHECK(gen_contents_right(&w->p, s, &w->r[0]));
    folio_sequence_destroy(s);
}

TEST(swap, a_match_takes_what_there_is_room_for)
{
    static gen_world w;
    for (int tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        REQUIRE_TEST(gen_world_open(&w, &gen_small, 12, tier == FOLIO_TIER_HOST ? 12 : 0,
                                    tier == FOLIO_TIER_HOST ? 0 : 20));
        folio_sequence_destroy(gen_filled(&w, &w.r[0], 32));
        CHECK_INT(gen_lower(&w, (folio_tier)tier, 100), 8);
        folio_sequence *other = gen_filled(&w, &w.r[2], 37); /* 10 of 12 */
        folio_sequence *s = gen_sequence(&w, &w.r[0]);
        CHECK_INT(gen_match(&w, s, &w.r[0], 32), 8);
        CHECK(gen_contents_right(&w.p, s, &w.r[0]));
        folio_sequence_destroy(other);
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 39));
        folio_sequence_destroy(s);
        gen_world_close(&w);
    }
}

/* What was computed before a forget is never matched after it, wherever it was at that moment. */
TEST(swap, what_is_away_is_forgotten_too)
{
    static gen_world w;
    for (int round = 0; round < 8; round++) {
        folio_tier tier = round % 2 ? FOLIO_TIER_DISK : FOLIO_TIER_HOST;
        folio_transfer *t = NULL;
        REQUIRE_TEST(gen_world_open(&w, &windowed, 64, 40, 40));
        folio_sequence *a = gen_filled(&w, &w.r[0], 30), *b = gen_sequence(&w, &w.r[0]);
        CHECK_OK(folio_sequence_swap_out(a, tier, NULL, &t)); /* gone, or on its way */
        if (round >= 4) wait_and_forget(t), t = NULL;
        CHECK_OK(folio_pool_forget(w.p.pool));
        wait_and_forget(t);
        CHECK_OK(folio_pool_check(w.p.pool));
        CHECK_OK(folio_sequence_swap_in(a, NULL, NULL));
        CHECK(gen_contents_right(&w.p, a, &w.r[0]));
        CHECK_OK(gen_feed(&w.p, a, &w.r[0], 39)); /* continues what was forgotten */
        if (round % 4 < 2) folio_sequence_destroy(a);
        CHECK_INT(gen_match(&w, b, &w.r[0], 38), 0);
        CHECK_OK(gen_feed(&w.p, b, &w.r[0], 39)); /* this one is new */
        if (round % 4 >= 2) folio_sequence_destroy(a);
        folio_sequence_destroy(b);
        b = gen_sequence(&w, &w.r[0]);
        CHECK_INT(gen_match(&w, b, &w.r[0], 38), 36);
        folio_sequence_destroy(b);
        gen_world_close(&w);
    }
}

/* ----------------------------------------------------------------------------------- transfers */

static void until_ended(const folio_sequence *s)
{
    for (;;) {
        folio_sequence_state state = gen_info(s).state;
        if (state == FOLIO_SEQUENCE_RESIDENT || state == FOLIO_SEQUENCE_SWAPPED) return;
        sched_yield();
    }
}

/* Every order of done, wait and destroy, of the sequence's end and the handle's. */
GEN_TEST(swap, handles_in_any_order, windowed, 64, 60, 80)
{
    for (int order = 0; order < 12; order++) {
        folio_tier tier = order % 2 ? FOLIO_TIER_DISK : FOLIO_TIER_HOST;
        folio_sequence *s = gen_filled(w, &w->r[0], 30);
        folio_transfer *t = NOWHERE;
        if (order >= 6) CHECK_OK(folio_sequence_swap_out(s, tier, NULL, NULL));
        folio_status status = order >= 6 ? folio_sequence_swap_in(s, NULL, &t)
                                         : folio_sequence_swap_out(s, tier, NULL, &t);
        CHECK_OK(status);
        REQUIRE_TEST(status == FOLIO_OK && t != NULL && t != NOWHERE);
        bool destroyed = false;
        switch (order % 6 / 2) {
        case 0: /* asked until it is done, then waited for twice */
            while (!folio_transfer_is_done(t)) sched_yield();
            CHECK_OK(folio_transfer_wait(t));
            CHECK_OK(folio_transfer_wait(t));
            CHECK_INT(folio_transfer_is_done(t), 1);
            folio_transfer_destroy(t);
            break;
        case 1: /* forgotten at once: it goes on */
            folio_transfer_destroy(t);
            until_ended(s);
            break;
        default: /* the sequence goes first */
            folio_sequence_destroy(s);
            destroyed = true;
            CHECK_INT(folio_transfer_is_done(t), 1);
            (void)folio_transfer_wait(t);
            folio_transfer_destroy(t);
        }
        CHECK_OK(folio_pool_check(w->p.pool));
        if (destroyed) continue;
        gen_check_at(s, order >= 6 ? FOLIO_SEQUENCE_RESIDENT : FOLIO_SEQUENCE_SWAPPED,
                     order >= 6 ? FOLIO_TIER_DEVICE : tier, 30);
        if (order < 6) CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
        CHECK(gen_contents_right(&w->p, s, &w->r[0]));
        folio_sequence_destroy(s);
    }
    folio_transfer_destroy(NULL);
}

/* -------------------------------------------------------------------- refusals and bookkeeping */

TEST(swap, states_refuse_what_they_cannot_do)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &translating, 64, 60, 60));
    folio_tokens tokens = gen_tokens(&w.r[0], 20);
    for (int tier = FOLIO_TIER_HOST; tier <= FOLIO_TIER_DISK; tier++) {
        folio_sequence *s = gen_filled(&w, &w.r[0], 20), *out = NOWHERE;
        folio_transfer *t = NULL;
        REFUSED(folio_sequence_swap_in(s, NULL, NULL), FOLIO_ERR_ARGUMENT, "");
        REFUSED(folio_sequence_swap_out(s, FOLIO_TIER_DEVICE, NULL, NULL), FOLIO_ERR_ARGUMENT, "");
        REFUSED(folio_sequence_swap_out(s, (folio_tier)3, NULL, NULL), FOLIO_ERR_ARGUMENT, "3");
        REFUSED(folio_sequence_preempt(s, (folio_preemption)7, NULL, NULL), FOLIO_ERR_ARGUMENT,
                "7");
        CHECK_OK(folio_sequence_reserve(s, 3, 0, NULL));
        REFUSED(folio_sequence_swap_out(s, (folio_tier)tier, NULL, NULL), FOLIO_ERR_ARGUMENT, "3");
        CHECK_OK(folio_sequence_truncate(s, 20));
        CHECK_OK(folio_sequence_swap_out(s, (folio_tier)tier, NULL, &t));
        for (int pass = 0; pass < 2; pass++) { /* leaving or gone; then gone for sure */
            folio_batch_clear(w.p.batch[0]);
            REFUSED(folio_sequence_reserve(s, 1, 0, NULL), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_sequence_reserve_encoder(s, 1, 0, NULL), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_sequence_match(s, &tokens, NULL, NULL), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_sequence_commit(s, &tokens), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_sequence_truncate(s, 10), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_sequence_fork(s, &out), FOLIO_ERR_ARGUMENT, "");
            CHECK(out == NULL);
            out = NOWHERE;
            REFUSED(folio_sequence_release_window(s), FOLIO_ERR_ARGUMENT, "");
            REFUSED(folio_batch_add_sequences(w.p.batch[0], 0, &s, 1, NULL), FOLIO_ERR_ARGUMENT,
                    "sequences[0]: the sequence is not on the device");
            REFUSED(folio_sequence_swap_out(s, (folio_tier)tier, NULL, NULL), FOLIO_ERR_ARGUMENT,
                    "");
            wait_and_forget(t), t = NULL;
        }
        gen_check_at(s, FOLIO_SEQUENCE_SWAPPED, (folio_tier)tier, 20);
        CHECK_OK(folio_sequence_swap_in(s, NULL, &t));
        REFUSED(folio_sequence_swap_in(s, NULL, NULL), FOLIO_ERR_ARGUMENT, "");
        wait_and_forget(t);
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 39));
        folio_sequence_destroy(s);
        s = gen_sequence(&w, &w.r[0]); /* encoder tokens count as well */
        CHECK_OK(folio_sequence_reserve_encoder(s, 5, 0, NULL));
        REFUSED(folio_sequence_swap_out(s, (folio_tier)tier, NULL, NULL), FOLIO_ERR_ARGUMENT, "5");
        CHECK_OK(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL));
        CHECK_INT(gen_info(s).encoder_len, 0);
        CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 39));
        folio_sequence_destroy(s);
    }
    gen_world_close(&w);

    REQUIRE_TEST(gen_world_open(&w, &gen_small, 16, 0, 0));
    folio_sequence *s = gen_filled(&w, &w.r[0], 9);
    REFUSED(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL), FOLIO_ERR_ARGUMENT, "host");
    REFUSED(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL), FOLIO_ERR_ARGUMENT, "disk");
    REFUSED(folio_pool_swap_out(w.p.pool, FOLIO_TIER_HOST, 1, NULL, NULL, NULL), FOLIO_ERR_ARGUMENT,
            "host");
    REFUSED(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL), ANY_REFUSAL, "");
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 9);
    folio_sequence_destroy(s);
    gen_world_close(&w);
}

GEN_TEST(swap, preemption_by_policy, gen_small, 40, 6, 6)
{
    int64_t frames = gen_stats(&w->p).store_frames;
    folio_sequence *s[4];
    for (int i = 0; i < 4; i++) s[i] = gen_filled(w, &w->r[i], 21); /* 6 blocks, 0 and 1 share 5 */
    CHECK_OK(folio_sequence_reserve(s[0], 3, 0, NULL));             /* dropped */
    CHECK_OK(folio_sequence_preempt(s[0], FOLIO_PREEMPT_SWAP, NULL, NULL));
    gen_check_at(s[0], FOLIO_SEQUENCE_SWAPPED, FOLIO_TIER_HOST, 21);
    CHECK_OK(folio_sequence_preempt(s[2], FOLIO_PREEMPT_SWAP, NULL, NULL)); /* the host is full */
    gen_check_at(s[2], FOLIO_SEQUENCE_SWAPPED, FOLIO_TIER_DISK, 21);
    /* Both are full now, unless the file has room for more frames than asked for. */
    CHECK_OK(folio_sequence_reserve(s[3], 3, 0, NULL));
    if (frames < 12) {
        REFUSED(folio_sequence_preempt(s[3], FOLIO_PREEMPT_SWAP, NULL, NULL), FOLIO_ERR_FULL, "");
        CHECK_INT(gen_info(s[3]).state, FOLIO_SEQUENCE_RESIDENT);
        CHECK_INT(gen_info(s[3]).len, 21); /* the tokens not committed are gone all the same */
        CHECK_INT(gen_info(s[3]).committed_len, 21);
    }
    CHECK_OK(folio_sequence_preempt(s[3], FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
    gen_check_at(s[3], FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 0);
    CHECK_INT(gen_info(s[3]).num_blocks, 0);
    CHECK_INT(gen_match(w, s[3], &w->r[3], 20), 20); /* its own blocks, still cached */
    CHECK_OK(folio_sequence_swap_in(s[0], NULL, NULL));
    CHECK_OK(folio_sequence_swap_in(s[2], NULL, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK(gen_contents_right(&w->p, s[i], &w->r[i]));
        CHECK_OK(gen_feed(&w->p, s[i], &w->r[i], 39));
        folio_sequence_destroy(s[i]);
        CHECK_OK(folio_pool_check(w->p.pool));
    }
}

GEN_TEST(swap, statistics, gen_small, 20, 10, 20)
{
    folio_sequence *s = gen_sequence(w, &w->r[0]);
    CHECK_OK(gen_feed(&w->p, s, &w->r[0], 18)); /* 5 blocks, 4 of them cached ones */
    folio_pool_stats t = gen_stats(&w->p);
    CHECK(t.num_used == 5 && t.host_blocks == 10 && t.host_used == 0 && t.blocks_out == 0);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
    t = gen_stats(&w->p);
    CHECK_INT(t.host_used, 5);
    CHECK_INT(t.host_cached, 0);
    CHECK_INT(t.blocks_out, 5);
    CHECK_INT(t.num_used, 0);
    CHECK_INT(t.num_cached, 4);
    CHECK_INT(t.num_sequences, 1);
    CHECK_INT(t.blocks_in, 0);
    uint8_t states[10];
    int held = 0;
    CHECK_OK(folio_pool_get_block_states(w->p.pool, FOLIO_TIER_HOST, 0, 10, states));
    for (int i = 0; i < 10; i++) held += states[i] == FOLIO_BLOCK_USED;
    CHECK_INT(held, 5);
    CHECK_OK(folio_pool_forget(w->p.pool));
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    t = gen_stats(&w->p);
    CHECK_INT(t.host_used, 0);
    CHECK_INT(t.blocks_in, 5);
    CHECK_INT(t.num_used, 5);
    int64_t writes = t.store_writes, used = t.store_used;
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    t = gen_stats(&w->p);
    CHECK_INT(t.store_writes - writes, 5);
    CHECK_INT(t.store_used - used, 5);
    CHECK_INT(t.blocks_out, 10);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    t = gen_stats(&w->p);
    CHECK_INT(t.store_reads, 5);
    CHECK_INT(t.store_used, used);
    CHECK_INT(t.blocks_in, 10);
    CHECK_INT(t.store_warnings + t.store_errors, 0);
    CHECK_INT(t.store_frames, 20);
    folio_sequence_destroy(s);
}

/* From the device to host memory, on to disk, and back; with too few frames it stays in host memory. */
TEST(swap, from_host_on_to_disk)
{
    static gen_world w;
    for (int few = 0; few < 2; few++) {
        REQUIRE_TEST(gen_world_open(&w, &gen_small, 16, 16, few ? 3 : 20));
        folio_sequence *s = gen_sequence(&w, &w.r[0]);
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 18));
        CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
        REFUSED(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, NULL, NULL), FOLIO_ERR_ARGUMENT,
                "preempt|swapped out");
        int64_t held = gen_stats(&w.p).host_used;
        CHECK(held > 3);
        if (few) {
            REFUSED(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL), FOLIO_ERR_TOO_LARGE,
                    "blocks|store has 3 frames");
            CHECK_INT(gen_info(s).tier, FOLIO_TIER_HOST);
            CHECK_INT(gen_stats(&w.p).host_used, held);
        } else {
            folio_transfer *t = NULL;
            CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, &t));
            CHECK_INT(gen_info(s).tier, FOLIO_TIER_DISK);
            CHECK_OK(folio_transfer_wait(t));
            folio_transfer_destroy(t);
            CHECK_INT(gen_stats(&w.p).host_used, 0);
            CHECK_INT(gen_stats(&w.p).store_used, held);
        }
        CHECK_INT(gen_info(s).state, FOLIO_SEQUENCE_SWAPPED);
        CHECK_OK(folio_pool_check(w.p.pool));
        CHECK_OK(folio_pool_forget(w.p.pool)); /* nothing of it is on the device any more */
        gen_poison_free(&w);
        CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
        CHECK(gen_contents_right(&w.p, s, &w.r[0]));
        CHECK_OK(gen_feed(&w.p, s, &w.r[0], 30));
        folio_sequence_destroy(s);
        gen_world_close(&w);
    }
}
