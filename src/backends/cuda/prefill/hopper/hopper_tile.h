/*
 * hopper_tile.h: what the wgmma kernel is given, an instance's sizes, its tiles, and its shared memory:
 *
 *   stages of K and V, pages of 16 tokens each | Q | 8-bit K and V as stored | tiles and barriers
 *
 * A tile is an item of the list (prefill_list.h) for one kv head: row r is query r / heads and head r % heads of it, 64 rows for
 * each warpgroup that computes. Its keys are taken from the end, a stage at a time.
 */
#ifndef FOLIOI_CUDA_HOPPER_TILE_H
#define FOLIOI_CUDA_HOPPER_TILE_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/prefill/hopper/wgmma.h"
#include "backends/cuda/step/prefill_list.h"
#include "backends/cuda/stored_rows.h"
#include "backends/cuda/warp.h"

#include <type_traits>

enum {
    WARPGROUP_ROWS = 64, /* of a tile, those of a warpgroup */
    MAX_ROWS = 3 * WARPGROUP_ROWS,
    TILES_AHEAD = 3, /* a tile's place is another's when it has been stored */
    PAGE_KEYS = 16,
    PANEL_BYTES = 8 * 128, /* 64 numbers of 8 tokens */
    ZERO_BYTES = 8192,     /* that may be copied in place of keys */
};

/*
 * One instance: the type of q, K and V; their head sizes, multiples of 16; warpgroups that compute; keys of a stage; stages.
 * HOLDS_Q: q is in registers, else products read it from shared memory. SPLIT: K and V have stages of their own, each
 * awaited and given back by itself. FROM_ROWS: the cache has contiguous rows, else native pages. OPTIONS: scores have a soft
 * cap, ALiBi or both. KV: the type of K and V, if they have 8 bits: a further warpgroup widens them to T.
 */
template <typename T_, int DK_, int DV_, int WARPGROUPS_, int KEYS_, int STAGES_, bool HOLDS_Q_,
          bool SPLIT_, bool FROM_ROWS_, bool OPTIONS_, int KV_ = 0>
