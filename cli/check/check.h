/*
 * check.h: what the cases of `folio check` are made of. A part is a numbered list of cases of one
 * feature; a case is a pure function of (seed, part, number), so its name alone repeats it.
 */
#ifndef FOLIO_CHECK_H
#define FOLIO_CHECK_H

#include "kit/kit.h"

/* Where cases run. */
typedef struct check_env {
    folio_context *ctx;
    folio_context *reference;
    folio_backend_info info;
    const char *level;
    int32_t threads;
    uint64_t seed;
} check_env;

typedef struct check_outcome {
    bool ok;
    double error, budget; /* 0 and 0 where bits or numbers had to be equal */
    char message[400];
    char what[400]; /* the case in words, where there is more to it than its name */
} check_outcome;

/* Random choices of one case, in the order they are asked for. */
typedef struct check_draw {
    uint64_t key;
    int64_t count;
} check_draw;

/* One attention case before it runs. */
enum { CHECK_MAX_SEQS = 12 };
typedef struct check_attention {
    kit_spec spec;
    folio_attention_type type;
    kit_seq seqs[CHECK_MAX_SEQS];
    int64_t num_seqs;
} check_attention;

typedef struct check_part {
    const char *feature, *name;
    int64_t quick, full; /* numbers of cases */
    /*
     * One of the two: a case of attention judged against the reference, or one that judges
     * itself.
 */
    void (*make)(const check_env *env, check_draw *d, int64_t index, check_attention *c);
    void (*run)(const check_env *env, check_draw *d, int64_t index, check_outcome *out);
} check_part;

/* Rows of the feature table are checked by these; a feature without a part counts as failed. */
extern const check_part check_parts[];
extern const int check_num_parts;
/* The cases of --lineage (check_lineage.c); their features are not in the table. */
extern const check_part check_lineage_parts[];
extern const int check_num_lineage_parts;

/* Runs one case; out->message is "" when it passed. */
void check_run_case(const check_env *env, const check_part *part, int64_t index,
                    check_outcome *out);
/* Runs an attention case and judges it. */
void check_run_attention(const check_env *env, const check_attention *c, check_outcome *out);

