/*
 * Folio: paged attention for C.
 *
 * This header is the manual. A step of inference goes one way:
 *
 *     batch  ->  plan  ->  for each layer: folio_attention_forward  ->  out
 *
 * folio_attention_forward writes k and v to the cache, attends, and merges partial results.
 * folio_attend does all of this for one layer in one call.
 *
 *     folio_context   a backend on a device, with its threads and its allocator
 *     folio_attention one layer geometry: heads, head sizes, scale, window, soft cap
 *     folio_kv_cache  K and V of all layers in fixed-size blocks, in the library's memory or yours
 *     folio_batch     one step's sequences: lengths and block tables
 *     folio_plan      schedule and workspace: created once, updated with each step's batch, used by
 *                     every layer
 *     folio_rotary    cosines and sines of a rotary embedding, for layers that have one
 *
 * Words. A layer is numbered within its cache, from 0 on. A block holds `block_size` consecutive
 * tokens of a sequence, in every layer of the cache. A slot is the place of one token in a cache:
 * `block * block_size + offset`. Slot -1 means that the token is not stored. A sequence brings
 * `query_len` new tokens this step, has `context_len` tokens cached already, and `seq_len` is their
 * sum. Padding has rows, but sees no key and stores nothing; in arrays of lengths, seq_len 0 marks it.
 * A head group is the query heads that share one kv head.
 *
 * Errors. A call that can fail returns a folio_status and hands results out through pointers. When
 * the status is not FOLIO_OK, folio_last_error() says in one sentence which index, which value and
 * which limit. The library never prints, exits or aborts. A call that is rejected because of its
 * arguments has written nothing, with one exception: folio_batch_set leaves the batch empty.
 *
 * Structs. A struct that a call takes by pointer begins with `struct_size`. Make it with
 * FOLIO_INIT(type), which sets every other field to zero. Zero means the default, where a field has
 * one. A struct that a call fills needs its struct_size too. Such structs only grow, at their end. A
 * client compiled against an older header has a shorter struct: the library treats the missing fields
 * as zero, and does not write them. It rejects struct_size 0, struct_size above 4096, and a longer
 * struct whose unknown tail is not all zero. A struct that is embedded in another, or stands in an
 * array, has no struct_size and never changes, because its size is part of the layout around it:
 * folio_allocator, folio_executor, folio_tensor, folio_bias, folio_kv_array, folio_kv_strides,
 * folio_block_pair, folio_table, folio_state, folio_feature, folio_layer_group.
 *
 * Names. folio_<noun>_<verb>. folio_<noun>_get_<what> fills the caller's struct folio_<noun>_<what>,
 * or writes through its last arguments. Exceptions: folio_attend; what returns its answer, such as
 * folio_version, folio_last_error, folio_dtype_size, folio_backend_count and folio_<enum>_name; and
 * folio_vllm06.h, whose names are vLLM's. A create that fails sets its out pointer to NULL, and so does
 * a call that hands out a transfer. From version 0.4 on, names do not change.
 *
 * Threads. folio_last_error is per thread.
 *   - Contexts, attentions, rotaries and queries (folio_backend_*, folio_kv_cache_get_shape): any
 *     number of threads at once. So a caller's allocator may be called by several threads at once.
 *   - A batch: one thread at a time, also in folio_batch_get_view. Once it is filled, any number of
 *     threads may run plans updated with it and read folio_batch_get_info. A view does not make a
 *     plan out of date.
 *   - A plan: one thread updates it; then any number run it at once, each with its own workspace.
 *     The plan's own workspace serves one of them at a time; a second one is rejected.
 *   - A KV cache: any number of threads read it. A call that writes slots must not overlap with
 *     another call that reads or writes the same slots.
 *   - pthread_cancel: a thread that is cancelled in a call ends after it, except in an allocator or
 *     an executor of the caller. Do not make it asynchronous (PTHREAD_CANCEL_ASYNCHRONOUS).
 *
 * fork(). A child process has its parent's objects, but not its threads. In the child, calls work
 * and run on the calling thread only. For more threads, open a new context there. If another
 * thread was inside a call at the fork, what that call was writing is incomplete. Update the plan
 * that it was running before you use that plan again. The child may destroy the parent's objects,
 * but need not. Do not fork inside a task of parallel_for or inside an allocator and then return
 * into the library. Do not use a pool with tiers (folio_pool.h) in the child: its mover thread is
 * not there.
 *
 * Lifetimes. Objects may be destroyed in any order: an object keeps alive what it needs. A context
 * lives as long as anything made from it, an attention as long as a plan lists it, a batch as long
 * as it is the last one a plan was updated with. A rotary must live until the calls that use it have
 * returned. Destroy each object once, and do not use it afterwards. Every destroy accepts NULL. What you
 * lend to the library must outlive its last user: the memory of a wrapped cache must outlive the cache
 * and its pools; an allocator, an executor and their `user` pointers must outlive every object of the
 * context. Memory from folio_memory_create is not an object: give it back before you destroy the
 * context.
 *
 * folio_pool.h manages the blocks of a cache.
 */
#ifndef FOLIO_FOLIO_H
#define FOLIO_FOLIO_H

#include <stddef.h>
#include <stdint.h>

/* FOLIO_STATIC: for compilers that need to know that the library is linked statically. */
#if defined(FOLIO_STATIC)
#define FOLIO_API
#elif defined(_WIN32)
#define FOLIO_API __declspec(dllimport)
#elif defined(__GNUC__)
#define FOLIO_API __attribute__((visibility("default")))
#else
#define FOLIO_API
#endif

/**
 * A struct with its struct_size set and everything else zero: folio_run run = FOLIO_INIT(folio_run);
 * FOLIO_WITH also sets fields: folio_run run = FOLIO_WITH(folio_run, .stream = stream);
 *
 *   C           &FOLIO_WITH(...) may be an argument. Neither macro is a constant in strict C11: write
 *               static folio_run run = {.struct_size = sizeof(folio_run)};
 *   C++20       FOLIO_WITH takes fields in the struct's order; its address cannot be taken. g++ -Wextra
 *               needs -Wno-missing-field-initializers.
 *   C++14, 17   FOLIO_INIT, then assign the fields. From C++14 on FOLIO_INIT is a constant.
 */
#ifdef __cplusplus
template <class Struct> constexpr Struct folio_init_struct()
{
    Struct s{};
    s.struct_size = sizeof(Struct);
    return s;
}
#define FOLIO_INIT(type) folio_init_struct<type>()
#if defined(__cpp_designated_initializers)
#define FOLIO_WITH(type, ...) (type{.struct_size = sizeof(type), __VA_ARGS__})
#else
template <class Struct> Struct folio_with_struct()
{
    static_assert(sizeof(Struct) == 0, "FOLIO_WITH needs C++20: use FOLIO_INIT, then assign");
    return Struct{};
}
#define FOLIO_WITH(type, ...) folio_with_struct<type>()
#endif
#else
#define FOLIO_INIT(type) ((type){.struct_size = sizeof(type)})
#define FOLIO_WITH(type, ...) ((type){.struct_size = sizeof(type), __VA_ARGS__})
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- */
/* Version, status, error text                                                                     */
/* ---------------------------------------------------------------------------------------------- */

#define FOLIO_VERSION_MAJOR 0
#define FOLIO_VERSION_MINOR 4
#define FOLIO_VERSION_PATCH 0
#define FOLIO_VERSION_STRING "0.4.0"

/** The version of the library at run time, as "major.minor.patch". */
FOLIO_API const char *folio_version(void);

/* name, fixed value, text */
#define FOLIO_STATUS_MAP(X)                                                                        \
    X(OK, 0, "no error")                                                                           \
    X(ERR_ARGUMENT, 1, "an argument is invalid; nothing was written")                              \
    X(ERR_UNSUPPORTED, 2, "the request is valid, but no eligible backend supports it")             \
    X(ERR_MEMORY, 3, "the allocator returned no memory")                                           \
    X(ERR_DEVICE, 4, "the device reported an error")                                               \
    X(ERR_FULL, 5, "too few blocks are available; nothing changed")                                \
    X(ERR_IO, 6, "a file could not be read or written")                                            \
    X(ERR_INTERNAL, 7, "an invariant is broken: a bug, or memory was overwritten")                 \
    X(ERR_TOO_LARGE, 8, "the request would not fit into an empty pool or tier; nothing changed")

typedef enum folio_status {
#define FOLIO_STATUS_ENTRY_(name, value, text) FOLIO_##name = value,
    FOLIO_STATUS_MAP(FOLIO_STATUS_ENTRY_)
#undef FOLIO_STATUS_ENTRY_
} folio_status;

/** The name of a status, such as "FOLIO_ERR_ARGUMENT"; "FOLIO_UNKNOWN" for any other number. */
FOLIO_API const char *folio_status_name(folio_status status);

/** What a status means, in a few words; never NULL. */
FOLIO_API const char *folio_status_text(folio_status status);

/**
 * One sentence about the calling thread's last call that failed: index, value, limit. Never NULL;
 * "" before any failure. A call that succeeds leaves it as it was. Valid until the thread's next
 * failure.
 */
FOLIO_API const char *folio_last_error(void);

/* ---------------------------------------------------------------------------------------------- */
/* Numbers and kinds                                                                               */
/* ---------------------------------------------------------------------------------------------- */

