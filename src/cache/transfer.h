/*
 * transfer.h: blocks on their way between tiers. A transfer is a list of moves, made under the pool's
 * lock, run by the pool's one mover thread without it, in order, one transfer after another; then its
 * effect is put in force under the lock, by `finish`. A move's references keep its blocks in place.
 *
 * On a device a transfer has ended when its copies are in the pool's stream: whatever uses its blocks
 * next is queued behind them. The thread waits for the stream before the host reads a frame (SPILL,
 * SINK, STORE) or writes one (LOAD).
 */
#ifndef FOLIOI_TRANSFER_H
#define FOLIOI_TRANSFER_H

#include "cache/sequence.h"

typedef enum folioi_move_kind {
    MOVE_KEEP,  /* nothing to move: the block is there already                     */
    MOVE_OUT,   /* device to host                                                  */
    MOVE_IN,    /* host to device                                                  */
    MOVE_SPILL, /* host to disk, a cached block: a failure is only a miss          */
    MOVE_STORE, /* device to disk                                                  */
    MOVE_SINK,  /* host to disk, a sequence's block: a failure fails the transfer  */
    MOVE_LOAD   /* disk to device                                                  */
} folioi_move_kind;

typedef struct folioi_move {
    folioi_move_kind kind;
    int32_t table;        /* group, or the encoder's          */
    int64_t index;        /* in the sequence's table          */
    int32_t device, host; /* blocks; NONE                     */
    int32_t node;         /* of the index; NONE               */
    int32_t unused;       /* STORE, SINK: slots of the block behind its last token */
    bool holds_device;    /* the move has a reference to it   */
    bool holds_host;
    bool tried;         /* to disk: a frame was asked for     */
    bool ok;            /* to disk: written; LOAD: read and verified */
    folioi_frame_id id; /* on disk                            */
} folioi_move;

struct folio_transfer {
    folio_pool *pool;
    folio_sequence *sequence;          /* NULL: cached blocks go down */
    folio_transfer *next;              /* in the mover's queue  */
    int32_t owners;                    /* the mover, the handle */
    void (*finish)(folio_transfer *t); /* what it did takes effect */
    bool done;
    folio_status status;
    char text[256]; /* of a failure */
    int64_t num_moves, max_moves, bytes;
    folioi_move *moves; /* [max_moves]            */
    char *ids;          /* [max_moves][ids_bytes] */
};

void folioi_mover_init(folioi_mover *m);
folio_status folioi_mover_start(folio_pool *pool);
void folioi_mover_stop(folio_pool *pool);
/** By the mover's thread, or after its end: wait until the copies of frames it has queued are done. */
folio_status folioi_mover_wait(folio_pool *pool);

/** Room for so many blocks, and for spilling as many others. */
folio_status folioi_transfer_new(folio_pool *pool, int64_t num_blocks, folio_transfer **out);
/** A move; id's ids are copied. */
folioi_move *folioi_transfer_add(folio_transfer *t, folioi_move move);
/** Give it to the mover. sequence NULL: cached blocks go down a tier. */
void folioi_transfer_begin(folio_transfer *t, folio_sequence *sequence,
                           void (*finish)(folio_transfer *t));
/** To the caller; or, where `out` is NULL, wait for its end. t NULL: nothing to do. */
folio_status folioi_transfer_hand_out(folio_transfer *t, folio_transfer **out);

#endif
