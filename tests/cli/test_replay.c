/*
 * test_replay.c: the parts of `folio replay` that count and make up numbers: percentiles compared with sorted
 * samples, tokens that are the same exactly where hash ids agree, rows that are pure functions.
 */
#include "kit/kit.h"
#include "replay/replay_numbers.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

/* ---- Statistics */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

TEST(replay, percentiles_are_within_a_bucket)
{
    enum { N = 5001 };
    static double samples[N];
    static replay_times t;
    t = (replay_times){0};
    for (int i = 0; i < N; i++) { /* from microseconds to hours */
        samples[i] = exp(24.0 * (double)(support_bits(9, (uint64_t)i) >> 11) * 0x1p-53 - 13.0);
        replay_times_add(&t, samples[i]);
    }
    qsort(samples, N, sizeof *samples, by_size);
    const double shares[] = {0, 0.01, 0.5, 0.9, 0.99, 1};
    for (int i = 0; i < COUNT_OF(shares); i++) {
        int rank = (int)ceil(shares[i] * N);
        double want = 1e3 * samples[rank > 0 ? rank - 1 : 0];
        double got = replay_times_at(&t, shares[i]);
        if (want < 0x1p-10) CHECK_MSG(got == 0, "p%g is %g, expected 0", 100 * shares[i], got);
        else
            CHECK_MSG(fabs(got - want) <= 0.003 * want, "p%g is %g, expected %g", 100 * shares[i],
                      got, want);
    }
}

TEST(replay, times_at_the_edges)
{
    static replay_times t;
    t = (replay_times){0};
    CHECK(replay_times_at(&t, 0.5) == 0);
    replay_times_add(&t, 0);
    replay_times_add(&t, -1);
    CHECK(replay_times_at(&t, 0.99) == 0);
    replay_times_add(&t, 1e300);
    CHECK(replay_times_at(&t, 1) > 1e9);
    CHECK_INT(t.count, 3);
}

TEST(replay, waste_and_hits_are_shares)
{
    replay_stats *s = calloc(1, sizeof *s);
    REQUIRE_TEST(s != NULL);
    CHECK(replay_stats_waste(s) == 0 && replay_stats_hit_rate(s) == 0);
    CHECK(replay_stats_contiguous_waste(s) == 0);
    s->block_size = 16;
    s->longest = 100;
    replay_step step = {.sequences = 2, .stored_tokens = 25, .empty_slots = 23, .used_blocks = 3};
    replay_stats_step(s, &step);
    step = (replay_step){.sequences = 1, .stored_tokens = 15, .empty_slots = 1, .used_blocks = 1};
    replay_stats_step(s, &step);
    CHECK(fabs(replay_stats_waste(s) - 24.0 / 64) < 1e-12);
    CHECK(fabs(replay_stats_contiguous_waste(s) - (1 - 40.0 / 300)) < 1e-12);
    s->admitted_tokens = 8;
    s->hit_tokens = 2;
    CHECK(replay_stats_hit_rate(s) == 0.25);
    free(s);
}

/* ---- Tokens */

TEST(replay, tokens_are_shared_as_far_as_hash_ids_agree)
{
    replay_trace t = {.hash_block = 4};
    replay_trace_add(&t, 0, 11, 2, (const uint64_t[]){1, 2, 3}, 3);
    replay_trace_add(&t, 1, 12, 2, (const uint64_t[]){1, 2, 4}, 3);
    replay_trace_add(&t, 2, 12, 2, (const uint64_t[]){9, 2, 3},
                     3); /* the same ids, another chain */
    replay_trace_add(&t, 3, 11, 2, NULL, 0);
    replay_trace_finish(&t);
    const replay_request *r = t.requests;
    for (int64_t p = 0; p < 13; p++) {
        CHECK_INT(replay_token(&t, &r[0], p) == replay_token(&t, &r[1], p), p < 8);
        for (int64_t q = 0; q < 13; q++) {
            CHECK(replay_token(&t, &r[0], p) != replay_token(&t, &r[2], q));
            CHECK(replay_token(&t, &r[0], p) != replay_token(&t, &r[3], q));
            if (p != q) CHECK(replay_token(&t, &r[0], p) != replay_token(&t, &r[0], q));
        }
    }
    CHECK_INT(t.longest, 14);
    CHECK_INT(t.prompt_tokens, 46);
    replay_trace_free(&t);
}

