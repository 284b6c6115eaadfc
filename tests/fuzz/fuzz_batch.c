/*
 * fuzz_batch.c: calls on one batch: sequences of all kinds added one by one, cleared, counted and viewed. A model
 * counts along; a refused sequence must change nothing. Every element of every view is read.
 */
#include "fuzz/fuzz.h"

#include <stdlib.h>

const char fuzz_name[] = "batch";
enum { MAX_SEQS = 24, MAX_BLOCKS = 24 };

typedef struct world {
    folio_context *ctx;
    folio_batch *batch;
    folio_attention *attention;
    int32_t block_size, decode_query_len;
    int64_t num_seqs, rows, padding, decodes, encoder_rows;
    int64_t query_len[MAX_SEQS], seq_len[MAX_SEQS];
    int64_t slots[MAX_SEQS][16]; /* of the first new tokens */
} world;

static const int32_t *draw_table(fuzz_input *in, int64_t *num_blocks, int64_t tokens,
                                 int32_t block_size)
{
    int64_t need = tokens > 0 && tokens < 4096 ? (tokens + block_size - 1) / block_size : 0;
    int64_t given = need + fuzz_int(in, 0, 2);
    *num_blocks = fuzz_any(in, given, given);
    if (*num_blocks > given) *num_blocks = given - 1;
    if (*num_blocks >= 0) given = *num_blocks; /* the memory ends there */
    int32_t *table = fuzz_zeros(in, given, sizeof *table);
    int32_t first = (int32_t)fuzz_int(in, 0, 40);
    for (int64_t i = 0; i < given; i++) table[i] = (int32_t)(first + i);
    fuzz_spoil32(in, table, given, FOLIO_NO_BLOCK, 50);
    if (given > 0 && fuzz_chance(in, 6)) table[0] = FOLIO_NO_BLOCK;
    return table;
}

static folio_batch_seq draw_seq(fuzz_input *in, const world *w)
{
    folio_batch_seq s = FOLIO_INIT(folio_batch_seq);
    s.query_len = fuzz_any(in, 0, 12);
    if (s.query_len > 3000 && s.query_len < INT32_MAX) s.query_len = 3000; /* no memory is wasted */
    s.padding = fuzz_chance(in, 8);
    int64_t least = s.query_len > 1 ? s.query_len : 1;
    if (least > 4096) least = 1;
    if (!s.padding) s.seq_len = fuzz_any(in, least, least + 60);
    s.phase = (folio_phase)fuzz_any(in, 0, 2);
    s.causality = (folio_causality)fuzz_any(in, 0, 2);
    if (!fuzz_chance(in, 6))
        s.block_table = draw_table(in, &s.num_blocks, s.seq_len, w->block_size);
    bool whole = s.query_len >= 0 && s.query_len <= 4096;
    if (whole && fuzz_chance(in, 4)) {
        int64_t *slots = fuzz_zeros(in, s.query_len, sizeof *slots);
        for (int64_t i = 0; i < s.query_len; i++) slots[i] = fuzz_int(in, -1, 600);
        fuzz_spoil64(in, slots, s.query_len, -1, 600);
        s.slots = slots;
    }
    if (fuzz_chance(in, 4)) {
        s.positions_given = 1;
        s.first_query_pos = fuzz_any(in, -100, 1000);
        s.first_key_pos = fuzz_any(in, -100, 1000);
    }
    if (!s.padding && fuzz_chance(in, 3)) {
        s.encoder_len = fuzz_any(in, 0, 20);
        s.encoder_new_len = fuzz_any(in, 0, 1) ? s.encoder_len : 0;
        if (fuzz_chance(in, 2))
            s.cross_block_table = draw_table(in, &s.num_cross_blocks, s.encoder_len, w->block_size);
    }
    return s;
}

static void check_info(world *w)
{
    folio_batch_info i = FOLIO_INIT(folio_batch_info);
    FUZZ_CHECK(folio_batch_get_info(w->batch, &i) == FOLIO_OK, "no info");
    FUZZ_CHECK(
        i.num_seqs == w->num_seqs && i.num_query_tokens == w->rows && i.num_padding == w->padding &&
            i.num_encoder_tokens == w->encoder_rows,
        "%lld sequences, %lld rows, %lld padding, %lld encoder rows; expected %lld, %lld, %lld, %lld",
        (long long)i.num_seqs, (long long)i.num_query_tokens, (long long)i.num_padding,
        (long long)i.num_encoder_tokens, (long long)w->num_seqs, (long long)w->rows,
        (long long)w->padding, (long long)w->encoder_rows);
    FUZZ_CHECK(i.num_prefills + i.num_decodes + i.num_padding == i.num_seqs &&
                   i.num_prefill_tokens + i.num_decode_tokens + i.num_padding_tokens ==
                       i.num_query_tokens,
               "the counts do not add up");
}

/* What the view must say of a slot, where the table gives it. */
static void check_slots(const world *w, const folio_batch_view *v)
{
    for (int64_t i = 0, at = 0; i < v->num_seqs; at += v->query_lens[i++])
        for (int64_t t = 0; t < v->query_lens[i] && t < 16; t++)
            FUZZ_CHECK(v->slot_mapping[at + t] == w->slots[v->seqs[i]][t],
                       "sequence %lld, new token %lld: slot %lld, expected %lld",
                       (long long)v->seqs[i], (long long)t, (long long)v->slot_mapping[at + t],
                       (long long)w->slots[v->seqs[i]][t]);
}

