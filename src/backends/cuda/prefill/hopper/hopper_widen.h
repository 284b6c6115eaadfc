/*
 * hopper_widen.h: K and V of 8 bits. A warp brings their rows as they are stored, K of a key tile and then its V; a warpgroup
 * stores them as 16-bit numbers, in the order of native pages, for products.
 *
 * That warpgroup takes some tokens at a time, 16 numbers a thread. Four threads have 64 neighbouring numbers of a token and
 * the next four those of the next one: what eight threads store goes to all banks.
 */
#ifndef FOLIOI_CUDA_HOPPER_WIDEN_H
#define FOLIOI_CUDA_HOPPER_WIDEN_H

#include "backends/cuda/decode/decode_widen.h"
#include "backends/cuda/prefill/hopper/hopper_load.h"

/* ---- brought ---- */

/* int8: scales of a key tile's keys, a lane's every 32nd. They come while their place is awaited. */
template <class I> struct byte_scales {
    static constexpr int COUNT = (I::KEYS + WARP - 1) / WARP;
    float of_lane[COUNT];

    __device__ __forceinline__ void load(const float *scales, const folioi_address &at,
                                         const tile_of<I> &t, int32_t block, int32_t in_block,
                                         int32_t left)
    {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int32_t key = i * WARP + lane, stored;
            int64_t there = __shfl_sync(ALL_LANES, block, key / PAGE_KEYS);
            stored = __shfl_sync(ALL_LANES, in_block, key / PAGE_KEYS) * PAGE_KEYS;
            of_lane[i] = 0.0f;
            if (there >= 0 && key < I::KEYS && key < left)
                of_lane[i] =
                    __ldg(scales + stored_row(at, there, t.kv_head, stored + key % PAGE_KEYS));
        }
    }

    __device__ __forceinline__ void store(float *to) const
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int32_t key = i * WARP + (int)(threadIdx.x % WARP);
            if (key < I::KEYS) to[key] = of_lane[i];
        }
    }
};

/* K or V of a key tile, by pages; zeros where no row sees a page. block: of a lane's page, or -1. */
template <class I>
static __device__ __forceinline__ void load_bytes(const hopper_args &a, const hopper_memory<I> &m,
                                                  const tile_of<I> &t, stage_at<I::RAWS> &at,
                                                  const CUtensorMap *map, int32_t y, int32_t z,
                                                  bool is_seen, const byte_scales<I> &scales)
{
    constexpr int BYTES = PAGE_KEYS * I::DK;
    int lane = threadIdx.x % WARP;
    uint32_t filled = shared_address(&m.sh().raw_filled[at.stage]);
    uint32_t to = m.raw() + at.stage * I::RAW_BYTES + lane * BYTES;
    bulk_wait(shared_address(&m.sh().raw_emptied[at.stage]), at.phase);
    if (I::INT8) scales.store(m.sh().raw_scales[at.stage]);
    __syncwarp();
    if (lane == 0) bulk_expect(filled, I::PAGES * BYTES);
    __syncwarp();
    if (lane < I::PAGES && is_seen) copy_box(to, map, y, z, filled);
    else if (lane < I::PAGES) bulk_copy(to, zero_page, BYTES, filled);
    at.step();
}

/* Key tiles of a tile, from the last on. */
template <class I>
static __device__ __forceinline__ void load_tile_bytes(const hopper_args &a,
                                                       const hopper_memory<I> &m,
                                                       const tile_of<I> &t, page_walk<I> &walk,
                                                       stage_at<I::RAWS> &at)
{
    const hopper_bytes &b = a.bytes;
    tile_keys keys = t.keys;
    int32_t begin = t.begins.cut, end = t.ends.cut;
    const int32_t *table = a.blocks + t.table;
    walk.go_to(a, keys.last);
    for (int32_t i = keys.last; i >= keys.first; i--) {
        bool is_seen = walk.key < end && walk.key + PAGE_KEYS > begin;
        int32_t block = is_seen ? __ldg(table + walk.index) : -1, y = 2 * walk.in_block;
        byte_scales<I> scales;
        if (I::INT8)
            scales.load(b.k_scales, b.k_scales_at, t, block, walk.in_block,
                        t.key_len - i * I::KEYS);
        load_bytes(a, m, t, at, &a.boxes.k, y, block * a.boxes.k_block + t.kv_head * a.boxes.k_head,
                   is_seen, scales);
        if (I::INT8)
            scales.load(b.v_scales, b.v_scales_at, t, block, walk.in_block,
                        t.key_len - i * I::KEYS);
        load_bytes(a, m, t, at, &a.boxes.v, y, block * a.boxes.v_block + t.kv_head * a.boxes.v_head,
                   is_seen, scales);
        walk.go_back(a);
    }
}

