/*
 * harness.h: attention cases made, run and judged through the public API alone; `folio check`,
 * `folio demo` and the tests stand on it. Every number is a pure function of (seed, tensor,
 * sequence id, token, head, dim), so a token has the same values whole, chunked, decoded, alone or
 * in a crowd.
 *
 *     open -> forward (any number of steps) -> judge, plain -> compare -> close
 *
 * Caches start with every byte 0xFF: NaN in each type. Outputs lie between guards.
 */
#ifndef FOLIO_HARNESS_H
#define FOLIO_HARNESS_H

#include <folio/folio.h>
#include <stdbool.h>
#include <stdint.h>

/* How a step's blocks are handed to the batch. */
typedef enum harness_table {
    HARNESS_TABLE_SEQS = 0, /* folio_batch_add */
    HARNESS_TABLE_2D,       /* folio_batch_set_block_tables */
    HARNESS_TABLE_CSR,      /* folio_batch_set_csr with seq_lens */
    HARNESS_TABLE_CSR_LAST, /* folio_batch_set_csr with last_block_len, no seq_lens */
    HARNESS_TABLE_SLOTS     /* folio_batch_set_slots with 32-bit slots; block_size must be 1 */
} harness_table;

/* Dims of the bias that are full size; the others are 1 and broadcast. */
#define HARNESS_BIAS_SEQ 1u
#define HARNESS_BIAS_HEAD 2u
#define HARNESS_BIAS_QUERY 4u
#define HARNESS_BIAS_KEY 8u
#define HARNESS_BIAS_ALL 15u

/* One layer and how it is run. Zero is a default everywhere. */
typedef struct harness_spec {
    uint64_t seed;
    int32_t num_heads;    /* 0: 4 */
    int32_t num_kv_heads; /* 0: num_heads */
    int32_t k_head_size;  /* 0: 32 */
    int32_t v_head_size;  /* 0: k_head_size */
    folio_dtype dtype;    /* of q and out; 0: F32 */
    folio_dtype kv_dtype; /* of the cache; 0: dtype */
    folio_dtype k_dtype;  /* of new keys; 0: dtype */
    folio_dtype v_dtype;  /* of new values; 0: k_dtype */
    folio_layout layout;  /* STRIDED: wrapped memory with gaps */
    int32_t block_size;   /* 0: 16 */
    int64_t num_blocks;   /* 0: what harness_open's sequences need and a few more */
    int32_t num_layers;   /* 0: 1 */
    int32_t layer;
    float scale;
    float soft_cap;
    int32_t windowed;
    int64_t window_left, window_right;
    bool alibi;             /* slopes 2^(-8 (h + 1) / num_heads) */
    bool sinks;             /* one per head; the last of four or more heads has -inf */
    uint32_t bias;          /* HARNESS_BIAS_*; 0: none. One number for all: see bias_shared */
    bool bias_shared;       /* bias 0 still means a bias, [1][1][1][1] */
    folio_dtype bias_dtype; /* 0: F32 */
    double bias_hidden;     /* share of entries that are -inf, whole rows among them */
    float k_scale, v_scale; /* FP8 caches */
    double amplitude;       /* of q; 0: 1 (scores of a few units) */
    bool append;            /* FOLIO_KV_APPEND */
    bool no_cache;          /* profiling run */
    bool no_write;          /* k and v NULL; the harness stores this step's tokens itself */
    bool graph;             /* FOLIO_PLAN_GRAPH, buffers longer than the batch */
    bool batch_invariant;   /* FOLIO_PLAN_BATCH_INVARIANT */
    bool no_lse;
    bool hidden_nan;  /* bias SEQ | KEY: the keys it hides hold NaN in K and V */
    bool strided;     /* gaps of NaN between the heads and tokens of q, k, v, out, lse, bias */
    bool wide_gaps;   /* of 16 bytes and more, so that rows stay aligned */
    bool in_place;    /* out is q, where head sizes and types are equal */
    int64_t offset;   /* numbers by which q, k, v, out and lse begin past an aligned address */
    int64_t nan_from; /* K and V of this token and all after it are NaN; 0: of none */
    harness_table table;
} harness_spec;