static void check_view(fuzz_input *in, world *w)
{
    folio_attention_type type = (folio_attention_type)fuzz_any(in, 0, 3);
    folio_phase phase = (folio_phase)fuzz_any(in, 0, 2);
    folio_batch_view v = FOLIO_INIT(folio_batch_view);
    if (!fuzz_took(folio_batch_get_view(w->batch, type, phase, &v))) return;
    uint64_t sum = 0; /* every element is read */
    int64_t rows = 0;
    for (int64_t i = 0; i < v.num_seqs; i++) {
        FUZZ_CHECK(v.seqs[i] >= 0 && v.seqs[i] < w->num_seqs, "sequence %lld of %lld",
                   (long long)v.seqs[i], (long long)w->num_seqs);
        FUZZ_CHECK(v.query_start[i] == rows, "query_start[%lld] is %lld", (long long)i,
                   (long long)v.query_start[i]);
        rows += v.query_lens[i];
        sum += (uint64_t)v.query_rows[i] + (uint64_t)v.last_rows[i] + (uint64_t)v.key_start[i + 1];
        sum += (uint64_t)v.key_lens[i] + (uint64_t)v.context_lens[i];
        for (int64_t b = 0; v.table_start != NULL && b < v.table_start[i + 1] - v.table_start[i];
             b++)
            sum += (uint64_t)v.blocks[v.table_start[i] + b];
    }
    FUZZ_CHECK(rows == v.num_query_tokens, "%lld rows in a view of %lld", (long long)rows,
               (long long)v.num_query_tokens);
    for (int64_t i = 0; i < v.num_query_tokens; i++) sum += (uint64_t)v.positions[i];
    for (int64_t i = 0; v.slot_mapping != NULL && i < v.num_new_tokens; i++)
        sum += (uint64_t)v.slot_mapping[i];
    if (type == FOLIO_ATTENTION_DECODER && phase == FOLIO_PHASE_AUTO) check_slots(w, &v);
    volatile uint64_t keep = sum;
    (void)keep;
}

static void add(fuzz_input *in, world *w)
{
    folio_batch_seq s = draw_seq(in, w);
    if (!fuzz_took(folio_batch_add(w->batch, &s))) {
        check_info(w);
        return;
    }
    int64_t n = w->num_seqs++;
    w->rows += s.query_len;
    w->padding += s.padding;
    w->encoder_rows += s.padding ? 0 : s.encoder_new_len;
    for (int64_t t = 0; t < 16 && t < s.query_len; t++) {
        int64_t at = s.seq_len - s.query_len + t;
        int64_t block =
            s.block_table != NULL && at >= 0 && !s.padding ? s.block_table[at / w->block_size] : -1;
        w->slots[n][t] = s.padding         ? -1
                         : s.slots != NULL ? s.slots[t]
                         : s.query_len > s.seq_len || block < 0
                             ? -1
                             : block * w->block_size + at % w->block_size;
    }
}

static void write_bias(fuzz_input *in, world *w)
{
    enum { ROOM = 4000 };
    int64_t seq = fuzz_any(in, 0, w->num_seqs > 0 ? w->num_seqs - 1 : 0);
    int64_t capacity = fuzz_any(in, ROOM, ROOM);
    if (capacity > ROOM) capacity = ROOM - 1;
    float *out = fuzz_zeros(in, ROOM, sizeof *out);
    fuzz_took(folio_bias_write(w->attention, w->batch, (folio_attention_type)fuzz_any(in, 0, 3),
                               seq, NULL, out, capacity));
}

void fuzz_run(fuzz_input *in)
{
    world w = {.ctx = fuzz_context(0)};
    static const int32_t sizes[] = {16, 1, 2, 5, 32};
    w.block_size = FUZZ_PICK(in, sizes);
    folio_batch_desc desc = FOLIO_WITH(
        folio_batch_desc, .block_size = (int32_t)fuzz_any(in, w.block_size, w.block_size),
        .decode_query_len = (int32_t)fuzz_any(in, 0, 3), .max_seqs = fuzz_any(in, 0, 3),
        .max_query_tokens = fuzz_any(in, 0, 9), .max_blocks = fuzz_any(in, 0, 9),
        .max_encoder_tokens = fuzz_any(in, 0, 9));
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32,
                   .windowed = (int32_t)fuzz_int(in, 0, 1), .window_left = 3, .window_right = -1);
    FUZZ_CHECK(folio_attention_create(w.ctx, &a, &w.attention) == FOLIO_OK, "no attention");
    if (fuzz_took(folio_batch_create(w.ctx, &desc, &w.batch)) && desc.block_size == w.block_size) {
        for (int64_t n = fuzz_int(in, 1, MAX_SEQS); n > 0 && in->left > 0; n--) {
            int64_t what = fuzz_int(in, 0, 15);
            if (what < 10) add(in, &w);
            else if (what < 13) check_view(in, &w);
            else if (what == 13 && w.num_seqs > 0) write_bias(in, &w);
            else if (what == 14)
                folio_batch_is_complete(w.batch, (folio_attention_type)fuzz_int(in, 0, 3), NULL);
            else if (fuzz_chance(in, 4)) {
                folio_batch_clear(w.batch);
                w.num_seqs = w.rows = w.padding = w.encoder_rows = 0;
            }
        }
        check_info(&w);
        for (int type = 0; type < 4; type++) check_view(in, &w);
    }
    folio_batch_destroy(w.batch);
    folio_attention_destroy(w.attention);
}
