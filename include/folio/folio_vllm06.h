/*
 * folio_vllm06.h: the attention interface of vLLM 0.6, in C.
 *
 * For engines that were built around vLLM 0.6's three attention backends, their metadata and their
 * cache layouts. Every name is vLLM's, with the prefix folio_vllm06_. Nothing is computed here: all
 * goes through folio.h, whose rules for structs, errors and lifetimes hold here too. Four structs
 * are taken by pointer, have no struct_size and never change: folio_vllm06_bias and
 * folio_vllm06_kv_cache, because they stand in arrays; folio_vllm06_cache_view and
 * folio_vllm06_seq_len_block_table_args, because they hold what vLLM 0.6 returns, which is fixed.
 *
 *     backend   xformers, torch-sdpa or ipex: a description, found by name
 *     state     a compute backend with its threads; the plans that all layers of a step share
 *     metadata  one step: which sequences, how long, which blocks and slots
 *     impl      one attention layer; forward writes the cache and attends
 *
 * What vLLM's classes are here, each for all backends:
 *
 *     XFormersBackend, TorchSDPABackend, IpexAttnBackend        folio_vllm06_backend_find
 *     XFormersImpl, TorchSDPABackendImpl, IpexAttnBackendImpl   folio_vllm06_make_impl; its forward() is
 *                                                               folio_vllm06_forward
 *     XFormersMetadata, TorchSDPAMetadata, IpexAttnMetadata     folio_vllm06_make_metadata
 *     XFormersMetadataBuilder and the others' builders          folio_vllm06_builder_create, _add, _build
 *     CommonAttentionState                                      folio_vllm06_state_create
 *     PagedAttention                                            folio_vllm06_reshape_and_cache,
 *                                                               _paged_attention_v1 and _v2,
 *                                                               _copy_blocks, _swap_blocks
 *
 * get_impl_cls(), get_metadata_cls(), get_state_cls() and get_builder_cls() have no call: each class is
 * one of these functions, which takes the backend. Static methods of the backends are functions too:
 * folio_vllm06_get_kv_cache_shape, _swap_blocks, _copy_blocks.
 *
 * Rows. Query, key, value and output are flat, [num_tokens][heads * head_size]: the tokens of all
 * prefills, then one token for each decode, padding behind them. output may be query itself, with the
 * same data, dtype and strides, but not in cross attention. Apart from that, output and the cache must
 * share no byte with each other or with query, key and value, by the rules of folio_tensors. A cache
 * that is given to encoder or encoder-only attention is not used, and not checked.
 *
 * Threads. A state and everything made from it are used by one thread at a time.
 *
 * Lifetimes. Objects may be destroyed in any order, as in folio.h: metadata, impls and builders keep
 * their state alive, and objects of its context keep that context. A state remembers the caches it was
 * given, by pointers and sizes; between calls it does not touch their memory.
 *
 * Devices. With compute "cuda" these must be in memory that the device can access: query, key, value,
 * output and caches; for the operators also alibi_slopes. Everything else is in host memory: fields,
 * lengths, block tables, slots, pairs, biases, a graph's buffers, an impl's alibi_slopes. Calls that
 * compute or move data take a folio_run; only its stream is used (run NULL: the default stream). These
 * calls return when their work is queued. folio_run_wait on the context waits until the stream is idle
 * and returns its first error. All calls of one state use one stream. Wait for it before a call uses
 * another stream, and before you free memory that the work reads or writes.
 */
#ifndef FOLIO_FOLIO_VLLM06_H
#define FOLIO_FOLIO_VLLM06_H

#include <folio/folio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- */
/* The three backends */
/* ---------------------------------------------------------------------------------------------- */

/**
 * What the originals differ in; all else is one code. folio_vllm06_backend_find hands them out, and
 * calls take no others. Grows at its end.
 */
