/*
 * cuda_attend.h: the arguments of every attention kernel on the device: one layer by value, and the step (cuda_step.h),
 * which is made once and read by every layer.
 */
#ifndef FOLIOI_CUDA_ATTEND_H
#define FOLIOI_CUDA_ATTEND_H

#include "backends/cuda/step/cuda_step.h"
#include "cache/kv_layout.h"

#include <cuda_runtime_api.h>

/** Kernels whose attributes a context has set: setting them takes longer than a launch. Filled by any thread. */
typedef struct folioi_cuda_prepared folioi_cuda_prepared;

/** Multiprocessors of a device, and the shared memory of one and of one block. */
typedef struct folioi_cuda_sm {
    int32_t count, shared_bytes, shared_of_block;
    int16_t capability; /* 90 is 9.0 */
    int16_t overlaps;   /* kernels may begin before those ahead of them have ended: see launch.h */
    folioi_cuda_prepared *ready;
    void *describe_tensor; /* the driver's cuTensorMapEncodeTiled; NULL: it has none */
} folioi_cuda_sm;

/** Rows of numbers: element (row, h, d) at row * token + h * head + d. */
typedef struct folioi_cuda_rows {
    void *data;
    int64_t token, head;
} folioi_cuda_rows;

/** K or V of a layer in the cache. */
typedef struct folioi_cuda_side {
    const char *base;
    const float *scales; /* int8 only */
    folioi_address at, scales_at;
    float scale;              /* fp8: stored numbers are multiplied with it; else 1 */
    const float *head_scales; /* fp8: [num_kv_heads] in place of it, which is then 1; or NULL */
} folioi_cuda_side;

/** What stored numbers of a kv head are multiplied with, where their scales are not the cache's. */
SHARED_INLINE float folioi_cuda_scale(const folioi_cuda_side *side, int32_t kv_head)
{
    return head_scale(side->head_scales, side->scale, kv_head);
}

/** Are the numbers of one token and head neighbours? Prefill and decode kernels read these, and pages. */
static inline bool folioi_cuda_has_rows(const folioi_cuda_side *side)
{
    return side->at.token_tile == 1 && side->at.dim_tile == 1 && side->at.dim_tile_stride == 1;
}

/** Does it lie in native pages (kv_layout.c)? */
static inline bool folioi_cuda_has_pages(const folioi_cuda_side *side)
{
    return side->at.swizzle != 0;
}

/** Do all rows begin at multiples of `bytes`? size: of a number; both are powers of two. */
static inline bool folioi_cuda_rows_aligned(const folioi_cuda_rows *rows, int64_t size,
                                            int64_t bytes)
{
    return ((int64_t)(intptr_t)rows->data | (rows->token | rows->head) * size) % bytes == 0;
}

static inline bool folioi_cuda_side_aligned(const folioi_cuda_side *side, int64_t size,
                                            int64_t bytes)
{
    const folioi_address *at = &side->at;
    int64_t strides = at->block | at->head | at->token_tile_stride | at->token_stride;
    return ((int64_t)(intptr_t)side->base | strides * size) % bytes == 0;
}

/** Numbers in 16 bytes: a pack of x-packed K. */
static inline int32_t folioi_cuda_pack(folio_dtype dtype)
{
    return dtype_is_16_bit(dtype) ? 8 : 16;
}

/** Does it lie by dims, [dim][token]: V of x-packed caches, and K of those with x = 1? */
static inline bool folioi_cuda_by_dims(const folioi_cuda_side *side)
{
    const folioi_address *at = &side->at;
    return at->swizzle == 0 && at->token_tile == 1 && at->dim_tile == 1 &&
           at->token_tile_stride == 1 && at->dim_tile_stride > 1;
}

