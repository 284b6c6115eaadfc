/*
 * kit.h: attention cases made, run and judged through the public API alone; `folio check`,
 * `folio demo` and the tests stand on it. Every number is a pure function of (seed, tensor,
 * sequence id, token, head, dim), so a token has the same values whole, chunked, decoded, alone or
 * in a crowd.
 *
 *     open -> forward (any number of steps) -> judge, formula -> compare -> close
 *
 * Caches start with every byte 0xFF: NaN in each type. Outputs lie between guards.
 */
#ifndef FOLIO_KIT_H
#define FOLIO_KIT_H

#include <folio/folio.h>
#include <stdbool.h>
#include <stdint.h>

/* How a step's blocks are handed to the batch. */
typedef enum kit_table {
    KIT_TABLE_SEQS = 0, /* folio_batch_add */
    KIT_TABLE_2D,       /* folio_batch_set with FOLIO_TABLE_ROWS */
    KIT_TABLE_CSR,      /* FOLIO_TABLE_CSR with seq_lens */
    KIT_TABLE_CSR_LAST, /* FOLIO_TABLE_CSR with last_block_len, no seq_lens */
    KIT_TABLE_SLOTS     /* FOLIO_TABLE_SLOTS; block_size must be 1 */
} kit_table;

/* Dims of the bias that are full size; the others are 1 and broadcast. */
#define KIT_BIAS_SEQ 1u
#define KIT_BIAS_HEAD 2u
#define KIT_BIAS_QUERY 4u
#define KIT_BIAS_KEY 8u
#define KIT_BIAS_ALL 15u

/* One layer and how it is run. Zero is a default everywhere. */
typedef struct kit_spec {
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
    int64_t num_blocks;   /* 0: what kit_open's sequences need and a few more */
    int32_t num_layers;   /* 0: 1 */
    int32_t layer;
    float scale;
    float soft_cap;
    int32_t windowed;
    int64_t window_left, window_right;
    bool alibi;             /* slopes 2^(-8 (h + 1) / num_heads) */
    bool sinks;             /* one per head; the last of four or more heads has -inf */
    uint32_t bias;          /* KIT_BIAS_*; 0: none. One number for all: see bias_shared */
    bool bias_shared;       /* bias 0 still means a bias, [1][1][1][1] */
    folio_dtype bias_dtype; /* 0: F32 */
    double bias_hidden;     /* share of entries that are -inf, whole rows among them */
    float k_scale, v_scale; /* FP8 caches */
    bool head_scales;       /* FP8 caches: a scale for each kv head in place of the two */
    double amplitude;       /* of q; 0: 1 (scores of a few units) */
    bool append;            /* FOLIO_KV_APPEND */
    bool no_cache;          /* profiling run */
    bool no_write;          /* k and v NULL; the kit stores this step's tokens itself */
    bool graph;             /* FOLIO_PLAN_GRAPH, buffers longer than the batch */
    bool batch_invariant;   /* FOLIO_PLAN_BATCH_INVARIANT */
    bool private_slots;     /* FOLIO_PLAN_PRIVATE_SLOTS */
    bool only_decodes;      /* the plan's max_query_len is 1 */
    bool no_lse;
    bool hidden_nan;    /* bias SEQ | KEY: the keys it hides hold NaN in K and V */
    bool strided;       /* gaps of NaN between the heads and tokens of q, k, v, out, lse, bias */
    bool wide_gaps;     /* of 16 bytes and more, so that rows stay aligned */
    bool in_place;      /* out is q, where head sizes and types are equal */
    int64_t offset;     /* numbers by which q, k, v, out and lse begin past an aligned address */
    int64_t nan_from;   /* K and V of this token and all after it are NaN; 0: of none */
    int64_t nan_before; /* and of all tokens before this one */
    bool v_in_k;    /* latent attention: V is the first numbers of K; v_scale counts for nothing */
    int32_t rotary; /* dims of q and k that rotate, by theta 10000; 0: none */
    int32_t rotary_first;
    folio_rotary_pairing rotary_pairing;
    bool positions;     /* of rotary: given with each call, in no order */
    bool rotary_before; /* the kit rotates q and k itself, before it hands them over */
    kit_table table;
} kit_spec;

