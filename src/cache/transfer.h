/*
 * transfer.h: blocks on their way between tiers. A transfer is a list of steps, made under the pool's
 * lock, run by the pool's one mover thread without it, in order, one transfer after another; then its
 * effect is put in force under the lock (swap.c). A step's references keep its blocks in place.
 *
 * On a device a transfer has ended when its copies are in the pool's stream: whatever uses its blocks
 * next is queued behind them. The thread waits for the stream before the host reads a frame (SPILL,
 * SINK, STORE) or writes one (LOAD).
 */
#ifndef FOLIOI_TRANSFER_H
#define FOLIOI_TRANSFER_H

#include "cache/store.h"

#include <folio/folio_pool.h>
#include <pthread.h>

typedef enum folioi_step_kind {
    STEP_KEEP,  /* nothing to move: the block is there already */
    STEP_OUT,   /* device to host                              */
    STEP_IN,    /* host to device                              */
    STEP_SPILL, /* host to disk, before the block is reused    */
    STEP_STORE, /* device to disk                              */
    STEP_SINK,  /* host to disk                                */
    STEP_LOAD   /* disk to device                              */
} folioi_step_kind;

typedef struct folioi_step {
    folioi_step_kind kind;
    int32_t table;        /* group, or the encoder's          */
    int64_t index;        /* in the sequence's table          */
    int32_t device, host; /* blocks; NONE                     */
    int32_t node;         /* of the index; NONE               */
    int32_t unused;       /* STORE, SINK: slots of the block behind its last token */
    bool holds_device;    /* the step has a reference to it   */
    bool holds_host;
    bool tried;         /* STORE: a frame was asked for       */
    bool ok;            /* SPILL, STORE: written; LOAD: read and verified */
    folioi_frame_id id; /* on disk                            */
} folioi_step;

typedef enum folioi_transfer_kind {
    TRANSFER_OUT,   /* a sequence leaves the device   */
    TRANSFER_DOWN,  /* it goes from host to disk      */
    TRANSFER_IN,    /* it comes back                  */
    TRANSFER_MATCH, /* cached blocks come back for it */
    TRANSFER_CACHED /* cached blocks go down a tier   */
} folioi_transfer_kind;

struct folio_transfer {
    folio_pool *pool;
    folioi_transfer_kind kind;
    folio_tier tier;          /* OUT, CACHED: where to */
    folio_sequence *sequence; /* NULL for CACHED       */
    folio_transfer *next;     /* in the mover's queue  */
    int32_t owners;           /* the mover, the handle */
    bool done;
    folio_status status;
    char text[256]; /* of a failure */
    int64_t num_steps, max_steps, bytes;
    folioi_step *steps; /* [max_steps]            */
    char *ids;          /* [max_steps][ids_bytes] */
};

typedef struct folioi_mover {
    pthread_cond_t wake, ended;
    pthread_t thread;
    bool started, quit;
    bool queued;                  /* copies of frames are in the pool's stream; the thread's own */
    folio_transfer *first, *last; /* the first one is being run */
} folioi_mover;

void folioi_mover_init(folioi_mover *m);
folio_status folioi_mover_start(folio_pool *pool);
void folioi_mover_stop(folio_pool *pool);
/** By the mover's thread, or after its end: wait until the copies of frames it has queued are done. */
folio_status folioi_mover_settle(folio_pool *pool);
/** Wait, under the lock, until some transfer has ended. */
void folioi_mover_await(folio_pool *pool);

/** Room for so many blocks, and for spilling as many others. */
folio_status folioi_transfer_new(folio_pool *pool, int64_t num_blocks, folio_transfer **out);
/** A step; id's ids are copied. */
folioi_step *folioi_transfer_add(folio_transfer *t, folioi_step step);
/** Give it to the mover. sequence NULL: of no sequence. */
void folioi_transfer_begin(folio_transfer *t, folioi_transfer_kind kind, folio_sequence *sequence);
/** To the caller; or, where `out` is NULL, wait for its end. t NULL: nothing to do. */
folio_status folioi_transfer_hand_out(folio_transfer *t, folio_transfer **out);

#endif
