/*
 * latent_load.h: the warps that bring what latent attention computes with: one takes tiles from the list, one brings keys,
 * one brings rows of q. Keys that no row sees are some that a row sees: their weights are zeros (latent_step.h).
 */
#ifndef FOLIOI_CUDA_LATENT_LOAD_H
#define FOLIOI_CUDA_LATENT_LOAD_H

#include "backends/cuda/prefill/hopper/latent_tile.h"

/* take_tiles of latent tiles: see there. */
static __device__ __forceinline__ void latent_take_tiles(const hopper_args &a,
                                                         const latent_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    int32_t n = (int32_t)blockIdx.x;
    prefetch(a.items + n / a.units); /* while the head comes */
    int32_t total = a.head->num_items * a.units;
    for (tile_at at = {0, 1, 0};; at.step()) { /* the first time around, places are empty */
        latent_tile &t = m.sh().tiles[at.place];
        int32_t next = n < total ? atomicAdd(a.counters, 1) : 0;
        barrier_wait_idly(shared_address(&m.sh().tile_emptied[at.place]), at.phase);
        if (n < total) latent_find_tile(a, n, t);
        else t.num_keys = 0;
        barrier_arrive(shared_address(&m.sh().tile_filled[at.place]));
        if (n >= total) return;
        if (next == total - 1) *a.counters = 0;
        n = next + (int32_t)gridDim.x;
    }
}

/* The place of a key in the block table. */
static __device__ __forceinline__ int32_t latent_index(const hopper_args &a, int32_t key)
{
    int32_t page = key / PAGE_KEYS;
    return a.page_shift >= 0 ? page >> a.page_shift : page / a.block_pages;
}

/* Where 8 keys of a head lie, of which `key` is one. */
static __device__ __forceinline__ const char *latent_band(const hopper_args &a, const char *head,
                                                          int32_t key, int64_t block)
{
    int32_t token = key - latent_index(a, key) * a.layer.block_size;
    return head + block * a.layer.at.block * 2 + token / 8 * LATENT_BAND_BYTES;
}

/*
 * 64 keys to buffer b, half of V after half: who computes waits for each. Warpgroup b is done with its half first, so that half
 * comes first. With the other comes the rope panel, where weights were until then. Each of eight lanes brings 8 keys, from
 * its own `from`.
 */
static __device__ __forceinline__ void latent_load_keys(const latent_memory &m, const char *from,
                                                        int b, uint32_t phase)
{
    constexpr int ROPE_AT = LATENT_ROPE * LATENT_PANEL_BYTES;
    int lane = threadIdx.x % WARP;
    latent_shared &sh = m.sh();
    uint32_t to = m.buffer(b) + lane * LATENT_BAND_BYTES;
#pragma unroll
    for (int late = 0; late < 2; late++) {
        int half = b ^ late, at = half * LATENT_HALF_PANELS * LATENT_PANEL_BYTES;
        int panels = LATENT_HALF_PANELS + (late && half == 1); /* the rope panel follows half 1 */
        uint32_t filled = shared_address(&sh.filled[b][late]);
        bulk_wait(shared_address(&sh.emptied[b][late]), phase);
        if (lane == 0) bulk_expect(filled, 8 * (LATENT_HALF_PANELS + late) * LATENT_PANEL_BYTES);
        __syncwarp();
        if (lane >= 8) continue;
        bulk_copy(to + at, from + at, panels * LATENT_PANEL_BYTES, filled);
        if (late && half == 0) bulk_copy(to + ROPE_AT, from + ROPE_AT, LATENT_PANEL_BYTES, filled);
    }
}

static __device__ __forceinline__ void latent_load_all_keys(const hopper_args &a,
                                                            const latent_memory &m)
{
    uint32_t phases = 3; /* of the two buffers: the first time around, they are empty */
    int32_t entry = (int32_t)blockIdx.x * WARP; /* block tables: each block brings a line to L2 */
    if (entry < a.table_len) prefetch(a.blocks + entry);
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&m.sh().tile_filled[on.place]), on.phase);
        const latent_tile &t = m.sh().tiles[on.place];
        int32_t count = t.num_keys, begin = t.seen_begin, last = max(t.seen_end - 1, begin);
        if (count == 0) return;
        const int32_t *table = a.blocks + t.table;
        const char *head = a.layer.k + 2 * (t.kv_head * a.layer.at.head);
        int32_t key = t.first * LATENT_KEYS + (int)threadIdx.x % 8 * 8;
        bool is_none = t.seen_end == 0; /* nothing may be read: any place of the cache will do */
        int32_t seen = min(max(key, begin), last);
        int64_t block = is_none ? 0 : __ldg(table + latent_index(a, seen));
        for (int32_t i = 0; i < count; i++) {
            const char *from = latent_band(a, head, seen, block);
            key += LATENT_KEYS;
            seen = min(key, last);
            if (i + 1 < count) block = __ldg(table + latent_index(a, seen)); /* comes meanwhile */
            latent_load_keys(m, from, i & 1, phases >> (i & 1) & 1);
            phases ^= 1 << (i & 1);
        }
    }
}

/* Rows of a tile that are none come along, and are another's or zeros. */
static __device__ __forceinline__ void latent_load_all_queries(const hopper_args &a,
                                                               const latent_memory &m)
{
    if (threadIdx.x % WARP != 0) return;
    latent_shared &sh = m.sh();
    uint32_t filled = shared_address(&sh.q_filled);
    prefetch_map(&a.q);
#pragma unroll 1
    for (tile_at at = {0, 0, 0};; at.step()) {
        const latent_tile &t = sh.tiles[at.place];
        barrier_wait_idly(shared_address(&sh.tile_filled[at.place]), at.phase);
        if (t.num_keys == 0) return;
        int32_t first_head = t.first_head, row = (int32_t)t.query_row;
        barrier_wait_idly(shared_address(&sh.q_emptied), at.odd ^ 1);
        bulk_expect(filled, a.queries * a.heads * LATENT_DIMS * 2);
#pragma unroll 1
        for (int panel = 0; panel < LATENT_PANELS; panel++)
            copy_box(m.q() + panel * LATENT_Q_PANEL_BYTES, &a.q, panel * 64, first_head, row,
                     filled);
    }
}

#endif
