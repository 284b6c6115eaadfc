/* test_replay_verify.c: `folio replay --verify` counts the rows that are wrong, those and no others. */
#include "replay/replay_model.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

enum { PROMPT = 21, HEADS = 4, KV_HEADS = 2, SIZE = 16, ROW = HEADS * SIZE };

/* Causal attention of one request in doubles, from the made-up numbers only. */
static void attend(const replay_numbers *n, const replay_trace *t, const replay_request *r,
                   float *out)
{
    for (int64_t p = 0; p < PROMPT; p++)
        for (int64_t h = 0; h < HEADS; h++) {
            float q[SIZE], k[SIZE], v[SIZE];
            double sum = 0, o[SIZE] = {0};
            replay_numbers_row(n, REPLAY_Q, 0, replay_query(r, p), h, 1, q);
            for (int64_t j = 0; j <= p; j++) {
                uint64_t token = replay_token(t, r, j);
                int64_t kv_head = h / (HEADS / KV_HEADS);
                replay_numbers_row(n, REPLAY_K, 0, token, kv_head, 1, k);
                replay_numbers_row(n, REPLAY_V, 0, token, kv_head, 1, v);
                double dot = 0;
                for (int i = 0; i < SIZE; i++) dot += (double)q[i] * (double)k[i];
                double weight = exp(dot / sqrt(SIZE));
                sum += weight;
                for (int i = 0; i < SIZE; i++) o[i] += weight * (double)v[i];
            }
            for (int i = 0; i < SIZE; i++) out[p * ROW + h * SIZE + i] = (float)(o[i] / sum);
        }
}

TEST(replay_verify, what_is_wrong_is_counted)
{
    static float out[PROMPT * ROW];
    replay_options o = {.threads = 1,
                        .seed = 5,
                        .layers = 1,
                        .heads = HEADS,
                        .kv_heads = KV_HEADS,
                        .head_size = SIZE,
                        .dtype = FOLIO_F32,
                        .kv_dtype = FOLIO_F32,
                        .verify = 100};
    replay_trace t = {.hash_block = 4};
    replay_trace_add(&t, 0, PROMPT, 2, NULL, 0);
    replay_trace_finish(&t);
    replay_stats *stats = calloc(1, sizeof *stats);
    REQUIRE_TEST(stats != NULL);
    replay_model m = {.o = &o, .trace = &t, .stats = stats};
    replay_numbers_init(&m.numbers, o.seed, o.dtype, o.head_size);
    replay_verifier *v = replay_verifier_open(&m);
    REQUIRE_TEST(v != NULL);
    replay_item item = {.request = &t.requests[0], .first = 0, .count = PROMPT};

    attend(&m.numbers, &t, item.request, out);
    CHECK(replay_verifier_check(v, &m, &item, 1, 0, out));
    CHECK_INT(stats->verified_rows, PROMPT * HEADS);
    CHECK_INT(stats->mismatched_rows, 0);

    /* a number a little off, one that is none, and a row of another token */
    out[3 * ROW + SIZE + 7] += 1e-3f;
    out[9 * ROW] = NAN;
    memcpy(out + 20 * ROW + 2 * SIZE, out + 19 * ROW + 2 * SIZE, SIZE * sizeof *out);
    CHECK(replay_verifier_check(v, &m, &item, 1, 0, out));
    CHECK_INT(stats->verified_rows, 2 * PROMPT * HEADS);
    CHECK_INT(stats->mismatched_rows, 3);

    replay_verifier_close(v);
    replay_trace_free(&t);
    free(stats);
}
