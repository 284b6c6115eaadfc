/*
 * test_numerics_types.c: the four attention types, which rows and keys each has, and how one batch
 * serves them all, statement by statement as docs/numerics.md has them.
 */
#include "attention/numerics_rig.h"
#include "support.h"

static rig r, other;

static const uint32_t all_types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                                  FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER) |
                                  FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_ONLY) |
                                  FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER);

static folio_batch_seq *add_encoder(int64_t query_len, int64_t seq_len, int64_t encoder_len,
                                    int64_t encoder_new_len)
{
    folio_batch_seq *seq = rig_add(&r, query_len, seq_len);
    seq->encoder_len = encoder_len;
    seq->encoder_new_len = encoder_new_len;
    return seq;
}

ENGINE_TEST(numerics_types, encoders_leave_the_cache_alone)
{
    const folio_attention_type types[] = {FOLIO_ATTENTION_ENCODER, FOLIO_ATTENTION_ENCODER_ONLY};
    for (int n = 0; n < 2; n++) {
        /* With a cache of NaN at hand, then without one: the same bits, and the cache untouched. */
        rig_init(&r, e.ctx);
        add_encoder(5, 5, 9, 9);
        add_encoder(3, 3, 2, 2);
        r.types = all_types;
        CHECK_OK(rig_run(&r, types[n]));
        kit_poison_cache(r.l.cache);
        uint64_t poison = kit_hash_cache(r.l.cache);
        CHECK_OK(rig_forward(&r, types[n]));
        CHECK(kit_hash_cache(r.l.cache) == poison);
        memcpy(&other, &r, sizeof r);
        r.kv.num_blocks = 0;
        r.types = 0;
        CHECK_OK(rig_run(&r, types[n]));
        CHECK(memcmp(r.out, other.out, sizeof r.out) == 0);
        CHECK(memcmp(r.lse, other.lse, sizeof r.lse) == 0);
        CHECK(isfinite(r.out[1][0][0][0]) && r.lse[1][0][0] != 0);
    }
}

ENGINE_TEST(numerics_types, cross_refuses_alibi_and_window)
{
    const float slopes[] = {0.5f, 0.25f};
    rig_init(&r, e.ctx);
    add_encoder(2, 2, 5, 5);
    r.t.slopes = slopes;
    CHECK_REFUSED(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER), FOLIO_ERR_UNSUPPORTED, "ALiBi");
    r.t.slopes = NULL;
    r.desc.windowed = 1;
    r.desc.window_left = r.desc.window_right = 3;
    CHECK_REFUSED(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER), FOLIO_ERR_UNSUPPORTED, "window");
    r.desc.windowed = 0;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER));
}

ENGINE_TEST(numerics_types, rows_of_each_type)
{
    /* DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER. */
    const int64_t rows[] = {5, 7, 5, 5}, new_rows[] = {5, 7, 5, 7};
    for (int n = 0; n < 4; n++) {
        folio_attention_type type = (folio_attention_type)n;
        rig_init(&r, e.ctx);
        add_encoder(4, 4, 7, 7);
        add_encoder(1, 9, 3, 0);
        CHECK_INT(rig_rows(&r, type, 0) + rig_rows(&r, type, 1), rows[n]);
        CHECK_INT(rig_new_rows(&r, type, 0) + rig_new_rows(&r, type, 1), new_rows[n]);
        CHECK_OK(rig_run(&r, type));
        /* One row too few or too many, of q and out or of k and v, does not fit the batch. */
        for (int off = -1; off <= 1; off += 2) {
            r.q_rows_off = off;
            CHECK_INT(rig_forward(&r, type), FOLIO_ERR_ARGUMENT);
            r.q_rows_off = 0;
            r.kv_rows_off = off;
            CHECK_INT(rig_forward(&r, type), FOLIO_ERR_ARGUMENT);
            r.kv_rows_off = 0;
        }
    }
}

