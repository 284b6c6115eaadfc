/* plan.h: a plan: its limits, the batch of the last update, and the backend's schedule. */
#ifndef FOLIOI_PLAN_H
#define FOLIOI_PLAN_H

#include "core/slotset.h"
#include "plan/call.h"

#include <stdatomic.h>

/** What forward asks of the batch, per planned attention type, found once per update. Sequences: -1 is
 * none. */
typedef struct folioi_plan_facts {
    int64_t query_rows, new_rows; /* of q; of k and v                                        */
    int64_t max_query_len, max_key_len;
    int64_t with_context;          /* first sequence with keys cached before this step        */
    int64_t without_table;         /* first sequence with keys and no block table             */
    int64_t context_without_table; /* first sequence with cached keys and no block table      */
    int64_t only_reads;            /* first sequence with more queries than keys              */
    int64_t shared_slot;           /* first new row whose slot an earlier one has; -1: none   */
    int64_t low_pos, high_pos;     /* least and largest position of a row; 0 where unknown    */
    int64_t low_seq, high_seq;     /* sequences that have them                                */
} folioi_plan_facts;

/** Who is in a plan's own workspace: one forward at a time and, from one update to the next, one stream. */
typedef struct folioi_workspace_use {
    atomic_bool is_busy; /* a forward is in it                                   */
    bool is_bound;       /* a forward has run since the last update, on `stream` */
    void *stream;
} folioi_workspace_use;

/** FOLIO_PLAN_NOTE_BAD on host backends: what forwards have found. */
typedef struct folioi_bad_note {
    atomic_bool is_busy; /* a thread reads or writes the others                     */
    bool was_asked;      /* the caller has it: the next update forgets it           */
    uint64_t key;        /* bad_key; FOLIOI_BAD_NONE: no note                      */
    int64_t step;        /* updates so far                                          */
    folio_plan_bad_write first;
} folioi_bad_note;

/** What the limits decide. */
typedef struct folioi_plan_room {
    void *state; /* the backend's */
    bool has_state;
    size_t workspace_size;
    void *workspace; /* the plan's own, or NULL */
    folioi_slotset slots;
} folioi_plan_room;

struct folio_plan {
    folioi_plan_shape shape;
    int64_t shape_bytes; /* of attentions and types, in one piece */
    bool grows;          /* created without limits: those of `shape` are the room's */
    folioi_plan_room room;
    folioi_workspace_use workspace_use;
    folioi_bad_note bad;
    folio_batch *batch;          /* of the last update, or NULL */
    folio_batch *own_batches[2]; /* of steps; NULL: not used yet */
    uint64_t generation;
    bool on_device; /* the last update was from arrays there, and there is no batch */
    int64_t num_seqs;
    folioi_plan_facts facts[FOLIO_NUM_ATTENTION_TYPES];
};

/** A room for a plan of this shape; on error there is none. */
folio_status folioi_plan_room_make(const folioi_plan_shape *shape, folioi_plan_room *room);
void folioi_plan_room_free(const folioi_plan_shape *shape, folioi_plan_room *room);
/** Limits that a batch exceeds are raised; was there one? */
bool folioi_plan_grow(folioi_plan_shape *shape, const folio_batch *batch);
/** The types that attentions of the plan run as. */
uint32_t folioi_plan_types(const folioi_plan_shape *shape);
/** The most keys that a row of a sequence has as any of these types: ENCODER_ONLY sees all new tokens. */
int64_t folioi_plan_most_keys(uint32_t types, const folio_batch *batch, int64_t seq);

/** Every block index, slot and length of a batch against the limits. */
folio_status folioi_plan_check(const folioi_plan_shape *shape, const folio_batch *batch);

/** The first new row of a type whose slot an earlier row has; -1: none. */
int64_t folioi_plan_find_shared_slot(folioi_slotset *set, const folio_batch *batch,
                                     folio_attention_type type);

/** Has every new row of the last update's batch a slot of its own? For a forward that writes k and v. */
folio_status folioi_plan_check_writes(const folio_plan *plan, folio_attention_type type);

/** Refuses a second thread, and a second stream. Leave it when the forward was given to the device. */
folio_status folioi_plan_enter_workspace(const folio_plan *plan, void *stream);
void folioi_plan_leave_workspace(const folio_plan *plan);

/** A new step begins; no forward runs. */
void folioi_plan_begin_notes(folio_plan *plan);
/** Look at what a forward of a host backend wrote. */
void folioi_plan_note_bad(const folio_plan *plan, const folioi_call *call);

/** Which attention of the list, as which type; both checked against the plan. */
folio_status folioi_plan_find(const folio_plan *plan, int32_t attention, folio_attention_type type);

#endif