/* One sequence of a step. Its block tables belong to its id and live as long as the harness. */
typedef struct harness_seq {
    int64_t id; /* names its tokens and blocks; 0: its number in the step + 1 */
    int64_t query_len;
    int64_t seq_len; /* 0: padding */
    folio_phase phase;
    folio_causality causality;
    int32_t positions_given;
    int64_t first_query_pos, first_key_pos;
    int64_t encoder_len, encoder_new_len;
    int64_t released;   /* blocks at the front of its table given as FOLIO_NO_BLOCK */
    bool slots_given;   /* slots as an array instead of by the block table */
    bool slots_ignored; /* all slots -1: the harness stores the tokens, k and v are given as NaN */
} harness_seq;

/* All of a case in a line, as far as it is not the default. */
void harness_describe(const harness_spec *spec, folio_attention_type type, const harness_seq *seqs,
                      int64_t num_seqs, char *text, size_t size);

/* What one forward wrote, without strides and guards. */
enum { HARNESS_ORDERS = 4 }; /* in which harness_plain takes its sums in f32 */
typedef struct harness_result {
    int64_t num_seqs, rows, heads, head_size; /* rows: all that were written, graph padding too */
    int64_t *row_start; /* [num_seqs + 1]; rows from the last on belong to no sequence */
    folio_dtype dtype;
    double *out;                   /* [rows][heads][head_size] */
    double *lse;                   /* [rows][heads]; NULL with no_lse */
    void *bits;                    /* [rows][heads][head_size] in dtype */
    float *lse_bits;               /* [rows][heads] */
    double seconds;                /* that folio_attention_forward took */
    double cut;                    /* of a score, at most, lost by sums that are cut, not rounded */
    struct harness_result *others; /* harness_plain's f32: HARNESS_ORDERS - 1 more, or NULL */
} harness_result;

/* How far a result is from the reference, and how far it may be: the budget of harness_compare. */
typedef struct harness_verdict {
    bool ok;
    double max_error, budget;
    double lse_error, lse_budget;
    char message[320]; /* what is wrong; "" when ok */
} harness_verdict;

typedef struct harness harness;

/* Why the calling thread's last harness call returned NULL or false. */
const char *harness_error(void);

/* A context; NULL on failure. level NULL: the best; threads 0: all. */
folio_context *harness_context(const char *backend, const char *level, int32_t threads);

/* Zeroed memory that the open contexts' kernels reach, also a device's; it ends the program where there is none. */
void *harness_alloc(size_t count, size_t size);
void harness_free(const void *memory);

/*
 * A poisoned cache for these sequences (each at its longest) and the spec's layer. NULL on
 * failure.
 */
harness *harness_open(folio_context *ctx, const harness_spec *spec, const harness_seq *seqs,
                      int64_t num_seqs);
void harness_close(harness *h);

/*
 * One step on ctx (NULL: the one of harness_open): stores what of each context is not stored yet,
 * makes batch and plan, runs, checks the guards. Free *result with harness_result_free, also after
 * failure.
 */
bool harness_forward(harness *h, folio_context *ctx, folio_attention_type type,
                     const harness_seq *seqs, int64_t num_seqs, harness_result *result);

/*
 * The reference backend in F64 on what is stored now: run after harness_forward with its
 * arguments.
 */
bool harness_judge(harness *h, folio_context *reference, folio_attention_type type,
                   const harness_seq *seqs, int64_t num_seqs, harness_result *result);

/*
 * The formula by the harness itself on what is stored now: a two-pass softmax with sequential sums,
 * in f32 and rounded to the out type (the error budget's measure), or in double (the reference's
 * judge). In f32 it is made in HARNESS_ORDERS ways, sums beginning at two places and products
 * rounded or not: where a case has few numbers, the error of any one way is a matter of luck.
 */
bool harness_plain(harness *h, folio_attention_type type, const harness_seq *seqs, int64_t num_seqs,
                   bool in_double, harness_result *result);

