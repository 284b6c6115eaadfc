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

/** How the three originals differ: a row of vllm06_backends.c. */
typedef struct folioi_vllm06_traits {
    const char *name;
    folio_layout layout; /* of (2, num_blocks, ...) caches */
    bool mixes;          /* prompts and decodes in one step: views are slices */
    /* What compat brings back besides the habits that all three had. */
    bool bare_prompts; /* prompts have no slopes, window or biases, decodes no soft cap */
    bool prefix_scale; /* prompts with block tables are scaled by 1 / sqrt(head_size) */
} folioi_vllm06_traits;

/** The biases of one attention type, [num_prefills]; ENCODER_ONLY shares DECODER's. */
typedef struct folioi_vllm06_biases {
    folioi_array list; /* folio_vllm06_bias, then all their numbers, in host memory */
    void *placed;      /* the numbers once more, where a device reads them; NULL on host backends */
    int64_t placed_bytes;
} folioi_vllm06_biases;
enum { FOLIOI_VLLM06_BIAS_LISTS = 3 };

struct folio_vllm06_metadata {
    uint64_t id; /* of all the state ever had; from 1 */
    folio_vllm06_state *state;
    const folioi_vllm06_traits *traits;
    folio_vllm06_metadata_fields f;
    int64_t num_seqs;
    int64_t num_real;        /* sequences before a graph's padding */
    folioi_array copies[15]; /* what the fields point to, but for the biases */
    folioi_vllm06_biases biases[FOLIOI_VLLM06_BIAS_LISTS];
    int32_t num_copies;
    folio_vllm06_metadata *prefill, *decode; /* cached views; may be the metadata itself */
    int64_t graph_len;                       /* of a graph's: its longest sequence; else 0 */
    struct folioi_vllm06_plan *plans;        /* of a graph's: they are its own */
    folioi_slotset slots;                    /* of a graph's: to find one that two decodes have */
    folio_vllm06_metadata *owner;            /* of a view: it owns the arrays */
};

/** Which sequences of a step attend together. ALONE: those that no other layer finds again. */
typedef enum folioi_vllm06_which {
    FOLIOI_VLLM06_ALONE,
    FOLIOI_VLLM06_PROMPTS,
    FOLIOI_VLLM06_DECODES,
    FOLIOI_VLLM06_ENCODER,
    FOLIOI_VLLM06_ENCODER_ONLY,
    FOLIOI_VLLM06_CROSS
} folioi_vllm06_which;

/** What a plan was updated with. */
typedef struct folioi_vllm06_part {
    uint64_t metadata; /* its id; 0: nothing that another layer may use */
    int64_t first;     /* sequence */
    bool fresh;        /* key and value were given */
    void *stream;      /* that its layers run on */
} folioi_vllm06_part;

/** One plan of a state, shared by all layers that ask for the same. */
typedef struct folioi_vllm06_plan {
    folio_attention_desc desc;
    folio_attention_type type;
    int64_t num_blocks;
    int32_t block_size;
    folioi_vllm06_which which;
    folioi_vllm06_part part;
    folio_attention *attention;
    folio_batch *batch;
    folio_plan *plan;
    folio_plan_desc limits;
    int64_t graph_seqs, graph_len; /* of a graph's: the limits are fixed; else 0 */
    struct folioi_vllm06_plan *next;
} folioi_vllm06_plan;

struct folio_vllm06_state {
    folioi_refs refs;
    folio_context *ctx;
    folioi_vllm06_plan *plans;
    uint64_t num_metadata;
    folio_vllm06_graph_capture_desc capture; /* attn_backend NULL: none */
};

struct folio_vllm06_impl {
    folio_vllm06_state *state;
    const folioi_vllm06_traits *traits;
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

/** The plan for such a part of a step, made where there is none: the state's, or that of a graph's
 * metadata. graph NULL, cache NULL: none. */
folio_status folioi_vllm06_find_plan(folio_vllm06_state *state, folio_vllm06_metadata *graph,
                                     const folio_attention_desc *desc, folio_attention_type type,
                                     const folio_kv_cache *cache, folioi_vllm06_which which,
                                     folioi_vllm06_plan **out);
/** A plan of a graph's metadata, updated with what the metadata holds now. */
folio_status folioi_vllm06_replan(const folio_vllm06_metadata *m, folioi_vllm06_plan *p,
                                  const folio_run *run);
/** The plan updated with what its batch holds, and remade where that is more than it was made for. */
folio_status folioi_vllm06_update(folio_vllm06_state *state, folioi_vllm06_plan *p,
                                  const folio_run *run);

/** Host bytes copied to memory of the context, there when this returns; folio_memory_destroy frees it. */
folio_status folioi_vllm06_place(folio_context *ctx, const void *from, int64_t bytes, void **out);

/** Where the context's kernels read the numbers of prompt i's bias of a type, which is set. */
const float *folioi_vllm06_bias_numbers(const folio_vllm06_metadata *m, folio_attention_type type,
                                        int64_t i);
void folioi_vllm06_biases_free(folio_vllm06_metadata *m);

folio_status folioi_vllm06_make_metadata(folio_vllm06_state *state,
                                         const folioi_vllm06_traits *traits,
                                         const folio_vllm06_metadata_fields *fields,
                                         folio_vllm06_metadata **out);
folio_status folioi_vllm06_make_impl(folio_vllm06_state *state, const folioi_vllm06_traits *traits,
                                     const folio_vllm06_impl_desc *desc, folio_vllm06_impl **out);
folio_status folioi_vllm06_forward(folio_vllm06_impl *impl, const folio_vllm06_forward_args *args,
                                   const folio_run *run);

/** A whole (2, num_blocks, ...) cache as one layer of Folio's. */
folio_status folioi_vllm06_wrap(folio_context *ctx, const folioi_vllm06_traits *traits,
                                const folio_vllm06_kv_cache *kv_cache, int32_t num_kv_heads,
                                int32_t head_size, folio_kv_cache **out);

#endif