ENGINE_TEST(numerics_types, cross_mixes_new_and_cached_encoders)
{
    rig_init(&r, e.ctx);
    add_encoder(2, 8, 6, 0);
    add_encoder(3, 3, 9, 9);
    add_encoder(1, 5, 4, 0);
    add_encoder(2, 2, 3, 3);
    r.desc.scale = 0.5f;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER));
    /* What was new is now cached: the next step, with k = v = NULL, has the same bits. */
    memcpy(&other, &r, sizeof r);
    for (int s = 0; s < 4; s++) r.seqs[s].encoder_new_len = 0;
    CHECK_OK(rig_replan(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)));
    CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_ENCODER_DECODER));
    CHECK(memcmp(r.out, other.out, sizeof r.out) == 0);
    CHECK(memcmp(r.lse, other.lse, sizeof r.lse) == 0);
}

/* A batch whose sequences have no encoder keys: as a sequence without beside others that have some. */
ENGINE_TEST(numerics_types, cross_without_keys_gives_zeros)
{
    rig_init(&r, e.ctx);
    add_encoder(2, 8, 0, 0);
    add_encoder(1, 3, 0, 0);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER));
    for (int s = 0; s < 2; s++)
        for (int h = 0; h < 2; h++) {
            CHECK_SEEN(&r, s, 0, h, 0);
            CHECK(r.lse[s][0][h] == -INFINITY);
        }
}

/* Cross attention through a cache of its own, with fewer blocks or more than the decoder's. */
ENGINE_TEST(numerics_types, cross_cache_of_its_own)
{
    rig_init(&r, e.ctx);
    add_encoder(2, 2, 7, 7);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER));
    memcpy(&other, &r, sizeof r);
    folio_kv_cache *large = r.l.cache, *tiny = NULL;
    folio_kv_cache_desc cache = r.kv;
    cache.num_blocks = 4;
    CHECK_OK(folio_kv_cache_create(e.ctx, &cache, &tiny));
    for (int n = 0; n < 4; n++) {
        /* Small for cross or small for self; within its blocks, then one block past them. */
        bool small = n < 2, past = n % 2;
        r.cross_table[0][0] = small ? 3 : 159;
        r.cross_table[0][1] = past ? (small ? 4 : 160) : 0;
        if (!small) r.table[0][0] = 1;
        folio_status status = rig_replan(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER));
        CHECK_INT(status, past && !small ? FOLIO_ERR_ARGUMENT : FOLIO_OK);
        folio_plan_destroy(r.l.plan);
        r.l.plan = NULL;
        folio_attention *attention = r.l.attention;
        const uint32_t types = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER);
        folio_plan_desc desc = FOLIO_WITH(
            folio_plan_desc, .attentions = &attention, .types = &types, .num_attentions = 1,
            .block_size = r.kv.block_size, .num_blocks = small ? 160 : 4,
            .cross_num_blocks = small ? 4 : 160, .max_seqs = 1, .max_query_tokens = 2,
            .max_seq_len = 7, .max_encoder_tokens = 7);
        CHECK_OK(folio_plan_create(e.ctx, &desc, &r.l.plan));
        CHECK_INT(folio_plan_update(r.l.plan, r.l.batch, NULL),
                  past ? FOLIO_ERR_ARGUMENT : FOLIO_OK);
        if (past) continue;
        r.l.cache = small ? tiny : large;
        CHECK_OK(rig_forward(&r, FOLIO_ATTENTION_ENCODER_DECODER));
        r.l.cache = large;
        CHECK(memcmp(r.out, other.out, sizeof r.out) == 0);
    }
    folio_kv_cache_destroy(tiny);
}

ENGINE_TEST(numerics_types, encoder_new_len_is_all_or_nothing)
{
    for (int64_t new_len = 1; new_len <= 6; new_len++) {
        rig_init(&r, e.ctx);
        add_encoder(2, 2, 5, new_len);
        folio_status status = rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER);
        CHECK_INT(status, new_len == 5 ? FOLIO_OK : FOLIO_ERR_ARGUMENT);
    }
}

