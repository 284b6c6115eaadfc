/*
 * batch_arrays.c: a whole step from arrays, in the three page-table forms engines use. Each form only
 * says where a sequence's blocks are and how long it is; everything else goes through folio_batch_add.
 */
#include "batch/batch.h"

#include "core/checked.h"

/* A sequence's block table in the form at hand, its entry count and its length by the table. */
typedef struct table_source {
    const int32_t *tables; /* 2-D */
    int64_t row_stride;
    const int32_t *indptr; /* CSR and slots */
    const int32_t *indices;
    const int32_t *last_block_len;
    const char *name; /* of indices */
} table_source;

static folio_status check_indptr(const int32_t *indptr, int64_t n, const char *name)
{
    REQUIRE(indptr != NULL, "%s is NULL", name);
    REQUIRE_ALIGNED(indptr, "%s", name);
    REQUIRE(indptr[0] == 0, "%s[0] is %d; it must be 0", name, indptr[0]);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(indptr[i + 1] >= indptr[i], "%s[%lld] = %d is below %s[%lld] = %d", name,
                (long long)i + 1, indptr[i + 1], name, (long long)i, indptr[i]);
    return FOLIO_OK;
}

static folio_status check_arrays(const folio_batch_arrays *a)
{
    REQUIRE(a->num_seqs >= 0 && a->num_seqs <= INT32_MAX,
            "arrays: num_seqs is %lld, outside [0, 2147483647]", (long long)a->num_seqs);
    if (a->num_seqs == 0) return FOLIO_OK;
    REQUIRE_ALIGNED(a->seq_lens, "seq_lens");
    REQUIRE_ALIGNED(a->phases, "phases");
    REQUIRE_ALIGNED(a->causality, "causality");
    REQUIRE_ALIGNED(a->slot_mapping, "slot_mapping");
    REQUIRE_ALIGNED(a->first_query_pos, "first_query_pos");
    REQUIRE_ALIGNED(a->first_key_pos, "first_key_pos");
    REQUIRE_ALIGNED(a->encoder_lens, "encoder_lens");
    REQUIRE_ALIGNED(a->encoder_new_lens, "encoder_new_lens");
    REQUIRE_ALIGNED(a->cross_slot_mapping, "cross_slot_mapping");
    REQUIRE_ALIGNED(a->cross_block_tables, "cross_block_tables");
    if (a->query_start != NULL) TRY(check_indptr(a->query_start, a->num_seqs, "query_start"));
    REQUIRE((a->first_query_pos == NULL) == (a->first_key_pos == NULL),
            "arrays: first_query_pos and first_key_pos must both be set or both be NULL");
    REQUIRE(a->encoder_lens != NULL ||
                (a->encoder_new_lens == NULL && a->cross_slot_mapping == NULL &&
                 a->cross_block_tables == NULL),
            "arrays: encoder_lens is NULL, yet other encoder arrays are given");
    REQUIRE(a->cross_block_tables == NULL || a->cross_row_stride >= 0,
            "arrays: cross_row_stride is %lld; it must be at least 0",
            (long long)a->cross_row_stride);
    return FOLIO_OK;
}

/* The table of sequence i, and seq_len where no array gives it. */
static folio_status find_table(const table_source *t, int32_t block_size, int64_t i,
                               folio_batch_seq *s)
{
    if (t->indptr == NULL) {
        if (t->tables == NULL) return FOLIO_OK;
        s->block_table = t->tables + i * t->row_stride;
        s->num_blocks = t->row_stride;
        return FOLIO_OK;
    }
    s->num_blocks = t->indptr[i + 1] - t->indptr[i];
    s->block_table = t->indices + t->indptr[i];
    if (s->seq_len >= 0) return FOLIO_OK;
    int64_t last = block_size;
    if (t->last_block_len != NULL && s->num_blocks > 0) {
        last = t->last_block_len[i];
        REQUIRE(last >= 1 && last <= block_size, "last_block_len[%lld] = %lld is outside [1, %d]",
                (long long)i, (long long)last, block_size);
    }
    s->seq_len = s->num_blocks > 0 ? (s->num_blocks - 1) * block_size + last : 0;
    return FOLIO_OK;
}

static folio_status add_all(folio_batch *batch, const folio_batch_arrays *a, const table_source *t)
{
    int64_t encoder_row = 0;
    for (int64_t i = 0; i < a->num_seqs; i++) {
        int64_t row = a->query_start != NULL ? a->query_start[i] : i;
        folio_batch_seq s = {.struct_size = sizeof s};
        s.query_len = a->query_start != NULL ? a->query_start[i + 1] - a->query_start[i] : 1;
        s.seq_len = a->seq_lens != NULL ? a->seq_lens[i] : -1;
        REQUIRE(a->seq_lens == NULL || s.seq_len >= 0, "seq_lens[%lld] = %lld is negative",
                (long long)i, (long long)s.seq_len);
        TRY(find_table(t, batch->desc.block_size, i, &s));
        s.padding = s.seq_len == 0;
        if (a->phases != NULL) s.phase = (folio_phase)a->phases[i];
        if (a->causality != NULL) s.causality = (folio_causality)a->causality[i];
        if (a->slot_mapping != NULL) s.slots = a->slot_mapping + row;
        if (a->first_query_pos != NULL) {
            s.positions_given = 1;
            s.first_query_pos = a->first_query_pos[i];
            s.first_key_pos = a->first_key_pos[i];
        }
        if (a->encoder_lens != NULL) s.encoder_len = a->encoder_lens[i];
        if (a->encoder_new_lens != NULL) s.encoder_new_len = a->encoder_new_lens[i];
        if (a->cross_slot_mapping != NULL) s.cross_slots = a->cross_slot_mapping + encoder_row;
        if (a->cross_block_tables != NULL) {
            s.cross_block_table = a->cross_block_tables + i * a->cross_row_stride;
            s.num_cross_blocks = a->cross_row_stride;
        }
        TRY(folio_batch_add(batch, &s));
        encoder_row += s.encoder_new_len;
    }
    if (a->encoder_lens != NULL) batch->has_encoder_lens = true;
    return FOLIO_OK;
}

