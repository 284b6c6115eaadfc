/*
 * prefill_load.h: the warps that bring what is computed with. One takes tiles from the list, ahead of the others, so that
 * nobody waits for memory's answers there. One brings pages of K and V, in the order in which they are used, one rows of q.
 */
#ifndef FOLIOI_CUDA_HOPPER_LOAD_H
#define FOLIOI_CUDA_HOPPER_LOAD_H

#include "backends/cuda/prefill/hopper/prefill_tile.h"

/* A page of zeros: for keys that nobody sees, whose places in the cache may hold anything. */
static __device__ uint4 zero_page[PAGE_BYTES / 16];

/* A page whose last tokens are not the sequence's: in their places V is zeros. K may be anything there. */
static __device__ __forceinline__ void copy_last_page(uint32_t to, const char *from, int32_t tokens,
                                                      uint32_t barrier)
{
#pragma unroll 1
    for (int half = 0; half < 2; half++, to += HALF_BYTES, from += HALF_BYTES) {
        int bytes = max(0, min(tokens - half * 8, 8)) * 128;
        bulk_copy(to, from, HALF_BYTES / 2, barrier);
#pragma unroll 1
        for (int v = HALF_BYTES / 2; v < HALF_BYTES; v += PANEL_BYTES) {
            if (bytes > 0) bulk_copy(to + v, from + v, bytes, barrier);
            if (bytes < PANEL_BYTES)
                bulk_copy(to + v + bytes, zero_page, PANEL_BYTES - bytes, barrier);
        }
    }
}

/* A lane's page of a key tile: its first key, and its place in the table and in the block there. */
struct page_walk {
    int32_t key, index, in_block;
    int32_t blocks, pages; /* from a key tile to the one before */

    __device__ __forceinline__ page_walk(const hopper_args &a)
        : blocks(KEYS / PAGE_KEYS / a.block_pages), pages(KEYS / PAGE_KEYS - blocks * a.block_pages)
    {
    }

    __device__ __forceinline__ void go_to(const hopper_args &a, int32_t key_tile)
    {
        int32_t page = key_tile * (KEYS / PAGE_KEYS) + (int)threadIdx.x % WARP;
        key = page * PAGE_KEYS;
        index = page / a.block_pages;
        in_block = page - index * a.block_pages;
    }

    __device__ __forceinline__ void go_back(const hopper_args &a)
    {
        key -= KEYS;
        index -= blocks;
        in_block -= pages;
        if (in_block < 0) in_block += a.block_pages, index--;
    }
};

/* Key tiles of a tile to their stages, from the last on: a lane for each page. */
static __device__ __forceinline__ void load_keys(const hopper_args &a, const hopper_memory &m,
                                                 const hopper_tile &t, page_walk &walk,
                                                 stage_at &at)
{
    int lane = threadIdx.x % WARP;
    int32_t last = last_keys(t), first = first_keys(t), begin = t.begin, end = t.end;
    int32_t key_len = t.sequence.key_len;
    const int32_t *table = a.blocks + t.sequence.table;
    const char *head = a.layer.k.base + 2 * (t.kv_head * a.layer.k.at.head);
    int pages = last > first && ends_early(t) ? 4 : 8; /* of a tile's last step, all are read */
    walk.go_to(a, last);
    for (int32_t i = last; i >= first; i--, pages = 8) {
        bool is_seen = walk.key < end && walk.key + PAGE_KEYS > begin;
        int64_t block = is_seen && lane < pages ? __ldg(table + walk.index) : 0;
        uint32_t filled = shared_address(&m.sh().filled[at.stage]);
        uint32_t to = m.kv() + at.stage * STAGE_BYTES + lane * PAGE_BYTES;
        bulk_wait(shared_address(&m.sh().emptied[at.stage]), at.phase);
        if (lane == 0) bulk_expect(filled, pages * PAGE_BYTES);
        __syncwarp();
        const char *from = head + block * a.layer.k.at.block * 2 + walk.in_block * PAGE_BYTES;
        if (!is_seen) from = (const char *)zero_page;
        if (lane < pages) {
            if (is_seen && walk.key + PAGE_KEYS > key_len)
                copy_last_page(to, from, key_len - walk.key, filled);
            else bulk_copy(to, from, PAGE_BYTES, filled);
        }
        at.step();
        walk.go_back(a);
    }
}

/*
 * Take tiles until there are none. The first is the block's own; each one taken asks for another, so that the last to ask is
 * the one that gets the last number, and sets it back for the next launch.
 */
static __device__ __forceinline__ void take_tiles(const hopper_args &a, const hopper_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    int32_t n = (int32_t)blockIdx.x;
    prefetch(a.items + n / a.units); /* a guess, while the head comes */
    tile_order order = order_of(a);
    int32_t total = order.num_items * a.units;
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        hopper_tile &t = m.sh().tiles[place];
        int32_t next = n < total ? atomicAdd(a.counters, 1) : 0;
        bulk_wait(shared_address(&m.sh().tile_emptied[place]), (count / TILES_AHEAD & 1) ^ 1);
        t.is_none = n >= total;
        if (n < total) find_tile(a, order, n, t);
        barrier_arrive(shared_address(&m.sh().tile_filled[place]));
        if (n >= total) return;
        if (next == total - 1) *a.counters = 0;
        n = next + (int32_t)gridDim.x;
    }
}

static __device__ __forceinline__ void load_all_keys(const hopper_args &a, const hopper_memory &m)
{
    stage_at at = {0, 1}; /* the first time around, stages are empty */
    page_walk walk(a);
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        bulk_wait(shared_address(&m.sh().tile_filled[place]), count / TILES_AHEAD & 1);
        if (m.sh().tiles[place].is_none) return;
        load_keys(a, m, m.sh().tiles[place], walk, at);
    }
}

/* Rows of q of all tiles. Those of a ragged tile that are none come along, and are another's or zeros. */
static __device__ __forceinline__ void load_all_queries(const hopper_args &a,
                                                        const hopper_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    prefetch_map(&a.q);
    uint32_t filled = shared_address(&m.sh().q_filled);
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        const hopper_tile &t = m.sh().tiles[place];
        bulk_wait(shared_address(&m.sh().tile_filled[place]), count / TILES_AHEAD & 1);
        bulk_wait(shared_address(&m.sh().q_emptied), (count & 1) ^ 1);
        if (t.is_none) {
            barrier_arrive(filled);
            return;
        }
        bulk_expect(filled, a.queries * a.heads * DIMS * 2);
        int32_t row = (int32_t)t.sequence.query_row + t.first_query;
        for (int panel = 0; panel < 2; panel++)
            copy_box(m.q() + panel * Q_PANEL_BYTES, &a.q, panel * 64, t.first_head, row, filled);
    }
}

#endif