struct hopper_instance {
    using T = T_;
    static constexpr int KV = KV_;
    static constexpr bool BYTES = KV != 0, INT8 = KV == FOLIO_INT8, FP8 = BYTES && !INT8;
    /* weights and V as products take them: fp8 is exact in f16, which takes fewer instructions */
    using W = typename std::conditional<FP8, __half, T>::type;
    static constexpr int DK = DK_, DV = DV_, WARPGROUPS = WARPGROUPS_, KEYS = KEYS_,
                         STAGES = STAGES_;
    static constexpr bool HOLDS_Q = HOLDS_Q_, SPLIT = SPLIT_, FROM_ROWS = FROM_ROWS_,
                          OPTIONS = OPTIONS_;
    static constexpr int ROWS = WARPGROUPS * WARPGROUP_ROWS;
    static constexpr int ALL_WARPGROUPS = WARPGROUPS + 1 + BYTES, THREADS = ALL_WARPGROUPS * 128;
    static constexpr int WARPS = WARPGROUPS * 4; /* that compute */
    static constexpr int PAGES = KEYS / PAGE_KEYS;
    /* a tile's last keys become weights in steps of so many, and are copied and multiplied by halves of a stage */
    static constexpr bool EARLY = KEYS == 128;
    static constexpr int STEP_KEYS = KEYS % 32 == 0 ? 32 : 16;
    /* numbers of a panel (matrix_at), 16 of them the steps of a product, and bytes from 8 tokens of a panel to the next */
    static constexpr int PANEL = (DK | DV) % 64 == 0 ? 64 : (DK | DV) % 32 == 0 ? 32 : 16;
    static constexpr int PANEL_STEPS = PANEL / 16, PANEL_STEP = 8 * PANEL * 2;
    static constexpr int K_BYTES = 8 * DK * 2, V_BYTES = 8 * DV * 2; /* of 8 tokens */
    static constexpr int HALF_BYTES = K_BYTES + V_BYTES, PAGE_BYTES = 2 * HALF_BYTES;
    static constexpr int KV_BYTES = PAGES * PAGE_BYTES * STAGES;
    /* in shared memory: from 8 tokens to the next, from a stage to the next, and where V's begin */
    static constexpr bool BOXES =
        SPLIT || FROM_ROWS; /* K of all keys of a stage, and V, come by boxes; else whole pages */
    static constexpr int K_STEP = BOXES ? K_BYTES : HALF_BYTES;
    static constexpr int V_STEP = BOXES ? V_BYTES : HALF_BYTES;
    static constexpr int K_STAGE = SPLIT ? 2 * PAGES * K_BYTES : PAGES * PAGE_BYTES;
    static constexpr int V_STAGE = SPLIT ? 2 * PAGES * V_BYTES : PAGES * PAGE_BYTES;
    static constexpr int V_AT = SPLIT ? STAGES * K_STAGE : BOXES ? 2 * PAGES * K_BYTES : K_BYTES;
    static constexpr int Q_PANEL_BYTES = ROWS * PANEL * 2; /* of every row */
    static constexpr int Q_BYTES = DK / PANEL * Q_PANEL_BYTES;
    /* 8-bit K, or V, of a key tile as it is stored; and how many of these there are */
    static constexpr int RAW_BYTES = BYTES ? KEYS * DK : 0, RAWS = DK > 128 ? 2 : 3;
    static constexpr int SECTION_KEYS = (16 << 20) / ((DK + DV) * (BYTES ? 1 : 2));
    /*
     * Registers of a thread that computes, of one that does not and of one that widens, in steps whose tiles are whole and in
     * others. A block has as many as it was launched with: where that is too few, a warpgroup waits for registers for ever.
     */
    static constexpr int WIDENERS = BYTES ? 48 : 0, WHOLE_WIDENERS = BYTES ? 56 : 0;
    static constexpr int OTHERS = SPLIT ? 72 : BYTES ? 48 : 56, WHOLE_OTHERS = BOXES ? OTHERS : 40;
    static constexpr int REGISTERS = WARPGROUPS == 3 ? 152 : BYTES ? 208 : SPLIT ? 216 : 224;
    static constexpr int WHOLE_REGISTERS = WARPGROUPS == 3 || BOXES ? REGISTERS : BYTES ? 208 : 232;
    static constexpr int ALL_REGISTERS = ALL_WARPGROUPS * (65536 / THREADS / 8 * 8);
    static_assert(WARPGROUPS * WHOLE_REGISTERS + WHOLE_OTHERS + WHOLE_WIDENERS <= ALL_REGISTERS,
                  "there are so many");
    static_assert(WARPGROUPS * REGISTERS + OTHERS + WIDENERS <= ALL_REGISTERS, "there are so many");
    /* a tile is stored before the next one's scores, for lack of registers */
    static constexpr bool WHOLE_STORES_FIRST = DV > 128, STORES_FIRST = DK != 128;
    /* what it has: scores, sums of values, weights, q */
    using scores = float[KEYS / 2];
    using sums = float[DV / 2];
    using weights = uint32_t[KEYS / 4];
    using query = uint32_t[HOLDS_Q ? DK / 4 : 1];
    static_assert(DK % 16 == 0 && DV % 16 == 0, "products take 16 numbers at a time");
    static_assert(PANEL == 64 || FROM_ROWS, "native pages have panels of 64 numbers");
    static_assert(PAGES <= 8, "half a warp for half pages");
};

/*
 * Of a layer, what the kernel reads. Not all of it: ptxas serialises products or not by where arguments lie, so fields of
 * others must not move these.
 */
typedef struct hopper_layer {
    folioi_cuda_rows q, out;
    float *lse;
    int64_t lse_token, lse_head;
    const float *sinks;
    const char *k, *v;
    folioi_address at; /* of K, and of V from its own base */
    int64_t window_left, window_right;
    int32_t num_kv_heads, block_size;
    float scale;
} hopper_layer;

/*
 * Maps of K and V whose boxes are 16 tokens of a kv head, as they lie in a stage. Their last coordinate counts what divides the
 * strides of blocks and of kv heads: so much from a block to the next, and from a kv head to the next.
 */
typedef struct hopper_boxes {
    CUtensorMap k, v;
    int32_t k_block, k_head, v_block, v_head;
    folioi_address v_at;
} hopper_boxes;

/* What numbers of 8-bit K and V are multiplied with, as folioi_cuda_side has it. */
typedef struct hopper_bytes {
    const float *k_scales, *v_scales, *k_head_scales, *v_head_scales;
    folioi_address k_scales_at, v_scales_at;
    float k_scale, v_scale;
} hopper_bytes;

