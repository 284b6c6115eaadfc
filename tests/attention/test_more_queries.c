/*
 * test_more_queries.c: sequences with more queries than keys (query_len > seq_len). Their keys are all cached, nothing
 * is stored, and positions say what each row sees. What is stored, NaN, views, merging with other keys. What each
 * row sees is judged by test_golden.c and check.more_queries. What is rejected: errors_forward.more_queries_than_keys, batch.more_queries_than_keys.
 */
#include "attention/numerics_rig.h"
#include "support.h"

static rig r;

static folio_batch_seq *add_reader(rig *to, int64_t query_len, int64_t seq_len, int64_t first_query,
                                   int64_t first_key)
{
    folio_batch_seq *seq = rig_add(to, query_len, seq_len);
    seq->positions_given = 1;
    seq->first_query_pos = first_query;
    seq->first_key_pos = first_key;
    to->no_kv = true;
    return seq;
}

/* The other types do not look at seq_len: encoder_only sees the step's own tokens, cross attention the encoder's. */
ENGINE_TEST(more_queries, other_types_are_as_ever)
{
    rig_init(&r, e.ctx);
    folio_batch_seq *seq = add_reader(&r, 6, 2, 0, 0);
    seq->encoder_len = seq->encoder_new_len = 5;
    r.no_kv = false;
    r.types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_ONLY) |
              FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_ONLY));
    for (int i = 0; i < 6; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(0, 6));
    CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_ENCODER_DECODER));
    for (int i = 0; i < 6; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(0, 5));
}

/* Keys of encoder_only are the new tokens: limits have to hold these, and room grows for them. */
BACKEND_TEST(more_queries, encoder_only_has_room_for_all_keys)
{
    const uint32_t types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_ONLY);
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = 2, .k_head_size = 16, .dtype = FOLIO_F32);
    folio_attention *attention = NULL;
    CHECK_OK(folio_attention_create(ctx, &a, &attention));
    folio_plan_desc d =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .types = &types, .num_attentions = 1);
    size_t room[2] = {0, 0};
    for (int i = 0; i < 2; i++) { /* as many keys by their query_len, by their seq_len */
        folio_batch *batch = support_batch(ctx, 0);
        folio_plan *growing = NULL, *limited = NULL;
        folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 4000,
                                         .seq_len = i == 0 ? 1 : 4000, .positions_given = 1);
        CHECK_OK(folio_batch_add(batch, &seq));
        d.max_seqs = d.max_query_tokens = d.max_seq_len = 0;
        CHECK_OK(folio_plan_create(ctx, &d, &growing));
        CHECK_OK(folio_plan_update(growing, batch, NULL));
        CHECK_OK(folio_plan_get_workspace_size(growing, &room[i]));
        d.max_seqs = 1, d.max_query_tokens = 4000, d.max_seq_len = 3999;
        CHECK_OK(folio_plan_create(ctx, &d, &limited));
        REFUSED(folio_plan_update(limited, batch, NULL), FOLIO_ERR_ARGUMENT,
                i == 0 ? "seq 0|query_len 4000|max_seq_len 3999" : "seq 0|seq_len 4000|3999");
        folio_plan_destroy(limited);
        folio_plan_destroy(growing);
        folio_batch_destroy(batch);
    }
    CHECK(room[0] == room[1]);
    folio_attention_destroy(attention);
}

/* NaN past the last key stays there; NaN in key 2 reaches the rows from its position on. */
ENGINE_TEST(more_queries, nan_reaches_exactly_the_rows_that_see_it)
{
    rig_init(&r, e.ctx);
    rig_random_v(&r);
    add_reader(&r, 12, 5, 8, 10);
    r.key[0][2][0][3] = NAN;
    r.q[0][11][1][0] = NAN;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER)); /* the slots past 5 hold NaN */
    for (int i = 0; i < 12; i++)
        for (int d = 0; d < RIG_DIM; d++) {
            CHECK(isnan(r.out[0][i][0][d]) ==
                  (i >= 4)); /* heads 0 and 1 have kv heads of their own */
            CHECK(isnan(r.out[0][i][1][d]) == (i == 11));
        }
}

