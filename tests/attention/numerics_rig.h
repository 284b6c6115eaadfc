/*
 * numerics_rig.h: small attention calls with every number in the test's hands. q, key and val are
 * indexed by sequence and token whatever the batch looks like. V starts as the identity (key j holds 1
 * in number j), so that out is the softmax itself, and rig_seen tells which keys a row
 * saw. The cache starts as 0xFF bytes, NaN in every type.
 */
#ifndef FOLIO_NUMERICS_RIG_H
#define FOLIO_NUMERICS_RIG_H

#include "kit/kit.h"
#include "kit/layer.h"
#include "test.h"

#include <math.h>

enum { RIG_SEQS = 5, RIG_TOKENS = 64, RIG_HEADS = 6, RIG_DIM = 64 };

typedef struct rig {
    folio_context *ctx;
    folio_attention_desc desc;
    folio_kv_cache_desc kv; /* num_blocks 0: no cache                                   */
    folio_tensors t;        /* options of the call; the rig fills q, k, v, out, lse      */
    uint32_t types;         /* the plan's; 0: the type of rig_run                       */
    bool no_kv;             /* k = v = NULL                                             */
    int64_t q_rows_off;     /* rows of q and out too many                               */
    int64_t kv_rows_off;    /* rows of k and v too many                                 */
    int64_t num_seqs;
    folio_batch_seq seqs[RIG_SEQS];
    int32_t table[RIG_SEQS][RIG_TOKENS], cross_table[RIG_SEQS][RIG_TOKENS];
    float q[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
    float key[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
    float val[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
    double out[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
    float lse[RIG_SEQS][RIG_TOKENS][RIG_HEADS];
    kit_layer l;
} rig;

/* Where a statement must hold: on the reference and on each cpu level this machine runs. */
typedef struct rig_engine {
    const char *name; /* "reference", or the level */
    folio_context *ctx;
    bool reference;
} rig_engine;

void rig_each_engine(void (*body)(rig_engine e));

#define ENGINE_TEST(suite, name)                                                                   \
    static void on_engine_##suite##_##name(rig_engine e);                                          \
    TEST(suite, name) { rig_each_engine(on_engine_##suite##_##name); }                             \
    static void on_engine_##suite##_##name(__attribute__((unused)) rig_engine e)

#define CHECK_NEAR(actual, expected, tolerance)                                                    \
    do {                                                                                           \
        double near_a = (double)(actual), near_e = (double)(expected);                             \
        if (!(fabs(near_a - near_e) <= (tolerance)))                                               \
            test_fail(__FILE__, __LINE__, "%s is %.9g, expected %.9g", #actual, near_a, near_e);   \
    } while (0)
#define CHECK_SEEN(r, s, i, h, expected)                                                           \
    do {                                                                                           \
        unsigned long long seen_a = rig_seen(r, s, i, h), seen_e = (expected);                     \
        if (seen_a != seen_e)                                                                      \
            test_fail(__FILE__, __LINE__, "sequence %d row %d head %d saw %llx, expected %llx",    \
                      (int)(s), (int)(i), (int)(h), seen_a, seen_e);                               \
    } while (0)

/* Fresh numbers; 2 heads, head sizes 8 and 64, F32, a cache of blocks of 4, no sequences. What was open is closed: the
 * rig of the last rig_init, when another one begins, and after the body of an ENGINE_TEST. */
void rig_init(rig *r, folio_context *ctx);
/* V as random numbers instead of the identity. */
void rig_random_v(rig *r);
/* Append a sequence with blocks of its own, far from in order. */
folio_batch_seq *rig_add(rig *r, int64_t query_len, int64_t seq_len);
int64_t rig_slot(const rig *r, int64_t s, int64_t j, bool cross);
/* Store key j of sequence s as it stands in key and val now. */
folio_status rig_store(rig *r, int64_t s, int64_t j, bool cross);
void rig_close(rig *r);
/* Attention, poisoned cache with the contexts stored, batch and plan, in place of those before. */
folio_status rig_open(rig *r, uint32_t types);
/* Batch and plan only, anew, over the cache as it is. */
folio_status rig_replan(rig *r, uint32_t types);
int64_t rig_rows(const rig *r, folio_attention_type type, int64_t s);
int64_t rig_new_rows(const rig *r, folio_attention_type type, int64_t s);
/* Flat rows [row][heads][size] of the call from what the test holds by sequence and token. */
void rig_fill(const rig *r, folio_attention_type type, void *q, void *k, void *v);
/* One forward of the open rig. Buffers are exactly as long as they must be, for the sanitizers. */
folio_status rig_forward(rig *r, folio_attention_type type);
/* Open, one forward. */
folio_status rig_run(rig *r, folio_attention_type type);
/* The keys a row saw, one bit each; V must be the identity. */
uint64_t rig_seen(const rig *r, int64_t s, int64_t i, int64_t h);
/* Bits [first, end). */
uint64_t rig_range(int64_t first, int64_t end);
double rig_dot(const float *a, const float *b, int64_t n);

#endif