/* Options of scores: a soft cap, then ALiBi. */
typedef struct hopper_options {
    const float *slopes; /* [query heads] or NULL */
    float cap;           /* 0: none; else scores are cap * tanh(score / cap) */
    float cap_log2;      /* with log2(e) */
    float scale_of_cap;  /* of products: scale / cap */
} hopper_options;

typedef struct hopper_args {
    CUtensorMap q;    /* boxes: a panel of a tile's rows */
    float scale_log2; /* of scores, with log2(e) */
    hopper_layer layer;
    const int32_t *blocks;
    const folioi_prefill_head *head;
    folioi_prefill_head whole; /* the same, where the host knows it */
    const folioi_prefill_item *items;
    int32_t *counters; /* the first: tiles taken beside the blocks' own; zeros between launches */
    float *part_out, *part_lse;      /* of parts of tiles: prefill_parts.h */
    int32_t heads_per_kv;            /* query heads of one kv head */
    int32_t heads;                   /* of them, those of one tile */
    uint32_t inverse;                /* row / heads is row * inverse >> 16 */
    int32_t head_slices;             /* tiles a head group needs */
    int32_t queries;                 /* of a tile that is full */
    int32_t q_boxes;                 /* of its rows of q: one for each warpgroup, or one for all */
    int32_t block_pages;             /* pages of a block */
    int32_t page_shift;              /* log2 of it, or -1 */
    int32_t tile_blocks, tile_pages; /* a key tile is so many blocks and pages */
    int32_t table_len;  /* block numbers that there are at least, as far as the host knows */
    int32_t units;      /* tiles an item makes: kv heads times head_slices */
    int32_t most_shift; /* log2 of the largest power of 2 that divides it */
    uint32_t out_token, out_head; /* strides of out, in units of 16 bytes */
    hopper_options options;
    hopper_boxes boxes;
    hopper_bytes bytes;
} hopper_args;

/* How a tile's keys are gone through: key tiles from `last` down to `first`; one that sees no key has one all the same. */
typedef struct alignas(16) tile_keys {
    int32_t is_none; /* there are no more tiles */
    int32_t pages;   /* of `last` that any row sees; one at least */
    int32_t last, first;
} tile_keys;

/* Query i sees keys from first + i * step on, or up to there; both cut to the tile's range. */
typedef struct alignas(16) tile_edge {
    int32_t first, step, cut;
} tile_edge;

/* Keys that all rows of a warpgroup see. */
typedef struct common_keys {
    int32_t begin, end;
} common_keys;

/* Where its rows of out are. */
typedef struct alignas(16) tile_out {
    uint16_t *first; /* query 0, head 0 */
    int32_t num_queries, num_heads;
} tile_out;

/* A tile that was taken. Who computes waits for each of its pieces: they are loaded whole. */
template <int WARPGROUPS> struct hopper_tile {
    tile_keys keys;
    tile_edge begins, ends;
    tile_out out;
    common_keys common[WARPGROUPS];
    int32_t is_ragged; /* some of its rows are none */
    int32_t first_query, kv_head, first_head;
    int32_t part, num_parts, store, counter, unit; /* as the item has them: prefill_parts.h */
    int32_t key_len;                               /* of the sequence */
    int32_t own;              /* where the first query stands among the keys; for options alone */
    int64_t query_row, table; /* of the tile's first query; of the sequence, its block table */
};

/* A tile of 8-bit K and V: what its scores, and its sums of values, are multiplied with. */
template <int WARPGROUPS> struct hopper_byte_tile : hopper_tile<WARPGROUPS> {
    float scale_log2, value_scale;
};

template <class I>
using tile_of = typename std::conditional<I::BYTES, hopper_byte_tile<I::WARPGROUPS>,
                                          hopper_tile<I::WARPGROUPS>>::type;

/* Of 8-bit K and V: those that are as stored, with int8's scales, and what scores of a stage's keys are multiplied with. */
template <class I, bool BYTES> struct raw_shared {
};
template <class I> struct raw_shared<I, true> {
    uint64_t raw_filled[I::RAWS], raw_emptied[I::RAWS];
    float raw_scales[I::INT8 ? I::RAWS : 1][I::KEYS], key_scales[I::INT8 ? I::STAGES : 1][I::KEYS];
};

