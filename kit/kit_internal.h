/*
 * kit_internal.h: what case.c and formula.c share: a case and one step's
 * inputs.
 */
#ifndef FOLIO_KIT_INTERNAL_H
#define FOLIO_KIT_INTERNAL_H

#include "kit/kit.h"

#include <stddef.h>

/* What a case keeps of a sequence: [0] its own tokens, [1] its encoder's. */
typedef struct seq_state {
    int64_t id;
    int32_t *blocks[2];
    int64_t num_blocks[2];
    int64_t stored[2]; /* tokens in the cache */
} seq_state;

struct kit_case {
    kit_spec spec; /* defaults filled in */
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache; /* NULL with no_cache */
    void *memory[4];       /* STRIDED: k, v and their int8 scales */
    float *head_scales[2]; /* of K and V, [num_kv_heads]; NULL without head_scales */
    int64_t num_blocks;
    int32_t *free_blocks; /* shuffled; the next is the last */
    int64_t num_free;
    seq_state *states;
    int64_t num_states;
    char kernel[128];        /* as kit_plan_info found it */
    folio_rotary *rotary[2]; /* the host's and the device's, once asked for */
    int64_t num_positions;
};

/* [tokens][heads][size] with the strides of the case. */
typedef struct step_tensor {
    folio_dtype dtype;
    int64_t tokens, heads, size, token_stride, head_stride;
    void *data;       /* first element */
    void *allocation; /* guards around it */
    size_t bytes;     /* of the allocation */
} step_tensor;

/* One step of one attention type: shapes and inputs. */
typedef struct step {
    folio_attention_type type;
    const kit_seq *seqs;
    int64_t num_seqs;
    int64_t *row_start;         /* [num_seqs + 1] rows of q and out */
    int64_t *new_row_start;     /* [num_seqs + 1] rows of k and v */
    int64_t rows, new_rows;     /* of the tensors, graph padding included */
    int64_t max_rows, max_keys; /* of one sequence, at least 1 */
    int64_t max_seqs, max_query_tokens, max_encoder_tokens, max_seq_len; /* limits of the plan */
    step_tensor q, k, v;
    float *slopes, *sinks;
    folio_bias bias;
} step;

void kit_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Records what the library said; returns false. */
bool kit_refused(const char *what, folio_status status);
/* From now on memory comes from where this context, if it is a device's, reaches it. */
void kit_reach(const folio_context *ctx);
bool kit_is_device(const folio_context *ctx);
int64_t kit_seq_id(const kit_seq *seqs, int64_t i);
seq_state *kit_state(kit_case *h, int64_t id);
int64_t kit_blocks_for(const kit_case *h, int64_t tokens);
int64_t kit_slot(const kit_case *h, const seq_state *s, int cross, int64_t token);
/* Gives every sequence its blocks, self and cross. */
bool kit_reserve_all(kit_case *h, const kit_seq *seqs, int64_t num_seqs);
folio_batch *kit_batch_make(kit_case *h, folio_context *ctx, const kit_seq *seqs, int64_t n);

/* Rows and keys of a sequence in a type; a padding sequence sees none. */
int64_t kit_seq_rows(const kit_seq *s, folio_attention_type type);
int64_t kit_seq_keys(const kit_seq *s, folio_attention_type type);
bool kit_only_reads(const kit_seq *s);
/* In DECODER attention: keys stored before the step, and the number of the first new token, by which its q is drawn. */
int64_t kit_seq_context(const kit_seq *s);
int64_t kit_first_token(const kit_seq *s);

/* Rotary embedding: of a token, and of row i of a sequence. */
int64_t kit_token_position(const kit_case *h, int64_t token);
int64_t kit_row_position(const kit_case *h, const kit_seq *s, folio_attention_type type, int64_t i);
/* Of all rows of a step; NULL: they are not given. kit_free it. */
int64_t *kit_row_positions(const kit_case *h, const step *st);
/* Where this context can use it; NULL: the case has none, or it was refused. Belongs to the case. */
folio_rotary *kit_rotary(kit_case *h, folio_context *ctx);
void kit_rotary_open(kit_case *h, const kit_seq *seqs, int64_t num_seqs);
/* A row of numbers of a type, by the formula. */
void kit_rotate(const kit_case *h, folio_dtype dtype, int64_t position, double *x);
/* The same of the row that begins at data[at]. */
void kit_rotate_stored(const kit_case *h, folio_dtype dtype, int64_t position, void *data,
                       int64_t at);

/* Are K and V of the key NaN? With hidden_nan it is one that the bias hides from every row. */
bool kit_is_hidden(const kit_case *h, int64_t id, int64_t key);

void kit_step_open(kit_case *h, folio_attention_type type, const kit_seq *seqs, int64_t num,
                   step *st);
void kit_step_close(step *st);
step_tensor kit_tensor_make(const kit_case *h, folio_dtype dtype, int64_t tokens, int64_t heads,
                            int64_t size);
folio_tensor kit_tensor_of(const step_tensor *t);
folio_attention_desc kit_attention_desc(const kit_spec *s);

/* Against an exact result: out within 1e-9 of max|ref|, lse within an f32 ulp and a little. */
void kit_compare_exact(const kit_result *got, const kit_result *ref, kit_verdict *verdict);

/* rows, heads and head_size set; arrays made, out all zeros. */
void kit_result_make(const kit_case *h, const step *st, folio_dtype dtype, kit_result *r);

/* Element number of [token][head][0]. */
static inline int64_t step_at(const step_tensor *t, int64_t token, int64_t head)
{
    return token * t->token_stride + head * t->head_stride;
}

/* Does the type read its keys from the cache, where there is one? */
static inline bool type_is_cached(folio_attention_type type)
{
    return type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
}

#endif
