/*
 * test_device_pool.c: pools whose blocks lie on a device, by the fake one: what is queued where, what waits and
 * what does not. That contents are right is what the suites swap, swap_store, swap_faults and generation say with
 * FOLIO_TESTS_BACKEND=fake.
 */
#include "fake_device.h"
#include "pool/generation_rig.h"

static const gen_geometry plain = {
    .backend = "fake", .block_size = 4, .kv_dtype = FOLIO_BF16, .num_layer_groups = 1};
static const gen_geometry packed = {
    .backend = "fake", .block_size = 16, .kv_dtype = FOLIO_BF16, .num_layer_groups = 1};

/* Out to the host and in again: a call each, and nobody waits; the bytes are right when they are looked at. */
GEN_TEST(device_pool, swaps_are_batched_and_not_waited_for, plain, 32, 16, 0)
{
    folio_sequence *s = gen_filled(w, &w->r[0], 38), *copy = NULL;
    CHECK_OK(folio_sequence_fork(s, &copy));
    CHECK_OK(folio_run_wait(w->m.ctx, &w->m.run));
    (void)fake_device_count();
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
    CHECK_OK(folio_sequence_swap_out(copy, FOLIO_TIER_HOST, &w->m.run, NULL));
    CHECK_OK(folio_pool_forget(w->p.pool));
    gen_poison_free(w);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, 38);
    fake_device_counts c = fake_device_count();
    CHECK_INT(c.waits, 0);
    /* 10 blocks out; of the copy the last, which the prefix cache does not know; zeros over 10; 2 layers poisoned; 10 in */
    CHECK_INT(c.moves, 1 + 1 + 1 + 2 + 1);
    CHECK_INT(c.moved_blocks, 10 + 1 + 10 + 2 * 32 + 10);
    CHECK_INT(fake_device_queued(w->m.run.stream), 1 + 6);
    CHECK(gen_contents_right(&w->p, s, &w->r[0]));
    folio_sequence_destroy(s);
    CHECK_OK(folio_sequence_swap_in(copy, NULL, NULL));
    CHECK(gen_contents_right(&w->p, copy, &w->r[0]));
    folio_sequence_destroy(copy);
}

/* What many forks are about to write is copied by one call. */
GEN_TEST(device_pool, copies_are_one_call, plain, 64, 0, 0)
{
    folio_sequence *s[9] = {NULL};
    s[0] = gen_filled(w, &w->r[0], 18);
    for (int i = 1; i < COUNT_OF(s); i++) CHECK_OK(folio_sequence_fork(s[0], &s[i]));
    for (int i = 1; i < COUNT_OF(s); i++) CHECK_OK(folio_sequence_reserve(s[i], 1, 0, NULL));
    (void)fake_device_count();
    CHECK_OK(folio_pool_run_copies(w->p.pool, NULL));
    fake_device_counts c = fake_device_count();
    CHECK_INT(c.moves, 1);
    CHECK_INT(c.moved_blocks, 8);
    CHECK_INT(c.waits, 0);
    for (int i = 1; i < COUNT_OF(s); i++) {
        CHECK_OK(folio_sequence_truncate(s[i], 18));
        CHECK(gen_contents_right(&w->p, s[i], &w->r[0]));
    }
    for (int i = 0; i < COUNT_OF(s); i++) folio_sequence_destroy(s[i]);
}

/* The host's frames are pinned memory, given back after the copies that use them. */
TEST(device_pool, frames_are_pinned_and_given_back)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_model(&w, &plain, NULL));
    int64_t before = fake_device_count().live;
    REQUIRE_TEST(gen_world_pool(&w, 32, 0, 0));
    int64_t without = fake_device_count().live;
    gen_pool_close(&w.p);
    REQUIRE_TEST(gen_world_pool(&w, 32, 16, 0));
    CHECK_INT(fake_device_count().live, without + 1);
    folio_sequence *s = gen_filled(&w, &w.r[0], 20);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
    folio_sequence_destroy(s);
    CHECK(fake_device_queued(w.m.run.stream) > 0);
    gen_pool_close(&w.p);
    CHECK_INT(fake_device_queued(w.m.run.stream), 0);
    CHECK_INT(fake_device_count().live, before);
    folio_pool_desc desc = gen_world_desc(&w, 32, (int64_t)1 << 24, 0);
    folio_status status = FOLIO_OK;
    CHECK(!gen_pool_open(&w.p, &w.m, &desc, &status));
    CHECK_INT(status, FOLIO_ERR_MEMORY);
    CHECK(strstr(folio_last_error(), "the host tier") != NULL);
    CHECK_INT(fake_device_count().live, before);
    gen_model_close(&w.m);
}