/* ---- through the kit ---- */

static const kit_seq readers[] = {
    {.query_len = 40, .seq_len = 33, .positions_given = 1, .first_query_pos = 3},
    {.query_len = 1, .seq_len = 21},
    {.query_len = 9, .seq_len = 8, .positions_given = 1, .first_query_pos = 40, .first_key_pos = 9},
    {.query_len = 3, .seq_len = 0},
    {.query_len = 5, .seq_len = 1, .positions_given = 1, .first_query_pos = -2},
    {.query_len = 6, .seq_len = 6}};
enum { NUM_READERS = sizeof readers / sizeof readers[0] };

/* A forward leaves every byte of the cache as it was, in each form of tables, and agrees with the reference. */
BACKEND_TEST(more_queries, nothing_is_stored)
{
    for (int table = KIT_TABLE_SEQS; table <= KIT_TABLE_SLOTS; table++)
        for (int given = 0; given < 2; given++) {
            kit_seq seqs[NUM_READERS];
            kit_spec spec = {.seed = 5, .table = (kit_table)table, .sinks = true};
            kit_result first = {0}, second = {0};
            kit_verdict verdict;
            if (table == KIT_TABLE_SLOTS) spec.block_size = 1;
            memcpy(seqs, readers, sizeof seqs);
            for (int i = 0; i < NUM_READERS; i++) seqs[i].slots_given = given != 0;
            kit_case *h = kit_open(ctx, &spec, seqs, NUM_READERS);
            REQUIRE_TEST(h != NULL);
            bool ok = kit_forward(h, NULL, FOLIO_ATTENTION_DECODER, seqs, NUM_READERS, &first);
            CHECK_MSG(ok, "%s", kit_error());
            uint64_t before = kit_hash_cache(kit_cache(h));
            ok = kit_forward(h, NULL, FOLIO_ATTENTION_DECODER, seqs, NUM_READERS, &second);
            CHECK(ok && kit_hash_cache(kit_cache(h)) == before);
            CHECK(ok && kit_rows_equal(&first, 0, &second, 0, first.rows));
            kit_result_free(&first);
            kit_result_free(&second);
            kit_close(h);
            CHECK_MSG(
                kit_check(ctx, NULL, &spec, FOLIO_ATTENTION_DECODER, seqs, NUM_READERS, &verdict),
                "table %d: %s", table, verdict.message);
        }
}

/* Counts and views: all keys are context, and rows have slot -1. */
TEST(more_queries, views_show_the_keys_as_context)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    folio_batch *batch = support_batch(ctx, 4);
    const int32_t table[] = {2, 0};
    folio_batch_seq seq =
        FOLIO_WITH(folio_batch_seq, .query_len = 9, .seq_len = 7, .block_table = table,
                   .num_blocks = 2, .positions_given = 1, .first_query_pos = 30);
    CHECK_OK(folio_batch_add(batch, &seq));
    folio_batch_view v = {.struct_size = sizeof v};
    CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
    CHECK_INT(v.context_lens[0], 7);
    CHECK_INT(v.key_lens[0], 7);
    CHECK_INT(v.query_lens[0], 9);
    CHECK_INT(v.num_new_tokens, 9);
    for (int i = 0; i < 9; i++) {
        CHECK_INT(v.slot_mapping[i], -1);
        CHECK_INT(v.positions[i], 30 + i);
    }
    folio_batch_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_batch_get_info(batch, &info));
    CHECK(info.num_prefills == 1 && info.num_decodes == 0 && info.max_query_len == 9);
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}

/* ---- a shared prefix ---- */

enum { SHARERS = 5, OWN = 4 };

/*
 * Five sequences share a prefix. Attention over all keys, one table for each sequence, against two parts merged: all
 * queries over the prefix as one sequence, which has more queries than keys; and each sequence over its own keys.
 */
