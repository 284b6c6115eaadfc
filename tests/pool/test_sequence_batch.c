/* test_sequence_batch.c: batches made of sequences: their views, block sizes, encoders, and what is refused. */
#include "pool/generation_rig.h"
#include "pool/pool_rig.h"

/* What the view must say of one sequence; NULL is a token of padding. */
static void check_in_view(const folio_batch_view *v, int64_t i, const folio_sequence *s,
                          int32_t group, int64_t bs, int64_t *row)
{
    folio_sequence_info info = {0};
    if (s != NULL) info = pool_info(s);
    int64_t rows = s == NULL ? 1 : info.len - info.committed_len, n = 0;
    const int32_t *table = s == NULL ? NULL : pool_table(s, group, &n);
    CHECK_INT(v->seqs[i], i);
    CHECK_INT(v->query_rows[i], *row);
    CHECK_INT(v->query_lens[i], rows);
    CHECK_INT(v->key_lens[i], info.len);
    CHECK_INT(v->context_lens[i], info.committed_len);
    CHECK_INT(v->table_start[i + 1] - v->table_start[i], n);
    for (int64_t b = 0; b < n; b++) CHECK_INT(v->blocks[v->table_start[i] + b], table[b]);
    for (int64_t j = 0; j < rows; j++, ++*row) {
        int64_t p = info.committed_len + j;
        CHECK_INT(v->slot_mapping[*row], s == NULL ? -1 : table[p / bs] * bs + p % bs);
    }
}

POOL_TEST(sequence_batch, batches_of_sequences, .num_blocks = 80, .block_size = 4,
          .num_layer_groups = 2,
          .layer_groups = (folio_layer_group[]){{.window = 0}, {.window = 6}})
{
    enum { N = 7, BS = 4 };
    folio_sequence *s[N] = {NULL};
    /* prompt; decode; padding; part of a prompt after what was matched; window passed; drafts */
    s[0] = pool_sequence(pool, 0);
    CHECK_OK(folio_sequence_reserve(s[0], 9, 0, NULL));
    s[1] = pool_plain(pool, 15);
    CHECK_OK(folio_sequence_reserve(s[1], 1, 0, NULL));
    s[3] = pool_sequence(pool, 0);
    pool_grow(s[3], pool_counting_ids(), 8);
    CHECK_OK(folio_sequence_reserve(s[3], 6, 0, NULL));
    s[4] = pool_plain(pool, 40);
    CHECK_OK(folio_sequence_reserve(s[4], 1, 0, NULL));
    CHECK_INT(pool_table(s[4], 1, NULL)[0], FOLIO_NO_BLOCK);
    s[5] = pool_plain(pool, 10);
    CHECK_OK(folio_sequence_reserve(s[5], 3, 0, NULL));
    s[6] = pool_plain(pool, 5); /* nothing new */
    folio_batch *batch = NULL;
    const folio_batch_seq padding = {.struct_size = sizeof padding, .query_len = 1, .padding = 1};
    batch = support_batch(r->ctx, BS);
    for (int32_t g = 0; g < 2; g++) {
        folio_batch_clear(batch);
        CHECK_OK(folio_batch_add_sequences(batch, g, s, 2, NULL));
        CHECK_OK(folio_batch_add(batch, &padding)); /* the next ones are appended */
        CHECK_OK(folio_batch_add_sequences(batch, g, s + 3, N - 3, NULL));
        CHECK_OK(folio_batch_add_sequences(batch, g, s, 0, NULL));
        folio_batch_view v = {.struct_size = sizeof v};
        CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
        CHECK_INT(v.num_seqs, N);
        int64_t row = 0;
        for (int i = 0; i < N && v.num_seqs == N; i++) check_in_view(&v, i, s[i], g, BS, &row);
        CHECK_INT(v.num_query_tokens, row);
        folio_batch_info sum = {.struct_size = sizeof sum};
        CHECK_OK(folio_batch_get_info(batch, &sum));
        CHECK_INT(sum.kind, FOLIO_BATCH_MIXED);
        CHECK_INT(sum.num_padding, 1);
    }
    folio_batch_destroy(batch);
    for (int i = 0; i < N; i++) folio_sequence_destroy(s[i]);
}

