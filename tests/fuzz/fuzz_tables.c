/*
 * fuzz_tables.c: the forms of page tables: one step as single sequences, as ROWS, CSR with and without seq_lens, and
 * SLOTS, with indices of 4 and 8 bytes. All forms that are accepted give the same view; a refused one leaves the batch
 * empty.
 */
#include "fuzz/fuzz.h"

#include <stdlib.h>

const char fuzz_name[] = "tables";
enum { MAX_SEQS = 8, MAX_ROW = 8 };

typedef struct world {
    folio_context *ctx;
    int32_t block_size;
    int64_t num_seqs, num_blocks[MAX_SEQS];
    int32_t query_len[MAX_SEQS], seq_len[MAX_SEQS];
    int32_t table[MAX_SEQS][MAX_ROW];
} world;

static void draw_world(fuzz_input *in, world *w)
{
    static const int32_t sizes[] = {1, 16, 2, 5};
    w->block_size = FUZZ_PICK(in, sizes);
    w->num_seqs = fuzz_int(in, 1, MAX_SEQS);
    for (int64_t i = 0; i < w->num_seqs; i++) {
        w->num_blocks[i] = fuzz_int(in, 1, MAX_ROW);
        int64_t least = (w->num_blocks[i] - 1) * w->block_size + 1;
        w->seq_len[i] = (int32_t)fuzz_int(in, least, w->num_blocks[i] * w->block_size);
        w->query_len[i] = (int32_t)fuzz_int(in, 1, w->seq_len[i] < 6 ? w->seq_len[i] : 6);
        for (int64_t b = 0; b < w->num_blocks[i]; b++)
            w->table[i][b] = (int32_t)fuzz_int(in, 0, 200);
    }
}

/* A view, as one number; -1: none. */
static uint64_t digest(folio_batch *batch)
{
    folio_batch_view v = FOLIO_INIT(folio_batch_view);
    uint64_t h = 0;
    FUZZ_CHECK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v) ==
                   FOLIO_OK,
               "no view");
    h = kit_mix((uint64_t)v.num_seqs);
    for (int64_t i = 0; i < v.num_seqs; i++) {
        h = kit_mix(h ^ (uint64_t)v.query_lens[i] ^ (uint64_t)v.key_lens[i] << 20);
        /* a table may have more blocks than its length needs: in ROWS they are not read */
        for (int64_t b = v.table_start[i]; b < v.table_start[i + 1]; b++)
            h = kit_mix(h ^ (uint64_t)v.blocks[b]);
    }
    for (int64_t i = 0; i < v.num_query_tokens; i++)
        h = kit_mix(h ^ (uint64_t)v.slot_mapping[i] ^ (uint64_t)v.positions[i] << 32);
    return h;
}

static uint64_t by_sequences(fuzz_input *in, const world *w)
{
    folio_batch_desc desc = FOLIO_WITH(folio_batch_desc, .block_size = w->block_size);
    folio_batch *batch = NULL;
    FUZZ_CHECK(folio_batch_create(w->ctx, &desc, &batch) == FOLIO_OK, "no batch");
    for (int64_t i = 0; i < w->num_seqs; i++) {
        int32_t *table = fuzz_zeros(in, w->num_blocks[i], sizeof *table);
        memcpy(table, w->table[i], (size_t)w->num_blocks[i] * sizeof *table);
        folio_batch_seq s =
            FOLIO_WITH(folio_batch_seq, .query_len = w->query_len[i], .seq_len = w->seq_len[i],
                       .block_table = table, .num_blocks = w->num_blocks[i]);
        FUZZ_CHECK(folio_batch_add(batch, &s) == FOLIO_OK, "sequence %lld is refused",
                   (long long)i);
    }
    uint64_t h = digest(batch);
    folio_batch_destroy(batch);
    return h;
}

static void put(void *indices, int32_t bytes, int64_t at, int64_t value)
{
    if (bytes == 8) ((int64_t *)indices)[at] = value;
    else ((int32_t *)indices)[at] = (int32_t)value;
}

static void spoil(fuzz_input *in, void *indices, int32_t bytes, int64_t n)
{
    if (bytes == 8) fuzz_spoil64(in, indices, n, -1, INT32_MAX);
    else fuzz_spoil32(in, indices, n, -1, 200);
}

static void draw_rows(fuzz_input *in, const world *w, folio_table *t)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < w->num_seqs; i++)
        longest = w->num_blocks[i] > longest ? w->num_blocks[i] : longest;
    int64_t stride = longest + fuzz_int(in, 0, 2);
    int32_t bytes = t->index_bytes == 8 ? 8 : 4;
    void *indices = fuzz_poison(in, w->num_seqs * stride, (size_t)bytes);
    for (int64_t i = 0; i < w->num_seqs; i++)
        for (int64_t b = 0; b < w->num_blocks[i]; b++)
            put(indices, bytes, i * stride + b, w->table[i][b]);
    spoil(in, indices, bytes, w->num_seqs * stride);
    t->indices = indices;
    t->row_stride = fuzz_any(in, stride, stride);
    if (t->row_stride > stride) t->row_stride = 0; /* more would be past the caller's memory */
}

