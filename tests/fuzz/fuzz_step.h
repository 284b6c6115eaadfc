/*
 * fuzz_step.h: one layer over one step, drawn from an input: attention, cache, sequences and tensors of any type and
 * option. Small: up to 4 sequences, 6 query heads, heads of up to 64 numbers.
 */
#ifndef FOLIO_FUZZ_STEP_H
#define FOLIO_FUZZ_STEP_H

#include "fuzz/fuzz.h"

enum { FUZZ_MAX_SEQS = 4 };

typedef struct fuzz_step {
    folio_context *ctx;
    folio_attention_desc attention;
    folio_attention_type type;
    folio_kv_cache *cache; /* every byte is a part of a finite number; NULL: none */
    folio_rotary *rotary;
    folio_step step;
    folio_tensors tensors;
    int64_t num_seqs, rows, new_rows, max_seq_len, num_blocks, block_size;
    int32_t query_len[FUZZ_MAX_SEQS], seq_len[FUZZ_MAX_SEQS], encoder_len[FUZZ_MAX_SEQS];
    size_t out_bytes, lse_bytes;
} fuzz_step;

/* False: a part of it is refused. fuzz_step_close is due all the same. */
bool fuzz_step_draw(fuzz_input *in, fuzz_step *s);
void fuzz_step_close(fuzz_step *s);
/* Its rotary embedding, of any scaling, for heads of that size. */
bool fuzz_step_draw_rotary(fuzz_input *in, fuzz_step *s);
/* Other memory for out and lse. */
void fuzz_step_new_out(fuzz_input *in, fuzz_step *s);
/* All rows were written; or no byte was. */
void fuzz_step_check_written(const fuzz_step *s);
void fuzz_step_check_untouched(const fuzz_step *s);

#endif
