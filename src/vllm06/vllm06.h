/*
 * vllm06.h: what the files of the vLLM 0.6 layer share. Everything they do goes through folio.h; of the
 * library's own parts they use the error text, the allocator, the checks of tensors and one kind of write.
 */
#ifndef FOLIOI_VLLM06_H
#define FOLIOI_VLLM06_H

#include "core/checked.h"
#include "core/context.h"
#include "core/slotset.h"

#include <folio/folio_vllm06.h>

/** The biases of one attention type, [num_prefills]; ENCODER_ONLY shares DECODER's. */
typedef struct folioi_vllm06_biases {
    folioi_array list; /* folio_vllm06_bias, then all their numbers, in host memory */
    void *placed;      /* the numbers once more, where a device reads them; NULL on host backends */
    int64_t placed_bytes;
} folioi_vllm06_biases;
enum { FOLIOI_VLLM06_BIAS_LISTS = 3 };

/** Which sequences of a step attend together. ALONE: those that no other layer finds again. */
typedef enum folioi_vllm06_which {
    FOLIOI_VLLM06_ALONE,
    FOLIOI_VLLM06_PROMPTS,
    FOLIOI_VLLM06_DECODES,
    FOLIOI_VLLM06_ENCODER,
    FOLIOI_VLLM06_ENCODER_ONLY,
    FOLIOI_VLLM06_CROSS,
    FOLIOI_VLLM06_PAGED /* of paged_attention */
} folioi_vllm06_which;

/** More than models need; a state with as many drops its oldest for a new one. */
enum { FOLIOI_VLLM06_MOST_PLANS = 64 };

/** What a plan was updated with. */
typedef struct folioi_vllm06_update {
    uint64_t metadata; /* its id; 0: nothing that another layer may use */
    int64_t first;     /* sequence */
    bool fresh;        /* key and value were given */
    void *stream;      /* that its layers run on */
} folioi_vllm06_update;

/** A plan in a list, the oldest first. Layers that differ in nothing that is named here share it. */
typedef struct folioi_vllm06_plan {
    struct folioi_vllm06_plan *next;
    folio_attention_desc attention;
    folio_attention_type type;
    folioi_vllm06_which which;
    int64_t num_blocks;
    int32_t block_size;
    folio_layout layout; /* of the cache */
    folioi_vllm06_update update;
    folio_batch *batch; /* of paged_attention: NULL */
    folio_plan *plan;
    folioi_array asked; /* of paged_attention: what it was updated with, as numbers */
    int64_t asked_bytes;
} folioi_vllm06_plan;

struct folio_vllm06_metadata {
    uint64_t id; /* of all the state ever had; from 1 */
    folio_vllm06_state *state;
    const folio_vllm06_backend *backend;
    folio_vllm06_metadata_fields f;
    int64_t num_seqs;
    int64_t num_real;        /* sequences before a graph's padding */
    folioi_array copies[15]; /* what the fields point to, but for the biases */
    /* Slots as a layer stores to them, the same in all layers: -1 for padding and for a token that a later one
     * writes over. NULL: none were given. */
    const int64_t *store_slots, *cross_store_slots;
    bool distinct;          /* none of slot_mapping was written over */
    folioi_array stores[2]; /* the memory of both */
    folioi_vllm06_biases biases[FOLIOI_VLLM06_BIAS_LISTS];
    int32_t num_copies;
    folio_vllm06_metadata *prefill, *decode; /* cached views; may be the metadata itself */
    int64_t graph_len;                       /* of a graph's: its longest sequence; else 0 */
    folioi_vllm06_plan *plans;               /* of a graph's: they are its own, and all stay */
    folioi_slotset slots;                    /* of a graph's: to find one that two decodes have */
    folio_vllm06_metadata *owner;            /* of a view: it owns the arrays */
};

/** Where K and V of a cache are, which was checked. */
typedef struct folioi_vllm06_memory {
    void *k, *v;
    int64_t bytes; /* of each */
    int64_t block_elements;
} folioi_vllm06_memory;

