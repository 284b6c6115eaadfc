/*
 * prefill_load.h: the warps that bring what is computed with. One takes tiles from the list, ahead of the others, so that
 * nobody waits for memory's answers there. One brings pages of K and V, in the order in which they are used; two bring rows
 * of q, one for each warpgroup.
 */
#ifndef FOLIOI_CUDA_HOPPER_LOAD_H
#define FOLIOI_CUDA_HOPPER_LOAD_H

#include "backends/cuda/hopper/prefill_tile.h"

/* A page of zeros: for keys that nobody sees, whose places in the cache may hold anything. */
static __device__ uint4 zero_page[PAGE_BYTES / 16];

/* Where a page of 16 keys lies, or zeros. */
static __device__ __forceinline__ const char *find_page(const hopper_args &a, const hopper_tile &t,
                                                        int32_t key)
{
    if (key >= t.end || key + PAGE_KEYS <= t.begin) return (const char *)zero_page;
    int32_t size = a.layer.block_size, index = key / size;
    int64_t block = __ldg(a.blocks + t.sequence.table + index);
    return a.layer.k.base + 2 * stored_row(a.layer.k.at, block, t.kv_head, key - index * size);
}

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

/* Key tile i of a tile to its stage: a lane for each page. */
static __device__ __forceinline__ void load_keys(const hopper_args &a, const hopper_memory &m,
                                                 const hopper_tile &t, int32_t i, int pages,
                                                 const stage_at &at)
{
    int lane = threadIdx.x % WARP;
    int32_t key = i * KEYS + lane * PAGE_KEYS;
    const char *from = lane < pages ? find_page(a, t, key) : NULL;
    uint32_t filled = shared_address(&m.sh().filled[at.stage]);
    bulk_wait(shared_address(&m.sh().emptied[at.stage]), at.phase);
    if (lane == 0) bulk_expect(filled, pages * PAGE_BYTES);
    __syncwarp();
    if (lane >= pages) return;
    uint32_t to = m.kv() + at.stage * STAGE_BYTES + lane * PAGE_BYTES;
    bool is_last = from != (const char *)zero_page && key + PAGE_KEYS > t.sequence.key_len;
    if (is_last) copy_last_page(to, from, t.sequence.key_len - key, filled);
    else bulk_copy(to, from, PAGE_BYTES, filled);
}

/*
 * Take tiles until there are none. The first is the block's own; each one taken asks for another, so that the last to ask is
 * the one that gets the last number, and sets it back for the next launch.
 */
static __device__ __forceinline__ void take_tiles(const hopper_args &a, const hopper_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    int32_t total = a.head->num_items * a.units, n = (int32_t)blockIdx.x;
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        hopper_tile &t = m.sh().tiles[place];
        bulk_wait(shared_address(&m.sh().tile_emptied[place]), (count / TILES_AHEAD & 1) ^ 1);
        t.is_none = n >= total;
        if (n < total) find_tile(a, n, t);
        barrier_arrive(shared_address(&m.sh().tile_filled[place]));
        if (n >= total) return;
        int32_t next = atomicAdd(a.counters, 1);
        if (next == total - 1) *a.counters = 0;
        n = next + (int32_t)gridDim.x;
    }
}

/* Keys of all tiles. */
static __device__ __forceinline__ void load_all_keys(const hopper_args &a, const hopper_memory &m)
{
    stage_at at = {0, 1}; /* the first time around, stages are empty */
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        const hopper_tile &t = m.sh().tiles[place];
        bulk_wait(shared_address(&m.sh().tile_filled[place]), count / TILES_AHEAD & 1);
        if (t.is_none) return;
        int32_t last = last_keys(t), first = first_keys(t);
        for (int32_t i = last; i >= first; i--) {
            /* values of a tile's last step are multiplied in whole stages */
            int pages = i == last && i > first && ends_early(t) ? 4 : 8;
            load_keys(a, m, t, i, pages, at);
            at.step();
        }
    }
}

/* A warpgroup's rows of q, two to a lane; zeros for those that are none. */
static __device__ __forceinline__ void copy_queries(const hopper_args &a, const hopper_tile &t,
                                                    uint32_t to, int group, uint32_t filled)
{
    const folioi_cuda_rows &q = a.layer.q;
    int lane = threadIdx.x % WARP;
    if (lane == 0) bulk_expect(filled, GROUP_ROWS * DIMS * 2);
    __syncwarp();
#pragma unroll
    for (int row = lane; row < GROUP_ROWS; row += WARP) {
        row_place p = place_of(a, t, group * GROUP_ROWS + row);
        const uint16_t *from =
            (const uint16_t *)q.data + (t.sequence.query_row + p.query) * q.token + p.head * q.head;
        bulk_copy(to + row * Q_ROW, p.query < 0 ? (const void *)zero_page : from, DIMS * 2, filled);
    }
}

static __device__ __forceinline__ void load_all_queries(const hopper_args &a,
                                                        const hopper_memory &m, int group)
{
    for (int32_t count = 0;; count++) {
        int place = count % TILES_AHEAD;
        const hopper_tile &t = m.sh().tiles[place];
        bulk_wait(shared_address(&m.sh().tile_filled[place]), count / TILES_AHEAD & 1);
        bulk_wait(shared_address(&m.sh().q_emptied[group]), (count & 1) ^ 1);
        uint32_t filled = shared_address(&m.sh().q_filled[group]);
        if (t.is_none) {
            if (threadIdx.x % WARP == 0) barrier_arrive(filled);
            return;
        }
        copy_queries(a, t, m.q() + group * Q_BYTES, group, filled);
    }
}

#endif
