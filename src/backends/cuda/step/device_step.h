/*
 * device_step.h: checks a step whose lengths and tables are in device memory. `lanes` threads together check each
 * sequence. An invalid sequence is emptied: its rows see no key and are not stored. Plain C: host tests run it with one
 * lane.
 */
#ifndef FOLIOI_CUDA_DEVICE_STEP_H
#define FOLIOI_CUDA_DEVICE_STEP_H

#include "backends/cuda/step/cuda_step.h"

/** Why a sequence was emptied; folioi_cuda_plan_status has a sentence for each. */
typedef enum folioi_step_problem {
    FOLIOI_STEP_FINE = 0,
    FOLIOI_STEP_QUERY_START,
    FOLIOI_STEP_QUERY_LEN,
    FOLIOI_STEP_SEQ_LEN,
    FOLIOI_STEP_NO_TABLE,
    FOLIOI_STEP_TABLE_START,
    FOLIOI_STEP_BLOCK,
    FOLIOI_STEP_SLOT,
    FOLIOI_STEP_PLACE,
    FOLIOI_STEP_POSITION,
    FOLIOI_STEP_CAUSALITY,
    FOLIOI_STEP_NUM_PROBLEMS
} folioi_step_problem;

typedef struct folioi_device_step {
    /* the caller's arrays, as folio_step names them; table_start NULL: rows */
    int32_t num_seqs;
    const int32_t *query_start, *seq_lens, *causality;
    const int64_t *slots, *first_query_pos, *first_key_pos;
    const int32_t *blocks, *table_start;
    int64_t row_stride, num_table_entries;
    /* limits: the plan's */
    int64_t num_rows, max_query_len, max_seq_len, num_blocks;
    int64_t window_left, window_right; /* the widest of all attentions */
    int32_t block_size;
    int32_t private_slots; /* FOLIO_PLAN_PRIVATE_SLOTS */
    /* where it goes: the plan's arrays */
    folioi_cuda_counts *counts[2];
    folioi_cuda_seq *decoder, *encoder_only; /* either may be NULL */
    int32_t *tables;                         /* sequence i at i * table_stride */
    int64_t table_stride;
    int64_t *slots_out; /* [slots_room] */
    int64_t slots_room;
    int32_t *problems; /* [num_seqs] */
} folioi_device_step;

/* Entry j of query_start, brought into the rows there are. */
SHARED_INLINE int64_t step_row(const folioi_device_step *d, int32_t j)
{
    int64_t row = d->query_start != 0 ? d->query_start[j] : j;
    return max_i64(0, min_i64(row, d->num_rows));
}

/** Of entries [0, i], those of one lane: the largest is where sequence i begins, whatever came before it. */
SHARED_INLINE int64_t step_begin(const folioi_device_step *d, int32_t i, int32_t lane,
                                 int32_t lanes)
{
    int64_t begin = 0;
    for (int32_t j = 1 + lane; j <= i; j += lanes) begin = max_i64(begin, step_row(d, j));
    return begin;
}

/* Sequence i, which has the rows [begin, end), as far as its lengths say; what is wrong with them. */
SHARED_INLINE int32_t step_lengths(const folioi_device_step *d, int32_t i, int64_t begin,
                                   int64_t end, folioi_cuda_seq *s)
{
    const int64_t farthest = (int64_t)1 << 40;
    int64_t given = d->query_start != 0 ? d->query_start[i] : i;
    int64_t given_end = d->query_start != 0 ? d->query_start[i + 1] : i + 1;
    int32_t seq_len = d->seq_lens[i], causality = d->causality != 0 ? d->causality[i] : 0;
    s->query_row = s->new_row = begin;
    s->query_len = (int32_t)(end - begin);
    s->key_len = seq_len;
    s->context_len = seq_len > 0 ? seq_len - s->query_len : 0;
    s->table = (int64_t)i * d->table_stride;
    s->causal = causality != 2;
    s->first_query_pos = s->context_len;
    s->first_key_pos = 0;
    if (given != begin || given_end != end) return FOLIOI_STEP_QUERY_START;
    if (s->query_len > d->max_query_len) return FOLIOI_STEP_QUERY_LEN;
    if (seq_len < 0 || seq_len > d->max_seq_len || (seq_len > 0 && seq_len < s->query_len))
        return FOLIOI_STEP_SEQ_LEN;
    if (causality < 0 || causality > 2) return FOLIOI_STEP_CAUSALITY;
    if (d->decoder != 0 && d->blocks == 0 && s->context_len > 0) return FOLIOI_STEP_NO_TABLE;
    if (d->first_query_pos == 0) return FOLIOI_STEP_FINE;
    s->first_query_pos = d->first_query_pos[i];
    s->first_key_pos = d->first_key_pos[i];
    if (s->first_query_pos <= -farthest || s->first_query_pos >= farthest ||
        s->first_key_pos <= -farthest || s->first_key_pos >= farthest)
        return FOLIOI_STEP_POSITION;
    return FOLIOI_STEP_FINE;
}