ENGINE_TEST(numerics_types, cross_without_keys)
{
    const float sinks[] = {0.5f, -3.0f};
    for (int n = 0; n < 2; n++) {
        rig_init(&r, e.ctx);
        add_encoder(2, 7, 4, 4);
        add_encoder(3, 3, 0, 0);
        add_encoder(2, 0, 5, 0); /* padding: its encoder_len says nothing */
        r.t.sinks = n ? sinks : NULL;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_ENCODER_DECODER));
        CHECK_SEEN(&r, 0, 1, 0, rig_range(0, 4));
        for (int s = 1; s < 3; s++) {
            for (int i = 0; i < (int)r.seqs[s].query_len; i++) {
                for (int h = 0; h < 2; h++) {
                    CHECK_SEEN(&r, s, i, h, 0u);
                    CHECK(r.lse[s][i][h] == (n ? sinks[h] : -INFINITY));
                }
            }
        }
    }
}

ENGINE_TEST(numerics_types, one_batch_serves_all_types)
{
    rig_init(&r, e.ctx);
    add_encoder(3, 3, 5, 5);
    add_encoder(1, 8, 4, 0);
    add_encoder(2, 0, 0, 0);
    CHECK_OK(rig_open(&r, all_types));
    for (int type = 0; type < 4; type++) {
        memset(r.out, 0, sizeof r.out);
        CHECK_OK(rig_forward(&r, (folio_attention_type)type));
        /* The same type with a batch and a plan of its own. */
        memcpy(&other, &r, sizeof r);
        other.l.attention = NULL;
        other.l.cache = NULL;
        other.l.batch = NULL;
        other.l.plan = NULL;
        memset(other.out, 0, sizeof other.out);
        CHECK_OK(rig_run(&other, (folio_attention_type)type));
        CHECK_MSG(memcmp(r.out, other.out, sizeof r.out) == 0, "%s differs",
                  folio_attention_type_name((folio_attention_type)type));
        rig_close(&other);
    }
}

ENGINE_TEST(numerics_types, padding_has_no_phase)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 2, 0)->phase = FOLIO_PHASE_PREFILL;
    rig_add(&r, 1, 5);
    rig_add(&r, 1, 0)->phase = FOLIO_PHASE_DECODE;
    rig_add(&r, 3, 3);
    CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
    folio_batch_info summary = {.struct_size = sizeof summary};
    CHECK_OK(folio_batch_get_info(r.l.batch, &summary));
    CHECK_INT(summary.num_prefills, 1);
    CHECK_INT(summary.num_prefill_tokens, 3);
    CHECK_INT(summary.num_decodes, 1);
    CHECK_INT(summary.num_decode_tokens, 1);
    CHECK_INT(summary.num_padding, 2);
    CHECK_INT(summary.num_padding_tokens, 3);
    CHECK_INT(summary.num_query_tokens, 7);
    const folio_phase phases[] = {FOLIO_PHASE_PREFILL, FOLIO_PHASE_DECODE, FOLIO_PHASE_AUTO};
    const int64_t num_seqs[] = {1, 1, 4}, num_tokens[] = {3, 1, 7};
    for (int n = 0; n < 3; n++) {
        folio_batch_view view = {.struct_size = sizeof view};
        CHECK_OK(folio_batch_get_view(r.l.batch, FOLIO_ATTENTION_DECODER, phases[n], &view));
        CHECK_INT(view.num_seqs, num_seqs[n]);
        CHECK_INT(view.num_query_tokens, num_tokens[n]);
    }
    /* A batch of padding only is neither prompts nor decodes. */
    rig_init(&r, e.ctx);
    rig_add(&r, 2, 0);
    CHECK_OK(rig_open(&r, FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)));
    CHECK_OK(folio_batch_get_info(r.l.batch, &summary));
    CHECK_INT(summary.num_prefills + summary.num_decodes, 0);
    CHECK_INT(summary.kind, FOLIO_BATCH_EMPTY);
}
