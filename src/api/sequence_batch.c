/* sequence_batch.c: fills a batch from sequences, one layer group at a time. */
#include "batch/batch.h"
#include "cache/sequence.h"

#include <stdio.h>

/* Shared blocks that are about to be written get their copies: by the pool where it knows the cache, else by the caller
 * before this call. Under the pool's lock. */
static folio_status settle_copies(const folio_sequence *s, int32_t group, int64_t i)
{
    folio_pool *pool = s->pool;
    if (pool->copies[group].num == 0) return FOLIO_OK;
    if (pool->cache[group] != NULL) return folioi_pool_run_group_copies(pool, group);
    const folioi_table *t = &s->table[group];
    for (int64_t k = t->released; k < t->num; k++) {
        const folioi_block *block = &pool->device.block[table_blocks(t)[k]];
        REQUIRE(block->copy == NONE && block->reads == 0,
                "batch: sequences[%lld]: block %d waits for a queued copy, and group %d has no "
                "cache to run it in; call folio_pool_take_copies and run the copies first",
                (long long)i, table_blocks(t)[k], group);
    }
    return FOLIO_OK;
}

/* Under the pool's lock. */
static folio_status check_sequence(const folio_sequence *s, int64_t i)
{
    if (s->state != FOLIO_SEQUENCE_RESIDENT) {
        char name[48];
        snprintf(name, sizeof name, "batch: sequences[%lld]", (long long)i);
        return folioi_sequence_resident(s, name);
    }
    REQUIRE(s->len > 0, "batch: sequences[%lld] has no token: reserve some", (long long)i);
    return FOLIO_OK;
}

/* A batch has one set of block tables and goes to one cache: that of one group of one pool. */
static folio_status check_origin(const folioi_origin *origin, const folio_pool *pool, int32_t group,
                                 int64_t i)
{
    REQUIRE(origin->pool == pool,
            "batch: sequences[%lld] is of another pool than the batch's first; use a batch for "
            "each pool",
            (long long)i);
    REQUIRE(origin->group == group,
            "batch: its sequences are of layer group %d, these of layer group %d; clear it, or use "
            "a batch for each group",
            origin->group, group);
    return FOLIO_OK;
}

/* *block_size 0, origin->pool NULL: the batch takes those of the first one. */
static folio_status check_sequences(int32_t *block_size, folioi_origin *origin, int32_t group,
                                    folio_sequence *const *sequences, int64_t num_sequences,
                                    const folio_run *run)
{
    for (int64_t i = 0; i < num_sequences; i++) {
        const folio_sequence *s = sequences[i];
        REQUIRE(s != NULL, "batch: sequences[%lld] is NULL; padding is added by folio_batch_add",
                (long long)i);
        folio_pool *pool = s->pool;
        if (*block_size == 0) *block_size = pool->block_size;
        REQUIRE(*block_size == pool->block_size,
                "batch: its blocks have %d tokens, those of sequences[%lld] %d", *block_size,
                (long long)i, pool->block_size);
        REQUIRE(group >= 0 && group < pool->num_layer_groups,
                "batch: sequences[%lld]: group %d is outside [0, %d)", (long long)i, group,
                pool->num_layer_groups);
        if (origin->pool == NULL)
            *origin = (folioi_origin){pool, group, pool->cache[group], pool->cache[pool->cross]};
        TRY(check_origin(origin, pool, group, i));
        if (i == 0) TRY(folioi_pool_run_in(pool, run));
    }
    for (int64_t i = 0; i < num_sequences; i++) {
        pool_lock(sequences[i]->pool);
        folio_status status = check_sequence(sequences[i], i);
        pthread_mutex_unlock(&sequences[i]->pool->lock);
        TRY(status);
    }
    return FOLIO_OK;
}

/* One sequence as the batch takes it. */
static folio_status add_sequence(folio_batch *batch, int32_t group, folio_sequence *s)
{
    pool_lock(s->pool);
    uint64_t changes = stamp_changes(&s->stamp);
    const folioi_table *t = &s->table[group], *cross = &s->table[s->pool->cross];
    folio_batch_seq seq = FOLIO_WITH(
        folio_batch_seq, .query_len = s->len - s->committed, .seq_len = s->len,
        .block_table = table_blocks(t), .num_blocks = t->num, .encoder_len = s->encoder_len,
        .encoder_new_len = s->encoder_len - s->encoder_committed,
        .cross_block_table = s->encoder_len > 0 ? table_blocks(cross) : NULL,
        .num_cross_blocks = s->encoder_len > 0 ? cross->num : 0, );
    pthread_mutex_unlock(&s->pool->lock);
    TRY(folioi_batch_add(batch, &seq));
    folioi_batch_take_stamp(batch, &s->stamp, changes);
    return FOLIO_OK;
}

/* All of them; their copies come last, for a call that is refused runs none. */
static folio_status add_all(folio_batch *batch, int32_t group, folio_sequence *const *sequences,
                            int64_t num_sequences)
{
    for (int64_t i = 0; i < num_sequences; i++) TRY(add_sequence(batch, group, sequences[i]));
    for (int64_t i = 0; i < num_sequences; i++) {
        pool_lock(sequences[i]->pool);
        folio_status status = settle_copies(sequences[i], group, i);
        pthread_mutex_unlock(&sequences[i]->pool->lock);
        TRY(status);
    }
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
    batch->blocks_end = before->blocks_end;
    batch->cross_blocks_end = before->cross_blocks_end;
    batch->has_encoder_lens = before->has_encoder_lens;
    folioi_batch_drop_stamps(batch, before->num_taken);
}

folio_status folio_batch_add_sequences(folio_batch *batch, int32_t group,
                                       folio_sequence *const *sequences, int64_t num_sequences,
                                       const folio_run *run)
{
    REQUIRE(batch != NULL, "folio_batch_add_sequences: batch is NULL");
    REQUIRE(num_sequences >= 0, "batch: num_sequences is %lld; it must be at least 0",
            (long long)num_sequences);
    REQUIRE(num_sequences == 0 || sequences != NULL, "batch: sequences is NULL");
    REQUIRE(
        num_sequences == 0 || batch->num_by_hand == 0,
        "batch: it has %lld sequences of folio_batch_add; a pool's sequences need another batch",
        (long long)batch->num_by_hand);
    int32_t block_size = batch->desc.block_size;
    folioi_origin origin = {0};
    if (batch->num_taken > 0) origin = batch->origin;
    TRY(check_sequences(&block_size, &origin, group, sequences, num_sequences, run));
    folio_batch before = *batch;
    batch->desc.block_size = block_size;
    batch->origin = origin;
    folio_status status = add_all(batch, group, sequences, num_sequences);
    if (status != FOLIO_OK) take_back(batch, &before);
    return status;
}
