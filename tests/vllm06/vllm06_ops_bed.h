/*
 * vllm06_ops_bed.h: what the tests of the plain operators share: one x-packed cache with its sequences, the call's
 * arguments, and dense attention in double precision to compare with.
 */
#ifndef FOLIO_TESTS_VLLM06_OPS_BED_H
#define FOLIO_TESTS_VLLM06_OPS_BED_H

#include "support.h"

#include <folio/folio_vllm06.h>

#define REJECTED(call, words) REFUSED(call, FOLIO_ERR_ARGUMENT, words)

enum { SEQS = 5, HEADS = 4, KV_HEADS = 2, LONGEST = 1100, MAX_PARTS = 4 };

/* One cache with its sequences; everything a call needs. */
typedef struct {
    folio_vllm06_kv_cache c;
    int32_t x;
    float k_scale, v_scale;
    support_buffer k, v;
    int32_t lens[SEQS];
    int64_t longest, row_blocks, max_seq_len;
    int32_t *tables;
    float *rows[2]; /* [seq][longest][kv_heads][head_size] as given */
    float slopes[HEADS], scale;
    bool alibi, no_scale; /* no_scale: 0 is given, which stands for scale */
    folio_dtype dtype;    /* of query and out */
    void *query;
    support_buffer out;
    support_buffer sums, tops, tmp; /* exp_sums, max_logits and tmp_out of up to MAX_PARTS */
    folio_vllm06_state *state;
} bed;

/* A test on every backend, with a state of its own. */
#define OPS_TEST(name)                                                                             \
    static void on_##name(folio_vllm06_state *state, const char *backend);                         \
    TEST(vllm06_ops, name) { ops_on_each_backend(on_##name); }                                     \
    static void on_##name(__attribute__((unused)) folio_vllm06_state *state,                       \
                          __attribute__((unused)) const char *backend)
void ops_on_each_backend(void (*body)(folio_vllm06_state *, const char *));

/* Caches of NaN, then the sequences stored in blocks handed out backwards. */
void bed_open(bed *b, folio_vllm06_state *state, folio_dtype kv, int32_t x, int32_t head_size,
              int32_t block_size, const int32_t *lens);
void bed_close(bed *b);
/* What reshape_and_cache takes to store rows in the bed's cache; and the call. */
folio_vllm06_reshape_and_cache_args bed_store_args(const bed *b, const void *key, const void *value,
                                                   folio_dtype dtype, int64_t num_tokens,
                                                   const int64_t *slots);
folio_status bed_store(const bed *b, const void *key, const void *value, folio_dtype dtype,
                       int64_t num_tokens, int64_t key_stride, int64_t value_stride,
                       const int64_t *slots, const folio_run *run);
/* Index of a token's first number in rows[]. */
int64_t bed_row_at(const bed *b, int64_t seq, int64_t token);
/* Its slot. */
int64_t bed_slot_at(const bed *b, int64_t seq, int64_t token);
/* Where number d of a slot's head lies in K (part 0) or V (part 1). */
int64_t bed_place(const bed *b, int part, int64_t slot, int64_t h, int64_t d);
/* That number as the cache has it, scale applied. */
double bed_stored(const bed *b, int part, int64_t slot, int64_t h, int64_t d);
/* Of a call; all that it writes is poisoned. */
folio_vllm06_paged_attention_args bed_arguments(bed *b);
/* v1, or v2 with the bed's scratch. */
folio_status bed_run(const bed *b, int v, const folio_vllm06_paged_attention_args *a,
                     const folio_vllm06_kv_cache *c, const folio_run *run);
/* Has no call written out or scratch since bed_arguments? */
bool bed_is_untouched(const bed *b);
/* P of the scratch: max_seq_len says it, not the lengths. */
int64_t bed_num_parts(const bed *b);
/* Dense attention of one sequence and head over keys [first, end) of what the cache holds; returns lse. */
double bed_dense_keys(const bed *b, int64_t seq, int64_t h, int64_t first, int64_t end,
                      double *out);
/* The same over all of its keys. */
void bed_dense(const bed *b, int64_t seq, int64_t h, double *out);
/* Against the formula: v1, and v2 where last is 2. */
void bed_check(bed *b, int last);

#endif