/** Types of numbers. 0 is not a type: a field left 0 means its default, if it has one. */
typedef enum folio_dtype {
    FOLIO_F32 = 1,
    FOLIO_F16 = 2,
    FOLIO_BF16 = 3,
    FOLIO_FP8_E4M3 = 4, /* e4m3fn: no infinity, largest 448; KV cache only  */
    FOLIO_FP8_E5M2 = 5, /* largest 57344; KV cache only                     */
    FOLIO_INT8 = 6,     /* with an f32 scale per token and kv head; KV only */
    FOLIO_F64 = 7       /* for `out` on the reference backend only          */
} folio_dtype;

/**
 * Bytes of one element; 0 for an unknown dtype. An element is one number. In types that store several
 * numbers together, which may come, it is all of those.
 * n numbers in a row have n / folio_dtype_numbers(dtype) * folio_dtype_size(dtype) bytes.
 */
FOLIO_API size_t folio_dtype_size(folio_dtype dtype);
/** Numbers in one element: 1; 0 for an unknown dtype. */
FOLIO_API size_t folio_dtype_numbers(folio_dtype dtype);

/** "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "f64"; "unknown" for any other number. */
FOLIO_API const char *folio_dtype_name(folio_dtype dtype);

/** The four kinds of attention. */
typedef enum folio_attention_type {
    FOLIO_ATTENTION_DECODER = 0,        /* causal self-attention through the cache             */
    FOLIO_ATTENTION_ENCODER = 1,        /* bidirectional, the encoder of an encoder-decoder    */
    FOLIO_ATTENTION_ENCODER_ONLY = 2,   /* bidirectional over this step's tokens               */
    FOLIO_ATTENTION_ENCODER_DECODER = 3 /* cross attention: queries over the encoder's K and V */
} folio_attention_type;
#define FOLIO_NUM_ATTENTION_TYPES 4

/** The bit of an attention type in a set of types. */
#define FOLIO_ATTENTION_BIT(type) (1u << (unsigned)(type))

/** "decoder", "encoder", "encoder_only", "encoder_decoder"; "unknown" for any other number. */
FOLIO_API const char *folio_attention_type_name(folio_attention_type type);

/** What a sequence does in a step. It decides how sequences are counted and viewed, never results. */
typedef enum folio_phase {
    /* Of a sequence: DECODE if context_len > 0 and query_len <= the batch's decode_query_len, else
     * PREFILL. In folio_batch_get_view: all sequences, padding included. */
    FOLIO_PHASE_AUTO = 0,
    FOLIO_PHASE_PREFILL = 1,
    FOLIO_PHASE_DECODE = 2
} folio_phase;

/** In a block table: no block, for example behind a window. folio_plan_update allows it if no
 * attention of the plan lets a row see a key of that block. */
#define FOLIO_NO_BLOCK (-1)

/* ---------------------------------------------------------------------------------------------- */
/* Context                                                                                         */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_context folio_context;

/** alloc returns `size` bytes aligned to `align` (a power of two), or NULL. free gets the size that
 * alloc got. Both may be called by several threads at once. */
typedef struct folio_allocator {
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*free)(void *user, void *ptr, size_t size);
    void *user;
} folio_allocator;

typedef void (*folio_task_fn)(void *task, int64_t index);

/**
 * The caller's threads. parallel_for calls fn(task, i) once for each i in [0, count), in any order,
 * at once or one after another, and returns when all have returned. count never exceeds
 * num_threads.
 */
typedef struct folio_executor {
    void (*parallel_for)(void *user, int64_t count, folio_task_fn fn, void *task);
    void *user;
    int32_t num_threads; /* 1..256 */
} folio_executor;

typedef struct folio_context_desc {
    size_t struct_size;
    const char *backend;       /* a name of folio_backend_name; "auto" (or NULL): the best one     */
                               /* for host memory. "cuda" needs tensors and caches in device memory */
    int32_t device;            /* number of the device; 0 for host backends                        */
    int32_t num_threads;       /* built-in pool: 1..256; 0: one per processor the process may use  */
    const char *level;         /* highest instruction-set level to use, a name of                  */
                               /* folio_backend_info.levels. The context gets the best level of    */
                               /* this machine that is not above it. NULL: the environment         */
                               /* variable FOLIO_CPU, else no limit. Unknown names are rejected    */
    folio_executor executor;   /* parallel_for NULL: the built-in pool. Else num_threads is ignored */
    folio_allocator allocator; /* both functions NULL: malloc and free                             */
    int32_t pin_threads;       /* 1: thread i of the built-in pool stays on the i-th processor     */
                               /* that the calling thread may use. There must be enough of them.   */
                               /* Thread 0, which makes the call, is not pinned. 0: the system     */
                               /* places all threads                                               */
    const char *cuda_library;  /* absolute path of libfolio_cuda.so, for programs that bring it    */
                               /* along; NULL: it is searched for (folio_context_create)           */
} folio_context_desc;

typedef struct folio_context_info {
    size_t struct_size;
    const char *backend;
    const char *level;
    const char *device;
    int32_t num_threads;
    int32_t num_kernels; /* attention kernels: folio_context_get_kernel */
} folio_context_info;

/**
 * Open a backend. desc NULL: all defaults.
 *
 * The backend "cuda" is a library of its own, libfolio_cuda.so. It is loaded when a context or a
 * query (folio_backend_*, folio_kv_cache_get_shape) first names "cuda", once for the process. If
 * cuda_library is given, that file is used and no other. Otherwise the first of these is used: the
 * file that the environment names (FOLIO_CUDA_LIBRARY=path); the one in the folder of this library's
 * file; the one in the folder of the program's file. Paths must be absolute. A program with raised
 * privileges (set-uid, set-gid, file capabilities) trusts neither the environment nor the folder of
 * its file. Once a file is loaded, a context that names another one is rejected.
 *
 * FOLIO_DEBUG=poison in the environment, for debugging: pools of this context (host backends only) fill
 * blocks of their caches with NaN when they are allocated and when they become free. So attention that
 * reads a block after it was freed, or slots that were never written, gives NaN. Unknown words are
 * rejected. Ignored without glibc, and by a program with raised privileges.
 * @return FOLIO_OK; ERR_ARGUMENT; ERR_UNSUPPORTED with one reason per candidate; ERR_MEMORY;
 * ERR_DEVICE.
 */
FOLIO_API folio_status folio_context_create(const folio_context_desc *desc, folio_context **out);
FOLIO_API void folio_context_destroy(folio_context *ctx);

/** Which backend, level, device and how many threads a context has. Strings live as long as the
 * context. */
FOLIO_API folio_status folio_context_get_info(const folio_context *ctx, folio_context_info *info);

/** Where memory for a context's calls lies. On host backends both kinds are plain host memory. */
typedef enum folio_memory_kind {
    FOLIO_MEMORY_DEVICE = 0, /* the device's own: what kernels read fastest                    */
    FOLIO_MEMORY_HOST = 1    /* pinned host memory, which the device can access: for copies and */
                             /* swapping                                                       */
} folio_memory_kind;

/** Memory for tensors, caches and workspaces of this context, aligned to 64 bytes and not zeroed.
 * bytes must be at least 1. */
FOLIO_API folio_status folio_memory_create(folio_context *ctx, folio_memory_kind kind, size_t bytes,
                                           void **out);
/** Pass the kind and bytes it was created with. NULL is ignored. */
FOLIO_API void folio_memory_destroy(folio_context *ctx, folio_memory_kind kind, void *memory,
                                    size_t bytes);

/* ---------------------------------------------------------------------------------------------- */
/* Attention: one layer geometry                                                                   */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_attention folio_attention;

/**
 * Query head h reads kv head h / (num_heads / num_kv_heads). Each row of a head is computed in this
 * order:
 *
 *     s = scale * q.k                     for every key
 *     s = soft_cap * tanh(s / soft_cap)   with a soft cap
 *     s -= slopes[h] * |pos_q - pos_k|    with ALiBi
 *     s += bias                           with a bias
 *     s = -inf                            where causality or window hides the key
 *     out = softmax(s) * v                a sink is one more score in the softmax, without a v
 *
 * Layers of one geometry share one folio_attention. What differs from layer to layer (slopes, sinks,
 * bias, scales) comes with the call, in folio_tensors.
 */
typedef struct folio_attention_desc {
    size_t struct_size;
    int32_t num_heads;        /* query heads, 1..65536                                             */
    int32_t num_kv_heads;     /* divides num_heads; 0: num_heads. (What folio_attend can take from */
                              /* its cache, it takes from there.)                                  */
    int32_t k_head_size;      /* of q and k: a multiple of 8, up to the backend's max_head_size    */
    int32_t v_head_size;      /* of v and out; 0: k_head_size                                      */
    folio_dtype dtype;        /* of q and out: F32, F16, BF16                                      */
    folio_dtype kv_dtype;     /* of the KV cache; 0: dtype                                         */
    float scale;              /* 0: 1 / sqrt(k_head_size)                                          */
    float soft_cap;           /* 0: none; else > 0                                                 */
    int32_t windowed;         /* 0: no window, and the next two are ignored                        */
    int64_t window_left;      /* a row sees this many keys before pos_q; -1: all. A window of W    */
                              /* tokens, pos_q included, has W - 1                                 */
    int64_t window_right;     /* a row sees this many keys after pos_q; -1: all. Causal rows       */
                              /* treat it as 0                                                     */
    int32_t v_in_k;           /* 1: latent attention: V is the first v_head_size numbers of K, as  */
                              /* stored; v_head_size <= k_head_size. The cache must have it too,   */
                              /* and calls take no v. 0: V is separate                             */
} folio_attention_desc;