/* load_all_keys of 8-bit ones. */
template <class I>
static __device__ __forceinline__ void load_all_bytes(const hopper_args &a,
                                                      const hopper_memory<I> &m)
{
    stage_at<I::RAWS> at = {0, 1};
    page_walk<I> walk;
    int32_t entry = (int32_t)blockIdx.x * WARP; /* block tables: each block brings a line to L2 */
    if (entry < a.table_len) prefetch(a.blocks + entry);
    prefetch_map(&a.boxes.k), prefetch_map(&a.boxes.v);
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&m.sh().tile_filled[on.place]), on.phase);
        if (m.sh().tiles[on.place].keys.is_none) return;
        load_tile_bytes(a, m, m.sh().tiles[on.place], walk, at);
    }
}

/* ---- widened ---- */

/* The thread's number in its warpgroup, anew: what follows from it takes no registers across key tiles. */
static __device__ __forceinline__ uint32_t fresh_thread()
{
    uint32_t thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    return thread;
}

/* How the rows of a key tile are shared among the threads. */
template <class I> struct byte_share {
    static_assert(I::DK == I::DV, "K and V are shared in the same way");
    static constexpr int CHUNKS = I::DK / 16;      /* of a row */
    static constexpr int TOKENS = 128 / CHUNKS;    /* that the warpgroup takes at once */
    static constexpr int STEPS = I::KEYS / TOKENS; /* times it takes some */
    static_assert(I::KEYS % TOKENS == 0, "steps are whole");
    int32_t token, chunk; /* the thread's, of the first step */

    __device__ __forceinline__ byte_share()
    {
        uint32_t thread = fresh_thread(), lane = thread % WARP;
        token = thread / WARP * (TOKENS / 4) + (lane >> 2 & 1) + lane / (2 * CHUNKS) * 2;
        chunk = (lane & 3) + (lane >> 3) % (CHUNKS / 4) * 4;
    }
};

/* Bytes A and B of x, neighbours, as numbers of type T. */
template <int KV, typename T, int A, int B>
static __device__ __forceinline__ uint32_t widen_to(uint32_t x)
{
    if constexpr (!IS_BF16<T>) return widen<KV, A, B>(x);
    else if constexpr (KV == FOLIO_INT8) return int8_to_bf16<A, B>(x);
    else return f16_to_bf16(widen<KV, A, B>(x));
}

/* 8 numbers. SCALED: int8, times a scale. */
template <int KV, typename T, bool SCALED>
static __device__ __forceinline__ uint4 widen_eight(uint32_t x, uint32_t y, float scale)
{
    if constexpr (SCALED)
        return make_uint4(scale_int8<T, 0, 1>(x, scale), scale_int8<T, 2, 3>(x, scale),
                          scale_int8<T, 0, 1>(y, scale), scale_int8<T, 2, 3>(y, scale));
    else
        return make_uint4(widen_to<KV, T, 0, 1>(x), widen_to<KV, T, 2, 3>(x),
                          widen_to<KV, T, 0, 1>(y), widen_to<KV, T, 2, 3>(y));
}

/* 16 numbers as they are stored; SCALED: and their scale. */
template <bool SCALED> struct raw_numbers {
    uint32_t x[4];
    float scale;

    __device__ __forceinline__ void load(uint32_t from, uint32_t scale_at)
    {
        load_shared(x, from);
        scale = SCALED ? short_scale(load_shared_float(scale_at)) : 1.0f;
    }
};

/*
 * A thread's numbers of K, or of V, of a key tile's first `keys` keys: from where they are as stored to their stage. Those of
 * AHEAD steps are on their way to registers, so that none is waited for.
 */
template <class I, int AHEAD, bool IS_V>
static __device__ __forceinline__ void widen_rows(const hopper_memory<I> &m, uint32_t to, int raw,
                                                  int32_t keys)
{
    using T = typename std::conditional<IS_V, typename I::W, typename I::T>::type;
    using S = byte_share<I>;
    constexpr int BAND = IS_V ? I::V_STEP : I::K_STEP, STEP = S::TOKENS * I::DK;
    constexpr bool SCALED = IS_V && I::INT8;
    S mine;
    int unit = mine.chunk * 2;
    uint32_t from = m.raw() + raw * I::RAW_BYTES + mine.token * I::DK + mine.chunk * 16;
    uint32_t scales = shared_address(m.sh().raw_scales[SCALED ? raw : 0]) + mine.token * 4;
    to += mine.token / 8 * BAND + unit / 8 * PANEL_BYTES + mine.token % 8 * 128 +
          ((unit ^ mine.token) & 7) * 16;
    uint32_t to_next = to ^ 16;
    raw_numbers<SCALED> ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ahead[i].load(from + i * STEP, scales + i * S::TOKENS * 4);
#pragma unroll
    for (int i = 0; i < S::STEPS; i++) {
        if (I::EARLY && i * S::TOKENS >= keys) break;
        raw_numbers<SCALED> &r = ahead[i % AHEAD];
        uint4 low = widen_eight<I::KV, T, SCALED>(r.x[0], r.x[1], r.scale);
        uint4 high = widen_eight<I::KV, T, SCALED>(r.x[2], r.x[3], r.scale);
        int next = i + AHEAD, at = i * S::TOKENS / 8 * BAND;
        if (next < S::STEPS) r.load(from + next * STEP, scales + next * S::TOKENS * 4);
        store_shared(to + at, low);
        store_shared(to_next + at, high);
    }
}

