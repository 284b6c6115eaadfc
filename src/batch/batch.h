/*
 * batch.h: the sequences of one step, checked as far as possible without a plan, and folioi_rows: the rows and keys that an
 * attention type has in a sequence. Kernels read only folioi_rows.
 */
#ifndef FOLIOI_BATCH_H
#define FOLIOI_BATCH_H

#include "core/context.h"
#include "core/stamp.h"

#include <stdbool.h>

typedef struct folioi_seq {
    int32_t query_len, seq_len; /* seq_len 0: padding */
    folio_phase phase;          /* PREFILL or DECODE; AUTO for padding */
    bool causal;
    bool has_table, has_cross_table;
    bool has_holes, has_cross_holes; /* FOLIO_NO_BLOCK somewhere in the table */
    int64_t query_row;               /* first row in q */
    int64_t first_query_pos, first_key_pos;
    int64_t table_start;                  /* into blocks */
    int32_t num_blocks, num_cross_blocks; /* entries its lengths need, 0 without a table */
    int32_t encoder_len, encoder_new_len;
    int64_t encoder_row; /* first row in encoder tensors and in cross k, v */
    int64_t cross_start; /* into cross_blocks */
} folioi_seq;

/** What a pool's sequence was when it was put into the batch. */
typedef struct folioi_taken {
    folioi_stamp *stamp; /* a reference of the batch's own */
    uint64_t changes;
    int64_t seq; /* its number in the batch */
} folioi_taken;

/**
 * Where a pool's sequences came from. Pointers to compare, not to follow: when the pool goes, its sequences are gone
 * and their stamps say so.
 */
typedef struct folioi_origin {
    const struct folio_pool *pool;
    int32_t group;
    const folio_kv_cache *cache, *cross_cache; /* NULL: the pool knows none */
} folioi_origin;

#define FOLIOI_NUM_PHASES 3

struct folio_batch {
    folioi_refs refs;
    folio_context *ctx;
    folio_allocator allocator; /* the context's */
    folio_batch_desc desc;
    uint64_t generation; /* grows with every change */
    int64_t num_seqs, num_query_tokens, num_blocks, num_encoder_tokens, num_cross_blocks;
    int64_t blocks_end, cross_blocks_end; /* past the largest block of all tables */
    bool has_encoder_lens;
    folioi_array seqs;         /* folioi_seq [num_seqs]         */
    folioi_array slots;        /* int64_t [num_query_tokens]    */
    folioi_array positions;    /* int64_t [num_query_tokens]    */
    folioi_array blocks;       /* int32_t [num_blocks]          */
    folioi_array cross_slots;  /* int64_t [num_encoder_tokens]  */
    folioi_array cross_blocks; /* int32_t [num_cross_blocks]    */
    folioi_array taken;        /* folioi_taken [num_taken]      */
    int64_t num_taken;         /* sequences that came from a pool */
    int64_t num_by_hand;       /* sequences that did not, padding aside */
    folioi_origin origin;      /* of all of them; says nothing if there are none */
    folioi_array views[FOLIO_NUM_ATTENTION_TYPES][FOLIOI_NUM_PHASES];
};

/** One sequence as one attention type sees it. Rows count in q and out, new rows in k and v. */
typedef struct folioi_rows {
    int64_t query_row;
    int32_t query_len;
    int32_t key_len;     /* keys, cached ones first                                          */
    int32_t context_len; /* of them, those cached before this step                           */
    int64_t new_row;
    int32_t new_len;
    const int32_t *blocks; /* NULL: no block table                                           */
    int32_t num_blocks;
    const int64_t *slots; /* [new_len]; NULL for encoder types                               */
    bool causal;
    int64_t first_query_pos, first_key_pos;
} folioi_rows;

folioi_rows folioi_batch_rows(const folio_batch *batch, int64_t seq, folio_attention_type type);

/** More queries than keys: all keys are cached, and no row of k and v is stored. */
static inline bool seq_only_reads(int64_t query_len, int64_t seq_len)
{
    return seq_len > 0 && query_len > seq_len;
}

/** Keys cached before this step; seq_len 0: padding. */
static inline int64_t seq_context_len(int64_t query_len, int64_t seq_len)
{
    if (seq_len == 0) return 0;
    return seq_only_reads(query_len, seq_len) ? seq_len : seq_len - query_len;
}

static inline const folioi_seq *batch_seq(const folio_batch *batch, int64_t i)
{
    return (const folioi_seq *)batch->seqs.data + i;
}

/** Rows of q and of k, v of an attention type. */
int64_t folioi_batch_query_rows(const folio_batch *batch, folio_attention_type type);
int64_t folioi_batch_new_rows(const folio_batch *batch, folio_attention_type type);

/** Slots of the new rows; NULL for encoder types. */
const int64_t *folioi_batch_slots(const folio_batch *batch, folio_attention_type type);

/** num_seqs, num_query_tokens and query_start of a step in host memory. */
folio_status folioi_step_check_rows(const folio_step *step);

/** Append a sequence, by hand or of a pool. s has all fields of this version. */
folio_status folioi_batch_add(folio_batch *batch, const folio_batch_seq *s);

/** The batch's last sequence came from a pool, in the state of this many changes. There is room. */
void folioi_batch_take_stamp(folio_batch *batch, folioi_stamp *stamp, uint64_t changes);
/** Forget the stamps from number `first` on. */
void folioi_batch_drop_stamps(folio_batch *batch, int64_t first);
/** Refuses a batch of which a sequence was changed since. An atomic load for each. */
folio_status folioi_batch_check_stamps(const folio_batch *batch);

#endif