TEST(sequence_batch, a_batch_takes_the_block_size_of_its_first_pool)
{
    pool_rig four, eight;
    REQUIRE_TEST(pool_rig_open(&four, (folio_pool_desc){.num_blocks = 9, .block_size = 4}));
    REQUIRE_TEST(pool_rig_open(&eight, (folio_pool_desc){.num_blocks = 9, .block_size = 8}));
    folio_sequence *s[2] = {pool_plain(four.pool, 9), pool_plain(eight.pool, 9)};
    folio_batch *batch = NULL;
    const folio_batch_desc desc = {.struct_size = sizeof desc};
    CHECK_OK(folio_batch_create(four.ctx, &desc, &batch));
    REFUSED(folio_batch_add_sequences(batch, 0, s, 2, NULL), FOLIO_ERR_ARGUMENT,
            "4|sequences[1] 8");
    CHECK_OK(
        folio_batch_add_sequences(batch, 0, s + 1, 1, NULL)); /* the refused call left nothing */
    REFUSED(folio_batch_add_sequences(batch, 0, s, 1, NULL), FOLIO_ERR_ARGUMENT,
            "8|sequences[0] 4");
    folio_batch_view v = {.struct_size = sizeof v};
    CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
    CHECK_INT(v.num_seqs, 1);
    CHECK_INT(v.table_start[1], 2);
    folio_batch_destroy(batch);
    for (int i = 0; i < 2; i++) folio_sequence_destroy(s[i]);
    pool_rig_close(&eight);
    pool_rig_close(&four);
}

/* Encoder tokens come along: new until the next commit, cached afterwards. */
POOL_TEST(sequence_batch, batches_with_encoder_tokens, .num_blocks = 40, .block_size = 4)
{
    enum { BS = 4 };
    folio_sequence *s[3] = {pool_sequence(pool, 0), pool_plain(pool, 3), pool_sequence(pool, 0)};
    CHECK_OK(folio_sequence_reserve_encoder(s[0], 10, 0, NULL));
    CHECK_OK(folio_sequence_reserve_encoder(s[2], 5, 0, NULL));
    CHECK_OK(folio_sequence_commit(s[2], NULL));
    for (int i = 0; i < 3; i++) CHECK_OK(folio_sequence_reserve(s[i], 2, 0, NULL));
    folio_batch *batch = NULL;
    batch = support_batch(r->ctx, BS);
    for (int committed = 0; committed < 2; committed++) {
        folio_batch_clear(batch);
        CHECK_OK(folio_batch_add_sequences(batch, 0, s, 3, NULL));
        folio_batch_view v = {.struct_size = sizeof v};
        CHECK_OK(
            folio_batch_get_view(batch, FOLIO_ATTENTION_ENCODER_DECODER, FOLIO_PHASE_AUTO, &v));
        REQUIRE_TEST(v.num_seqs == 3);
        CHECK_INT(v.num_new_tokens, committed ? 0 : 10);
        for (int i = 0; i < 3; i++) {
            int64_t n = 0, len = pool_info(s[i]).encoder_len;
            const int32_t *table = pool_table(s[i], FOLIO_LAYER_GROUP_CROSS, &n);
            CHECK_INT(v.key_lens[i], len);
            CHECK_INT(v.context_lens[i], i == 0 && !committed ? 0 : len);
            CHECK_INT(v.table_start[i + 1] - v.table_start[i], n);
            for (int64_t b = 0; b < n; b++) CHECK_INT(v.blocks[v.table_start[i] + b], table[b]);
            for (int64_t j = 0; i == 0 && !committed && j < len; j++)
                CHECK_INT(v.slot_mapping[j], table[j / BS] * BS + j % BS);
        }
        for (int i = 0; i < 3; i++) CHECK_OK(folio_sequence_commit(s[i], NULL));
    }
    folio_batch_destroy(batch);
    for (int i = 0; i < 3; i++) folio_sequence_destroy(s[i]);
}

