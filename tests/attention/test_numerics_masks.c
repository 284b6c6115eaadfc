/*
 * test_numerics_masks.c: positions, causality and windows, statement by statement as the page
 * docs/numerics.md has them. V is the identity, so each row's out names the keys it saw.
 */
#include "attention/numerics_rig.h"

#include <stdlib.h>

static rig r;

ENGINE_TEST(numerics_masks, positions_follow_the_context)
{
    const float slopes[] = {0.25f, 2.0f};
    rig_init(&r, e.ctx);
    rig_add(&r, 3, 11);
    rig_add(&r, 1, 17);
    r.t.slopes = slopes;
    memset(r.q, 0, sizeof r.q);
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 3; i++) {
        CHECK_SEEN(&r, 0, i, 0, rig_range(0, 8 + i + 1));
        for (int j = 0; j <= 8 + i; j++)
            CHECK_NEAR(rig_score(&r, 0, i, 0, j), -0.25 * (8 + i - j), 4e-6);
    }
    CHECK_SEEN(&r, 1, 0, 1, rig_range(0, 17));
    CHECK_NEAR(rig_score(&r, 1, 0, 1, 16), 0, 4e-6);
    CHECK_NEAR(rig_score(&r, 1, 0, 1, 10), -12, 1e-5);
}

ENGINE_TEST(numerics_masks, given_positions_move_mask_and_alibi)
{
    const float slopes[] = {0.125f, 0.5f};
    for (int windowed = 0; windowed < 2; windowed++) {
        rig_init(&r, e.ctx);
        folio_batch_seq *seq = rig_add(&r, 5, 20);
        seq->positions_given = 1;
        seq->first_query_pos = 100;
        seq->first_key_pos = 93;
        rig_add(&r, 2, 9);
        r.desc.windowed = windowed;
        r.desc.window_left = 6;
        r.t.slopes = slopes;
        memset(r.q, 0, sizeof r.q);
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int i = 0; i < 5; i++) {
            int first = windowed ? 100 + i - 6 - 93 : 0;
            CHECK_SEEN(&r, 0, i, 1, rig_range(first, 100 + i - 93 + 1));
            for (int j = first; j <= 7 + i; j++)
                CHECK_NEAR(rig_score(&r, 0, i, 1, j), -0.5 * abs(100 + i - 93 - j), 4e-6);
        }
        /* The neighbour keeps its own positions. */
        CHECK_SEEN(&r, 1, 1, 0, rig_range(windowed ? 2 : 0, 9));
    }
}

ENGINE_TEST(numerics_masks, given_positions_hide_all_or_nothing)
{
    rig_init(&r, e.ctx);
    folio_batch_seq *seq = rig_add(&r, 2, 10);
    seq->positions_given = 1;
    seq->first_query_pos = 50;
    seq->first_key_pos = 60;
    seq = rig_add(&r, 2, 10);
    seq->positions_given = 1;
    seq->first_query_pos = 60;
    seq->first_key_pos = 50;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 2; i++) {
        CHECK_SEEN(&r, 0, i, 0, 0u);
        CHECK(r.lse[0][i][0] == -INFINITY);
        CHECK_SEEN(&r, 1, i, 0, rig_range(0, 10));
    }
}

ENGINE_TEST(numerics_masks, causal_rows_see_up_to_themselves)
{
    for (int context = 0; context <= 9; context += 3) {
        rig_init(&r, e.ctx);
        rig_add(&r, 9, context + 9);
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int i = 0; i < 9; i++)
            for (int h = 0; h < 2; h++) CHECK_SEEN(&r, 0, i, h, rig_range(0, context + i + 1));
    }
}

static void check_window(const rig_engine *e, int64_t left, int64_t right,
                         folio_causality causality)
{
    rig_init(&r, e->ctx);
    rig_add(&r, 8, 21)->causality = causality;
    r.desc.windowed = 1;
    r.desc.window_left = left;
    r.desc.window_right = right;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int64_t i = 0; i < 8; i++) {
        int64_t pos = 13 + i;
        int64_t first = left < 0 ? 0 : pos - left;
        int64_t end = right < 0 ? 21 : pos + right + 1;
        if (causality != FOLIO_CAUSAL_NO) end = pos + 1;
        CHECK_SEEN(&r, 0, i, 1, rig_range(first, end < 21 ? end : 21));
    }
}

