/*
 * test_cuda_step.c: the check of a step whose arrays lie on a device, run on the host: what is good comes through as
 * folio_batch would make it, and what is bad is emptied whatever it says, with no byte written outside.
 */
#include "backends/cuda/step/device_step.h"
#include "support.h"

#include <stdlib.h>

enum { SEQS = 7, ROWS = 40, LEN = 96, BLOCK = 16, BLOCKS = 50, STRIDE = LEN / BLOCK, GUARD = 8 };

typedef struct {
    int32_t starts[SEQS + 1], lens[SEQS], causality[SEQS], tables[SEQS][STRIDE], csr[SEQS + 1];
    int64_t slots[ROWS], query_pos[SEQS], key_pos[SEQS];
    folioi_cuda_counts counts[2];
    folioi_cuda_seq decoder[SEQS], encoder_only[SEQS];
    int32_t out_tables[SEQS * STRIDE + GUARD], problems[SEQS];
    int64_t out_slots[ROWS + GUARD];
    folioi_device_step d;
} world;

static void make_world(world *w)
{
    memset(w, 0, sizeof *w);
    for (int i = 0; i < SEQS; i++) {
        w->starts[i + 1] = w->starts[i] + i; /* 0 to 6 rows */
        w->lens[i] = i == 3 ? 0 : i + i * 13;
        w->csr[i + 1] = (i + 1) * STRIDE;
        for (int b = 0; b < STRIDE; b++) w->tables[i][b] = (i * STRIDE + b) % BLOCKS;
    }
    memset(w->out_tables, 0x55, sizeof w->out_tables);
    memset(w->out_slots, 0x55, sizeof w->out_slots);
    w->d = (folioi_device_step){.num_seqs = SEQS,
                                .query_start = w->starts,
                                .seq_lens = w->lens,
                                .blocks = w->tables[0],
                                .row_stride = STRIDE,
                                .num_table_entries = SEQS * STRIDE,
                                .num_rows = ROWS,
                                .max_query_len = 6,
                                .max_seq_len = LEN,
                                .num_blocks = BLOCKS,
                                .window_left = -1,
                                .window_right = -1,
                                .block_size = BLOCK,
                                .counts = {&w->counts[0], &w->counts[1]},
                                .decoder = w->decoder,
                                .encoder_only = w->encoder_only,
                                .tables = w->out_tables,
                                .table_stride = STRIDE,
                                .slots_out = w->out_slots,
                                .slots_room = ROWS,
                                .problems = w->problems};
}

/* Nothing bad is in what kernels will read, whatever the caller's arrays hold. */
static void check_safe(const world *w)
{
    int64_t row = 0;
    for (int i = 0; i < w->d.num_seqs; i++) {
        const folioi_cuda_seq *s = &w->decoder[i];
        CHECK(s->query_row >= row && s->query_row + s->query_len <= w->d.num_rows);
        row = s->query_row + s->query_len;
        CHECK(s->key_len >= 0 && s->key_len <= LEN && s->query_len <= w->d.max_query_len);
        CHECK(s->context_len >= 0 && s->context_len <= s->key_len);
        folioi_range seen = {0, 0};
        if (s->query_len > 0) {
            seen.begin = seq_keys(s, w->d.window_left, w->d.window_right, 0).begin;
            seen.end = seq_keys(s, w->d.window_left, w->d.window_right, s->query_len - 1).end;
        }
        for (int32_t j = seen.begin; j < seen.end && w->d.blocks != NULL; j++) {
            int32_t block = w->out_tables[s->table + j / BLOCK];
            CHECK_MSG(block >= 0 && block < BLOCKS, "seq %d key %d is in block %d", i, j, block);
        }
        for (int64_t r = s->new_row; r < s->new_row + s->query_len; r++)
            CHECK(w->out_slots[r] >= -1 && w->out_slots[r] < BLOCKS * BLOCK);
        CHECK(w->problems[i] == FOLIOI_STEP_FINE || (s->query_len == 0 && s->key_len == 0));
    }
    CHECK(row <= w->counts[1].num_rows && w->counts[1].num_rows <= w->d.num_rows);
    for (int i = 0; i < GUARD; i++) {
        CHECK_INT(w->out_slots[ROWS + i], 0x5555555555555555);
        CHECK_INT(w->out_tables[SEQS * STRIDE + i], 0x55555555);
    }
}