/** One layer. */
typedef struct folioi_cuda_layer {
    folio_dtype dtype, kv_dtype;          /* of q and out; of the cache */
    folio_dtype new_k_dtype, new_v_dtype; /* 0: there are no new rows   */
    int32_t num_heads, num_kv_heads, k_dims, v_dims;
    float scale, soft_cap;             /* soft_cap 0: none            */
    int64_t window_left, window_right; /* -1: none                    */
    folioi_cuda_rows q, out, new_k, new_v;
    int64_t q_rows;
    float *lse; /* NULL: not asked */
    int64_t lse_token, lse_head;
    const float *slopes, *sinks; /* [num_heads] or NULL */
    folio_bias bias;             /* strides of broadcast dims are 0 */
    int32_t v_in_k;              /* V is the first numbers of K; v is a view of k */
    int32_t cached; /* keys come from the cache: all, or with append those of the context; the */
    int32_t append; /* others are rows of new_k and new_v */
    int32_t block_size;
    folioi_cuda_side k, v;
    folioi_cuda_rotations
        rotations;      /* of q and of new_k, as they are read: the generic kernel alone does it */
    int64_t num_blocks; /* of the cache; 0 in a plan's prototype */
} folioi_cuda_layer;

/** How K and V lie in the cache, of those ways that prefill and decode kernels read. */
typedef enum folioi_cuda_form {
    FOLIOI_FORM_OTHER,
    FOLIOI_FORM_ROWS,      /* the numbers of a token and head are neighbours   */
    FOLIOI_FORM_PAGES,     /* native pages                                     */
    FOLIOI_FORM_XPACKED,   /* K in packs of 16 bytes, V by dims                */
    FOLIOI_FORM_XPACKED_1, /* K and V by dims                                  */
} folioi_cuda_form;

/** X-packed ones are taken in units of 8 tokens of a dim, or of a pack, which have to be aligned. */
static inline folioi_cuda_form folioi_cuda_form_of(const folioi_cuda_layer *l)
{
    const folioi_cuda_side *k = &l->k, *v = &l->v;
    int32_t pack = folioi_cuda_pack(l->kv_dtype), size = 16 / pack;
    if (folioi_cuda_has_pages(k)) return FOLIOI_FORM_PAGES;
    if (folioi_cuda_has_rows(k) && folioi_cuda_has_rows(v)) return FOLIOI_FORM_ROWS;
    int64_t starts = (int64_t)(intptr_t)k->base | (int64_t)(intptr_t)v->base |
                     (k->at.block | k->at.head | v->at.block | v->at.head) * size;
    if (l->kv_dtype == FOLIO_F32 || starts % 16 != 0 || l->block_size % 8 != 0 ||
        !folioi_cuda_by_dims(v) || v->at.dim_tile_stride != l->block_size)
        return FOLIOI_FORM_OTHER;
    if (folioi_cuda_by_dims(k) && k->at.dim_tile_stride == l->block_size)
        return FOLIOI_FORM_XPACKED_1;
    return k->at.token_tile == 1 && k->at.dim_tile == pack && k->at.dim_stride == 1 &&
                   k->at.token_tile_stride == pack &&
                   k->at.dim_tile_stride == (int64_t)pack * l->block_size
               ? FOLIOI_FORM_XPACKED
               : FOLIOI_FORM_OTHER;
}

static inline bool folioi_cuda_is_xpacked(const folioi_cuda_layer *l)
{
    return l->cached && folioi_cuda_form_of(l) >= FOLIOI_FORM_XPACKED;
}

/** Are new rows that are read of q's type? Prefill and decode kernels read no others. */
static inline bool folioi_cuda_new_rows_fit(const folioi_cuda_layer *l)
{
    if (l->cached && !l->append) return true; /* keys are read from the cache alone */
    return (l->new_k_dtype == 0 || l->new_k_dtype == l->dtype) &&
           (l->new_v_dtype == 0 || l->new_v_dtype == l->dtype);
}

/** One layer's launch: what every kernel is given. */
typedef struct folioi_cuda_run {
    const folioi_cuda_layer *layer;
    const folioi_cuda_step *step;
    char *workspace;
    int32_t *counters; /* zeros, in the workspace or elsewhere; the launch leaves zeros */
    cudaStream_t stream;
} folioi_cuda_run;