typedef struct folio_vllm06_backend {
    size_t struct_size;
    const char *name; /* get_name(); vLLM from 0.6.4 on says "XFORMERS" and the like */
    /* The classes in vLLM: the opening of this header says what takes their places. */
    const char *backend_cls, *impl_cls, *metadata_cls, *builder_cls;
    /* get_supported_head_sizes() and the block sizes: the originals' own lists. Folio accepts all sizes */
    /* that folio.h accepts. */
    const int32_t *supported_head_sizes, *supported_block_sizes;
    int32_t num_supported_head_sizes, num_supported_block_sizes;
    folio_layout layout;   /* of a cache: XPACKED, XPACKED_1 or HND */
    int32_t mixes;         /* 1: prefill_metadata and decode_metadata always make slices; 0: of a */
                           /* step of one kind they give the step itself                          */
    int32_t bare_prompts;  /* 1: with compat prompts have no slopes, window or biases, decodes no */
                           /* soft cap */
    int32_t prefix_scale;  /* 1: with compat, prompts ignore scale if the step has block tables */
} folio_vllm06_backend;

/** "xformers", "torch-sdpa", "ipex", or the spellings of some vLLM versions: "ipex-attn", "XFORMERS",
 * "TORCH_SDPA", "IPEX", or the classes "XFormersBackend", "TorchSDPABackend", "IpexAttnBackend".
 * "torch-sdpa-ipex" is torch-sdpa as it was with IPEX installed: it differs in the cache's layout and
 * in the head sizes it lists. NULL for any other name. */
FOLIO_API const folio_vllm06_backend *folio_vllm06_backend_find(const char *name);

/* ---------------------------------------------------------------------------------------------- */
/* Metadata */
/* ---------------------------------------------------------------------------------------------- */

/** An additive bias of one prompt: f32 [num_heads][query_len][key_len]; num_heads 1: one for all
 * heads. It lies in host memory, with a device too: the library copies it there. */
typedef struct folio_vllm06_bias {
    const float *data;
    int64_t num_heads, query_len, key_len;
} folio_vllm06_bias;

/**
 * A step's fields, with the names of vLLM 0.6's backends (called the originals below). Sequences:
 * num_prefills prompts (or chunks of them), then the decodes, one token each; num_seqs is their sum.
 * A step of self-attention needs num_prefills, num_decode_tokens, slot_mapping, seq_lens and, for
 * decodes, block_tables with its stride; prompts with a context need context_lens_tensor or
 * query_start_loc, and block_tables too. NULL: not given. Pass NULL also for a list or tensor that is
 * empty or too short, because the library cannot see how long an array is. The library computes
 * num_prefill_tokens if it is 0, and raises maxima that are too small. num_encoder_tokens is the
 * number of rows of key in cross attention: the encoder tokens of all prompts, or 0 if those are
 * cached already. Decodes have no new encoder tokens; in a step of decodes only, it is 0 or the sum of
 * their encoder_seq_lens, as in vLLM.
 *
 * make_metadata rejects
 *   - negative counts, lengths and strides; tables with rows and a stride of 0
 *   - prompts whose context and new tokens do not add up to seq_len, or whose new tokens together are
 *     not num_prefill_tokens
 *   - decodes that have more or fewer than one new token by query_start_loc, or a context below
 *     seq_len - 1
 *   - running sums that do not match the lengths; lengths that differ from their tensor
 *   - any other num_encoder_tokens
 *   - without chunked_prefill, rows of prefill_block_tables that differ from those of block_tables
 *   - is_prompt together with decodes
 * It compares no other fields. Maxima may be too large. forward checks slots and blocks.
 *
 * Except with chunked_prefill, seq_lens and seq_lens_tensor have the same values, and one of them is
 * enough for every attention type. Encoder and cross attention also need both encoder_seq_lens and
 * encoder_seq_lens_tensor. Calls that return one of these fields return NULL if it was not given.
 *
 * Several tokens may have the same slot, because prompts with a common prefix share blocks. The last
 * of these tokens is stored. In a graph's metadata a slot other than -1 occurs at most once.
 *
 * A decode's seq_len counts the keys that its block table holds. vLLM's model runner clips both to the
 * blocks of the sliding window and leaves context_lens_tensor as it is: so context_lens_tensor may be
 * larger than seq_len - 1.
 *
 * With use_cuda_graph, decodes at the end whose slot is -1 are padding, with seq_len 1 (as in vLLM)
 * or 0. vLLM leaves them out of query_start_loc and context_lens_tensor, so they are not read there.
 *
 * With chunked_prefill the arrays are split as torch-sdpa of 0.6.5 and later splits them: seq_lens and
 * query_start_loc are those of the prompts; block_tables has a row for each decode; seq_lens_tensor
 * has the decodes, or the prompts in a step without decodes.
 */