template <class I> struct hopper_shared : raw_shared<I, I::BYTES> {
    tile_of<I> tiles[TILES_AHEAD]; /* used alternately */
    uint64_t filled[I::STAGES],
        emptied[I::STAGES + I::SPLIT]; /* the last of SPLIT: given back when there are no more */
    uint64_t q_filled[I::WARPGROUPS], q_emptied[I::WARPGROUPS];
    uint64_t tile_filled[TILES_AHEAD], tile_stored[TILES_AHEAD], tile_emptied[TILES_AHEAD];
    uint64_t v_filled[I::STAGES], v_emptied[I::STAGES]; /* where V has stages of its own */
};

template <class I>
constexpr int SHARED_BYTES = I::KV_BYTES + I::Q_BYTES + I::RAWS *I::RAW_BYTES +
                             (int)sizeof(hopper_shared<I>);

/* Shared memory, at a multiple of 1 KB: the place of a row's units follows from its address. */
template <class I> struct hopper_memory {
    char *base;
    __device__ __forceinline__ uint32_t kv() const { return shared_address(base); }
    __device__ __forceinline__ uint32_t q() const { return kv() + I::KV_BYTES; }
    __device__ __forceinline__ uint32_t raw() const { return q() + I::Q_BYTES; }
    __device__ __forceinline__ hopper_shared<I> &sh() const
    {
        return *(hopper_shared<I> *)(base + I::KV_BYTES + I::Q_BYTES + I::RAWS * I::RAW_BYTES);
    }
};