/* One sequence of a step. Its block tables belong to its id and live as long as the case. */
typedef struct kit_seq {
    int64_t id; /* names its tokens and blocks; 0: its number in the step + 1 */
    int64_t query_len;
    int64_t seq_len; /* 0: padding; below query_len: as only_reads */
    folio_phase phase;
    folio_causality causality;
    int32_t positions_given;
    int64_t first_query_pos, first_key_pos;
    int64_t encoder_len, encoder_new_len;
    int64_t released;   /* blocks at the front of its table given as FOLIO_NO_BLOCK */
    bool slots_given;   /* slots as an array instead of by the block table */
    bool only_reads;    /* positions are given, the kit stores all keys, and no sequence of the */
                        /* step brings k and v */
    bool slots_ignored; /* all slots -1: the kit stores the tokens, k and v are given as NaN */
} kit_seq;

/* All of a case in a line, as far as it is not the default. */
void kit_describe(const kit_spec *spec, folio_attention_type type, const kit_seq *seqs,
                  int64_t num_seqs, char *text, size_t size);

/* What one forward wrote, without strides and guards. */
enum { KIT_ORDERS = 4 }; /* in which kit_formula takes its sums in f32 */
typedef struct kit_result {
    int64_t num_seqs, rows, heads, head_size; /* rows: all that were written, graph padding too */
    int64_t *row_start; /* [num_seqs + 1]; rows from the last on belong to no sequence */
    folio_dtype dtype;
    double *out;               /* [rows][heads][head_size] */
    double *lse;               /* [rows][heads]; NULL with no_lse */
    void *bits;                /* [rows][heads][head_size] in dtype */
    float *lse_bits;           /* [rows][heads] */
    double seconds;            /* that folio_attention_forward took */
    double cut;                /* of a score, at most, lost by sums that are cut, not rounded */
    struct kit_result *others; /* kit_formula's f32: KIT_ORDERS - 1 more, or NULL */
} kit_result;

/* How far a result is from the reference, and how far it may be: the budget of kit_compare. */
typedef struct kit_verdict {
    bool ok;
    double max_error, budget;
    double lse_error, lse_budget;
    char message[320]; /* what is wrong; "" when ok */
} kit_verdict;

typedef struct kit_case kit_case;

/* Why the calling thread's last call of the kit returned NULL or false. */
const char *kit_error(void);

/* A context; NULL on failure. level NULL: the best; threads 0: all. */
folio_context *kit_context(const char *backend, const char *level, int32_t threads);

/* Zeroed memory that the open contexts' kernels reach, also a device's; it ends the program where there is none. */
void *kit_alloc(size_t count, size_t size);
void kit_free(const void *memory);

/*
 * A poisoned cache for these sequences (each at its longest) and the spec's layer. NULL on
 * failure.
 */
kit_case *kit_open(folio_context *ctx, const kit_spec *spec, const kit_seq *seqs, int64_t num_seqs);
void kit_close(kit_case *h);

/*
 * One step on ctx (NULL: the one of kit_open): stores what of each context is not stored yet,
 * makes batch and plan, runs, checks the guards. Free *result with kit_result_free, also after
 * failure.
 */
bool kit_forward(kit_case *h, folio_context *ctx, folio_attention_type type, const kit_seq *seqs,
                 int64_t num_seqs, kit_result *result);

/*
 * The reference backend in F64 on what is stored now: run after kit_forward with its
 * arguments.
 */
bool kit_judge(kit_case *h, folio_context *reference, folio_attention_type type,
               const kit_seq *seqs, int64_t num_seqs, kit_result *result);

/*
 * The formula by the kit itself on what is stored now: a two-pass softmax with sequential sums,
 * in f32 and rounded to the out type (the error budget's measure), or in double (the reference's
 * judge). In f32 it is made in KIT_ORDERS ways, sums beginning at two places and products
 * rounded or not: where a case has few numbers, the error of any one way is a matter of luck.
 */
bool kit_formula(kit_case *h, folio_attention_type type, const kit_seq *seqs, int64_t num_seqs,
                 bool in_double, kit_result *result);

void kit_result_free(kit_result *result);

/*
 * budget = 2 max|formula - ref| over formula's orders + 1 ulp of got's type at max|ref|, and for lse got's cut of max|ref|.
 * NaN and -inf must match exactly.
 */
void kit_compare(const kit_result *got, const kit_result *ref, const kit_result *formula,
                 kit_verdict *verdict);