/**
 * For whom a line of a kernel list is: decode_instances.def, prefill_instances.def, hopper_instances.def. Its kernels come
 * behind it, in a struct of the family.
 */
typedef struct folioi_cuda_line {
    const char *name;       /* NULL: past the last line                     */
    folio_dtype dtype, kv;  /* of q, 0: F16 or BF16; of K and V, 0: any     */
    int32_t k_dims, v_dims; /* head sizes; flexible: the largest            */
    int32_t is_flexible;    /* takes every option, stride and alignment     */
    /* Can it compute this layer? rows: most of a sequence, with decode. */
    bool (*matches)(const struct folioi_cuda_line *line, const folioi_cuda_layer *layer,
                    const folioi_cuda_sm *sm, int32_t rows);
    int32_t v_in_k; /* for layers with v_in_k, and no others */
} folioi_cuda_line;

static inline bool folioi_cuda_line_matches(const folioi_cuda_line *line,
                                            const folioi_cuda_layer *layer,
                                            const folioi_cuda_sm *sm, int32_t rows)
{
    return line->v_in_k == layer->v_in_k && line->matches(line, layer, sm, rows);
}

/** A plan's limits for one attention as one type; equal ones share their lists. Compared as bytes. */
typedef struct folioi_cuda_limits {
    /* a layer as the plan knows it: aligned, and with no option on scores */
    folioi_cuda_layer prototype;
    int64_t max_query_tokens, max_seqs, max_query_len, max_seq_len;
    folioi_cuda_sm sm;
    int32_t batch_invariant;       /* cut keys at fixed positions */
    int32_t decode_rows;           /* as folioi_prefill_shape has it; decode needs it */
    int32_t cluster, cluster_seqs; /* as folioi_decode_rule has them: folioi_cuda_decode_clusters */
} folioi_cuda_limits;

/** Lines of one family that take an attention, in the list's order; the last is flexible. NULL: no more. */
enum { FOLIOI_CUDA_MOST_LINES = 4 };
typedef struct folioi_cuda_choice {
    const folioi_cuda_line *lines[FOLIOI_CUDA_MOST_LINES];
} folioi_cuda_choice;

/** The first of them that takes a layer; NULL: none does. */
static inline const folioi_cuda_line *folioi_cuda_pick(const folioi_cuda_choice *choice,
                                                       const folioi_cuda_layer *layer,
                                                       const folioi_cuda_sm *sm, int32_t rows)
{
    for (int i = 0; i < FOLIOI_CUDA_MOST_LINES && choice->lines[i] != NULL; i++)
        if (folioi_cuda_line_matches(choice->lines[i], layer, sm, rows)) return choice->lines[i];
    return NULL;
}

/** The choice for layers like this one, from a family's lines by number. Its last place is for a flexible line. */
static inline folioi_cuda_choice folioi_cuda_choose(const folioi_cuda_line *(*family)(int32_t n),
                                                    const folioi_cuda_layer *prototype,
                                                    const folioi_cuda_sm *sm, int32_t rows)
{
    folioi_cuda_choice choice = {{NULL}};
    const folioi_cuda_line *line;
    int count = 0;
    for (int32_t n = 0; (line = family(n)) != NULL; n++) {
        if (!folioi_cuda_line_matches(line, prototype, sm, rows)) continue;
        if (!line->is_flexible && count == FOLIOI_CUDA_MOST_LINES - 1) continue;
        choice.lines[count++] = line;
        if (line->is_flexible) break;
    }
    return choice;
}

#if defined(__cplusplus)
extern "C" {
#endif

/** Once for each kernel: it may take shared_bytes of dynamic shared memory. prefer_shared: and as little L1 as can be. */
cudaError_t folioi_cuda_prepare(folioi_cuda_prepared *ready, const void *kernel, int shared_bytes,
                                bool prefer_shared);

/** Any type, layout and option, in double precision: the device's own measure of right. only_padding: zeros to rows of
 * out that no sequence has, and nothing else. */
cudaError_t folioi_cuda_generic(const folioi_cuda_run *run, bool only_padding);

#if defined(__cplusplus)
}
#endif

#endif
