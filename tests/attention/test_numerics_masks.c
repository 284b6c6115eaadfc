/*
 * test_numerics_masks.c: positions and windows at their ends, statement by statement as the page docs/numerics.md
 * has them. V is the identity, so each row's out names the keys it saw.
 */
#include "attention/numerics_rig.h"

#include <stdlib.h>

static rig r;

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