TEST(device_pool, other_streams_are_refused)
{
    static gen_world w;
    char other;
    folio_run run = {.struct_size = sizeof run, .stream = &other};
    folio_transfer *t = NOWHERE;
    REQUIRE_TEST(gen_world_open(&w, &plain, 32, 16, 0));
    folio_sequence *s = gen_filled(&w, &w.r[0], 20);
    folio_pool_stats before = gen_stats(&w.p), after;
    REFUSED(folio_pool_run_copies(w.p.pool, &run), FOLIO_ERR_ARGUMENT, "stream|the pool's");
    REFUSED(folio_batch_add_sequences(w.p.batch[0], 0, &s, 1, &run), FOLIO_ERR_ARGUMENT,
            "stream|the pool's");
    REFUSED(folio_sequence_swap_out(s, FOLIO_TIER_HOST, &run, &t), FOLIO_ERR_ARGUMENT, "stream");
    REFUSED(folio_sequence_swap_in(s, &run, &t), FOLIO_ERR_ARGUMENT, "stream|the pool's");
    REFUSED(folio_sequence_preempt(s, FOLIO_PREEMPT_SWAP, &run, &t), FOLIO_ERR_ARGUMENT, "stream");
    REFUSED(folio_sequence_resume(s, NULL, NULL, &run, &t), FOLIO_ERR_ARGUMENT,
            "stream|the pool's");
    REFUSED(folio_pool_swap_out(w.p.pool, FOLIO_TIER_HOST, 4, &run, NULL, &t), FOLIO_ERR_ARGUMENT,
            "stream|the pool's");
    after = gen_stats(&w.p);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(folio_pool_run_copies(w.p.pool, &w.m.run));
    folio_sequence_destroy(s);
    gen_world_close(&w);

    folio_context *host = support_context("reference", 1, NULL);
    folio_pool_desc desc =
        FOLIO_WITH(folio_pool_desc, .num_blocks = 4, .block_size = 4, .stream = &other);
    folio_pool *pool = NOWHERE;
    REFUSED(folio_pool_create(host, &desc, &pool), FOLIO_ERR_ARGUMENT, "stream|host backends");
    CHECK(pool == NULL);
    folio_context_destroy(host);
}

/* The bytes of a device's frames are in another order than the cpu's: neither takes the other's file. */
GEN_TEST(device_pool, stores_know_whose_bytes_they_hold, packed, 16, 0, 12)
{
    static gen_model cpu;
    gen_geometry g = packed;
    folio_status status = FOLIO_OK;
    gen_pool p;
    folio_sequence *s = gen_filled(w, &w->r[0], 33);
    folio_sequence_destroy(s);
    CHECK_INT(gen_lower(w, FOLIO_TIER_DISK, 8), 2);
    gen_pool_close(&w->p);
    g.backend = "cpu";
    REQUIRE_TEST(gen_model_open(&cpu, &g, 1, NULL));
    folio_pool_desc desc = gen_world_desc(w, 16, 0, 12);
    CHECK(!gen_pool_open(&p, &cpu, &desc, &status));
    CHECK_INT(status, FOLIO_ERR_ARGUMENT);
    CHECK(strstr(folio_last_error(), "device-rows") != NULL);
    gen_model_close(&cpu);
    REQUIRE_TEST(gen_world_pool(w, 16, 0, 12));
    s = gen_sequence(w, &w->r[0]);
    CHECK_INT(gen_match(w, s, &w->r[0], 33), 32);
    CHECK(gen_contents_right(&w->p, s, &w->r[0]));
    folio_sequence_destroy(s);
}
