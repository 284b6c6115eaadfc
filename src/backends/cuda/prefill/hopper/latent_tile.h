/*
 * latent_tile.h: what the wgmma kernel of latent attention is given, its tiles, and its shared memory:
 *
 *   64 rows of q | two buffers, each 64 keys of 576 numbers | tiles, barriers, sums
 *
 * A tile is an item of the list (prefill_list.h) for up to 64 heads of one kv head: row r is query r / heads and head
 * r % heads of it. Its keys are taken 64 at a time at multiples of 64. V is the first 512 numbers of K: two warpgroups
 * have half of them each, for all 64 rows.
 *
 *   a buffer, as native pages lie: [keys / 8][9 panels of 64 numbers][8 keys][128 bytes]
 */
#ifndef FOLIOI_CUDA_LATENT_TILE_H
#define FOLIOI_CUDA_LATENT_TILE_H

#include "backends/cuda/prefill/hopper/hopper_tile.h"

enum {
    LATENT_DIMS = 576,
    LATENT_VALUES = 512,
    LATENT_HALF = LATENT_VALUES / 2, /* of a warpgroup */
    LATENT_ROWS = 64,
    LATENT_WARPGROUPS = 2, /* warpgroups that compute */
    LATENT_THREADS = 3 * 128,
    LATENT_KEYS = 64, /* of a buffer */
    LATENT_PANELS = LATENT_DIMS / 64,
    LATENT_ROPE = LATENT_PANELS - 1, /* the panel that is not V: weights take its place */
    LATENT_HALF_PANELS = LATENT_HALF / 64,
    LATENT_PANEL_BYTES = 8 * 128,                           /* of 8 keys */
    LATENT_BAND_BYTES = LATENT_PANELS * LATENT_PANEL_BYTES, /* 8 keys */
    LATENT_BUFFER_BYTES = LATENT_KEYS / 8 * LATENT_BAND_BYTES,
    LATENT_Q_PANEL_BYTES = LATENT_ROWS * 128,
    LATENT_Q_BYTES = LATENT_PANELS * LATENT_Q_PANEL_BYTES,
};

/* A tile that was taken. Tiles without a key have one buffer all the same. */
typedef struct latent_tile {
    tile_edge begins, ends;
    tile_out out;
    common_keys common; /* keys that all rows see */
    int32_t first,
        num_keys; /* buffers: the first, in units of LATENT_KEYS, and how many; 0: there are no more tiles */
    int32_t seen_begin, seen_end; /* keys that some row sees; [0, 1) where there are none */
    int32_t first_query, kv_head, first_head;
    int32_t part, num_parts, store, counter, unit; /* as the item has them: latent_parts.h */
    int64_t query_row, table; /* of the tile's first query; of the sequence, its block table */
} latent_tile;

typedef struct latent_shared {
    latent_tile tiles[TILES_AHEAD];       /* used alternately */
    uint64_t filled[2][2], emptied[2][2]; /* of a buffer: halves in the order in which they come */
    uint64_t q_filled, q_emptied;
    uint64_t tile_filled[TILES_AHEAD], tile_stored[TILES_AHEAD], tile_emptied[TILES_AHEAD];
    float base[LATENT_WARPGROUPS]
              [LATENT_ROWS]; /* what weights of a warpgroup's last buffer are relative to */
    float2 sum[2][LATENT_WARPGROUPS]
              [LATENT_ROWS]; /* of a warpgroup's weights, and its base; tiles alternate */
    int32_t unit;            /* of a merge: what all warps take next */
} latent_shared;

enum {
    LATENT_SHARED_BYTES = LATENT_Q_BYTES + 2 * LATENT_BUFFER_BYTES + (int)sizeof(latent_shared)
};
static_assert(LATENT_SHARED_BYTES <= 227 * 1024, "it fits a multiprocessor");

/* Shared memory, at a multiple of 1 KB: the place of a row's units follows from its address. */
struct latent_memory {
    char *base;
    __device__ __forceinline__ uint32_t q() const { return shared_address(base); }
    __device__ __forceinline__ uint32_t buffer(int i) const
    {
        return q() + LATENT_Q_BYTES + i * LATENT_BUFFER_BYTES;
    }
    __device__ __forceinline__ char *merge() const { return base + LATENT_Q_BYTES; }
    __device__ __forceinline__ latent_shared &sh() const
    {
        return *(latent_shared *)(base + LATENT_Q_BYTES + 2 * LATENT_BUFFER_BYTES);
    }
};

/* Keys [begin, end) of the item: those that any row sees, and which. */
static __device__ __forceinline__ void latent_set_keys(const hopper_args &a, latent_tile &t,
                                                       const folioi_cuda_seq &s, int32_t begin,
                                                       int32_t end)
{
    int64_t left = a.layer.window_left, right = a.layer.window_right;
    int64_t own = s.first_query_pos + t.first_query - s.first_key_pos;
    t.begins = {left < 0 ? 0 : cut_far(own - left), left >= 0, begin};
    t.ends = {s.causal    ? cut_far(own + 1)
              : right < 0 ? s.key_len
                          : cut_far(own + right + 1),
              s.causal || right >= 0, end};
    bool any = end > begin;
    t.seen_begin = any ? begin : 0;
    t.seen_end = any ? end : 0;
    t.first = t.seen_begin / LATENT_KEYS;
    t.num_keys = max((t.seen_end + LATENT_KEYS - 1) / LATENT_KEYS - t.first, 1);
    t.common = {begin_of(t.begins, max(t.out.num_queries, 1) - 1), end_of(t.ends, 0)};
}

/* Tile number n of all: units of an item, which read the same keys if they are of one kv head, follow one another. */
static __device__ __forceinline__ void latent_find_tile(const hopper_args &a, int32_t n,
                                                        latent_tile &t)
{
    int32_t unit = n % a.units, kv_head = unit / a.head_slices;
    int32_t head_slice = unit - kv_head * a.head_slices;
    const folioi_prefill_item item = load_item(a.items + n / a.units);
    const folioi_cuda_rows &out = a.layer.out;
    t.first_query = item.first_query;
    t.query_row = item.sequence.query_row + item.first_query;
    t.table = item.sequence.table;
    t.kv_head = kv_head;
    t.first_head = kv_head * a.heads_per_kv + head_slice * a.heads;
    t.out = {(uint16_t *)out.data + t.query_row * out.token + t.first_head * out.head,
             item.num_queries, min(a.heads, a.heads_per_kv - head_slice * a.heads)};
    t.part = item.part;
    t.num_parts = item.num_parts;
    t.store = item.store;
    t.counter = item.counter;
    t.unit = unit;
    latent_set_keys(a, t, item.sequence, item.begin, item.end);
}

#endif
