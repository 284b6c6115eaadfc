/*
 * batch_step.c: a whole step from arrays. A table only says where a sequence's blocks are and, where no array does, how
 * long it is; everything else goes through folio_batch_add.
 */
#include "batch/batch.h"

#include "core/checked.h"

#include <stdio.h>

/* Starts at 0 and never falls. */
static folio_status check_starts(const int32_t *start, int64_t n, const char *name)
{
    REQUIRE(start != NULL, "%s is NULL", name);
    REQUIRE_ALIGNED(start, "%s", name);
    REQUIRE(start[0] == 0, "%s[0] is %d; it must be 0", name, start[0]);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(start[i + 1] >= start[i], "%s[%lld] = %d is below %s[%lld] = %d", name,
                (long long)i + 1, start[i + 1], name, (long long)i, start[i]);
    return FOLIO_OK;
}

folio_status folioi_step_check_rows(const folio_step *s)
{
    REQUIRE(s->num_seqs >= 0 && s->num_seqs <= INT32_MAX,
            "step: num_seqs is %lld, outside [0, 2147483647]", (long long)s->num_seqs);
    REQUIRE(s->num_query_tokens >= 0 && s->num_query_tokens <= INT32_MAX,
            "step: num_query_tokens is %lld, outside [0, 2147483647]",
            (long long)s->num_query_tokens);
    if (s->num_seqs == 0) {
        REQUIRE(s->num_query_tokens == 0, "step: num_seqs is 0, yet num_query_tokens is %lld",
                (long long)s->num_query_tokens);
        return FOLIO_OK;
    }
    if (s->query_start == NULL) {
        REQUIRE(s->num_query_tokens % s->num_seqs == 0,
                "step: num_query_tokens is %lld for %lld sequences; lengths that differ need "
                "query_start",
                (long long)s->num_query_tokens, (long long)s->num_seqs);
        return FOLIO_OK;
    }
    TRY(check_starts(s->query_start, s->num_seqs, "query_start"));
    REQUIRE(s->num_query_tokens == 0 || s->num_query_tokens == s->query_start[s->num_seqs],
            "step: num_query_tokens is %lld, query_start[%lld] is %d",
            (long long)s->num_query_tokens, (long long)s->num_seqs, s->query_start[s->num_seqs]);
    return FOLIO_OK;
}

static folio_status check_arrays(const folio_step *s)
{
    REQUIRE_ALIGNED(s->seq_lens, "seq_lens");
    REQUIRE_ALIGNED(s->phases, "phases");
    REQUIRE_ALIGNED(s->causality, "causality");
    REQUIRE_ALIGNED(s->slots, "slots");
    REQUIRE_ALIGNED(s->first_query_pos, "first_query_pos");
    REQUIRE_ALIGNED(s->first_key_pos, "first_key_pos");
    REQUIRE_ALIGNED(s->encoder_lens, "encoder_lens");
    REQUIRE_ALIGNED(s->encoder_new_lens, "encoder_new_lens");
    REQUIRE_ALIGNED(s->cross_slots, "cross_slots");
    REQUIRE((s->first_query_pos == NULL) == (s->first_key_pos == NULL),
            "step: first_query_pos and first_key_pos must both be set or both be NULL");
    REQUIRE(s->encoder_lens != NULL || (s->encoder_new_lens == NULL && s->cross_slots == NULL &&
                                        s->cross_table.kind == FOLIO_TABLE_NONE),
            "step: encoder_lens is NULL, yet other encoder arrays are given");
    return FOLIO_OK;
}

static folio_status check_starts_of(const folio_table *t, int64_t num_seqs, const char *name)
{
    char start[32];
    snprintf(start, sizeof start, "%s.start", name);
    TRY(check_starts(t->start, num_seqs, start));
    REQUIRE_ALIGNED(t->last_block_len, "%s.last_block_len", name);
    int32_t end = t->start[num_seqs];
    REQUIRE(t->indices != NULL || end == 0, "%s.indices is NULL", name);
    REQUIRE(t->num_indices == 0 || end <= t->num_indices,
            "%s.start[%lld] = %d is above num_indices %lld", name, (long long)num_seqs, end,
            (long long)t->num_indices);
    return FOLIO_OK;
}