TEST(replay, requests_are_served_by_arrival)
{
    replay_trace t = {.hash_block = 4};
    const double arrivals[] = {7, 3, 9, 3};
    for (int i = 0; i < 4; i++) replay_trace_add(&t, arrivals[i], i + 1, 1, NULL, 0);
    replay_trace_finish(&t);
    const int64_t lens[] = {2, 4, 1, 3};
    const double after[] = {0, 0, 4, 6};
    for (int i = 0; i < 4; i++) {
        CHECK_INT(t.requests[i].prompt_len, lens[i]);
        CHECK_INT(t.requests[i].index, i);
        CHECK(t.requests[i].arrival == after[i]);
    }
    replay_trace_free(&t);
}

TEST(replay, the_built_in_trace_is_whole)
{
    for (uint64_t seed = 1; seed < 6; seed++) {
        replay_trace t;
        replay_trace_make(&t, INT64_MAX, seed);
        CHECK_INT(t.num_requests, 128);
        for (int64_t i = 0; i < t.num_requests; i++) {
            const replay_request *r = &t.requests[i];
            CHECK(r->prompt_len >= 1 && r->output_len >= 1);
            CHECK_INT(r->num_chain, (r->prompt_len + t.hash_block - 1) / t.hash_block);
        }
        replay_trace_free(&t);
    }
}

/* ---- Numbers */

TEST(replay, numbers_are_exact_and_of_their_place)
{
    enum { HEADS = 3, SIZE = 16, ROW = HEADS * SIZE };
    const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    float want[ROW], one[SIZE];
    replay_numbers plain;
    replay_numbers_init(&plain, 7, FOLIO_F32, SIZE);
    for (int tensor = 0; tensor < REPLAY_TENSORS; tensor++) {
        double most = tensor == REPLAY_Q ? 4 : 1;
        replay_numbers_row(&plain, (replay_tensor)tensor, 2, 99, 0, HEADS, want);
        for (int i = 0; i < ROW; i++) CHECK((double)want[i] >= -most && (double)want[i] < most);
        for (int d = 0; d < 3; d++) {
            float other[ROW];
            replay_numbers n;
            replay_numbers_init(&n, 7, dtypes[d], SIZE);
            replay_numbers_row(&n, (replay_tensor)tensor, 2, 99, 0, HEADS, other);
            for (int i = 0; i < ROW; i++) CHECK(kit_load(dtypes[d], other, i) == (double)want[i]);
        }
        for (int h = 0; h < HEADS; h++) { /* a head alone is the row's */
            replay_numbers_row(&plain, (replay_tensor)tensor, 2, 99, h, 1, one);
            CHECK(memcmp(one, want + h * SIZE, sizeof one) == 0);
        }
        /* Another layer, token or seed is another row. */
        replay_numbers_row(&plain, (replay_tensor)tensor, 3, 99, 0, 1, one);
        CHECK(memcmp(one, want, sizeof one) != 0);
        replay_numbers_row(&plain, (replay_tensor)tensor, 2, 98, 0, 1, one);
        CHECK(memcmp(one, want, sizeof one) != 0);
        replay_numbers seeded;
        replay_numbers_init(&seeded, 8, FOLIO_F32, SIZE);
        replay_numbers_row(&seeded, (replay_tensor)tensor, 2, 99, 0, 1, one);
        CHECK(memcmp(one, want, sizeof one) != 0);
    }
}