typedef struct folio_vllm06_metadata_fields {
    size_t struct_size;
    int64_t num_prefills;
    int64_t num_prefill_tokens;
    int64_t num_decode_tokens;          /* = decodes, padding included                            */
    const int64_t *slot_mapping;        /* [num_prefill_tokens + num_decode_tokens]; -1: not      */
                                        /* stored. NULL: only if key and value go to no cache     */
    const int32_t *seq_lens;            /* [num_seqs]; with chunked_prefill [num_prefills]        */
    const int32_t *seq_lens_tensor;     /* [num_seqs]; with chunked_prefill see above             */
    int64_t max_query_len;
    int64_t max_prefill_seq_len;
    int64_t max_decode_seq_len;
    const int32_t *query_start_loc;     /* [num_seqs + 1]; NULL: prompts bring seq_len -          */
                                        /* context_len tokens, decodes one                        */
    const int32_t *seq_start_loc;       /* [num_seqs + 1] running sum of seq_lens                 */
    const int32_t *context_lens_tensor; /* [num_seqs]; NULL: seq_len - query_len                  */
    const int32_t *block_tables;        /* [num_seqs][block_tables_stride]; NULL: none */
    int64_t block_tables_stride;
    int32_t use_cuda_graph; /* decodes padded to a fixed batch                                    */
    int32_t is_prompt;      /* set to 1 by the library if there are prompts and no decodes; 1     */
                            /* with decodes is rejected                                           */
    /* encoder and cross attention */
    const int32_t *encoder_seq_lens;        /* [num_seqs] */
    const int32_t *encoder_seq_lens_tensor; /* [num_seqs] */
    int64_t max_encoder_seq_len;
    int64_t num_encoder_tokens;
    const int64_t *cross_slot_mapping; /* [num_encoder_tokens]; not read where all are decodes */
    const int32_t *cross_block_tables; /* [num_seqs][cross_block_tables_stride] */
    int64_t cross_block_tables_stride;
    /* [num_prefills] each, copied; set_attn_bias changes them. NULL stays NULL: DECODER attention */
    /* then applies causality, window and ALiBi without a matrix, and the other types see all    */
    /* keys. ENCODER_ONLY uses attn_bias.                                                        */
    const folio_vllm06_bias *attn_bias;
    const folio_vllm06_bias *encoder_attn_bias;
    const folio_vllm06_bias *cross_attn_bias;
    int64_t max_decode_query_len;         /* 1 where there are decodes */
    const int32_t *encoder_seq_start_loc; /* [num_seqs + 1] running sum of encoder_seq_lens */
    /* Carried and never read; the view of the prompts has it, that of the decodes NULL. */
    const void *multi_modal_placeholder_index_maps;
    /* ipex */
    const int32_t *seqlen_q; /* [num_prefills + 1] running sum of the prompts' new tokens */
    int64_t max_seqlen;      /* longest prompt */
    /* torch-sdpa from 0.6.5 on */
    int64_t max_kv_len;          /* longest prompt */
    const int32_t *kv_start_loc; /* [num_prefills + 1] running sum of the prompts' seq_lens */
    /* [num_prefills][prefill_block_tables_stride]; NULL: block_tables has a row for prompts too */
    const int32_t *prefill_block_tables;
    int64_t prefill_block_tables_stride;
    int32_t chunked_prefill; /* 1: the arrays are split, see above */
} folio_vllm06_metadata_fields;

typedef struct folio_vllm06_metadata folio_vllm06_metadata;
typedef struct folio_vllm06_state folio_vllm06_state;

FOLIO_API folio_status folio_vllm06_make_metadata(folio_vllm06_state *state,
                                                  const folio_vllm06_backend *backend,
                                                  const folio_vllm06_metadata_fields *fields,
                                                  folio_vllm06_metadata **out);