/* The same over the rows of one sequence alone; the budget is still the whole case's. */
void kit_compare_seq(const kit_result *got, const kit_result *ref, const kit_result *formula,
                     int64_t seq, kit_verdict *verdict);

/*
 * open, forward, judge, formula, compare, close. reference NULL: one made for the call. On a context
 * of the reference backend the double-precision formula judges, within 1e-9 of max|ref|.
 */
bool kit_check(folio_context *ctx, folio_context *reference, const kit_spec *spec,
               folio_attention_type type, const kit_seq *seqs, int64_t num_seqs,
               kit_verdict *verdict);

/*
 * One sequence in pieces (chunks[i] query tokens each, together whole->query_len), each piece a
 * step of its own over one cache, with `crowd` sequences after it and, where crowd_first, before it
 * instead. Rows of the pieces are joined; *result is as if the sequence had run alone and whole.
 * Crowd ids must differ from the sequence's.
 */
bool kit_run_pieces(folio_context *ctx, const kit_spec *spec, folio_attention_type type,
                    const kit_seq *whole, const int64_t *chunks, int64_t num_chunks,
                    const kit_seq *crowd, int64_t num_crowd, bool crowd_first, kit_result *result);

/* Are n rows the same bits, out and lse? */
bool kit_rows_equal(const kit_result *a, int64_t row_a, const kit_result *b, int64_t row_b,
                    int64_t n);

/* K, V and scales of all layers: every byte 0xFF, NaN in each type; and all of them as one number,
 * which is equal while nothing was written (cache NULL: always). */
void kit_poison_cache(folio_kv_cache *cache);
uint64_t kit_hash_cache(const folio_kv_cache *cache);

/* status, or where it is FOLIO_OK what became of all that was begun on the context of the case. */
folio_status kit_wait(const kit_case *h, folio_status status);

/* The objects of a case, for what the kit does not know. */
folio_kv_cache *kit_cache(kit_case *h);
folio_attention *kit_attention(kit_case *h);
/* A sequence's blocks in order; *n of them. cross: its encoder's. NULL while it has none. */
const int32_t *kit_blocks(kit_case *h, int64_t id, bool cross, int64_t *n);
/* A batch of the sequences, as kit_forward makes it. NULL on failure. */
folio_batch *kit_batch(kit_case *h, const kit_seq *seqs, int64_t num_seqs);

/* What a plan on the case's own context says of a step of DECODER attention; kernel lives until the case is closed or asked again. */
bool kit_plan_info(kit_case *h, const kit_seq *seqs, int64_t num_seqs, folio_plan_info *info);

/* Does row i of the sequence see key j, by type, causality and window? *distance: pos_k - pos_q. */
bool kit_sees(const kit_spec *spec, folio_attention_type type, const kit_seq *seq, int64_t i,
              int64_t j, int64_t *distance);

/* Tensors of the counter-based generator. */
typedef enum kit_tensor {
    KIT_Q = 1,
    KIT_K,
    KIT_V,
    KIT_ENCODER_Q,
    KIT_ENCODER_K,
    KIT_ENCODER_V,
    KIT_SINK,
    KIT_BIAS,
    KIT_SHUFFLE,
    KIT_USER /* and above: free for callers */
} kit_tensor;

/* Every input bit reaches every output bit. */
uint64_t kit_mix(uint64_t x);
uint64_t kit_random_bits(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                         int64_t dim);
/* Uniform in [-2, 2). */
double kit_random(uint64_t seed, int32_t tensor, int64_t id, int64_t token, int64_t head,
                  int64_t dim);
/* Uniform in [low, high]. */
int64_t kit_random_int(uint64_t seed, int32_t tensor, int64_t index, int64_t low, int64_t high);

/* The value of a number's bits (int8: an integer); the bits of the nearest number, ties to even. */
double kit_decode(folio_dtype dtype, uint32_t bits);
uint32_t kit_encode(folio_dtype dtype, double x);
/* Bits of element i of an array. */
uint32_t kit_get(folio_dtype dtype, const void *array, int64_t i);
void kit_set(folio_dtype dtype, void *array, int64_t i, uint32_t bits);
/* Element i of an array as a number, of any type; store rounds to f32 first, and knows no int8. */
void kit_store(folio_dtype dtype, void *array, int64_t i, double value);
double kit_load(folio_dtype dtype, const void *array, int64_t i);
/* The distance of neighbouring numbers of a type at |x|. */
double kit_ulp(folio_dtype dtype, double x);

#endif