/** @return FOLIO_OK; ERR_ARGUMENT; ERR_UNSUPPORTED (the context's backend rejects it); ERR_MEMORY. */
FOLIO_API folio_status folio_attention_create(folio_context *ctx, const folio_attention_desc *desc,
                                              folio_attention **out);
FOLIO_API void folio_attention_destroy(folio_attention *attention);

/* ---------------------------------------------------------------------------------------------- */
/* KV cache                                                                                        */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_kv_cache folio_kv_cache;

/**
 * How K and V of one layer lie in memory (N tokens of a block, H kv heads, D head size). Layouts
 * with separate K and V may lie in one buffer: all of K, then all of V.
 *
 * NATIVE on host backends, packed for SIMD, needs 64-byte alignment: [block][H][K | V], with
 *   K  [N/16][D/p][16][p], p = 1 (f32), 2 (16 bit), 4 (8 bit)
 *   V  [N/2][D][2] (16 bit), [N][D] (f32, 8 bit)
 * and plain rows [N][D] for both if block_size is not a multiple of 16.
 *
 * NATIVE on a device needs 64-byte alignment too. For 16-bit types with head sizes that are multiples
 * of 64 and block sizes that are multiples of 16, it is [block][H][N/8][K | V], each [D/64][8][64].
 * There, in token t, 16-byte unit u of each 64 numbers lies at place u XOR (t mod 8). Otherwise it is
 * [block][H][K | V], each [N][D]. layout_id says which.
 *
 * With v_in_k no layout has V: NATIVE is [block][H][K], on a device always [N][D].
 */
typedef enum folio_layout {
    FOLIO_LAYOUT_NATIVE = 0,
    FOLIO_LAYOUT_NHD = 1,             /* K [block][N][H][D], V the same                            */
    FOLIO_LAYOUT_HND = 2,             /* K [block][H][N][D], V the same                            */
    FOLIO_LAYOUT_INTERLEAVED_NHD = 3, /* [block][K, V][N][H][D]; K and V head sizes equal          */
    FOLIO_LAYOUT_INTERLEAVED_HND = 4, /* [block][K, V][H][N][D]; K and V head sizes equal          */
    FOLIO_LAYOUT_XPACKED = 5,         /* vLLM 0.6: K [block][H][D/x][N][x], V [block][H][D][N],    */
                                      /* x = 16 / bytes of one number, which divides K's D         */
    FOLIO_LAYOUT_XPACKED_1 = 6,       /* the same with x = 1, as IPEX has it                       */
    FOLIO_LAYOUT_STRIDED = 7          /* rows of D numbers at the caller's strides; wrap only      */
} folio_layout;
#define FOLIO_NUM_LAYOUTS 8

/** "native", "nhd", "hnd", "interleaved_nhd", ..., "strided"; "unknown" for any other number. */
FOLIO_API const char *folio_layout_name(folio_layout layout);

typedef struct folio_kv_cache_desc {
    size_t struct_size;
    int64_t num_blocks;   /* 1..2^31 - 1                        */
    int32_t num_layers;   /* >= 1                               */
    int32_t block_size;   /* 1..4096                            */
    int32_t num_kv_heads; /* >= 1                               */
    int32_t k_head_size;  /* a multiple of 8                    */
    int32_t v_head_size;  /* 0: k_head_size                     */
    folio_dtype dtype;    /* F32, F16, BF16, FP8_*, INT8        */
    folio_layout layout;
    int32_t v_in_k;       /* 1: a row is stored once, as K, and V is its first v_head_size numbers. */
                          /* NATIVE, NHD, HND and STRIDED only. DeepSeek: 1 kv head, k_head_size    */
                          /* 576, v_head_size 512. 0: K and V                                       */
} folio_kv_cache_desc;

/** One array of a layer. The first dim is the block. Dims and strides count elements, as in
 * folio_dtype_size. Unused dims are 1. */
typedef struct folio_kv_array {
    int32_t num_dims;
    int64_t dims[6];
    int64_t strides[6];
    int64_t offset_bytes; /* from the layer's base, when one buffer holds the whole layer */
    int64_t bytes;        /* from its first element to the end of its last                */
} folio_kv_array;

typedef struct folio_kv_cache_shape {
    size_t struct_size;
    folio_kv_array k, v;               /* v_in_k: v and v_scales have num_dims 0             */
    folio_kv_array k_scales, v_scales; /* INT8: f32 [block][H][N]; else num_dims 0           */
    int64_t layer_bytes;               /* one buffer with K, V and scales of one layer,      */
                                       /* a multiple of 64                                   */
    int64_t total_bytes;               /* all layers                                         */
    int64_t alignment;                 /* of the base pointers, bytes                        */
    const char *layout_id;             /* caches of equal id and version hold the same bytes */
    int32_t layout_version;
} folio_kv_cache_shape;

/** Elements, as in folio_dtype_size, from one block, token or head to the next. All 0: the layout's
 * own. */
typedef struct folio_kv_strides {
    int64_t block;
    int64_t token;
    int64_t head;
} folio_kv_strides;

/**
 * The caller's memory, one base pointer per layer. The arrays of all layers share no byte with each
 * other, nor do K, V and scales of a layer; this is not checked.
 *
 * Which strides may be given depends on the layout:
 *     STRIDED       block, token and head, for k and for v
 *     NATIVE        block, for k; v has the same, and v_strides is ignored
 *     all others    block, for k and for v; none if v is NULL
 * A block stride is at least the layout's own; NATIVE's is a multiple of 64 bytes. All other strides
 * must be 0. With v_in_k, v and v_scales are NULL, v_strides are 0, and k_strides are as above.
 */
typedef struct folio_kv_memory {
    size_t struct_size;
    void *const *k; /* [num_layers]                                                             */
    void *const *v; /* [num_layers]; NULL: V lies in K's buffer, at v.offset_bytes of            */
                    /* folio_kv_cache_get_shape. NATIVE needs NULL, STRIDED needs v             */
    size_t k_bytes; /* usable bytes from each k[layer]                                          */
    size_t v_bytes; /* usable bytes from each v[layer]; ignored when v is NULL                  */
    folio_kv_strides k_strides; /* see above; all 0: the layout's own                            */
    folio_kv_strides v_strides;
    float *const *k_scales;     /* [num_layers]. INT8 needs both, also when they lie in K's      */
    float *const *v_scales;     /* buffer, at the shape's offset_bytes. Other dtypes ignore them */
    size_t k_scales_bytes;      /* usable bytes from each k_scales[layer]                        */
    size_t v_scales_bytes;
    folio_kv_strides k_scales_strides; /* all 0: [block][H][N] */
    folio_kv_strides v_scales_strides;
} folio_kv_memory;

/** K and V of one layer, as they lie. */
typedef struct folio_kv_cache_view {
    size_t struct_size;
    void *k, *v;                          /* v_in_k: v and v_scales are NULL */
    float *k_scales, *v_scales;           /* NULL unless INT8 */
    folio_kv_array k_array, v_array;      /* dims, and the strides in force */
    folio_kv_array k_scales_array, v_scales_array;
    const folio_kv_cache_desc *desc; /* the cache's, defaults filled in */
} folio_kv_cache_view;

/** The shape that a cache of this description has on a backend. Needs no context. backend NULL:
 * "auto". Strings stay valid until the process ends. @return FOLIO_OK; ERR_ARGUMENT; ERR_UNSUPPORTED:
 * the backend is not available here. */
FOLIO_API folio_status folio_kv_cache_get_shape(const char *backend, const folio_kv_cache_desc *desc,
                                            folio_kv_cache_shape *shape);

/** A cache in memory of the context's allocator or device. Slots are undefined until written. */
FOLIO_API folio_status folio_kv_cache_create(folio_context *ctx, const folio_kv_cache_desc *desc,
                                             folio_kv_cache **out);

/** A cache in the caller's memory, which must outlive it. The arrays of pointers are copied. */
FOLIO_API folio_status folio_kv_cache_wrap(folio_context *ctx, const folio_kv_cache_desc *desc,
                                           const folio_kv_memory *memory, folio_kv_cache **out);
FOLIO_API void folio_kv_cache_destroy(folio_kv_cache *cache);

/** Pointers are valid as long as the cache. */
FOLIO_API folio_status folio_kv_cache_get_view(const folio_kv_cache *cache, int32_t layer,
                                           folio_kv_cache_view *view);

/* ---------------------------------------------------------------------------------------------- */
/* Rotary embedding                                                                                */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_rotary folio_rotary;

/** Which two numbers of a row are rotated together, n = num_dims, counted from first_dim on. */
typedef enum folio_rotary_pairing {
    FOLIO_ROTARY_HALVES = 0, /* i and i + n/2: GPT-NeoX, Llama, Qwen */
    FOLIO_ROTARY_PAIRS = 1   /* 2i and 2i + 1: GPT-J, DeepSeek       */
} folio_rotary_pairing;

/** How a longer context changes the frequencies f_i = theta^(-2i/n). s is `factor`. */
typedef enum folio_rotary_scaling {
    FOLIO_ROTARY_SCALE_NONE = 0,   /* f_i                                                          */
    FOLIO_ROTARY_SCALE_LINEAR = 1, /* f_i / s                                                      */
    FOLIO_ROTARY_SCALE_NTK = 2,    /* theta becomes theta * s^(n / (n - 2)). For dynamic NTK, set  */
                                   /* s for the current length                                     */
    FOLIO_ROTARY_SCALE_YARN = 3,   /* f_i / s for slow pairs, f_i for fast ones, a ramp between    */
    FOLIO_ROTARY_SCALE_LLAMA3 = 4  /* the same with another ramp                                   */
} folio_rotary_scaling;

