/*
 * replay_model.h: a model with nothing but attention. K and V of a token are made up from (seed,
 * layer, the token's identity), q from (seed, layer, request, position), so that two sequences that
 * share a block would have written the same bytes to it. Numbers are multiples of 1/128: exact in f32,
 * f16 and bf16.
 */
#ifndef FOLIO_REPLAY_MODEL_H
#define FOLIO_REPLAY_MODEL_H

#include "replay.h"
#include "replay_stats.h"
#include "replay_trace.h"

#include <folio/folio_pool.h>
#include <stdio.h>

/* A sequence's part of a step: tokens [first, first + count). */
typedef struct replay_item {
    folio_sequence *sequence;
    const replay_request *request;
    int64_t first, count;
} replay_item;

typedef enum replay_tensor { REPLAY_Q, REPLAY_K, REPLAY_V, REPLAY_TENSORS } replay_tensor;

/* The made-up numbers. */
typedef struct replay_numbers {
    uint64_t seed;
    folio_dtype dtype;
    int32_t head_size;
    float f32[REPLAY_TENSORS][256]; /* a byte of the hash to a number, of the dtype's table */
    uint16_t half[REPLAY_TENSORS][256];
} replay_numbers;

void replay_numbers_init(replay_numbers *n, const replay_options *o);
/* Heads [first_head, first_head + num_heads) of one token; who: its identity, or of q its place. */
void replay_numbers_row(const replay_numbers *n, replay_tensor tensor, int32_t layer, uint64_t who,
                        int64_t first_head, int64_t num_heads, void *to);
/* Of q: request and position in one number. */
uint64_t replay_query(const replay_request *r, int64_t position);

typedef struct replay_verifier replay_verifier;

typedef struct replay_model {
    const replay_options *o;
    const replay_trace *trace;
    replay_stats *stats;
    replay_numbers numbers;
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
    bool device;             /* tensors lie in memory the host does not reach */
    void *host[4], *near[4]; /* q, k, v, out: as made, and where forwards read */
    size_t bytes[4];
    folio_sequence **list;     /* [max_seqs] */
    replay_verifier *verifier; /* NULL: nothing is verified */
    FILE *rows;
} replay_model;

/* longest: tokens of a sequence. False: stderr says why; close it anyway. */
bool replay_model_open(replay_model *m, const replay_options *o, const replay_trace *t,
                       replay_stats *stats);
void replay_model_close(replay_model *m);

/* All layers of a step whose slots are reserved. Adds its times to the stats. */
bool replay_model_step(replay_model *m, const replay_item *items, int64_t num_items);

/* ---- replay_verify.c: some rows again, by the reference, over K and V made anew. */

replay_verifier *replay_verifier_open(const replay_model *m);
void replay_verifier_close(replay_verifier *v);
/* out: [rows][heads][head_size] of the items one after another, in the model's dtype. */
bool replay_verifier_check(replay_verifier *v, const replay_model *m, const replay_item *items,
                           int64_t num_items, int32_t layer, const void *out);

/* True for FOLIO_OK; else a sentence on stderr, with the call's name. */
bool replay_ok(folio_status status, const char *call);
#define REPLAY_TRY(call)                                                                           \
    do {                                                                                           \
        if (!replay_ok((call), #call)) return false;                                               \
    } while (0)

#endif
