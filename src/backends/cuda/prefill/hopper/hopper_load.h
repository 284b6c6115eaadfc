/*
 * hopper_load.h: the warps that bring what is computed with. One takes tiles from the list, ahead of the others, so that
 * nobody waits for memory's answers there. One brings pages of K and V, in the order in which they are used, one rows of q.
 */
#ifndef FOLIOI_CUDA_HOPPER_LOAD_H
#define FOLIOI_CUDA_HOPPER_LOAD_H

#include "backends/cuda/prefill/hopper/hopper_tile.h"

/* For keys that nobody sees, whose places in the cache may hold anything. */
static __device__ uint4 zero_page[ZERO_BYTES / 16];

/* Bytes of a panel that are the sequence's, of whose tokens `tokens` are in it or behind it. */
static __device__ __forceinline__ int panel_bytes(int32_t tokens)
{
    return max(0, min(tokens, 8)) * 128;
}

/* A page whose last tokens are not the sequence's. K may be anything there; of V zeros take their place. */
template <class I>
static __device__ __forceinline__ void copy_last_page(uint32_t to, const char *from, int32_t tokens,
                                                      uint32_t barrier)
{
#pragma unroll 1
    for (int half = 0; half < 2; half++, to += I::HALF_BYTES, from += I::HALF_BYTES) {
        int bytes = panel_bytes(tokens - half * 8);
        bulk_copy(to, from, I::K_BYTES, barrier);
#pragma unroll 1
        for (int v = I::K_BYTES; v < I::HALF_BYTES; v += PANEL_BYTES) {
            if (bytes > 0) bulk_copy(to + v, from + v, bytes, barrier);
            if (bytes < PANEL_BYTES)
                bulk_copy(to + v + bytes, zero_page, PANEL_BYTES - bytes, barrier);
        }
    }
}

/* A lane's page of a key tile: its first key, and its place in the table and in the block there. */
template <class I> struct page_walk {
    int32_t key, index, in_block;

    __device__ __forceinline__ void go_to(const hopper_args &a, int32_t key_tile)
    {
        uint32_t lane = threadIdx.x % WARP;
        /* past I::PAGES: pages of the next key tiles */
        int32_t page =
            key_tile * I::PAGES + (int)(lane % I::PAGES) - (int)(lane / I::PAGES * I::PAGES);
        key = page * PAGE_KEYS;
        index = a.page_shift >= 0 ? page >> a.page_shift : page / a.block_pages;
        in_block = page - index * a.block_pages;
    }

    __device__ __forceinline__ void go_back(const hopper_args &a)
    {
        key -= I::KEYS;
        index -= a.tile_blocks;
        in_block -= a.tile_pages;
        if (in_block < 0) in_block += a.block_pages, index--;
    }
};

/* The first `pages` pages of a key tile: a lane's page, of which `tokens` are the sequence's. is_seen: by any row. */
template <class I>
static __device__ __forceinline__ void load_pages(const hopper_memory<I> &m,
                                                  const stage_at<I::STAGES> &at, const char *from,
                                                  int pages, bool is_seen, int32_t tokens)
{
    int lane = threadIdx.x % WARP;
    uint32_t filled = shared_address(&m.sh().filled[at.stage]);
    uint32_t to = m.kv() + at.stage * I::K_STAGE + lane * I::PAGE_BYTES;
    bulk_wait(shared_address(&m.sh().emptied[at.stage]), at.phase);
    if (lane == 0) bulk_expect(filled, pages * I::PAGE_BYTES);
    __syncwarp();
    if (!is_seen) from = (const char *)zero_page;
    if (lane < pages) {
        if (is_seen && tokens < PAGE_KEYS) copy_last_page<I>(to, from, tokens, filled);
        else bulk_copy(to, from, I::PAGE_BYTES, filled);
    }
}

/*
 * V of 16 rows whose last ones are not the sequence's, by the whole warp: zeros take their place. Of a lane's rows `tokens`
 * are the sequence's; `which` lane has them.
 */
