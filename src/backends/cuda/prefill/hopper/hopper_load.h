/*
 * hopper_load.h: the warps that bring what is computed with. One takes tiles from the list, ahead of the others, so that
 * nobody waits for memory's answers there. One brings pages of K and V, in the order in which they are used, one rows of q.
 */
#ifndef FOLIOI_CUDA_HOPPER_LOAD_H
#define FOLIOI_CUDA_HOPPER_LOAD_H

#include "backends/cuda/prefill/hopper/hopper_tile.h"

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

    __device__ __forceinline__ void go_to(const hopper_args &a, int32_t key_tile)
    {
        int32_t lane = (int)threadIdx.x % WARP; /* past 8: pages of the next key tiles */
        int32_t page = key_tile * (KEYS / PAGE_KEYS) + (lane & 7) - (lane & ~7);
        key = page * PAGE_KEYS;
        index = a.page_shift >= 0 ? page >> a.page_shift : page / a.block_pages;
        in_block = page - index * a.block_pages;
    }

    __device__ __forceinline__ void go_back(const hopper_args &a)
    {
        key -= KEYS;
        index -= a.tile_blocks;
        in_block -= a.tile_pages;
        if (in_block < 0) in_block += a.block_pages, index--;
    }
};

/* Key tiles of a tile to their stages, from the last on: a lane for each page. */
static __device__ __forceinline__ void load_keys(const hopper_args &a, const hopper_memory &m,
                                                 const hopper_tile &t, page_walk &walk,
                                                 stage_at &at)
{
    int lane = threadIdx.x % WARP;
    tile_keys keys = t.keys;
    int32_t first = keys.first, begin = t.begins.cut, end = t.ends.cut;
    int32_t key_len = t.key_len;
    const int32_t *table = a.blocks + t.table;
    const char *head = a.layer.k + 2 * (t.kv_head * a.layer.at.head);
    int pages = keys.pages <= 4 ? 4 : 8;
    walk.go_to(a, keys.last);
    for (int32_t i = keys.last; i >= first; i--, pages = 8) {
        bool is_seen = walk.key < end && walk.key + PAGE_KEYS > begin;
        int64_t block = is_seen ? __ldg(table + walk.index) : 0; /* of the next too: to L1 */
        uint32_t filled = shared_address(&m.sh().filled[at.stage]);
        uint32_t to = m.kv() + at.stage * STAGE_BYTES + lane * PAGE_BYTES;
        bulk_wait(shared_address(&m.sh().emptied[at.stage]), at.phase);
        if (lane == 0) bulk_expect(filled, pages * PAGE_BYTES);
        __syncwarp();
        const char *from = head + block * a.layer.at.block * 2 + walk.in_block * PAGE_BYTES;
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
template <bool WHOLE>
static __device__ __forceinline__ void take_tiles(const hopper_args &a, const hopper_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    int32_t n = (int32_t)blockIdx.x;
    if (!WHOLE && 1 << a.most_shift == a.units)
        prefetch(a.items + (n >> a.most_shift)); /* a guess, while the head comes */
    tile_order order(a, WHOLE ? a.whole : *a.head);
    int32_t total = order.num_items * a.units;
    for (tile_at at = {0, 1, 0};; at.step()) { /* the first time around, places are empty */
        hopper_tile &t = m.sh().tiles[at.place];
        int32_t next = n < total ? atomicAdd(a.counters, 1) : 0;
        barrier_wait_idly(shared_address(&m.sh().tile_emptied[at.place]), at.phase);
        if (n < total) find_tile<WHOLE>(a, order, n, t);
        else t.keys = {1, 0, 0, 0};
        barrier_arrive(shared_address(&m.sh().tile_filled[at.place]));
        if (n >= total) return;
        if (next == total - 1) *a.counters = 0;
        n = next + (int32_t)gridDim.x;
    }
}

static __device__ __forceinline__ void load_all_keys(const hopper_args &a, const hopper_memory &m)
{
    stage_at at = {0, 1}; /* the first time around, stages are empty */
    page_walk walk;
    int32_t entry = (int32_t)blockIdx.x * WARP; /* block tables: each block brings a line to L2 */
    if (entry < a.table_len) prefetch(a.blocks + entry);
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&m.sh().tile_filled[on.place]), on.phase);
        if (m.sh().tiles[on.place].keys.is_none) return;
        load_keys(a, m, m.sh().tiles[on.place], walk, at);
    }
}

/* A box of q, rows of one warpgroup or, where a query is of both, of both. is_odd: of the tile's number. */
static __device__ __forceinline__ void load_queries(const hopper_args &a, const hopper_memory &m,
                                                    const hopper_tile &t, int box, uint32_t is_odd)
{
    hopper_shared &sh = m.sh();
    bool is_both = a.q_boxes == 1, is_none = t.keys.is_none;
    int queries = a.queries / a.q_boxes;
    uint32_t to = m.q() + box * GROUP_ROWS * 128, filled = shared_address(&sh.q_filled[box]);
    int32_t row = (int32_t)t.query_row + box * queries;
    barrier_wait_idly(shared_address(&sh.q_emptied[box]), is_odd ^ 1);
    if (is_both) barrier_wait_idly(shared_address(&sh.q_emptied[1]), is_odd ^ 1);
    bulk_expect(filled, is_none ? 0 : queries * a.heads * DIMS * 2);
    for (int panel = 0; panel < 2 && !is_none; panel++)
        copy_box(to + panel * Q_PANEL_BYTES, &a.q, panel * 64, t.first_head, row, filled);
    if (!is_both) return;
    barrier_wait_idly(filled, is_odd);
    barrier_arrive(shared_address(&sh.q_filled[1]));
}

/* Boxes [first, past) of all tiles. Rows of a ragged tile that are none come along, and are another's or zeros. */
static __device__ __forceinline__ void load_all_queries(const hopper_args &a,
                                                        const hopper_memory &m, int first, int past)
{
    if (threadIdx.x % WARP != 0 || first >= past) return;
    hopper_shared &sh = m.sh();
    prefetch_map(&a.q);
    bool is_none = false;
#pragma unroll 1
    for (tile_at at = {0, 0, 0}; !is_none; at.step()) {
        const hopper_tile &t = sh.tiles[at.place];
        barrier_wait_idly(shared_address(&sh.tile_filled[at.place]), at.phase);
        is_none = t.keys.is_none;
#pragma unroll 1
        for (int box = first; box < past; box++) load_queries(a, m, t, box, at.odd);
    }
}

#endif
