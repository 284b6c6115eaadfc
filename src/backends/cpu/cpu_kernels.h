/*
 * cpu_kernels.h: the function table of the cpu backend. The scalar level fills every slot, higher levels
 * override what they do better, so no slot is ever NULL. Kernels take rows and keys already resolved;
 * cpu_forward.c shares the work out and joins it.
 *
 * All levels: keys are taken in tiles of FOLIOI_TILE_KEYS from absolute multiples of it, splits are
 * multiples of FOLIOI_SPLIT_LEN keys, and a row's bits depend on its own q, position and keys only.
 */
#ifndef FOLIOI_CPU_KERNELS_H
#define FOLIOI_CPU_KERNELS_H

#include "backends/state.h"
#include "plan/call.h"
#include "plan/row_ranges.h"

#include <float.h>

#define FOLIOI_TILE_ROWS                                                                           \
    288 /* rows of one work item, where the head group leaves room for more than one query */
#define FOLIOI_TILE_KEYS 128
#define FOLIOI_STRIP_ROWS 96 /* rows that a kernel takes through a tile together */
#define FOLIOI_SPLIT_LEN 512

/** Where a kv head's keys are: the first stored_len in the cache, the others in this step's k and v. */
typedef struct folioi_keys {
    folioi_kv_side k, v;
    const int32_t *blocks;
    int32_t block_size, kv_head;
    int32_t stored_len;
    float k_scale, v_scale; /* fp8 */
    folio_tensor new_k, new_v;
    int64_t new_row; /* row of key stored_len */
    bool v_in_k;     /* V is the first numbers of K: v and new_v are views of k and new_k */
    folioi_rotate_fn *rotate; /* of rows of new_k, as they are read; NULL: they stay as they are */
    folioi_rotation rotation;
    const int64_t *positions; /* [rows] of them; NULL: from first_position on, new_row's */
    int64_t first_position;
} folioi_keys;

/** One row of new_k, rotated, to `to` in its own type. */
static inline void rotate_new_row(const folioi_keys *keys, int64_t row, int32_t dims, void *to)
{
    const folio_tensor *t = &keys->new_k;
    int64_t at = row * t->token_stride + keys->kv_head * t->head_stride;
    int64_t position =
        keys->positions != NULL ? keys->positions[row] : keys->first_position + row - keys->new_row;
    keys->rotate(to, (const char *)t->data + at * (int64_t)folio_dtype_size(t->dtype), t->dtype,
                 dims, &keys->rotation, position);
}

/** Stored keys [key, end) of a sequence that will be read soon: worth fetching ahead. */
typedef struct folioi_prefetch {
    const int32_t *blocks;
    int32_t kv_head;
    int32_t key, end;
} folioi_prefetch;

/** A soft cap; 0: none. */
typedef struct folioi_soft_cap {
    float cap, limit, edge; /* scores beyond `limit` are as good as it, beyond `edge` large */
    float rate, rest;       /* -2 / (cap ln 2), and what its rounding left                  */
} folioi_soft_cap;

static inline folioi_soft_cap folioi_soft_cap_of(float cap)
{
    if (cap <= 0) return (folioi_soft_cap){0};
    if (cap < 1e-37f) cap = 1e-37f; /* no weight tells the difference */
    double rate = -2.8853900817779268 / (double)cap;
    return (folioi_soft_cap){.cap = cap,
                             .limit = cap < 5e36f ? 60.0f * cap : FLT_MAX,
                             .edge = 0.55f * cap,
                             .rate = (float)rate,
                             .rest = (float)(rate - (double)(float)rate)};
}

