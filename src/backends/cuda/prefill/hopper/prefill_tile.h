/*
 * prefill_tile.h: what the wgmma kernel is given, its tiles, and its shared memory:
 *
 *   three stages of K and V, 8 pages of 16 tokens each | Q | tiles and barriers
 *
 * A tile is an item of the list (prefill_list.h) for one kv head: 128 rows, row r being query r / heads and head r % heads of
 * it, 64 for each of two warpgroups. Its keys are taken from the end, 128 at a time at multiples of 128.
 */
#ifndef FOLIOI_CUDA_HOPPER_TILE_H
#define FOLIOI_CUDA_HOPPER_TILE_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/prefill/hopper/wgmma.h"
#include "backends/cuda/step/prefill_list.h"
#include "backends/cuda/stored_rows.h"
#include "backends/cuda/warp.h"

enum {
    DIMS = 128,
    KEYS = 128,      /* of a stage */
    ROWS = 128,      /* of a tile */
    GROUP_ROWS = 64, /* of a warpgroup */
    STAGES = 3,
    TILES_AHEAD = 3, /* a tile's place is another's when it has been stored */
    PAGE_KEYS = 16,
    PAGE_BYTES = PAGE_KEYS * DIMS * 2 * 2, /* K and V */
    HALF_BYTES = PAGE_BYTES / 2,           /* of 8 tokens: K, then V */
    PANEL_BYTES = 8 * 128,
    STAGE_BYTES = KEYS / PAGE_KEYS * PAGE_BYTES,
    Q_PANEL_BYTES = ROWS * 128, /* 64 numbers of every row */
    Q_BYTES = 2 * Q_PANEL_BYTES,
    THREADS = 3 * 128,
};

typedef struct hopper_args {
    CUtensorMap q; /* boxes: half the numbers of a tile's rows */
    folioi_cuda_layer layer;
    const int32_t *blocks;
    const folioi_prefill_head *head;
    const folioi_prefill_item *items;
    int32_t *counters; /* the first: tiles taken beside the blocks' own; zeros between launches */
    float *part_out, *part_lse; /* of parts of tiles: prefill_parts.h */
    int32_t group;              /* query heads of one kv head */
    int32_t heads;              /* of them, those of one tile */
    uint32_t inverse;           /* row / heads is row * inverse >> 16 */
    int32_t head_parts;         /* tiles a group needs */
    int32_t queries;            /* of a tile that is full */
    int32_t block_pages;        /* pages of a block */
    int32_t units;              /* tiles an item makes: kv heads times head_parts */
    float scale_log2;           /* of scores, with log2(e) */
} hopper_args;

/* A tile that was taken. */
typedef struct hopper_tile {
    int32_t is_none; /* there are no more */
    int32_t first_query, past_query;
    int32_t kv_head, first_head, num_heads;
    int32_t begin, end;              /* keys that any row sees */
    int32_t first_begin, begin_step; /* query i of it sees from first_begin + i * begin_step on, */
    int32_t first_end, end_step; /* to first_end + i * end_step, both cut to [begin, end)      */
    int32_t is_ragged;           /* some of its rows are none */
    int32_t part, num_parts, store, counter, unit; /* as the item has them: prefill_parts.h */
    folioi_cuda_seq sequence;
} hopper_tile;

typedef struct hopper_shared {
    hopper_tile tiles[TILES_AHEAD]; /* in turns */
    uint64_t filled[STAGES], emptied[STAGES];
    uint64_t q_filled, q_emptied;
    uint64_t tile_filled[TILES_AHEAD], tile_emptied[TILES_AHEAD];
} hopper_shared;

enum { SHARED_BYTES = STAGES * STAGE_BYTES + Q_BYTES + (int)sizeof(hopper_shared) };
static_assert(SHARED_BYTES <= 227 * 1024, "it fits a multiprocessor");

/* Shared memory, at a multiple of 1 KB: the place of a row's units follows from its address. */
struct hopper_memory {
    char *base;
    __device__ __forceinline__ uint32_t kv() const { return shared_address(base); }
    __device__ __forceinline__ uint32_t q() const { return kv() + STAGES * STAGE_BYTES; }
    __device__ __forceinline__ hopper_shared &sh() const
    {
        return *(hopper_shared *)(base + STAGES * STAGE_BYTES + Q_BYTES);
    }
};