/** A cache of an engine as one layer of Folio's. */
typedef struct folioi_vllm06_kept {
    folio_vllm06_kv_cache of;
    folio_layout layout;
    folioi_vllm06_memory memory;
    folio_kv_cache *cache;
} folioi_vllm06_kept;

struct folio_vllm06_state {
    folioi_refs refs;
    folio_context *ctx;
    folioi_vllm06_plan *plans;
    folioi_array kept; /* folioi_vllm06_kept [num_kept] */
    int64_t num_kept, next_kept;
    folioi_array slots;  /* int64_t, of a reshape_and_cache */
    folioi_array asking; /* of a paged_attention: what its plan must be for */
    uint64_t num_metadata;
    folio_vllm06_graph_capture_desc capture; /* attn_backend NULL: none */
};

struct folio_vllm06_impl {
    folio_vllm06_state *state;
    const folio_vllm06_backend *backend;
    folio_attention_desc desc;             /* as it was described */
    folio_attention_desc prompts, decodes; /* the same in decoder attention, after compat */
    bool compat;
    float *slopes; /* [num_heads] in memory of the context, or NULL */
    int64_t slopes_bytes;
};

/** Metadata that is there, and a type there is. */
folio_status folioi_vllm06_check_type(const folio_vllm06_metadata *m, folio_attention_type type);
/** The length of sequence i and its query, whichever of the fields say them. */
int64_t folioi_vllm06_seq_len(const folio_vllm06_metadata *m, int64_t i);
int64_t folioi_vllm06_query_len(const folio_vllm06_metadata *m, int64_t i);

/** Block tables as rows; NULL: none, and stride 0. */
typedef struct folioi_vllm06_rows {
    const int32_t *row;
    int64_t stride;
} folioi_vllm06_rows;
/** The row of sequence i and its length, whichever of the fields has it. */
folioi_vllm06_rows folioi_vllm06_table(const folio_vllm06_metadata *m, int64_t i);

/** A state over a context, of which it takes the caller's reference. */
folio_status folioi_vllm06_state_over(folio_context *ctx, folio_vllm06_state **out);
void folioi_vllm06_drop_plans(folio_context *ctx, folioi_vllm06_plan *plans);

/** The plan for such an attention in a part of a step (which), made where there is none: the state's, or that of a
 * graph's metadata. graph NULL, cache NULL: none. */
folio_status folioi_vllm06_find_plan(folio_vllm06_state *state, folio_vllm06_metadata *graph,
                                     const folio_attention_desc *desc, folio_attention_type type,
                                     const folio_kv_cache *cache, folioi_vllm06_which which,
                                     folioi_vllm06_plan **out);
/** A plan of a graph's metadata, updated with what the metadata holds now. */
folio_status folioi_vllm06_replan(const folio_vllm06_metadata *m, folioi_vllm06_plan *p,
                                  const folio_run *run);
/** Host bytes copied to memory of the context, there when this returns; folio_memory_destroy frees it. */
folio_status folioi_vllm06_place(folio_context *ctx, const void *from, int64_t bytes, void **out);

/** Where the context's kernels read the numbers of prompt i's bias of a type, which is set. */
const float *folioi_vllm06_bias_numbers(const folio_vllm06_metadata *m, folio_attention_type type,
                                        int64_t i);
void folioi_vllm06_biases_free(folio_vllm06_metadata *m);

/** A description that the library handed out. */
folio_status folioi_vllm06_check_backend(const folio_vllm06_backend *backend, const char *what);

/** Sizes of a cache, whose product fits; the numbers of a block. */
folio_status folioi_vllm06_check_sizes(int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                                       int64_t head_size, const char *name,
                                       int64_t *block_elements);
/** A cache that is whole and fits its bytes; name: what errors call it. */
folio_status folioi_vllm06_check_cache(const folio_vllm06_kv_cache *c, const char *name,
                                       folioi_vllm06_memory *out);
/** The state's description of a cache, made where there is none; valid until the next call of this. */
folio_status folioi_vllm06_find_cache(folio_vllm06_state *state, const folio_vllm06_kv_cache *c,
                                      folio_layout layout, const char *name,
                                      const folioi_vllm06_kept **out);
void folioi_vllm06_drop_caches(folio_vllm06_state *state);

#endif