static void check_shared_prefix(rig_engine e, int64_t prefix, int64_t rows_each)
{
    enum { D = 16, H = 2, ROWS = 20 };
    static float q[ROWS * H * D], whole[ROWS * H * D], part[2][ROWS * H * D];
    float whole_lse[ROWS * H], part_lse[2][ROWS * H], kv[2][64 * H * D];
    kit_layer l = {0};
    int64_t rows = SHARERS * rows_each, slots[64];
    int32_t tables[SHARERS][8];
    support_fill(q, ROWS * H * D, 1, 1.0f);
    for (int i = 0; i < 2; i++) support_fill(kv[i], 64 * H * D, 2 + (uint64_t)i, 1.0f);
    for (int i = 0; i < 64; i++) slots[i] = i;
    folio_attention_desc desc =
        FOLIO_WITH(folio_attention_desc, .num_heads = H, .k_head_size = D, .dtype = FOLIO_F32);
    folio_kv_cache_desc cache =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 16, .num_layers = 1, .block_size = 4,
                   .num_kv_heads = H, .k_head_size = D, .dtype = FOLIO_F32);
    CHECK_OK(folio_attention_create(e.ctx, &desc, &l.attention));
    CHECK_OK(folio_kv_cache_create(e.ctx, &cache, &l.cache));
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .slots = slots, .k = {kv[0], FOLIO_F32, 64, 0, 0},
                   .v = {kv[1], FOLIO_F32, 64, 0, 0});
    CHECK_OK(folio_kv_cache_write(l.cache, 0, &write, NULL));
    CHECK_OK(KIT_LAYER_OPEN(e.ctx, &l, .block_size = 4, .max_seqs = SHARERS,
                            .max_query_tokens = ROWS, .max_seq_len = 64));
    for (int i = 0; i < SHARERS; i++)
        for (int b = 0; b < 8; b++)
            tables[i][b] = b < prefix / 4 ? b : (int32_t)(prefix / 4 + i * 2 + b - prefix / 4);
    for (int pass = 0; pass < 3; pass++) { /* all keys; the prefix; the others */
        folio_batch_clear(l.batch);
        for (int i = 0; i < (pass == 1 ? 1 : SHARERS); i++) {
            folio_batch_seq s = FOLIO_WITH(folio_batch_seq, .query_len = rows_each,
                                           .block_table = tables[i], .num_blocks = 8);
            s.seq_len = prefix + OWN + i % 3; /* suffixes of different lengths */
            if (pass == 1)
                s.query_len = rows, s.seq_len = prefix, s.positions_given = 1,
                s.first_query_pos = prefix;
            if (pass == 2)
                s.seq_len -= prefix, s.block_table += prefix / 4, s.num_blocks -= prefix / 4;
            CHECK_OK(folio_batch_add(l.batch, &s));
        }
        CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
        float *out = pass == 0 ? whole : part[pass - 1];
        folio_tensors t =
            FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = rows},
                       .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows},
                       .lse = pass == 0 ? whole_lse : part_lse[pass - 1]);
        CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
    }
    folio_state states[2];
    for (int i = 0; i < 2; i++)
        states[i] = (folio_state){.out = {part[i], FOLIO_F32, rows, 0, 0}, .lse = part_lse[i]};
    folio_merge merge = FOLIO_WITH(folio_merge, .num_heads = H, .head_size = D, .num_parts = 2,
                                   .parts = states, .out = states[0].out, .lse = part_lse[0]);
    CHECK_OK(folio_state_merge(e.ctx, &merge, NULL));
    for (int64_t i = 0; i < rows * H; i++) CHECK_NEAR(part_lse[0][i], whole_lse[i], 2e-6);
    for (int64_t i = 0; i < rows * H * D; i++) CHECK_NEAR(part[0][i], whole[i], 1e-6);
    kit_layer_close(&l);
}

ENGINE_TEST(more_queries, a_shared_prefix_merges_with_the_rest)
{
    check_shared_prefix(e, 4, 1);  /* 5 queries over 4 keys   */
    check_shared_prefix(e, 12, 3); /* 15 over 12              */
    check_shared_prefix(e, 16, 4); /* 20 over 16              */
}