/* Its block table, copied to the plan. */
SHARED_INLINE int32_t step_table(const folioi_device_step *d, int32_t i, const folioi_cuda_seq *s,
                                 int32_t lane, int32_t lanes)
{
    if (d->blocks == 0 || s->key_len == 0) return FOLIOI_STEP_FINE;
    int64_t count = ceil_div(s->key_len, d->block_size), from = (int64_t)i * d->row_stride;
    if (d->table_start != 0) {
        from = d->table_start[i];
        int64_t past = d->table_start[i + 1];
        if (from < 0 || past > d->num_table_entries || past - from < count)
            return FOLIOI_STEP_TABLE_START;
    }
    int64_t begin = seq_keys(s, d->window_left, d->window_right, 0).begin;
    int64_t end = seq_keys(s, d->window_left, d->window_right, s->query_len - 1).end;
    int32_t problem = FOLIOI_STEP_FINE;
    for (int64_t k = lane; k < count; k += lanes) {
        int32_t block = d->blocks[from + k];
        bool seen = s->query_len > 0 && begin < end && (k + 1) * d->block_size > begin &&
                    k * d->block_size < end;
        if (block >= d->num_blocks || (block < 0 && seen)) problem = FOLIOI_STEP_BLOCK;
        d->tables[s->table + k] = block < 0 ? -1 : block;
    }
    return problem;
}

/* The place of its new row r by the table. */
SHARED_INLINE int64_t step_place(const folioi_device_step *d, const folioi_cuda_seq *s, int64_t r)
{
    if (d->blocks == 0) return -1;
    int64_t at = s->context_len + r, block = d->tables[s->table + at / d->block_size];
    return block < 0 ? -1 : block * d->block_size + at % d->block_size;
}

/* The slot of new row r: as given, or by the table. */
SHARED_INLINE int64_t step_slot(const folioi_device_step *d, const folioi_cuda_seq *s, int64_t r)
{
    if (s->key_len == 0) return -1; /* padding */
    return d->slots != 0 ? d->slots[s->new_row + r] : step_place(d, s, r);
}

/* Are its slots there? The table has been copied. */
SHARED_INLINE int32_t step_slots(const folioi_device_step *d, const folioi_cuda_seq *s,
                                 int32_t lane, int32_t lanes)
{
    for (int64_t r = lane; r < s->query_len; r += lanes) {
        int64_t slot = step_slot(d, s, r);
        if (slot < -1 || slot >= d->num_blocks * d->block_size) return FOLIOI_STEP_SLOT;
        bool is_private = d->private_slots && d->blocks != 0 && s->query_len == 1;
        if (is_private && slot >= 0 && slot != step_place(d, s, r)) return FOLIOI_STEP_PLACE;
    }
    return FOLIOI_STEP_FINE;
}

/** The sequence stored, emptied where it has a problem. */
SHARED_INLINE void step_store(const folioi_device_step *d, int32_t i, const folioi_cuda_seq *s,
                              int32_t problem, int32_t lane, int32_t lanes)
{
    for (int64_t r = lane; d->slots_out != 0 && r < s->query_len; r += lanes)
        d->slots_out[s->new_row + r] = problem ? -1 : step_slot(d, s, r);
    if (lane != 0) return;
    folioi_cuda_seq kept = *s;
    if (problem) kept.query_len = kept.key_len = kept.context_len = 0;
    if (d->decoder != 0) d->decoder[i] = kept;
    kept.key_len = kept.key_len > 0 ? kept.query_len : 0;
    kept.context_len = kept.causal = 0;
    kept.first_query_pos = kept.first_key_pos = kept.table = 0;
    if (d->encoder_only != 0) d->encoder_only[i] = kept;
    d->problems[i] = problem;
}

/** All of it by one thread; the first bad sequence, or -1. */
static inline int32_t folioi_device_step_check(const folioi_device_step *d)
{
    int32_t first = -1, num_emptied = 0;
    for (int32_t i = 0; i < d->num_seqs; i++) {
        folioi_cuda_seq s;
        int64_t begin = step_begin(d, i, 0, 1), end = max_i64(begin, step_row(d, i + 1));
        int32_t problem = step_lengths(d, i, begin, end, &s);
        if (problem == FOLIOI_STEP_FINE) problem = step_table(d, i, &s, 0, 1);
        if (problem == FOLIOI_STEP_FINE) problem = step_slots(d, &s, 0, 1);
        step_store(d, i, &s, problem, 0, 1);
        if (problem) num_emptied++;
        if (problem && first < 0) first = i;
        for (int t = 0; t < 2; t++)
            if (d->counts[t] != 0) d->counts[t]->num_rows = end;
    }
    for (int t = 0; t < 2; t++) {
        if (d->counts[t] == 0) continue;
        d->counts[t]->num_seqs = d->num_seqs;
        d->counts[t]->num_emptied = num_emptied;
    }
    return first;
}

#endif
