/*
 * cuda_plan.h: a plan on the device. Everything that kernels read of a step is in one arena at fixed addresses, so that a
 * captured graph finds the next step's data there.
 */
#ifndef FOLIOI_CUDA_PLAN_H
#define FOLIOI_CUDA_PLAN_H

#include "backends/cuda/decode/decode.h"
#include "backends/cuda/host/cuda_backend.h"
#include "backends/cuda/prefill/prefill.h"
#include "backends/cuda/step/cuda_schedule.h"

enum { FOLIOI_CUDA_STAGES = 2 };     /* the host fills one while the other is on its way */
enum { FOLIOI_CUDA_WORKSPACES = 8 }; /* of callers that a plan keeps counters for */

/** One array of a plan: where it lies in the arena, and how many bytes it can have. */
typedef struct folioi_cuda_place {
    size_t at, bytes;
} folioi_cuda_place;

/** What a launch must be ready for: the step's, or in a graph plan all that may come. */
typedef struct folioi_cuda_work {
    int32_t decode_rows; /* most rows of a sequence that decode kernels compute; 0: there is none */
    int64_t query_len;   /* length of the longest query                                           */
    bool prefills;       /* some sequence has more rows than those take                           */
    bool clustered;      /* decode's list is for clusters: decode_is_clustered                    */
    folioi_prefill_head whole; /* as far as the host knows them: num_keys, and num_items if none */
                               /* is cut; else 0                                                */
} folioi_cuda_work;

/** The step's work lists for one attention as one type; attentions of one shape share them. */
typedef struct folioi_cuda_list {
    folio_attention_type type;
    folioi_cuda_limits limits;
    folioi_cuda_decode_plan decode;
    folioi_cuda_prefill_plan prefill;
    folioi_cuda_place schedule, items;
    folioi_cuda_work limit, now; /* within the plan's limits; in the step at hand */
} folioi_cuda_list;

/** Lines of a choice by number, from 1 on, for the prefills and for the decodes of a step; 0: it has none. Both 0: the
 * generic kernel. */
typedef struct folioi_cuda_picks {
    int prefill, decode;
} folioi_cuda_picks;

/** One attention as one type: its work list, its kernels and their names. */
enum { FOLIOI_CUDA_PICKS = FOLIOI_CUDA_MOST_LINES + 1 };
typedef struct folioi_cuda_use {
    int32_t list; /* -1: none, and the generic kernel computes it */
    folioi_cuda_choice prefill, decode;
    char names[FOLIOI_CUDA_PICKS][FOLIOI_CUDA_PICKS][96]; /* by folioi_cuda_picks */
    char fallback[2][2][224];                             /* of a step that has prefills, decodes */
} folioi_cuda_use;

/**
 * The last decode in the plan's own workspace since the last update: where it was launched. One forward at a time is
 * there.
 */
typedef struct folioi_cuda_ahead {
    bool is_there;
    const char *stored;          /* K of the layer whose new rows it stored; NULL: it stored none */
    const void *format;          /* of that layer's cache */
    folioi_cuda_capture capture; /* with it */
} folioi_cuda_ahead;

typedef struct folioi_cuda_plan {
    folioi_plan_shape shape;
    folioi_cuda_place counts[FOLIO_NUM_ATTENTION_TYPES], seqs[FOLIO_NUM_ATTENTION_TYPES];
    folioi_cuda_place blocks, cross_blocks, slots, cross_slots, jobs, problems, num_checked, notes;
    folioi_cuda_place
        counters; /* [FOLIOI_CUDA_WORKSPACES][counter_bytes]; zeros between forwards */
    size_t staged_bytes, bytes; /* the arena's beginning is copied from a stage */
    char *device, *stage[FOLIOI_CUDA_STAGES];
    cudaEvent_t copied[FOLIOI_CUDA_STAGES]; /* the copy out of a stage is done */
    int current;
    bool may_pad;     /* out may have rows that no sequence has */
    int64_t num_seqs; /* of the last update, in stage[current]; -1: only the device knows */
    int64_t longest;  /* of its sequences, as decode_is_clustered has it */
    uint64_t *word;   /* in host memory: what the device found last; see folioi_cuda_report_word */
    folioi_cuda_bad *bad;    /* in host memory: the first bad write; NULL: the plan notes none */
    folioi_cuda_list *lists; /* [num_attentions * FOLIO_NUM_ATTENTION_TYPES], num_lists used */
    folioi_cuda_use *uses;   /* [num_attentions][FOLIO_NUM_ATTENTION_TYPES] */
    int32_t num_lists, num_jobs;
    folioi_cuda_ahead *ahead;
    _Atomic(char *)
        *workspaces; /* [FOLIOI_CUDA_WORKSPACES]: whose the counters are; NULL: nobody's yet */
} folioi_cuda_plan;

static inline void *folioi_cuda_at(const folioi_cuda_plan *p, folioi_cuda_place place)
{
    return p->device + place.at;
}

static inline bool folioi_cuda_is_graph(const folioi_cuda_plan *p)
{
    return (p->shape.desc.flags & FOLIO_PLAN_GRAPH) != 0;
}

static inline bool has_private_slots(const folioi_cuda_plan *p)
{
    return (p->shape.desc.flags & FOLIO_PLAN_PRIVATE_SLOTS) != 0;
}

static inline bool notes_bad(const folioi_cuda_plan *p)
{
    return (p->shape.desc.flags & FOLIO_PLAN_NOTE_BAD) != 0;
}

static inline folioi_cuda_use *folioi_cuda_use_of(const folioi_cuda_plan *p, int32_t attention,
                                                  folio_attention_type type)
{
    return &p->uses[attention * FOLIO_NUM_ATTENTION_TYPES + (int)type];
}

/** Caps so large are none: what they would change is past f32 in a kernel. */
static inline float folioi_cuda_soft_cap(const folio_attention_desc *a)
{
    return a->soft_cap < 1e37f ? a->soft_cap : 0.0f;
}

/** A layer of an attention as a plan knows it: aligned, its cache in the plan's layout. All bytes are set. */
folioi_cuda_layer folioi_cuda_layer_prototype(const folioi_plan_shape *shape,
                                              const folio_attention_desc *a,
                                              folio_attention_type type);
/** Names by what a step has: of the kernels that the plan chose; of those for calls that these do not take. */
void folioi_cuda_name_kernels(folioi_cuda_use *use);

/** What a call runs, by the step of the last update. */
folioi_cuda_picks folioi_cuda_picks_of(const folioi_cuda_plan *p, const folioi_call *call);
/** Lists and kernels of all 16-bit attentions of the plan, without the lists' places. */
void folioi_cuda_lists_init(folioi_cuda_plan *p);
/** Write the jobs that make them to the device; the arena is there. */
folio_status folioi_cuda_lists_start(folioi_cuda_plan *p);
/** What the step's sequences of a type ask of the lists. seqs: in host memory; NULL: only their number is known. */
void folioi_cuda_lists_update(folioi_cuda_plan *p, folio_attention_type type,
                              const folioi_cuda_seq *seqs, int64_t num_seqs);

/** Items of the last update's sequences in host memory, over all kv heads, and those of them that are parts. */
void folioi_cuda_lists_count(const folioi_cuda_plan *p, const folioi_cuda_list *list,
                             const folioi_cuda_seq *seqs, int64_t *items, int64_t *split_items);

#endif