TEST(cuda_step, good_arrays_come_through)
{
    world w;
    for (int form = 0; form < 3; form++) {
        make_world(&w);
        if (form == 1) w.d.table_start = w.csr, w.d.row_stride = 0;
        if (form == 2) {
            for (int r = 0; r < ROWS; r++) w.slots[r] = r % 5 ? 7 * r : -1;
            w.d.slots = w.slots;
            w.d.private_slots = 1; /* the one of one new token has none */
        }
        CHECK_INT(folioi_device_step_check(&w.d), -1);
        check_safe(&w);
        CHECK_INT(w.counts[0].num_emptied, 0);
        CHECK_INT(w.counts[1].num_rows, w.starts[SEQS]);
        for (int i = 0; i < SEQS; i++) {
            const folioi_cuda_seq *s = &w.decoder[i], *e = &w.encoder_only[i];
            CHECK_INT(s->query_row, w.starts[i]);
            CHECK_INT(s->query_len, i);
            CHECK_INT(s->key_len, w.lens[i]);
            CHECK_INT(s->context_len, i == 3 ? 0 : w.lens[i] - i);
            CHECK_INT(s->first_query_pos, s->context_len);
            CHECK_INT(s->causal, 1);
            CHECK_INT(e->key_len, i == 3 ? 0 : i);
            CHECK_INT(e->causal, 0);
            for (int r = 0; r < i; r++) {
                int at = w.lens[i] - i + r, row = w.starts[i] + r;
                int64_t by_table = w.tables[i][at / BLOCK] * BLOCK + at % BLOCK;
                CHECK_INT(w.out_slots[row], i == 3 ? -1 : form == 2 ? w.slots[row] : by_table);
            }
        }
    }
}

/* A row past the keys by more than the window sees none, and no block is looked for: neither the one in
 * which the keys end nor any other. */
TEST(cuda_step, blocks_that_no_row_sees_may_be_missing)
{
    for (int seen = 0; seen < 2; seen++) {
        world w;
        make_world(&w);
        w.d.window_left = 3;
        w.d.first_query_pos = w.query_pos, w.d.first_key_pos = w.key_pos;
        for (int i = 0; i < SEQS; i++) w.query_pos[i] = w.lens[i] - i;
        w.query_pos[4] = w.lens[4] + 3 - seen; /* 56 keys: they end within the fourth block */
        for (int b = 0; b < STRIDE; b++) w.tables[4][b] = -1;
        CHECK_INT(folioi_device_step_check(&w.d), seen ? 4 : -1);
        CHECK_INT(w.problems[4], seen ? FOLIOI_STEP_BLOCK : FOLIOI_STEP_FINE);
        CHECK_INT(w.decoder[4].key_len, seen ? 0 : 56);
        check_safe(&w);
    }
}