FOLIO_API void folio_vllm06_metadata_destroy(folio_vllm06_metadata *metadata);

/** The fields, for reading; valid as long as the metadata. */
FOLIO_API const folio_vllm06_metadata_fields *folio_vllm06_metadata_get(
    const folio_vllm06_metadata *metadata);

/**
 * The view of the prompts, or of the decodes. NULL: there are none, or no memory for the view. The
 * metadata makes it once and owns it; a view's own view is itself. torch-sdpa and ipex: the
 * view of a step of one kind is the step itself.
 */
FOLIO_API const folio_vllm06_metadata *folio_vllm06_prefill_metadata(
    const folio_vllm06_metadata *metadata);
FOLIO_API const folio_vllm06_metadata *folio_vllm06_decode_metadata(
    const folio_vllm06_metadata *metadata);

/** 1 if encoder_seq_lens and encoder_seq_lens_tensor are set (the library computes
 * max_encoder_seq_len); else 0. */
FOLIO_API int folio_vllm06_is_all_encoder_attn_metadata_set(const folio_vllm06_metadata *metadata);
/** 1 if those, cross_slot_mapping and cross_block_tables are set; else 0. cross_slot_mapping may be
 * missing where no prompt has an encoder. cross_block_tables may be missing, with stride 0, where no
 * decode has one. */
FOLIO_API int folio_vllm06_is_all_cross_attn_metadata_set(const folio_vllm06_metadata *metadata);

/** Lengths of queries and of keys by attention type, owned by the metadata; ERR_ARGUMENT for an
 * unknown type. */
FOLIO_API folio_status folio_vllm06_get_seq_lens(const folio_vllm06_metadata *metadata,
                                                 folio_attention_type attn_type,
                                                 const int32_t **seq_lens_q,
                                                 const int32_t **seq_lens_kv);

typedef struct folio_vllm06_seq_len_block_table_args {
    const int32_t *seq_lens;
    int64_t max_seq_len;
    const int32_t *block_tables; /* NULL for the encoder types */
    int64_t block_tables_stride;
} folio_vllm06_seq_len_block_table_args;

/** Lengths, their maximum and block tables for an attention type. Lengths and tables are those of the
 * whole step; the maximum is that of its prompts (is_prompt) or of its decodes. With chunked_prefill
 * all three are those of the prompts (seq_lens, prefill_block_tables) or of the decodes; NULL if there
 * are none. */
FOLIO_API folio_status folio_vllm06_get_seq_len_block_table_args(
    const folio_vllm06_metadata *metadata, int is_prompt, folio_attention_type attn_type,
    folio_vllm06_seq_len_block_table_args *out);

/** The biases of a type, [num_prefills]; *out NULL where none are set. */
FOLIO_API folio_status folio_vllm06_get_attn_bias(const folio_vllm06_metadata *metadata,
                                                  folio_attention_type attn_type,
                                                  const folio_vllm06_bias **out);
/**
 * Set the biases of a type, [num_prefills]; they are copied. NULL removes them. In DECODER attention
 * of prompts they replace causality, window and ALiBi; the other types have none of these.
 */
FOLIO_API folio_status folio_vllm06_set_attn_bias(folio_vllm06_metadata *metadata,
                                                  folio_attention_type attn_type,
                                                  const folio_vllm06_bias *attn_bias);
/** Bias of one prompt: f32 [num_heads][seq_len][seq_len], causal, -slope * distance. */
FOLIO_API folio_status folio_vllm06_make_alibi_bias(const float *alibi_slopes, int64_t num_heads,
                                                    int64_t seq_len, float *out);
/** f32 [seq_len][seq_len]: 0 where seen, -inf where not; window_size 0: only causal. */
FOLIO_API folio_status folio_vllm06_make_sliding_window_bias(int64_t seq_len, int64_t window_size,
                                                             float *out);

/* ---------------------------------------------------------------------------------------------- */
/* KV cache of one layer, used in place */
/* ---------------------------------------------------------------------------------------------- */