TEST(sequence_batch, batches_refused)
{
    pool_rig r, other;
    REQUIRE_TEST(pool_rig_open(
        &r, (folio_pool_desc){.num_blocks = 40, .block_size = 4, .num_layer_groups = 2}));
    REQUIRE_TEST(pool_rig_open(
        &other, (folio_pool_desc){.num_blocks = 40, .block_size = 3, .num_layer_groups = 2}));
    folio_sequence *s[3] = {pool_plain(r.pool, 5), pool_plain(r.pool, 4),
                            pool_plain(other.pool, 5)};
    folio_sequence *const with_null[2] = {s[0], NULL}, *const empty = pool_sequence(r.pool, 0);
    CHECK_OK(folio_sequence_reserve(s[0], 2, 0, NULL));
    folio_batch *batch = NULL;
    batch = support_batch(r.ctx, 4);
    CHECK_OK(folio_batch_add_sequences(batch, 1, s, 2, NULL));
    folio_batch_info before = {.struct_size = sizeof before}, after = before;
    CHECK_OK(folio_batch_get_info(batch, &before));
    CHECK_INT(before.num_seqs, 2);
    REFUSED(folio_batch_add_sequences(NULL, 0, s, 1, NULL), FOLIO_ERR_ARGUMENT, "batch");
    REFUSED(folio_batch_add_sequences(batch, 0, NULL, 1, NULL), FOLIO_ERR_ARGUMENT, "sequences");
    REFUSED(folio_batch_add_sequences(batch, 0, s, -1, NULL), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED(folio_batch_add_sequences(batch, 2, s, 1, NULL), FOLIO_ERR_ARGUMENT, "group|2");
    REFUSED(folio_batch_add_sequences(batch, FOLIO_LAYER_GROUP_CROSS, s, 1, NULL),
            FOLIO_ERR_ARGUMENT, "group|-1");
    REFUSED(folio_batch_add_sequences(batch, 1, s, 3, NULL), FOLIO_ERR_ARGUMENT, "2|3|4");
    REFUSED(folio_batch_add_sequences(batch, 1, with_null, 2, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[1] is NULL|folio_batch_add");
    REFUSED(folio_batch_add_sequences(batch, 1, &empty, 1, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[0]|no token");
    CHECK_OK(folio_batch_get_info(batch, &after));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    folio_batch_destroy(batch);
    for (int i = 0; i < 3; i++) folio_sequence_destroy(s[i]);
    folio_sequence_destroy(empty);
    pool_rig_close(&r);
    pool_rig_close(&other);
}

/* A call that is refused for one of its sequences has not run the copies of the others. */
TEST(sequence_batch, a_refused_call_runs_no_copies)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, &gen_small, 24, 0, 0));
    folio_sequence *s = gen_filled(&w, &w.r[0], 18), *fork = NULL,
                   *empty = gen_sequence(&w, &w.r[2]);
    CHECK_OK(folio_sequence_fork(s, &fork));
    CHECK_OK(folio_sequence_reserve(fork, 1, 0, NULL));
    CHECK_INT(gen_stats(&w.p).num_copies, 1);
    folio_sequence *const without_token[2] = {fork, empty};
    folio_batch_clear(w.p.batch[0]);
    REFUSED(folio_batch_add_sequences(w.p.batch[0], 0, without_token, 2, NULL), FOLIO_ERR_ARGUMENT,
            "sequences[1]|no token");
    CHECK_INT(gen_stats(&w.p).num_copies, 1);
    CHECK_OK(folio_batch_add_sequences(w.p.batch[0], 0, &fork, 1, NULL));
    CHECK_INT(gen_stats(&w.p).num_copies, 0);
    CHECK_OK(folio_sequence_truncate(fork, 18));
    CHECK(gen_contents_right(&w.p, fork, &w.r[0]));
    folio_sequence_destroy(fork);
    folio_sequence_destroy(empty);
    folio_sequence_destroy(s);
    gen_world_close(&w);
}