/* A place in the ring of stages, and which time around it is. */
template <int STAGES> struct stage_at {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void step()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

/* A place in the ring of tiles, and which time around it is; `odd`: of q, whose place is another's with each tile. */
struct tile_at {
    int place;
    uint32_t phase, odd;
    __device__ __forceinline__ void step()
    {
        if (++place == TILES_AHEAD) place = 0, phase ^= 1;
        odd ^= 1;
    }
};

/*
 * The order of tiles: item after item, the longest first, each for a few units, 2^shift of them: K and V that tiles read
 * together should stay in L2, 16 MB of them. Where all tiles are computed at once, an item is for all units. What is here and
 * in find_tile is run once before anything is computed, from code that no cache has: nothing is divided.
 */
struct tile_order {
    int32_t num_items, shift;
    int32_t first_unit, begin; /* the section at hand: its units, its first tile's number */

    __device__ __forceinline__ tile_order(const hopper_args &a, const folioi_prefill_head &head,
                                          int32_t section_keys)
        : num_items(head.num_items), shift(a.most_shift), first_unit(0), begin(0)
    {
        bool at_once = num_items * a.units <= (int32_t)gridDim.x;
        while (shift > 0 && !at_once && head.num_keys > section_keys >> shift) shift--;
    }

    /* Numbers grow. */
    __device__ __forceinline__ void go_to(int32_t n)
    {
        for (; n - begin >= num_items << shift; begin += num_items << shift)
            first_unit += 1 << shift;
    }

    __device__ __forceinline__ int32_t item(int32_t n) const { return (n - begin) >> shift; }
    __device__ __forceinline__ int32_t unit(int32_t n) const
    {
        return first_unit + ((n - begin) & ((1 << shift) - 1));
    }
};

/* What seq_keys says of all queries of a tile; far beyond all keys is as good as anywhere there. */
static __device__ __forceinline__ int32_t cut_far(int64_t key)
{
    return (int32_t)max((int64_t)(INT32_MIN + MAX_ROWS), min(key, (int64_t)(INT32_MAX - MAX_ROWS)));
}

/* Keys of the tile that its query i sees: none where they end before they begin. */
static __device__ __forceinline__ int32_t begin_of(const tile_edge &e, int32_t i)
{
    return max(e.first + i * e.step, e.cut);
}

static __device__ __forceinline__ int32_t end_of(const tile_edge &e, int32_t i)
{
    return min(e.first + i * e.step, e.cut);
}

template <int WARPGROUPS>
static __device__ __forceinline__ folioi_range keys_of(const hopper_tile<WARPGROUPS> &t, int32_t i)
{
    return {begin_of(t.begins, i), end_of(t.ends, i)};
}

/* Keys [begin, end) of the tile: those that any row sees, and which. WHOLE: there is no window. */
template <class I, bool WHOLE>
static __device__ __forceinline__ void set_keys(const hopper_args &a, tile_of<I> &t,
                                                const folioi_cuda_seq &s, int32_t begin,
                                                int32_t end)
{
    int64_t left = WHOLE ? -1 : a.layer.window_left, right = WHOLE ? -1 : a.layer.window_right;
    int64_t own = s.first_query_pos + t.first_query - s.first_key_pos;
    if (I::OPTIONS) t.own = (int32_t)max(min(own, (int64_t)1 << 30), -((int64_t)1 << 30));
    t.begins = {left < 0 ? 0 : cut_far(own - left), left >= 0, begin};
    t.ends = {s.causal    ? cut_far(own + 1)
              : right < 0 ? s.key_len
                          : cut_far(own + right + 1),
              s.causal || right >= 0, end};
    int32_t last = end > begin ? (end - 1) / I::KEYS : 0;
    int32_t pages = (max(end - last * I::KEYS, 1) + PAGE_KEYS - 1) / PAGE_KEYS;
    t.keys = {0, pages, last, end > begin ? begin / I::KEYS : 0};
    for (uint32_t i = 0; i < I::WARPGROUPS; i++) { /* later rows see later keys */
        uint32_t row = i * WARPGROUP_ROWS;
        t.common[i] = {begin_of(t.begins, (row + WARPGROUP_ROWS - 1) * a.inverse >> 16),
                       end_of(t.ends, row * a.inverse >> 16)};
    }
}

/* 16 bytes at a time. */
static __device__ __forceinline__ folioi_prefill_item load_item(const folioi_prefill_item *from)
{
    static_assert(sizeof(folioi_prefill_item) % 16 == 0, "whole loads");
    union {
        folioi_prefill_item item;
        uint4 words[sizeof(folioi_prefill_item) / 16];
    } x;
#pragma unroll
    for (int i = 0; i < (int)sizeof x / 16; i++) x.words[i] = ((const uint4 *)from)[i];
    return x.item;
}

/* Tile number n of all. */
template <class I, bool WHOLE>
static __device__ __forceinline__ void find_tile(const hopper_args &a, tile_order &order, int32_t n,
                                                 tile_of<I> &t)
{
    order.go_to(n);
    int32_t unit = order.unit(n), kv_head = unit, head_slice = 0;
    const folioi_prefill_item item = load_item(a.items + order.item(n));
    if (a.head_slices > 1)
        kv_head = unit / a.head_slices, head_slice = unit - kv_head * a.head_slices;
    const folioi_cuda_rows &out = a.layer.out;
    t.first_query = item.first_query;
    t.query_row = item.sequence.query_row + item.first_query;
    t.table = item.sequence.table;
    t.key_len = item.sequence.key_len;
    t.kv_head = kv_head;
    t.first_head = kv_head * a.heads_per_kv + head_slice * a.heads;
    t.out = {(uint16_t *)out.data + t.query_row * out.token + t.first_head * out.head,
             item.num_queries, min(a.heads, a.heads_per_kv - head_slice * a.heads)};
    t.is_ragged = item.num_queries * t.out.num_heads < I::ROWS;
    t.part = item.part;
    t.num_parts = item.num_parts;
    t.store = item.store;
    t.counter = item.counter;
    t.unit = unit;
    if constexpr (I::FP8) {
        const hopper_bytes &b = a.bytes;
        t.scale_log2 = a.scale_log2 * head_scale(b.k_head_scales, b.k_scale, kv_head);
        t.value_scale = head_scale(b.v_head_scales, b.v_scale, kv_head);
    }
    set_keys<I, WHOLE>(a, t, item.sequence, item.begin, item.end);
}

/* A row's query and head, counted from the tile's first ones. */
struct row_place {
    int32_t query, head;
};

static __device__ __forceinline__ row_place place_of(const hopper_args &a, int row)
{
    int32_t query = (int32_t)((uint32_t)row * a.inverse >> 16);
    return {query, row - query * a.heads};
}

static __device__ __forceinline__ bool is_row(const tile_out &out, row_place p)
{
    return p.query < out.num_queries && p.head < out.num_heads;
}

#endif