ENGINE_TEST(numerics_masks, window_sides)
{
    const int64_t sides[][2] = {{2, 1}, {-1, 1}, {2, -1}, {-1, -1},
                                {0, 0}, {5, 0},  {0, 4},  {100, 100}};
    for (size_t n = 0; n < sizeof sides / sizeof sides[0]; n++)
        check_window(&e, sides[n][0], sides[n][1], FOLIO_CAUSAL_NO);
}

ENGINE_TEST(numerics_masks, windows_wider_than_any_sequence)
{
    const int64_t wide[] = {(int64_t)1 << 31, ((int64_t)1 << 32) + 1, (int64_t)1 << 39};
    for (int n = 0; n < 3; n++) {
        check_window(&e, wide[n], wide[n], FOLIO_CAUSAL_NO);
        check_window(&e, wide[n], 0, FOLIO_CAUSAL_AUTO);
        /* And positions as far: a row sees the keys within reach of it. */
        rig_init(&r, e.ctx);
        folio_batch_seq *seq = rig_add(&r, 3, 12);
        seq->positions_given = 1;
        seq->first_query_pos = wide[n] + 7;
        seq->first_key_pos = wide[n];
        r.desc.windowed = 1;
        r.desc.window_left = 4;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int i = 0; i < 3; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(3 + i, 8 + i));
    }
}

ENGINE_TEST(numerics_masks, causality_cuts_the_right_side)
{
    const int64_t rights[] = {-1, 0, 1, 3};
    for (int n = 0; n < 4; n++) {
        check_window(&e, 2, rights[n], FOLIO_CAUSAL_AUTO);
        check_window(&e, -1, rights[n], FOLIO_CAUSAL_YES);
    }
}

ENGINE_TEST(numerics_masks, sliding_window_includes_itself)
{
    for (int64_t w = 1; w <= 20; w++) {
        rig_init(&r, e.ctx);
        rig_add(&r, 19, 19);
        rig_add(&r, 1, 23);
        r.desc.windowed = 1;
        r.desc.window_left = w - 1;
        CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
        for (int64_t i = 0; i < 19; i++) CHECK_SEEN(&r, 0, i, 0, rig_range(i + 1 - w, i + 1));
        CHECK_SEEN(&r, 1, 0, 0, rig_range(23 - w, 23));
    }
}

ENGINE_TEST(numerics_masks, causality_is_per_sequence)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 4, 7);
    rig_add(&r, 4, 7)->causality = FOLIO_CAUSAL_NO;
    rig_add(&r, 4, 7)->causality = FOLIO_CAUSAL_YES;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    for (int i = 0; i < 4; i++) {
        CHECK_SEEN(&r, 0, i, 0, rig_range(0, 4 + i));
        CHECK_SEEN(&r, 1, i, 0, rig_range(0, 7));
        CHECK_SEEN(&r, 2, i, 0, rig_range(0, 4 + i));
    }
}

ENGINE_TEST(numerics_masks, released_blocks_are_not_needed)
{
    rig_init(&r, e.ctx);
    rig_add(&r, 2, 21);
    r.desc.windowed = 1;
    r.desc.window_left = 3;
    /* Rows at 19 and 20 see from key 16 on: block 4 of size 4. */
    for (int b = 0; b < 4; b++) r.table[0][b] = FOLIO_NO_BLOCK;
    CHECK_OK(rig_run(&r, FOLIO_ATTENTION_DECODER));
    CHECK_SEEN(&r, 0, 0, 0, rig_range(16, 20));
    CHECK_SEEN(&r, 0, 1, 0, rig_range(17, 21));
    /* One token more of window and block 3 is needed. */
    r.desc.window_left = 4;
    CHECK_REFUSED(rig_run(&r, FOLIO_ATTENTION_DECODER), FOLIO_ERR_ARGUMENT, "block");
}