/**
 * Pair i of a row at position p is rotated by the angle a = p * f_i:
 *
 *     x' = x * cos(a) - y * sin(a)
 *     y' = y * cos(a) + x * sin(a)
 *
 * Angles, cosines and sines are computed in float64 and kept as f32. Products and sums are rounded to
 * f32 one by one, results to the tensor's own dtype. So a rotated row has the same bits on every
 * backend, those of a separate pass that rotates q and k first. Dims outside
 * [first_dim, first_dim + num_dims) do not change.
 *
 * Give cos and sin, or frequencies, or theta with a scaling. All arrays lie in host memory and are
 * copied.
 */
typedef struct folio_rotary_desc {
    size_t struct_size;
    int32_t num_dims;  /* n: even, 2..65536                                                       */
    int32_t first_dim; /* in a head of q and k; with v_in_k at least v_head_size: V is not rotated */
    folio_rotary_pairing pairing;
    folio_rotary_scaling scaling;
    int64_t num_positions;     /* rows of the table, 1..2^31 - 1: positions are below it          */
    const float *cos, *sin;    /* [num_positions][n/2], finite; both or neither                   */
    const double *frequencies; /* [n/2] f_i, finite; NULL: by theta                               */
    double theta;              /* > 1; 0: 10000; not used with cos and sin or frequencies         */
    double factor;             /* s > 0; every scaling but NONE needs it, NONE ignores it         */
    int64_t original_len;      /* YARN, LLAMA3: tokens the model was trained for; >= 1            */
    double low_freq_factor;    /* LLAMA3; 0: 1                                                    */
    double high_freq_factor;   /* LLAMA3, above low_freq_factor; 0: 4                             */
    double beta_fast;          /* YARN: a fast pair makes this many rotations in original_len; 0: 32  */
    double beta_slow;          /* YARN: the same for a slow pair, below beta_fast; 0: 1           */
    int32_t exact_bounds;      /* YARN: 1: the ramp's ends are not rounded to whole pairs         */
    double magnitude;          /* multiplies cos and sin, given ones too; 0: 1, or with YARN      */
                               /* 0.1 * ln(s) + 1 where s > 1                                     */
} folio_rotary_desc;

/** Makes the table: num_positions * num_dims * 4 bytes, in the memory of the context's tensors.
 * @return FOLIO_OK; ERR_ARGUMENT; ERR_MEMORY; ERR_DEVICE. */
FOLIO_API folio_status folio_rotary_create(folio_context *ctx, const folio_rotary_desc *desc,
                                           folio_rotary **out);
/** On a device it waits for the kernels that use the table. */
FOLIO_API void folio_rotary_destroy(folio_rotary *rotary);

/**
 * What a cache cannot know of its K and V. Stores (folio_pool.h) and exports carry it, together with
 * the geometry of their blocks. The call that reads them gives a passport too: if a field differs, it
 * is rejected, and the sentence names the field. A field that is not given is a value like others:
 * scales that are not given differ from scales of 1.
 */
typedef struct folio_kv_passport {
    size_t struct_size;
    const char *model; /* names weights, adapters and all else that K and V depend on; up to 255   */
                       /* bytes; NULL: ""                                                          */
    const folio_rotary_desc *rotary; /* how the stored keys were rotated; NULL: they were not, or  */
                                     /* it is not stated. Fields that do not change the angles are */
                                     /* not compared; of num_positions only the rows of cos and    */
                                     /* sin count. If the layers' rotaries differ, give one, and   */
                                     /* let `model` name the rest                                  */
    const float *k_scales; /* [num_scales] static scales of an fp8 cache: one, or one per layer or */
    const float *v_scales; /* head in an order of the caller's; each finite, > 0; NULL: none       */
    int64_t num_scales;
} folio_kv_passport;

/* ---------------------------------------------------------------------------------------------- */
/* Tensors and running                                                                             */
/* ---------------------------------------------------------------------------------------------- */

/**
 * [tokens][heads][head_size], the numbers of one head contiguous. data needs the alignment of its
 * dtype. The numbers of heads and their size come from the attention or the cache. No two heads
 * overlap. The sum of tokens * token_stride and heads * head_stride stays below 2^61 bytes. data may
 * be NULL if tokens is 0. Strides count elements, not bytes; the library cannot see where your memory
 * ends. A call never writes to its inputs, although data is not const. Its layout never changes.
 */
typedef struct folio_tensor {
    void *data;
    folio_dtype dtype;    /* F32, F16 or BF16; must be given, unless data is NULL and tokens */
                          /* is 0                                                            */
    int64_t tokens;       /* rows                                                            */
    int64_t token_stride; /* elements; 0: heads * head_stride                                */
    int64_t head_stride;  /* elements; 0: head_size                                          */
} folio_tensor;

/**
 * Where a call runs. NULL for the defaults.
 *
 * A plan's own workspace serves one forward at a time; a second concurrent forward is rejected. On a
 * device it serves one stream, that of the first forward after an update; other streams are rejected
 * until the next update. Give a workspace for each further thread or stream. Replays of a captured
 * graph are not checked.
 */
typedef struct folio_run {
    size_t struct_size;
    void *stream;          /* host backends: NULL                                            */
    void *workspace;       /* 64-byte aligned; NULL: the plan's own, see above               */
    size_t workspace_size; /* at least folio_plan_get_workspace_size                             */
} folio_run;

/**
 * An additive bias [sequence][head][query][key] in F32, F16 or BF16, for all types of attention. Each
 * dim is 1, which is broadcast, or at least what the batch needs: sequences (padding included), heads,
 * longest query, longest key range. The indices are the sequence's number in the batch, the head, the
 * number of the row within its sequence, and the number of the key within its sequence. -inf hides the
 * key from the row, whatever K and V hold. After an update from a device's arrays, dims 2 and 3 are 1 or
 * cover the plan's max_query_len and max_seq_len.
 */
typedef struct folio_bias {
    const void *data; /* NULL: none */
    folio_dtype dtype; /* must be given */
    int64_t dims[4];
    int64_t strides[4]; /* elements. All 0: dense. Else positive for every dim above 1 */
} folio_bias;

/** In folio_tensors.flags: the keys are the cached context, then this step's k and v as given, which
 * must be there if the batch brings new tokens. Nothing is written to the cache; write k and v
 * afterwards with folio_kv_cache_write. For DECODER and ENCODER_DECODER with a cache; ignored
 * otherwise. */
#define FOLIO_KV_APPEND 1u

/**
 * One layer's inputs and outputs. Rows follow the batch's order of sequences, padding included. Their
 * number is a sum over the batch, or with FOLIO_PLAN_GRAPH the plan's limit:
 *     DECODER, ENCODER_ONLY   q, k, v, out   sum of query_len
 *     ENCODER                 q, k, v, out   sum of encoder_new_len
 *     ENCODER_DECODER         q, out         sum of query_len
 *                             k, v           sum of encoder_new_len
 *
 * out may be q itself: the same data, dtype and strides, and equal head sizes. Apart from that, out,
 * lse and run.workspace must share no byte with each other or with anything the call reads. Rows of
 * two tensors may alternate in memory, as in the result of a fused QKV projection, if their strides
 * in bytes are equal. K and V of any layer of the cache, and a bias, count as ranges from first to
 * last byte. If the call writes k and v to the cache, nothing that it reads may lie in the cache: q,
 * k, v, slopes, sinks, bias, positions and head scales.
 *
 * q and out have the attention's dtype (on the reference backend out may be F64). k and v are F32,
 * F16 or BF16, whatever q is; a cache that stores them rounds them to its own dtype.
 *
 * Host backends check slopes, sinks, positions and head scales. A device does not: a head with a bad
 * slope or sink gets NaN or zeros, the heads of a kv head with a bad scale get wrong numbers, and the
 * other heads are right. A row with a bad position gets NaN in the dims that rotate, in q and in k, and
 * so do rows that see its key. Positions of a batch in host memory are checked on every backend.
 *
 * With rotary, q is rotated when it is read, and k before it is stored or read. Cross attention rejects
 * rotary.
 */
typedef struct folio_tensors {
    size_t struct_size;
    folio_tensor q, k, v, out; /* k and v: both; or neither (data NULL, tokens 0), then the   */
                               /* call stores nothing and reads all keys from the cache.     */
                               /* v_in_k: k only. DECODER: neither, if a sequence of the     */
                               /* batch has more queries than keys                           */
    float *lse;                /* [token][head], natural log, sinks included; NULL: not      */
                               /* computed                                                   */
    int64_t lse_token_stride;  /* elements; 0: num_heads                                     */
    int64_t lse_head_stride;   /* elements; 0: 1                                             */
    const float *slopes;       /* ALiBi, [num_heads], finite; not in cross attention, which   */
                               /* rejects them; NULL: none                                   */
    const float *sinks;        /* [num_heads], finite or -inf (no sink); NULL: none          */
    folio_bias bias;
    float k_scale; /* k = stored * k_scale; finite, > 0; 0: 1. Used with FP8 caches only      */
    float v_scale; /* v_in_k: 0, because k_scale is V's too; the same in the calls below      */
    uint32_t flags; /* 0 or FOLIO_KV_APPEND                                                   */
    const folio_rotary *rotary; /* its table lies where the tensors lie; NULL: none            */
    const int64_t *positions;   /* [rows of q] for rotary only, each in [0, num_positions)     */
                                /* except in padding. Row i of k has the position of row i of  */
                                /* q. NULL: the batch's, as in folio_batch_view                */
    const float *k_head_scales; /* [num_kv_heads] in place of k_scale, which is then 0; each   */
                                /* finite, > 0; used with FP8 caches only, always checked;     */
                                /* NULL: k_scale for all heads                                */
    const float *v_head_scales; /* the same for v_scale; v_in_k: NULL                         */
} folio_tensors;

