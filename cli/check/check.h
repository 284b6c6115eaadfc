/*
 * check.h: what the cases of `folio check` are made of. A series is a numbered list of cases of one
 * feature; a case is a pure function of (seed, series, number), so its name alone repeats it.
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

typedef struct check_series {
    const char *feature, *name;
    int64_t quick, full; /* numbers of cases */
    /*
     * One of the two: a case of attention judged against the reference, or one that judges
     * itself.
 */
    void (*make)(const check_env *env, check_draw *d, int64_t index, check_attention *c);
    void (*run)(const check_env *env, check_draw *d, int64_t index, check_outcome *out);
} check_series;

/* Rows of the feature table are checked by these; a feature without a series counts as failed. */
extern const check_series check_all_series[];
extern const int check_num_series;
/* The cases of --lineage (check_lineage.c); their features are not in the table. */
extern const check_series check_lineage_series[];
extern const int check_num_lineage_series;

/* Runs one case; out->message is "" when it passed. */
void check_run_case(const check_env *env, const check_series *series, int64_t index,
                    check_outcome *out);
/* Runs an attention case and judges it. */
void check_run_attention(const check_env *env, const check_attention *c, check_outcome *out);

/* A case is right unless this was said. Returns false, so that `return check_fail(...)` reads well. */
bool check_fail(check_outcome *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

int64_t check_int(check_draw *d, int64_t low, int64_t high);
/* One of a list. */
#define CHECK_PICK(d, list)                                                                        \
    ((list)[check_int((d), 0, (int64_t)(sizeof(list) / sizeof((list)[0])) - 1)])
bool check_chance(check_draw *d, int64_t one_in);

/* Pieces of cases that others build on: a small random geometry, and sequences of every kind. */
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

/* The functions of the list. */
#define MAKE(feature, series, quick, full, function)                                               \
    void function(const check_env *env, check_draw *d, int64_t index, check_attention *c);
#define RUN(feature, series, quick, full, function)                                                \
    void function(const check_env *env, check_draw *d, int64_t index, check_outcome *out);
#include "check/check_cases.def"
#undef MAKE
#undef RUN

#endif