/**
 * K and V of one layer, as an engine has them: one tensor (2, num_blocks, block_size * num_kv_heads *
 * head_size), K first; or two tensors of num_blocks * block_size * num_kv_heads * head_size numbers. How
 * numbers lie in a block is the backend's layout, or the operators' x. Every call that reads or writes
 * a cache rejects it if it needs more than `bytes`. (Forwards of encoder types do neither.)
 */
typedef struct folio_vllm06_kv_cache {
    void *key_cache;   /* aligned to its dtype */
    void *value_cache; /* NULL: V follows K in the same allocation */
    size_t bytes;      /* value_cache NULL: of K and V together; else of each */
    folio_dtype dtype;
    int32_t block_size, num_kv_heads, head_size;
    int64_t num_blocks;
} folio_vllm06_kv_cache;

/** key_cache [num_blocks][kv_heads][head_size / x][block_size][x], value_cache
 * [num_blocks][kv_heads][head_size][block_size]; of "torch-sdpa-ipex" both
 * [num_blocks][kv_heads][block_size][head_size]. */
typedef struct folio_vllm06_cache_view {
    void *data;
    int32_t num_dims;
    int64_t dims[5];
} folio_vllm06_cache_view;

/** (2, num_blocks, block_size * num_kv_heads * head_size). */
FOLIO_API folio_status folio_vllm06_get_kv_cache_shape(int64_t num_blocks, int64_t block_size,
                                                       int64_t num_kv_heads, int64_t head_size,
                                                       int64_t shape[3]);
FOLIO_API folio_status folio_vllm06_split_kv_cache(const folio_vllm06_backend *backend,
                                                   const folio_vllm06_kv_cache *kv_cache,
                                                   folio_vllm06_cache_view *key_cache,
                                                   folio_vllm06_cache_view *value_cache);

/* ---------------------------------------------------------------------------------------------- */
/* State and impl */
/* ---------------------------------------------------------------------------------------------- */

/** compute: "auto" (or NULL), "cpu", "cuda" or "reference". desc gives threads, allocator and device;
 * its backend field is ignored. NULL: all defaults. */
FOLIO_API folio_status folio_vllm06_state_create(const char *compute,
                                                 const folio_context_desc *desc,
                                                 folio_vllm06_state **out);
FOLIO_API void folio_vllm06_state_destroy(folio_vllm06_state *state);
/** The state's context. The state owns it: do not destroy it. */
FOLIO_API folio_context *folio_vllm06_state_context(folio_vllm06_state *state);

/** copy_blocks: within each of the caches, as stored. Rejects blocks outside the caches, a block
 * written twice, and a block both read and written. All caches have the same num_blocks; in all else
 * they may differ. */
FOLIO_API folio_status folio_vllm06_copy_blocks(folio_vllm06_state *state,
                                                const folio_vllm06_kv_cache *kv_caches,
                                                int64_t num_caches, const folio_block_pair *pairs,
                                                int64_t num_pairs, const folio_run *run);
/** swap_blocks: blocks of src into dst, as stored. One of the two may be host memory that the device
 * can access. Rejects blocks outside the caches and a block written twice; if src and dst are one
 * cache, also a block both read and written. Caches that share only a part of their memory are
 * rejected. */
FOLIO_API folio_status folio_vllm06_swap_blocks(folio_vllm06_state *state,
                                                const folio_vllm06_kv_cache *src,
                                                const folio_vllm06_kv_cache *dst,
                                                const folio_block_pair *pairs, int64_t num_pairs,
                                                const folio_run *run);

typedef struct folio_vllm06_impl folio_vllm06_impl;

/**
 * One layer. sliding_window and alibi_slopes act in DECODER attention only; the other types ignore
 * them. compat 1 computes DECODER attention as the originals did where Folio differs on purpose, for
 * engines that depend on it; docs/lineage.md in Folio's sources has the reasons:
 *   - decodes ignore sliding_window and see all seq_len keys, also those of a clipped block table;
 *   - prompts with alibi_slopes ignore sliding_window;
 *   - ipex: prompts ignore alibi_slopes, sliding_window and set biases; decodes ignore
 *     logits_soft_cap;
 *   - xformers: prompts ignore scale and use 1 / sqrt(head_size) if the step has block tables.
 */