static folio_status set_arrays(folio_batch *batch, const folio_batch_arrays *arrays,
                               const table_source *t)
{
    folio_batch_arrays a;
    STRUCT_IN(a, arrays, "folio_batch_arrays");
    TRY(check_arrays(&a));
    REQUIRE_ALIGNED(t->tables, "block_tables");
    REQUIRE_ALIGNED(t->indices, "%s", t->name);
    REQUIRE_ALIGNED(t->last_block_len, "last_block_len");
    if (t->indptr == NULL) {
        REQUIRE(a.seq_lens != NULL || a.num_seqs == 0, "arrays: seq_lens is NULL");
    } else {
        TRY(check_indptr(t->indptr, a.num_seqs, "indptr"));
        REQUIRE(t->indices != NULL || t->indptr[a.num_seqs] == 0, "%s is NULL", t->name);
        REQUIRE(batch->desc.block_size > 0, "the batch has no block size: set "
                                            "folio_batch_desc.block_size or .cache");
        REQUIRE(a.seq_lens != NULL || t->last_block_len != NULL || batch->desc.block_size == 1,
                "seq_lens and last_block_len are both NULL: lengths are unknown");
    }
    return add_all(batch, &a, t);
}

/* Fills a batch that was just cleared; on error it is left empty. */
static folio_status replace(folio_batch *batch, const folio_batch_arrays *arrays,
                            const table_source *t)
{
    folio_status status = set_arrays(batch, arrays, t);
    if (status != FOLIO_OK) folio_batch_clear(batch);
    return status;
}

folio_status folio_batch_set_block_tables(folio_batch *batch, const folio_batch_arrays *arrays,
                                          const int32_t *block_tables, int64_t row_stride)
{
    REQUIRE(batch != NULL, "folio_batch_set_block_tables: batch is NULL");
    folio_batch_clear(batch);
    REQUIRE(block_tables == NULL || (row_stride >= 0 && row_stride <= INT32_MAX),
            "block_tables: row_stride is %lld, outside [0, 2147483647]", (long long)row_stride);
    table_source t = {.tables = block_tables, .row_stride = row_stride, .name = ""};
    return replace(batch, arrays, &t);
}

folio_status folio_batch_set_csr(folio_batch *batch, const folio_batch_arrays *arrays,
                                 const int32_t *indptr, const int32_t *indices,
                                 const int32_t *last_block_len)
{
    REQUIRE(batch != NULL, "folio_batch_set_csr: batch is NULL");
    folio_batch_clear(batch);
    REQUIRE(indptr != NULL, "indptr is NULL");
    table_source t = {
        .indptr = indptr, .indices = indices, .last_block_len = last_block_len, .name = "indices"};
    return replace(batch, arrays, &t);
}

folio_status folio_batch_set_slots(folio_batch *batch, const folio_batch_arrays *arrays,
                                   const int32_t *indptr, const void *slots, int32_t index_bytes)
{
    REQUIRE(batch != NULL, "folio_batch_set_slots: batch is NULL");
    folio_batch_clear(batch);
    if (batch->desc.block_size == 0) batch->desc.block_size = 1;
    REQUIRE(batch->desc.block_size == 1, "slots: the batch's block size is %d, slot lists need 1",
            batch->desc.block_size);
    REQUIRE(index_bytes == 4 || index_bytes == 8, "slots: index_bytes is %d, neither 4 nor 8",
            index_bytes);
    REQUIRE(indptr != NULL, "indptr is NULL");
    table_source t = {.indptr = indptr, .indices = slots, .name = "slots"};
    if (index_bytes == 4 || slots == NULL) return replace(batch, arrays, &t);

    folio_batch_arrays a;
    STRUCT_IN(a, arrays, "folio_batch_arrays");
    TRY(check_arrays(&a));
    TRY(check_indptr(indptr, a.num_seqs, "indptr"));
    /* Blocks are int32_t inside: narrow the list in the memory that will hold it. */
    REQUIRE_ALIGNED((const int64_t *)slots, "slots");
    int64_t n = indptr[a.num_seqs];
    TRY(folioi_array_reserve(&batch->allocator, &batch->blocks,
                             max_i64(n, 1) * (int64_t)sizeof(int32_t), "batch blocks"));
    int32_t *narrow = batch->blocks.data;
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = ((const int64_t *)slots)[i];
        REQUIRE(slot >= FOLIO_NO_BLOCK && slot <= INT32_MAX,
                "slots[%lld] = %lld is outside [0, 2147483647]", (long long)i, (long long)slot);
        narrow[i] = (int32_t)slot;
    }
    t.indices = narrow;
    return replace(batch, arrays, &t);
}
