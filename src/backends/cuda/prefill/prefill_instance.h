/*
 * prefill_instance.h: what a block of the prefill kernel is given, an instance's sizes, and its shared memory:
 *
 *   Q [rows][DK] | K, V of key tile t | K, V of key tile t + 1 | what each row sees
 *
 * Rows of 16-byte chunks are swizzled, chunk c of row r lying at c ^ (r % 8), so that ldmatrix meets no bank twice.
 */
#ifndef FOLIOI_CUDA_PREFILL_INSTANCE_H
#define FOLIOI_CUDA_PREFILL_INSTANCE_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/instructions.h"
#include "backends/cuda/step/prefill_list.h"

#include <type_traits>

struct prefill_args {
    folioi_cuda_layer layer;
    folioi_cuda_step step;
    const folioi_prefill_head *head;
    const folioi_prefill_item *items;
    /* the workspace: prefill_parts.h */
    int32_t *counters;
    float *part_out, *part_lse;
    int32_t room;   /* of the list                                 */
    int32_t units;  /* of an item: what a block computes at a time */
    int32_t enough; /* tiles that keep all multiprocessors busy while the longest are computed */
    int32_t heads_per_kv; /* query heads of one kv head           */
    int32_t heads;        /* of them, those of one tile           */
    int32_t pieces;       /* that a tile of the list is computed in */
    int32_t queries;      /* of one piece                         */
    int32_t head_slices;  /* tiles a head group needs                  */
    int32_t value_slices; /* tiles the numbers of a V row need    */
    int32_t aligned;      /* rows may be copied in 16-byte chunks, 8-bit ones in chunks of 8 */
    int32_t is_direct;    /* aligned, and K and V are of 16 bits: they need no widening */
    int32_t xpacked;      /* V lies by dims                       */
    int32_t k_by_dims;    /* and K too                            */
    int32_t k_step;       /* bytes between 16-byte units of a row of K, but in pages */
};

/* What a block computes: an item for one kv head, or a piece of that. */
struct prefill_work {
    int32_t seq, first_query, past_query;
    int32_t kv_head;
    int32_t first_head, num_heads; /* query heads */
    int32_t first_value;           /* of V's dims */
    int32_t unit;
    int32_t part, num_parts, store, counter; /* as the item has them */
    int32_t tile_query, tile_rows;           /* its first query; its rows of one kv head */
    int32_t begin, end;                      /* keys of the item that any row sees */
    int32_t all_begin, all_end;              /* keys of it that all rows see       */
};

/* ---- instances ---- */

/* K and V of an instance: numbers like q's, of 16 bits or f32, or known 8-bit ones, which become f16 on their way to the tensor cores. */
enum prefill_kv { KV_WIDE, KV_E4M3, KV_E5M2, KV_INT8 };

/* What a row of the tile sees. */
struct fixed_row {
    folioi_range seen;
};

struct byte_row {
    folioi_range seen;
    float
        unit; /* a power of two, q is that many times what shared memory holds; times K's own scale of the kv head */
};

struct flexible_row {
    folioi_range seen;
    int64_t own;  /* the key at the row's own position */
    int64_t bias; /* bias of key 0                     */
    float slope;
};

/* Instances ONCE run on sm_90 only: on sm_80 and sm_100 they spill registers (nvcc 13.0). */
#define PREFILL_HAS_ONCE(capability) ((capability) / 10 == 9)

/* Not below sm_90: on sm_86 and sm_89 they spill registers (nvcc 13.0). */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PREFILL_XPACKED_TEAMS false
#else
#define PREFILL_XPACKED_TEAMS true
#endif

/*
 * One instance: T of the products, or f32; head sizes up to DK and DV; FIXED: keys of just that size, no option on scores; else flexible: everything. q and out
 * are of type T too, but with 8-bit keys T is f16 and they may be of either type.
 */
template <typename T_, int DK_, int DV_, int WARPS_, int M_TILES_, int KEYS_, int BLOCKS_,
          bool FIXED_, bool XPACKED_ = false, prefill_kv KV_ = KV_WIDE, bool ONCE_ = false>