typedef struct folio_vllm06_impl_desc {
    size_t struct_size;
    int32_t num_heads;
    int32_t head_size;
    float scale;         /* 0: 1 / sqrt(head_size) */
    int32_t num_kv_heads; /* 0: num_heads */
    const float *alibi_slopes; /* [num_heads], copied; DECODER only; NULL: none */
    int64_t sliding_window;    /* tokens, the row's own included; DECODER only; 0: none */
    const char *kv_cache_dtype; /* "auto" (or NULL): dtype; "fp8", "fp8_e4m3", "fp8_e5m2" */
    const void *blocksparse_params; /* must be NULL, as in the originals */
    float logits_soft_cap; /* 0: none */
    folio_dtype dtype;     /* of query, key, value and output */
    int32_t compat;        /* 0, or 1: as the originals, see above */
} folio_vllm06_impl_desc;

/** Rejects what no cache of the backend can hold: fp8 in packs of 16 (layout XPACKED) with a head_size
 * that is not a multiple of 16. */
FOLIO_API folio_status folio_vllm06_make_impl(folio_vllm06_state *state,
                                              const folio_vllm06_backend *backend,
                                              const folio_vllm06_impl_desc *desc,
                                              folio_vllm06_impl **out);
FOLIO_API void folio_vllm06_impl_destroy(folio_vllm06_impl *impl);

typedef struct folio_vllm06_forward_args {
    size_t struct_size;
    folio_tensor query;
    folio_tensor key, value; /* data NULL in cross attention of decodes */
    const folio_vllm06_kv_cache *kv_cache; /* NULL: profiling run */
    const folio_vllm06_metadata *attn_metadata;
    float k_scale, v_scale; /* 0: 1 */
    folio_attention_type attn_type;
    folio_tensor output;
} folio_vllm06_forward_args;