static folio_status check_table(const folio_batch *b, const folio_table *t, int64_t num_seqs,
                                const char *name)
{
    int32_t block_size = b->desc.block_size;
    REQUIRE((unsigned)t->kind <= FOLIO_TABLE_SLOTS, "%s.kind %d is unknown", name, (int)t->kind);
    if (t->kind == FOLIO_TABLE_NONE) {
        REQUIRE(t->indices == NULL, "%s.indices are given, yet %s.kind is FOLIO_TABLE_NONE", name,
                name);
        return FOLIO_OK;
    }
    REQUIRE(t->index_bytes == 0 || t->index_bytes == 4 || t->index_bytes == 8,
            "%s.index_bytes is %d, neither 4 nor 8", name, t->index_bytes);
    if (t->index_bytes == 8) REQUIRE_ALIGNED((const int64_t *)t->indices, "%s.indices", name);
    else REQUIRE_ALIGNED((const int32_t *)t->indices, "%s.indices", name);
    REQUIRE(block_size > 0,
            "%s: the batch has no block size: set folio_batch_desc.block_size or "
            ".cache",
            name);
    REQUIRE(t->kind != FOLIO_TABLE_SLOTS || block_size == 1,
            "%s: the batch's block size is %d, lists of slots need 1", name, block_size);
    if (t->kind != FOLIO_TABLE_ROWS) return check_starts_of(t, num_seqs, name);
    REQUIRE(t->indices != NULL, "%s.indices is NULL", name);
    REQUIRE(t->row_stride >= 0 && t->row_stride <= INT32_MAX,
            "%s.row_stride is %lld, outside [0, 2147483647]", name, (long long)t->row_stride);
    return FOLIO_OK;
}

/* Does an array or the table give every length? */
static folio_status check_lengths(const folio_batch *b, const folio_step *s)
{
    const folio_table *t = &s->table;
    if (s->seq_lens != NULL) return FOLIO_OK;
    REQUIRE(t->kind != FOLIO_TABLE_ROWS, "step: seq_lens is NULL; table rows do not give lengths");
    REQUIRE(t->kind != FOLIO_TABLE_CSR || t->last_block_len != NULL || b->desc.block_size == 1,
            "step: seq_lens and table.last_block_len are both NULL: lengths are unknown");
    return FOLIO_OK;
}

static folio_status check_step(const folio_batch *b, const folio_step *s)
{
    REQUIRE(s->on_device == 0,
            "step: on_device is %d; a batch takes arrays in host memory, "
            "folio_plan_update_step those of a device",
            s->on_device);
    REQUIRE((unsigned)s->causality_default <= FOLIO_CAUSAL_NO,
            "step: causality_default %d is unknown", (int)s->causality_default);
    TRY(folioi_step_check_rows(s));
    if (s->num_seqs == 0) return FOLIO_OK;
    TRY(check_arrays(s));
    TRY(check_table(b, &s->table, s->num_seqs, "table"));
    TRY(check_table(b, &s->cross_table, s->num_seqs, "cross_table"));
    return check_lengths(b, s);
}

static int64_t entries_of(const folio_table *t, int64_t i)
{
    return t->kind == FOLIO_TABLE_ROWS ? t->row_stride : t->start[i + 1] - t->start[i];
}

/* What the entries of a CSR table or of a list of slots amount to. */
static folio_status length_by_table(const folio_table *t, int32_t block_size, int64_t i,
                                    int64_t *len)
{
    int64_t n = entries_of(t, i), last = block_size;
    if (t->kind == FOLIO_TABLE_CSR && t->last_block_len != NULL && n > 0) {
        last = t->last_block_len[i];
        REQUIRE(last >= 1 && last <= block_size,
                "table.last_block_len[%lld] = %lld is outside [1, %d]", (long long)i,
                (long long)last, block_size);
    }
    *len = n > 0 ? (n - 1) * block_size + last : 0;
    return FOLIO_OK;
}

/* Where narrowed indices go: past the `used` entries of the array that will hold the table, where it copies itself. */
typedef struct {
    folioi_array *array;
    int64_t used;
} room;

/* The table of sequence i, of which `len` tokens are needed. Blocks are int32_t inside. */
static folio_status find_table(const folio_batch *b, const folio_table *t, const char *name,
                               int64_t i, int64_t len, room to, const int32_t **table)
{
    int64_t first = t->kind == FOLIO_TABLE_ROWS ? i * t->row_stride : t->start[i];
    if (t->indices == NULL) return FOLIO_OK;
    if (t->index_bytes != 8) {
        *table = (const int32_t *)t->indices + first;
        return FOLIO_OK;
    }
    int64_t n = min_i64(entries_of(t, i), ceil_div(max_i64(len, 0), b->desc.block_size));
    TRY(folioi_array_reserve(&b->allocator, to.array,
                             (to.used + max_i64(n, 1)) * (int64_t)sizeof(int32_t), "batch blocks"));
    int32_t *narrow = (int32_t *)to.array->data + to.used;
    for (int64_t k = 0; k < n; k++) {
        int64_t index = ((const int64_t *)t->indices)[first + k];
        REQUIRE(index >= FOLIO_NO_BLOCK && index <= INT32_MAX,
                "%s.indices[%lld] = %lld is outside [-1, 2147483647]", name, (long long)(first + k),
                (long long)index);
        narrow[k] = (int32_t)index;
    }
    *table = narrow;
    return FOLIO_OK;
}