/** Copies bytes between any two places, host or device, in the order of run's stream. If bytes is 0,
 * `to` and `from` may be NULL; the same holds for folio_memory_fill. Host backends allow the two to
 * overlap. On a device they must not; this is not checked. */
FOLIO_API folio_status folio_memory_copy(folio_context *ctx, void *to, const void *from,
                                         size_t bytes, const folio_run *run);
/** Sets every byte to `value`, 0..255, in the order of run's stream. */
FOLIO_API folio_status folio_memory_fill(folio_context *ctx, void *to, int value, size_t bytes,
                                         const folio_run *run);
/** Waits until the stream of run is idle and returns its first error. Host backends: returns at
 * once. */
FOLIO_API folio_status folio_run_wait(folio_context *ctx, const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* Moving K and V                                                                                  */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_kv_write {
    size_t struct_size;
    folio_tensor k, v;    /* F32, F16 or BF16; v_in_k: k only, v has data NULL, tokens 0   */
    const int64_t *slots; /* [k.tokens], each -1 or a slot in [0, num_blocks * block_size); */
                          /* no slot twice                                                */
    float k_scale;        /* FP8: stored = x / k_scale rounded; 0: 1                      */
    float v_scale;
    const folio_rotary *rotary; /* rotates k before it is stored, as a forward does; NULL: none */
    const int64_t *positions;   /* [k.tokens] in host memory, each in [0, num_positions) where   */
                                /* the slot is not -1; needed with rotary                       */
    const float *k_head_scales; /* as in folio_tensors                                    */
    const float *v_head_scales;
} folio_kv_write;

/**
 * Store rows in slots of a layer. Numbers are rounded to nearest even, fp8 saturates to its largest
 * number, NaN stays NaN. INT8: scale = max|x| / 127 over the row of one head, stored = x / scale
 * rounded. k, v and head scales must not lie in the cache. The call allocates scratch memory to check
 * the slots and frees it; so do copy_blocks and pack.
 */
FOLIO_API folio_status folio_kv_cache_write(folio_kv_cache *cache, int32_t layer,
                                            const folio_kv_write *write, const folio_run *run);

typedef struct folio_kv_gather {
    size_t struct_size;
    folio_tensor k, v;    /* where rows go: F32, F16 or BF16; one of them may have data NULL */
    const int64_t *slots; /* [num_slots]; -1 gives a row of zeros; may repeat                */
    int64_t num_slots;
    float k_scale; /* as in folio_tensors */
    float v_scale;
    const float *k_head_scales;
    const float *v_head_scales;
} folio_kv_gather;

/** Read slots of a layer as rows, dequantised. With v_in_k, v gets the first v_head_size numbers of
 * K. k, v, the cache and head scales must share no byte with each other. */
FOLIO_API folio_status folio_kv_cache_gather(const folio_kv_cache *cache, int32_t layer,
                                             const folio_kv_gather *gather, const folio_run *run);

/** One block to copy. Its layout never changes. */
typedef struct folio_block_pair {
    int64_t from;
    int64_t to;
} folio_block_pair;

/**
 * Copy whole blocks of src into dst, in all layers, as stored. src may be dst; then no block may be
 * both read and written. No block of dst may be written twice. Layouts and contexts may differ.
 * Geometry (layers, block size, heads, head sizes, v_in_k) and dtype must be equal. One of the two
 * caches may lie on a device; run then names a stream of that device, and the other cache must lie
 * in memory that the device can access, such as FOLIO_MEMORY_HOST of the device's context.
 */
FOLIO_API folio_status folio_kv_cache_copy_blocks(const folio_kv_cache *src, folio_kv_cache *dst,
                                                  const folio_block_pair *pairs, int64_t num_pairs,
                                                  const folio_run *run);

/** Plain rows of whole blocks as stored, n = num_blocks: k [n * block_size][H][Dk], v the same with
 * Dv, scales [n * block_size][H]. Block i of the rows is block blocks[i] of the cache. */
typedef struct folio_kv_rows {
    size_t struct_size;
    void *k, *v;                /* in the cache's dtype; v_in_k: v and v_scales NULL */
    float *k_scales, *v_scales; /* INT8: both; else ignored      */
    int64_t num_blocks;
    const int64_t *blocks; /* [num_blocks]; pack: no block twice */
} folio_kv_rows;

/** Rows to blocks of a layer, whatever the cache's layout. The rows must not lie in the cache. */
FOLIO_API folio_status folio_kv_cache_pack(folio_kv_cache *cache, int32_t layer,
                                           const folio_kv_rows *rows, const folio_run *run);
/** Blocks of a layer to rows; the inverse of pack, bit for bit. k, v, the scales and the cache must
 * share no byte with each other. */
FOLIO_API folio_status folio_kv_cache_unpack(const folio_kv_cache *cache, int32_t layer,
                                             const folio_kv_rows *rows, const folio_run *run);

/** What to export, and where to import it. */
typedef struct folio_kv_blocks {
    size_t struct_size;
    const int64_t *blocks; /* [num_blocks], in the order of the tokens; import: no block twice    */
    int64_t num_blocks;
    int64_t num_tokens; /* in the blocks. All blocks but the last are full; the last has a token  */
    const folio_kv_passport *passport; /* NULL: nothing is stated                                 */
    const void *key;     /* [key_bytes]: the data is sealed with it, and an import takes only     */
                         /* data that was sealed with the same key. NULL: the data has checksums, */
                         /* which anybody can make                                                */
    int32_t key_bytes;   /* 16..64; 0: no key                                                     */
    folio_layout layout; /* of the exported data, any but STRIDED. NATIVE is the fastest. It      */
                         /* differs between host backends and devices, so only caches with the    */
                         /* same layout_id take it; all caches take the others. Import: ignored   */
} folio_kv_blocks;

/**
 * Write blocks, with all layers, as bytes that say what they are, for any transport. docs/kv-format.md
 * describes them. *bytes is set to their number. If data is NULL, that is all. Else it is host memory
 * of `capacity` bytes, at any alignment. Slots past num_tokens are zeros there, whatever the cache
 * holds. data must share no byte with the cache, `blocks` or `key`. The call waits until its copies are
 * done. After ERR_DEVICE, data is undefined.
 */
FOLIO_API folio_status folio_kv_cache_export(const folio_kv_cache *cache,
                                             const folio_kv_blocks *blocks, void *data,
                                             size_t capacity, size_t *bytes, const folio_run *run);

/**
 * Read such bytes into blocks. Before it writes a block, the call verifies all bytes: length, counts of
 * blocks and tokens, every field of the passport and of the geometry, the seal of every block. data is
 * host memory, at any alignment, and must not change during the call. The call waits until its copies
 * are done. After ERR_DEVICE, the blocks are undefined.
 */
FOLIO_API folio_status folio_kv_cache_import(folio_kv_cache *cache, const folio_kv_blocks *blocks,
                                             const void *data, size_t bytes, const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* Batch: one step's sequences                                                                     */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_batch folio_batch;

/** max_* are capacities: the batch allocates them at creation, and more when it outgrows them. 0 is
 * fine. */
typedef struct folio_batch_desc {
    size_t struct_size;
    int32_t block_size;       /* tokens per block, 1..4096. 0: that of `cache`. If there is none */
                              /* either: that of the pool in folio_batch_add_sequences. A batch  */
                              /* without block tables needs no block size                        */
    int32_t decode_query_len; /* FOLIO_PHASE_AUTO: a longer query_len is a prefill; 0: 1         */
    const folio_kv_cache *cache; /* gives its block_size, and is not kept; NULL: none            */
    int64_t max_seqs;
    int64_t max_query_tokens;
    int64_t max_blocks; /* entries of all block tables                                           */
    int64_t max_encoder_tokens;
    int64_t max_cross_blocks;
} folio_batch_desc;

/** Is DECODER attention causal? The other types never are. */
typedef enum folio_causality {
    FOLIO_CAUSAL_AUTO = 0, /* as YES                                                    */
    FOLIO_CAUSAL_YES = 1,  /* a row sees keys up to its own position                    */
    FOLIO_CAUSAL_NO = 2    /* a row sees all keys of its sequence, within the window    */
} folio_causality;

/**
 * One sequence of a step. Arrays are copied. query_len, seq_len and encoder_len are at most 2^31 - 1.
 *
 * query_len above seq_len: more queries than keys. In DECODER attention all keys of such a sequence
 * are cached (context_len = seq_len), and nothing of it is stored: slots are NULL or all -1, and
 * forwards of the batch get no k and v. positions_given is needed; rows before the first key see
 * none. So one sequence attends to a part of the keys of many, such as a shared prefix, with all
 * their queries as its rows; folio_state_merge adds the other parts.
 */
typedef struct folio_batch_seq {
    size_t struct_size;
    int64_t query_len; /* new tokens = rows of q; may be 0                                       */
    int64_t seq_len;   /* cached and new tokens, >= 1; below query_len: see above                */
    int32_t padding;   /* non-zero: query_len rows that see no key and store nothing; seq_len 0  */
    folio_phase phase;
    folio_causality causality;
    const int32_t *block_table; /* blocks or FOLIO_NO_BLOCK; NULL: none, see                     */
                                /* folio_batch_is_complete                                       */
    int64_t num_blocks;         /* at least seq_len / block_size, rounded up; more are ignored   */
    const int64_t *slots;       /* [query_len], where k and v go; NULL: by the block table       */
    int32_t positions_given;    /* non-zero: DECODER attention uses the next two fields          */
    int64_t first_query_pos;    /* position of the first new token, between -2^40 and 2^40;      */
                                /* not given: seq_len - query_len                                */
    int64_t first_key_pos;      /* the same for the first key; not given: 0                      */
    int64_t encoder_len;        /* keys of cross attention; ignored in padding                   */
    int64_t encoder_new_len;    /* 0, or encoder_len: its encoder K and V are new this step;     */
                                /* padding brings none                                           */
    const int32_t *cross_block_table;
    int64_t num_cross_blocks;
    const int64_t *cross_slots; /* [encoder_new_len]; NULL: by the cross block table             */
} folio_batch_seq;

FOLIO_API folio_status folio_batch_create(folio_context *ctx, const folio_batch_desc *desc,
                                          folio_batch **out);
FOLIO_API void folio_batch_destroy(folio_batch *batch);
/** Forget all sequences; keep the memory and the block size. */
FOLIO_API void folio_batch_clear(folio_batch *batch);
/** Append a sequence. Prompts, decodes and padding may come in any order. */
FOLIO_API folio_status folio_batch_add(folio_batch *batch, const folio_batch_seq *seq);

/** The form of a step's block tables. */
typedef enum folio_table_kind {
    FOLIO_TABLE_NONE = 0, /* no block tables                                                     */
    FOLIO_TABLE_ROWS = 1, /* [num_seqs][row_stride]; entries past a sequence's last block are not */
                          /* read                                                                */
    FOLIO_TABLE_CSR = 2,  /* sequence i has indices[start[i] .. start[i + 1])                    */
    FOLIO_TABLE_SLOTS = 3 /* the same, each index the slot of one key: block size 1              */
} folio_table_kind;

/** Block tables of a step. Its layout never changes. */
typedef struct folio_table {
    folio_table_kind kind;
    int32_t index_bytes;           /* of one index: 4 or 0: int32_t; 8: int64_t                   */
    const void *indices;           /* blocks or FOLIO_NO_BLOCK                                    */
    int64_t row_stride;            /* ROWS: entries from one sequence's table to the next         */
    const int32_t *start;          /* CSR, SLOTS: [num_seqs + 1], starts at 0, non-decreasing     */
    const int32_t *last_block_len; /* CSR where seq_lens is NULL: [num_seqs] tokens in the last   */
                                   /* block of each, 1..block_size; may be NULL for block size 1  */
    int64_t num_indices;           /* CSR, SLOTS: entries of indices; 0: not known, which CSR on  */
                                   /* a device does not allow                                     */
} folio_table;

/**
 * A whole step as arrays, in host memory or all of them on the device. Optional arrays are NULL. All
 * are copied.
 *
 * On a device: DECODER and ENCODER_ONLY attention; seq_lens must be given; tables are ROWS, with room
 * for the plan's max_seq_len in each row, or CSR, with 32-bit indices; phases, causality_default and
 * the encoder's fields are left 0. A sequence with more queries than keys has a bad length there.
 */
typedef struct folio_step {
    size_t struct_size;
    int64_t num_seqs;
    int64_t num_query_tokens;  /* rows of q. 0: query_start's last entry, or without query_start    */
                               /* one row per sequence. folio_attend: q.tokens. On a device:        */
                               /* num_seqs, and in graph plans their limit                         */
    int32_t on_device;         /* 1: all arrays lie in the device's memory                         */
    folio_causality causality_default; /* of all sequences, where `causality` is NULL              */
    const int32_t *query_start; /* [num_seqs + 1] first row of each sequence, then all rows; starts */
                               /* at 0, non-decreasing. NULL: all have num_query_tokens / num_seqs */
                               /* rows, which is 1 on a device                                     */
    const int32_t *seq_lens;   /* [num_seqs] cached and new tokens; 0: padding. NULL: CSR and SLOTS */
                               /* tables give the lengths; without a table there are only new      */
                               /* tokens                                                           */
    const int32_t *phases;     /* [num_seqs] of folio_phase                                        */
    const int32_t *causality;  /* [num_seqs] of folio_causality                                    */
    const int64_t *slots;      /* [num_query_tokens] where k and v go; NULL: by the table          */
    const int64_t *first_query_pos; /* [num_seqs] as in folio_batch_seq; both or none              */
    const int64_t *first_key_pos;
    const int32_t *encoder_lens;     /* [num_seqs]                                                 */
    const int32_t *encoder_new_lens; /* [num_seqs]; NULL: all 0                                    */
    const int64_t *cross_slots;      /* [sum of encoder_new_lens]; NULL: by cross_table            */
    folio_table table;
    folio_table cross_table;         /* encoder_lens gives its lengths                             */
} folio_step;

/** Replace the batch's sequences by those of a step in host memory. On error the batch is left
 * empty. SLOTS tables set the block size of a batch that has none. */
FOLIO_API folio_status folio_batch_set(folio_batch *batch, const folio_step *step);

typedef enum folio_batch_kind {
    FOLIO_BATCH_EMPTY = 0,
    FOLIO_BATCH_PREFILLS = 1,
    FOLIO_BATCH_DECODES = 2,
    FOLIO_BATCH_MIXED = 3
} folio_batch_kind;

/** Counts of a batch. Padding is counted on its own and is neither prefill nor decode. */
typedef struct folio_batch_info {
    size_t struct_size;
    folio_batch_kind kind;
    int64_t num_seqs;
    int64_t num_query_tokens; /* rows of q, padding included */
    int64_t num_prefills;
    int64_t num_prefill_tokens;
    int64_t num_decodes;
    int64_t num_decode_tokens;
    int64_t num_padding;
    int64_t num_padding_tokens;
    int64_t max_query_len;
    int64_t max_seq_len;
    int64_t max_prefill_seq_len;
    int64_t max_decode_seq_len;
    int64_t num_encoder_tokens; /* sum encoder_new_len */
    int64_t max_encoder_len;
    int64_t max_encoder_new_len;
} folio_batch_info;

FOLIO_API folio_status folio_batch_get_info(const folio_batch *batch, folio_batch_info *out);

/**
 * The sequences of one phase as one attention type sees them, in the batch's order. The batch owns
 * all arrays. They are valid until the batch changes or the same view is requested again.
 */
typedef struct folio_batch_view {
    size_t struct_size;
    int64_t num_seqs;
    int64_t num_query_tokens;
    int64_t num_new_tokens;       /* rows of k and v, if they are given                           */
    int64_t max_query_len;
    int64_t max_key_len;
    const int64_t *seqs;          /* [num_seqs] number of the sequence in the batch               */
    const int64_t *query_rows;    /* [num_seqs] its first row in q and out                        */
    const int32_t *query_lens;    /* [num_seqs] its rows                                          */
    const int64_t *query_start;   /* [num_seqs + 1] running sum of query_lens from 0              */
    const int64_t *last_rows;     /* [num_seqs] its last row in q and out, for logits; -1: none   */
    const int64_t *positions;     /* [num_query_tokens] of each row, for rotary embedding: from   */
                                  /* first_query_pos on, in encoder types from 0 on               */
    const int32_t *key_lens;      /* [num_seqs] keys its rows can see at most                     */
    const int64_t *key_start;     /* [num_seqs + 1] running sum of key_lens from 0                */
    const int32_t *context_lens;  /* [num_seqs] keys cached before this step                      */
    const int64_t *slot_mapping;  /* [num_new_tokens], -1: not stored; NULL for encoder types     */
    const int64_t *table_start;   /* [num_seqs + 1] into blocks; NULL for encoder types           */
    const int32_t *blocks;        /* block tables one after another                               */
} folio_batch_view;

/** phase FOLIO_PHASE_AUTO: all sequences, padding included. The first call for a view allocates. */
FOLIO_API folio_status folio_batch_get_view(folio_batch *batch, folio_attention_type type,
                                        folio_phase phase, folio_batch_view *out);

/**
 * Does the batch hold all that attention of this type with a cache needs? Returns 1, and *missing is
 * NULL; or 0, and *missing is the name of the first missing field. missing may be NULL. DECODER:
 * block_table in every sequence but padding; with FOLIO_KV_APPEND, or without a cache, a sequence
 * without a context needs none. ENCODER: encoder_len in some sequence. ENCODER_ONLY: nothing.
 * ENCODER_DECODER: encoder_len in some sequence, and cross_block_table wherever encoder_len > 0.
 * A forward rejects a batch without a table that it needs; rows without encoder keys get zeros.
 */
FOLIO_API int folio_batch_is_complete(const folio_batch *batch, folio_attention_type type,
                                      const char **missing);

/* ---------------------------------------------------------------------------------------------- */
/* Plan and forward                                                                                */
/* ---------------------------------------------------------------------------------------------- */

typedef struct folio_plan folio_plan;

/**
 * Fixed buffers, as CUDA graphs need them. For every batch, q, out and lse (and k and v in
 * self-attention) have max_query_tokens rows; encoder rows, and k and v in cross attention, are
 * max_encoder_tokens. Rows past the batch's are padding: never stored, out zeros, lse -inf or the
 * sink. On host backends the other rows have the same bits as without this flag. On a device that
 * needs FOLIO_PLAN_BATCH_INVARIANT too, because a graph's kernels are chosen by the plan's limits.
 */
#define FOLIO_PLAN_GRAPH 1u
/** Every forward must have run.workspace; the plan allocates none. */
#define FOLIO_PLAN_NO_WORKSPACE 2u
/**
 * A sequence's bits depend on its own rows and keys and on the plan, never on the rest of the batch.
 * Host backends always do this. On a device, keys are then split at fixed positions, which costs
 * some speed. Alignment still matters on a device: the promise holds where all rows of q, k, v, out
 * and the cache begin at multiples of 16 bytes.
 */
#define FOLIO_PLAN_BATCH_INVARIANT 4u
/**
 * A promise of the caller about forwards that are given k and v: no other sequence of the batch reads
 * the slot of a new token, and the slot is -1 or the token's place in its sequence's block table. On a
 * device, decode can then store k and v itself, if each sequence has one new token: one launch per
 * layer instead of two (docs/cuda.md has the conditions). Host backends compute as without it.
 * Sequences of folio_pool.h keep the promise. An engine keeps it if it copies a shared block before it
 * writes to it, and shares a block only after the step that fills it. If another sequence reads such a
 * slot all the same, it sees old numbers, new ones or a mix. folio_plan_update rejects any other slot
 * of a sequence with one new token, whether k and v are given or not; other slots are not checked.
 */
#define FOLIO_PLAN_PRIVATE_SLOTS 8u
/**
 * Forwards note the first bad write of a step, for folio_plan_get_bad_write: a number that is NaN or
 * infinite. They look at the rows of
 *     k, v   that are stored, or read as given (FOLIO_KV_APPEND, no cache, encoder types); after rotary.
 *            A number that only becomes infinite in the cache's dtype is bad too, and so is an infinity
 *            that FP8 stores as its largest number. v_in_k: k only
 *     out    as stored
 * They do not look at padding, at rows with slot -1, or at what the cache held before. Results do not
 * change. On a device the plan needs limits.
 */
#define FOLIO_PLAN_NOTE_BAD 16u

/**
 * max_seqs, max_query_tokens and max_seq_len are limits: give all of them, and an update allocates
 * nothing. For a plan that grows, leave all five max_* 0: an update with a larger step then makes new
 * buffers, for at least half as much again as before, and on a device waits for the stream.
 * FOLIO_PLAN_GRAPH, FOLIO_PLAN_NO_WORKSPACE and arrays in device memory need limits, and so does any
 * graph that holds a forward. On a device FOLIO_PLAN_NOTE_BAD does too.
 */
typedef struct folio_plan_desc {
    size_t struct_size;
    folio_attention *const *attentions; /* [num_attentions]                                        */
    const uint32_t *types; /* [num_attentions] sets of FOLIO_ATTENTION_BIT; NULL: DECODER for each */
    int32_t num_attentions;
    int32_t block_size; /* of the caches it will run on; 0: that of `cache`, or no cache           */
    const folio_kv_cache *cache; /* gives block_size and num_blocks where they are 0; where they   */
                                 /* are not, they must equal its own. Not kept. NULL: none         */
    const folio_kv_cache *cross_cache; /* the same for block_size and cross_num_blocks             */
    int64_t num_blocks; /* block numbers stay below it, slots below it times block_size; 0: that   */
                        /* of `cache`. A plan that runs without a cache leaves both 0              */
    int64_t cross_num_blocks; /* the same for cross block tables; 0: cross_cache's, or num_blocks  */
    int64_t max_seqs;           /* 0: see above                                                    */
    int64_t max_query_tokens;   /* sum query_len in one step, padding included                     */
    int64_t max_seq_len;        /* longest sequence and longest encoder_len; with ENCODER_ONLY     */
                                /* longest query_len too                                           */
    int64_t max_encoder_tokens; /* sum encoder_new_len in one step; a limit of every batch,        */
                                /* whatever the plan's types                                       */
    uint32_t flags;             /* 0 or FOLIO_PLAN_*                                               */
    int64_t max_query_len; /* longest query_len of one sequence; 0: max_query_tokens. With 1, a    */
                           /* graph of decodes launches nothing for prompts                        */
} folio_plan_desc;

/** The arrays are copied. @return FOLIO_OK; ERR_ARGUMENT; ERR_UNSUPPORTED (an attention cannot run
 * as a type, such as a window in cross attention); ERR_MEMORY; ERR_DEVICE. */
FOLIO_API folio_status folio_plan_create(folio_context *ctx, const folio_plan_desc *desc,
                                         folio_plan **out);
FOLIO_API void folio_plan_destroy(folio_plan *plan);

/**
 * Prepare the plan for this step's batch. Checks every block index, slot and length; allocates
 * nothing, unless the plan grows. On a device, the batch is copied there on run's stream; forwards and
 * captured graphs on the same stream see it. Forwards on other streams must have ended before: what
 * they read is overwritten. The batch must not change until the next update: a forward after a change
 * is rejected. Two new tokens may share a slot; only a forward that writes k and v rejects that.
 *
 * An update that is rejected changes nothing: the plan still serves the batch of its last successful
 * update, unless that batch has changed. After FOLIO_ERR_DEVICE it serves none.
 */
FOLIO_API folio_status folio_plan_update(folio_plan *plan, folio_batch *batch,
                                         const folio_run *run);

/**
 * The same from a step's arrays.
 *
 * In host memory: the plan fills a batch of its own, which allocates only while it grows, and updates
 * with it.
 *
 * On a device: the update reads, checks and copies the arrays in stream order, without waiting: work
 * queued after it may overwrite them. It can be captured in a graph together with forwards, and
 * replayed after the arrays have changed. A sequence with a bad length, block or slot is emptied: its
 * rows are stored nowhere and its out is zeros; the others are computed. folio_plan_get_findings
 * reports it. Duplicate slots are not detected.
 */
FOLIO_API folio_status folio_plan_update_step(folio_plan *plan, const folio_step *step,
                                              const folio_run *run);

/** What was found on the device. */
typedef struct folio_plan_findings {
    size_t struct_size;
    int64_t num_checked; /* updates from device arrays that have been checked by now, mod 2^24   */
    int64_t bad_seq;     /* in the last of them the first sequence that was emptied; -1: none    */
} folio_plan_findings;

/**
 * What the device has found so far. Never waits. out may be NULL.
 * @return FOLIO_OK; ERR_ARGUMENT: a sequence was emptied, folio_last_error says which and why.
 */
FOLIO_API folio_status folio_plan_get_findings(const folio_plan *plan, folio_plan_findings *out);

/** What a forward writes. */
typedef enum folio_written {
    FOLIO_WRITTEN_K = 0,
    FOLIO_WRITTEN_V = 1,
    FOLIO_WRITTEN_OUT = 2
} folio_written;

/** The first bad write of a plan with FOLIO_PLAN_NOTE_BAD. */
typedef struct folio_plan_bad_write {
    size_t struct_size;
    int32_t found;             /* 1: there is one; 0: none so far, and the rest is 0             */
    int32_t layer;             /* as the forward was given it                                    */
    int32_t attention;         /* its number in folio_plan_desc.attentions                       */
    folio_attention_type type; /* what it ran as                                                 */
    folio_written what;
    int32_t head;              /* kv head of k and v, query head of out                          */
    int64_t step;              /* which update of the plan the forward followed: 1 is the first. */
                               /* Each replay of a captured update counts                        */
    int64_t seq;               /* number of the sequence in that step                            */
    int64_t position;          /* of the token in its sequence, cached ones counted: 0 is the    */
                               /* first. Cross attention and more queries than keys, out: number */
                               /* of the row within its sequence's rows                          */
} folio_plan_bad_write;

/**
 * The first bad write so far. Never waits: on a device, the answer is what has run by now. First is the
 * one of the lowest layer, then attention, type, k before v before out, seq, position and head; it does
 * not depend on threads. (From layer * num_attentions + attention = 8191 on, layers are not told apart:
 * there K of a later one may come before out of an earlier one.) It is of the first step that had any:
 * later steps note nothing. Once this call has handed it out, the next update forgets it, and forwards
 * after that update note again. So an engine may run steps ahead, ask once in a while, and find the step
 * by `step`. Not while another thread updates the plan.
 * @return FOLIO_OK, found or not; ERR_ARGUMENT: the plan has no FOLIO_PLAN_NOTE_BAD.
 */
FOLIO_API folio_status folio_plan_get_bad_write(folio_plan *plan, folio_plan_bad_write *out);

/** Bytes of workspace any step within the plan's limits needs. Fixed when the plan is created; of a
 * plan that grows, until an update makes it grow. */
FOLIO_API folio_status folio_plan_get_workspace_size(const folio_plan *plan, size_t *bytes);

/** How the plan will run one attention of its list as one type, after an update. */
typedef struct folio_plan_info {
    size_t struct_size;
    const char *kernel;      /* names of the kernels for this step, a space between them      */
    int64_t num_items;       /* pieces of work over all kv heads. -1: only the device knows,  */
                             /* after an update from its arrays                               */
    int64_t num_split_items; /* those of them that have only a part of a row's keys: their    */
                             /* results are merged                                            */
    int64_t split_len;       /* a row's keys may be split only at multiples of this many      */
                             /* keys; 0: they are not split at fixed positions                */
    const char *fallback;    /* kernels for forwards that `kernel` does not support, in the   */
                             /* order they are tried; "": it supports all. Reasons are        */
                             /* strides, alignment, slopes, bias, rotary, head scales,        */
                             /* FOLIO_KV_APPEND, another cache. folio_attention_check knows   */
                             /* which one a forward gets                                      */
} folio_plan_info;

/** What a plan chose for its attentions and cache (folio_plan_desc.cache; NULL: one of the native
 * layout). attention: its number in folio_plan_desc.attentions. Strings live as long as the plan; of a
 * plan that grows, until an update makes it grow. */
FOLIO_API folio_status folio_plan_get_info(const folio_plan *plan, int32_t attention,
                                           folio_attention_type type, folio_plan_info *info);

/**
 * Run one attention layer over the batch the plan was last updated with. attention is a number of
 * folio_plan_desc.attentions, layer a number of the cache's layers; without a cache layer is ignored.
 *
 * With a cache, DECODER and ENCODER_DECODER first write k and v (if given) to the batch's slots,
 * then read every key from the cache, as stored. Without one (cache NULL: profiling run) k and v
 * are read directly and no sequence may have a context. The encoder types ignore cache and layer.
 *
 * Cache, batch and plan may come from different contexts. The cache lies where the plan runs: in host
 * memory for host backends, on the plan's own device for others. A cache elsewhere is rejected, but a
 * cache on another device of the same backend is not detected. A host plan may read a device's
 * wrapped cache that lies in FOLIO_MEMORY_HOST; where it lies is not checked.
 *
 * Writes out, and lse if it is not NULL. A row that sees no key gets zeros in out, and in lse the
 * head's sink, or -inf without sinks.
 *
 * A plan holds no layer data: the same plan serves every layer of a step, and several threads may
 * run it at once with different workspaces (see folio_run). Allocates nothing.
 *
 * @return FOLIO_OK; ERR_ARGUMENT, ERR_UNSUPPORTED (nothing was written); ERR_DEVICE (CUDA only; out
 * is undefined).
 */
FOLIO_API folio_status folio_attention_forward(const folio_plan *plan, int32_t attention,
                                               folio_attention_type type, folio_kv_cache *cache,
                                               int32_t layer, const folio_tensors *tensors,
                                               const folio_run *run);

/** Would folio_attention_forward accept these arguments, and what would it run? Makes all its checks;
 * runs and writes nothing but `info`, which may be NULL: `kernel` is what these tensors get, and
 * `fallback` is "". Whether another thread or stream uses the plan's own workspace is not asked. */
FOLIO_API folio_status folio_attention_check(const folio_plan *plan, int32_t attention,
                                             folio_attention_type type, folio_kv_cache *cache,
                                             int32_t layer, const folio_tensors *tensors,
                                             const folio_run *run, folio_plan_info *info);

/* ---------------------------------------------------------------------------------------------- */
/* One call                                                                                        */
/* ---------------------------------------------------------------------------------------------- */

/**
 * One layer of attention over one step. It makes an attention and a plan that grows, updates the plan
 * with the step, runs the layer as folio_attention_forward does, and frees them: it allocates, and on a
 * device it waits for the end. An engine makes a plan instead, once, and updates it for all layers of a
 * step. The results are the same; on host backends, the same bits. Only run.stream is used.
 *
 * What is left 0 and can be known is filled in. In attention, dtype is that of q; with a cache,
 * num_kv_heads, k_head_size, v_head_size, kv_dtype and v_in_k are the cache's. In step,
 * num_query_tokens is the rows of q (not in ENCODER attention). step's arrays lie in host memory. Its
 * causality_default AUTO is causal, which FlashAttention is not by default.
 *
 * @return as folio_attention_create, folio_plan_create, folio_plan_update_step and
 * folio_attention_forward.
 */
FOLIO_API folio_status folio_attend(folio_context *ctx, const folio_attention_desc *attention,
                                    folio_attention_type type, const folio_step *step,
                                    folio_kv_cache *cache, int32_t layer,
                                    const folio_tensors *tensors, const folio_run *run);

/* ---------------------------------------------------------------------------------------------- */
/* Partial results and biases                                                                      */
/* ---------------------------------------------------------------------------------------------- */

/** Attention over a part of the keys: out and lse as folio_attention_forward writes them. Its
 * layout never changes. */
typedef struct folio_state {
    folio_tensor out; /* dtype F32, F16 or BF16 */
    const float *lse;
    int64_t lse_token_stride; /* 0: num_heads */
    int64_t lse_head_stride;  /* 0: 1         */
} folio_state;

typedef struct folio_merge {
    size_t struct_size;
    int32_t num_heads;
    int32_t head_size;
    int64_t num_parts;
    const folio_state *parts;  /* [num_parts], each with as many tokens as out             */
    folio_tensor out;
    float *lse;                /* NULL: not computed                                       */
    int64_t lse_token_stride;  /* elements; 0: num_heads                                   */
    int64_t lse_head_stride;   /* elements; 0: 1                                           */
} folio_merge;

/**
 * Attention over all keys from attention over parts of them, folded from the first part to the
 * last. A part with lse -inf or +inf is empty: it adds nothing, whatever its out holds. All parts
 * empty: out is zeros, lse -inf. Give sinks to one part only. out.tokens * num_heads is at most 2^32.
 *
 * out may be the out of a part, with the same data, dtype and strides; lse may be the lse of a part,
 * with the same data and strides. Apart from that, out and lse share no byte with each other or with
 * a part, by the rules of folio_tensors.
 */
FOLIO_API folio_status folio_state_merge(folio_context *ctx, const folio_merge *merge,
                                          const folio_run *run);

/**
 * Write the additive matrix [num_heads][query_len][key_len] that ALiBi, window and causality of one
 * sequence amount to: 0 or -slope * distance where the key is seen, -inf where not. For inspection
 * and tests; kernels never create this matrix. slopes may be NULL. capacity: floats in out.
 * ERR_UNSUPPORTED: slopes or a window in cross attention. attention and batch may come from different
 * contexts.
 */
FOLIO_API folio_status folio_bias_write(const folio_attention *attention, const folio_batch *batch,
                                        folio_attention_type type, int64_t seq, const float *slopes,
                                        float *out, int64_t capacity);

/* ---------------------------------------------------------------------------------------------- */
/* Backends                                                                                        */
/* ---------------------------------------------------------------------------------------------- */

/** One row of the feature table. */
typedef struct folio_feature {
    const char *name;    /* a stable identifier, such as "sliding_window" */
    const char *summary; /* one line for people                         */
    int32_t supported;
    const char *reason; /* why not; "" where supported                  */
} folio_feature;

typedef struct folio_backend_info {
    size_t struct_size;
    const char *name;
    int32_t available;
    const char *reason; /* why not available; "" where it is                                */
    const char *device; /* the device's name                                                */
    const char *const *levels; /* [num_levels] instruction-set levels built in, lowest first */
    int32_t num_levels;
    const char *level;           /* the one a context gets by default. "": not available,   */
                                 /* or the environment variable FOLIO_CPU names no level    */
    const folio_layout *layouts; /* [num_layouts] that it reads without conversion          */
    int32_t num_layouts;
    const folio_feature *features; /* [num_features] of this version, available or not; the same  */
                                   /* rows for every backend                                     */
    int32_t num_features;
    int32_t graph; /* 1: it supports FOLIO_PLAN_GRAPH */
    int32_t max_head_size;
} folio_backend_info;

/** Backends known to this build, best first, reference last; also those not available here. */
FOLIO_API int32_t folio_backend_count(void);
/** NULL where index is outside [0, count). Loads nothing. */
FOLIO_API const char *folio_backend_name(int32_t index);
/** All about one backend, by name. Needs no device; "cuda" loads its library. Pointers stay
 * valid until the process ends. */
FOLIO_API folio_status folio_backend_get_info(const char *name, folio_backend_info *info);

/** An attention kernel, and a case that plans choose it for. */
typedef struct folio_context_kernel {
    size_t struct_size;
    const char *name;     /* as in folio_plan_info.kernel; lives as long as the context       */
    folio_dtype dtype;    /* of q                                                             */
    folio_dtype kv_dtype; /* of the cache                                                     */
    int32_t head_size;    /* of K                                                             */
    folio_layout layout;  /* of the cache                                                     */
    int32_t min_rows;     /* smallest query_len * num_heads / num_kv_heads of a sequence       */
    int32_t max_rows;     /* largest; 0: no limit                                             */
    int32_t v_head_size;  /* of V                                                             */
    int32_t v_in_k;       /* 1: V is the first numbers of K: latent attention                 */
    float soft_cap;       /* of the attention; 0: none                                        */
    int32_t block_size;   /* of the cache                                                     */
} folio_context_kernel;

/** Kernel `index` in [0, folio_context_info.num_kernels) of a context's backend, level and device. A
 * plan chooses it for DECODER attention of this case.
 * @return FOLIO_OK; ERR_ARGUMENT. */
FOLIO_API folio_status folio_context_get_kernel(const folio_context *ctx, int32_t index,
                                                folio_context_kernel *info);

/**
 * Can a backend run this attention as these types (a set of FOLIO_ATTENTION_BIT, not empty) over such
 * a cache (NULL: without one)? `reasons` has room for `size` bytes; the text is cut there and always
 * terminated. It may be NULL with size 0. With backend "auto" (or NULL), every candidate gives its
 * reasons.
 * @return FOLIO_OK: `reasons` is "". ERR_UNSUPPORTED: `reasons` has every reason, one per line.
 * ERR_ARGUMENT (an unknown backend; a description or a set of types that no backend accepts):
 * `reasons` is not written.
 */
FOLIO_API folio_status folio_backend_supports(const char *backend,
                                              const folio_attention_desc *attention, uint32_t types,
                                              const folio_kv_cache_desc *cache, char *reasons,
                                              size_t size);

#ifdef __cplusplus
}
#endif

#endif /* FOLIO_FOLIO_H */