/* Ends a case. Returns false, so that `return check_fail(...)` reads well. */
bool check_fail(check_outcome *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_pass(check_outcome *out);

int64_t check_int(check_draw *d, int64_t low, int64_t high);
/* One of a list. */
#define CHECK_PICK(d, list)                                                                        \
    ((list)[check_int((d), 0, (int64_t)(sizeof(list) / sizeof((list)[0])) - 1)])
bool check_chance(check_draw *d, int64_t one_in);

/* Parts of cases that others build on: a small random geometry, and sequences of every kind. */
void check_base(const check_env *env, check_draw *d, check_attention *c);
void check_mixed(check_draw *d, check_attention *c);
void check_rotary(check_draw *d, kit_spec *s);
kit_seq *check_add(check_attention *c, int64_t query_len, int64_t context_len);
/* Makes the geometry one the layout can have. */
void check_settle(check_attention *c);
/* Latent attention: the layout becomes one that can do without V, where it is none. */
void check_latent(kit_spec *s, int32_t k_head_size, int32_t v_head_size);
/* The length at which the backend cuts keys; a usual one where it does not. */
int64_t check_split_len(const check_env *env);

/* check_attend.c */
void make_kernels(const check_env *, check_draw *, int64_t, check_attention *);
void make_tiles(const check_env *, check_draw *, int64_t, check_attention *);
void make_xpacked(const check_env *, check_draw *, int64_t, check_attention *);
void make_alone(const check_env *, check_draw *, int64_t, check_attention *);
void make_pairings(const check_env *, check_draw *, int64_t, check_attention *);
void run_f32_rows(const check_env *, check_draw *, int64_t, check_outcome *);
void make_combinations(const check_env *, check_draw *, int64_t, check_attention *);
void make_mixed_batch(const check_env *, check_draw *, int64_t, check_attention *);
void make_prefix_prefill(const check_env *, check_draw *, int64_t, check_attention *);
void make_long_prefix(const check_env *, check_draw *, int64_t, check_attention *);
void make_decoder(const check_env *, check_draw *, int64_t, check_attention *);
void make_encoder(const check_env *, check_draw *, int64_t, check_attention *);
void make_encoder_only(const check_env *, check_draw *, int64_t, check_attention *);
void make_cross(const check_env *, check_draw *, int64_t, check_attention *);
void make_profiling(const check_env *, check_draw *, int64_t, check_attention *);
void make_gqa(const check_env *, check_draw *, int64_t, check_attention *);
void make_alibi(const check_env *, check_draw *, int64_t, check_attention *);
void make_sliding_window(const check_env *, check_draw *, int64_t, check_attention *);
void make_alibi_window(const check_env *, check_draw *, int64_t, check_attention *);
void make_soft_cap(const check_env *, check_draw *, int64_t, check_attention *);
void make_sinks(const check_env *, check_draw *, int64_t, check_attention *);
void make_rotary(const check_env *, check_draw *, int64_t, check_attention *);
void make_bias(const check_env *, check_draw *, int64_t, check_attention *);
void make_bias_nan(const check_env *, check_draw *, int64_t, check_attention *);
void make_f16_bf16(const check_env *, check_draw *, int64_t, check_attention *);
void make_fp8_kv(const check_env *, check_draw *, int64_t, check_attention *);
void make_head_scales(const check_env *, check_draw *, int64_t, check_attention *);
void make_int8_kv(const check_env *, check_draw *, int64_t, check_attention *);
void make_latent(const check_env *, check_draw *, int64_t, check_attention *);
void make_head_sizes(const check_env *, check_draw *, int64_t, check_attention *);
void make_block_sizes(const check_env *, check_draw *, int64_t, check_attention *);
void make_layouts(const check_env *, check_draw *, int64_t, check_attention *);
void make_page_tables(const check_env *, check_draw *, int64_t, check_attention *);
void make_positions(const check_env *, check_draw *, int64_t, check_attention *);
void make_more_queries(const check_env *, check_draw *, int64_t, check_attention *);
void make_kv_append(const check_env *, check_draw *, int64_t, check_attention *);
void make_graph(const check_env *, check_draw *, int64_t, check_attention *);
void make_split_kv(const check_env *, check_draw *, int64_t, check_attention *);

/* check_batch.c */
void run_metadata(const check_env *, check_draw *, int64_t, check_outcome *);
void run_views(const check_env *, check_draw *, int64_t, check_outcome *);
void run_completeness(const check_env *, check_draw *, int64_t, check_outcome *);
void run_bias_write(const check_env *, check_draw *, int64_t, check_outcome *);
void run_lines(const check_env *, check_draw *, int64_t, check_outcome *);
void run_split_plan(const check_env *, check_draw *, int64_t, check_outcome *);

/* check_cache.c */
void run_describe(const check_env *, check_draw *, int64_t, check_outcome *);
void run_shape(const check_env *, check_draw *, int64_t, check_outcome *);
void run_copy(const check_env *, check_draw *, int64_t, check_outcome *);
void run_swap(const check_env *, check_draw *, int64_t, check_outcome *);
void run_gather(const check_env *, check_draw *, int64_t, check_outcome *);
void run_pack(const check_env *, check_draw *, int64_t, check_outcome *);

/* check_bits.c */
void run_batch_invariant(const check_env *env, check_draw *d, int64_t index, check_outcome *out);
void run_row_invariant(const check_env *, check_draw *, int64_t, check_outcome *);
void run_address_bits(const check_env *, check_draw *, int64_t, check_outcome *);
void run_graph_bits(const check_env *, check_draw *, int64_t, check_outcome *);
void run_private_slots(const check_env *, check_draw *, int64_t, check_outcome *);
void run_rotary_pass(const check_env *, check_draw *, int64_t, check_outcome *);
void run_append_bits(const check_env *, check_draw *, int64_t, check_outcome *);
void run_table_bits(const check_env *, check_draw *, int64_t, check_outcome *);
void run_merge(const check_env *, check_draw *, int64_t, check_outcome *);
void run_merge_parts(const check_env *, check_draw *, int64_t, check_outcome *);

#endif