/* A place in the ring of stages, and which time around it is. */
struct stage_at {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void step()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

/* Key tiles of a tile, from `last` down to `first`; one that sees no key has one all the same. */
static __device__ __forceinline__ int32_t last_keys(const hopper_tile &t)
{
    return t.end > t.begin ? (t.end - 1) / KEYS : 0;
}

static __device__ __forceinline__ int32_t first_keys(const hopper_tile &t)
{
    return t.end > t.begin ? t.begin / KEYS : 0;
}

/* Do the last keys fit in half a stage? */
static __device__ __forceinline__ bool ends_early(const hopper_tile &t)
{
    return t.end <= last_keys(t) * KEYS + KEYS / 2;
}

/*
 * The order of tiles: item after item, the longest first, each for a few units: K and V that tiles read together should stay
 * in L2.
 */
enum { SECTION_KEYS = (16 << 20) / (DIMS * 4) }; /* of one unit: 16 MB */

struct tile_order {
    int32_t num_items, at_once;
};

static __device__ __forceinline__ tile_order order_of(const hopper_args &a)
{
    folioi_prefill_head head = *a.head;
    return {head.num_items, max(1, min(SECTION_KEYS / max(head.num_keys, 1), a.units))};
}

/* What seq_keys says of all queries of a tile; far beyond all keys is as good as anywhere there. */
static __device__ __forceinline__ int32_t cut_far(int64_t key)
{
    return (int32_t)max((int64_t)(INT32_MIN + ROWS), min(key, (int64_t)(INT32_MAX - ROWS)));
}

static __device__ __forceinline__ void set_ranges(hopper_tile &t, int64_t left, int64_t right)
{
    const folioi_cuda_seq &s = t.sequence;
    int64_t own = s.first_query_pos + t.first_query - s.first_key_pos;
    t.begin_step = left >= 0;
    t.end_step = s.causal || right >= 0;
    t.first_begin = left < 0 ? 0 : cut_far(own - left);
    t.first_end = s.causal ? cut_far(own + 1) : right < 0 ? s.key_len : cut_far(own + right + 1);
}

/* Keys of the tile that its query i sees: none where they end before they begin. */
static __device__ __forceinline__ folioi_range keys_of(const hopper_tile &t, int32_t i)
{
    int32_t end = min(t.first_end + i * t.end_step, t.end);
    return {max(t.begin, t.first_begin + i * t.begin_step), end};
}

/* Tile number n of all: which item, and which kv head of it. */
static __device__ __forceinline__ void find_tile(const hopper_args &a, const tile_order &order,
                                                 int32_t n, hopper_tile &t)
{
    int32_t first = n / (order.num_items * order.at_once) * order.at_once;
    int32_t in_round = n - order.num_items * first;
    int32_t together = min(order.at_once, a.units - first), at = in_round / together;
    int32_t unit = first + in_round - at * together, head_part = unit % a.head_parts;
    const folioi_prefill_item item = a.items[at];
    t.first_query = item.first_query;
    t.past_query = item.first_query + item.num_queries;
    t.kv_head = unit / a.head_parts;
    t.first_head = t.kv_head * a.group + head_part * a.heads;
    t.num_heads = min(a.heads, a.group - head_part * a.heads);
    t.begin = item.begin;
    t.end = item.end;
    t.is_ragged = item.num_queries * t.num_heads < ROWS;
    t.part = item.part;
    t.num_parts = item.num_parts;
    t.store = item.store;
    t.counter = item.counter;
    t.unit = unit;
    t.sequence = item.sequence;
    set_ranges(t, a.layer.window_left, a.layer.window_right);
}

/* Row `row` of the tile among the sequence's. query < 0: there is none. */
struct row_place {
    int32_t query, head;
};

static __device__ __forceinline__ row_place place_of(const hopper_args &a, const hopper_tile &t,
                                                     int row)
{
    int32_t in_tile = (int32_t)((uint32_t)row * a.inverse >> 16), head = row - in_tile * a.heads;
    int32_t query = t.first_query + in_tile;
    bool is_row = query < t.past_query && head < t.num_heads;
    return {is_row ? query : -1, t.first_head + head};
}

#endif