/* slots: each index is a key's slot, not a block. */
static void draw_csr(fuzz_input *in, const world *w, folio_table *t, bool slots)
{
    int32_t *start = fuzz_zeros(in, w->num_seqs + 1, sizeof *start),
            bytes = t->index_bytes == 8 ? 8 : 4, all = 0;
    for (int64_t i = 0; i < w->num_seqs; i++)
        all += (int32_t)(slots ? w->seq_len[i] : w->num_blocks[i]);
    void *indices = fuzz_zeros(in, all, (size_t)bytes);
    int64_t at = 0;
    for (int64_t i = 0; i < w->num_seqs; i++) {
        start[i] = (int32_t)at;
        for (int64_t b = 0; b < (slots ? w->seq_len[i] : w->num_blocks[i]); b++, at++)
            put(indices, bytes, at, w->table[i][b]);
    }
    start[w->num_seqs] = (int32_t)at;
    fuzz_spoil32(in, start, w->num_seqs, 0, at);
    spoil(in, indices, bytes, at);
    t->num_indices = fuzz_any(in, at, at);
    t->indices = indices;
    if (t->num_indices > 0 && t->num_indices < at) { /* the memory ends there */
        void *fewer = fuzz_zeros(in, t->num_indices, (size_t)bytes);
        t->indices = memcpy(fewer, indices, (size_t)(t->num_indices * bytes));
    }
    t->start = start;
    if (fuzz_is_valid(in) && fuzz_chance(in, 2)) t->num_indices = 0;
}

static void draw_last(fuzz_input *in, const world *w, folio_table *t)
{
    int32_t *last = fuzz_zeros(in, w->num_seqs, sizeof *last);
    for (int64_t i = 0; i < w->num_seqs; i++) {
        int64_t n = w->seq_len[i] - (w->num_blocks[i] - 1) * w->block_size;
        last[i] = (int32_t)n;
    }
    fuzz_spoil32(in, last, w->num_seqs, 1, w->block_size);
    t->last_block_len = last;
}

static void try_form(fuzz_input *in, const world *w, uint64_t expected)
{
    bool slots = w->block_size == 1 && fuzz_chance(in, 2), csr = slots || fuzz_chance(in, 2);
    static const int32_t index_bytes[] = {0, 4, 8};
    folio_step s = FOLIO_WITH(folio_step, .num_seqs = w->num_seqs);
    int32_t *query_start = fuzz_zeros(in, w->num_seqs + 1, sizeof *query_start);
    int32_t *seq_lens = fuzz_zeros(in, w->num_seqs, sizeof *seq_lens);
    for (int64_t i = 0; i < w->num_seqs; i++) {
        query_start[i + 1] = query_start[i] + w->query_len[i];
        seq_lens[i] = w->seq_len[i];
    }
    fuzz_spoil32(in, query_start, w->num_seqs + 1, 0, query_start[w->num_seqs]);
    fuzz_spoil32(in, seq_lens, w->num_seqs, 0, w->num_blocks[0] * w->block_size);
    s.query_start = query_start;
    s.num_query_tokens = fuzz_chance(in, 2) ? 0 : query_start[w->num_seqs];
    s.table.kind = slots ? FOLIO_TABLE_SLOTS : csr ? FOLIO_TABLE_CSR : FOLIO_TABLE_ROWS;
    s.table.index_bytes = (int32_t)FUZZ_PICK(in, index_bytes);
    if (csr) draw_csr(in, w, &s.table, slots);
    else draw_rows(in, w, &s.table);
    bool without = csr && fuzz_chance(in, 2);
    if (!without) s.seq_lens = seq_lens;
    if (without && !slots) draw_last(in, w, &s.table);
    folio_batch_desc desc =
        FOLIO_WITH(folio_batch_desc, .block_size = slots && fuzz_chance(in, 2) ? 0 : w->block_size);
    folio_batch *batch = NULL;
    folio_batch_info info = FOLIO_INIT(folio_batch_info);
    FUZZ_CHECK(folio_batch_create(w->ctx, &desc, &batch) == FOLIO_OK, "no batch");
    if (fuzz_took(folio_batch_set(batch, &s))) {
        uint64_t got = digest(batch);
        FUZZ_CHECK(!fuzz_is_valid(in) || got == expected,
                   "kind %d with indices of %d bytes gives another view", s.table.kind,
                   s.table.index_bytes);
    } else {
        FUZZ_CHECK(!fuzz_is_valid(in), "a valid step is refused");
        FUZZ_CHECK(folio_batch_get_info(batch, &info) == FOLIO_OK && info.num_seqs == 0,
                   "a refused batch is not empty");
    }
    folio_batch_destroy(batch);
}

void fuzz_run(fuzz_input *in)
{
    world w = {.ctx = fuzz_context(0)};
    draw_world(in, &w);
    uint64_t expected = by_sequences(in, &w);
    for (int64_t n = fuzz_int(in, 1, 4); n > 0; n--) try_form(in, &w, expected);
}