struct prefill_instance {
    using T = T_;
    static constexpr int DK = DK_, DV = DV_, WARPS = WARPS_, M_TILES = M_TILES_, KEYS = KEYS_;
    static constexpr int TILE_KEYS = KEYS; /* of all the tile, in a part of it too */
    static constexpr int BLOCKS = BLOCKS_; /* of one multiprocessor */
    static constexpr bool FIXED = FIXED_;
    static constexpr bool XPACKED = XPACKED_; /* a fixed one's cache; flexible ones take any */
    static constexpr prefill_kv KV = KV_;
    /* a block computes one whole tile: for steps that fill the device; else one item after another, of which some are parts */
    static constexpr bool ONCE = ONCE_;
    static constexpr bool F32 = std::is_same<T, float>::value; /* prefill_f32.h */
    static constexpr int Q_SIZE = sizeof(T), KV_SIZE = KV == KV_WIDE ? Q_SIZE : 1;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int WARP_ROWS = M_TILES * 16, ROWS = WARPS * WARP_ROWS;
    /* keys a warp fetches: K by its first lanes, V by the next */
    static constexpr int SHARE = KEYS / WARPS;
    static constexpr int K_ROW = DK * KV_SIZE, V_ROW = DV * KV_SIZE; /* bytes */
    static constexpr int K_BYTES = KEYS * K_ROW, STAGE_BYTES = KEYS * (K_ROW + V_ROW);
    static constexpr int Q_BYTES = ROWS * DK * Q_SIZE;
    /* one stage, V coming while K is used and K while V is: two blocks of large heads leave no room for two */
    static constexpr bool SPLIT = FIXED && KV == KV_WIDE && DK > 128 && BLOCKS > 1 && KEYS > 32;
    /* between scores, sums wait in shared memory: widening takes the registers */
    static constexpr bool PARKS = M_TILES > 1 && (KV != KV_WIDE || (DK > 64 && !ONCE));
    /* few rows: warps share them, each computing keys of its own */
    static constexpr bool TEAMS = !ONCE && FIXED && KV == KV_WIDE && DK == 128 && WARPS == 4 &&
                                  KEYS == 64 && (!XPACKED || PREFILL_XPACKED_TEAMS);
    using row = typename std::conditional<
        !FIXED, flexible_row,
        typename std::conditional<KV == KV_WIDE, fixed_row, byte_row>::type>::type;
    struct shared {
        char q[Q_BYTES];
        char kv[SPLIT ? 1 : 2][STAGE_BYTES];
        row rows[ROWS];
        float k_scales[FIXED ? 1 : KEYS];                          /* of widened keys */
        alignas(16) float scales[2][KV == KV_INT8 ? 2 * KEYS : 4]; /* of a stage: K's, then V's */
        float parked[PARKS ? 4 * M_TILES : 1][PARKS ? THREADS : 1];
        int32_t tile[THREADS];   /* the key tile at hand */
        int32_t blocks[THREADS]; /* of the next key tile: each thread's */
        folioi_cuda_seq seq;
        prefill_work work;           /* here, registers being few */
        int32_t number, next, total; /* of the unit of work, of the one after it; of all */
        int32_t chunk;               /* of rows to merge                   */
        int32_t first_row[WARPS];    /* of each warp                       */
    };
    static_assert(DK % 64 == 0 && DV % 64 == 0, "head sizes are multiples of 64");
    static_assert(DV <= DK, "the head size of V is at most K's");
    static_assert(KEYS <= 64 && SHARE * 2 <= 32, "a tile has at most 64 keys, a warp fetches 16");
    static_assert(M_TILES <= 2, "a warp has at most two row tiles");
    static_assert((FIXED && !XPACKED) || (SHARE % 8 == 0 && !SPLIT),
                  "units of 8 keys are transposed");
};

/* The first keys of a key tile, for edges. */
template <class I, int KEYS_> struct short_tile : I {
    static constexpr int KEYS = KEYS_;
};

template <class I, int M> using prefill_scores = float[M][I::KEYS / 8][4];

/* What M row tiles of a warp have come to. */
template <int DV, int M> struct prefill_state {
    float out[M][DV / 8][4];
    float largest[M][2], sum[M][2]; /* of rows l / 4 and l / 4 + 8; sums of this lane's keys */
    int32_t value_log2;             /* int8: out is in units of 2^value_log2 */
};

/* ---- places ---- */

/* The thread's number, anew: what follows from it is computed where it is used and takes no registers across key tiles. */
static __device__ __forceinline__ int fresh_thread(void)
{
    int thread = (int)threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

static __device__ __forceinline__ int fresh_lane(void)
{
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    return lane;
}

/* The warp's number. */
static __device__ __forceinline__ int fresh_warp(void) { return fresh_thread() >> 5; }

/* The key tile at hand and the warp's first row: there is no register for them where a block computes item after item. */
struct at_hand {
    int32_t tile, row0;
};

template <class I>
static __device__ __forceinline__ int32_t tile_of(const at_hand &h, typename I::shared &sh)
{
    if constexpr (I::ONCE) return h.tile;
    else return sh.tile[fresh_thread()];
}

template <class I>
static __device__ __forceinline__ int32_t row_of(const at_hand &h, typename I::shared &sh)
{
    if constexpr (I::ONCE) return h.row0;
    else return sh.first_row[fresh_warp()];
}

/* Where a 16-byte chunk of a row is; 8 rows' chunks are in 8 different places of 128 bytes. */
template <int ROW_BYTES> static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk)
{
    int swizzle = ROW_BYTES == 64 ? row >> 1 & 3 : row & 7;
    return (uint32_t)(row * ROW_BYTES + ((chunk ^ swizzle) << 4));
}

/* Another chunk of the row in which a lane's ldmatrix reads, `at` being that of chunk 0 in a row of whole 128 bytes, or 64. */
static __device__ __forceinline__ uint32_t swizzled(uint32_t at, int chunk)
{
    return (at ^ (uint32_t)(chunk % 8 << 4)) + (uint32_t)(chunk / 8 << 7);
}

/* Sizes are mostly powers of two, and a division is slow. */
static __device__ __forceinline__ int32_t divide(int32_t x, int32_t size)
{
    return (size & (size - 1)) == 0 ? x >> (__ffs(size) - 1) : x / size;
}

/* A row of the tile among the sequence's. */
struct row_place {
    int32_t query, head; /* query < 0: no row */
};

static __device__ __forceinline__ row_place place_of(const prefill_args &a, const prefill_work &w,
                                                     int row)
{
    int32_t in_tile = divide(row, a.heads), head = row - in_tile * a.heads;
    int32_t query = w.first_query + in_tile;
    bool is_row = query < w.past_query && head < w.num_heads;
    return {is_row ? query : -1, w.first_head + head};
}

static __device__ __forceinline__ int64_t row_index(const folioi_cuda_rows &r, int64_t row,
                                                    int32_t head)
{
    return row * r.token + (int64_t)head * r.head;
}

#endif
