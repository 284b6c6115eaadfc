/*
 * vllm06_rig.h: steps of vLLM 0.6's interface with every number in the test's hands. Numbers are a
 * function of (sequence, token, head, dim). The rig keeps its own image of each cache in the
 * originals' byte layout; a forward must leave exactly that image, and the rows that dense
 * attention, computed here in double, gives. From vllm06_same*.c: tests that every suite runs.
 */
#ifndef FOLIO_VLLM06_RIG_H
#define FOLIO_VLLM06_RIG_H

#include "support.h"

#include <folio/folio_vllm06.h>

enum { V06_SEQS = 6, V06_TOKENS = 320, V06_LAYERS = 2 };

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
    int64_t block_size, num_blocks, blocks_per_seq, x;
    folio_dtype kv_dtype;
    support_buffer cache[V06_LAYERS];
    unsigned char *image[V06_LAYERS];
    folio_vllm06_kv_cache kv[V06_LAYERS];
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

typedef void (*v06_body)(const char *original, const char *compute);
/* Runs the body on every compute backend of support_backends. */
void v06_on_both(const char *original, v06_body body);

/* 4 heads of size 32 over 2 kv heads, f32, blocks of 8, two caches of NaN; no impl yet. */
void v06_init(v06 *r, const char *original, const char *compute);
/* State, impl and caches, from r->d and r->block_size as they stand. False: a check has failed. */
bool v06_open(v06 *r);
void v06_close(v06 *r);

/* Fill the fields for these sequences, prompts first. */
void v06_fields(v06 *r, const v06_seq *seqs, int n);
/* The cross block tables of the fields in rows of fewer blocks, unlike those of block_tables. */
void v06_narrow_cross(v06 *r, int64_t stride);
/* Metadata from the fields as a test has changed them, in place of the step before. */
bool v06_remake(v06 *r);
/* Both. */
bool v06_step(v06 *r, const v06_seq *seqs, int n);
/* Arguments with fresh tensors for the step; output is NaN between guards. */
folio_vllm06_forward_args v06_args(v06 *r, folio_attention_type type);
/* Forward as this type; then the cache's bytes and every row of the output are checked. */
void v06_run(v06 *r, folio_attention_type type);
/* Forward must be refused, with no byte of caches or output written. */
void v06_refused(v06 *r, const folio_vllm06_forward_args *args, folio_status status,
                 const char *words, const char *file, int line);
#define V06_REFUSED(r, args, status, words) v06_refused(r, args, status, words, __FILE__, __LINE__)

/* The metadata has biases of this type, with the numbers that were given, in memory of its own. */
void v06_check_biases(const v06 *r, folio_attention_type type, const folio_vllm06_bias *given,
                      int n);

/* Both caches hold the bytes of the rig's image, and nothing else. */
void v06_check_images(const v06 *r);
int64_t v06_slot(const v06 *r, int id, int64_t token, bool cross);
/* Number (row, column) of the output, column = head * head_size + d. */
double v06_out(const v06 *r, int64_t row, int64_t column);
/* Columns of a row. */
int64_t v06_width(const v06 *r);

/* --------------------------------------------------------- what all three suites have in common */

/* Each name is a test, v06_same_<name> of vllm06_same*.c. A suite is V06_SAME(V06_TEST, suite, "original"). */
/* clang-format off */
#define V06_SAME(V, s, a) \
    V(s, a, get_name) V(s, a, classes) V(s, a, get_kv_cache_shape) V(s, a, split_kv_cache) \
    V(s, a, swap_blocks) V(s, a, copy_blocks) V(s, a, supported_sizes) V(s, a, get_seq_lens) \
    V(s, a, get_seq_len_block_table_args) V(s, a, mixed_step) V(s, a, metadata_fields) \
    V(s, a, metadata_builder) V(s, a, prompts_then_decodes) V(s, a, profiling_run) \
    V(s, a, use_cuda_graph) V(s, a, k_scale_v_scale) V(s, a, dtypes) V(s, a, num_queries_per_kv) \
    V(s, a, fused_qkv) V(s, a, alibi_slopes) V(s, a, sliding_window) V(s, a, logits_soft_cap) \
    V(s, a, make_biases) V(s, a, set_attn_bias) V(s, a, encoder_decoder) V(s, a, encoder_only) \
    V(s, a, clipped_window) V(s, a, cross_decode_metadata) V(s, a, shared_prefix) V(s, a, prefix_hit) \
    V(s, a, more_fields) V(s, a, bad_sums) V(s, a, split_arrays) V(s, a, graph_padding) \
    V(s, a, compat) V(s, a, compat_differs) V(s, a, graph_capture) V(s, a, graph_cross) \
    V(s, a, graph_clone) V(s, a, graph_errors) V(s, a, builder_window) V(s, a, builder_pad) \
    V(s, a, incomplete_metadata) V(s, a, init_errors) V(s, a, metadata_errors) \
    V(s, a, builder_errors) V(s, a, views_of_views) V(s, a, biases_in_fields) V(s, a, no_encoder) \
    V(s, a, cross_bias_of_cached_encoder) V(s, a, forward_errors) V(s, a, views) \
    V(s, a, is_prompt)
/* clang-format on */
#define V06_DECLARE(suite, original, name) void v06_same_##name(const char *, const char *);
V06_SAME(V06_DECLARE, , )
#define V06_TEST(suite, original, name)                                                            \
    TEST(suite, name) { v06_on_both(original, v06_same_##name); }

#endif