template <class I>
static __device__ __forceinline__ void store_last_values(const hopper_args &a, const tile_of<I> &t,
                                                         uint32_t to, int64_t block,
                                                         int32_t in_block, int32_t tokens,
                                                         int which)
{
    constexpr int UNITS = I::DV / 8, OF_PANEL = I::PANEL / 8; /* 16 bytes, of a row */
    block = __shfl_sync(ALL_LANES, block, which);
    in_block = __shfl_sync(ALL_LANES, in_block, which);
    tokens = __shfl_sync(ALL_LANES, tokens, which);
    to = __shfl_sync(ALL_LANES, to, which);
#pragma unroll 4
    for (int i = threadIdx.x % WARP; i < PAGE_KEYS * UNITS; i += WARP) {
        int token = i / UNITS, unit = i % UNITS;
        int32_t stored = in_block * PAGE_KEYS + min(token, tokens - 1);
        const char *from = a.layer.v + 2 * stored_row(a.boxes.v_at, block, t.kv_head, stored) +
                           row_byte(!I::FROM_ROWS, stored, unit * 16);
        uint4 x = __ldg((const uint4 *)from);
        if (token >= tokens) x = make_uint4(0, 0, 0, 0);
        store_shared(to + token / 8 * I::V_BYTES + unit / OF_PANEL * I::PANEL_STEP +
                         token % 8 * (I::PANEL * 2) +
                         ((unit ^ token % 8 / (64 / I::PANEL)) & (OF_PANEL - 1)) * 16,
                     x);
    }
    bulk_fence();
    __syncwarp();
}

/* The first `pages` pages of a key tile by boxes of 16 tokens, K and V. */
template <class I>
static __device__ __forceinline__ void load_boxes(const hopper_args &a, const hopper_memory<I> &m,
                                                  const tile_of<I> &t,
                                                  const stage_at<I::STAGES> &at, int64_t block,
                                                  int32_t in_block, int pages, bool is_seen,
                                                  int32_t tokens)
{
    constexpr int K_PAGE = 2 * I::K_BYTES, V_PAGE = 2 * I::V_BYTES;
    hopper_shared<I> &sh = m.sh();
    int lane = threadIdx.x % WARP;
    bool is_mine = lane < pages, is_last = is_mine && is_seen && tokens < PAGE_KEYS;
    uint32_t last = __ballot_sync(ALL_LANES, is_last); /* one lane, or none */
    uint32_t filled = shared_address(&sh.filled[at.stage]), v_filled = filled;
    uint32_t to = m.kv() + at.stage * I::K_STAGE + lane * K_PAGE;
    uint32_t v_to = m.kv() + I::V_AT + at.stage * I::V_STAGE + lane * V_PAGE;
    int v_bytes = (pages - (last != 0)) * V_PAGE;
    bulk_wait(shared_address(&sh.emptied[at.stage]), at.phase);
    if (!I::SPLIT && last != 0)
        store_last_values<I>(a, t, v_to, block, in_block, tokens, __ffs(last) - 1);
    if (lane == 0) bulk_expect(filled, pages * K_PAGE + (I::SPLIT ? 0 : v_bytes));
    __syncwarp();
    if (is_mine && is_seen)
        copy_box(to, &a.boxes.k, 2 * in_block,
                 (int32_t)block * a.boxes.k_block + t.kv_head * a.boxes.k_head, filled);
    else if (is_mine) bulk_copy(to, zero_page, K_PAGE, filled);
    if constexpr (I::SPLIT) {
        v_filled = shared_address(&sh.v_filled[at.stage]);
        bulk_wait(shared_address(&sh.v_emptied[at.stage]), at.phase);
        if (last != 0) store_last_values<I>(a, t, v_to, block, in_block, tokens, __ffs(last) - 1);
        if (lane == 0) bulk_expect(v_filled, v_bytes);
        __syncwarp();
    }
    if (is_mine && !is_seen) bulk_copy(v_to, zero_page, V_PAGE, v_filled);
    else if (is_mine && !is_last)
        copy_box(v_to, &a.boxes.v, 2 * in_block,
                 (int32_t)block * a.boxes.v_block + t.kv_head * a.boxes.v_head, v_filled);
}

/* Key tiles of a tile to their stages, from the last on. */
template <class I>
static __device__ __forceinline__ void load_keys(const hopper_args &a, const hopper_memory<I> &m,
                                                 const tile_of<I> &t, page_walk<I> &walk,
                                                 stage_at<I::STAGES> &at)
{
    tile_keys keys = t.keys;
    int32_t first = keys.first, begin = t.begins.cut, end = t.ends.cut;
    int32_t key_len = t.key_len;
    const int32_t *table = a.blocks + t.table;
    const char *head = a.layer.k + 2 * (t.kv_head * a.layer.at.head);
    int pages = I::EARLY && keys.pages <= I::PAGES / 2 ? I::PAGES / 2 : I::PAGES;
    walk.go_to(a, keys.last);
    for (int32_t i = keys.last; i >= first; i--, pages = I::PAGES) {
        bool is_seen = walk.key < end && walk.key + PAGE_KEYS > begin;
        int64_t block = is_seen ? __ldg(table + walk.index) : 0; /* of the next too: to L1 */
        const char *from = head + block * a.layer.at.block * 2 + walk.in_block * I::PAGE_BYTES;
        if constexpr (I::BOXES)
            load_boxes(a, m, t, at, block, walk.in_block, pages, is_seen, key_len - walk.key);
        else load_pages(m, at, from, pages, is_seen, key_len - walk.key);
        at.step();
        walk.go_back(a);
    }
}

