/* replay_model.h: a model with nothing but attention, over numbers that are made up. */
#ifndef FOLIO_REPLAY_MODEL_H
#define FOLIO_REPLAY_MODEL_H

#include "kit/layer.h"
#include "replay/replay.h"
#include "replay/replay_numbers.h"
#include "replay/replay_stats.h"
#include "replay/replay_trace.h"

#include <folio/folio_pool.h>
#include <stdio.h>

/* A sequence's tokens in a step: [first, first + count). */
typedef struct replay_item {
    folio_sequence *sequence;
    const replay_request *request;
    int64_t first, count;
} replay_item;

typedef struct replay_verifier replay_verifier;

typedef struct replay_model {
    const replay_options *o;
    const replay_trace *trace;
    replay_stats *stats;
    replay_numbers numbers;
    kit_layer l;
    bool device;             /* tensors lie in memory the host does not reach */
    void *host[4], *near[4]; /* q, k, v, out: as made, and where forwards read */
    size_t bytes[4];
    folio_sequence **list;     /* [max_seqs] */
    replay_verifier *verifier; /* NULL: nothing is verified */
    FILE *rows;
} replay_model;

/* False: stderr says why; close it anyway. */
bool replay_model_open(replay_model *m, const replay_options *o, const replay_trace *t,
                       replay_stats *stats);
/* False: the rows' file could not be written, and stderr says so. */
bool replay_model_close(replay_model *m);

/* Notes where a context computes. */
bool replay_note_place(replay_place *to, const folio_context *ctx);

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