void harness_result_free(harness_result *result);

/*
 * budget = 2 max|plain - ref| over plain's orders + 1 ulp of got's type at max|ref|, and for lse got's cut of max|ref|.
 * NaN and -inf must match exactly.
 */
void harness_compare(const harness_result *got, const harness_result *ref,
                     const harness_result *plain, harness_verdict *verdict);

/* The same over the rows of one sequence alone; the budget is still the whole case's. */
void harness_compare_seq(const harness_result *got, const harness_result *ref,
                         const harness_result *plain, int64_t seq, harness_verdict *verdict);

/*
 * open, forward, judge, plain, compare, close. reference NULL: one made for the call. On a context
 * of the reference backend the double-precision formula judges, within 1e-9 of max|ref|.
 */
bool harness_check(folio_context *ctx, folio_context *reference, const harness_spec *spec,
                   folio_attention_type type, const harness_seq *seqs, int64_t num_seqs,
                   harness_verdict *verdict);

/*
 * One sequence in pieces (chunks[i] query tokens each, together whole->query_len), each piece a
 * step of its own over one cache, with `crowd` sequences after it and, where crowd_first, before it
 * instead. Rows of the pieces are joined; *result is as if the sequence had run alone and whole.
 * Crowd ids must differ from the sequence's.
 */
bool harness_run_pieces(folio_context *ctx, const harness_spec *spec, folio_attention_type type,
                        const harness_seq *whole, const int64_t *chunks, int64_t num_chunks,
                        const harness_seq *crowd, int64_t num_crowd, bool crowd_first,
                        harness_result *result);

/* Are n rows the same bits, out and lse? */
bool harness_rows_equal(const harness_result *a, int64_t row_a, const harness_result *b,
                        int64_t row_b, int64_t n);

/* All bytes of the cache, as one number: equal while nothing was written. */
uint64_t harness_cache_hash(const harness *h);

/* status, or where it is FOLIO_OK what became of all that was begun on the harness's context. */
folio_status harness_wait(const harness *h, folio_status status);

/* The harness's own parts, for cases it does not know. */
folio_kv_cache *harness_cache(harness *h);
folio_attention *harness_attention(harness *h);
/* A sequence's blocks in order; *n of them. cross: its encoder's. NULL while it has none. */
const int32_t *harness_blocks(harness *h, int64_t id, bool cross, int64_t *n);
int64_t harness_num_blocks(const harness *h);
/* A batch of the sequences, as harness_forward makes it. NULL on failure. */
folio_batch *harness_batch(harness *h, const harness_seq *seqs, int64_t num_seqs);

/* Does row i of the sequence see key j, by type, causality and window? *distance: pos_k - pos_q. */
bool harness_sees(const harness_spec *spec, folio_attention_type type, const harness_seq *seq,
                  int64_t i, int64_t j, int64_t *distance);

/* Tensors of the counter-based generator. */
typedef enum harness_tensor {
    HARNESS_Q = 1,
    HARNESS_K,
    HARNESS_V,
    HARNESS_ENCODER_Q,
    HARNESS_ENCODER_K,
    HARNESS_ENCODER_V,
    HARNESS_SINK,
    HARNESS_BIAS,
    HARNESS_SHUFFLE,
    HARNESS_USER /* and above: free for callers */
} harness_tensor;

uint64_t harness_random_bits(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                             int64_t dim);
/* Uniform in [-2, 2). */
double harness_random(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                      int64_t dim);
/* Uniform in [low, high]. */
int64_t harness_random_int(uint64_t seed, int32_t tensor, int64_t index, int64_t low, int64_t high);

/*
 * To and from F32, F16, BF16, F64, FP8 (decode alone), element i of an array. Rounds to nearest
 * even.
 */
void harness_store(folio_dtype dtype, void *array, int64_t i, double value);
double harness_load(folio_dtype dtype, const void *array, int64_t i);
/* The distance of neighbouring numbers of a type at |x|. */
double harness_ulp(folio_dtype dtype, double x);

#endif