/* V past the sequence's last key, `left` of the key tile's: zeros, by the thread that widens it. */
template <class I>
static __device__ __forceinline__ void zero_rows(const hopper_memory<I> &m, int raw, int32_t left)
{
    byte_share<I> mine;
    uint32_t at = m.raw() + raw * I::RAW_BYTES + mine.token * I::DK + mine.chunk * 16;
#pragma unroll 1
    for (int32_t key = mine.token; key < I::KEYS; key += mine.TOKENS, at += mine.TOKENS * I::DK)
        if (key >= left) store_shared(at, make_uint4(0, 0, 0, 0));
}

/* int8: what scores of the stage's keys are multiplied with. */
template <class I>
static __device__ __forceinline__ void put_key_scales(const hopper_args &a,
                                                      const hopper_memory<I> &m, int stage, int raw)
{
    if constexpr (I::INT8) {
        uint32_t key = fresh_thread();
        if (key < I::KEYS)
            m.sh().key_scales[stage][key] = m.sh().raw_scales[raw][key] * a.scale_log2;
    }
}

/* The warp has come so far: what it stored may be read by products, what it read may be replaced. */
static __device__ __forceinline__ void pass(const uint64_t &barrier)
{
    if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&barrier));
}

/* K and V of a key tile, of which `keys` are used and `left` are the sequence's. */
template <class I, int AHEAD>
static __device__ __forceinline__ void widen_keys(const hopper_args &a, const hopper_memory<I> &m,
                                                  const stage_at<I::STAGES> &at,
                                                  stage_at<I::RAWS> &raw, int32_t keys,
                                                  int32_t left)
{
    hopper_shared<I> &sh = m.sh();
    bulk_wait(shared_address(&sh.raw_filled[raw.stage]), raw.phase);
    bulk_wait(shared_address(&sh.emptied[at.stage]), at.phase);
    widen_rows<I, AHEAD, false>(m, m.kv() + at.stage * I::K_STAGE, raw.stage, keys);
    put_key_scales(a, m, at.stage, raw.stage);
    if (I::SPLIT) bulk_fence();
    __syncwarp();
    pass(sh.raw_emptied[raw.stage]);
    if (I::SPLIT) pass(sh.filled[at.stage]);
    raw.step();
    bulk_wait(shared_address(&sh.raw_filled[raw.stage]), raw.phase);
    if (I::SPLIT) bulk_wait(shared_address(&sh.v_emptied[at.stage]), at.phase);
    if (left < I::KEYS) zero_rows(m, raw.stage, left);
    widen_rows<I, AHEAD, true>(m, m.kv() + I::V_AT + at.stage * I::V_STAGE, raw.stage, keys);
    bulk_fence();
    __syncwarp();
    pass(sh.raw_emptied[raw.stage]);
    pass(I::SPLIT ? sh.v_filled[at.stage] : sh.filled[at.stage]);
    raw.step();
}

/* Key tiles of all tiles. */
template <class I, int AHEAD>
static __device__ __forceinline__ void widen_all(const hopper_args &a, const hopper_memory<I> &m)
{
    stage_at<I::STAGES> at = {0, 1}; /* the first time around, stages are empty */
    stage_at<I::RAWS> raw = {0, 0};
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&m.sh().tile_filled[on.place]), on.phase);
        tile_keys keys = m.sh().tiles[on.place].keys;
        if (keys.is_none) return;
        int32_t key_len = m.sh().tiles[on.place].key_len;
        int32_t used = I::EARLY && keys.pages <= I::PAGES / 2 ? I::KEYS / 2 : I::KEYS;
#pragma unroll 1
        for (int32_t i = keys.last; i >= keys.first; i--, used = I::KEYS) {
            widen_keys<I, AHEAD>(a, m, at, raw, used, key_len - i * I::KEYS);
            at.step();
        }
    }
}

#endif