FOLIO_API folio_status folio_vllm06_forward(folio_vllm06_impl *impl,
                                            const folio_vllm06_forward_args *args,
                                            const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* Metadata builder */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_vllm06_builder folio_vllm06_builder;

/** One sequence of the step to come, prompts before decodes. */
typedef struct folio_vllm06_seq {
    size_t struct_size;
    int32_t is_prompt;
    int64_t token_len;   /* new tokens; decodes: 1 */
    int64_t context_len; /* tokens computed so far */
    const int32_t *block_table; /* from token 0 on, with a window too: the builder clips it */
    int64_t num_blocks;
    int64_t encoder_seq_len;
    int32_t encoder_is_new; /* non-zero: this step brings its encoder K and V. Must be equal for all */
                            /* prompts of a step */
    const int32_t *cross_block_table;
    int64_t num_cross_blocks;
} folio_vllm06_seq;

/**
 * How steps are built, as CommonMetadataBuilder and the model runner did. With sliding_window, only
 * the last sliding_window tokens of a whole prompt are stored; the others have slot -1. In a prompt
 * with context, tokens at positions below token_len - sliding_window have slot -1. A decode's seq_len
 * and block table are clipped to the blocks of its window, and its context_len is not. Without
 * chunked_prefill_enabled, the block table of a prompt that has no context is left out.
 */
typedef struct folio_vllm06_builder_desc {
    size_t struct_size;
    int64_t block_size;
    int64_t sliding_window;          /* 0: none */
    int64_t max_seq_len_to_capture;  /* for folio_vllm06_builder_pad; 0: no graphs */
    int32_t chunked_prefill_enabled;
} folio_vllm06_builder_desc;

FOLIO_API folio_status folio_vllm06_builder_create(folio_vllm06_state *state,
                                                   const folio_vllm06_backend *backend,
                                                   const folio_vllm06_builder_desc *desc,
                                                   folio_vllm06_builder **out);
FOLIO_API void folio_vllm06_builder_destroy(folio_vllm06_builder *builder);
FOLIO_API folio_status folio_vllm06_builder_add(folio_vllm06_builder *builder,
                                                const folio_vllm06_seq *seq);
/**
 * The step runs as a captured graph: the decodes that were added, then cuda_graph_pad_size decodes of
 * length 1 with slot -1. use_cuda_graph is set. Rows of block_tables have room for
 * max_seq_len_to_capture tokens, and zeros past a sequence's blocks. Rejected if a prompt was added.
 */
FOLIO_API folio_status folio_vllm06_builder_pad(folio_vllm06_builder *builder,
                                                int64_t cuda_graph_pad_size);
/** The metadata of the sequences added so far, without multi_modal_placeholder_index_maps and
 * encoder_seq_start_loc. num_encoder_tokens counts new encoders only. Afterwards the builder is empty. */
FOLIO_API folio_status folio_vllm06_builder_build(folio_vllm06_builder *builder,
                                                  folio_vllm06_metadata **out);

/* ---------------------------------------------------------------------------------------------- */
/* Graphs: CommonAttentionState's part in them */
/* ---------------------------------------------------------------------------------------------- */

/**
 * A graph runs a fixed number of decodes repeatedly. Its metadata's arrays are its input buffers,
 * in host memory. How an engine uses them:
 *
 *     graph_capture_begin, and for each batch size:
 *         graph_capture_get_metadata_for_batch     the graph's metadata, which lives as long as it
 *         get_graph_input_buffers                  where its arrays are
 *         forward of each layer, once              makes the plans; then wait for the stream
 *         forward of each layer, captured          on a device; on the host there is nothing to capture
 *     graph_capture_end; and for each step:
 *         prepare_graph_input_buffers              a step's arrays into the buffers
 *         begin_forward                            the buffers into the plans, in stream order
 *         replay the graph; on the host: forward of each layer
 *
 * Forwards with a graph's metadata store key and value by the buffers' slots as they are when
 * begin_forward is called. begin_forward, the captured forwards and the replays use one stream.
 */
typedef struct folio_vllm06_graph_capture_desc {
    size_t struct_size;
    const folio_vllm06_backend *attn_backend;
    int64_t max_batch_size;
    int64_t max_seq_len_to_capture; /* block tables have room for as many tokens */
    int64_t block_size;
} folio_vllm06_graph_capture_desc;

/** Begin to capture graphs; rejected if the state is capturing already. */
FOLIO_API folio_status folio_vllm06_graph_capture_begin(
    folio_vllm06_state *state, const folio_vllm06_graph_capture_desc *desc);
FOLIO_API folio_status folio_vllm06_graph_capture_end(folio_vllm06_state *state);
/** While capturing: another state over the same context, to keep with the graph of this batch size. */
FOLIO_API folio_status folio_vllm06_graph_clone(folio_vllm06_state *state, int64_t batch_size,
                                                folio_vllm06_state **out);
/**
 * While capturing: metadata of batch_size decodes of length 1 that store nothing, with block tables
 * of zeros. is_encoder_decoder_model: also with encoders of length 1 and cross block tables of ones.
 * Layers whose impls belong to states of the same context accept it.
 */
FOLIO_API folio_status folio_vllm06_graph_capture_get_metadata_for_batch(
    folio_vllm06_state *state, int64_t batch_size, int is_encoder_decoder_model,
    folio_vllm06_metadata **out);

/** The arrays of a graph's metadata, for writing; valid as long as the metadata. */
typedef struct folio_vllm06_graph_input_buffers {
    size_t struct_size;
    int64_t batch_size;
    int64_t *slot_mapping;    /* [batch_size] */
    int32_t *seq_lens_tensor; /* [batch_size] */
    int32_t *block_tables;    /* [batch_size][block_tables_stride] */
    int64_t block_tables_stride;
    /* is_encoder_decoder_model; else NULL */
    int32_t *encoder_seq_lens_tensor; /* [batch_size] */
    int64_t *cross_slot_mapping;      /* empty */
    int32_t *cross_block_tables;      /* [batch_size][cross_block_tables_stride] */
    int64_t cross_block_tables_stride;
} folio_vllm06_graph_input_buffers;

FOLIO_API folio_status folio_vllm06_get_graph_input_buffers(
    folio_vllm06_state *state, folio_vllm06_metadata *attn_metadata, int is_encoder_decoder_model,
    folio_vllm06_graph_input_buffers *out);
/** Copies a step's decodes (as many as the graph has) into the buffers: lengths, block tables and
 * slots. Shorter rows of block tables are filled up with zeros. */
FOLIO_API folio_status folio_vllm06_prepare_graph_input_buffers(
    folio_vllm06_state *state, const folio_vllm06_graph_input_buffers *input_buffers,
    const folio_vllm06_metadata *attn_metadata, int is_encoder_decoder_model);
/** Call it before the layers of a step. For a graph's metadata, it updates the plans from the buffers,
 * with the checks of folio_plan_update. It also rejects two decodes with the same slot, except -1.
 * After an error do not replay the graph. For other metadata it does nothing. */
FOLIO_API folio_status folio_vllm06_begin_forward(folio_vllm06_state *state,
                                                  const folio_vllm06_metadata *attn_metadata,
                                                  const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* The plain operators, over raw pointers in the x-packed layout */
/* ---------------------------------------------------------------------------------------------- */

/** Rows for a cache whose keys are [num_blocks][kv_heads][head_size / x][block_size][x]. */
typedef struct folio_vllm06_reshape_and_cache_args {
    size_t struct_size;
    const void *key, *value; /* [num_tokens][kv_heads][head_size] */
    folio_dtype dtype;       /* of key and value */
    int32_t x;               /* 16 / bytes of one stored number (0), or 1 */
    int64_t num_tokens;
    int64_t key_stride, value_stride; /* elements from token to token; 0: dense */
    const int64_t *slot_mapping; /* [num_tokens]; -1 stores nothing; of several tokens with one slot, */
                                 /* the last is stored */
    float k_scale, v_scale;      /* 0: 1 */
} folio_vllm06_reshape_and_cache_args;

FOLIO_API folio_status folio_vllm06_reshape_and_cache(
    folio_vllm06_state *state, const folio_vllm06_reshape_and_cache_args *args,
    const folio_vllm06_kv_cache *cache, const folio_run *run);

typedef struct folio_vllm06_paged_attention_args {
    size_t struct_size;
    void *out;         /* [num_seqs][num_heads][head_size] */
    const void *query; /* [num_seqs][num_heads][head_size], see query_stride */
    folio_dtype dtype;
    int32_t num_heads;
    int64_t num_seqs;
    float scale;                 /* 0: 1 / sqrt(head_size) */
    const int32_t *block_tables; /* [num_seqs][max_num_blocks_per_seq] */
    int64_t max_num_blocks_per_seq;
    const int32_t *seq_lens; /* [num_seqs]; 0: padding, out is zeros */
    int64_t max_seq_len;
    const float *alibi_slopes; /* NULL: none */
    int64_t query_stride; /* elements from one sequence's query to the next; 0: dense */
    float k_scale, v_scale; /* 0: 1 */
    int32_t x;              /* of the cache: 16 / bytes of one number (0), or 1 */
} folio_vllm06_paged_attention_args;

/** One token per sequence over its paged K and V, in one pass. The state keeps a plan for
 * each geometry, and updates it where lengths, tables or stream are not those of the call before. */
FOLIO_API folio_status folio_vllm06_paged_attention_v1(
    folio_vllm06_state *state, const folio_vllm06_paged_attention_args *args,
    const folio_vllm06_kv_cache *cache, const folio_run *run);

#define FOLIO_VLLM06_PARTITION_SIZE 512

/** The same. The original cut keys in partitions of this size, whose results it kept in exp_sums,
 * max_logits and tmp_out. A plan cuts keys by itself: the three are not used, and may be NULL. */
FOLIO_API folio_status folio_vllm06_paged_attention_v2(
    folio_vllm06_state *state, const folio_vllm06_paged_attention_args *args,
    const folio_vllm06_kv_cache *cache, float *exp_sums, float *max_logits, void *tmp_out,
    const folio_run *run);

#ifdef __cplusplus
}
#endif

#endif /* FOLIO_FOLIO_VLLM06_H */
