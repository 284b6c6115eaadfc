/* sequence_batch.c: a step's batch from sequences, one layer group at a time. */
#include "batch/batch.h"
#include "cache/pool.h"

/* One sequence as a batch takes it; s NULL: padding. */
static folio_status as_batch_seq(const folio_sequence *s, int32_t group, int64_t i,
                                 folio_batch_seq *out)
{
    *out = (folio_batch_seq){.struct_size = sizeof *out, .query_len = 1, .padding = 1};
    if (s == NULL) return FOLIO_OK;
    REQUIRE(group >= 0 && group < s->pool->num_layer_groups,
            "batch: sequences[%lld]: group %d is outside [0, %d)", (long long)i, group,
            s->pool->num_layer_groups);
    pool_lock(s->pool);
    const folioi_table *t = &s->table[group], *cross = &s->table[s->pool->cross];
    *out = (folio_batch_seq){
        .struct_size = sizeof *out,
        .query_len = s->len - s->committed,
        .seq_len = s->len,
        .block_table = table_blocks(t),
        .num_blocks = t->num,
        .encoder_len = s->encoder_len,
        .encoder_new_len = s->encoder_len - s->encoder_committed,
        .cross_block_table = s->encoder_len > 0 ? table_blocks(cross) : NULL,
        .num_cross_blocks = s->encoder_len > 0 ? cross->num : 0,
    };
    folio_status status = folioi_sequence_resident(s, "batch");
    pthread_mutex_unlock(&s->pool->lock);
    TRY(status);
    REQUIRE(s->len > 0, "batch: sequences[%lld] has no token: reserve some", (long long)i);
    return FOLIO_OK;
}

/* The batch as it was, but for memory it got since. */
static void take_back(folio_batch *batch, const folio_batch *before)
{
    batch->desc = before->desc;
    batch->num_seqs = before->num_seqs;
    batch->num_query_tokens = before->num_query_tokens;
    batch->num_blocks = before->num_blocks;
    batch->num_encoder_tokens = before->num_encoder_tokens;
    batch->num_cross_blocks = before->num_cross_blocks;
    batch->has_encoder_lens = before->has_encoder_lens;
}

folio_status folio_batch_add_sequences(folio_batch *batch, int32_t group,
                                       folio_sequence *const *sequences, int64_t num_sequences)
{
    REQUIRE(batch != NULL, "folio_batch_add_sequences: batch is NULL");
    REQUIRE(num_sequences >= 0, "batch: num_sequences is %lld", (long long)num_sequences);
    REQUIRE(num_sequences == 0 || sequences != NULL, "batch: sequences is NULL");
    folio_batch_seq seq;
    int32_t block_size = batch->desc.block_size;
    for (int64_t i = 0; i < num_sequences; i++) {
        if (sequences[i] != NULL && block_size == 0) block_size = sequences[i]->pool->block_size;
        if (sequences[i] != NULL)
            REQUIRE(block_size == sequences[i]->pool->block_size,
                    "batch: its blocks have %d tokens, those of sequences[%lld] %d", block_size,
                    (long long)i, sequences[i]->pool->block_size);
        TRY(as_batch_seq(sequences[i], group, i, &seq));
    }
    folio_batch before = *batch;
    batch->desc.block_size = block_size;
    for (int64_t i = 0; i < num_sequences; i++) {
        folio_status status = as_batch_seq(sequences[i], group, i, &seq);
        if (status == FOLIO_OK) status = folio_batch_add(batch, &seq);
        if (status != FOLIO_OK) {
            take_back(batch, &before);
            return status;
        }
    }
    return FOLIO_OK;
}