/** Rows of (query x head of a head group) against keys [begin, end) of one split. */
typedef struct folioi_attend_args {
    int32_t rows, k_dims, v_dims;
    const float *q;           /* as the kernel's load_queries made it                       */
    const folioi_range *seen; /* [rows] keys each row sees                                  */
    const int64_t *own;       /* [rows] key at the row's own position, for ALiBi            */
    const float *slopes;      /* [rows], or NULL                                            */
    const void *bias;         /* NULL: none                                                 */
    folio_dtype bias_dtype;
    const int64_t *bias_at; /* [rows] element of key 0                                      */
    int64_t bias_key_stride;
    float scale;
    folioi_soft_cap soft_cap;
    folioi_keys keys;
    int32_t begin, end;
    folioi_prefetch
        prefetch[2];         /* the item's own keys, from any to the last; then the next item's */
    bool deep_l1;            /* as in folioi_cpu_kernels                                    */
    folioi_state_rows state; /* written, not read                                           */
    float *k_tile;           /* scratch [k_dims][FOLIOI_TILE_KEYS]                          */
    float *v_tile;           /* scratch [FOLIOI_TILE_KEYS][out stride]                      */
    float *v_panels;         /* the same size                                               */
    float *scores;           /* scratch [FOLIOI_STRIP_ROWS][FOLIOI_TILE_KEYS]               */
    float *wide;             /* scratch [16][k_dims + out stride]                           */
} folioi_attend_args;

typedef void folioi_attend_fn(const folioi_attend_args *args);

enum folioi_attend_instance {
#define X(name, kv, bf16_queries) ATTEND_##name,
#include "backends/cpu/attend_instances.def"
#undef X
    FOLIOI_NUM_ATTEND
};

typedef struct folioi_attend_kernel {
    folioi_attend_fn *run;
    const char *name; /* attend_<kv>_<level> */
    /* Rows of q, row r from element from[r] on, in the order the kernel wants. */
    void (*load_queries)(float *to, const void *q, folio_dtype type, const int64_t *from,
                         int32_t rows, int32_t dims);
    bool pairs; /* that order has two bf16 numbers in a float */
} folioi_attend_kernel;

typedef struct folioi_cpu_kernels {
    const char *level; /* that filled it last */
    bool deep_l1;      /* L1 can wait for as many lines as it takes to read at memory's rate */
    folioi_attend_kernel attend[FOLIOI_NUM_ATTEND];
    /* Stores a share of k and v in its slots, with the bits of folioi_kv_write_rows. */
    void (*write)(const folioi_kv_layer *layer, const folioi_kv_tensors *t, const int64_t *slots,
                  const folioi_kv_share *share);
    folioi_rotate_fn *rotate; /* with the bits of folioi_rotate_row */
    /* A row of out: x * factor, rounded to its type. */
    void (*store_row)(void *out, folio_dtype type, int64_t index, const float *x, float factor,
                      int32_t dims);
    /* 2^x, and scores under a soft cap, in place, as the attend kernels compute them: for tests of their error. */
    void (*exp2)(float *x, int64_t n);
    void (*soft_cap)(float *x, int64_t n, const folioi_soft_cap *cap);
} folioi_cpu_kernels;

/** The kernel for an attention's types. pairs: one that rounds every key to bf16 will do. */
enum folioi_attend_instance folioi_attend_choose(const folio_attention_desc *a, bool pairs);

/** Kernel `index` of a context's table, and a case for it; false: past the last. */
bool folioi_cpu_get_kernel(const folio_context *ctx, int32_t index, folio_context_kernel *info);

/** The table of the named level, or of the best this machine has for NULL; NULL: not here. */
const folioi_cpu_kernels *folioi_cpu_table(const char *cap);
extern const char *const folioi_cpu_level_names[]; /* lowest first, NULL at the end */

/**
 * The levels built for this architecture, lowest first. A level's file defines folioi_cpu_has_<level>,
 * whether this machine can run it, and folioi_cpu_fill_<level>, which overrides its slots; and
 * folioi_cpu_wants_<level>: is it worth running here, unless somebody asks for it by name?
 */
#if defined(__x86_64__)
#define FOLIOI_CPU_LEVELS(X) X(scalar) X(avx2) X(avx512) X(avx512_bf16) X(amx)
#elif defined(__aarch64__)
#define FOLIOI_CPU_LEVELS(X) X(scalar) X(neon)
#else
#define FOLIOI_CPU_LEVELS(X) X(scalar)
#endif

#define X(level)                                                                                   \
    bool folioi_cpu_has_##level(void);                                                             \
    bool folioi_cpu_wants_##level(void);                                                           \
    void folioi_cpu_fill_##level(folioi_cpu_kernels *table);
FOLIOI_CPU_LEVELS(X)
#undef X

#endif
