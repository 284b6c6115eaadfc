/*
 * vllm06_rig.h: steps of vLLM 0.6's interface with every number in the test's hands. Numbers are a
 * function of (sequence, token, head, dim). The rig keeps its own image of each cache in the
 * originals' byte layout; a forward must leave exactly that image, and the rows that dense
 * attention, computed here in double, gives. From vllm06_same*.c: tests that are the same for all backends.
 */
#ifndef FOLIO_VLLM06_RIG_H
#define FOLIO_VLLM06_RIG_H

#include "support.h"

#include <folio/folio_vllm06.h>

#define DECODER FOLIO_ATTENTION_DECODER
#define ENCODER FOLIO_ATTENTION_ENCODER
#define ENCODER_ONLY FOLIO_ATTENTION_ENCODER_ONLY
#define CROSS FOLIO_ATTENTION_ENCODER_DECODER
#define REJECTED(call, words) REFUSED(call, FOLIO_ERR_ARGUMENT, words)

enum { V06_SEQS = 6, V06_TOKENS = 1200, V06_LAYERS = 2 };

/* One sequence of a step; id names its numbers and its blocks for all steps. */
typedef struct {
    int id;
    bool prompt;
    int64_t query_len, seq_len; /* seq_len 0: padding */
    int64_t encoder_len;
} v06_seq;

typedef struct {
    const char *compute;
    const folio_vllm06_backend *b;
    folio_vllm06_state *state;
    folio_vllm06_impl_desc d;
    folio_vllm06_impl *impl;
    float slopes[8]; /* for d.alibi_slopes */
    float k_scale, v_scale;
    /* layer 0: self-attention; layer 1: cross attention */
    int64_t max_tokens; /* of a sequence */
    int64_t block_size, num_blocks, blocks_per_seq, x;
    folio_dtype kv_dtype;
    support_buffer cache[V06_LAYERS];
    unsigned char *image[V06_LAYERS];
    folio_vllm06_kv_cache kv[V06_LAYERS];
    bool strided;              /* rows of query, key and value have gaps, of NaN */
    bool no_cache;             /* profiling run */
    bool no_key;               /* cross attention without K and V */
    int64_t clipped[V06_SEQS]; /* tokens of a decode that its length and table leave out */
    /* the step */
    int num_seqs;
    v06_seq seqs[V06_SEQS];
    folio_vllm06_metadata_fields f;
    int64_t slots[V06_SEQS * V06_TOKENS], cross_slots[V06_SEQS * V06_TOKENS];
    int32_t lens[V06_SEQS], starts[V06_SEQS + 1], seq_starts[V06_SEQS + 1], contexts[V06_SEQS];
    int32_t encoder_lens[V06_SEQS];
    int32_t tables[V06_SEQS * V06_TOKENS], cross_tables[V06_SEQS * V06_TOKENS];
    folio_vllm06_metadata *m;
    /* the call */
    void *q, *k, *v;
    support_buffer out;
    int64_t out_rows;
} v06;

typedef void (*v06_body)(v06 *r);
/* Runs the body for every original, or for one, on every compute backend of support_backends, with a rig that is
 * initialised and not open. A step that cannot be made ends the body. */
void v06_on_all(v06_body body);
void v06_on_one(const char *original, v06_body body);
#define V06_TEST_(name, run)                                                                       \
    static void name(v06 *r);                                                                      \
    TEST(vllm06, name) { run; }                                                                    \
    static void name(v06 *r)
#define V06_TEST(name) V06_TEST_(name, v06_on_all(name))
#define V06_TEST_OF(original, name) V06_TEST_(name, v06_on_one(original, name))
/* Ends the body where what it needs is not there. */
void v06_need(bool there);

/* 4 heads of size 32 over 2 kv heads, f32, blocks of 8, two caches of NaN; no impl yet. */
void v06_init(v06 *r, const char *original, const char *compute);
void v06_close(v06 *r);
/* Both, for the same backends. */
void v06_reset(v06 *r);
/* State, impl and caches, from r->d and r->block_size as they stand; the first step of a rig does it too. */
void v06_open(v06 *r);

/* Fill the fields for these sequences, prompts first. */
void v06_fields(v06 *r, const v06_seq *seqs, int n);
/* The tables of the fields in rows of fewer blocks. */
void v06_narrow(v06 *r, int64_t stride);
void v06_narrow_cross(v06 *r, int64_t stride);
/* Metadata from the fields as a test has changed them, in place of the step before. */
void v06_remake(v06 *r);
/* Both. */
void v06_step(v06 *r, const v06_seq *seqs, int n);
/* Arguments with fresh tensors for the step; output is NaN between guards. */
folio_vllm06_forward_args v06_args(v06 *r, folio_attention_type type);
/* Forward as this type; then the cache's bytes and every row of the output are checked. */
void v06_run_as(v06 *r, folio_attention_type type);
/* D decoder, E encoder, O encoder-only, X cross attention. */
folio_attention_type v06_type(char letter);
/* The same for each letter. */
void v06_run(v06 *r, const char *types);
/* The fields as they stand, and v06_run; and a step. */
void v06_rerun(v06 *r, const char *types);
void v06_play(v06 *r, const v06_seq *seqs, int n, const char *types);
/* Forward must be rejected, with no byte of caches or output written. */
void v06_rejected(v06 *r, const folio_vllm06_forward_args *args, const char *words,
                  const char *file, int line);
#define V06_REJECTED(r, args, words) v06_rejected(r, args, words, __FILE__, __LINE__)
/* The same with the step's own arguments. */
void v06_rejects(v06 *r, folio_attention_type type, const char *words, const char *file, int line);
#define V06_REJECTS(r, type, words) v06_rejects(r, type, words, __FILE__, __LINE__)
/* The fields of the step's metadata. */
const folio_vllm06_metadata_fields *v06_get(const v06 *r);

/* The metadata has these fields, with arrays of its own; and fields that are the same, arrays too. */
void v06_check_fields(const folio_vllm06_metadata *m, const folio_vllm06_metadata_fields *given);
void v06_check_same_fields(const folio_vllm06_metadata_fields *a,
                           const folio_vllm06_metadata_fields *b);
/* The metadata has biases of this type, with the numbers that were given, in memory of its own. */
void v06_check_biases(const v06 *r, folio_attention_type type, const folio_vllm06_bias *given,
                      int n);

/* The step's keys and values are stored, in the image; and every row of the output. */
void v06_expect_stored(v06 *r, folio_attention_type type);
void v06_check_rows(const v06 *r, folio_attention_type type);
/* Decode i over keys [first, end) of the cache into out[head_size]; returns lse. */
double v06_dense_decode(const v06 *r, int i, int64_t h, int64_t first, int64_t end, double *out);

/* The same memory said to be two tensors. */
folio_vllm06_kv_cache v06_in_two(const folio_vllm06_kv_cache *c);
/* Both caches hold the bytes of the rig's image, and nothing else. */
void v06_check_images(const v06 *r);
int64_t v06_slot(const v06 *r, int id, int64_t token, bool cross);
/* Number (row, column) of the output, column = head * head_size + d. */
double v06_out(const v06 *r, int64_t row, int64_t column);
/* Columns of a row. */
int64_t v06_width(const v06 *r);

#endif