static folio_status take_tables(folio_batch *b, const folio_step *s, int64_t i,
                                folio_batch_seq *seq)
{
    if (s->table.kind != FOLIO_TABLE_NONE) {
        seq->num_blocks = entries_of(&s->table, i);
        TRY(find_table(b, &s->table, "table", i, seq->seq_len, (room){&b->blocks, b->num_blocks},
                       &seq->block_table));
    }
    if (s->cross_table.kind != FOLIO_TABLE_NONE) {
        seq->num_cross_blocks = entries_of(&s->cross_table, i);
        TRY(find_table(b, &s->cross_table, "cross_table", i, seq->padding ? 0 : seq->encoder_len,
                       (room){&b->cross_blocks, b->num_cross_blocks}, &seq->cross_block_table));
    }
    return FOLIO_OK;
}

/* Rows [*row, *row + query_len) of sequence i, and its length. each: rows, without query_start. */
static folio_status take_lengths(const folio_batch *b, const folio_step *s, int64_t i, int64_t each,
                                 folio_batch_seq *seq, int64_t *row)
{
    *row = s->query_start != NULL ? s->query_start[i] : i * each;
    seq->query_len = s->query_start != NULL ? s->query_start[i + 1] - s->query_start[i] : each;
    if (s->seq_lens != NULL) {
        seq->seq_len = s->seq_lens[i];
        REQUIRE(seq->seq_len >= 0, "seq_lens[%lld] = %lld is negative", (long long)i,
                (long long)seq->seq_len);
    } else if (s->table.kind == FOLIO_TABLE_NONE) {
        seq->seq_len = seq->query_len;
    } else {
        TRY(length_by_table(&s->table, b->desc.block_size, i, &seq->seq_len));
    }
    seq->padding = seq->seq_len == 0;
    return FOLIO_OK;
}

static folio_status add_all(folio_batch *b, const folio_step *s)
{
    int64_t row, encoder_row = 0;
    int64_t each = s->num_query_tokens > 0 ? s->num_query_tokens / max_i64(s->num_seqs, 1) : 1;
    for (int64_t i = 0; i < s->num_seqs; i++) {
        folio_batch_seq seq = {.struct_size = sizeof seq, .causality = s->causality_default};
        TRY(take_lengths(b, s, i, each, &seq, &row));
        if (s->phases != NULL) seq.phase = (folio_phase)s->phases[i];
        if (s->causality != NULL) seq.causality = (folio_causality)s->causality[i];
        if (s->slots != NULL) seq.slots = s->slots + row;
        if (s->first_query_pos != NULL) {
            seq.positions_given = 1;
            seq.first_query_pos = s->first_query_pos[i];
            seq.first_key_pos = s->first_key_pos[i];
        }
        if (s->encoder_lens != NULL) seq.encoder_len = s->encoder_lens[i];
        if (s->encoder_new_lens != NULL) seq.encoder_new_len = s->encoder_new_lens[i];
        if (s->cross_slots != NULL) seq.cross_slots = s->cross_slots + encoder_row;
        TRY(take_tables(b, s, i, &seq));
        TRY(folio_batch_add(b, &seq));
        encoder_row += seq.encoder_new_len;
    }
    if (s->encoder_lens != NULL) b->has_encoder_lens = true;
    return FOLIO_OK;
}

static folio_status fill(folio_batch *b, const folio_step *step)
{
    folio_step s;
    STRUCT_IN(s, step, "folio_step");
    bool slots = s.table.kind == FOLIO_TABLE_SLOTS || s.cross_table.kind == FOLIO_TABLE_SLOTS;
    if (slots && b->desc.block_size == 0) b->desc.block_size = 1;
    TRY(check_step(b, &s));
    return add_all(b, &s);
}

folio_status folio_batch_set(folio_batch *batch, const folio_step *step)
{
    REQUIRE(batch != NULL, "folio_batch_set: batch is NULL");
    int32_t block_size = batch->desc.block_size;
    folio_batch_clear(batch);
    folio_status status = fill(batch, step);
    if (status == FOLIO_OK) return FOLIO_OK;
    folio_batch_clear(batch);
    batch->desc.block_size = block_size;
    return status;
}