/* One thing bad at a time: exactly its sequence is emptied. */
TEST(cuda_step, what_is_bad_is_emptied)
{
    static const struct {
        int32_t seq, problem;
    } want[] = {
        {5, FOLIOI_STEP_QUERY_LEN},   {4, FOLIOI_STEP_SEQ_LEN},     {4, FOLIOI_STEP_SEQ_LEN},
        {4, FOLIOI_STEP_SEQ_LEN},     {4, FOLIOI_STEP_BLOCK},       {4, FOLIOI_STEP_BLOCK},
        {2, FOLIOI_STEP_SLOT},        {2, FOLIOI_STEP_SLOT},        {1, FOLIOI_STEP_POSITION},
        {1, FOLIOI_STEP_CAUSALITY},   {1, FOLIOI_STEP_NO_TABLE},    {6, FOLIOI_STEP_TABLE_START},
        {6, FOLIOI_STEP_TABLE_START}, {6, FOLIOI_STEP_TABLE_START}, {1, FOLIOI_STEP_PLACE}};
    for (int c = 0; c < (int)(sizeof want / sizeof want[0]); c++) {
        world w;
        make_world(&w);
        switch (c) {
        case 0: w.d.max_query_len = 4; break; /* sequences 5 and 6 */
        case 1: w.lens[4] = LEN + 1; break;
        case 2: w.lens[4] = 3; break; /* below its query */
        case 3: w.lens[4] = -1; break;
        case 4: w.tables[4][0] = BLOCKS; break;
        case 5: w.tables[4][1] = -1; break;
        case 6: w.d.slots = w.slots, w.slots[2] = BLOCKS * BLOCK; break;
        case 7: w.d.slots = w.slots, w.slots[1] = -2; break;
        case 8:
            w.d.first_query_pos = w.query_pos, w.d.first_key_pos = w.key_pos;
            w.key_pos[1] = (int64_t)1 << 40;
            break;
        case 9: w.d.causality = w.causality, w.causality[1] = 3; break;
        case 10: w.d.blocks = NULL; break; /* everyone with a context */
        case 11: w.d.table_start = w.csr, w.csr[SEQS]--, w.csr[SEQS - 1]++, w.lens[6] = LEN; break;
        case 12: w.d.table_start = w.csr, w.d.num_table_entries--; break; /* its last entry */
        case 13: w.d.table_start = w.csr, w.csr[SEQS]--, w.lens[6] = LEN; break; /* one short */
        case 14: w.d.slots = w.slots, w.d.private_slots = 1; break; /* those of one new token */
        }
        CHECK_INT(folioi_device_step_check(&w.d), want[c].seq);
        CHECK_INT(w.problems[want[c].seq], want[c].problem);
        CHECK_INT(w.counts[1].num_emptied, c == 0 ? 2 : c == 10 ? 5 : 1);
        check_safe(&w);
    }
}

/* Encoder-only attention has no cache: what was computed before this step takes no table. */
TEST(cuda_step, encoder_only_needs_no_table)
{
    world w;
    make_world(&w);
    w.d.blocks = NULL;
    w.d.decoder = NULL;
    w.d.tables = NULL;
    w.d.slots_out = NULL;
    CHECK_INT(folioi_device_step_check(&w.d), -1);
    for (int i = 0; i < SEQS; i++) CHECK_INT(w.encoder_only[i].key_len, i == 3 ? 0 : i);
}

/* A hole is fine where no row sees it. */
TEST(cuda_step, a_window_leaves_blocks_behind)
{
    world w;
    make_world(&w);
    w.tables[6][0] = -1;
    w.d.window_left = 50; /* row 78 of 84 keys sees 28 on */
    CHECK_INT(folioi_device_step_check(&w.d), -1);
    CHECK_INT(w.out_tables[6 * STRIDE], -1);
    w.d.window_left = 70;
    CHECK_INT(folioi_device_step_check(&w.d), 6);
    check_safe(&w);
}

/* Rows belong to one sequence each, however wild query_start is. */
TEST(cuda_step, any_numbers_are_safe)
{
    uint32_t seed = 3;
    for (int round = 0; round < 20000; round++) {
        world w;
        make_world(&w);
        int32_t *const wild[] = {w.starts, w.lens, w.tables[0], w.csr};
        const int32_t sizes[] = {SEQS + 1, SEQS, SEQS * STRIDE, SEQS + 1};
        static const int32_t numbers[] = {-1, 0, 1, INT32_MAX, INT32_MIN, BLOCKS, LEN, 17};
        for (int n = 0; n < 3; n++) {
            seed = seed * 1664525u + 1013904223u;
            uint32_t which = seed >> 28 & 3;
            wild[which][(int32_t)(seed >> 8 & 0xffff) % sizes[which]] = numbers[seed >> 25 & 7];
        }
        if (round % 2) w.d.table_start = w.csr;
        if (round % 3 == 0) w.d.window_left = 9;
        folioi_device_step_check(&w.d);
        check_safe(&w);
        if (test_failures() > 0) return;
    }
}