/*
 * Take tiles until there are none. The first is the block's own; each one taken asks for another, so that the last to ask is
 * the one that gets the last number, and sets it back for the next launch.
 */
template <class I, bool WHOLE>
static __device__ __forceinline__ void take_tiles(const hopper_args &a, const hopper_memory<I> &m)
{
    if (threadIdx.x % WARP != 0) return;
    int32_t n = (int32_t)blockIdx.x;
    if (!WHOLE && 1 << a.most_shift == a.units)
        prefetch(a.items + (n >> a.most_shift)); /* a guess, while the head comes */
    tile_order order(a, WHOLE ? a.whole : *a.head, I::SECTION_KEYS);
    int32_t total = order.num_items * a.units;
    for (tile_at at = {0, 1, 0};; at.step()) { /* the first time around, places are empty */
        tile_of<I> &t = m.sh().tiles[at.place];
        int32_t next = n < total ? atomicAdd(a.counters, 1) : 0;
        barrier_wait_idly(shared_address(&m.sh().tile_emptied[at.place]), at.phase);
        if (n < total) find_tile<I, WHOLE>(a, order, n, t);
        else t.keys = {1, 0, 0, 0};
        barrier_arrive(shared_address(&m.sh().tile_filled[at.place]));
        if (n >= total) return;
        if (next == total - 1) *a.counters = 0;
        n = next + (int32_t)gridDim.x;
    }
}

template <class I>
static __device__ __forceinline__ void load_all_keys(const hopper_args &a,
                                                     const hopper_memory<I> &m)
{
    stage_at<I::STAGES> at = {0, 1}; /* the first time around, stages are empty */
    page_walk<I> walk;
    int32_t entry = (int32_t)blockIdx.x * WARP; /* block tables: each block brings a line to L2 */
    if (entry < a.table_len) prefetch(a.blocks + entry);
    if (I::BOXES) prefetch_map(&a.boxes.k), prefetch_map(&a.boxes.v);
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&m.sh().tile_filled[on.place]), on.phase);
        if (m.sh().tiles[on.place].keys.is_none) return;
        load_keys(a, m, m.sh().tiles[on.place], walk, at);
    }
}

/* A box of q, rows of one warpgroup or, where a query is of several, of all. is_odd: of the tile's number. */
template <class I>
static __device__ __forceinline__ void load_queries(const hopper_args &a, const hopper_memory<I> &m,
                                                    const tile_of<I> &t, int box, uint32_t is_odd)
{
    hopper_shared<I> &sh = m.sh();
    bool is_all = a.q_boxes == 1, is_none = t.keys.is_none;
    int queries = a.queries / a.q_boxes;
    uint32_t to = m.q() + box * (WARPGROUP_ROWS * I::PANEL * 2),
             filled = shared_address(&sh.q_filled[box]);
    int32_t row = (int32_t)t.query_row + box * queries;
    barrier_wait_idly(shared_address(&sh.q_emptied[box]), is_odd ^ 1);
    for (int i = 1; i < I::WARPGROUPS && is_all; i++)
        barrier_wait_idly(shared_address(&sh.q_emptied[i]), is_odd ^ 1);
    bulk_expect(filled, is_none ? 0 : queries * a.heads * I::DK * 2);
    for (int panel = 0; panel < I::DK / I::PANEL && !is_none; panel++)
        copy_box(to + panel * I::Q_PANEL_BYTES, &a.q, panel * I::PANEL, t.first_head, row, filled);
    if (!is_all) return;
    barrier_wait_idly(filled, is_odd);
    for (int i = 1; i < I::WARPGROUPS; i++) barrier_arrive(shared_address(&sh.q_filled[i]));
}

/* Boxes [first, past) of all tiles. Rows of a ragged tile that are none come along, and are another's or zeros. */
template <class I>
static __device__ __forceinline__ void load_all_queries(const hopper_args &a,
                                                        const hopper_memory<I> &m, int first,
                                                        int past)
{
    if (threadIdx.x % WARP != 0 || first >= past) return;
    hopper_shared<I> &sh = m.sh();
    prefetch_map(&a.q);
    bool is_none = false;
#pragma unroll 1
    for (tile_at at = {0, 0, 0}; !is_none; at.step()) {
        const tile_of<I> &t = sh.tiles[at.place];
        barrier_wait_idly(shared_address(&sh.tile_filled[at.place]), at.phase);
        is_none = t.keys.is_none;
#pragma unroll 1
        for (int box = first; box < past; box++) load_queries(a, m, t, box, at.odd);
    }
}

#endif
